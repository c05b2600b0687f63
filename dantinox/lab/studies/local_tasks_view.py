"""Text of the scores of local tasks."""

from collections.abc import Iterator

from dantinox.lab.studies.local_tasks import LocalScore, LocalTaskStudy
from dantinox.lab.studies.statistics import Interval
from dantinox.report.tables import Column, text_table, wrap_lines

COLUMNS = [
    Column("task", "task", lambda score: score.task),
    Column("accuracy", "accuracy", lambda score: score.accuracy),
    Column("baseline", "chance", lambda score: score.baseline),
    Column("centered", "centered", LocalScore.centered, interval=True),
    Column("shots", "shots", lambda score: score.shots, "d"),
    Column("questions", "questions", lambda score: str(len(score.correct))),
]


def local_task_lines(study: LocalTaskStudy, width: int) -> Iterator[str]:
    """Yields a table of the tasks, the means of groups, the mean of all tasks, and the differences from the reference."""
    yield from text_table(COLUMNS, study.scores, width)
    yield ""
    rows = [(name, name) for name in study.groups()] + [("all tasks", None)]
    columns = [
        Column("group", "mean centered accuracy", lambda row: row[0]),
        Column("mean", "value", lambda row: _interval(study.mean(row[1]))),
    ]
    if study.reference:
        heading = f"minus {study.reference}"
        columns.append(Column("difference", heading, lambda row: _interval(study.difference(row[1]), sign="+")))
    yield from text_table(columns, rows, width)
    yield ""
    note = "Centered accuracy is 0 for random guesses and 1 for perfect answers. Intervals cover 95 %."
    yield from wrap_lines([note], width, "")


def _interval(found: Interval, sign: str = "") -> str:
    return " ".join([f"{found.value:{sign}.3f}", f"[{found.low:{sign}.3f}, {found.high:{sign}.3f}]"])
