"""Tensor names of GGUF files, with those of transformers, and tensors that the two store in
different shapes.

In names, `{}` stands for the index of a layer and `{e}` for the index of an expert.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dantinox.interop.hf.hf_family import without

LAYER = "model.layers.{}."
EMBEDDINGS_AND_HEAD = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
TIED_EMBEDDINGS = without(EMBEDDINGS_AND_HEAD, "output")
ATTENTION = {
    "blk.{}.attn_q": LAYER + "self_attn.q_proj",
    "blk.{}.attn_k": LAYER + "self_attn.k_proj",
    "blk.{}.attn_v": LAYER + "self_attn.v_proj",
    "blk.{}.attn_output": LAYER + "self_attn.o_proj",
}
HEAD_NORMS = {
    "blk.{}.attn_q_norm": LAYER + "self_attn.q_norm",
    "blk.{}.attn_k_norm": LAYER + "self_attn.k_norm",
}
HEAD_NORMS_AFTER_ROPE = {
    "blk.{}.attn_q_norm": LAYER + "self_attn.query_layernorm",
    "blk.{}.attn_k_norm": LAYER + "self_attn.key_layernorm",
}
MLP = {
    "blk.{}.ffn_gate": LAYER + "mlp.gate_proj",
    "blk.{}.ffn_up": LAYER + "mlp.up_proj",
    "blk.{}.ffn_down": LAYER + "mlp.down_proj",
}
FUSED_MLP = {
    "blk.{}.ffn_up": LAYER + "mlp.gate_up_proj",
    "blk.{}.ffn_down": LAYER + "mlp.down_proj",
}
NORMS_BEFORE = {
    "blk.{}.attn_norm": LAYER + "input_layernorm",
    "blk.{}.ffn_norm": LAYER + "post_attention_layernorm",
}
NORMS_AFTER = {
    "blk.{}.post_attention_norm": LAYER + "post_attention_layernorm",
    "blk.{}.post_ffw_norm": LAYER + "post_feedforward_layernorm",
}
NORMS_BOTH = NORMS_AFTER | {
    "blk.{}.attn_norm": LAYER + "input_layernorm",
    "blk.{}.ffn_norm": LAYER + "pre_feedforward_layernorm",
}
DENSE = EMBEDDINGS_AND_HEAD | ATTENTION | NORMS_BEFORE | MLP


def expert_names(module: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Returns the names of a model with routed experts, which GGUF stacks in one tensor per
    projection.
    """
    return EMBEDDINGS_AND_HEAD | ATTENTION | NORMS_BEFORE | {
        "blk.{}.ffn_gate_exps": f"{LAYER}{module}.experts.{{e}}.{gate}",
        "blk.{}.ffn_up_exps": f"{LAYER}{module}.experts.{{e}}.{up}",
        "blk.{}.ffn_down_exps": f"{LAYER}{module}.experts.{{e}}.{down}",
        "blk.{}.ffn_gate_inp": f"{LAYER}{module}.gate",
    }  # fmt: skip


def shared_expert_names(module: str) -> dict[str, str]:
    """Returns the names of the projections of a shared expert."""
    return {
        "blk.{}.ffn_gate_shexp": f"{LAYER}mlp.{module}.gate_proj",
        "blk.{}.ffn_up_shexp": f"{LAYER}mlp.{module}.up_proj",
        "blk.{}.ffn_down_shexp": f"{LAYER}mlp.{module}.down_proj",
    }


def sub_norms(attention: str, feed_forward: str) -> dict[str, str]:
    """Returns the names of the norms before the output projections, with those of transformers in
    this family.
    """
    return {
        "blk.{}.attn_sub_norm": f"{LAYER}self_attn.{attention}",
        "blk.{}.ffn_sub_norm": f"{LAYER}mlp.{feed_forward}",
    }


MOE = expert_names("mlp", "gate_proj", "up_proj", "down_proj")
SHARED_EXPERTS = shared_expert_names("shared_experts")
GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.{}.attn_norm": "transformer.h.{}.ln_1",
    "blk.{}.ffn_norm": "transformer.h.{}.ln_2",
    "blk.{}.attn_qkv": "transformer.h.{}.attn.c_attn",
    "blk.{}.attn_output": "transformer.h.{}.attn.c_proj",
    "blk.{}.ffn_up": "transformer.h.{}.mlp.c_fc",
    "blk.{}.ffn_down": "transformer.h.{}.mlp.c_proj",
}
FUSED_QKV = {
    "blk.{}.attn_qkv": LAYER + "self_attn.qkv_proj",
    "blk.{}.attn_output": LAYER + "self_attn.o_proj",
}
PHI3 = EMBEDDINGS_AND_HEAD | NORMS_BEFORE | FUSED_QKV | FUSED_MLP
LATENT_PROJECTIONS = {
    "blk.{}.attn_q_a": LAYER + "self_attn.q_a_proj",
    "blk.{}.attn_q_b": LAYER + "self_attn.q_b_proj",
    "blk.{}.attn_q_a_norm": LAYER + "self_attn.q_a_layernorm",
    "blk.{}.attn_kv_a_norm": LAYER + "self_attn.kv_a_layernorm",
    "blk.{}.attn_kv_a_mqa": LAYER + "self_attn.kv_a_proj_with_mqa",
}
LATENT_ATTENTION = (
    without(MOE, "blk.{}.attn_k", "blk.{}.attn_v") | LATENT_PROJECTIONS | MLP | SHARED_EXPERTS
)
GRANITE = without(DENSE, *MLP) | {"blk.{}.ffn_gate_inp": LAYER + "block_sparse_moe.router.layer"}
GRANITE_HYBRID = without(DENSE, *MLP) | {"blk.{}.ffn_down": LAYER + "shared_mlp.output_linear"}
GRANITE_SHARED = GRANITE | {"blk.{}.ffn_down_shexp": LAYER + "shared_mlp.output_linear"}
SEED_OSS = without(DENSE, "blk.{}.ffn_norm") | {
    "blk.{}.post_attention_norm": LAYER + "post_attention_layernorm",
}
CHATGLM = EMBEDDINGS_AND_HEAD | ATTENTION | NORMS_BEFORE | FUSED_MLP
GLM4 = CHATGLM | {
    "blk.{}.post_attention_norm": LAYER + "post_self_attn_layernorm",
    "blk.{}.post_ffw_norm": LAYER + "post_mlp_layernorm",
}
GLM4_MOE = MLP | HEAD_NORMS | SHARED_EXPERTS | without(MOE, "blk.{}.ffn_norm") | {
    "blk.{}.post_attention_norm": LAYER + "post_attention_layernorm",
}  # fmt: skip
STARCODER2 = EMBEDDINGS_AND_HEAD | ATTENTION | NORMS_BEFORE | {
    "blk.{}.ffn_up": LAYER + "mlp.c_fc",
    "blk.{}.ffn_down": LAYER + "mlp.c_proj",
}  # fmt: skip
ARCEE = without(DENSE, "blk.{}.ffn_gate")
OLMO = without(EMBEDDINGS_AND_HEAD | ATTENTION | MLP, "output_norm")
PHI2 = EMBEDDINGS_AND_HEAD | ATTENTION | {
    "output_norm": "model.final_layernorm",
    "blk.{}.attn_norm": LAYER + "input_layernorm",
    "blk.{}.attn_output": LAYER + "self_attn.dense",
    "blk.{}.ffn_up": LAYER + "mlp.fc1",
    "blk.{}.ffn_down": LAYER + "mlp.fc2",
}  # fmt: skip
COHERE = TIED_EMBEDDINGS | ATTENTION | MLP | {"blk.{}.attn_norm": LAYER + "input_layernorm"}
GPT_OSS = EMBEDDINGS_AND_HEAD | ATTENTION | {
    "blk.{}.attn_norm": LAYER + "input_layernorm",
    "blk.{}.post_attention_norm": LAYER + "post_attention_layernorm",
    "blk.{}.ffn_gate_inp": LAYER + "mlp.router",
}  # fmt: skip
GEMMA4 = EMBEDDINGS_AND_HEAD | ATTENTION | NORMS_BOTH | MLP | HEAD_NORMS | {
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
}  # fmt: skip
# llama.cpp always uses the embeddings as output layer.
BITNET_DENSE = TIED_EMBEDDINGS | ATTENTION | NORMS_BEFORE | MLP


class MergedTensor(NamedTuple):
    """A tensor of transformers that GGUF stores differently: with another name or axis order, or
    split into several tensors.

    Attributes:
      stored: the names of the tensors in GGUF, with `{}` for the layer index.
      shape: a function that takes `config.json` and the shapes in GGUF, and returns the shape in
        transformers.
      parts: a function that takes the tensor and `config.json`, and returns one view per GGUF
        tensor, in GGUF's axis order.
    """

    stored: tuple[str, ...]
    shape: Callable[..., tuple[int, ...]]
    parts: Callable[[np.ndarray, Mapping[str, Any]], Sequence[np.ndarray]]


def _rename_tensor(stored: str) -> MergedTensor:
    """Returns the entry of a tensor that has another name in GGUF and the same shape."""
    return MergedTensor((stored,), lambda config, shape: shape, lambda tensor, config: [tensor])


def _add_row_axis(stored: str) -> MergedTensor:
    """Returns the entry of a vector that transformers stores as a matrix with one row."""
    return MergedTensor(
        (stored,), lambda config, shape: (1, *shape), lambda tensor, config: [tensor[0]]
    )


def _split_gate_up(tensor: np.ndarray, config: Mapping[str, Any]) -> Sequence[np.ndarray]:
    """Splits a matrix `[2F, D]`, or the matrices of experts `[E, 2F, D]`, into gate and up."""
    return np.split(tensor, 2, axis=-2)


def _join_gate_up(gate: str, up: str) -> MergedTensor:
    """Returns the entry of a matrix `[2F, D]` that GGUF stores as gate and up."""
    return MergedTensor((gate, up), lambda config, gate, up: (2 * gate[0], gate[1]), _split_gate_up)


def _split_latent_kv(tensor: np.ndarray, config: Mapping[str, Any]) -> list[np.ndarray]:
    """Splits the matrix that projects a latent vector to keys and values: `[N (H+V), R]` →
    `[N, R, H]` and `[N, V, R]`.
    """
    heads = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[1])
    H = config["qk_nope_head_dim"]
    return [heads[:, :H].transpose(0, 2, 1), heads[:, H:]]


def _split_interleaved(tensor: np.ndarray, config: Mapping[str, Any]) -> Sequence[np.ndarray]:
    """Splits experts `[E, D, 2F]`, in which gate and up alternate, into gate and up `[E, F, D]`."""
    parts = tensor.reshape(*tensor.shape[:2], -1, 2).transpose(3, 0, 2, 1)
    return [parts[0], parts[1]]


def _split_interleaved_bias(tensor: np.ndarray, config: Mapping[str, Any]) -> Sequence[np.ndarray]:
    """Splits biases `[E, 2F]`, in which gate and up alternate, into gate and up `[E, F]`."""
    return [tensor[:, 0::2], tensor[:, 1::2]]


SINK_LOGITS = _rename_tensor("blk.{}.attn_sinks.weight")
INTERLEAVED_GATE_UP = MergedTensor(
    ("blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight"),
    lambda config, gate, up: (gate[0], gate[2], 2 * gate[1]),
    _split_interleaved,
)
INTERLEAVED_GATE_UP_BIAS = MergedTensor(
    ("blk.{}.ffn_gate_exps.bias", "blk.{}.ffn_up_exps.bias"),
    lambda config, gate, up: (gate[0], 2 * gate[1]),
    _split_interleaved_bias,
)
TRANSPOSED_DOWN = MergedTensor(
    ("blk.{}.ffn_down_exps.weight",),
    lambda config, down: (down[0], down[2], down[1]),
    lambda tensor, config: [tensor.transpose(0, 2, 1)],
)
EXPERT_DOWN_BIAS = _rename_tensor("blk.{}.ffn_down_exps.bias")
SHARED_GATE = _add_row_axis("blk.{}.ffn_gate_inp_shexp.weight")
SCORE_CORRECTION_BIAS = _rename_tensor("blk.{}.exp_probs_b.bias")
SCORE_CORRECTION_BIAS_ROW = _add_row_axis("blk.{}.exp_probs_b.bias")
LATENT_KV = MergedTensor(
    ("blk.{}.attn_k_b.weight", "blk.{}.attn_v_b.weight"),
    lambda config, keys, values: (keys[0] * (keys[2] + values[1]), keys[1]),
    _split_latent_kv,
)
EXPERT_GATE_UP = MergedTensor(
    ("blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight"),
    lambda config, gate, up: (gate[0], 2 * gate[1], gate[2]),
    _split_gate_up,
)
SHARED_GATE_UP = _join_gate_up("blk.{}.ffn_gate_shexp.weight", "blk.{}.ffn_up_shexp.weight")
DENSE_GATE_UP = _join_gate_up("blk.{}.ffn_gate.weight", "blk.{}.ffn_up.weight")
EXPERT_DOWN = _rename_tensor("blk.{}.ffn_down_exps.weight")
GRANITE_MERGED = {
    LAYER + "block_sparse_moe.input_linear.weight": EXPERT_GATE_UP,
    LAYER + "block_sparse_moe.output_linear.weight": EXPERT_DOWN,
}
GEMMA4_MERGED = {
    LAYER + "layer_scalar": _rename_tensor("blk.{}.layer_output_scale.weight"),
    LAYER + "router.scale": _rename_tensor("blk.{}.ffn_gate_inp.scale"),
    LAYER + "router.per_expert_scale": _rename_tensor("blk.{}.ffn_down_exps.scale"),
    LAYER + "experts.gate_up_proj": _rename_tensor("blk.{}.ffn_gate_up_exps.weight"),
    LAYER + "experts.down_proj": EXPERT_DOWN,
}
