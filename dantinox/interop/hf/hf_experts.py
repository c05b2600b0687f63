"""Keys of Hugging Face's `config.json` about experts: dense layers, expert groups, models that may
have no experts.

For each subject, one function converts the keys to settings, and one writes the keys of a model.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dantinox.config import ExpertsConfig, ModelConfig, UserError
from dantinox.files import quote
from dantinox.interop.hf.hf_family import Family
from dantinox.interop.hf.hf_keys import FULL, ConfigKeys, check_integer, check_per_layer, require


def expert_settings(keys: ConfigKeys, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of experts that no single key determines."""
    family = keys.family
    layers: int = settings["model.num_blocks"]
    found: dict[str, Any] = {}
    # `dense_layers` is the form in which the keys specify the dense layers, such as "first".
    if family.dense_layers in OPTIONAL_EXPERTS:
        found = OPTIONAL_EXPERTS[family.dense_layers](keys, layers)
    elif family.dense_layers is not None:
        dense = DENSE_LAYERS[family.dense_layers](keys, layers)
        found = {"moe.dense_layers": dense} if dense else {}
    return found | _group_settings(keys)


def _first_layers(keys: ConfigKeys, layers: int) -> list[int]:
    count = keys.take_integer("first_k_dense_replace", least=0)
    return list(range(min(count, layers)))


def _layers_between_steps(keys: ConfigKeys, layers: int) -> list[int]:
    every = keys.take_integer("decoder_sparse_step", 1)
    listed = keys.take("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise UserError(
            f"config.json has mlp_only_layers: {quote(listed)}, expected a list of numbers"
        )
    # Every n-th layer, counted from 1, has experts unless it is listed; the others are dense.
    return [i for i in range(layers) if (i + 1) % every or i in listed]


def _layers_outside_range(keys: ConfigKeys, layers: int) -> list[int]:
    first = keys.take_integer("moe_layer_start_index", least=0)
    last = keys.take_integer("moe_layer_end_index", least=-1)
    every = keys.take_integer("moe_layer_interval")
    if last == -1:
        last = layers - 1
    # Inside the range every n-th layer, counted from 1, has experts; all other layers are dense.
    return [i for i in range(layers) if not first <= i <= last or (i + 1) % every]


def _layers_of_type_dense(keys: ConfigKeys, layers: int) -> list[int]:
    # Without the key only the first layer is dense, as in transformers.
    listed = keys.take("mlp_layer_types") or ["dense", *["sparse"] * (layers - 1)]
    kinds = check_per_layer(listed, layers, "mlp_layer_types")
    if other := [kind for kind in kinds if kind not in ("dense", "sparse")]:
        raise UserError(
            f"config.json has mlp_layer_types: {quote(other[0])}, expected dense or sparse"
        )
    return [i for i, kind in enumerate(kinds) if kind == "dense"]


def _experts_in_all_layers_or_none(keys: ConfigKeys, layers: int) -> dict[str, Any]:
    """Returns the settings of a model with routed experts and a shared expert, or of a dense model
    if there are no experts.
    """
    for kind in check_per_layer(
        require(keys.take("layer_types"), "layer_types"), layers, "layer_types"
    ):
        if kind not in ("attention", FULL):
            raise UserError(
                f"config.json has layer_types: {quote(kind)}; only attention is supported"
            )
    # All keys are taken even for a dense model, because `ConfigKeys.check_rest` rejects keys that
    # remain. `a|b` are two names of one key.
    count = keys.take("num_local_experts|num_experts")
    top_k = keys.take("num_experts_per_tok")
    width = keys.take("intermediate_size")
    shared_width = keys.take("shared_intermediate_size")
    if not count:
        return {"model.hidden_dim": shared_width}
    return {
        "moe.use_moe": True,
        "moe.norm_topk_prob": True,
        "moe.n_experts": count,
        "moe.top_k_mlp": top_k,
        "model.hidden_dim": width,
        "moe.shared_experts": 1,
        "moe.shared_hidden_dim": shared_width,
    }


def _experts_next_to_dense_branch(keys: ConfigKeys, layers: int) -> dict[str, Any]:
    """Returns the settings of a model whose layers have experts and a parallel dense branch, or of
    a dense model.

    `enable_moe_block` decides between the two.
    """
    enabled = keys.take("enable_moe_block", False)
    count = keys.take("num_experts")
    top_k = keys.take("top_k_experts")
    width = keys.take("moe_intermediate_size")
    dense_width = require(keys.take("intermediate_size"), "intermediate_size")
    if not enabled:
        return {"model.hidden_dim": dense_width}
    return {
        "moe.use_moe": True,
        "moe.norm_topk_prob": True,
        "moe.branch_norms": True,
        "moe.shared_experts": 1,
        "moe.n_experts": require(count, "num_experts"),
        "moe.top_k_mlp": require(top_k, "top_k_experts"),
        "model.hidden_dim": require(width, "moe_intermediate_size"),
        "moe.shared_hidden_dim": dense_width,
    }


# By `Family.dense_layers`: the function that returns the dense layers, or the settings of a model
# that may have no experts.
DENSE_LAYERS: dict[str, Callable[[ConfigKeys, int], list[int]]] = {
    "first": _first_layers,
    "steps": _layers_between_steps,
    "range": _layers_outside_range,
    "types": _layers_of_type_dense,
}
# None is no key, but `expert_settings` looks for it.
OPTIONAL_EXPERTS: dict[str | None, Callable[[ConfigKeys, int], dict[str, Any]]] = {
    "all or none": _experts_in_all_layers_or_none,
    "parallel": _experts_next_to_dense_branch,
}


def _group_settings(keys: ConfigKeys) -> dict[str, Any]:
    """Returns the settings of expert groups, if the model routes a token only to the best
    groups.
    """
    score = keys.family.group_score
    if score is None:
        return {}
    groups = keys.take("n_group")
    best = keys.take("topk_group")
    # Only families with the score "max" choose the method by a key.
    method = "group_limited_greedy"
    if score == "max":
        method = keys.take("topk_method", method)
    if method not in ("greedy", "group_limited_greedy"):
        raise UserError(
            f"config.json has topk_method: {quote(method)}, expected one of greedy,"
            " group_limited_greedy"
        )
    if method == "greedy" or groups == 1:
        return {}
    return {
        "moe.n_groups": check_integer(require(groups, "n_group"), "n_group"),
        "moe.top_k_groups": check_integer(require(best, "topk_group"), "topk_group"),
        "moe.group_score": score,
    }


def expert_keys(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the keys that `expert_settings` reads."""
    if family.dense_layers == "all or none":
        return _keys_of_all_layers_or_none(model)
    if family.dense_layers == "parallel":
        return _keys_next_to_dense_branch(model)
    experts = model.experts
    if experts is None:
        return {}
    written = _dense_layer_keys(experts, model.num_blocks, family.dense_layers)
    if family.group_score is not None:
        written |= {"n_group": experts.groups, "topk_group": experts.top_groups}
    if family.group_score == "max":
        written["topk_method"] = "greedy" if experts.groups == 1 else "group_limited_greedy"
    return written


def _keys_of_all_layers_or_none(model: ModelConfig) -> dict[str, Any]:
    written: dict[str, Any] = {
        # Only this family has this key.
        "position_embedding_type": "rope" if model.position == "rope" else None,
        "layer_types": [FULL] * model.num_blocks,
        "intermediate_size": model.hidden_dim,
        # transformers requires a divisor of the width, even without Mamba layers.
        "mamba_n_heads": 1,
    }
    experts = model.experts
    if experts is None:
        return written | {"num_local_experts": 0, "shared_intermediate_size": model.hidden_dim}
    return written | {
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "shared_intermediate_size": experts.shared_dim,
    }


def _keys_next_to_dense_branch(model: ModelConfig) -> dict[str, Any]:
    experts = model.experts
    if experts is None:
        return {"enable_moe_block": False, "intermediate_size": model.hidden_dim}
    return {
        "enable_moe_block": True,
        "num_experts": experts.count,
        "top_k_experts": experts.top_k,
        "moe_intermediate_size": model.hidden_dim,
        "intermediate_size": experts.shared_dim,
    }


def _dense_layer_keys(experts: ExpertsConfig, layers: int, form: str | None) -> dict[str, Any]:
    """Returns the keys that specify the dense layers, in the form `Family.dense_layers`.

    Some forms cannot express every choice of dense layers. `to_hf_config` reads the keys back and
    rejects a model that they change.
    """
    dense = experts.dense_layers
    if form == "first":
        return {"first_k_dense_replace": len(dense)}
    if form == "steps":
        return {"decoder_sparse_step": 1, "mlp_only_layers": list(dense)}
    if form == "types":
        return {"mlp_layer_types": ["dense" if i in dense else "sparse" for i in range(layers)]}
    if form == "range":
        return _range_keys([i for i in range(layers) if i not in dense], layers)
    return {}


def _range_keys(routed: list[int], layers: int) -> dict[str, Any]:
    """Returns the first layer with experts, the last one, and an n so that every n-th layer between
    them has experts.
    """
    first = routed[0]
    last = routed[-1]
    interval = 1  # if none fits; `to_hf_config` then rejects the model
    for every in range(1, layers + 1):
        if routed == [i for i in range(first, last + 1) if (i + 1) % every == 0]:
            interval = every
            break
    return {
        "moe_layer_start_index": first,
        "moe_layer_end_index": -1 if last == layers - 1 else last,
        "moe_layer_interval": interval,
    }
