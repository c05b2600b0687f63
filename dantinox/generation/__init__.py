"""Text generation: the engine, its batches, and the Python API on top of them."""

from dantinox.generation.api.generate_ids import generate
from dantinox.generation.api.loaded_model import LoadedModel, load
from dantinox.generation.api.result import Result
from dantinox.generation.decode.prepared_model import prepare
from dantinox.generation.guides.constraints import Constraint

__all__ = ["Constraint", "Result", "LoadedModel", "generate", "load", "prepare"]
