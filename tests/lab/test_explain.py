"""The explanation of a token: numbers against a chain in NumPy, the token against generation, table
and plot.
"""

import json
import struct
import warnings
from dataclasses import asdict, replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.cells import cell_len

from dantinox import cli
from dantinox.config import UserError
from dantinox.generation import load
from dantinox.lab.measure.explain import display_token, explain
from dantinox.lab.measure.explain_view import draw_explanation, explanation_lines
from tests.error_texts import ERRORS

PROMPT = "abca"
CHAIN = {
    "repetition_penalty": 1.4,
    "temperature": 3.0,
    "top_k": 40,
    "top_p": 0.7,
    "min_p": 0.02,
    "xtc_probability": 0.0,
}
# Sixteen steps, some of which have no effect.
LONG = CHAIN | {
    "banned_tokens": ["b"], "logit_bias": {"x": 3.0, "y": -float("inf")}, "no_repeat_ngram": 2,
    "dry_multiplier": 0.8, "presence_penalty": 0.5, "smoothing_factor": 0.05, "top_a": 0.01,
    "tail_free": 0.999, "typical": 0.99, "epsilon_cutoff": 1e-4, "top_n_sigma": 6.0, "top_k": 200,
    "top_p": 0.99, "min_p": 0.001, "seed": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(run_dir):
    return load(run_dir)


@pytest.fixture(scope="module")
def chain_record(run):
    return explain(run, PROMPT, CHAIN | {"seed": 5})


@pytest.fixture(scope="module")
def long_record(run):
    return explain(run, PROMPT, LONG)


def steps(found, name):
    """Returns a field of every step."""
    return [getattr(step, name) for step in found.steps]


def tokens(found, name):
    return [getattr(token, name) for token in found.tokens]


@pytest.fixture
def dantinox(capfd):
    def command(*argv):
        code = cli.main([str(arg) for arg in argv])
        return code, *capfd.readouterr()

    return command


def softmax(x_V):
    weights_V = np.exp(x_V - x_V.max())
    return weights_V / weights_V.sum()


forward = nnx.jit(
    lambda model, tokens_BT, positions_BT: model(tokens_BT, positions_BT)[0], graph_updates=False
)


def logits_after(run, prompt):
    """Returns the logits of the model in float64, without padding and without the engine."""
    tokens = jnp.asarray([run.prompt_ids(prompt)])
    return np.asarray(
        forward(run.model, tokens, jnp.arange(tokens.shape[1])[None])[0, -1], np.float64
    )


def chain(x_V, seen):
    """Returns the logits after each step of `CHAIN` in the default order."""
    logits = [x_V]
    penalised_V = np.where(x_V > 0, x_V / 1.4, x_V * 1.4)
    logits.append(np.where(np.isin(np.arange(len(x_V)), seen), penalised_V, x_V))
    logits.append(logits[-1] / 3.0)
    order = np.argsort(-logits[-1], kind="stable")
    logits.append(np.where(np.isin(np.arange(len(x_V)), order[:40]), logits[-1], -np.inf))
    P_V = softmax(logits[-1])
    before = np.concatenate([[0], np.cumsum(P_V[order])[:-1]])
    logits.append(np.where(np.isin(np.arange(len(x_V)), order[before < 0.7]), logits[-1], -np.inf))
    logits.append(np.where(logits[-1] >= logits[-1].max() + np.log(0.02), logits[-1], -np.inf))
    return logits


def test_numbers_match_the_chain_in_float64(run, chain_record):
    found = chain_record
    x_V = logits_after(run, PROMPT)
    expected = chain(x_V, run.prompt_ids(PROMPT))
    assert steps(found, "name") == [
        "model",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
    ]
    assert tokens(found, "id")[:20] == np.argsort(-x_V, kind="stable")[:20].tolist()
    P_SV = np.array([softmax(x_V) for x_V in expected])
    np.testing.assert_allclose(
        np.transpose(tokens(found, "probabilities")), P_SV[:, tokens(found, "id")], atol=2e-5
    )
    left_SV = np.array(expected) > -np.inf
    assert (
        steps(found, "survivors") == left_SV.sum(1).tolist()
        and 1 < steps(found, "survivors")[-1] < steps(found, "survivors")[3] == 40
    )
    np.testing.assert_allclose(
        steps(found, "mass"), [P_SV[0][left_V].sum() for left_V in left_SV], atol=2e-5
    )
    np.testing.assert_allclose(
        steps(found, "others"), P_SV.sum(1) - P_SV[:, tokens(found, "id")].sum(1), atol=2e-5
    )
    entropy = [-sum(p * np.log2(p) for p in P_V if p > 0) for P_V in P_SV]
    np.testing.assert_allclose(steps(found, "entropy"), entropy, atol=2e-4)
    first_lost = [
        next((s for s in range(6) if not left_SV[s, token]), None) for token in tokens(found, "id")
    ]
    assert tokens(found, "removed_by") == [
        None if s is None else found.steps[s].name for s in first_lost
    ]
    assert "top_k" in tokens(found, "removed_by") or "top_p" in tokens(found, "removed_by")


@pytest.mark.slow
def test_token_is_the_one_that_generation_samples(run):
    settings = {"temperature": 4.0, "top_p": 0.95, "max_new_tokens": 1, "n": 5}
    seen = set()
    for seed in range(4):
        texts = run.generate(PROMPT, **settings, seed=seed)
        assert explain(run, PROMPT, settings | {"seed": seed}).drawn == [
            result.tokens[0] for result in texts
        ]
        seen |= {result.tokens[0] for result in texts}
    assert len(seen) > 5


def test_sampled_token_outside_the_top_is_shown(run):
    for seed in range(20):
        found = explain(run, PROMPT, {"temperature": 50.0, "seed": seed}, count=3)
        if found.drawn[0] not in tokens(found, "id")[:3]:
            break
    assert tokens(found, "id") == [
        *np.argsort(-logits_after(run, PROMPT), kind="stable")[:3],
        found.drawn[0],
    ]
    assert found.tokens[-1].text == run.tokenizer.decode(found.drawn)


def test_greedy_row_has_only_edits_and_penalties(run):
    best = int(np.argmax(logits_after(run, PROMPT)))
    found = explain(
        run, PROMPT, {"greedy": True, "banned_tokens": [best], "temperature": 2.0, "top_k": 5}
    )
    second = int(np.argsort(-logits_after(run, PROMPT))[1])
    assert (
        steps(found, "name") == ["model", "banned_tokens"]
        and found.greedy
        and found.drawn == [second]
    )
    assert (
        tokens(found, "removed_by")[0] == "banned_tokens" and tokens(found, "removed_by")[1] is None
    )
    assert list(explanation_lines(found))[-1].startswith("greedy: ")


def test_fresh_seed_is_reported_and_reproducible(run):
    found = explain(run, PROMPT, {"temperature": 9.0})
    assert explain(run, PROMPT, {"temperature": 9.0, "seed": found.seed}).drawn == found.drawn


def test_step_without_effect_has_no_column(run):
    found = explain(run, PROMPT, {"temperature": 3.0, "min_p": 1e-12, "top_k": 30, "seed": 1})
    assert dict(zip(steps(found, "name"), steps(found, "changed"), strict=True)) == {
        "model": True, "temperature": True, "top_k": True, "min_p": False,
    }  # fmt: skip
    lines = list(explanation_lines(found))
    heading = next(line for line in lines if line.split()[:2] == ["id", "token"])
    above = lines[lines.index(heading) - 1]
    assert above.split() == ["temperature", "top_k"] and heading.split() == [
        "id",
        "token",
        "model",
        "3",
        "30",
    ]
    assert any(
        line.startswith("min_p") and line.endswith("min_p 1e-12 (changes nothing here)")
        for line in lines
    )


@pytest.mark.parametrize("width", [60, 100, 240])
def test_long_chains_fit_in_the_terminal(long_record, width):
    lines = list(explanation_lines(long_record, width))
    assert max(map(cell_len, lines)) <= width
    blocks = [i for i, line in enumerate(lines) if line.split()[:2] == ["id", "token"]]
    changed = sum(steps(long_record, "changed"))
    assert changed >= 8 and (len(blocks) == 1) == (width == 240)
    for start in blocks:  # every block repeats all tokens
        shown = tokens(long_record, "shown")
        assert all(token in line for token, line in zip(shown, lines[start + 1 :], strict=False))
    model = next(line for line in lines if line.startswith("model "))
    assert model.split()[1:3] == [str(long_record.vocab_size), "100.00%"]


def test_removed_token_is_marked_once(long_record):
    lines = list(explanation_lines(long_record, 240))
    token = next(t for t in long_record.tokens if t.shown == '"b"')
    assert token.removed_by in ("banned_tokens", "no_repeat_ngram")
    row = next(line for line in lines if '"b"' in line)
    assert row.count("×") == 1 and row.endswith("×")


def test_settings_are_json_values(long_record):
    found = json.loads(json.dumps(asdict(long_record), allow_nan=False))
    settings = {step["name"]: step["settings"] for step in found["steps"]}
    assert settings["logit_bias"] == {"logit_bias": {"x": 3.0, "y": None}}
    assert settings["dry"]["dry_multiplier"] == 0.8 and settings["model"] == {}


def test_display_of_tokens(run):
    ids = [
        ord("a"),
        ord("\n"),
        ord("\t"),
        ord(" "),
        ord('"'),
        ord("\\"),
        0x1B,
        0xE2,
        run.tokenizer.eos_id,
    ]
    shown = [display_token(run.tokenizer, token) for token in ids]
    assert shown[:8] == ['"a"', '"\\n"', '"\\t"', '" "', '"\\""', '"\\\\"', '"\\x1b"', '"\\xe2"']
    assert shown[8] == run.tokenizer.core.id_to_token(run.tokenizer.eos_id)


def png_size(data):
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


def test_plot_has_a_panel_per_step_with_an_effect(chain_record):
    pytest.importorskip("matplotlib")
    for effects, panels in (((), 1), ((2,), 1), ((2, 3), 2)):
        changed = [
            replace(step, changed=s in (0, *effects)) for s, step in enumerate(chain_record.steps)
        ]
        picture = draw_explanation(replace(chain_record, steps=changed))
        assert png_size(picture) == (1200, round(150 * (0.9 + 1.7 * panels)))


def test_any_token_can_be_plotted(chain_record):
    """Dollar signs do not start formulas, and missing glyphs do not warn."""
    pytest.importorskip("matplotlib")
    found = chain_record
    odd = zip(found.tokens, ['"$x_{$"', '"漢字"', '"\\n"', "<eos>"], strict=False)
    found = replace(
        found, tokens=[replace(token, shown=shown) for token, shown in odd] + found.tokens[4:]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert png_size(draw_explanation(found))[0] == 1200


def test_command_prints_the_table(dantinox, run_dir, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = dantinox(
        "explain", "--run_dir", run_dir, "--prompt", PROMPT, "--top_k", 7, "--seed", 3
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("the most likely of ") and max(map(cell_len, lines)) <= 100
    assert next(line for line in lines if line.startswith("top_k")).split()[1] == "7"
    assert lines[-1].startswith("drawn with seed 3: ")


def test_command_prints_json_and_writes_a_plot(dantinox, run_dir, run, tmp_path):
    pytest.importorskip("matplotlib")
    flags = ["--prompt", PROMPT, "--top_k", 6, "--seed", 3, "--show", 4]
    code, out, err = dantinox(
        "explain", "--run_dir", run_dir, *flags, "--json", "--plot", tmp_path / "a.png"
    )
    assert (code, err) == (0, "")
    assert json.loads(out) == asdict(explain(run, PROMPT, {"top_k": 6, "seed": 3}, count=4))
    assert png_size((tmp_path / "a.png").read_bytes())[0] == 1200


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--plot", "a.jpg"], ["--plot", ".png", "a.jpg"]),
        (["--top_p", "1.7"], ["generation.top_p", "[0, 1]", "1.7"]),
        (["--preset", "vllm", "--typical", "0.5"], ["generation.typical", "vllm"]),
        (["--banned_tokens", "abc"], ["generation.banned_tokens", "3 tokens"]),
        (["--prompt", "a" * 200], ["201 tokens", "128"]),
        (["--topp", "0.9"], ["unknown flag --topp", "top_p"]),
        (["--show", "x"], ["--show", "'x'"]),
        (["--plot", "no/such/folder/a.png", "--top_k", "5"], ["no/such/folder/a.png"]),
    ],
)
def test_errors_are_one_sentence(dantinox, run_dir, flags, parts):
    if flags[0] == "--plot":
        pytest.importorskip("matplotlib")
    code, _, err = dantinox(
        "explain",
        "--run_dir",
        run_dir,
        *(["--prompt", PROMPT] if "--prompt" not in flags else []),
        *flags,
    )
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and len(err) < 400, err
    for part in parts:
        assert part in err, err


def test_missing_run_is_one_sentence(dantinox, tmp_path):
    code, out, err = dantinox("explain", "--run_dir", tmp_path / "none")
    assert (code, out) == (2, "") and "no run directory" in err


def test_error_without_matplotlib_names_the_extra(long_record, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(UserError, match=ERRORS["pip_install_dantinox_plot"]):
        draw_explanation(long_record)


RULES = {
    "low_entropy": 0.0,
    "clarify_entropy": 1e6,
    "high_varentropy": 1e6,
}  # makes every row adaptive
ADAPTIVE = {"strategy": "entropy", "seed": 1, "temperature": 1.5, "candidates": 4, **RULES}


@pytest.fixture(scope="module")
def adaptive_record(run):
    return explain(run, PROMPT, ADAPTIVE)


@pytest.mark.slow
def test_settings_of_the_router_are_those_of_generation(run, adaptive_record):
    found, settings = adaptive_record, ADAPTIVE
    result = run.generate(PROMPT, max_new_tokens=1, logprobs=5, **settings)
    assert found.drawn == result.tokens
    route = result.steps.routed.route
    numbers = {name: value for step in steps(found, "settings") for name, value in step.items()}
    for name in ("temperature", "top_k", "top_p", "min_p"):
        assert numbers[name] == pytest.approx(float(getattr(route, name)[0]))


def test_router_is_explained(run, adaptive_record):
    """Covers the strategy of the router, the settings that the router overrides, and best-of-n as a
    separate step.
    """
    found, settings = adaptive_record, ADAPTIVE
    assert found.strategy == "adaptive" and steps(found, "name")[1:] == [
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "candidates",
    ]
    numbers = {name: value for step in steps(found, "settings") for name, value in step.items()}
    assert numbers["candidates"] == 4 and numbers["temperature"] > 0
    kept, best = np.transpose(tokens(found, "probabilities"))[-2:]
    order = np.argsort(-logits_after(run, PROMPT)[tokens(found, "id")], kind="stable")
    tail = (
        found.steps[-2].others + np.cumsum(kept[order][::-1])[::-1]
    )  # the mass of each rank and all worse ranks
    np.testing.assert_allclose(
        best[order],
        tail**4 - np.append(tail[1:], found.steps[-2].others) ** 4,
        rtol=1e-4,
        atol=1e-7,
    )
    lines = "\n".join(explanation_lines(found, 120))
    assert "the entropy router chose: adaptive" in lines
    certain = explain(run, PROMPT, settings | {"low_entropy": 1e6, "low_varentropy": 1e6})
    assert (certain.strategy, certain.greedy, certain.steps[-1].name) == ("greedy", True, "min_p")
    forced_settings = {
        "low_entropy": 0.0,
        "clarify_entropy": 0.0,
        "low_varentropy": 1e6,
        "clarify_token": 65,
    }
    forced = explain(run, PROMPT, settings | forced_settings)
    assert (forced.strategy, forced.forced, forced.drawn) == ("clarify", True, [65])
    assert "emitted by the router" in "\n".join(explanation_lines(forced, 120))


def test_a_prompt_of_token_ids_equals_its_text(run):
    by_text, by_ids = (
        explain(run, prompt, {"top_k": 5, "seed": 1}) for prompt in (PROMPT, run.prompt_ids(PROMPT))
    )
    assert (
        by_ids.tokens == by_text.tokens
        and by_ids.steps == by_text.steps
        and by_ids.drawn == by_text.drawn
    )


def test_the_attention_of_the_last_prompt_token(run, run_dir, dantinox):
    """That of the step which generates the next token, as `generate` reports it; a row per layer in
    the table.
    """
    generated = run.generate(PROMPT, max_new_tokens=1, greedy=True, attention_stats=True).attention
    found = explain(run, PROMPT, {"greedy": True}, attention=True)
    assert list(found.attention) == ["entropy", "varentropy", "agreement", "strength"]
    for name, values_LH in found.attention.items():
        np.testing.assert_array_equal(np.float32(values_LH), getattr(generated, name)[0])
    assert explain(run, PROMPT, {"greedy": True}).attention is None
    code, out, _ = dantinox("explain", run_dir, "--prompt", PROMPT, "--greedy", "--attention_stats")
    rows = out[out.index("layer") :].splitlines()
    heads = found.attention["entropy"][0]
    assert code == 0 and f"{np.mean(heads):.2f} ({min(heads):.2f} to {max(heads):.2f})" in rows[1]
    code, out, _ = dantinox(
        "explain", run_dir, "--prompt", PROMPT, "--greedy", "--attention_stats", "--json"
    )
    assert code == 0 and json.loads(out)["attention"] == found.attention


def test_attention_needs_an_uncompressed_cache(run):
    with pytest.raises(UserError, match="attention_stats reads all keys"):
        explain(run, PROMPT, {"kv_budget": 0.5}, attention=True)
