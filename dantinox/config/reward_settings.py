"""The entries of `grpo.rewards`: the options of each reward, and their validation.

An entry has the keys `name` and `weight`, and the options of the reward. A name with a dot is a
function of the user.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError

from dantinox.config.base import Conflict, Count, Finite, NonNegative, Positive, Section
from dantinox.config.setting_records import type_in_words
from dantinox.files import UserError, escape_name, quote

FUNCTION_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class Reward(Section):
    """An entry of `grpo.rewards`: the options that all rewards have.

    Attributes:
      name: a key of `REWARDS`, or the dotted path of a user's function.
      weight: factor in the sum of the rewards; may be negative.
      alternatives: groups of options of which exactly one is given.
    """

    alternatives: ClassVar[tuple[tuple[str, ...], ...]] = ()

    name: str
    weight: Finite = 1.0


class ExactMatch(Reward):
    """1 if the answer equals a field of the record."""

    field: str = "answer"
    strip: bool = True
    ignore_case: bool = False


class Numeric(Reward):
    """1 if a number in the answer equals that of a field of the record.

    Attributes:
      after: the number is the first one after the last occurrence of this text. None: the last
        number of the answer.
      tolerance: the largest difference that counts as equal.
    """

    field: str = "answer"
    after: str | None = None
    tolerance: NonNegative = 1e-6


class Regex(Reward):
    """1 if a regular expression matches the whole answer, or with `search` a part of it."""

    pattern: str
    match: Literal["fullmatch", "search"] = "fullmatch"


class JSONSchema(Reward):
    """1 if the answer, or the fenced block in it, is JSON that a schema allows. Exactly one of the
    options is given.

    Attributes:
      json_schema: the schema.
      path: a file with the schema.
      field: the field of the record that holds the schema.
    """

    alternatives = (("schema", "path", "field"),)
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    path: str | None = None
    field: str | None = None


class Length(Reward):
    """A penalty in [−1, 0] on the length of the answer. Exactly one of `target` and `max` is given.

    Attributes:
      target: the penalty is −|length − target| / target.
      max: the penalty is −(length − max) / max of longer answers.
    """

    alternatives = (("target", "max"),)
    target: Count | None = None
    max: Count | None = None
    unit: Literal["characters", "words"] = "characters"


class PythonTests(Reward):
    """The fraction of the tests in a field of the record that the answer's code passes.

    Attributes:
      seconds: limit on CPU time and on wall-clock time.
      memory_mib: limit on the address space, in MiB.
    """

    field: str = "tests"
    seconds: Annotated[Positive, Field(le=3600)] = 5.0
    memory_mib: Annotated[int, Field(ge=64, le=1 << 20)] = 512


class Function(Reward):
    """A user's function (prompt, answer, record) → number."""


REWARDS: dict[str, type[Reward]] = {
    "exact_match": ExactMatch,
    "numeric": Numeric,
    "regex": Regex,
    "json_schema": JSONSchema,
    "length": Length,
    "python_tests": PythonTests,
}


def parse_reward(entry: Mapping[str, Any]) -> Reward:
    """Returns the options of an entry of `grpo.rewards`.

    Raises:
      UserError: the name or an option is unknown, or the value of an option is not allowed.
    """
    name = entry.get("name")
    if not isinstance(name, str):
        raise UserError(
            f"must have an entry with a name: {', '.join(REWARDS)}, or package.function, got"
            f" {quote(dict(entry))}"
        )
    kind = Function if FUNCTION_NAME.fullmatch(name) else REWARDS.get(name)
    if kind is None:
        hint = _did_you_mean(name, REWARDS)
        raise UserError(
            f"has no reward {escape_name(name)}{hint} (allowed: {', '.join(REWARDS)}, or"
            " package.function)"
        )
    try:
        reward = kind.model_validate(dict(entry))
    except ValidationError as error:
        raise UserError(_sentence(name, kind, error)) from None
    for group in kind.alternatives:
        given = [option for option in group if entry.get(option) is not None]
        if len(given) != 1:
            raise UserError(
                f"has the reward {name}, which takes exactly one of {', '.join(group)}, got"
                f" {len(given)}"
            )
    return reward


def _sentence(name: str, kind: type[Reward], error: ValidationError) -> str:
    """Returns the rest of a sentence that begins with `grpo.rewards`, about the first error in an
    entry.
    """
    first = error.errors(include_url=False)[0]
    option = str(first["loc"][0])
    fields = {field.alias or key: field for key, field in kind.model_fields.items()}
    if first["type"] == "extra_forbidden":
        hint = _did_you_mean(option, fields)
        return (
            f"has the reward {name} with an unknown option {escape_name(option)}{hint} (allowed:"
            f" {', '.join(fields)})"
        )
    if first["type"] == "missing":
        return f"has the reward {name} without {option}"
    allowed = type_in_words(TypeAdapter(fields[option].rebuild_annotation()).json_schema())
    return f"has the reward {name}, whose {option} must be {allowed}, got {quote(first['input'])}"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name[:60].lower(), list(known), 1)
    return f", did you mean {matches[0]}?" if matches else ""


def reward_conflicts(rewards: Sequence[Mapping[str, Any]]) -> Iterator[Conflict]:
    """Yields an error for each wrong entry of `grpo.rewards`."""
    for entry in rewards:
        try:
            parse_reward(entry)
        except UserError as error:
            yield "grpo.rewards", str(error)
