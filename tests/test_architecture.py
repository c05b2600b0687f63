"""The house rules that a program can check: imports run one way and never in a circle, nothing unsafe reads a file."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dantinox"
FILES = sorted(PACKAGE.rglob("*.py"))
# A room may import what stands in an earlier tier. `cli` and the public API import all.
TIERS = (
    {"files"},
    {"config"},
    {"platform", "programs"},
    {"text", "sampling", "model"},
    {"distributed", "run", "interop", "report"},
    {"generation"},
    {"training", "measure"},
    {"studies", "serve"},
    {"cli", "__init__", "__main__"},
)
TIER_OF = {room: number for number, rooms in enumerate(TIERS) for room in rooms}
ALSO_ALLOWED = {("interop", "run"), ("__main__", "cli")}
FORBIDDEN = {("generation", "interop"), ("training", "interop")}  # formats of other programs


def room_of(path: Path) -> str:
    """`model` for dantinox/model/attention.py, `config` for a file dantinox/config.py."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_modules(path: Path, source: str) -> set[str]:
    """The dotted name of every module a file imports, anywhere in it; `from a import b` gives a.b too."""
    package = ["dantinox", *path.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def rooms_imported(path: Path, source: str) -> set[str]:
    parts = [module.split(".") for module in imported_modules(path, source)]
    return {name[1] for name in parts if name[0] == "dantinox" and len(name) > 1 and name[1] in TIER_OF} - {room_of(path)}


def wrong_arrows(path: Path, source: str) -> set[tuple[str, str]]:
    room = room_of(path)
    return {
        (room, other)
        for other in rooms_imported(path, source)
        if (TIER_OF[other] >= TIER_OF[room] or (room, other) in FORBIDDEN)
        and (room, other) not in ALSO_ALLOWED
        and room != "__init__"
    }


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_run_one_way(path):
    assert room_of(path) in TIER_OF, f"{relative(path)} stands in no room of the house"
    assert wrong_arrows(path, path.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    ("file", "source", "arrows"),
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
        ("generation/a.py", "from dantinox.interop.peft import load_adapter", {("generation", "interop")}),
        ("cli.py", "from dantinox.training import train", set()),
    ],
)
def test_the_walker_sees_every_form_of_import(file, source, arrows):
    assert wrong_arrows(PACKAGE / file, source) == arrows


def test_no_files_import_each_other():
    """Also inside a room: whoever reads a file needs none that needs it."""
    names = {}
    for path in FILES:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {
        name: (imported_modules(path, path.read_text(encoding="utf-8")) & set(names)) - {name, "dantinox"}
        for name, path in names.items()
        if name != "dantinox"
    }
    tuple(TopologicalSorter(graph).static_order())  # a CycleError names the circle


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_nothing_in_a_file_is_ever_run(path):
    source = path.read_text(encoding="utf-8")
    modules = {name.split(".")[0] for name in imported_modules(path, source)}
    assert not modules & {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    for call in calls:
        name = ast.unparse(call.func)
        assert name not in ("eval", "exec", "yaml.unsafe_load", "yaml.full_load", "torch.load"), name
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert keywords.get("allow_pickle", "False") == "False"
        if name in ("yaml.load", "yaml.load_all"):
            assert keywords.get("Loader") in ("_Loader", "yaml.SafeLoader")


def test_the_yaml_loader_is_a_safe_one():
    import yaml

    from dantinox.config import yaml_files

    assert issubclass(yaml_files._Loader, yaml.SafeLoader)
    assert not issubclass(yaml_files._Loader, yaml.FullLoader)


def test_only_one_room_spells_mesh_axes():
    quoted = re.compile(r"""["'](fsdp|tensor)["']""")
    spelling = {room_of(path) for path in FILES if quoted.search(path.read_text(encoding="utf-8"))}
    assert spelling == {"config", "distributed"}  # where they are settings, and what they mean


@pytest.mark.parametrize("module", ["dantinox", "dantinox.config", "dantinox.run", "dantinox.report", "dantinox.text"])
def test_light_modules_do_not_load_jax(module):
    code = f"import sys, {module}; print(sorted({{'jax', 'flax', 'rich', 'matplotlib'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
