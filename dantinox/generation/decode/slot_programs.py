"""The programs of a `SlotBatch`. Each is compiled once, for all slots; the number of a slot is an
argument.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.generation.decode.cache_plan import Caches
from dantinox.generation.decode.features import Constants, Features, attach
from dantinox.generation.decode.generate_toks import (
    DecodeState,
    Emitted,
    Stepper,
    _generate_toks,
    init_row,
    prefill_hidden,
    write_row,
)
from dantinox.generation.decode.joined_arrays import Layout, PackedParams, unpack
from dantinox.generation.decode.prepared_model import dequantize
from dantinox.generation.decode.prompt_echo import echo_steps
from dantinox.generation.decode.split_model import SplitModel
from dantinox.model import KVCache, Transformer
from dantinox.sampling import StepInfo
from dantinox.sampling.step_subsets import reduce_params


def int32(value: int) -> np.ndarray:
    # jnp.int32 would run a separate operation, which takes a third of a millisecond.
    return np.asarray(value, np.int32)


@partial(jax.jit, static_argnames=("stepper", "subset"), donate_argnames=("caches",))
def decode_slots(
    model: SplitModel,
    caches: Caches,
    state: DecodeState,
    params: PackedParams,
    host_params: Mapping[str, Any],
    steps: jax.Array,
    constants: Constants,
    *,
    stepper: Stepper,
    subset: int,
) -> tuple[Caches, DecodeState, Emitted]:
    """Decodes a chunk of tokens, as `_generate_toks` does.

    Args:
      state: what the subset of the sampling steps reads.
      host_params: the sampling parameters that the host chooses before each chunk, by name.
    """
    reduced = reduce_params(subset, replace(params.unpack(), **host_params))
    decoded: tuple[Caches, DecodeState, Emitted] = _generate_toks(
        model, caches, state, reduced, steps, constants, stepper=stepper
    )
    return decoded


@partial(jax.jit, static_argnames=("stepper", "echo"), donate_argnames=("caches",))
def prefill_part(
    model: SplitModel,
    caches: Caches,
    slot_R: jax.Array,
    tokens_RT: jax.Array,
    first_R: jax.Array,
    count_R: jax.Array,
    next_RT: jax.Array,
    features: Features,
    constants: Constants,
    *,
    stepper: Stepper,
    echo: int | None,
) -> tuple[Caches, StepInfo | None]:
    """Prefills R chunks: `count_R` tokens of the sequences in the slots `slot_R`, from the
    positions `first_R` on.

    Consecutive chunks of a sequence may be in one call, in their order. A count of 0 marks an
    unused row.

    Args:
      next_RT: the token after each of `tokens_RT`.
      features: those of the R rows.
      echo: the number of alternatives of `echo_steps`; None: without it.

    Returns:
      The caches, and the result of `echo_steps` for the first row.
    """
    index_T = jnp.arange(tokens_RT.shape[1])
    positions_RT = jnp.where(index_T < count_R[:, None], first_R[:, None] + index_T, -1)

    def read(model: Transformer, cache: KVCache) -> tuple[jax.Array, KVCache]:
        x_RTD, updated = prefill_hidden(model, tokens_RT, positions_RT, cache.at_slots(slot_R))
        assert updated is not None
        return x_RTD, updated.without_wrappers()

    transformer, *others = (
        dequantize(one.merge(one.leaves)) for one in (model, *stepper.models(constants))
    )
    x_RTD, cache = read(attach(features, transformer, constants), caches[0])
    caches = (
        cache,
        *(read(other, cache)[1] for other, cache in zip(others, caches[1:], strict=True)),
    )
    steps = None if echo is None else echo_steps(echo, transformer, x_RTD, next_RT)
    return caches, steps


@partial(jax.jit, donate_argnames=("leaf",))
def copy_slot(leaf: jax.Array, source: jax.Array, to: jax.Array) -> jax.Array:
    """Copies slot `source` of one array of the cache to slot `to`."""
    return jax.lax.dynamic_update_slice_in_dim(
        leaf, jax.lax.dynamic_slice_in_dim(leaf, source, 1), to, 0
    )


@jax.jit
def slot_checksums(caches: Caches) -> jax.Array:
    """Returns a checksum of the keys and values of each slot, uint32 `[leaves, B]`."""

    def checksum(leaf: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(
            jnp.uint32
        )
        flat_BN = bits.reshape(bits.shape[0], -1)
        # The weights are odd.
        weights_N = 2 * jax.lax.iota(jnp.uint32, flat_BN.shape[1]) * jnp.uint32(2654435761) + 1
        return jnp.sum(flat_BN * weights_N, axis=1, dtype=jnp.uint32)

    return jnp.stack([checksum(leaf) for leaf in jax.tree.leaves(caches) if leaf.ndim > 1])


@partial(jax.jit, static_argnames=("layout", "vocab_size"))
def start_row(
    params: PackedParams,
    state: DecodeState,
    words_1N: jax.Array,
    numbers: jax.Array,
    *,
    layout: Layout,
    vocab_size: int,
) -> tuple[PackedParams, DecodeState]:
    """Replaces a row: its sampling parameters, and its state, which `init_row` makes.

    Args:
      params, state: of the batch.
      words_1N: the packed sampling parameters of the row, its tokens and its end ids, features and
        recurrent values.
      numbers: the slot, and `length`, `generated` and `limit` of `init_row`; int32 `[4]`.
    """
    slot, length, generated, limit = numbers
    row, tokens_1S, end_ids_1E, features, recurrent = unpack(words_1N, layout)
    initial = init_row(
        row,
        tokens_1S,
        length,
        generated,
        limit,
        end_ids_1E,
        features,
        recurrent,
        vocab_size=vocab_size,
    )
    words = words_1N[:, : params.layout.words]
    packed = replace(params, words_BN=words)
    replaced: tuple[PackedParams, DecodeState] = write_row((params, state), (packed, initial), slot)
    return replaced


write_cache_row = jax.jit(write_row, donate_argnums=0)  # donates the caches
