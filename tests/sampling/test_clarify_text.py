"""The clarify text is inserted where a simulation in Python inserts it, and a program without it is
unchanged.
"""

from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dantinox.config import UserError, build_config
from dantinox.config.router_settings import RouterSection, router_conflicts
from dantinox.sampling import SamplingParams, init_state, sample
from dantinox.sampling.clarify_text import MAX_CLARIFY_TOKENS, NEVER, ClarifyText
from dantinox.sampling.entropy_router import CLARIFY, GREEDY
from dantinox.sampling.state import recurrent_fields
from tests.error_texts import ERRORS

V, PEAK = 16, 15
ROUTER = {"strategy": "entropy", "use_attention": False}
UNIFORM_V = np.zeros(V, np.float32)  # 4 bits with a varentropy of 0: clarify
PEAKED_V = np.where(np.arange(V) == PEAK, 60, 0).astype(np.float32)  # 0 bits: greedy


@jax.jit
def step(params, state, logits_BV, active_B):
    token_B, state, info = sample(logits_BV, replace(params, report=0), state, active_B=active_B)
    return token_B, state, info.token.routed


def start(params):
    return init_state(
        params, np.full((params.batch, 1), 2, np.int32), np.ones((params.batch, 1), bool), V
    )


def simulate(text, cooldown, clarifies, forbidden):
    """Returns the forced token of each step, or None where the token is drawn; without a text,
    nothing is forced.
    """
    tokens, at, distance = (
        [],
        None,
        None,
    )  # the place in the text; the tokens after the end of the last one
    for wants, bans in zip(clarifies, forbidden, strict=True):
        if at is None and text and wants and (distance is None or distance >= cooldown):
            at = 0 if text[0] not in bans else None
        elif at is not None and text[at] in bans:
            at, distance = None, 0
        if at is None:
            distance = None if distance is None else distance + 1
            tokens.append(None)
            continue
        tokens.append(text[at])
        at, distance = (None, 0) if at + 1 == len(text) else (at + 1, None)
    return tokens


steps = st.lists(
    st.tuples(st.booleans(), st.sets(st.integers(0, 5), max_size=1)), min_size=20, max_size=20
)
texts = st.lists(st.integers(0, 9), max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(texts, st.integers(0, 6), steps), min_size=3, max_size=3),
    waits=st.sets(st.integers(0, 19)),
)
def test_texts_are_inserted_where_a_simulation_inserts_them(rows, waits):
    """Each row has its own text, cooldown, strategies and forbidden tokens; the second row pauses
    in some steps.
    """
    texts, cooldowns, plans = zip(*rows, strict=True)
    texts = [*texts, [4]]  # one row has a text, so that the program contains the step
    plans = [*plans, [(True, set())] * 20]
    given = [ROUTER | {"seed": b, "clarify_cooldown": c} for b, c in enumerate([*cooldowns, 2])]
    params = SamplingParams.build([row | {"clarify_text": "x"} for row in given], clarify_ids=texts)
    state = start(params)
    found = [[] for _ in texts]
    for n in range(20):
        logits_BV = np.stack([UNIFORM_V if plan[n][0] else PEAKED_V for plan in plans])
        for x_V, plan in zip(logits_BV, plans, strict=True):
            x_V[[*plan[n][1]]] = -np.inf
        active_B = np.array([b != 1 or n not in waits for b in range(4)])
        token_B, state, routed = step(params, state, logits_BV, active_B)
        assert np.asarray(routed.route.strategy).tolist() == [
            CLARIFY if plan[n][0] else GREEDY for plan in plans
        ]
        for b in np.flatnonzero(active_B):
            found[b].append(int(token_B[b]) if routed.forced[b] else None)
            assert routed.forced[b] or plans[b][n][0] or token_B[b] == PEAK
    for b, (text, plan) in enumerate(zip(texts, plans, strict=True)):
        seen = [one for n, one in enumerate(plan) if b != 1 or n not in waits]
        assert (
            found[b] == simulate(text, [*cooldowns, 2][b], *zip(*seen, strict=True))
            if seen
            else found[b] == []
        )


def test_the_state_of_a_row_can_be_restored_in_the_middle_of_a_text():
    """A row that starts again from the numbers of an earlier step, in float32, continues its
    text.
    """
    params = SamplingParams.build(
        ROUTER | {"seed": 1, "clarify_text": "x"}, clarify_ids=[[3, 5, 7]]
    )
    assert recurrent_fields(params) == {"since_clarify_text"}
    state, history = start(params), []
    for _ in range(2):
        _, state, _ = step(params, state, UNIFORM_V[None], np.ones(1, bool))
        history.append(
            {name: np.asarray(value, np.float32) for name, value in state.recurrent.items()}
        )
    assert [one["since_clarify_text"].tolist() for one in history] == [[1], [2]]
    unknown = {"since_clarify_text": np.float32([np.nan])}
    for values, expected in ((history[0], [5, 7]), (history[1], [7]), (unknown, [3, 5, 7])):
        state = init_state(
            params,
            np.int32([[2, 3]]),
            np.ones((1, 2), bool),
            V,
            generated_B=np.int32([1]),
            recurrent=values,
        )
        tokens = []
        for _ in expected:
            token_B, state, routed = step(
                params, state, PEAKED_V[None] if tokens else UNIFORM_V[None], np.ones(1, bool)
            )
            tokens += token_B.tolist()
        assert tokens == expected and routed.forced.all()


def test_a_program_without_a_text_is_unchanged():
    """The lowered program is the same if the function is missing; a text adds two arrays and one
    number per row.
    """
    without = SamplingParams.build(ROUTER | {"seed": 1, "clarify_token": 3})
    empty = SamplingParams.build(ROUTER | {"seed": 1, "clarify_token": 3}, clarify_ids=[[]])
    assert without.clarify_text is None is empty.clarify_text
    assert SamplingParams.build({"seed": 1}, clarify_ids=[[3]]).clarify_text is None, (
        "no router, no text"
    )
    assert start(without).since_clarify_text is None and recurrent_fields(without) == set()
    with_text = SamplingParams.build(ROUTER | {"seed": 1, "clarify_text": "x"}, clarify_ids=[[3]])
    assert (
        len(jax.tree.leaves((with_text, start(with_text))))
        == len(jax.tree.leaves((without, start(without)))) + 3
    )

    def lowered(params):
        program = jax.jit(
            lambda params, state, logits_BV: sample(logits_BV, replace(params, report=0), state)
        )
        return program.lower(params, start(params), UNIFORM_V[None]).as_text()

    expected = lowered(without)
    with mock.patch.object(ClarifyText, "insert", None):
        assert lowered(without) == expected
    array = f"x{MAX_CLARIFY_TOKENS}xi32"
    assert array not in expected and array in lowered(with_text)


def test_texts_of_all_lengths_share_a_program():
    sizes = {
        jax.tree.map(
            jnp.shape, SamplingParams.build(ROUTER | {"seed": 1}, clarify_ids=[range(n)])
        ).clarify_text.tokens_BK
        for n in (1, 17, MAX_CLARIFY_TOKENS)
    }
    assert sizes == {(1, MAX_CLARIFY_TOKENS)}
    assert np.float32(NEVER) == NEVER and np.float32(NEVER - 1) != NEVER


def test_errors():
    with pytest.raises(UserError, match=ERRORS["router_clarify_text_must_be_at_most"]):
        ClarifyText.build([[1], [2] * (MAX_CLARIFY_TOKENS + 1)])
    with pytest.raises(UserError, match=ERRORS["router_clarify_text_needs_a_tokenizer"]):
        SamplingParams.build(ROUTER | {"seed": 1, "clarify_text": "x"})
    settings = ROUTER | {"seed": 1, "clarify_text": "x"}
    for ids, sentence in (
        ([(16,)], "clarify_ids"),
        ([(-1,)], "clarify_ids"),
        ([(1,), (2,)], "clarify_rows"),
    ):
        with pytest.raises(UserError, match=ERRORS[sentence]):
            SamplingParams.build(settings, clarify_ids=ids, vocab_size=V)
    assert [*router_conflicts(RouterSection(clarify_token=3, clarify_text="x"))] == [
        ("router.clarify_text", "must be null if router.clarify_token is set: set one of them")
    ]
    for values, message in (
        (
            {"router.clarify_text": "x"},
            "router.clarify_text has no effect while generation.strategy is chain",
        ),
        (
            {"generation.strategy": "entropy", "router.clarify_text": ""},
            "router.clarify_text must be",
        ),
        (
            {
                "generation.num_beams": 2,
                "generation.strategy": "entropy",
                "router.clarify_text": "x",
            },
            "num_beams",
        ),
    ):
        with pytest.raises(UserError, match=message):
            build_config({}, values, origin="")
