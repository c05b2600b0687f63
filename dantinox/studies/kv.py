"""`dantinox eval kv`: the quality of a model with compressed caches.

Every cache of a ratio has the same number of slots in all, and what they lose is measured beside the full cache on the same
text: read token by token behind a prompt, continued greedily, and in tasks that ask for something far back. A text in which
nothing far back matters shows no cache's damage, so how much does is measured too.

The rule for the signal that heads should share the slots by, fixed before anything is measured: a signal beats equal shares at
a ratio if the paired difference of loss lies outside its interval in all three seeds. One that beats them at some ratio and is
beaten at none is to be taken, of several the one with the least loss; without one, equal shares are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dantinox.config import UserError
from dantinox.generation import load
from dantinox.measure.texts import open_text_store
from dantinox.run import open_run
from dantinox.studies.kv_bench import (
    FREE_TOKENS,
    ORACLE,
    SIGNALS,
    STREAMING,
    UNIFORM,
    CacheBenchmark,
    CacheVariant,
    GreedyContinuations,
    ReadMetrics,
    build_variants,
    select_methods,
)
from dantinox.studies.kv_tasks import SEEDS, draw_sequences, draw_tasks, encodes_words
from dantinox.studies.statistics import Interval, bootstrap_indices, default_count, mean_interval, percentile_interval, verdict

MIN_TOKENS, MIN_SEQUENCES = 32, 2 * SEEDS
FULL_COUNTS, QUICK_COUNTS = (200, 100), (48, 48)  # sequences read of the text, tasks of each kind: see `default_count`
MIN_COUNTS = (12, 6)
DEFAULT_TOKENS = 512
CONTINUED_PROMPTS = 24  # prompts


@dataclass(frozen=True)
class SeedIntervals:
    """A measure of all sequences, and of those of each seed."""

    all: Interval
    seeds: Sequence[Interval]

    @property
    def verdict(self) -> str:
        """What a difference of losses says of the first of two methods, if it says so in all seeds, outside their intervals."""
        verdicts = {verdict(interval) for interval in self.seeds}
        return verdicts.pop() if len(verdicts) == 1 else "same"


@dataclass(frozen=True, kw_only=True)
class CacheResult:
    """What was found of a cache; None where there is no such number: the oracle has no size, and continues nothing.

    Attributes:
      ratio: the share of the slots asked for; 1 for the full cache.
      bytes: of one row, `share` of the full cache's, and the fewest and the most `slots` of a head.
      loss: nats per token, `dppl` the change of perplexity (%), `kl` from the full cache (nats), `top1` equal
        likeliest tokens (%).
      same: greedy tokens (%) that are the full cache's; `diverges`: the median of how many stand before the first other one.
      needle_aware: right answers (%) with the question in the prompt, `agnostic`: behind it; the same of records copied.
      gap_closed: how much of the gap between streaming and oracle (%).
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
    """The caches of a ratio, and each signal against equal shares: the paired difference of loss in nats per token."""

    ratio: float
    methods: Sequence[CacheResult]
    against_uniform: Mapping[str, SeedIntervals]


@dataclass(frozen=True)
class KVStudy:
    """What was done, and what was found.

    Attributes:
      dtype: of the compressed caches.
      tokens: of a sequence; the first half is the prompt.
      tasks: of each kind, None without tasks; `continued`: prompts, by `free_tokens` each.
      overlapping: the text was too short to draw sequences apart; `repeated`: the share of its word 4-grams seen before.
      long_range_gain: by how much the loss is higher (nats per token) if tokens see the nearest `NEAR_KEYS` alone.
      left_out: what was not compared, and why.
      default_signal: by the rule above.
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
    """Reads a text, continues it and does tasks through the full cache and through compressed ones.

    Args:
      quick: read `QUICK_COUNTS` instead of `FULL_COUNTS`.
      ratios: shares of the slots; None: those of `RATIOS` that the length of the text allows, or `LARGE_RATIOS` of a model
        with more than 10 M parameters.
      methods: names of `METHODS`; None: all for which something was measured, or `LARGE_METHODS` of such a model.
      kv_calibration: the file of the measured signals; None: the run's own.
      kv_dtype: of the compressed caches, a value of `kv.dtype`; the full one is in the compute dtype.
      progress: called with a line before every stretch of work.
      tokens: of a sequence, at most the context; the first half is the prompt. None: the context, at most 512.
      sequences: how many are read; None: 200, with `quick` 48, and fewer of a model of more than 10 M parameters.
      data_path: the text, as `data.path` names one; None: the validation tokens that training left in the run.

    Raises:
      UserError: a name or number is wrong, the text is too short or repeats itself, or the run was not calibrated.
    """
    directory = open_run(run_dir)
    store = open_text_store(directory, data_path)
    run = load(run_dir)
    counts = [
        default_count(*both, run.parameters) for both in zip(QUICK_COUNTS if quick else FULL_COUNTS, MIN_COUNTS, strict=True)
    ]
    sequences, of_each_kind = counts[0] if sequences is None else sequences, counts[1]
    length = min(run.model.config.max_context, DEFAULT_TOKENS if tokens is None else tokens)
    if length < MIN_TOKENS:
        raise UserError(f"--tokens, and the model's context, must be at least {MIN_TOKENS}, got {length}")
    if sequences < MIN_SEQUENCES:
        raise UserError(f"--sequences must be at least {MIN_SEQUENCES}, got {sequences}")
    for ratio in ratios or ():
        if not 0 < ratio < 1:
            raise UserError(f"--ratios must lie between 0 and 1, got {ratio:g}")
    measured = run.kv_calibration(None if kv_calibration is None else str(kv_calibration))
    names, left_out = select_methods(methods, measured, directory.path, run.parameters)
    caches, too_small = build_variants(run, measured, names, ratios, length, kv_dtype)
    text = draw_sequences(run.tokenizer, store, sequences, length)
    tasks = draw_tasks(run.tokenizer, text, of_each_kind) if encodes_words(run.tokenizer) else None
    bench = CacheBenchmark(caches, progress)
    read, near = bench.measure_text(text)
    written = bench.continue_prompts(run, text, CONTINUED_PROMPTS)
    right: list[dict[str, Any]] = [{}] * len(caches)
    if tasks is not None:
        right = [{name: mean_interval(100 * right_P) for name, right_P in one.items()} for one in bench.measure_tasks(tasks)]
    found = [
        CacheResult(
            name=cache.name,
            ratio=cache.ratio,
            **_cache_size(cache),
            **_loss_metrics(read[i], read[0], text.seeds),
            **_agreement(written[i], written[0]),
            **right[i],
        )
        for i, cache in enumerate(caches)
    ]
    by_ratio = _results_by_ratio(caches, found, [one.loss_B for one in read], text.seeds)
    return KVStudy(
        run=str(directory.path),
        calibration=None if measured is None else str(measured.path),
        device=jax.devices()[0].device_kind,
        dtype=caches[-1].plan.dtype,
        tokens=length,
        sequences=sequences,
        tasks=None if tasks is None else of_each_kind,
        continued=0 if written[0] is None else len(written[0].ids),
        free_tokens=min(FREE_TOKENS, length - length // 2),
        overlapping=text.overlapping,
        repeated=text.repeated,
        long_range_gain=mean_interval(near.loss_B - read[0].loss_B),
        left_out=left_out + too_small,
        full=found[0],
        ratios=by_ratio,
        default_signal=default_signal(by_ratio),
    )


def _cache_size(cache: CacheVariant) -> dict[str, Any]:
    if cache.report is None:
        return {"bytes": None, "share": None, "slots": None}
    slots = [slots for layer in cache.report["slots"] for _, slots in layer]
    return {"bytes": cache.report["bytes"], "share": cache.report["ratio"], "slots": (min(slots), max(slots))}


def _loss_metrics(own: ReadMetrics, full: ReadMetrics, seeds_S: np.ndarray) -> dict[str, Any]:
    return {
        "loss": float(own.loss_B.mean()),
        "dppl": intervals_by_seed(own.loss_B - full.loss_B, seeds_S, lambda nats: 100 * np.expm1(nats)),
        "kl": intervals_by_seed(own.kl_B, seeds_S),
        "top1": intervals_by_seed(100 * own.top1_B, seeds_S),
    }


def intervals_by_seed(values_S: np.ndarray, seeds_S: np.ndarray, of: Callable[[float], float] = float) -> SeedIntervals:
    """A growing function of the mean, of all values and of those of each seed."""
    parts = [values_S, *(values_S[seeds_S == seed] for seed in range(SEEDS))]
    whole, *seeds = [Interval(*(float(of(end)) for end in mean_interval(part))) for part in parts]
    return SeedIntervals(whole, seeds)


def _agreement(own: GreedyContinuations | None, full: GreedyContinuations | None) -> dict[str, Any]:
    if own is None or full is None:
        return {}
    same_PT = own.ids == full.ids
    until_P = np.where(same_PT.all(axis=1), same_PT.shape[1], same_PT.argmin(axis=1))
    return {"same": mean_interval(100 * same_PT.mean(axis=1)), "diverges": float(np.median(until_P)), "tok_per_s": own.rate}


def _results_by_ratio(
    caches: Sequence[CacheVariant], found: Sequence[CacheResult], losses: Sequence[np.ndarray], seeds_S: np.ndarray
) -> list[RatioResults]:
    """The methods of every ratio, with what each closes of the gap between streaming and oracle."""
    ratios = []
    for ratio in dict.fromkeys(cache.ratio for cache in caches[1:]):
        own = {cache.name: i for i, cache in enumerate(caches) if i > 0 and cache.ratio == ratio}
        loss = {name: losses[i] for name, i in own.items()}
        methods = [replace(found[i], gap_closed=gap_closed(loss, name)) for name, i in own.items()]
        signals = [name for name in SIGNALS if {name, UNIFORM} <= loss.keys()]
        against = {name: intervals_by_seed(loss[name] - loss[UNIFORM], seeds_S) for name in signals}
        ratios.append(RatioResults(ratio, methods, against))
    return ratios


def gap_closed(loss: Mapping[str, np.ndarray], name: str) -> Interval | None:
    """(streaming − method) / (streaming − oracle) of mean losses `[S]` in %; None where the gap may be none."""
    if not {STREAMING, ORACLE} <= loss.keys():
        return None
    streaming_S, oracle_S, own_S = (loss[key] for key in (STREAMING, ORACLE, name))
    if mean_interval(streaming_S - oracle_S).low <= 0:
        return None
    gained_S, gap_S = streaming_S - own_S, streaming_S - oracle_S
    return percentile_interval(
        [100 * gained_S[picked].mean() / gap_S[picked].mean() for picked in bootstrap_indices(len(own_S))]
    )


def default_signal(ratios: Sequence[RatioResults]) -> str:
    """The signal that wins by the rule above."""
    means = {}
    for name in SIGNALS:
        verdicts = {ratio.against_uniform[name].verdict for ratio in ratios if name in ratio.against_uniform}
        if "better" in verdicts and "worse" not in verdicts:
            means[name] = np.mean([one.loss for ratio in ratios for one in ratio.methods if one.name == name])
    return min(means, key=means.__getitem__, default=UNIFORM)
