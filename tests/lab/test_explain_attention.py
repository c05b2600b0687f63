"""Attention weights of one head, compared with NumPy in float64; their table, map and page."""

import json
import re

import numpy as np
import pytest

from dantinox import cli
from dantinox.config import LatentConfig, UserError, build_config
from dantinox.generation import load
from dantinox.generation.api.loaded_model import LoadedModel
from dantinox.lab.measure.explain import explain
from dantinox.lab.measure.explain_attention import MAX_TOKENS, HeadWeights, head_weights
from dantinox.lab.measure.explain_attention_view import head_lines, head_map
from dantinox.lab.measure.explain_view import explanation_lines
from tests.generation.builder import BYTES
from tests.model import builder, reference

IDS = builder.texts((1, 9), seed=3)[0]
PROMPT = "abca"
LATENT = LatentConfig(6, 2, 3)
ARCHITECTURES = {
    "grouped": {},
    "window, cap and sinks": {"windows": (4, None), "softcap": 1.5, "sink_logits": True},
    "shared keys": {"windows": (4, None, 4, None), "kv_shared_layers": 2},
    "latent with sinks": {"latent": LATENT, "kv_heads": 4, "sink_logits": True},
}


def loaded(**changes):
    built = builder.build(builder.config(**changes))
    return LoadedModel(build_config({"model": {"max_context": 32}}), built.model(), BYTES), built


def expected(built, layer, head):
    """The weights `[T, T + 1]` of a head, that of the sink last, from one pass over each prefix of
    the text.
    """
    T = len(IDS)
    rows = np.zeros((T, T + 1))
    attention = built.weights["blocks"][layer]["attention"]
    sink = np.exp(attention["sinks"].reshape(-1)[head]) if built.config.sink_logits else 0.0
    for t in range(T):
        scores_NS, valid_S = reference.forward(built.config, built.weights, IDS[: t + 1])[1][layer]
        weights_S = np.where(valid_S, np.exp(scores_NS[head]), 0)
        rows[t, : t + 1], rows[t, T] = weights_S, sink
    return rows / rows.sum(1, keepdims=True)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_weights_equal_those_of_the_reference(name):
    run, built = loaded(**ARCHITECTURES[name])
    last = built.config.num_blocks - 1
    for layer, head in ((0, 1), (last, 2)):
        found = head_weights(
            run, IDS.tolist(), [str(token) for token in IDS], (layer, head), run.settings({})
        )
        want = expected(built, layer, head)
        np.testing.assert_allclose(found.weights, want[:, :-1], atol=1e-5)
        np.testing.assert_allclose(found.sink or np.zeros(len(IDS)), want[:, -1], atol=1e-5)
        window = built.config.windows[layer] or len(IDS)
        assert found.visible_from == [max(0, t - window + 1) for t in range(len(IDS))]
        assert found.key_head == (head if built.config.latent else head // 2) and (
            found.layer,
            found.head,
        ) == (layer, head)
        assert (found.sink is None) == (not built.config.sink_logits)


@pytest.fixture(scope="module")
def run(run_dir):
    return load(run_dir)


@pytest.fixture(scope="module")
def record(run):
    return explain(run, PROMPT, {"greedy": True}, head=(1, 3))


def test_the_entropy_is_that_of_the_last_token(run, record):
    """The statistics of the heads read the same query."""
    last = np.array(record.head.weights[-1])
    stats = explain(run, PROMPT, {"greedy": True}, attention=True)
    assert stats.head is None and record.attention is None
    assert stats.attention["entropy"][1][3] == pytest.approx(
        -np.sum(last * np.log2(last)), abs=1e-5
    )


def test_the_table_has_the_largest_weights_of_the_last_token():
    weights = [[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.5, 0.125, 0.25]]
    found = HeadWeights(2, 5, 1, ['"a"', '"b"', '"c"'], weights, [0, 0, 0], [0.0, 0.0, 0.125])
    assert list(head_lines(found, 2, 200)) == [
        (
            "attention of layer 2, query head 5 (key head 1): the largest"
            " weights of the last token of the prompt"
        ),
        "position  token  weight",
        '0         "a"    50.00%',
        '2         "c"    25.00%',
        "weight of the sink: 12.50%",
    ]


def test_the_map_has_the_sink_and_nothing_outside_of_the_window():
    weights = [[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.0, 0.5, 0.5]]
    found = HeadWeights(0, 0, 0, ['"a"', '"a long token of text"', '"c"'], weights, [0, 0, 1], None)
    drawn = head_map(found)
    assert drawn.rows == drawn.columns == ['"a" 0', '"a long token… 1', '"c" 2']
    assert drawn.shares == [[1.0, None, None], [0.25, 0.75, None], [None, 0.5, 0.5]]
    with_sink = head_map(found.__class__(**{**found.__dict__, "sink": [0.0, 0.1, 0.2]}))
    assert with_sink.columns[0] == "sink" and with_sink.shares[1] == [0.1, 0.25, 0.75, None]


def command(capfd, *arguments):
    code = cli.main(["explain", *map(str, arguments)])
    return code, *capfd.readouterr()


def test_command_prints_the_table_and_writes_the_page(
    capfd, run_dir, record, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "100")
    page = tmp_path / "page.html"
    code, out, _ = command(
        capfd, run_dir, "--prompt", PROMPT, "--greedy", "--attention", "1:3", "--report", page
    )
    assert code == 0 and out.strip() == "\n".join(explanation_lines(record, 100)).strip()
    text = page.read_text()
    assert text.count("<svg ") == 1 and "layer 1, query head 3 (key head 1)" in text
    T = len(record.head.tokens)
    titles = dict(re.findall(r"<title>(.* → .*): (.*)</title>", text))
    assert (
        len(titles)
        == sum(weight >= 0.0005 for row in record.head.weights for weight in row)
        <= T * (T + 1) / 2
    )
    assert titles["&lt;bos&gt; 0 → &lt;bos&gt; 0"] == "100.00%"
    code, out, _ = command(
        capfd, run_dir, "--prompt", PROMPT, "--greedy", "--attention", "1:3", "--json"
    )
    assert code == 0 and json.loads(out)["head"]["weights"] == record.head.weights
    code, _, _ = command(capfd, run_dir, "--prompt", PROMPT, "--greedy", "--report", page)
    assert code == 0 and "<svg" not in page.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--attention", "2:0"],
            "attention needs LAYER:HEAD with a layer in [0, 1] and a head in [0, 3], got 2:0",
        ),
        (
            ["--attention", "1"],
            "--attention: must be LAYER:HEAD, two integers from 0 such as 2:5, got '1'",
        ),
        (["--report", "page.htm"], "--report must name a .html file, got page.htm"),
    ],
)
def test_errors_are_one_sentence(capfd, run_dir, flags, message):
    code, _, err = command(capfd, run_dir, "--prompt", PROMPT, *flags)
    assert code == 2 and message in err and err.count("\n") == 1


def test_a_long_prompt_and_a_compressed_cache_are_refused(run):
    small, _ = loaded()
    with pytest.raises(UserError, match=f"shows at most {MAX_TOKENS} tokens, got a prompt of 257"):
        head_weights(small, [1] * 257, ["a"] * 257, (0, 0), small.settings({}))
    with pytest.raises(UserError, match="attention reads all keys"):
        explain(run, PROMPT, {"kv_budget": 0.5}, head=(0, 0))
