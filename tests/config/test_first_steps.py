"""First steps of a new user: packaged configs, few steps, JSON for lists, the version, a prompt
from a pipe.
"""

import io
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

from dantinox import cli
from dantinox.cli.common import backend_problem, given_prompt
from dantinox.config import UserError, build_config, dump_config, load_config
from dantinox.config.flag_values import overrides
from dantinox.config.flags import Parser, add_config_flags
from dantinox.config.inherited_settings import load_training
from dantinox.config.sections import FIELDS
from dantinox.config.starting_config import starting_config
from dantinox.training.starting_point import total_steps
from tests.error_texts import ERRORS


def test_packaged_configs_load_by_name():
    assert load_config("quickstart") == load_training("quickstart")
    with pytest.raises(UserError, match=ERRORS["no_config_file_at_quickstrat"]):
        load_config("quickstrat")


def test_few_steps_shorten_the_warmup_of_a_file():
    with pytest.warns(UserWarning, match=ERRORS["warmup_steps_10_line_is_more"]):
        config = load_training("quickstart", {"training.steps": 2})
    assert (config.training.steps, config.training.warmup_steps) == (2, None)
    with pytest.raises(UserError, match=ERRORS["training_warmup_steps_must_be_at"]):
        load_training("quickstart", {"training.steps": 2, "training.warmup_steps": 5})


def test_few_epochs_shorten_the_warmup():
    config = build_config(
        {}, {"training.epochs": 1.0, "training.warmup_steps": 10, "training.batch_size": 8}
    )
    with pytest.warns(UserWarning, match=ERRORS["warmup_steps_10_is_more_than"]):
        assert total_steps(config, windows_per_epoch=40) == 5


def test_print_config_prints_every_setting(capsys):
    assert cli.main(["train", "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert {f"{section}.{key}" for section, keys in printed.items() for key in keys} == set(FIELDS)
    assert "kv" not in yaml.safe_load(dump_config(load_config("quickstart")))


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--logit_bias", '{"_": 3, "a": null}'], "logit_bias", {"_": 3.0, "a": -float("inf")}),
        (["--stop", '["\\n", "b"]'], "stop", ("\n", "b")),
        (["--banned_tokens", "[1, 2]"], "banned_tokens", (1, 2)),
        (["--stop", "[a", "b"], "stop", ("[a", "b")),
        (["--stop", "[a"], "stop", ("[a",)),
        (["--stop", "[]"], "stop", ("[]",)),
        (["--stop", "[1]"], "stop", ("[1]",)),
    ],
)
def test_flags_of_lists_and_mappings_accept_json(argv, key, value):
    parser = Parser()
    add_config_flags(parser, ("generation",))
    assert getattr(build_config({}, overrides(parser.parse(argv))).generation, key) == value


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("dantinox ")


@pytest.mark.parametrize(
    ("text", "prompt"), [("a\n", "a"), ("a\n\n", "a\n"), ("a\r\n", "a"), ("a", "a"), ("", "")]
)
def test_a_prompt_from_a_pipe_has_no_last_line_break(text, prompt, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    assert given_prompt(SimpleNamespace(prompt="-"), build_config({})) == prompt


def test_the_default_prompt_is_that_of_the_samples_of_the_run():
    base = build_config({}, {"training.sample_every": 5, "training.sample_prompt": "def "})
    assert given_prompt(SimpleNamespace(prompt=None), base) == "def "
    assert given_prompt(SimpleNamespace(prompt=None), build_config({})) == "\n"


@pytest.mark.parametrize(
    ("dest", "format", "words"), [("o.gguf", "hf", "a folder"), ("o", "gguf", "a .gguf file")]
)
def test_a_format_that_contradicts_the_file_name_is_refused(dest, format, words, tmp_path, capsys):
    assert cli.main(["export", str(tmp_path), str(tmp_path / dest), "--format", format]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / dest).exists()


@pytest.mark.parametrize(
    "argv",
    [
        ["R"],
        ["--run_dir", "R"],
        ["--seed", "1", "R"],
        ["R", "--seed", "1"],
        ["--stop", "a", "--run_dir", "R"],
    ],
)
def test_a_run_is_an_argument_or_a_flag(argv, capsys):
    for command in ("generate", "chat", "explain"):
        argv = [word for word in argv if command != "explain" or word not in ("--stop", "a")]
        assert (
            cli.main([command, *argv]) == 2 and "no run directory at R" in capsys.readouterr().err
        )
    for command in (
        ["info"],
        ["verify"],
        ["plot"],
        ["eval", "ppl", "--data_path", "x"],
        ["calibrate", "--what", "kv"],
    ):
        words = argv if argv[0] in ("R", "--run_dir") and len(argv) < 3 else ["R"]
        assert cli.main([*command, *words]) == 2 and "R" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [([], "a run directory is missing"), (["A", "--run_dir", "B"], "both name a run: A and B")],
)
def test_a_run_that_is_missing_or_given_twice(argv, words, capsys):
    for command in ("generate", "chat", "serve", "info", "verify", "explain"):
        assert cli.main([command, *argv]) == 2 and words in capsys.readouterr().err


def test_only_the_flags_of_the_chosen_command_are_built(monkeypatch, capsys):
    monkeypatch.setattr(
        "dantinox.config.flags.setting_records", lambda: pytest.fail("no command has settings here")
    )
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli.COMMANDS)
    with pytest.raises(SystemExit):
        cli.main(["verify", "--help"])
    assert "--accept" in capsys.readouterr().out


def test_init_writes_a_model_for_this_machine(tmp_path):
    (tmp_path / "small.yaml").write_text(starting_config(tmp_path / "small.yaml", cpus=2))
    (tmp_path / "large.yaml").write_text(starting_config(tmp_path / "large.yaml"))
    small, large = load_training(tmp_path / "small.yaml"), load_training(tmp_path / "large.yaml")
    assert (small.model.dim, large.model.dim) == (128, 256) and small.training.batch_size == 16
    assert (small.training.optimizer, small.training.lr) == (
        "muon",
        4e-3,
    ) and small.generation.max_new_tokens < 128
    assert "2 CPU cores and no accelerator" in (tmp_path / "small.yaml").read_text()


BACKENDS = """
import sys
from dantinox import cli
sys.exit(cli.main(["doctor"]))
"""
PLUGIN = "def initialize():\n    raise RuntimeError('no driver')\n"


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_missing_hardware_is_reported(monkeypatch, error):
    import jax

    def fail():
        raise error("no driver")

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert backend_problem() is None
    monkeypatch.setattr(jax, "devices", fail)
    assert backend_problem().startswith(
        "JAX_PLATFORMS=cuda: jax finds no such device here; unset the variable"
    )
    monkeypatch.delenv("JAX_PLATFORMS")
    assert backend_problem() is None, "jax chooses another device"


@pytest.mark.slow
def test_missing_hardware_is_one_line(tmp_path):
    def run(**environment):
        environment = (
            os.environ | {"DANTINOX_KERNELS": "off"} | environment
        )  # or the first command reports their compilation
        return subprocess.run(
            [sys.executable, "-c", BACKENDS], env=environment, capture_output=True, text=True
        )

    missing = run(JAX_PLATFORMS="cuda")
    assert missing.returncode == 2 and missing.stderr.startswith(
        "error: JAX_PLATFORMS=cuda: jax finds no such device here"
    )
    assert missing.stderr.count("\n") == 1
    (tmp_path / "jax_plugins" / "broken").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "broken" / "__init__.py").write_text(PLUGIN)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    broken = run(PYTHONPATH=paths)
    assert (
        broken.returncode == 0
        and "Traceback" not in broken.stderr
        and broken.stderr.count("\n") == 1
    ), broken.stderr


def test_a_head_may_have_an_odd_size_without_rotation():
    config = build_config(
        {"model": {"head_size": 7}, "attention": {"use_rotary_pos": False, "trainable_pos": True}}
    )
    assert config.architecture(vocab_size=50).head_size == 7
