"""Runs the tests of the native kernels with the sanitizers of GCC:
`python -m tests.kernels.sanitize [avx2 …]` (Linux).

The tests of the products run with AddressSanitizer and UndefinedBehaviorSanitizer, once for each
instruction set of this CPU or of the command line. The threads of the kernels run with
ThreadSanitizer in `workers.cc`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

from dantinox.kernels import native_library
from dantinox.kernels.native_library import SOURCE, compile_kernels, instruction_sets
from dantinox.machine import cpu_flags

OPTIONS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
PRODUCTS = """
import sys
from pathlib import Path
import pytest
from dantinox.kernels import native_library as native
name, library = sys.argv[1:]
native._packaged = lambda instructions: Path(library)
assert native.load_kernels().instructions == name, native.load_kernels().note
tests = ["tests/kernels/test_packed_matmul.py", "tests/kernels/test_ternary_products.py"]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *tests, "-k", "not threads"]))
"""


def sanitizer_library(name: str) -> str:
    """Returns the path of a runtime library of GCC, such as `libasan.so`."""
    return subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def check_products(name: str, folder: Path) -> None:
    """Runs the tests of the products for an instruction set with AddressSanitizer and
    UndefinedBehaviorSanitizer.
    """
    compiler, library = folder / "c++", folder / f"{name}.so"
    compiler.write_text(f'#!/bin/sh\nexec g++ "$@" {" ".join(OPTIONS)}\n')
    compiler.chmod(0o755)
    compile_kernels(name, library, str(compiler))
    environment = os.environ | {
        "LD_PRELOAD": " ".join(map(sanitizer_library, ("libasan.so", "libubsan.so"))),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        native_library.VARIABLE: name,
    }
    subprocess.run(
        [sys.executable, "-c", PRODUCTS, name, str(library)], check=True, env=environment
    )


def check_threads(folder: Path) -> None:
    """Runs the threads of the kernels with ThreadSanitizer."""
    program, source = folder / "workers", Path(__file__).with_name("workers.cc")
    options = (
        f"-O1 -g -std=c++17 -w -fsanitize=thread -pthread -I{jax.ffi.include_dir()}"
        f" -I{SOURCE.parent}".split()
    )
    subprocess.run(["g++", *options, str(source), "-o", str(program)], check=True)
    # ThreadSanitizer needs addresses that Linux does not randomize.
    subprocess.run(
        [*(["setarch", "-R"] if shutil.which("setarch") else []), str(program)], check=True
    )


def main() -> None:
    native_library.COMPILE_SECONDS = 3600  # the checks multiply the time to compile
    names = [name for name, (needed, _) in instruction_sets().items() if needed <= cpu_flags()]
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or names:
            print(f"{name}: AddressSanitizer and UndefinedBehaviorSanitizer", flush=True)
            check_products(name, Path(folder))
        print("threads: ThreadSanitizer", flush=True)
        check_threads(Path(folder))


if __name__ == "__main__":
    main()
