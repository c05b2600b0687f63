"""The frozen matrices under adapters: their dtypes, and multiplication by them.

A matrix `[*shape_in, *shape_out]` is a dict of arrays, which depends on `lora.base_weights`:

* float32 and bfloat16: `kernel`.
* int8: `kernel`, and `scale` with one number per output.
* nf4: `codes`, `scale`, `scale_step` and `scale_mean`, see `dantinox.model.nf4`.

With nf4, the embedding and the output layer are int8, with one scale per token.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from dantinox.model.nf4 import dequantize_nf4, quantize_nf4, zero_nf4

FrozenMatrix = dict[str, jax.Array]


def initial_matrix(
    kernel: jax.Array, shape_in: tuple[int, ...], shape_out: tuple[int, ...], held: str
) -> FrozenMatrix:
    """Returns the arrays of a frozen matrix before the weights of a base run replace them.

    With nf4 the matrix is zero.

    Args:
      held: the value of `lora.base_weights`.
    """
    if held == "nf4":
        return zero_nf4(int(np.prod(shape_in)), shape_out)
    scale = {"scale": jnp.ones(shape_out, jnp.float32)} if held == "int8" else {}
    return {"kernel": kernel.astype(held)} | scale


def dequantize(matrix: Mapping[str, jax.Array], shape_in: tuple[int, ...]) -> jax.Array:
    """Returns a frozen matrix as float32 `[*shape_in, *shape_out]`."""
    if "codes" in matrix:
        return dequantize_nf4(**matrix, shape_in=shape_in)
    kernel = matrix["kernel"].astype(jnp.float32)
    return kernel * matrix["scale"] if "scale" in matrix else kernel


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def frozen_tensordot(
    x: jax.Array, matrix: FrozenMatrix, shape_in: tuple[int, ...], dtype: DTypeLike
) -> jax.Array:
    """Computes `cast_tensordot` with float32 results and frozen weights, which have no gradient.

    The backward pass needs neither x nor a copy of the weights in `dtype`: it converts the weights
    again.

    Args:
      x: `[…, *shape_in]`.
      matrix: converted to `dtype` for this operation only.
    """
    x, w = _cast_operands(x, matrix, shape_in, dtype)
    y = jnp.tensordot(x, w, len(shape_in), preferred_element_type=jnp.float32)
    return y * matrix["scale"] if _has_output_scale(matrix) else y


def _has_output_scale(matrix: FrozenMatrix) -> bool:
    return "kernel" in matrix and "scale" in matrix


def _cast_operands(
    x: jax.Array, matrix: FrozenMatrix, shape_in: tuple[int, ...], dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Casts both operands to `dtype`, without the output scales of int8 weights.

    A barrier delays the cast of the weights until x is available. Otherwise the compiler casts the
    weights of all layers at the start of the program and keeps the copies in memory.
    """
    if "codes" in matrix:
        x, matrix = jax.lax.optimization_barrier((x, matrix))
        return x.astype(dtype), dequantize_nf4(**matrix, shape_in=shape_in).astype(dtype)
    w = matrix["kernel"]
    if w.dtype != dtype:
        x, w = jax.lax.optimization_barrier((x, w))
    return x.astype(dtype), w.astype(dtype)


def _frozen_backward(
    shape_in: tuple[int, ...], dtype: DTypeLike, residuals: tuple[Any, ...], d_y: jax.Array
):
    matrix, zero = residuals
    d_y = d_y * matrix["scale"] if _has_output_scale(matrix) else d_y
    d_y, w = _cast_operands(d_y, matrix, shape_in, dtype)
    axes = len(shape_in)
    outs = w.ndim - axes
    contracted = tuple(range(d_y.ndim - outs, d_y.ndim)), tuple(range(axes, w.ndim))
    return (
        jnp.tensordot(d_y, w, contracted, preferred_element_type=jnp.float32).astype(zero.dtype),
        None,
    )


# The backward pass needs the dtype of x, but residuals are arrays: a zero stands for it.
frozen_tensordot.defvjp(
    lambda x, matrix, shape_in, dtype: (
        frozen_tensordot(x, matrix, shape_in, dtype),
        (matrix, jnp.zeros((), x.dtype)),
    ),
    _frozen_backward,
)


class Int8Table(nnx.Module):
    """A frozen embedding table: `kernel`, int8 `[V, D]`, and `scale`, float32 `[V]`. It may also be
    the output layer.
    """

    def __init__(self, table_VD: jax.Array, dtype: DTypeLike):
        self.dtype = dtype
        self.kernel = nnx.Param(table_VD.astype(jnp.int8))
        self.scale = nnx.Param(jnp.ones(len(table_VD), jnp.float32))

    def rows(self, tokens: jax.Array) -> jax.Array:
        """Returns the embeddings of tokens in float32."""
        return self.kernel[...][tokens] * self.scale[...][tokens][..., None]

    def project(self, x: jax.Array) -> jax.Array:
        """Returns the dot products of x `[…, D]` with the rows: float32 `[…, V]`."""
        return frozen_tensordot(
            x, {"kernel": self.kernel[...].T, "scale": self.scale[...]}, x.shape[-1:], self.dtype
        )

    def dequantize(self) -> jax.Array:
        """Returns the table in float32."""
        return self.kernel[...] * self.scale[...][:, None]


def to_frozen_dtype(
    name: str, array: np.ndarray, shapes: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Converts a weight from a file to the form of frozen weights; returns its arrays by name.

    For int8 the quantization is symmetric, with one scale per output or row of a table.

    Args:
      shapes: the abstract parameters of the model with separate layers, by name.
    """
    module = name.removesuffix("kernel")
    if f"{module}codes" in shapes:
        outs = shapes[f"{module}codes"].ndim - 2
        return {
            f"{module}{leaf}": part for leaf, part in quantize_nf4(array, array.ndim - outs).items()
        }
    if f"{name}/kernel" in shapes:  # an `Int8Table`
        rows, scale = _quantize_int8(np.asarray(array, np.float32).T, 1)
        return {f"{name}/kernel": np.ascontiguousarray(rows.T), f"{name}/scale": scale}
    if shapes[name].dtype != jnp.int8:
        return {name: np.array(array, shapes[name].dtype)}
    scale_name = f"{module}scale"
    numbers, scale = _quantize_int8(array, array.ndim - len(shapes[scale_name].shape))
    return {name: numbers, scale_name: scale}


def _quantize_int8(array: np.ndarray, axes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns an array as int8 numbers, and the scales, which do not have the first `axes` axes."""
    wide = np.asarray(array, np.float32)
    largest = np.max(np.abs(wide), axis=tuple(range(axes)))
    scale = np.where(largest > 0, largest, np.float32(1)) / np.float32(127)
    return np.round(wide / scale).astype(np.int8), scale
