"""The `model` section: size and shape of the transformer."""

from typing import Annotated, Literal

from pydantic import Field

from dantinox.config.base import Count, CountOrZero, Positive, Section, field
from dantinox.config.prerequisites import Needs, differs

# The values of settings that `ModelConfig` has too.
Activation = Literal["swiglu", "geglu", "squared_reglu", "clamped_swiglu", "gelu", "relu2"]
ComputeDtype = Literal["auto", "float32", "bfloat16"]
Norm = Literal["rmsnorm", "layernorm"]
NormPlacement = Literal["before", "after", "both"]
Projections = Literal["float", "ternary"]
QKNormScope = Literal["head", "layer"]

NEEDS_CLAMPED = Needs(("model.activation", "clamped_swiglu"))
NEEDS_NORM_SCALE = Needs(("model.norm_scale", True))
# The activations with two projections, gate and up.
GATED_ACTIVATIONS = ("swiglu", "geglu", "squared_reglu", "clamped_swiglu")


class ModelSection(Section):
    """Size and shape of the transformer."""

    depth: Count | None = field(
        None,
        "number of layers from which size, optimizer, batch and steps follow unless they are set; a"
        " run saves the results",
        group="size",
    )
    dim: Count = field(256, "width of the residual stream", group="size")
    n_heads: Count = field(8, "query heads per layer", group="size")
    kv_heads: Count | None = field(
        None, "key/value heads per layer (null: n_heads; 1: multi-query attention)", group="size"
    )
    head_size: Count | None = field(None, "width of one head (null: dim / n_heads)", group="size")
    num_blocks: Count = field(6, "number of layers", group="size")
    hidden_dim: Count | None = field(
        None,
        "width of the feed-forward layer (null: 8/3 dim rounded up to a"
        " multiple of 32 if gated, else 4 dim)",
        group="size",
    )
    max_context: Count = field(
        256, "longest sequence in tokens, and the length of training windows", group="size"
    )
    padded_vocab_size: Count | None = field(
        None,
        "number of logits, if a checkpoint pads its vocabulary (null: the size of the vocabulary)",
        group="size",
    )
    weight_tying: bool = field(
        True, "use the embedding table as the output layer", group="embeddings"
    )
    head_bias: bool = field(False, "add a bias to the logits", group="embeddings")
    final_logit_softcapping: Positive | None = field(
        None,
        "soft cap of the output logits: cap · tanh(logit / cap) (null: none)",
        group="embeddings",
    )
    scale_embeddings: bool = field(False, "multiply embeddings by √dim", group="embeddings")
    embedding_multiplier: Positive = field(1.0, "factor on the embeddings", group="embeddings")
    residual_multiplier: Positive = field(
        1.0,
        "factor on the output of each sub-layer before it is added to the residual stream",
        group="embeddings",
    )
    logits_scaling: Positive = field(1.0, "divisor of the output logits", group="embeddings")
    norm_embeddings: bool = field(
        False, "normalize the embeddings before the first layer", group="embeddings"
    )
    parallel_blocks: Annotated[bool, Needs(("model.norm_placement", "before"))] = field(
        False,
        "attention and feed-forward read the same normalized"
        " input, and both outputs are added to it",
        group="embeddings",
    )
    projections: Projections = field(
        "float",
        "weights of attention and feed-forward; ternary: -1, 0 or 1 times a scale per matrix, with"
        " 8-bit inputs (BitNet b1.58)",
        group="compute",
    )
    activation: Activation = field(
        "swiglu",
        "activation of the feed-forward layer; swiglu, geglu,"
        " squared_reglu and clamped_swiglu are gated",
        group="feed_forward",
    )
    swiglu_limit: Annotated[Positive, NEEDS_CLAMPED] = field(
        7.0,
        "clamped_swiglu: upper limit of the gate, and limit of the"
        " magnitude of the values it multiplies",
        group="feed_forward",
    )
    swiglu_alpha: Annotated[Positive, NEEDS_CLAMPED] = field(
        1.702, "clamped_swiglu: factor on the gate inside its sigmoid", group="feed_forward"
    )
    mlp_bias: bool = field(False, "add biases in the feed-forward layer", group="feed_forward")
    norm: Norm = field(
        "rmsnorm", "normalization of the sub-layers and after the last layer", group="norms"
    )
    norm_placement: NormPlacement = field(
        "before",
        "normalize the input of a sub-layer (before), its output"
        " before it is added (after), or both",
        group="norms",
    )
    norm_epsilon: Positive = field(
        1e-5, "number added to the variance in normalizations", group="norms"
    )
    norm_scale: bool = field(
        True, "normalizations have a learned scale, and layernorm may have a bias", group="norms"
    )
    norm_bias: Annotated[bool, Needs(("model.norm", "layernorm")), NEEDS_NORM_SCALE] = field(
        True,
        "layernorm has a learned bias",
        group="norms",
    )
    norm_zero_centered: Annotated[
        bool, Needs(("model.norm", "rmsnorm"), ("model.qk_norm", True)), NEEDS_NORM_SCALE
    ] = field(
        False,
        "RMS normalizations multiply by 1 + scale, with the scale initialized to 0",
        group="norms",
    )
    sub_norms: bool | None = field(
        None,
        "RMS-normalize the inputs of the output projections of attention and feed-forward (null: if"
        " projections are ternary)",
        group="norms",
    )
    qk_norm: bool = field(
        False,
        "RMS-normalize queries and keys before position embeddings are applied",
        group="norms",
    )
    qk_norm_scope: Annotated[QKNormScope, Needs(("model.qk_norm", True))] = field(
        "head",
        "normalize each head separately, or all heads of a layer together",
        group="norms",
    )
    qk_norm_after_rope: Annotated[
        bool, Needs(("model.qk_norm", True)), Needs(("attention.use_rotary_pos", True))
    ] = field(
        False,
        "normalize queries and keys after rotary positions are applied",
        group="norms",
    )
    dropout_rate: Annotated[float, Field(ge=0, lt=1)] = field(
        0.0, "dropout rate in training", group="compute"
    )
    gradient_checkpointing: bool = field(
        False, "recompute layers in the backward pass to save memory", group="compute"
    )
    remat_policy: Annotated[
        Literal["full", "dots"], Needs(("model.gradient_checkpointing", True))
    ] = field(
        "full",
        "what gradient_checkpointing recomputes: everything (full), or all but matrix"
        " multiplications (dots)",
        group="compute",
    )
    v_norm: bool = field(
        False, "RMS-normalize the values of each head, without a learned scale", group="norms"
    )
    layer_scalar: bool = field(
        False, "multiply the output of each layer by a learned scalar", group="embeddings"
    )
    per_layer_dim: CountOrZero = field(
        0,
        "size of the per-layer token embedding, an additional input of each layer (0: none)",
        group="size",
    )
    double_wide_mlp: Annotated[bool, Needs(("attention.kv_shared_layers", differs(0)))] = field(
        False,
        "double the width of dense and shared feed-forward layers in the layers of"
        " attention.kv_shared_layers",
        group="feed_forward",
    )
    scan_layers: bool = field(
        False,
        "train with stacked layers in a scan, which compiles in a fraction of"
        " the time; files hold separate layers",
        group="compute",
    )
    dtype: ComputeDtype = field(
        "auto",
        "compute dtype (auto: float32 on CPU, bfloat16 on GPU and TPU); weights stay float32",
        group="compute",
    )
