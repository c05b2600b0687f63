"""Flags: every setting flat and by path, with the types of the YAML files."""

import argparse

import pytest

from dantinox.config import UserError, build_config, overlay
from dantinox.config.flag_values import overrides
from dantinox.config.flags import Parser, add_config_flags
from dantinox.config.names import FORMER_NAMES, OTHER_FLAGS, OTHER_NAMES, flat_name
from dantinox.config.sections import flatten_config
from dantinox.config.yaml_files import FIELDS
from tests.error_texts import ERRORS


def given(*argv: str, sections: tuple[str, ...] | None = None) -> dict:
    parser = Parser(prog="x")
    parser.add_argument("--config")
    add_config_flags(parser, sections)
    return overrides(parser.parse(list(argv)))


def config_of(*argv: str):
    return build_config({}, given(*argv))


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        ("--lr 5e-4", "training.lr", 5e-4),
        ("--training.lr 5e-4", "training.lr", 5e-4),
        ("--lr=5E-4", "training.lr", 5e-4),
        ("--lr .5", "training.lr", 0.5),
        ("--batch_size 64", "training.batch_size", 64),
        ("--model.dim 64 --dim 128", "model.dim", 128),
        ("--use_moe False", "moe.use_moe", False),
        ("--greedy", "generation.greedy", True),
        ("--greedy true", "generation.greedy", True),
        ("--greedy True", "generation.greedy", True),
        ("--greedy false", "generation.greedy", False),
        ("--generation.greedy no", "generation.greedy", False),
        ("--greedy --lr 1", "generation.greedy", True),
        ("--use_cache=off", "generation.use_cache", False),
        ("--top_p null", "generation.top_p", None),
        ("--steps null", "training.steps", None),
        ("--optimizer muon", "training.optimizer", "muon"),
        ("--training.seed 7", "training.seed", 7),
        ("--data_path a.txt", "data.path", "a.txt"),
        ("--data_path 7", "data.path", "7"),
        ("--path a.txt b.txt", "data.path", ("a.txt", "b.txt")),
        ("--path null", "data.path", None),
        ("--max_generations 9", "generation.max_new_tokens", 9),
        ("--eval_iters 9", "training.eval_every", 9),
        ("--logging.eval_iters 9", "training.eval_every", 9),
        ("--init_from null", "training.init_from", None),
        ("--sample_prompt null", "training.sample_prompt", "null"),
        ("--sample_prompt 5e-4", "training.sample_prompt", "5e-4"),
        ("--stop a b", "generation.stop", ("a", "b")),
        ("--stop 5", "generation.stop", ("5",)),
        (r"--stop \n\n", "generation.stop", ("\n\n",)),
        (r"--stop a\tb \\n", "generation.stop", ("a\tb", r"\n")),
        ("--stop=-x", "generation.stop", ("-x",)),
        ("--layer_types sliding full", "attention.layer_types", ("sliding", "full")),
        ("--rope_layers true false", "attention.rope_layers", (True, False)),
        ("--dense_layers 0 1 --use_moe", "moe.dense_layers", (0, 1)),
        ("--dense_layers [0] --use_moe", "moe.dense_layers", (0,)),
        ("--mixture 3 .5 --data_path a b", "data.mixture", (3.0, 0.5)),
    ],
)
def test_a_flag_sets_its_key(argv, key, value):
    section, _, name = key.partition(".")
    words = argv.split()
    if "sample_prompt" in argv:
        words += ["--sample_every", "5"]
    if "layer_types" in argv:
        words += ["--sliding_window", "--context_window", "3"]
    result = getattr(getattr(config_of(*words), section), name)
    assert result == value
    assert type(result) is type(value)


FORMER_VALUES = {  # a value, and settings that it needs
    "generation.products": ("float32", {"generation.weights": "int8"}),
    "training.dpo_beta": (0.3, {"training.objective": "dpo", "training.init_from": "runs/x"}),
}


@pytest.mark.parametrize("old", FORMER_NAMES)
def test_a_former_name_is_accepted_with_one_warning(old, tmp_path):
    new, (value, needed) = FORMER_NAMES[old], FORMER_VALUES[old]
    section, _, name = old.partition(".")
    tree = {section: {key.partition(".")[2]: needed[key] for key in needed} | {name: value}}
    with pytest.warns(
        UserWarning, match=rf"^{old} is now called {new} \(a.yaml, line 3\)$"
    ) as warned:
        config = build_config(tree, {}, {old: "a.yaml, line 3"}, "a.yaml")
    assert len(warned) == 1 and flatten_config(config)[new] == value
    flags = [word for key, value in needed.items() for word in (f"--{key}", value)]
    with pytest.warns(UserWarning, match=ERRORS["is_now_called_command_line"]):
        assert flatten_config(config_of(*flags, f"--{old}", str(value)))[new] == value


def test_a_former_name_is_accepted_in_a_request():
    config = build_config({"generation": {"weights": "int8"}}, {})
    with pytest.warns(UserWarning, match=ERRORS["is_now_called"]):
        assert (
            flatten_config(overlay(config, {"products": "bfloat16"}))["generation.matmul_dtype"]
            == "bfloat16"
        )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("objective", ["next_token", "dpo"])
def test_the_default_of_a_former_name_in_a_saved_config_changes_nothing(objective):
    training = {"objective": objective, "init_from": "runs/x"}
    assert build_config({"training": training | {"dpo_beta": 0.1}}) == build_config(
        {"training": training}
    )


def own_flag(key):
    flat = flat_name(key)
    return f"--{flat}" if [flat_name(other) for other in FIELDS].count(flat) == 1 else f"--{key}"


@pytest.mark.parametrize(("name", "key"), OTHER_NAMES.items())
def test_a_name_of_another_program_names_the_setting(name, key):
    section, _, own = key.partition(".")
    assert name not in {flat_name(other) for other in FIELDS}
    for flag in (f"--{name}", f"--{name.replace('_', '-')}"):
        with pytest.raises(UserError) as caught:
            given(flag, "1")
        assert str(caught.value) == f"unknown flag {flag}, did you mean {own_flag(key)}?"
    with pytest.raises(UserError) as caught:
        build_config({section: {name: 1}}, source="x.yaml")
    assert str(caught.value) == f"unknown key {section}.{name}, did you mean {key}? (x.yaml)"
    with pytest.raises(UserError) as caught:
        build_config({name: 1}, source="x.yaml")
    assert str(caught.value) == f"no section {name}, did you mean {key}? (x.yaml)"


@pytest.mark.parametrize(("name", "advice"), OTHER_FLAGS.items())
def test_a_flag_of_another_program_says_what_to_do(name, advice):
    with pytest.raises(UserError) as caught:
        given(f"--{name}", "1")
    assert str(caught.value) == f"unknown flag --{name}{advice}"


def test_the_dropout_of_other_programs_is_not_that_of_adapters():
    with pytest.raises(UserError) as caught:
        config_of("--dropout", "0.1")
    hint = (
        "lora.dropout has no effect while lora.rank is null, did you mean"
        " model.dropout_rate? (command line)"
    )
    assert str(caught.value) == hint


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            {"model.n_heads": 3},
            "got 128 and 3 (model.dim: my.yaml, line 10; model.n_heads: command line)",
        ),
        (
            {"model.dim": 130},
            "got 130 and 4 (model.dim: command line; model.n_heads: my.yaml, line 12)",
        ),
        ({"model.dim": 130, "model.n_heads": 3}, "got 130 and 3 (command line)"),
        ({}, "got 128 and 3 (my.yaml, line 10)"),
    ],
)
def test_a_conflict_names_the_place_of_each_value(flags, says):
    tree = {"model": {"dim": 128, "n_heads": 4 if flags else 3}}
    where = {"model.dim": "my.yaml, line 10", "model.n_heads": "my.yaml, line 12"}
    with pytest.raises(UserError) as caught:
        build_config(tree, flags, where, "my.yaml")
    assert str(caught.value).endswith(says)


def test_no_flag_changes_nothing():
    assert given() == {}
    assert given("--config", "x.yaml") == {}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            "--seed 3",
            "--seed belongs to several settings: write --training.seed or --generation.seed",
        ),
        (
            "--seed",
            "--seed belongs to several settings: write --training.seed or --generation.seed",
        ),
        ("--learning_rte 3", "unknown flag --learning_rte, did you mean --lr?"),
        (
            "--data my.txt",
            (
                "--data belongs to several settings: write --distill.data or"
                " --distributed.data or --data_path"
            ),
        ),
        ("--max_seq_len 3", "unknown flag --max_seq_len, did you mean --max_context?"),
        ("--d_model 3", "unknown flag --d_model, did you mean --dim?"),
        ("--precision bf16", "unknown flag --precision, did you mean --dtype?"),
        ("--out_dir out", "unknown flag --out_dir, did you mean --run_dir?"),
        (
            "--device cuda",
            (
                "unknown flag --device: the environment variable"
                " JAX_PLATFORMS selects cpu, cuda or tpu"
            ),
        ),
        ("--compile", "unknown flag --compile: all programs are compiled"),
        ("--learning_rate 3", "unknown flag --learning_rate, did you mean --lr?"),
        ("--batchsize 3", "unknown flag --batchsize, did you mean --batch_size?"),
        (
            "--training.batchsize=3",
            "unknown flag --training.batchsize, did you mean --training.batch_size?",
        ),
        ("--batch 3", "unknown flag --batch, did you mean --batch_size?"),
        ("extra", "unknown argument extra: give the config as --config extra"),
        ("--lr", "argument --lr/--training.lr: expected one argument"),
        ("--lr fast", "training.lr must be a number > 0, got 'fast' (command line)"),
        ("--lr [[[", "training.lr must be a number > 0, got '[[[' (command line)"),
        ("--lr 2024-13-45", "training.lr must be a number > 0, got '2024-13-45' (command line)"),
        (
            "--lr !!python/name:os.system",
            "training.lr must be a number > 0, got '!!python/name:os.system' (command line)",
        ),
        ("--lr=-1", "training.lr must be a number > 0, got -1 (command line)"),
        ("--greedy maybe", "generation.greedy must be true or false, got 'maybe' (command line)"),
        ("--greedy 1", "generation.greedy must be true or false, got 1 (command line)"),
        (
            "--steps 1e3",
            "training.steps must be an integer in [1, 2^31), or null, got 1000.0 (command line)",
        ),
        (
            "--optimizer adam",
            (
                "training.optimizer must be one of adamw, muon, lion,"
                " adafactor, sgd, got 'adam' (command line)"
            ),
        ),
        (
            "--log_file a/b",
            (
                "logging.log_file must be a file name of letters, digits, - and"
                " _ and ., got 'a/b' (command line)"
            ),
        ),
        (
            "--max_generations 5 --max_new_tokens 6",
            (
                "generation.max_generations is an alias of generation.max_new_tokens: give one of"
                " them (command line)"
            ),
        ),
        ("--kv_heads 3", "model.kv_heads must divide model.n_heads, got 3 and 8 (command line)"),
        (
            "--sample_prompt \udcff",
            "training.sample_prompt must be valid Unicode text, got '\\udcff' (command line)",
        ),
        ("--path ", None),
    ],
)
def test_an_invalid_flag_is_one_sentence(argv, says):
    with pytest.raises(UserError) as caught:
        config_of(*argv.split(" "))
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert says is None or text == says


@pytest.mark.parametrize(
    "text",
    [
        "[" * 1000,
        "9" * 5000,
        "&a [*a]",
        "a: b: c",
        "\0",
        "!!int ''",
        "? ",
        "{a: 1, a: 2}",
        "\ud800",
    ],
)
def test_no_flag_value_causes_a_traceback(text):
    with pytest.raises(UserError, match=ERRORS["training_lr_must_be"]):
        config_of("--lr", text)


def test_sections_can_be_left_out():
    assert given("--seed", "3", sections=("generation",)) == {"generation.seed": 3}
    with pytest.raises(UserError, match=ERRORS["unknown_flag_lr"]):
        given("--lr", "3", sections=("generation",))


def test_every_setting_has_a_flag_with_help(capsys):
    parser = Parser(prog="x")
    add_config_flags(parser)
    flags = {flag: action for action in parser._actions for flag in action.option_strings}
    for key, field in FIELDS.items():
        assert field.description in str(flags[f"--{key}"].help).replace("%%", "%")
    with pytest.raises(SystemExit) as done:
        parser.parse(["--help-all"])
    assert done.value.code == 0
    assert "--lr V" in capsys.readouterr().out


def test_a_flag_of_the_command_has_priority_over_a_setting():
    parser = Parser(prog="x")
    parser.add_argument("--seed", type=int)
    add_config_flags(parser)
    namespace = parser.parse(["--seed", "3"])
    assert namespace.seed == 3
    assert overrides(namespace) == {}
    assert isinstance(namespace, argparse.Namespace)
