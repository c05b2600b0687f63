"""Makes a folder with which a machine without a network runs the check.

    python benchmarks/accelerator/kit.py build/accelerator-kit

The folder has wheels of Python 3.12 for x86-64, the check, references that this CPU computes, and
`start.sh`, which installs the wheels into a folder of its own and passes its arguments to the
check.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER, ROOT = Path(__file__).parent, Path(__file__).parents[2]
# What images for JAX may lack. Their dependencies are carried too.
CARRIED = (
    "pydantic>=2.11",
    "prompt_toolkit>=3.0.36",
    "shtab>=1.7",
    "starlette>=0.46",
    "uvicorn>=0.34",
    "llguidance>=1.2",
)
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 5)] + [
    "manylinux2014_x86_64"
]
LIMIT = 50 * 10**6  # bytes of the folder
START = """#!/bin/sh
# Installs the wheels beside this file without a network, and runs the check: sh start.sh --minutes 8 --out results
# PYTHON selects the interpreter, SITE the folder of the packages.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
site=${SITE:-/tmp/dantinox-site}
"$python" "$here/image.py"
"$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$here"/wheels/*.whl
PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$here/accelerator" "$@"
"""


def make_kit(folder: Path, smoke: bool) -> int:
    """Fills the folder and returns its bytes; what was in it is deleted.

    Args:
      smoke: compute only the references of tiny sizes; those of the others take a minute.
    """
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip"]
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    only = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *platforms]
    subprocess.run([*pip, "download", "-q", *only, "-d", str(wheels), *CARRIED], check=True)
    shutil.rmtree(
        ROOT / "build" / "lib", ignore_errors=True
    )  # modules of an earlier version would get into the wheel
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(wheels), str(ROOT)], check=True)
    shutil.copytree(
        FOLDER,
        folder / "accelerator",
        ignore=shutil.ignore_patterns("__pycache__", "kit.py", "references.npz"),
    )
    shutil.copy2(FOLDER / "image.py", folder / "image.py")
    (folder / "start.sh").write_text(START, encoding="ascii")
    command = [
        sys.executable,
        str(FOLDER),
        "--references",
        str(folder / "accelerator" / "references.npz"),
    ]
    subprocess.run(
        [*command, *["--smoke"] * smoke], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--smoke", action="store_true", help="only for tiny sizes, to check the kit"
    )
    options = parser.parse_args()
    folder, size = options.folder, make_kit(options.folder, options.smoke)
    if size > LIMIT:
        sys.exit(f"the kit has {size / 1e6:.0f} MB, more than {LIMIT / 1e6:.0f}")
    print(
        f"{folder}: {size / 1e6:.1f} MB; on the machine: sh {folder.name}/start.sh"
        " --minutes 8 --out results"
    )


if __name__ == "__main__":
    main()
