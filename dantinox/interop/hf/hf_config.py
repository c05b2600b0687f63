"""Conversion between Hugging Face's `config.json` and the model settings.

The modules `hf_attention` and `hf_experts` convert the keys whose meaning depends on other keys.
"""

import math
from collections.abc import Mapping
from typing import Any

from dantinox.config import Config, ModelConfig, UserError, build_config
from dantinox.config.model_config import ARCHITECTURE, SETTING_OF
from dantinox.config.sections import FIELDS, flatten_config
from dantinox.files import quote
from dantinox.interop.hf.hf_attention import (
    head_keys,
    head_settings,
    rope_keys,
    rope_settings,
    window_keys,
    window_settings,
)
from dantinox.interop.hf.hf_experts import OPTIONAL_EXPERTS, expert_keys, expert_settings
from dantinox.interop.hf.hf_families import FAMILIES
from dantinox.interop.hf.hf_family import BITNET, CONVERSIONS, Family
from dantinox.interop.hf.hf_keys import ConfigKeys, check_integer, check_positive, require
from dantinox.interop.hf.hf_unsupported import UNSUPPORTED_FAMILIES

MAX_LAYERS = 10_000
# Keys that a `config.json` must have, even if DantinoX can derive the setting from others.
REQUIRED_KEYS = (
    "hidden_size",
    "n_embd",
    "num_hidden_layers",
    "n_layer",
    "num_attention_heads",
    "n_head",
    "intermediate_size",
)


def find_family(config: Mapping[str, Any]) -> Family:
    """Returns the family of a `config.json`; raises a `UserError` if it is not supported."""
    name = config.get("model_type")
    classes = config.get("architectures")
    for family in FAMILIES.values():
        # Some families have the `model_type` of another one, and differ in `architectures`.
        if (
            family.model_type is not None
            and name == family.model_type
            and classes == [family.architecture]
        ):
            return family
    if isinstance(name, str) and name in UNSUPPORTED_FAMILIES:
        nearest, missing = UNSUPPORTED_FAMILIES[name]
        raise UserError(
            f"config.json has model_type: {name}, which is not supported: it is {nearest} with"
            f" {missing}"
        )
    if not isinstance(name, str) or name not in FAMILIES or FAMILIES[name].model_type is not None:
        raise UserError(
            f"config.json has model_type: {quote(name)}, expected one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    classes = classes or [family.architecture]
    if classes != [family.architecture]:
        raise UserError(
            f"config.json has architectures: {quote(classes)}; only {family.architecture} of {name}"
            " generates text"
        )
    return family


def hf_config_to_settings(
    config: Mapping[str, Any], max_context: int | None = None
) -> dict[str, dict[str, Any]]:
    """Returns the settings (sections `model`, `moe` and `attention`) of a `config.json`.

    Args:
      config: the content of the file.
      max_context: the longest sequence in tokens. None: the context length in the checkpoint, or
        for longrope its original context length. For longrope, a larger value selects the long
        factors for every sequence, even a short one.

    Raises:
      UserError: the family is unknown, or a key has no equivalent setting; the message names the
        key.
    """
    family = find_family(config)
    keys = ConfigKeys(config, family)
    settings: dict[str, Any] = dict(family.settings)
    for names, paths in family.keys.items():
        value = keys.take(names)
        if names in CONVERSIONS:
            to_setting, _ = CONVERSIONS[names]
            value = to_setting(check_positive(value, names))
        for path in (paths,) if isinstance(paths, str) else paths:
            if names in REQUIRED_KEYS or FIELDS[path].default is not None:
                require(value, names.partition("|")[0])
            if path == "model.num_blocks":
                check_integer(value, names, most=MAX_LAYERS)
            settings[path] = value
    key, activations = family.activation
    name = keys.take(key)
    if not isinstance(name, str) or name not in activations:
        raise UserError(
            f"config.json has {key}: {quote(name)}, expected one of {', '.join(activations)}"
        )
    settings["model.activation"] = activations[name]
    settings |= rope_settings(keys, settings)
    settings |= window_settings(keys, settings)
    settings |= expert_settings(keys, settings)
    settings |= head_settings(keys, settings)
    settings |= _projection_settings(keys)
    if "model.per_layer_dim" in settings:
        _check_vocabulary(keys, config, settings)
    # Drop settings that have no effect in this model: the model settings reject them.
    if not settings.get("attention.sliding_window"):
        settings.pop("attention.rope_local_theta", None)
    if not settings.get("moe.dense_layers"):
        settings.pop("moe.dense_hidden_dim", None)
    if not settings.get("attention.kv_shared_layers"):
        settings.pop("model.double_wide_mlp", None)
    keys.check_rest()
    if family.rope is None and max_context not in (None, settings["model.max_context"]):
        raise UserError(
            f"the checkpoint has learned positions for {settings['model.max_context']} tokens:"
            " leave max_context out"
        )
    longrope = settings.get("attention.rope_scaling") == "longrope"
    original = settings.get("attention.rope_original_context") if longrope else None
    settings["model.max_context"] = max_context or original or settings["model.max_context"]
    nested: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        if value is not None:
            section, _, name = path.partition(".")
            nested.setdefault(section, {})[name] = value
    return nested


def _check_vocabulary(
    keys: ConfigKeys, config: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Raises a `UserError` if the per-layer embeddings have a different vocabulary size."""
    found = keys.take("vocab_size_per_layer_input")
    expected = config.get("vocab_size", 262144)
    if settings["model.per_layer_dim"] and found != expected:
        raise UserError(
            f"config.json has vocab_size_per_layer_input: {quote(found)}; only the vocab_size,"
            f" {quote(expected)}, is supported"
        )


def _projection_settings(keys: ConfigKeys) -> dict[str, Any]:
    """Returns the settings of ternary projections, if `quantization_config` says that the
    projections are ternary.
    """
    options = keys.remaining.get("quantization_config")
    if (
        not keys.family.bitlinear
        or not isinstance(options, dict)
        or options.get("quant_method") != BITNET["quant_method"]
    ):
        return {}
    keys.take("quantization_config")
    return {
        "model.projections": "ternary",
        "model.sub_norms": keys.family.settings.get("model.sub_norms", False),
    }


def _projection_keys(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the `config.json` keys that `_projection_settings` reads, and the constant keys of
    the family.
    """
    ternary = family.bitlinear and model.projections == "ternary"
    return dict(family.constants) | ({"quantization_config": dict(BITNET)} if ternary else {})


def settings_to_hf_config(
    config: Config, vocab_size: int, family: str | None = None
) -> dict[str, Any]:
    """Returns the `config.json` of a model, for the given family or for the first family that
    supports the model.

    The function converts the result back to settings, and checks that they describe exactly this
    architecture.

    Args:
      config: the settings of the model.
      vocab_size: the number of tokens in the tokenizer.
      family: the `model_type`; None tries all families.

    Raises:
      UserError: no family supports the architecture; the message names a setting.
    """
    model = config.architecture(vocab_size)
    # The unsupported settings of the family that supports most settings.
    nearest: list[str] | None = None
    excluded: list[str] = []
    for name in FAMILIES if family is None else [family]:
        row = FAMILIES[name]
        if found := _required_differences(model, row):
            excluded = excluded or found
            continue
        activation = _activation_name(model, row)
        if activation is None:
            differing = ["model.activation"]
        else:
            written = _hf_keys(config, model, row, activation) | {
                "model_type": row.model_type or name,
                "architectures": [row.architecture],
                "vocab_size": model.vocab_size,
            }
            differing = _changed_settings(written, model)
            if not differing:
                return written
        if nearest is None or len(differing) < len(nearest):
            nearest = differing
    values = flatten_config(config)
    what = " and ".join(f"{path}: {quote(values[path])}" for path in (nearest or excluded)[:3])
    if family is None:
        raise UserError(
            "no Transformers class represents this architecture: the most similar one does not"
            f" support {what}"
        )
    raise UserError(f"the family {family} of Transformers does not support {what}")


def _required_differences(model: ModelConfig, family: Family) -> list[str]:
    """Returns the settings that rule out a family for a model, whatever values the other settings
    of the model have.
    """
    differences = []
    optional_experts = family.dense_layers in OPTIONAL_EXPERTS
    if not optional_experts and (model.experts is not None) != ("moe.use_moe" in family.settings):
        differences.append("moe.use_moe")
    if (model.latent is not None) != ("kv_lora_rank" in family.keys):
        differences.append("attention.kv_lora_rank")
    return differences


def _activation_name(model: ModelConfig, family: Family) -> str | None:
    """Returns the name that a family has for the activation of a model, or None if it does not
    support the activation.
    """
    _, activations = family.activation
    return next(
        (name for name, activation in activations.items() if activation == model.activation), None
    )


def _hf_keys(config: Config, model: ModelConfig, family: Family, activation: str) -> dict[str, Any]:
    """Returns a family's `config.json` keys for a model. They may not describe the model
    completely.
    """
    values = _all_settings(config, model)
    written: dict[str, Any] = {}
    for names, paths in family.keys.items():
        value = values[paths if isinstance(paths, str) else paths[0]]
        if names in CONVERSIONS:
            _, to_key = CONVERSIONS[names]
            value = to_key(value)
        written[names.partition("|")[0]] = value
    activation_key, _ = family.activation
    return (
        written
        | {activation_key: activation}
        | rope_keys(values, model, family)
        | window_keys(model, family)
        | expert_keys(model, family)
        | head_keys(model, family)
        | _projection_keys(model, family)
    )


def _all_settings(config: Config, model: ModelConfig) -> dict[str, Any]:
    """Returns the value of every setting, with the values that the model derives from others in
    place of None.
    """
    values: dict[str, Any] = flatten_config(config)
    values["model.kv_heads"] = model.kv_heads
    values["model.head_size"] = model.head_size
    values["model.hidden_dim"] = model.hidden_dim
    if model.experts is not None:
        values["moe.shared_hidden_dim"] = model.experts.shared_dim
        values["moe.dense_hidden_dim"] = model.experts.dense_dim or model.hidden_dim
    if model.latent is not None:
        values["attention.qk_rope_head_dim"] = model.latent.rotated_size
        values["attention.v_head_dim"] = model.latent.value_size
    scalar = values["attention.query_pre_attn_scalar"]
    if scalar is None:
        values["attention.query_pre_attn_scalar"] = model.head_size
    elif scalar == int(scalar):
        values["attention.query_pre_attn_scalar"] = int(scalar)  # transformers accepts only an int
    if values["attention.attention_multiplier"] is None:
        values["attention.attention_multiplier"] = (
            model.query_pre_attn_scalar or model.head_size
        ) ** -0.5
    return values


def _changed_settings(written: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Returns the settings that have another value after a written `config.json` is converted back
    to settings.
    """
    try:
        converted = build_config(hf_config_to_settings(written, model.max_context)).architecture(
            model.vocab_size
        )
    except UserError:
        return [path for path in FIELDS if path.startswith(("model.", "attention."))]
    return sorted(
        SETTING_OF[name]
        for name in ARCHITECTURE
        if not _nearly_equal(getattr(converted, name), getattr(model, name))
    )


def _nearly_equal(left: Any, right: Any) -> bool:
    """Returns whether two values are equal; floats may differ by rounding in the conversion."""
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-12)
    return bool(left == right)
