"""A batch being decoded: the prompts padded, and the one loop that calls the compiled core until every row has ended."""

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import UserError
from dantinox.generation.cache_plan import CachePlan
from dantinox.generation.decode import CHUNK, DecodeState, Emitted, _generate_toks
from dantinox.generation.weights import split
from dantinox.model import KVCache, Transformer
from dantinox.sampling import SamplingParams, StepInfo, init_state

NO_ID = -1
READER_SECONDS = 0.08  # what a chunk takes, about, where somebody reads along


def bucket(length: int) -> int:
    """The padded length: the next power of two from 16, above 256 the next multiple of 256."""
    return max(16, 1 << (length - 1).bit_length()) if length <= 256 else -(-length // 256) * 256


def slots_needed(lengths: np.ndarray, limits: np.ndarray, pad: Callable[[int], int] = bucket) -> int:
    """The slots of a cache for rows with prompts and new tokens of these numbers."""
    return pad(int(np.max(lengths + limits)))


def clamp_to_context(lengths_B: np.ndarray, wanted_B: np.ndarray, max_context: int) -> np.ndarray:
    """New tokens per row that still fit into the context; one warning says how many were cut, and where.

    Raises:
      UserError: a prompt leaves no room at all.
    """
    room_B = max_context - lengths_B
    if (room_B <= 0).any() and (wanted_B > 0).any():
        raise UserError(
            f"the prompt has {int(lengths_B.max())} tokens and fills the model's context of {max_context}: shorten it"
        )
    room_B = np.maximum(room_B, 0)
    cut = int(np.max(wanted_B - room_B, initial=0))
    if cut > 0:
        row = int(np.argmax(wanted_B - room_B))
        warnings.warn(
            f"the context of {max_context} tokens leaves room for {room_B[row]} new tokens behind a prompt of "
            f"{lengths_B[row]}: {cut} fewer than asked for",
            stacklevel=3,
        )
    return np.minimum(wanted_B, room_B)


class Chunk(NamedTuple):
    """What the host gets: `tokens[b, :counts[b]]` are row b's new tokens, `done` the rows that ended."""

    tokens: np.ndarray
    counts: np.ndarray
    done: np.ndarray
    info: StepInfo | None


class Begun(NamedTuple):
    """A chunk of `steps` tokens that the device is at."""

    emitted: Emitted
    done_B: jax.Array
    steps: int


class Times(NamedTuple):
    """Seconds of a whole run, until its first tokens, and what compiling took of each."""

    total: float = 0.0
    first: float = 0.0
    compiling: float = 0.0
    compiling_first: float = 0.0

    @property
    def decoding(self) -> float:
        """Seconds behind the first tokens, without compiling."""
        return self.total - self.first - (self.compiling - self.compiling_first)


class Session:
    """A batch being decoded; `run` does all of it. By hand, `start` gives the first tokens and `advance` the next ones.

    Attributes:
      params: the sampling parameters, read anew by each call: other numbers in them hold from the next token on.
      echo: log-probabilities `[P, T]` of the prompts' own tokens, where they were asked for.
      done: rows `[B]` that have ended.
      times: of `run`, once it is through.
    """

    def __init__(
        self,
        model: Transformer,
        prompt_PT: np.ndarray,
        lengths_P: np.ndarray,
        params: SamplingParams,
        *,
        limits_B: np.ndarray,
        eos_ids: Sequence[Sequence[int]],
        samples: int = 1,
        use_cache: bool = True,
        report: int | None = None,
        echo: bool = False,
        plan: CachePlan | None = None,
        pad: Callable[[int], int] = bucket,
    ):
        """Takes `P · samples` rows, the samples of a prompt together.

        Args:
          prompt_PT: right-padded to any length; `lengths_P` says what counts.
          limits_B: new tokens of each row.
          eos_ids: for each row the ids that end it.
          report: None, or the number of alternatives to report beside each token.
          plan: of the cache; None: every key and value in the model's dtype.
          pad: the length that prompts of some length are padded to.
        """
        P, T = prompt_PT.shape
        padded_PT = np.zeros((P, pad(T)), np.int32)
        padded_PT[:, :T] = np.where(np.arange(T) < lengths_P[:, None], prompt_PT, 0)
        lengths_B = np.repeat(lengths_P, samples)
        plan = plan or CachePlan(slots_needed(lengths_B, limits_B, pad), jnp.dtype(model.dtype).name)
        tokens_BT = np.repeat(padded_PT, samples, axis=0)
        valid_BT = np.arange(padded_PT.shape[1]) < lengths_B[:, None]
        eos_BE = np.full((P * samples, max(1, *(len(ids) for ids in eos_ids))), NO_ID, np.int32)
        for row, ids in zip(eos_BE, eos_ids, strict=True):
            row[: len(ids)] = ids
        text_BS = np.zeros((P * samples, max(plan.slots, padded_PT.shape[1])), np.int32)
        text_BS[:, : padded_PT.shape[1]] = tokens_BT
        self.params, self.times = params, Times()
        self.cache: KVCache | None = None
        self.echo: np.ndarray | None = None
        self.done = np.asarray(limits_B <= 0)
        self.state = DecodeState(
            token_B=jnp.zeros(P * samples, jnp.int32),
            position_B=jnp.asarray(lengths_B - 1, jnp.int32),
            remaining_B=jnp.asarray(limits_B, jnp.int32),
            done_B=jnp.asarray(self.done),
            eos_BE=jnp.asarray(eos_BE),
            sampler=init_state(params, jnp.asarray(tokens_BT), jnp.asarray(valid_BT), model.config.vocab_size, plan.slots),
            text_BS=None if use_cache else jnp.asarray(text_BS),
        )
        self._model, self._prompt = split(model), (jnp.asarray(padded_PT), jnp.asarray(lengths_P, jnp.int32))
        self._options: dict[str, Any] = {"use_cache": use_cache, "report": report}
        self._first: dict[str, Any] = {"plan": plan, "samples": samples, "echo": echo}
        self._left = int(np.max(limits_B, initial=0))

    def run(self, steps: int | None = CHUNK, *, ahead: bool = False) -> Iterator[Chunk]:
        """Decodes to the end, chunk by chunk; the first has one token per row. Nothing to decode and to echo gives no chunk.

        Between two chunks the caller may `finish` rows, and set other `params`.

        Args:
          steps: tokens of a chunk, at most 32; None: a few, for somebody who reads along.
          ahead: a chunk is begun before the one before it is handed over, so that the device need not wait for the host.
            `finish` holds at once all the same, other `params` a chunk later.
        """
        if not self._left and not self._first["echo"]:
            return
        with CompileTimer() as compiling:
            begun = time.perf_counter()
            chunk, size = self.start(), 1
            first, compiling_first = time.perf_counter() - begun, compiling.seconds
            yield chunk
            begun_chunks: deque[Begun] = deque()
            while not self.done.all():
                before, compiled = time.perf_counter(), compiling.seconds
                while self._left and len(begun_chunks) <= ahead:
                    begun_chunks.append(self._begin(size if steps is None else steps))
                chunk = self._hand_over(begun_chunks.popleft())
                took = time.perf_counter() - before - (compiling.seconds - compiled)
                size = int(np.clip(size * READER_SECONDS / max(took, 1e-6), 1, 2 * size))
                yield chunk
            self.times = Times(time.perf_counter() - begun, first, compiling.seconds, compiling_first)

    def start(self) -> Chunk:
        """Reads the prompts; the first token of every row."""
        self.cache, self.state, emitted, echo = _generate_toks(
            self._model, None, self.state, self.params, jnp.int32(0), self._prompt, **self._options, **self._first
        )
        self.echo = None if echo is None else np.asarray(echo)
        self._left -= 1
        return self._hand_over(Begun(emitted, self.state.done_B, 1))

    def advance(self, steps: int = CHUNK) -> Chunk:
        """Up to `steps` ≤ 32 more tokens; nothing past the longest row's limit."""
        return self._hand_over(self._begin(steps))

    def _begin(self, steps: int) -> Begun:
        steps = min(steps, CHUNK, self._left)
        self.cache, self.state, emitted, _ = _generate_toks(
            self._model, self.cache, self.state, self.params, jnp.int32(steps), **self._options
        )
        self._left -= steps
        return Begun(emitted, self.state.done_B, steps)

    def trace(self, place: Callable[[Any], Any]) -> tuple[Any, Any]:
        """The programs of `start` and `advance` before they are lowered; the model may be one of shapes.

        Args:
          place: makes shapes on the device that is compiled for of all the arguments.
        """
        trace = _generate_toks.jitted_fn.trace
        model, state, params, prompt = place((self._model, self.state, self.params, self._prompt))
        steps = place(jnp.int32(0))
        first = trace(model, None, state, params, steps, prompt, **self._options, **self._first)
        (cache, *_), _ = first.out_info
        return first, trace(model, place(cache), state, params, steps, **self._options)

    def finish(self, rows: np.ndarray) -> None:
        """Ends the rows marked in `rows [B]` before their next token."""
        if (rows & ~self.done).any():
            self.done = self.done | rows
            self.state = replace(self.state, done_B=self.state.done_B | rows)

    def _hand_over(self, begun: Begun) -> Chunk:
        """Waits for a chunk; what it gave rows that were finished meanwhile is nobody's."""
        emitted, done, steps = jax.device_get(begun.emitted), np.asarray(begun.done_B), begun.steps
        counts = np.where(self.done, 0, emitted.active[:, :steps].sum(1))
        self.done = self.done | done
        return Chunk(emitted.tokens[:, :steps], counts, self.done, jax.tree.map(lambda x: x[:, :steps], emitted.info))


class CompileTimer:
    """Adds up what jax spends on tracing and compiling while the context is open."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> "CompileTimer":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            self.seconds += duration_secs
