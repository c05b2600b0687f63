"""Products with packed weights, in native code on a CPU and in XLA elsewhere."""

from dantinox.kernels.block_formats import FORMATS, Format, unpack
from dantinox.kernels.native_library import Kernels, load_kernels
from dantinox.kernels.packed_matmul import (
    MAX_NATIVE_BFLOAT16_ROWS,
    MAX_NATIVE_ROWS,
    matmul,
    native_unpack,
)
from dantinox.kernels.ternary_products import pack_ternary, ternary_matmul, unpack_ternary

__all__ = [
    "FORMATS",
    "MAX_NATIVE_BFLOAT16_ROWS",
    "MAX_NATIVE_ROWS",
    "Format",
    "Kernels",
    "load_kernels",
    "matmul",
    "native_unpack",
    "pack_ternary",
    "ternary_matmul",
    "unpack",
    "unpack_ternary",
]
