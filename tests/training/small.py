"""A run small enough to train in a second."""

import io
import os
from dataclasses import dataclass, field

import numpy as np

from dantinox.config import build_config
from dantinox.report import Console
from dantinox.run import RunDirectory, create_run, save_config
from dantinox.text import Counts, TokenStore
from dantinox.training.loop import train

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


def small_config(**changes):
    """Returns the small settings with changes: `training__steps=3` changes `training.steps`."""
    return build_config({}, SETTINGS | {key.replace("__", "."): value for key, value in changes.items()})


def small_store(config, store=TokenStore, **options):
    """Returns a store of tokens that count upward with some noise, so that a model can learn them."""
    rng = np.random.default_rng(5)
    ids = (np.cumsum(rng.integers(1, 3, 3000)) % VOCABULARY).astype(np.uint16)
    counts = (Counts(2700, 1, 2700, 2700), Counts(300, 1, 600, 600))
    t = config.training
    arguments = {"batch_size": t.batch_size, "sequence_length": config.model.max_context, "seed": t.seed, "counts": counts}
    return store(ids[:2700], ids[2700:], **arguments, **options)


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

    def train(self, name, config, *, resume=False, store=None, tokenizer=None, **options):
        run = RunDirectory(self.path / name) if resume else create_run(self.path / name)
        if not run.config.is_file():
            save_config(run, config)
        tokenizer, store = tokenizer or Tokens(), store or small_store(config)
        train(config, run, tokenizer, store, Console(self.notes), resume=resume, **options)
        return run
