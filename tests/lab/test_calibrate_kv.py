"""The calibration of attention heads: numbers against NumPy in float64, selection of text, files
and error messages.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from model import builder, reference
from scipy import stats

from dantinox import cli
from dantinox.config import UserError, build_config
from dantinox.generation import load
from dantinox.lab.measure import calibrate_kv as kv
from dantinox.lab.measure.calibrate_kv import measure_attention, query_lengths, sample_sequences
from dantinox.model.parameters import get_parameters
from dantinox.run import (
    accept_run,
    load_kv_calibration,
    load_run_config,
    open_run,
    save_config,
    save_weights,
    weights_digest,
)
from dantinox.text import prepare_data

SAMPLE = Path(__file__).parent.parent / "run" / "kv_entropy_v1.json"
EOS = 9
DOCUMENTS = [300, 57, 100, 20, 700]  # characters
LAYERS, HEADS = 2, 4  # of the run


def expected(config, weights, text) -> np.ndarray:
    """Returns entropy, number of keys that hold 95 %, and distance at the measured queries,
    `[3, R, L, N]`.

    They are computed with the tests' slow transformer.
    """
    result = np.zeros((3, 4, config.num_blocks, config.n_heads))
    for row in range(4):
        end = -(-len(text) * (row + 1) // 4)
        _, probed = reference.forward(config, weights, np.asarray(text[:end]))
        for layer, (scores_NS, sees_S) in enumerate(probed):
            for head, scores_S in enumerate(scores_NS):
                p_S = np.exp(scores_S[sees_S] - scores_S[sees_S].max())
                p_S /= p_S.sum()
                result[0, row, layer, head] = -(p_S @ np.log2(p_S))
                largest_S = np.sort(p_S)[::-1]
                result[1, row, layer, head] = next(
                    keys for keys in range(1, end + 1) if largest_S[:keys].sum() >= 0.95
                )
                back_S, later_S = end - 1 - np.flatnonzero(sees_S), np.flatnonzero(sees_S) >= 4
                result[2, row, layer, head] = (
                    p_S[later_S] @ back_S[later_S] / max(p_S[later_S].sum(), 1e-30)
                )
    return result


def calibrate_kv(*args, **settings):
    return kv.calibrate_kv(*args, **settings).to_dict()


# --- numbers


@pytest.mark.parametrize(
    ("changes", "batch_tokens"),
    [
        ({"windows": (None, 3)}, 1 << 20),
        ({"windows": (9, None, 1), "kv_heads": 1, "position": "learned"}, 14),
    ],
    ids=["one batch", "two rows at a time"],
)
def test_measures_match_numpy(changes, batch_tokens, monkeypatch):
    monkeypatch.setattr(kv, "BATCH_TOKENS", batch_tokens)
    config = builder.config(**changes)
    built = builder.build(config)
    texts = [builder.texts((1, length), seed=length)[0] for length in (26, 9, 4, 23, 16)]
    entropy_SRLN, keys_SRLN, distance_SRLN = measure_attention(built.model(), texts)
    assert entropy_SRLN.shape == (5, 4, config.num_blocks, 4)
    wanted = np.array([expected(config, built.weights, text) for text in texts])
    assert (
        np.ptp(wanted[:, 0]) > 2 and np.ptp(wanted[:, 1]) > 5
    )  # otherwise equality would prove little
    np.testing.assert_allclose(entropy_SRLN, wanted[:, 0], atol=2e-5)
    np.testing.assert_array_equal(keys_SRLN, wanted[:, 1])
    np.testing.assert_allclose(distance_SRLN, wanted[:, 2], rtol=1e-4, atol=1e-5)


def test_query_lengths():
    assert (
        query_lengths(64) == [16, 32, 48, 64]
        and query_lengths(4) == [1, 2, 3, 4]
        and query_lengths(10) == [3, 5, 8, 10]
    )
    for tokens in range(4, 300):
        starts = [0, *query_lengths(tokens)]
        assert max(np.diff(starts)) <= -(-tokens // 4) and min(np.diff(starts)) >= 1


def test_statistics_match_the_sample_file():
    sample = json.loads(SAMPLE.read_bytes())
    heads = np.array(list(sample["head_entropies"].values()))
    assert kv.head_types(heads) == sample["head_types"]
    assert kv.entropy_stats(heads) == pytest.approx(sample["entropy_stats"], abs=1e-6)


def test_types_begin_at_their_limit():
    bounds = np.array([0, 0.499, 0.5, 1.499, 1.5, 2.99, 3, 3.99, 4, 99])
    assert kv.head_types(bounds) == {
        "sink": 2,
        "focused": 2,
        "moderate": 2,
        "mixed": 2,
        "diffuse": 2,
    }
    zeros = kv.entropy_stats(np.zeros(3))
    assert zeros["cv"] is None and zeros["range_ratio"] is None and zeros["std"] == 0
    assert kv.entropy_stats(np.array([5e-324, 9]))["range_ratio"] is None  # too large for a number


def test_split_half():
    random = np.random.default_rng(1)
    entropy_SLN = random.random((5, 2, 4))
    odd, even = (entropy_SLN[list(rows)].sum(0) / len(rows) for rows in ((0, 2, 4), (1, 3)))
    assert kv.split_half(entropy_SLN) == pytest.approx(
        stats.spearmanr(odd.ravel(), even.ravel()).statistic
    )
    assert kv.split_half(entropy_SLN[:1]) is None
    assert kv.split_half(np.ones((4, 2, 4))) is None
    assert (
        -1 <= kv.split_half(np.repeat(entropy_SLN[:1], 2, axis=0)) <= 1
    )  # a file with a value above 1 would be rejected


# --- selection of text


def documents_of(ids):
    """Returns start and end of every document, without its EOS token."""
    ends = [place for place, token in enumerate(ids) if token == EOS] + [len(ids)]
    return [
        (begin, end)
        for begin, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)
        if end > begin
    ]


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=12),
    st.integers(1, 150),
    st.integers(1, 8),
    st.integers(0, 99),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_sequences_are_spans_of_single_documents(sizes, length, count, seed, closed):
    ids = np.concatenate([np.append(np.ones(size), EOS) for size in sizes]).astype(np.uint16)
    ids = ids if closed else ids[:-1]
    least = min(64, length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv, "MAX_TRIES", 200)
        # Token ids are unique positions, so that ids identify a sequence.
        places = np.where(ids == EOS, EOS, np.arange(len(ids)) + 10)
        found = sample_sequences(places, count, length, EOS, seed)
        assert [text.tolist() for text in sample_sequences(places, count, length, EOS, seed)] == [
            text.tolist() for text in found
        ]
    long_enough = [(begin, end) for begin, end in documents_of(ids) if end - begin >= least]
    assert len({tuple(text) for text in found}) == len(found) <= count
    for text in found:
        first = int(text[0]) - 10
        assert text.dtype == np.int32 and text.tolist() == list(
            range(first + 10, first + 10 + len(text))
        )
        (document,) = [(b, e) for b, e in long_enough if b <= first and first + len(text) <= e]
        assert len(text) == min(length, document[1] - document[0])


def test_positions_are_sampled_uniformly():
    """Documents are sampled in proportion to their length, and positions within a document
    uniformly.
    """
    ids = np.concatenate(
        [np.append(np.full(size, number), EOS) for number, size in enumerate((1000, 3000, 70, 20))]
    )
    found = [text for seed in range(200) for text in sample_sequences(ids, 10, 64, EOS, seed)]
    assert len(found) == 2000
    shares = np.bincount([text[0] for text in found], minlength=4) / 2000
    np.testing.assert_allclose(shares, np.array([1000, 3000, 70, 0]) / 4070, atol=0.03)
    starts = (
        np.array(
            [
                text[0]
                for seed in range(300)
                for text in sample_sequences(np.arange(10, 5010), 10, 64, None, seed)
            ]
        )
        - 10
    )
    assert np.abs(np.bincount(starts // 500, minlength=10)[:9] / 3000 - 0.1).max() < 0.025


def test_text_without_a_long_document_gives_no_sequence(monkeypatch):
    monkeypatch.setattr(kv, "MAX_TRIES", 300)
    ids = np.tile(np.append(np.ones(63), EOS), 9)
    assert (
        sample_sequences(ids, 3, 200, EOS, 0) == []
        and sample_sequences(ids[:0], 3, 200, EOS, 0) == []
    )
    assert {len(text) for text in sample_sequences(ids, 3, 63, EOS, 0)} == {63}
    assert (
        len(sample_sequences(ids[:63], 9, 60, EOS, 0)) == 4
    )  # there are only four distinct sequences


# --- a run


def texts():
    random = np.random.default_rng(5)
    return ["".join(random.choice(list("abcdefghij "), size)) for size in DOCUMENTS]


@pytest.fixture(scope="module")
def source(run_dir, tmp_path_factory):
    """A run with training tokens, whose heads attend to different numbers of keys."""
    path = tmp_path_factory.mktemp("runs") / "source"
    shutil.copytree(run_dir, path)
    run = load(path)
    random = np.random.default_rng(1)
    parameters = {name: np.array(array) for name, array in get_parameters(run.model).items()}
    for name, array in parameters.items():
        if name.endswith("qkv/kernel"):
            parameters[name] = (
                random.standard_normal(array.shape) * np.array([0.05, 0.8])[:, None, None]
            ).astype(np.float32)
    save_weights(open_run(path).weights, parameters)
    corpus = path / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts()), encoding="utf-8"
    )
    data = {"data.path": str(corpus), "data.val_path": str(corpus), "training.batch_size": 1}
    config = build_config(load_run_config(open_run(path)).model_dump(), data)
    save_config(open_run(path), config)
    prepare_data(config, open_run(path).data, run.tokenizer)
    return path


@pytest.fixture
def run_path(source, tmp_path):
    shutil.copytree(source, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def measured(source, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    shutil.copytree(source, path)
    return path, calibrate_kv(path, sequences=3, seed=4, loss=False)


@pytest.fixture
def record(measured):
    return measured[1]


def test_record_matches_numpy(measured):
    path, record = measured
    run = load(path)
    ids = [
        token
        for text in texts()
        for token in [run.tokenizer.bos_id, *text.encode(), run.tokenizer.eos_id]
    ]
    chosen = sample_sequences(np.array(ids), 3, 128, run.tokenizer.eos_id, 4)
    weights = reference.float64(nnx.to_pure_dict(nnx.state(run.model)))
    wanted = np.array([expected(run.model.config, weights, text) for text in chosen])
    heads = wanted[:, 0].mean(axis=(0, 1))
    assert np.ptp(heads) > 1  # otherwise all heads would be alike
    names = [f"L{layer}_H{head}" for layer in range(LAYERS) for head in range(HEADS)]
    coverage, distance = wanted[:, 1:].mean(axis=(0, 2))
    for key, numbers in (("head_entropies", heads), ("coverage", coverage), ("distance", distance)):
        assert list(record[key]) == names
        np.testing.assert_allclose(
            list(record[key].values()), numbers.ravel(), rtol=1e-5, atol=1e-4
        )
    at_rows = np.moveaxis(wanted[:, 0].mean(axis=0), 0, -1).reshape(-1, 4)
    np.testing.assert_allclose(list(record["length_entropies"].values()), at_rows, atol=1e-4)
    lengths = [[-(-len(text) * row // 4) for row in (1, 2, 3, 4)] for text in chosen]
    assert record["lengths"] == pytest.approx(np.mean(lengths, axis=0).tolist())
    odd, even = (wanted[first::2, 0].mean(axis=(0, 1)).ravel() for first in (0, 1))
    assert record["split_half_correlation"] == pytest.approx(stats.spearmanr(odd, even).statistic)
    assert (
        record["tokens"] == sum(map(len, chosen))
        and record["sequences"] == 3
        and record["seed"] == 4
    )
    assert (
        record["weights"] == weights_digest(open_run(path))
        and record["tokenizer"] == run.tokenizer.fingerprint
    )
    assert sum(record["head_types"].values()) == LAYERS * HEADS
    assert record["entropy_stats"]["mean"] == pytest.approx(heads.mean(), abs=1e-4)


def test_record_is_saved_and_loaded(measured):
    path, record = measured
    saved = json.loads(open_run(path).kv.read_bytes())
    assert saved == record and saved["format_version"] == 2
    assert set(json.loads(SAMPLE.read_bytes())) <= set(saved)  # the keys of format 1
    assert (
        saved["model"],
        saved["n_layer"],
        saved["n_head"],
        saved["n_head_kv"],
        saved["n_ctx"],
    ) == ("run", 2, 4, 2, 128)
    assert (
        saved["model_info"]["head_dim"] == 8
        and saved["model_info"]["is_gqa"]
        and saved["model_info"]["gqa_ratio"] == 2
    )
    found = load_kv_calibration(
        open_run(path).kv, load(path).model.config, weights_digest(open_run(path))
    )
    np.testing.assert_array_equal(found.entropy_LN.ravel(), list(record["head_entropies"].values()))
    assert (
        found.coverage_LN is not None
        and found.coverage_LN.shape == (LAYERS, HEADS)
        and found.loss_LKC is None
    )
    np.testing.assert_array_equal(found.distance_LN.ravel(), list(record["distance"].values()))


def test_other_text_and_output_file(run_path, record, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(json.dumps({"text": part}) + "\n" for part in texts()), encoding="utf-8"
    )
    out = tmp_path / "out.json"
    result = calibrate_kv(run_path, sequences=3, seed=4, data_path=text, output=out, loss=False)
    assert json.loads(out.read_bytes()) == result and not open_run(run_path).kv.exists()
    assert list(result) == list(record) and result["sequences"] == 3
    shutil.rmtree(run_path / "data")
    assert calibrate_kv(run_path, sequences=3, seed=4, data_path=text, loss=False) == result
    assert (
        calibrate_kv(run_path, sequences=1, seed=4, data_path=text, loss=False).get(
            "split_half_correlation"
        )
        is None
    )


def test_loss_rises_are_estimated_by_default(run_path, record):
    messages = []
    result = calibrate_kv(run_path, sequences=3, seed=4, progress=messages.append)
    assert {key: result[key] for key in record} == record and set(result) - set(record) == {
        "loss",
        "loss_slots",
    }
    assert list(result["loss"]) == [f"L{layer}_K{head}" for layer in range(2) for head in range(2)]
    assert messages[0] == "measuring the attention of each head: 3 sequences"
    assert any(line.startswith("measuring what eviction costs each head: ") for line in messages)
    found = load_kv_calibration(
        open_run(run_path).kv, load(run_path).model.config, weights_digest(open_run(run_path))
    )
    assert found.loss_LKC is not None and found.loss_LKC.reshape(4, -1).tolist() == list(
        result["loss"].values()
    )
    assert list(found.loss_slots) == result["loss_slots"] and found.loss_LKC.shape == (
        2,
        2,
        len(found.loss_slots),
    )


def test_format_1_is_imported(run_path):
    run = open_run(run_path)
    record = calibrate_kv(run_path, from_results=SAMPLE)
    sample = json.loads(SAMPLE.read_bytes())
    assert json.loads(run.kv.read_bytes()) == record and record["format_version"] == 2
    for key in (
        "head_entropies",
        "head_types",
        "calibration",
        "n_layer",
        "n_head",
        "n_head_kv",
        "n_ctx",
        "model",
    ):
        assert record[key] == sample[key]
    assert record["entropy_stats"] == pytest.approx(sample["entropy_stats"], abs=1e-6)
    assert not {
        "coverage",
        "lengths",
        "length_entropies",
        "weights",
        "tokens",
        "seed",
        "loss",
    } & set(record)
    assert (
        load_kv_calibration(run.kv, load(run_path).model.config, weights_digest(run)).coverage_LN
        is None
    )


def test_format_2_is_imported_completely(measured, run_path, tmp_path):
    path, record = measured
    out = tmp_path / "a.json"
    assert calibrate_kv(run_path, from_results=open_run(path).kv, output=out) == record
    assert json.loads(out.read_bytes()) == record


# --- errors


def sentence(*args, **kwargs):
    with pytest.raises(UserError) as caught:
        calibrate_kv(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_mismatched_results_are_not_imported(measured, run_path, tmp_path):
    other = tmp_path / "other.json"
    tree = json.loads(SAMPLE.read_bytes()) | {"n_layer": 3}
    other.write_text(json.dumps(tree), encoding="utf-8")
    assert "is for another model: it has 3 layers" in sentence(run_path, from_results=other)
    for key, what in (("weights", "other weights"), ("tokenizer", "another tokenizer")):
        other.write_text(json.dumps(measured[1] | {key: "0" * 64}), encoding="utf-8")
        assert f"was measured on {what}" in sentence(run_path, from_results=other)
    assert (
        sentence(run_path, output=tmp_path) == f"cannot write {tmp_path}: it is not a regular file"
    )
    assert "no calibration at" in sentence(run_path, from_results=tmp_path / "none.json")
    for more in ({"data_path": "x.txt"}, {"loss": False}):
        assert "from_results measures nothing" in sentence(run_path, from_results=SAMPLE, **more)
    assert not open_run(run_path).kv.exists()


def test_errors_without_text_or_long_documents(run_path, tmp_path, monkeypatch):
    monkeypatch.setattr(kv, "MAX_TRIES", 100)
    assert "sequences must be an integer ≥ 1, got 0" in sentence(run_path, sequences=0)
    assert "seed must be an integer ≥ 0, got -1" in sentence(run_path, seed=-1)
    short = tmp_path / "short.jsonl"
    short.write_text(
        '{"text": "' + "a" * 62 + '"}\n{"text": "b"}\n', encoding="utf-8"
    )  # 63 tokens including the first
    message = "the text has no document of at least 64 tokens: select another text with --data_path"
    assert sentence(run_path, data_path=short) == message
    assert "no corpus at" in sentence(run_path, data_path=tmp_path / "none.txt")
    shutil.rmtree(run_path / "data")
    assert (
        sentence(run_path)
        == f"{run_path} has no saved training text: select a text with --data_path"
    )
    assert not open_run(run_path).kv.exists()
    assert "no run directory at" in sentence(tmp_path / "none")


def test_tiny_context(run_path):
    config = open_run(run_path).config
    config.write_text(
        config.read_text(encoding="utf-8").replace("max_context: 128", "max_context: 3"),
        encoding="utf-8",
    )
    accept_run(open_run(run_path))
    assert sentence(run_path) == "calibration needs model.max_context ≥ 4, got 3"


def test_nan_weights_are_rejected(run_path):
    run = open_run(run_path)
    parameters = {
        name: np.array(array) for name, array in get_parameters(load(run_path).model).items()
    }
    parameters["embed"][:] = np.nan
    save_weights(run.weights, parameters)
    assert "its weights are damaged" in sentence(run_path, sequences=3)
    assert not run.kv.exists()


# --- the command


def command(capsys, *argv):
    code = cli.main(["calibrate", "--what", "kv", *map(str, argv)])
    return code, *capsys.readouterr()


def test_command_prints_one_object(run_path, capsys):
    code, out, err = command(capsys, "--run_dir", run_path, "--sequences", 3, "--no_loss", "--json")
    assert (
        code == 0
        and err.startswith("measuring the attention of each head: 3 sequences\n")
        and out.count("\n") == 1
    )
    assert json.loads(out) == json.loads(open_run(run_path).kv.read_bytes())


def test_command_prints_lines_and_writes_a_plot(run_path, capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "80")
    out, picture = tmp_path / "out.json", tmp_path / "a.png"
    code, result, err = command(
        capsys, "--run_dir", run_path, "--from_results", SAMPLE, "--output", out, "--plot", picture
    )
    assert (code, err) == (0, "") and max(map(len, result.splitlines())) <= 80
    assert ["sink", "<", "0.5", "bits", "2", "25.0%"] in [
        line.split() for line in result.splitlines()
    ]
    assert "--kv_calibration" in result
    assert out.is_file() and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--tokens", 9], "--tokens"),
        (["--from_results", SAMPLE, "--sequences", 3], "--sequences"),
        (["--plot", "a.jpg"], "--plot must name a .png file"),
        (["--from_results", "none.json"], "no calibration at none.json"),
        (["--output", "none/a.json"], "cannot write none/a.json: there is no directory none"),
    ],
)
def test_command_errors_are_one_sentence(run_path, capsys, tmp_path, monkeypatch, flags, part):
    monkeypatch.chdir(tmp_path)
    code, out, err = command(capsys, "--run_dir", run_path, *flags)
    assert (
        (code, out) == (2, "")
        and part in err
        and err.startswith("error: ")
        and err.count("\n") == 1
    )
