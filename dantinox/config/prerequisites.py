"""Prerequisites of settings, and the settings that are inactive because a prerequisite is missing.

Prerequisites are `Needs` objects in the type annotations of the settings. An inactive setting
raises an error if it comes from a flag or an argument, and prints one warning if it comes from a
file.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dantinox.files import quote


class Condition:
    """A test of a setting's value, with its text for messages, such as `is set`."""

    def __init__(self, text: str, predicate: Callable[[Any], bool]):
        self.text = text
        self.predicate = predicate

    def __call__(self, value: Any) -> bool:
        return self.predicate(value)


is_set = Condition("is set", lambda value: value is not None)
nonzero = Condition("is not 0", bool)
nonempty = Condition("is not empty", bool)


def equals(value: object) -> Condition:
    """Returns the condition that the setting has this value."""
    return Condition(f"is {format_value(value)}", lambda actual: actual == value)


def differs(value: object) -> Condition:
    """Returns the condition that the setting has a different value."""
    return Condition(f"is not {format_value(value)}", lambda actual: actual != value)


def one_of(*values: object) -> Condition:
    """Returns the condition that the setting has one of these values."""
    return Condition(
        f"is {' or '.join(map(format_value, values))}", lambda actual: actual in values
    )


class Needs:
    """A prerequisite in a type annotation: the setting has an effect only if one of `others` meets
    its condition.

    If a setting has several prerequisites, all of them must be met.
    """

    def __init__(self, *others: tuple[str, object]):
        """`others`: pairs of a dotted path and the required value or a `Condition`."""
        self.others = tuple(
            (key, value if isinstance(value, Condition) else equals(value)) for key, value in others
        )

    def met(self, value_of: Callable[[str], object]) -> bool:
        return any(condition(value_of(key)) for key, condition in self.others)

    def __str__(self) -> str:
        """Returns text such as `training.optimizer is adamw or muon`, or `a or b is set` if both
        have the same condition.
        """
        texts_of_key: dict[str, list[str]] = {}
        for key, condition in self.others:
            texts_of_key.setdefault(key, []).append(condition.text)
        keys_of_text: dict[str, list[str]] = {}
        for key, (first, *others) in texts_of_key.items():
            text = first + "".join(f" or {other.removeprefix('is ')}" for other in others)
            keys_of_text.setdefault(text, []).append(key)
        return " or ".join(f"{' or '.join(keys)} {text}" for text, keys in keys_of_text.items())


def inactive_settings(
    values: Mapping[str, object],
    defaults: Mapping[str, object],
    needs: Mapping[str, Sequence[Needs]],
) -> dict[str, str]:
    """Returns the settings that differ from their default and have no effect: dotted path → reason
    (`while … is …`).

    A prerequisite that refers to an inactive setting is checked as if that setting had its default.
    """
    reasons: dict[str, str] = {}

    def effective_value(key: str) -> object:
        return defaults[key] if reason(key) else values[key]

    def reason(key: str) -> str:
        """Returns why a setting is inactive, or "" if it is active."""
        if key not in reasons:
            missing = next((need for need in needs[key] if not need.met(effective_value)), None)
            reasons[key] = "" if missing is None else explain(missing)
        return reasons[key]

    def explain(need: Needs) -> str:
        """Returns the reason of a prerequisite that is not met: if a setting that it names is
        itself inactive, that reason.
        """
        others = dict.fromkeys(key for key, _ in need.others)
        for key in others:
            if reason(key) and values[key] != defaults[key]:
                return reason(key)
        return "while " + " and ".join(f"{key} is {format_value(values[key])}" for key in others)

    return {
        key: reason(key) for key, value in values.items() if value != defaults[key] and reason(key)
    }


def format_value(value: object) -> str:
    """Formats a value for a message. Strings that are not empty have no quotes."""
    return value if isinstance(value, str) and value else quote(value)
