"""Every damage to a file of a run is detected."""

import shutil
from collections import Counter
from pathlib import Path

import jax
import pytest

from dantinox import load
from dantinox.config import UserError
from dantinox.run import RunDirectory, verify_run
from dantinox.training.checkpoint_store import Checkpoints
from dantinox.training.step import TrainStep
from tests.error_texts import ERRORS

from .damages import DAMAGES, STEPS, architecture, config, counterpart, files_of, launch, small_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def copied(finished, tmp_path):
    """The settings, and a copy of the run that the test may damage."""
    return finished[0], RunDirectory(shutil.copytree(finished[1].path, tmp_path / "copy"))


def abstract(settings, run):
    return TrainStep(settings, architecture(settings, run), STEPS).shapes


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("kinds", [2, pytest.param(len(DAMAGES), marks=pytest.mark.slow)])
def test_verify_names_every_damaged_file(finished, kinds):
    """Each file is damaged in `kinds` of the five ways; each way is applied to many files."""
    _, run = finished
    assert verify_run(run).damage == []
    files, found = files_of(run), 0
    assert {"12", "8"} <= {
        path.relative_to(run.checkpoints).parts[0]
        for path in files
        if run.checkpoints in path.parents
    }
    for number, path in enumerate(files):
        other = counterpart(path, files)
        before = path.read_bytes(), other.read_bytes()
        for place in range(kinds):
            name, apply_damage = list(DAMAGES.items())[(number + place) % len(DAMAGES)]
            apply_damage(path, other)
            problems = verify_run(run).damage
            assert any(str(path) in problem for problem in problems), (name, path, problems)
            path.write_bytes(before[0])
            other.write_bytes(before[1])
            found += 1
    assert found >= 40 * kinds
    assert verify_run(run).damage == []


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_checkpoint_is_set_aside_and_an_older_one_restored(copied, kind):
    settings, run = copied
    files = [path for path in files_of(run) if run.checkpoints / "12" in path.parents]
    largest = max(files, key=lambda path: path.stat().st_size)
    other = next(path for path in files_of(run) if run.checkpoints / "8" in path.parents)
    original = other.read_bytes()
    DAMAGES[kind](largest, other)
    other.write_bytes(original)
    before = contents(run.checkpoints / "12")
    restored = Checkpoints(run.checkpoints, 2, (run.log(settings), run.metrics)).restore(
        abstract(settings, run)
    )
    assert restored.step == 8 and int(restored.state.step) == 8
    assert str(largest) in restored.notes[0] and "going back to step 8" in restored.notes[0]
    aside = run.checkpoints / "damaged-12"
    assert contents(aside) == before
    assert any("set aside" in remark for remark in verify_run(run).remarks)


def test_run_resumed_from_an_older_step_ends_with_equal_weights(finished, copied):
    settings, run = copied
    (run.checkpoints / "12" / "_CHECKPOINT_METADATA").write_bytes(b"{}")
    (run.checkpoints / "damaged-12").mkdir()  # from an earlier damage
    notes = launch(settings, run.path, resume=True)
    assert (
        "resumed from step 8" in notes
        and f"the damaged step is kept in {run.checkpoints / 'damaged-12-2'}" in notes
    )
    assert run.weights.read_bytes() == finished[1].weights.read_bytes()
    assert verify_run(run).damage == [] and (run.checkpoints / "12").is_dir()


def test_damaged_older_step_does_not_prevent_resume(copied):
    settings, run = copied
    (run.checkpoints / "8" / "metrics" / "metrics").write_bytes(b"{")
    notes = launch(config(settings.data.path, training__steps=14), run.path, resume=True)
    assert "8/metrics/metrics is damaged" in notes and "resumed from step 12" in notes
    assert (run.checkpoints / "damaged-8").is_dir() and (run.checkpoints / "14").is_dir()


OTHER_ERRORS = {
    "memory": (
        jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 68719476736 bytes."
        ),
        "memory ran out",
    ),
    "Python's memory": (MemoryError("too much"), "memory ran out"),
    "devices": (ValueError("sharding"), "^sharding$"),
    "Ctrl-C": (KeyboardInterrupt("Ctrl-C"), "Ctrl-C"),
}


@pytest.mark.parametrize("kind", OTHER_ERRORS)
def test_other_errors_are_reported_and_delete_nothing(copied, monkeypatch, kind):
    """The run is unchanged, no step is set aside, and the next attempt succeeds."""
    (settings, run), (error, message) = copied, OTHER_ERRORS[kind]
    before = contents(run.path)

    def fails(*_, **__):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("orbax.checkpoint.Checkpointer.restore", fails)
        with pytest.raises(UserError if "memory" in message else type(error), match=message):
            launch(settings, run.path, resume=True)
    assert contents(run.path) == before
    assert "resumed from step 12" in launch(settings, run.path, resume=True)


def test_checkpoint_of_another_shape_is_rejected_with_both_shapes(copied):
    settings, run = copied
    other = abstract(config(settings.data.path, model__dim=32), run)
    with pytest.raises(UserError, match=ERRORS["has_the_shape_16_in"]):
        Checkpoints(run.checkpoints, 2).restore(other)
    other = abstract(config(settings.data.path, training__optimizer="lion", training__ema=0.9), run)
    with pytest.raises(UserError, match=ERRORS["has_no_such_array_the"]):
        Checkpoints(run.checkpoints, 2).restore(other)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["12", "8"]


def test_step_with_an_interrupted_save_is_not_damaged(copied):
    settings, run = copied
    (run.checkpoints / "12" / "manifest.txt").unlink()
    (run.checkpoints / "12.saving").touch()
    assert verify_run(run).damage == [] and "is unfinished" in "".join(verify_run(run).remarks)
    restored = Checkpoints(run.checkpoints, 2).restore(abstract(settings, run))
    assert restored.step == 8 and restored.notes == ()
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["8"]


def test_damaged_logs_are_rejected_and_missing_ones_reported(copied):
    settings, run = copied
    content = run.metrics.read_bytes()
    run.metrics.write_bytes(content.replace(b"1", b"2", 1))
    with pytest.raises(UserError, match=ERRORS["metrics_jsonl_is_damaged_its"]):
        launch(settings, run.path, resume=True)
    run.metrics.unlink()
    assert "metrics.jsonl is missing (compared up to step 12): starting a new one" in launch(
        settings, run.path, resume=True
    )


def test_missing_weights_are_exported_again_and_damaged_ones_rejected(copied):
    settings, run = copied
    content = bytearray(run.weights.read_bytes())
    content[len(content) // 2] ^= 1
    run.weights.write_bytes(content)
    for use in (lambda: load(run.path), lambda: launch(settings, run.path, resume=True)):
        with pytest.raises(UserError, match=ERRORS["model_weights_msgpack_is_damaged_dantinox"]):
            use()
    run.weights.unlink()
    launch(settings, run.path, resume=True)
    content[len(content) // 2] ^= 1
    assert run.weights.read_bytes() == content
    load(run.path)


def test_tokens_must_equal_those_at_the_start_of_the_run(copied):
    settings, run = copied
    (store,) = run.data.glob("tokens-*.bin")
    content = bytearray(store.read_bytes())
    content[7] ^= 1
    store.write_bytes(content)
    with pytest.raises(UserError, match=ERRORS["tokens_bin_is_damaged"]):
        launch(settings, run.path, resume=True)
    shutil.rmtree(run.data)
    assert "this run is finished" in launch(settings, run.path, resume=True)
    shutil.rmtree(run.data)
    with open(settings.data.path, "a+") as corpus:
        size = corpus.tell()
        corpus.write("nel mezzo del cammin\n")
    try:
        with pytest.raises(UserError, match=ERRORS["its_corpus_has_changed_restore"]):
            launch(settings, run.path, resume=True)
        assert not run.data.exists()
    finally:
        with open(settings.data.path, "a") as corpus:
            corpus.truncate(size)


@pytest.mark.faults
def test_200_damages_are_rejected_or_an_older_step_is_restored(finished, tmp_path):
    """Every damage is applied to a copy of an unfinished run, which is then loaded and resumed."""
    settings, whole = finished
    longer = config(settings.data.path, training__steps=16)
    expected = launch_copy(whole, tmp_path / "expected", longer)[0]
    generated, resumed, swaps = Counter(), Counter(), 0
    for number, path in enumerate(files_of(whole)):
        for kind, apply_damage in DAMAGES.items():
            copy = RunDirectory(shutil.copytree(whole.path, tmp_path / f"{number}{kind}"))
            damaged = copy.path / path.relative_to(whole.path)
            files = files_of(copy)
            other = counterpart(damaged, files)
            swaps += kind == "swap" and {"8", "12"} <= {*damaged.parts, *other.parts}
            apply_damage(damaged, other)
            both = [str(damaged), str(other)] if kind == "swap" else [str(damaged)]
            problems = verify_run(copy).damage
            assert all(any(name in problem for problem in problems) for name in both), (
                kind,
                path,
                problems,
            )
            message = read_everything(copy)
            assert message is None or names_one(message, both), (kind, path, message)
            assert message or damaged.parent != copy.path or damaged.name in UNREAD, (kind, path)
            generated["loaded" if message is None else "rejected"] += 1
            try:
                notes = launch(longer, copy.path, resume=True)
            except UserError as error:
                assert names_one(str(error), both), (kind, path, error)
                resumed["rejected"] += 1
            else:
                assert copy.weights.read_bytes() == expected, (kind, path)
                assert any(name in notes for name in both), (kind, path, notes)
                kinds = (
                    ("going back", "older step"),
                    ("the damaged step is kept", "set aside"),
                    ("", "reported, not read"),
                )
                resumed[next(name for part, name in kinds if part in notes)] += 1
            shutil.rmtree(copy.path)
    print(
        f"{resumed.total()} damages: --resume {dict(resumed)}, generation {dict(generated)},"
        f" {swaps} with another step's file"
    )
    assert resumed.total() >= 200 and swaps >= 20


UNREAD = {
    "training_log.csv",
    "metrics.jsonl",
    "model_summary.json",
}  # generation does not read them


def read_everything(run):
    """Loads a run and its calibrations for generation; returns the error message or None."""
    try:
        loaded = load(run.path)
        assert None not in (loaded.calibration(), loaded.kv_calibration(None))
    except UserError as error:
        return str(error)


def names_one(message, paths):
    """Returns whether a message names one of the files, by its path or as missing in its run."""
    return any(
        path in message or (str(Path(path).parent) in message and Path(path).name in message)
        for path in paths
    )


def launch_copy(whole, path, settings):
    """Resumes a copy of a run; returns its weights and its console output."""
    copy = RunDirectory(shutil.copytree(whole.path, path))
    notes = launch(settings, copy.path, resume=True)
    return copy.weights.read_bytes(), notes
