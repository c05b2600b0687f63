"""Compiling and loading the native kernels: compilers, cache directories, messages."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dantinox.config import UserError
from dantinox.kernels import native_library as native
from dantinox.kernels.build_wheel import build_wheel
from dantinox.kernels.native_library import KernelError, Kernels, compile_kernels, instruction_sets, load_kernels


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv(native.VARIABLE, raising=False)
    load_kernels.cache_clear()
    yield
    monkeypatch.undo()
    load_kernels.cache_clear()


def fake_compiler(folder, body):
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load_kernels() == Kernels(
        None, "no native kernels, so XLA multiplies the weights: there is no C++ compiler (c++, g++, clang++)"
    )


def test_a_compiler_that_fails(tmp_path, monkeypatch):
    fake_compiler(tmp_path, "echo note >&2; echo 'matmul.cc:1: error: no such option' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    note = load_kernels().note
    assert note.endswith("c++ failed: matmul.cc:1: error: no such option") and "\n" not in note
    assert not list((tmp_path / "cache/dantinox/kernels").iterdir())


def test_a_compiler_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/cc")
    assert load_kernels().note.endswith("the C++ compiler /nowhere/cc does not exist")


def test_a_compiler_that_hangs(tmp_path, monkeypatch):
    fake_compiler(tmp_path, "sleep 30")
    monkeypatch.setattr(native, "COMPILE_SECONDS", 0.2)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert load_kernels().note.endswith("c++ took more than 0.2 seconds")


def test_a_file_that_is_no_library(tmp_path, monkeypatch):
    fake_compiler(tmp_path, 'for last; do :; done; echo damaged > "$last"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    note = load_kernels().note
    assert note.startswith("no native kernels") and "\n" not in note


def test_a_cache_directory_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    assert load_kernels().note.startswith("no native kernels, so XLA multiplies the weights: cannot write ")
    (tmp_path / "cache").unlink()
    load_kernels.cache_clear()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert load_kernels().note.endswith("dantinox/kernels: the directory is read-only")


def test_a_file_that_others_may_write_is_not_loaded(tmp_path, monkeypatch):
    folder = tmp_path / "cache/dantinox/kernels"
    folder.mkdir(parents=True)
    monkeypatch.setattr(native, "compile_kernels", lambda instructions, path: path.write_bytes(b""))
    folder.chmod(0o777)
    assert load_kernels().note.endswith(f"{folder} belongs to another user, or other users may write it")


@pytest.mark.parametrize(("machine", "flags"), [("riscv64", set()), ("x86_64", {"sse2", "avx"})])
def test_a_cpu_without_kernels(monkeypatch, machine, flags):
    monkeypatch.setattr(native.platform, "machine", lambda: machine)
    monkeypatch.setattr(native, "cpu_flags", lambda: frozenset(flags))
    assert load_kernels().note == f"no native kernels exist for this CPU ({machine}), so XLA multiplies the weights"


def test_an_environment_variable_limits_the_instruction_set(monkeypatch):
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native, "cpu_flags", lambda: native.AVX512)
    monkeypatch.setattr(native, "_packaged", lambda instructions: (_ for _ in ()).throw(KernelError(instructions)))
    for limit, chosen in (("", "avx512"), ("avx512_bf16", "avx512"), ("avx512", "avx512"), ("avx2", "avx2")):
        monkeypatch.setenv(native.VARIABLE, limit)
        load_kernels.cache_clear()
        assert load_kernels().note.endswith(f": {chosen}"), limit
    monkeypatch.setenv(native.VARIABLE, "off")
    load_kernels.cache_clear()
    assert load_kernels().note == "DANTINOX_KERNELS=off disables the native kernels, so XLA multiplies the weights"
    monkeypatch.setenv(native.VARIABLE, "sse")
    load_kernels.cache_clear()
    with pytest.raises(UserError, match="DANTINOX_KERNELS must be off, avx512_bf16, avx512 or avx2, got 'sse'"):
        load_kernels()


def test_the_package_is_preferred(tmp_path, monkeypatch):
    package = tmp_path / "site/dantinox_kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    name = next(iter(instruction_sets()))
    assert native._packaged(name) is None
    file = package / native.library_name(name)
    file.write_bytes(b"")
    assert native._packaged(name) == file


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_every_instruction_set_compiles(tmp_path, compiler):
    """The tests below compile the sets that this CPU has with the first compiler."""
    if (command := shutil.which(compiler)) is None:
        pytest.skip(f"{compiler} is not installed")
    first = shutil.which(next(filter(shutil.which, native.COMPILERS))) or ""
    is_default = Path(command).resolve() == Path(first).resolve()  # c++ is usually a link to one of the others
    for name, (needed, _) in instruction_sets().items():
        if is_default and needed <= native.cpu_flags():
            continue
        path = tmp_path / f"{name}.so"
        compile_kernels(name, path, compiler)
        assert path.stat().st_size > 10_000


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", instruction_sets())
def test_every_instruction_set_is_exact(tmp_path, name):
    """Runs the tests of the products with only one instruction set. The best one is used by all other tests."""
    supported = [other for other, (needed, _) in instruction_sets().items() if needed <= native.cpu_flags()]
    if name not in supported[1:]:
        pytest.skip(f"this CPU lacks {name}" if name not in supported else f"the other tests use {name}")
    code = f"""
import sys
import pytest
from dantinox.kernels import native_library as native
from dantinox.kernels.build_wheel import build_wheel
sets = native.instruction_sets()
native.instruction_sets = lambda: {{{name!r}: sets[{name!r}]}}
assert native.load_kernels().instructions == {name!r}
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/kernels/test_packed_matmul.py", "-k", "not threads"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.exhaustive
def test_wheel(tmp_path):
    """Kernels of an installed wheel are loaded without a compiler."""
    best = next((name for name, (needed, _) in instruction_sets().items() if needed <= native.cpu_flags()), None)
    if best is None or not any(map(shutil.which, native.COMPILERS)):
        pytest.skip("no compiler, or no kernels for this CPU")
    wheel, target, empty = build_wheel(tmp_path / "dist", [best]), tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True)
    code = "from dantinox.kernels import load_kernels; print(load_kernels().note)"
    paths = os.pathsep.join(filter(None, (str(target), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PATH": str(empty), "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"native kernels for {best}: {target / native.PACKAGE / native.library_name(best)}"
    assert not (tmp_path / "cache/dantinox/kernels").exists()


def test_a_broken_source_is_one_error(tmp_path):
    if not any(map(shutil.which, native.COMPILERS)):
        pytest.skip("no compiler")
    with pytest.raises(KernelError, match="failed: "):
        broken = tmp_path / "matmul.cc"
        broken.write_text("int x = ;\n")
        source, native.SOURCE = native.SOURCE, broken
        try:
            compile_kernels(next(iter(instruction_sets())), tmp_path / "x.so")
        finally:
            native.SOURCE = source
