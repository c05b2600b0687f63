"""Experiment trackers: TensorBoard and Weights & Biases.

They receive the generated texts, the settings, and the numbers in the rows of `metrics.jsonl`, with
names such as `interval/train_loss` and `evaluation/val_loss`.

`begin(step, last_step, rows)` is called before the first row, and whenever the run returns to an
earlier step, which invalidates the rows after `step`. `last_step` is the last step that had a row
on disk before the call. `rows` are the rows up to `step`, for a tracker that has not received them.
`row` logs a row of `metrics.jsonl`, and `text` logs a sample. `end` sends the remaining data.
"""

import html
import importlib
import json
import os
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dantinox.config import Config, dump_config
from dantinox.config.sections import flatten_config
from dantinox.files import UserError, atomic_write, first_line, require_extra, wrap_os_errors

Row = Mapping[str, Any]


def trackers(config: Config, folder: Path) -> "tuple[Tracker, ...]":
    """Returns the trackers that the `logging` section enables for the run in `folder`.

    Raises:
      UserError: the library of a tracker is not installed.
    """
    tensorboard = (
        [_TensorBoard(folder / "tensorboard", config)] if config.logging.tensorboard else []
    )
    return (*tensorboard, *([_WeightsAndBiases(folder, config)] if config.logging.wandb else []))


def _library(name: str, setting: str) -> Any:
    with require_extra("logs", f"logging.{setting} needs {name.partition('.')[0]}"):
        return importlib.import_module(name)


def _numbers(kind: str, row: Row) -> dict[str, float]:
    return {
        f"{kind}/{name}": x
        for name, x in row.items()
        if isinstance(x, int | float) and name != "step"
    }


class _TensorBoard:
    """Writes event files and flushes each event.

    A resumed run starts a new file with a session-start event: TensorBoard discards the steps after
    it in older files.
    """

    def __init__(self, folder: Path, config: Config):
        # This part of the library writes synchronously. `SummaryWriter` would pass rows to a
        # thread, so a killed process would lose some of them.
        self.files = _library("tensorboardX.event_file_writer", "tensorboard")
        self.events = _library("tensorboardX.proto.event_pb2", "tensorboard")
        self.summary = _library("tensorboardX.summary", "tensorboard")
        self.folder = folder
        self.config = config
        self.writer = None

    def begin(self, step: int, last_step: int, rows: Iterable[Row]) -> None:
        self.end(False)
        new = not any(self.folder.glob("events.*"))
        with wrap_os_errors(f"cannot write into {self.folder}"):
            self.folder.mkdir(exist_ok=True)
            # TensorBoard reads files in the order of their names. The library's own names have a
            # resolution of one second.
            self.writer = self.files.EventsWriter(str(self.folder / "events"), f".{time.time_ns()}")
        if not new:
            restart = self.events.SessionLog(status=self.events.SessionLog.START)
            # This event invalidates this step and later ones in earlier files.
            self._write(step + 1, session_log=restart)
            return
        settings = {
            key: x if isinstance(x, int | float | str) else str(x)
            for key, x in flatten_config(self.config).items()
            if x is not None
        }
        experiment, started, _ = self.summary.hparams(settings, {"evaluation/val_loss": 0.0})
        for summary in (
            experiment,
            started,
            self.summary.text("config", _verbatim(dump_config(self.config))),
        ):
            self._write(0, summary=summary)
        for row in rows:
            self.row(row["kind"], row)

    def row(self, kind: str, row: Row) -> None:
        values = [{"tag": tag, "simple_value": x} for tag, x in _numbers(kind, row).items()]
        self._write(row["step"], summary={"value": values})

    def text(self, step: int, text: str) -> None:
        self._write(step, summary=self.summary.text("sample", _verbatim(text)))

    def end(self, failed: bool) -> None:
        if self.writer is not None:
            self.writer.close()
        self.writer = None

    def _write(self, step: int, **content: Any) -> None:
        assert self.writer is not None
        with wrap_os_errors(f"cannot write into {self.folder}"):
            self.writer.write_event(self.events.Event(step=step, wall_time=time.time(), **content))
            self.writer.flush()


def _verbatim(text: str) -> str:
    """Returns text as a Markdown code block."""
    return "".join(f"    {line}\n" for line in text.split("\n"))


class _WeightsAndBiases:
    """Logs all sessions of a run to one Weights & Biases run. `wandb/dantinox.json` has its id and
    last logged step.

    Weights & Biases does not accept a step twice, so all steps up to the last logged one are
    skipped. Online, the service reports the last logged step. Offline, the step is the last one
    that this machine has logged.
    """

    def __init__(self, folder: Path, config: Config):
        self.wandb = _library("wandb", "wandb")
        self.folder = folder
        self.config = config
        self.state_path = folder / "wandb" / "dantinox.json"
        self.run: Any = None
        self.last_logged = 0

    def begin(self, step: int, last_step: int, rows: Iterable[Row]) -> None:
        known = json.loads(self.state_path.read_text()) if self.state_path.exists() else None
        if self.run is not None:
            self.last_logged = max(self.last_logged, last_step)
        else:
            self.run = self._init(known and known["id"])
            offline_step = max(known["told"], last_step) if known and self.run.offline else None
            self.last_logged = self.run.starting_step - 1 if offline_step is None else offline_step
        self.state_path.parent.mkdir(exist_ok=True)
        atomic_write(
            self.state_path, json.dumps({"id": self.run.id, "told": self.last_logged}) + "\n"
        )
        for row in rows:
            self.row(row["kind"], row)

    def _init(self, identity: str | None) -> Any:
        log = self.config.logging
        # Without a timeout, a run would wait for a lost network connection instead of ending.
        # Unsent data stays in `wandb/`.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", "8")
        try:
            return self.wandb.init(
                id=identity,
                resume="allow",
                project=log.wandb_project,
                name=self.folder.name,
                dir=str(self.folder),
                config=self.config.model_dump(mode="json"),
                allow_val_change=True,
                settings=self.wandb.Settings(console="off"),  # DantinoX has its own console
            )
        except Exception as error:  # from the library, its server or the network
            advice = "with WANDB_MODE=offline it needs neither an account nor a network"
            raise UserError(
                f"Weights & Biases cannot start: {first_line(error)} ({advice})"
            ) from error

    def row(self, kind: str, row: Row) -> None:
        if row["step"] > self.last_logged:
            self._log(_numbers(kind, row), row["step"])

    def text(self, step: int, text: str) -> None:
        if step > self.last_logged:
            self._log({"sample": self.wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step)

    def _log(self, data: dict[str, Any], step: int) -> None:
        """Logs data; an error of the library disables this tracker, and the training continues."""
        if self.run is None:
            return
        try:
            self.run.log(data, step=step)
        except Exception as error:
            self.run = None
            warnings.warn(
                f"Weights & Biases failed, training continues without it: {first_line(error)}",
                stacklevel=2,
            )

    def end(self, failed: bool) -> None:
        run = self.run
        self.run = None
        if run is not None:
            run.finish(exit_code=int(failed))


Tracker = _TensorBoard | _WeightsAndBiases
