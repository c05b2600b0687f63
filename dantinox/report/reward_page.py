"""The HTML page of a training run with rewards: the curve of the rewards, and sampled answers with
their rewards.

The page is a single file without scripts that loads nothing else. Generated text is escaped.
"""

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT, MARGIN = 720, 240, 40  # pixels
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2rem auto;
  padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; }
td, th { border-top: 1px solid #ddd; padding: .2rem .5rem; text-align: left; }
td { vertical-align: top; white-space: pre-wrap; overflow-wrap: anywhere; }
td.number { text-align: right; }
summary { cursor: pointer; font-weight: 600; margin: .6rem 0; }
text { font-size: 12px; fill: #555; }
"""


def reward_page(rows: Sequence[Mapping[str, Any]], samples: Mapping[int, str]) -> str:
    """Returns the HTML of the page, to be written as UTF-8.

    Args:
      rows: the rows of metrics.jsonl.
      samples: step → the content of its file of samples, in JSON Lines.
    """
    curves = {
        "training": _points(rows, "interval", "reward"),
        "validation": _points(rows, "evaluation", "val_reward"),
    }
    parts = [
        f"<details{' open' if step == max(samples) else ''}><summary>Step"
        f" {step}</summary>{_table(samples[step])}</details>"
        for step in sorted(samples, reverse=True)
    ]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Rewards</title>'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<style>{STYLE}</style></head><body><h1>Rewards</h1>{_svg(curves)}<h2>Answers</h2>{''.join(parts)}</body></html>\n"
    )


def _points(rows: Sequence[Mapping[str, Any]], kind: str, name: str) -> list[tuple[float, float]]:
    found = [
        (row["step"], row[name])
        for row in rows
        if row.get("kind") == kind and row.get(name) is not None
    ]
    return [(step, value) for step, value in found if math.isfinite(value)]


def _svg(curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Returns the curves as lines over the step; the numbers at the axes are the smallest and the
    largest values.
    """
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return "<p>No rewards yet.</p>"
    steps, values = zip(*points, strict=True)
    low = min(values)
    high = max(values)
    last = max(steps)
    scale = (high - low) or 1.0

    def place(step: float, value: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / last
        return f"{x:.1f},{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (value - low) / scale:.1f}"

    lines = "".join(
        f'<polyline fill="none" stroke="{color}" stroke-width="2"'
        f' points="{" ".join(place(*point) for point in curve)}"/><text x="{WIDTH - MARGIN - 90}"'
        f' y="{MARGIN + 16 * number}" style="fill:{color}">{name}</text>'
        for number, (color, (name, curve)) in enumerate(
            zip(("#8aa4c8", "#c2410c"), curves.items(), strict=True)
        )
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="mean reward by'
        f' step">{lines}<text x="0" y="{MARGIN}">{high:.3g}</text><text x="0"'
        f' y="{HEIGHT - MARGIN}">{low:.3g}</text><text x="{MARGIN}" y="{HEIGHT - 12}">step'
        f' 0</text><text x="{WIDTH - 2 * MARGIN}" y="{HEIGHT - 12}">{last:g}</text></svg>'
    )


def _table(lines: str) -> str:
    """Returns the answers of a step as a table. The prompt is shown once for all of its answers."""
    rows = []
    before = None
    for sample in map(json.loads, lines.splitlines()):
        if sample["prompt"] != before:
            before = sample["prompt"]
            rows.append(f"<tr><th colspan=3>{html.escape(before)}</th></tr>")
        scores = ", ".join(f"{name} {value:g}" for name, value in sample["rewards"].items())
        cells = [html.escape(sample["answer"]), html.escape(scores)]
        rows.append(
            f'<tr><td class="number">{sample["reward"]:g}</td>'
            f"<td>{cells[0]}</td><td>{cells[1]}</td></tr>"
        )
    return f"<table>{''.join(rows)}</table>"
