"""`Source`: a checkpoint of any foreign format as settings, tensors and tokenizer in Hugging Face's terms."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dantinox.config import Config
from dantinox.run.safetensors_file import Tensor
from dantinox.text import Tokenizer


class LazyArrays(Mapping[str, np.ndarray]):
    """Arrays by their names, each made or read when it is asked for, and not kept; `tensors`: shape and type of each."""

    def __init__(self, tensors: Mapping[str, Tensor], make: Callable[[str], np.ndarray]):
        self.tensors, self._make = tensors, make

    def __getitem__(self, name: str) -> np.ndarray:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def storage_dtype(parameter: str, wanted: str, found: set[str]) -> str:
    """The type in which a run keeps a parameter: float32, but for matrices where bfloat16 is `wanted`, or all that was `found`
    with `auto`."""
    if parameter != "embed" and not parameter.endswith(("/embed", "/kernel")):
        return "float32"  # a rounding of these is felt, and they are small
    return wanted if wanted != "auto" else "bfloat16" if found == {"bfloat16"} else "float32"


@dataclass(frozen=True)
class Source:
    """A checkpoint to import.

    Attributes:
      path: where it lies, for messages.
      format: `hf` or `gguf`, for `origin.json`.
      config: as transformers' `config.json` would have it; `model_type` names the family.
      tensors: by transformers' names, read one after the other. Arrays of bfloat16 have the dtype of `ml_dtypes`.
      tokenizer: the text of a `tokenizer.json`.
      tokenizer_config: as transformers' `tokenizer_config.json` would have it: `bos_token`, `eos_token`, `pad_token` (names of
        special tokens, as text), `add_bos_token`. What is absent is looked for in `generation_config`, then in the tokenizer.
      chat_template: Jinja, as it stands in the checkpoint.
      generation_config: `eos_token_id` (one or several), `bos_token_id`, `pad_token_id`, and sampling defaults.
      left_out: a line that says what else the checkpoint holds, which is not imported; None where it holds nothing else.
    """

    path: Path
    format: str
    config: Mapping[str, Any]
    tensors: LazyArrays
    tokenizer: str
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    left_out: str | None = None


class ExportBundle(NamedTuple):
    """A run as transformers has it: their files, the tensors by their names in the types of our parameters, and the type that
    each had where it came from, or has here."""

    config: Config
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_config: dict[str, Any]
    tensors: LazyArrays
    dtypes: dict[str, str]
    tokenizer: Tokenizer
    chat_template: str | None
