"""The entropy router (entropix): metrics of a decoding step, the strategy, and its sampling numbers.

Pure functions of one row in float32; batches are `jax.vmap`. Entropies are in bits, varentropies in bits². Strategies and
formulas are those of the entropix guide. Where its code measures the cache or the batch instead of the model, the metrics are
defined anew; `guide_metrics` holds the literal ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, make_dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dantinox.config import UserError
from dantinox.config.router_settings import ATTENTION_TERMS, EVERY, RULES, STRATEGIES, RouterSection, with_request
from dantinox.sampling.selection import row_sum
from dantinox.sampling.steps import LARGEST, Number, finite_max

LN2 = float(np.log(2))
TINY = float(np.finfo(np.float32).tiny)
_GUIDE = {**RouterSection().numbers(), "clarify_token": -1}


class AttentionMetrics(NamedTuple):
    """How the newest query attends over its valid keys, means over all layers.

    Attributes:
      attn_entropy: of the heads' attention, bits ≥ 0.
      attn_entropy_norm: that over log2(number of valid keys), in [0, 1]; 0 with a single key.
      attn_varentropy: variance of the entropy over the heads of a layer, bits².
      attn_disagreement: ½ Σ|a − mean over heads of a|, in [0, 1).
      attn_agreement: 1 − attn_disagreement.
      interaction_strength: mean |score| before the softmax, ≥ 0.
    """

    attn_entropy: Number
    attn_entropy_norm: Number
    attn_varentropy: Number
    attn_disagreement: Number
    attn_agreement: Number
    interaction_strength: Number


class LayerAttention(NamedTuple):
    """One layer's part in `AttentionMetrics`: the entropies of its heads [H], and two means over them []."""

    entropy_H: Array
    entropy_norm_H: Array
    disagreement: Array
    interaction: Array


class Metrics(NamedTuple):
    """What the router reads: entropy (bits) and varentropy (bits²) of the model's distribution, and attention, or None."""

    entropy: Number
    varentropy: Number
    attention: AttentionMetrics | None = None


def logit_metrics(logits_V: Array) -> tuple[Array, Array]:
    """Entropy −Σp log2 p in bits and varentropy Σp(log2 p + H)² in bits², with 0·log 0 = 0; 0 and 0 of a row of -inf alone."""
    d_V = logits_V.astype(jnp.float32)
    d_V -= finite_max(d_V)
    lnZ = jnp.log(jnp.maximum(row_sum(jnp.exp(d_V)), TINY))
    p_V = jnp.exp(d_V - lnZ)
    surprise_V = jnp.where(p_V > 0, lnZ - d_V, 0)
    entropy = row_sum(p_V * surprise_V)
    return entropy / LN2, row_sum(p_V * (surprise_V - entropy) ** 2) / LN2**2


def layer_attention(scores_HS: Array, valid_S: Array) -> LayerAttention:
    """One layer's attention reduced, so that nothing of the cache's length is kept.

    Args:
      scores_HS: the newest query's scores as they enter the softmax, scaled; what stands in invalid slots is not read.
      valid_S: the keys that the query may see: written, not padding, inside the window; [S], or [H, S] where heads differ.
    """
    valid_HS = jnp.broadcast_to(valid_S, scores_HS.shape)
    keys_H = jnp.sum(valid_HS, axis=1)
    scores_HS = jnp.where(valid_HS, scores_HS.astype(jnp.float32), 0)
    masked_HS = jnp.where(valid_HS, scores_HS, -jnp.inf)
    d_HS = masked_HS - jax.vmap(finite_max)(masked_HS)[:, None]
    lnZ_H1 = jnp.log(jnp.maximum(jax.vmap(row_sum)(jnp.exp(d_HS)), TINY))[:, None]
    a_HS = jnp.exp(d_HS - lnZ_H1)
    entropy_H = jax.vmap(row_sum)(a_HS * jnp.where(a_HS > 0, lnZ_H1 - d_HS, 0)) / LN2
    return LayerAttention(
        entropy_H,
        entropy_H / jnp.log2(jnp.maximum(keys_H, 2).astype(jnp.float32)),  # 0 with one key, as the entropy is
        jnp.mean(jax.vmap(row_sum)(jnp.abs(a_HS - jnp.mean(a_HS, axis=0)))) / 2,
        jnp.mean(jax.vmap(row_sum)(jnp.abs(scores_HS)) / jnp.maximum(keys_H, 1)),
    )


def combine_layers(layers: LayerAttention | Sequence[LayerAttention]) -> AttentionMetrics:
    """The metrics of all layers, each layer weighing the same: a sequence of layers, or one with a leading layer axis."""
    parts = layers if isinstance(layers, LayerAttention) else (jnp.stack(part) for part in zip(*layers, strict=True))
    entropy_LH, entropy_norm_LH, disagreement_L, interaction_L = parts
    disagreement = jnp.mean(disagreement_L)
    return AttentionMetrics(
        jnp.mean(entropy_LH),
        jnp.mean(entropy_norm_LH),
        jnp.mean(jnp.var(entropy_LH, axis=1)),
        disagreement,
        1 - disagreement,
        jnp.mean(interaction_L),
    )


def guide_metrics(logits: Array, attention_scores: Array) -> dict[str, Array]:
    """The metrics as the guide's code computes them, for study and parity: of one layer, over all slots, mean over the batch.

    `attn_varentropy` is the variance over heads; the guide's own axis, the queries, gives 0 in decoding. `agreement` is a
    disagreement divided by the number of slots. The one liberty: 0·log 0 is 0 where a logit is -inf.

    Args:
      logits: [B, V].
      attention_scores: [B, H, Q, T] of the last layer, before the softmax.

    Returns:
      The guide's six keys and `attn_varentropy_guide_axis`; scalars, but `interaction_strength` is [B].
    """
    entropy_B, varentropy_B = jax.vmap(logit_metrics)(logits)
    scores = attention_scores.astype(jnp.float32)
    sums = jax.vmap(jax.vmap(jax.vmap(row_sum)))
    weights_BHQT = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    a_BHQT = weights_BHQT / sums(weights_BHQT)[..., None]
    entropy_BHQ = -sums(a_BHQT * jnp.log2(jnp.clip(a_BHQT, 1e-10, 1.0)))
    apart_BT = jnp.mean(jnp.abs(a_BHQT - jnp.mean(a_BHQT, axis=1, keepdims=True)), axis=(1, 2))
    return {
        "logits_entropy": jnp.mean(entropy_B),
        "logits_varentropy": jnp.mean(varentropy_B),
        "attn_entropy": jnp.mean(entropy_BHQ),
        "attn_varentropy": jnp.mean(jnp.var(entropy_BHQ, axis=1)),
        "attn_varentropy_guide_axis": jnp.mean(jnp.var(entropy_BHQ, axis=-1)),
        "agreement": jnp.mean(apart_BT),
        # Divided before they are added: a finite mask's 2.4e38 would overflow the sum.
        "interaction_strength": jnp.sum(jnp.abs(scores) / scores[0].size, axis=(1, 2, 3)),
    }


INTEGERS = ("clarify_token", "clarify_cooldown")


class _RouterNumbers:
    """The numbers of `RouterSection` as pytree leaves, by default the guide's; what each one means is said there.

    Python numbers become float32, or int32 for `clarify_token` (-1: none) and `clarify_cooldown`, so that no value of theirs
    compiles anything anew.
    """

    def __post_init__(self) -> None:
        for name in _GUIDE:
            value = getattr(self, name)
            if isinstance(value, int | float | np.generic):  # else an array, or what stands for one while it is traced
                finite = value if np.isinf(value) else np.clip(value, -LARGEST, LARGEST)  # the nearest float32
                object.__setattr__(self, name, np.int32(value) if name in INTEGERS else np.float32(finite))

    @classmethod
    def build(
        cls, section: RouterSection | None = None, measured: Mapping[str, float] | None = None, **request: Any
    ) -> "RouterConfig":
        """The numbers of a section.

        Args:
          section: None: the guide preset. Whoever has a tokenizer replaces a `clarify_token` given as text by its id.
          measured: the thresholds and scales of a calibration, which the preset `calibrated` needs.
          request: temperature, top_p, top_k and min_p of a request, see `with_request`.

        Raises:
          UserError: the preset is `calibrated` and a number was neither measured nor set, or `clarify_token` is text.
        """
        section = RouterSection() if section is None else section
        token = -1 if section.clarify_token is None else section.clarify_token
        if isinstance(token, str) and not token.isdecimal():
            raise UserError(
                f"router.clarify_token must be a token id where there is no tokenizer, got {token!r}",
                key="router.clarify_token",
            )
        config = RouterConfig(**with_request(section.numbers(measured), **request), clarify_token=int(token))
        return config if section.use_attention else without_attention(config)


if TYPE_CHECKING:

    @dataclass(frozen=True)
    class RouterConfig(_RouterNumbers):
        def __init__(self, **numbers: Any): ...
        def __getattr__(self, name: str) -> Any: ...

else:
    RouterConfig = make_dataclass(
        "RouterConfig", [(name, Number, value) for name, value in _GUIDE.items()], bases=(_RouterNumbers,), frozen=True
    )
    RouterConfig.__doc__ = _RouterNumbers.__doc__
    jax.tree_util.register_dataclass(RouterConfig, data_fields=tuple(_GUIDE), meta_fields=())


def without_attention(config: RouterConfig) -> RouterConfig:
    """The same formulas without their attention terms: what a row routes by that does not use attention."""
    return replace(config, **dict.fromkeys(ATTENTION_TERMS, 0.0))


GREEDY, CLARIFY, EXPLORE, RESAMPLE, ADAPTIVE = range(len(STRATEGIES))


class Route(NamedTuple):
    """What one row is sampled with: the strategy's id, temperature (0: argmax), top_p, top_k (int32) and min_p (0: off)."""

    strategy: Array
    temperature: Array
    top_p: Array
    top_k: Array
    min_p: Array


def route(metrics: Metrics, config: RouterConfig) -> Route:
    """The strategy of a row and its sampling numbers: the formulas of all strategies, selected without a branch.

    Conditions compare H and V as they are, formulas take them divided by their scales. Without attention its terms are dropped.
    """
    metrics = jax.tree.map(lambda number: jnp.asarray(number, jnp.float32), metrics)
    c, seen = config, metrics.attention
    if seen is None:
        c, seen = without_attention(config), AttentionMetrics(*[0.0] * 6)
    T0, p0, k0 = c.base_temperature, c.base_top_p, c.base_top_k
    uncertain = metrics.entropy / c.entropy_scale + metrics.varentropy / c.varentropy_scale

    clarify_T = T0 * (c.clarify_temperature_factor + c.clarify_temperature_attn_entropy * seen.attn_entropy)
    explore_T = T0 * (c.explore_temperature_factor + c.explore_temperature_interaction * seen.interaction_strength)
    resample_T = T0 * (c.resample_temperature_factor + c.resample_temperature_attn_varentropy * seen.attn_varentropy)
    resample_least = jnp.maximum(c.resample_temperature_min, c.resample_temperature_min_factor * T0)
    adaptive_T = T0 * (
        1
        + c.adaptive_temperature_uncertainty * uncertain
        + c.adaptive_temperature_attn_uncertainty * (seen.attn_entropy + seen.attn_varentropy)
        - c.adaptive_temperature_agreement * seen.attn_agreement
    )
    resample_p = jnp.maximum(c.resample_top_p_min, p0 - c.resample_top_p_attn_entropy * seen.attn_entropy)
    adaptive_p = p0 * (1 + c.adaptive_top_p_attn_varentropy * seen.attn_varentropy)
    explore_k = jnp.floor(k0 * (1 + c.explore_top_k_disagreement * (1 - seen.attn_agreement)))
    adaptive_k = jnp.round(
        k0 * (1 + c.adaptive_top_k_interaction * seen.interaction_strength - c.adaptive_top_k_agreement * seen.attn_agreement)
    )
    adaptive_m = c.base_min_p * (1 - c.adaptive_min_p_uncertainty * uncertain)

    numbers = [  # of each strategy: temperature, top_p, top_k, min_p
        (0, p0, k0, 0),
        (jnp.minimum(c.clarify_temperature_max, clarify_T), p0, k0, 0),
        (jnp.minimum(c.explore_temperature_max, explore_T), p0, jnp.maximum(c.explore_top_k_min, explore_k), 0),
        (jnp.maximum(resample_least, resample_T), resample_p, k0, 0),
        (
            adaptive_T,
            jnp.clip(adaptive_p, c.adaptive_top_p_min, c.adaptive_top_p_max),
            jnp.clip(adaptive_k, c.adaptive_top_k_min, c.adaptive_top_k_max),
            jnp.clip(adaptive_m, c.adaptive_min_p_min, c.adaptive_min_p_max),
        ),
    ]
    strategy = select_strategy(metrics, config)
    T, p, k, m = (
        lax.select_n(strategy, *[jnp.asarray(number, jnp.float32) for number in choices])
        for choices in zip(*numbers, strict=True)
    )
    T = jnp.where(strategy == GREEDY, 0, jnp.clip(T, c.temperature_min, jnp.minimum(c.temperature_max, LARGEST)))
    return Route(strategy, T, p, jnp.minimum(k, EVERY).astype(jnp.int32), m)


def select_strategy(metrics: Metrics, config: RouterConfig) -> Array:
    """The id (int32) of the first strategy whose conditions hold."""
    strategy = jnp.int32(ADAPTIVE)
    for number, conditions in reversed(list(enumerate(RULES.values()))):
        holds: Any = True
        for metric, relation, threshold in conditions:
            value, bound = getattr(metrics, metric), getattr(config, threshold)
            holds &= value < bound if relation == "<" else value > bound
        strategy = jnp.where(holds, jnp.int32(number), strategy)
    return strategy


def should_clarify(strategy: Array, edited_V: Array, distance: Array, config: RouterConfig) -> Array:
    """Whether `clarify_token` is emitted instead of a drawn token: it is configured, allowed, and was not used lately.

    Args:
      edited_V: logits after bans and penalties; -inf forbids the token.
      distance: tokens written since the last `clarify_token` of the text, 0 when it is the last; -1 when there is none.
    """
    token = jnp.asarray(config.clarify_token, jnp.int32)
    allowed = edited_V[jnp.maximum(token, 0)] > -jnp.inf
    rested = (distance < 0) | (distance >= config.clarify_cooldown)
    return (strategy == CLARIFY) & (token >= 0) & allowed & rested
