"""`RunningBatch`: rows that are decoded together, chunk by chunk; the base class of `StaticBatch` and `SlotBatch`."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from dantinox.generation.decode import DECODE_CHUNK, DecodeState, Emitted
from dantinox.model import KVCache
from dantinox.sampling import SamplingParams, StepInfo
from dantinox.sampling.chain import ALL_ALLOWED

NO_ID = -1  # pads lists of end ids


class SlotOutput(NamedTuple):
    """New tokens of one slot. `done`: the row has ended. `steps`: a `StepInfo` with one entry per token, if requested."""

    slot: int
    tokens: np.ndarray
    done: bool
    steps: StepInfo | None


class HostChunk(NamedTuple):
    """A chunk on the host: tokens `[B, N]`, their mask (false for padding), the rows that ended `[B]`, and the reports."""

    tokens_BN: np.ndarray
    active_BN: np.ndarray
    done_B: np.ndarray
    info: StepInfo | None


@dataclass(eq=False)
class Row:
    """The state of a row on the host.

    Attributes:
      program: the key of the program that decodes the row; None before decoding starts and after it ends.
      remaining: how many new tokens the row may still get, not counting the chunks that are already dispatched.
      reports: whether to return a `StepInfo` with the tokens.
    """

    program: Hashable = None
    remaining: int = 0
    reports: bool = False


class PendingChunk(NamedTuple):
    """A chunk of `steps` tokens that the device is computing.

    Attributes:
      parts: for each program its output, its finished rows, and its rows by slot.
      is_prefill: whether the chunk also contains the prefill of the prompts, and so the first new token of each row.
    """

    parts: list[tuple[Emitted, jax.Array, dict[int, Row]]]
    steps: int
    is_prefill: bool = False


class RunningBatch:
    """The rows of a batch, their cache, and for each decode program the sampling parameters and the state of all rows.

    Attributes:
      count: the number of rows.
      cache: keys and values of all rows; donated to each program that writes it.
      refills: whether a new request may use the slot of a finished request.
    """

    refills = False

    def __init__(self, count: int):
        self.count = count
        self.cache: KVCache | None = None
        self._rows = [Row() for _ in range(count)]
        self._states: dict[Hashable, tuple[SamplingParams, DecodeState]] = {}
        # Changes are collected on the host and written to the device in one operation before the next chunk.
        self._stopped: dict[Hashable, set[int]] = {}
        self._masks: dict[Hashable, np.ndarray] = {}

    @property
    def has_work(self) -> bool:
        """Whether `dispatch` has something to compute."""
        return bool(self.remaining())

    def remaining(self) -> dict[int, int]:
        """Returns, for each decoding slot, how many new tokens its row may get, not counting chunks already dispatched."""
        return {slot: row.remaining for slot, row in enumerate(self._rows) if row.program is not None and row.remaining > 0}

    def set_token_mask(self, slot: int, bits_W: np.ndarray | None) -> None:
        """Restricts the next token of a slot: bit i mod 32 of word ⌊i/32⌋ stands for token i; None allows all tokens."""
        program = self._rows[slot].program
        if program is not None:
            if program not in self._masks:
                self._masks[program] = np.array(self._states[program][0].allowed_bits)
            self._masks[program][slot] = ALL_ALLOWED if bits_W is None else bits_W

    def stop(self, slot: int) -> None:
        """Ends a row; its tokens in pending chunks are dropped."""
        row = self._rows[slot]
        if row.program is not None:
            self._stopped.setdefault(row.program, set()).add(slot)
            row.program = None

    def dispatch(self, steps: int) -> PendingChunk:
        """Starts a chunk of at most `steps` ≤ 32 tokens for all decoding rows and returns without waiting for the device.

        A row that reaches its limit in this chunk counts as finished immediately, so its slot may be refilled.
        """
        self._write_changes()
        remaining = self.remaining()
        steps = min(steps, DECODE_CHUNK, max(remaining.values(), default=0))
        decoding = {slot: self._rows[slot] for slot in remaining}
        parts = []
        for program in dict.fromkeys(row.program for row in decoding.values()):
            emitted, done_B = self._decode(program, steps)
            rows = {slot: row for slot, row in decoding.items() if row.program == program}
            for row in rows.values():
                row.remaining = max(0, row.remaining - steps)
            parts.append((emitted, done_B, rows))
        return PendingChunk(parts, steps)

    def collect(self, pending: PendingChunk) -> list[SlotOutput]:
        """Waits for a chunk and returns the tokens of its rows, without the rows that were stopped in the meantime."""
        outputs = []
        for part in pending.parts:
            chunk, rows = self._fetch(part), part[2]
            for slot, row in rows.items():
                if row.program is None:
                    continue
                count, info = int(chunk.active_BN[slot].sum()), chunk.info if row.reports else None
                steps = jax.tree.map(lambda x, slot=slot, n=count: x[slot, :n], info)
                outputs.append(SlotOutput(slot, chunk.tokens_BN[slot, :count], bool(chunk.done_B[slot]), steps))
                if chunk.done_B[slot]:
                    row.program = None
        return outputs

    def _fetch(self, part: tuple[Emitted, jax.Array, dict[int, Row]]) -> HostChunk:
        emitted, done_B, rows = part
        info = emitted.info if any(row.reports for row in rows.values()) else None
        return HostChunk(*jax.device_get((emitted.tokens, emitted.active, done_B, info)))

    def _write_changes(self) -> None:
        for program, allowed_BW in self._masks.items():
            params, state = self._states[program]
            self._states[program] = replace(params, allowed_bits=jax.device_put(allowed_BW)), state
        for program, slots in self._stopped.items():
            params, state = self._states[program]
            stopped_B = np.isin(np.arange(self.count), [*slots])
            self._states[program] = params, replace(state, done_B=state.done_B | stopped_B)
        self._masks, self._stopped = {}, {}

    def _decode(self, program: Hashable, steps: int) -> tuple[Emitted, jax.Array]:
        """Runs a program for all rows; returns its output and a mask of the rows that are done."""
        raise NotImplementedError
