"""`dantinox eval sampling`: compares sampling methods on a model, each tuned with the same number
of trials.

All methods continue the same prompts. Each method has one scale to tune and the same number of
trials, on separate tuning prompts. Two rules were fixed before any generation:

* **Tuning:** each method uses the trial whose mean `diversity` is nearest to that of the real
  continuations. This criterion has the same meaning for every method and can be measured on real
  text. It does not use the reference model, which must not both tune and judge the methods. Tuning
  for likelihood would lead to repetition: greedy text is more likely than real text.
* **Verdict:** at equal diversity, the more likely text is better. But tuning never reaches the
  target diversity exactly, and any method gains likelihood by giving up diversity. So the table
  contains `excess`: bits per byte above plain temperature sampling at the same diversity,
  interpolated on the curve of temperature sampling on the same prompts. Methods are compared by
  excess.
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
from dantinox.lab.studies.continuations import (
    Continuations,
    PromptWindows,
    ReferenceModel,
    draw_windows,
    generate_continuations,
    prompt_tokens,
)
from dantinox.lab.studies.statistics import (
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
from dantinox.run import RunDirectory, open_run


class TunedSetting(NamedTuple):
    """A setting to tune, from `least`, the value for the least diverse text, to `most`, the value
    for the most diverse text.

    Positions from 0 to 1 are on a logarithmic scale of the value, or of 1 − value if
    `log_complement` is set.
    """

    name: str
    least: float
    most: float
    log_complement: bool = False
    integer: bool = False

    def value_at(self, position: float) -> float:
        """Returns the value at a position, rounded to three digits or to an integer."""
        least, most = (1 - x if self.log_complement else x for x in (self.least, self.most))
        value = least * (most / least) ** position
        return (
            round(value)
            if self.integer
            else float(f"{1 - value if self.log_complement else value:.3g}")
        )


class SamplingMethod(NamedTuple):
    """A sampling method: its fixed settings, and the settings that its scale tunes one after
    another (none for greedy).
    """

    settings: Mapping[str, Any]
    scale: tuple[TunedSetting, ...]

    def values_at(self, position: float) -> dict[str, float]:
        """Returns the values of the tuned settings at a position in [0, 1] of the scale.

        Each setting has an equal part of the scale. At positions before its part, the setting is
        omitted, because `least` is its default. At positions after its part, it has the value
        `most`.
        """
        parts = [position * len(self.scale) - i for i in range(len(self.scale))]
        return {
            setting.name: setting.value_at(min(part, 1.0))
            for setting, part in zip(self.scale, parts, strict=True)
            if part >= 0
        }


# The scale of the router first lowers the number of candidates from 12, the value of the preset
# `guide`, while the base temperature stays at its default. Then it raises the base temperature with
# a single candidate. Temperature alone may not reach the diversity of real text: the best of 12
# candidates favors likely text at any temperature.
FEWER_CANDIDATES = (
    TunedSetting("candidates", 12, 1, integer=True),
    TunedSetting("base_temperature", 0.666, 4.0),
)
CALIBRATED = {"strategy": "entropy", "router_preset": "calibrated"}
# Truncation methods run at temperature 1, except those without a number of their own. The router
# runs with the settings of its presets.
METHODS = {
    "greedy": SamplingMethod({"greedy": True}, ()),
    "temperature": SamplingMethod({}, (TunedSetting("temperature", 0.4, 1.6),)),
    "top_p": SamplingMethod({}, (TunedSetting("top_p", 0.5, 0.995, log_complement=True),)),
    "min_p": SamplingMethod({}, (TunedSetting("min_p", 0.5, 0.002),)),
    "typical": SamplingMethod({}, (TunedSetting("typical", 0.5, 0.995, log_complement=True),)),
    "top_n_sigma": SamplingMethod({}, (TunedSetting("top_n_sigma", 0.2, 4.0),)),
    "top_h": SamplingMethod({}, (TunedSetting("top_h", 0.3, 0.99, log_complement=True),)),
    "p_less": SamplingMethod({"p_less": "plain"}, (TunedSetting("temperature", 0.5, 4.0),)),
    "min_k": SamplingMethod({"min_k": 3.0}, (TunedSetting("temperature", 0.5, 10.0),)),
    "adaptive_p": SamplingMethod({"min_p": 0.02}, (TunedSetting("adaptive_target", 0.8, 0.03),)),
    "router_guide": SamplingMethod(
        {"strategy": "entropy", "router_preset": "guide"}, FEWER_CANDIDATES
    ),
    "router_calibrated": SamplingMethod(CALIBRATED, FEWER_CANDIDATES),
    "router_no_attention": SamplingMethod({**CALIBRATED, "use_attention": False}, FEWER_CANDIDATES),
    "router_random": SamplingMethod(CALIBRATED, FEWER_CANDIDATES),
}
CONTROLLED = "router_calibrated"
CONTROL = "router_random"  # uses each strategy as often as `CONTROLLED` does
COMPARISONS = [
    (router, other)
    for router in ("router_guide", CONTROLLED, "router_no_attention")
    for other in ("min_p", CONTROL)
]
# The temperatures are close enough for linear interpolation.
TEMPERATURE_CURVE = {f"temperature {t:g}": t for t in (0.3, 0.5, 0.65, 0.8, 0.95, 1.1, 1.3)}


@dataclass(frozen=True)
class StudySize:
    """The size of the study: test prompts (as many for tuning), samples per prompt, tokens per
    sample, trials per method.
    """

    prompts: int = 96
    seeds: int = 5
    tokens: int = 192
    trials: int = 5

    def __post_init__(self) -> None:
        for name, least, most in (
            ("prompts", 2, 1 << 20),
            ("seeds", 2, 1000),
            ("tokens", 8, 1 << 20),
            ("trials", 1, 50),
        ):
            if not least <= getattr(self, name) <= most:
                raise UserError(f"--{name} must be in [{least}, {most}], got {getattr(self, name)}")


QUICK_SIZE = StudySize(prompts=40, seeds=3, tokens=128, trials=3)
MIN_PROMPTS = 16  # for a large model; see `default_count`


def select_methods(names: Sequence[str] | None) -> list[str]:
    """Returns the methods of these names in their usual order; None: all.

    Raises:
      UserError: a name is unknown, or the control is selected without the method that it controls
        for.
    """
    found = select_names(names, METHODS, "sampling method")
    if CONTROL in found and CONTROLLED not in found:
        raise UserError(
            f"{CONTROL} needs the strategy shares of {CONTROLLED}: name both in --methods"
        )
    return found


MEASURES = ("bits_per_byte", *TEXT_MEASURES, "self_bleu")


@dataclass(frozen=True)
class Trial:
    """A trial: the values of the tuned settings, and the mean diversity of the texts."""

    values: Mapping[str, float]
    diversity: float


@dataclass(frozen=True)
class MethodResult:
    """The results of a method, or of the real continuations (`human`).

    Attributes:
      tuned: the values of the tuned settings.
      at_edge: whether all trials were on one side of the target diversity.
      trials: all trials.
      measures: `MEASURES`, and `excess` if temperature sampling reaches the diversity of the
        method.
      tok_per_s: median, lowest and highest of the batches; None for the real text and for the
        control.
    """

    name: str
    tuned: Mapping[str, float]
    at_edge: bool
    trials: Sequence[Trial]
    measures: Mapping[str, Interval]
    tok_per_s: Interval | None


@dataclass(frozen=True)
class TemperaturePoint:
    """The means of plain sampling at a temperature."""

    temperature: float
    diversity: float
    bits_per_byte: float


@dataclass(frozen=True)
class Difference:
    """Paired differences a − b of the measures. The verdict uses `excess`, which is present if both
    methods have it.
    """

    a: str
    b: str
    differences: Mapping[str, Interval]


@dataclass(frozen=True)
class SamplingStudy:
    """The conditions and the results of the study.

    Attributes:
      reference: the run of the reference model; None: the run itself.
      unit: the plural noun for tokens in messages: `tokens`, `characters` or `bytes`.
      shares: share of each strategy in the control; None without it.
      methods: results of the methods; the real text is first.
      ruler: the curve of plain temperature sampling.
      comparisons: the router compared with other methods.
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
    **sizes: int | None,
) -> SamplingStudy:
    """Tunes sampling methods, generates text with each of them, and compares the texts.

    Args:
      reference: the run of the reference model; None: the run itself, which favors its own most
        likely texts.
      quick: take default sizes from `QUICK_SIZE` instead of `StudySize()`.
      methods: names of `METHODS`; None: all.
      data_path: the text that prompts are taken from, in the form of `data.path`; None: the
        validation tokens that training saved in the run.
      progress: called with a line at the start of each part of the work.
      sizes: fields of `StudySize`. The default of `tokens` leaves at least a quarter of a small
        context for the prompt. The default of `prompts` is smaller for a model with more than 10 M
        parameters.

    Raises:
      UserError: a name or number is invalid, there are too few prompts, the reference cannot encode
        the texts, or the router was not calibrated.
    """
    names = select_methods(methods)
    given_sizes = {name: value for name, value in sizes.items() if value is not None}
    size = replace(QUICK_SIZE if quick else StudySize(), **given_sizes)
    directory = open_run(run_dir)
    _check_calibration(names, directory)
    store = open_text_store(directory, data_path)
    run = load(run_dir)
    for name in names:  # report settings that the engine rejects before the work begins
        run.params(
            [run.settings({**METHODS[name].settings, **METHODS[name].values_at(0.5), "seed": 0})]
        )
    context = run.model.config.max_context
    before = len(run.tokenizer.ids_before_text)
    if "tokens" not in given_sizes:
        size = replace(size, tokens=max(8, min(size.tokens, 3 * context // 4)))
    if "prompts" not in given_sizes:
        size = replace(size, prompts=default_count(size.prompts, MIN_PROMPTS, run.parameters))
    prompt = prompt_tokens(context, size.tokens, before)
    tuning, test = draw_windows(run.tokenizer, store, size.prompts, prompt, size.tokens)
    bench = SamplingBenchmark(run, ReferenceModel(reference or run_dir), size, progress)
    measured = {"human": bench.measure(test, [(test.texts, test.ids)])}
    tuned = _tune_all(bench, names, tuning)
    continuations = _test_all(bench, tuned, test)
    for name, rounds in continuations.items():
        progress(f"measuring {name}")
        measured[name] = bench.measure(test, [(sample.texts, sample.ids) for sample in rounds])
    curve = [measured[name] for name in TEMPERATURE_CURVE]
    excesses = {name: excess(measured[name], curve) for name in ("human", *names)}
    return SamplingStudy(
        run=str(directory.path),
        reference=None if reference is None else str(open_run(reference).path),
        device=jax.devices()[0].device_kind,
        unit={"char": "characters", "byte": "bytes"}.get(run.tokenizer.kind, "tokens"),
        prompt_tokens=prompt,
        **vars(size),
        shares=tuned[CONTROL].shares if CONTROL in tuned else None,
        methods=[
            _method_result(
                name,
                tuned.get(name, TunedMethod({})),
                measured[name],
                excesses[name],
                continuations.get(name, []),
            )
            for name in excesses
        ],
        ruler=_temperature_points(curve),
        comparisons=[
            _difference(a, b, excesses, measured) for a, b in COMPARISONS if {a, b} <= set(names)
        ],
    )


def _check_calibration(names: Sequence[str], directory: RunDirectory) -> None:
    """Raises UserError if a method needs a calibration of the router and the run has none."""
    calibrated = [
        name for name in names if METHODS[name].settings.get("router_preset") == "calibrated"
    ]
    if calibrated and not directory.router.is_file():
        raise UserError(
            f"{', '.join(calibrated)} cannot run without {directory.router}: run `dantinox"
            f" calibrate --run_dir {directory.path} --what router`,"
            " or name other methods in --methods"
        )


def _temperature_points(curve: Sequence[MeasuresByPrompt]) -> list[TemperaturePoint]:
    """Returns the means of plain sampling at the temperatures of `TEMPERATURE_CURVE`."""
    return [
        TemperaturePoint(
            temperature,
            float(measures["diversity"].mean()),
            float(measures["bits_per_byte"].mean()),
        )
        for temperature, measures in zip(TEMPERATURE_CURVE.values(), curve, strict=True)
    ]


class TunedMethod(NamedTuple):
    """A tuned method: its fixed settings, the tuned values, its trials, and the strategy shares of
    the control.
    """

    settings: Mapping[str, Any]
    values: Mapping[str, float] = {}
    trials: tuple[Trial, ...] = ()
    at_edge: bool = False
    shares: Mapping[str, float] | None = None


@dataclass(frozen=True)
class SamplingBenchmark:
    """The model under test and the reference model."""

    run: LoadedModel
    reference_model: ReferenceModel
    size: StudySize
    progress: Callable[[str], None]

    def continue_prompts(
        self, windows: PromptWindows, method: TunedMethod, seed: int, report: bool = False
    ) -> Continuations:
        """Generates one continuation of every prompt."""
        settings = {**method.settings, **method.values}
        return generate_continuations(
            self.run,
            windows.prompts,
            settings,
            self.size.tokens,
            seed,
            shares=method.shares,
            report=report,
        )

    def measure(
        self, windows: PromptWindows, samples: Sequence[tuple[Sequence[str], np.ndarray]]
    ) -> MeasuresByPrompt:
        """Returns every measure per prompt, averaged over the samples; self-BLEU only if there are
        several samples.

        Args:
          samples: (texts, tokens `[P, T]`) of each sample.
        """
        ids_SP = [ids_PT.tolist() for _, ids_PT in samples]
        texts_S = [tuple(texts) for texts, _ in samples]
        score = self.reference_model.bits_per_byte
        # Equal texts are scored once.
        bits = {texts: score(windows.prompts, texts) for texts in set(texts_S)}
        found: dict[str, Any] = {"bits_per_byte": [bits[texts] for texts in texts_S]}
        found |= {
            name: [[measure(ids) for ids in ids_P] for ids_P in ids_SP]
            for name, measure in TEXT_MEASURES.items()
        }
        means = {name: np.mean(values, axis=0) for name, values in found.items()}
        if len(samples) > 1:
            means["self_bleu"] = np.array(
                [self_bleu(of_prompt) for of_prompt in zip(*ids_SP, strict=True)]
            )
        return means


def bisection(
    diversity_at: Callable[[float], float], target: float, trials: int
) -> tuple[float, bool]:
    """Searches for a position in [0, 1] whose diversity is near a target. Diversity should increase
    with the position.

    Returns:
      The position of the nearest trial (the first if several are equally near), and whether all
      trials were on one side of the target.
    """
    low = 0.0
    high = 1.0
    tried: list[tuple[float, float]] = []
    for _ in range(trials):
        position = (low + high) / 2
        diversity = diversity_at(position)
        tried.append((position, diversity))
        if diversity < target:
            low = position
        else:
            high = position
    best = min(tried, key=lambda pair: abs(pair[1] - target))[0]
    return best, low == 0.0 or high == 1.0


def _tune_all(
    bench: SamplingBenchmark, names: Sequence[str], tuning: PromptWindows
) -> dict[str, TunedMethod]:
    tuned: dict[str, TunedMethod] = {}
    shares = None
    for name in names:
        tuned[name] = _tune(bench, name, tuning, shares if name == CONTROL else None)
        if name == CONTROLLED and CONTROL in names:
            bench.progress(f"counting the strategies of {name}")
            shares = bench.continue_prompts(tuning, tuned[name], 0, report=True).shares
    return tuned


def _tune(
    bench: SamplingBenchmark, name: str, tuning: PromptWindows, shares: Mapping[str, float] | None
) -> TunedMethod:
    method = METHODS[name]
    trials = list[Trial]()
    if not method.scale:
        bench.progress(f"trying {name}")
        # Compile now, so that the timed rounds do not include compilation.
        bench.continue_prompts(tuning, TunedMethod(method.settings), 0)
        return TunedMethod(method.settings)

    def diversity_at(position: float) -> float:
        values = method.values_at(position)
        for trial in trials:  # rounding to integers can repeat values
            if trial.values == values:
                return trial.diversity
        bench.progress(
            f"tuning {name}, trial {len(trials) + 1} of {bench.size.trials}:"
            f" {format_values(values)}"
        )
        continuations = bench.continue_prompts(
            tuning, TunedMethod(method.settings, values, shares=shares), 0
        )
        trials.append(Trial(values, _mean_diversity(continuations.ids)))
        return trials[-1].diversity

    position, at_edge = bisection(diversity_at, _mean_diversity(tuning.ids), bench.size.trials)
    return TunedMethod(method.settings, method.values_at(position), tuple(trials), at_edge, shares)


def _mean_diversity(ids_PT: np.ndarray) -> float:
    return float(np.mean([TEXT_MEASURES["diversity"](ids) for ids in ids_PT.tolist()]))


def format_values(values: Mapping[str, float]) -> str:
    """Returns the values as text: `candidates 1, base_temperature 0.92`."""
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def _test_all(
    bench: SamplingBenchmark, tuned: Mapping[str, TunedMethod], test: PromptWindows
) -> dict[str, list[Continuations]]:
    """Generates one continuation of every prompt per round, with every method and every temperature
    of the curve.

    Each round uses another order of methods, so that temporary slowdowns of the machine affect all
    methods equally.
    """
    methods = {
        **tuned,
        **{name: TunedMethod({"temperature": t}) for name, t in TEMPERATURE_CURVE.items()},
    }
    names = list(methods)
    rounds = {name: list[Continuations]() for name in methods}
    for seed in range(1, bench.size.seeds + 1):
        for name in names[seed % len(names) :] + names[: seed % len(names)]:
            if rounds[name] and methods[name].settings.get("greedy"):
                rounds[name].append(rounds[name][0])  # greedy text does not depend on the seed
                continue
            bench.progress(f"round {seed} of {bench.size.seeds}: {name}")
            rounds[name].append(bench.continue_prompts(test, methods[name], seed))
    return rounds


def _method_result(
    name: str,
    method: TunedMethod,
    measured: MeasuresByPrompt,
    excesses: np.ndarray | None,
    rounds: Sequence[Continuations],
) -> MethodResult:
    measures = {} if excesses is None else {"excess": percentile_interval(excesses)}
    measures |= {key: mean_interval(measured[key]) for key in MEASURES if key in measured}
    # Python draws the strategies of the control token by token, so its speed is not comparable.
    speeds = [] if name == CONTROL else [rate for sample in rounds for rate in sample.rates]
    speed = Interval(float(np.median(speeds)), min(speeds), max(speeds)) if speeds else None
    return MethodResult(
        name, dict(method.values), method.at_edge, list(method.trials), measures, speed
    )


def _difference(
    a: str,
    b: str,
    excesses: Mapping[str, np.ndarray | None],
    measured: Mapping[str, MeasuresByPrompt],
) -> Difference:
    excess_a = excesses[a]
    excess_b = excesses[b]
    differences = {key: mean_interval(measured[a][key] - measured[b][key]) for key in MEASURES}
    if excess_a is not None and excess_b is not None:
        differences = {"excess": percentile_interval(excess_a - excess_b), **differences}
    return Difference(a, b, differences)
