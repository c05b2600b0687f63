"""Contradictions among the settings of the sections `model`, `moe` and `attention`."""

from collections.abc import Iterator

from dantinox.config.attention_settings import AttentionSection
from dantinox.config.base import Conflict
from dantinox.config.model_settings import ModelSection
from dantinox.config.moe_settings import MoESection

# Settings of `attention` that do not apply to attention over latent vectors.
INACTIVE_WITH_LATENTS = (
    "qkv_bias", "out_bias", "gate_bias", "query_pre_attn_scalar", "attention_multiplier",
    "query_scaling_beta", "partial_rotary_factor", "rope_layers", "global_head_size",
    "global_kv_heads", "k_eq_v", "kv_shared_layers",
)  # fmt: skip


def model_conflicts(m: ModelSection, moe: MoESection, a: AttentionSection) -> Iterator[Conflict]:
    """Yields an error for each contradiction among the settings of the architecture."""
    yield from _head_conflicts(m, a)
    yield from _layer_conflicts(m, a)
    yield from _projection_conflicts(m, moe, a)
    if a.attention_multiplier is not None and a.query_pre_attn_scalar is not None:
        yield (
            "attention.attention_multiplier",
            "and attention.query_pre_attn_scalar both scale scores: set one of them",
        )
    if a.absolute_pos and m.dim % 2:
        yield "model.dim", f"must be even with attention.absolute_pos, got {m.dim}"
    if m.hidden_dim is not None and moe.expansion is not None:
        yield (
            "model.hidden_dim",
            "and moe.expansion both set the feed-forward width: set one of them",
        )
    if moe.use_moe and moe.top_k_mlp > moe.n_experts:
        yield (
            "moe.top_k_mlp",
            f"must be at most moe.n_experts, got {moe.top_k_mlp} and {moe.n_experts}",
        )
    if (
        moe.use_moe
        and moe.top_k_mlp == 1
        and moe.norm_topk_prob
        and moe.n_experts > 1
        and not moe.branch_norms
    ):
        yield (
            "moe.norm_topk_prob",
            (
                "must be false with moe.top_k_mlp: 1, because every weight would be 1 and the"
                " router could not learn"
            ),
        )
    positions = [
        f"attention.{n}"
        for n in ("absolute_pos", "trainable_pos", "use_rotary_pos")
        if getattr(a, n)
    ]
    if len(positions) > 1:
        yield (
            positions[0],
            f"and {' and '.join(positions[1:])} exclude each other: set all but one to false",
        )
    yield from _rope_scaling_conflicts(m, a)
    if moe.use_moe:
        yield from _expert_conflicts(m.num_blocks, moe)
    if not a.rope_layers:
        yield "attention.rope_layers", "must have at least one entry, got []"
    if a.sliding_window and a.context_window is None:
        yield (
            "attention.context_window",
            "must be an integer ≥ 0 when attention.sliding_window is true, got null",
        )
    if not a.layer_types:
        yield "attention.layer_types", "must name at least one of sliding, full, got []"


def _head_conflicts(m: ModelSection, a: AttentionSection) -> Iterator[Conflict]:
    """Yields an error for each contradiction among the number, the size and the rotated part of
    heads.
    """
    kv_heads = m.kv_heads or m.n_heads
    head_size = m.head_size or m.dim // m.n_heads
    rotated = int(head_size * a.partial_rotary_factor)
    if m.head_size is None and m.dim % m.n_heads:
        yield (
            "model.dim",
            (
                f"must be a multiple of model.n_heads when model.head_size is null, got {m.dim} and"
                f" {m.n_heads}"
            ),
        )
    if m.n_heads % kv_heads:
        yield "model.kv_heads", f"must divide model.n_heads, got {kv_heads} and {m.n_heads}"
    if a.kv_lora_rank is not None:
        yield from _latent_conflicts(m, a, a.qk_rope_head_dim or head_size // 2)
    elif a.use_rotary_pos and head_size % 2:
        yield "model.head_size", f"must be even with attention.use_rotary_pos, got {head_size}"
    elif a.use_rotary_pos and (rotated < 2 or rotated % 2):
        share = (
            f"of model.head_size {head_size} must be an even number of at least 2, got {rotated}"
        )
        yield "attention.partial_rotary_factor", share


def _latent_conflicts(
    m: ModelSection, a: AttentionSection, rotated_size: int
) -> Iterator[Conflict]:
    """Yields an error for each setting that attention over latent vectors does not support."""
    for key in INACTIVE_WITH_LATENTS:
        if getattr(a, key) != AttentionSection.model_fields[key].default:
            yield f"attention.{key}", "has no effect with attention.kv_lora_rank: leave it out"
    if not a.use_rotary_pos or m.kv_heads not in (None, m.n_heads) or m.qk_norm:
        needed = "attention.use_rotary_pos: true, model.kv_heads: null and model.qk_norm: false"
        yield (
            "attention.kv_lora_rank",
            f"needs {needed}: heads have separate keys, and latents are normalized",
        )
    if rotated_size % 2:
        yield "attention.qk_rope_head_dim", f"must be even, got {rotated_size}"
    if m.v_norm:
        yield "model.v_norm", "must be false with attention.kv_lora_rank: latents are normalized"


def _rope_scaling_conflicts(m: ModelSection, a: AttentionSection) -> Iterator[Conflict]:
    """Yields an error for each contradiction between `rope_scaling` and the numbers of its
    formula.
    """
    if a.rope_scaling not in ("none", "proportional") and a.rope_factor == 1:
        yield (
            "attention.rope_factor",
            f"must be more than 1 with attention.rope_scaling: {a.rope_scaling}, got 1",
        )
    if a.rope_scaling in ("llama3", "yarn", "longrope") and a.rope_original_context is None:
        yield (
            "attention.rope_original_context",
            f"must be set with attention.rope_scaling: {a.rope_scaling}",
        )
    if a.rope_scaling == "llama3" and a.low_freq_factor >= a.high_freq_factor:
        factors = f"got {a.low_freq_factor:g} and {a.high_freq_factor:g}"
        yield (
            "attention.low_freq_factor",
            f"must be less than attention.high_freq_factor, {factors}",
        )
    if a.rope_scaling == "yarn" and (a.beta_slow >= a.beta_fast or a.rope_theta <= 1):
        needed = "attention.beta_slow < attention.beta_fast and attention.rope_theta > 1"
        yield (
            "attention.rope_scaling",
            f"yarn needs {needed}, got {a.beta_slow:g}, {a.beta_fast:g} and {a.rope_theta:g}",
        )
    if a.rope_scaling == "longrope":
        head_size = m.head_size or m.dim // m.n_heads
        frequencies = int(head_size * a.partial_rotary_factor) // 2  # each rotates two dimensions
        for key in ("rope_short_factors", "rope_long_factors"):
            count = len(getattr(a, key) or ())
            if count != frequencies:
                yield (
                    f"attention.{key}",
                    f"must contain {frequencies} numbers, one per frequency of a head, got {count}",
                )


def _projection_conflicts(
    m: ModelSection, moe: MoESection, a: AttentionSection
) -> Iterator[Conflict]:
    """Yields an error for each setting that ternary projections or sub-norms do not support."""
    if m.projections == "ternary" and a.kv_lora_rank is not None:
        yield (
            "model.projections",
            (
                "must be float with attention.kv_lora_rank: latent"
                " attention has no ternary projections"
            ),
        )
    if m.sub_norms and a.kv_lora_rank is not None:
        yield (
            "model.sub_norms",
            "must be false with attention.kv_lora_rank: the output of latent attention has no norm",
        )
    if m.sub_norms and moe.use_moe:
        yield "model.sub_norms", "must be false with moe.use_moe: experts have no such norm"


def _layer_conflicts(m: ModelSection, a: AttentionSection) -> Iterator[Conflict]:
    """Yields an error for each contradiction among the settings that make layers differ."""
    L = m.num_blocks
    shared = a.kv_shared_layers
    size = a.global_head_size
    if m.n_heads % (a.global_kv_heads or 1):
        yield (
            "attention.global_kv_heads",
            f"must divide model.n_heads, got {a.global_kv_heads} and {m.n_heads}",
        )
    if (
        size is not None
        and a.use_rotary_pos
        and (size % 2 or int(size * a.partial_rotary_factor) % 2)
    ):
        rule = (
            "and its product with attention.partial_rotary_factor must be even with"
            " attention.use_rotary_pos"
        )
        yield "attention.global_head_size", f"{rule}, got {size} and {a.partial_rotary_factor:g}"
    if size is not None and a.rope_scaling == "longrope":
        yield (
            "attention.global_head_size",
            "must be null with attention.rope_scaling: longrope, whose factors fit one head size",
        )
    if m.per_layer_dim and m.activation == "clamped_swiglu":
        yield (
            "model.per_layer_dim",
            "must be 0 with model.activation: clamped_swiglu, which needs two projections",
        )
    if shared and m.scan_layers:
        yield (
            "attention.kv_shared_layers",
            "must be 0 with model.scan_layers: scanned layers compute their own keys",
        )
    if not a.layer_types:
        return
    is_sliding = [
        a.sliding_window and a.layer_types[i % len(a.layer_types)] == "sliding" for i in range(L)
    ]
    own = max(L - shared, 0)  # number of first layers, which compute their own keys
    if shared and not set(is_sliding[own:]) <= set(is_sliding[:own]):
        needed = (
            "must leave a layer of each kind, sliding and full,"
            " that computes its own keys and values"
        )
        yield "attention.kv_shared_layers", f"{needed}, got {shared} of {L} layers"


def _expert_conflicts(layers: int, moe: MoESection) -> Iterator[Conflict]:
    """Yields an error for each contradiction among the settings of experts."""
    members = moe.n_experts // moe.n_groups  # experts of a group
    if moe.n_experts % moe.n_groups:
        yield "moe.n_groups", f"must divide moe.n_experts, got {moe.n_groups} and {moe.n_experts}"
    elif moe.top_k_groups > moe.n_groups:
        yield (
            "moe.top_k_groups",
            f"must be at most moe.n_groups, got {moe.top_k_groups} and {moe.n_groups}",
        )
    elif moe.top_k_mlp > moe.top_k_groups * members:
        available = f"the {moe.top_k_groups * members} experts of moe.top_k_groups groups"
        yield "moe.top_k_mlp", f"must be at most {available}, got {moe.top_k_mlp}"
    elif moe.group_score == "top2" and members < 2:
        yield "moe.group_score", f"top2 needs groups of at least 2 experts, got {members}"
    if moe.branch_norms and moe.shared_gate:
        yield "moe.branch_norms", "must be false with moe.shared_gate"
    if len(set(moe.dense_layers)) < len(moe.dense_layers) or any(
        layer >= layers for layer in moe.dense_layers
    ):
        got = list(moe.dense_layers)
        yield (
            "moe.dense_layers",
            f"must be different numbers less than model.num_blocks {layers}, got {got}",
        )
    elif len(moe.dense_layers) == layers:
        yield "moe.dense_layers", "must leave at least one layer with experts"
