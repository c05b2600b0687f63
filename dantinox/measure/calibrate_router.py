"""`dantinox calibrate --what router`: entropy and varentropy quantiles of a model, for the preset `calibrated`."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import UserError
from dantinox.config.router_settings import MEASURED, PRESET_NUMBERS, STRATEGIES, RouterSection
from dantinox.generation import load
from dantinox.generation.quantized_weights import widen
from dantinox.measure.texts import in_batches, text_store
from dantinox.model import Transformer
from dantinox.model.scoring import map_positions
from dantinox.report.console import Progress
from dantinox.run import open_run, save_router_calibration, weights_digest
from dantinox.sampling.entropy_router import Metrics, RouterConfig, logit_metrics, strategy_of

TOKENS = 32768  # of the text, by default
WINDOW = 1024  # tokens read at a time, at most: attention takes memory by the square of it
CONTEXT = 32  # the first tokens of a window that are not counted
BATCH_TOKENS = 2048
CHUNK_LOGITS = 1 << 24  # held at a time: 64 MiB in float32
LEAST_POSITIONS = 500  # with fewer, a tenth of them is too small a number to place a threshold by
LEAST_SCALE = 1e-6  # what `config.router.Scale` allows
BINS = 80
PERCENT = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)


@dataclass(frozen=True)
class RouterCalibration:
    """What was measured: the keys of `router.json`.

    Attributes:
      weights: SHA-256 of the weights.
      tokens: positions measured, and `skipped`, the others of the text.
      window, context: tokens of a window, and how many of its first ones were not counted.
      measured: the numbers of `config.router.MEASURED`, see `thresholds`.
      quantiles: `percent`, and of these the `entropy` (bits) and `varentropy` (bits²).
      density: a histogram over entropy and varentropy, see `density`.
      shares: preset → strategy → its share of the positions, without attention.
    """

    weights: str
    tokens: int
    skipped: int
    window: int
    context: int
    vocab_size: int
    measured: dict[str, float]
    quantiles: dict[str, list[float]]
    density: dict[str, list[Any]]
    shares: dict[str, dict[str, float]]


class Windows(NamedTuple):
    """A text cut into N windows of T tokens; `counted_NT`: behind which tokens the distribution is measured."""

    tokens_NT: np.ndarray
    segments_NT: np.ndarray
    counted_NT: np.ndarray


def calibrate_router(
    run_dir: str | Path,
    *,
    tokens: int = TOKENS,
    data_path: str | Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> RouterCalibration:
    """Measures entropy and varentropy on a validation text and saves the thresholds of the preset `calibrated` in the run.

    The model reads the text, in windows that do not overlap. Nothing is drawn: the same text and weights give the same numbers.

    Args:
      tokens: how many of the text are read at most.
      data_path: the text, as `data.path` names one; None: the validation tokens that the training left in the run.

    Raises:
      UserError: the run cannot be loaded, there is no text, or too little of it.
    """
    if tokens < 1:
        raise UserError(f"tokens must be an integer ≥ 1, got {tokens}")
    directory = open_run(run_dir)
    weights = weights_digest(directory)  # first: weights that are replaced while they are read shall not pass for these
    store = text_store(directory, data_path, max(tokens, 2))
    run = load(run_dir)
    # The last validation token of a training is a target alone.
    ids = (store.validation_ids[:-1] if data_path is None else store.validation_ids)[:tokens]
    window = min(WINDOW, run.model.config.max_context)
    context = min(CONTEXT, window // 4)
    text = windows(ids, window, context, run.tokenizer.eos_id)
    count = int(text.counted_NT.sum())
    if count < LEAST_POSITIONS:
        remedy = "raise --tokens" if len(ids) >= tokens else "give a longer text with --data_path"
        raise UserError(
            f"a calibration needs at least {LEAST_POSITIONS} positions, and {len(ids)} tokens of text have {count} (the first "
            f"{context} of each window of {window} do not count): {remedy}"
        )
    H, V = (values_NT[text.counted_NT].astype(np.float64) for values_NT in measure(run.model, text, progress))
    if not np.isfinite(H + V).all():
        raise UserError(f"the model of {directory.path} gives probabilities that are no numbers: its weights are damaged")
    measured = thresholds(H, V)
    percentiles = {name: np.percentile(x, PERCENT).tolist() for name, x in (("entropy", H), ("varentropy", V))}
    found = RouterCalibration(
        weights=weights,
        tokens=count,
        skipped=len(ids) - count,
        window=window,
        context=context,
        vocab_size=run.model.config.vocab_size,
        measured=measured,
        quantiles={"percent": list(PERCENT), **percentiles},
        density=density(H, V),
        shares=shares(H, V, measured),
    )
    save_router_calibration(directory, asdict(found))
    return found


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


def measure(
    model: Transformer, text: Windows, progress: Callable[[str], None] = lambda line: None
) -> tuple[np.ndarray, np.ndarray]:
    """Entropy (bits) and varentropy (bits²), float32 `[N, T]`, of the model's distribution behind every token."""
    N, T = text.tokens_NT.shape

    def read(rows: np.ndarray) -> tuple[jax.Array, jax.Array]:
        return _measure(model, jnp.asarray(text.tokens_NT[rows]), jnp.asarray(text.segments_NT[rows]))

    done = Progress(progress, "measuring entropy", N, f"windows of {T} tokens")
    H_NT, V_NT = in_batches(N, max(1, BATCH_TOKENS // T), read, done.advance)
    return H_NT, V_NT


@nnx.jit(graph_updates=False)
def _measure(model: Transformer, tokens_BT: jax.Array, segments_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    model = widen(model)
    x_BTD, _, _ = model.hidden(tokens_BT, jnp.arange(tokens_BT.shape[1])[None], segments_BT=segments_BT)
    found: tuple[jax.Array, jax.Array] = map_positions(
        lambda x_D: logit_metrics(model.logits(x_D)), model.config.vocab_size, x_BTD, at_once=CHUNK_LOGITS
    )
    return found
