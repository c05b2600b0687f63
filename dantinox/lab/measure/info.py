"""`dantinox info`: model, training and stored weights of a run."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

from dantinox.config import Config, ModelConfig
from dantinox.model import compute_dtype, make_cache
from dantinox.model.flops import adapter_parameters
from dantinox.model.packed import PART_NAME
from dantinox.model.parameters import abstract_model
from dantinox.programs import tree_bytes
from dantinox.report import human_bytes, human_count, table
from dantinox.report.metric_files import csv_columns
from dantinox.run import (
    RunDirectory,
    load_run_config,
    load_weights,
    open_base,
    open_run,
    packed_arrays,
)
from dantinox.text import Tokenizer


def info_lines(run_dir: str | Path) -> Iterator[str]:
    """Yields paragraphs on the model of a run and on its training. No weights are loaded.

    Raises:
      UserError: the run is missing or damaged.
    """
    run = open_run(run_dir)
    config = load_run_config(run)
    yield _model_table(run, config, Tokenizer.load(run.tokenizer))
    yield _training_table(run, config)


def _model_table(run: RunDirectory, config: Config, tokenizer: Tokenizer) -> str:
    """Returns a table of the sizes and options of the model, and of its stored weights."""
    model = config.architecture(tokenizer.vocab_size)
    cache = tree_bytes(
        jax.eval_shape(partial(make_cache, model, 1, model.max_context, compute_dtype(model)))
    )
    windows = sorted({window for window in model.windows if window is not None})
    keys = f"{model.kv_heads} key/value heads"
    if model.latent is not None:
        keys = f"latents of size {model.latent.rank} + {model.latent.rotated_size}"
    if model.global_head_size or model.global_kv_heads:
        heads = model.global_kv_heads or model.kv_heads
        keys += (
            f"; {heads} of {model.global_head_size or model.head_size} in layers without a window"
        )
    if model.kv_shared_layers:
        keys += f"; the last {model.kv_shared_layers} layers reuse those of earlier layers"
    trained = []
    lora = config.trained_architecture(tokenizer.vocab_size).lora
    if lora is not None:
        count = human_count(adapter_parameters(replace(model, lora=lora)))
        trained = [
            (
                "adapters",
                (
                    f"{count} trained parameters of rank {lora.rank} on the weights of"
                    f" {config.training.init_from}"
                ),
            )
        ]
    ternary = (
        [("projections", "ternary, with 8-bit inputs")] if model.projections == "ternary" else []
    )
    return table(
        [
            (
                "parameters",
                human_count(sum(shape.size for shape in abstract_model(model)[1].values())),
            ),
            *trained,
            *ternary,
            (
                "shape",
                (
                    f"{model.num_blocks} layers, dim {model.dim}, {model.n_heads} heads of"
                    f" {model.head_size}, {keys}"
                ),
            ),
            ("feed-forward", f"{model.activation}, {model.hidden_dim} wide{_experts(model)}"),
            ("positions", model.position + (f", sliding windows of {windows}" if windows else "")),
            ("context", f"{model.max_context} tokens, cache {human_bytes(cache)} per row"),
            ("weights", _stored_weights(run, config, model)),
            (
                "tokenizer",
                f"{config.tokenizer.tokenizer_type}, vocabulary of {tokenizer.vocab_size}",
            ),
        ]
    )


def _experts(model: ModelConfig) -> str:
    """Returns the experts in words, with a semicolon before them; "" for a dense model."""
    if model.experts is None:
        return ""
    shared = (
        f" and a shared layer {model.experts.shared_dim} wide" if model.experts.shared_dim else ""
    )
    dense = ""
    if model.experts.dense_layers:
        dense = f"; {len(model.experts.dense_layers)} dense layers {model.experts.dense_dim} wide"
    return f"; {model.experts.count} experts, {model.experts.top_k} per token{shared}{dense}"


def _stored_weights(run: RunDirectory, config: Config, model: ModelConfig) -> str:
    """Returns the bytes of the stored weights by block format or dtype; those of the base for a run
    with adapters.
    """
    if config.lora.rank is not None:
        base = open_base(config.training.init_from, run)
        adapter = f"adapters {human_bytes(run.weights_or_adapter.stat().st_size)}"
        return f"{_stored_weights(base, load_run_config(base), model)}; {adapter}"
    shapes = abstract_model(replace(model, scan_layers=False), packed_arrays(run.weights))[1]
    sizes = Counter[str]()

    def add(name: str, array: np.ndarray) -> None:
        part = PART_NAME.fullmatch(name)
        sizes[part[3] if part else array.dtype.name] += array.nbytes

    load_weights(run.weights, shapes, add)
    return (
        f"{human_bytes(sizes.total())}"
        f" ({', '.join(f'{kind} {human_bytes(n)}' for kind, n in sizes.most_common())})"
    )


def _training_table(run: RunDirectory, config: Config) -> str:
    """Returns a table of the steps and of the best evaluation, from the training log."""
    rows = csv_columns(
        run.log(config), ("step", "tokens", "val_loss", "val_reward", "bits_per_byte")
    )
    if not rows["step"].size:
        return "no training log\n"
    rewarded = np.isfinite(rows["val_reward"]).any()
    losses = -rows["val_reward"] if rewarded else rows["val_loss"]
    best = int(np.argmin(np.where(np.isfinite(losses), losses, math.inf)))
    measured = f"val reward {-losses[best]:.4f}" if rewarded else f"val loss {losses[best]:.4f}"
    bits_per_byte = rows["bits_per_byte"][best]
    bits = "" if np.isnan(bits_per_byte) else f"{bits_per_byte:.3f} bits per byte, "
    return table(
        [
            ("trained", f"{rows['step'][-1]:.0f} steps, {human_count(rows['tokens'][-1])} tokens"),
            ("best", f"{measured}, {bits}at step {rows['step'][best]:.0f}"),
        ]
    )
