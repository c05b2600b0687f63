"""Where the package keeps its own configs."""

from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "configs"
DEFAULT_CONFIG = "quickstart"  # trained when no config is given
