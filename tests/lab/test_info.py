"""`dantinox info`: its facts come from the settings, the headers of the weights and the log; no
weights are loaded.
"""

import shutil

import jax
import numpy as np
import pytest

from dantinox.config import UserError
from dantinox.lab.measure.info import info_lines
from dantinox.report import MetricsLog, human_bytes, human_count
from dantinox.run import RunDirectory, load_run_config, save_weights
from dantinox.run.weights import read_arrays
from tests.error_texts import ERRORS


@pytest.fixture
def copy_of_run(run_dir, tmp_path):
    return RunDirectory(shutil.copytree(run_dir, tmp_path / "run"))


def info(path):
    lines = "\n".join(info_lines(path)).splitlines()
    return {line[:13].strip(): line[13:].strip() for line in lines if line}


def test_the_model_is_described_without_loading_it(run_dir, monkeypatch):
    monkeypatch.setattr(jax, "device_put", None)
    arrays = read_arrays(RunDirectory(run_dir).weights)[0].values()
    found = info(run_dir)
    assert found["parameters"] == human_count(sum(np.prod(array.shape) for array in arrays))
    size = human_bytes(sum(array.nbytes for array in arrays))
    assert found["weights"] == f"{size} (float32 {size})"
    # Keys and values of 2 layers, 2 heads of 8 numbers, 128 tokens, 4 bytes.
    assert found["context"] == f"128 tokens, cache {human_bytes(2 * 2 * 2 * 8 * 128 * 4)} per row"
    assert "no training log\n" in info_lines(run_dir)


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([{"val_loss": 2.0, "bits_per_byte": 1.5}, {"val_loss": 1.0, "bits_per_byte": 0.75},
          {"val_loss": 3.0}],
         "val loss 1.0000, 0.750 bits per byte, at step 2"),
        ([{"val_loss": float("nan")}, {"val_loss": float("nan")}], "val loss nan, at step 1"),
        ([{"val_reward": 0.25, "val_loss": 1.0}, {"val_reward": -0.5, "val_loss": 0.5}],
         "val reward 0.2500, at step 1"),
    ],
)  # fmt: skip
def test_the_best_evaluation(copy_of_run, rows, best):
    log = MetricsLog(copy_of_run.log(load_run_config(copy_of_run)), copy_of_run.metrics)
    for step, row in enumerate(rows, 1):
        log.evaluation({"step": step, "tokens": 1000 * step} | row)
    lines = "\n".join(info_lines(copy_of_run.path)).splitlines()
    assert f"best     {best}" in lines
    assert f"trained  {len(rows)} steps, {human_count(1000 * len(rows))} tokens" in lines


def test_weights_of_another_model_are_an_error(copy_of_run):
    arrays = {name: array.array() for name, array in read_arrays(copy_of_run.weights)[0].items()}
    arrays["embed"] = arrays["embed"][:-1]
    save_weights(copy_of_run.weights, arrays)
    with pytest.raises(UserError, match=ERRORS["hold_with_shape"]):
        list(info_lines(copy_of_run.path))
