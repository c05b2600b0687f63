"""Quantized matrices in the formats of the library compressed-tensors (`compressors/`)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dantinox.files import UserError, escape_name, quote
from dantinox.interop.hf.quantization_options import block_size, check_options, integer_option
from dantinox.interop.hf.quantized_matrices import (
    E2M1,
    FLOAT8,
    FLOATS,
    Dequantized,
    apply_scales,
    check_scalar,
    check_stored,
    float_scale,
    group_numbers,
    module_names,
    scale_block,
    scaled_matrix,
    stored_tensor,
    unpack_nibbles,
    unpack_words,
)
from dantinox.interop.source import LazyArrays, Tensor

# The formats, strategies and ignored options of the library compressed-tensors.
CT_FORMATS = (
    "int-quantized", "float-quantized", "naive-quantized", "pack-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision", "dense",
)  # fmt: skip
CT_STRATEGIES = tuple("tensor channel group block tensor_group".split())  # noqa: SIM905, one of them is also a mesh axis
CT_IGNORED = (
    "symmetric", "group_size", "block_structure", "dynamic", "actorder", "observer",
    "observer_kwargs", "scale_dtype", "zp_dtype",
)  # fmt: skip


def find_compressed_tensors(
    options: Mapping[str, Any], tensors: LazyArrays
) -> dict[str, Dequantized]:
    """Finds quantized modules. The names and dtypes of a module's tensors determine its format."""
    widths, block = _schemes(options)
    found = {}
    for module in module_names(tensors, ".weight_scale"):
        name = f"{module}.weight"
        packed = f"{module}.weight_packed"
        if packed not in tensors.tensors:
            zero = f"{module}.weight_zero_point"
            optional_zero = zero if zero in tensors.tensors else None
            dtypes = ("int8", *FLOAT8)
            found[name] = scaled_matrix(
                tensors, name, f"{name}_scale", dtypes, block, optional_zero
            )
        elif tensors.tensors[packed].dtype == "uint8":
            found[name] = _packed_fp4(tensors, module)
        else:
            found[name] = _packed_integers(tensors, module, widths)
    return found


def _schemes(options: Mapping[str, Any]) -> tuple[set[int], tuple[int, int] | None]:
    """Returns the bit widths and the block shape that the groups of a compressed-tensors config
    specify.
    """
    groups = options.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise UserError(
            f"config.json has config_groups: {quote(groups)} in quantization_config, expected an"
            " object of schemes"
        )
    widths: set[int] = set()
    blocks: set[tuple[int, int] | None] = set()
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(group.get("weights") or {}, dict):
            raise UserError(
                f"config.json has the scheme {escape_name(name)}: {quote(group)}, expected an"
                " object with weights"
            )
        check_options(
            {"format": group.get("format")},
            {"format": CT_FORMATS},
            (),
            f"the scheme {escape_name(name)}",
        )
        weights = group.get("weights") or {}
        where = f"the weights of the scheme {escape_name(name)}"
        check_options(
            weights,
            {"num_bits": (), "type": ("int", "float"), "strategy": CT_STRATEGIES},
            CT_IGNORED,
            where,
        )
        if weights:
            widths.add(integer_option(weights, "num_bits"))
            blocks.add(block_size(weights.get("block_structure"), "block_structure"))
    blocks.discard(None)
    if len(blocks) > 1:
        raise UserError(
            "config.json has schemes with several values of block_structure; only one is supported"
        )
    return widths, next(iter(blocks), None)


def _packed_integers(tensors: LazyArrays, module: str, widths: set[int]) -> Dequantized:
    """Returns a matrix of offset integers. These are packed into int32 words along columns, their
    zero points along rows.
    """
    packed = f"{module}.weight_packed"
    scale = f"{module}.weight_scale"
    size = f"{module}.weight_shape"
    zero = f"{module}.weight_zero_point"  # optional
    order = f"{module}.weight_g_idx"  # optional, the group of each column
    words = stored_tensor(tensors, packed, scale, ("int32",)).shape
    grid = stored_tensor(tensors, scale, packed, FLOATS).shape
    check_stored(tensors, size, packed, ("int64", "int32"), (2,))
    shape = tuple(int(length) for length in tensors[size])
    rows, columns = shape
    fits = [
        bits for bits in sorted(widths) if bits <= 8 and words == (rows, -(-columns * bits // 32))
    ]
    if min(shape) < 1 or len(fits) != 1:
        raise UserError(
            f"the checkpoint has {escape_name(packed)} of shape {list(words)} for a matrix of shape"
            f" {list(shape)} and {' or '.join(map(str, sorted(widths)))} bits"
        )
    bits = fits[0]
    grid = (1, 1) if grid in ((), (1,)) else grid
    stored = (packed, scale, size, *(part for part in (zero, order) if part in tensors.tensors))
    block_shape = scale_block(packed, shape, grid)
    if order in tensors.tensors:
        check_stored(tensors, order, packed, ("int32", "int64"), (columns,))
    if zero in tensors.tensors:
        check_stored(tensors, zero, packed, ("int32",), (-(-grid[0] * bits // 32), grid[1]))

    def make() -> np.ndarray:
        zeros: Any = 1 << (bits - 1)
        if zero in tensors.tensors:
            zeros = unpack_words(tensors[zero].T, bits, grid[0]).T
        groups = group_numbers(tensors, order, grid[1]) if order in tensors.tensors else None
        factors = tensors[scale].astype(np.float32).reshape(grid)
        return apply_scales(
            unpack_words(tensors[packed], bits, columns), factors, block_shape, zeros, groups
        )

    return Dequantized(Tensor(shape, "float32"), stored, make)


def _packed_fp4(tensors: LazyArrays, module: str) -> Dequantized:
    """Returns a matrix of 4-bit floats. The scales are E4M3 numbers divided by a global scale, or
    E8M0 numbers.
    """
    packed = f"{module}.weight_packed"
    scale = f"{module}.weight_scale"
    global_scale = f"{module}.weight_global_scale"
    codes = stored_tensor(tensors, packed, scale, ("uint8",)).shape
    scales = stored_tensor(tensors, scale, packed, ("float8_e4m3fn", "float8_e8m0fnu", "uint8"))
    if len(codes) != 2:
        raise UserError(
            f"the checkpoint has {escape_name(packed)} of shape {list(codes)}, expected two axes"
        )
    shape = (codes[0], 2 * codes[1])
    block_shape = scale_block(packed, shape, scales.shape)
    has_global = scales.dtype == "float8_e4m3fn"
    if has_global:
        check_scalar(tensors, global_scale, packed)

    def make() -> np.ndarray:
        factors = float_scale(tensors[scale])
        if has_global:
            factors = factors / tensors[global_scale].astype(np.float32).reshape(())
        return apply_scales(unpack_nibbles(tensors[packed]), factors, block_shape, codebook=E2M1)

    return Dequantized(
        Tensor(shape, "float32"), (packed, scale, *([global_scale] if has_global else [])), make
    )
