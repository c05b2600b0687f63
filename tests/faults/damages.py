"""A small run, what can happen to its files, and whether anybody notices."""

import importlib
import io

from training.small import SETTINGS

from dantinox.config import build_config
from dantinox.report import Console
from dantinox.run import RunDirectory

launching = importlib.import_module("dantinox.training.launch")
STEPS = 12
CHANGES = {
    "tokenizer.tokenizer_type": "char", "training.steps": STEPS, "training.eval_every": 4, "training.checkpoint_every": 4,
    "training.sample_every": 4, "generation.max_new_tokens": 3,
    "training.schedule": "constant",  # a run that goes on for longer is otherwise another one
}  # fmt: skip
UNWATCHED = (".lock", "plots")  # a lock is empty, a plot is drawn again from the log


def config(corpus, **changes):
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    return build_config({}, SETTINGS | CHANGES | {"data.path": str(corpus)} | changed)


def launch(config, path, resume=False):
    """Trains as `dantinox train` does; what it said."""
    notes = io.StringIO()
    console, launching.open_console = launching.open_console, lambda: Console(notes)
    try:
        launching.launch(config, run_dir=path, resume=resume)
    finally:
        launching.open_console = console
    return notes.getvalue()


def small_run(folder):
    """(settings, a finished run of twelve steps, with checkpoints of the last two evaluations)."""
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"nel mezzo del cammin {i} di nostra vita\n" for i in range(60)))
    settings = config(corpus)
    launch(settings, folder / "run")
    return settings, RunDirectory(folder / "run")


def files_of(run):
    return sorted(path for path in run.path.rglob("*") if path.is_file() and not {path.name, path.parent.name} & {*UNWATCHED})


def _flip(path, other):
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 0x10
    path.write_bytes(content)


def _swap(path, other):
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)


DAMAGES = {
    "flip": _flip,
    "truncate": lambda path, other: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "delete": lambda path, other: path.unlink(),
    "zero": lambda path, other: path.write_bytes(bytes(path.stat().st_size)),
    "swap": _swap,
}


def counterpart(path, files):
    """The same file of another checkpoint, or the next one that has other content."""
    parts = path.parts
    twins = [other for other in files if other != path and other.parts[-2:] == parts[-2:]]
    others = [other for other in (*twins, *files) if other.read_bytes() != path.read_bytes()]
    return others[0]
