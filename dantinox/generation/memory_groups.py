"""Divides a batch whose rows need more memory than is free into batches that are decoded one after the other."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

import jax
import numpy as np

from dantinox.config import KVSection, ModelConfig, UserError
from dantinox.generation.beam_search import BeamRun
from dantinox.generation.cache_plan import plan_cache
from dantinox.generation.model_bundle import ModelBundle
from dantinox.generation.offline_run import BatchRun
from dantinox.generation.request import GenerationRequest
from dantinox.generation.result import Result
from dantinox.generation.sample_text import TextPart
from dantinox.generation.static_batch import Times, slots_needed
from dantinox.model import make_cache
from dantinox.programs import free_bytes, tree_bytes

# The rows of a batch use at most this share of the free memory. The rest is for the activations of prompts, the compiler, and
# a second copy of the cache while a program creates it.
MEMORY_SHARE = 0.5
VOCABULARY_ARRAYS = 8  # float32 arrays `[V]` of a row: logits, those of the sampling steps, counts of tokens

Run = BatchRun | BeamRun


class DividedRun:
    """A run whose batches are created and decoded one after the other, with the interface of `BatchRun`.

    Attributes:
      numbers: for each result, the index of its request.
      results: the results; available after `parts`.
      times: the sums of the times of the batches.
    """

    def __init__(self, starts: Sequence[Callable[[], Run]], numbers: Sequence[int]):
        """Creates the run.

        Args:
          starts: for each batch, the function that creates it.
          numbers: the indices of the requests of all results, in the order of the batches.
        """
        self._starts, self.numbers = starts, list(numbers)
        self.results: list[Result] = []
        self.times = Times()
        self._summaries: list[str] = []

    def parts(self) -> Iterator[tuple[int, TextPart]]:
        """Decodes the batches and yields `(row, text)` when text becomes final; `row` is an index of `results`."""
        for start in self._starts:
            run, first = start(), len(self.results)
            for row, part in run.parts():
                yield first + row, part
            self.results += run.results
            self.times = Times(*map(sum, zip(self.times, run.times, strict=True)))
            self._summaries.append(run.summary())

    def summary(self) -> str:
        """Returns a line about each batch."""
        reason = f"decoded in {len(self._starts)} batches, because together they need more than half of the free memory"
        return "\n".join([reason, *self._summaries])


def fitting_rows(model: ModelBundle, requests: Sequence[GenerationRequest], pad: Callable[[int], int]) -> int | None:
    """Returns how many rows of these requests fit into memory; None if the free memory is unknown.

    Raises:
      UserError: not even one row fits.
    """
    free = free_bytes()
    if free is None:
        return None
    architecture, first = model.model.config, requests[0].config
    lengths = np.array([len(request.ids) for request in requests])
    limits = np.array([request.config.generation.max_new_tokens for request in requests])
    limits = np.clip(architecture.max_context - lengths, 0, limits)
    slots = slots_needed(lengths, limits, pad)
    kv, tensor = first.kv, first.generation.tensor_parallel
    cache = _cache_bytes(architecture, kv.dtype, slots) * _kept_share(kv, slots)
    if (draft := model.draft_model(first.generation)) is not None:
        cache += _cache_bytes(draft.config, kv.dtype, slots)
    row = int(cache) // tensor + 4 * VOCABULARY_ARRAYS * architecture.vocab_size
    row *= 2 if requests[0].has_guidance else 1  # a row and its guide row
    fitting = int(free * MEMORY_SHARE) // row
    if fitting < 1:
        raise UserError(
            f"one text of {slots} tokens needs {row / 1e9:.2f} GB for its cache, and {free / 1e9:.2f} GB of memory are free: "
            "set a smaller generation.max_new_tokens, or kv.dtype to int8"
        )
    return fitting


@lru_cache(maxsize=64)
def _cache_bytes(architecture: ModelConfig, dtype: str, slots: int) -> int:
    """Returns the bytes of an uncompressed cache of one row."""
    plan = plan_cache(architecture, KVSection.model_validate({"dtype": dtype}), slots)
    return tree_bytes(jax.eval_shape(partial(make_cache, architecture, 1, *plan)))


def _kept_share(kv: KVSection, slots: int) -> float:
    """Returns the share of the slots that a compressed cache keeps."""
    return min(1.0, (kv.budget or 1.0) if kv.budget_tokens is None else kv.budget_tokens / slots)


def divide(
    requests: Sequence[GenerationRequest], numbers: Sequence[int], rows: int
) -> list[tuple[list[GenerationRequest], list[int], range]]:
    """Divides requests with the same number of samples into batches of at most `rows` rows and about equal size.

    Returns:
      For each batch its requests, their numbers, and the samples that it generates of each.

    Raises:
      UserError: a request has more than `rows` beams.
    """
    section = requests[0].config.generation
    samples, beams = section.n, section.num_beams
    width = samples if beams == 1 else beams
    if width > rows and beams > 1:
        raise UserError(f"generation.num_beams is {beams}, but only {rows} beams fit into half of the free memory")
    if width > rows:
        parts = _equal_ranges(samples, rows)
        return [([request], [number], part) for request, number in zip(requests, numbers, strict=True) for part in parts]
    return [
        ([requests[i] for i in part], [numbers[i] for i in part], range(samples))
        for part in _equal_ranges(len(requests), rows // width)
    ]


def _equal_ranges(count: int, most: int) -> list[range]:
    """Divides `range(count)` into as few ranges as possible of at most `most` numbers; their sizes differ by at most one."""
    edges = np.linspace(0, count, -(-count // most) + 1).round().astype(int).tolist()
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]
