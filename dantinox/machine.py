"""The CPU of this machine, the user's cache directory, and measurements that the cache keeps."""

import contextlib
import json
import os
import platform
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from dantinox.files import atomic_write


def cache_folder() -> Path:
    """Returns the directory of the user's caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dantinox"


@lru_cache(maxsize=1)
def _cpu_fields() -> dict[str, str]:
    """Returns the fields of `/proc/cpuinfo` for one core; empty where this file does not exist."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def cpu_flags() -> frozenset[str]:
    """Returns the instruction sets of the CPU as Linux names them, such as `avx2`; empty on other systems."""
    fields = _cpu_fields()
    return frozenset(fields.get("flags", fields.get("Features", "")).split())


def cpu_name() -> str:
    """Returns the model of the CPU and its bfloat16 instruction sets."""
    if not _cpu_fields():
        return platform.processor() or platform.machine()
    units = {"avx512_bf16", "amx_bf16", "bf16"} & cpu_flags()
    return ", ".join((_cpu_fields().get("model name", platform.machine()), *sorted(units)))


def measured_once(file_name: str, key: str, measure: Callable[[], float]) -> float:
    """Returns a number that was measured once on this machine, or measures it and keeps it in the user's cache.

    Args:
      file_name: a JSON file in the cache directory.
      key: the name of the number in this file; it must contain all that the number depends on.
      measure: called if the file has no such number.
    """
    file, known = cache_folder() / file_name, dict[str, float]()
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(file.read_text())
        known = content if isinstance(content, dict) else {}
    if not isinstance(known.get(key), float):
        known[key] = round(float(measure()), 2)
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(file, json.dumps(known))
    return known[key]
