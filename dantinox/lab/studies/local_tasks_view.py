"""Report of the scores of local tasks."""

from collections.abc import Iterator

from dantinox.lab.studies.local_tasks import LocalScore, LocalTaskStudy
from dantinox.lab.studies.statistics import Interval
from dantinox.report.document import Block, Paragraph, Table
from dantinox.report.tables import Column

COLUMNS = [
    Column("task", "task", lambda score: score.task),
    Column("accuracy", "accuracy", lambda score: score.accuracy),
    Column("baseline", "chance", lambda score: score.baseline),
    Column("centered", "centered", LocalScore.centered, interval=True),
    Column("shots", "shots", lambda score: score.shots, "d"),
    Column("questions", "questions", lambda score: str(len(score.correct))),
]


def local_task_blocks(study: LocalTaskStudy) -> Iterator[Block]:
    """Yields a table of the tasks, the means of groups, the mean of all tasks, and the differences
    from the reference.
    """
    yield Table(COLUMNS, study.scores)
    groups = [*((name, name) for name in study.groups()), ("all tasks", None)]
    columns = [
        Column("group", "mean centered accuracy", lambda row: row[0]),
        Column("mean", "value", lambda row: format_interval(study.mean(row[1]))),
    ]
    if study.reference:
        heading = f"minus {study.reference}"
        columns.append(
            Column(
                "difference",
                heading,
                lambda row: format_interval(study.difference(row[1]), sign="+"),
            )
        )
    yield Table(columns, groups)
    yield Paragraph(
        "Centered accuracy is 0 for random guesses and 1 for perfect answers. Intervals cover 95 %."
    )


def format_interval(found: Interval, sign: str = "") -> str:
    """Formats a value and its interval, such as `0.533 [0.139, 0.806]`; `sign` is "+" for a
    difference.
    """
    return f"{found.value:{sign}.3f} [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"
