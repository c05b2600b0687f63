"""A report of headings, paragraphs, lists, tables, verbatim text, figures and heat maps, and its
outputs.

The outputs are lines on the console, Markdown, one HTML file, and a CSV file with the rows of the
tables.
"""

import base64
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from dantinox.files import wrap_os_errors
from dantinox.report.heat_map import HeatMap, heat_map_svg
from dantinox.report.page import read_asset, source_hash
from dantinox.report.tables import (
    MARKDOWN,
    Column,
    bullets,
    columns_of,
    csv_table,
    markdown_table,
    text_table,
    wrap_lines,
)

MIN_WIDTH = 60  # characters of a line on the console; a narrower terminal breaks the lines


class Heading(NamedTuple):
    """A heading; level 1 is the title, which the console does not show."""

    text: str
    level: int = 2


class Paragraph(NamedTuple):
    """A paragraph of plain text."""

    text: str


class Items(NamedTuple):
    """A list of sentences. An empty list is not shown."""

    sentences: Sequence[str]


class Verbatim(NamedTuple):
    """Text that is shown with its line breaks and spaces, for example commands or generated
    text.
    """

    text: str


class Table(NamedTuple):
    """Rows of a table with their columns, the first `front` of which are repeated where a table is
    too wide for the console.
    """

    columns: Sequence[Column]
    rows: Sequence[Any]
    front: int = 1


class Details(NamedTuple):
    """Blocks that only Markdown and HTML show."""

    blocks: "Sequence[Shown]"


class Figure(NamedTuple):
    """A PNG file; `path` is relative to the folder of the report."""

    path: str
    caption: str


Shown = Heading | Paragraph | Items | Verbatim | Table | Figure | HeatMap
Block = Shown | Details


def to_lines(blocks: Iterable[Block], width: int) -> Iterator[str]:
    """Yields a report as lines of at most `width` characters, but not below `MIN_WIDTH`.

    Figures and heat maps are left out.
    """
    width = max(width, MIN_WIDTH)
    is_separated = True
    for block in blocks:
        lines = list(_lines(block, width))
        if lines and not is_separated:
            yield ""
        yield from lines
        is_separated = isinstance(block, Heading) or (is_separated and not lines)


def _lines(block: Block, width: int) -> Iterator[str]:
    match block:
        case Heading(text, level) if level > 1:
            yield text
        case Paragraph(text):
            yield from wrap_lines([text], width, "")
        case Items(sentences):
            yield from wrap_lines(sentences, width)
        case Verbatim(text):
            yield from text.splitlines()
        case Table(columns, rows, front):
            yield from text_table(columns, rows, width, front)


def to_csv(blocks: Iterable[Block]) -> str:
    """Formats the rows of all tables as one CSV table, with the columns of the first table."""
    tables = [block for block in blocks if isinstance(block, Table)]
    return csv_table(tables[0].columns, [row for table in tables for row in table.rows])


def to_markdown(blocks: Iterable[Block]) -> str:
    """Formats a report as Markdown. Figures are links to their files."""
    return "\n\n".join(filter(None, map(_markdown, _flat(blocks)))) + "\n"


def _flat(blocks: Iterable[Block]) -> Iterator[Shown]:
    """Yields blocks, and those inside of `Details`."""
    for block in blocks:
        yield from block.blocks if isinstance(block, Details) else [block]


def _markdown(block: Shown) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Paragraph(text):
            return text
        case Items(sentences):
            return bullets(sentences)
        case Verbatim(text):
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
            return f"{fence}text\n{text}\n{fence}"
        case Table(columns, rows, _):
            return markdown_table(columns, rows)
        case Figure(path, caption):
            return f"![{caption}]({path})"
        case HeatMap(rows, columns, shares, caption):
            named = [
                Column(name, name or " ", itemgetter(c)) for c, name in enumerate(["", *columns])
            ]
            cells = [[row, *row_shares] for row, row_shares in zip(rows, shares, strict=True)]
            return f"{markdown_table(named, cells)}\n\n{caption}"


def to_html(blocks: Sequence[Block], title: str, folder: Path) -> str:
    """Formats a report as one HTML file that loads nothing else and runs no script. Figures are
    embedded.

    Args:
      title: the title of the window.
      folder: the folder of the report, to which the paths of figures are relative.

    Raises:
      UserError: a figure cannot be read.
    """
    style = read_asset("document.css")
    policy = (
        f"default-src 'none'; style-src '{source_hash(style)}'; img-src data:; base-uri 'none';"
        " form-action 'none'"
    )
    body = "\n".join(_html(block, folder) for block in _flat(blocks))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _html(block: Shown, folder: Path) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{html.escape(text)}</p>"
        case Items(sentences):
            return (
                f"<ul>{''.join(f'<li>{html.escape(sentence)}</li>' for sentence in sentences)}</ul>"
            )
        case Verbatim(text):
            return f"<pre>{html.escape(text)}</pre>"
        case Table(columns, rows, _):
            columns = columns_of(columns, MARKDOWN)
            head = "".join(f"<th>{html.escape(column.heading)}</th>" for column in columns)
            cells = (
                "".join(f"<td>{html.escape(column.long(row))}</td>" for column in columns)
                for row in rows
            )
            body = "".join(f"<tr>{row}</tr>\n" for row in cells)
            return (
                f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
                f"<tbody>\n{body}</tbody>\n</table></div>"
            )
        case Figure(path, caption):
            with wrap_os_errors(f"cannot read {folder / path}"):
                data = base64.b64encode((folder / path).read_bytes()).decode()
            text = html.escape(caption)
            return (
                f'<figure><img alt="{text}"'
                f' src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'
            )
        case HeatMap():
            caption = html.escape(block.caption)
            return (
                f'<figure><div class="scroll">{heat_map_svg(block)}</div>'
                f"<figcaption>{caption}</figcaption></figure>"
            )


def study_files(
    name: str, study: Any, blocks: Sequence[Block], draw: Callable[[Any], bytes] | None = None
) -> dict[str, Callable[[], str | bytes]]:
    """Returns file name → function that creates the content, for each file of a study.

    Args:
      study: the record of the study, a dataclass.
      blocks: its report.
      draw: returns its plot as PNG. The plot comes last, because it alone needs matplotlib.
    """
    files: dict[str, Callable[[], str | bytes]] = {
        f"{name}.csv": partial(to_csv, blocks),
        f"{name}.md": partial(to_markdown, blocks),
        f"{name}.json": lambda: json.dumps(asdict(study), indent=1, allow_nan=False) + "\n",
    }
    return files if draw is None else {**files, f"{name}.png": partial(draw, study)}
