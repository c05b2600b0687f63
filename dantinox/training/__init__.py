"""The objective, the optimizers, the loop with its validation, checkpoints and exact resume."""

from dantinox.training.loop import train
from dantinox.training.resume import resumed_config

__all__ = ["resumed_config", "train"]
