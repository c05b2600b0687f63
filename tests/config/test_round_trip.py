"""Settings are unchanged by writing and reading; the schema file and the help match the code."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dantinox.config import Config, build_config, differences, dump_config, json_schema, load_config
from dantinox.config.yaml_files import FIELDS, allowed_values
from dantinox.config.yaml_text import parse_value

ROOT = Path(__file__).parents[2]
TEXT = st.text(max_size=20)
POSITIVE = st.floats(min_value=1e-300, max_value=1e300, allow_nan=False)
FRACTION = st.floats(min_value=0, max_value=1)

SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "training.lr": POSITIVE,
        "training.weight_decay": st.floats(min_value=0, max_value=1e300),
        "training.min_lr_ratio": FRACTION,
        "training.seed": st.integers(0, 2**32 - 1),
        "training.steps": st.none() | st.integers(100, 2**31 - 1),
        "training.sample_prompt": TEXT,
        "training.schedule": st.sampled_from(["cosine", "linear", "wsd", "constant"]),
        "generation.stop": st.lists(TEXT.filter(bool), max_size=4),
        "generation.top_p": st.none() | FRACTION,
        "generation.greedy": st.booleans(),
        "data.text_field": TEXT,
        "data.path": (
            st.none() | st.lists(TEXT.filter(lambda t: t and "\0" not in t), min_size=1, max_size=3)
        ),
        "model.norm_epsilon": POSITIVE,
        "model.qk_norm": st.booleans(),
    },
)


@settings(max_examples=30, deadline=None)
@given(SETTINGS)
def test_dump_and_load_are_inverse(tmp_path_factory, values):
    tree: dict = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    config = build_config(tree)
    path = tmp_path_factory.mktemp("config") / "c.yaml"
    path.write_text(dump_config(config), encoding="utf-8", newline="")
    assert load_config(path) == config


@pytest.mark.parametrize(
    "text",
    [
        "5e-4",
        "1e5",
        "yes",
        "null",
        "~",
        "1_0",
        "0x1F",
        "2024-01-01",
        "*a",
        "- x",
        "",
        " a ",
        "a: b",
        "#",
        "\x85",
        "a\u2028b",
        "\ufeff",
        "a\r\nb\n\n",
        "\x7f",
    ],
)
def test_strings_that_look_like_other_types_stay_strings(tmp_path, text):
    config = build_config({"training": {"sample_prompt": text}})
    (tmp_path / "c.yaml").write_text(dump_config(config), encoding="utf-8", newline="")
    assert load_config(tmp_path / "c.yaml").training.sample_prompt == text


def test_the_dump_has_all_training_settings_and_changed_request_settings():
    given = {"generation": {"top_p": 0.9, "seed": 3, "greedy": False}, "kv": {"budget": 0.5}}
    tree = yaml.safe_load(dump_config(build_config(given)))
    assert {key: tree.pop(key, None) for key in ("generation", "router", "kv")} == {
        "generation": {"seed": 3, "top_p": 0.9},
        "router": None,
        "kv": {"budget": 0.5},
    }
    assert {f"{section}.{key}" for section, keys in tree.items() for key in keys} == {
        key for key in FIELDS if not key.startswith(("generation.", "router.", "kv."))
    }
    assert "#" not in dump_config(Config()) and "!" not in dump_config(Config())


def test_differences_have_old_and_new_values():
    old, new = Config(), build_config({"training": {"lr": 0.5}, "generation": {"stop": ["a"]}})
    assert differences(old, new) == {"training.lr": (3e-4, 0.5), "generation.stop": ((), ("a",))}
    assert differences(old, old) == {}


def test_the_schema_file_is_up_to_date():
    text = (ROOT / "configs" / "schema.json").read_text(encoding="utf-8")
    assert text == json_schema(), "run `make schema`"


def test_every_setting_and_section_is_described():
    schema = json.loads(json_schema())
    for section in schema["properties"]:
        definition = schema["$defs"][schema["properties"][section]["$ref"].rpartition("/")[2]]
        assert definition["description"]
        for key, content in definition["properties"].items():
            assert len(content["description"]) > 10, f"{section}.{key}"


def test_the_type_of_every_setting_has_words():
    assert [key for key in FIELDS if not allowed_values(key)] == []


def test_packaged_configs_are_valid():
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [("5e-4", 5e-4), ("True", True), ("null", None), ("3", 3), ("a b", "a b"), ("[1, 2]", [1, 2])],
)
def test_flags_are_parsed_like_yaml(text, value):
    assert parse_value(text) == value
