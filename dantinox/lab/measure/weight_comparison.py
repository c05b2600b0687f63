"""`dantinox info --compare_weights`: the effect of bfloat16, int8 and int4 weights on a text."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.generation import LoadedModel, load, prepare
from dantinox.generation.decode.prepared_model import WEIGHT_DTYPES, dequantize, weight_bytes
from dantinox.lab.measure.texts import open_text_store
from dantinox.model import Transformer
from dantinox.model.positions import packed_positions
from dantinox.report import human_bytes
from dantinox.run import open_run
from dantinox.text import Batch, LabeledCompletions, Preferences, TokenStore

# Tokens of validation text. More would hardly change the result, because the comparison is paired.
COMPARED_TOKENS = 8192
BATCH_ROWS = 8


def comparison_lines(run_dir: str | Path, data_path: str | Path | None = None) -> Iterator[str]:
    """Yields a line for each weight dtype: the size of the weights and, except for float32, their
    error relative to float32.

    Args:
      data_path: the text, in the form of `data.path`. None: the validation tokens that training
        saved in the run.

    Raises:
      UserError: there is no text, or the run is missing or damaged.
    """
    tokens = COMPARED_TOKENS + 1  # the last token is only a target
    store = open_text_store(open_run(run_dir), data_path, tokens)
    run = load(run_dir)
    reference = FloatReference(run, store)
    for name in WEIGHT_DTYPES[1:]:  # without "auto"
        if name == "int4" and run.model.config.projections == "ternary":
            continue  # `prepare` does not allow it
        if name == "float32":
            yield f"weights {name:<9} {human_bytes(weight_bytes(reference.model)):>8}"
            continue
        model = prepare(run.model, name, run.config.generation.matmul_dtype)
        found = reference.compare(model)
        before = math.exp(found.nats)
        after = math.exp(found.other_nats)
        rise = 100 * math.expm1(found.other_nats - found.nats)
        yield (
            f"weights {name:<9} {human_bytes(weight_bytes(model)):>8}  logit error"
            f" {math.sqrt(found.squared_gap):.2g}, perplexity {before:.4g} → {after:.4g}"
            f" ({rise:+.3f} %) on {found.targets:.0f} tokens"
        )


def _rows(batch: Batch | Preferences | LabeledCompletions) -> Batch:
    """Returns the token rows of a batch, which preferences and completions hold in groups."""
    return batch if isinstance(batch, Batch) else batch.rows()


class Comparison(NamedTuple):
    """A model beside the reference.

    Attributes:
      nats, other_nats: mean −ln p per target of the reference and of the other model.
      squared_gap: mean squared difference of their logits; at each position, the logits of a model
        are centered first.
      targets: number of targets.
    """

    nats: float
    other_nats: float
    squared_gap: float
    targets: float


class FloatReference:
    """The trained model in float32 on validation text, the reference for other weight dtypes.

    The reference reads the text once. Before the comparison, other weights are converted to
    float32, so that all models run the same compiled program. The conversion does not change the
    values of the weights.
    """

    def __init__(self, run: LoadedModel, store: TokenStore):
        self.model = prepare(run.model, "float32", run.config.generation.matmul_dtype)
        batches = map(_rows, store.validation(BATCH_ROWS, COMPARED_TOKENS))
        # All batches, stacked: N is the first axis of each array.
        self.batches = jax.tree.map(lambda *arrays: jnp.asarray(np.stack(arrays)), *batches)
        self.x_NBTD = _hidden(self.model, self.batches)

    def compare(self, other: Transformer) -> Comparison:
        """Compares another model with the reference."""
        other = dequantize(other)
        sums_NB4 = _compare_logits(
            self.model, other, self.x_NBTD, _hidden(other, self.batches), self.batches
        )
        nats, other_nats, squared_gap, targets = np.sum(
            np.asarray(sums_NB4, np.float64), axis=(0, 1)
        ).tolist()
        return Comparison(nats / targets, other_nats / targets, squared_gap / targets, targets)


@nnx.jit(graph_updates=False)  # the function does not change the model
def _hidden(model: Transformer, batches: Any) -> jax.Array:
    """Returns the final hidden states `[N, B, T, D]` of N validation batches."""

    def read(batch: Any) -> jax.Array:
        positions_BT = packed_positions(model.config, batch.segments_BT, model.parallelism)
        hidden_BTD, *_ = model.hidden(batch.tokens_BT, positions_BT, segments_BT=batch.segments_BT)
        return hidden_BTD

    return jax.lax.map(read, batches)


@nnx.jit(graph_updates=False)
def _compare_logits(
    model: Transformer,
    other: Transformer,
    hidden_NBTD: jax.Array,
    other_hidden_NBTD: jax.Array,
    batches: Any,
) -> jax.Array:
    """Returns sums over the targets of each row, `[N, B, 4]`: −ln p of both models, mean squared
    logit difference, count.
    """

    def compare_row(row: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        hidden_TD, other_hidden_TD, targets_T, mask_T = row
        logits_TV = model.logits(hidden_TD)
        other_TV = other.logits(other_hidden_TD)
        nats_T, other_nats_T = (
            -jnp.take_along_axis(jax.nn.log_softmax(x_TV), targets_T[:, None], 1)[:, 0]
            for x_TV in (logits_TV, other_TV)
        )
        centered_TV = logits_TV - logits_TV.mean(-1, keepdims=True)
        gap_TV = (other_TV - other_TV.mean(-1, keepdims=True)) - centered_TV
        gap_T = jnp.mean(jnp.square(gap_TV), -1)
        ones_T = jnp.ones_like(gap_T)  # their sum counts the targets
        return jnp.stack([jnp.sum(mask_T * x_T) for x_T in (nats_T, other_nats_T, gap_T, ones_T)])

    # One row at a time, which bounds the memory of the logits.
    compare_batch = partial(jax.lax.map, compare_row)
    rows = (hidden_NBTD, other_hidden_NBTD, batches.targets_BT, batches.mask_BT)
    return jax.lax.map(compare_batch, rows)
