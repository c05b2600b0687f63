"""Tests guides: constraints after a trigger and budgets of reasoning, with restarts that no chunk
length can be seen in.
"""

import re
import string
from dataclasses import replace

import numpy as np
import pytest

from dantinox.config import UserError
from dantinox.generation.engine import Engine
from dantinox.generation.guides.constraints import Constraint, ConstraintCompiler
from dantinox.generation.guides.guide import (
    KEEP,
    RESTART_AFTER,
    RESTART_BEFORE,
    AfterTrigger,
    Gap,
    Reasoning,
    ReasoningBudget,
)
from dantinox.generation.guides.token_masks import allows, combine_masks, mask_of, mask_without
from dantinox.generation.request import GenerationRequest

from . import builder
from .builder import BYTES

V = BYTES.vocab_size
DIGITS = Constraint("regex", "[0-9]{3}", after=("ab", "c"), repeats=True)
THINK = Reasoning("<t>", "</t>", False)


@pytest.fixture(scope="module")
def compiler():
    return ConstraintCompiler(BYTES)


def push_text(guide, text):
    """Pushes a text byte by byte; returns the verdicts that are not KEEP, with the number of bytes
    before them.
    """
    found = []
    for number, token in enumerate(text.encode()):
        mask = guide.mask()
        assert mask is None or mask[token // 32] >> np.uint32(token % 32) & 1
        if (verdict := guide.push(token, chr(token))) is not KEEP:
            found.append((number, verdict))
    return found


def allowed(guide):
    mask = guide.mask()
    return (
        None
        if mask is None
        else {token for token in range(V) if mask[token // 32] >> np.uint32(token % 32) & 1}
    )


def test_a_constraint_begins_after_its_trigger_and_ends(compiler):
    guide = AfterTrigger(compiler.matcher("regex", "[0-9]{3}"), DIGITS, V)
    assert push_text(guide, "xaab") == [(3, RESTART_AFTER)]
    assert allowed(guide) == set(b"0123456789")
    assert (
        push_text(guide, "123") == [(2, RESTART_AFTER)]
        and allowed(guide) is None
        and not guide.done
    )
    assert push_text(guide, "b c") == [(2, RESTART_AFTER)] and allowed(guide) == set(b"0123456789")
    once = AfterTrigger(
        compiler.matcher("regex", "[0-9]{3}"), Constraint("regex", "[0-9]{3}", after=("c",)), V
    )
    push_text(once, "c123")
    assert once.done


def test_a_trigger_inside_of_a_token(compiler):
    guide = AfterTrigger(compiler.matcher("regex", "[0-9]{3}"), DIGITS, V)
    assert guide.push(200, "xc12") is RESTART_AFTER and allowed(guide) == set(b"0123456789")
    guide.push(ord("3"), "3")
    assert guide.push(200, "ca") is RESTART_BEFORE and allowed(guide) == set(range(V)) - {200}
    assert guide.push(201, "cb") is RESTART_BEFORE and allowed(guide) == set(range(V)) - {200, 201}
    assert guide.push(ord("c"), "c") is RESTART_AFTER and allowed(guide) == set(b"0123456789")


def test_a_trigger_inside_of_the_reasoning_does_not_count(compiler):
    def guide(after, is_open=False):
        constraint = Constraint("regex", "[0-9]", after=after, opening="[", repeats=True)
        return AfterTrigger(
            compiler.matcher("regex", r"\[?[0-9]"), constraint, V, THINK._replace(is_open=is_open)
        )

    assert push_text(guide(("c",)), "<t>ccc</t> x c")[-1] == (13, RESTART_AFTER)
    assert push_text(guide(("c",), True), "[c</t>\n[")[-1] == (7, RESTART_AFTER)
    assert push_text(guide(("</t>",), True), "c<t></t>")[-1] == (7, RESTART_AFTER)


def test_the_reasoning_budget_forces_the_end():
    closing = tuple(b"!</t>")
    for is_open, text in ((True, "12345"), (False, "x<t>12345")):
        guide = ReasoningBudget(THINK._replace(is_open=is_open, closing=closing), 5, V)
        (found,) = push_text(guide, text)
        assert found == (len(text) - 1, RESTART_AFTER)
        for token in closing:
            assert allowed(guide) == {token}
            verdict = guide.push(token, chr(token))
        assert (
            verdict is RESTART_AFTER
            and allowed(guide) is None
            and push_text(guide, "1234567890") == []
        )
    short = ReasoningBudget(THINK._replace(is_open=True, closing=closing), 5, V)
    assert push_text(short, "12</t>1234567890") == []
    immediate = ReasoningBudget(THINK._replace(is_open=True, closing=closing), 0, V)
    assert allowed(immediate) == {closing[0]}


def test_a_constraint_allows_the_text_that_the_budget_forces_before_it(compiler):
    """Without the gap, the end of the closing text and the constraint together would allow no
    token.
    """
    reasoning, constraint = (
        THINK._replace(is_open=True),
        Constraint("regex", "[0-9]{3}", after=("</t>",)),
    )
    gap = Gap("\n\n", ((ord("\n"), "\n"),))

    def guide():
        return AfterTrigger(compiler.matcher("regex", "[0-9]{3}"), constraint, V, reasoning, gap)

    for text in ("</t>\n\n", "</t>\n", "</t>"):
        one = guide()
        assert push_text(one, text) == [(3, RESTART_AFTER)]
        assert allowed(one) == set(b"0123456789" + b"\n" * (len(text) < 6))
        assert push_text(one.copy(), "123") == push_text(one, "123") and one.done
    for text, left in ((">\n\n", ""), (">\n", "\n"), (">\n\n1", "")):
        one = guide()
        push_text(one, "</t")
        assert one.push(300, text) is RESTART_AFTER and allowed(one) == set(b"0123456789") | set(
            left.encode()
        )


def test_masks_of_tokens():
    only = mask_of([0, 31, 33], 40)
    assert only.tolist() == [1 + 2**31, 2]
    assert mask_without({0, 31, 33}, 40).tolist() == [2**31 - 2, 2**32 - 3]
    assert [token for token in range(40) if allows(only, token)] == [0, 31, 33]


def test_masks_combine():
    assert combine_masks([None, None]) is None
    assert combine_masks([None, np.uint32([6]), np.uint32([3])]).tolist() == [2]
    with pytest.raises(UserError, match="together allow no token"):
        combine_masks([np.uint32([6]), np.uint32([1])])


# --- in the engine

SETTINGS = (
    {"temperature": 1.0},
    {"temperature": 1.2, "mirostat": 2, "mirostat_tau": 4.0},
    {"repetition_penalty": 1.2, "repetition_scope": "output", "top_k": 60},
)
MORE_SETTINGS = (
    {"adaptive_target": 0.4, "min_p": 0.02, "encoder_repetition_penalty": 1.2},
    {
        "dry_multiplier": 0.8,
        "repetition_penalty": 1.2,
        "repetition_scope": "output",
        "presence_penalty": 0.4,
    },
    {
        "no_repeat_ngram": 3,
        "frequency_penalty": 0.2,
        "presence_scope": "output",
        "xtc_probability": 0.5,
    },
)
TRIGGERS = string.ascii_letters + "!#$%&()*+,-./"
TRIGGERED = Constraint("regex", "<[0-9]{5}>", after=tuple(TRIGGERS), repeats=True)
BUDGET = Reasoning("(", "=", True, 21, tuple(b"=end"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(((16, None), "few", SETTINGS), id="ring and full"),
        pytest.param(
            ((None, None), "all", SETTINGS[:2] + MORE_SETTINGS),
            id="full, all steps",
            marks=pytest.mark.slow,
        ),
    ],
)
def served(request):
    windows, steps, settings = request.param
    return *builder.slot_batch(windows, steps), settings


def requests_of(run, settings):
    prompts = ("once upon", "x", "there was a fox")
    configs = [
        run.settings({"seed": seed, "max_new_tokens": 60, **own})
        for seed, own in enumerate(settings * 2)
    ]
    return [
        GenerationRequest(
            tuple(prompts[i % 3].encode()),
            config,
            None,
            False,
            *((TRIGGERED, None) if i % 2 else (None, BUDGET)),
        )
        for i, config in enumerate(configs)
    ] + [GenerationRequest(tuple(b"free"), configs[0])]


def run_engine(run, slots, requests, **options):
    """Returns the tokens and the text of each request."""
    slots.reset()
    engine = Engine(run, slots, queue=100, **options)
    jobs = [engine.add(request) for request in requests]
    texts = dict.fromkeys(jobs, "")
    while engine.busy:
        for output in engine.step():
            assert output.error is None
            texts[output.job] += output.text
    return [(job.texts[0].tokens, texts[job]) for job in jobs]


@pytest.mark.slow
def test_results_do_not_depend_on_chunks_or_neighbours(served):
    run, slots, settings = served
    requests = requests_of(run, settings)
    one_by_one = [
        run_engine(run, slots, [request], chunk_seconds=None, max_steps=1, dispatch_ahead=False)[0]
        for request in requests
    ]
    for options in ({"max_steps": 32}, {"max_steps": 5, "dispatch_ahead": False}):
        assert run_engine(run, slots, requests, chunk_seconds=None, **options) == one_by_one
    applied = 0
    for request, (tokens, text) in zip(requests, one_by_one, strict=True):
        assert len(tokens) == 60 or tokens[-1] in BYTES.stop_ids
        if request.constraint is not None:
            one = f"[{re.escape(TRIGGERS)}]"
            calls = re.sub(rf"{one}<\d{{5}}>", "", text)
            assert not re.search(one, re.sub(rf"{one}(<[0-9]{{0,5}})?$", "", calls)), text
            applied += len(text) - len(calls) > 0
        if request.reasoning is not None:
            assert ord("=") in tokens[:22] or len(tokens) < 22
    assert applied >= 2


def test_a_constrained_answer_after_a_used_up_budget(served):
    run, slots, _ = served
    constraint = Constraint("regex", "[0-9]{5}", after=("</t>",))
    reasoning = Reasoning("<t>", "</t>", True, 4, tuple(b"\n</t>\n\n"))
    request = GenerationRequest(
        tuple(b"x"), run.settings({"seed": 1}), None, False, constraint, reasoning
    )
    ((_, text),) = run_engine(run, slots, [request])
    assert re.fullmatch(r"(?s).{,4}\n</t>\n\n\d{5}", text)
    banned = GenerationRequest(
        request.ids, run.settings({"banned_strings": ["\n"]}), None, False, constraint, reasoning
    )
    engine = Engine(run, slots)
    engine.add(banned)
    errors = []
    while engine.busy:
        errors += [output.error for output in engine.step() if output.error]
    assert [type(error) for error in errors] == [UserError]


def test_offline_generation_has_the_same_guides(served):
    """Two rows of one batch have different guides. Each has the tokens of the engine."""
    run, slots, settings = served
    requests = [
        replace(request, config=run.settings({"seed": 3, "max_new_tokens": 60}), logprobs=0)
        for request in requests_of(run, settings)[:2]
    ]
    results = run.complete(requests)
    assert [result.tokens for result in results] == [
        tokens for tokens, _ in run_engine(run, slots, requests)
    ]
    assert ord("=") in results[0].tokens[:22]
    assert re.search(rf"[{re.escape(TRIGGERS)}]<\d{{5}}>", results[1].text)
