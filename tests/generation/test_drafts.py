"""Speculative decoding: the drafts, and texts that are equal with and without drafts."""

import random
import re
from functools import cache
from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

from dantinox.config import TokenizerSection, UserError, build_config
from dantinox.generation import LoadedModel, generate
from dantinox.generation.decode.cache_plan import CachePlan
from dantinox.generation.decode.drafts import (
    FIRST_GAIN,
    MAX_BACKOFF,
    DraftStepper,
    draft_lengths,
    init_drafts,
    ngram_drafts,
    pays_off,
    plan_drafts,
    record,
)
from dantinox.generation.decode.generate_toks import Stepper, _generate_toks
from dantinox.generation.decode.prepared_model import prepare
from dantinox.generation.decode.split_model import split_model
from dantinox.generation.engine import Engine
from dantinox.generation.guides.constraints import Constraint
from dantinox.generation.request import GenerationRequest
from dantinox.generation.static_batch import StaticBatch, StaticOptions
from dantinox.model import make_cache
from dantinox.programs import tree_bytes
from dantinox.sampling import SamplingParams
from dantinox.text import train_tokenizer
from tests.error_texts import ERRORS

from . import builder
from .builder import BYTES

CONTEXT = 160


class DraftCounts(NamedTuple):
    """The number of draft tokens of a row that were verified, and of those that were accepted."""

    draft_tokens: int
    accepted_draft_tokens: int


# Steps that read the history, steps that filter, and steps with a state of their own.
SETTINGS = {
    "greedy": {"greedy": True},
    "drawn": {"temperature": 0.3, "seed": 5},
    "filters": {"temperature": 0.8, "top_k": 7, "top_p": 0.9, "min_p": 0.02, "typical": 0.9,
                "seed": 6},
    "penalties": {
        "temperature": 0.3, "repetition_penalty": 1.05, "presence_penalty": 0.05,
        "dry_multiplier": 0.2, "dry_breakers": [1], "no_repeat_ngram": 9, "seed": 7,
    },
    "mirostat": {"mirostat": 2, "mirostat_tau": 2.0, "seed": 8},
    "xtc": {"temperature": 0.5, "xtc_probability": 0.5, "min_tokens": 9, "seed": 9},
    "adaptive-p": {"adaptive_target": 0.3, "min_p": 0.02, "watermark_keys": [5, 6, 7],
                   "watermark_ngram": 3, "seed": 10},
    "router": {"strategy": "entropy", "use_attention": True, "seed": 10},
}  # fmt: skip
# Settings that few sampling steps serve: without and with a random draw, with a state of its own,
# and with one token only.
FEW = [
    {"greedy": True},
    {"temperature": 0.3, "seed": 5},
    {"mirostat": 2, "mirostat_tau": 2.0, "seed": 8},
    {"greedy": True, "allowed_tokens": [5]},
]
SERVED = [*FEW[:3], {"temperature": 0.3, "repetition_penalty": 1.05, "seed": 7}]
WINDOWS = {"full": (None, None), "sliding": (6, 2)}
ONE_RING = builder.config(windows=(6,))


def expected_draft(text, size, count):
    """Searches the newest match from the end, and repeats the text after it."""
    end = next(
        (
            end
            for end in range(len(text) - 2, size - 2, -1)
            if text[end - size + 1 : end + 1] == text[-size:]
        ),
        None,
    )
    if end is None or len(text) <= size:
        return None
    after = text[end + 1 :]
    return [after[i % len(after)] for i in range(count)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_newest_match_gives_the_draft(size):
    rows = [[random.Random(seed).randrange(3) for _ in range(1 + seed)] for seed in range(24)]
    tokens = np.full((24, 40), 2)
    for row, text in zip(tokens, rows, strict=True):
        row[: len(text)] = text
    find = jax.jit(ngram_drafts, static_argnames=("size", "count"))
    found, matched_B = find(tokens, np.array([len(text) - 1 for text in rows]), size=size, count=4)
    expected = [expected_draft(text, size, 4) for text in rows]
    assert (
        matched_B.tolist() == [draft is not None for draft in expected]
        and 5 < sum(matched_B.tolist()) < 24
    )
    assert all(
        draft is None or draft == row for draft, row in zip(expected, found.tolist(), strict=True)
    )


def test_failing_drafts_become_rare():
    """Two thousand tokens with a draft at every position, of which none is accepted."""
    plan, one = DraftStepper(4, 3, 1.5), np.ones(1, np.int32)

    @jax.jit
    def fail(drafts):
        def step(_, carry):
            drafts, verified = carry
            length_B = draft_lengths(drafts, one > 0, 99 * one, one < 0)
            length_B *= pays_off(plan.cost, drafts, length_B, one < 0)
            return record(plan.cost, drafts, length_B, one), verified + (length_B[0] > 0)

        return jax.lax.fori_loop(0, 2000, step, (drafts, 0))

    drafts, verified = fail(init_drafts(4 * one, one))
    assert 0 < verified * (plan.cost - 1) < 0.03 * 2000
    assert int(drafts.backoff_B[0]) == MAX_BACKOFF and int(drafts.drafted_B[0]) == 4 * verified
    accept = jax.jit(lambda drafts: record(plan.cost, drafts, 4 * one, 5 * one))
    for _ in range(3):  # accepted drafts end the waiting
        drafts = accept(drafts)
    assert int(drafts.wait_B[0]) == 0 and float(drafts.gain_B[0]) > FIRST_GAIN
    assert int(drafts.accepted_B[0]) == 12


def test_a_batch_verifies_only_if_enough_rows_have_drafts():
    plan, eight = DraftStepper(4, 3, 2.2), np.ones(8, np.int32)
    drafts = init_drafts(4 * eight, eight)
    length_RB = np.where(np.arange(8) < np.arange(9)[:, None], 4, 0)
    verifies_R = jax.jit(
        jax.vmap(lambda length_B: pays_off(plan.cost, drafts, length_B, eight < 0))
    )(length_RB)
    assert verifies_R.tolist() == [rows * FIRST_GAIN >= 1.2 * 8 for rows in range(9)]
    lengths_B = jax.jit(draft_lengths)(drafts, eight > 0, 3 * eight, np.arange(8) > 5)
    assert lengths_B.tolist() == [2] * 6 + [0] * 2


def continued(model, prompts, settings, plan, report=None, draft_model=None):
    """Returns the continuations, their reports, and the batch; different rows have different seeds.

    The settings are those of all rows, or a list with those of each row.
    """
    settings = settings if isinstance(settings, list) else [settings] * len(prompts)
    rows = [own | {"seed": own.get("seed", 0) + row} for row, own in enumerate(settings)]
    tokens, lengths = builder.padded(prompts)
    params = SamplingParams.build(rows, vocab_size=builder.V)
    limits = np.array([40, 23, 40, 31, 40, 27, 40])[: len(prompts)]
    batch = StaticBatch(
        model,
        tokens,
        lengths,
        params,
        limits_B=limits,
        eos_ids=[[11]] * len(prompts),
        options=StaticOptions(
            stepper=plan or Stepper(),
            report=report,
            constants={} if draft_model is None else {"draft_model": split_model(draft_model)},
        ),
    )
    found, reports = [[] for _ in prompts], [[] for _ in prompts]
    for chunk in batch.run(7):
        for row, count in enumerate(chunk.counts):
            found[row] += chunk.tokens[row, :count].tolist()
            reports[row].append(
                jax.tree.map(lambda x, row=row, count=count: x[row, :count], chunk.info)
            )
    return (
        found,
        [jax.tree.map(lambda *parts: np.concatenate(parts), *parts) for parts in reports],
        batch,
    )


# One row for each of the settings, so that few programs are compiled: with the router, without it,
# and with some of the steps.
MIXED = [SETTINGS[name] for name in SETTINGS if name != "router"]
SOME = [SETTINGS[name] for name in ("greedy", "penalties", "xtc", "mirostat")]
PROMPTS = (builder.prompts(3)[0] * 3, *builder.prompts(5, 9, 2))  # the first one repeats itself
FEW_PROMPTS = (*PROMPTS[:3], *builder.prompts(4))


@cache
def few_without_drafts():
    return continued(builder.model(ONE_RING), FEW_PROMPTS, FEW, None, report=0)


def compare(drafted, plain, rtol=2e-4):
    """Compares tokens and reports with and without drafts; returns the numbers of drafted and
    accepted tokens of each row.
    """
    (tokens, reports, batch), (expected, expected_reports, _) = drafted, plain
    assert tokens == expected and min(map(len, expected)) > 1
    atol = builder.LOGPROB_TOLERANCE
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol),
        reports,
        expected_reports,
    )
    return [DraftCounts(**batch.counts(row)) for row in range(len(tokens))]


@pytest.mark.slow
def test_drafts_do_not_change_tokens_and_reports():
    """The last row may have only one token, so after the first match every step generates five
    tokens.
    """
    model, plan = builder.model(ONE_RING), DraftStepper(4, 1, 1.0)
    *drafts, periodic = compare(
        continued(model, FEW_PROMPTS, FEW, plan, report=0), few_without_drafts()
    )
    assert (
        sum(one.draft_tokens for one in drafts)
        > sum(one.accepted_draft_tokens for one in drafts)
        > 0
    )
    assert (
        few_without_drafts()[0][-1] == [5] * 31
        and periodic.draft_tokens == periodic.accepted_draft_tokens > 20
    )


DRAFT_MODEL_PLAN = DraftStepper(3, None, 1.0, CachePlan(64, "float32", extra=3))


def test_drafts_of_a_model_do_not_change_tokens_and_reports():
    other = builder.model(builder.config(windows=(5,)), 1)
    drafted = continued(
        builder.model(ONE_RING), FEW_PROMPTS, FEW, DRAFT_MODEL_PLAN, report=0, draft_model=other
    )
    drafts = compare(drafted, few_without_drafts())
    assert (
        sum(one.draft_tokens for one in drafts)
        > sum(one.accepted_draft_tokens for one in drafts)
        > 0
    )


def compare_windows(settings, windows, prompts=PROMPTS, **tolerance):
    model = builder.model(builder.config(windows=WINDOWS[windows]))
    plain = continued(model, prompts, settings, None, report=3)
    drafts = compare(
        continued(model, prompts, settings, DraftStepper(4, 1, 1.0), report=3), plain, **tolerance
    )
    assert (
        sum(one.draft_tokens for one in drafts)
        > sum(one.accepted_draft_tokens for one in drafts)
        > 0
    )


@pytest.mark.slow
def test_drafts_do_not_change_tokens_and_reports_of_different_rows():
    compare_windows(MIXED, "full", (*PROMPTS, *builder.prompts(4, 6, 3, seed=2)), rtol=1e-3)


@pytest.mark.slow
def test_drafts_do_not_change_tokens_and_reports_with_sliding_windows():
    compare_windows(SOME, "sliding")


@pytest.mark.slow
@pytest.mark.parametrize("windows", ["full", "sliding"])
def test_drafts_do_not_change_tokens_and_reports_with_the_router(windows):
    compare_windows(SETTINGS["router"], windows)


@pytest.mark.slow
@pytest.mark.parametrize("windows", ["full", "sliding"])
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "router"])
def test_drafts_do_not_change_tokens_and_reports_of_equal_rows(name, windows):
    """The logits of adaptive-p change faster than the probabilities: a larger `rtol`."""
    compare_windows(SETTINGS[name], windows, rtol=1e-3 if name == "adaptive-p" else 2e-4)


DRAFT_MODEL_PROMPTS = builder.prompts(3, 5, 9, 2)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SOME, SETTINGS["router"]], ids=["chain", "router"])
def test_drafts_of_a_model_do_not_change_tokens_with_all_kinds_of_steps(settings):
    model, other = builder.model(), builder.model(builder.config(windows=(5,)), 1)
    plain, _, _ = continued(model, DRAFT_MODEL_PROMPTS, settings, None)
    tokens, _, batch = continued(
        model, DRAFT_MODEL_PROMPTS, settings, DRAFT_MODEL_PLAN, draft_model=other
    )
    assert (
        tokens == plain and sum(batch.counts(row)["draft_tokens"] for row in range(len(tokens))) > 0
    )


@pytest.mark.slow
def test_a_model_accepts_its_own_drafts():
    """The draft model is the model itself, so it draws the same tokens: the caches hold the same
    text after every step.
    """
    model = builder.model()
    plain, _, _ = continued(model, DRAFT_MODEL_PROMPTS, SOME, None)
    tokens, _, batch = continued(
        model, DRAFT_MODEL_PROMPTS, SOME, DRAFT_MODEL_PLAN, draft_model=model
    )
    drafts = [DraftCounts(**batch.counts(row)) for row in range(len(tokens))]
    assert tokens == plain and all(
        one.draft_tokens == one.accepted_draft_tokens > 0 for one in drafts
    )
    assert sum(one.accepted_draft_tokens for one in drafts) > 60


@pytest.mark.slow
def test_the_cache_is_not_copied(optimized):
    model, rows = builder.model(builder.config(windows=(None, 512), max_context=4096)), 2
    params = SamplingParams.build({"greedy": True}, batch=rows)
    batch = StaticBatch(
        model, np.ones((rows, 5), np.int32), np.full(rows, 5), params, limits_B=np.full(rows, 9),
        eos_ids=[[]] * rows,
        options=StaticOptions(stepper=DraftStepper(3, 2, 1.5)),
    )  # fmt: skip
    cache = jax.eval_shape(lambda: make_cache(model.config, rows, 2048, model.dtype, extra=3))
    program = _generate_toks.lower(
        model, (cache,), batch.state, params, np.int32(32), **batch._options
    )
    compiled = optimized(program)
    assert compiled.memory_analysis().alias_size_in_bytes >= tree_bytes(cache)
    shapes = {str([*leaf.shape]).replace(" ", "") for leaf in jax.tree.leaves(cache)}
    copied = set(re.findall(r"= f32(\[[\d,]+\])\S* copy\(", compiled.as_text()))
    assert len(shapes) == 4 and not shapes & copied


def test_generate_with_drafts():
    model, prompt = builder.model(builder.ONE_LAYER), builder.prompts(4)[0] * 3
    tokens = generate(model, [prompt], 30, n=2, speculation="ngram", ngram_size=2, greedy=True)
    assert tokens[:, 12:].tolist() == [builder.slowly(model, prompt, 30, greedy=True)] * 2


def loaded(seed=0, context=CONTEXT, tokenizer=BYTES, **options):
    config = build_config({"model": {"max_context": context}})
    model = builder.model(
        builder.config(vocab_size=BYTES.vocab_size, max_context=context, windows=(None,)), seed
    )
    return LoadedModel(config, model, tokenizer, **options)


DRAFT_RUN = {"speculation": "draft", "draft_run": "runs/small"}


def test_the_draft_model_must_fit_the_model():
    """Same tokenizer, and a context that is at least as long; `draft` needs a run, and a run needs
    `draft`.
    """
    run = loaded(load_run=lambda path: loaded(1))
    assert run.draft_model(run.settings({}).generation) is None
    section = run.settings(DRAFT_RUN).generation
    assert run.draft_model(section) is not None
    chars = train_tokenizer(TokenizerSection(tokenizer_type="char"), lambda: iter(["abc"]))
    for options, error in (
        ({"tokenizer": chars}, "draft_run_tokenizer"),
        ({"context": 64}, "draft_run_context"),
    ):
        with pytest.raises(UserError, match=ERRORS[error]):
            loaded(load_run=lambda path, options=options: loaded(1, **options)).draft_model(section)
    with pytest.raises(UserError, match=ERRORS["draft_needs_a_run_directory"]):
        loaded().draft_model(section)
    with pytest.raises(UserError, match=ERRORS["draft_needs_draft_run"]):
        run.settings({"speculation": "draft"})
    with pytest.raises(UserError, match=ERRORS["draft_run_has_no_effect"]):
        run.settings({"draft_run": "runs/small"})


def test_the_plan_follows_settings_and_model():
    model, run = builder.model(), loaded()
    assert plan_drafts(run.config, model, 1, 64) is None
    config = run.settings({"speculation": "ngram", "draft_tokens": 6})
    one, eight = (plan_drafts(config, model, rows, 64) for rows in (1, 8))
    assert one.draft_tokens == 6 and one.width == 7 and 1 < one.cost < eight.cost
    with pytest.warns(UserWarning, match=ERRORS["speculation_is_off_matvec"]):
        assert (
            plan_drafts(config, nnx.eval_shape(lambda: prepare(model, "int8", "float32")), 1, 64)
            is None
        )


@pytest.mark.parametrize(
    "settings", [{"kv_budget": 0.5}, {"kv_budget_tokens": 64}, {"use_cache": False}]
)
def test_drafts_need_a_full_cache(settings):
    with pytest.raises(UserError, match=ERRORS["generation_speculation_has_no_effect"]):
        loaded().settings({"speculation": "ngram"} | settings)


def run_requests(engine, settings, requests):
    """Returns the tokens and finish reasons, the log-probabilities, and the job of each request."""
    run = engine.model
    jobs = [
        engine.add(
            GenerationRequest(
                tuple(ids), run.settings(own | settings), logprobs, constraint=constraint
            )
        )
        for ids, own, logprobs, constraint in requests
    ]
    reports = {}
    while engine.busy:
        for output in engine.step():
            if output.steps is not None:
                reports.setdefault(output.job, []).extend(np.asarray(output.steps.logprob).tolist())
    found = [(*((text.tokens, text.finish_reason) for text in job.texts),) for job in jobs]
    return found, [reports.get(job, []) for job in jobs], jobs


def make_requests(choices, count):
    """Returns requests, among them constrained rows, requests with two samples, and prompts that
    begin in the same way.
    """
    run, source = loaded(), random.Random(3)
    found = []
    for number in range(count):
        settings = choices[number % len(choices)] | {
            "seed": number,
            "max_new_tokens": source.choice([9, 25, 40]),
        }
        settings |= {"stop": ["e"]} if number % 5 == 4 else {"n": 2} if number % 7 == 6 else {}
        ids = run.prompt_ids(source.choice(["ab", "once "]) * source.randrange(1, 22))
        constraint = Constraint("regex", "[a-f ]{2,30}") if number % 6 == 1 else None
        found.append((ids, settings, source.choice([None, 3]), constraint))
    return found


def check_drafts(requests, plain, drafted, engine):
    (expected, expected_reports, _), (found, reports, jobs) = plain, drafted
    assert found == expected
    for report, other in zip(reports, expected_reports, strict=True):
        np.testing.assert_allclose(report, other, rtol=2e-4, atol=builder.LOGPROB_TOLERANCE)
    drafted, accepted = (
        sum(job.stats.counts[name] for job in jobs)
        for name in ("draft_tokens", "accepted_draft_tokens")
    )
    assert drafted >= accepted > 0 and any(job.stats.reused_tokens for job in jobs)
    assert (engine.counters["draft_tokens"], engine.counters["accepted_draft_tokens"]) == (
        drafted,
        accepted,
    )
    for job, (*_, constraint) in zip(jobs, requests, strict=True):
        assert constraint is None or job.stats.counts["draft_tokens"] == 0


def test_requests_of_a_server_have_the_same_tokens_with_and_without_drafts(monkeypatch):
    """The requests run in three slots and reuse prefixes. Texts without a constraint are those of
    the reference, too.
    """
    pytest.importorskip("llguidance")
    # Drafts of so small a model would not pay off, so they are made free.
    monkeypatch.setattr("dantinox.generation.decode.drafts.verification_cost", lambda *_: -8.0)
    run, requests = loaded(), make_requests(SERVED, 12)
    ngram = {"draft_tokens": 3, "speculation": "ngram", "ngram_size": 1}
    slots = builder.make_slots(run, 3, CONTEXT, run.settings(ngram))
    with builder.few_steps():
        slots.compile(run.settings(ngram))
    engine = Engine(run, slots, queue=99)
    plain = run_requests(engine, {}, requests)
    assert engine.counters["draft_tokens"] == 0
    check_drafts(requests, plain, run_requests(engine, ngram, requests), engine)
    for number in (0, 5):
        ids, settings, _, _ = requests[number]
        steps, ends = settings.pop("max_new_tokens"), run.tokenizer.stop_ids
        assert plain[0][number][0][0] == builder.slowly(
            run.model, ids, steps, eos_ids=ends, **settings
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "speculation",
    [{"speculation": "ngram", "ngram_size": 1}, DRAFT_RUN],
    ids=lambda settings: settings["speculation"],
)
def test_requests_of_a_server_with_all_kinds_of_steps(speculation, monkeypatch):
    """The draft model is a copy of the model."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr("dantinox.generation.decode.drafts.verification_cost", lambda *_: -8.0)
    run, requests = loaded(load_run=lambda path: loaded()), make_requests(MIXED, 20)
    settings = {"draft_tokens": 3} | speculation
    plain_engine, engine = (
        Engine(run, builder.make_slots(run, 3, CONTEXT, run.settings(own)), queue=99)
        for own in ({}, settings)
    )
    check_drafts(
        requests,
        run_requests(plain_engine, {}, requests),
        run_requests(engine, settings, requests),
        engine,
    )


def test_a_request_may_have_fewer_drafts_than_the_server():
    run = loaded()
    slots = builder.make_slots(
        run, 2, CONTEXT, run.settings({"speculation": "ngram", "draft_tokens": 4})
    )
    key = slots.program_key
    assert slots.row_params(run.settings({"speculation": "ngram", "draft_tokens": 2})).width == 3
    assert slots.row_params(run.settings({"speculation": "off"})).width == 1
    errors = {5: "most_drafts_in_this_server", 4: "ngram_size_in_this_server"}
    for settings, error in (
        ({"draft_tokens": 5}, errors[5]),
        ({"draft_tokens": 4, "ngram_size": 2}, errors[4]),
    ):
        with pytest.raises(UserError, match=ERRORS[error]):
            key(run.settings({"speculation": "ngram"} | settings))
    with pytest.raises(UserError, match=ERRORS["speculation_in_this_server"]):
        builder.make_slots(run, 2, CONTEXT).program_key(run.settings({"speculation": "ngram"}))
