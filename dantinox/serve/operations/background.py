"""Functions that run work on a bounded number of threads, and a filter that limits the rate of log
lines.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from dantinox.serve.operations.limits import LOG_LINES, LOG_SECONDS, THREAD_THRESHOLD

P = ParamSpec("P")
T = TypeVar("T")

_threads = ThreadPoolExecutor(2, "requests")  # more threads would slow the engine down


async def run_in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns the result of `work`, run on one of two threads that all requests share."""
    return await asyncio.get_running_loop().run_in_executor(_threads, lambda: work(*args, **kwargs))


async def run_sized(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns the result of `work`, run on a thread if its input of `size` bytes or characters is
    large.
    """
    return (
        await run_in_thread(work, *args, **kwargs)
        if size > THREAD_THRESHOLD
        else work(*args, **kwargs)
    )


class Throttle(logging.Filter):
    """Passes each distinct line once per `LOG_SECONDS`, and at most `LOG_LINES` distinct lines in
    that time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        line = record.getMessage()
        recent = {text: at for text, at in self._seen.items() if now - at < LOG_SECONDS}
        passes = bool(record.exc_info) or (line not in recent and len(recent) < LOG_LINES)
        if passes:
            recent[line] = now
        self._seen = recent  # complete: another thread may read it at any time
        return passes


THROTTLE = Throttle()
for _name in ("dantinox.serve", "uvicorn.error"):
    logging.getLogger(_name).addFilter(THROTTLE)
