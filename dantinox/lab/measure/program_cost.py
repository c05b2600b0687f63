"""FLOPs and collectives of a compiled program, counted from its HLO.

The compiler's cost analysis counts the body of a loop once. This module multiplies it by the number
of iterations.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from dantinox.lab.measure.hlo import Instruction, computations

# (bytes of the operands, n devices) → bytes that each device sends in a ring algorithm (Chan et al.
# 2007, "Collective communication: theory, practice, and experience", section 7).
BYTES_SENT: Mapping[str, Callable[[float, int], float]] = {
    "all-gather": lambda size, n: size * (n - 1),
    "reduce-scatter": lambda size, n: size * (n - 1) / n,
    "all-reduce": lambda size, n: 2 * size * (n - 1) / n,
    "all-to-all": lambda size, n: size * (n - 1) / n,
    "collective-permute": lambda size, n: size,
}
SHAPE = re.compile(r"\b(pred|token|opaque|[a-z]+\d+\w*)\[([\d,<=]*)\]")


@dataclass(frozen=True)
class Work:
    """The work of one device in a run of a program.

    Attributes:
      flops: FLOPs of matrix multiplications and convolutions; a multiply-add counts as two.
      count: number of collectives of each kind; those in groups of one device are not counted.
      sent: bytes that the device sends, by kind.
      unknown_loops: number of loops without a static trip count; their bodies are counted once.
    """

    flops: float = 0.0
    count: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    unknown_loops: int = 0

    @property
    def bytes(self) -> float:
        """The bytes that the device sends in total."""
        return sum(self.sent.values())

    def __add__(self, other: "Work") -> "Work":
        loops = self.unknown_loops + other.unknown_loops
        return Work(
            self.flops + other.flops, self.count + other.count, self.sent + other.sent, loops
        )

    def repeat(self, iterations: int) -> "Work":
        """Returns the work of this many iterations of a loop body."""
        count, sent = (
            Counter({kind: iterations * n for kind, n in counter.items()})
            for counter in (self.count, self.sent)
        )
        return Work(iterations * self.flops, count, sent, self.unknown_loops)


def count_work(text: str) -> Work:
    """Counts the work of a program from `compiled.as_text()`. All branches of a conditional are
    counted.
    """
    members = computations(text)
    header = text.partition("\n")[0]
    devices = max(
        int(n) for n in [*re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header), "1"]
    )

    @cache
    def work_of(computation: str) -> Work:
        """Returns the work of a computation and of those that it calls."""
        types = {op.name: op.type for op in members[computation]}
        total = Work()
        # A TPU program repeats an asynchronous collective in every fusion that continues it: count
        # only its start. A fusion named all-reduce-scatter contains an all-reduce but works as a
        # reduce-scatter.
        is_async_start = any(
            '"AsyncCollectiveStart"' in op.attributes for op in members[computation]
        )
        scatters = computation.startswith("all-reduce-scatter")
        for op in members[computation]:
            if op.opcode.endswith(("-done", "-update")) or (
                "chain_id=" in op.attributes and op.opcode in BYTES_SENT and not is_async_start
            ):
                continue
            if scatters and op.opcode == "all-reduce":
                op = replace(op, opcode="reduce-scatter")
            total += _instruction_work(op, types, devices)
            for name in op.called:
                total += (
                    _loop_work(work_of(name), op, members)
                    if op.opcode == "while"
                    else work_of(name)
                )
        return total

    return work_of("ENTRY")


def _instruction_work(op: Instruction, types: Mapping[str, str], devices: int) -> Work:
    """Returns the work of an instruction without the computations that it calls."""
    operands = [types[name] for name in re.findall(r"%([\w.\-]+)", op.operands) if name in types]
    if contracted := _contraction_size(op, operands):
        return Work(flops=2.0 * math.prod(_dimensions(op.type)) * contracted)
    kind = op.opcode.removesuffix("-start")
    if kind not in BYTES_SENT or (n := _group_size(op.attributes, devices)) == 1:
        return Work()
    return Work(
        count=Counter({kind: 1}),
        sent=Counter({kind: BYTES_SENT[kind](sum(map(_bytes, operands)), n)}),
    )


def _contraction_size(op: Instruction, operands: list[str]) -> int:
    """Returns the number of products that each element of the result sums; 0 if it is not a matrix
    multiplication.
    """
    if op.opcode == "convolution":
        letters = re.findall(r"dim_labels=\w+_(\w+)->", op.attributes)[0]
        return math.prod(
            n for letter, n in zip(letters, _dimensions(operands[1]), strict=True) if letter != "o"
        )
    # The contracted axes of a `dot` or a library call.
    axes = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', op.attributes)
    if not axes:
        return 0
    sizes = _dimensions(operands[0])
    return math.prod(sizes[int(axis)] for axis in re.findall(r"\d+", axes[1]))


def _group_size(attributes: str, devices: int) -> int:
    """Returns the number of devices in a group of a collective; 0 for source-target pairs."""
    if "source_target_pairs=" in attributes:
        return 0
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(listed[1].split(","))
    if tiled := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(tiled[1])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{('[^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", mesh[1]))
        return math.prod(
            int(part or sizes[name])
            for name, part in re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh[2])
        )
    return devices


def _loop_work(
    body_work: Work, loop: Instruction, members: Mapping[str, list[Instruction]]
) -> Work:
    """Returns the work of all iterations of a loop, whose number the attributes name or the
    condition compares with.
    """
    trip_count = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if trip_count:
        return body_work.repeat(int(trip_count[1]))
    limits = set(_constants(re.findall(r"\bcondition=%?([\w.\-]+)", loop.attributes)[0], members))
    if len(limits) == 1:  # assume a counter from 0 up to this limit
        return body_work.repeat(limits.pop())
    return body_work + Work(unknown_loops=1)


def _constants(computation: str, members: Mapping[str, list[Instruction]]) -> Iterator[int]:
    """Yields the integer constants of a computation."""
    for op in members[computation]:
        if op.opcode == "constant" and re.match(r"[su]\d+\[\]", op.type):
            yield int(op.operands)
        for name in op.called:
            yield from _constants(name, members)


def _dimensions(type: str) -> list[int]:
    shape = SHAPE.search(type)
    return [int(n) for n in re.findall(r"\d+", shape[2] if shape else "")]


def _bytes(type: str) -> float:
    """Returns the bytes of an array, or of all arrays in a tuple."""
    return sum(
        _bits(name) / 8 * math.prod(map(int, re.findall(r"\d+", sizes)))
        for name, sizes in SHAPE.findall(type)
    )


def _bits(name: str) -> int:
    """Returns the bits of an element of a type such as `f32`; 0 for types without data."""
    if name == "pred":
        return 8
    width = re.search(r"\d+", name)
    return int(width[0]) if width else 0
