"""The only way in which this package ends its process without unwinding the stack."""

import os
from typing import NoReturn


def exit_now(code: int) -> NoReturn:
    """Ends the process at once, whatever its threads are doing: no `finally`, no exit handler, no flush of buffers.

    Files stay intact, because each one is written under another name and then renamed.
    """
    os._exit(code)
