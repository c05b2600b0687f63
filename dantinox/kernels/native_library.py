"""Compiles, loads and registers the native kernels.

`matmul.cc` is compiled once for each instruction set and stored in the user's cache directory. The
package `dantinox-kernels` (`make kernels`) contains compiled files, so that no compiler is needed.
The environment variable `DANTINOX_KERNELS` limits the instruction set or disables the kernels.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax

from dantinox.config import UserError
from dantinox.machine import cache_folder, cpu_flags

SOURCE = Path(__file__).with_name("matmul.cc")
TARGET = "dantinox_matmul"
UNPACK_TARGET = "dantinox_unpack"
PACKAGE = "dantinox_kernels"
COMPILERS = ("c++", "g++", "clang++")
COMPILE_SECONDS = 300  # time limit
VARIABLE = "DANTINOX_KERNELS"  # the best instruction set that may be used, or "off"
# Instruction sets, the best first: the CPU flags that they need, as Linux names them, and the
# compiler options.
InstructionSets = dict[str, tuple[frozenset[str], tuple[str, ...]]]
AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
X86_SETS: InstructionSets = {
    "avx512_bf16": (
        AVX512 | {"avx512_bf16", "avx512_vnni"},
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
    ),
    "avx512": (AVX512, ("-march=x86-64-v4",)),
    "avx2": (AVX2, ("-march=x86-64-v3",)),
}
ARM_SETS: InstructionSets = {"neon": (frozenset(), ())}

log = logging.getLogger("dantinox.kernels")


class Kernels(NamedTuple):
    """The state of the native kernels in this process.

    Attributes:
      instructions: the instruction set of the loaded kernels; None if there are none.
      note: one sentence that says where the kernels are, or why there are none.
    """

    instructions: str | None
    note: str

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether the kernels multiply rows in bfloat16."""
        return self.instructions == "avx512_bf16"


def instruction_sets() -> InstructionSets:
    """Returns the instruction sets for which kernels exist on this kind of machine, the best
    first.
    """
    return {"x86_64": X86_SETS, "AMD64": X86_SETS, "aarch64": ARM_SETS, "arm64": ARM_SETS}.get(
        platform.machine(), {}
    )


def allowed_sets() -> InstructionSets:
    """Returns the instruction sets that `DANTINOX_KERNELS` allows: the named one and those below
    it.

    Raises:
      UserError: the variable has an unknown value.
    """
    sets = instruction_sets()
    limit = os.environ.get(VARIABLE)
    if limit == "off" or not sets:
        return {}
    if not limit:
        return sets
    names = list(sets)
    if limit not in names:
        choices = f"{', '.join(['off', *names[:-1]])} or {names[-1]}"
        raise UserError(f"the environment variable {VARIABLE} must be {choices}, got {limit!r}")
    return {name: sets[name] for name in names[names.index(limit) :]}


@lru_cache(maxsize=1)
def load_kernels() -> Kernels:
    """Loads the kernels for this CPU and registers them with XLA; compiles them if necessary.

    Raises:
      UserError: the environment variable `DANTINOX_KERNELS` has an unknown value.
    """
    if sys.platform == "win32":
        return Kernels(None, "native kernels need Linux or macOS, so XLA multiplies the weights")
    allowed = allowed_sets()
    if not allowed and instruction_sets():
        return Kernels(
            None, f"{VARIABLE}=off disables the native kernels, so XLA multiplies the weights"
        )
    flags = cpu_flags()
    instructions = next((name for name, (needed, _) in allowed.items() if needed <= flags), None)
    if instructions is None:
        return Kernels(
            None,
            f"no native kernels exist for this CPU ({platform.machine()}),"
            " so XLA multiplies the weights",
        )
    try:
        path = _packaged(instructions) or _compiled(instructions)
        library = ctypes.CDLL(str(path))
        handlers = {target: getattr(library, target) for target in (TARGET, UNPACK_TARGET)}
    except (OSError, AttributeError, KernelError) as error:
        return Kernels(None, f"no native kernels, so XLA multiplies the weights: {error}")
    for target, handler in handlers.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")
    return Kernels(instructions, f"native kernels for {instructions}: {path}")


class KernelError(Exception):
    """The kernels cannot be compiled; the message is the cause."""


def library_name(instructions: str) -> str:
    """Returns the file name of the kernels for an instruction set. It changes with the source and
    the version of jaxlib.
    """
    text = (
        SOURCE.read_bytes()
        + repr((jax.lib.__version__, instruction_sets()[instructions][1])).encode()
    )
    return f"matmul-{instructions}-{hashlib.sha256(text).hexdigest()[:16]}.so"


def compile_kernels(instructions: str, path: Path, compiler: str | None = None) -> None:
    """Compiles the kernels for an instruction set.

    Args:
      path: the shared library to create; it is replaced atomically.
      compiler: the C++ compiler; None: the environment variable `CXX`, or the first of `COMPILERS`
        on the `PATH`.

    Raises:
      KernelError: there is no compiler, or it fails.
      OSError: the file cannot be written.
    """
    compiler = compiler or os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        raise KernelError(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    options = ["-O3", "-std=c++17", "-shared", "-fPIC", "-w", *instruction_sets()[instructions][1]]
    if sys.platform == "darwin":
        options.append("-Wl,-undefined,dynamic_lookup")
    file, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(file)
    command = [compiler, *options, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", temporary]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no output"]
            first = next((line for line in lines if "error" in line), lines[0])
            raise KernelError(f"{compiler} failed: {first[:200]}")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except FileNotFoundError:
        raise KernelError(f"the C++ compiler {compiler} does not exist") from None
    except subprocess.TimeoutExpired:
        raise KernelError(f"{compiler} took more than {COMPILE_SECONDS} seconds") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _packaged(instructions: str) -> Path | None:
    """Returns the file of the package `dantinox-kernels`, if it is installed and was built from
    this source.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    paths = (Path(folder) / library_name(instructions) for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def _compiled(instructions: str) -> Path:
    """Returns the file in the user's cache directory, and compiles it first if necessary."""
    path = cache_folder() / "kernels" / library_name(instructions)
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not os.access(path.parent, os.W_OK):
                raise PermissionError(None, "the directory is read-only")
        except OSError as error:
            raise KernelError(f"cannot write {path.parent}: {error.strerror}") from None
        log.warning(
            "compiling native kernels for %s; this takes up to half a minute and happens once",
            instructions,
        )
        compile_kernels(instructions, path)
    for file in (path.parent, path):
        facts = file.stat()
        if facts.st_uid not in (os.getuid(), 0) or facts.st_mode & stat.S_IWOTH:
            raise KernelError(f"{file} belongs to another user, or other users may write it")
    return path
