"""Hugging Face model families: one table of settings and tensor names per family, used for import and export.

Axes: V vocabulary, D model, K key heads, G query heads per key head, H head size, F feed-forward, C gate and up, P positions,
E experts.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

EVERYTHING = np.s_[...]


class Axes(NamedTuple):
    """How a tensor of transformers stands in a parameter of ours.

    Attributes:
      ours: the axes of the parameter, or of the part of it that the tensor is.
      theirs: the same axes in the tensor's order; those between two spaces are one axis there.
      part: which part of the parameter, behind an expert's number where there is one.
    """

    ours: str
    theirs: str
    part: Any = EVERYTHING

    def view(self, parameter: np.ndarray) -> np.ndarray:
        """The part of a parameter in the tensor's order, its axes apart; what is written into it stands in the parameter."""
        axes = self.theirs.replace(" ", "")
        return parameter[self.part].transpose([self.ours.index(axis) for axis in axes])

    def shape(self, view: np.ndarray) -> tuple[int, ...]:
        """The shape of the tensor whose `view` this is."""
        sizes = iter(view.shape)
        return tuple(math.prod(next(sizes) for _ in axes) for axes in self.theirs.split())


class Row(NamedTuple):
    """A tensor and the parameter that holds it. `{i}` is the number of a layer, `{e}` of an expert.

    A tensor of several `forms` is these, one behind the other along its first axis. With `beside`, a row counts where a model
    has that parameter too, or with `!` before it has it not; with `projected`, where the `qkv` of the layer gives so many keys
    and values for each key head.
    """

    tensor: str
    parameter: str
    forms: tuple[Axes, ...]
    beside: str = ""
    projected: int | None = None


def rows(prefix: str, tensors: Mapping[str, tuple[str, Axes | list[Axes]]], ours: str = "") -> tuple[Row, ...]:
    """Rows of a table of names without what they begin with."""
    return tuple(
        Row(prefix + tensor, ours + parameter, tuple(forms) if isinstance(forms, list) else (forms,))
        for tensor, (parameter, forms) in tensors.items()
    )


VECTOR, TABLE, HEAD = Axes("D", "D"), Axes("VD", "V D"), Axes("DV", "V D")
QUERY, QUERY_BIAS = Axes("DKGH", "KGH D", np.s_[:, :, :-2]), Axes("KGH", "KGH", np.s_[:, :-2])
KEY, KEY_BIAS = Axes("DKH", "KH D", np.s_[:, :, -2]), Axes("KH", "KH", np.s_[:, -2])
VALUE, VALUE_BIAS = Axes("DKH", "KH D", np.s_[:, :, -1]), Axes("KH", "KH", np.s_[:, -1])
GATE, UP, DOWN = Axes("DF", "F D", np.s_[:, 0]), Axes("DF", "F D", np.s_[:, 1]), Axes("FD", "D F")
LAYER, OURS = "model.layers.{i}.", "blocks/{i}/"

OUTSIDE = rows("", {
    "model.embed_tokens.weight": ("embed", TABLE),
    "model.norm.weight": ("norm_f/scale", VECTOR),
    "lm_head.weight": ("head/kernel", HEAD),
})  # fmt: skip
ATTENTION = rows(LAYER + "self_attn.", {
    "q_proj.weight": ("qkv/kernel", QUERY), "k_proj.weight": ("qkv/kernel", KEY), "v_proj.weight": ("qkv/kernel", VALUE),
    "q_proj.bias": ("qkv/bias", QUERY_BIAS), "k_proj.bias": ("qkv/bias", KEY_BIAS), "v_proj.bias": ("qkv/bias", VALUE_BIAS),
    "o_proj.weight": ("out/kernel", Axes("KGHD", "D KGH")), "o_proj.bias": ("out/bias", VECTOR),
}, OURS + "attention/")  # fmt: skip
FEED_FORWARD = rows(LAYER + "mlp.", {
    "gate_proj.weight": ("gate_up/kernel", GATE), "gate_proj.bias": ("gate_up/bias", Axes("F", "F", np.s_[0])),
    "up_proj.weight": ("gate_up/kernel", UP), "up_proj.bias": ("gate_up/bias", Axes("F", "F", np.s_[1])),
    "down_proj.weight": ("down/kernel", DOWN), "down_proj.bias": ("down/bias", VECTOR),
}, OURS + "ffn/")  # fmt: skip
NORMS_BEFORE = rows(LAYER, {
    "input_layernorm.weight": ("norm1/scale", VECTOR), "post_attention_layernorm.weight": ("norm2/scale", VECTOR),
}, OURS)  # fmt: skip
NORMS_AFTER = rows(LAYER, {
    "post_attention_layernorm.weight": ("post_norm1/scale", VECTOR),
    "post_feedforward_layernorm.weight": ("post_norm2/scale", VECTOR),
}, OURS)  # fmt: skip
NORMS_BOTH = NORMS_AFTER + rows(LAYER, {
    "input_layernorm.weight": ("norm1/scale", VECTOR), "pre_feedforward_layernorm.weight": ("norm2/scale", VECTOR),
}, OURS)  # fmt: skip
HEAD_NORMS = rows(LAYER + "self_attn.", {
    "q_norm.weight": ("q_norm/scale", Axes("H", "H")), "k_norm.weight": ("k_norm/scale", Axes("H", "H")),
}, OURS + "attention/")  # fmt: skip
LAYER_NORMS = rows(LAYER + "self_attn.", {
    "q_norm.weight": ("q_norm/scale", Axes("KGH", "KGH")), "k_norm.weight": ("k_norm/scale", Axes("KH", "KH")),
}, OURS + "attention/")  # fmt: skip
FUSED = rows(LAYER, {
    "self_attn.qkv_proj.weight": ("attention/qkv/kernel", [QUERY, KEY, VALUE]),
    "self_attn.o_proj.weight": ("attention/out/kernel", Axes("KGHD", "D KGH")),
    "mlp.gate_up_proj.weight": ("ffn/gate_up/kernel", Axes("DCF", "CF D")),
    "mlp.down_proj.weight": ("ffn/down/kernel", DOWN),
}, OURS)  # fmt: skip


def with_condition(row: Row, beside: str) -> Row:
    """A row that counts where a model has this other parameter of the same layer, or with `!` has it not."""
    return row._replace(beside=beside.replace("!", "!" + OURS) if "!" in beside else OURS + beside)


# Queries of latent attention come from the residual stream, or from a vector of their own.
LATENT = rows(LAYER + "self_attn.", {
    "kv_a_proj_with_mqa.weight": ("kv_a/kernel", Axes("DR", "R D")), "kv_a_layernorm.weight": ("kv_norm/scale", VECTOR),
    "kv_b_proj.weight": ("kv_b/kernel", Axes("RNH", "NH R")), "o_proj.weight": ("out/kernel", Axes("NHD", "D NH")),
    "q_a_proj.weight": ("q_a/kernel", Axes("DR", "R D")), "q_a_layernorm.weight": ("q_norm/scale", VECTOR),
}, OURS + "attention/") + tuple(
    with_condition(row, beside) for name, beside in (("q_proj", "!attention/q_a/kernel"), ("q_b_proj", "attention/q_a/kernel"))
    for row in rows(LAYER, {f"self_attn.{name}.weight": ("attention/q/kernel", Axes("DNH", "NH D"))}, OURS)
)  # fmt: skip
GPT_OSS = rows(LAYER, {
    "self_attn.sinks": ("attention/sinks", Axes("KG", "KG")),
    "mlp.router.weight": ("ffn/router/kernel", Axes("DE", "E D")), "mlp.router.bias": ("ffn/router/logit_bias", Axes("E", "E")),
    "mlp.experts.gate_up_proj": ("ffn/experts/gate_up/kernel", Axes("EDCF", "E D FC")),
    "mlp.experts.gate_up_proj_bias": ("ffn/experts/gate_up/bias", Axes("ECF", "E FC")),
    "mlp.experts.down_proj": ("ffn/experts/down/kernel", Axes("EFD", "E F D")),
    "mlp.experts.down_proj_bias": ("ffn/experts/down/bias", Axes("ED", "E D")),
}, OURS)  # fmt: skip


def shared_rows(module: str) -> tuple[Row, ...]:
    """The feed-forward layer that all tokens take besides their experts."""
    names = {"gate_proj": ("gate_up/kernel", GATE), "up_proj": ("gate_up/kernel", UP), "down_proj": ("down/kernel", DOWN)}
    return rows(LAYER + f"mlp.{module}.", {f"{name}.weight": held for name, held in names.items()}, OURS + "ffn/shared/")


def expert_rows(module: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    return rows(LAYER + module, {
        ".gate.weight": ("router/kernel", Axes("DE", "E D")),
        f".experts.{{e}}.{gate}.weight": ("experts/gate_up/kernel", GATE),
        f".experts.{{e}}.{up}.weight": ("experts/gate_up/kernel", UP),
        f".experts.{{e}}.{down}.weight": ("experts/down/kernel", DOWN),
    }, OURS + "ffn/")  # fmt: skip


ROUTED = expert_rows("mlp", "gate_proj", "up_proj", "down_proj")
CHOICE = rows(LAYER, {"mlp.gate.e_score_correction_bias": ("ffn/router/bias", Axes("E", "E"))}, OURS)
DEEPSEEK = ROUTED + FEED_FORWARD + shared_rows("shared_experts")

GRANITE_EXPERTS = rows(LAYER + "block_sparse_moe.", {
    "router.layer.weight": ("router/kernel", Axes("DE", "E D")),
    "input_linear.weight": ("experts/gate_up/kernel", Axes("EDCF", "E CF D")),
    "output_linear.weight": ("experts/down/kernel", Axes("EFD", "E D F")),
}, OURS + "ffn/")  # fmt: skip
# The layer that all tokens take, which is all that a model without experts has.
GRANITE_SHARED = tuple(
    row for module in ("ffn/shared/", "ffn/") for row in rows(LAYER + "shared_mlp.", {
        "input_linear.weight": ("gate_up/kernel", Axes("DCF", "CF D")), "output_linear.weight": ("down/kernel", DOWN),
    }, OURS + module)
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
    "attn.c_proj.weight": ("attention/out/kernel", Axes("KGHD", "KGH D")), "attn.c_proj.bias": ("attention/out/bias", VECTOR),
    "mlp.c_fc.weight": ("ffn/up/kernel", Axes("DF", "D F")), "mlp.c_fc.bias": ("ffn/up/bias", Axes("F", "F")),
    "mlp.c_proj.weight": ("ffn/down/kernel", Axes("FD", "F D")), "mlp.c_proj.bias": ("ffn/down/bias", VECTOR),
}, OURS)  # fmt: skip

NORM_BIASES = rows(LAYER, {
    "input_layernorm.bias": ("norm1/bias", VECTOR), "post_attention_layernorm.bias": ("norm2/bias", VECTOR),
}, OURS) + rows("", {"model.norm.bias": ("norm_f/bias", VECTOR)})  # fmt: skip
ROTATED_HEAD_NORMS = rows(LAYER + "self_attn.", {
    "query_layernorm.weight": ("q_norm/scale", Axes("H", "H")), "key_layernorm.weight": ("k_norm/scale", Axes("H", "H")),
}, OURS + "attention/")  # fmt: skip
FUSED_MLP = rows(LAYER + "mlp.", {
    "gate_up_proj.weight": ("gate_up/kernel", Axes("DCF", "CF D")), "down_proj.weight": ("down/kernel", DOWN),
}, OURS + "ffn/")  # fmt: skip
NORMS_GLM4 = NORMS_BEFORE + rows(LAYER, {
    "post_self_attn_layernorm.weight": ("post_norm1/scale", VECTOR), "post_mlp_layernorm.weight": ("post_norm2/scale", VECTOR),
}, OURS)  # fmt: skip


# Layers with keys and values of their own, with keys that are the values too, and those that read the keys of another layer.
GEMMA4_ATTENTION = rows(LAYER + "self_attn.", {"o_proj.weight": ("out/kernel", Axes("KGHD", "D KGH")),
                                              "o_proj.bias": ("out/bias", VECTOR)}, OURS + "attention/") + tuple(
    row._replace(projected=count) for count, end in ((2, -2), (1, -1), (0, None))
    for row in rows(LAYER + "self_attn.", {
        "q_proj.weight": ("kernel", Axes("DKGH", "KGH D", np.s_[:, :, :end])),
        "q_proj.bias": ("bias", Axes("KGH", "KGH", np.s_[:, :end])),
    } | ({} if end is None else {
        "k_proj.weight": ("kernel", Axes("DKH", "KH D", np.s_[:, :, end])),
        "k_proj.bias": ("bias", Axes("KH", "KH", np.s_[:, end])),
    }) | ({} if end != -2 else {"v_proj.weight": ("kernel", VALUE), "v_proj.bias": ("bias", VALUE_BIAS)}),
    OURS + "attention/qkv/")
)  # fmt: skip
GEMMA4_EXPERTS = rows(LAYER, {
    "router.proj.weight": ("router/kernel", Axes("DE", "E D")), "router.scale": ("router/scale", VECTOR),
    "router.per_expert_scale": ("router/expert_scale", Axes("E", "E")),
    "experts.gate_up_proj": ("experts/gate_up/kernel", Axes("EDCF", "E CF D")),
    "experts.down_proj": ("experts/down/kernel", Axes("EFD", "E D F")),
    "mlp.gate_proj.weight": ("shared/gate_up/kernel", GATE), "mlp.up_proj.weight": ("shared/gate_up/kernel", UP),
    "mlp.down_proj.weight": ("shared/down/kernel", DOWN),
    "pre_feedforward_layernorm.weight": ("shared_norm/scale", VECTOR),
    "post_feedforward_layernorm_1.weight": ("shared_post_norm/scale", VECTOR),
    "pre_feedforward_layernorm_2.weight": ("experts_norm/scale", VECTOR),
    "post_feedforward_layernorm_2.weight": ("experts_post_norm/scale", VECTOR),
}, OURS + "ffn/")  # fmt: skip
PER_LAYER = rows("model.", {
    "embed_tokens_per_layer.weight": ("embed", Axes("VLP", "V LP")),
    "per_layer_model_projection.weight": ("projection/kernel", Axes("DLP", "LP D")),
    "per_layer_projection_norm.weight": ("norm/scale", Axes("P", "P")),
}, "per_layer/") + rows(LAYER, {
    "per_layer_input_gate.weight": ("layer_input/gate/kernel", Axes("DP", "P D")),
    "per_layer_projection.weight": ("layer_input/out/kernel", Axes("PD", "D P")),
    "post_per_layer_input_norm.weight": ("layer_input/norm/scale", VECTOR),
    "layer_scalar": ("layer_scalar", Axes("O", "O")),
}, OURS)  # fmt: skip


def plain_mlp(up: str, down: str) -> tuple[Row, ...]:
    """A feed-forward layer without a gate."""
    return rows(LAYER + "mlp.", {
        f"{up}.weight": ("up/kernel", Axes("DF", "F D")), f"{up}.bias": ("up/bias", Axes("F", "F")),
        f"{down}.weight": ("down/kernel", DOWN), f"{down}.bias": ("down/bias", VECTOR),
    }, OURS + "ffn/")  # fmt: skip


def rename_modules(table: tuple[Row, ...], names: Mapping[str, str]) -> tuple[Row, ...]:
    """The rows with other names of some modules."""
    return tuple(
        row._replace(tensor=next((row.tensor.replace(old, new) for old, new in names.items() if old in row.tensor), row.tensor))
        for row in table
    )


GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "gelu_fast": "geglu"}
PLAIN = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "relu2": "relu2"}
# Keys whose number is not the setting's: to the setting, and back.
CONVERTED: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "logit_scale": (lambda factor: 1 / factor, lambda divisor: 1 / divisor),
}
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
# What says nothing about the numbers that a model gives: how it is trained, run and labelled. Tokens are read elsewhere.
UNUSED = frozenset((
    "model_type", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    "transformers_version", "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "initializer_range",
    "output_hidden_states", "output_attentions", "return_dict", "chunk_size_feed_forward", "id2label", "label2id",
    "problem_type", "use_cache", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "pretraining_tp",
    "_attn_implementation", "_attn_implementation_autoset", "cache_implementation", "task_specific_params", "tokenizer_class",
    "transformers.js_config", "torchscript", "tf_legacy_loss", "use_bfloat16", "finetuning_task", "prefix",
))  # fmt: skip
# The settings of text that older versions wrote into every config.json.
UNUSED |= frozenset((
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens",
))  # fmt: skip
# Keys of which one value is that of every model here.
ONLY: dict[str, Any] = {
    "is_encoder_decoder": False, "is_decoder": False, "add_cross_attention": False, "cross_attention_hidden_size": None,
    "use_bidirectional_attention": (None, False), "pruned_heads": {}, "tie_encoder_decoder": False, "quantization_config": None,
    "use_mrope": False, "rope_interleaved": False, "is_llama_config": True, "attention_bias": False, "mlp_bias": False,
    "clip_qkv": None,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
      architecture: the class of transformers.
      tensors: which of them a model has goes by the parameters that it has.
      keys: of config.json, or several with the same meaning (`a|b`, the first one is written), and the settings they are.
      defaults: what transformers takes for a key that is absent, where that is not our default or nothing.
      settings: what all members have in common.
      activation: the key of it, and its names.
      rope: whether positions are rotary; `share` and `partial`: of part of a head at will, `partial` with longrope's numbers
        beside; `local`: sliding layers have frequencies of their own; `some layers`: those that a list names; `sliding`:
        sliding layers; `hybrid`: those where a model has a window, else all; `switched`: if `position_embedding_type`.
      heads: `by kind` where `per_layer_config` gives full layers heads of another size and number.
      window: which layers slide: `all`; `switched`: all if `use_sliding_window`; `layers`: those that `layer_types` says;
        `switched layers`: both; None: none.
      pattern: without `layer_types` every n-th layer is full.
      dense: how `config.json` names the layers without experts: `first`, so many from the beginning; `steps`, all but every
        n-th, and those in a list; `range`, those outside of one; `all`, all where there are 0 experts; `types`, as
        `mlp_layer_types` says; `beside`, none, and `enable_moe_block` says whether there are experts; None: there are none.
      groups: how it limits a token's experts to those of the best groups: by each group's `max`, or its `top2`.
      pairs: ends of the names of tensors whose rows are stored for rotations of neighbouring numbers; `swapped`: for rotations
        of (x_{i+R/2}, x_i).
      query_scaling: whether queries grow with their positions, by `llama_4_scaling_beta`.
      stretched: whether rotations of the type `dynamic` with an `alpha` have another base.
      only, unused: keys of this family besides those of all.
      buffers: ends of the names of tensors that older files hold and that are no weights.
    """

    architecture: str
    tensors: tuple[Row, ...]
    keys: Mapping[str, str | tuple[str, ...]] = field(default_factory=lambda: SIZES | {"head_dim": "model.head_size"})
    defaults: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    activation: tuple[str, Mapping[str, str]] = ("hidden_act", GATED)
    rope: str | None = "whole"
    window: str | None = None
    pattern: int = 0
    dense: str | None = None
    groups: str | None = None
    pairs: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()
    query_scaling: bool = False
    stretched: bool = False
    heads: str | None = None
    only: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    buffers: tuple[str, ...] = (".rotary_emb.inv_freq",)


HEADS = SIZES | {"head_dim": "model.head_size"}
DENSE = OUTSIDE + ATTENTION + FEED_FORWARD
UNTIED = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
TIED = UNTIED | {"tie_word_embeddings": True}
GEMMA = TIED | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh"}
QWEN = UNTIED | {"max_window_layers": 28, "sliding_window": 4096, "use_sliding_window": False, "max_position_embeddings": 32768}
GEMMA_KEYS = HEADS | {
    "attention_bias": BIASES,
    "query_pre_attn_scalar": "attention.query_pre_attn_scalar",
    "attn_logit_softcapping": "attention.attn_logit_softcapping",
    "final_logit_softcapping": "model.final_logit_softcapping",
}
GEMMA_SETTINGS = {"model.norm_placement": "both", "model.norm_zero_centered": True, "model.scale_embeddings": True}
EXPERT_KEYS: dict[str, str | tuple[str, ...]] = {
    "num_local_experts|num_experts": "moe.n_experts",
    "num_experts_per_tok": "moe.top_k_mlp",
}
TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
WITHOUT_WIDTH = {key: path for key, path in HEADS.items() if key != "intermediate_size"}
# Of models with experts, of which some layers have none.
SPARSE = WITHOUT_WIDTH | {
    "moe_intermediate_size": "model.hidden_dim",
    "intermediate_size": "moe.dense_hidden_dim",
    "num_experts_per_tok": "moe.top_k_mlp",
    "norm_topk_prob": "moe.norm_topk_prob",
}
DEEPSEEK_KEYS = SPARSE | {
    "n_routed_experts|num_local_experts|num_experts": "moe.n_experts",
    "n_shared_experts": "moe.shared_experts",
    "routed_scaling_factor": "moe.routed_scaling",
}
LATENT_KEYS = {key: path for key, path in DEEPSEEK_KEYS.items() if key != "head_dim"} | {
    "qk_nope_head_dim": "model.head_size",
    "qk_rope_head_dim": "attention.qk_rope_head_dim",
    "v_head_dim": "attention.v_head_dim",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
}
LATENT_SIZES = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
GRANITE_KEYS = HEADS | {
    "attention_bias": BIASES,
    "embedding_multiplier": "model.embedding_multiplier",
    "residual_multiplier": "model.residual_multiplier",
    "logits_scaling": "model.logits_scaling",
    "attention_multiplier": "attention.attention_multiplier",
}
MULTIPLIERS = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0, "attention_multiplier": 1.0}
GRANITE = UNTIED | MULTIPLIERS | {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2}
MAMBA = ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand", "chunk_size", "conv_bias", "proj_bias")
SIGMOIDS = {"moe.use_moe": True, "moe.score_function": "sigmoid", "moe.choice_bias": True}
LATENT_NORMS = {"attention.latent_norm_epsilon": 1e-6}
LATENT_PAIRS = ("self_attn.q_proj.weight", "self_attn.q_b_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
# How experts are trained and laid out, and layers that predict further tokens, which are not imported.
DEEPSEEK_UNUSED = (
    *TRAINING, "aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers", "head_dim", "qk_head_dim",
)  # fmt: skip
MTP = "num_nextn_predict_layers|num_mtp_layers"

PAIRS = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
LAYER_NORM_KEYS = {key: path for key, path in SIZES.items() if key != "rms_norm_eps"} | {"layer_norm_eps": "model.norm_epsilon"}
LAYER_NORM = {"model.norm": "layernorm"}
COHERE = TIED | {"logit_scale": 0.0625, "layer_norm_eps": 1e-5, "max_position_embeddings": 8192}
COHERE_SETTINGS = LAYER_NORM | {"model.norm_bias": False, "model.parallel_blocks": True}
# Keys of older files that say what every model of the family is, or how it was trained.
COHERE_ONLY = {"use_gated_activation": True, "use_parallel_block": True, "use_qk_norm": False, "rotary_pct": 1.0,
               "position_embedding_type": "rope_gptj", "order_of_interleaved_layers": "local_attn_first"}  # fmt: skip
COHERE_UNUSED = ("use_parallel_embedding", "use_embedding_sharing", "layer_switch")

# In the order in which a model made here looks for its family.
FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        DENSE + NORMS_BEFORE,
        HEADS | {"attention_bias": BIASES, "mlp_bias": "model.mlp_bias"},
        UNTIED | {"max_position_embeddings": 2048},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        DENSE + NORMS_BEFORE,
        HEADS,
        UNTIED | {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        window="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", DENSE + NORMS_BEFORE, HEADS, QWEN, {"attention.qkv_bias": True}, window="switched layers"
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        DENSE + NORMS_BEFORE + HEAD_NORMS,
        HEADS | {"attention_bias": BIASES},
        QWEN | {"head_dim": 128},
        {"model.qk_norm": True},
        window="switched layers",
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        DENSE + NORMS_BEFORE,
        HEADS,
        UNTIED | {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        window="layers",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        DENSE + NORMS_BEFORE,
        HEADS | {"attention_bias": BIASES, "mlp_bias": "model.mlp_bias"},
        TIED | {"rope_theta": 2e6, "num_key_value_heads": 4, "use_sliding_window": False, "no_rope_layer_interval": 4,
                "max_position_embeddings": 32768},
        rope="some layers",
        window="switched layers",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        OUTSIDE + FUSED + NORMS_BEFORE,
        HEADS,
        UNTIED | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        rope="partial",
        window="all",
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        DENSE + NORMS_AFTER + LAYER_NORMS,
        SIZES | {"attention_bias": BIASES},
        UNTIED | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        {"model.norm_placement": "after", "model.qk_norm": True, "model.qk_norm_scope": "layer"},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        DENSE + NORMS_BOTH,
        GEMMA_KEYS,
        GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "num_key_value_heads": 4,
                 "max_position_embeddings": 8192},
        GEMMA_SETTINGS,
        ("hidden_activation", GATED),
        window="layers",
        pattern=2,
        unused=("hidden_act",),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        DENSE + NORMS_BOTH + HEAD_NORMS,
        {key: path for key, path in GEMMA_KEYS.items() if key != "attn_logit_softcapping"},  # which transformers never uses
        GEMMA | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "num_key_value_heads": 4, "max_position_embeddings": 131072},
        GEMMA_SETTINGS | {"model.qk_norm": True},
        ("hidden_activation", GATED),
        rope="local",
        window="layers",
        pattern=6,
        unused=("hidden_act",),
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        OUTSIDE + GEMMA4_ATTENTION + FEED_FORWARD + NORMS_BOTH + HEAD_NORMS + PER_LAYER + GEMMA4_EXPERTS,
        WITHOUT_WIDTH | {
            "attention_bias": BIASES,
            "final_logit_softcapping": "model.final_logit_softcapping",
            "attention_k_eq_v": "attention.k_eq_v",
            "num_kv_shared_layers": "attention.kv_shared_layers",
            "use_double_wide_mlp": "model.double_wide_mlp",
            "hidden_size_per_layer_input": "model.per_layer_dim",
        },
        TIED | {
            "head_dim": 256, "num_key_value_heads": 4, "sliding_window": 512, "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072, "attention_k_eq_v": False, "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
            "global_head_dim": 512, "intermediate_size": 9216,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {"model.norm_placement": "both", "model.scale_embeddings": True, "model.qk_norm": True, "model.v_norm": True,
         "model.layer_scalar": True, "attention.attention_multiplier": 1.0},
        ("hidden_activation", GATED),
        rope="local",
        window="layers",
        pattern=6,
        heads="by kind",
        dense="beside",
        only={"use_bidirectional_attention": (None, False, "vision")},
        unused=("hidden_act",),
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        DENSE + NORMS_AFTER + LAYER_NORMS,
        SIZES | {"attention_bias": BIASES},
        UNTIED | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096, "rope_theta": 5e5,
                  "rope_local_base_freq": 5e5},
        {"model.norm_placement": "after", "model.qk_norm": True, "model.qk_norm_scope": "layer"},
        rope="local",
        window="layers",
        pattern=4,
    ),
    "olmo": Family(
        "OlmoForCausalLM",
        DENSE,
        {key: path for key, path in SIZES.items() if key != "rms_norm_eps"} | {"attention_bias": BIASES},
        UNTIED | {"max_position_embeddings": 2048},
        LAYER_NORM | {"model.norm_scale": False, "model.norm_epsilon": 1e-5},
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        DENSE + NORMS_BEFORE,
        HEADS | {"attention_bias": BIASES},
        TIED | {"head_dim": 256, "num_key_value_heads": 16, "max_position_embeddings": 8192, "hidden_act": "gelu_pytorch_tanh"},
        {"model.norm_zero_centered": True, "model.scale_embeddings": True},
        ("hidden_act", GATED | {"gelu": "geglu"}),  # transformers reads it as the tanh form
        only={"hidden_activation": "gelu_pytorch_tanh"},
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        DENSE + NORMS_BEFORE,
        HEADS,
        UNTIED | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144},
        window="all",
        query_scaling=True,
    ),
    "glm": Family(
        "GlmForCausalLM",
        OUTSIDE + ATTENTION + FUSED_MLP + NORMS_BEFORE,
        HEADS | {"attention_bias": "attention.qkv_bias"},
        UNTIED | {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07, "attention_bias": True,
                  "partial_rotary_factor": 0.5, "max_position_embeddings": 131072},
        rope="share",
        pairs=PAIRS,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        OUTSIDE + ATTENTION + FUSED_MLP + NORMS_GLM4,
        HEADS | {"attention_bias": "attention.qkv_bias"},
        UNTIED | {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07, "attention_bias": True,
                  "partial_rotary_factor": 0.5, "max_position_embeddings": 131072},
        {"model.norm_placement": "both"},
        rope="share",
        pairs=PAIRS,
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        DENSE + NORMS_BEFORE + NORM_BIASES,
        LAYER_NORM_KEYS | {"use_qkv_bias": "attention.qkv_bias", "use_parallel_residual": "model.parallel_blocks"},
        UNTIED | {"layer_norm_eps": 1e-5, "num_key_value_heads": 32, "partial_rotary_factor": 0.25, "use_qkv_bias": False,
                  "use_parallel_residual": False, "max_position_embeddings": 4096},
        LAYER_NORM,
        rope="share",
        only={"qk_layernorm": False},
        unused=("hidden_dropout",),
    ),
    "phi": Family(
        "PhiForCausalLM",
        rename_modules(OUTSIDE + ATTENTION + NORMS_BEFORE + NORM_BIASES, {"model.norm.": "model.final_layernorm.",
                                                                   ".o_proj.": ".dense."})
        + plain_mlp("fc1", "fc2") + rows("", {"lm_head.bias": ("head_bias", Axes("V", "V"))}),
        LAYER_NORM_KEYS,
        UNTIED | {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "hidden_act": "gelu_new",
                  "max_position_embeddings": 2048},
        LAYER_NORM | {"model.parallel_blocks": True, "model.mlp_bias": True, "attention.qkv_bias": True,
                      "attention.out_bias": True, "model.head_bias": True},
        ("hidden_act", PLAIN),
        rope="share",
        only={"qk_layernorm": False},
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        OUTSIDE + ATTENTION + NORMS_BEFORE + NORM_BIASES + plain_mlp("c_fc", "c_proj"),
        {key: path for key, path in HEADS.items() if key != "rms_norm_eps"}
        | {"norm_epsilon": "model.norm_epsilon", "use_bias": (*BIASES, "model.mlp_bias")},
        TIED | {"num_key_value_heads": 2, "norm_epsilon": 1e-5, "use_bias": True, "hidden_act": "gelu_pytorch_tanh",
                "max_position_embeddings": 4096},
        LAYER_NORM,
        ("hidden_act", PLAIN),
        window="all",
        only={"mlp_type": "default", "norm_type": "layer_norm"},
        unused=("residual_dropout", "embedding_dropout"),
    ),
    "cohere": Family(
        "CohereForCausalLM",
        DENSE + NORMS_BEFORE[:1],
        LAYER_NORM_KEYS | {"head_dim": "model.head_size", "attention_bias": BIASES, "logit_scale": "model.logits_scaling"},
        COHERE | {"rope_theta": 5e5},
        COHERE_SETTINGS,
        pairs=PAIRS,
        only=COHERE_ONLY,
        unused=COHERE_UNUSED,
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        DENSE + NORMS_BEFORE[:1],
        LAYER_NORM_KEYS | {"attention_bias": BIASES, "logit_scale": "model.logits_scaling"},
        COHERE | {"sliding_window": 4096},
        COHERE_SETTINGS,
        rope="sliding",
        window="layers",
        pattern=4,
        pairs=PAIRS,
        only=COHERE_ONLY,
        unused=(*COHERE_UNUSED, "head_dim"),
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        DENSE + NORMS_AFTER + HEAD_NORMS,
        HEADS,
        UNTIED | {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 2048},
        {"model.norm_placement": "after", "model.qk_norm": True},
        rope="hybrid",
        window="layers",
        pattern=4,
    ),
    "nanochat": Family(
        "NanoChatForCausalLM",
        OUTSIDE + ATTENTION + plain_mlp("fc1", "fc2"),
        HEADS | {"attention_bias": BIASES, "final_logit_softcapping": "model.final_logit_softcapping"},
        UNTIED | {"hidden_act": "relu2", "final_logit_softcapping": 15.0, "max_position_embeddings": 2048},
        {"model.norm_scale": False, "model.norm_embeddings": True, "model.qk_norm": True, "model.qk_norm_after_rope": True},
        ("hidden_act", PLAIN),
        swapped=PAIRS,
    ),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM",
        DENSE + NORMS_BEFORE + ROTATED_HEAD_NORMS,
        HEADS | {"attention_bias": BIASES},
        UNTIED | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        {"model.qk_norm": True, "model.qk_norm_after_rope": True},
        stretched=True,
        only={"use_qk_norm": True, "use_cla": False},
        unused=("eod_token_id", "attention_head_dim"),
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        DENSE + NORMS_BEFORE,
        HEADS | {"attention_bias": "attention.qkv_bias", "attention_out_bias": "attention.out_bias",
                 "mlp_bias": "model.mlp_bias"},
        UNTIED | {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "attention_out_bias": False,
                  "max_position_embeddings": 524288},
        unused=("residual_dropout",),
    ),
    "helium": Family(
        "HeliumForCausalLM",
        DENSE + NORMS_BEFORE,
        HEADS | {"attention_bias": "attention.qkv_bias", "mlp_bias": "model.mlp_bias"},
        UNTIED | {"rms_norm_eps": 1e-8, "num_key_value_heads": 20, "head_dim": 128, "rope_theta": 1e5,
                  "max_position_embeddings": 4096},
        pairs=PAIRS,
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        DENSE + NORMS_BEFORE,
        HEADS | {"use_bias": (*BIASES, "model.mlp_bias")},
        TIED | {"rms_norm_eps": 1e-5, "num_key_value_heads": 2, "head_dim": 128, "use_bias": False, "rope_theta": 5e5,
                "max_position_embeddings": 131072},
        pairs=PAIRS,
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        OUTSIDE + ATTENTION + NORMS_BEFORE + plain_mlp("up_proj", "down_proj"),
        HEADS | {"attention_bias": BIASES, "mlp_bias": "model.mlp_bias"},
        UNTIED | {"rms_norm_eps": 1e-5, "hidden_act": "relu2", "max_position_embeddings": 4096},
        activation=("hidden_act", PLAIN),
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        GPT2,
        {"n_embd": "model.dim", "n_layer": "model.num_blocks", "n_head": "model.n_heads", "n_inner": "model.hidden_dim",
         "n_positions": "model.max_context", "layer_norm_epsilon": "model.norm_epsilon",
         "tie_word_embeddings": "model.weight_tying"},
        {"n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "activation_function": "gelu_new"},
        {"model.norm": "layernorm", "attention.use_rotary_pos": False, "attention.trainable_pos": True, "model.mlp_bias": True,
         "attention.qkv_bias": True, "attention.out_bias": True},
        ("activation_function", PLAIN),
        rope=None,
        only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        unused=("n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation",
                "summary_proj_to_labels", "summary_first_dropout"),
        buffers=(".attn.bias", ".attn.masked_bias"),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        OUTSIDE + ATTENTION + NORMS_BEFORE + expert_rows("block_sparse_moe", "w1", "w3", "w2"),
        HEADS | EXPERT_KEYS,
        UNTIED | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
                  "rope_theta": 1e6, "max_position_embeddings": 131072},
        {"moe.use_moe": True, "moe.norm_topk_prob": True},
        window="all",
        unused=TRAINING,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        OUTSIDE + ATTENTION + NORMS_BEFORE + HEAD_NORMS + ROUTED + FEED_FORWARD,
        SPARSE | {"num_local_experts|num_experts": "moe.n_experts", "attention_bias": BIASES},
        UNTIED | {"num_key_value_heads": 4, "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                  "intermediate_size": 6144, "norm_topk_prob": False, "use_sliding_window": False, "sliding_window": 4096,
                  "max_position_embeddings": 32768},
        {"moe.use_moe": True, "model.qk_norm": True},
        window="switched",
        dense="steps",
        unused=(*TRAINING, "max_window_layers"),
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        OUTSIDE + ATTENTION + NORMS_BEFORE + ROUTED + FEED_FORWARD + shared_rows("shared_expert")
        + rows(LAYER, {"mlp.shared_expert_gate.weight": ("ffn/shared_gate/kernel", Axes("DO", "O D"))}, OURS),
        SPARSE | {"num_experts|num_local_experts": "moe.n_experts", "qkv_bias": "attention.qkv_bias",
                  "shared_expert_intermediate_size": "moe.shared_hidden_dim"},
        UNTIED | {"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
                  "intermediate_size": 5632, "shared_expert_intermediate_size": 5632, "norm_topk_prob": False, "qkv_bias": True,
                  "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
                  "max_position_embeddings": 32768},
        {"moe.use_moe": True, "moe.shared_experts": 1, "moe.shared_gate": True},
        window="switched layers",
        pattern=2,
        dense="steps",
        unused=TRAINING,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        OUTSIDE + ATTENTION + NORMS_BEFORE + LAYER_NORMS + ROUTED,
        SIZES | {"num_experts|num_local_experts": "moe.n_experts", "num_experts_per_tok": "moe.top_k_mlp",
                 "norm_topk_prob": "moe.norm_topk_prob", "attention_bias": BIASES},
        UNTIED | {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
                  "max_position_embeddings": 4096},
        {"moe.use_moe": True, "model.qk_norm": True, "model.qk_norm_scope": "layer"},
        unused=TRAINING,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        OUTSIDE + ATTENTION + NORMS_BEFORE + GPT_OSS,
        HEADS | {"num_local_experts|num_experts": "moe.n_experts", "num_experts_per_tok|experts_per_token": "moe.top_k_mlp",
                 "swiglu_limit": "model.swiglu_limit", "swiglu_alpha": "model.swiglu_alpha", "attention_bias": BIASES},
        UNTIED | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
                  "num_experts_per_tok": 4, "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "attention_bias": True,
                  "sliding_window": 128, "max_position_embeddings": 131072, "rope_theta": 150000.0,
                  "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                      "truncate": False, "original_max_position_embeddings": 4096}},
        {"moe.use_moe": True, "moe.router_bias": True, "model.mlp_bias": True, "attention.sink_logits": True},
        ("hidden_act", {"silu": "clamped_swiglu"}),
        window="layers",
        pattern=2,
        unused=(*TRAINING, "initial_context_length"),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        OUTSIDE + LATENT + NORMS_BEFORE + DEEPSEEK,
        {key: path for key, path in LATENT_KEYS.items() if key != "norm_topk_prob"},
        UNTIED | LATENT_SIZES | {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
                                 "intermediate_size": 11008, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0,
                                 "topk_method": "greedy", "max_position_embeddings": 2048},
        {"moe.use_moe": True, "moe.norm_topk_prob": False} | LATENT_NORMS,
        dense="first",
        groups="max",
        pairs=LATENT_PAIRS,
        only={"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
        unused=DEEPSEEK_UNUSED,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        OUTSIDE + LATENT + NORMS_BEFORE + DEEPSEEK + CHOICE,
        LATENT_KEYS,
        UNTIED | LATENT_SIZES | {"num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
                                 "moe_intermediate_size": 2048, "intermediate_size": 18432, "routed_scaling_factor": 2.5,
                                 "num_experts_per_tok": 8, "norm_topk_prob": True, "first_k_dense_replace": 3, "n_group": 8,
                                 "topk_group": 4, "max_position_embeddings": 4096},
        SIGMOIDS | LATENT_NORMS,
        dense="first",
        groups="top2",
        pairs=LATENT_PAIRS,
        only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": (True, False)},
        unused=DEEPSEEK_UNUSED,
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        OUTSIDE + ATTENTION + NORMS_BEFORE + HEAD_NORMS + DEEPSEEK + CHOICE,
        DEEPSEEK_KEYS | {"attention_bias": BIASES},
        UNTIED | {"moe_intermediate_size": 1408, "intermediate_size": 10944, "num_key_value_heads": 32,
                  "routed_scaling_factor": 1.0, "norm_topk_prob": False, "first_k_dense_replace": 0, "n_group": 1,
                  "topk_group": 1, "sliding_window": 4096, "max_window_layers": 62, "max_position_embeddings": 2048},
        SIGMOIDS | {"model.qk_norm": True},
        window="layers",
        dense="first",
        groups="top2",
        only={"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": "noaux_tc", "moe_layer_freq": 1},
        unused=tuple(key for key in DEEPSEEK_UNUSED if key != "head_dim"),
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        OUTSIDE + ATTENTION + NORMS_BEFORE + ROUTED + FEED_FORWARD + shared_rows("shared_experts")
        + rows(LAYER, {"mlp.moe_statics.e_score_correction_bias": ("ffn/router/bias", Axes("OE", "O E", np.s_[None]))}, OURS),
        {key: path for key, path in SPARSE.items() if key not in ("norm_topk_prob", "num_experts_per_tok")}
        | {"moe_num_experts|num_experts": "moe.n_experts", "moe_k|num_experts_per_tok": "moe.top_k_mlp",
           "moe_num_shared_experts": "moe.shared_experts"},
        TIED | {"rms_norm_eps": 1e-5, "num_key_value_heads": 4, "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2,
                "moe_intermediate_size": 1536, "intermediate_size": 12288, "rope_theta": 500000.0,
                "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
                "max_position_embeddings": 131072},
        {"moe.use_moe": True, "moe.choice_bias": True},
        dense="range",
        pairs=("self_attn.q_proj.weight", "self_attn.k_proj.weight"),
        only={"use_bias": False, "moe_norm_min": 1e-12},
        unused=TRAINING,
    ),
    "granite": Family(
        "GraniteForCausalLM", DENSE + NORMS_BEFORE, GRANITE_KEYS | {"mlp_bias": "model.mlp_bias"}, GRANITE
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        OUTSIDE + ATTENTION + NORMS_BEFORE + GRANITE_EXPERTS,
        GRANITE_KEYS | EXPERT_KEYS,
        GRANITE,
        {"moe.use_moe": True, "moe.norm_topk_prob": True},
        unused=TRAINING,
    ),
    "granitemoeshared": Family(
        "GraniteMoeSharedForCausalLM",
        OUTSIDE + ATTENTION + NORMS_BEFORE + GRANITE_EXPERTS + GRANITE_SHARED,
        GRANITE_KEYS | EXPERT_KEYS | {"shared_intermediate_size": "moe.shared_hidden_dim"},
        GRANITE,
        {"moe.use_moe": True, "moe.norm_topk_prob": True, "moe.shared_experts": 1},
        unused=TRAINING,
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        OUTSIDE + ATTENTION + NORMS_BEFORE + GRANITE_EXPERTS + GRANITE_SHARED,
        {key: path for key, path in GRANITE_KEYS.items() if key != "intermediate_size"},
        GRANITE | {"intermediate_size": 11008, "shared_intermediate_size": 1024, "position_embedding_type": None},
        rope="switched",
        dense="all",
        unused=(*TRAINING, "time_step_limit", *(f"mamba_{name}" for name in MAMBA)),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        OUTSIDE + ATTENTION + NORMS_BEFORE + HEAD_NORMS + DEEPSEEK + CHOICE,
        DEEPSEEK_KEYS | {"attention_bias": "attention.qkv_bias", "use_qk_norm": "model.qk_norm"},
        UNTIED | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "n_routed_experts": 128, "num_experts_per_tok": 8,
                  "n_shared_experts": 1, "moe_intermediate_size": 1408, "intermediate_size": 10944, "norm_topk_prob": True,
                  "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "use_qk_norm": False,
                  "partial_rotary_factor": 0.5, "max_position_embeddings": 131072},
        SIGMOIDS,
        rope="share",
        dense="first",
        groups="top2",
        unused=tuple(key for key in DEEPSEEK_UNUSED if key != "head_dim"),
    ),
}  # fmt: skip
FAMILIES["glm4_moe_lite"] = replace(
    FAMILIES["deepseek_v3"],
    architecture="Glm4MoeLiteForCausalLM",
    defaults=UNTIED | LATENT_SIZES | {
        "num_key_value_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64,
        "n_shared_experts": 1, "moe_intermediate_size": 1536, "intermediate_size": 10240, "routed_scaling_factor": 1.8,
        "num_experts_per_tok": 4, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
    },
    dense="types",
)  # fmt: skip
# Families that are not here: the nearest that is, and what a model would need besides.
NEAREST = {
    "qwen3_next": ("qwen3_moe", "gated DeltaNet layers, whose state is no cache of keys"),
    "qwen3_5_text": ("qwen3", "gated DeltaNet layers, whose state is no cache of keys"),
    "qwen3_5_moe_text": ("qwen3_moe", "gated DeltaNet layers, whose state is no cache of keys"),
    "deepseek_v32": ("deepseek_v3", "an indexer that chooses the keys of a query"),
    "glm_moe_dsa": ("deepseek_v3", "an indexer that chooses the keys of a query"),
    "longcat_flash": ("deepseek_v3", "experts that pass their input on, and two attentions in a layer"),
    "kimi_linear": ("deepseek_v3", "linear attention, whose state is no cache of keys"),
    "phimoe": ("mixtral", "routing by SparseMixer, and layer norms beside experts"),
    "llama4_text": ("llama", "attention in chunks, and experts whose input is weighted"),
    "jamba": ("mixtral", "Mamba layers"),
    "falcon_h1": ("llama", "Mamba layers"),
    "bamba": ("llama", "Mamba layers"),
    "nemotron_h": ("llama", "Mamba layers"),
    "mamba2": ("llama", "Mamba layers"),
    "lfm2": ("qwen3", "short convolutions"),
    "lfm2_moe": ("qwen3_moe", "short convolutions"),
    "gemma3n_text": ("gemma3_text", "AltUp, LAuReL, embeddings of every layer, and keys and values that layers share"),
    "aya_vision": ("cohere2", "the vision model, and logits that only some versions of transformers scale"),
    "paligemma": ("gemma", "the vision model, and attention in both directions over a prompt"),
    "gemma3n": ("gemma3_text", "the vision and audio models, AltUp, LAuReL, and embeddings of every layer"),
    "llama4": ("llama", "the vision model"),
    "qwen3_vl_moe": ("qwen3_moe", "the vision model, and experts stored as one tensor"),
    "zamba2": ("llama", "Mamba 2 layers and blocks that layers share"),
    "nemotron": ("llama", "layernorm centred at one, and relu2 without a gate"),
    "apertus": ("qwen3", "the xIELU activation with learned numbers"),
    "falcon": ("llama", "parallel blocks with two norms, exact GELU, and ALiBi"),
    "gpt_neox": ("phi", "parallel blocks with two norms, and exact GELU"),
    "bloom": ("gpt2", "ALiBi"),
    "mpt": ("gpt2", "ALiBi"),
    "opt": ("gpt2", "ReLU, and positions that begin at two"),
    "minicpm3": ("deepseek_v2", "a dense feed-forward layer beside latent attention, and multipliers"),
    "exaone": ("llama", "the names of its tensors (exaone4 is read)"),
    "chatglm": ("glm", "the names of its tensors (glm is the same model in the form of transformers)"),
    "minimax": ("mixtral", "lightning attention layers"),
    "minimax_m2": ("qwen3_moe", "sigmoid scores with a bias beside qk_norm_scope: layer"),
    "rwkv": ("llama", "layers without attention"),
}
