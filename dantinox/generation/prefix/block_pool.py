"""The pool of the prefix cache: blocks of keys and values, and the programs that copy them from and
to the slots of a batch.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dantinox.generation.decode.cache_plan import Caches
from dantinox.model import KVCache
from dantinox.model.cache import FullLayer, RingLayer
from dantinox.model.cache_store import SegmentedStore, Store

# One store per layer that has keys and values; a row of the store is a block.
Pool = tuple[Store, ...]


def make_pool(caches: Caches, blocks: int, size: int) -> Pool:
    """Returns a pool of `blocks` empty blocks of `size` tokens for the sequences of caches without
    compressed layers.
    """

    def empty_leaf(slots_axis: int, leaf: jax.Array) -> jax.Array:
        shape = [*leaf.shape]
        shape[0] = blocks
        shape[slots_axis] = size
        return jnp.zeros(shape, leaf.dtype)

    return tuple(_segments(layer)[0][1].map_slots(empty_leaf) for layer in _layers(caches))


@partial(jax.jit, static_argnames=("size",), donate_argnames=("pool",))
def store_blocks(
    pool: Pool,
    caches: Caches,
    row: jax.Array,
    start: jax.Array,
    index_N: jax.Array,
    count: jax.Array,
    size: int,
) -> Pool:
    """Copies `count` blocks of a row of the caches, from position `start` on, to the places
    `index_N` of the pool.
    """

    def layer_blocks(blocks: Store, layer: FullLayer | RingLayer) -> Store:
        for first, segment in _segments(layer):

            def copy(
                i: jax.Array, blocks: Store, first: int = first, segment: Store = segment
            ) -> Store:
                if isinstance(layer, RingLayer):
                    return blocks.copy_slots(
                        index_N[i], 0, layer.read_block(row, start + i * size, size), 0, 0, size
                    )
                return blocks.copy_slots(
                    index_N[i], 0, segment, row, start + i * size - first, size
                )

            blocks = jax.lax.fori_loop(
                *_inside(layer, first, segment, start, count, size), copy, blocks
            )
        return blocks

    return tuple(map(layer_blocks, pool, _layers(caches)))


@partial(jax.jit, static_argnames=("size",), donate_argnames=("caches",))
def load_blocks(
    caches: Caches,
    pool: Pool,
    row: jax.Array,
    start: jax.Array,
    index_N: jax.Array,
    count: jax.Array,
    size: int,
) -> Caches:
    """Copies `count` blocks from the places `index_N` of the pool to a row of the caches, from
    position `start` on.
    """

    def loaded(blocks: Store, layer: FullLayer | RingLayer) -> FullLayer | RingLayer:
        if isinstance(layer, RingLayer):

            def write(i: jax.Array, ring: RingLayer) -> RingLayer:
                return ring.write_block(row, start + i * size, blocks.select_row(index_N[i]))

            ring: RingLayer = jax.lax.fori_loop(0, count, write, layer)
            return ring
        segments = []
        for first, segment in _segments(layer):

            def copy(i: jax.Array, segment: Store, first: int = first) -> Store:
                return segment.copy_slots(
                    row, start + i * size - first, blocks, index_N[i], 0, size
                )

            segments.append(
                jax.lax.fori_loop(
                    *_inside(layer, first, segment, start, count, size), copy, segment
                )
            )
        if not isinstance(layer.store, SegmentedStore):
            return replace(layer, store=segments[0])
        return replace(layer, store=replace(layer.store, segments=tuple(segments)))

    layers: Iterator[Any] = map(loaded, pool, _layers(caches))

    def with_loaded_layers(cache: KVCache) -> KVCache:
        """Takes the next of `layers` for each layer that has keys and values of its own."""
        return replace(
            cache, layers=tuple(None if layer is None else next(layers) for layer in cache.layers)
        )

    return tuple(with_loaded_layers(cache) for cache in caches)


def _layers(caches: Caches) -> list[Any]:
    """Returns the layers with keys and values of their own."""
    return [layer for cache in caches for layer in cache.layers if layer is not None]


def _segments(layer: FullLayer | RingLayer) -> list[tuple[int, Store]]:
    """Returns the stores of a layer, each with the position in its first slot."""
    store = layer.store
    return store.segments_by_start if isinstance(store, SegmentedStore) else [(0, store)]


def _inside(
    layer: Any, first: int, segment: Store, start: jax.Array, count: jax.Array, size: int
) -> tuple[Any, Any]:
    """Returns the range of the blocks, of `count` blocks from position `start` on, whose positions
    are in a segment.
    """
    if isinstance(layer, RingLayer):
        return 0, count
    begin = jnp.clip((first - start) // size, 0, count)
    end = jnp.clip((first + segment.slots - start) // size, 0, count)
    return begin, end
