"""The time of a training step, and the number of steps that `training.max_minutes` allows."""

import time
from collections.abc import Callable
from functools import partial

import jax

from dantinox.config import Config
from dantinox.config.sections import find_inactive, reset_settings
from dantinox.distributed import broadcast_from_rank0, make_layout
from dantinox.model.lora import frozen_parameters
from dantinox.model.parameters import init_parameters
from dantinox.training.memory import check_memory, keep_freed_memory
from dantinox.training.objective import random_batch
from dantinox.training.step import Metrics, Programs, TrainStep, select_rows
from dantinox.training.teacher import open_teacher

# Length of the schedule if the settings give epochs: `benchmark_step` does not read the corpus, so
# it cannot count the steps.
DEFAULT_STEPS = 1000
MEASURED_SECONDS = 1.0  # minimum duration of a measurement; a single step may be longer


def set_steps(config: Config, steps: int) -> Config:
    """Returns the settings with this number of steps and without the settings that then have no
    effect.
    """
    changed: dict[str, int | None] = {"steps": steps}
    if (config.training.warmup_steps or 0) > steps:
        changed["warmup_steps"] = None  # a tenth of the steps
    config = config.model_copy(update={"training": config.training.model_copy(update=changed)})
    return reset_settings(config, find_inactive(config))


def limited_steps(config: Config, steps: int, seconds: float) -> int:
    """Returns the number of steps of `seconds` each that `training.max_minutes` allows: at most
    `steps`, and at least one.
    """
    limit = config.training.max_minutes
    return steps if limit is None else min(steps, max(1, int(60 * limit / seconds)))


def limit_steps(config: Config, vocab_size: int, steps: int, note: Callable[[str], None]) -> Config:
    """Measures a step of a run and reduces the number of steps to what `training.max_minutes`
    allows.

    All processes of the run call it.

    Args:
      steps: the number of steps without the limit.

    Returns:
      The settings without `training.max_minutes`, so that a resumed run keeps the number of steps.
    """
    unlimited = reset_settings(config, ["training.max_minutes"])
    # With the same number of steps as in the run, the compilation cache has the program if the
    # limit changes nothing.
    measured = seconds_per_step(benchmark_step(set_steps(unlimited, steps), vocab_size))
    seconds = broadcast_from_rank0(lambda: measured)
    allowed = limited_steps(config, steps, seconds)
    if allowed == steps:
        return unlimited
    limit = f"training.max_minutes {config.training.max_minutes:g}"
    note(f"{limit} allows {allowed} of {steps} steps on this machine, at {seconds:.2g} s per step")
    return set_steps(unlimited, allowed)


def seconds_per_step(step: Callable[[], Metrics]) -> float:
    """Returns the mean time of a step, measured over at least `MEASURED_SECONDS` after a first step
    that is not measured.
    """
    step().loss.block_until_ready()
    count = 0
    started = time.perf_counter()
    while (passed := time.perf_counter() - started) < MEASURED_SECONDS:
        step().loss.block_until_ready()
        count += 1
    return passed / count


def benchmark_step(
    config: Config,
    vocab_size: int,
    note: Callable[[str], None] = lambda line: None,
    length: int | None = None,
) -> Callable[[], Metrics]:
    """Builds a training step with random weights and one batch of random tokens. Each call of the
    result runs a step.

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

    batch = layout.put_batch(
        partial(select_rows, rows), train_step.rows, config.training.grad_accum
    )
    shardings = layout.shardings(frozen_parameters(layout.shapes, model))
    base = jax.jit(
        lambda: frozen_parameters(init_parameters(model, config.training.seed), model),
        out_shardings=shardings,
    )()
    state = train_step.initial_state(frozen=base)
    teacher_weights = {} if teacher is None else teacher.load_weights()

    def step() -> Metrics:
        nonlocal state
        state, metrics = programs.train(state, batch, base, teacher_weights)
        return metrics

    return step
