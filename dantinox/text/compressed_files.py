"""Files that may be compressed by gzip or zstd, read alike."""

import contextlib
import gzip
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dantinox.files import UserError

SUFFIXES = (".gz", ".zst")


def decompressed_name(name: str) -> str:
    """`a.jsonl` for `a.jsonl.zst`."""
    return name.removesuffix(".gz").removesuffix(".zst") if name.endswith(SUFFIXES) else name


@contextlib.contextmanager
def open_decompressed(path: Path) -> Iterator[BinaryIO]:
    """The content of a file, unpacked as it is read.

    Raises:
      UserError: also while it is read: the system does not give it, it is damaged, or zstd is not installed.
    """
    kind = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    zstd: Any = _zstd(path) if kind == "zstd" else None
    unsound = (zstd.ZstdError,) if zstd else (gzip.BadGzipFile, zlib.error)
    open_file: Any = zstd.open if zstd else gzip.open if kind else open
    try:
        with open_file(path, "rb") as stream:
            yield stream
    except EOFError:
        raise UserError(f"{path} ends too early: the {kind} file is truncated") from None
    except unsound as error:
        raise UserError(f"{path} is not a sound {kind} file: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _zstd(path: Path) -> Any:
    """The module of the standard library, from Python 3.14 on, or the same module packed for older ones."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        raise UserError(f"{path} is packed by zstd, which is not installed: pip install 'dantinox[zstd]'") from None
    return zstd
