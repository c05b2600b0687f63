"""Settings of one request laid over those of a run: keys by their name alone, and what of the run's own goes with them."""

import contextlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from dantinox.config import kv, router
from dantinox.config.files import FIELDS, build_config, check_text, did_you_mean, flat_name, nearest_key, on_one_line
from dantinox.config.generation import CHAIN_KEYS, REFINES, ROUTED, GenerationSection, steps_on
from dantinox.config.kv import BUDGETS, KVSection
from dantinox.config.router import RouterSection
from dantinox.config.sections import Config
from dantinox.files import UserError

SECTIONS = ("generation", "router", "kv")  # what a request may set
# Name alone → (section, key).
KEYS = {
    flat_name(f"{section}.{key}"): (section, key)
    for section, _, key in (k.partition(".") for k in FIELDS)
    if section in SECTIONS
}


def settings_of(config: Config) -> dict[str, Any]:
    """All that a request may set, by the names that `overlay` takes."""
    tree = config.model_dump()
    return {name: tree[section][key] for name, (section, key) in KEYS.items()}


def overlay(base: Config, given: Mapping[str, Any], origin: str = "") -> Config:
    """A config with other values of its `generation`, `router` and `kv` sections laid over it, keys by their name alone.

    Another preset leaves the base's own order behind, an order of names its preset; a step that is switched off takes its
    refinements along, another strategy all that only the base's own reads. With the router a temperature of 1 and a min_p of 0
    that are given are its base values, while left out they ask for nothing; a base value that is given takes the place of the
    number in the base that would hide it. A budget takes the place of the base's, in whichever unit; keys of `kv` go with what
    they refine: all but the dtype with the budget, and all with the cache.

    Args:
      given: keys of `kv` are called `kv_budget` and so on.
      origin: tells in errors where the values were written.
    """
    for name in given:
        _check_name(name, origin)
    trees = {**_sampling_under(base, given), "kv": _kv_under(base, given)}
    if given.get("strategy", base.generation.strategy) == "entropy":
        # A default that is spelt out is no default.
        bases = {f"base_{key}": value for key, value in (("temperature", 1), ("min_p", 0)) if given.get(key) == value}
        given = bases | dict(given)
    changed = {".".join(KEYS.get(name, ("generation", name))): value for name, value in given.items()}
    sections = build_config(trees, changed, origin=origin)
    return base.model_copy(update={name: getattr(sections, name) for name in SECTIONS})


def _check_name(name: str, origin: str) -> None:
    check_text("a key of generation", name, {}, origin)
    nearest = "" if name in KEYS else nearest_key(name)
    if nearest.startswith("kv."):  # told as it is to be written here
        place = f" ({origin})" if origin else ""
        raise UserError(f"unknown key {on_one_line(name)}{did_you_mean(flat_name(nearest))}{place}")


def _sampling_under(base: Config, given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What stays of the base's `generation` and `router`."""
    tree, routed = base.generation.model_dump(), base.router.model_dump()
    if "preset" in given and "sampler_order" not in given:
        del tree["sampler_order"]
    with contextlib.suppress(ValidationError):  # told by `build_config`, in words
        known = {key: value for key, value in given.items() if key in GenerationSection.model_fields}
        section = GenerationSection.model_validate(tree | known)
        if "preset" not in given and "sampler_order" in given and str in map(type, section.sampler_order or ()):
            del tree["preset"]
        if section.strategy != base.generation.strategy:
            routed = {}
            tree = {key: value for key, value in tree.items() if key not in CHAIN_KEYS}
        on = steps_on(section)
        for key, refined in REFINES.items():
            if key not in given and not on & set(refined):
                tree.pop(key, None)
        own = {key: value for key, value in given.items() if key in RouterSection.model_fields}
        for key in set(router.idle_keys(RouterSection.model_validate(routed | own))) - set(given):
            routed.pop(key, None)
    if given.get("strategy", base.generation.strategy) == "entropy":
        for key in ROUTED:  # of a number of a request and the base value that it would hide, the newer one holds
            if f"base_{key}" in given and key not in given:
                tree.pop(key, None)
            if key in given and f"base_{key}" not in given:
                routed.pop(f"base_{key}", None)
    return {"generation": tree, "router": routed}


def _kv_under(base: Config, given: Mapping[str, Any]) -> dict[str, Any]:
    """What stays of the base's `kv`."""
    tree = base.kv.model_dump()
    own = {key: given[f"kv_{key}"] for key in KVSection.model_fields if f"kv_{key}" in given}
    if own.keys() & set(BUDGETS):
        tree |= dict.fromkeys(BUDGETS)
    with contextlib.suppress(ValidationError):  # as above
        section = KVSection.model_validate(tree | own)
        use_cache = given.get("use_cache", base.generation.use_cache) is not False
        idle = kv.idle_keys(section, use_cache)
        return {key: value for key, value in tree.items() if key not in idle}
    return tree
