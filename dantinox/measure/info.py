"""`dantinox info`: model, training and memory of a run, and the effect of bfloat16, int8 and int4 weights."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import Config, ModelConfig
from dantinox.generation import LoadedModel, load, prepare
from dantinox.generation.quantized_weights import WEIGHT_DTYPES, dequantize, weight_bytes
from dantinox.measure.texts import open_text_store, saved_text
from dantinox.model import Transformer, make_cache
from dantinox.model.flops import adapter_parameters
from dantinox.model.packed import packed_kinds
from dantinox.model.positions import packed_positions
from dantinox.report import human_bytes, human_count, table
from dantinox.report.metric_files import evaluation_loss, iter_csv
from dantinox.run import RunDirectory, open_run
from dantinox.text import Batch, LabeledCompletions, Preferences, TokenStore

COMPARED_TOKENS = 8192  # of validation text; the comparison is paired, so more tokens would hardly change it
BATCH_ROWS = 8


def info_lines(run_dir: str | Path, data_path: str | Path | None = None) -> Iterator[str]:
    """Yields paragraphs on the model and its training, then a line for each weight dtype.

    Args:
      data_path: the text for the comparison of bfloat16 and quantized weights, in the form of `data.path`. None: the
        validation tokens that training saved in the run, if any.
    """
    directory = open_run(run_dir)
    text_store = None if data_path is None else open_text_store(directory, data_path, COMPARED_TOKENS + 1)
    run = load(run_dir)
    yield _model(run)
    yield _training(directory, run.config)
    store = saved_text(directory, run.config, run.tokenizer) if text_store is None else text_store
    if store is None:
        yield "this run has no saved training text: select a text with --data_path to compare the weight dtypes\n"
    reference = FloatReference(run, store) if store is not None else None
    if kinds := packed_kinds(run.model):
        parts = ", ".join(f"{kind} {human_bytes(count)}" for kind, count in kinds.items())
        yield f"weights packed    {human_bytes(weight_bytes(run.model)):>8}  {parts}"
    for name in WEIGHT_DTYPES[1:]:
        if reference is not None and name == "float32":
            model = reference.model
        else:
            model = prepare(run.model, name, run.config.generation.matmul_dtype)
        line = f"weights {name:<9} {human_bytes(weight_bytes(model)):>8}"
        if reference is not None and name != "float32":
            nats, model_nats, gap, targets = reference.compare(model)
            line += (
                f"  logit error {math.sqrt(gap):.2g}, perplexity {math.exp(nats):.4g} → {math.exp(model_nats):.4g} "
                f"({100 * math.expm1(model_nats - nats):+.3f} %) on {targets:.0f} tokens"
            )
        yield line


def _rows(batch: Batch | Preferences | LabeledCompletions) -> Batch:
    return batch if isinstance(batch, Batch) else batch.rows()


def _model(run: LoadedModel) -> str:
    m = run.model.config
    cache = make_cache(m, 1, m.max_context, run.model.dtype).report()
    windows = sorted({window for window in m.windows if window is not None})
    keys = f"{m.kv_heads} key/value heads" if m.latent is None else f"latents of size {m.latent.rank} + {m.latent.rotated_size}"
    if m.global_head_size or m.global_kv_heads:
        keys += f"; {m.global_kv_heads or m.kv_heads} of {m.global_head_size or m.head_size} in layers without a window"
    if m.kv_shared_layers:
        keys += f"; the last {m.kv_shared_layers} layers reuse those of earlier layers"
    trained, lora = [], run.config.trained_architecture(run.tokenizer.vocab_size).lora
    if lora is not None:  # the adapters are merged into the loaded model
        count = human_count(adapter_parameters(replace(m, lora=lora)))
        trained = [
            ("adapters", f"{count} trained parameters of rank {lora.rank} on the weights of {run.config.training.init_from}")
        ]
    return table([
        ("parameters", human_count(run.parameters)),
        *trained,
        ("shape", f"{m.num_blocks} layers, dim {m.dim}, {m.n_heads} heads of {m.head_size}, {keys}"),
        ("feed-forward", f"{m.activation}, {m.hidden_dim} wide{_experts(m)}"),
        ("positions", m.position + (f", sliding windows of {windows}" if windows else "")),
        ("context", f"{m.max_context} tokens, cache {human_bytes(cache['bytes'])} per row"),
        ("tokenizer", f"{run.config.tokenizer.tokenizer_type}, vocabulary of {run.tokenizer.vocab_size}"),
    ])  # fmt: skip


def _experts(m: ModelConfig) -> str:
    if m.experts is None:
        return ""
    shared = f" and a shared layer {m.experts.shared_dim} wide" if m.experts.shared_dim else ""
    dense = f"; {len(m.experts.dense_layers)} dense layers {m.experts.dense_dim} wide" if m.experts.dense_layers else ""
    return f"; {m.experts.count} experts, {m.experts.top_k} per token{shared}{dense}"


def _training(directory: RunDirectory, config: Config) -> str:
    best, last = dict[str, float](), dict[str, float]()
    for last in iter_csv(directory.log(config)):
        loss = evaluation_loss(last)
        if not best or (math.isfinite(loss) and not evaluation_loss(best) <= loss):  # also if the best so far is NaN
            best = last
    if not last:
        return "no training log\n"
    measured = f"val reward {best['val_reward']:.4f}" if "val_reward" in best else f"val loss {best['val_loss']:.4f}"
    bits = f"{best['bits_per_byte']:.3f} bits per byte, " if "bits_per_byte" in best else ""
    return table([
        ("trained", f"{last['step']:.0f} steps, {human_count(last['tokens'])} tokens"),
        ("best", f"{measured}, {bits}at step {best['step']:.0f}"),
    ])  # fmt: skip


class FloatReference:
    """The trained model in float32 on validation text, the reference for other weight dtypes.

    The reference reads the text once. Before the comparison, other weights are converted to float32, so that all models run the
    same compiled program. The conversion does not change the values of the weights.
    """

    def __init__(self, run: LoadedModel, store: TokenStore):
        self.model = prepare(run.model, "float32", run.config.generation.matmul_dtype)
        self.batches = jax.tree.map(
            lambda *x: jnp.asarray(np.stack(x)), *map(_rows, store.validation(BATCH_ROWS, COMPARED_TOKENS))
        )
        self.x_NBTD = _hidden(self.model, self.batches)

    def compare(self, other: Transformer) -> list[float]:
        """Compares another model with the reference.

        Returns:
          Mean −ln p per target of the reference and of `other`, the mean squared difference of their logits, and the number
          of targets. At each position, each model's logits are centered (their mean is subtracted) before the difference.
        """
        other = dequantize(other)
        sums_NB4 = _compare_logits(self.model, other, self.x_NBTD, _hidden(other, self.batches), self.batches)
        *found, targets = np.sum(np.asarray(sums_NB4, np.float64), axis=(0, 1))
        return [*(number / targets for number in found), targets]


@nnx.jit(graph_updates=False)
def _hidden(model: Transformer, batches: Any) -> jax.Array:
    """Returns the final hidden states `[N, B, T, D]` of N validation batches."""

    def read(batch: Any) -> jax.Array:
        positions_BT = packed_positions(model.config, batch.segments_BT, model.parallelism)
        return model.hidden(batch.tokens_BT, positions_BT, segments_BT=batch.segments_BT)[0]

    return jax.lax.map(read, batches)


@nnx.jit(graph_updates=False)
def _compare_logits(model: Transformer, other: Transformer, a_NBTD: jax.Array, b_NBTD: jax.Array, batches: Any) -> jax.Array:
    """Returns sums over the targets of each row, `[N, B, 4]`: −ln p of both models, mean squared logit difference, count."""

    def compare_row(row: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        a_TD, b_TD, targets_T, mask_T = row  # one row at a time bounds the memory of the logits
        a, b = model.logits(a_TD), other.logits(b_TD)
        nats = [-jnp.take_along_axis(jax.nn.log_softmax(x_TV), targets_T[:, None], 1)[:, 0] for x_TV in (a, b)]
        gap_T = jnp.mean(jnp.square((b - b.mean(-1, keepdims=True)) - (a - a.mean(-1, keepdims=True))), -1)
        return jnp.stack([jnp.sum(mask_T * x_T) for x_T in (*nats, gap_T, jnp.ones_like(gap_T))])

    return jax.lax.map(lambda rows: jax.lax.map(compare_row, rows), (a_NBTD, b_NBTD, batches.targets_BT, batches.mask_BT))
