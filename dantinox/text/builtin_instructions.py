"""`builtin:instructions`: questions and answers about functions of the Python standard library.

All answers have the same strict form, which shows whether a model has learned it:

    user       Summarise: textwrap.dedent(text)
    assistant  Takes: one argument
               Does: Remove any common leading whitespace from every line in `text`.
"""

import ast
import json
import random
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

NUM_EXAMPLES = 250
ANSWER = re.compile(r"Takes: (one argument|(two|three) arguments)\nDoes: [A-Z].*\.")
NUMBERS = ("no arguments", "one argument", "two arguments", "three arguments")
MAX_SUMMARY = 60  # characters of the summary of a function


class DocumentedFunction(NamedTuple):
    """A function: its qualified name, its parameters, and one sentence that says what it does."""

    name: str
    takes: tuple[str, ...]
    does: str

    def messages(self) -> list[dict[str, str]]:
        """Returns the question and the answer as chat messages."""
        takes = ", ".join(self.takes)
        answer = f"Takes: {NUMBERS[len(self.takes)]}\nDoes: {self.does}"
        return [
            {"role": "user", "content": f"Summarise: {self.name}({takes})"},
            {"role": "assistant", "content": answer},
        ]


def matches_answer_form(text: str) -> bool:
    """Returns whether an answer has the form of the answers in this corpus."""
    return ANSWER.fullmatch(text.strip()) is not None


def functions(module: str, source: str) -> Iterator[DocumentedFunction]:
    """Yields the public functions of a module that have one to three parameters and a short first
    docstring line.
    """
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        does = (ast.get_docstring(node) or "").partition("\n")[0]
        takes = tuple(argument.arg for argument in (*node.args.posonlyargs, *node.args.args))
        found = DocumentedFunction(f"{module}.{node.name}", takes, does)
        if (
            1 <= len(takes) <= 3
            and len(does) <= MAX_SUMMARY
            and does.isascii()
            and matches_answer_form(found.messages()[1]["content"])
        ):
            yield found


def instruction_corpus(modules: Iterable[tuple[str, str]], seed: int = 0) -> Iterator[bytes]:
    """Yields `NUM_EXAMPLES` records of JSON Lines in a random order.

    Args:
      modules: (name, source code) of Python modules.
      seed: determines the order and the selection.
    """
    found = [function for name, source in modules for function in functions(name, source)]
    rng = random.Random(seed)
    drawn = sorted((rng.random(), function) for function in found)
    for _, function in drawn[:NUM_EXAMPLES]:
        yield json.dumps({"messages": function.messages()}).encode() + b"\n"
