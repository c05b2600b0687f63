"""Hugging Face's families of models: their settings and tensors as ours, and ours as theirs, by the same tables."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dantinox.config import Config, ModelConfig
from dantinox.interop.source import Tensor


def settings_of(config: Mapping[str, Any], max_context: int | None = None) -> dict[str, dict[str, Any]]:
    """The settings (`model`, `moe`, `attention`) of a `config.json`.

    Raises:
      UserError: the family is unknown, or a key matters and has no equal here; the sentence names it.
    """
    raise NotImplementedError


def from_hf(
    config: Mapping[str, Any], model: ModelConfig, tensors: Mapping[str, Tensor], read: Any, dtype: str = "auto"
) -> Iterator[tuple[str, np.ndarray]]:
    """Every parameter of a model of this architecture, in the order in which files hold them, made of a checkpoint's tensors.

    All names and shapes are compared before the first parameter is given.

    Raises:
      UserError: a tensor is missing, is not used, or has another shape; the sentence names it.
    """
    raise NotImplementedError


def to_hf(
    config: Config, vocab_size: int, parameters: Mapping[str, np.ndarray], like: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], Iterator[tuple[str, np.ndarray]]]:
    """A model as transformers has it.

    Args:
      parameters: by their paths, float32 or bfloat16; read one by one.
      like: the `config.json` that it was imported from, whose family is taken and whose keys are kept.

    Returns:
      `config.json`, and the tensors by their names, each made when it is asked for, in the dtype of its parameter.

    Raises:
      UserError: no family can say the architecture; the sentence names a setting.
    """
    raise NotImplementedError
