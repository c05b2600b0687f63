"""Regular expressions of rewards: matching takes time linear in the text, whatever the expression
(llguidance). `rewards` and `schema_check` use them.

The syntax is that of Rust's crate `regex`, without lookaround, backreferences and word boundaries.
`^` and `$` stand only at the ends of an expression.
"""

from collections.abc import Callable

from dantinox.files import UserError, first_line, quote, require_extra

ANY_TEXT = "(?s:.*)"


def compile_linear_regex(pattern: str, whole: bool, what: str) -> Callable[[str], bool]:
    """Returns a function that tests whether a regular expression matches a text.

    Args:
      whole: whether the expression must match the whole text, instead of a part of it.
      what: what uses the expression, for messages.

    Raises:
      UserError: the expression is invalid or not supported, or llguidance is not installed. The
        returned function raises one if the expression has too many states, as with large counted
        repetitions.
    """
    with require_extra("serve", f"{what} needs a library that is not installed"):
        from llguidance import LLMatcher, LLTokenizer
    if any("\ud800" <= character <= "\udfff" for character in pattern):
        raise UserError(
            f"{what} has the invalid expression {quote(pattern)}: it contains a lone surrogate"
        )
    source = pattern if whole else _with_any_text_around(pattern)
    start = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_regex(source), log_level=0)
    if start.is_error():
        lines = start.get_error().splitlines()
        reason = next(
            (line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0]
        )
        reason = reason.rpartition("(in regex): ")[2].partition(";")[0]
        raise UserError(
            f"{what} has the invalid expression {quote(pattern)}: {first_line(ValueError(reason))}"
        )

    def matches(text: str) -> bool:
        matcher = start.deep_copy()
        ids = list(text.encode("utf-8", "replace"))  # a byte is a token
        consumed = matcher.try_consume_tokens(ids)
        if matcher.is_error():
            hint = "use smaller counted repetitions"
            raise UserError(
                f"{what} has the expression {quote(pattern)}, which is too complex for llguidance:"
                f" {hint}"
            )
        return consumed == len(ids) and bool(matcher.is_accepting())

    return matches


def _with_any_text_around(pattern: str) -> str:
    """Returns an expression that matches a whole text if `pattern` matches a part of it."""
    before, after = ANY_TEXT, ANY_TEXT
    if not _has_alternatives(pattern):  # in `^a|b$`, an anchor belongs to one alternative
        if pattern.startswith("^"):
            before = ""
            pattern = pattern[1:]
        backslashes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
        if pattern.endswith("$") and backslashes % 2 == 0:
            after = ""
            pattern = pattern[:-1]
    return f"{before}(?:{pattern}){after}"


def _has_alternatives(pattern: str) -> bool:
    """Whether an expression contains `|` outside of groups and character classes."""
    groups = classes = 0  # that are open
    starts_class = False  # whether the next character begins a class, where `]` is literal
    characters = iter(pattern)
    for character in characters:
        first, starts_class = starts_class, character == "["
        if character == "\\":
            next(characters, None)
        elif character == "[":
            classes += 1
        elif classes:
            starts_class = first and character == "^"
            classes -= character == "]" and not first
        elif character == "|" and groups == 0:
            return True
        else:
            groups += (character == "(") - (character == ")")
    return False
