"""`dantinox train --dry_run`: memory and time of a training run, without the run. Also a single step for profiling."""

import tempfile
import time
from collections.abc import Callable
from functools import partial

import jax

from dantinox.config import Config
from dantinox.distributed import make_layout
from dantinox.model.lora import frozen_parameters
from dantinox.model.parameters import init_parameters
from dantinox.text import PromptStore, prepare_data
from dantinox.training.launch import base_template, plan_lines
from dantinox.training.memory import check_memory, keep_freed_memory
from dantinox.training.objective import random_batch
from dantinox.training.resume import starting_tokenizer, total_steps
from dantinox.training.rewards import build_rewards
from dantinox.training.rollout_source import rollout_length
from dantinox.training.step import Metrics, Programs, TrainStep, rows_per_step, select_rows, updates_per_step
from dantinox.training.teacher import open_teacher
from dantinox.training.text_samples import make_sampler
from dantinox.training.training_log import duration_line

# Length of the schedule if the settings give epochs: `benchmark_step` does not read the corpus, so it cannot count the steps.
DEFAULT_STEPS = 1000


def dry_run(config: Config, note: Callable[[str], None] = print) -> None:
    """Reports the plan, the first batch as text, memory and time of the run that `launch` would start.

    It creates no run directory. The time is measured on a training step with random tokens.

    Raises:
      UserError: the settings or the data are invalid, or memory is insufficient.
    """
    with tempfile.TemporaryDirectory(prefix="dantinox-") as directory:
        tokenizer, store = prepare_data(config, directory, starting_tokenizer(config), chat_template=base_template(config))
        make_sampler(config, tokenizer)
        for line in plan_lines(config, tokenizer, store):
            note(line)
        steps, length = total_steps(config, store.windows_per_epoch), None
        if isinstance(store, PromptStore):
            build_rewards(config.grpo)
            length = rollout_length(config, store.longest)
            first = tokenizer.decode(store.batch(0)[0].ids)
            note(f"first batch: {rows_per_step(config)} answers of {length} tokens with their prompts, first prompt: {first!r}")
        else:
            tokens = store.batch(0)[0]
            first = tokenizer.decode(tokens.reshape(-1, tokens.shape[-1])[0])
            note(f"first batch: tokens {list(tokens.shape)}, first row: {first!r}")
        step = benchmark_step(config, tokenizer.vocab_size, note, length)
        step().loss.block_until_ready()
        started = time.perf_counter()
        step().loss.block_until_ready()
        note(duration_line(steps * updates_per_step(config), time.perf_counter() - started))
        if isinstance(store, PromptStore):
            note("this is the time of the updates; sampling the answers is not measured")


def benchmark_step(
    config: Config, vocab_size: int, note: Callable[[str], None] = lambda line: None, length: int | None = None
) -> Callable[[], Metrics]:
    """Builds a training step with random weights and one batch of random tokens. Each call of the result runs a step.

    Args:
      length: tokens per row; None: `model.max_context`.

    Raises:
      UserError: memory is insufficient.
    """
    keep_freed_memory()
    steps = config.training.steps or max(DEFAULT_STEPS, config.training.warmup_steps or 0)
    model = config.trained_architecture(vocab_size)
    layout = make_layout(config, model)
    teacher = open_teacher(config, layout)
    train_step = TrainStep(config, model, steps, layout, length=length, teacher=teacher)
    programs = Programs(train_step)
    note(programs.memory.line())
    check_memory(programs.memory, config)
    rows = random_batch(train_step.abstract_batch(train_step.rows), vocab_size)

    batch = layout.put_batch(partial(select_rows, rows), train_step.rows, config.training.grad_accum)
    shardings = layout.shardings(frozen_parameters(layout.shapes, model))
    base = jax.jit(lambda: frozen_parameters(init_parameters(model, config.training.seed), model), out_shardings=shardings)()
    state = train_step.initial_state(frozen=base)
    teacher_weights = {} if teacher is None else teacher.load_weights()

    def step() -> Metrics:
        nonlocal state
        state, metrics = programs.train(state, batch, base, teacher_weights)
        return metrics

    return step
