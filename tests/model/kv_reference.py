"""The tokens that a compressed cache keeps, in NumPy float64 and Python lists: one row, one key
head, one query at a time.

Written from the rules and deliberately slow. A list has one entry per cached token, without
padding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray


@dataclass
class Slot:
    position: int
    importance: float
    key: Array
    value: Array
    rank: float = 0.0


@dataclass
class HeadReference:
    """The cache of one key head in one row.

    Attributes:
      capacity: slots, C.
      span: the width W of a sliding-window layer: a query at t attends to the positions after t −
        W.
      decay: g, the fraction of an importance that remains after one token ("snapkv+ema" only).
      window: how many of the last queries of a chunk count ("snapkv+ema" only).
      recency: rank as if each of the 1 / (1 − g) queries that make up an importance had also paid 1
        / age.
      importance: the importance of a position in a head (the policy "random" only).
      slots: the filled slots in order; the empty ones follow them and are not in the list.
      closest: the smallest relative difference between unequal ranks of a kept and an evicted
        token. A less precise calculation keeps the same tokens if its error is smaller than this.
    """

    capacity: int
    policy: str
    head: int = 0
    sinks: int = 4
    recent: int = 16
    window: int = 32
    pool: int = 7
    decay: float = 0.98
    span: int | None = None
    recency: bool = False
    importance: Callable[[int, int], float] | None = None
    slots: list[Slot] = field(default_factory=list)
    closest: float = math.inf

    @property
    def positions(self) -> list[int]:
        """Returns the cached positions in ascending order."""
        return sorted(slot.position for slot in self.slots)

    def prefill(
        self, q_TGH: Array, k_TH: Array, v_TH: Array, positions: Sequence[int]
    ) -> tuple[Array, list[int]]:
        """Reads a chunk, whose padding has position −1.

        Returns:
          The attention outputs `[T, G, H]`, zero for padding, and the positions in the cache.
        """
        out_TGH = np.zeros(np.shape(q_TGH))
        valid = [t for t, position in enumerate(positions) if position >= 0]
        if not valid:
            return out_TGH, self.positions
        held = sorted(self.slots, key=lambda slot: slot.position)
        new = [
            Slot(
                int(positions[t]),
                0.0,
                np.asarray(k_TH[t], np.float64),
                np.asarray(v_TH[t], np.float64),
            )
            for t in valid
        ]
        candidates = held + new
        for slot in candidates:
            slot.importance *= self._kept_share() ** len(valid)
        for t in valid:
            weights_GS, out_TGH[t] = self._attend(
                np.asarray(q_TGH[t], np.float64), candidates, int(positions[t])
            )
            if t in valid[-self._counted(len(valid)) :]:
                for slot, weight in zip(candidates, weights_GS.mean(axis=0), strict=True):
                    slot.importance += weight
        self._fix(candidates)
        self._rank(
            candidates, new[-1].position, self.pool // 2 if self.policy == "snapkv+ema" else 0
        )
        self.slots = self._chosen(candidates, last=new[-1].position)
        return out_TGH, self.positions

    def decode(self, q_GH: Array, k_H: Array, v_H: Array, position: int) -> tuple[Array, list[int]]:
        """Reads one token, position −1 in a finished row. Returns as `prefill` does, with T = 1."""
        if position < 0:
            return np.zeros((1, *np.shape(q_GH))), self.positions
        self._write(Slot(position, 0.0, np.asarray(k_H, np.float64), np.asarray(v_H, np.float64)))
        weights_GS, out_GH = self._attend(np.asarray(q_GH, np.float64), self.slots, position)
        for slot, weight in zip(self.slots, weights_GS.mean(axis=0), strict=True):
            slot.importance = self._kept_share() * slot.importance + weight
        self._fix(self.slots)
        return out_GH[None], self.positions

    def _attend(self, q_GH: Array, slots: list[Slot], t: int) -> tuple[Array, Array]:
        """Returns the softmax weights `[G, S]` of the query at t, 0 where masked, and the outputs
        `[G, H]`.
        """
        weights_GS, out_GH = np.zeros((len(q_GH), len(slots))), np.zeros(q_GH.shape)
        seen = [
            s for s, slot in enumerate(slots) if slot.position <= t and not self._outside(slot, t)
        ]
        for g, q_H in enumerate(q_GH):
            scores = [math.fsum(q_H * slots[s].key) / math.sqrt(len(q_H)) for s in seen]
            powers = [math.exp(score - max(scores)) for score in scores]
            for s, power in zip(seen, powers, strict=True):
                weights_GS[g, s] = power / math.fsum(powers)
                out_GH[g] += weights_GS[g, s] * slots[s].value
        return weights_GS, out_GH

    def _outside(self, slot: Slot, t: int) -> bool:
        """Returns whether the slot is before the sliding window of a query at t and of all later
        ones.
        """
        return self.span is not None and slot.position <= t - self.span

    def _protected(self, slot: Slot, t: int) -> bool:
        return slot.position < self.sinks or slot.position > t - min(
            self.recent, self.capacity // 2
        )

    def _kept_share(self) -> float:
        return {"snapkv+ema": self.decay, "h2o": 1.0}.get(self.policy, 0.0)

    def _counted(self, queries: int) -> int:
        """Returns how many of the last queries of a chunk count."""
        return {"snapkv+ema": self.window, "tova": 1}.get(self.policy, queries)

    def _rank(self, slots: list[Slot], t: int, reach: int = 0) -> None:
        """Returns the ranks of the slots at t: the largest importance within `reach` slots, plus
        the recency term.
        """
        importances, queries = (
            [slot.importance for slot in slots],
            1 / (1 - min(self._kept_share(), 0.999)),
        )
        for place, slot in enumerate(slots):
            slot.rank = max(importances[max(place - reach, 0) : place + reach + 1])
            if self.recency:
                slot.rank += queries / (1 + t - slot.position)

    def _fix(self, slots: list[Slot]) -> None:
        """Sets the importances of the policies that do not use attention."""
        for slot in slots:
            if self.policy == "streaming":
                slot.importance = float(slot.position)
            elif self.policy == "random":
                slot.importance = float(self.importance(slot.position, self.head))

    def _chosen(self, candidates: list[Slot], last: int) -> list[Slot]:
        """Returns the slots kept after a chunk: protected ones, then the most important, in
        ascending order of position.
        """
        # The next query is at last + 1.
        inside = [slot for slot in candidates if not self._outside(slot, last + 1)]
        protected = [slot for slot in inside if self._protected(slot, last)]
        others = [slot for slot in inside if not self._protected(slot, last)]
        room = max(self.capacity - len(protected), 0)
        ranked = sorted(others, key=lambda slot: (-slot.rank, slot.position))
        self._compare(ranked[:room], ranked[room:])
        return sorted(protected[: self.capacity] + ranked[:room], key=lambda slot: slot.position)

    def _write(self, new: Slot) -> None:
        """Writes to the first slot that is empty or before the window, else replaces the least
        important token.
        """
        t = new.position
        passed = [s for s, slot in enumerate(self.slots) if self._outside(slot, t)]
        if passed:
            self.slots[passed[0]] = new
        elif len(self.slots) < self.capacity:
            self.slots.append(new)
        else:
            self._rank(self.slots, t)
            free = [s for s, slot in enumerate(self.slots) if not self._protected(slot, t)]
            least = min(free, key=lambda s: (self.slots[s].rank, s))
            self._compare([self.slots[s] for s in free if s != least], [self.slots[least]])
            self.slots[least] = new

    def _compare(self, stayed: list[Slot], gone: list[Slot]) -> None:
        for a in stayed:
            for b in gone:
                if a.rank != b.rank:
                    gap = abs(a.rank - b.rank) / max(abs(a.rank), abs(b.rank))
                    self.closest = min(self.closest, gap)
