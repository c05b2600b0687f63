"""Trainings of a few steps on meshes of simulated devices; results are cached."""

import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import numpy as np
from training.small import random_weights

from dantinox.config import Config, build_config
from dantinox.distributed import AXES, Layout, make_layout
from dantinox.lab.measure.program_cost import Work, count_work
from dantinox.model.parameters import stack_layers
from dantinox.programs import memory_usage, tree_bytes
from dantinox.text import Batch, BatchOptions, SpecialIds, TokenStore
from dantinox.training.eval_step import make_eval_step
from dantinox.training.objective import abstract_windows
from dantinox.training.step import TrainState, TrainStep
from dantinox.training.token_losses import next_token_losses

V, STEPS = 64, 3
BASE = {
    "model.dim": 32, "model.n_heads": 4, "model.kv_heads": 2, "model.num_blocks": 2,
    "model.max_context": 16, "model.dtype": "float32", "training.batch_size": 16,
    "training.warmup_steps": 0, "training.steps": 10, "training.lr": 0.003,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "learned": {"model.weight_tying": True, "attention.use_rotary_pos": False,
                "attention.trainable_pos": True},
    "biases": {
        "attention.qkv_bias": True, "attention.out_bias": True, "model.mlp_bias": True,
        "model.norm_placement": "both", "attention.no_sink": True, "attention.gate_bias": True,
        "model.head_bias": True, "model.qk_norm": True, "model.qk_norm_scope": "layer",
        "model.norm_zero_centered": True,
    },
    "moe": {
        "moe.use_moe": True, "moe.n_experts": 4, "moe.alpha_balance": 0.01,
        "moe.router_z_loss": 0.01, "moe.shared_experts": 1, "moe.shared_gate": True,
        "moe.router_bias": True, "model.mlp_bias": True, "moe.n_groups": 2, "moe.top_k_groups": 1,
    },
    "uneven": {
        "model.num_blocks": 4, "attention.sliding_window": True, "attention.context_window": 5,
        "attention.kv_shared_layers": 2, "attention.layer_types": ["sliding", "full"],
        "attention.global_head_size": 16, "attention.k_eq_v": True, "model.v_norm": True,
        "model.qk_norm": True, "model.norm_placement": "both", "model.layer_scalar": True,
        "model.per_layer_dim": 8, "model.double_wide_mlp": True, "training.lr": 0.001,
    },
    "mla": {
        "model.kv_heads": None, "attention.kv_lora_rank": 16, "attention.q_lora_rank": 24,
        "attention.qk_rope_head_dim": 4,
    },
}  # fmt: skip


def settings(kind: str, mesh: str = "", **changes: Any) -> Config:
    """`mesh`: the axes with more than one device, "fsdp=4 tensor=2"; `training__ema=0.9` changes
    `training.ema`.
    """
    axes = {
        f"distributed.{axis}": int(size)
        for axis, size in (part.split("=") for part in mesh.split())
    }
    given = (
        BASE
        | KINDS[kind]
        | ({"distributed.fsdp": 1} | axes)
        | {key.replace("__", "."): v for key, v in changes.items()}
    )
    return build_config({}, {key: value for key, value in given.items() if value is not None})


def layout_of(config: Config, devices: int | None = None) -> Layout:
    """The layout on `devices` devices, or on as many as the mesh of the settings needs."""
    count = devices or math.prod(getattr(config.distributed, axis) for axis in AXES)
    return make_layout(config, config.trained_architecture(V), jax.devices()[:count])


def rows(layout: Layout, batch: Batch, parts: int = 1) -> Batch:
    """Puts a batch on the devices."""

    def read(chosen: Any = slice(None)) -> Batch:
        return Batch(*(array[chosen] for array in batch))

    return layout.put_batch(read, len(batch.tokens_BT), parts)


def store_of(config: Config) -> TokenStore:
    """Random tokens in short documents."""
    ids = np.random.default_rng(0).integers(0, V, 20000).astype(np.uint16)
    t = config.training
    return TokenStore(
        ids, ids[:999], BatchOptions(t.batch_size, config.model.max_context, seed=1), SpecialIds(3)
    )


class Program(NamedTuple):
    """A compiled step.

    Attributes:
      arguments, temp: bytes of the arguments and temporaries on one device.
      state: bytes of all parameters and moments.
    """

    run: Any
    arguments: int
    temp: int
    state: int

    @property
    def work(self) -> Work:
        """FLOPs, collectives and bytes of one device."""
        return _count_work(self.run)


@cache
def _count_work(compiled: Any) -> Work:
    return count_work(compiled.as_text())


@cache
def program(kind: str, mesh: str = "", chunks: int = 1, **changes: Any) -> Program:
    """Compiles the training step, with the loss of a device's tokens in `chunks` chunks."""
    config = settings(kind, mesh, **changes)
    model, layout, t = config.architecture(V), layout_of(config), config.training
    tokens = t.batch_size // t.grad_accum * model.max_context // layout.devices
    shapes = TrainStep(config, model, t.steps).shapes
    batch = layout.place_batch(abstract_windows(t.batch_size, model.max_context))
    with patch.dict(next_token_losses.__kwdefaults__, chunk_logits=-(-tokens // chunks) * V):
        lowered = TrainStep(config, model, t.steps, layout=layout).program.lower(
            layout.place_shapes(shapes), batch
        )
    step = lowered.compile()
    usage = memory_usage(step)
    return Program(step, usage.arguments, usage.temp, tree_bytes(shapes))


class Trained(NamedTuple):
    """Results of a few steps.

    Attributes:
      counts_LE: rows per expert of the last step.
      state: the float arrays of the optimizer, and with gradient descent also the parameters.
      evaluation: the loss of the evaluated weights after the last step; None unless `evaluated`.
    """

    losses: np.ndarray
    norms: np.ndarray
    counts_LE: np.ndarray | None
    state: dict[str, np.ndarray]
    evaluation: float | None


@cache
def trained(
    kind: str,
    mesh: str = "",
    bad_step: int | None = None,
    chunks: int = 1,
    evaluated: bool = False,
    **changes: Any,
) -> Trained:
    """Trains `STEPS` steps with `program`; the loss of step `bad_step` is NaN."""
    step, config = program(kind, mesh, chunks, **changes).run, settings(kind, mesh, **changes)
    model, layout, store, t = (
        config.architecture(V),
        layout_of(config),
        store_of(config),
        config.training,
    )
    weights = random_weights(replace(model, scan_layers=False), size=0.2)
    weights = stack_layers(weights, model) if model.scan_layers else weights
    state: TrainState = TrainStep(config, model, t.steps, layout=layout).initial_state(weights)
    losses, norms = [], []
    for number in range(STEPS):
        batch = store.batch(number)
        if number == bad_step:
            batch = batch._replace(mask_BT=np.full_like(batch.mask_BT, np.nan))
        state, metrics = step(state, rows(layout, batch, t.grad_accum))
        losses.append(float(metrics.loss))
        norms.append(float(metrics.grad_norm))
    evaluation = None
    if evaluated:
        counted = make_eval_step(model, layout)(
            state.weights, rows(layout, next(store.validation(8)))
        )
        evaluation = float(counted.nats) / float(counted.num_targets)
    counts_LE = None if metrics.expert_counts is None else np.asarray(metrics.expert_counts)
    compared = (state.optimizer, state.parameters if t.optimizer == "sgd" else {})
    arrays = {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(compared)
        if np.issubdtype(leaf.dtype, np.floating)
    }
    return Trained(np.array(losses), np.array(norms), counts_LE, arrays, evaluation)


def same(
    got: Trained, expected: Trained, tolerance: float = 1e-5, of_state: float | None = None
) -> None:
    """Losses are equal within `tolerance`, norms within ten times that, rows per expert exactly.

    Arrays are equal within `of_state` (None: ten times the tolerance) times the largest number of
    their kind, for example of all momenta. Moments and the parameters of gradient descent are
    linear in the gradients, so they show errors of gradients. The parameters of AdamW do not: its
    first steps have the size of the learning rate, also where a gradient is only rounding.
    """
    np.testing.assert_allclose(got.losses, expected.losses, rtol=0, atol=tolerance)
    if expected.evaluation is not None:
        np.testing.assert_allclose(got.evaluation, expected.evaluation, rtol=0, atol=tolerance)
    np.testing.assert_allclose(got.norms, expected.norms, rtol=10 * tolerance)
    np.testing.assert_array_equal(got.counts_LE, expected.counts_LE)
    assert got.state.keys() == expected.state.keys()
    sizes: dict[str, float] = {}
    for name, array in expected.state.items():
        kind = name.partition("['")[0]
        sizes[kind] = max(sizes.get(kind, 0.0), float(np.abs(array).max()))
    for name, array in expected.state.items():
        atol = (of_state or 10 * tolerance) * sizes[name.partition("['")[0]]
        np.testing.assert_allclose(got.state[name], array, rtol=0, atol=atol, err_msg=name)
