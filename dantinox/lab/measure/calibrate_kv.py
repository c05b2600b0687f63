"""`dantinox calibrate --what kv`: measures how much attention each head needs, for the budgets of
compressed caches.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import ModelConfig, UserError
from dantinox.config.model_config import uneven_keys
from dantinox.files import check_writable
from dantinox.generation import load
from dantinox.lab.measure.head_loss import SINKS, estimate_loss_rises
from dantinox.lab.measure.texts import map_batches, open_text_store, pad_rows
from dantinox.model import KVCache, Transformer, make_cache
from dantinox.report.console import Progress
from dantinox.report.trace_file import replace_nonfinite
from dantinox.run import (
    KV_FILE_FORMAT,
    HeadCalibrationFile,
    RunDirectory,
    head_names,
    load_run_config,
    open_run,
    read_kv_calibration,
    save_kv_calibration,
    weights_digest,
)
from dantinox.text import Tokenizer

SEQUENCES = 20
LENGTH = 512  # tokens per sequence, if the context is longer
ROWS = 4  # measured queries per sequence, at equal distances
MIN_TOKENS = 64  # per sequence
MASS = 0.95
BATCH_TOKENS = 2048
MAX_TRIES = 10_000  # consecutive failed draws before the search for sequences stops
# Head type → upper limit of the mean entropy in bits.
HEAD_TYPES = {"sink": 0.5, "focused": 1.5, "moderate": 3.0, "mixed": 4.0, "diffuse": math.inf}


class HeadCalibration(HeadCalibrationFile):
    """Measurements of the attention heads. The fields are the keys of `kv_entropy.json`, which
    omits fields that are None.
    """

    model_info: dict[str, Any]
    entropy_stats: dict[str, float | None]
    head_types: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)

    def heads(self, name: str) -> np.ndarray:
        """Returns the field `name` as an array.

        `head_entropies`, `coverage` and `distance` are per query head, `[L, N]`; `loss` is per
        key/value head, `[L, K, C]`.
        """
        values = np.array(list(getattr(self, name).values()), np.float64)
        return values.reshape(self.n_layer, -1, *values.shape[1:])


def calibrate_kv(
    run_dir: str | Path,
    *,
    sequences: int = SEQUENCES,
    length: int | None = None,
    data_path: str | Path | None = None,
    seed: int = 0,
    output: str | Path | None = None,
    from_results: str | Path | None = None,
    loss: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> HeadCalibration:
    """Measures the attention of every query head on a text and saves the results in the run as
    `kv_entropy.json`.

    In each sequence, the queries at 25, 50, 75 and 100 % of the tokens are measured. Three numbers
    describe the attention of a query: its entropy, the smallest number of keys that hold 95 % of
    it, and its mean distance in tokens. The distance ignores the first four tokens of the sequence.
    Each head gets the mean over queries and sequences. Then `estimate_loss_rises` estimates how
    much eviction from each key/value head would increase the loss.

    Args:
      sequences: number of sequences to read; fewer if the text has fewer distinct ones.
      length: maximum tokens of a sequence; None: `LENGTH` or the model's context, whichever is
        smaller.
      data_path: the text, in the form of `data.path`; of a long text, only the beginning is used.
        None: the run's training tokens.
      seed: selects the sequences.
      output: write to this file instead of the run directory.
      from_results: measure nothing and import this file of format 1 or 2, which must describe this
        model.
      loss: run `estimate_loss_rises`, the slowest part.
      progress: called with a line at the start of each part and then every few seconds.

    Raises:
      UserError: the run cannot be loaded, there is no text or no document in it is long enough, or
        `from_results` does not match the model.
    """
    directory = open_run(run_dir)
    path = directory.kv if output is None else Path(output)
    check_writable(path)
    for name, number, least in (("sequences", sequences, 1), ("seed", seed, 0)):
        if number < least:
            raise UserError(f"{name} must be an integer ≥ {least}, got {number}")
    if from_results is not None and (data_path is not None or length is not None or not loss):
        raise UserError("from_results measures nothing: do not give data_path, length or loss")
    # Computed before loading: weights that are replaced meanwhile have another digest.
    weights = weights_digest(directory)
    if from_results is not None:
        imported = _import_results(directory, from_results, weights)
        save_kv_calibration(path, imported.to_dict())
        return imported
    length = _checked_length(directory, length)
    store = open_text_store(directory, data_path)
    run = load(directory.path)
    texts = sample_sequences(store.training_ids, sequences, length, run.tokenizer.eos_id, seed)
    if not texts:
        least = min(MIN_TOKENS, length)
        raise UserError(
            f"the text has no document of at least {least} tokens:"
            " select another text with --data_path"
        )
    entropy_SRLN, coverage_SRLN, distance_SRLN = measure_attention(run.model, texts, progress)
    if not np.isfinite(entropy_SRLN).all():
        raise UserError(
            f"the attention of the model in {directory.path} is NaN or"
            " infinite: its weights are damaged"
        )
    found = {
        **_attention_fields(entropy_SRLN, coverage_SRLN, distance_SRLN),
        "calibration": {
            "n_sequences": len(texts),
            "n_sample_positions": ROWS,
            "method": "attention_entropy",
        },
        "lengths": np.mean([query_lengths(len(text)) for text in texts], axis=0).tolist(),
        "tokens": sum(map(len, texts)),
        "sequences": len(texts),
        "seed": seed,
        "tokenizer": run.tokenizer.fingerprint,
        "weights": weights,
    }
    if loss:
        rises_LKC, sizes = estimate_loss_rises(run.model, *pad_rows(texts), progress)
        found |= {"loss": _by_head(rises_LKC, "K"), "loss_slots": sizes}
    calibration = make_calibration(directory, run.model.config, found)
    save_kv_calibration(path, calibration.to_dict())
    return calibration


def _attention_fields(
    entropy_SRLN: np.ndarray, coverage_SRLN: np.ndarray, distance_SRLN: np.ndarray
) -> dict[str, Any]:
    """Returns the fields of the calibration that are means over sequences and queries; see
    `measure_attention`.
    """
    return {
        "head_entropies": _by_head(entropy_SRLN.mean(axis=(0, 1)), "H"),
        "length_entropies": _by_head(np.moveaxis(entropy_SRLN.mean(axis=0), 0, -1), "H"),
        "coverage": _by_head(coverage_SRLN.mean(axis=(0, 1)), "H"),
        "distance": _by_head(distance_SRLN.mean(axis=(0, 1)), "H"),
        "split_half_correlation": split_half(entropy_SRLN.mean(axis=1)),
    }


def _import_results(directory: RunDirectory, results: str | Path, weights: str) -> HeadCalibration:
    """Reads a calibration file that describes the model of a run, whose weights have the digest
    `weights`.
    """
    tokenizer = Tokenizer.load(directory.tokenizer)
    model = load_run_config(directory).architecture(tokenizer.vocab_size)
    return make_calibration(
        directory, model, read_kv_calibration(results, model, weights, tokenizer.fingerprint)
    )


def _checked_length(directory: RunDirectory, length: int | None) -> int:
    """Returns the tokens of a sequence; `length` is that of `calibrate_kv`.

    Raises:
      UserError: a budget cannot be divided among the heads of the model, or the length is not in
        its context.
    """
    config = load_run_config(directory)
    if config.attention.kv_lora_rank is not None:
        raise UserError(
            f"the heads of {directory.path} share latents"
            " (attention.kv_lora_rank): a budget cannot be divided"
        )
    uneven = uneven_keys(config.attention)
    if uneven is not None:
        raise UserError(
            f"the keys of {directory.path} differ between layers ({uneven}):"
            " a budget cannot be divided"
        )
    context = config.model.max_context
    if context < ROWS:
        raise UserError(f"calibration needs model.max_context ≥ {ROWS}, got {context}")
    if length is None:
        return min(context, LENGTH)
    if not ROWS <= length <= context:
        raise UserError(f"length must be in [{ROWS}, {context}], the model's context, got {length}")
    return length


def make_calibration(
    directory: RunDirectory, config: ModelConfig, found: Mapping[str, Any]
) -> HeadCalibration:
    """Builds the calibration from measurements, the model's sizes and statistics of the
    entropies.
    """
    L, N, K = config.num_blocks, config.n_heads, config.kv_heads
    heads = np.array(list(found["head_entropies"].values()), np.float64)
    name = directory.path.name.encode(errors="replace").decode()  # JSON cannot hold lone surrogates
    return HeadCalibration(**{
        "model": name, "n_layer": L, "n_head": N, "n_head_kv": K, "n_ctx": config.max_context,
        **found, "entropy_stats": entropy_stats(heads), "head_types": head_types(heads),
        "format_version": KV_FILE_FORMAT,
        "model_info": {
            "hidden_size": config.dim, "num_hidden_layers": L, "num_attention_heads": N,
            "num_key_value_heads": K, "max_position_embeddings": config.max_context,
            "head_dim": config.head_size, "gqa_ratio": N // K, "is_gqa": K < N,
        },
    })  # fmt: skip


def entropy_stats(heads: np.ndarray) -> dict[str, float | None]:
    """Returns mean, extremes and spread of the heads' entropies; None for a ratio that would divide
    by zero.
    """
    found = {name: float(getattr(heads, name)()) for name in ("mean", "min", "max", "std")}
    ratios = {
        # The coefficient of variation.
        "cv": found["std"] / found["mean"] if found["mean"] > 0 else None,
        "range_ratio": found["max"] / found["min"] if found["min"] > 0 else None,
    }
    return found | replace_nonfinite(ratios)


def head_types(heads: np.ndarray) -> dict[str, int]:
    """Counts the heads of each type."""
    types = np.searchsorted(list(HEAD_TYPES.values()), heads, side="right")
    return dict(
        zip(HEAD_TYPES, np.bincount(types, minlength=len(HEAD_TYPES)).tolist(), strict=True)
    )


def split_half(entropy_SLN: np.ndarray) -> float | None:
    """Returns Spearman's rank correlation between the heads' mean entropies in odd and in even
    sequences.

    Returns None if there is one sequence, or if all heads have the same entropy in one half.
    """
    from scipy.stats import spearmanr  # the import takes half a second

    if len(entropy_SLN) < 2:
        return None
    halves = [entropy_SLN[first::2].mean(axis=0).ravel() for first in (0, 1)]
    if not np.all(np.ptp(halves, axis=1)):
        return None
    return float(spearmanr(*halves).statistic)


def sample_sequences(
    ids: np.ndarray, count: int, length: int, eos_id: int | None, seed: int
) -> list[np.ndarray]:
    """Samples `count` distinct sequences of up to `length` tokens, each within one document, at
    uniform positions.

    A sequence begins at the sampled position, or earlier if its document would end too soon. EOS
    tokens are excluded, since training never scores the token after them. Documents shorter than
    `MIN_TOKENS` (or `length`, if smaller) are skipped.
    """
    random = np.random.default_rng(seed)
    chosen = dict[tuple[int, int], None]()
    tries = 0
    while len(chosen) < count and tries < MAX_TRIES and len(ids) > 0:
        start, stop = _document_span(ids, int(random.integers(len(ids))), length, eos_id)
        if stop - start >= min(MIN_TOKENS, length) and (start, stop) not in chosen:
            chosen[start, stop] = None
            tries = 0
        else:
            tries += 1
    return [np.asarray(ids[start:stop], np.int32) for start, stop in chosen]


def _document_span(ids: np.ndarray, place: int, length: int, eos_id: int | None) -> tuple[int, int]:
    """Returns start and end of up to `length` tokens of the document at `place`; reads only
    `length` tokens on each side.
    """
    low = max(0, place - length)
    high = min(len(ids), place + length)
    if eos_id is not None:
        ends = low + np.flatnonzero(ids[low:high] == eos_id)
        low = max([low, *(ends[ends < place] + 1)])
        high = min([high, *ends[ends >= place]])
    start = max(low, min(place, high - length))
    return start, min(high, start + length)


def query_lengths(tokens: int) -> list[int]:
    """Returns how many tokens of a sequence have been read at each of its measured queries."""
    return [-(-tokens * row // ROWS) for row in range(1, ROWS + 1)]


def measure_attention(
    model: Transformer,
    texts: Sequence[np.ndarray],
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the entropy of the attention (bits), the number of keys that hold `MASS` of it, and
    its mean distance (tokens).

    Each is a float64 array `[S, R, L, N]` for S sequences, R queries, L layers and N heads.
    """
    tokens_SN, lengths_S = pad_rows(texts)
    ends_SR = np.array([query_lengths(length) for length in lengths_S.tolist()])
    slots = tokens_SN.shape[1]
    T = -(-slots // ROWS)  # the longest quarter of a sequence
    # Without windows, slot s holds position s in every layer.
    unwindowed = replace(model.config, windows=(None,) * model.config.num_blocks)

    def read(rows: np.ndarray) -> np.ndarray:
        cache = make_cache(unwindowed, len(rows), slots, model.dtype)
        starts_B = np.zeros(len(rows), int)
        measured = []
        for ends_B in ends_SR[rows].T:
            places_BT = starts_B[:, None] + np.arange(T)
            tokens_BT = np.take_along_axis(
                tokens_SN[rows], np.minimum(places_BT, slots - 1), axis=1
            )
            positions_BT = np.where(places_BT < ends_B[:, None], places_BT, -1)
            cache, read_LB3N = _attention_stats_batch(
                model, cache, jnp.asarray(tokens_BT), jnp.asarray(positions_BT, jnp.int32)
            )
            measured.append(np.asarray(read_LB3N, np.float64))
            starts_B = ends_B
        return np.stack(measured)

    done = Progress(progress, "measuring the attention of each head", len(texts), "sequences")
    found_RLS3N = map_batches(len(texts), max(1, BATCH_TOKENS // T), read, done.advance, axis=2)
    entropy_SRLN, keys_SRLN, distance_SRLN = found_RLS3N.transpose(3, 2, 0, 1, 4)
    return entropy_SRLN, keys_SRLN, distance_SRLN


@nnx.jit(donate_argnames=("cache",), graph_updates=False)
def _attention_stats_batch(
    model: Transformer, cache: KVCache, tokens_BT: jax.Array, positions_BT: jax.Array
) -> tuple[KVCache, jax.Array]:
    """Returns the cache after these tokens and `_attention_stats` of each row's newest query,
    `[L, B, 3, N]`.
    """
    _, new_cache, aux = model.hidden(tokens_BT, positions_BT, cache=cache, probe=_attention_stats)
    assert new_cache is not None
    return new_cache, jnp.stack(aux["probe"])


def _attention_stats(scores_BNS: jax.Array, valid_BS: jax.Array) -> jax.Array:
    """Returns `[B, 3, N]` for one query per row: entropy in bits, number of keys that hold `MASS`,
    mean distance in tokens.

    The distance ignores the first `SINKS` keys (attention sinks), which heads attend to when no
    other key matters.
    """
    valid_B1S = valid_BS[:, None]
    p_BNS = jax.nn.softmax(jnp.where(valid_B1S, scores_BNS.astype(jnp.float32), -jnp.inf), axis=-1)
    # Rounding may make p exceed 1.
    entropy_BN = jnp.maximum(jax.scipy.special.entr(p_BNS).sum(axis=-1), 0) / jnp.log(2)
    held_BNS = jnp.cumsum(jnp.sort(p_BNS, axis=-1, descending=True), axis=-1)
    keys_BN = jnp.minimum(1 + (held_BNS < MASS).sum(axis=-1), valid_B1S.sum(axis=-1))
    places_S = jnp.arange(p_BNS.shape[-1])
    newest_B11 = jnp.max(jnp.where(valid_BS, places_S, 0), axis=-1)[:, None, None]
    others_BNS = jnp.where(places_S >= SINKS, p_BNS, 0)
    reach_BN = jnp.sum(others_BNS * jnp.maximum(newest_B11 - places_S, 0), axis=-1)
    distance_BN = reach_BN / jnp.maximum(jnp.sum(others_BNS, axis=-1), jnp.finfo(jnp.float32).tiny)
    return jnp.stack([entropy_BN, keys_BN, distance_BN], axis=1)


def _by_head(values: np.ndarray, letter: str) -> dict[str, Any]:
    """Returns `{"L0_H0": …}` for an array whose first axes are layers and heads."""
    L, N = values.shape[:2]
    return dict(
        zip(
            head_names(L, N, letter), values.reshape(L * N, *values.shape[2:]).tolist(), strict=True
        )
    )
