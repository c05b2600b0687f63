"""Compiling and loading the native kernels: compilers, cache directories, messages."""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dantinox import __version__
from dantinox.config import UserError
from dantinox.kernels import build_wheel as wheels
from dantinox.kernels import native_library as native
from dantinox.kernels.build_wheel import build_wheel
from dantinox.kernels.native_library import (
    KernelError,
    Kernels,
    compile_kernels,
    instruction_sets,
    load_kernels,
)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, native.PACKAGE, None)  # as if it was not installed
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
        None,
        "no native kernels, so XLA multiplies the weights: there is"
        " no C++ compiler (c++, g++, clang++)",
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
    assert load_kernels().note.startswith(
        "no native kernels, so XLA multiplies the weights: cannot write "
    )
    (tmp_path / "cache").unlink()
    load_kernels.cache_clear()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert load_kernels().note.endswith("dantinox/kernels: the directory is read-only")


def test_a_file_that_others_may_write_is_not_loaded(tmp_path, monkeypatch):
    folder = tmp_path / "cache/dantinox/kernels"
    folder.mkdir(parents=True)
    monkeypatch.setattr(native, "compile_kernels", lambda instructions, path: path.write_bytes(b""))
    folder.chmod(0o777)
    assert load_kernels().note.endswith(
        f"{folder} belongs to another user, or other users may write it"
    )


@pytest.mark.parametrize(("machine", "flags"), [("riscv64", set()), ("x86_64", {"sse2", "avx"})])
def test_a_cpu_without_kernels(monkeypatch, machine, flags):
    monkeypatch.setattr(native.platform, "machine", lambda: machine)
    monkeypatch.setattr(native, "cpu_flags", lambda: frozenset(flags))
    assert (
        load_kernels().note
        == f"no native kernels exist for this CPU ({machine}), so XLA multiplies the weights"
    )


def test_an_environment_variable_limits_the_instruction_set(monkeypatch):
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native, "cpu_flags", lambda: native.AVX512)
    monkeypatch.setattr(
        native, "_packaged", lambda instructions: (_ for _ in ()).throw(KernelError(instructions))
    )
    for limit, chosen in (
        ("", "avx512"),
        ("avx512_bf16", "avx512"),
        ("avx512", "avx512"),
        ("avx2", "avx2"),
    ):
        monkeypatch.setenv(native.VARIABLE, limit)
        load_kernels.cache_clear()
        assert load_kernels().note.endswith(f": {chosen}"), limit
    monkeypatch.setenv(native.VARIABLE, "off")
    load_kernels.cache_clear()
    assert (
        load_kernels().note
        == "DANTINOX_KERNELS=off disables the native kernels, so XLA multiplies the weights"
    )
    monkeypatch.setenv(native.VARIABLE, "sse")
    load_kernels.cache_clear()
    with pytest.raises(
        UserError, match="DANTINOX_KERNELS must be off, avx512_bf16, avx512 or avx2, got 'sse'"
    ):
        load_kernels()


def test_windows_has_no_kernels(monkeypatch):
    monkeypatch.setattr(native.sys, "platform", "win32")
    assert (
        load_kernels().note == "native kernels need Linux or macOS, so XLA multiplies the weights"
    )


def test_the_best_instruction_set_of_a_cpu(monkeypatch):
    """The note names what was loaded; a library without the function is an error."""
    tried = []

    def compile_nothing(instructions, path):
        tried.append(instructions)
        path.write_bytes(b"")

    monkeypatch.setattr(native, "compile_kernels", compile_nothing)
    for name, (needed, _) in native.X86_SETS.items():
        monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(native, "cpu_flags", lambda needed=needed: needed | {"sse2"})
        load_kernels.cache_clear()
        assert load_kernels().instructions is None and tried[-1] == name
    assert [Kernels(name, "").multiplies_bfloat16 for name in native.X86_SETS] == [
        True,
        False,
        False,
    ]
    assert set(instruction_sets()) == set(native.X86_SETS)
    monkeypatch.setattr(native.platform, "machine", lambda: "arm64")
    assert set(instruction_sets()) == {"neon"}


def test_arguments_of_the_compiler(tmp_path, monkeypatch):
    """Each instruction set has its options, and its library a name that changes with them and with
    the source.
    """
    written = tmp_path / "arguments"
    compiler = fake_compiler(tmp_path, f'printf "%s\\n" "$@" > "{written}"')
    names = {native.library_name(name) for name in native.X86_SETS}
    assert len(names) == 3 and all(
        name.startswith("matmul-avx") and name.endswith(".so") for name in names
    )
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    for system, more in (("linux", []), ("darwin", ["-Wl,-undefined,dynamic_lookup"])):
        monkeypatch.setattr(native.sys, "platform", system)
        for name, (_, options) in native.X86_SETS.items():
            compile_kernels(name, tmp_path / "x.so", str(compiler))
            *first, include, source, output, temporary = written.read_text().splitlines()
            assert first == ["-O3", "-std=c++17", "-shared", "-fPIC", "-w", *options, *more]
            assert (
                Path(include.removeprefix("-I"), "xla/ffi/api/ffi.h").is_file()
                and Path(source) == native.SOURCE
            )
            assert (
                output == "-o"
                and not Path(temporary).exists()
                and (tmp_path / "x.so").stat().st_mode & 0o777 == 0o644
            )
    monkeypatch.setattr(native, "SOURCE", written)
    assert names.isdisjoint({native.library_name(name) for name in native.X86_SETS})


def test_files_of_a_wheel(tmp_path, monkeypatch):
    """The libraries, the metadata, and a record of the hash and the size of every file but
    itself.
    """
    monkeypatch.setattr(
        wheels, "compile_kernels", lambda name, path: path.write_bytes(name.encode())
    )
    for names in (["avx2"], None):
        wheel = build_wheel(tmp_path / "dist" / str(names), names)
        release = __version__
        assert (
            wheel.name.startswith(f"dantinox_kernels-{release}-py3-none-")
            and wheel.suffix == ".whl"
        )
        assert "-" not in wheel.stem.split("-none-")[1] and "." not in wheel.stem.split("-none-")[1]
        with zipfile.ZipFile(wheel) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        info = f"dantinox_kernels-{release}.dist-info"
        libraries = {
            f"dantinox_kernels/{native.library_name(name)}": name.encode()
            for name in names or instruction_sets()
        }
        assert libraries.items() <= files.items()
        others = {
            "dantinox_kernels/__init__.py",
            f"{info}/METADATA",
            f"{info}/WHEEL",
            f"{info}/RECORD",
        }
        assert files.keys() == libraries.keys() | others
        metadata, tags = files[f"{info}/METADATA"].decode(), files[f"{info}/WHEEL"].decode()
        assert f"Name: dantinox-kernels\nVersion: {release}\n" in metadata
        assert (
            f"jaxlib {wheels.version('jaxlib')}\n" in metadata
            and f"Requires-Dist: dantinox=={release}\n" in metadata
        )
        assert f"Tag: {wheel.stem.removeprefix(f'dantinox_kernels-{release}-')}\n" in tags
        assert "Root-Is-Purelib: false\n" in tags
        records = dict(
            line.split(",", 1) for line in files.pop(f"{info}/RECORD").decode().splitlines()
        )
        assert records.pop(f"{info}/RECORD") == "," and records == {
            name: (
                f"sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}"
            )
            for name, data in files.items()
        }


def test_the_package_is_preferred(tmp_path, monkeypatch):
    package = tmp_path / "site/dantinox_kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, native.PACKAGE)
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
    is_default = (
        Path(command).resolve() == Path(first).resolve()
    )  # c++ is usually a link to one of the others
    for name, (needed, _) in instruction_sets().items():
        if is_default and needed <= native.cpu_flags():
            continue
        path = tmp_path / f"{name}.so"
        compile_kernels(name, path, compiler)
        assert path.stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("name", instruction_sets())
def test_every_instruction_set_is_exact(tmp_path, name):
    """Runs the tests of the products with only one instruction set. The best one is used by all
    other tests.
    """
    supported = [
        other for other, (needed, _) in instruction_sets().items() if needed <= native.cpu_flags()
    ]
    if name not in supported[1:]:
        pytest.skip(
            f"this CPU lacks {name}" if name not in supported else f"the other tests use {name}"
        )
    code = f"""
import sys
import pytest
from dantinox.kernels import load_kernels
assert load_kernels().instructions == {name!r}
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/kernels/test_packed_matmul.py", "-k", "not threads"]))
"""
    environment = os.environ | {native.VARIABLE: name}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_wheel(tmp_path):
    """Kernels of an installed wheel are loaded without a compiler."""
    best = next(
        (name for name, (needed, _) in instruction_sets().items() if needed <= native.cpu_flags()),
        None,
    )
    if best is None or not any(map(shutil.which, native.COMPILERS)):
        pytest.skip("no compiler, or no kernels for this CPU")
    wheel, target, empty = (
        build_wheel(tmp_path / "dist", [best]),
        tmp_path / "site",
        tmp_path / "empty",
    )
    empty.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(command, check=True)
    code = "from dantinox.kernels import load_kernels; print(load_kernels().note)"
    paths = os.pathsep.join(filter(None, (str(target), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PATH": str(empty), "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert (
        done.stdout.strip()
        == f"native kernels for {best}: {target / native.PACKAGE / native.library_name(best)}"
    )
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
