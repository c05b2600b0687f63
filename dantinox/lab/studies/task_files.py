"""Local tasks of `eval tasks`: JSON Lines files of questions, and prompts with examples.

Each line of a file is one question, a JSON object in one of three forms:

    {"context": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}
    {"contexts": ["She saw a", "She saw an"], "continuation": " owl.", "answer": 1}
    {"context": "a b c a b", "continuation": " c"}

The first form is a multiple choice, the second a choice of the context, and the third a
continuation to match exactly. `answer` is the index of the right choice. The texts are concatenated
as they are, so a choice usually begins with a space.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dantinox.config import UserError
from dantinox.config.sections import RECORD_SUFFIXES
from dantinox.files import quote, read_text
from dantinox.lab.studies.builtin_tasks import BUILTIN_SHOTS, BUILTIN_TASKS

MAX_TASK_BYTES = 64 << 20
SEPARATOR = "\n\n"  # between the examples and the question
BUILTIN = "builtin"
FORMS = (
    ("context", "choices", "answer"),
    ("contexts", "continuation", "answer"),
    ("context", "continuation"),
)


class Question(NamedTuple):
    """Pairs (context, continuation), one of them right; a single pair for a continuation to match
    exactly.
    """

    options: tuple[tuple[str, str], ...]
    answer: int

    @property
    def baseline(self) -> float:
        """The expected score of random guesses: 1 / number of choices, or 0 for a continuation to
        match exactly.
        """
        return 1 / len(self.options) if len(self.options) > 1 else 0.0


class LocalTask(NamedTuple):
    """A task `name` or `group/name` with its questions; `shots` is the default number of examples
    before a question.
    """

    name: str
    questions: tuple[Question, ...]
    shots: int

    @property
    def group(self) -> str:
        """The group of the task: the part of its name before the last slash, or an empty string."""
        return self.name.rpartition("/")[0]


def is_local(name: str) -> bool:
    """Returns whether a name of --tasks is `builtin`, a folder or a .jsonl file, not a task of
    lm-evaluation-harness.
    """
    return name == BUILTIN or name.lower().endswith((*RECORD_SUFFIXES, "/")) or Path(name).is_dir()


def load_tasks(names: Sequence[str]) -> list[LocalTask]:
    """Returns the tasks of `builtin`, of .jsonl files, and of all .jsonl files below folders.
    Subfolders are groups.

    Raises:
      UserError: a file or folder is missing, has no question or a malformed one, or two tasks have
        the same name.
    """
    tasks: dict[str, LocalTask] = {}
    for name in names:
        for task in _tasks_of(name):
            if task.name in tasks:
                raise UserError(f"--tasks gives two tasks with the name {task.name}")
            tasks[task.name] = task
    return list(tasks.values())


def _tasks_of(name: str) -> list[LocalTask]:
    if name == BUILTIN:
        return [LocalTask(task, _builtin_questions(task), BUILTIN_SHOTS) for task in BUILTIN_TASKS]
    path = Path(name)
    if name.lower().endswith(RECORD_SUFFIXES):
        return [LocalTask(path.stem, read_questions(path), 0)]
    if not path.is_dir():
        raise UserError(f"--tasks: there is no folder {path}")
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in RECORD_SUFFIXES)
    if not files:
        raise UserError(f"--tasks: the folder {path} has no {RECORD_SUFFIXES[0]} file")
    return [
        LocalTask(file.relative_to(path).with_suffix("").as_posix(), read_questions(file), 0)
        for file in files
    ]


def _builtin_questions(name: str) -> tuple[Question, ...]:
    records = BUILTIN_TASKS[name]
    return tuple(
        _question(record, f"{name}, question {number}")
        for number, record in enumerate(records(), 1)
    )


def read_questions(path: Path) -> tuple[Question, ...]:
    """Reads the questions of a .jsonl file. Empty lines are skipped.

    Raises:
      UserError: the file cannot be read, or a line is not a question.
    """
    lines = [
        (n, line)
        for n, line in enumerate(read_text(path, MAX_TASK_BYTES, "the task").splitlines(), 1)
        if line.strip()
    ]
    questions = []
    for number, line in lines:
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{where} is not JSON: {quote(line)}") from None
        questions.append(_question(record, where))
    if len(questions) < 2:
        raise UserError(
            f"the task {path} has {len(questions)} questions, but at"
            " least 2 are needed for an interval"
        )
    return tuple(questions)


def _question(record: Any, where: str) -> Question:
    if not isinstance(record, dict) or tuple(sorted(record)) not in {
        tuple(sorted(form)) for form in FORMS
    }:
        forms = ", or ".join(" ".join(form) for form in FORMS)
        raise UserError(f"{where} must be a JSON object with the keys {forms}, got {quote(record)}")
    contexts = (
        _texts(record, "contexts", where)
        if "contexts" in record
        else [_text(record, "context", where)]
    )
    continuations = (
        _texts(record, "choices", where)
        if "choices" in record
        else [_text(record, "continuation", where)]
    )
    if not all(continuations):
        raise UserError(f"{where}: a continuation must not be empty")
    options = tuple(
        (context, continuation) for context in contexts for continuation in continuations
    )
    answer = record.get("answer", 0)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(options):
        raise UserError(
            f"{where}: answer must be an index in [0, {len(options) - 1}], got {quote(answer)}"
        )
    return Question(options, answer)


def _text(record: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(record[key], str):
        raise UserError(f"{where}: {key} must be a text, got {quote(record[key])}")
    return str(record[key])


def _texts(record: dict[str, Any], key: str, where: str) -> list[str]:
    texts = record[key]
    if (
        not isinstance(texts, list)
        or not all(isinstance(text, str) for text in texts)
        or len(set(texts)) < max(2, len(texts))
    ):
        raise UserError(
            f"{where}: {key} must be a list of at least 2 different texts, got {quote(texts)}"
        )
    return texts


def prompts(task: LocalTask, index: int, shots: int, seed: int) -> list[tuple[str, str]]:
    """Returns the pairs (context, continuation) to score for a question.

    Each context begins with the same `shots` other questions of the task with their right answers,
    drawn at random for each question and seed.
    """
    others = [number for number in range(len(task.questions)) if number != index]
    chosen = random.Random(f"{seed} {task.name} {index}").sample(others, shots)
    examples = [task.questions[number] for number in chosen]
    before = "".join("".join(example.options[example.answer]) + SEPARATOR for example in examples)
    return [
        (before + context, continuation) for context, continuation in task.questions[index].options
    ]
