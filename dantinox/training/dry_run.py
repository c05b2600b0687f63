"""`dantinox train --dry_run`: memory and time of a training run, without the run."""

import tempfile
from collections.abc import Callable

from dantinox.config import Config
from dantinox.text import PromptStore, prepare_data
from dantinox.training.launch import base_template, plan_lines
from dantinox.training.rewards import build_rewards
from dantinox.training.rollout_batches import rollout_length
from dantinox.training.starting_point import starting_tokenizer, total_steps
from dantinox.training.step import rows_per_step, updates_per_step
from dantinox.training.step_time import benchmark_step, limited_steps, seconds_per_step
from dantinox.training.text_samples import make_sampler
from dantinox.training.training_log import duration_line


def dry_run(config: Config, note: Callable[[str], None] = print) -> None:
    """Reports the plan, the first batch as text, memory and time of the run that `launch` would
    start.

    It creates no run directory. The time is measured on a training step with random tokens.

    Raises:
      UserError: the settings or the data are invalid, or memory is insufficient.
    """
    with tempfile.TemporaryDirectory(prefix="dantinox-") as directory:
        tokenizer, store = prepare_data(
            config, directory, starting_tokenizer(config), chat_template=base_template(config)
        )
        make_sampler(config, tokenizer)
        for line in plan_lines(config, tokenizer, store):
            note(line)
        steps = total_steps(config, store.windows_per_epoch)
        length = None
        if isinstance(store, PromptStore):
            build_rewards(config.grpo)
            length = rollout_length(config, store.longest)
            first = tokenizer.decode(store.batch(0)[0].ids)
            note(
                f"first batch: {rows_per_step(config)} answers of {length} tokens with their"
                f" prompts, first prompt: {first!r}"
            )
        else:
            tokens = store.batch(0)[0]
            first = tokenizer.decode(tokens.reshape(-1, tokens.shape[-1])[0])
            note(f"first batch: tokens {list(tokens.shape)}, first row: {first!r}")
        step = benchmark_step(config, tokenizer.vocab_size, note, length)
        seconds = seconds_per_step(step)
        steps = limited_steps(config, steps, seconds)
        note(duration_line(steps * updates_per_step(config), seconds))
        if isinstance(store, PromptStore):
            note("this is the time of the updates; sampling the answers is not measured")
