"""The run directory: its paths, its settings and its lock."""

import contextlib
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dantinox.config import Config, dump_config, load_config
from dantinox.files import UserError, atomic_write

RUNS = Path("runs")
V0_WEIGHTS = ("best_model_weights.msgpack", "checkpoint_best.msgpack")  # what DantinoX 0 left in a run, and we never do


class _Inside:
    """A path in a run directory."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, run: "RunDirectory", owner: type) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """Where everything of one run lies. `path` is absolute; nothing inside refers to it, so a run can be copied."""

    path: Path
    config = _Inside("config.yaml")
    tokenizer = _Inside("tokenizer.json")
    weights = _Inside("model_weights.msgpack")
    data = _Inside("data")  # the tokens
    checkpoints = _Inside("checkpoints")
    metrics = _Inside("metrics.jsonl")
    samples = _Inside("samples")
    plots = _Inside("plots")
    router = _Inside("router.json")  # thresholds of the entropy router, measured
    kv = _Inside("kv_entropy.json")  # what was measured of the attention heads, for compressed caches

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


def create_run(path: str | Path | None = None) -> RunDirectory:
    """The directory for a new run: `path`, or one under `runs/`.

    Raises:
      UserError: there is something in `path`, or it cannot be made.
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
    if occupied:
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
    for name in V0_WEIGHTS:
        if (run.path / name).is_file():
            raise UserError(
                f"{path} is a run of DantinoX 0, whose weights ({name}) this version does not read: train the model again, "
                "with `dantinox train`, on the text it was made from"
            )
    if not run.weights.is_file():
        raise UserError(f"{path} has no weights yet: {run.weights.name} is missing{hint}")
    return run


def save_config(run: RunDirectory, config: Config) -> None:
    """Writes every setting, defaults included, so that a later version's defaults change nothing."""
    atomic_write(run.config, dump_config(config))


def load_run_config(run: RunDirectory) -> Config:
    """The settings the run was started with."""
    return load_config(run.config)
