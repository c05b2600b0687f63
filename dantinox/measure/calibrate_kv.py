"""`dantinox calibrate --what kv`: measures how much attention each head needs, for the budgets of compressed caches."""

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
from dantinox.config.model import uneven_keys
from dantinox.files import check_writable
from dantinox.generation import load
from dantinox.measure.head_loss import SINKS, loss_rises
from dantinox.measure.texts import in_batches, padded, text_store
from dantinox.model import KVCache, Transformer, make_cache
from dantinox.report.console import Progress
from dantinox.report.trace_file import finite
from dantinox.run import (
    KV_FORMAT,
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
LENGTH = 512  # tokens of a sequence, where the context is longer
ROWS = 4  # query rows of a sequence, a quarter of it apart
LEAST_TOKENS = 64  # of a sequence
MASS = 0.95
BATCH_TOKENS = 2048  # read at once
TRIES = 10_000  # places drawn in vain before a text is given up
# What a head is called whose mean entropy is below so many bits.
HEAD_TYPES = {"sink": 0.5, "focused": 1.5, "moderate": 3.0, "mixed": 4.0, "diffuse": math.inf}


class HeadCalibration(HeadCalibrationFile):
    """What was measured on the attention heads: the keys of `kv_entropy.json`, without those that are None."""

    model_info: dict[str, Any]
    entropy_stats: dict[str, float | None]
    head_types: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)

    def heads(self, name: str) -> np.ndarray:
        """`head_entropies`, `coverage` or `distance` of the query heads `[L, N]`, or `loss` of the key heads `[L, K, C]`."""
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
    """Measures the attention of every query head on a text, and saves it in the run as `kv_entropy.json`.

    In each sequence the queries at 25, 50, 75 and 100 % of its tokens are measured: the entropy of their attention over the
    keys they see, the smallest number of keys that hold 95 % of it, and how many tokens back it goes in the mean, the first
    four tokens of the text left out. A head has the mean over queries and sequences. Then `loss_rises` estimates what eviction
    costs every key head.

    Args:
      sequences: how many are read; fewer where the text has no more that differ.
      length: tokens of a sequence at most; None: `LENGTH`, or the model's context if that is less.
      data_path: the text, as `data.path` names one (of a long one the beginning); None: the training tokens left in the run.
      seed: chooses the sequences.
      output: write to this file instead of into the run.
      from_results: measure nothing and take over what this file of format 1 or 2 holds, if it is of this model.
      loss: estimate `loss_rises`, the longest part.
      progress: called with a line at the start of each part, and every few seconds.

    Raises:
      UserError: the run cannot be loaded, there is no text or no document long enough in it, or `from_results` does not fit.
    """
    directory = open_run(run_dir)
    path = directory.kv if output is None else Path(output)
    check_writable(path)
    for name, number, least in (("sequences", sequences, 1), ("seed", seed, 0)):
        if number < least:
            raise UserError(f"{name} must be an integer ≥ {least}, got {number}")
    if from_results is not None and (data_path is not None or length is not None or not loss):
        raise UserError("from_results measures nothing: leave data_path, length and loss out")
    weights = weights_digest(directory)  # first: weights that are replaced while they are read shall not pass for these
    if from_results is not None:
        tokenizer = Tokenizer.load(directory.tokenizer)
        model = load_run_config(directory).architecture(tokenizer.vocab_size)
        taken = described(directory, model, read_kv_calibration(from_results, model, weights, tokenizer.fingerprint))
        save_kv_calibration(path, taken.to_dict())
        return taken
    config = load_run_config(directory)
    if config.attention.kv_lora_rank is not None:
        raise UserError(f"the heads of {directory.path} share latents (attention.kv_lora_rank): there are no slots to divide")
    if (uneven := uneven_keys(config.attention)) is not None:
        raise UserError(f"the keys of {directory.path} differ between layers ({uneven}): there are no slots to divide")
    context = config.model.max_context
    if context < ROWS:
        raise UserError(f"a calibration needs model.max_context ≥ {ROWS}, got {context}")
    length = min(context, LENGTH) if length is None else length
    if not ROWS <= length <= context:
        raise UserError(f"length must be in [{ROWS}, {context}], the model's context, got {length}")
    store = text_store(directory, data_path)
    run = load(directory.path)
    texts = choose(store.training_ids, sequences, length, run.tokenizer.eos_id, seed)
    if not texts:
        least = min(LEAST_TOKENS, length)
        raise UserError(f"found no document of at least {least} tokens in the text: give another one with --data_path")
    entropy_SRLN, coverage_SRLN, distance_SRLN = measure(run.model, texts, progress)
    if not np.isfinite(entropy_SRLN).all():
        raise UserError(f"the model of {directory.path} gives attention that is no number: its weights are damaged")
    found: dict[str, Any] = {
        "calibration": {"n_sequences": len(texts), "n_sample_positions": ROWS, "method": "attention_entropy"},
        "head_entropies": _named(entropy_SRLN.mean(axis=(0, 1)), "H"),
        "lengths": np.mean([row_ends(len(text)) for text in texts], axis=0).tolist(),
        "length_entropies": _named(np.moveaxis(entropy_SRLN.mean(axis=0), 0, -1), "H"),
        "coverage": _named(coverage_SRLN.mean(axis=(0, 1)), "H"),
        "distance": _named(distance_SRLN.mean(axis=(0, 1)), "H"),
        "split_half_correlation": split_half(entropy_SRLN.mean(axis=1)),
        "tokens": sum(map(len, texts)),
        "sequences": len(texts),
        "seed": seed,
        "tokenizer": run.tokenizer.fingerprint,
        "weights": weights,
    }
    if loss:
        rises_LKC, sizes = loss_rises(run.model, *padded(texts), progress)
        found |= {"loss": _named(rises_LKC, "K"), "loss_slots": sizes}
    calibration = described(directory, run.model.config, found)
    save_kv_calibration(path, calibration.to_dict())
    return calibration


def described(directory: RunDirectory, config: ModelConfig, found: Mapping[str, Any]) -> HeadCalibration:
    """What was found, of which model, and what follows from the entropies."""
    L, N, K = config.num_blocks, config.n_heads, config.kv_heads
    heads = np.array(list(found["head_entropies"].values()), np.float64)
    name = directory.path.name.encode(errors="replace").decode()  # what is no text has no place in JSON
    return HeadCalibration(**{
        "model": name, "n_layer": L, "n_head": N, "n_head_kv": K, "n_ctx": config.max_context, **found,
        "entropy_stats": entropy_stats(heads), "head_types": head_types(heads), "format_version": KV_FORMAT,
        "model_info": {
            "hidden_size": config.dim, "num_hidden_layers": L, "num_attention_heads": N, "num_key_value_heads": K,
            "max_position_embeddings": config.max_context, "head_dim": config.head_size, "gqa_ratio": N // K, "is_gqa": K < N,
        },
    })  # fmt: skip


def entropy_stats(heads: np.ndarray) -> dict[str, float | None]:
    """Mean, extremes and spread of the heads' entropies; null where a ratio would divide by zero."""
    found = {name: float(getattr(heads, name)()) for name in ("mean", "min", "max", "std")}
    ratios = {"cv": ("std", "mean"), "range_ratio": ("max", "min")}
    return found | finite({name: found[a] / found[b] if found[b] > 0 else None for name, (a, b) in ratios.items()})


def head_types(heads: np.ndarray) -> dict[str, int]:
    """How many heads are of each type."""
    types = np.searchsorted(list(HEAD_TYPES.values()), heads, side="right")
    return dict(zip(HEAD_TYPES, np.bincount(types, minlength=len(HEAD_TYPES)).tolist(), strict=True))


def split_half(entropy_SLN: np.ndarray) -> float | None:
    """Spearman's rank correlation between the heads' mean entropies in odd and in even sequences.

    None for one sequence, and where one half gives all heads the same.
    """
    from scipy.stats import spearmanr  # half a second to import

    halves = [entropy_SLN[first::2].mean(axis=0).ravel() for first in range(min(2, len(entropy_SLN)))]
    return float(spearmanr(*halves).statistic) if len(halves) == 2 and np.all(np.ptp(halves, axis=1)) else None


def choose(ids: np.ndarray, count: int, length: int, eos_id: int | None, seed: int) -> list[np.ndarray]:
    """Sequences of up to `length` tokens of a text, each inside one document; their places are drawn uniformly.

    A sequence begins at the place drawn, or before it where its document would end too soon. End tokens are left out: no
    training taught what follows them. Documents of fewer than `LEAST_TOKENS` (or `length`, if that is less) are passed over.
    """
    random, chosen, tries = np.random.default_rng(seed), dict[tuple[int, int], None](), 0
    while len(chosen) < count and tries < TRIES and len(ids) > 0:
        start, stop = _stretch(ids, int(random.integers(len(ids))), length, eos_id)
        if stop - start >= min(LEAST_TOKENS, length) and (start, stop) not in chosen:
            chosen[start, stop], tries = None, 0
        else:
            tries += 1
    return [np.asarray(ids[start:stop], np.int32) for start, stop in chosen]


def _stretch(ids: np.ndarray, place: int, length: int, eos_id: int | None) -> tuple[int, int]:
    """Up to `length` tokens of the document at `place`. Only so many tokens on either side of it are looked at."""
    low, high = max(0, place - length), min(len(ids), place + length)
    if eos_id is not None:
        ends = low + np.flatnonzero(ids[low:high] == eos_id)
        low = max([low, *(ends[ends < place] + 1)])
        high = min([high, *ends[ends >= place]])
    start = max(low, min(place, high - length))
    return start, min(high, start + length)


def row_ends(tokens: int) -> list[int]:
    """How many tokens of a sequence have been read at each of its query rows."""
    return [-(-tokens * row // ROWS) for row in range(1, ROWS + 1)]


def measure(
    model: Transformer, texts: Sequence[np.ndarray], progress: Callable[[str], None] = lambda line: None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The entropy (bits) of the attention, the keys that hold `MASS` of it, and its mean distance (tokens).

    For S sequences, R query rows, L layers and N heads these are float64 arrays `[S, R, L, N]`.
    """
    tokens_SN, lengths_S = padded(texts)
    ends_SR = np.array([row_ends(length) for length in lengths_S.tolist()])
    slots = tokens_SN.shape[1]
    T = -(-slots // ROWS)  # no quarter is longer
    unwindowed = replace(model.config, windows=(None,) * model.config.num_blocks)  # slot s holds position s in every layer

    def read(rows: np.ndarray) -> np.ndarray:
        cache = make_cache(unwindowed, len(rows), slots, model.dtype)
        starts_B, measured = np.zeros(len(rows), int), []
        for ends_B in ends_SR[rows].T:
            places_BT = starts_B[:, None] + np.arange(T)
            tokens_BT = np.take_along_axis(tokens_SN[rows], np.minimum(places_BT, slots - 1), axis=1)
            positions_BT = np.where(places_BT < ends_B[:, None], places_BT, -1)
            cache, read_LB3N = _read(model, cache, jnp.asarray(tokens_BT), jnp.asarray(positions_BT, jnp.int32))
            measured.append(np.asarray(read_LB3N, np.float64))
            starts_B = ends_B
        return np.stack(measured)

    done = Progress(progress, "measuring the attention of each head", len(texts), "sequences")
    found_RLS3N = in_batches(len(texts), max(1, BATCH_TOKENS // T), read, done.advance, axis=2)
    entropy_SRLN, keys_SRLN, distance_SRLN = found_RLS3N.transpose(3, 2, 0, 1, 4)
    return entropy_SRLN, keys_SRLN, distance_SRLN


@nnx.jit(donate_argnames=("cache",), graph_updates=False)
def _read(model: Transformer, cache: KVCache, tokens_BT: jax.Array, positions_BT: jax.Array) -> tuple[KVCache, jax.Array]:
    """The cache after these tokens, and of each row's newest query `[L, B, 3, N]`; see `_attention_of`."""
    _, after, aux = model.hidden(tokens_BT, positions_BT, cache=cache, probe=_attention_of)
    assert after is not None
    return after, jnp.stack(aux["probe"])


def _attention_of(scores_BNS: jax.Array, valid_BS: jax.Array) -> jax.Array:
    """`[B, 3, N]` of the attention of one query per row: entropy in bits, keys that hold `MASS`, and mean distance in tokens.

    The distance leaves out the first `SINKS` keys, which models attend to where they look for nothing.
    """
    valid_B1S = valid_BS[:, None]
    p_BNS = jax.nn.softmax(jnp.where(valid_B1S, scores_BNS.astype(jnp.float32), -jnp.inf), axis=-1)
    entropy_BN = jnp.maximum(jax.scipy.special.entr(p_BNS).sum(axis=-1), 0) / jnp.log(2)  # p may be rounded to more than 1
    held_BNS = jnp.cumsum(jnp.sort(p_BNS, axis=-1, descending=True), axis=-1)
    keys_BN = jnp.minimum(1 + (held_BNS < MASS).sum(axis=-1), valid_B1S.sum(axis=-1))
    places_S = jnp.arange(p_BNS.shape[-1])
    newest_B11 = jnp.max(jnp.where(valid_BS, places_S, 0), axis=-1)[:, None, None]
    others_BNS = jnp.where(places_S >= SINKS, p_BNS, 0)
    reach_BN = jnp.sum(others_BNS * jnp.maximum(newest_B11 - places_S, 0), axis=-1)
    distance_BN = reach_BN / jnp.maximum(jnp.sum(others_BNS, axis=-1), jnp.finfo(jnp.float32).tiny)
    return jnp.stack([entropy_BN, keys_BN, distance_BN], axis=1)


def _named(values: np.ndarray, letter: str) -> dict[str, Any]:
    """`{"L0_H0": …}` of an array whose first axes are layers and heads."""
    L, N = values.shape[:2]
    return dict(zip(head_names(L, N, letter), values.reshape(L * N, *values.shape[2:]).tolist(), strict=True))
