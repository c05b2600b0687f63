"""Families of Hugging Face models with experts.

In `granitemoehybrid`, a model may also have no experts.
"""

from dataclasses import replace

from dantinox.interop.hf.hf_family import (
    BIASES,
    GRANITE_DEFAULTS,
    GRANITE_KEYS,
    HEAD_SIZES,
    KEYS_WITHOUT_MLP_SIZE,
    SIZES,
    TIED,
    UNTIED,
    Family,
    without,
)
from dantinox.interop.hf.hf_tensors import (
    ATTENTION,
    BLOCK,
    DEEPSEEK_MLP,
    EMBEDDINGS_AND_HEAD,
    ERNIE_CORRECTION_BIAS,
    FEED_FORWARD,
    GPT_OSS,
    GRANITE_EXPERTS,
    GRANITE_SHARED,
    HEAD_NORMS,
    LATENT_ATTENTION,
    LAYER,
    NORMS_BEFORE,
    ROUTED_EXPERTS,
    SCORE_CORRECTION_BIAS,
    WHOLE_LAYER_NORMS,
    Axes,
    expert_rows,
    rows,
    shared_rows,
)

EXPERT_KEYS: dict[str, str | tuple[str, ...]] = {
    "num_local_experts|num_experts": "moe.n_experts",
    "num_experts_per_tok": "moe.top_k_mlp",
}
TRAINING_KEYS = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
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
LATENT_KEYS = without(DEEPSEEK_KEYS, "head_dim") | {
    "qk_nope_head_dim": "model.head_size",
    "qk_rope_head_dim": "attention.qk_rope_head_dim",
    "v_head_dim": "attention.v_head_dim",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
}
LATENT_DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
MAMBA_KEYS = (
    "n_heads",
    "n_groups",
    "d_state",
    "d_head",
    "d_conv",
    "expand",
    "chunk_size",
    "conv_bias",
    "proj_bias",
)
SHARED_EXPERT_GATE = rows(
    LAYER, {"mlp.shared_expert_gate.weight": ("ffn/shared_gate/kernel", Axes("DO", "O D"))}, BLOCK
)
SIGMOID_ROUTER = {"moe.use_moe": True, "moe.score_function": "sigmoid", "moe.choice_bias": True}
LATENT_NORMS = {"attention.latent_norm_epsilon": 1e-6}
LATENT_ROPE_TENSORS = (
    "self_attn.q_proj.weight",
    "self_attn.q_b_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight",
)
MTP = "num_nextn_predict_layers|num_mtp_layers"  # the number of multi-token prediction layers
# Router training, expert placement, and multi-token prediction layers, which are not imported.
DEEPSEEK_IGNORED = (
    *TRAINING_KEYS, *MTP.split("|"), "aux_loss_alpha", "seq_aux", "ep_size", "qk_head_dim",
)  # fmt: skip
LATENT_IGNORED = (*DEEPSEEK_IGNORED, "head_dim")

EXPERT_FAMILIES: dict[str, Family] = {
    "mixtral": Family(
        "MixtralForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE
        + expert_rows("block_sparse_moe", "w1", "w3", "w2"),
        keys=HEAD_SIZES | EXPERT_KEYS,
        defaults=UNTIED | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_local_experts": 8,
            "num_experts_per_tok": 2, "rope_theta": 1e6, "max_position_embeddings": 131072,
        },
        settings={"moe.use_moe": True, "moe.norm_topk_prob": True},
        window="all",
        ignored=TRAINING_KEYS,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + HEAD_NORMS + ROUTED_EXPERTS + FEED_FORWARD,
        keys=MOE_KEYS | {
            "num_local_experts|num_experts": "moe.n_experts", "attention_bias": BIASES,
        },
        defaults=UNTIED | {
            "num_key_value_heads": 4, "num_local_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "intermediate_size": 6144, "norm_topk_prob": False,
            "use_sliding_window": False, "sliding_window": 4096, "max_position_embeddings": 32768,
        },
        settings={"moe.use_moe": True, "model.qk_norm": True},
        window="optional",
        dense_layers="steps",
        ignored=(*TRAINING_KEYS, "max_window_layers"),
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + ROUTED_EXPERTS + FEED_FORWARD
        + shared_rows("shared_expert")
        + SHARED_EXPERT_GATE,
        keys=MOE_KEYS | {
            "num_experts|num_local_experts": "moe.n_experts", "qkv_bias": "attention.qkv_bias",
            "shared_expert_intermediate_size": "moe.shared_hidden_dim",
        },
        defaults=UNTIED | {
            "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408, "intermediate_size": 5632,
            "shared_expert_intermediate_size": 5632, "norm_topk_prob": False, "qkv_bias": True,
            "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
            "max_position_embeddings": 32768,
        },
        settings={"moe.use_moe": True, "moe.shared_experts": 1, "moe.shared_gate": True},
        window="optional layers",
        full_every=2,
        dense_layers="steps",
        ignored=TRAINING_KEYS,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + WHOLE_LAYER_NORMS + ROUTED_EXPERTS,
        keys=SIZES | {
            "num_experts|num_local_experts": "moe.n_experts",
            "num_experts_per_tok": "moe.top_k_mlp", "norm_topk_prob": "moe.norm_topk_prob",
            "attention_bias": BIASES,
        },
        defaults=UNTIED | {
            "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8,
            "norm_topk_prob": False, "max_position_embeddings": 4096,
        },
        settings={"moe.use_moe": True, "model.qk_norm": True, "model.qk_norm_scope": "layer"},
        ignored=TRAINING_KEYS,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + GPT_OSS,
        keys=HEAD_SIZES | {
            "num_local_experts|num_experts": "moe.n_experts",
            "num_experts_per_tok|experts_per_token": "moe.top_k_mlp",
            "swiglu_limit": "model.swiglu_limit", "swiglu_alpha": "model.swiglu_alpha",
            "attention_bias": BIASES,
        },
        defaults=UNTIED | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 64,
            "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702, "attention_bias": True, "sliding_window": 128,
            "max_position_embeddings": 131072, "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 4096,
            },
        },
        settings={
            "moe.use_moe": True, "moe.router_bias": True, "model.mlp_bias": True,
            "attention.sink_logits": True,
        },
        activation=("hidden_act", {"silu": "clamped_swiglu"}),
        window="layers",
        full_every=2,
        ignored=(*TRAINING_KEYS, "initial_context_length"),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        EMBEDDINGS_AND_HEAD + LATENT_ATTENTION + NORMS_BEFORE + DEEPSEEK_MLP,
        keys=without(LATENT_KEYS, "norm_topk_prob"),
        defaults=UNTIED | LATENT_DEFAULTS | {
            "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
            "intermediate_size": 11008, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0,
            "topk_method": "greedy", "max_position_embeddings": 2048,
        },
        settings={"moe.use_moe": True, "moe.norm_topk_prob": False} | LATENT_NORMS,
        dense_layers="first",
        group_score="max",
        interleaved_rope=LATENT_ROPE_TENSORS,
        supported={"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
        ignored=LATENT_IGNORED,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        EMBEDDINGS_AND_HEAD + LATENT_ATTENTION + NORMS_BEFORE + DEEPSEEK_MLP
        + SCORE_CORRECTION_BIAS,
        keys=LATENT_KEYS,
        defaults=UNTIED | LATENT_DEFAULTS | {
            "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
            "moe_intermediate_size": 2048, "intermediate_size": 18432, "routed_scaling_factor": 2.5,
            "num_experts_per_tok": 8, "norm_topk_prob": True, "first_k_dense_replace": 3,
            "n_group": 8, "topk_group": 4, "max_position_embeddings": 4096,
        },
        settings=SIGMOID_ROUTER | LATENT_NORMS,
        dense_layers="first",
        group_score="top2",
        interleaved_rope=LATENT_ROPE_TENSORS,
        supported={
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
            "rope_interleave": (True, False),
        },
        ignored=LATENT_IGNORED,
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + HEAD_NORMS + DEEPSEEK_MLP
        + SCORE_CORRECTION_BIAS,
        keys=DEEPSEEK_KEYS | {"attention_bias": BIASES},
        defaults=UNTIED | {
            "moe_intermediate_size": 1408, "intermediate_size": 10944, "num_key_value_heads": 32,
            "routed_scaling_factor": 1.0, "norm_topk_prob": False, "first_k_dense_replace": 0,
            "n_group": 1, "topk_group": 1, "sliding_window": 4096, "max_window_layers": 62,
            "max_position_embeddings": 2048,
        },
        settings=SIGMOID_ROUTER | {"model.qk_norm": True},
        window="layers",
        dense_layers="first",
        group_score="top2",
        supported={
            "scoring_func": ("sigmoid", "noaux_tc"), "topk_method": "noaux_tc", "moe_layer_freq": 1,
        },
        ignored=DEEPSEEK_IGNORED,
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + ROUTED_EXPERTS + FEED_FORWARD
        + shared_rows("shared_experts") + ERNIE_CORRECTION_BIAS,
        keys=without(MOE_KEYS, "norm_topk_prob", "num_experts_per_tok") | {
            "moe_num_experts|num_experts": "moe.n_experts",
            "moe_k|num_experts_per_tok": "moe.top_k_mlp",
            "moe_num_shared_experts": "moe.shared_experts",
        },
        defaults=TIED | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": 4, "moe_num_experts": 64, "moe_k": 6,
            "moe_num_shared_experts": 2, "moe_intermediate_size": 1536, "intermediate_size": 12288,
            "rope_theta": 500000.0, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
            "moe_layer_interval": 1, "max_position_embeddings": 131072,
        },
        settings={"moe.use_moe": True, "moe.choice_bias": True},
        dense_layers="range",
        interleaved_rope=("self_attn.q_proj.weight", "self_attn.k_proj.weight"),
        supported={"use_bias": False, "moe_norm_min": 1e-12},
        ignored=TRAINING_KEYS,
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + GRANITE_EXPERTS,
        keys=GRANITE_KEYS | EXPERT_KEYS,
        defaults=GRANITE_DEFAULTS,
        settings={"moe.use_moe": True, "moe.norm_topk_prob": True},
        ignored=TRAINING_KEYS,
    ),
    "granitemoeshared": Family(
        "GraniteMoeSharedForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + GRANITE_EXPERTS + GRANITE_SHARED,
        keys=GRANITE_KEYS | EXPERT_KEYS | {"shared_intermediate_size": "moe.shared_hidden_dim"},
        defaults=GRANITE_DEFAULTS,
        settings={"moe.use_moe": True, "moe.norm_topk_prob": True, "moe.shared_experts": 1},
        ignored=TRAINING_KEYS,
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + GRANITE_EXPERTS + GRANITE_SHARED,
        keys=without(GRANITE_KEYS, "intermediate_size"),
        defaults=GRANITE_DEFAULTS | {
            "intermediate_size": 11008, "shared_intermediate_size": 1024,
            "position_embedding_type": None,
        },
        rope="optional",
        dense_layers="all or none",
        ignored=(*TRAINING_KEYS, "time_step_limit", *(f"mamba_{name}" for name in MAMBA_KEYS)),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        EMBEDDINGS_AND_HEAD + ATTENTION + NORMS_BEFORE + HEAD_NORMS + DEEPSEEK_MLP
        + SCORE_CORRECTION_BIAS,
        keys=DEEPSEEK_KEYS | {
            "attention_bias": "attention.qkv_bias", "use_qk_norm": "model.qk_norm",
        },
        defaults=UNTIED | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "n_routed_experts": 128,
            "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1408,
            "intermediate_size": 10944, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "use_qk_norm": False,
            "partial_rotary_factor": 0.5, "max_position_embeddings": 131072,
        },
        settings=SIGMOID_ROUTER,
        rope="partial",
        dense_layers="first",
        group_score="top2",
        ignored=DEEPSEEK_IGNORED,
    ),
}  # fmt: skip
EXPERT_FAMILIES["glm4_moe_lite"] = replace(
    EXPERT_FAMILIES["deepseek_v3"],
    architecture="Glm4MoeLiteForCausalLM",
    defaults=UNTIED | LATENT_DEFAULTS | {
        "num_key_value_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
        "n_routed_experts": 64, "n_shared_experts": 1, "moe_intermediate_size": 1536,
        "intermediate_size": 10240, "routed_scaling_factor": 1.8, "num_experts_per_tok": 4,
        "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
    },
    dense_layers="types",
)  # fmt: skip
