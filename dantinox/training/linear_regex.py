"""Regular expressions whose matching takes time linear in the text, whatever the expression (llguidance).

The syntax is that of Rust's crate `regex`, without lookaround, backreferences and word boundaries.
"""

from collections.abc import Callable

from dantinox.files import UserError, first_line, quote, require_extra


def compile_linear_regex(pattern: str, whole: bool, what: str) -> Callable[[str], bool]:
    """Returns a function that tests whether a regular expression matches a text.

    Args:
      whole: whether the expression must match the whole text, instead of a part of it.
      what: what uses the expression, for messages.

    Raises:
      UserError: the expression is invalid or too large, or llguidance is not installed.
    """
    with require_extra("serve", f"{what} needs a library that is not installed"):
        from llguidance import LLMatcher, LLTokenizer
    source = pattern if whole else f"(?s:.*)(?:{pattern})(?s:.*)"
    start = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_regex(source), log_level=0)
    if start.is_error():
        lines = start.get_error().splitlines()
        reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
        raise UserError(f"{what} has the invalid expression {quote(pattern)}: {first_line(ValueError(reason))}")

    def matches(text: str) -> bool:
        matcher, ids = start.deep_copy(), list(text.encode("utf-8", "replace"))  # a byte is a token
        return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())

    return matches
