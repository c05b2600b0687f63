"""The comparison of compressed caches as text, Markdown, CSV and plot."""

from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from dantinox.report.plots import new_figure, study_files, style_axes, to_png
from dantinox.report.tables import Column, bullets, csv_table, markdown_table, text_table, wrap_lines
from dantinox.studies.kv import KVStudy
from dantinox.studies.kv_bench import NEAR_KEYS
from dantinox.studies.kv_tasks import SEEDS
from dantinox.studies.statistics import verdict

# Okabe and Ito's colours, which stay apart for colour-blind eyes, and a shape each.
MARKS = {
    "streaming": ("v", "#56b4e9"), "uniform": ("o", "#999999"), "entropy": ("s", "#d55e00"), "coverage": ("^", "#009e73"),
    "distance": ("P", "#0072b2"),
    "loss": ("D", "#b59f00"), "random": ("x", "#cc79a7"), "oracle": ("*", "#000000"),
}  # fmt: skip


def _interval_column(path: str, heading: str = "", form: str = ".1f") -> Column:
    return Column(path.removesuffix(".all"), heading, attrgetter(path), form, interval=True)


def _number_column(name: str, heading: str = "") -> Column:
    return Column(name, heading, attrgetter(name), ",.0f")


def _seed_column(name: str, seed: int) -> Column:
    return Column(f"{name}_seed{seed}", f"seed {seed}", lambda cache: getattr(cache, name).seeds[seed], ".2f", interval=True)


MIN_GAIN, MIN_NEEDLE = 0.05, 95  # nats per token, percent: below, the study says little
MEASURES = [
    DPPL := _interval_column("dppl.all", "ΔPPL %", ".2f"),
    KL := _interval_column("kl.all", "KL", ".4f"),
    TOP1 := _interval_column("top1.all", "top-1 %"),
    GAP := _interval_column("gap_closed", "gap %"),
    _interval_column("same", "same %"),
    DIFFERS := _number_column("diverges", "differs at"),
    NEEDLE := _interval_column("needle_aware", "needle %"),
    _interval_column("needle_agnostic", "needle, unaware %"),
    _interval_column("copy_aware", "copy %"),
    _interval_column("copy_agnostic", "copy, unaware %"),
    BYTES := _number_column("bytes", "bytes"),
    SPEED := _number_column("tok_per_s", "tok/s"),
]


def kv_lines(study: KVStudy, width: int = 100) -> Iterator[str]:
    """What was done, a table for each ratio, what they say, and what their words mean, in lines of at most `width`."""

    def pair(kind: str) -> Column:
        both = attrgetter(f"{kind}_aware", f"{kind}_agnostic")
        return Column("", f"{kind} %", lambda cache: " / ".join(f"{found.value:.0f}" for found in both(cache)))

    width = max(width, 60)
    tasks = [] if study.tasks is None else [pair("needle"), pair("copy")]
    columns = [Column("", "method", attrgetter("name")), DPPL._replace(form="+.2f"), KL._replace(spread=False), TOP1]
    columns += [GAP._replace(form=".0f", spread=False), DIFFERS, *tasks, BYTES, SPEED]
    yield from wrap_lines([_description(study), *preconditions(study), *_left_out_lines(study)], width, "")
    for ratio in study.ratios:
        yield from ["", f"ratio {ratio.ratio:g}"]
        yield from text_table(columns, [study.full, *ratio.methods], width)
    yield from wrap_lines(["", *conclusions(study), "", *_notes(study)], width)


def kv_csv(study: KVStudy) -> str:
    """A row per ratio and method: numbers, and of measures the value, the lower and the upper end."""
    columns = [
        _number_column("ratio"),
        Column("method", "", attrgetter("name")),
        Column("slots_least", "", lambda cache: cache.slots and cache.slots[0]),
        Column("slots_most", "", lambda cache: cache.slots and cache.slots[1]),
        *map(_number_column, ("bytes", "share", "tok_per_s", "loss", "diverges")),
        *(c for column in (DPPL, KL, TOP1) for c in (column, *(_seed_column(column.name, i) for i in range(SEEDS)))),
        GAP,
        *(column for column in MEASURES[4:] if column.interval),
    ]
    return csv_table(columns, [cache for ratio in study.ratios for cache in (study.full, *ratio.methods)])


def kv_markdown(study: KVStudy) -> str:
    """The tables with whole intervals, the change of perplexity by seed, the sentences and the meaning of it all."""
    parts = [f"# Compressed caches on {Path(study.run).name}", _description(study)]
    parts.append(bullets([*preconditions(study), *_left_out_lines(study)]))
    every = [cache for ratio in study.ratios for cache in ratio.methods]
    name = Column("", "method", lambda cache: f"`{cache.name}`")
    measures = [name, *(column for column in MEASURES if any(column.value(cache) is not None for cache in every))]
    seeds = [_seed_column("dppl", i) for i in range(SEEDS)]
    for ratio in study.ratios:
        caches = [study.full, *ratio.methods]
        parts += [f"## Ratio {ratio.ratio:g}", markdown_table(measures, caches)]
        parts += ["ΔPPL % by seed:", markdown_table([name, *seeds], caches)]
    parts += ["## What this says", bullets(conclusions(study))] if conclusions(study) else []
    return "\n\n".join([*parts, "## What the words mean", bullets(_notes(study))]) + "\n"


def kv_files(study: KVStudy) -> dict[str, Callable[[], str | bytes]]:
    return study_files("kv", study, kv_csv, kv_markdown, draw_kv)


def preconditions(study: KVStudy) -> list[str]:
    """What there is to be lost: how much far tokens matter, and whether the model finds a needle with all it has read."""
    value, low, high = study.long_range_gain
    gain = (
        f"Long-range gain: tokens that see the nearest {NEAR_KEYS} alone cost {value:+.3f} nats more "
        f"(95 % interval {low:+.3f} to {high:+.3f})."
    )
    if value < MIN_GAIN:
        gain += f" Below {MIN_GAIN} what stands further back hardly matters, and no cache can lose much."
    if study.full.needle_aware is None:
        return [gain]
    value, low, high = study.full.needle_aware
    needles = f"Needles found with the full cache: {value:.1f} % (95 % interval {low:.1f} to {high:.1f})."
    if value < MIN_NEEDLE:
        needles += f" Below {MIN_NEEDLE} % the model itself, and not its cache, is being measured."
    return [gain, needles]


def conclusions(study: KVStudy) -> list[str]:
    """A sentence per ratio and signal, and what the default follows from, made of the study's numbers alone."""
    sentences = []
    for ratio in study.ratios:
        for signal, found in ratio.against_uniform.items():
            value, low, high = found.all
            outside = sum(verdict(interval) != "same" for interval in found.seeds)
            beat = {"better": "beat", "worse": "are worse than", "same": "do not beat"}[found.verdict]
            sentences.append(
                f"Ratio {ratio.ratio:g}: {signal} budgets {beat} uniform ones ({value:+.4f} nats per token, 95 % interval "
                f"{low:+.4f} to {high:+.4f}; outside it in {outside} of {SEEDS} seeds)."
            )
    if sentences:
        default = study.default_signal
        why = "no other beats it at some ratio without being worse at another" if default == "uniform" else "it beats uniform"
        sentences.append(f"Signal by the rule of three seeds: {default}, as {why}.")
    return sentences


def draw_kv(study: KVStudy) -> bytes:
    """Perplexity over the ratio, and needles found, or where there are none equal likeliest tokens."""
    figure = new_figure(11, 4.8)
    losses, finds = figure.subplots(1, 2)
    _draw(losses, study, DPPL, "perplexity above the full cache's, %")
    if study.full.needle_aware is None:
        _draw(finds, study, TOP1, "same likeliest token as with the full cache, %")
    else:
        _draw(finds, study, NEEDLE, "needles found, the question in the prompt, %")
        finds.axhline(study.full.needle_aware.value, color="#bbbbbb", linewidth=1.2, zorder=1)
        finds.set_ylim(-3, 103)
    losses.axhline(0, color="#bbbbbb", linewidth=1.2, label="full", zorder=1)
    # Linear about zero, where losses are small, and logarithmic where some methods are far off.
    ends = [end for ratio in study.ratios for cache in ratio.methods for end in cache.dppl.all]
    low, high = min(-1.0, *ends), max(1.0, *ends)
    ticks = [sign * tick * 10**power for sign in (-1, 1) for power in range(7) for tick in (1, 2, 5)]
    losses.set_yscale("symlog", linthresh=2)
    losses.set_ylim(1.2 * low, 1.2 * high)
    losses.set_yticks([0, *(tick for tick in ticks if low <= tick <= high)])
    losses.yaxis.set_major_formatter("{x:g}")
    losses.minorticks_off()
    figure.legend(*losses.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    return to_png(figure)


def _draw(axes: Any, study: KVStudy, column: Column, title: str) -> None:
    """A line per method."""
    every = [cache for ratio in study.ratios for cache in ratio.methods]
    for name in dict.fromkeys(cache.name for cache in every):
        own = [cache for cache in every if cache.name == name]
        y, low, high = np.transpose([column.value(cache) for cache in own])
        shape, colour = MARKS.get(name, (".", "#000000"))
        axes.errorbar(
            [cache.ratio for cache in own], y, yerr=[y - low, high - y], marker=shape, color=colour, markersize=6,
            linewidth=1.2, elinewidth=0.8, linestyle="--" if name == "oracle" else "-",
            label="oracle (upper bound)" if name == "oracle" else name,
        )  # fmt: skip
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xscale("log")
    ticks = [ratio.ratio for ratio in study.ratios]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("share of the slots that is kept")
    style_axes(axes)


def _description(study: KVStudy) -> str:
    places = " that overlap, as the text is short" if study.overlapping else ""
    tasks = "" if study.tasks is None else f"; {study.tasks} needles and as many records to copy"
    return (
        f"{study.run}: {study.sequences} sequences{places}, {study.tokens} tokens of validation text each, "
        f"{study.tokens // 2} of them as a prompt, drawn with {SEEDS} seeds; {study.continued} prompts continued"
        f"{tasks}. Of the text's word 4-grams {100 * study.repeated:.1f} % stood in it before. Cache in {study.dtype}, "
        f"{study.device}."
    )


def _left_out_lines(study: KVStudy) -> list[str]:
    tasks = ["needle and copy tasks, as the tokenizer does not spell each of their words as one token"]
    return [f"Left out: {line}" for line in (*study.left_out, *tasks * (study.tasks is None))]


def _notes(study: KVStudy) -> list[str]:
    """What the words of the tables mean."""
    task = (
        "needle: one of eight facts among lines of the text is asked for; copy: a record of eight facts is said again, up "
        "to its last word. The first number is with the question before the cache when it chooses what stays, the second, "
        "unaware, with the question read afterwards. Both are answered from what stayed, not while the prompt is read."
    )
    return [
        "full: nothing is given up. streaming: the first tokens and the last ones stay. uniform: what gets attention stays, "
        "and all heads have equal shares. entropy, coverage, distance, loss: the same with shares by what was measured of "
        "each head. random: any tokens stay. oracle: an upper bound and no cache: every query sees its best keys, as many as "
        "uniform has slots.",
        "At a ratio all have as many slots; bytes are those allocated for one row, positions and importances included.",
        "ΔPPL: perplexity of the text behind the prompt, above the full cache's. KL: from the full cache's prediction, in nats "
        "per token. top-1: tokens for which the likeliest one is the same. Tokens of the prompt do not count.",
        "gap: how much of the loss between streaming and oracle is won back; none where the two do not differ for certain.",
        f"same, differs at: greedy continuations beside the full cache's over {study.free_tokens} tokens: equal tokens, "
        "and the median of how many come before the first other one.",
        *([] if study.tasks is None else [task]),
        "tok/s: decoding 8 rows, the fastest batch, without compiling and reading the prompt.",
        "Intervals are 95 %, bootstrapped over sequences (differences in pairs), one by one: of many some are off by chance.",
    ]
