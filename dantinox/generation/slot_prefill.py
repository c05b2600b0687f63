"""`PrefillBatch`: the part of `SlotBatch` that assigns prompts to slots and prefills them chunk by chunk."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import ModelConfig
from dantinox.generation.adapter_slots import NO_ADAPTER, AdapterSlot, AdapterSlots
from dantinox.generation.drafts import PairedCache
from dantinox.generation.prefix_cache import PrefixCache, PrefixStatus
from dantinox.generation.quantized_weights import SplitModel
from dantinox.generation.running_batch import Row, RunningBatch
from dantinox.generation.slot_params import MAX_ALTERNATIVES
from dantinox.generation.slot_programs import int32, prefill_part, write_cache_row
from dantinox.model import KVCache
from dantinox.model.row_adapters import Stacks
from dantinox.sampling import StepInfo

# Tokens per prefill chunk. Longer chunks were not faster on a CPU, and decoding would have to wait longer for one of them.
SLOT_PREFILL_CHUNK = 64
MIN_PADDED_CHUNK = 16


@dataclass(eq=False)
class SlotRow(Row):
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


class PrefillBatch(RunningBatch):
    """A running batch that prefills a prompt in the slot that decodes it afterwards. `SlotBatch` sets its attributes.

    Attributes:
      prefill_chunk: the most prompt tokens that one call of `prefill` processes.
      adapters: the adapters that requests may use; None: the programs support no adapters.
    """

    prefill_chunk: int
    adapters: AdapterSlots | None
    _rows: list[SlotRow]  # type: ignore[assignment]
    _programs: dict[Hashable, Any]
    _prefixes: PrefixCache | None
    _model: SplitModel
    _draft_model: SplitModel | None
    _architecture: ModelConfig
    _cache_shapes: KVCache | PairedCache
    _empty_row: KVCache | PairedCache | None

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
        self._rows[slot] = SlotRow(ids=tuple(ids), salt=salt, adapter=adapter, length=length, cacheable=cacheable)
        self._rows[slot].prompt_reports = [] if echo else None
        if self._empty_row is not None:
            self.cache = write_cache_row(self.cache, self._empty_row, int32(slot))
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
        self._rows[slot] = SlotRow(ids=tuple(ids), salt=salt, adapter=adapter, length=length, cacheable=length)
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

    def _lengths(self) -> list[int]:
        """Returns the padded lengths of prefill chunks, ascending."""
        lengths, factor = [MIN_PADDED_CHUNK], 2 if self.prefill_chunk <= SLOT_PREFILL_CHUNK else 4
        while lengths[-1] < self.prefill_chunk:
            lengths.append(min(factor * lengths[-1], self.prefill_chunk))
        return lengths

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
        args = int32(slot), tokens_2T[:1], int32(start), int32(count), tokens_2T[1:], self._draft_model
        adapter = self._stacks, self._number(self._rows[slot].adapter)
        self.cache, info = self._programs["prefill", length, reports](self._model, self.cache, *args, *adapter)
        return info  # type: ignore[no-any-return]

    def _lower_prefill(self, length: int, reports: bool) -> Any:
        zero, tokens_1T = jnp.int32(0), jnp.zeros((1, length), jnp.int32)
        tokens = zero, tokens_1T, zero, zero, tokens_1T
        args = self._model, self._cache_shapes, *tokens, self._draft_model, self._stacks, self._number(NO_ADAPTER)
        report = min(MAX_ALTERNATIVES, self._architecture.vocab_size) if reports else None
        return prefill_part.lower(*args, report=report)

    @property
    def _stacks(self) -> Stacks | None:
        return None if self.adapters is None else self.adapters.stacks

    def _number(self, adapter: AdapterSlot) -> np.ndarray | None:
        """Returns the argument of the programs: the number of the adapter of a row, or None if they support no adapters."""
        return None if self.adapters is None else np.asarray([adapter.number], np.int32)

    def prompt_steps(self, slot: int) -> StepInfo | None:
        """Returns the reports of the prompt tokens after the first one, `[len(ids) − 1, …]`; None for a prompt of one token."""
        reports = self._rows[slot].prompt_reports
        return jax.tree.map(lambda *parts: np.concatenate(parts), *reports) if reports else None

    def copy_prompt(self, slot: int, to: int) -> None:
        """Copies a prefilled prompt to another slot."""
        self._copy(slot, to)
        self._rows[to] = replace(self._rows[slot], reused=0, prompt_reports=None)

    def _copy(self, slot: int, to: int) -> None:
        programs, slots = self._programs["copy",], (int32(slot), int32(to))
        self.cache = jax.tree.map(lambda leaf: programs[leaf.shape, leaf.dtype](leaf, *slots), self.cache)


def _adapter_salt(salt: str, adapter: AdapterSlot) -> str:
    """Returns the salt of a request in the prefix cache, which separates the keys of different adapters."""
    return salt if adapter == NO_ADAPTER else f"{salt}\0{adapter.digest.hex()}"
