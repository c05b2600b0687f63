"""`ResponseStream`, the deltas of one request, and `EngineProtocol`, the engine interface that the
protocols use.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from dantinox.config import Config
from dantinox.generation.api.loaded_model import LoadedModel
from dantinox.generation.prefix.prefix_cache import PrefixStatus
from dantinox.generation.request import Delta, GenerationRequest, RequestStats, TokenRecord


class ResponseStream:
    """Iterates over the deltas of one request in their order: `async for delta in stream`.

    The stream is created and read on one event loop; the engine pushes from its own thread. Unread
    deltas wait in a deque of at most `n · max_new_tokens` tokens, so a slow reader does not delay
    the engine.

    Attributes:
      request: the request.
      stats: times and counts of the request; complete at the end of the stream.
      prompt: with `echo`, a record for each token of the prompt; the first has no probabilities.
        Set with the first delta.
    """

    def __init__(self, request: GenerationRequest, stats: RequestStats, cancel: Callable[[], None]):
        self.request = request
        self.stats = stats
        self.prompt = list[TokenRecord]()
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._unread: deque[Delta | BaseException | None] = deque()
        self._reader: asyncio.Future[None] | None = None  # ends the wait of the reader
        self._ended = False

    def __aiter__(self) -> "ResponseStream":
        return self

    async def __anext__(self) -> Delta:
        """Returns the next delta.

        Raises:
          Unavailable: the engine failed or was stopped before the request was complete.
          UserError: the preparation of the request found an error in it.
          RequestFailed: an internal error ended this request.
        """
        if self._ended:
            raise StopAsyncIteration
        while not self._unread:
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        item = self._unread.popleft()
        if isinstance(item, Delta):
            return item
        self._ended = True
        raise StopAsyncIteration if item is None else item

    def cancel(self) -> None:
        """Frees the request's slots after at most one chunk of decoding steps. Unfinished samples
        end with `cancelled`.
        """
        self._cancel()

    # The engine calls the following methods, from any thread.

    def push(self, delta: Delta, wake: bool = True) -> None:
        """Adds a delta. Without `wake`, a waiting reader is woken by the next call of
        `wake_readers`.
        """
        self._put(delta, wake)

    def end(self, error: BaseException | None = None, wake: bool = True) -> None:
        """Ends the stream, with an error if one is given; `wake` as in `push`."""
        self._put(error, wake)

    def _put(self, item: Delta | BaseException | None, wake: bool) -> None:
        self._unread.append(item)
        if wake:
            wake_readers([self])


def _wake(streams: Iterable[ResponseStream]) -> None:
    for stream in streams:
        if stream._reader is not None and not stream._reader.done():
            stream._reader.set_result(None)


def wake_readers(streams: Iterable[ResponseStream]) -> None:
    """Wakes the readers of streams; a thread switches to the event loop only once for all of
    them.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[ResponseStream]] = {}
    for stream in streams:
        by_loop.setdefault(stream._loop, []).append(stream)
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake, group)
        except RuntimeError:  # the loop is closed, so nothing reads the streams
            for stream in group:
                stream.cancel()


@dataclass(frozen=True)
class Status:
    """The state of an engine.

    Attributes:
      state: `loading`, `ready`, `draining` or `failed`.
      doing: a description of the state in a few words.
      slots, busy: number of slots, and of slots in use.
      queued, queue: number of waiting requests, and its maximum.
      context: maximum length of a prompt and its continuation, in tokens.
      counters: sums since the start: `requests`, `finished`, `cancelled`, `refused`,
        `prompt_tokens`, `reused_tokens`, `new_tokens`, `draft_tokens`, `accepted_draft_tokens`,
        `embedded_texts`, `embedded_tokens` and `compilations` (after the warm-up).
      prefixes: the blocks of the prefix cache.
    """

    state: str
    doing: str
    slots: int
    busy: int
    queued: int
    queue: int
    context: int
    counters: Mapping[str, int] = field(default_factory=dict)
    prefixes: PrefixStatus = field(default_factory=PrefixStatus)


class HasStatus(Protocol):
    """An engine or a pool of engines."""

    def status(self) -> Status:
        """Returns the current state and counters."""


class EngineProtocol(Protocol):
    """The engine interface that the protocols use.

    Attributes:
      run: the loaded model.
      name: the model's name for clients.
      loras: the names of the adapters that requests may select.
      context: the most tokens of a prompt plus its continuation.
    """

    run: LoadedModel
    name: str

    @property
    def loras(self) -> Collection[str]: ...

    @property
    def context(self) -> int: ...

    async def load_lora(self, name: str, path: Path) -> None:
        """Loads an adapter; requests may select it afterwards.

        Raises:
          UserError: the name is invalid or in use, no place is free, or the adapter is damaged or
            does not fit the model.
          Unavailable: the engine is loading, draining or has failed.
        """

    def unload_lora(self, name: str) -> None:
        """Unloads an adapter; the requests that use it continue.

        Raises:
          UserError: no adapter has this name.
        """

    def settings(self, overrides: Mapping[str, object]) -> Config:
        """Returns the server's configuration with a request's settings applied and validated.

        Raises:
          UserError: a name or value is wrong, or a setting can only be set when the server starts.
        """

    def submit(self, request: GenerationRequest) -> ResponseStream:
        """Queues a request and returns its stream immediately.

        Raises:
          UserError: the request does not fit the context or exceeds a limit.
          Busy: the queue is full.
          Unavailable: the engine is loading, draining or has failed.
        """

    async def embed(self, ids: Sequence[Sequence[int]], pooling: str) -> np.ndarray:
        """Returns the embeddings of token sequences, float32 `[N, D]`.

        Raises:
          UserError: a sequence is empty, too long or has an invalid token, or the pooling is
            unknown.
          Busy: the queue is full.
          Unavailable: the engine is loading, draining or has failed.
        """

    async def save_prefixes(self) -> int:
        """Writes the prefix cache to its folder and returns the number of its blocks.

        Raises:
          UserError: the prefix cache is off or has no folder, or the files cannot be written.
          Unavailable: the engine is loading, draining or has failed.
        """

    def status(self) -> Status:
        """Returns the current state and counters of the engine."""
