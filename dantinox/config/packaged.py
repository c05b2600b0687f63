"""The location of the packaged configs."""

from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "configs"
DEFAULT_CONFIG = "quickstart"  # the config that `dantinox train` uses if none is given
