"""Test data of `eval kv`: sequences of the validation text, and recall tasks with distant
answers.
"""

import itertools
import random
from typing import NamedTuple

import numpy as np

from dantinox.config import UserError
from dantinox.lab.measure.texts import pad_rows
from dantinox.lab.studies.continuations import STREAM_TOKENS
from dantinox.lab.studies.statistics import repetition
from dantinox.text import Tokenizer, TokenStore, builtin_recall

SEEDS = 3
MAX_REPETITION = 0.2  # share of repeated word 4-grams above which a text is rejected
FACTS_PER_PROMPT = 8
MAX_TRIES = 100  # attempts to build a task
KINDS = ("needle", "copy")


class Sequences(NamedTuple):
    """S sequences of T tokens, each within one document.

    Attributes:
      ids: tokens `[S, T]`.
      seeds: index of the seed that selected each sequence, `[S]`.
      overlapping: whether sequences overlap because the text is short.
      repeated: share of the word 4-grams of the sequences that are repetitions of an earlier
        4-gram.
    """

    ids: np.ndarray
    seeds: np.ndarray
    overlapping: bool
    repeated: float


def split_by_seed(count: int) -> list[int]:
    """Splits `count` into nearly equal parts, one per seed."""
    return [count // SEEDS + (seed < count % SEEDS) for seed in range(SEEDS)]


def draw_sequences(tokenizer: Tokenizer, store: TokenStore, count: int, length: int) -> Sequences:
    """Samples distinct sequences of the validation text without special tokens; they do not overlap
    if the text is long enough.

    Raises:
      UserError: the text has fewer sequences, or is too repetitive to show the effect of a cache.
    """
    stream_N = store.validation_ids[:-1][:STREAM_TOKENS].astype(np.int32)
    disjoint, starts = _start_positions(np.isin(stream_N, list(tokenizer.special_ids)), length)
    if len(starts) < count:
        raise UserError(
            f"the validation text has {len(starts)} positions with {length} tokens within a"
            f" document, but {count} sequences are needed: lower --tokens or --sequences, or select"
            " a longer text with --data_path"
        )
    overlapping = len(disjoint) < count
    starts = starts if overlapping else disjoint
    starts_S = np.zeros(0, np.int64)
    for seed, share in enumerate(split_by_seed(count)):
        starts_S = np.append(
            starts_S,
            np.random.default_rng(seed).choice(
                np.setdiff1d(starts, starts_S), share, replace=False
            ),
        )
    places_ST = starts_S[:, None] + np.arange(length)
    read_N = np.zeros(len(stream_N), bool)
    read_N[places_ST] = True
    repeated = repetition(tokenizer.decode(stream_N[read_N]).split(), 4)  # type: ignore[arg-type]
    if repeated > MAX_REPETITION:
        raise UserError(
            f"{100 * repeated:.0f} % of the word 4-grams of the validation text occurred in it"
            f" before; above {100 * MAX_REPETITION:.0f} %, repetition hides the losses of a cache:"
            " select another text with --data_path"
        )
    return Sequences(
        stream_N[places_ST],
        np.repeat(np.arange(SEEDS), split_by_seed(count)),
        overlapping,
        repeated,
    )


def _start_positions(special_N: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns positions at which sequences can begin: positions at least `length` apart, and all
    positions.
    """
    edges = np.concatenate([[-1], np.flatnonzero(special_N), [len(special_N)]])
    spans = [(before + 1, end - length + 1) for before, end in itertools.pairwise(edges)]
    empty = [np.zeros(0, np.int64)]
    disjoint, overlapping = (
        [np.arange(first, end, step) for first, end in spans if end > first] for step in (length, 1)
    )
    return np.concatenate(disjoint + empty), np.concatenate(overlapping + empty)


class RecallTasks(NamedTuple):
    """P prompts that each have one correct next token.

    Attributes:
      tokens: right-padded prompts `[P, T]`.
      lengths: tokens of each prompt, `[P]`.
      answers: the correct tokens, `[P]`.
      needles: which prompts ask for a fact, `[P]`; the others repeat a record of facts up to its
        last word.
      context: tokens before the question.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    answers: np.ndarray
    needles: np.ndarray
    context: int


def encodes_words(tokenizer: Tokenizer) -> bool:
    """Returns whether the tokenizer encodes every word of the tasks as one token; otherwise the
    tasks are left out.
    """
    try:
        words = [word for topic, words in builtin_recall.TOPICS.items() for word in (topic, *words)]
        return all(len(ids) == 1 for ids in tokenizer.encode_batch([f" {word}" for word in words]))
    except UserError:
        return False


def draw_tasks(tokenizer: Tokenizer, sequences: Sequences, count: int) -> RecallTasks:
    """Builds `count` tasks of each kind, hidden among lines of the sequences. All contexts have the
    same length.
    """
    T = sequences.ids.shape[1]
    # Room for the longest question.
    context = T - len(
        tokenizer.encode(builtin_recall.copy_task(random.Random(0), FACTS_PER_PROMPT).question)
    )
    tasks = []
    for kind in KINDS:
        for seed, share in enumerate(split_by_seed(count)):
            rng = random.Random(seed)
            tasks += [
                _make_task(tokenizer, sequences.ids, rng, kind, context) for _ in range(share)
            ]
    rows, answers = zip(*tasks, strict=True)
    return RecallTasks(*pad_rows(rows, T), np.array(answers), np.arange(len(rows)) < count, context)


def _make_task(
    tokenizer: Tokenizer, ids_ST: np.ndarray, rng: random.Random, kind: str, context: int
) -> tuple[list[int], int]:
    """Returns the tokens of a prompt, with `context` tokens before the question, and the token of
    its answer.
    """
    for _ in range(MAX_TRIES):
        lines = f"{tokenizer.decode(ids_ST[rng.randrange(len(ids_ST))])}\n".splitlines(
            keepends=True
        )
        lines = [line for line in lines if not line.startswith(f"{builtin_recall.LINE_PREFIX} ")]
        if kind == "needle":
            task = builtin_recall.fact_task(rng, lines, FACTS_PER_PROMPT)
        else:
            task = builtin_recall.copy_task(rng, FACTS_PER_PROMPT)
            task = task._replace(context="".join(lines) + task.context)
        ids = tokenizer.encode(task.context)[-context:]
        if len(ids) == context and task.question + task.answer in tokenizer.decode(ids):
            return ids + tokenizer.encode(task.question), tokenizer.encode(task.answer)[0]
    raise UserError(
        f"cannot build a {kind} task from sequences of {ids_ST.shape[1]} tokens of the validation"
        " text: raise --tokens"
    )
