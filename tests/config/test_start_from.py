"""Settings of a training that starts from a run: the run provides defaults, and contradictions with
its weights are errors.
"""

import warnings
from dataclasses import MISSING, fields
from typing import get_type_hints

import pytest

from dantinox.config import UserError, build_config, dump_config, load_config
from dantinox.config.attention_settings import AttentionSection
from dantinox.config.inherited_settings import build_training, load_training
from dantinox.config.model_config import ARCHITECTURE, SETTING_OF, WEIGHT_FIELDS, ModelConfig
from dantinox.config.model_settings import ModelSection
from dantinox.config.sections import FIELDS
from tests.error_texts import ERRORS

BASE = {
    "model.dim": 48, "model.n_heads": 6, "model.num_blocks": 3, "model.max_context": 64,
    "model.activation": "geglu", "attention.rope_scaling": "linear", "attention.rope_factor": 2.0,
    "tokenizer.vocab_size": 300, "training.lr": 0.5,
}  # fmt: skip


@pytest.fixture
def base(tmp_path):
    """A run directory that has only a config."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.yaml").write_text(dump_config(build_config({}, BASE)))
    return str(tmp_path / "base")


def start(base, tree=None, **changes):
    given = {key.replace("__", "."): value for key, value in changes.items()}
    return build_training(tree or {}, {"training.init_from": base} | given)


def test_model_and_tokenizer_settings_are_inherited(base):
    found, before = start(base), build_config({}, BASE)
    assert (found.model, found.attention, found.moe) == (before.model, before.attention, before.moe)
    assert found.tokenizer == before.tokenizer and found.training.lr == build_config({}).training.lr
    tree = {"training": {"init_from": base, "lr": 0.25}, "model": None, "data": {"path": "a.txt"}}
    found = build_training(tree)
    assert found.model == before.model and (found.training.lr, found.data.path) == (0.25, "a.txt")


def test_settings_that_do_not_affect_weights_may_change(base):
    found = start(
        base,
        model__max_context=128,
        model__dropout_rate=0.1,
        model__scan_layers=True,
        training__steps=500,
    )
    assert (found.model.max_context, found.model.dropout_rate, found.model.dim) == (128, 0.1, 48)
    assert start(base, model__kv_heads=6).model.kv_heads == 6, (
        "null and its resolved value are equal"
    )
    one, other = found.architecture(1), build_config({}, BASE).architecture(1)
    differing = {name for name, value in vars(one).items() if value != getattr(other, name)}
    assert differing == {"max_context", "dropout_rate", "scan_layers"} and not differing & set(
        WEIGHT_FIELDS
    )


def test_inherited_settings_without_effect_are_dropped_silently(base):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = start(base, attention__rope_scaling="none")
    assert found.attention.rope_factor == 1.0
    with pytest.raises(UserError, match=ERRORS["lora_alpha_has_no_effect"]):
        start(base, lora__alpha=2.0)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        (
            "model__dim",
            96,
            (
                "model.dim is 48 in .*base, whose weights the training"
                " starts from, got 96: leave it out"
            ),
        ),
        ("model__activation", "swiglu", "model.activation is 'geglu' in .* got 'swiglu'"),
        ("model__qk_norm", True, "model.qk_norm is false in .* got true"),
        ("moe__use_moe", True, "moe.use_moe is false in .* got true"),
        ("tokenizer__vocab_size", 400, "tokenizer.vocab_size is 300 in .* got 400"),
    ],
)
def test_settings_that_contradict_the_weights_are_refused(base, key, value, sentence):
    with pytest.raises(UserError, match=sentence + r".*\(command line\)"):
        start(base, **{key: value})


def test_the_error_has_the_line(base, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(f"training:\n  init_from: {base}\nmodel:\n  num_blocks: 4\n")
    with pytest.raises(UserError, match=ERRORS["model_num_blocks_is_3_in"]):
        load_training(path)


def test_a_run_reads_only_its_own_settings(base, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(start(base)))
    (tmp_path / "base" / "config.yaml").unlink()
    assert load_config(path).model.dim == 48
    assert start(base).model.dim == build_config({}).model.dim, (
        "reading the weights reports that they are missing"
    )
    assert build_training({}, {"training.init_from": None}) == build_config({})


def test_a_tokenizer_file_is_accepted(base):
    """Reading the file checks whether it is the tokenizer of the run."""
    found = start(base, tokenizer__tokenizer_type="file", tokenizer__tokenizer_path="t.json")
    assert found.tokenizer.tokenizer_path == "t.json"


def test_every_field_of_the_architecture_has_a_setting():
    """Fields are copied from settings of the same name, so a new setting needs no code."""
    names = {field.name for field in fields(ModelConfig)}
    assert set(ARCHITECTURE) == set(SETTING_OF) and set(SETTING_OF.values()) <= set(FIELDS)
    assert names - set(ARCHITECTURE) == {
        "lora",
        "kernel",
        "dropout_rate",
        "remat",
        "scan_layers",
        "dtype",
        "platform",
    }
    assert set(ARCHITECTURE) - set(WEIGHT_FIELDS) == {
        "max_context",
        "windows",
        "rope_theta",
        "rope_scaling",
        "rope_local_theta",
    }
    changed = build_config({}, {"model.qk_norm": True, "attention.rope_theta": 5.0}).architecture(7)
    assert (changed.qk_norm, changed.rope_theta, changed.vocab_size) == (True, 5.0, 7)


def test_copied_settings_have_the_type_and_the_default_of_the_setting():
    """A `ModelConfig` that is built without sections equals that of the default settings."""
    resolved = {
        "kv_heads",
        "head_size",
        "hidden_dim",
        "rope_scaling",
        "sub_norms",
    }  # not equal to the setting of this name
    types = {
        name: kind
        for section in (ModelSection, AttentionSection)
        for name, kind in get_type_hints(section).items()
    }
    copied = {
        name: kind
        for name, kind in get_type_hints(ModelConfig).items()
        if name in types and name not in resolved
    }
    assert copied == {name: types[name] for name in copied} and len(copied) > 40
    built = build_config({}).architecture(7)
    required = [field.name for field in fields(ModelConfig) if field.default is MISSING]
    assert ModelConfig(**{name: getattr(built, name) for name in required}) == built
