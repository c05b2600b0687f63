"""The run directory: paths, locks, and one-sentence errors."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dantinox.config import UserError, build_config
from dantinox.run import (
    RunDirectory,
    accept_run,
    clear_failed_start,
    create_run,
    directory,
    load_run_config,
    newest_run,
    open_base,
    open_run,
    save_config,
)
from dantinox.run.directory import check_new_run, check_resumable
from tests.error_texts import ERRORS

from .small import sentence


def test_paths_are_absolute_and_follow_the_logging_section(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = create_run("runs/x")
    config = build_config({"logging": {"log_file": "log.csv"}})
    assert run.path == tmp_path / "runs" / "x"
    assert (run.log(config), run.summary(config)) == (
        run.path / "log.csv",
        run.path / "model_summary.json",
    )


def test_two_runs_in_one_second_get_two_directories(tmp_path, monkeypatch):
    monkeypatch.setattr(directory.time, "strftime", lambda _: "run_20260102_030405")
    monkeypatch.chdir(tmp_path)
    names = ["run_20260102_030405", "run_20260102_030405_2", "run_20260102_030405_3"]
    assert [create_run().path for _ in names] == [tmp_path / "runs" / name for name in names]


def test_a_used_directory_needs_resume(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    assert "--resume" in sentence(create_run, tmp_path)


def test_a_directory_with_only_a_lock_file_is_new(tmp_path):
    (tmp_path / ".lock").touch()
    assert create_run(tmp_path).path == tmp_path


STARTED = [
    ".lock",
    "data/.lock",
    "data/.tokens.tmp",
    "data/.tokens.marks.tmp",
    "data/tokens.json",
    "data/tokens-0123.bin",
]
STARTED += [
    "data/.tokens.partial",
    "data/.tokens.partial.marks",
    "data/.tokens.partial.json",
    "data/.tokens.tokenizer.json",
]
STARTED += [
    "data/.dataset-0.jsonl",
    "manifest.txt",
    "tokenizer.json",
    ".config.yaml.tmp",
    "chat_template.jinja",
]


def fill(folder, names):
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).touch()


def test_a_directory_with_what_a_killed_start_left_is_new(tmp_path):
    for count in range(1, len(STARTED) + 1):
        fill(tmp_path / str(count), STARTED[:count])
        run = create_run(tmp_path / str(count))
        clear_failed_start(run)
        left = {
            path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file()
        }
        assert left == {name for name in STARTED[:count] if name.startswith(("data/", "."))}


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "data/corpus.txt",
        "config.yaml",
        "metrics.jsonl",
        "checkpoints/4/a",
        "samples/a",
    ],
)
def test_a_directory_with_other_files_needs_resume(tmp_path, name):
    fill(tmp_path, [*STARTED, name])
    assert "is not empty" in sentence(create_run, tmp_path)
    (tmp_path / ".lock").unlink()
    (tmp_path / name).unlink()
    assert "is not empty" in sentence(create_run, tmp_path), "no start of a run has made it"


def test_weights_without_checkpoints_cannot_be_resumed(tmp_path):
    run = RunDirectory(tmp_path)
    run.config.write_text("model: {}")
    assert check_resumable(tmp_path) == run.config, "a start without weights"
    run.weights.touch()
    with pytest.raises(UserError, match=ERRORS["no_checkpoints_to_fine_tune"]):
        check_resumable(tmp_path)
    run.metrics.touch()
    assert check_resumable(tmp_path) == run.config, (
        "a training that was killed before its first checkpoint"
    )
    run.metrics.unlink()
    run.checkpoints.mkdir()
    assert check_resumable(tmp_path) == run.config


def test_a_check_of_a_new_run_creates_no_directory(tmp_path):
    check_new_run(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file", tmp_path / "file" / "b", "/proc/x"):
        with pytest.raises(UserError):
            check_new_run(path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_existing_file_raises_one_sentence(tmp_path):
    (tmp_path / "x").touch()
    assert "a file with this name exists" in sentence(create_run, tmp_path / "x")
    assert "Not a directory" in sentence(create_run, tmp_path / "x" / "y")


def test_open_run_names_missing_files_and_the_newest_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert newest_run() is None
    assert sentence(open_run, "runs/x") == "no run directory at runs/x"
    for age, name in ((100, "old"), (10, "new")):
        config = create_run(f"runs/{name}").config
        config.touch()
        os.utime(config, (time.time() - age,) * 2)
    assert newest_run() == Path("runs/new")
    assert sentence(open_run, "runs/x") == "no run directory at runs/x (the newest run is runs/new)"
    assert "has no weights yet: model_weights.msgpack is missing" in sentence(open_run, "runs/old")
    (tmp_path / "runs" / "empty").mkdir()
    assert "it has no config.yaml" in sentence(open_run, "runs/empty")
    Path("runs/old/model_weights.msgpack").touch()
    assert "manifest.txt is missing" in sentence(open_run, "runs/old")
    for name in ("empty", "none"):  # nothing is written into a folder that is not a run
        assert sentence(accept_run, RunDirectory(f"runs/{name}")) == (
            f"{tmp_path}/runs/{name} is not a run directory: it has no config.yaml"
        )
    assert list(Path("runs/empty").iterdir()) == [] and not Path("runs/none").exists()
    Path("runs/old/tokenizer.json").touch()
    assert accept_run(RunDirectory("runs/old")) == [
        "config.yaml",
        "model_weights.msgpack",
        "tokenizer.json",
    ]
    assert open_run("runs/old").path == tmp_path / "runs" / "old"
    Path("runs/old/tokenizer.json").write_text("{}")
    assert open_run("runs/old", check=False).path == tmp_path / "runs" / "old"
    assert "tokenizer.json is damaged" in sentence(open_run, "runs/old")
    Path("runs/old/best_model_weights.msgpack").touch()
    says = (
        "runs/old is a run of DantinoX 0 (it has best_model_weights.msgpack): convert it with"
        " `dantinox import runs/old"
    )
    assert sentence(open_run, "runs/old").startswith(says)


def test_a_base_that_no_setting_names(tmp_path, monkeypatch):
    """The current directory, which is a run here, is not the base."""
    base = RunDirectory(tmp_path / "base")
    base.path.mkdir()
    for path in (base.config, base.tokenizer, base.weights):
        path.touch()
    accept_run(base)
    monkeypatch.chdir(tmp_path / "base")
    with pytest.raises(UserError, match=r"^the base of .*/run is unknown: its config\.yaml has no"):
        open_base(None, RunDirectory(tmp_path / "run"))
    with pytest.raises(UserError, match=r"^no path of a teacher is given$"):
        open_base(None, role="teacher")


def test_the_token_files_of_a_run_without_data(tmp_path):
    run = RunDirectory(tmp_path)
    assert run.tokens() == []
    run.data.mkdir()
    for name in ("tokens.json", "tokens-ab.bin", ".tokens-cd", "reference.json"):
        (run.data / name).touch()
    assert run.tokens() == ["data/tokens-ab.bin", "data/tokens.json"]


def test_the_config_round_trips(tmp_path):
    config = build_config({"training": {"lr": 5e-4}, "generation": {"stop": ["\n\n", "1e5"]}})
    save_config(RunDirectory(tmp_path), config)
    assert load_run_config(RunDirectory(tmp_path)) == config


# --- lock

HOLDER = """
import sys, time
from dantinox.run import RunDirectory
from pathlib import Path
with RunDirectory(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_excludes_other_processes_and_ends_with_its_process(tmp_path):
    run = RunDirectory(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=ERRORS["another_process_is_working_on"]), run.lock():
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    (tmp_path / ".a.txt.17.tmp").touch()
    with run.lock():
        assert [p.name for p in tmp_path.iterdir()] == [".lock"]
    with run.lock():
        pass
