"""The GGUF model families: for each family, the tensor names in GGUF and in transformers, and the fixed settings.

The properties of each architecture are taken from llama.cpp (`conversion/` and `src/models/`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dantinox.interop.gguf.gguf_matrices import PLAIN, TERNARY, MatrixFormat
from dantinox.interop.hf.hf_family import BITNET

LAYER, EXPERT = "model.layers.{}.", "experts.{e}."
EMBEDDINGS_AND_HEAD = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
TIED_EMBEDDINGS = {name: hf_name for name, hf_name in EMBEDDINGS_AND_HEAD.items() if name != "output"}
ATTENTION = {
    "blk.{}.attn_q": LAYER + "self_attn.q_proj",
    "blk.{}.attn_k": LAYER + "self_attn.k_proj",
    "blk.{}.attn_v": LAYER + "self_attn.v_proj",
    "blk.{}.attn_output": LAYER + "self_attn.o_proj",
}
HEAD_NORMS = {"blk.{}.attn_q_norm": LAYER + "self_attn.q_norm", "blk.{}.attn_k_norm": LAYER + "self_attn.k_norm"}
MLP = {f"blk.{{}}.ffn_{name}": f"{LAYER}mlp.{name}_proj" for name in ("gate", "up", "down")}
NORMS_BEFORE = {"blk.{}.attn_norm": LAYER + "input_layernorm", "blk.{}.ffn_norm": LAYER + "post_attention_layernorm"}
NORMS_AFTER = {
    "blk.{}.post_attention_norm": LAYER + "post_attention_layernorm",
    "blk.{}.post_ffw_norm": LAYER + "post_feedforward_layernorm",
}
NORMS_BOTH = NORMS_AFTER | {
    "blk.{}.attn_norm": LAYER + "input_layernorm",
    "blk.{}.ffn_norm": LAYER + "pre_feedforward_layernorm",
}
DENSE = EMBEDDINGS_AND_HEAD | ATTENTION | NORMS_BEFORE | MLP


def _expert_names(module: str, gate: str, up: str, down: str) -> dict[str, str]:
    names = {"gate": gate, "up": up, "down": down}
    stacks = {f"blk.{{}}.ffn_{name}_exps": f"{LAYER}{module}.{EXPERT}{hf_name}" for name, hf_name in names.items()}
    return EMBEDDINGS_AND_HEAD | ATTENTION | NORMS_BEFORE | stacks | {"blk.{}.ffn_gate_inp": f"{LAYER}{module}.gate"}


class MergedTensor(NamedTuple):
    """A tensor of transformers that GGUF stores differently: with another name or axis order, or split into several tensors.

    Attributes:
      stored: the names of the tensors in GGUF, with `{}` for the layer index.
      shape: a function that takes `config.json` and the shapes in GGUF, and returns the shape in transformers.
      parts: a function that takes the tensor and `config.json`, and returns one view per GGUF tensor, in GGUF's axis order.
    """

    stored: tuple[str, ...]
    shape: Callable[..., tuple[int, ...]]
    parts: Callable[[np.ndarray, Mapping[str, Any]], Sequence[np.ndarray]]


def _split_latent_kv(tensor: np.ndarray, config: Mapping[str, Any]) -> list[np.ndarray]:
    """Splits the matrix that projects a latent vector to keys and values: `[N (H+V), R]` → `[N, R, H]` and `[N, V, R]`."""
    heads = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[1])
    H = config["qk_nope_head_dim"]
    return [heads[:, :H].transpose(0, 2, 1), heads[:, H:]]


def _split_gate_up(tensor: np.ndarray, config: Mapping[str, Any]) -> Sequence[np.ndarray]:
    """Splits a matrix `[2F, D]`, or the matrices of experts `[E, 2F, D]`, into gate and up."""
    return np.split(tensor, 2, axis=-2)


SINK_LOGITS = MergedTensor(("blk.{}.attn_sinks.weight",), lambda config, sinks: sinks, lambda t, config: [t])
# Stacked experts [E, D, 2F] with interleaved gate and up, stored as two tensors [E, F, D].
INTERLEAVED_GATE_UP = MergedTensor(
    ("blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight"),
    lambda config, gate, up: (gate[0], gate[2], 2 * gate[1]),
    lambda t, config: t.reshape(*t.shape[:2], -1, 2).transpose(3, 0, 2, 1),  # type: ignore[arg-type,return-value]
)
INTERLEAVED_GATE_UP_BIAS = MergedTensor(
    ("blk.{}.ffn_gate_exps.bias", "blk.{}.ffn_up_exps.bias"),
    lambda config, gate, up: (gate[0], 2 * gate[1]),
    lambda t, config: t.reshape(len(t), -1, 2).transpose(2, 0, 1),  # type: ignore[arg-type,return-value]
)
TRANSPOSED_DOWN = MergedTensor(
    ("blk.{}.ffn_down_exps.weight",), lambda config, s: (s[0], s[2], s[1]), lambda t, config: [t.transpose(0, 2, 1)]
)
EXPERT_DOWN_BIAS = MergedTensor(("blk.{}.ffn_down_exps.bias",), lambda config, bias: bias, lambda t, config: [t])
SHARED_GATE = MergedTensor(("blk.{}.ffn_gate_inp_shexp.weight",), lambda config, gate: (1, *gate), lambda t, config: [t[0]])
SCORE_CORRECTION_BIAS = MergedTensor(("blk.{}.exp_probs_b.bias",), lambda config, bias: bias, lambda t, config: [t])
SCORE_CORRECTION_BIAS_ROW = MergedTensor(
    ("blk.{}.exp_probs_b.bias",), lambda config, bias: (1, *bias), lambda t, config: [t[0]]
)
LATENT_KV = MergedTensor(
    ("blk.{}.attn_k_b.weight", "blk.{}.attn_v_b.weight"),
    lambda config, k, v: (k[0] * (k[2] + v[1]), k[1]),
    _split_latent_kv,
)


EXPERT_GATE_UP = MergedTensor(
    ("blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight"),
    lambda config, gate, up: (gate[0], 2 * gate[1], gate[2]),
    _split_gate_up,
)
SHARED_GATE_UP = MergedTensor(
    ("blk.{}.ffn_gate_shexp.weight", "blk.{}.ffn_up_shexp.weight"),
    lambda config, gate, up: (2 * gate[0], gate[1]),
    _split_gate_up,
)
DENSE_GATE_UP = MergedTensor(
    ("blk.{}.ffn_gate.weight", "blk.{}.ffn_up.weight"),
    lambda config, gate, up: (2 * gate[0], gate[1]),
    _split_gate_up,
)


def _rename_tensor(stored: str) -> MergedTensor:
    """Returns the entry of a tensor that has another name in GGUF and the same shape."""
    return MergedTensor((stored,), lambda config, shape: shape, lambda t, config: [t])


EXPERT_DOWN = _rename_tensor("blk.{}.ffn_down_exps.weight")


class Family(NamedTuple):
    """A transformers model family and its GGUF representation.

    Attributes:
      model_type: the name of the family in transformers.
      arch: the name of the architecture in llama.cpp.
      names: maps module names of GGUF to those of transformers, with `{}` for the layer index and `{e}` for the expert index.
      fixed: keys of `config.json` whose values the architecture implies.
      interleaved_rope: whether the query and key rows in GGUF are ordered for the rotary pairs (x₀, x₁), (x₂, x₃), ….
      norms_plus_one: whether GGUF stores norm weights as 1 + w.
      full_every: n if every n-th layer has no sliding window; 0 if llama.cpp supports no windows for this architecture.
      epsilon_key: the key of `config.json` for the epsilon of norms; a key other than `rms_norm_eps` means layer norms.
      keys: maps each metadata key to a key of `config.json`, a type, and a default (None: the metadata key is required).
      merged: transformers tensors that GGUF splits or stores with other axes, by name, with `{}` for the layer index.
      matrices: how the weight matrices are stored.
    """

    model_type: str
    arch: str
    names: Mapping[str, str]
    fixed: Mapping[str, Any]
    interleaved_rope: bool = False
    norms_plus_one: bool = False
    full_every: int = 0
    epsilon_key: str = "rms_norm_eps"
    keys: Mapping[str, tuple[str, type[Any], Any]] = {}
    merged: Mapping[str, MergedTensor] = {}
    matrices: MatrixFormat = PLAIN


GPT2 = {
    **{"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f"},
    **{"output": "lm_head", "blk.{}.attn_norm": "transformer.h.{}.ln_1", "blk.{}.ffn_norm": "transformer.h.{}.ln_2"},
    **{"blk.{}.attn_qkv": "transformer.h.{}.attn.c_attn", "blk.{}.attn_output": "transformer.h.{}.attn.c_proj"},
    **{"blk.{}.ffn_up": "transformer.h.{}.mlp.c_fc", "blk.{}.ffn_down": "transformer.h.{}.mlp.c_proj"},
}
PHI3 = (
    EMBEDDINGS_AND_HEAD
    | NORMS_BEFORE
    | {
        **{"blk.{}.attn_qkv": LAYER + "self_attn.qkv_proj", "blk.{}.attn_output": LAYER + "self_attn.o_proj"},
        **{"blk.{}.ffn_up": LAYER + "mlp.gate_up_proj", "blk.{}.ffn_down": LAYER + "mlp.down_proj"},
    }
)
MOE = _expert_names("mlp", "gate_proj", "up_proj", "down_proj")
MLP_PROJECTIONS = ("gate", "up", "down")
SHARED_EXPERTS = {f"blk.{{}}.ffn_{part}_shexp": f"{LAYER}mlp.shared_experts.{part}_proj" for part in MLP_PROJECTIONS}
LATENT_ATTENTION = {
    **{name: hf_name for name, hf_name in MOE.items() if name not in ("blk.{}.attn_k", "blk.{}.attn_v")},
    **{"blk.{}.attn_q_a": LAYER + "self_attn.q_a_proj", "blk.{}.attn_q_b": LAYER + "self_attn.q_b_proj"},
    **{"blk.{}.attn_q_a_norm": LAYER + "self_attn.q_a_layernorm", "blk.{}.attn_kv_a_norm": LAYER + "self_attn.kv_a_layernorm"},
    **{"blk.{}.attn_kv_a_mqa": LAYER + "self_attn.kv_a_proj_with_mqa"},
    **MLP,
    **SHARED_EXPERTS,
}
EXPERT_KEYS: dict[str, tuple[str, type[Any], Any]] = {
    "expert_count": ("num_experts", int, None),
    "expert_used_count": ("num_experts_per_tok", int, None),
    "expert_feed_forward_length": ("moe_intermediate_size", int, None),
}
DEEPSEEK_KEYS = EXPERT_KEYS | {
    "expert_count": ("n_routed_experts", int, None),
    "expert_shared_count": ("n_shared_experts", int, None),
    "expert_weights_scale": ("routed_scaling_factor", float, 1.0),
    "expert_weights_norm": ("norm_topk_prob", bool, False),
    "leading_dense_block_count": ("first_k_dense_replace", int, 0),
    "expert_group_count": ("n_group", int, 1),
    "expert_group_used_count": ("topk_group", int, 1),
}
SCALE_KEYS: dict[str, tuple[str, type[Any], Any]] = {
    "logit_scale": ("logits_scaling", float, None),
    "residual_scale": ("residual_multiplier", float, 1.0),
    "embedding_scale": ("embedding_multiplier", float, 1.0),
    "attention.scale": ("attention_multiplier", float, None),
}
GRANITE = {
    **{name: hf_name for name, hf_name in DENSE.items() if hf_name not in MLP.values()},
    "blk.{}.ffn_gate_inp": LAYER + "block_sparse_moe.router.layer",
}
GRANITE_KEYS = SCALE_KEYS | {
    "expert_count": ("num_local_experts", int, None),
    "expert_used_count": ("num_experts_per_tok", int, None),
}
GRANITE_SHARED = GRANITE | {"blk.{}.ffn_down_shexp": LAYER + "shared_mlp.output_linear"}
GRANITE_SHARED_KEYS = GRANITE_KEYS | {"expert_shared_feed_forward_length": ("shared_intermediate_size", int, None)}
GRANITE_MERGED = {
    LAYER + "block_sparse_moe.input_linear.weight": EXPERT_GATE_UP,
    LAYER + "block_sparse_moe.output_linear.weight": EXPERT_DOWN,
}
SEED_OSS = {name: hf_name for name, hf_name in DENSE.items() if name != "blk.{}.ffn_norm"}
SEED_OSS |= {"blk.{}.post_attention_norm": LAYER + "post_attention_layernorm"}
HEAD_NORMS_AFTER_ROPE = {f"blk.{{}}.attn_{part[0]}_norm": f"{LAYER}self_attn.{part}_layernorm" for part in ("query", "key")}
GLM4 = {
    **{**EMBEDDINGS_AND_HEAD, **ATTENTION, **NORMS_BEFORE},
    **{"blk.{}.ffn_up": LAYER + "mlp.gate_up_proj", "blk.{}.ffn_down": LAYER + "mlp.down_proj"},
    **{"blk.{}.post_attention_norm": LAYER + "post_self_attn_layernorm", "blk.{}.post_ffw_norm": LAYER + "post_mlp_layernorm"},
}
STARCODER2 = {
    **{**EMBEDDINGS_AND_HEAD, **ATTENTION, **NORMS_BEFORE},
    **{"blk.{}.ffn_up": LAYER + "mlp.c_fc", "blk.{}.ffn_down": LAYER + "mlp.c_proj"},
}
ARCEE = {name: hf_name for name, hf_name in DENSE.items() if name != "blk.{}.ffn_gate"}
OLMO = {name: hf_name for name, hf_name in (EMBEDDINGS_AND_HEAD | ATTENTION | MLP).items() if name != "output_norm"}
CHATGLM = {
    **{**EMBEDDINGS_AND_HEAD, **ATTENTION, **NORMS_BEFORE},
    **{"blk.{}.ffn_up": LAYER + "mlp.gate_up_proj", "blk.{}.ffn_down": LAYER + "mlp.down_proj"},
}
PHI2 = {
    **{
        **EMBEDDINGS_AND_HEAD,
        **ATTENTION,
        "output_norm": "model.final_layernorm",
        "blk.{}.attn_norm": LAYER + "input_layernorm",
    },
    **{"blk.{}.attn_output": LAYER + "self_attn.dense"},
    **{"blk.{}.ffn_up": LAYER + "mlp.fc1", "blk.{}.ffn_down": LAYER + "mlp.fc2"},
}
GEMMA4 = (
    EMBEDDINGS_AND_HEAD
    | ATTENTION
    | NORMS_BOTH
    | MLP
    | HEAD_NORMS
    | {
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
        "blk.{}.inp_gate": LAYER + "per_layer_input_gate",
        "blk.{}.proj": LAYER + "per_layer_projection",
        "blk.{}.post_norm": LAYER + "post_per_layer_input_norm",
        "blk.{}.ffn_gate_inp": LAYER + "router.proj",
        "blk.{}.pre_ffw_norm_2": LAYER + "pre_feedforward_layernorm_2",
        "blk.{}.post_ffw_norm_1": LAYER + "post_feedforward_layernorm_1",
        "blk.{}.post_ffw_norm_2": LAYER + "post_feedforward_layernorm_2",
    }
)
GEMMA4_MERGED = {
    LAYER + "layer_scalar": _rename_tensor("blk.{}.layer_output_scale.weight"),
    LAYER + "router.scale": _rename_tensor("blk.{}.ffn_gate_inp.scale"),
    LAYER + "router.per_expert_scale": _rename_tensor("blk.{}.ffn_down_exps.scale"),
    LAYER + "experts.gate_up_proj": _rename_tensor("blk.{}.ffn_gate_up_exps.weight"),
    LAYER + "experts.down_proj": EXPERT_DOWN,
}
BITNET_DENSE = TIED_EMBEDDINGS | ATTENTION | NORMS_BEFORE | MLP  # llama.cpp always uses the embeddings as output layer


def _sub_norms(attention: str, feed_forward: str) -> dict[str, str]:
    """Returns the names of the norms before the output projections, with those of transformers in this family."""
    return {"blk.{}.attn_sub_norm": f"{LAYER}self_attn.{attention}", "blk.{}.ffn_sub_norm": f"{LAYER}mlp.{feed_forward}"}


BITNET_NAMES = BITNET_DENSE | _sub_norms("attn_sub_norm", "ffn_sub_norm")
SILU, GELU = {"hidden_act": "silu"}, {"hidden_activation": "gelu_pytorch_tanh"}
NO_BIAS = {"attention_bias": False}
GRANITE_MOE_SHARED = Family(
    "granitemoeshared",
    "granitemoe",
    GRANITE_SHARED,
    SILU | NO_BIAS,
    interleaved_rope=True,
    keys=GRANITE_SHARED_KEYS,
    merged=GRANITE_MERGED | {LAYER + "shared_mlp.input_linear.weight": SHARED_GATE_UP},
)
# If several families have the architecture of a file, it is read as the first of them, unless `gguf_config` selects another.
FAMILIES = (
    Family("llama", "llama", DENSE, SILU, interleaved_rope=True),
    Family("mistral", "llama", DENSE, SILU, interleaved_rope=True),
    Family("ministral", "llama", DENSE, SILU, interleaved_rope=True),
    Family("helium", "llama", DENSE, SILU),
    Family("ministral3", "mistral3", DENSE, SILU, interleaved_rope=True),
    Family(
        "mixtral",
        "llama",
        _expert_names("block_sparse_moe", "w1", "w3", "w2"),
        SILU,
        interleaved_rope=True,
        keys={"expert_count": ("num_local_experts", int, None), "expert_used_count": ("num_experts_per_tok", int, None)},
    ),
    Family("smollm3", "smollm3", DENSE, SILU | {"no_rope_layer_interval": 4}, interleaved_rope=True),
    Family("qwen2", "qwen2", DENSE, SILU),
    Family("qwen3", "qwen3", DENSE | HEAD_NORMS, SILU | NO_BIAS),
    Family(
        "qwen3_moe",
        "qwen3moe",
        _expert_names("mlp", "gate_proj", "up_proj", "down_proj") | HEAD_NORMS,
        SILU | NO_BIAS | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        keys=EXPERT_KEYS,
    ),
    Family(
        "qwen2_moe",
        "qwen2moe",
        MOE
        | SHARED_EXPERTS
        | {f"blk.{{}}.ffn_{part}_shexp": f"{LAYER}mlp.shared_expert.{part}_proj" for part in MLP_PROJECTIONS},
        SILU | {"qkv_bias": True, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        keys=EXPERT_KEYS | {"expert_shared_feed_forward_length": ("shared_expert_intermediate_size", int, None)},
        merged={f"{LAYER}mlp.shared_expert_gate.weight": SHARED_GATE},
    ),
    Family(
        "olmoe",
        "olmoe",
        MOE | HEAD_NORMS,
        SILU | NO_BIAS | {"norm_topk_prob": False},
        keys={"expert_count": ("num_experts", int, None), "expert_used_count": ("num_experts_per_tok", int, None)},
    ),
    Family(
        "gpt_oss",
        "gpt-oss",
        EMBEDDINGS_AND_HEAD
        | ATTENTION
        | {
            **{"blk.{}.attn_norm": LAYER + "input_layernorm", "blk.{}.ffn_gate_inp": LAYER + "mlp.router"},
            **{"blk.{}.post_attention_norm": LAYER + "post_attention_layernorm"},
        },
        SILU | {"attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        full_every=2,
        keys={
            "expert_count": ("num_local_experts", int, None),
            "expert_used_count": ("num_experts_per_tok", int, None),
            "expert_feed_forward_length": ("intermediate_size", int, None),
        },
        merged={
            f"{LAYER}self_attn.sinks": SINK_LOGITS,
            f"{LAYER}mlp.experts.gate_up_proj": INTERLEAVED_GATE_UP,
            f"{LAYER}mlp.experts.gate_up_proj_bias": INTERLEAVED_GATE_UP_BIAS,
            f"{LAYER}mlp.experts.down_proj": TRANSPOSED_DOWN,
            f"{LAYER}mlp.experts.down_proj_bias": EXPERT_DOWN_BIAS,
        },
    ),
    Family(
        "deepseek_v2",
        "deepseek2",
        LATENT_ATTENTION,
        SILU | NO_BIAS,
        keys={key: value for key, value in DEEPSEEK_KEYS.items() if key != "expert_weights_norm"},
        merged={f"{LAYER}self_attn.kv_b_proj.weight": LATENT_KV},
    ),
    Family(
        "deepseek_v3",
        "deepseek2",
        LATENT_ATTENTION,
        SILU | NO_BIAS,
        keys=DEEPSEEK_KEYS,
        merged={
            f"{LAYER}self_attn.kv_b_proj.weight": LATENT_KV,
            f"{LAYER}mlp.gate.e_score_correction_bias": SCORE_CORRECTION_BIAS,
        },
    ),
    Family(
        "dots1",
        "dots1",
        MOE | MLP | HEAD_NORMS | SHARED_EXPERTS,
        SILU | NO_BIAS | {"sliding_window": None},
        keys=DEEPSEEK_KEYS,
        merged={f"{LAYER}mlp.gate.e_score_correction_bias": SCORE_CORRECTION_BIAS},
    ),
    Family(
        "glm4_moe",
        "glm4moe",
        {
            **{name: hf_name for name, hf_name in MOE.items() if name != "blk.{}.ffn_norm"},
            **{"blk.{}.post_attention_norm": LAYER + "post_attention_layernorm"},
            **MLP,
            **HEAD_NORMS,
            **SHARED_EXPERTS,
        },
        SILU,
        keys=DEEPSEEK_KEYS,
        merged={f"{LAYER}mlp.gate.e_score_correction_bias": SCORE_CORRECTION_BIAS},
    ),
    Family(
        "ernie4_5_moe",
        "ernie4_5-moe",
        MOE | MLP | SHARED_EXPERTS,
        SILU | {"use_bias": False, "moe_layer_end_index": -1},
        keys={
            "expert_count": ("moe_num_experts", int, None),
            "expert_used_count": ("moe_k", int, None),
            "expert_feed_forward_length": ("moe_intermediate_size", int, None),
            "expert_shared_count": ("moe_num_shared_experts", int, 0),
            "leading_dense_block_count": ("moe_layer_start_index", int, 0),
            "interleave_moe_layer_step": ("moe_layer_interval", int, None),
        },
        merged={f"{LAYER}mlp.moe_statics.e_score_correction_bias": SCORE_CORRECTION_BIAS_ROW},
    ),
    Family(
        "gemma",
        "gemma",
        TIED_EMBEDDINGS | ATTENTION | NORMS_BEFORE | MLP,
        {"hidden_act": "gelu_pytorch_tanh"} | NO_BIAS,
        norms_plus_one=True,
    ),
    Family("seed_oss", "seed_oss", SEED_OSS, SILU | {"attention_out_bias": False, "mlp_bias": False}),
    Family("ernie4_5", "ernie4_5", DENSE, SILU | {"use_bias": False}),
    Family("hunyuan_v1_dense", "hunyuan-dense", DENSE | HEAD_NORMS_AFTER_ROPE, SILU | NO_BIAS),
    Family("glm", "chatglm", CHATGLM, SILU),
    Family("glm4", "glm4", GLM4, SILU),
    Family("stablelm", "stablelm", DENSE, SILU, epsilon_key="layer_norm_eps"),
    Family("phi", "phi2", PHI2, {"hidden_act": "gelu_new"}, epsilon_key="layer_norm_eps"),
    Family(
        "starcoder2",
        "starcoder2",
        STARCODER2,
        {"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": None},
        epsilon_key="norm_epsilon",
    ),
    Family(
        "cohere",
        "command-r",
        TIED_EMBEDDINGS | ATTENTION | MLP | {"blk.{}.attn_norm": LAYER + "input_layernorm"},
        SILU | NO_BIAS,
        epsilon_key="layer_norm_eps",
        keys={"logit_scale": ("logit_scale", float, None)},
    ),
    Family(
        "cohere2",
        "cohere2",
        TIED_EMBEDDINGS | ATTENTION | MLP | {"blk.{}.attn_norm": LAYER + "input_layernorm"},
        SILU | NO_BIAS,
        full_every=4,
        epsilon_key="layer_norm_eps",
        keys={"logit_scale": ("logit_scale", float, None)},
    ),
    Family("arcee", "arcee", ARCEE, {"hidden_act": "relu2", "mlp_bias": False} | NO_BIAS, interleaved_rope=True),
    Family("exaone4", "exaone4", EMBEDDINGS_AND_HEAD | ATTENTION | NORMS_AFTER | MLP | HEAD_NORMS, SILU),
    Family(
        "gemma2", "gemma2", TIED_EMBEDDINGS | ATTENTION | NORMS_BOTH | MLP, GELU | NO_BIAS, norms_plus_one=True, full_every=2
    ),
    Family(
        "gemma3_text",
        "gemma3",
        EMBEDDINGS_AND_HEAD | ATTENTION | NORMS_BOTH | MLP | HEAD_NORMS,
        GELU | NO_BIAS,
        norms_plus_one=True,
        full_every=6,
    ),
    Family("gemma4_text", "gemma4", GEMMA4, GELU | NO_BIAS, full_every=6, merged=GEMMA4_MERGED),
    Family("phi3", "phi3", PHI3, SILU),
    Family("olmo", "olmo", OLMO, SILU | NO_BIAS, interleaved_rope=True, epsilon_key="layer_norm_eps"),
    Family("olmo2", "olmo2", EMBEDDINGS_AND_HEAD | ATTENTION | NORMS_AFTER | MLP | HEAD_NORMS, SILU | NO_BIAS),
    Family("olmo3", "olmo2", EMBEDDINGS_AND_HEAD | ATTENTION | NORMS_AFTER | MLP | HEAD_NORMS, SILU | NO_BIAS, full_every=4),
    Family("granite", "granite", DENSE, SILU, interleaved_rope=True, keys=SCALE_KEYS),
    Family(
        "granitemoehybrid",
        "granite",
        {name: hf_name for name, hf_name in DENSE.items() if hf_name not in MLP.values()}
        | {"blk.{}.ffn_down": LAYER + "shared_mlp.output_linear"},
        SILU | {"num_local_experts": 0, "position_embedding_type": None, "mamba_n_heads": 1},
        interleaved_rope=True,
        keys=SCALE_KEYS | {"feed_forward_length": ("shared_intermediate_size", int, None)},
        merged={LAYER + "shared_mlp.input_linear.weight": DENSE_GATE_UP},
    ),
    Family(
        "granitemoe",
        "granitemoe",
        GRANITE,
        SILU | NO_BIAS,
        interleaved_rope=True,
        keys=GRANITE_KEYS,
        merged=GRANITE_MERGED,
    ),
    GRANITE_MOE_SHARED,
    GRANITE_MOE_SHARED._replace(model_type="granitemoehybrid"),
    Family("bitnet", "bitnet", BITNET_NAMES, SILU | NO_BIAS | {"quantization_config": BITNET}, matrices=TERNARY),
    Family(
        "bitnet_b1_58",
        "bitnet",
        BITNET_DENSE | _sub_norms("inner_attn_ln", "ffn_layernorm"),
        SILU | NO_BIAS | {"quantization_config": BITNET},
        matrices=TERNARY,
    ),
    Family("gpt2", "gpt2", GPT2, {"activation_function": "gelu_new"}),
)
