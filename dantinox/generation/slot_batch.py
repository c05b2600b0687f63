"""`SlotBatch`: continuous batching, the batch of a server; free slots are refilled with new requests.

The number of slots is fixed, and a request gives the same tokens in any slot, with any neighbours: each program is compiled for
all slots and for every sampling step, whatever the slots hold (a step that no row has on is skipped when the program runs).
Prompts are read in parts of a fixed length, each part by the same program, so that a part that was read for an earlier request
is bit for bit what would be read again.
"""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import Config, UserError
from dantinox.config.generation_settings import section_order
from dantinox.config.sampling_steps import EDIT_STEPS
from dantinox.files import quote
from dantinox.generation.cache_plan import head_order, plan_cache
from dantinox.generation.decode import COMPRESSED_PREFILL_CHUNK, DecodeState, Emitted, _generate_toks, prefill_hidden
from dantinox.generation.model_bundle import ModelBundle
from dantinox.generation.prefix_cache import NO_PREFIX, PrefixMatch, longest_prefix
from dantinox.generation.quantized_weights import SplitModel, dequantize, split_model
from dantinox.generation.running_batch import NO_ID, Row, RunningBatch
from dantinox.generation.token_settings import stop_token_ids, with_default_seed
from dantinox.model import KVCache, make_cache
from dantinox.model.scoring import map_positions
from dantinox.platform import get_platform, release_free_memory
from dantinox.programs import available_bytes, tree_bytes
from dantinox.sampling import ProgramOptions, SamplingParams, StepInfo, init_state
from dantinox.sampling.chain import ALL_ALLOWED
from dantinox.sampling.params import CHOICE_SETTINGS
from dantinox.sampling.report import step_info

READ_AT_ONCE = 64  # tokens of a prompt: more were not faster on a CPU, and more of a prompt that comes again would be read anew
SHORTEST = 16
COMPILERS = 2  # programs compiled at once
ALTERNATIVES = 20  # reported at most
CACHED_SETTINGS = 64  # settings whose arrays are kept
USUAL_SLOTS = 8
MEMORY_SHARE = 4  # the caches of all slots take at most one part in so many of the free memory
# Entries that a list of a request may have, and tokens of a sequence: with more it would need a program of its own.
ENTRIES, SEQUENCES, LONGEST, END_IDS = 1024, 256, 16, 32
ENTRIES_OF = {"stop_ids": END_IDS, "protected_ids": END_IDS, "dry_breakers": 8192}


class ProgramKey(NamedTuple):
    """What a decode program is compiled for: requests with one key are decoded together. There are few.

    One program reads the order of the steps, and the rules of ties and top_p, from arrays; the router has programs of its own.
    """

    strategy: str
    words: tuple[tuple[str, str], ...] = ()
    attends: bool = False


class RowParams(NamedTuple):
    """How a request is decoded: the parameters of a batch of one, lists padded to a common length, and its end ids."""

    program: ProgramKey
    params: SamplingParams
    ends_1E: np.ndarray


@dataclass(eq=False)
class _SlotRow(Row):
    """The host's side of a request in a slot.

    Attributes:
      read: tokens in the cache, `exact` of them read in whole parts.
      longest: the number of positions that may have been written.
      prompt_reports: what was reported of the prompt's tokens, part by part; None where it is not requested.
    """

    ids: Sequence[int] = ()
    read: int = 0
    exact: int = 0
    longest: int = 0
    prompt_reports: list[StepInfo] | None = None


T = TypeVar("T")


class CacheKey(Generic[T]):
    """A value with a hashable key: two are equal if their `parts` have equal representations."""

    def __init__(self, value: T, *parts: object):
        self.value, self.text = value, repr(parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheKey) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


class SlotBatch(RunningBatch):
    """A running batch with refilled slots. Its methods are for one thread, except `program_key`, `row_params`, `ready`,
    `compile`.

    Attributes:
      context: tokens that a request may have with its continuation.
      part: tokens of a prompt that are read at once.
    """

    refills = True

    def __init__(self, model: ModelBundle, count: int | None, context: int, config: Config | None = None):
        """Chooses the number of slots; `compile` allocates their memory.

        Args:
          count: the slots; None: 8, or fewer where their caches would take over a quarter of the free memory.
          config: the server's settings, which decide on weights and caches; None: those of the run.

        Raises:
          UserError: the model's context is shorter, these settings cannot be served, or not even one slot fits the memory.
        """
        config = config or model.config
        if not 2 <= context <= model.model.config.max_context:
            raise UserError(f"context must be in [2, {model.model.config.max_context}], which the model has, got {context}")
        if config.generation.tensor_parallel > 1:
            raise UserError(f"generation.tensor_parallel must be 1 in a server, got {config.generation.tensor_parallel}")
        if not config.generation.use_cache:
            raise UserError("generation.use_cache must be true in a server, got false")
        self._architecture = model.model.config
        kv, calibration = model.kv(config)
        plan = plan_cache(self._architecture, kv, context, calibration)
        super().__init__(_fitting_slots(self._architecture, plan, context) if count is None else count)
        self.context, self._loaded, self._config = context, model, config
        self._model = split_model(model.prepared(config.generation, head_order(self._architecture, kv, calibration)))
        segmented = get_platform(self._architecture.platform).segmented_cache
        compiled = jax.jit(make_cache, static_argnums=range(6))
        self._make_cache: Callable[[int], KVCache] = lambda rows: compiled(self._architecture, rows, *plan, segmented)
        self._cache_shapes: KVCache = jax.eval_shape(lambda: self._make_cache(self.count))
        # Only a compressed cache keeps what a new request must not see.
        self._fresh: KVCache | None = self._make_cache(1) if self._cache_shapes.compressed else None
        self._ring = min(self._cache_shapes.uncompressed_slots)
        self.part = min(COMPRESSED_PREFILL_CHUNK if self._cache_shapes.compressed else READ_AT_ONCE, _wide(context, SHORTEST))
        self._rows: list[_SlotRow] = [_SlotRow() for _ in range(self.count)]  # type: ignore[assignment]
        self._programs: dict[Hashable, Any] = {}
        self._compiling = Lock()
        # Making the arrays takes some ten milliseconds beside a running program, and clients repeat their settings.
        self._remembered = lru_cache(CACHED_SETTINGS)(self._row_params)

    # --- programs

    def program_key(self, config: Config) -> ProgramKey:
        """The key of the program that decodes with these settings.

        Raises:
          UserError: they differ from the server's in what its weights and caches were made by.
        """
        for section, names in (
            ("generation", ("weights", "matmul_dtype", "tensor_parallel", "use_cache")),
            ("kv", type(config.kv).model_fields),
        ):
            for name in names:
                asked, own = (getattr(getattr(c, section), name) for c in (config, self._config))
                if asked != own:
                    key = f"{section}.{name}"
                    raise UserError(f"{key} is {quote(own)} in this server, got {quote(asked)}", key=key, value=asked)
        g = config.generation
        if g.strategy == "chain":
            return ProgramKey("chain")
        return ProgramKey(g.strategy, tuple((key, getattr(g, key)) for key in CHOICE_SETTINGS), config.router.use_attention)

    def ready(self, program: ProgramKey, echo: bool = False) -> bool:
        """Whether a request with this key needs no compilation."""
        return all(key in self._programs for key in self._keys(program, echo))

    def compile(self, config: Config, echo: bool = False) -> None:
        """Compiles what requests with these settings need, which takes seconds; from any thread, one at a time.

        The first call allocates the cache at its end.
        """
        program = self.program_key(config)
        with self._compiling:
            if program not in self._states:
                self._states[program] = self._empty(config)
            missing = [key for key in self._keys(program, echo) if key not in self._programs]
            with ThreadPoolExecutor(COMPILERS) as pool:  # XLA compiles much of a program on one core
                self._programs |= zip(missing, pool.map(lambda key: self._compile(config, *key), missing), strict=True)
            if self.cache is None:
                release_free_memory()  # what compilation took: the two peaks do not add up
                self.cache = self._make_cache(self.count)

    def _keys(self, program: ProgramKey, echo: bool) -> list[tuple[Any, ...]]:
        reads = [("read", length, reports) for length in self._lengths() for reports in {False, echo}]
        return [("decode", program), ("insert", program), ("init", program), ("copy",), *reads]

    def _lengths(self) -> list[int]:
        """The lengths that a part may be padded to."""
        lengths = [SHORTEST]
        while lengths[-1] < self.part:
            lengths.append(min(4 * lengths[-1], self.part))
        return lengths

    def _compile(self, config: Config, kind: str, *of: Any) -> Any:
        zero, V = jnp.int32(0), self._architecture.vocab_size
        cache, report = self._cache_shapes, min(ALTERNATIVES, V)
        if kind == "copy":  # by array, so that one copy exists at a time
            kinds = {(leaf.shape, leaf.dtype): leaf for leaf in jax.tree.leaves(cache)}
            return {kind: _copy_slot.lower(leaf, zero, zero).compile() for kind, leaf in kinds.items()}
        if kind == "read":
            length, reports = of
            tokens_1T = jnp.zeros((1, length), jnp.int32)
            args = self._model, cache, zero, tokens_1T, zero, zero, tokens_1T
            return _prefill_part.lower(*args, report=report if reports else None).compile()
        params, state = self._states[of[0]]
        if kind == "decode":
            return _decode.lower(self._model, cache, state, params, zero, report=report).compile()
        _, row, ends_1E = self.row_params(config)
        tokens_1S = np.zeros((1, self.context), np.int32)
        if kind == "init":
            return _init_row.lower(row, tokens_1S, zero, zero, ends_1E, vocab_size=V).compile()
        initial = jax.eval_shape(partial(_init_row, vocab_size=V), row, tokens_1S, zero, zero, ends_1E)
        return _insert_row.lower((params, state), (row, initial), zero).compile()

    def _empty(self, config: Config) -> tuple[SamplingParams, DecodeState]:
        """The parameters and the state of all rows with no request in them."""
        (_, row, ends_1E), V = self.row_params(config), self._architecture.vocab_size
        tokens_1S = np.zeros((1, self.context), np.int32)
        state = _init_row(row, tokens_1S, jnp.int32(1), jnp.int32(0), ends_1E, vocab_size=V)
        idle = replace(row, enabled=jax.tree.map(jnp.zeros_like, row.enabled)), replace(state, done_B=jnp.ones(1, bool))
        rows: tuple[SamplingParams, DecodeState] = jax.tree.map(lambda x: jnp.repeat(x, self.count, axis=0), idle)
        return rows

    def row_params(self, config: Config) -> RowParams:
        """How a request with these settings is decoded; from any thread.

        Raises:
          UserError: as of `program_key`; or a list of the settings is too long for a server, or names what is no token.
        """
        same = {"seed": 0, "n": 1, "max_new_tokens": 0, "stop": ()}  # which no array but the seed depends on
        generation = config.generation.model_copy(update=same)
        key = CacheKey(config.model_copy(update={"generation": generation}), generation, config.router, config.kv)
        made = self._remembered(key)
        own: dict[str, Any] = {"seed": np.asarray([config.generation.seed or 0], np.uint32)}
        return made._replace(params=replace(made.params, **own))

    def _row_params(self, key: "CacheKey[Config]") -> RowParams:
        config, tokenizer = key.value, self._loaded.tokenizer
        program, section = self.program_key(config), config.generation
        ends = [*stop_token_ids(tokenizer, section), *([] if section.ignore_eos else tokenizer.stop_ids)]
        if len(ends) > END_IDS:
            raise UserError(
                f"generation.stop_token_ids and the end tokens must be at most {END_IDS} in a server, got {len(ends)}",
                key="generation.stop_token_ids",
            )
        chain = section.strategy == "chain"
        options: ProgramOptions = {"dynamic_order": True} if chain else {"extra_steps": (*EDIT_STEPS, *section_order(section))}
        params, V = self._loaded.params([with_default_seed(config, 0)], **options), self._architecture.vocab_size
        tables = {name: _padded_table(name, table, params.tables, V) for name, table in params.tables.items()}
        own: dict[str, Any] = {
            "report_rows": np.zeros(1, bool),
            "allowed_bits": np.full((1, -(-V // 32)), ALL_ALLOWED, np.uint32),
        }
        ends_1E = np.asarray([[*ends, *[NO_ID] * (END_IDS - len(ends))]], np.int32)
        return RowParams(program, replace(params, tables=tables, **own), ends_1E)

    # --- requests

    def match_prefix(self, ids: Sequence[int]) -> PrefixMatch:
        """The longest beginning of a prompt that need not be read again."""
        if self._fresh is not None:
            return NO_PREFIX
        # Where a row is longer than the ring of a windowed layer, its beginning has been overwritten.
        held = ((slot, row.ids, row.exact) for slot, row in enumerate(self._rows) if row.longest <= self._ring)
        return longest_prefix(ids, held, self.part)

    def begin(self, slot: int, ids: Sequence[int], match: PrefixMatch = NO_PREFIX, echo: bool = False) -> None:
        """Puts a prompt into a slot, whose earlier request is forgotten; `read` then reads it.

        Args:
          match: from `match_prefix`, valid until the next `begin`; with `echo` no match.
          echo: report the prompt's tokens.
        """
        self._rows[slot], source = _SlotRow(ids=tuple(ids)), self._rows[match.slot or 0]
        row = self._rows[slot]
        if match.slot is not None:
            row.read, row.exact, row.longest = match.length, match.length, source.longest
            if match.slot != slot:
                self._copy(match.slot, slot)
        if self._fresh is not None:
            self.cache = _put(self.cache, self._fresh, _number(slot))
        row.prompt_reports = [] if echo else None

    def read(self, slot: int) -> int:
        """Reads the next part of a prompt, all but its last token; returns how many tokens are left to read."""
        row = self._rows[slot]
        left = len(row.ids) - 1 - row.read
        if left == 0:
            return 0
        count = min(left, self.part)
        length = next(length for length in self._lengths() if length >= count)
        tokens_2T = np.zeros((2, length), np.int32)
        tokens_2T[0, :count] = row.ids[row.read : row.read + count]
        tokens_2T[1, :count] = row.ids[row.read + 1 : row.read + 1 + count]
        program = self._programs["read", length, row.prompt_reports is not None]
        numbers = _number(slot), tokens_2T[:1], _number(row.read), _number(count), tokens_2T[1:]
        self.cache, info = program(self._model, self.cache, *numbers)
        if row.prompt_reports is not None:
            row.prompt_reports.append(jax.tree.map(lambda x: np.asarray(x)[:count], info))
        elif row.exact == row.read and count == self.part:
            row.exact += count
        row.read += count
        row.longest = max(row.longest, row.read)
        return left - count

    def prompt_steps(self, slot: int) -> StepInfo | None:
        """What was reported of a prompt's tokens after the first one, `[len(ids) − 1, …]`; None for a prompt of one token."""
        reports = self._rows[slot].prompt_reports
        return jax.tree.map(lambda *parts: np.concatenate(parts), *reports) if reports else None

    def copy(self, slot: int, to: int) -> None:
        """Puts a prompt that has been read into another slot too."""
        row = self._rows[slot]
        self._copy(slot, to)
        self._rows[to] = _SlotRow(ids=row.ids, read=row.read, exact=row.exact, longest=row.longest)

    def _copy(self, slot: int, to: int) -> None:
        programs, numbers = self._programs["copy",], (_number(slot), _number(to))
        self.cache = jax.tree.map(lambda leaf: programs[leaf.shape, leaf.dtype](leaf, *numbers), self.cache)

    def start(self, slot: int, how: RowParams, *, limit: int, sample_index: int = 0, report: bool = False) -> None:
        """Starts to decode a prompt that has been read.

        Args:
          how: from `row_params`; its program is ready.
          limit: new tokens, at most what the context has room for.
          report: return a `StepInfo` with the tokens.
        """
        row, program = self._rows[slot], how.program
        tokens_1S = np.zeros((1, self.context), np.int32)
        tokens_1S[0, : len(row.ids)] = row.ids
        own: dict[str, Any] = {"sample_index": np.asarray([sample_index], np.int32), "report_rows": np.asarray([report])}
        params = replace(how.params, **own)
        state = self._programs["init", program](params, tokens_1S, _number(len(row.ids)), _number(limit), how.ends_1E)
        self._states[program] = self._programs["insert", program](self._states[program], (params, state), _number(slot))
        # Changes of the slot's earlier request, which are not written yet, must not reach this one.
        self._stopped.get(program, set()).discard(slot)
        if program in self._masks:
            self._masks[program][slot] = ALL_ALLOWED
        row.longest = max(row.longest, len(row.ids) + limit)
        row.left, row.program, row.reports = limit, program, report

    def _decode(self, program: Hashable, steps: int) -> tuple[Emitted, jax.Array]:
        params, state = self._states[program]
        self.cache, state, emitted = self._programs["decode", program](self._model, self.cache, state, params, _number(steps))
        self._states[program] = params, state
        return emitted, state.done_B

    def reset(self) -> None:
        """Empties all slots after a failed program, which may have consumed the cache."""
        self.cache = self._make_cache(self.count)
        self._rows = [_SlotRow() for _ in range(self.count)]
        self._masks, self._stopped = {}, {}
        for program, (params, state) in [*self._states.items()]:
            self._states[program] = params, replace(state, done_B=jnp.ones(self.count, bool))

    @property
    def intact(self) -> bool:
        """Whether the cache is there: a program that fails after it has consumed the cache leaves none."""
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.cache))


def _fitting_slots(architecture: Any, plan: Any, context: int) -> int:
    """The slots whose caches fit.

    Raises:
      UserError: not even one does.
    """
    needed = tree_bytes(jax.eval_shape(partial(make_cache, architecture, 1, *plan)))
    free = available_bytes(jax.devices()[0])
    if free is None:
        return USUAL_SLOTS
    if (fitting := free // MEMORY_SHARE // needed) < 1:
        raise UserError(
            f"the cache of one request of {context} tokens takes {needed / 1e9:.1f} GB, over a quarter of the "
            f"{free / 1e9:.1f} GB that are free: give a shorter context"
        )
    return int(min(USUAL_SLOTS, fitting))


def _number(value: int) -> np.ndarray:
    return np.asarray(value, np.int32)  # jnp.int32 would be an operation of its own, of a third of a millisecond


def _wide(length: int, least: int = 1) -> int:
    return max(least, 1 << max(length - 1, 0).bit_length())


def _padded_table(name: str, table: jax.Array, tables: dict[str, jax.Array], vocab_size: int) -> Any:
    """A list of the steps with room for as many entries as any request may have."""
    if table.dtype == bool:
        return table
    key = name.removesuffix("_before").removesuffix("_by")
    most = SEQUENCES if f"{key}_before" in tables else min(ENTRIES_OF.get(key, ENTRIES), _wide(vocab_size))
    spare = [most - table.shape[1], *(LONGEST - size for size in table.shape[2:])]
    if min(spare) < 0:
        limit = f"{most} entries" + (f" of {LONGEST} tokens" if f"{key}_before" in tables else "")
        raise UserError(f"generation.{key} must have at most {limit} in a server", key=f"generation.{key}")
    padding = [(0, 0), (0, spare[0]), *((before, 0) for before in spare[1:])]  # what is before a word ends at the word
    # By NumPy: an operation of jax would be compiled for every length of a list.
    return np.pad(np.asarray(table), padding, constant_values=0 if name.endswith("_by") else NO_ID)


@partial(jax.jit, static_argnames=("report",), donate_argnames=("cache",))
def _decode(
    model: SplitModel, cache: KVCache, state: DecodeState, params: SamplingParams, steps: jax.Array, *, report: int
) -> tuple[KVCache, DecodeState, Emitted]:
    cache, state, emitted, _ = _generate_toks(model, cache, state, params, steps, use_cache=True, report=report)
    return cache, state, emitted


@partial(jax.jit, static_argnames=("report",), donate_argnames=("cache",))
def _prefill_part(
    model: SplitModel,
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
    transformer = dequantize(model.merge(model.leaves))
    places_T = jnp.arange(tokens_1T.shape[1])
    positions_1T = jnp.where(places_T < count, first + places_T, -1)[None]
    x_1TD, read, _ = prefill_hidden(transformer, tokens_1T, positions_1T, cache.at_slot(slot))
    assert read is not None
    cache = read.without_slot()
    if report is None:
        return cache, None

    def report_of(x_D: jax.Array, token: jax.Array) -> StepInfo:
        logits_V = transformer.logits(x_D)
        return step_info(report, logits_V, logits_V, token, jnp.asarray(False))

    info = map_positions(report_of, transformer.config.vocab_size, x_1TD, next_1T)
    return cache, jax.tree.map(lambda x_1T: x_1T[0], info)


@partial(jax.jit, donate_argnames=("leaf",))
def _copy_slot(leaf: jax.Array, source: jax.Array, to: jax.Array) -> jax.Array:
    """An array of the cache with what one slot holds in another too."""
    return jax.lax.dynamic_update_slice_in_dim(leaf, jax.lax.dynamic_slice_in_dim(leaf, source, 1), to, 0)


def _put_row(rows: Any, row: Any, slot: jax.Array) -> Any:
    return jax.tree.map(lambda x, one: jax.lax.dynamic_update_slice_in_dim(x, one, slot, 0), rows, row)


_put = jax.jit(_put_row, donate_argnums=0)  # of caches
_insert_row = jax.jit(_put_row)


@partial(jax.jit, static_argnames=("vocab_size",))
def _init_row(
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
