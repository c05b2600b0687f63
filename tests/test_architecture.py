"""Checks the package layout: imports go one way and never in a cycle, and no file is read
unsafely.
"""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dantinox"
FILES = sorted(PACKAGE.rglob("*.py"))
# A package may import packages of earlier tiers. `cli` and the public API import all.
TIERS = (
    {"files", "html_repr"},
    {"machine"},
    {"config"},
    {"chips", "platform", "programs", "kernels"},
    {"text", "sampling", "model"},
    {"distributed", "run", "interop", "report"},
    {"generation"},
    {"training"},
    {"lab", "serve"},
    {"cli", "__init__", "__main__"},
)
TIER_OF = {package: number for number, packages in enumerate(TIERS) for package in packages}
ALSO_ALLOWED = {("interop", "run"), ("__main__", "cli")}
FORBIDDEN = {
    ("generation", "interop"),
    ("training", "interop"),
}  # they must not depend on foreign formats


def package_of(path: Path) -> str:
    """Returns `model` for dantinox/model/attention.py, `files` for dantinox/files.py."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


@cache
def imported_modules(path: Path, source: str) -> frozenset[str]:
    """Returns the dotted name of every module that a file imports, at any level; `from a import b`
    adds a and a.b.
    """
    package = ["dantinox", *path.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in nodes(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def imported_packages(path: Path, source: str) -> set[str]:
    parts = [module.split(".") for module in imported_modules(path, source)]
    return {
        name[1] for name in parts if name[0] == "dantinox" and len(name) > 1 and name[1] in TIER_OF
    } - {package_of(path)}


def forbidden_imports(path: Path, source: str) -> set[tuple[str, str]]:
    """Returns the pairs (importing package, imported package) that the layout forbids."""
    package = package_of(path)
    return {
        (package, other)
        for other in imported_packages(path, source)
        if (TIER_OF[other] >= TIER_OF[package] or (package, other) in FORBIDDEN)
        and (package, other) not in ALSO_ALLOWED
        and package != "__init__"
    }


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_imports_go_one_way():
    assert [relative(path) for path in FILES if package_of(path) not in TIER_OF] == [], (
        "the package is not in TIERS"
    )
    forbidden = {relative(path): forbidden_imports(path, text_of(path)) for path in FILES}
    assert {path: pairs for path, pairs in forbidden.items() if pairs} == {}


@pytest.mark.parametrize(
    ("file", "source", "forbidden"),
    [
        ("model/a.py", "from dantinox.config import Config\nfrom dantinox.model.b import c", set()),
        ("model/a.py", "import dantinox.sampling.draw", {("model", "sampling")}),
        ("model/a.py", "def f():\n    from dantinox import training", {("model", "training")}),
        ("model/a.py", "from ..training import loop", {("model", "training")}),
        ("model/a.py", "from . import attention", set()),
        ("config/a.py", "from dantinox.run import RunDirectory", {("config", "run")}),
        ("interop/a.py", "from dantinox.run import RunDirectory", set()),
        ("report/a.py", "from dantinox.run import RunDirectory", {("report", "run")}),
        ("report/a.py", "from dantinox.files import atomic_write", set()),
        ("training/a.py", "from dantinox.generation import generate", set()),
        (
            "generation/a.py",
            "from dantinox.interop.merge_adapters import load_adapter",
            {("generation", "interop")},
        ),
        ("cli.py", "from dantinox.training import train", set()),
    ],
)
def test_every_form_of_import_is_found(file, source, forbidden):
    assert forbidden_imports(PACKAGE / file, source) == forbidden


def test_guides_and_programs_do_not_import_each_other():
    """What the host checks between two tokens is independent of what a program computes."""
    for one, other in (("guides", "decode"), ("decode", "guides")):
        files = [path for path in FILES if path.parent == PACKAGE / "generation" / one]
        name = f"dantinox.generation.{other}"
        assert files and not [
            relative(path)
            for path in files
            if any(m.startswith(name) for m in imported_modules(path, text_of(path)))
        ]


def test_no_modules_import_each_other():
    """Imports have no cycles, also within a package."""
    names = {}
    for path in FILES:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {
        name: (imported_modules(path, text_of(path)) & set(names)) - {name, "dantinox"}
        for name, path in names.items()
        if name != "dantinox"
    }
    tuple(TopologicalSorter(graph).static_order())  # a CycleError names the cycle


def unsafe_reads(path: Path, source: str) -> set[str]:
    """Returns the modules and calls by which reading a file could run code."""
    modules = {name.split(".")[0] for name in imported_modules(path, source)}
    found = modules & {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
    for call in (node for node in nodes(source) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        loads_yaml = name in ("yaml.load", "yaml.load_all")
        if (
            name in ("eval", "exec", "yaml.unsafe_load", "yaml.full_load", "torch.load")
            or keywords.get("allow_pickle", "False") != "False"
            or (loads_yaml and keywords.get("Loader") not in ("_Loader", "yaml.SafeLoader"))
        ):
            found.add(ast.unparse(call))
    return found


def test_no_code_is_read_from_files():
    found = {relative(path): unsafe_reads(path, text_of(path)) for path in FILES}
    assert {path: what for path, what in found.items() if what} == {}


@pytest.mark.parametrize(
    ("source", "unsafe"),
    [
        (
            "import json\nyaml.load(x, Loader=yaml.SafeLoader)\nnp.load(x, allow_pickle=False)",
            set(),
        ),
        ("from pickle import loads", {"pickle"}),
        ("def f():\n    eval(x)", {"eval(x)"}),
        ("np.load(x, allow_pickle=True)", {"np.load(x, allow_pickle=True)"}),
        ("yaml.load(x)", {"yaml.load(x)"}),
        ("torch.load(x)", {"torch.load(x)"}),
    ],
)
def test_every_unsafe_form_is_found(source, unsafe):
    assert unsafe_reads(PACKAGE / "run" / "a.py", source) == unsafe


def test_the_yaml_loader_is_safe():
    import yaml

    from dantinox.config import yaml_text

    assert issubclass(yaml_text._Loader, yaml.SafeLoader)
    assert not issubclass(yaml_text._Loader, yaml.FullLoader)


def test_mesh_axes_are_named_only_in_config_and_distributed():
    quoted = re.compile(r"""["'](fsdp|tensor)["']""")
    naming = {package_of(path) for path in FILES if quoted.search(text_of(path))}
    assert naming == {"config", "distributed"}


def test_light_modules_do_not_load_heavy_ones():
    heavy = {"dantinox": ("jax", "flax", "pydantic", "numpy", "yaml", "rich", "matplotlib")}
    heavy |= {
        f"dantinox.{name}": ("jax", "flax", "rich", "matplotlib")
        for name in ("config", "run", "report", "text")
    }
    code = f"""
import importlib, sys
for module, heavy in {heavy}.items():
    importlib.import_module(module)
    loaded = [name for name in heavy if name in sys.modules]
    if loaded:
        print(module, *loaded)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == ""


def test_tests_mirror_the_packages():
    """Every package has a folder of tests, and every top-level module a test file. Other folders
    test whole commands.
    """
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    folders = {
        path.name
        for path in (ROOT / "tests").iterdir()
        if path.is_dir() and any(path.glob("test_*.py"))
    }
    assert folders - packages == {"benchmarks", "docs", "faults", "published"}
    assert packages - folders == set()
    modules = {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")}
    assert {name for name in modules if not (ROOT / "tests" / f"test_{name}.py").is_file()} == set()
