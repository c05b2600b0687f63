"""The run directory: paths, config and lock."""

import contextlib
import fcntl
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dantinox.config import Config, dump_config, load_config
from dantinox.files import UserError
from dantinox.run.manifest import (
    MANIFEST,
    DamagedFile,
    check_files,
    hash_file_in_background,
    read_manifest,
    recorded_file_damage,
    write_file,
)

RUNS = Path("runs")
INHERITED_FILES = ("chat_template.jinja", "origin.json")  # what goes along from a run to one that starts from it
V0_WEIGHTS = ("best_model_weights.msgpack", "checkpoint_best.msgpack")  # what DantinoX 0 left in a run, and we never do


class RunDirectory:
    """Where everything of one run lies. `path` is absolute; nothing inside refers to it, so a run can be copied."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.config = self.path / "config.yaml"
        self.manifest = self.path / MANIFEST
        self.tokenizer = self.path / "tokenizer.json"
        self.tokenizer_config = self.path / "tokenizer_config.json"  # begin and end tokens, where their names do not tell
        self.origin = self.path / "origin.json"  # of an imported model: what its checkpoint said
        self.chat_template = self.path / "chat_template.jinja"
        self.weights = self.path / "model_weights.msgpack"
        self.adapter = self.path / "adapter" / "adapter_model.safetensors"  # in place of the weights
        self.data = self.path / "data"  # the tokens
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples"
        self.plots = self.path / "plots"
        self.router = self.path / "router.json"  # thresholds of the entropy router, measured
        self.kv = self.path / "kv_entropy.json"  # what was measured of the attention heads, for compressed caches

    @property
    def weights_or_adapter(self) -> Path:
        """What its training gives: its weights, or its adapters."""
        return self.adapter if self.adapter.is_file() else self.weights

    def log(self, config: Config) -> Path:
        return self.path / config.logging.log_file

    def summary(self, config: Config) -> Path:
        return self.path / config.logging.summary_file

    def tokens(self, named: bool = False) -> list[str]:
        """The names of the token files that lie in the run, or that its manifest names."""
        found = read_manifest(self.manifest)["files"] if named else [str(p.relative_to(self.path)) for p in self.data.iterdir()]
        return [name for name in found if name.startswith(f"{self.data.name}/tokens")]

    def check(self, *paths: Path) -> None:
        """Compares files of the run with what was written.

        Raises:
          UserError: one of them is damaged; the sentence names it, and the way out for whoever changed it on purpose.
        """
        try:
            check_files(self.path, [str(path.relative_to(self.path)) for path in paths])
        except DamagedFile as error:
            accept = f"dantinox verify {self.path} --accept"
            raise UserError(f"{error}: put the right file there, or if this one is right, run `{accept}`") from None

    def start_check(self, *paths: Path) -> None:
        """Starts in the background what `check` waits for."""
        for path in paths:
            with contextlib.suppress(OSError):  # `check` reports it
                hash_file_in_background(path)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the run for this process. The lock is the kernel's: it ends with the process, however that ends.

        Raises:
          UserError: another process holds it.
        """
        with contextlib.ExitStack() as held:
            try:
                file = held.enter_context(open(self.path / ".lock", "ab"))  # unlike "w", this changes nothing
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another process is working on {self.path}: wait, or use another run directory") from None
            except OSError as error:
                raise UserError(f"cannot lock {self.path}: {error.strerror}") from None
            for left in (*self.path.glob(".*.tmp"), *self.path.glob("*/.*.tmp")):  # of a killed `atomic_write`
                with contextlib.suppress(OSError):
                    left.unlink()
            yield


def create_run(path: str | Path | None = None) -> RunDirectory:
    """The directory for a new run: `path`, or `runs/run_YYYYMMDD_HHMMSS`, numbered where runs start in the same second.

    Raises:
      UserError: there is something in `path`, or it cannot be made.
    """
    run = RunDirectory(RUNS if path is None else path)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        if path is None:
            return RunDirectory(_make_numbered(run.path / time.strftime("run_%Y%m%d_%H%M%S")))
        # A run that was killed before it wrote anything leaves its lock file alone.
        occupied = any(child.name != ".lock" for child in run.path.iterdir())
    except OSError as error:
        reason = "a file is in its way" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"cannot make the run directory {run.path}: {reason}") from None
    if occupied:
        raise UserError(f"the run directory {run.path} is not empty: add --resume to continue, or choose another --run_dir")
    return run


def _make_numbered(first: Path) -> Path:
    """Makes the directory `first`, or the first of `first_2`, `first_3` … that is not there yet."""
    path, number = first, 1
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
            path = first.with_name(f"{first.name}_{number}")


def newest_run() -> Path | None:
    """The run under `runs/` that was started last, or None."""
    try:
        configs = [(config.stat().st_mtime, config.parent) for config in RUNS.glob("*/config.yaml")]
    except OSError:
        return None
    return max(configs)[1] if configs else None


def open_run(path: str | Path, *, check: bool = True) -> RunDirectory:
    """A trained run, to read from.

    Args:
      check: compare tokenizer and weights with the manifest. If false, only start to compute their SHA-256 in the
        background; a later call compares them.

    Raises:
      UserError: the directory, its config.yaml or its weights are not there, or tokenizer or weights are damaged.
    """
    run = RunDirectory(path)
    newest = newest_run()
    hint = f" (the newest run is {newest})" if newest and newest.absolute() != run.path else ""
    if not run.path.is_dir():
        raise UserError(f"no run directory at {path}{hint}")
    if not run.config.is_file():
        raise UserError(f"{path} is not a run directory: it has no {run.config.name}{hint}")
    for name in V0_WEIGHTS:
        if (run.path / name).is_file():
            raise UserError(
                f"{path} is a run of DantinoX 0, by its weights ({name}): "
                f"`dantinox import {path} --run_dir …` makes one of this version of it"
            )
    if not run.weights_or_adapter.is_file():
        raise UserError(f"{path} has no weights yet: {run.weights.name} is missing{hint}")
    files = run.tokenizer, run.tokenizer_config, run.weights_or_adapter
    if check:
        run.check(*files)
    else:
        run.start_check(*files)
    return run


def open_base(init_from: str | None, beside: RunDirectory | None = None) -> RunDirectory:
    """The run whose weights a training starts from: that of the path, or where there is none one of its name beside a run.

    Raises:
      UserError: it is not there, or damaged.
    """
    named = Path(init_from or "")
    if beside is not None and not named.is_dir():
        moved = beside.path.parent / named.name
        if not moved.is_dir():
            raise UserError(f"the base of {beside.path} is gone: there is no run at {init_from}, nor at {moved}")
        named = moved
    return open_run(named)


def save_config(run: RunDirectory, config: Config) -> None:
    """Writes every setting, defaults included, so that a later version's defaults change nothing."""
    write_file(run.path, run.config.name, dump_config(config))


def save_tokenizer(run: RunDirectory, content: str, roles: Mapping[str, Any] | None = None) -> None:
    """Writes the tokenizer, the text of a tokenizer.json, and beside it what its tokens are for, where that is known."""
    write_file(run.path, run.tokenizer.name, content)
    if roles:
        write_file(run.path, run.tokenizer_config.name, json.dumps(roles, indent=1, ensure_ascii=False) + "\n")


def find_chat_template(run: RunDirectory) -> Path | None:
    """The run's chat template, which somebody may have put there; None where it has none.

    Raises:
      UserError: it is not the one that was written.
    """
    if problem := recorded_file_damage(run.chat_template):
        raise UserError(f"{problem}: put the right file there, or if it is right, run `dantinox verify {run.path} --accept`")
    return run.chat_template if run.chat_template.is_file() else None


def copy_inherited_files(source: RunDirectory, run: RunDirectory) -> None:
    """Copies the chat template and the origin of imported weights into a run that starts from another one."""
    for name in INHERITED_FILES:
        if (source.path / name).is_file():
            write_file(run.path, name, (source.path / name).read_bytes())


def load_run_config(run: RunDirectory) -> Config:
    """The settings the run was started with. Raises a UserError if they are no settings, or not those that were written."""
    config = load_config(run.config)  # what is wrong with a line that somebody wrote is said first
    run.check(run.config)
    return config
