"""The `model`, `attention` and `moe` sections, and `ModelConfig`, the architecture that they define."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from dantinox.config.base import Conflict, Count, CountOrZero, NonNegative, Positive, Section, as_tuple, field
from dantinox.config.prerequisites import Needs, differs, given, nonempty
from dantinox.files import UserError

Position = Literal["rope", "learned", "sinusoidal", "none"]
Platform = Literal["auto", "cpu", "gpu", "tpu"]
Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # PEFT's names


CLAMPED = Needs(("model.activation", "clamped_swiglu"))
SCALED_NORMS = Needs(("model.norm_scale", True))
GATED = ("swiglu", "geglu", "clamped_swiglu")  # activations of two projections, gate and up


class ModelSection(Section):
    """Size and shape of the transformer."""

    dim: Count = field(256, "width of the residual stream")
    n_heads: Count = field(8, "query heads per layer")
    kv_heads: Count | None = field(None, "key/value heads per layer (null: as many as n_heads; 1: multi-query)")
    head_size: Count | None = field(None, "width of one head (null: dim / n_heads)")
    num_blocks: Count = field(6, "number of layers")
    hidden_dim: Count | None = field(None, "feed-forward width (null: 8/3 dim rounded up to 32 when gated, else 4 dim)")
    max_context: Count = field(256, "longest sequence in tokens; training windows have this length")
    padded_vocab_size: Count | None = field(
        None, "logits of a token where they are more than the tokenizer's tokens, as in some checkpoints (null: as many)"
    )
    weight_tying: bool = field(True, "the output layer is the embedding table")
    head_bias: bool = field(False, "a bias of the logits")
    final_logit_softcapping: Positive | None = field(None, "softcap of the output logits: cap · tanh(logit / cap) (null: none)")
    scale_embeddings: bool = field(False, "embeddings are multiplied by √dim")
    embedding_multiplier: Positive = field(1.0, "embeddings are multiplied by it")
    residual_multiplier: Positive = field(1.0, "the outputs of sub-layers are multiplied by it before they are added")
    logits_scaling: Positive = field(1.0, "the output logits are divided by it")
    norm_embeddings: bool = field(False, "embeddings are normalised before the first layer")
    parallel_blocks: Annotated[bool, Needs(("model.norm_placement", "before"))] = field(
        False,
        "attention and feed-forward of a layer read the same normalised input, and both outputs are added to it",
    )
    activation: Literal["swiglu", "geglu", "clamped_swiglu", "gelu", "relu2"] = field("swiglu", "feed-forward non-linearity")
    swiglu_limit: Annotated[Positive, CLAMPED] = field(
        7.0, "clamped_swiglu: the largest gate, and the largest magnitude of what gates multiply"
    )
    swiglu_alpha: Annotated[Positive, CLAMPED] = field(1.702, "clamped_swiglu: factor of the gate inside its sigmoid")
    mlp_bias: bool = field(False, "biases in the feed-forward")
    norm: Literal["rmsnorm", "layernorm"] = field("rmsnorm", "normalisation of the sub-layers, and behind the last")
    norm_placement: Literal["before", "after", "both"] = field(
        "before", "where a sub-layer's normalisation stands: on what goes in, on what comes out before it is added, or on both"
    )
    norm_epsilon: Positive = field(1e-5, "added to the variance inside the normalisations")
    norm_scale: bool = field(True, "normalisations have learned scales, and layernorm a bias")
    norm_bias: Annotated[bool, Needs(("model.norm", "layernorm")), SCALED_NORMS] = field(True, "layernorm has a bias")
    norm_zero_centered: Annotated[bool, Needs(("model.norm", "rmsnorm"), ("model.qk_norm", True)), SCALED_NORMS] = field(
        False, "RMS-normalisations multiply by 1 + their scale, which starts at 0"
    )
    qk_norm: bool = field(False, "RMS-normalise queries and keys before positions are applied")
    qk_norm_scope: Annotated[Literal["head", "layer"], Needs(("model.qk_norm", True))] = field(
        "head", "what is normalised together: a head, or all heads of a layer"
    )
    qk_norm_after_rope: Annotated[bool, Needs(("model.qk_norm", True)), Needs(("attention.use_rotary_pos", True))] = field(
        False, "queries and keys are normalised after rotary positions are applied"
    )
    dropout_rate: Annotated[float, Field(ge=0, lt=1)] = field(0.0, "dropout in training only")
    gradient_checkpointing: bool = field(False, "recompute layers in the backward pass to save memory")
    remat_policy: Annotated[Literal["full", "dots"], Needs(("model.gradient_checkpointing", True))] = field(
        "full", "with gradient_checkpointing: recompute everything, or all but matrix products"
    )
    v_norm: bool = field(False, "RMS-normalise the values of each head, without a learned scale")
    layer_scalar: bool = field(False, "the output of each layer is multiplied by a learned number")
    per_layer_dim: CountOrZero = field(0, "size of the embedding of a token that each layer reads besides its input (0: none)")
    double_wide_mlp: Annotated[bool, Needs(("attention.kv_shared_layers", differs(0)))] = field(
        False, "the dense or shared feed-forward layers of attention.kv_shared_layers have twice the width"
    )
    scan_layers: bool = field(
        False, "train with stacked layers in a loop, which compiles in a fraction of the time; files hold separate layers"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = field(
        "auto", "compute dtype (auto: float32 on CPU, bfloat16 on GPU and TPU); weights stay float32"
    )


EXPERTS = Needs(("moe.use_moe", True))
SHARED = Needs(("moe.shared_experts", differs(0)))
GROUPS = Needs(("moe.n_groups", differs(1)))


class MoESection(Section):
    """Experts, and the feed-forward expansion."""

    use_moe: bool = field(False, "experts in place of the dense feed-forward layer")
    n_experts: Annotated[Count, EXPERTS] = field(4, "experts per layer, each as wide as the feed-forward layer")
    top_k_mlp: Annotated[Count, EXPERTS] = field(2, "experts that a token takes")
    shared_experts: Annotated[CountOrZero, EXPERTS] = field(0, "experts that every token takes besides, as one that is as wide")
    shared_hidden_dim: Annotated[Count | None, EXPERTS, SHARED] = field(
        None, "width of the layer that every token takes (null: shared_experts times the width of an expert)"
    )
    shared_gate: Annotated[bool, EXPERTS, SHARED] = field(
        False, "what the layer gives that every token takes is multiplied by sigmoid(w x)"
    )
    branch_norms: Annotated[bool, EXPERTS, SHARED, Needs(("model.norm_placement", "both"))] = field(
        False,
        "experts and the layer that every token takes have norms of their own, and the router reads the residual stream with "
        "a norm and learned scales of its own",
    )
    dense_layers: Annotated[tuple[CountOrZero, ...], BeforeValidator(as_tuple), EXPERTS] = field(
        (), "layers, from 0, with a dense feed-forward layer in place of experts"
    )
    dense_hidden_dim: Annotated[Count | None, EXPERTS, Needs(("moe.dense_layers", nonempty))] = field(
        None, "feed-forward width of dense_layers (null: the width of an expert)"
    )
    expansion: Positive | None = field(None, "feed-forward width as a multiple of dim (null: see model.hidden_dim)")
    score_function: Annotated[Literal["softmax", "sigmoid"], EXPERTS] = field("softmax", "the scores of a token's experts")
    norm_topk_prob: Annotated[bool, EXPERTS] = field(True, "the weights of a token's experts sum to 1")
    routed_scaling: Annotated[Positive, EXPERTS] = field(1.0, "factor on the weights of a token's experts")
    router_bias: Annotated[bool, EXPERTS] = field(False, "a bias of the router's logits")
    choice_bias: Annotated[bool, EXPERTS] = field(
        False, "a bias on the choice of experts and not on their weights, which only bias_update_rate moves"
    )
    n_groups: Annotated[Count, EXPERTS] = field(1, "groups of experts, of which a token takes experts of top_k_groups alone")
    top_k_groups: Annotated[Count, EXPERTS, GROUPS] = field(1, "groups that a token may take experts of")
    group_score: Annotated[Literal["max", "top2"], EXPERTS, GROUPS] = field(
        "max", "the score of a group: that of its best expert, or the sum of its best two"
    )
    alpha_balance: Annotated[NonNegative, EXPERTS] = field(0.01, "weight of the load-balance loss, the mean over layers")
    router_z_loss: Annotated[NonNegative, EXPERTS] = field(
        0.0, "weight of the router z-loss (squared log-normalizer of the scores), averaged over layers"
    )
    bias_update_rate: Annotated[NonNegative, EXPERTS] = field(
        0.0, "balance without a loss: what a step adds to the choice of experts with few tokens (0: off)"
    )


SLIDING = Needs(("attention.sliding_window", True))
LATENT = Needs(("attention.kv_lora_rank", given))
SCALED = Needs(("attention.rope_scaling", differs("none")))
LLAMA3, YARN = Needs(("attention.rope_scaling", "llama3")), Needs(("attention.rope_scaling", "yarn"))
LONGROPE = Needs(("attention.rope_scaling", "longrope"))
PROPORTIONAL = Needs(("attention.rope_scaling", "proportional"))
ROTARY = Needs(("attention.use_rotary_pos", True))


class AttentionSection(Section):
    """Positions and what attention may see."""

    use_rotary_pos: bool = field(True, "rotary positions (RoPE, half-split layout)")
    trainable_pos: bool = field(False, "learned position embeddings")
    absolute_pos: bool = field(False, "sinusoidal position embeddings")
    rope_theta: Annotated[Positive, ROTARY] = field(10000.0, "base of the rotary frequencies")
    rope_local_theta: Annotated[Positive | None, ROTARY, SLIDING] = field(
        None, "base of those of sliding layers, which rope_scaling then leaves alone (null: as in all layers)"
    )
    rope_layers: Annotated[tuple[bool, ...], BeforeValidator(as_tuple), ROTARY] = field(
        (True,), "which layers rotate queries and keys, repeated over the depth"
    )
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1), ROTARY] = field(
        1.0, "share of each head that is rotated, from its first dimension"
    )
    rope_scaling: Annotated[Literal["none", "linear", "llama3", "yarn", "longrope", "proportional"], ROTARY] = field(
        "none", "lower rotary frequencies, for texts longer than those of a first training: all, the low ones, or each its way"
    )
    rope_factor: Annotated[float, Field(ge=1, allow_inf_nan=False), SCALED] = field(
        1.0, "what frequencies are divided by: how many times longer texts become"
    )
    rope_original_context: Annotated[
        Count | None, Needs(*(("attention.rope_scaling", kind) for kind in ("llama3", "yarn", "longrope")))
    ] = field(None, "llama3, yarn, longrope: tokens of the texts before the scaling")
    low_freq_factor: Annotated[Positive, LLAMA3] = field(
        1.0, "llama3: frequencies with fewer turns in the original context are divided by rope_factor"
    )
    high_freq_factor: Annotated[Positive, LLAMA3] = field(4.0, "llama3: those that turn more often are kept")
    beta_fast: Annotated[Positive, YARN] = field(32.0, "yarn: frequencies with more turns in the original context are kept")
    beta_slow: Annotated[Positive, YARN] = field(1.0, "yarn: those that turn less often are divided")
    rope_truncate: Annotated[bool, YARN] = field(True, "yarn: the blend begins and ends at whole indices of frequencies")
    rope_mscale: Annotated[Positive | None, YARN] = field(
        None, "yarn: m in the factor on queries and keys (0.1 m ln rope_factor + 1) / (0.1 n ln rope_factor + 1) (null: none)"
    )
    rope_mscale_all_dim: Annotated[Positive | None, YARN] = field(
        None, "yarn: n of that factor; latent attention multiplies scores by (0.1 n ln rope_factor + 1)² (null: none)"
    )
    rope_attention_factor: Annotated[
        Positive | None, Needs(("attention.rope_scaling", "yarn"), ("attention.rope_scaling", "longrope"))
    ] = field(
        None, "yarn, longrope: factor on queries and keys (null: 0.1 ln rope_factor + 1; √(1 + ln rope_factor / ln original))"
    )
    query_scaling_beta: Annotated[
        Positive | None, Needs(*(("attention.rope_scaling", kind) for kind in ("llama3", "yarn", "longrope")))
    ] = field(None, "β: queries at position p are multiplied by 1 + β ln(1 + ⌊p / rope_original_context⌋) (null: by nothing)")
    rope_share: Annotated[float, Field(gt=0, le=1), PROPORTIONAL] = field(
        1.0, "proportional: share of the frequencies of a head that rotate, from the highest; the others are 0"
    )
    rope_short_factors: Annotated[tuple[Positive, ...] | None, BeforeValidator(as_tuple), LONGROPE] = field(
        None, "longrope: what each frequency is divided by where max_context is no longer than rope_original_context"
    )
    rope_long_factors: Annotated[tuple[Positive, ...] | None, BeforeValidator(as_tuple), LONGROPE] = field(
        None, "longrope: divisors of the frequencies for contexts longer than the original one"
    )
    sliding_window: bool = field(False, "limit attention to the last context_window + 1 keys")
    context_window: Annotated[CountOrZero | None, SLIDING] = field(None, "earlier keys that a query of a sliding layer sees")
    layer_types: Annotated[tuple[Literal["sliding", "full"], ...], BeforeValidator(as_tuple), SLIDING] = field(
        ("sliding",), "with sliding_window: the kind of each layer, repeated over the depth"
    )
    kernel: Literal["auto", "xla", "chunked", "cudnn", "splash"] = field(
        "auto",
        "how training computes it: xla makes all scores at once, chunked some at a time, cudnn is a GPU's, splash a TPU's",
    )
    qkv_bias: bool = field(False, "biases of queries, keys and values")
    out_bias: bool = field(False, "a bias of attention's output")
    query_pre_attn_scalar: Positive | None = field(None, "scores are divided by the root of it (null: head_size)")
    attention_multiplier: Positive | None = field(
        None, "scores are multiplied by it, and not divided (null: they are divided as query_pre_attn_scalar says)"
    )
    no_sink: bool = field(False, "output gate: attention output times sigmoid(W x)")
    gate_bias: Annotated[bool, Needs(("attention.no_sink", True))] = field(False, "a bias in that gate")
    attn_logit_softcapping: Positive | None = field(None, "softcap of attention scores: cap · tanh(score / cap) (null: none)")
    kv_lora_rank: Count | None = field(
        None, "latent attention: size of the vector that keys and values of all heads are made of (null: attention without one)"
    )
    q_lora_rank: Annotated[Count | None, LATENT] = field(None, "size of a vector that queries are made of (null: none)")
    qk_rope_head_dim: Annotated[Count | None, LATENT] = field(
        None, "size of the rotated part of queries and keys, beside head_size that is not rotated (null: half of head_size)"
    )
    v_head_dim: Annotated[Count | None, LATENT] = field(None, "size of a head's value (null: head_size)")
    latent_norm_epsilon: Annotated[Positive | None, LATENT] = field(
        None, "added to the variance inside the normalisations of latents (null: model.norm_epsilon)"
    )
    sink_logits: bool = field(False, "a learned logit per head that takes part in the softmax and has no value")
    global_head_size: Count | None = field(None, "width of one head in layers without a window (null: model.head_size)")
    global_kv_heads: Count | None = field(None, "key/value heads of layers without a window (null: model.kv_heads)")
    k_eq_v: bool = field(False, "in layers without a window the key projection gives the values too")
    kv_shared_layers: CountOrZero = field(
        0, "how many of the last layers read the keys and values of the last layer before them of their kind, sliding or full"
    )


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are lowered for texts `factor` times as long as `original_context` (see `model.positions`).

    `kind` reads those of the other numbers that its formula has.
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
    """Experts in place of a feed-forward layer.

    Attributes:
      count: of each layer; `top_k` of them are a token's.
      shared_dim: the width of the layer that all tokens take besides, 0 for none; `shared_gate`: whether it has a gate.
      score: what a router's logits become; with `normalise` the weights of a token sum to 1, and `scaling` multiplies them.
      bias: whether the choice has one, see `model.moe.Router`; `logit_bias`: whether the logits have one.
      branch_norms: whether experts and that layer have norms of their own, see `model.moe.BranchedExperts`.
      groups: of experts, of which a token takes those of `top_groups` alone, by their `group_score`.
      dense_layers: layers without experts, whose feed-forward layer is `dense_dim` wide.
    """

    count: int
    top_k: int
    shared_dim: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
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
    """Attention over latents of size `rank`, with a rotated part of keys and queries, see `model.latent_attention`.

    `norm_epsilon` is that of the normalisations of latents.
    """

    rank: int
    rotated_size: int
    value_size: int
    query_rank: int | None = None
    norm_epsilon: float = 1e-5


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of a model, resolved: what they add is multiplied by `scale`; `held` is the dtype of the weights that stay."""

    rank: int
    scale: float
    targets: tuple[Projection, ...]
    dropout: float = 0.0
    held: Literal["float32", "bfloat16", "int8"] = "float32"


@dataclass(frozen=True)
class ModelConfig:
    """The architecture, resolved: everything a `Transformer` is built from, and nothing else.

    With `scan_layers` those that recur are stacked, which is how a model is trained; one that decodes has its layers apart.
    `windows` holds for each layer the number of keys a query sees, its own included, or None for all; `unrotated` names layers
    without rotary positions. What differs between layers is resolved by `of_layer`. `platform` is what it is compiled for;
    `auto`: the machine at hand.
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
    activation: Literal["swiglu", "geglu", "clamped_swiglu", "gelu", "relu2"] = "swiglu"
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    mlp_bias: bool = False
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_placement: Literal["before", "after", "both"] = "before"
    norm_epsilon: float = 1e-5
    norm_scale: bool = True
    norm_bias: bool = True
    norm_zero_centered: bool = False
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
        """How much of a query and a key is rotated."""
        return int(self.head_size * self.partial_rotary_factor) if self.latent is None else self.latent.rotated_size

    def rotation(self, layer: int) -> tuple[float, RopeScaling | None] | None:
        """The base of a layer's rotary frequencies and how they are scaled, or None where nothing is rotated."""
        if self.position != "rope" or layer in self.unrotated:
            return None
        if self.rope_local_theta is not None and self.windows[layer] is not None:
            return self.rope_local_theta, None
        return self.rope_theta, self.rope_scaling

    def routes(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def kv_source(self, layer: int) -> int | None:
        """The layer whose keys and values a layer reads, or None where it has its own."""
        first = self.num_blocks - self.kv_shared_layers
        if layer < first:
            return None
        return max(i for i in range(first) if (self.windows[i] is None) == (self.windows[layer] is None))

    def kv_projections(self, layer: int) -> int:
        """The keys and values that a layer projects for each key head: 2, 1 where one is both, 0 where it reads another's."""
        if self.kv_source(layer) is not None:
            return 0
        return 1 if self.k_eq_v and self.windows[layer] is None else 2

    def of_layer(self, layer: int) -> "ModelConfig":
        """The architecture with the heads and the feed-forward layer of this layer in all."""
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
        """After how many layers the kinds of layers recur, a divisor of their number."""
        L = self.num_blocks
        kinds = [(window, layer in self.unrotated, self.routes(layer)) for layer, window in enumerate(self.windows)]
        return next(p for p in range(1, L + 1) if L % p == 0 and kinds[p:] == kinds[: L - p])


# Fields that say how a model's programs are made, not what the model is.
_RUNTIME = {"lora", "kernel", "dropout_rate", "remat", "scan_layers", "dtype", "platform"}
# Fields that may differ between a model and one that starts from its weights.
_REACH = {"max_context", "windows", "rope_theta", "rope_scaling", "rope_local_theta"}
ARCHITECTURE = tuple(field.name for field in fields(ModelConfig) if field.name not in _RUNTIME)
OF_WEIGHTS = tuple(name for name in ARCHITECTURE if name not in _REACH)
# Field of the architecture → the setting (dotted path) that it is, or that it is resolved from first.
_PATHS = {name: f"attention.{name}" for name in AttentionSection.model_fields} | {
    name: f"model.{name}" for name in ModelSection.model_fields
}
SETTING_OF = {name: _PATHS[name] for name in ARCHITECTURE if name in _PATHS} | {
    "vocab_size": "model.padded_vocab_size", "windows": "attention.sliding_window", "position": "attention.absolute_pos",
    "unrotated": "attention.rope_layers", "softcap": "attention.attn_logit_softcapping",
    "final_softcap": "model.final_logit_softcapping", "experts": "moe.use_moe", "latent": "attention.kv_lora_rank",
}  # fmt: skip


def model_conflicts(m: ModelSection, moe: MoESection, a: AttentionSection) -> Iterator[Conflict]:
    """Yields the rules across settings of the architecture that are broken."""
    kv_heads, head_size = m.kv_heads or m.n_heads, m.head_size or m.dim // m.n_heads
    rotated = int(head_size * a.partial_rotary_factor)
    positions = [f"attention.{n}" for n in ("absolute_pos", "trainable_pos", "use_rotary_pos") if getattr(a, n)]
    if m.head_size is None and m.dim % m.n_heads:
        yield "model.dim", f"must be a multiple of model.n_heads when model.head_size is null, got {m.dim} and {m.n_heads}"
    if m.n_heads % kv_heads:
        yield "model.kv_heads", f"must divide model.n_heads, got {kv_heads} and {m.n_heads}"
    if a.kv_lora_rank is not None:
        scores = ("query_pre_attn_scalar", "attention_multiplier", "query_scaling_beta")
        for key in ("qkv_bias", "out_bias", "gate_bias", *scores, "partial_rotary_factor", "rope_layers"):
            if getattr(a, key) != AttentionSection.model_fields[key].default:
                yield f"attention.{key}", "has no meaning with attention.kv_lora_rank: leave it at its default"
        if not a.use_rotary_pos or m.kv_heads not in (None, m.n_heads) or m.qk_norm:
            needed = "attention.use_rotary_pos: true, model.kv_heads: null and model.qk_norm: false"
            yield "attention.kv_lora_rank", f"needs {needed}: heads have their own keys, and latents are normalised"
        if (a.qk_rope_head_dim or head_size // 2) % 2:
            yield "attention.qk_rope_head_dim", f"must be even, got {a.qk_rope_head_dim or head_size // 2}"
        for key in ("global_head_size", "global_kv_heads", "k_eq_v", "kv_shared_layers"):
            if getattr(a, key) != AttentionSection.model_fields[key].default:
                yield f"attention.{key}", "has no meaning with attention.kv_lora_rank: leave it at its default"
        if m.v_norm:
            yield "model.v_norm", "must be false with attention.kv_lora_rank: latents are normalised"
    elif a.use_rotary_pos and head_size % 2:
        yield "model.head_size", f"must be even with attention.use_rotary_pos, got {head_size}"
    elif rotated < 2 or rotated % 2:
        share = f"of model.head_size {head_size} must be an even number of at least 2, got {rotated}"
        yield "attention.partial_rotary_factor", share
    yield from _layer_conflicts(m, a)
    if a.attention_multiplier is not None and a.query_pre_attn_scalar is not None:
        yield "attention.attention_multiplier", "and attention.query_pre_attn_scalar both scale scores: give one of them"
    if a.absolute_pos and m.dim % 2:
        yield "model.dim", f"must be even with attention.absolute_pos, got {m.dim}"
    if m.hidden_dim is not None and moe.expansion is not None:
        yield "model.hidden_dim", "and moe.expansion both set the feed-forward width: give one of them"
    if moe.use_moe and moe.top_k_mlp > moe.n_experts:
        yield "moe.top_k_mlp", f"must be at most moe.n_experts, got {moe.top_k_mlp} and {moe.n_experts}"
    if moe.use_moe and moe.top_k_mlp == 1 and moe.norm_topk_prob and moe.n_experts > 1 and not moe.branch_norms:
        yield "moe.norm_topk_prob", "must be false with moe.top_k_mlp: 1, or every weight is 1 and the router learns nothing"
    if len(positions) > 1:
        yield positions[0], f"and {' and '.join(positions[1:])} exclude each other: set all but one to false"
    if a.rope_scaling not in ("none", "proportional") and a.rope_factor == 1:
        yield "attention.rope_factor", f"must be more than 1 with attention.rope_scaling: {a.rope_scaling}, got 1"
    if a.rope_scaling in ("llama3", "yarn", "longrope") and a.rope_original_context is None:
        yield "attention.rope_original_context", f"must be given with attention.rope_scaling: {a.rope_scaling}"
    if a.rope_scaling == "llama3" and a.low_freq_factor >= a.high_freq_factor:
        factors = f"got {a.low_freq_factor:g} and {a.high_freq_factor:g}"
        yield "attention.low_freq_factor", f"must be less than attention.high_freq_factor, {factors}"
    if a.rope_scaling == "yarn" and (a.beta_slow >= a.beta_fast or a.rope_theta <= 1):
        needed = "attention.beta_slow < attention.beta_fast and attention.rope_theta > 1"
        yield "attention.rope_scaling", f"yarn needs {needed}, got {a.beta_slow:g}, {a.beta_fast:g} and {a.rope_theta:g}"
    if a.rope_scaling == "longrope":
        for key in ("rope_short_factors", "rope_long_factors"):
            if (count := len(getattr(a, key) or ())) != rotated // 2:
                yield f"attention.{key}", f"must hold {rotated // 2} numbers, one for each frequency of a head, got {count}"
    if moe.use_moe:
        yield from _expert_conflicts(m.num_blocks, moe)
    if not a.rope_layers:
        yield "attention.rope_layers", "must name at least one layer, got []"
    if a.sliding_window and a.context_window is None:
        yield "attention.context_window", "must be an integer ≥ 0 when attention.sliding_window is true, got null"
    if not a.layer_types:
        yield "attention.layer_types", "must name at least one of sliding, full, got []"


def uneven_keys(settings: AttentionSection | ModelConfig) -> str | None:
    """The first setting that gives layers different keys and values, or keys of another layer; None: there is none."""
    keys = ("kv_shared_layers", "global_head_size", "global_kv_heads")
    return next((f"attention.{key}" for key in keys if getattr(settings, key)), None)


def _layer_conflicts(m: ModelSection, a: AttentionSection) -> Iterator[Conflict]:
    """Yields the rules among the settings by which layers differ that are broken."""
    L, shared, size = m.num_blocks, a.kv_shared_layers, a.global_head_size
    if m.n_heads % (a.global_kv_heads or 1):
        yield "attention.global_kv_heads", f"must divide model.n_heads, got {a.global_kv_heads} and {m.n_heads}"
    if size is not None and a.use_rotary_pos and (size % 2 or int(size * a.partial_rotary_factor) % 2):
        rule = "and its product with attention.partial_rotary_factor must be even with attention.use_rotary_pos"
        yield "attention.global_head_size", f"{rule}, got {size} and {a.partial_rotary_factor:g}"
    if size is not None and a.rope_scaling == "longrope":
        yield "attention.global_head_size", "must be null with attention.rope_scaling: longrope, whose factors are for one size"
    if m.per_layer_dim and m.activation == "clamped_swiglu":
        yield "model.per_layer_dim", "must be 0 with model.activation: clamped_swiglu, which has no form of one argument"
    if shared and m.scan_layers:
        yield "attention.kv_shared_layers", "must be 0 with model.scan_layers: the layers of a loop have keys of their own"
    if not a.layer_types:
        return
    kinds = [a.sliding_window and a.layer_types[i % len(a.layer_types)] == "sliding" for i in range(L)]
    if shared and not set(kinds[L - shared :]) <= set(kinds[: max(L - shared, 0)]):
        needed = "must leave a layer of each kind, sliding and full, that has keys and values of its own"
        yield "attention.kv_shared_layers", f"{needed}, got {shared} of {L} layers"


def _expert_conflicts(layers: int, moe: MoESection) -> Iterator[Conflict]:
    """Yields the rules among the settings of experts that are broken."""
    members = moe.n_experts // moe.n_groups
    if moe.n_experts % moe.n_groups:
        yield "moe.n_groups", f"must divide moe.n_experts, got {moe.n_groups} and {moe.n_experts}"
    elif moe.top_k_groups > moe.n_groups:
        yield "moe.top_k_groups", f"must be at most moe.n_groups, got {moe.top_k_groups} and {moe.n_groups}"
    elif moe.top_k_mlp > moe.top_k_groups * members:
        there = f"the {moe.top_k_groups * members} experts of moe.top_k_groups groups"
        yield "moe.top_k_mlp", f"must be at most {there}, got {moe.top_k_mlp}"
    elif moe.group_score == "top2" and members < 2:
        yield "moe.group_score", f"top2 needs groups of at least 2 experts, got {members}"
    if moe.branch_norms and moe.shared_gate:
        yield "moe.branch_norms", "must be false with moe.shared_gate"
    if len(set(moe.dense_layers)) < len(moe.dense_layers) or any(layer >= layers for layer in moe.dense_layers):
        got = list(moe.dense_layers)
        yield "moe.dense_layers", f"must be different numbers less than model.num_blocks {layers}, got {got}"
    elif len(moe.dense_layers) == layers:
        yield "moe.dense_layers", "must leave at least one layer to the experts"


def rope_scaling(a: AttentionSection, max_context: int) -> RopeScaling | None:
    """The scaling that is asked for, with the numbers its formula has."""
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


def experts_config(moe: MoESection, hidden_dim: int) -> ExpertsConfig:
    """The experts that are asked for; `hidden_dim`: the width of one."""
    grouped = moe.top_k_groups < moe.n_groups
    return ExpertsConfig(
        moe.n_experts,
        moe.top_k_mlp,
        (moe.shared_hidden_dim or moe.shared_experts * hidden_dim) if moe.shared_experts else 0,
        moe.score_function,
        moe.norm_topk_prob,
        moe.choice_bias or moe.bias_update_rate > 0,
        moe.shared_gate,
        moe.routed_scaling,
        moe.router_bias,
        moe.n_groups if grouped else 1,
        moe.top_k_groups if grouped else 1,
        moe.group_score if grouped else "max",
        tuple(sorted(moe.dense_layers)),
        (moe.dense_hidden_dim or hidden_dim) if moe.dense_layers else 0,
        moe.branch_norms,
    )


def architecture(m: ModelSection, moe: MoESection, a: AttentionSection, vocab_size: int, platform: Platform) -> ModelConfig:
    """What these settings resolve to: a field is the setting of its name, unless it is among `resolved`."""
    if m.padded_vocab_size is not None and m.padded_vocab_size < vocab_size:
        sentence = f"model.padded_vocab_size must be at least the vocabulary of {vocab_size}, got {m.padded_vocab_size}"
        raise UserError(sentence, key="model.padded_vocab_size", value=m.padded_vocab_size)
    hidden_dim = m.hidden_dim or (math.ceil(8 * m.dim / 3 / 32) * 32 if m.activation in GATED else 4 * m.dim)
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
        "position": (
            "rope" if a.use_rotary_pos else "learned" if a.trainable_pos else "sinusoidal" if a.absolute_pos else "none"
        ),
        "rope_scaling": rope_scaling(a, m.max_context),
        "rope_local_theta": a.rope_local_theta if a.sliding_window else None,
        "unrotated": tuple(i for i in range(m.num_blocks) if not a.rope_layers[i % len(a.rope_layers)]),
        "query_pre_attn_scalar": a.query_pre_attn_scalar if multiplier is None else multiplier**-2,
        "global_head_size": None if a.global_head_size == head_size else a.global_head_size,
        "global_kv_heads": None if a.global_kv_heads == (m.kv_heads or m.n_heads) else a.global_kv_heads,
        "double_wide_mlp": m.double_wide_mlp and a.kv_shared_layers > 0,
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
    same = {name: value for name, value in (vars(m) | vars(a)).items() if name in ModelConfig.__dataclass_fields__}
    return ModelConfig(**same | resolved)
