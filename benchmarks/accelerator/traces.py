"""The kernels of a measured row: a trace of the JAX profiler, reduced to what mends a slow program
without the machine.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST = 20  # kernels in a report
CONTAINERS = re.compile(
    r"while|conditional|call\b"
)  # operations of a CPU whose contents are traced too
MEASURED = re.compile(
    "generate|decode|prefill|step"
)  # in the names of programs that a report describes


@dataclass(frozen=True)
class DeviceTimes:
    """The kernels of a device.

    Attributes:
      kernels: name → calls and milliseconds.
      busy_ms: the time in which at least one kernel runs.
      span_ms: the time from the first to the last kernel.
    """

    kernels: Mapping[str, tuple[int, float]]
    busy_ms: float
    span_ms: float

    @property
    def calls(self) -> int:
        return sum(calls for calls, _ in self.kernels.values())

    @property
    def gaps(self) -> float:
        """The share of the span in which no kernel runs."""
        return 1 - self.busy_ms / self.span_ms if self.span_ms else 0.0


def trace(work: Callable[[], Any]) -> Any:
    """Traces work whose programs are compiled, and returns the data of the profiler."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python tracing would slow down the work
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(work())
        paths = sorted(Path(folder).rglob("*.xplane.pb"))
        return jax.profiler.ProfileData.from_file(str(paths[-1]))


def device_times(data: Any) -> DeviceTimes:
    """Adds up the kernels of all streams of the devices in a trace; without a device, the
    operations of the CPU.
    """
    planes = [plane for plane in data.planes if plane.name.startswith("/device:")]
    lines = [
        line
        for plane in planes
        for line in plane.lines
        if line.name.startswith(("Stream", "XLA Ops"))
    ]
    events = [event for line in lines for event in line.events]
    if not events:
        every = (event for plane in data.planes for line in plane.lines for event in line.events)
        events = [
            event
            for event in every
            if "hlo_op" in dict(event.stats) and not CONTAINERS.match(event.name)
        ]
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in events:
        kernels[event.name].append(event.duration_ns)
    spans = [(event.start_ns, event.start_ns + event.duration_ns) for event in events]
    busy, first, last = covered(spans)
    return DeviceTimes(
        {name: (len(times), sum(times) / 1e6) for name, times in kernels.items()},
        busy / 1e6,
        (last - first) / 1e6,
    )


def covered(spans: Iterable[tuple[float, float]]) -> tuple[float, float, float]:
    """Returns the length of the union of intervals, their first start and their last end; zeros
    without intervals.
    """
    total, begin, end, first = 0.0, 0.0, 0.0, None
    for start, stop in sorted(spans):
        if first is None:
            first, begin, end = start, start, stop
        elif start > end:
            total, begin, end = total + end - begin, start, stop
        else:
            end = max(end, stop)
    return total + end - begin, first or 0.0, end


def program_lines(programs: Mapping[str, Any]) -> Iterable[str]:
    """Yields FLOPs, bytes, memory, conditionals, loops and copies to the host of compiled
    programs.
    """
    for name, program in programs.items():
        cost = program.cost_analysis() or {}
        text = (
            program.as_text()
            if hasattr(program, "as_text")
            else program.hlo_modules()[0].to_string()
        )
        counts = {
            kind: len(re.findall(rf"\b{kind}\(", text))
            for kind in ("conditional", "while", "copy-start", "custom-call")
        }
        yield (
            f"program {name}: {cost.get('flops', 0):.4g} FLOPs, {cost.get('bytes accessed', 0):.4g}"
            " bytes, " + ", ".join(f"{count} {kind}" for kind, count in counts.items())
        )


def report_lines(times: DeviceTimes, count: int) -> Iterable[str]:
    """Yields a Markdown table of the longest kernels; `count` is the number of steps or tokens of
    the trace.
    """
    yield (
        f"{times.span_ms:.3f} ms for {count} steps or tokens, kernels in {times.busy_ms:.3f} ms of"
        f" them, gaps {times.gaps:.1%}, {times.calls / count:.1f} kernels each"
    )
    yield from ("", "| kernel | calls | ms | share |", "|---|---|---|---|")
    longest = sorted(times.kernels.items(), key=lambda item: -item[1][1])
    total = sum(ms for _, ms in times.kernels.values()) or 1.0
    for name, (calls, ms) in longest[:LONGEST]:
        yield f"| {name[:100].replace('|', '/')} | {calls} | {ms:.3f} | {ms / total:.1%} |"


def live_programs() -> dict[str, Any]:
    """Returns the compiled programs of this process, by name; programs of the same name are
    numbered.
    """
    import jax

    programs: dict[str, Any] = {}
    for one in jax.devices()[0].client.live_executables():
        name = one.hlo_modules()[0].name
        same = sum(key.split(" ")[0] == name for key in programs)
        programs[f"{name} {same + 1}" if same else name] = one
    return programs


def explain_row(name: str, measured: Any, folder: Path) -> None:
    """Appends a section about a row to `traces.md`."""
    measured.work()  # compiles what the measurement did not
    times = device_times(trace(measured.work))
    lines = [f"## {name}", "", *report_lines(times, measured.count), ""]
    programs = measured.programs or {
        key: one for key, one in live_programs().items() if MEASURED.search(key)
    }
    lines += [*program_lines(programs), "", ""]
    with (folder / "traces.md").open("a", encoding="utf-8") as file:
        file.write("\n".join(lines))
