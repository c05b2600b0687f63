"""The field `keep_alive` of Ollama's API: how long a model stays loaded after a request. Source:
Ollama's API documentation.
"""

import re
from typing import NamedTuple

from dantinox.files import quote
from dantinox.serve.errors import JSON, RequestError

# The units of Go's durations, in seconds.
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"-?(\d{1,9}(\.\d{1,9})?(ns|us|µs|ms|s|m|h))+")
MAX_SECONDS = 10.0**7


class KeepAlive(NamedTuple):
    """How long a model stays loaded; None: until its room is needed."""

    seconds: float | None


def keep_seconds(value: JSON) -> KeepAlive | None:
    """Returns what a value of `keep_alive` means: seconds, or a duration such as `5m`; null:
    nothing is given.

    Raises:
      RequestError: 400, the value is neither.
    """
    if value is None:
        return None
    seconds: float | None = None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value)):
        seconds = float(value)  # type: ignore[arg-type]
    elif isinstance(value, str) and len(value) <= 64 and DURATION.fullmatch(value):
        parts = re.findall(r"([\d.]+)(ns|us|µs|ms|s|m|h)", value)
        seconds = sum(float(number) * UNITS[unit] for number, unit in parts) * (
            -1 if value.startswith("-") else 1
        )
    if seconds is None:
        message = (
            f"keep_alive must be a number of seconds or a duration such as 5m, got {quote(value)}"
        )
        raise RequestError(400, message, param="keep_alive")
    return KeepAlive(None if seconds < 0 or seconds > MAX_SECONDS else seconds)
