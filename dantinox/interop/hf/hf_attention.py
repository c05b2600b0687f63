"""Keys of Hugging Face's `config.json` about attention: rotary positions, sliding windows, heads of
full layers.

For each subject, one function converts the keys to settings, and one writes the keys of a model.
"""

from collections.abc import Mapping
from typing import Any

from dantinox.config import ModelConfig, UserError
from dantinox.files import escape_name, quote
from dantinox.interop.hf.hf_family import Family
from dantinox.interop.hf.hf_keys import (
    FULL,
    SLIDING,
    ConfigKeys,
    check_integer,
    check_object,
    check_per_layer,
    check_positive,
    shortest_period,
)

# For each RoPE scaling type, maps the keys in transformers to DantinoX settings.
FACTOR_KEYS = {"factor": "attention.rope_factor"}
LLAMA3_KEYS = FACTOR_KEYS | {
    "low_freq_factor": "attention.low_freq_factor",
    "high_freq_factor": "attention.high_freq_factor",
}
YARN_KEYS = FACTOR_KEYS | {
    "beta_fast": "attention.beta_fast",
    "beta_slow": "attention.beta_slow",
    "truncate": "attention.rope_truncate",
    "attention_factor": "attention.rope_attention_factor",
    "mscale": "attention.rope_mscale",
    "mscale_all_dim": "attention.rope_mscale_all_dim",
}
LONGROPE_KEYS = FACTOR_KEYS | {
    "short_factor": "attention.rope_short_factors",
    "long_factor": "attention.rope_long_factors",
    "attention_factor": "attention.rope_attention_factor",
}
PROPORTIONAL_KEYS = FACTOR_KEYS | {"partial_rotary_factor": "attention.rope_share"}
ROPE_SCALINGS = {
    "default": {},
    "linear": FACTOR_KEYS,
    "llama3": LLAMA3_KEYS,
    "yarn": YARN_KEYS,
    "longrope": LONGROPE_KEYS,
    "proportional": PROPORTIONAL_KEYS,
}
ORIGINAL_CONTEXT = "original_max_position_embeddings"
WITH_ORIGINAL_CONTEXT = ("llama3", "yarn", "longrope")
QUERY_SCALING = "llama_4_scaling_beta"
# The key of `per_layer_config` with the size and the number of heads of full layers, and their
# settings.
FULL_LAYER_HEADS = {
    "head_dim": "attention.global_head_size",
    "num_key_value_heads": "attention.global_kv_heads",
}


def rope_settings(keys: ConfigKeys, model_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of rotary positions, from `rope_parameters` (transformers 5) or the keys
    of older versions.
    """
    family = keys.family
    if family.rope is None:
        return {}
    kind = keys.take("position_embedding_type") if family.rope == "optional" else "rope"
    if kind not in (None, "nope", "rope"):
        raise UserError(
            f"config.json has position_embedding_type: {quote(kind)}, expected rope, nope or null"
        )
    if kind != "rope":
        for key in ("rope_scaling", "rope_parameters", "rope_theta"):
            keys.take(key)
        return {"attention.use_rotary_pos": False}
    theta = keys.take("rope_theta", 10000.0)
    rotated_part = keys.take("partial_rotary_factor", 1.0)
    scaling, found = _rope_parameters(keys)
    found["attention.rope_theta"] = scaling.pop("rope_theta", theta)
    if family.ntk_alpha and _has_type(scaling, "dynamic") and scaling.get("alpha"):
        # With `alpha`, the scaling is NTK-aware with a constant base, and transformers ignores the
        # other keys.
        alpha = check_positive(scaling["alpha"], "alpha")
        theta = check_positive(found["attention.rope_theta"], "rope_theta")
        size = check_integer(model_settings["model.head_size"], "head_dim", least=4)
        found["attention.rope_theta"] = theta * alpha ** (size / (size - 2))
        scaling = {}
    if not _has_type(scaling, "proportional"):
        rotated_part = scaling.pop("partial_rotary_factor", rotated_part)
    if rotated_part != 1 and family.rope not in ("longrope", "partial"):
        raise UserError(
            f"config.json has partial_rotary_factor: {quote(rotated_part)}; only 1 is supported"
        )
    found["attention.partial_rotary_factor"] = rotated_part
    if family.rope == "listed layers":
        found["attention.rope_layers"] = _listed_rope_layers(
            keys, model_settings["model.num_blocks"]
        )
    return found | _scaling_settings(keys, model_settings, scaling)


def _rope_parameters(keys: ConfigKeys) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the RoPE parameters of all layers, or of the full layers, and the settings of sliding
    layers.
    """
    scaling = check_object(keys.take("rope_scaling"), "rope_scaling")
    parameters = check_object(keys.take("rope_parameters"), "rope_parameters")
    if keys.family.rope != "local":
        return scaling or parameters, {}
    sliding = check_object(parameters.pop(SLIDING, None), SLIDING)
    full = check_object(parameters.pop(FULL, None), FULL)
    local = dict(sliding)
    local_theta = local.pop("rope_theta", keys.take("rope_local_base_freq"))
    if local.pop("rope_type", "default") != "default" or local or parameters:
        raise UserError(
            f"config.json has rope_parameters: {quote(sliding or parameters)} for sliding layers"
        )
    return full | scaling, {"attention.rope_local_theta": local_theta}


def _has_type(scaling: Mapping[str, Any], kind: str) -> bool:
    return kind in (scaling.get("rope_type"), scaling.get("type"))


def _listed_rope_layers(keys: ConfigKeys, layers: int) -> tuple[bool, ...]:
    """Returns which layers use rotary positions. In `no_rope_layers`, 1 means that a layer uses
    them.
    """
    every = keys.take_integer("no_rope_layer_interval")
    flags = keys.take("no_rope_layers")
    if flags is None:
        flags = [(i + 1) % every for i in range(layers)]
    return shortest_period(
        [bool(flag) for flag in check_per_layer(flags, layers, "no_rope_layers")]
    )


def _scaling_settings(
    keys: ConfigKeys, model_settings: Mapping[str, Any], scaling: dict[str, Any]
) -> dict[str, Any]:
    """Returns the settings of RoPE scaling."""
    rope_type = scaling.pop("rope_type", None)
    older_type = scaling.pop("type", None)
    kind = rope_type or older_type or "default"
    longrope = keys.family.rope == "longrope"
    if longrope and kind in ("su", "yarn"):  # names of longrope in older files of this family
        kind = "longrope"
    model_original = keys.take(ORIGINAL_CONTEXT) if longrope else None
    if keys.family.query_scaling:
        scaling.pop("max_position_embeddings", None)  # transformers never uses it
    if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
        raise UserError(
            f"config.json has rope_type: {quote(kind)}, expected one of {', '.join(ROPE_SCALINGS)}"
        )
    found = {path: scaling.pop(key, None) for key, path in ROPE_SCALINGS[kind].items()}
    if keys.family.query_scaling and kind in WITH_ORIGINAL_CONTEXT:
        beta = check_positive(scaling.pop(QUERY_SCALING, None), QUERY_SCALING)
        found["attention.query_scaling_beta"] = beta
    for path in ("attention.rope_mscale", "attention.rope_mscale_all_dim"):
        found[path] = found.get(path) or None  # transformers treats 0 as absent
    scaling_original = scaling.pop(ORIGINAL_CONTEXT, None)
    if kind in WITH_ORIGINAL_CONTEXT:
        original = model_original or scaling_original or model_settings["model.max_context"]
        found["attention.rope_original_context"] = check_integer(original, ORIGINAL_CONTEXT)
    if kind in ("yarn", "longrope") and not found["attention.rope_factor"]:
        context = check_integer(model_settings["model.max_context"], "max_position_embeddings")
        found["attention.rope_factor"] = context / found["attention.rope_original_context"]
    for key, value in scaling.items():
        if value is not None and (key, value) != ("truncate", True):
            raise UserError(
                f"config.json has {escape_name(key)}: {quote(value)}, an unknown key for rope_type"
                f" {kind}"
            )
    if kind == "default" or (kind == "linear" and found["attention.rope_factor"] == 1):
        return {}
    return {"attention.rope_scaling": kind} | found


def rope_keys(values: Mapping[str, Any], model: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the keys that `rope_settings` reads, given the values of all settings and the
    model.
    """
    if family.rope is None or model.position != "rope":
        return {}
    kind = values["attention.rope_scaling"].replace("none", "default")
    scaling: dict[str, Any] = {"rope_type": kind}
    for key, path in ROPE_SCALINGS[kind].items():
        if values[path] is not None:
            scaling[key] = list(values[path]) if isinstance(values[path], tuple) else values[path]
    written: dict[str, Any] = {}
    if kind in WITH_ORIGINAL_CONTEXT:
        scaling[ORIGINAL_CONTEXT] = values["attention.rope_original_context"]
    if family.rope == "longrope":
        written[ORIGINAL_CONTEXT] = values["attention.rope_original_context"] or model.max_context
    if family.rope in ("longrope", "partial"):
        written["partial_rotary_factor"] = scaling["partial_rotary_factor"] = (
            model.partial_rotary_factor
        )
    if family.query_scaling and model.query_scaling_beta is not None:
        scaling[QUERY_SCALING] = model.query_scaling_beta
    if family.rope == "listed layers":
        written["no_rope_layers"] = [
            int(layer not in model.unrotated) for layer in range(model.num_blocks)
        ]
    # Versions before transformers 5 read the older keys.
    written["rope_theta"] = model.rope_theta
    if kind != "default":
        written["rope_scaling"] = dict(scaling)
    scaling["rope_theta"] = model.rope_theta
    if family.rope != "local":
        return written | {"rope_parameters": scaling}
    local_theta = model.rope_theta if model.rope_local_theta is None else model.rope_local_theta
    parameters = {FULL: scaling, SLIDING: {"rope_type": "default", "rope_theta": local_theta}}
    if family.per_layer_heads:  # transformers before version 5 does not have this family
        return {"rope_parameters": parameters}
    return written | {"rope_local_base_freq": local_theta, "rope_parameters": parameters}


def window_settings(keys: ConfigKeys, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sliding-window settings: the window length and the layers that have a window."""
    family = keys.family
    if family.window is None:
        return {}
    window = keys.take("sliding_window")
    if "optional" in family.window and not keys.take("use_sliding_window"):
        window = None
    kinds = _layer_types(keys, settings, window)
    if family.per_layer_heads:
        kinds[-1] = FULL  # as in transformers, regardless of `layer_types`
    if other := set(kinds) - {SLIDING, FULL}:
        raise UserError(
            f"config.json has layer_types: {quote(min(other, key=str))}, expected {SLIDING} or"
            f" {FULL}"
        )
    found: dict[str, Any] = {}
    if family.rope == "sliding layers" or (family.rope == "windowed layers" and window is not None):
        found["attention.rope_layers"] = shortest_period([kind == SLIDING for kind in kinds])
    if SLIDING not in kinds:
        return found
    if window is None:
        raise UserError(f"config.json has layer_types: {SLIDING}, but no sliding_window is in use")
    return found | {
        "attention.sliding_window": True,
        "attention.context_window": check_integer(window, "sliding_window") - 1,
        "attention.layer_types": shortest_period(
            ["sliding" if kind == SLIDING else "full" for kind in kinds]
        ),
    }


def _layer_types(keys: ConfigKeys, settings: Mapping[str, Any], window: Any) -> list[str]:
    """Returns `SLIDING` or `FULL` for each layer, from `layer_types` or, without it, by the rule of
    the family.
    """
    family = keys.family
    layers = range(settings["model.num_blocks"])
    if "layers" not in (family.window or ""):
        return [FULL if window is None else SLIDING for _ in layers]
    listed = keys.take("layer_types")
    first = keys.take("max_window_layers", 0)
    every = family.full_every
    if family.rope in ("local", "sliding layers", "windowed layers"):
        every = keys.take("_sliding_window_pattern|sliding_window_pattern", every)
    if listed is not None:
        return check_per_layer(listed, len(layers), "layer_types")
    if family.full_every and "optional" in (family.window or ""):
        first = check_integer(first, "max_window_layers", least=0)
        slides = [bool(window) and (i + 1) % family.full_every != 0 and i < first for i in layers]
    elif family.full_every and not (family.rope == "windowed layers" and window is None):
        every = check_integer(every, "sliding_window_pattern")
        slides = [(i + 1) % every != 0 for i in layers]
    elif family.rope == "listed layers":
        rotated = settings["attention.rope_layers"]
        slides = [bool(window) and not rotated[i % len(rotated)] for i in layers]
    else:
        first = check_integer(first, "max_window_layers", least=0)
        slides = [bool(window) and i >= first for i in layers]
    return [SLIDING if slide else FULL for slide in slides]


def window_keys(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the keys that `window_settings` reads."""
    if family.window is None:
        return {}
    window = max((window for window in model.windows if window is not None), default=None)
    if window is None and family.per_layer_heads:
        # transformers requires a number, even if no layer has a window.
        window = family.defaults["sliding_window"]
    if window is None and (
        family.rope == "sliding layers" or (family.rope == "windowed layers" and model.unrotated)
    ):
        # No layer has this window, but with it transformers rotates no full layer.
        window = family.defaults["sliding_window"]
    written: dict[str, Any] = {"sliding_window": window}
    if "optional" in family.window:
        written["use_sliding_window"] = window is not None
    if "layers" in family.window:
        written["layer_types"] = [FULL if window is None else SLIDING for window in model.windows]
    return written


def head_settings(keys: ConfigKeys, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the head settings of full layers, if they differ from the head settings of sliding
    layers.
    """
    if not keys.family.per_layer_heads:
        return {}
    per_layer = keys.take("per_layer_config")
    size = keys.take("global_head_dim")
    heads = keys.take("num_global_key_value_heads")
    if per_layer is None:
        # transformers ignores the number of key heads unless the keys are also the values.
        return {
            "attention.global_head_size": size,
            "attention.global_kv_heads": heads if settings["attention.k_eq_v"] else None,
        }
    period = settings.get("attention.layer_types", ("full",))
    full = [i for i in range(settings["model.num_blocks"]) if period[i % len(period)] == "full"]
    layers = {
        key: check_object(value, key)
        for key, value in check_object(per_layer, "per_layer_config").items()
    }
    common = layers.get(str(full[0]), {})
    expected = {str(i): common for i in full} if common else {}
    if layers != expected or common.keys() - FULL_LAYER_HEADS.keys():
        raise UserError(
            f"config.json has per_layer_config: {quote(per_layer)}, expected equal head_dim and"
            f" num_key_value_heads for all layers of {FULL} ({', '.join(map(str, full))})"
            " and no other layer"
        )
    return {path: common.get(key) for key, path in FULL_LAYER_HEADS.items()}


def head_keys(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the keys that `head_settings` reads, and `vocab_size_per_layer_input`."""
    if not family.per_layer_heads:
        return {}
    size = model.global_head_size or model.head_size
    heads = model.global_kv_heads
    written: dict[str, Any] = {
        "global_head_dim": size,
        "vocab_size_per_layer_input": model.vocab_size,
        "num_global_key_value_heads": heads,
    }
    # Without k_eq_v, transformers ignores `num_global_key_value_heads`.
    if heads is not None and not model.k_eq_v:
        full = [i for i, window in enumerate(model.windows) if window is None]
        written["per_layer_config"] = {
            str(i): {"head_dim": size, "num_key_value_heads": heads} for i in full
        }
    return written
