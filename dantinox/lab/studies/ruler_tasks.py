"""The 13 tasks of RULER, generated locally (Hsieh et al. 2024, arXiv 2404.06654, table 1 and
appendix B).

Eight tasks hide needles in a haystack, one assigns variables in chains, two count words, and two
ask about documents. The number and kinds of tasks and the sizes in them are those of RULER. No data
set is downloaded, so the texts differ. The wording is our own. The essays consist of sentences of
Python's manual or of a given text; the words to count come from the same source. The documents are
generated. In place of SQuAD, the answer follows from one document; in place of HotpotQA, from two.
Scores are not comparable with published ones.
"""

import math
import random
import re
import uuid
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

from dantinox.config import UserError

NOISE = (
    "The meadow is wide. The lake is cold. The moon is bright. We walk"
    " a while. Then we come home again."
)
MIN_SENTENCES = 50  # of a haystack
MIN_WORDS = 300
# Below this number of tokens, the words of `cwe` are repeated less often, as in RULER.
SHORT_LENGTH = 4096
_LISTS = """
adjectives: amber brave brisk calm clever cosy crisp eager early faint fierce fresh gentle giant
  golden grand hasty hollow humble icy jolly keen late lively lofty lucky mellow merry mighty modest
  narrow noble pale plain proud quick quiet rapid rare rough rusty shiny silent simple sleepy slow
  smooth solid steady stern sturdy sunny swift tall tender tidy tiny vivid warm wise
nouns: anchor apple arrow badge barrel basket beacon bell bench blanket bottle bridge bucket button
  candle canoe carpet castle chain cherry clock cloud copper corner cradle crown curtain drum engine
  feather fence ferry flute fountain garden glove hammer harbor helmet island jacket kettle ladder
  lantern lemon letter marble mirror needle orchard paddle pebble pencil pillow planet pocket ribbon
  river saddle shovel signal spoon statue tunnel valley violin wagon window
names: Ada Bruno Clara David Elsa Felix Greta Hugo Irene Jonas Karla Leon Marta Nils Olga Paul Rosa
  Simon Tilda Victor
families: Ander Berg Carl Dahl Eck Finn Gard Holm Ivar Jansen
children: son man berg strom wood well stad lund
towns: Al Bren Cor Dun El Fair Gran Hol Kel Lor Mar Nor Os Per Quin
places: bury dale field ford ham ley mont
trades: baker carpenter doctor farmer gardener lawyer mason painter pilot printer sailor tailor
  teacher weaver
"""
WORDS = {
    name: tuple(words.split())
    for name, words in re.findall(r"^(\w+): ((?:.|\n  )*)$", _LISTS, re.MULTILINE)
}


class Sample(NamedTuple):
    """A context, a question about it, and the expected answers.

    Attributes:
      question: the question with the beginning of the answer.
      every: whether the score is the share of expected answers found; otherwise one answer gives
        the full score.
      new_tokens: maximum tokens of a continuation.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    every: bool
    new_tokens: int


class Haystack(NamedTuple):
    """Sentences to hide needles in, and words to count."""

    sentences: Sequence[str]
    words: Sequence[str]


def build_haystack(text: str, what: str = "the text") -> Haystack:
    """Extracts the plain sentences and the words of a text.

    Args:
      what: the name of the text in error messages.

    Raises:
      UserError: the text has too few sentences or words.
    """
    flat = re.sub(r"\s+", " ", text)
    sentences = list(
        dict.fromkeys(re.findall(r"(?:(?<=[.!?] )|(?<=^))[A-Z][A-Za-z ,;'()-]{30,220}\.", flat))
    )
    words = sorted(set(re.findall(r"\b[a-z]{4,9}\b", " ".join(sentences))))
    if len(sentences) < MIN_SENTENCES or len(words) < MIN_WORDS:
        raise UserError(
            f"{what} has {len(sentences)} plain sentences and {len(words)} words, but the tasks"
            f" need {MIN_SENTENCES} and {MIN_WORDS}: select a longer text with --data_path"
        )
    return Haystack(sentences, words)


@cache
def python_manual() -> Haystack:
    """Returns the haystack of Python's manual, which is part of every Python installation."""
    from pydoc_data.topics import topics

    return build_haystack(" ".join(topics.values()), "Python's manual")


def match_score(answer: str, sample: Sample) -> float:
    """Returns RULER's string match in [0, 1]: the expected answers that occur in the text, ignoring
    case.
    """
    found = [expected.lower() in answer.lower() for expected in sample.answers]
    return sum(found) / len(found) if sample.every else float(any(found))


def make_sample(
    name: str,
    length: int,
    encode: Callable[[str], Sequence[int]],
    haystack: Haystack,
    seed: int,
    number: int,
) -> Sample:
    """Generates sample `number` of a task: the longest with at most `length` tokens including its
    answer.

    Args:
      name: a name of `TASKS`.
      encode: encodes a text into tokens.

    Raises:
      UserError: even the shortest sample is longer.
    """

    def make(size: int) -> Sample:
        return TASKS[name](random.Random(f"{name} {seed} {number}"), haystack, length, size)

    def fits(size: int) -> bool:
        sample = make(size)
        return (
            len(encode(sample.context)) + len(encode(sample.question)) + sample.new_tokens < length
        )

    if not fits(1):
        raise UserError(f"the task {name} does not fit in {length} tokens: raise --lengths")
    low = 1
    # `low < length` ends the loop if samples stop growing because a word list is exhausted.
    while low < length and fits(2 * low):
        low *= 2
    high = 2 * low
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return make(low)


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10**6, 10**7))


def _word(rng: random.Random) -> str:
    return f"{rng.choice(WORDS['adjectives'])}-{rng.choice(WORDS['nouns'])}"


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


KINDS = {"word": _word, "number": _number, "uuid": _uuid}


def _join_words(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _insert_randomly(rng: random.Random, units: list[str], hidden: Sequence[str]) -> list[str]:
    """Inserts the hidden lines into `units` at random positions, in their order."""
    positions = sorted(rng.choices(range(len(units) + 1), k=len(hidden)), reverse=True)
    for position, line in zip(positions, reversed(hidden), strict=True):
        units.insert(position, line)
    return units


def _needle_sample(
    rng: random.Random,
    haystack: Haystack,
    length: int,
    size: int,
    *,
    hay: str,
    key: str = "word",
    value: str = "number",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> Sample:
    def needle(name: str, secret: str) -> str:
        return f"One of the secret {value}s of {name} is {secret}."

    facts = {
        KINDS[key](rng): [KINDS[value](rng) for _ in range(values)]
        for _ in range(max(keys, queries))
    }
    hidden = [needle(name, secret) for name, secrets in facts.items() for secret in secrets]
    rng.shuffle(hidden)
    if hay == "essay":
        first = rng.randrange(len(haystack.sentences))
        units = [haystack.sentences[(first + i) % len(haystack.sentences)] for i in range(size)]
    else:
        units = [
            NOISE if hay == "noise" else needle(KINDS[key](rng), KINDS[value](rng))
            for _ in range(size)
        ]
    queried = rng.sample(list(facts), queries)
    answers = tuple(secret for name in queried for secret in facts[name])
    text = (" " if hay == "essay" else "\n").join(_insert_randomly(rng, units, hidden))
    names = f"of {_join_words(queried)} in the text above"
    if len(answers) == 1:
        announcement = f"A secret {value} is hidden in the following text. Keep it in mind"
        question = f"What is the secret {value} {names}? The secret {value} {names} is"
    else:
        announcement = f"Some secret {value}s are hidden in the following text. Keep them in mind"
        question = f"What are all the secret {value}s {names}? The secret {value}s {names} are"
    context = f"{announcement}: the question comes afterwards.\n{text}\n"
    return Sample(context, question, answers, True, 128)


def _variable_sample(rng: random.Random, haystack: Haystack, length: int, size: int) -> Sample:
    def chain(letters: int, noises: int) -> tuple[str, str, list[str]]:
        """Returns a text with assignments, the value, and the five variables that have it."""
        names: list[str] = []
        while len(names) < 5:
            name = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(letters))
            names += [] if name in names else [name]
        value = str(rng.randrange(10000, 100000))
        lines = [
            f"VAR {name} = {'VAR ' + names[i - 1] if i else value}" for i, name in enumerate(names)
        ]
        return "\n".join(_insert_randomly(rng, [NOISE] * noises, lines)), value, names

    def ask(value: str) -> str:
        return (
            f"Question: Which variables have the value {value} in the text above? "
            f"Answer: By the assignments in the text above, five variables have the value {value}:"
        )

    def instruct(text: str) -> str:
        return (
            "Follow the assignments of variables that are hidden in the following"
            f" text.\n\n{text}\n"
        )

    example, shown, found = chain(3, 5)
    text, value, names = chain(5, size)
    context = f"{instruct(example)}{ask(shown)} {' '.join(found)}\n\n{instruct(text)}"
    return Sample(context, ask(value), tuple(names), True, 30)


def _common_word_sample(rng: random.Random, haystack: Haystack, length: int, size: int) -> Sample:
    def listing(words: Sequence[str], often: int, seldom: int) -> str:
        repeated = list(words[:10]) * often + list(words[10:]) * seldom
        rng.shuffle(repeated)
        numbered = " ".join(f"{i}. {word}" for i, word in enumerate(repeated, 1))
        return (
            "The following is a numbered list of words. Some of them come more often than others."
            f" Keep those in mind that come most often.\n{numbered}\n"
        )

    question = (
        "Question: Which 10 words come most often in the list above? Answer: The"
        " 10 words that come most often are:"
    )
    # The number of words in the example, and how often the 10 common words and the others come in
    # the list and the example.
    shown, counts, example = (
        (20, (6, 1), (3, 1)) if length < SHORT_LENGTH else (40, (30, 3), (10, 3))
    )
    words = rng.sample(haystack.words, shown + min(10 + size, len(haystack.words) - shown))
    found = " ".join(f"{i}. {word}" for i, word in enumerate(words[:10], 1))
    counted = words[shown:]
    context = f"{listing(words[:shown], *example)}{question} {found}\n\n{listing(counted, *counts)}"
    return Sample(context, question, tuple(counted[:10]), True, 120)


def _frequent_word_sample(rng: random.Random, haystack: Haystack, length: int, size: int) -> Sample:
    """Builds a text in which the word of rank k has a frequency proportional to k⁻²; the word of
    rank 1 is three dots.
    """
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["..."]
    while len(words) < max(4, length // 50):
        word = "".join(rng.choice(letters) for _ in range(6))
        words += [] if word in words else [word]
    zeta = math.pi**2 / 6
    repeated = [
        word for rank, word in enumerate(words, 1) for _ in range(int(16 * size / rank**2 / zeta))
    ]
    rng.shuffle(repeated)
    context = (
        "Read the following text in code and count how often each word comes. Find the three words"
        f" that come most often. {' '.join(repeated)}\n"
    )
    question = (
        "Question: Which three words come most often in the text above? Leave the dots out and"
        " explain nothing. Answer: In the text above, the three words that come most often are:"
    )
    return Sample(context, question, tuple(words[1:4]), True, 50)


def _document_sample(
    rng: random.Random, haystack: Haystack, length: int, size: int, *, hops: int
) -> Sample:
    """Builds documents about people and, with two hops, about their birthplaces; the question is
    about one person.
    """
    towns = rng.sample([start + end for start in WORDS["towns"] for end in WORDS["places"]], 40)
    rivers = rng.sample(
        [f"{a.title()} {noun.title()}" for a in WORDS["adjectives"] for noun in WORDS["nouns"]],
        len(towns),
    )
    surnames = [start + end for start in WORDS["families"] for end in WORDS["children"]]
    names = [f"{first} {last}" for first in WORDS["names"] for last in surnames]
    people = rng.sample(names, min(size + 1, len(names)))
    births = [rng.randrange(len(towns)) for _ in people]
    documents = [
        f"{name} was a {rng.choice(WORDS['trades'])} who was born in {towns[town]} in"
        f" {rng.randrange(1700, 1990)}. Later {name} lived in {rng.choice(towns)} and kept"
        f" {rng.randrange(2, 40)} {rng.choice(WORDS['nouns'])}s."
        for name, town in zip(people, births, strict=True)
    ]
    person = people[0]
    town = births[0]
    if hops == 2:
        near = [
            town,
            *rng.sample([i for i in range(len(towns)) if i != town], min(size, len(towns) - 1)),
        ]
        documents += [
            f"{towns[i]} is a town on the river {rivers[i]}. It has {rng.randrange(2, 90)} mills."
            for i in near
        ]
        what = f"On which river is the town where {person} was born?"
        answer = rivers[town]
    else:
        what = f"In which town was {person} born?"
        answer = towns[town]
    rng.shuffle(documents)
    numbered = "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(documents, 1))
    order = "Answer the question by the documents. Give the answer and no other words.\n\n"
    return Sample(
        f"{order}{numbered}\n\n", f"{order}Question: {what}\nAnswer:", (answer,), False, 32
    )


# Name → function of (random numbers, haystack, total tokens, size) that returns a sample. The size
# is a number of sentences, words or documents.
TASKS: dict[str, Callable[[random.Random, Haystack, int, int], Sample]] = {
    "niah_single_1": partial(_needle_sample, hay="noise"),
    "niah_single_2": partial(_needle_sample, hay="essay"),
    "niah_single_3": partial(_needle_sample, hay="essay", value="uuid"),
    "niah_multikey_1": partial(_needle_sample, hay="essay", keys=4),
    "niah_multikey_2": partial(_needle_sample, hay="needles"),
    "niah_multikey_3": partial(_needle_sample, hay="needles", key="uuid", value="uuid"),
    "niah_multivalue": partial(_needle_sample, hay="essay", values=4),
    "niah_multiquery": partial(_needle_sample, hay="essay", queries=4),
    "vt": _variable_sample,
    "cwe": _common_word_sample,
    "fwe": _frequent_word_sample,
    "qa_1": partial(_document_sample, hops=1),
    "qa_2": partial(_document_sample, hops=2),
}
