"""Families of dense Hugging Face models.

Gemma 4 also has models with experts next to a dense branch.
"""

from dantinox.interop.hf.hf_family import (
    BIASES,
    GATED,
    GRANITE_DEFAULTS,
    GRANITE_KEYS,
    HEAD_SIZES,
    KEYS_WITHOUT_MLP_SIZE,
    SIZES,
    TIED,
    UNGATED,
    UNTIED,
    Family,
    without,
)
from dantinox.interop.hf.hf_tensors import (
    ATTENTION,
    EMBEDDINGS_AND_HEAD,
    FEED_FORWARD,
    FUSED_MLP,
    FUSED_PROJECTIONS,
    GEMMA4_ATTENTION,
    GEMMA4_EXPERTS,
    GPT2,
    HEAD_NORMS,
    HEAD_NORMS_AFTER_ROPE,
    NORM_BIASES,
    NORMS_AFTER,
    NORMS_BEFORE,
    NORMS_BOTH,
    NORMS_GLM4,
    PER_LAYER_EMBEDDINGS,
    WHOLE_LAYER_NORMS,
    Axes,
    plain_mlp,
    rename_modules,
    rows,
    sub_norms,
)

DENSE = EMBEDDINGS_AND_HEAD + ATTENTION + FEED_FORWARD
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
GEMMA_SETTINGS = {
    "model.norm_placement": "both",
    "model.norm_zero_centered": True,
    "model.scale_embeddings": True,
}
QK_PROJECTIONS = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
LAYER_NORM_KEYS = without(SIZES, "rms_norm_eps") | {"layer_norm_eps": "model.norm_epsilon"}
LAYER_NORM = {"model.norm": "layernorm"}
COHERE_DEFAULTS = TIED | {
    "logit_scale": 0.0625,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}
COHERE_SETTINGS = LAYER_NORM | {"model.norm_bias": False, "model.parallel_blocks": True}
# Keys of older files for properties that all models of the family share, or for training.
COHERE_SUPPORTED = {
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
    "rotary_pct": 1.0,
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
}
COHERE_IGNORED = ("use_parallel_embedding", "use_embedding_sharing", "layer_switch")

DENSE_FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        DENSE + NORMS_BEFORE,
        keys=HEAD_SIZES | {"attention_bias": BIASES, "mlp_bias": "model.mlp_bias"},
        defaults=UNTIED | {"max_position_embeddings": 2048},
        bitlinear=True,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        DENSE + NORMS_BEFORE,
        keys=HEAD_SIZES,
        defaults=UNTIED | {
            "num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072,
        },
        window="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        DENSE + NORMS_BEFORE,
        keys=HEAD_SIZES,
        defaults=QWEN_DEFAULTS,
        settings={"attention.qkv_bias": True},
        window="optional layers",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        DENSE + NORMS_BEFORE + HEAD_NORMS,
        keys=HEAD_SIZES | {"attention_bias": BIASES},
        defaults=QWEN_DEFAULTS | {"head_dim": 128},
        settings={"model.qk_norm": True},
        window="optional layers",
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        DENSE + NORMS_BEFORE,
        keys=HEAD_SIZES,
        defaults=UNTIED | {
            "num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072,
        },
        window="layers",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        DENSE + NORMS_BEFORE,
        keys=HEAD_SIZES | {"attention_bias": BIASES, "mlp_bias": "model.mlp_bias"},
        defaults=TIED | {
            "rope_theta": 2e6, "num_key_value_heads": 4, "use_sliding_window": False,
            "no_rope_layer_interval": 4, "max_position_embeddings": 32768,
        },
        rope="listed layers",
        window="optional layers",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        EMBEDDINGS_AND_HEAD + FUSED_PROJECTIONS + NORMS_BEFORE,
        keys=HEAD_SIZES,
        defaults=UNTIED | {
            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
        rope="longrope",
        window="all",
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        DENSE + NORMS_AFTER + WHOLE_LAYER_NORMS,
        keys=SIZES | {"attention_bias": BIASES},
        defaults=UNTIED | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        settings={
            "model.norm_placement": "after", "model.qk_norm": True, "model.qk_norm_scope": "layer",
        },
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        DENSE + NORMS_BOTH,
        keys=GEMMA_KEYS,
        defaults=GEMMA_DEFAULTS | {
            "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
            "num_key_value_heads": 4, "max_position_embeddings": 8192,
        },
        settings=GEMMA_SETTINGS,
        activation=("hidden_activation", GATED),
        window="layers",
        full_every=2,
        ignored=("hidden_act",),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        DENSE + NORMS_BOTH + HEAD_NORMS,
        # transformers never uses `attn_logit_softcapping`
        keys=without(GEMMA_KEYS, "attn_logit_softcapping"),
        defaults=GEMMA_DEFAULTS | {
            "rope_theta": 1e6, "rope_local_base_freq": 1e4, "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
        },
        settings=GEMMA_SETTINGS | {"model.qk_norm": True},
        activation=("hidden_activation", GATED),
        rope="local",
        window="layers",
        full_every=6,
        ignored=("hidden_act",),
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        EMBEDDINGS_AND_HEAD + GEMMA4_ATTENTION + FEED_FORWARD + NORMS_BOTH + HEAD_NORMS
        + PER_LAYER_EMBEDDINGS + GEMMA4_EXPERTS,
        keys=KEYS_WITHOUT_MLP_SIZE | {
            "attention_bias": BIASES, "final_logit_softcapping": "model.final_logit_softcapping",
            "attention_k_eq_v": "attention.k_eq_v",
            "num_kv_shared_layers": "attention.kv_shared_layers",
            "use_double_wide_mlp": "model.double_wide_mlp",
            "hidden_size_per_layer_input": "model.per_layer_dim",
        },
        defaults=TIED | {
            "head_dim": 256, "num_key_value_heads": 4, "sliding_window": 512,
            "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072,
            "attention_k_eq_v": False, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
            "global_head_dim": 512, "intermediate_size": 9216,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        settings={
            "model.norm_placement": "both", "model.scale_embeddings": True, "model.qk_norm": True,
            "model.v_norm": True, "model.layer_scalar": True, "attention.attention_multiplier": 1.0,
        },
        activation=("hidden_activation", GATED),
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
        keys=SIZES | {"attention_bias": BIASES},
        defaults=UNTIED | {
            "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096,
            "rope_theta": 5e5, "rope_local_base_freq": 5e5,
        },
        settings={
            "model.norm_placement": "after", "model.qk_norm": True, "model.qk_norm_scope": "layer",
        },
        rope="local",
        window="layers",
        full_every=4,
    ),
    "olmo": Family(
        "OlmoForCausalLM",
        DENSE,
        keys=without(SIZES, "rms_norm_eps") | {
            "attention_bias": BIASES,
        },
        defaults=UNTIED | {"max_position_embeddings": 2048},
        settings=LAYER_NORM | {"model.norm_scale": False, "model.norm_epsilon": 1e-5},
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        DENSE + NORMS_BEFORE,
        keys=HEAD_SIZES | {"attention_bias": BIASES},
        defaults=TIED | {
            "head_dim": 256, "num_key_value_heads": 16, "max_position_embeddings": 8192,
            "hidden_act": "gelu_pytorch_tanh",
        },
        settings={"model.norm_zero_centered": True, "model.scale_embeddings": True},
        # in this family, transformers takes `gelu` as the tanh approximation
        activation=("hidden_act", GATED | {"gelu": "geglu"}),
        supported={"hidden_activation": "gelu_pytorch_tanh"},
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        DENSE + NORMS_BEFORE,
        keys=HEAD_SIZES,
        defaults=UNTIED | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 262144,
        },
        window="all",
        query_scaling=True,
    ),
    "glm": Family(
        "GlmForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + FUSED_MLP + NORMS_BEFORE,
        keys=HEAD_SIZES | {"attention_bias": "attention.qkv_bias"},
        defaults=UNTIED | {
            "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07,
            "attention_bias": True, "partial_rotary_factor": 0.5, "max_position_embeddings": 131072,
        },
        rope="partial",
        interleaved_rope=QK_PROJECTIONS,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + FUSED_MLP + NORMS_GLM4,
        keys=HEAD_SIZES | {"attention_bias": "attention.qkv_bias"},
        defaults=UNTIED | {
            "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07,
            "attention_bias": True, "partial_rotary_factor": 0.5, "max_position_embeddings": 131072,
        },
        settings={"model.norm_placement": "both"},
        rope="partial",
        interleaved_rope=QK_PROJECTIONS,
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        DENSE + NORMS_BEFORE + NORM_BIASES,
        keys=LAYER_NORM_KEYS | {
            "use_qkv_bias": "attention.qkv_bias", "use_parallel_residual": "model.parallel_blocks",
        },
        defaults=UNTIED | {
            "layer_norm_eps": 1e-5, "num_key_value_heads": 32, "partial_rotary_factor": 0.25,
            "use_qkv_bias": False, "use_parallel_residual": False, "max_position_embeddings": 4096,
        },
        settings=LAYER_NORM,
        rope="partial",
        supported={"qk_layernorm": False},
        ignored=("hidden_dropout",),
    ),
    "phi": Family(
        "PhiForCausalLM",
        rename_modules(
            EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + NORM_BIASES,
            {"model.norm.": "model.final_layernorm.", ".o_proj.": ".dense."},
        )
        + plain_mlp("fc1", "fc2") + rows("", {"lm_head.bias": ("head_bias", Axes("V", "V"))}),
        keys=LAYER_NORM_KEYS,
        defaults=UNTIED | {
            "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "hidden_act": "gelu_new",
            "max_position_embeddings": 2048,
        },
        settings=LAYER_NORM | {
            "model.parallel_blocks": True, "model.mlp_bias": True, "attention.qkv_bias": True,
            "attention.out_bias": True, "model.head_bias": True,
        },
        activation=("hidden_act", UNGATED),
        rope="partial",
        supported={"qk_layernorm": False},
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + NORM_BIASES + plain_mlp("c_fc", "c_proj"),
        keys=without(HEAD_SIZES, "rms_norm_eps") | {
            "norm_epsilon": "model.norm_epsilon", "use_bias": (*BIASES, "model.mlp_bias"),
        },
        defaults=TIED | {
            "num_key_value_heads": 2, "norm_epsilon": 1e-5, "use_bias": True,
            "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096,
        },
        settings=LAYER_NORM,
        activation=("hidden_act", UNGATED),
        window="all",
        supported={"mlp_type": "default", "norm_type": "layer_norm"},
        ignored=("residual_dropout", "embedding_dropout"),
    ),
    "cohere": Family(
        "CohereForCausalLM",
        DENSE + NORMS_BEFORE[:1],
        keys=LAYER_NORM_KEYS | {
            "head_dim": "model.head_size", "attention_bias": BIASES,
            "logit_scale": "model.logits_scaling",
        },
        defaults=COHERE_DEFAULTS | {"rope_theta": 5e5},
        settings=COHERE_SETTINGS,
        interleaved_rope=QK_PROJECTIONS,
        supported=COHERE_SUPPORTED,
        ignored=COHERE_IGNORED,
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        DENSE + NORMS_BEFORE[:1],
        keys=LAYER_NORM_KEYS | {"attention_bias": BIASES, "logit_scale": "model.logits_scaling"},
        defaults=COHERE_DEFAULTS | {"sliding_window": 4096},
        settings=COHERE_SETTINGS,
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
        keys=HEAD_SIZES,
        defaults=UNTIED | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096,
            "max_position_embeddings": 2048,
        },
        settings={"model.norm_placement": "after", "model.qk_norm": True},
        rope="windowed layers",
        window="layers",
        full_every=4,
    ),
    "nanochat": Family(
        "NanoChatForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + plain_mlp("fc1", "fc2"),
        keys=HEAD_SIZES | {
            "attention_bias": BIASES, "final_logit_softcapping": "model.final_logit_softcapping",
        },
        defaults=UNTIED | {
            "hidden_act": "relu2", "final_logit_softcapping": 15.0, "max_position_embeddings": 2048,
        },
        settings={
            "model.norm_scale": False, "model.norm_embeddings": True, "model.qk_norm": True,
            "model.qk_norm_after_rope": True,
        },
        activation=("hidden_act", UNGATED),
        reversed_rope=QK_PROJECTIONS,
    ),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM",
        DENSE + NORMS_BEFORE + HEAD_NORMS_AFTER_ROPE,
        keys=HEAD_SIZES | {"attention_bias": BIASES},
        defaults=UNTIED | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        settings={"model.qk_norm": True, "model.qk_norm_after_rope": True},
        ntk_alpha=True,
        supported={"use_qk_norm": True, "use_cla": False},
        ignored=("eod_token_id", "attention_head_dim"),
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        DENSE + NORMS_BEFORE,
        keys=HEAD_SIZES | {
            "attention_bias": "attention.qkv_bias", "attention_out_bias": "attention.out_bias",
            "mlp_bias": "model.mlp_bias",
        },
        defaults=UNTIED | {
            "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True,
            "attention_out_bias": False, "max_position_embeddings": 524288,
        },
        ignored=("residual_dropout",),
    ),
    "helium": Family(
        "HeliumForCausalLM",
        DENSE + NORMS_BEFORE,
        keys=HEAD_SIZES | {"attention_bias": "attention.qkv_bias", "mlp_bias": "model.mlp_bias"},
        defaults=UNTIED | {
            "rms_norm_eps": 1e-8, "num_key_value_heads": 20, "head_dim": 128, "rope_theta": 1e5,
            "max_position_embeddings": 4096,
        },
        interleaved_rope=QK_PROJECTIONS,
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        DENSE + NORMS_BEFORE,
        keys=HEAD_SIZES | {"use_bias": (*BIASES, "model.mlp_bias")},
        defaults=TIED | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": 2, "head_dim": 128, "use_bias": False,
            "rope_theta": 5e5, "max_position_embeddings": 131072,
        },
        interleaved_rope=QK_PROJECTIONS,
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + plain_mlp("up_proj", "down_proj"),
        keys=HEAD_SIZES | {"attention_bias": BIASES, "mlp_bias": "model.mlp_bias"},
        defaults=UNTIED | {
            "rms_norm_eps": 1e-5, "hidden_act": "relu2", "max_position_embeddings": 4096,
        },
        activation=("hidden_act", UNGATED),
    ),
    "bitnet": Family(
        "BitNetForCausalLM",
        DENSE + NORMS_BEFORE + sub_norms("attn_sub_norm", "ffn_sub_norm"),
        keys=SIZES | {"attention_bias": BIASES},
        defaults=UNTIED | {
            "rms_norm_eps": 1e-5, "hidden_act": "relu2", "num_key_value_heads": 5,
            "rope_theta": 5e5, "max_position_embeddings": 2048,
        },
        settings={"model.sub_norms": True},
        activation=("hidden_act", GATED | {"relu2": "squared_reglu"}),
        bitlinear=True,
    ),
    "bitnet_b1_58": Family(
        "BitnetForCausalLM",
        DENSE + NORMS_BEFORE + sub_norms("inner_attn_ln", "ffn_layernorm"),
        keys=SIZES | {"attention_bias": BIASES},
        defaults=UNTIED | {"max_position_embeddings": 2048},
        settings={"model.projections": "ternary", "model.sub_norms": True},
        model_type="llama",
        constants={"weight_bits": 1, "input_bits": 8},
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        GPT2,
        keys={
            "n_embd": "model.dim", "n_layer": "model.num_blocks", "n_head": "model.n_heads",
            "n_inner": "model.hidden_dim", "n_positions": "model.max_context",
            "layer_norm_epsilon": "model.norm_epsilon", "tie_word_embeddings": "model.weight_tying",
        },
        defaults={
            "n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
            "activation_function": "gelu_new",
        },
        settings={
            "model.norm": "layernorm", "attention.use_rotary_pos": False,
            "attention.trainable_pos": True, "model.mlp_bias": True, "attention.qkv_bias": True,
            "attention.out_bias": True,
        },
        activation=("activation_function", UNGATED),
        rope=None,
        supported={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        ignored=(
            "n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj",
            "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
        ),
        buffers=(".attn.bias", ".attn.masked_bias"),
    ),
    "granite": Family(
        "GraniteForCausalLM",
        DENSE + NORMS_BEFORE,
        keys=GRANITE_KEYS | {"mlp_bias": "model.mlp_bias"},
        defaults=GRANITE_DEFAULTS,
    ),
}  # fmt: skip
