"""`PrefixCache`: the keys and values of prompt prefixes, in a pool of blocks that all slots share.

A request copies the blocks of its prefix into its slot, so no block is in use after that, and any
block can be replaced.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

import jax
import numpy as np

from dantinox.config import ModelConfig, UserError
from dantinox.generation.decode.cache_plan import Caches
from dantinox.generation.prefix.block_pool import Pool, load_blocks, make_pool, store_blocks
from dantinox.generation.prefix.prefix_files import BlockRows
from dantinox.generation.prefix.prefix_tree import PrefixTree
from dantinox.model.cache import RingLayer
from dantinox.programs import free_bytes, tree_bytes

PREFIX_BLOCK = 16  # tokens of a block, unless only whole prefill chunks can be reused
# The default size of the pool is that of POOL_SLOTS times the slots, and at most 1 / POOL_SHARE of
# the free memory.
POOL_SLOTS, POOL_SHARE = 4, 8
PROBE_TOKENS = 80  # tokens of the sequence that is prefilled in several ways


class PrefixStatus(NamedTuple):
    """The blocks of a prefix cache: used, in total, replaced so far, and the number of tokens per
    block.
    """

    used: int = 0
    capacity: int = 0
    evictions: int = 0
    size: int = 0


class PrefixCache:
    """The blocks of a prefix cache, on the device of the model. One thread at a time may use it.

    Attributes:
      size: tokens per block.
      pool: the keys and values.
      same_bits: the lengths of the programs for shorter chunks that compute the same keys as the
        program for whole chunks.
      probe: a checksum of the keys that this model computes on this machine for a fixed sequence;
        "" if unknown.
    """

    def __init__(self, caches: Caches, limit: int, size: int, context: int):
        """Allocates the pool and compiles its programs.

        Args:
          caches: the shapes of the caches of the slots.
          limit: the most bytes of the pool, enough for a block.
          context: the most tokens of a sequence.
        """
        self.size = size
        self.probe = ""
        self.same_bits: tuple[int, ...] = ()
        self._context = context
        capacity = limit // block_bytes(caches, size)
        self._tree = PrefixTree(capacity, size)
        self._make_pool = jax.jit(lambda: make_pool(caches, capacity, size))
        self.pool: Pool = self._make_pool()
        zero = np.int32(0)
        index_N = np.zeros(-(-context // size), np.int32)
        self._load = load_blocks.lower(
            caches, self.pool, zero, zero, index_N, zero, size=size
        ).compile()
        self._store = store_blocks.lower(
            self.pool, caches, zero, zero, index_N, zero, size=size
        ).compile()
        self._has_rings = _has_rings(caches)

    @property
    def status(self) -> PrefixStatus:
        return PrefixStatus(self._tree.used, self._tree.capacity, self._tree.evictions, self.size)

    def match(self, ids: Sequence[int], salt: str) -> list[int]:
        """Returns the blocks at the beginning of a sequence that the pool contains."""
        return self._tree.match(ids, _root_name(salt))

    def load(
        self, caches: Caches, slot: int, ids: Sequence[int], salt: str, prefilled: int
    ) -> tuple[Caches, int]:
        """Copies the known blocks of a sequence to a slot, except those that are within its first
        `prefilled` tokens.

        Returns:
          The caches, which are donated, and the number of tokens in the known blocks.
        """
        known = self.match(ids, salt)
        first = prefilled // self.size
        if len(known) > first:
            caches = self._load(
                caches, self.pool, *self._copy_arguments(slot, first, known[first:])
            )
        return caches, len(known) * self.size

    def store(
        self, caches: Caches, slot: int, ids: Sequence[int], salt: str, computed: int
    ) -> None:
        """Adds the whole blocks of a sequence to the pool; a slot holds the keys and values of all
        its tokens.

        Args:
          computed: the first token of the newest chunk. A ring buffer may have lost tokens before
            it.
        """
        if self._has_rings and len(self.match(ids, salt)) < computed // self.size:
            return
        known, new = self._tree.extend(ids, _root_name(salt))
        if new:
            self.pool = self._store(self.pool, caches, *self._copy_arguments(slot, known, new))

    def _copy_arguments(
        self, slot: int, first: int, blocks: Sequence[int]
    ) -> tuple[np.ndarray, ...]:
        """Returns the arguments of the programs for the blocks of a slot from the block number
        `first` on.
        """
        index_N = np.zeros(-(-self._context // self.size), np.int32)
        index_N[: len(blocks)] = blocks
        return (
            np.asarray(slot, np.int32),
            np.asarray(first * self.size, np.int32),
            index_N,
            np.asarray(len(blocks), np.int32),
        )

    def snapshot(self) -> BlockRows:
        """Returns a copy of all blocks on the host."""
        blocks = self._tree.blocks()
        # −1 stands for no parent.
        row_of_place = {block.place: row for row, block in enumerate(blocks)} | {-1: -1}
        index_N = np.array([block.place for block in blocks], np.int32)
        rows = [np.asarray(leaf[index_N]) for leaf in jax.tree.leaves(self.pool)]
        renumbered = [
            block._replace(place=row, parent=row_of_place[block.parent])
            for row, block in enumerate(blocks)
        ]
        return BlockRows(renumbered, rows)

    def restore(self, found: BlockRows) -> None:
        """Adds the blocks of a snapshot to this empty prefix cache."""

        def filled(leaf: jax.Array, rows: np.ndarray) -> jax.Array:
            content = np.zeros(leaf.shape, leaf.dtype)
            content[: len(rows)] = rows
            moved: jax.Array = jax.device_put(content, leaf.sharding)
            return moved

        leaves, structure = jax.tree.flatten(self.pool)
        self.pool = jax.tree.unflatten(structure, map(filled, leaves, found.rows))
        self._tree.restore(found.blocks)

    def clear(self) -> None:
        """Removes all blocks and allocates the pool again, for use after a program failed."""
        evictions = self._tree.evictions
        self._tree = PrefixTree(self._tree.capacity, self.size)
        self._tree.evictions = evictions
        self.pool = self._make_pool()

    def fill(self, caches: Caches, slot: int) -> Caches:
        """Returns the caches, which are donated, with a slot full of the first blocks of the
        pool.
        """
        count = self._context // self.size
        blocks = np.arange(count) % min(PROBE_TOKENS // self.size, self._tree.capacity)
        return self._load(caches, self.pool, *self._copy_arguments(slot, 0, blocks.tolist()))  # type: ignore[no-any-return]

    def checksum(self, caches: Caches, slot: int, start: int, count: int) -> str:
        """Returns a checksum of the keys and values of `count` tokens of a slot, in whole blocks.
        The pool must be empty.
        """
        blocks = min(count // self.size, self._tree.capacity)
        self.pool = self._store(
            self.pool, caches, *self._copy_arguments(slot, start // self.size, range(blocks))
        )
        digest = hashlib.blake2b(digest_size=16)
        for leaf in jax.device_get([leaf[:blocks] for leaf in jax.tree.leaves(self.pool)]):
            digest.update(np.ascontiguousarray(leaf).view(np.uint8).data)
        return digest.hexdigest()


def _root_name(salt: str) -> str:
    """Returns the name of the root for a salt: its checksum, because a salt may be a secret and the
    name is written to disk.
    """
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest() if salt else ""


def block_bytes(caches: Caches, size: int) -> int:
    """Returns the bytes of a block of `size` tokens."""
    return tree_bytes(jax.eval_shape(partial(make_pool, caches, 1, size)))


def pool_bytes(
    caches: Caches, context: int, chunk: int, requested: int | None, memory: int | None = None
) -> int:
    """Returns the bytes of the prefix cache; 0: no prefix cache.

    Args:
      caches: the shapes of the caches of the slots.
      context: the most tokens of a sequence; a sequence that is shorter than a block has no prefix
        cache.
      chunk: tokens per prefill chunk.
      requested: None: the default.
      memory: an upper bound of the memory that is free besides the slots and programs, in bytes;
        None: no bound.

    Raises:
      UserError: not even one block fits, or the pool does not fit into the free memory.
    """
    if requested == 0 or context < PREFIX_BLOCK or any(cache.compressed for cache in caches):
        return 0
    least = block_bytes(caches, chunk)
    free = free_bytes(memory)
    if requested is None:
        most = POOL_SLOTS * tree_bytes(caches)
        limit = most if free is None else min(most, free // POOL_SHARE)
        return limit if limit >= least else 0
    if requested < least:
        raise UserError(
            f"the prefix cache must be 0 or at least {least / 1e6:.3g} MB with this model, got"
            f" {requested / 1e6:g}"
        )
    if free is not None and requested > free:
        raise UserError(
            f"the prefix cache of {requested / 1e6:g} MB does not fit into the {free / 1e6:.0f}"
            " MB of free memory"
        )
    return requested


class Prefiller(Protocol):
    """A batch that can prefill; `caches` hold the keys and values of its slots."""

    caches: Caches

    def prefill_tokens(
        self, slot: int, ids: Sequence[int], start: int, count: int, length: int
    ) -> object:
        """Prefills `count` tokens of a slot from position `start` on, with the program for chunks
        of this length.
        """


def make_prefix_cache(
    batch: Prefiller,
    architecture: ModelConfig,
    limit: int,
    context: int,
    lengths: Sequence[int],
    whole_chunks: bool = False,
) -> PrefixCache:
    """Returns an empty prefix cache whose blocks are as short as the bits of the keys allow.

    The keys of a token depend on the program that computes them. They may also depend on the place
    of the token in its chunk, and the programs for shorter chunks may compute the same keys as the
    program for whole chunks. Both are measured with this model on this machine: a sequence is
    prefilled in several ways, at the beginning of a slot and at the end of a full slot.

    * If the place has no influence, a block has `PREFIX_BLOCK` tokens.
    * Otherwise a block is a whole chunk, whose tokens always have the same places. This also holds,
      without a measurement, for ring buffers, experts, and soft caps of attention scores.

    Args:
      batch: a batch without requests.
      limit: the most bytes.
      lengths: the lengths of the programs for prefill chunks, ascending; the last one is a whole
        chunk.
      whole_chunks: whether blocks are whole chunks in any case.
    """
    chunk = lengths[-1]
    depends_on_place = (
        whole_chunks
        or _has_rings(batch.caches)
        or architecture.experts is not None
        or architecture.softcap is not None
    )
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch.caches)
    prefixes = PrefixCache(
        shapes, limit, chunk if depends_on_place else min(PREFIX_BLOCK, chunk), context
    )
    expected = _probe_places(batch, prefixes, architecture, context, chunk)

    def equal(first: int, length: int) -> bool:
        """Whether chunks of another length, of which the first one has `first` tokens, give the
        expected keys.
        """
        probes = (
            _probe(batch, prefixes, architecture, context, start, first, length)
            for start in expected
        )
        return all(
            probe == checksum for probe, checksum in zip(probes, expected.values(), strict=True)
        )

    if prefixes.size < chunk:
        if equal(48, chunk) and equal(16, chunk):
            prefixes.same_bits = tuple(length for length in lengths[:-1] if equal(length, length))
        else:
            del prefixes  # frees its memory before the next one is allocated
            prefixes = PrefixCache(shapes, limit, chunk, context)
            expected = _probe_places(batch, prefixes, architecture, context, chunk)
    prefixes.probe = "-".join(expected.values())
    return prefixes


def renew_probe(
    batch: Prefiller, prefixes: PrefixCache, architecture: ModelConfig, context: int, chunk: int
) -> None:
    """Sets the probe of an empty prefix cache to that of the current weights; arguments as for
    `make_prefix_cache`.
    """
    prefixes.probe = "-".join(_probe_places(batch, prefixes, architecture, context, chunk).values())


def _probe_places(
    batch: Prefiller, prefixes: PrefixCache, architecture: ModelConfig, context: int, chunk: int
) -> dict[int, str]:
    """Returns the checksums of a sequence in whole chunks, by position: at the beginning of a slot
    and at the end.
    """
    total = min(PROBE_TOKENS, context // PREFIX_BLOCK * PREFIX_BLOCK)
    at_beginning = _probe(batch, prefixes, architecture, context, 0, chunk, chunk)
    batch.caches = prefixes.fill(batch.caches, 0)
    end = (context - total) // chunk * chunk
    return {0: at_beginning, end: _probe(batch, prefixes, architecture, context, end, chunk, chunk)}


def _probe(
    batch: Prefiller,
    prefixes: PrefixCache,
    architecture: ModelConfig,
    context: int,
    start: int,
    first: int,
    length: int,
) -> str:
    """Prefills a sequence from position `start` on in chunks, of which the first has `first`
    tokens.

    Returns:
      A checksum of its keys.
    """
    ids = np.random.default_rng(0).integers(0, architecture.vocab_size, PROBE_TOKENS).tolist()
    total = min(PROBE_TOKENS, context // PREFIX_BLOCK * PREFIX_BLOCK)
    for begin, end in pairwise([0, *range(first, total, length), total]):
        batch.prefill_tokens(0, ids[begin:end], start + begin, end - begin, length)
    return prefixes.checksum(batch.caches, 0, start, total)


def _has_rings(caches: Caches) -> bool:
    return any(isinstance(layer, RingLayer) for cache in caches for layer in cache.layers)
