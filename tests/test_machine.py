"""Measurements that are kept in the cache directory."""

import json

import pytest

from dantinox.machine import cache_folder, cpu_name, measured_once


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_number_is_measured_once():
    numbers = iter([1.234, 5.0])
    assert measured_once("x.json", "a", lambda: next(numbers)) == 1.23
    assert measured_once("x.json", "a", lambda: next(numbers)) == 1.23
    assert measured_once("x.json", "b", lambda: next(numbers)) == 5.0
    assert json.loads((cache_folder() / "x.json").read_text()) == {"a": 1.23, "b": 5.0}


@pytest.mark.parametrize("content", ["{", "[]", '{"a": "fast"}', "null"])
def test_a_damaged_file_is_measured_again(content):
    cache_folder().mkdir()
    (cache_folder() / "x.json").write_text(content)
    assert measured_once("x.json", "a", lambda: 2.0) == 2.0
    assert json.loads((cache_folder() / "x.json").read_text())["a"] == 2.0


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "dantinox").write_text("a file")
    assert measured_once("x.json", "a", lambda: 3.0) == 3.0


def test_cpu_name_is_one_line():
    assert cpu_name() and "\n" not in cpu_name()
