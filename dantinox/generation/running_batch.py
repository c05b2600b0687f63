"""`RunningBatch`: rows that are decoded together, chunk by chunk; the base class of `StaticBatch`
and `SlotBatch`.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from dantinox.generation.decode.allowed_tokens import AllowedTokens
from dantinox.generation.decode.cache_plan import Caches
from dantinox.generation.decode.generate_toks import DECODE_CHUNK, DecodeState, Emitted
from dantinox.generation.guides.bans import MAX_HELD_TOKENS
from dantinox.sampling import StepInfo

NO_ID = -1  # stands for no token in a padded list of ids
Recurrent = dict[str, float]  # `SamplerState.recurrent` of one row
Counts = dict[str, int]  # `Feature.counts` of one row


def restart_slots(width: int) -> int:
    """Returns the most tokens that a row may have written beyond the token from which it is
    restarted.

    These are the tokens that its guides hold back, those of the chunk that is collected, and those
    of the chunk that was dispatched before; `width` is that of the stepper.
    """
    return MAX_HELD_TOKENS + 2 * DECODE_CHUNK * width


def pad_end_ids(ids: Sequence[Sequence[int]], width: int = 1) -> np.ndarray:
    """Returns the ids that end each row, int32 `[rows, E]`, padded with `NO_ID`; E is at least
    `width`.
    """
    longest = max((len(row) for row in ids), default=0)
    ids_BE = np.full((len(ids), max(width, longest)), NO_ID, np.int32)
    for ids_E, row in zip(ids_BE, ids, strict=True):
        ids_E[: len(row)] = row
    return ids_BE


class SlotOutput(NamedTuple):
    """New tokens of one slot.

    Attributes:
      done: whether the row has ended.
      steps: a `StepInfo` with one entry per token, if requested.
      counts: what the features of the row have counted in this chunk.
    """

    slot: int
    tokens: np.ndarray
    done: bool
    steps: StepInfo | None
    counts: Counts


class RowStatus(NamedTuple):
    """The rows that ended `[B]`, and `Feature.counts` of all features."""

    done_B: Any
    counts: dict[str, Any]

    @classmethod
    def of(cls, state: DecodeState) -> "RowStatus":
        return cls(
            state.done_B,
            {
                name: count_B
                for feature in state.features
                for name, count_B in feature.counts.items()
            },
        )


class HostChunk(NamedTuple):
    """A chunk on the host: tokens `[B, N]`, their mask (false for padding), the status of the rows,
    and the reports.

    `recurrent` holds arrays `[B, N]`: the `SamplerState.recurrent` after each token.
    """

    tokens_BN: np.ndarray
    active_BN: np.ndarray
    status: RowStatus
    info: StepInfo | None
    recurrent: dict[str, np.ndarray]


@dataclass(eq=False)
class Row:
    """The state of a row on the host.

    Attributes:
      program: the key of the program that decodes the row; None before decoding starts and after it
        ends.
      remaining: how many new tokens the row may still get, not counting the chunks that are already
        dispatched. A dispatched chunk counts one token per step until it is collected.
      reports: whether to return a `StepInfo` with the tokens.
      restricted: whether the host restricts the next token of the row.
      counts: what the features have counted since the start of the row.
      followers: the slots of the rows that follow this row and end with it. They have no `program`
        here.
      history: `SamplerState.recurrent` after each generated token, for a restart; empty dicts if
        there is none.
    """

    program: Hashable = None
    remaining: int = 0
    reports: bool = False
    restricted: bool = False
    counts: Counts = field(default_factory=dict)
    followers: tuple[int, ...] = ()
    history: list[Recurrent] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Whether the row needs nothing but its sampling steps."""
        return not (self.reports or self.restricted)

    def add_history(self, slot: int, count: int, recurrent: dict[str, np.ndarray]) -> None:
        """Appends the history of `count` tokens of a chunk."""
        columns = {name: values_BN[slot, :count].tolist() for name, values_BN in recurrent.items()}
        self.history += [
            {name: values[i] for name, values in columns.items()} for i in range(count)
        ]


class ChunkPart(NamedTuple):
    """What one program computes in a chunk: its output, the status of its rows, and its rows by
    slot.
    """

    emitted: Emitted
    status: RowStatus
    rows: dict[int, Row]


class PendingChunk(NamedTuple):
    """A chunk of `steps` steps that the device is computing, with one part for each program."""

    parts: list[ChunkPart]
    steps: int


class RunningBatch:
    """The rows of a batch, their cache, and for each decode program the sampling parameters and the
    state of all rows.

    Attributes:
      count: the number of rows.
      caches: keys and values of all rows; donated to each program that writes them. Empty before
        they exist.
      can_restart: whether a row can be decoded again from an earlier token.
    """

    can_restart = False

    def __init__(self, count: int, vocab_size: int, *, constrained: bool):
        """
        Args:
          constrained: whether `set_token_mask` may be called.
        """
        self.count = count
        self.caches: Caches = ()
        self._rows = [Row() for _ in range(count)]
        self._states: dict[Hashable, tuple[Any, DecodeState]] = {}
        # Changes are collected on the host and written to the device in one operation before the
        # next chunk.
        self._stopped: dict[Hashable, set[int]] = {}
        self._new_allowed = partial(AllowedTokens, count, vocab_size)
        self._allowed = defaultdict[Hashable, AllowedTokens](self._new_allowed)
        self._constrained = constrained

    @property
    def cache_is_valid(self) -> bool:
        """Whether the caches still exist. A program that fails may already have consumed a donated
        cache.
        """
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.caches))

    @property
    def has_work(self) -> bool:
        """Whether `dispatch` has something to compute."""
        return bool(self.remaining())

    def remaining(self) -> dict[int, int]:
        """Returns, for each decoding slot, how many new tokens its row may get, not counting chunks
        already dispatched.
        """
        return {
            slot: row.remaining
            for slot, row in enumerate(self._rows)
            if row.program is not None and row.remaining > 0
        }

    def counts(self, slot: int) -> Counts:
        """Returns what the features of the row in a slot have counted since its start."""
        return self._rows[slot].counts

    def set_token_mask(self, slot: int, bits_W: np.ndarray | None) -> None:
        """Restricts the next token of a slot: bit i mod 32 of word ⌊i/32⌋ stands for token i; None
        allows all tokens.
        """
        row = self._rows[slot]
        if row.program is not None:
            assert self._constrained
            self._allowed[row.program].set(slot, bits_W)
            row.restricted = True

    def stop(self, slot: int) -> None:
        """Ends a row; its tokens in pending chunks are dropped."""
        row = self._rows[slot]
        if row.program is not None:
            self._stopped.setdefault(row.program, set()).update((slot, *row.followers))
            row.program = None

    def restart(self, slot: int, tokens: Sequence[int], prompt_length: int, limit: int) -> None:
        """Decodes a row again from an earlier token; its tokens in pending chunks are dropped.

        Args:
          tokens: the prompt and the kept tokens.
          prompt_length: the number of prompt tokens among them.
          limit: the most new tokens after them, at least 1.
        """
        raise NotImplementedError

    def dispatch(self, steps: int) -> PendingChunk:
        """Starts a chunk of at most `steps` ≤ 32 steps for all decoding rows and returns without
        waiting for the device.

        A row that reaches its limit in this chunk counts as finished immediately, so its slot may
        be refilled.
        """
        self._write_stopped()
        remaining = self.remaining()
        steps = min(steps, DECODE_CHUNK, max(remaining.values(), default=0))
        decoding = {slot: self._rows[slot] for slot in remaining}
        parts = []
        for program in dict.fromkeys(row.program for row in decoding.values()):
            emitted, status = self._decode(program, steps)
            rows = {slot: row for slot, row in decoding.items() if row.program == program}
            for row in rows.values():
                row.remaining = max(0, row.remaining - steps)
            parts.append(ChunkPart(emitted, status, rows))
        return PendingChunk(parts, steps)

    def collect(self, pending: PendingChunk) -> list[SlotOutput]:
        """Waits for a chunk and returns the tokens of its rows, without the rows that were stopped
        in the meantime.
        """
        outputs = []
        for part in pending.parts:
            chunk = self._fetch(part)
            for slot, row in part.rows.items():
                if row.program is None:  # it was stopped
                    continue
                count = int(chunk.active_BN[slot].sum())
                steps = None
                if row.reports:
                    steps = jax.tree.map(lambda x, slot=slot, n=count: x[slot, :n], chunk.info)
                row.add_history(slot, count, chunk.recurrent)
                done = bool(chunk.status.done_B[slot])
                counts = self._add_counts(row, slot, chunk.status, count - pending.steps)
                outputs.append(SlotOutput(slot, chunk.tokens_BN[slot, :count], done, steps, counts))
                if done:
                    row.program = None
        return outputs

    def _add_counts(self, row: Row, slot: int, status: RowStatus, extra: int) -> Counts:
        """Updates a row after a chunk with `extra` tokens more than steps; returns what the
        features counted in the chunk.
        """
        row.remaining = max(0, row.remaining - max(0, extra))
        before = row.counts
        row.counts = {name: int(count_B[slot]) for name, count_B in status.counts.items()}
        return {name: count - before.get(name, 0) for name, count in row.counts.items()}

    def _fetch(self, part: ChunkPart) -> HostChunk:
        """Waits for the output of a program and copies it to the host, without reports if no row
        needs them.
        """
        emitted, status, rows = part
        info = emitted.info if any(row.reports for row in rows.values()) else None
        return HostChunk(
            *jax.device_get((emitted.tokens, emitted.active, status, info, emitted.recurrent))
        )

    def _host_params(self, program: Hashable) -> dict[str, Any]:
        """Returns the sampling parameters that the host chooses before each chunk, by name."""
        return self._allowed[program].params() if self._constrained else {}

    def _first_host_params(self) -> dict[str, Any]:
        """Returns those before the first chunk; any thread may call it."""
        return self._new_allowed().params() if self._constrained else {}

    def _drop_changes(self, program: Hashable, slot: int) -> None:
        """Drops what was meant for the previous row of a slot."""
        self._stopped.get(program, set()).discard(slot)
        self._allowed[program].set(slot, None)

    def _drop_all_changes(self) -> None:
        self._stopped = {}
        self._allowed.clear()

    def _write_stopped(self) -> None:
        for program, slots in self._stopped.items():
            params, state = self._states[program]
            stopped_B = np.isin(np.arange(self.count), [*slots])
            self._states[program] = params, replace(state, done_B=state.done_B | stopped_B)
        self._stopped = {}

    def _decode(self, program: Hashable, steps: int) -> tuple[Emitted, RowStatus]:
        """Runs a program for all rows; returns its output and the status of the rows."""
        raise NotImplementedError
