"""Help in layers, the search of settings and shell completion: complete, short, and without heavy
imports.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest

from dantinox import cli
from dantinox.cli import COMMANDS, command_parser
from dantinox.cli.evaluate import EVALUATE
from dantinox.cli.settings import find_settings
from dantinox.config import Config, UserError, load_config
from dantinox.config.help_pages import all_pages, first_page, section_page
from dantinox.config.names import ALIASES
from dantinox.config.request_settings import SamplingSettings
from dantinox.config.sections import DEFAULTS, FIELDS, NEEDS, SECTIONS
from dantinox.config.setting_groups import GROUPS
from dantinox.config.setting_records import (
    range_text,
    section_titles,
    setting_records,
    type_in_words,
)
from dantinox.config.yaml_files import allowed_values
from tests.error_texts import ERRORS

HEAVY = {
    "pydantic",
    "yaml",
    "jax",
    "flax",
    "numpy",
    "rich",
    "starlette",
    "tokenizers",
    "importlib.metadata",
}
WITH_SETTINGS = ("train", "find-lr", "generate", "chat", "serve", "explain", "plan")
KINDS = ("sampling", "kv", "ruler", "ppl", "tasks", "watermark")


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def dantinox(capsys):
    """Runs a command in this process: (exit code, stdout, stderr)."""

    def run(*argv):
        try:
            code = cli.main([*argv])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run


# The records


def test_every_setting_has_a_record_that_equals_its_declaration():
    records = {record.key: record for record in setting_records()}
    assert list(records) == list(FIELDS)
    for key, record in records.items():
        assert record.help == FIELDS[key].description
        assert json.loads(
            record.default_text
            if not isinstance(record.default, str)
            else json.dumps(record.default)
        ) == (list(DEFAULTS[key]) if isinstance(DEFAULTS[key], tuple) else DEFAULTS[key])
        assert record.prerequisites == tuple(str(need) for need in NEEDS[key])
        assert record.type == re.sub(r"\b(?:an?|one of) ", "", allowed_values(key))
    assert {old for record in records.values() for old in record.aliases} == set(ALIASES)


def test_every_default_is_read_back_from_its_text(tmp_path):
    """A bare `off` is false in YAML 1.1."""
    sections: dict[str, list[str]] = {}
    for record in setting_records():
        sections.setdefault(record.section, []).append(f"  {record.name}: {record.default_text}")
    path = tmp_path / "config.yaml"
    path.write_text("\n".join("\n".join([f"{name}:", *lines]) for name, lines in sections.items()))
    assert load_config(path) == Config()
    path.write_text("generation:\n  p_less: off\n  speculation: off\n")
    assert load_config(path).generation.p_less == "off"
    path.write_text("generation:\n  p_less: on\n")
    with pytest.raises(UserError, match="must be one of off, plain, norm, got true"):
        load_config(path)


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({}, ""),
        ({"maximum": 1}, "≤ 1"),
        ({"exclusiveMaximum": 0.5}, "< 0.5"),
        ({"exclusiveMinimum": 0, "maximum": 1}, "in (0, 1]"),
        ({"minimum": 1, "maximum": 2**31 - 1}, "in [1, 2^31)"),
        ({"maximum": 2**31 - 1}, "< 2^31"),
        ({"minimum": 0, "maximum": 3 * 10**9}, "in [0, 3000000000]"),
    ],
)
def test_ranges(limits, text):
    assert range_text({"type": "number", **limits}) == text


def test_ranges_choices_and_prerequisites_of_some_settings():
    records = {record.key: record for record in setting_records()}
    assert records["training.lr"].range == "> 0" and records["training.lr"].type == "number > 0"
    assert records["generation.top_p"].type == "number in [0, 1], or null"
    assert records["generation.top_p"].range == "in [0, 1]"
    assert records["training.optimizer"].choices == ("adamw", "muon", "lion", "adafactor", "sgd")
    assert records["training.muon_lr"].prerequisites == ("training.optimizer is muon",)
    assert records["kv.scale_min"].prerequisites == (
        "generation.use_cache is true",
        "kv.budget or kv.budget_tokens is set",
        "kv.signal is entropy or coverage or distance",
    )
    assert (
        records["kv.budget"].flag == "--kv_budget"
        and records["generation.greedy"].arity == "switch"
    )
    assert records["generation.stop"].arity == "many" and records["generation.stop"].default == []
    assert type_in_words({"type": "integer", "minimum": 1}) == "an integer ≥ 1"


def test_every_setting_of_a_section_with_groups_is_in_one_of_them():
    for section in SECTIONS:
        groups = {key for key, group in GROUPS.items() if group.section == section}
        assert {record.group for record in setting_records() if record.section == section} == (
            groups or {""}
        ), section
    assert not set(GROUPS) & set(SECTIONS)


# Pages


@pytest.mark.parametrize("name", [*COMMANDS, *(f"eval {kind}" for kind in KINDS)])
def test_the_first_page_is_short_and_names_every_section(name):
    parser = command_parser(name)
    page = first_page(parser)
    assert page.startswith(f"usage: dantinox {name}") and page.count("\n") <= 60
    assert max(map(len, page.splitlines())) <= 80
    if name in WITH_SETTINGS:
        assert 10 <= len(parser.most_used) <= 15 or name in ("explain",)
        assert all(f"--{flag} " in page or f"--{flag}\n" in page for flag in parser.most_used)
        sections = {record.section for record, _ in parser.settings.values()}
        for section in sections:
            count = sum(record.section == section for record in setting_records())
            assert f"  {section} ({count})" in page
        assert not any(f"--{old.partition('.')[2]} " in page for old in ALIASES)
    else:
        own = [
            action
            for action in parser.own
            if action.option_strings and action.help != argparse.SUPPRESS
        ]
        assert all(any(flag in page for flag in action.option_strings) for action in own)


@pytest.mark.parametrize("name", WITH_SETTINGS)
def test_all_pages_together_hold_every_flag_and_alias(name):
    parser = command_parser(name)
    page = all_pages(parser)
    for path, (record, action) in parser.settings.items():
        assert any(flag in page for flag in action.option_strings), path
        if path != record.key:
            assert (
                f"alias of --{record.name if record.section != 'kv' else 'kv_' + record.name}"
                in page
            )
    own = {
        action.option_strings[-1]
        for section in parser.sections.values()
        for action in section.actions
    }
    assert all(flag in page for flag in own)


def test_a_section_page_shows_type_range_default_and_prerequisites(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    lines = [
        line.strip() for line in section_page(command_parser("train"), "optimizer").splitlines()
    ]
    assert lines[0].startswith("optimizer: ") and "--training.NAME" in lines[0] + lines[1]
    assert "number > 0; default: 0.02; needs training.optimizer is muon" in lines
    assert "cosine, linear, wsd, constant; default: cosine" in lines
    whole = section_page(command_parser("train"), "training")
    assert all(
        f"--{record.name} " in whole or f"--training.{record.name}" in whole
        for record in find_settings("", "training")
    )
    assert " optimizer: " in whole
    assert "--eval_iters" in whole and "alias of --eval_every" in whole


def test_a_section_of_the_commands_own_flags():
    page = section_page(command_parser("generate"), "output")
    assert page.startswith("output: ") and "--logprobs K" in page and "--temperature" not in page


@pytest.mark.parametrize("name", ["data", "optimzer", "x" * 500, "a\nb"])
def test_an_unknown_section_is_one_sentence_that_lists_those_there_are(dantinox, name):
    command = "generate" if name == "data" else "train"
    code, out, err = dantinox(command, "--help", name)
    assert (code, out) == (2, "") and err.count("\n") == 1 and err.startswith("error: no section ")
    assert "the sections are" in err and "generation" in err and len(err) < 500
    assert name != "optimzer" or "did you mean optimizer?" in err


def test_help_of_commands_and_of_the_commands_of_eval(dantinox):
    code, out, err = dantinox("--help")
    assert (code, err) == (0, "") and all(f"  {name} " in out for name in COMMANDS)
    code, out, _ = dantinox("eval", "--help")
    assert code == 0 and all(f"  {kind} " in out for kind in KINDS)
    code, out, _ = dantinox("eval", "ppl", "--help")
    assert code == 0 and "--stride" in out and "--ratios" not in out
    assert dantinox("--help", "verify")[1] == dantinox("verify", "--help")[1] != ""
    code, out, err = dantinox("verify", "--help", "accept")
    assert (code, out) == (2, "") and "has no help sections" in err


def test_a_parser_of_a_command_is_found_by_name():
    assert command_parser("eval ppl").prog == "dantinox eval ppl"
    for name in ("evil", "eval pp", "", "train x"):
        with pytest.raises(UserError, match=ERRORS["there_is_no_command"]):
            command_parser(name)


@pytest.mark.parametrize(
    "words", ["--help", "train --help", "generate --help-all", "eval kv --help", "settings lr"]
)
def test_help_imports_nothing_heavy(words):
    """With pydantic a page takes 200 ms instead of 55."""
    script = (
        f"import sys\nsys.argv = {['dantinox', *words.split()]}\n"
        "try:\n import dantinox.cli\n dantinox.cli.entry()\nexcept SystemExit: pass\n"
        f"print(sorted({HEAVY} & set(sys.modules)), file=sys.stderr)"
    )
    # Without site: the finder of an editable installation imports some of these modules itself.
    path = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.stderr == "[]\n" and done.stdout


# dantinox settings


@pytest.mark.parametrize(
    ("pattern", "section", "key"),
    [
        ("LR", None, "training.lr"),
        ("muon*", None, "training.muon_lr"),
        ("learning rate", None, "training.lr"),
        ("0.0003", None, "training.lr"),
        ("adafactor", None, "training.optimizer"),
        ("max_generations", None, "generation.max_new_tokens"),
        ("--kv_budget", None, "kv.budget"),
        ("kv_*", None, "kv.budget"),
        ("lora.rank is set", "lora", "lora.alpha"),
        ("", "optimizer", "training.lr"),
    ],
)
def test_settings_are_found_by_all_that_describes_them(pattern, section, key):
    found = [record.key for record in find_settings(pattern, section)]
    assert key in found and (not pattern or len(found) < len(setting_records()) // 2)


def test_the_table_and_the_json_of_settings(dantinox):
    code, out, err = dantinox("settings", "muon_lr")
    assert (
        (code, err) == (0, "")
        and out.startswith("training (")
        and "number > 0; default: 0.02; needs" in out
    )
    code, out, _ = dantinox("settings", "--section", "kv", "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [record["key"] for record in records] == [
        key for key in FIELDS if key.startswith("kv.")
    ]
    assert set(records[0]) >= {
        "section",
        "name",
        "type",
        "range",
        "default",
        "prerequisites",
        "help",
        "aliases",
        "flag",
    }
    assert len(dantinox("settings")[1].splitlines()) > len(FIELDS) and len(section_titles()) == len(
        SECTIONS
    )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["zzz"], "no setting matches zzz"),
        (["--section", "zzz"], "no section zzz: the sections and groups are"),
    ],
)
def test_a_search_without_results_is_an_error(dantinox, argv, words):
    code, out, err = dantinox("settings", *argv)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1


# Completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_names_commands_flags_and_choices(dantinox, shell):
    pytest.importorskip("shtab")
    code, out, err = dantinox("completion", shell)
    assert (code, err) == (0, "")
    for word in (
        "generate",
        "merge-lora",
        "kv_budget",
        "training.lr",
        "snapkv+ema",
        "prompt_file",
        "ppl",
    ):
        assert word in out, word


@pytest.mark.skipif(not os.path.exists("/bin/bash"), reason="needs bash")
@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["tr"], {"train"}),
        (["train", "--optimi"], {"--optimizer"}),
        (["train", "--optimizer", "a"], {"adamw", "adafactor"}),
        (["train", "--help", "opti"], {"optimizer"}),
        (["eval", "pp"], {"ppl"}),
        (["eval", "ppl", "--str"], {"--stride"}),
    ],
)
def test_bash_completes(dantinox, tmp_path, words, completions):
    pytest.importorskip("shtab")
    script = tmp_path / "dantinox.bash"
    script.write_text(dantinox("completion", "bash")[1])
    typed = " ".join(["dantinox", *words])
    code = (
        f"source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _shtab_dantinox; printf"
        ' "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["/bin/bash", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert set(done.stdout.split()) == completions


def test_an_unknown_shell_is_one_sentence(dantinox):
    code, out, err = dantinox("completion", "tcl")
    assert (code, out) == (2, "") and "bash" in err and err.count("\n") == 1


def test_eval_offers_the_precisions_of_the_settings():
    """The choices are literals, so that `--help` need not import the settings."""
    settings = get_type_hints(SamplingSettings)
    for flag in ("weights", "kv_dtype"):
        assert EVALUATE[flag][1]["choices"] == list(get_args(settings[flag]))


def test_a_missing_kind_of_evaluation_lists_the_kinds(dantinox):
    code, out, err = dantinox("eval")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("error: the following arguments are required: kind, one of ")
    assert {"ppl", "tasks", "kv", "sampling"} <= set(err.split(" one of ")[1].strip().split(", "))
