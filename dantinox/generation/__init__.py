"""Joins a model with sampling: token sequences and text are continued here."""

from dantinox.generation.prepare import prepare
from dantinox.generation.text import Result, Run, load
from dantinox.generation.tokens import generate

__all__ = ["Result", "Run", "generate", "load", "prepare"]
