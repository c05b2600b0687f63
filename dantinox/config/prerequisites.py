"""Prerequisites of settings, and the settings that are inactive because a prerequisite is missing.

The marks stand on the types of the settings. An inactive flag or argument is refused, one in a file is reported in a line.
"""

from collections.abc import Callable, Mapping, Sequence

from dantinox.files import quote

Wanted = object  # a value, or a test of one


class Needs:
    """Without what a setting has no effect, as a mark on its type: one of these others must have such a value.

    Of several marks on one setting each must hold.
    """

    def __init__(self, *others: tuple[str, Wanted]):
        """`others`: dotted path and the value that it must have, or a test of its value."""
        self.others = others

    def met(self, value_of: Callable[[str], object]) -> bool:
        return any(want(value_of(key)) if callable(want) else value_of(key) == want for key, want in self.others)


def given(value: object) -> bool:
    """A test for `Needs`: the setting is not null."""
    return value is not None


def inactive_settings(
    values: Mapping[str, object], defaults: Mapping[str, object], needs: Mapping[str, Sequence[Needs]]
) -> dict[str, str]:
    """The settings, other than their default, that change nothing beside the others: dotted path → while what is so.

    What has no effect itself counts as its default for those that need it.
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
        return root or "while " + " and ".join(f"{key} is {worded(values[key])}" for key in others)

    return {key: reason(key) for key, value in values.items() if value != defaults[key] and reason(key)}


def worded(value: object) -> str:
    return value if isinstance(value, str) and value else quote(value)
