"""The base class of all settings sections and the types of their fields."""

from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from dantinox.config.prerequisites import Needs

T = TypeVar("T")


def as_tuple(value: object) -> object:
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


Conflict = tuple[str, str]  # a setting (dotted path), and what is wrong with it, as the rest of a sentence


class Section(BaseModel):
    """A frozen group of settings that refuses unknown names and converts nothing but integers to floats."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())
    needs: ClassVar[tuple[Needs, ...]] = ()  # of all its settings


def field(default: T, text: str) -> T:
    """A setting's default, and what the help says of it."""
    found: T = Field(default, description=text)
    return found
