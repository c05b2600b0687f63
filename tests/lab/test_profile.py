"""A profile matches the trace, and gives the source lines of operations in the package."""

import gzip
import hashlib
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import dantinox
from dantinox import cli
from dantinox.config import build_config
from dantinox.lab.measure.hlo import Frame, instructions
from dantinox.lab.measure.profile import operation_kind, profile, rank_operations
from dantinox.run import RunDirectory, create_run, save_config, save_tokenizer
from dantinox.text import prepare_data

TEXT = """HloModule jit_step

FileNames
1 "/home/a.py"
2 "/x/dantinox/model/layers.py"
3 "/x/optax/clip.py"
4 "/x/dantinox/training/step.py"

FunctionNames
1 "<module>"
2 "Attention.__call__"
3 "Linear.__call__"
4 "clip.<locals>.update_fn"
5 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=20 end_line=20 column=1 end_column=2}
3 {file_name_id=2 function_name_id=3 line=32 end_line=32 column=1 end_column=2}
4 {file_name_id=4 function_name_id=5 line=99 end_line=99 column=1 end_column=2}
5 {file_name_id=3 function_name_id=4 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=2}
5 {file_location_id=5 parent_frame_id=5}

%fused (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %dot.2 = f32[8,4]{1,0} dot(%p, %p), metadata={op_name="jit(step)/transpose(jvp())/dot_general" stack_frame_id=3}
  ROOT %bitcast.1 = f32[8,4]{1,0:T(8,128)} bitcast(%dot.2)
}

ENTRY %main (a: f32[8,4]) -> (f32[8,4], f32[8,4]) {
  %a = f32[8,4]{1,0} parameter(0), metadata={op_name="state.parameters[\\'a\\']"}
  %copy.4 = f32[8,4]{0,1} copy(%a)
  %ynn_fusion.3 = f32[8,4]{1,0} fusion(%copy.4), kind=kCustom, calls=%fused, metadata={op_name="jit(step)/add" stack_frame_id=4}
  %reduce.1 = (f32[8]{0}, /*index=1*/s32[]) reduce(%ynn_fusion.3, %a), metadata={op_name="jit(step)/max" stack_frame_id=5}
  %while.5 = (f32[8]{0}) while(%reduce.1), condition=%c, body=%b
  ROOT %gemm.1 = f32[8,4]{1,0} custom-call(%a), custom_call_target="__cublas$gemm"
}
"""
LINEAR = Frame("/x/dantinox/model/layers.py", "Linear.__call__", 32)


def test_instructions_of_a_program():
    found = instructions(TEXT)
    assert found.keys() >= {"ynn_fusion.3", "reduce.1", "while.5", "dot.2", "gemm.1"}
    fused = found["ynn_fusion.3"]
    assert fused.opcode == "fusion" and fused.inside == ("parameter", "dot", "bitcast")
    assert [frame.line for frame in fused.frames] == [3, 20, 32] and fused.frames[-1] == LINEAR, (
        "the frames of the matrix multiplication"
    )
    assert found["copy.4"].frames == fused.frames, "the frames of its reader"
    assert (
        found["reduce.1"].opcode == "reduce"
        and found["reduce.1"].frames[-1].function == "clip.<locals>.update_fn"
    )
    assert [operation_kind(found[name], name) for name in ("ynn_fusion.3", "reduce.1", "copy.4",
                                                           "gemm.1")] == [
        "matmul", "reduction", "copy", "matmul",
    ]  # fmt: skip


def test_operations_are_grouped_by_origin_without_loops():
    layers = instructions(TEXT) | {"ynn_fusion.7": instructions(TEXT)["ynn_fusion.3"]}
    times = {
        "ynn_fusion.3": [1e6, 2e6],
        "ynn_fusion.7": [5e5, 5e5],
        "reduce.1": [4e6],
        "while.5": [9e9],
    }
    runs = {("jit_step", "1"): times, ("jit_step", "2"): {"unknown.2": [2e6] * 4}}
    found = rank_operations(runs, {"jit_step": [{}, layers]})
    assert [(o.name, o.kind, o.place, o.source, o.ms, o.share, o.calls) for o in found] == [
        ("unknown", "–", "–", "–", 8.0, 0.5, 4),
        (
            "ynn_fusion",
            "matmul",
            "Attention › Linear (backward)",
            "model/layers.py:32",
            4.0,
            0.25,
            4,
        ),
        ("reduce", "reduction", "clip.update_fn", "training/step.py:99", 4.0, 0.25, 1),
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with settings and a tokenizer, which suffice to build a training step."""
    folder = tmp_path_factory.mktemp("profile")
    (folder / "text.txt").write_text("Nel mezzo del cammin di nostra vita\n" * 40)
    changes = {
        "model.dim": 32, "model.n_heads": 2, "model.num_blocks": 2, "model.max_context": 16,
        "training.batch_size": 4, "tokenizer.tokenizer_type": "byte",
        "data.path": str(folder / "text.txt"),
    }  # fmt: skip
    config, made = build_config({}, changes), create_run(folder / "run")
    save_tokenizer(made, prepare_data(config, made.data)[0].to_json())
    save_config(made, config)
    return made


PACKAGE = Path(dantinox.__file__).parent


def contents(run: RunDirectory):
    files = (path for path in run.path.rglob("*") if path.is_file() and "profile" not in path.parts)
    return {path: hashlib.sha256(path.read_bytes()).digest() for path in files}


@pytest.mark.slow
def test_training_is_traced_without_changing_its_run(run, capsys):
    before = contents(run)
    assert cli.main(["profile", str(run.path), "--steps", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    operations = found["operations"]
    assert contents(run) == before, "the run has not changed"
    assert (found["count"], found["folder"]) == (3, str(run.path / "profile"))
    shares = [operation["share"] for operation in operations]
    assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True)
    assert "matmul" in [
        operation["kind"] for operation in operations
    ]  # the rank depends on the machine
    # The JSON trace for Perfetto: everything except loops is counted.
    (trace,) = (run.path / "profile").rglob("*.trace.json.gz")
    events = [
        event
        for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        if "hlo_op" in event.get("args", {})
    ]
    counted = [
        event for event in events if not re.match(r"(while|call|conditional)\b", event["name"])
    ]
    assert sum(operation["ms"] for operation in operations) == pytest.approx(
        sum(e["dur"] for e in counted) / 1e3, rel=1e-3
    )
    assert sum(operation["calls"] for operation in operations) == len(counted) > 100
    known = {operation["place"]: operation for operation in operations if operation["place"] != "–"}
    # Which operations are fused, and so named after another one, depends on the CPU. Matrix
    # multiplications are never dropped.
    assert {"GatedFeedForward › Linear", "GatedFeedForward › Linear (backward)"} <= known.keys()
    assert known["GatedFeedForward › Linear"]["calls"] % 3 == 0, (
        "the three steps run the same program"
    )
    for operation in known.values():
        file, _, line = operation["source"].partition(":")
        lines = (PACKAGE / file).read_text(encoding="utf-8").splitlines()
        assert 0 < int(line) <= len(lines), operation
    assert {"model", "training"} <= {
        operation["source"].partition("/")[0] for operation in known.values()
    }


@pytest.mark.slow
def test_generation_operations_have_their_part_of_the_model(run_dir, tmp_path, capsys):
    """This must hold even if an earlier program of the same process has traced equal layers."""
    dantinox.load(run_dir).generate("a", max_new_tokens=2)
    flags = ["--generate", "--steps", "2", "--out", str(tmp_path), "--json"]
    assert cli.main(["profile", str(run_dir), *flags]) == 0
    known = {one["place"]: one for one in json.loads(capsys.readouterr().out)["operations"]}
    assert {"Attention › Linear", "GatedFeedForward › Linear"} <= known.keys()
    assert known["Attention › Linear"]["source"].startswith("model/layers.py:")
    sources = {one["source"].partition(":")[0] for one in known.values()}
    assert "model/transformer.py" not in {
        known[place]["source"].partition(":")[0] for place in known if "Linear" in place
    }
    assert any(source.startswith("sampling/") for source in sources)


def test_errors_of_a_trace_are_one_sentence(run, tmp_path, capsys):
    for flags, message in (
        (["quickstart", "--generate"], "--generate needs a run directory, got quickstart"),
        ([str(run.path), "--steps", "0"], "--steps must be in [1, 1000], got 0"),
        ([str(run.path), "--steps", "9" * 5000], "must have at most 30 digits, got 5000"),
        ([str(run.path), "--steps", "1001"], "--steps must be in [1, 1000], got 1001"),
        ([str(run.path), "--generate", "--steps", "9" * 30], "--steps must be in [1, 1000], got"),
        ([str(tmp_path / "no.yaml")], "no config file at"),
        ([str(tmp_path)], "no config file at"),
        ([str(run.path), "--generate"], "has no weights yet"),
        ([str(run.path), "--out", "/dev/null/x"], "--out cannot write into"),
    ):
        assert cli.main(["profile", *flags]) == 2
        assert message in capsys.readouterr().err


def test_traces_of_the_same_second_are_found(tmp_path):
    """The profiler names a trace by the second, so three quick traces share at least one path."""
    add = jax.jit(lambda x: x + x @ x)
    add(jnp.ones((64, 64))).block_until_ready()
    for _ in range(3):
        assert profile(lambda: add(jnp.ones((64, 64))), 1, tmp_path).operations
