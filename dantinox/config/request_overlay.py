"""Applies the settings of a request, whose names have no section, to the settings of a run."""

from collections.abc import Mapping

from dantinox.config.generation_settings import DRAWING_SETTINGS, ROUTED_STEPS
from dantinox.config.names import ALIASES, REQUEST_SECTIONS, flat_name
from dantinox.config.sections import FIELDS, Config, find_inactive, flatten_config, reset_settings
from dantinox.config.yaml_files import (
    check_text,
    did_you_mean,
    nearest_key,
    validate_settings,
    warn_inactive,
)
from dantinox.files import UserError, escape_name

# Name without section → dotted path.
REQUEST_KEYS = {flat_name(key): key for key in FIELDS if key.partition(".")[0] in REQUEST_SECTIONS}
# Pairs of settings that exclude each other. A request that sets one of them removes the other from
# the base settings.
PAIRS = [
    ("kv_budget", "kv_budget_tokens"),
    ("clarify_token", "clarify_text"),
    *((key, f"base_{key}") for key in ROUTED_STEPS),
    *((flat_name(old), flat_name(new)) for old, new in ALIASES.items()),
]
# Setting of a request → the base setting that it removes.
SUPERSEDES = {
    "preset": "sampler_order",
    **dict(PAIRS),
    **{second: first for first, second in PAIRS},
}


def settings_of(config: Config) -> dict[str, object]:
    """Returns name → value of all settings that a request may change, with the names that `overlay`
    accepts.
    """
    values = flatten_config(config)
    return {name: values[key] for name, key in REQUEST_KEYS.items()}


def overlay(
    base: Config,
    given: Mapping[str, object],
    origin: str = "",
    under: Mapping[str, object] | None = None,
) -> Config:
    """Returns a config with the settings of a request applied to its `generation`, `router` and
    `kv` sections.

    Base settings that have no effect together with the request are reset to their defaults, with
    one warning per reason. Some settings replace each other:

    * a preset replaces the base's `sampler_order`, and a `sampler_order` of step names replaces the
      base's preset;
    * `strategy: entropy` replaces `greedy`;
    * `guidance_scale` replaces `speculation`, which does not change the text;
    * `num_beams` replaces `greedy` and the settings of steps that beam search does not run, such as
      the temperature;
    * `kv_budget` replaces `kv_budget_tokens`, and the reverse; so do `clarify_token` and
      `clarify_text`;
    * a base value of the router (`base_top_k`) replaces the chain's value (`top_k`), and the
      reverse.

    With `strategy: entropy`, a temperature of 1 or a min_p of 0 in the request also becomes a base
    value of the router.

    Args:
      given: name without section → value; the names of the `kv` section are `kv_budget` and so on.
      origin: source of the request's values, for error messages.
      under: settings of all requests, applied after the base and before `given`.

    Raises:
      UserError: a name, type or range is wrong, settings contradict each other, or a given setting
        has no effect.
    """
    for name in given:
        _check_name(name, origin)
    base_values = {
        name: value
        for name, value in settings_of(base).items()
        if value != FIELDS[REQUEST_KEYS[name]].default
    }
    if under:
        base_values = _without_superseded(base_values, under) | _with_bases(under, base_values)
    tree: dict[str, dict[str, object]] = {}
    for name, value in _without_superseded(base_values, given).items():
        section, _, key = _key_of(name).partition(".")
        tree.setdefault(section, {})[key] = value
    changed = {_key_of(name): value for name, value in _with_bases(given, base_values).items()}
    source = "the run's settings" if not under else "the flags and the run's settings"
    merged, unused = validate_settings(tree, changed, {}, source, origin)
    already_inactive = find_inactive(base)
    warn_inactive(
        {key: reason for key, reason in unused.items() if key not in already_inactive}, {}, source
    )
    merged = reset_settings(merged, unused)
    return base.model_copy(update={name: getattr(merged, name) for name in REQUEST_SECTIONS})


def with_generation(config: Config, **changes: object) -> Config:
    """Returns the settings with some of `generation` changed, without validation."""
    return config.model_copy(update={"generation": config.generation.model_copy(update=changes)})


def _without_superseded(
    base: Mapping[str, object], request: Mapping[str, object]
) -> dict[str, object]:
    """Returns the base settings without those that the request replaces."""
    order = request.get("sampler_order")
    replaced = {SUPERSEDES.get(name) for name in request}
    if isinstance(order, list | tuple) and any(isinstance(name, str) for name in order):
        replaced.add("preset")
    if request.get("strategy") == "entropy":
        replaced.add("greedy")
    if request.get("guidance_scale", 1) != 1:
        replaced |= {"speculation", "draft_run", "draft_tokens", "ngram_size"}
    beams = request.get("num_beams")
    if isinstance(beams, int) and beams > 1:
        replaced |= {"greedy", *DRAWING_SETTINGS}
    return {name: value for name, value in base.items() if name not in replaced or name in request}


def _with_bases(request: Mapping[str, object], base: Mapping[str, object]) -> dict[str, object]:
    """Returns a request's settings, completed by base values of the router.

    With `strategy: entropy`, a temperature of 1 or a min_p of 0 also sets the base value, which the
    router would not take from a value that equals the default of the chain.
    """
    if request.get("strategy", base.get("strategy")) != "entropy":
        return dict(request)
    defaults = {"temperature": 1, "min_p": 0}
    return {
        f"base_{key}": default for key, default in defaults.items() if request.get(key) == default
    } | dict(request)


def _key_of(name: str) -> str:
    """Returns the dotted path of a request's setting. The validation of `generation` reports a name
    that does not exist.
    """
    return REQUEST_KEYS.get(name, f"generation.{name}")


def _check_name(name: str, origin: str) -> None:
    """Raises a UserError for a name that is not valid text, or that resembles one of the section
    `kv`.
    """
    check_text("a key of generation", name, {}, origin)
    nearest = "" if name in REQUEST_KEYS else nearest_key(name)
    if nearest.startswith("kv."):  # suggest the name without section
        place = f" ({origin})" if origin else ""
        raise UserError(
            f"unknown key {escape_name(name)}{did_you_mean(flat_name(nearest))}{place}",
            key=f"generation.{name}",
        )
