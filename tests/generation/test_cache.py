"""Generation gives the same tokens with and without a cache, in a mixed batch and in a batch of
one.
"""

from functools import cache, partial

import jax
import numpy as np
import pytest

from dantinox.config import UserError
from dantinox.generation import generate
from dantinox.generation.static_batch import StaticBatch
from dantinox.programs import tree_bytes
from dantinox.sampling import SamplingParams

from . import builder

PROMPTS = builder.prompts(5, 9, 2)
STEPS = 20
WINDOWS = {"full": (None, None), "sliding": (4, 4), "mixed": (3, None)}
POSITIONS = ("rope", "learned", "sinusoidal", "none")
# All pairs of a position encoding and a kind of windows. Each number of key heads occurs with every
# encoding and every kind.
QUICK = {("rope", "mixed")}
KINDS = [
    pytest.param(
        position,
        windows,
        (1, 2, 4)[(i + j) % 3],
        marks=[] if (position, windows) in QUICK else pytest.mark.slow,
    )
    for i, position in enumerate(POSITIONS)
    for j, windows in enumerate(WINDOWS)
]
OPTIONS = {
    "greedy": True,
    "logprobs": 3,
    "return_info": True,
}  # the same in all tests, so that these share two programs


@cache
def make_model(position="rope", windows="mixed", kv_heads=4):
    extra = {"qk_norm": True, "no_sink": True, "dropout_rate": 0.5} if kv_heads == 4 else {}
    return builder.model(
        builder.config(position=position, windows=WINDOWS[windows], kv_heads=kv_heads, **extra)
    )


@cache
def ragged_batch(model):
    tokens, lengths = builder.padded(PROMPTS)
    return generate(model, tokens, STEPS, prompt_lengths=lengths, **OPTIONS)


@pytest.mark.parametrize(("position", "windows", "kv_heads"), KINDS)
def test_a_ragged_batch_equals_the_slow_reference(position, windows, kv_heads):
    """The tokens are the same, and log-probabilities equal those of a float64 softmax."""
    model = make_model(position, windows, kv_heads)
    out, details = ragged_batch(model)
    info = details["info"]
    assert len(np.unique(out)) > 15, "the text must vary for this test"
    for b, prompt in enumerate(PROMPTS):
        text = out[b, : len(prompt) + STEPS].tolist()
        assert text[: len(prompt)] == prompt
        logits = builder.all_logits(model, text).astype(np.float64)[len(prompt) - 1 : -1]
        assert text[len(prompt) :] == logits.argmax(axis=1).tolist()
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        best, tolerance = np.sort(logprobs)[:, ::-1][:, :3], builder.LOGPROB_TOLERANCE
        np.testing.assert_allclose(info.top_logprobs[b], best, rtol=0, atol=tolerance)
        np.testing.assert_allclose(info.logprob[b], best[:, 0], rtol=0, atol=tolerance)
        assert (info.top_ids[b, :, 0] == text[len(prompt) :]).all()
        assert (info.logprob_sampled[b] == 0).all()


def test_without_a_cache():
    model = make_model()
    cached, details = ragged_batch(model)
    tokens, lengths = builder.padded(PROMPTS)
    uncached, uncached_details = generate(
        model, tokens, STEPS, prompt_lengths=lengths, use_cache=False, **OPTIONS
    )
    assert cached.tolist() == uncached.tolist()
    found, expected = (d["info"].top_logprobs for d in (uncached_details, details))
    np.testing.assert_allclose(found, expected, rtol=0, atol=builder.LOGPROB_TOLERANCE)


def test_a_long_sequence_crosses_buckets_chunks_and_the_ring():
    """17 tokens are padded to 32; 100 more take four chunks and wrap around the ring many times."""
    model = builder.model(builder.config(windows=(4,), max_context=128))
    (prompt,) = builder.prompts(17, seed=4)
    out = generate(model, [prompt], 100, greedy=True)[0].tolist()
    logits = builder.all_logits(model, out)
    assert out == prompt + logits[16:-1].argmax(axis=1).tolist() and len(out) == 117


def test_no_new_tokens_returns_the_input():
    model = builder.model()
    tokens, lengths = builder.padded(PROMPTS)
    out = generate(model, tokens, 0, prompt_lengths=lengths, pad_id=66)
    for row, prompt in zip(out, PROMPTS, strict=True):
        assert row.tolist() == prompt + [66] * (tokens.shape[1] - len(prompt))
    assert out.shape == tokens.shape and out.dtype == np.int32
    whole = np.tile(np.arange(64), (1, 1))
    assert generate(model, whole, 0).tolist() == whole.tolist(), (
        "a full context is allowed without new tokens"
    )
    out, details = generate(model, tokens, 0, prompt_lengths=lengths, return_info=True, logprobs=1)
    assert details["lengths"].tolist() == lengths.tolist() and details["reasons"] == ["length"] * 3


def test_prompt_then_continuation_then_padding():
    """An EOS token is kept, padding follows it, and the other rows continue."""
    model = make_model()
    tokens, lengths = builder.padded(PROMPTS)
    free, _ = ragged_batch(model)
    text = free[1, 9 : 9 + STEPS].tolist()
    end = text[6]
    first = text.index(end)
    out, details = generate(
        model, tokens, STEPS, prompt_lengths=lengths, eos_ids=[end], pad_id=65, **OPTIONS
    )
    assert out.shape == (3, 9 + STEPS)
    assert details["reasons"][1] == "eos"
    for b, prompt in enumerate(PROMPTS):
        length = details["lengths"][b]
        assert out[b, :length].tolist() == free[b, :length].tolist()
        assert (out[b, length:] == 65).all()
        assert length == (len(prompt) + STEPS if details["reasons"][b] == "length" else length)
        assert (out[b, length - 1] == end) == (details["reasons"][b] == "eos")
        assert end not in out[b, len(prompt) : length - 1]
    assert details["lengths"][1] == 9 + first + 1


def test_padding_of_the_input_has_no_effect():
    outs = []
    for fill in (0, 66):
        tokens, lengths = builder.padded(PROMPTS, fill)
        outs.append(
            generate(make_model(), tokens, STEPS, prompt_lengths=lengths, **OPTIONS)[0].tolist()
        )
    assert outs[0] == outs[1] == ragged_batch(make_model())[0].tolist()


def test_the_cache_has_the_length_of_the_request():
    model = builder.model(builder.config(max_context=4096, windows=(None, 8)))
    params = SamplingParams.build({"greedy": True})
    session = StaticBatch(
        model,
        np.ones((1, 10), np.int32),
        np.array([10]),
        params,
        limits_B=np.array([20]),
        eos_ids=[[]],
    )
    first, _ = session.trace(
        partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    )
    cache = first.out_info[0].caches
    assert {leaf.shape for leaf in jax.tree.leaves(cache) if leaf.ndim == 4} == {
        (1, 2, 8, 32),
        (1, 2, 32, 8),
        (1, 2, 8, 8),
    }
    assert (
        tree_bytes([leaf for leaf in jax.tree.leaves(cache) if leaf.ndim == 4])
        == 2 * 2 * (32 + 8) * 8 * 4
    )


@pytest.mark.parametrize(
    ("input_ids", "options", "sentence"),
    [
        ([[]], {}, "each row of input_ids must be a non-empty list of integers"),
        ([1, 2], {}, "each row of input_ids must be a non-empty list of integers"),
        ([[1.5]], {}, "each row of input_ids must be a non-empty list of integers"),
        ([], {}, "input_ids must have at least one row"),
        ([[1]], {"stop": ["a"]}, "stop has no effect on token ids"),
        (
            [[1]],
            {"max_generations": 2.5},
            "generation.max_new_tokens must be an integer .*, got 2.5",
        ),
        ([[1]], {"n": 0}, "generation.n must be an integer in .*, got 0"),
        (
            [[1]],
            {"logprobs": 68, "return_info": True},
            r"logprobs must be an integer in \[0, 67\], got 68",
        ),
        ([[1]], {"eos_ids": 3}, "eos_ids must be a non-empty list of integers"),
        ([[1]], {"temperature": None}, "generation.temperature must be"),
        (
            [[1, 2]],
            {"prompt_lengths": [1.5]},
            "prompt_lengths must be a non-empty list of integers",
        ),
        ([[67]], {}, r"tokens of the prompt must be in \[0, 67\), got 67"),
        ([[-1]], {}, r"tokens of the prompt must be in \[0, 67\), got -1"),
        (
            [[1, 2]],
            {"prompt_lengths": [3]},
            r"prompt_lengths must be 1 integers in \[1, 2\], got \[3\]",
        ),
        ([[1, 2]], {"prompt_lengths": [0]}, "prompt_lengths must be"),
        ([[1, 2]], {"prompt_lengths": [1, 1]}, "prompt_lengths must be"),
        ([[1]], {"max_generations": -1}, "generation.max_new_tokens must be an integer .*, got -1"),
        ([[1]], {"top_p": 1.7}, r"generation.top_p must be .*, got 1.7"),
        ([[1]], {"temperature": -1.0}, "generation.temperature must be"),
        ([[1]], {"seed": -1}, "generation.seed must be"),
    ],
)
def test_wrong_arguments(input_ids, options, sentence):
    with pytest.raises(UserError, match=sentence):
        generate(builder.model(), input_ids, **options)


def test_prompts_as_lists_of_any_lengths():
    ragged, _ = generate(
        make_model(), [list(prompt) for prompt in PROMPTS], max_new_tokens=STEPS, **OPTIONS
    )
    assert ragged.tolist() == ragged_batch(make_model())[0].tolist()


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_a_prompt_that_fills_the_context_is_returned_unchanged(options):
    model, (short,) = builder.model(), builder.prompts(4)
    full, options = (
        [1 + i % 7 for i in range(64)],
        {
            "max_new_tokens": 3,
            "greedy": not options,
            **options,
        },
    )
    with pytest.warns(UserWarning, match="every prompt fills the model's context of 64 tokens"):
        assert generate(model, [full], **options).tolist() == [full]
    with pytest.warns(UserWarning, match="1 of 2 prompts fill the model's context of 64 tokens"):
        both = generate(model, [full, short], **options)
    (alone,) = generate(model, [short], **options)
    assert both[0, :64].tolist() == full and both[1, :7].tolist() == alone.tolist()
    assert not both[0, 64:].any() and not both[1, 7:].any()
