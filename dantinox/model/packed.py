"""Projections and tables whose weights stay in the blocks of a quantized GGUF file.

A packed parameter consists of parts, because the tensors that it joins may have different block
formats: in a file of type Q4_K_M the value projection of some layers is Q6_K and the rest of `qkv`
is Q4_K. A part is a uint8 array `[*lead, *outputs, bytes]`: one row of whole blocks per output. The
parts are slices of the outputs along one axis. `lead` is the axis of the experts, or of the tokens
of a table. In a file, part 0 of `blocks/0/attention/qkv/kernel` has the name
`blocks/0/attention/qkv/parts/0/Q4_K`, and that of `embed` has the name `embed/parts/0/Q4_K`.

The weights of a projection are converted to float32 where they are used, never for the whole model.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from dantinox.files import escape_name
from dantinox.kernels import (
    FORMATS,
    MAX_NATIVE_BFLOAT16_ROWS,
    MAX_NATIVE_ROWS,
    matmul,
    native_unpack,
    unpack,
)
from dantinox.model.layers import Linear, TernaryLinear, add_bias, linear_with_kernel
from dantinox.model.moe import (
    MAX_MATVEC_ROWS,
    ExpertLinear,
    ExpertRows,
    TernaryExpertLinear,
    experts_with_kernel,
    unpacking_matmul,
)

PART_NAME = re.compile(r"(.+)/parts/(\d{1,3})/([A-Z0-9_]+)")
MAX_NATIVE_FLOAT32_ROWS = 128  # with more rows, XLA multiplies in float32 faster
Part = tuple[str, Any]  # the format, and the array or its shape


class Layout(NamedTuple):
    """The axes of a parameter `[*lead, *shape_in, *shape_out]` that can be packed."""

    lead: tuple[int, ...]
    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.lead, *self.shape_in, *self.shape_out)

    @property
    def row(self) -> int:
        """The number of weights of an output."""
        return math.prod(self.shape_in)


def packed_name(parameter: str, index: int, kind: str) -> str:
    """Returns the name of a part of a parameter in a file."""
    return f"{parameter.removesuffix('/kernel')}/parts/{index}/{kind}"


def group_parts(packed: Mapping[str, Any]) -> dict[str, list[Part]]:
    """Groups the arrays of packed parameters by module, such as `blocks/0/attention/qkv` or
    `embed`.

    Raises:
      ValueError: a name is not that of a part, or the parts of a parameter are not numbered from 0.
    """
    groups: dict[str, dict[int, Part]] = {}
    for name, array in packed.items():
        match = PART_NAME.fullmatch(name)
        if (
            match is None
            or match[3] not in FORMATS
            or int(match[2]) in groups.setdefault(match[1], {})
        ):
            raise ValueError(f"hold {escape_name(name)}, which is not the name of a packed array")
        groups[match[1]][int(match[2])] = match[3], array
    for module, parts in groups.items():
        if sorted(parts) != list(range(len(parts))):
            raise ValueError(f"lack a part of {escape_name(module)}")
    return {module: [parts[index] for index in sorted(parts)] for module, parts in groups.items()}


def check_parts(module: str, parts: Sequence[Part], layout: Layout) -> int:
    """Returns the axis of the outputs along which the parts are slices.

    Raises:
      ValueError: the parts do not form the parameter.
    """
    lead, outs = len(layout.lead), len(layout.shape_out)
    axis = 0
    for kind, array in parts:
        shape = tuple(array.shape)
        whole = (*layout.lead, *layout.shape_out)
        row = layout.row // FORMATS[kind].values * FORMATS[kind].bytes
        if len(shape) != len(whole) + 1 or shape[-1] != row or layout.row % FORMATS[kind].values:
            raise ValueError(
                f"hold {module} in {kind} with shape {shape}, but this model has {whole} rows of"
                f" {layout.row}"
            )
        different = [i for i in range(outs) if shape[lead + i] != layout.shape_out[i]]
        if shape[:lead] != layout.lead or len(different) > 1:
            raise ValueError(
                f"hold {module} in {kind} with shape {shape}, but this model has {whole} rows of"
                f" {layout.row}"
            )
        axis = different[0] if different else axis
    sizes = [array.shape[lead + axis] for _, array in parts] if outs else [1] * len(parts)
    same = all(
        array.shape[lead + i] == layout.shape_out[i]
        for _, array in parts
        for i in range(outs)
        if i != axis
    )
    if not same or sum(sizes) != (layout.shape_out[axis] if outs else 1):
        raise ValueError(
            f"hold parts of {module} that do not form the outputs {layout.shape_out} of this model"
        )
    return axis


def _after(x: jax.Array, raw: jax.Array) -> jax.Array:
    """Returns the packed weights, made dependent on the inputs that they multiply.

    Otherwise XLA would convert the weights of all layers first, and keep all of them in float32. An
    optimization barrier does not prevent this, because it is removed before the operations are
    scheduled. XLA does not know that the added number is 0.
    """
    bits = lax.bitcast_convert_type(x.reshape(-1)[0].astype(jnp.float32), jnp.uint32)
    return raw + (bits >> 31 >> 1).astype(jnp.uint8)


class PackedParts(nnx.Module):
    """The parts of a packed parameter; `kinds` are their formats.

    With `native`, products of few rows run in the native kernels, which must be loaded, and for
    products of many rows in float32 these convert the weights. With `bfloat16` too, products of
    more than 16 rows are in bfloat16.
    """

    def __init__(self, parts: Iterable[Part]):
        self.native = self.bfloat16 = False
        self.parts = nnx.List([nnx.Dict({kind: nnx.Param(array)}) for kind, array in parts])

    def arrays(self) -> list[tuple[str, jax.Array]]:
        """Returns the format and the array of each part."""
        return [(kind, raw[...]) for part in self.parts for kind, raw in part.items()]

    def multiply(self, rows_RI: jax.Array, raw: jax.Array, kind: str) -> jax.Array:
        """Returns the products of rows with a part `[*outputs, bytes]`: float32 `[R, *outputs]`."""
        raw_OB = raw.reshape(-1, raw.shape[-1])
        if self.bfloat16 and len(rows_RI) > MAX_NATIVE_ROWS:
            rows_RI = rows_RI.astype(jnp.bfloat16)
        limit = (
            MAX_NATIVE_BFLOAT16_ROWS if rows_RI.dtype == jnp.bfloat16 else MAX_NATIVE_FLOAT32_ROWS
        )
        if self.native and len(rows_RI) <= limit:
            y_RO = matmul(rows_RI, raw_OB, kind, native=True)
        elif self.native and rows_RI.dtype == jnp.float32:
            y_RO = matmul(rows_RI, native_unpack(kind, raw_OB, rows_RI[0, 0]))
        else:
            y_RO = matmul(rows_RI, _after(rows_RI, raw_OB), kind)
        return y_RO.reshape(len(rows_RI), *raw.shape[:-1])

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for part in self.parts for kind in part)


class PackedLinear(PackedParts):
    """A `Linear` with packed weights."""

    def __init__(self, linear: Linear, parts: Sequence[Part], axis: int):
        super().__init__(parts)
        self.shape_in = linear.shape_in
        self.shape_out = linear.shape_out
        self.axis = axis
        self.dtype = linear.dtype
        self.out_dtype = linear.out_dtype
        self.bias = linear.bias
        # The order of the first input axis that the weights have.
        self.input_order: tuple[int, ...] | None = None

    def __call__(
        self, x: jax.Array, reduce: Callable[[jax.Array], jax.Array] = lambda y: y
    ) -> jax.Array:
        batch_shape = x.shape[: x.ndim - len(self.shape_in)]
        if self.input_order is not None:
            x = jnp.take(x, jnp.asarray(self.input_order), axis=len(batch_shape))
        rows_RI = x.reshape(math.prod(batch_shape), -1).astype(jnp.float32)
        parts = [self.multiply(rows_RI, raw, kind) for kind, raw in self.arrays()]
        y = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1 + self.axis)
        return add_bias(
            reduce(y.reshape(*batch_shape, *self.shape_out).astype(self.out_dtype)), self.bias
        )

    def permute_heads(self, index_K: jax.Array, by_output: bool) -> "PackedLinear":
        """Returns the projection with its first output axis (`by_output`) or first input axis, the
        key heads, in this order.
        """
        linear: PackedLinear = nnx.clone(self)
        if not by_output:
            old = np.asarray(
                self.input_order if self.input_order is not None else np.arange(len(index_K))
            )
            linear.input_order = tuple(int(i) for i in np.argsort(np.asarray(index_K))[old])
            return linear
        if self.axis == 0 and len(self.parts) > 1:
            raise ValueError("the parts are slices along the axis of the heads")
        linear.parts = nnx.List(
            [
                nnx.Dict({kind: nnx.Param(jnp.take(raw, index_K, axis=0))})
                for kind, raw in self.arrays()
            ]
        )
        if linear.bias is not None:
            linear.bias = nnx.Param(linear.bias[...][index_K])
        return linear

    def unpack(self) -> Linear:
        """Returns a `Linear` with float32 weights."""
        kernel = unpack_parts(self.arrays(), Layout((), self.shape_in, self.shape_out), self.axis)
        if self.input_order is not None:
            kernel = (
                jnp.zeros_like(kernel).at[jnp.argsort(jnp.asarray(self.input_order))].set(kernel)
            )
        return linear_with_kernel(self, kernel)


class PackedExperts(PackedParts):
    """An `ExpertLinear` with packed weights."""

    def __init__(self, linear: ExpertLinear, parts: Sequence[Part], axis: int):
        super().__init__(parts)
        self.experts, self.size_in = linear.kernel.shape[:2]
        self.shape_out = linear.shape_out
        self.axis = axis
        self.dtype = linear.dtype
        self.platform = linear.platform
        self.bias = linear.bias

    def __call__(self, x_MI: jax.Array, rows: ExpertRows) -> jax.Array:
        x_MI = x_MI.astype(jnp.float32)
        outputs = []
        for kind, raw in self.arrays():
            y_MO = self._product(x_MI, raw.reshape(self.experts, -1, raw.shape[-1]), kind, rows)
            outputs.append(y_MO.reshape(len(x_MI), *raw.shape[1:-1]))
        return jnp.concatenate(outputs, axis=1 + self.axis).astype(self.dtype)

    def _product(
        self, x_MI: jax.Array, raw_EOB: jax.Array, kind: str, rows: ExpertRows
    ) -> jax.Array:
        if len(x_MI) <= min(MAX_MATVEC_ROWS, self.experts):
            chosen = [
                lax.dynamic_index_in_dim(raw_EOB, expert, keepdims=False)
                for expert in rows.expert_M
            ]
            return jnp.concatenate(
                [self.multiply(x[None], raw, kind) for x, raw in zip(x_MI, chosen, strict=True)]
            )
        return unpacking_matmul(
            x_MI, raw_EOB, raw_EOB.shape[1], rows.sizes_E, lambda raw_OB: unpack(kind, raw_OB).T
        )

    def unpack(self) -> ExpertLinear:
        """Returns an `ExpertLinear` with float32 weights."""
        kernel = unpack_parts(
            self.arrays(), Layout((self.experts,), (self.size_in,), self.shape_out), self.axis
        )
        return experts_with_kernel(self, kernel)


class PackedTable(PackedParts):
    """A packed embedding table: one row of blocks per token, `[V, bytes]`. It may also be the
    output layer.
    """

    def __init__(self, shape: tuple[int, ...], parts: Sequence[Part]):
        super().__init__(parts)
        self.shape = shape

    def rows(self, tokens: jax.Array) -> jax.Array:
        """Returns the embeddings of tokens in float32."""
        ((kind, raw_VB),) = self.arrays()
        return unpack(kind, raw_VB[tokens]).reshape(*tokens.shape, *self.shape[1:])

    def project(self, x: jax.Array) -> jax.Array:
        """Returns the dot products of x `[…, D]` with the rows: float32 `[…, V]`."""
        ((kind, raw_VB),) = self.arrays()
        return self.multiply(x.reshape(-1, x.shape[-1]).astype(jnp.float32), raw_VB, kind).reshape(
            *x.shape[:-1], -1
        )

    def unpack(self) -> nnx.Param:
        """Returns the table in float32."""
        return nnx.Param(unpack_parts(self.arrays(), Layout(self.shape[:1], self.shape[1:], ()), 0))


PACKED = (PackedLinear, PackedExperts, PackedTable)


def look_up(table: Any, tokens: jax.Array) -> jax.Array:
    """Returns the rows of a table: a parameter, a `PackedTable` or an `Int8Table`."""
    return table[...][tokens] if isinstance(table, nnx.Variable) else table.rows(tokens)


def unpack_parts(parts: Sequence[tuple[str, jax.Array]], layout: Layout, axis: int) -> jax.Array:
    """Returns the float32 parameter `[*lead, *shape_in, *shape_out]`."""
    lead, outs = len(layout.lead), len(layout.shape_out)
    rows = [unpack(kind, raw) for kind, raw in parts]
    whole = rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=lead + axis)
    order = (*range(lead), lead + outs, *range(lead, lead + outs))
    return whole.transpose(order).reshape(layout.shape)


def is_packed(model: nnx.Module) -> bool:
    """Returns whether a model has packed weights."""
    return any(isinstance(node, PackedParts) for _, node in nnx.iter_graph(model))


def use_native_kernels(model: nnx.Module, native: bool, bfloat16: bool) -> None:
    """Selects the implementation of products with packed weights, in place."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, PackedParts):
            node.native = native
            node.bfloat16 = bfloat16


def packed_kinds(model: nnx.Module) -> dict[str, int]:
    """Returns the bytes of the packed weights by format."""
    sizes: dict[str, int] = {}
    for _, node in nnx.iter_graph(model):
        if isinstance(node, PackedParts):
            for kind, raw in node.arrays():
                sizes[kind] = sizes.get(kind, 0) + raw.size
    return dict(sorted(sizes.items(), key=lambda pair: -pair[1]))


def parameter_count(model: nnx.Module) -> int:
    """Returns the number of weights of a model, packed ones included."""
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    packed = packed_kinds(model)
    return count + sum(
        size // FORMATS[kind].bytes * FORMATS[kind].values - size for kind, size in packed.items()
    )


def packable_layouts(model: nnx.Module) -> dict[str, Layout]:
    """Returns the layout of every parameter of a plain model that can be packed, by path."""
    found = {}
    for path, node in nnx.iter_graph(model):
        name = "/".join(map(str, path))
        if isinstance(node, Linear):
            found[f"{name}/kernel"] = Layout((), node.shape_in, node.shape_out)
        elif isinstance(node, ExpertLinear):
            E, I = node.kernel.shape[:2]  # noqa: E741
            found[f"{name}/kernel"] = Layout((E,), (I,), node.shape_out)
    for name, table in tables(model).items():
        found[name] = Layout(table.shape[:1], table.shape[1:], ())
    return found


def tables(model: Any) -> dict[str, Any]:
    """Returns the embedding tables of a model by path."""
    return {"embed": model.embed} | (
        {} if model.per_layer is None else {"per_layer/embed": model.per_layer.embed}
    )


def pack_modules(model: Any, packed: Mapping[str, Any]) -> None:
    """Replaces modules of a model in place by packed ones.

    Args:
      packed: the arrays or shapes of the parts, by their name in a file.

    Raises:
      ValueError: a part does not fit the model.
    """
    layouts = packable_layouts(model)
    modules = {"/".join(map(str, path)): node for path, node in nnx.iter_graph(model)}
    for module, parts in group_parts(packed).items():
        layout = layouts.get(module, layouts.get(f"{module}/kernel"))
        if layout is None:
            raise ValueError(
                f"hold {escape_name(module)} in packed blocks, which this model does not have"
            )
        axis = check_parts(module, parts, layout)
        owner, _, name = module.rpartition("/")
        old = getattr(modules[owner], name)
        if isinstance(old, (TernaryLinear, TernaryExpertLinear)):
            raise ValueError(
                f"hold {escape_name(module)} in packed blocks, which"
                " model.projections: ternary does not support"
            )
        new: Any
        if module in layouts:
            new = PackedTable((*layout.lead, *layout.shape_in), parts)
        else:
            new = (PackedLinear if isinstance(old, Linear) else PackedExperts)(old, parts, axis)
        setattr(modules[owner], name, new)


def unpack_modules(model: Any) -> None:
    """Replaces the packed modules of a model in place by plain ones with float32 weights."""
    owners = [
        node
        for _, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Module) and not isinstance(node, PackedParts)
    ]
    for owner in owners:
        for name, part in list(vars(owner).items()):
            if isinstance(part, PackedParts):
                setattr(owner, name, part.unpack())  # type: ignore[attr-defined]


def widen(parts: Sequence[tuple[str, np.ndarray]], layout: Layout, axis: int) -> np.ndarray:
    """Returns `unpack_parts` as a NumPy array."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return np.asarray(
            unpack_parts([(kind, jnp.asarray(raw)) for kind, raw in parts], layout, axis)
        )
