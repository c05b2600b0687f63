"""Converts GBNF, the grammar language of llama.cpp, to the Lark dialect of llguidance.

Rules without recursion are regular languages and become terminals. llguidance reads terminals
greedily: it takes the longest text of any terminal that may come next. `lexing.py` finds the
terminals with which this excludes texts of the grammar, and these are converted to rules of single
characters.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from dantinox.config import UserError
from dantinox.generation.guides.lexing import (
    Alt,
    Chars,
    Node,
    Ref,
    Rep,
    Seq,
    Token,
    greedy_conflicts,
    is_nullable,
    leaves,
    smallest_set,
)

MAX_WORK = 1_000_000  # pairs of moves of terminals that are compared, about 2 s
LAST_CODE = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([nrt\\\"\[\]]))")
CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
NAME = re.compile(r"[A-Za-z0-9_-]+")
RULE = re.compile(r"[A-Za-z0-9_-]+[ \t]*::=")
COUNTS = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
TOKEN = re.compile(r"<\[\d+\]>|<[^<>\s\[\]]+>")
REPEATS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def gbnf_to_lark(source: str) -> str:
    """Returns the Lark grammar of the same language.

    Raises:
      UserError: the grammar is invalid. The message names the line.
    """
    try:
        rules = _finite(_Parser(source).rules())
        if "root" not in rules:
            raise UserError("the GBNF grammar cannot be used: no text satisfies it")
        return _Writer(rules).lark()
    except OverflowError:
        raise UserError(
            "the GBNF grammar cannot be used: it takes too long to evaluate: simplify it"
        ) from None
    except RecursionError:
        raise UserError("the GBNF grammar is nested too deeply") from None


class _Parser:
    """A recursive descent parser with the rules of `llama_grammar_parser`."""

    def __init__(self, source: str):
        self._source = source
        self._at = 0  # the position of the next character
        self._references: list[
            tuple[str, int]
        ] = []  # the names of rules that expressions refer to, with their positions

    def rules(self) -> dict[str, Node]:
        """Returns the expression of each rule; the last one of a name counts."""
        rules: dict[str, Node] = {}
        self._space(newlines=True)
        while self._at < len(self._source):
            name = self._match(NAME)
            self._space()
            if name is None or not self._skip("::="):
                raise self._error("a rule such as `name ::= …` is expected")
            self._space(newlines=True)
            rules[name[0]] = self._alternatives(nested=False)
            rest = self._source[self._at : self._at + 1]
            if rest not in ("", "\r", "\n") and not RULE.match(self._source, self._at):
                raise self._error(f"unexpected {rest!r}")
            self._space(newlines=True)
        for reference, at in self._references:
            if reference not in rules:
                raise self._error(f"rule '{reference}' is not defined", at)
        if "root" not in rules:
            raise UserError("the GBNF grammar is invalid: there is no rule root")
        return rules

    def _error(self, message: str, at: int | None = None) -> UserError:
        line = self._source.count("\n", 0, self._at if at is None else at) + 1
        return UserError(f"the GBNF grammar is invalid in line {line}: {message}")

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._source, self._at)
        if found:
            self._at = found.end()
        return found

    def _skip(self, text: str) -> bool:
        found = self._source.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def _space(self, newlines: bool = False) -> None:
        self._match(
            re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*" if newlines else r"(?:[ \t]|#[^\r\n]*)*")
        )

    def _alternatives(self, nested: bool) -> Node:
        options = [self._sequence(nested)]
        while self._skip("|"):
            self._space(newlines=True)
            options.append(self._sequence(nested))
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self, nested: bool) -> Node:
        items: list[Node] = []
        while (item := self._item(nested)) is not None:
            self._space(nested)
            while (counts := self._counts(nested)) is not None:
                item = Rep(item, *counts)
                self._space(nested)
            items.append(item)
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def _item(self, nested: bool) -> Node | None:
        """Reads the next item of a sequence; None: the sequence has ended."""
        begin = self._at
        if self._skip('"'):
            letters: list[Node] = []
            while not self._skip('"'):
                code = self._character(begin, '"')
                letters.append(Chars(((code, code),)))
            return Seq(tuple(letters))
        if self._skip("["):
            return self._character_class(begin)
        if self._skip("("):
            self._space(newlines=True)
            inner = self._alternatives(nested=True)
            if not self._skip(")"):
                raise self._error("a group has no closing parenthesis", begin)
            return inner
        if self._skip("."):
            return Chars(_complement(()))
        if token := self._match(TOKEN):
            return Token(token[0])
        if RULE.match(self._source, self._at):  # the next rule
            return None
        if name := self._match(NAME):
            self._references.append((name[0], begin))
            return Ref(name[0])
        return None

    def _counts(self, nested: bool) -> tuple[int, int | None] | None:
        if self._at < len(self._source) and self._source[self._at] in REPEATS:
            self._at += 1
            return REPEATS[self._source[self._at - 1]]
        if not self._source.startswith("{", self._at):
            return None
        found = self._match(COUNTS)
        if found is None:
            raise self._error("a repetition must be {n}, {n,} or {n,m}")
        least = int(found[1])
        most: int | None = least
        if found[2] is not None:  # a comma
            most = int(found[3]) if found[3] else None
        if most is not None and most < least:
            raise self._error(f"the repetition {found[0]} is out of order", found.start())
        return least, most

    def _character(self, begin: int, end: str) -> int:
        """Reads a character or an escape, and returns its code. `begin` is where the text up to
        `end` begins.
        """
        if self._at >= len(self._source):
            raise self._error(f"{self._source[begin]} has no {end} after it", begin)
        if self._source[self._at] != "\\":
            self._at += 1
            return ord(self._source[self._at - 1])
        found = self._match(ESCAPE)
        if found is None:
            raise self._error(f"{self._source[self._at : self._at + 2]} is not an escape")
        if found[4]:
            return ord(CONTROLS.get(found[4], found[4]))
        code = int(found[1] or found[2] or found[3], 16)
        if code > LAST_CODE or SURROGATES[0] <= code <= SURROGATES[1]:
            raise self._error(f"{found[0]} is not a character", found.start())
        return code

    def _character_class(self, begin: int) -> Node:
        negated = self._skip("^")
        ranges: list[tuple[int, int]] = []
        while not self._skip("]"):
            first = last = self._character(begin, "]")
            if self._source.startswith("-", self._at) and not self._source.startswith(
                "]", self._at + 1
            ):
                self._at += 1
                last = self._character(begin, "]")
                if last < first:
                    raise self._error(f"the range {chr(first)}-{chr(last)} is out of order", begin)
            ranges.append((first, last))
        if not ranges and not negated:
            raise self._error("a character class is empty", begin)
        return Chars(_complement(ranges) if negated else tuple(ranges))


def _complement(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns all characters outside of ranges."""
    rest: list[tuple[int, int]] = []
    begin = 0
    for low, high in sorted([*ranges, SURROGATES, (LAST_CODE + 1, LAST_CODE + 1)]):
        if low > begin:
            rest.append((begin, low - 1))
        begin = max(begin, high + 1)
    return tuple(rest)


def _finite(rules: Mapping[str, Node]) -> dict[str, Node]:
    """Removes the rules and options that no finite text satisfies, such as `a ::= "x" a`."""
    found: dict[str, Node] = {}

    def reduce(node: Node) -> Node | None:
        if isinstance(node, Ref):
            return node if node.name in found else None
        if isinstance(node, Rep):
            inner = reduce(node.node)
            if inner is None:
                return Seq(()) if node.least == 0 else None
            return Rep(inner, node.least, node.most)
        if isinstance(node, Seq):
            items = [reduce(item) for item in node.items]
            return None if None in items else Seq(tuple(item for item in items if item is not None))
        if isinstance(node, Alt):
            options = tuple(option for item in node.items if (option := reduce(item)) is not None)
            return Alt(options) if options else None
        return node

    size = -1
    # Repeat until no rule is found; references mostly go to later rules.
    while size != (size := len(found)):
        for name in reversed([*rules]):
            if name not in found and (node := reduce(rules[name])) is not None:
                found[name] = node
    # Once more, because options that refer to rules that were found later are missing.
    return {name: node for name in found if (node := reduce(rules[name])) is not None}


class _Place(NamedTuple):
    """An expression of a rule as Lark, and the same expression over terminals, in which conflicts
    are searched.
    """

    text: str
    node: Node


class _Writer:
    """Writes rules as Lark. Literals, classes and rules without recursion become terminals."""

    def __init__(self, rules: Mapping[str, Node]):
        self._rules = rules
        self._names = {name: str(number) for number, name in enumerate(rules)}
        # The rules without recursion and special tokens.
        self._regular = smallest_set(rules, _is_regular)
        self._nullable = smallest_set(rules, is_nullable)
        self._split: set[Node] = set()  # terminals that are written as rules of single characters
        self._work = 0
        self._merges = False  # whether neighboring items of a sequence become one terminal

    def lark(self) -> str:
        """Returns the grammar, with the form of the sequences that has fewer conflicts."""
        attempts = []
        for merges in (False, True):
            self._merges = merges
            text, conflicts = self._write()
            if not conflicts:
                return text
            attempts.append((len(conflicts), merges, conflicts))
        _, self._merges, conflicts = min(attempts, key=lambda attempt: attempt[:2])
        while conflicts:  # a split terminal may cause conflicts with others
            self._split |= conflicts
            text, conflicts = self._write()
        return text

    def _write(self) -> tuple[str, set[Node]]:
        """Returns the grammar, and the terminals that must be split."""
        self._lines: dict[str, str] = {}  # name in the Lark grammar → its expression
        self._terminals: dict[Node, str] = {}  # expression of a terminal → its name
        self._places: dict[
            str, Node
        ] = {}  # name of a rule in the Lark grammar → its expression over terminals
        self._todo: list[
            tuple[str, str, bool]
        ] = []  # arguments of `_reference` with the names that it returned
        start = self._reference("root", False).text
        while self._todo:
            line, name, split = self._todo.pop()
            if line not in self._places:
                place = self._place(self._rules[name], split)
                self._lines[line] = place.text
                self._places[line] = place.node
        terminals = {name: node for node, name in self._terminals.items()}
        left = MAX_WORK - self._work
        conflicts, work = greedy_conflicts(self._places, self._inline, terminals, left)
        self._work += work
        lines = [f"start: {start}", *(f"{name}: {text}" for name, text in self._lines.items())]
        return "\n".join(lines) + "\n", conflicts

    def _inline(self, node: Node) -> Node:
        """Returns the expression of a rule without recursion."""
        return self._rules[node.name] if isinstance(node, Ref) else node

    def _is_regular(self, node: Node) -> bool:
        return _is_regular(node, self._regular)

    def _place(self, node: Node, split: bool = False) -> _Place:
        """Returns the Lark of an expression in a rule."""
        if isinstance(node, Token):
            return _Place(node.text, node)
        split = split or node in self._split
        if isinstance(node, Chars) or (self._is_regular(node) and not split):
            return self._terminal_place(node)
        if isinstance(node, Ref):
            return self._reference(node.name, split)
        if isinstance(node, Rep):
            inner = self._place(node.node, split)
            return _Place(f"({inner.text}){_counts(node)}", Rep(inner.node, node.least, node.most))
        items = node.items if split else self._merge(node)
        places = [self._place(item, split) for item in items]
        texts = [place.text for place in places]
        nodes = tuple(place.node for place in places)
        if isinstance(node, Alt):
            return _Place("(" + " | ".join(texts) + ")", Alt(nodes))
        return _Place(" ".join(texts) or '""', Seq(nodes))

    def _reference(self, name: str, split: bool) -> _Place:
        """Returns a reference to a rule, and remembers to write the rule, of single characters if
        it is `split`.
        """
        line = f"{'s' if split else 'r'}{self._names[name]}"
        self._todo.append((line, name, split))
        return _Place(line, Ref(line))

    def _merge(self, node: "Seq | Alt") -> list[Node]:
        """Joins neighboring regular items of a sequence, or all regular options, to one item."""
        merged: list[list[Node]] = []
        items = node.items if isinstance(node, Seq) else sorted(node.items, key=self._is_regular)
        for item in items:
            joins = self._merges or isinstance(node, Alt)
            if joins and merged and self._is_regular(item) and self._is_regular(merged[-1][0]):
                merged[-1].append(item)
            else:
                merged.append([item])
        kind = type(node)
        return [group[0] if len(group) == 1 else kind(tuple(group)) for group in merged]

    def _terminal_place(self, node: Node) -> _Place:
        """Returns a reference to the terminal of a regular expression; if that allows the empty
        text, it is optional.
        """
        if node == Seq(()):
            return _Place('""', node)
        name = self._terminals.setdefault(node, f"T{len(self._terminals)}")
        optional = is_nullable(node, self._nullable)
        if name not in self._lines:
            text = self._terminal(node)
            self._lines[name] = f"({text}) & /(?s:.+)/" if optional else text
        return _Place(f"{name}?", Rep(Token(name), 0, 1)) if optional else _Place(name, Token(name))

    def _terminal(self, node: Node) -> str:
        """Returns the Lark of an expression in a terminal."""
        if isinstance(node, Chars):
            return f"/{_class(node)}/"
        if isinstance(node, Ref):
            name = f"R{self._names[node.name]}"
            if name not in self._lines:
                self._lines[name] = self._terminal(self._rules[node.name])
            return name
        if isinstance(node, Rep):
            return f"({self._terminal(node.node)}){_counts(node)}"
        if isinstance(node, Alt):
            return "(" + " | ".join(self._terminal(item) for item in node.items) + ")"
        if isinstance(node, Seq):
            return self._terminal_sequence(node)
        raise TypeError("a terminal has no special token")

    def _terminal_sequence(self, node: Seq) -> str:
        if not node.items:
            return '""'
        characters = [item for item in node.items if isinstance(item, Chars)]
        if len(characters) == len(node.items):
            return "/" + "".join(map(_class, characters)) + "/"
        return "(" + " ".join(self._terminal(item) for item in node.items) + ")"


def _counts(node: Rep) -> str:
    """Returns the counts of a repetition in Lark, such as `*` or `{2,3}`."""
    symbol = next(
        (symbol for symbol, counts in REPEATS.items() if counts == (node.least, node.most)), None
    )
    return symbol or f"{{{node.least},{'' if node.most is None else node.most}}}"


def _class(node: Chars) -> str:
    """Returns the regular expression of a character class."""
    if len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]:
        return f"\\x{{{node.ranges[0][0]:x}}}"
    return "[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in node.ranges) + "]"


def _is_regular(node: Node, regular: Collection[str]) -> bool:
    """Whether an expression has neither recursion nor special tokens; `regular` has the rules
    without them.
    """
    return all(
        isinstance(leaf, Chars) or (isinstance(leaf, Ref) and leaf.name in regular)
        for leaf in leaves(node)
    )
