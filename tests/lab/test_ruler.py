"""RULER's tasks contain their answers, and scores match the answers of a model."""

import json
import math
import random
import re
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dantinox.config import UserError
from dantinox.generation import load
from dantinox.generation.decode.cache_plan import CachePlan
from dantinox.lab.measure.texts import pad_rows
from dantinox.lab.studies import ruler_study
from dantinox.lab.studies.kv_bench import CacheBenchmark, QuestionBatch
from dantinox.lab.studies.kv_variants import CacheVariant
from dantinox.lab.studies.ruler_study import evaluate_ruler
from dantinox.lab.studies.ruler_tasks import (
    TASKS,
    Haystack,
    Sample,
    build_haystack,
    make_sample,
    match_score,
    python_manual,
)
from dantinox.lab.studies.ruler_view import ruler_blocks
from dantinox.model import make_cache
from dantinox.report.document import study_files, to_csv, to_lines, to_markdown
from tests.error_texts import ERRORS


def words_of(text: str) -> list[str]:
    """Tokenizes a text into words and punctuation."""
    return re.findall(r"\w+|[^\w ]", text)


def sample_of(name: str, length: int = 1500, seed: int = 0, number: int = 0) -> Sample:
    return make_sample(name, length, words_of, python_manual(), seed, number)


def task_sample(name: str, size: int, length: int = 8192) -> Sample:
    return TASKS[name](random.Random(4), python_manual(), length, size)


# --- tasks


@pytest.mark.parametrize("name", TASKS)
def test_sample_has_maximum_length_and_contains_its_answers(name):
    for length in (1000, 4500):
        sample = sample_of(name, length)
        used = len(words_of(sample.context)) + len(words_of(sample.question)) + sample.new_tokens
        assert 0.85 * length < used < length
        assert (
            match_score(sample.context, sample) == 1 and match_score(sample.question, sample) == 0
        )
        assert (
            len(set(sample.answers))
            == len(sample.answers)
            == {"vt": 5, "cwe": 10, "fwe": 3}.get(name, len(sample.answers))
        )
    assert (
        sample_of(name) == sample_of(name)
        and len(
            {sample_of(name, number=i).context for i in range(3)}
            | {sample_of(name, seed=1).context}
        )
        == 4
    )
    with pytest.raises(
        UserError, match=f"the task {name} does not fit in 40 tokens: raise --lengths"
    ):
        sample_of(name, 40)


@pytest.mark.parametrize(
    "name, needles, num_answers",
    [
        ("single_1", 1, 1),
        ("single_3", 1, 1),
        ("multikey_1", 4, 1),
        ("multivalue", 4, 4),
        ("multiquery", 4, 4),
    ],
)
def test_needles(name, needles, num_answers):
    sample = task_sample(f"niah_{name}", 40)
    found = dict(
        re.findall(
            r"One of the secret (?:number|uuid)s of [a-z0-9-]+ is ([a-z0-9-]+)(\.)", sample.context
        )
    )
    assert (
        len(found) == needles
        and len(sample.answers) == num_answers
        and set(sample.answers) <= set(found)
    )
    keys = set(re.findall(r"secret (?:number|uuid)s of ([a-z]+-[a-z]+) is", sample.context))
    assert len(keys) == (1 if name == "multivalue" else needles)
    assert sum(key in sample.question for key in keys) == (needles if name == "multiquery" else 1)
    assert ("The meadow is wide" in sample.context) == (name == "single_1")
    form = (
        r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
        if name == "single_3"
        else r"\d{7}"
    )
    assert all(re.fullmatch(form, answer) for answer in sample.answers)


def test_needles_hidden_among_needles():
    for name in ("niah_multikey_2", "niah_multikey_3"):
        sample = task_sample(name, 30)
        facts = re.findall(r"One of the secret \w+ of (\S+) is (\S+)\.", sample.context)
        assert len(facts) == 31
        (queried,) = {key for key, _ in facts if key in sample.question}
        assert dict(facts)[queried] == sample.answers[0]


def test_variable_task():
    sample = task_sample("vt", 20)
    lines = re.findall(r"VAR (\w{5}) = (?:VAR )?(\w+)", sample.context)
    value = re.search(r"value (\d{5}) in", sample.question)[1]
    assert (
        "five variables" in sample.question and sample.context.count("VAR") == 18
    )  # 9 in the example, 9 in the task
    values = {}
    for name, source in lines:
        values[name] = values.get(source, source)
    assert {name for name, held in values.items() if held == value} == set(sample.answers)


def test_word_tasks():
    for length, often, seldom in ((2048, 6, 1), (8192, 30, 3)):
        sample = task_sample("cwe", 30, length)
        counts = Counter(
            re.findall(
                r"\d+\. (\w+)", sample.context.rpartition("The following is a numbered list")[2]
            )
        )
        assert {counts[word] for word in sample.answers} == {often} and len(counts) == 40
        assert {count for word, count in counts.items() if word not in sample.answers} == {seldom}
    sample = task_sample("fwe", 50)
    counts = Counter(sample.context.partition("most often. ")[2].split())
    assert [word for word, _ in counts.most_common(4)] == ["...", *sample.answers]
    assert [counts[word] for word in sample.answers] == [
        int(800 / rank**2 / (math.pi**2 / 6)) for rank in (2, 3, 4)
    ]


def test_document_tasks():
    for name in ("qa_1", "qa_2"):
        for number in range(5):
            sample = TASKS[name](random.Random(number), python_manual(), 4096, 25)
            born = dict(re.findall(r"(\w+ \w+) was a \w+ who was born in (\w+) in", sample.context))
            river = dict(re.findall(r"(\w+) is a town on the river (\w+ \w+)\.", sample.context))
            (person_asked,) = {person for person in born if person in sample.question}
            wanted = born[person_asked] if name == "qa_1" else river[born[person_asked]]
            assert (
                sample.answers == (wanted,)
                and len(born) == 26
                and len(river) == (26 if name == "qa_2" else 0)
            )


def test_scores():
    every = Sample("", "", ("Alpha", "12", "b"), True, 9)
    assert (
        match_score("it is ALPHA and 12", every) == pytest.approx(2 / 3)
        and match_score("", every) == 0
    )
    assert (
        match_score("or b", every._replace(every=False)) == 1
        and match_score("or c", every._replace(every=False)) == 0
    )


def test_error_if_a_text_is_too_short():
    with pytest.raises(UserError, match=ERRORS["notes_txt_has_1_plain"]):
        build_haystack("Nothing much stands here that could ever hide needles in.", "notes.txt")
    found = python_manual()
    assert isinstance(found, Haystack) and len(set(found.words)) == len(found.words) > 300


# --- answers


def test_greedy_answers_match_the_full_forward_pass(run_dir):
    """Covers prompts of two lengths, question tokens read one by one, and more steps than a chunk
    has.
    """
    run = load(run_dir)
    model = run.model
    plan = CachePlan(96, "float32")
    cache = CacheVariant("full", 1.0, model, plan, make_cache(model.config, 1, *plan).report())
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 200, size).tolist() for size in (20, 13)]
    given = [rng.integers(3, 200, size).tolist() for size in (3, 7)]
    messages = []
    batch = QuestionBatch(prompts, given, 34)
    ((generated,),) = CacheBenchmark([cache], messages.append).answer_questions(
        run, [batch], 64, "answers"
    )
    assert (
        messages == ["answers: 1 batches, one for each cache"]
        and generated.rate > 0 < generated.prefill_seconds
    )
    whole = nnx.jit(lambda model, tokens: model(tokens, jnp.arange(64)[None])[0])
    for row, (prompt, known) in enumerate(zip(prompts, given, strict=True)):
        text = [*prompt, *known]
        for _ in range(batch.new_tokens):
            tokens_1T, _ = pad_rows([text], 64)
            text.append(int(whole(model, tokens_1T)[0, len(text) - 1].argmax()))
        assert generated.ids[row].tolist() == text[-batch.new_tokens :]


@pytest.mark.slow
def test_study_of_a_cyclic_model(run_dir, monkeypatch, tmp_path):
    """The last byte determines the next one: with any cache, one task is always right and another
    never.
    """
    first, then = "aè"  # of the cycle

    def task(rng, haystack, length, size, answer):
        return Sample("a" * min(size, 40), f"say {first}", (answer,), True, 4)

    monkeypatch.setattr(ruler_study, "MIN_LENGTH", 64)
    monkeypatch.setattr(ruler_study, "TASKS", found := {"vt": None, "qa_1": None})
    tasks = {"vt": lambda *args: task(*args, then), "qa_1": lambda *args: task(*args, "never")}
    monkeypatch.setattr("dantinox.lab.studies.ruler_tasks.TASKS", tasks)
    found.update(tasks)
    messages: list[str] = []
    study = evaluate_ruler(
        run_dir, lengths=[64], samples=2, methods=["full", "kvzip"], ratios=[0.5],
        kv_dtype="int4", progress=messages.append,
    )  # fmt: skip
    assert [(one.method, one.ratio, one.dtype) for one in study.findings] == [
        ("full", 1.0, "float32"), ("kvzip", 0.5, "int4"),
    ]  # fmt: skip
    for one in study.findings:
        for seen in ("agnostic", "aware"):
            assert one.scores[seen]["vt"].value == 100 and one.scores[seen]["qa_1"].value == 0
            assert one.scores[seen]["mean"].value == 50
    assert (
        study.findings[0].share == 1
        and study.findings[1].share < 0.25
        and messages[0].startswith("RULER at 64 tokens: ")
    )
    blocks = list(ruler_blocks(study))
    lines = list(to_lines(blocks, 200))
    assert any(re.match(r"kvzip +0.50 +50.0", line) for line in lines)
    assert "| kvzip | 0.50 | 50.0 [0.0, 100.0]" in to_markdown(blocks)
    assert to_csv(blocks).count("\n") == 3 and "vt_aware_low" in to_csv(blocks)
    assert json.loads(study_files("ruler", study, blocks)["ruler.json"]())["findings"][0]["scores"][
        "aware"
    ]["vt"] == [
        100.0,
        100.0,
        100.0,
    ]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"lengths": [63]}, r"--lengths must be in \[64, 128\], the model's context, got 63"),
        ({"samples": 0}, "--samples must be at least 1, got 0"),
        ({"ratios": [1.0]}, "--ratios must be between 0 and 1, got 1"),
        ({"tasks": "vt, cw"}, "unknown task of RULER 'cw': did you mean cwe"),
        ({"tasks": ","}, "--tasks must name at least one task of RULER"),
        ({"methods": ["kvzap"]}, "unknown method of eval ruler 'kvzap': did you mean kvzip"),
        (
            {"methods": ["loss"]},
            "loss cannot run without .*kv_entropy.json: run `dantinox calibrate",
        ),
    ],
)
def test_errors(run_dir, given, message, monkeypatch):
    monkeypatch.setattr(ruler_study, "MIN_LENGTH", 64)
    with pytest.raises(UserError, match=message):
        evaluate_ruler(run_dir, **given)


@pytest.mark.parametrize("lengths", [None, [128]])
def test_a_context_that_is_too_short(run_dir, lengths):
    with pytest.raises(
        UserError, match="eval ruler needs a model with a context of at least 256 tokens, got 128"
    ):
        evaluate_ruler(run_dir, lengths=lengths)
