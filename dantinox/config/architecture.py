"""Resolves the sections `model`, `moe` and `attention` to the architecture that they define."""

import math
from typing import Any

from dantinox.config.attention_settings import AttentionSection
from dantinox.config.model_config import (
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    Platform,
    Position,
    RopeScaling,
)
from dantinox.config.model_settings import GATED_ACTIVATIONS, ModelSection
from dantinox.config.moe_settings import MoESection
from dantinox.files import UserError


def resolve_rope_scaling(a: AttentionSection, max_context: int) -> RopeScaling | None:
    """Returns the RoPE scaling with the values that its formula uses, or None if there is no
    scaling.
    """
    kind = a.rope_scaling
    if kind == "none" or not a.use_rotary_pos:
        return None
    if kind == "linear":
        return RopeScaling(kind, a.rope_factor)
    if kind == "proportional":
        return RopeScaling(kind, a.rope_factor, share=a.rope_share)
    original_context = a.rope_original_context or 1
    if kind == "llama3":
        return RopeScaling(
            kind,
            a.rope_factor,
            original_context,
            low_freq_factor=a.low_freq_factor,
            high_freq_factor=a.high_freq_factor,
        )
    if kind == "yarn":
        return RopeScaling(
            kind,
            a.rope_factor,
            original_context,
            beta_fast=a.beta_fast,
            beta_slow=a.beta_slow,
            truncate=a.rope_truncate,
            mscale=a.rope_mscale,
            mscale_all_dim=a.rope_mscale_all_dim,
            attention_factor=a.rope_attention_factor,
        )
    factors = a.rope_long_factors if max_context > original_context else a.rope_short_factors
    return RopeScaling(
        kind,
        a.rope_factor,
        original_context,
        attention_factor=a.rope_attention_factor,
        factors=factors or (),
    )


def feed_forward_width(dim: int, activation: str) -> int:
    """Returns the default of `model.hidden_dim`. A gated layer has three matrices, which `8/3 dim`
    makes as large as two.
    """
    if activation not in GATED_ACTIVATIONS:
        return 4 * dim
    return math.ceil(8 * dim / 3 / 32) * 32


def resolve_experts(moe: MoESection, hidden_dim: int) -> ExpertsConfig:
    """Returns the resolved expert settings; `hidden_dim` is the width of one expert."""
    shared_dim = 0
    if moe.shared_experts:
        shared_dim = moe.shared_hidden_dim or moe.shared_experts * hidden_dim
    grouped = moe.top_k_groups < moe.n_groups  # otherwise a token may use experts of all groups
    return ExpertsConfig(
        count=moe.n_experts,
        top_k=moe.top_k_mlp,
        shared_dim=shared_dim,
        score=moe.score_function,
        normalize=moe.norm_topk_prob,
        bias=moe.choice_bias or moe.bias_update_rate > 0,
        shared_gate=moe.shared_gate,
        scaling=moe.routed_scaling,
        logit_bias=moe.router_bias,
        groups=moe.n_groups if grouped else 1,
        top_groups=moe.top_k_groups if grouped else 1,
        group_score=moe.group_score if grouped else "max",
        dense_layers=tuple(sorted(moe.dense_layers)),
        dense_dim=(moe.dense_hidden_dim or hidden_dim) if moe.dense_layers else 0,
        branch_norms=moe.branch_norms,
    )


def _position_kind(a: AttentionSection) -> Position:
    if a.use_rotary_pos:
        return "rope"
    if a.trainable_pos:
        return "learned"
    if a.absolute_pos:
        return "sinusoidal"
    return "none"


def resolve_architecture(
    m: ModelSection, moe: MoESection, a: AttentionSection, vocab_size: int, platform: Platform
) -> ModelConfig:
    """Returns the resolved architecture. A field that is not in `resolved` equals the setting of
    the same name.
    """
    if m.padded_vocab_size is not None and m.padded_vocab_size < vocab_size:
        sentence = (
            f"model.padded_vocab_size must be at least the vocabulary of {vocab_size}, got"
            f" {m.padded_vocab_size}"
        )
        raise UserError(sentence, key="model.padded_vocab_size", value=m.padded_vocab_size)
    hidden_dim = m.hidden_dim or feed_forward_width(m.dim, m.activation)
    if moe.expansion is not None:
        hidden_dim = max(1, round(moe.expansion * m.dim))
    head_size = m.head_size or m.dim // m.n_heads
    kv_heads = m.kv_heads or m.n_heads
    # A query also sees the key of its own position.
    window = None if a.context_window is None else a.context_window + 1
    multiplier = a.attention_multiplier
    sub_norms = m.sub_norms
    if sub_norms is None:
        sub_norms = m.projections == "ternary" and not moe.use_moe
    layer_types = [a.layer_types[i % len(a.layer_types)] for i in range(m.num_blocks)]
    resolved: dict[str, Any] = {
        "vocab_size": m.padded_vocab_size or vocab_size,
        "kv_heads": kv_heads,
        "head_size": head_size,
        "hidden_dim": hidden_dim,
        "windows": tuple(
            window if a.sliding_window and kind == "sliding" else None for kind in layer_types
        ),
        "position": _position_kind(a),
        "rope_scaling": resolve_rope_scaling(a, m.max_context),
        "rope_local_theta": a.rope_local_theta if a.sliding_window else None,
        "unrotated": tuple(
            i for i in range(m.num_blocks) if not a.rope_layers[i % len(a.rope_layers)]
        ),
        # Scores are divided by the square root of this number.
        "query_pre_attn_scalar": a.query_pre_attn_scalar if multiplier is None else multiplier**-2,
        # A number equal to that of the other layers becomes None, so that equal architectures
        # compare equal.
        "global_head_size": None if a.global_head_size == head_size else a.global_head_size,
        "global_kv_heads": None if a.global_kv_heads == kv_heads else a.global_kv_heads,
        "double_wide_mlp": m.double_wide_mlp and a.kv_shared_layers > 0,
        "sub_norms": sub_norms,
        "softcap": a.attn_logit_softcapping,
        "final_softcap": m.final_logit_softcapping,
        "remat": m.remat_policy if m.gradient_checkpointing else "none",
        "platform": platform,
    }
    if moe.use_moe:
        resolved["experts"] = resolve_experts(moe, hidden_dim)
    if a.kv_lora_rank is not None:
        resolved["latent"] = LatentConfig(
            rank=a.kv_lora_rank,
            rotated_size=a.qk_rope_head_dim or head_size // 2,
            value_size=a.v_head_dim or head_size,
            query_rank=a.q_lora_rank,
            norm_epsilon=a.latent_norm_epsilon or m.norm_epsilon,
        )
    unchanged = {
        name: value
        for name, value in (vars(m) | vars(a)).items()
        if name in ModelConfig.__dataclass_fields__
    }
    return ModelConfig(**unchanged | resolved)
