"""Joins a model with sampling: token sequences and text are continued here."""

from dantinox.generation.constraints import Constraint
from dantinox.generation.generate import generate
from dantinox.generation.loaded_model import LoadedModel, load
from dantinox.generation.quantized_weights import prepare
from dantinox.generation.result import Result

__all__ = ["Constraint", "Result", "LoadedModel", "generate", "load", "prepare"]
