"""Tests logit processors: against logit biases and NumPy, by history, in batches, in a slot batch,
and their errors.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.config import UserError
from dantinox.config.engine_options import EngineOptions
from dantinox.generation.api.generate_ids import generate
from dantinox.generation.engine import Engine
from dantinox.generation.request import GenerationRequest
from dantinox.generation.slot_batch import SlotBatch
from dantinox.sampling.logit_processor import TokenHistory, apply_logit_processor

from . import builder

PROMPT = builder.prompts(6)[0]
SAMPLED = {"temperature": 0.9, "seed": 3}
BIAS = {token: round(6 * float(np.sin(token)), 2) for token in range(0, builder.V, 3)}
MODEL = builder.model(builder.ONE_LAYER)


def biased(logits_V, history):
    return logits_V.at[jnp.asarray([*BIAS])].add(jnp.asarray([*BIAS.values()]))


def no_repeat(logits_V, history):
    """Removes the last token, and below index 2 all even tokens."""
    last = history.tokens_S[history.length - 1]
    id_V = jnp.arange(logits_V.shape[0])
    removed_V = (id_V == last) | ((history.n_generated < 2) & (id_V % 2 == 0))
    return jnp.where(removed_V, -jnp.inf, logits_V)


def continuation(prompt, steps, **settings):
    return generate(MODEL, [prompt], steps, **settings)[0, len(prompt) :].tolist()


def test_a_processor_that_adds_a_bias_equals_logit_bias():
    expected = builder.slowly(
        MODEL, PROMPT, 12, logit_bias={str(token): bias for token, bias in BIAS.items()}, **SAMPLED
    )
    assert continuation(PROMPT, 12, logit_processor=biased, **SAMPLED) == expected


def test_a_processor_reads_the_history():
    text = [*PROMPT]
    for step in range(10):
        logits_V = np.array(builder.all_logits(MODEL, text)[-1])
        logits_V[text[-1]] = -np.inf
        logits_V[0 : len(logits_V) : 2] = -np.inf if step < 2 else logits_V[::2]
        text.append(int(logits_V.argmax()))
    assert continuation(PROMPT, 10, greedy=True, logit_processor=no_repeat) == text[len(PROMPT) :]


@pytest.mark.slow
def test_a_processor_in_a_batch():
    prompts = builder.prompts(3, 9)
    ids, lengths = builder.padded(prompts)
    got = generate(MODEL, ids, 8, prompt_lengths=lengths, n=2, logit_processor=no_repeat, **SAMPLED)
    for row, prompt in enumerate(prompts):
        rows = generate(MODEL, [prompt], 8, n=2, logit_processor=no_repeat, **SAMPLED)[
            :, len(prompt) :
        ]
        assert got[2 * row : 2 * row + 2, len(prompt) : len(prompt) + 8].tolist() == rows.tolist()


@pytest.mark.slow
def test_a_processor_with_drafts():
    drafted = continuation(
        [7, 8, 9] * 4, 12, logit_processor=no_repeat, speculation="ngram", greedy=True
    )
    assert drafted == continuation([7, 8, 9] * 4, 12, logit_processor=no_repeat, greedy=True)


def test_a_processor_that_removes_all_tokens_has_no_effect_and_its_nans_are_removed():
    def nans(logits_V, history):
        return jnp.where(jnp.arange(4) < history.length, jnp.nan, 2 * logits_V)

    logits_BV = np.float32([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    histories = TokenHistory(np.zeros((2, 4), np.int32), np.array([4, 2]), np.array([1, 1]))
    changed_BV = jax.jit(partial(apply_logit_processor, nans))(logits_BV, histories)
    assert changed_BV.tolist() == [[1.0, 2.0, 3.0, 4.0], [-np.inf, -np.inf, 14.0, 16.0]]


def test_each_function_compiles_once(programs):
    def keep(logits_V, history):
        return logits_V

    continuation(PROMPT, 1, greedy=True, logit_processor=keep)
    assert programs() > 0
    continuation(PROMPT[::-1], 1, greedy=True, logit_processor=keep)
    assert programs() == 0


@pytest.mark.parametrize(
    "function, message",
    [
        (3, "logit_processor must be a function"),
        (partial(lambda table, x_V, history: x_V, []), None),
        (
            type("Rule", (), {"__call__": lambda *_: 0, "__eq__": lambda *_: True})(),
            "logit_processor must be hashable",
        ),
        (
            lambda x_V, history: x_V[:3],
            r"must return floating-point logits \[67\], got float32 \[3\]",
        ),
        (
            lambda x_V, history: x_V > 0,
            r"must return floating-point logits \[67\], got bool \[67\]",
        ),
        (lambda x_V, history: None, "got NoneType"),
        (
            lambda x_V, history: x_V if x_V[0] > 0 else -x_V,
            "JAX cannot trace logit_processor .*TracerBoolConversionError",
        ),
        (lambda x_V: x_V, "JAX cannot trace logit_processor .*TypeError"),
    ],
)
def test_errors(function, message):
    if message is None:
        assert continuation(PROMPT, 1, greedy=True, logit_processor=function)
        return
    with pytest.raises(UserError, match=message):
        continuation(PROMPT, 2, greedy=True, logit_processor=function)


def served(**options):
    run = builder.loaded_model(builder.BYTES, 32, windows=(None,))
    return run, SlotBatch(run, EngineOptions(3, 32), **options)


def test_requests_of_a_slot_batch_cannot_choose_a_processor():
    run, slots = served(logit_processor=no_repeat)
    request = run.request("abc", {"seed": 1}, logit_processor=biased)
    assert slots.row_params(request.config).params.logit_processor is no_repeat
    with pytest.raises(UserError, match="logit_processor is an argument of the SlotBatch"):
        Engine(run, slots, queue=9).add(request)


@pytest.mark.slow
def test_a_slot_batch_applies_its_processor_to_all_requests():
    run, slots = served(logit_processor=no_repeat)
    slots.compile(run.config)
    engine = Engine(run, slots, queue=9)
    config = run.settings({"max_new_tokens": 10, "greedy": True})
    ids = (*b"abc",)
    job = engine.add(GenerationRequest(ids, config))
    while engine.busy:
        engine.step()
    (result,) = run.complete([GenerationRequest(ids, config, logit_processor=no_repeat)])
    assert job.texts[0].tokens == result.tokens
    assert all(
        first != second
        for first, second in zip((*ids, *result.tokens), result.tokens, strict=False)
    )
