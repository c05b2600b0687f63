"""`dantinox sweep`: training runs that differ in a few settings, one after another.

Each trial has its own run directory and its own process, so that all its memory, device memory
included, is free when it ends. If a trial fails, even if the kernel kills it, the sweep records
that and continues. `plan.json` lists the trials and how each ended, so that an interrupted sweep
can continue.
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
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dantinox.config import Config
from dantinox.config.sections import DEFAULTS, flatten_config
from dantinox.config.sweep_file import Sweep, Trial
from dantinox.files import UserError, atomic_write, quote, read_json, wrap_os_errors
from dantinox.report import read_csv, read_jsonl
from dantinox.report.metric_files import best_evaluation, evaluation_loss
from dantinox.run import RunDirectory, save_config
from dantinox.training.signals import STOP_SIGNALS

PLAN_FILE = "plan.json"
MAX_PLAN_BYTES = 64 << 20
SIGNAL_EXIT_CODES = {128 + number: number for number in STOP_SIGNALS}
LOCK_TIMEOUT = 60  # seconds to wait for the process of a killed sweep to save and exit


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial. Numbers are None if the log does not have them.

    Attributes:
      chosen: the settings of the trial.
      problem: a sentence on what went wrong; None if the trial finished.
      val_loss, bits_per_byte, val_reward: of the best evaluation, whose step is `best_step`. The
        loss is in nats per token; training with rewards has only the reward.
      steps: number of steps of the run.
      ms_per_step: median over the run.
    """

    name: str
    chosen: dict[str, Any]
    problem: str | None
    val_loss: float | None
    bits_per_byte: float | None
    val_reward: float | None
    best_step: int | None
    steps: int | None
    ms_per_step: float | None

    @property
    def loss(self) -> float | None:
        """What the trials are ranked by, lowest first: the validation loss, or the validation
        reward times −1.
        """
        loss = evaluation_loss(asdict(self))
        return None if math.isnan(loss) else loss


@dataclass(frozen=True)
class SweepStudy:
    """The trials that have ended, best first and failed trials last. `keys` are the settings in
    which they differ.
    """

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
    """Trains the trials that have not been trained yet.

    Args:
      train: trains or resumes a trial in its directory; returns a sentence on what went wrong, or
        None.
      progress: called with a line at the start and the end of each trial.
      retry: also rerun the trials that ended with a problem.
      on_result: called with the study so far each time a trial ends.

    Raises:
      UserError: the directory contains another sweep, another process uses it, or a trial could not
        start.
      SystemExit: after SIGTERM or SIGINT, with the trial saved.
    """
    folder = _open_directory(sweep.runs_dir)
    with folder.lock():
        ended = _load_plan(sweep, folder)
        for number, trial in enumerate(sweep.trials, 1):
            if trial.name in ended and not (retry and ended[trial.name]):
                continue
            chosen_values = ", ".join(
                f"{key} {quote(value)}" for key, value in trial.chosen.items()
            )
            progress(f"trial {number} of {len(sweep.trials)}: {chosen_values}")
            run = RunDirectory(folder.path / trial.name)
            problem = train(trial, run)
            if problem and not run.config.is_file():
                raise UserError(f"{trial.name} could not start: {problem}")
            ended[trial.name] = problem
            _write_plan(sweep, folder, ended)
            result = trial_result(trial, run, problem)
            measured = {"val_loss": result.val_loss, "val_reward": result.val_reward}
            texts = [
                f"{name} {value:.4f} at {result.best_step}"
                for name, value in measured.items()
                if value is not None
            ]
            progress(f"{trial.name}: {problem or ', '.join(texts) or 'no val_loss'}")
            on_result(_study(sweep, folder, ended))
    return _study(sweep, folder, ended)


def _study(sweep: Sweep, folder: RunDirectory, ended: dict[str, str | None]) -> SweepStudy:
    known = [trial for trial in sweep.trials if trial.name in ended]
    found = [
        trial_result(trial, RunDirectory(folder.path / trial.name), ended[trial.name])
        for trial in known
    ]
    found.sort(
        key=lambda trial: (
            trial.problem is not None,
            math.inf if trial.loss is None else trial.loss,
        )
    )
    return SweepStudy(str(sweep.runs_dir), sweep.keys, found)


def trial_result(trial: Trial, run: RunDirectory, problem: str | None) -> TrialResult:
    """Reads the result of a trial from its logs."""
    rows = read_jsonl(run.metrics)
    times = [row["ms_per_step"] for row in rows if row.get("ms_per_step") is not None]
    steps = max((int(row["step"]) for row in rows), default=None)
    best = best_evaluation(read_csv(run.log(trial.config)))
    return TrialResult(
        name=trial.name,
        chosen=trial.chosen,
        problem=problem,
        val_loss=best.get("val_loss"),
        bits_per_byte=best.get("bits_per_byte"),
        val_reward=best.get("val_reward"),
        best_step=int(best["step"]) if best else None,
        steps=steps,
        ms_per_step=statistics.median(times) if times else None,
    )


def _open_directory(path: Path) -> RunDirectory:
    folder = RunDirectory(path)
    with wrap_os_errors(f"cannot create the directory {path}"):
        folder.path.mkdir(parents=True, exist_ok=True)
        unexpected = [child.name for child in folder.path.iterdir() if child.name != ".lock"]
    if unexpected and not (folder.path / PLAN_FILE).is_file():
        raise UserError(
            f"{path} is not empty and not a sweep (it has {sorted(unexpected)[0]}):"
            " choose another runs_dir"
        )
    return folder


def _settings(config: Config) -> dict[str, Any]:
    """Returns the settings that differ from the defaults, as JSON values."""
    return json.loads(json.dumps(flatten_config(config, changed=True)))


def _load_plan(sweep: Sweep, folder: RunDirectory) -> dict[str, str | None]:
    """Writes the plan, or compares it with an existing one. Returns how the trials ended so far:
    name → problem or None.

    Raises:
      UserError: the existing plan cannot be read, or differs.
    """
    plan = folder.path / PLAN_FILE
    try:
        before = read_json(plan, MAX_PLAN_BYTES) if plan.exists() else {"trials": {}, "ended": {}}
        trials = {name: dict(settings) for name, settings in before["trials"].items()}
        ended = dict(before["ended"])
    except (UserError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{plan} cannot be read: choose another runs_dir") from None
    now = {trial.name: _settings(trial.config) for trial in sweep.trials}
    for name, settings in trials.items():
        if name not in now:
            raise UserError(
                f"the sweep in {folder.path} has {len(trials)} trials, but {sweep.source} has"
                f" {len(now)}"
            )
        for key in sorted({*settings, *now[name]}):
            old, new = (values.get(key, DEFAULTS.get(key)) for values in (settings, now[name]))
            if old != new:
                raise UserError(
                    f"{sweep.source} differs from the sweep in {folder.path}: {name} has {key}"
                    f" {quote(old)} there, got {quote(new)} (choose another runs_dir)"
                )
    _write_plan(sweep, folder, ended)
    return ended


def _write_plan(sweep: Sweep, folder: RunDirectory, ended: dict[str, str | None]) -> None:
    plan = {
        "trials": {trial.name: _settings(trial.config) for trial in sweep.trials},
        "ended": ended,
    }
    atomic_write(folder.path / PLAN_FILE, json.dumps(plan, indent=1) + "\n")


def train_in_subprocess(prepare: Callable[[], None]) -> Callable[[Trial, RunDirectory], str | None]:
    """Returns a function that trains a trial in a child process. The child saves and exits when
    this process ends.

    Args:
      prepare: a function at module level that the child calls first.
    """

    def train(trial: Trial, run: RunDirectory) -> str | None:
        _wait_for_previous_process(run)
        if not run.config.is_file():
            # A previous process was killed before it saved a config.
            shutil.rmtree(run.path, ignore_errors=True)
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_train_in_child, args=(trial.config, run.path, prepare, sender)
        )
        received: list[int] = []

        def forward(number: int, _: Any) -> None:
            received.append(number)
            if process.pid is not None:
                os.kill(process.pid, number)

        handled = [
            number
            for number in SIGNAL_EXIT_CODES.values()
            if signal.getsignal(number) is not signal.SIG_IGN
        ]
        previous = {number: signal.signal(number, forward) for number in handled}
        try:
            process.start()
            sender.close()
            if received:  # before the child started
                process.terminate()
            try:
                problem = receiver.recv_bytes().decode()
            except EOFError:  # the child ended without a message
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
        return _describe_end(code)

    return train


def _describe_end(code: int) -> str:
    """Returns a sentence on a process that ended with an exit code other than 0, which is −N for
    the signal N.
    """
    if code == -signal.SIGKILL:
        return "the process was killed, perhaps because memory ran out"
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with code {code}"


def _wait_for_previous_process(run: RunDirectory) -> None:
    """Waits until the process of a killed sweep has saved and released the lock of the run."""
    end = time.monotonic() + LOCK_TIMEOUT
    while run.path.is_dir():
        try:
            with run.lock():
                return
        except UserError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def _train_in_child(
    config: Config, path: Path, prepare: Callable[[], None], sender: Connection
) -> None:
    """Runs in the child process. Without `setsid`, the child would receive Ctrl-C twice, which
    would abort its save.
    """
    os.setsid()

    def exit_with_parent(parent: Any) -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(
        target=exit_with_parent, args=(multiprocessing.parent_process(),), daemon=True
    ).start()
    try:
        prepare()
        from dantinox.training import launch

        launch(config, run_dir=path, resume=(path / "config.yaml").is_file())
    except UserError as error:
        from dantinox.training.training_log import NonFiniteLoss

        run = RunDirectory(path)
        if isinstance(error.__cause__, NonFiniteLoss) and not run.config.is_file():
            # `launch` removes a run without a checkpoint, but this is the result of a trial.
            path.mkdir(exist_ok=True)
            save_config(run, config)
        sender.send_bytes(str(error).encode())
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
