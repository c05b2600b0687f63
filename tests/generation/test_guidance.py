"""Classifier-free guidance equals its formula in float64 on the logits of two prompts, offline and
in the engine.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from dantinox.config import Config, UserError, build_config, overlay
from dantinox.generation import generate, load
from dantinox.generation.api.generate_ids import _IdsModel
from dantinox.generation.decode.guidance import RowPairs
from dantinox.generation.engine import Engine
from dantinox.generation.guides.constraints import Constraint
from dantinox.generation.request import GenerationRequest

from . import builder

STEPS = 7
PROMPTS = builder.prompts(5, 9, 2, 12)
NEGATIVE = [3, 4, 5, 6]
TOLERANCE = 5 * builder.LOGPROB_TOLERANCE  # guide + scale · (main − guide), with scales up to 3


def test_rows_without_a_guide_keep_their_bits():
    random = np.random.default_rng(0)
    logits_BV = random.standard_normal((5, 90)).astype(np.float32) * 8
    pairs = RowPairs(
        np.array([0, 3, 2, 3, 4]),
        np.array([0, 1, 2, 1, 4]),
        np.array([7, 1.7, 1, 1, 1], np.float32),
    )
    out_BV = np.asarray(jax.jit(pairs.logits)(logits_BV))
    assert (np.delete(out_BV, 1, 0) == np.delete(logits_BV, 1, 0)).all()
    main_V, guide_V = builder.log_softmax(logits_BV[1]), builder.log_softmax(logits_BV[3])
    np.testing.assert_allclose(
        out_BV[1], guide_V + 1.7 * (main_V - guide_V), rtol=0, atol=TOLERANCE
    )


def test_an_offline_batch():
    """Rows differ in scale and negative prompt; samples of a prompt have guides of their own."""
    model = builder.model(builder.ONE_LAYER)
    run = _IdsModel(Config(), model, [], None, False)
    rows = [(1.5, None), (3.0, NEGATIVE), (0.4, PROMPTS[0])]
    settings = {"max_new_tokens": STEPS, "n": 2, "seed": 5, "temperature": 1.0}
    requests = [
        run.request(prompt, settings | {"guidance_scale": scale}, logprobs=1, negative_ids=negative)
        for prompt, (scale, negative) in zip(PROMPTS, rows, strict=False)
    ]
    results = run.complete(requests)
    for number, result in enumerate(results):
        prompt, (scale, negative) = PROMPTS[number // 2], rows[number // 2]
        tokens, logprobs = builder.guided_text(
            model, prompt, negative or prompt[-1:], scale, STEPS, 5, number % 2
        )
        assert result.tokens == tokens
        np.testing.assert_allclose(result.info["logprobs"], logprobs, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"use_cache": False}, {"kv_budget_tokens": 16, "kv_recent": 8}, {"strategy": "entropy"}],
)
def test_an_offline_batch_with_other_settings(settings):
    """Without a cache, tokens are those of the formula; with the router and other caches, rows do
    not depend on each other.
    """
    model = builder.model(builder.config(windows=(24, None)))
    options = {"guidance_scale": 2.0, "seed": 3, "negative_ids": NEGATIVE, **settings}
    prompts = builder.prompts(5, 40, 33)
    tokens, lengths = builder.padded(prompts)
    out = generate(model, tokens, STEPS, prompt_lengths=lengths, **options)
    for row, prompt in zip(out, prompts, strict=True):
        found = row[len(prompt) : len(prompt) + STEPS].tolist()
        assert found == generate(model, [prompt] * 2, STEPS, **options)[0, len(prompt) :].tolist()
        if "use_cache" in settings:
            assert found == builder.guided_text(model, prompt, NEGATIVE, 2.0, STEPS, 3)[0]


def check_logprobs(run, result, prompt, negative, scale):
    for i, logprob in enumerate(result.info["logprobs"]):
        expected = builder.guided_logprobs(run.model, prompt, negative, scale, result.tokens[:i])[
            result.tokens[i]
        ]
        np.testing.assert_allclose(logprob, expected, rtol=0, atol=TOLERANCE)


def test_a_restarted_row_keeps_its_guide():
    """Generation goes back to the first byte of a banned text. The guide row goes back too."""
    run = builder.circle()
    options = {
        "guidance_scale": 1.6,
        "negative_prompt": "c\nbb",
        "max_new_tokens": 14,
        "greedy": True,
        "logprobs": 0,
    }
    result = run.generate("😀", banned_strings=["aè"], **options)
    assert "aè" not in result.text and len(result.tokens) == 14
    check_logprobs(run, result, run.prompt_ids("😀"), run.prompt_ids("c\nbb"), 1.6)


@pytest.mark.slow
def test_a_constraint_masks_the_guided_logits(run_dir):
    pytest.importorskip("llguidance")
    run = load(run_dir)
    result = run.generate(
        "a",
        guidance_scale=2.5,
        constraint=Constraint("regex", "[x-z]{4}"),
        greedy=True,
        logprobs=0,
        max_new_tokens=9,
    )
    check_logprobs(run, result, run.prompt_ids("a"), run.prompt_ids("a")[-1:], 2.5)
    assert len(result.text) == 4 and set(result.text) <= set("xyz")


# --- the engine


@pytest.fixture(scope="module")
def engine():
    run = _IdsModel(build_config({"model": {"max_context": 64}}), builder.model(), [], None, False)
    with jax.default_matmul_precision("highest"):
        yield Engine(run, builder.make_slots(run, 5, 64), queue=20)


def request(engine, prompt, negative=None, **settings):
    config = overlay(engine.model.config, {"max_new_tokens": STEPS, "seed": 5} | settings)
    return GenerationRequest(tuple(prompt), config, 1, negative_ids=negative)


def answers(engine, requests, cancelled=()):
    """Returns per request and sample the tokens and the bits of their log-probabilities."""
    jobs = [engine.add(one) for one in requests]
    found = [[([], []) for _ in range(job.samples)] for job in jobs]
    for number in cancelled:
        engine.cancel(jobs[number])
    while engine.busy:
        for output in engine.step():
            assert output.error is None
            if output.ids:
                tokens, logprobs = found[jobs.index(output.job)][output.sample]
                tokens += output.ids
                logprobs += np.asarray(output.steps.logprob).tolist()
    assert engine.load.busy == 0, "slots of guides are not released"
    return found


@pytest.mark.slow
def test_requests_of_an_engine(engine):
    """A request has bitwise the same answers alone, from the prefix cache, and in a mixed batch;
    these follow the formula.
    """
    model = engine.model.model
    plain = request(engine, PROMPTS[1])
    one = request(engine, PROMPTS[0], guidance_scale=1.7)
    two = request(engine, PROMPTS[3], tuple(PROMPTS[1]), guidance_scale=3.0, n=2)
    alone = [answers(engine, [job])[0] for job in (plain, one, two)]
    assert [answers(engine, [job])[0] for job in (plain, one, two)] == alone
    assert answers(engine, [plain, one, plain, two, one]) == [
        alone[0],
        alone[1],
        alone[0],
        alone[2],
        alone[1],
    ]
    assert answers(engine, [two, plain, one, one], cancelled=[0, 2])[1::2] == [alone[0], alone[1]]
    assert answers(engine, [one, plain]) == [alone[1], alone[0]]
    off = request(engine, PROMPTS[1], guidance_scale=1.0)
    assert answers(engine, [off])[0] == alone[0]
    for found, prompt, negative, scale in (
        (alone[1], PROMPTS[0], PROMPTS[0][-1:], 1.7),
        (alone[2], PROMPTS[3], PROMPTS[1], 3.0),
    ):
        for sample, (tokens, logprobs) in enumerate(found):
            expected = builder.guided_text(model, prompt, negative, scale, STEPS, 5, sample)
            assert tokens == expected[0]
            np.testing.assert_allclose(logprobs, expected[1], rtol=0, atol=TOLERANCE)


def test_requests_that_do_not_fit_an_engine(engine):
    with pytest.raises(
        UserError,
        match=r"generation\.n is 3, which needs 6 slots with these settings, but this server has 5",
    ):
        engine.add(request(engine, [1], guidance_scale=2, n=3))
    with pytest.raises(UserError, match="negative_prompt has 64 tokens and must have from 1 to 63"):
        engine.add(request(engine, [1], (1,) * 64, guidance_scale=2))
    with pytest.raises(UserError, match=r"tokens of the prompt must be in \[0, 67\), got 99"):
        engine.add(request(engine, [1], (99,), guidance_scale=2))
    assert not engine.busy and engine.load.busy == 0


@pytest.mark.slow
def test_random_requests_of_an_engine(engine):
    """Guided and other requests with random limits, cancelled at random, never change each other's
    answers.
    """
    random = np.random.default_rng(0)
    alone: dict = {}

    def draw():
        number, scale = int(random.integers(4)), float(random.choice([1.0, 1.5, 4.0]))
        steps, n, end = (
            int(random.integers(1, 20)),
            int(random.integers(1, 3)),
            int(random.integers(67)),
        )
        key = number, scale, steps, n, end
        one = request(
            engine,
            PROMPTS[number],
            guidance_scale=scale,
            max_new_tokens=steps,
            n=n,
            stop_token_ids=[end, 22],
            ignore_eos=False,
        )
        if key not in alone:
            alone[key] = answers(engine, [one])[0]
        return key, one

    for _ in range(12):
        keys, requests = zip(*(draw() for _ in range(9)), strict=True)
        cancelled = set(random.choice(9, 2, replace=False).tolist())
        found = answers(engine, requests, cancelled)
        assert all(found[i] == alone[key] for i, key in enumerate(keys) if i not in cancelled)


REFUSED = {
    "a negative prompt alone": (
        {"negative_prompt": "a"},
        "generation.negative_prompt has no effect while",
    ),
    "beams": (
        {"guidance_scale": 2, "num_beams": 2},
        "generation.guidance_scale must be 1 with generation.num_beams, got 2",
    ),
    "drafts": (
        {"guidance_scale": 2, "speculation": "ngram"},
        "generation.speculation must be off with generation.guidance_scale, got ngram",
    ),
    "a negative scale": (
        {"guidance_scale": -1},
        "generation.guidance_scale must be a number in [0, 100], got -1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_contradict_guidance_are_refused(name):
    settings, words = REFUSED[name]
    with pytest.raises(UserError) as error:
        overlay(Config(), settings)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_guidance_replaces_the_drafts_of_a_run():
    base = overlay(Config(), {"speculation": "ngram", "draft_tokens": 3})
    assert overlay(base, {"guidance_scale": 2}).generation.speculation == "off"


def test_negative_ids_need_guidance():
    run = _IdsModel(Config(), builder.model(), [], None, False)
    for settings in ({}, {"guidance_scale": 2, "negative_prompt": "a"}):
        with pytest.raises(
            UserError, match=r"negative_ids need a generation\.guidance_scale other than 1"
        ):
            run.request([1], settings, negative_ids=[2])
    one = replace(run.request([1, 5], {"guidance_scale": 2}), negative_ids=None)
    assert run.prompts(one, 64) == [(1, 5), (5,)]
