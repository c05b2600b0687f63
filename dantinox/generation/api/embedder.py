"""`Embedder`: embeddings of texts, the pooled hidden states of the model, computed chunk by chunk
with a cache of its own.

Pooling of token ids x₁…x_T with hidden states h₁…h_T after the final norm (`Transformer.hidden`):

* `mean`: (h₁ + … + h_T) / T. The default, because a language model without further training spreads
  the meaning over its states (Muennighoff 2022, SGPT, compares both).
* `last`: h_T, which fine-tuned embedding models such as E5-Mistral and Qwen3-Embedding use.

The result is divided by its L2 norm.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import Config, KVSection, UserError
from dantinox.generation.decode.cache_plan import head_order, plan_cache
from dantinox.generation.decode.prepared_model import dequantize
from dantinox.generation.decode.split_model import SplitModel, split_model
from dantinox.generation.model_bundle import ModelBundle
from dantinox.model import KVCache, make_cache
from dantinox.platform import get_platform
from dantinox.sampling.params import next_power_of_two

POOLINGS = ("mean", "last")
EMBED_CHUNK = 64  # tokens of a chunk in a server, as in the prefill
MIN_EMBED_CHUNK = 16
BATCH_CHUNK = 512  # tokens of a row and chunk outside of a server
# The texts that `embed_texts` computes together on an accelerator; a CPU computes one at a time.
ACCELERATOR_ROWS = 16


class Embedder:
    """Computes the pooled hidden states of up to `rows` token sequences at a time.

    `start` sets the sequences, each call of `step` processes a chunk of each of them, and `result`
    returns their embeddings. The programs for different chunk lengths give the same numbers up to
    rounding. The cache has the compute dtype and keeps all tokens, whatever the settings of `kv`.

    Attributes:
      context: the most tokens of a sequence.
      done: whether all chunks have been dispatched.
    """

    def __init__(
        self,
        model: ModelBundle,
        config: Config,
        context: int,
        *,
        rows: int = 1,
        chunk: int = EMBED_CHUNK,
    ):
        """Prepares the weights. Without a call of `compile`, a program is compiled when it is first
        used.

        Args:
          config: the settings of the weights, as for generation.
          context: the most tokens of a sequence, at most the context of the model.
          rows: the number of sequences that are computed together.
          chunk: the most tokens of a row that `step` processes.

        Raises:
          UserError: the weights are sharded over several devices.
        """
        if config.generation.tensor_parallel > 1:
            raise UserError(
                "embeddings need generation.tensor_parallel: 1, got"
                f" {config.generation.tensor_parallel}"
            )
        architecture = model.model.config
        # With the order of heads that generation uses, both share the prepared weights.
        order = head_order(architecture, *model.kv(config))
        self._model = split_model(model.prepared(config.generation, order))
        self.context = context
        self._rows = rows
        self._dim = architecture.dim
        plan = plan_cache(architecture, KVSection(), context)
        segmented = get_platform(architecture.platform).segmented_cache
        self._make_cache = partial(make_cache, architecture, rows, *plan, segmented)
        longest = next_power_of_two(min(chunk, context), MIN_EMBED_CHUNK)
        # The padded lengths of chunks, ascending; there is a program for each.
        self._lengths = [length for length in (MIN_EMBED_CHUNK, 64, 256) if length < longest] + [
            longest
        ]
        self._programs: dict[int, Any] = {}
        self._cache: KVCache | None = None
        self._ids: list[Sequence[int]] = []
        self._position = 0
        self.done = True

    def compile(self) -> None:
        """Compiles the programs; any thread may call it before the first `start`."""
        cache = jax.eval_shape(self._make_cache)
        state_RD = jax.ShapeDtypeStruct((self._rows, self._dim), jnp.float32)
        zero = jnp.int32(0)
        first = jnp.asarray(True)
        for length in self._lengths:
            tokens_RT = jax.ShapeDtypeStruct((self._rows, length), jnp.int32)
            weights_RT = jax.ShapeDtypeStruct((self._rows, length), jnp.float32)
            counts_R = jax.ShapeDtypeStruct((self._rows,), jnp.int32)
            inputs = self._model, cache, state_RD, tokens_RT, weights_RT, counts_R, zero, first
            self._programs[length] = _embed_chunk.lower(*inputs).compile()

    def start(self, ids: Sequence[Sequence[int]], pooling: str) -> None:
        """Starts sequences of 1 to `context` tokens, at most `rows` of them; the previous ones are
        dropped.
        """
        assert 1 <= len(ids) <= self._rows and all(1 <= len(row) <= self.context for row in ids)
        if self._cache is None:
            self._cache = jax.jit(self._make_cache)()
        self._ids = list(ids)
        self._pooling = pooling
        self._position = 0
        self.done = False
        self._pooled_RD = jnp.zeros((self._rows, self._dim), jnp.float32)

    def step(self) -> int:
        """Dispatches the next chunk after waiting for the previous one; returns its number of
        tokens.
        """
        # At most one chunk at a time keeps the device from other work.
        jax.block_until_ready(self._pooled_RD)
        remaining = [max(0, len(row) - self._position) for row in self._ids]
        length = next(
            (length for length in self._lengths if length >= max(remaining)), self._lengths[-1]
        )
        tokens_RT = np.zeros((self._rows, length), np.int32)
        weights_RT = np.zeros((self._rows, length), np.float32)
        counts_R = np.zeros(self._rows, np.int32)
        for number, row in enumerate(self._ids):
            part = row[self._position : self._position + length]
            tokens_RT[number, : len(part)] = part
            counts_R[number] = len(part)
            if self._pooling == "mean":
                weights_RT[number, : len(part)] = 1 / len(row)
            elif part and self._position + len(part) == len(row):  # the chunk with the last token
                weights_RT[number, len(part) - 1] = 1
        position = np.asarray(self._position, np.int32)
        first = np.asarray(self._position == 0)
        inputs = (
            self._model,
            self._cache,
            self._pooled_RD,
            tokens_RT,
            weights_RT,
            counts_R,
            position,
            first,
        )
        self._cache, self._pooled_RD = self._programs.get(length, _embed_chunk)(*inputs)
        self._position += length
        self.done = self._position >= max(map(len, self._ids))
        return int(counts_R.sum())

    def reset(self) -> None:
        """Drops the sequences and the cache, for use after a failed step, which may have consumed
        the donated cache.
        """
        self._cache = None
        self.done = True

    def result(self) -> np.ndarray:
        """Returns the embeddings, float32 `[number of sequences, D]` with L2 norm 1, after the last
        step.
        """
        assert self.done
        pooled_ND = np.asarray(self._pooled_RD, np.float64)[: len(self._ids)]
        norm_N1 = np.linalg.norm(pooled_ND, axis=1, keepdims=True)
        unit_ND: np.ndarray = pooled_ND / np.maximum(norm_N1, np.finfo(np.float32).tiny)
        return unit_ND.astype(np.float32)


@partial(jax.jit, donate_argnames=("cache", "pooled_RD"))
def _embed_chunk(
    model: SplitModel,
    cache: KVCache,
    pooled_RD: jax.Array,
    tokens_RT: jax.Array,
    weights_RT: jax.Array,
    counts_R: jax.Array,
    position: jax.Array,
    first: jax.Array,
) -> tuple[KVCache, jax.Array]:
    """Returns the cache and the weighted sum of hidden states after one more chunk of each row.

    Args:
      weights_RT: the weight of each hidden state in the sum.
      counts_R: the number of tokens of each row in this chunk; padding follows them.
      position: the position of the first token of the chunk.
      first: whether this is the first chunk, so that the sum starts at 0.
    """
    transformer = dequantize(model.merge(model.leaves))
    index_T = jnp.arange(tokens_RT.shape[1])
    positions_RT = jnp.where(index_T < counts_R[:, None], position + index_T, -1)
    x_RTD, updated, _ = transformer.hidden(tokens_RT, positions_RT, cache=cache)
    assert updated is not None
    w_RT1 = weights_RT[:, :, None]
    # The hidden state of padding may be NaN, so it is not multiplied by 0.
    sum_RD = jnp.sum(jnp.where(w_RT1 > 0, w_RT1 * x_RTD.astype(jnp.float32), 0), axis=1)
    return updated, jnp.where(first, 0, pooled_RD) + sum_RD


def embedding_ids(model: ModelBundle, text: str) -> list[int]:
    """Returns the token ids of a text to embed.

    The text has the BOS token before it if the model expects one, and after it the tokens that the
    post-processor of the tokenizer.json adds there, such as the EOS token of an embedding model.

    Raises:
      UserError: the text is empty and the tokenizer has no BOS token, or the tokenizer cannot
        encode the text.
    """
    return [*model.prompt_ids(text), *model.tokenizer.ids_after_text]


def embed_texts(
    model: ModelBundle, ids: Sequence[Sequence[int]], pooling: str, config: Config
) -> np.ndarray:
    """Returns the embeddings of token sequences, float32 `[N, D]`; texts of similar length are
    computed together.
    """
    check_pooling(pooling)
    D = model.model.config.dim
    context = model.model.config.max_context
    for row in ids:
        check_length(row, context)
        model.check_ids(row)
    if not ids:
        return np.zeros((0, D), np.float32)
    padded = min(context, next_power_of_two(max(map(len, ids)), MIN_EMBED_CHUNK))
    rows = 1 if jax.devices()[0].platform == "cpu" else ACCELERATOR_ROWS
    embedder = Embedder(model, config, padded, rows=rows, chunk=BATCH_CHUNK)
    order = sorted(range(len(ids)), key=lambda number: len(ids[number]))
    found_ND = np.zeros((len(ids), D), np.float32)
    for start in range(0, len(order), rows):
        numbers = order[start : start + rows]
        embedder.start([ids[number] for number in numbers], pooling)
        while not embedder.done:
            embedder.step()
        found_ND[numbers] = embedder.result()
    return found_ND


def check_pooling(pooling: str) -> None:
    """Raises UserError for an unknown pooling."""
    if pooling not in POOLINGS:
        raise UserError(f"pooling must be {' or '.join(POOLINGS)}, got {pooling!r}")


def check_length(ids: Sequence[int], context: int) -> None:
    """Raises UserError for a sequence that is empty or longer than the context."""
    if not 1 <= len(ids) <= context:
        raise UserError(
            f"a text to embed must have 1 to {context} tokens, got {len(ids)}: shorten it"
        )
