"""Experiment trackers: TensorBoard and Weights & Biases.

What they show are the numbers of the rows, as `interval/train_loss` and `evaluation/val_loss`, the samples, and the settings.

A tracker's `begin(step, told, rows)` is called before the first row, and whenever the run goes back: what it was told of later
steps is void. `told` is the last step of which a row was on the disk until now; `rows` are those up to `step`, for a tracker
that has not seen them. `row` takes a row as `metrics.jsonl` has it, `text` a sample; when `end` returns all is on its way.
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
from dantinox.config.sections import flat
from dantinox.files import UserError, atomic_write, first_line, require_extra, wrap_os_errors

Row = Mapping[str, Any]


def trackers(config: Config, folder: Path) -> "tuple[Tracker, ...]":
    """Those that `logging` asks for, for the run in a folder; an error where the library of one is not installed."""
    tensorboard = [_TensorBoard(folder / "tensorboard", config)] if config.logging.tensorboard else []
    return (*tensorboard, *([_WeightsAndBiases(folder, config)] if config.logging.wandb else []))


def _library(name: str, setting: str) -> Any:
    with require_extra("logs", f"logging.{setting} needs {name.partition('.')[0]}"):
        return importlib.import_module(name)


def _numbers(kind: str, row: Row) -> dict[str, float]:
    return {f"{kind}/{name}": x for name, x in row.items() if isinstance(x, int | float) and name != "step"}


class _TensorBoard:
    """Event files, each step's written through before the next. A resumed run begins another file, which says by a restart of
    the session what TensorBoard is to forget of those before it."""

    def __init__(self, folder: Path, config: Config):
        # The synchronous part of the library: its SummaryWriter hands rows to a thread and loses some when it is killed.
        self.files = _library("tensorboardX.event_file_writer", "tensorboard")
        self.events = _library("tensorboardX.proto.event_pb2", "tensorboard")
        self.summary = _library("tensorboardX.summary", "tensorboard")
        self.folder, self.config, self.writer = folder, config, None

    def begin(self, step: int, told: int, rows: Iterable[Row]) -> None:
        self.end(False)
        new = not any(self.folder.glob("events.*"))
        with wrap_os_errors(f"cannot write into {self.folder}"):
            self.folder.mkdir(exist_ok=True)
            # Files are read in the order of their names, which the library numbers by the second.
            self.writer = self.files.EventsWriter(str(self.folder / "events"), f".{time.time_ns()}")
        if not new:
            restart = self.events.SessionLog(status=self.events.SessionLog.START)
            self._write(step + 1, session_log=restart)  # steps from this one on are void
            return
        settings = {
            key: x if isinstance(x, int | float | str) else str(x) for key, x in flat(self.config).items() if x is not None
        }
        experiment, started, _ = self.summary.hparams(settings, {"evaluation/val_loss": 0.0})
        for summary in (experiment, started, self.summary.text("config", _verbatim(dump_config(self.config)))):
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
    """Text that Markdown shows as it is."""
    return "".join(f"    {line}\n" for line in text.split("\n"))


class _WeightsAndBiases:
    """One run there for a run here, however often it is resumed: its id and the last step it was told lie in `wandb/`.

    It takes no row back and none twice: of steps that it knows it is told nothing again. Online it says itself which these are,
    offline they are taken to be all that were logged here.
    """

    def __init__(self, folder: Path, config: Config):
        self.wandb = _library("wandb", "wandb")
        self.folder, self.config = folder, config
        self.memory = folder / "wandb" / "dantinox.json"
        self.run: Any = None
        self.told = 0

    def begin(self, step: int, told: int, rows: Iterable[Row]) -> None:
        known = json.loads(self.memory.read_text()) if self.memory.exists() else None
        if self.run is not None:
            self.told = max(self.told, told)
        else:
            self.run = self._init(known and known["id"])
            self.told = max(known["told"], told) if known and self.run.offline else self.run.starting_step - 1
        self.memory.parent.mkdir(exist_ok=True)
        atomic_write(self.memory, json.dumps({"id": self.run.id, "told": self.told}) + "\n")
        for row in rows:
            self.row(row["kind"], row)

    def _init(self, identity: str | None) -> Any:
        log = self.config.logging
        # Without it a run that is asked to stop waits for a network that is gone; what is not sent stays in `wandb/`.
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
                settings=self.wandb.Settings(console="off"),  # the console is ours
            )
        except Exception as error:  # of the library, its server, the network
            advice = "with WANDB_MODE=offline it needs neither account nor network"
            raise UserError(f"Weights & Biases cannot begin: {first_line(error)} ({advice})") from error

    def row(self, kind: str, row: Row) -> None:
        if row["step"] > self.told:
            self._log(_numbers(kind, row), row["step"])

    def text(self, step: int, text: str) -> None:
        if step > self.told:
            self._log({"sample": self.wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step)

    def _log(self, data: dict[str, Any], step: int) -> None:
        """A training does not end because somebody else's program did."""
        if self.run is None:
            return
        try:
            self.run.log(data, step=step)
        except Exception as error:
            self.run = None
            warnings.warn(f"Weights & Biases failed, the run goes on without it: {first_line(error)}", stacklevel=2)

    def end(self, failed: bool) -> None:
        run, self.run = self.run, None
        if run is not None:
            run.finish(exit_code=int(failed))


Tracker = _TensorBoard | _WeightsAndBiases
