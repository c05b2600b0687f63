"""Random grammars, patterns and schemas, each with an independent matcher of its language."""

import json
import math
import re

# --- GBNF: a rule is (source text, expression); an expression is a tuple that begins with its kind


COUNTS = [
    ("*", 0, None),
    ("+", 1, None),
    ("?", 0, 1),
    ("{2}", 2, 2),
    ("{1,2}", 1, 2),
    ("{2,}", 2, None),
]


def random_grammar(draw, letters="ab("):
    """Returns the source of a GBNF grammar and its rules."""
    names = ["root", "start", "x-1"][: draw.randint(1, 3)]
    rules = {name: _alternatives(draw, names, letters, 2) for name in names}
    lines = [
        f"{name} ::= {text}" + draw.choice(["", " # a comment", "\n"])
        for name, (text, _) in rules.items()
    ]
    return "\n".join(lines), {name: node for name, (_, node) in rules.items()}


def _alternatives(draw, names, letters, depth):
    options = [_sequence(draw, names, letters, depth) for _ in range(draw.choice([1, 1, 2, 2, 3]))]
    return draw.choice([" | ", " |\n  "]).join(text for text, _ in options), (
        "any",
        [node for _, node in options],
    )


def _sequence(draw, names, letters, depth):
    items = [_item(draw, names, letters, depth) for _ in range(draw.choice([0, 1, 1, 2, 2, 3]))]
    return " ".join(text for text, _ in items), ("all", [node for _, node in items])


def _item(draw, names, letters, depth):
    kind = draw.choice(
        ["text", "class", "dot", "name", "name", "group", "group"] if depth else ["text", "class"]
    )
    if kind == "text":
        word = "".join(draw.choices(letters, k=draw.randint(0, 3)))
        found = f'"{word}"', ("text", word)
    elif kind == "class":
        chosen = draw.sample(letters, draw.randint(1, len(letters)))
        negated = draw.random() < 0.2
        source = "".join(chosen) + draw.choice(["", "", "&&", "-"])
        allowed = set(source)
        found = f"[{'^' * negated}{source}]", ("class", allowed, negated)
    elif kind == "dot":
        found = ".", ("class", set(), True)
    elif kind == "name":
        name = draw.choice(names)
        found = name, ("rule", name)
    else:
        text, node = _alternatives(draw, names, letters, depth - 1)
        found = f"({text})", node
    if draw.random() < 0.3:
        symbol, least, most = draw.choice(COUNTS)
        return found[0] + symbol, ("times", found[1], least, most)
    return found


def grammar_matches(rules, text):
    """Whether a text is in the language of the rules: the least fixed point of the ends of each
    rule at each position.
    """
    table = {(name, at): set() for name in rules for at in range(len(text) + 1)}
    changed = True
    while changed:
        changed = False
        for name, at in table:
            found = _ends(rules[name], text, at, table)
            changed |= found != table[name, at]
            table[name, at] = found
    return len(text) in table["root", 0]


def _ends(node, text, at, table):
    kind = node[0]
    if kind == "text":
        return {at + len(node[1])} if text.startswith(node[1], at) else set()
    if kind == "class":
        return {at + 1} if at < len(text) and (text[at] in node[1]) != node[2] else set()
    if kind == "rule":
        return table[node[1], at]
    if kind == "any":
        return set().union(*(_ends(item, text, at, table) for item in node[1]))
    places = {at}
    if kind == "all":
        for item in node[1]:
            places = set().union(*(_ends(item, text, place, table) for place in places))
        return places
    _, inner, least, most = node
    for _ in range(least):
        places = set().union(*(_ends(inner, text, place, table) for place in places))
    found = set(places)
    for _ in range(len(text) + 1 if most is None else most - least):
        places = set().union(*(_ends(inner, text, place, table) for place in places))
        found |= places
    return found


# --- patterns: (pattern of ECMA-262, the same for Python's re)

SPACE = "\\t\\n\\x0b\\x0c\\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
ATOMS = [
    ("a", "a"), ("b", "b"), ("&", "&"), ("~", "~"), ("-", "-"), (r"\/", "/"), ("#", r"\#"), (" ",
        r"\ "), ('"', '"'),
    (".", "[^\\n\\r\u2028\u2029]"), (r"\d", "[0-9]"), (r"\w", "[0-9A-Za-z_]"),
    (r"\s", f"[{SPACE}]"), (r"\D", "[^0-9]"), ("[a&&b]", "[ab&]"), ("[[a]", r"[\[a]"),
    ("[a~~]", "[a~]"), ("[^a-c&&b]", "[^a-c&]"), ("[^]", r"[\s\S]"), (r"\u{61}", "a"),
    (r"[\d-]", "[0-9-]"), (r"[^\W]", "[0-9A-Za-z_]"), ("[+--]", "[+,-]"), (r"\\", r"\\"),
    (r"\x41", "A"), (r"\.", r"\."), (r"[\]\\]", r"[\]\\]"), ("}", r"\}"), ("]", r"\]"),
]  # fmt: skip
PATTERN_LETTERS = 'aabbAZ09&~-/[]\\{}#, .+"é\n\r\u2028\xa0\ufeff\x85'


def random_pattern(draw, depth=2):
    """Returns a pattern of ECMA-262 and an equal one for `re.search`."""
    ecma, python = _pattern(draw, depth)
    if draw.random() < 0.7:
        return f"^(?:{ecma})$", rf"\A(?:{python})\Z"
    return ecma, python


def _pattern(draw, depth):
    options = []
    for _ in range(draw.choice([1, 1, 2])):
        parts = []
        for _ in range(draw.randint(0, 3)):
            if depth and draw.random() < 0.3:
                ecma, python = _pattern(draw, depth - 1)
                part = (
                    f"{draw.choice(['(', '(?:', '(?<n>' if depth == 3 else '('])}{ecma})",
                    f"(?:{python})",
                )
            else:
                part = draw.choice(ATOMS)
            count = draw.choice(["", "", "", "*", "+", "?", "{2}", "{1,3}", "*?", "+?"])
            parts.append((part[0] + count, part[1] + count))
        options.append(tuple(map("".join, zip(*parts, strict=True))) if parts else ("", ""))
    return "|".join(ecma for ecma, _ in options), "|".join(python for _, python in options)


# --- schemas, and a validator of the keywords that `random_schema` uses


def random_schema(draw, depth=2, refs=True):
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "any", "pattern", "types"]
    kinds += ["array", "tuple", "object", "object", "anyOf", "$ref"] if depth else []
    kind = draw.choice([kind for kind in kinds if refs or kind != "$ref"])

    def some(**keywords):
        return {name: value for name, value in keywords.items() if draw.random() < 0.5}

    if kind == "string":
        return {"type": "string"} | some(
            minLength=draw.choice([0, 1.0, 2]), maxLength=draw.choice([2, 3.0]), format="path"
        )
    if kind in ("integer", "number"):
        low = draw.choice([-3, 0, 1, 2.5, -(2**53)])
        high = draw.choice([3, 5, 7.5, 2**53])
        lower = {draw.choice(["minimum", "exclusiveMinimum"]): low} if draw.random() < 0.5 else {}
        upper = {draw.choice(["maximum", "exclusiveMaximum"]): high} if draw.random() < 0.5 else {}
        return {"type": kind, **lower, **upper} | (
            some(multipleOf=draw.choice([1, 2, 3])) if kind == "integer" else {}
        )
    if kind == "types":
        return {"type": draw.sample(["string", "integer", "null"], 2), "maxLength": 2, "minimum": 1}
    if kind == "enum":
        return {
            "enum": draw.sample(
                [1, 2.5, "a", "é", None, True, [1, "b"], {"k": 2}, 2**53, -7], draw.randint(1, 3)
            )
        }
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": draw.choice(["^[a&&b]+$", "b", "^a|b$", r"^\d?$", "^[^a]*$"]),
        }
    if kind == "array":
        inner = random_schema(draw, depth - 1, refs)
        return {"type": "array", "items": inner} | some(
            minItems=draw.choice([0, 1.0]), maxItems=draw.choice([1, 2])
        )
    if kind == "tuple":
        inner = [random_schema(draw, depth - 1, refs) for _ in range(2)]
        return {
            "type": "array",
            "prefixItems": inner,
            "items": draw.choice([False, {"type": "integer"}]),
            "minItems": 1,
        }
    if kind == "object":
        names = sorted(
            draw.sample(["a", "b c", "é"], draw.randint(0, 3))
        )  # texts have the order of each schema
        properties = {name: random_schema(draw, depth - 1, refs) for name in names}
        schema = {
            "type": "object",
            "properties": properties,
            "required": [name for name in names if draw.random() < 0.6],
        }
        return schema | some(additionalProperties=draw.choice([False, {"type": "integer"}]))
    if kind == "anyOf":
        # Additional properties follow the listed ones, so that only closed objects have the same
        # order in every option.
        options = [random_schema(draw, depth - 1, refs=False) for _ in range(2)]
        return {
            "anyOf": [
                one | {"additionalProperties": False} if one.get("type") == "object" else one
                for one in options
            ]
        }
    return {"$ref": "#/$defs/one"} if kind == "$ref" else {}


def document(draw):
    """Returns a random schema with a definition."""
    return {**random_schema(draw), "$defs": {"one": random_schema(draw, 1, refs=False)}}


def is_valid(value, schema, root):
    if isinstance(schema, bool):
        return schema
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if "$ref" in schema and not is_valid(value, root["$defs"]["one"], root):
        return False
    if "enum" in schema and not any(_equal(value, one) for one in schema["enum"]):
        return False
    if "anyOf" in schema and not any(is_valid(value, one, root) for one in schema["anyOf"]):
        return False
    kinds = schema.get("type", [])
    if kinds and not any(
        _has_type(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)
    ):
        return False
    if number:
        return (
            schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
            and ("exclusiveMinimum" not in schema or schema["exclusiveMinimum"] < value)
            and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
            and ("multipleOf" not in schema or value % schema["multipleOf"] == 0)
        )
    if isinstance(value, str):
        fits = re.search(
            schema.get("pattern", "")
            .replace("&&", "&")
            .replace("$", r"\Z")
            .replace(r"\d", "[0-9]"),
            value,
        )
        return schema.get("minLength", 0) <= len(value) <= schema.get(
            "maxLength", len(value)
        ) and bool(fits)
    if isinstance(value, list):
        prefix = schema.get("prefixItems", [])
        return schema.get("minItems", 0) <= len(value) <= schema.get(
            "maxItems", len(value)
        ) and all(
            is_valid(item, prefix[at] if at < len(prefix) else schema.get("items", True), root)
            for at, item in enumerate(value)
        )
    if isinstance(value, dict):
        known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        return set(schema.get("required", ())) <= value.keys() and all(
            is_valid(item, known.get(name, other), root) for name, item in value.items()
        )
    return True


def _equal(one, other):
    return json.dumps(one) == json.dumps(other)


def _has_type(value, kind):
    if kind == "integer":
        return isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
    types = {
        "string": str,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
        "array": list,
        "object": dict,
    }
    return isinstance(value, types[kind]) and (kind == "boolean" or not isinstance(value, bool))


def random_value(draw, schema, root, depth=3):
    """Returns a value that often satisfies a schema, with the properties in the order of the
    schema.
    """
    if not isinstance(schema, dict) or draw.random() < 0.1 or depth == 0:
        return draw.choice([0, 1, -7, 2.5, "a", "b&", "", "é", None, True, [], [1], {}, 2**53])
    if "$ref" in schema:
        return random_value(draw, root["$defs"]["one"], root, depth)
    if "enum" in schema:
        return draw.choice(schema["enum"])
    if "anyOf" in schema:
        return random_value(draw, draw.choice(schema["anyOf"]), root, depth)
    kind = schema.get("type", draw.choice(["string", "integer", "array", "object"]))
    kind = draw.choice(kind) if isinstance(kind, list) else kind
    if kind == "object":
        known = schema.get("properties", {})
        names = [
            name for name in known if name in schema.get("required", ()) or draw.random() < 0.5
        ]
        found = {
            name: random_value(draw, known[name], root, depth - 1)
            for name in names
            if draw.random() < 0.95
        }
        return found | ({"other": draw.choice([1, "a"])} if draw.random() < 0.3 else {})
    if kind == "array":
        prefix = schema.get("prefixItems", [])
        size = draw.randint(0, 3)
        inner = [prefix[at] if at < len(prefix) else schema.get("items", {}) for at in range(size)]
        return [random_value(draw, item, root, depth - 1) for item in inner]
    choices = {
        "string": ["", "a", "b", "ab", "&a", "abc", "é", "3", '"', "\n"],
        "integer": [*range(-4, 8), 2**53, -(2**53), 12],
        "number": [*range(-4, 8), 2.5, 7.5, -0.5, 7.25, 2**53, -(2**53)],
        "boolean": [True, False],
        "null": [None],
    }
    return draw.choice(choices[kind])
