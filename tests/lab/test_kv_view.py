"""Report and plot of the comparison of compressed caches, from a handwritten record."""

import csv
import io
import json
import struct
import sys
from dataclasses import asdict, replace

import pytest

from dantinox.config import UserError
from dantinox.lab.studies.kv_study import CacheResult, KVStudy, RatioResults, SeedIntervals
from dantinox.lab.studies.kv_view import conclusions, draw_kv, kv_blocks, preconditions
from dantinox.lab.studies.statistics import Interval
from dantinox.report.document import study_files, to_csv, to_lines, to_markdown
from dantinox.report.plots import save_files
from tests.error_texts import ERRORS

FILES = ["kv.csv", "kv.json", "kv.md", "kv.png"]
TASKS = {"needle_aware": 96.0, "needle_agnostic": 41.4, "copy_aware": 88.0, "copy_agnostic": 12.0}


def scoped(value, half):
    seeds = [Interval(value + d, value + d - 1, value + d + 1) for d in (-1, 0, 1)]
    return SeedIntervals(Interval(value, value - half, value + half), seeds)


def method(name, ratio, dppl, tasks=True, gap_closed=(57.2, 50.0, 61.0)):
    """Returns a method with this change of perplexity; its other measures are constants."""
    oracle = name == "oracle"
    size = (
        {"bytes": None, "share": None, "slots": None}
        if oracle
        else {"bytes": 1_234_567, "share": 0.21, "slots": (24, 96)}
    )
    like = {"same": Interval(80.0, 70.0, 90.0), "diverges": 17.0, "tok_per_s": 1500.4}
    right = (
        {key: Interval(value, value - 3, min(100, value + 3)) for key, value in TASKS.items()}
        if tasks
        else {}
    )
    return CacheResult(
        name=name, ratio=ratio, **size, loss=2.5, dppl=scoped(dppl, 0.4), kl=scoped(0.0123, 0.001),
        top1=scoped(91.26, 0.8), gap_closed=gap_closed and Interval(*gap_closed),
        **({} if oracle else like), **right,
    )  # fmt: skip


def full(tasks=True):
    return method("full", 1, 0.0, tasks, gap_closed=None)


def against(verdict, value, seeds):
    found = SeedIntervals(
        Interval(value, value - 0.002, value + 0.002),
        [Interval(s, s - 0.001, s + 0.001) for s in seeds],
    )
    assert found.verdict == verdict
    return found


DPPL = {"streaming": 300.0, "uniform": 4.0, "entropy": 3.0, "oracle": -0.5}


@pytest.fixture
def record():
    return KVStudy(
        run="/somewhere/runs/recall", calibration="/somewhere/runs/recall/kv_entropy.json",
        device="cpu", dtype="float32", tokens=512, sequences=200, tasks=198, continued=24,
        free_tokens=64, overlapping=False, repeated=0.1234,
        long_range_gain=Interval(0.12, 0.1, 0.14),
        left_out=["loss: the calibration kv_entropy.json holds no loss"], full=full(),
        ratios=[
            RatioResults(
                ratio, [method(name, ratio, dppl * (1 - ratio)) for name, dppl in DPPL.items()],
                {"entropy": verdict}
            )
            for ratio, verdict in (
                (0.5, against("same", 0.0004, (0.003, -0.0005, 0.0005))),
                (0.2, against("better", -0.01, (-0.012, -0.01, -0.008))),
            )
        ],
        default_signal="entropy",
    )  # fmt: skip


def without_tasks(record):
    ratios = [
        replace(
            ratio,
            methods=[
                method(one.name, one.ratio, one.dppl.all[0], tasks=False) for one in ratio.methods
            ],
        )
        for ratio in record.ratios
    ]
    return replace(record, tasks=None, full=full(tasks=False), ratios=ratios)


def with_against(record, *against_uniform):
    ratios = [
        replace(ratio, against_uniform=found)
        for ratio, found in zip(record.ratios, against_uniform, strict=False)
    ]
    return replace(record, ratios=ratios)


def test_conclusions_compare_signals_with_uniform(record):
    same, better, default = conclusions(record)
    assert (
        same == "Ratio 0.5: entropy budgets do not beat uniform ones (+0.0004 nats per token, 95 %"
        " interval -0.0016 to +0.0024; the interval excludes 0 in 1 of 3 seeds)."
    )
    assert better.startswith(
        "Ratio 0.2: entropy budgets beat uniform ones (-0.0100 nats per token, 95 % interval"
        " -0.0120 to -0.0080;"
    )
    assert better.endswith("the interval excludes 0 in 3 of 3 seeds).")
    assert default.startswith("Signal by the rule of three seeds: entropy")
    record = replace(
        with_against(record, {"coverage": against("worse", 0.02, (0.02,) * 3)}),
        default_signal="uniform",
    )
    worse, default = conclusions(record)
    assert (
        worse.startswith("Ratio 0.5: coverage budgets are worse than uniform ones (+0.0200")
        and "seeds: uniform, because no" in default
    )
    assert conclusions(with_against(record, {})) == []


def test_inconclusive_measurements_are_flagged(record):
    gain, needle = preconditions(record)
    assert (
        gain
        == "Long-range gain: with only the nearest 64 keys visible, the loss changes by +0.120 nats"
        " per token (95 % interval +0.100 to +0.140)."
    )
    assert needle == "Needles found with the full cache: 96.0 % (95 % interval 93.0 to 99.0)."
    record = replace(
        record,
        long_range_gain=Interval(0.03, 0.02, 0.04),
        full=replace(record.full, needle_aware=Interval(94.5, 90.0, 98.0)),
    )
    gain, needle = preconditions(record)
    assert (
        "Below 0.05 distant tokens hardly matter" in gain
        and "Below 95 % the tasks measure the model" in needle
    )
    assert len(preconditions(without_tasks(record))) == 1


@pytest.mark.parametrize("width", [100, 80, 60])
def test_lines_fit_and_contain_every_number(record, width):
    lines = list(to_lines(kv_blocks(record), width))
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for part in (
        "Ratio 0.5",
        "Ratio 0.2",
        "+150 ±0",
        "+2.00 ±0.40",
        "-0.25 ±0.40",
        "91.3 ±0.8",
        "0.0123",
        "1,234,567",
        "1,500",
    ):
        assert part in text
    assert "96 / 41" in text and "88 / 12" in text and "Left out: loss: the calibration" in text
    assert "that overlap" not in text and "12.3 %" in text
    assert lines.count("Ratio 0.2") == 1


def test_table_fits_in_a_hundred_columns(record):
    lines = list(to_lines(kv_blocks(record), 100))
    at = lines.index("Ratio 0.5")
    heading, full, *rows = lines[at + 1 : at + 7]
    assert [row.split()[0] for row in (heading, full, *rows)] == [
        "method",
        "full",
        "streaming",
        "uniform",
        "entropy",
        "oracle",
    ]
    assert (
        heading.split()[-2:] == ["bytes", "tok/s"]
        and rows[-1].split()[-2:] == ["–", "–"]
        and lines[at + 7] == ""
    )
    assert "57" in rows[0].split() and full.split()[6] == "–"  # the full cache has no gap to close


def test_without_tasks_columns_are_dropped_with_a_reason(record):
    bare = replace(without_tasks(record), overlapping=True)
    text = "\n".join(to_lines(kv_blocks(bare), 100))
    assert (
        "needle %" not in text
        and "does not encode" in text
        and "200 sequences that overlap" in " ".join(text.split())
    )
    assert "needle" not in to_markdown(kv_blocks(bare)).split("## Ratio")[1]


def test_csv_reads_back_exactly(record):
    record.ratios[1].methods[1].kl.seeds[2] = Interval(0.1 + 0.2, 1 / 3, 2 / 3)
    rows = list(csv.DictReader(io.StringIO(to_csv(kv_blocks(record)))))
    assert [(row["ratio"], row["method"]) for row in rows[:2]] == [
        ("1", "full"),
        ("0.5", "streaming"),
    ]
    assert len(rows) == 10 and all(None not in row and None not in row.values() for row in rows)
    row = rows[7]
    assert (row["ratio"], row["method"], row["slots_least"], row["slots_most"], row["bytes"]) == (
        "0.2",
        "uniform",
        "24",
        "96",
        "1234567",
    )
    assert [float(row[f"kl_seed2{end}"]) for end in ("", "_low", "_high")] == [
        0.1 + 0.2,
        1 / 3,
        2 / 3,
    ]
    assert float(row["dppl"]) == 4.0 * 0.8 and float(row["needle_agnostic_low"]) == 41.4 - 3
    assert rows[4]["bytes"] == rows[4]["same"] == "" and rows[0]["gap_closed_high"] == ""


def test_markdown_has_intervals_and_seeds(record):
    text = to_markdown(kv_blocks(record))
    assert text.startswith("# Compressed caches on recall\n") and text.count("\n## Ratio ") == 2
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in tables}) == 2
    assert (
        "| uniform | +2.00 [+1.60, +2.40] | 0.0123 [0.0113, 0.0133] | 91.3 [90.5, 92.1] | 57 [50,"
        " 61] |" in text
    )
    assert "| uniform | 1.00 [0.00, 2.00] | 2.00 [1.00, 3.00] | 3.00 [2.00, 4.00] |" in text
    assert all(f"* {sentence}" in text for sentence in conclusions(record))
    assert "Conclusions" not in to_markdown(kv_blocks(with_against(record, {}, {})))


def test_plot_is_a_png(record):
    pytest.importorskip("matplotlib")
    for one in (record, without_tasks(record)):
        data = draw_kv(one)
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", data[16:24])
        assert width > 1200 and height > 600


def test_files(record, tmp_path):
    pytest.importorskip("matplotlib")
    save_files(
        tmp_path / "new" / "folder", study_files("kv", record, list(kv_blocks(record)), draw_kv)
    )
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == FILES
    assert json.loads((tmp_path / "new" / "folder" / "kv.json").read_text()) == json.loads(
        json.dumps(asdict(record))
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=ERRORS["cannot_write_file"]):
        save_files(
            tmp_path / "file" / "below", study_files("kv", record, list(kv_blocks(record)), draw_kv)
        )


def test_without_matplotlib_other_files_are_written(record, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=ERRORS["plots_need_matplotlib_pip_install"]):
        save_files(tmp_path, study_files("kv", record, list(kv_blocks(record)), draw_kv))
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES[:3]
