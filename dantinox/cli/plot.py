"""`dantinox plot` and `dantinox profile`: their flags and output."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dantinox.cli.common import add_run, print_result, whole_number
from dantinox.config.flags import Parser
from dantinox.files import UserError, check_writable, check_writable_folder

MAX_STEPS = 1000  # of a trace, which holds an event for every operation of every step


def add_plot_flags(command: Parser) -> None:
    text = "run directories; runs may still be training"
    command.add_argument("run_dirs", type=Path, nargs="*", metavar="RUN", help=text)
    command.add_argument(
        "--run_dir", type=Path, nargs="+", default=[], metavar="RUN", help="another way to give RUN"
    )
    command.add_argument(
        "--by", choices=["step", "tokens", "time"], default="step", help="x axis (default: step)"
    )
    command.add_argument(
        "--out",
        type=Path,
        metavar="FILE.png",
        help="file to write (default for one run: RUN/plots/loss_by_STEP.png)",
    )


def plot(options: argparse.Namespace) -> int:
    from dantinox.report.plots import plot_runs
    from dantinox.run import RunDirectory, load_run_config

    runs = [RunDirectory(path) for path in (*options.run_dirs, *options.run_dir)]
    if not runs:
        raise UserError("a run directory is missing: give RUN, or --run_dir RUN")
    for run in runs:
        if not run.config.is_file():
            raise UserError(f"{run.path} is not a run directory: it has no {run.config.name}")
    if options.out is None and len(runs) > 1:
        raise UserError("several runs in one figure need --out FILE.png")
    out = options.out or runs[0].plots / f"loss_by_{options.by}.png"
    if out.suffix != ".png":
        raise UserError(f"--out must name a .png file, got {out}")
    if options.out is not None:
        check_writable(out, "--out")
    names = [run.path.name for run in runs]
    logs = {
        name if names.count(name) == 1 else str(run.path): (
            run.log(load_run_config(run)),
            run.metrics,
        )
        for name, run in zip(names, runs, strict=True)
    }
    plot_runs(logs, options.by, out)
    print(out)
    return 0


def add_profile_flags(command: Parser) -> None:
    add_run(command, "run directory, YAML file or name of a packaged config")
    count = f"training steps or tokens to trace, at most {MAX_STEPS} (default: 5 steps, 32 tokens)"
    command.add_argument("--steps", type=whole_number, metavar="N", help=count)
    command.add_argument(
        "--generate",
        action="store_true",
        help="trace token generation with a run instead of training",
    )
    command.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for the trace (default: RUN/profile, or ./profile)",
    )
    command.add_argument(
        "--json", action="store_true", help="print one JSON object with all operations"
    )


def profile(options: argparse.Namespace) -> int:
    is_run = options.run_dir.is_dir()
    if options.generate and not is_run:
        raise UserError(f"--generate needs a run directory, got {options.run_dir}")
    out = options.out or (options.run_dir / "profile" if is_run else Path("profile"))
    check_writable_folder(out, "--out")
    if options.steps is not None and not 1 <= options.steps <= MAX_STEPS:
        raise UserError(f"--steps must be in [1, {MAX_STEPS}], got {options.steps}")
    from dantinox.lab.measure.profile import profile, profile_lines
    from dantinox.programs import separate_traces

    with separate_traces():
        prepare = _generation_work if options.generate else _training_work
        work, count = prepare(options.run_dir, options.steps)
        found = profile(work, count, out)
    unit = "token" if options.generate else "step"
    return print_result(options, found, lambda width: profile_lines(found, unit, width), 120)


def _training_work(subject: Path, given: int | None) -> tuple[Callable[[], Any], int]:
    """Returns a function that runs compiled training steps of a run or a config, and the number of
    steps.
    """
    from dantinox.config.inherited_settings import load_training
    from dantinox.report.console import show_progress
    from dantinox.run import RunDirectory, load_run_config
    from dantinox.text import Tokenizer
    from dantinox.training.starting_point import trained_vocab_size
    from dantinox.training.step_time import benchmark_step

    if subject.is_dir():
        run = RunDirectory(subject)
        config = load_run_config(run)
        run.check(run.tokenizer)
        vocab_size = Tokenizer.load(run.tokenizer).vocab_size
    else:
        config = load_training(subject)
        vocab_size = trained_vocab_size(config)
    step = benchmark_step(config, vocab_size, show_progress)
    step()
    step().loss.block_until_ready()
    steps = given or 5

    def train() -> Any:
        for _ in range(steps - 1):
            step()
        return step()

    return train, steps


def _generation_work(subject: Path, given: int | None) -> tuple[Callable[[], Any], int]:
    """Returns a function that generates tokens after a one-token prompt with compiled programs, and
    the number of tokens.
    """
    from dantinox.generation import load

    run = load(subject)
    longest = run.config.model.max_context - 1
    tokens = given or min(32, longest)
    if tokens > longest:
        raise UserError(
            f"--steps must be at most {longest}, the context of {subject} minus one, got {tokens}"
        )

    def generate() -> None:
        run.generate(run.tokenizer.decode([0]), max_new_tokens=tokens, ignore_eos=True, seed=0)

    generate()
    return generate, tokens
