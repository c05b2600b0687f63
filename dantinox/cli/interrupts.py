"""Ctrl-C while a program is compiled or runs on a device: Python would call its signal handler only afterwards."""

import contextlib
import os
import signal
import sys
import threading
from typing import Any, NoReturn

INTERRUPTED = 130  # exit code, as in a shell
GRACE_SECONDS = 1.0  # in which the main thread may react to Ctrl-C itself


def exit_interrupted() -> NoReturn:
    """Ends the process at once. The end of the interpreter would wait for a running program, or free memory that it uses."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(INTERRUPTED)


def watch_interrupts() -> None:
    """Ends this process on Ctrl-C if its main thread does not react within a second.

    Does nothing if SIGINT is ignored. While a command has a signal handler of its own, such as one that saves a checkpoint, only
    that handler decides. Call it from the main thread.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    reacted = threading.Event()

    def interrupt(number: int, frame: Any) -> None:
        reacted.set()
        signal.default_int_handler(number, frame)

    def watch() -> None:
        while numbers := os.read(reader, 64):  # the numbers of the signals that arrive
            if signal.SIGINT not in numbers or signal.getsignal(signal.SIGINT) is not interrupt:
                continue
            if not reacted.wait(GRACE_SECONDS):
                print("interrupted", file=sys.stderr, flush=True)
                exit_interrupted()
            reacted.clear()

    signal.signal(signal.SIGINT, interrupt)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()
