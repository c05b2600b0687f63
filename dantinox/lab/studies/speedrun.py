"""`dantinox speedrun`: pretraining, fine-tuning and reinforcement learning, in a folder with one
run directory per stage.

Each stage is a training run with a packaged config, as `dantinox train` starts it, in its own
process. `speedrun.json` lists the finished stages and their times: the same command continues an
interrupted speedrun and does not repeat finished stages.
"""

import json
import math
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dantinox.config.names import SHORT_NAMES, flat_name
from dantinox.config.sections import flatten_config
from dantinox.config.sweep_file import Trial
from dantinox.config.yaml_files import load_training
from dantinox.files import UserError, atomic_write, quote, read_json, wrap_os_errors
from dantinox.model.flops import training_flops
from dantinox.report import read_csv
from dantinox.report.metric_files import best_evaluation
from dantinox.run import RunDirectory, load_run_config
from dantinox.text import Corpus, Tokenizer
from dantinox.text.corpus_files import ADDITION

STATE_FILE = "speedrun.json"
MAX_JSON_BYTES = 1 << 20  # of the state, and of the summary of a stage
REPORTS = ("report.md", "report.html")
HUB = "huggingface:"  # begins the name of a dataset in `SpeedrunRequest.data`
TrainStage = Callable[[Trial, RunDirectory], str | None]


class Stage(NamedTuple):
    """A training run of the speedrun.

    Attributes:
      name: its run directory in the folder of the speedrun.
      config: the packaged config.
      rates: setting → its value as a fraction of the one of pretraining, for the learning rates.
      smoke: the settings that shorten it to a few steps.
    """

    name: str
    config: str
    rates: Mapping[str, float]
    smoke: Mapping[str, Any]


STAGES = (
    Stage(
        "base", "speedrun", {},
        {"training.tokens_per_parameter": 0.05, "training.eval_tokens": 1024,
         "tokenizer.vocab_size": 300},
    ),
    Stage(
        "sft", "speedrun_sft", {"training.lr": 0.5, "training.muon_lr": 0.5},
        {"training.epochs": 0.05, "training.warmup_steps": 1, "training.eval_tokens": 1024},
    ),
    Stage(
        "grpo", "speedrun_grpo", {"training.lr": 1 / 64},
        {"training.steps": 2, "training.warmup_steps": 1, "training.batch_size": 4,
         "training.eval_tokens": 256},
    ),
)  # fmt: skip
BASE = STAGES[0].name
SFT = STAGES[1].name
FINAL = STAGES[-1].name


@dataclass(frozen=True)
class SpeedrunRequest:
    """What a speedrun trains.

    Attributes:
      depth: `model.depth` of the model.
      data: the text to pretrain on, as in `data.path`, or `huggingface:NAME[:CONFIGURATION]` for a
        dataset of the hub. None: that of the config, the sources of the standard library.
      sft_data: conversations to fine-tune on, as in `data.path`, together with sums. None: those of
        the config.
      tokens_per_parameter: the length of pretraining, `training.tokens_per_parameter`. None: that
        of the config.
      smoke: train only a few steps per stage, to check that everything works.
    """

    depth: int = 4
    data: str | None = None
    sft_data: str | None = None
    tokens_per_parameter: float | None = None
    smoke: bool = False


@dataclass(frozen=True)
class StageResult:
    """The result of one stage.

    Attributes:
      command: the command that trains the same run.
      parameters: parameters of the model.
      tokens: positions in all batches.
      flops: model FLOPs of the training steps, by `dantinox.model.flops.training_flops`.
      seconds: wall time, with start-up, compilation, evaluations and checkpoints.
      val_loss, bits_per_byte, reward: of the best evaluation, whose weights the run keeps;
        `best_step` is its step. None if the objective does not have it.
    """

    name: str
    command: str
    parameters: int
    steps: int
    tokens: int
    flops: int
    seconds: float
    val_loss: float | None
    bits_per_byte: float | None
    reward: float | None
    best_step: int


def data_settings(data: str) -> dict[str, Any]:
    """Returns the settings for `SpeedrunRequest.data`: dotted path → value."""
    if not data.startswith(HUB):
        return {"data.path": data}
    name, _, configuration = data.removeprefix(HUB).partition(":")
    settings = {"data.path": name, "data.dataset_source": "huggingface"}
    if configuration:
        settings["data.dataset_config"] = configuration
    return settings


def stage_settings(request: SpeedrunRequest, folder: Path, number: int) -> dict[str, Any]:
    """Returns the settings of a stage that differ from its packaged config: dotted path → value.

    Args:
      number: the index of the stage. The run of the stage before must have a config.
    """
    stage = STAGES[number]
    settings = dict[str, Any]()
    if number == 0:
        settings["model.depth"] = request.depth
        settings |= data_settings(request.data) if request.data is not None else {}
    else:
        base = flatten_config(load_run_config(RunDirectory(folder / BASE)))
        settings["training.init_from"] = str(folder / STAGES[number - 1].name)
        settings |= {
            key: float(f"{share * float(str(base[key])):.3g}") for key, share in stage.rates.items()
        }
    if stage.name == SFT and request.sft_data is not None:
        settings |= {"data.path": [request.sft_data, ADDITION], "data.mixture": [0.9, 0.1]}
    settings |= stage.smoke if request.smoke else {}
    if number == 0 and request.tokens_per_parameter is not None:
        settings["training.tokens_per_parameter"] = request.tokens_per_parameter
    return settings


def train_command(config: str, settings: Mapping[str, Any], run_dir: Path) -> str:
    """Returns the command that trains a run."""
    short = {key: name for name, key in SHORT_NAMES.items()}
    texts = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in settings.items()
    }
    flags = [
        f"--{short.get(key, flat_name(key))} {shlex.quote(text)}" for key, text in texts.items()
    ]
    return " ".join(
        [f"dantinox train --config {config}", *flags, f"--run_dir {shlex.quote(str(run_dir))}"]
    )


def run_speedrun(
    folder: Path,
    request: SpeedrunRequest,
    train: TrainStage,
    progress: Callable[[str], None] = lambda line: None,
) -> list[StageResult]:
    """Trains the stages that are not finished yet, and returns the results of all.

    Args:
      folder: the folder of the speedrun; it must be new, empty, or of the same request.
      train: trains a stage or resumes it in its directory; returns a sentence on what went wrong,
        or None.
      progress: called with the command of each stage before it starts.

    Raises:
      UserError: the folder holds something else, another process uses it, or a stage failed.
      SystemExit: after SIGTERM or SIGINT, with the stage saved.
    """
    # A wrong setting or path must leave no folder.
    load_training(STAGES[0].config, stage_settings(request, folder, 0))
    if request.data is not None and not request.data.startswith(HUB):
        Corpus.open(request.data)
    if request.sft_data is not None:
        Corpus.open(request.sft_data)
    directory = RunDirectory(folder)
    with wrap_os_errors(f"cannot create the directory {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    with directory.lock():
        state = _load_state(folder, request)
        for number, stage in enumerate(STAGES):
            run = RunDirectory(folder / stage.name)
            if stage.name in state["finished"] and run.weights.is_file():
                progress(f"{stage.name}: finished in {folder / stage.name}")
                continue
            _train_stage(folder, request, number, train, progress, state)
        return [
            _stage_result(folder, request, number, state["seconds"])
            for number in range(len(STAGES))
        ]


def _train_stage(
    folder: Path,
    request: SpeedrunRequest,
    number: int,
    train: TrainStage,
    progress: Callable[[str], None],
    state: dict[str, Any],
) -> None:
    """Trains or resumes a stage, and records its time and its end."""
    stage = STAGES[number]
    path = folder / STAGES[number].name
    run = RunDirectory(path)
    # Read the saved settings, which a later version of the packaged config does not change.
    if run.config.is_file():
        config = load_run_config(run)
        command = f"dantinox train --resume --run_dir {shlex.quote(str(path))}"
    else:
        later = next(
            (other.name for other in STAGES[number + 1 :] if (folder / other.name).exists()), None
        )
        if later is not None:
            raise UserError(
                f"{folder / later} was trained on an earlier {path}, which is missing: remove"
                f" {folder / later}"
            )
        settings = stage_settings(request, folder, number)
        config = load_training(stage.config, settings)
        command = train_command(stage.config, settings, path)
    progress(f"{stage.name}: {command}")
    started = time.perf_counter()
    try:
        problem = train(Trial(stage.name, {}, config), run)
    finally:
        before = state["seconds"].get(stage.name, 0.0)
        state["seconds"][stage.name] = before + time.perf_counter() - started
        _save_state(folder, state)
    if problem:
        raise UserError(problem)
    state["finished"].append(stage.name)
    _save_state(folder, state)


def _load_state(folder: Path, request: SpeedrunRequest) -> dict[str, Any]:
    """Returns the state of a speedrun: the request, the finished stages and the seconds of each
    stage.

    Raises:
      UserError: the state cannot be read or is that of another request, or the folder has no state
        and is not empty.
    """
    file = folder / STATE_FILE
    if not file.exists():
        unexpected = sorted(child.name for child in folder.iterdir() if child.name != ".lock")
        if unexpected:
            raise UserError(
                f"{folder} is not empty and not a speedrun (it has {unexpected[0]}):"
                " choose another --run_dir"
            )
        state = {"request": asdict(request), "finished": [], "seconds": {}}
        _save_state(folder, state)
        return state
    try:
        saved = read_json(file, MAX_JSON_BYTES)
        before = dict(saved["request"])
        seconds = {str(name): float(number) for name, number in saved["seconds"].items()}
        state = {"request": before, "finished": list(saved["finished"]), "seconds": seconds}
    except (UserError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise UserError(f"{file} cannot be read: choose another --run_dir") from None
    for name, value in asdict(request).items():
        if before.get(name) != value:
            raise UserError(
                f"{folder} was started with {name} {quote(before.get(name))}, got {quote(value)}:"
                " choose another --run_dir"
            )
    return state


def _save_state(folder: Path, state: Mapping[str, Any]) -> None:
    atomic_write(folder / STATE_FILE, json.dumps(state, indent=1) + "\n")


def _stage_result(
    folder: Path, request: SpeedrunRequest, number: int, seconds: Mapping[str, float]
) -> StageResult:
    """Reads the result of a finished stage from its logs and its summary."""
    stage = STAGES[number]
    run = RunDirectory(folder / STAGES[number].name)
    config = load_run_config(run)
    rewarded = config.training.objective == "grpo"
    rows = read_csv(run.log(config))
    best = best_evaluation(rows)
    if not best:
        measure = "val_reward" if rewarded else "val_loss"
        raise UserError(
            f"{folder / stage.name} has no {measure} in {run.log(config).name}: remove it and"
            " repeat the command"
        )
    try:
        parameters = int(read_json(run.summary(config), MAX_JSON_BYTES)["parameters"])
    except (UserError, ValueError, KeyError, TypeError, OverflowError):
        raise UserError(
            f"{run.summary(config)} is damaged: remove {run.path} and repeat the command"
        ) from None
    model = config.trained_architecture(Tokenizer.load(run.tokenizer).vocab_size)
    steps = int(rows[-1]["step"])
    tokens = int(rows[-1]["tokens"])
    sequences = config.training.batch_size * (config.grpo.samples if rewarded else 1)
    return StageResult(
        name=stage.name,
        command=train_command(
            stage.config, stage_settings(request, folder, number), folder / stage.name
        ),
        parameters=parameters,
        steps=steps,
        tokens=tokens,
        flops=tokens * training_flops(model, tokens // (steps * sequences)),
        seconds=float(seconds.get(stage.name, math.nan)),
        val_loss=best.get("val_loss"),
        bits_per_byte=best.get("bits_per_byte"),
        reward=best.get("val_reward"),
        best_step=int(best["step"]),
    )
