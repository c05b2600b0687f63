"""`builtin:recall`: synthetic recall tasks, for models that have to attend far back.

A task states facts, pairs of a topic and one of its words, and asks for them: among lines of ordinary text or alone, in any
order, or as a whole record repeated. A topic has words of its own, so one layer can find what was said of it: a model learns
that in a few hundred steps, where matching any word with any other takes many thousands. The words are common and few, so a
tokenizer trained on the corpus has a token for each. Of the random numbers only such methods are used as give the same in every
Python from 3.11 on.
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
TOPICS = {topic: tuple(words.split()) for topic, _, words in (line.partition(":") for line in _TOPICS.strip().splitlines())}
MARK = ">>"  # before whatever is stated and asked
SHARE = 0.3  # of tasks in the corpus, by characters
FIELD = "text"  # of a record
LEAST_FACTS = 3  # of a document


class Task(NamedTuple):
    """A text to be read, the question behind it, and the answer: `context + question` continues with `answer`."""

    context: str
    question: str
    answer: str


def fact_task(rng: random.Random, lines: Sequence[str], count: int) -> Task:
    """Facts on `count` topics at random places among `lines` of text; one of them is asked for."""
    stated = _stated(rng, count)
    asked = rng.randrange(count)
    topic, word = stated[asked]
    return Task("".join(_among(rng, lines, stated)), f"{MARK} {topic}", f" {word}")


def copy_task(rng: random.Random, count: int) -> Task:
    """A record of facts on `count` topics, repeated up to its last word, which is the answer."""
    record = _record_of(_stated(rng, count))
    again, _, word = record.rpartition(" ")
    return Task(f"{record}\n", again, f" {word}")


def _record_of(stated: Sequence[tuple[str, str]]) -> str:
    return " ".join([MARK, *(f"{topic} {word}" for topic, word in stated)])


def _stated(rng: random.Random, count: int) -> list[tuple[str, str]]:
    return [(topic, rng.choice(TOPICS[topic])) for topic in rng.sample(list(TOPICS), count)]


def _among(rng: random.Random, lines: Sequence[str], stated: Sequence[tuple[str, str]]) -> list[str]:
    """The lines with a line for every fact between them."""
    mixed = list(lines)
    for topic, word in stated:
        mixed.insert(rng.randrange(len(mixed) + 1), f"{MARK} {topic} {word}\n")
    return mixed


def _document(rng: random.Random, lines: Sequence[str]) -> str:
    """A record repeated several times, facts stated over and over, or facts among lines of text, each asked for twice."""
    stated = _stated(rng, rng.randrange(LEAST_FACTS, len(TOPICS) + 1))
    kind = rng.randrange(5)
    if kind == 0:
        return f"{_record_of(stated)}\n" * rng.randrange(3, 9)
    if kind < 3:
        return "".join(_among(rng, (), [rng.choice(stated) for _ in range(rng.randrange(30, 90))]))
    asked = stated * 2
    rng.shuffle(asked)
    return "".join(_among(rng, lines, stated) + [f"{MARK} {topic} {word}\n" for topic, word in asked])


def recall_corpus(texts: Iterable[str], seed: int = 0) -> Iterator[bytes]:
    """Records of JSON Lines: the texts, and behind each so many tasks that they are `SHARE` of all characters so far."""
    rng = random.Random(seed)
    plain = made = 0
    for text in texts:
        yield _record(text)
        plain += len(text)
        lines = text.splitlines(keepends=True)
        while made < plain * SHARE / (1 - SHARE):
            start = rng.randrange(max(1, len(lines) - 40))
            document = _document(rng, lines[start : start + rng.randrange(4, 40)])
            yield _record(document)
            made += len(document)


def _record(text: str) -> bytes:
    return json.dumps({FIELD: text}).encode() + b"\n"
