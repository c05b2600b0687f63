"""Constraints are compared with independent matchers: exactly the texts of the language are
allowed.
"""

import itertools
import json
import random
import re

import pytest

pytest.importorskip("llguidance")

from dantinox.config import UserError

from .languages import (
    PATTERN_LETTERS,
    document,
    grammar_matches,
    is_valid,
    random_grammar,
    random_pattern,
    random_value,
)
from .texts_of import COMPILER, allows, random_text

counts = pytest.mark.parametrize("count", [15, pytest.param(400, marks=pytest.mark.slow)])


@counts
def test_grammars(count):
    draw, compared = random.Random(1), 0
    every = [
        "".join(letters) for size in range(6) for letters in itertools.product("ab(", repeat=size)
    ]
    for _ in range(count):
        source, rules = random_grammar(draw)
        texts = [*every[:13], *draw.sample(every[13:], 40), "&", "a-", "é", "\n"]
        expected = [text for text in texts if grammar_matches(rules, text)]
        try:
            matcher = COMPILER.matcher("gbnf", source)
        except UserError as error:
            assert "no text satisfies it" in str(error) or "no token" in str(error), (
                str(error),
                source,
            )
            assert not expected, source
            continue
        assert [text for text in texts if allows(matcher, text)] == expected, source
        generated = random_text(matcher, draw, longest=12)
        assert generated is None or grammar_matches(rules, generated), (source, generated)
        compared += bool(expected)
    assert compared > count // 2


@counts
def test_patterns(count):
    draw, inside = random.Random(2), 0
    for _ in range(count):
        ecma, python = random_pattern(draw)
        texts = [
            "",
            *("".join(draw.choices(PATTERN_LETTERS, k=draw.randint(1, 5))) for _ in range(40)),
        ]
        expected = [text for text in texts if re.search(python, text)]
        try:
            matcher = COMPILER.matcher(
                "json_schema", json.dumps({"type": "string", "pattern": ecma})
            )
        except UserError as error:
            raise AssertionError(ecma) from error
        found = [text for text in texts if allows(matcher, json.dumps(text, ensure_ascii=False))]
        assert found == expected, (ecma, set(found) ^ set(expected))
        generated = random_text(matcher, draw)
        assert generated is None or re.search(python, json.loads(generated)), (ecma, generated)
        inside += len(expected)
    assert inside > count


@counts
def test_schemas(count):
    draw, inside, outside = random.Random(3), 0, 0
    for _ in range(count):
        schema = document(draw)
        try:
            matcher = COMPILER.matcher("json_schema", json.dumps(schema))
        except UserError as error:
            assert "nsatisfiable" in str(error), (str(error), schema)
            continue
        for value in (random_value(draw, schema, schema) for _ in range(20)):
            valid = is_valid(value, schema, schema)
            assert allows(matcher, json.dumps(value, ensure_ascii=False)) == valid, (schema, value)
            inside += valid
            outside += not valid
        for _ in range(5):
            generated = random_text(matcher, draw)
            assert generated is None or is_valid(json.loads(generated), schema, schema), (
                schema,
                generated,
            )
    assert inside > count and outside > count
