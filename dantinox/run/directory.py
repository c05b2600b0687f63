"""The run directory: its paths, its config and its lock."""

import contextlib
import fcntl
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dantinox.config import Config, dump_config, load_config
from dantinox.files import UserError
from dantinox.html_repr import html_table
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
# Files that are copied into a run that starts from another run.
INHERITED_FILES = ("chat_template.jinja", "origin.json")
# Files and folders of a run that exist before its first step. A start that is killed or fails
# before its first step leaves only these and the tokens. It writes `config.yaml` last, so a
# directory with this file is complete.
START_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    MANIFEST,
    *INHERITED_FILES,
    "checkpoints",
    "samples",
)
# Names in data/ that preparing the tokens creates: the lock, token files, sources, temporary files.
TOKEN_FILES = re.compile(
    r"\.lock|\.tokens.*|tokens\.json|tokens-.*|\.dataset-\d+\.jsonl|reference\.json|\..*\.tmp"
)
# Files that only DantinoX 0 writes.
V0_WEIGHTS = ("best_model_weights.msgpack", "checkpoint_best.msgpack")


class RunDirectory:
    """The paths of one run.

    No file in a run contains the path of its directory, so the directory can be copied or moved.

    Attributes:
      path: the absolute path of the directory. The other attributes are paths in it.

    Example:
      >>> from dantinox.run import RunDirectory
      >>> run = RunDirectory("runs/quickstart")
      >>> run.config.is_file(), run.checkpoints.name
      (True, 'checkpoints')
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.config = self.path / "config.yaml"
        self.manifest = self.path / MANIFEST
        self.tokenizer = self.path / "tokenizer.json"
        # Which tokens are BOS and EOS, if their names do not say so.
        self.tokenizer_config = self.path / "tokenizer_config.json"
        self.origin = self.path / "origin.json"  # only in imported runs: metadata of the checkpoint
        self.chat_template = self.path / "chat_template.jinja"
        self.weights = self.path / "model_weights.msgpack"
        # In a run with adapters, this file takes the place of the weights.
        self.adapter = self.path / "adapter" / "adapter_model.safetensors"
        self.data = self.path / "data"  # the token store
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples"
        self.rewards = self.path / "rewards.html"  # only in training with rewards
        self.plots = self.path / "plots"
        self.router = self.path / "router.json"  # measured thresholds of the entropy router
        # Statistics of the attention heads, for compressed caches.
        self.kv = self.path / "kv_entropy.json"

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    def _repr_html_(self) -> str:
        files = [path for name, path in vars(self).items() if name != "path"]
        existing = [path.name for path in files if path.exists()]
        return html_table(
            f"run directory {self.path}", {"exists": ", ".join(existing) or "no file yet"}
        )

    @property
    def weights_or_adapter(self) -> Path:
        """The file that training writes: the adapters of a run with adapters, else the weights."""
        return self.adapter if self.adapter.is_file() else self.weights

    def log(self, config: Config) -> Path:
        """Returns the path of the training log."""
        return self.path / config.logging.log_file

    def summary(self, config: Config) -> Path:
        """Returns the path of the summary."""
        return self.path / config.logging.summary_file

    def tokens(self, recorded: bool = False) -> list[str]:
        """Returns the relative paths of the token files on disk or, if `recorded` is true, of those
        listed in the manifest.
        """
        if recorded:
            names = list(read_manifest(self.manifest)["files"])
        else:
            # Not `.tokens…`, which are temporary files.
            found = sorted(self.data.glob("tokens*"))
            names = [str(path.relative_to(self.path)) for path in found]
        return [name for name in names if name.startswith(f"{self.data.name}/tokens")]

    def check(self, *paths: Path) -> None:
        """Compares files of the run with the manifest.

        Raises:
          UserError: a file is damaged. The message names it and the command that accepts an
            intended change.
        """
        try:
            check_files(self.path, [str(path.relative_to(self.path)) for path in paths])
        except DamagedFile as error:
            accept = f"dantinox verify {self.path} --accept"
            raise UserError(
                f"{error}: restore the original file, or accept this one with `{accept}`"
            ) from None

    def start_check(self, *paths: Path) -> None:
        """Starts to hash files in the background, so that a later `check` waits less."""
        for path in paths:
            with contextlib.suppress(OSError):  # `check` reports the error
                hash_file_in_background(path)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the run for this process; the kernel releases the lock when the process ends.

        Raises:
          UserError: another process holds the lock, or the directory cannot be locked.
        """
        with contextlib.ExitStack() as stack:
            try:
                # Unlike "w", "a" does not change the file.
                file = stack.enter_context(open(self.path / ".lock", "ab"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"another process is working on {self.path}: wait, or use another run directory"
                ) from None
            except OSError as error:
                raise UserError(f"cannot lock {self.path}: {error.strerror}") from None
            # Temporary files remain if a process is killed during an `atomic_write`.
            for leftover in (*self.path.glob(".*.tmp"), *self.path.glob("*/.*.tmp")):
                with contextlib.suppress(OSError):
                    leftover.unlink()
            yield


def create_run(path: str | Path | None = None) -> RunDirectory:
    """Creates the directory of a new run.

    Args:
      path: None: `runs/run_YYYYMMDD_HHMMSS`, with a number appended if another run started in the
        same second.

    Raises:
      UserError: the directory is not empty, or cannot be created. A directory with only what a
        failed start has left counts as empty.
    """
    folder = RUNS.absolute() if path is None else Path(path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path is None:
            return RunDirectory(_make_numbered(folder / time.strftime("run_%Y%m%d_%H%M%S")))
        run = RunDirectory(folder)
        occupied = any(folder.iterdir()) and not is_failed_start(run)
    except OSError as error:
        reason = (
            "a file with this name exists" if isinstance(error, FileExistsError) else error.strerror
        )
        raise UserError(f"cannot create the run directory {folder}: {reason}") from None
    if occupied:
        raise UserError(
            f"the run directory {folder} is not empty: add --resume to continue, or choose"
            " another --run_dir"
        )
    return run


def check_new_run(path: str | Path) -> None:
    """Raises the UserError that `create_run` would raise, and removes the directories that it
    creates for this check.
    """
    path = Path(path).absolute()
    # The deepest folder comes first, as `rmdir` needs it.
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        create_run(path)
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()


def is_failed_start(run: RunDirectory) -> bool:
    """Whether a directory holds only what is left of a start that was killed, or failed, before its
    first step.
    """
    if not (run.path / ".lock").is_file():
        return False
    for child in run.path.iterdir():
        is_temporary = child.name.startswith(".") and child.name.endswith(".tmp")
        if child.name == run.data.name and child.is_dir():
            known = all(TOKEN_FILES.fullmatch(file.name) for file in child.iterdir())
        elif child.name in START_FILES:
            # The folders are empty before the first step.
            known = child.is_file() or not any(child.iterdir())
        else:
            known = child.name == ".lock" or is_temporary
        if not known:
            return False
    return True


def clear_failed_start(run: RunDirectory) -> None:
    """Removes the files of a start that failed before its first step, except for its tokens, which
    the next start may use.
    """
    for name in (run.config.name, *START_FILES):
        path = run.path / name
        with contextlib.suppress(OSError):  # a file is missing, or a folder is not empty
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()


def _make_numbered(first: Path) -> Path:
    """Creates the directory `first`, or the first of `first_2`, `first_3` … that does not exist."""
    path = first
    number = 1
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
            path = first.with_name(f"{first.name}_{number}")


def newest_run() -> Path | None:
    """Returns the run under `runs/` with the newest config, or None."""
    try:
        configs = [(config.stat().st_mtime, config.parent) for config in RUNS.glob("*/config.yaml")]
    except OSError:
        return None
    return max(configs)[1] if configs else None


def check_resumable(path: str | Path) -> Path:
    """Returns the path of the config of a run that training can continue.

    Raises:
      UserError: the directory has no config.yaml, or weights without checkpoints and logs, like an
        imported run.
    """
    run = RunDirectory(path)
    if not run.config.is_file():
        raise UserError(f"nothing to resume at {path}: it has no {run.config.name}")
    # Weights without checkpoints do not show an imported run: a training that was killed before its
    # first checkpoint may have the weights of an evaluation, but then it also has metrics.
    if (
        run.weights_or_adapter.is_file()
        and not run.checkpoints.is_dir()
        and not run.metrics.is_file()
    ):
        raise UserError(
            f"nothing to resume at {path}: it has no checkpoints; to fine-tune it, train with"
            f" --init_from {path}"
        )
    return run.config


def open_run(path: str | Path, *, check: bool = True) -> RunDirectory:
    """Opens a trained run for reading.

    Args:
      check: compare the tokenizer and the weights with the manifest. If false, only start to hash
        them in the background; a later `RunDirectory.check` compares them.

    Raises:
      UserError: the directory, its config.yaml or its weights are missing, or the tokenizer or the
        weights are damaged.
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
                f"{path} is a run of DantinoX 0 (it has {name}): convert it with `dantinox import"
                f" {path} --run_dir …`"
            )
    if not run.weights_or_adapter.is_file():
        raise UserError(f"{path} has no weights yet: {run.weights.name} is missing{hint}")
    files = (run.tokenizer, run.tokenizer_config, run.weights_or_adapter)
    if check:
        run.check(*files)
    else:
        run.start_check(*files)
    return run


def open_base(
    init_from: str | None, run: RunDirectory | None = None, role: str = "base"
) -> RunDirectory:
    """Opens the run whose weights initialize a training run, or the teacher of a training run.

    Args:
      init_from: the path of the base run; None is an error.
      run: the run that was trained from the base. If nothing exists at `init_from`, the base is
        looked up by its name in the directory that contains this run.
      role: the role of the base, for messages.

    Raises:
      UserError: the base run is missing or damaged, or no path is given.
    """
    if init_from is None:
        missing = f"no path of a {role} is given"
        if run is not None:
            missing = (
                f"the {role} of {run.path} is unknown: its {run.config.name} has no path of it"
            )
        raise UserError(missing)
    base = Path(init_from)
    if run is not None and not base.is_dir():
        sibling = run.path.parent / base.name
        if not sibling.is_dir():
            raise UserError(
                f"the {role} of {run.path} is missing: there is no run at {init_from} or {sibling}"
            )
        base = sibling
    return open_run(base)


def save_config(run: RunDirectory, config: Config) -> None:
    """Writes all settings, including default values, so that a later version with other defaults
    does not change the run.
    """
    write_file(run.path, run.config.name, dump_config(config))


def save_tokenizer(
    run: RunDirectory, content: str, tokenizer_config: Mapping[str, Any] | None = None
) -> None:
    """Writes the tokenizer.

    Args:
      content: the text of a `tokenizer.json`.
      tokenizer_config: the content of `tokenizer_config.json`, with the roles of special tokens;
        None: there is none.
    """
    write_file(run.path, run.tokenizer.name, content)
    if tokenizer_config:
        text = json.dumps(tokenizer_config, indent=1, ensure_ascii=False) + "\n"
        write_file(run.path, run.tokenizer_config.name, text)


def find_chat_template(run: RunDirectory) -> Path | None:
    """Returns the path of the run's chat template, or None. A template that the user added is not
    checked.

    Raises:
      UserError: the template was written by the run and is damaged.
    """
    problem = recorded_file_damage(run.chat_template)
    if problem:
        raise UserError(
            f"{problem}: restore the original file, or accept this one with `dantinox verify"
            f" {run.path} --accept`"
        )
    return run.chat_template if run.chat_template.is_file() else None


def copy_inherited_files(source: RunDirectory, run: RunDirectory) -> None:
    """Copies the chat template and the metadata of imported weights from `source` into a run that
    starts from it.
    """
    for name in INHERITED_FILES:
        if (source.path / name).is_file():
            write_file(run.path, name, (source.path / name).read_bytes())


def load_run_config(run: RunDirectory) -> Config:
    """Loads the settings that the run was started with.

    Raises:
      UserError: config.yaml is not valid, or was changed after the run wrote it.
    """
    # Before the check, because the error about an invalid line says more.
    config = load_config(run.config)
    run.check(run.config)
    return config
