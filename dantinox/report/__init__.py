"""Output of training and generation: console, metric files, experiment trackers, tables, plots and
HTML pages.
"""

import os
import sys
from typing import TextIO

from dantinox.report.console import Console
from dantinox.report.metric_files import MetricsLog, read_csv, read_jsonl
from dantinox.report.plots import plot_loss
from dantinox.report.tables import human_bytes, human_count, table
from dantinox.report.trackers import trackers

__all__ = [
    "Console", "MetricsLog", "human_bytes", "human_count", "open_console", "plot_loss", "read_csv",
    "read_jsonl", "table",
    "trackers",
]  # fmt: skip


def open_console(stream: TextIO | None = None) -> Console:
    """Returns the display for `stream` (default: stderr).

    A terminal that can move its cursor gets a live display, a notebook gets a progress bar, and
    anything else gets plain lines.
    """
    ipython = sys.modules.get("IPython")
    if stream is None and ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
        from dantinox.report.notebook import NotebookConsole

        return NotebookConsole(sys.stderr)
    stream = stream or sys.stderr
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        from dantinox.report.live import LiveConsole  # rich takes 60 ms to import

        return LiveConsole(stream)
    return Console(stream)
