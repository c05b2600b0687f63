"""The model families of GGUF: the tensors of each, by their names in GGUF and in transformers, and what its architecture fixes.

The facts of an architecture are those of llama.cpp, `conversion/` and `src/models/`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

LAYER, EXPERT = "model.layers.{}.", "experts.{e}."
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
TIED = {name: theirs for name, theirs in ENDS.items() if name != "output"}
ATTENTION = {
    "blk.{}.attn_q": LAYER + "self_attn.q_proj",
    "blk.{}.attn_k": LAYER + "self_attn.k_proj",
    "blk.{}.attn_v": LAYER + "self_attn.v_proj",
    "blk.{}.attn_output": LAYER + "self_attn.o_proj",
}
HEAD_NORMS = {"blk.{}.attn_q_norm": LAYER + "self_attn.q_norm", "blk.{}.attn_k_norm": LAYER + "self_attn.k_norm"}
MLP = {f"blk.{{}}.ffn_{name}": f"{LAYER}mlp.{name}_proj" for name in ("gate", "up", "down")}
BEFORE = {"blk.{}.attn_norm": LAYER + "input_layernorm", "blk.{}.ffn_norm": LAYER + "post_attention_layernorm"}
BEHIND = {
    "blk.{}.post_attention_norm": LAYER + "post_attention_layernorm",
    "blk.{}.post_ffw_norm": LAYER + "post_feedforward_layernorm",
}
BOTH = BEHIND | {"blk.{}.attn_norm": LAYER + "input_layernorm", "blk.{}.ffn_norm": LAYER + "pre_feedforward_layernorm"}
DENSE = ENDS | ATTENTION | BEFORE | MLP


def _experts(module: str, gate: str, up: str, down: str) -> dict[str, str]:
    names = {"gate": gate, "up": up, "down": down}
    stacks = {f"blk.{{}}.ffn_{name}_exps": f"{LAYER}{module}.{EXPERT}{theirs}" for name, theirs in names.items()}
    return ENDS | ATTENTION | BEFORE | stacks | {"blk.{}.ffn_gate_inp": f"{LAYER}{module}.gate"}


class MergedTensor(NamedTuple):
    """A tensor of transformers that is one or several of GGUF in another form.

    Attributes:
      stored: names of these in GGUF, with `{}` for the layer.
      shape: of the tensor, from theirs and `config.json`.
      pieces: views of the tensor, each with the axes of one of theirs; what is written into them stands in the tensor.
    """

    stored: tuple[str, ...]
    shape: Callable[..., tuple[int, ...]]
    pieces: Callable[[np.ndarray, Mapping[str, Any]], Sequence[np.ndarray]]


def _keys_and_values(tensor: np.ndarray, config: Mapping[str, Any]) -> list[np.ndarray]:
    """What makes keys and values of a latent, `[N (H+V), R]`: as `[N, R, H]` and `[N, V, R]`."""
    heads = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[1])
    H = config["qk_nope_head_dim"]
    return [heads[:, :H].transpose(0, 2, 1), heads[:, H:]]


def _halves(tensor: np.ndarray, config: Mapping[str, Any]) -> Sequence[np.ndarray]:
    """Gate and up of a matrix `[2F, D]`, or of those of experts `[E, 2F, D]`."""
    return np.split(tensor, 2, axis=-2)


SINKS = MergedTensor(("blk.{}.attn_sinks.weight",), lambda config, sinks: sinks, lambda t, config: [t])
# Stacked experts [E, D, 2F], gate and up by turns, as [E, F, D] each.
GATE_UP = MergedTensor(
    ("blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight"),
    lambda config, gate, up: (gate[0], gate[2], 2 * gate[1]),
    lambda t, config: t.reshape(*t.shape[:2], -1, 2).transpose(3, 0, 2, 1),  # type: ignore[arg-type,return-value]
)
GATE_UP_BIAS = MergedTensor(
    ("blk.{}.ffn_gate_exps.bias", "blk.{}.ffn_up_exps.bias"),
    lambda config, gate, up: (gate[0], 2 * gate[1]),
    lambda t, config: t.reshape(len(t), -1, 2).transpose(2, 0, 1),  # type: ignore[arg-type,return-value]
)
DOWN = MergedTensor(
    ("blk.{}.ffn_down_exps.weight",), lambda config, s: (s[0], s[2], s[1]), lambda t, config: [t.transpose(0, 2, 1)]
)
DOWN_BIAS = MergedTensor(("blk.{}.ffn_down_exps.bias",), lambda config, bias: bias, lambda t, config: [t])
SHARED_GATE = MergedTensor(("blk.{}.ffn_gate_inp_shexp.weight",), lambda config, gate: (1, *gate), lambda t, config: [t[0]])
CHOICE = MergedTensor(("blk.{}.exp_probs_b.bias",), lambda config, bias: bias, lambda t, config: [t])
CHOICE_ROW = MergedTensor(("blk.{}.exp_probs_b.bias",), lambda config, bias: (1, *bias), lambda t, config: [t[0]])
KEYS_AND_VALUES = MergedTensor(
    ("blk.{}.attn_k_b.weight", "blk.{}.attn_v_b.weight"),
    lambda config, k, v: (k[0] * (k[2] + v[1]), k[1]),
    _keys_and_values,
)


HALVES = MergedTensor(
    ("blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight"),
    lambda config, gate, up: (gate[0], 2 * gate[1], gate[2]),
    _halves,
)
SHARED_HALVES = MergedTensor(
    ("blk.{}.ffn_gate_shexp.weight", "blk.{}.ffn_up_shexp.weight"),
    lambda config, gate, up: (2 * gate[0], gate[1]),
    _halves,
)
DENSE_HALVES = MergedTensor(
    ("blk.{}.ffn_gate.weight", "blk.{}.ffn_up.weight"),
    lambda config, gate, up: (2 * gate[0], gate[1]),
    _halves,
)


def _same(stored: str) -> MergedTensor:
    """A tensor of the same shape under a name with another ending."""
    return MergedTensor((stored,), lambda config, shape: shape, lambda t, config: [t])


SAME = _same("blk.{}.ffn_down_exps.weight")


class Family(NamedTuple):
    """A family of transformers in GGUF.

    Attributes:
      model_type: transformers' name.
      arch: llama.cpp's.
      names: of modules, GGUF's → transformers', with `{}` for the layer and `{e}` for an expert.
      fixed: keys of `config.json` that the architecture takes for granted.
      interleaved: whether heads are stored for rotations of neighbouring numbers.
      shifted: whether norms are stored as 1 + w.
      windows: after how many layers one without a window comes; 0 where llama.cpp has no windows.
      epsilon: the key of `config.json` that is added to a variance; other than rms_norm_eps, that of a layer norm.
      keys: metadata of experts → the keys of `config.json`, their type, and what holds where they are absent (None: nothing).
      joined: tensors of transformers, with `{}` for the layer, that are not those of GGUF under another name.
    """

    model_type: str
    arch: str
    names: Mapping[str, str]
    fixed: Mapping[str, Any]
    interleaved: bool = False
    shifted: bool = False
    windows: int = 0
    epsilon: str = "rms_norm_eps"
    keys: Mapping[str, tuple[str, type[Any], Any]] = {}
    joined: Mapping[str, MergedTensor] = {}


GPT2 = {
    **{"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f"},
    **{"output": "lm_head", "blk.{}.attn_norm": "transformer.h.{}.ln_1", "blk.{}.ffn_norm": "transformer.h.{}.ln_2"},
    **{"blk.{}.attn_qkv": "transformer.h.{}.attn.c_attn", "blk.{}.attn_output": "transformer.h.{}.attn.c_proj"},
    **{"blk.{}.ffn_up": "transformer.h.{}.mlp.c_fc", "blk.{}.ffn_down": "transformer.h.{}.mlp.c_proj"},
}
PHI3 = (
    ENDS
    | BEFORE
    | {
        **{"blk.{}.attn_qkv": LAYER + "self_attn.qkv_proj", "blk.{}.attn_output": LAYER + "self_attn.o_proj"},
        **{"blk.{}.ffn_up": LAYER + "mlp.gate_up_proj", "blk.{}.ffn_down": LAYER + "mlp.down_proj"},
    }
)
SPARSE = _experts("mlp", "gate_proj", "up_proj", "down_proj")
PARTS = ("gate", "up", "down")
SHARED = {f"blk.{{}}.ffn_{part}_shexp": f"{LAYER}mlp.shared_experts.{part}_proj" for part in PARTS}
LATENT = {
    **{name: theirs for name, theirs in SPARSE.items() if name not in ("blk.{}.attn_k", "blk.{}.attn_v")},
    **{"blk.{}.attn_q_a": LAYER + "self_attn.q_a_proj", "blk.{}.attn_q_b": LAYER + "self_attn.q_b_proj"},
    **{"blk.{}.attn_q_a_norm": LAYER + "self_attn.q_a_layernorm", "blk.{}.attn_kv_a_norm": LAYER + "self_attn.kv_a_layernorm"},
    **{"blk.{}.attn_kv_a_mqa": LAYER + "self_attn.kv_a_proj_with_mqa"},
    **MLP,
    **SHARED,
}
ROUTED: dict[str, tuple[str, type[Any], Any]] = {
    "expert_count": ("num_experts", int, None),
    "expert_used_count": ("num_experts_per_tok", int, None),
    "expert_feed_forward_length": ("moe_intermediate_size", int, None),
}
DEEPSEEK = ROUTED | {
    "expert_count": ("n_routed_experts", int, None),
    "expert_shared_count": ("n_shared_experts", int, None),
    "expert_weights_scale": ("routed_scaling_factor", float, 1.0),
    "expert_weights_norm": ("norm_topk_prob", bool, False),
    "leading_dense_block_count": ("first_k_dense_replace", int, 0),
    "expert_group_count": ("n_group", int, 1),
    "expert_group_used_count": ("topk_group", int, 1),
}
SCALES: dict[str, tuple[str, type[Any], Any]] = {
    "logit_scale": ("logits_scaling", float, None),
    "residual_scale": ("residual_multiplier", float, 1.0),
    "embedding_scale": ("embedding_multiplier", float, 1.0),
    "attention.scale": ("attention_multiplier", float, None),
}
GRANITE = {
    **{name: theirs for name, theirs in DENSE.items() if theirs not in MLP.values()},
    "blk.{}.ffn_gate_inp": LAYER + "block_sparse_moe.router.layer",
}
GRANITE_KEYS = SCALES | {
    "expert_count": ("num_local_experts", int, None),
    "expert_used_count": ("num_experts_per_tok", int, None),
}
GRANITE_SHARED = GRANITE | {"blk.{}.ffn_down_shexp": LAYER + "shared_mlp.output_linear"}
GRANITE_SHARED_KEYS = GRANITE_KEYS | {"expert_shared_feed_forward_length": ("shared_intermediate_size", int, None)}
GRANITE_JOINED = {
    LAYER + "block_sparse_moe.input_linear.weight": HALVES,
    LAYER + "block_sparse_moe.output_linear.weight": SAME,
}
SEED_OSS = {name: theirs for name, theirs in DENSE.items() if name != "blk.{}.ffn_norm"}
SEED_OSS |= {"blk.{}.post_attention_norm": LAYER + "post_attention_layernorm"}
ROTATED_HEAD_NORMS = {f"blk.{{}}.attn_{part[0]}_norm": f"{LAYER}self_attn.{part}_layernorm" for part in ("query", "key")}
GLM4 = {
    **{**ENDS, **ATTENTION, **BEFORE},
    **{"blk.{}.ffn_up": LAYER + "mlp.gate_up_proj", "blk.{}.ffn_down": LAYER + "mlp.down_proj"},
    **{"blk.{}.post_attention_norm": LAYER + "post_self_attn_layernorm", "blk.{}.post_ffw_norm": LAYER + "post_mlp_layernorm"},
}
STARCODER2 = {
    **{**ENDS, **ATTENTION, **BEFORE},
    **{"blk.{}.ffn_up": LAYER + "mlp.c_fc", "blk.{}.ffn_down": LAYER + "mlp.c_proj"},
}
ARCEE = {name: theirs for name, theirs in DENSE.items() if name != "blk.{}.ffn_gate"}
OLMO = {name: theirs for name, theirs in (ENDS | ATTENTION | MLP).items() if name != "output_norm"}
CHATGLM = {
    **{**ENDS, **ATTENTION, **BEFORE},
    **{"blk.{}.ffn_up": LAYER + "mlp.gate_up_proj", "blk.{}.ffn_down": LAYER + "mlp.down_proj"},
}
PHI2 = {
    **{**ENDS, **ATTENTION, "output_norm": "model.final_layernorm", "blk.{}.attn_norm": LAYER + "input_layernorm"},
    **{"blk.{}.attn_output": LAYER + "self_attn.dense"},
    **{"blk.{}.ffn_up": LAYER + "mlp.fc1", "blk.{}.ffn_down": LAYER + "mlp.fc2"},
}
GEMMA4 = (
    ENDS
    | ATTENTION
    | BOTH
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
GEMMA4_JOINED = {
    LAYER + "layer_scalar": _same("blk.{}.layer_output_scale.weight"),
    LAYER + "router.scale": _same("blk.{}.ffn_gate_inp.scale"),
    LAYER + "router.per_expert_scale": _same("blk.{}.ffn_down_exps.scale"),
    LAYER + "experts.gate_up_proj": _same("blk.{}.ffn_gate_up_exps.weight"),
    LAYER + "experts.down_proj": SAME,
}
SILU, GELU = {"hidden_act": "silu"}, {"hidden_activation": "gelu_pytorch_tanh"}
NO_BIAS = {"attention_bias": False}
GRANITE_MOE_SHARED = Family(
    "granitemoeshared",
    "granitemoe",
    GRANITE_SHARED,
    SILU | NO_BIAS,
    interleaved=True,
    keys=GRANITE_SHARED_KEYS,
    joined=GRANITE_JOINED | {LAYER + "shared_mlp.input_linear.weight": SHARED_HALVES},
)
# Of several families with one architecture, the first is what a file is read as, unless `gguf_config` says otherwise.
FAMILIES = (
    Family("llama", "llama", DENSE, SILU, interleaved=True),
    Family("mistral", "llama", DENSE, SILU, interleaved=True),
    Family("ministral", "llama", DENSE, SILU, interleaved=True),
    Family("helium", "llama", DENSE, SILU),
    Family("ministral3", "mistral3", DENSE, SILU, interleaved=True),
    Family(
        "mixtral",
        "llama",
        _experts("block_sparse_moe", "w1", "w3", "w2"),
        SILU,
        interleaved=True,
        keys={"expert_count": ("num_local_experts", int, None), "expert_used_count": ("num_experts_per_tok", int, None)},
    ),
    Family("smollm3", "smollm3", DENSE, SILU | {"no_rope_layer_interval": 4}, interleaved=True),
    Family("qwen2", "qwen2", DENSE, SILU),
    Family("qwen3", "qwen3", DENSE | HEAD_NORMS, SILU | NO_BIAS),
    Family(
        "qwen3_moe",
        "qwen3moe",
        _experts("mlp", "gate_proj", "up_proj", "down_proj") | HEAD_NORMS,
        SILU | NO_BIAS | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        keys=ROUTED,
    ),
    Family(
        "qwen2_moe",
        "qwen2moe",
        SPARSE | SHARED | {f"blk.{{}}.ffn_{part}_shexp": f"{LAYER}mlp.shared_expert.{part}_proj" for part in PARTS},
        SILU | {"qkv_bias": True, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        keys=ROUTED | {"expert_shared_feed_forward_length": ("shared_expert_intermediate_size", int, None)},
        joined={f"{LAYER}mlp.shared_expert_gate.weight": SHARED_GATE},
    ),
    Family(
        "olmoe",
        "olmoe",
        SPARSE | HEAD_NORMS,
        SILU | NO_BIAS | {"norm_topk_prob": False},
        keys={"expert_count": ("num_experts", int, None), "expert_used_count": ("num_experts_per_tok", int, None)},
    ),
    Family(
        "gpt_oss",
        "gpt-oss",
        ENDS
        | ATTENTION
        | {
            **{"blk.{}.attn_norm": LAYER + "input_layernorm", "blk.{}.ffn_gate_inp": LAYER + "mlp.router"},
            **{"blk.{}.post_attention_norm": LAYER + "post_attention_layernorm"},
        },
        SILU | {"attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        windows=2,
        keys={
            "expert_count": ("num_local_experts", int, None),
            "expert_used_count": ("num_experts_per_tok", int, None),
            "expert_feed_forward_length": ("intermediate_size", int, None),
        },
        joined={
            f"{LAYER}self_attn.sinks": SINKS,
            f"{LAYER}mlp.experts.gate_up_proj": GATE_UP,
            f"{LAYER}mlp.experts.gate_up_proj_bias": GATE_UP_BIAS,
            f"{LAYER}mlp.experts.down_proj": DOWN,
            f"{LAYER}mlp.experts.down_proj_bias": DOWN_BIAS,
        },
    ),
    Family(
        "deepseek_v2",
        "deepseek2",
        LATENT,
        SILU | NO_BIAS,
        keys={key: value for key, value in DEEPSEEK.items() if key != "expert_weights_norm"},
        joined={f"{LAYER}self_attn.kv_b_proj.weight": KEYS_AND_VALUES},
    ),
    Family(
        "deepseek_v3",
        "deepseek2",
        LATENT,
        SILU | NO_BIAS,
        keys=DEEPSEEK,
        joined={f"{LAYER}self_attn.kv_b_proj.weight": KEYS_AND_VALUES, f"{LAYER}mlp.gate.e_score_correction_bias": CHOICE},
    ),
    Family(
        "dots1",
        "dots1",
        SPARSE | MLP | HEAD_NORMS | SHARED,
        SILU | NO_BIAS | {"sliding_window": None},
        keys=DEEPSEEK,
        joined={f"{LAYER}mlp.gate.e_score_correction_bias": CHOICE},
    ),
    Family(
        "glm4_moe",
        "glm4moe",
        {
            **{name: theirs for name, theirs in SPARSE.items() if name != "blk.{}.ffn_norm"},
            **{"blk.{}.post_attention_norm": LAYER + "post_attention_layernorm"},
            **MLP,
            **HEAD_NORMS,
            **SHARED,
        },
        SILU,
        keys=DEEPSEEK,
        joined={f"{LAYER}mlp.gate.e_score_correction_bias": CHOICE},
    ),
    Family(
        "ernie4_5_moe",
        "ernie4_5-moe",
        SPARSE | MLP | SHARED,
        SILU | {"use_bias": False, "moe_layer_end_index": -1},
        keys={
            "expert_count": ("moe_num_experts", int, None),
            "expert_used_count": ("moe_k", int, None),
            "expert_feed_forward_length": ("moe_intermediate_size", int, None),
            "expert_shared_count": ("moe_num_shared_experts", int, 0),
            "leading_dense_block_count": ("moe_layer_start_index", int, 0),
            "interleave_moe_layer_step": ("moe_layer_interval", int, None),
        },
        joined={f"{LAYER}mlp.moe_statics.e_score_correction_bias": CHOICE_ROW},
    ),
    Family("gemma", "gemma", TIED | ATTENTION | BEFORE | MLP, {"hidden_act": "gelu_pytorch_tanh"} | NO_BIAS, shifted=True),
    Family("seed_oss", "seed_oss", SEED_OSS, SILU | {"attention_out_bias": False, "mlp_bias": False}),
    Family("ernie4_5", "ernie4_5", DENSE, SILU | {"use_bias": False}),
    Family("hunyuan_v1_dense", "hunyuan-dense", DENSE | ROTATED_HEAD_NORMS, SILU | NO_BIAS),
    Family("glm", "chatglm", CHATGLM, SILU),
    Family("glm4", "glm4", GLM4, SILU),
    Family("stablelm", "stablelm", DENSE, SILU, epsilon="layer_norm_eps"),
    Family("phi", "phi2", PHI2, {"hidden_act": "gelu_new"}, epsilon="layer_norm_eps"),
    Family(
        "starcoder2",
        "starcoder2",
        STARCODER2,
        {"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": None},
        epsilon="norm_epsilon",
    ),
    Family(
        "cohere",
        "command-r",
        TIED | ATTENTION | MLP | {"blk.{}.attn_norm": LAYER + "input_layernorm"},
        SILU | NO_BIAS,
        epsilon="layer_norm_eps",
        keys={"logit_scale": ("logit_scale", float, None)},
    ),
    Family(
        "cohere2",
        "cohere2",
        TIED | ATTENTION | MLP | {"blk.{}.attn_norm": LAYER + "input_layernorm"},
        SILU | NO_BIAS,
        windows=4,
        epsilon="layer_norm_eps",
        keys={"logit_scale": ("logit_scale", float, None)},
    ),
    Family("arcee", "arcee", ARCEE, {"hidden_act": "relu2", "mlp_bias": False} | NO_BIAS, interleaved=True),
    Family("exaone4", "exaone4", ENDS | ATTENTION | BEHIND | MLP | HEAD_NORMS, SILU),
    Family("gemma2", "gemma2", TIED | ATTENTION | BOTH | MLP, GELU | NO_BIAS, shifted=True, windows=2),
    Family("gemma3_text", "gemma3", ENDS | ATTENTION | BOTH | MLP | HEAD_NORMS, GELU | NO_BIAS, shifted=True, windows=6),
    Family("gemma4_text", "gemma4", GEMMA4, GELU | NO_BIAS, windows=6, joined=GEMMA4_JOINED),
    Family("phi3", "phi3", PHI3, SILU),
    Family("olmo", "olmo", OLMO, SILU | NO_BIAS, interleaved=True, epsilon="layer_norm_eps"),
    Family("olmo2", "olmo2", ENDS | ATTENTION | BEHIND | MLP | HEAD_NORMS, SILU | NO_BIAS),
    Family("olmo3", "olmo2", ENDS | ATTENTION | BEHIND | MLP | HEAD_NORMS, SILU | NO_BIAS, windows=4),
    Family("granite", "granite", DENSE, SILU, interleaved=True, keys=SCALES),
    Family(
        "granitemoehybrid",
        "granite",
        {name: theirs for name, theirs in DENSE.items() if theirs not in MLP.values()}
        | {"blk.{}.ffn_down": LAYER + "shared_mlp.output_linear"},
        SILU | {"num_local_experts": 0, "position_embedding_type": None, "mamba_n_heads": 1},
        interleaved=True,
        keys=SCALES | {"feed_forward_length": ("shared_intermediate_size", int, None)},
        joined={LAYER + "shared_mlp.input_linear.weight": DENSE_HALVES},
    ),
    Family(
        "granitemoe",
        "granitemoe",
        GRANITE,
        SILU | NO_BIAS,
        interleaved=True,
        keys=GRANITE_KEYS,
        joined=GRANITE_JOINED,
    ),
    GRANITE_MOE_SHARED,
    GRANITE_MOE_SHARED._replace(model_type="granitemoehybrid"),
    Family("gpt2", "gpt2", GPT2, {"activation_function": "gelu_new"}),
)
