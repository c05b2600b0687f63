"""Compares the compiled loop, token for token, with a loop on the host that reads the whole
sequence again for every token.
"""

import jax
import numpy as np
import pytest

from dantinox.generation import generate
from dantinox.generation.static_batch import StaticBatch, StaticOptions
from dantinox.sampling import SamplingParams

from . import builder

PROMPTS = builder.prompts(5, 9, 2)
STEPS = 36  # the first token, a full chunk, and a partial one
END = 22
SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 1.7},
    "cold": {"temperature": 0.3},
    "zero": {"temperature": 0.0},
    "top_k": {"top_k": 5, "temperature": 2.5},
    "top_k of one": {"top_k": 1, "temperature": 2.5},
    "top_p": {"top_p": 0.8, "temperature": 2.5},
    "top_p of zero": {"top_p": 0.0, "temperature": 2.5},
    "min_p": {"min_p": 0.1, "temperature": 2.5},
    "top_k and top_p": {"top_k": 10, "top_p": 0.9, "temperature": 2.5},
    "top_k and a tiny top_p": {"top_k": 50, "top_p": 1e-6, "temperature": 2.5},
    "repetition": {"repetition_penalty": 1.4},
    "greedy repetition": {"repetition_penalty": 1.8, "greedy": True},
    "no early end": {"min_tokens": 10, "eos_ids": [END], "greedy": True},
    "encouraged": {"repetition_penalty": 0.7, "greedy": True},
    "all": {
        "repetition_penalty": 1.2,
        "temperature": 2.0,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "use_cache"), [("temperature", True), ("all", True), ("all", False)]
)
def test_batches_with_one_setting(name, use_cache):
    """All rows of a batch have one setting in common, so less code is compiled than for mixed
    batches.
    """
    model, settings = builder.model(), SETTINGS[name]
    tokens, lengths = builder.padded(PROMPTS)
    out = generate(
        model, tokens, STEPS, prompt_lengths=lengths, seed=11, use_cache=use_cache, **settings
    )
    for row, prompt in zip(out, PROMPTS, strict=True):
        assert row[len(prompt) : len(prompt) + STEPS].tolist() == builder.slowly(
            model, prompt, STEPS, seed=11, **settings
        )


FEW = {
    name: settings
    for name, settings in SETTINGS.items()
    if not {"top_p", "min_p"} & settings.keys()
}


@pytest.mark.parametrize(
    "kinds", [FEW, pytest.param(SETTINGS, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_every_setting_in_one_batch(kinds):
    """Each row of a batch with different lengths, settings, seeds and limits has the same tokens as
    when it runs alone.
    """
    model = builder.model(builder.ONE_LAYER)
    rows = [settings | {"seed": 7 + b} for b, settings in enumerate(kinds.values())]
    prompts = builder.prompts(*(1 + b % 9 for b in range(len(rows))), seed=3)
    limits = np.array([1 + 5 * b % 23 for b in range(len(rows))])
    tokens, lengths = builder.padded(prompts)
    eos_ids = [row.pop("eos_ids", []) for row in rows]
    params = SamplingParams.build(rows, stop_ids=[END])
    session = StaticBatch(
        model,
        tokens,
        lengths,
        params,
        limits_B=limits,
        eos_ids=eos_ids,
        options=StaticOptions(report=4),
    )
    said: list[list[int]] = [[] for _ in rows]
    infos: list = [[] for _ in rows]
    chunk = session.start()
    while True:
        for b, count in enumerate(chunk.counts):
            said[b] += chunk.tokens[b, :count].tolist()
            infos[b].append(jax.tree.map(lambda x, b=b, count=count: x[b, :count], chunk.info))
        if chunk.done.all():
            break
        chunk = session.advance(7)
    for (name, settings), text, prompt, row, limit in zip(
        kinds.items(), said, prompts, rows, limits, strict=True
    ):
        assert text == builder.slowly(model, prompt, limit, **settings | row), name
        if name == "top_k and a tiny top_p":  # version 0 ignored top_p together with top_k
            assert text == builder.slowly(model, prompt, limit, greedy=True)
    number = [*kinds].index("top_k")
    info = jax.tree.map(lambda *parts: np.concatenate(parts), *infos[number])
    check_log_probabilities(model, prompts[number], said[number], info, temperature=2.5, top_k=5)


def check_log_probabilities(model, prompt, text, info, temperature, top_k):
    """Compares the log-probabilities before and after the chain with those in float64."""
    assert len(text) > 10
    logits = builder.all_logits(model, [*prompt, *text]).astype(np.float64)[len(prompt) - 1 : -1]
    plain = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    cut = np.where(logits >= np.sort(logits)[:, -top_k][:, None], logits / temperature, -np.inf)
    after = cut - np.log(np.exp(cut).sum(-1, keepdims=True))
    steps, tolerance = np.arange(len(text)), {"rtol": 0, "atol": builder.LOGPROB_TOLERANCE}
    np.testing.assert_allclose(info.logprob, plain[steps, text], **tolerance)
    np.testing.assert_allclose(info.logprob_sampled, after[steps, text], **tolerance)
    np.testing.assert_allclose(info.top_logprobs, np.sort(plain)[:, ::-1][:, :4], **tolerance)


WIDE = 5003  # a vocabulary large enough for windows
CHAINS = {
    "plain": {},
    "greedy": {"greedy": True, "top_k": 7},
    "greedy penalties": {"temperature": 0.0, "presence_penalty": 2.5, "frequency_penalty": 0.7},
    "dynamic temperature": {"dynatemp_low": 0.4, "dynatemp_high": 1.6, "dynatemp_exponent": 0.7,
                            "top_k": 30},
    "smoothing": {"smoothing_factor": 0.3, "smoothing_curve": 1.6, "min_p": 0.01},
    "top_k": {"top_k": 40, "temperature": 1.3},
    "wider than the window": {"top_k": 1500, "top_p": 0.99},
    "top_p": {"top_p": 0.7, "temperature": 0.9},
    "min_p and xtc": {"min_p": 0.02, "xtc_probability": 0.6, "xtc_threshold": 0.1},
    "top_a": {"top_a": 0.2, "repetition_penalty": 1.3, "repetition_range": 6,
              "repetition_slope": 2.0},
    "tail_free": {"tail_free": 0.6},
    "typical": {"typical": 0.6, "top_k": 100},
    "typical alone": {"typical": 0.8},
    "epsilon": {"epsilon_cutoff": 0.004},
    "eta": {"eta_cutoff": 0.01},
    "sigma": {"top_n_sigma": 1.5},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 3.0},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.3, "temperature": 1.2},
    "min_k": {"min_k": 3.0},
    "p-less": {"p_less": "plain", "temperature": 1.5},
    "p-less-norm": {"p_less": "norm", "encoder_repetition_penalty": 1.3},
    "top_h": {"top_h": 0.6},
    "skew": {"skew": 0.7, "top_k": 30},
    "skew alone": {"skew": -0.7},
    "adaptive-p": {"adaptive_target": 0.3, "adaptive_decay": 0.8, "min_p": 0.05},
    "adaptive-p alone": {"adaptive_target": 0.05},
    "watermark": {"watermark_keys": [4, 9, 1], "watermark_ngram": 3, "top_p": 0.9},
    "watermark and adaptive-p": {"watermark_keys": [4, 9, 1], "adaptive_target": 0.2, "top_k": 60},
    "presence": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "top_k": 20},
    "n-grams": {"no_repeat_ngram": 2, "greedy": True},
    "dry": {"dry_multiplier": 2.0, "dry_base": 1.5, "dry_allowed_length": 1, "dry_range": 20,
            "dry_breakers": [9], "top_k": 5},
    "bias": {"logit_bias": {"5": 9.0, "6": -float("inf"), "7": 4.0}, "top_k": 9},
    "allowed": {"allowed_tokens": list(range(40)), "banned_tokens": [3, 4]},
    "bad words": {"bad_words": [[1], [2, 3], [4, 5, 6]], "allowed_tokens": list(range(8)),
                  "temperature": 2.0},
    "all at once": {
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1,
        "temperature": 1.1,
        "smoothing_factor": 0.1,
        "top_k": 200, "top_p": 0.98, "min_p": 0.001, "top_a": 0.01, "tail_free": 0.98,
        "typical": 0.97, "epsilon_cutoff": 1e-4, "eta_cutoff": 1e-4, "top_n_sigma": 3.0,
        "xtc_probability": 0.5, "xtc_threshold": 0.3,
    },
}  # fmt: skip


def decoded(model, rows, prompts, steps):
    """Returns the continuations of one batch in which each row has its own settings."""
    tokens, lengths = builder.padded(prompts)
    params = SamplingParams.build(rows, vocab_size=model.config.vocab_size)
    session = StaticBatch(
        model, tokens, lengths, params, limits_B=np.full(len(rows), steps), eos_ids=[[]] * len(rows)
    )
    chunks = [session.start()]
    while not chunks[-1].done.all():
        chunks.append(session.advance())
    return np.concatenate(
        [chunk.tokens[:, : chunk.counts.max()] for chunk in chunks], axis=1
    ).tolist()


@pytest.mark.slow
def test_every_chain_in_one_batch():
    """Tokens equal those of steps on the host with the same random draws. Most rows use their
    window, some leave it.
    """
    model = builder.model(builder.config(vocab_size=WIDE))
    prompts = builder.prompts(*(2 + b % 7 for b in range(len(CHAINS))), seed=5)
    rows = [settings | {"seed": 50 + b} for b, settings in enumerate(CHAINS.values())]
    texts = decoded(model, rows, prompts, 14)
    for name, row, prompt, text in zip(CHAINS, rows, prompts, texts, strict=True):
        assert text == builder.slowly(model, prompt, 14, **row), name


@pytest.mark.slow  # tests/sampling/test_window.py has orders of all kinds
@pytest.mark.parametrize(
    ("settings", "order"),
    [
        (
            {"preset": "kobold"},
            (
                "repetition_penalty",
                "top_k",
                "top_a",
                "top_p",
                "tail_free",
                "typical",
                "temperature",
            ),
        ),
        (
            {"preset": "kobold", "sampler_order": [5, 4, 3, 2, 1, 0, 6]},
            (
                "temperature",
                "typical",
                "tail_free",
                "top_p",
                "top_a",
                "top_k",
                "repetition_penalty",
            ),
        ),
        (
            {
                "sampler_order": [
                    "top_p",
                    "repetition_penalty",
                    "temperature",
                    "top_k",
                    "typical",
                    "top_a",
                    "tail_free",
                ]
            },
            None,
        ),
    ],
)
def test_other_orders(settings, order):
    model = builder.model(builder.config(vocab_size=WIDE))
    common = settings | {"top_k": 60, "top_p": 0.9, "temperature": 1.4}
    kobold = {"top_a": 0.05, "typical": 0.9, "repetition_penalty": 1.5}
    rows = [
        common | {"seed": 3},
        common | kobold | {"seed": 4},
        settings | kobold | {"seed": 5, "tail_free": 0.7},
    ]
    prompts = builder.prompts(4, 6, 3, seed=6)
    for row, prompt, text in zip(rows, prompts, decoded(model, rows, prompts, 10), strict=True):
        assert text == builder.slowly(
            model, prompt, 10, order=order or settings["sampler_order"], **row
        )


@pytest.mark.slow
def test_the_tokens_of_a_seed_do_not_depend_on_the_batch():
    """The samples of one prompt are adjacent, and prompts of different lengths share the batch."""
    model, settings = builder.model(builder.ONE_LAYER), {"temperature": 2.0, "seed": 2**32 - 1}
    tokens, lengths = builder.padded(PROMPTS[:2])
    out = generate(model, tokens, STEPS, prompt_lengths=lengths, n=2, **settings)
    assert out.shape == (4, 9 + STEPS)
    starts = [len(prompt) for prompt in PROMPTS[:2] for _ in range(2)]
    texts = [row[start : start + STEPS].tolist() for row, start in zip(out, starts, strict=True)]
    expected = [
        builder.slowly(model, prompt, STEPS, sample=i, **settings)
        for prompt in PROMPTS[:2]
        for i in range(2)
    ]
    assert texts == expected and len(set(map(tuple, texts))) == 4
    copies = generate(model, [PROMPTS[0]] * 2, STEPS, n=2, **settings)[:, 5:].tolist()
    assert copies == expected[:2] * 2, "the same seed and prompt give the same tokens"
    for number in range(2):
        alone = generate(model, [PROMPTS[number]], STEPS, **settings)
        assert alone[0, len(PROMPTS[number]) :].tolist() == expected[2 * number], (
            "the first sample equals a single one"
        )


def test_each_call_without_a_seed_draws_and_reports_one():
    model = builder.model(builder.ONE_LAYER)
    runs = [
        generate(model, [PROMPTS[0]], STEPS, temperature=3.0, return_info=True) for _ in range(3)
    ]
    assert len({details["seed"] for _, details in runs}) == 3
    assert len({tuple(out[0]) for out, _ in runs}) == 3
    for out, details in runs:
        again = generate(model, [PROMPTS[0]], STEPS, temperature=3.0, seed=details["seed"])
        assert again.tolist() == out.tolist()
