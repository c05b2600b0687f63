"""The objective, the optimizers, the loop with its validation, checkpoints and exact resume."""

from dantinox.training.launch import launch, rehearse
from dantinox.training.loop import train
from dantinox.training.resume import resumed_config

__all__ = ["launch", "rehearse", "resumed_config", "train"]
