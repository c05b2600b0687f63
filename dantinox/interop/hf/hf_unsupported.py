"""Keys of `config.json` that are ignored or must have a fixed value, and model families that are
not supported.
"""

from typing import Any

# Keys that do not change the logits: they describe training, execution and labels. Special tokens
# are handled in the module `checkpoints`.
IGNORED_KEYS = frozenset((
    "model_type", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
    "decoder_start_token_id", "transformers_version", "_name_or_path", "architectures", "auto_map",
    "dtype", "torch_dtype", "initializer_range", "output_hidden_states", "output_attentions",
    "return_dict", "chunk_size_feed_forward", "id2label", "label2id", "problem_type", "use_cache",
    "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "pretraining_tp",
    "_attn_implementation", "_attn_implementation_autoset", "cache_implementation",
    "task_specific_params", "tokenizer_class", "transformers.js_config", "torchscript",
    "tf_legacy_loss", "use_bfloat16", "finetuning_task", "prefix",
))  # fmt: skip
# Generation settings that older versions of transformers wrote into every config.json.
IGNORED_KEYS |= frozenset((
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens",
))  # fmt: skip
# Keys that must have the listed value, or one of the listed values.
SUPPORTED_VALUES: dict[str, Any] = {
    "is_encoder_decoder": False, "is_decoder": False, "add_cross_attention": False,
    "cross_attention_hidden_size": None, "use_bidirectional_attention": (None, False),
    "pruned_heads": {}, "tie_encoder_decoder": False, "quantization_config": None,
    "use_mrope": False, "rope_interleaved": False, "is_llama_config": True, "attention_bias": False,
    "mlp_bias": False, "clip_qkv": None,
}  # fmt: skip

# For each unsupported family: the most similar supported family, and the features that DantinoX
# lacks.
UNSUPPORTED_FAMILIES = {
    "qwen3_next": (
        "qwen3_moe",
        "gated DeltaNet layers, which have a recurrent state instead of a KV cache",
    ),
    "qwen3_5_text": (
        "qwen3",
        "gated DeltaNet layers, which have a recurrent state instead of a KV cache",
    ),
    "qwen3_5_moe_text": (
        "qwen3_moe",
        "gated DeltaNet layers, which have a recurrent state instead of a KV cache",
    ),
    "deepseek_v32": ("deepseek_v3", "an indexer that selects the keys of each query"),
    "glm_moe_dsa": ("deepseek_v3", "an indexer that selects the keys of each query"),
    "longcat_flash": (
        "deepseek_v3",
        "experts that return their input, and two attention modules per layer",
    ),
    "kimi_linear": (
        "deepseek_v3",
        "linear attention, which has a recurrent state instead of a KV cache",
    ),
    "phimoe": ("mixtral", "SparseMixer routing, and layer norms together with experts"),
    "llama4_text": ("llama", "chunked attention, and experts with weighted inputs"),
    "jamba": ("mixtral", "Mamba layers"),
    "falcon_h1": ("llama", "Mamba layers"),
    "bamba": ("llama", "Mamba layers"),
    "nemotron_h": ("llama", "Mamba layers"),
    "mamba2": ("llama", "Mamba layers"),
    "lfm2": ("qwen3", "short convolutions"),
    "lfm2_moe": ("qwen3_moe", "short convolutions"),
    "gemma3n_text": (
        "gemma3_text",
        "AltUp, LAuReL, per-layer embeddings, and keys and values shared between layers",
    ),
    "aya_vision": (
        "cohere2",
        "the vision model, and logit scaling, which only some versions of transformers apply",
    ),
    "paligemma": ("gemma", "the vision model, and bidirectional attention over a prompt"),
    "gemma3n": (
        "gemma3_text",
        "the vision and audio models, AltUp, LAuReL, and per-layer embeddings",
    ),
    "llama4": ("llama", "the vision model"),
    "qwen3_vl_moe": ("qwen3_moe", "the vision model, and experts stored as one tensor"),
    "zamba2": ("llama", "Mamba 2 layers and blocks shared between layers"),
    "nemotron": ("llama", "layernorm with 1 + weight, and relu2 without a gate"),
    "apertus": ("qwen3", "the xIELU activation with learned parameters"),
    "falcon": ("llama", "parallel blocks with two norms, exact GELU, and ALiBi"),
    "gpt_neox": ("phi", "parallel blocks with two norms, and exact GELU"),
    "bloom": ("gpt2", "ALiBi"),
    "mpt": ("gpt2", "ALiBi"),
    "opt": ("gpt2", "ReLU, and positions that start at two"),
    "minicpm3": (
        "deepseek_v2",
        "a dense feed-forward layer with latent attention, and multipliers",
    ),
    "exaone": ("llama", "its tensor names (exaone4 is supported)"),
    "chatglm": ("glm", "its tensor names (glm is the same model in the format of transformers)"),
    "minimax": ("mixtral", "lightning attention layers"),
    "minimax_m2": ("qwen3_moe", "sigmoid scores with a bias together with qk_norm_scope: layer"),
    "rwkv": ("llama", "layers without attention"),
}
