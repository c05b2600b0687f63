"""Report and plot of the comparison of compressed caches."""

from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from dantinox.lab.studies.kv_study import CacheResult, KVStudy
from dantinox.lab.studies.kv_tasks import SEEDS
from dantinox.lab.studies.kv_variants import NEAR_KEYS
from dantinox.lab.studies.statistics import verdict
from dantinox.report.document import Block, Details, Heading, Items, Paragraph, Table
from dantinox.report.plots import new_figure, style_axes, to_png
from dantinox.report.tables import CSV, MARKDOWN, TEXT, Column

# A marker for each method, in Okabe and Ito's colors, which color-blind readers can distinguish.
MARKS = {
    "streaming": ("v", "#56b4e9"), "uniform": ("o", "#999999"), "entropy": ("s", "#d55e00"),
    "coverage": ("^", "#009e73"),
    "distance": ("P", "#0072b2"),
    "loss": ("D", "#b59f00"), "random": ("x", "#cc79a7"), "oracle": ("*", "#000000"),
}  # fmt: skip


def _column(path: str, heading: str = "", form: str = ",.0f", **options: Any) -> Column:
    return Column(path.removesuffix(".all"), heading, attrgetter(path), form, **options)


def _seed_columns(name: str, outputs: Sequence[str] = (CSV,)) -> list[Column]:
    def of_seed(cache: CacheResult, seed: int) -> Any:
        return getattr(cache, name).seeds[seed]

    return [
        Column(
            f"{name}_seed{seed}",
            f"seed {seed}",
            partial(of_seed, seed=seed),
            ".2f",
            interval=True,
            outputs=outputs,
        )
        for seed in range(SEEDS)
    ]


def _task_columns(kind: str) -> list[Column]:
    """Returns the columns of the tasks of a kind: with two numbers on the console, and with
    intervals elsewhere.
    """
    both = attrgetter(f"{kind}_aware", f"{kind}_agnostic")

    def pair(cache: CacheResult) -> str | None:
        aware, agnostic = both(cache)
        return None if aware is None else f"{aware.value:.0f} / {agnostic.value:.0f}"

    files: dict[str, Any] = {"form": ".1f", "interval": True, "outputs": (MARKDOWN, CSV)}
    return [
        Column("", f"{kind} %", pair, outputs=(TEXT,)),
        _column(f"{kind}_aware", f"{kind} %", **files),
        _column(f"{kind}_agnostic", f"{kind}, unaware %", **files),
    ]


# A study below these limits is hardly conclusive.
MIN_GAIN = 0.05  # nats per token
MIN_NEEDLE = 95  # percent
NAME = _column("name", "method")._replace(name="method")
DPPL = _column("dppl.all", "ΔPPL %", "+.2f", interval=True)
TOP1 = _column("top1.all", "top-1 %", ".1f", interval=True)
NEEDLES = _task_columns("needle")
COLUMNS = [
    _column("ratio", outputs=(CSV,)),
    NAME,
    Column("slots_least", "", lambda cache: cache.slots and cache.slots[0], outputs=(CSV,)),
    Column("slots_most", "", lambda cache: cache.slots and cache.slots[1], outputs=(CSV,)),
    _column("share", outputs=(CSV,)),
    _column("loss", outputs=(CSV,)),
    DPPL,
    *_seed_columns("dppl"),
    _column("kl.all", "KL", ".4f", interval=True, spread=False),
    *_seed_columns("kl"),
    TOP1,
    *_seed_columns("top1"),
    _column("gap_closed", "gap %", ".0f", interval=True, spread=False),
    _column("same", "same %", ".1f", interval=True, outputs=(MARKDOWN, CSV)),
    _column("diverges", "differs at"),
    *NEEDLES,
    *_task_columns("copy"),
    _column("bytes", "bytes"),
    _column("tok_per_s", "tok/s"),
]


def kv_blocks(study: KVStudy) -> Iterator[Block]:
    """Yields the report: the conditions, a table for each ratio, the conclusions and the terms."""
    yield Heading(f"Compressed caches on {Path(study.run).name}", 1)
    yield Paragraph(_description(study))
    yield Items([*preconditions(study), *_left_out_lines(study)])
    all_caches = [cache for ratio in study.ratios for cache in ratio.methods]
    empty = [
        column for column in COLUMNS if all(column.value(cache) is None for cache in all_caches)
    ]
    columns = [column for column in COLUMNS if column not in empty]
    columns += [column._replace(outputs=(CSV,)) for column in empty if CSV in column.outputs]
    for ratio in study.ratios:
        caches = [study.full, *ratio.methods]
        yield Heading(f"Ratio {ratio.ratio:g}")
        yield Table(columns, caches)
        yield Details(
            [
                Paragraph("ΔPPL % by seed:"),
                Table([NAME, *_seed_columns("dppl", (MARKDOWN,))], caches),
            ]
        )
    if conclusions(study):
        yield Heading("Conclusions")
        yield Items(conclusions(study))
    yield Heading("Terms")
    yield Items(_notes(study))


def preconditions(study: KVStudy) -> list[str]:
    """Returns the preconditions of the study: the value of distant tokens, and the needles found
    with the full cache.
    """
    value, low, high = study.long_range_gain
    gain = (
        f"Long-range gain: with only the nearest {NEAR_KEYS} keys visible, the loss changes by"
        f" {value:+.3f} nats per token (95 % interval {low:+.3f} to {high:+.3f})."
    )
    if value < MIN_GAIN:
        gain += f" Below {MIN_GAIN} distant tokens hardly matter, and no cache can lose much."
    if study.full.needle_aware is None:
        return [gain]
    value, low, high = study.full.needle_aware
    needles = (
        f"Needles found with the full cache: {value:.1f} % (95 % interval {low:.1f} to {high:.1f})."
    )
    if value < MIN_NEEDLE:
        needles += f" Below {MIN_NEEDLE} % the tasks measure the model rather than its cache."
    return [gain, needles]


def conclusions(study: KVStudy) -> list[str]:
    """Returns a sentence per ratio and signal, and the reason for the default signal."""
    sentences = []
    for ratio in study.ratios:
        for signal, found in ratio.against_uniform.items():
            value, low, high = found.all
            excluding = sum(verdict(interval) != "same" for interval in found.seeds)
            beat = {"better": "beat", "worse": "are worse than", "same": "do not beat"}[
                found.verdict
            ]
            sentences.append(
                f"Ratio {ratio.ratio:g}: {signal} budgets {beat} uniform ones ({value:+.4f} nats"
                f" per token, 95 % interval {low:+.4f} to {high:+.4f}; the interval excludes 0 in"
                f" {excluding} of {SEEDS} seeds)."
            )
    if sentences:
        default = study.default_signal
        reason = "it beats uniform"
        if default == "uniform":
            reason = "no other signal beats it at some ratio without being worse at another"
        sentences.append(f"Signal by the rule of three seeds: {default}, because {reason}.")
    return sentences


def draw_kv(study: KVStudy) -> bytes:
    """Plots perplexity over the ratio, and needles found or, without tasks, equal most likely
    tokens.
    """
    figure = new_figure(11, 4.8)
    losses, finds = figure.subplots(1, 2)
    _draw(losses, study, DPPL, "perplexity above the full cache's, %")
    if study.full.needle_aware is None:
        _draw(finds, study, TOP1, "same most likely token as with the full cache, %")
    else:
        _draw(finds, study, NEEDLES[1], "needles found with the question in the prompt, %")
        finds.axhline(study.full.needle_aware.value, color="#bbbbbb", linewidth=1.2, zorder=1)
        finds.set_ylim(-3, 103)
    losses.axhline(0, color="#bbbbbb", linewidth=1.2, label="full", zorder=1)
    # Linear near zero, where losses are small, and logarithmic for methods that are far off.
    all_caches = [cache for ratio in study.ratios for cache in ratio.methods]
    low = min(-1.0, *(min(cache.dppl.all) for cache in all_caches))
    high = max(1.0, *(max(cache.dppl.all) for cache in all_caches))
    positive = [tick * 10**power for power in range(7) for tick in (1, 2, 5)]
    ticks = [*(-tick for tick in positive), *positive]
    losses.set_yscale("symlog", linthresh=2)
    losses.set_ylim(1.2 * low, 1.2 * high)
    losses.set_yticks([0, *(tick for tick in ticks if low <= tick <= high)])
    losses.yaxis.set_major_formatter("{x:g}")
    losses.minorticks_off()
    figure.legend(
        *losses.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9
    )
    return to_png(figure)


def _draw(axes: Any, study: KVStudy, column: Column, title: str) -> None:
    """Draws a line per method."""
    all_caches = [cache for ratio in study.ratios for cache in ratio.methods]
    for name in dict.fromkeys(cache.name for cache in all_caches):
        caches = [cache for cache in all_caches if cache.name == name]
        y, low, high = np.transpose([column.value(cache) for cache in caches])
        shape, color = MARKS.get(name, (".", "#000000"))
        axes.errorbar(
            [cache.ratio for cache in caches], y, yerr=[y - low, high - y], marker=shape,
            color=color, markersize=6, linewidth=1.2, elinewidth=0.8,
            linestyle="--" if name == "oracle" else "-",
            label="oracle (upper bound)" if name == "oracle" else name,
        )  # fmt: skip
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xscale("log")
    ticks = [ratio.ratio for ratio in study.ratios]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("share of the slots kept")
    style_axes(axes)


def _description(study: KVStudy) -> str:
    overlap = " that overlap because the text is short" if study.overlapping else ""
    tasks = (
        "" if study.tasks is None else f"; {study.tasks} needle tasks and {study.tasks} copy tasks"
    )
    return (
        f"{study.run}: {study.sequences} sequences{overlap}, {study.tokens} tokens of validation"
        f" text each, {study.tokens // 2} of them as a prompt, selected with {SEEDS} seeds;"
        f" {study.continued} prompts continued{tasks}. {100 * study.repeated:.1f} % of the text's"
        f" word 4-grams occurred in it before. Cache in {study.dtype}, {study.device}."
    )


def _left_out_lines(study: KVStudy) -> list[str]:
    left_out = [*study.left_out]
    if study.tasks is None:
        left_out.append(
            "needle and copy tasks, because the tokenizer does not"
            " encode each of their words as one token"
        )
    return [f"Left out: {line}" for line in left_out]


def _notes(study: KVStudy) -> list[str]:
    """Returns the meaning of the terms in the tables."""
    task = (
        "needle: the question asks for one of eight facts among lines of the text. copy: the"
        " question repeats a record of eight facts, and the answer is its last word. The first"
        " number: the question is part of the prompt when the cache chooses what to keep. The"
        " second number, unaware: the question is read afterwards. Both answers come from the"
        " compressed cache, not from prefill."
    )
    return [
        (
            "full: the cache keeps everything. streaming: it keeps the first and the last tokens."
            " uniform: it keeps the tokens with the most attention, with equal shares for all"
            " heads. entropy, coverage, distance, loss: the same with shares by this measurement of"
            " each head. random: it keeps random tokens. oracle: an upper bound, not a cache: every"
            " query sees its best keys, in the number of slots that uniform has."
        ),
        (
            "All caches of a ratio have the same number of slots. bytes: of one row, including"
            " positions and importances."
        ),
        (
            "ΔPPL: change of the perplexity of the text after the prompt, relative to the full"
            " cache. KL: divergence from the prediction with the full cache, in nats per token."
            " top-1: share of tokens with the same most likely"
            " prediction. Prompt tokens are not counted."
        ),
        (
            "gap: how much of the loss difference between streaming and oracle the method recovers;"
            " empty if that difference is not significant."
        ),
        (
            f"same, differs at: greedy continuations of {study.free_tokens} tokens compared with"
            " those of the full cache: share of equal tokens, and the median number of tokens"
            " before the first difference."
        ),
        *([] if study.tasks is None else [task]),
        "tok/s: decoding of 8 rows, fastest batch, without compilation and prefill.",
        (
            "Intervals are 95 %, bootstrapped over sequences (paired for differences), not"
            " corrected for multiple comparisons."
        ),
    ]
