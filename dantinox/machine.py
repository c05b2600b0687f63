"""The CPU of this machine, its free memory within the limits of cgroups, the user's cache
directory, and measurements that the cache keeps.
"""

import contextlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from dantinox.files import atomic_write


class CgroupFiles(NamedTuple):
    """Where the kernel reports the memory of a cgroup.

    Attributes:
      mount: the folder of all cgroups.
      limit, usage: files in the folder of a cgroup, each with a number of bytes.
      cached: the entry of the file `memory.stat` with the bytes of cached files.
    """

    mount: str
    limit: str
    usage: str
    cached: str


CGROUP_V2 = CgroupFiles("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
CGROUP_V1 = CgroupFiles(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)


def cache_folder() -> Path:
    """Returns the directory of the user's caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dantinox"


@lru_cache(maxsize=1)
def _cpu_fields() -> dict[str, str]:
    """Returns the fields of `/proc/cpuinfo` for the last core; empty where this file does not
    exist.
    """
    fields = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    return fields


def cpu_flags() -> frozenset[str]:
    """Returns the instruction sets of the CPU as Linux names them, such as `avx2`; empty on other
    systems.
    """
    fields = _cpu_fields()
    return frozenset(fields.get("flags", fields.get("Features", "")).split())


def cpu_name() -> str:
    """Returns the model of the CPU and its bfloat16 instruction sets."""
    if not _cpu_fields():
        return platform.processor() or platform.machine()
    model = _cpu_fields().get("model name", platform.machine())
    bfloat16_sets = {"avx512_bf16", "amx_bf16", "bf16"} & cpu_flags()
    return ", ".join((model, *sorted(bfloat16_sets)))


def free_memory(root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process may still allocate; None if the system does not report
    them.

    They are the least of the free memory of the machine, the rest of the limits of its cgroup and
    of the cgroups above it, and the rest of the limit of the address space (`ulimit -v`).

    Args:
      root: the folder that has `proc` and `sys`.
    """
    return min((*_machine_memory(root), *_cgroup_memory(root), *_address_space(root)), default=None)


def _machine_memory(root: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, KeyError, ValueError):
        fields = dict(
            line.split(":", 1)
            for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        )
        yield 1024 * int(fields["MemAvailable"].split()[0])


def _cgroup_memory(root: Path) -> Iterator[int]:
    """Yields the free bytes of each cgroup with a limit. Cached files do not count as used, because
    the kernel frees them.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        files = CGROUP_V2 if number == "0" else CGROUP_V1
        group = Path(path.lstrip("/"))
        for relative in (group, *group.parents):  # in a container, only the last may exist
            folder = root / files.mount / relative
            with contextlib.suppress(OSError, ValueError, KeyError):
                # Without a limit, the content is not a number.
                limit = (folder / files.limit).read_text(encoding="ascii")
                used = (folder / files.usage).read_text(encoding="ascii")
                statistics = (folder / "memory.stat").read_text(encoding="ascii")
                cached = dict(line.split() for line in statistics.splitlines())[files.cached]
                yield max(0, int(limit) - int(used) + int(cached))


def _address_space(root: Path) -> Iterator[int]:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # not on Windows

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)  # the soft limit, in bytes
        if limit != resource.RLIM_INFINITY:
            # The pages of the whole address space.
            pages = int((root / "proc/self/statm").read_text(encoding="ascii").split()[0])
            yield max(0, limit - pages * resource.getpagesize())


def measured_once(file_name: str, key: str, measure: Callable[[], float]) -> float:
    """Returns a number that was measured once on this machine, or measures it and keeps it in the
    user's cache.

    Args:
      file_name: a JSON file in the cache directory.
      key: the name of the number in this file; it must contain all that the number depends on.
      measure: called if the file has no such number.
    """
    file = cache_folder() / file_name
    known = dict[str, float]()
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(file.read_text())
        known = content if isinstance(content, dict) else {}
    if not isinstance(known.get(key), float):
        known[key] = round(float(measure()), 2)
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(file, json.dumps(known))
    return known[key]
