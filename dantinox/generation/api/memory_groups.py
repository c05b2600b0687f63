"""Divides a batch whose rows need more memory than is free into batches that are decoded one after
the other.
"""

import bisect
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

import jax
import numpy as np

from dantinox.config import KVSection, ModelConfig, UserError
from dantinox.generation.api.beam_search import BeamRun
from dantinox.generation.api.offline_run import BatchRun
from dantinox.generation.api.result import Result
from dantinox.generation.decode.cache_plan import plan_cache
from dantinox.generation.decode.generate_toks import DECODE_CHUNK, PREFILL_BATCH_TOKENS
from dantinox.generation.model_bundle import ModelBundle
from dantinox.generation.request import GenerationRequest
from dantinox.generation.run_timer import Times
from dantinox.generation.sample_text import TextPart
from dantinox.generation.static_batch import slots_needed
from dantinox.model import make_cache
from dantinox.platform import release_free_memory
from dantinox.programs import free_bytes, tree_bytes

# The compiler keeps up to 1 GB for a program with 30 layers and long prompts until the program has
# run, less for small ones.
COMPILER_BYTES = 1 << 30
COMPILER_SHARE = 0.25  # the compiler is left at most this share of the free memory
MEMORY_SHARE = 0.9  # a batch may take this share of the rest
REPORT_SHARE = 0.5  # the reports of all tokens may take this share of the free memory
# The float32 arrays `[V]` of a row: logits, those of the sampling steps, counts of tokens.
VOCABULARY_ARRAYS = 8
# The bytes of an alternative in the reports of two chunks, that of the device and that of the host.
CHUNK_REPORT_BYTES = 24
# The bytes of an alternative in a result: id, text and log-probability as Python objects.
RESULT_REPORT_BYTES = 140
RESULT_TOKEN_BYTES = 1000  # the other values of a token in a result with reports

Run = BatchRun | BeamRun


class DividedRun:
    """A run whose batches are created and decoded one after the other, with the interface of
    `BatchRun`.

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
        self._starts = starts
        self.numbers = list(numbers)
        self.results: list[Result] = []
        self.times = Times()
        self._summaries: list[str] = []

    def parts(self) -> Iterator[tuple[int, TextPart]]:
        """Decodes the batches and yields `(row, text)` when text becomes final; `row` is an index
        of `results`.
        """
        for start in self._starts:
            run = start()
            first = len(self.results)
            for row, part in run.parts():
                yield first + row, part
            self.results += run.results
            self.times = Times(*map(sum, zip(self.times, run.times, strict=True)))
            self._summaries.append(run.summary())
            del run
            gc.collect()  # an engine and its functions refer to each other
            release_free_memory()

    def summary(self) -> str:
        """Returns a line about each batch."""
        reason = (
            f"decoded in {len(self._starts)} batches, because together"
            " they need more memory than is free"
        )
        return "\n".join([reason, *self._summaries])


def fitting_rows(
    model: ModelBundle, requests: Sequence[GenerationRequest], pad: Callable[[int], int]
) -> int | None:
    """Returns how many rows of these requests fit into memory, each with those that follow it; None
    if this is unknown.

    The prefill needs the most memory: besides all rows, a second cache for the prompts that are
    computed together, or two if there are other prompts, and the activations of these prompts.

    Raises:
      UserError: not even one row fits, or the reports of all tokens do not.
    """
    free = free_bytes()
    if free is None:
        return None
    architecture = model.model.config
    first = requests[0]
    lengths = np.array([len(request.ids) for request in requests])
    requested = np.array([request.config.generation.max_new_tokens for request in requests])
    limits = np.clip(architecture.max_context - lengths, 0, requested)
    slots = slots_needed(lengths, limits, pad)
    padded_prompt = pad(int(lengths.max()))
    _check_reports(first, int(limits.sum()), free)
    row_bytes = _row_bytes(model, first, slots)
    width = first.rows_per_sample
    # The number of prompts that are prefilled in one pass.
    together = max(1, PREFILL_BATCH_TOKENS // padded_prompt)
    section = first.config.generation
    activations = padded_prompt * _activation_bytes(architecture)
    usable = int(MEMORY_SHARE * (free - min(COMPILER_BYTES, int(COMPILER_SHARE * free))))

    def needed(rows: int) -> int:
        prompts = -(-rows // section.n) * width
        prefill_bytes = activations
        if section.use_cache:
            caches = 1 if prompts <= together else 2
            prefill_bytes += caches * row_bytes // width
        return rows * row_bytes + min(prompts, together) * prefill_bytes

    fitting = bisect.bisect_right(range(1, usable // row_bytes + 1), usable, key=needed)
    if fitting < 1:
        raise UserError(
            f"one text of {slots} tokens needs {needed(1) / 1e9:.2f} GB for its cache and its"
            f" prompt, and {usable / 1e9:.2f} of {free / 1e9:.2f} GB of free memory can be used:"
            " set a smaller generation.max_new_tokens, or kv.dtype to int8"
        )
    return fitting


def _row_bytes(model: ModelBundle, request: GenerationRequest, slots: int) -> int:
    """Returns the bytes of a row, with those that follow it, while it is decoded."""
    architecture = model.model.config
    section = request.config.generation
    kv = request.config.kv
    arrays = VOCABULARY_ARRAYS
    cache = _cache_bytes(architecture, kv.dtype, slots) * _kept_share(kv, slots)
    if not section.use_cache:
        # Without a cache, each step computes the whole sequences of all rows.
        cache = 2 * slots * _activation_bytes(architecture)
    elif section.speculation != "off" and not kv.compresses:
        arrays += section.draft_tokens + 1
    draft = model.draft_model(section)
    if draft is not None:
        cache += _cache_bytes(draft.config, kv.dtype, slots)
    if section.num_beams > 1:
        cache *= 2  # a step copies the rows of the beams that go on
    reports = (
        0
        if request.logprobs is None
        else DECODE_CHUNK * CHUNK_REPORT_BYTES * (request.logprobs + 1)
    )
    row = int(cache) // section.tensor_parallel + 4 * arrays * architecture.vocab_size + reports
    return row * request.rows_per_sample


def _check_reports(request: GenerationRequest, tokens: int, free: int) -> None:
    """Raises a UserError if the reports of `tokens` tokens per sample in the results need more than
    their share of `free`.
    """
    if request.logprobs is None:
        return
    count = tokens * request.config.generation.n
    needed = count * (RESULT_TOKEN_BYTES + RESULT_REPORT_BYTES * request.logprobs)
    if needed > free * REPORT_SHARE:
        raise UserError(
            f"{request.logprobs} log-probabilities of each of {count} tokens need"
            f" {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free: set fewer"
            " alternatives, samples or new tokens"
        )


def _activation_bytes(architecture: ModelConfig) -> int:
    """Returns about the bytes of the activations of one token: the features of a feed-forward part,
    and its states.

    The factors are those of the compiled prefill of SmolLM2-135M with 3,072 tokens, which needs 49
    kB per token.
    """
    experts = architecture.experts
    hidden = architecture.hidden_dim * (1 if experts is None else experts.top_k)
    return 4 * (5 * hidden + 8 * architecture.dim)


@lru_cache(maxsize=64)
def _cache_bytes(architecture: ModelConfig, dtype: str, slots: int) -> int:
    """Returns the bytes of an uncompressed cache of one row."""
    plan = plan_cache(architecture, KVSection.model_validate({"dtype": dtype}), slots)
    return tree_bytes(jax.eval_shape(partial(make_cache, architecture, 1, *plan)))


def _kept_share(kv: KVSection, slots: int) -> float:
    """Returns the share of the slots that a compressed cache keeps."""
    share = (kv.budget or 1.0) if kv.budget_tokens is None else kv.budget_tokens / slots
    return min(1.0, share)


def divide(
    requests: Sequence[GenerationRequest], numbers: Sequence[int], rows: int
) -> list[tuple[list[GenerationRequest], list[int], range]]:
    """Divides requests with the same number of samples into batches of at most `rows` rows and
    about equal size.

    Returns:
      For each batch its requests, their numbers, and the samples that it generates of each.

    Raises:
      UserError: a request has more than `rows` beams.
    """
    section = requests[0].config.generation
    samples = section.n
    beams = section.num_beams
    width = samples if beams == 1 else beams
    if width > rows and beams > 1:
        raise UserError(
            f"generation.num_beams is {beams}, but only {rows} beams fit into the free memory"
        )
    if width > rows:  # not even one request fits, so its samples are divided
        parts = _equal_ranges(samples, rows)
        return [
            ([request], [number], part)
            for request, number in zip(requests, numbers, strict=True)
            for part in parts
        ]
    return [
        ([requests[i] for i in part], [numbers[i] for i in part], range(samples))
        for part in _equal_ranges(len(requests), rows // width)
    ]


def _equal_ranges(count: int, most: int) -> list[range]:
    """Divides `range(count)` into as few ranges as possible of at most `most` numbers; their sizes
    differ by at most one.
    """
    edges = np.linspace(0, count, -(-count // most) + 1).round().astype(int).tolist()
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]
