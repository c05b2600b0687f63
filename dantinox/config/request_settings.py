"""The settings of a generation request as keyword arguments, for type checkers and editors.

The config sections `generation`, `router` and `kv` define the ranges, defaults and help texts of these settings. A test checks
that names and types here equal those in the sections.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict


class SamplingSettings(TypedDict, total=False):
    """The settings of the config sections `generation`, `router` and `kv`, except `max_new_tokens`.

    Settings of `kv` have the prefix `kv_`.
    """

    seed: int | None
    stop: Sequence[str]
    keep_stop: bool
    stop_token_ids: Sequence[int | str]
    ignore_eos: bool
    banned_strings: Sequence[str]
    banned_regexes: Sequence[str]
    loop_stop: bool
    loop_temperature_factor: float
    loop_max_period: int
    loop_min_repeats: int
    loop_min_tokens: int
    token_healing: bool
    json_whitespace: Literal["compact", "flexible"]
    use_cache: bool
    weights: Literal["auto", "float32", "bfloat16", "int8", "int4"]
    matmul_dtype: Literal["auto", "float32", "bfloat16"]
    matmul_kernel: Literal["auto", "xla", "native"]
    tensor_parallel: int
    speculation: Literal["off", "ngram", "draft"]
    draft_run: str | None
    draft_tokens: int
    ngram_size: int
    greedy: bool
    guidance_scale: float
    negative_prompt: str
    num_beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    strategy: Literal["chain", "entropy"]
    preset: Literal["default", "hf", "vllm", "llamacpp", "kobold", "koboldcpp"]
    sampler_order: Sequence[int | str] | None
    no_repeat_ngram: int
    logit_bias: Mapping[str, float]
    sequence_bias: Sequence[tuple[str | Sequence[int], float]]
    allowed_tokens: Sequence[int | str]
    banned_tokens: Sequence[int | str]
    bad_words: Sequence[str | Sequence[int]]
    min_tokens: int
    encoder_repetition_penalty: float
    repetition_penalty: float
    repetition_range: int
    repetition_slope: float
    repetition_scope: Literal["all", "output"]
    presence_penalty: float
    frequency_penalty: float
    presence_scope: Literal["all", "output"]
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_range: int
    dry_breakers: Sequence[str | int]
    dynatemp_low: float
    dynatemp_high: float
    dynatemp_exponent: float
    temperature: float
    smoothing_factor: float
    smoothing_curve: float
    top_k: int | None
    top_p: float | None
    top_p_rule: Literal["inclusive", "exclusive"]
    min_p: float
    top_a: float
    tail_free: float
    typical: float
    epsilon_cutoff: float
    eta_cutoff: float
    top_n_sigma: float
    min_k: float
    p_less: Literal["off", "plain", "norm"]
    top_h: float
    top_h_rule: Literal["renormalized", "cumulative"]
    xtc_probability: float
    xtc_threshold: float
    ties: Literal["first", "all"]
    mirostat: Literal[0, 1, 2]
    mirostat_tau: float
    mirostat_eta: float
    skew: float
    adaptive_target: float
    adaptive_decay: float
    watermark_keys: Sequence[int]
    watermark_ngram: int
    router_preset: Literal["guide", "calibrated"]
    use_attention: bool
    low_entropy: float | None
    low_varentropy: float | None
    clarify_entropy: float | None
    high_entropy: float | None
    high_varentropy: float | None
    entropy_scale: float | None
    varentropy_scale: float | None
    temperature_min: float | None
    temperature_max: float | None
    base_temperature: float
    base_top_p: float
    base_top_k: int
    base_min_p: float
    candidates: int
    clarify_token: int | str | None
    clarify_cooldown: int
    clarify_temperature_factor: float
    clarify_temperature_attn_entropy: float
    clarify_temperature_max: float
    explore_temperature_factor: float
    explore_temperature_interaction: float
    explore_temperature_max: float
    explore_top_k_disagreement: float
    explore_top_k_min: int
    resample_temperature_factor: float
    resample_temperature_attn_varentropy: float
    resample_temperature_min: float | None
    resample_temperature_min_factor: float | None
    resample_top_p_attn_entropy: float
    resample_top_p_min: float
    adaptive_temperature_uncertainty: float
    adaptive_temperature_attn_uncertainty: float
    adaptive_temperature_agreement: float
    adaptive_top_p_attn_varentropy: float
    adaptive_top_p_min: float
    adaptive_top_p_max: float
    adaptive_top_k_interaction: float
    adaptive_top_k_agreement: float
    adaptive_top_k_min: int
    adaptive_top_k_max: int
    adaptive_min_p_uncertainty: float
    adaptive_min_p_min: float
    adaptive_min_p_max: float
    score_logprob: float
    score_entropy: float
    score_attn_entropy: float
    score_varentropy: float
    score_attn_varentropy: float
    score_agreement: float
    score_interaction: float
    kv_budget: float | None
    kv_budget_tokens: int | None
    kv_policy: Literal["snapkv+ema", "expected_attention", "kvzip", "streaming", "tova", "h2o", "random"]
    kv_signal: Literal["uniform", "entropy", "coverage", "distance", "loss"]
    kv_dtype: Literal["auto", "float32", "bfloat16", "int8", "int4"]
    kv_sinks: int
    kv_recent: int
    kv_window: int
    kv_pool: int
    kv_decay: float | Literal["entropy"]
    kv_scale_min: float
    kv_scale_max: float
    kv_grouping: Literal["max", "mean", "min"]
    kv_calibration: str | None


class RequestSettings(SamplingSettings, total=False):
    """All settings of the config sections `generation`, `router` and `kv`. Settings of `kv` have the prefix `kv_`."""

    max_new_tokens: int
