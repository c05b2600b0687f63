"""Report and plot of the comparison of sampling methods, from a handwritten record."""

import csv
import io
import json
import re
import struct
import sys
from dataclasses import asdict, replace

import pytest

from dantinox.config import UserError
from dantinox.lab.studies.sampling_study import (
    Difference,
    MethodResult,
    SamplingStudy,
    TemperaturePoint,
)
from dantinox.lab.studies.sampling_view import (
    HEADINGS,
    conclusions,
    draw_sampling,
    sampling_blocks,
)
from dantinox.lab.studies.statistics import Interval
from dantinox.report.document import study_files, to_csv, to_lines, to_markdown
from dantinox.report.plots import save_files
from tests.error_texts import ERRORS

FILES = ["sampling.csv", "sampling.json", "sampling.md", "sampling.png"]
PLAIN = ("bits_per_byte", "diversity", "distinct_1", "distinct_2", "distinct_3", "rep_4")


def method(name, at, tuned=None, at_edge=False, speed=None, self_bleu=True, excess=True):
    """Returns a method with measures near `at` and different intervals."""
    names = (*(["excess"] if excess else []), *PLAIN, *(["self_bleu"] if self_bleu else []))
    measures = {
        key: Interval(at + i / 7, at + i / 7 - 0.0123, at + i / 7 + 0.0337)
        for i, key in enumerate(names)
    }
    return MethodResult(
        name,
        tuned or {},
        at_edge,
        [],
        measures,
        speed and Interval(speed, speed - 10.5, speed + 20.25),
    )


def pair(a, b, difference):
    differences = {
        "bits_per_byte": Interval(0.1, 0.0, 0.2),
        "diversity": Interval(-0.01, -0.02, 0.0),
    }
    return Difference(a, b, differences | ({"excess": Interval(*difference)} if difference else {}))


@pytest.fixture
def record():
    return SamplingStudy(
        run="/somewhere/runs/dante",
        reference=None,
        device="cpu",
        unit="characters",
        prompt_tokens=64,
        prompts=40,
        seeds=3,
        tokens=128,
        trials=5,
        shares={
            "greedy": 0.125,
            "clarify": 0.0625,
            "explore": 0.25,
            "resample": 0.0,
            "adaptive": 0.5625,
        },
        methods=[
            method("human", 0.2, self_bleu=False),
            method("greedy", 0.1, speed=3000.0, excess=False),
            method("min_p", 0.3, {"min_p": 0.0631}, speed=2900.0),
            method(
                "router_calibrated",
                0.35,
                {"candidates": 1, "base_temperature": 0.92},
                at_edge=True,
                speed=2500.0,
            ),
            method("router_random", 0.33, {"candidates": 2}),
        ],
        ruler=[
            TemperaturePoint(temperature=t, diversity=0.2 + t / 4, bits_per_byte=0.1 + t / 3)
            for t in (0.3, 0.8, 1.3)
        ],
        comparisons=[
            pair("router_calibrated", "min_p", [0.1234, 0.05, 0.2]),
            pair("router_calibrated", "router_random", [-0.004, -0.05, 0.04]),
        ],
    )


def test_conclusions_contain_their_numbers(record):
    assert conclusions(record) == [
        (
            "router_calibrated is worse than min_p (+0.123 bits per byte at equal diversity, 95 %"
            " interval +0.050 to +0.200, reference: the model itself)."
        ),
        (
            "router_calibrated is not distinguishable from router_random (-0.004 bits per byte at"
            " equal diversity, 95 % interval -0.050 to +0.040, reference: the model itself)."
        ),
    ]
    record = replace(
        record,
        reference="/somewhere/runs/large",
        comparisons=[pair("a", "b", [-0.2, -0.3, -0.1]), pair("a", "c", None)],
    )
    better, unknown = conclusions(record)
    assert better.startswith("a is better than b (-0.200 bits") and better.endswith(
        "reference: large)."
    )
    assert (
        unknown
        == "a and c cannot be compared: temperature sampling did not reach the diversity of one of"
        " them."
    )


def test_description_warns_if_the_model_is_its_own_reference(record):
    warning = (
        "The reference is the model itself, which favors its own most likely texts: low"
        " temperatures look better"
    )
    assert warning in " ".join(to_lines(sampling_blocks(record), 100)) and warning in to_markdown(
        sampling_blocks(record)
    )
    record = replace(record, reference="/somewhere/runs/large")
    text = to_markdown(sampling_blocks(record))
    assert "The reference is /somewhere/runs/large." in text and "itself, which" not in text


def test_table_has_a_line_per_method(record):
    lines = list(to_lines(sampling_blocks(record), 400))
    table = lines[2:8]
    assert table[0].split() == ["method", "setting", *HEADINGS.values(), "tok/s"]
    cells = {line.split()[0]: re.split(r"\s{2,}", line) for line in table[1:]}
    assert list(cells) == ["human", "greedy", "min_p", "router_calibrated", "router_random"]
    assert cells["min_p"] == [
        "min_p", "min_p 0.0631", "0.300 ±0.023", "0.443 ±0.023", "0.586 ±0.023", "0.729 ±0.023",
        "0.871 ±0.023", "1.014 ±0.023", "1.157 ±0.023", "1.300 ±0.023", "2900",
    ]  # fmt: skip
    assert (
        cells["greedy"][1:3] == ["–", "–"] and cells["greedy"][3] == "0.100 ±0.023"
    )  # it has no excess
    assert cells["human"][-2:] == ["–", "–"] and cells["router_random"][-1] == "–"
    assert cells["router_calibrated"][1] == "candidates 1, base_temperature 0.92 *"


@pytest.mark.parametrize("width", [60, 100, 140])
def test_columns_that_do_not_fit_are_printed_below(record, width):
    lines = list(to_lines(sampling_blocks(record), width))
    assert max(map(len, lines)) <= max(width, 60 + 14)
    text = "\n".join(lines)
    assert all(text.count(heading) >= 1 for heading in HEADINGS.values())
    numbers = sum(line.count("±") for line in lines)
    assert numbers == sum(len(method.measures) for method in record.methods)


def test_csv_reads_back_exactly(record):
    rows = list(csv.DictReader(io.StringIO(to_csv(sampling_blocks(record)))))
    assert [row["method"] for row in rows] == [method.name for method in record.methods]
    for row, method in zip(rows, record.methods, strict=True):
        for key in (*HEADINGS, "tok_per_s"):
            numbers = method.tok_per_s if key == "tok_per_s" else method.measures.get(key)
            cells = [row[key + end] for end in ("", "_low", "_high")]
            assert (
                cells == ["", "", ""]
                if numbers is None
                else [float(cell) for cell in cells] == list(numbers)
            )
    assert rows[3]["setting"] == "candidates=1 base_temperature=0.92" and rows[3]["at_edge"] == "1"
    assert rows[0]["setting"] == "" and rows[2]["at_edge"] == "0"


def test_markdown_contains_tables_and_conclusions(record):
    text = to_markdown(sampling_blocks(record))
    assert text.startswith("# Sampling methods on dante\n")
    tables = [block.split("\n") for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 2 and [len(table) for table in tables] == [2 + 5, 2 + 2]
    for table in tables:
        assert len({line.count("|") for line in table}) == 1
    assert (
        "| min_p | min_p 0.0631 | 0.300 [0.288, 0.334] |" in tables[0][4]
        and "| 2900 [2890, 2920] |" in tables[0][4]
    )
    assert "| router_calibrated − min_p | +0.123 [+0.050, +0.200] |" in tables[1][2]
    assert all(f"* {sentence}" in text for sentence in conclusions(record))
    assert "greedy 12.5 %" in text and "of at most 5 trials on 40 other prompts" in text
    record = replace(record, comparisons=[], shares=None)
    assert to_markdown(sampling_blocks(record)).count(
        "\n| ---"
    ) == 1 and "router_random:" not in to_markdown(sampling_blocks(record))


def test_plot_is_a_png(record):
    pytest.importorskip("matplotlib")
    data = draw_sampling(record)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1200 and height > 600
    assert (
        draw_sampling(replace(record, methods=record.methods[:2]))[:4] == b"\x89PNG"
    )  # nothing tuned


def test_files(record, tmp_path):
    pytest.importorskip("matplotlib")
    save_files(
        tmp_path / "new" / "folder",
        study_files("sampling", record, list(sampling_blocks(record)), draw_sampling),
    )
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == FILES
    assert json.loads((tmp_path / "new" / "folder" / "sampling.json").read_text()) == json.loads(
        json.dumps(asdict(record))
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=ERRORS["cannot_write_file"]):
        save_files(
            tmp_path / "file" / "below",
            study_files("sampling", record, list(sampling_blocks(record)), draw_sampling),
        )


def test_without_matplotlib_other_files_are_written(record, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=ERRORS["plots_need_matplotlib_pip_install"]):
        save_files(
            tmp_path, study_files("sampling", record, list(sampling_blocks(record)), draw_sampling)
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES[:3]
