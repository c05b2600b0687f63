"""Adapters written by PEFT (`make_adapters.py`), and the error messages for unsupported and damaged
adapters.
"""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dantinox.config import UserError, build_config
from dantinox.interop.merge_adapters import merge_adapter
from dantinox.model.lora import projections
from dantinox.model.parameters import abstract_model
from dantinox.run import create_run
from dantinox.run.adapters import merge_adapters, peft_config, save_adapter
from dantinox.run.peft_folder import load_adapter
from tests.error_texts import ERRORS

FOLDER = Path(__file__).parent / "peft"
V = 17
CONFIG_OF = {
    "model.dim": 16, "model.n_heads": 4, "model.kv_heads": 2, "model.head_size": 4,
    "model.num_blocks": 2, "model.hidden_dim": 24, "model.max_context": 32,
    "model.norm_epsilon": 1e-5, "model.dtype": "float32",
}  # fmt: skip
MODEL = build_config({}, CONFIG_OF).architecture(V)


def base_weights():
    """The parameters of the Llama model in `base.safetensors`."""
    tensors = {
        name.removeprefix("model."): array
        for name, array in load_file(FOLDER / "base.safetensors").items()
    }
    parameters = {"embed": tensors["embed_tokens.weight"], "norm_f/scale": tensors["norm.weight"]}
    for i in range(MODEL.num_blocks):
        layer = {
            name.removeprefix(f"layers.{i}."): a
            for name, a in tensors.items()
            if name.startswith(f"layers.{i}.")
        }
        q, k, v = (layer[f"self_attn.{p}_proj.weight"].T.reshape(16, 2, -1, 4) for p in "qkv")
        parameters |= {
            f"blocks/{i}/norm1/scale": layer["input_layernorm.weight"],
            f"blocks/{i}/norm2/scale": layer["post_attention_layernorm.weight"],
            f"blocks/{i}/attention/qkv/kernel": np.concatenate([q, k, v], axis=2),
            f"blocks/{i}/attention/out/kernel": (
                layer["self_attn.o_proj.weight"].T.reshape(2, 2, 4, 16)
            ),
            f"blocks/{i}/ffn/gate_up/kernel": np.stack(
                [layer[f"mlp.{p}_proj.weight"].T for p in ("gate", "up")], axis=1
            ),
            f"blocks/{i}/ffn/down/kernel": layer["mlp.down_proj.weight"].T,
        }
    return parameters


forward = jax.jit(lambda model, tokens_BT, positions_BT: model(tokens_BT, positions_BT)[0])


@pytest.mark.parametrize("name", ["base", "all", "patterns", "dora"])
def test_logits_with_an_adapter_equal_those_of_peft(name):
    expected, changes = (
        np.load(FOLDER / "expected.npz"),
        ({} if name == "base" else load_adapter(FOLDER / name, MODEL)),
    )
    weights = {
        path: merge_adapters(array, changes.get(path, [])) for path, array in base_weights().items()
    }
    build, shapes = abstract_model(MODEL)
    assert {path: array.shape for path, array in weights.items()} == {
        path: leaf.shape for path, leaf in shapes.items()
    }
    logits = forward(build(weights), expected["tokens"], np.arange(9)[None])
    tolerance = {"dora": 1e-5}.get(name, 2e-5)
    np.testing.assert_allclose(logits, expected[name], atol=tolerance)


def test_scale_with_rank_and_alpha_patterns_and_rslora():
    changes = load_adapter(FOLDER / "patterns", MODEL)
    found = {
        (path, c.a_IR.shape[1]): c.scale
        for path, cs in changes.items()
        for c in cs
        if "blocks/1" in path
    }
    assert found == {
        ("blocks/1/attention/qkv/kernel", 3): pytest.approx(6 / 3**0.5),
        ("blocks/1/attention/out/kernel", 5): pytest.approx(6 / 5**0.5),
        ("blocks/1/ffn/down/kernel", 3): pytest.approx(9 / 3**0.5),
    }


@pytest.fixture
def adapter(tmp_path):
    """A function that copies an adapter, changes keys of its configuration or its arrays, and
    returns the folder.
    """
    folder = Path(shutil.copytree(FOLDER / "all", tmp_path / "adapter"))

    def change(arrays=None, **keys):
        path = folder / "adapter_config.json"
        path.write_text(
            json.dumps(
                {
                    key: v
                    for key, v in (json.loads(path.read_text()) | keys).items()
                    if v != "absent"
                }
            )
        )
        if arrays is not None:
            tensors = load_file(folder / "adapter_model.safetensors")
            arrays(tensors)
            save_file(tensors, folder / "adapter_model.safetensors")
        return folder

    return change


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
UNSUPPORTED = [
    ({"use_dora": True}, r"lacks lora_magnitude_vector of layers.0.mlp.down_proj"),
    ({"use_dora": "yes"}, r"must have use_dora true or false, got 'yes'"),
    ({"use_qalora": True}, r"adapter_config.json has use_qalora: true, which is not supported"),
    ({"bias": "all"}, r"has bias: 'all', expected one of 'none'"),
    ({"peft_type": "IA3"}, r"has peft_type: 'IA3', expected one of 'LORA'"),
    ({"peft_type": "absent"}, r"has no peft_type: it is not the configuration of a PEFT adapter"),
    ({"init_lora_weights": "pissa"}, r"has init_lora_weights: 'pissa', expected one of"),
    ({"fan_in_fan_out": True}, r"has fan_in_fan_out: true, which is not supported"),
    (
        {"modules_to_save": ["lm_head"]},
        r"has modules_to_save: \['lm_head'\], which is not supported",
    ),
    ({"layer_replication": [[0, 2]]}, r"has layer_replication"),
    ({"a_key_of_the_future": 1}, r"has a_key_of_the_future: 1, which is not supported"),
    (
        {"rank_pattern": {".*q_proj": 2}},
        r"has the pattern '\.\*q_proj' in rank_pattern, expected the name of a module",
    ),
    ({"rank_pattern": [1]}, r"must have a mapping as rank_pattern, got \[1\]"),
    (
        {"rank_pattern": {"q_proj": 2}},
        r"has lora_A of layers.0.self_attn.q_proj with shape \(4, 16\), expected \(2, 16\)",
    ),
    ({"r": "4"}, r"must have a rank that is an integer ≥ 1, got '4'"),
    ({"lora_alpha": float("nan")}, r"must have a lora_alpha that is a number, got nan"),
    ({"use_rslora": 1}, r"must have use_rslora true or false, got 1"),
    ({"arrays": lambda t: t.pop(FIRST)}, r"lacks lora_A of layers.0.self_attn.q_proj"),
    ({"arrays": lambda t: t.clear()}, r"holds no adapters"),
    (
        {"arrays": lambda t: t.update({FIRST: t[FIRST].astype(np.float64)})},
        r"as float64, expected one of float32",
    ),
    (
        {"arrays": lambda t: t.update({FIRST.replace("0", "9"): t[FIRST]})},
        r"layers.9.*but this model has 2 layers",
    ),
    (
        {"arrays": lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[FIRST]})},
        r"holds .*lm_head.*, but this model has",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), UNSUPPORTED, ids=[message for _, message in UNSUPPORTED]
)
def test_unsupported_adapter_is_an_error(adapter, change, message):
    with pytest.raises(UserError, match=message):
        load_adapter(adapter(**change), MODEL)


def test_damaged_files_are_an_error(adapter):
    folder = adapter()
    weights, settings = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    content = weights.read_bytes()
    for broken in (
        b"",
        content[:100],
        content[:-4],
        (10**10).to_bytes(8, "little") + content[8:],
        b"\xff" * 64,
    ):
        weights.write_bytes(broken)
        with pytest.raises(UserError, match=ERRORS["adapter_model_safetensors_is_damaged"]):
            load_adapter(folder, MODEL)
    for broken in ("{", "[]", "[" * 100_000):
        settings.write_text(broken)
        with pytest.raises(UserError, match=ERRORS["adapter_config_json_is_not_json"]):
            load_adapter(folder, MODEL)
    settings.unlink()
    with pytest.raises(UserError, match=ERRORS["no_file_at_adapter_config_json"]):
        load_adapter(folder, MODEL)


def test_adapter_for_a_model_without_its_projections_is_an_error():
    latent = build_config({}, {"attention.kv_lora_rank": 8}).architecture(V)
    with pytest.raises(UserError, match=ERRORS["this_model_has_6_layers"]):
        load_adapter(FOLDER / "all", latent)


def test_adapter_config_has_the_keys_of_peft():
    lora = (
        build_config({}, {"training.init_from": "x", "lora.rank": 4, "lora.alpha": 3.0})
        .trained_architecture(V)
        .lora
    )
    peft = json.loads((FOLDER / "all" / "adapter_config.json").read_text())
    written = peft_config(lora)
    assert written.keys() <= peft.keys()
    assert set(written["target_modules"]) == {
        name.rpartition(".")[2] for name in peft["target_modules"]
    }
    assert {key: type(value) for key, value in written.items() if key != "lora_alpha"} == {
        key: type(peft[key]) for key in written if key != "lora_alpha"
    }
    assert written["lora_alpha"] == 3.0


def test_written_dora_adapters_equal_those_that_peft_wrote(tmp_path):
    """The arrays of a run with these settings, read from PEFT's file, are written with the names,
    shapes and values of PEFT.
    """
    golden = load_file(FOLDER / "dora" / "adapter_model.safetensors")
    settings = json.loads((FOLDER / "dora" / "adapter_config.json").read_text())
    model = build_config({}, CONFIG_OF | {
        "training.init_from": "x", "lora.rank": 2, "lora.alpha": 4.0, "lora.dora": True,
        "lora.rank_stabilized": True, "lora.dropout": 0.1,
        "lora.targets": settings["target_modules"],
    }).trained_architecture(V)  # fmt: skip
    deltas, parameters = load_adapter(FOLDER / "dora", MODEL), {}
    shapes = {
        name: leaf.shape for name, leaf in abstract_model(model)[1].items() if "lora_" in name
    }
    for name, shape in shapes.items():
        module, target, leaf = name.rsplit("/", 2)
        (delta,) = (
            d for d in deltas[f"{module}/kernel"] if d.projection == projections("swiglu")[target]
        )
        array = {
            "lora_a": delta.a_IR,
            "lora_b": delta.b_RO,
            "lora_magnitude_vector": delta.magnitude_O,
        }[leaf]
        parameters[name] = array.reshape(shape)
        assert delta.scale == pytest.approx(4 / 2**0.5)
    run = create_run(tmp_path / "run")
    save_adapter(run, parameters, model, {"base_sha256": "0"})
    written = load_file(run.adapter)
    assert written.keys() == golden.keys() and len(golden) == 30
    for name, array in golden.items():
        np.testing.assert_array_equal(written[name], array, err_msg=name)
    config = json.loads((run.adapter.parent / "adapter_config.json").read_text())
    assert {k: v for k, v in config.items() if settings[k] != v and k != "target_modules"} == {}
    assert set(config["target_modules"]) == set(settings["target_modules"])


def test_adapter_that_does_not_fit_leaves_no_run(tmp_path, run_dir):
    from dantinox.run import RunDirectory

    with pytest.raises(UserError, match=ERRORS["with_shape_expected"]):
        merge_adapter(tmp_path / "out", RunDirectory(run_dir), FOLDER / "all")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=ERRORS["is_not_a_run_with"]):
        merge_adapter(tmp_path / "out", RunDirectory(run_dir))
