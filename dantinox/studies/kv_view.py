"""The comparison of compressed caches as tables, as files and as a picture, from the record of `studies.kv`."""

import csv
import io
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dantinox.report.plots import as_png, new_figure, write_all

Record = Mapping[str, Any]
NOTHING = "–"
FILES = ("kv.csv", "kv.md", "kv.json", "kv.png")
BY_SEED = ("dppl", "kl", "top1")  # measured by seed as well as of all sequences
INTERVALS = ("gap_closed", "same", "needle_aware", "needle_agnostic", "copy_aware", "copy_agnostic")
NUMBERS = ("bytes", "share", "tok_per_s", "loss", "diverges")
HEADINGS = {
    "dppl": "ΔPPL %",
    "kl": "KL",
    "top1": "top-1 %",
    "gap_closed": "gap %",
    "same": "same %",
    "diverges": "differs at",
    "needle_aware": "needle %",
    "needle_agnostic": "needle, unaware %",
    "copy_aware": "copy %",
    "copy_agnostic": "copy, unaware %",
    "bytes": "bytes",
    "tok_per_s": "tok/s",
}
DIGITS = {"dppl": 2, "kl": 4}
LEAST_GAIN, LEAST_NEEDLE = 0.05, 95  # nats per token, percent: below, the measurement says little
# Okabe and Ito's colours, which stay apart for colour-blind eyes, and a shape each.
MARKS = {
    "streaming": ("v", "#56b4e9"), "uniform": ("o", "#999999"), "entropy": ("s", "#d55e00"), "coverage": ("^", "#009e73"),
    "loss": ("D", "#b59f00"), "random": ("x", "#cc79a7"), "oracle": ("*", "#000000"),
}  # fmt: skip


def kv_lines(record: Record, width: int = 100) -> Iterator[str]:
    """What was done, a table for each ratio, what they say, and what their words mean, in lines of at most `width`.

    Columns that do not fit side by side stand below, with the methods repeated.
    """
    width = max(width, 60)
    for sentence in (_done(record), *preconditions(record), *_absent(record)):
        yield from textwrap.wrap(sentence, width)
    for ratio in record["ratios"]:
        yield ""
        yield f"ratio {ratio['ratio']:g}"
        yield from _table(_methods(record, ratio), _short_columns(record), width)
    yield ""
    for sentence in (*conclusions(record), "", *_notes(record)):
        yield from textwrap.wrap(sentence, width, subsequent_indent="  ") or [""]


def preconditions(record: Record) -> list[str]:
    """What there is to be lost: how much far tokens matter, and whether the model finds a needle with all it has read."""
    value, low, high = record["long_range_gain"]
    told = (
        f"Long-range gain: tokens that see the nearest {record['near']} alone cost {value:+.3f} nats more "
        f"(95 % interval {low:+.3f} to {high:+.3f})."
    )
    if value < LEAST_GAIN:
        told += f" Below {LEAST_GAIN} what stands further back hardly matters, and no cache can lose much."
    sentences = [told]
    if record["tasks"] is not None:
        value, low, high = record["full"]["needle_aware"]
        told = f"Needles found with the full cache: {value:.1f} % (95 % interval {low:.1f} to {high:.1f})."
        sentences.append(told + " Below 95 % the model itself, and not its cache, is being measured." * (value < LEAST_NEEDLE))
    return sentences


def conclusions(record: Record) -> list[str]:
    """A sentence per ratio and signal, and what the default follows from, made of the record's numbers alone."""
    told = []
    for ratio in record["ratios"]:
        for signal, found in ratio["against_uniform"].items():
            value, low, high = found["difference"]["all"]
            outside = sum(low > 0 or high < 0 for _, low, high in found["difference"]["seeds"])
            said = {"better": "beat", "worse": "are worse than", "same": "do not beat"}[found["verdict"]]
            told.append(
                f"Ratio {ratio['ratio']:g}: {signal} budgets {said} uniform ones ({value:+.4f} nats per token, 95 % interval "
                f"{low:+.4f} to {high:+.4f}; outside it in {outside} of {record['seeds']} seeds)."
            )
    if told:
        default = record["default_signal"]
        why = "no other beats it at some ratio without being worse at another" if default == "uniform" else "it beats uniform"
        told.append(f"Signal by the rule of three seeds: {default}, as {why}.")
    return told


def kv_csv(record: Record) -> str:
    """A row per ratio and method: numbers, and of measures the value, the lower and the upper end; they read back bitwise."""
    scopes = [f"{key}{scope}" for key in BY_SEED for scope in ("", *(f"_seed{seed}" for seed in range(record["seeds"])))]
    ends = [f"{key}{end}" for key in (*scopes, *INTERVALS) for end in ("", "_low", "_high")]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["ratio", "method", "slots_least", "slots_most", *NUMBERS, *ends])
    for ratio in record["ratios"]:
        for method in _methods(record, ratio):
            by_seed = [numbers for key in BY_SEED for numbers in (method[key]["all"], *method[key]["seeds"])]
            intervals = [method.get(key) or ("", "", "") for key in INTERVALS]
            measured = [number for numbers in (*by_seed, *intervals) for number in numbers]
            plain = [*(method["slots"] or ("", "")), *(method[key] for key in NUMBERS)]
            writer.writerow([1 if method["name"] == "full" else ratio["ratio"], method["name"], *plain, *measured])
    return out.getvalue()


def kv_markdown(record: Record) -> str:
    """The tables with whole intervals, the change of perplexity by seed, the sentences and the meaning of it all."""
    parts = [f"# Compressed caches on {Path(record['run']).name}", _done(record)]
    parts.append(_bullets([*preconditions(record), *_absent(record)]))
    columns = {heading: key for key, heading in HEADINGS.items() if _is_measured(record, key)}
    for ratio in record["ratios"]:
        methods = _methods(record, ratio)
        rows = [[f"`{method['name']}`", *(_cell(method, key) for key in columns.values())] for method in methods]
        parts += [f"## Ratio {ratio['ratio']:g}", _markdown(["method", *columns], rows)]
        seeds = [[f"`{method['name']}`", *(_interval(numbers, 2) for numbers in method["dppl"]["seeds"])] for method in methods]
        parts += ["ΔPPL % by seed:", _markdown(["method", *(f"seed {seed}" for seed in range(record["seeds"]))], seeds)]
    parts += ["## What this says", _bullets(conclusions(record))] if conclusions(record) else []
    return "\n\n".join([*parts, "## What the words mean", _bullets(_notes(record))]) + "\n"


def write_kv(record: Record, folder: Path, write: Callable[[Path, bytes], Any] = Path.write_bytes) -> None:
    """Writes `FILES` into a folder, which is made if it is missing; the picture last.

    Args:
      write: puts a file into place (`run.atomic_write`).

    Raises:
      UserError: a file cannot be written, or matplotlib is not installed; all but the picture is there then.
    """
    texts = (kv_csv(record), kv_markdown(record), json.dumps(record, indent=1, allow_nan=False) + "\n")
    write_all(folder, dict(zip(FILES, texts, strict=False)), FILES[-1], lambda: draw_kv(record), write)


def draw_kv(record: Record) -> bytes:
    """The picture as PNG: perplexity over the ratio, and needles found, or where there are none equal likeliest tokens.

    Raises:
      UserError: matplotlib is not installed.
    """
    figure = new_figure(11, 4.8)
    losses, finds = figure.subplots(1, 2)
    found, title = ("top1", "same likeliest token as with the full cache, %")
    if record["tasks"] is not None:
        found, title = "needle_aware", "needles found, the question in the prompt, %"
        finds.axhline(record["full"][found][0], color="#bbbbbb", linewidth=1.2, zorder=1)
        finds.set_ylim(-3, 103)
    for axes, key in ((losses, "dppl"), (finds, found)):
        _draw(axes, record, key)
    losses.axhline(0, color="#bbbbbb", linewidth=1.2, label="full", zorder=1)
    losses.set_title("perplexity above the full cache's, %", loc="left", fontsize=10)
    # Linear about zero, where small losses are to be told apart, and logarithmic where some methods are far off.
    ends = [end for ratio in record["ratios"] for method in ratio["methods"] for end in method["dppl"]["all"]]
    low, high = min(-1.0, *ends), max(1.0, *ends)
    ticks = [sign * tick * 10**power for sign in (-1, 1) for power in range(7) for tick in (1, 2, 5)]
    losses.set_yscale("symlog", linthresh=2)
    losses.set_ylim(1.2 * low, 1.2 * high)
    losses.set_yticks([0, *(tick for tick in ticks if low <= tick <= high)])
    losses.yaxis.set_major_formatter("{x:g}")
    losses.minorticks_off()
    finds.set_title(title, loc="left", fontsize=10)
    figure.legend(*losses.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    return as_png(figure)


def _draw(axes: Any, record: Record, key: str) -> None:
    """A line per method."""
    names = dict.fromkeys(method["name"] for ratio in record["ratios"] for method in ratio["methods"])
    for name in names:
        own = [(ratio["ratio"], one) for ratio in record["ratios"] for one in ratio["methods"] if one["name"] == name]
        x, measured = [at for at, _ in own], [_numbers(one, key) or (0, 0, 0) for _, one in own]
        y, bars = [numbers[0] for numbers in measured], [[abs(n[end] - n[0]) for n in measured] for end in (1, 2)]
        shape, colour = MARKS.get(name, (".", "#000000"))
        axes.errorbar(
            x, y, yerr=bars, marker=shape, color=colour, markersize=6, linewidth=1.2, elinewidth=0.8, label=_called(name),
            linestyle="--" if name == "oracle" else "-",
        )  # fmt: skip
    axes.set_xscale("log")
    ticks = [ratio["ratio"] for ratio in record["ratios"]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("share of the slots that is kept")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _done(record: Record) -> str:
    places = " that overlap, as the text is short" if record["overlapping"] else ""
    tasks = "" if record["tasks"] is None else f"; {record['tasks']} needles and as many records to copy"
    return (
        f"{record['run']}: {record['sequences']} sequences{places}, {record['tokens']} tokens of validation text each, "
        f"{record['prompt']} of them as a prompt, drawn with {record['seeds']} seeds; {record['continued']} prompts continued"
        f"{tasks}. Of the text's word 4-grams {100 * record['repeated']:.1f} % stood in it before. Cache in {record['dtype']}, "
        f"{record['device']}."
    )


def _absent(record: Record) -> list[str]:
    lines = [f"Left out: {line}" for line in record["left_out"]]
    if record["tasks"] is None:
        lines.append("Left out: needle and copy tasks, as the tokenizer does not spell each of their words as one token")
    return lines


def _notes(record: Record) -> list[str]:
    """What the words of the tables mean."""
    notes = [
        "full: nothing is given up. streaming: the first tokens and the last ones stay. uniform: what gets attention stays, "
        "and all heads have equal shares. entropy, coverage, loss: the same with shares by what was measured of each head. "
        "random: any tokens stay. oracle: an upper bound and no cache: every query sees its best keys, as many as uniform has "
        "slots.",
        "At a ratio all have as many slots; bytes are those allocated for one row, positions and importances included.",
        "ΔPPL: perplexity of the text behind the prompt, above the full cache's. KL: from the full cache's prediction, in nats "
        "per token. top-1: tokens for which the likeliest one is the same. Tokens of the prompt do not count.",
        "gap: how much of the loss between streaming and oracle is won back; none where the two do not differ for certain.",
        f"same, differs at: greedy continuations beside the full cache's over {record['free_tokens']} tokens: equal tokens, "
        "and the median of how many come before the first other one.",
        "tok/s: decoding 8 rows, the fastest batch, without compiling and reading the prompt.",
        "Intervals are 95 %, bootstrapped over sequences (differences in pairs), one by one: of many some are off by chance.",
    ]
    if record["tasks"] is not None:
        notes.insert(-2, (
            "needle: one of eight facts among lines of the text is asked for; copy: a record of eight facts is said again, up "
            "to its last word. The first number is with the question before the cache when it chooses what stays, the second, "
            "unaware, with the question read afterwards. Both are answered from what stayed, not while the prompt is read."
        ))  # fmt: skip
    return notes


def _called(name: str) -> str:
    return "oracle (upper bound)" if name == "oracle" else name


def _methods(record: Record, ratio: Record) -> list[Record]:
    return [record["full"], *ratio["methods"]]


def _numbers(method: Record, key: str) -> Sequence[float] | None:
    """[value, low, high] of a measure."""
    numbers: Sequence[float] | None = method[key]["all"] if key in BY_SEED else method.get(key)
    return numbers


def _is_measured(record: Record, key: str) -> bool:
    return any(method.get(key) is not None for ratio in record["ratios"] for method in ratio["methods"])


def _short_columns(record: Record) -> list[tuple[str, Callable[[Record], str]]]:
    """Headings of the terminal's table, and what makes their cells."""
    columns: list[tuple[str, Callable[[Record], str]]] = [
        (HEADINGS[key], lambda method, key=key: _short(_numbers(method, key), DIGITS.get(key, 1), key == "dppl"))  # type: ignore[misc]
        for key in ("dppl", "top1")
    ]
    columns.insert(1, (HEADINGS["kl"], lambda method: f"{method['kl']['all'][0]:.4f}"))
    columns.append((HEADINGS["gap_closed"], lambda method: _whole([(method.get("gap_closed") or [None])[0]])))
    columns.append((HEADINGS["diverges"], lambda method: _whole([method["diverges"]])))
    if record["tasks"] is not None:
        for kind in ("needle", "copy"):
            keys = [f"{kind}_{asked}" for asked in ("aware", "agnostic")]
            columns.append((f"{kind} %", lambda method, keys=keys: _whole([method[key][0] for key in keys])))  # type: ignore[misc]
    columns.append((HEADINGS["bytes"], lambda method: _cell(method, "bytes")))
    return [*columns, (HEADINGS["tok_per_s"], lambda method: _cell(method, "tok_per_s"))]


def _table(methods: Sequence[Record], columns: Sequence[tuple[str, Callable[[Record], str]]], width: int) -> Iterator[str]:
    names = ["method", *(method["name"] for method in methods)]
    filled = [[heading, *(cell(method) for method in methods)] for heading, cell in columns]
    names = [f"{name:<{max(map(len, names))}}" for name in names]
    filled = [[f"{cell:>{max(map(len, column))}}" for cell in column] for column in filled]
    while filled:
        fitting, used = 0, len(names[0])
        while fitting < len(filled) and (fitting == 0 or used + 2 + len(filled[fitting][0]) <= width):
            used += 2 + len(filled[fitting][0])
            fitting += 1
        for name, *cells in zip(names, *filled[:fitting], strict=True):
            yield "  ".join([name, *cells]).rstrip()
        filled = filled[fitting:]


def _short(numbers: Sequence[float] | None, digits: int, sign: bool = False) -> str:
    """`1.50 ±0.02`: the value and half the width of its interval."""
    if numbers is None:
        return NOTHING
    value, low, high = numbers
    digits = digits if abs(value) < 100 else 0
    return f"{value:{'+' if sign else ''}.{digits}f} ±{(high - low) / 2:.{digits}f}"


def _whole(numbers: Sequence[float | None]) -> str:
    return " / ".join(NOTHING if number is None else f"{number:.0f}" for number in numbers)


def _cell(method: Record, key: str) -> str:
    """A number with its whole interval."""
    if key in ("bytes", "tok_per_s", "diverges"):
        return NOTHING if method[key] is None else f"{method[key]:,.0f}"
    return _interval(_numbers(method, key), DIGITS.get(key, 1))


def _interval(numbers: Sequence[float] | None, digits: int) -> str:
    if numbers is None:
        return NOTHING
    value, low, high = (f"{number:.{digits}f}" for number in numbers)
    return f"{value} [{low}, {high}]"


def _bullets(sentences: Sequence[str]) -> str:
    return "\n".join(f"* {sentence}" for sentence in sentences)


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [headings, ["---"] * len(headings), *rows])
