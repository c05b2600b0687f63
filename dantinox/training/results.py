"""The results of a training run: exported weights, summary and loss plot."""

import json
import math
from dataclasses import asdict, replace
from typing import Any

from dantinox.config import Config, ModelConfig
from dantinox.distributed import barrier, fetch_to_host, is_rank0
from dantinox.files import UserError
from dantinox.model.parameters import abstract_model, unstack_layers
from dantinox.report import Console, plot_loss, read_jsonl
from dantinox.report.reward_page import reward_page
from dantinox.run import RunDirectory, save_weights, write_file
from dantinox.run.adapters import save_adapter
from dantinox.training.checkpoint_store import TrainingProgress
from dantinox.training.objective import OBJECTIVES
from dantinox.training.step import TrainState


def export_weights(
    run: RunDirectory, model: ModelConfig, state: TrainState, facts: dict[str, Any]
) -> None:
    """Writes the weights or adapters of a state in the format that generation reads."""
    weights = fetch_to_host(state.weights)
    if is_rank0():
        if model.lora is None:
            save_weights(run.weights, unstack_layers(weights), facts)
        else:
            save_adapter(run, unstack_layers(weights), model, facts)
    barrier()


def write_answers(run: RunDirectory, step: int, answers: str) -> None:
    """Writes the answers of a step with their rewards, in JSON Lines, and the page with all answers
    up to this step.
    """
    run.samples.mkdir(exist_ok=True)
    write_file(run.path, f"{run.samples.name}/step_{step}.jsonl", answers)
    found = {
        int(path.stem.removeprefix("step_")): path for path in run.samples.glob("step_*.jsonl")
    }
    samples = {
        number: path.read_text(encoding="utf-8") for number, path in found.items() if number <= step
    }
    write_file(run.path, run.rewards.name, reward_page(read_jsonl(run.metrics), samples))


def write_summary(
    config: Config,
    run: RunDirectory,
    model_config: ModelConfig,
    state: TrainState,
    step: int,
    tokens: int,
    progress: TrainingProgress,
    facts: dict[str, Any],
) -> None:
    """Writes the summary of a finished training run.

    Args:
      tokens: the tokens of all steps.
    """
    sizes = {
        name: math.prod(leaf.shape)
        for name, leaf in abstract_model(replace(model_config, lora=None))[1].items()
    }
    embeddings = sum(
        size for name, size in sizes.items() if not name.startswith(("blocks/", "rolled/", "norm"))
    )
    summary = {
        "parameters": sum(sizes.values()),
        "trained_parameters": sum(p.size for p in state.parameters.values()),
        "parameters_without_embeddings": sum(sizes.values()) - embeddings,
        "steps": step,
        "tokens": tokens,
        **progress.best(of_rewards=not _has_loss(config)),
        "model": asdict(model_config),
    }
    write_file(run.path, run.summary(config).name, json.dumps(summary | facts, indent=1) + "\n")


def write_plot(config: Config, run: RunDirectory, console: Console) -> None:
    """Writes a plot of the loss or the rewards of a training run, or notes why it cannot."""
    try:
        plot_loss(
            run.log(config),
            run.metrics,
            run.plots / ("loss.png" if _has_loss(config) else "reward.png"),
        )
    except UserError as error:
        console.note(f"no plot: {error}")


def _has_loss(config: Config) -> bool:
    return OBJECTIVES[config.training.objective].has_validation_loss
