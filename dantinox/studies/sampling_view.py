"""The comparison of sampling methods as a table, as files and as a picture, from the record of `studies.sampling`."""

import csv
import io
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dantinox.report.plots import as_png, new_figure, write_all

Record = Mapping[str, Any]
HEADINGS = {
    "excess": "excess",
    "bits_per_byte": "bits/byte",
    "diversity": "diversity",
    "distinct_1": "distinct-1",
    "distinct_2": "distinct-2",
    "distinct_3": "distinct-3",
    "rep_4": "rep-4",
    "self_bleu": "self-BLEU",
    "tok_per_s": "tok/s",
}
COLUMN = 12
NOTHING = "–"
FILES = ("sampling.csv", "sampling.md", "sampling.json", "sampling.png")
# Okabe and Ito's colours, which stay apart for colour-blind eyes, and a shape each: what is not in the list is black.
MARKS = {
    "human": ("*", "#000000"), "greedy": ("x", "#000000"), "temperature": ("o", "#999999"), "top_p": ("v", "#56b4e9"),
    "min_p": ("s", "#0072b2"), "typical": ("^", "#009e73"), "top_n_sigma": ("D", "#b59f00"), "router_guide": ("p", "#e69f00"),
    "router_calibrated": ("P", "#d55e00"), "router_no_attention": ("X", "#cc79a7"), "router_random": ("h", "#6a4c93"),
}  # fmt: skip


def sampling_lines(record: Record, width: int = 100) -> Iterator[str]:
    """What was done, the table, what it says, and what its words mean, in lines of at most `width` where a column fits.

    Columns that do not fit side by side stand below, with the methods repeated.
    """
    width = max(width, 60)
    yield from textwrap.wrap(_done(record), width)
    yield ""
    names = ["method", *(method["name"] for method in record["methods"])]
    settings = ["setting", *(_setting(method) for method in record["methods"])]
    front = [f"{n:<{_widest(names)}}  {s:<{_widest(settings)}}" for n, s in zip(names, settings, strict=True)]
    columns = [[heading, *(_short(method, key) for method in record["methods"])] for key, heading in HEADINGS.items()]
    room = max(1, (width - len(front[0])) // (COLUMN + 2))
    for start in range(0, len(columns), room):
        for name, *cells in zip(front, *columns[start : start + room], strict=True):
            yield (name + "".join(f"  {cell:>{COLUMN}}" for cell in cells)).rstrip()
        yield ""
    for sentence in (*conclusions(record), "", *_notes(record)):
        yield from textwrap.wrap(sentence, width, subsequent_indent="  ") or [""]


def conclusions(record: Record) -> list[str]:
    """A sentence per comparison, made of its numbers alone, to be quoted as it stands."""
    judge = "the model itself" if record["reference"] is None else Path(record["reference"]).name
    told = []
    for pair in record["comparisons"]:
        a, b = pair["a"], pair["b"]
        if pair["verdict"] is None:
            told.append(f"{a} and {b} cannot be compared: plain temperature never came to the diversity of one of them.")
            continue
        value, low, high = pair["differences"]["excess"]
        numbers = f"{value:+.3f} bits per byte at equal diversity, 95 % interval {low:+.3f} to {high:+.3f}, judged by {judge}"
        found = {"same": "is not distinguishable from", "better": "is better than", "worse": "is worse than"}[pair["verdict"]]
        told.append(f"{a} {found} {b} ({numbers}).")
    return told


def sampling_csv(record: Record) -> str:
    """A row per method, three columns per measure: the value, the lower and the upper end; numbers read back bitwise."""
    ends = [f"{key}{end}" for key in HEADINGS for end in ("", "_low", "_high")]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "setting", "at_edge", *ends])
    for method in record["methods"]:
        numbers = [number for key in HEADINGS for number in _numbers(method, key) or ("", "", "")]
        told = " ".join(f"{name}={value!r}" for name, value in method["tuned"].items())
        writer.writerow([method["name"], told, int(method["at_edge"]), *numbers])
    return out.getvalue()


def sampling_markdown(record: Record) -> str:
    """The table with whole intervals, the differences, the sentences and the meaning of it all."""
    headings = ["method", "setting", *HEADINGS.values()]
    rows = [
        [f"`{method['name']}`", _setting(method), *(_long(_numbers(method, key), key) for key in HEADINGS)]
        for method in record["methods"]
    ]
    pairs = [
        [
            f"`{pair['a']}` − `{pair['b']}`",
            *(_long(pair["differences"].get(key), key, "+") for key in HEADINGS if key != "tok_per_s"),
        ]
        for pair in record["comparisons"]
    ]
    parts = [f"# Sampling methods on {Path(record['run']).name}", _done(record), _markdown_table(headings, rows)]
    if pairs:
        parts += ["\n".join(f"* {sentence}" for sentence in conclusions(record))]
        parts += ["Differences:", _markdown_table(["", *list(HEADINGS.values())[:-1]], pairs)]
    return "\n\n".join([*parts, "\n".join(f"* {note}" for note in _notes(record))]) + "\n"


def write_sampling(record: Record, folder: Path, write: Callable[[Path, bytes], Any] = Path.write_bytes) -> None:
    """Writes `FILES` into a folder, which is made if it is missing; the picture last.

    Args:
      write: puts a file into place (`run.atomic_write`).

    Raises:
      UserError: a file cannot be written, or matplotlib is not installed; all but the picture is there then.
    """
    texts = (sampling_csv(record), sampling_markdown(record), json.dumps(record, indent=1, allow_nan=False) + "\n")
    write_all(folder, dict(zip(FILES, texts, strict=False)), FILES[-1], lambda: draw_sampling(record), write)


def draw_sampling(record: Record) -> bytes:
    """The picture as PNG: bits per byte against diversity, all of it and what lies close together once more.

    Raises:
      UserError: matplotlib is not installed.
    """
    figure = new_figure(11, 5)
    panels = figure.subplots(1, 2)
    for axes in panels:
        _draw(axes, record)
    tuned = [method["measures"] for method in record["methods"] if method["tuned"]]
    if tuned:
        panels[1].set_xlim(*_around([m["bits_per_byte"] for m in tuned]))
        panels[1].set_ylim(*_around([m["diversity"] for m in tuned]))
        panels[1].set_title("the tuned methods", loc="left", fontsize=10)
    panels[0].set_title("all, with the temperatures of the grey line", loc="left", fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    return as_png(figure)


def _draw(axes: Any, record: Record) -> None:
    ruler = record["ruler"]
    axes.plot(
        [point["bits_per_byte"] for point in ruler], [point["diversity"] for point in ruler],
        color="#bbbbbb", linewidth=1.2, marker=".", label="plain temperature", zorder=1, clip_on=True,
    )  # fmt: skip
    for point in ruler:
        axes.annotate(
            f"{point['temperature']:g}", (point["bits_per_byte"], point["diversity"]), xytext=(-4, 3), ha="right",
            textcoords="offset points", fontsize=7, color="#888888", annotation_clip=True,
        )  # fmt: skip
    for method in record["methods"]:
        shape, colour = MARKS.get(method["name"], (".", "#000000"))
        (x, *x_ends), (y, *y_ends) = (method["measures"][key] for key in ("bits_per_byte", "diversity"))
        bars = [[[abs(end - at)] for end in ends] for at, ends in ((x, x_ends), (y, y_ends))]
        axes.errorbar(
            x, y, xerr=bars[0], yerr=bars[1], fmt=shape, color=colour, markersize=14 if shape == "*" else 7,
            elinewidth=1, markeredgecolor=colour if shape == "x" else "white", markeredgewidth=1.5 if shape == "x" else 0.6,
            label=method["name"], zorder=3,
        )  # fmt: skip
    axes.set_xlabel("bits per byte under the reference (left: likelier)")
    axes.set_ylabel("diversity (up: more varied)")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _around(intervals: Sequence[Sequence[float]]) -> tuple[float, float]:
    """What holds all intervals, with some air."""
    low, high = min(low for _, low, _ in intervals), max(high for *_, high in intervals)
    air = 0.08 * (high - low) or 0.01
    return low - air, high + air


def _done(record: Record) -> str:
    judge = (
        "Judged by the model itself, which favours its own likeliest texts: low temperatures look better than they are "
        "(--reference names another judge)."
        if record["reference"] is None
        else f"Judged by {record['reference']}."
    )
    return (
        f"{record['run']}: {record['prompts']} prompts of {record['prompt_tokens']} {record['unit']} of validation text, "
        f"{record['seeds']} continuations of each by every method, {record['tokens']} {record['unit']} long. {judge}"
    )


def _notes(record: Record) -> list[str]:
    """What the words of the table mean."""
    unit = record["unit"]
    notes = [
        "human: how the validation text really goes on. Its excess shows how much the reference underrates real text: "
        "likelihood is not all of quality.",
        "excess: bits per byte above plain temperature sampling at the same diversity. Below 0 is better; this decides.",
        "bits/byte: −log2 of a text's probability under the reference, given its prompt, per byte of UTF-8. Lower is likelier.",
        f"diversity: distinct-2 · distinct-3 · distinct-4. distinct-n: different n-grams of {unit} over all of a sample. "
        f"rep-4: share of 4-grams of {unit} that occurred before. self-BLEU: BLEU-4 of the samples of a prompt against each "
        "other; higher is more alike.",
        f"setting: of at most {record['trials']} tried on {record['prompts']} other prompts, the one with the diversity "
        "nearest to that of the real text there. * all of them lay on one side of it. Truncations run at temperature 1; the "
        "router is tuned by fewer candidates, and behind the last one by a higher base_temperature.",
        "Intervals are 95 %, bootstrapped over prompts, one by one: of many comparisons some differ by chance.",
        f"tok/s: median, lowest and highest of batches of the test, methods taking turns; {record['device']}, without "
        "compiling and reading the prompt.",
    ]
    if record["shares"] is not None:
        shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in record["shares"].items())
        notes.append(
            "router_random: the router with the strategy of every token drawn at random, as often as router_calibrated took "
            f"it while it was tuned ({shares}); the strategies themselves are unchanged. Its speed is not measured."
        )
    return notes


def _setting(method: Record) -> str:
    if not method["tuned"]:
        return NOTHING
    return ", ".join(f"{name} {value:g}" for name, value in method["tuned"].items()) + (" *" if method["at_edge"] else "")


def _numbers(method: Record, key: str) -> Sequence[float] | None:
    numbers: Sequence[float] | None = method["tok_per_s"] if key == "tok_per_s" else method["measures"].get(key)
    return numbers


def _short(method: Record, key: str) -> str:
    """`1.502 ±0.018`: the value and half the width of its interval."""
    numbers = _numbers(method, key)
    if numbers is None:
        return NOTHING
    value, low, high = numbers
    return f"{value:.0f}" if key == "tok_per_s" else f"{value:.3f} ±{(high - low) / 2:.3f}"


def _long(numbers: Sequence[float] | None, key: str, sign: str = "") -> str:
    if numbers is None:
        return NOTHING
    digits = 0 if key == "tok_per_s" else 3
    value, low, high = (f"{number:{sign}.{digits}f}" for number in numbers)
    return f"{value} [{low}, {high}]"


def _widest(texts: Sequence[str]) -> int:
    return max(map(len, texts))


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
