"""Eight kinds of short tasks with checked answers: four to tune samplers, four to test them.

A prompt is a few examples and a question, one line each; the answer ends with the line. Half of the
kinds have one right answer, the others have many, so that a sampler may be diverse and right.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from instruction_tasks import CITIES, NAMES

LONGEST_CLOZE = 150  # characters


class Difficulty(NamedTuple):
    """Sizes of the tasks.

    Attributes:
      shots: the examples in a prompt.
      largest: the largest summand of a sum.
      movers: the people of `moving`, one or two.
      any_age: 1 if `person` may have any age, 0 if it must have the given one.
      listed: the words of `letter`.
      digits: the digits to sort.
      total: the largest sum of `split`.
      hint: the letters that `cloze` shows of the word.
    """

    shots: int
    largest: int
    movers: int
    any_age: int
    listed: int
    digits: int
    total: int
    hint: int


class Source(NamedTuple):
    """What tasks are made of.

    Attributes:
      lines: the lines of a text.
      words: its words of three letters or more, in lower case.
      frequent: first letter → the words with it among the 1,000 most frequent ones, if there are
        six or more.
      difficulty: sizes of the tasks.
    """

    lines: Sequence[str]
    words: frozenset[str]
    frequent: dict[str, list[str]]
    difficulty: Difficulty


class Task(NamedTuple):
    """A question with one right answer, and a function that tells which answers are right, given
    the examples' answers.
    """

    question: str
    answer: str
    solved: Callable[[str, Sequence[str]], bool]


def exactly(question: str, answer: str) -> Task:
    """Returns a task with a single right answer."""
    return Task(question, answer, lambda given, _: given == answer)


def addition(random: np.random.Generator, source: Source) -> Task:
    a, b = (int(n) for n in random.integers(2, source.difficulty.largest + 1, 2))
    return exactly(f"{a} + {b} =", str(a + b))


def moving(random: np.random.Generator, source: Source) -> Task:
    people = map(str, random.choice(NAMES, source.difficulty.movers, replace=False))
    moves = [(name, *map(str, random.choice(CITIES, 2, replace=False))) for name in people]
    text = " ".join(f"{name} moved from {old} to {new}." for name, old, new in moves)
    name, _, home = moves[int(random.integers(len(moves)))]
    return exactly(f"{text} Home{f' of {name}' if len(moves) > 1 else ''}:", home)


def person(random: np.random.Generator, source: Source) -> Task:
    """A JSON object with two keys: a name that the examples do not have, and the given age."""
    age = int(random.integers(18, 90))

    def solved(given: str, shown: Sequence[str]) -> bool:
        try:
            found = json.loads(given)
        except ValueError:
            return False
        if not isinstance(found, dict) or list(found) != ["name", "age"]:
            return False
        if found["age"] != age and not (source.difficulty.any_age and type(found["age"]) is int):
            return False
        name = found["name"]
        is_name = isinstance(name, str) and re.fullmatch("[A-Z][a-z]+", name) is not None
        return is_name and not any(name in example for example in shown)

    answer = json.dumps({"name": str(random.choice(NAMES)), "age": age})
    return Task(f"person aged {age}:", answer, solved)


def letter(random: np.random.Generator, source: Source) -> Task:
    """Different words of the text that begin with a letter."""
    first, listed = str(random.choice(list(source.frequent))), source.difficulty.listed

    def solved(given: str, shown: Sequence[str]) -> bool:
        words = given.split(", ")
        return len(words) == len(set(words)) == listed and all(
            w in source.words and w[0] == first for w in words
        )

    answer = random.choice(source.frequent[first], listed, replace=False)
    return Task(f"words with {first}:", ", ".join(map(str, answer)), solved)


def sorting(random: np.random.Generator, source: Source) -> Task:
    digits = random.choice(10, source.difficulty.digits, replace=False)
    return exactly(f"sort {' '.join(map(str, digits))}:", " ".join(map(str, sorted(digits))))


def cloze(random: np.random.Generator, source: Source) -> Task:
    """The next word of a text. The question is several lines long, so that it needs no examples."""
    while True:
        at = int(random.integers(len(source.lines) - 4))
        *before, last = source.lines[at : at + 4]
        words = last.split(" ")
        cut = int(random.integers(1, max(len(words), 2)))
        if len(words) > 3 and re.match(f"[A-Za-z]{{{source.difficulty.hint + 1}}}", words[cut]):
            break
    hint = words[cut][: source.difficulty.hint]
    word = re.match("[A-Za-z]+", words[cut])

    def solved(given: str, _: Sequence[str]) -> bool:
        found = re.match("[A-Za-z]*", given)
        return (
            found is not None and word is not None and (hint + found[0]).lower() == word[0].lower()
        )

    question = "\n".join([*before, " ".join([*words[:cut], hint]).rstrip()])
    if len(question) > LONGEST_CLOZE:
        question = question[-LONGEST_CLOZE:].split(" ", 1)[-1]
    return Task(question, words[cut][len(hint) :], solved)


def split(random: np.random.Generator, source: Source) -> Task:
    """Two positive numbers with a given sum."""
    total = int(random.integers(4, source.difficulty.total + 1))

    def solved(given: str, _: Sequence[str]) -> bool:
        found = re.fullmatch(r"(\d{1,2}) \+ (\d{1,2})", given)
        return (
            found is not None
            and min(int(found[1]), int(found[2])) > 0
            and int(found[1]) + int(found[2]) == total
        )

    first = int(random.integers(1, total))
    return Task(f"{total} =", f"{first} + {total - first}", solved)


def record(random: np.random.Generator, source: Source) -> Task:
    """A name with a given first letter, a city and a year; no line of the examples."""
    name = str(random.choice(NAMES))

    def solved(given: str, shown: Sequence[str]) -> bool:
        found = re.fullmatch(rf"{name[0]}[a-z]+, [A-Z][a-z]+, (19|20)\d\d", given)
        return found is not None and given not in shown

    year = int(random.integers(1900, 2030))
    return Task(
        f"{name[0]} from a city in a year:", f"{name}, {random.choice(CITIES)}, {year}", solved
    )


TRAINING = {"addition": addition, "moving": moving, "person": person, "letter": letter}
UNSEEN = {"sorting": sorting, "cloze": cloze, "split": split, "record": record}
KINDS = TRAINING | UNSEEN
# The most new tokens of an answer, for a tokenizer of words and for one of bytes.
LIMITS = {
    "addition": (5, 5), "moving": (5, 10), "person": (20, 34), "letter": (6, 30),
    "sorting": (10, 12), "cloze": (4, 12), "split": (8, 9), "record": (14, 24),
}  # fmt: skip


class Prompt(NamedTuple):
    """A prompt, and a function that tells whether an answer is right."""

    text: str
    solved: Callable[[str], bool]


def make_prompt(kind: str, random: np.random.Generator, source: Source) -> Prompt:
    shots = 0 if kind == "cloze" else source.difficulty.shots
    examples = [KINDS[kind](random, source) for _ in range(shots)]
    task = KINDS[kind](random, source)
    shown = [example.answer for example in examples]
    lines = [*(f"{example.question} {example.answer}" for example in examples), task.question]
    return Prompt("\n".join(lines), lambda given: task.solved(given, shown))


def draw_prompts(
    kind: str, count: int, random: np.random.Generator, source: Source, used: set[str]
) -> list[Prompt]:
    """Draws prompts that are not in `used`, and adds them to it."""
    found: list[Prompt] = []
    while len(found) < count:
        prompt = make_prompt(kind, random, source)
        if prompt.text not in used:
            used.add(prompt.text)
            found.append(prompt)
    return found


def solved_tasks(
    count: int, random: np.random.Generator, source: Source, kinds: Iterable[str]
) -> Iterator[str]:
    """Yields `count` solved tasks of these kinds in turn, one line each (`cloze`: several)."""
    names = list(kinds)
    for number in range(count):
        kind = names[number % len(names)]
        task = KINDS[kind](random, source)
        space = "" if kind == "cloze" and source.difficulty.hint else " "
        yield f"{task.question}{space}{task.answer}\n"


def read_source(text: str, part: slice, difficulty: Difficulty) -> Source:
    """Returns the source of tasks on a part of the lines of a text, and on the words of the whole
    text.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found, counts = np.unique(re.findall("[a-z]{3,}", text.lower()), return_counts=True)
    frequent: dict[str, list[str]] = {}
    for word in found[np.argsort(-counts, kind="stable")][:1000].tolist():
        frequent.setdefault(word[0], []).append(word)
    frequent = {first: words for first, words in frequent.items() if len(words) >= 6}
    size = len(lines)
    lines = lines[int(part.start * size) : int(part.stop * size)]
    return Source(lines, frozenset(found.tolist()), frequent, difficulty)
