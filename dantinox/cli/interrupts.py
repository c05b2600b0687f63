"""Ctrl-C while a program is compiled or runs on a device: Python would call its signal handler only
afterwards.
"""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

INTERRUPTED = 130  # exit code, as in a shell
GRACE_SECONDS = 1.0  # in which the main thread may react to Ctrl-C itself


def exit_interrupted() -> NoReturn:
    """Ends the process at once. A normal exit would wait for a running program, or release memory
    that it still uses.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(INTERRUPTED)


def watch_interrupts() -> None:
    """Ends this process on Ctrl-C if its main thread does not react within a second. Call it from
    the main thread.

    Does nothing if SIGINT is ignored. While a command has a signal handler of its own, such as one
    that saves a checkpoint, only that handler decides.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    last_reaction = -math.inf

    def interrupt(number: int, frame: Any) -> None:
        nonlocal last_reaction
        last_reaction = time.monotonic()
        signal.default_int_handler(number, frame)

    def watch() -> None:
        # `read` returns the numbers of the signals that arrive, also those of forked children.
        while numbers := os.read(reader, 64):
            arrived = time.monotonic()
            if signal.SIGINT not in numbers or signal.getsignal(signal.SIGINT) is not interrupt:
                continue
            time.sleep(GRACE_SECONDS)
            # The main thread may have called its handler shortly before this thread read the
            # number.
            if last_reaction < arrived - GRACE_SECONDS:
                print("interrupted", file=sys.stderr, flush=True)
                exit_interrupted()

    signal.signal(signal.SIGINT, interrupt)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()
