"""What a release needs: one version, a changelog, and packaged files."""

import re
import tomllib
from pathlib import Path

import yaml

from dantinox import __version__
from tests import release_check

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["license"]


def test_changelog_begins_with_unreleased_changes():
    headings = re.findall(
        r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert headings[0] == "[Unreleased]"


def test_templates_are_valid_yaml():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict), path


def test_a_table_of_all_checks():
    text = (
        "2 skipped in 3s\n== 8 passed, 1 failed in 3s ==\nmake[1]: x\n100 passed, 1 error, 2"
        " skipped in 90s\n"
    )
    assert release_check.summarize(text) == "4 skipped, 108 passed, 1 failed, 1 error"
    assert release_check.summarize("\nall 20 files agree\n\n") == "all 20 files agree"
    assert release_check.summarize("") == "no output"
    found = release_check.table(
        {"lint": release_check.Row(None, False, "found 2 errors", 90, 150)}
    ).splitlines()
    assert "| lint | **failed** | found 2 errors | 1.5 | 2.5 |" in found
    assert "| faults | not run | | | |" in found
    assert len(found) == 4 + len(release_check.CHECKS)


def test_every_check_is_a_target_of_make():
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{name}:" in makefile for name in release_check.CHECKS)
