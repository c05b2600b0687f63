"""The log-probabilities of answers by the model that a training on preferences starts from: computed once, kept in the run."""

import json
from functools import partial

import numpy as np

from dantinox.config import ModelConfig
from dantinox.distributed import Layout, on_host
from dantinox.files import UserError
from dantinox.model.parameters import Parameters
from dantinox.run import RunDirectory, put
from dantinox.text import ConversationStore
from dantinox.training.step import chosen, make_reference_step

NAME = "reference.json"  # beside the tokens


def reference_of(
    store: ConversationStore, model: ModelConfig, layout: Layout, rows: int, parameters: Parameters, frozen: Parameters
) -> np.ndarray:
    """The log-probabilities of both answers of all pairs, float32 [pairs, 2], `rows` at a time; 0 where one is too long."""
    found, program = np.zeros_like(store.reference), make_reference_step(model, layout)
    for numbers, pairs in store.all_pairs(rows):
        placed = layout.put_rows(partial(chosen, pairs), rows)
        found[numbers] = on_host(program(parameters, placed, frozen))[: len(numbers)]
    return found


def saved_reference(run: RunDirectory, store: ConversationStore, weights: str | None = None) -> np.ndarray | None:
    """What `save_reference` left for these tokens, float32 [pairs, 2], or None where there is nothing.

    Args:
      weights: the SHA-256 of the weights that it must be of; None: any.

    Raises:
      UserError: the file is damaged.
    """
    path = run.data / NAME
    if not path.is_file():
        return None
    run.check(path)
    try:
        record = json.loads(path.read_bytes())
        found = np.array(record["log_probabilities"], np.float32)
        same = record["tokens"] == store.name and weights in (None, record["weights"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a file of log-probabilities: {error}") from None
    return found if same and found.shape == store.reference.shape else None


def save_reference(run: RunDirectory, store: ConversationStore, weights: str, found: np.ndarray) -> None:
    """Keeps log-probabilities, bound to the tokens and to the SHA-256 of the weights."""
    record = {"tokens": store.name, "weights": weights, "log_probabilities": found.tolist()}
    put(run.path, f"{run.data.name}/{NAME}", json.dumps(record) + "\n")
