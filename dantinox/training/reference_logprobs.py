"""Log-probabilities under the reference model of preference training, computed once and stored in
the run.
"""

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
from dantinox.training.eval_step import make_reference_step
from dantinox.training.step import select_rows

REFERENCE_FILE = "reference.json"  # in the token directory of the run


def compute_reference_logprobs(
    store: ConversationStore,
    model: ModelConfig,
    layout: Layout,
    rows: int,
    parameters: Parameters,
    frozen: Parameters,
) -> np.ndarray:
    """Computes the log-probabilities of both answers of all pairs, `rows` pairs per batch.

    Returns:
      float32 `[pairs, 2]`; 0 for pairs that are too long.
    """
    logprobs = np.zeros_like(store.reference)
    program = make_reference_step(model, layout)
    for indices, pairs in store.all_pairs(rows):
        placed = layout.put_batch(partial(select_rows, pairs), rows)
        logprobs[indices] = fetch_to_host(program(parameters, placed, frozen))[: len(indices)]
    return logprobs


def load_or_compute_logprobs(
    run: RunDirectory,
    store: ConversationStore,
    weights_sha256: str | None,
    compute: Callable[[], np.ndarray],
    note: Callable[[str], None] = lambda line: None,
) -> np.ndarray:
    """Loads the log-probabilities of the run's tokens, float32 `[pairs, 2]`, or computes and saves
    them.

    Args:
      weights_sha256: the SHA-256 of the reference weights, which are the weights before training.
        None when a run is resumed: training has then changed the weights of the run, so the file
        must exist.

    Raises:
      UserError: the file is damaged, or missing when a run is resumed.
    """
    path = run.data / REFERENCE_FILE
    if path.is_file():
        run.check(path)
        try:
            record = json.loads(path.read_bytes())
            logprobs = np.array(record["log_probabilities"], np.float32)
            same = record["tokens"] == store.name and weights_sha256 in (None, record["weights"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not a valid file of log-probabilities: {error}") from None
        if same and logprobs.shape == store.reference.shape:
            return logprobs
    if weights_sha256 is None:
        raise UserError(
            f"{run.data} has no log-probabilities of its tokens under the starting weights: restore"
            f" {REFERENCE_FILE}"
        )
    note("computing the log-probabilities of all answers under the starting weights")
    logprobs = compute()
    if is_rank0():
        record = {
            "tokens": store.name,
            "weights": weights_sha256,
            "log_probabilities": logprobs.tolist(),
        }
        write_file(run.path, f"{run.data.name}/{REFERENCE_FILE}", json.dumps(record) + "\n")
    barrier()
    return logprobs
