"""Runs of DantinoX 0: logits equal those of DantinoX 0, or the error gives the reason."""

import json
import math

import flax.serialization
import jax
import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer as Core
from tokenizers import models, pre_tokenizers, trainers

from dantinox.cli import main
from dantinox.config import UserError, build_config
from dantinox.generation import load
from dantinox.interop.v0 import convert_parameters, read_v0
from dantinox.model.parameters import abstract_model
from dantinox.text import Tokenizer
from tests.error_texts import ERRORS

V, D, N, K, H, F, L, T = 11, 16, 4, 2, 4, 24, 2, 9
FLAT = {
    "dim": D, "n_heads": N, "kv_heads": K, "head_size": H, "num_blocks": L, "max_context": 32,
    "expansion": 1, "use_rotary_pos": True, "absolute_pos": False, "trainable_pos": False,
    "no_sink": True, "sliding_window": False, "context_window": 3, "activation": "gelu",
    "use_moe": False, "vocab_size": 5000, "dataset_name": "x", "lr": 0.005,
}  # fmt: skip
LATER = {
    "embed": "embed",
    "norm_f": "norm_f",
    "head": "head",
    "norm1": "norm1",
    "norm2": "norm2",
    "ffn": "ffn",
}
NAMES = {"later": LATER, "older": LATER | {"embed": "wte", "norm_f": "ln_f", "head": "lm_head"}}


def weights(names=LATER, *, gated=True, bias=True, tied=False, learned=False):
    """Returns a tree of random arrays as DantinoX 0 saved it."""
    random = np.random.default_rng(0)

    def matrix(i, o, with_bias=True):
        found = {"kernel": (random.standard_normal((i, o)) / math.sqrt(i)).astype(np.float32)}
        return found | ({"bias": random.standard_normal(o).astype(np.float32)} if with_bias else {})

    def norm():
        found = {"scale": (1 + 0.3 * random.standard_normal(D)).astype(np.float32)}
        return found | ({"bias": random.standard_normal(D).astype(np.float32)} if bias else {})

    def block():
        attention = {
            "qkv": matrix(D, D + 2 * K * H, False),
            "o_proj": matrix(D, D),
            "W": matrix(D, D),
        }
        ffn = {"up_proj": matrix(D, 2 * F if gated else F), "down_proj": matrix(F, D)}
        return {
            "attention": attention,
            names["ffn"]: ffn,
            names["norm1"]: norm(),
            names["norm2"]: norm(),
        }

    tree = {"blocks": {i: block() for i in range(L)}, names["norm_f"]: norm()}
    tree[names["embed"]] = {"embedding": random.standard_normal((V, D)).astype(np.float32)}
    tree |= {} if tied else {names["head"]: matrix(D, V)}
    return tree | (
        {"wpe": {"embedding": random.standard_normal((32, D)).astype(np.float32)}}
        if learned
        else {}
    )


def forward(tree, config, tokens, names=LATER):
    """Computes the logits of DantinoX 0 in float64, with its formulas."""

    def linear(x, w):
        return x @ np.float64(w["kernel"]) + np.float64(w.get("bias", 0))

    def norm(x, w):
        if "bias" in w:
            return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * w[
                "scale"
            ] + w["bias"]
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w["scale"]

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    def rotate(x):  # pairs (even, odd) of each head
        angles = np.arange(len(x))[:, None] / 10000 ** (np.arange(0, H, 2) / H)
        even, odd, out = x[..., 0::2], x[..., 1::2], np.empty_like(x)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        out[..., 0::2], out[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos
        return out

    length = len(tokens)
    away = np.arange(length)[:, None] - np.arange(length)[None]
    seen = (away >= 0) & ((away <= config["context_window"]) | (not config["sliding_window"]))
    x = np.float64(tree[names["embed"]]["embedding"])[tokens]
    if config["trainable_pos"]:
        x = x + tree["wpe"]["embedding"][:length]
    for i in range(L):
        block = tree["blocks"][i]
        h = norm(x, block[names["norm1"]])
        q, k, v = np.split(linear(h, block["attention"]["qkv"]), [D, D + K * H], axis=1)
        q, k, v = q.reshape(length, N, H), k.reshape(length, K, H), v.reshape(length, K, H)
        if config["use_rotary_pos"]:
            q, k = rotate(q), rotate(k)
        y = np.empty((length, N, H))
        for n in range(N):
            scores = np.where(seen, q[:, n] @ k[:, n // (N // K)].T / math.sqrt(H), -1e9)
            p = np.exp(scores - scores.max(1, keepdims=True))
            y[:, n] = p / p.sum(1, keepdims=True) @ v[:, n // (N // K)]
        y = y.reshape(length, D)
        if config["no_sink"]:
            y = y * sigmoid(linear(h, block["attention"]["W"]))
        x = x + linear(y, block["attention"]["o_proj"])
        up = linear(norm(x, block[names["norm2"]]), block[names["ffn"]]["up_proj"])
        if up.shape[1] == 2 * F:
            gate, data = np.split(up, 2, axis=1)
            up = gate * sigmoid(gate) * data
        else:
            up = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        x = x + linear(up, block[names["ffn"]]["down_proj"])
    x = norm(x, tree[names["norm_f"]])
    return (
        linear(x, tree[names["head"]])
        if names["head"] in tree
        else x @ np.float64(tree[names["embed"]]["embedding"]).T
    )


def write(path, tree, config, name="model_weights.msgpack", sections=False):
    path.mkdir(exist_ok=True)
    (path / name).write_bytes(flax.serialization.msgpack_serialize(tree))
    (path / "config.yaml").write_text(yaml.safe_dump({"model": config} if sections else config))
    letters = {letter: index for index, letter in enumerate("\0abcdefghi\n")}
    (path / "tokenizer.json").write_text(json.dumps({"type": "char", "vocab": letters}))
    return path


read = jax.jit(lambda model, tokens_1T, positions_1T: model(tokens_1T, positions_1T)[0][0])


def logits(path, tokens):
    """Returns the logits of the converted run."""
    run = read_v0(path)
    settings = {
        f"{section}.{key}": value
        for section, keys in run.settings.items()
        for key, value in keys.items()
    }
    model = build_config({}, settings | {"model.dtype": "float32"}).architecture(V)
    built = abstract_model(model)[0](dict(convert_parameters(run, model)))
    return np.asarray(read(built, np.asarray(tokens)[None], np.arange(len(tokens))[None]))


TOKENS = np.random.default_rng(1).integers(0, V, T)
KINDS = {
    "as it was by default": ({}, {}),
    "older names, tied, no gate, its weights idle": ({"no_sink": False}, {"tied": True}),
    "plain, learned positions, a window": (
        {"use_rotary_pos": False, "trainable_pos": True, "sliding_window": True},
        {"gated": False, "learned": True, "bias": False},
    ),
}


@pytest.mark.parametrize(("changes", "form"), KINDS.values(), ids=KINDS.keys())
def test_logits_equal_those_of_dantinox_0(tmp_path, changes, form):
    names = NAMES["older" if form.get("tied") else "later"]
    tree, config = weights(names, **form), FLAT | changes
    found = logits(write(tmp_path, tree, config, sections=bool(changes)), TOKENS)
    expected = forward(tree, config, TOKENS, names)
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()


def test_model_without_biases_is_read(tmp_path):
    tree, config = damage(weights(), dict(FLAT), "no biases")
    found, expected = logits(write(tmp_path, tree, config), TOKENS), forward(tree, config, TOKENS)
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()


def test_best_weights_are_preferred_and_optimizer_state_is_ignored(tmp_path):
    tree = weights()
    write(tmp_path, weights(gated=False), FLAT)
    write(
        tmp_path,
        {"model": tree, "opt": {"step": np.zeros((), np.int32)}},
        FLAT,
        "best_model_weights.msgpack",
    )
    run = read_v0(tmp_path)
    assert (
        run.weights == "best_model_weights.msgpack"
        and run.settings["model"]["activation"] == "swiglu"
    )
    np.testing.assert_array_equal(run.arrays["embed/embedding"].array(), tree["embed"]["embedding"])


def test_tokenizers(tmp_path):
    run = read_v0(write(tmp_path, weights(), FLAT))
    tokenizer = Tokenizer(run.tokenizer)
    assert tokenizer.encode("abi\n") == [1, 2, 9, 10] and tokenizer.decode([1, 2, 9, 10]) == "abi\n"
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel()
    specials = ["[PAD]", "[UNK]", "[BOS]", "[EOS]", "[MASK]"]
    core.train_from_iterator(
        ["la città è bella"] * 3, trainers.BpeTrainer(vocab_size=60, special_tokens=specials)
    )
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"type": "bpe", "vocab_size": 60, "tokenizer": core.to_str()})
    )
    tokenizer = Tokenizer(read_v0(tmp_path).tokenizer)
    assert tokenizer.encode("città bella") == core.encode("città bella").ids
    assert (
        tokenizer.decode(tokenizer.encode("città bella")) == " città bella"
        and tokenizer.eos_id == 3
    )


def damage(tree, config, what):
    block = tree["blocks"][1]
    if what == "no biases":
        for number in range(L):
            for module in ("o_proj", "W"):
                del tree["blocks"][number]["attention"][module]["bias"]
    elif what == "extra":
        block["attention"]["extra"] = {"kernel": np.zeros((2, 2), np.float32)}
    elif what == "missing":
        del block["attention"]["o_proj"]["bias"]
    elif what == "shape":
        block["attention"]["o_proj"]["kernel"] = np.zeros((3, 5), np.float32)
    elif what == "first versions":
        for number in range(L):
            tree["blocks"][number] |= {"ln1": tree["blocks"][number].pop("norm1")}
    elif what == "frequencies":
        for number in range(L):
            tree["blocks"][number]["attention"]["angle"] = np.arange(32)[:, None] / 1000 ** (
                np.arange(H // 2) / H
            )
    elif what == "head":
        del tree["head"]["kernel"]
    else:
        config |= what
    return tree, config


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "extra",
            r"has blocks/1/attention/extra/kernel, which a model with these settings does not have",
        ),
        ("missing", r"lacks blocks/1/attention/o_proj/bias, which a model with these settings has"),
        (
            "shape",
            (
                r"blocks/1/attention/o_proj/kernel has the shape \(3, 5\), which does not fit"
                r" blocks/1/attention/out/kernel"
            ),
        ),
        ("first versions", "two variants of RoPE"),
        ("frequencies", "rotary frequencies that are not supported"),
        ("head", "has the bias of the output layer, but lacks the weight matrix"),
        ({"use_moe": True}, "has use_moe: true; only false is supported"),
        ({"mla": True}, "has mla: true; only"),
        ({"causal": False}, "has causal: false; only"),
        ({"use_lora": True}, "has use_lora: true; only"),
        ({"activation": "silu"}, "has activation: 'silu'; only 'gelu' is supported"),
        ({"n_heads": 3}, "n_heads 3 does not divide the embedding size 16"),
        ({"max_context": "x"}, "max_context must be an integer of at least 1, got 'x'"),
        ({"trainable_pos": True}, "both use_rotary_pos and trainable_pos"),
        (
            {"pos_encoding": "alibi"},
            "pos_encoding: 'alibi', expected one of rotary, learned, absolute, none",
        ),
    ],
    ids=str,
)
def test_unsupported_run_is_an_error(tmp_path, what, message):
    tree, config = damage(weights(), dict(FLAT), what)
    path = write(tmp_path, tree, config)
    with pytest.raises(UserError, match=message):
        logits(path, TOKENS)


def test_imported_run_is_an_ordinary_run(tmp_path, capsys):
    old = write(tmp_path / "old", weights(), FLAT)
    assert main(["import", str(old), "--run_dir", str(tmp_path / "new")]) == 0
    model = load(tmp_path / "new").model
    found = np.asarray(read(model, TOKENS[None], np.arange(T)[None]))
    assert np.abs(found - logits(old, TOKENS)).max() < 1e-5
    assert main(["import", str(tmp_path / "new"), "--run_dir", str(tmp_path / "newer")]) == 2
    assert (
        "is already a run directory of this version" in capsys.readouterr().err
        and not (tmp_path / "newer").exists()
    )


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_truncated_weights_file_is_an_error(tmp_path, cut):
    path = write(tmp_path, weights(), FLAT) / "model_weights.msgpack"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match=ERRORS["model_weights_msgpack"]):
        read_v0(tmp_path)
