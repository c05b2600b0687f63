"""Typed settings, their YAML files and their command-line flags. No module here imports jax.

A name below is imported only when it is first used: pydantic takes most of the import time, and
help pages and flags do not need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dantinox.files import UserError

if TYPE_CHECKING:
    from dantinox.config.generation_settings import GenerationSection
    from dantinox.config.kv_settings import KVSection
    from dantinox.config.lora_settings import LoraConfig
    from dantinox.config.model_config import ExpertsConfig, LatentConfig, ModelConfig, RopeScaling
    from dantinox.config.request_overlay import overlay, settings_of, with_generation
    from dantinox.config.sections import Config, DataSection, TokenizerSection
    from dantinox.config.yaml_files import (
        build_config,
        differences,
        dump_config,
        json_schema,
        load_config,
    )

_MODULES = {
    "yaml_files": ("build_config", "differences", "dump_config", "json_schema", "load_config"),
    "generation_settings": ("GenerationSection",),
    "kv_settings": ("KVSection",),
    "lora_settings": ("LoraConfig",),
    "model_config": ("ExpertsConfig", "LatentConfig", "ModelConfig", "RopeScaling"),
    "request_overlay": ("overlay", "settings_of", "with_generation"),
    "sections": ("Config", "DataSection", "TokenizerSection"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

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


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dantinox.config' has no attribute {name!r}")
    attribute = getattr(import_module(f"dantinox.config.{_MODULE_OF[name]}"), name)
    globals()[name] = attribute
    return attribute
