"""The generated reference names every setting, command, flag, route, metric, public name, log
column and file of a run.
"""

import argparse
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml

import dantinox
from dantinox.cli import COMMANDS, command_parser
from dantinox.config import Config
from dantinox.config.flag_values import overrides
from dantinox.report.metric_files import COLUMNS
from dantinox.run import RunDirectory
from dantinox.serve.app import make_app
from dantinox.serve.operations.metrics import Metrics
from tests.serve.fakes import FakeEngine

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("docs_reference", DOCS / "reference.py")
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    return reference.pages()


def settings():
    for section, part in Config.model_fields.items():
        for name, field in part.annotation.model_fields.items():
            yield f"settings/{section}.md", f"## {section}.{name}\n"
            yield (
                f"settings/{section}.md",
                " ".join(field.description.split())[1:],
            )  # the first letter is a capital one there


def flags():
    for name in COMMANDS:
        parser = command_parser(name)
        kinds = [
            one.choices.values()
            for one in parser._actions
            if isinstance(one, argparse._SubParsersAction)
        ]
        yield "commands/index.md", f"[`{name}`]"
        yield f"commands/{name}.md", f"# dantinox {name}\n"
        for action in (
            action for one in (parser, *(kinds[0] if kinds else ())) for action in one._actions
        ):
            for flag in action.option_strings if action.help is not argparse.SUPPRESS else ():
                yield f"commands/{name}.md", re.compile(rf"`{flag}\b")


def server_paths():
    app = make_app(FakeEngine())
    while not hasattr(app, "routes"):
        app = app._app  # what the middleware wraps
    for route in app.routes:
        for method in route.methods - {"HEAD"}:
            yield (
                "http.md",
                re.compile(rf"\| [A-Z, ]*\b{method}\b[A-Z, ]* \| `{re.escape(route.path)}` \| \w"),
            )


def metrics():
    for name, text in re.findall(
        r"^# HELP (\w+) (.*)$", Metrics(FakeEngine()).text().decode(), re.MULTILINE
    ):
        if not name.endswith("_created"):
            yield "metrics.md", f"| `{name}` |"
            yield "metrics.md", text[1:]


def public_names():
    for name in dantinox.__all__:
        yield "api.md", f"dantinox.{name}`"
        if name != "__version__":
            yield "api.md", re.compile(rf"\.\. auto\w+:: dantinox\.{name}\n")


def files():
    for name in COLUMNS:
        yield "files.md", f"| `{name}` |"
    run = RunDirectory("run")
    paths = {path for path in vars(run).values() if isinstance(path, Path) and path != run.path}
    for path in paths | {run.log(Config()), run.summary(Config())}:
        yield (
            "files.md",
            re.compile(rf"\| `{re.escape(path.relative_to(run.path).parts[0])}/?` \| .*\w"),
        )


KINDS = {
    kind.__name__: kind for kind in (settings, flags, server_paths, metrics, public_names, files)
}


def is_named(pages, page, what):
    """Whether a page has a text, or a match of a pattern."""
    text = pages.get(page, "").replace("\\|", "|").replace("\\<", "<").replace("\\*", "*")
    return what in text if isinstance(what, str) else what.search(text) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_named(pages, kind):
    wanted = list(KINDS[kind]())
    assert len(wanted) > 10
    assert [(page, what) for page, what in wanted if not is_named(pages, page, what)] == []


@pytest.mark.parametrize(
    ("kind", "page", "line"),
    [
        ("settings", "settings/training.md", "## training.lr\n"),
        ("flags", "commands/eval.md", "| `--stride N` |"),
        ("flags", "commands/generate.md", "`--generation.top_p`"),
        ("server_paths", "http.md", "| POST | `/v1/completions` |"),
        ("metrics", "metrics.md", "| `dantinox_busy` |"),
        ("public_names", "api.md", ".. autofunction:: dantinox.load\n"),
        ("files", "files.md", "| `memory_gb` |"),
    ],
)
def test_a_missing_line_is_noticed(pages, kind, page, line):
    assert line in pages[page]
    without = pages | {page: pages[page].replace(line, "")}
    assert [what for at, what in KINDS[kind]() if not is_named(without, at, what)]


def test_every_body_of_the_server_is_described(pages):
    fields = pages["http.md"].split("### Fields of ")[1:]
    assert len(fields) == 24
    for part in fields:
        rows = re.findall(r"^\| (`\w+`.*?) \| (.*?) \| (.*?) \|$", part, re.MULTILINE)
        assert rows and all(kind and text for _, kind, text in rows), part


def test_examples_of_settings_are_valid(pages):
    """The YAML and the flags of every setting are read as the same value."""
    parser = command_parser("train")
    for name, text in pages.items():
        if not name.startswith("settings/") or name == "settings/index.md":
            continue
        for part in re.split(r"^##+ (?=\w+\.)", text, flags=re.MULTILINE)[1:]:
            key = part.split("\n")[0]
            section, _, setting = key.partition(".")
            value = yaml.safe_load(re.search(r"```yaml\n(.*?)```", part, re.DOTALL)[1])[section][
                setting
            ]
            for flag in (
                re.search(r"\| flag \| `(.*)` \|", part)[1].replace("\\|", "|").split("` or `")
            ):
                options = parser.parse(shlex.split(flag))
                (found,) = overrides(options).items()
                assert found[0] == key
                assert validate(key, found[1]) == validate(key, value), key


def validate(key, value):
    section, _, name = key.partition(".")
    kind = Config.model_fields[section].annotation
    return getattr(kind.model_validate({name: value}), name)
