"""Rotary positions in GGUF files: metadata keys, tensors of rotary frequencies, and the keys of
`config.json`.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dantinox.config import Config, ModelConfig, UserError
from dantinox.files import quote
from dantinox.interop.gguf.gguf_families import Family
from dantinox.interop.gguf.gguf_file import GGUFFile, read_tensor
from dantinox.interop.gguf.gguf_keys import (
    LLAMA3,
    LONG,
    MAX_NUMBER,
    SHORT,
    Metadata,
    shortest_decimal,
)

# Architectures that rotate only a part of each head.
PARTIAL_ROPE = ("phi3", "glm4moe", "glm4", "stablelm", "chatglm", "phi2")


def rope_config(
    meta: Metadata, family: Family, file: GGUFFile, config: dict[str, Any]
) -> dict[str, Any]:
    """Returns `rope_parameters` and related keys."""
    head_size = config["head_dim"]
    theta = meta("rope.freq_base", 10000.0, float)
    rotated = meta("rope.dimension_count", head_size)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    more: dict[str, Any] = {}
    if family.model_type == "phi3":
        more["original_max_position_embeddings"] = meta(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        )
    if family.arch in PARTIAL_ROPE:
        rope["partial_rotary_factor"] = rotated / head_size
    elif rotated != head_size:
        raise UserError(
            f"{file.path} rotates {rotated} of {head_size} elements of a head; {family.arch}"
            " supports only all"
        )
    kind = meta("rope.scaling.type", "linear", str)
    factor = meta("rope.scaling.factor", meta("rope.scale_linear", 1.0, float), float)
    if LLAMA3 in file.tensors:
        rope |= _fit_llama3(read_tensor(file, LLAMA3), theta, file)
    elif LONG in file.tensors or SHORT in file.tensors:
        rope |= _longrope_config(meta, file, config, more)
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor} | _yarn_config(meta, family, config)
    elif kind == "linear" and factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear"):
        raise UserError(
            f"{file.path} has {meta.arch}.rope.scaling.type: {quote(kind)},"
            " expected none, linear or yarn"
        )
    if family.model_type in ("gemma3_text", "olmo3"):
        # For olmo3, llama.cpp uses the same base in all layers.
        local = {"rope_type": "default", "rope_theta": theta}
        if family.model_type == "gemma3_text":
            local["rope_theta"] = meta("rope.freq_base_swa", 10000.0, float)
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    if family.model_type == "smollm3":
        every = config["no_rope_layer_interval"]
        layers = range(config["num_hidden_layers"])
        more["no_rope_layers"] = [int((layer + 1) % every != 0) for layer in layers]
    return more | {"rope_parameters": rope}


def _yarn_config(meta: Metadata, family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of YaRN, without `rope_type` and `factor`."""
    found: dict[str, Any] = {
        "original_max_position_embeddings": meta(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
        "beta_fast": meta("rope.scaling.yarn_beta_fast", 32.0, float),
        "beta_slow": meta("rope.scaling.yarn_beta_slow", 1.0, float),
    }
    if family.arch == "gpt-oss":
        found["truncate"] = False
    if family.arch == "mistral3":
        found |= _query_scaling(meta)
    # llama.cpp has a single key for `mscale` and `mscale_all_dim`, with a tenth of their value.
    if family.latent:
        mscale = round(10 * meta("rope.scaling.yarn_log_multiplier", kind=float), 6)
        found |= {"mscale": mscale, "mscale_all_dim": mscale}
    return found


def _query_scaling(meta: Metadata) -> dict[str, Any]:
    """Returns the query and score factors of a mistral3 with YaRN; llama.cpp assumes an `mscale` of
    1.
    """
    found: dict[str, Any] = {}
    if meta.has("attention.temperature_scale"):
        found["llama_4_scaling_beta"] = meta("attention.temperature_scale", kind=float)
    if meta.has("rope.scaling.yarn_log_multiplier"):
        found |= {
            "mscale": 1.0,
            "mscale_all_dim": meta("rope.scaling.yarn_log_multiplier", kind=float),
        }
    return found


def _longrope_config(
    meta: Metadata, file: GGUFFile, config: Mapping[str, Any], more: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the RoPE scaling of a file with longrope factors; `more` has the original context
    length, if it is known.
    """
    original = more.get("original_max_position_embeddings", 0)
    if not original or LONG not in file.tensors or SHORT not in file.tensors:
        raise UserError(
            f"{file.path} must have {LONG}, {SHORT} and rope.scaling.original_context_length"
        )
    found = {
        "rope_type": "longrope",
        "long_factor": [shortest_decimal(factor) for factor in read_tensor(file, LONG)],
        "short_factor": [shortest_decimal(factor) for factor in read_tensor(file, SHORT)],
        "original_max_position_embeddings": original,
    }
    expected = _longrope_attention_factor(config["max_position_embeddings"], original)
    factor = meta("rope.scaling.attn_factor", expected, float)
    if not math.isclose(factor, expected, rel_tol=1e-6):
        found["attention_factor"] = factor
    return found


def _longrope_attention_factor(context: int, original: int) -> float:
    """Returns the factor that longrope applies to queries and keys (Ding et al. 2024, LongRoPE)."""
    if context <= original:
        return 1.0
    return math.sqrt(1 + math.log(context / original) / math.log(original))


def llama3_factors(
    size: int, theta: float, factor: float, original: int, low: float = 1.0, high: float = 4.0
) -> np.ndarray:
    """Returns the divisors of `size` rotary frequencies with llama3 scaling, float32 [size] (Llama
    3.1's `rope_scaling`).

    Args:
      factor: the divisor of frequencies that turn fewer than `low` times within the `original`
        context. Frequencies that turn more than `high` times have the divisor 1.
    """
    turns = original * theta ** (-np.arange(size) / size) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth), np.float32)


def _fit_llama3(factors: np.ndarray, theta: float, file: GGUFFile) -> dict[str, Any]:
    """Finds the llama3 scaling parameters that give these divisors. GGUF stores only the
    divisors.
    """
    # The largest divisor is the factor, unless even the slowest frequency turns more than `low`
    # times.
    for factor in (shortest_decimal(factors.max()), 2.0, 4.0, 8.0, 16.0, 32.0, 64.0):
        for original in (2**n for n in range(4, 21)):
            if np.allclose(
                llama3_factors(len(factors), theta, factor, original), factors, rtol=1e-5
            ):
                numbers = {"factor": factor, "original_max_position_embeddings": original}
                return numbers | {
                    "rope_type": "llama3",
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
    raise UserError(
        f"{file.path} has {LLAMA3}, which does not follow the frequency scaling of Llama 3"
    )


def frequency_tensors(config: Config, model: ModelConfig, family: Family) -> dict[str, np.ndarray]:
    """Returns the rotary frequency divisors that GGUF stores as tensors."""
    scaling = model.rope_scaling
    half = model.rotated_size // 2
    if family.arch == "gemma4":
        half = (model.global_head_size or model.head_size) // 2
        share = 1.0 if scaling is None else scaling.share
        factor = 1.0 if scaling is None else scaling.factor
        rotated = np.arange(half) < int(share * 2 * half // 2)
        # `gguf_gemma4` describes this tensor.
        return {LLAMA3: np.where(rotated, factor, MAX_NUMBER).astype(np.float32)}
    if scaling is None or scaling.kind not in ("llama3", "longrope"):
        return {}
    if scaling.kind == "llama3":
        factors = llama3_factors(
            half,
            model.rope_theta,
            scaling.factor,
            scaling.original_context,
            scaling.low_freq_factor,
            scaling.high_freq_factor,
        )
        return {LLAMA3: factors}
    longrope = {
        LONG: config.attention.rope_long_factors,
        SHORT: config.attention.rope_short_factors,
    }
    return {
        name: np.array(values or (1.0,) * half, np.float32) for name, values in longrope.items()
    }


def rope_metadata(model: ModelConfig, context: int) -> dict[str, Any]:
    """Returns the metadata of RoPE scaling types that are not stored as tensors."""
    scaling = model.rope_scaling
    if scaling is None or scaling.kind in ("llama3", "proportional"):
        return {}
    original = {"rope.scaling.original_context_length": scaling.original_context}
    if scaling.kind == "longrope":
        longest = max(context, round(scaling.factor * scaling.original_context))
        factor = scaling.attention_factor or _longrope_attention_factor(
            longest, scaling.original_context
        )
        return original | {"context_length": longest, "rope.scaling.attn_factor": factor}
    found = {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}
    if scaling.kind == "linear":
        return found
    betas = {
        "rope.scaling.yarn_beta_fast": scaling.beta_fast,
        "rope.scaling.yarn_beta_slow": scaling.beta_slow,
    }
    return found | original | betas
