"""`dantinox runs`: the state, losses and settings of runs that are written by hand."""

import fcntl
import json

import pytest

from dantinox.cli import main
from dantinox.config import build_config, dump_config
from dantinox.report import MetricsLog
from dantinox.run import RunDirectory


def write_run(path, rows, finished=True, lr=0.001, **settings):
    """Writes a run with one interval and one evaluation per row, 10 steps apart and 100 ms per
    step.
    """
    path.mkdir(parents=True)
    run = RunDirectory(path)
    run.config.write_text(dump_config(build_config({"training": {"lr": lr, **settings}})))
    (path / ".lock").touch()
    log = MetricsLog(path / "training_log.csv", run.metrics)
    for step, row in enumerate(rows, 1):
        log.event("interval", {"step": 10 * step, "train_loss": 9.0, "ms_per_step": 100.0})
        log.evaluation({"step": 10 * step} | row)
    if finished:
        (path / "model_summary.json").write_text(json.dumps({"steps": 10 * len(rows)}))
    return run


@pytest.fixture
def folder(tmp_path):
    losses = [{"val_loss": value} for value in (3.0, 1.0, 2.0)]
    write_run(tmp_path / "a", losses)
    write_run(tmp_path / "deep" / "b", losses[:1], finished=False, lr=0.002)
    write_run(tmp_path / "c", [{"val_reward": 0.25}, {"val_reward": 0.5}], lr=0.01)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "config.yaml").write_text("model: {dim: [}")
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / ".lock").touch()
    write_run(tmp_path / "f", [])
    (tmp_path / "f" / "model_weights.msgpack").touch()
    write_run(tmp_path / "g", []).metrics.write_text("{\n")
    (tmp_path / "no run").mkdir()
    return tmp_path


@pytest.fixture
def listed(capsys):
    def run(*argv):
        code = main(["runs", *map(str, argv)])
        return code, *capsys.readouterr()

    return run


def as_json(listed, *argv):
    code, out, err = listed(*argv, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)["runs"]


def test_states_and_losses(folder, listed):
    with open(folder / "a" / ".lock", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        runs = {run["name"]: run for run in as_json(listed, folder)}
    states = {name: run["state"] for name, run in runs.items()}
    assert states == {
        "a": "running", "deep/b": "stopped", "c": "finished", "d": "unreadable",
        "e": "failed start", "f": "untrained",
        "g": "unreadable",
    }  # fmt: skip
    expected = {
        "step": 30,
        "last": 2.0,
        "best": 1.0,
        "best_step": 20,
        "seconds": 3.0,
        "settings": {"training.lr": 0.001},
    }
    assert {name: runs["a"][name] for name in expected} == expected
    assert (runs["c"]["last"], runs["c"]["best"], runs["c"]["rewarded"]) == (0.5, 0.5, True)
    assert "line 1" in runs["d"]["problem"] and "metrics.jsonl" in runs["g"]["problem"]
    assert as_json(listed, folder, "--where", "name=a")[0]["state"] == "finished"


@pytest.mark.parametrize(
    ("name", "content", "state", "step"),
    [
        ("training_log.csv", "step,val_loss,val_reward\n1e400,1,1\n", "finished", 30),
        ("metrics.jsonl", '{"kind": "interval", "step": null}\n', "finished", 30),
        ("model_summary.json", "[" * 100_000, "unreadable", 30),
        ("model_summary.json", '{"steps": 1' + "0" * 400 + "}", "unreadable", 30),
    ],
)
def test_damaged_files_do_not_end_the_list(tmp_path, listed, name, content, state, step):
    run = write_run(tmp_path / "a", [{"val_loss": 1.0}] * 3)
    (run.path / name).write_text(content)
    (found,) = as_json(listed, tmp_path)
    assert found["state"] == state and found["step"] == (step if state == "finished" else None)


def test_order_and_conditions(folder, listed):
    def names(*argv):
        return [run["name"] for run in as_json(listed, folder, *argv)]

    assert names("--where", "state=finished") == [
        "c",
        "a",
    ]  # the loss that training minimizes is −reward
    assert names("--sort", "training.lr")[-3:] == ["d", "e", "g"]
    assert names("--sort", "lr", "--where", "lr=0.002") == ["deep/b"]
    assert names("--where", "lr=2e-3", "--where", "state=finished") == []
    without_adapters = as_json(listed, folder, "--where", "lora.rank=null")
    assert without_adapters and all(run["settings"] for run in without_adapters)
    assert names("--sort", "name") == ["a", "c", "d", "deep/b", "e", "f", "g"]


def test_the_table(folder, listed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = listed(folder)
    head, *rows = out.splitlines()
    assert code == 0 and head.split() == [
        "run",
        "state",
        "step",
        "last",
        "best",
        "at",
        "step",
        "time",
        "lr",
    ]
    assert ["a", "finished", "30", "2.0000", "1.0000", "20", "3s", "0.001"] in [
        row.split() for row in rows
    ]
    assert any(row.startswith("d: ") for row in rows)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--sort", "lrr"], ["--sort lrr is not a column", "training.lr"]),
        (["--where", "lr"], ["--where must be KEY=VALUE, got 'lr'"]),
        (["--where", "seed=1"], ["training.seed or generation.seed"]),
    ],
)
def test_mistakes(folder, listed, argv, parts):
    code, out, err = listed(folder, *argv)
    assert (
        (code, out) == (2, "") and err.startswith("error: ") and all(part in err for part in parts)
    )
    code, _, err = listed(folder / "nowhere")
    assert code == 2 and "no folder at" in err
