"""A map of shares as an SVG drawing for HTML: a cell per row and column, darker for a larger share.

The drawing has no colors of its own. `document.css` defines them for light and dark pages by the
class of each element, because the Content-Security-Policy of a report forbids other styles.
"""

import html
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from dantinox.report.tables import percent

LETTER = 6.7  # width of a letter of the labels, in pixels
MAP_WIDTH = 890  # of a map in pixels, unless the limits of its cells require another
MIN_CELL, MAX_CELL = 13, 44
NUMBER_CELL = 30  # the smallest cell that has its number inside
SLANTED_CELL = 20  # the smallest cell with a slanted label; smaller ones have vertical labels
LEGEND = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
LEGEND_STEP, LEGEND_HEIGHT = 60, 34  # pixels from one entry to the next; of the whole legend
LEAST = 0.0005  # smaller shares are not drawn
DARK = 0.6  # opacity above which the number inside a cell has the color of the page


class HeatMap(NamedTuple):
    """Shares in [0, 1] by row and column.

    Attributes:
      rows, columns: the labels.
      shares: a number for each column of each row; None: nothing is drawn, no background either.
      caption: what the map shows.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    shares: Sequence[Sequence[float | None]]
    caption: str


def heat_map_svg(heat_map: HeatMap) -> str:
    """Returns the drawing, with rows from top to bottom and a tooltip for each cell."""
    left = 12 + math.ceil(LETTER * max(_widths(heat_map.rows), default=0))
    longest = math.ceil(LETTER * max(_widths(heat_map.columns), default=0))
    count = max(len(heat_map.columns), 1)
    overhang = math.ceil(longest * math.sqrt(0.5))  # of a slanted label, to the right and upward
    slanted = (MAP_WIDTH - left - overhang) // count >= SLANTED_CELL
    right, above = (overhang, overhang) if slanted else (4, longest)
    cell = max(MIN_CELL, min(MAX_CELL, (MAP_WIDTH - left - right) // count))
    top = 16 + above
    width = max(left + cell * count + right, left + LEGEND_STEP * len(LEGEND))
    height = top + cell * len(heat_map.rows) + LEGEND_HEIGHT
    parts = [
        (
            f'<svg class="map" role="img" aria-label="{html.escape(heat_map.caption)}" '
            f'width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        ),
        *_column_labels(heat_map.columns, left, top, cell, slanted),
        *_rows(heat_map, left, top, cell),
        *_legend(left, height - 12),
        "</svg>",
    ]
    return "\n".join(parts)


def _widths(labels: Sequence[str]) -> Iterator[int]:
    """Yields the width of each label in letters; a wide character counts as two."""
    from rich.cells import cell_len

    return map(cell_len, labels)


def _column_labels(
    labels: Sequence[str], left: int, top: int, cell: int, slanted: bool
) -> Iterator[str]:
    angle = -45 if slanted else -90
    for c, label in enumerate(labels):
        x = left + cell * c + cell / 2 + 4
        place = f"translate({x:g} {top - 7}) rotate({angle})"
        yield f'<text transform="{place}">{html.escape(label)}</text>'


def _rows(heat_map: HeatMap, left: int, top: int, cell: int) -> Iterator[str]:
    """Yields a group per row: a band that is visible under the pointer, label, background,
    cells.
    """
    for r, (label, shares) in enumerate(zip(heat_map.rows, heat_map.shares, strict=True)):
        y = top + cell * r
        width = left + cell * len(shares)
        yield f'<g><rect class="band" x="0" y="{y}" width="{width}" height="{cell}"/>'
        place = f'x="{left - 6}" y="{y + cell / 2 + 4:g}" text-anchor="end"'
        yield f"<text {place}>{html.escape(label)}</text>"
        for first, end in _runs(shares):
            yield _background(left + cell * first, y, cell * (end - first), cell)
        for c, share in enumerate(shares):
            if share is not None and share >= LEAST:
                title = html.escape(f"{label} → {heat_map.columns[c]}: {percent(share, 2)}")
                yield _cell(left + cell * c, y, cell, share, title)
        yield "</g>"


def _runs(shares: Sequence[float | None]) -> Iterator[tuple[int, int]]:
    """Yields the first and the end column of each run of columns that have a share."""
    column = 0
    for present, run in groupby(shares, lambda share: share is not None):
        first, column = column, column + len(list(run))
        if present:
            yield first, column


def _background(x: int, y: int, width: int, cell: int) -> str:
    return f'<rect class="empty" x="{x}" y="{y}" width="{width - 1}" height="{cell - 1}"/>'


def _square(x: int, y: int, side: int, share: float) -> str:
    place = f'x="{x}" y="{y}" width="{side}" height="{side}"'
    return f'<rect class="share" {place} fill-opacity="{shade(share):.3f}">'


def _cell(x: int, y: int, cell: int, share: float, title: str) -> str:
    side = cell - 1
    drawn = f"{_square(x, y, side, share)}<title>{title}</title></rect>"
    if cell < NUMBER_CELL:
        return drawn
    kind = "on" if shade(share) > DARK else "off"
    digits = 1 if share < 0.0995 else 0
    middle = f'x="{x + side / 2:g}" y="{y + side / 2 + 4:g}" text-anchor="middle"'
    return f'{drawn}<text class="{kind}" {middle}>{100 * share:.{digits}f}</text>'


def _legend(left: int, y: int) -> Iterator[str]:
    for i, share in enumerate(LEGEND):
        x = left + LEGEND_STEP * i
        yield f'<rect class="empty" x="{x}" y="{y - 10}" width="12" height="12"/>'
        yield f"{_square(x, y - 10, 12, share)}</rect>"
        yield f'<text x="{x + 17}" y="{y}">{100 * share:g} %</text>'


def shade(share: float) -> float:
    """Returns the opacity of a share: its square root, so that small shares are visible."""
    return math.sqrt(min(max(share, 0.0), 1.0))
