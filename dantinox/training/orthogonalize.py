"""Semi-orthogonal approximations of matrices, on one device or on the shards of a mesh."""

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.distributed import AXES, Layout
from dantinox.model.lora import ADAPTER_SUFFIXES
from dantinox.model.parameters import Parameters

# Coefficients of odd polynomials a x + b x³ + c x⁵, by their number. Applied in sequence, 3 of them
# map singular values from [0.01, 1] to [0.73, 1.27], and 5 map those from [0.001, 1] to [0.87,
# 1.13]. Each is a minimax approximation of 1 on the interval to which the previous ones map the
# singular values (Amsel et al. 2025, "The Polar Express", algorithm 1). The 5 are the published
# ones, whose first polynomial is fitted to [0.024, 1].
POLAR_STEPS: dict[int, tuple[tuple[float, float, float], ...]] = {
    3: ((8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526)),
    5: (
        (8.287212, -23.595887, 17.300387),
        (4.107059, -2.947850, 0.544843),
        (3.948691, -2.908902, 0.551819),
        (3.318420, -2.488488, 0.510049),
        (2.300652, -1.668904, 0.418807),
    ),
}
# Precision of the float32 matrix multiplications of each sequence. "high" is TF32 on a GPU and
# three bfloat16 passes on a TPU. Full precision takes seven times as long on a GPU and twice as
# long on a TPU. With 3 polynomials the update directions differ from full precision by about 1 %
# with TF32, and by 1 to 10 % with plain bfloat16. 5 polynomials multiply the smallest singular
# values by up to 1,000 and their squares by a million, so they would amplify the rounding errors of
# TF32 to more than the result. A CPU has one precision.
PRECISION = {3: "high", 5: "highest"}


def matrix_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the shape in which Muon trains a hidden matrix, or None for parameters that AdamW
    trains.

    The shape is (fan in, fan out), or (matrices, fan in, fan out) for a stack. Queries, keys and
    values are one matrix, and so are gate and up. AdamW trains embeddings, position tables and the
    output layer, because each of their rows belongs to a single token or position.
    """
    axes = fan_axes(name, len(shape))
    if axes is None:
        return None
    stack, inputs, outputs = shape[: axes[0]], shape[axes[0] : axes[1]], shape[axes[1] :]
    return *((math.prod(stack),) if stack else ()), math.prod(inputs), math.prod(outputs)


def fan_axes(name: str, ndim: int) -> tuple[int, int] | None:
    """Returns the index of the first input axis and of the first output axis of a hidden matrix;
    None for other parameters.
    """
    if not name.startswith(("blocks/", "rolled/")) or not name.endswith(
        ("kernel", *ADAPTER_SUFFIXES)
    ):
        return None
    stacked = name.startswith("rolled/") + ("/experts/" in name)
    return stacked, (
        ndim - 1 if name.endswith(("attention/out/kernel", "o_proj/lora_a")) else stacked + 1
    )


class MatrixSides(NamedTuple):
    """How a hidden matrix, or a stack of them, becomes X, a matrix with at most as many rows as
    columns.

    Attributes:
      height: number of rows of X.
      transposed: whether X is the transpose of the matrix.
      scale: √max(1, fan out / fan in).
      rows, columns, stack: mesh axes that shard the rows, the columns and the matrices of the
        stack.
    """

    height: int
    transposed: bool
    scale: float
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    stack: tuple[str, ...] = ()


def _matrix_sides(name: str, shape: tuple[int, ...], layout: Layout | None) -> MatrixSides:
    *_, inputs, outputs = matrix_shape(name, shape) or shape
    transposed = inputs > outputs
    scale = math.sqrt(max(1.0, outputs / inputs))
    if layout is None or layout.mesh is None:
        return MatrixSides(min(inputs, outputs), transposed, scale)
    first, second = fan_axes(name, len(shape)) or (0, 1)
    split = layout.splits[name].axes_of
    rows, columns = split(slice(first, second)), split(slice(second, None))
    if transposed:
        rows, columns = columns, rows
    return MatrixSides(
        min(inputs, outputs), transposed, scale, rows, columns, split(slice(0, first))
    )


def orthogonalize(
    gradients: Parameters, polynomials: int = 3, layout: Layout | None = None
) -> Parameters:
    """Approximates the nearest semi-orthogonal matrix to each hidden matrix, times √max(1, fan out
    / fan in).

    With X = U S Vᵀ, the result approximates U Vᵀ = (X Xᵀ)^(−1/2) X. The polynomials are evaluated
    on the small square matrix X Xᵀ, for all matrices of the same height together, and the result
    multiplies X once. This takes half the work of iterating on X itself.

    On a mesh, each device multiplies its own columns. A reduce-scatter sums the square matrices so
    that each device holds the complete sums of some of them. An all-gather returns their inverse
    roots to all devices. Full matrices are not communicated, except those whose rows are sharded.

    Args:
      polynomials: a key of `POLAR_STEPS`.
    """
    sides = {name: _matrix_sides(name, g.shape, layout) for name, g in gradients.items()}
    if layout is None or layout.mesh is None:
        return _orthogonalize_local(gradients, sides, dict.fromkeys(AXES, 1), polynomials)
    specs = {name: layout.specs[name] for name in gradients}

    def local(parts: Parameters) -> Parameters:
        return _orthogonalize_local(parts, sides, layout.sizes, polynomials)

    return layout.shard_map(local, (specs,), specs)(gradients)


def _orthogonalize_local(
    gradients: Parameters, sides: dict[str, MatrixSides], sizes: Mapping[str, int], polynomials: int
) -> Parameters:
    """Runs `orthogonalize` on the shards of one device, or on whole matrices without a mesh."""
    matmul = partial(jnp.matmul, precision=PRECISION[polynomials])
    matrices: Parameters = {}
    # The names of matrices with the same height, and with the same mesh axes over their columns and
    # over their stack.
    groups: dict[tuple[int, tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for name, g in gradients.items():
        x = g.reshape(matrix_shape(name, g.shape) or g.shape)
        x = x.mT if sides[name].transposed else x
        rows = sides[name].rows
        matrices[name] = jax.lax.all_gather(x, rows, axis=x.ndim - 2, tiled=True) if rows else x
        groups.setdefault((sides[name].height, sides[name].columns, sides[name].stack), []).append(
            name
        )
    roots: Parameters = {}
    for (height, columns, stack), names in sorted(groups.items()):
        grams = [
            matmul(matrices[name], matrices[name].mT).reshape(-1, height, height) for name in names
        ]
        ends = np.cumsum([len(gram) for gram in grams])
        others = tuple(
            axis for axis, size in sizes.items() if size > 1 and axis not in (*columns, *stack)
        )
        padded_roots = _sharded_inverse_roots(
            jnp.concatenate(grams), columns, others, sizes, polynomials
        )
        group_roots = jnp.split(padded_roots[: ends[-1]], ends[:-1])
        for name, root in zip(names, group_roots, strict=True):
            roots[name] = root.reshape(*matrices[name].shape[:-1], height)
    result: Parameters = {}
    for name, g in gradients.items():
        side = sides[name]
        root = roots[name]
        if side.rows:  # only this device's rows of the result
            local_rows = side.height // math.prod(sizes[axis] for axis in side.rows)
            first = jax.lax.axis_index(side.rows) * local_rows
            root = jax.lax.dynamic_slice_in_dim(root, first, local_rows, axis=root.ndim - 2)
        x = matmul(root, matrices[name])
        result[name] = (side.scale * (x.mT if side.transposed else x)).reshape(g.shape)
    return result


def _sharded_inverse_roots(
    grams_MNN: jax.Array,
    summed: tuple[str, ...],
    others: tuple[str, ...],
    sizes: Mapping[str, int],
    polynomials: int,
) -> jax.Array:
    """Returns the inverse roots of the Gram matrices, summed over the mesh axes `summed`.

    Devices along the axes `others` have the same Gram matrices. The matrices are padded so that
    each device computes an equal number of roots.
    """
    n_summed, n_others = (math.prod(sizes[axis] for axis in axes) for axes in (summed, others))
    grams_MNN = jnp.pad(grams_MNN, ((0, -len(grams_MNN) % (n_summed * n_others)), (0, 0), (0, 0)))
    if summed:
        grams_MNN = jax.lax.psum_scatter(grams_MNN, summed, scatter_dimension=0, tiled=True)
    if others:
        local_count = len(grams_MNN) // n_others
        grams_MNN = jax.lax.dynamic_slice_in_dim(
            grams_MNN, jax.lax.axis_index(others) * local_count, local_count
        )
    roots_MNN = _inverse_root(grams_MNN, polynomials)
    for axes in (others, summed):
        roots_MNN = jax.lax.all_gather(roots_MNN, axes, axis=0, tiled=True) if axes else roots_MNN
    return roots_MNN


def _inverse_root(grams_MNN: jax.Array, polynomials: int) -> jax.Array:
    """Approximates A^(−1/2) of symmetric positive semi-definite matrices. The root stays bounded
    for a singular A.

    A is first divided by its Frobenius norm, which is at least its largest eigenvalue. A step that
    maps X to p(A) X also maps A = X Xᵀ to p(A) A p(A). All matrices here are polynomials of the
    first A, so they commute.
    """
    matmul = partial(jnp.matmul, precision=PRECISION[polynomials])
    steps = POLAR_STEPS[polynomials]
    norm_M11 = jnp.linalg.norm(grams_MNN, axis=(1, 2), keepdims=True) + 1e-20
    a_MNN = grams_MNN / norm_M11
    identity = root_MNN = jnp.eye(a_MNN.shape[-1])
    for index, (a, b, c) in enumerate(steps):
        p_MNN = a * identity + b * a_MNN + c * matmul(a_MNN, a_MNN)
        root_MNN = matmul(p_MNN, root_MNN) if index else p_MNN  # the first root is the identity
        if index + 1 < len(steps):
            a_MNN = matmul(matmul(p_MNN, a_MNN), p_MNN)
    return root_MNN * jax.lax.rsqrt(norm_M11)
