"""Reads quantized Hugging Face checkpoints: each tensor is dequantized on access.

The key `quantization_config` of `config.json` names the method. Each method stores a matrix as
several tensors. The formats are defined by Transformers for fp8, mxfp4 and bitnet
(`integrations/finegrained_fp8.py`, `mxfp4.py`, `bitnet.py`), by the library compressed-tensors
(`compressors/`), by AutoAWQ for AWQ (`gemm`), and by AutoGPTQ for GPTQ.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dantinox.files import UserError, escape_name, quote
from dantinox.interop.hf.compressed_tensors import CT_FORMATS, find_compressed_tensors
from dantinox.interop.hf.hf_family import BITNET
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
    scaled_matrix,
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
    check_options(options, method.supported, method.ignored, f"quantization_config of {name}")
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


def _fp8(options: Mapping[str, Any], tensors: LazyArrays) -> dict[str, Dequantized]:
    """Finds 8-bit float matrices. The scales of a matrix `X` are in `X_scale_inv` or `X_scale`."""
    block = block_size(options.get("weight_block_size"), "weight_block_size")
    found = {}
    for name, tensor in tensors.tensors.items():
        scales = [f"{name}_scale_inv", f"{name}_scale"]
        scale = next((scale for scale in scales if scale in tensors.tensors), None)
        if tensor.dtype not in FLOAT8 and scale is None:
            continue
        # Without a scale, the error message names the missing tensor.
        found[name] = scaled_matrix(tensors, name, scale or f"{name}_scale_inv", FLOAT8, block)
    return found


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
    group = integer_option(options, "group_size", options.get("q_group_size", 128), least=-1)
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
            tensors, module, options, integer_option(options, "bits"), along_inputs=True
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
        find_compressed_tensors,
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
