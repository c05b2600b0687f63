"""Tables as text, Markdown and CSV from one declaration of columns, and formatted numbers."""

import csv
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

MISSING_CELL = "–"
TEXT, MARKDOWN, CSV = "text", "markdown", "csv"  # the outputs of a table


class Column(NamedTuple):
    """A column of a table.

    Attributes:
      name: heading in CSV.
      heading: heading in text and Markdown.
      value: returns a row's cell: text, a number or None; with `interval` set, [value, low, high]
        or None.
      form: format specification of a number; numbers of 100 and more have no decimals.
      interval: whether the value has an interval. The CSV table then has three columns for it, and
        Markdown shows both ends.
      spread: whether the text table shows half the width of the interval after the value.
      outputs: the outputs that have this column; HTML is like Markdown.
    """

    name: str
    heading: str
    value: Callable[[Any], Any]
    form: str = ".3f"
    interval: bool = False
    spread: bool = True
    outputs: Sequence[str] = (TEXT, MARKDOWN, CSV)

    def number(self, value: Any) -> str:
        """Formats one cell: a number by `form`, text as it is, None as a dash."""
        if value is None or isinstance(value, str):
            return value or MISSING_CELL
        form = re.sub(r"[.]\d", ".0", self.form) if abs(value) >= 100 else self.form
        return f"{value:{form}}"

    def short(self, row: Any) -> str:
        """Formats a row's value and half the width of its interval: `1.502 ±0.018`."""
        found = self.value(row)
        if not self.interval or found is None:
            return self.number(found)
        value, low, high = found
        digits = 0 if abs(value) >= 100 else self.form[-2]
        return self.number(value) + f" ±{(high - low) / 2:.{digits}f}" * self.spread

    def long(self, row: Any) -> str:
        """Formats a row's value and its interval: `1.502 [1.484, 1.520]`."""
        found = self.value(row)
        if not self.interval or found is None:
            return self.number(found)
        value, low, high = (f"{number:{self.form}}" for number in found)
        return f"{value} [{low}, {high}]"


def columns_of(columns: Sequence[Column], output: str) -> list[Column]:
    """Returns the columns that an output has."""
    return [column for column in columns if output in column.outputs]


def text_table(
    columns: Sequence[Column], rows: Sequence[Any], width: int = 1 << 30, front: int = 1
) -> Iterator[str]:
    """Yields the table in lines of at most `width` characters; see `side_by_side`."""
    cells = [[column.heading, *map(column.short, rows)] for column in columns_of(columns, TEXT)]
    return side_by_side(cells, width, front)


def markdown_table(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """Formats the table as Markdown."""
    columns = columns_of(columns, MARKDOWN)
    lines = [[column.heading for column in columns], ["---"] * len(columns)]
    lines += [[column.long(row) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def csv_table(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """Formats the table as CSV. Numbers are written exactly; a missing value is an empty cell."""
    columns = columns_of(columns, CSV)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([
        column.name + end for column in columns for end in (("", "_low",
            "_high") if column.interval else ("",))
    ])  # fmt: skip
    for row in rows:
        found = [
            (column.value(row) or [None] * 3) if column.interval else [column.value(row)]
            for column in columns
        ]
        writer.writerow([cell for cells in found for cell in cells])
    return out.getvalue()


def side_by_side(
    columns: Sequence[Sequence[str]], width: int = 1 << 30, front: int = 1
) -> Iterator[str]:
    """Yields the lines of a table. A column is a sequence of cells; the first is the heading, which
    may have several lines.

    The first `front` columns are aligned left, the others right. Columns that do not fit into
    `width` characters follow below, after an empty line, with the first `front` columns repeated.
    """
    from rich.cells import cell_len

    wide = [
        max(cell_len(line) for cell in column for line in cell.split("\n")) for column in columns
    ]
    start = front
    while start < max(len(columns), front + 1):  # once even without other columns
        stop = start + 1
        while (
            stop < len(columns)
            and sum(wide[:front]) + sum(wide[start : stop + 1]) + 2 * (front + stop - start)
            <= width
        ):
            stop += 1
        block = [*range(front), *range(start, min(stop, len(columns)))]
        if start > front:
            yield ""
        heads = [columns[i][0].split("\n") for i in block]
        height = max(map(len, heads))
        rows = [*zip(*([""] * (height - len(head)) + head for head in heads), strict=True)]
        for row in [*rows, *zip(*(columns[i][1:] for i in block), strict=True)]:
            padding = [" " * (wide[i] - cell_len(cell)) for i, cell in zip(block, row, strict=True)]
            cells = [
                c + p if i < front else p + c for i, c, p in zip(block, row, padding, strict=True)
            ]
            yield "  ".join(cells).rstrip()
        start = stop


def table(rows: Iterable[tuple[str, object]]) -> str:
    """Formats (name, value) rows as two columns of plain text, one row per line."""
    rows = [(name, str(value)) for name, value in rows]
    width = max((len(name) for name, _ in rows), default=0)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in rows)


def wrap_lines(sentences: Iterable[str], width: int, indent: str = "  ") -> Iterator[str]:
    """Yields sentences as lines of at most `width` characters; an empty sentence is an empty
    line.
    """
    for sentence in sentences:
        yield from textwrap.wrap(sentence, width, subsequent_indent=indent) or [""]


def bullets(sentences: Iterable[str]) -> str:
    """Formats sentences as a Markdown list."""
    return "\n".join(f"* {sentence}" for sentence in sentences)


def clip_cells(text: str, cells: int) -> str:
    """Returns a text that is at most `cells` terminal cells wide; "…" ends a text that was
    longer.
    """
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= cells else set_cell_size(text, cells - 1).rstrip() + "…"


def percent(share: float, digits: int = 1) -> str:
    """Formats a share as `12.6%`, or as `<0.1%` if it is above 0 and would be rounded to 0."""
    least = 10.0**-digits
    return f"{100 * share:.{digits}f}%" if share == 0 or 100 * share >= least else f"<{least:g}%"


def human_bytes(count: float) -> str:
    """Formats bytes as `1.4 GB`, in powers of 1000."""
    return _scaled(count, (" B", " kB", " MB", " GB", " TB"))


def human_count(count: float) -> str:
    """Formats a count as `812`, `25.1k`, `1.31M` or `7.0B`."""
    return _scaled(count, ("", "k", "M", "B", "T"))


def _scaled(count: float, units: Sequence[str]) -> str:
    """Formats a number with three significant digits and a unit."""
    power = 0
    while abs(count) >= 999.5 and power < len(units) - 1:
        count = count / 1000
        power = power + 1
    digits = 2
    if power == 0 or abs(count) >= 99.95:
        digits = 0
    elif abs(count) >= 9.995:
        digits = 1
    return f"{count:.{digits}f}{units[power]}"


def human_time(seconds: float) -> str:
    """Formats seconds as `41s`, `2m05s`, `3h07m` or `2d04h`."""
    whole = max(0, round(seconds))
    for large, small, units in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= large:
            return f"{whole // large}{units[0]}{whole % large // small:02d}{units[1]}"
    return f"{whole}s"
