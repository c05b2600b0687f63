"""The plan of a config's programs as a table."""

from collections.abc import Iterator

from dantinox.measure.plan import Plan, Program
from dantinox.measure.work import SENT
from dantinox.report import human_bytes, human_count
from dantinox.report.tables import Column, percent, text_table, wrapped


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else (f"{1e3 * seconds:.3g}" if seconds < 0.1 else f"{1e3 * seconds:.0f}")


def _bytes(kind: str) -> Column:
    return Column(kind, kind, lambda p: p.bytes and human_bytes(getattr(p.bytes, kind)))


def _passed(kind: str) -> Column:
    """How many collectives of a kind there are, and what they pass."""

    def said(p: Program) -> str | None:
        of = p.collectives.get(kind)
        return None if of is None else f"{of.count} · {human_bytes(of.sent)}"

    return Column(kind, kind, said)


NAMES = (Column("program", "program", lambda p: p.name), Column("reads", "reads", lambda p: p.reads))
MESHED = (NAMES[0], Column("mesh", "mesh", lambda p: p.mesh), NAMES[1])
MEMORY = (
    *map(_bytes, ("arguments", "temp", "output", "alias")),
    Column("needs", "needs", lambda p: p.needs and human_bytes(p.needs)),
    Column("compile", "compiled\nin s", lambda p: p.compile_seconds, ".1f"),
)
TIME = (
    Column("flops", "FLOPs", lambda p: human_count(p.flops)),
    Column("again", "again", lambda p: human_count(p.again) if p.again else None),
    Column("traffic", "traffic", lambda p: human_bytes(p.traffic)),
    Column("compute", "compute\nms ≥", lambda p: _milliseconds(p.compute_seconds)),
    Column("memory", "memory\nms ≥", lambda p: _milliseconds(p.memory_seconds)),
    Column("links", "links\nms ≥", lambda p: _milliseconds(p.link_seconds) if p.collectives else None),
    Column("mfu", "MFU ≤", lambda p: p.mfu and percent(p.mfu)),
)
PASSED = tuple(map(_passed, SENT))


def plan_lines(found: Plan, width: int = 100) -> Iterator[str]:
    """The machine, the table of programs, and what is to be said of each, in lines of at most `width`."""
    yield from wrapped(_machine(found), width)
    yield ""
    names = MESHED if found.chips > 1 else NAMES
    passing = [program for program in found.programs if program.collectives]
    for table, programs in ((MEMORY, found.programs), (TIME, found.programs), (PASSED, passing)):
        if programs:
            columns = [column for column in table if any(column.value(program) is not None for program in programs)]
            yield from text_table([*names, *columns], programs, width, front=len(names))
            yield ""
    for program in found.programs:
        on = f" on {program.mesh}" if found.chips > 1 else ""
        kernels = "".join(f", {count} × {name}" for name, count in program.kernels.items())
        yield from wrapped([f"{program.name}{on}: {_fits(program, found.memory)}{kernels}"], width)
    yield ""
    formulas = [f"{name}: {formula}" for name, formula in found.formulas.items()]
    yield from wrapped([f"N = {human_count(found.matrix_parameters)} weights in matrix products; FLOPs:", *formulas], width)


def _machine(found: Plan) -> Iterator[str]:
    memory = "memory unknown" if found.memory is None else human_bytes(found.memory)
    yield f"{found.topology} ({found.device}), {memory}"
    if found.chip is None:
        yield "no published figures of this machine, and so no bounds of time"
    else:
        yield f"{human_count(found.chip.flops)} bfloat16 FLOP/s, {human_bytes(found.chip.bandwidth)}/s: {found.chip.source}"
    if found.chips > 1:
        link = f", whose links send {human_bytes(found.chip.link)}/s" if found.chip else ""
        yield f"{found.chips} chips{link}: all figures are of one of them, a collective's bytes those that it sends"
    adapters = f" and {human_count(found.trained)} of adapters, which alone are trained" * (found.trained != found.parameters)
    yield f"{human_count(found.parameters)} parameters{adapters}, computing in {found.dtype}, {found.vocab_size} symbols"


def _fits(program: Program, memory: int | None) -> str:
    if program.fits:
        return "fits"
    if program.needs is None or memory is None:
        return "not compiled: " + program.failure if program.failure else "nobody says whether it fits"
    over = program.needs - memory
    return f"does not fit, {human_bytes(over)} too much" if over > 0 else f"does not fit: {program.failure}"
