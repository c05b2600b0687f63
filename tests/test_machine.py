"""Free memory, and measurements that are kept in the cache directory."""

import json
import subprocess
import sys

import pytest

from dantinox.machine import cache_folder, cpu_name, free_memory, measured_once


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


def write(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


MACHINE = {"proc/meminfo": "MemTotal:  100 kB\nMemAvailable:  90 kB\n"}


def group(folder, limit, used, cached):
    """Returns the files of a cgroup of version 2."""
    stat = f"anon 1\ninactive_file {cached}\n"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": stat,
    }


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        (MACHINE, 90 * 1024),
        (
            MACHINE
            | {"proc/self/cgroup": "0::/user/job\n"}
            | group("sys/fs/cgroup/user/job", 5000, 3000, 500),
            2500,
        ),
        (
            MACHINE
            | {"proc/self/cgroup": "0::/user/job\n"}
            | group("sys/fs/cgroup/user", 4000, 3900, 0),
            100,
        ),
        (
            MACHINE
            | {"proc/self/cgroup": "0::/elsewhere\n"}
            | group("sys/fs/cgroup", 5000, 6000, 0),
            0,
        ),
        (
            MACHINE | {"proc/self/cgroup": "0::/\n"} | group("sys/fs/cgroup", "max", 6000, 0),
            90 * 1024,
        ),
        (
            MACHINE
            | {
                "proc/self/cgroup": "3:cpu:/\n2:memory,x:/job\n0::/\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "7000",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "6000",
                "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 10",
            },
            1010,
        ),
        ({"proc/self/cgroup": "0::/\n", "proc/meminfo": "damaged"}, None),
    ],
)
def test_free_memory(tmp_path, files, free):
    write(tmp_path, files)
    assert free_memory(tmp_path) == free


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_limit_of_the_address_space_counts():
    program = """
import resource
from dantinox.machine import free_memory
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
print(free_memory())
"""
    free = int(
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
    )
    assert 0 < free < 1 << 30
