"""Converts regular expressions of ECMA-262, the language of `pattern` in JSON Schema, to the syntax
of Rust's regex crate.
"""

import re
from typing import NamedTuple

SPACES = (
    r"\t\n\x0b\x0c\r \xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
)
SETS = {"d": "0-9", "w": "0-9A-Za-z_", "s": SPACES}
DOT = r"[^\n\r\x{2028}\x{2029}]"
# Characters with a meaning → what they are in Rust's syntax.
SYNTAX = {".": DOT, "^": "^", "$": "$", "|": "|", ")": ")"}
CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "v": "\v", "f": "\f", "0": "\0"}
PROPERTY = re.compile(r"\\[pP]\{[A-Za-z_=0-9]+\}")
QUANTIFIER = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")
GROUP = re.compile(r"\((?:\?(?::|<[A-Za-z_$][\w$]*>)|(?!\?))")
CASE_FLAG = re.compile(r"\(\?i[:)]")  # ECMA-262 of 2025 has `(?i:…)`; `(?i)` comes from Python


class _Escape(NamedTuple):
    """One escape: a character, or the items of a character class, and the position after it."""

    character: str | None
    items: str
    end: int


def to_rust_regex(pattern: str) -> str:
    """Returns an equivalent pattern in Rust's syntax, with the meaning of the flag `u` of ECMA-262.

    Raises:
      ValueError: the pattern is invalid, or it has assertions or references, which no regular
        language has.
    """
    parts: list[str] = []
    at = 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            escape = _escape(pattern, at)
            parts.append(
                _literal(escape.character) if escape.character is not None else f"[{escape.items}]"
            )
            at = escape.end
        elif character == "[":
            text, at = _character_class(pattern, at)
            parts.append(text)
        elif character == "(":
            if flag := CASE_FLAG.match(pattern, at):
                parts.append(flag[0])
                at = flag.end()
            elif group := GROUP.match(pattern, at):
                parts.append("(?:")
                at = group.end()
            else:
                raise ValueError("look-around and unknown groups (?… are not supported")
        elif quantifier := QUANTIFIER.match(pattern, at):
            parts.append(quantifier[0])
            # A lazy quantifier allows the same texts.
            at = quantifier.end() + pattern.startswith("?", quantifier.end())
        elif re.match(r"\{,\d", pattern[at : at + 3]):
            raise ValueError("{,n} is not a quantifier of ECMA-262: write {0,n}")
        else:
            parts.append(SYNTAX.get(character) or _literal(character))
            at += 1
    return "".join(parts)


def _literal(character: str) -> str:
    if character < " ":
        return f"\\x{ord(character):02x}"
    return f"\\{character}" if character in r"\.+*?()|[]{}^$#&-~" else character


def _character_class(pattern: str, at: int) -> tuple[str, int]:
    """Converts the class that begins at a position, and returns the position after it."""
    at += 1
    negated = pattern.startswith("^", at)
    at += negated
    items: list[str] = []
    while not pattern.startswith("]", at):
        first = _class_item(pattern, at)
        at = first.end
        if (
            pattern.startswith("-", at)
            and not pattern.startswith("]", at + 1)
            and first.character is not None
        ):
            last = _class_item(pattern, at + 1)
            if last.character is not None:
                if last.character < first.character:
                    raise ValueError(
                        f"the range {first.character}-{last.character} is out of order"
                    )
                items.append(f"{_literal(first.character)}-{_literal(last.character)}")
                at = last.end
                continue
        items.append(first.items if first.character is None else _literal(first.character))
    if not items:
        return ("(?s:.)" if negated else r"[^\x00-\x{10ffff}]"), at + 1
    return f"[{'^' * negated}{''.join(items)}]", at + 1


def _class_item(pattern: str, at: int) -> _Escape:
    if at >= len(pattern):
        raise ValueError("unclosed character class")
    if pattern.startswith(r"\b", at):
        return _Escape("\b", "", at + 2)
    return _escape(pattern, at) if pattern[at] == "\\" else _Escape(pattern[at], "", at + 1)


def _escape(pattern: str, at: int) -> _Escape:
    """Reads the escape at a position."""
    letter = pattern[at + 1 : at + 2]
    if letter in ("b", "B"):
        raise ValueError(rf"the word boundary \{letter} is not supported")
    if letter in ("k", *"123456789") and letter:
        raise ValueError("references to groups are not supported")
    if letter.lower() in SETS and letter:
        items = SETS[letter.lower()]
        return _Escape(None, items if letter.islower() else f"[^{items}]", at + 2)
    if found := PROPERTY.match(pattern, at):
        return _Escape(None, found[0], found.end())
    if letter in CONTROLS and not (letter == "0" and pattern[at + 2 : at + 3].isdigit()):
        return _Escape(CONTROLS[letter], "", at + 2)
    if found := re.compile(r"\\c([A-Za-z])").match(pattern, at):
        return _Escape(chr(ord(found[1]) % 32), "", found.end())
    if found := re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(
        pattern, at
    ):
        return _Escape(bytes.fromhex(found[1] + found[2]).decode("utf-16-be"), "", found.end())
    if found := re.compile(
        r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\})"
    ).match(pattern, at):
        code = int(found[1] or found[2] or found[3], 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise ValueError(f"{found[0]} is not a character")
        return _Escape(chr(code), "", found.end())
    if not letter or letter.isalnum():
        raise ValueError(f"\\{letter} is not an escape of ECMA-262")
    return _Escape(letter, "", at + 2)
