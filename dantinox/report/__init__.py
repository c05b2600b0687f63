"""What a person sees: the console, the metric files, the plots. It decides nothing."""

from dantinox.report.console import Console, open_console
from dantinox.report.metrics import MetricsLog, read_csv, read_jsonl
from dantinox.report.plots import plot_loss
from dantinox.report.tables import human_bytes, human_count, table

__all__ = [
    "Console", "MetricsLog", "human_bytes", "human_count", "open_console", "plot_loss", "read_csv", "read_jsonl", "table",
]  # fmt: skip
