"""Table, plot and report of `dantinox explain`."""

import itertools
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dantinox.config import GenerationSection
from dantinox.lab.measure.explain import Explanation, Step, Token
from dantinox.lab.measure.explain_attention_view import head_lines, head_map
from dantinox.report.console import printable
from dantinox.report.document import Block, Heading, Paragraph, Verbatim
from dantinox.report.plots import new_figure, to_png
from dantinox.report.tables import clip_cells, percent, side_by_side, wrap_lines

COLUMN = 11  # the longest word in the name of a step
TOKEN_CELLS = 20
KEYS = 10  # keys in the table of --attention
REPORT_WIDTH = 88  # characters of a line in the report
# Okabe and Ito's colors, which color-blind readers can distinguish; before is light, after is dark.
BEFORE, REMOVED, AFTER, ACCENT = "#c9ced6", "#eceef1", "#0072b2", "#d55e00"


def explanation_lines(explanation: Explanation, width: int = 100) -> Iterator[str]:
    """Yields the table of tokens, the table of steps and the samples, in lines of at most `width`
    if a column fits in it.

    Only steps that change the distribution get a column. If not all columns fit side by side, the
    table continues below and repeats the tokens.
    """
    yield (
        f"the most likely of {explanation.vocab_size} tokens after a prompt of"
        f" {explanation.prompt_tokens}"
    )
    yield ""
    yield from side_by_side([*_names(explanation), *_probabilities(explanation)], width, front=4)
    yield ""
    if any(token.removed_by for token in explanation.tokens):
        yield "×  removed by this step"
    if explanation.strategy:
        yield f"the entropy router chose: {explanation.strategy}"
    yield f"*  {_star_meaning(explanation)}"
    yield ""
    rows = [
        (s.name, str(s.survivors), percent(s.mass, 2), f"{s.entropy:.2f} bits")
        for s in explanation.steps
    ]
    columns = zip(("step", "left", "mass", "entropy"), *rows, strict=True)
    for line, settings in zip(
        side_by_side(list(columns)), ["", *map(_settings, explanation.steps)], strict=True
    ):
        yield clip_cells(f"{line}  {settings}".rstrip(), max(width, 40))
    yield ""
    if explanation.attention is not None:
        yield "attention of the last token of the prompt: mean over the heads (least to largest)"
        yield from side_by_side(_attention_columns(explanation.attention), width)
        yield ""
    if explanation.head is not None:
        yield from head_lines(explanation.head, KEYS, width)
        yield ""
    yield from wrap_lines(_drawn_lines(explanation), max(width, 40))


def explanation_blocks(explanation: Explanation) -> Iterator[Block]:
    """Yields the report: the prompt, the map of the head if there is one, and the tables of the
    console.
    """
    yield Heading("The next token", 1)
    yield Paragraph("The text before it:")
    yield Verbatim(printable(explanation.prompt))
    if explanation.head is not None:
        yield Heading("Attention between the tokens")
        yield head_map(explanation.head)
    yield Heading("Each sampling step")
    yield Verbatim("\n".join(explanation_lines(explanation, REPORT_WIDTH)))


def _star_meaning(explanation: Explanation) -> str:
    if explanation.greedy:
        return "the greedy choice"
    return "emitted" if explanation.forced else "drawn"


def _attention_columns(attention: Mapping[str, Sequence[Sequence[float]]]) -> list[list[str]]:
    """Returns a row for each layer: of every statistic the mean over the heads, and the least and
    largest value.
    """
    layers = len(attention["entropy"])
    columns = [["layer", *map(str, range(layers))]]
    for name, values_LH in attention.items():
        cells = [
            f"{sum(heads) / len(heads):.2f} ({min(heads):.2f} to {max(heads):.2f})"
            for heads in values_LH
        ]
        columns.append([name, *cells])
    return columns


def _names(explanation: Explanation) -> list[list[str]]:
    """Returns the first columns: mark, rank, id and token, the last two with headings. The last
    line is for other tokens.
    """
    rows = [
        (
            "*" if token.id in explanation.drawn else " ",
            f"{rank:>2}",
            str(token.id),
            clip_cells(token.shown, TOKEN_CELLS),
        )
        for rank, token in enumerate(explanation.tokens, 1)
    ]
    digits = max([2, *(len(row[2]) for row in rows)])
    others = explanation.vocab_size - len(rows)
    rows = [
        (" ", "  ", "id", "token"),
        *rows,
        *([(" ", "  ", "", f"{others} others")] if others else []),
    ]
    return [
        list(column)
        for column in zip(*((a, b, f"{c:>{digits}}", d) for a, b, c, d in rows), strict=True)
    ]


def _probabilities(explanation: Explanation) -> Iterator[list[str]]:
    """Yields a column for each step that changes the distribution: name, a cell per token, total of
    the other tokens.
    """
    earlier_steps: set[str | None] = set()
    for s, step in enumerate(explanation.steps):
        if step.changed:

            def cell(token: Token, s: int = s, name: str = step.name) -> str:
                if token.removed_by == name:
                    return "×"
                return (
                    "" if token.removed_by in earlier_steps else percent(token.probabilities[s], 2)
                )

            others = (
                [percent(step.others, 2)]
                if len(explanation.tokens) < explanation.vocab_size
                else []
            )
            yield [_column_heading(step), *map(cell, explanation.tokens), *others]
        earlier_steps.add(step.name)


def _column_heading(step: Step) -> str:
    """Returns the name of a step in lines that fit a column, and the value of its setting if it has
    exactly one number.
    """
    lines = [line.replace(" ", "_") for line in textwrap.wrap(step.name.replace("_", " "), COLUMN)]
    values = list(_nondefault_settings(step).values())
    if len(values) == 1 and not isinstance(values[0], str):
        lines.append(
            f"({len(values[0])})" if isinstance(values[0], list | dict) else f"{values[0]:g}"
        )
    return "\n".join(lines)


def _drawn_lines(explanation: Explanation) -> Iterator[str]:
    tokens = {token.id: token for token in explanation.tokens}
    for sample, token_id in enumerate(
        explanation.drawn[:1] if explanation.greedy else explanation.drawn
    ):
        token = tokens[token_id]
        which = (
            f", sample {sample}" if len(explanation.drawn) > 1 and not explanation.greedy else ""
        )
        first, last = (percent(token.probabilities[s], 2) for s in (0, -1))
        then = "" if explanation.greedy or explanation.forced else f", {last} after all steps"
        yield (
            f"{_draw_method(explanation)}{which}: {token.shown} (id {token_id}), {first} under the"
            f" model{then}"
        )


def _draw_method(explanation: Explanation) -> str:
    if explanation.forced:
        return "emitted by the router"
    return "greedy" if explanation.greedy else f"drawn with seed {explanation.seed}"


def _settings(step: Step) -> str:
    """Returns the settings of a step, such as `top_p 0.9`, and a remark if the step changed
    nothing.
    """
    parts = [f"{key} {_value(value)}" for key, value in _nondefault_settings(step).items()]
    return ", ".join(parts) + ("" if step.changed else " (changes nothing here)")


def _nondefault_settings(step: Step) -> dict[str, Any]:
    """Returns the main setting of a step, and its other settings if they differ from their
    defaults.
    """
    fields = GenerationSection.model_fields
    return {
        key: value
        for i, (key, value) in enumerate(step.settings.items())
        if i == 0 or value != fields[key].default
    }


def _value(value: Any) -> str:
    if isinstance(value, list | dict):
        return clip_cells(printable(json.dumps(value, ensure_ascii=False)), 40)
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def draw_explanation(explanation: Explanation) -> bytes:
    """Plots a panel for each step that changes the distribution; see `draw_step`."""
    shown = [s for s, step in enumerate(explanation.steps) if step.changed]
    pairs = list(itertools.pairwise(shown)) or [(0, 0)]
    figure = new_figure(8, 0.9 + 1.7 * len(pairs))
    panels = figure.subplots(len(pairs), 1, sharex=True, squeeze=False)[:, 0]
    labels = [clip_cells(token.shown, 12) for token in explanation.tokens]
    for axes, pair in zip(panels, pairs, strict=True):
        draw_step(
            axes, labels, *([token.probabilities[s] for token in explanation.tokens] for s in pair)
        )
        step = explanation.steps[pair[1]]
        V = explanation.vocab_size
        left = f"{step.survivors} of {V} left" if step.survivors < V else f"all {V} left"
        title = ", ".join(
            part
            for part in (step.name if step.name not in step.settings else "", _settings(step))
            if part
        )
        axes.set_title(f"{title}: {left}", loc="left", fontsize=9, parse_math=False)
        axes.tick_params(axis="y", labelsize=8)
    drawn = [
        (i, token.probabilities[shown[-1]])
        for i, token in enumerate(explanation.tokens)
        if token.id in explanation.drawn
    ]
    panels[-1].plot(
        *zip(*drawn, strict=True), "v", color=ACCENT, label=_draw_method(explanation), clip_on=False
    )
    panels[-1].legend(frameon=False, fontsize=8)
    return to_png(figure)


def draw_step(
    axes: Any, labels: Sequence[str], before: Sequence[float], after: Sequence[float] | None = None
) -> None:
    """Draws probabilities before a step as light bars, those after it as dark bars, and removed
    tokens as crosses.
    """
    positions = range(len(labels))
    kept = before if after is None else after
    removed = [i for i in positions if before[i] > 0 and kept[i] == 0]
    colors = [BEFORE if left else REMOVED for left in kept]
    axes.bar(positions, before, width=0.86, color=colors, edgecolor=BEFORE, linewidth=0.5)
    if after is not None:
        axes.bar(positions, after, width=0.5, color=AFTER)
    if removed:  # an empty unclipped curve breaks the layout
        axes.plot(
            removed,
            [0] * len(removed),
            "x",
            color=ACCENT,
            markersize=3,
            markeredgewidth=0.9,
            clip_on=False,
            zorder=5,
        )
    upright = max(map(len, labels), default=0) <= 2
    axes.set_xticks(
        positions,
        labels,
        rotation=0 if upright else 90,
        fontsize=7,
        fontfamily="DejaVu Sans Mono",
        parse_math=False,
    )
    axes.tick_params(axis="x", length=0)
    axes.set(xlim=(-0.7, len(labels) - 0.3), ylim=(0, None))
    axes.set_ylabel("probability", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
