"""Training on frozen weights in nf4 and int8 (QLoRA): bytes, gradients, loss, meshes, samples and
resume.
"""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dantinox.config import UserError, build_config
from dantinox.distributed.layout import mesh_sizes
from dantinox.model.frozen_weights import dequantize, to_frozen_dtype
from dantinox.model.lora import Projection, frozen_parameters
from dantinox.model.parameters import abstract_model, stack_layers
from dantinox.programs import tree_bytes
from dantinox.report import human_bytes

from .small import VOCABULARY, Workshop, small_config
from .test_lora import adapted, logits, lora_config, weights_of

NF4 = {"lora__base_weights": "nf4"}


def shapes_of(model, scan_layers=False):
    return abstract_model(replace(model, scan_layers=scan_layers))[1]


def frozen_bytes(sizes, held):
    """The bytes of the frozen weights of a model, and of the same weights in float32; stacked
    layers are traced once.
    """
    config = build_config(
        {}, {**sizes, "training.init_from": "x", "lora.rank": 8, "lora.base_weights": held}
    )
    vocabulary = sizes["model.padded_vocab_size"]
    model = config.trained_architecture(vocabulary)
    frozen = frozen_parameters(shapes_of(model, scan_layers=True), model)
    return tree_bytes(frozen), tree_bytes(shapes_of(replace(model, lora=None), scan_layers=True))


LLAMA_SHAPES = {  # 0.79 billion weights, 92 % of them in projections
    "model.dim": 2048, "model.n_heads": 32, "model.kv_heads": 8, "model.hidden_dim": 5632,
    "model.num_blocks": 16,
    "model.padded_vocab_size": 32_000,
}  # fmt: skip
SMOLLM2_SHAPES = {  # 135 million weights, 79 % of them in projections
    "model.dim": 576, "model.n_heads": 9, "model.kv_heads": 3, "model.hidden_dim": 1536,
    "model.num_blocks": 30,
    "model.padded_vocab_size": 49_152,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "ratio"),
    [(LLAMA_SHAPES, 0.139), (SMOLLM2_SHAPES, 0.155)],
    ids=["Llama with 0.8B", "SmolLM2-135M"],
)
def test_bytes_of_the_frozen_weights(sizes, ratio):
    """Projections take 4.127 of 32 bits, and embeddings 8 bits and a number per row."""
    found, wide = frozen_bytes(sizes, "nf4")
    assert found / wide == pytest.approx(ratio, abs=0.0006)
    D, F, V, L = (
        sizes[f"model.{key}"] for key in ("dim", "hidden_dim", "padded_vocab_size", "num_blocks")
    )
    projections = L * (
        D * D * (2 + 2 * sizes["model.kv_heads"] / sizes["model.n_heads"]) + 3 * D * F
    )
    norms = (2 * L + 1) * D * 4
    assert found == pytest.approx(
        projections * (4 + 8 / 64 + 32 / (64 * 256)) / 8 + V * (D + 4) + norms, rel=2e-4
    )
    assert frozen_bytes(sizes, "int8")[0] / wide > 0.25


def test_gradient_reaches_adapters_only():
    """The product has the dequantized weights; A, B and x have gradients, and the arrays of the
    weights have none.
    """
    layer, numbers = adapted({"down_proj": Projection("ffn/down")}, (128,), (6,), held="nf4")
    w = np.random.default_rng(0).standard_normal((128, 6)).astype(np.float32)
    layer_shapes = {f"ffn/down/{name}": getattr(layer, name)[...] for name in layer.arrays}
    for name, array in to_frozen_dtype("ffn/down/kernel", w, layer_shapes).items():
        setattr(layer, name.rpartition("/")[2], nnx.Param(array))
    x = np.random.default_rng(1).standard_normal((3, 128))
    graph, state = nnx.split(layer)

    @jax.jit
    def results(state, x):
        def total(state, x):
            y = nnx.merge(graph, state)(x)
            return jnp.sum(y**2), y

        (d_state, d_x), y = jax.grad(total, argnums=(0, 1), has_aux=True, allow_int=True)(state, x)
        return y, dequantize(nnx.merge(graph, state).matrix(), (128,)), d_state, d_x

    y, wide, d_state, d_x = results(state, np.float32(x))
    wide = np.asarray(wide, np.float64)
    a, b = numbers["down_proj/lora_a"], numbers["down_proj/lora_b"]
    np.testing.assert_allclose(y, x @ (wide + 1.5 * a @ b), rtol=1e-5, atol=1e-4)
    found = {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(d_state)}
    assert {
        name: str(d.dtype) for name, d in found.items() if name in ("codes", "scale")
    } == dict.fromkeys(("codes", "scale"), "[('float0', 'V')]")
    assert not np.any(found["scale_step"]) and not np.any(found["scale_mean"])
    d_y = 2 * np.asarray(y, np.float64)
    np.testing.assert_allclose(
        found["down_proj/lora_b"], 1.5 * (x @ a).T @ d_y, rtol=1e-4, atol=1e-3
    )
    np.testing.assert_allclose(d_x, d_y @ (wide + 1.5 * a @ b).T, rtol=1e-4, atol=1e-3)


WIDE = {
    "model__dim": 64,
    "model__hidden_dim": 128,
    "model__dropout_rate": 0.0,
}  # whole blocks of 64 inputs


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return Workshop(tmp_path_factory.mktemp("qlora")).write("base", small_config(**WIDE))


def losses(run):
    return [
        json.loads(line)["val_loss"]
        for line in run.metrics.read_text().splitlines()
        if '"evaluation"' in line
    ]


@pytest.mark.slow
def test_loss_on_quantized_weights_is_that_on_float32(base):
    """After 24 steps the loss is within 2 % of that of LoRA on float32 weights."""
    workshop = Workshop(base.path.parent)
    trained = workshop.train("trained base", small_config(training__steps=6, **WIDE))
    found = {
        held: losses(
            workshop.train(
                held, lora_config(trained, lora__dropout=0.0, lora__base_weights=held, **WIDE)
            )
        )
        for held in ("float32", "int8", "nf4")
    }
    assert found["float32"][-1] < 0.9 * found["float32"][0]
    for held in ("int8", "nf4"):
        assert abs(found[held][-1] / found["float32"][-1] - 1) < 0.02, found
    model = lora_config(base, **NF4, **WIDE).trained_architecture(VOCABULARY)
    packed = tree_bytes(frozen_parameters(shapes_of(model), model))
    assert f"weights {human_bytes(packed)}, adapters" in workshop.notes.getvalue(), (
        "the plan of the run in nf4"
    )


def test_nf4_run_samples_and_merges(base):
    """The sample comes from the quantized weights; the merged weights come from the weights of the
    base.
    """
    config, seen = (
        lora_config(
            base,
            training__steps=4,
            training__sample_every=4,
            lora__targets=["q_proj", "down_proj"],
            **NF4,
            **WIDE,
        ),
        [],
    )
    run = Workshop(base.path.parent).train(
        "nf4 sample", config, sample=lambda model: seen.append(model) or "text"
    )
    model = config.trained_architecture(VOCABULARY)
    original = weights_of(base)
    for name, array in original.items():
        parts = to_frozen_dtype(name, array, shapes_of(model))
        sampled = {
            path.removeprefix(name.removesuffix("kernel")): p
            for path, p in parts.items()
            if not path.startswith("embed")
        }
        module = seen[-1]
        if "codes" in sampled:
            for part in name.split("/")[:-1]:
                module = module[int(part)] if part.isdigit() else getattr(module, part)
            for leaf, expected in sampled.items():
                np.testing.assert_array_equal(
                    getattr(module, leaf)[...], expected, err_msg=f"{name} {leaf}"
                )
    embed = to_frozen_dtype("embed", original["embed"], shapes_of(model))
    np.testing.assert_array_equal(
        seen[-1].embed[...], embed["embed/kernel"] * embed["embed/scale"][:, None]
    )
    np.testing.assert_allclose(
        seen[-1].embed[...], original["embed"], atol=np.abs(original["embed"]).max() / 253
    )
    build, _ = abstract_model(config.architecture(VOCABULARY))
    merged, quantized = logits(build(weights_of(run))), logits(seen[-1])
    relative = np.sqrt(np.mean((merged - quantized) ** 2) / np.mean(merged**2))
    assert 0 < relative < 0.4, relative  # nf4 has 16 values


def test_logits_of_nf4_equal_those_of_its_dequantized_weights():
    """Untied output layer and stacked layers, in float32."""
    sizes = {
        "training__init_from": "x",
        "model__num_blocks": 2,
        "model__dtype": "float32",
        "model__weight_tying": False,
    }
    config = small_config(**sizes, lora__rank=2, **NF4, **WIDE | {"model__dim": 24})
    model = config.trained_architecture(VOCABULARY)
    plain, separate = replace(model, lora=None), replace(model, scan_layers=False)
    random, wide, frozen, packed = np.random.default_rng(0), {}, {}, {}
    for name, leaf in abstract_model(plain)[1].items():
        array = np.float32(
            0.3 * random.standard_normal(leaf.shape) if leaf.ndim > 1 else np.ones(leaf.shape)
        )
        parts = to_frozen_dtype(name, array, shapes_of(model))
        frozen |= parts
        leaves = {path.rpartition("/")[2]: p for path, p in parts.items()}
        if "codes" in leaves:
            packed[name] = leaves, array.shape[: array.ndim - leaves["scale"].ndim + 1]
        elif "scale" in leaves and "kernel" in leaves:
            scale = leaves["scale"][:, None] if name == "embed" else leaves["scale"]
            wide[name] = np.float32(leaves["kernel"] * scale)
            assert np.abs(wide[name] - array).max() <= np.abs(array).max() / 253, name
        else:
            wide[name] = array
    wide |= jax.jit(
        lambda arrays: {name: dequantize(arrays[name], packed[name][1]) for name in packed}
    )({name: leaves for name, (leaves, _) in packed.items()})
    shapes = abstract_model(separate)[1].items()
    adapters = {
        name: np.zeros(leaf.shape, np.float32)
        for name, leaf in shapes
        if name.endswith(("lora_a", "lora_b"))
    }
    expected = logits(abstract_model(plain)[0](wide))
    np.testing.assert_allclose(
        logits(abstract_model(separate)[0](frozen | adapters)), expected, atol=2e-5
    )
    stacked = replace(model, scan_layers=True)
    weights = stack_layers(frozen | adapters, stacked)
    found = abstract_model(stacked)[0](weights)
    np.testing.assert_allclose(logits(found), expected, atol=2e-5)
    x = random.standard_normal((3, 24)).astype(np.float32)
    both = jax.jit(
        lambda model, x: (
            model.logits(x),
            model.logits(x, model.output_weights().astype(jnp.float32)),
        )
    )
    np.testing.assert_allclose(*both(found, x), atol=1e-4)


def test_tensor_axis_and_experts_are_refused():
    config = small_config(training__init_from="x", lora__rank=2, distributed__tensor=2, **NF4)
    with pytest.raises(
        UserError,
        match=r"distributed.tensor must be 1 with lora.base_weights: nf4, got 2: its blocks of 64",
    ):
        mesh_sizes(config, config.trained_architecture(VOCABULARY), 4)
    with pytest.raises(
        UserError,
        match=r"must be float32 or bfloat16 with moe.use_moe: experts cannot be stored in nf4",
    ):
        small_config(training__init_from="x", lora__rank=2, moe__use_moe=True, **NF4)
