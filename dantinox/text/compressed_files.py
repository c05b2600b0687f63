"""Reads files that may be compressed with gzip or zstd."""

import contextlib
import gzip
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dantinox.files import UserError, install_command

SUFFIXES = (".gz", ".zst")


def decompressed_name(name: str) -> str:
    """Returns the name without its compression suffix, in any case: `a.jsonl` for `a.jsonl.zst` and
    `a.jsonl.ZST`.
    """
    return name.rpartition(".")[0] if name.lower().endswith(SUFFIXES) else name


@contextlib.contextmanager
def open_decompressed(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for reading and decompresses it on the fly.

    Raises:
      UserError: the file cannot be read or is damaged, or zstd is not installed. Reading the stream
        can also raise this error.
    """
    suffix = path.suffix.lower()
    kind = ""
    open_file: Any = open
    decoder_errors: tuple[type[Exception], ...] = ()
    if suffix == ".gz":
        kind = "gzip"
        open_file = gzip.open
        decoder_errors = (gzip.BadGzipFile, zlib.error)
    elif suffix == ".zst":
        kind = "zstd"
        zstd = _zstd(path)
        open_file = zstd.open
        decoder_errors = (zstd.ZstdError,)
    try:
        with open_file(path, "rb") as stream:
            yield stream
    except EOFError:
        raise UserError(f"{path} ends too early: the {kind} file is truncated") from None
    except decoder_errors as error:
        raise UserError(f"{path} is not a valid {kind} file: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _zstd(path: Path) -> Any:
    """Imports zstd from the standard library (Python 3.14 and later) or from its backport."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        raise UserError(
            f"{path} is compressed with zstd, which is not installed: {install_command('zstd')}"
        ) from None
    return zstd
