"""`dantinox verify`: its flags, what it calls, what it prints."""

import argparse

from dantinox.cli.common import add_run
from dantinox.config.flags import Parser

DAMAGED = 1


def verify_flags(command: Parser) -> None:
    add_run(command, "the run directory")
    accept = "take settings, tokenizer, weights and tokens as they are now for what was written; checkpoints stay as they are"
    command.add_argument("--accept", action="store_true", help=accept)


def verify(options: argparse.Namespace) -> int:
    """Exits with 0 where every file is what was written, else with 1."""
    from dantinox.report.tables import human_bytes
    from dantinox.run import RunDirectory, accept_run, verify_run

    run = RunDirectory(options.run_dir)
    if options.accept:
        for name in accept_run(run):
            print(f"accepted {run.path / name}")
    found = verify_run(run)
    for sentence in (*found.remarks, *found.damage):
        print(sentence)
    whole = "all as they were written" if not found.damage else f"{len(found.damage)} damaged or missing"
    print(f"{found.files} files, {human_bytes(found.bytes)}: {whole}")
    return DAMAGED if found.damage else 0
