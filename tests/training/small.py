"""A run small enough to train in a second."""

import io
import json
import math
import os
import re
import shutil
import signal
from dataclasses import dataclass, field
from unittest.mock import patch

import jax
import numpy as np
import pytest

from dantinox.config import ModelConfig, TokenizerSection, build_config
from dantinox.model.parameters import abstract_model
from dantinox.report import Console
from dantinox.run import RunDirectory, create_run, save_config, save_tokenizer, save_weights
from dantinox.text import BatchOptions, Counts, TokenStore, train_tokenizer
from dantinox.training import loop
from dantinox.training.loop import train
from dantinox.training.step import Programs

VOCABULARY = 11
SETTINGS = {
    "model.dim": 16,
    "model.n_heads": 2,
    "model.num_blocks": 1,
    "model.max_context": 8,
    "model.dropout_rate": 0.1,
    "training.batch_size": 4,
    "training.steps": 24,
    "training.warmup_steps": 4,
    "training.eval_every": 6,
    "training.lr": 0.01,
    "training.optimizer": "muon",
    "logging.log_every": 4,
    "logging.plot": False,
}


@dataclass
class Tokens:
    """The part of a tokenizer that training uses."""

    vocab_size: int = VOCABULARY
    fingerprint: str = "0" * 64

    def count_bytes(self, ids_N):
        return int(np.sum(1 + ids_N % 3))


def small_config(**changes):
    """Returns the small settings with changes: `training__steps=3` changes `training.steps`."""
    return build_config(
        {}, SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    )


def small_store(config, store=TokenStore, **options):
    """Returns a store of tokens that count upward with some noise, so that a model can learn
    them.
    """
    rng = np.random.default_rng(5)
    ids = (np.cumsum(rng.integers(1, 3, 3000)) % VOCABULARY).astype(np.uint16)
    counts = (Counts(2700, 1, 2700, 2700), Counts(300, 1, 600, 600))
    t = config.training
    batches = BatchOptions(t.batch_size, config.model.max_context, t.seed)
    return store(ids[:2700], ids[2700:], batches, counts=counts, **options)


def interrupted_store(config, call):
    """Returns a small store that sends SIGTERM at the given read of its validation batches.

    Each evaluation reads them once; the second read counts the bytes of the targets.
    """
    store = small_store(config)
    validation, calls = store.validation, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        yield from validation(*arguments)

    store.validation = interrupted
    return store


def random_weights(model: ModelConfig, seed: int = 3, size: float = 0.3) -> dict[str, np.ndarray]:
    """Returns random weights of a model. NumPy draws them, because every shape drawn with JAX is
    one more program.
    """
    rng = np.random.default_rng(seed)
    shapes = abstract_model(model)[1].items()
    return {
        name: np.float32(rng.normal(0 if len(leaf.shape) > 1 else 1, size, leaf.shape))
        for name, leaf in shapes
    }


# Settings that the programs of a run do not depend on.
OUTSIDE_PROGRAMS = {
    "logging": True,
    "data": True,
    "training": (
        {
            "steps",
            "eval_every",
            "eval_tokens",
            "sample_every",
            "checkpoint_every",
            "keep_last",
            "patience",
        }
        | {"init_from"}
    ),
}


def write_run(path, config, weights=None):
    """Writes a run that was not trained, with a vocabulary of bytes and random weights."""
    run, tokenizer = (
        create_run(path),
        train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(())),
    )
    save_config(run, config)
    save_tokenizer(run, tokenizer.to_json())
    save_weights(run.weights, weights or random_weights(config.architecture(tokenizer.vocab_size)))
    return run


def largest_array(function, *arguments):
    """Returns the number of elements of the largest array in a traced function."""
    shapes = re.findall(r"\w\[([\d,]+)\]", str(jax.make_jaxpr(function)(*arguments)))
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def temporary_bytes(optimized, function, *arguments):
    """Returns the temporary memory of a compiled function; `optimized` is the fixture."""
    return optimized(jax.jit(function).lower(*arguments)).memory_analysis().temp_size_in_bytes


def cached_programs():
    """Returns a replacement of `Programs` that compiles the programs of equal settings once."""
    found = {}

    def programs(step, validation_rows=None):
        mesh, teacher = step.layout.mesh, step.teacher and step.teacher.model
        devices = mesh and (dict(mesh.shape), [device.id for device in mesh.devices.flat])
        settings = step.config.model_dump(exclude=OUTSIDE_PROGRAMS)
        settings["training"]["nan_policy"] = settings["training"]["nan_policy"] == "skip"
        key = repr(
            (settings, step.model, step.steps, step.length, teacher, devices, validation_rows)
        )
        if key not in found:
            found[key] = Programs(step, validation_rows)
        return found[key]

    return programs


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    """Runs of a file with equal settings share their programs. A test with other processes compiles
    them again.
    """
    with patch.object(loop, "Programs", cached_programs()):
        yield


def copy_until(run, step, path):
    """Copies a run as if its process had died after the checkpoint of `step`: without newer
    checkpoints and results.
    """
    copy = RunDirectory(shutil.copytree(run.path, path))
    for newer in copy.checkpoints.iterdir():
        if newer.name.isdigit() and int(newer.name) > step:
            shutil.rmtree(newer)
    assert (copy.checkpoints / str(step)).is_dir()
    summary = copy.path / "model_summary.json"
    if json.loads(summary.read_text())["best_step"] > step:
        copy.weights_or_adapter.unlink()
    summary.unlink()
    return copy


class Deadly(TokenStore):
    """Sends this process the signal DIE_WITH when the batch of step DIE_AT is requested."""

    def batch(self, step, *rows):
        if step == int(os.environ.get("DIE_AT", -1)):
            os.kill(os.getpid(), int(os.environ["DIE_WITH"]))
        return super().batch(step, *rows)


@dataclass
class Workshop:
    """Trains in directories under `path`."""

    path: object
    notes: io.StringIO = field(default_factory=io.StringIO)

    def write(self, name, config, seed=3):
        """Writes a run that was not trained, with random weights."""
        run = create_run(self.path / name)
        save_config(run, config)
        save_weights(run.weights, random_weights(config.architecture(VOCABULARY), seed, 0.2))
        return run

    def train(self, name, config, *, resume=False, store=None, tokenizer=None, **options):
        run = RunDirectory(self.path / name) if resume else create_run(self.path / name)
        if not run.config.is_file():
            save_config(run, config)
        tokenizer, store = tokenizer or Tokens(), store or small_store(config)
        train(config, run, tokenizer, store, Console(self.notes), resume=resume, **options)
        return run
