"""Hugging Face model families: one table of settings and tensor names per family, used for import and export."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dantinox.interop.hf.hf_tensors import (
    ATTENTION,
    BLOCK,
    DEEPSEEK_MLP,
    EMBEDDINGS_AND_HEAD,
    ERNIE_CORRECTION_BIAS,
    FEED_FORWARD,
    FUSED_MLP,
    FUSED_PROJECTIONS,
    GEMMA4_ATTENTION,
    GEMMA4_EXPERTS,
    GPT2,
    GPT_OSS,
    GRANITE_EXPERTS,
    GRANITE_SHARED,
    HEAD_NORMS,
    HEAD_NORMS_AFTER_ROPE,
    LATENT_ATTENTION,
    LAYER,
    NORM_BIASES,
    NORMS_AFTER,
    NORMS_BEFORE,
    NORMS_BOTH,
    NORMS_GLM4,
    PER_LAYER_EMBEDDINGS,
    ROUTED_EXPERTS,
    SCORE_CORRECTION_BIAS,
    WHOLE_LAYER_NORMS,
    Axes,
    Row,
    expert_rows,
    plain_mlp,
    rename_modules,
    rows,
    shared_rows,
    sub_norms,
)

GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "gelu_fast": "geglu"}
UNGATED = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "relu2": "relu2"}
# For keys whose value differs from that of the setting: the function that converts key to setting, and its inverse.
CONVERSIONS: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
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


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
      architecture: the model class in transformers.
      tensors: all tensors that a model of the family can have. A model has a tensor if it has the parameter that contains it.
      keys: keys of `config.json`, and the setting or settings that each key determines. `a|b` are two names of one key; export
        writes the first name.
      defaults: transformers' default values of keys for which DantinoX has another default or no default.
      settings: the settings that all models of the family share.
      activation: the key that names the activation, and the supported names.
      rope: which layers use rotary positions, and for which part of a head; None: no layer.
        `whole`: all layers, the whole head.
        `partial`: all layers, the fraction of a head in `partial_rotary_factor`.
        `longrope`: as `partial`, with the numbers of longrope in `original_max_position_embeddings`.
        `local`: all layers; sliding layers have separate frequencies.
        `listed layers`: the layers in `no_rope_layers`.
        `sliding layers`: the sliding layers.
        `windowed layers`: the sliding layers if the model has a window, else all layers.
        `optional`: all layers, if `position_embedding_type` is `rope`.
      window: which layers have a sliding window; None: no layer. `all`: all layers. `optional`: all layers, if
        `use_sliding_window` is true. `layers`: the layers in `layer_types`. `optional layers`: both conditions.
      full_every: without `layer_types`, every n-th layer has full attention.
      dense_layers: how `config.json` specifies the dense layers of a model with experts; None: there are no dense layers.
        `first`: a number n; the first n layers are dense. `steps`: all but every n-th layer are dense, and also the layers in a
        list. `range`: the layers outside a range are dense. `all or none`: all layers are dense if the number of experts is 0.
        `types`: the layers that `mlp_layer_types` marks as dense.
        `parallel`: no layer; `enable_moe_block` says whether every layer has experts next to a dense branch.
      group_score: how groups of experts are scored, in models that route a token only to the best groups. `max`: the score of
        the best expert of the group. `top2`: the sum of its two best scores.
      interleaved_rope: name suffixes of tensors whose rows are stored for the pairs (x₀, x₁), (x₂, x₃), … of a head.
      reversed_rope: name suffixes of tensors whose rows are stored for the pairs (x_{i+R/2}, x_i).
      query_scaling: whether queries are scaled by a factor that grows with their position (`llama_4_scaling_beta`).
      ntk_alpha: whether `alpha` in RoPE scaling of type `dynamic` changes the frequency base.
      per_layer_heads: whether `per_layer_config` sets a different head size and number of key heads for full layers.
      bitlinear: whether `quantization_config` may say that the projections are ternary (`BITNET`).
      model_type: the `model_type` of its `config.json`, if another family has this name and only `architectures` tells the two
        apart; None: the name of the family.
      constants: keys with a fixed value, which export writes.
      supported: keys of this family that must have a fixed value, in addition to `SUPPORTED_VALUES`.
      ignored: keys of this family that have no effect, in addition to `IGNORED_KEYS`.
      buffers: name suffixes of tensors that older files contain but that are not weights.
    """

    architecture: str
    tensors: tuple[Row, ...]
    keys: Mapping[str, str | tuple[str, ...]] = field(default_factory=lambda: SIZES | {"head_dim": "model.head_size"})
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


HEAD_SIZES = SIZES | {"head_dim": "model.head_size"}
DENSE = EMBEDDINGS_AND_HEAD + ATTENTION + FEED_FORWARD
UNTIED = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
TIED = UNTIED | {"tie_word_embeddings": True}
# The `quantization_config` of ternary projections whose weights are stored as floats.
BITNET = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
GEMMA_DEFAULTS = TIED | {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}
QWEN_DEFAULTS = UNTIED | {
    "max_window_layers": 28,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_position_embeddings": 32768,
}
GEMMA_KEYS = HEAD_SIZES | {
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
TRAINING_KEYS = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
KEYS_WITHOUT_MLP_SIZE = {key: path for key, path in HEAD_SIZES.items() if key != "intermediate_size"}
# For mixture-of-experts models in which some layers are dense.
MOE_KEYS = KEYS_WITHOUT_MLP_SIZE | {
    "moe_intermediate_size": "model.hidden_dim",
    "intermediate_size": "moe.dense_hidden_dim",
    "num_experts_per_tok": "moe.top_k_mlp",
    "norm_topk_prob": "moe.norm_topk_prob",
}
DEEPSEEK_KEYS = MOE_KEYS | {
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
LATENT_DEFAULTS = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
GRANITE_KEYS = HEAD_SIZES | {
    "attention_bias": BIASES,
    "embedding_multiplier": "model.embedding_multiplier",
    "residual_multiplier": "model.residual_multiplier",
    "logits_scaling": "model.logits_scaling",
    "attention_multiplier": "attention.attention_multiplier",
}
MULTIPLIER_DEFAULTS = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "attention_multiplier": 1.0,
}
GRANITE_DEFAULTS = (
    UNTIED | MULTIPLIER_DEFAULTS | {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2}
)
MAMBA_KEYS = ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand", "chunk_size", "conv_bias", "proj_bias")
SIGMOID_ROUTER = {"moe.use_moe": True, "moe.score_function": "sigmoid", "moe.choice_bias": True}
LATENT_NORMS = {"attention.latent_norm_epsilon": 1e-6}
LATENT_ROPE_TENSORS = ("self_attn.q_proj.weight", "self_attn.q_b_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
# Ignored keys: router training, expert placement, and multi-token prediction layers, which are not imported.
DEEPSEEK_IGNORED = (
    *TRAINING_KEYS, "aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers", "head_dim",
    "qk_head_dim",
)  # fmt: skip
MTP = "num_nextn_predict_layers|num_mtp_layers"

QK_PROJECTIONS = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
LAYER_NORM_KEYS = {key: path for key, path in SIZES.items() if key != "rms_norm_eps"} | {"layer_norm_eps": "model.norm_epsilon"}
LAYER_NORM = {"model.norm": "layernorm"}
COHERE_DEFAULTS = TIED | {"logit_scale": 0.0625, "layer_norm_eps": 1e-5, "max_position_embeddings": 8192}
COHERE_SETTINGS = LAYER_NORM | {"model.norm_bias": False, "model.parallel_blocks": True}
# Keys of older files for properties that all models of the family share, or for training.
COHERE_SUPPORTED = {"use_gated_activation": True, "use_parallel_block": True, "use_qk_norm": False, "rotary_pct": 1.0,
               "position_embedding_type": "rope_gptj", "order_of_interleaved_layers": "local_attn_first"}  # fmt: skip
COHERE_IGNORED = ("use_parallel_embedding", "use_embedding_sharing", "layer_switch")

# For a model that was not imported, export tries the families in this order.
FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        DENSE + NORMS_BEFORE,
        HEAD_SIZES | {"attention_bias": BIASES, "mlp_bias": "model.mlp_bias"},
        UNTIED | {"max_position_embeddings": 2048},
        bitlinear=True,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        DENSE + NORMS_BEFORE,
        HEAD_SIZES,
        UNTIED | {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        window="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        DENSE + NORMS_BEFORE,
        HEAD_SIZES,
        QWEN_DEFAULTS,
        {"attention.qkv_bias": True},
        window="optional layers",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        DENSE + NORMS_BEFORE + HEAD_NORMS,
        HEAD_SIZES | {"attention_bias": BIASES},
        QWEN_DEFAULTS | {"head_dim": 128},
        {"model.qk_norm": True},
        window="optional layers",
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        DENSE + NORMS_BEFORE,
        HEAD_SIZES,
        UNTIED | {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        window="layers",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        DENSE + NORMS_BEFORE,
        HEAD_SIZES | {"attention_bias": BIASES, "mlp_bias": "model.mlp_bias"},
        TIED | {"rope_theta": 2e6, "num_key_value_heads": 4, "use_sliding_window": False, "no_rope_layer_interval": 4,
                "max_position_embeddings": 32768},
        rope="listed layers",
        window="optional layers",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        EMBEDDINGS_AND_HEAD + FUSED_PROJECTIONS + NORMS_BEFORE,
        HEAD_SIZES,
        UNTIED | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        rope="longrope",
        window="all",
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        DENSE + NORMS_AFTER + WHOLE_LAYER_NORMS,
        SIZES | {"attention_bias": BIASES},
        UNTIED | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        {"model.norm_placement": "after", "model.qk_norm": True, "model.qk_norm_scope": "layer"},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        DENSE + NORMS_BOTH,
        GEMMA_KEYS,
        GEMMA_DEFAULTS | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "num_key_value_heads": 4,
                 "max_position_embeddings": 8192},
        GEMMA_SETTINGS,
        ("hidden_activation", GATED),
        window="layers",
        full_every=2,
        ignored=("hidden_act",),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        DENSE + NORMS_BOTH + HEAD_NORMS,
        {key: path for key, path in GEMMA_KEYS.items() if key != "attn_logit_softcapping"},  # transformers never uses it
        GEMMA_DEFAULTS | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "num_key_value_heads": 4,
                          "max_position_embeddings": 131072},
        GEMMA_SETTINGS | {"model.qk_norm": True},
        ("hidden_activation", GATED),
        rope="local",
        window="layers",
        full_every=6,
        ignored=("hidden_act",),
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        EMBEDDINGS_AND_HEAD + GEMMA4_ATTENTION + FEED_FORWARD + NORMS_BOTH + HEAD_NORMS + PER_LAYER_EMBEDDINGS + GEMMA4_EXPERTS,
        KEYS_WITHOUT_MLP_SIZE | {
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
        full_every=6,
        per_layer_heads=True,
        dense_layers="parallel",
        supported={"use_bidirectional_attention": (None, False, "vision")},
        ignored=("hidden_act",),
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        DENSE + NORMS_AFTER + WHOLE_LAYER_NORMS,
        SIZES | {"attention_bias": BIASES},
        UNTIED | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096, "rope_theta": 5e5,
                  "rope_local_base_freq": 5e5},
        {"model.norm_placement": "after", "model.qk_norm": True, "model.qk_norm_scope": "layer"},
        rope="local",
        window="layers",
        full_every=4,
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
        HEAD_SIZES | {"attention_bias": BIASES},
        TIED | {"head_dim": 256, "num_key_value_heads": 16, "max_position_embeddings": 8192, "hidden_act": "gelu_pytorch_tanh"},
        {"model.norm_zero_centered": True, "model.scale_embeddings": True},
        ("hidden_act", GATED | {"gelu": "geglu"}),  # in this family, transformers takes `gelu` as the tanh approximation
        supported={"hidden_activation": "gelu_pytorch_tanh"},
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        DENSE + NORMS_BEFORE,
        HEAD_SIZES,
        UNTIED | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144},
        window="all",
        query_scaling=True,
    ),
    "glm": Family(
        "GlmForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + FUSED_MLP + NORMS_BEFORE,
        HEAD_SIZES | {"attention_bias": "attention.qkv_bias"},
        UNTIED | {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07, "attention_bias": True,
                  "partial_rotary_factor": 0.5, "max_position_embeddings": 131072},
        rope="partial",
        interleaved_rope=QK_PROJECTIONS,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + FUSED_MLP + NORMS_GLM4,
        HEAD_SIZES | {"attention_bias": "attention.qkv_bias"},
        UNTIED | {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07, "attention_bias": True,
                  "partial_rotary_factor": 0.5, "max_position_embeddings": 131072},
        {"model.norm_placement": "both"},
        rope="partial",
        interleaved_rope=QK_PROJECTIONS,
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        DENSE + NORMS_BEFORE + NORM_BIASES,
        LAYER_NORM_KEYS | {"use_qkv_bias": "attention.qkv_bias", "use_parallel_residual": "model.parallel_blocks"},
        UNTIED | {"layer_norm_eps": 1e-5, "num_key_value_heads": 32, "partial_rotary_factor": 0.25, "use_qkv_bias": False,
                  "use_parallel_residual": False, "max_position_embeddings": 4096},
        LAYER_NORM,
        rope="partial",
        supported={"qk_layernorm": False},
        ignored=("hidden_dropout",),
    ),
    "phi": Family(
        "PhiForCausalLM",
        rename_modules(EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + NORM_BIASES, {"model.norm.": "model.final_layernorm.",
                                                                   ".o_proj.": ".dense."})
        + plain_mlp("fc1", "fc2") + rows("", {"lm_head.bias": ("head_bias", Axes("V", "V"))}),
        LAYER_NORM_KEYS,
        UNTIED | {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "hidden_act": "gelu_new",
                  "max_position_embeddings": 2048},
        LAYER_NORM | {"model.parallel_blocks": True, "model.mlp_bias": True, "attention.qkv_bias": True,
                      "attention.out_bias": True, "model.head_bias": True},
        ("hidden_act", UNGATED),
        rope="partial",
        supported={"qk_layernorm": False},
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + NORM_BIASES + plain_mlp("c_fc", "c_proj"),
        {key: path for key, path in HEAD_SIZES.items() if key != "rms_norm_eps"}
        | {"norm_epsilon": "model.norm_epsilon", "use_bias": (*BIASES, "model.mlp_bias")},
        TIED | {"num_key_value_heads": 2, "norm_epsilon": 1e-5, "use_bias": True, "hidden_act": "gelu_pytorch_tanh",
                "max_position_embeddings": 4096},
        LAYER_NORM,
        ("hidden_act", UNGATED),
        window="all",
        supported={"mlp_type": "default", "norm_type": "layer_norm"},
        ignored=("residual_dropout", "embedding_dropout"),
    ),
    "cohere": Family(
        "CohereForCausalLM",
        DENSE + NORMS_BEFORE[:1],
        LAYER_NORM_KEYS | {"head_dim": "model.head_size", "attention_bias": BIASES, "logit_scale": "model.logits_scaling"},
        COHERE_DEFAULTS | {"rope_theta": 5e5},
        COHERE_SETTINGS,
        interleaved_rope=QK_PROJECTIONS,
        supported=COHERE_SUPPORTED,
        ignored=COHERE_IGNORED,
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        DENSE + NORMS_BEFORE[:1],
        LAYER_NORM_KEYS | {"attention_bias": BIASES, "logit_scale": "model.logits_scaling"},
        COHERE_DEFAULTS | {"sliding_window": 4096},
        COHERE_SETTINGS,
        rope="sliding layers",
        window="layers",
        full_every=4,
        interleaved_rope=QK_PROJECTIONS,
        supported=COHERE_SUPPORTED,
        ignored=(*COHERE_IGNORED, "head_dim"),
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        DENSE + NORMS_AFTER + HEAD_NORMS,
        HEAD_SIZES,
        UNTIED | {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 2048},
        {"model.norm_placement": "after", "model.qk_norm": True},
        rope="windowed layers",
        window="layers",
        full_every=4,
    ),
    "nanochat": Family(
        "NanoChatForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + plain_mlp("fc1", "fc2"),
        HEAD_SIZES | {"attention_bias": BIASES, "final_logit_softcapping": "model.final_logit_softcapping"},
        UNTIED | {"hidden_act": "relu2", "final_logit_softcapping": 15.0, "max_position_embeddings": 2048},
        {"model.norm_scale": False, "model.norm_embeddings": True, "model.qk_norm": True, "model.qk_norm_after_rope": True},
        ("hidden_act", UNGATED),
        reversed_rope=QK_PROJECTIONS,
    ),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM",
        DENSE + NORMS_BEFORE + HEAD_NORMS_AFTER_ROPE,
        HEAD_SIZES | {"attention_bias": BIASES},
        UNTIED | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        {"model.qk_norm": True, "model.qk_norm_after_rope": True},
        ntk_alpha=True,
        supported={"use_qk_norm": True, "use_cla": False},
        ignored=("eod_token_id", "attention_head_dim"),
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        DENSE + NORMS_BEFORE,
        HEAD_SIZES | {"attention_bias": "attention.qkv_bias", "attention_out_bias": "attention.out_bias",
                 "mlp_bias": "model.mlp_bias"},
        UNTIED | {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "attention_out_bias": False,
                  "max_position_embeddings": 524288},
        ignored=("residual_dropout",),
    ),
    "helium": Family(
        "HeliumForCausalLM",
        DENSE + NORMS_BEFORE,
        HEAD_SIZES | {"attention_bias": "attention.qkv_bias", "mlp_bias": "model.mlp_bias"},
        UNTIED | {"rms_norm_eps": 1e-8, "num_key_value_heads": 20, "head_dim": 128, "rope_theta": 1e5,
                  "max_position_embeddings": 4096},
        interleaved_rope=QK_PROJECTIONS,
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        DENSE + NORMS_BEFORE,
        HEAD_SIZES | {"use_bias": (*BIASES, "model.mlp_bias")},
        TIED | {"rms_norm_eps": 1e-5, "num_key_value_heads": 2, "head_dim": 128, "use_bias": False, "rope_theta": 5e5,
                "max_position_embeddings": 131072},
        interleaved_rope=QK_PROJECTIONS,
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + plain_mlp("up_proj", "down_proj"),
        HEAD_SIZES | {"attention_bias": BIASES, "mlp_bias": "model.mlp_bias"},
        UNTIED | {"rms_norm_eps": 1e-5, "hidden_act": "relu2", "max_position_embeddings": 4096},
        activation=("hidden_act", UNGATED),
    ),
    "bitnet": Family(
        "BitNetForCausalLM",
        DENSE + NORMS_BEFORE + sub_norms("attn_sub_norm", "ffn_sub_norm"),
        SIZES | {"attention_bias": BIASES},
        UNTIED | {"rms_norm_eps": 1e-5, "hidden_act": "relu2", "num_key_value_heads": 5, "rope_theta": 5e5,
                  "max_position_embeddings": 2048},
        {"model.sub_norms": True},
        ("hidden_act", GATED | {"relu2": "squared_reglu"}),
        bitlinear=True,
    ),
    "bitnet_b1_58": Family(
        "BitnetForCausalLM",
        DENSE + NORMS_BEFORE + sub_norms("inner_attn_ln", "ffn_layernorm"),
        SIZES | {"attention_bias": BIASES},
        UNTIED | {"max_position_embeddings": 2048},
        {"model.projections": "ternary", "model.sub_norms": True},
        model_type="llama",
        constants={"weight_bits": 1, "input_bits": 8},
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
        ("activation_function", UNGATED),
        rope=None,
        supported={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        ignored=("n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation",
                "summary_proj_to_labels", "summary_first_dropout"),
        buffers=(".attn.bias", ".attn.masked_bias"),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + expert_rows("block_sparse_moe", "w1", "w3", "w2"),
        HEAD_SIZES | EXPERT_KEYS,
        UNTIED | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
                  "rope_theta": 1e6, "max_position_embeddings": 131072},
        {"moe.use_moe": True, "moe.norm_topk_prob": True},
        window="all",
        ignored=TRAINING_KEYS,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + HEAD_NORMS + ROUTED_EXPERTS + FEED_FORWARD,
        MOE_KEYS | {"num_local_experts|num_experts": "moe.n_experts", "attention_bias": BIASES},
        UNTIED | {"num_key_value_heads": 4, "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                  "intermediate_size": 6144, "norm_topk_prob": False, "use_sliding_window": False, "sliding_window": 4096,
                  "max_position_embeddings": 32768},
        {"moe.use_moe": True, "model.qk_norm": True},
        window="optional",
        dense_layers="steps",
        ignored=(*TRAINING_KEYS, "max_window_layers"),
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + ROUTED_EXPERTS + FEED_FORWARD + shared_rows("shared_expert")
        + rows(LAYER, {"mlp.shared_expert_gate.weight": ("ffn/shared_gate/kernel", Axes("DO", "O D"))}, BLOCK),
        MOE_KEYS | {"num_experts|num_local_experts": "moe.n_experts", "qkv_bias": "attention.qkv_bias",
                  "shared_expert_intermediate_size": "moe.shared_hidden_dim"},
        UNTIED | {"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
                  "intermediate_size": 5632, "shared_expert_intermediate_size": 5632, "norm_topk_prob": False, "qkv_bias": True,
                  "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
                  "max_position_embeddings": 32768},
        {"moe.use_moe": True, "moe.shared_experts": 1, "moe.shared_gate": True},
        window="optional layers",
        full_every=2,
        dense_layers="steps",
        ignored=TRAINING_KEYS,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + WHOLE_LAYER_NORMS + ROUTED_EXPERTS,
        SIZES | {"num_experts|num_local_experts": "moe.n_experts", "num_experts_per_tok": "moe.top_k_mlp",
                 "norm_topk_prob": "moe.norm_topk_prob", "attention_bias": BIASES},
        UNTIED | {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
                  "max_position_embeddings": 4096},
        {"moe.use_moe": True, "model.qk_norm": True, "model.qk_norm_scope": "layer"},
        ignored=TRAINING_KEYS,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + GPT_OSS,
        HEAD_SIZES | {"num_local_experts|num_experts": "moe.n_experts",
                      "num_experts_per_tok|experts_per_token": "moe.top_k_mlp", "swiglu_limit": "model.swiglu_limit",
                      "swiglu_alpha": "model.swiglu_alpha", "attention_bias": BIASES},
        UNTIED | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
                  "num_experts_per_tok": 4, "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "attention_bias": True,
                  "sliding_window": 128, "max_position_embeddings": 131072, "rope_theta": 150000.0,
                  "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                      "truncate": False, "original_max_position_embeddings": 4096}},
        {"moe.use_moe": True, "moe.router_bias": True, "model.mlp_bias": True, "attention.sink_logits": True},
        ("hidden_act", {"silu": "clamped_swiglu"}),
        window="layers",
        full_every=2,
        ignored=(*TRAINING_KEYS, "initial_context_length"),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        EMBEDDINGS_AND_HEAD + LATENT_ATTENTION + NORMS_BEFORE + DEEPSEEK_MLP,
        {key: path for key, path in LATENT_KEYS.items() if key != "norm_topk_prob"},
        UNTIED | LATENT_DEFAULTS | {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
                                 "intermediate_size": 11008, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0,
                                 "topk_method": "greedy", "max_position_embeddings": 2048},
        {"moe.use_moe": True, "moe.norm_topk_prob": False} | LATENT_NORMS,
        dense_layers="first",
        group_score="max",
        interleaved_rope=LATENT_ROPE_TENSORS,
        supported={"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
        ignored=DEEPSEEK_IGNORED,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        EMBEDDINGS_AND_HEAD + LATENT_ATTENTION + NORMS_BEFORE + DEEPSEEK_MLP + SCORE_CORRECTION_BIAS,
        LATENT_KEYS,
        UNTIED | LATENT_DEFAULTS | {"num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
                                 "moe_intermediate_size": 2048, "intermediate_size": 18432, "routed_scaling_factor": 2.5,
                                 "num_experts_per_tok": 8, "norm_topk_prob": True, "first_k_dense_replace": 3, "n_group": 8,
                                 "topk_group": 4, "max_position_embeddings": 4096},
        SIGMOID_ROUTER | LATENT_NORMS,
        dense_layers="first",
        group_score="top2",
        interleaved_rope=LATENT_ROPE_TENSORS,
        supported={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": (True, False)},
        ignored=DEEPSEEK_IGNORED,
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + HEAD_NORMS + DEEPSEEK_MLP + SCORE_CORRECTION_BIAS,
        DEEPSEEK_KEYS | {"attention_bias": BIASES},
        UNTIED | {"moe_intermediate_size": 1408, "intermediate_size": 10944, "num_key_value_heads": 32,
                  "routed_scaling_factor": 1.0, "norm_topk_prob": False, "first_k_dense_replace": 0, "n_group": 1,
                  "topk_group": 1, "sliding_window": 4096, "max_window_layers": 62, "max_position_embeddings": 2048},
        SIGMOID_ROUTER | {"model.qk_norm": True},
        window="layers",
        dense_layers="first",
        group_score="top2",
        supported={"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": "noaux_tc", "moe_layer_freq": 1},
        ignored=tuple(key for key in DEEPSEEK_IGNORED if key != "head_dim"),
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + ROUTED_EXPERTS + FEED_FORWARD + shared_rows("shared_experts")
        + ERNIE_CORRECTION_BIAS,
        {key: path for key, path in MOE_KEYS.items() if key not in ("norm_topk_prob", "num_experts_per_tok")}
        | {"moe_num_experts|num_experts": "moe.n_experts", "moe_k|num_experts_per_tok": "moe.top_k_mlp",
           "moe_num_shared_experts": "moe.shared_experts"},
        TIED | {"rms_norm_eps": 1e-5, "num_key_value_heads": 4, "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2,
                "moe_intermediate_size": 1536, "intermediate_size": 12288, "rope_theta": 500000.0,
                "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
                "max_position_embeddings": 131072},
        {"moe.use_moe": True, "moe.choice_bias": True},
        dense_layers="range",
        interleaved_rope=("self_attn.q_proj.weight", "self_attn.k_proj.weight"),
        supported={"use_bias": False, "moe_norm_min": 1e-12},
        ignored=TRAINING_KEYS,
    ),
    "granite": Family(
        "GraniteForCausalLM", DENSE + NORMS_BEFORE, GRANITE_KEYS | {"mlp_bias": "model.mlp_bias"}, GRANITE_DEFAULTS
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + GRANITE_EXPERTS,
        GRANITE_KEYS | EXPERT_KEYS,
        GRANITE_DEFAULTS,
        {"moe.use_moe": True, "moe.norm_topk_prob": True},
        ignored=TRAINING_KEYS,
    ),
    "granitemoeshared": Family(
        "GraniteMoeSharedForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + GRANITE_EXPERTS + GRANITE_SHARED,
        GRANITE_KEYS | EXPERT_KEYS | {"shared_intermediate_size": "moe.shared_hidden_dim"},
        GRANITE_DEFAULTS,
        {"moe.use_moe": True, "moe.norm_topk_prob": True, "moe.shared_experts": 1},
        ignored=TRAINING_KEYS,
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + GRANITE_EXPERTS + GRANITE_SHARED,
        {key: path for key, path in GRANITE_KEYS.items() if key != "intermediate_size"},
        GRANITE_DEFAULTS | {"intermediate_size": 11008, "shared_intermediate_size": 1024, "position_embedding_type": None},
        rope="optional",
        dense_layers="all or none",
        ignored=(*TRAINING_KEYS, "time_step_limit", *(f"mamba_{name}" for name in MAMBA_KEYS)),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + HEAD_NORMS + DEEPSEEK_MLP + SCORE_CORRECTION_BIAS,
        DEEPSEEK_KEYS | {"attention_bias": "attention.qkv_bias", "use_qk_norm": "model.qk_norm"},
        UNTIED | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "n_routed_experts": 128, "num_experts_per_tok": 8,
                  "n_shared_experts": 1, "moe_intermediate_size": 1408, "intermediate_size": 10944, "norm_topk_prob": True,
                  "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "use_qk_norm": False,
                  "partial_rotary_factor": 0.5, "max_position_embeddings": 131072},
        SIGMOID_ROUTER,
        rope="partial",
        dense_layers="first",
        group_score="top2",
        ignored=tuple(key for key in DEEPSEEK_IGNORED if key != "head_dim"),
    ),
}  # fmt: skip
FAMILIES["glm4_moe_lite"] = replace(
    FAMILIES["deepseek_v3"],
    architecture="Glm4MoeLiteForCausalLM",
    defaults=UNTIED | LATENT_DEFAULTS | {
        "num_key_value_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64,
        "n_shared_experts": 1, "moe_intermediate_size": 1536, "intermediate_size": 10240, "routed_scaling_factor": 1.8,
        "num_experts_per_tok": 4, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
    },
    dense_layers="types",
)  # fmt: skip
