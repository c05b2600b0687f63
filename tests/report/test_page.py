"""Tests the file of the report: it has every number, runs only the package's own script, and is
small.
"""

import base64
import hashlib
import json
import math
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path, PurePath

import numpy as np
import pytest

from dantinox.report.page import report_page
from dantinox.report.trace_file import LISTS
from tests.error_texts import ERRORS

from .page_sample import HOSTILE, trace

ROOT = Path(__file__).parents[2]
NOT_FINITE = (math.inf, -math.inf, math.nan)


class Elements(HTMLParser):
    """The elements of a page as [tag, attributes, text directly inside]."""

    def __init__(self, html: str):
        super().__init__()
        self.found: list[list] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append([tag, dict(attrs), ""])

    def handle_endtag(self, tag):
        self.found.append([f"/{tag}", {}, ""])

    def handle_data(self, data):
        if self.found:
            self.found[-1][2] += data

    def all(self, tag, **attributes):
        return [one for one in self.found if one[0] == tag and attributes.items() <= one[1].items()]


def data_of(html: str) -> dict:
    (script,) = Elements(html).all("script", id="data")
    return json.loads(script[2])


def tokens_of(data: dict, sample: int = 0) -> list[dict]:
    """Rebuilds the tokens of a document from the columns of the report."""
    columns, lists = data["samples"][sample]["columns"], data["samples"][sample]["lists"]
    tokens = []
    for i, word in enumerate(columns["word"]):
        token = {name: column[i] for name, column in columns.items() if name != "word"}
        token["id"], token["text"] = data["words"][word]
        for kind, (*_, last) in LISTS.items():
            listed = lists[kind]
            start = sum(listed["count"][:i])
            token[kind] = [
                {
                    "id": data["words"][listed["word"][a]][0],
                    "text": data["words"][listed["word"][a]][1],
                    "logprob": listed["logprob"][a],
                    last: listed[last][a],
                }
                for a in range(start, start + listed["count"][i])
            ]
        tokens.append(token)
    return tokens


def approximate(value):
    return pytest.approx(value, rel=1e-4) if isinstance(value, float) else value


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"attention": False},
        {"routed": False, "attention": False},
        {"alternatives": 0},
        {"candidates": 12},
    ],
)
def test_the_file_has_every_number_of_the_document(kind):
    documents = [trace(60, **kind), trace(7, seed=8, **kind)]
    data = data_of(report_page(documents))
    for s, document in enumerate(documents):
        found = tokens_of(data, s)
        assert len(found) == len(document["tokens"])
        for token, rebuilt in zip(document["tokens"], found, strict=True):
            lists = {
                kind: [
                    {name: approximate(value) for name, value in one.items()}
                    for one in token.get(kind, [])
                ]
                for kind in LISTS
            }
            assert rebuilt == {name: approximate(value) for name, value in token.items()} | lists
        rest = {name: value for name, value in document.items() if name != "tokens"}
        assert {name: data["samples"][s][name] for name in rest} == rest | {
            "router": expected_router(document)
        }


def expected_router(document):
    numbers = document["router"]
    return numbers and {
        name: value if math.isfinite(value) else None for name, value in numbers.items()
    }


def test_metrics_with_thresholds_keep_every_bit_of_float32():
    document = trace(1)
    values = [
        float(value)
        for value in np.float32([0.1, np.nextafter(np.float32(0.1), np.float32(1)), 4.9999995])
    ]
    document["tokens"] = [
        {**document["tokens"][0], "entropy": value, "varentropy": value} for value in values
    ]
    found = tokens_of(data_of(report_page([document])))
    assert [np.float32(token["entropy"]) for token in found] == [
        np.float32(value) for value in values
    ]
    assert [np.float32(token["varentropy"]) for token in found] == [
        np.float32(value) for value in values
    ]


def test_a_report_of_2000_tokens_with_ten_alternatives_is_below_1_5_megabytes():
    assert len(report_page([trace(2000)]).encode()) < 1_500_000


def test_a_report_without_repeated_words_is_below_1_5_megabytes():
    document = trace(2000)
    for i, token in enumerate(document["tokens"]):
        for a, other in enumerate(token["alternatives"]):
            other.update(
                id=10 * i + a, text=f" parola{10 * i + a}", logprob_sampled=other["logprob"]
            )
    assert len(report_page([document]).encode()) < 1_500_000


@pytest.mark.parametrize("where", ["prompt", "text", "token", "alternative", "settings"])
def test_generated_text_is_data(where):
    document = trace(5)
    if where in ("prompt", "text"):
        document[where] = HOSTILE
    elif where == "settings":
        document["settings"] = {"stop": [HOSTILE], HOSTILE: 1}
    else:
        token = document["tokens"][2]
        (token if where == "token" else token["alternatives"][1])["text"] = HOSTILE
    html = report_page([document])
    elements = Elements(html)
    assert len(elements.all("script")) == 2
    assert not elements.all("img")
    assert HOSTILE in strings(data_of(html))


def strings(value):
    """Returns every string in a JSON value, including keys."""
    if isinstance(value, str):
        return {value}
    parts = (
        [*value.keys(), *value.values()]
        if isinstance(value, dict)
        else value
        if isinstance(value, list)
        else []
    )
    return set().union(*map(strings, parts))


def test_a_lone_surrogate_can_be_written():
    document = trace(3)
    document["tokens"][1]["text"] = "a\ud83c"
    html = report_page([document])
    assert tokens_of(data_of(html.encode().decode()))[1]["text"] == "a\ud83c"


@pytest.mark.parametrize("number", NOT_FINITE)
def test_nonfinite_numbers_become_null(number):
    document = trace(3)
    document["router"]["temperature_max"] = number
    document["settings"] = {"logit_bias": {"a": number}}
    document["tokens"][1].update(logprob=number, temperature=number)
    document["tokens"][1]["alternatives"][0].update(logprob=number, logprob_sampled=number)
    data = data_of(report_page([document]))
    token = tokens_of(data)[1]
    assert data["samples"][0]["router"]["temperature_max"] is None
    assert data["samples"][0]["settings"] == {"logit_bias": {"a": None}}
    assert (token["logprob"], token["temperature"], token["alternatives"][0]["logprob"]) == (
        None,
        None,
        None,
    )


def test_the_page_has_no_external_reference():
    html = report_page([trace(20)])
    assert not re.search(r"https?:|://|@import|url\(|localhost", html)
    elements = Elements(html)
    assert [one[1]["href"] for one in elements.all("link")] == ["data:,"]
    assert not [
        one
        for one in elements.found
        if "src" in one[1] or "style" in one[1] or any(a.startswith("on") for a in one[1])
    ]


def test_only_the_script_and_the_style_of_the_package_are_allowed():
    elements = Elements(report_page([trace(20)]))
    (policy,) = elements.all("meta", **{"http-equiv": "Content-Security-Policy"})
    directives = dict(part.strip().split(" ", 1) for part in policy[1]["content"].split(";"))
    (style,) = elements.all("style")
    _, script = elements.all("script")
    assert directives["default-src"] == "'none'"
    for name, source in (("style-src", style[2]), ("script-src", script[2])):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert directives[name] == f"'sha256-{digest}'"
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|\bFunction\(|fetch\(|XMLHttp",
        script[2],
    )


def test_a_report_without_samples_raises():
    with pytest.raises(ValueError, match=ERRORS["at_least_one_sample"]):
        report_page([])


def test_a_wheel_contains_the_files_of_the_page():
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["dantinox"]
    package = ROOT / "dantinox"
    parts = [
        path.relative_to(package)
        for path in package.rglob("*")
        if path.suffix in (".html", ".css", ".js")
    ]
    assert len(parts) >= 5
    assert all(any(PurePath(part).match(glob) for glob in globs) for part in parts)
