"""Weight-decomposed (DoRA) and rank-stabilized (rsLoRA) adapters: formulas, training, files and
merging.
"""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dantinox.config import UserError
from dantinox.model.lora import (
    MAGNITUDE,
    Projection,
    adapted_linears,
    initial_magnitudes,
    is_adapter,
)
from dantinox.model.parameters import abstract_model
from dantinox.run.adapters import AdapterDelta, merge_adapters
from dantinox.run.peft_folder import load_adapter, load_lora

from .small import VOCABULARY, Workshop, random_weights, small_config
from .test_lora import QKV, adapted, base, logits, lora_config, weights_of

__all__ = ["base"]  # a fixture
BOTH = {"lora__dora": True, "lora__rank_stabilized": True, "lora__rank": 4, "lora__alpha": 3.0}
TARGETS = {"lora__targets": ["q_proj", "v_proj", "down_proj"]}


@pytest.mark.parametrize(
    ("targets", "shape_in", "shape_out"),
    [
        ({name: QKV[name] for name in ("q_proj", "v_proj")}, (6,), (2, 5, 3)),
        ({"o_proj": Projection("attention/out")}, (2, 3), (7,)),
    ],
    ids=["q and v", "out"],
)
def test_layer_and_derivatives_match_the_formula(targets, shape_in, shape_out):
    """y = m / ‖V‖ · V x with V = W + 1.5 · B A, and derivatives in which ‖V‖ is constant, in
    float64.
    """
    layer, numbers = adapted(targets, shape_in, shape_out, dora=True)
    random = np.random.default_rng(3)
    for name in targets:
        adapter = getattr(layer, name)
        magnitudes = random.uniform(0.5, 2, adapter.lora_magnitude_vector.shape)
        adapter.lora_magnitude_vector = nnx.Param(magnitudes.astype(np.float32))
        numbers[name] = np.asarray(adapter.lora_magnitude_vector[...], np.float64)
    graph, state = nnx.split(layer)
    x, d_y = random.standard_normal((4, *shape_in)), random.standard_normal((4, *shape_out))

    @jax.jit
    def run(state, x, d_y):
        y, back = jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)
        return y, *back(d_y)

    y, d_state, d_x = run(state, np.float32(x), np.float32(d_y))
    found = {
        "/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(d_state)
    }
    x_NI, v, factor = x.reshape(4, -1), numbers["kernel"].copy(), np.ones(shape_out)
    norms = {}
    for name, place in targets.items():
        part = (..., slice(*place.part), slice(None)) if place.part else (...,)
        v[part] += 1.5 * np.tensordot(numbers[f"{name}/lora_a"], numbers[f"{name}/lora_b"], 1)
        norms[name] = np.sqrt((v[part] ** 2).sum(axis=tuple(range(len(shape_in)))))
        factor[part] = numbers[name] / norms[name]
    z = np.tensordot(x, v, len(shape_in))
    np.testing.assert_allclose(y, factor * z, rtol=1e-5, atol=1e-5)
    d_z = factor * d_y
    for name, place in targets.items():
        part = (..., slice(*place.part), slice(None)) if place.part else (...,)
        a_IR, b_RO = (
            numbers[f"{name}/lora_a"].reshape(-1, 2),
            numbers[f"{name}/lora_b"].reshape(2, -1),
        )
        part_NO = d_z[part].reshape(4, -1)
        expected = {
            "lora_a": 1.5 * x_NI.T @ part_NO @ b_RO.T,
            "lora_b": 1.5 * (x_NI @ a_IR).T @ part_NO,
            MAGNITUDE: (d_y * z)[part].sum(axis=0) / norms[name],
        }
        for leaf, numbers_of_leaf in expected.items():
            d = found[f"{name}/{leaf}"]
            np.testing.assert_allclose(
                d, numbers_of_leaf.reshape(d.shape), rtol=1e-5, atol=1e-5, err_msg=f"{name}/{leaf}"
            )
    expected_x = np.tensordot(d_z, v, (range(1, d_z.ndim), range(len(shape_in), v.ndim)))
    np.testing.assert_allclose(d_x, expected_x, rtol=1e-5, atol=1e-5)
    assert not np.any(found["kernel"])


@pytest.mark.parametrize("scanned", [False, True], ids=["separate", "scanned"])
def test_fresh_adapters_change_nothing(scanned):
    """The initial magnitudes are the norms of the weights. Outputs whose weights are all zero stay
    zero.
    """
    shape = {
        "training__init_from": "x",
        "model__num_blocks": 2,
        "model__dtype": "float32",
        "model__scan_layers": scanned,
    }
    config = small_config(**shape, **BOTH)
    model = config.trained_architecture(VOCABULARY)
    build, _ = abstract_model(model)
    parameters = random_weights(model)
    for name in (name for name in parameters if name.endswith("lora_b")):
        parameters[name][:] = 0
    (down,) = (name for name in parameters if name.endswith("0/ffn/down/kernel"))
    parameters[down][..., 2] = 0
    found = jax.jit(lambda parameters: initial_magnitudes(build(parameters)))(parameters)
    assert found.keys() == {name for name in parameters if name.endswith(MAGNITUDE)}
    w = np.asarray(parameters[down], np.float64)
    np.testing.assert_allclose(
        found[down.replace("kernel", f"down_proj/{MAGNITUDE}")], np.sqrt((w**2).sum(-2)), rtol=1e-6
    )
    plain, _ = abstract_model(replace(model, lora=None))
    expected = logits(plain({name: p for name, p in parameters.items() if not is_adapter(name)}))
    np.testing.assert_allclose(logits(build(parameters | found)), expected, atol=1e-5)


def test_scale_is_divided_by_the_root_of_the_rank():
    sizes = {"training__init_from": "x", "lora__rank": 16, "lora__alpha": 8.0}
    for stabilized, scale in ((False, 0.5), (True, 2.0)):
        lora = (
            small_config(**sizes, lora__rank_stabilized=stabilized)
            .trained_architecture(VOCABULARY)
            .lora
        )
        assert (lora.scale, lora.alpha) == (scale, 8.0)
    by_default = small_config(
        **sizes | {"lora__alpha": None}, lora__rank_stabilized=True
    ).trained_architecture(VOCABULARY)
    assert by_default.lora.scale == 8.0, "alpha is twice the rank"


@pytest.fixture(scope="module")
def tuned(base):
    """A run with DoRA and rsLoRA adapters, its config, and the model of its last sample."""
    config, seen = lora_config(base, training__sample_every=24, **BOTH | TARGETS), []
    run = Workshop(base.path.parent).train(
        "dora", config, sample=lambda model: seen.append(model) or "text"
    )
    return run, config, seen[-1]


@pytest.mark.slow
def test_run_learns_and_merges_exactly(base, tuned):
    run, config, sampled = tuned
    rows = [
        json.loads(line) for line in run.metrics.read_text().splitlines() if '"evaluation"' in line
    ]
    assert rows[-1]["val_loss"] < rows[0]["val_loss"]
    tensors = load_file(run.adapter)
    assert len(tensors) == 9
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_magnitude_vector"
    assert tensors[name].shape == (16,)
    kernel = weights_of(base)["blocks/0/ffn/down/kernel"]
    assert not np.allclose(tensors[name], np.linalg.norm(kernel, axis=0), rtol=1e-3), (
        "the magnitudes are trained"
    )
    settings = json.loads((run.adapter.parent / "adapter_config.json").read_text())
    assert {key: settings[key] for key in ("r", "lora_alpha", "use_dora", "use_rslora")} == {
        "r": 4, "lora_alpha": 3.0, "use_dora": True, "use_rslora": True,
    }  # fmt: skip
    assert json.loads(run.summary(config).read_text())["trained_parameters"] == sum(
        t.size for t in tensors.values()
    )
    assert all(part.dora for part in adapted_linears(sampled))
    build, _ = abstract_model(config.architecture(VOCABULARY))
    np.testing.assert_allclose(logits(build(weights_of(run))), logits(sampled), atol=1e-5)
    changes = load_adapter(run.adapter.parent, config.architecture(VOCABULARY))  # as a PEFT folder
    merged = {
        path: merge_adapters(array, changes.get(path, []))
        for path, array in weights_of(base).items()
    }
    for path, array in weights_of(run).items():
        np.testing.assert_array_equal(array, merged[path], err_msg=path)


def test_merging_matches_float64():
    random = np.random.default_rng(0)
    w, a, b = (random.standard_normal(shape) for shape in ((6, 2, 5, 3), (6, 2), (2, 6)))
    m = random.uniform(1, 2, 6)
    delta = AdapterDelta(QKV["v_proj"], *map(np.float32, (a, b)), 0.7, np.float32(m))
    v = w[:, :, -1].reshape(6, 6) + 0.7 * a @ b
    expected = w.copy()
    expected[:, :, -1] = (m * v / np.linalg.norm(v, axis=0)).reshape(6, 2, 3)
    np.testing.assert_allclose(
        merge_adapters(np.float32(w), [delta]), expected, rtol=1e-5, atol=1e-6
    )


def test_server_refuses_dora_and_names_the_remedy(base, tuned):
    model = tuned[1].architecture(VOCABULARY)
    with pytest.raises(
        UserError,
        match="has DoRA adapters, which must be merged into their base: use dantinox merge-lora",
    ):
        load_lora(tuned[0].path, base, model)


def without(tensors, name):
    del tensors[name]


VECTOR = "base_model.model.model.layers.0.mlp.down_proj.lora_magnitude_vector"
DAMAGES = [
    ({}, lambda t: without(t, VECTOR), "lacks lora_magnitude_vector of layers.0.mlp.down_proj"),
    (
        {},
        lambda t: t.update({VECTOR: t[VECTOR][:3]}),
        r"lora_magnitude_vector of layers.0.mlp.down_proj with shape \(3,\)",
    ),
    (
        {},
        lambda t: t.update({VECTOR: t[VECTOR] * np.float32(np.nan)}),
        "has NaN or Inf in the adapter of layers.0.mlp.down_proj",
    ),
    (
        {"use_dora": False},
        lambda t: None,
        "has lora_magnitude_vector of layers.0.*, but use_dora is false in adapter_config.json",
    ),
]


@pytest.mark.parametrize(
    ("settings", "damage", "sentence"), DAMAGES, ids=[sentence for *_, sentence in DAMAGES]
)
def test_damaged_magnitudes_are_an_error(tuned, tmp_path, settings, damage, sentence):
    run, config, _ = tuned
    tensors = load_file(run.adapter)
    damage(tensors)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    written = json.loads((run.adapter.parent / "adapter_config.json").read_text()) | settings
    (tmp_path / "adapter_config.json").write_text(json.dumps(written))
    with pytest.raises(UserError, match=sentence):
        load_adapter(tmp_path, config.architecture(VOCABULARY))
