"""Report of the scores of RULER's tasks."""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from dantinox.lab.studies.ruler_study import QUESTION_MODES, RulerResult, RulerStudy
from dantinox.report.document import Block, Heading, Items, Paragraph, Table
from dantinox.report.tables import CSV, MARKDOWN, TEXT, Column

# Column heading → the prefix of the task names in the column.
GROUPS = {
    "single": "niah_single", "multikey": "niah_multikey", "multivalue": "niah_multivalue",
    "multiquery": "niah_multiquery", "vt": "vt", "cwe": "cwe", "fwe": "fwe", "qa": "qa",
}  # fmt: skip


def _group_column(heading: str, start: str) -> Column:
    """Returns a column with the mean scores of the tasks with the prefix `start`: agnostic /
    aware.
    """

    def pair(result: RulerResult) -> str:
        means = [
            fmean(
                interval.value
                for task, interval in result.scores[mode].items()
                if task.startswith(start)
            )
            for mode in QUESTION_MODES
        ]
        return " / ".join(f"{mean:.0f}" for mean in means)

    return Column(heading, heading, pair, outputs=(TEXT, MARKDOWN))


def _mean_column(mode: str) -> Column:
    return Column(
        f"mean_{mode}", mode, lambda result: result.scores[mode]["mean"], ".1f", interval=True
    )


def _task_column(mode: str, name: str) -> Column:
    return Column(
        f"{name}_{mode}",
        "",
        lambda result: result.scores[mode][name],
        interval=True,
        outputs=(CSV,),
    )


def _columns(study: RulerStudy) -> list[Column]:
    groups = {
        heading: start
        for heading, start in GROUPS.items()
        if any(task.startswith(start) for task in study.tasks)
    }
    return [
        Column("length", "", lambda result: result.length, ".0f", outputs=(CSV,)),
        Column("method", "method", lambda result: result.method),
        Column("ratio", "ratio", lambda result: result.ratio, ".2f"),
        *map(_mean_column, QUESTION_MODES),
        *(_group_column(heading, start) for heading, start in groups.items()),
        Column("bytes", "bytes", lambda result: result.bytes, ",.0f"),
        Column("share", "share %", lambda result: 100 * result.share, ".1f"),
        Column("prefill_seconds", "prefill s", lambda result: result.prefill_seconds, ".2f"),
        Column("tokens_per_second", "tok/s", lambda result: result.tokens_per_second, ".1f"),
        *(_task_column(mode, name) for mode in QUESTION_MODES for name in study.tasks),
    ]


def ruler_blocks(study: RulerStudy) -> Iterator[Block]:
    """Yields the report: the conditions, a table for each length, and the terms."""
    yield Heading(f"RULER on {Path(study.run).name}", 1)
    yield Paragraph(_description(study))
    yield Items([f"Left out: {line}" for line in study.left_out])
    for length in dict.fromkeys(result.length for result in study.findings):
        yield Heading(f"{length} tokens")
        yield Table(
            _columns(study),
            [result for result in study.findings if result.length == length],
            front=2,
        )
    yield Items(_notes())


def _description(study: RulerStudy) -> str:
    return (
        f"{study.run}: {len(study.tasks)} tasks of RULER with {study.samples} samples each,"
        f" generated from {study.text} with seed {study.seed}; {study.device}."
    )


def _notes() -> list[str]:
    """Returns the meaning of the terms in the tables."""
    return [
        (
            "Scores are the expected answers that were found, in %, by RULER's string match."
            " agnostic: the cache chooses what it keeps before the question is read; aware: with"
            " the question in the prompt. Pairs are agnostic /"
            " aware, means over the tasks of a group."
        ),
        (
            "full: the cache keeps everything. streaming: it keeps the first and the last tokens."
            " uniform, entropy, distance, loss: it keeps what the last queries attend to, with"
            " shares of the heads by that signal. expected_attention, kvzip: these policies, with"
            " equal shares or with +loss."
        ),
        (
            "bytes: allocated for one row, including positions and importances; share: of the full"
            " cache in the compute dtype."
        ),
        (
            "The wording, words and documents of the tasks are generated here: scores are not"
            " comparable with published ones."
        ),
        (
            "prefill s: for one prompt. tok/s: for all rows of a batch. Both are medians of the"
            " batches, without compilation."
        ),
        "Intervals are 95 %, bootstrapped over samples.",
    ]
