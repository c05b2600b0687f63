"""`dantinox calibrate --what router`: measures entropy and varentropy quantiles for the preset
`calibrated`.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import UserError
from dantinox.config.router_settings import (
    CALIBRATED_THRESHOLDS,
    PRESET_NUMBERS,
    STRATEGIES,
    RouterSection,
)
from dantinox.generation import load
from dantinox.generation.decode.prepared_model import dequantize
from dantinox.lab.measure.texts import map_batches, open_text_store
from dantinox.model import Transformer
from dantinox.model.positions import packed_positions
from dantinox.model.scoring import map_logits
from dantinox.report.console import Progress
from dantinox.run import open_run, save_router_calibration, weights_digest
from dantinox.sampling.entropy_router import Metrics, RouterConfig, logit_metrics, select_strategy
from dantinox.text.batch_rows import ends_document

TOKENS = 32768  # tokens of the text to read by default
WINDOW = 1024  # maximum tokens of a window: attention memory grows with its square
CONTEXT = 32  # first tokens of a window, which are not measured
BATCH_TOKENS = 2048
CHUNK_LOGITS = 1 << 24  # in memory at one time: 64 MiB in float32
MIN_POSITIONS = 500  # fewer give an imprecise 90th percentile
MIN_SCALE = 1e-6  # the lower limit of `config.router_settings.Scale`
BINS = 80
PERCENT = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)


@dataclass(frozen=True)
class RouterCalibration:
    """The measurements: the keys of `router.json`.

    Attributes:
      weights: SHA-256 of the weights.
      tokens: number of measured positions.
      skipped: number of other positions of the text.
      window: tokens of a window.
      context: first tokens of a window, which were not measured.
      measured: the numbers named in `CALIBRATED_THRESHOLDS`; see `thresholds`.
      quantiles: the percentiles `percent` of `entropy` (bits) and `varentropy` (bits²).
      density: a histogram over entropy and varentropy; see `density`.
      shares: preset → strategy → share of the positions where the router chooses it, if attention
        metrics are ignored.
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


class TextWindows(NamedTuple):
    """A text split into N windows of T tokens. `counted_NT` marks the tokens after which the
    distribution is measured.
    """

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
    """Measures entropy and varentropy on a text and saves the thresholds of the preset `calibrated`
    in the run.

    The model reads the text in windows that do not overlap. Nothing is sampled: the same text and
    weights give the same numbers.

    Args:
      tokens: maximum tokens of the text to read.
      data_path: the text, in the form of `data.path`; None: the validation tokens that training
        saved in the run.

    Raises:
      UserError: the run cannot be loaded, or there is no text or too little of it.
    """
    if tokens < 1:
        raise UserError(f"tokens must be an integer ≥ 1, got {tokens}")
    directory = open_run(run_dir)
    # Computed before loading, so that weights replaced meanwhile do not get this digest.
    weights = weights_digest(directory)
    store = open_text_store(directory, data_path, max(tokens, 2))
    run = load(run_dir)
    # The last validation token is only a target.
    ids = (store.validation_ids[:-1] if data_path is None else store.validation_ids)[:tokens]
    window = min(WINDOW, run.model.config.max_context)
    context = min(CONTEXT, window // 4)
    text = cut_windows(ids, window, context, run.tokenizer.eos_id, store.bos_id)
    count = int(text.counted_NT.sum())
    if count < MIN_POSITIONS:
        remedy = "raise --tokens" if len(ids) >= tokens else "select a longer text with --data_path"
        raise UserError(
            f"calibration needs at least {MIN_POSITIONS} positions, but {len(ids)} tokens of text"
            f" have {count} (the first {context} of each window of {window} are not counted):"
            f" {remedy}"
        )
    H, V = (
        values_NT[text.counted_NT].astype(np.float64)
        for values_NT in measure_entropy(run.model, text, progress)
    )
    if not np.isfinite(H + V).all():
        raise UserError(
            f"the model of {directory.path} returns NaN or infinite"
            " probabilities: its weights are damaged"
        )
    measured = thresholds(H, V)
    percentiles = {
        name: np.percentile(x, PERCENT).tolist() for name, x in (("entropy", H), ("varentropy", V))
    }
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
    """Returns the `CALIBRATED_THRESHOLDS` for entropies H and varentropies V: quantiles, and twice
    the medians.
    """
    numbers = {
        "low_entropy": np.quantile(H, 0.25),
        "low_varentropy": np.quantile(V, 0.25),
        "clarify_entropy": np.quantile(H, 0.75),
        "high_entropy": np.quantile(H, 0.9),
        "high_varentropy": np.quantile(V, 0.75),
        "entropy_scale": max(MIN_SCALE, 2 * np.median(H)),
        "varentropy_scale": max(MIN_SCALE, 2 * np.median(V)),
    }
    return {name: float(numbers[name]) for name in CALIBRATED_THRESHOLDS}


def shares(
    H: np.ndarray, V: np.ndarray, measured: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Returns preset → strategy → its share of the positions."""
    found = {}
    for preset in PRESET_NUMBERS:
        section = RouterSection.model_validate({"router_preset": preset, "use_attention": False})
        strategy = select_strategy(
            Metrics(jnp.float32(H), jnp.float32(V)), RouterConfig.build(section, measured)
        )
        counts = np.bincount(np.asarray(strategy), minlength=len(STRATEGIES))
        found[preset] = dict(zip(STRATEGIES, (counts / len(H)).tolist(), strict=True))
    return found


def density(H: np.ndarray, V: np.ndarray) -> dict[str, Any]:
    """Returns a histogram: `counts[h][v]` positions in each cell, and the cell edges of both axes,
    which begin at 0.
    """
    limits = [(0, max(float(values.max()), MIN_SCALE)) for values in (H, V)]
    counts, entropy_edges, varentropy_edges = np.histogram2d(H, V, BINS, limits)
    return {
        "entropy_edges": entropy_edges.tolist(),
        "varentropy_edges": varentropy_edges.tolist(),
        "counts": counts.astype(int).tolist(),
    }


def cut_windows(
    ids: np.ndarray, window: int, context: int, eos_id: int | None, bos_id: int | None = None
) -> TextWindows:
    """Splits a text into windows and marks the positions to measure.

    The first `context` positions of a window are not measured, because missing context raises the
    entropy there. Positions of a document that begins within the window are measured: they have
    their whole context. Positions of EOS tokens are not measured, since training never scores the
    token after them.
    """
    tokens_NT = np.zeros((-(-len(ids) // window), window), np.int32)
    tokens_NT.reshape(-1)[: len(ids)] = ids
    ends_NT = np.zeros(tokens_NT.shape, bool)
    ends_NT.reshape(-1)[: len(ids)] = ends_document(
        ids, np.append(ids[1:], eos_id or 0)[: len(ids)], eos_id, bos_id
    )
    segments_NT = np.cumsum(ends_NT, axis=1, dtype=np.int32) - ends_NT
    counted_NT = (np.arange(window) >= context) | (segments_NT > 0)
    text_NT = np.arange(tokens_NT.size).reshape(tokens_NT.shape) < len(ids)
    return TextWindows(tokens_NT, segments_NT, counted_NT & ~ends_NT & text_NT)


def measure_entropy(
    model: Transformer, text: TextWindows, progress: Callable[[str], None] = lambda line: None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns entropy (bits) and varentropy (bits²), float32 `[N, T]`, of the next-token
    distribution at every position.
    """
    N, T = text.tokens_NT.shape

    def read(rows: np.ndarray) -> tuple[jax.Array, jax.Array]:
        return _entropy_batch(
            model, jnp.asarray(text.tokens_NT[rows]), jnp.asarray(text.segments_NT[rows])
        )

    done = Progress(progress, "measuring entropy", N, f"windows of {T} tokens")
    H_NT, V_NT = map_batches(N, max(1, BATCH_TOKENS // T), read, done.advance)
    return H_NT, V_NT


@nnx.jit(graph_updates=False)
def _entropy_batch(
    model: Transformer, tokens_BT: jax.Array, segments_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    model = dequantize(model)
    positions_BT = packed_positions(model.config, segments_BT, model.parallelism)
    x_BTD, _, _ = model.hidden(tokens_BT, positions_BT, segments_BT=segments_BT)
    found: tuple[jax.Array, jax.Array] = map_logits(
        logit_metrics, model, x_BTD, max_logits=CHUNK_LOGITS
    )
    return found
