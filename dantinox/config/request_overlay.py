"""Settings of one request applied over those of a run, by setting name without section."""

from collections.abc import Mapping

from dantinox.config.generation_settings import ROUTED
from dantinox.config.names import ALIASES, flat_name
from dantinox.config.sections import FIELDS, Config, flat, idle, without
from dantinox.config.yaml_files import REQUEST, check_text, did_you_mean, merge, nearest_key, report
from dantinox.files import UserError, escape_name

# Name alone → dotted path.
KEYS = {flat_name(key): key for key in FIELDS if key.partition(".")[0] in REQUEST}
# Of settings that say the same in two ways the newer holds: a name that is given → what makes room for it below.
PAIRS = [
    ("kv_budget", "kv_budget_tokens"),
    *((key, f"base_{key}") for key in ROUTED),
    *((flat_name(old), flat_name(new)) for old, new in ALIASES.items()),
]
SUPERSEDES = {"preset": "sampler_order", **dict(PAIRS), **{b: a for a, b in PAIRS}}


def settings_of(config: Config) -> dict[str, object]:
    """All that a request may set, by the names that `overlay` takes."""
    values = flat(config)
    return {name: values[key] for name, key in KEYS.items()}


def overlay(base: Config, given: Mapping[str, object], origin: str = "", under: Mapping[str, object] | None = None) -> Config:
    """A config with the settings of a request laid over its `generation`, `router` and `kv` sections.

    What the request leaves without effect is reported in one line and not part of the outcome. Another preset takes the place
    of the base's order and an order of names that of its preset, the router that of `greedy`, one unit of a budget that of the
    other, a base value of the router that of the number it would be hidden by, and the other way round. With the router a
    temperature of 1 and a min_p of 0 are base values, where they are given.

    Args:
      given: keys by their name alone; those of `kv` are called `kv_budget` and so on.
      origin: for errors, where the values were written.
      under: settings of all requests, between the base's own and this one's.
    """
    for name in given:
        _check_name(name, origin)
    own = {name: value for name, value in settings_of(base).items() if value != FIELDS[KEYS[name]].default}
    if under:
        own = _without_superseded(own, under) | _with_bases(under, own)
    strict = _with_bases(given, own)
    tree: dict[str, dict[str, object]] = {}
    for name, value in _without_superseded(own, given).items():
        section, _, key = KEYS.get(name, f"generation.{name}").partition(".")
        tree.setdefault(section, {})[key] = value
    changed = {KEYS.get(name, f"generation.{name}"): value for name, value in strict.items()}
    source = "the run's settings" if not under else "the flags and the run's settings"
    merged, unused = merge(tree, changed, {}, source, origin)
    before = idle(base)
    report({key: reason for key, reason in unused.items() if key not in before}, {}, source)
    merged = without(merged, unused)
    return base.model_copy(update={name: getattr(merged, name) for name in REQUEST})


def with_generation(config: Config, **changes: object) -> Config:
    """The same settings with some of `generation` changed; they are not validated."""
    return config.model_copy(update={"generation": config.generation.model_copy(update=changes)})


def _without_superseded(own: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """The settings below a request, without those whose place it takes."""
    order = given.get("sampler_order")
    gone = {SUPERSEDES.get(name) for name in given}
    if isinstance(order, list | tuple) and any(isinstance(name, str) for name in order):
        gone.add("preset")
    if given.get("strategy") == "entropy":
        gone.add("greedy")
    return {name: value for name, value in own.items() if name not in gone or name in given}


def _with_bases(given: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """A request's settings, numbers that equal the chain's default as the router's base values."""
    if given.get("strategy", own.get("strategy")) != "entropy":
        return dict(given)
    return {f"base_{key}": off for key, off in (("temperature", 1), ("min_p", 0)) if given.get(key) == off} | dict(given)


def _check_name(name: str, origin: str) -> None:
    check_text("a key of generation", name, {}, origin)
    nearest = "" if name in KEYS else nearest_key(name)
    if nearest.startswith("kv."):  # suggested as it is to be written here
        place = f" ({origin})" if origin else ""
        raise UserError(f"unknown key {escape_name(name)}{did_you_mean(flat_name(nearest))}{place}", key=f"generation.{name}")
