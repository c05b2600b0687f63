"""The output of `dantinox plan`: the tables of its programs, and the machine."""

from collections.abc import Iterator

from dantinox.lab.measure.plan import SCHEDULE_STEPS, Plan, Program
from dantinox.lab.measure.program_cost import BYTES_SENT
from dantinox.report.document import Block, Items, Table, to_lines
from dantinox.report.tables import Column, human_bytes, human_count, human_time, percent

RUN_MFUS = (1.0, 0.4)  # the bound, and a usual value of large training runs


def _milliseconds(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return f"{1e3 * seconds:.3g}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def _bytes(kind: str) -> Column:
    """Returns a column with the bytes of a kind of memory; empty if the program is not compiled."""
    return Column(kind, kind, lambda p: p.bytes and human_bytes(getattr(p.bytes, kind)))


def _collective_column(kind: str) -> Column:
    """Returns a column with the number of collectives of a kind and the bytes that a device sends
    in them.
    """

    def cell(p: Program) -> str | None:
        collective = p.collectives.get(kind)
        return (
            None if collective is None else f"{collective.count} · {human_bytes(collective.sent)}"
        )

    return Column(kind, kind, cell)


NAME_COLUMNS = (
    Column("program", "program", lambda p: p.name),
    # The input of a call, such as "8 × 512 tokens".
    Column("reads", "reads", lambda p: p.reads),
)

# The columns of the name, of the mesh and of the input.
MESH_COLUMNS = (NAME_COLUMNS[0], Column("mesh", "mesh", lambda p: p.mesh), NAME_COLUMNS[1])

MEMORY_COLUMNS = (
    *map(_bytes, ("arguments", "temp", "output", "alias")),
    Column("needs", "needs", lambda p: p.needs and human_bytes(p.needs)),
    Column("compile", "compiled\nin s", lambda p: p.compile_seconds, ".1f"),
)

TIME_COLUMNS = (
    Column("flops", "FLOPs", lambda p: human_count(p.flops)),
    # The FLOPs of the second forward pass of gradient checkpointing.
    Column("again", "recompute", lambda p: human_count(p.again) if p.again else None),
    Column("traffic", "traffic", lambda p: human_bytes(p.traffic)),
    Column("compute", "compute\nms ≥", lambda p: _milliseconds(p.compute_seconds)),
    Column("memory", "memory\nms ≥", lambda p: _milliseconds(p.memory_seconds)),
    Column(
        "links", "links\nms ≥", lambda p: _milliseconds(p.link_seconds) if p.collectives else None
    ),
    Column("mfu", "MFU ≤", lambda p: p.mfu and percent(p.mfu)),
)

# The keys of `BYTES_SENT` are the kinds of collectives.
COLLECTIVE_COLUMNS = tuple(map(_collective_column, BYTES_SENT))


def plan_lines(plan: Plan, width: int = 100) -> Iterator[str]:
    """Yields the machine, the tables of programs, and remarks on each program, in lines of at most
    `width`.
    """
    return to_lines(_plan_blocks(plan), width)


def _plan_blocks(plan: Plan) -> Iterator[Block]:
    yield Items(list(_machine(plan)))
    names = MESH_COLUMNS if plan.chips > 1 else NAME_COLUMNS
    for table in (MEMORY_COLUMNS, TIME_COLUMNS, COLLECTIVE_COLUMNS):
        programs = [
            program
            for program in plan.programs
            if table is not COLLECTIVE_COLUMNS or program.collectives
        ]
        columns = [
            column
            for column in table
            if any(column.value(program) is not None for program in programs)
        ]
        if programs:
            # The columns in front are repeated in each part of a table that is too wide.
            yield Table([*names, *columns], programs, front=len(names))
    yield Items([*(_program_remark(plan, program) for program in plan.programs), *_run_time(plan)])
    formulas = [f"{name}: {formula}" for name, formula in plan.formulas.items()]
    yield Items(
        [
            f"N = {human_count(plan.matrix_parameters)} weights in matrix multiplications; FLOPs:",
            *formulas,
        ]
    )


def _program_remark(plan: Plan, program: Program) -> str:
    place = f" on {program.mesh}" if plan.chips > 1 else ""
    kernels = "".join(f", {count} × {name}" for name, count in program.kernels.items())
    return f"{program.name}{place}: {_fits(program, plan.memory)}{kernels}"


def _machine(plan: Plan) -> Iterator[str]:
    memory = "memory unknown" if plan.memory is None else human_bytes(plan.memory)
    yield f"{plan.topology} ({plan.device}), {memory}"
    if plan.chip is None:
        yield "no time bounds: no figures are published for this machine"
    else:
        yield (
            f"{human_count(plan.chip.flops)} bfloat16 FLOP/s, {human_bytes(plan.chip.bandwidth)}/s:"
            f" {plan.chip.source}"
        )
    if plan.chips > 1:
        link = f", links of {human_bytes(plan.chip.link)}/s" if plan.chip else ""
        yield (
            f"{plan.chips} chips{link}: all figures are per chip; the bytes of a collective are the"
            " bytes that a chip sends"
        )
    adapters = ""
    if plan.trained != plan.parameters:
        adapters = f" and {human_count(plan.trained)} trained adapter parameters"
    yield (
        f"{human_count(plan.parameters)} parameters{adapters}, computed in {plan.dtype}, vocabulary"
        f" of {plan.vocab_size}"
    )


def _run_time(plan: Plan) -> Iterator[str]:
    """Yields the time of all training steps at two model FLOPs utilizations, if the figures of the
    chip are published.
    """
    train = next((program for program in plan.programs if program.name == "train"), None)
    if train is None or plan.chip is None:
        return
    steps = plan.steps or SCHEDULE_STEPS
    seconds = steps * train.flops / plan.chip.flops
    more = "" if plan.steps else "; the corpus determines the number of steps"
    times = " and ".join(f"{human_time(seconds / mfu)} at {mfu:.0%} MFU" for mfu in RUN_MFUS)
    yield f"train: {steps:,} steps take {times}, without evaluations{more}"


def _fits(program: Program, memory: int | None) -> str:
    if program.fits:
        return "fits"
    if program.needs is None or memory is None:
        return "not compiled: " + program.failure if program.failure else "unknown whether it fits"
    over = program.needs - memory
    return (
        f"does not fit, {human_bytes(over)} too much"
        if over > 0
        else f"does not fit: {program.failure}"
    )
