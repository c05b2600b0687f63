"""Applies the settings of a request, by setting name without section, to those of a run."""

from collections.abc import Mapping

from dantinox.config.generation_settings import ROUTED_STEPS
from dantinox.config.names import ALIASES, REQUEST_SECTIONS, flat_name
from dantinox.config.sections import FIELDS, Config, find_inactive, flatten_config, reset_settings
from dantinox.config.yaml_files import check_text, did_you_mean, nearest_key, validate_settings, warn_inactive
from dantinox.files import UserError, escape_name

# Name without section → dotted path.
REQUEST_KEYS = {flat_name(key): key for key in FIELDS if key.partition(".")[0] in REQUEST_SECTIONS}
# Settings that exclude each other: a name in a request → the setting below it that it replaces.
PAIRS = [
    ("kv_budget", "kv_budget_tokens"),
    *((key, f"base_{key}") for key in ROUTED_STEPS),
    *((flat_name(old), flat_name(new)) for old, new in ALIASES.items()),
]
SUPERSEDES = {"preset": "sampler_order", **dict(PAIRS), **{b: a for a, b in PAIRS}}


def settings_of(config: Config) -> dict[str, object]:
    """Returns all settings that a request may change, by the names that `overlay` accepts."""
    values = flatten_config(config)
    return {name: values[key] for name, key in REQUEST_KEYS.items()}


def overlay(base: Config, given: Mapping[str, object], origin: str = "", under: Mapping[str, object] | None = None) -> Config:
    """Returns a config with the settings of a request applied to its `generation`, `router` and `kv` sections.

    A setting of the base that has no effect together with the request is reported in one line and reset to its default. Some
    settings replace each other:

    * a preset replaces the base's `sampler_order`, and an order of names replaces the base's preset;
    * `strategy: entropy` replaces `greedy`;
    * each unit of the KV budget replaces the other;
    * a base value of the router replaces the number that would hide it, and the other way round.

    With the router, a given temperature of 1 and a given min_p of 0 are base values of the router.

    Args:
      given: settings by name without section; those of `kv` are called `kv_budget` and so on.
      origin: for errors, where the values were written.
      under: settings of all requests, applied after the base and before `given`.

    Raises:
      UserError: a name, type or range is wrong, settings contradict each other, or a given setting has no effect.
    """
    for name in given:
        _check_name(name, origin)
    own = {name: value for name, value in settings_of(base).items() if value != FIELDS[REQUEST_KEYS[name]].default}
    if under:
        own = _without_superseded(own, under) | _with_bases(under, own)
    strict = _with_bases(given, own)
    tree: dict[str, dict[str, object]] = {}
    for name, value in _without_superseded(own, given).items():
        section, _, key = REQUEST_KEYS.get(name, f"generation.{name}").partition(".")
        tree.setdefault(section, {})[key] = value
    changed = {REQUEST_KEYS.get(name, f"generation.{name}"): value for name, value in strict.items()}
    source = "the run's settings" if not under else "the flags and the run's settings"
    merged, unused = validate_settings(tree, changed, {}, source, origin)
    before = find_inactive(base)
    warn_inactive({key: reason for key, reason in unused.items() if key not in before}, {}, source)
    merged = reset_settings(merged, unused)
    return base.model_copy(update={name: getattr(merged, name) for name in REQUEST_SECTIONS})


def with_generation(config: Config, **changes: object) -> Config:
    """Returns the settings with some of `generation` changed, without validation."""
    return config.model_copy(update={"generation": config.generation.model_copy(update=changes)})


def _without_superseded(own: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings below a request without those that it replaces."""
    order = given.get("sampler_order")
    gone = {SUPERSEDES.get(name) for name in given}
    if isinstance(order, list | tuple) and any(isinstance(name, str) for name in order):
        gone.add("preset")
    if given.get("strategy") == "entropy":
        gone.add("greedy")
    return {name: value for name, value in own.items() if name not in gone or name in given}


def _with_bases(given: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """Returns a request's settings; with the router, numbers that equal the chain's default become base values."""
    if given.get("strategy", own.get("strategy")) != "entropy":
        return dict(given)
    return {f"base_{key}": off for key, off in (("temperature", 1), ("min_p", 0)) if given.get(key) == off} | dict(given)


def _check_name(name: str, origin: str) -> None:
    check_text("a key of generation", name, {}, origin)
    nearest = "" if name in REQUEST_KEYS else nearest_key(name)
    if nearest.startswith("kv."):  # suggest the name without section
        place = f" ({origin})" if origin else ""
        raise UserError(f"unknown key {escape_name(name)}{did_you_mean(flat_name(nearest))}{place}", key=f"generation.{name}")
