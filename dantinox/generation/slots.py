"""Rows of one running batch that texts move into and out of: what a server decodes with.

The batch has a fixed number of slots, and a text in one of them gives the same tokens in any slot, with any neighbours: every
program is made for all slots and for every sampling step, whatever is in them (a step that nobody has on is passed over when
the program runs). Prompts are read in parts of a fixed length, each part always by the same program, so that a part read for an
earlier text is bit for bit what would be read again.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import Config, UserError
from dantinox.config.generation import order_of
from dantinox.config.steps import EDITS
from dantinox.files import shown
from dantinox.generation.cache_plan import head_order, plan_cache
from dantinox.generation.decode import CHUNK, ECHOED, PART, DecodeState, Emitted, _generate_toks
from dantinox.generation.loaded_model import LoadedModel
from dantinox.generation.loop import NO_ID
from dantinox.generation.token_settings import seeded, stop_token_ids
from dantinox.generation.weights import Split, split, widen
from dantinox.model import KVCache, make_cache
from dantinox.platform import platform_of
from dantinox.programs import size
from dantinox.sampling import SamplingParams, StepInfo, init_state
from dantinox.sampling.chain import ALL
from dantinox.sampling.params import WORDS
from dantinox.sampling.report import step_info

READ_AT_ONCE = 64  # tokens of a prompt: more were not faster on a CPU, and more of a prompt that comes again would be read anew
SHORTEST = 16
ALTERNATIVES = 20  # reported at most
REMEMBERED = 64  # settings whose arrays are kept
# Entries that a list of a request may have, and tokens of a sequence: with more it would need a program of its own.
ENTRIES, SEQUENCES, LONGEST, END_IDS = 1024, 256, 16, 32
ENTRIES_OF = {"stop_ids": END_IDS, "protected_ids": END_IDS, "dry_breakers": 8192}


class Lane(NamedTuple):
    """What a program is made for besides the slots: requests of one lane are decoded together."""

    strategy: str
    order: tuple[str, ...]
    words: tuple[tuple[str, str], ...]
    attends: bool


class Way(NamedTuple):
    """How a text is decoded: the parameters of a batch of one, its lists as long as all others', and its end tokens."""

    lane: Lane
    params: SamplingParams
    ends_1E: np.ndarray


class Kept(NamedTuple):
    """The beginning of a prompt that a slot has read before: `length` tokens, a multiple of a part; None and 0 for nothing."""

    slot: int | None
    length: int


NOTHING = Kept(None, 0)


class Gained(NamedTuple):
    """A slot's new tokens; `done` behind the last one. `info` has their `StepInfo` where the row asked for a report."""

    slot: int
    tokens: np.ndarray
    done: bool
    info: StepInfo | None


class Flight(NamedTuple):
    """A chunk that the device is at: for each lane what comes out, and the texts that are in it by their slots."""

    chunks: list[tuple[Emitted, jax.Array, dict[int, "_Text"]]]


@dataclass(eq=False)
class _Text:
    """The host's side of a text in a slot.

    Attributes:
      read: tokens in the cache, `exact` of them read in whole parts.
      longest: the number of positions that may have been written.
      told: what was reported about the prompt's tokens, part by part; None where nobody wants to know.
      lane: where it is decoded; None before and after that.
      left: new tokens that it may still have in chunks that are not begun.
    """

    ids: Sequence[int] = ()
    read: int = 0
    exact: int = 0
    longest: int = 0
    told: list[StepInfo] | None = None
    lane: Lane | None = None
    left: int = 0
    reports: bool = False


T = TypeVar("T")


class Spelt(Generic[T]):
    """A value that is the same as another one whose `parts` are written the same: what a cache is asked for."""

    def __init__(self, value: T, *parts: object):
        self.value, self.text = value, repr(parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spelt) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


class Slots:
    """A running batch. Its methods are for one thread, but for `lane`, `ready` and `compile`.

    Attributes:
      count: the rows.
      context: tokens that a text may have with its continuation.
      part: tokens of a prompt that are read at once.
    """

    def __init__(self, run: LoadedModel, count: int, context: int, config: Config | None = None):
        """Takes the memory of all slots.

        Args:
          config: the server's settings, which decide on weights and caches; None: the run's.

        Raises:
          UserError: the model's context is shorter, or these settings cannot be served.
        """
        config = config or run.config
        if not 2 <= context <= run.model.config.max_context:
            raise UserError(f"context must be in [2, {run.model.config.max_context}], which the model has, got {context}")
        if config.generation.tensor_parallel > 1:
            raise UserError(f"generation.tensor_parallel must be 1 in a server, got {config.generation.tensor_parallel}")
        if not config.generation.use_cache:
            raise UserError("generation.use_cache must be true in a server, got false")
        self.count, self.context, self._run, self._config = count, context, run, config
        kv, calibration = run.kv(config)
        self._architecture = run.model.config
        self._model = split(run.prepared(config.generation, head_order(self._architecture, kv, calibration)))
        plan = plan_cache(self._architecture, kv, context, calibration)
        empty = jax.jit(make_cache, static_argnums=range(6))
        self._cache: KVCache = empty(self._architecture, count, *plan, platform_of(self._architecture.platform).parted_cache)
        # Only a compressed cache remembers what a new text must not see.
        self._fresh: KVCache | None = empty(self._architecture, 1, *plan) if self._cache.compressed else None
        self._ring = min(self._cache.spans)
        self.part = min(PART if self._cache.compressed else READ_AT_ONCE, _wide(context, SHORTEST))
        self._texts = [_Text() for _ in range(count)]
        self._examples: dict[Lane, Config] = {}
        self._rows: dict[Lane, tuple[SamplingParams, DecodeState]] = {}
        self._programs: dict[Hashable, Any] = {}
        self._compiling = Lock()
        # Making the arrays takes some ten milliseconds beside a running program, and clients ask with the same settings again.
        self._remembered = lru_cache(REMEMBERED)(self._way)

    # --- programs

    def lane(self, config: Config) -> Lane:
        """The lane that decodes with these settings.

        Raises:
          UserError: they differ from the server's in what its weights and caches were made by.
        """
        for name in ("weights", "products", "tensor_parallel", "use_cache"):
            asked, own = getattr(config.generation, name), getattr(self._config.generation, name)
            if asked != own:
                raise UserError(f"generation.{name} is {shown(own)} in this server, got {shown(asked)}")
        for name in type(config.kv).model_fields:
            asked, own = getattr(config.kv, name), getattr(self._config.kv, name)
            if asked != own:
                raise UserError(f"kv.{name} is {shown(own)} in this server, got {shown(asked)}")
        section = config.generation
        routed = section.strategy == "entropy"
        words = tuple((key, getattr(section, key)) for key in WORDS)
        lane = Lane(section.strategy, order_of(section), words, routed and config.router.use_attention)
        self._examples.setdefault(lane, config)
        return lane

    def ready(self, lane: Lane, echo: bool = False) -> bool:
        """Whether a text of this lane needs no compiling."""
        return all(key in self._programs for key in self._keys(lane, echo))

    def compile(self, lane: Lane, echo: bool = False) -> None:
        """Makes what a lane needs, which takes seconds, or a minute with a large vocabulary; from any thread."""
        with self._compiling:
            if lane not in self._rows:
                self._rows[lane] = self._empty(lane)
            for key in self._keys(lane, echo):
                if key not in self._programs:
                    self._programs[key] = self._compiled(*key)

    def _keys(self, lane: Lane, echo: bool) -> list[tuple[Any, ...]]:
        reads = [("read", length, told) for length in self._lengths() for told in {False, echo}]
        return [("decode", lane), ("seat", lane), ("begin", lane), ("copy",), *reads]

    def _lengths(self) -> list[int]:
        """The lengths that a part may be padded to."""
        lengths = [SHORTEST]
        while lengths[-1] < self.part:
            lengths.append(2 * lengths[-1])
        return lengths

    def _compiled(self, kind: str, *of: Any) -> Any:
        zero, V = jnp.int32(0), self._architecture.vocab_size
        count = min(ALTERNATIVES, V)
        if kind == "copy":
            return _copied.lower(_shapes(self._cache), zero, zero).compile()
        if kind == "read":
            length, told = of
            tokens_1T, report = jnp.zeros((1, length), jnp.int32), count if told else None
            return _read.lower(
                self._model, _shapes(self._cache), zero, tokens_1T, zero, zero, tokens_1T, report=report
            ).compile()
        (lane,) = of
        params, state = self._rows[lane]
        if kind == "decode":
            return _decode.lower(self._model, _shapes(self._cache), state, params, zero, report=count).compile()
        _, row, ends_1E = self.way(self._examples[lane])
        tokens_1S = np.zeros((1, self.context), np.int32)
        if kind == "begin":
            return _begun.lower(row, tokens_1S, zero, zero, ends_1E, vocab_size=V).compile()
        begun = jax.eval_shape(partial(_begun, vocab_size=V), row, tokens_1S, zero, zero, ends_1E)
        return _seated.lower((params, state), (row, begun), zero).compile()

    def _empty(self, lane: Lane) -> tuple[SamplingParams, DecodeState]:
        """The rows of a lane with nobody in them."""
        (_, row, ends_1E), V = self.way(self._examples[lane]), self._architecture.vocab_size
        tokens_1S = np.zeros((1, self.context), np.int32)
        state = _begun(row, tokens_1S, jnp.int32(1), jnp.int32(0), ends_1E, vocab_size=V)
        nobody = replace(row, on=jax.tree.map(jnp.zeros_like, row.on)), replace(state, done_B=jnp.ones(1, bool))
        return jax.tree.map(lambda x: jnp.repeat(x, self.count, axis=0), nobody)

    def way(self, config: Config) -> Way:
        """How a text with these settings is decoded; from any thread.

        Raises:
          UserError: as `lane`; or a list of the settings is too long for a server, or names what is no token.
        """
        same = {"seed": 0, "n": 1, "max_new_tokens": 0, "stop": ()}  # what no array but the seed has of these
        generation = config.generation.model_copy(update=same)
        way = self._remembered(
            Spelt(config.model_copy(update={"generation": generation}), generation, config.router, config.kv)
        )
        own: dict[str, Any] = {"seed": np.asarray([config.generation.seed or 0], np.uint32)}
        return way._replace(params=replace(way.params, **own))

    def _way(self, spelt: "Spelt[Config]") -> Way:
        config, tokenizer = spelt.value, self._run.tokenizer
        lane, section = self.lane(config), config.generation
        ends = [*stop_token_ids(tokenizer, section), *([] if section.ignore_eos else tokenizer.stop_ids)]
        if len(ends) > END_IDS:
            raise UserError(
                f"generation.stop_token_ids and the end tokens must be at most {END_IDS} in a server, got {len(ends)}"
            )
        params, V = self._run.params([seeded(config, 0)], also=(*EDITS, *lane.order)), self._architecture.vocab_size
        tables = {name: _filled(name, table, params.tables, V) for name, table in params.tables.items()}
        own: dict[str, Any] = {"reports": np.zeros(1, bool), "allowed": np.full((1, -(-V // 32)), ALL, np.uint32)}
        ends_1E = np.asarray([[*ends, *[NO_ID] * (END_IDS - len(ends))]], np.int32)
        return Way(lane, replace(params, tables=tables, **own), ends_1E)

    # --- texts

    def kept(self, ids: Sequence[int]) -> Kept:
        """The longest beginning of a prompt that need not be read again."""
        best = NOTHING
        if self._fresh is not None:
            return best
        for slot, text in enumerate(self._texts):
            if text.longest > self._ring:  # a windowed layer has written over its beginning
                continue
            most, length = min(text.exact, len(ids) - 1), 0
            while (end := length + self.part) <= most and text.ids[length:end] == tuple(ids[length:end]):
                length = end
            if length > best.length:
                best = Kept(slot, length)
        return best

    def begin(self, slot: int, ids: Sequence[int], kept: Kept = NOTHING, echo: bool = False) -> None:
        """Puts a prompt into a slot, whose earlier text is forgotten; `read` then reads it.

        Args:
          kept: as `kept` says, as long as nothing was begun since; with `echo` nothing.
          echo: report its tokens.
        """
        longest = 0
        if kept.slot is not None:
            longest = self._texts[kept.slot].longest
            if kept.slot != slot:
                self._cache = self._programs["copy",](self._cache, _number(kept.slot), _number(slot))
        if self._fresh is not None:
            self._cache = _put(self._cache, self._fresh, _number(slot))
        told: list[StepInfo] | None = [] if echo else None
        self._texts[slot] = _Text(tuple(ids), kept.length, kept.length, longest, told)

    def read(self, slot: int) -> int:
        """Reads the next part of a prompt, all but its last token; how many tokens are left to be read."""
        text = self._texts[slot]
        left = len(text.ids) - 1 - text.read
        if left == 0:
            return 0
        count = min(left, self.part)
        length = next(length for length in self._lengths() if length >= count)
        tokens_2T = np.zeros((2, length), np.int32)
        tokens_2T[0, :count] = text.ids[text.read : text.read + count]
        tokens_2T[1, :count] = text.ids[text.read + 1 : text.read + 1 + count]
        program = self._programs["read", length, text.told is not None]
        numbers = _number(slot), tokens_2T[:1], _number(text.read), _number(count), tokens_2T[1:]
        self._cache, info = program(self._model, self._cache, *numbers)
        if text.told is not None:
            text.told.append(jax.tree.map(lambda x: np.asarray(x)[:count], info))
        elif text.exact == text.read and count == self.part:
            text.exact += count
        text.read += count
        text.longest = max(text.longest, text.read)
        return left - count

    def echoed(self, slot: int) -> StepInfo | None:
        """What was reported about a prompt's tokens behind the first one, `[len(ids) − 1, …]`; None for a prompt of one."""
        told = self._texts[slot].told
        return jax.tree.map(lambda *parts: np.concatenate(parts), *told) if told else None

    def copy(self, slot: int, to: int) -> None:
        """Puts a prompt that has been read into another slot too."""
        text = self._texts[slot]
        self._cache = self._programs["copy",](self._cache, _number(slot), _number(to))
        self._texts[to] = _Text(text.ids, text.read, text.exact, text.longest)

    def start(self, slot: int, way: Way, *, limit: int, sample_index: int = 0, report: bool = False) -> None:
        """Begins to decode behind a prompt that has been read.

        Args:
          way: whose lane is ready.
          limit: new tokens, at most what the context has room for.
          report: give a `StepInfo` with the tokens.
        """
        text, lane = self._texts[slot], way.lane
        tokens_1S = np.zeros((1, self.context), np.int32)
        tokens_1S[0, : len(text.ids)] = text.ids
        told: dict[str, Any] = {"sample_index": np.asarray([sample_index], np.int32), "reports": np.asarray([report])}
        row = replace(way.params, **told)
        state = self._programs["begin", lane](row, tokens_1S, _number(len(text.ids)), _number(limit), way.ends_1E)
        self._rows[lane] = self._programs["seat", lane](self._rows[lane], (row, state), _number(slot))
        text.longest = max(text.longest, len(text.ids) + limit)
        text.left, text.lane, text.reports = limit, lane, report

    def allow(self, slot: int, bits_W: np.ndarray | None) -> None:
        """Leaves a text that is decoded these tokens alone, bit i mod 32 of word ⌊i/32⌋ being token i; None: all again."""
        lane = self._texts[slot].lane
        if lane is not None:
            params, state = self._rows[lane]
            allowed_BW = np.array(params.allowed)
            allowed_BW[slot] = ALL if bits_W is None else bits_W
            self._rows[lane] = replace(params, allowed=jax.device_put(allowed_BW)), state

    def stop(self, slot: int) -> None:
        """Ends a text now; of what is in flight nothing is its own any more."""
        text = self._texts[slot]
        if text.lane is not None:
            params, state = self._rows[text.lane]
            self._rows[text.lane] = params, replace(state, done_B=state.done_B.at[slot].set(True))
            text.lane = None

    def dispatch(self, steps: int) -> Flight:
        """Begins a chunk of at most `steps` ≤ 32 tokens of every text that is being decoded; returns without waiting.

        A text whose last token is in the chunk is not being decoded any more, and something else may be begun in its slot.
        """
        chunks, steps = [], min(steps, CHUNK)
        decoding = {slot: self._texts[slot] for slot in self.left()}
        for lane in dict.fromkeys(text.lane for text in decoding.values() if text.lane is not None):
            params, state = self._rows[lane]
            self._cache, state, emitted = self._programs["decode", lane](
                self._model, self._cache, state, params, _number(steps)
            )
            self._rows[lane] = params, state
            texts = {slot: text for slot, text in decoding.items() if text.lane == lane}
            for text in texts.values():
                text.left = max(0, text.left - steps)
            chunks.append((emitted, state.done_B, texts))
        return Flight(chunks)

    def left(self) -> dict[int, int]:
        """For each slot with a text that is being decoded the new tokens it may still have in chunks that are not begun."""
        return {slot: text.left for slot, text in enumerate(self._texts) if text.lane is not None and text.left > 0}

    def collect(self, flight: Flight) -> list[Gained]:
        """Waits for a chunk; in the order they were begun. What was stopped meanwhile is left out."""
        gained = []
        for emitted, done, texts in flight.chunks:
            info = emitted.info if any(text.reports for text in texts.values()) else None
            tokens_BN, active_BN, done_B, info = jax.device_get((emitted.tokens, emitted.active, done, info))
            for slot, text in texts.items():
                if text.lane is None:
                    continue
                count = int(active_BN[slot].sum())
                told = jax.tree.map(lambda x, slot=slot, n=count: x[slot, :n], info) if text.reports else None
                gained.append(Gained(slot, tokens_BN[slot, :count], bool(done_B[slot]), told))
                if done_B[slot]:
                    text.lane = None
        return gained


def row_bytes(run: LoadedModel, config: Config, context: int) -> int:
    """What the cache of one slot takes."""
    kv, calibration = run.kv(config)
    plan = plan_cache(run.model.config, kv, context, calibration)
    return size(jax.eval_shape(partial(make_cache, run.model.config, 1, *plan)))


def _number(value: int) -> np.ndarray:
    return np.asarray(value, np.int32)  # jnp.int32 would be an operation of its own, of a third of a millisecond


def _wide(length: int, least: int = 1) -> int:
    return max(least, 1 << max(length - 1, 0).bit_length())


def _shapes(tree: Any) -> Any:
    """What is donated when it is there, for compiling: only its shapes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _filled(name: str, table: jax.Array, tables: dict[str, jax.Array], vocab_size: int) -> Any:
    """A list of the steps with places for as many entries as any text may have."""
    if table.dtype == bool:
        return table
    key = name.removesuffix("_before").removesuffix("_by")
    most = SEQUENCES if f"{key}_before" in tables else min(ENTRIES_OF.get(key, ENTRIES), _wide(vocab_size))
    spare = [most - table.shape[1], *(LONGEST - size for size in table.shape[2:])]
    if min(spare) < 0:
        limit = f"{most} entries" + (f" of {LONGEST} tokens" if f"{key}_before" in tables else "")
        raise UserError(f"generation.{key} must have at most {limit} in a server")
    padding = [(0, 0), (0, spare[0]), *((before, 0) for before in spare[1:])]  # what is before a word ends at the word
    # By NumPy: an operation of jax would be compiled for every length of a list.
    return np.pad(np.asarray(table), padding, constant_values=0 if name.endswith("_by") else NO_ID)


@partial(jax.jit, static_argnames=("report",), donate_argnames=("cache",))
def _decode(
    model: Split, cache: KVCache, state: DecodeState, params: SamplingParams, steps: jax.Array, *, report: int
) -> tuple[KVCache, DecodeState, Emitted]:
    cache, state, emitted, _ = _generate_toks(model, cache, state, params, steps, use_cache=True, report=report)
    return cache, state, emitted


@partial(jax.jit, static_argnames=("report",), donate_argnames=("cache",))
def _read(
    model: Split,
    cache: KVCache,
    slot: jax.Array,
    tokens_1T: jax.Array,
    first: jax.Array,
    count: jax.Array,
    next_1T: jax.Array,
    *,
    report: int | None,
) -> tuple[KVCache, StepInfo | None]:
    """The cache with `count` tokens of a text in it, behind `first` others, and a report on the tokens after them."""
    transformer = widen(model.merge(model.leaves))
    places_T = jnp.arange(tokens_1T.shape[1])
    positions_1T = jnp.where(places_T < count, first + places_T, -1)[None]
    row = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), cache)
    x_1TD, row, _ = transformer.hidden(tokens_1T, positions_1T, cache=row)
    cache = jax.tree.map(lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, slot, 0), cache, row)
    if report is None:
        return cache, None

    def told(place: tuple[jax.Array, jax.Array]) -> StepInfo:
        logits_V = transformer.logits(place[0])
        return step_info(report, logits_V, logits_V, place[1], jnp.asarray(False))

    at_once = max(1, ECHOED // transformer.config.vocab_size)
    return cache, jax.lax.map(told, (x_1TD[0], next_1T[0]), batch_size=at_once)


@partial(jax.jit, donate_argnames=("cache",))
def _copied(cache: KVCache, source: jax.Array, to: jax.Array) -> KVCache:
    """The cache with what one slot holds in another too."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_update_slice_in_dim(x, jax.lax.dynamic_slice_in_dim(x, source, 1), to, 0), cache
    )


def _put_row(rows: Any, row: Any, slot: jax.Array) -> Any:
    return jax.tree.map(lambda x, one: jax.lax.dynamic_update_slice_in_dim(x, one, slot, 0), rows, row)


_put = jax.jit(_put_row, donate_argnums=0)  # of caches
_seated = jax.jit(_put_row)


@partial(jax.jit, static_argnames=("vocab_size",))
def _begun(
    params: SamplingParams, tokens_1S: jax.Array, length: jax.Array, limit: jax.Array, ends_1E: jax.Array, *, vocab_size: int
) -> DecodeState:
    """One row behind a prompt, of which all but the last token has been read."""
    S = tokens_1S.shape[1]
    valid_1S = (jnp.arange(S) < length)[None]
    return DecodeState(
        token_B=jax.lax.dynamic_slice_in_dim(tokens_1S[0], length - 1, 1),
        position_B=jnp.asarray(length - 1)[None],
        remaining_B=jnp.asarray(limit)[None],
        done_B=jnp.zeros(1, bool),
        eos_BE=ends_1E,
        sampler=init_state(params, tokens_1S, valid_1S, vocab_size, S),
        text_BS=None,
    )
