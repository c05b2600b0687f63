"""Report and plot of the comparison of sampling methods."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dantinox.lab.studies.sampling_study import Difference, SamplingStudy, format_values
from dantinox.lab.studies.statistics import verdict
from dantinox.report.document import Block, Details, Heading, Items, Paragraph, Table
from dantinox.report.plots import new_figure, style_axes, to_png
from dantinox.report.tables import CSV, MARKDOWN, TEXT, Column

HEADINGS = {
    "excess": "excess", "bits_per_byte": "bits/byte", "diversity": "diversity",
    "distinct_1": "distinct-1", "distinct_2": "distinct-2", "distinct_3": "distinct-3",
    "rep_4": "rep-4", "self_bleu": "self-BLEU",
}  # fmt: skip


def _measure(name: str) -> Column:
    return Column(name, HEADINGS[name], lambda method: method.measures.get(name), interval=True)


def _difference(name: str) -> Column:
    return Column(
        name, HEADINGS[name], lambda pair: pair.differences.get(name), "+.3f", interval=True
    )


COLUMNS = [
    Column("method", "method", lambda method: method.name),
    Column(
        "",
        "setting",
        lambda method: format_values(method.tuned) + " *" * method.at_edge,
        outputs=(TEXT, MARKDOWN),
    ),
    Column(
        "setting",
        "",
        lambda method: " ".join(f"{name}={value!r}" for name, value in method.tuned.items()),
        outputs=(CSV,),
    ),
    Column("at_edge", "", lambda method: int(method.at_edge), outputs=(CSV,)),
    *map(_measure, HEADINGS),
    Column(
        "tok_per_s", "tok/s", lambda method: method.tok_per_s, ".0f", interval=True, spread=False
    ),
]
DIFFERENCES = [Column("", "", lambda pair: f"{pair.a} − {pair.b}"), *map(_difference, HEADINGS)]
# A marker for each method, in Okabe and Ito's colors, which color-blind readers can distinguish.
# Other methods are black.
MARKS = {
    "human": ("*", "#000000"), "greedy": ("x", "#000000"), "temperature": ("o", "#999999"),
    "top_p": ("v", "#56b4e9"),
    "min_p": ("s", "#0072b2"), "typical": ("^", "#009e73"), "top_n_sigma": ("D", "#b59f00"),
    "router_guide": ("p", "#e69f00"),
    "router_calibrated": ("P", "#d55e00"), "router_no_attention": ("X", "#cc79a7"),
    "router_random": ("h", "#6a4c93"),
    "top_h": ("<", "#56b4e9"), "p_less": (">", "#0072b2"), "min_k": ("d", "#009e73"),
    "adaptive_p": ("H", "#e69f00"),
}  # fmt: skip


def sampling_blocks(study: SamplingStudy) -> Iterator[Block]:
    """Yields the report: the conditions, the table, the conclusions, the differences and the
    terms.
    """
    yield Heading(f"Sampling methods on {Path(study.run).name}", 1)
    yield Paragraph(_description(study))
    yield Table(COLUMNS, study.methods, front=2)
    yield Items(conclusions(study))
    if study.comparisons:
        yield Details([Paragraph("Differences:"), Table(DIFFERENCES, study.comparisons)])
    yield Items(_notes(study))


def conclusions(study: SamplingStudy) -> list[str]:
    """Returns a self-contained sentence for each comparison."""
    judge = "the model itself" if study.reference is None else Path(study.reference).name
    return [_conclusion(pair, judge) for pair in study.comparisons]


def _conclusion(pair: Difference, judge: str) -> str:
    if "excess" not in pair.differences:
        return (
            f"{pair.a} and {pair.b} cannot be compared: temperature sampling did not reach the"
            " diversity of one of them."
        )
    excess = pair.differences["excess"]
    value, low, high = excess
    numbers = (
        f"{value:+.3f} bits per byte at equal diversity, 95 % interval {low:+.3f} to {high:+.3f},"
        f" reference: {judge}"
    )
    found = {
        "same": "is not distinguishable from",
        "better": "is better than",
        "worse": "is worse than",
    }[verdict(excess)]
    return f"{pair.a} {found} {pair.b} ({numbers})."


def draw_sampling(study: SamplingStudy) -> bytes:
    """Plots diversity over bits per byte: all methods, and a panel that zooms in on the tuned
    methods.
    """
    figure = new_figure(11, 5)
    panels = figure.subplots(1, 2)
    for axes in panels:
        _draw(axes, study)
    tuned = [method.measures for method in study.methods if method.tuned]
    if tuned:
        panels[1].set_xlim(*_around([measures["bits_per_byte"] for measures in tuned]))
        panels[1].set_ylim(*_around([measures["diversity"] for measures in tuned]))
        panels[1].set_title("the tuned methods", loc="left", fontsize=10)
    panels[0].set_title("all methods, with temperatures on the grey line", loc="left", fontsize=10)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9
    )
    return to_png(figure)


def _draw(axes: Any, study: SamplingStudy) -> None:
    points = [(point.bits_per_byte, point.diversity) for point in study.ruler]
    axes.plot(
        *zip(*points, strict=True),
        color="#bbbbbb",
        linewidth=1.2,
        marker=".",
        label="plain temperature",
        zorder=1,
    )
    for point, place in zip(study.ruler, points, strict=True):
        axes.annotate(
            f"{point.temperature:g}", place, xytext=(-4, 3), ha="right", textcoords="offset points",
            fontsize=7,
            color="#888888", annotation_clip=True,
        )  # fmt: skip
    for method in study.methods:
        shape, color = MARKS.get(method.name, (".", "#000000"))
        (x, *x_ends), (y, *y_ends) = (
            method.measures[key] for key in ("bits_per_byte", "diversity")
        )
        bars = [[[abs(end - at)] for end in ends] for at, ends in ((x, x_ends), (y, y_ends))]
        axes.errorbar(
            x, y, xerr=bars[0], yerr=bars[1], fmt=shape, color=color,
            markersize=14 if shape == "*" else 7, elinewidth=1,
            markeredgecolor=color if shape == "x" else "white",
            markeredgewidth=1.5 if shape == "x" else 0.6, label=method.name, zorder=3,
        )  # fmt: skip
    axes.set(
        xlabel="bits per byte under the reference (left: more likely)",
        ylabel="diversity (up: more varied)",
    )
    style_axes(axes)


def _around(intervals: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Returns axis limits that contain all intervals, with a margin."""
    low = min(low for _, low, _ in intervals)
    high = max(high for *_, high in intervals)
    margin = 0.08 * (high - low) or 0.01
    return low - margin, high + margin


def _description(study: SamplingStudy) -> str:
    judge = (
        "The reference is the model itself, which favors its own most likely texts: low"
        " temperatures look better than they are (select another model with --reference)."
        if study.reference is None
        else f"The reference is {study.reference}."
    )
    return (
        f"{study.run}: {study.prompts} prompts of {study.prompt_tokens} {study.unit} of validation"
        f" text, {study.seeds} continuations of each by every method, {study.tokens} {study.unit}"
        f" long. {judge}"
    )


def _notes(study: SamplingStudy) -> list[str]:
    """Returns the meaning of the terms in the table."""
    notes = [
        (
            "human: the real continuation of the validation text. Its excess shows by how much the"
            " reference underestimates real text: likelihood is only a part of quality."
        ),
        (
            "excess: bits per byte above plain temperature sampling at the same diversity. Below 0"
            " is better. This measure decides the comparisons."
        ),
        (
            "bits/byte: −log2 of the probability of a text under the reference, given its prompt,"
            " per UTF-8 byte. Lower is more likely."
        ),
        (
            "diversity: distinct-2 · distinct-3 · distinct-4. distinct-n: share of distinct"
            f" n-grams of {study.unit} in a sample. rep-4: share of 4-grams of {study.unit} that"
            " occurred before. self-BLEU: BLEU-4 of the samples of a prompt against each other;"
            " higher values mean more similar samples."
        ),
        (
            "setting: the trial whose diversity is nearest to that of the real text, of at most"
            f" {study.trials} trials on {study.prompts} other prompts. *: all trials were on one"
            " side of that diversity. Truncation methods run at temperature 1; the router is tuned"
            " first by fewer candidates, then by a higher base_temperature."
        ),
        "Intervals are 95 %, bootstrapped over prompts, not corrected for multiple comparisons.",
        (
            "tok/s: median, lowest and highest of the test batches; the methods take turns."
            f" {study.device}, without compilation and prefill."
        ),
    ]
    if study.shares is not None:
        shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in study.shares.items())
        notes.append(
            "router_random: the router with a random strategy for every token, in the shares of"
            f" router_calibrated during tuning ({shares}); the strategies themselves are unchanged."
            " Its speed is not measured."
        )
    return notes
