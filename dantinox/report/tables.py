"""Tables as text, Markdown and CSV from one declaration of columns, and formatted numbers."""

import csv
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

NOTHING = "–"


class Column(NamedTuple):
    """A column of a table.

    Attributes:
      name: its heading in CSV.
      heading: its heading elsewhere.
      value: what a row has in it: text, a number, None, or where `interval` is set [value, low, high] or None.
      form: of a number, as `format` takes it; digits behind the point are dropped from 100 on.
      interval: it takes three columns of a CSV, and Markdown shows both ends.
      spread: text shows half the width of the interval too.
    """

    name: str
    heading: str
    value: Callable[[Any], Any]
    form: str = ".3f"
    interval: bool = False
    spread: bool = True

    def number(self, value: Any) -> str:
        if value is None or isinstance(value, str):
            return value or NOTHING
        form = re.sub(r"[.]\d", ".0", self.form) if abs(value) >= 100 else self.form
        return f"{value:{form}}"

    def short(self, row: Any) -> str:
        """`1.502 ±0.018`: the value and half the width of its interval."""
        found = self.value(row)
        if not self.interval or found is None:
            return self.number(found)
        value, low, high = found
        digits = 0 if abs(value) >= 100 else self.form[-2]
        return self.number(value) + f" ±{(high - low) / 2:.{digits}f}" * self.spread

    def long(self, row: Any) -> str:
        """`1.502 [1.484, 1.520]`."""
        found = self.value(row)
        if not self.interval or found is None:
            return self.number(found)
        value, low, high = (f"{number:{self.form}}" for number in found)
        return f"{value} [{low}, {high}]"


def text_table(columns: Sequence[Column], rows: Sequence[Any], width: int, front: int = 1) -> Iterator[str]:
    """The table in lines of at most `width`, see `side_by_side`."""
    return side_by_side([[column.heading, *map(column.short, rows)] for column in columns], width, front)


def markdown_table(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    lines = [[column.heading for column in columns], ["---"] * len(columns)]
    lines += [[column.long(row) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def csv_table(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """Numbers read back bitwise; what there is not is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([c.name + end for c in columns for end in (("", "_low", "_high") if c.interval else ("",))])
    for row in rows:
        found = [(c.value(row) or [None] * 3) if c.interval else [c.value(row)] for c in columns]
        writer.writerow([cell for cells in found for cell in cells])
    return out.getvalue()


def side_by_side(columns: Sequence[Sequence[str]], width: int = 1 << 30, front: int = 1) -> Iterator[str]:
    """Columns of text, each under its first cell, which may have several lines.

    The first `front` columns are set to the left, the others to the right. Those that do not fit in a width stand below,
    behind an empty line, with the first ones repeated.
    """
    from rich.cells import cell_len

    wide = [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in columns]
    start = front
    while start < max(len(columns), front + 1):
        stop = start + 1
        while stop < len(columns) and sum(wide[:front]) + sum(wide[start : stop + 1]) + 2 * (front + stop - start) <= width:
            stop += 1
        block = [*range(front), *range(start, min(stop, len(columns)))]
        if start > front:
            yield ""
        heads = [columns[i][0].split("\n") for i in block]
        height = max(map(len, heads))
        rows = [*zip(*([""] * (height - len(head)) + head for head in heads), strict=True)]
        for row in [*rows, *zip(*(columns[i][1:] for i in block), strict=True)]:
            padding = [" " * (wide[i] - cell_len(cell)) for i, cell in zip(block, row, strict=True)]
            cells = [c + p if i < front else p + c for i, c, p in zip(block, row, padding, strict=True)]
            yield "  ".join(cells).rstrip()
        start = stop


def table(rows: Iterable[tuple[str, object]]) -> str:
    """Two columns of plain text, a line per row."""
    rows = [(name, str(value)) for name, value in rows]
    width = max((len(name) for name, _ in rows), default=0)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in rows)


def wrapped(sentences: Iterable[str], width: int, indent: str = "  ") -> Iterator[str]:
    """Sentences in lines of at most `width`; an empty one is an empty line."""
    for sentence in sentences:
        yield from textwrap.wrap(sentence, width, subsequent_indent=indent) or [""]


def bullets(sentences: Iterable[str]) -> str:
    return "\n".join(f"* {sentence}" for sentence in sentences)


def percent(share: float, digits: int = 1) -> str:
    """`12.6%`, and `<0.1%` for a share that would look like none."""
    least = 10.0**-digits
    return f"{100 * share:.{digits}f}%" if share == 0 or 100 * share >= least else f"<{least:g}%"


def human_bytes(count: float) -> str:
    """`1.4 GB`, in powers of 1000 as disks and devices are sold."""
    return _scaled(count, (" B", " kB", " MB", " GB", " TB"))


def human_count(count: float) -> str:
    """`812`, `25.1k`, `1.31M`, `7.0B`."""
    return _scaled(count, ("", "k", "M", "B", "T"))


def _scaled(count: float, units: Sequence[str]) -> str:
    """Three digits and a unit."""
    power = 0
    while abs(count) >= 999.5 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    digits = 0 if power == 0 or abs(count) >= 99.95 else 1 if abs(count) >= 9.995 else 2
    return f"{count:.{digits}f}{units[power]}"


def human_time(seconds: float) -> str:
    """`41s`, `2m05s`, `3h07m`, `2d04h`."""
    whole = max(0, round(seconds))
    for large, small, units in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= large:
            return f"{whole // large}{units[0]}{whole % large // small:02d}{units[1]}"
    return f"{whole}s"
