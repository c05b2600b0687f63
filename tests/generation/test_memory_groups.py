"""Batches that need more memory than is free are divided."""

import gc
import weakref

import jax
import numpy as np
import pytest

from dantinox.config import UserError
from dantinox.generation.api import memory_groups
from dantinox.generation.api.memory_groups import DividedRun, divide, fitting_rows
from dantinox.generation.run_timer import Times
from dantinox.generation.static_batch import padded_length

from . import builder

PROMPTS = ["abc", "ab", "abcd"]


def row_bytes(model, request):
    """Returns the bytes of one row by hand: keys and values of every layer in float32, and eight
    arrays over the vocabulary.
    """
    c = model.model.config
    slots = padded_length(len(request.ids) + request.config.generation.max_new_tokens)
    return 4 * (c.num_blocks * 2 * c.kv_heads * c.head_size * slots + 8 * c.vocab_size)


@pytest.fixture
def memory(monkeypatch):
    """Returns a function that limits the free memory to that of `rows` rows of a request, and half
    a row; prompts need none.

    A quarter of the free memory is left to the compiler, and a tenth of the rest is not used. While
    the prompts are computed, each of them has a second cache.
    """
    monkeypatch.setattr(memory_groups, "_activation_bytes", lambda _: 0)

    def limit(model, request, rows):
        prompts = -(-rows // request.config.generation.n)
        free = (rows + prompts + 0.5) * row_bytes(model, request) / (0.75 * 0.9)
        monkeypatch.setattr(memory_groups, "free_bytes", lambda: int(free))

    return limit


@pytest.mark.parametrize(("n", "rows", "batches"), [(1, 3, 1), (1, 2, 2), (4, 5, 3), (5, 2, 9)])
def test_divided_batches_give_the_same_results(memory, n, rows, batches):
    model = builder.circle()
    settings = {"max_new_tokens": 6, "temperature": 2.0, "seed": 3, "n": n}
    requests = [model.request(prompt, settings) for prompt in PROMPTS]
    whole = model.complete(requests)
    memory(model, requests[0], rows)
    runs = model.start(requests)
    (run,) = runs
    assert (len(run._starts) if isinstance(run, DividedRun) else 1) == batches
    divided = model.complete(requests)
    assert len(divided) == 3 * n
    fields = ("prompt", "text", "tokens", "finish_reason", "seed", "settings")
    for one, other in zip(whole, divided, strict=True):
        assert [getattr(one, name) for name in fields] == [getattr(other, name) for name in fields]


def test_parts_and_times_of_a_divided_run(memory):
    model = builder.circle()
    request = model.request("abc", {"max_new_tokens": 6, "temperature": 2.0, "seed": 3, "n": 5})
    memory(model, request, 2)
    (run,) = model.start([request])
    texts = [""] * 5
    for row, part in run.parts():
        texts[row] += part.text
    assert texts == [result.text for result in run.results]
    assert run.times.total == pytest.approx(
        sum({result.stats["seconds"] for result in run.results})
    )
    assert run.summary().startswith("decoded in 3 batches, because")
    assert run.summary().count("\n") == 3


def test_a_finished_batch_frees_its_cache(memory):
    """Otherwise two caches would exist while the next batch runs."""
    model = builder.circle()
    shape = (3, model.model.config.kv_heads, 48, model.model.config.head_size)
    requests = [model.request(prompt, {"max_new_tokens": 45}) for prompt in PROMPTS]
    (run,) = model.start(requests, slots=48)
    gc.disable()
    try:
        for _ in run.parts():
            pass
        assert shape not in [array.shape for array in jax.live_arrays()]
    finally:
        gc.enable()


def test_a_finished_batch_is_released_before_the_next_one_is_created():
    """Its arrays would otherwise stay until a garbage collection, because an engine and its
    functions refer to each other.
    """
    created = []

    class Batch:
        times, results = Times(), []

        def __init__(self):
            assert all(reference() is None for reference in created)
            self.itself = self
            created.append(weakref.ref(self))

        def parts(self):
            return iter(())

        def summary(self):
            return ""

    assert list(DividedRun([Batch, Batch, Batch], [0, 0, 0]).parts()) == [] and len(created) == 3


def test_callers_that_control_chunks_or_slots_get_one_batch(memory):
    model = builder.circle()
    requests = [model.request(prompt, {"max_new_tokens": 6}) for prompt in PROMPTS]
    memory(model, requests[0], 1)
    for options in ({"steps": 1}, {"slots": 32}):
        (run,) = model.start(requests, **options)
        assert not isinstance(run, DividedRun)


def test_a_row_that_does_not_fit_is_one_sentence(memory):
    model = builder.circle()
    request = model.request("abc", {"max_new_tokens": 100})
    memory(model, request, 0)
    with pytest.raises(
        UserError,
        match=r"^one text of 128 tokens needs 0\.00 GB for its cache and its prompt, and 0\.00 of",
    ):
        model.generate("abc", max_new_tokens=100)


def test_guide_rows_and_quantized_and_compressed_caches_count(memory):
    model = builder.circle()
    plain = model.request("abc", {"max_new_tokens": 100})
    memory(model, plain, 8)
    rows = fitting_rows(model, [plain], padded_length)
    assert rows == 8
    guided = model.request("abc", {"max_new_tokens": 100, "guidance_scale": 2.0})
    assert fitting_rows(model, [guided], padded_length) == rows // 2
    drafted = model.request(
        "abc", {"max_new_tokens": 100, "speculation": "ngram", "draft_tokens": 15}
    )
    assert fitting_rows(model, [drafted], padded_length) < rows, "logits of 16 tokens"
    beams = model.request("abc", {"max_new_tokens": 100, "num_beams": 2})
    one, vocabulary = row_bytes(model, plain), 4 * 8 * model.model.config.vocab_size
    assert fitting_rows(model, [beams], padded_length) == int(8.25 * one) // (
        2 * one - vocabulary
    ), "a copy of the cache"
    for settings in ({"kv_dtype": "int8"}, {"kv_budget": 0.5}):
        assert (
            fitting_rows(
                model, [model.request("abc", {"max_new_tokens": 100} | settings)], padded_length
            )
            > rows
        )


def test_prompts_and_decoding_without_a_cache_need_activations(monkeypatch):
    """A token of the circle has five arrays of the hidden size and eight states in float32."""
    model = builder.circle()
    c = model.model.config
    token = 4 * (5 * c.hidden_dim + 8 * c.dim)
    request = model.request("abc", {"max_new_tokens": 100})
    samples = model.request("abc", {"max_new_tokens": 100, "n": 5})
    recomputed = model.request("abc", {"max_new_tokens": 100, "use_cache": False})
    row, decoded = row_bytes(model, request), 2 * 128 * token + 32 * c.vocab_size

    def fitting(request, usable):
        monkeypatch.setattr(memory_groups, "free_bytes", lambda: int(usable / (0.75 * 0.9)) + 2)
        return fitting_rows(model, [request], padded_length)

    # 1,024 prompts of 16 tokens are computed together, each with a cache of its own.
    assert [fitting(request, 5 * (2 * row + 16 * token) + extra) for extra in (0, -100)] == [5, 4]
    assert [fitting(samples, 5 * row + row + 16 * token + extra) for extra in (0, -100)] == [5, 4]
    assert [fitting(recomputed, 3 * (decoded + 16 * token) + extra) for extra in (0, -100)] == [
        3,
        2,
    ]
    # Two prompts are computed together: two caches each besides those of all rows.
    monkeypatch.setattr(memory_groups, "PREFILL_BATCH_TOKENS", 32)
    assert [
        fitting(request, 7 * row + 2 * (2 * row + 16 * token) + extra) for extra in (0, -100)
    ] == [7, 6]


def test_reports_count(monkeypatch):
    """100 tokens of 4 samples with 31 alternatives keep at least 12,400 log-probabilities of 8
    bytes.
    """
    model = builder.circle()
    request = model.request("abc", {"max_new_tokens": 100, "n": 4}, logprobs=31)
    monkeypatch.setattr(memory_groups, "free_bytes", lambda: 12_400 * 8)
    with pytest.raises(
        UserError,
        match=(
            r"^31 log-probabilities of each of 400 tokens need 0\.0 GB, and 0\.0 GB of memory are"
        ),
    ):
        model.start([request])


def test_every_sample_is_in_exactly_one_batch():
    random, model = np.random.default_rng(0), builder.circle()
    for _ in range(50):
        count, n, rows = (int(random.integers(1, most)) for most in (9, 12, 20))
        request = model.request("abc", {"n": n})
        parts = divide([request] * count, range(count), rows)
        found = [
            (number, sample)
            for _, numbers, samples in parts
            for number in numbers
            for sample in samples
        ]
        assert sorted(found) == [(number, sample) for number in range(count) for sample in range(n)]
        assert [number for number, _ in found] == sorted(number for number, _ in found)
        assert all(len(numbers) * len(samples) <= rows for _, numbers, samples in parts)


def test_beams_are_not_divided():
    request = builder.circle().request("abc", {"num_beams": 4})
    assert len(divide([request] * 3, range(3), 8)) == 2
    with pytest.raises(UserError, match=r"generation\.num_beams is 4, but only 3 beams fit"):
        divide([request], [0], 3)
