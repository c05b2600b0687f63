"""Batches made and sent to the device by one background thread, a little ahead of the loop."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import jax

AHEAD = 4


class Feed:
    """`next()` gives the batches of steps `first`, `first + 1`, … in order, as arrays on the device."""

    def __init__(self, batch: Callable[[int], Any], first: int, end: int):
        self._batch, self._end = batch, end
        self._queue: queue.Queue[Any] = queue.Queue(AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(first,), name="batches", daemon=True)
        self._thread.start()

    def next(self) -> Any:
        """The batch of the next step; what went wrong while it was made is raised here."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self._stopped.set()
        while not self._queue.empty():  # frees the thread if it waits for room
            self._queue.get_nowait()
        self._thread.join()

    def _fill(self, first: int) -> None:
        for step in range(first, self._end):
            try:
                item = jax.device_put(self._batch(step))
            except BaseException as error:
                item = error
            while not self._stopped.is_set():
                try:
                    self._queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if self._stopped.is_set() or isinstance(item, BaseException):
                return
