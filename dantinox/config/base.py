"""What all settings are made of: the frozen section, the types of its fields, and what they need."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value


FileName = Annotated[str, Field(pattern=r"^[\w\-][\w.\-]*$")]
Strings = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]

Wanted = Any  # a value, or a test of one


class Needs:
    """Without what a setting has no effect, as a mark on its type: one of these others must have such a value.

    Of several marks on one setting each must hold.
    """

    def __init__(self, *others: tuple[str, Wanted]):
        """`others`: dotted path and the value that it must have, or a test of its value."""
        self.others = others

    def met(self, value_of: Callable[[str], Any]) -> bool:
        return any(want(value_of(key)) if callable(want) else value_of(key) == want for key, want in self.others)


def given(value: Any) -> bool:
    """A test for `Needs`: the setting is not null."""
    return value is not None


class Section(BaseModel):
    """A frozen group of settings that refuses unknown names and converts nothing but integers to floats."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())
    needs: ClassVar[tuple[Needs, ...]] = ()  # of all its settings


def field(default: Any, text: str) -> Any:
    """A setting's default, and what the help says of it."""
    return Field(default, description=text)
