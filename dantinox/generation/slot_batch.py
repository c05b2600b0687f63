"""`SlotBatch`: the batch of a server, with continuous batching: new requests refill the slots of
finished requests.

The number of slots is fixed. A request gets the same tokens in any slot and next to any other
requests, because each program is compiled for all slots and all sampling steps; a step that no row
uses is skipped at run time. Prompts are prefilled in chunks of a fixed length by the same program,
and the prefix cache stores only what this program computed, so a prefix from an earlier request is
bitwise equal to a new prefill.
"""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import jax
import numpy as np
from flax import nnx

from dantinox.config import Config, UserError
from dantinox.config.engine_options import EngineOptions
from dantinox.generation.decode.cache_plan import head_order
from dantinox.generation.decode.features import Features
from dantinox.generation.decode.generate_toks import DecodeState, Emitted, init_row
from dantinox.generation.decode.joined_arrays import Layout, PackedParams, pack
from dantinox.generation.decode.prompt_scope import NO_SCOPE, PromptScope
from dantinox.generation.decode.request_features import row_features
from dantinox.generation.decode.slot_programs import copy_slot, decode_slots, int32, start_row
from dantinox.generation.decode.split_model import SplitModel, split_model
from dantinox.generation.model_bundle import ModelBundle
from dantinox.generation.prefix.prefix_cache import (
    PrefixCache,
    make_prefix_cache,
    pool_bytes,
    renew_probe,
)
from dantinox.generation.prefix.prefix_files import fingerprint, read_blocks, write_blocks
from dantinox.generation.request import GenerationRequest
from dantinox.generation.running_batch import Recurrent, RowStatus
from dantinox.generation.slot_params import ProgramKey, RowParams, ServedSettings
from dantinox.generation.slot_plan import plan_slots
from dantinox.generation.slot_prefill import PrefillBatch, SlotRow
from dantinox.platform import get_platform, release_free_memory
from dantinox.programs import tree_bytes
from dantinox.sampling import LogitProcessor
from dantinox.sampling.state import recurrent_fields
from dantinox.sampling.step_subsets import ALL_STEPS, LARGEST_SUBSET, reduce_state, restore

COMPILE_THREADS = 2  # programs compiled in parallel
# Programs are traced one at a time. Python would not trace two at once any faster, and doing so has
# failed in JAX.
TRACING = Lock()


class SlotBatch(PrefillBatch):
    """A running batch whose free slots are refilled.

    Only one thread may call its methods, except `program_key`, `row_params`, `ready` and `compile`,
    which any thread may call.

    Attributes:
      context: the most tokens of a prompt plus its continuation.
      logit_processor: edits the logits of all requests; None: no processor.
    """

    def __init__(
        self,
        model: ModelBundle,
        options: EngineOptions,
        config: Config | None = None,
        *,
        logit_processor: LogitProcessor | None = None,
    ):
        """Chooses the number of slots; `compile` allocates their memory.

        Args:
          config: the settings of the server for weights and caches; None: the settings of the run.
          logit_processor: edits the logits of all requests, as in `LoadedModel.generate`.

        Raises:
          UserError: the model has a shorter context, a server does not support these settings, or
            not even one slot fits into memory.
        """
        self._config = config or model.config
        super().__init__(*plan_slots(model, options, self._config))
        self._bundle = model
        self.logit_processor = logit_processor
        self._cache_dir = options.cache_dir
        self._prefill_programs = list[str]()  # the programs as text, if there is a folder
        self._prefix_bytes = self._choose_prefix_bytes(options)
        self._compiling = Lock()
        # The arguments for which `ready` has returned true.
        self._ready: set[tuple[ProgramKey, bool, int | None]] = set()
        # `ServedSettings` documents the next two methods.
        self._settings = ServedSettings(model, self._config, logit_processor)
        self.program_key = self._settings.program_key
        self.row_params = self._settings.row_params

    def _choose_prefix_bytes(self, options: EngineOptions) -> int:
        """Returns the bytes of the prefix cache, which has what the options and the caches of the
        slots leave.
        """
        caches = self.plan.cache_shapes
        memory = options.memory
        if self.plan.usable_bytes is not None:
            left = max(0, self.plan.usable_bytes - tree_bytes(caches))
            memory = left if memory is None else min(left, memory)
        return pool_bytes(caches, self.context, self.prefill_chunk, options.prefix_cache, memory)

    @property
    def memory_bytes(self) -> int:
        """The bytes of the weights, of the caches of all slots, of the prefix cache and of the
        constants of the programs.

        A weight that the stored and the prepared model share counts once.
        """
        arrays = {
            id(leaf): leaf
            for leaf in jax.tree.leaves(
                (nnx.state(self._bundle.model), self._model, self._constants)
            )
        }
        return (
            tree_bytes([*arrays.values()]) + tree_bytes(self.plan.cache_shapes) + self._prefix_bytes
        )

    # --- programs

    def ready(self, program: ProgramKey, echo: bool = False, subset: int | None = None) -> bool:
        """Returns whether the programs that `compile` would compile exist."""
        # The engine asks this for every waiting request in every step.
        request = program, echo, subset
        if request not in self._ready and all(
            key in self._programs for key in self._keys(*request)
        ):
            self._ready.add(request)
        return request in self._ready

    def compile(self, config: Config, echo: bool = False, subset: int | None = None) -> None:
        """Compiles the programs for requests with these settings, which takes seconds. The first
        call also allocates the cache.

        Any thread may call it; simultaneous calls run one after the other.

        Args:
          echo: also those for requests with `echo`.
          subset: only the programs that such requests need if their steps are in this subset; None:
            those of all subsets, of which the smaller ones are faster.
        """
        program = self.program_key(config)
        with self._compiling:
            if program not in self._states:
                self._states[program] = self._idle_rows(config)
            missing = [
                key for key in self._keys(program, echo, subset) if key not in self._programs
            ]
            # XLA compiles a program mostly on one core.
            with ThreadPoolExecutor(COMPILE_THREADS) as pool:
                self._programs |= zip(
                    missing, pool.map(lambda key: self._compile(config, *key), missing), strict=True
                )
            release_free_memory()  # that of the compiler
            if not self.caches:
                self.caches = self.plan.make_caches(self.count)
                self._row_counts = self.measure_rows()
                self._prefixes = self._make_prefix_cache()

    def _make_prefix_cache(self) -> PrefixCache | None:
        """Returns an empty prefix cache; None if it is off."""
        if self._prefix_bytes == 0:
            return None
        # The measurement of the prefix cache uses the weights of one scope, so it says nothing
        # about the products of the others.
        whole_chunks = self.scopes.change_weights
        lengths = self.plan.lengths
        prefixes = make_prefix_cache(
            self, self.plan.architecture, self._prefix_bytes, self.context, lengths, whole_chunks
        )
        if self._cache_dir is not None:
            self._prefill_programs = [
                self._lower_prefill(n, False, self._row_counts[0]).as_text() for n in lengths
            ]
            name = fingerprint(self._prefill_programs, self._weights(), prefixes.probe)
            found = read_blocks(self._cache_dir, prefixes.pool, name, prefixes.size)
            if found is not None:
                prefixes.restore(found)
        return prefixes

    def _weights(self) -> list[jax.Array]:
        """Returns all weights of the model, and of the other models of the stepper."""
        return [
            leaf
            for model in (self._model, *self.plan.stepper.models(self._constants))
            for leaf in model.leaves
        ]

    def prefix_writer(self) -> Callable[[], int]:
        """Copies the blocks of the prefix cache, and returns a function for any thread that writes
        them to `cache_dir`.

        The function returns the number of blocks.

        Raises:
          UserError: there is no prefix cache or no folder, or (from the function) the file cannot
            be written.
        """
        folder = self._cache_dir
        prefixes = self._prefixes
        weights = self._weights()
        if folder is None or prefixes is None:
            raise UserError(
                "the prefix cache of this server is not saved: start it with --cache_dir"
            )
        found = prefixes.snapshot()
        probe = prefixes.probe

        def write() -> int:
            write_blocks(folder, found, fingerprint(self._prefill_programs, weights, probe))
            return len(found.blocks)

        return write

    def _keys(
        self, program: ProgramKey, echo: bool, subset: int | None = None
    ) -> list[tuple[Any, ...]]:
        """Returns the keys of the programs for requests; see `compile`."""
        prefills = [
            ("prefill", length, echoes, 1)
            for length in self.plan.lengths
            for echoes in {False, echo}
        ]
        prefills += [
            ("prefill", self.prefill_chunk, False, rows) for rows in self._row_counts if rows > 1
        ]
        subsets = range(ALL_STEPS + 1) if subset is None else [max(subset, LARGEST_SUBSET)]
        if program.strategy != "chain" or self.logit_processor is not None:
            subsets = [ALL_STEPS]
        decodes = [("decode", program, subset) for subset in subsets]
        return [*decodes, ("start", program), ("copy",), *prefills]

    def _compile(self, config: Config, *key: Any) -> Any:
        """Compiles the program with one of the `_keys`; for `copy`, those of all arrays by shape
        and dtype.
        """
        with TRACING:
            lowered = self._lower(config, *key)
        if isinstance(lowered, dict):
            return {shape: one.compile() for shape, one in lowered.items()}
        options: dict[str, str | bool] = dict(
            get_platform(self.plan.architecture.platform).decoding_options
        )
        return lowered.compile(compiler_options=options if key[0] in ("decode", "start") else None)

    def _lower(self, config: Config, kind: str, *key: Any) -> Any:
        caches = self.plan.cache_shapes
        V = self.plan.architecture.vocab_size
        zero = int32(0)
        if kind == "copy":  # one program per array, so that only one array is copied at a time
            leaves = {(leaf.shape, leaf.dtype): leaf for leaf in jax.tree.leaves(caches)}
            return {shape: copy_slot.lower(leaf, zero, zero) for shape, leaf in leaves.items()}
        if kind == "prefill":
            return self._lower_prefill(*key)
        params, state = self._states[key[0]]
        if kind == "decode":
            state = replace(state, sampler=reduce_state(key[1], state.sampler))
            host_params = self._first_host_params()
            arguments = (self._model, caches, state, params, host_params, zero, self._constants)
            return decode_slots.lower(*arguments, stepper=self.plan.stepper, subset=key[1])
        inputs, numbers = self._idle_row_inputs(config)
        return start_row.lower(
            params, state, pack(inputs), numbers, layout=Layout.of(inputs), vocab_size=V
        )

    def _idle_rows(self, config: Config) -> tuple[PackedParams, DecodeState]:
        """Returns the sampling parameters and the decode state of a batch without requests."""
        inputs, numbers = self._idle_row_inputs(config)
        params, tokens_1S, *others = inputs
        V = self.plan.architecture.vocab_size
        shapes = jax.eval_shape(
            partial(init_row, vocab_size=V), params, tokens_1S, *numbers[1:], *others
        )
        state = replace(
            jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes), done_B=np.ones(1, bool)
        )
        idle = (
            PackedParams.of(replace(params, enabled=jax.tree.map(np.zeros_like, params.enabled))),
            state,
        )
        # `device_put` compiles nothing.
        packed, state = jax.device_put(
            jax.tree.map(lambda x: np.repeat(x, self.count, axis=0), idle)
        )
        return packed, state

    def _idle_row_inputs(self, config: Config) -> tuple[tuple[Any, ...], np.ndarray]:
        """Returns the result of `_row_inputs` for a row that is not used, in a program for requests
        with these settings.
        """
        features = *row_features(config, [0])[0], *self.scopes.features([NO_SCOPE])
        return self._row_inputs(
            0,
            self.row_params(config),
            (0,),
            generated=0,
            limit=0,
            recurrent=None,
            features=features,
        )

    def _row_inputs(
        self,
        slot: int,
        row_params: RowParams,
        tokens: Sequence[int],
        generated: int,
        limit: int,
        recurrent: Recurrent | None,
        features: Features,
    ) -> tuple[tuple[Any, ...], np.ndarray]:
        """Returns what `start_row` reads of a row, before it is packed; the features of the stepper
        are added to the others.
        """
        tokens_1S = np.zeros((1, self.context), np.int32)
        tokens_1S[0, : len(tokens)] = tokens
        known = recurrent or {}
        names = sorted(recurrent_fields(row_params.params))
        # NaN stands for the initial value.
        values = {name: np.asarray([known.get(name, np.nan)], np.float32) for name in names}
        features += self.plan.stepper.features(
            tokens_1S, np.asarray([len(tokens)], np.int32), np.asarray([row_params.width])
        )
        numbers = np.asarray([slot, len(tokens), generated, limit], np.int32)
        return (row_params.params, tokens_1S, row_params.end_ids_1E, features, values), numbers

    def scope(self, request: GenerationRequest) -> PromptScope:
        """Returns the scope of the prompt of a request, as `PromptScopes.resolve` does. Any thread
        may call it.
        """
        return self.scopes.resolve(request.scope)

    def is_current(self, scope: PromptScope) -> bool:
        """Returns whether new prompts may still share keys with those of this scope."""
        return self.scopes.is_current(scope)

    # --- requests

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
        followers: Sequence[int] = (),
    ) -> None:
        """Starts to decode a prefilled prompt, or restarts a row from an earlier token.

        Args:
          row_params: the result of `row_params`; its program must be ready.
          limit: the most new tokens, at most the remaining context.
          output: the generated tokens to keep, which this row has generated before. Its tokens in
            pending chunks are dropped.
          report: whether to return a `StepInfo` with the tokens.
          constrained: whether the host chooses the tokens that the row may get next. The row then
            gets one token per step, because they depend on the tokens before them.
          followers: the slots of the rows that follow this one, in which their prompts are
            prefilled.
        """
        previous = self._rows[slot]
        program = row_params.program
        row = replace(previous, history=previous.history[: len(output)], followers=tuple(followers))
        self._rows[slot] = row
        changes: dict[str, Any] = {
            "sample_index": np.asarray([sample_index], np.int32),
            "report_rows": np.asarray([report]),
        }
        row_params = row_params._replace(
            params=replace(row_params.params, **changes),
            width=1 if constrained else row_params.width,
        )
        recurrent = row.history[-1] if row.history else None
        slots = [slot, *followers]
        for place, features in zip(slots, row_features(row_params.config, slots), strict=True):
            self._init_row(
                place, row_params, output, limit, recurrent if place == slot else None, features
            )
        row.remaining = limit
        row.program = program
        row.reports = report
        row.counts = {}
        row.restricted = constrained
        row.steps_subset = row_params.subset
        previous.program = None  # so that its pending chunks are dropped

    def _init_row(
        self,
        slot: int,
        row_params: RowParams,
        output: Sequence[int],
        limit: int,
        recurrent: Recurrent | None,
        features: Features,
    ) -> None:
        """Writes the state of a row, whose prompt is in its slot, to the state of its program."""
        program = row_params.program
        row = self._rows[slot]
        features += self.scopes.features([row.scope])
        inputs, numbers = self._row_inputs(
            slot, row_params, (*row.ids, *output), len(output), limit, recurrent, features
        )
        self._states[program] = self._programs["start", program](
            *self._states[program], pack(inputs), numbers
        )
        self._drop_changes(program, slot)

    def _decode(self, program: Hashable, steps: int) -> tuple[Emitted, RowStatus]:
        needed = max(row.subset for row in self._rows if row.program == program)
        # The smallest compiled program that serves all rows; not all have been compiled.
        subset = next(
            subset
            for subset in range(needed, ALL_STEPS + 1)
            if ("decode", program, subset) in self._programs
        )
        params, state = self._states[program]
        reduced = replace(state, sampler=reduce_state(subset, state.sampler))
        self.caches, reduced, emitted = self._programs["decode", program, subset](
            self._model,
            self.caches,
            reduced,
            params,
            self._host_params(program),
            int32(steps),
            self._constants,
        )
        state = replace(reduced, sampler=restore(state.sampler, reduced.sampler))
        self._states[program] = params, state
        return emitted, RowStatus.of(state)

    def prepare_weights(self, model: ModelBundle) -> SplitModel:
        """Returns the weights of another model in the form that the programs of this batch read.
        Any thread may call it.

        Raises:
          UserError: the weights have other shapes or types, or the cache depends on measurements of
            the old weights.
        """
        kv, calibration = self._bundle.kv(self._config)
        if calibration is not None:
            raise UserError(
                f"kv.signal {kv.signal} was measured on the old weights: restart the server"
            )
        prepared = split_model(
            model.prepared(self._config.generation, head_order(self.plan.architecture, kv, None))
        )

        def layout(split: SplitModel) -> Any:
            return jax.tree.structure(split), [(leaf.shape, leaf.dtype) for leaf in split.leaves]

        if layout(prepared) != layout(self._model):
            raise UserError(
                "the new weights have other shapes or types than the old ones: restart the server"
            )
        return prepared

    def replace_weights(self, weights: SplitModel) -> None:
        """Replaces the weights, and empties all slots, because their caches belong to the old
        weights. Nothing is compiled.
        """
        self._model = weights
        self.caches = ()
        self.reset()
        if self._prefixes is not None and self._cache_dir is not None:
            renew_probe(
                self, self._prefixes, self.plan.architecture, self.context, self.plan.lengths[-1]
            )

    def reset(self) -> None:
        """Empties all slots and allocates new caches, for use after a program failed."""
        self.caches = self.plan.make_caches(self.count)
        self._rows = [SlotRow() for _ in range(self.count)]
        self._drop_all_changes()
        if self._prefixes is not None:
            self._prefixes.clear()
        done_B = jax.device_put(np.ones(self.count, bool))
        for program, (params, state) in [*self._states.items()]:
            self._states[program] = params, replace(state, done_B=done_B)

    @property
    def cache_is_valid(self) -> bool:
        pool = None if self._prefixes is None else self._prefixes.pool
        return super().cache_is_valid and not any(
            leaf.is_deleted() for leaf in jax.tree.leaves(pool)
        )
