"""Conversion between Hugging Face's `config.json` and the model settings."""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from dantinox.config import Config, ModelConfig, UserError, build_config
from dantinox.config.model_config import ARCHITECTURE, SETTING_OF
from dantinox.config.sections import FIELDS, flatten_config
from dantinox.files import escape_name, quote
from dantinox.interop.hf.hf_families import BITNET, CONVERSIONS, FAMILIES, Family
from dantinox.interop.hf.hf_unsupported import IGNORED_KEYS, SUPPORTED_VALUES, UNSUPPORTED_FAMILIES

# For each RoPE scaling type, maps the keys in transformers to DantinoX settings.
FACTOR_KEYS = {"factor": "attention.rope_factor"}
LLAMA3_KEYS = FACTOR_KEYS | {"low_freq_factor": "attention.low_freq_factor", "high_freq_factor": "attention.high_freq_factor"}
YARN_KEYS = FACTOR_KEYS | {
    "beta_fast": "attention.beta_fast", "beta_slow": "attention.beta_slow", "truncate": "attention.rope_truncate",
    "attention_factor": "attention.rope_attention_factor",
    "mscale": "attention.rope_mscale", "mscale_all_dim": "attention.rope_mscale_all_dim",
}  # fmt: skip
LONGROPE_KEYS = FACTOR_KEYS | {
    "short_factor": "attention.rope_short_factors", "long_factor": "attention.rope_long_factors",
    "attention_factor": "attention.rope_attention_factor",
}  # fmt: skip
PROPORTIONAL_KEYS = FACTOR_KEYS | {"partial_rotary_factor": "attention.rope_share"}
ROPE_SCALINGS = {
    "default": {}, "linear": FACTOR_KEYS, "llama3": LLAMA3_KEYS, "yarn": YARN_KEYS, "longrope": LONGROPE_KEYS,
    "proportional": PROPORTIONAL_KEYS,
}  # fmt: skip
ORIGINAL, BETA = "original_max_position_embeddings", "llama_4_scaling_beta"
WITH_ORIGINAL = ("llama3", "yarn", "longrope")
SLIDING, FULL = "sliding_attention", "full_attention"
MAX_LAYERS = 10_000
REQUIRED_KEYS = ("hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "intermediate_size")
HF_DEFAULTS = {"attention_bias": False, "mlp_bias": False}


def find_family(config: Mapping[str, Any]) -> Family:
    """Returns the family of a `config.json`; raises a `UserError` if it is not supported."""
    name = config.get("model_type")
    for family in FAMILIES.values():
        if family.model_type is not None and (name, config.get("architectures")) == (family.model_type, [family.architecture]):
            return family
    if not isinstance(name, str) or name not in FAMILIES or FAMILIES[name].model_type is not None:
        if isinstance(name, str) and name in UNSUPPORTED_FAMILIES:
            nearest, missing = UNSUPPORTED_FAMILIES[name]
            raise UserError(f"config.json has model_type: {name}, which is not supported: it is {nearest} with {missing}")
        raise UserError(f"config.json has model_type: {quote(name)}, expected one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    classes = config.get("architectures") or [FAMILIES[name].architecture]
    if classes != [family.architecture]:
        raise UserError(f"config.json has architectures: {quote(classes)}; only {family.architecture} of {name} generates text")
    return family


class _Keys:
    """The keys of a `config.json` that have not been converted yet."""

    def __init__(self, config: Mapping[str, Any], family: Family):
        self.remaining = deepcopy(dict(config))
        self.family = family

    def take(self, names: str, default: Any = None) -> Any:
        """Removes a key; returns its value or, if it is absent, transformers' default. `a|b` are two names of one key."""
        first, *others = names.split("|")
        values = [self.remaining.pop(name) for name in (first, *others) if name in self.remaining]
        return values[0] if values else (HF_DEFAULTS | dict(self.family.defaults)).get(first, default)

    def finish(self) -> None:
        """Raises a `UserError` if a remaining key may change the model."""
        ignored = IGNORED_KEYS.union(self.family.ignored)
        supported = SUPPORTED_VALUES | dict(self.family.supported) | dict(self.family.constants)
        for key, value in self.remaining.items():
            allowed = supported.get(key, ())
            if value is None or key in ignored or value in (allowed if isinstance(allowed, tuple) else (allowed,)):
                continue
            hint = f"only {quote(supported[key])} is supported" if key in supported else "the key is unknown"
            raise UserError(f"config.json has {escape_name(key)}: {quote(value)}; {hint}")


def hf_config_to_settings(config: Mapping[str, Any], max_context: int | None = None) -> dict[str, dict[str, Any]]:
    """Returns the settings (sections `model`, `moe` and `attention`) of a `config.json`.

    Args:
      config: the content of the file.
      max_context: the longest sequence in tokens. None: the context length in the checkpoint, or for longrope its original
        context length. For longrope, a larger value selects the long factors for every sequence, even a short one.

    Raises:
      UserError: the family is unknown, or a key has no equivalent setting; the message names the key.
    """
    family = find_family(config)
    keys = _Keys(config, family)
    settings: dict[str, Any] = dict(family.settings)
    for names, paths in family.keys.items():
        value = keys.take(names)
        if names in CONVERSIONS:
            value = CONVERSIONS[names][0](_check_positive(value, names))
        for path in (paths,) if isinstance(paths, str) else paths:
            if names in REQUIRED_KEYS or FIELDS[path].default is not None:
                _require(value, names.partition("|")[0])
            settings[path] = _check_integer(value, names, most=MAX_LAYERS) if path == "model.num_blocks" else value
    key, activations = family.activation
    name = keys.take(key)
    if not isinstance(name, str) or name not in activations:
        raise UserError(f"config.json has {key}: {quote(name)}, expected one of {', '.join(activations)}")
    settings["model.activation"] = activations[name]
    settings |= _rope_settings(keys, settings)
    settings |= _window_settings(keys, settings)
    settings |= _expert_settings(keys, settings)
    settings |= _head_settings(keys, settings)
    settings |= _projection_settings(keys)
    if "model.per_layer_dim" in settings:
        _check_vocabulary(keys, config, settings)
    if not settings.get("attention.sliding_window"):
        settings.pop("attention.rope_local_theta", None)
    if not settings.get("moe.dense_layers"):
        settings.pop("moe.dense_hidden_dim", None)
    if not settings.get("attention.kv_shared_layers"):
        settings.pop("model.double_wide_mlp", None)
    keys.finish()
    if family.rope is None and max_context not in (None, settings["model.max_context"]):
        raise UserError(
            f"the checkpoint has learned positions for {settings['model.max_context']} tokens: leave max_context out"
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


def _require(value: Any, key: str) -> Any:
    """Returns the value; raises a `UserError` if it is None."""
    if value is None:
        raise UserError(f"config.json lacks {key}")
    return value


def _check_integer(value: Any, key: str, least: int = 1, most: int = 2**31 - 1) -> int:
    if type(value) is not int or not least <= value <= most:
        raise UserError(f"config.json has {key}: {quote(value)}, expected a number from {least} to {most}")
    return value


def _check_positive(value: Any, key: str) -> float:
    if type(value) not in (int, float) or not 1e-9 < value < 1e9:
        raise UserError(f"config.json has {key}: {quote(value)}, expected a positive number")
    return float(value)


def _check_object(value: Any, key: str) -> dict[str, Any]:
    """Returns a copy of an object, or an empty dict for None."""
    if not isinstance(value or {}, dict):
        raise UserError(f"config.json has {key}: {quote(value)}, expected an object")
    return dict(value or {})


def _rope_settings(keys: _Keys, model_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of rotary positions, from `rope_parameters` (transformers 5) or the keys of older versions."""
    family = keys.family
    if family.rope is None:
        return {}
    kind = keys.take("position_embedding_type") if family.rope == "optional" else "rope"
    if kind not in (None, "nope", "rope"):
        raise UserError(f"config.json has position_embedding_type: {quote(kind)}, expected rope, nope or null")
    if kind != "rope":
        for key in ("rope_scaling", "rope_parameters", "rope_theta"):
            keys.take(key)
        return {"attention.use_rotary_pos": False}
    scaling, parameters = (_check_object(keys.take(key), key) for key in ("rope_scaling", "rope_parameters"))
    theta, rotated_part = keys.take("rope_theta", 10000.0), keys.take("partial_rotary_factor", 1.0)
    found: dict[str, Any] = {}
    if family.rope == "local":
        layers = {kind: _check_object(parameters.pop(kind, None), kind) for kind in (SLIDING, FULL)}
        local = dict(layers[SLIDING])
        found["attention.rope_local_theta"] = local.pop("rope_theta", keys.take("rope_local_base_freq"))
        if local.pop("rope_type", "default") != "default" or local or parameters:
            raise UserError(f"config.json has rope_parameters: {quote(dict(layers[SLIDING]) or parameters)} for sliding layers")
        scaling = dict(layers[FULL]) | scaling
    else:
        scaling = dict(scaling or parameters)
    found["attention.rope_theta"] = scaling.pop("rope_theta", theta)
    if family.ntk_alpha and "dynamic" in (scaling.get("rope_type"), scaling.get("type")) and scaling.get("alpha"):
        # With `alpha`, the scaling is NTK-aware with a constant base, and transformers ignores the other keys.
        alpha = _check_positive(scaling["alpha"], "alpha")
        size = model_settings["model.head_size"]
        theta = _check_positive(found["attention.rope_theta"], "rope_theta")
        found["attention.rope_theta"] = theta * alpha ** (_check_integer(size, "head_dim", least=4) / (size - 2))
        scaling = {}
    if "proportional" not in (scaling.get("rope_type"), scaling.get("type")):
        rotated_part = scaling.pop("partial_rotary_factor", rotated_part)
    if rotated_part != 1 and family.rope not in ("longrope", "partial"):
        raise UserError(f"config.json has partial_rotary_factor: {quote(rotated_part)}; only 1 is supported")
    found["attention.partial_rotary_factor"] = rotated_part
    if family.rope == "listed layers":
        L: int = model_settings["model.num_blocks"]
        every = _check_integer(keys.take("no_rope_layer_interval"), "no_rope_layer_interval")
        flags = keys.take("no_rope_layers")
        rotated = _per_layer(flags, L, "no_rope_layers") if flags is not None else [(i + 1) % every for i in range(L)]
        found["attention.rope_layers"] = _shortest_period([bool(flag) for flag in rotated])
    return found | _scaling_settings(keys, model_settings, scaling)


def _scaling_settings(keys: _Keys, model_settings: Mapping[str, Any], scaling: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of RoPE scaling."""
    kinds = scaling.pop("rope_type", None), scaling.pop("type", None)
    kind = kinds[0] or kinds[1] or "default"
    longrope = keys.family.rope == "longrope"
    if longrope and kind in ("su", "yarn"):  # names of longrope in older files of this family
        kind = "longrope"
    model_original = keys.take(ORIGINAL) if longrope else None
    if keys.family.query_scaling:
        scaling.pop("max_position_embeddings", None)  # transformers never uses it
    if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
        raise UserError(f"config.json has rope_type: {quote(kind)}, expected one of {', '.join(ROPE_SCALINGS)}")
    found = {path: scaling.pop(key, None) for key, path in ROPE_SCALINGS[kind].items()}
    if keys.family.query_scaling and kind in WITH_ORIGINAL:
        found["attention.query_scaling_beta"] = _check_positive(scaling.pop(BETA, None), BETA)
    for path in ("attention.rope_mscale", "attention.rope_mscale_all_dim"):
        found[path] = found.get(path) or None  # transformers treats 0 as absent
    original = model_original or scaling.pop(ORIGINAL, None) or model_settings["model.max_context"]
    scaling.pop(ORIGINAL, None)
    if kind in WITH_ORIGINAL:
        found["attention.rope_original_context"] = _check_integer(original, ORIGINAL)
    if kind in ("yarn", "longrope") and not found["attention.rope_factor"]:
        context = _check_integer(model_settings["model.max_context"], "max_position_embeddings")
        found["attention.rope_factor"] = context / found["attention.rope_original_context"]
    for key, value in scaling.items():
        if value is not None and (key, value) != ("truncate", True):
            raise UserError(f"config.json has {escape_name(key)}: {quote(value)}, an unknown key for rope_type {kind}")
    if kind == "default" or (kind == "linear" and found["attention.rope_factor"] == 1):
        return {}
    return {"attention.rope_scaling": kind} | found


def _window_settings(keys: _Keys, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sliding-window settings: the window length and the layers that have a window."""
    family = keys.family
    if family.window is None:
        return {}
    L: int = settings["model.num_blocks"]
    window = keys.take("sliding_window")
    if "optional" in family.window and not keys.take("use_sliding_window"):
        window = None
    kinds = [FULL if window is None else SLIDING] * L
    if "layers" in family.window:
        layer_types, first = keys.take("layer_types"), keys.take("max_window_layers", 0)
        every = family.full_every
        if family.rope in ("local", "sliding layers", "windowed layers"):
            every = keys.take("_sliding_window_pattern|sliding_window_pattern", every)
        if layer_types is not None:
            kinds = _per_layer(layer_types, L, "layer_types")
        elif family.full_every and "optional" in family.window:
            first = _check_integer(first, "max_window_layers", least=0)
            kinds = [SLIDING if window and (i + 1) % family.full_every and i < first else FULL for i in range(L)]
        elif family.full_every and not (family.rope == "windowed layers" and window is None):
            kinds = [SLIDING if (i + 1) % _check_integer(every, "sliding_window_pattern") else FULL for i in range(L)]
        elif family.rope == "listed layers":
            rotated = settings["attention.rope_layers"]
            kinds = [SLIDING if window and not rotated[i % len(rotated)] else FULL for i in range(L)]
        else:
            first = _check_integer(first, "max_window_layers", least=0)
            kinds = [SLIDING if window and i >= first else FULL for i in range(L)]
    if family.per_layer_heads:
        kinds[-1] = FULL  # as in transformers, regardless of `layer_types`
    if other := set(kinds) - {SLIDING, FULL}:
        raise UserError(f"config.json has layer_types: {quote(min(other, key=str))}, expected {SLIDING} or {FULL}")
    found: dict[str, Any] = {}
    if family.rope == "sliding layers" or (family.rope == "windowed layers" and window is not None):
        found["attention.rope_layers"] = _shortest_period([kind == SLIDING for kind in kinds])
    if SLIDING not in kinds:
        return found
    if window is None:
        raise UserError(f"config.json has layer_types: {SLIDING}, but no sliding_window is in use")
    return found | {
        "attention.sliding_window": True,
        "attention.context_window": _check_integer(window, "sliding_window") - 1,
        "attention.layer_types": _shortest_period(["sliding" if kind == SLIDING else "full" for kind in kinds]),
    }


def _head_settings(keys: _Keys, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the head settings of full layers, if they differ from the head settings of sliding layers."""
    if not keys.family.per_layer_heads:
        return {}
    L: int = settings["model.num_blocks"]
    names = {"head_dim": "attention.global_head_size", "num_key_value_heads": "attention.global_kv_heads"}
    per_layer, size, heads = (keys.take(k) for k in ("per_layer_config", "global_head_dim", "num_global_key_value_heads"))
    if per_layer is None:
        return {names["head_dim"]: size, names["num_key_value_heads"]: heads if settings["attention.k_eq_v"] else None}
    period = settings.get("attention.layer_types", ("full",))
    full = [i for i in range(L) if period[i % len(period)] == "full"]
    layers = {key: _check_object(value, key) for key, value in _check_object(per_layer, "per_layer_config").items()}
    first = layers.get(str(full[0]), {})
    if layers != ({str(i): first for i in full} if first else {}) or first.keys() - names.keys():
        raise UserError(
            f"config.json has per_layer_config: {quote(per_layer)}, expected equal head_dim and num_key_value_heads for all "
            f"layers of {FULL} ({', '.join(map(str, full))}) and no other layer"
        )
    return {path: first.get(key) for key, path in names.items()}


def _head_keys(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the `config.json` keys that `_head_settings` reads, and `vocab_size_per_layer_input`."""
    if not family.per_layer_heads:
        return {}
    size = model.global_head_size or model.head_size
    heads = model.global_kv_heads
    written: dict[str, Any] = {"global_head_dim": size, "vocab_size_per_layer_input": model.vocab_size}
    written["num_global_key_value_heads"] = heads
    if heads is not None and not model.k_eq_v:  # else transformers ignores `num_global_key_value_heads`
        full = [i for i, window in enumerate(model.windows) if window is None]
        written["per_layer_config"] = {str(i): {"head_dim": size, "num_key_value_heads": heads} for i in full}
    return written


def _check_vocabulary(keys: _Keys, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raises a `UserError` if the per-layer embeddings have a different vocabulary size."""
    found = keys.take("vocab_size_per_layer_input")
    expected = config.get("vocab_size", 262144)
    if settings["model.per_layer_dim"] and found != expected:
        raise UserError(
            f"config.json has vocab_size_per_layer_input: {quote(found)}; only the vocab_size, {quote(expected)}, is supported"
        )


def _projection_settings(keys: _Keys) -> dict[str, Any]:
    """Returns the settings of ternary projections, if `quantization_config` says that the projections are ternary."""
    options = keys.remaining.get("quantization_config")
    if not keys.family.bitlinear or not isinstance(options, dict) or options.get("quant_method") != BITNET["quant_method"]:
        return {}
    keys.take("quantization_config")
    return {"model.projections": "ternary", "model.sub_norms": keys.family.settings.get("model.sub_norms", False)}


def _projection_keys(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the `config.json` keys that `_projection_settings` reads, and the constant keys of the family."""
    ternary = family.bitlinear and model.projections == "ternary"
    return dict(family.constants) | ({"quantization_config": dict(BITNET)} if ternary else {})


def _expert_settings(keys: _Keys, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of dense layers and of expert groups."""
    family = keys.family
    L = settings["model.num_blocks"]
    found: dict[str, Any] = {}
    dense: set[int] = set()
    if family.dense_layers == "first":
        dense = set(range(min(_check_integer(keys.take("first_k_dense_replace"), "first_k_dense_replace", least=0), L)))
    elif family.dense_layers == "steps":
        every = _check_integer(keys.take("decoder_sparse_step", 1), "decoder_sparse_step")
        listed = keys.take("mlp_only_layers") or []
        if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
            raise UserError(f"config.json has mlp_only_layers: {quote(listed)}, expected a list of numbers")
        dense = {i for i in range(L) if (i + 1) % every or i in listed}
    elif family.dense_layers == "range":
        start, end, every = (
            _check_integer(keys.take(key), key, least=least)
            for key, least in (("moe_layer_start_index", 0), ("moe_layer_end_index", -1), ("moe_layer_interval", 1))
        )
        dense = {i for i in range(L) if i < start or (i > end != -1) or (i + 1) % every}
    elif family.dense_layers == "types":
        kinds = keys.take("mlp_layer_types") or ["dense", *["sparse"] * (L - 1)]
        if other := [kind for kind in _per_layer(kinds, L, "mlp_layer_types") if kind not in ("dense", "sparse")]:
            raise UserError(f"config.json has mlp_layer_types: {quote(other[0])}, expected dense or sparse")
        dense = {i for i, kind in enumerate(kinds) if kind == "dense"}
    elif family.dense_layers == "all or none":
        for kind in _per_layer(_require(keys.take("layer_types"), "layer_types"), L, "layer_types"):
            if kind not in ("attention", FULL):
                raise UserError(f"config.json has layer_types: {quote(kind)}; only attention is supported")
        found |= _optional_expert_settings(keys)
    elif family.dense_layers == "parallel":
        found |= _parallel_expert_settings(keys)
    if dense:
        found["moe.dense_layers"] = sorted(dense)
    if family.group_score is not None:
        groups, best = keys.take("n_group"), keys.take("topk_group")
        method = keys.take("topk_method", "group_limited_greedy") if family.group_score == "max" else "group_limited_greedy"
        if method not in ("greedy", "group_limited_greedy"):
            raise UserError(f"config.json has topk_method: {quote(method)}, expected one of greedy, group_limited_greedy")
        if method != "greedy" and groups != 1:
            found["moe.n_groups"] = _check_integer(_require(groups, "n_group"), "n_group")
            best = _check_integer(_require(best, "topk_group"), "topk_group")
            found |= {"moe.top_k_groups": best, "moe.group_score": family.group_score}
    return found


def _optional_expert_settings(keys: _Keys) -> dict[str, Any]:
    """Returns the settings of a model with routed experts and a shared expert, or of a dense model if there are no experts."""
    names = ("num_local_experts|num_experts", "num_experts_per_tok", "intermediate_size", "shared_intermediate_size")
    count, top_k, width, shared = (keys.take(name) for name in names)
    if not count:
        return {"model.hidden_dim": shared}
    experts = {"moe.use_moe": True, "moe.norm_topk_prob": True, "moe.n_experts": count, "moe.top_k_mlp": top_k}
    return experts | {"model.hidden_dim": width, "moe.shared_experts": 1, "moe.shared_hidden_dim": shared}


def _parallel_expert_settings(keys: _Keys) -> dict[str, Any]:
    """Returns the settings of a model whose layers have experts and a parallel dense branch, or of a dense model.

    `enable_moe_block` decides between the two.
    """
    names = ("num_experts", "top_k_experts", "moe_intermediate_size", "intermediate_size")
    enabled = keys.take("enable_moe_block", False)
    count, top_k, width, dense = (keys.take(name) for name in names)
    dense = _require(dense, "intermediate_size")
    if not enabled:
        return {"model.hidden_dim": dense}
    experts = {"moe.use_moe": True, "moe.norm_topk_prob": True, "moe.branch_norms": True, "moe.shared_experts": 1}
    experts |= {"moe.n_experts": _require(count, names[0]), "moe.top_k_mlp": _require(top_k, names[1])}
    return experts | {"model.hidden_dim": _require(width, names[2]), "moe.shared_hidden_dim": dense}


def _expert_keys(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the `config.json` keys that `_expert_settings` reads."""
    written: dict[str, Any]
    if family.dense_layers == "all or none":
        written = {"position_embedding_type": "rope" if model.position == "rope" else None}
        written |= {"layer_types": [FULL] * model.num_blocks, "intermediate_size": model.hidden_dim}
        written["mamba_n_heads"] = 1  # transformers requires a divisor of the width, even without Mamba layers
        experts = model.experts
        if experts is None:
            return written | {"num_local_experts": 0, "shared_intermediate_size": model.hidden_dim}
        sizes = {"num_local_experts": experts.count, "num_experts_per_tok": experts.top_k}
        return written | sizes | {"shared_intermediate_size": experts.shared_dim}
    if family.dense_layers == "parallel":
        experts = model.experts
        if experts is None:
            return {"enable_moe_block": False, "intermediate_size": model.hidden_dim}
        written = {"enable_moe_block": True, "num_experts": experts.count, "top_k_experts": experts.top_k}
        return written | {"moe_intermediate_size": model.hidden_dim, "intermediate_size": experts.shared_dim}
    if model.experts is None:
        return {}
    dense, groups = model.experts.dense_layers, model.experts.groups
    written = {}
    if family.dense_layers == "first":
        written["first_k_dense_replace"] = len(dense)
    elif family.dense_layers == "steps":
        written |= {"decoder_sparse_step": 1, "mlp_only_layers": list(dense)}
    elif family.dense_layers == "types":
        written["mlp_layer_types"] = ["dense" if i in dense else "sparse" for i in range(model.num_blocks)]
    elif family.dense_layers == "range":
        routed = [i for i in range(model.num_blocks) if i not in dense]
        first, last = routed[0], routed[-1]
        steps = range(1, model.num_blocks + 1)
        every = next((n for n in steps if routed == [i for i in range(first, last + 1) if not (i + 1) % n]), 1)
        end = -1 if last == model.num_blocks - 1 else last
        written |= {"moe_layer_start_index": first, "moe_layer_end_index": end, "moe_layer_interval": every}
    if family.group_score is not None:
        written |= {"n_group": groups, "topk_group": model.experts.top_groups}
    if family.group_score == "max":
        written["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    return written


def _per_layer(values: Any, count: int, key: str) -> list[Any]:
    if not isinstance(values, list) or len(values) != count:
        raise UserError(f"config.json has {key}: {quote(values)}, expected a list of {count}, one for each layer")
    return values


def _shortest_period(values: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the shortest pattern that gives these values when it is repeated."""
    lengths = range(1, len(values) + 1)
    size = next(n for n in lengths if all(value == values[i % n] for i, value in enumerate(values)))
    return tuple(values[:size])


def settings_to_hf_config(config: Config, vocab_size: int, family: str | None = None) -> dict[str, Any]:
    """Returns the `config.json` of a model, for the given family or for the first family that supports the model.

    The function converts the result back to settings, and checks that they describe exactly this architecture.

    Args:
      config: the settings of the model.
      vocab_size: the number of tokens in the tokenizer.
      family: the `model_type`; None tries all families.

    Raises:
      UserError: no family supports the architecture; the message names a setting.
    """
    model = config.architecture(vocab_size)
    nearest: list[str] | None = None
    excluded: list[str] = []
    for name in FAMILIES if family is None else [family]:
        if found := _required_differences(model, FAMILIES[name]):
            excluded = excluded or found
            continue
        written = _hf_settings(config, model, FAMILIES[name])
        differing = [key for key, value in written.items() if value is _UNSUPPORTED]
        if not differing:
            written |= {"model_type": FAMILIES[name].model_type or name, "architectures": [FAMILIES[name].architecture]}
            written |= {"vocab_size": model.vocab_size}
            differing = _changed_settings(written, model)
        if not differing:
            return written
        nearest = differing if nearest is None or len(differing) < len(nearest) else nearest
    nearest = nearest or excluded
    values = flatten_config(config)
    what = " and ".join(f"{path}: {quote(values[path])}" for path in nearest[:3])
    if family is None:
        raise UserError(f"no Transformers class represents this architecture: the most similar one does not support {what}")
    raise UserError(f"the family {family} of Transformers does not support {what}")


def _required_differences(model: ModelConfig, family: Family) -> list[str]:
    """Returns the settings that rule out a family for a model, whatever values the other settings of the model have."""
    experts, latents = "moe.use_moe" in family.settings, "kv_lora_rank" in family.keys
    pairs = {"moe.use_moe": (model.experts is not None, experts), "attention.kv_lora_rank": (model.latent is not None, latents)}
    if family.dense_layers in ("all or none", "parallel"):  # the family has models with and without experts
        del pairs["moe.use_moe"]
    return [path for path, (of_model, of_family) in pairs.items() if of_model != of_family]


_UNSUPPORTED = object()


def _hf_settings(config: Config, model: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns a family's `config.json` keys for a model, or an unsupported setting with the value `_UNSUPPORTED`.

    The keys may not describe the model completely.
    """
    values: dict[str, Any] = flatten_config(config) | {"model.kv_heads": model.kv_heads, "model.head_size": model.head_size}
    values |= {"model.hidden_dim": model.hidden_dim}
    if model.experts is not None:
        values |= {"moe.shared_hidden_dim": model.experts.shared_dim}
        values |= {"moe.dense_hidden_dim": model.experts.dense_dim or model.hidden_dim}
    if model.latent is not None:
        values |= {"attention.qk_rope_head_dim": model.latent.rotated_size, "attention.v_head_dim": model.latent.value_size}
    if values["attention.query_pre_attn_scalar"] is None:
        values["attention.query_pre_attn_scalar"] = model.head_size
    elif (scalar := values["attention.query_pre_attn_scalar"]) == int(scalar):
        values["attention.query_pre_attn_scalar"] = int(scalar)  # transformers accepts only an int
    if values["attention.attention_multiplier"] is None:
        values["attention.attention_multiplier"] = (model.query_pre_attn_scalar or model.head_size) ** -0.5
    written: dict[str, Any] = {}
    for names, paths in family.keys.items():
        value = values[paths if isinstance(paths, str) else paths[0]]
        written[names.partition("|")[0]] = CONVERSIONS[names][1](value) if names in CONVERSIONS else value
    key, activations = family.activation
    name = next((name for name, activation in activations.items() if activation == model.activation), None)
    if name is None:
        return {"model.activation": _UNSUPPORTED}
    return (
        written
        | {key: name}
        | _rope_keys(values, model, family)
        | _window_keys(model, family)
        | _expert_keys(model, family)
        | _head_keys(model, family)
        | _projection_keys(model, family)
    )


def _rope_keys(values: Mapping[str, Any], model: ModelConfig, family: Family) -> dict[str, Any]:
    if family.rope is None or model.position != "rope":
        return {}
    kind = values["attention.rope_scaling"].replace("none", "default")
    scaling: dict[str, Any] = {"rope_type": kind}
    for key, path in ROPE_SCALINGS[kind].items():
        if values[path] is not None:
            scaling[key] = list(values[path]) if isinstance(values[path], tuple) else values[path]
    written: dict[str, Any] = {}
    if kind in WITH_ORIGINAL:
        scaling[ORIGINAL] = values["attention.rope_original_context"]
    if family.rope == "longrope":
        written[ORIGINAL] = values["attention.rope_original_context"] or model.max_context
    if family.rope in ("longrope", "partial"):
        written["partial_rotary_factor"] = scaling["partial_rotary_factor"] = model.partial_rotary_factor
    if family.query_scaling and model.query_scaling_beta is not None:
        scaling[BETA] = model.query_scaling_beta
    if family.rope == "listed layers":
        written["no_rope_layers"] = [int(layer not in model.unrotated) for layer in range(model.num_blocks)]
    # Versions before transformers 5 read the older keys.
    written |= {"rope_theta": model.rope_theta} | ({} if kind == "default" else {"rope_scaling": dict(scaling)})
    scaling["rope_theta"] = model.rope_theta
    if family.rope == "local":
        local = model.rope_theta if model.rope_local_theta is None else model.rope_local_theta
        layers = {FULL: scaling, SLIDING: {"rope_type": "default", "rope_theta": local}}
        if family.per_layer_heads:  # transformers before version 5 does not have this family
            return {"rope_parameters": layers}
        return written | {"rope_local_base_freq": local, "rope_parameters": layers}
    return written | {"rope_parameters": scaling}


def _window_keys(model: ModelConfig, family: Family) -> dict[str, Any]:
    if family.window is None:
        return {}
    window = max((window for window in model.windows if window is not None), default=None)
    if window is None and family.per_layer_heads:
        window = family.defaults["sliding_window"]  # transformers requires a number, even if no layer has a window
    if window is None and (family.rope == "sliding layers" or (family.rope == "windowed layers" and model.unrotated)):
        window = family.defaults["sliding_window"]  # no layer has this window, but with it transformers rotates no full layer
    written: dict[str, Any] = {"sliding_window": window}
    if "optional" in family.window:
        written["use_sliding_window"] = window is not None
    if "layers" in family.window:
        written["layer_types"] = [FULL if window is None else SLIDING for window in model.windows]
    return written


def _changed_settings(written: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Returns the settings that have another value after a written `config.json` is converted back to settings."""
    try:
        converted = build_config(hf_config_to_settings(written, model.max_context)).architecture(model.vocab_size)
    except UserError:
        return [*(path for path in FIELDS if path.startswith(("model.", "attention.")))]
    return sorted(
        SETTING_OF[name] for name in ARCHITECTURE if not _nearly_equal(getattr(converted, name), getattr(model, name))
    )


def _nearly_equal(left: Any, right: Any) -> bool:
    """Returns whether two values are equal; floats may differ by rounding in the conversion."""
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-12)
    return bool(left == right)
