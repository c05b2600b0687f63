"""`builtin:recall`: synthetic recall tasks that require attention to distant tokens.

A fact is a pair of a topic and one of its words. A task states facts and then asks for them. The
facts form a document of their own, appear between lines of ordinary text, or form a record that is
repeated. Each topic has its own words, so one attention layer can find the fact: a model learns
this in a few hundred steps, while learning to match arbitrary pairs of words takes many thousands
of steps. The words are common and few, so a tokenizer that is trained on the corpus has a token for
each of them. The module uses only methods of `random.Random` that return the same numbers in Python
3.11 and all later versions.
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_TOPICS = """
metal: brass bronze chrome cobalt copper gold iron lead nickel silver steel tin
tree: ash beech birch cedar elm fir holly maple oak palm pine willow
animal: bear camel deer dog fox goat horse lion mouse rabbit tiger wolf
bird: crane crow dove duck eagle goose hawk heron owl raven robin swan
fruit: apple banana cherry date fig grape lemon mango melon peach pear plum
stone: agate amber coral flint garnet granite jade marble onyx opal pearl ruby
cloth: canvas cotton denim felt flannel lace leather linen satin silk velvet wool
spice: basil cinnamon clove cumin dill ginger mint mustard nutmeg pepper saffron sage
"""
TOPICS = {
    topic: tuple(words.split())
    for topic, _, words in (line.partition(":") for line in _TOPICS.strip().splitlines())
}
LINE_PREFIX = ">>"  # starts every statement and question
SHARE = 0.3  # share of tasks in the corpus, by characters
FIELD = "text"  # the field of a record
MIN_FACTS = 3  # per document


class Task(NamedTuple):
    """A context, a question and its answer: `answer` continues `context + question`."""

    context: str
    question: str
    answer: str


def fact_task(rng: random.Random, lines: Sequence[str], count: int) -> Task:
    """Makes a task with facts on `count` topics at random positions between `lines` of text, and
    asks for one of them.
    """
    stated = _draw_facts(rng, count)
    asked = rng.randrange(count)
    topic, word = stated[asked]
    return Task("".join(_insert_facts(rng, lines, stated)), f"{LINE_PREFIX} {topic}", f" {word}")


def copy_task(rng: random.Random, count: int) -> Task:
    """Makes a task with a record of facts on `count` topics, repeated up to its last word, which is
    the answer.
    """
    record = _format_record(_draw_facts(rng, count))
    again, _, word = record.rpartition(" ")
    return Task(f"{record}\n", again, f" {word}")


def _format_record(stated: Sequence[tuple[str, str]]) -> str:
    return " ".join([LINE_PREFIX, *(f"{topic} {word}" for topic, word in stated)])


def _draw_facts(rng: random.Random, count: int) -> list[tuple[str, str]]:
    return [(topic, rng.choice(TOPICS[topic])) for topic in rng.sample(list(TOPICS), count)]


def _insert_facts(
    rng: random.Random, lines: Sequence[str], stated: Sequence[tuple[str, str]]
) -> list[str]:
    """Inserts one line per fact at random positions between the lines."""
    mixed = list(lines)
    for topic, word in stated:
        mixed.insert(rng.randrange(len(mixed) + 1), f"{LINE_PREFIX} {topic} {word}\n")
    return mixed


def _make_document(rng: random.Random, lines: Sequence[str]) -> str:
    """Makes a document of one of three kinds.

    It holds a repeated record, or lines that state the facts again and again, or facts between
    lines of text and then two questions with answers per fact.
    """
    stated = _draw_facts(rng, rng.randrange(MIN_FACTS, len(TOPICS) + 1))
    kind = rng.randrange(5)
    if kind == 0:
        return f"{_format_record(stated)}\n" * rng.randrange(3, 9)
    if kind < 3:
        return "".join(
            _insert_facts(rng, (), [rng.choice(stated) for _ in range(rng.randrange(30, 90))])
        )
    asked = stated * 2
    rng.shuffle(asked)
    return "".join(
        _insert_facts(rng, lines, stated)
        + [f"{LINE_PREFIX} {topic} {word}\n" for topic, word in asked]
    )


def recall_corpus(texts: Iterable[str], seed: int = 0) -> Iterator[bytes]:
    """Yields records of JSON Lines: each text, then tasks until these make up `SHARE` of all
    characters so far.
    """
    rng = random.Random(seed)
    plain = made = 0
    for text in texts:
        yield _record(text)
        plain += len(text)
        lines = text.splitlines(keepends=True)
        while made < plain * SHARE / (1 - SHARE):
            start = rng.randrange(max(1, len(lines) - 40))
            document = _make_document(rng, lines[start : start + rng.randrange(4, 40)])
            yield _record(document)
            made += len(document)


def _record(text: str) -> bytes:
    return json.dumps({FIELD: text}).encode() + b"\n"
