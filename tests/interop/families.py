"""Small models of every family, as keyword arguments of transformers' configurations. This module
does not need torch.
"""

COMMON = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e3, "factor": 4.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 6,
            "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.5, 6.0]}  # fmt: skip
FOUR = {"num_hidden_layers": 4}
PATTERN = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
SWITCHED = {"use_sliding_window": True, "sliding_window": 6}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
          "moe_intermediate_size": 24,
          "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}  # fmt: skip
DEEPSEEK = ROUTED | {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None,
                     "qk_nope_head_dim": 12,
                     "qk_rope_head_dim": 8, "v_head_dim": 10}  # fmt: skip
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.3,
}
LOCAL = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
PROPORTIONAL = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e5,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}

# For each family: the name of its configuration class in transformers, and arguments with the
# options of published models.
FAMILIES = {
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 6, "head_dim": 12}),
    "qwen2": ("Qwen2Config", {"rope_parameters": YARN, **SWITCHED, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 12, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "phi3": ("Phi3Config", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 6}),
    "olmo2": ("Olmo2Config", {}),
    "gemma2": (
        "Gemma2Config",
        {**PATTERN, "head_dim": 12, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {**PATTERN, "head_dim": 12, "query_pre_attn_scalar": 20, "rope_parameters": LOCAL},
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 5,
            "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
            "sliding_window": 6,
            "head_dim": 12,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 67,
            "final_logit_softcapping": 4.0,
            "rope_parameters": PROPORTIONAL,
        },
    ),
    "olmo3": (
        "Olmo3Config",
        {
            **PATTERN,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "olmo": ("OlmoConfig", {}),
    "gemma": ("GemmaConfig", {"head_dim": 12}),
    "ministral": ("MinistralConfig", {**PATTERN, "head_dim": 12}),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 12,
            "rope_parameters": (
                YARN | {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
            ),
        },
    ),
    "glm": ("GlmConfig", {"head_dim": 12, "partial_rotary_factor": 0.5}),
    "glm4": ("Glm4Config", {"head_dim": 12, "partial_rotary_factor": 0.5}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),
    "phi": ("PhiConfig", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 6}),
    "cohere": ("CohereConfig", {"logit_scale": 0.4}),
    "cohere2": ("Cohere2Config", {**PATTERN, "logit_scale": 0.4}),
    "exaone4": ("Exaone4Config", PATTERN),
    "nanochat": ("NanoChatConfig", {}),
    "helium": ("HeliumConfig", {"head_dim": 8}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {"head_dim": 12}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 12}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 12}),
    "arcee": ("ArceeConfig", {}),
    "bitnet": (
        "BitNetConfig",
        {},
    ),  # with float projections; `bitnet_live.py` compares ternary ones
    "gpt2": ("GPT2Config", {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "mixtral": ("MixtralConfig", EXPERTS),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**EXPERTS, "moe_intermediate_size": 24, "head_dim": 12, "norm_topk_prob": True},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 28,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssConfig",
        {
            **EXPERTS,
            "head_dim": 12,
            "sliding_window": 6,
            "swiglu_limit": 1.5,
            "rope_parameters": YARN | {"truncate": False, "beta_fast": 8.0},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **DEEPSEEK,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **DEEPSEEK,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "q_lora_rank": 20,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "granite": ("GraniteConfig", MULTIPLIERS),
    "granitemoe": ("GraniteMoeConfig", {**MULTIPLIERS, **EXPERTS}),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {**MULTIPLIERS, **EXPERTS, "shared_intermediate_size": 28},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **MULTIPLIERS,
            "num_local_experts": 0,
            "shared_intermediate_size": 28,
            "layer_types": ["full_attention"] * 2,
            "position_embedding_type": None,
            "mamba_n_heads": 8,
        },
    ),
    "dots1": (
        "Dots1Config",
        {**ROUTED, "head_dim": 12, "norm_topk_prob": True, "sliding_window": None},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {
            **{key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"},
            **{
                "num_mtp_layers": 0,
                "q_lora_rank": 20,
                "mlp_layer_types": ["sparse", "dense"],
                "rms_norm_eps": 1e-5,
            },
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **ROUTED,
            "head_dim": 12,
            "norm_topk_prob": True,
            "use_qk_norm": True,
            "num_mtp_layers": 0,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 24,
            "head_dim": 12,
        },
    ),
}
GPT2_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
              "num_key_value_heads",
              "max_position_embeddings")  # fmt: skip


def keywords(family: str, **changes) -> tuple[str, dict]:
    """Returns the configuration class and arguments of a small model of a family, with changes."""
    name, own = FAMILIES[family]
    common = {
        key: value for key, value in COMMON.items() if family != "gpt2" or key not in GPT2_NAMES
    }
    return name, {**common, **own, **changes}
