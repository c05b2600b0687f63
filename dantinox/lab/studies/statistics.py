"""Diversity of texts, bootstrap confidence intervals, and likelihood at equal diversity.

An n-gram is a sequence of n tokens. With a character vocabulary, tokens are characters. All
measures of a single text depend on its length: compare only texts of equal length.
"""

import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from operator import or_
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from dantinox.files import UserError, quote

BOOTSTRAP_SAMPLES = 2000
CONFIDENCE = 0.95
LARGE_MODEL = 10e6  # parameters; larger models get smaller studies by default
BLEU_SMOOTHING = 0.1  # number of matches assumed for an n-gram order without a match

Tokens = Sequence[int]
# Measure → one number per prompt `[P]`, each the mean over the prompt's samples.
MeasuresByPrompt = Mapping[str, np.ndarray]


def select_names(names: Sequence[str] | None, known: Iterable[str], what: str) -> list[str]:
    """Returns the selected names (None: all) in the order of `known`.

    Args:
      what: the kind of the names in error messages.

    Raises:
      UserError: a name is unknown.
    """
    known = list(known)
    for name in names or ():
        if name not in known:
            near = difflib.get_close_matches(name.lower().replace("-", "_"), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
            raise UserError(f"unknown {what} {quote(name)}: {hint}")
    return [name for name in known if names is None or name in names]


def default_count(count: int, least: int, parameters: int) -> int:
    """Returns the default number of samples of a study.

    This is `count` for models of up to `LARGE_MODEL` parameters. For larger models it falls in
    inverse proportion to the parameters, down to `least`. A study of a model with 100 M parameters
    then takes minutes on a CPU, at the price of wider intervals.
    """
    return max(min(count, least), round(count * min(1.0, LARGE_MODEL / max(parameters, 1))))


def ngrams(tokens: Tokens, n: int) -> list[tuple[int, ...]]:
    """Returns all n-grams in order; an empty list for a text of fewer than n tokens."""
    return list(zip(*(tokens[i:] for i in range(n)), strict=False))


def distinct(tokens: Tokens, n: int) -> float:
    """Returns the share of distinct n-grams among all n-grams of one text; 1 without n-grams (Li et
    al. 2016, one sample).
    """
    grams = ngrams(tokens, n)
    return len(set(grams)) / len(grams) if grams else 1.0


def repetition(tokens: Tokens, n: int) -> float:
    """Returns the share of n-grams that occurred earlier in the text: 1 − distinct-n (seq-rep-n of
    Welleck et al. 2020).
    """
    return 1.0 - distinct(tokens, n)


def diversity(tokens: Tokens) -> float:
    """Returns distinct-2 · distinct-3 · distinct-4 of one text, in (0, 1] (Su et al. 2022)."""
    return math.prod(distinct(tokens, n) for n in (2, 3, 4))


TEXT_MEASURES: dict[str, Callable[[Tokens], float]] = {
    "diversity": diversity,
    **{f"distinct_{n}": partial(distinct, n=n) for n in (1, 2, 3)},
    "rep_4": partial(repetition, n=4),
}


def self_bleu(samples: Sequence[Tokens]) -> float:
    """Returns the mean BLEU-4 of each sample against all others; 1 if all samples are equal (Zhu et
    al. 2018).

    BLEU uses clipped matches over all references, equal weights, and the brevity penalty of the
    reference nearest in length. An order without a match counts as 0.1 matches (method 1 of Chen
    and Cherry 2014). Without a common token, BLEU is 0.
    """
    return sum(
        _bleu(sample, [*samples[:i], *samples[i + 1 :]]) for i, sample in enumerate(samples)
    ) / len(samples)


def _bleu(sample: Tokens, others: Sequence[Tokens]) -> float:
    logs = []
    for n in (1, 2, 3, 4):
        grams = Counter(ngrams(sample, n))
        largest = reduce(or_, (Counter(ngrams(other, n)) for other in others))
        matched = (grams & largest).total()
        if n == 1 and matched == 0:
            return 0.0
        logs.append(math.log((matched or BLEU_SMOOTHING) / max(1, grams.total())))
    nearest = min(map(len, others), key=lambda length: (abs(length - len(sample)), length))
    return math.exp(sum(logs) / len(logs) + min(0.0, 1 - nearest / len(sample)))


class Interval(NamedTuple):
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


def bootstrap_indices(prompts: int) -> Iterator[np.ndarray]:
    """Yields prompt indices: first all prompts, then 2,000 bootstrap resamples with replacement.

    The resamples are the same on every call, so that two methods are resampled identically.
    """
    yield np.arange(prompts)
    random = np.random.default_rng(0)
    for _ in range(BOOTSTRAP_SAMPLES):
        yield random.integers(prompts, size=prompts)


def percentile_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """Returns the percentile interval (Efron 1979) of a statistic.

    Args:
      values: the value on the sample, then the values on all resamples.
    """
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.asarray(values[1:], np.float64), [tail, 1 - tail])
    return Interval(float(values[0]), float(low), float(high))


def mean_interval(values_P: np.ndarray) -> Interval:
    """Returns the mean over prompts with its interval. Pass the differences of two methods for a
    paired interval.
    """
    values_P = np.asarray(values_P, np.float64)
    return percentile_interval(
        [values_P[picked].mean() for picked in bootstrap_indices(len(values_P))]
    )


def stratified_interval(strata: Sequence[np.ndarray]) -> Interval:
    """Returns the mean of the strata's means with its normal interval, ± 1.96 standard errors.

    The values `[N]` of a stratum are independent draws, N at least 2. The strata are fixed, so
    their choice adds no variance. Pass the differences of two methods for a paired interval.
    """
    means = [float(np.mean(values)) for values in strata]
    error = math.sqrt(sum(float(np.var(values, ddof=1)) / len(values) for values in strata)) / len(
        strata
    )
    value = sum(means) / len(means)
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error
    return Interval(value, value - half, value + half)


def excess(method: MeasuresByPrompt, curve: Sequence[MeasuresByPrompt]) -> np.ndarray | None:
    """Returns by how much `bits_per_byte` of a method exceeds a reference curve at the same
    `diversity`.

    The result has shape `[1 + R]`: the value on the sample, then the values on R resamples.

    Args:
      method: measures of the method.
      curve: measures of one sampling method at several settings. Between them, mean bits are
        interpolated over mean diversity.

    Returns:
      None if the mean diversity of the method is outside the range of the curve.
    """
    reached = [point["diversity"].mean() for point in curve]
    if not min(reached) <= method["diversity"].mean() <= max(reached):
        return None

    def means(measures: MeasuresByPrompt, prompts: np.ndarray) -> list[float]:
        return [measures[name][prompts].mean() for name in ("diversity", "bits_per_byte")]

    excesses = []
    for prompts in bootstrap_indices(len(method["diversity"])):
        diversity_of_method, bits = means(method, prompts)
        diversities, bits_of_curve = np.transpose(sorted(means(point, prompts) for point in curve))
        excesses.append(bits - np.interp(diversity_of_method, diversities, bits_of_curve))
    return np.array(excesses)


def verdict(difference: Interval) -> str:
    """Returns whether the first of two methods is `better` or `worse` by a difference of bits;
    `same` if it may be 0.
    """
    if difference.high < 0:
        return "better"
    return "worse" if difference.low > 0 else "same"
