"""Progress of a training and of long commands on stderr: a live display at a terminal, plain lines elsewhere."""

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
EVERY = 5.0  # seconds between two lines of progress
SILENCE = 8.0  # seconds without a line, after which `steady_progress` repeats the last one


def show_progress(line: str) -> None:
    """Prints a line of progress of a long command on stderr."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def steady_progress(show: Callable[[str], None] = show_progress, seconds: float = SILENCE) -> Iterator[Callable[[str], None]]:
    """A function that shows lines of progress. After `seconds` without one the last is shown again with the time it took."""
    stopped, lock = threading.Event(), threading.Lock()
    last, begun, shown = "starting", time.monotonic(), time.monotonic()

    def note(line: str) -> None:
        nonlocal last, begun, shown
        with lock:
            last = line
            begun = shown = time.monotonic()
            show(line)

    def repeat() -> None:
        nonlocal shown
        while not stopped.wait(seconds / 8):
            with lock:
                now = time.monotonic()
                if now - shown >= seconds:
                    shown = now
                    show(f"{last} (for {human_time(now - begun)})")

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield note
    finally:
        stopped.set()
        thread.join()


class Progress:
    """How much of a long task is done, in a line at its start and then every few seconds.

    `reading sequences: 12 of 80 sequences, 2m05s left`
    """

    def __init__(self, show: Callable[[str], None], task: str, total: int, unit: str):
        self.show, self.task, self.total, self.unit = show, task, total, unit
        self.done, self.begun = 0, time.monotonic()
        self.shown = self.begun
        show(f"{task}: {human_count(total)} {unit}")

    def advance(self, count: int = 1, note: str = "") -> None:
        """Adds what was done since the last call; `note` is appended to the line, if one is due."""
        self.done, now = self.done + count, time.monotonic()
        if now - self.shown < EVERY:
            return
        self.shown = now
        left = human_time((now - self.begun) * (self.total - self.done) / max(1, self.done))
        done = f"{human_count(self.done)} of {human_count(self.total)} {self.unit}, {left} left"
        self.show(f"{self.task}: {done}{note}")


class Console:
    """Plain lines of `key value` pairs, one per interval and evaluation: `step 250 val_loss 1.9412 bits_per_byte 2.801`.

    Rows are those of the metric files; only the `train_loss` of an evaluation is shown as `train_loss_since_eval`, because an
    interval that ends with the same step has another mean. `seconds_left` in a row is shown as a time.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.stages: set[str] = set()

    def stage(self, name: str, done: int, total: int, unit: str = "characters") -> None:
        """What goes on before the first step, on how much; called again as it gets on."""
        if name not in self.stages:
            self.stages.add(name)
            self.note(f"{name}: {human_count(total)} {unit}")

    def start(self, total_steps: int, step: int = 0) -> None:
        """Called before the first step; `step` is the one a resumed run stands at."""

    def interval(self, row: Row) -> None:
        """A row of the training loop."""
        self._write(pairs(row))

    def evaluation(self, row: Row) -> None:
        """A row with the validation loss."""
        self._write(pairs(row))

    def sample(self, text: str, step: int) -> None:
        """A text the model wrote."""
        self._write(f"sample at step {step}:\n{printable(text)}")

    def note(self, text: str) -> None:
        """A sentence to the person: where the run lies, what it resumed from, why it stops."""
        self._write(printable(text))

    def close(self) -> None:
        """Leaves the terminal as it was; may be called twice."""

    def _write(self, text: str) -> None:
        """Prints a line; a reader that went away (`| head`) does not stop the training."""
        try:
            print(text, file=self.stream, flush=True)
        except BrokenPipeError:
            self.stream = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pairs(row: Row) -> str:
    """`step 10 train_loss 3.2104 lr 0.0003`, the row's names unchanged so that a script can read them."""
    return " ".join(f"{name} {_number(name, value)}" for name, value in row.items() if value is not None)


def headline(row: Row) -> str:
    """The same row as a person reads it: `loss 3.2104 · val 3.3310 · 2.801 bits/byte · lr 3.0e-04 · 25.1k tok/s · 0.82 GB`."""
    parts = {
        "train_loss": lambda x: f"loss {x:.4f}",
        "train_loss_since_eval": lambda x: f"mean loss {x:.4f}",
        "val_loss": lambda x: f"val {x:.4f}",
        "bits_per_byte": lambda x: f"{x:.3f} bits/byte",
        "lr": lambda x: f"lr {x:.1e}",
        "tokens_per_s": lambda x: f"{human_count(x)} tok/s",
        "mfu": lambda x: f"MFU {100 * x:.1f}%",
        "memory_gb": lambda x: f"{x:.2f} GB",
    }
    return " · ".join(form(float(row[name])) for name, form in parts.items() if row.get(name) is not None)


def printable(text: str) -> str:
    """The text with its line breaks and tabs, but no character that could command a terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") else "\ufffd" for c in text)


def _number(name: str, value: Any) -> str:
    if name == "seconds_left":
        return human_time(float(value))
    if isinstance(value, str):
        return printable(value)
    number = float(value)
    if "loss" in name:
        return f"{number:.4f}"
    return f"{number:.0f}" if number.is_integer() or abs(number) >= 1000 else f"{number:.4g}"
