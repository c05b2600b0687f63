"""Local tasks of `eval tasks`: accuracy, and the mean accuracy above chance of all tasks with an
interval.

The accuracy of a task is centered: (accuracy − baseline) / (1 − baseline), which is 0 for random
guesses and 1 for perfect answers. The mean over tasks is the measure CORE of Li et al. 2024
("DataComp-LM", section 3.5), here on other tasks.

The chosen continuation is the one with the highest mean log-probability per token. A continuation
to match exactly counts as right if each of its tokens is the most likely token.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dantinox.config import UserError
from dantinox.files import atomic_write, check_writable_folder, first_line, read_json
from dantinox.generation import load
from dantinox.lab.measure.perplexity import ScoringInput, TokenScores
from dantinox.lab.studies.harness_tasks import LMEvalModel
from dantinox.lab.studies.statistics import Interval, stratified_interval
from dantinox.lab.studies.task_files import LocalTask, Question, load_tasks, prompts

RESULT_FILE = "tasks.json"
MAX_RESULT_BYTES = 64 << 20


@dataclass(frozen=True)
class LocalScore:
    """The score of a task.

    Attributes:
      task, group: its name, and the part of the name before the last slash.
      shots: examples before each question.
      baseline: the expected accuracy of random guesses.
      correct: for each question, 1 if it is answered correctly, else 0.
      fingerprint: a hash of all prompts.
    """

    task: str
    group: str
    shots: int
    baseline: float
    correct: tuple[int, ...]
    fingerprint: str

    @property
    def accuracy(self) -> float:
        return float(np.mean(self.correct))

    @cached_property
    def centered_Q(self) -> np.ndarray:
        """For each question, (correct − baseline) / (1 − baseline), float64 `[Q]`."""
        return (np.array(self.correct, np.float64) - self.baseline) / (1 - self.baseline)

    def centered(self) -> Interval:
        """Returns the centered accuracy with its 95 % interval."""
        return stratified_interval([self.centered_Q])


@dataclass(frozen=True)
class LocalTaskStudy:
    """The results of local tasks: the scores, and the reference run with its scores if the run was
    compared.
    """

    scores: tuple[LocalScore, ...]
    reference: str | None = None
    reference_scores: tuple[LocalScore, ...] = ()

    def groups(self) -> list[str]:
        """Returns the names of the groups."""
        return list(dict.fromkeys(score.group for score in self.scores if score.group))

    def mean(self, group: str | None = None) -> Interval:
        """Returns the mean centered accuracy over all tasks or those of a group, with its 95 %
        interval.
        """
        return stratified_interval(
            [score.centered_Q for score in self.scores if group in (None, score.group)]
        )

    def difference(self, group: str | None = None) -> Interval:
        """Returns the mean minus that of the reference, with an interval of the differences between
        equal questions.
        """
        pairs = zip(self.scores, self.reference_scores, strict=True)
        return stratified_interval(
            [a.centered_Q - b.centered_Q for a, b in pairs if group in (None, a.group)]
        )

    def record(self) -> dict[str, Any]:
        """Returns the results as a JSON object."""
        groups = self.groups()
        compared: dict[str, Any] = {}
        if self.reference is not None:
            differences = {group: self.difference(group)._asdict() for group in groups}
            compared = {
                "reference": self.reference,
                "difference": self.difference()._asdict(),
                "group_differences": differences,
            }
        return {
            "mean_centered_accuracy": self.mean()._asdict(),
            "groups": {group: self.mean(group)._asdict() for group in groups},
            **compared,
            "tasks": [
                asdict(score)
                | {
                    "accuracy": score.accuracy,
                    "centered_accuracy": score.centered()._asdict(),
                }
                for score in self.scores
            ],
        }


def evaluate_local_tasks(
    run_dir: str | Path,
    names: Sequence[str],
    *,
    limit: int | None = None,
    shots: int | None = None,
    seed: int = 0,
    compare: str | Path | None = None,
    out: str | Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> LocalTaskStudy:
    """Evaluates a run's model on local tasks, and writes the results to `tasks.json`.

    Args:
      names: `builtin`, folders and .jsonl files.
      limit: maximum questions of each task, at least 2.
      shots: examples before each question (default: 2 for builtin tasks, else 0).
      seed: seed of the examples.
      compare: another run, or its `tasks.json`: its results on the same prompts are the reference.
      out: the folder for `tasks.json` (default: RUN/evaluation).
      settings: `weights`, `matmul_dtype` and `tensor_parallel` of the section `generation`.

    Raises:
      UserError: a task cannot be read, a prompt does not fit in the model's context, the tokenizer
        cannot encode a text, or the reference has other prompts.
    """
    if limit is not None and limit < 2:
        raise UserError(f"--limit must be at least 2, got {limit}: one question has no interval")
    folder = Path(run_dir) / "evaluation" if out is None else Path(out)
    check_writable_folder(folder, "--out")
    plans = [_plan(task, limit, shots, seed) for task in load_tasks(names)]
    reference = () if compare is None else _read_reference(compare, plans)
    model = LMEvalModel(load(run_dir, settings.get("tensor_parallel")), settings, progress)
    answers = iter(_answer_all(model, plans, seed))
    scores = []
    for plan in plans:
        correct = tuple(int(next(answers) == question.answer) for question in plan.questions)
        baseline = float(np.mean([question.baseline for question in plan.questions]))
        scores.append(
            LocalScore(
                plan.task.name, plan.task.group, plan.shots, baseline, correct, plan.fingerprint
            )
        )
    study = LocalTaskStudy(tuple(scores), None if compare is None else str(compare), reference)
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / RESULT_FILE, json.dumps(study.record(), indent=1))
    return study


class _Plan(NamedTuple):
    """The questions of a task to answer, the number of examples before each, and the hash of all
    prompts.
    """

    task: LocalTask
    questions: tuple[Question, ...]
    shots: int
    fingerprint: str


def _plan(task: LocalTask, limit: int | None, shots: int | None, seed: int) -> _Plan:
    shots = task.shots if shots is None else shots
    if shots >= len(task.questions):
        raise UserError(
            f"--shots must be less than the {len(task.questions)} questions of the task"
            f" {task.name}, got {shots}"
        )
    content = json.dumps([task.name, task.questions, limit, shots, seed])
    return _Plan(
        task, task.questions[:limit], shots, hashlib.sha256(content.encode()).hexdigest()[:16]
    )


def _answer_all(model: LMEvalModel, plans: Sequence[_Plan], seed: int) -> list[int]:
    """Returns the index of the chosen option of each question; −1 if a single continuation does not
    match exactly.
    """
    texts: list[list[ScoringInput]] = []
    for plan in plans:
        name = plan.task.name
        for index in range(len(plan.questions)):
            try:
                texts.append(
                    [
                        model.encode_pair(*option)
                        for option in prompts(plan.task, index, plan.shots, seed)
                    ]
                )
            except UserError as error:
                raise UserError(f"the task {name} cannot be encoded: {error}") from None
            longest = max(len(text.ids) for text in texts[-1]) - 1
            if longest > model.context:
                raise UserError(
                    f"the task {name} has a prompt of {longest} tokens, but the model's context is"
                    f" {model.context}: lower --shots, or shorten the questions"
                )
    scores = model.score_all([text for options in texts for text in options])
    if not all(np.isfinite(score.logp).all() for score in scores):
        raise UserError(
            "the model returns a NaN or infinite log-probability: its weights are damaged"
        )
    remaining = iter(scores)
    return [_answer(list(islice(remaining, len(options)))) for options in texts]


def _answer(scores: Sequence[TokenScores]) -> int:
    if len(scores) == 1:
        return 0 if scores[0].is_top1.all() else -1
    return int(np.argmax([score.logp.mean() for score in scores]))


def _read_reference(compare: str | Path, plans: Sequence[_Plan]) -> tuple[LocalScore, ...]:
    """Reads the scores of a run on the same prompts, in the order of the plans."""
    path = Path(compare)
    path = path if path.is_file() else path / "evaluation" / RESULT_FILE
    record = read_json(path, MAX_RESULT_BYTES, "the results")
    if "tasks" not in record:
        raise UserError(f"{path} is not a result of eval tasks: it has no tasks")
    try:
        names = [field.name for field in fields(LocalScore)]
        scores = [LocalScore(**{name: task[name] for name in names}) for task in record["tasks"]]
        found = {
            str(score.task): replace(score, correct=tuple(map(int, score.correct)))
            for score in scores
        }
        for score in found.values():
            if not 0 <= score.baseline < 1:
                raise ValueError(f"the baseline {score.baseline} is not in [0, 1)")
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{path} is not a result of eval tasks: {first_line(error)}") from None
    wanted = [plan.task.name for plan in plans]
    if sorted(found) != sorted(wanted):
        raise UserError(
            f"{path} has the tasks {', '.join(found)}, but --tasks has {', '.join(wanted)}"
        )
    for plan in plans:
        score = found[plan.task.name]
        if score.fingerprint != plan.fingerprint or len(score.correct) != len(plan.questions):
            raise UserError(
                f"{path} has other prompts of the task {plan.task.name}: evaluate both runs with"
                " the same files, --limit, --shots and --seed"
            )
    return tuple(found[name] for name in wanted)
