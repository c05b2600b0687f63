"""`dantinox info --compare_weights`: the effect of bfloat16, int8 and int4 weights on a text."""

import math
from collections.abc import Iterator
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

COMPARED_TOKENS = (
    8192  # of validation text; the comparison is paired, so more tokens would hardly change it
)
BATCH_ROWS = 8


def comparison_lines(run_dir: str | Path, data_path: str | Path | None = None) -> Iterator[str]:
    """Yields a line for each weight dtype: the size of the weights, and their error relative to
    float32.

    Args:
      data_path: the text, in the form of `data.path`. None: the validation tokens that training
        saved in the run.

    Raises:
      UserError: there is no text, or the run is missing or damaged.
    """
    store = open_text_store(open_run(run_dir), data_path, COMPARED_TOKENS + 1)
    run = load(run_dir)
    reference = FloatReference(run, store)
    for name in WEIGHT_DTYPES[1:]:
        if name == "int4" and run.model.config.projections == "ternary":
            continue  # `prepare` does not allow it
        if name == "float32":
            yield f"weights {name:<9} {human_bytes(weight_bytes(reference.model)):>8}"
            continue
        model = prepare(run.model, name, run.config.generation.matmul_dtype)
        found = reference.compare(model)
        rise = 100 * math.expm1(found.other_nats - found.nats)
        yield (
            f"weights {name:<9} {human_bytes(weight_bytes(model)):>8}  logit error"
            f" {math.sqrt(found.squared_gap):.2g}, perplexity {math.exp(found.nats):.4g} →"
            f" {math.exp(found.other_nats):.4g} ({rise:+.3f} %) on {found.targets:.0f} tokens"
        )


def _rows(batch: Batch | Preferences | LabeledCompletions) -> Batch:
    """Returns all rows of a batch of any store."""
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
        self.batches = jax.tree.map(
            lambda *x: jnp.asarray(np.stack(x)),
            *map(_rows, store.validation(BATCH_ROWS, COMPARED_TOKENS)),
        )
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


@nnx.jit(graph_updates=False)
def _hidden(model: Transformer, batches: Any) -> jax.Array:
    """Returns the final hidden states `[N, B, T, D]` of N validation batches."""

    def read(batch: Any) -> jax.Array:
        positions_BT = packed_positions(model.config, batch.segments_BT, model.parallelism)
        return model.hidden(batch.tokens_BT, positions_BT, segments_BT=batch.segments_BT)[0]

    return jax.lax.map(read, batches)


@nnx.jit(graph_updates=False)
def _compare_logits(
    model: Transformer, other: Transformer, a_NBTD: jax.Array, b_NBTD: jax.Array, batches: Any
) -> jax.Array:
    """Returns sums over the targets of each row, `[N, B, 4]`: −ln p of both models, mean squared
    logit difference, count.
    """

    def compare_row(row: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        a_TD, b_TD, targets_T, mask_T = row  # one row at a time bounds the memory of the logits
        a_TV = model.logits(a_TD)
        b_TV = other.logits(b_TD)
        nats = [
            -jnp.take_along_axis(jax.nn.log_softmax(x_TV), targets_T[:, None], 1)[:, 0]
            for x_TV in (a_TV, b_TV)
        ]
        gap_TV = (b_TV - b_TV.mean(-1, keepdims=True)) - (a_TV - a_TV.mean(-1, keepdims=True))
        gap_T = jnp.mean(jnp.square(gap_TV), -1)
        return jnp.stack([jnp.sum(mask_T * x_T) for x_T in (*nats, gap_T, jnp.ones_like(gap_T))])

    return jax.lax.map(
        lambda rows: jax.lax.map(compare_row, rows),
        (a_NBTD, b_NBTD, batches.targets_BT, batches.mask_BT),
    )
