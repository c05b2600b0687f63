"""Constrained generation: token masks from a JSON schema, regex or grammar (llguidance)."""

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dantinox.config import UserError
from dantinox.files import first_line, quote, require_extra
from dantinox.generation.guides.gbnf import gbnf_to_lark
from dantinox.generation.guides.token_masks import allows, mask_of
from dantinox.text import Tokenizer
from dantinox.text.json_schemas import all_numbers, is_exact, rewrite_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_SOURCE_BYTES = 256 << 10  # the tools of a coding agent take about 60 KB
# Limits per grammar and per token, in the units of llguidance. With a vocabulary of 100,000 tokens,
# the slowest of the tested grammars takes 0.2 s to compile and 0.15 s per token.
LLGUIDANCE_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 500_000,
    "max_lexer_states": 50_000,
    "max_items_in_row": 2_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "verbose_errors": False,
}
# Phrases in the messages of llguidance when a limit is reached.
LIMIT_PHRASES = (
    "too many",
    "too complex",
    "too large",
    "too big",
    "max is",
    "fuel",
    "limit",
    "precomputation",
    "exceed",
)
# `generation.json_whitespace` → options of llguidance for JSON. `compact` allows one space after a
# comma or colon, as most programs write JSON on one line. `flexible` allows nothing, a space, or a
# line break with indentation between any two parts: a weak model may fill it with spaces. Unbounded
# whitespace might never end.
WHITESPACE: dict[str, dict[str, Any]] = {
    "compact": {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"},
    "flexible": {"whitespace_pattern": r"( |\n[ \t]{0,16})?"},
}
# Patterns of messages of llguidance, and what to say instead.
MESSAGES = (
    (
        r"oneOf constraints are not supported.*",
        "oneOf is supported only if no value can match two of its options: use anyOf",
    ),
    (r"Unimplemented keys: \[(.*)\]", r"unsupported keywords: \1"),
    (
        r"lookarounds not supported yet; (?:Start|End) in regex (.*)",
        r"^ or $ inside of the pattern \1 is not supported",
    ),
)
DISPLAY_NAMES = {
    "json_schema": "the JSON schema",
    "json_object": "the JSON object",
    "regex": "the regex",
    "lark": "the Lark grammar",
    "gbnf": "the GBNF grammar",
    "tools": "the grammar of the tools",
}
CONSTRAINT_KINDS = tuple(DISPLAY_NAMES)


@dataclass(frozen=True)
class Constraint:
    """A schema, regex or grammar that a generated text must satisfy.

    Constraints need the extra `serve`. Generation checks the constraint and raises a UserError if
    it is invalid.

    Attributes:
      kind: `json_schema`, `json_object` (any JSON object), `regex`, `lark`, `gbnf`, or `tools` (a
        Lark grammar of tool calls).
      source: the text of the schema, regex or grammar, at most 256 KB; empty for `json_object`.
      after: the constraint applies to the text after the first of these strings; the text before it
        is free. Empty: it applies to the whole text.
      opening: with `after`, the constraint also applies to a text that begins with this string,
        from its beginning.
      repeats: whether the text is free again after the constraint is complete, up to the next
        string in `after`. Otherwise the text ends there.

    Example:
      >>> choice = dantinox.Constraint("regex", "yes|no")
      >>> model = dantinox.load("runs/quickstart")
      >>> result = model.generate("Is water wet? ", constraint=choice, max_new_tokens=8)
      >>> result.text in ("yes", "no")
      True
    """

    kind: str
    source: str
    after: tuple[str, ...] = ()
    opening: str = ""
    repeats: bool = False


def check_constraint(constraint: Constraint) -> None:
    """Checks everything about a constraint that can be checked without a tokenizer.

    Raises:
      UserError: llguidance is not installed, or the constraint is invalid or too large.
    """
    library = _import_llguidance()
    text = _to_grammar(library, constraint)
    problem = library.LLMatcher.validate_grammar(
        text, limits=library.LLParserLimits(**LLGUIDANCE_LIMITS)
    )
    if problem and not library.LLMatcher.validate_grammar_with_warnings(text)[0]:
        return  # the problem is only a warning
    if problem:
        raise _to_user_error(constraint.kind, problem)


class ConstraintCompiler:
    """Compiles constraints for one vocabulary to matchers, which compute token masks."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None):
        """Converts the vocabulary to the format of llguidance.

        Args:
          vocab_size: the number of logits, if it is larger than the vocabulary of the tokenizer.
            The extra tokens are never allowed.

        Raises:
          UserError: llguidance is not installed, or the text of a token depends on its neighbors.
        """
        self._library = _import_llguidance()
        if tokenizer.token_pieces is None:
            raise UserError(
                "constraints need a tokenizer whose tokens have the same text next to any others;"
                " this tokenizer does not"
            )
        self._stop_ids = tokenizer.stop_ids
        self._size = tokenizer.vocab_size
        self._vocab_size = vocab_size or tokenizer.vocab_size
        adapter = _VocabularyAdapter(tokenizer, [*tokenizer.token_pieces.inner])
        self._encode = adapter
        self._tokenizer = self._library.LLTokenizer(adapter, n_vocab=self._size + 1)

    def matcher(
        self, kind: str, source: str, ends: Sequence[int] = (), json_whitespace: str = "compact"
    ) -> "Matcher":
        """Returns a matcher at the start of a sequence.

        Args:
          kind, source: as in `Constraint`.
          ends: ids that end the sequence, in addition to the EOS tokens of the tokenizer.
          json_whitespace: a key of `WHITESPACE`, the whitespace that `json_schema` and
            `json_object` allow.

        Raises:
          UserError: the source is invalid or too large, or no sequence of this vocabulary satisfies
            it.
        """
        library = self._library
        grammar = _to_grammar(library, Constraint(kind, source), json_whitespace)
        ll_matcher = library.LLMatcher(
            self._tokenizer,
            grammar,
            log_level=0,
            limits=library.LLParserLimits(**LLGUIDANCE_LIMITS),
        )
        if ll_matcher.is_error():
            raise _to_user_error(kind, ll_matcher.get_error())
        matcher = Matcher(
            ll_matcher, kind, self._size, self._vocab_size, (*self._stop_ids, *ends), self._encode
        )
        matcher.mask()  # llguidance reports some errors only for the first mask
        return matcher


class Matcher:
    """Computes the tokens that a constraint allows next in one sequence.

    Attributes:
      ended: whether an EOS token has been consumed; no token is allowed after it.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        kind: str,
        end: int,
        vocab_size: int,
        ends: Sequence[int],
        encode: Callable[[str], list[int]],
    ):
        """Created by `ConstraintCompiler.matcher`; `end` is the EOS token of llguidance, `ends` are
        the real EOS tokens.
        """
        self._matcher = matcher
        self._kind = kind
        self._end = end
        self._encode = encode
        self._ends = [token for token in ends if 0 <= token < vocab_size]
        self._end_bits = mask_of(self._ends, vocab_size)
        self._next: tuple[np.ndarray, bool] | None = None  # the result of `_compute`
        self.ended = False

    def copy(self) -> "Matcher":
        """Returns an independent matcher in the same state. It is much faster than compiling the
        constraint again.
        """
        copied = copy.copy(self)
        copied._matcher = self._matcher.deep_copy()
        return copied

    def skip(self, text: str) -> bool:
        """Advances by a text, whatever its tokens. Returns false, without a change, if the
        constraint forbids the text.
        """
        ids = self._encode(text)
        if self._matcher.validate_tokens(ids) < len(ids):
            return False
        self._next = None
        return bool(self._matcher.consume_tokens(ids))

    def mask(self) -> np.ndarray:
        """Returns the tokens that may come next, as in `token_masks`.

        EOS tokens are allowed where the sequence is complete. If the constraint allows only one
        continuation, only the first token of its encoding by the tokenizer is allowed.

        Raises:
          UserError: no token can satisfy the constraint, or the computation takes too long.
        """
        return self._compute()[0]

    @property
    def done(self) -> bool:
        """Whether the sequence is complete and cannot be continued."""
        bits, complete = self._compute()
        return self.ended or (complete and not np.any(bits & ~self._end_bits))

    def consume(self, token: int) -> None:
        """Advances by one token. If llguidance fails here, the next `mask` or `done` raises the
        error.

        Raises:
          ValueError: the token is not allowed here.
        """
        bits, complete = self._compute()
        if self.ended or not allows(bits, token):
            raise ValueError(f"token {token} is not allowed here")
        self._next = None
        if complete and token in self._ends:
            self.ended = True
        else:
            self._matcher.consume_token(token)

    def _compute(self) -> tuple[np.ndarray, bool]:
        """Returns the mask, and whether the sequence is complete."""
        if self._next is None:
            bits = np.zeros_like(self._end_bits)
            complete = self.ended
            if not self.ended:
                allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint32).copy()
                if self._matcher.is_error():
                    raise _to_user_error(self._kind, self._matcher.get_error())
                complete = allows(allowed, self._end)
                allowed[self._end // 32] &= ~np.uint32(1 << self._end % 32)
                bits[: len(allowed)] = allowed[: len(bits)]
                bits &= ~self._end_bits
            if complete:
                bits |= self._end_bits
            elif not bits.any():
                raise UserError(
                    f"no token of this vocabulary can satisfy {DISPLAY_NAMES[self._kind]} here"
                )
            self._next = bits, complete
        return self._next


class _VocabularyAdapter:
    """A vocabulary in the format of llguidance. Its last token is an extra EOS token, which only
    llguidance uses.
    """

    # llguidance reads these and the attributes that `__init__` sets.
    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, pieces: list[bytes]):
        self._tokenizer = tokenizer
        names = {index: name.encode() for name, index in tokenizer.special_tokens.items()}
        self.tokens = [names.get(index, piece) for index, piece in enumerate(pieces)] + [
            b"<|end of text|>"
        ]
        self.eos_token_id = len(pieces)
        self.special_token_ids = [*names, self.eos_token_id]
        self._pieces = pieces
        self._ids = {piece: index for index, piece in reversed([*enumerate(pieces)]) if piece}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Encodes a text that the constraint forces."""
        data = text.encode()
        try:
            ids = self._tokenizer.encode(text)
        except UserError:  # a character is not in the vocabulary
            ids = []
        # This is false if the tokenizer adds a space in front.
        is_exact_text = b"".join(self._pieces[i] for i in ids) == data
        return ids if is_exact_text else self._longest_tokens(data)

    def _longest_tokens(self, data: bytes) -> list[int]:
        """Returns the longest matching token at each position, up to a position at which no token
        matches.
        """
        ids = []
        start = 0
        while start < len(data):
            ends = range(min(start + self._longest, len(data)), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[start:end]])
            start = end
        return ids


def _import_llguidance() -> Any:
    with require_extra("serve", "constraints need a library that is not installed"):
        import llguidance
    return llguidance


def _to_grammar(library: Any, constraint: Constraint, json_whitespace: str = "compact") -> str:
    """Converts a constraint to the grammar format of llguidance."""
    _check_source(constraint)
    kind = constraint.kind
    source = constraint.source
    make = library.LLMatcher
    if kind == "regex":
        return str(make.grammar_from_regex(source))
    if kind in ("lark", "tools"):
        return str(make.grammar_from_lark(source))
    if kind == "gbnf":
        return str(make.grammar_from_lark(gbnf_to_lark(source)))
    schema = {"type": "object"} if kind == "json_object" else _parse_schema(source)
    if literals := _inexact_literals(schema):
        return str(
            make.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in literals))
        )
    try:
        rewritten = json.dumps(rewrite_schema(schema), allow_nan=False)
    except ValueError as error:
        raise UserError(f"the JSON schema cannot be used: {error}") from None
    except RecursionError:
        raise UserError("the JSON schema is nested too deeply") from None
    try:
        return str(make.grammar_from_json_schema(rewritten, defaults=WHITESPACE[json_whitespace]))
    except ValueError as error:
        raise _to_user_error(kind, str(error)) from None


def _check_source(constraint: Constraint) -> None:
    kind = constraint.kind
    if kind not in CONSTRAINT_KINDS:
        raise UserError(
            f"a constraint must be one of {', '.join(CONSTRAINT_KINDS)}, got {quote(kind)}"
        )
    name = DISPLAY_NAMES[kind]
    try:
        size = len(constraint.source.encode())
    except UnicodeEncodeError:
        raise UserError(f"{name} contains a lone surrogate, which is not valid text") from None
    if size > MAX_SOURCE_BYTES:
        raise UserError(
            f"{name} must have at most {MAX_SOURCE_BYTES >> 10} KB, got {-(-size // 1024)}"
        )
    if "\0" in constraint.source:
        place = constraint.source.index("\0") + 1
        raise UserError(f"{name} contains U+0000 at character {place}, which is not allowed")


def _inexact_literals(schema: Mapping[str, Any]) -> list[str]:
    """Returns the texts of a schema that only lists integers, if llguidance would round one of
    them.
    """
    keys = schema.keys() - {"title", "description", "$schema"}
    if not (keys <= {"enum", "type"} or keys <= {"const", "type"}):
        return []
    if schema.get("type", "integer") not in ("integer", "number"):
        return []
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        return []
    return [] if all_numbers(values, is_exact) else [str(value) for value in values]


def _parse_schema(source: str) -> dict[str, Any]:
    def convert(constant: str) -> float:
        # Infinity is what `json.dumps` writes for a number such as 1e400.
        if constant == "NaN":
            raise UserError("the JSON schema is not valid JSON: it contains NaN")
        return float(constant)

    try:
        schema = json.loads(source, parse_constant=convert)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"the JSON schema is not valid JSON in {where}: {error.msg}") from None
    except (RecursionError, ValueError):  # ValueError: a number has thousands of digits
        raise UserError(
            "the JSON schema is nested too deeply or contains a number that is too long"
        ) from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise UserError(f"the JSON schema must be an object, got {quote(schema)}")
    return schema


def _to_user_error(kind: str, message: str) -> UserError:
    """Converts an error message of llguidance to a `UserError`."""
    error_line = re.search(r"^error: (.+)$", message, re.MULTILINE)
    caret = re.search(r"regex parse error:\n.*\n {4}( *)\^+\n", message)
    line = re.match(r"(?:at )?(\d+)\((\d+)\): ", message)
    where = ""
    if error_line and caret and kind == "regex":
        where = f" at character {len(caret[1]) + 1}"
    elif line and kind in ("lark", "tools"):
        where = f" in line {line[1]}"
    reason = (
        error_line[1]
        if error_line
        else first_line(ValueError(message[line.end() :] if line else message))
    )
    reason = reason.removesuffix("<non-verbose/>").strip()
    for pattern, replacement in MESSAGES:
        reason = re.sub(pattern, replacement, reason)
    if "NoExtension" in reason:
        reason = "no text satisfies it"
    elif "recursion" in reason or "nest" in reason:
        reason = "it is nested too deeply"
    elif any(words in reason.lower() for words in LIMIT_PHRASES):
        reason = "it takes too long to evaluate: simplify it"
    return UserError(f"{DISPLAY_NAMES[kind]} cannot be used{where}: {reason}")
