"""Generation gives the same tokens with and without a cache, in a mixed batch and in a batch of one."""

import numpy as np
import pytest

from dantinox.config import UserError
from dantinox.generation import generate

from . import builder

PROMPTS = builder.prompts(5, 9, 2)
STEPS = 20
WINDOWS = {"full": (None, None), "sliding": (4, 4), "mixed": (3, None)}
POSITIONS = ("rope", "learned", "sinusoidal", "none")
# All pairs of a position encoding and a kind of windows. Each number of key heads occurs with every encoding and every kind.
# Every second pair has the mark `exhaustive`.
PAIRS = [(i, j) for i in range(4) for j in range(3)]
KINDS = [
    pytest.param(POSITIONS[i], list(WINDOWS)[j], (1, 2, 4)[(i + j) % 3], marks=[pytest.mark.exhaustive] * ((i + j) % 2))
    for i, j in PAIRS
]


@pytest.mark.parametrize(("position", "windows", "kv_heads"), KINDS)
def test_a_ragged_batch_equals_the_slow_reference(position, windows, kv_heads):
    """The tokens are the same, and log-probabilities equal those of a float64 softmax."""
    extra = {"qk_norm": True, "no_sink": True, "dropout_rate": 0.5} if kv_heads == 4 else {}
    model = builder.model(builder.config(position=position, windows=WINDOWS[windows], kv_heads=kv_heads, **extra))
    tokens, lengths = builder.padded(PROMPTS)
    out, details = generate(model, tokens, STEPS, greedy=True, prompt_lengths=lengths, logprobs=3, return_info=True)
    info = details["info"]
    assert len(np.unique(out)) > 15, "the text must vary for this test"
    for b, prompt in enumerate(PROMPTS):
        text = out[b, : len(prompt) + STEPS].tolist()
        assert text[: len(prompt)] == prompt
        assert text[len(prompt) :] == builder.slowly(model, prompt, STEPS, greedy=True)
        logits = builder.all_logits(model, text).astype(np.float64)[len(prompt) - 1 : -1]
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        best, tolerance = np.sort(logprobs)[:, ::-1][:, :3], 1e-5 * np.abs(logits).max()
        np.testing.assert_allclose(info.top_logprobs[b], best, rtol=0, atol=tolerance)
        np.testing.assert_allclose(info.logprob[b], best[:, 0], rtol=0, atol=tolerance)
        assert (info.top_ids[b, :, 0] == text[len(prompt) :]).all()
        assert (info.logprob_sampled[b] == 0).all()


@pytest.mark.parametrize(("position", "windows", "kv_heads"), [("learned", "mixed", 4)])
def test_without_a_cache(position, windows, kv_heads):
    extra = {"qk_norm": True, "no_sink": True, "dropout_rate": 0.5} if kv_heads == 4 else {}
    model = builder.model(builder.config(position=position, windows=WINDOWS[windows], kv_heads=kv_heads, **extra))
    tokens, lengths = builder.padded(PROMPTS)
    options = {"greedy": True, "prompt_lengths": lengths, "logprobs": 3, "return_info": True}
    (cached, details), (slow, details_uncached) = (
        generate(model, tokens, STEPS, use_cache=use_cache, **options) for use_cache in (True, False)
    )
    assert cached.tolist() == slow.tolist()
    np.testing.assert_allclose(details["info"].top_logprobs, details_uncached["info"].top_logprobs, rtol=0, atol=2e-4)


def test_a_long_sequence_crosses_buckets_chunks_and_the_ring():
    """17 tokens are padded to 32; 100 more take four chunks and wrap around the ring many times."""
    model = builder.model(builder.config(windows=(4, None), max_context=128))
    (prompt,) = builder.prompts(17, seed=4)
    out = generate(model, [prompt], 100, greedy=True)
    assert out[0].tolist() == prompt + builder.slowly(model, prompt, 100, greedy=True)


def test_no_new_tokens_returns_the_input():
    model = builder.model()
    tokens, lengths = builder.padded(PROMPTS)
    out = generate(model, tokens, 0, prompt_lengths=lengths, pad_id=66)
    for row, prompt in zip(out, PROMPTS, strict=True):
        assert row.tolist() == prompt + [66] * (tokens.shape[1] - len(prompt))
    assert out.shape == tokens.shape and out.dtype == np.int32
    whole = np.tile(np.arange(64), (1, 1))
    assert generate(model, whole, 0).tolist() == whole.tolist(), "a full context is allowed without new tokens"
    out, details = generate(model, tokens, 0, prompt_lengths=lengths, return_info=True, logprobs=1)
    assert details["lengths"].tolist() == lengths.tolist() and details["reasons"] == ["length"] * 3


def test_prompt_then_continuation_then_padding():
    """An EOS token is kept, padding follows it, and the other rows continue."""
    model = builder.model()
    tokens, lengths = builder.padded(PROMPTS)
    free = generate(model, tokens, STEPS, greedy=True, prompt_lengths=lengths)
    text = free[1, 9 : 9 + STEPS].tolist()
    end = text[6]
    first = text.index(end)
    out, details = generate(
        model, tokens, STEPS, greedy=True, prompt_lengths=lengths, eos_ids=[end], pad_id=65, return_info=True
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
    for fill in (0, 3, 66):
        tokens, lengths = builder.padded(PROMPTS, fill)
        outs.append(generate(builder.model(), tokens, STEPS, greedy=True, prompt_lengths=lengths).tolist())
    assert outs[0] == outs[1] == outs[2]


def test_the_cache_has_the_length_of_the_request():
    from dantinox.generation.static_batch import StaticBatch
    from dantinox.sampling import SamplingParams

    model = builder.model(builder.config(max_context=4096, windows=(None, 8)))
    params = SamplingParams.build({"greedy": True})
    session = StaticBatch(model, np.ones((1, 10), np.int32), np.array([10]), params, limits_B=np.array([20]), eos_ids=[[]])
    session.start()
    assert session.cache.report()["slots"] == [[[2, 32]], [[2, 8]]]
    assert session.cache.report()["bytes"] == 2 * 2 * (32 + 8) * 8 * 4


@pytest.mark.parametrize(
    ("input_ids", "options", "sentence"),
    [
        ([[]], {}, "each row of input_ids must be a non-empty list of integers"),
        ([1, 2], {}, "each row of input_ids must be a non-empty list of integers"),
        ([[1.5]], {}, "each row of input_ids must be a non-empty list of integers"),
        ([], {}, "input_ids must have at least one row"),
        ([[1]], {"stop": ["a"]}, "stop has no effect on token ids"),
        ([[1]], {"max_generations": 2.5}, "generation.max_new_tokens must be an integer .*, got 2.5"),
        ([[1]], {"n": 0}, "generation.n must be an integer in .*, got 0"),
        ([[1]], {"logprobs": 68, "return_info": True}, r"logprobs must be an integer in \[0, 67\], got 68"),
        ([[1]], {"eos_ids": 3}, "eos_ids must be a non-empty list of integers"),
        ([[1]], {"temperature": None}, "generation.temperature must be"),
        ([[1, 2]], {"prompt_lengths": [1.5]}, "prompt_lengths must be a non-empty list of integers"),
        ([[67]], {}, r"tokens of the prompt must be in \[0, 67\), got 67"),
        ([[-1]], {}, r"tokens of the prompt must be in \[0, 67\), got -1"),
        ([[1, 2]], {"prompt_lengths": [3]}, r"prompt_lengths must be 1 integers in \[1, 2\], got \[3\]"),
        ([[1, 2]], {"prompt_lengths": [0]}, "prompt_lengths must be"),
        ([[1, 2]], {"prompt_lengths": [1, 1]}, "prompt_lengths must be"),
        ([[1]], {"max_generations": -1}, "generation.max_new_tokens must be an integer .*, got -1"),
        ([[1]], {"top_p": 1.7}, r"generation.top_p must be .*, got 1.7"),
        ([[1]], {"temperature": -1.0}, "generation.temperature must be"),
        ([[1]], {"seed": -1}, "generation.seed must be"),
        ([[1] * 64], {"max_generations": 1}, "fills the model's context of 64"),
    ],
)
def test_wrong_arguments(input_ids, options, sentence):
    with pytest.raises(UserError, match=sentence):
        generate(builder.model(), input_ids, **options)


def test_prompts_as_lists_of_any_lengths():
    tokens, lengths = builder.padded(PROMPTS)
    ragged = generate(builder.model(), [list(prompt) for prompt in PROMPTS], max_new_tokens=STEPS, greedy=True)
    assert ragged.tolist() == generate(builder.model(), tokens, STEPS, greedy=True, prompt_lengths=lengths).tolist()
