"""Tests the files of the page: only the package's own scripts, no external resources, and the
content security policy.
"""

import json
import re

import pytest
from starlette.testclient import TestClient

from dantinox.report.page import report_page
from dantinox.serve.pages import PUBLIC, STATIC
from tests.report.page_sample import trace

from .fakes import FakeEngine
from .varied import app

SCRIPTS = [name for name in STATIC if name.endswith(".js")]


@pytest.fixture(scope="module")
def client():
    return TestClient(app(FakeEngine()), base_url="http://localhost")


def test_every_file_has_the_content_security_policy(client):
    for path in PUBLIC:
        answer = client.get(path)
        assert answer.status_code == 200 and client.post(path).status_code == 405
        policy = dict(
            part.strip().split(" ", 1)
            for part in answer.headers["content-security-policy"].split(";")
        )
        assert policy == {
            "default-src": "'none'", "script-src": "'self'", "style-src": "'self'",
            "connect-src": "'self'", "img-src": "data:", "base-uri": "'none'",
            "form-action": "'none'", "frame-ancestors": "'none'",
            "require-trusted-types-for": "'script'",
        }  # fmt: skip
        assert answer.headers["x-content-type-options"] == "nosniff"
    kinds = {path: client.get(path).headers["content-type"].split(";")[0] for path in PUBLIC}
    assert (
        kinds["/"] == "text/html"
        and kinds["/page/write.js"] == "text/javascript"
        and kinds["/page/page.css"] == "text/css"
    )
    assert (
        client.get("/page/own.py").status_code == 404
        and client.get("/page/..%2fown.py").status_code == 404
    )


def test_the_page_refers_only_to_files_of_its_server(client):
    html = client.get("/").text
    asked = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert set(asked) == {"data:,", *(f"/page/{name}" for name in STATIC)}
    assert (
        re.findall(r"<script(?![^>]*(?:src=|application/json))", html) == []
        and "<style" not in html
    )
    assert " style=" not in html and not re.search(r"\son\w+=", html)
    data = json.loads(
        re.search(r'<script id="data" type="application/json">(.*?)</script>', html, re.S)[1]
    )
    assert (
        data["strategies"] == ["greedy", "clarify", "explore", "resample", "adaptive"]
        and len(data["rules"]) == 4
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_create_no_markup_and_no_external_request(client, name):
    source = client.get(f"/page/{name}").text
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "new Function",
        "srcdoc",
        "import(",
    ):
        assert word not in source
    assert not re.search(r"https?:|//\w+\.", re.sub(r"^\s*//.*$", "", source, flags=re.M))
    assert not re.search(r'setAttribute\("(?:style|on)', source)


def test_scripts_define_different_names(client):
    source = "\n".join(client.get(f"/page/{name}").text for name in SCRIPTS)
    names = re.findall(r"^(?:async )?(?:function\*?|const|let) (\w+)", source, re.M)
    assert len(names) > 200 and [name for name in set(names) if names.count(name) > 1] == []


@pytest.mark.parametrize("name", [name for name in STATIC if name.endswith(".css")])
def test_styles_load_nothing(client, name):
    source = client.get(f"/page/{name}").text
    assert "url(" not in source and "@import" not in source


def test_every_element_used_by_a_script_exists(client):
    html = client.get("/").text
    ids = set(re.findall(r'\bid="([^"]+)"', html))
    assert len(ids) == len(re.findall(r'\bid="([^"]+)"', html))
    made = {
        *(
            "strip-hover",
            "strip-at",
            "num-alternatives",
            "presets",
            "preset",
            "order",
            "setting-seed",
            "prompt",
        ),
        *("preset-choice", "preset-about", "preset-name", "preset-delete", "preset-export"),
        *("system", "system-row", "tools", "tools-group", "tool-choice", "effort", "effort-row"),
        *("format", "format-kind", "format-group"),
    }
    for name in SCRIPTS:
        asked = set(re.findall(r'byId\("([^"]+)"\)', client.get(f"/page/{name}").text))
        assert asked <= ids | made, (name, asked - ids - made)


def test_labels_refer_to_existing_elements(client):
    html = client.get("/").text
    ids = set(re.findall(r'\bid="([^"]+)"', html))
    for attribute in ("for", "aria-labelledby", "aria-describedby", "aria-controls"):
        assert set(re.findall(rf'\b{attribute}="([^"]+)"', html)) <= ids
    for field, name in re.findall(
        r'<((?:textarea|input(?! type="radio"))[^>]*id="([^"]+)"[^>]*)', html
    ):
        assert f'for="{name}"' in html or "aria-label=" in field


def test_the_empty_report_is_the_report_without_its_data(client):
    empty = client.get("/page/report.html").text
    place = '"words":[],"samples":[]'
    assert empty.count(place) == 1
    whole = report_page([trace(5)])
    before, behind = empty.split(place)
    assert whole.startswith(before) and whole.endswith(behind)
