"""Conversion between the GGUF metadata of each model family and the keys of Hugging Face's
`config.json`.

The properties of each architecture are taken from llama.cpp (`conversion/` and `src/models/`).
"""

from collections.abc import Mapping
from typing import Any

from dantinox.config import ModelConfig, UserError
from dantinox.files import quote
from dantinox.interop.gguf.gguf_families import FAMILIES, Family
from dantinox.interop.gguf.gguf_file import GGUFFile
from dantinox.interop.gguf.gguf_gemma4 import gemma4_config, gemma4_metadata
from dantinox.interop.gguf.gguf_keys import SIZES, Metadata, key_type
from dantinox.interop.gguf.gguf_rope import rope_config, rope_metadata

GPT2_SIZES = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
# The architectures whose files name the router's score function.
WITH_SCORE_FUNCTION = ("deepseek2", "dots1", "glm4moe")
SOFTMAX, SIGMOID = 1, 2  # score functions in llama.cpp's `llama_expert_gating_func_type`
# Architectures in which n_heads × head_size must equal the model dimension.
HEADS_SPAN_WIDTH = (
    "qwen2moe", "olmoe", "starcoder2", "command-r", "cohere2", "exaone4", "stablelm", "olmo",
    "chatglm", "phi2", "bitnet",
)  # fmt: skip
# Architectures for which transformers has no key `head_dim`.
WITHOUT_HEAD_DIM = ("olmo", "olmo2", "olmoe", "stablelm", "cohere2", "phi2", "bitnet")
# Families whose `config.json` must say that there is no sliding window, with one key or the other.
WITHOUT_WINDOW = ("mistral", "mixtral", "phi3", "ministral3")
WITH_UNUSED_WINDOW = ("qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "smollm3")
# With this number of layers, llama.cpp divides scores by the root of width / heads, else by the
# root of the head size.
WIDE_QUERY_SCALE_LAYERS = {"gemma2": 46, "gemma3": 62}
SOFT_CAPS = {"gemma2": ("attn", "final"), "gemma3": ("final",), "gemma4": ("final",)}
# Layer counts and vocabulary size for which llama.cpp assumes sigmoid scores in a deepseek2.
GLM_FLASH_LAYERS = (47, 48)
GLM_FLASH_VOCABULARY = 154880
# If a command-r has at least this many layers, llama.cpp assumes that it normalizes queries and
# keys.
LARGE_MODEL_LAYERS = 64
# The numbers of layers for which llama.cpp reads a deepseek2 without a query latent
# (`q_lora_rank`).
DEEPSEEK_LITE_LAYERS = (26, 27)
OLMO_EPSILON = 1e-5  # transformers has this value as a constant


def gguf_to_hf_config(file: GGUFFile) -> tuple[Family, dict[str, Any]]:
    """Returns the family of a file's model, and its `config.json` without `vocab_size` and
    `tie_word_embeddings`.

    Raises:
      UserError: the architecture is not supported, or a metadata key is missing or not supported.
    """
    meta = Metadata(file)
    family = _find_family(meta, file)
    config: dict[str, Any] = {"model_type": family.model_type, **family.fixed}
    if family.model_type == "gpt2":
        config |= _gpt2_config(meta, file)
    elif family.arch == "gemma4":
        config |= gemma4_config(meta, file, _window_config(meta, family, meta("block_count")))
    else:
        config |= _common_config(meta, file, family)
        if not meta("attention.causal", True, bool):
            raise UserError(
                f"{file.path} contains a model without causal attention, which is not supported"
            )
    meta.check_all_used()
    return family, config


def _gpt2_config(meta: Metadata, file: GGUFFile) -> dict[str, Any]:
    """Returns the keys of GPT-2, which has other names for sizes than all other families."""
    config = {hf_key: meta(key, kind=key_type(key)) for key, hf_key in GPT2_SIZES.items()}
    if meta("attention.head_count_kv", config["n_head"]) != config["n_head"]:
        raise UserError(f"{file.path} has fewer key heads than heads, which GPT-2 does not support")
    _check_head_lengths(meta, config["n_embd"] // config["n_head"])
    return config


def _common_config(meta: Metadata, file: GGUFFile, family: Family) -> dict[str, Any]:
    """Returns the keys of a family other than GPT-2 and Gemma 4, without the fixed ones."""
    config = _sizes(meta, file, family)
    heads = config["num_attention_heads"]
    config |= {
        hf_key: meta(key, default, kind) for key, (hf_key, kind, default) in family.keys.items()
    }
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
        shared_width = config["moe_num_shared_experts"] * config["moe_intermediate_size"]
        found = meta("expert_shared_feed_forward_length", shared_width)
        if found != shared_width:
            expected = f"{shared_width} (number of shared experts × their width)"
            raise UserError(
                f"{file.path} has expert_shared_feed_forward_length {found}, expected {expected}"
            )
    config |= _bias_config(file, family)
    config |= _window_config(meta, family, config["num_hidden_layers"])
    config |= rope_config(meta, family, file, dict(family.fixed) | config)
    if family.arch in WIDE_QUERY_SCALE_LAYERS:
        wide = WIDE_QUERY_SCALE_LAYERS[family.arch] == config["num_hidden_layers"]
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if wide else head_size
    if family.arch in WITHOUT_HEAD_DIM:
        del config["head_dim"]
    if family.arch == "olmo" and (epsilon := config.pop("layer_norm_eps")) != OLMO_EPSILON:
        raise UserError(
            f"{file.path} has olmo.attention.layer_norm_epsilon: {epsilon}; only {OLMO_EPSILON}"
            " is supported"
        )
    if family.model_type == "granitemoehybrid":
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    return config


def _sizes(meta: Metadata, file: GGUFFile, family: Family) -> dict[str, Any]:
    """Returns the sizes of a model, without multi-token prediction layers."""
    heads = meta("attention.head_count")
    defaults = {"attention.head_count_kv": heads}
    if "expert_feed_forward_length" in family.keys:
        defaults["feed_forward_length"] = 1  # without dense layers, a file may lack their width
    sizes: dict[str, str] = dict(SIZES)
    if family.epsilon_key != "rms_norm_eps":
        del sizes["attention.layer_norm_rms_epsilon"]
        sizes["attention.layer_norm_epsilon"] = family.epsilon_key
    config = {hf_key: meta(key, defaults.get(key), key_type(key)) for key, hf_key in sizes.items()}
    if config["hidden_size"] % heads and not meta.has("attention.key_length"):
        raise UserError(
            f"{file.path} must have {family.arch}.attention.key_length: {heads}"
            " heads do not divide the width"
        )
    layers = config["num_hidden_layers"]
    mtp_layers = count_mtp_layers(meta)
    if mtp_layers >= layers:
        raise UserError(
            f"{file.path} has {layers} layers, of which {mtp_layers}"
            " are multi-token prediction layers"
        )
    config["num_hidden_layers"] = layers - mtp_layers
    return config


def _find_family(meta: Metadata, file: GGUFFile) -> Family:
    """Returns the family of a file. If several families share the architecture, the metadata
    decide.
    """
    known = {family.model_type: family for family in FAMILIES if family.arch == meta.arch}
    if not known:
        names = ", ".join(dict.fromkeys(family.arch for family in FAMILIES))
        raise UserError(
            f"{file.path} has a model of the architecture {quote(meta.arch)}, expected one of"
            f" {names}"
        )
    meta.check_sizes(file.tensors)
    family = next(iter(known.values()))
    # The keys below tell apart families that share an architecture.
    if meta.arch == "llama" and meta("expert_count", 0):
        family = known["mixtral"]
    if meta.arch == "olmo2" and meta.has("attention.sliding_window"):
        family = known["olmo3"]
    if meta.arch == "mistral3" and not meta.has("attention.temperature_scale"):
        family = family._replace(model_type="mistral")
    if meta.arch == "granitemoe" and meta.has("expert_shared_feed_forward_length"):
        family = known["granitemoeshared"]
    # In these architectures, `rope.scaling.finetuned: false` means that the model has no rotary
    # positions.
    if meta.arch in ("granite", "granitemoe") and not meta("rope.scaling.finetuned", True, bool):
        if meta.arch == "granitemoe":
            raise UserError(
                f"{file.path} has granitemoe.rope.scaling.finetuned: false, which is not supported"
            )
        family = known["granitemoehybrid"]
    if meta.arch in WITH_SCORE_FUNCTION:
        score = _score_function(meta, file)
        if meta.arch == "deepseek2" and score == SIGMOID:
            family = known["deepseek_v3"]
    return family


def _score_function(meta: Metadata, file: GGUFFile) -> int:
    """Returns the score function of a router, `SOFTMAX` or `SIGMOID`."""
    layers = meta("block_count") - count_mtp_layers(meta)
    tokens = meta.entries.get("tokenizer.ggml.tokens")
    vocab_size = meta("vocab_size", len(tokens) if isinstance(tokens, list) else 0)
    flash = layers in GLM_FLASH_LAYERS and vocab_size == GLM_FLASH_VOCABULARY
    allowed = (SOFTMAX, SIGMOID) if meta.arch == "deepseek2" else (SIGMOID,)
    score: int = meta(
        "expert_gating_func", SOFTMAX if meta.arch == "deepseek2" and not flash else SIGMOID
    )
    if score not in allowed:
        raise UserError(
            f"{file.path} has {meta.arch}.expert_gating_func: {score}, which is not supported"
        )
    return score


def select_family(hf_config: Mapping[str, Any]) -> Family:
    """Returns the entry of `FAMILIES` for the export of a model with this `config.json`.

    Raises:
      UserError: the family cannot be exported.
    """
    # The `model_type` of this family is that of Llama.
    name = (
        "bitnet_b1_58"
        if hf_config.get("architectures") == ["BitnetForCausalLM"]
        else hf_config["model_type"]
    )
    rows = [family for family in FAMILIES if family.model_type == name]
    if not rows:
        raise UserError(f"the family {name} cannot be exported to GGUF")
    # Granite 4 is one family in transformers and two architectures in llama.cpp, with and without
    # experts.
    return (
        rows[-1]
        if hf_config["model_type"] == "granitemoehybrid" and hf_config.get("num_local_experts")
        else rows[0]
    )


def count_mtp_layers(meta: Metadata) -> int:
    """Returns the number of multi-token prediction layers, which are the last layers of a file and
    are not imported.
    """
    return meta("nextn_predict_layers", 0) if meta.arch in WITH_SCORE_FUNCTION else 0


def _check_head_lengths(meta: Metadata, head_size: int) -> None:
    """Raises a `UserError` if the keys or values of a head have another size."""
    lengths = {meta(f"attention.{part}_length", head_size) for part in ("key", "value")}
    if lengths != {head_size}:
        raise UserError(
            f"{meta.name} has keys and values of different lengths, which is not supported"
        )


def _latent_config(meta: Metadata, heads: int, key_heads: int) -> dict[str, Any]:
    """Returns the sizes of latent attention. In llama.cpp, its cache is one key head of size latent
    rank + rotary size.
    """
    if key_heads != 1:
        raise UserError(
            f"{meta.name} must have {meta.arch}.attention.head_count_kv: 1, got {key_heads}"
        )
    rank = meta("attention.kv_lora_rank")
    rotated = meta("rope.dimension_count")
    # The lengths of the cache, and those of the heads.
    lengths = meta("attention.key_length", rank + rotated), meta("attention.value_length", rank)
    key = meta("attention.key_length_mla")
    value = meta("attention.value_length_mla")
    if lengths != (rank + rotated, rank) or key <= rotated:
        raise UserError(
            f"{meta.name} has key and value lengths {lengths} and a key length of {key}, which do"
            f" not fit its latent of {rank} and {rotated} rotated elements"
        )
    return {
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "q_lora_rank": meta("attention.q_lora_rank") if meta.has("attention.q_lora_rank") else None,
        "num_key_value_heads": heads,
        "head_dim": rotated,
    }


def _bias_config(file: GGUFFile, family: Family) -> dict[str, Any]:
    """Returns the keys about optional biases and norms, which a model has if the file has their
    tensors.
    """
    has_bias = "blk.0.attn_q.bias" in file.tensors
    if family.arch == "glm4moe":
        return {
            "attention_bias": has_bias,
            "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        }
    if family.arch == "stablelm":
        parallel = "blk.0.ffn_norm.weight" not in file.tensors
        return {"use_qkv_bias": has_bias, "use_parallel_residual": parallel}
    if family.model_type in ("seed_oss", "glm4", "glm", "granitemoehybrid"):
        return {"attention_bias": has_bias}
    if family.model_type in ("llama", "smollm3", "granite"):
        return {"attention_bias": has_bias, "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}
    return {}


def _window_config(meta: Metadata, family: Family, layers: int) -> dict[str, Any]:
    """Returns the keys of sliding windows and of logit soft-capping."""
    if not family.full_every:
        return _no_window_config(meta, family, layers)
    meta.used.add("attention.sliding_window_pattern")
    pattern = meta.entries.get(f"{meta.arch}.attention.sliding_window_pattern", family.full_every)
    window = meta("attention.sliding_window", 4096 if family.arch == "gemma2" else 0)
    if not isinstance(pattern, (int, list)) or (
        isinstance(pattern, list) and len(pattern) != layers
    ):
        raise UserError(
            f"{meta.name} must have an attention.sliding_window_pattern with one entry per layer,"
            f" got {quote(pattern)}"
        )
    if isinstance(pattern, int):
        pattern = (
            [(layer + 1) % pattern != 0 for layer in range(layers)] if pattern else [True] * layers
        )
    kinds = ["sliding_attention" if slides and window else "full_attention" for slides in pattern]
    found: dict[str, Any] = {"sliding_window": window or 4096, "layer_types": kinds}
    for scores in SOFT_CAPS.get(family.arch, ()):
        key = f"{scores}_logit_softcapping"
        found[key] = meta(key, kind=float) if meta.has(key) else None
    return found


def _no_window_config(meta: Metadata, family: Family, layers: int) -> dict[str, Any]:
    """Returns the keys with which transformers uses no sliding windows."""
    if family.arch == "phi3":
        meta.used.add("attention.sliding_window")  # llama.cpp reads it, but does not use it
    if family.arch == "exaone4":
        # For this number of layers, llama.cpp assumes sliding windows.
        if layers == LARGE_MODEL_LAYERS:
            raise UserError(
                f"{meta.name} has an exaone4 of {layers} layers, whose"
                " sliding windows are not supported"
            )
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    if family.model_type in WITHOUT_WINDOW:
        return {"sliding_window": None}
    if family.model_type in WITH_UNUSED_WINDOW:
        return {"use_sliding_window": False}
    return {}


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
        found |= {
            "attention.key_length": model.head_size,
            "attention.value_length": model.head_size,
            "rope.dimension_count": model.rotated_size,
            "rope.freq_base": model.rope_theta,
        }
    if family.arch == "granite" and model.position != "rope":
        # With this flag, llama.cpp uses no rotary positions.
        found["rope.scaling.finetuned"] = False
    if family.arch == "mistral3":
        found["attention.temperature_scale"] = model.query_scaling_beta
        if model.rope_scaling is not None:
            found["rope.scaling.yarn_log_multiplier"] = model.rope_scaling.mscale_all_dim
    found |= _expert_metadata(model, family) | _latent_metadata(model)
    # These architectures multiply the logits, where Granite divides them.
    if family.arch in ("command-r", "cohere2"):
        found["logit_scale"] = 1 / model.logits_scaling
    elif "logit_scale" in family.keys:
        found |= {
            "logit_scale": model.logits_scaling,
            "residual_scale": model.residual_multiplier,
            "embedding_scale": model.embedding_multiplier,
            "attention.scale": (model.query_pre_attn_scalar or model.head_size) ** -0.5,
        }
    found |= _window_metadata(model, family) | rope_metadata(model, context)
    if family.arch == "gemma4":
        found |= gemma4_metadata(model)
    # GGUF distinguishes integers from floats.
    floats = ("base", "base_swa", "factor", "capping", "scale", "multiplier")
    return {
        key: float(value) if key.endswith(floats) else value
        for key, value in found.items()
        if value is not None
    }


def _expert_metadata(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the metadata of experts that a file of this family has."""
    experts = model.experts
    if experts is None:
        return {}
    values: dict[str, Any] = {}
    if experts.groups > 1:
        values |= {
            "expert_group_count": experts.groups,
            "expert_group_used_count": experts.top_groups,
        }
    values |= {
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
    rank = model.latent.rank
    rotated = model.latent.rotated_size
    found: dict[str, Any] = {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": model.head_size + rotated,
        "attention.value_length_mla": model.latent.value_size,
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": model.latent.query_rank,
    }
    if model.rope_scaling is not None and model.rope_scaling.mscale_all_dim:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * model.rope_scaling.mscale_all_dim
    return found


def unsupported_feature(
    model: ModelConfig, family: Family, hf_config: Mapping[str, Any]
) -> str | None:
    """Returns a setting that GGUF can store but llama.cpp does not support for this family, or None
    if there is none.
    """
    experts = model.experts
    latent = model.latent
    scaling = model.rope_scaling
    if (
        family.arch == "deepseek2"
        and experts is not None
        and experts.groups > 1
        and experts.group_score == "max"
    ):
        return "moe.group_score: max (it uses the sum of the best two)"
    if (
        latent is not None
        and latent.query_rank is None
        and model.num_blocks not in DEEPSEEK_LITE_LAYERS
    ):
        few, many = DEEPSEEK_LITE_LAYERS
        return f"attention.q_lora_rank: null with other than {few} or {many} layers"
    if latent is not None and latent.norm_epsilon != model.norm_epsilon:
        return "attention.latent_norm_epsilon: other than model.norm_epsilon"
    if scaling is not None and (scaling.kind == "proportional") != (family.arch == "gemma4"):
        return f"attention.rope_scaling: {scaling.kind}"
    if family.arch == "gemma4" and model.kv_shared_layers and not _share_last_caches(model):
        return "attention.kv_shared_layers, unless the two layers before them are sliding and full"
    yarn = scaling if scaling is not None and scaling.kind == "yarn" else None
    if (
        family.latent
        and yarn is not None
        and (not yarn.mscale or yarn.mscale != yarn.mscale_all_dim)
    ):
        return "attention.rope_mscale: other than attention.rope_mscale_all_dim"
    if family.latent and hf_config.get("rope_interleave") is False:
        return "rope_interleave: false"
    if family.arch == "mistral3" and model.query_scaling_beta is not None and yarn is None:
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


def _share_last_caches(model: ModelConfig) -> bool:
    """Returns whether the layers without keys read the caches of the two layers before them, a
    sliding and a full one.
    """
    first = model.num_blocks - model.kv_shared_layers  # the first layer without keys
    if first < 2:
        return False
    for layer in range(first, model.num_blocks):
        expected = first - 1 if model.windows[layer] is None else first - 2
        if model.kv_source(layer) != expected:
            return False
    return True


def _window_metadata(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the metadata that `_window_config` reads."""
    if not family.full_every:
        return {}
    found: dict[str, Any] = {
        "attention.sliding_window": next(
            (window for window in model.windows if window is not None), None
        ),
        "attention.sliding_window_pattern": [window is not None for window in model.windows],
        "attn_logit_softcapping": model.softcap,
        "final_logit_softcapping": model.final_softcap,
    }
    if family.model_type == "gemma3_text":
        found["rope.freq_base_swa"] = model.rope_local_theta or model.rope_theta
    return found
