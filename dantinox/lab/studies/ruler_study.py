"""`dantinox eval ruler`: the tasks of RULER with compressed caches.

There are two modes. With `agnostic`, the cache of the prompt is compressed before the question is
read, token by token. With `aware`, the question is part of the prompt, and only its last token is
read after the compression. In both modes, the answer is then decoded greedily from the compressed
cache.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import jax
import numpy as np

from dantinox.config import UserError
from dantinox.generation import LoadedModel, load
from dantinox.lab.measure.texts import equal_batches
from dantinox.lab.studies.kv_bench import CacheBenchmark, Generated, QuestionBatch
from dantinox.lab.studies.kv_variants import (
    REFERENCE,
    STREAMING,
    UNIFORM,
    CacheVariant,
    build_variants,
    check_ratios,
    select_methods,
)
from dantinox.lab.studies.ruler_tasks import (
    TASKS,
    Sample,
    build_haystack,
    make_sample,
    match_score,
    python_manual,
)
from dantinox.lab.studies.statistics import Interval, mean_interval, select_names
from dantinox.run import open_run
from dantinox.text import Corpus

RULER_METHODS = (
    REFERENCE, STREAMING, UNIFORM, "entropy", "distance", "loss", "expected_attention",
    "expected_attention+loss", "kvzip",
    "kvzip+loss",
)  # fmt: skip
LENGTHS = (2048, 4096)
RATIOS = (0.5, 0.2)
SAMPLES = 10
MIN_LENGTH = 256
ROW_TOKENS = 8192  # prompt tokens per batch
TEXT_CHARACTERS = 1 << 21  # read from a given text at most
# Agnostic: the question is read after the compression. Aware: it is part of the prompt.
QUESTION_MODES = ("agnostic", "aware")


@dataclass(frozen=True)
class RulerResult:
    """The scores of a cache at one length.

    Attributes:
      bytes: bytes of one row.
      share: `bytes` relative to the full cache in the compute dtype.
      scores: `agnostic` or `aware` → task → score in %, and the score of all tasks as `mean`.
      prefill_seconds: median prefill time of one prompt.
      tokens_per_second: median decoding speed of a batch.
    """

    method: str
    length: int
    ratio: float
    dtype: str
    bytes: int
    share: float
    scores: Mapping[str, Mapping[str, Interval]]
    prefill_seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class RulerStudy:
    """The conditions, and the results of every cache at every length.

    Attributes:
      text: the source of the essays.
      samples: samples of each task.
      left_out: methods that were left out, with reasons.
    """

    run: str
    calibration: str | None
    device: str
    text: str
    tasks: Sequence[str]
    samples: int
    seed: int
    left_out: Sequence[str]
    findings: Sequence[RulerResult]


def evaluate_ruler(
    run_dir: str | Path,
    *,
    lengths: Sequence[int] | None = None,
    methods: Sequence[str] | None = None,
    ratios: Sequence[float] | None = None,
    samples: int = SAMPLES,
    tasks: str | None = None,
    data_path: str | Path | None = None,
    kv_calibration: str | Path | None = None,
    kv_dtype: str = "auto",
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> RulerStudy:
    """Generates RULER's tasks and evaluates the model on them with each cache.

    Args:
      lengths: tokens of a prompt together with its answer; None: those of `LENGTHS` that the
        context allows.
      methods: names in `RULER_METHODS`; None: all whose signal was measured.
      ratios: shares of the slots; None: `RATIOS`.
      samples: samples of each task.
      tasks: names of `TASKS`, separated by commas; None: all.
      data_path: the text that essays and words are taken from, in the form of `data.path`; None:
        Python's manual.
      kv_calibration: the file of measured signals; None: that of the run.
      kv_dtype: dtype of the compressed caches, a value of `kv.dtype`; the full cache has the
        compute dtype.
      seed: seed of the samples.
      progress: called with a line at the start of each part of the work and then every few seconds.

    Raises:
      UserError: a name or number is invalid, a task does not fit in a length, or the run was not
        calibrated.
    """
    directory = open_run(run_dir)
    run = load(run_dir)
    chosen_lengths = _select_lengths(lengths, run.model.config.max_context)
    if samples < 1:
        raise UserError(f"--samples must be at least 1, got {samples}")
    check_ratios(ratios)
    task_names = _select_tasks(tasks)
    measured = run.kv_calibration(None if kv_calibration is None else str(kv_calibration))
    names, left_out = select_methods(methods, RULER_METHODS, measured, directory.path, "eval ruler")
    source = "Python's manual" if data_path is None else str(data_path)
    haystack = (
        python_manual()
        if data_path is None
        else build_haystack(_read_haystack(run, source), source)
    )
    findings: list[RulerResult] = []
    for length in chosen_lengths:
        caches, _ = build_variants(run, measured, names, ratios or RATIOS, length, kv_dtype)
        samples_by_task = {
            name: [
                make_sample(name, length, run.tokenizer.encode, haystack, seed, i)
                for i in range(samples)
            ]
            for name in task_names
        }
        findings += _evaluate_caches(run, caches, names, samples_by_task, length, progress)
    return RulerStudy(
        run=str(directory.path),
        calibration=None if measured is None else str(measured.path),
        device=jax.devices()[0].device_kind,
        text=source,
        tasks=task_names,
        samples=samples,
        seed=seed,
        left_out=left_out,
        findings=findings,
    )


def _select_lengths(lengths: Sequence[int] | None, context: int) -> list[int]:
    """Returns the lengths of prompts in ascending order; None: those of `LENGTHS` that the context
    allows, or the context.
    """
    if context < MIN_LENGTH:
        raise UserError(
            f"eval ruler needs a model with a context of at least {MIN_LENGTH} tokens, got"
            f" {context}"
        )
    for length in lengths or ():
        if not MIN_LENGTH <= length <= context:
            raise UserError(
                f"--lengths must be in [{MIN_LENGTH}, {context}], the model's context, got {length}"
            )
    if lengths:
        return sorted(set(lengths))
    return [length for length in LENGTHS if length <= context] or [context]


def _select_tasks(tasks: str | None) -> list[str]:
    """Returns the tasks that are named in a text with commas; None: all."""
    if tasks is None:
        return list(TASKS)
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise UserError("--tasks must name at least one task of RULER")
    return select_names(names, TASKS, "task of RULER")


def _read_haystack(run: LoadedModel, path: str) -> str:
    parts = list[str]()
    count = 0
    for _, part in Corpus.open(path, run.config.data.text_field).read_text():
        parts.append(part)
        count += len(part)
        if count >= TEXT_CHARACTERS:
            break
    return "".join(parts)[:TEXT_CHARACTERS]


class TaskBatch(NamedTuple):
    """Samples of a task, and their tokens. The last rows of the tokens may be padding: the first
    samples again.
    """

    task: str
    samples: Sequence[Sample]
    tokens: QuestionBatch


SamplesByTask = Mapping[str, Sequence[Sample]]


def _make_batches(
    run: LoadedModel, samples_by_task: SamplesByTask, length: int, mode: str
) -> Iterator[TaskBatch]:
    rows = max(1, ROW_TOKENS // length)
    for task, samples in samples_by_task.items():
        for indices in equal_batches(len(samples), min(rows, len(samples))):
            prompts = [run.prompt_ids(samples[index].context) for index in indices]
            questions = [run.tokenizer.encode(samples[index].question) for index in indices]
            if mode == "aware":
                prompts = [
                    [*prompt, *question[:-1]]
                    for prompt, question in zip(prompts, questions, strict=True)
                ]
                questions = [question[-1:] for question in questions]
            scored = samples[indices[0] : indices[0] + len(indices)]
            yield TaskBatch(task, scored, QuestionBatch(prompts, questions, samples[0].new_tokens))


def _evaluate_caches(
    run: LoadedModel,
    caches: Sequence[CacheVariant],
    names: Sequence[str],
    samples_by_task: SamplesByTask,
    length: int,
    progress: Callable[[str], None],
) -> Iterator[RulerResult]:
    """Yields the results of the methods `names` in this order; the first of `caches` is the full
    cache.
    """
    full_bytes = caches[0].known_report["bytes"]
    caches = sorted(
        (cache for cache in caches if cache.name in names),
        key=lambda cache: names.index(cache.name),
    )
    batches = [
        (mode, batch)
        for mode in QUESTION_MODES
        for batch in _make_batches(run, samples_by_task, length, mode)
    ]
    bench = CacheBenchmark(caches, progress)
    answers = bench.answer_questions(
        run, [batch.tokens for _, batch in batches], length, f"RULER at {length} tokens"
    )
    for cache, generated in zip(caches, answers, strict=True):
        by_mode: dict[str, dict[str, list[float]]] = {mode: {} for mode in QUESTION_MODES}
        for (mode, batch), found in zip(batches, generated, strict=True):
            by_mode[mode].setdefault(batch.task, []).extend(_score_batch(run, batch, found))
        scores = {mode: _intervals(by_task) for mode, by_task in by_mode.items()}
        progress(f"{cache.name} at {cache.ratio:g} of {length} tokens, in %: {_summary(scores)}")
        report = cache.known_report
        yield RulerResult(
            method=cache.name,
            length=length,
            ratio=cache.ratio,
            dtype=report["dtype"],
            bytes=report["bytes"],
            share=report["bytes"] / full_bytes,
            scores=scores,
            prefill_seconds=median(found.prefill_seconds for found in generated),
            tokens_per_second=median(found.rate for found in generated),
        )


def _score_batch(run: LoadedModel, batch: TaskBatch, generated: Generated) -> Iterator[float]:
    """Yields the score of each sample in %. An answer ends at the first stop token."""
    stops = [
        token for token in (run.tokenizer.eos_id, *run.tokenizer.stop_ids) if token is not None
    ]
    for sample, ids_T in zip(batch.samples, generated.ids, strict=False):
        is_stop_T = np.isin(ids_T, stops)
        answer = ids_T[: int(is_stop_T.argmax())] if is_stop_T.any() else ids_T
        yield 100 * match_score(run.tokenizer.decode(answer.tolist()), sample)


def _intervals(scores_by_task: Mapping[str, Sequence[float]]) -> dict[str, Interval]:
    """Returns the mean of each task, and of all samples as `mean`."""
    intervals = {task: mean_interval(np.array(scores)) for task, scores in scores_by_task.items()}
    return intervals | {"mean": mean_interval(np.concatenate(list(scores_by_task.values())))}


def _summary(scores: Mapping[str, Mapping[str, Interval]]) -> str:
    lines = [
        f"{mode}: "
        + ", ".join(f"{task} {interval.value:.0f}" for task, interval in intervals.items())
        for mode, intervals in scores.items()
    ]
    return "; ".join(lines)
