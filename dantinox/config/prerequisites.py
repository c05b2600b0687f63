"""Prerequisites of settings, and the settings that are inactive because a prerequisite is missing.

The marks are part of the types of the settings. An inactive setting is refused in a flag or an argument, and reported in one
line in a file.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dantinox.files import quote


class Condition:
    """A test of a setting's value, with the words for it: `is set`."""

    def __init__(self, words: str, holds: Callable[[Any], bool]):
        self.words, self.holds = words, holds

    def __call__(self, value: Any) -> bool:
        return self.holds(value)


is_set = Condition("is set", lambda value: value is not None)
nonzero = Condition("is not 0", bool)
nonempty = Condition("is not empty", bool)


def equals(value: object) -> Condition:
    """A condition: the setting has this value."""
    return Condition(f"is {format_value(value)}", lambda found: found == value)


def differs(value: object) -> Condition:
    """A condition: the setting has another value."""
    return Condition(f"is not {format_value(value)}", lambda found: found != value)


def one_of(*values: object) -> Condition:
    """A condition: the setting has one of these values."""
    return Condition(f"is {' or '.join(map(format_value, values))}", lambda found: found in values)


class Needs:
    """Marks the type of a setting that has no effect unless one of `others` has the value it must have.

    If a setting has several marks, each must hold.
    """

    def __init__(self, *others: tuple[str, object]):
        """`others`: the dotted path of a setting, and the value that it must have or a `Condition`."""
        self.others = tuple((key, want if isinstance(want, Condition) else equals(want)) for key, want in others)

    def met(self, value_of: Callable[[str], object]) -> bool:
        return any(want(value_of(key)) for key, want in self.others)

    def __str__(self) -> str:
        """`training.optimizer is adamw or muon`; settings with the same condition share its words."""
        keys: dict[str, list[str]] = {}
        words: dict[str, list[str]] = {}
        for key, want in self.others:
            words.setdefault(key, []).append(want.words)
        for key, wanted in words.items():
            same = wanted[0] + "".join(f" or {text.removeprefix('is ')}" for text in wanted[1:])
            keys.setdefault(same, []).append(key)
        return " or ".join(f"{' or '.join(names)} {same}" for same, names in keys.items())


def inactive_settings(
    values: Mapping[str, object], defaults: Mapping[str, object], needs: Mapping[str, Sequence[Needs]]
) -> dict[str, str]:
    """Returns the settings that differ from their default and have no effect: dotted path → reason (`while … is …`).

    For the prerequisites of other settings, a setting without effect counts as its default.
    """
    reasons: dict[str, str] = {}

    def value_of(key: str) -> object:
        return defaults[key] if reason(key) else values[key]

    def reason(key: str) -> str:
        if key not in reasons:
            missing = next((need for need in needs[key] if not need.met(value_of)), None)
            reasons[key] = "" if missing is None else because(missing)
        return reasons[key]

    def because(need: Needs) -> str:
        others = dict.fromkeys(key for key, _ in need.others)
        root = next((reason(key) for key in others if reason(key) and values[key] != defaults[key]), "")
        return root or "while " + " and ".join(f"{key} is {format_value(values[key])}" for key in others)

    return {key: reason(key) for key, value in values.items() if value != defaults[key] and reason(key)}


def format_value(value: object) -> str:
    """Returns a value as a sentence shows it: a string without quotes."""
    return value if isinstance(value, str) and value else quote(value)
