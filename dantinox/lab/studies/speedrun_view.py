"""The report of a speedrun: `report.md` and `report.html`, and the lines on the console."""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path

import jax

from dantinox.lab.studies.local_tasks import LocalTaskStudy
from dantinox.lab.studies.local_tasks_view import format_interval
from dantinox.lab.studies.speedrun import BASE, FINAL, REPORTS, STAGES, StageResult
from dantinox.lab.studies.speedrun_evaluation import ANSWER_TOKENS, Sample, TaskResult
from dantinox.machine import cpu_name
from dantinox.report.document import (
    Block,
    Details,
    Figure,
    Heading,
    Paragraph,
    Table,
    Verbatim,
    to_html,
    to_lines,
    to_markdown,
)
from dantinox.report.tables import Column, human_count, human_time
from dantinox.run import RunDirectory, load_run_config


@dataclass(frozen=True)
class Speedrun:
    """A finished speedrun.

    Attributes:
      folder: the folder with a run directory per stage.
      tasks: the scores of answers to held-out questions; `samples`: some of the answers.
      local_tasks: stage → its scores in the built-in tasks, or a sentence on why there are none.
      device: the machine that wrote the report.
      price: price of the machine per hour; None: unknown.
      evaluation_seconds: wall time of the evaluation.
    """

    folder: Path
    stages: Sequence[StageResult]
    tasks: Sequence[TaskResult]
    samples: Sequence[Sample]
    local_tasks: Mapping[str, LocalTaskStudy] | str
    evaluation_seconds: float
    device: str
    price: float | None = None

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages) + self.evaluation_seconds


def describe_device() -> str:
    """Returns the devices of this machine, such as `8 × NVIDIA H100` or the CPU with its number of
    cores.
    """
    devices = jax.devices()
    if devices[0].platform == "cpu":
        return f"{cpu_name()}, {os.cpu_count()} cores"
    return f"{len(devices)} × {devices[0].device_kind}"


def _cost(seconds: float, price: float | None) -> str | None:
    return None if price is None else f"{price * seconds / 3600:.3f}"


def stage_columns(price: float | None) -> list[Column]:
    """Returns the columns of the table of stages; with a price per hour, also the cost."""
    columns = [
        Column("stage", "stage", lambda stage: stage.name),
        Column("steps", "steps", lambda stage: stage.steps, "d"),
        Column("tokens", "tokens", lambda stage: human_count(stage.tokens)),
        Column("flops", "FLOPs", lambda stage: f"{stage.flops:.2e}"),
        Column("time", "time", lambda stage: human_time(stage.seconds)),
        Column("val_loss", "val loss", lambda stage: _four_decimals(stage.val_loss)),
        Column("bits_per_byte", "bits/byte", lambda stage: _four_decimals(stage.bits_per_byte)),
        Column("reward", "val reward", lambda stage: _four_decimals(stage.reward)),
        Column("best_step", "at step", lambda stage: stage.best_step, "d"),
    ]
    if price is not None:
        columns.append(Column("cost", "cost", lambda stage: _cost(stage.seconds, price)))
    return columns


def _four_decimals(number: float | None) -> str | None:
    return None if number is None else f"{number:.4f}"


def _correct_answers(number: int, task: TaskResult) -> str:
    return f"{task.correct[number]} of {task.count}"


TASK_COLUMNS = [
    Column("task", "task", lambda task: task.task),
    Column("corpus", "corpus", lambda task: task.corpus),
    *(
        Column(stage.name, stage.name, partial(_correct_answers, number))
        for number, stage in enumerate(STAGES)
    ),
]


def local_task_rows(studies: Mapping[str, LocalTaskStudy]) -> list[list[str]]:
    """Returns rows of a task and the accuracy of each stage. The last row has the mean centered
    accuracy with its interval.
    """
    scores = list(zip(*(study.scores for study in studies.values()), strict=True))
    rows = [[row[0].task, *(f"{score.accuracy:.2f}" for score in row)] for row in scores]
    means = [format_interval(study.mean()) for study in studies.values()]
    return [*rows, ["mean centered accuracy", *means]]


def local_task_columns(studies: Mapping[str, LocalTaskStudy]) -> list[Column]:
    return [
        Column(name, name, itemgetter(number)) for number, name in enumerate(["task", *studies])
    ]


def totals(speedrun: Speedrun) -> str:
    """Returns a sentence with the time, tokens and FLOPs of all stages, and the cost if there is a
    price.
    """
    tokens = sum(stage.tokens for stage in speedrun.stages)
    flops = sum(stage.flops for stage in speedrun.stages)
    cost = _cost(speedrun.seconds, speedrun.price)
    text = (
        f"{human_time(speedrun.seconds)} in total, {human_count(tokens)} tokens, {flops:.2e} FLOPs"
    )
    return text + (f", cost {cost} at {speedrun.price:g} per hour" if cost is not None else "")


def speedrun_blocks(speedrun: Speedrun) -> Iterator[Block]:
    """Yields the parts of the report."""
    config = load_run_config(RunDirectory(speedrun.folder / BASE))
    model = config.model
    parameters = speedrun.stages[0].parameters
    path = config.data.path or ()
    paths = [path] if isinstance(path, str) else path
    yield Heading(f"Speedrun at depth {model.num_blocks}", 1)
    yield Paragraph(
        f"A model of width {model.dim} with {human_count(parameters)} parameters and a context of"
        f" {model.max_context} tokens, pretrained on {', '.join(paths)}. {speedrun.device}."
    )
    yield Paragraph(f"{totals(speedrun)}.")
    yield Heading("Stages")
    yield Table(stage_columns(speedrun.price), speedrun.stages)
    note = (
        "Loss in nats per token and bits per byte are those of the best evaluation on held-out"
        " text; in fine-tuning, on held-out answers. The reward is the mean reward of greedy"
        " answers to held-out problems. Tokens are positions in batches. FLOPs are model FLOPs of"
        " the training steps. Time includes start-up, sampling and evaluations."
    )
    yield Details([Paragraph(note)])
    for stage in speedrun.stages:
        curve = "loss" if stage.reward is None else "reward"
        plot = Path(stage.name) / "plots" / f"{curve}.png"
        if (speedrun.folder / plot).is_file():
            yield Figure(str(plot), f"The {curve} of the stage {stage.name}")
    if speedrun.tasks:
        yield Heading("Tasks")
        yield Table(TASK_COLUMNS, speedrun.tasks)
        yield Details([Paragraph("Greedy answers to questions that training has not seen.")])
    yield Heading("Built-in tasks")
    if isinstance(speedrun.local_tasks, str):
        yield Paragraph(f"Not run: {speedrun.local_tasks}.")
    else:
        yield Table(local_task_columns(speedrun.local_tasks), local_task_rows(speedrun.local_tasks))
        note = (
            "Accuracy in the tasks of `dantinox eval tasks RUN --tasks builtin`. Centered accuracy"
            " is 0 for random guesses and 1 for perfect answers; intervals cover 95 %."
        )
        yield Details([Paragraph(note)])
    if speedrun.samples:
        texts = [
            f"User:\n{sample.question}\n\nAssistant:\n{sample.answer}\n\nReference:\n{sample.reference}"
            for sample in speedrun.samples
        ]
        note = (
            "Greedy answers of the final model to held-out"
            " questions, each with the reference answer."
        )
        yield Details([Heading("Chat"), Paragraph(note), *map(Verbatim, texts)])
    commands = [*(stage.command for stage in speedrun.stages), chat_command(speedrun)]
    yield Details([Heading("Commands"), Verbatim("\n".join(commands))])


def chat_command(speedrun: Speedrun) -> str:
    return (
        f"dantinox chat {shlex.quote(str(speedrun.folder / FINAL))} --max_new_tokens"
        f" {ANSWER_TOKENS}"
    )


def speedrun_files(speedrun: Speedrun) -> dict[str, Callable[[], str | bytes]]:
    """Returns file name → function that creates the content, for the two reports."""
    blocks = list(speedrun_blocks(speedrun))
    title = next(block.text for block in blocks if isinstance(block, Heading))
    return dict(
        zip(
            REPORTS,
            (partial(to_markdown, blocks), partial(to_html, blocks, title, speedrun.folder)),
            strict=True,
        )
    )


def speedrun_lines(speedrun: Speedrun, width: int) -> Iterator[str]:
    """Yields the tables, the total, the paths of the reports and the command to chat."""
    yield from to_lines(speedrun_blocks(speedrun), width)
    yield ""
    yield f"report: {speedrun.folder / REPORTS[0]}"
    yield f"next: {chat_command(speedrun)}"
