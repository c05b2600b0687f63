"""`SlotPlan`: number, context, prefill chunks and caches of the slots of a server, chosen before
any program is compiled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax

from dantinox.config import Config, ModelConfig, UserError
from dantinox.config.engine_options import EngineOptions
from dantinox.generation.decode.cache_plan import CachePlan, Caches, head_order, plan_cache
from dantinox.generation.decode.features import Constants
from dantinox.generation.decode.generate_toks import COMPRESSED_PREFILL_CHUNK, Stepper
from dantinox.generation.decode.prompt_scope import PromptScopes
from dantinox.generation.decode.split_model import SplitModel, split_model
from dantinox.generation.model_bundle import ModelBundle
from dantinox.generation.plan_stepper import plan_stepper
from dantinox.generation.running_batch import restart_slots
from dantinox.model import make_cache
from dantinox.model.cache import RingLayer
from dantinox.platform import get_platform
from dantinox.programs import free_bytes, tree_bytes
from dantinox.sampling.params import next_power_of_two

# Tokens per prefill chunk. Longer chunks were not faster on a CPU, and decoding would have to wait
# longer for one of them.
SLOT_PREFILL_CHUNK = 64
MIN_PADDED_CHUNK = 16
DEFAULT_SLOTS = 8
MAX_PREFILL_ROWS = 16
MEMORY_SHARE = 2  # the caches of all slots take at most 1 / MEMORY_SHARE of the usable memory
# XLA keeps this for each layer of a compiled program (SmolLM2-135M: up to 165 MB of 30 layers).
PROGRAM_BYTES_PER_LAYER = 6 << 20
DECODE_PROGRAMS = 4
COMPILER_BYTES = 3 << 29  # while XLA compiles the program of all sampling steps
USABLE_SHARE = 4  # at least 1 / USABLE_SHARE of the free memory counts as usable


@dataclass(frozen=True)
class SlotPlan:
    """The slots of a server and their programs.

    Attributes:
      count: the number of slots.
      context: the most tokens of a prompt plus its continuation.
      stepper, stepper_constants: how the slots decode.
      scopes: those of the prompts.
      prefill_chunk: the most prompt tokens in a chunk.
      lengths: the padded lengths of chunks, ascending; there is a program for each.
      prefill_rows: the most chunks in a prefill pass.
      prefers_passes: whether a pass over several chunks takes about the time of a single chunk, as
        on an accelerator.
      make_caches: returns empty caches for a number of rows.
      cache_shapes: the shapes of the caches of all slots.
      usable_bytes: the free memory without that of the programs; None: unknown.
    """

    architecture: ModelConfig
    count: int
    context: int
    stepper: Stepper
    stepper_constants: Constants
    scopes: PromptScopes
    prefill_chunk: int
    lengths: tuple[int, ...]
    prefill_rows: int
    prefers_passes: bool
    make_caches: Callable[[int], Caches]
    cache_shapes: Caches
    usable_bytes: int | None

    @property
    def compressed(self) -> bool:
        """Whether slots hold fewer tokens than their text. Such a slot must be cleared before a new
        request.
        """
        return self.cache_shapes[0].compressed

    @property
    def has_rings(self) -> bool:
        """Whether a layer holds only the tokens of its window."""
        return any(
            isinstance(layer, RingLayer) for cache in self.cache_shapes for layer in cache.layers
        )


def plan_slots(
    model: ModelBundle, options: EngineOptions, config: Config
) -> tuple[SlotPlan, SplitModel]:
    """Returns the plan and the prepared weights.

    Args:
      config: the settings of the server for weights and caches.

    Raises:
      UserError: the context is longer than that of the model, a server does not support these
        settings, or not even one slot fits into memory.
    """
    architecture = model.model.config
    context = architecture.max_context if options.context is None else options.context
    _check_options(options, config, context, architecture.max_context)
    kv, calibration = model.kv(config)
    cache_plan = plan_cache(architecture, kv, context, calibration)
    order = head_order(architecture, kv, calibration)
    scopes = model.prompt_scopes(options, order, options.slots or DEFAULT_SLOTS)
    # The limit of the options is for defaults: explicit slots may take all memory.
    free = free_bytes(options.memory if options.slots is None else None)
    usable = None if free is None else _without_programs(free, architecture)
    count = _fitting_slots(architecture, cache_plan, context, usable, options.slots)
    prepared = model.prepared(config.generation, order)
    stepper, constants = plan_stepper(config, model, prepared, count, context)
    make_caches = _cache_maker(architecture, cache_plan, stepper, constants)
    cache_shapes: Caches = jax.eval_shape(lambda: make_caches(count))
    compressed = cache_shapes[0].compressed
    chunk = COMPRESSED_PREFILL_CHUNK if compressed else SLOT_PREFILL_CHUNK
    chunk = min(chunk, next_power_of_two(context, MIN_PADDED_CHUNK))
    platform = get_platform(architecture.platform)
    # The bits of a chunk must not depend on the chunks beside it. The tokens of experts share
    # tiles, and the measurement that tests the others (`PrefillBatch.measure_rows`) uses the
    # weights of one scope.
    one_row = compressed or architecture.experts is not None or scopes.change_weights
    requested = platform.prefill_rows if options.prefill_rows is None else options.prefill_rows
    prefill_rows = 1 if one_row else min(requested, count)
    prefers_passes = platform.prefill_rows > 1
    plan = SlotPlan(
        architecture=architecture,
        count=count,
        context=context,
        stepper=stepper,
        stepper_constants=constants,
        scopes=scopes,
        prefill_chunk=chunk,
        # In a pass, padding costs little, and each length would be another program.
        lengths=(chunk,) if prefill_rows > 1 and prefers_passes else _chunk_lengths(chunk),
        prefill_rows=prefill_rows,
        prefers_passes=prefers_passes,
        make_caches=make_caches,
        cache_shapes=cache_shapes,
        usable_bytes=usable,
    )
    return plan, split_model(prepared)


def _check_options(options: EngineOptions, config: Config, context: int, max_context: int) -> None:
    if not 2 <= context <= max_context:
        raise UserError(f"context must be in [2, {max_context}], got {context}")
    if config.generation.tensor_parallel > 1:
        raise UserError(
            "generation.tensor_parallel must be 1 in a server, got"
            f" {config.generation.tensor_parallel}"
        )
    if options.prefill_rows is not None and not 1 <= options.prefill_rows <= MAX_PREFILL_ROWS:
        raise UserError(
            f"prefill_rows must be in [1, {MAX_PREFILL_ROWS}], got {options.prefill_rows}"
        )
    if not config.generation.use_cache:
        raise UserError("generation.use_cache must be true in a server, got false")


def _cache_maker(
    architecture: ModelConfig, plan: CachePlan, stepper: Stepper, constants: Constants
) -> Callable[[int], Caches]:
    """Returns a function from a number of rows to their empty caches."""
    segmented = get_platform(architecture.platform).segmented_cache
    # Tokens in pending chunks, which a restart drops, must not overwrite the window before them.
    plan = plan._replace(extra=restart_slots(stepper.width))
    plans = [(architecture, plan), *stepper.cache_plans(constants)]
    compiled = jax.jit(make_cache, static_argnums=range(7))  # all arguments are static
    return lambda rows: tuple(
        compiled(config, rows, *cache_plan, segmented) for config, cache_plan in plans
    )


def _chunk_lengths(longest: int) -> tuple[int, ...]:
    """Returns the padded lengths of prefill chunks, ascending."""
    lengths = [MIN_PADDED_CHUNK]
    # The larger factor gives fewer programs for the long chunks of a compressed cache.
    factor = 2 if longest <= SLOT_PREFILL_CHUNK else 4
    while lengths[-1] < longest:
        lengths.append(min(factor * lengths[-1], longest))
    return tuple(lengths)


def _without_programs(free: int, architecture: ModelConfig) -> int:
    """Returns the free memory without that of the compiler and the programs, and at least a part of
    it.

    On an accelerator it returns all of it, because XLA keeps these in the memory of the host.
    """
    if get_platform(architecture.platform).name != "cpu":
        return free
    programs = DECODE_PROGRAMS + len(_chunk_lengths(SLOT_PREFILL_CHUNK))
    needed = COMPILER_BYTES + programs * architecture.num_blocks * PROGRAM_BYTES_PER_LAYER
    return max(free - needed, free // USABLE_SHARE)


def _fitting_slots(
    architecture: ModelConfig, plan: CachePlan, context: int, usable: int | None, count: int | None
) -> int:
    """Returns `count`, or if it is None the number of slots whose caches fit into a share of the
    usable memory.

    Raises:
      UserError: not even one slot fits, or `count` slots need more than the usable memory.
    """
    needed = tree_bytes(jax.eval_shape(partial(make_cache, architecture, 1, *plan)))
    if count is not None:
        if usable is not None and count * needed > usable:
            raise UserError(
                f"the caches of {count} requests of {context} tokens take"
                f" {count * needed / 1e9:.1f} GB, but the programs leave only {usable / 1e9:.1f} GB"
                " of free memory: set fewer slots or a shorter context"
            )
        return count
    if usable is None:
        return DEFAULT_SLOTS
    fitting = usable // MEMORY_SHARE // needed
    if fitting < 1:
        raise UserError(
            f"the cache of one request of {context} tokens takes {needed / 1e9:.1f} GB, over half"
            f" of the {usable / 1e9:.1f} GB of free memory that the"
            " programs leave: set a shorter context"
        )
    return int(min(DEFAULT_SLOTS, fitting))
