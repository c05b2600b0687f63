"""What a compiled program says of its operations, read from XLA's text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([a-z][\w\-]*)\(")
CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")
NAME = re.compile(r"%([\w.\-]+)")
TARGET = re.compile(r'custom_call_target="([^"]*)"')
METADATA = re.compile(r"\bmetadata=\{(.*?[^\\])\}")
LABEL = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
PAIRS = re.compile(r"(\w+)=(\d+)")
TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n)*)", re.MULTILINE)
DEEPEST = 100  # frames


class Frame(NamedTuple):
    """A line of Python."""

    file: str
    function: str
    line: int


@dataclass(frozen=True)
class Instruction:
    """An operation of a program.

    Attributes:
      inside: the opcodes of what is fused into it.
      label: jax's own name for where it is from, `jit(step)/transpose(jvp())/dot_general`.
      frames: the calls in Python that it was traced in, the innermost last.
      target: of a custom call.
    """

    opcode: str
    inside: tuple[str, ...]
    label: str
    frames: tuple[Frame, ...]
    target: str = ""


def instructions(text: str) -> dict[str, Instruction]:
    """The operations of a program by their names.

    What is fused takes the origin of the product in it, or of anything in it, where it has none of its own, and what XLA has
    put in without one that of the first operation that reads it.
    """
    frames = _Frames(text)
    found: dict[str, Instruction] = {}
    members: dict[str, list[str]] = {}  # of each computation
    reads: dict[str, list[str]] = {}
    fused: dict[str, str] = {}
    computation = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            header = COMPUTATION.match(line)
            computation = header[1] if header else computation
            continue
        if match := INSTRUCTION.match(line):
            name = match[1]
            found[name] = _instruction(match[2], line, frames)
            members.setdefault(computation, []).append(name)
            reads[name] = NAME.findall(line[match.end() :].partition(")")[0])
            if called := CALLS.search(line):
                fused[name] = called[1]
    for name, inner in fused.items():
        found[name] = _fused(found[name], [found[part] for part in members.get(inner, [])])
    for name in reversed(found):  # an operation stands before those that read it
        for read in reads[name]:
            if read in found and not found[read].frames and found[name].frames:
                found[read] = replace(found[read], label=found[name].label, frames=found[name].frames)
    return found


def _instruction(opcode: str, line: str, frames: "_Frames") -> Instruction:
    metadata, target = METADATA.search(line), TARGET.search(line)
    said = metadata[1] if metadata else ""
    label = LABEL.search(said)
    return Instruction(opcode, (), label[1] if label else "", frames.of(said), target[1] if target else "")


def _fused(outer: Instruction, parts: list[Instruction]) -> Instruction:
    products = [part for part in parts if part.opcode in ("dot", "convolution", "custom-call") and part.frames]
    origin = next(iter([*products, *([outer] if outer.frames else []), *(part for part in parts if part.frames)]), outer)
    target = next((part.target for part in parts if part.target), outer.target)
    opcodes = tuple(dict.fromkeys(part.opcode for part in parts))
    return replace(outer, inside=opcodes, label=origin.label, frames=origin.frames, target=target)


class _Frames:
    """The calls that the metadata of an instruction names: by a number in tables at the head of the program, or by itself."""

    def __init__(self, text: str):
        tables = {name: dict(_rows(rows)) for name, rows in TABLE.findall(text)}
        self.files, self.functions = (
            {number: row.strip('"') for number, row in tables.get(name, {}).items()} for name in ("FileNames", "FunctionNames")
        )
        self.places = {number: _pairs(row) for number, row in tables.get("FileLocations", {}).items()}
        self.stack = {number: _pairs(row) for number, row in tables.get("StackFrames", {}).items()}
        # A frame's parent is counted from 0 where one seems to be its own.
        self.shift = int(any(frame.get("parent_frame_id") == number for number, frame in self.stack.items()))

    def of(self, metadata: str) -> tuple[Frame, ...]:
        said = _pairs(metadata)
        if "source_line" in said:
            file = re.search(r'source_file="([^"]*)"', metadata)
            return (Frame(file[1] if file else "", "", said["source_line"]),)
        found: list[Frame] = []
        at = said.get("stack_frame_id", 0)
        while at in self.stack and len(found) < DEEPEST:
            place = self.places.get(self.stack[at].get("file_location_id", 0), {})
            names = self.files.get(place.get("file_name_id", 0), ""), self.functions.get(place.get("function_name_id", 0), "")
            found.insert(0, Frame(*names, place.get("line", 0)))
            at = self.stack[at].get("parent_frame_id", 0) - self.shift
        return tuple(found)


def _rows(text: str) -> Iterator[tuple[int, str]]:
    for line in text.splitlines():
        number, _, row = line.partition(" ")
        yield int(number), row


def _pairs(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in PAIRS.findall(text)}
