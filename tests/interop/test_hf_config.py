"""The `config.json` of published checkpoints, compared with the expected architecture."""

import pytest

from dantinox.config import ExpertsConfig, LatentConfig, RopeScaling, UserError, build_config
from dantinox.interop.hf.hf_config import hf_config_to_settings, settings_to_hf_config
from tests.error_texts import ERRORS

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 60,
}
GPT2_SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 60}
GEMMA4 = {"model_type": "gemma4_text", "vocab_size_per_layer_input": 60, "num_key_value_heads": 4}
# Keys as written by transformers before version 5, without those that all entries share, and the
# architecture they describe.
PUBLISHED = {
    "llama 2": (
        {"model_type": "llama", "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
         "rope_scaling": None, "torch_dtype": "float16",
         "max_position_embeddings": 4096, "pretraining_tp": 1, "hidden_act": "silu",
         "tie_word_embeddings": False},
        {"max_context": 4096, "norm_epsilon": 1e-5, "rope_theta": 10000.0, "qkv_bias": False,
         "weight_tying": False},
    ),
    "llama 3.2": (
        {"model_type": "llama", "rope_theta": 500000.0, "num_key_value_heads": 2,
         "tie_word_embeddings": True, "head_dim": 64,
         "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                          "rope_type": "llama3",
                          "original_max_position_embeddings": 8192}, "eos_token_id": [1, 2],
                          "mlp_bias": False},
        {"kv_heads": 2, "head_size": 64, "rope_theta": 500000.0, "weight_tying": True},
    ),
    "smollm2": (
        {"model_type": "llama", "is_llama_config": True, "rope_interleaved": False,
         "transformers.js_config": {"dtype": "q4"},
         "rope_theta": 100000, "initializer_range": 0.041},
        {"rope_theta": 100000.0, "kv_heads": 4},
    ),
    "mistral": (
        {"model_type": "mistral", "rope_theta": 1e4, "sliding_window": 4096,
         "num_key_value_heads": 2, "hidden_act": "silu"},
        {"windows": (4096,) * 4, "max_context": 131072},
    ),
    "qwen2.5": (
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131072,
         "max_window_layers": 70,
         "use_mrope": False,
         "num_key_value_heads": 2, "rope_theta": 1000000.0},
        {"windows": (None,) * 4, "qkv_bias": True, "out_bias": False, "norm_epsilon": 1e-6},
    ),
    "qwen2, sliding in every layer": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8,
         "max_window_layers": 0,
         "num_key_value_heads": 2},
        {"windows": (8, 8, 8, 8)},
    ),
    "qwen2, sliding": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8,
         "max_window_layers": 3,
         "num_key_value_heads": 2},
        {"windows": (None, None, None, 8)},
    ),
    "gemma 2": (
        {"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh",
         "hidden_activation": "gelu_pytorch_tanh", "head_dim": 16,
         "cache_implementation": "hybrid", "num_key_value_heads": 4, "sliding_window": 8,
         "query_pre_attn_scalar": 144},
        {"windows": (8, None, 8, None), "softcap": 50.0, "final_softcap": 30.0,
         "query_pre_attn_scalar": 144,
         "activation": "geglu", "norm_zero_centered": True, "scale_embeddings": True,
         "weight_tying": True},
    ),
    "gemma 3": (
        {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4,
         "sliding_window_pattern": 3,
         "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "head_dim": 16,
         "num_key_value_heads": 4, "sliding_window": 8},
        {"windows": (8, 8, None, 8), "rope_local_theta": 1e4, "rope_theta": 1e6, "qk_norm": True},
    ),
    "gemma 4 e2b": (
        {"model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32,
         "num_global_key_value_heads": None,
         "num_key_value_heads": 1, "attention_k_eq_v": False, "num_kv_shared_layers": 2,
         "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8,
         "vocab_size_per_layer_input": 60, "enable_moe_block": False, "num_experts": None,
         "expert_intermediate_size": None, "moe_intermediate_size": None, "top_k_experts": None,
         "sliding_window": 8, "final_logit_softcapping": 30.0,
         "layer_types": ["sliding_attention", "full_attention"] * 2,
         "use_bidirectional_attention": None, "rope_parameters": {
             "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6,
                                "rope_type": "proportional"},
             "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}},
        {"windows": (8, None, 8, None), "global_head_size": 32, "global_kv_heads": None,
         "kv_shared_layers": 2,
         "double_wide_mlp": True, "per_layer_dim": 8, "query_pre_attn_scalar": 1.0,
         "final_softcap": 30.0, "v_norm": True,
         "rope_local_theta": 1e4, "rope_scaling": RopeScaling("proportional", 1.0, share=0.25),
         "layer_scalar": True},
    ),
    "gemma 4 26b a4b": (
        {"model_type": "gemma4_text", "head_dim": 16, "num_key_value_heads": 4,
         "attention_k_eq_v": True, "sliding_window": 8,
         "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 8,
         "top_k_experts": 2, "moe_intermediate_size": 24, "use_bidirectional_attention": "vision",
         "per_layer_config": {"3": {"head_dim": 32, "num_key_value_heads": 2}}},
        {"windows": (8, 8, 8, None), "global_head_size": 32, "global_kv_heads": 2, "k_eq_v": True,
         "hidden_dim": 24,
         "rope_local_theta": 1e4, "rope_theta": 1e6, "experts": ExpertsConfig(8, 2, 96,
             branch_norms=True)},
    ),
    "phi 3": (
        {"model_type": "phi3", "auto_map": {"AutoConfig": "c.C"}, "rope_theta": 1e4,
         "sliding_window": 2047, "embd_pdrop": 0.0,
         "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
         "num_key_value_heads": 4,
         "rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}},
        {"max_context": 4096, "windows": (2047,) * 4},
    ),
    "olmo 2": (
        {"model_type": "olmo2", "rope_theta": 500000, "rms_norm_eps": 1e-6,
         "attention_bias": False},
        {"norm_placement": "after", "qk_norm_scope": "layer", "kv_heads": 4},
    ),
    "olmo 3": (
        {"model_type": "olmo3", "rope_theta": 500000, "rms_norm_eps": 1e-6, "sliding_window": 9,
         "num_key_value_heads": 4,
         "rope_scaling": {"attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0,
                          "factor": 8.0, "rope_type": "yarn",
                          "original_max_position_embeddings": 8192},
                          "max_position_embeddings": 65536},
        {"windows": (9, 9, 9, None), "rope_local_theta": 500000.0, "norm_placement": "after",
         "qk_norm_scope": "layer",
         "rope_scaling": RopeScaling("yarn", 8.0, 8192, attention_factor=1.2)},
    ),
    "ministral 3": (
        {"model_type": "ministral3", "head_dim": 16, "num_key_value_heads": 2,
         "sliding_window": None,
         "rope_parameters": {"type": "yarn", "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0,
                             "beta_fast": 32.0,
                             "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                             "llama_4_scaling_beta": 0.1,
                             "original_max_position_embeddings": 16384,
                             "max_position_embeddings": 262144}},
        {"query_scaling_beta": 0.1, "max_context": 262144, "windows": (None,) * 4,
         "rope_scaling": RopeScaling("yarn", 16.0, 16384, mscale=1.0, mscale_all_dim=1.0)},
    ),
    "granite 3": (
        {"model_type": "granite", "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
         "logits_scaling": 8.0,
         "residual_multiplier": 0.22, "rope_theta": 1e7, "num_key_value_heads": 2,
         "tie_word_embeddings": True},
        {"query_pre_attn_scalar": 4096.0, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
         "residual_multiplier": 0.22},
    ),
    "glm 4": (
        {"model_type": "glm4", "partial_rotary_factor": 0.5, "head_dim": 16,
         "attention_bias": False, "rope_scaling": None},
        {"partial_rotary_factor": 0.5, "norm_placement": "both", "qkv_bias": False, "kv_heads": 2},
    ),
    "command r7b": (
        {"model_type": "cohere2", "layer_norm_eps": 1e-5, "logit_scale": 0.25, "rotary_pct": 1.0,
         "sliding_window": 9,
         "sliding_window_pattern": 4, "use_gated_activation": True, "use_parallel_block": True,
         "use_embedding_sharing": True, "position_embedding_type": "rope_gptj",
         "order_of_interleaved_layers": "local_attn_first", "head_dim": 16,
         "use_parallel_embedding": True, "layer_switch": 4, "rope_theta": 50000,
         "num_key_value_heads": 2},
        {"windows": (9, 9, 9, None), "unrotated": (3,), "logits_scaling": 4.0, "norm_bias": False,
         "parallel_blocks": True},
    ),
    "exaone 4": (
        {"model_type": "exaone4", "sliding_window": 9, "sliding_window_pattern": "LLLG",
         "head_dim": 16,
         "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "num_key_value_heads": 2},
        {"windows": (9, 9, 9, None), "unrotated": (3,), "norm_placement": "after", "qk_norm": True},
    ),
    "hunyuan": (
        {"model_type": "hunyuan_v1_dense", "head_dim": 16, "num_key_value_heads": 2,
         "eod_token_id": 3, "use_qk_norm": True,
         "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0,
                          "mscale": 1.0, "type": "dynamic"}},
        {"rope_theta": 1e4 * 1000.0 ** (16 / 14), "rope_scaling": None, "qk_norm_after_rope": True},
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_ctx": 1024,
         "task_specific_params": {"text-generation": {"do_sample": True}},
         "resid_pdrop": 0.1},
        {"position": "learned", "max_context": 1024, "hidden_dim": 256, "norm": "layernorm",
         "mlp_bias": True},
    ),
    "mixtral": (
        {"model_type": "mixtral", "num_local_experts": 8, "rope_theta": 1e6,
         "router_aux_loss_coef": 0.02,
         "sliding_window": None,
         "num_key_value_heads": 2},
        {"windows": (None,) * 4, "norm_epsilon": 1e-5},
    ),
    "qwen3 moe": (
        {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
         "moe_intermediate_size": 48, "head_dim": 16,
         "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
         "max_window_layers": 4,
         "sliding_window": None},
        {"hidden_dim": 48, "qk_norm": True},
    ),
    "gpt-oss": (
        {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 4,
         "experts_per_token": 4, "head_dim": 16,
         "num_key_value_heads": 2, "initial_context_length": 4096, "rope_theta": 150000,
         "sliding_window": 9,
         "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                          "original_max_position_embeddings": 4096,
                          "rope_type": "yarn", "truncate": False}},
        {"windows": (9, None, 9, None), "sink_logits": True, "mlp_bias": True, "swiglu_limit": 7.0,
         "qkv_bias": True,
         "rope_scaling": RopeScaling("yarn", 32.0, 4096, truncate=False)},
    ),
    "deepseek v2 lite": (
        {"model_type": "deepseek_v2", "kv_lora_rank": 24, "q_lora_rank": None,
         "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
         "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
         "moe_intermediate_size": 40, "aux_loss_alpha": 0.001, "ep_size": 1,
         "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
         "norm_topk_prob": False, "scoring_func": "softmax", "seq_aux": True,
         "topk_method": "greedy", "routed_scaling_factor": 1.0, "num_key_value_heads": 4,
         "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
                          "mscale_all_dim": 0.707,
                          "original_max_position_embeddings": 4096, "type": "yarn"}},
        {"latent": LatentConfig(24, 8, 12, norm_epsilon=1e-6), "hidden_dim": 40, "head_size": 16,
         "experts": ExpertsConfig(8, 3, 80, normalize=False, dense_layers=(0,), dense_dim=96)},
    ),
    "qwen 1.5 moe": (
        {"model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 4,
         "moe_intermediate_size": 40,
         "shared_expert_intermediate_size": 72, "norm_topk_prob": False, "decoder_sparse_step": 2,
         "max_window_layers": 21,
         "sliding_window": 32768, "num_key_value_heads": 4},
        {"qkv_bias": True,
         "experts": ExpertsConfig(8, 4, 72, normalize=False, shared_gate=True, dense_layers=(0, 2),
                                  dense_dim=96)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_older_keys_give_the_same_model(name):
    config, expected = PUBLISHED[name]
    config = (GPT2_SIZES if config["model_type"] == "gpt2" else SIZES) | config
    settings = build_config(hf_config_to_settings(config))
    model = settings.architecture(60)
    assert {key: getattr(model, key) for key in expected} == expected
    again = settings_to_hf_config(settings, 60, config["model_type"])
    assert build_config(hf_config_to_settings(again, model.max_context)).architecture(60) == model


def test_max_context_with_learned_positions_is_an_error():
    with pytest.raises(UserError, match=ERRORS["has_learned_positions_for_1024"]):
        hf_config_to_settings(GPT2_SIZES | PUBLISHED["gpt2"][0], 512)


def test_rope_scaling_parameters_are_read():
    llama = build_config(hf_config_to_settings(SIZES | PUBLISHED["llama 3.2"][0])).attention
    assert (llama.rope_scaling, llama.rope_factor, llama.rope_original_context) == (
        "llama3",
        32.0,
        8192,
    )
    phi = build_config(hf_config_to_settings(SIZES | PUBLISHED["phi 3"][0], 131072))
    assert (
        phi.attention.rope_factor == 32 and phi.architecture(60).rope_scaling.factors == (2.0,) * 8
    )
    assert (
        build_config(hf_config_to_settings(SIZES | PUBLISHED["phi 3"][0]))
        .architecture(60)
        .rope_scaling.factors
        == (1.0,) * 8
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type: 'dynamic', expected one of default, linear",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "more": 1}},
            "more: 1, an unknown key for rope_type linear",
        ),
        (
            {"quantization_config": {"bits": 4}},
            "quantization_config: {'bits': 4}; only null is supported",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu', expected one of silu"),
        ({"sliding_window": 9}, "sliding_window: 9; the key is unknown"),
        (
            {"model_type": "qwen3_next"},
            "qwen3_next, which is not supported: it is qwen3_moe with gated DeltaNet layers",
        ),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["mamba"] * 4},
            "'mamba'; only attention is supported",
        ),
        ({"model_type": "bert"}, "model_type: 'bert', expected one of llama"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "; only LlamaForCausalLM of llama generates text",
        ),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": -3}, "model.dim must be"),
        ({"rope_parameters": [1]}, "rope_parameters: [1], expected an object"),
        ({"hidden_act": ["silu"]}, "hidden_act: ['silu'], expected one of silu"),
        (
            {"model_type": "gemma2", "sliding_window_pattern": 3},
            "sliding_window_pattern: 3; the key is unknown",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": None},
            "max_window_layers: null, expected a",
        ),
        (
            {"rope_scaling": {"rope_type": {}, "type": [1], "factor": 2.0}},
            "rope_type: [1], expected one of default",
        ),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers: 1000000000, expected a number from 1 to 10000",
        ),
        ({"model_type": "smollm3", "no_rope_layers": 3}, "no_rope_layers: 3, expected a list of 4"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"full_attention": 3}},
            "full_attention: 3, expected an object",
        ),
        (
            {
                "model_type": "phi3",
                "max_position_embeddings": "long",
                "rope_scaling": {"type": "su"},
            },
            "max_position_embeddings: 'long', expected a number",
        ),
        (
            {
                "model_type": "phi3",
                "original_max_position_embeddings": "long",
                "rope_scaling": {"type": "su"},
            },
            "original_max_position_embeddings: 'long', expected a number",
        ),
        (
            {"model_type": "deepseek_v2", "num_experts_per_tok": 2, "topk_method": "best"},
            "topk_method: 'best', expected one of greedy",
        ),
        (
            {"model_type": "deepseek_v3", "num_experts_per_tok": 2, "n_group": None},
            "config.json lacks n_group",
        ),
        (
            {"model_type": "deepseek_v3", "scoring_func": "softmax"},
            "scoring_func: 'softmax'; only 'sigmoid' is supported",
        ),
        (
            {"model_type": "qwen2_moe", "mlp_only_layers": ["1"]},
            "mlp_only_layers: ['1'], expected a list of numbers",
        ),
        (
            {"model_type": "ernie4_5_moe", "use_bias": True},
            "use_bias: true; only false is supported",
        ),
        (
            {"model_type": "cohere", "use_qk_norm": True},
            "use_qk_norm: true; only false is supported",
        ),
        (
            {"model_type": "cohere", "logit_scale": None},
            "logit_scale: null, expected a positive number",
        ),
        (
            {"model_type": "stablelm", "qk_layernorm": True},
            "qk_layernorm: true; only false is supported",
        ),
        (
            {"model_type": "exaone4", "sliding_window_pattern": "LLLG"},
            "sliding_window_pattern: 'LLLG', expected a number",
        ),
        (
            {"model_type": "ministral3", "rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "llama_4_scaling_beta: null, expected a positive number",
        ),
        (
            {"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type: 'dynamic', expected one of",
        ),
        (
            GEMMA4 | {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention: 'all'; only",
        ),
        (
            GEMMA4 | {"vocab_size_per_layer_input": 50},
            "vocab_size_per_layer_input: 50; only the vocab_size, 60, is supported",
        ),
        (
            GEMMA4 | {"per_layer_config": {"0": {"head_dim": 8}}},
            "per_layer_config: {'0': {'head_dim': 8}}, expected equal head_dim",
        ),
        (
            GEMMA4 | {"per_layer_config": {"3": {"sliding_window": 8}}},
            "for all layers of full_attention (3) and no other",
        ),
        (GEMMA4 | {"per_layer_config": 3}, "per_layer_config: 3, expected an object"),
        (
            GEMMA4 | {"num_kv_shared_layers": 4},
            "attention.kv_shared_layers must leave a layer of each kind",
        ),
        (GEMMA4 | {"num_kv_shared_layers": -1}, "attention.kv_shared_layers must be"),
        (GEMMA4 | {"enable_moe_block": True}, "config.json lacks num_experts"),
        (
            GEMMA4 | {"rope_parameters": {"sliding_attention": {"rope_type": "proportional"}}},
            "for sliding layers",
        ),
        ({"new\nkey": 1}, "config.json has new"),
    ],
)
def test_unsupported_config_is_an_error(changes, message):
    with pytest.raises(UserError) as caught:
        build_config(hf_config_to_settings({"model_type": "llama"} | SIZES | changes))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"attention": {"no_sink": True}}, "attention.no_sink: true"),
        ({"model": {"activation": "gelu", "qk_norm": True}}, "model.activation: 'gelu'"),
        (
            {"attention": {"use_rotary_pos": False, "absolute_pos": True}},
            "attention.absolute_pos: true",
        ),
        ({"attention": {"kv_lora_rank": 8}}, "attention.kv_lora_rank: 8"),
        ({"attention": {"sink_logits": True}}, "attention.sink_logits: true"),
        ({"model": {"norm": "layernorm", "qk_norm": True}}, "model.norm: 'layernorm'"),
        (
            {"model": {"embedding_multiplier": 2.0, "qk_norm": True}},
            "model.embedding_multiplier: 2.0",
        ),
    ],
)
def test_model_of_no_family_is_an_error(settings, names):
    with pytest.raises(UserError, match=ERRORS["no_transformers_class_represents_this"]) as caught:
        settings_to_hf_config(build_config(settings), 60)
    assert names in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "family"),
    [
        ({}, "llama"),
        ({"model": {"qk_norm": True}}, "qwen3"),
        ({"attention": {"qkv_bias": True}}, "qwen2"),
        ({"attention": {"sliding_window": True, "context_window": 7}}, "mistral"),
        ({"model": {"activation": "relu2"}}, "arcee"),
        ({"model": {"norm": "layernorm"}}, "stablelm"),
        ({"model": {"norm": "layernorm", "norm_bias": False, "parallel_blocks": True,
                    "logits_scaling": 3.0}}, "cohere"),
        ({"attention": {"qkv_bias": True}, "model": {"mlp_bias": True}}, "seed_oss"),
        ({"moe": {"use_moe": True}}, "mixtral"),
        ({"moe": {"use_moe": True, "norm_topk_prob": False}, "model": {"qk_norm": True}},
         "qwen3_moe"),
        ({"model": {"norm": "layernorm", "activation": "gelu", "mlp_bias": True},
          "attention": {"use_rotary_pos": False, "trainable_pos": True, "qkv_bias": True,
                        "out_bias": True}}, "gpt2"),
    ],
)  # fmt: skip
def test_model_is_exported_as_the_first_family_that_supports_it(settings, family):
    assert settings_to_hf_config(build_config(settings), 60)["model_type"] == family
