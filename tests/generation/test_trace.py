"""The per-token records of a sample agree with the arrays, with the text, and with the settings of
the request.
"""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
import tokenizers

from dantinox.config import UserError
from dantinox.generation import LoadedModel
from dantinox.generation.api.trace import trace_document
from dantinox.report.entropy_view import show_entropy
from dantinox.report.page import report_page
from dantinox.report.trace_file import trace_lines
from dantinox.sampling.best_of_n import Candidates
from dantinox.sampling.entropy_router import STRATEGIES, AttentionMetrics, Route
from dantinox.sampling.step_info import RouterReport, StepInfo
from dantinox.text import Tokenizer
from tests.error_texts import ERRORS

from . import builder

ROUTED = {
    "strategy": "entropy",
    "low_entropy": 1.2,
    "low_varentropy": 2.0,
    "high_entropy": 2.0,
    "high_varentropy": 2.6,
}


@pytest.fixture(scope="module")
def run():
    return builder.loaded_model(builder.BYTES, 64, windows=(None,))


KINDS = {
    "chain": {},
    "router": ROUTED,
    "router without attention": ROUTED | {"use_attention": False},
}
every_kind = pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
TOKENS = [*b"abc", 0xC3, 0xA9, *b"xyz!", 0xE2, 0x82, 0x20]


def sample(run, settings, candidates=0):
    """Returns a result whose reports are random numbers."""
    count = len(TOKENS)
    empty = run.generate(
        "abc", logprobs=4, max_new_tokens=0, seed=3, top_k=9, ignore_eos=True, **settings
    )
    random, routed = np.random.default_rng(7), None

    def numbers(*shape):
        return random.standard_normal((count, *shape)).astype(np.float32)

    def ids(*shape):
        return random.integers(0, 259, (count, *shape)).astype(np.int32)

    def with_zeros(values):  # tokens that no draw can give
        return np.where(random.random(values.shape) < 0.3, -np.inf, values)

    if settings:
        attention = (
            AttentionMetrics(*(numbers() for _ in AttentionMetrics._fields))
            if settings == ROUTED
            else None
        )
        choice = Route(np.arange(count) % len(STRATEGIES), numbers(), numbers(), ids(), numbers())
        drawn = (
            Candidates(ids(), ids(candidates), numbers(candidates), with_zeros(numbers(candidates)))
            if candidates
            else None
        )
        routed = RouterReport(attention, choice, np.arange(count) % 4 == 1, drawn)
    tops = ids(4), numbers(4), with_zeros(numbers(4))
    steps = StepInfo(
        numbers(), with_zeros(numbers()), ids(), ids(), numbers(), numbers(), *tops, routed
    )
    return replace(empty, tokens=TOKENS, text=run.tokenizer.decode(TOKENS), steps=steps)


def or_none(values):
    return [None if value == -np.inf else value for value in values.tolist()]


@every_kind
def test_a_document_has_the_numbers_of_the_arrays(run, settings):
    result = sample(run, settings)
    document, steps = trace_document(result, run.tokenizer), result.steps
    json.dumps(document, allow_nan=False)
    tokens = document["tokens"]
    assert [token["id"] for token in tokens] == TOKENS and "".join(
        token["text"] for token in tokens
    ) == result.text
    assert document["settings"] == settings | {"top_k": 9, "ignore_eos": True}
    assert (document["seed"], document["prompt"], document["finish_reason"]) == (3, "abc", "length")
    for name in ("entropy", "varentropy", "survivors", "rank", "logprob"):
        assert [token[name] for token in tokens] == getattr(steps, name).tolist(), name
    assert [token["logprob_sampled"] for token in tokens] == or_none(steps.logprob_sampled)
    columns = zip(
        steps.top_ids.tolist(),
        steps.top_logprobs.tolist(),
        map(or_none, steps.top_logprobs_sampled),
        strict=True,
    )
    for token, (top_ids, logprobs, sampled) in zip(tokens, columns, strict=True):
        assert token["alternatives"] == [
            {"id": i, "text": run.tokenizer.token_text(i), "logprob": p, "logprob_sampled": q}
            for i, p, q in zip(top_ids, logprobs, sampled, strict=True)
        ]
        assert "candidates" not in token
    if not settings:
        assert (
            document["router"] is None
            and document["strategy"] == "chain"
            and "strategy" not in tokens[0]
        )
        return
    assert [token["strategy"] for token in tokens] == [
        STRATEGIES[n % len(STRATEGIES)] for n in range(len(TOKENS))
    ]
    assert [token["forced"] for token in tokens] == steps.routed.forced.tolist()
    numbers = steps.routed.route._asdict() | (
        {} if steps.routed.attention is None else steps.routed.attention._asdict()
    )
    for name in numbers.keys() - {"strategy"}:
        assert [token[name] for token in tokens] == numbers[name].tolist(), name
    assert ("attn_entropy" in tokens[0]) == (settings == ROUTED)
    assert (document["router"]["low_entropy"], document["router"]["base_top_k"]) == (1.2, 9)


def check_written_candidates(run, document):
    """Checks the candidates in the lines and in the page of a document; without logprobs, asking
    for them is an error.
    """
    lines = [json.loads(line) for line in trace_lines([document])][1:]
    assert [line["candidates"] for line in lines] == [
        [[one["id"], one["text"], one["logprob"], one["score"]] for one in token["candidates"]]
        for token in document["tokens"]
    ]
    assert '"score":[' in report_page([document])
    with pytest.raises(UserError, match=ERRORS["set_logprobs_too"]):
        run.generate("abc", show_candidates=True, **ROUTED)


def test_candidates_are_those_of_adaptive_tokens(run):
    result = sample(run, ROUTED, candidates=3)
    result.steps.routed.candidates.ids[:, 2] = -1  # an unused entry
    document, drawn = trace_document(result, run.tokenizer), result.steps.routed.candidates
    for n, token in enumerate(document["tokens"]):
        count = 2 if token["strategy"] == "adaptive" and not token["forced"] else 0
        scores = or_none(drawn.scores[n])
        assert [(one["id"], one["logprob"], one["score"]) for one in token["candidates"]] == [
            (int(drawn.ids[n, i]), float(drawn.logprobs[n, i]), scores[i]) for i in range(count)
        ]
    assert {len(token["candidates"]) for token in document["tokens"]} == {0, 2}
    check_written_candidates(run, document)


@pytest.mark.slow
@every_kind
def test_a_document_equals_the_arrays(run, settings):
    result = run.generate(
        "abc", logprobs=4, seed=3, max_new_tokens=12, top_k=9, ignore_eos=True, **settings
    )
    document, steps = trace_document(result, run.tokenizer), result.steps
    json.dumps(document, allow_nan=False)
    tokens = document["tokens"]
    assert [token["id"] for token in tokens] == result.tokens and len(tokens) == 12
    assert "".join(token["text"] for token in tokens) == result.text
    assert document["settings"] == settings | {"top_k": 9, "ignore_eos": True}
    assert (document["seed"], document["prompt"], document["finish_reason"]) == (3, "abc", "length")
    np.testing.assert_array_equal([token["entropy"] for token in tokens], steps.entropy)
    logits = builder.all_logits(run.model, [*run.prompt_ids("abc"), *result.tokens]).astype(
        np.float64
    )[2:-1]
    lnp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    best = np.argsort(-lnp, axis=1, kind="stable")[:, :4]
    for n, token in enumerate(tokens):
        assert token["entropy"] == pytest.approx(
            -(np.exp(lnp[n]) * lnp[n]).sum() / np.log(2), abs=builder.LOGPROB_TOLERANCE
        )
        assert [one["id"] for one in token["alternatives"]] == best[n].tolist()
        assert [one["logprob"] for one in token["alternatives"]] == pytest.approx(
            lnp[n, best[n]].tolist(), abs=builder.LOGPROB_TOLERANCE
        )
        kept = [
            one["logprob_sampled"]
            for one in token["alternatives"]
            if one["logprob_sampled"] is not None
        ]
        assert np.exp(kept).sum() <= 1 + 1e-5
        own = [one["logprob_sampled"] for one in token["alternatives"] if one["id"] == token["id"]]
        assert own in ([], [token["logprob_sampled"]])
        assert ("strategy" in token) == bool(settings)
        assert ("attn_entropy" in token) == (settings == ROUTED)
    if settings:
        assert [token["strategy"] for token in tokens] == [
            STRATEGIES[i] for i in steps.routed.route.strategy
        ]
        assert (document["router"]["low_entropy"], document["router"]["base_top_k"]) == (1.2, 9)
    else:
        assert document["router"] is None and {token["survivors"] for token in tokens} == {9}


@pytest.mark.slow
def test_parts_of_characters_add_up(run):
    """A token can be bytes that are not valid text alone. The pieces of all tokens still add up to
    the text.
    """
    result = run.generate(
        "é", logprobs=2, seed=5, max_new_tokens=40, temperature=3.0, ignore_eos=True
    )
    texts = [token["text"] for token in trace_document(result, run.tokenizer)["tokens"]]
    assert "".join(texts) == result.text and "" in texts


def test_the_first_token_continues_the_prompt(run):
    """If a vocabulary drops the space at the start of a text, it still keeps the space at the start
    of a continuation.
    """
    result = sample(run, {})
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"▁{n}": n for n in range(259)}, unk_token="▁0")
    )
    core.decoder = tokenizers.decoders.Metaspace()
    core.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    for token in trace_document(result, Tokenizer(core.to_str()))["tokens"]:
        assert token["text"] == f" {token['id']}"
        assert all(other["text"] == f" {other['id']}" for other in token["alternatives"])


def test_an_empty_sample_has_no_records(run):
    for settings in ({}, ROUTED):
        result = run.generate("abc", logprobs=4, max_new_tokens=0, **settings)
        document = trace_document(result, run.tokenizer)
        assert (document["tokens"], document["text"], document["finish_reason"]) == (
            [],
            "",
            "length",
        )
        assert '"samples":[' in report_page([document]) and len([*trace_lines([document])]) == 1
        assert any(line.startswith("0 tokens") for line in show_entropy([document], 80, "none"))
    with pytest.raises(ValueError, match=ERRORS["only_a_sample_with_log"]):
        trace_document(replace(result, tokens=[97], steps=None), run.tokenizer)


def test_the_calibration_is_read_if_requested(run):
    measured = {
        name: 1.5
        for name in (
            "low_entropy",
            "low_varentropy",
            "clarify_entropy",
            "high_entropy",
            "high_varentropy",
        )
    }
    measured |= {"entropy_scale": 2.0, "varentropy_scale": 4.0}
    asked = []
    own = LoadedModel(run.config, run.model, run.tokenizer, lambda: asked.append(1) or measured)
    own.generate("a", max_new_tokens=0, greedy=True)
    own.generate("a", max_new_tokens=0, strategy="entropy")
    assert not asked
    result = own.generate(
        "a", max_new_tokens=0, strategy="entropy", router_preset="calibrated", low_entropy=0.25
    )
    assert asked == [1]
    assert (
        result.router["low_entropy"],
        result.router["high_entropy"],
        result.router["varentropy_scale"],
    ) == (0.25, 1.5, 4.0)
    assert (result.router["temperature_min"], result.router["temperature_max"]) == (
        pytest.approx(0.1),
        2.0,
    )


def test_chain_and_router_form_separate_batches(run):
    requests = [
        ("a", {"greedy": True}),
        ("b", ROUTED | {"seed": 1}),
        ("c", ROUTED | {"seed": 1, "use_attention": False}),
    ]
    batches = run.start(
        [run.request(text, given | {"max_new_tokens": 3}) for text, given in requests]
    )
    assert [batch.numbers for batch in batches] == [[0], [1], [2]]
    assert len(jax.tree.leaves(batches[0].batch.params.router)) == 0


@pytest.mark.slow
def test_candidates_in_document_json_trace_and_page(run):
    result = run.generate(
        "abc",
        logprobs=2,
        show_candidates=True,
        seed=3,
        max_new_tokens=12,
        ignore_eos=True,
        **ROUTED,
    )
    plain = run.generate("abc", seed=3, max_new_tokens=12, ignore_eos=True, **ROUTED)
    assert result.tokens == plain.tokens
    document = trace_document(result, run.tokenizer)
    for token, listed, ids in zip(
        document["tokens"],
        result.info["candidates"],
        result.steps.routed.candidates.ids,
        strict=True,
    ):
        drawn = token["candidates"]
        assert len(drawn) == (12 if token["strategy"] == "adaptive" and not token["forced"] else 0)
        assert [one["id"] for one in drawn] == listed["ids"] == ids[: len(drawn)].tolist()
        assert [one["score"] for one in drawn] == listed["scores"]
        assert not drawn or max(drawn, key=lambda one: one["score"])["id"] == token["id"]
    assert {len(token["candidates"]) for token in document["tokens"]} == {0, 12}
    check_written_candidates(run, document)


def test_the_keys_of_the_watermark_are_not_reported(run):
    result = run.generate(
        "abc",
        logprobs=1,
        seed=3,
        max_new_tokens=0,
        watermark_keys=[77123],
        watermark_ngram=4,
        top_k=9,
    )
    document = trace_document(result, run.tokenizer)
    assert document["settings"] == {"top_k": 9, "watermark_ngram": 4} and "77123" not in json.dumps(
        document
    )
