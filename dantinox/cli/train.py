"""`dantinox train | init`: their flags, and what they call."""

import argparse
from pathlib import Path

from dantinox.cli.common import use_compilation_cache
from dantinox.config import UserError, dump_config, load_config
from dantinox.config.flags import add_config_flags, overrides
from dantinox.config.start import DEFAULT, find_config, starting_config
from dantinox.files import atomic_write


def train_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, help=f"a YAML file, or a config of the package (default: {DEFAULT})")
    command.add_argument("--run_dir", type=Path, help="where to write (default: runs/run_YYYYMMDD_HHMMSS)")
    command.add_argument("--resume", action="store_true", help="go on from the run's latest checkpoint")
    command.add_argument("--dry_run", action="store_true", help="print plan, parameters, memory and the first batch, then stop")
    command.add_argument("--print_config", action="store_true", help="print the complete settings as YAML, then stop")
    add_config_flags(command)


def train(options: argparse.Namespace) -> int:
    from dantinox.run import newest_run

    if options.resume and options.run_dir is None:
        newest = newest_run()
        hint = f": the newest is {newest}" if newest else ", and there is none in runs/"
        raise UserError(f"--resume needs --run_dir to say which run to go on with{hint}")
    saved = options.run_dir / "config.yaml" if options.resume else None
    path = options.config or (saved if saved and saved.is_file() else DEFAULT)
    config = load_config(find_config(path), overrides(options))
    if options.print_config:
        print(dump_config(config), end="")
        return 0
    use_compilation_cache()
    from dantinox.training import dry_run, launch

    if options.dry_run:
        for line in dry_run(config):
            print(line, flush=True)
        return 0
    launch(config, run_dir=options.run_dir, resume=options.resume)
    return 0


def init_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", type=Path, help="the YAML file to write")


def init(options: argparse.Namespace) -> int:
    if options.file.exists():
        raise UserError(f"{options.file} is there already: choose another name")
    atomic_write(options.file, starting_config(options.file))
    return 0
