"""The base class of the sections of settings, and the types of their fields."""

from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from dantinox.config.prerequisites import Needs
from dantinox.config.setting_groups import GROUP

T = TypeVar("T")


def as_tuple(value: object) -> object:
    """Converts a list to a tuple, and a string to a tuple of one string. Returns other values
    unchanged.
    """
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str) else value


FileName = Annotated[str, Field(pattern=r"^[\w\-][\w.\-]*$")]
Strings = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
# Programs grow with the layers: far more than in any published model would be compiled for days.
LayerCount = Annotated[int, Field(ge=1, le=4096)]
CountOrZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]


# The dotted path of a setting, and the rest of an error message that begins with this path.
Conflict = tuple[str, str]


class Section(BaseModel):
    """A frozen section of settings. It rejects unknown names, and the only type conversion is from
    integers to floats.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())
    needs: ClassVar[tuple[Needs, ...]] = ()  # prerequisites of all settings of the section


def field(default: T, text: str, *, group: str = "") -> T:
    """Returns the pydantic field of a setting.

    Args:
      text: the help text, one line.
      group: its group inside the section, a key of `setting_groups.GROUPS`; empty in a section
        without groups.
    """
    info: T = Field(default, description=text, json_schema_extra={GROUP: group} if group else None)
    return info


def setting_defaults(*sections: type[Section]) -> Any:
    """Returns an object whose attributes are the defaults of the settings of these sections."""
    fields = {name: info for section in sections for name, info in section.model_fields.items()}
    return SimpleNamespace(**{name: info.default for name, info in fields.items()})
