"""`builtin:recall`: tasks that can be done from what was told, a steady share of them, and the same bytes on every Python."""

import hashlib
import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dantinox.config import UserError
from dantinox.text import Corpus, recall, sources
from dantinox.text.sources import find_sources

WORDS = set(recall.KEYS) | set(recall.VALUES)
TEXTS = ["".join(f"{i} {'ab ' * (i * n % 17)}\n" for i in range(40 * n)) for n in range(1, 12)]
TOLD, ASKED = (re.compile(rf"{re.escape(mark)} (\w+) (\w+)\n") for mark in (recall.FACT, recall.ASK))


@pytest.fixture(scope="module")
def records() -> list[str]:
    return [json.loads(line)["text"] for line in recall.corpus(TEXTS)]


@pytest.fixture
def few(monkeypatch) -> list[str]:
    """The built-in corpus is a few files, whose texts are returned."""
    some = find_sources(sources.BUILTIN)[:12]
    monkeypatch.setattr(sources, "_builtin", lambda: list(some))
    return [source.path.read_text(encoding="utf-8") for source in some]


def test_questions_and_answers_have_no_word_in_common() -> None:
    assert len(WORDS) == len(recall.KEYS) + len(recall.VALUES)
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


@given(seed=st.integers(0, 999), count=st.integers(1, len(recall.KEYS)), lines=st.lists(st.sampled_from(["a\n", "b c\n"])))
def test_what_is_asked_for_was_told_once(seed: int, count: int, lines: list[str]) -> None:
    task = recall.facts(random.Random(seed), lines, count)
    told = TOLD.findall(task.context)
    assert len(told) == count == len(dict(told))
    key = task.question.removeprefix(f"{recall.ASK} ")
    assert task.answer == f" {dict(told)[key]}" and f"{key}{task.answer}\n" in task.context
    assert TOLD.sub("", task.context) == "".join(lines), "the text around the facts is as it was"
    assert task == recall.facts(random.Random(seed), lines, count)


@given(seed=st.integers(0, 999), count=st.integers(1, 80))
def test_a_copy_ends_as_the_list_does(seed: int, count: int) -> None:
    task = recall.copy(random.Random(seed), count)
    assert task.context == f"{task.question}{task.answer}\n"
    assert task.context.count(" ") == count and set(task.context.split()[1:]) <= WORDS


def test_texts_stay_as_they_are_and_in_their_order(records) -> None:
    assert [record for record in records if record in TEXTS] == TEXTS


def test_every_question_of_the_corpus_can_be_answered_from_its_document(records) -> None:
    copies = asked = alone = 0
    for document in (record for record in records if record not in TEXTS):
        lines = document.splitlines()
        if len(lines[0].split()) > 3 and lines[0].startswith(recall.FACT):
            assert set(lines) == {lines[0]} and len(lines) in (2, 3) and set(lines[0].split()[1:]) <= WORDS
            copies += 1
            continue
        told, first = dict(TOLD.findall(document)), ASKED.search(document)
        assert first is not None and TOLD.search(document, first.start()) is None, "all is told before the first question"
        questions = ASKED.findall(document)
        assert {key for key, _ in questions} == set(told) and all(told[key] == value for key, value in questions)
        asked += 1
        alone += len(lines) == len(told) + len(questions)
    assert copies > 10 and asked > 10 and 0 < alone < asked


def test_tasks_are_between_15_and_30_percent_of_the_characters(records) -> None:
    plain = made = 0
    for record in records:
        if record in TEXTS:
            # Everywhere, not only at the end: validation takes the last documents.
            assert plain < 10_000 or 0.15 < made / (plain + made) < 0.33
            plain += len(record)
        else:
            made += len(record)
    assert 0.15 < round(made / (plain + made), 2) <= 0.3


def test_the_bytes_are_those_that_models_were_trained_on() -> None:
    """A fixed digest, from Python 3.11: other versions must draw the same, and a run must find its corpus again."""
    data = b"".join(recall.corpus(TEXTS))
    assert data == b"".join(recall.corpus(iter(TEXTS))) != b"".join(recall.corpus(TEXTS, seed=1))
    assert hashlib.sha256(data).hexdigest() == "02ea3e0bb79ffd8a7d225e43c7ed2450506b5f48d91ab0d23f923d06564daecf"


def test_builtin_corpus(few) -> None:
    opened = Corpus.open("builtin:recall", text_field="body")  # a setting for the files of others
    extent = opened.scan()
    found = [text for _, text in opened.pieces(extent.digest)]
    assert found == [json.loads(line)["text"] for line in recall.corpus(text for text in few if text.strip())]
    assert {text for text in few if text.strip()} < set(found) and extent.characters == sum(map(len, found))
    assert Corpus.open("builtin:recall").digest() == extent.digest != Corpus.open("builtin:python").digest()


def test_it_is_the_corpus_of_a_json_lines_file_with_the_same_records(few, tmp_path) -> None:
    (tmp_path / "recall.jsonl").write_bytes(b"".join(recall.corpus(text for text in few if text.strip())))
    assert Corpus.open("builtin:recall").digest() == Corpus.open(str(tmp_path / "recall.jsonl")).digest()


def test_another_name_is_answered_with_both() -> None:
    with pytest.raises(UserError, match=r"unknown corpus builtin:memory, did you mean builtin:python or builtin:recall\?"):
        find_sources("builtin:memory")
