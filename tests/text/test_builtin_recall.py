"""`builtin:recall`: the tasks are solvable, their share is constant, and all Python versions
produce the same bytes.
"""

import hashlib
import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dantinox.config import UserError
from dantinox.text import Corpus, corpus_files
from dantinox.text import builtin_recall as recall
from dantinox.text.corpus_files import find_corpus_files
from tests.error_texts import ERRORS

WORDS = {word for words in recall.TOPICS.values() for word in words}
TEXTS = ["".join(f"{i} {'ab ' * (i * n % 17)}\n" for i in range(40 * n)) for n in range(1, 12)]
LINE = re.compile(rf"^{re.escape(recall.LINE_PREFIX)} (\w+) (\w+)\n", re.MULTILINE)


@pytest.fixture(scope="module")
def records() -> list[str]:
    return [json.loads(line)["text"] for line in recall.recall_corpus(TEXTS)]


@pytest.fixture
def few(monkeypatch) -> list[str]:
    """Limits the built-in corpus to a few files and returns their texts."""
    some = find_corpus_files(corpus_files.BUILTIN_PYTHON)[:12]
    monkeypatch.setattr(corpus_files, "_builtin_python", lambda: list(some))
    return [source.path.read_text(encoding="utf-8") for source in some]


def test_words_belong_to_one_topic_and_are_not_topics() -> None:
    assert len(WORDS) == sum(map(len, recall.TOPICS.values())) and not WORDS & set(recall.TOPICS)
    assert all(
        word.isascii() and word.isalpha() and word.islower() for word in WORDS | set(recall.TOPICS)
    )


@given(
    seed=st.integers(0, 999),
    count=st.integers(1, len(recall.TOPICS)),
    lines=st.lists(st.sampled_from(["a\n", "b c\n"])),
)
def test_the_requested_fact_is_stated_once(seed: int, count: int, lines: list[str]) -> None:
    task = recall.fact_task(random.Random(seed), lines, count)
    facts = LINE.findall(task.context)
    assert len(facts) == count == len(dict(facts)) and all(
        word in recall.TOPICS[topic] for topic, word in facts
    )
    topic = task.question.removeprefix(f"{recall.LINE_PREFIX} ")
    assert task.answer == f" {dict(facts)[topic]}" and f"{topic}{task.answer}\n" in task.context
    assert LINE.sub("", task.context) == "".join(lines), "the text around the facts is as it was"
    assert task == recall.fact_task(random.Random(seed), lines, count)


@given(seed=st.integers(0, 999), count=st.integers(1, len(recall.TOPICS)))
def test_a_copy_task_repeats_the_record(seed: int, count: int) -> None:
    task = recall.copy_task(random.Random(seed), count)
    assert task.context == f"{task.question}{task.answer}\n"
    words = task.context.split()[1:]
    assert len(words) == 2 * count and all(
        word in recall.TOPICS[topic] for topic, word in zip(words[::2], words[1::2], strict=True)
    )


def test_texts_are_unchanged_and_in_order(records) -> None:
    assert [record for record in records if record in TEXTS] == TEXTS


def test_a_document_never_contradicts_itself(records) -> None:
    kinds = [0, 0, 0]
    for document in (record for record in records if record not in TEXTS):
        lines, facts = document.splitlines(keepends=True), LINE.findall(document)
        if not facts:
            assert len(set(lines)) == 1 and 3 <= len(lines) <= 8
            kinds[0] += 1
            continue
        assert len(dict(facts)) == len(set(facts)) and all(
            word in recall.TOPICS[topic] for topic, word in facts
        )
        alone = len(facts) == len(lines)
        kinds[1 + alone] += 1
        if not alone:
            assert all(facts.count(fact) == 3 for fact in facts), "stated once, asked for twice"
            assert all(LINE.match(line) for line in lines[-2 * len(facts) // 3 :])
    assert min(kinds) > 5


def test_tasks_are_15_to_30_percent_of_the_characters(records) -> None:
    plain = made = 0
    for record in records:
        if record in TEXTS:
            # The share must hold in every part, because the last documents are the validation
            # split.
            assert plain < 10_000 or 0.15 < made / (plain + made) < 0.33
            plain += len(record)
        else:
            made += len(record)
    assert 0.15 < round(made / (plain + made), 2) <= 0.3


def test_the_corpus_has_a_fixed_digest() -> None:
    """The digest was computed with Python 3.11. Other versions must give the same corpus, so that
    runs can resume.
    """
    data = b"".join(recall.recall_corpus(TEXTS))
    assert (
        data
        == b"".join(recall.recall_corpus(iter(TEXTS)))
        != b"".join(recall.recall_corpus(TEXTS, seed=1))
    )
    assert (
        hashlib.sha256(data).hexdigest()
        == "666584ebe0b74d815f776841dd8f3616f5b4796bfe5db2e1a8dde403ff8a6b26"
    )


def test_builtin_corpus(few) -> None:
    opened = Corpus.open("builtin:recall", text_field="body")  # has no effect on built-in corpora
    extent = opened.scan()
    found = [text for _, text in opened.read_text(extent.digest)]
    assert found == [
        json.loads(line)["text"]
        for line in recall.recall_corpus(text for text in few if text.strip())
    ]
    assert {text for text in few if text.strip()} < set(found) and extent.characters == sum(
        map(len, found)
    )
    assert (
        Corpus.open("builtin:recall").digest()
        == extent.digest
        != Corpus.open("builtin:python").digest()
    )


def test_the_corpus_equals_a_json_lines_file_with_the_same_records(few, tmp_path) -> None:
    (tmp_path / "recall.jsonl").write_bytes(
        b"".join(recall.recall_corpus(text for text in few if text.strip()))
    )
    assert (
        Corpus.open("builtin:recall").digest()
        == Corpus.open(str(tmp_path / "recall.jsonl")).digest()
    )


def test_an_unknown_builtin_corpus_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=ERRORS["unknown_corpus_builtin_memory_did"]):
        find_corpus_files("builtin:memory")
