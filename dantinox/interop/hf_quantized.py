"""Quantized tensors of Hugging Face checkpoints, dequantized when they are read.

`config.json` names the method under `quantization_config`; each method stores a matrix as several tensors. Formats: fp8 and
mxfp4 as Transformers reads them (`integrations/finegrained_fp8.py`, `mxfp4.py`), compressed-tensors as its library does
(`compressors/`), AWQ's and GPTQ's as AutoAWQ (`gemm`) and AutoGPTQ write them. Products are rounded to float32 once.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dantinox.files import UserError, escape_name, quote
from dantinox.interop.source import LazyArrays, Tensor

CHUNK = 1 << 20  # values dequantized at once
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
FLOATS = ("float32", "bfloat16", "float16")
# The values of 4-bit floats (E2M1), by their code.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # in which 4 bits of a word the n-th of eight outputs lies
# Tensors of quantized activations and caches, which are not quantized here.
ACTIVATIONS = (
    ".input_scale", ".input_scale_ub", ".input_zero_point", ".input_global_scale", ".activation_scale", ".output_scale",
    ".k_scale", ".v_scale", ".q_scale",
)  # fmt: skip


class Dequantized(NamedTuple):
    """A tensor that is made of stored ones: its shape and dtype, the names of those, and what makes it."""

    tensor: Tensor
    stored: tuple[str, ...]
    make: Callable[[], np.ndarray]


class Method(NamedTuple):
    """A way to quantize.

    Attributes:
      find: all quantized tensors of a checkpoint, by the name that they have without quantization.
      only: options that change the numbers, and the values that are known; null counts as absent.
      unused: options that change no weight.
    """

    find: Callable[[Mapping[str, Any], LazyArrays], dict[str, Dequantized]]
    only: Mapping[str, tuple[Any, ...]]
    unused: tuple[str, ...]


def dequantize_checkpoint(config: Mapping[str, Any], tensors: LazyArrays) -> tuple[dict[str, Any], LazyArrays]:
    """A checkpoint without quantization: its `config.json` without `quantization_config`, and tensors by their normal names.

    Tensors are dequantized one by one when they are read, to float32, those of mxfp4 to bfloat16, which holds them exactly.

    Raises:
      UserError: the method or an option is unknown, or the tensors do not fit together; the sentence names it.
    """
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    options = config.get("quantization_config")
    if options is None:
        return plain, tensors
    if not isinstance(options, dict):
        raise UserError(f"config.json has quantization_config: {quote(options)}, expected an object")
    name = options.get("quant_method")
    if not isinstance(name, str) or name not in METHODS:
        given = f"quantization_config.quant_method: {quote(name)}"
        raise UserError(f"config.json has {given}; those read are {', '.join(METHODS)}")
    method = METHODS[name]
    _check_options(options, method.only, method.unused, f"quantization_config of {name}")
    found = method.find(options, tensors)
    if not found:
        raise UserError(f"config.json has quantization_config.quant_method: {name}, and no tensor is stored in this way")
    taken = {stored for entry in found.values() for stored in entry.stored}
    rest = {key: tensor for key, tensor in tensors.tensors.items() if key not in taken and not key.endswith(ACTIVATIONS)}
    if twice := found.keys() & rest.keys():
        raise UserError(f"the checkpoint has {escape_name(min(twice))} both quantized and not")
    kinds = rest | {key: entry.tensor for key, entry in found.items()}
    if any(entry.tensor.dtype == "float32" for entry in found.values()):
        plain |= {key: "float32" for key in ("dtype", "torch_dtype") if plain.get(key) is not None}

    def make(key: str) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused where it is used
            return found[key].make() if key in found else tensors[key]

    return plain, LazyArrays(kinds, make)


def _check_options(options: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]], unused: Sequence[str], where: str) -> None:
    """Raises on the first option that is unknown, or has an unknown value."""
    for key, value in options.items():
        if value is None or key in unused or key == "quant_method":
            continue
        if key not in only:
            known = ", ".join((*only, *unused))
            raise UserError(f"config.json has {escape_name(key)}: {quote(value)} in {where}; the options known are {known}")
        if only[key] and (type(value), value) not in [(type(allowed), allowed) for allowed in only[key]]:
            known = ", ".join(map(quote, only[key]))
            raise UserError(f"config.json has {escape_name(key)}: {quote(value)} in {where}; those known are {known}")


def _number(options: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    value = options.get(key)
    value = default if value is None else value
    if type(value) is not int or not (least <= value <= 1 << 20):
        raise UserError(f"config.json has {key}: {quote(value)} in quantization_config, expected a number of at least {least}")
    return value


def _part(tensors: LazyArrays, name: str, beside: str, dtypes: tuple[str, ...]) -> Tensor:
    """The description of a stored tensor, which must be there and have one of these dtypes."""
    if name not in tensors.tensors:
        raise UserError(f"the checkpoint has {escape_name(beside)} without {escape_name(name)}")
    tensor = tensors.tensors[name]
    if tensor.dtype not in dtypes:
        raise UserError(f"the checkpoint has {escape_name(name)} as {tensor.dtype}, expected {' or '.join(dtypes)}")
    return tensor


def _expect(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise UserError(f"the checkpoint has {escape_name(name)} of shape {list(found)}, expected {list(expected)}")


def _modules(tensors: LazyArrays, suffix: str) -> list[str]:
    return [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]


def _float_scale(scale: np.ndarray) -> np.ndarray:
    """Scales as float32; bytes are exponents of 2 with the bias 127 (E8M0)."""
    return (scale.view(ml_dtypes.float8_e8m0fnu) if scale.dtype == np.uint8 else scale).astype(np.float32)


def _unpack(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Fields of 1 to 8 bits that lie one behind the other in 32-bit words: `[rows, words]` → uint8 `[rows, count]`."""
    words = np.ascontiguousarray(words).view(np.uint32)
    position = np.arange(count, dtype=np.uint32) * np.uint32(bits)
    word, shift = position >> np.uint32(5), position & np.uint32(31)
    split = shift > 32 - bits  # a field that ends in the next word
    result = np.empty((len(words), count), np.uint8)
    step = max(1, CHUNK // max(count, 1))
    for start in range(0, len(words), step):
        part = words[start : start + step]
        fields = part[:, word] >> shift
        if split.any():
            fields[:, split] |= part[:, word[split] + 1] << (np.uint32(32) - shift[split])
        result[start : start + step] = fields & np.uint32((1 << bits) - 1)
    return result


def _blocks(name: str, shape: tuple[int, ...], grid: tuple[int, ...], block: tuple[int, int] | None = None) -> tuple[int, int]:
    """The rows and columns that share a scale, in a matrix with this grid of scales: all, a row, a group of one, or `block`."""
    if block is not None and tuple(-(-size // length) for size, length in zip(shape, block, strict=True)) == grid:
        return block
    if len(grid) != 2 or 0 in (*grid, *shape) or grid[0] not in (1, shape[0]) or shape[1] % grid[1]:
        raise UserError(
            f"the checkpoint has {escape_name(name)} of shape {list(shape)} with scales of shape {list(grid)}, which are not "
            "those of a tensor, nor of rows, groups or blocks"
        )
    return shape[0] // grid[0], shape[1] // grid[1]


def _scaled(
    values: np.ndarray, scale: np.ndarray, blocks: tuple[int, int], zero: Any = None, groups: np.ndarray | None = None,
    codebook: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """`(values - zero) * scale` in float32, some rows at a time.

    Args:
      values: `[rows, columns]`.
      scale: `[row blocks, column blocks]`; `zero` is one number or has this shape.
      groups: the column block of each column, where they do not follow one another.
      codebook: what the values stand for, where they are codes.
    """
    rows, columns = values.shape
    result = np.empty((rows, columns), np.float32)
    groups = np.arange(columns) // blocks[1] if groups is None else groups
    step = max(1, CHUNK // max(columns, 1))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        blocks_of_rows = np.arange(start, stop) // blocks[0]
        part = values[start:stop].astype(np.float32) if codebook is None else codebook[values[start:stop]]
        if zero is not None:
            part -= zero if np.ndim(zero) == 0 else zero[blocks_of_rows].astype(np.float32)[:, groups]
        np.multiply(part, scale[blocks_of_rows][:, groups], out=result[start:stop])
    return result


def _fp8(options: Mapping[str, Any], tensors: LazyArrays) -> dict[str, Dequantized]:
    """`X` in 8 bits, and `X_scale_inv` or `X_scale`, which both are factors."""
    block = _block_size(options.get("weight_block_size"), "weight_block_size")
    found = {}
    for name, tensor in tensors.tensors.items():
        scale = next((name + end for end in ("_scale_inv", "_scale") if name + end in tensors.tensors), None)
        if tensor.dtype not in FLOAT8 and scale is None:
            continue
        scale = scale or name + "_scale_inv"
        found[name] = _scaled_matrix(tensors, name, scale, FLOAT8, block)
    return found


def _block_size(block: Any, key: str) -> tuple[int, int] | None:
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise UserError(f"config.json has {key}: {quote(block)} in quantization_config, expected two numbers of at least 1")
    return block[0], block[1]


def _scaled_matrix(
    tensors: LazyArrays, name: str, scale: str, dtypes: tuple[str, ...], block: tuple[int, int] | None, zero: str | None = None
) -> Dequantized:
    """A matrix, or one for each expert, of numbers that stand for themselves, with scales and zero points."""
    weight = _part(tensors, name, scale, dtypes)
    scales = _part(tensors, scale, name, (*FLOATS, "float8_e8m0fnu", "uint8"))
    if len(weight.shape) not in (2, 3):
        raise UserError(f"the checkpoint has {escape_name(name)} of shape {list(weight.shape)}, expected two or three axes")
    grid = scales.shape or (1,)
    if len(grid) == 1:
        grid = (1, 1) if grid == (1,) else (*grid, 1)
    if len(weight.shape) == 3 and grid[0] != weight.shape[0]:
        _expect(scale, scales.shape, (weight.shape[0], *scales.shape[1:]))
    blocks = _blocks(name, weight.shape[-2:], grid[len(weight.shape) - 2 :], block)
    if zero:
        _expect(zero, _part(tensors, zero, name, ("int8", "uint8")).shape, scales.shape)

    def make() -> np.ndarray:
        values, factors = tensors[name], _float_scale(tensors[scale]).reshape(grid)
        zeros = tensors[zero].reshape(grid) if zero else np.zeros(grid, np.int8)
        if values.ndim == 2:
            return _scaled(values, factors, blocks, zeros if zero else None)
        return np.stack([_scaled(*expert[:2], blocks, expert[2]) for expert in zip(values, factors, zeros, strict=True)])

    return Dequantized(Tensor(weight.shape, "float32"), (name, scale, *([zero] if zero else [])), make)


def _compressed_tensors(options: Mapping[str, Any], tensors: LazyArrays) -> dict[str, Dequantized]:
    """What a module is stored as goes by the names and dtypes of its tensors."""
    widths, block = _schemes(options)
    found = {}
    for module in _modules(tensors, ".weight_scale"):
        name, scale, zero = (f"{module}.weight{end}" for end in ("", "_scale", "_zero_point"))
        packed = f"{module}.weight_packed"
        if packed not in tensors.tensors:
            has_zero = zero if zero in tensors.tensors else None
            found[name] = _scaled_matrix(tensors, name, scale, ("int8", *FLOAT8), block, has_zero)
        elif tensors.tensors[packed].dtype == "uint8":
            found[name] = _packed_fp4(tensors, module)
        else:
            found[name] = _packed_integers(tensors, module, widths)
    return found


def _schemes(options: Mapping[str, Any]) -> tuple[set[int], tuple[int, int] | None]:
    """The widths in bits, and the block, that the groups of a compressed-tensors config name."""
    groups = options.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise UserError(f"config.json has config_groups: {quote(groups)} in quantization_config, expected an object of schemes")
    widths: set[int] = set()
    blocks: set[tuple[int, int] | None] = set()
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(group.get("weights") or {}, dict):
            raise UserError(f"config.json has the scheme {escape_name(name)}: {quote(group)}, expected an object with weights")
        _check_options({"format": group.get("format")}, {"format": CT_FORMATS}, (), f"the scheme {escape_name(name)}")
        weights = group.get("weights") or {}
        where = f"the weights of the scheme {escape_name(name)}"
        _check_options(weights, {"num_bits": (), "type": ("int", "float"), "strategy": CT_STRATEGIES}, CT_UNUSED, where)
        if weights:
            widths.add(_number(weights, "num_bits"))
            blocks.add(_block_size(weights.get("block_structure"), "block_structure"))
    blocks.discard(None)
    if len(blocks) > 1:
        raise UserError("config.json has schemes with several values of block_structure, of which one is known here")
    return widths, next(iter(blocks), None)


def _packed_integers(tensors: LazyArrays, module: str, widths: set[int]) -> Dequantized:
    """Integers above their smallest in int32 words along the columns; zero points likewise along the rows."""
    packed, scale, size, zero, order = (
        f"{module}.weight_{part}" for part in ("packed", "scale", "shape", "zero_point", "g_idx")
    )
    words = _part(tensors, packed, scale, ("int32",)).shape
    grid = _part(tensors, scale, packed, FLOATS).shape
    _expect(size, _part(tensors, size, packed, ("int64", "int32")).shape, (2,))
    shape = tuple(int(length) for length in tensors[size])
    fits = [bits for bits in sorted(widths) if bits <= 8 and words == (shape[0], -(-shape[1] * bits // 32))]
    if min(shape) < 1 or len(fits) != 1:
        raise UserError(
            f"the checkpoint has {escape_name(packed)} of shape {list(words)} for a matrix of shape {list(shape)} and "
            f"{' or '.join(map(str, sorted(widths)))} bits"
        )
    bits, grid = fits[0], (1, 1) if grid in ((), (1,)) else grid
    stored = (packed, scale, size, *(part for part in (zero, order) if part in tensors.tensors))
    blocks = _blocks(packed, shape, grid)
    if order in tensors.tensors:
        _expect(order, _part(tensors, order, packed, ("int32", "int64")).shape, (shape[1],))
    if zero in tensors.tensors:
        _expect(zero, _part(tensors, zero, packed, ("int32",)).shape, (-(-grid[0] * bits // 32), grid[1]))

    def make() -> np.ndarray:
        zeros: Any = 1 << (bits - 1)
        if zero in tensors.tensors:
            zeros = _unpack(tensors[zero].T, bits, grid[0]).T
        groups = _group_numbers(tensors, order, grid[1]) if order in tensors.tensors else None
        factors = tensors[scale].astype(np.float32).reshape(grid)
        return _scaled(_unpack(tensors[packed], bits, shape[1]), factors, blocks, zeros, groups)

    return Dequantized(Tensor(shape, "float32"), stored, make)


def _group_numbers(tensors: LazyArrays, name: str, groups: int) -> np.ndarray:
    numbers = tensors[name]
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < groups:
        raise UserError(f"the checkpoint has {escape_name(name)} with numbers outside of its {groups} groups")
    return numbers


def _packed_fp4(tensors: LazyArrays, module: str) -> Dequantized:
    """Pairs of 4-bit floats in bytes, the first in the low half, with E4M3 scales over a global one, or E8M0 scales."""
    packed, scale, whole = (f"{module}.weight_{part}" for part in ("packed", "scale", "global_scale"))
    codes = _part(tensors, packed, scale, ("uint8",)).shape
    scales = _part(tensors, scale, packed, ("float8_e4m3fn", "float8_e8m0fnu", "uint8"))
    if len(codes) != 2:
        raise UserError(f"the checkpoint has {escape_name(packed)} of shape {list(codes)}, expected two axes")
    shape = (codes[0], 2 * codes[1])
    blocks = _blocks(packed, shape, scales.shape)
    has_whole = scales.dtype == "float8_e4m3fn"
    if has_whole and _part(tensors, whole, packed, FLOATS).shape not in ((), (1,)):
        _expect(whole, tensors.tensors[whole].shape, (1,))

    def make() -> np.ndarray:
        factors = _float_scale(tensors[scale])
        if has_whole:
            factors = factors / tensors[whole].astype(np.float32).reshape(())
        bytes_ = tensors[packed]
        pairs = np.stack([bytes_ & np.uint8(15), bytes_ >> np.uint8(4)], -1).reshape(shape)
        return _scaled(pairs, factors, blocks, codebook=E2M1)

    return Dequantized(Tensor(shape, "float32"), (packed, scale, *([whole] if has_whole else [])), make)


def _mxfp4(options: Mapping[str, Any], tensors: LazyArrays) -> dict[str, Dequantized]:
    """`X` `[experts, columns, rows]`: bytes `X_blocks` `[experts, rows, blocks, 16]`, `X_scales` `[experts, rows, blocks]`."""
    found = {}
    for name in _modules(tensors, "_blocks"):
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        codes = _part(tensors, blocks, scales, ("uint8",)).shape
        if len(codes) != 4 or codes[3] != 16:
            raise UserError(
                f"the checkpoint has {escape_name(blocks)} of shape {list(codes)}, expected four axes, the last of 16"
            )
        _expect(scales, _part(tensors, scales, blocks, ("uint8",)).shape, codes[:3])
        experts, rows, columns = codes[0], codes[1], codes[2] * codes[3] * 2

        def make(blocks: str = blocks, scales: str = scales, rows: int = rows, columns: int = columns) -> np.ndarray:
            codes, exponents = tensors[blocks], tensors[scales]
            result = np.empty((len(codes), columns, rows), ml_dtypes.bfloat16)
            for code, exponent, target in zip(codes, exponents, result, strict=True):
                halves = np.stack([code & np.uint8(15), code >> np.uint8(4)], -1)
                values = E2M1[halves.reshape(*code.shape[:-1], -1)] * _float_scale(exponent)[..., None]
                target[...] = values.reshape(rows, columns).T
            return result

        found[name] = Dequantized(Tensor((experts, columns, rows), "bfloat16"), (blocks, scales), make)
    return found


class _Columns(NamedTuple):
    """The sizes of a matrix that is stored `[inputs, outputs]`, with scales for groups of inputs."""

    inputs: int
    outputs: int
    bits: int
    group: int

    @property
    def groups(self) -> int:
        return -(-self.inputs // self.group)


def _columns(tensors: LazyArrays, module: str, options: Mapping[str, Any], bits: int, along_inputs: bool) -> _Columns:
    """The sizes by the shapes of `qweight`, `qzeros` and `scales`; a word of `qweight` holds several inputs, or outputs."""
    qweight, qzeros, scales = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    words = _part(tensors, qweight, scales, ("int32",)).shape
    if len(words) != 2 or min(words) < 1:
        raise UserError(f"the checkpoint has {escape_name(qweight)} of shape {list(words)}, expected two axes")
    inputs = words[0] * 32 // bits if along_inputs else words[0]
    outputs = words[1] if along_inputs else words[1] * 32 // bits
    group = _number(options, "group_size", options.get("q_group_size", 128), least=-1)
    found = _Columns(inputs, outputs, bits, group if group > 0 else inputs)
    _expect(qzeros, _part(tensors, qzeros, qweight, ("int32",)).shape, (found.groups, -(-outputs * bits // 32)))
    _expect(scales, _part(tensors, scales, qweight, FLOATS).shape, (found.groups, outputs))
    return found


def _awq(options: Mapping[str, Any], tensors: LazyArrays) -> dict[str, Dequantized]:
    """Words of `qweight` `[inputs, outputs / 8]` and `qzeros` hold eight outputs in an order of their own."""

    def make(module: str, sizes: _Columns) -> np.ndarray:
        def unpack(part: str) -> np.ndarray:
            fields = _unpack(tensors[f"{module}.{part}"], sizes.bits, sizes.outputs)
            return fields.reshape(len(fields), -1, 8)[..., AWQ_ORDER].reshape(len(fields), -1).T

        scales = tensors[f"{module}.scales"].astype(np.float32)
        return _scaled(unpack("qweight"), scales.T, (1, sizes.group), unpack("qzeros"))

    found = {}
    for module in _modules(tensors, ".qweight"):
        sizes = _columns(tensors, module, options, 4, along_inputs=False)
        stored = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
        tensor = Tensor((sizes.outputs, sizes.inputs), "float32")
        found[f"{module}.weight"] = Dequantized(tensor, stored, partial(make, module, sizes))
    return found


def _gptq(options: Mapping[str, Any], tensors: LazyArrays) -> dict[str, Dequantized]:
    """`qweight` `[inputs · bits / 32, outputs]` is packed along the inputs, `qzeros` along the outputs.

    The first version of the format stores zero points less one, modulo 2^bits.
    """
    one = 0 if "gptq_v2" in (options.get("checkpoint_format"), options.get("format")) else 1

    def make(module: str, sizes: _Columns) -> np.ndarray:
        values = _unpack(tensors[f"{module}.qweight"].T, sizes.bits, sizes.inputs)
        zeros = _unpack(tensors[f"{module}.qzeros"], sizes.bits, sizes.outputs)
        zeros = zeros + np.uint8(one) & np.uint8((1 << sizes.bits) - 1)
        scales, order = tensors[f"{module}.scales"].astype(np.float32), f"{module}.g_idx"
        groups = _group_numbers(tensors, order, sizes.groups) if order in tensors.tensors else None
        return _scaled(values, scales.T, (1, sizes.group), zeros.T, groups)

    found = {}
    for module in _modules(tensors, ".qweight"):
        sizes = _columns(tensors, module, options, _number(options, "bits"), along_inputs=True)
        stored, order = [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")], f"{module}.g_idx"
        if order in tensors.tensors or options.get("desc_act"):
            _expect(order, _part(tensors, order, stored[0], ("int32", "int64")).shape, (sizes.inputs,))
            stored.append(order)
        tensor = Tensor((sizes.outputs, sizes.inputs), "float32")
        found[f"{module}.weight"] = Dequantized(tensor, tuple(stored), partial(make, module, sizes))
    return found


CT_FORMATS = (
    "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
    "mixed-precision", "dense",
)  # fmt: skip
CT_STRATEGIES = tuple("tensor channel group block tensor_group".split())  # noqa: SIM905, one of them is also a mesh axis
CT_UNUSED = (
    "symmetric", "group_size", "block_structure", "dynamic", "actorder", "observer", "observer_kwargs", "scale_dtype",
    "zp_dtype",
)  # fmt: skip
TOOLS = ("modules_to_not_convert", "ignored_layers", "dequantize")
METHODS = {
    "fp8": Method(_fp8, {"fmt": ("e4m3", "e5m2"), "weight_block_size": ()}, (*TOOLS, "activation_scheme", "scale_fmt")),
    "fbgemm_fp8": Method(_fp8, {}, (*TOOLS, "activation_scale_ub")),
    "compressed-tensors": Method(
        _compressed_tensors,
        {"config_groups": (), "format": CT_FORMATS, "quantization_status": ("compressed",), "sparsity_config": ({},),
         "transform_config": ({},)},
        ("ignore", "kv_cache_scheme", "global_compression_ratio", "version", "run_compressed"),
    ),
    "awq": Method(
        _awq,
        {"bits": (4,), "w_bit": (4,), "group_size": (), "q_group_size": (), "zero_point": (True,), "version": ("gemm", "GEMM"),
         "format": ("gemm", "GEMM")},
        (*TOOLS, "backend", "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config"),
    ),
    "gptq": Method(
        _gptq,
        {"bits": (2, 3, 4, 8), "group_size": (), "desc_act": (True, False), "checkpoint_format": ("gptq", "gptq_v2"),
         "format": ("gptq", "gptq_v2"), "pack_dtype": ("int32",), "dynamic": ({},), "is_marlin_format": (False,)},
        (*TOOLS, "sym", "damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "act_group_aware", "lm_head",
         "meta", "model_name_or_path", "model_file_base_name", "tokenizer", "dataset", "backend", "max_input_length", "mse",
         "cache_block_outputs", "block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize",
         "batch_size", "pad_token_id", "model_seqlen", "use_cuda_fp16", "use_exllama", "exllama_config", "disable_exllama"),
    ),
    "mxfp4": Method(_mxfp4, {}, TOOLS),
}  # fmt: skip
