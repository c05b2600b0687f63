"""`PrefillBatch`: the part of `SlotBatch` that assigns prompts to slots and prefills them chunk by
chunk.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from dantinox.generation.decode.features import Constants
from dantinox.generation.decode.prompt_echo import PromptEcho
from dantinox.generation.decode.prompt_scope import NO_SCOPE, PromptScope
from dantinox.generation.decode.slot_programs import (
    int32,
    prefill_part,
    slot_checksums,
    write_cache_row,
)
from dantinox.generation.decode.split_model import SplitModel
from dantinox.generation.prefix.prefix_cache import PrefixCache, PrefixStatus
from dantinox.generation.running_batch import Row, RunningBatch
from dantinox.generation.slot_params import MAX_ALTERNATIVES
from dantinox.generation.slot_plan import SlotPlan
from dantinox.sampling import StepInfo
from dantinox.sampling.step_subsets import ALL_STEPS


class Chunk(NamedTuple):
    """Consecutive tokens of the sequence in a slot, which one row of a prefill pass processes.

    Attributes:
      ids: the tokens, and the token after them if it is known.
      start: the position of the first token.
      size: the number of tokens.
      length: the length of the program, at least `size`; the rest is padding.
      echo: whether the program also reports the log-probabilities of the tokens, for a
        `PromptEcho`.
    """

    slot: int
    ids: Sequence[int]
    start: int
    size: int
    length: int
    echo: bool = False

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(eq=False)
class SlotRow(Row):
    """The state of a request in a slot, on the host.

    Attributes:
      scope: what the attention keys and values of the request depend on besides its tokens.
      length: the number of tokens to prefill.
      cacheable: how many of them, from the first on, belong into the prefix cache. They are
        computed by the program for whole chunks, or by programs with bitwise equal results, so that
        a prompt has the same keys with and without the prefix cache.
      prefilled: the number of tokens in the slot; of these, `reused` came from the prefix cache.
      echo: what is known of the tokens of the prompt; None if it is not requested.
      steps_subset: the index of the smallest decode program for the settings of the row, see
        `sampling.step_subsets`.
    """

    ids: Sequence[int] = ()
    scope: PromptScope = NO_SCOPE
    length: int = 0
    cacheable: int = 0
    prefilled: int = 0
    reused: int = 0
    echo: PromptEcho | None = None
    steps_subset: int = ALL_STEPS

    @property
    def subset(self) -> int:
        """The index of the decode program for the row: `steps_subset`, or `ALL_STEPS` if the row
        needs reports or masked tokens.
        """
        return self.steps_subset if self.is_plain else ALL_STEPS


class PrefillBatch(RunningBatch):
    """A running batch that prefills a prompt in the slot that decodes it afterwards.

    Attributes:
      plan: the slots and their programs.
      context, prefill_chunk, scopes: those of the plan.
    """

    _rows: list[SlotRow]  # type: ignore[assignment]

    def __init__(self, plan: SlotPlan, weights: SplitModel):
        """Creates the slots, which are empty. Their caches and programs do not exist yet."""
        super().__init__(plan.count, plan.architecture.vocab_size, constrained=True)
        self.plan = plan
        self._model = weights
        self.context = plan.context
        self.prefill_chunk = plan.prefill_chunk
        self.scopes = plan.scopes
        # A compressed cache cannot return to an earlier token.
        self.can_restart = not plan.compressed
        self._rows = [SlotRow() for _ in range(plan.count)]
        self._programs: dict[Hashable, Any] = {}
        self._prefixes: PrefixCache | None = None
        # Overwrites a slot before each new prompt, because a compressed cache keeps state of the
        # old one.
        self._empty_row = plan.make_caches(1) if plan.compressed else None
        # The numbers of rows of the programs for whole chunks, ascending.
        self._row_counts: tuple[int, ...] = (
            (1,) if plan.prefill_rows == 1 else (1, plan.prefill_rows)
        )

    @property
    def wide_passes(self) -> bool:
        """Whether a pass over several chunks takes about the time of a single chunk, as on an
        accelerator.
        """
        return self.plan.prefers_passes and self._row_counts[-1] > 1

    def pass_size(self, chunks: int) -> int:
        """Returns the number of chunks in the next pass, if `chunks` chunks may be processed before
        the next decode step.

        With `wide_passes` it may exceed `chunks`, since the pass takes about the time of one chunk.
        """
        most = self._row_counts[-1]
        return most if most <= chunks or self.wide_passes else 1

    @property
    def prefix_status(self) -> PrefixStatus:
        """The blocks of the prefix cache; all numbers are 0 without one."""
        return PrefixStatus() if self._prefixes is None else self._prefixes.status

    def assign_prompt(
        self, slot: int, ids: Sequence[int], echo: bool = False, scope: PromptScope = NO_SCOPE
    ) -> None:
        """Assigns a prompt to a slot and discards the previous request of the slot. Call `prefill`
        next.

        The tokens that the prefix cache contains are copied to the slot.

        Args:
          echo: whether `prompt_steps` will be called. If so, the prefix cache neither provides nor
            stores keys of this prompt, because another program computes them.
          scope: what the attention keys and values depend on besides the tokens.
        """
        length = len(ids) - 1
        tail = length % self.prefill_chunk
        # The last, shorter chunk is cacheable only if its program computes the same bits.
        cacheable = length if self._program_length(tail) in self._same_bits else length - tail
        if echo or self._prefixes is None:
            cacheable = 0
        self._rows[slot] = SlotRow(ids=tuple(ids), scope=scope, length=length, cacheable=cacheable)
        self._rows[slot].echo = PromptEcho() if echo else None
        if self._empty_row is not None:
            self.caches = write_cache_row(self.caches, self._empty_row, int32(slot))
        self._load_prefix(slot)

    def _load_prefix(self, slot: int) -> None:
        """Copies the tokens of a prompt that the prefix cache has, and the slot does not, to the
        slot.
        """
        row = self._rows[slot]
        # The caches are () before they are allocated.
        if self._prefixes is not None and self.caches and row.prefilled < row.cacheable:
            self.caches, found = self._prefixes.load(
                self.caches, slot, row.ids[: row.cacheable], row.scope.key, row.prefilled
            )
            row.reused += max(0, found - row.prefilled)
            row.prefilled = max(found, row.prefilled)

    def assign_sequence(self, slot: int, ids: Sequence[int], scope: PromptScope = NO_SCOPE) -> bool:
        """Assigns a sequence if the prefix cache lacks any of its whole blocks, which `prefill`
        then adds; returns whether it does.
        """
        if self._prefixes is None:
            return False
        # In tokens; `size` is the number of tokens in a block, and `match` returns blocks.
        length = len(ids) // self._prefixes.size * self._prefixes.size
        if length == len(self._prefixes.match(ids, scope.key)) * self._prefixes.size:
            return False
        self._rows[slot] = SlotRow(ids=tuple(ids), scope=scope, length=length, cacheable=length)
        return True

    @property
    def _same_bits(self) -> tuple[int, ...]:
        """The lengths of the programs that compute bitwise the same keys as the program for whole
        chunks, which is the last.
        """
        shorter = () if self._prefixes is None else self._prefixes.same_bits
        return *shorter, self.prefill_chunk

    def prefill(self, slot: int) -> int:
        """Prefills the next chunk of a prompt and returns the number of tokens left to prefill, see
        `prefill_together`.
        """
        return self.prefill_together([slot])[0]

    def prefill_together(self, slots: Sequence[int]) -> list[int]:
        """Prefills the next chunk of each of several prompts, and returns for each the number of
        tokens left to prefill.

        Chunks of the full length share a pass. The unused rows of a wide pass prefill further
        chunks of the prompts.

        Before that, it copies the tokens that other slots have added to the prefix cache in the
        meantime, and afterwards it adds the new ones. If several prompts in `slots` have the same
        next chunk, only the first prompt is prefilled; the others copy the chunk at the next call.
        A prompt has the same keys with and without the prefix cache: the cache holds only tokens
        that the program for whole chunks computed, or a program with the same bits. The other
        tokens are computed by the same program in both cases.

        The last token of a prompt is not prefilled, because the first decode step processes it.
        """
        chunks = self._next_chunks(slots)
        whole = [chunk for chunk in chunks if self._may_share_a_pass(chunk)]
        most = self._row_counts[-1]
        while whole:
            rows = most if len(whole) >= most or self.wide_passes else self._row_counts[0]
            self._prefill_pass(whole[:rows])
            del whole[:rows]
        for chunk in chunks:
            if not self._may_share_a_pass(chunk):
                self._prefill_pass([chunk])
        return [self.prefill_left(slot) for slot in slots]

    def _may_share_a_pass(self, chunk: Chunk) -> bool:
        """Whether there is a program for several chunks such as this one."""
        return chunk.length == self.prefill_chunk and not chunk.echo

    def _next_chunks(self, slots: Sequence[int]) -> list[Chunk]:
        """Returns the next chunk of each slot, and further chunks for the unused rows of a wide
        pass.
        """
        chunks = list[Chunk]()
        prefixes = set()
        for slot in slots:
            self._load_prefix(slot)
            row = self._rows[slot]
            chunk = self._chunk_at(slot, row.prefilled)
            prefix = row.scope.key, row.ids[: chunk.end]
            # Whether a prompt before this one in `slots` computes the chunk now.
            is_shared = (
                self._prefixes is not None and row.prefilled < row.cacheable and prefix in prefixes
            )
            if chunk.size > 0 and not is_shared:
                prefixes.add(prefix)
                chunks.append(chunk)
        # Not with ring buffers: the second chunk of a pass would overwrite the first one before the
        # prefix cache has stored it.
        if self.wide_passes and not self.plan.has_rings:
            for chunk in chunks:  # includes the chunks that this loop appends
                following = self._chunk_at(chunk.slot, chunk.end)
                if following.size > 0 and len(chunks) < self._row_counts[-1]:
                    chunks.append(following)
        return chunks

    def _chunk_at(self, slot: int, start: int) -> Chunk:
        """Returns the chunk of a prompt that begins at a position."""
        row = self._rows[slot]
        end = row.length
        lengths = self.plan.lengths
        if start < row.cacheable:
            end = row.cacheable
            lengths = self._same_bits
        size = min(end - start, self.prefill_chunk)
        length = next(length for length in lengths if length >= size)
        return Chunk(
            slot,
            row.ids[start : start + size + 1],
            start,
            size,
            length,
            row.echo is not None,
        )

    def _prefill_pass(self, chunks: Sequence[Chunk]) -> None:
        """Prefills chunks in one pass, and adds them to the prefix cache."""
        steps = self._run_chunks(chunks)
        for chunk in chunks:
            row = self._rows[chunk.slot]
            if row.echo is not None:
                row.echo.add(steps, chunk.size)
            row.prefilled = chunk.end
            if self._prefixes is not None and self.caches and row.prefilled <= row.cacheable:
                self._prefixes.store(
                    self.caches, chunk.slot, row.ids[: row.prefilled], row.scope.key, chunk.start
                )

    def prefill_left(self, slot: int) -> int:
        """Returns the number of tokens left to prefill."""
        return self._rows[slot].length - self._rows[slot].prefilled

    def reused_tokens(self, slot: int) -> int:
        """Returns the number of prompt tokens that came from the prefix cache."""
        return self._rows[slot].reused

    def wait(self) -> None:
        """Waits until all programs that write the cache have ended."""
        # A prefill or decode program writes all arrays, so it is enough to wait for one of them.
        jax.block_until_ready(jax.tree.leaves(self.caches)[0])

    def _program_length(self, count: int) -> int:
        """Returns the length of the program for a chunk of `count` tokens."""
        return next(length for length in self.plan.lengths if length >= count)

    def prefill_tokens(
        self, slot: int, ids: Sequence[int], start: int, count: int, length: int
    ) -> None:
        """Prefills `count` tokens of a slot from position `start` on, with the program for chunks
        of this length.
        """
        self._run_chunks([Chunk(slot, ids, start, count, length)])

    def _run_chunks(self, chunks: Sequence[Chunk], rows: int | None = None) -> StepInfo | None:
        """Runs the prefill program for the length of these chunks; returns the reports on the
        tokens of the first chunk, `[length, …]`, or None without an echo.

        Args:
          chunks: chunks of the same length; several chunks must have the full length.
          rows: the rows of the program; None: as few as possible.
        """
        first = chunks[0]
        if rows is None:
            counts = self._row_counts if self._may_share_a_pass(first) else (1,)
            # The program for one row, or the widest.
            rows = counts[0] if len(chunks) == 1 else counts[-1]
        tokens_RT = np.zeros((rows, first.length), np.int32)
        next_RT = np.zeros((rows, first.length), np.int32)
        slot_R, start_R, size_R = np.zeros((3, rows), np.int32)
        slot_R[:] = first.slot  # unused rows need a slot too
        scopes = [NO_SCOPE] * rows
        for r, chunk in enumerate(chunks):
            tokens_RT[r, : chunk.size] = chunk.ids[: chunk.size]
            next_RT[r, : len(chunk.ids) - 1] = chunk.ids[1:]
            slot_R[r] = chunk.slot
            start_R[r] = chunk.start
            size_R[r] = chunk.size
            scopes[r] = self._rows[chunk.slot].scope
        features = self.scopes.features(scopes)
        args = slot_R, tokens_RT, start_R, size_R, next_RT, features, self._constants
        self.caches, steps = self._programs["prefill", first.length, first.echo, rows](
            self._model, self.caches, *args
        )
        return steps  # type: ignore[no-any-return]

    def measure_rows(self) -> tuple[int, ...]:
        """Returns the numbers of rows of the programs for whole chunks that compute the same bits,
        ascending.

        Random sequences are prefilled by the programs for one row and for several rows. If their
        keys differ in any bit, every pass must have the same number of rows. It is the larger
        number if a pass over several chunks takes about the time of one chunk, and the keys of a
        chunk do not depend on its row in the pass; otherwise it is 1.
        """
        most = self._row_counts[-1]
        length = self.prefill_chunk
        if most == 1:
            return (1,)
        random = np.random.default_rng(0)
        chunks = []  # of different sizes, at the beginning and at the end of the slots
        for start in sorted({0, max(0, self.context - length)}):
            # Slot i has the size at index i; the sizes are the largest ones, in random order.
            for slot, size in enumerate(min(length, self.context) - random.permutation(most)):
                ids = random.integers(0, self.plan.architecture.vocab_size, length).tolist()
                chunks.append(Chunk(slot, ids, start, size, length))

        def checksums(chunks: list[Chunk], per_pass: int, rows: int) -> list[list[int]]:
            self.caches = ()  # frees the memory for the next ones
            self.caches = self.plan.make_caches(self.count)
            for first in range(0, len(chunks), per_pass):
                self._run_chunks(chunks[first : first + per_pass], rows)
            return np.asarray(slot_checksums(self.caches)).tolist()  # type: ignore[no-any-return]

        together = checksums(chunks, most, most)
        if checksums(chunks, 1, 1) == together:
            return (1, most)
        # Other rows for the same chunks: alone in a pass, and in the reverse order.
        by_slot = sorted(chunks, key=lambda chunk: -chunk.slot)
        if self.plan.prefers_passes and checksums(chunks, 1, most) == together == checksums(
            by_slot, most, most
        ):
            return (most,)
        return (1,)

    def _lower_prefill(self, length: int, echo: bool, rows: int) -> Any:
        zero_R = np.zeros(rows, np.int32)
        tokens_RT = np.zeros((rows, length), np.int32)
        # The slots, tokens, first positions, sizes and next tokens of `prefill_part`.
        chunks = zero_R, tokens_RT, zero_R, zero_R, tokens_RT
        args = (
            self._model,
            self.plan.cache_shapes,
            *chunks,
            self.scopes.features([NO_SCOPE] * rows),
            self._constants,
        )
        # The number of alternatives per token in the echo.
        count = min(MAX_ALTERNATIVES, self.plan.architecture.vocab_size) if echo else None
        return prefill_part.lower(*args, stepper=self.plan.stepper, echo=count)

    @property
    def _constants(self) -> Constants:
        """The arrays of the features and the stepper that all rows share."""
        return {**self.plan.stepper_constants, **self.scopes.constants}

    def prompt_steps(self, slot: int) -> StepInfo | None:
        """Returns `PromptEcho.steps` of the prompt tokens after the first one, `[len(ids) − 1, …]`;
        None without an echo, or for a prompt of one token.
        """
        echo = self._rows[slot].echo
        return None if echo is None else echo.steps

    def copy_prompt(self, slot: int, to: int) -> None:
        """Copies a prefilled prompt to another slot."""
        self._copy(slot, to)
        self._rows[to] = replace(self._rows[slot], reused=0, echo=None)

    def _copy(self, slot: int, to: int) -> None:
        # The keys are tuples: kind, then the arguments that distinguish the programs of a kind.
        programs = self._programs["copy",]
        slots = (int32(slot), int32(to))
        self.caches = jax.tree.map(
            lambda leaf: programs[leaf.shape, leaf.dtype](leaf, *slots), self.caches
        )
