"""The comparison of sampling methods: measures against closed forms and NLTK, reference against
NumPy, a toy study.
"""

import json
import math
from collections import Counter
from dataclasses import asdict, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dantinox.config import TokenizerSection, UserError, build_config
from dantinox.config.router_settings import (
    CALIBRATED_THRESHOLDS,
    STRATEGIES,
    THRESHOLDS,
    forcing_thresholds,
)
from dantinox.generation import load
from dantinox.lab.measure.texts import equal_batches
from dantinox.lab.studies import continuations, sampling_study, statistics
from dantinox.lab.studies.continuations import (
    Continuations,
    PromptWindows,
    ReferenceModel,
    draw_strategies,
    draw_windows,
    generate_continuations,
    prompt_tokens,
)
from dantinox.lab.studies.sampling_study import (
    MEASURES,
    METHODS,
    QUICK_SIZE,
    StudySize,
    TunedSetting,
    _difference,
    _tune_all,
    bisection,
    evaluate_sampling,
    select_methods,
)
from dantinox.lab.studies.statistics import (
    Interval,
    default_count,
    distinct,
    diversity,
    excess,
    mean_interval,
    ngrams,
    percentile_interval,
    repetition,
    self_bleu,
    verdict,
)
from dantinox.model.parameters import abstract_model
from dantinox.run import (
    create_run,
    open_run,
    save_config,
    save_router_calibration,
    save_tokenizer,
    save_weights,
    weights_digest,
)
from dantinox.sampling import SamplingParams
from dantinox.sampling.entropy_router import Metrics, RouterConfig, select_strategy
from dantinox.text import BatchOptions, TokenStore, open_store, prepare_data, train_tokenizer
from tests.error_texts import ERRORS

# --- diversity of a text --------------------------------------------------------------------------


def test_ngrams_are_in_order():
    assert ngrams([1, 2, 3, 4], 2) == [(1, 2), (2, 3), (3, 4)]
    assert ngrams([1, 2], 3) == [] and ngrams([7], 1) == [(7,)]


def test_texts_without_repetition_and_with_a_single_token():
    assert diversity(range(50)) == 1 and all(distinct(range(50), n) == 1 for n in (1, 2, 3))
    T = 40
    same = [5] * T  # one n-gram, T − n + 1 times
    assert distinct(same, 3) == 1 / (T - 2) and repetition(same, 4) == pytest.approx(
        1 - 1 / (T - 3)
    )
    assert diversity(same) == pytest.approx(1 / (T - 1) / (T - 2) / (T - 3))


def test_periodic_text_repeats_all_but_its_first_period():
    lap, T = 7, 60
    text = [i % lap for i in range(T)]
    for n in (1, 2, 3):
        assert distinct(text, n) == pytest.approx(lap / (T - n + 1))
    assert repetition(text, 4) == pytest.approx(1 - lap / (T - 3))


def test_text_shorter_than_an_ngram_has_no_repetition():
    assert distinct([1, 1], 3) == 1 and repetition([], 4) == 0 and diversity([3]) == 1


WORDS = [
    "the cat sat on the mat and looked at the dog",
    "the cat sat on the sofa and looked at the bird",
    "a dog sat near the mat and the cat slept",
]
# nltk 3.10.4: the mean over i of sentence_bleu(all others, sample i, (.25,) * 4,
# SmoothingFunction(epsilon=0.1).method1).
NLTK = [
    (
        [text.split() for text in WORDS],
        [0.6887246539984299, 0.587728372510532, 0.12927595103001124],
    ),
    (
        [["in", "my", "end", "is"], ["my", "end", "is", "in", "the", "beginning"]],
        [0.2591626698761441, 0.21711852081087685],
    ),
    (
        [
            [1, 2, 3, 1, 2, 3, 1, 2, 3, 4],
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
            [3, 1, 2, 4, 4, 4, 2, 1, 3, 9],
        ],
        [0.35930411196308415, 0.2777619034011791, 0.13348189438082966],
    ),
    ([[1, 2, 3], [1, 2, 4]], [0.24028114141347542] * 2),
    (
        [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11], [1, 8, 3]],
        [0.048549177170732344, 0.0439891724758422, 0.07677376632034968],
    ),
]


@pytest.mark.parametrize(("samples", "scores"), NLTK)
def test_self_bleu_matches_nltk(samples, scores):
    assert self_bleu(samples) == pytest.approx(np.mean(scores), rel=1e-12)


def test_self_bleu_of_equal_and_of_disjoint_texts():
    assert self_bleu([list(range(20))] * 3) == pytest.approx(1)
    assert self_bleu([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]) == 0
    assert self_bleu([[], [1, 2, 3]]) == 0


# --- confidence intervals -------------------------------------------------------------------------


def test_interval_has_the_width_of_a_normal_interval():
    values = np.random.default_rng(3).normal(5, 2, 400)
    found = mean_interval(values)
    half = 1.96 * values.std() / math.sqrt(400)
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.value == pytest.approx(
        half, rel=0.1
    ) and found.value - found.low == pytest.approx(half, rel=0.1)


def test_intervals_have_their_nominal_coverage(monkeypatch):
    monkeypatch.setattr(statistics, "BOOTSTRAP_SAMPLES", 100)
    random = np.random.default_rng(0)
    for draw, truth in (
        (lambda: random.normal(1, 1, 40), 1),
        (lambda: random.exponential(2, 40), 2),
    ):
        found = [mean_interval(draw()) for _ in range(200)]
        # Percentile intervals are slightly too narrow with 40 values, and more so for skewed
        # values.
        assert 0.88 <= np.mean([low <= truth <= high for _, low, high in found]) <= 0.98


def test_paired_difference_has_a_narrower_interval():
    random = np.random.default_rng(1)
    hardness = random.normal(0, 5, 60)
    a, b = hardness + 0.3 + random.normal(0, 0.1, 60), hardness + random.normal(0, 0.1, 60)
    paired, alone = mean_interval(a - b), mean_interval(a)
    assert 0.2 < paired.low < 0.3 < paired.high < 0.4 and alone.high - alone.low > 1


def test_intervals_of_equal_and_of_repeated_values():
    assert mean_interval(np.full(7, 2.5)) == (2.5, 2.5, 2.5)
    values = np.random.default_rng(2).normal(size=30)
    assert mean_interval(values) == mean_interval(values)
    assert percentile_interval([3.0, *range(1001)]) == pytest.approx((3, 25, 975))


def measures_of(diversity, bits):
    return {"diversity": diversity, "bits_per_byte": bits}


def line(diversities, P, noise=0.0, above=0.0):
    """Returns outcomes on bits = 1 + 4 · diversity + above, with prompts scattered along that
    line.
    """
    random = np.random.default_rng(8)
    at = [d + random.normal(0, noise, P) for d in diversities]
    return [measures_of(d_P, 1 + 4 * d_P + above) for d_P in at]


def test_excess_is_the_distance_from_the_curve_at_equal_diversity():
    ruler = line([0.2, 0.4, 0.6, 0.8], 50, 0.03)
    (method,) = line([0.55], 50, 0.03, above=0.25)
    found = excess(method, ruler)
    # All pieces lie on one line, so the distance is the same in every resample.
    np.testing.assert_allclose(found, 0.25, atol=1e-9)
    assert len(found) == 1 + statistics.BOOTSTRAP_SAMPLES
    np.testing.assert_allclose(excess(ruler[2], ruler), 0, atol=1e-9)


def test_excess_interpolates_the_curve():
    flat = [
        measures_of(np.full(4, d), np.full(4, b)) for d, b in ((0.6, 3.0), (0.2, 1.0), (0.4, 1.5))
    ]  # in any order
    assert excess(measures_of(np.full(4, 0.5), np.full(4, 2.0)), flat)[0] == pytest.approx(
        2.0 - 2.25
    )
    assert excess(measures_of(np.full(4, 0.3), np.full(4, 2.0)), flat)[0] == pytest.approx(
        2.0 - 1.25
    )
    for outside in (0.19, 0.61):
        assert excess(measures_of(np.full(4, outside), np.full(4, 2.0)), flat) is None


def test_verdict_needs_an_interval_without_zero():
    assert verdict(Interval(-0.2, -0.3, -0.1)) == "better"
    assert verdict(Interval(0.2, 0.1, 0.3)) == "worse"
    assert verdict(Interval(0.2, -0.1, 0.5)) == verdict(Interval(0, 0, 0)) == "same"


# --- methods and their tuning ---------------------------------------------------------------------


def test_tuned_setting_has_a_logarithmic_scale():
    assert [TunedSetting("temperature", 0.25, 4).value_at(x) for x in (0, 0.5, 0.75, 1)] == [
        0.25,
        1,
        2,
        4,
    ]
    assert [
        TunedSetting("top_p", 0.5, 0.995, log_complement=True).value_at(x) for x in (0, 0.5, 1)
    ] == [0.5, 0.95, 0.995]
    assert [
        TunedSetting("candidates", 16, 1, integer=True).value_at(x) for x in (0, 0.25, 0.3, 0.5, 1)
    ] == [16, 8, 7, 4, 1]


def test_router_scale_continues_with_temperature_after_candidates():
    guide = METHODS["router_guide"]
    assert guide.values_at(0) == {"candidates": 12} and guide.values_at(0.49) == {"candidates": 1}
    assert guide.values_at(0.5) == {"candidates": 1, "base_temperature": 0.666}
    assert guide.values_at(1) == {"candidates": 1, "base_temperature": 4.0}
    assert METHODS["greedy"].values_at(0.5) == {}


@pytest.mark.parametrize("target", [0.02, 0.31, 0.5, 0.77, 0.99])
@pytest.mark.parametrize("trials", [1, 3, 6])
def test_bisection_ends_near_the_target(target, trials):
    positions = []

    def square(position):
        positions.append(position)
        return position**2

    best, at_edge = bisection(square, target, trials)
    assert len(positions) == trials and abs(best - math.sqrt(target)) <= 2**-trials
    assert abs(best**2 - target) == min(abs(x**2 - target) for x in positions)
    assert at_edge == (
        all(x**2 < target for x in positions) or all(x**2 >= target for x in positions)
    )


def test_bisection_returns_the_first_of_equal_trials():
    assert bisection(lambda position: 0.3, 0.5, 4) == (0.5, True)
    assert bisection({0.5: 0.6, 0.25: 0.4, 0.375: 0.6}.get, 0.5, 3) == (0.5, False)


def test_methods_are_selected_by_name():
    assert select_methods(None) == list(METHODS)
    assert select_methods(["min_p", "greedy"]) == ["greedy", "min_p"]
    with pytest.raises(UserError, match=ERRORS["unknown_sampling_method_minp_did"]):
        select_methods(["minp"])
    with pytest.raises(UserError, match=ERRORS["unknown_sampling_method_router_guide"]):
        select_methods(["Router-Guide"])
    with pytest.raises(UserError, match=ERRORS["unknown_sampling_method_beam_use"]):
        select_methods(["beam"])
    with pytest.raises(UserError, match=ERRORS["router_random_needs_the_strategy_shares"]):
        select_methods(["router_random", "min_p"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompts": 1}, r"--prompts must be in \[2"),
        ({"seeds": 1}, "--seeds"),
        ({"tokens": 4}, "--tokens"),
    ],
)
def test_study_size_is_checked(wrong, message):
    with pytest.raises(UserError, match=message):
        StudySize(**wrong)
    assert QUICK_SIZE.prompts < StudySize().prompts and QUICK_SIZE.trials < StudySize().trials


def test_large_models_are_measured_on_fewer_samples():
    assert [default_count(200, 12, size) for size in (0, 10**7, 2 * 10**7, 10**9)] == [
        200,
        200,
        100,
        12,
    ]
    assert default_count(8, 12, 10**9) == 8


# --- the control ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
def test_forced_thresholds_select_their_strategy(name):
    random = np.random.default_rng(0)
    forced = replace(RouterConfig(), **forcing_thresholds(name))
    H, V = random.exponential(3, 500), random.exponential(4, 500)
    H[:5], V[5:10] = 0, 0
    taken = jax.vmap(lambda h, v: select_strategy(Metrics(h, v), forced))(H, V)
    assert {STRATEGIES[i] for i in np.asarray(taken).tolist()} == {name}


def test_strategies_are_sampled_with_the_given_shares():
    shares = dict(zip(STRATEGIES, (0.1, 0.05, 0.25, 0.0, 0.6), strict=True))
    params = SamplingParams.build({"strategy": "entropy", "seed": 1}, batch=100)
    random, counted = np.random.default_rng((1, 2)), Counter()
    taking = jax.jit(jax.vmap(lambda config: select_strategy(Metrics(2.0, 3.0), config)))
    for _ in range(40):
        drawn = draw_strategies(params, shares, random)
        counted.update(STRATEGIES[i] for i in np.asarray(taking(drawn.router)).tolist())
    for name, share in shares.items():
        assert abs(counted[name] / 4000 - share) <= 4 * math.sqrt(share * (1 - share) / 4000)
    changed = {
        name
        for name, value in vars(drawn.router).items()
        if value is not getattr(params.router, name)
    }
    assert changed == set(THRESHOLDS)


def test_equal_seeds_give_equal_strategies():
    params = SamplingParams.build({"strategy": "entropy", "seed": 1}, batch=30)
    drawn = []
    for seed in ((1, 0), (1, 0), (2, 0)):
        router = draw_strategies(
            params, dict.fromkeys(STRATEGIES, 0.2), np.random.default_rng(seed)
        ).router
        drawn.append([np.asarray(getattr(router, name)).tolist() for name in THRESHOLDS])
    assert drawn[0] == drawn[1] != drawn[2]


# --- a toy run ------------------------------------------------------------------------------------

CONTEXT = 128
SIZE = (3, 64, 16)  # prompts, their tokens, new tokens
LITTLE = {"prompts": 3, "seeds": 2, "tokens": 16, "trials": 2}


def sentences(count, seed):
    """Returns a text of two-letter words in random order."""
    random = np.random.default_rng(seed)
    return " ".join(random.choice(["ab", "cd", "ef", "gh", "ij"], count))


def make_run(path, tokenizer, draw, **sections):
    """Creates a run with weights from `draw` by shape; normalizations keep their scale of 1."""
    size = {
        "dim": 16,
        "n_heads": 2,
        "num_blocks": 1,
        "max_context": CONTEXT,
        "weight_tying": False,
        "dtype": "float32",
    }
    config, run = build_config({"model": size, **sections}), create_run(path)
    shapes = abstract_model(config.architecture(tokenizer.vocab_size))[1]
    weights = {
        name: (draw if len(x.shape) > 1 else np.ones)(x.shape).astype(np.float32)
        for name, x in shapes.items()
    }
    save_config(run, config)
    save_weights(run.weights, weights)
    save_tokenizer(run, tokenizer.to_json())
    return config, run


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A run on characters with high entropy, a validation text and a calibration."""
    path = tmp_path_factory.mktemp("runs") / "toy"
    documents = [
        "xyz € — ü 0123456789",
        *(sentences(n, n) for n in (400, 10, 700, 90, 300, 30, 500, 60, 900)),
    ]
    corpus = path.parent / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8"
    )
    tokenizer = train_tokenizer(TokenizerSection(tokenizer_type="char"), lambda: iter(documents))
    random = np.random.default_rng(1)
    config, run = make_run(
        path,
        tokenizer,
        lambda shape: 0.7 * random.standard_normal(shape),
        data={"path": str(corpus), "val_fraction": 0.4},
        generation={
            "temperature": 0.1,
            "top_k": 1,
            "stop": ["a"],
            "max_new_tokens": 3,
        },  # without effect on a comparison
    )
    prepare_data(config, run.data, tokenizer)
    calibrated = dict(zip(CALIBRATED_THRESHOLDS, (1.0, 0.5, 5.0, 6.0, 3.0, 8.0, 4.0), strict=True))
    save_router_calibration(run, {"weights": weights_digest(run), "measured": calibrated})
    return path


@pytest.fixture
def store(toy):
    run = load(toy)
    return open_store(run.config, open_run(toy).data, run.tokenizer)


def test_windows_occur_in_the_text(toy, store):
    run = load(toy)
    tuning, test = draw_windows(run.tokenizer, store, 9, 12, 20)
    stream = "".join(run.tokenizer.decode(batch.tokens_BT.ravel()) for batch in store.validation(1))
    seen = []
    for windows in (tuning, test):
        assert len(windows.prompts) == len(windows.texts) == 9 and windows.ids.shape == (9, 20)
        for prompt, text, ids in zip(*windows, strict=True):
            assert (len(prompt), len(text)) == (12, 20) and prompt + text in stream
            assert run.tokenizer.encode(text) == ids.tolist()
            seen.append(prompt + text)
    assert len(set(seen)) == 18
    again, _ = draw_windows(run.tokenizer, store, 9, 12, 20)
    assert again.prompts == tuning.prompts


def test_no_window_crosses_documents(toy, store):
    tokenizer = load(toy).tokenizer
    for windows in draw_windows(tokenizer, store, 10, 12, 20):
        assert not np.isin(windows.ids, list(tokenizer.special_ids)).any()
    with pytest.raises(UserError, match=ERRORS["has_windows_of_32_tokens"]):
        draw_windows(tokenizer, store, 10000, 12, 20)


def test_padding_of_the_last_batch_is_not_used(monkeypatch):
    tokenizer = train_tokenizer(TokenizerSection(tokenizer_type="char"), lambda: iter(["abc"]))
    ids = np.full(5000, 1, np.int32)
    store = TokenStore(ids, ids, BatchOptions(1, 96, seed=0))
    for most in (5000, 2000):  # tokens, not all multiples of a batch of 8 · 96
        monkeypatch.setattr(continuations, "STREAM_TOKENS", most)
        count = (min(most, 4999) // 32) // 2
        for windows in draw_windows(tokenizer, store, count, 12, 20):
            assert set("".join(windows.prompts + windows.texts)) == {"b"}
        with pytest.raises(UserError, match=ERRORS["are_needed"]):
            draw_windows(tokenizer, store, count + 1, 12, 20)


def test_split_character_belongs_to_the_text_it_ends_in():
    tokenizer = train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(()))
    ids = np.array(tokenizer.encode("€" * 400), np.int32)  # three bytes each
    store = TokenStore(ids, ids, BatchOptions(1, 64, seed=0))
    for windows in draw_windows(tokenizer, store, 8, 10, 20):
        for prompt, text, ids in zip(*windows, strict=True):
            assert set(prompt + text) == {"€"} and len(ids) == 20
            assert 29 - 2 - 3 < 3 * len(prompt + text) <= 30


def test_prompts_leave_space_for_the_continuation():
    assert (
        prompt_tokens(256, 192) == 64
        and prompt_tokens(256, 128) == 64
        and prompt_tokens(128, 96) == 32
    )
    assert prompt_tokens(128, 96, 1) == 31
    with pytest.raises(UserError, match=ERRORS["leave_room_for_a_prompt"]):
        prompt_tokens(128, 121, 1)


@pytest.mark.parametrize(
    ("count", "most", "size"), [(40, 32, 20), (96, 32, 32), (33, 32, 17), (5, 32, 5), (65, 64, 33)]
)
def test_batches_have_equal_size(count, most, size):
    rows = [numbers.tolist() for numbers in equal_batches(count, most)]
    assert {len(numbers) for numbers in rows} == {size} and len(rows) == -(-count // most)
    assert [number for numbers in rows for number in numbers][:count] == list(range(count))


forward = nnx.jit(
    lambda model, tokens_BT, positions_BT: model(tokens_BT, positions_BT)[0], graph_updates=False
)


def bits_by_hand(run, prompt, text):
    """Returns −log2 p per byte in float64, token by token."""
    new = len(run.tokenizer.encode(text))
    ids = (run.prompt_ids(prompt) + run.tokenizer.encode(text))[-CONTEXT:]
    tokens = np.zeros((1, CONTEXT), np.int32)
    tokens[0, : len(ids)] = ids
    logits_TV = np.asarray(
        forward(run.model, jnp.asarray(tokens), jnp.arange(CONTEXT)[None])[0], np.float64
    )
    bits = 0.0
    for t in range(len(ids) - new, len(ids)):
        x_V = logits_TV[t - 1]
        bits += (np.log(np.exp(x_V - x_V.max()).sum()) + x_V.max() - x_V[ids[t]]) / math.log(2)
    return bits / len(text.encode())


def test_reference_model_matches_numpy(toy):
    run, judge = load(toy), ReferenceModel(toy)
    prompts = ["ab cd", "x", "gh gh gh gh gh"] * 30  # several batches
    texts = ["ef gh ij", "€ — ü", "a", "zzzz yz z", "0123456789"] * 18
    found = judge.bits_per_byte(prompts, texts)
    assert found.shape == (90,)
    for i in (0, 1, 2, 3, 4, 50, 88, 89):
        assert found[i] == pytest.approx(bits_by_hand(run, prompts[i], texts[i]), rel=1e-5)


def test_bits_per_byte_do_not_depend_on_the_vocabulary(tmp_path):
    corpus = "aè€😀 the quick brown fox"
    chars = train_tokenizer(TokenizerSection(tokenizer_type="char"), lambda: iter([corpus]))
    make_run(tmp_path / "chars", chars, np.zeros)
    letters = ReferenceModel(tmp_path / "chars")
    # All tokens are equally likely and cost log2 V bits. A token has four bytes in one vocabulary
    # and one in the other.
    V = chars.vocab_size
    np.testing.assert_allclose(
        letters.bits_per_byte(["the"] * 2, ["😀😀", "fox"]),
        [math.log2(V) / 4, math.log2(V)],
        rtol=1e-5,
    )
    plain = train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(()))
    make_run(tmp_path / "bytes", plain, np.zeros)
    bytewise = ReferenceModel(tmp_path / "bytes")
    V = bytewise.tokenizer.vocab_size
    np.testing.assert_allclose(
        bytewise.bits_per_byte(["the"] * 2, ["😀😀", "fox"]), math.log2(V), rtol=1e-5
    )
    with pytest.raises(UserError, match=ERRORS["the_reference_cannot_encode_a"]):
        letters.bits_per_byte(["the"], ["z"])


def test_prompt_but_not_text_is_truncated_to_the_reference_context(toy):
    run, judge = load(toy), ReferenceModel(toy)
    text = "ab cd ef"
    (found,) = judge.bits_per_byte(["x" * 500], [text])
    assert found == pytest.approx(bits_by_hand(run, "x" * (CONTEXT - len(text)), text), rel=1e-5)
    with pytest.raises(UserError, match=ERRORS["a_continuation_has_128_tokens"]):
        judge.bits_per_byte(["ab"], ["y" * CONTEXT])


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_valid_over_their_whole_scale(toy, name):
    run, method = load(toy), METHODS[name]
    for position in (0.0, 0.3, 0.5, 0.8, 1.0):
        run.params([run.settings({**method.settings, **method.values_at(position), "seed": 0})])


@pytest.fixture(scope="module")
def evaluation(toy):
    messages = []
    names = [
        "greedy",
        "temperature",
        "router_no_attention",
    ]  # each additional method takes seconds to compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "BOOTSTRAP_SAMPLES", 100)
        return (
            asdict(
                evaluate_sampling(
                    toy, quick=True, methods=names, progress=messages.append, **LITTLE
                )
            ),
            messages,
        )


def test_record_of_an_evaluation(toy, evaluation):
    record, messages = evaluation
    json.dumps(record, allow_nan=False)
    assert (
        record["run"] == str(toy) and record["reference"] is None and record["unit"] == "characters"
    )
    assert [method["name"] for method in record["methods"]] == [
        "human",
        "greedy",
        "temperature",
        "router_no_attention",
    ]
    for method in record["methods"]:
        measures = dict(method["measures"])
        measures.pop("excess", None)
        assert list(measures) == [
            name for name in MEASURES if name != "self_bleu" or method["name"] != "human"
        ]
        assert all(low <= value <= high for value, low, high in method["measures"].values())
        assert (method["tok_per_s"] is None) == (method["name"] == "human")
        assert len(method["trials"]) <= 2 and (method["tuned"] == {}) == (
            method["name"] in ("human", "greedy")
        )
    assert record["shares"] is None and record["comparisons"] == []
    assert len(record["ruler"]) == 7
    assert (
        sum("round 1 of 2" in line for line in messages) == 3 + 7
        and "tuning temperature, trial 1 of 2: temperature 0.8" in messages
    )


def test_real_text_is_measured(toy, store, evaluation):
    run = load(toy)
    _, test = draw_windows(run.tokenizer, store, *SIZE)
    human = evaluation[0]["methods"][0]["measures"]
    by_hand = [
        bits_by_hand(run, prompt, text)
        for prompt, text in zip(test.prompts, test.texts, strict=True)
    ]
    assert human["bits_per_byte"][0] == pytest.approx(np.mean(by_hand), rel=1e-5)
    assert human["distinct_1"][0] == pytest.approx(
        np.mean([len(set(text)) / 16 for text in test.texts])
    )


def test_greedy_samples_are_equal_and_most_likely(evaluation):
    by_name = {method["name"]: method["measures"] for method in evaluation[0]["methods"]}
    assert by_name["greedy"]["self_bleu"] == (1, 1, 1)
    assert by_name["greedy"]["bits_per_byte"][0] < min(
        by_name[name]["bits_per_byte"][0] for name in ("temperature", "human")
    )


def test_differences_are_paired():
    random = np.random.default_rng(4)
    measured = {
        name: {measure: random.normal(size=30) for measure in MEASURES} for name in ("a", "b")
    }
    noise = random.normal(0, 0.1, 2001)
    pair = _difference("a", "b", {"a": 1.3 + noise, "b": 1.1 + noise}, measured)
    assert verdict(pair.differences["excess"]) == "worse" and pair.differences[
        "excess"
    ] == pytest.approx((0.2, 0.2, 0.2))
    for measure in MEASURES:
        assert pair.differences[measure] == mean_interval(
            measured["a"][measure] - measured["b"][measure]
        )
    alone = _difference("b", "a", {"a": 1.3 + noise, "b": None}, measured)
    assert "excess" not in alone.differences


# These tests reuse the programs of the evaluation above, with the same number of prompts and
# tokens.


@pytest.fixture
def prompts(toy, store):
    return draw_windows(load(toy).tokenizer, store, *SIZE)[1].prompts


def test_continuations_match_generation(toy, prompts):
    run, settings = load(toy), {"temperature": 0.8}
    found = generate_continuations(run, prompts, settings, 16, seed=3)
    assert (
        found.ids.shape == (3, 16)
        and found.shares is None
        and all(rate > 0 for rate in found.rates)
    )
    special = sorted(run.tokenizer.special_ids)
    neutral = {
        "top_k": None,
        "stop": (),
        "ignore_eos": True,
        "banned_tokens": special,
        "max_new_tokens": 16,
    }
    requests = [
        run.request(text, {**neutral, **settings, "seed": (3 << 20) + i})
        for i, text in enumerate(prompts)
    ]
    (batch,) = run.start(requests)
    assert list(batch.parts())
    assert [result.tokens for result in batch.results] == found.ids.tolist()
    assert [result.text for result in batch.results] == found.texts


def test_samples_depend_on_the_seed_and_the_prompt_index(toy, prompts):
    run, same = load(toy), [prompts[0]] * 3
    first, again, other = (
        generate_continuations(run, same, {"temperature": 0.8}, 16, seed=seed).ids
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert (first[0] != first[1]).any() and (first != other).any()


def test_control_strategies_do_not_depend_on_the_model(toy, prompts):
    run, settings = load(toy), {**METHODS["router_no_attention"].settings, "candidates": 1}
    routed = generate_continuations(run, prompts, settings, 16, seed=1)
    forced = {name: float(name == "greedy") for name in STRATEGIES}
    greedy = generate_continuations(run, prompts, {"greedy": True}, 16, seed=1)
    control = generate_continuations(run, prompts, settings, 16, seed=1, shares=forced)
    np.testing.assert_array_equal(control.ids, greedy.ids)
    assert (routed.ids != greedy.ids).any()


def test_control_uses_the_measured_shares():
    """Tunes with a fake benchmark: the share of `adaptive` encodes the number of candidates."""
    written = []

    def continue_prompts(windows, method, seed, report=False):
        written.append((dict(method.values), method.shares, report))
        shares = {"adaptive": method.values["candidates"]} if report else None
        return Continuations(
            np.arange(60).reshape(2, 30) % (12 // method.values["candidates"]), [], [], shares
        )

    bench = SimpleNamespace(
        size=StudySize(trials=3), progress=lambda _: None, continue_prompts=continue_prompts
    )
    tuning = PromptWindows(["a", "b"], ["c", "d"], np.arange(60).reshape(2, 30) % 4)
    tuned = _tune_all(bench, ["router_calibrated", "router_random"], tuning)
    # Trials with 1, 3 and 6 candidates give texts of period 12, 4 and 2. The target has period 4.
    assert tuned["router_calibrated"].values == tuned["router_random"].values == {"candidates": 3}
    assert tuned["router_calibrated"].shares is None and tuned["router_random"].shares == {
        "adaptive": 3
    }
    assert [report for *_, report in written].count(True) == 1
    assert all(shares == {"adaptive": 3} for _, shares, _ in written[-3:])
    assert all(shares is None for _, shares, _ in written[:-3])


@pytest.mark.slow
def test_random_strategies_have_the_shares_of_the_router(toy):
    record = asdict(
        evaluate_sampling(toy, methods=["router_calibrated", "router_random"], **LITTLE)
    )
    assert [method["name"] for method in record["methods"]] == [
        "human",
        "router_calibrated",
        "router_random",
    ]
    assert sum(record["shares"].values()) == pytest.approx(1) and list(record["shares"]) == list(
        STRATEGIES
    )
    assert len(record["comparisons"]) == 1
    run, forced = load(toy), {name: float(name == "explore") for name in STRATEGIES}
    prompts = ["ab cd ef gh"] * 3
    assert (
        generate_continuations(
            run, prompts, METHODS["router_random"].settings, 16, seed=1, shares=forced, report=True
        ).shares
        == forced
    )


@pytest.mark.slow
def test_all_methods_together(toy):
    record = asdict(evaluate_sampling(toy, **LITTLE))
    assert [method["name"] for method in record["methods"]] == ["human", *METHODS]
    assert sum(record["shares"].values()) == pytest.approx(1) and list(record["shares"]) == list(
        STRATEGIES
    )
    assert len(record["comparisons"]) == 6
    assert {method["name"] for method in record["methods"] if method["tok_per_s"] is None} == {
        "human",
        "router_random",
    }


def test_missing_files_are_reported_before_the_work(toy, run_dir, tmp_path):
    with pytest.raises(
        UserError, match=ERRORS["router_calibrated_router_random_cannot_run_without"]
    ):
        evaluate_sampling(run_dir)
    with pytest.raises(UserError, match=ERRORS["has_no_saved_training_text"]):
        evaluate_sampling(run_dir, methods=["min_p"])
    with pytest.raises(UserError, match=ERRORS["leave_room_for_a_prompt"]):
        evaluate_sampling(toy, methods=["min_p"], tokens=128)
    with pytest.raises(UserError, match=ERRORS["windows_of_88_tokens_within"]):
        evaluate_sampling(toy, methods=["min_p"], tokens=24, prompts=1000)
    with pytest.raises(UserError, match=ERRORS["nowhere"]):
        evaluate_sampling(toy, tmp_path / "nowhere", methods=["min_p"], tokens=24, prompts=2)


def test_the_reference_is_opened_before_the_model_is_loaded(toy, tmp_path, monkeypatch):
    def load(run_dir):
        raise AssertionError("the model was loaded before the reference was checked")

    monkeypatch.setattr(sampling_study, "load", load)
    reference = tmp_path / "reference"
    reference.mkdir()
    with pytest.raises(UserError, match="reference"):
        evaluate_sampling(toy, reference, methods=["min_p"], tokens=24, prompts=2)
