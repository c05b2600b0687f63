"""`dantinox sweep`: its flags, and what it calls."""

import argparse
import shutil
from pathlib import Path

from dantinox.cli.common import plain_warnings, use_compilation_cache
from dantinox.config.flags import Parser
from dantinox.config.sweep import load_sweep
from dantinox.files import atomic_write, shown


def sweep_flags(command: Parser) -> None:
    what = "a YAML file with base, grid or random with trials and seed, and runs_dir; the same command goes on with it"
    command.add_argument("file", type=Path, metavar="SWEEP.yaml", help=what)
    command.add_argument("--dry_run", action="store_true", help="check and print the trials, then stop")
    command.add_argument("--retry", action="store_true", help="try those trials again, too, that ended with an error")


def sweep(options: argparse.Namespace) -> int:
    found = load_sweep(options.file)
    if options.dry_run:
        for trial in found.trials:
            print(trial.name, ", ".join(f"{key} {shown(value)}" for key, value in trial.chosen.items()))
        return 0
    from dantinox.report.console import show_progress
    from dantinox.report.plots import save_files
    from dantinox.studies.sweep import SweepStudy, run_sweep, train_apart
    from dantinox.studies.sweep_view import sweep_csv, sweep_files, sweep_lines

    def so_far(study: SweepStudy) -> None:
        atomic_write(found.runs_dir / "sweep.csv", sweep_csv(study))

    study = run_sweep(found, train_apart(_prepare), show_progress, options.retry, so_far)
    for line in sweep_lines(study, shutil.get_terminal_size((100, 24)).columns):
        print(line)
    save_files(found.runs_dir, sweep_files(study))
    return 0


def _prepare() -> None:
    """What the entry does for a command, in the process of a trial."""
    plain_warnings()
    use_compilation_cache()
