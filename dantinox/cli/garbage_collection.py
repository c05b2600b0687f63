"""Garbage collection while a command starts."""

import gc
import os
import threading

START_SECONDS = 10.0


def pause_garbage_collection(seconds: float = START_SECONDS) -> threading.Timer:
    """Turns the garbage collection of reference cycles off for some seconds, and returns the timer
    that turns it on again.

    Imports and traces create millions of objects and hardly any cycles. The collector would examine
    them again and again: an eighth of the CPU time until the first token. The objects that exist at
    the end of the pause are never examined again.
    """

    def resume() -> None:
        gc.freeze()
        gc.enable()

    gc.disable()
    os.register_at_fork(after_in_child=gc.enable)  # a child process has no timer
    timer = threading.Timer(seconds, resume)
    timer.daemon = True
    timer.start()
    return timer
