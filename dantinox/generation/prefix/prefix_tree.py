"""`PrefixTree`: which blocks of a pool hold the keys and values of which prompt prefixes.

A block holds the keys and values of `size` consecutive tokens, which depend on all tokens before
them. So the blocks form a tree: the path from the root to a block spells the whole prefix. The tree
compares tokens, not hashes, so two different prefixes never share a block. Each salt has a root of
its own, and requests with different salts share nothing.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(eq=False)
class Block:
    """A block of the tree; the root of a salt has no tokens and the index −1.

    Attributes:
      index: the place of its keys and values in the pool.
    """

    index: int
    salt: str
    tokens: tuple[int, ...]
    parent: "Block | None"
    children: dict[tuple[int, ...], "Block"] = field(default_factory=dict)


class StoredBlock(NamedTuple):
    """A block as it is written to a file: its place in the pool, its parent's place, the salt of
    its root, and its tokens.

    The parent of a block at the beginning of a sequence is −1.
    """

    place: int
    parent: int
    salt: str
    tokens: tuple[int, ...]


class PrefixTree:
    """The blocks of a pool with a fixed capacity. If it is full, a new block replaces the leaf that
    was used least recently.

    Attributes:
      capacity: the number of blocks in the pool.
      size: tokens per block.
      evictions: the number of blocks that were replaced so far.
    """

    def __init__(self, capacity: int, size: int):
        self.capacity = capacity
        self.size = size
        self.evictions = 0
        self._roots: dict[str, Block] = {}
        # Blocks in order of their last use. The blocks of a path are marked as used from its end to
        # its beginning, so a block always comes after its children, and the first one is a leaf.
        self._by_use: OrderedDict[int, Block] = OrderedDict()
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def used(self) -> int:
        """The number of blocks that hold keys and values."""
        return len(self._by_use)

    def match(self, ids: Sequence[int], salt: str) -> list[int]:
        """Returns the pool indices of the longest known prefix of `ids` in whole blocks, and marks
        its blocks as used.
        """
        return [block.index for block in self._walk(ids, salt)]

    def extend(self, ids: Sequence[int], salt: str) -> tuple[int, list[int]]:
        """Adds the missing blocks of `ids`, as far as the pool has space for them next to the other
        blocks of `ids`.

        Returns:
          The number of blocks that were known before, and the pool indices of the new ones. The
          caller must write the keys and values of these before the next call of `match`.
        """
        path = self._walk(ids, salt)
        known = len(path)
        new: list[int] = []
        parent = path[-1] if path else self._root(salt)
        for start in range(known * self.size, len(ids) - self.size + 1, self.size):
            index = self._allocate(parent)
            if index is None:
                break
            block = self._add_block(index, tuple(ids[start : start + self.size]), parent)
            path.append(block)
            new.append(index)
            self._mark_used(path)
            parent = block
        if not parent.children and parent.parent is None:  # a root without blocks
            del self._roots[salt]
        return known, new

    def blocks(self) -> list[StoredBlock]:
        """Returns all blocks, each after its parent, the most recently used ones first."""
        stored = []
        for block in reversed(self._by_use.values()):
            parent = -1 if block.parent is None else block.parent.index
            stored.append(StoredBlock(block.index, parent, block.salt, block.tokens))
        return stored

    def restore(self, blocks: Sequence[StoredBlock]) -> None:
        """Adds the result of `blocks` of another tree to this empty tree, whose capacity must
        suffice.
        """
        for place, parent, salt, tokens in blocks:
            self._add_block(place, tokens, self._root(salt) if parent < 0 else self._by_use[parent])
        for block in reversed(blocks):
            self._by_use.move_to_end(block.place)
        self._free = [index for index in self._free if index not in self._by_use]

    def _root(self, salt: str) -> Block:
        return self._roots.setdefault(salt, Block(-1, salt, (), None))

    def _add_block(self, index: int, tokens: tuple[int, ...], parent: Block) -> Block:
        block = Block(index, parent.salt, tokens, parent)
        parent.children[tokens] = block
        self._by_use[index] = block
        return block

    def _walk(self, ids: Sequence[int], salt: str) -> list[Block]:
        """Returns the known blocks at the beginning of `ids`, and marks them as used."""
        path: list[Block] = []
        block = self._roots.get(salt)
        while block is not None:
            start = len(path) * self.size
            block = block.children.get(tuple(ids[start : start + self.size]))
            if block is not None:
                path.append(block)
        self._mark_used(path)
        return path

    def _mark_used(self, path: Sequence[Block]) -> None:
        for block in reversed(path):
            self._by_use.move_to_end(block.index)

    def _allocate(self, parent: Block) -> int | None:
        """Returns a place in the pool for a child of `parent`; None if there are no blocks but
        `parent` and those before it.
        """
        if self._free:
            return self._free.pop()
        leaf = next(iter(self._by_use.values()))
        if leaf is parent:
            return None
        del self._by_use[leaf.index]
        above = leaf.parent
        assert above is not None and not leaf.children
        del above.children[leaf.tokens]
        if above.parent is None and not above.children and above is not parent:
            del self._roots[above.salt]
        self.evictions += 1
        return leaf.index
