"""The log-probabilities of answers by the model that a training on preferences starts from: computed once, kept in the run."""

import json

import numpy as np

from dantinox.files import UserError
from dantinox.run import RunDirectory, put
from dantinox.text import ConversationStore

NAME = "reference.json"  # beside the tokens


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
