"""`dantinox train`, `find-lr`, `sweep`, `speedrun` and `init`: their flags and output."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from dantinox.cli.common import (
    CONFIG_HELP,
    check_plot,
    plain_warnings,
    print_lines,
    print_result,
    use_compilation_cache,
    whole_number,
)
from dantinox.config.flags import Parser, add_config_flags
from dantinox.config.packaged import DEFAULT_CONFIG
from dantinox.files import UserError, atomic_write, check_writable_folder, quote

MOST_USED = (
    "config", "run_dir", "resume", "dry_run", "print_config", "data_path", "dim", "num_blocks",
    "max_context", "vocab_size", "batch_size", "steps", "lr", "eval_every", "init_from",
)  # fmt: skip


def add_train_flags(command: Parser) -> None:
    command.add_argument("--config", type=Path, metavar="FILE", help=CONFIG_HELP)
    command.add_argument(
        "--run_dir",
        type=Path,
        metavar="DIR",
        help="run directory to write (default: runs/run_YYYYMMDD_HHMMSS)",
    )
    command.add_argument(
        "--resume", action="store_true", help="continue from the latest checkpoint of the run"
    )
    command.add_argument(
        "--dry_run",
        action="store_true",
        help="print the plan, the first batch, memory and time, then exit",
    )
    command.add_argument(
        "--print_config", action="store_true", help="print all settings as YAML, then exit"
    )
    add_config_flags(command, most_used=MOST_USED)


def train(options: argparse.Namespace) -> int:
    from dantinox.config import dump_config, load_config
    from dantinox.config.flag_values import overrides
    from dantinox.config.inherited_settings import build_training, load_training
    from dantinox.run import check_resumable, newest_run
    from dantinox.run.directory import check_new_run

    if options.resume and options.run_dir is None:
        newest = newest_run()
        hint = f"; the newest run is {newest}" if newest else "; runs/ contains no run"
        raise UserError(f"--resume needs --run_dir, the run to continue{hint}")
    saved = check_resumable(options.run_dir) if options.resume else None
    given = overrides(options)
    path = options.config or saved or DEFAULT_CONFIG
    if options.config is None and saved is None and given.get("training.init_from"):
        config = build_training({}, given)  # the run of init_from sets the model
    else:
        load = load_training if path != saved else load_config  # a run's config has all settings
        config = load(path, given)
    if options.print_config:
        print(dump_config(config, complete=True), end="")
        return 0
    use_compilation_cache()
    from dantinox.distributed import is_rank0
    from dantinox.training import dry_run, launch

    if options.dry_run:
        if options.run_dir is not None and not options.resume:
            check_new_run(options.run_dir)
        dry_run(config, lambda line: print(line, flush=True))
        return 0
    run = launch(config, run_dir=options.run_dir, resume=options.resume)
    if is_rank0():
        command = "chat" if run.chat_template.is_file() else "generate"
        print(f"next: dantinox {command} {shlex.quote(str(run.path))}", file=sys.stderr)
    return 0


def add_find_lr_flags(command: Parser) -> None:
    command.add_argument(
        "--config", type=Path, default=DEFAULT_CONFIG, metavar="FILE", help=CONFIG_HELP
    )
    command.add_argument(
        "--tries",
        type=whole_number,
        default=100,
        metavar="N",
        help="maximum number of steps (default: 100)",
    )
    command.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="plot the loss against the learning rate"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    sections = ("model", "moe", "attention", "tokenizer", "data", "training", "lora")
    used = (
        "config",
        "tries",
        "plot",
        "json",
        "data_path",
        "dim",
        "num_blocks",
        "max_context",
        "batch_size",
        "optimizer",
    )
    add_config_flags(command, sections, used)


def find_lr(options: argparse.Namespace) -> int:
    check_plot(options)
    from dantinox.config.flag_values import overrides
    from dantinox.config.inherited_settings import load_training

    config = load_training(options.config, overrides(options))
    use_compilation_cache()
    from dantinox.report.plots import draw_rates
    from dantinox.training.find_lr import find_lr, rate_test_lines

    found = find_lr(config, options.tries, lambda line: print(line, file=sys.stderr, flush=True))
    print_result(options, found, lambda _: rate_test_lines(found))
    if options.plot is not None:
        marks = {"suggested": found.suggested, "lowest": found.lowest}
        atomic_write(
            options.plot, draw_rates(found.key, found.rates, found.losses, found.smoothed, marks)
        )
    return 0


def add_init_flags(command: Parser) -> None:
    command.add_argument("file", type=Path, metavar="FILE", help="YAML file to write")


def init(options: argparse.Namespace) -> int:
    if options.file.exists():
        raise UserError(f"{options.file} already exists: choose another name")
    from dantinox.config.starting_config import starting_config
    from dantinox.platform import get_platform

    cpus = os.cpu_count() if get_platform().name == "cpu" else None
    atomic_write(options.file, starting_config(options.file, cpus))
    return 0


def add_sweep_flags(command: Parser) -> None:
    what = (
        "YAML file with the keys base, runs_dir, and grid or random (with trials and seed); repeat"
        " the command to continue"
    )
    command.add_argument("file", type=Path, metavar="SWEEP.yaml", help=what)
    command.add_argument(
        "--dry_run", action="store_true", help="check and print the trials, then exit"
    )
    command.add_argument(
        "--retry", action="store_true", help="repeat trials that ended with an error"
    )


def sweep(options: argparse.Namespace) -> int:
    from dantinox.config.sweep_file import load_sweep

    found = load_sweep(options.file)
    check_writable_folder(found.runs_dir, "runs_dir")
    if options.dry_run:
        for trial in found.trials:
            print(
                trial.name,
                ", ".join(f"{key} {quote(value)}" for key, value in trial.chosen.items()),
            )
        return 0
    from dantinox.lab.studies.sweep import SweepStudy, run_sweep, train_in_subprocess
    from dantinox.lab.studies.sweep_view import draw_sweep, sweep_blocks
    from dantinox.report.console import show_progress
    from dantinox.report.document import study_files, to_csv, to_lines
    from dantinox.report.plots import save_files

    def on_result(study: SweepStudy) -> None:
        atomic_write(found.runs_dir / "sweep.csv", to_csv(sweep_blocks(study)))

    study = run_sweep(found, train_in_subprocess(_prepare), show_progress, options.retry, on_result)
    blocks = list(sweep_blocks(study))
    print_lines(lambda width: to_lines(blocks, width))
    save_files(found.runs_dir, study_files("sweep", study, blocks, draw_sweep))
    return 0


def add_speedrun_flags(command: Parser) -> None:
    command.add_argument(
        "--depth",
        type=whole_number,
        default=4,
        metavar="N",
        help="model.depth of the model (default: 4)",
    )
    data = (
        "text to pretrain on, as data.path, or huggingface:NAME[:CONFIG] (default: the standard"
        " library's sources)"
    )
    command.add_argument("--data", metavar="PATH", help=data)
    conversations = (
        "conversations to fine-tune on, as data.path; arithmetic sums are added"
        " (default: builtin:instructions)"
    )
    command.add_argument("--sft_data", metavar="PATH", help=conversations)
    ratio = "training.tokens_per_parameter of pretraining (default: 0.6, for a CPU)"
    command.add_argument("--tokens_per_parameter", type=float, metavar="R", help=ratio)
    folder = (
        "folder with a run directory per stage; repeat the command to"
        " continue (default: runs/speedrun)"
    )
    command.add_argument(
        "--run_dir", type=Path, default=Path("runs/speedrun"), metavar="DIR", help=folder
    )
    command.add_argument(
        "--price",
        type=float,
        metavar="P",
        help="price of the machine per hour, for the cost in the report",
    )
    command.add_argument(
        "--smoke",
        action="store_true",
        help="train a few steps per stage, to check that everything works",
    )


def speedrun(options: argparse.Namespace) -> int:
    if options.price is not None and not 0 <= options.price < float("inf"):
        raise UserError(f"--price must be a number ≥ 0, got {options.price:g}")
    import time

    from dantinox.lab.studies.speedrun import SpeedrunRequest, run_speedrun
    from dantinox.lab.studies.sweep import train_in_subprocess
    from dantinox.report.console import show_progress
    from dantinox.report.plots import save_files

    folder = options.run_dir
    request = SpeedrunRequest(
        options.depth, options.data, options.sft_data, options.tokens_per_parameter, options.smoke
    )
    stages = run_speedrun(folder, request, train_in_subprocess(_prepare), show_progress)
    use_compilation_cache()
    from dantinox.lab.studies.speedrun_evaluation import evaluate_speedrun, evaluate_tasks_of_stages
    from dantinox.lab.studies.speedrun_view import (
        Speedrun,
        describe_device,
        speedrun_files,
        speedrun_lines,
    )

    started = time.perf_counter()
    tasks, samples = evaluate_speedrun(folder, show_progress)
    local_tasks = evaluate_tasks_of_stages(folder, options.smoke, show_progress)
    seconds = time.perf_counter() - started
    found = Speedrun(
        folder, stages, tasks, samples, local_tasks, seconds, describe_device(), options.price
    )
    save_files(folder, speedrun_files(found))
    return print_lines(lambda width: speedrun_lines(found, width))


def _prepare() -> None:
    """Prepares the subprocess of a training run as `main` prepares the process of a command."""
    plain_warnings()
    use_compilation_cache()
