"""Reads run directories of DantinoX 0 and converts their settings, weights and tokenizers.

DantinoX 0 differs from this version in four ways. `qkv` is one matrix [q | k | v]. RoPE rotates
pairs of adjacent elements, not of elements that are half a head apart. The gate and up projections
of SwiGLU are one matrix. Parameters have other names, which also differ between the versions of
DantinoX 0.

Only dense causal models are supported. Other models are refused with an error message that gives
the reason.
"""

import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from dantinox.config import ModelConfig, UserError
from dantinox.files import first_line, quote, read_json, read_text
from dantinox.interop.source import LazyArrays, Tensor, storage_dtype
from dantinox.model.parameters import abstract_model
from dantinox.run.weights import StoredArray, read_arrays

# The weights files of a run, in order of preference.
WEIGHTS = (
    "best_model_weights.msgpack",
    "checkpoint_best.msgpack",
    "model_weights.msgpack",
    "checkpoint_latest.msgpack",
)
MAX_FILE_BYTES = 128 << 20  # limit for config.yaml and for tokenizer.json
EPSILON = 1e-6  # of LayerNorm and RMSNorm
EMBED = ("embed/embedding", "wte/embedding")  # names of the embedding matrix
# Supported values by setting. A run may omit any of these settings.
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "mla": (False,), "attention": ("mha", "gqa"), "use_moe": (False,), "ffn": ("mlp",),
    "use_lora": (False,), "causal": (True,), "model_type": ("autoregressive",),
    "paradigm": (None, "ar"), "embed_dim": (0,), "activation": ("gelu",),
}  # fmt: skip
POSITION_SETTINGS = {
    "rotary": "use_rotary_pos",
    "learned": "trainable_pos",
    "absolute": "absolute_pos",
}
# Arrays that the conversion ignores: attention masks, RoPE angles, dropout state, latent
# projections of MLA.
UNUSED_ARRAYS = (
    "*/tril", "*/window", "*/angle", "wpe", "*/rngs/*", "emb_dropout/*", "*_dropout/*",
    "*/dropout/*",
    *(f"*/attention/{name}/*" for name in ("down_q", "down_kv", "up_q", "up_k", "up_v")),
)  # fmt: skip


Conversion = tuple[tuple[str, ...], Callable[[np.ndarray], np.ndarray]]


class V0Run(NamedTuple):
    """A run of DantinoX 0.

    Attributes:
      settings: the sections `model` and `attention` of a current config.
      rows: the number of rows of the embedding matrix, which can exceed the vocabulary size.
      tokenizer: the text of a `tokenizer.json`.
      weights: the name of the weights file.
      arrays: the arrays in the weights file, by name.
    """

    settings: dict[str, dict[str, Any]]
    rows: int
    tokenizer: str
    weights: str
    arrays: dict[str, StoredArray]


def read_v0(path: Path) -> V0Run:
    """Reads a run directory of DantinoX 0. The weights are read on access.

    Raises:
      UserError: a file is missing or damaged, or the model cannot be represented exactly; the
        message gives the reason.
    """
    config = _config(path / "config.yaml")
    weights = next((path / name for name in WEIGHTS if (path / name).is_file()), None)
    if weights is None:
        raise UserError(
            f"{path} has no weights of DantinoX 0, expected one of {', '.join(WEIGHTS)}"
        )
    arrays, _ = read_arrays(weights)
    # This is a checkpoint that also contains the optimizer state.
    if any(name.startswith("opt/") for name in arrays):
        arrays = {
            name.removeprefix("model/"): leaf
            for name, leaf in arrays.items()
            if name.startswith("model/")
        }
    settings = _convert_settings(path / "config.yaml", config, weights, arrays)
    rows = _find(weights, arrays, *EMBED).shape[0]
    return V0Run(settings, rows, _tokenizer(path / "tokenizer.json"), weights.name, arrays)


def convert_parameters(run: V0Run, model: ModelConfig, dtype: str = "auto") -> LazyArrays:
    """Returns every parameter of a model, converted from the run's arrays on access.

    Args:
      run: the run.
      model: the architecture.
      dtype: the dtype of matrices, as in `hf_weights.from_hf`.

    Raises:
      UserError: an array is missing, is not used, or has a wrong shape. The message names the
        array.
    """
    rest = {
        name for name in run.arrays if not any(fnmatch(name, unused) for unused in UNUSED_ARRAYS)
    }
    if not model.no_sink:
        rest -= {name for name in rest if fnmatch(name, "*/attention/W/*")}
    if model.weight_tying:
        # These output layers equal the embeddings, since `_convert_settings` sets `weight_tying`
        # only in this case.
        rest -= {"head/kernel", "lm_head/kernel"}
    found: dict[str, tuple[StoredArray, Callable[[np.ndarray], np.ndarray]]] = {}
    kinds: dict[str, Tensor] = {}
    for path, leaf in abstract_model(model)[1].items():
        names, convert = _conversion(path, model)
        name = next((name for name in names if name in run.arrays), None)
        if name is None:
            raise UserError(
                f"{run.weights} lacks {' or '.join(names)}, which a model with these settings has"
            )
        array = run.arrays[name]
        try:
            fits = convert(np.broadcast_to(np.float32(0), array.shape)).shape == tuple(leaf.shape)
        except ValueError:
            fits = False
        if not fits:
            raise UserError(
                f"{run.weights}: {name} has the shape {array.shape}, which does not fit {path}"
                f" {tuple(leaf.shape)}"
            )
        found[path] = array, convert
        kinds[path] = Tensor(tuple(leaf.shape), storage_dtype(path, dtype, {array.dtype.name}))
        rest.discard(name)
    if rest:
        raise UserError(
            f"{run.weights} has {min(rest)}, which a model with these settings does not have"
        )

    def make(path: str) -> np.ndarray:
        array, convert = found[path]
        return np.ascontiguousarray(convert(array.array().astype(kinds[path].dtype)))

    return LazyArrays(kinds, make)


def _conversion(path: str, model: ModelConfig) -> Conversion:
    """Returns the names that a parameter can have in DantinoX 0, and the function that converts its
    array.
    """
    K = model.kv_heads
    G = model.n_heads // model.kv_heads
    H = model.head_size
    F = model.hidden_dim
    # By the path of a parameter in its block; `*` stands for the last part of both names.
    conversions: dict[str, Conversion] = {
        "embed": (EMBED, _unchanged),
        "position_embed": (("wpe/embedding",), _unchanged),
        "norm_f/*": (("norm_f/*", "ln_f/*"), _unchanged),
        "head/kernel": (("head/kernel", "lm_head/kernel"), _unchanged),
        "head_bias": (("head/bias", "lm_head/bias"), _unchanged),
        "norm1/*": (("norm1/*", "ln1/*"), _unchanged),
        "norm2/*": (("norm2/*", "ln2/*"), _unchanged),
        "attention/qkv/kernel": (("attention/qkv/kernel",), lambda w: _convert_qkv(w, model)),
        "attention/out/kernel": (("attention/o_proj/kernel",), lambda w: w.reshape(K, G, H, -1)),
        "attention/out/bias": (("attention/o_proj/bias",), _unchanged),
        "attention/gate/kernel": (("attention/W/kernel",), lambda w: w.reshape(-1, K, G, H)),
        "attention/gate/bias": (("attention/W/bias",), lambda b: b.reshape(K, G, H)),
        "ffn/gate_up/kernel": (
            ("ffn/up_proj/kernel", "mlp/up_proj/kernel"),
            lambda w: w.reshape(-1, 2, F),
        ),
        "ffn/gate_up/bias": (("ffn/up_proj/bias", "mlp/up_proj/bias"), lambda b: b.reshape(2, F)),
        "ffn/up/*": (("ffn/up_proj/*", "mlp/up_proj/*"), _unchanged),
        "ffn/down/*": (("ffn/down_proj/*", "mlp/down_proj/*"), _unchanged),
    }
    layer = ""
    inner = path
    if path.startswith("blocks/"):
        _, number, inner = path.split("/", 2)
        layer = f"blocks/{number}/"
    pattern = next(pattern for pattern in conversions if fnmatch(inner, pattern))
    names, convert = conversions[pattern]
    return tuple(layer + name.replace("*", inner.rpartition("/")[2]) for name in names), convert


def _unchanged(array: np.ndarray) -> np.ndarray:
    return array


def _convert_qkv(w_DC: np.ndarray, model: ModelConfig) -> np.ndarray:
    """Converts [q | k | v] to `[D, K, G + 2, H]`, and moves the elements of each rotary pair half a
    head apart.
    """
    K = model.kv_heads
    G = model.n_heads // model.kv_heads
    H = model.head_size
    parts = np.split(w_DC, [K * G * H, K * G * H + K * H], axis=1)
    q_DKGH, k_DK1H, v_DK1H = (part.reshape(len(w_DC), K, -1, H) for part in parts)
    if model.position == "rope":
        q_DKGH, k_DK1H = (
            np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1) for x in (q_DKGH, k_DK1H)
        )
    return np.concatenate([q_DKGH, k_DK1H, v_DK1H], axis=2)


def _config(path: Path) -> dict[str, Any]:
    """Returns all settings as one flat mapping. The first versions of DantinoX 0 had no
    sections.
    """
    try:
        tree = yaml.load(read_text(path, MAX_FILE_BYTES), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not YAML: {first_line(error)}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} has no settings")
    flat = {key: value for key, value in tree.items() if not isinstance(value, dict)}
    for section in tree.values():
        if isinstance(section, dict):
            flat |= section
    return flat


def _convert_settings(
    path: Path, config: dict[str, Any], weights: Path, arrays: dict[str, StoredArray]
) -> dict[str, dict[str, Any]]:
    """Returns sections of a current config, derived from `config.yaml` and from the names and
    shapes of the arrays.
    """
    for name, allowed in SUPPORTED_VALUES.items():
        if name in config and config[name] not in allowed:
            raise UserError(
                f"{path} has {name}: {quote(config[name])}; only {quote(allowed[-1])} is supported"
            )
    # The sizes are those of the arrays, not those in the settings.
    embed = _find(weights, arrays, *EMBED)
    down = _find(weights, arrays, "blocks/0/ffn/down_proj/kernel", "blocks/0/mlp/down_proj/kernel")
    up = _find(weights, arrays, "blocks/0/ffn/up_proj/kernel", "blocks/0/mlp/up_proj/kernel")
    qkv = _find(weights, arrays, "blocks/0/attention/qkv/kernel")
    dim = embed.shape[-1]
    heads = _count(path, config, "n_heads")
    if dim % heads:
        raise UserError(
            f"{path}: n_heads {heads} does not divide the embedding size {dim} in {weights.name}"
        )
    head_size = dim // heads
    hidden = down.shape[0]
    position = _position(path, config)
    theta = 1e4 * float(config.get("rope_scale_factor", config.get("rope_scale", 1.0)))
    if position == "use_rotary_pos":
        _check_angles(theta, weights, arrays, head_size)
    head = arrays.get("head/kernel", arrays.get("lm_head/kernel"))
    bias = "head/bias" in arrays or "lm_head/bias" in arrays
    if head is None and bias:
        raise UserError(f"{weights} has the bias of the output layer, but lacks the weight matrix")
    tied = head is None or (
        head.shape == embed.shape[::-1] and np.array_equal(head.array(), embed.array().T)
    )
    model = {
        "dim": dim,
        "n_heads": heads,
        "kv_heads": (qkv.shape[-1] - dim) // (2 * head_size),
        "head_size": head_size,
        "num_blocks": (
            1 + max(int(name.split("/")[1]) for name in arrays if name.startswith("blocks/"))
        ),
        "hidden_dim": hidden,
        "max_context": _count(path, config, "max_context"),
        "weight_tying": tied,
        "head_bias": bias,
        "activation": "swiglu" if up.shape[-1] == 2 * hidden else "gelu",
        "mlp_bias": any(name.endswith("up_proj/bias") for name in arrays),
        "norm": (
            "layernorm"
            if any(name.endswith(("norm1/bias", "ln1/bias")) for name in arrays)
            else "rmsnorm"
        ),
        "norm_epsilon": EPSILON,
        "dropout_rate": float(config.get("dropout_rate", config.get("dropout", 0.0))),
    }
    attention: dict[str, Any] = {"use_rotary_pos": False}
    if position is not None:
        attention[position] = True
    if position == "use_rotary_pos":
        attention["rope_theta"] = theta
    if config.get("sliding_window", False):
        attention |= {
            "sliding_window": True,
            "context_window": _count(path, config, "context_window"),
        }
    attention["out_bias"] = any(name.endswith("o_proj/bias") for name in arrays)
    if config.get("no_sink", False):
        attention |= {
            "no_sink": True,
            "gate_bias": any(name.endswith("attention/W/bias") for name in arrays),
        }
    return {"model": model, "attention": attention}


def _find(weights: Path, arrays: dict[str, StoredArray], *names: str) -> StoredArray:
    """Returns the matrix that has one of these names."""
    found = next((arrays[name] for name in names if name in arrays), None)
    cause = "the file is not from a dense model of DantinoX 0"
    if found is None:
        raise UserError(f"{weights} lacks {' or '.join(names)}: {cause}")
    if len(found.shape) != 2:
        raise UserError(f"{weights} has {names[0]} of shape {found.shape}, not a matrix: {cause}")
    return found


def _count(path: Path, config: dict[str, Any], key: str) -> int:
    """Returns a setting that must be an integer of at least 1, or of at least 0 for
    `context_window`.
    """
    value = config.get(key)
    least = 0 if key == "context_window" else 1
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{path}: {key} must be an integer of at least {least}, got {quote(value)}")
    return value


def _position(path: Path, config: dict[str, Any]) -> str | None:
    """Returns the name of the position setting in the section `attention`, or None for a model
    without position encoding.
    """
    if "pos_encoding" in config:
        if config["pos_encoding"] not in (*POSITION_SETTINGS, "none"):
            allowed = ", ".join((*POSITION_SETTINGS, "none"))
            raise UserError(
                f"{path} has pos_encoding: {quote(config['pos_encoding'])}, expected one of"
                f" {allowed}"
            )
        return POSITION_SETTINGS.get(config["pos_encoding"])
    if not any(key in config for key in POSITION_SETTINGS.values()):
        raise UserError(
            f"{path} lacks a position encoding, expected one of"
            f" {', '.join(POSITION_SETTINGS.values())}"
        )
    on = [key for key in POSITION_SETTINGS.values() if config.get(key)]
    if len(on) > 1:
        raise UserError(f"{path} has both {' and '.join(on)}, which is not supported")
    return on[0] if on else None


def _check_angles(
    theta: float, weights: Path, arrays: dict[str, StoredArray], head_size: int
) -> None:
    """Raises a `UserError` if the rotary frequencies are not supported, or unknown, as in files of
    the first versions.
    """
    angles = arrays.get("blocks/0/attention/angle")
    if angles is not None:
        expected = theta ** (-np.arange(0, head_size, 2) / head_size)
        stored = angles.array().reshape(-1, angles.shape[-1])
        if len(stored) > 1 and (
            stored.shape[1:] != expected.shape or not np.allclose(stored[1], expected, rtol=1e-4)
        ):
            raise UserError(f"{weights} has rotary frequencies that are not supported")
    elif "blocks/0/ln1/scale" in arrays:
        raise UserError(
            f"{weights} is from one of the first versions of DantinoX 0, which had two variants of"
            " RoPE; the file does not say which one it uses"
        )


def _tokenizer(path: Path) -> str:
    """Returns the text of a `tokenizer.json` of the tokenizers library.

    The file of DantinoX 0 may already have this format. Otherwise it contains a map from characters
    to ids, or the text of a `tokenizer.json` as a string.
    """
    tree = read_json(path, MAX_FILE_BYTES)
    if "model" in tree:
        return json.dumps(tree, ensure_ascii=False)
    if tree.get("type") == "char" and isinstance(tree.get("vocab"), dict):
        return _characters(path, tree["vocab"])
    if tree.get("type") == "bpe" and isinstance(tree.get("tokenizer"), str):
        inner = json.loads(tree["tokenizer"])
        # DantinoX 0 decoded byte-level tokens with an incomplete table.
        decoder = {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        }
        return json.dumps(inner | {"decoder": inner.get("decoder") or decoder}, ensure_ascii=False)
    raise UserError(
        f"{path} has a tokenizer of type {quote(tree.get('type'))}, expected char or bpe"
    )


def _characters(path: Path, vocab: dict[str, Any]) -> str:
    """Returns the `tokenizer.json` of a map from characters to ids."""
    from tokenizers import Tokenizer, decoders, models

    if not all(len(letter) == 1 and isinstance(index, int) for letter, index in vocab.items()):
        raise UserError(f"{path} has a vocabulary with entries that are not single characters")
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.decoder = decoders.Fuse()
    return core.to_str(pretty=True)
