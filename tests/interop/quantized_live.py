"""Compares dequantized random matrices with those of compressed-tensors and transformers; they must
be bitwise equal.

Run by `make parity`; needs torch, transformers and compressed-tensors.
"""

import ml_dtypes
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dantinox.interop.hf.hf_quantized import dequantize_checkpoint
from dantinox.interop.source import LazyArrays
from dantinox.run.safetensors_file import Tensor

ROWS, COLUMNS = 256, 384
FP8, E8M0 = torch.float8_e4m3fn, torch.uint8
SCHEMES = {
    "int8 by tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}, (1,)),
    "int8 by row": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, (ROWS, 1)),
    "int8 by row, asymmetric": (
        "int-quantized",
        {"num_bits": 8, "strategy": "channel", "symmetric": False},
        (ROWS, 1),
    ),
    "int8 by group": (
        "naive-quantized",
        {"num_bits": 8, "strategy": "group", "group_size": 128},
        (ROWS, 3),
    ),
    "fp8 by tensor": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        (1,),
    ),
    "fp8 by row": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        (ROWS, 1),
    ),
    "fp8 by block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        (ROWS // 128, COLUMNS // 128),
    ),
    **{
        f"int{bits} packed by group{', asymmetric' if not symmetric else ''}": (
            "pack-quantized",
            {"num_bits": bits, "strategy": "group", "group_size": 32, "symmetric": symmetric},
            (ROWS, COLUMNS // 32),
        )
        for bits in (2, 3, 4, 5, 8)
        for symmetric in (True, False)
    },
    "int4 packed by row": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}, (ROWS, 1)),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        (ROWS, COLUMNS // 16),
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        (ROWS, COLUMNS // 32),
    ),
}


def to_numpy(tensor):
    dtypes = {FP8: ml_dtypes.float8_e4m3fn, torch.bfloat16: ml_dtypes.bfloat16}
    if tensor.dtype in dtypes:
        return (
            tensor.view(getattr(torch, f"uint{8 * tensor.element_size()}"))
            .numpy()
            .view(dtypes[tensor.dtype])
        )
    return tensor.numpy()


def dequantized(options, tensors):
    arrays = {name: np.asarray(to_numpy(tensor)) for name, tensor in tensors.items()}
    kinds = {name: Tensor(array.shape, array.dtype.name) for name, array in arrays.items()}
    _, found = dequantize_checkpoint(
        {"quantization_config": options}, LazyArrays(kinds, arrays.__getitem__)
    )
    (name,) = found
    return found[name]


def compressed(form, weights, grid):
    """Returns the tensors of a random matrix in a format, and the library's dequantized matrix."""
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": torch.randn(ROWS, COLUMNS), "weight_scale": torch.rand(grid) * 0.1 + 0.01}
    if form == "mxfp4-pack-quantized":
        state["weight_scale"] = torch.exp2(torch.randint(-20, 4, grid).float())
    if form == "nvfp4-pack-quantized":
        state["weight_global_scale"] = torch.tensor([37.5])
        state["weight_scale"] = (torch.rand(grid) * 20).to(FP8).float()
    if not weights.get("symmetric", True):
        low = -(1 << (weights["num_bits"] - 1))
        state["weight_zero_point"] = torch.randint(low, -low, grid, dtype=torch.int8)
    compressor = BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(state, scheme)
    return packed, compressor.decompress(packed, scheme)["weight"]


def report(name, one, other):
    if other.dtype == torch.bfloat16:  # the library rounds to the dtype of the scales
        one, other = one.astype(ml_dtypes.bfloat16).astype(np.float32), other.float()
    difference = np.abs(np.asarray(one, np.float64) - other.double().numpy()).max()
    print(f"{name:30} {one.shape} max difference {difference:.3g}")
    return difference == 0


def main():
    torch.manual_seed(0)
    equal = []
    for name, (form, weights, grid) in SCHEMES.items():
        tensors, expected = compressed(form, weights, grid)
        options = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": {"weights": weights}},
        }
        equal.append(
            report(
                name,
                dequantized(options, {f"x.{part}": tensor for part, tensor in tensors.items()}),
                expected,
            )
        )
    for name, grid, options in (
        ("fp8, blocks of 128", (2, 3), {"weight_block_size": [128, 128]}),
        ("fp8 by tensor", (), {"weight_block_size": None}),
        ("fp8 by row", (ROWS, 1), {}),
    ):
        weight, scale = torch.randn(ROWS, COLUMNS).to(FP8), torch.rand(grid)
        expected = Fp8Dequantize(None)._dequantize_one(
            weight, scale.reshape(grid or (1, 1)), torch.float32
        )
        tensors = {"x.weight": weight, "x.weight_scale_inv": scale}
        equal.append(
            report(name, dequantized({"quant_method": "fp8", **options}, tensors), expected)
        )
    blocks = torch.randint(0, 256, (3, 64, 5, 16), dtype=torch.uint8)
    scales = torch.randint(0, 250, (3, 64, 5), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales)
    equal.append(
        report(
            "mxfp4 of gpt-oss",
            dequantized({"quant_method": "mxfp4"}, {"x_blocks": blocks, "x_scales": scales}),
            expected,
        )
    )
    assert all(equal)
    print(f"{len(equal)} of {len(equal)} bitwise equal")


if __name__ == "__main__":
    main()
