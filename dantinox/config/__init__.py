"""The typed settings, their YAML files and their flags. Nothing here imports jax."""

from dantinox.config.files import build_config, differences, dump_config, json_schema, load_config
from dantinox.config.sections import Config, DataSection, GenerationSection, ModelConfig, TokenizerSection, UserError

__all__ = [
    "Config",
    "DataSection",
    "GenerationSection",
    "ModelConfig",
    "TokenizerSection",
    "UserError",
    "build_config",
    "differences",
    "dump_config",
    "json_schema",
    "load_config",
]
