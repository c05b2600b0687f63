"""What is asked of an engine and what comes back: the words that the engine, the dialects and the page share."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dantinox.config import Config
from dantinox.generation.constraint import Constraint
from dantinox.generation.run import Run

Record = dict[str, Any]  # of one token, ready for JSON: `id` and `text`, and what was reported (`generation.trace`)


@dataclass(frozen=True)
class Ask:
    """One prompt to be continued.

    Attributes:
      ids: the prompt's tokens, at least one.
      config: all settings, as `Serving.settings` gives them: `generation.n` samples, each of `max_new_tokens` at most.
      logprobs: None, or how many alternatives are reported with each token; 0 reports the token alone.
      echo: report the prompt's own tokens too; needs `logprobs`.
      constraint: what the text must follow, None where it is free.
    """

    ids: tuple[int, ...]
    config: Config
    logprobs: int | None = None
    echo: bool = False
    constraint: Constraint | None = None


class Piece(NamedTuple):
    """What one sample has just gained.

    Attributes:
      sample: its number, from 0.
      text: certain to belong to the answer; "" where tokens came that spell nothing yet.
      tokens: a record for each new token, with more than `id` and `text` only where log-probabilities were asked for.
      finish_reason: `eos`, `stop`, `length` or `cancelled` with the last piece of the sample, else None.
    """

    sample: int
    text: str
    tokens: Sequence[Record]
    finish_reason: str | None = None


@dataclass
class Stats:
    """What an answer took; complete once it has ended.

    Attributes:
      prompt_tokens, reused_tokens: of the prompt, and of it those that were not read again.
      new_tokens: of all samples.
      queued_seconds, first_token_seconds, seconds: from the ask until a slot was free, the first token came, all ended.
    """

    prompt_tokens: int
    reused_tokens: int = 0
    new_tokens: int = 0
    queued_seconds: float = 0.0
    first_token_seconds: float = 0.0
    seconds: float = 0.0


class Busy(Exception):
    """The queue is full; asking again after `retry_after` seconds is likely to succeed."""

    def __init__(self, retry_after: float):
        super().__init__(f"all slots and all places of the queue are taken: try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class Unavailable(Exception):
    """The engine is loading, draining or has failed; the message says which."""


class Answer:
    """The pieces of one ask, in the order they come: `async for piece in answer`.

    It is made and read on one event loop; the engine gives from a thread of its own. What is not read waits here, so a slow
    reader holds up nobody; it is at most `n · max_new_tokens` tokens.

    Attributes:
      stats: what it took.
      prompt: with `echo` a record for each of the prompt's tokens, the first without chances; there with the first piece.
      when_read: called with it, on the loop, once it has been read to its end.
    """

    def __init__(self, ask: Ask, cancel: Callable[["Answer"], None]):
        self.ask, self.stats, self.prompt = ask, Stats(len(ask.ids)), list[Record]()
        self.when_read: list[Callable[[Answer], None]] = []
        self._cancel, self._loop = cancel, asyncio.get_running_loop()
        self._waiting: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        self._ended = False

    def __aiter__(self) -> "Answer":
        return self

    async def __anext__(self) -> Piece:
        """The next piece.

        Raises:
          Unavailable: the engine failed, or was stopped before the end.
          UserError: the ask cannot be met, which only its beginning could show.
        """
        if self._ended:
            raise StopAsyncIteration
        found = await self._waiting.get()
        if isinstance(found, Piece):
            return found
        self._ended = True
        for read in self.when_read:
            read(self)
        raise StopAsyncIteration if found is None else found

    def cancel(self) -> None:
        """Gives the slots free within a chunk. Samples that have not ended end with `cancelled`; harmless when all have."""
        self._cancel(self)

    # What follows is for the engine, from any thread.

    def give(self, pieces: Sequence[Piece]) -> None:
        """Hands over what has come."""
        self._put(pieces)

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more will come, because of an error where one is given."""
        self._put([error])

    def _put(self, items: Sequence[Piece | BaseException | None]) -> None:
        def put() -> None:
            for item in items:
                self._waiting.put_nowait(item)

        try:
            self._loop.call_soon_threadsafe(put)
        except RuntimeError:  # the loop is closed: nobody is there to read
            self._cancel(self)


@dataclass(frozen=True)
class Status:
    """How an engine is: `state` is `loading`, `ready`, `draining` or `failed`; `doing` says more in a few words.

    Attributes:
      slots, busy: rows that can be decoded together, and those that are taken.
      queued, queue: asks that wait, and how many may.
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


class Serving(Protocol):
    """What the dialects need of an engine."""

    run: Run
    name: str

    def settings(self, given: Mapping[str, Any]) -> Config:
        """The server's settings with these over them, validated, and served by this engine.

        Raises:
          UserError: a name or value is wrong, or it would need what this server was not started with.
        """

    def submit(self, ask: Ask) -> Answer:
        """Queues an ask; returns at once.

        Raises:
          UserError: it does not fit the context, or asks for too much.
          Busy: the queue is full.
          Unavailable: no ask is taken now.
        """

    def status(self) -> Status:
        """How the engine is now."""
