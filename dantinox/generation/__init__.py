"""Joins a model with sampling: token sequences and text are continued here."""

from dantinox.generation.generate import generate
from dantinox.generation.loaded_model import LoadedModel, load
from dantinox.generation.result import Result
from dantinox.generation.weights import prepare

__all__ = ["Result", "LoadedModel", "generate", "load", "prepare"]
