"""`dantinox eval kv`: the quality of a model with compressed caches.

A ratio is a share of the slots of the full cache; all compressed caches of a ratio have the same
total number of slots. Each cache is compared with the full cache on the same text. The measures are
the loss of the tokens after a prompt, greedy continuations, and recall tasks about distant facts. A
text without long-range dependencies would show no difference, so the study also measures these
dependencies.

A signal is a measured property of the heads, by which the slots are divided among them. The rule
that selects the default signal was fixed before any measurement. A signal beats equal shares at a
ratio if the interval of the paired loss difference excludes 0 in all three seeds. Among the signals
that beat equal shares at some ratio and lose at none, the one with the lowest loss wins; if there
is no such signal, equal shares win.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dantinox.config import UserError
from dantinox.generation import LoadedModel, load
from dantinox.lab.measure.texts import open_text_store
from dantinox.lab.studies.kv_bench import FREE_TOKENS, CacheBenchmark, Generated, ReadMetrics
from dantinox.lab.studies.kv_tasks import SEEDS, draw_sequences, draw_tasks, encodes_words
from dantinox.lab.studies.kv_variants import (
    ORACLE,
    REFERENCE,
    SIGNALS,
    STREAMING,
    UNIFORM,
    CacheVariant,
    build_variants,
    check_ratios,
    select_methods,
)
from dantinox.lab.studies.statistics import (
    LARGE_MODEL,
    Interval,
    bootstrap_indices,
    default_count,
    mean_interval,
    percentile_interval,
    verdict,
)
from dantinox.run import open_run

KV_METHODS = (STREAMING, UNIFORM, *SIGNALS, "random", ORACLE)
# The default for models with more than `LARGE_MODEL` parameters.
LARGE_METHODS = (STREAMING, UNIFORM, "distance", "loss", ORACLE)
MIN_TOKENS = 32
MIN_SEQUENCES = 2 * SEEDS
FULL_COUNTS = (200, 100)  # sequences of text, tasks of each kind; see `default_count`
QUICK_COUNTS = (48, 48)
MIN_COUNTS = (12, 6)
DEFAULT_TOKENS = 512
CONTINUED_PROMPTS = 24


@dataclass(frozen=True)
class SeedIntervals:
    """The interval of a measure over all sequences, and over the sequences of each seed."""

    all: Interval
    seeds: Sequence[Interval]

    @property
    def verdict(self) -> str:
        """For a loss difference: `better` or `worse` if all seeds' intervals exclude 0 with the
        same sign, else `same`.
        """
        verdicts = {verdict(interval) for interval in self.seeds}
        return verdicts.pop() if len(verdicts) == 1 else "same"


@dataclass(frozen=True, kw_only=True)
class CacheResult:
    """The results of a cache. Fields that do not apply are None: `oracle` has no size and no text.

    Attributes:
      ratio: requested share of the slots; 1 for the full cache.
      bytes: bytes of one row.
      share: `bytes` relative to the full cache.
      slots: fewest and most slots of a head.
      loss: nats per token.
      dppl: change of perplexity relative to the full cache, in %.
      kl: KL divergence from the full cache, in nats per token.
      top1: share of positions with the same most likely token, in %.
      same: share of greedy tokens equal to those of the full cache, in %.
      diverges: median number of equal greedy tokens before the first different one.
      tok_per_s: tokens per second.
      needle_aware: correct answers in % if the question is part of the prompt when the cache is
        compressed.
      needle_agnostic: correct answers in % if the question is read after the compression.
      copy_aware, copy_agnostic: the same for the copy tasks.
      gap_closed: how much of the loss difference between `streaming` and `oracle` the cache
        recovers, in %.
    """

    name: str
    ratio: float
    bytes: int | None
    share: float | None
    slots: tuple[int, int] | None
    loss: float
    dppl: SeedIntervals
    kl: SeedIntervals
    top1: SeedIntervals
    same: Interval | None = None
    diverges: float | None = None
    tok_per_s: float | None = None
    needle_aware: Interval | None = None
    copy_aware: Interval | None = None
    needle_agnostic: Interval | None = None
    copy_agnostic: Interval | None = None
    gap_closed: Interval | None = None


@dataclass(frozen=True)
class RatioResults:
    """The caches of a ratio, and the paired loss difference of each signal to equal shares (nats
    per token).
    """

    ratio: float
    methods: Sequence[CacheResult]
    against_uniform: Mapping[str, SeedIntervals]


@dataclass(frozen=True)
class KVStudy:
    """The conditions and the results of the study.

    Attributes:
      dtype: dtype of the compressed caches.
      tokens: tokens of a sequence; the first half is the prompt.
      tasks: number of tasks of each kind; None without tasks.
      continued: number of prompts that were continued by `free_tokens` tokens.
      overlapping: whether sequences overlap because the text is short.
      repeated: share of word 4-grams that occurred earlier in the text.
      long_range_gain: rise of the loss (nats per token) if tokens see only the nearest `NEAR_KEYS`
        keys.
      left_out: methods and ratios that were left out, with reasons.
      default_signal: the signal that wins by the rule of this module.
    """

    run: str
    calibration: str | None
    device: str
    dtype: str
    tokens: int
    sequences: int
    tasks: int | None
    continued: int
    free_tokens: int
    overlapping: bool
    repeated: float
    long_range_gain: Interval
    left_out: Sequence[str]
    full: CacheResult
    ratios: Sequence[RatioResults]
    default_signal: str


def evaluate_kv(
    run_dir: str | Path,
    *,
    quick: bool = False,
    ratios: Sequence[float] | None = None,
    methods: Sequence[str] | None = None,
    kv_calibration: str | Path | None = None,
    kv_dtype: str = "auto",
    progress: Callable[[str], None] = lambda _: None,
    tokens: int | None = None,
    sequences: int | None = None,
    data_path: str | Path | None = None,
) -> KVStudy:
    """Compares compressed caches with the full cache: loss on a text, greedy continuations, and
    recall tasks.

    Args:
      quick: use the counts `QUICK_COUNTS` instead of `FULL_COUNTS`.
      ratios: shares of the slots; None: those of `RATIOS` that the sequence length allows, or
        `LARGE_RATIOS` for a model with more than 10 M parameters.
      methods: names in `KV_METHODS`. None: the methods whose signal was measured; for a model with
        more than 10 M parameters, only those in `LARGE_METHODS`.
      kv_calibration: the file of measured signals; None: that of the run.
      kv_dtype: dtype of the compressed caches, a value of `kv.dtype`; the full cache has the
        compute dtype.
      progress: called with a line at the start of each part of the work and then every few seconds.
      tokens: tokens of a sequence, at most the context; the first half is the prompt. None: the
        context, at most 512.
      sequences: number of sequences; None: 200, or 48 with `quick`, and fewer for a model with more
        than 10 M parameters.
      data_path: the text, in the form of `data.path`; None: the validation tokens that training
        saved in the run.

    Raises:
      UserError: a name or number is invalid, the text is too short or too repetitive, or the run
        was not calibrated.
    """
    directory = open_run(run_dir)
    store = open_text_store(directory, data_path)
    run = load(run_dir)
    size = _study_size(run, quick, tokens, sequences)
    check_ratios(ratios)
    measured = run.kv_calibration(None if kv_calibration is None else str(kv_calibration))
    usual = LARGE_METHODS if run.parameters > LARGE_MODEL else KV_METHODS
    names, left_out = select_methods(
        methods,
        (*KV_METHODS, REFERENCE),
        measured,
        directory.path,
        "eval kv",
        usual=usual,
        needs_calibration=True,
    )
    if names == [REFERENCE]:
        raise UserError(
            f"{REFERENCE} is the baseline of the comparison: name at least one of"
            f" {', '.join(KV_METHODS)}"
        )
    caches, too_small = build_variants(run, measured, names, ratios, size.length, kv_dtype)
    text = draw_sequences(run.tokenizer, store, size.sequences, size.length)
    tasks = draw_tasks(run.tokenizer, text, size.tasks) if encodes_words(run.tokenizer) else None
    bench = CacheBenchmark(caches, progress)
    read, near = bench.measure_text(text)
    continuations = bench.continue_prompts(run, text, CONTINUED_PROMPTS)
    answered = (
        [dict[str, np.ndarray]() for _ in caches] if tasks is None else bench.measure_tasks(tasks)
    )
    results = [
        CacheResult(
            name=cache.name,
            ratio=cache.ratio,
            **_cache_size(cache),
            **_loss_metrics(read[i], read[0], text.seeds),
            **_agreement(continuations[i], continuations[0]),
            **_recall(answered[i]),
        )
        for i, cache in enumerate(caches)
    ]
    by_ratio = _results_by_ratio(caches, results, [metrics.loss_B for metrics in read], text.seeds)
    return KVStudy(
        run=str(directory.path),
        calibration=None if measured is None else str(measured.path),
        device=jax.devices()[0].device_kind,
        dtype=caches[-1].plan.dtype,
        tokens=size.length,
        sequences=size.sequences,
        tasks=None if tasks is None else size.tasks,
        continued=0 if continuations[0] is None else len(continuations[0].ids),
        free_tokens=min(FREE_TOKENS, size.length - size.length // 2),
        overlapping=text.overlapping,
        repeated=text.repeated,
        long_range_gain=mean_interval(near.loss_B - read[0].loss_B),
        left_out=left_out + too_small,
        full=results[0],
        ratios=by_ratio,
        default_signal=default_signal(by_ratio),
    )


class _StudySize(NamedTuple):
    """The numbers of sequences and of tasks of each kind, and the tokens of a sequence."""

    sequences: int
    tasks: int
    length: int


def _study_size(
    run: LoadedModel, quick: bool, tokens: int | None, sequences: int | None
) -> _StudySize:
    """Returns the size of a study; the arguments are those of `evaluate_kv`."""
    counts = QUICK_COUNTS if quick else FULL_COUNTS
    default_sequences, tasks = (
        default_count(count, least, run.parameters)
        for count, least in zip(counts, MIN_COUNTS, strict=True)
    )
    length = min(run.model.config.max_context, DEFAULT_TOKENS if tokens is None else tokens)
    if length < MIN_TOKENS:
        raise UserError(
            f"--tokens and the model's context must be at least {MIN_TOKENS}, got {length}"
        )
    if sequences is None:
        sequences = default_sequences
    if sequences < MIN_SEQUENCES:
        raise UserError(f"--sequences must be at least {MIN_SEQUENCES}, got {sequences}")
    return _StudySize(sequences, tasks, length)


def _cache_size(cache: CacheVariant) -> dict[str, Any]:
    if cache.report is None:
        return {"bytes": None, "share": None, "slots": None}
    slots = [slots for layer in cache.report["slots"] for _, slots in layer]
    return {
        "bytes": cache.report["bytes"],
        "share": cache.report["ratio"],
        "slots": (min(slots), max(slots)),
    }


def _loss_metrics(cache: ReadMetrics, full: ReadMetrics, seeds_S: np.ndarray) -> dict[str, Any]:
    return {
        "loss": float(cache.loss_B.mean()),
        "dppl": intervals_by_seed(
            cache.loss_B - full.loss_B, seeds_S, lambda nats: 100 * np.expm1(nats)
        ),
        "kl": intervals_by_seed(cache.kl_B, seeds_S),
        "top1": intervals_by_seed(100 * cache.top1_B, seeds_S),
    }


def intervals_by_seed(
    values_S: np.ndarray, seeds_S: np.ndarray, of: Callable[[float], float] = float
) -> SeedIntervals:
    """Returns the interval of `of(mean)` over all values, and over the values of each seed; `of` is
    an increasing function.
    """
    parts = [values_S, *(values_S[seeds_S == seed] for seed in range(SEEDS))]
    whole, *seeds = [Interval(*(float(of(end)) for end in mean_interval(part))) for part in parts]
    return SeedIntervals(whole, seeds)


def _recall(correct: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the share of correct answers in % of each kind of task, from
    `CacheBenchmark.measure_tasks`.
    """
    return {name: mean_interval(100 * correct_P) for name, correct_P in correct.items()}


def _agreement(cache: Generated | None, full: Generated | None) -> dict[str, Any]:
    if cache is None or full is None:
        return {}
    same_PT = cache.ids == full.ids
    first_difference_P = np.where(same_PT.all(axis=1), same_PT.shape[1], same_PT.argmin(axis=1))
    return {
        "same": mean_interval(100 * same_PT.mean(axis=1)),
        "diverges": float(np.median(first_difference_P)),
        "tok_per_s": cache.rate,
    }


def _results_by_ratio(
    caches: Sequence[CacheVariant],
    results: Sequence[CacheResult],
    losses: Sequence[np.ndarray],
    seeds_S: np.ndarray,
) -> list[RatioResults]:
    """Groups the results by ratio, and adds the share of the gap between streaming and oracle that
    each method closes.
    """
    ratios = []
    for ratio in dict.fromkeys(cache.ratio for cache in caches[1:]):
        indices = {
            cache.name: i for i, cache in enumerate(caches) if i > 0 and cache.ratio == ratio
        }
        loss = {name: losses[i] for name, i in indices.items()}
        methods = [
            replace(results[i], gap_closed=gap_closed(loss, name)) for name, i in indices.items()
        ]
        signals = [name for name in SIGNALS if {name, UNIFORM} <= loss.keys()]
        against = {name: intervals_by_seed(loss[name] - loss[UNIFORM], seeds_S) for name in signals}
        ratios.append(RatioResults(ratio, methods, against))
    return ratios


def gap_closed(loss: Mapping[str, np.ndarray], name: str) -> Interval | None:
    """Returns (streaming − method) / (streaming − oracle) of mean losses in %; None if the gap is
    not significantly above 0.

    Args:
      loss: method → losses of S sequences, `[S]`.
    """
    if not {STREAMING, ORACLE} <= loss.keys():
        return None
    gap_S = loss[STREAMING] - loss[ORACLE]
    if mean_interval(gap_S).low <= 0:
        return None
    gained_S = loss[STREAMING] - loss[name]
    return percentile_interval(
        [
            100 * gained_S[picked].mean() / gap_S[picked].mean()
            for picked in bootstrap_indices(len(gap_S))
        ]
    )


def default_signal(ratios: Sequence[RatioResults]) -> str:
    """Returns the signal that wins by the rule of this module."""
    means = {}
    for name in SIGNALS:
        verdicts = {
            ratio.against_uniform[name].verdict for ratio in ratios if name in ratio.against_uniform
        }
        if "better" in verdicts and "worse" not in verdicts:
            means[name] = np.mean(
                [cache.loss for ratio in ratios for cache in ratio.methods if cache.name == name]
            )
    return min(means, key=means.__getitem__, default=UNIFORM)
