"""Rewards: each one on right, wrong and hostile answers, and the errors about settings, records and
functions.
"""

import re
import sys
import time

import numpy as np
import pytest

from dantinox.config import UserError, build_config
from dantinox.training.rewards import MAX_CHARACTERS, build_rewards, fenced_block, find_number
from dantinox.training.schema_check import compile_schema

HUGE = "a" * 300_000
GRPO = {"training": {"objective": "grpo", "init_from": "runs/x"}}


def rewards_of(*entries, **settings):
    return build_rewards(
        build_config({**GRPO, "grpo": {"rewards": list(entries), **settings}}).grpo
    )


def score_of(entry, answer, record=None, **settings):
    """Returns the score of the only reward."""
    (value,) = rewards_of(entry, **settings).score("prompt", answer, record or {}).values()
    return value


@pytest.mark.parametrize(
    ("options", "answer", "expected"),
    [
        ({}, "Paris", 1),
        ({}, " Paris\n", 1),
        ({}, "paris", 0),
        ({"ignore_case": True}, "PARIS", 1),
        ({"strip": False}, "Paris ", 0),
        ({}, HUGE, 0),
    ],
)
def test_exact_match(options, answer, expected):
    assert score_of({"name": "exact_match", **options}, answer, {"answer": "Paris"}) == expected
    assert score_of({"name": "exact_match", "field": "n"}, "7", {"n": 7}) == 1


@pytest.mark.parametrize(
    ("text", "after", "expected"),
    [
        ("so 3 + 4 = 7.", None, 7),
        ("5-3", None, 3),
        ("x = -2.5e3 !", None, -2500),
        ("$1,234,567.", None, 1234567),
        ("1,2", None, 2),
        (".5", None, 0.5),
        ("\u221212", None, -12),
        ("none", None, None),
        ("#### 72 apples and 3", "####", 72),
        ("#### 1\n#### 2 or 5", "####", 2),
        ("#### none 7 #### x", "####", None),
        ("no mark 9", "####", 9),
        ("", None, None),
        ("9" * 400, None, None),
        ("1" + ",111" * 50_000, None, None),
        ("1e999", None, None),
        ("\u0663", None, None),
    ],
)
def test_numbers_in_a_text(text, after, expected):
    assert find_number(text, after) == expected


def test_numeric():
    assert score_of("numeric", "it is 72.0", {"answer": "work ... #### 72"}) == 1
    assert score_of("numeric", "it is 71", {"answer": 72}) == 0
    assert score_of({"name": "numeric", "tolerance": 1}, "it is 71", {"answer": 72}) == 1
    after = {"name": "numeric", "after": "####"}
    assert score_of(after, "the 7 #### 72", {"answer": "5 #### 72"}) == 1
    assert score_of(after, "72", {"answer": "#### 72"}) == 0  # the answer needs the text
    with pytest.raises(
        UserError,
        match=(
            r"^the reward numeric found no number in the field answer of the record \{'answer':"
            r" 'x'\}$"
        ),
    ):
        score_of("numeric", "1", {"answer": "x"})


@pytest.mark.parametrize(
    ("options", "answer", "expected"),
    [
        ({"pattern": r"(?s)<think>.*</think>\s*-?\d+"}, "<think>\nso\n</think> -12", 1),
        ({"pattern": r"<think>.*</think>"}, "x<think></think>", 0),
        ({"pattern": r"\d{3}", "match": "search"}, "a\n123\nb", 1),
        ({"pattern": r"\d{3}", "match": "search"}, "12", 0),
        ({"pattern": "a|b", "match": "fullmatch"}, "ab", 0),
        ({"pattern": "é+"}, "éé", 1),
        ({"pattern": "^(?:a|[|)]b)$", "match": "search"}, ")b", 1),
        ({"pattern": "^(?:a|[|)]b)$", "match": "search"}, "x)b", 0),
        ({"pattern": r"^costs \d\$", "match": "search"}, "costs 5$ now", 1),
        ({"pattern": r"\d\\$", "match": "search"}, "costs 5\\", 1),
        ({"pattern": "^a$"}, "a", 1),
        ({"pattern": "a|b", "match": "search"}, "xbx", 1),
        (
            {"pattern": "[ab]*a[ab]{18}", "match": "search"},
            "ab" * 5000 + "b" * 17,
            1,
        ),  # a deterministic automaton has 2^18 states
        ({"pattern": ".*"}, "\ud800", 1),
        ({"pattern": "(a+)+b", "match": "search"}, HUGE, 0),  # exponential with backtracking
        ({"pattern": "(a|a)*b"}, HUGE, 0),
        ({"pattern": "(?s).*"}, "a" * (MAX_CHARACTERS + 1), 0),
    ],
)
def test_regex(options, answer, expected):
    started = time.process_time()
    assert score_of({"name": "regex", **options}, answer) == expected
    assert time.process_time() - started < 5


@pytest.mark.parametrize("pattern", ["^[]|x]$", "^[^]y|]$", "^[x[:digit:]|]$", r"^[\]|x]$"])
def test_bar_in_a_character_class_does_not_separate_alternatives(pattern):
    """A closing bracket is literal as the first character of a class; classes can be nested."""
    assert [
        score_of({"name": "regex", "pattern": pattern, "match": "search"}, answer)
        for answer in ("x", "yx")
    ] == [1, 0]


SCHEMA = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0},
    },
}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"name": "Ada", "age": 36}', 1),
        ('Here:\n```json\n{"name": "Ada"}\n```\nDone.', 1),
        ('{"name": ""}', 0),
        ('{"name": "Ada", "x": 1}', 0),
        ('{"age": 1}', 0),
        ('{"name": "Ada", "age": 1.0}', 1),
        ('{"name": "Ada", "age": true}', 0),
        ('{"name": "Ada", "age": -1}', 0),
        ("Ada", 0),
        ("", 0),
        ('{"name": "Ada"} and more', 0),
        ("[" * 100_000, 0),
        ('{"name": "Ada", "age": ' + "9" * 10_000 + "}", 0),
        ('{"name": "Ada", "age": NaN}', 0),
        (HUGE, 0),
    ],
)
def test_json_schema(answer, expected):
    assert score_of({"name": "json_schema", "schema": SCHEMA}, answer) == expected


def test_json_schemas_from_a_file_and_from_the_record(tmp_path):
    (tmp_path / "s.json").write_text('{"enum": [1, 2]}')
    from_file = {"name": "json_schema", "path": str(tmp_path / "s.json")}
    assert [score_of(from_file, text) for text in ("2", "3", "true")] == [1, 0, 0]
    from_record = {"name": "json_schema", "field": "schema"}
    assert score_of(from_record, "[]", {"schema": {"type": "array"}}) == 1
    with pytest.raises(
        UserError,
        match=(
            r"^the schema in the field schema of the record .* has the keyword \$ref \(allowed:"
            r" type"
        ),
    ):
        score_of(from_record, "[]", {"schema": {"$ref": "#"}})
    with pytest.raises(UserError, match=r"^no schema at .*none\.json$"):
        rewards_of({"name": "json_schema", "path": str(tmp_path / "none.json")})


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (True, [None, {}], []),
        (False, [], [None, 1]),
        ({"type": ["string", "null"]}, ["a", None], [1, []]),
        ({"type": "number"}, [1, 1.5], [True, "1"]),
        ({"const": [1, {"a": None}]}, [[1.0, {"a": None}]], [[True, {"a": None}], [1]]),
        ({"exclusiveMinimum": 0, "maximum": 2}, [1, 2, "x"], [0, 3]),
        ({"minItems": 1, "maxItems": 2}, [[1], {}], [[], [1, 2, 3]]),
        ({"minProperties": 1, "maxProperties": 1}, [{"a": 1}], [{}, {"a": 1, "b": 2}]),
        ({"maxLength": 2}, ["ab", 123], ["abc"]),
        ({"items": {"type": "integer"}}, [[1, 2], [], "x"], [[1, "2"]]),
        ({"pattern": "^a+$"}, ["aa", 3], ["b", "ba"]),
        ({"anyOf": [{"type": "null"}, {"minimum": 3}]}, [None, 3], [2]),
        ({"not": {"type": "null"}}, [1], [None]),
        ({"oneOf": [{"minimum": 3}, {"maximum": 5}]}, [2, 6], [4]),
        ({"allOf": [{"minimum": 3}, {"maximum": 5}]}, [4], [2, 6]),
        (
            {"additionalProperties": {"type": "null"}, "properties": {"a": True}},
            [{"a": 1, "b": None}],
            [{"b": 1}],
        ),
        ({"exclusiveMaximum": 0, "title": "t", "description": "d"}, [-1], [0]),
        ({"enum": [0, "a"]}, [0, "a", 0.0], [False, "b"]),
    ],
)
def test_keywords_of_schemas(schema, valid, invalid):
    check = compile_schema(schema, "the schema")
    assert [check(value) for value in valid] == [True] * len(valid)
    assert [check(value) for value in invalid] == [False] * len(invalid)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "text"}, "type of the schema must be one or more of object, array"),
        ({"type": [3]}, "type of the schema must be one or more of object, array"),
        ({"minimum": "3"}, "minimum of the schema must be a number, got '3'"),
        ({"required": "a"}, "required of the schema must be a list of names, got 'a'"),
        ({"properties": []}, r"properties of the schema must be an object, got \[\]"),
        ({"anyOf": []}, r"anyOf of the schema must be a list of schemas, got \[\]"),
        ({"enum": 3}, "enum of the schema must be a list, got 3"),
        (
            {"pattern": "["},
            r"pattern of the schema has the invalid expression '\[': unclosed character class",
        ),
        ({"pattern": 3}, "pattern of the schema must be text, got 3"),
        ({"format": "date"}, r"the schema has the keyword format \(allowed: type, enum"),
        ({"items": [True]}, r"the schema must be an object, true or false, got \[True\]"),
    ],
)
def test_wrong_schemas_are_refused(schema, message):
    with pytest.raises(UserError, match=f"^{message}"):
        compile_schema(schema, "the schema")


def test_a_deep_schema_is_refused():
    deep = {}
    for _ in range(100):
        deep = {"not": deep}
    with pytest.raises(UserError, match=r"^the schema is nested more than 64 deep$"):
        compile_schema(deep, "the schema")


@pytest.mark.parametrize(
    ("options", "answer", "expected"),
    [
        ({"target": 4}, "abcd", 0),
        ({"target": 4}, "ab", -0.5),
        ({"target": 4}, "a" * 40, -1),
        ({"max": 4}, "abc", 0),
        ({"max": 4}, "abcde", -0.25),
        ({"max": 4}, HUGE, -1),
        ({"max": 2, "unit": "words"}, "a b  c", -0.5),
        ({"max": 4}, "", 0),
    ],
)
def test_length(options, answer, expected):
    assert score_of({"name": "length", **options}, answer) == expected


def test_the_last_complete_fenced_block_is_read():
    assert fenced_block("a\n```python\nx = 1\n```\nb\n```\ny\nz\n```\n") == "y\nz\n"
    assert fenced_block("a\n```\nb") == "a\n```\nb"
    assert fenced_block("```\nb\n```\n```\nopen") == "b\n"
    assert len(fenced_block("```\n" * 100_000)) == 0


@pytest.fixture
def functions(tmp_path, monkeypatch):
    """A module of user functions in the working directory."""
    (tmp_path / "my_rewards.py").write_text(
        "import math\nimport numpy as np\ndef vowels(prompt, answer, record): return sum(c in"
        " 'aeiou' for c in answer) + len(prompt) * record['k']\ndef nan(prompt, answer, record):"
        " return math.nan\ndef inf(prompt, answer, record): return -math.inf\ndef text(prompt,"
        " answer, record): return '1'\ndef nothing(prompt, answer, record): pass\ndef array(prompt,"
        " answer, record): return np.ones(2)\ndef numpy(prompt, answer, record): return"
        " np.float32(0.5)\ndef flag(prompt, answer, record): return True\ndef fail(prompt, answer,"
        " record): return record['missing']\ndef wrong(prompt): return 1\nnumber = 3\n"
    )
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("my_rewards", "broken_rewards"):
        sys.modules.pop(name, None)


def test_user_functions(functions):
    assert score_of("my_rewards.vowels", "banana", {"k": 10}) == 3 + 60
    assert score_of("my_rewards.numpy", "") == 0.5
    assert score_of("my_rewards.flag", "") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nan",
            "the reward my_rewards.nan must return a finite number, got nan on the record {'k': 1}",
        ),
        (
            "inf",
            (
                "the reward my_rewards.inf must return a finite number, got -inf on the record"
                " {'k': 1}"
            ),
        ),
        (
            "text",
            (
                "the reward my_rewards.text must return a finite number, got '1' on the record"
                " {'k': 1}"
            ),
        ),
        (
            "nothing",
            (
                "the reward my_rewards.nothing must return a finite number, got null on the record"
                " {'k': 1}"
            ),
        ),
        (
            "array",
            (
                "the reward my_rewards.array must return a finite number, got array([1., 1.]) on"
                " the record {'k': 1}"
            ),
        ),
        ("fail", "the reward my_rewards.fail failed on the record {'k': 1}: KeyError: 'missing'"),
        (
            "wrong",
            (
                "the reward my_rewards.wrong failed on the record {'k': 1}: TypeError: wrong()"
                " takes 1 positional"
            ),
        ),
        ("absent", "the module my_rewards has no function absent, which grpo.rewards names"),
        ("number", "the module my_rewards has no function number, which grpo.rewards names"),
    ],
)
def test_errors_of_user_functions_name_the_function_and_the_record(functions, name, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        score_of(f"my_rewards.{name}", "a", {"k": 1})


def test_modules_that_cannot_be_imported(functions):
    with pytest.raises(
        UserError,
        match=(
            r"^the reward broken_rewards\.f cannot be imported from .*: ZeroDivisionError: division"
        ),
    ):
        rewards_of("broken_rewards.f")
    with pytest.raises(
        UserError,
        match=r"^the reward no_such_module\.f cannot be imported from .*: ModuleNotFoundError",
    ):
        rewards_of("no_such_module.f")


def test_rewards_are_added_with_their_weights():
    rewards = rewards_of(
        {"name": "numeric", "weight": 1.0},
        {"name": "regex", "pattern": r"\d+", "weight": 0.2},
        {"name": "regex", "pattern": "x", "weight": -3},
        {"name": "length", "max": 1, "weight": 0.5},
    )
    scores = rewards.score("", "72", {"answer": 72})
    assert scores == {"numeric": 1, "regex": 1, "regex#2": 0, "length": -1}
    np.testing.assert_allclose(rewards.total(scores), 1 + 0.2 - 0.5, rtol=1e-12)
    assert rewards.score("", "72", {"answer": 72}) == scores


def test_a_missing_field_is_an_error_that_shows_the_record():
    long = {"question": "x" * 1000}
    with pytest.raises(
        UserError,
        match=(
            r"^the reward exact_match needs the field answer, which is missing in the record"
            r" .{300}$"
        ),
    ):
        score_of("exact_match", "a", long)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "must name at least one reward with training.objective: grpo, got []"),
        (
            ["numerc"],
            "has no reward numerc, did you mean numeric? (allowed: exact_match, numeric, ",
        ),
        (
            [{"name": "numeric", "tolerence": 1}],
            "has the reward numeric with an unknown option tolerence, did you mean tolerance?",
        ),
        (
            [{"name": "numeric", "tolerance": -1}],
            "has the reward numeric, whose tolerance must be a number ≥ 0, got -1",
        ),
        (
            [{"name": "numeric", "weight": float("nan")}],
            "has the reward numeric, whose weight must be a number, got nan",
        ),
        ([{"name": "regex"}], "has the reward regex without pattern"),
        (
            [{"name": "a.b", "pattern": "x"}],
            "has the reward a.b with an unknown option pattern (allowed: name, weight)",
        ),
        ([{"weight": 1}], "must have an entry with a name: exact_match, "),
        (
            [{"name": "length", "target": 1, "max": 1}],
            "has the reward length, which takes exactly one of target, max, got 2",
        ),
        (
            ["json_schema"],
            "has the reward json_schema, which takes exactly one of schema, path, field, got 0",
        ),
        ([3], "must be a list (each text, or a mapping), got 3"),
        ([{"name": "length", "max": 0}], "has the reward length, whose max must be"),
    ],
)
def test_wrong_settings_are_refused_when_they_are_read(rewards, message):
    with pytest.raises(UserError, match=rf"^{re.escape('grpo.rewards ' + message)}"):
        build_config({**GRPO, "grpo": {"rewards": rewards}})


def test_an_expression_with_too_many_states_is_an_error():
    with pytest.raises(
        UserError,
        match=r"^the reward regex has the expression .* too complex for llguidance: use smaller",
    ):
        score_of({"name": "regex", "pattern": "(a{1,1000}){1,1000}"}, "a" * 20_000)


@pytest.mark.parametrize("pattern", ["\ud800", "[", "(?=a)", r"(a)\1", r"\bword\b", "^a|b"])
def test_expressions_that_cannot_be_matched_in_linear_time_are_refused(pattern):
    with pytest.raises(UserError, match=r"^the reward regex has the invalid expression"):
        rewards_of({"name": "regex", "pattern": pattern, "match": "search"})
