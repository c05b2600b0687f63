"""Direct preference optimization: loss, gradients and rewards against NumPy in float64, the
reference file. Runs of all preference objectives, and their resume. Also fine-tuning on
conversations with the same loop."""

import json
from importlib import import_module

import jax
import numpy as np
import pytest
from flax import nnx

from dantinox.config import TokenizerSection, UserError, build_config, load_config
from dantinox.model.parameters import abstract_model
from dantinox.report import read_csv, read_jsonl
from dantinox.run import RunDirectory
from dantinox.text import Preferences, Tokenizer, prepare_data, train_tokenizer
from dantinox.training.dry_run import dry_run
from dantinox.training.find_lr import find_lr
from dantinox.training.launch import launch
from dantinox.training.preference_objectives import dpo, pair_logprobs, pair_losses
from dantinox.training.token_losses import next_token_losses
from tests.error_texts import ERRORS

from .small import VOCABULARY, copy_until, random_weights, small_config

BETA = 0.3
DPO = small_config(
    **{
        "training.objective": "dpo",
        "training.preference_beta": BETA,
        "training.init_from": "runs/x",
    }
)


@pytest.fixture(scope="module")
def model():
    return model_of(small_config(**{"model.dropout_rate": 0.0}).architecture(VOCABULARY))


def model_of(architecture):
    return abstract_model(architecture)[0](random_weights(architecture))


@pytest.fixture(scope="module")
def pairs():
    """Three pairs, and one without counted targets."""
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, VOCABULARY, (2, 4, 2, 8)).astype(np.int32)
    mask = (rng.random((4, 2, 8)) < 0.6).astype(np.float32)
    mask[3] = 0
    return Preferences(
        tokens, targets, np.zeros_like(tokens), mask, rng.normal(-9, 1, (4, 2)).astype(np.float32)
    )


def reference(logits, pairs, beta=BETA):
    """Returns the sums of losses, margins and won pairs, and the gradient with respect to the
    logits, in float64.

    The loss is equation 7. Its gradient is −β σ(−margin) times the gradient of the
    log-probabilities.
    """
    logits = np.asarray(logits, np.float64).reshape(4, 2, 8, VOCABULARY)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    of_target = np.take_along_axis(np.log(p), pairs.targets_P2T[..., None], -1)[..., 0]
    gain = (pairs.mask_P2T * of_target).sum(-1) - pairs.reference_P2
    margin = beta * (gain[:, 0] - gain[:, 1])
    there = pairs.mask_P2T.any(axis=(1, 2))
    of_margin = -1 / (1 + np.exp(margin)) * there
    of_logp = beta * of_margin[:, None] * np.array([1, -1])
    gradient = (np.eye(VOCABULARY)[pairs.targets_P2T] - p) * (pairs.mask_P2T * of_logp[..., None])[
        ..., None
    ]
    return (
        np.log1p(np.exp(-margin))[there].sum(),
        margin[there].sum(),
        (margin[there] > 0).sum(),
        gradient,
    )


@jax.jit
def logits_of(model, pairs):
    return model(pairs.tokens_P2T.reshape(8, 8), np.arange(8)[None])[0]


def test_loss_equals_float64(model, pairs):
    of_loss = jax.jit(lambda model, pairs: pair_losses(dpo, model, pairs, DPO))
    got, expected = of_loss(model, pairs), reference(logits_of(model, pairs), pairs)
    np.testing.assert_allclose([got.nats, *got.metrics], expected[:3], rtol=1e-5)
    assert float(got.num_targets) == 3
    logp = np.asarray(jax.jit(pair_logprobs)(model, pairs))
    at_start = of_loss(model, pairs._replace(reference_P2=logp))
    np.testing.assert_allclose([at_start.nats, *at_start.metrics], [3 * np.log(2), 0, 0], atol=1e-6)


def test_gradient_equals_float64(model, pairs):
    """Applies the chain rule: the vector-Jacobian product of the logits with the float64 gradient
    of the loss.
    """
    graph, state = nnx.split(model)
    of_loss = jax.jit(
        jax.grad(lambda state: pair_losses(dpo, nnx.merge(graph, state), pairs, DPO).nats)
    )(state)
    seen, back = jax.vjp(jax.jit(lambda state: logits_of(nnx.merge(graph, state), pairs)), state)
    gradient = reference(seen, pairs)[3].reshape(seen.shape).astype(np.float32)
    (expected,) = back(gradient)
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for one, other in zip(jax.tree.leaves(of_loss), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * largest)


SETTINGS = {
    "model.dim": 16, "model.n_heads": 2, "model.num_blocks": 1, "model.max_context": 40,
    "tokenizer.tokenizer_type": "byte", "training.batch_size": 2, "training.warmup_steps": 1,
    "training.lr": 0.03, "training.schedule": "constant", "training.eval_every": 4,
    "logging.log_every": 4, "logging.plot": False,
}  # fmt: skip
RECORDS = [
    {"prompt": f"say {i}", "completion": "yes", "chosen": "yes", "rejected": "no"}
    for i in range(12)
]
LABELED = [
    {"prompt": f"say {i}", "completion": "no" if i % 3 else "yes", "label": i % 3 == 0}
    for i in range(12)
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run on conversations, and the folder of its records."""
    folder = tmp_path_factory.mktemp("preferences")
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    (folder / "labels.jsonl").write_text("".join(json.dumps(record) + "\n" for record in LABELED))
    launch(config_of(folder, objective="sft", steps=8), run_dir=folder / "base")
    return folder


def config_of(folder, *, objective="dpo", steps=12, **changes):
    path = str(folder / ("labels.jsonl" if objective == "kto" else "a.jsonl"))
    settings = {"data.path": path, "training.objective": objective, "training.steps": steps}
    if objective not in ("sft", "orpo"):
        settings["training.init_from"] = str(folder / "base")
    return build_config({}, SETTINGS | settings | changes)


def test_training_on_conversations_saves_the_template(base):
    run, config = RunDirectory(base / "base"), config_of(base, objective="sft", steps=8)
    losses = [row["val_loss"] for row in read_csv(run.log(config))]
    assert (
        losses[-1] < losses[0]
        and "plain" not in run.chat_template.read_text()
        and "Assistant" in run.chat_template.read_text()
    )


def test_preference_training_learns_and_resumes_exactly(base):
    config = config_of(base)
    run = launch(config, run_dir=base / "whole")
    rows = [row for row in read_jsonl(run.metrics) if row["kind"] in ("interval", "preferences")]
    accuracy = [row.get("reward_accuracy", row.get("val_reward_accuracy")) for row in rows]
    assert accuracy[-1] == 1.0 and rows[-1]["val_reward_margin"] > rows[1]["val_reward_margin"] > 0
    assert "bits_per_byte" not in read_csv(run.log(config))[-1]
    assert run.chat_template.read_text() == RunDirectory(base / "base").chat_template.read_text()
    _, store = prepare_data(config, base / "store", Tokenizer.load(run.tokenizer))
    assert (
        len(json.loads((run.data / "reference.json").read_text())["log_probabilities"])
        == len(RECORDS)
        == store.conversations
    )

    cut = copy_until(run, 8, base / "cut")
    (base / "base").rename(base / "gone")  # resuming does not need the base run
    try:
        launch(config, run_dir=cut.path, resume=True)
    finally:
        (base / "gone").rename(base / "base")
    assert cut.weights.read_bytes() == run.weights.read_bytes()
    cut = copy_until(run, 8, base / "without reference")
    (cut.data / "reference.json").unlink()
    with pytest.raises(UserError, match=ERRORS["restore_reference_json"]):
        launch(config, run_dir=cut.path, resume=True)


def validation_rows(run):
    return [row for row in read_jsonl(run.metrics) if row["kind"] == "preferences"]


@pytest.mark.parametrize(
    "objective",
    ["kto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("orpo", "ipo", "simpo"))],
)
def test_a_run_of_each_objective_learns_and_resumes_exactly(base, objective):
    """ORPO starts from random weights. ORPO and SimPO compute no log-probabilities of a reference
    model.
    """
    changes = {"training.lr": 0.01, "data.val_fraction": 0.4}
    config = config_of(base, objective=objective, **changes)
    run = launch(config, run_dir=base / objective)
    losses = [row["val_loss"] for row in read_csv(run.log(config))]
    assert losses[-1] < losses[0] and len(losses) == 3
    first, *_, last = validation_rows(run)
    if objective == "kto":
        assert last["val_reward_desirable"] - last["val_reward_undesirable"] > 0.05
        assert last["val_share_desirable"] == 0.2 and last["val_kl"] >= 0
    elif objective == "ipo":  # the loss is lowest at τ h = 1/2
        assert last["val_reward_accuracy"] == 1.0 and abs(last["val_reward_margin"] - 0.5) < 0.05
    else:
        assert (
            last["val_reward_accuracy"] == 1.0
            and last["val_reward_margin"] > first["val_reward_margin"]
        )
    assert (run.data / "reference.json").exists() == (objective in ("ipo", "kto"))
    cut = copy_until(run, 8, base / f"{objective}_cut")
    launch(config, run_dir=cut.path, resume=True)
    assert cut.weights.read_bytes() == run.weights.read_bytes()


def check_plan(objective, lines):
    """Checks what `dry_run` prints before it compiles a step."""
    unit = "labeled completions" if objective == "kto" else "pairs"
    assert f"in 12 {unit}" in lines[0] and f"12 steps of 2 {unit} of 40 tokens" in lines[0]
    assert (
        lines[1].startswith("first batch: tokens [2, 2, 40], first row: ") and "say 10" in lines[1]
    )


OBJECTIVES = ["dpo", "ipo", "kto", "orpo", "simpo"]


def test_plan_of_each_objective(base, monkeypatch):
    """`dry_run` without a step."""
    module = import_module(
        "dantinox.training.dry_run"
    )  # the package exports a function of that name
    monkeypatch.setattr(module, "benchmark_step", lambda *_: None)
    monkeypatch.setattr(module, "seconds_per_step", lambda step: 0.5)
    for objective in OBJECTIVES:
        lines = []
        dry_run(config_of(base, objective=objective), lines.append)
        check_plan(objective, lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    ["kto", *(pytest.param(name, marks=pytest.mark.slow) for name in OBJECTIVES if name != "kto")],
)
def test_dry_run_and_learning_rate_test_of_each_objective(base, monkeypatch, objective):
    monkeypatch.setattr("dantinox.training.step_time.MEASURED_SECONDS", 0.02)
    lines = []
    dry_run(config_of(base, objective=objective), lines.append)
    check_plan(objective, lines)
    test = find_lr(config_of(base, objective=objective, **{"training.lr": 0.003}), 20)
    assert min(test.smoothed) < test.smoothed[0] and test.suggested > 0


def test_a_missing_start_is_refused(base):
    with pytest.raises(UserError, match=ERRORS["kto_needs_training_init_from_the"]):
        config_of(base, objective="kto", **{"training.init_from": None})
    assert config_of(base, objective="orpo").training.init_from is None


def test_packed_conversations_have_the_losses_of_separate_ones(base):
    """Compares loss and gradient of the first batch with those of its conversations, each read
    alone, from float64 logits.
    """
    config = config_of(
        base, objective="sft", steps=8, **{"model.max_context": 64, "model.dtype": "float32"}
    )
    tokenizer, store = prepare_data(config, base / "packed")
    batch = store.batch(0)
    assert batch.segments_BT.max() == 1
    graph, state = nnx.split(model_of(config.architecture(tokenizer.vocab_size)))
    (nats, targets), gradient = jax.jit(
        jax.value_and_grad(lambda s: _summed(nnx.merge(graph, s), batch), has_aux=True)
    )(state)
    alone = [  # from its beginning, with padding at the end
        [
            np.pad(part[row][segments == segment], (0, int((segments != segment).sum())))
            for part in (batch[0], batch[1], batch[3])
        ]
        for row, segments in enumerate(batch.segments_BT)
        for segment in range(segments.max() + 1)
    ]
    tokens, following, counts = (np.stack(parts) for parts in zip(*alone, strict=True))
    logits, back = jax.vjp(
        jax.jit(lambda s: nnx.merge(graph, s)(tokens, np.arange(64)[None])[0]), state
    )
    p = np.exp(np.asarray(logits, np.float64))
    p /= p.sum(-1, keepdims=True)
    of_target = np.take_along_axis(p, following[..., None], -1)[..., 0]
    np.testing.assert_allclose(float(nats), -(counts * np.log(of_target)).sum(), rtol=1e-5)
    assert int(targets) == counts.sum() == len("yes$") * len(alone)
    (expected,) = back(
        ((p - np.eye(p.shape[-1])[following]) * counts[..., None]).astype(np.float32)
    )
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * largest)


def _summed(model, batch):
    total = next_token_losses(model, batch)
    return total.nats, total.num_targets


def test_end_tokens_of_the_template_become_stop_tokens(base, tmp_path):
    """No special token of this vocabulary has the name of an EOS token, but the template's end
    token becomes a stop token.
    """
    content = train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(())).to_json()
    (tmp_path / "t.json").write_text(content.replace("<eos>", "<turn>"))
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<turn>{% else %}:{%"
        " endif %}{% endfor %}"
    )
    given = {
        "tokenizer.tokenizer_type": "file",
        "tokenizer.tokenizer_path": str(tmp_path / "t.json"),
    }
    config = config_of(
        base, objective="sft", steps=8, **given, **{"data.chat_template": str(tmp_path / "t.jinja")}
    )
    assert Tokenizer.load(tmp_path / "t.json").stop_ids == ()
    assert Tokenizer.load(launch(config, run_dir=tmp_path / "run").tokenizer).stop_ids == (258,)


@pytest.mark.parametrize("read", [str, load_config], ids=["file", "config"])
def test_launch_inherits_the_model_of_the_run_it_starts_from(base, tmp_path, monkeypatch, read):
    path = tmp_path / "sft.yaml"
    path.write_text(
        f"data: {{path: {base / 'a.jsonl'}}}\ntraining: {{objective: sft, init_from:"
        f" {base / 'base'}, steps: 2, batch_size: 2, warmup_steps: 1}}\n"
    )
    found = []
    module = import_module(
        "dantinox.training.launch"
    )  # the package exports a function of that name
    monkeypatch.setattr(module, "train", lambda config, *_, **__: found.append(config))
    launch(read(path), run_dir=tmp_path / "run")
    assert found[0].model.dim == 16 and found[0].training.steps == 2
