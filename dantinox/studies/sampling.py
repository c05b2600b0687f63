"""Which way of choosing tokens serves a model best: `dantinox eval sampling`.

All methods continue the same prompts. Each has one scale to tune and the same count of trials for it, on prompts of their own.
Two rules, fixed before any text is written:

* **Tuning:** of the settings tried, take the one whose texts are nearest to the real continuations in mean `diversity`. That
  means the same for every method, it asks for what real text has, and it does not read the reference model, which would
  otherwise be tuned for and then judge. Tuning for likelihood ends in repetition: greedy text is likelier than real text.
* **Verdict:** at equal diversity the likelier text is the better one. No tuning meets a diversity exactly, and any method gains
  likelihood by giving up diversity. So the table has `excess`: bits per byte above plain temperature sampling at the very same
  diversity, read off a curve that temperature draws on the same prompts. Differences of methods are differences of excess.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dantinox.config import UserError
from dantinox.generation import Run, load
from dantinox.run import open_run
from dantinox.studies.continuations import Judge, Windows, Written, draw_windows, prompt_tokens, write
from dantinox.studies.diversity import distinct, diversity, repetition, self_bleu
from dantinox.studies.intervals import Interval, Outcome, excess, mean_interval, percentiles, verdict
from dantinox.studies.sampling_methods import (
    BASELINES,
    CONTROL,
    FULL,
    METHODS,
    PATTERN,
    QUICK,
    ROUTERS,
    RULER,
    Effort,
    chosen_methods,
)
from dantinox.text import open_store

MEASURES = ("bits_per_byte", "diversity", "distinct_1", "distinct_2", "distinct_3", "rep_4", "self_bleu")
Measured = dict[str, np.ndarray]  # measure → one number per prompt, [P]


def evaluate_sampling(
    run_dir: str | Path,
    reference: str | Path | None = None,
    *,
    quick: bool = False,
    methods: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda _: None,
    **effort: int | None,
) -> dict[str, Any]:
    """Tunes the methods, writes with each of them, measures, compares.

    Args:
      reference: the run that judges quality; None: the run itself, which favours its own likeliest texts.
      quick: start from `QUICK` instead of `FULL`.
      methods: names of `METHODS`; None: all.
      progress: called with a line before every stretch of work.
      effort: fields of `Effort`. Where `tokens` is not given, prompts keep at least a quarter of a small context.

    Returns:
      A JSON-ready record, which `sampling_view` shows: what was done; `methods`, the real text first, with their tuning,
      measures as [value, low, high] and speeds as [median, lowest, highest]; `ruler`; `comparisons` of the router with others.

    Raises:
      UserError: a name or number is wrong, there are too few prompts, the reference cannot judge, or the router was not
        calibrated.
    """
    names = chosen_methods(methods)
    much = replace(QUICK if quick else FULL, **{name: value for name, value in effort.items() if value is not None})
    directory = open_run(run_dir)
    calibrated = [name for name in names if METHODS[name].settings.get("router_preset") == "calibrated"]
    if calibrated and not directory.router.is_file():
        raise UserError(
            f"{', '.join(calibrated)} cannot run without {directory.router}: run `dantinox calibrate --run_dir "
            f"{directory.path} --what router`, or name other methods in --methods"
        )
    run = load(run_dir)
    store = open_store(run.config, directory.data, run.tokenizer)
    if store is None:
        raise UserError(f"{directory.data} holds no validation text of this run, from which the prompts are taken")
    for name in names:  # a setting that the engine refuses is told before the work begins
        run.params([run.settings({**METHODS[name].settings, **METHODS[name].tuned(0.5), "seed": 0})])
    context = run.model.config.max_context
    if effort.get("tokens") is None:
        much = replace(much, tokens=max(8, min(much.tokens, 3 * context // 4)))
    prompt = prompt_tokens(context, much.tokens)
    tuning, test = draw_windows(run.tokenizer, store, much.prompts, prompt, much.tokens)
    bench = Bench(run, Judge(reference or run_dir), much, progress)
    measured = {"human": bench.measure(test, [(test.texts, test.ids)])}
    tuned = _tune_all(bench, names, tuning)
    written = _test_all(bench, tuned, test)
    for name, rounds in written.items():
        progress(f"measuring {name}")
        measured[name] = bench.measure(test, [(one.texts, one.ids) for one in rounds])
    rates = {name: [rate for one in rounds for rate in one.rates] for name, rounds in written.items()}
    return {
        "run": str(directory.path),
        "reference": None if reference is None else str(open_run(reference).path),
        "device": jax.devices()[0].device_kind,
        "unit": {"char": "characters", "byte": "bytes"}.get(run.tokenizer.kind, "tokens"),
        "prompt_tokens": prompt,
        **vars(much),
        "shares": tuned[CONTROL].shares if CONTROL in tuned else None,
        **_told(names, tuned, measured, rates),
    }


class Trial(NamedTuple):
    """What was tried: the values of a method's knobs, and the mean diversity of the texts."""

    values: dict[str, float]
    diversity: float


class Tuned(NamedTuple):
    """A method as it is tested.

    Attributes:
      settings: what makes it, and `values`, those of its knobs.
      trials: in order.
      at_edge: all of them lay on one side of the diversity aimed at.
      shares: of the strategies to be drawn at random, None but for the control.
    """

    settings: Mapping[str, Any]
    values: Mapping[str, float] = {}
    trials: tuple[Trial, ...] = ()
    at_edge: bool = False
    shares: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Bench:
    """What writes and what judges."""

    run: Run
    judge: Judge
    effort: Effort
    progress: Callable[[str], None]

    def write(self, windows: Windows, method: Tuned, seed: int, report: bool = False) -> Written:
        """One continuation of every prompt."""
        settings = {**method.settings, **method.values}
        return write(self.run, windows.prompts, settings, self.effort.tokens, seed, shares=method.shares, report=report)

    def measure(self, windows: Windows, samples: Sequence[tuple[Sequence[str], np.ndarray]]) -> Measured:
        """Every measure per prompt, the mean over its samples (texts, tokens `[P, T]`). Self-BLEU takes several."""
        ids_SP = [ids_PT.tolist() for _, ids_PT in samples]
        found: dict[str, Any] = {
            "bits_per_byte": [self.judge.bits_per_byte(windows.prompts, texts) for texts, _ in samples],
            "diversity": [[diversity(ids) for ids in ids_P] for ids_P in ids_SP],
            **{f"distinct_{n}": [[distinct(ids, n) for ids in ids_P] for ids_P in ids_SP] for n in (1, 2, 3)},
            "rep_4": [[repetition(ids, 4) for ids in ids_P] for ids_P in ids_SP],
        }
        told = {name: np.mean(values, axis=0) for name, values in found.items()}
        if len(samples) > 1:
            told["self_bleu"] = np.array([self_bleu(of_prompt) for of_prompt in zip(*ids_SP, strict=True)])
        return told


def halve(diversity_at: Callable[[float], float], target: float, trials: int) -> tuple[float, bool]:
    """The position in [0, 1] whose diversity is nearest to the target; diversity should grow with position.

    Returns:
      The nearest position tried, the first of equal ones, and whether all trials lay on one side of the target.
    """
    low, high = 0.0, 1.0
    tried: list[tuple[float, float]] = []
    for _ in range(trials):
        position = (low + high) / 2
        tried.append((position, diversity_at(position)))
        low, high = (position, high) if tried[-1][1] < target else (low, position)
    best = min(tried, key=lambda pair: abs(pair[1] - target))[0]
    return best, low == 0.0 or high == 1.0


def _tune_all(bench: Bench, names: Sequence[str], tuning: Windows) -> dict[str, Tuned]:
    tuned: dict[str, Tuned] = {}
    shares = None
    for name in names:
        tuned[name] = _tune(bench, name, tuning, shares if name == CONTROL else None)
        if name == PATTERN and CONTROL in names:
            bench.progress(f"counting the strategies of {name}")
            shares = bench.write(tuning, tuned[name], 0, report=True).shares
    return tuned


def _tune(bench: Bench, name: str, tuning: Windows, shares: Mapping[str, float] | None) -> Tuned:
    method, trials = METHODS[name], list[Trial]()
    if not method.scale:
        bench.progress(f"trying {name}")
        bench.write(tuning, Tuned(method.settings), 0)  # compiled here, so that no round waits for it
        return Tuned(method.settings)

    def diversity_at(position: float) -> float:
        values = method.tuned(position)
        for trial in trials:  # whole numbers come again
            if trial.values == values:
                return trial.diversity
        bench.progress(f"tuning {name}, trial {len(trials) + 1} of {bench.effort.trials}: {spelt(values)}")
        written = bench.write(tuning, Tuned(method.settings, values, shares=shares), 0)
        trials.append(Trial(values, _mean_diversity(written.ids)))
        return trials[-1].diversity

    position, at_edge = halve(diversity_at, _mean_diversity(tuning.ids), bench.effort.trials)
    return Tuned(method.settings, method.tuned(position), tuple(trials), at_edge, shares)


def _mean_diversity(ids_PT: np.ndarray) -> float:
    return float(np.mean([diversity(ids) for ids in ids_PT.tolist()]))


def spelt(values: Mapping[str, float]) -> str:
    """`candidates 1, base_temperature 0.92`."""
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def _ruler_name(temperature: float) -> str:
    return f"temperature {temperature:g}"


def _test_all(bench: Bench, tuned: Mapping[str, Tuned], test: Windows) -> dict[str, list[Written]]:
    """One continuation of every prompt by every method in a round, the ruler's among them.

    Each round goes through them in another order: what slows the machine down for a while meets all alike.
    """
    every = {**tuned, **{_ruler_name(t): Tuned({"temperature": t}) for t in RULER}}
    names, written = list(every), {name: list[Written]() for name in every}
    for seed in range(1, bench.effort.seeds + 1):
        for name in names[seed % len(names) :] + names[: seed % len(names)]:
            bench.progress(f"round {seed} of {bench.effort.seeds}: {name}")
            written[name].append(bench.write(test, every[name], seed))
    return written


def _told(
    names: Sequence[str], tuned: Mapping[str, Tuned], measured: Mapping[str, Measured], rates: Mapping[str, list[float]]
) -> dict[str, Any]:
    """The record's lists: methods, ruler, comparisons."""
    outcomes = {name: Outcome(found["diversity"], found["bits_per_byte"]) for name, found in measured.items()}
    ruler = [outcomes[_ruler_name(t)] for t in RULER]
    above = {name: excess(outcomes[name], ruler) for name in ("human", *names)}
    methods = []
    for name in above:
        method = tuned.get(name, Tuned({}))
        extra = above[name]
        measures: dict[str, Interval] = {} if extra is None else {"excess": percentiles(extra)}
        measures |= {key: mean_interval(measured[name][key]) for key in MEASURES if key in measured[name]}
        # The control is driven from outside, token by token: its speed says nothing.
        speeds = [] if name == CONTROL else rates.get(name, [])
        methods.append({
            "name": name,
            "tuned": dict(method.values),
            "at_edge": method.at_edge,
            "trials": [trial._asdict() for trial in method.trials],
            "measures": {key: list(numbers) for key, numbers in measures.items()},
            "tok_per_s": [float(np.median(speeds)), min(speeds), max(speeds)] if speeds else None,
        })  # fmt: skip
    return {
        "methods": methods,
        "ruler": [
            {"temperature": t, "diversity": float(one.diversity.mean()), "bits_per_byte": float(one.bits.mean())}
            for t, one in zip(RULER, ruler, strict=True)
        ],
        "comparisons": [_compared(a, b, above, measured) for a in ROUTERS for b in BASELINES if a in names and b in names],
    }


def _compared(a: str, b: str, above: Mapping[str, np.ndarray | None], measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Differences a − b with paired intervals; the verdict is None where one has no excess."""
    differences = {key: mean_interval(measured[a][key] - measured[b][key]) for key in MEASURES}
    first, second = above[a], above[b]
    if first is not None and second is not None:
        differences = {"excess": percentiles(first - second), **differences}
    return {
        "a": a,
        "b": b,
        "verdict": verdict(differences["excess"]) if "excess" in differences else None,
        "differences": {key: list(numbers) for key, numbers in differences.items()},
    }
