"""`verify` reports every change of a run beyond damaged files. Nothing is trained here."""

import hashlib
import os
import shutil

import pytest

from dantinox.cli import main
from dantinox.config import Config
from dantinox.run import (
    DamagedFile,
    RunDirectory,
    find_log_damage,
    find_step_damage,
    manifest,
    save_config,
    saved_steps,
    verify_files,
    verify_run,
    write_file,
)
from dantinox.run.manifest import MANIFEST, hash_file, read_manifest, write_step_manifest
from tests.error_texts import ERRORS


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    """The files of a run with two checkpoints."""
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    save_config(run, Config())
    for path in (run.tokenizer, run.weights):
        write_file(run.path, path.name, f"content of {path.name}")
    log = run.log(Config())
    log.write_text("step\n8\n12\n")
    for step, size in ((8, 7), (12, 10)):
        folder = run.checkpoints / str(step)
        (folder / "state").mkdir(parents=True)
        (folder / "state" / "d").write_text(f"numbers of step {step}")
        write_step_manifest(folder, {"config_sha256": "c"}, {log: size})
    assert verify_run(run).damage == []
    return run


def rename(run):
    (run.checkpoints / "12").rename(run.checkpoints / "15")


def exchange_steps(run):
    for old, new in (("12", "x"), ("8", "12"), ("x", "8")):
        (run.checkpoints / old).rename(run.checkpoints / new)


def manifest_of_another_step(run):
    shutil.copy(run.checkpoints / "8" / MANIFEST, run.checkpoints / "12" / MANIFEST)


def manifest_of_the_run(run):
    shutil.copy(run.manifest, run.checkpoints / "12" / MANIFEST)


def manifest_of_a_step(run):
    shutil.copy(run.checkpoints / "12" / MANIFEST, run.manifest)


def upper_case(run):
    content = run.manifest.read_text()
    run.manifest.write_text(content[:-65] + content[-65:].upper())


def last_line_twice(run):
    content = run.manifest.read_text()
    run.manifest.write_text(content + content[-65:])


def appended(path_of, more):
    def change(run):
        with open(path_of(run), "ab") as file:
            file.write(more)

    return change


def without_its_last_byte(run):
    os.truncate(run.manifest, run.manifest.stat().st_size - 1)


def a_link_to_a_folder(run):
    (run.path / "elsewhere").mkdir()
    (run.path / "elsewhere" / "d2").write_text("more numbers")
    (run.checkpoints / "12" / "more").symlink_to(run.path / "elsewhere")


def put_in_place_of(path_of, make):
    def change(run):
        path_of(run).unlink()
        make(path_of(run))

    return change


def state(run):
    return run.checkpoints / "12" / "state" / "d"


def step_manifest(run):
    return run.checkpoints / "12" / MANIFEST


def an_endless_link(path):
    path.symlink_to("/dev/zero")


def a_ring(path):
    path.symlink_to(path)


def new_file(name):
    def change(run):
        path = run.checkpoints / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("stray")

    return change


def no_folder(run):
    shutil.rmtree(run.checkpoints)
    run.checkpoints.write_text("")


HOSTILE = {
    "a step renamed": (rename, "15/manifest.txt belongs to step 12"),
    "two steps exchanged": (exchange_steps, "12/manifest.txt belongs to step 8"),
    "manifest of another step": (manifest_of_another_step, "12/manifest.txt belongs to step 8"),
    "manifest of the run in a step": (manifest_of_the_run, "12/manifest.txt belongs to a run"),
    "manifest of a step in the run": (manifest_of_a_step, "run/manifest.txt belongs to step 12"),
    "upper case": (upper_case, "its last line is not the SHA-256"),
    "last line twice": (last_line_twice, "its last line is not the SHA-256"),
    "no line end": (without_its_last_byte, "its last line is not the SHA-256"),
    "an empty line more": (
        appended(lambda run: run.manifest, b"\n"),
        "its last line is not the SHA-256",
    ),
    "white space in the settings": (
        appended(lambda run: run.config, b" \n"),
        "config.yaml is damaged: it has",
    ),
    "bytes behind the weights": (
        appended(lambda run: run.weights, b"\0"),
        "model_weights.msgpack is damaged: it has",
    ),
    "bytes behind the numbers": (appended(state, b"\0"), "12/state/d is damaged: it has"),
    "a pipe for numbers": (put_in_place_of(state, os.mkfifo), "12/state/d is not a regular file"),
    "a pipe for a manifest": (
        put_in_place_of(step_manifest, os.mkfifo),
        "12/manifest.txt is not a regular file",
    ),
    "a folder for a manifest": (
        put_in_place_of(step_manifest, os.mkdir),
        "12/manifest.txt is not a regular file",
    ),
    "a device for numbers": (
        put_in_place_of(state, an_endless_link),
        "12/state/d is not a regular file",
    ),
    "a device for the weights": (
        put_in_place_of(lambda run: run.weights, an_endless_link),
        "weights.msgpack is not a regular file",
    ),
    "a device for the manifest": (
        put_in_place_of(lambda run: run.manifest, an_endless_link),
        "manifest.txt is not a regular file",
    ),
    "a link to itself": (put_in_place_of(state, a_ring), "12/state/d is not a regular file"),
    "a pipe for a log": (
        put_in_place_of(lambda run: run.log(Config()), os.mkfifo),
        "training_log.csv is not a regular file",
    ),
    "a link to a folder": (a_link_to_a_folder, "12/more is not listed in the manifest"),
    "a stray file in a step": (new_file("12/stray"), "12/stray is not listed in the manifest"),
    "a manifest deeper in a step": (
        new_file("12/state/manifest.txt"),
        "12/state/manifest.txt is not listed in the manifest",
    ),
    "a stray file beside steps": (
        new_file("stray"),
        "checkpoints/stray is not listed in the manifest",
    ),
    "a file in place of a step": (new_file("20"), "checkpoints/20 is not listed in the manifest"),
    "a stray folder": (new_file("best/state"), "checkpoints/best is not listed in the manifest"),
    "a step by another spelling": (
        new_file("012/state"),
        "checkpoints/012 is not listed in the manifest",
    ),
    "a step in other digits": (
        new_file("１２/state"),
        "checkpoints/１２ is not listed in the manifest",
    ),
    "a folder in place of a mark": (
        new_file("12.saving/a"),
        "checkpoints/12.saving is not listed in the manifest",
    ),
    "a file in place of all steps": (no_folder, "checkpoints is not a directory"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_every_change_is_reported_with_its_file(run, name, capsys):
    change, sentence = HOSTILE[name]
    change(run)
    problems = verify_run(run).damage
    assert any(sentence in problem for problem in problems), problems
    assert main(["verify", str(run.path)]) == 1
    assert sentence in capsys.readouterr().out


def test_saved_steps_ignores_other_entries(run):
    for name in ("012", "１２", "+3", "-1", "best"):
        (run.checkpoints / name).mkdir()
    assert saved_steps(run.checkpoints) == [12, 8]


def test_a_link_to_equal_content_is_not_damage(run):
    state(run).rename(run.path / "kept")
    state(run).symlink_to(run.path / "kept")
    assert verify_run(run).damage == []


def test_files_of_a_killed_save_are_not_damage(run):
    (run.checkpoints / "16.saving").touch()
    (run.checkpoints / "16.orbax-checkpoint-tmp").mkdir()
    found = verify_run(run)
    assert found.damage == []
    assert found.remarks == [
        f"{run.checkpoints / '16'} is unfinished: it is being"
        " saved, or the run ended during the save"
    ]


def test_log_rows_after_the_newest_checkpoint_are_a_remark(run):
    appended(lambda run: run.log(Config()), b"13\n")(run)
    found = verify_run(run)
    assert found.damage == []
    assert found.remarks == [f"{run.log(Config())} has 3 bytes more than when step 12 was saved"]


def test_an_unreadable_file_is_not_reported_as_damaged(run, monkeypatch):
    """Missing permissions or too many open files never cause a checkpoint to be skipped or set
    aside.
    """

    def denied(path, *arguments, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("dantinox.run.manifest.open", denied, raising=False)
    with pytest.raises(Exception, match=f"cannot read {state(run)}: Permission denied") as raised:
        list(find_step_damage(run.checkpoints / "12"))
    assert not isinstance(raised.value, DamagedFile)
    assert any("d: Permission denied" in problem for problem in verify_run(run).damage)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{}", '{"format": 2}', '{"format": 1}', '{"format": 1, "files": []}', "{"],
)
def test_an_invalid_manifest_raises_one_sentence(run, text):
    """The last line is valid: the file was edited on purpose, or written by another version."""
    line = f"{text}\n"
    for path in (run.manifest, step_manifest(run)):
        path.write_text(line + hashlib.sha256(line.encode()).hexdigest() + "\n")
        assert any(str(path) in problem for problem in verify_run(run).damage)
    with pytest.raises(Exception, match=ERRORS["manifest_txt_is_damaged_has"]):
        read_manifest(run.manifest)
    with pytest.raises(DamagedFile if "2" not in text else Exception):
        list(find_log_damage(run.path, run.checkpoints / "12"))


def test_a_running_training_is_not_reported_as_damaged(run, monkeypatch):
    """Weights may be replaced between reading the manifest and the weights; a step may be deleted
    while it is read.
    """
    done = []

    def read(path, size=None):
        if path == run.weights and not done:
            done.append(path)
            write_file(run.path, path.name, "better weights")
        if path.parent.name == "state" and "8" in path.parts:
            shutil.rmtree(run.checkpoints / "8")
        return hash_file(path, size)

    monkeypatch.setattr(verify_files, "hash_file", read)
    monkeypatch.setattr(manifest, "hash_file", read)
    monkeypatch.setattr(manifest.describe_damage, "__defaults__", (read, False))
    found = verify_run(run)
    assert found.damage == [] and done and not (run.checkpoints / "8").exists()
    assert (
        found.files == 3 + 2 + 2
    )  # settings, tokenizer, weights; a file and a manifest in each step
