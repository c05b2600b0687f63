"""Joins a model with sampling: token sequences and text are continued here."""

from dantinox.generation.batch import Result
from dantinox.generation.prepare import prepare
from dantinox.generation.text import Run, in_order, load
from dantinox.generation.tokens import generate

__all__ = ["Result", "Run", "generate", "in_order", "load", "prepare"]
