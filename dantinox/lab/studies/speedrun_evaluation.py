"""The evaluation of a speedrun: greedy answers to held-out questions, their scores, and the
built-in tasks of `eval tasks`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from dantinox.config import Config
from dantinox.files import UserError
from dantinox.generation import LoadedModel, load
from dantinox.lab.studies.local_tasks import LocalTaskStudy, evaluate_local_tasks
from dantinox.lab.studies.speedrun import FINAL, SFT, STAGES
from dantinox.run import RunDirectory, load_run_config
from dantinox.text import ChatTemplate, Corpus
from dantinox.text.builtin_instructions import matches_answer_form
from dantinox.text.conversations import Conversations, conversations_of_record
from dantinox.text.corpus_files import ADDITION, INSTRUCTIONS

NUM_SAMPLES = 5  # answers in the report
MAX_QUESTIONS = 50  # per task
ANSWER_TOKENS = 64
LOCAL_TASK = "builtin"  # the tasks of `dantinox eval tasks`
LOCAL_QUESTIONS = 100  # per task


class Question(NamedTuple):
    """The first user message of a conversation, and the reference answer."""

    text: str
    answer: str


def _same_first_line(answer: str, reference: str) -> bool:
    return answer.strip().partition("\n")[0] == reference.strip().partition("\n")[0]


# Corpus of conversations → name of a task → whether an answer is right, given the reference answer.
TASKS: dict[str, dict[str, Callable[[str, str], bool]]] = {
    INSTRUCTIONS: {
        "answers in the trained form": lambda answer, _: matches_answer_form(answer),
        "number of arguments is right": _same_first_line,
    },
    ADDITION: {"sum is right": lambda answer, reference: answer.strip() == reference.strip()},
}


@dataclass(frozen=True)
class TaskResult:
    """How many of `count` held-out questions the model of each stage answers correctly, in the
    order of the stages.
    """

    task: str
    corpus: str
    correct: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class Sample:
    """A greedy answer of the final model to a held-out question, and the reference answer."""

    question: str
    answer: str
    reference: str


def held_out_questions(config: Config) -> dict[str, list[Question]]:
    """Returns the first questions that a fine-tuning run holds out for validation: corpus → at most
    `MAX_QUESTIONS`.
    """
    path = config.data.path
    names = path if isinstance(path, tuple) else (path or "",)
    corpora = tuple(map(Corpus.open, names))
    found = Conversations.scan(corpora, config.data)
    questions: dict[str, list[Question]] = {}
    for name, corpus, start in zip(names, corpora, found.val_starts, strict=True):
        records = islice(corpus.records(), start, start + MAX_QUESTIONS)
        questions[name] = [
            question for where, record in records for question in _first_turn(record, where)
        ]
    return questions


def _first_turn(record: Mapping[str, Any], where: str) -> list[Question]:
    """Returns the first question of a conversation with its answer, in a list, or an empty list if
    it has none.
    """
    messages = conversations_of_record(record, "conversation", where)[0].messages
    return [
        Question(str(user["content"]), str(assistant["content"]))
        for user, assistant in pairwise(messages)
        if (user["role"], assistant["role"]) == ("user", "assistant")
    ][:1]


def answer_questions(
    model: LoadedModel, template: ChatTemplate, questions: Sequence[Question]
) -> list[str]:
    """Returns the greedy answers of a model, in order."""
    settings = model.settings({"greedy": True, "max_new_tokens": ANSWER_TOKENS})
    settings = model.with_stop_ids(settings, template.end_ids)
    prompts = [model.chat_prompt(question.text, template)[1] for question in questions]
    return [
        result.text for result in model.complete([model.request(ids, settings) for ids in prompts])
    ]


def evaluate_speedrun(
    folder: Path, progress: Callable[[str], None] = lambda line: None
) -> tuple[list[TaskResult], list[Sample]]:
    """Answers the held-out questions with the model of each stage.

    Returns:
      The result of each task whose corpus the fine-tuning uses, and `NUM_SAMPLES` answers of the
      final model.
    """
    chat = RunDirectory(folder / SFT)
    models = {stage.name: load(folder / stage.name) for stage in STAGES}
    template = ChatTemplate.load(chat.chat_template, models[SFT].tokenizer)
    limit = models[SFT].model.config.max_context - ANSWER_TOKENS
    questions = {
        corpus: [
            question
            for question in asked
            if len(models[SFT].chat_prompt(question.text, template)[1]) <= limit
        ]
        for corpus, asked in held_out_questions(load_run_config(chat)).items()
    }
    questions = {corpus: asked for corpus, asked in questions.items() if asked}
    answers: dict[str, dict[str, list[str]]] = {}
    for name, model in models.items():
        progress(f"{name}: answering {sum(map(len, questions.values()))} held-out questions")
        answers[name] = {
            corpus: answer_questions(model, template, asked) for corpus, asked in questions.items()
        }
    tasks = [
        TaskResult(
            task,
            corpus,
            tuple(_count_right(is_right, answers[stage.name][corpus], asked) for stage in STAGES),
            len(asked),
        )
        for corpus, asked in questions.items()
        for task, is_right in TASKS.get(corpus, {}).items()
    ]
    return tasks, _samples(questions, answers[FINAL])


def evaluate_tasks_of_stages(
    folder: Path, smoke: bool, progress: Callable[[str], None] = lambda line: None
) -> dict[str, LocalTaskStudy] | str:
    """Runs the built-in tasks of `dantinox eval tasks` with the model of each stage.

    Args:
      smoke: only two questions per task, without examples.

    Returns:
      Stage → its scores, or a sentence on why the tasks cannot be run, for example because a text
      does not fit in the context.
    """
    limit, shots = (2, 0) if smoke else (LOCAL_QUESTIONS, None)
    studies = {}
    try:
        for stage in STAGES:
            progress(f"{stage.name}: eval tasks {LOCAL_TASK}")
            studies[stage.name] = evaluate_local_tasks(
                folder / stage.name, [LOCAL_TASK], limit=limit, shots=shots
            )
    except UserError as error:
        return str(error)
    return studies


def _count_right(
    is_right: Callable[[str, str], bool], answers: Sequence[str], questions: Sequence[Question]
) -> int:
    return sum(
        is_right(answer, question.answer)
        for answer, question in zip(answers, questions, strict=True)
    )


def _samples(
    questions: Mapping[str, Sequence[Question]], answers: Mapping[str, Sequence[str]]
) -> list[Sample]:
    """Returns the first answers, in turn from every corpus."""
    found = [
        (number, Sample(question.text, answer, question.answer))
        for corpus, asked in questions.items()
        for number, (question, answer) in enumerate(zip(asked, answers[corpus], strict=True))
    ]
    return [sample for _, sample in sorted(found, key=lambda numbered: numbered[0])][:NUM_SAMPLES]
