"""Log-probabilities of the reference model in preference training, computed once and stored in the run."""

import json
from collections.abc import Callable
from functools import partial

import numpy as np

from dantinox.config import ModelConfig
from dantinox.distributed import Layout, barrier, fetch_to_host, is_rank0
from dantinox.files import UserError
from dantinox.model.parameters import Parameters
from dantinox.run import RunDirectory, write_file
from dantinox.text import ConversationStore
from dantinox.training.step import make_reference_step, select_rows

REFERENCE_FILE = "reference.json"  # beside the tokens


def compute_reference_logprobs(
    store: ConversationStore, model: ModelConfig, layout: Layout, rows: int, parameters: Parameters, frozen: Parameters
) -> np.ndarray:
    """The log-probabilities of both answers of all pairs, float32 [pairs, 2], `rows` at a time; 0 where one is too long."""
    found, program = np.zeros_like(store.reference), make_reference_step(model, layout)
    for numbers, pairs in store.all_pairs(rows):
        placed = layout.put_batch(partial(select_rows, pairs), rows)
        found[numbers] = fetch_to_host(program(parameters, placed, frozen))[: len(numbers)]
    return found


def load_or_compute_logprobs(
    run: RunDirectory,
    store: ConversationStore,
    weights: str | None,
    compute: Callable[[], np.ndarray],
    note: Callable[[str], None] = lambda line: None,
) -> np.ndarray:
    """The log-probabilities that the run keeps for these tokens, float32 [pairs, 2]; else computed, and kept from then on.

    Args:
      weights: the SHA-256 of the weights that they must be of; None: of any, and they must be there, because a training that
        goes on has other weights now.

    Raises:
      UserError: the file is damaged, or missing where it is needed.
    """
    path = run.data / REFERENCE_FILE
    if path.is_file():
        run.check(path)
        try:
            record = json.loads(path.read_bytes())
            found = np.array(record["log_probabilities"], np.float32)
            same = record["tokens"] == store.name and weights in (None, record["weights"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not a file of log-probabilities: {error}") from None
        if same and found.shape == store.reference.shape:
            return found
    if weights is None:
        raise UserError(f"{run.data} has no log-probabilities of the starting weights for its tokens: restore {REFERENCE_FILE}")
    note("computing the log-probabilities of all answers by the starting weights")
    found = compute()
    if is_rank0():
        record = {"tokens": store.name, "weights": weights, "log_probabilities": found.tolist()}
        write_file(run.path, f"{run.data.name}/{REFERENCE_FILE}", json.dumps(record) + "\n")
    barrier()
    return found
