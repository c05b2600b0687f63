"""The examples in the docstrings of the public API run, and every public name has one."""

import ast
import doctest
import inspect
import shutil
import sys

import pytest

import dantinox

# The classes of the objects that public functions return or accept, with the module that defines
# each.
RESULTS = {
    "LoadedModel": "dantinox.generation.api.loaded_model",
    "Result": "dantinox.generation.api.result",
    "RunDirectory": "dantinox.run.directory",
}
MY_YAML = """
data: {path: text.txt}
model: {dim: 16, n_heads: 2, num_blocks: 1, max_context: 16}
tokenizer: {tokenizer_type: byte}
training: {batch_size: 2, steps: 4, eval_every: 2, warmup_steps: 1}
"""


def public_objects():
    found = {name: getattr(dantinox, name) for name in dantinox.PUBLIC}
    return found | {
        name: getattr(sys.modules[module], name)
        for name, module in RESULTS.items()
        if __import__(module)
    }


def public_members(kind):
    """The methods and properties of a class and its bases in this package, by name."""
    members = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("dantinox"):
            members |= {
                name: member for name, member in vars(base).items() if not name.startswith("_")
            }
    return {
        name: member
        for name, member in members.items()
        if callable(member) or hasattr(member, "__get__")
    }


def examples(name):
    """The examples of a public name: its own, then those of its members."""
    finder, thing = doctest.DocTestFinder(recurse=False), public_objects()[name]
    found = [(name, thing)]
    if inspect.isclass(thing):
        found += [(f"{name}.{member}", getattr(thing, member)) for member in public_members(thing)]
    names = {"dantinox": dantinox}
    return [
        test
        for at, one in found
        for test in finder.find(one, at, module=False, globs=names)
        if test.examples
    ]


@pytest.fixture
def folder(run_dir, tmp_path, monkeypatch):
    """The working directory of the examples: `runs/quickstart` with a chat template, `my.yaml` and
    `text.txt`.
    """
    from dantinox.text import ChatTemplate, Tokenizer

    run = shutil.copytree(run_dir, tmp_path / "runs" / "quickstart")
    template = ChatTemplate.from_name("plain", Tokenizer.load(run / "tokenizer.json"))
    (run / "chat_template.jinja").write_text(template.source, encoding="utf-8")
    (tmp_path / "my.yaml").write_text(MY_YAML)
    (tmp_path / "text.txt").write_text("Nel mezzo del cammin di nostra vita\n" * 40)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Their examples compile many programs.
SLOW = ("LoadedModel", "Transformer", "Constraint", "launch", "prepare")


def test_examples_call_public_functions_with_their_arguments():
    """Checks the examples without running them."""
    for name in (*dantinox.PUBLIC, *RESULTS):
        tests = examples(name)
        assert tests and tests[0].name == name, f"the docstring of {name} has no example"
        nodes = [
            node
            for test in tests
            for one in test.examples
            for node in ast.walk(ast.parse(one.source))
        ]
        used = {
            node: getattr(dantinox, node.attr)
            for node in nodes
            if is_name(node) and node.value.id == "dantinox"
        }
        for call in (node for node in nodes if isinstance(node, ast.Call) and node.func in used):
            arguments = {word.arg: None for word in call.keywords if word.arg}
            inspect.signature(used[call.func]).bind_partial(*call.args, **arguments)


def is_name(node):
    """Returns whether an expression is `module.name`."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n
        for n in (*dantinox.PUBLIC, *RESULTS)
    ],
)
def test_the_examples_of_a_public_name_run(name, folder, capsys):
    problems = []
    for test in examples(name):
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=problems.append)
    assert not problems, "".join(problems)


def test_every_public_function_method_and_property_is_documented():
    undocumented = []
    for name, thing in public_objects().items():
        undocumented += [name] * (not inspect.getdoc(thing))
        if not inspect.isclass(thing):
            signature = inspect.signature(thing)
            assert all(
                parameter.annotation is not parameter.empty
                for parameter in signature.parameters.values()
            ), name
            assert signature.return_annotation is not signature.empty, name
        elif name != "Config":  # its sections are pydantic models with a description for each field
            undocumented += [
                f"{name}.{member}"
                for member, one in public_members(thing).items()
                if not inspect.getdoc(one)
            ]
    assert undocumented == []
