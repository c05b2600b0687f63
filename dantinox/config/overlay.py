"""Settings of one request laid over those of a run: keys by their name alone."""

from collections.abc import Mapping
from typing import Any

from dantinox.config.files import REQUEST, build_config, check_text, did_you_mean, flat_name, nearest_key
from dantinox.config.generation import ROUTED
from dantinox.config.sections import FIELDS, Config, flat
from dantinox.files import UserError, on_one_line

# Name alone → dotted path.
KEYS = {flat_name(key): key for key in FIELDS if key.partition(".")[0] in REQUEST}
# Of settings that say the same in two ways the newer holds: a name that is given → those of the run that make room for it.
PAIRS = [("kv_budget", "kv_budget_tokens"), *((key, f"base_{key}") for key in ROUTED)]
MAKES_ROOM = {"preset": "sampler_order", **dict(PAIRS), **{b: a for a, b in PAIRS}}


def settings_of(config: Config) -> dict[str, Any]:
    """All that a request may set, by the names that `overlay` takes."""
    values = flat(config)
    return {name: values[key] for name, key in KEYS.items()}


def overlay(base: Config, given: Mapping[str, Any], origin: str = "") -> Config:
    """A config with the settings of a request laid over its `generation`, `router` and `kv` sections.

    What the request leaves without effect of the base's own is reported in one line and dropped. Another preset takes the
    place of the base's order and an order of names that of its preset, one unit of a budget that of the other, a base value of
    the router that of the number it would be hidden by, and the other way round. With the router a temperature of 1 and a
    min_p of 0 are base values, where they are given.

    Args:
      given: keys by their name alone; those of `kv` are called `kv_budget` and so on.
      origin: for errors, where the values were written.
    """
    for name in given:
        _check_name(name, origin)
    own = {name: value for name, value in settings_of(base).items() if value != FIELDS[KEYS[name]].default}
    for name in given:
        if MAKES_ROOM.get(name) not in given:
            own.pop(MAKES_ROOM.get(name, ""), None)
    order = given.get("sampler_order")
    if "preset" not in given and isinstance(order, list | tuple) and any(isinstance(name, str) for name in order):
        own.pop("preset", None)
    given = dict(given)
    if given.get("strategy", own.get("strategy")) == "entropy":
        given |= {f"base_{key}": off for key, off in (("temperature", 1), ("min_p", 0)) if given.get(key) == off}
    tree: dict[str, dict[str, Any]] = {}
    for name, value in own.items():
        section, _, key = KEYS[name].partition(".")
        tree.setdefault(section, {})[key] = value
    changed = {KEYS.get(name, f"generation.{name}"): value for name, value in given.items()}
    sections = build_config(tree, changed, source="the run's settings", origin=origin)
    return base.model_copy(update={name: getattr(sections, name) for name in REQUEST})


def _check_name(name: str, origin: str) -> None:
    check_text("a key of generation", name, {}, origin)
    nearest = "" if name in KEYS else nearest_key(name)
    if nearest.startswith("kv."):  # suggested as it is to be written here
        place = f" ({origin})" if origin else ""
        raise UserError(f"unknown key {on_one_line(name)}{did_you_mean(flat_name(nearest))}{place}")
