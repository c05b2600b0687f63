"""Where the router's preset `calibrated` comes from: entropy and varentropy of a model's own distributions on a text."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import UserError
from dantinox.config.router import MEASURED, PRESET_NUMBERS, STRATEGIES, RouterSection
from dantinox.generation import Run, load
from dantinox.generation.prepare import widen
from dantinox.model import Transformer
from dantinox.run import RunDirectory, open_run, save_router_calibration, weights_digest
from dantinox.sampling.router import Metrics, RouterConfig, logit_metrics, strategy_of
from dantinox.text import Corpus, open_store
from dantinox.text.corpus import cut_up
from dantinox.text.tokenizer import UnknownCharacter

TOKENS = 32768  # of the text, by default
WINDOW = 1024  # tokens read at a time, at most: attention takes memory by the square of it
CONTEXT = 32
BATCH_TOKENS = 2048
CHUNK_LOGITS = 1 << 24  # held at a time: 64 MiB in float32
CHARACTERS = 1 << 16  # encoded at a time
LEAST_POSITIONS = 500  # with fewer, a tenth of them is too small a number to place a threshold by
LEAST_SCALE = 1e-6  # what `config.router.Scale` allows
BINS = 80
PERCENT = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)


class Windows(NamedTuple):
    """A text cut into N windows of T tokens; `counted_NT` says behind which tokens the distribution is measured."""

    tokens_NT: np.ndarray
    segments_NT: np.ndarray
    counted_NT: np.ndarray


def calibrate_router(
    run_dir: str | Path,
    *,
    tokens: int = TOKENS,
    data_path: str | Path | None = None,
    window: int = WINDOW,
    context: int = CONTEXT,
    batch: int | None = None,
) -> dict[str, Any]:
    """Measures entropy and varentropy on a validation text and saves the thresholds of the preset `calibrated` in the run.

    The model reads the text, in windows that do not overlap. Nothing is drawn: the same text and weights give the same numbers.

    Args:
      tokens: how many of the text are read at most.
      data_path: the text, as `data.path` names one; None: the validation tokens that the training left in the run.
      window: tokens of a window; at most `model.max_context`.
      context: the first tokens of a window that are not counted (at most a quarter of it), see `windows`.
      batch: windows read at once; None: about 2048 tokens.

    Returns:
      What is saved, ready for JSON: `weights` (their SHA-256), `tokens` (positions measured), `skipped` (others of the text),
      `window`, `context`, `vocab_size`, `measured` (see `thresholds`), `quantiles`, `density` (a histogram over H and V), and
      under `shares` what part of the positions each strategy gets under each preset, without attention.

    Raises:
      UserError: the run cannot be loaded, there is no text, or too little of it.
    """
    for name, number in (("tokens", tokens), ("window", window)):
        if number < 1:
            raise UserError(f"{name} must be an integer ≥ 1, got {number}")
    directory = open_run(run_dir)
    weights = weights_digest(directory)  # first: weights that are replaced while they are read shall not pass for these
    run = load(run_dir)
    ids = _stored(directory, run, tokens) if data_path is None else read_text(run, str(data_path), tokens)
    window = min(window, run.model.config.max_context)
    context = min(context, window // 4)
    text = windows(ids, window, context, run.tokenizer.eos_id)
    count = int(text.counted_NT.sum())
    if count < LEAST_POSITIONS:
        remedy = "raise --tokens" if len(ids) >= tokens else "give a longer text with --data_path"
        raise UserError(
            f"a calibration needs at least {LEAST_POSITIONS} positions, and {len(ids)} tokens of text have {count} (the first "
            f"{context} of each window of {window} do not count): {remedy}"
        )
    H_NT, V_NT = measure(run.model, text, batch or max(1, BATCH_TOKENS // window))
    H, V = (values_NT[text.counted_NT].astype(np.float64) for values_NT in (H_NT, V_NT))
    if not np.isfinite(H + V).all():
        raise UserError(f"the model of {directory.path} gives probabilities that are no numbers: its weights are damaged")
    measured = thresholds(H, V)
    record = {
        "weights": weights,
        "tokens": count,
        "skipped": len(ids) - count,
        "window": window,
        "context": context,
        "vocab_size": run.model.config.vocab_size,
        "measured": measured,
        "quantiles": {"percent": list(PERCENT), "entropy": _percentiles(H), "varentropy": _percentiles(V)},
        "density": density(H, V),
        "shares": shares(H, V, measured),
    }
    save_router_calibration(directory, record)
    return record


def thresholds(H: np.ndarray, V: np.ndarray) -> dict[str, float]:
    """The numbers of `config.router.MEASURED` for entropies H and varentropies V: quantiles, and scales twice the medians."""
    numbers = {
        "low_entropy": np.quantile(H, 0.25),
        "low_varentropy": np.quantile(V, 0.25),
        "clarify_entropy": np.quantile(H, 0.75),
        "high_entropy": np.quantile(H, 0.9),
        "high_varentropy": np.quantile(V, 0.75),
        "entropy_scale": max(LEAST_SCALE, 2 * np.median(H)),
        "varentropy_scale": max(LEAST_SCALE, 2 * np.median(V)),
    }
    return {name: float(numbers[name]) for name in MEASURED}


def shares(H: np.ndarray, V: np.ndarray, measured: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """For each preset the share of the positions that each strategy gets."""
    found = {}
    for preset in PRESET_NUMBERS:
        section = RouterSection.model_validate({"router_preset": preset, "use_attention": False})
        strategy = strategy_of(Metrics(jnp.float32(H), jnp.float32(V)), RouterConfig.build(section, measured))
        counts = np.bincount(np.asarray(strategy), minlength=len(STRATEGIES))
        found[preset] = dict(zip(STRATEGIES, (counts / len(H)).tolist(), strict=True))
    return found


def density(H: np.ndarray, V: np.ndarray) -> dict[str, Any]:
    """How many positions lie in each cell: `counts[h][v]` between two edges of each axis, which begin at 0."""
    limits = [(0, max(float(values.max()), LEAST_SCALE)) for values in (H, V)]
    counts, entropy_edges, varentropy_edges = np.histogram2d(H, V, BINS, limits)
    return {
        "entropy_edges": entropy_edges.tolist(),
        "varentropy_edges": varentropy_edges.tolist(),
        "counts": counts.astype(int).tolist(),
    }


def windows(ids: np.ndarray, window: int, context: int, eos_id: int | None) -> Windows:
    """Cuts a text. The first `context` positions of a window are not counted, unless a document has begun in it before.

    There the cut took away what the model would know: its entropy is that of the cut and not of the text. At the beginning of a
    document there was nothing to know. Behind an end token nothing is counted either: no training taught what follows it.
    """
    tokens_NT = np.zeros((-(-len(ids) // window), window), np.int32)
    tokens_NT.reshape(-1)[: len(ids)] = ids
    ends_NT = tokens_NT == (-1 if eos_id is None else eos_id)
    segments_NT = np.cumsum(ends_NT, axis=1, dtype=np.int32) - ends_NT
    counted_NT = (np.arange(window) >= context) | (segments_NT > 0)
    text_NT = np.arange(tokens_NT.size).reshape(tokens_NT.shape) < len(ids)
    return Windows(tokens_NT, segments_NT, counted_NT & ~ends_NT & text_NT)


def measure(model: Transformer, text: Windows, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Entropy (bits) and varentropy (bits²), float32 `[N, T]`, of the model's distribution behind every token."""
    N = len(text.tokens_NT)
    batch = min(batch, N)
    found = []
    for start in range(0, N, batch):
        rows = np.minimum(np.arange(start, start + batch), N - 1)  # of one size, so that one program does for all
        found.append(_measure(model, jnp.asarray(text.tokens_NT[rows]), jnp.asarray(text.segments_NT[rows])))
    H_NT, V_NT = (np.concatenate(part)[:N] for part in zip(*found, strict=True))
    return H_NT, V_NT


@nnx.jit(graph_updates=False)
def _measure(model: Transformer, tokens_BT: jax.Array, segments_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    B, T = tokens_BT.shape
    model = widen(model)
    x_BTD, _, _ = model.hidden(tokens_BT, jnp.arange(T)[None], segments_BT=segments_BT)
    size = min(B * T, max(1, CHUNK_LOGITS // model.config.vocab_size))
    # In chunks of positions: [B, T, V] never exists.
    H_N, V_N = jax.lax.map(lambda x_D: logit_metrics(model.logits(x_D)), x_BTD.reshape(B * T, -1), batch_size=size)
    return H_N.reshape(B, T), V_N.reshape(B, T)


def _stored(directory: RunDirectory, run: Run, tokens: int) -> np.ndarray:
    """The first validation tokens that the training left in the run directory."""
    store = open_store(run.config, directory.data, run.tokenizer)
    if store is None:
        raise UserError(f"{directory.path} keeps no validation text of its training: give a text with --data_path")
    return store.validation_ids[:-1][:tokens].astype(np.int32)


def read_text(run: Run, path: str, tokens: int) -> np.ndarray:
    """The first tokens of a text."""
    parts: list[np.ndarray] = []
    count = 0
    for part in _encoded(run, path):
        parts.append(part)
        count += len(part)
        if count >= tokens:
            break
    return np.concatenate(parts)[:tokens]


def _encoded(run: Run, path: str) -> Iterator[np.ndarray]:
    """The tokens of a text in parts, its documents between begin and end tokens as a token store has them."""
    tokenizer = run.tokenizer
    begin, end = (np.array([] if token is None else [token], np.int32) for token in (tokenizer.bos_id, tokenizer.eos_id))
    document, characters = -1, 0
    for number, text in Corpus.open(path, run.config.data.text_field).pieces():
        if number != document:
            yield begin if document < 0 else np.concatenate([end, begin])
            document = number
        for part in cut_up(text, CHARACTERS):
            try:
                yield tokenizer.encode_array(part)
            except UnknownCharacter as error:
                raise UnknownCharacter(error.character, characters + error.position) from None
            characters += len(part)


def _percentiles(values: np.ndarray) -> list[float]:
    return np.percentile(values, PERCENT).tolist()
