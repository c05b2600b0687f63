"""Groups of related settings inside the large sections, for help pages and searches."""

from typing import NamedTuple


class SettingGroup(NamedTuple):
    """A group of settings in one section. `names` contains the setting names, separated by spaces."""

    section: str
    title: str
    names: str


GROUPS: dict[str, SettingGroup] = {
    "size": SettingGroup(
        "model", "Width, depth, heads and context",
        "depth dim n_heads kv_heads head_size num_blocks hidden_dim max_context padded_vocab_size per_layer_dim",
    ),
    "embeddings": SettingGroup(
        "model", "Embeddings, output layer and residual stream",
        "weight_tying head_bias final_logit_softcapping scale_embeddings embedding_multiplier residual_multiplier "
        "logits_scaling norm_embeddings parallel_blocks layer_scalar",
    ),
    "feed_forward": SettingGroup(
        "model", "Dense feed-forward layers", "activation swiglu_limit swiglu_alpha mlp_bias double_wide_mlp"
    ),
    "norms": SettingGroup(
        "model", "Normalization layers",
        "norm norm_placement norm_epsilon norm_scale norm_bias norm_zero_centered qk_norm qk_norm_scope qk_norm_after_rope "
        "v_norm",
    ),
    "compute": SettingGroup(
        "model", "Dropout, rematerialization, scanned layers and dtype",
        "dropout_rate gradient_checkpointing remat_policy scan_layers dtype",
    ),
    "experts": SettingGroup(
        "moe", "Experts and their sizes",
        "use_moe n_experts top_k_mlp shared_experts shared_hidden_dim shared_gate branch_norms dense_layers dense_hidden_dim "
        "expansion",
    ),
    "routing": SettingGroup(
        "moe", "Choice of experts and load balancing",
        "score_function norm_topk_prob routed_scaling router_bias choice_bias n_groups top_k_groups group_score alpha_balance "
        "router_z_loss bias_update_rate",
    ),
    "positions": SettingGroup(
        "attention", "Position embeddings, RoPE and its scaling",
        "use_rotary_pos trainable_pos absolute_pos rope_theta rope_local_theta rope_layers partial_rotary_factor rope_scaling "
        "rope_factor rope_original_context low_freq_factor high_freq_factor beta_fast beta_slow rope_truncate rope_mscale "
        "rope_mscale_all_dim rope_attention_factor query_scaling_beta rope_share rope_short_factors rope_long_factors",
    ),
    "window": SettingGroup("attention", "Sliding-window layers", "sliding_window context_window layer_types"),
    "scores": SettingGroup(
        "attention", "Attention scores, biases, gate and kernel",
        "kernel qkv_bias out_bias query_pre_attn_scalar attention_multiplier no_sink gate_bias attn_logit_softcapping "
        "sink_logits",
    ),
    "latent": SettingGroup(
        "attention", "Multi-head latent attention (MLA)",
        "kv_lora_rank q_lora_rank qk_rope_head_dim v_head_dim latent_norm_epsilon",
    ),
    "layer_heads": SettingGroup(
        "attention", "Heads of full-attention layers, and shared keys and values",
        "global_head_size global_kv_heads k_eq_v kv_shared_layers",
    ),
    "objective": SettingGroup(
        "training", "Objective and starting weights",
        "objective preference_beta label_smoothing simpo_margin kto_desirable_weight kto_undesirable_weight z_loss init_from",
    ),
    "batches": SettingGroup(
        "training", "Steps, batch size and seed",
        "steps epochs tokens_per_parameter max_minutes batch_size grad_accum seed deterministic",
    ),
    "optimizer": SettingGroup(
        "training", "Optimizer, learning rate and its schedule",
        "optimizer lr muon_lr muon_steps muon_normalize min_lr_ratio warmup_steps schedule decay_fraction weight_decay "
        "cautious_decay beta1 beta2 ema grad_clip nan_policy",
    ),
    "evaluation": SettingGroup(
        "training", "Evaluations, checkpoints and samples",
        "eval_every eval_tokens checkpoint_every sample_every sample_prompt keep_last patience",
    ),
    "request": SettingGroup(
        "generation", "Length, samples, seed and end of a sequence",
        "max_new_tokens n seed stop keep_stop stop_token_ids ignore_eos min_tokens banned_strings banned_regexes "
        "token_healing json_whitespace",
    ),
    "loops": SettingGroup(
        "generation", "Detection of text that repeats itself",
        "loop_stop loop_temperature_factor loop_max_period loop_min_repeats loop_min_tokens",
    ),
    "decoding": SettingGroup(
        "generation",
        "KV cache, precision and devices of decoding",
        "use_cache weights matmul_dtype matmul_kernel tensor_parallel",
    ),
    "speculation": SettingGroup(
        "generation", "Speculative decoding: draft tokens that are verified several at a time",
        "speculation draft_run draft_tokens ngram_size",
    ),
    "guidance": SettingGroup("generation", "Classifier-free guidance", "guidance_scale negative_prompt"),
    "beams": SettingGroup("generation", "Beam search", "num_beams length_penalty early_stopping"),
    "steps": SettingGroup(
        "generation", "Greedy decoding, and the order of sampling steps", "greedy strategy preset sampler_order ties"
    ),
    "edits": SettingGroup(
        "generation", "Allowed, banned and biased tokens",
        "no_repeat_ngram logit_bias sequence_bias allowed_tokens banned_tokens bad_words",
    ),
    "penalties": SettingGroup(
        "generation", "Repetition, presence, frequency and DRY penalties",
        "encoder_repetition_penalty repetition_penalty repetition_range repetition_slope repetition_scope presence_penalty "
        "frequency_penalty presence_scope dry_multiplier dry_base dry_allowed_length dry_range dry_breakers",
    ),
    "temperatures": SettingGroup(
        "generation", "Temperature, dynamic temperature and smoothing",
        "temperature dynatemp_low dynatemp_high dynatemp_exponent smoothing_factor smoothing_curve",
    ),
    "truncation": SettingGroup(
        "generation", "Filters that keep likely tokens, and XTC",
        "top_k top_p top_p_rule min_p top_a tail_free typical epsilon_cutoff eta_cutoff top_n_sigma min_k p_less top_h "
        "top_h_rule xtc_probability xtc_threshold",
    ),
    "surprise": SettingGroup(
        "generation", "Mirostat, adaptive-p and skew",
        "mirostat mirostat_tau mirostat_eta skew adaptive_target adaptive_decay",
    ),
    "watermark": SettingGroup("generation", "SynthID watermark", "watermark_keys watermark_ngram"),
    "thresholds": SettingGroup(
        "router", "Presets, thresholds and base values",
        "router_preset use_attention low_entropy low_varentropy clarify_entropy high_entropy high_varentropy entropy_scale "
        "varentropy_scale temperature_min temperature_max base_temperature base_top_p base_top_k base_min_p",
    ),
    "strategies": SettingGroup(
        "router", "Numbers of the strategies clarify, explore and resample",
        "clarify_token clarify_cooldown clarify_temperature_factor clarify_temperature_attn_entropy clarify_temperature_max "
        "explore_temperature_factor explore_temperature_interaction explore_temperature_max explore_top_k_disagreement "
        "explore_top_k_min resample_temperature_factor resample_temperature_attn_varentropy resample_temperature_min "
        "resample_temperature_min_factor resample_top_p_attn_entropy resample_top_p_min",
    ),
    "adaptive": SettingGroup(
        "router", "Numbers of the strategy adaptive, and the scores of its candidates",
        "candidates adaptive_temperature_uncertainty adaptive_temperature_attn_uncertainty adaptive_temperature_agreement "
        "adaptive_top_p_attn_varentropy adaptive_top_p_min adaptive_top_p_max adaptive_top_k_interaction "
        "adaptive_top_k_agreement adaptive_top_k_min adaptive_top_k_max adaptive_min_p_uncertainty adaptive_min_p_min "
        "adaptive_min_p_max score_logprob score_entropy score_attn_entropy score_varentropy score_attn_varentropy "
        "score_agreement score_interaction",
    ),
}  # fmt: skip
GROUP_OF = {f"{group.section}.{name}": title for title, group in GROUPS.items() for name in group.names.split()}
