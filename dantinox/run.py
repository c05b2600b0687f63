"""The run directory: its paths, its settings, its weights, its lock, and the one way files are written into it."""

import contextlib
import hashlib
import json
import math
import mmap
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError, create_model

from dantinox.config import Config, UserError, dump_config, load_config
from dantinox.config.base import NonNegative, Section
from dantinox.config.router import MEASURED, Scale

RUNS = Path("runs")
# Flax's msgpack format: an array is extension 1, packed (shape, dtype name, bytes); a large one is a map of flat chunks.
ARRAY_EXTENSION = 1
CHUNK_BYTES = 1 << 30
CHUNKED = "__msgpack_chunked_array__"
MAX_ROUTER_BYTES = 1 << 20
_NUMBERS: Any = {name: (Scale if name.endswith("_scale") else NonNegative, ...) for name in MEASURED}
_Measured = create_model("_Measured", __base__=Section, **_NUMBERS)
_RouterFile = create_model("_RouterFile", version=(Literal[1], ...), weights=(str, ...), measured=(_Measured, ...))


def atomic_write(path: str | Path, data: bytes | str) -> None:
    """Replaces `path` by `data` (text as UTF-8): whoever reads it, after whatever crash, finds the old file or the new one.

    Raises:
      UserError: the disk is full, read-only or gone, and the old file intact; or `path` is a device, a pipe or a directory.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UserError(f"cannot write {path}: what is there is no file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with open(temporary, "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_directory(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def _sync_directory(path: Path) -> None:
    """Makes a rename inside `path` survive a power cut."""
    if os.name != "posix":  # elsewhere a directory cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class RunDirectory:
    """Where everything of one run lies. `path` is absolute; nothing inside refers to it, so a run can be copied."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def weights(self) -> Path:
        return self.path / "model_weights.msgpack"

    @property
    def router(self) -> Path:
        return self.path / "router.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def data(self) -> Path:
        """The token store."""
        return self.path / "data"

    def log(self, config: Config) -> Path:
        return self.path / config.logging.log_file

    def summary(self, config: Config) -> Path:
        return self.path / config.logging.summary_file

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the run for this process. The lock is the kernel's: it ends with the process, however that ends.

        Raises:
          UserError: another process holds it.
        """
        try:
            import fcntl
        except ImportError:
            warnings.warn("this system has no file locks: nothing keeps a second process off this run", stacklevel=3)
            yield
            return
        try:
            file = open(self.path / ".lock", "ab")  # noqa: SIM115 - closed below, and unlike 'w' this changes nothing
        except OSError as error:
            raise UserError(f"cannot lock {self.path}: {error.strerror}") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another process is working on {self.path}: wait, or use another run directory") from None
            except OSError as error:
                raise UserError(f"cannot lock {self.path}: {error.strerror}") from None
            self._remove_leftovers()
            yield

    def _remove_leftovers(self) -> None:
        """Removes what a killed `atomic_write` left; only the holder of the lock may."""
        for pattern in (".*.tmp", "*/.*.tmp"):
            for left in self.path.glob(pattern):
                with contextlib.suppress(OSError):
                    left.unlink()


def new_run_directory(root: str | Path = RUNS) -> RunDirectory:
    """Makes `runs/run_YYYYMMDD_HHMMSS`, with a counter behind it where two runs start in the same second."""
    name = time.strftime("run_%Y%m%d_%H%M%S")
    count = 1
    while True:
        path = Path(root).absolute() / (name if count == 1 else f"{name}_{count}")
        try:
            path.mkdir(parents=True)
            return RunDirectory(path)
        except FileExistsError:
            if not path.is_dir():
                raise UserError(f"cannot make the run directory {path}: a file is in its way") from None
            count += 1
        except OSError as error:
            raise UserError(f"cannot make the run directory {path}: {error.strerror}") from None


def create_run(path: str | Path | None = None, *, resume: bool = False) -> RunDirectory:
    """The directory to train in: `path`, or a new one under `runs/`. A resumed run may exist, a fresh one must be empty.

    Raises:
      UserError: there is something in `path` and `resume` is false, or it cannot be made.
    """
    if path is None:
        return new_run_directory()
    path = Path(path).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        # A run that was killed before it wrote anything leaves its lock file alone.
        occupied = any(child.name != ".lock" for child in path.iterdir())
    except OSError as error:
        reason = "a file is in its way" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"cannot make the run directory {path}: {reason}") from None
    if occupied and not resume:
        raise UserError(f"the run directory {path} is not empty: add --resume to go on with it, or choose another --run_dir")
    return RunDirectory(path)


def newest_run(root: str | Path = RUNS) -> Path | None:
    """The run under `root` that was started last, or None."""
    try:
        configs = [(config.stat().st_mtime, config.parent) for config in Path(root).glob("*/config.yaml")]
    except OSError:
        return None
    return max(configs)[1] if configs else None


def open_run(path: str | Path) -> RunDirectory:
    """A trained run, to read from.

    Raises:
      UserError: the directory, its config.yaml or its weights are not there.
    """
    run = RunDirectory(Path(path).absolute())
    newest = newest_run()
    hint = f" (the newest run is {newest})" if newest and newest.absolute() != run.path else ""
    if not run.path.is_dir():
        raise UserError(f"no run directory at {path}{hint}")
    if not run.config.is_file():
        raise UserError(f"{path} is not a run directory: it has no {run.config.name}{hint}")
    if not run.weights.is_file():
        raise UserError(f"{path} has no weights yet: {run.weights.name} is missing{hint}")
    return run


def save_config(run: RunDirectory, config: Config) -> None:
    """Writes every setting, defaults included, so that a later version's defaults change nothing."""
    atomic_write(run.config, dump_config(config))


def load_run_config(run: RunDirectory) -> Config:
    """The settings the run was started with."""
    return load_config(run.config)


def save_weights(path: str | Path, tree: dict[str, Any]) -> None:
    """Writes a nested dict of arrays as float32 in Flax's msgpack format; equal weights give equal bytes.

    Raises:
      UserError: the file cannot be written.
    """
    import msgpack

    atomic_write(path, msgpack.packb(_packable(tree), default=_pack_array, strict_types=True))


def load_weights(
    path: str | Path, expected: dict[str, Any], place: Callable[[str, np.ndarray], Any] = lambda path, array: array
) -> dict[str, Any]:
    """Reads what `save_weights` wrote. Nothing in the file is run, and no array of a wrong size is ever held.

    Args:
      expected: nested dict whose leaves have a `shape`.
      place: called with "blocks/0/ffn/down" and a read-only float32 array; what it returns stands in the result.

    Raises:
      UserError: the file is missing, damaged, or does not hold exactly the expected names and shapes.
    """
    path = Path(path)
    shapes = {name: tuple(leaf.shape) for name, leaf in _flatten(expected)}
    total = sum(4 * math.prod(shape) for shape in shapes.values())
    overhead = 1024 + sum(256 + len(name) for name in shapes)
    try:
        size = path.stat().st_size
        fits = total <= size <= total + overhead
        # A file of another size is only listed, to name the parameter that differs.
        found = dict(_flatten(_unpack(path, keep=fits)))
    except OSError as error:
        raise UserError(f"cannot read the weights {path}: {error.strerror}") from None
    _compare(path, {name: (array.shape, array.dtype) for name, array in found.items()}, shapes)
    if not fits:
        raise UserError(f"the weights {path} are damaged: {size} bytes, expected {total} and at most {overhead} around them")
    result: dict[str, Any] = {}
    for name in shapes:
        *parents, last = name.split("/")
        node = result
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = place(name, found.pop(name))
    return result


def weights_digest(run: RunDirectory) -> str:
    """SHA-256 (hex) of the weights file, computed once for as long as the file stays as it is."""
    return _digest(run.weights, *(getattr(run.weights.stat(), f"st_{name}") for name in ("ino", "size", "mtime_ns")))


@lru_cache(maxsize=16)
def _digest(path: Path, *state: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_router_calibration(run: RunDirectory, record: Mapping[str, Any]) -> None:
    """Writes what was measured for the router: `weights` (their digest), `measured` (the numbers of `MEASURED`), and more."""
    atomic_write(run.router, json.dumps({"version": 1, **record}, allow_nan=False) + "\n")


def load_router_calibration(run: RunDirectory) -> dict[str, float] | None:
    """The numbers of `config.router.MEASURED`, or None for a run that was not calibrated; warns if its weights have changed.

    Raises:
      UserError: the file cannot be read, or does not hold exactly these numbers.
    """
    path, again = run.router, f"run `dantinox calibrate --run_dir {run.path} --what router` again"
    try:
        if not path.exists():
            return None
        if path.stat().st_size > MAX_ROUTER_BYTES:
            raise UserError(f"the calibration {path} is larger than {MAX_ROUTER_BYTES >> 20} MiB: {again}")
        found: Any = _RouterFile.model_validate_json(path.read_bytes())
        if found.weights != weights_digest(run):
            warnings.warn(f"the calibration {path} was measured on other weights: {again}", stacklevel=2)
    except OSError as error:
        raise UserError(f"cannot read the calibration {path}: {error.strerror}") from None
    except ValidationError as error:
        where = _short("".join(f"{part}: " for part in error.errors()[0]["loc"]))
        raise UserError(f"the calibration {path} is no good ({where}{error.errors()[0]['msg']}): {again}") from None
    return found.measured.model_dump()


def _compare(path: Path, found: dict[str, tuple[tuple[int, ...], np.dtype]], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises on the first parameter that is missing, too many, of another shape or not float32."""
    for name, shape in shapes.items():
        if name not in found:
            raise UserError(f"the weights {path} lack {name} of shape {shape}, which this model has")
        if found[name][0] != shape:
            raise UserError(f"the weights {path} hold {name} with shape {found[name][0]}, this model has {shape}")
        if found[name][1] != np.float32:
            raise UserError(f"the weights {path} hold {name} as {found[name][1]}, expected float32")
    for name in found:
        if name not in shapes:
            raise UserError(f"the weights {path} hold {_short(name)} of shape {found[name][0]}, which this model has not")


def _short(name: str) -> str:
    text = repr(name)[1:-1]
    return text if len(text) <= 100 else text[:99] + "…"


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("blocks/0/norm", leaf) for every leaf of a nested dict."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _packable(tree: Any) -> Any:
    """The tree as it goes to the packer: sorted names, float32 arrays, large arrays in chunks."""
    if isinstance(tree, dict):
        return {str(key): _packable(tree[key]) for key in sorted(tree, key=str)}
    array = np.asarray(tree, dtype=np.float32)
    if array.nbytes <= CHUNK_BYTES:
        return array
    step = CHUNK_BYTES // array.itemsize
    flat = array.reshape(-1)
    chunks = {str(i): flat[start : start + step] for i, start in enumerate(range(0, flat.size, step))}
    shape = {str(i): size for i, size in enumerate(array.shape)}
    return {CHUNKED: True, "shape": shape, "chunks": chunks}


def _pack_array(array: np.ndarray) -> Any:
    import msgpack

    packed = msgpack.packb((array.shape, array.dtype.name, array.tobytes()), use_bin_type=True)
    return msgpack.ExtType(ARRAY_EXTENSION, packed)


def _unpack(path: Path, keep: bool) -> dict[str, Any]:
    """The file's tree; without `keep` its arrays have their shape and one shared zero as content."""
    import msgpack

    def array(code: int, data: bytes) -> np.ndarray:
        if code != ARRAY_EXTENSION:
            raise ValueError(f"extension {code}")
        shape, name, content = msgpack.unpackb(data, raw=True, max_array_len=16, max_map_len=0)
        kind = np.dtype(name.decode("ascii"))
        values = np.frombuffer(content, dtype=kind).reshape(shape)
        return values if keep else np.broadcast_to(np.zeros((), kind), values.shape)

    with open(path, "rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                # The limits keep a forged header from asking for memory.
                tree = msgpack.unpackb(content, ext_hook=array, raw=False, strict_map_key=True, max_array_len=0)
            if not isinstance(tree, dict):
                raise ValueError("no tree of parameters")
            return _joined(tree)
        except OSError:
            raise
        except Exception as error:  # whatever bytes from outside can cause
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"the weights {path} are damaged or no weights at all: {reason[:100]}") from None


def _joined(tree: Any) -> Any:
    """Puts chunked arrays together again; refuses everything that is neither a dict nor an array."""
    if isinstance(tree, np.ndarray):
        return tree
    if not isinstance(tree, dict):
        raise ValueError(f"found {type(tree).__name__} where a parameter should be")
    if CHUNKED not in tree:
        return {key: _joined(value) for key, value in tree.items()}
    shape = tuple(tree["shape"][str(i)] for i in range(len(tree["shape"])))
    return np.concatenate([tree["chunks"][str(i)] for i in range(len(tree["chunks"]))]).reshape(shape)
