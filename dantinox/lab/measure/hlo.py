"""A parser of HLO text: computations, instructions and their source lines."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = ")
NAME = re.compile(r"%([\w.\-]+)")
BRACKET = re.compile(r"[()]")
CALLED = re.compile(
    r"\b(calls|to_apply|body|branch_computations|true_computation|false_computation|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
TARGET = re.compile(r'custom_call_target="([^"]*)"')
METADATA = re.compile(r"\bmetadata=\{(.*?[^\\])\}")
LABEL = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
PAIRS = re.compile(r"(\w+)=(\d+)")
TABLE = re.compile(
    r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n)*)", re.MULTILINE
)
MAX_FRAMES = 100  # of a call stack


class Frame(NamedTuple):
    """A Python source line."""

    file: str
    function: str
    line: int


@dataclass(frozen=True)
class Instruction:
    """An instruction `name = type opcode(operands), attributes`. Only the function `instructions`
    sets the last four fields.

    Attributes:
      inside: the opcodes of the instructions fused into it.
      label: the `op_name` of the JAX operation that it comes from, such as
        `jit(step)/transpose(jvp())/dot_general`.
      frames: the Python call stack in which it was traced, innermost last.
      target: the target of a custom call.
    """

    name: str
    type: str
    opcode: str
    operands: str = ""
    attributes: str = ""
    inside: tuple[str, ...] = ()
    label: str = ""
    frames: tuple[Frame, ...] = ()
    target: str = ""

    @property
    def called(self) -> list[str]:
        """The names of the computations that it calls; for a loop, the body but not the
        condition.
        """
        return [
            name
            for _, names in CALLED.findall(self.attributes)
            for name in re.findall(r"[\w.\-]+", names)
        ]


def computations(text: str) -> dict[str, list[Instruction]]:
    """Parses the text of a program into computation → instructions; the main computation is
    `ENTRY`.
    """
    found: dict[str, list[Instruction]] = {}
    inside: list[Instruction] = []
    for line in text.splitlines():
        if head := COMPUTATION.match(line):
            inside = found["ENTRY" if head[1] else head[2]] = []
        elif match := INSTRUCTION.match(line):
            inside.append(_instruction(match[1], line[match.end() :]))
    return found


def _instruction(name: str, line: str) -> Instruction:
    """Parses the part of an instruction after `name = `: type, opcode, operands in brackets,
    attributes.
    """
    end = _closing_bracket(line, 0) if line.startswith("(") else line.index(" ")
    opening = line.index("(", end)
    closing = _closing_bracket(line, opening)
    return Instruction(
        name, line[:end], line[end:opening].strip(), line[opening + 1 : closing - 1], line[closing:]
    )


def _closing_bracket(line: str, opening: int) -> int:
    """Returns the index after the bracket that closes the one at `opening`."""
    depth = 0
    for bracket in BRACKET.finditer(line, opening):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            return bracket.end()
    raise ValueError(f"a bracket is not closed in {line!r}")


def instructions(text: str) -> dict[str, Instruction]:
    """Returns the instructions of a program by name, with their origins.

    A fusion gets the origin of the matrix multiplication in it, or else its own origin, or else
    that of any instruction in it. An instruction that XLA added gets the origin of the first
    instruction that reads it.
    """
    frames = _Frames(text)
    members = computations(text)
    found = {op.name: _set_origin(op, frames) for inside in members.values() for op in inside}
    for op in list(found.values()):
        if "calls=" in op.attributes:
            found[op.name] = _set_fusion_origin(
                op, [found[part.name] for called in op.called for part in members.get(called, [])]
            )
    # An instruction precedes the instructions that read it.
    for op in reversed(list(found.values())):
        for read in NAME.findall(op.operands):
            if read in found and not found[read].frames and found[op.name].frames:
                found[read] = replace(
                    found[read], label=found[op.name].label, frames=found[op.name].frames
                )
    return found


def _set_origin(op: Instruction, frames: "_Frames") -> Instruction:
    metadata = METADATA.search(op.attributes)
    target = TARGET.search(op.attributes)
    origin = metadata[1] if metadata else ""
    label = LABEL.search(origin)
    return replace(
        op,
        label=label[1] if label else "",
        frames=frames.of(origin),
        target=target[1] if target else "",
    )


def _set_fusion_origin(outer: Instruction, parts: list[Instruction]) -> Instruction:
    known = [part for part in parts if part.frames]
    matmuls = [part for part in known if part.opcode in ("dot", "convolution", "custom-call")]
    if matmuls:
        origin = matmuls[0]
    elif known and not outer.frames:
        origin = known[0]
    else:
        origin = outer
    target = next((part.target for part in parts if part.target), outer.target)
    opcodes = tuple(dict.fromkeys(part.opcode for part in parts))
    return replace(outer, inside=opcodes, label=origin.label, frames=origin.frames, target=target)


class _Frames:
    """The call stacks of instructions.

    The metadata of an instruction refers to tables at the head of the program, or contains a source
    line.
    """

    def __init__(self, text: str):
        tables = {name: dict(_rows(rows)) for name, rows in TABLE.findall(text)}
        self.files, self.functions = (
            {number: row.strip('"') for number, row in tables.get(name, {}).items()}
            for name in ("FileNames", "FunctionNames")
        )
        self.places = {
            number: _pairs(row) for number, row in tables.get("FileLocations", {}).items()
        }
        self.stack = {number: _pairs(row) for number, row in tables.get("StackFrames", {}).items()}
        # Some versions add 1 to parent ids, so that a frame appears to be its own parent.
        self.shift = int(
            any(frame.get("parent_frame_id") == number for number, frame in self.stack.items())
        )

    def of(self, metadata: str) -> tuple[Frame, ...]:
        """Returns the call stack that the metadata of an instruction names, innermost last."""
        fields = _pairs(metadata)
        if "source_line" in fields:
            file = re.search(r'source_file="([^"]*)"', metadata)
            return (Frame(file[1] if file else "", "", fields["source_line"]),)
        stack: list[Frame] = []
        frame_id = fields.get("stack_frame_id", 0)
        while frame_id in self.stack and len(stack) < MAX_FRAMES:
            location = self.places.get(self.stack[frame_id].get("file_location_id", 0), {})
            names = (
                self.files.get(location.get("file_name_id", 0), ""),
                self.functions.get(location.get("function_name_id", 0), ""),
            )
            stack.insert(0, Frame(*names, location.get("line", 0)))
            frame_id = self.stack[frame_id].get("parent_frame_id", 0) - self.shift
        return tuple(stack)


def _rows(text: str) -> Iterator[tuple[int, str]]:
    for line in text.splitlines():
        number, _, row = line.partition(" ")
        yield int(number), row


def _pairs(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in PAIRS.findall(text)}
