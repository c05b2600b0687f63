"""Reports as Markdown and as one HTML file: every block, and text that would break the format."""

import base64
import re
from dataclasses import dataclass

import pytest

from dantinox.config import UserError
from dantinox.report.document import (
    Details,
    Figure,
    Heading,
    Items,
    Paragraph,
    Table,
    Verbatim,
    study_files,
    to_csv,
    to_html,
    to_lines,
    to_markdown,
)
from dantinox.report.heat_map import HeatMap
from dantinox.report.tables import CSV, MARKDOWN, TEXT, Column


@dataclass(frozen=True)
class Record:
    number: int


COLUMNS = [
    Column("a", "first", lambda row: row[0]),
    Column("b", "second", lambda row: row[1], ".2f"),
]
BLOCKS = [
    Heading("Title", 1),
    Paragraph("a < b"),
    Table(COLUMNS, [("x", 1.234), ("<i>", None)]),
    Verbatim("one\n``` two"),
    Figure("plots/p.png", "a plot"),
]


def test_markdown():
    assert (
        to_markdown(BLOCKS)
        == "# Title\n\na < b\n\n| first | second |\n| --- | --- |\n| x | 1.23 |\n| <i> | – |\n\n"
        "````text\none\n``` two\n````\n\n![a plot](plots/p.png)\n"
    )


def test_heat_map(tmp_path):
    """Opacity is the square root of a share. Shares that are absent or tiny have no cell, and
    absent ones no background.
    """
    block = HeatMap(["<r>", "s"], ["a", "b"], [[0.25, None], [0.0001, 1.0]], "a map")
    assert (
        to_markdown([block])
        == "|   | a | b |\n| --- | --- | --- |\n| <r> | 0.250 | – |\n| s | 0.000 | 1.000 |\n\na"
        " map\n"
    )
    page = to_html([block], "t", tmp_path)
    drawing = page[page.index("<svg") : page.index("</svg>")]
    assert re.findall(r'class="share"[^>]*fill-opacity="([.0-9]+)"><title>(.*?)</title>',
                      drawing) == [
        ("0.500", "&lt;r&gt; → a: 25.00%"), ("1.000", "s → b: 100.00%"),
    ]  # fmt: skip
    widths = re.findall(r'class="empty" x="\d+" y="\d+" width="(\d+)" height="43"', drawing)
    assert (
        widths == ["43", "87"]
        and "<r>" not in page
        and "style=" not in page
        and "<script" not in page
    )
    assert "<figcaption>a map</figcaption>" in page and list(to_lines([block], 80)) == []


def test_html_loads_nothing_and_escapes_text(tmp_path):
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "p.png").write_bytes(b"\x89PNG data")
    page = to_html(BLOCKS, "T & t", tmp_path)
    for part in (
        "<title>T &amp; t</title>", "<h1>Title</h1>", "<p>a &lt; b</p>", "<th>second</th>",
        "<td>1.23</td>", "<td>&lt;i&gt;</td>", "<pre>one\n``` two</pre>",
        base64.b64encode(b"\x89PNG data").decode(),
        "default-src 'none'; style-src 'sha256-",
    ):  # fmt: skip
        assert part in page
    assert "<i>" not in page and "http" not in page.replace("http-equiv", "")


REPORT = [
    Heading("Title", 1),
    Items([]),
    Paragraph("A sentence."),
    Heading("Part"),
    Table(
        [
            Column("name", "name", lambda row: row[0]),
            Column("exact", "", lambda row: row[1], outputs=(CSV,)),
            Column("short", "short", lambda row: row[1], ".1f", outputs=(TEXT,)),
            Column("long", "long", lambda row: row[1], ".2f", outputs=(MARKDOWN,)),
        ],
        [("x", 1 / 8)],
    ),
    Details([Paragraph("Only in files.")]),
    Items([f"one {'word ' * 14}end", "two"]),
    Table([Column("other", "other", lambda row: row[0])], [("y", None)]),
]


def test_one_report_is_written_to_the_console_to_markdown_and_to_csv():
    assert list(to_lines(REPORT, 20)) == [
        "A sentence.", "", "Part", "name  short", "x       0.1", "",
        f"one {'word ' * 11}".strip(), "  word word word end", "two", "", "other", "y",
    ]  # fmt: skip
    assert (
        to_markdown(REPORT)
        == "# Title\n\nA sentence.\n\n## Part\n\n| name | long |\n| --- | --- |\n| x | 0.12"
        f" |\n\nOnly in files.\n\n* one {'word ' * 14}end\n* two\n\n| other |\n| --- |\n| y |\n"
    )
    assert to_csv(REPORT) == "name,exact\nx,0.125\ny,\n"


def test_html_shows_details_lists_and_the_columns_of_markdown(tmp_path):
    page = to_html(REPORT, "T", tmp_path)
    assert "<p>Only in files.</p>" in page and "<li>two</li></ul>" in page
    assert "<th>name</th><th>long</th>" in page and "<td>0.12</td>" in page


def test_files_of_a_study_end_with_its_plot():
    study = Record(3)
    files = study_files("kv", study, REPORT, lambda record: bytes([record.number]))
    assert list(files) == ["kv.csv", "kv.md", "kv.json", "kv.png"] and files["kv.png"]() == b"\x03"
    assert files["kv.json"]() == '{\n "number": 3\n}\n' and "kv.png" not in study_files(
        "kv", study, REPORT
    )


def test_a_missing_figure_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*p\.png: No such file"):
        to_html(BLOCKS, "T", tmp_path)
