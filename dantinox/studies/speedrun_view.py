"""The report of a speedrun: `report.md` and `report.html`, and the lines on the console."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax

from dantinox.machine import cpu_name
from dantinox.report.document import Block, Figure, Heading, Paragraph, Table, Verbatim, to_html, to_markdown
from dantinox.report.tables import Column, human_count, human_time, text_table
from dantinox.run import RunDirectory, load_run_config
from dantinox.studies.speedrun import BASE, CHAT, REPORTS, StageResult
from dantinox.studies.speedrun_evaluation import Sample, TaskResult


@dataclass(frozen=True)
class Speedrun:
    """A finished speedrun.

    Attributes:
      folder: the folder with a run directory per stage.
      device: the machine that wrote the report.
      price: price of the machine per hour; None: unknown.
      evaluation_seconds: wall time of the evaluation.
    """

    folder: Path
    stages: Sequence[StageResult]
    tasks: Sequence[TaskResult]
    samples: Sequence[Sample]
    evaluation_seconds: float
    device: str
    price: float | None = None

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages) + self.evaluation_seconds


def describe_device() -> str:
    """Returns the devices of this machine, such as `8 × NVIDIA H100` or the CPU with its number of cores."""
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
        Column("val_loss", "val loss", lambda stage: f"{stage.val_loss:.4f}"),
        Column("bits_per_byte", "bits/byte", lambda stage: _four(stage.bits_per_byte)),
        Column("best_step", "at step", lambda stage: stage.best_step, "d"),
    ]
    return columns + [Column("cost", "cost", lambda stage: _cost(stage.seconds, price))] * (price is not None)


def _four(number: float | None) -> str | None:
    return None if number is None else f"{number:.4f}"


TASK_COLUMNS = [
    Column("task", "task", lambda task: task.task),
    Column("corpus", "corpus", lambda task: task.corpus),
    Column("base", "pretrained", lambda task: f"{task.base} of {task.count}"),
    Column("final", "final", lambda task: f"{task.final} of {task.count}"),
]


def totals(speedrun: Speedrun) -> str:
    """Returns a sentence with the time, tokens and FLOPs of all stages, and the cost if there is a price."""
    tokens, flops = sum(stage.tokens for stage in speedrun.stages), sum(stage.flops for stage in speedrun.stages)
    cost = _cost(speedrun.seconds, speedrun.price)
    text = f"{human_time(speedrun.seconds)} in total, {human_count(tokens)} tokens, {flops:.2e} FLOPs"
    return text + (f", cost {cost} at {speedrun.price:g} per hour" if cost is not None else "")


def speedrun_blocks(speedrun: Speedrun) -> Iterator[Block]:
    """Yields the parts of the report."""
    config = load_run_config(RunDirectory(speedrun.folder / BASE))
    m, parameters, path = config.model, speedrun.stages[0].parameters, config.data.path or ()
    paths = [path] if isinstance(path, str) else path
    yield Heading(f"Speedrun at depth {m.num_blocks}", 1)
    yield Paragraph(
        f"A model of width {m.dim} with {human_count(parameters)} parameters and a context of {m.max_context} tokens, "
        f"pretrained on {', '.join(paths)}. {speedrun.device}."
    )
    yield Paragraph(f"{totals(speedrun)}.")
    yield Heading("Stages")
    yield Table(stage_columns(speedrun.price), speedrun.stages)
    yield Paragraph(
        "Loss in nats per token and bits per byte are those of the best evaluation on held-out text; in fine-tuning, on "
        "held-out answers. Tokens are positions in batches. FLOPs are model FLOPs. Time includes start-up and evaluations."
    )
    for stage in speedrun.stages:
        plot = Path(stage.name) / "plots" / "loss.png"
        if (speedrun.folder / plot).is_file():
            yield Figure(str(plot), f"Loss of the stage {stage.name}")
    if speedrun.tasks:
        yield Heading("Tasks")
        yield Table(TASK_COLUMNS, speedrun.tasks)
        yield Paragraph("Greedy answers to questions that fine-tuning has not seen.")
    if speedrun.samples:
        yield Heading("Chat")
        yield Paragraph("Greedy answers of the final model to held-out questions, each with the reference answer.")
        for sample in speedrun.samples:
            yield Verbatim(f"User:\n{sample.question}\n\nAssistant:\n{sample.answer}\n\nReference:\n{sample.reference}")
    yield Heading("Commands")
    chat = f"dantinox chat {speedrun.folder / CHAT}"
    yield Verbatim("\n".join([*(stage.command for stage in speedrun.stages), chat]))


def speedrun_files(speedrun: Speedrun) -> dict[str, Callable[[], str | bytes]]:
    """Returns file name → function that creates the content, for the two reports."""
    blocks = list(speedrun_blocks(speedrun))
    title = next(block.text for block in blocks if isinstance(block, Heading))
    return dict(zip(REPORTS, (partial(to_markdown, blocks), partial(to_html, blocks, title, speedrun.folder)), strict=True))


def speedrun_lines(speedrun: Speedrun, width: int) -> Iterator[str]:
    """Yields the tables, the total, the paths of the reports and the command to chat."""
    yield from text_table(stage_columns(speedrun.price), speedrun.stages, width)
    if speedrun.tasks:
        yield ""
        yield from text_table(TASK_COLUMNS, speedrun.tasks, width)
    yield ""
    yield totals(speedrun)
    yield f"report: {speedrun.folder / REPORTS[0]}"
    yield f"next: dantinox chat {speedrun.folder / CHAT}"
