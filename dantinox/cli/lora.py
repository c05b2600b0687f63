"""`dantinox merge-lora`: its flags, and what it calls."""

import argparse
from pathlib import Path

from dantinox.config import UserError
from dantinox.config.flags import Parser


def merge_flags(command: Parser) -> None:
    command.add_argument("source", type=Path, nargs="?", metavar="RUN", help="the run that adapters were trained in")
    command.add_argument("--adapter", type=Path, metavar="DIR", help="or a folder of PEFT's, with adapter_config.json in it")
    command.add_argument("--base", type=Path, metavar="RUN", help="the run that those are for")
    command.add_argument("--run_dir", type=Path, required=True, help="the run to make: new, or empty")


def merge(options: argparse.Namespace) -> int:
    """Writes a run whose weights are those of the base with what the adapters add."""
    given = options.source, options.adapter, options.base
    if [path is None for path in given] not in ([False, True, True], [True, False, False]):
        raise UserError("merge-lora needs the run of the adapters, or --adapter and --base")
    from dantinox.interop.peft import merge_adapter
    from dantinox.run import open_run

    run = merge_adapter(options.run_dir, open_run(options.source or options.base), options.adapter)
    print(f"run directory {run.path}")
    return 0
