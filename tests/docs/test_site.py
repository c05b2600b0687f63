"""The pictures of the architecture are current, and the checks of links and code notice what is
wrong.
"""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"


def load(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def links():
    return load("check_links")


@pytest.mark.parametrize("name", ["packages.svg", "decode_step.svg"])
def test_pictures_of_the_architecture_are_current(name):
    """If this fails after an import was added or removed: python docs/plots/architecture.py."""
    assert (DOCS / "images" / name).read_text(encoding="utf-8") == load(
        "plots/architecture"
    ).PICTURES[name]()


def test_links_and_images_of_markdown_files(links):
    assert [problem for problem in links.markdown_problems() if problem] == []


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("README.md", ""),
        ("docs/training.md#optimizers", ""),
        ("docs/missing.md", "docs/missing.md does not exist"),
        ("docs/training.md#missing", "docs/training.md#missing: no heading has this anchor"),
    ],
)
def test_a_wrong_link_of_a_markdown_file_is_a_problem(links, link, problem):
    assert list(links.target_problem(ROOT / "README.md", link)) == [problem]


def test_wrong_links_and_images_of_a_built_page_are_problems(links, tmp_path):
    (tmp_path / "other.html").write_text('<h1 id="top">Other</h1>', encoding="utf-8")
    (tmp_path / "page.html").write_text(
        '<a href="other.html#top">1</a><a href="other.html#x">2</a><a href="gone.html">3</a><img'
        ' src="_images/a.png"><a href="https://example.org/gone">4</a>',
        encoding="utf-8",
    )
    (tmp_path / "_images").mkdir()
    (tmp_path / "_images" / "a.png").touch()
    problems = [problem for problem in links.site_problems(tmp_path) if problem]
    assert problems == [
        "page.html: the image _images/a.png has no alternative text",
        "page.html: other.html#x: the page has no such anchor",
        "page.html: gone.html does not exist",
    ]


def test_every_page_is_in_a_table_of_contents():
    contents = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert {
        page for page in pages if f"\n{page}\n" not in contents and not page.endswith("_results")
    } == set()
