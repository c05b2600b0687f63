"""Tensor names of Hugging Face checkpoints, and the parameter that contains each tensor.

Axes: V vocabulary, D model, K key heads, G query heads per key head, H head size, F feed-forward, C
gate and up, P positions, E experts, N heads of latent attention, R rank of a latent vector, L
layers, O one.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

WHOLE = np.s_[...]


class Axes(NamedTuple):
    """The axes of a transformers tensor, and of the part of a DantinoX parameter that holds the
    same values.

    Attributes:
      parameter: the axes of this part of the parameter.
      tensor: the same axes in the tensor's order, separated by spaces. Axes without a space between
        them are merged into one axis of the tensor.
      index: the index of the part in the parameter, or in the parameter of one expert.
    """

    parameter: str
    tensor: str
    index: Any = WHOLE

    def view(self, parameter: np.ndarray) -> np.ndarray:
        """Returns a view of this part of a parameter. Its axes are in the tensor's order, but not
        yet merged.
        """
        axes = self.tensor.replace(" ", "")
        return parameter[self.index].transpose([self.parameter.index(axis) for axis in axes])

    def shape(self, view: np.ndarray) -> tuple[int, ...]:
        """Returns the shape of the tensor with this `view`."""
        sizes = iter(view.shape)
        return tuple(math.prod(next(sizes) for _ in axes) for axes in self.tensor.split())


class Row(NamedTuple):
    """A tensor and the parameter that contains it.

    Attributes:
      tensor: the name of the tensor, with `{i}` for the layer index and `{e}` for the expert index.
      parameter: the path of the parameter, with `{i}` for the index of a layer.
      parts: the parts of the parameter that the tensor concatenates along its first axis.
      condition: the path of a parameter. The row applies only if this parameter exists (with a
        leading `!`: does not).
      kv_projections: the row applies to layers that project both keys and values (2), only keys
        (1), or neither (0).
    """

    tensor: str
    parameter: str
    parts: tuple[Axes, ...]
    condition: str = ""
    kv_projections: int | None = None


def rows(
    prefix: str, tensors: Mapping[str, tuple[str, Axes | list[Axes]]], path: str = ""
) -> tuple[Row, ...]:
    """Returns rows for these tensors; `prefix` precedes the tensor names, and `path` precedes the
    parameter paths.
    """
    return tuple(
        Row(
            prefix + tensor, path + parameter, tuple(parts) if isinstance(parts, list) else (parts,)
        )
        for tensor, (parameter, parts) in tensors.items()
    )


# Axes that several tensors have. In `qkv`, the third axis has the query heads of a key head, then
# the key, then the value. In `gate_up`, the second axis has the gate and the up projection.
VECTOR, TABLE, HEAD = Axes("D", "D"), Axes("VD", "V D"), Axes("DV", "V D")
QUERY, QUERY_BIAS = Axes("DKGH", "KGH D", np.s_[:, :, :-2]), Axes("KGH", "KGH", np.s_[:, :-2])
KEY, KEY_BIAS = Axes("DKH", "KH D", np.s_[:, :, -2]), Axes("KH", "KH", np.s_[:, -2])
VALUE, VALUE_BIAS = Axes("DKH", "KH D", np.s_[:, :, -1]), Axes("KH", "KH", np.s_[:, -1])
GATE, UP, DOWN = Axes("DF", "F D", np.s_[:, 0]), Axes("DF", "F D", np.s_[:, 1]), Axes("FD", "D F")
LAYER, BLOCK = "model.layers.{i}.", "blocks/{i}/"  # prefixes of tensor names and of parameter paths

EMBEDDINGS_AND_HEAD = rows("", {
    "model.embed_tokens.weight": ("embed", TABLE),
    "model.norm.weight": ("norm_f/scale", VECTOR),
    "lm_head.weight": ("head/kernel", HEAD),
})  # fmt: skip
ATTENTION = rows(LAYER + "self_attn.", {
    "q_proj.weight": ("qkv/kernel", QUERY),
    "k_proj.weight": ("qkv/kernel", KEY),
    "v_proj.weight": ("qkv/kernel", VALUE),
    "q_proj.bias": ("qkv/bias", QUERY_BIAS),
    "k_proj.bias": ("qkv/bias", KEY_BIAS),
    "v_proj.bias": ("qkv/bias", VALUE_BIAS),
    "o_proj.weight": ("out/kernel", Axes("KGHD", "D KGH")),
    "o_proj.bias": ("out/bias", VECTOR),
}, BLOCK + "attention/")  # fmt: skip
FEED_FORWARD = rows(LAYER + "mlp.", {
    "gate_proj.weight": ("gate_up/kernel", GATE),
    "gate_proj.bias": ("gate_up/bias", Axes("F", "F", np.s_[0])),
    "up_proj.weight": ("gate_up/kernel", UP),
    "up_proj.bias": ("gate_up/bias", Axes("F", "F", np.s_[1])),
    "down_proj.weight": ("down/kernel", DOWN), "down_proj.bias": ("down/bias", VECTOR),
}, BLOCK + "ffn/")  # fmt: skip
NORMS_BEFORE = rows(LAYER, {
    "input_layernorm.weight": ("norm1/scale", VECTOR),
    "post_attention_layernorm.weight": ("norm2/scale", VECTOR),
}, BLOCK)  # fmt: skip
NORMS_AFTER = rows(LAYER, {
    "post_attention_layernorm.weight": ("post_norm1/scale", VECTOR),
    "post_feedforward_layernorm.weight": ("post_norm2/scale", VECTOR),
}, BLOCK)  # fmt: skip
NORMS_BOTH = NORMS_AFTER + rows(LAYER, {
    "input_layernorm.weight": ("norm1/scale", VECTOR),
    "pre_feedforward_layernorm.weight": ("norm2/scale", VECTOR),
}, BLOCK)  # fmt: skip
HEAD_NORMS = rows(LAYER + "self_attn.", {
    "q_norm.weight": ("q_norm/scale", Axes("H", "H")),
    "k_norm.weight": ("k_norm/scale", Axes("H", "H")),
}, BLOCK + "attention/")  # fmt: skip
WHOLE_LAYER_NORMS = rows(LAYER + "self_attn.", {
    "q_norm.weight": ("q_norm/scale", Axes("KGH", "KGH")),
    "k_norm.weight": ("k_norm/scale", Axes("KH", "KH")),
}, BLOCK + "attention/")  # fmt: skip
FUSED_PROJECTIONS = rows(LAYER, {
    "self_attn.qkv_proj.weight": ("attention/qkv/kernel", [QUERY, KEY, VALUE]),
    "self_attn.o_proj.weight": ("attention/out/kernel", Axes("KGHD", "D KGH")),
    "mlp.gate_up_proj.weight": ("ffn/gate_up/kernel", Axes("DCF", "CF D")),
    "mlp.down_proj.weight": ("ffn/down/kernel", DOWN),
}, BLOCK)  # fmt: skip


# Latent attention projects queries either from the residual stream, or from a latent vector of
# their own.
LATENT_QUERIES = (
    Row(LAYER + "self_attn.q_proj.weight", BLOCK + "attention/q/kernel", (Axes("DNH", "NH D"),),
        condition=f"!{BLOCK}attention/q_a/kernel"),
    Row(LAYER + "self_attn.q_b_proj.weight", BLOCK + "attention/q/kernel", (Axes("DNH", "NH D"),),
        condition=f"{BLOCK}attention/q_a/kernel"),
)  # fmt: skip
LATENT_ATTENTION = rows(LAYER + "self_attn.", {
    "kv_a_proj_with_mqa.weight": ("kv_a/kernel", Axes("DR", "R D")),
    "kv_a_layernorm.weight": ("kv_norm/scale", VECTOR),
    "kv_b_proj.weight": ("kv_b/kernel", Axes("RNH", "NH R")),
    "o_proj.weight": ("out/kernel", Axes("NHD", "D NH")),
    "q_a_proj.weight": ("q_a/kernel", Axes("DR", "R D")),
    "q_a_layernorm.weight": ("q_norm/scale", VECTOR),
}, BLOCK + "attention/") + LATENT_QUERIES  # fmt: skip
GPT_OSS = rows(LAYER, {
    "self_attn.sinks": ("attention/sinks", Axes("KG", "KG")),
    "mlp.router.weight": ("ffn/router/kernel", Axes("DE", "E D")),
    "mlp.router.bias": ("ffn/router/logit_bias", Axes("E", "E")),
    "mlp.experts.gate_up_proj": ("ffn/experts/gate_up/kernel", Axes("EDCF", "E D FC")),
    "mlp.experts.gate_up_proj_bias": ("ffn/experts/gate_up/bias", Axes("ECF", "E FC")),
    "mlp.experts.down_proj": ("ffn/experts/down/kernel", Axes("EFD", "E F D")),
    "mlp.experts.down_proj_bias": ("ffn/experts/down/bias", Axes("ED", "E D")),
}, BLOCK)  # fmt: skip


def shared_rows(module: str) -> tuple[Row, ...]:
    """Returns the rows of a shared expert."""
    names = {
        "gate_proj": ("gate_up/kernel", GATE),
        "up_proj": ("gate_up/kernel", UP),
        "down_proj": ("down/kernel", DOWN),
    }
    return rows(
        LAYER + f"mlp.{module}.",
        {f"{name}.weight": target for name, target in names.items()},
        BLOCK + "ffn/shared/",
    )


def expert_rows(module: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Returns the rows of a router and its experts, each stored as separate tensors."""
    return rows(LAYER + module, {
        ".gate.weight": ("router/kernel", Axes("DE", "E D")),
        f".experts.{{e}}.{gate}.weight": ("experts/gate_up/kernel", GATE),
        f".experts.{{e}}.{up}.weight": ("experts/gate_up/kernel", UP),
        f".experts.{{e}}.{down}.weight": ("experts/down/kernel", DOWN),
    }, BLOCK + "ffn/")  # fmt: skip


ROUTED_EXPERTS = expert_rows("mlp", "gate_proj", "up_proj", "down_proj")
SCORE_CORRECTION_BIAS = rows(
    LAYER, {"mlp.gate.e_score_correction_bias": ("ffn/router/bias", Axes("E", "E"))}, BLOCK
)
ERNIE_CORRECTION_BIAS = rows(
    LAYER,
    {
        "mlp.moe_statics.e_score_correction_bias": (
            "ffn/router/bias",
            Axes("OE", "O E", np.s_[None]),
        )
    },
    BLOCK,
)
DEEPSEEK_MLP = ROUTED_EXPERTS + FEED_FORWARD + shared_rows("shared_experts")

GRANITE_EXPERTS = rows(LAYER + "block_sparse_moe.", {
    "router.layer.weight": ("router/kernel", Axes("DE", "E D")),
    "input_linear.weight": ("experts/gate_up/kernel", Axes("EDCF", "E CF D")),
    "output_linear.weight": ("experts/down/kernel", Axes("EFD", "E D F")),
}, BLOCK + "ffn/")  # fmt: skip
# The shared expert. In a model without routed experts, it is the whole feed-forward layer.
GRANITE_SHARED = tuple(
    row for module in ("ffn/shared/", "ffn/") for row in rows(LAYER + "shared_mlp.", {
        "input_linear.weight": ("gate_up/kernel", Axes("DCF", "CF D")),
        "output_linear.weight": ("down/kernel", DOWN),
    }, BLOCK + module)
)  # fmt: skip

# GPT-2's projections are stored [in, out].
GPT2 = rows("transformer.", {
    "wte.weight": ("embed", TABLE), "wpe.weight": ("position_embed", Axes("PD", "P D")),
    "ln_f.weight": ("norm_f/scale", VECTOR), "ln_f.bias": ("norm_f/bias", VECTOR),
}) + rows("", {"lm_head.weight": ("head/kernel", HEAD)}) + rows("transformer.h.{i}.", {
    "ln_1.weight": ("norm1/scale", VECTOR), "ln_1.bias": ("norm1/bias", VECTOR),
    "ln_2.weight": ("norm2/scale", VECTOR), "ln_2.bias": ("norm2/bias", VECTOR),
    "attn.c_attn.weight": ("attention/qkv/kernel", Axes("DKCH", "D CKH")),
    "attn.c_attn.bias": ("attention/qkv/bias", Axes("KCH", "CKH")),
    "attn.c_proj.weight": ("attention/out/kernel", Axes("KGHD", "KGH D")),
    "attn.c_proj.bias": ("attention/out/bias", VECTOR),
    "mlp.c_fc.weight": ("ffn/up/kernel", Axes("DF", "D F")),
    "mlp.c_fc.bias": ("ffn/up/bias", Axes("F", "F")),
    "mlp.c_proj.weight": ("ffn/down/kernel", Axes("FD", "F D")),
    "mlp.c_proj.bias": ("ffn/down/bias", VECTOR),
}, BLOCK)  # fmt: skip

NORM_BIASES = rows(LAYER, {
    "input_layernorm.bias": ("norm1/bias", VECTOR),
    "post_attention_layernorm.bias": ("norm2/bias", VECTOR),
}, BLOCK) + rows("", {"model.norm.bias": ("norm_f/bias", VECTOR)})  # fmt: skip
HEAD_NORMS_AFTER_ROPE = rows(LAYER + "self_attn.", {
    "query_layernorm.weight": ("q_norm/scale", Axes("H", "H")),
    "key_layernorm.weight": ("k_norm/scale", Axes("H", "H")),
}, BLOCK + "attention/")  # fmt: skip
FUSED_MLP = rows(LAYER + "mlp.", {
    "gate_up_proj.weight": ("gate_up/kernel", Axes("DCF", "CF D")),
    "down_proj.weight": ("down/kernel", DOWN),
}, BLOCK + "ffn/")  # fmt: skip
NORMS_GLM4 = NORMS_BEFORE + rows(LAYER, {
    "post_self_attn_layernorm.weight": ("post_norm1/scale", VECTOR),
    "post_mlp_layernorm.weight": ("post_norm2/scale", VECTOR),
}, BLOCK)  # fmt: skip


def _projections(kv_projections: int) -> tuple[Row, ...]:
    """Returns the rows of layers that project keys and values (2), only keys (1), or neither
    (0).
    """
    queries = -kv_projections or None  # the end of the query heads
    tensors: dict[str, tuple[str, Axes | list[Axes]]] = {
        "q_proj.weight": ("kernel", Axes("DKGH", "KGH D", np.s_[:, :, :queries])),
        "q_proj.bias": ("bias", Axes("KGH", "KGH", np.s_[:, :queries])),
    }
    if kv_projections:
        tensors["k_proj.weight"] = "kernel", Axes("DKH", "KH D", np.s_[:, :, queries])
        tensors["k_proj.bias"] = "bias", Axes("KH", "KH", np.s_[:, queries])
    if kv_projections == 2:
        tensors["v_proj.weight"] = "kernel", VALUE
        tensors["v_proj.bias"] = "bias", VALUE_BIAS
    found = rows(LAYER + "self_attn.", tensors, BLOCK + "attention/qkv/")
    return tuple(row._replace(kv_projections=kv_projections) for row in found)


# Layers that project keys and values, layers that use their keys as values, and layers that read
# another layer's cache.
GEMMA4_ATTENTION = rows(LAYER + "self_attn.", {
    "o_proj.weight": ("out/kernel", Axes("KGHD", "D KGH")), "o_proj.bias": ("out/bias", VECTOR),
}, BLOCK + "attention/") + _projections(2) + _projections(1) + _projections(0)  # fmt: skip
GEMMA4_EXPERTS = rows(LAYER, {
    "router.proj.weight": ("router/kernel", Axes("DE", "E D")),
    "router.scale": ("router/scale", VECTOR),
    "router.per_expert_scale": ("router/expert_scale", Axes("E", "E")),
    "experts.gate_up_proj": ("experts/gate_up/kernel", Axes("EDCF", "E CF D")),
    "experts.down_proj": ("experts/down/kernel", Axes("EFD", "E D F")),
    "mlp.gate_proj.weight": ("shared/gate_up/kernel", GATE),
    "mlp.up_proj.weight": ("shared/gate_up/kernel", UP),
    "mlp.down_proj.weight": ("shared/down/kernel", DOWN),
    "pre_feedforward_layernorm.weight": ("shared_norm/scale", VECTOR),
    "post_feedforward_layernorm_1.weight": ("shared_post_norm/scale", VECTOR),
    "pre_feedforward_layernorm_2.weight": ("experts_norm/scale", VECTOR),
    "post_feedforward_layernorm_2.weight": ("experts_post_norm/scale", VECTOR),
}, BLOCK + "ffn/")  # fmt: skip
PER_LAYER_EMBEDDINGS = rows("model.", {
    "embed_tokens_per_layer.weight": ("embed", Axes("VLP", "V LP")),
    "per_layer_model_projection.weight": ("projection/kernel", Axes("DLP", "LP D")),
    "per_layer_projection_norm.weight": ("norm/scale", Axes("P", "P")),
}, "per_layer/") + rows(LAYER, {
    "per_layer_input_gate.weight": ("layer_input/gate/kernel", Axes("DP", "P D")),
    "per_layer_projection.weight": ("layer_input/out/kernel", Axes("PD", "D P")),
    "post_per_layer_input_norm.weight": ("layer_input/norm/scale", VECTOR),
    "layer_scalar": ("layer_scalar", Axes("O", "O")),
}, BLOCK)  # fmt: skip


def plain_mlp(up: str, down: str) -> tuple[Row, ...]:
    """Returns the rows of a feed-forward layer without a gate."""
    return rows(LAYER + "mlp.", {
        f"{up}.weight": ("up/kernel", Axes("DF", "F D")), f"{up}.bias": ("up/bias", Axes("F", "F")),
        f"{down}.weight": ("down/kernel", DOWN), f"{down}.bias": ("down/bias", VECTOR),
    }, BLOCK + "ffn/")  # fmt: skip


def sub_norms(attention: str, feed_forward: str) -> tuple[Row, ...]:
    """Returns the rows of the norms before the output projections of attention and feed-forward."""
    return rows(LAYER, {
        f"self_attn.{attention}.weight": ("attention/out_norm/scale", Axes("KGH", "KGH")),
        f"mlp.{feed_forward}.weight": ("ffn/down_norm/scale", Axes("F", "F")),
    }, BLOCK)  # fmt: skip


def rename_modules(table: tuple[Row, ...], names: Mapping[str, str]) -> tuple[Row, ...]:
    """Returns the rows with other names for some modules; `names` maps parts of tensor names to new
    ones.
    """

    def rename(tensor: str) -> str:
        for old, new in names.items():
            tensor = tensor.replace(old, new)
        return tensor

    return tuple(row._replace(tensor=rename(row.tensor)) for row in table)
