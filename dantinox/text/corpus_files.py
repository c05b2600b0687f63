"""Finds the files of a corpus: resolves files, folders, globs and built-in corpora in a fixed
order.
"""

import glob
import os
import stat
import sysconfig
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dantinox.config import UserError
from dantinox.config.sections import RECORD_SUFFIXES
from dantinox.files import escape_name
from dantinox.text.builtin_addition import addition_corpus
from dantinox.text.builtin_instructions import instruction_corpus
from dantinox.text.builtin_recall import recall_corpus
from dantinox.text.compressed_files import decompressed_name

BUILTIN_PYTHON = "builtin:python"
RECALL = "builtin:recall"
INSTRUCTIONS = "builtin:instructions"
ADDITION = "builtin:addition"
BUILTIN_BYTES = 8_000_000  # the most bytes of builtin:python
# Folders to skip: installed packages, tests with unusual files, and tables of character codes.
_BUILTIN_SKIPS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "encodings",
    "__pycache__",
}
_SUFFIXES = """
.txt .text .md .markdown .rst .tex .org .adoc .html .htm .xml .csv .tsv .srt .yaml .yml .toml .py
.pyi .c .h .cc .cpp .hpp .cu .rs .go .java .js .ts .jsx .tsx .rb .php .pl .lua .r .jl .hs .ml .scala
.swift .kt .cs .sh .sql .css
"""
TEXT_SUFFIXES = frozenset([*_SUFFIXES.split(), *RECORD_SUFFIXES])
MAX_LISTED = 3  # names in the warning about skipped files


class CorpusFile(NamedTuple):
    """A file of plain text or of JSON Lines records.

    Attributes:
      path: the file, or the name of a built-in corpus.
      records: whether the content is JSON Lines.
      named: whether `data.path` names the file itself instead of a folder or glob; such a file must
        not be empty.
      content: the content of a built-in corpus. None: read the file.
    """

    path: Path
    records: bool
    named: bool
    content: bytes | None = None


def find_corpus_files(
    paths: str | tuple[str, ...], skip_bad: bool = False
) -> tuple[CorpusFile, ...]:
    """Returns the files of the paths in `data.path`, in the order of the paths. Folders are read
    recursively.

    The files of a folder or glob are sorted by name. In folders, names that start with a dot are
    skipped. Files without one of the `TEXT_SUFFIXES` are skipped too, with a warning; a compression
    suffix may follow the text suffix. Upper and lower case are equal in suffixes.

    Args:
      skip_bad: whether a warning replaces the error for an entry of a folder or glob that cannot be
        used.

    Raises:
      UserError: a path does not exist, cannot be read, or contains no text file; or a file that is
        named or matches a glob is a `.json` file.
    """
    names = [paths] if isinstance(paths, str) else paths
    files = [file for name in names for file in _resolve(name, skip_bad)]
    if not files:
        raise UserError("data.path is an empty list: name at least one text file")
    return tuple(files)


def _resolve(name: str, skip_bad: bool) -> list[CorpusFile]:
    """Returns the files of one path in `data.path`: a built-in corpus, a file, a folder or a
    glob.
    """
    builtin = {
        BUILTIN_PYTHON: _builtin_python,
        RECALL: _builtin_recall,
        INSTRUCTIONS: _builtin_instructions,
        ADDITION: _builtin_addition,
    }
    if name in builtin:
        return builtin[name]()
    *others, last = builtin
    builtins = f"{', '.join(others)} or {last}"
    if name.startswith("builtin:"):
        raise UserError(f"unknown corpus {name}, did you mean {builtins}?")
    path = Path(os.path.expanduser(name))
    mode = _file_mode(path)
    # The name of an existing file may contain brackets.
    if mode is None and glob.has_magic(name):
        files = _make_corpus_files(
            sorted(map(Path, glob.glob(str(path), recursive=True))), skip_bad
        )
        if not files:
            raise UserError(f"no file matches {name!r}")
        return files
    if mode is None or not name:  # an empty name would mean the current folder
        raise UserError(f"no corpus at {name!r}: name a text file, a folder, a glob, {builtins}")
    return (
        _list_folder(path, skip_bad)
        if stat.S_ISDIR(mode)
        else [_make_corpus_file(path, mode, named=True)]
    )


def _list_folder(path: Path, skip_bad: bool) -> list[CorpusFile]:
    """Lists the text files in a folder, recursively. Symbolic links are followed; a link to a
    parent folder is an error.
    """

    def fail(error: OSError) -> None:
        raise UserError(f"cannot read the folder {error.filename}: {error.strerror}")

    found: list[Path] = []
    for root, folders, names in os.walk(path, onerror=fail, followlinks=True):
        folder = Path(root)
        parents = {parent.resolve() for parent in folder.absolute().parents}
        if folder.is_symlink() and folder.resolve() in parents:
            raise UserError(f"{folder} is a link to a folder that contains it")
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [folder / name for name in names if not name.startswith(".")]
    found.sort(key=lambda file: file.relative_to(path).as_posix())
    files: list[Path] = []
    skipped: list[str] = []
    for file in found:
        if _text_suffix(file) in TEXT_SUFFIXES:
            files.append(file)
        else:
            skipped.append(file.relative_to(path).as_posix())
    if not files:
        raise UserError(
            f"no text file in the folder {path} (by suffix: .txt, .md, .py,"
            " .jsonl, …, also with .gz or .zst)"
        )
    if skipped:
        listed = ", ".join(map(escape_name, skipped[:MAX_LISTED]))
        if len(skipped) > MAX_LISTED:
            listed += ", …"
        verb = "file without the suffix of a text file is skipped"
        if len(skipped) > 1:
            verb = "files without the suffix of a text file are skipped"
        warnings.warn(f"the corpus {path}: {len(skipped)} {verb}: {listed}", stacklevel=2)
    return _make_corpus_files(files, skip_bad)


def warn_skipped(error: UserError) -> None:
    """Warns that a file is skipped, with the reason."""
    warnings.warn(f"a file is skipped (data.on_bad_file): {error}", stacklevel=2)


def _make_corpus_files(paths: list[Path], skip_bad: bool) -> list[CorpusFile]:
    """Returns the files among the entries of a folder or glob."""
    files = []
    for path in paths:
        try:
            mode = _file_mode(path)
            if mode is not None and stat.S_ISDIR(mode):
                continue  # a folder that matches a glob
            files.append(_make_corpus_file(path, mode, named=False))
        except UserError as error:
            if not skip_bad:
                raise
            warn_skipped(error)
    return files


def _file_mode(path: Path) -> int | None:
    """Returns the mode of a file or folder, or None if it does not exist."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        # A ValueError, about a null character, has no `strerror`.
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {str(path)!r}: {reason}") from None


def _make_corpus_file(path: Path, mode: int | None, named: bool) -> CorpusFile:
    if mode is None:  # the folder or glob lists it, but it does not exist
        raise UserError(f"{path} is a link to a file that does not exist")
    if not stat.S_ISREG(mode):
        names = {
            stat.S_IFIFO: "a named pipe",
            stat.S_IFSOCK: "a socket",
            stat.S_IFCHR: "a device",
            stat.S_IFBLK: "a device",
        }
        raise UserError(
            f"{path} is {names.get(stat.S_IFMT(mode), 'not a file')}: a corpus is read more than"
            " once, so it must be a file"
        )
    if _text_suffix(path) == ".json":
        raise UserError(
            f"{path} is a .json file: give it the suffix .jsonl if each line is a record, or .txt"
            " if it is one text"
        )
    return CorpusFile(path, _text_suffix(path) in RECORD_SUFFIXES, named)


def _text_suffix(path: Path) -> str:
    """Returns the suffix of a file in lower case, without a compression suffix."""
    return Path(decompressed_name(path.name)).suffix.lower()


def _builtin_python() -> list[CorpusFile]:
    """Returns the source files of this interpreter's standard library, sorted by name, without
    those that would exceed `BUILTIN_BYTES` together with the files before them.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    inside: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - _BUILTIN_SKIPS  # do not descend into skipped folders
        inside += [Path(folder, file) for file in files if file.endswith(".py")]
    chosen: list[CorpusFile] = []
    size = 0
    for path in sorted(inside, key=lambda p: p.relative_to(root).as_posix()):
        try:
            data = path.read_bytes()
            data.decode()
        except (OSError, UnicodeDecodeError):
            continue
        if b"\0" in data or size + len(data) > BUILTIN_BYTES:
            continue
        size += len(data)
        chosen.append(CorpusFile(path, records=False, named=False))
    if not chosen:
        raise UserError(
            f"this interpreter has no standard library sources in {root}:"
            " set data.path to a text file"
        )
    return chosen


def _builtin_recall() -> list[CorpusFile]:
    """Returns the texts of `builtin:python` with recall tasks between them, as records in memory
    (12 MB).
    """
    texts = (file.path.read_text(encoding="utf-8") for file in _builtin_python())
    return [_builtin_records(RECALL, recall_corpus(text for text in texts if text.strip()))]


def _builtin_instructions() -> list[CorpusFile]:
    """Returns conversations about the functions in the modules of `builtin:python`, as records in
    memory.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = []
    for file in _builtin_python():
        # asyncio/__init__.py → asyncio
        relative = file.path.relative_to(root).with_suffix("")
        name = ".".join(relative.parts).removesuffix(".__init__")
        modules.append((name, file.path.read_text(encoding="utf-8")))
    return [_builtin_records(INSTRUCTIONS, instruction_corpus(modules))]


def _builtin_addition() -> list[CorpusFile]:
    """Returns the problems of `builtin:addition`, as records in memory."""
    return [_builtin_records(ADDITION, addition_corpus())]


def _builtin_records(name: str, lines: Iterable[bytes]) -> CorpusFile:
    """Returns a built-in corpus of JSON Lines in memory."""
    return CorpusFile(Path(name), records=True, named=False, content=b"".join(lines))
