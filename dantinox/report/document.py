"""A report of headings, paragraphs, tables, verbatim text and figures, as Markdown or as one HTML file."""

import base64
import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dantinox.files import wrap_os_errors
from dantinox.report.page import read_asset, source_hash
from dantinox.report.tables import Column, markdown_table


class Heading(NamedTuple):
    """A heading; level 1 is the title."""

    text: str
    level: int = 2


class Paragraph(NamedTuple):
    """A paragraph of plain text."""

    text: str


class Verbatim(NamedTuple):
    """Text that is shown with its line breaks and spaces, for example commands or generated text."""

    text: str


class Table(NamedTuple):
    """Rows of a table with their columns."""

    columns: Sequence[Column]
    rows: Sequence[Any]


class Figure(NamedTuple):
    """A PNG file; `path` is relative to the folder of the report."""

    path: str
    caption: str


Block = Heading | Paragraph | Verbatim | Table | Figure


def to_markdown(blocks: Sequence[Block]) -> str:
    """Formats a report as Markdown. Figures are links to their files."""
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Paragraph(text):
            return text
        case Verbatim(text):
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
            return f"{fence}text\n{text}\n{fence}"
        case Table(columns, rows):
            return markdown_table(columns, rows)
        case Figure(path, caption):
            return f"![{caption}]({path})"


def to_html(blocks: Sequence[Block], title: str, folder: Path) -> str:
    """Formats a report as one HTML file that loads nothing else and runs no script. Figures are embedded.

    Args:
      title: the title of the window.
      folder: the folder of the report, to which the paths of figures are relative.

    Raises:
      UserError: a figure cannot be read.
    """
    style = read_asset("document.css")
    policy = f"default-src 'none'; style-src '{source_hash(style)}'; img-src data:; base-uri 'none'; form-action 'none'"
    body = "\n".join(_html(block, folder) for block in blocks)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _html(block: Block, folder: Path) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{html.escape(text)}</p>"
        case Verbatim(text):
            return f"<pre>{html.escape(text)}</pre>"
        case Table(columns, rows):
            head = "".join(f"<th>{html.escape(column.heading)}</th>" for column in columns)
            cells = ("".join(f"<td>{html.escape(column.long(row))}</td>" for column in columns) for row in rows)
            body = "".join(f"<tr>{row}</tr>\n" for row in cells)
            return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>'
        case Figure(path, caption):
            with wrap_os_errors(f"cannot read {folder / path}"):
                data = base64.b64encode((folder / path).read_bytes()).decode()
            text = html.escape(caption)
            return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'
