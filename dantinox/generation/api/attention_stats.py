"""`attention_stats`: statistics of the attention of every head, for every token of a generated
text.

The text is read a second time after it was generated, so generation itself computes nothing for
them. Each token is read with the operations of a decode step, so the numbers are those of the steps
that generated the text.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import Config, UserError
from dantinox.generation.decode.cache_plan import CachePlan, plan_cache
from dantinox.generation.decode.features import Constants, Features, attach
from dantinox.generation.decode.generate_toks import prefill_prompts
from dantinox.generation.decode.prepared_model import dequantize
from dantinox.generation.decode.split_model import SplitModel, split_model
from dantinox.generation.model_bundle import ModelBundle
from dantinox.generation.static_batch import padded_length
from dantinox.model import KVCache
from dantinox.sampling.entropy_router import HeadAttention, head_attention

CHUNK = 32  # tokens that one call reads


class AttentionStats(NamedTuple):
    """Statistics of the attention of the steps that generated a text, float32
    `[tokens, layers, heads]` each.

    The query of a step is the token before the generated one. It attends to the keys that it can
    see, with weights a.

    Attributes:
      entropy: −Σ a log2 a, in bits.
      varentropy: Σ a (log2 a + entropy)², in bits².
      agreement: 1 − ½ Σ |a − mean of a over the heads of the layer|, in (0, 1].
      strength: the mean of |score| over the keys, before the softmax.
    """

    entropy: np.ndarray
    varentropy: np.ndarray
    agreement: np.ndarray
    strength: np.ndarray


def attention_stats(
    model: ModelBundle, ids: Sequence[int], generated: int, config: Config, lora: str | None = None
) -> AttentionStats:
    """Returns the statistics of a text.

    Args:
      ids: the tokens of the prompt and of the generated text.
      generated: the number of generated tokens among them.
      config: the settings with which the text was generated.
      lora: the name of the adapter with which it was generated.

    Raises:
      UserError: the settings compress the cache or divide the model among devices.
    """
    check_settings(config)
    transformer = model.prepared(config.generation)
    features, constants = model.adapter_features([lora])
    plan = plan_cache(transformer.config, config.kv, padded_length(len(ids)))
    split = split_model(transformer)
    # The prefill reads the tokens before the query of the first step, and `_read_tokens` reads the
    # others.
    first = len(ids) - generated - 1
    prompt_1T = np.zeros((1, padded_length(max(first, 1))), np.int32)
    prompt_1T[0, :first] = ids[:first]
    cache = _prefill(
        split, (prompt_1T, np.asarray([first], np.int32)), features, constants, plan=plan
    )
    parts = []
    for begin in range(first, len(ids) - 1, CHUNK):
        count = min(CHUNK, len(ids) - 1 - begin)
        tokens_1W = np.zeros((1, CHUNK), np.int32)
        positions_1W = np.full((1, CHUNK), -1, np.int32)
        tokens_1W[0, :count] = ids[begin : begin + count]
        positions_1W[0, :count] = np.arange(begin, begin + count)
        cache, stats_WLH = _read_tokens(split, cache, tokens_1W, positions_1W, features, constants)
        parts.append(jax.tree.map(lambda x, count=count: np.asarray(x)[:count], stats_WLH))
    if not parts:  # nothing was generated
        empty_TLH = np.zeros(
            (0, transformer.config.num_blocks, transformer.config.n_heads), np.float32
        )
        return AttentionStats(*[empty_TLH] * len(AttentionStats._fields))
    return AttentionStats(*jax.tree.map(lambda *chunks: np.concatenate(chunks), *parts))


def check_settings(config: Config, name: str = "attention_stats") -> None:
    """Raises UserError for settings with which the attention of a head cannot be read; `name` is
    the option that reads it.
    """
    if config.kv.compresses:
        raise UserError(f"{name} reads all keys: leave kv.budget and kv.budget_tokens out")
    if config.generation.tensor_parallel > 1:
        raise UserError(
            f"{name} needs generation.tensor_parallel: 1, got {config.generation.tensor_parallel}"
        )


@partial(jax.jit, static_argnames=("plan",))
def _prefill(
    model: SplitModel,
    prompt: tuple[jax.Array, jax.Array],
    features: Features,
    constants: Constants,
    *,
    plan: CachePlan,
) -> KVCache:
    _, cache = prefill_prompts(
        dequantize(model.merge(model.leaves)), prompt, plan, features, constants
    )
    assert cache is not None
    return cache


@partial(jax.jit, donate_argnames=("cache",))
def _read_tokens(
    model: SplitModel,
    cache: KVCache,
    tokens_1W: jax.Array,
    positions_1W: jax.Array,
    features: Features,
    constants: Constants,
) -> tuple[KVCache, HeadAttention]:
    """Reads the tokens, and returns the statistics of all heads `[W, L, H]`; a position of −1 marks
    padding.
    """
    transformer = attach(features, dequantize(model.merge(model.leaves)), constants)
    probe = jax.vmap(head_attention)
    _, updated, aux = transformer.hidden(
        tokens_1W, positions_1W, cache=cache.for_verification(), probe=probe
    )
    assert updated is not None
    stats_WLH: HeadAttention = jax.tree.map(
        lambda *layers: jnp.stack([x_W1H[:, 0] for x_W1H in layers], axis=1), *aux["probe"]
    )
    return updated.without_wrappers(), stats_WLH
