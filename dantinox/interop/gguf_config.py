"""GGUF metadata of each model family, mapped to the keys of Hugging Face's `config.json` and back.

The facts of an architecture are those of llama.cpp, `conversion/` and `src/models/`.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dantinox.config import Config, ModelConfig, UserError
from dantinox.files import escape_name, quote
from dantinox.interop.gguf_families import FAMILIES, LATENT, Family
from dantinox.interop.gguf_file import GGUFFile, Stored, read_tensor

# Metadata, without the name of the architecture before it → `config.json`.
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
GPT2_SIZES = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
# Those that are an axis of a tensor, or a part of one.
AXES = (
    *("embedding_length", "feed_forward_length", "expert_feed_forward_length", "expert_count", "expert_used_count"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "rope.dimension_count"),
)
# Metadata that changes no number here.
IDLE = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "expert_weights_norm"}
# Granite 4 is written with the sizes of Mamba layers and experts where it has none.
SSM = {f"ssm.{size}" for size in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")}
IDLE_OF = {
    "granite": SSM | {"expert_count", "expert_used_count", "expert_shared_feed_forward_length"},
    "granitemoe": SSM,
}
SCORED = ("deepseek2", "dots1", "glm4moe")  # architectures whose files say what the scores of experts are
SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers of the scores of experts, `llama_expert_gating_func_type`
PARTLY_ROTATED = ("glm4moe", "glm4", "stablelm", "chatglm", "phi2")
WHOLE_WIDTH = (
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
)  # whose heads together are as wide as the model
GLM_FLASH = (47, 48), 154880  # layers and vocabulary of a deepseek2 whose scores are sigmoids where it does not say so
MANY = 64  # layers from which llama.cpp takes it that a command-r normalises queries and keys
LITE = (26, 27)  # layers of a deepseek2 that llama.cpp reads without a latent of queries
OLMO_EPSILON = 1e-5  # which transformers has no key for
LARGEST = 1e30
LONG, SHORT, LLAMA3 = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"


class Metadata:
    """The metadata of a file's architecture, which remembers what was asked for."""

    def __init__(self, file: GGUFFile) -> None:
        self.name, self.all = str(file.path), file.metadata
        self.arch = self.all.get("general.architecture")
        self.asked: set[str] = set()

    def __call__(self, key: str, default: Any = None, kind: type[Any] = int) -> Any:
        """A positive number, text or truth, of one layer for all; `default` where it is not given, or an error without one."""
        self.asked.add(key)
        value: Any = self.all.get(f"{self.arch}.{key}")
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        absent = value is None or (kind is not bool and value == 0)  # llama.cpp takes a zero for nothing, too
        if absent and default is not None:
            return default
        if type(value) is not kind or (kind in (int, float) and not 0 < value < LARGEST):
            given = "nothing" if value is None else quote(value)
            raise UserError(f"{self.name} must give {self.arch}.{key} as a {WORDS[kind]}, and gives {given}")
        # A float32 of the file is meant as the shortest number that rounds to it.
        return float(str(np.float32(value))) if kind is float else value

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.all

    def check_sizes(self, tensors: Mapping[str, Stored]) -> None:
        """Raises where a size is larger than the tensors, so that nothing is made as large as it says."""
        largest = max((max(stored.shape) for stored in tensors.values()), default=0)
        for key, most in ({"block_count": len(tensors)} | dict.fromkeys(AXES, largest)).items():
            values = self.all.get(f"{self.arch}.{key}")
            for value in values if isinstance(values, list) else [values]:
                if isinstance(value, int) and value > most:
                    raise UserError(f"{self.name} says {self.arch}.{key}: {quote(value)}, more than its tensors have")

    def refuse_rest(self) -> None:
        """Raises on the first entry of the architecture that nobody asked for."""
        for key, value in self.all.items():
            arch, _, rest = key.partition(".")
            if arch == self.arch and rest not in self.asked | IDLE | IDLE_OF.get(arch, set()):
                raise UserError(f"{self.name} says {escape_name(key)} of the model, which is not known here: {quote(value)}")


WORDS = {int: "positive integer", float: "positive number", str: "word", bool: "truth value"}


def gguf_to_hf_config(file: GGUFFile) -> tuple[Family, dict[str, Any]]:
    """The family of a file's model, and its `config.json` but for the size of the vocabulary and whether the head is tied.

    Raises:
      UserError: the architecture is not known, or the metadata lacks something, or says more than is known here.
    """
    meta = Metadata(file)
    family = _family_of(meta, file)
    config: dict[str, Any] = {"model_type": family.model_type, **family.fixed}
    if family.model_type == "gpt2":
        config |= {theirs: meta(key, kind=_kind_of(key)) for key, theirs in GPT2_SIZES.items()}
        if meta("attention.head_count_kv", config["n_head"]) != config["n_head"]:
            raise UserError(f"{file.path} gives GPT-2 fewer key heads than heads, which it cannot have")
        _same_length(meta, config["n_embd"] // config["n_head"])
        meta.refuse_rest()
        return family, config
    if family.arch == "gemma4":
        config |= _gemma4(meta, family, file)
        meta.refuse_rest()
        return family, config
    heads = meta("attention.head_count")
    width = "expert_feed_forward_length" in family.keys
    defaults = {"attention.head_count_kv": heads, "feed_forward_length": 1 if width else None}
    sizes = SIZES
    if family.epsilon != "rms_norm_eps":
        sizes = {key: theirs for key, theirs in SIZES.items() if theirs != "rms_norm_eps"}
        sizes |= {"attention.layer_norm_epsilon": family.epsilon}
    config |= {theirs: meta(key, defaults.get(key), _kind_of(key)) for key, theirs in sizes.items()}
    if config["hidden_size"] % heads and not meta.has("attention.key_length"):
        raise UserError(f"{file.path} must give {family.arch}.attention.key_length: {heads} heads do not divide the width")
    layers, predicting = config["num_hidden_layers"], predicting_layers(meta)
    if predicting >= layers:
        raise UserError(f"{file.path} has {layers} layers and says that {predicting} predict further tokens")
    config["num_hidden_layers"] = layers - predicting
    config |= {theirs: meta(key, default, kind) for key, (theirs, kind, default) in family.keys.items()}
    if family.names is LATENT:
        config |= _latent(meta, heads, config["num_key_value_heads"])
        head_size = config["head_dim"]
    else:
        head_size = meta("attention.key_length", max(config["hidden_size"] // heads, 1))
        _same_length(meta, head_size)
        config["head_dim"] = head_size
    if family.model_type == "deepseek_v2":
        config["topk_method"] = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
    if family.arch == "ernie4_5-moe":
        shared = config["moe_num_shared_experts"] * config["moe_intermediate_size"]
        if meta("expert_shared_feed_forward_length", shared) != shared:
            raise UserError(f"{file.path} gives the shared experts another width than that of so many experts")
    config |= _biases(file, family)
    config |= _windows(meta, family, config["num_hidden_layers"])
    config |= _rotary(meta, family, file, config)
    if family.arch in ("gemma2", "gemma3"):
        wide = {"gemma2": 46, "gemma3": 62}[family.arch] == config["num_hidden_layers"]
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if wide else head_size
    if family.arch in ("olmo", "olmo2", "olmoe", "stablelm", "cohere2", "phi2"):  # transformers has no key for it
        del config["head_dim"]
    if family.arch == "olmo" and (epsilon := config.pop("layer_norm_eps")) != OLMO_EPSILON:
        raise UserError(f"{file.path} says olmo.attention.layer_norm_epsilon: {epsilon}, where OLMo has {OLMO_EPSILON}")
    if family.model_type == "granitemoehybrid":
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    if not meta("attention.causal", True, bool):
        raise UserError(f"{file.path} holds a model that is not causal, which is not known here")
    meta.refuse_rest()
    return family, config


def _family_of(meta: Metadata, file: GGUFFile) -> Family:
    """The family of a file's architecture, or of several with this architecture the one that its metadata describe."""
    known = {family.model_type: family for family in FAMILIES if family.arch == meta.arch}
    if not known:
        names = ", ".join(dict.fromkeys(family.arch for family in FAMILIES))
        raise UserError(f"{file.path} holds a model of the architecture {quote(meta.arch)}; those known are {names}")
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
    if meta.arch in ("granite", "granitemoe") and not meta("rope.scaling.finetuned", True, bool):  # no rotation
        if meta.arch == "granitemoe":
            raise UserError(f"{file.path} says granitemoe.rope.scaling.finetuned: false, which is not known here")
        family = known["granitemoehybrid"]
    if meta.arch in SCORED:
        layers, symbols = meta("block_count") - predicting_layers(meta), meta.all.get("tokenizer.ggml.tokens")
        rows = meta("vocab_size", len(symbols) if isinstance(symbols, list) else 0)
        flash = layers in GLM_FLASH[0] and rows == GLM_FLASH[1]
        scores = meta("expert_gating_func", SOFTMAX if meta.arch == "deepseek2" and not flash else SIGMOID)
        if scores not in (SOFTMAX, SIGMOID) or (meta.arch != "deepseek2" and scores != SIGMOID):
            raise UserError(f"{file.path} says {meta.arch}.expert_gating_func: {scores}, which is not known here")
        if meta.arch == "deepseek2" and scores == SIGMOID:
            family = known["deepseek_v3"]
    return family


def select_family(hf_config: Mapping[str, Any]) -> Family:
    """The row of `FAMILIES` that a model of this `config.json` is written as.

    Raises:
      UserError: there is none for its `model_type`.
    """
    rows = [family for family in FAMILIES if family.model_type == hf_config["model_type"]]
    if not rows:
        raise UserError(f"GGUF has no name here for models of the family {hf_config['model_type']}")
    # Granite 4 is one family in transformers and two architectures in llama.cpp, with experts and without.
    return rows[-1] if hf_config["model_type"] == "granitemoehybrid" and hf_config.get("num_local_experts") else rows[0]


def _gemma4(meta: Metadata, family: Family, file: GGUFFile) -> dict[str, Any]:
    """The keys of a Gemma 4, whose sizes differ between sliding and full layers."""
    varied = ("feed_forward_length", "attention.head_count_kv")
    found = {theirs: meta(key, kind=_kind_of(key)) for key, theirs in SIZES.items() if key not in varied}
    layers, name = found["num_hidden_layers"], "attention.shared_kv_layers"
    shared = meta(name, 0)
    found |= _windows(meta, family, layers)
    full = [i for i, kind in enumerate(found["layer_types"]) if kind == "full_attention"]
    sliding = [i for i in range(layers) if i not in full] or full
    if layers - 1 not in full or shared >= layers:
        raise UserError(f"{meta.name} must have a full layer at its end and one with keys of its own, which is not so")
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{meta.name} has no embeddings: token_embd.weight is missing")
    rows = file.tensors["token_embd.weight"].shape[0]
    own, widths, heads = range(layers - shared), *(_by_layer(meta, key, layers) for key in varied)
    wider = [i for i in range(layers) if widths[i] != widths[0]]
    if {heads[i] for i in sliding} != {heads[sliding[0]]} or {heads[i] for i in full} != {heads[full[0]]}:
        raise UserError(f"{meta.name} gives layers of one kind different numbers of key heads, which is not known here")
    if wider and (wider != [*range(layers - shared, layers)] or {widths[i] for i in wider} != {2 * widths[0]}):
        raise UserError(f"{meta.name} gives layers feed-forward widths {quote(widths)}, which are not known here")
    sizes = {kind: {meta(f"attention.{part}_length{kind}") for part in ("key", "value")} for kind in ("", "_swa")}
    size, local = sizes[""].pop(), sizes["_swa"].pop()
    rotated = meta("rope.dimension_count", size), meta("rope.dimension_count_swa", local)
    if sizes[""] or sizes["_swa"] or rotated != (size, local):
        raise UserError(f"{meta.name} gives keys, values and rotations of one kind of layer different sizes")
    valued = {i: f"blk.{i}.attn_v.weight" in file.tensors for i in full if i in own}
    if len(set(valued.values())) > 1:
        raise UserError(f"{meta.name} has values of their own in some full layers and not in others, which is not known here")
    theta = meta("rope.freq_base", 10000.0, float)
    local_theta = meta("rope.freq_base_swa", theta, float)
    if not meta("attention.causal", True, bool):
        raise UserError(f"{file.path} holds a model that is not causal, which is not known here")
    return (
        found
        | _gemma4_experts(meta, widths[0])
        | {
            "head_dim": local,
            "num_key_value_heads": heads[sliding[0]],
            "per_layer_config": {str(i): {"head_dim": size, "num_key_value_heads": heads[i]} for i in full},
            "attention_k_eq_v": not all(valued.values()),
            "num_kv_shared_layers": shared,
            "use_double_wide_mlp": bool(wider),
            "hidden_size_per_layer_input": meta("embedding_length_per_layer_input", 0),
            "vocab_size_per_layer_input": rows,
            "rope_parameters": {
                "full_attention": {"rope_theta": theta, **_proportional(file, size)},
                "sliding_attention": {"rope_theta": local_theta, "rope_type": "default"},
            },
        }
    )


def _gemma4_experts(meta: Metadata, width: int) -> dict[str, Any]:
    count = meta("expert_count", 0)
    if not count:
        return {"intermediate_size": width}
    sizes = {"num_experts": count, "top_k_experts": meta("expert_used_count")}
    sizes["moe_intermediate_size"] = meta("expert_feed_forward_length")
    return {"intermediate_size": width, "enable_moe_block": True, **sizes}


def _by_layer(meta: Metadata, key: str, layers: int) -> list[int]:
    """A positive number of each layer, from a list or from one number for all."""
    meta.asked.add(key)
    value = meta.all.get(f"{meta.arch}.{key}")
    values: list[Any] = value if isinstance(value, list) else [value] * layers
    if len(values) != layers or not all(type(number) is int and number > 0 for number in values):
        raise UserError(f"{meta.name} must give {meta.arch}.{key} for each of its {layers} layers, and gives {quote(value)}")
    return values


def _proportional(file: GGUFFile, size: int) -> dict[str, Any]:
    """The scaling of rotary frequencies of full layers: what each is divided by, a huge number where it does not rotate."""
    if LLAMA3 not in file.tensors:
        raise UserError(f"{file.path} lacks {LLAMA3}")
    factors = read_tensor(file, LLAMA3)
    count = int(np.sum(factors < LARGEST / 2))
    factor, expected = float(str(factors[0])), np.where(np.arange(size // 2) < count, factors[0], factors[-1])
    if factors.shape != (size // 2,) or not count or factor < 1 or not np.array_equal(factors, expected):
        raise UserError(f"{file.path} scales rotary frequencies by {LLAMA3} in a way that is not Gemma 4's")
    if count == size // 2 and factor == 1:
        return {"rope_type": "default"}
    return {"rope_type": "proportional", "partial_rotary_factor": 2 * count / size, "factor": factor}


def _gemma4_said(model: ModelConfig) -> dict[str, Any]:
    """The opposite of `_gemma4`."""
    size, layers = model.global_head_size or model.head_size, [model.of_layer(i) for i in range(model.num_blocks)]
    experts = model.experts
    found: dict[str, Any] = {
        "feed_forward_length": [own.experts.shared_dim if own.experts else own.hidden_dim for own in layers],
        "attention.head_count_kv": [own.kv_heads for own in layers],
        "attention.shared_kv_layers": model.kv_shared_layers,
        "embedding_length_per_layer_input": model.per_layer_dim,
        "attention.sliding_window": next((window for window in model.windows if window is not None), 512),
        "rope.dimension_count": size,
        "rope.dimension_count_swa": model.head_size,
        "rope.freq_base_swa": model.rope_local_theta or model.rope_theta,
    }
    found |= {f"attention.{part}_length": size for part in ("key", "value")}
    found |= {f"attention.{part}_length_swa": model.head_size for part in ("key", "value")}
    if experts is not None:
        found |= {"expert_count": experts.count, "expert_used_count": experts.top_k}
        found["expert_feed_forward_length"] = model.hidden_dim
    return found


def predicting_layers(meta: Metadata) -> int:
    """How many of the last layers of a file predict further tokens; they are left out."""
    return meta("nextn_predict_layers", 0) if meta.arch in SCORED else 0


def _kind_of(key: str) -> type:
    return float if key.endswith("epsilon") else int


def _same_length(meta: Metadata, head_size: int) -> None:
    lengths = {meta(f"attention.{part}_length", head_size) for part in ("key", "value")}
    if lengths != {head_size}:
        raise UserError(f"{meta.name} gives keys and values different lengths, which is not known here")


def _latent(meta: Metadata, heads: int, key_heads: int) -> dict[str, Any]:
    """The sizes of latent attention, whose cache llama.cpp describes as one key head of rank + rotated numbers."""
    if key_heads != 1:
        raise UserError(f"{meta.name} must give {meta.arch}.attention.head_count_kv as 1, and gives {key_heads}")
    rank, rotated = meta("attention.kv_lora_rank"), meta("rope.dimension_count")
    lengths = tuple(meta(f"attention.{part}_length", default) for part, default in (("key", rank + rotated), ("value", rank)))
    key, value = meta("attention.key_length_mla"), meta("attention.value_length_mla")
    if lengths != (rank + rotated, rank) or key <= rotated:
        raise UserError(f"{meta.name} gives keys of {key} and {lengths} numbers with a latent of {rank} and {rotated} rotated")
    found = {"kv_lora_rank": rank, "qk_rope_head_dim": rotated, "qk_nope_head_dim": key - rotated, "v_head_dim": value}
    found["q_lora_rank"] = meta("attention.q_lora_rank") if meta.has("attention.q_lora_rank") else None
    return found | {"num_key_value_heads": heads, "head_dim": rotated}


def _biases(file: GGUFFile, family: Family) -> dict[str, Any]:
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


def _windows(meta: Metadata, family: Family, layers: int) -> dict[str, Any]:
    """Which layers slide, and what their logits are capped at."""
    if not family.windows:
        if family.arch == "phi3":
            meta.asked.add("attention.sliding_window")  # llama.cpp reads it and does without
        if family.arch == "exaone4":
            if layers == MANY:  # llama.cpp takes it that such a model slides
                raise UserError(f"{meta.name} holds an exaone4 of {MANY} layers, whose windows are not known here")
            return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
        plain = {"sliding_window": None} if family.model_type in ("mistral", "mixtral", "phi3", "ministral3") else {}
        return plain | (
            {"use_sliding_window": False}
            if family.model_type in ("qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "smollm3")
            else {}
        )
    meta.asked.add("attention.sliding_window_pattern")
    pattern = meta.all.get(f"{meta.arch}.attention.sliding_window_pattern", family.windows)
    window = meta("attention.sliding_window", 4096 if family.arch == "gemma2" else 0)
    if not isinstance(pattern, (int, list)) or (isinstance(pattern, list) and len(pattern) != layers):
        raise UserError(f"{meta.name} must say for each layer whether it slides, and gives {quote(pattern)}")
    if isinstance(pattern, int):
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)] if pattern else [True] * layers
    kinds = ["sliding_attention" if slides and window else "full_attention" for slides in pattern]
    found: dict[str, Any] = {"sliding_window": window or 4096, "layer_types": kinds}
    caps = {"gemma2": ("attn", "final"), "gemma3": ("final",), "gemma4": ("final",)}.get(family.arch, ())
    for cap in caps:
        key = f"{cap}_logit_softcapping"
        found[key] = meta(key, kind=float) if meta.has(key) else None
    return found


def _rotary(meta: Metadata, family: Family, file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings, as `rope_parameters`."""
    head_size = config["head_dim"]
    theta, rotated = meta("rope.freq_base", 10000.0, float), meta("rope.dimension_count", head_size)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    more: dict[str, Any] = {}
    if family.model_type == "phi3":
        rope["partial_rotary_factor"] = rotated / head_size
        more["original_max_position_embeddings"] = meta(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        )
    elif family.arch in PARTLY_ROTATED:
        rope["partial_rotary_factor"] = rotated / head_size
    elif rotated != head_size:
        raise UserError(f"{file.path} rotates {rotated} of {head_size} numbers of a head, which {family.arch} cannot")
    kind = meta("rope.scaling.type", "linear", str)
    factor = meta("rope.scaling.factor", meta("rope.scale_linear", 1.0, float), float)
    if LLAMA3 in file.tensors:
        rope |= _llama3_of(read_tensor(file, LLAMA3), theta, file)
    elif LONG in file.tensors or SHORT in file.tensors:
        rope |= _longrope(meta, file, config, more)
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
            rope |= _sharpened(meta)
        if family.names is LATENT:  # llama.cpp reads both as one number
            rope["mscale"] = rope["mscale_all_dim"] = round(10 * meta("rope.scaling.yarn_log_multiplier", kind=float), 6)
    elif kind == "linear" and factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear"):
        raise UserError(f"{file.path} scales rotary positions in the way {quote(kind)}, which is not known here")
    if family.model_type in ("gemma3_text", "olmo3"):
        local = {"rope_type": "default", "rope_theta": theta}  # of olmo3, whose sliding layers llama.cpp gives the same base
        if family.model_type == "gemma3_text":
            local["rope_theta"] = meta("rope.freq_base_swa", 10000.0, float)
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    if family.model_type == "smollm3":
        more["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]
    return more | {"rope_parameters": rope}


def _sharpened(meta: Metadata) -> dict[str, Any]:
    """The factors on queries and scores of a mistral3 with yarn; llama.cpp takes `mscale` as 1."""
    found: dict[str, Any] = {}
    if meta.has("attention.temperature_scale"):
        found["llama_4_scaling_beta"] = meta("attention.temperature_scale", kind=float)
    if meta.has("rope.scaling.yarn_log_multiplier"):
        found |= {"mscale": 1.0, "mscale_all_dim": meta("rope.scaling.yarn_log_multiplier", kind=float)}
    return found


def _longrope(meta: Metadata, file: GGUFFile, config: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    original = more.get("original_max_position_embeddings", 0)
    if not original or LONG not in file.tensors or SHORT not in file.tensors:
        raise UserError(f"{file.path} must have {LONG}, {SHORT} and the original context they are for")
    factors = {name: [float(str(f)) for f in read_tensor(file, stored)] for name, stored in (("long", LONG), ("short", SHORT))}
    expected = _longrope_gain(config["max_position_embeddings"], original)
    gain = meta("rope.scaling.attn_factor", expected, float)
    return {
        "rope_type": "longrope",
        "long_factor": factors["long"],
        "short_factor": factors["short"],
        "original_max_position_embeddings": original,
    } | ({} if math.isclose(gain, expected, rel_tol=1e-6) else {"attention_factor": gain})


def _longrope_gain(context: int, original: int) -> float:
    """The factor on queries and keys (Ding et al. 2024, LongRoPE)."""
    return math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original else 1.0


def llama3_factors(size: int, theta: float, factor: float, original: int, low: float = 1.0, high: float = 4.0) -> np.ndarray:
    """What llama3's scaling divides each of `size` rotary frequencies by, float32 [size] (Llama 3.1, `rope_scaling`)."""
    turns = original * theta ** (-np.arange(size) / size) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth), np.float32)


def _llama3_of(factors: np.ndarray, theta: float, file: GGUFFile) -> dict[str, Any]:
    """llama3's numbers from what they make of the frequencies, which is all that GGUF holds."""
    for factor in dict.fromkeys((float(str(factors.max())), 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)):
        for original in (2**n for n in range(4, 21)):
            if np.allclose(llama3_factors(len(factors), theta, factor, original), factors, rtol=1e-5):
                numbers = {"factor": factor, "original_max_position_embeddings": original}
                return numbers | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    raise UserError(f"{file.path} scales rotary frequencies by {LLAMA3} in a way that is not Llama 3's")


def frequency_tensors(config: Config, model: ModelConfig, family: Family) -> dict[str, np.ndarray]:
    """Factors of rotary frequencies, which GGUF holds as tensors."""
    scaling, half = model.rope_scaling, model.rotated_size // 2
    if family.arch == "gemma4":
        half = (model.global_head_size or model.head_size) // 2
        share, factor = (1.0, 1.0) if scaling is None else (scaling.share, scaling.factor)
        return {LLAMA3: np.where(np.arange(half) < int(share * 2 * half // 2), factor, LARGEST).astype(np.float32)}
    if scaling is None or scaling.kind not in ("llama3", "longrope"):
        return {}
    if scaling.kind == "llama3":
        numbers = (scaling.factor, scaling.original_context, scaling.low_freq_factor, scaling.high_freq_factor)
        return {LLAMA3: llama3_factors(half, model.rope_theta, *numbers)}
    factors = {LONG: config.attention.rope_long_factors, SHORT: config.attention.rope_short_factors}
    return {name: np.array(values or (1.0,) * half, np.float32) for name, values in factors.items()}


def gguf_metadata(model: ModelConfig, family: Family, context: int) -> dict[str, Any]:
    """What llama.cpp wants to know of an architecture; `context`: the checkpoint's, which a run may have made shorter."""
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
        found["rope.scaling.finetuned"] = False  # llama.cpp rotates nothing then
    if family.arch == "mistral3":
        found["attention.temperature_scale"] = model.query_scaling_beta
        if model.rope_scaling is not None:
            found["rope.scaling.yarn_log_multiplier"] = model.rope_scaling.mscale_all_dim
    found |= _experts_said(model, family) | _latent_said(model)
    if family.arch in ("command-r", "cohere2"):
        found["logit_scale"] = 1 / model.logits_scaling
    elif "logit_scale" in family.keys:
        found |= {"logit_scale": model.logits_scaling, "residual_scale": model.residual_multiplier}
        found["embedding_scale"] = model.embedding_multiplier
        found["attention.scale"] = (model.query_pre_attn_scalar or model.head_size) ** -0.5
    found |= _windows_said(model, family) | _scaling_said(model, context)
    if family.arch == "gemma4":
        found |= _gemma4_said(model)
    numbers = ("base", "base_swa", "factor", "capping", "scale", "multiplier")
    return {key: float(value) if key.endswith(numbers) else value for key, value in found.items() if value is not None}


def _experts_said(model: ModelConfig, family: Family) -> dict[str, Any]:
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
        "expert_weights_norm": experts.normalise,
        "leading_dense_block_count": len(experts.dense_layers),
        "interleave_moe_layer_step": 1,
    }
    found = {key: value for key, value in values.items() if key in family.keys}
    found["feed_forward_length"] = experts.dense_dim or model.hidden_dim
    if family.arch in SCORED:
        found["expert_gating_func"] = SIGMOID if experts.score == "sigmoid" else SOFTMAX
    if family.arch == "ernie4_5-moe":
        found["expert_shared_feed_forward_length"] = experts.shared_dim
    return found


def _latent_said(model: ModelConfig) -> dict[str, Any]:
    """The opposite of `_latent`."""
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
    """What of a model llama.cpp's architecture cannot have, although its metadata and tensors can be written."""
    experts = model.experts
    if family.arch == "deepseek2" and experts is not None and experts.groups > 1 and experts.group_score == "max":
        return "moe.group_score: max (it takes the sum of the best two)"
    if family.names is LATENT and model.latent is not None and model.latent.query_rank is None and model.num_blocks not in LITE:
        return f"attention.q_lora_rank: null with other than {LITE[0]} or {LITE[1]} layers"
    if model.latent is not None and model.latent.norm_epsilon != model.norm_epsilon:
        return "attention.latent_norm_epsilon: other than model.norm_epsilon"
    scaling = model.rope_scaling
    if scaling is not None and (scaling.kind == "proportional") != (family.arch == "gemma4"):
        return f"attention.rope_scaling: {scaling.kind}"
    if family.arch == "gemma4" and model.kv_shared_layers:
        first = model.num_blocks - model.kv_shared_layers
        sources = {model.kv_source(i): first - (1 if model.windows[i] is None else 2) for i in range(first, model.num_blocks)}
        if any(source != expected for source, expected in sources.items()) or first < 2:
            return "attention.kv_shared_layers: that read other layers than the last but one, sliding, and the last, full"
    yarn = family.names is LATENT and scaling is not None and scaling.kind == "yarn"
    if yarn and scaling is not None and (not scaling.mscale or scaling.mscale != scaling.mscale_all_dim):
        return "attention.rope_mscale: other than attention.rope_mscale_all_dim"
    if family.names is LATENT and hf_config.get("rope_interleave") is False:
        return "rope_interleave: false"
    if family.arch == "mistral3" and model.query_scaling_beta is not None and (scaling is None or scaling.kind != "yarn"):
        return "attention.query_scaling_beta without attention.rope_scaling: yarn"
    if family.arch == "mistral3" and scaling is not None and scaling.mscale not in (None, 1.0):
        return "attention.rope_mscale: other than 1"
    if family.arch in ("dots1", "olmoe") and model.kv_heads != model.n_heads:
        return "model.kv_heads: fewer than model.n_heads"
    if family.arch == "command-r" and model.num_blocks >= MANY:
        return f"model.num_blocks: {MANY} or more without qk_norm"
    if family.arch == "exaone4" and model.num_blocks == MANY:
        return f"model.num_blocks: {MANY} without a window"
    if family.model_type in ("cohere2", "olmo3") and model.windows.count(None) == model.num_blocks:
        return "attention.sliding_window: false"
    if family.arch in WHOLE_WIDTH and model.n_heads * model.head_size != model.dim:
        return "model.head_size: other than model.dim / model.n_heads"
    return None


def _windows_said(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Which layers slide, and caps, of the architectures that have them: the opposite of `_windows`."""
    if not family.windows:
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


def _scaling_said(model: ModelConfig, context: int) -> dict[str, Any]:
    """How rotary frequencies are scaled, where that is no tensor."""
    scaling = model.rope_scaling
    if scaling is None or scaling.kind in ("llama3", "proportional"):
        return {}
    original = {"rope.scaling.original_context_length": scaling.original_context}
    if scaling.kind == "longrope":
        longest = max(context, round(scaling.factor * scaling.original_context))
        gain = scaling.attention_factor or _longrope_gain(longest, scaling.original_context)
        return original | {"context_length": longest, "rope.scaling.attn_factor": gain}
    found = {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}
    if scaling.kind == "linear":
        return found
    betas = {"rope.scaling.yarn_beta_fast": scaling.beta_fast, "rope.scaling.yarn_beta_slow": scaling.beta_slow}
    return found | original | betas
