"""Text generation: the engine, its batches, and the Python API on top of them."""

from dantinox.generation.constraints import Constraint
from dantinox.generation.generate_ids import generate
from dantinox.generation.loaded_model import LoadedModel, load
from dantinox.generation.quantized_weights import prepare
from dantinox.generation.result import Result

__all__ = ["Constraint", "Result", "LoadedModel", "generate", "load", "prepare"]
