"""A small run, and kinds of damage to its files."""

import importlib
import io
import json
import re
from unittest.mock import patch

from training.small import SETTINGS

from dantinox.config import build_config
from dantinox.config.router_settings import CALIBRATED_THRESHOLDS
from dantinox.report import Console
from dantinox.run import (
    RunDirectory,
    head_names,
    save_kv_calibration,
    save_router_calibration,
    weights_digest,
)

launching = importlib.import_module("dantinox.training.launch")
STEPS = 12
CHANGES = {
    "tokenizer.tokenizer_type": "char", "training.steps": STEPS, "training.eval_every": 4,
    "training.checkpoint_every": 4, "training.sample_every": 4, "generation.max_new_tokens": 3,
    "training.optimizer": "sgd",
    "training.schedule": "constant",  # with another schedule, more steps would change the run
}  # fmt: skip
UNHASHED = (".lock", "plots")  # a lock is empty, and a plot is drawn again from the log


def config(corpus, **changes):
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    return build_config({}, SETTINGS | CHANGES | {"data.path": str(corpus)} | changed)


def launch(config, path, resume=False):
    """Trains like `dantinox train`, and returns its console output."""
    notes = io.StringIO()
    sampler = lambda *_: lambda model: "nel"  # noqa: E731 (texts need no program here)
    replaced = {"open_console": lambda: Console(notes), "make_sampler": sampler}
    with patch.multiple(launching, **replaced):
        launching.launch(config, run_dir=path, resume=resume)
    return notes.getvalue()


def small_run(folder):
    """Returns the settings and a finished run of twelve steps, with the last two checkpoints and
    both calibrations.
    """
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"nel mezzo del cammin {i} di nostra vita\n" for i in range(60)))
    settings, run = config(corpus), RunDirectory(folder / "run")
    launch(settings, run.path)
    save_router_calibration(
        run, {"weights": weights_digest(run), "measured": dict.fromkeys(CALIBRATED_THRESHOLDS, 0.5)}
    )
    m = architecture(settings, run)
    entropies = dict.fromkeys(head_names(m.num_blocks, m.n_heads, "H"), 0.5)
    heads = {
        "n_layer": m.num_blocks,
        "n_head": m.n_heads,
        "n_head_kv": m.kv_heads,
        "head_entropies": entropies,
    }
    save_kv_calibration(run.kv, heads)
    return settings, run


def architecture(settings, run):
    return settings.architecture(
        json.loads(run.summary(settings).read_text())["model"]["vocab_size"]
    )


def files_of(run):
    return sorted(
        path
        for path in run.path.rglob("*")
        if path.is_file() and not {path.name, path.parent.name} & {*UNHASHED}
    )


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
    """Returns the corresponding file of another checkpoint, or the first file of the run; its
    content differs.
    """
    others = [other for other in files if other.read_bytes() != path.read_bytes()]
    step, name = _in_checkpoint(path)
    of_other_steps = (
        o for o in others if name and _in_checkpoint(o)[1] == name and _in_checkpoint(o)[0] != step
    )
    return next(of_other_steps, others[0])


def _in_checkpoint(path):
    """Returns the step and the path in it of a checkpoint's file. Data files have other names in
    every step.
    """
    step, _, name = str(path).partition("/checkpoints/")[2].partition("/")
    return step, re.sub(r"/d/\w+$", "/d", name)
