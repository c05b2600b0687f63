"""Compiled programs are cached across tests and the processes that they start."""

from training.conftest import cache_programs

__all__ = ["cache_programs"]
