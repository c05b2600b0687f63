"""Reports as Markdown and as one HTML file: every block, and text that would break the format."""

import base64

import pytest

from dantinox.config import UserError
from dantinox.report.document import Figure, Heading, Paragraph, Table, Verbatim, to_html, to_markdown
from dantinox.report.tables import Column

COLUMNS = [Column("a", "first", lambda row: row[0]), Column("b", "second", lambda row: row[1], ".2f")]
BLOCKS = [
    Heading("Title", 1),
    Paragraph("a < b"),
    Table(COLUMNS, [("x", 1.234), ("<i>", None)]),
    Verbatim("one\n``` two"),
    Figure("plots/p.png", "a plot"),
]


def test_markdown():
    assert to_markdown(BLOCKS) == (
        "# Title\n\na < b\n\n| first | second |\n| --- | --- |\n| x | 1.23 |\n| <i> | – |\n\n"
        "````text\none\n``` two\n````\n\n![a plot](plots/p.png)\n"
    )


def test_html_loads_nothing_and_escapes_text(tmp_path):
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "p.png").write_bytes(b"\x89PNG data")
    page = to_html(BLOCKS, "T & t", tmp_path)
    for part in (
        "<title>T &amp; t</title>", "<h1>Title</h1>", "<p>a &lt; b</p>", "<th>second</th>", "<td>1.23</td>",
        "<td>&lt;i&gt;</td>", "<pre>one\n``` two</pre>", base64.b64encode(b"\x89PNG data").decode(),
        "default-src 'none'; style-src 'sha256-",
    ):  # fmt: skip
        assert part in page
    assert "<i>" not in page and "http" not in page.replace("http-equiv", "")


def test_a_missing_figure_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*p\.png: No such file"):
        to_html(BLOCKS, "T", tmp_path)
