"""Conversion between the GGUF metadata of each model family and the keys of Hugging Face's `config.json`.

The properties of each architecture are taken from llama.cpp (`conversion/` and `src/models/`).
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dantinox.config import Config, ModelConfig, UserError
from dantinox.files import quote
from dantinox.interop.gguf.gguf_families import FAMILIES, Family
from dantinox.interop.gguf.gguf_file import GGUFFile, read_tensor
from dantinox.interop.gguf.gguf_gemma4 import gemma4_config, gemma4_metadata
from dantinox.interop.gguf.gguf_keys import LLAMA3, LONG, MAX_NUMBER, SHORT, SIZES, Metadata, key_type

GPT2_SIZES = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
WITH_SCORE_FUNCTION = ("deepseek2", "dots1", "glm4moe")  # architectures whose files name the router's score function
SOFTMAX, SIGMOID = 1, 2  # llama.cpp's `llama_expert_gating_func_type`
PARTIAL_ROPE = ("glm4moe", "glm4", "stablelm", "chatglm", "phi2")
HEADS_SPAN_WIDTH = (
    "qwen2moe",
    "olmoe",
    "starcoder2",
    "command-r",
    "cohere2",
    "exaone4",
    "stablelm",
    "olmo",
    "chatglm",
    "phi2",
    "bitnet",
)  # n_heads × head_size must equal the model dimension
GLM_FLASH = (47, 48), 154880  # layer counts and vocabulary size for which llama.cpp assumes sigmoid scores in a deepseek2
LARGE_MODEL_LAYERS = 64  # if a command-r has at least this many layers, llama.cpp assumes that it normalizes queries and keys
DEEPSEEK_LITE_LAYERS = (26, 27)  # layer counts for which llama.cpp reads a deepseek2 without a query latent (`q_lora_rank`)
OLMO_EPSILON = 1e-5  # transformers has this value as a constant


def gguf_to_hf_config(file: GGUFFile) -> tuple[Family, dict[str, Any]]:
    """Returns the family of a file's model, and its `config.json` without `vocab_size` and `tie_word_embeddings`.

    Raises:
      UserError: the architecture is not supported, or a metadata key is missing or not supported.
    """
    meta = Metadata(file)
    family = _find_family(meta, file)
    config: dict[str, Any] = {"model_type": family.model_type, **family.fixed}
    if family.model_type == "gpt2":
        config |= {hf_key: meta(key, kind=key_type(key)) for key, hf_key in GPT2_SIZES.items()}
        if meta("attention.head_count_kv", config["n_head"]) != config["n_head"]:
            raise UserError(f"{file.path} has fewer key heads than heads, which GPT-2 does not support")
        _check_head_lengths(meta, config["n_embd"] // config["n_head"])
        meta.check_all_used()
        return family, config
    if family.arch == "gemma4":
        config |= gemma4_config(meta, file, _window_config(meta, family, meta("block_count")))
        meta.check_all_used()
        return family, config
    heads = meta("attention.head_count")
    has_expert_width = "expert_feed_forward_length" in family.keys
    defaults = {"attention.head_count_kv": heads, "feed_forward_length": 1 if has_expert_width else None}
    sizes = SIZES
    if family.epsilon_key != "rms_norm_eps":
        sizes = {key: hf_key for key, hf_key in SIZES.items() if hf_key != "rms_norm_eps"}
        sizes |= {"attention.layer_norm_epsilon": family.epsilon_key}
    config |= {hf_key: meta(key, defaults.get(key), key_type(key)) for key, hf_key in sizes.items()}
    if config["hidden_size"] % heads and not meta.has("attention.key_length"):
        raise UserError(f"{file.path} must have {family.arch}.attention.key_length: {heads} heads do not divide the width")
    layers = config["num_hidden_layers"]
    mtp_layers = count_mtp_layers(meta)
    if mtp_layers >= layers:
        raise UserError(f"{file.path} has {layers} layers, of which {mtp_layers} are multi-token prediction layers")
    config["num_hidden_layers"] = layers - mtp_layers
    config |= {hf_key: meta(key, default, kind) for key, (hf_key, kind, default) in family.keys.items()}
    if family.latent:
        config |= _latent_config(meta, heads, config["num_key_value_heads"])
        head_size = config["head_dim"]
    else:
        head_size = meta("attention.key_length", max(config["hidden_size"] // heads, 1))
        _check_head_lengths(meta, head_size)
        config["head_dim"] = head_size
    if family.model_type == "deepseek_v2":
        config["topk_method"] = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
    if family.arch == "ernie4_5-moe":
        shared = config["moe_num_shared_experts"] * config["moe_intermediate_size"]
        if (found := meta("expert_shared_feed_forward_length", shared)) != shared:
            expected = f"{shared} (number of shared experts × their width)"
            raise UserError(f"{file.path} has expert_shared_feed_forward_length {found}, expected {expected}")
    config |= _bias_config(file, family)
    config |= _window_config(meta, family, config["num_hidden_layers"])
    config |= _rope_config(meta, family, file, config)
    if family.arch in ("gemma2", "gemma3"):
        wide = {"gemma2": 46, "gemma3": 62}[family.arch] == config["num_hidden_layers"]
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if wide else head_size
    if family.arch in (
        "olmo",
        "olmo2",
        "olmoe",
        "stablelm",
        "cohere2",
        "phi2",
        "bitnet",
    ):  # transformers has no such key for these
        del config["head_dim"]
    if family.arch == "olmo" and (epsilon := config.pop("layer_norm_eps")) != OLMO_EPSILON:
        raise UserError(f"{file.path} has olmo.attention.layer_norm_epsilon: {epsilon}; only {OLMO_EPSILON} is supported")
    if family.model_type == "granitemoehybrid":
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    if not meta("attention.causal", True, bool):
        raise UserError(f"{file.path} contains a model without causal attention, which is not supported")
    meta.check_all_used()
    return family, config


def _find_family(meta: Metadata, file: GGUFFile) -> Family:
    """Returns the family of a file. If several families share the architecture, the metadata decide."""
    known = {family.model_type: family for family in FAMILIES if family.arch == meta.arch}
    if not known:
        names = ", ".join(dict.fromkeys(family.arch for family in FAMILIES))
        raise UserError(f"{file.path} has a model of the architecture {quote(meta.arch)}, expected one of {names}")
    meta.check_sizes(file.tensors)
    family = next(iter(known.values()))
    if meta.arch == "llama" and meta("expert_count", 0):
        family = known["mixtral"]
    if meta.arch == "olmo2" and meta.has("attention.sliding_window"):
        family = known["olmo3"]
    if meta.arch == "mistral3" and not meta.has("attention.temperature_scale"):
        family = family._replace(model_type="mistral")
    if meta.arch == "granitemoe" and meta.has("expert_shared_feed_forward_length"):
        family = known["granitemoeshared"]
    # In these architectures, `rope.scaling.finetuned: false` means that the model has no rotary positions.
    if meta.arch in ("granite", "granitemoe") and not meta("rope.scaling.finetuned", True, bool):
        if meta.arch == "granitemoe":
            raise UserError(f"{file.path} has granitemoe.rope.scaling.finetuned: false, which is not supported")
        family = known["granitemoehybrid"]
    if meta.arch in WITH_SCORE_FUNCTION:
        layers = meta("block_count") - count_mtp_layers(meta)
        tokens = meta.entries.get("tokenizer.ggml.tokens")
        vocab_size = meta("vocab_size", len(tokens) if isinstance(tokens, list) else 0)
        flash = layers in GLM_FLASH[0] and vocab_size == GLM_FLASH[1]
        scores = meta("expert_gating_func", SOFTMAX if meta.arch == "deepseek2" and not flash else SIGMOID)
        if scores not in (SOFTMAX, SIGMOID) or (meta.arch != "deepseek2" and scores != SIGMOID):
            raise UserError(f"{file.path} has {meta.arch}.expert_gating_func: {scores}, which is not supported")
        if meta.arch == "deepseek2" and scores == SIGMOID:
            family = known["deepseek_v3"]
    return family


def select_family(hf_config: Mapping[str, Any]) -> Family:
    """Returns the entry of `FAMILIES` for the export of a model with this `config.json`.

    Raises:
      UserError: the family cannot be exported.
    """
    # The `model_type` of this family is that of Llama.
    name = "bitnet_b1_58" if hf_config.get("architectures") == ["BitnetForCausalLM"] else hf_config["model_type"]
    rows = [family for family in FAMILIES if family.model_type == name]
    if not rows:
        raise UserError(f"the family {name} cannot be exported to GGUF")
    # Granite 4 is one family in transformers and two architectures in llama.cpp, with and without experts.
    return rows[-1] if hf_config["model_type"] == "granitemoehybrid" and hf_config.get("num_local_experts") else rows[0]


def count_mtp_layers(meta: Metadata) -> int:
    """Returns the number of multi-token prediction layers, which are the last layers of a file and are not imported."""
    return meta("nextn_predict_layers", 0) if meta.arch in WITH_SCORE_FUNCTION else 0


def _check_head_lengths(meta: Metadata, head_size: int) -> None:
    lengths = {meta(f"attention.{part}_length", head_size) for part in ("key", "value")}
    if lengths != {head_size}:
        raise UserError(f"{meta.name} has keys and values of different lengths, which is not supported")


def _latent_config(meta: Metadata, heads: int, key_heads: int) -> dict[str, Any]:
    """Returns the sizes of latent attention. In llama.cpp, its cache is one key head of size latent rank + rotary size."""
    if key_heads != 1:
        raise UserError(f"{meta.name} must have {meta.arch}.attention.head_count_kv: 1, got {key_heads}")
    rank, rotated = meta("attention.kv_lora_rank"), meta("rope.dimension_count")
    lengths = tuple(meta(f"attention.{part}_length", default) for part, default in (("key", rank + rotated), ("value", rank)))
    key, value = meta("attention.key_length_mla"), meta("attention.value_length_mla")
    if lengths != (rank + rotated, rank) or key <= rotated:
        raise UserError(
            f"{meta.name} has key and value lengths {lengths} and a key length of {key}, which do not fit its latent of {rank} "
            f"and {rotated} rotated elements"
        )
    sizes = {"kv_lora_rank": rank, "qk_rope_head_dim": rotated, "qk_nope_head_dim": key - rotated, "v_head_dim": value}
    sizes["q_lora_rank"] = meta("attention.q_lora_rank") if meta.has("attention.q_lora_rank") else None
    return sizes | {"num_key_value_heads": heads, "head_dim": rotated}


def _bias_config(file: GGUFFile, family: Family) -> dict[str, Any]:
    if family.arch == "glm4moe":
        return {
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
            "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        }
    if family.arch in ("seed_oss", "glm4", "chatglm"):
        return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
    if family.arch == "stablelm":
        parallel = "blk.0.ffn_norm.weight" not in file.tensors
        return {"use_qkv_bias": "blk.0.attn_q.bias" in file.tensors, "use_parallel_residual": parallel}
    if family.model_type == "granitemoehybrid":
        return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
    if family.model_type not in ("llama", "smollm3", "granite"):
        return {}
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}


def _window_config(meta: Metadata, family: Family, layers: int) -> dict[str, Any]:
    """Returns the keys of sliding windows and of logit soft-capping."""
    if not family.full_every:
        if family.arch == "phi3":
            meta.used.add("attention.sliding_window")  # llama.cpp reads it, but does not use it
        if family.arch == "exaone4":
            if layers == LARGE_MODEL_LAYERS:  # for this number of layers, llama.cpp assumes sliding windows
                raise UserError(
                    f"{meta.name} has an exaone4 of {LARGE_MODEL_LAYERS} layers, whose sliding windows are not supported"
                )
            return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
        plain = {"sliding_window": None} if family.model_type in ("mistral", "mixtral", "phi3", "ministral3") else {}
        return plain | (
            {"use_sliding_window": False}
            if family.model_type in ("qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "smollm3")
            else {}
        )
    meta.used.add("attention.sliding_window_pattern")
    pattern = meta.entries.get(f"{meta.arch}.attention.sliding_window_pattern", family.full_every)
    window = meta("attention.sliding_window", 4096 if family.arch == "gemma2" else 0)
    if not isinstance(pattern, (int, list)) or (isinstance(pattern, list) and len(pattern) != layers):
        raise UserError(
            f"{meta.name} must have an attention.sliding_window_pattern with one entry per layer, got {quote(pattern)}"
        )
    if isinstance(pattern, int):
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)] if pattern else [True] * layers
    kinds = ["sliding_attention" if slides and window else "full_attention" for slides in pattern]
    found: dict[str, Any] = {"sliding_window": window or 4096, "layer_types": kinds}
    caps = {"gemma2": ("attn", "final"), "gemma3": ("final",), "gemma4": ("final",)}.get(family.arch, ())
    for cap in caps:
        key = f"{cap}_logit_softcapping"
        found[key] = meta(key, kind=float) if meta.has(key) else None
    return found


def _rope_config(meta: Metadata, family: Family, file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Returns `rope_parameters` and related keys."""
    head_size = config["head_dim"]
    theta, rotated = meta("rope.freq_base", 10000.0, float), meta("rope.dimension_count", head_size)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    more: dict[str, Any] = {}
    if family.model_type == "phi3":
        rope["partial_rotary_factor"] = rotated / head_size
        more["original_max_position_embeddings"] = meta(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        )
    elif family.arch in PARTIAL_ROPE:
        rope["partial_rotary_factor"] = rotated / head_size
    elif rotated != head_size:
        raise UserError(f"{file.path} rotates {rotated} of {head_size} elements of a head; {family.arch} supports only all")
    kind = meta("rope.scaling.type", "linear", str)
    factor = meta("rope.scaling.factor", meta("rope.scale_linear", 1.0, float), float)
    if LLAMA3 in file.tensors:
        rope |= _fit_llama3(read_tensor(file, LLAMA3), theta, file)
    elif LONG in file.tensors or SHORT in file.tensors:
        rope |= _longrope_config(meta, file, config, more)
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor}
        rope["original_max_position_embeddings"] = meta(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        )
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            rope[name] = meta(f"rope.scaling.yarn_{name}", default, float)
        if family.arch == "gpt-oss":
            rope["truncate"] = False
        if family.arch == "mistral3":
            rope |= _query_scaling(meta)
        if family.latent:  # llama.cpp has a single key for `mscale` and `mscale_all_dim`
            rope["mscale"] = rope["mscale_all_dim"] = round(10 * meta("rope.scaling.yarn_log_multiplier", kind=float), 6)
    elif kind == "linear" and factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear"):
        raise UserError(f"{file.path} has {meta.arch}.rope.scaling.type: {quote(kind)}, expected none, linear or yarn")
    if family.model_type in ("gemma3_text", "olmo3"):
        local = {"rope_type": "default", "rope_theta": theta}  # for olmo3, llama.cpp uses the same base in all layers
        if family.model_type == "gemma3_text":
            local["rope_theta"] = meta("rope.freq_base_swa", 10000.0, float)
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    if family.model_type == "smollm3":
        more["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]
    return more | {"rope_parameters": rope}


def _query_scaling(meta: Metadata) -> dict[str, Any]:
    """Returns the query and score factors of a mistral3 with YaRN; llama.cpp assumes an `mscale` of 1."""
    found: dict[str, Any] = {}
    if meta.has("attention.temperature_scale"):
        found["llama_4_scaling_beta"] = meta("attention.temperature_scale", kind=float)
    if meta.has("rope.scaling.yarn_log_multiplier"):
        found |= {"mscale": 1.0, "mscale_all_dim": meta("rope.scaling.yarn_log_multiplier", kind=float)}
    return found


def _longrope_config(meta: Metadata, file: GGUFFile, config: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    original = more.get("original_max_position_embeddings", 0)
    if not original or LONG not in file.tensors or SHORT not in file.tensors:
        raise UserError(f"{file.path} must have {LONG}, {SHORT} and rope.scaling.original_context_length")
    factors = {name: [float(str(f)) for f in read_tensor(file, stored)] for name, stored in (("long", LONG), ("short", SHORT))}
    expected = _longrope_attention_factor(config["max_position_embeddings"], original)
    factor = meta("rope.scaling.attn_factor", expected, float)
    return {
        "rope_type": "longrope",
        "long_factor": factors["long"],
        "short_factor": factors["short"],
        "original_max_position_embeddings": original,
    } | ({} if math.isclose(factor, expected, rel_tol=1e-6) else {"attention_factor": factor})


def _longrope_attention_factor(context: int, original: int) -> float:
    """Returns the factor that longrope applies to queries and keys (Ding et al. 2024, LongRoPE)."""
    return math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original else 1.0


def llama3_factors(size: int, theta: float, factor: float, original: int, low: float = 1.0, high: float = 4.0) -> np.ndarray:
    """Returns the divisors of `size` rotary frequencies with llama3 scaling, float32 [size] (Llama 3.1's `rope_scaling`)."""
    turns = original * theta ** (-np.arange(size) / size) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth), np.float32)


def _fit_llama3(factors: np.ndarray, theta: float, file: GGUFFile) -> dict[str, Any]:
    """Finds the llama3 scaling parameters that give these divisors. GGUF stores only the divisors."""
    for factor in dict.fromkeys((float(str(factors.max())), 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)):
        for original in (2**n for n in range(4, 21)):
            if np.allclose(llama3_factors(len(factors), theta, factor, original), factors, rtol=1e-5):
                numbers = {"factor": factor, "original_max_position_embeddings": original}
                return numbers | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    raise UserError(f"{file.path} has {LLAMA3}, which does not follow the frequency scaling of Llama 3")


def frequency_tensors(config: Config, model: ModelConfig, family: Family) -> dict[str, np.ndarray]:
    """Returns the rotary frequency divisors that GGUF stores as tensors."""
    scaling = model.rope_scaling
    half = model.rotated_size // 2
    if family.arch == "gemma4":
        half = (model.global_head_size or model.head_size) // 2
        share, factor = (1.0, 1.0) if scaling is None else (scaling.share, scaling.factor)
        return {LLAMA3: np.where(np.arange(half) < int(share * 2 * half // 2), factor, MAX_NUMBER).astype(np.float32)}
    if scaling is None or scaling.kind not in ("llama3", "longrope"):
        return {}
    if scaling.kind == "llama3":
        numbers = (scaling.factor, scaling.original_context, scaling.low_freq_factor, scaling.high_freq_factor)
        return {LLAMA3: llama3_factors(half, model.rope_theta, *numbers)}
    factors = {LONG: config.attention.rope_long_factors, SHORT: config.attention.rope_short_factors}
    return {name: np.array(values or (1.0,) * half, np.float32) for name, values in factors.items()}


def gguf_metadata(model: ModelConfig, family: Family, context: int) -> dict[str, Any]:
    """Returns the metadata of a model. The keys do not have the architecture prefix yet.

    Args:
      model: the architecture.
      family: the model's family.
      context: the context length of the checkpoint, which may be longer than that of the run.
    """
    norm = "layer_norm_epsilon" if model.norm == "layernorm" else "layer_norm_rms_epsilon"
    found: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "context_length": context,
        "embedding_length": model.dim,
        "block_count": model.num_blocks,
        "feed_forward_length": model.hidden_dim,
        "attention.head_count": model.n_heads,
        "attention.head_count_kv": model.kv_heads,
        f"attention.{norm}": model.norm_epsilon,
    }
    if family.model_type != "gpt2":
        found |= {"attention.key_length": model.head_size, "attention.value_length": model.head_size}
        found |= {"rope.dimension_count": model.rotated_size, "rope.freq_base": model.rope_theta}
    if family.arch == "granite" and model.position != "rope":
        found["rope.scaling.finetuned"] = False  # with this flag, llama.cpp uses no rotary positions
    if family.arch == "mistral3":
        found["attention.temperature_scale"] = model.query_scaling_beta
        if model.rope_scaling is not None:
            found["rope.scaling.yarn_log_multiplier"] = model.rope_scaling.mscale_all_dim
    found |= _expert_metadata(model, family) | _latent_metadata(model)
    if family.arch in ("command-r", "cohere2"):
        found["logit_scale"] = 1 / model.logits_scaling
    elif "logit_scale" in family.keys:
        found |= {"logit_scale": model.logits_scaling, "residual_scale": model.residual_multiplier}
        found["embedding_scale"] = model.embedding_multiplier
        found["attention.scale"] = (model.query_pre_attn_scalar or model.head_size) ** -0.5
    found |= _window_metadata(model, family) | _rope_metadata(model, context)
    if family.arch == "gemma4":
        found |= gemma4_metadata(model)
    numbers = ("base", "base_swa", "factor", "capping", "scale", "multiplier")
    return {key: float(value) if key.endswith(numbers) else value for key, value in found.items() if value is not None}


def _expert_metadata(model: ModelConfig, family: Family) -> dict[str, Any]:
    experts = model.experts
    if experts is None:
        return {}
    groups = {"expert_group_count": experts.groups, "expert_group_used_count": experts.top_groups} if experts.groups > 1 else {}
    values = groups | {
        "expert_count": experts.count,
        "expert_used_count": experts.top_k,
        "expert_feed_forward_length": model.hidden_dim,
        "expert_shared_feed_forward_length": experts.shared_dim,
        "expert_shared_count": experts.shared_dim // model.hidden_dim,
        "expert_weights_scale": experts.scaling,
        "expert_weights_norm": experts.normalize,
        "leading_dense_block_count": len(experts.dense_layers),
        "interleave_moe_layer_step": 1,
    }
    found = {key: value for key, value in values.items() if key in family.keys}
    found["feed_forward_length"] = experts.dense_dim or model.hidden_dim
    if family.arch in WITH_SCORE_FUNCTION:
        found["expert_gating_func"] = SIGMOID if experts.score == "sigmoid" else SOFTMAX
    if family.arch == "ernie4_5-moe":
        found["expert_shared_feed_forward_length"] = experts.shared_dim
    return found


def _latent_metadata(model: ModelConfig) -> dict[str, Any]:
    """Returns the metadata that `_latent_config` reads."""
    if model.latent is None:
        return {}
    rank, rotated = model.latent.rank, model.latent.rotated_size
    found: dict[str, Any] = {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
    }
    found |= {"attention.key_length_mla": model.head_size + rotated, "attention.value_length_mla": model.latent.value_size}
    found |= {"attention.kv_lora_rank": rank, "attention.q_lora_rank": model.latent.query_rank}
    if model.rope_scaling is not None and model.rope_scaling.mscale_all_dim:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * model.rope_scaling.mscale_all_dim
    return found


def unsupported_feature(model: ModelConfig, family: Family, hf_config: Mapping[str, Any]) -> str | None:
    """Returns a setting that GGUF can store but llama.cpp does not support for this family, or None if there is none."""
    experts = model.experts
    if family.arch == "deepseek2" and experts is not None and experts.groups > 1 and experts.group_score == "max":
        return "moe.group_score: max (it uses the sum of the best two)"
    if (
        family.latent
        and model.latent is not None
        and model.latent.query_rank is None
        and model.num_blocks not in DEEPSEEK_LITE_LAYERS
    ):
        return f"attention.q_lora_rank: null with other than {DEEPSEEK_LITE_LAYERS[0]} or {DEEPSEEK_LITE_LAYERS[1]} layers"
    if model.latent is not None and model.latent.norm_epsilon != model.norm_epsilon:
        return "attention.latent_norm_epsilon: other than model.norm_epsilon"
    scaling = model.rope_scaling
    if scaling is not None and (scaling.kind == "proportional") != (family.arch == "gemma4"):
        return f"attention.rope_scaling: {scaling.kind}"
    if family.arch == "gemma4" and model.kv_shared_layers:
        first = model.num_blocks - model.kv_shared_layers
        sources = {model.kv_source(i): first - (1 if model.windows[i] is None else 2) for i in range(first, model.num_blocks)}
        if any(source != expected for source, expected in sources.items()) or first < 2:
            return "attention.kv_shared_layers, unless the two layers before them are sliding and full"
    yarn = family.latent and scaling is not None and scaling.kind == "yarn"
    if yarn and scaling is not None and (not scaling.mscale or scaling.mscale != scaling.mscale_all_dim):
        return "attention.rope_mscale: other than attention.rope_mscale_all_dim"
    if family.latent and hf_config.get("rope_interleave") is False:
        return "rope_interleave: false"
    if family.arch == "mistral3" and model.query_scaling_beta is not None and (scaling is None or scaling.kind != "yarn"):
        return "attention.query_scaling_beta without attention.rope_scaling: yarn"
    if family.arch == "mistral3" and scaling is not None and scaling.mscale not in (None, 1.0):
        return "attention.rope_mscale: other than 1"
    if family.arch in ("dots1", "olmoe") and model.kv_heads != model.n_heads:
        return "model.kv_heads: fewer than model.n_heads"
    if family.arch == "command-r" and model.num_blocks >= LARGE_MODEL_LAYERS:
        return f"model.num_blocks: {LARGE_MODEL_LAYERS} or more without qk_norm"
    if family.arch == "exaone4" and model.num_blocks == LARGE_MODEL_LAYERS:
        return f"model.num_blocks: {LARGE_MODEL_LAYERS} without a window"
    if family.model_type in ("cohere2", "olmo3") and model.windows.count(None) == model.num_blocks:
        return "attention.sliding_window: false"
    if family.arch in HEADS_SPAN_WIDTH and model.n_heads * model.head_size != model.dim:
        return "model.head_size: other than model.dim / model.n_heads"
    return None


def _window_metadata(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the metadata that `_window_config` reads."""
    if not family.full_every:
        return {}
    found: dict[str, Any] = {
        "attention.sliding_window": next((window for window in model.windows if window is not None), None),
        "attention.sliding_window_pattern": [window is not None for window in model.windows],
        "attn_logit_softcapping": model.softcap,
        "final_logit_softcapping": model.final_softcap,
    }
    if family.model_type == "gemma3_text":
        found["rope.freq_base_swa"] = model.rope_local_theta or model.rope_theta
    return found


def _rope_metadata(model: ModelConfig, context: int) -> dict[str, Any]:
    """Returns the metadata of RoPE scaling types that are not stored as tensors."""
    scaling = model.rope_scaling
    if scaling is None or scaling.kind in ("llama3", "proportional"):
        return {}
    original = {"rope.scaling.original_context_length": scaling.original_context}
    if scaling.kind == "longrope":
        longest = max(context, round(scaling.factor * scaling.original_context))
        factor = scaling.attention_factor or _longrope_attention_factor(longest, scaling.original_context)
        return original | {"context_length": longest, "rope.scaling.attn_factor": factor}
    found = {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}
    if scaling.kind == "linear":
        return found
    betas = {"rope.scaling.yarn_beta_fast": scaling.beta_fast, "rope.scaling.yarn_beta_slow": scaling.beta_slow}
    return found | original | betas
