"""The calibration of the router: numbers against NumPy in float64, error messages, table and
plot.
"""

import json
import math
import shutil
import struct
from dataclasses import asdict, replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dantinox.config import TokenizerSection, UserError, build_config
from dantinox.config.router_settings import (
    CALIBRATED_THRESHOLDS,
    RULES,
    STRATEGIES,
    RouterSection,
    strategy_intervals,
)
from dantinox.generation import load
from dantinox.lab.measure import calibrate_router as calibrate
from dantinox.lab.measure.calibrate_router import (
    MIN_SCALE,
    calibrate_router,
    cut_windows,
    density,
    thresholds,
)
from dantinox.lab.measure.calibrate_router_view import (
    calibration_lines,
    draw_calibration,
    max_varentropy,
    preset_summary,
    unused_strategies,
)
from dantinox.lab.measure.texts import read_tokens
from dantinox.model.parameters import get_parameters
from dantinox.report.tables import percent
from dantinox.run import load_router_calibration, load_run_config, open_run, save_weights
from dantinox.sampling.entropy_router import Metrics, RouterConfig, select_strategy
from dantinox.text import prepare_data, train_tokenizer
from tests.error_texts import ERRORS

T, CONTEXT = 128, 32
DOCUMENTS = [300, 57, 700, 20, 9, 640, 128, 333, 64]  # characters


def texts():
    random = np.random.default_rng(5)
    return ["".join(random.choice(list("abcdefghij "), size)) for size in DOCUMENTS]


def corpus(path, documents):
    path.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8"
    )
    return path


@pytest.fixture(scope="module")
def source(run_dir, tmp_path_factory):
    """A run with a validation text, whose model has low entropy at some tokens and high entropy at
    others.
    """
    path = tmp_path_factory.mktemp("runs") / "source"
    shutil.copytree(run_dir, path)
    run = load(path)
    random = np.random.default_rng(1)
    parameters = {name: np.asarray(array) for name, array in get_parameters(run.model).items()}
    V, D = parameters["embed"].shape
    loud_V1 = 4 * random.random((V, 1)) ** 2
    parameters["embed"] = (loud_V1 * parameters["embed"]).astype(np.float32)
    parameters["head/kernel"] = random.standard_normal((D, V)).astype(np.float32)
    for name in parameters:
        if name.endswith("kernel") and name != "head/kernel":
            parameters[name] = parameters[name] * 10
    save_weights(open_run(path).weights, parameters)
    config = load_run_config(open_run(path))
    data = {"path": str(corpus(path / "corpus.jsonl", texts() * 4)), "val_fraction": 0.25}
    given = {
        "model": config.model.model_dump(),
        "tokenizer": {"tokenizer_type": "byte"},
        "data": data,
    }
    prepare_data(build_config(given), open_run(path).data, run.tokenizer)
    return path


@pytest.fixture
def run_path(source, tmp_path):
    shutil.copytree(source, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def record(source, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "measured"
    shutil.copytree(source, path)
    return calibrate_router(path)


forward = nnx.jit(
    lambda model, tokens_BT, positions_BT: model(tokens_BT, positions_BT)[0], graph_updates=False
)


def slowly(path, window=T, context=CONTEXT):
    """Returns H and V of every measured position in float64, with a separate pass for each document
    of each window.
    """
    run = load(path)
    bos, eos = run.tokenizer.bos_id, run.tokenizer.eos_id
    ids = [token for text in texts() for token in [bos, *text.encode(), eos]]
    H, V = [], []
    for start in range(0, len(ids), window):
        part, place = ids[start : start + window], 0
        while place < len(part):
            end = part.index(eos, place) + 1 if eos in part[place:] else len(part)
            tokens = np.zeros((1, window), np.int32)
            tokens[0, : end - place] = part[place:end]
            logits_TV = np.asarray(
                forward(run.model, jnp.asarray(tokens), jnp.arange(window)[None])[0], np.float64
            )
            for t in range(end - place):
                if part[place + t] != eos and (place > 0 or t >= context):
                    p_V = np.exp(logits_TV[t] - logits_TV[t].max())
                    p_V /= p_V.sum()
                    bits_V = -np.log2(p_V)
                    H.append(p_V @ bits_V)
                    V.append(p_V @ bits_V**2 - H[-1] ** 2)
            place = end
    return np.array(H), np.array(V), len(ids)


def quantile(values, share):
    """Returns a quantile by linear interpolation between the two nearest ranks."""
    place = share * (len(values) - 1)
    low, part = int(place), place - int(place)
    values = sorted(values)
    return values[low] + part * (values[min(low + 1, len(values) - 1)] - values[low])


def by_hand(H, V, n):
    """Returns the share of each strategy for thresholds in the order of `CALIBRATED_THRESHOLDS`;
    the first match counts.
    """
    conditions = [
        (n[0] > H) & (n[1] > V),
        (n[2] < H) & (n[1] > V),
        (n[3] > H) & (n[4] < V),
        (n[3] < H) & (n[4] < V),
    ]
    taken = np.select(conditions, [0, 1, 2, 3], 4)
    return [np.mean(taken == strategy) for strategy in range(5)]


# --- numbers


def test_numbers_match_numpy(source, record):
    H, V, count = slowly(source)
    assert np.ptp(H) > 2 and np.ptp(V) > 1  # otherwise quantiles would prove nothing
    # The last token of the text is only a target, and it ends a document.
    assert record.tokens == len(H) and record.tokens + record.skipped == count - 1
    expected = [
        quantile(H, 0.25),
        quantile(V, 0.25),
        quantile(H, 0.75),
        quantile(H, 0.9),
        quantile(V, 0.75),
    ]
    expected += [2 * quantile(H, 0.5), 2 * quantile(V, 0.5)]
    assert tuple(record.measured) == CALIBRATED_THRESHOLDS
    np.testing.assert_allclose(list(record.measured.values()), expected, rtol=2e-4)
    quantiles = record.quantiles
    assert quantiles["percent"][0] == 0 and quantiles["percent"][-1] == 100
    for name, values in (("entropy", H), ("varentropy", V)):
        np.testing.assert_allclose(
            quantiles[name], [quantile(values, p / 100) for p in quantiles["percent"]], rtol=2e-4
        )
    near = 3 / len(H)  # a position on a threshold may be on either side
    for preset, numbers in (("guide", (0.1, 0.1, 3.0, 5.0, 5.0)), ("calibrated", expected)):
        assert list(record.shares[preset]) == list(STRATEGIES)
        np.testing.assert_allclose(
            list(record.shares[preset].values()), by_hand(H, V, numbers), atol=near
        )
    cells, _, _ = np.histogram2d(
        H, V, [record.density["entropy_edges"], record.density["varentropy_edges"]]
    )
    assert np.sum(record.density["counts"]) == len(H)
    assert np.abs(np.asarray(record.density["counts"]) - cells).sum() < 20
    assert (
        record.vocab_size == load(source).tokenizer.vocab_size
        and record.window == T
        and record.context == CONTEXT
    )


def test_equal_input_gives_equal_files(run_path, record):
    run = open_run(run_path)
    assert calibrate_router(run_path) == record
    first = run.router.read_bytes()
    assert json.loads(first) == {"version": 1, **asdict(record)}
    assert load_router_calibration(run) == record.measured
    calibrate_router(run_path)
    assert run.router.read_bytes() == first


@pytest.mark.parametrize(
    ("batch", "chunk"), [pytest.param(1, 1 << 24, marks=pytest.mark.slow), (7, 3000)]
)
def test_batches_and_chunks_do_not_change_results(run_path, record, monkeypatch, batch, chunk):
    monkeypatch.setattr(calibrate, "BATCH_TOKENS", batch * T)
    monkeypatch.setattr(calibrate, "CHUNK_LOGITS", chunk)
    found = calibrate_router(run_path)
    assert found.tokens == record.tokens
    np.testing.assert_allclose(
        list(found.measured.values()), list(record.measured.values()), rtol=1e-4
    )


@pytest.mark.slow
def test_short_windows_with_a_shorter_context(run_path, monkeypatch):
    H, _, _ = slowly(run_path, window=48, context=12)
    monkeypatch.setattr(calibrate, "WINDOW", 48)
    found = calibrate_router(run_path)
    assert (found.window, found.context, found.tokens) == (48, 12, len(H))
    assert found.quantiles["entropy"][5] == pytest.approx(quantile(H, 0.5), rel=2e-4)
    monkeypatch.setattr(calibrate, "CONTEXT", 5)
    assert calibrate_router(run_path).context == 5


def test_given_text_is_read_like_the_store(run_path, record, tmp_path):
    assert calibrate_router(run_path, data_path=corpus(tmp_path / "val.jsonl", texts())) == record
    shutil.rmtree(run_path / "data")
    assert calibrate_router(run_path, data_path=tmp_path / "val.jsonl") == record


def test_tokens_limits_the_text(run_path, record, tmp_path):
    part = calibrate_router(run_path, tokens=900)
    assert part.tokens + part.skipped == 900
    assert (
        calibrate_router(run_path, tokens=900, data_path=corpus(tmp_path / "val.jsonl", texts()))
        == part
    )
    assert calibrate_router(run_path, tokens=10**9) == record


def test_measured_positions():
    found = cut_windows(np.array([5, 5, 5, 9, 5, 5, 5, 5, 5, 5]), 4, 2, 9)
    np.testing.assert_array_equal(found.tokens_NT, [[5, 5, 5, 9], [5, 5, 5, 5], [5, 5, 0, 0]])
    np.testing.assert_array_equal(found.counted_NT, [[0, 0, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]])
    found = cut_windows(np.array([5, 9, 5, 5, 9, 9, 5]), 8, 3, 9)
    np.testing.assert_array_equal(found.segments_NT, [[0, 0, 1, 1, 1, 2, 3, 3]])
    np.testing.assert_array_equal(found.counted_NT, [[0, 0, 1, 1, 0, 0, 1, 0]])
    assert cut_windows(np.array([5] * 9), 4, 0, None).counted_NT.sum() == 9
    assert cut_windows(np.zeros(0, np.int32), 4, 2, None).counted_NT.shape == (0, 4)


def test_model_without_entropy_still_has_scales():
    measured = thresholds(np.zeros(9), np.zeros(9))
    assert measured == dict.fromkeys(CALIBRATED_THRESHOLDS, 0.0) | {
        "entropy_scale": MIN_SCALE,
        "varentropy_scale": MIN_SCALE,
    }
    RouterConfig.build(RouterSection(router_preset="calibrated"), measured)
    RouterSection(entropy_scale=MIN_SCALE)
    with pytest.raises(ValueError):
        RouterSection(entropy_scale=MIN_SCALE * 0.99)
    assert np.sum(density(np.zeros(9), np.zeros(9))["counts"]) == 9


# --- errors


def sentence(*args, **kwargs):
    with pytest.raises(UserError) as caught:
        calibrate_router(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_errors_without_text_or_with_too_little(run_path, tmp_path):
    assert "raise --tokens" in sentence(run_path, tokens=300)
    assert "tokens must be an integer ≥ 1, got 0" in sentence(run_path, tokens=0)
    short = tmp_path / "short.txt"
    short.write_text("abc" * 100, encoding="utf-8")
    message = sentence(run_path, data_path=short)
    assert (
        "at least 500 positions" in message
        and "select a longer text with --data_path" in message
        and "first 32 of each" in message
    )
    assert "no corpus at" in sentence(run_path, data_path=tmp_path / "none.txt")
    shutil.rmtree(run_path / "data")
    assert (
        sentence(run_path)
        == f"{run_path} has no saved training text: select a text with --data_path"
    )
    assert not open_run(run_path).router.exists()
    assert "no run directory at" in sentence(tmp_path / "none")


def test_nan_weights_are_rejected(run_path):
    run = open_run(run_path)
    parameters = {
        name: np.array(array) for name, array in get_parameters(load(run_path).model).items()
    }
    parameters["embed"][:] = np.nan
    save_weights(run.weights, parameters)
    assert "its weights are damaged" in sentence(run_path)
    assert not run.router.exists()


def test_damaged_calibration_is_replaced(run_path, record):
    open_run(run_path).router.write_text("{", encoding="utf-8")
    assert calibrate_router(run_path) == record
    assert load_router_calibration(open_run(run_path)) == record.measured


def test_unknown_character_is_reported_with_its_position(tmp_path):
    tokenizer = train_tokenizer(TokenizerSection(tokenizer_type="char"), lambda: iter(["ab\n"]))
    path = tmp_path / "text.txt"
    path.write_text("ab\n" * 30_000 + "€", encoding="utf-8")
    assert len(read_tokens(tokenizer, str(path), "text", 1000)) == 1000
    with pytest.raises(UserError, match=ERRORS["u_20ac_at_position_90000"]):
        read_tokens(tokenizer, str(path), "text", 100_000)


# --- table and plot


def test_lines(record):
    lines = list(calibration_lines(record, 90))
    assert max(map(len, lines)) <= 90 and f"at {record.tokens:,} positions" in lines[0]
    row = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert row["setting"] == row["strategy"] == ["guide", "calibrated"]
    assert row["low_entropy"] == ["0.100", f"{record.measured['low_entropy']:.3f}"]
    assert row["H"][1:] == [f"{value:.3f}" for value in record.quantiles["entropy"]]
    assert row["explore"] == [
        percent(record.shares[preset]["explore"]) for preset in ("guide", "calibrated")
    ]
    assert preset_summary(record) in " ".join(lines) and "--router_preset calibrated" in lines[-1]


def test_summary_names_unused_strategies():
    guide = dict(zip(STRATEGIES, (0.01, 0.0, 0.04, 0.0, 0.95), strict=True))
    calibrated = dict.fromkeys(STRATEGIES, 0.1) | {"explore": 0.6}
    record = SimpleNamespace(vocab_size=80, shares={"guide": guide, "calibrated": calibrated})
    assert (
        preset_summary(record)
        == "With 80 tokens H is at most log2 80 = 6.32 bits: the guide's thresholds give adaptive"
        " 95.0% of the positions and none to clarify and resample; the calibrated ones give"
        " explore 60.0% of the positions and use all five strategies."
    )
    numbers = dict.fromkeys(CALIBRATED_THRESHOLDS, 1.0) | {
        "clarify_entropy": 6.214,
        "low_varentropy": 4.58,
    }
    never = {"calibrated": dict.fromkeys(STRATEGIES, 0.25) | {"clarify": 0.0}}
    assert list(
        unused_strategies(SimpleNamespace(tokens=5808, measured=numbers, shares=never))
    ) == [
        "problem: none of the 5,808 positions meets the calibrated thresholds of clarify (H > 6.21"
        " and V < 4.58): this model will hardly ever use that strategy"
    ]
    assert [percent(share) for share in (0, 1e-6, 0.001, 0.1234, 1)] == [
        "0.0%",
        "<0.1%",
        "0.1%",
        "12.3%",
        "100.0%",
    ]


def test_plotted_areas_match_the_rules():
    random = np.random.default_rng(0)
    for _ in range(20):
        high_V, clarify_H = 2 + random.random(), 1 + 3 * random.random()
        numbers = dict(
            zip(
                CALIBRATED_THRESHOLDS,
                (random.random(), random.random(), clarify_H, 4.0, high_V, 1.0, 1.0),
                strict=True,
            )
        )
        H, V = 6 * random.random((2, 300))
        config = RouterConfig.build(
            RouterSection(router_preset="calibrated", use_attention=False), numbers
        )
        taken = np.asarray(select_strategy(Metrics(jnp.float32(H), jnp.float32(V)), config))
        inside = np.full(300, STRATEGIES.index("adaptive"))
        for name in RULES:
            (left, right), (low, high) = strategy_intervals(name, numbers).values()
            inside[(left < H) & (right > H) & (low < V) & (high > V)] = STRATEGIES.index(name)
        np.testing.assert_array_equal(inside, taken)


@pytest.mark.parametrize("n", [2, 3, 10, 80, 5000])
def test_no_distribution_has_more_varentropy(n):
    H_line, V_line = max_varentropy(n)
    assert (
        H_line.max() == pytest.approx(math.log2(n), abs=0.01)
        and H_line.min() < 1e-6
        and np.all(np.diff(H_line) <= 1e-9)
    )
    random = np.random.default_rng(n)
    found = [
        random.dirichlet(np.full(n, concentration))
        for concentration in (0.01, 0.1, 0.5, 1, 5)
        for _ in range(40)
    ]
    for favorites in {1, 2, n // 2, n - 1} - {n}:  # two probabilities
        for p in np.linspace(0.01, 0.99, 60):
            found.append(
                np.repeat([p / favorites, (1 - p) / (n - favorites)], [favorites, n - favorites])
            )
    for p_V in found:
        p_V = p_V[p_V > 0]
        bits_V = -np.log2(p_V)
        H = p_V @ bits_V
        assert p_V @ (bits_V - H) ** 2 <= np.interp(H, H_line[::-1], V_line[::-1]) * 1.001 + 1e-3
    p = 0.3 + 0.7 / n  # one of the distributions on the line
    p_V = np.array([p] + [(1 - p) / (n - 1)] * (n - 1))
    H = -(p_V @ np.log2(p_V))
    assert np.interp(H, H_line[::-1], V_line[::-1]) == pytest.approx(
        p_V @ (np.log2(p_V) + H) ** 2, rel=1e-3, abs=1e-3
    )


def test_plot(record):
    pytest.importorskip("matplotlib")
    data = draw_calibration(record)
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and struct.unpack(">II", data[16:24]) == (
        1350,
        690,
    )
    draw_calibration(replace(record, density=density(np.zeros(9), np.zeros(9)), vocab_size=2))


def test_error_without_matplotlib_names_the_extra(record, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(UserError, match=ERRORS["pip_install_dantinox_plot"]):
        draw_calibration(record)
