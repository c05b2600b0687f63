"""Reads the keys of a Hugging Face `config.json`: every key must be converted, have a supported
value, or have no effect.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from dantinox.config import UserError
from dantinox.files import escape_name, quote
from dantinox.interop.hf.hf_family import Family
from dantinox.interop.hf.hf_unsupported import IGNORED_KEYS, SUPPORTED_VALUES

SLIDING, FULL = "sliding_attention", "full_attention"  # values of `layer_types`
HF_DEFAULTS = {"attention_bias": False, "mlp_bias": False}


class ConfigKeys:
    """The keys of a `config.json` that have not been converted yet."""

    def __init__(self, config: Mapping[str, Any], family: Family):
        self.remaining = deepcopy(dict(config))
        self.family = family

    def take(self, names: str, default: Any = None) -> Any:
        """Removes a key; returns its value or, if it is absent, transformers' default. `a|b` are
        two names of one key.
        """
        first, *others = names.split("|")
        values = [self.remaining.pop(name) for name in (first, *others) if name in self.remaining]
        return (
            values[0] if values else (HF_DEFAULTS | dict(self.family.defaults)).get(first, default)
        )

    def take_integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Removes a key; returns its value, or raises a `UserError` if it is not an integer of at
        least `least`.
        """
        return check_integer(self.take(name, default), name, least)

    def check_rest(self) -> None:
        """Raises a `UserError` if a remaining key may change the model."""
        ignored = IGNORED_KEYS.union(self.family.ignored)
        supported = SUPPORTED_VALUES | dict(self.family.supported) | dict(self.family.constants)
        for key, value in self.remaining.items():
            allowed = supported.get(key, ())
            if (
                value is None
                or key in ignored
                or value in (allowed if isinstance(allowed, tuple) else (allowed,))
            ):
                continue
            hint = (
                f"only {quote(supported[key])} is supported"
                if key in supported
                else "the key is unknown"
            )
            raise UserError(f"config.json has {escape_name(key)}: {quote(value)}; {hint}")


def require(value: Any, key: str) -> Any:
    """Returns the value; raises a `UserError` if it is None."""
    if value is None:
        raise UserError(f"config.json lacks {key}")
    return value


def check_integer(value: Any, key: str, least: int = 1, most: int = 2**31 - 1) -> int:
    if type(value) is not int or not least <= value <= most:
        raise UserError(
            f"config.json has {key}: {quote(value)}, expected a number from {least} to {most}"
        )
    return value


def check_positive(value: Any, key: str) -> float:
    if type(value) not in (int, float) or not 1e-9 < value < 1e9:
        raise UserError(f"config.json has {key}: {quote(value)}, expected a positive number")
    return float(value)


def check_object(value: Any, key: str) -> dict[str, Any]:
    """Returns a copy of an object, or an empty dict for None."""
    if not isinstance(value or {}, dict):
        raise UserError(f"config.json has {key}: {quote(value)}, expected an object")
    return dict(value or {})


def check_per_layer(values: Any, layers: int, key: str) -> list[Any]:
    if not isinstance(values, list) or len(values) != layers:
        raise UserError(
            f"config.json has {key}: {quote(values)}, expected a list of {layers},"
            " one for each layer"
        )
    return values


def shortest_period(values: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the shortest pattern that gives these values when it is repeated."""
    for size in range(1, len(values)):
        if all(value == values[i % size] for i, value in enumerate(values)):
            return tuple(values[:size])
    return tuple(values)
