"""Reward functions of `grpo.rewards`: they map a prompt, a sampled answer and the record of the
prompt to numbers.
"""

import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple

from dantinox.config.grpo_settings import GRPOSection
from dantinox.config.reward_settings import (
    ExactMatch,
    Function,
    JSONSchema,
    Length,
    Numeric,
    PythonTests,
    Regex,
    Reward,
    parse_reward,
)
from dantinox.files import UserError, first_line, quote, read_json
from dantinox.training.code_execution import check_platform, count_passed_tests
from dantinox.training.linear_regex import compile_linear_regex
from dantinox.training.schema_check import compile_schema

Record = Mapping[str, Any]
Score = Callable[[str, str, Record], float]  # (prompt, answer, record) → reward

MAX_CHARACTERS = 1 << 20  # of an answer that is matched, parsed or run; a longer one scores 0
MAX_SCHEMA_BYTES = 1 << 20
MAX_TESTS = 1000
MAX_SHOWN_RECORD = 300  # characters of a record in an error message
# An integer, perhaps with commas between groups of three digits, or a decimal number, perhaps with
# an exponent. A sign after a letter, a digit or a closing bracket is an operator.
NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-+])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
)
FENCE = "```"


class RewardFunction(NamedTuple):
    """The rewards of a run.

    Attributes:
      scores: the function of each reward by its name. A name that appears again gets a number, as
        in `regex#2`.
      weights: the weight of each reward in the sum.
    """

    scores: dict[str, Score]
    weights: dict[str, float]

    def score(self, prompt: str, answer: str, record: Record) -> dict[str, float]:
        """Returns the rewards of an answer by name, before they are multiplied by their weights.

        Raises:
          UserError: a field of the record is missing or wrong, or a user's function fails or
            returns no finite number.
        """
        return {name: function(prompt, answer, record) for name, function in self.scores.items()}

    def total(self, scores: Mapping[str, float]) -> float:
        """Returns the sum of the rewards of an answer, each multiplied by its weight."""
        return math.fsum(self.weights[name] * value for name, value in scores.items())


def build_rewards(section: GRPOSection) -> RewardFunction:
    """Returns the rewards of `grpo.rewards`, with their expressions compiled, schemas read and
    functions imported.

    Raises:
      UserError: an expression or a schema is invalid, a file or a function does not exist, a
        library is missing, or `python_tests` is not allowed or not possible on this platform.
    """
    scores: dict[str, Score] = {}
    weights: dict[str, float] = {}
    for entry in section.rewards:
        options = parse_reward(entry)
        if isinstance(options, PythonTests) and not section.allow_code_execution:
            raise UserError("the reward python_tests needs grpo.allow_code_execution: true")
        same = [name for name in scores if name.partition("#")[0] == options.name]
        name = f"{options.name}#{len(same) + 1}" if same else options.name
        scores[name] = BUILDERS[type(options)](options)
        weights[name] = options.weight
    return RewardFunction(scores, weights)


def exact_match(options: ExactMatch) -> Score:
    """1 if the answer equals a field of the record, else 0."""

    def normalize(text: str) -> str:
        text = text.strip() if options.strip else text
        return text.casefold() if options.ignore_case else text

    def score(_: str, answer: str, record: Record) -> float:
        return float(
            normalize(answer) == normalize(str(read_field(record, options.field, options.name)))
        )

    return score


def numeric(options: Numeric) -> Score:
    """1 if the number of the answer differs by at most `tolerance` from that of a field of the
    record, else 0.
    """

    def score(_: str, answer: str, record: Record) -> float:
        content = read_field(record, options.field, options.name)
        expected = find_number(str(content), options.after)
        if expected is None:
            raise UserError(
                f"the reward numeric found no number in the field {options.field} of"
                f" {show_record(record)}"
            )
        found = find_number(answer, options.after, required=True)
        return float(found is not None and abs(found - expected) <= options.tolerance)

    return score


def find_number(text: str, after: str | None = None, required: bool = False) -> float | None:
    """Returns the last number of a text, or the first one after the last occurrence of `after`;
    None if there is no number.

    Args:
      required: whether a text without `after` has no number. Otherwise its last number is returned.
    """
    text = text.replace("\u2212", "-")  # the minus sign
    match = None
    if after and after in text:
        match = NUMBER.search(text, text.rindex(after) + len(after))
    elif not (after and required):
        for number in NUMBER.finditer(text):
            match = number  # in the end the last one
    if match is None:
        return None
    value = float(match[0].replace(",", ""))
    return value if math.isfinite(value) else None


def regex(options: Regex) -> Score:
    """1 if a regular expression matches the answer, else 0."""
    matches = compile_linear_regex(
        options.pattern, options.match == "fullmatch", "the reward regex"
    )
    return lambda prompt, answer, record: float(len(answer) <= MAX_CHARACTERS and matches(answer))


def json_schema(options: JSONSchema) -> Score:
    """1 if the answer, or the last fenced block in it, is JSON that a schema allows, else 0."""
    if options.field is not None:
        field = options.field

        def score(_: str, answer: str, record: Record) -> float:
            schema = read_field(record, field, options.name)
            check = compile_schema(
                schema, f"the schema in the field {field} of {show_record(record)}"
            )
            return float(allows_json(check, answer))

        return score
    if options.path is None:
        check = compile_schema(options.json_schema, "the schema of the reward json_schema")
    else:
        check = compile_schema(
            read_json(options.path, MAX_SCHEMA_BYTES, "the schema"), f"the schema {options.path}"
        )
    return lambda prompt, answer, record: float(allows_json(check, answer))


def allows_json(check: Callable[[Any], bool], answer: str) -> bool:
    """Whether the JSON of an answer passes a check. NaN, Infinity and numbers of thousands of
    digits are not JSON.
    """
    if len(answer) > MAX_CHARACTERS:
        return False
    try:
        return check(json.loads(fenced_block(answer), parse_constant=_refuse_constant))
    except (ValueError, RecursionError):
        return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def fenced_block(text: str) -> str:
    """Returns the content of the last complete block between lines that begin with three backticks,
    or else the whole text.
    """
    lines = text.splitlines(keepends=True)
    fences = [number for number, line in enumerate(lines) if line.lstrip().startswith(FENCE)]
    if len(fences) < 2:
        return text
    last = len(fences) // 2 * 2  # fences open and close in turn
    return "".join(lines[fences[last - 2] + 1 : fences[last - 1]])


def length(options: Length) -> Score:
    """A penalty in [−1, 0] on the distance from a target length, or on the excess over a
    maximum.
    """

    def score(_: str, answer: str, record: Record) -> float:
        size = len(answer.split()) if options.unit == "words" else len(answer)
        if options.target is not None:
            return -min(1.0, abs(size - options.target) / options.target)
        limit = options.max or 1
        return -min(1.0, max(0, size - limit) / limit)

    return score


def python_tests(options: PythonTests) -> Score:
    """The fraction of the tests of the record that the answer, or the last fenced block in it,
    passes.
    """
    check_platform()

    def score(_: str, answer: str, record: Record) -> float:
        tests = read_field(record, options.field, options.name)
        tests = [tests] if isinstance(tests, str) else tests
        is_list = isinstance(tests, list | tuple) and all(isinstance(test, str) for test in tests)
        if not is_list or not 1 <= len(tests) <= MAX_TESTS:
            expected = f"must be Python code or a list of 1 to {MAX_TESTS} of these"
            raise UserError(
                f"the field {options.field} {expected}, got {quote(tests)} in {show_record(record)}"
            )
        if len(answer) > MAX_CHARACTERS:
            return 0.0
        return count_passed_tests(
            fenced_block(answer), tests, options.seconds, options.memory_mib
        ) / len(tests)

    return score


def user_function(options: Function) -> Score:
    """The number that a user's function returns. It is imported from an installed package or the
    working directory.
    """
    module_name, _, function_name = options.name.rpartition(".")
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.append(directory)  # at the end: a file there does not replace an installed package
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(
            f"the reward {options.name} cannot be imported from {directory}: {reason}"
        ) from None
    if not callable(function):
        raise UserError(
            f"the module {module_name} has no function {function_name}, which grpo.rewards names"
        )

    def score(prompt: str, answer: str, record: Record) -> float:
        try:
            value = function(prompt, answer, record)
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(
                f"the reward {options.name} failed on {show_record(record)}: {reason}"
            ) from error
        if not isinstance(value, Real) or not math.isfinite(value):
            got = f"got {quote(value)} on {show_record(record)}"
            raise UserError(f"the reward {options.name} must return a finite number, {got}")
        return float(value)

    return score


def read_field(record: Record, field: str, reward: str) -> Any:
    """Returns a field of a record.

    Raises:
      UserError: the record has no such field.
    """
    if field not in record:
        raise UserError(
            f"the reward {reward} needs the field {field}, which is missing in"
            f" {show_record(record)}"
        )
    return record[field]


def show_record(record: Record) -> str:
    """Formats a record for an error message."""
    text = repr(dict(record))
    shown = text if len(text) <= MAX_SHOWN_RECORD else text[: MAX_SHOWN_RECORD - 1] + "…"
    return f"the record {shown}"


BUILDERS: dict[type[Reward], Callable[[Any], Score]] = {
    ExactMatch: exact_match,
    Numeric: numeric,
    Regex: regex,
    JSONSchema: json_schema,
    Length: length,
    PythonTests: python_tests,
    Function: user_function,
}
