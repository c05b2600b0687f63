"""Objectives, optimizers, the training loop, evaluation, checkpoints and exact resume."""

from dantinox.training.dry_run import dry_run
from dantinox.training.launch import launch

__all__ = ["dry_run", "launch"]
