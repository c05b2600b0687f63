"""The attention weights of one head between all tokens of a prompt (`explain --attention`)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import Config, ModelConfig, UserError
from dantinox.generation.api.attention_stats import check_settings
from dantinox.generation.decode.cache_plan import CachePlan, plan_cache
from dantinox.generation.decode.prepared_model import dequantize
from dantinox.generation.decode.split_model import SplitModel, split_model
from dantinox.generation.model_bundle import ModelBundle
from dantinox.generation.static_batch import padded_length
from dantinox.lab.measure.texts import padded_positions
from dantinox.model import make_cache

MAX_TOKENS = 256  # bounds the scores of a layer, and the size of the map


@dataclass(frozen=True)
class HeadWeights:
    """The attention weights of a head.

    Attributes:
      layer, head: the layer and the query head, from 0.
      key_head: the key head that the query head reads: with G query heads per key head, head // G.
      tokens: the displayed form of each token, `[T]`.
      weights: `[T][T]`: row t has the weights of query t over the keys 0 to t; later keys have 0.
        A row sums to 1, or to 1 minus its weight of the sink.
      visible_from: the first key that each query can see, `[T]`; 0 without a sliding window.
      sink: the weight of the learned sink for each query, `[T]`; None if the model has no sinks.
    """

    layer: int
    head: int
    key_head: int
    tokens: list[str]
    weights: list[list[float]]
    visible_from: list[int]
    sink: list[float] | None


def check_head(model: ModelConfig, head: tuple[int, int], tokens: int, config: Config) -> None:
    """Raises UserError if `head_weights` cannot read this head for a text of so many tokens."""
    layer, index = head
    L, N = model.num_blocks, model.n_heads
    if not (0 <= layer < L and 0 <= index < N):
        raise UserError(
            f"attention needs LAYER:HEAD with a layer in [0, {L - 1}] and a head in [0, {N - 1}],"
            f" got {layer}:{index}"
        )
    if tokens > MAX_TOKENS:
        raise UserError(
            f"attention shows at most {MAX_TOKENS} tokens, got a prompt of {tokens}:"
            " shorten the prompt"
        )
    check_settings(config, "attention")


def head_weights(
    model: ModelBundle,
    ids: Sequence[int],
    tokens: Sequence[str],
    head: tuple[int, int],
    config: Config,
) -> HeadWeights:
    """Returns the attention weights of one head, as decoding computes them token by token.

    The scores are those of the model: with its cap, its sliding window, and keys in the dtype of
    the cache. The softmax over them, and over the logit of the sink, is computed in float64.

    Args:
      ids: the token ids of the text, at most `MAX_TOKENS`.
      tokens: their displayed form.
      head: the layer and the query head.
      config: the settings of the generation.

    Raises:
      UserError: there is no such head, the text is too long, or the settings compress the cache
        or divide the model among devices.
    """
    layer, index = head
    T = len(ids)
    check_head(model.model.config, head, T, config)
    transformer = model.prepared(config.generation)
    L = transformer.config.num_blocks
    slots = padded_length(T)
    # Without ring buffers, slot s holds position s in every layer. Attention still has its window.
    unwindowed = replace(transformer.config, windows=(None,) * L)
    tokens_1T = np.zeros((1, slots), np.int32)
    tokens_1T[0, :T] = ids
    plan = plan_cache(unwindowed, config.kv, slots)
    split = split_model(transformer)
    scores_TS, valid_TS = _read_scores(
        split, tokens_1T, jnp.int32(T), jnp.int32(index), plan=plan, config=unwindowed, layer=layer
    )
    sinks = transformer.blocks[layer].attention.sinks
    logit = -np.inf if sinks is None else float(np.asarray(sinks[...]).reshape(-1)[index])
    weights_TT, sink_T = _softmax(
        np.asarray(scores_TS)[:T, :T], np.asarray(valid_TS)[:T, :T], logit
    )
    latent = transformer.config.latent
    one = transformer.config.of_layer(layer)
    return HeadWeights(
        layer=layer,
        head=index,
        key_head=index if latent is not None else index // (one.n_heads // one.kv_heads),
        tokens=list(tokens),
        weights=weights_TT.tolist(),
        visible_from=np.argmax(np.asarray(valid_TS)[:T, :T], axis=1).tolist(),
        sink=None if sinks is None else sink_T.tolist(),
    )


@partial(jax.jit, static_argnames=("plan", "config", "layer"))
def _read_scores(
    model: SplitModel,
    tokens_1T: jax.Array,
    length: jax.Array,
    head: jax.Array,
    *,
    plan: CachePlan,
    config: ModelConfig,
    layer: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the scores `[T, S]` of a query head before the softmax, and the mask `[T, S]`.

    Args:
      config: the configuration of the cache.
    """
    cache = make_cache(config, 1, *plan).for_verification()  # its probe reports every token
    transformer = dequantize(model.merge(model.leaves))
    positions_1T = padded_positions(tokens_1T, length[None])
    _, _, aux = transformer.hidden(tokens_1T, positions_1T, cache=cache, probe=_keep)
    scores_T1NS, valid_T1S = aux["probe"][layer]  # the compiler removes those of the other layers
    return jnp.take(scores_T1NS[:, 0], head, axis=1), valid_T1S[:, 0]


def _keep(scores_BNS: jax.Array, valid_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A probe that returns its arguments."""
    return scores_BNS, valid_BS


def _softmax(
    scores_TS: np.ndarray, valid_TS: np.ndarray, sink: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the weights `[T, S]` of the valid keys and those of the sink `[T]`, in float64."""
    masked_TS = np.where(valid_TS, scores_TS.astype(np.float64), -np.inf)
    largest_T1 = np.maximum(masked_TS.max(axis=1, keepdims=True), sink)
    weights_TS = np.exp(masked_TS - largest_T1)
    sink_T1 = np.exp(sink - largest_T1)
    totals_T1 = weights_TS.sum(axis=1, keepdims=True) + sink_T1
    return weights_TS / totals_T1, (sink_T1 / totals_T1)[:, 0]
