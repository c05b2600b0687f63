"""Mutants of Python source: small edits, each of which a test should notice.

`find_mutants` lists the edits of one file, and `draw` samples from the edits of many files.
"""

import ast
import builtins
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

CORE = ("model", "sampling", "generation", "training")  # packages with half of the mutants

ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*"} | {
    "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "&",
}  # fmt: skip
COMPARISONS = {"==": "!=", "<": ">=", "<=": ">", "in": "not in", "is": "is not"}
COMPARISONS |= {after: before for before, after in COMPARISONS.items()}
BOUNDARIES = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
LOGIC = {"and": "or", "or": "and"}
FUNCTIONS = {"min": "max", "minimum": "maximum", "argmin": "argmax", "any": "all"}
FUNCTIONS |= {after: before for before, after in FUNCTIONS.items()}
BRANCHES = ("where", "select", "cond")  # f(condition, a, b)
OPERATOR = re.compile(r"[\s)\\]*(not\s+in|is\s+not|\w+|[^\s\w(#]+)")
DICT = (ast.Dict, ast.DictComp)


@dataclass(frozen=True)
class Mutant:
    """An edit: the bytes `start` to `end` of a file become `text`."""

    file: str
    line: int
    kind: str
    before: str  # the expression or statement around the edit, on one line
    after: str
    start: int
    end: int
    text: str
    lines: tuple[int, int]  # first and last line of this expression or statement
    statement: tuple[int, int]  # the same of the whole statement, or of its head if it has a body
    on_import: bool  # not in a function

    @property
    def core(self) -> bool:
        return self.file.split("/")[1] in CORE

    @property
    def key(self) -> tuple[str, int, int, str]:
        return self.file, self.start, self.end, self.text

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind} {self.before} → {self.after}"


def find_mutants(file: str, source: bytes) -> list[Mutant]:
    """Returns every mutant of a file.

    Annotations, decorators, f-strings, the arguments of exceptions, `__all__` and code for type
    checkers have none.
    """
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return finder.found


def draw(sources: dict[str, bytes], count: int, seed: int) -> list[Mutant]:
    """Draws mutants that compile: half of them from `CORE`, uniformly over the places of edits."""
    generator = random.Random(seed)
    places: dict[bool, dict[tuple, list[Mutant]]] = {True: {}, False: {}}
    for file in sorted(sources):
        for mutant in find_mutants(file, sources[file]):
            place = (file, mutant.start, mutant.end, mutant.kind)
            places[mutant.core].setdefault(place, []).append(mutant)
    counts = {True: count // 2 if places[False] else count}
    counts[False] = count - counts[True] if places[True] else count
    drawn: list[Mutant] = []
    for core in (True, False):
        choices = list(places[core].values())
        generator.shuffle(choices)
        mutants = (generator.choice(choice) for choice in choices)
        valid = (mutant for mutant in mutants if _compiles(mutant.apply(sources[mutant.file])))
        drawn += [mutant for mutant, _ in zip(valid, range(counts[core]), strict=False)]
    generator.shuffle(drawn)
    return drawn


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.found: list[Mutant] = []
        self.starts = [0]  # offset of each line
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.statement: ast.stmt | None = None
        self.bound: Counter[str] = Counter()  # how often the function binds each name
        self.depth = 0  # of functions

    def begin(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def segment(self, node: ast.AST) -> str:
        return self.source[self.begin(node) : self.end(node)].decode()

    def add(self, kind: str, node: ast.AST, start: int, end: int, text: str) -> None:
        """Adds the mutant that replaces `start` to `end`, which `node` contains."""
        before, after = self.source[start:end], text.encode()
        head, tail = self.source[self.begin(node) : start], self.source[end : self.end(node)]
        old, new = (" ".join((head + part + tail).decode().split()) for part in (before, after))
        line = self.source.count(b"\n", 0, start) + 1
        lines = (node.lineno, node.end_lineno)  # type: ignore[attr-defined]
        statement = self.statement
        assert statement is not None and statement.end_lineno is not None
        last = statement.end_lineno
        if body := getattr(statement, "body", None):
            last = max(statement.lineno, body[0].lineno - 1)
        edit = (self.file, line, kind, old, new, start, end, text)
        head_lines = (statement.lineno, last)
        self.found.append(Mutant(*edit, lines, head_lines, on_import=self.depth == 0))

    def replace(self, kind: str, node: ast.AST, text: str) -> None:
        self.add(kind, node, self.begin(node), self.end(node), text)

    def operators(
        self,
        node: ast.AST,
        operands: Sequence[ast.AST],
        tables: dict[str, dict[str, str]],
    ) -> None:
        """Adds the mutants of the operator between each two operands."""
        for left, right in pairwise(operands):
            offset = self.end(left)
            match = OPERATOR.match(self.source[offset : self.begin(right)].decode())
            if match is None:
                continue
            operator = " ".join(match[1].split())
            suffix = "=" if isinstance(node, ast.AugAssign) else ""
            for kind, table in tables.items():
                if swapped := table.get(operator.removesuffix(suffix) if suffix else operator):
                    start, end = offset + match.start(1), offset + match.end(1)
                    self.add(kind, node, start, end, swapped + suffix)

    def visit(self, node: ast.AST) -> None:
        outer = self.statement
        if isinstance(node, ast.stmt):
            self.statement = node
        super().visit(node)
        self.statement = outer

    def visit_all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def skip(self, node: ast.AST) -> None:
        pass

    visit_JoinedStr = visit_Raise = visit_Import = visit_ImportFrom = skip

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self.bound = self.bound, Counter()
        for child in ast.walk(node):
            if isinstance(child, ast.arg):
                self.bound[child.arg] += 1
            elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                self.bound[child.id] += 1
        self.visit_all([*node.args.defaults, *node.args.kw_defaults])
        self.depth += 1
        self.visit_all(node.body)
        self.depth -= 1
        self.bound = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self.bound = self.bound, Counter()
        self.visit_all(node.body)
        self.bound = outer

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit_all([node.value])

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom):
            self.replace("statement", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """A name's only assignment stays: without it, every use of the name raises NameError."""
        stored = [child for target in node.targets for child in ast.walk(target)]
        stored = [child for child in stored if isinstance(getattr(child, "ctx", None), ast.Store)]
        names = [child.id for child in stored if isinstance(child, ast.Name)]
        if "__all__" in names:
            return
        if all(self.bound[name] > 1 for name in names):
            self.replace("statement", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.replace("statement", node, "pass")
        if not _is_text(node.value):
            self.operators(node, [node.target, node.value], {"arithmetic": ARITHMETIC})
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if not {"TYPE_CHECKING", "__name__"} & _names(node.test):
            self.negate(node.test)
            self.generic_visit(node)

    visit_While = visit_IfExp = visit_If

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.negate(test)
        self.generic_visit(node)

    def negate(self, test: ast.expr) -> None:
        """Negates a condition that has no other mutant of the same meaning."""
        negation = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        comparison = isinstance(test, ast.Compare) and len(test.ops) == 1
        if not (negation or comparison or isinstance(test, ast.Constant)):
            self.replace("condition", test, f"not ({self.segment(test)})")

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.replace("condition", node, f"({self.segment(node.operand)})")
        elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self.replace("arithmetic", node, f"({self.segment(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        sides = (node.left, node.right)
        if not any(_is_text(side) or _is_type(side) or isinstance(side, DICT) for side in sides):
            self.operators(node, sides, {"arithmetic": ARITHMETIC})
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.operators(node, node.values, {"swap": LOGIC})
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        tables = {"comparison": COMPARISONS, "boundary": BOUNDARIES}
        self.operators(node, [node.left, *node.comparators], tables)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in FUNCTIONS:
            end = self.end(node.func)
            self.add("swap", node, end - len(name), end, FUNCTIONS[name])
        elif name in BRANCHES and len(node.args) >= 3:
            one, two = node.args[1:3]
            between = self.source[self.end(one) : self.begin(two)].decode()
            swapped = self.segment(two) + between + self.segment(one)
            self.add("swap", node, self.begin(one), self.end(two), swapped)
        self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(getattr(bound, "operand", bound), ast.Constant):
                for change in ("+ 1", "- 1"):
                    self.replace("boundary", bound, f"({self.segment(bound)}) {change}")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace("constant", node, str(not node.value))
        elif isinstance(node.value, int | float):
            for change in (1, -1):
                self.replace("constant", node, repr(node.value + change))


def _names(node: ast.AST) -> set[str]:
    return {getattr(child, "id", getattr(child, "attr", "")) for child in ast.walk(node)}


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def _is_type(node: ast.AST) -> bool:
    """Whether an operand is part of a union of types: `int | None`."""
    builtin = getattr(builtins, node.id, None) if isinstance(node, ast.Name) else None
    return isinstance(builtin, type) or getattr(node, "value", ...) is None
