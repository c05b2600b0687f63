"""Handling of SIGTERM, SIGINT and SIGHUP: the first signal makes the loop save and stop, the second
ends the process.

The exit code of the process is 128 + the signal's number: 143 for SIGTERM, 130 for SIGINT, and 129
for SIGHUP, which a process gets if its terminal is closed.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from dantinox.programs import exit_now

# Windows has no SIGHUP.
HANGUP = getattr(signal, "SIGHUP", None)
STOP_SIGNALS = tuple(
    number for number in (signal.SIGTERM, signal.SIGINT, HANGUP) if number is not None
)


class StopRequest:
    """The signal that requested a stop, if any. Until `can_save` is set, a signal exits
    immediately.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.can_save = False

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """The signal handler."""
        if self.signal is not None and number == HANGUP:
            return  # the system and the shell may both send one when a terminal is closed
        if self.signal is not None:
            exit_now(128 + number)
        self.signal = number
        if not self.can_save:
            self.end()

    def end(self) -> NoReturn:
        """Raises KeyboardInterrupt after SIGINT, as in any Python program, and SystemExit with code
        143 after SIGTERM and 129 after SIGHUP.
        """
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + (self.signal or 0))


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Handles the signals inside the block. Outside the main thread, Python allows no signal
    handlers: nothing changes.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    # `nohup` and `&` let a process ignore some signals; it keeps ignoring them.
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, request.receive) for number in handled}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
