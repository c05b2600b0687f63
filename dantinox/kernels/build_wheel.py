"""Builds the wheel `dantinox-kernels`: the kernels of this architecture, compiled for the installed
version of jaxlib.

python -m dantinox.kernels.build_wheel dist
"""

import base64
import hashlib
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from dantinox import __version__
from dantinox.kernels.native_library import PACKAGE, compile_kernels, instruction_sets, library_name


def build_wheel(folder: Path, names: Iterable[str] | None = None) -> Path:
    """Compiles the kernels and returns the path of the wheel.

    The wheel has the version of `dantinox`. With another version of jaxlib its files are not used,
    see `library_name`.

    Args:
      folder: the directory of the wheel; it is created.
      names: the instruction sets; None: all sets of this kind of machine.

    Raises:
      KernelError: there is no compiler, or it fails.
      OSError: the file cannot be written.
    """
    release = __version__
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    tag = f"py3-none-{platform}"
    info = f"{PACKAGE}-{release}.dist-info"
    files = {f"{PACKAGE}/__init__.py": b'"""Compiled kernels of DantinoX."""\n'}
    with tempfile.TemporaryDirectory() as temporary:
        for name in instruction_sets() if names is None else names:
            library = Path(temporary, library_name(name))
            compile_kernels(name, library)
            files[f"{PACKAGE}/{library.name}"] = library.read_bytes()
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {PACKAGE.replace('_', '-')}\nVersion: {release}\n"
        f"Summary: Compiled CPU kernels of DantinoX for jaxlib {version('jaxlib')}\n"
        f"Requires-Dist: dantinox=={release}\n"
    ).encode()
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: dantinox\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    )
    record = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}")
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{PACKAGE}-{release}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel


if __name__ == "__main__":
    print(build_wheel(Path(sys.argv[1])))
