"""`dantinox profile`: a device trace, and the table of its most expensive operations.

XLA's operations are read off the trace, and what each is and which line of this package it comes from off the compiled
programs. Operations of the same kind and line, as those of all layers are, count as one.
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
from dantinox.measure.hlo import Instruction, instructions
from dantinox.report.tables import Column, percent, text_table, wrap_lines

CONTAINERS = {"while", "conditional", "call", "async-start", "async-done"}  # what runs inside is traced itself
# What an operation is called by the first of these opcodes in it.
KINDS = {
    "matmul": ("dot", "convolution", "ragged-dot"),
    "collective": ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"),
    "sort": ("sort", "topk"),
    "scatter": ("scatter",),
    "gather": ("gather", "dynamic-slice"),
    "update": ("dynamic-update-slice",),
    "reduction": ("reduce", "reduce-window"),
}  # fmt: skip
DATA_MOVEMENT = {
    "copy", "transpose", "concatenate", "pad", "reverse", "slice", "bitcast", "broadcast", "reshape", "convert", "iota",
    "parameter", "constant", "fusion",
}  # fmt: skip
OUTER_SCOPES = ("Transformer.", "Block.")  # nearly everything is in these
PACKAGE = f"/{__package__.partition('.')[0]}/"
# What a custom call is, by its target or its name.
KERNELS = {
    "matmul": re.compile(r"gemm|matmul|cublas|onednn|__cudnn\$conv"),
    "attention": re.compile(r"fmha|attention|flash|splash"),
}


@dataclass(frozen=True)
class Operation:
    """Operations of one kind and origin.

    Attributes:
      name: what XLA calls them, without their numbers.
      kind: matmul, reduction, elementwise and so on.
      place: the part of the model, or the function, that they come from.
      source: file and line.
      ms: in all calls together, summed over the threads or streams they ran on.
      share: of the time of all operations.
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
    """A trace of `count` steps or tokens. `wall_ms`: of the whole; `operations`: all, most expensive first."""

    folder: str
    device: str
    count: int
    wall_ms: float
    operations: list[Operation]

    @property
    def traced_ms(self) -> float:
        return sum(operation.ms for operation in self.operations)


def profile(work: Callable[[], Any], count: int, folder: Path) -> Profile:
    """Traces `work()`, `count` steps or tokens that are to be warm, into a folder that TensorBoard, XProf and Perfetto read.

    Raises:
      UserError: the folder cannot be written, or there is no operation in the trace.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow down what is measured
    before = set(folder.rglob("*.xplane.pb"))
    with wrap_os_errors(f"cannot write into {folder}"), jax.profiler.trace(folder, profiler_options=options):
        begin = time.perf_counter()
        jax.block_until_ready(work())
        wall = time.perf_counter() - begin
    files = sorted(set(folder.rglob("*.xplane.pb")) - before)
    if not files:
        raise UserError(f"the profiler of jax wrote no trace into {folder}")
    device = jax.devices()[0]
    runs = operation_times(jax.profiler.ProfileData.from_file(str(files[-1])))
    programs: dict[str, list[Program]] = defaultdict(list)
    for name, text in _program_texts({name for name, _ in runs}):
        programs[name].append(instructions(text))
    operations = rank_operations(runs, programs)
    if not operations:
        raise UserError(f"there is no operation of the device in the trace {files[-1]}")
    kind = f"{jax.device_count()} × " * (jax.device_count() > 1) + device.device_kind
    return Profile(str(folder), kind, count, wall * 1e3, operations)


Program = Mapping[str, Instruction]
# The name of a program and which run of it → operation → the nanoseconds of each of its calls.
Runs = Mapping[tuple[str, str], Mapping[str, Sequence[float]]]


def operation_times(data: Any) -> Runs:
    """Times over all devices and threads of a trace (`jax.profiler.ProfileData`)."""
    found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for plane in data.planes:
        lines = list(plane.lines)
        # Accelerators may have each operation twice: as they were launched, and on a line of this name.
        of_xla = [line for line in lines if line.name == "XLA Ops"]
        for event in (event for line in of_xla or lines for event in line.events):
            stats = dict(event.stats)
            if "hlo_op" in stats or of_xla:
                name = str(stats.get("hlo_op", event.name)).partition(" = ")[0].lstrip("%")
                run = str(stats.get("hlo_module", "")), str(stats.get("run_id", ""))
                found[run][name].append(event.duration_ns)
    return found


def _program_texts(names: set[str]) -> Iterator[tuple[str, str]]:
    """The programs of these names that are compiled in this process."""
    for executable in jax.devices()[0].client.live_executables():
        for module in executable.hlo_modules():
            if module.name in names:
                yield module.name, module.to_string()


def rank_operations(runs: Runs, programs: Mapping[str, Sequence[Program]]) -> list[Operation]:
    """The operations, most expensive first, those of one kind and origin together; what only holds others is left out.

    A run is of the program of its name that knows most of its operations.
    """
    groups: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for (name, _), times in runs.items():
        program = max(programs.get(name, ()), key=lambda known: len(known.keys() & times.keys()), default={})
        for operation, spent in times.items():
            found = program.get(operation, Instruction("", "", ""))
            stem = re.sub(r"[.\d]+$", "", operation)
            if (found.opcode or stem) not in CONTAINERS:
                groups[stem, operation_kind(found, stem), *_origin(found)] += spent
    total = sum(map(sum, groups.values())) or 1.0
    operations = [Operation(*group, sum(ns) / 1e6, sum(ns) / total, len(ns)) for group, ns in groups.items()]
    return sorted(operations, key=lambda operation: -operation.ms)


def operation_kind(found: Instruction, name: str) -> str:
    """What an operation is, by what is in it."""
    inside = {found.opcode, *found.inside}
    if "custom-call" in inside:
        return next((kind for kind, names in KERNELS.items() if names.search(f"{found.target} {found.label}")), "kernel")
    for kind, opcodes in KINDS.items():
        if inside.intersection(opcodes):
            return kind
    if not found.opcode:
        return "matmul" if re.match(r"dot|gemm", name) else "–"
    return "copy" if inside <= DATA_MOVEMENT else "elementwise"


def _origin(found: Instruction) -> tuple[str, str]:
    """The place and the source of an operation, `–` where the program does not say."""
    own = [frame for frame in found.frames if PACKAGE in frame.file]
    if not own:
        return "–", "–"
    of_model = [frame.function for frame in own if f"{PACKAGE}model/" in frame.file]
    methods = [name for name in of_model if name[:1].isupper()]
    methods = [name for name in methods if not name.startswith(OUTER_SCOPES)] or methods[-1:]
    if methods:
        parts = dict.fromkeys(name.removesuffix(".__call__") for name in (methods[0], methods[-1]))
    else:  # behind the last line of this package may stand a library's function, an optimizer's for instance
        parts = dict.fromkeys([found.frames[-1].function.replace(".<locals>", "").replace(".<lambda>", "")])
    backward = " (backward)" * ("transpose(" in found.label)
    return " › ".join(parts) + backward, f"{own[-1].file.rpartition(PACKAGE)[2]}:{own[-1].line}"


WIDTH = 160  # a table in several parts would be harder to read than lines that a terminal breaks
COLUMNS = [
    Column("name", "operation", lambda operation: operation.name),
    Column("kind", "what", lambda operation: operation.kind),
    Column("place", "in", lambda operation: operation.place),
    Column("ms", "ms", lambda operation: operation.ms, ".2f"),
    Column("share", "share", lambda operation: percent(operation.share)),
    Column("calls", "calls", lambda operation: operation.calls, "d"),
    Column("source", "source", lambda operation: operation.source),
]


def profile_lines(found: Profile, unit: str, width: int = 100, number: int = 10) -> Iterator[str]:
    """What was traced, its most expensive operations, and where the trace lies; `unit`: what was counted, `step` or `token`."""
    each = found.wall_ms / found.count
    plural = unit if found.count == 1 else f"{unit}s"
    yield from wrap_lines([f"{found.count} {plural} of {each:.2f} ms on {found.device}", ""], width)
    shown = found.operations[:number]
    yield from text_table(COLUMNS, shown, max(width, WIDTH), front=3)
    rest = len(found.operations) - len(shown)
    others = f", {rest} others {percent(sum(x.share for x in found.operations[number:]))}" if rest else ""
    yield from wrap_lines(["", f"all operations: {found.traced_ms:.2f} ms, summed over threads and devices{others}"], width)
    yield f"trace: {found.folder} (TensorBoard with its profile plug-in, or the .trace.json.gz in ui.perfetto.dev)"
