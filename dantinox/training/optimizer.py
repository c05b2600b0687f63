"""Learning-rate schedules, optimizers, and the moving average of the weights."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dantinox.config.sections import TrainingSection
from dantinox.distributed import AXES, Layout
from dantinox.model.lora import ADAPTER_SUFFIXES
from dantinox.model.parameters import Parameters

Schedule = Callable[[Any], jax.Array]
MUON_MOMENTUM = 0.95
# Coefficients of odd polynomials a x + b x³ + c x⁵. Applied in sequence they map singular values from [0.01, 1] to
# [0.73, 1.27]. Each is the minimax approximation of 1 on the interval to which the previous ones map the singular values
# (Amsel et al. 2025, "The Polar Express", algorithm 1).
POLAR_STEPS = ((8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526))
# Precision of float32 matrix multiplications: TF32 on a GPU and three bfloat16 passes on a TPU. Full precision takes seven
# times as long on a GPU and twice as long on a TPU. The update directions differ from full precision by about 1 %, and by 1 to
# 10 % with plain bfloat16. A CPU has one precision.
PRECISION = "high"


def schedule(training: TrainingSection, steps: int) -> Schedule:
    """Returns a function that maps the optimizer step (0 is the first) to a factor in [0, 1].

    A learning rate is its peak value times this factor. The factor rises linearly over `warmup_steps` (it is not 0 at step 0)
    and reaches `min_lr_ratio` in the last of `steps`.
    """
    warmup, low = training.warmup_steps, training.min_lr_ratio
    if warmup is None or warmup > steps:
        warmup = min(100, steps // 10)
    last = max(steps - 1, warmup + 1)
    start = last - max(1, round(training.decay_fraction * steps)) if training.schedule == "wsd" else warmup

    def factor(step: Any) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        done = jnp.clip((step - start) / max(1, last - start), 0, 1)
        rise = jnp.minimum(1.0, (step + 1) / (warmup + 1))
        return rise * (low + (1 - low) * DECAY_CURVES[training.schedule](done))

    return factor


DECAY_CURVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "cosine": lambda done: 0.5 * (1 + jnp.cos(jnp.pi * done)),
    "linear": lambda done: 1 - done,
    "wsd": lambda done: 1 - done,
    "constant": jnp.ones_like,
}


def matrix_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the shape in which Muon trains a hidden matrix, or None for parameters that AdamW trains.

    The shape is (fan in, fan out), or (matrices, fan in, fan out) for a stack. Queries, keys and values are one matrix, and so
    are gate and up. AdamW trains embeddings, position tables and the output layer, because each of their rows belongs to a
    single token or position.
    """
    axes = _fan_axes(name, len(shape))
    if axes is None:
        return None
    stack, inputs, outputs = shape[: axes[0]], shape[axes[0] : axes[1]], shape[axes[1] :]
    return *((math.prod(stack),) if stack else ()), math.prod(inputs), math.prod(outputs)


def _fan_axes(name: str, ndim: int) -> tuple[int, int] | None:
    """Returns the index of the first input axis and of the first output axis of a hidden matrix; None for other parameters."""
    if not name.startswith(("blocks/", "rolled/")) or not name.endswith(("kernel", *ADAPTER_SUFFIXES)):
        return None
    stacked = name.startswith("rolled/") + ("/experts/" in name)
    return stacked, ndim - 1 if name.endswith(("attention/out/kernel", "o_proj/lora_a")) else stacked + 1


def _row_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape for parameters that are not hidden matrices: two axes for per-layer embeddings, else unchanged."""
    return (shape[0], math.prod(shape[1:])) if name.startswith("per_layer/") and len(shape) > 1 else shape


class Optimizer(NamedTuple):
    """An optax transformation and its learning rates.

    Attributes:
      init, update: as in `optax.GradientTransformation`. With `training.ema` the state is an `EMAState`.
      rates: maps a step (0 is the first) to a dictionary of the learning rates that `update` applies. The keys are the names of
        the settings: `lr`, and with Muon also `muon_lr`, the rate of its matrices.
    """

    init: Callable[[Parameters], Any]
    update: Callable[[Parameters, Any, Parameters], tuple[Parameters, Any]]
    rates: Callable[[Any], dict[str, jax.Array]]


def optimizer(training: TrainingSection, steps: int, factor: Schedule | None = None, layout: Layout | None = None) -> Optimizer:
    """Builds the optimizer: gradient clipping, the update rule of `training.optimizer`, and the moving average
    of `training.ema`.

    Args:
      factor: maps the step to a factor on the peak learning rates; None: `training.schedule`.
      layout: the layout of the devices that share the step.
    """
    scheduled = factor or schedule(training, steps)

    def rates(step: Any) -> dict[str, jax.Array]:
        muon_only = {"muon_lr": training.muon_lr * scheduled(step)} if training.optimizer == "muon" else {}
        return {"lr": training.lr * scheduled(step)} | muon_only

    rule = RULES[training.optimizer](training, lambda step: rates(step)["lr"])
    if training.optimizer == "muon":
        rule = _partition(muon(lambda step: rates(step)["muon_lr"], training.weight_decay, layout), rule)
    if training.grad_clip:
        rule = optax.chain(optax.clip_by_global_norm(training.grad_clip), rule)
    if training.ema:
        rule = with_ema(rule, training.ema)
    return Optimizer(rule.init, rule.update, rates)


def _decay_mask(parameters: Parameters) -> dict[str, bool]:
    """Returns which parameters get weight decay: matrices and tables, but not scales, biases and attention sinks."""
    return {name: name.endswith(("kernel", "embed", *ADAPTER_SUFFIXES)) for name in parameters}


def _adamw(training: TrainingSection, rate: Schedule) -> optax.GradientTransformation:
    """Loshchilov & Hutter 2019, algorithm 2."""
    return optax.adamw(rate, training.beta1, training.beta2, weight_decay=training.weight_decay, mask=_decay_mask)


def _lion(training: TrainingSection, rate: Schedule) -> optax.GradientTransformation:
    """The sign of an interpolated momentum (Chen et al. 2023, algorithm 2). Use a third to a tenth of AdamW's rates."""
    return optax.lion(rate, training.beta1, training.beta2, weight_decay=training.weight_decay, mask=_decay_mask)


def _sgd(training: TrainingSection, rate: Schedule) -> optax.GradientTransformation:
    """Nesterov momentum (Sutskever et al. 2013, equation 3) with decoupled weight decay."""
    momentum = optax.trace(training.beta1, nesterov=True)
    return optax.chain(
        momentum, optax.add_decayed_weights(training.weight_decay, _decay_mask), optax.scale_by_learning_rate(rate)
    )


def _adafactor(training: TrainingSection, rate: Schedule) -> optax.GradientTransformation:
    """Second moments factored into row and column means, which need little memory (Shazeer & Stern 2018, algorithm 4).

    It has no momentum, clips updates to a root mean square of 1, and uses absolute learning rates, as AdamW does.
    """
    factored = _with_matrix_shapes(optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)))
    return optax.chain(
        factored, optax.add_decayed_weights(training.weight_decay, _decay_mask), optax.scale_by_learning_rate(rate)
    )


RULES: dict[str, Callable[[TrainingSection, Schedule], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "muon": _adamw,  # for parameters that are not hidden matrices
    "lion": _lion,
    "adafactor": _adafactor,
    "sgd": _sgd,
}


def _with_matrix_shapes(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wraps a rule so that it receives each hidden matrix with two axes (fan in, fan out). Stacks are split."""

    def flat(tree: Parameters) -> Parameters:
        matrices = {name: p.reshape(matrix_shape(name, p.shape) or _row_shape(name, p.shape)) for name, p in tree.items()}
        stacks = {name: p for name, p in matrices.items() if p.ndim == 3 or name.startswith("rolled/")}
        single = {name: p for name, p in matrices.items() if name not in stacks}
        return single | {f"{name}/{i}": x for name, p in stacks.items() for i, x in enumerate(p)}

    def update(gradients: Parameters, state: Any, parameters: Any = None) -> tuple[Parameters, Any]:
        updates, state = rule.update(flat(gradients), state, None if parameters is None else flat(parameters))

        def joined(name: str, shape: tuple[int, ...]) -> jax.Array:
            count = (matrix_shape(name, shape) or shape)[0]
            matrix = updates[name] if name in updates else jnp.stack([updates[f"{name}/{i}"] for i in range(count)])
            return matrix.reshape(shape)

        return {name: joined(name, g.shape) for name, g in gradients.items()}, state

    return optax.GradientTransformation(lambda parameters: rule.init(flat(parameters)), update)


class EMAState(NamedTuple):
    """The state of a rule, the moving average of the weights, and the number of steps in the average."""

    rule: Any
    average: Parameters
    steps: jax.Array


def with_ema(rule: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """Adds a moving average of the updated weights to a rule (Polyak & Juditsky 1992). The updates do not change.

    After step t, counted from 0, the average moves by the fraction 1 − min(decay, (1 + t) / (10 + t)) toward the weights. So
    the number of steps that it effectively averages over grows to 1 / (1 − decay), and the initial weights soon lose their
    influence.
    """

    def init(parameters: Parameters) -> EMAState:
        return EMAState(rule.init(parameters), jax.tree.map(jnp.array, parameters), jnp.zeros((), jnp.int32))

    def update(gradients: Parameters, state: Any, parameters: Any) -> tuple[Parameters, EMAState]:
        updates, inner = rule.update(gradients, state.rule, parameters)
        t = state.steps.astype(jnp.float32)
        share = 1 - jnp.minimum(decay, (1 + t) / (10 + t))
        average = jax.tree.map(lambda a, p, u: a + share * (p + u - a), state.average, parameters, updates)
        return updates, EMAState(inner, average, state.steps + 1)

    return optax.GradientTransformation(init, update)


def _partition(matrices: optax.GradientTransformation, others: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies `matrices` to the parameters that Muon trains, and `others` to the rest."""

    def parts(tree: Parameters) -> tuple[Parameters, Parameters]:
        inside = {name: p for name, p in tree.items() if matrix_shape(name, p.shape)}
        return inside, {name: p for name, p in tree.items() if name not in inside}

    def init(parameters: Parameters) -> dict[str, Any]:
        inside, outside = parts(parameters)
        return {"matrices": matrices.init(inside), "others": others.init(outside)}

    def update(gradients: Parameters, state: Any, parameters: Any) -> tuple[Parameters, dict[str, Any]]:
        (g_in, g_out), (p_in, p_out) = parts(gradients), parts(parameters)
        inside, inner = matrices.update(g_in, state["matrices"], p_in)
        outside, outer = others.update(g_out, state["others"], p_out)
        return inside | outside, {"matrices": inner, "others": outer}

    return optax.GradientTransformation(init, update)


class MuonState(NamedTuple):
    """The number of steps, and the momentum of every matrix."""

    steps: jax.Array
    momentum: Parameters


def muon(learning_rate: Schedule, weight_decay: float, layout: Layout | None = None) -> optax.GradientTransformation:
    """Orthogonalized Nesterov momentum times √max(1, fan out / fan in) (Jordan et al. 2024), with decoupled weight decay."""

    def init(parameters: Parameters) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, parameters))

    def update(gradients: Parameters, state: Any, parameters: Any) -> tuple[Parameters, MuonState]:
        rate = learning_rate(state.steps)
        momentum = jax.tree.map(lambda m, g: MUON_MOMENTUM * m + (1 - MUON_MOMENTUM) * g, state.momentum, gradients)
        ahead = jax.tree.map(lambda m, g: MUON_MOMENTUM * m + (1 - MUON_MOMENTUM) * g, momentum, gradients)
        updates = jax.tree.map(lambda d, p: -rate * (d + weight_decay * p), orthogonalize(ahead, layout), parameters)
        return updates, MuonState(state.steps + 1, momentum)

    return optax.GradientTransformation(init, update)


class MatrixSides(NamedTuple):
    """How a hidden matrix, or a stack of them, becomes X, a matrix with at most as many rows as columns.

    Attributes:
      height: number of rows of X.
      transposed: whether X is the transpose of the matrix.
      scale: √max(1, fan out / fan in).
      rows, columns, stack: mesh axes that shard the rows, the columns and the matrices of the stack.
    """

    height: int
    transposed: bool
    scale: float
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    stack: tuple[str, ...] = ()


def _matrix_sides(name: str, shape: tuple[int, ...], layout: Layout | None) -> MatrixSides:
    *_, inputs, outputs = matrix_shape(name, shape) or shape
    transposed, scale = inputs > outputs, math.sqrt(max(1.0, outputs / inputs))
    if layout is None or layout.mesh is None:
        return MatrixSides(min(inputs, outputs), transposed, scale)
    first, second = _fan_axes(name, len(shape)) or (0, 1)
    split = layout.splits[name].axes_of
    rows, columns = split(slice(first, second)), split(slice(second, None))
    if transposed:
        rows, columns = columns, rows
    return MatrixSides(min(inputs, outputs), transposed, scale, rows, columns, split(slice(0, first)))


def orthogonalize(gradients: Parameters, layout: Layout | None = None) -> Parameters:
    """Approximates the nearest semi-orthogonal matrix to each hidden matrix, times √max(1, fan out / fan in).

    With X = U S Vᵀ, the result approximates U Vᵀ = (X Xᵀ)^(−1/2) X. The polynomials are evaluated on the small square matrix
    X Xᵀ, for all matrices of the same height together, and the result multiplies X once. This takes half the work of iterating
    on X itself.

    On a mesh, each device multiplies its own columns. A reduce-scatter sums the square matrices so that each device holds the
    complete sums of some of them. An all-gather returns their inverse roots to all devices. Full matrices are not
    communicated, except those whose rows are sharded.
    """
    sides = {name: _matrix_sides(name, g.shape, layout) for name, g in gradients.items()}
    if layout is None or layout.mesh is None:
        return _orthogonalize_local(gradients, sides, dict.fromkeys(AXES, 1))
    specs = {name: layout.specs[name] for name in gradients}
    return layout.shard_map(lambda parts: _orthogonalize_local(parts, sides, layout.sizes), (specs,), specs)(gradients)


def _orthogonalize_local(gradients: Parameters, sides: dict[str, MatrixSides], sizes: Mapping[str, int]) -> Parameters:
    """Runs `orthogonalize` on the shards of one device, or on whole matrices without a mesh."""
    matmul = partial(jnp.matmul, precision=PRECISION)
    matrices: Parameters = {}
    groups: dict[tuple[int, tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for name, g in gradients.items():
        x = g.reshape(matrix_shape(name, g.shape) or g.shape)
        x = x.mT if sides[name].transposed else x
        rows = sides[name].rows
        matrices[name] = jax.lax.all_gather(x, rows, axis=x.ndim - 2, tiled=True) if rows else x
        groups.setdefault((sides[name].height, sides[name].columns, sides[name].stack), []).append(name)
    roots: Parameters = {}
    for (height, columns, stack), names in sorted(groups.items()):
        grams = [matmul(matrices[name], matrices[name].mT).reshape(-1, height, height) for name in names]
        ends = np.cumsum([len(gram) for gram in grams])
        others = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in (*columns, *stack))
        group_roots = jnp.split(_sharded_inverse_roots(jnp.concatenate(grams), columns, others, sizes)[: ends[-1]], ends[:-1])
        roots |= {n: root.reshape(*matrices[n].shape[:-1], height) for n, root in zip(names, group_roots, strict=True)}
    result: Parameters = {}
    for name, g in gradients.items():
        side, root = sides[name], roots[name]
        if side.rows:
            local_rows = side.height // math.prod(sizes[axis] for axis in side.rows)
            root = jax.lax.dynamic_slice_in_dim(
                root, jax.lax.axis_index(side.rows) * local_rows, local_rows, axis=root.ndim - 2
            )
        x = matmul(root, matrices[name])
        result[name] = (side.scale * (x.mT if side.transposed else x)).reshape(g.shape)
    return result


def _sharded_inverse_roots(
    grams_MNN: jax.Array, summed: tuple[str, ...], others: tuple[str, ...], sizes: Mapping[str, int]
) -> jax.Array:
    """Returns the inverse roots of the Gram matrices, summed over the mesh axes `summed`.

    Devices along the axes `others` have the same Gram matrices. The matrices are padded so that each device computes an equal
    number of roots.
    """
    n_summed, n_others = (math.prod(sizes[axis] for axis in axes) for axes in (summed, others))
    grams_MNN = jnp.pad(grams_MNN, ((0, -len(grams_MNN) % (n_summed * n_others)), (0, 0), (0, 0)))
    if summed:
        grams_MNN = jax.lax.psum_scatter(grams_MNN, summed, scatter_dimension=0, tiled=True)
    if others:
        local_count = len(grams_MNN) // n_others
        grams_MNN = jax.lax.dynamic_slice_in_dim(grams_MNN, jax.lax.axis_index(others) * local_count, local_count)
    roots_MNN = _inverse_root(grams_MNN)
    for axes in (others, summed):
        roots_MNN = jax.lax.all_gather(roots_MNN, axes, axis=0, tiled=True) if axes else roots_MNN
    return roots_MNN


def _inverse_root(grams_MNN: jax.Array) -> jax.Array:
    """Approximates A^(−1/2) of symmetric positive semi-definite matrices. The root stays bounded for a singular A.

    A is first divided by its Frobenius norm, which is at least its largest eigenvalue. A step that maps X to p(A) X also maps
    A = X Xᵀ to p(A) A p(A). All matrices here are polynomials of the first A, so they commute.
    """
    matmul = partial(jnp.matmul, precision=PRECISION)
    norm_M11 = jnp.linalg.norm(grams_MNN, axis=(1, 2), keepdims=True) + 1e-20
    a_MNN = grams_MNN / norm_M11
    identity = root_MNN = jnp.eye(a_MNN.shape[-1])
    for index, (a, b, c) in enumerate(POLAR_STEPS):
        p_MNN = a * identity + b * a_MNN + c * matmul(a_MNN, a_MNN)
        root_MNN = matmul(p_MNN, root_MNN) if index else p_MNN
        if index + 1 < len(POLAR_STEPS):
            a_MNN = matmul(matmul(p_MNN, a_MNN), p_MNN)
    return root_MNN * jax.lax.rsqrt(norm_M11)
