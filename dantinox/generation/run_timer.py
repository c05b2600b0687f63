"""`RunTimer` measures how long a run takes until its first tokens and in all, and how much of that
is compilation.
"""

import time
from typing import NamedTuple

import jax


class Times(NamedTuple):
    """The seconds of a whole run, the seconds up to its first tokens, and the part of each that was
    spent on compilation.
    """

    total: float = 0.0
    first: float = 0.0
    compiling: float = 0.0
    compiling_first: float = 0.0

    @property
    def decoding(self) -> float:
        """Seconds after the first tokens, without compilation."""
        return self.total - self.first - (self.compiling - self.compiling_first)

    def rate(self, tokens: int) -> float:
        """Returns the speed in tokens per second, given the number of tokens after the first
        ones.
        """
        return tokens / self.decoding if self.decoding > 0 and tokens > 0 else 0.0

    def describe(self, rate: float) -> str:
        """Returns the total and the parts that add up to it; `rate` is the new tokens per second
        after the first ones.
        """
        first = self.first - self.compiling_first
        speed = f" ({rate:.1f} tok/s)" if rate else ""
        return (
            f"{self.total:.2f} s: compile {self.compiling:.2f} s, first token {first:.2f} s, then"
            f" {self.decoding:.2f} s{speed}"
        )


class RunTimer:
    """A context manager that measures the `Times` of a run."""

    def __init__(self) -> None:
        self.times = Times()
        self._compilations: list[
            tuple[float, float]
        ] = []  # disjoint intervals of `perf_counter`, in order
        self._first: tuple[float, float] | None = None

    def __enter__(self) -> "RunTimer":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        self._start_time = time.perf_counter()
        return self

    def mark_first(self) -> None:
        """Marks the time of the first tokens; later calls have no effect."""
        self._first = self._first or (time.perf_counter() - self._start_time, self._compiling())

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)
        first, compiling_first = self._first or (0.0, 0.0)
        self.times = Times(
            time.perf_counter() - self._start_time, first, self._compiling(), compiling_first
        )

    def _compiling(self) -> float:
        return sum(end - start for start, end in self._compilations)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Adds the seconds before now. Traces of functions inside of other functions report their
        seconds a second time.
        """
        if not event.startswith("/jax/core/compile/"):
            return
        end = time.perf_counter()
        known = self._compilations
        start = max(end - duration_secs, self._start_time)
        while known and known[-1][0] >= start:
            known.pop()
        known.append((max(start, known[-1][1]) if known else start, end))
