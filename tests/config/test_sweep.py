"""The trials depend only on the sweep file, and an error in any trial is reported before the first
one starts.
"""

import math

import numpy as np
import pytest

from dantinox.config import UserError
from dantinox.config.sweep_file import load_sweep
from tests.error_texts import ERRORS

BASE = "base: {model: {dim: 16, n_heads: 2}, training: {steps: 200}}\n"


@pytest.fixture
def sweep(tmp_path):
    def load(text, base=BASE):
        path = tmp_path / "s.yaml"
        path.write_text(base + text)
        return load_sweep(path)

    return load


def test_a_grid_has_every_combination(sweep):
    found = sweep("grid: {training.lr: [1e-3, 1e-2], model.num_blocks: [1, 2, 3]}")
    assert [trial.chosen for trial in found.trials] == [
        {"training.lr": lr, "model.num_blocks": blocks}
        for lr in (1e-3, 1e-2)
        for blocks in (1, 2, 3)
    ]
    assert [trial.name for trial in found.trials][::5] == ["trial_001", "trial_006"]
    fifth = found.trials[4].config
    assert (fifth.training.lr, fifth.model.num_blocks, fifth.model.dim, fifth.training.steps) == (
        1e-2,
        2,
        16,
        200,
    )
    assert str(found.runs_dir) == "runs/s" and found.keys == ("training.lr", "model.num_blocks")


def test_random_trials_are_uniform_and_a_longer_sweep_continues_them(sweep):
    text = """random:
  training.lr: {min: 1e-4, max: 1e-2, log: true}
  training.weight_decay: {min: 0, max: 1}
  model.num_blocks: {min: 1, max: 4}
  training.optimizer: [adamw, lion]
seed: 3
trials: """
    found = sweep(text + "400")
    values = {key: [trial.chosen[key] for trial in found.trials] for key in found.keys}
    rates = np.log10(values["training.lr"])
    assert -4 <= rates.min() < -3.97 and -2.03 < rates.max() <= -2
    assert np.mean(rates) == pytest.approx(-3, abs=4 * 2 / math.sqrt(12 * 400)), (
        "uniform in the logarithm"
    )
    assert np.mean(values["training.weight_decay"]) == pytest.approx(
        0.5, abs=4 / math.sqrt(12 * 400)
    )
    counts = np.unique(values["model.num_blocks"], return_counts=True)
    assert counts[0].tolist() == [1, 2, 3, 4] and counts[1].min() > 60
    assert 140 < values["training.optimizer"].count("lion") < 260
    assert [trial.chosen for trial in sweep(text + "7").trials] == [
        trial.chosen for trial in found.trials[:7]
    ]
    assert sweep(text.replace("3\n", "4\n") + "7").trials[0].chosen != found.trials[0].chosen


def test_trials_are_different(sweep):
    text = "random: {training.lr: [1e-3, 1e-2], model.num_blocks: [1, 2]}\ntrials: "
    assert len({str(trial.chosen) for trial in sweep(text + "4").trials}) == 4
    with pytest.raises(UserError, match=ERRORS["random_has_only_4_different"]):
        sweep(text + "5")


def test_a_base_is_a_file_or_a_packaged_config(sweep, tmp_path):
    (tmp_path / "b.yaml").write_text("model: {dim: 24, n_heads: 2}\ntraining: {lr: -1}\n")
    grid = "grid: {training.batch_size: [2]}"
    assert sweep(grid, "base: dante\n").trials[0].config.data.path == load_sweep_base("dante")
    assert sweep(grid, "").trials[0].config.data.path == "builtin:python"
    with pytest.raises(UserError, match=ERRORS["training_lr_must_be_a"]):
        sweep(grid, f"base: {tmp_path / 'b.yaml'}\n")


def load_sweep_base(name):
    from dantinox.config import load_config
    from dantinox.config.yaml_files import find_config

    return load_config(find_config(name)).data.path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a sweep has either grid or random"),
        (
            "grid: {training.lr: [1]}\nrandom: {training.lr: [1]}",
            r"a sweep has either grid or random \(.*s.yaml, line 3\)",
        ),
        ("grids: {}", "unknown key grids: a sweep has base, grid, random, trials, seed, runs_dir"),
        (
            'grid: {training.lr: [1]}\nruns_dir: "x\\0"',
            r"runs_dir must be a path, got 'x\\x00' \(.*line 3\)",
        ),
        ("grid: [1]", "grid must hold settings, got"),
        ("grid: {}", "grid must hold settings, got"),
        ("grid: {lr: [1e-3]}", r"unknown key lr, did you mean training.lr\? \(.*s.yaml, line 2\)"),
        ("grid: {generation.top_k: [3, 4]}", "generation.top_k does not affect training"),
        ("grid: {training.lr: 0.1}", "training.lr must have a list of values, got 0.1"),
        ("grid: {training.lr: {min: 1, max: 2}}", "training.lr must have a list of values, got"),
        ("grid: {training.lr: [0.1, 0.1]}", "training.lr lists 0.1 twice"),
        (
            "grid: {training.lr: [0.1, -1]}",
            r"training.lr must be a number > 0, got -1 \(.*s.yaml, trial_002\)",
        ),
        ("grid: {model.n_heads: [2, 3]}", r"must be .*3.* \(.*s.yaml, trial_002\)"),
        (
            "grid: {training.muon_lr: [0.1]}",
            r"training.muon_lr has no effect while .*adamw.* \(.*trial_001\)",
        ),
        ("grid: {training.lr: [0.1]}\ntrials: 3", r"trials has no effect with grid.* \(.*line 3\)"),
        (
            "random: {training.lr: [0.1]}",
            "trials must be an integer in .1, 10000. with random, got null",
        ),
        (
            "random: {training.lr: {min: 1}}\ntrials: 1",
            "training.lr must have min < max, got 1, null",
        ),
        (
            "random: {training.lr: {min: 0, max: 1, log: true}}\ntrials: 1",
            "min of training.lr must be > 0 with log: true",
        ),
        (
            "random: {training.lr: {low: 1}}\ntrials: 1",
            "training.lr may have min, max and log, got low",
        ),
        (
            "random: {training.optimizer: {min: 0, max: 1}}\ntrials: 1",
            "training.optimizer is not a number: give a list",
        ),
        ("grid: {training.lr: [0.1]}\nruns_dir: 3", "runs_dir must be a path, got 3"),
    ],
)
def test_an_error_is_one_sentence(sweep, text, says):
    with pytest.raises(UserError, match=says) as caught:
        sweep(text)
    assert "\n" not in str(caught.value)
