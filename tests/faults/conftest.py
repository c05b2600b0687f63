"""Programs are kept between tests, and between the processes that they start."""

from training.conftest import cache_programs

__all__ = ["cache_programs"]
