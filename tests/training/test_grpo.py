"""Training with rewards: sampled answers, their rows, dynamic sampling, learning, exact resume and
signals.
"""

import json
import os
import re
import signal
from importlib import import_module
from itertools import islice

import jax
import numpy as np
import pytest
from flax import nnx

from dantinox.config import UserError, build_config
from dantinox.generation import load
from dantinox.lab.measure.info import info_lines
from dantinox.lab.measure.texts import open_text_store
from dantinox.report import read_csv, read_jsonl
from dantinox.run import RunDirectory
from dantinox.text import Prompt
from dantinox.training.dry_run import dry_run
from dantinox.training.find_lr import find_lr
from dantinox.training.launch import launch
from dantinox.training.rollout_batches import Group, RolloutBatches, rollout_length, rollout_rows
from dantinox.training.rollout_sampler import Answer, RolloutSampler, rollout_seed
from tests.error_texts import ERRORS

from .grpo_runs import grpo_config, make_base, outcome
from .small import copy_until


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("grpo"))


@pytest.fixture(scope="module")
def whole(base):
    """A run that nothing interrupts."""
    return launch(grpo_config(base), run_dir=base / "whole")


@pytest.fixture(scope="module")
def loaded(base):
    return load(base / "base")


def answer(ids, text="", logprobs=None):
    return Answer(tuple(ids), text, np.asarray(logprobs or [-1.0] * len(ids), np.float32), "eos")


def group(number, ids, answers, rewards):
    return Group(
        Prompt(number, tuple(ids), {}), answers, [{}] * len(answers), np.asarray(rewards, float)
    )


def test_rows_hold_prompts_and_answers():
    config = build_config(
        {},
        {"training.objective": "grpo", "training.init_from": "x", "grpo.rewards": ["exact_match"]},
    )
    groups = [
        group(0, [5, 6, 7], [answer([8, 1], logprobs=[-0.5, -0.25]), answer([9, 9, 1])], [1, 0]),
        group(1, [5], [answer([1]), answer([8, 8])], [2, 2]),
    ]
    rows, sampled = rollout_rows(groups, 6, config, pad_id=0)
    assert rows.tokens_RT.tolist() == [
        [5, 6, 7, 8, 0, 0],
        [5, 6, 7, 9, 9, 0],
        [5, 0, 0, 0, 0, 0],
        [5, 8, 0, 0, 0, 0],
    ]
    assert rows.targets_RT.tolist() == [
        [6, 7, 8, 1, 0, 0],
        [6, 7, 9, 9, 1, 0],
        [1, 0, 0, 0, 0, 0],
        [8, 8, 0, 0, 0, 0],
    ]
    assert rows.mask_RT.tolist() == [
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
    ]
    np.testing.assert_array_equal(sampled[0], [0, 0, -0.5, -0.25, 0, 0])
    np.testing.assert_array_equal(
        rows.advantages_R, [0.5, -0.5, 0, 0]
    )  # the last answer is truncated: no EOS target


def test_length_of_rows():
    config = grpo_config("x", **{"generation.max_new_tokens": 3, "model.max_context": 20})
    assert [rollout_length(config, longest) for longest in (5, 6, 7, 17)] == [8, 8, 16, 20]


def test_seeds_differ():
    seeds = {
        rollout_seed(seed, kind, step, place)
        for seed in (0, 1)
        for kind in (0, 1)
        for step in range(20)
        for place in range(20)
    }
    assert len(seeds) == 1600 and all(0 <= seed < 2**32 for seed in seeds)


@pytest.mark.slow
def test_answers_do_not_depend_on_their_batch(base, loaded):
    """The same prompts in another order, in calls of another size."""
    config = grpo_config(base)
    model, weights = loaded.model.config, _weights(loaded.model)
    prompts = [tuple(b"u%da" % number) for number in range(6)]
    seeds = [rollout_seed(0, number) for number in range(6)]
    first, second = (
        RolloutSampler(config, model, loaded.tokenizer, 4, samples=8, prompts=count)
        for count in (4, 3)
    )
    expected, order = first.sample(weights, prompts, seeds), [3, 0, 5, 1, 4, 2]
    got = second.sample(weights, [prompts[i] for i in order], [seeds[i] for i in order])
    for number, answers in zip(order, got, strict=True):
        assert [one.ids for one in answers] == [one.ids for one in expected[number]]
        for one, other in zip(answers, expected[number], strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert len({one.ids for answers in expected for one in answers}) >= 3
    assert all(len(one.ids) <= 2 for answers in expected for one in answers)


@pytest.mark.parametrize(
    ("prompts", "samples", "expected"),
    [(8, 8, 8), (64, 16, 16), (40, 8, 20), (810, 1, 203), (3, 300, 1), (1, 1, 1)],
)
def test_prompts_are_decoded_in_parts_of_equal_size(base, loaded, prompts, samples, expected):
    """At most 256 rows, unless one prompt has more answers, and as few rows of padding as
    possible.
    """
    rollouts = RolloutSampler(
        grpo_config(base),
        loaded.model.config,
        loaded.tokenizer,
        4,
        samples=samples,
        prompts=prompts,
    )
    assert rollouts.prompts_per_call == expected


def _weights(model):
    return {
        "/".join(map(str, path)): leaf[...]
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def test_groups_of_equal_rewards_are_replaced(monkeypatch):
    """Rewards depend on the prompt: in round 0 only prompt 1 has unequal rewards, then one more per
    round.
    """
    source = object.__new__(RolloutBatches)
    source._config = grpo_config(
        "x", **{"grpo.loss": "dapo", "grpo.max_sampling_rounds": 2, "training.batch_size": 3}
    )
    asked = []

    class Store:
        def batch(self, step, stream):
            asked.append((step, stream))
            return [Prompt(10 * stream + place, (1,), {}) for place in range(3)]

    uneven = {1, 12, 20}
    monkeypatch.setattr(
        source, "_answer", lambda rollouts, weights, prompts, seeds: [
            group(prompt.number, (1,), [], [0.0,
                                            float(prompt.number in uneven)]) for prompt in prompts
        ], raising=False,
    )  # fmt: skip
    source._store, source._rollouts = Store(), None
    groups, rounds = source._sample_groups(7, {})
    assert (
        [one.prompt.number for one in groups] == [12, 1, 20]
        and rounds == 3
        and asked == [(7, 0), (7, 1), (7, 2)]
    )
    uneven.discard(20)
    groups, rounds = source._sample_groups(7, {})
    assert [one.prompt.number for one in groups] == [
        12,
        1,
        2,
    ] and rounds == 3  # a group of equal rewards remains
    source._config = grpo_config("x")
    assert [one.prompt.number for one in source._sample_groups(7, {})[0]] == [0, 1, 2]


def test_training_raises_the_reward(whole, base):
    config = grpo_config(base)
    rows = read_jsonl(whole.metrics)
    rewards = [row["reward"] for row in rows if row["kind"] == "interval"]
    assert rewards[-1] > 0.8 > 0.6 > rewards[0] > 0.1
    assert max(row["sampler_gap"] for row in rows if row["kind"] == "interval") < 1e-4
    table = read_csv(whole.log(config))
    assert [row["step"] for row in table] == [0, 4, 8] and table[-1]["val_reward"] > table[1][
        "reward"
    ]
    assert not {"reward", "train_loss", "lr"} & set(table[0]) and not any(
        "val_loss" in row for row in table
    )
    np.testing.assert_allclose(table[1]["reward"], np.mean(rewards[:4]), rtol=1e-12)
    samples = [
        json.loads(line) for line in (whole.samples / "step_4.jsonl").read_text().splitlines()
    ]
    assert len(samples) == 4 * 8
    assert all(
        sample["reward"] == float(sample["answer"] == "y") == sample["rewards"]["exact_match"]
        for sample in samples
    )
    assert re.search(
        r"best +val reward 1\.0000, at step [48]\n", "".join(islice(info_lines(whole.path), 2))
    )
    with pytest.raises(UserError, match=ERRORS["has_no_saved_training_text"]):
        open_text_store(whole)
    summary = json.loads(whole.summary(config).read_text())
    assert summary["val_reward"] == max(row["val_reward"] for row in table)


def test_starting_weights_are_kept_if_training_makes_them_worse(whole, base):
    """The reward of the starting weights is in the row of step 0, and a learning rate of 10
    destroys them.
    """
    changes = {
        "training.init_from": str(whole.path),
        "training.lr": 10.0,
        "training.steps": 1,
        "training.sample_every": None,
    }
    config = grpo_config(base, **changes)
    run = launch(config, run_dir=base / "worse")
    before, after = [row["val_reward"] for row in read_csv(run.log(config))]
    assert before == 1 > after  # the greedy answers of the starting weights are all `y`
    assert json.loads(run.summary(config).read_text())["best_step"] == 0
    kept, start = (nnx.state(load(path).model) for path in (run.path, whole.path))
    jax.tree.map(np.testing.assert_array_equal, kept, start)


@pytest.mark.parametrize("step", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_stopped_run_continues_with_equal_results(whole, base, monkeypatch, step):
    """SIGTERM arrives while the answers of a step are sampled; the step has not begun."""
    config, calls, sample = grpo_config(base), [], RolloutSampler.sample

    def interrupted(self, *arguments, stop, **options):
        calls.append(self.samples)
        if calls.count(8) == step + 1:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop()
        return sample(self, *arguments, stop=stop, **options)

    monkeypatch.setattr(RolloutSampler, "sample", interrupted)
    with pytest.raises(SystemExit, match="143"):
        launch(config, run_dir=base / f"cut_{step}")
    cut = RunDirectory(base / f"cut_{step}")
    assert max(int(path.name) for path in cut.checkpoints.iterdir() if path.name.isdigit()) == step
    monkeypatch.undo()
    launch(config, run_dir=cut.path, resume=True)
    assert outcome(cut, config) == outcome(whole, config)


LORA = {"lora.rank": 2, "grpo.kl_weight": 0.1}
UPDATES = {"grpo.updates": 2, "training.grad_accum": 2}
SCAN = {"model.scan_layers": True, "model.num_blocks": 2, "grpo.loss": "dapo", "training.ema": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        LORA | UPDATES | {"grpo.loss": "dapo", "lora.targets": ["q_proj", "down_proj"]},
        pytest.param(LORA, marks=pytest.mark.slow),
        pytest.param(
            UPDATES | {"grpo.loss": "grpo", "grpo.kl_weight": 0.1}, marks=pytest.mark.slow
        ),
        pytest.param(SCAN, marks=pytest.mark.slow),
    ],
)
def test_variants_learn_and_resume_exactly(base, tmp_path, changes):
    base = make_base(tmp_path, **{"model.num_blocks": 2}) if "model.num_blocks" in changes else base
    config = grpo_config(base, **changes)
    run = launch(config, run_dir=tmp_path / "whole")
    rows = [row for row in read_jsonl(run.metrics) if row["kind"] == "interval"]
    assert rows[-1]["reward"] > rows[0]["reward"] and all(row["sampler_gap"] < 1e-4 for row in rows)
    if "grpo.kl_weight" in changes:
        assert rows[-1]["kl"] > 1e-4
        if "grpo.updates" not in changes:  # else the first row is about the second update
            assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    cut = copy_until(run, 6, tmp_path / "cut")
    launch(config, run_dir=cut.path, resume=True)
    assert outcome(cut, config)[0] == outcome(run, config)[0]


def test_dry_run_and_learning_rate_test(base, monkeypatch):
    notes = []
    module = import_module(
        "dantinox.training.dry_run"
    )  # the package exports a function of that name
    monkeypatch.setattr(module, "benchmark_step", lambda *_: None)
    monkeypatch.setattr(module, "seconds_per_step", lambda step: 0.5)
    dry_run(grpo_config(base), notes.append)
    assert any("32 answers of 8 tokens" in note for note in notes) and any(
        "sampling the answers" in note for note in notes
    )
    with pytest.raises(UserError, match="find-lr compares losses"):
        find_lr(grpo_config(base), 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"generation.n": 2},
            "generation.n must be 1 with training.objective: grpo, got 2: grpo.samples",
        ),
        ({"generation.num_beams": 4}, "generation.num_beams must be 1 with"),
        ({"generation.use_cache": False}, "generation.use_cache must be true with"),
        ({"generation.speculation": "ngram"}, "generation.speculation must be off with"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        grpo_config("x", **changes)


def test_several_devices_are_refused(base):
    config = grpo_config(base)
    step = type(
        "Step",
        (),
        {"config": config, "layout": type("Layout", (), {"mesh": object(), "devices": 2})()},
    )()
    with pytest.raises(UserError, match="grpo runs on one device, got 2"):
        RolloutBatches(step, None, None, {}, lambda: None, lambda: False)
