"""The live display of training at a terminal, drawn with rich."""

import math
import time
from typing import TextIO

from rich.console import Console as Screen
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from dantinox.report.console import Console, Row, format_headline, printable
from dantinox.report.metric_files import evaluation_loss
from dantinox.report.tables import human_time


class LiveConsole(Console):
    """Shows a progress bar and the latest metrics at the bottom; evaluations, samples and notes
    scroll above them.

    External text is wrapped in `Text`, which rich prints literally and never interprets as markup.
    """

    stage_interval = math.inf  # the bar shows the progress

    def __init__(self, stream: TextIO, screen: Screen | None = None):
        super().__init__(stream)
        self.screen = screen or Screen(file=stream, highlight=False, markup=False, emoji=False)
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.screen,
            expand=True,
        )
        self.task = self.progress.add_task("train", total=None, left="")
        self.live = Live(
            console=self.screen, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False
        )
        self.latest: dict[str, object] = {}
        self.best: float | None = None
        self.bar: Progress | None = None  # of the current stage

    def stage(self, name: str, done: int, total: int, unit: str = "characters") -> None:
        if name not in self.stages:
            self._end_stage()
            columns = (
                BarColumn(bar_width=None),
                TaskProgressColumn(),
                TextColumn("{task.fields[left]}"),
            )
            self.bar = Progress(*columns, console=self.screen, transient=True)
            self.bar.add_task(name, total=total, left="")
            self.bar.start()
        super().stage(name, done, total, unit)
        if self.bar is not None:
            stage = self.stages[name]
            # Whether units were completed since the stage was first shown.
            has_estimate = done > stage.first
            left = stage.time_left(time.monotonic()) if has_estimate else ""
            self.bar.update(self.bar.task_ids[0], completed=done, left=left, refresh=done >= total)
        if done >= total:
            self._end_stage()

    def start(self, total_steps: int, step: int = 0) -> None:
        self._end_stage()
        self.progress.update(self.task, total=total_steps, completed=step)
        self.live.update(Group(self.progress, Text("compiling the first step …", style="dim")))
        self.live.start()

    def interval(self, row: Row) -> None:
        self.latest |= row
        left = (
            f"{human_time(float(row['seconds_left']))} left"
            if row.get("seconds_left") is not None
            else ""
        )
        self.progress.update(self.task, completed=int(row["step"]), left=left)
        self.live.update(
            Group(
                self.progress,
                Text(format_headline(self.latest), style="dim", overflow="ellipsis", no_wrap=True),
            )
        )

    def evaluation(self, row: Row) -> None:
        self.latest |= {
            name: row[name] for name in ("val_loss", "bits_per_byte", "val_reward") if name in row
        }
        loss = evaluation_loss(row)
        is_best = self.best is None or loss < self.best
        self.best = loss if is_best else self.best
        line = Text.assemble(
            (f"step {row['step']:>7}  ", "bold"),
            format_headline(row),
            ("  best so far" if is_best else "", "green"),
        )
        self.screen.print(line)

    def sample(self, text: str, step: int) -> None:
        self.screen.print(
            Panel(Text(printable(text)), title=Text(f"sample at step {step}"), border_style="dim")
        )

    def note(self, text: str) -> None:
        self.screen.print(Text(printable(text)))

    def close(self) -> None:
        self._end_stage()
        self.live.stop()

    def _end_stage(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
