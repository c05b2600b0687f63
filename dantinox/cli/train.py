"""`dantinox train | init`: their flags, and what they call."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from dantinox.cli.common import check_plot, use_compilation_cache, whole_number
from dantinox.config import UserError, dump_config, load_config
from dantinox.config.flags import Parser, add_config_flags, overrides
from dantinox.config.start import DEFAULT, build_training, load_training, starting_config
from dantinox.files import atomic_write


def train_flags(command: Parser) -> None:
    command.add_argument("--config", type=Path, help=f"a YAML file, or a config of the package (default: {DEFAULT})")
    command.add_argument("--run_dir", type=Path, help="where to write (default: runs/run_YYYYMMDD_HHMMSS)")
    command.add_argument("--resume", action="store_true", help="go on from the run's latest checkpoint")
    command.add_argument("--dry_run", action="store_true", help="print the plan, the first batch, memory and time, then stop")
    command.add_argument("--print_config", action="store_true", help="print the complete settings as YAML, then stop")
    add_config_flags(command)


def train(options: argparse.Namespace) -> int:
    from dantinox.run import newest_run

    if options.resume and options.run_dir is None:
        newest = newest_run()
        hint = f": the newest is {newest}" if newest else ", and there is none in runs/"
        raise UserError(f"--resume needs --run_dir to say which run to go on with{hint}")
    saved = options.run_dir / "config.yaml" if options.resume else None
    given = overrides(options)
    path = options.config or (saved if saved and saved.is_file() else DEFAULT)
    if options.config is None and path != saved and given.get("training.init_from"):
        config = build_training({}, given)  # which has a model already
    else:
        load = load_config if path == saved else load_training  # a run has all its settings
        config = load(path, given)
    if options.print_config:
        print(dump_config(config, complete=True), end="")
        return 0
    use_compilation_cache()
    from dantinox.training import dry_run, launch

    if options.dry_run:
        dry_run(config, lambda line: print(line, flush=True))
        return 0
    launch(config, run_dir=options.run_dir, resume=options.resume)
    return 0


def find_lr_flags(command: Parser) -> None:
    command.add_argument("--config", type=Path, default=DEFAULT, help=f"as of train (default: {DEFAULT})")
    command.add_argument("--tries", type=whole_number, default=100, metavar="N", help="steps at most (default: 100)")
    command.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the loss over the learning rate")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_flags(command, ("model", "moe", "attention", "tokenizer", "data", "training", "lora"))


def find_lr(options: argparse.Namespace) -> int:
    check_plot(options)
    config = load_training(options.config, overrides(options))
    use_compilation_cache()
    from dantinox.report.plots import draw_rates
    from dantinox.training.find_lr import find_lr, rate_lines

    found = find_lr(config, options.tries, lambda line: print(line, file=sys.stderr, flush=True))
    for line in [json.dumps(asdict(found))] if options.json else rate_lines(found):
        print(line)
    if options.plot is not None:
        marks = {"suggested": found.suggested, "lowest": found.lowest}
        atomic_write(options.plot, draw_rates(found.key, found.rates, found.losses, found.smoothed, marks))
    return 0


def init_flags(command: Parser) -> None:
    command.add_argument("file", type=Path, help="the YAML file to write")


def init(options: argparse.Namespace) -> int:
    if options.file.exists():
        raise UserError(f"{options.file} is there already: choose another name")
    from dantinox.platform import platform_of

    cpus = os.cpu_count() if platform_of().name == "cpu" else None
    atomic_write(options.file, starting_config(options.file, cpus))
    return 0
