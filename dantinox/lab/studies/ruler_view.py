"""Text, Markdown, CSV and JSON of the scores of RULER's tasks."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from dantinox.lab.studies.ruler import QUESTION_MODES, RulerResult, RulerStudy
from dantinox.report.tables import Column, bullets, csv_table, markdown_table, text_table, wrap_lines

# Column heading → the prefix of the task names in the column.
GROUPS = {
    "single": "niah_single", "multikey": "niah_multikey", "multivalue": "niah_multivalue", "multiquery": "niah_multiquery",
    "vt": "vt", "cwe": "cwe", "fwe": "fwe", "qa": "qa",
}  # fmt: skip


def _group_column(heading: str, start: str) -> Column:
    """Returns a column with the mean scores of the tasks with the prefix `start`: agnostic / aware."""

    def both(finding: RulerResult) -> str:
        own = [
            [found.value for task, found in finding.scores[mode].items() if task.startswith(start)] for mode in QUESTION_MODES
        ]
        return " / ".join(f"{fmean(values):.0f}" for values in own)

    return Column(heading, heading, both)


def _mean_column(mode: str) -> Column:
    return Column(f"mean_{mode}", mode, lambda finding: finding.scores[mode]["mean"], ".1f", interval=True)


def _columns(study: RulerStudy) -> list[Column]:
    groups = [
        _group_column(heading, start) for heading, start in GROUPS.items() if any(t.startswith(start) for t in study.tasks)
    ]
    return [
        Column("method", "method", lambda finding: finding.method),
        Column("ratio", "ratio", lambda finding: finding.ratio, ".2f"),
        *map(_mean_column, QUESTION_MODES),
        *groups,
        Column("bytes", "bytes", lambda finding: finding.bytes, ",.0f"),
        Column("share", "share %", lambda finding: 100 * finding.share, ".1f"),
        Column("prefill_seconds", "prefill s", lambda finding: finding.prefill_seconds, ".2f"),
        Column("tokens_per_second", "tok/s", lambda finding: finding.tokens_per_second, ".1f"),
    ]


def ruler_lines(study: RulerStudy, width: int = 100) -> Iterator[str]:
    """Yields the conditions, a table for each length and a glossary, in lines of at most `width`."""
    width = max(width, 60)
    yield from wrap_lines([_description(study), *(f"Left out: {line}" for line in study.left_out)], width, "")
    for length in dict.fromkeys(finding.length for finding in study.findings):
        yield from ["", f"{length} tokens"]
        yield from text_table(_columns(study), [finding for finding in study.findings if finding.length == length], width, 2)
    yield from wrap_lines(["", *_notes()], width)


def ruler_markdown(study: RulerStudy) -> str:
    """Returns a table with intervals for each length, and a glossary."""
    parts = [f"# RULER on {Path(study.run).name}", _description(study)]
    parts += [bullets([f"Left out: {line}" for line in study.left_out])] if study.left_out else []
    for length in dict.fromkeys(finding.length for finding in study.findings):
        rows = [finding for finding in study.findings if finding.length == length]
        parts += [f"## {length} tokens", markdown_table(_columns(study), rows)]
    return "\n\n".join([*parts, bullets(_notes())]) + "\n"


def ruler_csv(study: RulerStudy) -> str:
    """Returns a row per cache and length, with the interval of every task."""

    def task(mode: str, name: str) -> Column:
        return Column(f"{name}_{mode}", "", lambda finding: finding.scores[mode][name], interval=True)

    columns = [
        Column("length", "", lambda finding: finding.length, ".0f"),
        *(column for column in _columns(study) if column.name not in GROUPS),
        *(task(mode, name) for mode in QUESTION_MODES for name in study.tasks),
    ]
    return csv_table(columns, study.findings)


def ruler_files(study: RulerStudy) -> dict[str, Callable[[], str | bytes]]:
    return {
        "ruler.csv": lambda: ruler_csv(study),
        "ruler.md": lambda: ruler_markdown(study),
        "ruler.json": lambda: json.dumps(asdict(study), indent=1, allow_nan=False) + "\n",
    }


def _description(study: RulerStudy) -> str:
    return (
        f"{study.run}: {len(study.tasks)} tasks of RULER with {study.samples} samples each, generated from {study.text} with "
        f"seed {study.seed}; {study.device}."
    )


def _notes() -> list[str]:
    """Returns the meaning of the terms in the tables."""
    return [
        "Scores are the expected answers that were found, in %, by RULER's string match. agnostic: the cache chooses what it "
        "keeps before the question is read; aware: with the question in the prompt. Pairs "
        "are agnostic / aware, means over the tasks of a group.",
        "full: the cache keeps everything. streaming: it keeps the first and the last tokens. uniform, entropy, distance, "
        "loss: it keeps what the last queries attend to, with shares of the heads by that signal. expected_attention, kvzip: "
        "these policies, with equal shares or with +loss.",
        "bytes: allocated for one row, including positions and importances; share: of the full cache in the compute dtype.",
        "The wording, words and documents of the tasks are generated here: scores are not comparable with published ones.",
        "prefill s: for one prompt. tok/s: for all rows of a batch. Both are medians without the first batch, which compiles.",
        "Intervals are 95 %, bootstrapped over samples.",
    ]
