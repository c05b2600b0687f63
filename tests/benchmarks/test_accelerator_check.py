"""The schedule, the results and the verdicts of `benchmarks/accelerator`, with rows that fail in
every way.
"""

import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

CHECK = Path(__file__).parents[2] / "benchmarks" / "accelerator"
HERE = Path(__file__).parent


@pytest.fixture
def modules(monkeypatch):
    """The modules of the check, which import each other by their names as in a program of their
    own.
    """
    monkeypatch.syspath_prepend(str(CHECK))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    import check
    import rows
    import traces

    yield SimpleNamespace(check=check, rows=rows, traces=traces)
    for name in ("check", "rows", "traces"):
        del sys.modules[name]


def table_of(rows, *names, seconds=1):
    return {name: rows.Row(name, f"a row that {name}", f"faulty:{name}", seconds) for name in names}


def test_verdicts(modules):
    more, less = (
        modules.rows.Bar("mfu", 0.4, 0.33, 0.2),
        modules.rows.Bar("error", 1e-4, 1e-3, 1e-2),
    )
    assert [more.judge(x) for x in (0.5, 0.4, 0.39, 0.33, 0.3, 0.2, 0.19, math.nan)] == [
        "good", "good", "acceptable", "acceptable", "weak", "weak", "broken", "broken",
    ]  # fmt: skip
    assert [less.judge(x) for x in (0, 1e-4, 5e-4, 5e-3, 0.02, math.inf)] == [
        "good", "good", "acceptable", "weak", "broken", "broken",
    ]  # fmt: skip
    equal = modules.rows.Bar("bits", 1, 0, 0)
    assert [equal.judge(x) for x in (1, 0.99, 0)] == ["good", "acceptable", "acceptable"]
    assert modules.rows.verdict((more, less), {"mfu": 0.5, "error": 5e-3, "other": 0}) == "weak"
    assert modules.rows.verdict((more,), {"other": 1}) == "measured"


def test_rows_are_complete(modules):
    for name, row in modules.rows.ROWS.items():
        module, function = row.measure.split(":")
        assert f"def {function}(" in (CHECK / f"{module}.py").read_text(encoding="utf-8"), name
    first = list(modules.rows.ROWS.values())[:6]
    assert sum(row.seconds for row in first) <= 310 and {row.name for row in first} >= {
        "device",
        "exactness",
        "train_1b",
    }


def test_every_fault_costs_only_its_row(modules, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(modules.rows.Row, "limit", 3.0)
    table = table_of(
        modules.rows, "fails", "hangs", "fills_memory", "lacks_torch", "is_killed", "works"
    )
    results = modules.check.Results(tmp_path)
    began = time.monotonic()
    modules.check.run_rows(list(table), results, smoke=True, minutes=1, table=table)
    assert time.monotonic() - began < 45
    assert "ValueError: the shapes differ\n    in the second line\n" in capsys.readouterr().err
    assert {name: result["verdict"] for name, result in results.rows.items()} == {
        "fails": "failed", "hangs": "time limit", "fills_memory": "out of memory",
        "lacks_torch": "not run", "is_killed": "killed", "works": "measured",
    }  # fmt: skip
    assert results.rows["fails"]["reason"] == "the shapes differ" and "ValueError" in "".join(
        results.rows["fails"]["output"]
    )
    assert results.rows["lacks_torch"]["reason"] == "torch is not installed"
    assert results.rows["is_killed"]["reason"] == "killed by signal 9"
    assert results.rows["works"]["figures"] == {"answer": 42, "smoke": True}
    written = modules.check.format_table(results.rows, table)
    assert (
        written.startswith("device: none\n")
        and "| works | measured | answer 42, smoke yes | – |" in written
    )
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []


def test_rows_that_do_not_fit_are_not_run(modules, tmp_path):
    table = table_of(modules.rows, "works", "fails", seconds=100)
    results = modules.check.Results(tmp_path)
    modules.check.run_rows(list(table), results, smoke=False, minutes=1, table=table)
    assert [result["verdict"] for result in results.rows.values()] == ["not run", "not run"]
    assert "57 seconds were left" in results.rows["works"]["reason"]


def test_a_killed_check_keeps_its_results_and_is_continued(modules, tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {str(CHECK)!r})\nfrom check import Results, run_rows\nfrom"
        " pathlib import Path\nfrom rows import Row\ntable = {name: Row(name, '',"
        " f'faulty:{name}', 1) for name in ('works', 'kills_the_check',"
        f" 'fails')}}\nrun_rows(list(table), Results(Path({str(tmp_path)!r})), smoke=True,"
        " minutes=1, table=table)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"row": "fails", "verd')  # a line that was not finished
    results = modules.check.Results(tmp_path)
    assert [*results.rows] == ["works"] and (tmp_path / "table.md").is_file()
    results.add({"row": "device", "verdict": "good"})
    results.add({"row": "seeds", "verdict": "weak"})
    chosen = modules.check.chosen_rows((), modules.check.Results(tmp_path), again=True)
    assert "device" not in chosen and chosen[:2] == ["exactness", "seeds"]
    assert modules.check.chosen_rows(("engine", "device"), results, again=False) == [
        "device",
        "engine",
    ]


def event(name, start, duration, **stats):
    return SimpleNamespace(
        name=name, start_ns=start, duration_ns=duration, stats=list(stats.items())
    )


def test_a_trace_of_a_gpu_is_reduced_to_kernels_and_gaps(modules):
    """Two streams that overlap, beside a line of the host and a line of modules, which are not
    kernels.
    """
    computed = [event("gemm", 1000, 500), event("gemm", 2000, 500), event("add", 2600, 100)]
    streams = [
        SimpleNamespace(name="Stream #7(Compute)", events=computed),
        SimpleNamespace(name="Stream #9(Memcpy)", events=[event("copy", 1400, 300)]),
        SimpleNamespace(name="XLA Modules", events=[event("jit_step", 900, 5000)]),
    ]  # fmt: skip
    host = SimpleNamespace(
        name="/host:CPU",
        lines=[SimpleNamespace(name="python", events=[event("step", 0, 9000, hlo_op="x")])],
    )
    found = modules.traces.device_times(
        SimpleNamespace(planes=[SimpleNamespace(name="/device:GPU:0", lines=streams), host])
    )
    assert (
        found.kernels == {"gemm": (2, 0.001), "add": (1, 0.0001), "copy": (1, 0.0003)}
        and found.calls == 4
    )
    assert found.span_ms == pytest.approx(1.7e-3) and found.busy_ms == pytest.approx(1.3e-3)
    assert found.gaps == pytest.approx(4 / 17)
    lines = list(modules.traces.report_lines(found, 2))
    assert "gaps 23.5%, 2.0 kernels each" in lines[0] and lines[4] == "| gemm | 2 | 0.001 | 71.4% |"


def test_intervals_are_united(modules):
    random = np.random.default_rng(0)
    for _ in range(50):
        starts, lengths = random.integers(0, 60, 9), random.integers(1, 12, 9)
        busy, first, last = modules.traces.covered(
            [*zip(starts.tolist(), (starts + lengths).tolist(), strict=True)]
        )
        cells = {
            cell
            for start, length in zip(starts, lengths, strict=True)
            for cell in range(start, start + length)
        }
        assert (busy, first, last) == (len(cells), min(cells), max(cells) + 1)
    assert modules.traces.covered([]) == (0, 0, 0)


def test_a_trace_of_this_cpu_has_the_operations_of_a_program(modules):
    import jax
    import jax.numpy as jnp

    program = jax.jit(lambda x: jnp.sin(x @ x).sum())
    x = jnp.ones((64, 64))
    program(x).block_until_ready()
    found = modules.traces.device_times(
        modules.traces.trace(lambda: [program(x) for _ in range(3)])
    )
    assert found.calls >= 3 and 0 < found.busy_ms <= found.span_ms
    assert all(calls % 3 == 0 for calls, _ in found.kernels.values())


def test_the_image_is_checked(monkeypatch):
    monkeypatch.syspath_prepend(str(CHECK))
    import image

    assert (
        image.numbers("0.12.0.1") == (0, 12, 0, 1)
        and image.numbers("2.14.0rc1") == (2, 14, 0)
        and image.numbers("5+cu13") == (5,)
    )
    monkeypatch.setattr(image, "REQUIRED", {"numpy": "1000", "no_such_module": "1"})
    found = image.problems()
    assert (
        any(text.startswith("numpy>=1000 (this is ") for text in found)
        and "no_such_module>=1" in found
    )
