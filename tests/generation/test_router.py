"""In the compiled loop, the entropy router gives the same tokens as on the host, for any cache,
padding and batch.
"""

import json
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dantinox.config import Config, UserError, overlay
from dantinox.config.generation_settings import ROUTED_STEPS
from dantinox.generation import generate
from dantinox.generation.api.generate_ids import _IdsModel
from dantinox.generation.decode.generate_toks import _generate_toks
from dantinox.generation.static_batch import StaticBatch, StaticOptions
from dantinox.model import make_cache
from dantinox.sampling import SamplingParams, process_logits
from dantinox.sampling.best_of_n import best_of_n, guide_score
from dantinox.sampling.entropy_router import (
    CLARIFY,
    STRATEGIES,
    AttentionMetrics,
    Metrics,
    RouterConfig,
    combine_layers,
    layer_attention,
    route,
)
from tests.error_texts import ERRORS

from . import builder

# Thresholds with which this model uses all five strategies.
ENTROPY = {
    "strategy": "entropy",
    "low_entropy": 1.2,
    "low_varentropy": 2.0,
    "clarify_entropy": 1.3,
    "high_entropy": 2.0,
}
ENTROPY |= {"high_varentropy": 2.6, "adaptive_temperature_uncertainty": 0.1}
ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.4, "top_p": 0.7, "top_k": 9, "min_p": 0.02},
    "clarify": {"clarify_token": 7, "clarify_cooldown": 3},
    "clarify at once again": {"clarify_token": 7, "clarify_cooldown": 0},
    "clarify banned": {"clarify_token": 7, "banned_tokens": [7]},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.7, "logit_bias": {"3": 2.0}},
    "one candidate": {"candidates": 1},
    "three candidates": {
        "candidates": 3,
        "adaptive_top_k_max": 256,
        "base_top_k": 60,
        "adaptive_min_p_min": 0.0,
    },
    "greedy always": {"low_entropy": 100.0, "low_varentropy": 100.0, "repetition_penalty": 1.3},
    "coefficients": {
        "adaptive_temperature_uncertainty": -0.1,
        "explore_temperature_factor": 0.8,
        "base_temperature": 0.4,
    },
}
FEW = (
    "plain",
    "hot",
    "clarify",
    "clarify at once again",
    "clarify banned",
    "one candidate",
    "three candidates",
)
STEPS = 16
# Entropies are sums of p · ln p, where the error of ln p is that of a log-probability.
TOLERANCE = {"rtol": 2e-4, "atol": builder.LOGPROB_TOLERANCE}


@cache
def _watched(config):
    graph, _ = nnx.split(builder.model(config))

    @jax.jit
    def run(state, tokens_BT, positions_BT):
        model = nnx.merge(graph, state)
        x_BTD, _, aux = model.hidden(tokens_BT, positions_BT, probe=lambda *observe: observe)
        return model.logits(x_BTD), aux["probe"]

    return run


def observe(model, text):
    """Returns the logits [V] after a sequence, and the attention metrics of its newest query by
    definition in float64.
    """
    places = np.arange(model.config.max_context)
    tokens = np.zeros((1, len(places)), np.int32)
    tokens[0, : len(text)] = text
    logits, probed = _watched(model.config)(
        nnx.state(model), tokens, np.where(places < len(text), places, -1)[None]
    )
    entropy, norm, varentropy, apart, strength = [], [], [], [], []
    for scores_1NS, valid_1S in probed:
        x = np.asarray(scores_1NS, np.float64)[0][:, np.asarray(valid_1S)[0]]
        a = np.exp(x - x.max(axis=1, keepdims=True))
        a /= a.sum(axis=1, keepdims=True)
        e = -(a * np.log2(a)).sum(axis=1)
        entropy.append(e.mean())
        norm.append(e.mean() / np.log2(x.shape[1]) if x.shape[1] > 1 else 0.0)
        varentropy.append(e.var())
        apart.append(np.abs(a - a.mean(axis=0)).sum(axis=1).mean() / 2)
        strength.append(np.abs(x).mean())
    numbers = [np.mean(part) for part in (entropy, norm, varentropy, apart, strength)]
    return np.asarray(logits)[0, len(text) - 1], AttentionMetrics(
        *numbers[:4], 1 - numbers[3], numbers[4]
    )


def surprise(logits_V):
    """Returns entropy (bits), varentropy (bits²) and ln p in float64."""
    x = np.asarray(logits_V, np.float64)
    lnp = x - x.max() - np.log(np.exp(x - x.max()).sum())
    bits = -lnp / np.log(2)
    p = np.exp(lnp)
    H = (p * bits).sum()
    return H, (p * (bits - H) ** 2).sum(), lnp


_best = jax.jit(best_of_n)
_route = jax.jit(route)


def slowly(model, prompt, steps, settings, seed, attends, inserted=()):
    """Returns the continuation, computed on the host, and the details of each token.

    The details are (strategy, forced, entropy, varentropy, attention, ln p, rank, survivors).
    `inserted` is the clarify text.
    """
    text, details = list(prompt), []
    settings = {key: value for key, value in settings.items() if key != "strategy"}
    step_keys = (
        *ROUTED_STEPS,
        "repetition_penalty",
        "presence_penalty",
        "logit_bias",
        "banned_tokens",
    )
    own = {key: value for key, value in settings.items() if key in step_keys}
    base = {f"base_{key}": own.pop(key) for key in ROUTED_STEPS if key in own}
    config = RouterConfig(**{**{k: v for k, v in settings.items() if k not in step_keys}, **base})
    clarify, cooldown = int(config.clarify_token), int(config.clarify_cooldown)
    place, end = 0, None  # the next token of the clarify text, and the position after the last one
    for n in range(steps):
        logits_V, attention = observe(model, text)
        H, varentropy, lnp = surprise(logits_V)
        taken = _route(Metrics(H, varentropy, attention if attends else None), config)
        edits = builder.steps_of(own, ("repetition_penalty", "presence_frequency_penalty"), [], 0.0)
        said = [text[: len(prompt)]], [text[len(prompt) :]]
        edited_V = np.asarray(process_logits(logits_V[None], edits, *said)[0])
        cuts: list[dict[str, Any]] = [{"name": "temperature", "t": float(taken.temperature)}]
        cuts += [
            {"name": "top_k", "k": int(taken.top_k)},
            {"name": "top_p", "p": float(taken.top_p)},
        ]
        cuts += [{"name": "min_p", "p": float(taken.min_p)}]
        final_V = process_logits(edited_V[None], cuts)[0]
        strategy = int(taken.strategy)
        if STRATEGIES[strategy] == "adaptive":
            final_V = _best(final_V, logits_V, config.candidates)
        token = int(builder._draw(final_V, seed, 0, n))
        if STRATEGIES[strategy] == "greedy":
            token = int(np.argmax(edited_V))
        recent = text[len(text) - cooldown :] if cooldown else []
        forced = (
            strategy == CLARIFY
            and clarify >= 0
            and edited_V[clarify] > -np.inf
            and clarify not in recent
        )
        token = clarify if forced else token
        ready = end is None or n - end >= cooldown
        if inserted and (place or (strategy == CLARIFY and ready)):
            forced = bool(edited_V[inserted[place]] > -np.inf)
            token = inserted[place] if forced else token
            ended = not forced or place + 1 == len(inserted)
            end = n + forced if ended and (place or forced) else end
            place = 0 if ended else place + 1
        rank = int((logits_V > logits_V[token]).sum())
        details.append(
            (
                strategy,
                forced,
                H,
                varentropy,
                attention,
                lnp[token],
                rank,
                int((np.asarray(final_V) > -np.inf).sum()),
            )
        )
        text.append(token)
    return text[len(prompt) :], details


END = 7


def decoded(model, rows, prompts, steps, ends=(), count=None):
    """Returns the continuations [B, steps], their lengths and the reports of some rows, in a batch
    of one size and plan.
    """
    B = len(rows)
    filler = rows[0] | ROWS["clarify banned"] | {"min_tokens": 1}
    rows = [*rows, *[filler] * ((count or len(FEW)) + 1 - B)]
    prompts = [*prompts, *prompts[:1] * (len(rows) - B)]
    tokens, lengths = builder.padded(prompts)
    params = SamplingParams.build(rows, vocab_size=model.config.vocab_size, stop_ids=[END])
    limits = np.full(len(rows), STEPS)
    session = StaticBatch(
        model,
        tokens,
        lengths,
        params,
        limits_B=limits,
        eos_ids=[[*ends]] * len(rows),
        options=StaticOptions(report=3),
    )
    chunks = [session.start(), session.advance(steps - 1)]
    infos = jax.tree.map(
        lambda *parts: np.concatenate(parts, axis=1)[:B], *[chunk.info for chunk in chunks]
    )
    counts = np.sum([chunk.counts for chunk in chunks], axis=0)[:B]
    return np.concatenate([chunk.tokens for chunk in chunks], axis=1)[:B], counts, infos


@pytest.mark.parametrize(
    ("names", "attends"),
    [
        (FEW, True),
        *(pytest.param([*ROWS], attends, marks=pytest.mark.slow) for attends in (True, False)),
    ],
)
def test_every_strategy_in_one_batch(names, attends):
    """Tokens, strategies and metrics equal those of the host on the whole sequence; every strategy
    occurs.
    """
    model = builder.model()
    rows = [
        ENTROPY | {"use_attention": attends, "seed": 40 + b} | ROWS[name]
        for b, name in enumerate(names)
    ]
    prompts = builder.prompts(*(1 + 2 * b % 9 for b in range(len(rows))), seed=8)
    tokens, _, info = decoded(model, rows, prompts, STEPS, count=len(names))
    taken, forced = [], 0
    for b, (name, row, prompt) in enumerate(zip(names, rows, prompts, strict=True)):
        own = {key: value for key, value in row.items() if key not in ("seed", "use_attention")}
        text, details = slowly(model, prompt, STEPS, own, row["seed"], attends)
        assert tokens[b].tolist() == text, name
        strategy, was_forced, H, V, attention, lnp, rank, survivors = zip(*details, strict=True)
        assert info.routed.route.strategy[b].tolist() == list(strategy), name
        assert info.routed.forced[b].tolist() == list(was_forced), name
        assert (info.rank[b].tolist(), info.survivors[b].tolist()) == (
            list(rank),
            list(survivors),
        ), name
        for field, expected in ((info.entropy, H), (info.varentropy, V), (info.logprob, lnp)):
            np.testing.assert_allclose(field[b], expected, **TOLERANCE)
        if attends:
            for found, expected in zip(
                info.routed.attention, zip(*attention, strict=True), strict=True
            ):
                np.testing.assert_allclose(found[b], expected, **TOLERANCE)
        taken += strategy
        forced += sum(was_forced)
    assert {STRATEGIES[i] for i in taken} == set(STRATEGIES)
    assert forced > 3
    assert (info.routed.attention is None) == (not attends)


@pytest.mark.slow
def test_a_large_vocabulary_uses_windows():
    model = builder.model(builder.config(vocab_size=5003))
    numbers = {
        "low_entropy": 1.5,
        "clarify_entropy": 5.0,
        "high_entropy": 3.5,
        "low_varentropy": 3.0,
        "high_varentropy": 6.0,
    }
    wide = {"base_top_k": 3000, "base_top_p": 1.0, "adaptive_top_p_max": 1.0}
    rows = [ENTROPY | numbers | {"seed": b} | (wide if b % 2 else {}) for b in range(6)]
    prompts = builder.prompts(*range(2, 8), seed=12)
    tokens, _, info = decoded(model, rows, prompts, 12)
    for row, prompt, text in zip(rows, prompts, tokens, strict=True):
        own = {key: value for key, value in row.items() if key != "seed"}
        assert text.tolist() == slowly(model, prompt, 12, own, row["seed"], True)[0]
    assert len(np.unique(info.routed.route.strategy)) > 2


@nnx.jit(graph_updates=False)
def _attended(model, tokens_BT, positions_BT, cache):
    _, cache, aux = model.hidden(
        tokens_BT, positions_BT, cache=cache, probe=jax.vmap(layer_attention)
    )
    return jnp.stack(jax.vmap(combine_layers)(aux["probe"]), axis=1), cache


def attended(model, texts, prompt_lengths, slots):
    """Returns attention metrics [B, steps, 6] after the prompts and each further token; without
    slots, there is no cache.
    """
    B, steps = len(texts), min(len(t) - n for t, n in zip(texts, prompt_lengths, strict=True))
    found, cache = [], None
    if slots:
        cache = make_cache(model.config, B, slots, model.dtype)
        tokens, lengths = builder.padded(
            [t[:n] for t, n in zip(texts, prompt_lengths, strict=True)]
        )
        places = np.arange(tokens.shape[1])
        _, cache = _attended(model, tokens, np.where(places < lengths[:, None], places, -1), cache)
    for step in range(steps):
        last = np.array(prompt_lengths)[:, None] + step
        if slots:
            metrics, cache = _attended(
                model, np.array([[t[n[0]]] for t, n in zip(texts, last, strict=True)]), last, cache
            )
        else:
            tokens, _ = builder.padded(texts)
            places = np.arange(tokens.shape[1])
            metrics, _ = _attended(model, tokens, np.where(places <= last, places, -1), None)
        found.append(metrics)
    return np.stack(found, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("windows", "all_slots"),
    [
        pytest.param((5,), (64, 256), id="ring"),
        pytest.param((None, 5), (64, 256, 4096), id="mixed", marks=pytest.mark.slow),
        pytest.param((None, None), (64, 4096), id="full", marks=pytest.mark.slow),
    ],
)
def test_metrics_do_not_depend_on_slots_padding_and_cache(windows, all_slots):
    """Metrics are equal for any number of slots, for a short prompt in a batch or alone, and for a
    ring or the sequence.
    """
    model = builder.model(builder.config(windows=windows, max_context=4096))
    texts, lengths = builder.prompts(15, 42, seed=4), [3, 30]
    expected = attended(model, texts, lengths, None)
    for slots in all_slots:
        np.testing.assert_allclose(attended(model, texts, lengths, slots), expected, **TOLERANCE)
    alone = attended(model, texts[:1], lengths[:1], 64)
    np.testing.assert_allclose(alone, expected[:1], **TOLERANCE)


def test_a_row_does_not_depend_on_other_rows():
    """The row stays bitwise equal in one program, if other rows have other prompts, values and
    seeds.
    """
    model, random = builder.model(), np.random.default_rng(0)
    mine, prompt = ENTROPY | {"seed": 5, "clarify_token": 7}, builder.prompts(6, seed=20)[0]
    found = set()
    for trial in range(6):
        place = trial % 5
        rows = [
            ENTROPY
            | {
                "seed": int(random.integers(99)),
                "temperature": float(random.uniform(0.3, 2)),
                "clarify_token": 9,
            }
            for _ in range(4)
        ]
        prompts = builder.prompts(
            *random.integers(1, 9, 3), 9, seed=trial
        )  # the last one determines the slots
        rows.insert(place, mine)
        prompts.insert(place, prompt)
        tokens, _, info = decoded(model, rows, prompts, 10)
        leaves = [np.asarray(leaf[place]).tobytes() for leaf in jax.tree.leaves(info)]
        found.add((tokens[place].tobytes(), *leaves))
    assert len(found) == 1


def test_values_of_the_router_compile_nothing():
    model, prompts = builder.model(), builder.prompts(4, 5)
    first, *names = SamplingParams.build(ENTROPY | {"seed": 0}).router.__dataclass_fields__
    special = {
        "clarify_token": 4,
        "clarify_cooldown": 9,
        "candidates": 3,
        "base_top_k": 8,
        "explore_top_k_min": 2,
    }
    special |= {
        "adaptive_top_k_min": 2,
        "adaptive_top_k_max": 50,
        "temperature_max": 3.0,
        "adaptive_top_p_max": 0.9,
    }
    decoded(model, [ENTROPY | {"seed": 0}] * 2, prompts, 2)
    programs = _generate_toks.jitted_fn._cache_size()
    for a, b in zip(
        [first, *names[::2]], [*names[1::2], first], strict=False
    ):  # two rows test two settings at a time
        rows = [
            ENTROPY | {"seed": 1, "clarify_token": 3, name: special.get(name, 0.4)}
            for name in (a, b)
        ]
        decoded(model, rows, prompts, 2)
    assert _generate_toks.jitted_fn._cache_size() == programs


def test_a_forced_token_ends_the_text_when_it_is_the_end():
    always = {
        "low_entropy": 0.0,
        "clarify_entropy": 0.0,
        "low_varentropy": 1e6,
        "clarify_token": END,
    }
    row = ENTROPY | always | {"seed": 1, "min_tokens": 3, "clarify_cooldown": 0}
    (text,), (count,), _ = decoded(builder.model(), [row], builder.prompts(4), STEPS, [END])
    assert count == 4 and text[3] == END and END not in text[:3], (
        "not before min_tokens, then immediately"
    )


def test_rows_of_one_batch_have_one_kind_of_router():
    with pytest.raises(UserError, match=ERRORS["router_use_attention_must_be_the"]):
        SamplingParams.build([ENTROPY | {"seed": 1}, ENTROPY | {"seed": 1, "use_attention": False}])
    with pytest.raises(UserError, match=ERRORS["generation_strategy_must_be_the"]):
        SamplingParams.build([ENTROPY | {"seed": 1}, {"seed": 1}])
    with pytest.raises(UserError, match=ERRORS["router_clarify_token_must_be_a"]):
        SamplingParams.build(ENTROPY | {"seed": 1, "clarify_token": 67}, vocab_size=67)
    with pytest.raises(UserError, match=ERRORS["needs_thresholds_measured_on_this"]):
        SamplingParams.build({"strategy": "entropy", "router_preset": "calibrated", "seed": 1})


@pytest.mark.slow
def test_a_score_function_chooses_among_candidates():
    model, prompt = builder.model(), builder.prompts(6)[0]
    rules = {
        "low_entropy": 0.0,
        "clarify_entropy": 1e6,
        "high_varentropy": 1e6,
    }  # makes every token adaptive
    settings = (
        ENTROPY
        | rules
        | {
            "seed": 4,
            "candidates": 5,
            "top_p": 1.0,
            "top_k": 60,
            "logprobs": 3,
            "return_info": True,
        }
    )
    out, details = generate(
        model, [prompt], 12, score_fn=lambda ids, logprobs, metrics: -logprobs, **settings
    )
    found, token = details["info"].routed.candidates, out[0, 6:]
    assert found.ids.shape == (1, 12, 5) and (found.token[0] == token).all()
    least = np.argmin(found.logprobs, axis=2)[..., None]
    np.testing.assert_array_equal(np.take_along_axis(found.ids, least, axis=2)[0, :, 0], token)
    assert len(np.unique(found.ids[0, 0])) > 1
    logits = builder.all_logits(model, out[0].tolist())[5:-1].astype(np.float64)
    lnp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(
        found.logprobs[0], np.take_along_axis(lnp, found.ids[0], axis=1), rtol=0, atol=1e-4
    )
    with pytest.raises(UserError, match=ERRORS["score_fn_chooses_among_the_candidates"]):
        generate(model, [prompt], 2, seed=1, score_fn=guide_score)


@pytest.mark.slow
def test_show_candidates_keeps_the_text():
    """An adaptive token reports n draws and is the first of the likeliest. Others report none.
    Nothing else changes.
    """
    model, prompt = builder.model(), builder.prompts(6)[0]
    settings = ENTROPY | {
        "seed": 4,
        "candidates": 5,
        "top_k": 60,
        "logprobs": 3,
        "return_info": True,
    }
    plain, _ = generate(model, [prompt], STEPS, **settings)
    out, details = generate(model, [prompt], STEPS, show_candidates=True, **settings)
    assert out.tolist() == plain.tolist()
    routed, tokens = details["info"].routed, out[0, 6:]
    adaptive = np.asarray(routed.route.strategy[0]) == STRATEGIES.index("adaptive")
    found, logits = (
        routed.candidates,
        builder.all_logits(model, out[0].tolist())[5:-1].astype(np.float64),
    )
    lnp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert adaptive.sum() > 3 and found.ids.shape == (1, STEPS, 5)
    for step in np.flatnonzero(adaptive):
        drawn = np.asarray(found.ids[0, step])
        best = int(np.argmax(lnp[step, drawn]))
        assert drawn[best] == tokens[step] and np.argmax(found.scores[0, step]) == best
        np.testing.assert_allclose(found.logprobs[0, step], lnp[step, drawn], rtol=0, atol=1e-4)
        # The guide adds the same number to ln p of all candidates of a step.
        np.testing.assert_allclose(
            np.ptp(found.scores[0, step] - found.logprobs[0, step]), 0, atol=1e-4
        )
    assert len({tuple(np.asarray(ids)) for ids in found.ids[0]}) > 3
    for more in ({"strategy": "chain"}, {"logprobs": None}):
        with pytest.raises(UserError, match=ERRORS["show_candidates"]):
            generate(
                model,
                [prompt],
                2,
                show_candidates=True,
                **{"seed": 1, "logprobs": 1, "return_info": True} | more,
            )


def test_router_calibration_for_token_ids(tmp_path):
    """Thresholds that are read from a file or given by name have the same effect as the same values
    set by hand.
    """
    model, prompt = builder.model(), builder.prompts(6)[0]
    measured = {
        "low_entropy": 1.2,
        "low_varentropy": 2.0,
        "clarify_entropy": 3.0,
        "high_entropy": 2.0,
        "high_varentropy": 2.6,
    }
    measured |= {"entropy_scale": 2.0, "varentropy_scale": 4.0}
    file = tmp_path / "router.json"
    file.write_text(json.dumps({"version": 1, "weights": "0" * 64, "measured": measured}))
    asked = {"strategy": "entropy", "router_preset": "calibrated", "seed": 4}

    def numbers(params):
        return jax.tree.map(lambda x: np.asarray(x).tolist(), params.router)

    expected = numbers(SamplingParams.build(asked | measured))
    for source in (file, str(file), measured):
        config = overlay(Config(), asked)
        assert numbers(_IdsModel(config, model, [], source, False).params([config])) == expected
        assert generate(model, [prompt], 0, router_calibration=source, **asked).tolist() == [prompt]
    with pytest.raises(UserError, match=ERRORS["router_calibration_has_no_effect_unless"]):
        generate(model, [prompt], 12, strategy="entropy", router_calibration=file)
    with pytest.raises(UserError, match=ERRORS["no_calibration_at"]):
        generate(model, [prompt], 12, router_calibration=tmp_path / "none.json", **asked)
    with pytest.raises(UserError, match=ERRORS["thresholds_measured_on_this_model"]):
        generate(model, [prompt], 12, router_calibration={"low_entropy": 1.0}, **asked)
