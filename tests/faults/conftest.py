"""Programs are kept between tests, and between the processes that they start."""

from training.conftest import programs_are_kept

__all__ = ["programs_are_kept"]
