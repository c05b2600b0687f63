"""The `model`, `attention` and `moe` sections, and `ModelConfig`, the architecture that they define."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from dantinox.config.base import Conflict, Count, CountOrZero, NonNegative, Positive, Section, as_tuple, field
from dantinox.config.prerequisites import Needs, differs, is_set, nonempty
from dantinox.files import UserError

Activation = Literal["swiglu", "geglu", "squared_reglu", "clamped_swiglu", "gelu", "relu2"]
Position = Literal["rope", "learned", "sinusoidal", "none"]
Platform = Literal["auto", "cpu", "gpu", "tpu"]
BaseWeights = Literal["float32", "bfloat16", "int8", "nf4"]  # dtypes of the frozen weights under adapters
Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # the names that PEFT uses


NEEDS_CLAMPED = Needs(("model.activation", "clamped_swiglu"))
NEEDS_NORM_SCALE = Needs(("model.norm_scale", True))
GATED_ACTIVATIONS = ("swiglu", "geglu", "squared_reglu", "clamped_swiglu")  # activations with two projections, gate and up


class ModelSection(Section):
    """Size and shape of the transformer."""

    depth: Count | None = field(
        None,
        "number of layers from which size, optimizer, batch and steps follow unless they are set; a run saves the results",
        group="size",
    )
    dim: Count = field(256, "width of the residual stream", group="size")
    n_heads: Count = field(8, "query heads per layer", group="size")
    kv_heads: Count | None = field(None, "key/value heads per layer (null: n_heads; 1: multi-query attention)", group="size")
    head_size: Count | None = field(None, "width of one head (null: dim / n_heads)", group="size")
    num_blocks: Count = field(6, "number of layers", group="size")
    hidden_dim: Count | None = field(
        None,
        "width of the feed-forward layer (null: 8/3 dim rounded up to a multiple of 32 if gated, else 4 dim)",
        group="size",
    )
    max_context: Count = field(256, "longest sequence in tokens, and the length of training windows", group="size")
    padded_vocab_size: Count | None = field(
        None,
        "number of logits, if a checkpoint pads its vocabulary (null: the size of the vocabulary)",
        group="size",
    )
    weight_tying: bool = field(True, "use the embedding table as the output layer", group="embeddings")
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
    norm_embeddings: bool = field(False, "normalize the embeddings before the first layer", group="embeddings")
    parallel_blocks: Annotated[bool, Needs(("model.norm_placement", "before"))] = field(
        False,
        "attention and feed-forward read the same normalized input, and both outputs are added to it",
        group="embeddings",
    )
    projections: Literal["float", "ternary"] = field(
        "float",
        "weights of attention and feed-forward; ternary: -1, 0 or 1 times a scale per matrix, with 8-bit inputs (BitNet b1.58)",
        group="compute",
    )
    activation: Activation = field(
        "swiglu",
        "activation of the feed-forward layer; swiglu, geglu, squared_reglu and clamped_swiglu are gated",
        group="feed_forward",
    )
    swiglu_limit: Annotated[Positive, NEEDS_CLAMPED] = field(
        7.0,
        "clamped_swiglu: upper limit of the gate, and limit of the magnitude of the values it multiplies",
        group="feed_forward",
    )
    swiglu_alpha: Annotated[Positive, NEEDS_CLAMPED] = field(
        1.702, "clamped_swiglu: factor on the gate inside its sigmoid", group="feed_forward"
    )
    mlp_bias: bool = field(False, "add biases in the feed-forward layer", group="feed_forward")
    norm: Literal["rmsnorm", "layernorm"] = field(
        "rmsnorm", "normalization of the sub-layers and after the last layer", group="norms"
    )
    norm_placement: Literal["before", "after", "both"] = field(
        "before",
        "normalize the input of a sub-layer (before), its output before it is added (after), or both",
        group="norms",
    )
    norm_epsilon: Positive = field(1e-5, "number added to the variance in normalizations", group="norms")
    norm_scale: bool = field(True, "normalizations have a learned scale, and layernorm may have a bias", group="norms")
    norm_bias: Annotated[bool, Needs(("model.norm", "layernorm")), NEEDS_NORM_SCALE] = field(
        True,
        "layernorm has a learned bias",
        group="norms",
    )
    norm_zero_centered: Annotated[bool, Needs(("model.norm", "rmsnorm"), ("model.qk_norm", True)), NEEDS_NORM_SCALE] = field(
        False,
        "RMS normalizations multiply by 1 + scale, with the scale initialized to 0",
        group="norms",
    )
    sub_norms: bool | None = field(
        None,
        "RMS-normalize the inputs of the output projections of attention and feed-forward (null: if projections are ternary)",
        group="norms",
    )
    qk_norm: bool = field(False, "RMS-normalize queries and keys before position embeddings are applied", group="norms")
    qk_norm_scope: Annotated[Literal["head", "layer"], Needs(("model.qk_norm", True))] = field(
        "head",
        "normalize each head separately, or all heads of a layer together",
        group="norms",
    )
    qk_norm_after_rope: Annotated[bool, Needs(("model.qk_norm", True)), Needs(("attention.use_rotary_pos", True))] = field(
        False,
        "normalize queries and keys after rotary positions are applied",
        group="norms",
    )
    dropout_rate: Annotated[float, Field(ge=0, lt=1)] = field(0.0, "dropout rate in training", group="compute")
    gradient_checkpointing: bool = field(False, "recompute layers in the backward pass to save memory", group="compute")
    remat_policy: Annotated[Literal["full", "dots"], Needs(("model.gradient_checkpointing", True))] = field(
        "full",
        "what gradient_checkpointing recomputes: everything (full), or all but matrix multiplications (dots)",
        group="compute",
    )
    v_norm: bool = field(False, "RMS-normalize the values of each head, without a learned scale", group="norms")
    layer_scalar: bool = field(False, "multiply the output of each layer by a learned scalar", group="embeddings")
    per_layer_dim: CountOrZero = field(
        0, "size of the per-layer token embedding, an additional input of each layer (0: none)", group="size"
    )
    double_wide_mlp: Annotated[bool, Needs(("attention.kv_shared_layers", differs(0)))] = field(
        False,
        "double the width of dense and shared feed-forward layers in the layers of attention.kv_shared_layers",
        group="feed_forward",
    )
    scan_layers: bool = field(
        False,
        "train with stacked layers in a scan, which compiles in a fraction of the time; files hold separate layers",
        group="compute",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = field(
        "auto",
        "compute dtype (auto: float32 on CPU, bfloat16 on GPU and TPU); weights stay float32",
        group="compute",
    )


NEEDS_MOE = Needs(("moe.use_moe", True))
NEEDS_SHARED_EXPERTS = Needs(("moe.shared_experts", differs(0)))
NEEDS_EXPERT_GROUPS = Needs(("moe.n_groups", differs(1)))


class MoESection(Section):
    """Mixture of experts, and the width of the feed-forward layer."""

    use_moe: bool = field(False, "replace the dense feed-forward layer with experts", group="experts")
    n_experts: Annotated[Count, NEEDS_MOE] = field(
        4, "experts per layer, each as wide as the feed-forward layer", group="experts"
    )
    top_k_mlp: Annotated[Count, NEEDS_MOE] = field(2, "experts per token", group="experts")
    shared_experts: Annotated[CountOrZero, NEEDS_MOE] = field(
        0, "experts that process every token, combined into one layer", group="experts"
    )
    shared_hidden_dim: Annotated[Count | None, NEEDS_MOE, NEEDS_SHARED_EXPERTS] = field(
        None,
        "width of the shared expert layer (null: shared_experts times the width of an expert)",
        group="experts",
    )
    shared_gate: Annotated[bool, NEEDS_MOE, NEEDS_SHARED_EXPERTS] = field(
        False,
        "multiply the output of the shared expert layer by sigmoid(w x)",
        group="experts",
    )
    branch_norms: Annotated[bool, NEEDS_MOE, NEEDS_SHARED_EXPERTS, Needs(("model.norm_placement", "both"))] = field(
        False,
        "give experts and the shared layer separate norms, and the router a norm and learned scales on the residual stream",
        group="experts",
    )
    dense_layers: Annotated[tuple[CountOrZero, ...], BeforeValidator(as_tuple), NEEDS_MOE] = field(
        (),
        "indices of layers, from 0, that have a dense feed-forward layer instead of experts",
        group="experts",
    )
    dense_hidden_dim: Annotated[Count | None, NEEDS_MOE, Needs(("moe.dense_layers", nonempty))] = field(
        None,
        "feed-forward width of dense_layers (null: the width of an expert)",
        group="experts",
    )
    expansion: Positive | None = field(
        None, "feed-forward width as a multiple of dim (null: see model.hidden_dim)", group="experts"
    )
    score_function: Annotated[Literal["softmax", "sigmoid"], NEEDS_MOE] = field(
        "softmax",
        "function that turns router logits into scores",
        group="routing",
    )
    norm_topk_prob: Annotated[bool, NEEDS_MOE] = field(
        True, "scale the weights of a token's experts so that they sum to 1", group="routing"
    )
    routed_scaling: Annotated[Positive, NEEDS_MOE] = field(1.0, "factor on the weights of a token's experts", group="routing")
    router_bias: Annotated[bool, NEEDS_MOE] = field(False, "add a bias to the router's logits", group="routing")
    choice_bias: Annotated[bool, NEEDS_MOE] = field(
        False,
        "add a bias to the scores when experts are chosen, but not to their weights; only bias_update_rate changes it",
        group="routing",
    )
    n_groups: Annotated[Count, NEEDS_MOE] = field(
        1, "groups of experts; a token's experts come from top_k_groups of them", group="routing"
    )
    top_k_groups: Annotated[Count, NEEDS_MOE, NEEDS_EXPERT_GROUPS] = field(1, "groups per token", group="routing")
    group_score: Annotated[Literal["max", "top2"], NEEDS_MOE, NEEDS_EXPERT_GROUPS] = field(
        "max",
        "score of a group: the best expert (max), or the sum of the best two (top2)",
        group="routing",
    )
    alpha_balance: Annotated[NonNegative, NEEDS_MOE] = field(
        0.01, "weight of the load-balance loss, averaged over layers", group="routing"
    )
    router_z_loss: Annotated[NonNegative, NEEDS_MOE] = field(
        0.0,
        "weight of the router z-loss (squared log-normalizer of the scores), averaged over layers",
        group="routing",
    )
    bias_update_rate: Annotated[NonNegative, NEEDS_MOE] = field(
        0.0,
        "balance without a loss: step by which choice_bias rises for experts with few tokens (0: off)",
        group="routing",
    )


NEEDS_SLIDING_WINDOW = Needs(("attention.sliding_window", True))
NEEDS_LATENT_ATTENTION = Needs(("attention.kv_lora_rank", is_set))
NEEDS_ROPE_SCALING = Needs(("attention.rope_scaling", differs("none")))
NEEDS_LLAMA3 = Needs(("attention.rope_scaling", "llama3"))
NEEDS_YARN = Needs(("attention.rope_scaling", "yarn"))
# Several pairs in one `Needs` are alternatives.
NEEDS_ORIGINAL_CONTEXT = Needs(*(("attention.rope_scaling", kind) for kind in ("llama3", "yarn", "longrope")))
NEEDS_LONGROPE = Needs(("attention.rope_scaling", "longrope"))
NEEDS_PROPORTIONAL = Needs(("attention.rope_scaling", "proportional"))
NEEDS_ROTARY = Needs(("attention.use_rotary_pos", True))


class AttentionSection(Section):
    """Positions, windows, scores and latent attention."""

    use_rotary_pos: bool = field(True, "rotary position embeddings (RoPE, half-split layout)", group="positions")
    trainable_pos: bool = field(False, "learned position embeddings", group="positions")
    absolute_pos: bool = field(False, "sinusoidal position embeddings", group="positions")
    rope_theta: Annotated[Positive, NEEDS_ROTARY] = field(10000.0, "base of the rotary frequencies", group="positions")
    rope_local_theta: Annotated[Positive | None, NEEDS_ROTARY, NEEDS_SLIDING_WINDOW] = field(
        None,
        "base of the rotary frequencies of sliding layers, without rope_scaling (null: as in all layers)",
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
    rope_scaling: Annotated[Literal["none", "linear", "llama3", "yarn", "longrope", "proportional"], NEEDS_ROTARY] = field(
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
        "llama3: divide frequencies with fewer turns than this in the original context by rope_factor",
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
        True, "yarn: round the ends of the blended range to whole frequency indices", group="positions"
    )
    rope_mscale: Annotated[Positive | None, NEEDS_YARN] = field(
        None,
        "yarn: m in the factor (0.1 m ln rope_factor + 1) / (0.1 n ln rope_factor + 1) on queries and keys (null: none)",
        group="positions",
    )
    rope_mscale_all_dim: Annotated[Positive | None, NEEDS_YARN] = field(
        None,
        "yarn: n in that factor; latent attention multiplies scores by (0.1 n ln rope_factor + 1)² (null: none)",
        group="positions",
    )
    rope_attention_factor: Annotated[
        Positive | None, Needs(("attention.rope_scaling", "yarn"), ("attention.rope_scaling", "longrope"))
    ] = field(
        None,
        "yarn, longrope: factor on queries and keys (null: 0.1 ln rope_factor + 1; √(1 + ln rope_factor / ln original))",
        group="positions",
    )
    query_scaling_beta: Annotated[Positive | None, NEEDS_ORIGINAL_CONTEXT] = field(
        None,
        "β: multiply queries at position p by 1 + β ln(1 + ⌊p / rope_original_context⌋) (null: off)",
        group="positions",
    )
    rope_share: Annotated[float, Field(gt=0, le=1), NEEDS_PROPORTIONAL] = field(
        1.0,
        "proportional: fraction of a head's frequencies that rotate, from the highest; the others are 0",
        group="positions",
    )
    rope_short_factors: Annotated[tuple[Positive, ...] | None, BeforeValidator(as_tuple), NEEDS_LONGROPE] = field(
        None,
        "longrope: divisors of the frequencies if max_context is at most rope_original_context",
        group="positions",
    )
    rope_long_factors: Annotated[tuple[Positive, ...] | None, BeforeValidator(as_tuple), NEEDS_LONGROPE] = field(
        None,
        "longrope: divisors of the frequencies if max_context is longer than rope_original_context",
        group="positions",
    )
    sliding_window: bool = field(False, "limit attention of sliding layers to the last context_window + 1 keys", group="window")
    context_window: Annotated[CountOrZero | None, NEEDS_SLIDING_WINDOW] = field(
        None,
        "earlier keys that a query of a sliding layer can see",
        group="window",
    )
    layer_types: Annotated[tuple[Literal["sliding", "full"], ...], BeforeValidator(as_tuple), NEEDS_SLIDING_WINDOW] = field(
        ("sliding",),
        "kind of each layer; the pattern repeats over the layers",
        group="window",
    )
    kernel: Literal["auto", "xla", "chunked", "cudnn", "splash"] = field(
        "auto",
        "attention in training: xla computes all scores together, chunked in blocks; cudnn needs a GPU, splash a TPU",
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
    no_sink: bool = field(False, "output gate: multiply the attention output by sigmoid(W x)", group="scores")
    gate_bias: Annotated[bool, Needs(("attention.no_sink", True))] = field(
        False, "add a bias in the output gate", group="scores"
    )
    attn_logit_softcapping: Positive | None = field(
        None, "soft cap of attention scores: cap · tanh(score / cap) (null: none)", group="scores"
    )
    kv_lora_rank: Count | None = field(
        None,
        "latent attention: size of the vector from which all heads compute keys and values (null: ordinary attention)",
        group="latent",
    )
    q_lora_rank: Annotated[Count | None, NEEDS_LATENT_ATTENTION] = field(
        None,
        "size of a latent vector from which queries are computed (null: none)",
        group="latent",
    )
    qk_rope_head_dim: Annotated[Count | None, NEEDS_LATENT_ATTENTION] = field(
        None,
        "rotated dimensions of queries and keys, in addition to head_size unrotated ones (null: head_size / 2)",
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
        False, "add a learned logit per head to the softmax, without a value (attention sink)", group="scores"
    )
    global_head_size: Count | None = field(
        None, "width of one head in layers without a window (null: model.head_size)", group="layer_heads"
    )
    global_kv_heads: Count | None = field(
        None, "key/value heads of layers without a window (null: model.kv_heads)", group="layer_heads"
    )
    k_eq_v: bool = field(False, "compute values with the key projection in layers without a window", group="layer_heads")
    kv_shared_layers: CountOrZero = field(
        0,
        "number of last layers that reuse keys and values of the last earlier layer of the same kind, sliding or full",
        group="layer_heads",
    )


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies for contexts that are `factor` times as long as `original_context` (see `model.positions`).

    Each `kind` uses only the fields that appear in its formula.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope", "proportional"]
    factor: float
    original_context: int = 1
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    factors: tuple[float, ...] = ()
    share: float = 1.0


@dataclass(frozen=True)
class ExpertsConfig:
    """Experts that replace the feed-forward layer.

    Attributes:
      count: experts per layer; each token uses `top_k` of them.
      shared_dim: width of the shared expert layer (0: no such layer); `shared_gate`: whether this layer has a gate.
      score: function that turns router logits into scores. `normalize`: whether the weights of a token sum to 1. `scaling`:
        factor by which these weights are multiplied.
      bias: whether a bias affects the choice of experts (see `model.moe.Router`); `logit_bias`: whether the logits have a bias.
      branch_norms: whether experts and the shared layer have separate norms (see `model.moe.BranchedExperts`).
      groups: number of expert groups; a token uses experts of the `top_groups` groups with the highest `group_score`.
      dense_layers: layers without experts; their feed-forward layer is `dense_dim` wide.
    """

    count: int
    top_k: int
    shared_dim: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    bias: bool = False
    shared_gate: bool = False
    scaling: float = 1.0
    logit_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    dense_layers: tuple[int, ...] = ()
    dense_dim: int = 0
    branch_norms: bool = False


@dataclass(frozen=True)
class LatentConfig:
    """Attention over latent vectors of size `rank`, with a rotated part of keys and queries (see `model.latent_attention`).

    `norm_epsilon` is added to the variance in normalizations of latents.
    """

    rank: int
    rotated_size: int
    value_size: int
    query_rank: int | None = None
    norm_epsilon: float = 1e-5


@dataclass(frozen=True)
class LoraConfig:
    """The resolved adapter settings. `dora` adds a trained magnitude per output; `held` is the dtype of the frozen weights."""

    rank: int
    alpha: float
    targets: tuple[Projection, ...]
    dropout: float = 0.0
    held: BaseWeights = "float32"
    rank_stabilized: bool = False
    dora: bool = False

    @property
    def scale(self) -> float:
        """The factor on the outputs of adapters: alpha / √rank if `rank_stabilized`, else alpha / rank."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


@dataclass(frozen=True)
class ModelConfig:
    """The resolved architecture, from which a `Transformer` is built.

    `scan_layers` stacks repeated layers for training; a model that decodes has separate layers. `windows` contains, for each
    layer, the number of keys that a query sees, including the key of its own position, or None for all keys. `unrotated` lists
    the layers without rotary positions. `of_layer` returns the architecture of one layer. `platform` is the compilation target;
    `auto` is this machine.
    """

    vocab_size: int
    dim: int
    n_heads: int
    kv_heads: int
    head_size: int
    num_blocks: int
    hidden_dim: int
    max_context: int
    windows: tuple[int | None, ...]
    projections: Literal["float", "ternary"] = "float"
    position: Position = "rope"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_local_theta: float | None = None
    unrotated: tuple[int, ...] = ()
    partial_rotary_factor: float = 1.0
    query_scaling_beta: float | None = None
    scale_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    norm_embeddings: bool = False
    parallel_blocks: bool = False
    activation: Activation = "swiglu"
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    mlp_bias: bool = False
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_placement: Literal["before", "after", "both"] = "before"
    norm_epsilon: float = 1e-5
    norm_scale: bool = True
    norm_bias: bool = True
    norm_zero_centered: bool = False
    sub_norms: bool = False
    qk_norm: bool = False
    qk_norm_scope: Literal["head", "layer"] = "head"
    qk_norm_after_rope: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    query_pre_attn_scalar: float | None = None
    no_sink: bool = False
    gate_bias: bool = False
    softcap: float | None = None
    sink_logits: bool = False
    global_head_size: int | None = None
    global_kv_heads: int | None = None
    k_eq_v: bool = False
    v_norm: bool = False
    kv_shared_layers: int = 0
    double_wide_mlp: bool = False
    layer_scalar: bool = False
    per_layer_dim: int = 0
    head_bias: bool = False
    final_softcap: float | None = None
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    lora: LoraConfig | None = None
    kernel: Literal["auto", "xla", "chunked", "cudnn", "splash"] = "auto"
    weight_tying: bool = True
    dropout_rate: float = 0.0
    remat: Literal["none", "full", "dots"] = "none"
    scan_layers: bool = False
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"

    @property
    def rotated_size(self) -> int:
        """Number of rotated dimensions of a query and a key."""
        return int(self.head_size * self.partial_rotary_factor) if self.latent is None else self.latent.rotated_size

    def rotation(self, layer: int) -> tuple[float, RopeScaling | None] | None:
        """Returns the base and the scaling of a layer's rotary frequencies, or None for a layer without rotation."""
        if self.position != "rope" or layer in self.unrotated:
            return None
        if self.rope_local_theta is not None and self.windows[layer] is not None:
            return self.rope_local_theta, None
        return self.rope_theta, self.rope_scaling

    def routes(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def kv_source(self, layer: int) -> int | None:
        """Returns the index of the layer whose keys and values `layer` reuses, or None if `layer` computes its own."""
        first = self.num_blocks - self.kv_shared_layers
        if layer < first:
            return None
        return max(i for i in range(first) if (self.windows[i] is None) == (self.windows[layer] is None))

    def kv_projections(self, layer: int) -> int:
        """Returns the number of key and value projections per key head.

        It is 2, or 1 if the values equal the keys, or 0 if the layer reuses the keys and values of another layer.
        """
        if self.kv_source(layer) is not None:
            return 0
        return 1 if self.k_eq_v and self.windows[layer] is None else 2

    def of_layer(self, layer: int) -> "ModelConfig":
        """Returns an architecture in which every layer has the heads and the feed-forward layer of `layer`."""
        changes: dict[str, Any] = {"global_head_size": None, "global_kv_heads": None, "double_wide_mlp": False}
        if self.windows[layer] is None:
            changes["head_size"] = self.global_head_size or self.head_size
            changes["kv_heads"] = self.global_kv_heads or self.kv_heads
        wider = 2 if self.double_wide_mlp and self.kv_source(layer) is not None else 1
        if self.experts is not None and self.routes(layer):
            changes["experts"] = replace(self.experts, shared_dim=wider * self.experts.shared_dim)
        elif self.experts is not None:
            changes |= {"experts": None, "hidden_dim": wider * self.experts.dense_dim}
        else:
            changes["hidden_dim"] = wider * self.hidden_dim
        return replace(self, **changes)

    @property
    def period(self) -> int:
        """Number of layers after which the pattern of layer kinds repeats; it divides the number of layers."""
        L = self.num_blocks
        kinds = [(window, layer in self.unrotated, self.routes(layer)) for layer, window in enumerate(self.windows)]
        return next(p for p in range(1, L + 1) if L % p == 0 and kinds[p:] == kinds[: L - p])


# Fields that affect compilation and execution, but not the function that the model computes.
_RUNTIME_FIELDS = {"lora", "kernel", "dropout_rate", "remat", "scan_layers", "dtype", "platform"}
# Fields that may change when training starts from the weights of another run.
_CONTEXT_FIELDS = {"max_context", "windows", "rope_theta", "rope_scaling", "rope_local_theta"}
ARCHITECTURE = tuple(field.name for field in fields(ModelConfig) if field.name not in _RUNTIME_FIELDS)
WEIGHT_FIELDS = tuple(name for name in ARCHITECTURE if name not in _CONTEXT_FIELDS)
# Field of the architecture → the setting (dotted path) from which it is resolved.
_PATHS = {name: f"attention.{name}" for name in AttentionSection.model_fields} | {
    name: f"model.{name}" for name in ModelSection.model_fields
}
SETTING_OF = {name: _PATHS[name] for name in ARCHITECTURE if name in _PATHS} | {
    "vocab_size": "model.padded_vocab_size", "windows": "attention.sliding_window", "position": "attention.absolute_pos",
    "unrotated": "attention.rope_layers", "softcap": "attention.attn_logit_softcapping",
    "final_softcap": "model.final_logit_softcapping", "experts": "moe.use_moe", "latent": "attention.kv_lora_rank",
}  # fmt: skip


# Settings of `attention` that do not apply to attention over latent vectors.
INACTIVE_WITH_LATENTS = (
    "qkv_bias", "out_bias", "gate_bias", "query_pre_attn_scalar", "attention_multiplier", "query_scaling_beta",
    "partial_rotary_factor", "rope_layers", "global_head_size", "global_kv_heads", "k_eq_v", "kv_shared_layers",
)  # fmt: skip


def model_conflicts(m: ModelSection, moe: MoESection, a: AttentionSection) -> Iterator[Conflict]:
    """Yields an error for each contradiction among the settings of the architecture."""
    kv_heads = m.kv_heads or m.n_heads
    head_size = m.head_size or m.dim // m.n_heads
    rotated = int(head_size * a.partial_rotary_factor)
    positions = [f"attention.{n}" for n in ("absolute_pos", "trainable_pos", "use_rotary_pos") if getattr(a, n)]
    if m.head_size is None and m.dim % m.n_heads:
        yield "model.dim", f"must be a multiple of model.n_heads when model.head_size is null, got {m.dim} and {m.n_heads}"
    if m.n_heads % kv_heads:
        yield "model.kv_heads", f"must divide model.n_heads, got {kv_heads} and {m.n_heads}"
    if a.kv_lora_rank is not None:
        for key in INACTIVE_WITH_LATENTS:
            if getattr(a, key) != AttentionSection.model_fields[key].default:
                yield f"attention.{key}", "has no effect with attention.kv_lora_rank: leave it out"
        if not a.use_rotary_pos or m.kv_heads not in (None, m.n_heads) or m.qk_norm:
            needed = "attention.use_rotary_pos: true, model.kv_heads: null and model.qk_norm: false"
            yield "attention.kv_lora_rank", f"needs {needed}: heads have separate keys, and latents are normalized"
        if (a.qk_rope_head_dim or head_size // 2) % 2:
            yield "attention.qk_rope_head_dim", f"must be even, got {a.qk_rope_head_dim or head_size // 2}"
        if m.v_norm:
            yield "model.v_norm", "must be false with attention.kv_lora_rank: latents are normalized"
    elif a.use_rotary_pos and head_size % 2:
        yield "model.head_size", f"must be even with attention.use_rotary_pos, got {head_size}"
    elif a.use_rotary_pos and (rotated < 2 or rotated % 2):
        share = f"of model.head_size {head_size} must be an even number of at least 2, got {rotated}"
        yield "attention.partial_rotary_factor", share
    yield from _layer_conflicts(m, a)
    yield from _projection_conflicts(m, moe, a)
    if a.attention_multiplier is not None and a.query_pre_attn_scalar is not None:
        yield "attention.attention_multiplier", "and attention.query_pre_attn_scalar both scale scores: set one of them"
    if a.absolute_pos and m.dim % 2:
        yield "model.dim", f"must be even with attention.absolute_pos, got {m.dim}"
    if m.hidden_dim is not None and moe.expansion is not None:
        yield "model.hidden_dim", "and moe.expansion both set the feed-forward width: set one of them"
    if moe.use_moe and moe.top_k_mlp > moe.n_experts:
        yield "moe.top_k_mlp", f"must be at most moe.n_experts, got {moe.top_k_mlp} and {moe.n_experts}"
    if moe.use_moe and moe.top_k_mlp == 1 and moe.norm_topk_prob and moe.n_experts > 1 and not moe.branch_norms:
        yield (
            "moe.norm_topk_prob",
            "must be false with moe.top_k_mlp: 1, because every weight would be 1 and the router could not learn",
        )
    if len(positions) > 1:
        yield positions[0], f"and {' and '.join(positions[1:])} exclude each other: set all but one to false"
    if a.rope_scaling not in ("none", "proportional") and a.rope_factor == 1:
        yield "attention.rope_factor", f"must be more than 1 with attention.rope_scaling: {a.rope_scaling}, got 1"
    if a.rope_scaling in ("llama3", "yarn", "longrope") and a.rope_original_context is None:
        yield "attention.rope_original_context", f"must be set with attention.rope_scaling: {a.rope_scaling}"
    if a.rope_scaling == "llama3" and a.low_freq_factor >= a.high_freq_factor:
        factors = f"got {a.low_freq_factor:g} and {a.high_freq_factor:g}"
        yield "attention.low_freq_factor", f"must be less than attention.high_freq_factor, {factors}"
    if a.rope_scaling == "yarn" and (a.beta_slow >= a.beta_fast or a.rope_theta <= 1):
        needed = "attention.beta_slow < attention.beta_fast and attention.rope_theta > 1"
        yield "attention.rope_scaling", f"yarn needs {needed}, got {a.beta_slow:g}, {a.beta_fast:g} and {a.rope_theta:g}"
    if a.rope_scaling == "longrope":
        for key in ("rope_short_factors", "rope_long_factors"):
            if (count := len(getattr(a, key) or ())) != rotated // 2:
                yield f"attention.{key}", f"must contain {rotated // 2} numbers, one per frequency of a head, got {count}"
    if moe.use_moe:
        yield from _expert_conflicts(m.num_blocks, moe)
    if not a.rope_layers:
        yield "attention.rope_layers", "must have at least one entry, got []"
    if a.sliding_window and a.context_window is None:
        yield "attention.context_window", "must be an integer ≥ 0 when attention.sliding_window is true, got null"
    if not a.layer_types:
        yield "attention.layer_types", "must name at least one of sliding, full, got []"


def _projection_conflicts(m: ModelSection, moe: MoESection, a: AttentionSection) -> Iterator[Conflict]:
    """Yields an error for each setting that ternary projections or sub-norms do not support."""
    if m.projections == "ternary" and a.kv_lora_rank is not None:
        yield "model.projections", "must be float with attention.kv_lora_rank: latent attention has no ternary projections"
    if m.sub_norms and a.kv_lora_rank is not None:
        yield "model.sub_norms", "must be false with attention.kv_lora_rank: the output of latent attention has no norm"
    if m.sub_norms and moe.use_moe:
        yield "model.sub_norms", "must be false with moe.use_moe: experts have no such norm"


def uneven_keys(settings: AttentionSection | ModelConfig) -> str | None:
    """Returns the first setting by which layers share keys and values or have keys and values of different shapes, or None."""
    keys = ("kv_shared_layers", "global_head_size", "global_kv_heads")
    return next((f"attention.{key}" for key in keys if getattr(settings, key)), None)


def _layer_conflicts(m: ModelSection, a: AttentionSection) -> Iterator[Conflict]:
    """Yields an error for each contradiction among the settings that make layers differ."""
    L, shared = m.num_blocks, a.kv_shared_layers
    size = a.global_head_size
    if m.n_heads % (a.global_kv_heads or 1):
        yield "attention.global_kv_heads", f"must divide model.n_heads, got {a.global_kv_heads} and {m.n_heads}"
    if size is not None and a.use_rotary_pos and (size % 2 or int(size * a.partial_rotary_factor) % 2):
        rule = "and its product with attention.partial_rotary_factor must be even with attention.use_rotary_pos"
        yield "attention.global_head_size", f"{rule}, got {size} and {a.partial_rotary_factor:g}"
    if size is not None and a.rope_scaling == "longrope":
        yield (
            "attention.global_head_size",
            "must be null with attention.rope_scaling: longrope, whose factors fit one head size",
        )
    if m.per_layer_dim and m.activation == "clamped_swiglu":
        yield "model.per_layer_dim", "must be 0 with model.activation: clamped_swiglu, which needs two projections"
    if shared and m.scan_layers:
        yield "attention.kv_shared_layers", "must be 0 with model.scan_layers: scanned layers compute their own keys"
    if not a.layer_types:
        return
    slides = [a.sliding_window and a.layer_types[i % len(a.layer_types)] == "sliding" for i in range(L)]
    own = max(L - shared, 0)  # the layers that compute their own keys
    if shared and not set(slides[own:]) <= set(slides[:own]):
        needed = "must leave a layer of each kind, sliding and full, that computes its own keys and values"
        yield "attention.kv_shared_layers", f"{needed}, got {shared} of {L} layers"


def _expert_conflicts(layers: int, moe: MoESection) -> Iterator[Conflict]:
    """Yields an error for each contradiction among the settings of experts."""
    members = moe.n_experts // moe.n_groups
    if moe.n_experts % moe.n_groups:
        yield "moe.n_groups", f"must divide moe.n_experts, got {moe.n_groups} and {moe.n_experts}"
    elif moe.top_k_groups > moe.n_groups:
        yield "moe.top_k_groups", f"must be at most moe.n_groups, got {moe.top_k_groups} and {moe.n_groups}"
    elif moe.top_k_mlp > moe.top_k_groups * members:
        available = f"the {moe.top_k_groups * members} experts of moe.top_k_groups groups"
        yield "moe.top_k_mlp", f"must be at most {available}, got {moe.top_k_mlp}"
    elif moe.group_score == "top2" and members < 2:
        yield "moe.group_score", f"top2 needs groups of at least 2 experts, got {members}"
    if moe.branch_norms and moe.shared_gate:
        yield "moe.branch_norms", "must be false with moe.shared_gate"
    if len(set(moe.dense_layers)) < len(moe.dense_layers) or any(layer >= layers for layer in moe.dense_layers):
        got = list(moe.dense_layers)
        yield "moe.dense_layers", f"must be different numbers less than model.num_blocks {layers}, got {got}"
    elif len(moe.dense_layers) == layers:
        yield "moe.dense_layers", "must leave at least one layer with experts"


def rope_scaling(a: AttentionSection, max_context: int) -> RopeScaling | None:
    """Returns the RoPE scaling with the values that its formula uses, or None if there is no scaling."""
    kind = a.rope_scaling
    if kind == "none" or not a.use_rotary_pos:
        return None
    names = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow")}.get(kind, ())
    numbers: dict[str, Any] = {name: getattr(a, name) for name in names}
    if kind == "proportional":
        return RopeScaling(kind, a.rope_factor, share=a.rope_share)
    if kind == "yarn":
        numbers |= {name: getattr(a, f"rope_{name}") for name in ("truncate", "mscale", "mscale_all_dim")}
    original = a.rope_original_context or 1
    if kind != "linear":
        numbers["original_context"] = original
    if kind in ("yarn", "longrope"):
        numbers["attention_factor"] = a.rope_attention_factor
    if kind == "longrope":
        numbers["factors"] = (a.rope_long_factors if max_context > original else a.rope_short_factors) or ()
    return RopeScaling(kind, a.rope_factor, **numbers)


def feed_forward_width(dim: int, activation: str) -> int:
    """Returns the default of `model.hidden_dim`."""
    return math.ceil(8 * dim / 3 / 32) * 32 if activation in GATED_ACTIVATIONS else 4 * dim


def experts_config(moe: MoESection, hidden_dim: int) -> ExpertsConfig:
    """Returns the resolved expert settings; `hidden_dim` is the width of one expert."""
    grouped = moe.top_k_groups < moe.n_groups
    return ExpertsConfig(
        count=moe.n_experts,
        top_k=moe.top_k_mlp,
        shared_dim=(moe.shared_hidden_dim or moe.shared_experts * hidden_dim) if moe.shared_experts else 0,
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


def _position_kind(a: AttentionSection) -> str:
    if a.use_rotary_pos:
        return "rope"
    if a.trainable_pos:
        return "learned"
    return "sinusoidal" if a.absolute_pos else "none"


def architecture(m: ModelSection, moe: MoESection, a: AttentionSection, vocab_size: int, platform: Platform) -> ModelConfig:
    """Returns the resolved architecture. A field that is not in `resolved` equals the setting of the same name."""
    if m.padded_vocab_size is not None and m.padded_vocab_size < vocab_size:
        sentence = f"model.padded_vocab_size must be at least the vocabulary of {vocab_size}, got {m.padded_vocab_size}"
        raise UserError(sentence, key="model.padded_vocab_size", value=m.padded_vocab_size)
    hidden_dim = m.hidden_dim or feed_forward_width(m.dim, m.activation)
    if moe.expansion is not None:
        hidden_dim = max(1, round(moe.expansion * m.dim))
    head_size = m.head_size or m.dim // m.n_heads
    window = None if a.context_window is None else a.context_window + 1
    multiplier = a.attention_multiplier
    kinds = [a.layer_types[i % len(a.layer_types)] for i in range(m.num_blocks)]
    resolved: dict[str, Any] = {
        "vocab_size": m.padded_vocab_size or vocab_size,
        "kv_heads": m.kv_heads or m.n_heads,
        "head_size": head_size,
        "hidden_dim": hidden_dim,
        "windows": tuple(window if a.sliding_window and kind == "sliding" else None for kind in kinds),
        "position": _position_kind(a),
        "rope_scaling": rope_scaling(a, m.max_context),
        "rope_local_theta": a.rope_local_theta if a.sliding_window else None,
        "unrotated": tuple(i for i in range(m.num_blocks) if not a.rope_layers[i % len(a.rope_layers)]),
        # Scores are divided by the square root of this number.
        "query_pre_attn_scalar": a.query_pre_attn_scalar if multiplier is None else multiplier**-2,
        # Equal to the other layers is the same as None, so that equal architectures compare equal.
        "global_head_size": None if a.global_head_size == head_size else a.global_head_size,
        "global_kv_heads": None if a.global_kv_heads == (m.kv_heads or m.n_heads) else a.global_kv_heads,
        "double_wide_mlp": m.double_wide_mlp and a.kv_shared_layers > 0,
        "sub_norms": m.projections == "ternary" and not moe.use_moe if m.sub_norms is None else m.sub_norms,
        "softcap": a.attn_logit_softcapping,
        "final_softcap": m.final_logit_softcapping,
        "remat": m.remat_policy if m.gradient_checkpointing else "none",
        "platform": platform,
    }
    if moe.use_moe:
        resolved["experts"] = experts_config(moe, hidden_dim)
    if a.kv_lora_rank is not None:
        rotated_size = a.qk_rope_head_dim or head_size // 2
        epsilon = a.latent_norm_epsilon or m.norm_epsilon
        resolved["latent"] = LatentConfig(a.kv_lora_rank, rotated_size, a.v_head_dim or head_size, a.q_lora_rank, epsilon)
    unchanged = {name: value for name, value in (vars(m) | vars(a)).items() if name in ModelConfig.__dataclass_fields__}
    return ModelConfig(**unchanged | resolved)
