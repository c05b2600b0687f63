"""Reads quantized Hugging Face checkpoints: each tensor is dequantized on access.

The key `quantization_config` of `config.json` names the method. Each method stores a matrix as
several tensors. The formats are defined by Transformers for fp8, mxfp4 and bitnet
(`integrations/finegrained_fp8.py`, `mxfp4.py`, `bitnet.py`), by the library compressed-tensors
(`compressors/`), by AutoAWQ for AWQ (`gemm`), and by AutoGPTQ for GPTQ.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dantinox.files import UserError, escape_name, quote
from dantinox.interop.hf.hf_family import BITNET
from dantinox.interop.hf.quantized_matrices import (
    E2M1,
    FLOAT8,
    FLOATS,
    Dequantized,
    apply_scales,
    check_scalar,
    check_shape,
    check_stored,
    float_scale,
    group_numbers,
    module_names,
    scale_block,
    stored_tensor,
    unpack_nibbles,
    unpack_words,
)
from dantinox.interop.source import LazyArrays, Tensor
from dantinox.model.ternary import MIN_SCALE, magnitude_with_scale

# Words pack eight outputs in another order: for each of them, its position in the word.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# Suffixes of activation and cache scales, which are not imported.
ACTIVATION_SCALES = (
    ".input_scale", ".input_scale_ub", ".input_zero_point", ".input_global_scale",
    ".activation_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale",
)  # fmt: skip


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
# Options of several methods, for the programs that quantize or run a model.
TOOLS = ("modules_to_not_convert", "ignored_layers", "dequantize")


class Method(NamedTuple):
    """A quantization method.

    Attributes:
      find: a function that returns all quantized tensors of a checkpoint, by their names in an
        unquantized checkpoint.
      supported: maps each option that changes the weights to its supported values; () means that
        `find` checks the value. An option with the value null is treated as absent.
      ignored: options that do not change the weights.
      result: the `quantization_config` of the dequantized checkpoint, if its model still quantizes
        weights or inputs.
    """

    find: Callable[[Mapping[str, Any], LazyArrays], dict[str, Dequantized]]
    supported: Mapping[str, tuple[Any, ...]]
    ignored: tuple[str, ...]
    result: Mapping[str, Any] | None = None


def dequantize_checkpoint(
    config: Mapping[str, Any], tensors: LazyArrays
) -> tuple[dict[str, Any], LazyArrays]:
    """Returns `config.json` without `quantization_config`, and tensors with the names of an
    unquantized checkpoint.

    Ternary checkpoints keep a `quantization_config`, which says that the model itself quantizes its
    weights. Each tensor is dequantized when it is read. The result is float32, but bfloat16 for
    mxfp4, whose values bfloat16 represents exactly.

    Raises:
      UserError: the method or an option is not supported, or the tensors are inconsistent; the
        message names the cause.
    """
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    options = config.get("quantization_config")
    if options is None:
        return plain, tensors
    if not isinstance(options, dict):
        raise UserError(
            f"config.json has quantization_config: {quote(options)}, expected an object"
        )
    name = options.get("quant_method")
    if not isinstance(name, str) or name not in METHODS:
        raise UserError(
            f"config.json has quantization_config.quant_method: {quote(name)}, expected one of"
            f" {', '.join(METHODS)}"
        )
    method = METHODS[name]
    _check_options(options, method.supported, method.ignored, f"quantization_config of {name}")
    found = method.find(options, tensors)
    if method.result is not None:
        plain["quantization_config"] = dict(method.result)
    if not found and not _is_unpacked_bitnet(options):
        raise UserError(
            f"config.json has quantization_config.quant_method: {name},"
            " but no tensor has this format"
        )
    used = {stored for entry in found.values() for stored in entry.stored}
    rest = {
        key: tensor
        for key, tensor in tensors.tensors.items()
        if key not in used and not key.endswith(ACTIVATION_SCALES)
    }
    if duplicates := found.keys() & rest.keys():
        raise UserError(
            f"the checkpoint has both a quantized and an unquantized {escape_name(min(duplicates))}"
        )
    kinds = rest | {key: entry.tensor for key, entry in found.items()}
    if any(entry.tensor.dtype == "float32" for entry in found.values()):
        plain |= {key: "float32" for key in ("dtype", "torch_dtype") if plain.get(key) is not None}

    def make(key: str) -> np.ndarray:
        # NaN and Inf are rejected when the parameter is converted.
        with np.errstate(over="ignore", invalid="ignore"):
            return found[key].make() if key in found else tensors[key]

    return plain, LazyArrays(kinds, make)


def _check_options(
    options: Mapping[str, Any],
    supported: Mapping[str, tuple[Any, ...]],
    ignored: Sequence[str],
    where: str,
) -> None:
    """Raises a `UserError` for the first option that is unknown or has an unsupported value."""
    for key, value in options.items():
        if value is None or key in ignored or key == "quant_method":
            continue
        if key not in supported:
            known = ", ".join((*supported, *ignored))
            raise UserError(
                f"config.json has the unknown option {escape_name(key)} in {where}, expected one of"
                f" {known}"
            )
        if supported[key] and (type(value), value) not in [
            (type(allowed), allowed) for allowed in supported[key]
        ]:
            allowed = ", ".join(map(quote, supported[key]))
            raise UserError(
                f"config.json has {escape_name(key)}: {quote(value)} in {where}, expected one of"
                f" {allowed}"
            )


def _integer_option(
    options: Mapping[str, Any], key: str, default: int | None = None, least: int = 1
) -> int:
    value = options.get(key)
    if value is None:
        value = default
    if type(value) is not int or not (least <= value <= 1 << 20):
        raise UserError(
            f"config.json has {key}: {quote(value)} in quantization_config, expected a number of at"
            f" least {least}"
        )
    return value


def _fp8(options: Mapping[str, Any], tensors: LazyArrays) -> dict[str, Dequantized]:
    """Finds 8-bit float matrices. The scales of a matrix `X` are in `X_scale_inv` or `X_scale`."""
    block = _block_size(options.get("weight_block_size"), "weight_block_size")
    found = {}
    for name, tensor in tensors.tensors.items():
        scales = [f"{name}_scale_inv", f"{name}_scale"]
        scale = next((scale for scale in scales if scale in tensors.tensors), None)
        if tensor.dtype not in FLOAT8 and scale is None:
            continue
        # Without a scale, the error message names the missing tensor.
        found[name] = _scaled_matrix(tensors, name, scale or f"{name}_scale_inv", FLOAT8, block)
    return found


def _block_size(block: Any, key: str) -> tuple[int, int] | None:
    """Returns the rows and columns of a block, the value of the option `key`."""
    if block is None:
        return None
    if (
        not isinstance(block, list)
        or len(block) != 2
        or any(type(size) is not int or size < 1 for size in block)
    ):
        raise UserError(
            f"config.json has {key}: {quote(block)} in quantization_config,"
            " expected two numbers of at least 1"
        )
    return block[0], block[1]


def _scaled_matrix(
    tensors: LazyArrays,
    name: str,
    scale: str,
    dtypes: tuple[str, ...],
    block: tuple[int, int] | None,
    zero: str | None = None,
) -> Dequantized:
    """Returns a matrix, or a stack of matrices (one per expert), that is stored unpacked with
    scales and zero points.
    """
    weight = stored_tensor(tensors, name, scale, dtypes)
    scales = stored_tensor(tensors, scale, name, (*FLOATS, "float8_e8m0fnu", "uint8"))
    if len(weight.shape) not in (2, 3):
        raise UserError(
            f"the checkpoint has {escape_name(name)} of shape {list(weight.shape)},"
            " expected two or three axes"
        )
    grid = scales.shape
    if grid in ((), (1,)):
        grid = (1, 1)
    elif len(grid) == 1:
        grid = (*grid, 1)
    if len(weight.shape) == 3 and grid[0] != weight.shape[0]:
        check_shape(scale, scales.shape, (weight.shape[0], *scales.shape[1:]))
    block_shape = scale_block(name, weight.shape[-2:], grid[len(weight.shape) - 2 :], block)
    if zero:
        check_stored(tensors, zero, name, ("int8", "uint8"), scales.shape)

    def make() -> np.ndarray:
        values = tensors[name]
        factors = float_scale(tensors[scale]).reshape(grid)
        zeros = tensors[zero].reshape(grid) if zero else None
        if values.ndim == 2:
            return apply_scales(values, factors, block_shape, zeros)
        experts = range(len(values))
        return np.stack(
            [
                apply_scales(
                    values[e], factors[e], block_shape, None if zeros is None else zeros[e]
                )
                for e in experts
            ]
        )

    return Dequantized(
        Tensor(weight.shape, "float32"), (name, scale, *([zero] if zero else [])), make
    )


def _compressed_tensors(options: Mapping[str, Any], tensors: LazyArrays) -> dict[str, Dequantized]:
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
            found[name] = _scaled_matrix(
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
        _check_options(
            {"format": group.get("format")},
            {"format": CT_FORMATS},
            (),
            f"the scheme {escape_name(name)}",
        )
        weights = group.get("weights") or {}
        where = f"the weights of the scheme {escape_name(name)}"
        _check_options(
            weights,
            {"num_bits": (), "type": ("int", "float"), "strategy": CT_STRATEGIES},
            CT_IGNORED,
            where,
        )
        if weights:
            widths.add(_integer_option(weights, "num_bits"))
            blocks.add(_block_size(weights.get("block_structure"), "block_structure"))
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


def _mxfp4(options: Mapping[str, Any], tensors: LazyArrays) -> dict[str, Dequantized]:
    """Finds tensors `X` `[experts, columns, rows]`.

    `X` is stored as two arrays of bytes: `X_blocks` `[experts, rows, blocks, 16]` and `X_scales`
    `[experts, rows, blocks]`.
    """
    found = {}
    for name in module_names(tensors, "_blocks"):
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        codes = stored_tensor(tensors, blocks, scales, ("uint8",)).shape
        if len(codes) != 4 or codes[3] != 16:
            raise UserError(
                f"the checkpoint has {escape_name(blocks)} of shape {list(codes)}, expected four"
                " axes, the last of 16"
            )
        check_stored(tensors, scales, blocks, ("uint8",), codes[:3])
        experts, rows = codes[:2]
        columns = 2 * codes[2] * codes[3]
        tensor = Tensor((experts, columns, rows), "bfloat16")
        found[name] = Dequantized(
            tensor, (blocks, scales), partial(_make_mxfp4, tensors, blocks, scales, tensor.shape)
        )
    return found


def _make_mxfp4(
    tensors: LazyArrays, blocks: str, scales: str, shape: tuple[int, ...]
) -> np.ndarray:
    """Returns a tensor of this shape, one expert after another; bfloat16 represents its values
    exactly.
    """
    result = np.empty(shape, ml_dtypes.bfloat16)
    for codes, exponents, matrix in zip(tensors[blocks], tensors[scales], result, strict=True):
        values = E2M1[unpack_nibbles(codes)] * float_scale(exponents)[..., None]
        matrix[...] = values.reshape(len(codes), -1).T
    return result


def _is_unpacked_bitnet(options: Mapping[str, Any]) -> bool:
    """Returns whether the weights of ternary projections are stored as floats, which the model
    itself quantizes.
    """
    return all(options.get(key) == value for key, value in BITNET.items())


def _bitnet(options: Mapping[str, Any], tensors: LazyArrays) -> dict[str, Dequantized]:
    """Finds ternary matrices, if they are packed: uint8 `[outputs / 4, inputs]`, with output i + n
    · outputs / 4 in bits 2n.

    The two bits are the weight + 1. The linear class `autobitlinear` multiplies by `weight_scale`,
    `bitlinear` divides by it.
    """
    if _is_unpacked_bitnet(options):
        return {}
    divides = options.get("linear_class") in (None, "bitlinear")
    found = {}
    for module in module_names(tensors, ".weight_scale"):
        name, scale = f"{module}.weight", f"{module}.weight_scale"
        rows = stored_tensor(tensors, name, scale, ("uint8",)).shape
        if not module.endswith("_proj"):  # the model computes no ternary weights there
            which = "which only projections can have"
            raise UserError(
                f"the checkpoint has {escape_name(name)} as packed ternary weights, {which}"
            )
        if len(rows) != 2:
            raise UserError(
                f"the checkpoint has {escape_name(name)} of shape {list(rows)}, expected two axes"
            )
        check_scalar(tensors, scale, name)
        tensor = Tensor((4 * rows[0], rows[1]), "float32")
        found[name] = Dequantized(
            tensor, (name, scale), partial(_unpack_ternary, tensors, name, scale, divides)
        )
    return found


def _unpack_ternary(tensors: LazyArrays, name: str, scale: str, divides: bool) -> np.ndarray:
    """Returns float weights that `dantinox.model.ternary` quantizes to the packed weights and their
    scale.
    """
    factor = float(tensors[scale].astype(np.float64).reshape(()))
    factor = 1 / factor if divides and factor else factor
    if not MIN_SCALE <= factor < np.inf:
        raise UserError(
            f"the checkpoint has the scale {factor:g} in {escape_name(scale)}, expected at least"
            f" {MIN_SCALE:g}"
        )
    packed = tensors[name]
    codes = np.concatenate([packed >> np.uint8(shift) & np.uint8(3) for shift in (0, 2, 4, 6)])
    if (codes == 3).any():
        raise UserError(
            f"the checkpoint has {escape_name(name)} with the bits"
            " 11, which are not a ternary weight"
        )
    magnitude = magnitude_with_scale(factor, int(np.count_nonzero(codes != 1)), codes.size)
    return np.array([-magnitude, 0, magnitude], np.float32)[codes]


class _GroupedSizes(NamedTuple):
    """The sizes of a matrix that is stored as `[inputs, outputs]`, with scales for every `group`
    inputs.
    """

    inputs: int
    outputs: int
    bits: int
    group: int

    @property
    def groups(self) -> int:
        return -(-self.inputs // self.group)


def _grouped_sizes(
    tensors: LazyArrays, module: str, options: Mapping[str, Any], bits: int, along_inputs: bool
) -> _GroupedSizes:
    """Returns the sizes of a matrix from the shapes of `qweight`, `qzeros` and `scales`.

    Args:
      along_inputs: whether a word of `qweight` packs several inputs of one output. If false, it
        packs several outputs of one input.
    """
    qweight = f"{module}.qweight"
    scales = f"{module}.scales"
    words = stored_tensor(tensors, qweight, scales, ("int32",)).shape
    if len(words) != 2 or min(words) < 1:
        raise UserError(
            f"the checkpoint has {escape_name(qweight)} of shape {list(words)}, expected two axes"
        )
    inputs = words[0] * 32 // bits if along_inputs else words[0]
    outputs = words[1] if along_inputs else words[1] * 32 // bits
    group = _integer_option(options, "group_size", options.get("q_group_size", 128), least=-1)
    found = _GroupedSizes(inputs, outputs, bits, group if group > 0 else inputs)
    zero_words = -(-outputs * bits // 32)
    check_stored(tensors, f"{module}.qzeros", qweight, ("int32",), (found.groups, zero_words))
    check_stored(tensors, scales, qweight, FLOATS, (found.groups, outputs))
    return found


def _awq(options: Mapping[str, Any], tensors: LazyArrays) -> dict[str, Dequantized]:
    """Finds AWQ matrices. Each word of `qweight` `[inputs, outputs / 8]` and `qzeros` holds eight
    outputs, see `AWQ_ORDER`.
    """

    def make(module: str, sizes: _GroupedSizes) -> np.ndarray:
        def unpack(part: str) -> np.ndarray:
            fields = unpack_words(tensors[f"{module}.{part}"], sizes.bits, sizes.outputs)
            return fields.reshape(len(fields), -1, 8)[..., AWQ_ORDER].reshape(len(fields), -1).T

        scales = tensors[f"{module}.scales"].astype(np.float32)
        return apply_scales(unpack("qweight"), scales.T, (1, sizes.group), unpack("qzeros"))

    found = {}
    for module in module_names(tensors, ".qweight"):
        sizes = _grouped_sizes(tensors, module, options, 4, along_inputs=False)
        stored = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
        tensor = Tensor((sizes.outputs, sizes.inputs), "float32")
        found[f"{module}.weight"] = Dequantized(tensor, stored, partial(make, module, sizes))
    return found


def _gptq(options: Mapping[str, Any], tensors: LazyArrays) -> dict[str, Dequantized]:
    """Finds GPTQ matrices: `qweight` `[inputs · bits / 32, outputs]` is packed along the inputs,
    `qzeros` along the outputs.

    The first version of the format stores each zero point z as z − 1, modulo 2^bits.
    """
    subtracted = 0 if "gptq_v2" in (options.get("checkpoint_format"), options.get("format")) else 1

    def make(module: str, sizes: _GroupedSizes) -> np.ndarray:
        values = unpack_words(tensors[f"{module}.qweight"].T, sizes.bits, sizes.inputs)
        zeros = unpack_words(tensors[f"{module}.qzeros"], sizes.bits, sizes.outputs)
        zeros = (zeros + np.uint8(subtracted)) & np.uint8((1 << sizes.bits) - 1)
        scales = tensors[f"{module}.scales"].astype(np.float32)
        order = f"{module}.g_idx"
        groups = group_numbers(tensors, order, sizes.groups) if order in tensors.tensors else None
        return apply_scales(values, scales.T, (1, sizes.group), zeros.T, groups)

    found = {}
    for module in module_names(tensors, ".qweight"):
        sizes = _grouped_sizes(
            tensors, module, options, _integer_option(options, "bits"), along_inputs=True
        )
        stored = [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")]
        order = f"{module}.g_idx"
        if order in tensors.tensors or options.get("desc_act"):
            check_stored(tensors, order, stored[0], ("int32", "int64"), (sizes.inputs,))
            stored.append(order)
        tensor = Tensor((sizes.outputs, sizes.inputs), "float32")
        found[f"{module}.weight"] = Dequantized(tensor, tuple(stored), partial(make, module, sizes))
    return found


METHODS = {
    "fp8": Method(
        _fp8,
        supported={"fmt": ("e4m3", "e5m2"), "weight_block_size": ()},
        ignored=(*TOOLS, "activation_scheme", "scale_fmt"),
    ),
    "fbgemm_fp8": Method(_fp8, supported={}, ignored=(*TOOLS, "activation_scale_ub")),
    "compressed-tensors": Method(
        _compressed_tensors,
        supported={
            "config_groups": (), "format": CT_FORMATS, "quantization_status": ("compressed",),
            "sparsity_config": ({},), "transform_config": ({},),
        },
        ignored=(
            "ignore", "kv_cache_scheme", "global_compression_ratio", "version", "run_compressed",
        ),
    ),
    "awq": Method(
        _awq,
        supported={
            "bits": (4,), "w_bit": (4,), "group_size": (), "q_group_size": (),
            "zero_point": (True,), "version": ("gemm", "GEMM"), "format": ("gemm", "GEMM"),
        },
        ignored=(
            *TOOLS, "backend", "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config",
        ),
    ),
    "gptq": Method(
        _gptq,
        supported={
            "bits": (2, 3, 4, 8), "group_size": (), "desc_act": (True, False),
            "checkpoint_format": ("gptq", "gptq_v2"), "format": ("gptq", "gptq_v2"),
            "pack_dtype": ("int32",), "dynamic": ({},), "is_marlin_format": (False,),
        },
        ignored=(
            *TOOLS, "sym", "damp_percent", "damp_auto_increment", "true_sequential",
            "static_groups", "act_group_aware", "lm_head", "meta", "model_name_or_path",
            "model_file_base_name", "tokenizer", "dataset", "backend", "max_input_length", "mse",
            "cache_block_outputs", "block_name_to_quantize", "module_name_preceding_first_block",
            "modules_in_block_to_quantize", "batch_size", "pad_token_id", "model_seqlen",
            "use_cuda_fp16", "use_exllama", "exllama_config", "disable_exllama",
        ),
    ),
    "mxfp4": Method(_mxfp4, supported={}, ignored=TOOLS),
    "bitnet": Method(
        _bitnet,
        supported={
            "linear_class": ("bitlinear", "autobitlinear"),
            "quantization_mode": ("offline", "online"), "use_rms_norm": (False,),
            "modules_to_not_convert": (["lm_head"],),
        },
        ignored=("rms_norm_eps",),
        result=BITNET,
    ),
}  # fmt: skip
