"""The entropy router (entropix): metrics of a decoding step, the choice of a strategy, and its
sampling parameters.

All functions are pure functions of one row in float32; use `jax.vmap` for a batch. Entropies are in
bits, varentropies in bits². Strategies and formulas are those of the entropix guide. In the guide's
code, some metrics depend not only on the model, but on the cache size or on the batch. These
metrics are redefined here; `guide_metrics` computes the original ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, make_dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dantinox.config import UserError
from dantinox.config.router_settings import (
    ATTENTION_TERMS,
    KEEP_ALL,
    RULES,
    STRATEGIES,
    RouterSection,
    with_request_bases,
)
from dantinox.sampling.selection import row_sum
from dantinox.sampling.steps import LARGEST, Number, finite_max

LN2 = float(np.log(2))
TINY = float(np.finfo(np.float32).tiny)
_GUIDE = {**RouterSection().numbers(), "clarify_token": -1}


class AttentionMetrics(NamedTuple):
    """Metrics of the attention of the newest query over its valid keys, averaged over all layers.

    Attributes:
      attn_entropy: mean entropy of the heads' attention, ≥ 0, in bits.
      attn_entropy_norm: mean of the entropies divided by log2(number of valid keys), in [0, 1]; 0
        with a single key.
      attn_varentropy: variance of the entropy over the heads of a layer, in bits².
      attn_disagreement: ½ Σ|a − mean of a over heads|, averaged over heads, in [0, 1).
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
    """The contribution of one layer to `AttentionMetrics`: entropies of its heads [H], and two
    means over the heads [].
    """

    entropy_H: Array
    entropy_norm_H: Array
    disagreement: Array
    interaction: Array


class HeadAttention(NamedTuple):
    """The attention of each head of a layer, [H]: entropy (bits), varentropy (bits²), agreement
    with the mean, mean |score|.
    """

    entropy_H: Array
    varentropy_H: Array
    agreement_H: Array
    strength_H: Array


class Metrics(NamedTuple):
    """The inputs of the router: entropy (bits) and varentropy (bits²) of the model's distribution,
    and attention or None.
    """

    entropy: Number
    varentropy: Number
    attention: AttentionMetrics | None = None


def logit_metrics(logits_V: Array) -> tuple[Array, Array]:
    """Returns the entropy H = −Σp log2 p in bits and the varentropy Σp(log2 p + H)² in bits² of a
    row, with 0·log 0 = 0.

    Both are 0 if all logits are -inf.
    """
    d_V = logits_V.astype(jnp.float32)
    d_V -= finite_max(d_V)
    lnZ = jnp.log(jnp.maximum(row_sum(jnp.exp(d_V)), TINY))
    p_V = jnp.exp(d_V - lnZ)
    surprise_V = jnp.where(p_V > 0, lnZ - d_V, 0)
    entropy = row_sum(p_V * surprise_V)
    return entropy / LN2, row_sum(p_V * (surprise_V - entropy) ** 2) / LN2**2


def layer_attention(scores_HS: Array, valid_S: Array) -> LayerAttention:
    """Reduces the attention of one layer to a few numbers, so that no array of the length of the
    cache is kept.

    Args:
      scores_HS: scaled scores of the newest query, the input of the softmax. Values of invalid keys
        are ignored.
      valid_S: the mask of keys that the query may attend to: written to the cache, not padding, and
        inside the window. [S], or [H, S] if heads differ.
    """
    scores_HS, a_HS, surprise_HS, keys_H = _attention_weights(scores_HS, valid_S)
    entropy_H = jax.vmap(row_sum)(a_HS * surprise_HS) / LN2
    return LayerAttention(
        entropy_H,
        # With one key, this is 0, because the entropy is 0.
        entropy_H / jnp.log2(jnp.maximum(keys_H, 2).astype(jnp.float32)),
        jnp.mean(jax.vmap(row_sum)(jnp.abs(a_HS - jnp.mean(a_HS, axis=0)))) / 2,
        jnp.mean(jax.vmap(row_sum)(jnp.abs(scores_HS)) / jnp.maximum(keys_H, 1)),
    )


def head_attention(scores_HS: Array, valid_S: Array) -> HeadAttention:
    """Returns the statistics of each head of one layer; the arguments are those of
    `layer_attention`.
    """
    scores_HS, a_HS, surprise_HS, keys_H = _attention_weights(scores_HS, valid_S)
    entropy_H = jax.vmap(row_sum)(a_HS * surprise_HS)
    return HeadAttention(
        entropy_H / LN2,
        jax.vmap(row_sum)(a_HS * (surprise_HS - entropy_H[:, None]) ** 2) / LN2**2,
        1 - jax.vmap(row_sum)(jnp.abs(a_HS - jnp.mean(a_HS, axis=0))) / 2,
        jax.vmap(row_sum)(jnp.abs(scores_HS)) / jnp.maximum(keys_H, 1),
    )


def _attention_weights(scores_HS: Array, valid_S: Array) -> tuple[Array, Array, Array, Array]:
    """Returns the scores in float32 (0 for invalid keys), weights a, −ln a (0 where a is 0), and
    the number of keys [H].
    """
    valid_HS = jnp.broadcast_to(valid_S, scores_HS.shape)
    keys_H = jnp.sum(valid_HS, axis=1)
    scores_HS = jnp.where(valid_HS, scores_HS.astype(jnp.float32), 0)
    masked_HS = jnp.where(valid_HS, scores_HS, -jnp.inf)
    d_HS = masked_HS - jax.vmap(finite_max)(masked_HS)[:, None]
    lnZ_H1 = jnp.log(jnp.maximum(jax.vmap(row_sum)(jnp.exp(d_HS)), TINY))[:, None]
    a_HS = jnp.exp(d_HS - lnZ_H1)
    return scores_HS, a_HS, jnp.where(a_HS > 0, lnZ_H1 - d_HS, 0), keys_H


def combine_layers(layers: LayerAttention | Sequence[LayerAttention]) -> AttentionMetrics:
    """Averages the metrics over layers: a sequence of layers, or one `LayerAttention` with a
    leading layer axis.
    """
    parts = (
        layers
        if isinstance(layers, LayerAttention)
        else (jnp.stack(part) for part in zip(*layers, strict=True))
    )
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
    """Computes the metrics exactly as the guide's code does, for comparison.

    The metrics cover one layer and all T cache positions, and are averaged over the batch.
    `attn_varentropy` is the variance over heads. `attn_varentropy_guide_axis` is the variance over
    queries, as in the guide, which is 0 in decoding. Despite its name, `agreement` is a
    disagreement divided by T. One difference from the guide: 0·log 0 is 0 where a logit is -inf.

    Args:
      logits: [B, V].
      attention_scores: [B, H, Q, T] of the last layer, before the softmax.

    Returns:
      The six keys of the guide and `attn_varentropy_guide_axis`. All are scalars, except
      `interaction_strength` [B].
    """
    entropy_B, varentropy_B = jax.vmap(logit_metrics)(logits)
    scores = attention_scores.astype(jnp.float32)
    sums = jax.vmap(jax.vmap(jax.vmap(row_sum)))
    weights_BHQT = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    a_BHQT = weights_BHQT / sums(weights_BHQT)[..., None]
    entropy_BHQ = -sums(a_BHQT * jnp.log2(jnp.clip(a_BHQT, 1e-10, 1.0)))
    disagreement_BT = jnp.mean(
        jnp.abs(a_BHQT - jnp.mean(a_BHQT, axis=1, keepdims=True)), axis=(1, 2)
    )
    return {
        "logits_entropy": jnp.mean(entropy_B),
        "logits_varentropy": jnp.mean(varentropy_B),
        "attn_entropy": jnp.mean(entropy_BHQ),
        "attn_varentropy": jnp.mean(jnp.var(entropy_BHQ, axis=1)),
        "attn_varentropy_guide_axis": jnp.mean(jnp.var(entropy_BHQ, axis=-1)),
        "agreement": jnp.mean(disagreement_BT),
        # Divide before adding: the -2.4e38 of a finite mask would overflow the sum.
        "interaction_strength": jnp.sum(jnp.abs(scores) / scores[0].size, axis=(1, 2, 3)),
    }


INTEGERS = ("clarify_token", "clarify_cooldown")


class _RouterNumbers:
    """The numeric settings of `RouterSection`, which documents them, as pytree leaves. The defaults
    are those of the guide.

    Python numbers become float32, or int32 for `clarify_token` (-1: none) and `clarify_cooldown`,
    so changing a value compiles nothing.
    """

    def __post_init__(self) -> None:
        for name in _GUIDE:
            value = getattr(self, name)
            if isinstance(value, int | float | np.generic):  # else an array or a tracer
                # The nearest float32 that is finite.
                finite = value if np.isinf(value) else np.clip(value, -LARGEST, LARGEST)
                object.__setattr__(
                    self, name, np.int32(value) if name in INTEGERS else np.float32(finite)
                )

    @classmethod
    def build(
        cls,
        section: RouterSection | None = None,
        measured: Mapping[str, float] | None = None,
        **request: Any,
    ) -> "RouterConfig":
        """Builds the numbers of a section.

        Args:
          section: the settings; None: the guide preset. The caller must replace a `clarify_token`
            that is text by its id.
          measured: thresholds and scales of a calibration, which the preset `calibrated` needs.
          request: temperature, top_p, top_k and min_p of a request; see `with_request_bases`.

        Raises:
          UserError: the preset is `calibrated` and a number is neither measured nor set, or
            `clarify_token` is text.
        """
        section = RouterSection() if section is None else section
        token = -1 if section.clarify_token is None else section.clarify_token
        if isinstance(token, str) and not token.isdecimal():
            raise UserError(
                f"router.clarify_token must be a token id if there is no tokenizer, got {token!r}",
                key="router.clarify_token",
            )
        config = RouterConfig(
            **with_request_bases(section.numbers(measured), **request), clarify_token=int(token)
        )
        return config if section.use_attention else without_attention(config)


# The fields come from the table of settings, so only `make_dataclass` knows them; the type checker
# sees any names.
if TYPE_CHECKING:

    @dataclass(frozen=True)
    class RouterConfig(_RouterNumbers):
        def __init__(self, **numbers: Any): ...
        def __getattr__(self, name: str) -> Any: ...

else:
    RouterConfig = make_dataclass(
        "RouterConfig",
        [(name, Number, value) for name, value in _GUIDE.items()],
        bases=(_RouterNumbers,),
        frozen=True,
    )
    RouterConfig.__doc__ = _RouterNumbers.__doc__
    jax.tree_util.register_dataclass(RouterConfig, data_fields=tuple(_GUIDE), meta_fields=())


def without_attention(config: RouterConfig) -> RouterConfig:
    """Returns the numbers with all coefficients of attention terms set to 0, for rows that do not
    use attention metrics.
    """
    return replace(config, **dict.fromkeys(ATTENTION_TERMS, 0.0))


GREEDY, CLARIFY, EXPLORE, RESAMPLE, ADAPTIVE = range(len(STRATEGIES))


class Route(NamedTuple):
    """The choice for one row: id of the strategy, temperature (0: argmax), top_p, top_k (int32) and
    min_p (0: off).
    """

    strategy: Array
    temperature: Array
    top_p: Array
    top_k: Array
    min_p: Array


def route(metrics: Metrics, config: RouterConfig) -> Route:
    """Chooses the strategy of a row and computes its sampling parameters, by the formulas of the
    entropix guide.

    The formulas of all strategies are computed, and one result is selected without a branch. The
    conditions of the strategies compare entropy and varentropy directly; the formulas first divide
    them by `entropy_scale` and `varentropy_scale`. Without attention metrics, the attention terms
    are omitted.
    """
    metrics = jax.tree.map(lambda number: jnp.asarray(number, jnp.float32), metrics)
    c = config
    attn = metrics.attention
    if attn is None:
        c = without_attention(config)
        attn = AttentionMetrics(*[0.0] * len(AttentionMetrics._fields))
    T0, p0, k0 = c.base_temperature, c.base_top_p, c.base_top_k
    uncertain = metrics.entropy / c.entropy_scale + metrics.varentropy / c.varentropy_scale

    clarify_T = T0 * (
        c.clarify_temperature_factor + c.clarify_temperature_attn_entropy * attn.attn_entropy
    )
    explore_T = T0 * (
        c.explore_temperature_factor + c.explore_temperature_interaction * attn.interaction_strength
    )
    resample_T = T0 * (
        c.resample_temperature_factor
        + c.resample_temperature_attn_varentropy * attn.attn_varentropy
    )
    resample_min = jnp.maximum(c.resample_temperature_min, c.resample_temperature_min_factor * T0)
    adaptive_T = T0 * (
        1
        + c.adaptive_temperature_uncertainty * uncertain
        + c.adaptive_temperature_attn_uncertainty * (attn.attn_entropy + attn.attn_varentropy)
        - c.adaptive_temperature_agreement * attn.attn_agreement
    )
    resample_p = jnp.maximum(
        c.resample_top_p_min, p0 - c.resample_top_p_attn_entropy * attn.attn_entropy
    )
    adaptive_p = p0 * (1 + c.adaptive_top_p_attn_varentropy * attn.attn_varentropy)
    explore_k = jnp.floor(k0 * (1 + c.explore_top_k_disagreement * (1 - attn.attn_agreement)))
    adaptive_k = jnp.round(
        k0
        * (
            1
            + c.adaptive_top_k_interaction * attn.interaction_strength
            - c.adaptive_top_k_agreement * attn.attn_agreement
        )
    )
    adaptive_m = c.base_min_p * (1 - c.adaptive_min_p_uncertainty * uncertain)

    # One row per strategy: temperature, top_p, top_k, min_p.
    numbers = [
        (0, p0, k0, 0),
        (jnp.minimum(c.clarify_temperature_max, clarify_T), p0, k0, 0),
        (
            jnp.minimum(c.explore_temperature_max, explore_T),
            p0,
            jnp.maximum(c.explore_top_k_min, explore_k),
            0,
        ),
        (jnp.maximum(resample_min, resample_T), resample_p, k0, 0),
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
    T = jnp.where(
        strategy == GREEDY,
        0,
        jnp.clip(T, c.temperature_min, jnp.minimum(c.temperature_max, LARGEST)),
    )
    return Route(strategy, T, p, jnp.minimum(k, KEEP_ALL).astype(jnp.int32), m)


def select_strategy(metrics: Metrics, config: RouterConfig) -> Array:
    """Returns the id (int32) of the first strategy in `RULES` whose conditions hold, else
    `ADAPTIVE`.
    """
    strategy = jnp.int32(ADAPTIVE)
    for number, conditions in reversed(list(enumerate(RULES.values()))):
        holds: Any = True
        for metric, relation, threshold in conditions:
            value = getattr(metrics, metric)
            bound = getattr(config, threshold)
            holds &= value < bound if relation == "<" else value > bound
        strategy = jnp.where(holds, jnp.int32(number), strategy)
    return strategy


def should_clarify(
    strategy: Array, edited_V: Array, distance: Array, config: RouterConfig
) -> Array:
    """Returns whether to emit `clarify_token` instead of drawing.

    This is the case if the strategy asks for it, the token is configured and allowed, and its
    cooldown is over.

    Args:
      strategy: the id of the chosen strategy.
      edited_V: logits after edits and penalties; -inf forbids the token.
      distance: number of tokens after the last `clarify_token` in the sequence; -1: it does not
        occur.
      config: the router numbers of the row.
    """
    token = jnp.asarray(config.clarify_token, jnp.int32)
    allowed = edited_V[jnp.maximum(token, 0)] > -jnp.inf
    cooled_down = (distance < 0) | (distance >= config.clarify_cooldown)
    return (strategy == CLARIFY) & (token >= 0) & allowed & cooled_down
