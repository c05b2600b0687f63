"""Checkpoints in directories with unusual names, and checkpoints that cannot be read back."""

import errno
import math
import os
import unicodedata

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.files import UserError
from dantinox.run.manifest import find_step_damage
from dantinox.training.checkpoint_store import Checkpoints, TrainingProgress
from dantinox.training.step import TrainState
from tests.error_texts import ERRORS

ODD_NAMES = (
    "a[1]", "[!x]", "a\\b", "it's \"so\"", " a b ", "a\nb", "*", "a**b", "?", "gs:", "{a,b}",
    "#%2F", "$HOME", "\udcff",
    unicodedata.normalize("NFD", "città"), "x" * 200, "-x", "~", "a.", "%s", "a;b&c|d", "😀", "a\tb",
    "s3:",
)  # fmt: skip


def state_of(step):
    """Returns a state with the given step and a parameter that is equal to the step everywhere."""
    sums = jnp.zeros(2)
    return TrainState(
        jnp.int32(step), {"kernel": jnp.full((3, 4), float(step))}, (jnp.int32(step),), sums, sums
    )


def save(checkpoints, step):
    checkpoints.save(step, state_of(step), TrainingProgress(), {}, val_loss=None)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_checkpoint_in_a_directory_with_any_name_is_restored(tmp_path, name):
    path = tmp_path / name / "checkpoints"
    path.parent.mkdir()
    checkpoints = Checkpoints(path, 2)
    for step in (1, 2, 3):
        save(checkpoints, step)
    checkpoints.close()
    assert (
        sorted(child.name for child in path.iterdir()) == ["2", "3"]
        and len(list(tmp_path.iterdir())) == 1
    )
    assert (path / "3" / "state" / "manifest.ocdbt").is_file() and not any(
        find_step_damage(path / "3")
    )
    again = Checkpoints(path, 2)
    restored = again.restore(jax.eval_shape(lambda: state_of(0)))
    again.close()
    assert restored.step == 3 and restored.notes == ()
    jax.tree.map(np.testing.assert_array_equal, restored.state, state_of(3))


def test_a_step_may_have_several_updates(tmp_path):
    """With `grpo.updates`, the state counts the updates of the optimizer."""
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(3, state_of(6), TrainingProgress(), {}, val_loss=None)
    checkpoints.wait()
    restored = checkpoints.restore(jax.eval_shape(lambda: state_of(0)))
    checkpoints.close()
    assert restored.step == 3 and int(restored.state.step) == 6


def test_the_first_of_several_best_steps_is_kept(tmp_path):
    """`TrainingProgress.after` does not count an equal loss as better. −inf is the best loss."""
    losses = {10: -math.inf, 20: -math.inf, 30: math.nan, 40: math.inf, 50: 0.5}
    checkpoints = Checkpoints(tmp_path, 1)
    progress = TrainingProgress()
    for step, loss in losses.items():
        progress = progress.after(loss, step)
        checkpoints.save(step, state_of(step), progress, {}, val_loss=loss)
    checkpoints.wait()
    found = checkpoints.read(progress.best_step, jax.eval_shape(lambda: state_of(0)))
    checkpoints.close()
    assert progress.best_step == 10 and found is not None and int(found.step) == 10
    assert sorted(child.name for child in tmp_path.iterdir()) == ["10", "40", "50"]


def test_a_damaged_log_is_an_error_whatever_the_path(tmp_path):
    run = tmp_path / "what is missing"
    log = run / "training_log.csv"
    run.mkdir()
    log.write_text("step,loss\n")
    checkpoints = Checkpoints(run / "checkpoints", 2, [log])
    save(checkpoints, 1)
    checkpoints.wait()
    log.write_text("step,lost\n")
    with pytest.raises(UserError, match=r"training_log\.csv is damaged"):
        checkpoints.restore(jax.eval_shape(lambda: state_of(0)))
    log.unlink()
    restored = checkpoints.restore(jax.eval_shape(lambda: state_of(0)))
    checkpoints.close()
    (note,) = restored.notes
    assert note.startswith(f"{log} is missing") and note.endswith("starting a new one")


def test_step_that_cannot_be_read_back_is_not_complete(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, 2)
    save(checkpoints, 1)
    checkpoints.wait()

    async def write_nothing(*_, **__):
        pass

    monkeypatch.setattr(
        "orbax.checkpoint._src.serialization.ocdbt_utils.merge_ocdbt_per_process_files",
        write_nothing,
    )
    save(checkpoints, 2)
    with pytest.raises(UserError, match=ERRORS["the_checkpoint_cannot_be_read_back"]):
        checkpoints.wait()
    assert checkpoints.newest() == 1
    assert checkpoints.restore(jax.eval_shape(lambda: state_of(0))).step == 1
    checkpoints.close()


TENSORSTORE_ERROR = (  # of TensorStore on a full disk
    'RESOURCE_EXHAUSTED: Error writing "parameters.kernel/0.0" in OCDBT database at local file'
    ' "/r/": Failed writing: "/r/d/0b": Failed to write 12857 bytes to file 6: {}'
    " [os_error_code='{}']"
)


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EIO, errno.ESTALE]
)
@pytest.mark.parametrize("error_type", [ValueError, RuntimeError, jax.errors.JaxRuntimeError])
def test_disk_error_is_one_sentence_whatever_orbax_calls_it(
    tmp_path, monkeypatch, code, error_type
):
    def fails(*_, **__):
        raise error_type(TENSORSTORE_ERROR.format("words", code))

    checkpoints = Checkpoints(tmp_path, 2)
    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.wait_until_finished", fails)
    with pytest.raises(UserError) as raised:
        save(checkpoints, 1)
        checkpoints.wait()
    assert str(raised.value) == f"cannot write checkpoints to {tmp_path}: {os.strerror(code)}"


def test_memory_error_during_a_save_is_not_a_disk_error(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 68719476736 bytes."
        )

    checkpoints = Checkpoints(tmp_path, 2)
    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.save", fails)
    with pytest.raises(jax.errors.JaxRuntimeError):
        save(checkpoints, 1)
