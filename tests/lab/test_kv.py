"""The comparison of compressed caches: numbers against NumPy, texts against the tokenizer, and a
complete toy study.
"""

import json
import random
from dataclasses import asdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from generation import builder

from dantinox.cli import main
from dantinox.config import TokenizerSection, UserError, build_config
from dantinox.generation import load
from dantinox.generation.decode.prepared_model import permute_heads, prepare
from dantinox.lab.measure import head_loss as eviction
from dantinox.lab.studies import kv_bench, kv_study, kv_variants, statistics
from dantinox.lab.studies.continuations import NEUTRAL_SETTINGS
from dantinox.lab.studies.kv_bench import CacheBenchmark, Generated, ReadMetrics, read_metrics
from dantinox.lab.studies.kv_study import (
    KV_METHODS,
    LARGE_METHODS,
    _agreement,
    _loss_metrics,
    default_signal,
    evaluate_kv,
    gap_closed,
    intervals_by_seed,
)
from dantinox.lab.studies.kv_tasks import (
    Sequences,
    draw_sequences,
    draw_tasks,
    encodes_words,
    split_by_seed,
)
from dantinox.lab.studies.kv_variants import (
    NEAR_KEYS,
    build_variants,
    near_keys_variant,
    select_methods,
)
from dantinox.lab.studies.kv_view import kv_blocks
from dantinox.lab.studies.ruler_study import RULER_METHODS
from dantinox.lab.studies.statistics import mean_interval
from dantinox.model import Transformer
from dantinox.model.parameters import abstract_model
from dantinox.report.document import to_lines
from dantinox.run import (
    KVCalibration,
    create_run,
    head_names,
    open_run,
    save_config,
    save_kv_calibration,
    save_tokenizer,
    save_weights,
)
from dantinox.text import BatchOptions, TokenStore, open_store, prepare_data, train_tokenizer
from dantinox.text import builtin_recall as recall
from tests.error_texts import ERRORS

SEEDS_S = np.repeat([0, 1, 2], 20)


# --- numbers --------------------------------------------------------------------------------------


def random_metrics(seed, size=60):
    random = np.random.default_rng(seed)
    return ReadMetrics(random.normal(2, 0.3, size), random.random(size) / 10, random.random(size))


def by_hand(values, statistic):
    """Returns a statistic and its 95 % interval over 2,000 resamples, with percentiles interpolated
    by hand.
    """
    draws = np.random.default_rng(0)
    found = sorted(
        statistic(values[..., draws.integers(values.shape[-1], size=values.shape[-1])])
        for _ in range(2000)
    )
    ends = []
    for place in (0.025 * 1999, 0.975 * 1999):
        low = int(place)
        ends.append(found[low] + (place - low) * (found[low + 1] - found[low]))
    return [statistic(values), *ends]


def test_perplexity_kl_and_agreement_are_those_of_numpy_with_paired_intervals():
    own, full = random_metrics(1), random_metrics(2)
    metrics = _loss_metrics(own, full, SEEDS_S)
    worse = own.loss_B - full.loss_B
    assert metrics["loss"] == pytest.approx(own.loss_B.mean())
    assert metrics["dppl"].all[0] == pytest.approx(
        100 * (np.exp(own.loss_B.mean()) / np.exp(full.loss_B.mean()) - 1)
    )
    for scope, of in [
        ("all", slice(None)),
        *((seed, np.arange(60) // 20 == seed) for seed in range(3)),
    ]:
        dppl, kl, top1 = (
            metrics[key].all if scope == "all" else metrics[key].seeds[scope]
            for key in ("dppl", "kl", "top1")
        )
        # exp is nearly linear between two resamples, so the order of interpolation and exp does not
        # matter.
        assert dppl == pytest.approx(
            by_hand(worse[of], lambda x: 100 * (np.exp(x.mean()) - 1)), rel=1e-3
        )
        assert kl == pytest.approx(by_hand(own.kl_B[of], np.mean)) and top1 == pytest.approx(
            by_hand(100 * own.top1_B[of], np.mean)
        )


def test_losses_are_means_over_the_tokens_after_the_prompt():
    random = np.random.default_rng(5)
    tokens, start = random.integers(0, 7, (3, 12)), 5
    logprobs = -random.random((3, 12 - start + 1, 7))
    expected = [
        -np.mean([logprobs[b, t - start, tokens[b, t]] for t in range(start, 12)]) for b in range(3)
    ]
    found = read_metrics(jnp.asarray(logprobs), jnp.asarray(logprobs), tokens, start)
    np.testing.assert_allclose(found.loss_B, expected, rtol=1e-5)
    assert found.kl_B.tolist() == [0, 0, 0] and found.top1_B.tolist() == [1, 1, 1]


def test_the_gap_is_a_ratio_of_mean_losses():
    random = np.random.default_rng(5)
    base = random.normal(2, 0.5, 60)
    loss = {
        "streaming": base + 0.4,
        "oracle": base + random.normal(0.1, 0.05, 60),
        "uniform": base + 0.2,
    }
    stacked = np.stack([loss["streaming"], loss["uniform"], loss["oracle"]])
    found = gap_closed(loss, "uniform")
    assert found == pytest.approx(
        by_hand(stacked, lambda x: 100 * (x[0] - x[1]).mean() / (x[0] - x[2]).mean())
    )
    assert 60 < found[0] < 73
    assert gap_closed(loss, "streaming")[0] == 0 and gap_closed(loss, "oracle") == pytest.approx(
        [100, 100, 100]
    )


def test_gap_closed_is_none_without_a_gap():
    base = np.random.default_rng(6).normal(2, 0.5, 60)
    noise = np.random.default_rng(7).normal(0, 1, 60)
    assert (
        gap_closed(
            {"streaming": base, "oracle": base + noise - noise.mean() - 0.01, "uniform": base},
            "uniform",
        )
        is None
    )
    assert gap_closed({"streaming": base, "uniform": base}, "uniform") is None


def test_a_signal_wins_or_loses_only_in_all_three_seeds():
    random = np.random.default_rng(3)
    uniform = random.normal(2, 0.5, 60)
    noise = random.normal(0, 0.01, 60)
    better, worse = uniform - 0.1 + noise, uniform + 0.1 + noise
    assert intervals_by_seed(better - uniform, SEEDS_S).verdict == "better"
    assert intervals_by_seed(worse - uniform, SEEDS_S).verdict == "worse"
    assert (
        intervals_by_seed(np.where(SEEDS_S < 2, better, uniform) - uniform, SEEDS_S).verdict
        == "same"
    )
    assert (
        intervals_by_seed(np.where(SEEDS_S < 2, better, worse) - uniform, SEEDS_S).verdict == "same"
    )
    found = intervals_by_seed(better - uniform, SEEDS_S)
    assert found.all == mean_interval(better - uniform) and found.all[0] == pytest.approx(
        (better - uniform).mean()
    )
    assert found.seeds[1] == mean_interval((better - uniform)[20:40])


def ratio_with(**verdicts):
    """Returns results of a ratio in which signals have these (verdict, loss)."""
    methods = [SimpleNamespace(name=name, loss=loss) for name, (_, loss) in verdicts.items()]
    against = {name: SimpleNamespace(verdict=outcome) for name, (outcome, _) in verdicts.items()}
    return SimpleNamespace(methods=methods, against_uniform=against)


@pytest.mark.parametrize(
    ("ratios", "default"),
    [
        ([ratio_with(entropy=("same", 1.0)), ratio_with(entropy=("same", 1.0))], "uniform"),
        ([ratio_with(entropy=("better", 1.0)), ratio_with(entropy=("same", 1.0))], "entropy"),
        ([ratio_with(entropy=("better", 1.0)), ratio_with(entropy=("worse", 1.0))], "uniform"),
        (
            [ratio_with(entropy=("better", 1.2), coverage=("better", 1.1), loss=("same", 1.0))],
            "coverage",
        ),
        ([ratio_with(entropy=("worse", 0.9), coverage=("better", 1.1))], "coverage"),
        ([ratio_with()], "uniform"),
    ],
)
def test_the_default_signal_follows_from_the_rule(ratios, default):
    assert default_signal(ratios) == default


def test_continuations_are_compared_with_those_of_the_full_cache():
    full = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 1, 1]])
    own = np.array([[1, 2, 3, 4], [5, 0, 7, 8], [1, 1, 0, 0]])
    found = _agreement(Generated(own, 0.0, 12.5), Generated(full, 0.0, 99.0))
    assert found["same"][0] == pytest.approx((100 + 75 + 50) / 3)
    assert found["diverges"] == 2 and found["tok_per_s"] == 12.5  # the median of 4, 1 and 2
    assert _agreement(None, Generated(full, 0.0, 1.0)) == {}


# --- texts ----------------------------------------------------------------------------------------

CONTEXT = 64
WORDS = ["the", "a", "house", "went", "small", "old", "green", "and"]


def prose(lines, seed):
    draw = random.Random(seed)
    return "".join(
        " ".join(draw.choice(WORDS) for _ in range(draw.randrange(4, 9))) + "\n"
        for _ in range(lines)
    )


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A run with a token for every word, random weights, and a validation text."""
    path = tmp_path_factory.mktemp("runs") / "toy"
    draw = random.Random(0)
    words = [word for topic, its in recall.TOPICS.items() for word in (topic, *its)]
    lists = [" ".join(draw.sample(words, 60)) for _ in range(40)]
    documents = [prose(n, n) for n in (120, 90, 2, 30, 3, 100)]
    corpus = path.parent / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    tasks = [recall.fact_task(draw, [], 8) for _ in range(20)]
    texts = [*documents, *lists, *(task.context + task.question for task in tasks)]
    tokenizer = train_tokenizer(
        TokenizerSection(tokenizer_type="bpe", vocab_size=1000), lambda: iter(texts)
    )
    size = {
        "dim": 16,
        "n_heads": 4,
        "kv_heads": 2,
        "head_size": 8,
        "num_blocks": 2,
        "max_context": CONTEXT,
        "dtype": "float32",
    }
    config = build_config({
        "model": size, "data": {"path": str(corpus), "val_fraction": 0.6},
        "training": {"batch_size": 1},
        # Without effect.
        "kv": {"budget": 0.4, "policy": "tova"}, "generation": {"temperature": 0.1, "stop": ["a"]},
    })  # fmt: skip
    run = create_run(path)
    weights = np.random.default_rng(1)
    shapes = abstract_model(config.architecture(tokenizer.vocab_size))[1]
    filled = {
        name: weights.standard_normal(x.shape) if len(x.shape) > 1 else np.ones(x.shape)
        for name, x in shapes.items()
    }
    save_config(run, config)
    save_weights(run.weights, {name: (0.5 * x).astype(np.float32) for name, x in filled.items()})
    save_tokenizer(run, tokenizer.to_json())
    prepare_data(config, run.data, tokenizer)
    return path


@pytest.fixture(scope="module")
def run(toy):
    return load(toy)


@pytest.fixture(scope="module")
def store(toy, run):
    return open_store(run.config, open_run(toy).data, run.tokenizer)


@pytest.fixture(scope="module")
def text(run, store):
    return draw_sequences(run.tokenizer, store, 10, CONTEXT)


def test_seeds_split_the_samples():
    assert split_by_seed(200) == [67, 67, 66] and split_by_seed(48) == [16, 16, 16]


def test_sequences_do_not_overlap_or_cross_documents(run, store, text):
    stream = np.concatenate([batch.tokens_BT.ravel() for batch in store.validation(1)])
    special = np.isin(stream, list(run.tokenizer.special_ids))
    seen = set()
    for row in text.ids:
        (place,) = [
            i for i in range(len(stream) - CONTEXT + 1) if (stream[i : i + CONTEXT] == row).all()
        ]
        assert not special[place : place + CONTEXT].any() and not seen & set(
            range(place, place + CONTEXT)
        )
        seen |= set(range(place, place + CONTEXT))
    assert text.seeds.tolist() == [0] * 4 + [1] * 3 + [2] * 3 and not text.overlapping
    assert draw_sequences(run.tokenizer, store, 10, CONTEXT).ids.tolist() == text.ids.tolist()
    words = run.tokenizer.decode(stream[sorted(seen)]).split()
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    again = sum(gram in grams[:i] for i, gram in enumerate(grams))
    assert text.repeated == pytest.approx(again / len(grams)) and 0 < text.repeated < 0.2


def a_store(run, *documents):
    ids = [
        token for text in documents for token in [*run.tokenizer.encode(text), run.tokenizer.eos_id]
    ]
    return TokenStore(np.zeros(9, np.uint16), np.array(ids, np.uint16), BatchOptions(1, 8, seed=0))


def test_short_text_gives_overlapping_sequences_or_an_error(run):
    store = a_store(run, prose(30, 1), "the old house\n")
    places = len(run.tokenizer.encode(prose(30, 1))) - 100 + 1
    assert places > 12
    found = draw_sequences(run.tokenizer, store, 12, 100)
    assert found.overlapping and len({tuple(row) for row in found.ids.tolist()}) == 12
    with pytest.raises(
        UserError,
        match=rf"has {places} positions with 100 tokens within a document, but 999 sequences are",
    ):
        draw_sequences(run.tokenizer, store, 999, 100)
    with pytest.raises(UserError, match=ERRORS["has_0_positions_with_1000"]):
        draw_sequences(run.tokenizer, store, 6, 1000)


def test_repetitive_text_is_rejected(run):
    store = a_store(run, *(prose(20, n % 3) for n in range(30)))
    with pytest.raises(UserError, match=ERRORS["d_d_percent_of_the"]) as error:
        draw_sequences(run.tokenizer, store, 30, 64)
    assert int(str(error.value)[:2]) > 60


def test_tasks_have_one_length_and_contain_their_answer(run, text):
    assert encodes_words(run.tokenizer)
    tasks = draw_tasks(run.tokenizer, text, 8)
    assert (
        tasks.tokens.shape == (16, CONTEXT) and tasks.needles.tolist() == [True] * 8 + [False] * 8
    )
    assert set(tasks.lengths[8:]) == {CONTEXT} and len(set(tasks.lengths)) == 2
    for ids, length, answer, needle in zip(
        tasks.tokens, tasks.lengths, tasks.answers, tasks.needles, strict=True
    ):
        context, question = (
            run.tokenizer.decode(part)
            for part in (ids[: tasks.context], ids[tasks.context : length])
        )
        answer = run.tokenizer.decode([answer])
        records = [line for line in context.splitlines() if line.startswith(recall.LINE_PREFIX)]
        assert answer.strip() in recall.TOPICS[question.split()[-1]]
        assert question + answer in records and (needle or records[-1] == question + answer)
        assert len(question.split()) == (2 if needle else 2 * 8)
        assert run.tokenizer.encode(context + question + answer) == [
            *ids[:length].tolist(),
            *run.tokenizer.encode(answer),
        ]
    again = draw_tasks(run.tokenizer, text, 8)
    assert (again.tokens == tasks.tokens).all()


def test_no_tasks_if_words_have_several_tokens():
    for kind in ("byte", "char"):
        tokenizer = train_tokenizer(
            TokenizerSection(tokenizer_type=kind), lambda: iter(["no such word"])
        )
        assert not encodes_words(tokenizer)


def test_error_if_a_text_is_too_short_for_a_task(run):
    ids = np.array([run.tokenizer.encode("the story\n") * 2])
    ids = ids[:, :5]
    with pytest.raises(UserError, match=ERRORS["cannot_build_a_needle_task"]):
        draw_tasks(run.tokenizer, Sequences(ids, np.zeros(1, int), False, 0.0), 3)


# --- caches ---------------------------------------------------------------------------------------


def calibration(**also):
    return KVCalibration(np.array([[1.0, 2.0, 3.0, 4.0], [5.0, 1.0, 1.0, 1.0]]), **also)


def select(names, measured, path, usual=KV_METHODS):
    known = (*KV_METHODS, "full")
    return select_methods(
        names, known, measured, path, "eval kv", usual=usual, needs_calibration=True
    )


def test_methods_are_selected_by_name_and_calibration(tmp_path):
    whole = calibration(
        coverage_LN=np.ones((2, 4)),
        distance_LN=np.ones((2, 4)),
        loss_LKC=np.ones((2, 2, 1)),
        loss_slots=(64,),
    )
    assert select(None, whole, tmp_path) == (list(KV_METHODS), [])
    assert select(["oracle", "full", "uniform"], None, tmp_path) == (
        ["uniform", "oracle", "full"],
        [],
    )
    large = (
        ["streaming", "uniform", "distance", "loss", "oracle"],
        ["coverage, entropy, random: name them in --methods"],
    )
    assert select(None, whole, tmp_path, LARGE_METHODS) == large
    assert select(["random", "uniform"], whole, tmp_path, LARGE_METHODS) == (
        ["uniform", "random"],
        [],
    )
    names, left_out = select(None, calibration(), tmp_path)
    assert names == ["streaming", "uniform", "entropy", "random", "oracle"]
    assert [line.split(":")[0] for line in left_out] == [
        "coverage",
        "distance",
        "loss",
    ] and "--what kv` again" in left_out[0]
    with pytest.raises(UserError, match=ERRORS["holds_no_loss"]):
        select(["loss"], calibration(), tmp_path)
    for names in (["uniform", "entropy"], None):
        with pytest.raises(
            UserError,
            match=(
                ERRORS["entropy_cannot_run_without_kv_entropy"] if names else "entropy, coverage, "
            ),
        ):
            select(names, None, tmp_path)
    with pytest.raises(UserError, match=ERRORS["unknown_method_of_eval_kv"]):
        select(["Entrpy"], None, tmp_path)
    # `eval ruler` leaves methods out if there is no calibration.
    found = select_methods(None, RULER_METHODS, None, tmp_path, "eval ruler")
    assert (
        found[0] == ["full", "streaming", "uniform", "expected_attention", "kvzip"]
        and len(found[1]) == 5
    )


def test_all_caches_of_a_ratio_have_the_same_bytes(run):
    names = ["streaming", "uniform", "entropy", "random", "oracle"]
    caches, left_out = build_variants(run, calibration(), names, None, CONTEXT)
    full, *rest = caches
    # Two layers, two key/value heads of size eight, keys and values in float32.
    assert full.name == "full" and full.report["bytes"] == 2 * 2 * CONTEXT * 8 * 2 * 4
    assert [cache.name for cache in rest] == names and {cache.ratio for cache in rest} == {0.5}
    assert [line[:11] for line in left_out] == ["ratio 0.3: ", "ratio 0.2: ", "ratio 0.1: "]
    assert "set it to at least" in left_out[0]
    sizes = {cache.name: cache.report["bytes"] for cache in rest if cache.report}
    # Half the slots, each with its position and, for attention-based policies, its importance.
    assert sizes["uniform"] == sizes["entropy"] == 2 * 2 * CONTEXT // 2 * (8 * 2 * 4 + 8)
    assert sizes["streaming"] == sizes["random"] == 2 * 2 * CONTEXT // 2 * (8 * 2 * 4 + 4)
    assert rest[2].report["slots"] != rest[1].report["slots"]
    with pytest.raises(UserError, match=ERRORS["kv_budget_0_1_leaves"]):
        build_variants(run, None, ["uniform"], [0.5, 0.1], CONTEXT)


def test_large_models_get_fewer_ratios():
    small = builder.config(windows=(None, None), max_context=512)
    ratios = {}
    for parameters in (10**7, 10**8):
        model = SimpleNamespace(config=small)
        run = SimpleNamespace(
            model=model, parameters=parameters, prepared=lambda generation, order: None
        )
        ratios[parameters] = [
            cache.ratio for cache in build_variants(run, None, ["uniform"], None, 512)[0]
        ]
    assert ratios == {10**7: [1.0, 0.5, 0.3, 0.2, 0.1], 10**8: [1.0, 0.5, 0.2]}


def test_uncompressed_window_layer_is_accepted():
    """With these entropies one method keeps all slots of a window layer, which are then stored
    without positions.
    """
    small = builder.config(windows=(95, 95, None), max_context=512)
    run = SimpleNamespace(
        model=SimpleNamespace(config=small), parameters=0, prepared=lambda generation, order: None
    )
    found = KVCalibration(np.array([[5.0] * 4, [1.0] * 4, [3.0] * 4]))
    (_, uniform, entropy), _ = build_variants(run, found, ["uniform", "entropy"], [0.5], 512)
    kinds = [[len(layer) for layer in cache.report["slots"]] for cache in (uniform, entropy)]
    assert (
        uniform.report["payload_bytes"] == pytest.approx(entropy.report["payload_bytes"], rel=0.01)
        and kinds
    )
    assert uniform.report["metadata_bytes"] != entropy.report["metadata_bytes"]


def logprobs(model, ids_BT):
    """Returns next-token log-probabilities at every position, from one pass without a cache."""
    positions = np.broadcast_to(np.arange(ids_BT.shape[1]), ids_BT.shape)
    logits = np.asarray(nnx.jit(lambda m, *x: m(*x)[0])(model, ids_BT, positions), np.float64)
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


def loss(model, ids_BT, start):
    logp = np.take_along_axis(logprobs(model, ids_BT)[:, :-1], ids_BT[:, 1:, None], 2)[..., 0]
    return -logp[:, start - 1 :].mean(axis=1)


def windowed(model, window):
    """Returns a model with windows and the same weights."""
    config = model.config.__class__(
        **(vars(model.config) | {"windows": (window,) * model.config.num_blocks})
    )
    other = Transformer(config, rngs=nnx.Rngs(0))
    nnx.update(other, nnx.state(model))
    return other


@pytest.mark.slow
def test_near_keys_variant_equals_a_model_with_windows(run, text, monkeypatch):
    monkeypatch.setattr(kv_variants, "NEAR_KEYS", 12)
    caches, _ = build_variants(run, None, [], [0.5], CONTEXT)
    near = near_keys_variant(caches[0])
    assert near.model.config.windows == (12, 12) and caches[0].model.config.windows == (None, None)
    (full,), measured = CacheBenchmark(caches).measure_text(text)
    np.testing.assert_allclose(full.loss_B, loss(run.model, text.ids, CONTEXT // 2), atol=1e-4)
    np.testing.assert_allclose(
        measured.loss_B, loss(windowed(run.model, 12), text.ids, CONTEXT // 2), atol=1e-4
    )
    assert (
        np.abs(measured.loss_B - full.loss_B).max() > 1e-3
        and not full.kl_B.any()
        and full.top1_B.all()
    )
    assert NEAR_KEYS == 64


def test_answers_of_the_full_cache_match_the_model(run, text, monkeypatch):
    monkeypatch.setattr(eviction, "ROWS", 6)
    tasks = draw_tasks(run.tokenizer, text, 5)  # ten rows of different lengths, in batches of five
    last_P = logprobs(run.model, tasks.tokens)[np.arange(10), tasks.lengths - 1]
    random = np.random.default_rng(0)
    answers = np.where(
        random.random(10) < 0.5, last_P.argmax(-1), 0
    )  # a model with random weights answers nothing correctly
    caches, _ = build_variants(run, None, [], [0.5], CONTEXT)
    messages = []
    (found,) = CacheBenchmark(caches, messages.append).measure_tasks(
        tasks._replace(answers=answers)
    )
    right = last_P.argmax(-1) == answers
    assert 0 < right.sum() < 10 and list(found) == [
        "needle_aware",
        "copy_aware",
        "needle_agnostic",
        "copy_agnostic",
    ]
    for mode in ("aware", "agnostic"):
        assert (
            found[f"needle_{mode}"].tolist() == right[:5].tolist()
            and found[f"copy_{mode}"].tolist() == right[5:].tolist()
        )
    begun = [line for line in messages if not line.endswith("left")]
    assert begun == [
        f"recall tasks, question-{kind}: 2 batches, one for each cache"
        for kind in ("aware", "agnostic")
    ]


def test_answer_comes_from_the_compressed_prompt():
    """In a single layer, keys and values depend only on their own token, so the kept tokens form a
    text of their own.
    """
    model = builder.model(builder.config(windows=(None,)))
    lengths, budget, random = np.array([60, 41]), 0.5, np.random.default_rng(4)
    tokens = np.where(np.arange(60) < lengths[:, None], random.integers(0, builder.V, (2, 60)), 0)
    run = SimpleNamespace(
        parameters=0,
        model=model,
        prepared=lambda generation, order: prepare(
            permute_heads(model, order) if order else model, generation.weights
        ),
    )
    (_, streaming), _ = build_variants(run, None, ["streaming"], [budget], 64)
    read = jax.jit(lambda model, *x: model(*x)[0][0])
    expected, whole = [], []
    for row, length in zip(tokens, lengths, strict=True):
        kept = np.array([*range(4), *range(length - 28, length)])
        logits = []
        for at in (kept, np.arange(length)):
            places = np.pad(at, (0, 60 - len(at)), constant_values=-1)
            logits.append(np.asarray(read(model, row[None, places], places[None]))[len(at) - 1])
        expected.append(logits[0].argmax())
        whole.append(logits[1].argmax())
    assert streaming.answer(tokens, lengths).tolist() == expected != whole


def test_oracle_answers_from_its_best_keys():
    model = builder.model(builder.config(windows=(None,)))
    tokens = np.random.default_rng(5).integers(0, builder.V, (3, 60))
    run = SimpleNamespace(
        model=model,
        parameters=0,
        prepared=lambda generation, order: prepare(model, generation.weights),
    )
    (_, oracle), _ = build_variants(run, None, ["oracle"], [0.5], 64)
    read = oracle.logprobs(
        tokens, np.full(3, 60), 59
    )  # it keeps all keys, so a separate last token sees the same ones
    assert (
        oracle.answer(tokens, np.full(3, 60)).tolist() == np.asarray(read)[:, 1].argmax(-1).tolist()
    )


def test_continuations_of_the_full_cache_are_greedy_text(run, text, monkeypatch):
    monkeypatch.setattr(kv_bench, "FREE_ROWS", 2)
    caches, _ = build_variants(run, None, ["oracle"], [0.5], CONTEXT)
    written, none = CacheBenchmark(caches).continue_prompts(run, text, 3)
    assert none is None and written.ids.shape == (3, 32) and written.rate > 0
    special = list(run.tokenizer.special_ids)
    rows = text.ids[[0, 4, 7], :32]  # the first of each seed
    whole = np.concatenate([rows, written.ids], axis=1)
    expected = logprobs(run.model, whole)
    expected[:, :, special] = -np.inf
    assert written.ids.tolist() == expected.argmax(-1)[:, 31:-1].tolist()


def test_cache_settings_of_the_run_are_ignored():
    assert (
        NEUTRAL_SETTINGS["kv_budget"] is None
        and NEUTRAL_SETTINGS["kv_policy"] == "snapkv+ema"
        and NEUTRAL_SETTINGS["kv_dtype"] == "auto"
    )


# --- complete study -------------------------------------------------------------------------------


def calibrate(toy):
    entropies = dict(
        zip(head_names(2, 4, "H"), (1.0, 4.0, 2.0, 2.0, 3.0, 3.0, 5.0, 0.5), strict=True)
    )
    save_kv_calibration(
        open_run(toy).kv, {"n_layer": 2, "n_head": 4, "n_head_kv": 2, "head_entropies": entropies}
    )


@pytest.mark.slow
def test_record_of_an_evaluation(toy, monkeypatch):
    calibrate(toy)
    monkeypatch.setattr(statistics, "BOOTSTRAP_SAMPLES", 50)
    messages = []
    names = ["uniform", "entropy", "oracle"]  # each additional method takes seconds to compile
    monkeypatch.setattr(kv_study, "QUICK_COUNTS", (48, 3))
    monkeypatch.setattr(kv_study, "CONTINUED_PROMPTS", 3)
    study = evaluate_kv(toy, quick=True, methods=names, progress=messages.append, sequences=7)
    record = json.loads(json.dumps(asdict(study), allow_nan=False))
    assert record["tokens"] == CONTEXT and record["free_tokens"] == 32
    assert len(record["left_out"]) == 3 and record["calibration"].endswith("kv_entropy.json")
    (ratio,) = record["ratios"]
    assert [method["name"] for method in ratio["methods"]] == names and list(
        ratio["against_uniform"]
    ) == ["entropy"]
    full = record["full"]
    assert (
        full["dppl"]["all"] == [0, 0, 0]
        and full["top1"]["all"] == [100, 100, 100]
        and full["share"] == 1
    )
    for method in ratio["methods"]:
        oracle = method["name"] == "oracle"
        assert (
            (method["bytes"] is None)
            == (method["tok_per_s"] is None)
            == (method["same"] is None)
            == oracle
        )
        assert method["kl"]["all"][0] > 0 and len(method["dppl"]["seeds"]) == 3
        assert all(0 <= method[f"{kind}_aware"][0] <= 100 for kind in ("needle", "copy"))
    assert messages[0].startswith("reading sequences: ")
    assert any(line.startswith("recall tasks, question-agnostic") for line in messages)
    assert any(
        line.startswith("needles found") or line.startswith("Needles found")
        for line in to_lines(kv_blocks(study), 100)
    )


def test_errors_are_raised_before_the_work(toy, run_dir):
    for wrong, sentence in (
        ({"ratios": [1.0]}, "--ratios must be between 0 and 1, got 1"),
        ({"methods": ["full"]}, ERRORS["full_is_the_baseline_of"]),
        ({"tokens": 31}, "--tokens and the model's context must be at least 32, got 31"),
        ({"sequences": 5}, "--sequences must be at least 6, got 5"),
        ({"methods": ["uniform"], "sequences": 9999}, "9999 sequences are needed"),
        (
            {"methods": ["uniform"], "kv_calibration": "nowhere.json"},
            "no calibration at nowhere.json",
        ),
    ):
        with pytest.raises(UserError, match=sentence):
            evaluate_kv(toy, **wrong)
    with pytest.raises(UserError, match=ERRORS["has_no_saved_training_text"]):
        evaluate_kv(run_dir, methods=["uniform"])


def test_flags_of_other_evaluations_are_rejected(toy, capsys):
    for what, flag, value in (
        ("kv", "--prompts", "3"),
        ("kv", "--reference", "x"),
        ("sampling", "--ratios", ".5"),
    ):
        assert main(["eval", what, "--run_dir", str(toy), flag, value]) == 2
        other = {"kv": "eval sampling", "sampling": "eval kv and eval ruler"}[what]
        assert (
            capsys.readouterr().err
            == f"error: {flag} has no effect with eval {what}: it is a flag of {other}\n"
        )
