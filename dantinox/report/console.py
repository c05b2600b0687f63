"""Progress of training and of long commands, as plain lines on stderr."""

import contextlib
import os
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from dantinox.report.tables import human_count, human_time

Row = Mapping[str, Any]
PROGRESS_INTERVAL = 5.0  # seconds between two lines of progress
STAGE_INTERVAL = 30.0  # seconds between two lines of a preparation stage of training
# The seconds without a new line after which `steady_progress` repeats the last line.
REPEAT_INTERVAL = 8.0


def show_progress(line: str) -> None:
    """Prints a line of a long command's progress on stderr."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def steady_progress(
    show: Callable[[str], None] = show_progress, seconds: float = REPEAT_INTERVAL
) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows a line.

    After `seconds` without a new line, the last line is repeated with the time since it was first
    shown.
    """
    stopped = threading.Event()
    lock = threading.Lock()
    last = "starting"
    started = time.monotonic()
    shown = time.monotonic()

    def note(line: str) -> None:
        nonlocal last, started, shown
        with lock:
            last = line
            started = shown = time.monotonic()
            show(line)

    def repeat() -> None:
        nonlocal shown
        while not stopped.wait(seconds / 8):
            with lock:
                now = time.monotonic()
                if now - shown >= seconds:
                    shown = now
                    show(f"{last} (for {human_time(now - started)})")

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield note
    finally:
        stopped.set()
        thread.join()


class Progress:
    """Shows the progress of a long task: a line at its start and one every `interval` seconds.

    `reading sequences: 12 of 80 sequences, 2m05s left`
    """

    def __init__(
        self,
        show: Callable[[str], None],
        task: str,
        total: int,
        unit: str,
        *,
        done: int = 0,
        interval: float = PROGRESS_INTERVAL,
    ):
        """Shows the first line.

        Args:
          show: prints a line.
          task, total, unit: what is done, the number of units and their name.
          done: the units that were already complete. The time left is estimated from the other
            ones.
          interval: seconds between two lines.
        """
        self.show = show
        self.task = task
        self.total = total
        self.unit = unit
        self.interval = interval
        self.first = done
        self.done = done
        self.started = time.monotonic()
        self.shown = self.started
        show(f"{task}: {human_count(total)} {unit}")

    def time_left(self, now: float) -> str:
        """Returns the estimated time left, such as `2m05s left`; `now` is the value of
        `time.monotonic`.
        """
        seconds = (now - self.started) * (self.total - self.done) / max(1, self.done - self.first)
        return f"{human_time(seconds)} left"

    def advance(self, count: int = 1, note: str = "") -> None:
        """Adds `count` completed units. If it is time to show a line, `note` is appended to the
        line.
        """
        self.done = self.done + count
        now = time.monotonic()
        if now - self.shown < self.interval:
            return
        self.shown = now
        done = (
            f"{human_count(self.done)} of {human_count(self.total)} {self.unit},"
            f" {self.time_left(now)}"
        )
        self.show(f"{self.task}: {done}{note}")


class Console:
    """Prints a line of `key value` pairs per interval and evaluation:
    `step 250 val_loss 1.9412 bits_per_byte 2.801`.

    The rows are those of the metric files. In the line of an evaluation, however, `train_loss` is
    called `train_loss_since_eval`, to distinguish it from the `train_loss` of an interval that ends
    at the same step: the two means differ. `seconds_left` is shown as a duration.

    Attributes:
      stage_interval: seconds between two lines of a preparation stage.
    """

    stage_interval = STAGE_INTERVAL

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.stages: dict[str, Progress] = {}

    def stage(self, name: str, done: int, total: int, unit: str = "characters") -> None:
        """Shows a preparation stage before the first step. Further calls update `done`, the number
        of completed units.
        """
        if name not in self.stages:
            self.stages[name] = Progress(
                self.note, name, total, unit, done=done, interval=self.stage_interval
            )
        self.stages[name].advance(done - self.stages[name].done)

    def start(self, total_steps: int, step: int = 0) -> None:
        """Starts the display before the first step is compiled; `step` is the last completed step
        of a resumed run.
        """

    def interval(self, row: Row) -> None:
        """Shows the row of a training interval."""
        self._write(format_pairs(row))

    def evaluation(self, row: Row) -> None:
        """Shows a row with the validation loss."""
        self._write(format_pairs(row))

    def sample(self, text: str, step: int) -> None:
        """Shows a generated text."""
        self._write(f"sample at step {step}:\n{printable(text)}")

    def note(self, text: str) -> None:
        """Shows a message, such as the run directory, the resumed checkpoint or the reason for
        stopping.
        """
        self._write(printable(text))

    def close(self) -> None:
        """Restores the terminal; may be called twice."""

    def _write(self, text: str) -> None:
        """Prints a line; a closed pipe (`| head`) does not stop the training."""
        try:
            print(text, file=self.stream, flush=True)
        except BrokenPipeError:
            self.stream = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def format_pairs(row: Row) -> str:
    """Formats a row as `step 10 train_loss 3.2104 lr 0.0003`, with the names of the row, so that a
    script can parse it.
    """
    return " ".join(
        f"{name} {_number(name, value)}" for name, value in row.items() if value is not None
    )


def format_headline(row: Row) -> str:
    """Formats a row as a short line: `loss 3.2104 · val 3.3310 · 2.801 bits/byte · lr 3.0e-04 ·
    25.1k tok/s · 0.82 GB`.
    """
    parts = {
        "train_loss": lambda x: f"loss {x:.4f}",
        "train_loss_since_eval": lambda x: f"mean loss {x:.4f}",
        "val_loss": lambda x: f"val {x:.4f}",
        "bits_per_byte": lambda x: f"{x:.3f} bits/byte",
        "reward": lambda x: f"reward {x:.3f}",
        "val_reward": lambda x: f"val reward {x:.3f}",
        "lr": lambda x: f"lr {x:.1e}",
        "tokens_per_s": lambda x: f"{human_count(x)} tok/s",
        "mfu": lambda x: f"MFU {100 * x:.1f}%",
        "memory_gb": lambda x: f"{x:.2f} GB",
    }
    return " · ".join(
        format_part(float(row[name]))
        for name, format_part in parts.items()
        if row.get(name) is not None
    )


def printable(text: str) -> str:
    """Replaces control characters, except line breaks and tabs, and lone surrogates: a terminal
    must not interpret them.
    """
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") else "\ufffd" for c in text
    )


def _number(name: str, value: Any) -> str:
    if name == "seconds_left":
        return human_time(float(value))
    if isinstance(value, str):
        return printable(value)
    number = float(value)
    if "loss" in name:
        return f"{number:.4f}"
    return f"{number:.0f}" if number.is_integer() or abs(number) >= 1000 else f"{number:.4g}"
