"""`SlotBatch`: the batch of a server, with continuous batching: new requests refill the slots of finished requests.

The number of slots is fixed. A request gets the same tokens in any slot and next to any other requests, because each program
is compiled for all slots and all sampling steps; a step that no row uses is skipped at run time. Prompts are prefilled in
chunks of a fixed length by the same program, and the prefix cache stores only what this program computed, so a prefix from an
earlier request is bitwise equal to a new prefill.
"""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import Config, GenerationSection, UserError
from dantinox.config.generation_settings import section_order
from dantinox.config.sampling_steps import EDIT_STEPS
from dantinox.files import quote
from dantinox.generation.adapter_slots import NO_ADAPTER, AdapterSlot, AdapterSlots, unknown_adapter
from dantinox.generation.block_pool import caches_of
from dantinox.generation.cache_plan import head_order, plan_cache
from dantinox.generation.decode import (
    COMPRESSED_PREFILL_CHUNK,
    DecodeState,
    Emitted,
    _generate_toks,
    init_row,
    prefill_hidden,
    write_row,
)
from dantinox.generation.drafts import NO_DRAFTS, DraftPlan, PairedCache, plan_drafts
from dantinox.generation.guidance import RowPairs
from dantinox.generation.model_bundle import ModelBundle
from dantinox.generation.prefix_cache import PrefixCache, PrefixStatus, make_prefix_cache, pool_bytes
from dantinox.generation.prefix_files import fingerprint, read_blocks, write_blocks
from dantinox.generation.quantized_weights import SplitModel, dequantize, split_model
from dantinox.generation.running_batch import NO_ID, Recurrent, Row, RowStatus, RunningBatch, restart_slots
from dantinox.generation.token_settings import stop_token_ids, with_default_seed
from dantinox.model import KVCache, Transformer, make_cache
from dantinox.model.row_adapters import RowAdapters, Stacks, attach_adapters
from dantinox.model.scoring import map_positions
from dantinox.platform import get_platform, release_free_memory
from dantinox.programs import available_bytes, tree_bytes
from dantinox.sampling import ProgramOptions, SamplingParams, StepInfo
from dantinox.sampling.chain import ALL_ALLOWED
from dantinox.sampling.params import CHOICE_SETTINGS
from dantinox.sampling.report import step_info
from dantinox.sampling.state import RECURRENT_FIELDS, fields_read

# Tokens per prefill chunk. Longer chunks were not faster on a CPU, and decoding would have to wait longer for one of them.
SLOT_PREFILL_CHUNK = 64
MIN_PADDED_CHUNK = 16
COMPILE_THREADS = 2  # programs compiled in parallel
MAX_ALTERNATIVES = 20  # the most alternatives reported per token
CACHED_SETTINGS = 64  # different request settings whose parameter arrays are cached
DEFAULT_SLOTS = 8
MEMORY_SHARE = 4  # the caches of all slots take at most 1 / MEMORY_SHARE of the free memory
# Limits for the lists in the settings of a request: entries of a list, sequences in a list, tokens per sequence, and end ids.
# Lists are padded to these sizes, so that all requests share the same programs.
MAX_ENTRIES, MAX_SEQUENCES, MAX_SEQUENCE_LENGTH, MAX_END_IDS = 1024, 256, 16, 32
MAX_ENTRIES_BY_SETTING = {"stop_ids": MAX_END_IDS, "protected_ids": MAX_END_IDS, "dry_breakers": 8192, "watermark_keys": 32}


class ProgramKey(NamedTuple):
    """The key of a decode program; requests with the same key are decoded together.

    All requests without the router share one program, which reads the order of the sampling steps and the rules for ties and
    top_p from arrays. With the router, different rules need different programs. Requests with guidance have programs of their
    own, whose rows form pairs.
    """

    strategy: str
    words: tuple[tuple[str, str], ...] = ()
    attends: bool = False
    has_guidance: bool = False


class RowParams(NamedTuple):
    """The settings of a request as arrays: sampling parameters with a batch of one and padded lists, and end ids.

    `max_drafts` is the most draft tokens per step; 0: no drafts.
    """

    program: ProgramKey
    params: SamplingParams
    end_ids_1E: np.ndarray
    max_drafts: int = 0


@dataclass(eq=False)
class _SlotRow(Row):
    """The state of a request in a slot, on the host.

    Attributes:
      salt: separates the prefixes of this request from those of requests with another salt.
      length: the number of tokens to prefill.
      cacheable: how many of them, from the first on, belong into the prefix cache. They are computed by the program for whole
        chunks, or by programs with bitwise equal results.
      prefilled: the number of tokens in the slot; of these, `reused` came from the prefix cache.
      prompt_reports: the reports of the prompt tokens, chunk by chunk; None if they are not requested.
      adapter: the adapter of the request.
    """

    ids: Sequence[int] = ()
    salt: str = ""
    length: int = 0
    cacheable: int = 0
    prefilled: int = 0
    reused: int = 0
    prompt_reports: list[StepInfo] | None = None
    adapter: AdapterSlot = NO_ADAPTER


T = TypeVar("T")


class CacheKey(Generic[T]):
    """A hashable wrapper of a value; two keys are equal if the `repr` of their `parts` is equal."""

    def __init__(self, value: T, *parts: object):
        self.value, self.text = value, repr(parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheKey) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


class SlotBatch(RunningBatch):
    """A running batch whose free slots are refilled.

    Only one thread may call its methods, except `program_key`, `row_params`, `ready` and `compile`, which any thread may call.

    Attributes:
      context: the most tokens of a prompt plus its continuation.
      prefill_chunk: the most prompt tokens that one call of `prefill` processes.
      adapters: the adapters that requests may use; None: the programs support no adapters.
    """

    refills = True

    def __init__(
        self,
        model: ModelBundle,
        count: int | None,
        context: int,
        config: Config | None = None,
        *,
        max_loras: int | None = None,
        max_lora_rank: int | None = None,
        prefix_cache: int | None = None,
        cache_dir: Path | None = None,
    ):
        """Chooses the number of slots; `compile` allocates their memory.

        Args:
          count: the number of slots; None: 8, or fewer if their caches would take over a quarter of the free memory.
          config: the settings of the server for weights and caches; None: the settings of the run.
          max_loras: the most adapters that can be loaded at the same time; None: those that the model has, without changes.
          max_lora_rank: the largest rank of an adapter; None: that of the adapters of the model, and at least 16 with
            `max_loras`.
          prefix_cache: the bytes of the prefix cache; 0: no prefix cache; None: as many as four times the slots, but at most an
            eighth of the free memory. A compressed cache has no prefix cache.
          cache_dir: the folder from which `compile` restores the prefix cache, and to which `write_prefixes` writes it.

        Raises:
          UserError: the model has a shorter context, a server does not support these settings, or not even one slot fits into
            memory.
        """
        config = config or model.config
        if not 2 <= context <= model.model.config.max_context:
            raise UserError(f"context must be in [2, {model.model.config.max_context}], got {context}")
        if config.generation.tensor_parallel > 1:
            raise UserError(f"generation.tensor_parallel must be 1 in a server, got {config.generation.tensor_parallel}")
        if not config.generation.use_cache:
            raise UserError("generation.use_cache must be true in a server, got false")
        self._architecture = model.model.config
        kv, calibration = model.kv(config)
        plan = plan_cache(self._architecture, kv, context, calibration)
        order = head_order(self._architecture, kv, calibration)
        self.adapters = None
        if model.loras or max_loras:
            rows = count or DEFAULT_SLOTS
            self.adapters = AdapterSlots(self._architecture, model.loras, order, max_loras, max_lora_rank, rows)
        super().__init__(_fitting_slots(self._architecture, plan, context) if count is None else count)
        self.context, self._bundle, self._config = context, model, config
        prepared = model.prepared(config.generation, order)
        draft_model = model.draft_model(config.generation)
        self._model, self._draft_model = split_model(prepared), None if draft_model is None else split_model(draft_model)
        self._draft_plan = plan_drafts(config, prepared, self.count, context, draft_model)
        segmented = get_platform(self._architecture.platform).segmented_cache
        # Tokens in pending chunks, which a restart drops, must not overwrite the window before them.
        plan = plan._replace(extra=restart_slots(self._draft_plan))
        compiled = jax.jit(make_cache, static_argnums=range(7))

        def make(rows: int) -> KVCache | PairedCache:
            cache: KVCache = compiled(self._architecture, rows, *plan, segmented)
            if draft_model is None or self._draft_plan is None or self._draft_plan.cache is None:
                return cache
            return PairedCache(cache, compiled(draft_model.config, rows, *self._draft_plan.cache, segmented))

        self._make_cache = make
        self._cache_shapes: KVCache | PairedCache = jax.eval_shape(lambda: self._make_cache(self.count))
        # A slot of a compressed cache must be cleared before a new request. Other caches do not need this.
        compressed = caches_of(self._cache_shapes)[0].compressed
        self._empty_row = self._make_cache(1) if compressed else None
        self.can_restart = not compressed
        chunk = COMPRESSED_PREFILL_CHUNK if compressed else SLOT_PREFILL_CHUNK
        self.prefill_chunk = min(chunk, _next_power_of_two(context, MIN_PADDED_CHUNK))
        self._prefixes: PrefixCache | None = None  # `compile` creates it
        self._cache_dir, self._fingerprint = cache_dir, ""
        self._prefix_bytes = pool_bytes(self._cache_shapes, context, self.prefill_chunk, prefix_cache)
        self._rows: list[_SlotRow] = [_SlotRow() for _ in range(self.count)]  # type: ignore[assignment]
        self._programs: dict[Hashable, Any] = {}
        self._compiling = Lock()
        # Clients repeat their settings, so the arrays are cached: creating them takes about 10 ms while a program is running.
        self._cached_row_params = lru_cache(CACHED_SETTINGS)(self._row_params)

    # --- programs

    def program_key(self, config: Config) -> ProgramKey:
        """Returns the key of the program that decodes with these settings.

        Raises:
          UserError: a setting of weights or caches, or of the watermark of the server, differs from that of the server.
        """
        for section, names in (
            ("generation", ("weights", "matmul_dtype", "matmul_kernel", "tensor_parallel", "use_cache")),
            ("kv", type(config.kv).model_fields),
        ):
            for name in names:
                requested, served = (getattr(getattr(c, section), name) for c in (config, self._config))
                if requested != served:
                    key = f"{section}.{name}"
                    message = f"{key} is {quote(served)} in this server, got {quote(requested)}"
                    raise UserError(message, key=key, value=requested)
        if (beams := config.generation.num_beams) > 1:
            message = f"generation.num_beams must be 1 in a server, got {beams}: beam search runs offline only"
            raise UserError(message, key="generation.num_beams", value=beams)
        self._check_drafts(config.generation)
        g, served_keys = config.generation, self._config.generation.watermark_keys
        for key in ("watermark_keys", "watermark_ngram"):
            if served_keys and getattr(g, key) != getattr(
                self._config.generation, key
            ):  # the message must not contain the keys
                raise UserError(f"generation.{key} is set by this server and cannot be changed", key=f"generation.{key}")
        has_guidance = g.guidance_scale != 1
        if g.strategy == "chain":
            return ProgramKey("chain", has_guidance=has_guidance)
        words = tuple((key, getattr(g, key)) for key in CHOICE_SETTINGS)
        return ProgramKey(g.strategy, words, config.router.use_attention, has_guidance)

    def _check_drafts(self, requested: GenerationSection) -> None:
        """Checks that the drafts of a request are a part of those that the programs of the server can verify."""
        served, name = self._config.generation, "speculation"
        if requested.speculation == "off":
            return
        if requested.speculation == served.speculation:
            name = "ngram_size" if requested.speculation == "ngram" else "draft_run"
            if getattr(requested, name) == getattr(served, name):
                if requested.draft_tokens > served.draft_tokens:
                    message = f"must be at most {served.draft_tokens} in this server, got {requested.draft_tokens}"
                    raise UserError(f"generation.draft_tokens {message}", key="generation.draft_tokens")
                return
        message = f"is {getattr(served, name)} in this server, got {getattr(requested, name)}"
        raise UserError(f"generation.{name} {message}", key=f"generation.{name}")

    def ready(self, program: ProgramKey, echo: bool = False) -> bool:
        """Returns whether all programs for requests with this key are compiled."""
        return all(key in self._programs for key in self._keys(program, echo))

    def compile(self, config: Config, echo: bool = False) -> None:
        """Compiles the programs for requests with these settings, which takes seconds. The first call also allocates the cache.

        Any thread may call it; simultaneous calls run one after the other.
        """
        program = self.program_key(config)
        with self._compiling:
            if program not in self._states:
                self._states[program] = self._idle_rows(config)
            missing = [key for key in self._keys(program, echo) if key not in self._programs]
            with ThreadPoolExecutor(COMPILE_THREADS) as pool:  # XLA compiles a program mostly on one core
                self._programs |= zip(missing, pool.map(lambda key: self._compile(config, *key), missing), strict=True)
            if self.cache is None:
                release_free_memory()  # free the memory of the compiler before the cache is allocated
                self.cache = self._make_cache(self.count)
                self._prefixes = self._make_prefix_cache()

    def _make_prefix_cache(self) -> PrefixCache | None:
        """Returns an empty prefix cache; None if it is off."""
        if self._prefix_bytes == 0:
            return None
        # The measurement of the prefix cache uses no adapter, so it says nothing about the products with their matrices.
        whole_chunks = self.adapters is not None
        lengths = self._lengths()
        prefixes = make_prefix_cache(self, self._architecture, self._prefix_bytes, self.context, lengths, whole_chunks)
        if self._cache_dir is not None:
            programs = [self._lower_prefill(length, False).as_text() for length in self._lengths()]
            weights = [*self._model.leaves, *(() if self._draft_model is None else self._draft_model.leaves)]
            self._fingerprint = fingerprint(programs, weights, prefixes.probe)
            found = read_blocks(self._cache_dir, prefixes.pool, self._fingerprint, prefixes.size)
            if found is not None:
                prefixes.restore(found)
        return prefixes

    def prefix_writer(self) -> Callable[[], int]:
        """Copies the blocks of the prefix cache, and returns a function for any thread that writes them to `cache_dir`.

        The function returns the number of blocks.

        Raises:
          UserError: there is no prefix cache or no folder, or (from the function) the file cannot be written.
        """
        folder, prefixes, name = self._cache_dir, self._prefixes, self._fingerprint
        if folder is None or prefixes is None:
            raise UserError("the prefix cache of this server is not saved: start it with --cache_dir")
        found = prefixes.snapshot()

        def write() -> int:
            write_blocks(folder, found, name)
            return len(found.blocks)

        return write

    def _keys(self, program: ProgramKey, echo: bool) -> list[tuple[Any, ...]]:
        prefills = [("prefill", length, reports) for length in self._lengths() for reports in {False, echo}]
        return [("decode", program), ("insert", program), ("init", program), ("copy",), *prefills]

    def _lengths(self) -> list[int]:
        """Returns the padded lengths of prefill chunks, ascending."""
        lengths, factor = [MIN_PADDED_CHUNK], 2 if self.prefill_chunk <= SLOT_PREFILL_CHUNK else 4
        while lengths[-1] < self.prefill_chunk:
            lengths.append(min(factor * lengths[-1], self.prefill_chunk))
        return lengths

    def _compile(self, config: Config, kind: str, *key: Any) -> Any:
        zero, V = jnp.int32(0), self._architecture.vocab_size
        cache, report = self._cache_shapes, min(MAX_ALTERNATIVES, V)
        if kind == "copy":  # one program per array, so that only one array is copied at a time
            leaves = {(leaf.shape, leaf.dtype): leaf for leaf in jax.tree.leaves(cache)}
            return {shape: _copy_slot.lower(leaf, zero, zero).compile() for shape, leaf in leaves.items()}
        if kind == "prefill":
            return self._lower_prefill(*key).compile()
        params, state = self._states[key[0]]
        if kind == "decode":
            drafts = self._draft_plan
            inputs = self._model, cache, state, params, zero, self._draft_model, self._stacks
            return _decode.lower(*inputs, report=report, draft_plan=drafts).compile()
        row, inputs, options = self._init_inputs(self.row_params(config), (), 0, 0, None, NO_ADAPTER)
        options |= _pairs_option(key[0], RowPairs.row(0, 0))
        if kind == "init":
            return _init_row.lower(row, *inputs, **options).compile()
        initial = jax.eval_shape(partial(_init_row, **options), row, *inputs)
        return _insert_row.lower((params, state), (row, initial), zero).compile()

    def _lower_prefill(self, length: int, reports: bool) -> Any:
        zero, tokens_1T = jnp.int32(0), jnp.zeros((1, length), jnp.int32)
        tokens = zero, tokens_1T, zero, zero, tokens_1T
        args = self._model, self._cache_shapes, *tokens, self._draft_model, self._stacks, self._number(NO_ADAPTER)
        report = min(MAX_ALTERNATIVES, self._architecture.vocab_size) if reports else None
        return _prefill_part.lower(*args, report=report)

    def _idle_rows(self, config: Config) -> tuple[SamplingParams, DecodeState]:
        """Returns the sampling parameters and the decode state of a batch without requests."""
        row, inputs, options = self._init_inputs(self.row_params(config), (0,), 0, 0, None, NO_ADAPTER)
        state = _init_row(row, *inputs, **options)
        idle = replace(row, enabled=jax.tree.map(jnp.zeros_like, row.enabled)), replace(state, done_B=jnp.ones(1, bool))
        params, state = jax.tree.map(lambda x: jnp.repeat(x, self.count, axis=0), idle)
        pairs = RowPairs.alone(self.count) if config.generation.guidance_scale != 1 else None
        return params, replace(state, pairs=jax.tree.map(jnp.asarray, pairs))

    def _init_inputs(
        self,
        row_params: RowParams,
        tokens: Sequence[int],
        generated: int,
        limit: int,
        recurrent: Recurrent | None,
        adapter: AdapterSlot,
    ) -> tuple[SamplingParams, tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of `init_row`: the parameters, the other arrays, and the static arguments."""
        tokens_1S = np.zeros((1, self.context), np.int32)
        tokens_1S[0, : len(tokens)] = tokens
        names = set(RECURRENT_FIELDS) & fields_read(row_params.params.plan)
        values = {name: np.asarray([(recurrent or {}).get(name, np.nan)], np.float32) for name in sorted(names)}
        max_drafts = None if self._draft_plan is None else _int32(row_params.max_drafts)
        sizes = _int32(len(tokens)), _int32(generated), _int32(limit)
        inputs = tokens_1S, *sizes, row_params.end_ids_1E, max_drafts, values, self._number(adapter)
        static = {"vocab_size": self._architecture.vocab_size, "keeps_sequence": self._draft_plan is not None}
        return row_params.params, inputs, static

    @property
    def _stacks(self) -> Stacks | None:
        return None if self.adapters is None else self.adapters.stacks

    def _number(self, adapter: AdapterSlot) -> np.ndarray | None:
        """Returns the argument of the programs: the number of the adapter of a row, or None if they support no adapters."""
        return None if self.adapters is None else np.asarray([adapter.number], np.int32)

    def adapter(self, name: str | None) -> AdapterSlot:
        """Returns the adapter with a name; None: no adapter. Any thread may call it.

        Raises:
          UserError: no adapter has this name.
        """
        if self.adapters is not None:
            return self.adapters.get(name)
        if name is None:
            return NO_ADAPTER
        raise unknown_adapter(name, ())

    def has_adapter(self, name: str | None, adapter: AdapterSlot) -> bool:
        """Whether the adapter with a name, or no adapter for None, is still this one."""
        return adapter == NO_ADAPTER if name is None or self.adapters is None else self.adapters.names.get(name) == adapter

    def row_params(self, config: Config) -> RowParams:
        """Returns the settings of a request as arrays; any thread may call it.

        Raises:
          UserError: as in `program_key`, or a list in the settings is too long for a server or has an invalid token.
        """
        ignored = {
            "seed": 0,
            "n": 1,
            "max_new_tokens": 0,
            "stop": (),
            "banned_strings": (),
            "banned_regexes": (),
        }  # these affect no array except `seed`
        generation = config.generation.model_copy(update=ignored)
        key = CacheKey(config.model_copy(update={"generation": generation}), generation, config.router, config.kv)
        cached = self._cached_row_params(key)
        seed: dict[str, Any] = {"seed": np.asarray([config.generation.seed or 0], np.uint32)}
        return cached._replace(params=replace(cached.params, **seed))

    def _row_params(self, key: "CacheKey[Config]") -> RowParams:
        config, tokenizer = key.value, self._bundle.tokenizer
        program, section = self.program_key(config), config.generation
        ends = [*stop_token_ids(tokenizer, section), *([] if section.ignore_eos else tokenizer.stop_ids)]
        if len(ends) > MAX_END_IDS:
            raise UserError(
                f"generation.stop_token_ids and the EOS tokens must be at most {MAX_END_IDS} in a server, got {len(ends)}",
                key="generation.stop_token_ids",
            )
        chain = section.strategy == "chain"
        options: ProgramOptions = {"dynamic_order": True} if chain else {"extra_steps": (*EDIT_STEPS, *section_order(section))}
        params, V = self._bundle.params([with_default_seed(config, 0)], **options), self._architecture.vocab_size
        tables = {name: _padded_table(name, table, params.tables, V) for name, table in params.tables.items()}
        changes: dict[str, Any] = {
            "report_rows": np.zeros(1, bool),
            "allowed_bits": np.full((1, -(-V // 32)), ALL_ALLOWED, np.uint32),
        }
        end_ids_1E = np.asarray([[*ends, *[NO_ID] * (MAX_END_IDS - len(ends))]], np.int32)
        max_drafts = 0 if section.speculation == "off" else section.draft_tokens
        return RowParams(program, replace(params, tables=tables, **changes), end_ids_1E, max_drafts)

    # --- requests

    @property
    def prefix_status(self) -> PrefixStatus:
        """The blocks of the prefix cache; all numbers are 0 without one."""
        return PrefixStatus() if self._prefixes is None else self._prefixes.status

    def assign_prompt(
        self, slot: int, ids: Sequence[int], echo: bool = False, salt: str = "", adapter: AdapterSlot = NO_ADAPTER
    ) -> None:
        """Assigns a prompt to a slot and discards the previous request of the slot. Call `prefill` next.

        The tokens that the prefix cache contains are copied to the slot.

        Args:
          echo: report the prompt tokens. Their keys are not reused and not stored, because another program computes them.
          salt: only prompts with an equal salt and the same adapter share keys in the prefix cache.
          adapter: the adapter of the request.
        """
        length = len(ids) - 1
        tail = length % self.prefill_chunk
        shares_bits = self._chunk_length(tail) in self._same_bits
        cacheable = 0 if echo or self._prefixes is None else length if shares_bits else length - tail
        salt = _adapter_salt(salt, adapter)
        self._rows[slot] = _SlotRow(ids=tuple(ids), salt=salt, adapter=adapter, length=length, cacheable=cacheable)
        self._rows[slot].prompt_reports = [] if echo else None
        if self._empty_row is not None:
            self.cache = _write_cache_row(self.cache, self._empty_row, _int32(slot))
        self._load_prefix(slot)

    def _load_prefix(self, slot: int) -> None:
        row = self._rows[slot]
        if self._prefixes is not None and self.cache is not None and row.prefilled < row.cacheable:
            self.cache, found = self._prefixes.load(self.cache, slot, row.ids[: row.cacheable], row.salt, row.prefilled)
            row.reused, row.prefilled = row.reused + max(0, found - row.prefilled), max(found, row.prefilled)

    def assign_sequence(self, slot: int, ids: Sequence[int], salt: str = "", adapter: AdapterSlot = NO_ADAPTER) -> bool:
        """Assigns a sequence whose whole blocks `prefill` then adds to the prefix cache; returns whether any is missing."""
        if self._prefixes is None:
            return False
        salt = _adapter_salt(salt, adapter)
        length = len(ids) // self._prefixes.size * self._prefixes.size
        if length == len(self._prefixes.match(ids, salt)) * self._prefixes.size:
            return False
        self._rows[slot] = _SlotRow(ids=tuple(ids), salt=salt, adapter=adapter, length=length, cacheable=length)
        return True

    @property
    def _same_bits(self) -> tuple[int, ...]:
        """The lengths of the programs that compute bitwise the same keys as the program for whole chunks, which is the last."""
        return (*(() if self._prefixes is None else self._prefixes.same_bits), self.prefill_chunk)

    def prefill(self, slot: int) -> int:
        """Prefills the next chunk of a prompt and returns the number of tokens left to prefill.

        Before that, it copies the tokens that another slot has added to the prefix cache in the meantime, and afterwards it
        adds the new ones. A prompt has the same keys with and without the prefix cache: the cache holds only tokens that the
        program for whole chunks computed, or a program with the same bits. The other tokens are computed by the same program
        in both cases.

        The last token of the prompt is not prefilled, because the first decode step processes it.
        """
        self._load_prefix(slot)
        row = self._rows[slot]
        start = row.prefilled
        count = min((row.cacheable if start < row.cacheable else row.length) - start, self.prefill_chunk)
        if count == 0:
            return 0
        lengths = self._same_bits if start < row.cacheable else self._lengths()
        length = next(length for length in lengths if length >= count)
        ids = row.ids[start : start + count + 1]
        info = self.prefill_tokens(slot, ids, start, count, length, row.prompt_reports is not None)
        if row.prompt_reports is not None:
            row.prompt_reports.append(jax.tree.map(lambda x: np.asarray(x)[:count], info))
        row.prefilled += count
        if self._prefixes is not None and self.cache is not None and row.prefilled <= row.cacheable:
            self._prefixes.store(self.cache, slot, row.ids[: row.prefilled], row.salt, start)
        return row.length - row.prefilled

    def prefill_left(self, slot: int) -> int:
        """Returns the number of tokens left to prefill."""
        return self._rows[slot].length - self._rows[slot].prefilled

    def reused_tokens(self, slot: int) -> int:
        """Returns the number of prompt tokens that came from the prefix cache."""
        return self._rows[slot].reused

    def wait(self) -> None:
        """Waits until all programs that write the cache have ended."""
        jax.block_until_ready(jax.tree.leaves(self.cache)[0])

    def _chunk_length(self, count: int) -> int:
        """Returns the length of the program for a chunk of `count` tokens."""
        return next(length for length in self._lengths() if length >= count)

    def prefill_tokens(
        self, slot: int, ids: Sequence[int], start: int, count: int, length: int, reports: bool = False
    ) -> StepInfo | None:
        """Prefills `count` tokens of a slot from position `start` on, with the program for chunks of this length.

        Args:
          ids: the tokens, and the token after them if it is known.
        """
        tokens_2T = np.zeros((2, length), np.int32)
        tokens_2T[0, :count] = ids[:count]
        tokens_2T[1, : len(ids) - 1] = ids[1:]
        args = _int32(slot), tokens_2T[:1], _int32(start), _int32(count), tokens_2T[1:], self._draft_model
        adapter = self._stacks, self._number(self._rows[slot].adapter)
        self.cache, info = self._programs["prefill", length, reports](self._model, self.cache, *args, *adapter)
        return info  # type: ignore[no-any-return]

    def prompt_steps(self, slot: int) -> StepInfo | None:
        """Returns the reports of the prompt tokens after the first one, `[len(ids) − 1, …]`; None for a prompt of one token."""
        reports = self._rows[slot].prompt_reports
        return jax.tree.map(lambda *parts: np.concatenate(parts), *reports) if reports else None

    def copy_prompt(self, slot: int, to: int) -> None:
        """Copies a prefilled prompt to another slot."""
        self._copy(slot, to)
        self._rows[to] = replace(self._rows[slot], reused=0, prompt_reports=None)

    def _copy(self, slot: int, to: int) -> None:
        programs, slots = self._programs["copy",], (_int32(slot), _int32(to))
        self.cache = jax.tree.map(lambda leaf: programs[leaf.shape, leaf.dtype](leaf, *slots), self.cache)

    def start_decoding(
        self,
        slot: int,
        row_params: RowParams,
        *,
        limit: int,
        output: Sequence[int] = (),
        sample_index: int = 0,
        report: bool = False,
        constrained: bool = False,
        guide: int | None = None,
        guidance_scale: float = 1.0,
    ) -> None:
        """Starts to decode a prefilled prompt, or restarts a row from an earlier token.

        Args:
          row_params: the result of `row_params`; its program must be ready.
          limit: the most new tokens, at most the remaining context.
          output: the generated tokens to keep, which this row has generated before. Its tokens in pending chunks are dropped.
          report: whether to return a `StepInfo` with the tokens.
          constrained: whether `set_token_mask` will be called for every token. The row then has no drafts, because the mask of
            a token depends on the tokens before it.
          guide: with guidance, the slot of the guide row, in which the negative prompt is prefilled.
        """
        previous, program = self._rows[slot], row_params.program
        row = self._rows[slot] = replace(previous, history=previous.history[: len(output)], guide=guide)
        changes: dict[str, Any] = {"sample_index": np.asarray([sample_index], np.int32), "report_rows": np.asarray([report])}
        row_params = row_params._replace(
            params=replace(row_params.params, **changes), max_drafts=0 if constrained else row_params.max_drafts
        )
        recurrent = row.history[-1] if row.history else None
        pairs = RowPairs.row(slot if guide is None else guide, slot, guidance_scale)
        self._init_row(slot, row_params, output, limit, recurrent, pairs)
        if guide is not None:
            self._init_row(guide, row_params, output, limit, None, RowPairs.row(guide, slot))
        row.remaining, row.program, row.reports, row.drafts = limit, program, report, NO_DRAFTS
        previous.program = None  # so that its pending chunks are dropped

    def _init_row(
        self,
        slot: int,
        row_params: RowParams,
        output: Sequence[int],
        limit: int,
        recurrent: Recurrent | None,
        pairs: RowPairs,
    ) -> None:
        """Writes the state of a row, whose prompt is in its slot, to the state of its program."""
        program, row = row_params.program, self._rows[slot]
        params, inputs, _ = self._init_inputs(row_params, (*row.ids, *output), len(output), limit, recurrent, row.adapter)
        state = self._programs["init", program](params, *inputs, **_pairs_option(program, pairs))
        self._states[program] = self._programs["insert", program](self._states[program], (params, state), _int32(slot))
        # Drop pending changes that were meant for the previous request of this slot.
        self._stopped.get(program, set()).discard(slot)
        if program in self._masks:
            self._masks[program][slot] = ALL_ALLOWED

    def _decode(self, program: Hashable, steps: int) -> tuple[Emitted, RowStatus]:
        params, state = self._states[program]
        self.cache, state, emitted = self._programs["decode", program](
            self._model, self.cache, state, params, _int32(steps), self._draft_model, self._stacks
        )
        self._states[program] = params, state
        return emitted, RowStatus.of(state)

    def prepare_weights(self, model: ModelBundle) -> SplitModel:
        """Returns the weights of another model in the form that the programs of this batch read. Any thread may call it.

        Raises:
          UserError: the weights have other shapes or types, or the cache depends on measurements of the old weights.
        """
        kv, calibration = self._bundle.kv(self._config)
        if calibration is not None:
            raise UserError(f"kv.signal {kv.signal} was measured on the old weights: restart the server")
        prepared = split_model(model.prepared(self._config.generation, head_order(self._architecture, kv, None)))

        def layout(split: SplitModel) -> Any:
            return jax.tree.structure(split), [(leaf.shape, leaf.dtype) for leaf in split.leaves]

        if layout(prepared) != layout(self._model):
            raise UserError("the new weights have other shapes or types than the old ones: restart the server")
        return prepared

    def replace_weights(self, weights: SplitModel) -> None:
        """Replaces the weights, and empties all slots, because their caches belong to the old weights. Nothing is compiled."""
        self._model, self.cache = weights, None
        self._fingerprint = ""  # a saved prefix cache would belong to the old weights
        self.reset()

    def reset(self) -> None:
        """Empties all slots and allocates a new cache, for use after a program failed."""
        self.cache = self._make_cache(self.count)
        self._rows = [_SlotRow() for _ in range(self.count)]
        self._masks, self._stopped = {}, {}
        if self._prefixes is not None:
            self._prefixes.clear()
        for program, (params, state) in [*self._states.items()]:
            self._states[program] = params, replace(state, done_B=jnp.ones(self.count, bool))

    @property
    def cache_is_valid(self) -> bool:
        """Whether the cache still exists. A program that fails may already have consumed the donated cache."""
        pool = None if self._prefixes is None else self._prefixes.pool
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves((self.cache, pool)))


def _fitting_slots(architecture: Any, plan: Any, context: int) -> int:
    """Returns the number of slots whose caches fit into memory, at most `DEFAULT_SLOTS`.

    Raises:
      UserError: not even one slot fits.
    """
    needed = tree_bytes(jax.eval_shape(partial(make_cache, architecture, 1, *plan)))
    free = available_bytes(jax.devices()[0])
    if free is None:
        return DEFAULT_SLOTS
    if (fitting := free // MEMORY_SHARE // needed) < 1:
        raise UserError(
            f"the cache of one request of {context} tokens takes {needed / 1e9:.1f} GB, over a quarter of the "
            f"{free / 1e9:.1f} GB of free memory: set a shorter context"
        )
    return int(min(DEFAULT_SLOTS, fitting))


def _pairs_option(program: ProgramKey, pairs: RowPairs) -> dict[str, RowPairs]:
    """Returns the argument of `init_row` for the pair of a row; none for a program without guidance."""
    return {"pairs": pairs} if program.has_guidance else {}


def _adapter_salt(salt: str, adapter: AdapterSlot) -> str:
    """Returns the salt of a request in the prefix cache, which separates the keys of different adapters."""
    return salt if adapter == NO_ADAPTER else f"{salt}\0{adapter.digest.hex()}"


def _int32(value: int) -> np.ndarray:
    return np.asarray(value, np.int32)  # jnp.int32 would run a separate operation, which takes a third of a millisecond


def _next_power_of_two(length: int, minimum: int = 1) -> int:
    return max(minimum, 1 << max(length - 1, 0).bit_length())


def _padded_table(name: str, table: jax.Array, tables: dict[str, jax.Array], vocab_size: int) -> Any:
    """Pads a list of a sampling step to the maximum number of entries per request."""
    if table.dtype == bool:
        return table
    key = name.removesuffix("_before").removesuffix("_by")
    if f"{key}_before" in tables:
        limit, unit = MAX_SEQUENCES, f"entries of {MAX_SEQUENCE_LENGTH} tokens"
    else:
        limit, unit = min(MAX_ENTRIES_BY_SETTING.get(key, MAX_ENTRIES), _next_power_of_two(vocab_size)), "entries"
    padding_sizes = [limit - table.shape[1], *(MAX_SEQUENCE_LENGTH - size for size in table.shape[2:])]
    if min(padding_sizes) < 0:
        raise UserError(f"generation.{key} must have at most {limit} {unit} in a server", key=f"generation.{key}")
    # The tokens before the last token of a sequence are right-aligned, so they are padded on the left.
    padding = [(0, 0), (0, padding_sizes[0]), *((before, 0) for before in padding_sizes[1:])]
    # Use NumPy, because jax would compile an operation for every length of a list.
    return np.pad(np.asarray(table), padding, constant_values=0 if name.endswith("_by") else NO_ID)


@partial(jax.jit, static_argnames=("report", "draft_plan"), donate_argnames=("cache",))
def _decode(
    model: SplitModel,
    cache: KVCache | PairedCache,
    state: DecodeState,
    params: SamplingParams,
    steps: jax.Array,
    draft_model: SplitModel | None,
    adapters: Stacks | None,
    *,
    report: int,
    draft_plan: DraftPlan | None,
) -> tuple[KVCache | PairedCache, DecodeState, Emitted]:
    cache, state, emitted, _ = _generate_toks(
        model, cache, state, params, steps, None, draft_model, adapters, use_cache=True, report=report, draft_plan=draft_plan
    )
    return cache, state, emitted


@partial(jax.jit, static_argnames=("report",), donate_argnames=("cache",))
def _prefill_part(
    model: SplitModel,
    cache: KVCache | PairedCache,
    slot: jax.Array,
    tokens_1T: jax.Array,
    first: jax.Array,
    count: jax.Array,
    next_1T: jax.Array,
    draft_model: SplitModel | None = None,
    adapters: Stacks | None = None,
    number_1: jax.Array | None = None,
    *,
    report: int | None,
) -> tuple[KVCache | PairedCache, StepInfo | None]:
    """Prefills `count` tokens of a sequence from position `first` on; returns the cache and reports on the `next_1T` tokens.

    `next_1T` holds the token after each of `tokens_1T`, and `number_1` the number of the adapter.
    """
    index_T = jnp.arange(tokens_1T.shape[1])
    positions_1T = jnp.where(index_T < count, first + index_T, -1)[None]

    def read(model: SplitModel, cache: KVCache, adapters: RowAdapters | None = None) -> tuple[Transformer, jax.Array, KVCache]:
        transformer = dequantize(model.merge(model.leaves))
        adapted = attach_adapters(transformer, adapters)
        x_1TD, updated, _ = prefill_hidden(adapted, tokens_1T, positions_1T, cache.at_slot(slot))
        assert updated is not None
        return transformer, x_1TD, updated.without_wrappers()

    target, *draft = caches_of(cache)
    row_adapters = None if adapters is None or number_1 is None else RowAdapters(adapters, number_1)
    transformer, x_1TD, cache = read(model, target, row_adapters)
    if draft_model is not None and draft:
        cache = PairedCache(cache, read(draft_model, draft[0])[2])
    if report is None:
        return cache, None

    def report_of(x_D: jax.Array, token: jax.Array) -> StepInfo:
        logits_V = transformer.logits(x_D)
        return step_info(report, logits_V, logits_V, token, jnp.asarray(False))

    info = map_positions(report_of, transformer.config.vocab_size, x_1TD, next_1T)
    return cache, jax.tree.map(lambda x_1T: x_1T[0], info)


@partial(jax.jit, donate_argnames=("leaf",))
def _copy_slot(leaf: jax.Array, source: jax.Array, to: jax.Array) -> jax.Array:
    """Copies slot `source` of one array of the cache to slot `to`."""
    return jax.lax.dynamic_update_slice_in_dim(leaf, jax.lax.dynamic_slice_in_dim(leaf, source, 1), to, 0)


_write_cache_row = jax.jit(write_row, donate_argnums=0)  # donates the cache
_insert_row = jax.jit(write_row)
_init_row = jax.jit(init_row, static_argnames=("vocab_size", "keeps_sequence"))
