"""`Source`: a checkpoint of any supported format. Settings, tensors and tokenizer keys have Hugging
Face's names.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dantinox.config import Config
from dantinox.run.safetensors_file import Tensor
from dantinox.text import Tokenizer


class LazyArrays(Mapping[str, np.ndarray]):
    """A mapping from names to arrays. Every access computes or reads the array again; nothing is
    cached.

    Attributes:
      tensors: the shape and dtype of each array.
    """

    def __init__(self, tensors: Mapping[str, Tensor], make: Callable[[str], np.ndarray]):
        self.tensors = tensors
        self._make = make

    def __getitem__(self, name: str) -> np.ndarray:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def storage_dtype(parameter: str, requested: str, found: set[str]) -> str:
    """Returns the dtype in which a run stores a parameter. Scales and biases are always float32.

    Args:
      parameter: the path of the parameter.
      requested: the dtype of matrices. `auto` is bfloat16 if `found` contains only bfloat16, else
        float32.
      found: the dtypes of the parameter's tensors in the checkpoint.
    """
    if parameter != "embed" and not parameter.endswith(("/embed", "/kernel")):
        return "float32"  # these arrays are small, and rounding them would change the output
    if requested != "auto":
        return requested
    return "bfloat16" if found == {"bfloat16"} else "float32"


class StoredBlocks(NamedTuple):
    """The tensors of a GGUF file before dequantization, with the file's names.

    Attributes:
      kinds: the ggml type of each tensor.
      shapes: the shape of each tensor in NumPy's axis order.
      raw: takes the name of a tensor; returns its bytes, `[rows, bytes of a row]`.
      convert: takes a function that reads a tensor of the file, or the slice of one expert; returns
        the checkpoint's tensors (see `Source.tensors`).
    """

    kinds: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    raw: Callable[[str], np.ndarray]
    convert: Callable[[Callable[[str, int | None], np.ndarray]], LazyArrays]


@dataclass(frozen=True)
class Source:
    """A checkpoint to import.

    Attributes:
      path: the checkpoint's path, for messages.
      format: `hf` or `gguf`, for `origin.json`.
      config: the model settings, with the keys of transformers' `config.json`; `model_type` is the
        family.
      tensors: the tensors, with transformers' names. bfloat16 arrays have the dtype of `ml_dtypes`.
      tokenizer: the text of a `tokenizer.json`.
      tokenizer_config: the keys of transformers' `tokenizer_config.json`: `bos_token`, `eos_token`,
        `pad_token` (special tokens as strings) and `add_bos_token`. An absent key is looked up in
        `generation_config`, then in the tokenizer.
      chat_template: the Jinja template in the checkpoint.
      generation_config: `eos_token_id` (one id or a list), `bos_token_id`, `pad_token_id`, and
        sampling defaults.
      skipped: one line about the parts of the checkpoint that are not imported; None if everything
        is imported.
      blocks: the tensors as they are stored, if some of them are quantized in ggml's types.
    """

    path: Path
    format: str
    config: Mapping[str, Any]
    tensors: LazyArrays
    tokenizer: str
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    skipped: str | None = None
    blocks: StoredBlocks | None = None


class ExportBundle(NamedTuple):
    """A run in the format of transformers.

    Attributes:
      config: the settings of the run.
      hf_config, generation_config, tokenizer_config: the contents of `config.json` and of those
        JSON files.
      tensors: the tensors, with transformers' names and the dtypes of the run's parameters.
      dtypes: the dtype of each tensor in the checkpoint from which the run was imported. For a run
        that was not imported, the dtype in the run.
      tokenizer, chat_template: the tokenizer of the run, and its Jinja template or None.
    """

    config: Config
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_config: dict[str, Any]
    tensors: LazyArrays
    dtypes: dict[str, str]
    tokenizer: Tokenizer
    chat_template: str | None
