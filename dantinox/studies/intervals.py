"""How sure a number is that was measured on some prompts: bootstrap intervals, for means and at equal diversity."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLINGS = 2000
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


class Outcome(NamedTuple):
    """What a method is judged by, one number per prompt `[P]`, each the mean over the prompt's samples."""

    diversity: np.ndarray
    bits: np.ndarray


def resamples(prompts: int) -> Iterator[np.ndarray]:
    """All prompts once, then 2,000 times as many drawn with replacement: the same draws on every call, so that two methods
    are resampled alike."""
    yield np.arange(prompts)
    random = np.random.default_rng(0)
    for _ in range(RESAMPLINGS):
        yield random.integers(prompts, size=prompts)


def percentiles(values: Sequence[float] | np.ndarray) -> Interval:
    """The interval of a statistic of every resample, that of the sample itself first (Efron 1979, percentile method)."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.asarray(values[1:], np.float64), [tail, 1 - tail])
    return Interval(float(values[0]), float(low), float(high))


def mean_interval(values_P: np.ndarray) -> Interval:
    """The mean over prompts; the differences of two methods give a paired interval."""
    values_P = np.asarray(values_P, np.float64)
    return percentiles([values_P[picked].mean() for picked in resamples(len(values_P))])


def excess(method: Outcome, ruler: Sequence[Outcome]) -> np.ndarray | None:
    """Bits per byte above the ruler's at the method's diversity, for every resample `[1 + R]`.

    The ruler is one way of sampling at several settings. Between them its mean bits are interpolated by its mean diversity.

    Returns:
      None where the method is more or less diverse than every setting of the ruler.
    """
    reached = [outcome.diversity.mean() for outcome in ruler]
    if not min(reached) <= method.diversity.mean() <= max(reached):
        return None
    found = []
    for picked in resamples(len(method.bits)):
        points = sorted((outcome.diversity[picked].mean(), outcome.bits[picked].mean()) for outcome in ruler)
        at, bits = zip(*points, strict=True)
        found.append(method.bits[picked].mean() - np.interp(method.diversity[picked].mean(), at, bits))
    return np.array(found)


def verdict(difference: Interval) -> str:
    """What a difference of bits per byte says of the first of two methods: `better`, `worse`, or `same` where it may be 0."""
    return "better" if difference.high < 0 else "worse" if difference.low > 0 else "same"
