"""Constrained generation: token masks from a JSON schema, regex or grammar (llguidance)."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dantinox.config import UserError
from dantinox.files import first_line, quote, require_extra
from dantinox.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_SOURCE_BYTES = 64 << 10  # bytes
# What the library may spend on a grammar and on each token, in units of its own: with a vocabulary of 100,000 the worst of the
# grammars tried takes .2 s to be built and .15 s a token.
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 500_000,
    "max_lexer_states": 50_000,
    "max_items_in_row": 2_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "verbose_errors": False,
}
# How it says that one of them was reached.
LIMIT_PHRASES = ("too many", "too complex", "too large", "too big", "max is", "fuel", "limit", "precomputation", "exceed")
# Between the parts of JSON: nothing, a space, or a line break with what it is indented by. Without an end to it a text need
# never come to one.
WHITESPACE = r"( |\n[ \t]{0,16})?"
DISPLAY_NAMES = {
    "json_schema": "the JSON schema",
    "json_object": "the JSON object",
    "regex": "the regex",
    "lark": "the Lark grammar",
    "gbnf": "the GBNF grammar",
}
KINDS = tuple(DISPLAY_NAMES)


@dataclass(frozen=True)
class Constraint:
    """What an answer has to be: `kind` is `json_schema`, `json_object`, `regex`, `lark` or `gbnf`, `source` its text."""

    kind: str
    source: str


def check_constraint(constraint: Constraint) -> None:
    """Says what is wrong with a constraint, as far as that is known without a tokenizer.

    Raises:
      UserError: llguidance is not installed, or the constraint is wrong or too large.
    """
    library = _library()
    text = _grammar(library, constraint)
    problem = library.LLMatcher.validate_grammar(text, limits=library.LLParserLimits(**LIMITS))
    if problem and not library.LLMatcher.validate_grammar_with_warnings(text)[0]:
        return  # a warning
    if problem:
        raise _mistake(constraint.kind, problem)


class ConstraintCompiler:
    """A tokenizer as the library wants it; makes what follows a text of that vocabulary token by token."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None):
        """Spells every token.

        Args:
          vocab_size: logits of a token, where a model has more than the tokenizer has tokens: those may never come.

        Raises:
          UserError: llguidance is not installed, or what a token spells depends on its neighbours.
        """
        self._library = _library()
        if tokenizer.token_pieces is None:
            raise UserError(
                "constraints need a tokenizer whose tokens spell the same beside any others, which this one's do not"
            )
        self._stop_ids, self._size = tokenizer.stop_ids, tokenizer.vocab_size
        self._vocab_size = vocab_size or tokenizer.vocab_size
        spelling = _Spelling(tokenizer, tokenizer.token_pieces.inner)
        self._tokenizer = self._library.LLTokenizer(spelling, n_vocab=self._size + 1)

    def matcher(self, kind: str, source: str, ends: Sequence[int] = ()) -> "Matcher":
        """Follows one text from its beginning.

        Args:
          kind, source: as of `Constraint`.
          ends: ids that end the text besides the tokenizer's own.

        Raises:
          UserError: the source is wrong or too large, or no text of this vocabulary meets it.
        """
        library = self._library
        grammar = _grammar(library, Constraint(kind, source))
        found = library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=library.LLParserLimits(**LIMITS))
        if found.is_error():
            raise _mistake(kind, found.get_error())
        matcher = Matcher(found, kind, self._size, self._vocab_size, (*self._stop_ids, *ends))
        matcher.mask()  # some mistakes show here only
        return matcher


class Matcher:
    """Which tokens may come next in one text.

    Attributes:
      ended: an end token has come, and nothing more may.
    """

    def __init__(self, matcher: "LLMatcher", kind: str, end: int, vocab_size: int, ends: Sequence[int]):
        """Made by `ConstraintCompiler.matcher`; `end` is what the library takes for the end token."""
        self._matcher, self._kind, self._end = matcher, kind, end
        self._ends = [token for token in ends if 0 <= token < vocab_size]
        self._words = -(-vocab_size // 32)
        self._next: tuple[np.ndarray, bool] | None = None
        self.ended = False

    def mask(self) -> np.ndarray:
        """Bits [⌈V/32⌉] uint32: bit i mod 32 of word ⌊i/32⌋ says whether token i may come next.

        End tokens may come where the text is complete. Where the constraint leaves but one way to go on, the one token may come
        that the tokenizer spells it with.

        Raises:
          UserError: no token can go on, or finding out takes too long.
        """
        return self._look()[0]

    @property
    def done(self) -> bool:
        """The text is complete and cannot go on."""
        bits, complete = self._look()
        return self.ended or (complete and not np.any(bits & ~self._bits(self._ends)))

    def take(self, token: int) -> None:
        """Goes on by a token; where the library cannot, the next `mask` or `done` says so.

        Raises:
          ValueError: the token is none that may come.
        """
        bits, complete = self._look()
        if self.ended or not bits[token // 32] >> np.uint32(token % 32) & 1:
            raise ValueError(f"token {token} may not come here")
        self._next = None
        if complete and token in self._ends:
            self.ended = True
        else:
            self._matcher.consume_token(token)

    def _look(self) -> tuple[np.ndarray, bool]:
        """The mask, and whether the text is complete."""
        if self._next is None:
            bits = np.zeros(self._words, np.uint32)
            complete = self.ended
            if not self.ended:
                found = np.frombuffer(self._matcher.compute_bitmask(), np.uint32).copy()
                if self._matcher.is_error():
                    raise _mistake(self._kind, self._matcher.get_error())
                complete = bool(found[self._end // 32] >> np.uint32(self._end % 32) & 1)
                found[self._end // 32] &= ~np.uint32(1 << self._end % 32)
                bits[: len(found)] = found[: self._words]
                bits &= ~self._bits(self._ends)
            if complete:
                bits |= self._bits(self._ends)
            elif not bits.any():
                raise UserError(f"{DISPLAY_NAMES[self._kind]} wants text that no token of this vocabulary goes on with")
            self._next = bits, complete
        return self._next

    def _bits(self, tokens: Sequence[int]) -> np.ndarray:
        bits = np.zeros(self._words, np.uint32)
        for token in tokens:
            bits[token // 32] |= np.uint32(1 << token % 32)
        return bits


class _Spelling:
    """A vocabulary in the form that the library reads, with an end token of its own behind the others."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, pieces: list[bytes]):
        self._tokenizer = tokenizer
        names = {index: name.encode() for name, index in tokenizer.special_tokens.items()}
        self.tokens = [names.get(index, piece) for index, piece in enumerate(pieces)] + [b"<|end of text|>"]
        self.eos_token_id = len(pieces)
        self.special_token_ids = [*names, self.eos_token_id]
        self._pieces = pieces
        self._ids = {piece: index for index, piece in reversed([*enumerate(pieces)]) if piece}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text that has to come: as the tokenizer spells it, or else by the longest piece at each place."""
        data = text.encode()
        try:
            ids = self._tokenizer.encode(text)
        except UserError:  # a character that it does not hold
            ids = []
        if b"".join(self._pieces[i] for i in ids) == data:  # not where it puts a space in front
            return ids
        ids, at = [], 0
        while at < len(data):
            size = next((n for n in range(min(self._longest, len(data) - at), 0, -1) if data[at : at + n] in self._ids), None)
            if size is None:
                break
            ids.append(self._ids[data[at : at + size]])
            at += size
        return ids


def _library() -> Any:
    with require_extra("serve", "constraints need a library that is not installed"):
        import llguidance
    return llguidance


def _grammar(library: Any, constraint: Constraint) -> str:
    """The grammar as the library reads it."""
    kind, source = constraint.kind, constraint.source
    if kind not in KINDS:
        raise UserError(f"a constraint must be one of {', '.join(KINDS)}, got {quote(kind)}")
    try:
        size = len(source.encode())
    except UnicodeEncodeError:
        raise UserError(f"{DISPLAY_NAMES[kind]} holds half of a character (a lone surrogate), which is not text") from None
    if size > MAX_SOURCE_BYTES:
        raise UserError(f"{DISPLAY_NAMES[kind]} must have at most {MAX_SOURCE_BYTES >> 10} KB, got {-(-size // 1024)}")
    if "\0" in source:
        raise UserError(f"{DISPLAY_NAMES[kind]} holds U+0000 at character {source.index(chr(0)) + 1}, which is not text")
    make = library.LLMatcher
    if kind == "regex":
        return str(make.grammar_from_regex(source))
    if kind == "lark":
        return str(make.grammar_from_lark(source))
    if kind == "gbnf":
        return str(make.grammar_from_lark(_lark(source)))
    schema = {"type": "object"} if kind == "json_object" else _schema(source)
    try:
        return str(make.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": WHITESPACE}))
    except ValueError as error:
        raise _mistake(kind, str(error)) from None


def _schema(source: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise UserError(f"the JSON schema is not JSON: it holds {constant}, which is no number there")

    try:
        schema = json.loads(source, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise UserError(f"the JSON schema is not JSON in line {error.lineno}, column {error.colno}: {error.msg}") from None
    except (RecursionError, ValueError):  # or a number of thousands of digits
        raise UserError("the JSON schema is nested too deeply, or holds a number that is too long") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise UserError(f"the JSON schema must be an object that describes what is allowed, got {quote(schema)}")
    return schema


def _lark(source: str) -> str:
    """A GBNF grammar in the form of Lark."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    spelt = re.sub(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", _character, source, flags=re.DOTALL)
    try:
        return str(gbnf_to_lark(spelt))
    except GbnfToLarkError as error:
        line = spelt.count("\n", 0, error.pos.pos) + 1
        raise UserError(f"the GBNF grammar is wrong in line {line}: {str(error).split(' at line ')[0]}") from None
    except RecursionError:
        raise UserError("the GBNF grammar is nested too deeply") from None
    except Exception as error:  # a bare one, for a rule that is missing or there twice
        raise UserError(f"the GBNF grammar is wrong: {first_line(error)}") from None


def _character(escape: re.Match[str]) -> str:
    """An escape as the conversion keeps it: `\\x41` for ASCII, other characters as they are."""
    digits = next((digits for digits in escape.groups() if digits), None)
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise UserError(f"the GBNF grammar holds {escape[0]}, which is no character")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _mistake(kind: str, message: str) -> UserError:
    """What the library says, as a sentence."""
    said = re.search(r"^error: (.+)$", message, re.MULTILINE)
    caret = re.search(r"regex parse error:\n.*\n {4}( *)\^+\n", message)
    line = re.match(r"(?:at )?(\d+)\((\d+)\): ", message)
    where = ""
    if said and caret and kind == "regex":
        where = f" at character {len(caret[1]) + 1}"
    elif line and kind == "lark":
        where = f" in line {line[1]}"
    what = said[1] if said else first_line(ValueError(message[line.end() :] if line else message))
    what = what.removesuffix("<non-verbose/>").strip()
    if "NoExtension" in what:
        what = "no text meets it"
    elif "recursion" in what or "nest" in what:
        what = "it is nested too deeply"
    elif any(words in what.lower() for words in LIMIT_PHRASES):
        what = "it takes too long to follow: make it simpler"
    return UserError(f"{DISPLAY_NAMES[kind]} cannot be used{where}: {what}")
