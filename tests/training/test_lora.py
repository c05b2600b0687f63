"""LoRA adapters: the layer against its formula, the trained parameters, and runs that save only
adapters.
"""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from dantinox import cli
from dantinox.config import LoraConfig, UserError, build_config
from dantinox.distributed import Layout
from dantinox.model.flops import adapter_parameters, attention_flops, training_flops
from dantinox.model.frozen_weights import to_frozen_dtype
from dantinox.model.layers import Linear
from dantinox.model.lora import (
    AdaptedLinear,
    Projection,
    enable_dropout,
    frozen_parameters,
    is_adapter,
    projections,
)
from dantinox.model.lora import adapted_linears as parts_of
from dantinox.model.parameters import abstract_model
from dantinox.report import read_csv, read_jsonl
from dantinox.run import RunDirectory, load_run_config, open_run, weights_digest
from dantinox.run.adapters import load_run_weights
from dantinox.training import loop
from dantinox.training.starting_point import frozen_weights, starting_weights
from dantinox.training.step import TrainStep
from dantinox.training.text_samples import build_sampling_model
from tests.error_texts import ERRORS

from .small import SETTINGS, VOCABULARY, Tokens, Workshop, small_config, small_store, write_run
from .test_resume import TIMES, Stumbles

QKV = {
    name: place for name, place in projections("swiglu").items() if place.module == "attention/qkv"
}


def adapted(targets, shape_in=(6,), shape_out=(2, 5, 3), held="float32", **options):
    """Returns an adapted layer and its parameters in float64: the kernel, and the matrices A and B
    of every target.
    """

    def construct():
        rngs = nnx.Rngs(0)
        linear = Linear(shape_in, shape_out, dtype=jnp.float32, rngs=rngs)
        return AdaptedLinear(
            linear, targets, LoraConfig(2, 3.0, tuple(targets), held=held, **options), rngs=rngs
        )

    random, graph_and_state = np.random.default_rng(0), nnx.split(nnx.eval_shape(construct))
    leaves = [
        (path, leaf, random.standard_normal(leaf.shape))
        for path, leaf in nnx.to_flat_state(graph_and_state[1])
    ]
    filled = [(path, leaf.replace(array.astype(leaf.dtype))) for path, leaf, array in leaves]
    state = {"/".join(map(str, path)): np.asarray(leaf[...], np.float64) for path, leaf in filled}
    return nnx.merge(graph_and_state[0], nnx.from_flat_state(filled)), state


@pytest.mark.parametrize(
    ("targets", "shape_in", "shape_out"),
    [
        (QKV, (6,), (2, 5, 3)),
        ({"v_proj": QKV["v_proj"]}, (6,), (2, 5, 3)),
        ({"o_proj": Projection("attention/out")}, (2, 3), (7,)),
    ],
    ids=["qkv", "v", "out"],
)
def test_layer_and_derivatives_match_the_formula(targets, shape_in, shape_out):
    """y = W x + 1.5 · B A x, with derivatives with respect to A, B and x, but not W."""
    layer, numbers = adapted(targets, shape_in, shape_out)
    graph, state = nnx.split(layer)
    x = np.random.default_rng(1).standard_normal((4, *shape_in))
    d_y = np.random.default_rng(2).standard_normal((4, *shape_out))

    @jax.jit
    def run(state, x, d_y):
        y, back = jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)
        return y, *back(d_y)

    y, d_state, d_x = run(state, np.float32(x), np.float32(d_y))
    found = {
        "/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(d_state)
    }
    axes = len(shape_in)
    w, expected_y = numbers["kernel"].copy(), np.tensordot(x, numbers["kernel"], axes)
    for name, place in targets.items():
        a, b = numbers[f"{name}/lora_a"], numbers[f"{name}/lora_b"]
        part = (..., slice(*place.part), slice(None)) if place.part else (...,)
        inner = np.tensordot(x, a, axes)
        expected_y[part] += 1.5 * np.tensordot(inner, b, 1)
        w[part] += 1.5 * np.tensordot(a, b, 1)
        outs = list(range(1, d_y.ndim))
        d_inner = 1.5 * np.tensordot(d_y[part], b, (outs, list(range(1, b.ndim))))
        np.testing.assert_allclose(
            found[f"{name}/lora_b"],
            1.5 * np.tensordot(inner, d_y[part], (0, 0)),
            rtol=1e-5,
            atol=1e-5,
        )
        np.testing.assert_allclose(
            found[f"{name}/lora_a"], np.tensordot(x, d_inner, (0, 0)), rtol=1e-5, atol=1e-5
        )
    np.testing.assert_allclose(y, expected_y, rtol=1e-5, atol=1e-5)
    expected_x = np.tensordot(d_y, w, (list(range(1, d_y.ndim)), list(range(axes, w.ndim))))
    np.testing.assert_allclose(d_x, expected_x, rtol=1e-5, atol=1e-5)
    assert not np.any(found["kernel"])


def test_int8_weights_are_rounded_per_output():
    model = small_config(
        training__init_from="x", lora__rank=2, lora__base_weights="int8"
    ).trained_architecture(VOCABULARY)
    shapes = abstract_model(model)[1]
    name = "blocks/0/attention/out/kernel"
    w = np.random.default_rng(0).standard_normal(shapes[name].shape).astype(np.float32)
    w[..., 3] = 0
    parts = to_frozen_dtype(name, w, shapes)
    scale = np.abs(w.reshape(-1, 16)).max(0) / 127
    np.testing.assert_allclose(
        parts["blocks/0/attention/out/scale"], np.where(scale > 0, scale, 1 / 127), rtol=1e-6
    )
    np.testing.assert_allclose(
        parts[name] * parts["blocks/0/attention/out/scale"], w, atol=float(scale.max()) / 1.99
    )
    assert (
        parts[name].dtype == np.int8
        and to_frozen_dtype("embed", w, shapes)["embed"].dtype == jnp.bfloat16
    )
    layer, _ = adapted({"o_proj": Projection("attention/out")}, w.shape[:-1], (16,), held="int8")
    layer.kernel, layer.scale = (
        nnx.Param(parts[name]),
        nnx.Param(parts["blocks/0/attention/out/scale"]),
    )
    layer.o_proj.lora_b = nnx.Param(np.zeros((2, 16), np.float32))
    x = np.random.default_rng(1).standard_normal((3, *w.shape[:-1])).astype(np.float32)
    wide = (parts[name] * parts["blocks/0/attention/out/scale"]).astype(np.float64)
    d_y = np.ones((3, 16), np.float32)
    y, d_x = output_and_gradient(layer, x, d_y)
    np.testing.assert_allclose(y, np.tensordot(x, wide, 3), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(d_x, np.tensordot(d_y, wide, (1, 3)), rtol=1e-4, atol=1e-4)


def output_and_gradient(layer, x, d_y):
    """Returns the output of a layer and the gradient of its input."""
    graph, state = nnx.split(layer)

    @jax.jit
    def run(state, x, d_y):
        y, back = jax.vjp(nnx.merge(graph, state), x)
        return y, back(d_y)[0]

    return run(state, x, d_y)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base run, and its folder."""
    return Workshop(tmp_path_factory.mktemp("lora")).write("base", small_config())


def lora_config(base, **changes):
    settings = {
        "training__optimizer": "adamw",
        "model__dropout_rate": 0.0,
        "lora__rank": 2,
        "lora__dropout": 0.1,
    }
    return small_config(training__init_from=str(base.path), **settings | changes)


@pytest.fixture(scope="module")
def tuned(base):
    """An adapter run, its config, and the model of its last sample."""
    config, seen = lora_config(base, training__sample_every=24), []
    run = Workshop(base.path.parent).train(
        "tuned", config, sample=lambda model: seen.append(model) or "text"
    )
    return run, config, seen[-1]


def weights_of(run, config=None):
    config = config or load_run_config(run)
    shapes = abstract_model(replace(config.architecture(VOCABULARY), scan_layers=False))[1]
    return load_run_weights(run, config, shapes, VOCABULARY, lambda path, array: np.array(array))


def logits(model):
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 8))
    return np.asarray(jax.jit(lambda model, *x: model(*x)[0])(model, tokens, np.arange(8)[None]))


def test_adapter_run_learns_and_saves_only_adapters(base, tuned):
    run, config, _ = tuned
    before = weights_of(base)
    rows = [
        json.loads(line) for line in run.metrics.read_text().splitlines() if '"evaluation"' in line
    ]
    assert rows[-1]["val_loss"] < rows[0]["val_loss"]
    assert not run.weights.exists() and sorted(p.name for p in run.adapter.parent.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    tensors = load_file(run.adapter)
    assert len(tensors) == 14
    assert tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (
        2,
        16,
    )
    assert tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"].shape == (16, 2)
    summary = json.loads(run.summary(config).read_text())
    assert summary["trained_parameters"] == sum(t.size for t in tensors.values()) == 736
    assert summary["parameters"] == sum(a.size for a in before.values())
    changed = {
        name for name, array in weights_of(run).items() if not np.array_equal(array, before[name])
    }
    assert changed == {
        f"blocks/0/{name}/kernel"
        for name in ("attention/qkv", "attention/out", "ffn/gate_up", "ffn/down")
    }


def test_merged_weights_give_the_logits_of_base_and_adapters(tuned):
    run, config, sampled = tuned
    assert any(
        is_adapter("/".join(map(str, path))) for path, _ in nnx.to_flat_state(nnx.state(sampled))
    )
    build, _ = abstract_model(config.architecture(VOCABULARY))
    np.testing.assert_allclose(logits(build(weights_of(run))), logits(sampled), atol=1e-5)


def test_state_and_memory_contain_only_adapters(base):
    config = lora_config(base)
    model = config.trained_architecture(VOCABULARY)
    training, rows = TrainStep(config, model, 24), small_store(config).validation_rows
    programs, state = loop.Programs(training, rows), training.initial_state()
    adapters = sum(p.nbytes for p in state.parameters.values())
    assert all(is_adapter(name) for name in state.parameters)
    moments = sum(leaf.nbytes for leaf in jax.tree.leaves(state.optimizer))
    assert 2 * adapters <= moments <= 2 * adapters + 16  # and two counts
    assert (programs.memory.parameters, programs.memory.optimizer) == (adapters, moments)
    held = sum(
        4 * np.prod(leaf.shape)
        for leaf in frozen_parameters(abstract_model(model)[1], model).values()
    )
    assert programs.memory.frozen == held == 4 * programs.memory.frozen_count
    line = programs.memory.line()
    assert line.startswith(
        "5.06k parameters, 736 of them trained: weights 17.3 kB,"
        " adapters 2.94 kB, optimizer 5.90 kB"
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"model__activation": "gelu", "model__kv_heads": 1}, {"lora__targets": ["v_proj"]}],
    ids=str,
)
def test_parameters_and_flops_follow_from_the_shapes(base, changes):
    model = lora_config(base, **changes).trained_architecture(VOCABULARY)
    shapes = abstract_model(model)[1]
    n = sum(np.prod(leaf.shape) for name, leaf in shapes.items() if is_adapter(name))
    N = sum(
        np.prod(leaf.shape)
        for name, leaf in shapes.items()
        if not is_adapter(name) and leaf.ndim > 1
    )
    assert adapter_parameters(model) == n
    assert training_flops(model, 8) == 4 * N + 6 * n + 3 * attention_flops(model, 8)


def test_fresh_adapters_change_nothing(base):
    """A is uniform in ±1/√in, and B is zero."""
    config = lora_config(base)
    model = config.trained_architecture(VOCABULARY)
    adapters = TrainStep(config, model, 24).initial_state().parameters
    for name, p in adapters.items():
        bound = np.prod(p.shape[:-1]) ** -0.5
        assert (
            not np.any(p) if name.endswith("lora_b") else 0.5 * bound < np.max(np.abs(p)) <= bound
        )
    before = weights_of(base)
    build, _ = abstract_model(config.architecture(VOCABULARY))
    np.testing.assert_array_equal(
        logits(build_sampling_model(model, adapters | before)), logits(build(before))
    )


def outcome(run, config):
    rows = [read_csv(run.log(config)), read_jsonl(run.metrics)]
    return run.adapter.read_bytes(), [
        [{k: v for k, v in row.items() if k not in TIMES} for row in part] for part in rows
    ]


NARROW = {
    "model__scan_layers": True,
    "lora__base_weights": "int8",
    "training__ema": 0.9,
    "training__optimizer": "muon",
}


@pytest.mark.parametrize("changes", [{}, pytest.param(NARROW, marks=pytest.mark.slow)], ids=str)
def test_interrupted_run_is_bit_exact(base, tuned, changes):
    workshop, text = Workshop(base.path.parent), {"sample": lambda model: "text"}
    config = lora_config(base, training__sample_every=24, **changes)
    whole = workshop.train("whole", config, **text) if changes else tuned[0]
    store = small_store(config, Stumbles)
    store.at = 13
    with pytest.raises(KeyError):
        workshop.train(f"cut{len(changes)}", config, store=store, **text)
    assert outcome(
        workshop.train(f"cut{len(changes)}", config, resume=True, **text), config
    ) == outcome(whole, config)
    assert "resumed from step 12" in workshop.notes.getvalue()


def test_base_must_exist_and_be_unchanged(base, tuned, tmp_path):
    run, config, _ = tuned
    moved = Workshop(tmp_path)
    for one in (base, run):
        shutil.copytree(one.path, tmp_path / one.path.name)
    copy = type(run)(tmp_path / "tuned")
    missing_base = config.model_copy(
        update={"training": config.training.model_copy(update={"init_from": "/nowhere/base"})}
    )
    assert np.array_equal(weights_of(copy, missing_base)["embed"], weights_of(base)["embed"]), (
        "found next to the run"
    )
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(UserError, match=ERRORS["the_base_of_tuned_is"]):
        weights_of(copy, missing_base)
    moved.write("base", small_config(), seed=4)
    other = config.model_copy(
        update={
            "training": config.training.model_copy(update={"init_from": str(tmp_path / "base")})
        }
    )
    with pytest.raises(UserError, match=ERRORS["the_adapters_of_tuned_were"]):
        weights_of(copy, other)
    with pytest.raises(UserError, match=ERRORS["was_trained_on_weights_0"]):
        moved.train(
            "tuned",
            other.model_copy(update={"training": other.training.model_copy(update={"steps": 30})}),
            resume=True,
        )


def test_starting_weights_include_the_adapters_of_the_run(tuned):
    run, *_ = tuned
    expected, fingerprint = weights_of(run), Tokens.fingerprint
    whole, again = small_config(training__init_from=str(run.path)), lora_config(run)
    model, adapted_model = whole.architecture(VOCABULARY), again.trained_architecture(VOCABULARY)
    of_whole = starting_weights(whole, model, fingerprint)
    for found in (
        of_whole,
        frozen_weights(again, adapted_model, fingerprint, Layout(adapted_model)),
    ):
        assert found.keys() == expected.keys()
        for name, array in found.items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.slow
def test_training_from_an_adapter_run(base, tuned):
    """Each training starts from the result of the previous one."""
    run, config, _ = tuned
    workshop = Workshop(base.path.parent)
    again = lora_config(run, training__steps=1, training__warmup_steps=0, training__lr=1e-12)
    second = workshop.train("second", again)
    for name, array in weights_of(second).items():
        np.testing.assert_allclose(array, weights_of(run)[name], atol=1e-6, err_msg=name)
    assert weights_digest(second) != weights_digest(run)
    whole = small_config(training__init_from=str(run.path), training__steps=1,
                         training__warmup_steps=0, training__lr=1e-12,
                         training__muon_lr=1e-12)  # fmt: skip
    for name, array in weights_of(workshop.train("whole weights", whole)).items():
        np.testing.assert_allclose(array, weights_of(run)[name], atol=1e-6, err_msg=name)


def test_dropout_applies_to_adapter_inputs_during_training_only(base):
    layer, numbers = adapted({"o_proj": Projection("attention/out")}, (6,), (4,))
    layer.rate, x = 0.5, np.random.default_rng(0).standard_normal((5, 6))
    apply = jax.jit(lambda state, graph, x: nnx.merge(graph, state)(x), static_argnums=1)

    def output():
        graph, state = nnx.split(layer)
        return np.asarray(apply(state, graph, np.float32(x)))

    still = output()
    layer.key = nnx.Variable(jax.random.key(3))
    kept = np.asarray(jax.random.bernoulli(jax.random.key(3), 0.5, x.shape))
    a, b = numbers["o_proj/lora_a"], numbers["o_proj/lora_b"]
    np.testing.assert_allclose(still, x @ numbers["kernel"] + 1.5 * x @ a @ b, atol=1e-5)
    expected = x @ numbers["kernel"] + 1.5 * (kept * x / 0.5) @ a @ b
    np.testing.assert_allclose(output(), expected, atol=1e-5)
    for scanned in (False, True):
        config = lora_config(
            base, lora__dropout=0.5, model__num_blocks=2, model__scan_layers=scanned
        )
        build, shapes = abstract_model(config.trained_architecture(VOCABULARY))
        model = build({name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()})
        assert {part.key for part in parts_of(model)} == {None}
        enable_dropout(model, jax.random.key(0))
        keys = np.concatenate(
            [jax.random.key_data(part.key[...]).reshape(-1, 2) for part in parts_of(model)]
        )
        assert len(np.unique(keys, axis=0)) == len(keys) == 8, (
            "one for each of four modules in each of two layers"
        )


SENTENCES = [
    ({"lora.rank": 2}, "lora.rank needs training.init_from, the run with the base weights"),
    (
        {"attention.kv_lora_rank": 8, "model.kv_heads": None},
        "lora.rank must be null with attention.kv_lora_rank",
    ),
    (
        {"lora.targets": ["gate_proj"], "model.activation": "gelu"},
        r"cannot contain gate_proj: model.activation gelu",
    ),
    (
        {"lora.targets": ["up_proj"], "moe.use_moe": True},
        r"cannot contain up_proj: experts cannot have adapters",
    ),
    (
        {"lora.base_weights": "int8", "moe.use_moe": True},
        "lora.base_weights must be float32 or bfloat16 with moe.use_moe",
    ),
    ({"lora.targets": []}, r"lora.targets must name at least one projection, got \[\]"),
]


@pytest.mark.parametrize(
    ("changes", "sentence"), SENTENCES, ids=[sentence for _, sentence in SENTENCES]
)
def test_unsupported_adapter_settings_are_rejected(changes, sentence):
    start = {} if "needs" in sentence else {"training.init_from": "x", "lora.rank": 2}
    with pytest.raises(UserError, match=sentence):
        build_config({}, SETTINGS | start | changes)


def test_experts_stay_frozen_and_attention_learns(base):
    """Uses only the shapes of the parameters, without a base run."""
    config = lora_config(
        base, moe__use_moe=True, lora__base_weights="bfloat16", moe__shared_experts=1
    )
    model = config.trained_architecture(VOCABULARY)
    shapes = abstract_model(model)[1]
    assert {name.split("/")[4] for name in shapes if is_adapter(name)} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    assert (
        shapes["blocks/0/ffn/experts/down/kernel"].dtype
        == shapes["blocks/0/ffn/shared/down/kernel"].dtype
        == jnp.bfloat16
    )


@pytest.fixture
def command(tmp_path, capfd, monkeypatch):
    """Runs a command in a folder with a text; returns its exit code and output."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("nel mezzo del cammin di nostra vita " * 60)

    def done(*argv):
        code = cli.main([str(arg) for arg in argv])
        return code, *capfd.readouterr()

    return done


def train_command(base, folder, **changes):
    """Returns the arguments of a training of adapters in the run `tuned`."""
    training = {
        "init_from": str(base),
        "steps": 2,
        "batch_size": 2,
        "warmup_steps": 0,
        "lr": 0.05,
    } | changes
    settings = {"training": training, "data": {"path": "text.txt"}, "logging": {"plot": False}}
    (folder / "a.yaml").write_text(json.dumps(settings | {"generation": {"max_new_tokens": 4}}))
    return ["train", "--config", folder / "a.yaml", "--run_dir", "tuned", "--rank", "2"]


def test_commands_train_verify_and_merge(tmp_path, command):
    size = {"dim": 16, "n_heads": 2, "num_blocks": 1, "max_context": 16, "dtype": "float32"}
    write_run(
        tmp_path / "base", build_config({"model": size, "tokenizer": {"tokenizer_type": "byte"}})
    )
    train = train_command(tmp_path / "base", tmp_path)
    code, _, err = command(*train)
    assert code == 0, err
    assert open_run("tuned").adapter.is_file() and command("verify", "tuned")[0] == 0
    assert command("merge-lora", "tuned", "--run_dir", "merged")[0] == 0
    merged, adapted = (open_run(name) for name in ("merged", "tuned"))
    config, of_base = load_run_config(merged), RunDirectory(tmp_path / "base")
    shapes = abstract_model(config.architecture(259))[1]
    found, expected, before = (
        load_run_weights(
            run, load_run_config(run), shapes, 259, lambda path, array: np.array(array)
        )
        for run in (merged, adapted, of_base)
    )
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert (
        np.abs(found["blocks/0/ffn/down/kernel"] - before["blocks/0/ffn/down/kernel"]).max() > 1e-4
    )
    assert command("merge-lora", "merged", "--run_dir", "again")[2].startswith("error: ")
    assert not (tmp_path / "again").exists()
    for wrong in ([], ["tuned", "--base", "x"], ["--adapter", "x"]):
        problem = command("merge-lora", *wrong, "--run_dir", "o")[2]
        assert "needs the run of the adapters, or --adapter and --base" in problem
    shown = command("train", "--init_from", tmp_path / "base", "--print_config")[1]
    assert "dim: 16" in shown and "optimizer: adamw" in shown, (
        "the model of the run, not of the default config"
    )
    start = f"model.dim is 16 in {tmp_path / 'base'}, whose weights the training starts from"
    assert (
        command(*train[:4], "elsewhere", "--dim", "64")[2]
        == f"error: {start}, got 64: leave it out (command line)\n"
    )


@pytest.mark.slow
def test_commands_sample_and_generate(run_dir, tmp_path, command):
    train = train_command(run_dir, tmp_path, sample_every=2)
    assert (
        "30.7k parameters, 1.66k of them trained: weights 116 kB" in command(*train, "--dry_run")[1]
    )
    code, _, err = command(*train)
    assert code == 0 and "no sample" not in err, err
    assert (tmp_path / "tuned" / "samples" / "step_2.txt").is_file()
    assert command("merge-lora", "tuned", "--run_dir", "merged")[0] == 0
    say = ["--prompt", "nel", "--greedy", "--max_new_tokens", 8]
    texts = [command("generate", "--run_dir", run, *say)[1] for run in ("tuned", "merged")]
    assert texts[0] == texts[1] and len(texts[0]) > 3
