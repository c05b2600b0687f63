"""Diversity of texts and bootstrap confidence intervals, also at equal diversity.

An n-gram is n tokens in a row: characters where the vocabulary is one of characters. All measures of a single text depend on
its length: compare texts of equal length.
"""

import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from operator import or_
from typing import NamedTuple

import numpy as np

from dantinox.config import UserError

RESAMPLINGS = 2000
CONFIDENCE = 0.95
LARGE_MODEL = 10e6  # parameters above which studies do less by default
BLEU_SMOOTHING = 0.1  # what counts as matched where nothing of an order did

Tokens = Sequence[int]
MeasuresByPrompt = Mapping[str, np.ndarray]  # measure → one number per prompt `[P]`, each the mean over the prompt's samples


def select_names(names: Sequence[str] | None, known: Iterable[str], what: str) -> list[str]:
    """Those of the known names that were given (None: all), in their usual order; an error names one that is unknown."""
    known = list(known)
    for name in names or ():
        if name not in known:
            near = difflib.get_close_matches(name.lower().replace("-", "_"), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(known)}"
            raise UserError(f"no {what} is called {name}: {hint}")
    return [name for name in known if names is None or name in names]


def default_count(count: int, least: int, parameters: int) -> int:
    """Returns the default number of samples of a study.

    This is `count` for models of up to `LARGE_MODEL` parameters. For larger models it falls in inverse proportion to the
    parameters, down to `least`. A study of a model with 100 M parameters then takes minutes on a CPU, at the price of wider
    intervals.
    """
    return max(min(count, least), round(count * min(1.0, LARGE_MODEL / max(parameters, 1))))


def ngrams(tokens: Tokens, n: int) -> list[tuple[int, ...]]:
    """Every run of n tokens, in order; none in a shorter text."""
    return list(zip(*(tokens[i:] for i in range(n)), strict=False))


def distinct(tokens: Tokens, n: int) -> float:
    """Distinct n-grams over all n-grams of one text; 1 where it has none (Li et al. 2016, over one sample)."""
    grams = ngrams(tokens, n)
    return len(set(grams)) / len(grams) if grams else 1.0


def repetition(tokens: Tokens, n: int) -> float:
    """The share of n-grams that occurred before in the same text: 1 − distinct-n (seq-rep-n of Welleck et al. 2020)."""
    return 1.0 - distinct(tokens, n)


def diversity(tokens: Tokens) -> float:
    """distinct-2 · distinct-3 · distinct-4 of one text, in (0, 1] (Su et al. 2022)."""
    return math.prod(distinct(tokens, n) for n in (2, 3, 4))


TEXT_MEASURES: dict[str, Callable[[Tokens], float]] = {
    "diversity": diversity,
    **{f"distinct_{n}": partial(distinct, n=n) for n in (1, 2, 3)},
    "rep_4": partial(repetition, n=4),
}


def self_bleu(samples: Sequence[Tokens]) -> float:
    """The mean BLEU-4 of several samples, each with all others as its references; 1 where all are the same (Zhu et al. 2018).

    Clipped matches over all references, equal weights, the brevity penalty of the reference nearest in length; an order
    without a match counts 0.1 of one (method 1 of Chen and Cherry 2014), and without a common token BLEU is 0.
    """
    return sum(_bleu(own, [*samples[:i], *samples[i + 1 :]]) for i, own in enumerate(samples)) / len(samples)


def _bleu(own: Tokens, others: Sequence[Tokens]) -> float:
    logs = []
    for n in (1, 2, 3, 4):
        grams, largest = Counter(ngrams(own, n)), reduce(or_, (Counter(ngrams(other, n)) for other in others))
        matched = (grams & largest).total()
        if n == 1 and matched == 0:
            return 0.0
        logs.append(math.log((matched or BLEU_SMOOTHING) / max(1, grams.total())))
    nearest = min(map(len, others), key=lambda length: (abs(length - len(own)), length))
    return math.exp(sum(logs) / len(logs) + min(0.0, 1 - nearest / len(own)))


class Interval(NamedTuple):
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


def bootstrap_indices(prompts: int) -> Iterator[np.ndarray]:
    """All prompts once, then 2,000 times as many drawn with replacement: the same draws on every call, so that two methods
    are resampled alike."""
    yield np.arange(prompts)
    random = np.random.default_rng(0)
    for _ in range(RESAMPLINGS):
        yield random.integers(prompts, size=prompts)


def percentile_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """The interval of a statistic of every resample, that of the sample itself first (Efron 1979, percentile method)."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.asarray(values[1:], np.float64), [tail, 1 - tail])
    return Interval(float(values[0]), float(low), float(high))


def mean_interval(values_P: np.ndarray) -> Interval:
    """The mean over prompts; the differences of two methods give a paired interval."""
    values_P = np.asarray(values_P, np.float64)
    return percentile_interval([values_P[picked].mean() for picked in bootstrap_indices(len(values_P))])


def excess(method: MeasuresByPrompt, ruler: Sequence[MeasuresByPrompt]) -> np.ndarray | None:
    """`bits_per_byte` above the ruler's at the method's `diversity`, for every resample `[1 + R]`.

    The ruler is one way of sampling at several settings. Between them its mean bits are interpolated by its mean diversity;
    None where the method is more or less diverse than all of them.
    """
    reached = [point["diversity"].mean() for point in ruler]
    if not min(reached) <= method["diversity"].mean() <= max(reached):
        return None

    def place(one: MeasuresByPrompt, picked: np.ndarray) -> list[float]:
        return [one[name][picked].mean() for name in ("diversity", "bits_per_byte")]

    found = []
    for picked in bootstrap_indices(len(method["diversity"])):
        (at, bits), points = place(method, picked), np.transpose(sorted(place(point, picked) for point in ruler))
        found.append(bits - np.interp(at, *points))
    return np.array(found)


def verdict(difference: Interval) -> str:
    """What a difference of bits per byte says of the first of two methods: `better`, `worse`, or `same` where it may be 0."""
    return "better" if difference.high < 0 else "worse" if difference.low > 0 else "same"
