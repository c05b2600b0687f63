"""The metadata of Gemma 4, whose sizes differ between sliding and full layers."""

from typing import Any

import numpy as np

from dantinox.config import ModelConfig, UserError
from dantinox.files import quote
from dantinox.interop.gguf.gguf_file import GGUFFile, read_tensor
from dantinox.interop.gguf.gguf_keys import (
    LLAMA3,
    MAX_NUMBER,
    SIZES,
    Metadata,
    key_type,
    shortest_decimal,
)

# The sizes that have one value per layer.
PER_LAYER = ("feed_forward_length", "attention.head_count_kv")


def gemma4_config(meta: Metadata, file: GGUFFile, windows: dict[str, Any]) -> dict[str, Any]:
    """Returns the `config.json` of a Gemma 4 model; `windows` contains the sliding-window keys."""
    found = {
        hf_key: meta(key, kind=key_type(key))
        for key, hf_key in SIZES.items()
        if key not in PER_LAYER
    }
    layers = found["num_hidden_layers"]
    # The number of last layers that read the keys and values of other layers.
    shared = meta("attention.shared_kv_layers", 0)
    own = layers - shared
    found |= windows
    full = [i for i, kind in enumerate(found["layer_types"]) if kind == "full_attention"]
    sliding = [i for i in range(layers) if i not in full] or full
    if layers - 1 not in full or shared >= layers:
        raise UserError(
            f"{meta.name} must have full attention in its last layer, and a layer with its own keys"
        )
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{meta.name} has no embeddings: token_embd.weight is missing")
    rows = file.tensors["token_embd.weight"].shape[0]
    widths, heads = (_per_layer_values(meta, key, layers) for key in PER_LAYER)
    wider = [i for i in range(layers) if widths[i] != widths[0]]
    if {heads[i] for i in sliding} != {heads[sliding[0]]} or {heads[i] for i in full} != {
        heads[full[0]]
    }:
        raise UserError(
            f"{meta.name} has layers of one kind with different numbers of"
            " key heads, which is not supported"
        )
    if wider and (wider != [*range(own, layers)] or {widths[i] for i in wider} != {2 * widths[0]}):
        raise UserError(
            f"{meta.name} has layers with the feed-forward widths {quote(widths)},"
            " which is not supported"
        )
    size = meta("attention.key_length")  # of heads in full layers
    local = meta("attention.key_length_swa")  # of heads in sliding layers
    others = (meta("attention.value_length"), meta("attention.value_length_swa"))
    rotated = (meta("rope.dimension_count", size), meta("rope.dimension_count_swa", local))
    if others != (size, local) or rotated != (size, local):
        raise UserError(
            f"{meta.name} has different sizes of keys, values and rotations in one kind of layer"
        )
    has_values = {i: f"blk.{i}.attn_v.weight" in file.tensors for i in full if i < own}
    if len(set(has_values.values())) > 1:
        raise UserError(
            f"{meta.name} has a value projection in some full layers and not"
            " in others, which is not supported"
        )
    theta = meta("rope.freq_base", 10000.0, float)
    local_theta = meta("rope.freq_base_swa", theta, float)
    if not meta("attention.causal", True, bool):
        raise UserError(
            f"{file.path} contains a model without causal attention, which is not supported"
        )
    return (
        found
        | _expert_config(meta, widths[0])
        | {
            "head_dim": local,
            "num_key_value_heads": heads[sliding[0]],
            "per_layer_config": {
                str(i): {"head_dim": size, "num_key_value_heads": heads[i]} for i in full
            },
            "attention_k_eq_v": not all(has_values.values()),
            "num_kv_shared_layers": shared,
            "use_double_wide_mlp": bool(wider),
            "hidden_size_per_layer_input": meta("embedding_length_per_layer_input", 0),
            "vocab_size_per_layer_input": rows,
            "rope_parameters": {
                "full_attention": {"rope_theta": theta, **_proportional_rope(file, size)},
                "sliding_attention": {"rope_theta": local_theta, "rope_type": "default"},
            },
        }
    )


def _expert_config(meta: Metadata, width: int) -> dict[str, Any]:
    """Returns the widths of the feed-forward layers and the keys of experts; `width` is that of the
    dense branch.
    """
    count = meta("expert_count", 0)
    if not count:
        return {"intermediate_size": width}
    return {
        "intermediate_size": width,
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": meta("expert_used_count"),
        "moe_intermediate_size": meta("expert_feed_forward_length"),
    }


def _per_layer_values(meta: Metadata, key: str, layers: int) -> list[int]:
    """Returns one positive integer per layer, from a list or from a single number for all
    layers.
    """
    meta.used.add(key)
    value = meta.entries.get(f"{meta.arch}.{key}")
    values: list[Any] = value if isinstance(value, list) else [value] * layers
    if len(values) != layers or not all(type(number) is int and number > 0 for number in values):
        raise UserError(
            f"{meta.name} must have {meta.arch}.{key} for each of its {layers} layers, got"
            f" {quote(value)}"
        )
    return values


def _proportional_rope(file: GGUFFile, size: int) -> dict[str, Any]:
    """Returns the RoPE scaling of full layers.

    The file stores a divisor for each rotary frequency. Pairs that are not rotated have a huge
    divisor.
    """
    if LLAMA3 not in file.tensors:
        raise UserError(f"{file.path} lacks {LLAMA3}")
    factors = read_tensor(file, LLAMA3)
    count = int(np.sum(factors < MAX_NUMBER / 2))  # of the rotated pairs
    factor = shortest_decimal(factors[0])
    expected = np.where(np.arange(size // 2) < count, factors[0], factors[-1])
    if (
        factors.shape != (size // 2,)
        or not count
        or factor < 1
        or not np.array_equal(factors, expected)
    ):
        raise UserError(
            f"{file.path} has {LLAMA3}, which does not follow the frequency scaling of Gemma 4"
        )
    if count == size // 2 and factor == 1:
        return {"rope_type": "default"}
    return {
        "rope_type": "proportional",
        "partial_rotary_factor": 2 * count / size,
        "factor": factor,
    }


def gemma4_metadata(model: ModelConfig) -> dict[str, Any]:
    """Returns the metadata that `gemma4_config` reads."""
    size = model.global_head_size or model.head_size
    layers = [model.of_layer(i) for i in range(model.num_blocks)]
    experts = model.experts
    found: dict[str, Any] = {
        "feed_forward_length": [
            layer.hidden_dim if layer.experts is None else layer.experts.shared_dim
            for layer in layers
        ],
        "attention.head_count_kv": [layer.kv_heads for layer in layers],
        "attention.shared_kv_layers": model.kv_shared_layers,
        "embedding_length_per_layer_input": model.per_layer_dim,
        "attention.sliding_window": next(
            (window for window in model.windows if window is not None), 512
        ),
        "rope.dimension_count": size,
        "rope.dimension_count_swa": model.head_size,
        "rope.freq_base_swa": model.rope_local_theta or model.rope_theta,
    }
    for part in ("key", "value"):
        found[f"attention.{part}_length"] = size
        found[f"attention.{part}_length_swa"] = model.head_size
    if experts is not None:
        found |= {
            "expert_count": experts.count,
            "expert_used_count": experts.top_k,
            "expert_feed_forward_length": model.hidden_dim,
        }
    return found
