"""`CachePlan` describes the cache of a batch as the `kv` settings define it: slots per head,
eviction policy, dtype.
"""

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from dantinox.config import ModelConfig, UserError
from dantinox.config.kv_settings import AVERAGE_POLICIES, KVSection
from dantinox.config.model_config import uneven_keys
from dantinox.generation.decode.cache_budgets import (
    SLOT_UNIT,
    allocate_by_loss,
    allocate_by_weight,
    head_weights,
    min_total,
    reduce_query_heads,
)
from dantinox.generation.decode.prepared_model import HeadOrder
from dantinox.model import Compression, KVCache, compute_dtype
from dantinox.model.cache import uncompressed_slots
from dantinox.model.cache_store import PACKED_DTYPES, numbers_per_element
from dantinox.run import KVCalibration

# With `kv.decay: entropy`, the importance of a token is a decaying sum of the attention it
# received. In a head whose attention has entropy H, the sum covers about the last ENTROPY_LIFETIME
# · 2ᴴ queries.
ENTROPY_LIFETIME = 16.0


# The cache of the model, and those of other models that a stepper uses; empty without a cache.
Caches = tuple[KVCache, ...]


class CachePlan(NamedTuple):
    """The plan of a cache, a static argument of compiled programs.

    Attributes:
      slots: the slots for a full sequence.
      extra: the slots of ring buffers in addition to their window; at least the number of draft
        tokens.
    """

    slots: int
    dtype: str
    compression: Compression | None = None
    extra: int = 0


def plan_cache(
    config: ModelConfig,
    kv: KVSection,
    slots: int,
    calibration: KVCalibration | None = None,
    round_up: bool = False,
) -> CachePlan:
    """Returns the plan for sequences of up to `slots` tokens.

    The key heads of the model must already be in the order that `head_order` returns for the same
    settings.

    Args:
      calibration: the measurements of the model, if a signal or the decay reads them.
      round_up: if `kv.budget` is too small, use the smallest possible budget and print a warning.

    Raises:
      UserError: the budget is below the minimum per head, the `kv.signal` was not measured,
        `kv.layer_ratios` has another number of layers, or the head sizes do not fit the packed
        dtype.
    """
    if kv.compresses and config.latent is not None:
        message = (
            "kv.budget does not support latent caches: all heads share one"
            " latent, which cannot be evicted per head"
        )
        raise UserError(message, key="kv.budget")
    if kv.compresses and (uneven := uneven_keys(config)) is not None:
        message = (
            f"kv.budget must be null with {uneven}: it needs layers with keys of the same shape"
        )
        raise UserError(message, key="kv.budget")
    dtype = jnp.dtype(compute_dtype(config)).name if kv.dtype == "auto" else kv.dtype
    if config.latent is None:
        vectors = "heads"
        sizes = (config.head_size, config.global_head_size or config.head_size)
    else:
        vectors = "latents and their rotated parts"
        sizes = (config.latent.rotated_size, config.latent.rank)
    multiple = numbers_per_element(PACKED_DTYPES.get(dtype, dtype))
    if uneven_sizes := [size for size in sizes if size % multiple]:
        message = (
            f"kv.dtype {dtype} needs {vectors} with sizes that are multiples of {multiple}, got"
            f" {uneven_sizes[0]}"
        )
        raise UserError(message, key="kv.dtype")
    return CachePlan(
        slots,
        dtype,
        _compression(config, kv, slots, calibration, round_up) if kv.compresses else None,
    )


def head_order(
    config: ModelConfig, kv: KVSection, calibration: KVCalibration | None = None
) -> HeadOrder | None:
    """Returns the key heads of each layer by descending share of the cache, the order that a
    compressed cache requires.

    None without compression.
    """
    if not kv.compresses:
        return None
    return tuple(
        tuple(np.argsort(-weights_K, kind="stable").tolist())
        for weights_K in _head_shares(config, kv, calibration)
    )


def fall_back_to_uniform(
    kv: KVSection, calibration: KVCalibration | None, remedy: str
) -> KVSection:
    """Returns the settings. If `kv.signal` was not measured, warns and returns a copy with the
    signal `uniform`.

    Args:
      remedy: what the user can do. It ends the warning that is given if `calibration` is None.
    """
    if not kv.compresses or kv.signal == "uniform":
        return kv
    reason = remedy if calibration is None else calibration.missing_signal(kv.signal)
    if not reason:
        return kv
    heads = "all heads" if kv.layer_ratios is None else "all heads of a layer"
    warnings.warn(f"{heads} get the same share of the cache: {reason}", stacklevel=4)
    return kv.model_copy(update={"signal": "uniform"})


@lru_cache(maxsize=4)
def _head_shares(
    config: ModelConfig, kv: KVSection, calibration: KVCalibration | None
) -> np.ndarray:
    """Returns the relative share of each key head `[L, K]`: that of the layer times that of the
    head.

    The share of a layer is its number in `kv.layer_ratios` divided by their mean, and that of a
    head follows from `kv.signal`. Without ratios all layers have equal shares, and without a
    calibration all heads.
    """
    ratios_L = np.asarray(kv.layer_ratios or (1.0,) * config.num_blocks)
    if len(ratios_L) != config.num_blocks:
        message = (
            f"kv.layer_ratios must have one number for each of the {config.num_blocks} layers, got"
            f" {len(ratios_L)}"
        )
        raise UserError(message, key="kv.layer_ratios")
    shares_LK: np.ndarray = (
        _signal_shares(config, kv, calibration) * (ratios_L / ratios_L.mean())[:, None]
    )
    return shares_LK


def _signal_shares(
    config: ModelConfig, kv: KVSection, calibration: KVCalibration | None
) -> np.ndarray:
    """Returns the relative share of each key head `[L, K]` by `kv.signal`; equal without a
    calibration.
    """
    if calibration is None or kv.signal == "uniform":
        return np.ones((config.num_blocks, config.kv_heads))
    measured = calibration.signal(kv.signal)
    if kv.signal == "loss":
        slots = calibration.loss_slots
        share = kv.budget or min(1.0, (kv.budget_tokens or 0) / slots[-1])
        return allocate_by_loss(measured, slots, share, _min_slots_per_head(kv))
    return head_weights(
        reduce_query_heads(measured, config.kv_heads, kv.grouping), kv.scale_min, kv.scale_max
    )


def _min_slots_per_head(kv: KVSection) -> int:
    """Returns the fewest slots of a head."""
    return -(-(kv.sinks + kv.recent) // SLOT_UNIT) * SLOT_UNIT


class _Policy(NamedTuple):
    """How the importance of keys is measured while a cache decodes, as in `Compression`; `decay`
    None: that of the settings.
    """

    window: int | None
    pool: int = 1
    decay: float | None = None
    fixed: str | None = None


def _policy(kv: KVSection) -> _Policy:
    policies = {
        "snapkv+ema": _Policy(kv.window, kv.pool),
        "expected_attention": _Policy(None),
        "kvzip": _Policy(None),
        "tova": _Policy(1, decay=0.0),
        "h2o": _Policy(None, decay=1.0),
        "streaming": _Policy(None, decay=0.0, fixed="position"),
        "random": _Policy(None, decay=0.0, fixed="hash"),
    }
    return policies[kv.policy]


def _total_slots(kv: KVSection, K: int, caps_L: Sequence[int], slots: int, round_up: bool) -> int:
    """Returns the slots of all heads together; the arguments are those of `plan_cache` and the
    sizes without compression.

    Raises:
      UserError: the budget is below the minimum per head.
    """
    floor = _min_slots_per_head(kv)
    tokens = kv.budget_tokens
    full = K * sum(caps_L)
    minimum = min_total(caps_L, K, floor)
    total = (
        int((kv.budget or 1) * full)
        if tokens is None
        else K * sum(min(tokens, cap) for cap in caps_L)
    )
    if minimum == full:  # nothing can be evicted at this length
        total = full
    if total < minimum and round_up and tokens is None:
        warnings.warn(
            f"kv.budget {kv.budget:g} is too small for {slots} tokens: each head needs {floor}"
            f" slots (kv.sinks + kv.recent, rounded up to {SLOT_UNIT}); using {minimum / full:.3g}",
            stacklevel=5,
        )
        total = minimum
    if total < minimum:
        if tokens is None:
            key = "kv.budget"
            given = f"{kv.budget:g}"
            least = f"{np.ceil(1000 * minimum / full) / 1000:g}"
        else:
            key = "kv.budget_tokens"
            given = str(tokens)
            least = str(floor)
        raise UserError(
            f"{key} {given} leaves {total // (K * len(caps_L))} slots per head for a sequence of"
            f" {slots} tokens, but each head needs {floor} (kv.sinks + kv.recent, rounded up to"
            f" {SLOT_UNIT}): set it to at least {least}",
            key=key,
        )
    return total


def _compression(
    config: ModelConfig,
    kv: KVSection,
    slots: int,
    calibration: KVCalibration | None,
    round_up: bool,
) -> Compression:
    K = config.kv_heads
    caps_L = uncompressed_slots(config, slots)
    floor = _min_slots_per_head(kv)
    total = _total_slots(kv, K, caps_L, slots, round_up)
    # If the budget permits, every full-length buffer is shortened by one unit, so that no buffer is
    # as long as the sequence.
    shorter_L = [
        cap - SLOT_UNIT if cap == slots and cap - SLOT_UNIT >= floor else cap for cap in caps_L
    ]
    allowed_L = shorter_L if K * sum(shorter_L) >= total else caps_L
    # In descending order, as in `head_order`.
    sorted_LK = -np.sort(-_head_shares(config, kv, calibration), axis=1)
    policy = _policy(kv)
    decay = kv.decay if policy.decay is None else policy.decay
    is_expected = kv.policy == "expected_attention"
    return Compression(
        groups=allocate_by_weight(sorted_LK, allowed_L, total, floor).groups,
        decays=(
            _decays(config, kv, calibration)
            if decay == "entropy"
            else ((decay,) * K,) * len(caps_L)
        ),
        window=policy.window,
        pool=policy.pool,
        fixed=policy.fixed,
        prompt={"expected_attention": "expected", "kvzip": "reconstruction"}.get(
            kv.policy, "attention"
        ),
        rotations=(
            tuple(config.rotation(layer) for layer in range(config.num_blocks))
            if is_expected
            else ()
        ),
        rotated=config.rotated_size if is_expected else 0,
        recency=kv.policy in AVERAGE_POLICIES,
        sinks=kv.sinks,
        recent=kv.recent,
        ratio=(kv.budget or total / (K * sum(caps_L))),
    )


def _decays(
    config: ModelConfig, kv: KVSection, calibration: KVCalibration | None
) -> tuple[tuple[float, ...], ...]:
    """Returns the decay factor of every head from its attention entropy, with the heads in the
    order of `head_order`.
    """
    if calibration is None:
        raise UserError(
            "kv.decay entropy needs the heads' entropies: run"
            " `dantinox calibrate --run_dir … --what kv`",
            key="kv.decay",
        )
    entropy_LK = reduce_query_heads(calibration.signal("entropy"), config.kv_heads, kv.grouping)
    decays_LK = 1 - 1 / (ENTROPY_LIFETIME * 2**entropy_LK)
    order = head_order(config, kv, calibration) or ()
    return tuple(
        tuple(decays_K[list(heads)].tolist())
        for decays_K, heads in zip(decays_LK, order, strict=True)
    )
