"""What a newcomer types first: names of configs, few steps, JSON for lists, a version, a prompt from a pipe."""

import io
import sys
from types import SimpleNamespace

import pytest
import yaml

from dantinox import cli
from dantinox.cli.common import given_prompt
from dantinox.config import UserError, build_config, dump_config, load_config
from dantinox.config.flags import Parser, add_config_flags, overrides
from dantinox.config.sections import FIELDS
from dantinox.config.start import load_training
from dantinox.training.resume import total_steps


def test_a_config_of_the_package_has_one_name_everywhere():
    assert load_config("quickstart") == load_training("quickstart")
    with pytest.raises(UserError, match="no config file at quickstrat: give a file, or one of the package's"):
        load_config("quickstrat")


def test_few_steps_shorten_the_warm_up_of_a_file():
    with pytest.warns(UserWarning, match=r"warmup_steps 20 \(.*line \d+\) is more than training.steps 2"):
        config = load_training("quickstart", {"training.steps": 2})
    assert (config.training.steps, config.training.warmup_steps) == (2, None)
    with pytest.raises(UserError, match=r"training\.warmup_steps must be at most training.steps, got 5 and 2"):
        load_training("quickstart", {"training.steps": 2, "training.warmup_steps": 5})


def test_few_epochs_shorten_the_warm_up():
    config = build_config({}, {"training.epochs": 1.0, "training.warmup_steps": 10, "training.batch_size": 8})
    with pytest.warns(UserWarning, match="warmup_steps 10 is more than the 5 steps of training.epochs 1 with this corpus"):
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
    ],
)
def test_lists_and_mappings_are_json_too(argv, key, value):
    parser = Parser()
    add_config_flags(parser, ("generation",))
    assert getattr(build_config({}, overrides(parser.parse(argv))).generation, key) == value


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("dantinox ")


@pytest.mark.parametrize(("text", "prompt"), [("a\n", "a"), ("a\n\n", "a\n"), ("a\r\n", "a"), ("a", "a"), ("", "")])
def test_a_prompt_from_a_pipe_has_no_last_line_break(text, prompt, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    assert given_prompt(SimpleNamespace(prompt="-"), build_config({})) == prompt


def test_without_a_prompt_it_is_that_of_the_runs_samples():
    base = build_config({}, {"training.sample_every": 5, "training.sample_prompt": "def "})
    assert given_prompt(SimpleNamespace(prompt=None), base) == "def "
    assert given_prompt(SimpleNamespace(prompt=None), build_config({})) == "\n"


@pytest.mark.parametrize(("dest", "format", "words"), [("o.gguf", "hf", "makes a folder"), ("o", "gguf", "makes a .gguf file")])
def test_a_format_that_the_name_contradicts_is_refused(dest, format, words, tmp_path, capsys):
    assert cli.main(["export", str(tmp_path), str(tmp_path / dest), "--format", format]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / dest).exists()
