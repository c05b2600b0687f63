"""`dantinox profile`: a device trace and a table of its most expensive operations.

The trace contains the times of XLA operations. The compiled programs give the kind of each
operation and its source line in this package. Operations of the same kind and line, such as those
of all layers, are added up.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from dantinox.files import UserError, wrap_os_errors
from dantinox.lab.measure.hlo import Instruction, instructions
from dantinox.report.tables import Column, percent, text_table, wrap_lines

# The contents of these operations are traced separately.
CONTAINERS = {"while", "conditional", "call", "async-start", "async-done"}
# Kind → opcodes. The kind of an operation is the first one here that lists an opcode of the
# operation.
KINDS = {
    "matmul": ("dot", "convolution", "ragged-dot"),
    "collective": ("all-gather", "all-reduce", "reduce-scatter", "all-to-all",
                   "collective-permute"),
    "sort": ("sort", "topk"),
    "scatter": ("scatter",),
    "gather": ("gather", "dynamic-slice"),
    "update": ("dynamic-update-slice",),
    "reduction": ("reduce", "reduce-window"),
}  # fmt: skip
DATA_MOVEMENT = {
    "copy", "transpose", "concatenate", "pad", "reverse", "slice", "bitcast", "broadcast",
    "reshape", "convert", "iota", "parameter", "constant", "fusion",
}  # fmt: skip
OUTER_SCOPES = ("Transformer.", "Block.")  # nearly all operations are inside these modules
PACKAGE = f"/{__package__.partition('.')[0]}/"  # in the paths of source files of this package
# The kind of a custom call, by its target or name.
KERNELS = {
    "matmul": re.compile(r"gemm|matmul|cublas|onednn|__cudnn\$conv"),
    "attention": re.compile(r"fmha|attention|flash|splash"),
}


@dataclass(frozen=True)
class Operation:
    """The operations of one kind and origin.

    Attributes:
      name: XLA's name without its number.
      kind: matmul, reduction, elementwise and so on.
      place: the module or function where they originate.
      source: file and line.
      ms: total time of all calls, summed over threads or streams.
      share: share of the time of all operations.
      calls: number of calls.
    """

    name: str
    kind: str
    place: str
    source: str
    ms: float
    share: float
    calls: int


@dataclass(frozen=True)
class Profile:
    """A trace of `count` steps or tokens that took `wall_ms` in total; `operations` has the most
    expensive first.
    """

    folder: str
    device: str
    count: int
    wall_ms: float
    operations: list[Operation]

    @property
    def traced_ms(self) -> float:
        return sum(operation.ms for operation in self.operations)


def _trace_files(folder: Path) -> set[tuple[Path, int]]:
    """Returns the traces with their times of modification. Two traces of the same second have the
    same path.
    """
    return {(path, path.stat().st_mtime_ns) for path in folder.rglob("*.xplane.pb")}


def profile(work: Callable[[], Any], count: int, folder: Path) -> Profile:
    """Traces `work()` into a folder that TensorBoard, XProf and Perfetto can read.

    Args:
      work: runs `count` steps or tokens. Its programs must be compiled already.

    Raises:
      UserError: the folder cannot be written, or the trace has no device operation.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python tracing would slow down the measured work
    before = _trace_files(folder)
    with (
        wrap_os_errors(f"cannot write into {folder}"),
        jax.profiler.trace(folder, profiler_options=options),
    ):
        begin = time.perf_counter()
        jax.block_until_ready(work())
        wall = time.perf_counter() - begin
    files = sorted(path for path, _ in _trace_files(folder) - before)
    if not files:
        raise UserError(f"the JAX profiler wrote no trace into {folder}")
    device = jax.devices()[0]
    runs = operation_times(jax.profiler.ProfileData.from_file(str(files[-1])))
    programs: dict[str, list[Program]] = defaultdict(list)
    for name, text in _program_texts({name for name, _ in runs}):
        programs[name].append(instructions(text))
    operations = rank_operations(runs, programs)
    if not operations:
        raise UserError(f"the trace {files[-1]} has no device operation")
    kind = device.device_kind
    if jax.device_count() > 1:
        kind = f"{jax.device_count()} × {kind}"
    return Profile(str(folder), kind, count, wall * 1e3, operations)


Program = Mapping[str, Instruction]
# (name of a program, id of one run of it) → operation → nanoseconds of each call.
Runs = Mapping[tuple[str, str], Mapping[str, Sequence[float]]]


def operation_times(data: Any) -> Runs:
    """Returns the times of operations on all devices and threads of a trace
    (`jax.profiler.ProfileData`).
    """
    times: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for plane in data.planes:
        lines = list(plane.lines)
        # Accelerators may list each operation twice: at its launch, and on a line named "XLA Ops".
        of_xla = [line for line in lines if line.name == "XLA Ops"]
        for event in (event for line in of_xla or lines for event in line.events):
            stats = dict(event.stats)
            if "hlo_op" in stats or of_xla:
                name = str(stats.get("hlo_op", event.name)).partition(" = ")[0].lstrip("%")
                run = str(stats.get("hlo_module", "")), str(stats.get("run_id", ""))
                times[run][name].append(event.duration_ns)
    return times


def _program_texts(names: set[str]) -> Iterator[tuple[str, str]]:
    """Yields (name, HLO text) of the programs of these names that are compiled in this process."""
    for executable in jax.devices()[0].client.live_executables():
        for module in executable.hlo_modules():
            if module.name in names:
                yield module.name, module.to_string()


def rank_operations(runs: Runs, programs: Mapping[str, Sequence[Program]]) -> list[Operation]:
    """Groups operations by kind and origin, most expensive first, without containers such as loops.

    Several programs can have the same name. A run in the trace is assigned to the program that
    contains the most of the operations in that run.
    """
    groups: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for (name, _), times in runs.items():
        program = max(
            programs.get(name, ()),
            key=lambda candidate: len(candidate.keys() & times.keys()),
            default={},
        )
        for operation, spent in times.items():
            instruction = program.get(operation, Instruction("", "", ""))
            stem = re.sub(r"[.\d]+$", "", operation)
            if (instruction.opcode or stem) not in CONTAINERS:
                groups[stem, operation_kind(instruction, stem), *_origin(instruction)] += spent
    total = sum(map(sum, groups.values())) or 1.0
    operations = [
        Operation(*group, sum(ns) / 1e6, sum(ns) / total, len(ns)) for group, ns in groups.items()
    ]
    return sorted(operations, key=lambda operation: -operation.ms)


def operation_kind(instruction: Instruction, name: str) -> str:
    """Returns the kind of an operation from the opcodes in it."""
    inside = {instruction.opcode, *instruction.inside}
    if "custom-call" in inside:
        origin = f"{instruction.target} {instruction.label}"
        return next((kind for kind, pattern in KERNELS.items() if pattern.search(origin)), "kernel")
    for kind, opcodes in KINDS.items():
        if inside.intersection(opcodes):
            return kind
    if not instruction.opcode:
        return "matmul" if re.match(r"dot|gemm", name) else "–"
    return "copy" if inside <= DATA_MOVEMENT else "elementwise"


def _origin(instruction: Instruction) -> tuple[str, str]:
    """Returns the place and the source of an operation; `–` if unknown."""
    package_frames = [frame for frame in instruction.frames if PACKAGE in frame.file]
    if not package_frames:
        return "–", "–"
    of_model = [frame.function for frame in package_frames if f"{PACKAGE}model/" in frame.file]
    methods = [name for name in of_model if name[:1].isupper()]
    methods = [name for name in methods if not name.startswith(OUTER_SCOPES)] or methods[-1:]
    if methods:
        parts = dict.fromkeys(name.removesuffix(".__call__") for name in (methods[0], methods[-1]))
    else:  # the innermost frame may be a library function, an optimizer for instance
        parts = dict.fromkeys(
            [instruction.frames[-1].function.replace(".<locals>", "").replace(".<lambda>", "")]
        )
    place = " › ".join(parts)
    if "transpose(" in instruction.label:
        place += " (backward)"
    innermost = package_frames[-1]
    return place, f"{innermost.file.rpartition(PACKAGE)[2]}:{innermost.line}"


WIDTH = 160  # lines that the terminal wraps are easier to read than a table in several parts
COLUMNS = [
    Column("name", "operation", lambda operation: operation.name),
    Column("kind", "what", lambda operation: operation.kind),
    Column("place", "in", lambda operation: operation.place),
    Column("ms", "ms", lambda operation: operation.ms, ".2f"),
    Column("share", "share", lambda operation: percent(operation.share)),
    Column("calls", "calls", lambda operation: operation.calls, "d"),
    Column("source", "source", lambda operation: operation.source),
]


def profile_lines(result: Profile, unit: str, width: int = 100, number: int = 10) -> Iterator[str]:
    """Yields a summary of the trace, its most expensive operations, and its folder; `unit` is
    `step` or `token`.
    """
    each = result.wall_ms / result.count
    plural = unit if result.count == 1 else f"{unit}s"
    yield from wrap_lines(
        [f"{result.count} {plural} of {each:.2f} ms on {result.device}", ""], width
    )
    shown = result.operations[:number]
    yield from text_table(COLUMNS, shown, max(width, WIDTH), front=3)
    rest = len(result.operations) - len(shown)
    others = (
        f", {rest} others {percent(sum(x.share for x in result.operations[number:]))}"
        if rest
        else ""
    )
    yield from wrap_lines(
        ["", f"all operations: {result.traced_ms:.2f} ms, summed over threads and devices{others}"],
        width,
    )
    yield (
        f"trace: {result.folder} (TensorBoard with its profile plug-in, or the"
        " .trace.json.gz in ui.perfetto.dev)"
    )
