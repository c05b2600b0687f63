"""Typed settings, their YAML files and their command-line flags. No module here imports jax."""

from dantinox.config.generation_settings import GenerationSection
from dantinox.config.kv_settings import KVSection
from dantinox.config.model import ExpertsConfig, LatentConfig, LoraConfig, ModelConfig, RopeScaling
from dantinox.config.overlay import overlay, settings_of, with_generation
from dantinox.config.sections import Config, DataSection, TokenizerSection
from dantinox.config.yaml_files import build_config, differences, dump_config, json_schema, load_config
from dantinox.files import UserError

__all__ = [
    "Config",
    "DataSection",
    "ExpertsConfig",
    "GenerationSection",
    "KVSection",
    "LatentConfig",
    "LoraConfig",
    "ModelConfig",
    "RopeScaling",
    "TokenizerSection",
    "UserError",
    "build_config",
    "differences",
    "dump_config",
    "json_schema",
    "load_config",
    "overlay",
    "settings_of",
    "with_generation",
]
