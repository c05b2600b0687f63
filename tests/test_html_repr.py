"""Models, results and run directories in a notebook: short HTML in which everything from outside is
escaped.
"""

from html.parser import HTMLParser

import pytest

import dantinox
from dantinox.html_repr import MAX_TEXT_LENGTH, html_table, html_text
from dantinox.run import RunDirectory

HOSTILE = "<script>alert(1)</script>&\"'"


class Tags(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize(
    "html", [html_table(HOSTILE, {HOSTILE: HOSTILE}), html_text(HOSTILE, HOSTILE, HOSTILE)]
)
def test_everything_is_escaped(html):
    parsed = Tags(html)
    assert set(parsed.tags) <= {"b", "table", "tr", "th", "td", "pre", "span", "small"}
    assert parsed.text.count(HOSTILE) == 3


def test_long_texts_are_truncated():
    html = html_text("a" * 10_000, "b" * 10_000, "note")
    assert (
        html.count("a" * MAX_TEXT_LENGTH) == 1
        and html.count("b" * MAX_TEXT_LENGTH) == 1
        and len(html) < 2 * MAX_TEXT_LENGTH + 300
    )


def test_a_model_and_its_results(run_dir):
    model = dantinox.load(run_dir)
    shown = Tags(model._repr_html_()).text
    assert "259 tokens" in shown and "128 tokens" in shown and "float32" in shown
    result = model.generate("<b>", max_new_tokens=3, greedy=True)
    assert repr(result).startswith("Result(prompt='<b>', text=") and "slots" not in repr(result), (
        "no list for every layer"
    )
    shown = Tags(result._repr_html_())
    assert (
        shown.text.startswith("<b>" + result.text)
        and "3 tokens" in shown.text
        and "length" in shown.text
    )


def test_a_run_directory(run_dir, tmp_path):
    shown = Tags(RunDirectory(run_dir)._repr_html_()).text
    assert str(run_dir) in shown and "model_weights.msgpack" in shown and "checkpoints" not in shown
    assert "no file yet" in RunDirectory(tmp_path / "<none>")._repr_html_()
