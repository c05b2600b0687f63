"""Joins a model with sampling: token sequences and text are continued here."""

from dantinox.generation.generate import generate
from dantinox.generation.result import Result
from dantinox.generation.run import Run, in_order, load
from dantinox.generation.weights import prepare

__all__ = ["Result", "Run", "generate", "in_order", "load", "prepare"]
