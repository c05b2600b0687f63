"""The objective, the optimizers, the loop with its validation, checkpoints and exact resume."""

from dantinox.training.launch import dry_run, launch

__all__ = ["dry_run", "launch"]
