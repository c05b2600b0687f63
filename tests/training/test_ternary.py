"""Runs with ternary projections: training, resume, generation, export, and what they do not
support.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import dantinox
from dantinox.config import LoraConfig, UserError
from dantinox.distributed.layout import check_whole_matrices, mesh_sizes
from dantinox.generation import prepare
from dantinox.interop.checkpoints import export_checkpoint
from dantinox.model.lora import AdaptedLinear
from dantinox.report import read_csv
from dantinox.run.peft_folder import load_adapter
from tests.error_texts import ERRORS

from .small import VOCABULARY, small_config, small_store, write_run
from .test_resume import Stumbles, outcome

TERNARY = {"model__projections": "ternary"}


def test_resumed_run_equals_the_uninterrupted_one(workshop):
    config = small_config(**TERNARY, training__optimizer="adamw", training__checkpoint_every=5)
    whole = workshop.train("whole", config)
    store = small_store(config, Stumbles)
    store.at = 13
    with pytest.raises(KeyError):
        workshop.train("cut", config, store=store)
    assert outcome(workshop.train("cut", config, resume=True), config) == outcome(whole, config)
    losses = [row["val_loss"] for row in read_csv(whole.log(config))]
    assert losses[-1] < losses[0] < 1.1 * np.log(VOCABULARY)


def test_sub_norms_follow_the_projections():
    for changes, expected in (
        ({}, False),
        (TERNARY, True),
        (TERNARY | {"model__sub_norms": False}, False),
        ({"model__sub_norms": True}, True),
        (TERNARY | {"moe__use_moe": True}, False),
    ):
        assert small_config(**changes).architecture(VOCABULARY).sub_norms == expected


def test_generates_and_keeps_its_logits_through_an_export(tmp_path):
    config = small_config(**TERNARY, model__dtype="float32", model__dropout_rate=0.0)
    write_run(tmp_path / "run", config)
    export_checkpoint(tmp_path / "run", tmp_path / "hf", "hf")
    dantinox.import_checkpoint(tmp_path / "hf", tmp_path / "again")
    runs = [dantinox.load(tmp_path / name) for name in ("run", "again")]
    assert runs[1].config.model.projections == "ternary"
    tokens = [
        dantinox.generate(run.model, [[3, 1, 4]], max_new_tokens=4, temperature=0.0) for run in runs
    ]
    np.testing.assert_array_equal(*tokens)
    with pytest.raises(UserError, match=ERRORS["bitnet_type"]):
        export_checkpoint(tmp_path / "run", tmp_path / "run.gguf", "gguf")
    with pytest.raises(UserError, match=ERRORS["ternary_int4"]):
        prepare(runs[0].model, "int4")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (TERNARY | {"lora__rank": 2, "training__init_from": "x"}, "ternary_lora"),
        (TERNARY | {"attention__kv_lora_rank": 4}, "ternary_latent"),
        ({"model__sub_norms": True, "attention__kv_lora_rank": 4}, "sub_norms_latent"),
        ({"model__sub_norms": True, "moe__use_moe": True}, "sub_norms_moe"),
    ],
)
def test_settings_that_exclude_each_other(changes, says):
    with pytest.raises(UserError, match=ERRORS[says]):
        small_config(**changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [(TERNARY, "ternary_tensor"), ({"model__sub_norms": True}, "sub_norms_tensor")],
)
def test_matrices_are_not_split_in_training(changes, says):
    config = small_config(**changes, distributed__tensor=2, distributed__data=1)
    with pytest.raises(UserError, match=ERRORS[says]):
        mesh_sizes(config, config.architecture(VOCABULARY), 2)


def test_matrices_of_a_teacher_are_not_split():
    with pytest.raises(UserError, match=ERRORS["ternary_teacher"]):
        check_whole_matrices(small_config(**TERNARY).architecture(VOCABULARY), 2, " of the teacher")


def test_a_bfloat16_teacher_stays_ternary():
    """Its logits are those of the ternary model whose float weights are rounded to bfloat16."""
    model = small_config(**TERNARY, model__dtype="float32", model__dropout_rate=0.0).architecture(
        VOCABULARY
    )
    frozen = dantinox.Transformer(
        replace(model, lora=LoraConfig(1, 1.0, (), held="bfloat16")), rngs=nnx.Rngs(0)
    )
    assert not [
        node for _, node in nnx.iter_graph(frozen.blocks) if isinstance(node, AdaptedLinear)
    ]
    plain = dantinox.Transformer(model, rngs=nnx.Rngs(0))
    for (_, ours), (_, theirs) in zip(nnx.iter_graph(plain), nnx.iter_graph(frozen), strict=True):
        if isinstance(ours, nnx.Param):
            ours.set_value(theirs[...].astype(jnp.float32))
    tokens, places = jnp.array([[3, 1, 4, 1, 5]]), jnp.arange(5)[None]
    np.testing.assert_allclose(
        frozen(tokens, places)[0], plain(tokens, places)[0], rtol=0, atol=1e-5
    )


def test_adapters_are_rejected(tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}'
    )
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    matrices = {
        f"{name}A.weight": np.zeros((2, 16), np.float32),
        f"{name}B.weight": np.zeros((16, 2), np.float32),
    }
    save_file(matrices, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=ERRORS["no_projections_that_support_adapters"]):
        load_adapter(tmp_path, small_config(**TERNARY).architecture(VOCABULARY))
