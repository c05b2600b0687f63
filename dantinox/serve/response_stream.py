"""`ResponseStream`, the deltas of one request, and `EngineProtocol`, what the protocols need of an engine."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dantinox.config import Config
from dantinox.generation.loaded_model import LoadedModel
from dantinox.generation.request import Delta, GenerationRequest, RequestStats, TokenRecord


class ResponseStream:
    """The deltas of one request, in the order they come: `async for delta in stream`.

    It is made and read on one event loop; the engine pushes from its own thread. What is not read waits here, so a slow reader
    delays nobody; it is at most `n · max_new_tokens` tokens.

    Attributes:
      stats: what the request took.
      prompt: with `echo` a record for each of the prompt's tokens, the first without probabilities; there with the first delta.
    """

    def __init__(self, request: GenerationRequest, stats: RequestStats, cancel: Callable[[], None]):
        self.request, self.stats, self.prompt = request, stats, list[TokenRecord]()
        self._cancel, self._loop = cancel, asyncio.get_running_loop()
        self._waiting: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()
        self._ended = False

    def __aiter__(self) -> "ResponseStream":
        return self

    async def __anext__(self) -> Delta:
        """The next delta.

        Raises:
          Unavailable: the engine failed, or was stopped before the end.
          UserError: the request cannot be met, which only its preparation or its beginning could show.
          RequestFailed: an internal error ended this request.
        """
        if self._ended:
            raise StopAsyncIteration
        found = await self._waiting.get()
        if isinstance(found, Delta):
            return found
        self._ended = True
        raise StopAsyncIteration if found is None else found

    def cancel(self) -> None:
        """Frees the slots within a chunk. Samples that have not ended end with `cancelled`; does nothing when all have."""
        self._cancel()

    # What follows is for the engine, from any thread.

    def push(self, delta: Delta) -> None:
        """Hands over a delta."""
        self._put(delta)

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more will come, because of an error where one is given."""
        self._put(error)

    def _put(self, item: Delta | BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._waiting.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody reads any more
            self._cancel()


@dataclass(frozen=True)
class Status:
    """How an engine is: `state` is `loading`, `ready`, `draining` or `failed`; `doing` says more in a few words.

    Attributes:
      slots, busy: rows that can be decoded together, and those that are taken.
      queued, queue: requests that wait, and how many may.
      context: tokens that a prompt and its continuation may have together.
      counters: sums since the start by name: `requests`, `finished`, `cancelled`, `refused`, `prompt_tokens`, `reused_tokens`,
        `new_tokens`, `compilations` (behind the warm-up).
    """

    state: str
    doing: str
    slots: int
    busy: int
    queued: int
    queue: int
    context: int
    counters: Mapping[str, int] = field(default_factory=dict)


class EngineProtocol(Protocol):
    """What the protocols need of an engine."""

    run: LoadedModel
    name: str

    def settings(self, given: Mapping[str, object]) -> Config:
        """The server's settings with these over them, validated, and served by this engine.

        Raises:
          UserError: a name or value is wrong, or it would need what this server was not started with.
        """

    def submit(self, request: GenerationRequest) -> ResponseStream:
        """Queues a request; returns at once.

        Raises:
          UserError: it does not fit the context, or asks for too much.
          Busy: the queue is full.
          Unavailable: no request is accepted now.
        """

    def status(self) -> Status:
        """How the engine is now."""
