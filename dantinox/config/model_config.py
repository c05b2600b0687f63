"""`ModelConfig`, the resolved architecture of a model, and what follows from it."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from dantinox.config.attention_settings import AttentionKernel, AttentionSection
from dantinox.config.base import setting_defaults
from dantinox.config.lora_settings import LoraConfig
from dantinox.config.model_settings import (
    Activation,
    ComputeDtype,
    ModelSection,
    Norm,
    NormPlacement,
    Projections,
    QKNormScope,
)
from dantinox.config.moe_settings import GroupScore, MoESection, ScoreFunction

Position = Literal["rope", "learned", "sinusoidal", "none"]
Platform = Literal["auto", "cpu", "gpu", "tpu"]

# The defaults of the settings. A field that copies a setting has the default of that setting.
DEFAULT = setting_defaults(ModelSection, MoESection, AttentionSection)


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies for contexts that are `factor` times as long as
    `original_context` (see `model.positions`).

    Each `kind` uses only the fields that appear in its formula.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope", "proportional"]
    factor: float
    original_context: int = 1
    low_freq_factor: float = DEFAULT.low_freq_factor
    high_freq_factor: float = DEFAULT.high_freq_factor
    beta_fast: float = DEFAULT.beta_fast
    beta_slow: float = DEFAULT.beta_slow
    truncate: bool = DEFAULT.rope_truncate
    mscale: float | None = DEFAULT.rope_mscale
    mscale_all_dim: float | None = DEFAULT.rope_mscale_all_dim
    attention_factor: float | None = DEFAULT.rope_attention_factor
    factors: tuple[float, ...] = ()
    share: float = DEFAULT.rope_share


@dataclass(frozen=True)
class ExpertsConfig:
    """Experts that replace the feed-forward layer.

    Attributes:
      count: experts per layer; each token uses `top_k` of them.
      shared_dim: width of the shared expert layer (0: no such layer); `shared_gate`: whether this
        layer has a gate.
      score: function that turns router logits into scores. `normalize`: whether the weights of a
        token sum to 1. `scaling`: factor by which these weights are multiplied.
      bias: whether a bias affects the choice of experts (see `model.moe.Router`); `logit_bias`:
        whether the logits have a bias.
      branch_norms: whether experts and the shared layer have separate norms (see
        `model.moe.BranchedExperts`).
      groups: number of expert groups; a token uses experts of the `top_groups` groups with the
        highest `group_score`.
      dense_layers: layers without experts; their feed-forward layer is `dense_dim` wide.
    """

    count: int
    top_k: int
    shared_dim: int = 0
    score: ScoreFunction = DEFAULT.score_function
    normalize: bool = DEFAULT.norm_topk_prob
    bias: bool = False
    shared_gate: bool = DEFAULT.shared_gate
    scaling: float = DEFAULT.routed_scaling
    logit_bias: bool = DEFAULT.router_bias
    groups: int = DEFAULT.n_groups
    top_groups: int = DEFAULT.top_k_groups
    group_score: GroupScore = DEFAULT.group_score
    dense_layers: tuple[int, ...] = DEFAULT.dense_layers
    dense_dim: int = 0
    branch_norms: bool = DEFAULT.branch_norms


@dataclass(frozen=True)
class LatentConfig:
    """Attention over latent vectors (see `model.latent_attention`).

    Attributes:
      rank: size of the latent vector from which all heads compute keys and values.
      rotated_size: rotated dimensions of queries and keys, in addition to `head_size` dimensions
        without rotation.
      value_size: size of the values of a head.
      query_rank: size of the latent vector from which queries are computed; None: no such vector.
      norm_epsilon: number added to the variance in normalizations of latents.
    """

    rank: int
    rotated_size: int
    value_size: int
    query_rank: int | None = None
    norm_epsilon: float = DEFAULT.norm_epsilon


@dataclass(frozen=True)
class ModelConfig:
    """The resolved architecture, from which a `Transformer` is built.

    `scan_layers` stacks repeated layers for training; a model that decodes has separate layers.
    `windows` contains, for each layer, the number of keys that a query sees, including the key of
    its own position, or None for all keys. `unrotated` lists the layers without rotary positions.
    `of_layer` returns the architecture of one layer. `platform` is the compilation target; `auto`
    is this machine.
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
    projections: Projections = DEFAULT.projections
    position: Position = "rope"
    rope_theta: float = DEFAULT.rope_theta
    rope_scaling: RopeScaling | None = None
    rope_local_theta: float | None = DEFAULT.rope_local_theta
    unrotated: tuple[int, ...] = ()
    partial_rotary_factor: float = DEFAULT.partial_rotary_factor
    query_scaling_beta: float | None = DEFAULT.query_scaling_beta
    scale_embeddings: bool = DEFAULT.scale_embeddings
    embedding_multiplier: float = DEFAULT.embedding_multiplier
    residual_multiplier: float = DEFAULT.residual_multiplier
    logits_scaling: float = DEFAULT.logits_scaling
    norm_embeddings: bool = DEFAULT.norm_embeddings
    parallel_blocks: bool = DEFAULT.parallel_blocks
    activation: Activation = DEFAULT.activation
    swiglu_limit: float = DEFAULT.swiglu_limit
    swiglu_alpha: float = DEFAULT.swiglu_alpha
    mlp_bias: bool = DEFAULT.mlp_bias
    norm: Norm = DEFAULT.norm
    norm_placement: NormPlacement = DEFAULT.norm_placement
    norm_epsilon: float = DEFAULT.norm_epsilon
    norm_scale: bool = DEFAULT.norm_scale
    norm_bias: bool = DEFAULT.norm_bias
    norm_zero_centered: bool = DEFAULT.norm_zero_centered
    sub_norms: bool = False
    qk_norm: bool = DEFAULT.qk_norm
    qk_norm_scope: QKNormScope = DEFAULT.qk_norm_scope
    qk_norm_after_rope: bool = DEFAULT.qk_norm_after_rope
    qkv_bias: bool = DEFAULT.qkv_bias
    out_bias: bool = DEFAULT.out_bias
    query_pre_attn_scalar: float | None = DEFAULT.query_pre_attn_scalar
    no_sink: bool = DEFAULT.no_sink
    gate_bias: bool = DEFAULT.gate_bias
    softcap: float | None = DEFAULT.attn_logit_softcapping
    sink_logits: bool = DEFAULT.sink_logits
    global_head_size: int | None = DEFAULT.global_head_size
    global_kv_heads: int | None = DEFAULT.global_kv_heads
    k_eq_v: bool = DEFAULT.k_eq_v
    v_norm: bool = DEFAULT.v_norm
    kv_shared_layers: int = DEFAULT.kv_shared_layers
    double_wide_mlp: bool = DEFAULT.double_wide_mlp
    layer_scalar: bool = DEFAULT.layer_scalar
    per_layer_dim: int = DEFAULT.per_layer_dim
    head_bias: bool = DEFAULT.head_bias
    final_softcap: float | None = DEFAULT.final_logit_softcapping
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    lora: LoraConfig | None = None
    kernel: AttentionKernel = DEFAULT.kernel
    weight_tying: bool = DEFAULT.weight_tying
    dropout_rate: float = DEFAULT.dropout_rate
    remat: Literal["none", "full", "dots"] = "none"
    scan_layers: bool = DEFAULT.scan_layers
    dtype: ComputeDtype = DEFAULT.dtype
    platform: Platform = "auto"

    @property
    def rotated_size(self) -> int:
        """Number of rotated dimensions of a query and a key."""
        if self.latent is not None:
            return self.latent.rotated_size
        return int(self.head_size * self.partial_rotary_factor)

    def rotation(self, layer: int) -> tuple[float, RopeScaling | None] | None:
        """Returns the base and the scaling of a layer's rotary frequencies, or None for a layer
        without rotation.
        """
        if self.position != "rope" or layer in self.unrotated:
            return None
        if self.rope_local_theta is not None and self.windows[layer] is not None:
            return self.rope_local_theta, None
        return self.rope_theta, self.rope_scaling

    def routes(self, layer: int) -> bool:
        """Whether a layer routes tokens to experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def kv_source(self, layer: int) -> int | None:
        """Returns the index of the layer whose keys and values `layer` reuses, or None if `layer`
        computes its own.
        """
        shared_from = self.num_blocks - self.kv_shared_layers
        if layer < shared_from:
            return None
        has_window = self.windows[layer] is not None
        return max(i for i in range(shared_from) if (self.windows[i] is not None) == has_window)

    def kv_projections(self, layer: int) -> int:
        """Returns the number of key and value projections per key head.

        It is 2, or 1 if the values equal the keys, or 0 if the layer reuses the keys and values of
        another layer.
        """
        if self.kv_source(layer) is not None:
            return 0
        return 1 if self.k_eq_v and self.windows[layer] is None else 2

    def of_layer(self, layer: int) -> "ModelConfig":
        """Returns an architecture in which every layer has the heads and the feed-forward layer of
        `layer`.
        """
        changes: dict[str, Any] = {
            "global_head_size": None,
            "global_kv_heads": None,
            "double_wide_mlp": False,
        }
        if self.windows[layer] is None:
            changes["head_size"] = self.global_head_size or self.head_size
            changes["kv_heads"] = self.global_kv_heads or self.kv_heads
        # The factor of the dense and shared widths.
        scale = 2 if self.double_wide_mlp and self.kv_source(layer) is not None else 1
        if self.experts is None:
            changes["hidden_dim"] = scale * self.hidden_dim
        elif self.routes(layer):
            changes["experts"] = replace(self.experts, shared_dim=scale * self.experts.shared_dim)
        else:
            changes |= {"experts": None, "hidden_dim": scale * self.experts.dense_dim}
        return replace(self, **changes)

    @property
    def period(self) -> int:
        """Number of layers after which the pattern of layer kinds repeats; it divides the number of
        layers.
        """
        L = self.num_blocks
        kinds = [
            (window, layer in self.unrotated, self.routes(layer))
            for layer, window in enumerate(self.windows)
        ]
        # A pattern has the period p if moving it by p layers changes nothing.
        return next(p for p in range(1, L + 1) if L % p == 0 and kinds[p:] == kinds[: L - p])


# Fields that affect compilation and execution, but not the function that the model computes.
_RUNTIME_FIELDS = {"lora", "kernel", "dropout_rate", "remat", "scan_layers", "dtype", "platform"}
# Fields that may change when training starts from the weights of another run.
_CONTEXT_FIELDS = {"max_context", "windows", "rope_theta", "rope_scaling", "rope_local_theta"}
# Fields that determine the function that the model computes, and those of them that its weights
# determine.
ARCHITECTURE = tuple(
    field.name for field in fields(ModelConfig) if field.name not in _RUNTIME_FIELDS
)
WEIGHT_FIELDS = tuple(name for name in ARCHITECTURE if name not in _CONTEXT_FIELDS)
_PATHS = {name: f"attention.{name}" for name in AttentionSection.model_fields} | {
    name: f"model.{name}" for name in ModelSection.model_fields
}
# Field of the architecture → the setting (dotted path) from which it is resolved.
SETTING_OF = {name: _PATHS[name] for name in ARCHITECTURE if name in _PATHS} | {
    "vocab_size": "model.padded_vocab_size", "windows": "attention.sliding_window",
    "position": "attention.absolute_pos", "unrotated": "attention.rope_layers",
    "softcap": "attention.attn_logit_softcapping", "final_softcap": "model.final_logit_softcapping",
    "experts": "moe.use_moe", "latent": "attention.kv_lora_rank",
}  # fmt: skip


def uneven_keys(settings: AttentionSection | ModelConfig) -> str | None:
    """Returns the first setting by which layers share keys and values or differ in their shapes, or
    None if there is none.
    """
    keys = ("kv_shared_layers", "global_head_size", "global_kv_heads")
    return next((f"attention.{key}" for key in keys if getattr(settings, key)), None)
