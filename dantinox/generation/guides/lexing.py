"""Finds the terminals of a grammar whose greedy reading would exclude texts of the grammar; a part
of `gbnf`, which alone uses it.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

# The copies of a repeated expression in an automaton; more repetitions are treated as unlimited.
MAX_COPIES = 4
MAX_STATES = 2000  # of an automaton; the terminals of a larger one are taken as they are
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Chars:
    """One character in ranges of code points, ends included."""

    ranges: Ranges


@dataclass(frozen=True)
class Ref:
    """A reference to a rule."""

    name: str


@dataclass(frozen=True)
class Token:
    """A terminal or a special token, in the syntax of Lark."""

    text: str


@dataclass(frozen=True)
class Seq:
    """Expressions one after the other."""

    items: "tuple[Node, ...]"


@dataclass(frozen=True)
class Alt:
    """One of several expressions."""

    items: "tuple[Node, ...]"


@dataclass(frozen=True)
class Rep:
    """An expression `least` to `most` times; None: any number of times."""

    node: "Node"
    least: int
    most: int | None


Node = Chars | Ref | Token | Seq | Alt | Rep


def leaves(node: Node) -> Iterator[Chars | Ref | Token]:
    """Yields the parts of an expression that contain no others."""
    if isinstance(node, Rep):
        yield from leaves(node.node)
    elif isinstance(node, Seq | Alt):
        for item in node.items:
            yield from leaves(item)
    else:
        yield node


def is_nullable(node: Node, nullable: Collection[str]) -> bool:
    """Whether an expression allows the empty text; `nullable` has the rules that do."""
    if isinstance(node, Ref):
        return node.name in nullable
    if isinstance(node, Rep):
        return node.least == 0 or is_nullable(node.node, nullable)
    if isinstance(node, Seq):
        return all(is_nullable(item, nullable) for item in node.items)
    return isinstance(node, Alt) and any(is_nullable(item, nullable) for item in node.items)


def smallest_set(rules: Mapping[str, Node], belongs: Callable[[Node, set[str]], bool]) -> set[str]:
    """Returns the smallest set of rules that contains each rule whose expression `belongs` to the
    set.
    """
    found: set[str] = set()
    size = -1
    # Repeat until no rule is added; references mostly go to later rules.
    while size != (size := len(found)):
        for name in reversed([*rules]):
            if name not in found and belongs(rules[name], found):
                found.add(name)
    return found


def greedy_conflicts(
    rules: Mapping[str, Node],
    inline: Callable[[Node], Node],
    terminals: Mapping[str, Node],
    limit: int,
) -> tuple[set[Node], int]:
    """Returns the terminals of several characters that may also match the beginning of what follows
    a terminal, and the work.

    After the text of a terminal A, another terminal B (or A itself) may have a longer text with the
    same beginning. The lexer goes on with B if the next character allows it, so a text in which
    this character belongs to what follows A is excluded.

    Args:
      rules: the expressions of the rules; a `Token` is a terminal or a special token.
      terminals: the expression of each terminal.
      inline: resolves the references in terminals, which have no recursion.
      limit: the most work, in pairs of moves.

    Raises:
      OverflowError: the work exceeds the limit.
    """
    automata = {name: _automaton(node, inline) for name, node in terminals.items()}
    literals = {name: _literal(node) for name, node in terminals.items()}
    firsts = {name: tuple(automaton.first()) for name, automaton in automata.items()}
    # Candidates have several characters.
    candidates = [name for name, node in terminals.items() if not isinstance(node, Chars)]
    patterns = [name for name in candidates if literals[name] is None]
    texts = sorted((text, name) for name in candidates if (text := literals[name]) is not None)
    conflicts: set[str] = set()
    work = 0
    for first, following in _followers(rules).items():
        if first not in terminals:  # a special token
            continue
        after = tuple({pair for name in following for pair in firsts.get(name, ())})
        text = literals[first]
        if text is not None:
            # Two literals conflict if the longer one continues the other with a character that may
            # follow it.
            for longer, other in texts[bisect_left(texts, (text, "")) :]:
                if not longer.startswith(text):
                    break
                next_character = longer[len(text) :][:1]
                if next_character and _overlap(
                    ((ord(next_character), ord(next_character)),), after
                ):
                    conflicts.add(other)
        for other in patterns if text is not None else candidates:
            if other not in conflicts and _overlap(firsts[first], firsts[other]):
                conflicts_with, pairs = _matches_beyond(
                    automata[first], automata[other], after, limit - work
                )
                work += pairs
                if conflicts_with:
                    conflicts.add(other)
    return {terminals[name] for name in conflicts}, work


def _literal(node: Node) -> str | None:
    """Returns the only text of an expression, or None if it may have several."""
    if isinstance(node, Chars) and len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]:
        return chr(node.ranges[0][0])
    parts = [_literal(item) for item in node.items] if isinstance(node, Seq) else [None]
    return None if None in parts else "".join(part for part in parts if part)


# --- which terminals may follow a terminal


def _followers(rules: Mapping[str, Node]) -> dict[str, set[str]]:
    """Returns for each terminal and special token those that may follow it (the sets FIRST and
    FOLLOW of a parser).
    """
    nullable = smallest_set(rules, is_nullable)
    firsts: dict[str, set[str]] = {name: set() for name in rules}

    def first(node: Node) -> set[str]:
        """Returns the terminals with which an expression may begin."""
        if isinstance(node, Token):
            return {node.text}
        if isinstance(node, Ref):
            return firsts[node.name]
        if isinstance(node, Rep):
            return first(node.node)
        found: set[str] = set()
        for item in node.items if isinstance(node, Seq | Alt) else ():
            found |= first(item)
            if isinstance(node, Seq) and not is_nullable(item, nullable):
                break
        return found

    changed = True
    while changed:
        changed = False
        for name, node in reversed([*rules.items()]):
            new = firsts[name] | first(node)
            changed |= new != firsts[name]
            firsts[name] = new

    followers: dict[str, set[str]] = defaultdict(set)
    follows: dict[str, set[str]] = {name: set() for name in rules}

    def visit(node: Node, after: set[str]) -> None:
        """Adds what may follow the parts of an expression that is followed by `after`."""
        if isinstance(node, Token):
            followers[node.text] |= after
        elif isinstance(node, Ref):
            follows[node.name] |= after
        elif isinstance(node, Rep):
            visit(node.node, after | first(node.node) if node.most != 1 else after)
        elif isinstance(node, Alt):
            for item in node.items:
                visit(item, after)
        elif isinstance(node, Seq):
            for item in reversed(node.items):
                visit(item, after)
                after = first(item) | after if is_nullable(item, nullable) else first(item)

    sizes = -1
    while sizes != (sizes := sum(map(len, follows.values())) + sum(map(len, followers.values()))):
        for name, node in rules.items():
            visit(node, follows[name])
    return followers


# --- automata of terminals


class _Automaton:
    """A nondeterministic automaton. State 0 is the start."""

    def __init__(self) -> None:
        self.moves: list[list[tuple[Ranges, int]]] = [[]]
        self.empty_moves: list[list[int]] = [[]]
        self.end = 0
        self._moves_from: dict[int, list[tuple[Ranges, int]]] = {}

    def add_state(self) -> int:
        self.moves.append([])
        self.empty_moves.append([])
        return len(self.moves) - 1

    def closure(self, state: int) -> set[int]:
        """Returns the states that empty moves reach from a state, with the state itself."""
        found = {state}
        todo = [state]
        while todo:
            new = set(self.empty_moves[todo.pop()]) - found
            found |= new
            todo += new
        return found

    def moves_from(self, state: int) -> list[tuple[Ranges, int]]:
        """Returns the moves with a character, also after empty moves, of a complete automaton."""
        if state not in self._moves_from:
            self._moves_from[state] = [
                move for inner in self.closure(state) for move in self.moves[inner]
            ]
        return self._moves_from[state]

    def ends(self, state: int) -> bool:
        """Whether a text may end in a state."""
        return self.end in self.closure(state)

    def first(self) -> list[tuple[int, int]]:
        """Returns the ranges of the characters with which a text may begin."""
        return [pair for ranges, _ in self.moves_from(0) for pair in ranges]


def _automaton(node: Node, inline: Callable[[Node], Node]) -> _Automaton:
    automaton = _Automaton()
    automaton.end = _add(automaton, node, 0, inline)
    return automaton


def _add(automaton: _Automaton, node: Node, begin: int, inline: Callable[[Node], Node]) -> int:
    """Adds the states of an expression after a state, and returns its last state."""
    if len(automaton.moves) > MAX_STATES:
        return begin
    if isinstance(node, Ref):
        return _add(automaton, inline(node), begin, inline)
    if isinstance(node, Chars):
        end = automaton.add_state()
        automaton.moves[begin].append((node.ranges, end))
        return end
    if isinstance(node, Seq):
        for item in node.items:
            begin = _add(automaton, item, begin, inline)
        return begin
    if isinstance(node, Alt):
        end = automaton.add_state()
        for item in node.items:
            start = automaton.add_state()
            automaton.empty_moves[begin].append(start)
            automaton.empty_moves[_add(automaton, item, start, inline)].append(end)
        return end
    if isinstance(node, Rep):
        return _add_copies(automaton, node, begin, inline)
    raise TypeError("a terminal has no special token")


def _add_copies(
    automaton: _Automaton, node: Rep, begin: int, inline: Callable[[Node], Node]
) -> int:
    """Adds the states of a repetition after a state, and returns its last state."""
    for _ in range(min(node.least, MAX_COPIES)):
        begin = _add(automaton, node.node, begin, inline)
    end = automaton.add_state()
    automaton.empty_moves[begin].append(end)
    if node.most is None or node.most > MAX_COPIES:
        start = automaton.add_state()
        automaton.empty_moves[begin].append(start)
        last = _add(automaton, node.node, start, inline)
        automaton.empty_moves[last] += [start, end]
        return end
    for _ in range(node.most - node.least):
        start = automaton.add_state()
        automaton.empty_moves[begin].append(start)
        begin = _add(automaton, node.node, start, inline)
        automaton.empty_moves[begin].append(end)
    return end


def _matches_beyond(
    before: _Automaton, other: _Automaton, after: Ranges, limit: int
) -> tuple[bool, int]:
    """Whether the other terminal can continue a text of the first one with a character that may
    follow the first one.

    Also returns the number of pairs of moves, at most `limit`, or raises OverflowError.
    """
    seen = {(0, 0)}  # pairs of states in which both automata are after the same text
    work = 0
    todo = deque(seen)
    while todo:
        one, two = todo.popleft()
        moves_one = before.moves_from(one)
        moves_two = other.moves_from(two)
        if (
            (one, two) != (0, 0)
            and before.ends(one)
            and any(_overlap(ranges, after) for ranges, _ in moves_two)
        ):
            return True, work
        work += len(moves_one) * len(moves_two) + 1
        if work > limit:
            raise OverflowError
        for ranges, next_one in moves_one:
            for other_ranges, next_two in moves_two:
                pair = next_one, next_two
                if pair not in seen and _overlap(ranges, other_ranges):
                    seen.add(pair)
                    todo.append(pair)
    return False, work


def _overlap(first: Ranges, second: Ranges) -> bool:
    return any(low <= high_2 and low_2 <= high for low, high in first for low_2, high_2 in second)
