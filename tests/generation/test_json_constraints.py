"""JSON schemas: exact numbers, patterns of ECMA-262, formats that are annotations, and messages
that name the keyword.
"""

import json

import pytest

pytest.importorskip("llguidance")

from dantinox.config import UserError
from dantinox.generation.guides.constraints import Constraint, check_constraint
from dantinox.text.ecma_patterns import to_rust_regex

from .texts_of import COMPILER, allows


def accepted(schema, texts):
    """Returns those of the texts that a schema allows."""
    matcher = COMPILER.matcher(
        "json_schema", schema if isinstance(schema, str) else json.dumps(schema)
    )
    return [text for text in texts if allows(matcher, text)]


def message(schema):
    source = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(UserError) as caught:
        check_constraint(Constraint("json_schema", source))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Integers that 64-bit floats round: the next float is in the comment.
BIG = (
    2**53 + 1,  # 2^53
    1157890123456789013,  # 1157890123456788992
    2**63 - 1,  # 2^63
    2**63 + 1,
    -(2**63),  # exact, but llguidance crashes
    10**23 + 1,
)


@pytest.mark.parametrize("number", BIG)
@pytest.mark.parametrize(
    "write", [lambda n: {"const": n}, lambda n: {"enum": [n, 7], "type": "integer", "title": "a"}]
)
def test_a_listed_integer_is_never_rounded(number, write):
    neighbors = [number - 1, number, number + 1, round(float(number))]
    assert {*accepted(write(number), map(str, neighbors))} == {str(number)}


@pytest.mark.parametrize("number", [2**53 + 2, 10**18, -(10**18), 10**22])
def test_a_listed_integer_that_floats_hold_may_stand_anywhere(number):
    schema = {
        "properties": {"a": {"const": number}},
        "required": ["a"],
        "additionalProperties": False,
        "type": "object",
    }
    texts = [f'{{"a": {n}}}' for n in (number, number + 1, number - 1)]
    assert accepted(schema, texts) == texts[:1]


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (
            {"properties": {"id": {"enum": [1, 2**53 + 1]}}},
            "properties.id.enum: 9007199254740993 cannot be written exactly",
        ),
        (
            {"items": {"const": {"a": [2**60 + 1]}}},
            "items.const: 1152921504606846977 cannot be written exactly",
        ),
        ({"type": "integer", "minimum": 2**53 + 1}, "minimum: 9007199254740993 is beyond ±2^53"),
        (
            {"type": "integer", "exclusiveMaximum": 10**18},
            "exclusiveMaximum: 1000000000000000000 is beyond ±2^53",
        ),
        ({"type": "number", "maximum": 1e19}, "maximum: 1e+19 is beyond ±2^53"),
        ('{"maximum": 1e400}', "maximum: the number is too large for a 64-bit float"),
        ('{"maximum": Infinity}', "maximum: the number is too large for a 64-bit float"),
        ({"maximum": 10**400}, "maximum: the number is too large for a 64-bit float"),
        (
            {"type": "integer", "multipleOf": 2**31},
            "multipleOf: must be over 0 and at most 20,000 in units of its last digit",
        ),
        ({"multipleOf": 0}, "multipleOf: must be over 0"),
        (
            {"allOf": [{"multipleOf": 19997}, {"multipleOf": 19993}]},
            "multipleOf have a common multiple beyond 20,000",
        ),
        (
            {"oneOf": [{"minimum": 3}, {"minimum": 1}]},
            "oneOf is supported only if no value can match two of its options",
        ),
        ({"contains": {}, "uniqueItems": True}, 'unsupported keywords: "contains", "uniqueItems"'),
        (
            {"type": "string", "pattern": r"\bfoo"},
            r"pattern: the word boundary \b is not supported in the pattern",
        ),
        ({"type": "string", "pattern": "a(?=b)"}, "pattern: look-around"),
        ({"type": "string", "pattern": "(^a|b$)c"}, "^ or $ inside of the pattern"),
        ({"type": "string", "pattern": "[b-a]"}, "the range b-a is out of order"),
        (
            {"$defs": {"a": {"pattern": "["}}, "$ref": "#/$defs/a"},
            "$defs.a.pattern: unclosed character class",
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(schema, says):
    found = message(schema)
    assert says in found and "coerce_one_of" not in found, found


def test_bounds_that_floats_hold():
    assert accepted(
        {"type": "integer", "maximum": 10**18}, [str(10**18), str(10**18 + 1), "5"]
    ) == [str(10**18), "5"]
    assert accepted({"minimum": 2**53}, [str(2**53), str(2**53 - 1)]) == [str(2**53)]
    assert accepted({"type": "integer", "multipleOf": 1.5}, ["3", "4", "1.5", "-6"]) == ["3", "-6"]


@pytest.mark.parametrize("size", [1.0, 1])
def test_an_integral_float_is_an_integer(size):
    assert accepted(
        {"type": "array", "minItems": size, "maxItems": 2.0}, ["[]", "[1]", "[1,2]", "[1,2,3]"]
    ) == ["[1]", "[1,2]"]
    assert accepted({"type": "string", "maxLength": size}, ['""', '"a"', '"ab"']) == ['""', '"a"']
    assert "minItems" in message({"type": "array", "minItems": 1.5})


@pytest.mark.parametrize(
    ("options", "inside"),
    [
        ([{"const": 1, "title": "one"}, {"const": 2, "title": "two"}], ["1", "2"]),
        (
            [{"enum": [1, 3]}, {"const": True}, {"const": "a"}, {"enum": [2.5, None]}],
            ["1", "3", "true", '"a"', "2.5", "null"],
        ),
        ([{"enum": [1, 1, 2]}, {"const": 3, "type": "integer"}], ["1", "2", "3"]),
    ],
)
def test_options_that_list_different_values_exclude_each_other(options, inside):
    texts = ["1", "2", "3", "true", '"a"', "2.5", "null", "false", "4"]
    assert accepted({"oneOf": options}, texts) == [text for text in texts if text in inside]


@pytest.mark.parametrize(
    "options",
    [[{"const": 1}, {"const": 1.0}], [{"enum": [1, 2]}, {"enum": [2, 3]}], [{"const": 1}, {}]],
)
def test_options_with_a_common_value_are_refused(options):
    assert "oneOf is supported only if no value" in message({"oneOf": options})


def test_an_unknown_format_is_an_annotation():
    texts = ['"a/b"', '""', "3"]
    assert accepted({"type": "string", "format": "path"}, texts) == texts[:2]
    assert accepted({"format": "int64"}, texts) == texts
    assert accepted({"type": "string", "format": "date"}, ['"2024-02-28"', '"a"']) == [
        '"2024-02-28"'
    ]
    assert accepted(
        {"properties": {"format": {"type": "integer"}}, "required": ["format"]},
        ['{"format": 1}', "{}"],
    ) == ['{"format": 1}']


def test_an_empty_schema_allows_any_json():
    texts = ["1", '"a"', "[1,{}]", "null", '{"a":true}']
    assert accepted({}, [*texts, "a", "{"]) == texts and accepted("true", texts) == texts


# Expected texts: ECMA-262 with the flag u (`new RegExp(pattern, "u").test(text)`).
@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("^[a-z&&m]+$", ["m", "a&z"], ["A", ""]),
        ("^[[]x$", ["[x"], ["x"]),
        ("^[a~~b]$", ["a", "~", "b"], ["c"]),
        ("^[+--]$", ["+", ",", "-"], ["."]),
        ("^[--a]$", ["-", "A", "a"], ["b", ","]),
        (r"^[\]\^-]$", ["]", "^", "-"], ["a"]),
        ("^[^]$", ["a", "\n"], [""]),
        (r"^[\w-]+$", ["a-b"], ["é"]),
        (r"^[^\D]$", ["1"], ["a"]),
        (r"^[\D\d]$", ["1", "a"], [""]),
        ("^a.b$", ["axb", "a\tb", "a\x85b"], ["a\nb", "a\rb", "a\u2028b"]),
        (r"^\s$", [" ", "\xa0", "\ufeff", "\u2003"], ["\x85", "a"]),
        (r"^\S$", ["a", "\x85"], ["\ufeff"]),
        (r"^\d$", ["1"], ["٣"]),
        (r"^\cJ\x41\u0042\u{43}\0$", ["\nABC\0"], ["\nABC"]),
        (r"^\uD83D\uDE00[\u{1F600}]$", ["😀😀"], ["😀"]),
        (r"^\p{Lu}\P{L}$", ["É1"], ["é1", "ÉA"]),
        (r"^\/\-\.$", ["/-."], ["/-x"]),
        ("^a-b~c&d#e f/g$", ["a-b~c&d#e f/g"], []),
        (r"^\{a\}]$", ["{a}]"], ["{a}"]),
        ("^a+?b*?c??$", ["a", "aabc"], ["b"]),
        ("^(?<year>[0-9]{2,})-(?:x|y){2}$", ["2024-xy"], ["2-xy", "20-x"]),
        ("^a|b$", ["ax", "xb", "a"], ["xa", "bx"]),
        ("b", ["abc", "b"], ["ac", ""]),
        ("", ["", "a"], []),
        (r"^[\b]$", ["\b"], ["b"]),
        (r'^"\\$', ['"\\'], ["\\"]),
    ],
)
def test_patterns_are_those_of_ecma_262(pattern, inside, outside):
    schema = {"type": "string", "pattern": pattern}
    texts = [json.dumps(text, ensure_ascii=False) for text in inside + outside]
    assert accepted(schema, texts) == texts[: len(inside)]


def test_pattern_properties_are_patterns_of_ecma_262():
    schema = {
        "type": "object",
        "patternProperties": {"^[a&&b]$": {"type": "integer"}},
        "additionalProperties": False,
    }
    assert accepted(schema, ['{"a": 1}', '{"&": 1}', '{"c": 1}']) == ['{"a": 1}', '{"&": 1}']


@pytest.mark.parametrize(
    "pattern",
    [r"\a", r"\Z", r"\1", "(?<=a)b", "a{,3}", r"\u{110000}", r"[\ud800]", "(?P<a>b)", "a\\"],
)
def test_invalid_patterns(pattern):
    with pytest.raises(ValueError, match=r"."):
        to_rust_regex(pattern)
