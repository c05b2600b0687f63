"""Distillation: the divergence and its gradient against NumPy in float64, chunks, and runs with a
teacher.
"""

import inspect
import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dantinox.config import UserError, build_config
from dantinox.config.distill_settings import DistillSection
from dantinox.config.yaml_files import inherit_settings
from dantinox.distributed import Layout
from dantinox.model.lora import is_adapter
from dantinox.model.parameters import abstract_model
from dantinox.platform import PLATFORMS
from dantinox.report import human_bytes, read_csv, read_jsonl
from dantinox.run import RunDirectory, load_run_config
from dantinox.run.adapters import load_run_weights
from dantinox.text import Batch, Tokenizer, open_store, prepare_data
from dantinox.training.distillation import BatchWithTeacher, distill_losses, token_divergence
from dantinox.training.distillation_batches import DistillationBatches
from dantinox.training.dry_run import dry_run
from dantinox.training.launch import launch
from dantinox.training.starting_point import frozen_weights, starting_weights
from dantinox.training.step import TrainStep
from dantinox.training.teacher import open_teacher
from tests.error_texts import ERRORS

from .small import (
    VOCABULARY,
    copy_until,
    largest_array,
    random_weights,
    small_config,
    temporary_bytes,
    write_run,
)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def reference(student, teacher, settings):
    """Returns the divergence of each token and its gradient with respect to the student's logits,
    in float64.

    q_v is a probability of the student, and p_b and q_b are the masses of its bin, which is the
    token itself without `top_k`. Forward: ∂/∂s_v = τ (q_v − p_b q_v / q_b). Reverse, with the
    divergence K: ∂/∂s_v = τ q_v (ln(q_b / p_b) − K).
    """
    tau = settings.temperature
    student, teacher = np.asarray(student, np.float64), np.asarray(teacher, np.float64)
    q, p = softmax(student / tau), softmax(teacher / tau)
    bins = np.broadcast_to(np.arange(q.shape[-1]), q.shape)
    if settings.top_k is not None and settings.top_k < q.shape[-1]:
        rank = np.argsort(np.argsort(-teacher, axis=-1), axis=-1)
        bins = np.minimum(rank, settings.top_k)
    member = np.eye(bins.max() + 1)[bins]  # [N, V, bins]
    q_b, p_b = (np.einsum("nv,nvb->nb", x, member) for x in (q, p))
    q_bin, p_bin = (np.einsum("nb,nvb->nv", x, member) for x in (q_b, p_b))
    if settings.divergence == "forward_kl":
        kl = (p_b * np.log(p_b / q_b)).sum(-1)
        gradient = q - p_bin * q / q_bin
    else:
        kl = (q_b * np.log(q_b / p_b)).sum(-1)
        gradient = q * (np.log(q_bin / p_bin) - kl[:, None])
    return tau**2 * kl, tau * gradient


@jax.jit
def divergences_and_gradients(student, teacher):
    """Returns the divergences and gradients of all `CASES` in one program."""
    found = {}
    for name, settings in CASES.items():
        kl, back = jax.vjp(
            lambda student, settings=settings: token_divergence(student, teacher, settings), student
        )
        found[name] = kl, back(jnp.ones_like(kl))[0]
    return found


CASES = {
    f"{divergence} {top_k} {temperature}": DistillSection(
        teacher="x", divergence=divergence, top_k=top_k, temperature=temperature
    )
    for divergence in ("forward_kl", "reverse_kl")
    for top_k, temperature in ((None, 2.5), (1, 1.0), (3, 2.5), (11, 0.7), (50, 2.5))
}


def test_divergence_and_gradient_equal_float64():
    student, teacher = np.random.default_rng(0).normal(0, 3, (2, 9, 12)).astype(np.float32)
    for name, found in divergences_and_gradients(student, teacher).items():
        expected = reference(student, teacher, CASES[name])
        np.testing.assert_allclose(found[0], expected[0], atol=1e-5, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(found[1], expected[1], atol=1e-5, err_msg=name)
        assert (expected[0] > 0).all()


def test_the_rest_keeps_a_small_mass():
    """1 − Σ of the two largest is 0 in float32, but the mass of the others is 2 · 10⁻¹⁰."""
    student, teacher = np.float32([[30, 30, 7, 7]]), np.float32([[31, 30, 8, 7]])
    settings = [
        DistillSection(teacher="x", divergence=name, top_k=2)
        for name in ("forward_kl", "reverse_kl")
    ]
    gradients = jax.jit(
        lambda s: [
            jax.grad(lambda s, one=one: token_divergence(s, teacher, one)[0])(s) for one in settings
        ]
    )
    for found, one in zip(gradients(student), settings, strict=True):
        expected = reference(student, teacher, one)[
            1
        ]  # of the others: their mass times a float32 rounding error
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-16, err_msg=one.divergence)


MIXED = DistillSection(
    teacher="x", divergence="reverse_kl", top_k=4, temperature=1.5, data_weight=0.3
)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, VOCABULARY, (2, 3, 8)).astype(np.int32)
    segments = np.cumsum(rng.random((3, 8)) < 0.2, axis=1).astype(np.int32)
    return Batch(tokens, targets, segments, (rng.random((3, 8)) < 0.7).astype(np.float32))


def transformer(seed=3, platform="cpu", padding=0, **changes):
    config = small_config(
        **{"model.dropout_rate": 0.0, "model.dtype": "float32"} | changes
    ).architecture(VOCABULARY, platform)
    return transformer_of(replace(config, vocab_size=VOCABULARY + padding), seed)


def transformer_of(config, seed=3):
    return abstract_model(config)[0](random_weights(config, seed))


def pair_of(platform="cpu"):
    """Returns a student, and a teacher with other sizes, positions and padding of the
    vocabulary.
    """
    changes = {
        "model.dim": 24,
        "model.n_heads": 3,
        "model.num_blocks": 2,
        "attention.use_rotary_pos": False,
    }
    return transformer(platform=platform), transformer(5, platform, padding=3, **changes)


def sums_and_gradients(models, batch, settings, chunk_logits=1 << 24):
    """Returns the sums, and the gradients with respect to the weights of the student and of the
    teacher.
    """
    graphs, states = zip(*map(nnx.split, models), strict=True)

    @jax.jit
    def gradients(states):
        def loss(states):
            model, teacher = (
                nnx.merge(graph, state) for graph, state in zip(graphs, states, strict=True)
            )
            total = distill_losses(
                model, BatchWithTeacher(batch, teacher), settings, chunk_logits=chunk_logits
            )
            return total.nats + 0.1 * total.penalty, total

        return jax.grad(loss, has_aux=True)(states)

    (student, teacher), total = gradients(states)
    return total, jax.tree.leaves(student), jax.tree.leaves(teacher)


@pytest.fixture(scope="module")
def whole(batch):
    return sums_and_gradients(pair_of(), batch, MIXED)


def test_sums_and_gradient_equal_float64_and_the_teacher_has_none(batch, whole):
    """Applies the chain rule: the vector-Jacobian product of the logits with the float64 gradient
    of the loss.
    """
    models, (total, gradient, of_teacher) = pair_of(), whole
    graph, state = nnx.split(models[0])

    def logits(model):
        tokens, segments = jnp.asarray(batch.tokens_BT), jnp.asarray(batch.segments_BT)
        return model(tokens, jnp.arange(8)[None], segments_BT=segments)[0].reshape(24, -1)

    student, back = jax.vjp(jax.jit(lambda state: logits(nnx.merge(graph, state))), state)
    teacher = np.asarray(jax.jit(logits)(models[1]), np.float64)[:, :VOCABULARY]
    kl, d_kl = reference(student, teacher, MIXED)
    mask, one_hot = batch.mask_BT.reshape(-1), np.eye(VOCABULARY)[batch.targets_BT.reshape(-1)]
    wide = np.asarray(student, np.float64)
    normalizer, nats = np.log(np.exp(wide).sum(-1)), -np.log((softmax(wide) * one_hot).sum(-1))
    expected = [
        mask @ (0.7 * kl + 0.3 * nats),
        mask @ normalizer**2,
        mask.sum(),
        mask @ kl,
        mask @ nats,
    ]
    np.testing.assert_allclose(
        [total.nats, total.penalty, total.num_targets, *total.metrics], expected, rtol=1e-5
    )
    d_logits = (
        0.7 * d_kl + 0.3 * (softmax(wide) - one_hot) + 0.2 * (normalizer[:, None] * softmax(wide))
    )
    (expected_gradient,) = back((mask[:, None] * d_logits).astype(np.float32))
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected_gradient))
    for one, other in zip(gradient, jax.tree.leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * largest)
    assert len(of_teacher) > 10 and not any(np.any(leaf) for leaf in of_teacher)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_chunks_have_the_same_sums_and_gradient(batch, whole, platform, monkeypatch):
    """Also covers the code path of accelerators, which rounds the output layers once for all
    chunks.
    """
    monkeypatch.setitem(PLATFORMS, "gpu", replace(PLATFORMS["gpu"], min_loss_chunk_tokens=1))
    parts = sums_and_gradients(
        pair_of(platform), batch, MIXED, chunk_logits=5 * (2 * VOCABULARY + 3)
    )
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-5)


def test_a_student_equal_to_its_teacher_has_divergence_zero(batch):
    losses = jax.jit(
        lambda model, teacher, batch: distill_losses(
            model, BatchWithTeacher(batch, teacher), DistillSection()
        )
    )
    same, other = (
        losses(transformer(), teacher, batch) for teacher in (transformer(), transformer(4))
    )
    np.testing.assert_allclose([same.nats, same.metrics[0]], 0, atol=1e-6)
    assert float(other.nats) > 0.01


def traced_loss(rows, length):
    """Returns a function that maps `chunk_logits` to the gradient of a loss and its arguments, with
    a vocabulary of 4096.
    """
    config = small_config(**{"model.dropout_rate": 0.0, "model.hidden_dim": 16}).architecture(4096)
    graph, state = nnx.split(transformer_of(config))
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    batch = Batch(ids, ids, ids, jax.ShapeDtypeStruct((rows, length), jnp.float32))

    def with_chunks(chunk_logits):
        def loss(state, teacher_weights, batch):
            pair = BatchWithTeacher(batch, nnx.merge(graph, teacher_weights))
            return distill_losses(
                nnx.merge(graph, state), pair, DistillSection(), chunk_logits=chunk_logits
            ).nats

        return jax.grad(loss), state, state, batch

    return with_chunks


def test_chunks_compute_neither_logits_at_once():
    with_chunks = traced_loss(128, 16)
    assert largest_array(*with_chunks(1 << 24)) == 128 * 16 * 4096
    assert (
        largest_array(*with_chunks(64 * 4096)) == 32 * 4096
    )  # the logits of a chunk of one of the models


@pytest.mark.slow
def test_chunks_allocate_neither_logits(optimized):
    with_chunks, all_logits = traced_loss(4, 64), 4 * 64 * 4096 * 4

    def temporary(chunk_logits):
        return temporary_bytes(optimized, *with_chunks(chunk_logits))

    assert temporary(1 << 24) >= 2 * all_logits and temporary(16 * 4096) < all_logits


SETTINGS = {
    "model.dim": 16, "model.n_heads": 2, "model.num_blocks": 1, "model.max_context": 16,
    "training.batch_size": 4, "training.steps": 8, "training.warmup_steps": 1, "training.lr": 0.03,
    "training.schedule": "constant", "training.eval_every": 4, "logging.log_every": 4,
    "logging.plot": False,
}  # fmt: skip
BYTES = {"tokenizer.tokenizer_type": "byte"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a corpus and the teacher, a run of two layers."""
    folder = tmp_path_factory.mktemp("distill")
    (folder / "a.txt").write_text(
        "nel mezzo del cammin di nostra vita mi ritrovai per una selva oscura\n" * 40
    )
    config = teacher_config(folder)
    write_run(folder / "teacher", config, random_weights(config.architecture(259), size=0.6))
    return folder


def teacher_config(folder, **changes):
    return config_of(folder, objective="next_token", **BYTES | {"model.num_blocks": 2} | changes)


def config_of(folder, *, objective="distill", **changes):
    settings = {"data.path": str(folder / "a.txt"), "training.objective": objective}
    if objective == "distill":
        settings["distill.teacher"] = str(folder / "teacher")
    return build_config({}, SETTINGS | settings | changes)


@pytest.fixture(scope="module")
def student(folder):
    config = config_of(folder, **{"distill.data_weight": 0.25, "training.grad_accum": 2})
    return launch(config, run_dir=folder / "student"), config


def test_run_has_the_tokenizer_of_its_teacher_and_logs_both_losses(folder, student):
    run, config = student
    assert run.tokenizer.read_bytes() == (folder / "teacher" / "tokenizer.json").read_bytes()
    assert load_run_config(run).tokenizer.tokenizer_type == "byte"
    evaluation, both = (
        [row for row in read_jsonl(run.metrics) if row["kind"] == kind][-1]
        for kind in ("evaluation", "distillation")
    )
    mixed = 0.75 * both["val_kl"] + 0.25 * both["val_data_loss"]
    np.testing.assert_allclose(evaluation["val_loss"], mixed, rtol=1e-6)
    np.testing.assert_allclose(read_csv(run.log(config))[-1]["val_loss"], mixed, rtol=1e-6)
    store = open_store(config, run.data, Tokenizer.load(run.tokenizer))
    targets = len(store.validation_ids) - 1  # a byte each, except for the EOS token
    bits = both["val_data_loss"] / np.log(2) * targets / (targets - 1)
    np.testing.assert_allclose(evaluation["bits_per_byte"], bits, rtol=1e-6)
    first, last = (row for row in read_jsonl(run.metrics) if row["kind"] == "interval")
    assert last["kl"] < first["kl"] and last["data_loss"] < first["data_loss"]


def test_resumed_run_equals_the_uninterrupted_one_and_needs_the_same_teacher(
    folder, student, capfd
):
    run, config = student[0], load_run_config(student[0])
    cut = copy_until(run, 4, folder / "elsewhere" / "cut")
    (folder / "teacher").rename(
        folder / "elsewhere" / "teacher"
    )  # found by its name next to the run
    try:
        launch(config, run_dir=cut.path, resume=True)
    finally:
        (folder / "elsewhere" / "teacher").rename(folder / "teacher")
    assert cut.weights.read_bytes() == run.weights.read_bytes()
    size = 4 * sum(np.prod(leaf.shape) for leaf in model_shapes(teacher_config(folder)).values())
    assert f"teacher {human_bytes(int(size))}, " in capfd.readouterr().err
    other = write_run(folder / "elsewhere" / "teacher", teacher_config(folder, **{"model.dim": 24}))
    (folder / "teacher").rename(folder / "gone")
    longer = config.model_copy(update={"training": config.training.model_copy(update={"steps": 9})})
    try:
        with pytest.raises(UserError, match=ERRORS["was_trained_with_a_teacher"]):
            launch(longer, run_dir=cut.path, resume=True)
    finally:
        (folder / "gone").rename(folder / "teacher")
        shutil.rmtree(other.path)


def test_another_tokenizer_or_a_longer_context_is_refused(folder, tmp_path):
    content = (folder / "teacher" / "tokenizer.json").read_text()
    (tmp_path / "t.json").write_text(content.replace("<eos>", "<other>"))
    given = {
        "tokenizer.tokenizer_type": "file",
        "tokenizer.tokenizer_path": str(tmp_path / "t.json"),
    }
    for changes, sentence in (
        (given, "distill_teacher_the_run"),
        ({"model.max_context": 17}, "longer_than_the_context_of"),
    ):
        with pytest.raises(UserError, match=ERRORS[sentence]):
            launch(config_of(folder, **changes), run_dir=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_student_starts_from_evenly_spaced_layers(folder):
    teacher = write_run(folder / "deep", teacher_config(folder, **{"model.num_blocks": 4}))
    start = {"distill.init_from_teacher": True, "distill.teacher": str(teacher.path)}
    config = config_of(folder, **{"model.num_blocks": 2}, **start)
    model, fingerprint = config.architecture(259), Tokenizer.load(teacher.tokenizer).fingerprint
    found = starting_weights(config, model, fingerprint)
    weights = load_run_weights(
        teacher, load_run_config(teacher), model_shapes(load_run_config(teacher)), 259
    )
    assert found.keys() == model_shapes(config).keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, weights[name.replace("blocks/1", "blocks/2")])
    for changes in ({"model.hidden_dim": 24}, {"model.num_blocks": 5}):
        other = config_of(folder, **start | changes)
        with pytest.raises(UserError, match=ERRORS["only_the_number_of_layers"]):
            starting_weights(other, other.architecture(259), fingerprint)


def model_shapes(config):
    return Layout(config.architecture(259)).shapes


def loaded_model(run):
    config = load_run_config(run)
    return abstract_model(config.architecture(259))[0](
        load_run_weights(run, config, model_shapes(config), 259)
    )


@pytest.mark.slow
def test_adapters_learn_from_a_bfloat16_teacher(folder, student):
    """The adapters of a student start at the divergence of their base, which a teacher rounded to
    bfloat16 hardly changes.
    """
    changes = {
        "training.init_from": str(student[0].path),
        "lora.rank": 2,
        "distill.teacher_weights": "bfloat16",
    }
    config = config_of(folder, **changes, **{"model.dtype": "float32"})
    tokenizer, store = prepare_data(config, folder / "tokens", Tokenizer.load(student[0].tokenizer))
    model, losses = config.trained_architecture(tokenizer.vocab_size), []
    layout = Layout(model)
    teacher = open_teacher(config, layout, tokenizer.fingerprint)
    training = TrainStep(config, model, 8, layout, teacher=teacher)
    state, teacher_weights = training.initial_state(), teacher.load_weights()
    assert (
        all(is_adapter(name) for name in state.parameters)
        and teacher_weights["embed"].dtype == "bfloat16"
    )
    base = frozen_weights(config, model, tokenizer.fingerprint, layout)
    runs = [student[0], RunDirectory(folder / "teacher")]
    student_model, teacher_model = (loaded_model(run) for run in runs)
    losses_of = jax.jit(
        lambda model, *rest: distill_losses(model, BatchWithTeacher(*rest), config.distill)
    )
    of_base = losses_of(student_model, store.batch(0), teacher_model)
    for _ in range(3):
        state, metrics = training.program(state, store.batch(0), base, teacher_weights)
        losses.append(float(metrics.metrics[0]))
    expected = float(of_base.metrics[0] / of_base.num_targets)
    assert losses[0] == pytest.approx(expected, rel=0.02) and losses[0] != expected
    assert losses[2] < losses[0]


def test_conversations_have_the_batches_of_sft(folder):
    records = [{"prompt": f"say {i}", "completion": "yes"} for i in range(12)]
    (folder / "c.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer, given = (
        Tokenizer.load(folder / "teacher" / "tokenizer.json"),
        {"data.path": str(folder / "c.jsonl")},
    )
    given |= {"model.max_context": 40}
    sft = prepare_data(config_of(folder, objective="sft", **given), folder / "sft", tokenizer)[1]
    distill = prepare_data(
        config_of(folder, **given, **{"distill.data": "conversations"}), folder / "c", tokenizer
    )[1]
    for one, other in zip(sft.batch(3), distill.batch(3), strict=True):
        np.testing.assert_array_equal(one, other)
    assert 0 < sft.batch(3).mask_BT.mean() < 0.5


@pytest.mark.slow
def test_dry_run_counts_the_teacher(folder):
    notes = []
    dry_run(inherit_settings(config_of(folder)), notes.append)
    size = 4 * sum(np.prod(leaf.shape) for leaf in model_shapes(teacher_config(folder)).values())
    assert f"teacher {human_bytes(int(size))}, " in "\n".join(notes)


def test_sampled_answers_are_compared_token_by_token(folder):
    """Computes the reverse divergence of the first step from the logits of both models at the
    tokens of the answers.
    """
    config, tokenizer, store = samples_config(folder)
    layout = Layout(config.architecture(tokenizer.vocab_size))
    teacher = open_teacher(config, layout, tokenizer.fingerprint)
    training = TrainStep(config, layout.model, 8, layout, length=32, teacher=teacher)
    state, teacher_weights = training.initial_state(), teacher.load_weights()
    source = DistillationBatches(training, store, tokenizer, {}, lambda: False)
    batch, again = source.batch(0, state), source.batch(0, state)
    for one, other in zip(batch, again, strict=True):
        np.testing.assert_array_equal(one, other)
    prompts = [prompt.ids for prompt in store.batch(0)]
    for row, prompt in enumerate(prompts):
        np.testing.assert_array_equal(batch.tokens_BT[row, : len(prompt)], prompt)
        answer = np.flatnonzero(batch.mask_BT[row])
        np.testing.assert_array_equal(answer, np.arange(len(prompt) - 1, answer[-1] + 1))
        np.testing.assert_array_equal(
            batch.targets_BT[row, : answer[-1]], batch.tokens_BT[row, 1 : answer[-1] + 1]
        )
        assert len(answer) <= 6 and (
            len(answer) == 6 or batch.targets_BT[row, answer[-1]] in tokenizer.stop_ids
        )
    read = jax.jit(lambda model, tokens: model(tokens, np.arange(32)[None])[0])
    student_BTV, teacher_BTV = (
        read(abstract_model(model)[0](weights), batch.tokens_BT)
        for model, weights in ((layout.model, state.parameters), (teacher.model, teacher_weights))
    )
    logits = (
        np.asarray(logits_BTV).reshape(4 * 32, -1) for logits_BTV in (student_BTV, teacher_BTV)
    )
    expected = reference(*logits, config.distill)[0]
    mask = np.asarray(batch.mask_BT).reshape(-1)
    metrics = training.program(state, batch, {}, teacher_weights)[1]
    np.testing.assert_allclose(metrics.metrics[0], expected @ mask / mask.sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics.loss, metrics.metrics[0], rtol=1e-6)


def samples_config(folder, **changes):
    (folder / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(20))
    )
    given = {
        "data.path": str(folder / "p.jsonl"),
        "distill.data": "samples",
        "distill.divergence": "reverse_kl",
    }
    given |= {
        "model.max_context": 32,
        "generation.max_new_tokens": 6,
        "model.dtype": "float32",
    } | changes
    teacher = folder / "longer"  # with a context of 32 tokens
    if not teacher.is_dir():
        write_run(
            teacher, teacher_config(folder, **{"model.max_context": 32, "model.num_blocks": 1})
        )
    config = inherit_settings(config_of(folder, **given, **{"distill.teacher": str(teacher)}))
    tokenizer = Tokenizer.load(teacher / "tokenizer.json")
    return config, tokenizer, prepare_data(config, folder / "prompts", tokenizer)[1]


@pytest.mark.slow
def test_resumed_run_with_samples_equals_the_uninterrupted_one(folder):
    config, *_ = samples_config(folder)
    whole = launch(config, run_dir=folder / "samples")
    cut = copy_until(whole, 4, folder / "half of the samples")
    launch(config, run_dir=cut.path, resume=True)
    assert cut.weights.read_bytes() == whole.weights.read_bytes()
    rows = [
        [row for row in read_jsonl(run.metrics) if row["kind"] == "distillation"]
        for run in (whole, cut)
    ]
    assert rows[0] == rows[1] and [row["step"] for row in rows[0]] == [4, 8]
    assert "bits_per_byte" not in read_csv(whole.log(config))[-1]
    with pytest.raises(UserError, match=ERRORS["distill_data_weight_has_no_effect"]):
        build_config(
            {},
            {
                "training.objective": "distill",
                "distill.data": "samples",
                "distill.data_weight": 0.5,
            },
        )


@pytest.mark.slow
def test_a_student_is_ahead_of_one_without_teacher_at_equal_steps(tmp_path):
    """Half of the depth and the same tokens, but the teacher was trained for five times as many
    steps.
    """
    text = {
        "data.path": inspect.__file__,
        "model.dim": 32,
        "model.max_context": 32,
        "training.batch_size": 8,
    }
    text |= {
        "training.eval_every": 300,
        "training.lr": 0.005,
        "training.schedule": "cosine",
        "training.eval_tokens": 4096,
    }
    teacher = {**text, "model.num_blocks": 2, "training.steps": 300, "tokenizer.vocab_size": 512}
    launch(build_config({}, SETTINGS | teacher), run_dir=tmp_path / "teacher")
    losses = []
    for weight in (1.0, 0.0):
        student = {
            **text,
            "training.objective": "distill",
            "distill.teacher": str(tmp_path / "teacher"),
            "training.steps": 60,
        }
        run = launch(
            build_config({}, SETTINGS | student | {"distill.data_weight": weight}),
            run_dir=tmp_path / str(weight),
        )
        losses.append(
            [
                row["val_data_loss"]
                for row in read_jsonl(run.metrics)
                if row["kind"] == "distillation"
            ][-1]
        )
    assert losses[1] < losses[0] - 0.02, losses
