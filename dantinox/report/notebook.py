"""The display of training in a notebook: one progress bar, updated in place."""

from typing import Any

from IPython.display import display

from dantinox.report.console import Console, Row, format_headline
from dantinox.report.tables import human_time

WIDTH = 30  # characters of the bar


class NotebookConsole(Console):
    """Shows interval rows in a progress bar, and evaluations, samples and notes as plain lines
    below it.
    """

    total = 0
    handle: Any = None

    def start(self, total_steps: int, step: int = 0) -> None:
        self.total = total_steps
        self._show(step, "compiling the first step …")

    def interval(self, row: Row) -> None:
        left = (
            f" · {human_time(float(row['seconds_left']))} left"
            if row.get("seconds_left") is not None
            else ""
        )
        self._show(int(row["step"]), format_headline(row) + left)

    def _show(self, step: int, text: str) -> None:
        done = WIDTH * step // max(self.total, 1)
        content = {
            "text/plain": f"step {step}/{self.total} {'█' * done}{'░' * (WIDTH - done)} {text}"
        }
        if self.handle is None:
            self.handle = display(content, raw=True, display_id=True)
        else:
            self.handle.update(content, raw=True)
