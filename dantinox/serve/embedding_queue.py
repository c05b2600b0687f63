"""`EmbeddingQueue`: the texts that a server embeds, one chunk between two steps of the engine.

Requests take turns: after each text, the next text comes from the request that has waited longest.
So a query does not wait for the many documents of another request.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from threading import Lock
from typing import NamedTuple

import numpy as np

from dantinox.generation.api.embedder import Embedder
from dantinox.generation.engine_jobs import RequestFailed

log = logging.getLogger("dantinox.serve")


class EmbeddingJob(NamedTuple):
    """The token sequences of one request, their pooling, the embeddings found so far, and the
    future of `[N, D]` float32.
    """

    ids: Sequence[Sequence[int]]
    pooling: str
    found: list[np.ndarray]
    future: "Future[np.ndarray]"


class EmbeddingQueue:
    """Requests that wait for embeddings. Only the thread of the engine calls `step`; any thread may
    call the other methods.

    Attributes:
      embedded_tokens, embedded_texts: totals since the start.
    """

    def __init__(self, make: Callable[[], Embedder]):
        """Creates an empty queue; `make` returns the embedder, which is compiled when it is first
        needed.
        """
        self._make = make
        self._lock = Lock()
        self._embedder: Embedder | None = None
        self._jobs: deque[EmbeddingJob] = deque()
        self._running: EmbeddingJob | None = None  # the job whose text the embedder has begun
        self.embedded_tokens = 0
        self.embedded_texts = 0
        self._failed = False  # whether the programs could not be compiled

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def ready(self) -> bool:
        """Whether the programs are compiled."""
        return self._embedder is not None

    def compile(self) -> None:
        """Compiles the programs; a failure ends every request with an error."""
        try:
            embedder = self._make()
            embedder.compile()
        except Exception as error:
            log.exception("the programs for embeddings could not be compiled")
            with self._lock:
                self._failed = True
            self.close(RequestFailed(f"{type(error).__name__}: {error}"))
        else:
            self._embedder = embedder

    def add(self, ids: Sequence[Sequence[int]], pooling: str) -> "Future[np.ndarray]":
        """Adds a request and returns the future of its embeddings; cancelling the future removes
        the request.

        Raises:
          RequestFailed: the programs could not be compiled.
        """
        job = EmbeddingJob(ids, pooling, [], Future())
        with self._lock:
            if self._failed:
                raise RequestFailed("the programs for embeddings could not be compiled")
            self._jobs.append(job)
        job.future.add_done_callback(lambda _: self._remove(job))
        return job.future

    def step(self) -> bool:
        """Computes the next chunk of the first request; returns False if there is nothing to
        compute.
        """
        with self._lock:
            job = next(iter(self._jobs), None)
            embedder = self._embedder
        if embedder is None or job is None:
            return False
        try:
            if self._running is not job:
                self._running = job
                embedder.start([job.ids[len(job.found)]], job.pooling)
            self.embedded_tokens += embedder.step()
            if not embedder.done:
                return True
            self._running = None
            job.found.append(embedder.result()[0])
            self.embedded_texts += 1
            if len(job.found) == len(job.ids):
                self._end(job, np.stack(job.found))
            else:
                self._move_to_end(job)
        except Exception as error:
            log.exception("a request for embeddings failed")
            embedder.reset()
            self._running = None
            self._end(job, RequestFailed(f"{type(error).__name__}: {error}"))
        return True

    def close(self, error: Exception) -> None:
        """Ends all requests with an error."""
        for job in [*self._jobs]:
            self._end(job, error)

    def _move_to_end(self, job: EmbeddingJob) -> None:
        with self._lock:
            if self._jobs and self._jobs[0] is job:
                self._jobs.rotate(-1)

    def _remove(self, job: EmbeddingJob) -> None:
        with self._lock:
            self._jobs = deque(other for other in self._jobs if other is not job)

    def _end(self, job: EmbeddingJob, result: np.ndarray | Exception) -> None:
        with contextlib.suppress(InvalidStateError):  # the future has been cancelled
            if isinstance(result, Exception):
                job.future.set_exception(result)
            else:
                job.future.set_result(result)
