"""A profile as a table."""

from collections.abc import Iterator

from dantinox.measure.profile import Profile
from dantinox.report.tables import Column, percent, text_table, wrapped

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
    """What was traced, its dearest operations, and where the trace lies.

    Args:
      unit: what was counted, `step` or `token`.
    """
    each = found.wall_ms / found.count
    plural = unit if found.count == 1 else f"{unit}s"
    yield from wrapped([f"{found.count} {plural} of {each:.2f} ms on {found.device}", ""], width)
    shown = found.operations[:number]
    yield from text_table(COLUMNS, shown, max(width, WIDTH), front=3)
    rest = len(found.operations) - len(shown)
    others = f", {rest} others {percent(sum(x.share for x in found.operations[number:]))}" if rest else ""
    yield from wrapped(["", f"all operations: {found.traced_ms:.2f} ms, summed over threads and devices{others}"], width)
    yield f"trace: {found.folder} (TensorBoard with its profile plug-in, or the .trace.json.gz in ui.perfetto.dev)"
