"""`dantinox eval sampling`: compares sampling methods on a model, each tuned with the same number of trials.

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
from dantinox.generation import LoadedModel, load
from dantinox.measure.texts import open_text_store
from dantinox.run import open_run
from dantinox.studies.continuations import (
    Continuations,
    PromptWindows,
    ReferenceModel,
    draw_windows,
    generate_continuations,
    prompt_tokens,
)
from dantinox.studies.statistics import (
    TEXT_MEASURES,
    Interval,
    MeasuresByPrompt,
    default_count,
    excess,
    mean_interval,
    percentile_interval,
    select_names,
    self_bleu,
)


class TunedSetting(NamedTuple):
    """A number that is tuned, from its least to its most diverse value.

    Positions between them, 0 to 1, are equal ratios of the value, or of what it lacks to 1 where `log_complement` is set.
    """

    name: str
    least: float
    most: float
    log_complement: bool = False
    integer: bool = False

    def value_at(self, position: float) -> float:
        """The value at a position, to three digits or as a whole number."""
        least, most = (1 - x if self.log_complement else x for x in (self.least, self.most))
        value = least * (most / least) ** position
        return round(value) if self.integer else float(f"{1 - value if self.log_complement else value:.3g}")


class SamplingMethod(NamedTuple):
    """A way to choose tokens: the settings that make it, and its scale, a knob or several in a row; greedy has none."""

    settings: Mapping[str, Any]
    scale: tuple[TunedSetting, ...]

    def values_at(self, position: float) -> dict[str, float]:
        """The values of its knobs at a position of the scale, of which each knob has an equal part.

        Those passed have their most diverse value; those not yet reached are left out, as their least is the default.
        """
        parts = [position * len(self.scale) - i for i in range(len(self.scale))]
        return {knob.name: knob.value_at(min(part, 1.0)) for knob, part in zip(self.scale, parts, strict=True) if part >= 0}


# For the router: fewer candidates than the guide's 12 at its base temperature, and behind the last one a higher temperature.
# Temperature alone may not reach real text: the best of 12 draws leans to the likely however flat they are drawn from.
FEWER_CANDIDATES = (TunedSetting("candidates", 12, 1, integer=True), TunedSetting("base_temperature", 0.666, 4.0))
CALIBRATED = {"strategy": "entropy", "router_preset": "calibrated"}
# Truncations run at temperature 1, the router on its presets.
METHODS = {
    "greedy": SamplingMethod({"greedy": True}, ()),
    "temperature": SamplingMethod({}, (TunedSetting("temperature", 0.4, 1.6),)),
    "top_p": SamplingMethod({}, (TunedSetting("top_p", 0.5, 0.995, log_complement=True),)),
    "min_p": SamplingMethod({}, (TunedSetting("min_p", 0.5, 0.002),)),
    "typical": SamplingMethod({}, (TunedSetting("typical", 0.5, 0.995, log_complement=True),)),
    "top_n_sigma": SamplingMethod({}, (TunedSetting("top_n_sigma", 0.2, 4.0),)),
    "router_guide": SamplingMethod({"strategy": "entropy", "router_preset": "guide"}, FEWER_CANDIDATES),
    "router_calibrated": SamplingMethod(CALIBRATED, FEWER_CANDIDATES),
    "router_no_attention": SamplingMethod({**CALIBRATED, "use_attention": False}, FEWER_CANDIDATES),
    "router_random": SamplingMethod(CALIBRATED, FEWER_CANDIDATES),
}
CONTROL, CONTROLLED = "router_random", "router_calibrated"  # the control draws strategies as often as its pattern takes them
COMPARISONS = [
    (router, other) for router in ("router_guide", CONTROLLED, "router_no_attention") for other in ("min_p", CONTROL)
]
TEMPERATURE_CURVE = {
    f"temperature {t:g}": t for t in (0.3, 0.5, 0.65, 0.8, 0.95, 1.1, 1.3)
}  # close enough for straight lines between them


@dataclass(frozen=True)
class StudySize:
    """How much is done: prompts to test on (and as many to tune on), continuations of each, their tokens, settings tried."""

    prompts: int = 96
    seeds: int = 5
    tokens: int = 192
    trials: int = 5

    def __post_init__(self) -> None:
        for name, least, most in (("prompts", 2, 1 << 20), ("seeds", 2, 1000), ("tokens", 8, 1 << 20), ("trials", 1, 50)):
            if not least <= getattr(self, name) <= most:
                raise UserError(f"--{name} must be in [{least}, {most}], got {getattr(self, name)}")


QUICK_SIZE = StudySize(prompts=40, seeds=3, tokens=128, trials=3)
MIN_PROMPTS = 16  # of a large model: see `default_count`


def select_methods(names: Sequence[str] | None) -> list[str]:
    """The methods of these names, in their usual order; None: all.

    Raises:
      UserError: an unknown name, or the control without its pattern.
    """
    found = select_names(names, METHODS, "sampling method")
    if CONTROL in found and CONTROLLED not in found:
        raise UserError(f"{CONTROL} draws strategies as often as {CONTROLLED} takes them: name both in --methods")
    return found


MEASURES = ("bits_per_byte", *TEXT_MEASURES, "self_bleu")


@dataclass(frozen=True)
class Trial:
    """What was tried: the values of a method's knobs, and the mean diversity of the texts."""

    values: Mapping[str, float]
    diversity: float


@dataclass(frozen=True)
class MethodResult:
    """What was found of a method, or of the real text (`human`).

    Attributes:
      tuned: the values of its knobs.
      at_edge: all trials lay on one side of the diversity aimed at.
      measures: `excess`, where the ruler reaches its diversity, and `MEASURES`.
      tok_per_s: median, lowest and highest of the batches; None where speed says nothing.
    """

    name: str
    tuned: Mapping[str, float]
    at_edge: bool
    trials: Sequence[Trial]
    measures: Mapping[str, Interval]
    tok_per_s: Interval | None


@dataclass(frozen=True)
class TemperaturePoint:
    """Means of plain sampling at a temperature."""

    temperature: float
    diversity: float
    bits_per_byte: float


@dataclass(frozen=True)
class Difference:
    """Paired differences a − b of the measures; of `excess` where both have one, by which a is the better one or not."""

    a: str
    b: str
    differences: Mapping[str, Interval]


@dataclass(frozen=True)
class SamplingStudy:
    """What was done, and what was found: methods, the real text first, the ruler, the router against others.

    Attributes:
      reference: the run that judged, None: the run itself.
      unit: what a token is, for messages.
      shares: of the strategies that the control drew; None without it.
    """

    run: str
    reference: str | None
    device: str
    unit: str
    prompt_tokens: int
    prompts: int
    seeds: int
    tokens: int
    trials: int
    shares: Mapping[str, float] | None
    methods: Sequence[MethodResult]
    ruler: Sequence[TemperaturePoint]
    comparisons: Sequence[Difference]


def evaluate_sampling(
    run_dir: str | Path,
    reference: str | Path | None = None,
    *,
    quick: bool = False,
    methods: Sequence[str] | None = None,
    data_path: str | Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
    **effort: int | None,
) -> SamplingStudy:
    """Tunes the methods, writes with each of them, measures, compares.

    Args:
      reference: the run that judges quality; None: the run itself, which favours its own likeliest texts.
      quick: start from `QUICK_SIZE` instead of `StudySize()`.
      methods: names of `METHODS`; None: all.
      data_path: the text that prompts are taken from, as `data.path` names one; None: the validation tokens that training left
        in the run.
      progress: called with a line before every stretch of work.
      effort: fields of `StudySize`. Where `tokens` is not given, prompts keep at least a quarter of a small context. Where
        `prompts` is not given, a model of more than 10 M parameters gets fewer.

    Raises:
      UserError: a name or number is wrong, there are too few prompts, the reference cannot judge, or the router was not
        calibrated.
    """
    names = select_methods(methods)
    size = replace(QUICK_SIZE if quick else StudySize(), **{name: value for name, value in effort.items() if value is not None})
    directory = open_run(run_dir)
    calibrated = [name for name in names if METHODS[name].settings.get("router_preset") == "calibrated"]
    if calibrated and not directory.router.is_file():
        raise UserError(
            f"{', '.join(calibrated)} cannot run without {directory.router}: run `dantinox calibrate --run_dir "
            f"{directory.path} --what router`, or name other methods in --methods"
        )
    store = open_text_store(directory, data_path)
    run = load(run_dir)
    for name in names:  # a setting that the engine refuses is reported before the work begins
        run.params([run.settings({**METHODS[name].settings, **METHODS[name].values_at(0.5), "seed": 0})])
    context = run.model.config.max_context
    if effort.get("tokens") is None:
        size = replace(size, tokens=max(8, min(size.tokens, 3 * context // 4)))
    if effort.get("prompts") is None:
        size = replace(size, prompts=default_count(size.prompts, MIN_PROMPTS, run.parameters))
    prompt = prompt_tokens(context, size.tokens)
    tuning, test = draw_windows(run.tokenizer, store, size.prompts, prompt, size.tokens)
    bench = SamplingBenchmark(run, ReferenceModel(reference or run_dir), size, progress)
    measured = {"human": bench.measure(test, [(test.texts, test.ids)])}
    tuned = _tune_all(bench, names, tuning)
    written = _test_all(bench, tuned, test)
    for name, rounds in written.items():
        progress(f"measuring {name}")
        measured[name] = bench.measure(test, [(one.texts, one.ids) for one in rounds])
    ruler = [measured[name] for name in TEMPERATURE_CURVE]
    above = {name: excess(measured[name], ruler) for name in ("human", *names)}
    return SamplingStudy(
        run=str(directory.path),
        reference=None if reference is None else str(open_run(reference).path),
        device=jax.devices()[0].device_kind,
        unit={"char": "characters", "byte": "bytes"}.get(run.tokenizer.kind, "tokens"),
        prompt_tokens=prompt,
        **vars(size),
        shares=tuned[CONTROL].shares if CONTROL in tuned else None,
        methods=[
            _method_result(name, tuned.get(name, TunedMethod({})), measured[name], above[name], written.get(name, []))
            for name in above
        ],
        ruler=[
            TemperaturePoint(t, float(one["diversity"].mean()), float(one["bits_per_byte"].mean()))
            for t, one in zip(TEMPERATURE_CURVE.values(), ruler, strict=True)
        ],
        comparisons=[_difference(a, b, above, measured) for a, b in COMPARISONS if {a, b} <= set(names)],
    )


class TunedMethod(NamedTuple):
    """A method as it is tested: what makes it and the values of its knobs, its trials, and shares of strategies to be drawn."""

    settings: Mapping[str, Any]
    values: Mapping[str, float] = {}
    trials: tuple[Trial, ...] = ()
    at_edge: bool = False
    shares: Mapping[str, float] | None = None


@dataclass(frozen=True)
class SamplingBenchmark:
    """What writes and what judges."""

    run: LoadedModel
    judge: ReferenceModel
    effort: StudySize
    progress: Callable[[str], None]

    def continue_prompts(self, windows: PromptWindows, method: TunedMethod, seed: int, report: bool = False) -> Continuations:
        """One continuation of every prompt."""
        settings = {**method.settings, **method.values}
        return generate_continuations(
            self.run, windows.prompts, settings, self.effort.tokens, seed, shares=method.shares, report=report
        )

    def measure(self, windows: PromptWindows, samples: Sequence[tuple[Sequence[str], np.ndarray]]) -> MeasuresByPrompt:
        """Every measure per prompt, the mean over its samples (texts, tokens `[P, T]`). Self-BLEU takes several."""
        ids_SP = [ids_PT.tolist() for _, ids_PT in samples]
        texts_S = [tuple(texts) for texts, _ in samples]
        judged = {texts: self.judge.bits_per_byte(windows.prompts, texts) for texts in set(texts_S)}  # equal ones once
        found: dict[str, Any] = {"bits_per_byte": [judged[texts] for texts in texts_S]}
        found |= {name: [[measure(ids) for ids in ids_P] for ids_P in ids_SP] for name, measure in TEXT_MEASURES.items()}
        means = {name: np.mean(values, axis=0) for name, values in found.items()}
        if len(samples) > 1:
            means["self_bleu"] = np.array([self_bleu(of_prompt) for of_prompt in zip(*ids_SP, strict=True)])
        return means


def bisection(diversity_at: Callable[[float], float], target: float, trials: int) -> tuple[float, bool]:
    """The position in [0, 1] tried whose diversity, which should grow with it, is nearest to the target, the first of equal
    ones, and whether all trials lay on one side of the target."""
    low, high = 0.0, 1.0
    tried: list[tuple[float, float]] = []
    for _ in range(trials):
        position = (low + high) / 2
        tried.append((position, diversity_at(position)))
        low, high = (position, high) if tried[-1][1] < target else (low, position)
    best = min(tried, key=lambda pair: abs(pair[1] - target))[0]
    return best, low == 0.0 or high == 1.0


def _tune_all(bench: SamplingBenchmark, names: Sequence[str], tuning: PromptWindows) -> dict[str, TunedMethod]:
    tuned: dict[str, TunedMethod] = {}
    shares = None
    for name in names:
        tuned[name] = _tune(bench, name, tuning, shares if name == CONTROL else None)
        if name == CONTROLLED and CONTROL in names:
            bench.progress(f"counting the strategies of {name}")
            shares = bench.continue_prompts(tuning, tuned[name], 0, report=True).shares
    return tuned


def _tune(bench: SamplingBenchmark, name: str, tuning: PromptWindows, shares: Mapping[str, float] | None) -> TunedMethod:
    method, trials = METHODS[name], list[Trial]()
    if not method.scale:
        bench.progress(f"trying {name}")
        bench.continue_prompts(tuning, TunedMethod(method.settings), 0)  # compiled here, so that no round waits for it
        return TunedMethod(method.settings)

    def diversity_at(position: float) -> float:
        values = method.values_at(position)
        for trial in trials:  # whole numbers come again
            if trial.values == values:
                return trial.diversity
        bench.progress(f"tuning {name}, trial {len(trials) + 1} of {bench.effort.trials}: {format_values(values)}")
        written = bench.continue_prompts(tuning, TunedMethod(method.settings, values, shares=shares), 0)
        trials.append(Trial(values, _mean_diversity(written.ids)))
        return trials[-1].diversity

    position, at_edge = bisection(diversity_at, _mean_diversity(tuning.ids), bench.effort.trials)
    return TunedMethod(method.settings, method.values_at(position), tuple(trials), at_edge, shares)


def _mean_diversity(ids_PT: np.ndarray) -> float:
    return float(np.mean([TEXT_MEASURES["diversity"](ids) for ids in ids_PT.tolist()]))


def format_values(values: Mapping[str, float]) -> str:
    """`candidates 1, base_temperature 0.92`."""
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def _test_all(
    bench: SamplingBenchmark, tuned: Mapping[str, TunedMethod], test: PromptWindows
) -> dict[str, list[Continuations]]:
    """One continuation of every prompt by every method in a round, the ruler's among them.

    Each round goes through them in another order: what slows the machine down for a while meets all alike.
    """
    every = {**tuned, **{name: TunedMethod({"temperature": t}) for name, t in TEMPERATURE_CURVE.items()}}
    names, written = list(every), {name: list[Continuations]() for name in every}
    for seed in range(1, bench.effort.seeds + 1):
        for name in names[seed % len(names) :] + names[: seed % len(names)]:
            if written[name] and every[name].settings.get("greedy"):
                written[name].append(written[name][0])  # the seed changes nothing
                continue
            bench.progress(f"round {seed} of {bench.effort.seeds}: {name}")
            written[name].append(bench.continue_prompts(test, every[name], seed))
    return written


def _method_result(
    name: str, method: TunedMethod, measured: MeasuresByPrompt, above: np.ndarray | None, written: Sequence[Continuations]
) -> MethodResult:
    measures = {} if above is None else {"excess": percentile_interval(above)}
    measures |= {key: mean_interval(measured[key]) for key in MEASURES if key in measured}
    # The control is driven from outside, token by token: its speed says nothing.
    speeds = [] if name == CONTROL else [rate for one in written for rate in one.rates]
    speed = Interval(float(np.median(speeds)), min(speeds), max(speeds)) if speeds else None
    return MethodResult(name, dict(method.values), method.at_edge, list(method.trials), measures, speed)


def _difference(a: str, b: str, above: Mapping[str, np.ndarray | None], measured: Mapping[str, MeasuresByPrompt]) -> Difference:
    first, second = above[a], above[b]
    excesses = {} if first is None or second is None else {"excess": percentile_interval(first - second)}
    return Difference(a, b, excesses | {key: mean_interval(measured[a][key] - measured[b][key]) for key in MEASURES})
