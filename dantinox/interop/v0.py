"""Run directories of DantinoX 0: settings, weights and tokenizer, converted on reading.

What differs: layers are numbered by integers, `qkv` is one matrix [q | k | v], rotary pairs stand side by side (even, odd) and
not half a head apart, gate and data of SwiGLU are one matrix, names changed over the versions. Dense models that read one way
are read; of everything else, and of whatever a file holds besides, it is said why not.
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

# The weights of a run, the best first.
WEIGHTS = ("best_model_weights.msgpack", "checkpoint_best.msgpack", "model_weights.msgpack", "checkpoint_latest.msgpack")
MAX_FILE_BYTES = 128 << 20  # of config.yaml and tokenizer.json
EPSILON = 1e-6  # of both of its normalisations
EMBED = "embed/embedding", "wte/embedding"
# Settings → the values that mean a model as we have it; all have a default.
PLAIN: dict[str, tuple[Any, ...]] = {
    "mla": (False,), "attention": ("mha", "gqa"), "use_moe": (False,), "ffn": ("mlp",), "use_lora": (False,),
    "causal": (True,), "model_type": ("autoregressive",), "paradigm": (None, "ar"), "embed_dim": (0,),
    "activation": ("gelu",),
}  # fmt: skip
POSITIONS = {"rotary": "use_rotary_pos", "learned": "trainable_pos", "absolute": "absolute_pos"}
# What weights files hold besides weights, or never use: masks and angles, the state of dropout, projections to latents.
IDLE = (
    "*/tril", "*/window", "*/angle", "wpe", "*/rngs/*", "emb_dropout/*", "*_dropout/*", "*/dropout/*",
    *(f"*/attention/{name}/*" for name in ("down_q", "down_kv", "up_q", "up_k", "up_v")),
)  # fmt: skip


class V0Run(NamedTuple):
    """A run as ours: the settings of `model` and `attention`, the rows of its table of embeddings (there may be fewer tokens),
    the text of a tokenizer.json, the file of its weights, and the arrays in that by their names, layers numbered in them."""

    settings: dict[str, dict[str, Any]]
    rows: int
    tokenizer: str
    weights: str
    arrays: dict[str, StoredArray]


def read_v0(path: Path) -> V0Run:
    """Reads a run directory of DantinoX 0; weights stay in their file.

    Raises:
      UserError: a file is missing or damaged, or the model is one that cannot be read faithfully; the sentence says why.
    """
    said = _config(path / "config.yaml")
    weights = next((path / name for name in WEIGHTS if (path / name).is_file()), None)
    if weights is None:
        raise UserError(f"{path} holds no weights of DantinoX 0: none of {', '.join(WEIGHTS)}")
    arrays, _ = read_arrays(weights)
    if any(name.startswith("opt/") for name in arrays):  # with the state of its optimizer
        arrays = {name.removeprefix("model/"): leaf for name, leaf in arrays.items() if name.startswith("model/")}
    settings = _settings(path / "config.yaml", said, weights, arrays)
    rows = _find(weights, arrays, *EMBED).shape[0]
    return V0Run(settings, rows, _tokenizer(path / "tokenizer.json"), weights.name, arrays)


def parameters(run: V0Run, model: ModelConfig, dtype: str = "auto") -> LazyArrays:
    """Every parameter of a model of this architecture, made of the run's arrays when it is asked for; `dtype` as of `from_hf`.

    Raises:
      UserError: an array is missing, is not used, or has another size; the sentence names it.
    """
    left = {name for name in run.arrays if not any(fnmatch(name, idle) for idle in IDLE)}
    if not model.no_sink:
        left -= {name for name in left if fnmatch(name, "*/attention/W/*")}
    if model.weight_tying:
        left -= {"head/kernel", "lm_head/kernel"}  # equal to the table, or there would be a head
    found: dict[str, tuple[StoredArray, Callable[[np.ndarray], np.ndarray]]] = {}
    kinds: dict[str, Tensor] = {}
    for ours, leaf in abstract_model(model)[1].items():
        theirs, change = _form(ours, model)
        name = next((name for name in theirs if name in run.arrays), None)
        if name is None:
            raise UserError(f"{run.weights} lacks {' or '.join(theirs)}, which a model of these settings has")
        array = run.arrays[name]
        try:
            fits = change(np.broadcast_to(np.float32(0), array.shape)).shape == tuple(leaf.shape)
        except ValueError:
            fits = False
        if not fits:
            raise UserError(
                f"{run.weights}: {name} has the shape {array.shape}, of which {ours} {tuple(leaf.shape)} cannot be made"
            )
        found[ours], kinds[ours] = (array, change), Tensor(tuple(leaf.shape), storage_dtype(ours, dtype, {array.dtype.name}))
        left.discard(name)
    if left:
        raise UserError(f"{run.weights} holds {min(left)}, which a model of these settings has no place for")

    def make(ours: str) -> np.ndarray:
        array, change = found[ours]
        return np.ascontiguousarray(change(array.array().astype(kinds[ours].dtype)))

    return LazyArrays(kinds, make)


def _form(ours: str, model: ModelConfig) -> tuple[tuple[str, ...], Callable[[np.ndarray], np.ndarray]]:
    """The names that a parameter had, and how it is brought into our form."""
    K, G, H, F = model.kv_heads, model.n_heads // model.kv_heads, model.head_size, model.hidden_dim
    forms: dict[str, tuple[tuple[str, ...], Callable[[np.ndarray], np.ndarray]]] = {
        "embed": (EMBED, _same),
        "position_embed": (("wpe/embedding",), _same),
        "norm_f/*": (("norm_f/*", "ln_f/*"), _same),
        "head/kernel": (("head/kernel", "lm_head/kernel"), _same),
        "head_bias": (("head/bias", "lm_head/bias"), _same),
        "norm1/*": (("norm1/*", "ln1/*"), _same),
        "norm2/*": (("norm2/*", "ln2/*"), _same),
        "attention/qkv/kernel": (("attention/qkv/kernel",), lambda w: _heads(w, model)),
        "attention/out/kernel": (("attention/o_proj/kernel",), lambda w: w.reshape(K, G, H, -1)),
        "attention/out/bias": (("attention/o_proj/bias",), _same),
        "attention/gate/kernel": (("attention/W/kernel",), lambda w: w.reshape(-1, K, G, H)),
        "attention/gate/bias": (("attention/W/bias",), lambda b: b.reshape(K, G, H)),
        "ffn/gate_up/kernel": (("ffn/up_proj/kernel", "mlp/up_proj/kernel"), lambda w: w.reshape(-1, 2, F)),
        "ffn/gate_up/bias": (("ffn/up_proj/bias", "mlp/up_proj/bias"), lambda b: b.reshape(2, F)),
        "ffn/up/*": (("ffn/up_proj/*", "mlp/up_proj/*"), _same),
        "ffn/down/*": (("ffn/down_proj/*", "mlp/down_proj/*"), _same),
    }
    layer, inner = "", ours
    if ours.startswith("blocks/"):
        _, number, inner = ours.split("/", 2)
        layer = f"blocks/{number}/"
    pattern = next(pattern for pattern in forms if fnmatch(inner, pattern))
    theirs, change = forms[pattern]
    return tuple(layer + name.replace("*", inner.rpartition("/")[2]) for name in theirs), change


def _same(array: np.ndarray) -> np.ndarray:
    return array


def _heads(w_DC: np.ndarray, model: ModelConfig) -> np.ndarray:
    """`[D, K, G + 2, H]` of [q | k | v], and rotated pairs half a head apart in queries and keys."""
    K, G, H = model.kv_heads, model.n_heads // model.kv_heads, model.head_size
    q_DKGH, k_DK1H, v_DK1H = (
        part.reshape(len(w_DC), K, -1, H) for part in np.split(w_DC, [K * G * H, K * G * H + K * H], axis=1)
    )
    if model.position == "rope":
        q_DKGH, k_DK1H = (np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1) for x in (q_DKGH, k_DK1H))
    return np.concatenate([q_DKGH, k_DK1H, v_DK1H], axis=2)


def _config(path: Path) -> dict[str, Any]:
    """The settings without their sections, which its first runs did not have."""
    try:
        tree = yaml.load(read_text(path, MAX_FILE_BYTES), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is no YAML: {first_line(error)}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds no settings")
    flat = {key: value for section in tree.values() if isinstance(section, dict) for key, value in section.items()}
    return {key: value for key, value in tree.items() if not isinstance(value, dict)} | flat


def _settings(path: Path, said: dict[str, Any], weights: Path, arrays: dict[str, StoredArray]) -> dict[str, dict[str, Any]]:
    """What the settings say, and the arrays where they say it better."""
    for name, allowed in PLAIN.items():
        if name in said and said[name] not in allowed:
            raise UserError(f"{path}: a model with {name}: {quote(said[name])} cannot be read, only {quote(allowed[-1])}")
    embed = _find(weights, arrays, *EMBED)
    down = _find(weights, arrays, "blocks/0/ffn/down_proj/kernel", "blocks/0/mlp/down_proj/kernel")
    up = _find(weights, arrays, "blocks/0/ffn/up_proj/kernel", "blocks/0/mlp/up_proj/kernel")
    qkv = _find(weights, arrays, "blocks/0/attention/qkv/kernel")
    dim, heads = embed.shape[-1], _count(path, said, "n_heads")
    if dim % heads:
        raise UserError(f"{path}: n_heads {heads} does not divide the {dim} numbers of an embedding in {weights.name}")
    head_size, hidden = dim // heads, down.shape[0]
    position, theta = _position(path, said), 1e4 * float(said.get("rope_scale_factor", said.get("rope_scale", 1.0)))
    if position == "use_rotary_pos":
        _check_angles(theta, weights, arrays, head_size)
    head = arrays.get("head/kernel", arrays.get("lm_head/kernel"))
    bias = "head/bias" in arrays or "lm_head/bias" in arrays
    if head is None and bias:
        raise UserError(f"{weights} holds a bias of the logits and not the matrix they are made with: it cannot be read")
    tied = head is None or (head.shape == embed.shape[::-1] and np.array_equal(head.array(), embed.array().T))
    model = {
        "dim": dim,
        "n_heads": heads,
        "kv_heads": (qkv.shape[-1] - dim) // (2 * head_size),
        "head_size": head_size,
        "num_blocks": 1 + max(int(name.split("/")[1]) for name in arrays if name.startswith("blocks/")),
        "hidden_dim": hidden,
        "max_context": _count(path, said, "max_context"),
        "weight_tying": tied,
        "head_bias": bias,
        "activation": "swiglu" if up.shape[-1] == 2 * hidden else "gelu",
        "mlp_bias": any(name.endswith("up_proj/bias") for name in arrays),
        "norm": "layernorm" if any(name.endswith(("norm1/bias", "ln1/bias")) for name in arrays) else "rmsnorm",
        "norm_epsilon": EPSILON,
        "dropout_rate": float(said.get("dropout_rate", said.get("dropout", 0.0))),
    }
    attention: dict[str, Any] = {"use_rotary_pos": False} | ({position: True} if position else {})
    if position == "use_rotary_pos":
        attention["rope_theta"] = theta
    if said.get("sliding_window", False):
        attention |= {"sliding_window": True, "context_window": _count(path, said, "context_window")}
    attention["out_bias"] = any(name.endswith("o_proj/bias") for name in arrays)
    if said.get("no_sink", False):
        attention |= {"no_sink": True, "gate_bias": any(name.endswith("attention/W/bias") for name in arrays)}
    return {"model": model, "attention": attention}


def _find(weights: Path, arrays: dict[str, StoredArray], *names: str) -> StoredArray:
    found = next((arrays[name] for name in names if name in arrays), None)
    if found is None or len(found.shape) != 2:
        what = f"{' or '.join(names)}, a matrix" if found is None else f"{names[0]} as a matrix"
        raise UserError(f"{weights} lacks {what}: these are no weights of a dense model of DantinoX 0")
    return found


def _count(path: Path, said: dict[str, Any], key: str) -> int:
    value = said.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < (key != "context_window"):
        raise UserError(f"{path}: {key} must be a whole number, got {quote(value)}")
    return value


def _position(path: Path, said: dict[str, Any]) -> str | None:
    """The setting of ours that says how positions are told, None for not at all."""
    if "pos_encoding" in said:
        if said["pos_encoding"] not in (*POSITIONS, "none"):
            raise UserError(f"{path}: pos_encoding: {quote(said['pos_encoding'])} is none of {', '.join(POSITIONS)}, none")
        return POSITIONS.get(said["pos_encoding"])
    if not any(key in said for key in POSITIONS.values()):
        raise UserError(f"{path} does not say how positions are told: it has none of {', '.join(POSITIONS.values())}")
    on = [key for key in POSITIONS.values() if said.get(key)]
    if len(on) > 1:
        raise UserError(f"{path}: a model with both {' and '.join(on)} cannot be read")
    return on[0] if on else None


def _check_angles(theta: float, weights: Path, arrays: dict[str, StoredArray], head_size: int) -> None:
    """The first versions rotated by other frequencies, and the other way round; their names of layers give them away."""
    angles = arrays.get("blocks/0/attention/angle")
    if angles is not None:
        expected = theta ** (-np.arange(0, head_size, 2) / head_size)
        told = angles.array().reshape(-1, angles.shape[-1])
        if len(told) > 1 and (told.shape[1:] != expected.shape or not np.allclose(told[1], expected, rtol=1e-4)):
            raise UserError(f"{weights} rotates by frequencies that this version does not know: it cannot be read")
    elif "blocks/0/ln1/scale" in arrays:
        raise UserError(
            f"{weights} is of one of the first versions of DantinoX 0, which rotated in two ways: its files do not tell which"
        )


def _tokenizer(path: Path) -> str:
    """The text of a tokenizer.json: theirs holds characters and their ids, or that of a library in a string."""
    tree = read_json(path, MAX_FILE_BYTES)
    if "model" in tree:
        return json.dumps(tree, ensure_ascii=False)
    if tree.get("type") == "char" and isinstance(tree.get("vocab"), dict):
        return _characters(path, tree["vocab"])
    if tree.get("type") == "bpe" and isinstance(tree.get("tokenizer"), str):
        inner = json.loads(tree["tokenizer"])
        # It decoded with a table of seven letters; bytes are what its tokens spell.
        letters = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
        return json.dumps(inner | {"decoder": inner.get("decoder") or letters}, ensure_ascii=False)
    raise UserError(f"{path}: a tokenizer of type {quote(tree.get('type'))} cannot be read, only char and bpe")


def _characters(path: Path, vocab: dict[str, Any]) -> str:
    from tokenizers import Tokenizer, decoders, models

    if not all(len(letter) == 1 and isinstance(index, int) for letter, index in vocab.items()):
        raise UserError(f"{path} is no vocabulary of characters")
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.decoder = decoders.Fuse()
    return core.to_str(pretty=True)
