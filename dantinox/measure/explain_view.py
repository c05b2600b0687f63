"""The chain of sampling steps as a table and as a picture, from the record that `explain` makes."""

import itertools
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size

from dantinox.config import GenerationSection, UserError
from dantinox.report.console import printable
from dantinox.report.plots import as_png, new_figure

Record = Mapping[str, Any]
COLUMN = 11  # the longest word of a step's name
TOKEN_CELLS = 20
# Okabe and Ito's colours, which stay apart for colour-blind eyes; before is light, after is dark.
BEFORE, REMOVED, AFTER, ACCENT = "#c9ced6", "#eceef1", "#0072b2", "#d55e00"


def explanation_lines(record: Record, width: int = 100) -> Iterator[str]:
    """The table of tokens, that of steps, and what was drawn, in lines of at most `width` where a column fits at all.

    Only steps that change something get a column; where not all fit side by side the tokens are repeated below.
    """
    yield f"the most likely of {record['vocab_size']} tokens behind a prompt of {record['prompt_tokens']}"
    names = _names(record)
    shown = [s for s, step in enumerate(record["steps"]) if step["changed"]]
    room = max(1, (width - cell_len(names[0])) // (COLUMN + 2))
    for start in range(0, len(shown), room):
        part = shown[start : start + room]
        yield ""
        yield from _headings([record["steps"][s] for s in part], names[0])
        for name, *cells in zip(names[1:], *(_column(record, s) for s in part), strict=True):
            yield (name + "".join(f"  {cell:>{COLUMN}}" for cell in cells)).rstrip()
    yield ""
    if any(token["removed_by"] for token in record["tokens"]):
        yield "×  removed by this step"
    if record.get("strategy"):
        yield f"the entropy router chose: {record['strategy']}"
    yield "*  the greedy choice" if record["greedy"] else "*  emitted" if record.get("forced") else "*  drawn"
    yield ""
    yield from (_clipped(line, max(width, 40)) for line in _step_lines(record))
    yield ""
    for line in _drawn_lines(record):
        yield from textwrap.wrap(line, max(width, 40), subsequent_indent="  ")


def plot_explanation(record: Record, out: Path, write: Callable[[Path, bytes], Any] = Path.write_bytes) -> None:
    """Draws one panel per step that changes something: light before it, dark behind it, crosses for removed tokens.

    Args:
      write: puts the PNG into place (`run.atomic_write`).

    Raises:
      UserError: matplotlib is not installed, or the file cannot be written.
    """
    shown = [s for s, step in enumerate(record["steps"]) if step["changed"]]
    pairs = list(itertools.pairwise(shown)) or [(0, 0)]
    chances = [[token["probabilities"][s] for token in record["tokens"]] for s in range(len(record["steps"]))]
    figure = new_figure(8, 0.9 + 1.7 * len(pairs))
    panels = figure.subplots(len(pairs), 1, sharex=True, squeeze=False)[:, 0]
    labels = [_clipped(token["shown"], 12) for token in record["tokens"]]
    for axes, (before, after) in zip(panels, pairs, strict=True):
        draw_step(axes, labels, chances[before], chances[after])
        step = record["steps"][after]
        left, V = step["survivors"], record["vocab_size"]
        told = f"{left} of {V} left" if left < V else f"all {V} left"
        name = step["name"] if step["name"] not in step["settings"] else ""
        title = ", ".join(part for part in (name, _settings(step)) if part)
        axes.set_title(f"{title}: {told}", loc="left", fontsize=9, parse_math=False)
        axes.tick_params(axis="y", labelsize=8)
    drawn = [i for i, token in enumerate(record["tokens"]) if token["id"] in record["drawn"]]
    panels[-1].plot(drawn, [chances[shown[-1]][i] for i in drawn], "v", color=ACCENT, label=_how(record), clip_on=False)
    panels[-1].legend(frameon=False, fontsize=8)
    try:
        write(out, as_png(figure))
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None


def draw_step(axes: Any, labels: Sequence[str], before: Sequence[float], after: Sequence[float] | None = None) -> None:
    """One step over some tokens: light bars before it, dark ones after it, the places of removed tokens crossed out."""
    places = range(len(labels))
    kept = before if after is None else after
    gone = [i for i in places if before[i] > 0 and kept[i] == 0]
    axes.bar(
        places, before, width=0.86, color=[BEFORE if kept[i] else REMOVED for i in places], edgecolor=BEFORE, linewidth=0.5
    )
    if after is not None:
        axes.bar(places, after, width=0.5, color=AFTER)
    if gone:  # an empty curve that is not clipped upsets the layout
        axes.plot(gone, [0] * len(gone), "x", color=ACCENT, markersize=3, markeredgewidth=0.9, clip_on=False, zorder=5)
    upright = max(map(len, labels), default=0) <= 2
    axes.set_xticks(places, labels, rotation=0 if upright else 90, fontsize=7, fontfamily="DejaVu Sans Mono", parse_math=False)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.7, len(labels) - 0.3)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("probability", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _names(record: Record) -> list[str]:
    """The first columns: mark, rank, id and token, under their headings; the last line is for all other tokens."""
    rows = [
        ("*" if token["id"] in record["drawn"] else "", str(rank), str(token["id"]), token["shown"])
        for rank, token in enumerate(record["tokens"], 1)
    ]
    others = record["vocab_size"] - len(rows)
    every = [("", "", "id", "token"), *rows, *([("", "", "", f"{others} others")] if others else [])]
    texts = [_clipped(row[3], TOKEN_CELLS) for row in every]
    token_cells = max(cell_len(text) for text in texts)
    id_cells = max(len(row[2]) for row in every)
    return [
        f"{mark:1} {rank:>2}  {name:>{id_cells}}  {set_cell_size(text, token_cells)}"
        for (mark, rank, name, _), text in zip(every, texts, strict=True)
    ]


def _column(record: Record, s: int) -> list[str]:
    """A cell per token, and what the other tokens have together."""
    step = record["steps"][s]
    chances = [token["probabilities"][s] for token in record["tokens"]]
    removed = [token["removed_by"] for token in record["tokens"]]
    lost = {earlier["name"] for earlier in record["steps"][:s]}
    cells = ["×" if by == step["name"] else "" if by in lost else _percent(p) for p, by in zip(chances, removed, strict=True)]
    return [*cells, *([_percent(step["others"])] if len(cells) < record["vocab_size"] else [])]


def _headings(steps: Sequence[Record], name: str) -> Iterator[str]:
    """Lines with the names of steps over their columns, the last one with `name` in front."""
    headings = [_heading(step) for step in steps]
    height = max(map(len, headings))
    for line in range(height):
        words = (heading[line - height + len(heading)] if line >= height - len(heading) else "" for heading in headings)
        front = name if line == height - 1 else " " * cell_len(name)
        yield (front + "".join(f"  {word:>{COLUMN}}" for word in words)).rstrip()


def _heading(step: Record) -> list[str]:
    """The words of a step's name in lines that fit a column, and its number where it has just one."""
    lines: list[str] = []
    for word in step["name"].split("_"):
        if lines and len(lines[-1]) + 1 + len(word) <= COLUMN:
            lines[-1] += "_" + word
        else:
            lines.append(word)
    values = list(_given(step).values())
    if len(values) != 1 or isinstance(values[0], str):
        return lines
    return [*lines, f"({len(values[0])})" if isinstance(values[0], list | dict) else f"{values[0]:g}"]


def _step_lines(record: Record) -> Iterator[str]:
    """A line per step: how many tokens it left, their mass under the model, the entropy behind it."""
    rows = [
        (step["name"], str(step["survivors"]), _percent(step["mass"]), f"{step['entropy']:.2f} bits", _settings(step))
        for step in record["steps"]
    ]
    rows = [("step", "left", "mass", "entropy", ""), *rows]
    name, left, mass, entropy = (max(len(row[i]) for row in rows) for i in range(4))
    for row in rows:
        yield f"{row[0]:<{name}}  {row[1]:>{left}}  {row[2]:>{mass}}  {row[3]:>{entropy}}  {row[4]}".rstrip()


def _drawn_lines(record: Record) -> Iterator[str]:
    by_id = {token["id"]: token for token in record["tokens"]}
    for sample, token_id in enumerate(record["drawn"]):
        token = by_id[token_id]
        which = f", sample {sample}" if len(record["drawn"]) > 1 and not record["greedy"] else ""
        first, last = token["probabilities"][0], token["probabilities"][-1]
        then = "" if record["greedy"] or record.get("forced") else f", {_percent(last)} where it was drawn"
        yield f"{_how(record)}{which}: {token['shown']} (id {token_id}), {_percent(first)} under the model{then}"
        if record["greedy"]:
            return


def _how(record: Record) -> str:
    if record.get("forced"):
        return "emitted by the router"
    return "greedy" if record["greedy"] else f"drawn with seed {record['seed']}"


def _settings(step: Record) -> str:
    """`top_p 0.9`, and after a step that changed nothing that it did not."""
    parts = [f"{key} {_value(value)}" for key, value in _given(step).items()]
    return ", ".join(parts) + ("" if step["changed"] else " (changes nothing here)")


def _given(step: Record) -> dict[str, Any]:
    """The settings of a step without refinements that have their default."""
    fields = GenerationSection.model_fields
    return {key: value for i, (key, value) in enumerate(step["settings"].items()) if i == 0 or value != fields[key].default}


def _value(value: Any) -> str:
    if isinstance(value, list | dict):
        return _clipped(printable(json.dumps(value, ensure_ascii=False)), 40)
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _percent(p: float) -> str:
    if p == 0:
        return "0%"
    return f"{100 * p:.2f}%" if p >= 0.00005 else "<0.01%"


def _clipped(text: str, cells: int) -> str:
    return text if cell_len(text) <= cells else set_cell_size(text, cells - 1).rstrip() + "…"
