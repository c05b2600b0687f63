"""Compares beam search with a search in NumPy over the logits of whole sequences, and with all
sequences.
"""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.config import Config, LatentConfig, UserError, overlay
from dantinox.generation import load
from dantinox.generation.api.beam_search import BeamRules, BeamRun, Beams, extend
from dantinox.generation.api.generate_ids import _IdsModel
from dantinox.generation.decode.generate_toks import prefill_prompts
from dantinox.generation.guides.constraints import Constraint
from dantinox.sampling import process_logits

from . import builder

K, N, STEPS = 4, 3, 8
PROMPTS = builder.prompts(5, 9, 2, 7, 4, 6, 3, 8)
ENDS = [2, 22, 31, 43, 54, 58, 63]
# One row per combination, so that a single program serves all of them.
ROWS = [
    {
        "length_penalty": penalty,
        "early_stopping": early,
        "stop_token_ids": ends,
        "max_new_tokens": steps,
    }
    for (penalty, early), ends, steps in zip(
        [
            (1.0, False),
            (1.0, True),
            (1.0, "never"),
            (0.0, False),
            (2.5, "never"),
            (-1.5, True),
            (-1.0, "never"),
            (0.6, True),
        ],
        [ENDS, ENDS, ENDS, ENDS[:3], ENDS, ENDS[2:], ENDS, []],
        [STEPS, STEPS, STEPS, STEPS, STEPS, 5, STEPS, 1],
        strict=True,
    )
]


def reference(logprobs, beams, ends, limit, penalty=1.0, early=False):
    """Returns the complete sequences of a beam search as (score, tokens), best first.

    `logprobs` maps the new tokens to the log-probabilities of the next one.
    """
    open_beams, complete = [(0.0, ())], []
    for length in range(1, limit + 1):
        extended = [
            (total + step, (*tokens, v))
            for total, tokens in open_beams
            for v, step in enumerate(logprobs(tokens))
        ]
        extended.sort(key=lambda pair: -pair[0])
        is_end = [tokens[-1] in ends or length == limit for _, tokens in extended]
        complete += [
            (total / length**penalty, tokens)
            for (total, tokens), end in zip(extended[:beams], is_end, strict=False)
            if end and total > -np.inf
        ]
        complete = sorted(complete, key=lambda pair: -pair[0])[:beams]
        open_beams = [pair for pair, end in zip(extended, is_end, strict=True) if not end][:beams]
        if len(complete) == beams and open_beams:
            reached = limit if early == "never" and penalty > 0 else length
            if early is True or open_beams[0][0] / reached**penalty <= complete[-1][0]:
                break
    return complete


def row_logprobs(model, prompt, **settings):
    steps = builder.steps_of(settings, builder.PENALTIES, ENDS, 0.0)

    @cache
    def logprobs(tokens):
        logits_1V = builder.all_logits(model, [*prompt, *tokens])[-1:]
        return builder.log_softmax(
            process_logits(logits_1V, steps, [prompt], [list(tokens)])[0] if steps else logits_1V[0]
        )

    return logprobs


def searched(model, prompts, rows, kind=BeamRun, **shared):
    """Returns the results per prompt as lists of (score, tokens)."""
    run = _IdsModel(Config(), model, [], None, False)
    base = {"num_beams": K, "n": N} | shared
    requests = [
        run.request(prompt, overlay(Config(), base | row))
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    results = run.complete(requests)
    n = base["n"]
    return [
        [(result.score, tuple(result.tokens)) for result in results[i : i + n]]
        for i in range(0, len(results), n)
    ]


def assert_equal(found, expected):
    assert [tokens for _, tokens in found] == [tokens for _, tokens in expected]
    np.testing.assert_allclose(
        [score for score, _ in found], [score for score, _ in expected], rtol=1e-6, atol=1e-5
    )


def test_rows_equal_a_search_in_numpy():
    model = builder.model(builder.ONE_LAYER)
    lengths = set()
    for prompt, row, found in zip(PROMPTS, ROWS, searched(model, PROMPTS, ROWS), strict=True):
        expected = reference(
            row_logprobs(model, prompt), K, row["stop_token_ids"], row["max_new_tokens"],
            row["length_penalty"],
            row["early_stopping"],
        )  # fmt: skip
        assert_equal(found, expected[:N])
        lengths |= {len(tokens) for _, tokens in found}
    assert len(lengths) > 4, "the sequences end at different lengths"


TINY, END = builder.config(vocab_size=5, windows=(None,)), 2


def test_all_beams_are_an_exhaustive_search():
    """With as many beams as there are sequences, the result is all complete sequences in the order
    of their scores.
    """
    V, depth, presence = TINY.vocab_size, 3, 0.7
    model, prompt = builder.model(TINY), [1, 4, 0]

    @cache
    def logprobs(tokens):
        return builder.log_softmax(
            builder.all_logits(model, [*prompt, *tokens])[-1]
            - presence * np.isin(np.arange(V), tokens)
        )

    every = [
        tokens
        for length in range(1, depth + 1)
        for tokens in itertools.product(range(V), repeat=length)
        if END not in tokens[:-1] and (tokens[-1] == END or length == depth)
    ]
    scored = [
        (
            sum(logprobs(tokens[:i])[token] for i, token in enumerate(tokens)) / len(tokens) ** 0.8,
            tokens,
        )
        for tokens in every
    ]
    row = {
        "length_penalty": 0.8,
        "early_stopping": "never",
        "stop_token_ids": [END],
        "max_new_tokens": depth,
    }
    row |= {"presence_penalty": presence}
    (found,) = searched(model, [prompt], [row], num_beams=V**depth, n=len(every))
    assert_equal(found, sorted(scored, key=lambda pair: -pair[0]))
    with pytest.raises(UserError, match=f"but beam search found only {len(every)} continuations"):
        searched(model, [prompt], [row], num_beams=V**depth, n=len(every) + 1)


def test_one_beam_is_greedy_decoding():
    model, prompts, steps = builder.model(TINY), [[1, 4, 0], [3], [0, 0, 1, 3]], 6
    run = _IdsModel(Config(), model, [END], None, False)
    search = BeamRun(
        run, [run.request(prompt, {"max_new_tokens": steps}) for prompt in prompts], range(3)
    )
    assert len([*search.parts()]) == 3
    for prompt, result in zip(prompts, search.results, strict=True):
        assert result.tokens == builder.slowly(model, prompt, steps, greedy=True, eos_ids=[END])
        assert result.finish_reason == ("eos" if result.tokens[-1] == END else "length")


EDITS = [
    {"repetition_penalty": 1.3, "no_repeat_ngram": 2},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {"5": 4.0, "6": -np.inf}},
    {"bad_words": [[1], [54, 54]], "min_tokens": 4, "allowed_tokens": [*range(60)]},
]


@pytest.mark.slow
def test_edits_and_penalties_change_the_log_probabilities():
    model, rows = (
        builder.model(),
        [row | {"stop_token_ids": ENDS, "max_new_tokens": 6} for row in EDITS],
    )
    for prompt, row, found in zip(PROMPTS, rows, searched(model, PROMPTS[:3], rows), strict=False):
        logprobs = row_logprobs(model, prompt, **row)
        assert_equal(found, reference(logprobs, K, ENDS, 6)[:N])


CACHES = {
    "ring": ({"windows": (4, None)}, {}),
    "latent": ({"latent": LatentConfig(12, 4, 6, query_rank=10), "kv_heads": 4}, {}),
    "shared keys": ({"windows": (4, 4, 4, 4), "kv_shared_layers": 2}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
def test_rows_equal_a_search_in_numpy_with_other_caches(name):
    changes, settings = CACHES[name]
    model = builder.model(builder.config(**changes))
    rows = [settings | {"stop_token_ids": ENDS, "max_new_tokens": STEPS}] * 3
    for prompt, found in zip(PROMPTS[:3], searched(model, PROMPTS[:3], rows), strict=True):
        assert_equal(found, reference(row_logprobs(model, prompt), K, ENDS, STEPS)[:N])


LOSSY = {
    "int8": {"kv_dtype": "int8"},
    "int4": {"kv_dtype": "int4"},
    "evicting": {"kv_budget_tokens": 16, "kv_recent": 8, "kv_sinks": 2, "kv_policy": "tova"},
    "averaging": {"kv_budget_tokens": 16, "kv_recent": 8, "kv_sinks": 2, "kv_policy": "h2o"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_cache_follows_its_beam(name):
    """The score of a sequence is the sum of the log-probabilities that decoding this sequence alone
    gives with the cache.
    """
    model, prompt, steps = builder.model(builder.config(max_context=96)), builder.prompts(40)[0], 24
    (found,) = searched(model, [prompt], [{"max_new_tokens": steps}], **LOSSY[name])
    run = _IdsModel(Config(), model, [], None, False)
    settings = {"num_beams": K, "n": N, "max_new_tokens": steps, **LOSSY[name]}
    plan = BeamRun(run, [run.request(prompt, settings)], [0])._plan
    for score, tokens in found:
        np.testing.assert_allclose(
            score, decoded_logprob(model, prompt, tokens, plan) / steps, rtol=1e-5
        )


def decoded_logprob(model, prompt, tokens, plan):
    """Returns the log-probability of tokens that are decoded one by one after a prompt."""
    prompt_1T = jnp.asarray([prompt]), jnp.asarray([len(prompt) - 1])
    _, kv_cache = jax.jit(lambda: prefill_prompts(model, prompt_1T, plan))()

    @jax.jit
    def step(kv_cache, token, position):
        x_11D, kv_cache, _ = model.hidden(token[None, None], position[None, None], cache=kv_cache)
        return model.logits(x_11D[:, 0]), kv_cache

    total = 0.0
    for i, (read, token) in enumerate(zip([prompt[-1], *tokens], tokens, strict=False)):
        logits_1V, kv_cache = step(kv_cache, jnp.int32(read), jnp.int32(len(prompt) - 1 + i))
        total += builder.log_softmax(logits_1V[0])[token]
    return total


@pytest.mark.slow
def test_the_extensions_are_selected_without_a_sort(optimized):
    """XLA must not sort all K · V extensions."""
    P, V = 2, 5000
    rules = BeamRules.build([Config()] * P, [9] * P, [[1]] * P)
    logits_RV = jax.ShapeDtypeStruct((P * K, V), jnp.float32)
    compiled = optimized(jax.jit(extend).lower(Beams.empty(P, K, 16), logits_RV, rules)).as_text()
    assert "TopK" in compiled and f"{K * V}]{{" not in "".join(
        line for line in compiled.splitlines() if " sort(" in line
    )


REFUSED = {
    "a temperature": (
        {"temperature": 0.5},
        "generation.temperature cannot be used with generation.num_beams",
    ),
    "a filter": ({"top_k": 3}, "generation.top_k cannot be used with generation.num_beams"),
    "a watermark": (
        {"watermark_keys": [3]},
        "generation.watermark_keys cannot be used with generation.num_beams",
    ),
    "greedy": (
        {"greedy": True},
        "generation.greedy must be false, got true, with generation.num_beams",
    ),
    "the router": (
        {"strategy": "entropy"},
        "generation.strategy must be chain, got entropy, with generation.num_beams",
    ),
    "stop strings": ({"stop": ["a"]}, "generation.stop must be empty with generation.num_beams"),
    "drafts": (
        {"speculation": "ngram"},
        "generation.speculation must be off, got ngram, with generation.num_beams",
    ),
    "no cache": (
        {"use_cache": False},
        "generation.use_cache must be true, got false, with generation.num_beams",
    ),
    "too many results": ({"n": 5}, "generation.n must be at most generation.num_beams, 4, got 5"),
    "no tokens": (
        {"max_new_tokens": 0},
        "generation.max_new_tokens must be at least 1 with generation.num_beams, got 0",
    ),
    "no beams": ({"num_beams": 0}, "generation.num_beams must be an integer in [1, 256], got 0"),
    "a penalty without beams": (
        {"num_beams": 1, "length_penalty": 2},
        "generation.length_penalty has no effect while",
    ),
    "another word": ({"early_stopping": "often"}, "generation.early_stopping must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_beam_search_does_not_support_are_refused(name):
    settings, words = REFUSED[name]
    with pytest.raises(UserError) as error:
        overlay(Config(), {"num_beams": K} | settings)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_beams_replace_the_random_steps_of_a_run():
    base = overlay(Config(), {"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.2})
    section = overlay(base, {"num_beams": K}).generation
    assert (section.temperature, section.top_k, section.repetition_penalty) == (1.0, None, 1.2)
    with pytest.raises(UserError, match="top_k cannot be used"):
        overlay(base, {"num_beams": K, "top_k": 3})
    with pytest.raises(UserError, match="watermark_keys cannot be used"):
        overlay(overlay(Config(), {"watermark_keys": [3]}), {"num_beams": K})


def test_requests_that_beam_search_does_not_support_are_refused(run_dir):
    run = load(run_dir)
    for given in (
        {"logprobs": 1},
        {"constraint": Constraint("regex", "a*")},
        {"score_fn": lambda *_: 0},
    ):
        with pytest.raises(
            UserError, match=rf"num_beams must be 1 with .*{next(iter(given))}.*, got 2"
        ):
            run.generate("a", num_beams=2, **given)
    with pytest.raises(UserError, match="num_beams must be 1 in a stream"):
        run.stream("a", num_beams=2)
    with pytest.raises(UserError, match="num_beams must be 1 in a server, got 2"):
        builder.make_slots(run, 1, 64).program_key(run.settings({"num_beams": 2}))


def test_texts_have_scores():
    """The stop token is not part of the text, but of the tokens; results are ordered by their
    scores.
    """
    run = builder.circle(end=True)
    first, second = run.generate("a", num_beams=2, n=2, max_new_tokens=20)
    assert (first.text, first.finish_reason) == ("è€😀b\nc", "eos") and first.tokens[
        -1
    ] == run.tokenizer.eos_id
    assert 0 > first.score > second.score and first.to_dict()["score"] == first.score
    assert first.stats["new_tokens"] == len(first.tokens)
