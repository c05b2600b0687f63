"""The `attention` section: positions, windows, scores and latent attention."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from dantinox.config.base import Count, CountOrZero, Positive, Section, as_tuple, field
from dantinox.config.prerequisites import Needs, differs, is_set

AttentionKernel = Literal["auto", "xla", "chunked", "cudnn", "splash"]  # also of `ModelConfig`

NEEDS_SLIDING_WINDOW = Needs(("attention.sliding_window", True))
NEEDS_LATENT_ATTENTION = Needs(("attention.kv_lora_rank", is_set))
NEEDS_ROPE_SCALING = Needs(("attention.rope_scaling", differs("none")))
NEEDS_LLAMA3 = Needs(("attention.rope_scaling", "llama3"))
NEEDS_YARN = Needs(("attention.rope_scaling", "yarn"))
# Several pairs in one `Needs` are alternatives.
NEEDS_ORIGINAL_CONTEXT = Needs(
    *(("attention.rope_scaling", kind) for kind in ("llama3", "yarn", "longrope"))
)
NEEDS_LONGROPE = Needs(("attention.rope_scaling", "longrope"))
NEEDS_PROPORTIONAL = Needs(("attention.rope_scaling", "proportional"))
NEEDS_ROTARY = Needs(("attention.use_rotary_pos", True))


class AttentionSection(Section):
    """Positions, windows, scores and latent attention."""

    use_rotary_pos: bool = field(
        True, "rotary position embeddings (RoPE, half-split layout)", group="positions"
    )
    trainable_pos: bool = field(False, "learned position embeddings", group="positions")
    absolute_pos: bool = field(False, "sinusoidal position embeddings", group="positions")
    rope_theta: Annotated[Positive, NEEDS_ROTARY] = field(
        10000.0, "base of the rotary frequencies", group="positions"
    )
    rope_local_theta: Annotated[Positive | None, NEEDS_ROTARY, NEEDS_SLIDING_WINDOW] = field(
        None,
        "base of the rotary frequencies of sliding layers, without"
        " rope_scaling (null: as in all layers)",
        group="positions",
    )
    rope_layers: Annotated[tuple[bool, ...], BeforeValidator(as_tuple), NEEDS_ROTARY] = field(
        (True,),
        "which layers rotate queries and keys; the pattern repeats over the layers",
        group="positions",
    )
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1), NEEDS_ROTARY] = field(
        1.0,
        "fraction of each head that is rotated, from its first dimension",
        group="positions",
    )
    rope_scaling: Annotated[
        Literal["none", "linear", "llama3", "yarn", "longrope", "proportional"], NEEDS_ROTARY
    ] = field(
        "none",
        "method that lowers rotary frequencies for contexts longer than the original one",
        group="positions",
    )
    rope_factor: Annotated[float, Field(ge=1, allow_inf_nan=False), NEEDS_ROPE_SCALING] = field(
        1.0,
        "divisor of the rotary frequencies: new context / original context",
        group="positions",
    )
    rope_original_context: Annotated[Count | None, NEEDS_ORIGINAL_CONTEXT] = field(
        None,
        "llama3, yarn, longrope: context in tokens before the scaling",
        group="positions",
    )
    low_freq_factor: Annotated[Positive, NEEDS_LLAMA3] = field(
        1.0,
        "llama3: divide frequencies with fewer turns than this in"
        " the original context by rope_factor",
        group="positions",
    )
    high_freq_factor: Annotated[Positive, NEEDS_LLAMA3] = field(
        4.0,
        "llama3: keep frequencies with more turns than this in the original context",
        group="positions",
    )
    beta_fast: Annotated[Positive, NEEDS_YARN] = field(
        32.0,
        "yarn: keep frequencies with more turns than this in the original context",
        group="positions",
    )
    beta_slow: Annotated[Positive, NEEDS_YARN] = field(
        1.0,
        "yarn: divide frequencies with fewer turns than this in the original context",
        group="positions",
    )
    rope_truncate: Annotated[bool, NEEDS_YARN] = field(
        True,
        "yarn: round the ends of the blended range to whole frequency indices",
        group="positions",
    )
    rope_mscale: Annotated[Positive | None, NEEDS_YARN] = field(
        None,
        "yarn: m in the factor (0.1 m ln rope_factor + 1) / (0.1 n ln rope_factor + 1) on queries"
        " and keys (null: none)",
        group="positions",
    )
    rope_mscale_all_dim: Annotated[Positive | None, NEEDS_YARN] = field(
        None,
        "yarn: n in that factor; latent attention multiplies scores by (0.1 n"
        " ln rope_factor + 1)² (null: none)",
        group="positions",
    )
    rope_attention_factor: Annotated[
        Positive | None,
        Needs(("attention.rope_scaling", "yarn"), ("attention.rope_scaling", "longrope")),
    ] = field(
        None,
        "yarn, longrope: factor on queries and keys (null: 0.1 ln rope_factor + 1; √(1 + ln"
        " rope_factor / ln original))",
        group="positions",
    )
    query_scaling_beta: Annotated[Positive | None, NEEDS_ORIGINAL_CONTEXT] = field(
        None,
        "β: multiply queries at position p by 1 + β ln(1 + ⌊p /"
        " rope_original_context⌋) (null: off)",
        group="positions",
    )
    rope_share: Annotated[float, Field(gt=0, le=1), NEEDS_PROPORTIONAL] = field(
        1.0,
        "proportional: fraction of a head's frequencies that rotate,"
        " from the highest; the others are 0",
        group="positions",
    )
    rope_short_factors: Annotated[
        tuple[Positive, ...] | None, BeforeValidator(as_tuple), NEEDS_LONGROPE
    ] = field(
        None,
        "longrope: divisors of the frequencies if max_context is at most rope_original_context",
        group="positions",
    )
    rope_long_factors: Annotated[
        tuple[Positive, ...] | None, BeforeValidator(as_tuple), NEEDS_LONGROPE
    ] = field(
        None,
        "longrope: divisors of the frequencies if max_context is longer than rope_original_context",
        group="positions",
    )
    sliding_window: bool = field(
        False,
        "limit attention of sliding layers to the last context_window + 1 keys",
        group="window",
    )
    context_window: Annotated[CountOrZero | None, NEEDS_SLIDING_WINDOW] = field(
        None,
        "earlier keys that a query of a sliding layer can see",
        group="window",
    )
    layer_types: Annotated[
        tuple[Literal["sliding", "full"], ...], BeforeValidator(as_tuple), NEEDS_SLIDING_WINDOW
    ] = field(
        ("sliding",),
        "kind of each layer; the pattern repeats over the layers",
        group="window",
    )
    kernel: AttentionKernel = field(
        "auto",
        "attention in training: xla computes all scores together, chunked in blocks; cudnn needs a"
        " GPU, splash a TPU",
        group="scores",
    )
    qkv_bias: bool = field(False, "add biases to queries, keys and values", group="scores")
    out_bias: bool = field(False, "add a bias to the attention output", group="scores")
    query_pre_attn_scalar: Positive | None = field(
        None, "divide scores by the square root of this number (null: head_size)", group="scores"
    )
    attention_multiplier: Positive | None = field(
        None,
        "multiply scores by this number instead of dividing them (null: see query_pre_attn_scalar)",
        group="scores",
    )
    no_sink: bool = field(
        False, "output gate: multiply the attention output by sigmoid(W x)", group="scores"
    )
    gate_bias: Annotated[bool, Needs(("attention.no_sink", True))] = field(
        False, "add a bias in the output gate", group="scores"
    )
    attn_logit_softcapping: Positive | None = field(
        None, "soft cap of attention scores: cap · tanh(score / cap) (null: none)", group="scores"
    )
    kv_lora_rank: Count | None = field(
        None,
        "latent attention: size of the vector from which all heads compute keys and values (null:"
        " ordinary attention)",
        group="latent",
    )
    q_lora_rank: Annotated[Count | None, NEEDS_LATENT_ATTENTION] = field(
        None,
        "size of a latent vector from which queries are computed (null: none)",
        group="latent",
    )
    qk_rope_head_dim: Annotated[Count | None, NEEDS_LATENT_ATTENTION] = field(
        None,
        "rotated dimensions of queries and keys, in addition to head_size"
        " unrotated ones (null: head_size / 2)",
        group="latent",
    )
    v_head_dim: Annotated[Count | None, NEEDS_LATENT_ATTENTION] = field(
        None, "size of the values of a head (null: head_size)", group="latent"
    )
    latent_norm_epsilon: Annotated[Positive | None, NEEDS_LATENT_ATTENTION] = field(
        None,
        "number added to the variance in normalizations of latents (null: model.norm_epsilon)",
        group="latent",
    )
    sink_logits: bool = field(
        False,
        "add a learned logit per head to the softmax, without a value (attention sink)",
        group="scores",
    )
    global_head_size: Count | None = field(
        None,
        "width of one head in layers without a window (null: model.head_size)",
        group="layer_heads",
    )
    global_kv_heads: Count | None = field(
        None,
        "key/value heads of layers without a window (null: model.kv_heads)",
        group="layer_heads",
    )
    k_eq_v: bool = field(
        False,
        "compute values with the key projection in layers without a window",
        group="layer_heads",
    )
    kv_shared_layers: CountOrZero = field(
        0,
        "number of last layers that reuse keys and values of the last earlier layer of the same"
        " kind, sliding or full",
        group="layer_heads",
    )
