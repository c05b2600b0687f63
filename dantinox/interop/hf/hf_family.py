"""`Family`, a row of the tables of Hugging Face model families, and the settings that several
families share.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dantinox.interop.hf.hf_tensors import Row

# The names of activations in transformers, and in DantinoX for layers with and without a gate.
GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "gelu_fast": "geglu"}
UNGATED = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "relu2": "relu2"}
# For keys whose value differs from that of the setting: the function that converts key to setting,
# and its inverse.
CONVERSIONS: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "logit_scale": (lambda factor: 1 / factor, lambda divisor: 1 / divisor),
}
# The settings of both biases of attention.
BIASES = ("attention.qkv_bias", "attention.out_bias")
SIZES: dict[str, str | tuple[str, ...]] = {
    "hidden_size": "model.dim",
    "intermediate_size": "model.hidden_dim",
    "num_hidden_layers": "model.num_blocks",
    "num_attention_heads": "model.n_heads",
    "num_key_value_heads": "model.kv_heads",
    "max_position_embeddings": "model.max_context",
    "rms_norm_eps": "model.norm_epsilon",
    "tie_word_embeddings": "model.weight_tying",
}


def without(table: Mapping[str, Any], *excluded: str) -> dict[str, Any]:
    """Returns a table without some of its keys."""
    return {key: value for key, value in table.items() if key not in excluded}


HEAD_SIZES = SIZES | {"head_dim": "model.head_size"}
# Default values that many families share, without and with tied embeddings.
UNTIED = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
TIED = UNTIED | {"tie_word_embeddings": True}
# The `quantization_config` of ternary projections whose weights are stored as floats.
BITNET = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
KEYS_WITHOUT_MLP_SIZE = without(HEAD_SIZES, "intermediate_size")
GRANITE_KEYS = HEAD_SIZES | {
    "attention_bias": BIASES,
    "embedding_multiplier": "model.embedding_multiplier",
    "residual_multiplier": "model.residual_multiplier",
    "logits_scaling": "model.logits_scaling",
    "attention_multiplier": "attention.attention_multiplier",
}
GRANITE_DEFAULTS = UNTIED | {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "attention_multiplier": 1.0,
    "max_position_embeddings": 2048,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
      architecture: the model class in transformers.
      tensors: all tensors that a model of the family can have. A model has a tensor if it has the
        parameter that contains it.
      keys: keys of `config.json`, and the setting or settings that each key determines. `a|b` are
        two names of one key; export writes the first name.
      defaults: transformers' default values of keys for which DantinoX has another default or no
        default.
      settings: the settings that all models of the family share.
      activation: the key that names the activation, and the supported names.
      rope: which layers use rotary positions, and for which part of a head; None: no layer.
        `whole`: all layers, the whole head. `partial`: all layers, the fraction of a head in
        `partial_rotary_factor`. `longrope`: as `partial`, with the numbers of longrope in
        `original_max_position_embeddings`. `local`: all layers; sliding layers have separate
        frequencies. `listed layers`: the layers in `no_rope_layers`. `sliding layers`: the sliding
        layers. `windowed layers`: the sliding layers if the model has a window, else all layers.
        `optional`: all layers, if `position_embedding_type` is `rope`.
      window: which layers have a sliding window; None: no layer. `all`: all layers. `optional`: all
        layers, if `use_sliding_window` is true. `layers`: the layers in `layer_types`.
        `optional layers`: both conditions.
      full_every: without `layer_types`, every n-th layer has full attention.
      dense_layers: how `config.json` specifies the dense layers of a model with experts; None:
        there are no dense layers. `first`: a number n; the first n layers are dense. `steps`: all
        but every n-th layer are dense, and also the layers in a list. `range`: the layers outside a
        range are dense. `all or none`: all layers are dense if the number of experts is 0. `types`:
        the layers that `mlp_layer_types` marks as dense. `parallel`: no layer; `enable_moe_block`
        says whether every layer has experts next to a dense branch.
      group_score: how groups of experts are scored, in models that route a token only to the best
        groups. `max`: the score of the best expert of the group. `top2`: the sum of its two best
        scores.
      interleaved_rope: name suffixes of tensors whose rows are stored for the pairs (x₀, x₁), (x₂,
        x₃), … of a head.
      reversed_rope: name suffixes of tensors whose rows are stored for the pairs (x_{i+R/2}, x_i).
      query_scaling: whether queries are scaled by a factor that grows with their position
        (`llama_4_scaling_beta`).
      ntk_alpha: whether `alpha` in RoPE scaling of type `dynamic` changes the frequency base.
      per_layer_heads: whether `per_layer_config` sets a different head size and number of key heads
        for full layers.
      bitlinear: whether `quantization_config` may say that the projections are ternary (`BITNET`).
      model_type: the `model_type` of its `config.json`, if another family has this name and only
        `architectures` tells the two apart; None: the name of the family.
      constants: keys with a fixed value, which export writes.
      supported: keys of this family that must have a fixed value, in addition to
        `SUPPORTED_VALUES`.
      ignored: keys of this family that have no effect, in addition to `IGNORED_KEYS`.
      buffers: name suffixes of tensors that older files contain but that are not weights.
    """

    architecture: str
    tensors: tuple[Row, ...]
    keys: Mapping[str, str | tuple[str, ...]] = field(default_factory=lambda: HEAD_SIZES)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    activation: tuple[str, Mapping[str, str]] = ("hidden_act", GATED)
    rope: str | None = "whole"
    window: str | None = None
    full_every: int = 0
    dense_layers: str | None = None
    group_score: str | None = None
    interleaved_rope: tuple[str, ...] = ()
    reversed_rope: tuple[str, ...] = ()
    query_scaling: bool = False
    ntk_alpha: bool = False
    per_layer_heads: bool = False
    bitlinear: bool = False
    model_type: str | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    supported: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    buffers: tuple[str, ...] = (".rotary_emb.inv_freq",)
