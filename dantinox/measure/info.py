"""What `dantinox info RUN` tells about a run."""

import math
from collections.abc import Iterator
from pathlib import Path

from dantinox.config import Config
from dantinox.generation import Run, load, prepare
from dantinox.generation.prepare import WEIGHTS, weight_bytes
from dantinox.measure.perplexity import compare
from dantinox.model import make_cache
from dantinox.report import human_bytes, human_count, table
from dantinox.report.metrics import read_csv
from dantinox.run import RunDirectory, open_run
from dantinox.text import Batch, open_store

TOKENS = 32768  # of the validation text, to compare weights on
ROWS = 8


def describe(run_dir: str | Path) -> Iterator[str]:
    """Paragraphs: the model, its training, its memory, and what narrow weights cost.

    Raises:
      UserError: the run cannot be loaded.
    """
    directory = open_run(run_dir)
    run = load(run_dir)
    yield _model(run)
    yield _training(directory, run.config)
    yield from _weights(directory, run)


def _model(run: Run) -> str:
    m = run.model.config
    cache = make_cache(m, 1, m.max_context, run.model.dtype).report()
    windows = sorted({window for window in m.windows if window is not None})
    tokenizer = run.tokenizer
    return table([
        ("parameters", human_count(weight_bytes(run.model) / 4)),
        ("shape", f"{m.num_blocks} layers, dim {m.dim}, {m.n_heads} heads of {m.head_size}, {m.kv_heads} key/value heads"),
        ("feed-forward", f"{m.activation}, {m.hidden_dim} wide"),
        ("positions", m.position + (f", sliding windows of {windows}" if windows else "")),
        ("context", f"{m.max_context} tokens, cache {human_bytes(cache['bytes'])} a row"),
        ("tokenizer", f"{run.config.tokenizer.tokenizer_type}, {tokenizer.vocab_size} symbols"),
    ])  # fmt: skip


def _training(directory: RunDirectory, config: Config) -> str:
    log = directory.log(config)
    rows = read_csv(log) if log.is_file() else []
    if not rows:
        return "no training log\n"
    best = min(rows, key=lambda row: row["val_loss"])
    return table([
        ("trained", f"{rows[-1]['step']:.0f} steps, {human_count(rows[-1]['tokens'])} tokens"),
        ("best", f"val loss {best['val_loss']:.4f}, {best['bits_per_byte']:.3f} bits per byte, at step {best['step']:.0f}"),
    ])  # fmt: skip


def _weights(directory: RunDirectory, run: Run) -> Iterator[str]:
    """A line per precision: bytes, and the cost measured on the validation text where the run still has it."""
    store = open_store(run.config, directory.data, run.tokenizer)
    if store is None:
        yield "no token store in this run: the cost of narrow weights cannot be measured\n"
    for name in WEIGHTS[1:]:
        narrow = prepare(run.model, name)
        line = f"weights {name:<9} {human_bytes(weight_bytes(narrow)):>8}"
        if store is not None and name != "float32":
            batches: Iterator[Batch] = store.validation(ROWS, TOKENS)
            found = compare(run.model, narrow, batches)
            line += (
                f"  logit error {found.logit_error:.2g}, perplexity {math.exp(found.nats):.4g} → "
                f"{math.exp(found.other_nats):.4g} ({100 * found.perplexity_change:+.3f} %) on {found.targets} tokens"
            )
        yield line
