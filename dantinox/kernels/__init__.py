"""Products with packed weights, in native code on a CPU and in XLA elsewhere."""

from dantinox.kernels.formats import FORMATS, Format, unpack
from dantinox.kernels.native_library import Kernels, load_kernels
from dantinox.kernels.packed_matmul import matmul

__all__ = ["FORMATS", "Format", "Kernels", "load_kernels", "matmul", "unpack"]
