"""`builtin:recall`: text with tasks in it that only a reader with a memory can do, to train models whose attention reaches far.

Two kinds of task. Facts are pairs of words, a word and what goes with it, told among lines of ordinary text or alone, and asked
for at the end. A copy is a list of words said again. The words are common and few, so a tokenizer trained on the corpus has a
token for most of them. Of the random numbers only such methods are used as give the same in every Python from 3.11 on.
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

# Half may be asked for, half are answers: no answer is itself a question.
_KEYS = """
apple bear boat bridge candle castle chair cloud coat crow desert dragon drum eagle engine farmer feather fish flute forest
fox frog garden ghost goat guitar hammer harbor horse island jacket jewel king kitchen knight ladder lake lamp lion market
mirror monkey mountain
"""
_VALUES = """
amber ash basil berry birch brass bronze cedar cherry clay cobalt copper coral cotton cream crimson crystal denim ebony
emerald fern garnet ginger glass gold granite gray honey indigo iron ivory jade lemon linen maple marble mint olive onyx
opal pearl pine plum
"""
KEYS, VALUES = tuple(_KEYS.split()), tuple(_VALUES.split())
FACT, ASK = ">>", "??"
SHARE = 0.3  # of tasks in the corpus, by characters
FIELD = "text"  # of a record


class Task(NamedTuple):
    """A text to be read, the question behind it, and the answer: `context + question` continues with `answer`."""

    context: str
    question: str
    answer: str


def facts(rng: random.Random, lines: Sequence[str], count: int) -> Task:
    """`count` pairs, at most as many as there are keys, at random places among `lines` of text; one of them is asked for."""
    keys, values = rng.sample(KEYS, count), rng.sample(VALUES, count)
    told = list(lines)
    for key, value in zip(keys, values, strict=True):
        told.insert(rng.randrange(len(told) + 1), f"{FACT} {key} {value}\n")
    asked = rng.randrange(count)
    return Task("".join(told), f"{ASK} {keys[asked]}", f" {values[asked]}")


def copy(rng: random.Random, count: int) -> Task:
    """A list of `count` words, said again up to its last word, which is the answer."""
    words = [rng.choice(KEYS + VALUES) for _ in range(count)]
    return Task(" ".join([FACT, *words]) + "\n", " ".join([FACT, *words[:-1]]), f" {words[-1]}")


def _document(rng: random.Random, lines: Sequence[str]) -> str:
    """A list said two or three times; or pairs, alone or among lines of text, and all of them asked for."""
    if rng.random() < 0.4:
        words = [rng.choice(KEYS + VALUES) for _ in range(rng.randrange(12, 64))]
        return f"{FACT} {' '.join(words)}\n" * rng.randrange(2, 4)
    alone = rng.random() < 0.5
    count = rng.randrange(4, 24)
    keys, values = rng.sample(KEYS, count), rng.sample(VALUES, count)
    told = [f"{FACT} {key} {value}\n" for key, value in zip(keys, values, strict=True)]
    for line in [] if alone else lines:
        told.insert(rng.randrange(len(told) + 1), line)
    asked = [*range(count)] * (2 if alone else 1)
    rng.shuffle(asked)
    return "".join(told + [f"{ASK} {keys[i]} {values[i]}\n" for i in asked])


def corpus(texts: Iterable[str], seed: int = 0) -> Iterator[bytes]:
    """Records of JSON Lines: the texts, and behind each so many tasks that they are `SHARE` of all characters so far."""
    rng = random.Random(seed)
    plain = made = 0
    for text in texts:
        yield _record(text)
        plain += len(text)
        lines = text.splitlines(keepends=True)
        while made < plain * SHARE / (1 - SHARE):
            start = rng.randrange(max(1, len(lines) - 24))
            document = _document(rng, lines[start : start + rng.randrange(4, 24)])
            yield _record(document)
            made += len(document)


def _record(text: str) -> bytes:
    return json.dumps({FIELD: text}).encode() + b"\n"
