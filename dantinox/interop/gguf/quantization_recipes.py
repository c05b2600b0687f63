"""The types of the tensors in a quantized GGUF file, as llama.cpp's `llama-quantize` chooses them
without an importance matrix.

The rules are those of `llama_tensor_get_type` (`llama-quant.cpp`).
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from dantinox.interop.gguf.ggml_types import TYPES


class FileType(NamedTuple):
    """A value of `dantinox export --type`: the type of most matrices, and the number of the file
    type in llama.cpp.
    """

    base: str
    number: int


FILE_TYPES = {
    "f32": FileType("F32", 0),
    "f16": FileType("F16", 1),
    "bf16": FileType("BF16", 32),
    "q4_0": FileType("Q4_0", 2),
    "q4_1": FileType("Q4_1", 3),
    "q4_k_s": FileType("Q4_K", 14),
    "q4_k_m": FileType("Q4_K", 15),
    "q5_k_s": FileType("Q5_K", 16),
    "q5_k_m": FileType("Q5_K", 17),
    "q6_k": FileType("Q6_K", 18),
    "q8_0": FileType("Q8_0", 7),
    "tq1_0": FileType("TQ1_0", 36),
    "tq2_0": FileType("TQ2_0", 37),
}
# The type of a matrix whose rows are not a multiple of 256 values. If they are not a multiple of 32
# either, it is F16.
SMALL_BLOCK_TYPES = {
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "TQ1_0": "Q4_0",
    "TQ2_0": "Q4_0",
}
VALUE_PROJECTIONS = re.compile(r"attn_(v|qkv|kv_b)\.weight$")


def tensor_types(
    file_type: str, row_lengths: Mapping[str, int], layers: int, experts: int = 0
) -> dict[str, str]:
    """Returns the type of each matrix in a quantized file, as llama.cpp's `llama-quantize` chooses
    it.

    Args:
      file_type: a key of `FILE_TYPES`.
      row_lengths: the length of a row of each matrix, by the name in GGUF.
      layers, experts: the number of layers, and of experts per layer (0: no experts).
    """
    values = sorted(filter(VALUE_PROJECTIONS.search, row_lengths), key=_layer)
    tied = "output.weight" not in row_lengths

    def choose(name: str) -> str:
        base = FILE_TYPES[file_type].base
        length = row_lengths[name]
        if "per_layer_model_proj" in name:
            return "BF16"
        if name == "output.weight" or (
            tied and name in ("token_embd.weight", "per_layer_token_embd.weight")
        ):
            chosen = "Q6_K" if base != "Q8_0" and length % TYPES[base].values == 0 else "Q8_0"
        elif name in ("token_embd.weight", "per_layer_token_embd.weight") and base in (
            "TQ1_0",
            "TQ2_0",
        ):
            chosen = "Q4_K"
        elif VALUE_PROJECTIONS.search(name):
            chosen = _value_type(file_type, base, values.index(name), len(values), experts)
        elif "attn_k.weight" in name and experts == 8:
            chosen = "Q8_0"
        elif "ffn_down" in name:
            chosen = _down_type(file_type, base, _layer(name), layers)
        elif "attn_output.weight" in name and experts == 8 and base == "Q4_K":
            chosen = "Q5_K"
        else:
            chosen = base
        if length % TYPES[chosen].values:
            chosen = SMALL_BLOCK_TYPES.get(chosen, "F16")
        return "F16" if length % TYPES[chosen].values else chosen

    return {name: choose(name) for name in row_lengths}


def _layer(name: str) -> int:
    """Returns the index of the layer of a tensor, 0 for other tensors."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else 0


def _needs_more_bits(layer: int, layers: int) -> bool:
    """Returns whether a layer is in the first or last eighth, or every third one between them
    (`use_more_bits`).
    """
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _value_type(file_type: str, base: str, index: int, count: int, experts: int) -> str:
    """Returns the type of the value projection with this index among `count` ones."""
    if experts == 8:
        return "Q8_0"
    if file_type in ("q4_k_m", "q5_k_m") and _needs_more_bits(index, count):
        return "Q6_K"
    return "Q5_K" if file_type == "q4_k_s" and index < 4 else base


def _down_type(file_type: str, base: str, layer: int, layers: int) -> str:
    """Returns the type of the down projection of a layer."""
    if file_type in ("q4_k_m", "q5_k_m") and _needs_more_bits(layer, layers):
        return "Q6_K"
    return "Q5_K" if file_type == "q4_k_s" and layer < layers // 8 else base
