"""Writes `tests/model/nf4.npz`: matrices that bitsandbytes quantized to nf4 in blocks of 64.

Needs torch and bitsandbytes: python tests/model/make_nf4.py
"""

from pathlib import Path

import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit, get_4bit_type, quantize_4bit

PATH = Path(__file__).with_name("nf4.npz")


def main() -> None:
    w_OI = torch.from_numpy(np.random.default_rng(0).standard_t(4, (5, 192)).astype(np.float32))
    w_OI[2, 64:128] = 0
    packed, state = quantize_4bit(w_OI, blocksize=64, compress_statistics=False, quant_type="nf4")
    np.savez(
        PATH,
        values=get_4bit_type("nf4", device="cpu").numpy(),
        w_OI=w_OI.numpy(),
        packed=packed.numpy(),  # two consecutive weights per byte, the first in the high half
        magnitudes=state.absmax.numpy(),
        dequantized_OI=dequantize_4bit(packed, state).numpy(),
    )


if __name__ == "__main__":
    main()
