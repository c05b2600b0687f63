"""`dantinox plot`: its flags, and what it calls."""

import argparse
from pathlib import Path

from dantinox.config import UserError
from dantinox.files import check_writable
from dantinox.report.plots import BY, plot_runs


def plot_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN", help="run directories, also of runs that still train")
    command.add_argument("--by", choices=list(BY), default="step", help="what the losses are drawn over (default: step)")
    command.add_argument("--out", type=Path, metavar="FILE.png", help="default, for a single run: RUN/plots/loss_by_STEP.png")


def plot(options: argparse.Namespace) -> int:
    from dantinox.run import RunDirectory, load_run_config

    runs = [RunDirectory(path) for path in options.run_dirs]
    for run in runs:
        if not run.config.is_file():
            raise UserError(f"{run.path} is not a run directory: it has no {run.config.name}")
    if options.out is None and len(runs) > 1:
        raise UserError("several runs in one picture need --out FILE.png")
    out = options.out or runs[0].plots / f"loss_by_{options.by}.png"
    if out.suffix != ".png":
        raise UserError(f"--out must name a .png file, got {out}")
    if options.out is not None:
        check_writable(out, "--out")
    names = [run.path.name for run in runs]
    logs = {
        name if names.count(name) == 1 else str(run.path): (run.log(load_run_config(run)), run.metrics)
        for name, run in zip(names, runs, strict=True)
    }
    plot_runs(logs, options.by, out)
    print(out)
    return 0
