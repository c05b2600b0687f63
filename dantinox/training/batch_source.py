"""Sources of training batches: the token store, read ahead by a thread, or answers that the model
itself samples.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from dantinox.training.step import TrainState

PREFETCH_BATCHES = 4  # batches


class SamplingInterrupted(Exception):
    """A stop signal arrived while a batch was made; the state of training has not changed."""


class BatchSource(Protocol):
    """Makes the batches of consecutive steps."""

    def batch(self, step: int, state: TrainState) -> Any:
        """Returns the batch of a step on the devices. The steps of consecutive calls are
        consecutive.

        Args:
          state: the state before the step.

        Raises:
          SamplingInterrupted: a stop signal arrived.
        """

    def close(self) -> None:
        """Ends all threads."""


class StoredBatches:
    """The batches of a store. They do not depend on the state, so a thread builds and transfers
    them ahead of time.
    """

    def __init__(self, read: Callable[[int], Any], first: int, end: int):
        """Starts to read the batches of the steps from `first` to `end` (exclusive)."""
        self._read = read
        self._next = first
        self._end = end
        self._pool = ThreadPoolExecutor(1, "batches")
        self._pending: deque[Future[Any]] = deque()
        self._read_ahead()

    def batch(self, step: int, state: TrainState) -> Any:
        batch = self._pending.popleft()
        self._read_ahead()
        return batch.result()  # raises errors of the thread

    def _read_ahead(self) -> None:
        while len(self._pending) < PREFETCH_BATCHES and self._next < self._end:
            self._pending.append(self._pool.submit(self._read, self._next))
            self._next += 1

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
