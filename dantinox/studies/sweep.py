"""`dantinox sweep`: trainings that differ in a few settings, run one after the other.

Each trial is a run directory of its own, trained in a process of its own: memory, on a device above all, is free again when it
ends, and whatever ends it, the kernel included, is noted and the sweep goes on. `plan.json` says what is to be tried and how
each trial ended, so that a sweep that was stopped or killed goes on where it was.
"""

import json
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dantinox.config import Config
from dantinox.config.sections import DEFAULTS, flat
from dantinox.config.sweep_file import Sweep, Trial
from dantinox.files import UserError, atomic_write, quote, wrap_os_errors
from dantinox.report import read_csv, read_jsonl
from dantinox.run import RunDirectory

PLAN_FILE = "plan.json"
SIGNAL_EXIT_CODES = {128 + number: number for number in (signal.SIGINT, signal.SIGTERM)}
LOCK_TIMEOUT = 60  # seconds for what a killed sweep left behind to save and end


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended: `problem` in a sentence, or None where it finished. Numbers are None where its log has none.

    `val_loss` (nats per token), `bits_per_byte` and `best_step` are of the best evaluation, `steps` and `ms_per_step`, a
    median, of the whole run.
    """

    name: str
    chosen: dict[str, Any]
    problem: str | None
    val_loss: float | None
    bits_per_byte: float | None
    best_step: int | None
    steps: int | None
    ms_per_step: float | None


@dataclass(frozen=True)
class SweepStudy:
    """The trials that ended, best first, those with a problem last. `keys`: the settings in which they differ."""

    runs_dir: str
    keys: tuple[str, ...]
    trials: list[TrialResult]


def run_sweep(
    sweep: Sweep,
    train: Callable[[Trial, RunDirectory], str | None],
    progress: Callable[[str], None] = lambda line: None,
    retry: bool = False,
    on_result: Callable[[SweepStudy], None] = lambda study: None,
) -> SweepStudy:
    """Trains what has not been trained yet.

    Args:
      train: trains a trial into its directory, from where it stands, and says what was wrong.
      retry: try those trials again, too, that ended with a problem.
      on_result: called with the study so far each time a trial ends.

    Raises:
      UserError: the sweep is not the one that its directory was begun with, another process works on it, or a trial could not
        even begin.
      SystemExit: after SIGTERM or SIGINT, with the trial saved.
    """
    folder = _open_directory(sweep.runs_dir)
    with folder.lock():
        ended = _load_plan(sweep, folder)
        for number, trial in enumerate(sweep.trials, 1):
            if trial.name in ended and not (retry and ended[trial.name]):
                continue
            chosen_values = ", ".join(f"{key} {quote(value)}" for key, value in trial.chosen.items())
            progress(f"trial {number} of {len(sweep.trials)}: {chosen_values}")
            run = RunDirectory(folder.path / trial.name)
            problem = train(trial, run)
            if problem and not run.config.is_file():
                raise UserError(f"{trial.name} could not begin: {problem}")
            ended[trial.name] = problem
            _write_plan(sweep, folder, ended)
            one = trial_result(trial, run, problem)
            loss = "no val_loss" if one.val_loss is None else f"val_loss {one.val_loss:.4f} at {one.best_step}"
            progress(f"{trial.name}: {problem or loss}")
            on_result(_study(sweep, folder, ended))
    return _study(sweep, folder, ended)


def _study(sweep: Sweep, folder: RunDirectory, ended: dict[str, str | None]) -> SweepStudy:
    known = [trial for trial in sweep.trials if trial.name in ended]
    found = [trial_result(trial, RunDirectory(folder.path / trial.name), ended[trial.name]) for trial in known]
    found.sort(key=lambda trial: (trial.problem is not None, math.inf if trial.val_loss is None else trial.val_loss))
    return SweepStudy(str(sweep.runs_dir), sweep.keys, found)


def trial_result(trial: Trial, run: RunDirectory, problem: str | None) -> TrialResult:
    """What the logs of a trial say."""
    rows = [row for row in read_csv(run.log(trial.config)) if math.isfinite(row.get("val_loss", math.nan))]
    times = [row["ms_per_step"] for row in read_jsonl(run.metrics) if row.get("ms_per_step") is not None]
    steps = max((int(row["step"]) for row in read_jsonl(run.metrics)), default=None)
    best = min(rows, key=lambda row: row["val_loss"], default={})
    return TrialResult(
        trial.name, trial.chosen, problem, best.get("val_loss"), best.get("bits_per_byte"), int(best["step"]) if best else None,
        steps, statistics.median(times) if times else None,
    )  # fmt: skip


def _open_directory(path: Path) -> RunDirectory:
    folder = RunDirectory(path)
    with wrap_os_errors(f"cannot make the directory {path}"):
        folder.path.mkdir(parents=True, exist_ok=True)
        unexpected = [child.name for child in folder.path.iterdir() if child.name != ".lock"]
    if unexpected and not (folder.path / PLAN_FILE).is_file():
        raise UserError(f"{path} holds something else than a sweep ({sorted(unexpected)[0]}): give another runs_dir")
    return folder


def _settings(config: Config) -> dict[str, Any]:
    """What differs from the defaults, as JSON has it."""
    return json.loads(json.dumps(flat(config, changed=True)))


def _load_plan(sweep: Sweep, folder: RunDirectory) -> dict[str, str | None]:
    """Writes down what is to be tried, or compares it with what was; returns how the trials ended so far."""
    plan = folder.path / PLAN_FILE
    try:
        before = json.loads(plan.read_text()) if plan.exists() else {"trials": {}, "ended": {}}
        trials, ended = before["trials"], dict(before["ended"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{plan} cannot be read: give another runs_dir") from None
    now = {trial.name: _settings(trial.config) for trial in sweep.trials}
    for name, settings in trials.items():
        if name not in now:
            raise UserError(f"{folder.path} was begun with {len(trials)} trials, {sweep.source} has {len(now)}")
        for key in sorted({*settings, *now[name]}):
            old, new = (values.get(key, DEFAULTS.get(key)) for values in (settings, now[name]))
            if old != new:
                raise UserError(
                    f"{sweep.source} is not the sweep that {folder.path} was begun with: {name} has {key} {quote(old)} there, "
                    f"got {quote(new)} (give another runs_dir)"
                )
    _write_plan(sweep, folder, ended)
    return ended


def _write_plan(sweep: Sweep, folder: RunDirectory, ended: dict[str, str | None]) -> None:
    plan = {"trials": {trial.name: _settings(trial.config) for trial in sweep.trials}, "ended": ended}
    atomic_write(folder.path / PLAN_FILE, json.dumps(plan, indent=1) + "\n")


def train_in_subprocess(prepare: Callable[[], None]) -> Callable[[Trial, RunDirectory], str | None]:
    """Training in a process of its own, which ends, saved, when this one does; `prepare` of a module is called there first."""

    def train(trial: Trial, run: RunDirectory) -> str | None:
        _wait_for_previous_process(run)
        if not run.config.is_file():
            shutil.rmtree(run.path, ignore_errors=True)  # it was killed while its corpus was read
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_train_in_child, args=(trial.config, run.path, prepare, sender))
        received: list[int] = []

        def pass_on(number: int, _: Any) -> None:
            received.append(number)
            if process.pid is not None:
                os.kill(process.pid, number)

        handled = [number for number in SIGNAL_EXIT_CODES.values() if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, pass_on) for number in handled}
        try:
            process.start()
            sender.close()
            if received:  # while there was nobody to pass it on to
                process.terminate()
            try:
                problem = receiver.recv_bytes().decode()
            except EOFError:  # it ended and had nothing to say
                problem = None
            process.join()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        code = process.exitcode or 0
        if received or code in SIGNAL_EXIT_CODES:
            raise SystemExit(code if code in SIGNAL_EXIT_CODES else 128 + received[0])
        if problem or not code:
            return problem
        if code == -signal.SIGKILL:
            return "it was killed: perhaps memory ran out"
        return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"

    return train


def _wait_for_previous_process(run: RunDirectory) -> None:
    """Until the process of a sweep that was killed has saved and ended."""
    end = time.monotonic() + LOCK_TIMEOUT
    while run.path.is_dir():
        try:
            with run.lock():
                return
        except UserError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def _train_in_child(config: Config, path: Path, prepare: Callable[[], None], sender: Connection) -> None:
    """The other process. It hears no Ctrl-C but what the sweep passes on: a second signal would not wait for the disk."""
    os.setsid()

    def follow(parent: Any) -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, args=(multiprocessing.parent_process(),), daemon=True).start()
    try:
        prepare()
        from dantinox.training import launch

        launch(config, run_dir=path, resume=(path / "config.yaml").is_file())
    except UserError as error:
        sender.send_bytes(str(error).encode())
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
