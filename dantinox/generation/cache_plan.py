"""`CachePlan`: the cache of a batch from the `kv` settings (slots per head, eviction policy, dtype)."""

import warnings
from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from dantinox.config import ModelConfig, UserError
from dantinox.config.kv_settings import AVERAGES, KVSection
from dantinox.config.model import uneven_keys
from dantinox.generation.cache_budgets import (
    UNIT,
    allocate_by_loss,
    allocate_by_weight,
    head_weights,
    min_total,
    reduce_query_heads,
)
from dantinox.generation.quantized_weights import HeadOrder
from dantinox.model import Compression, compute_dtype
from dantinox.model.cache import uncompressed_slots
from dantinox.run import KVCalibration

TAU = 16.0  # tokens an importance lasts under `decay: entropy` where a head attends to one key


class CachePlan(NamedTuple):
    """What a cache is made by, and so a program: its slots for a whole text, its dtype, and what each head keeps of them."""

    slots: int
    dtype: str
    compression: Compression | None = None


def plan_cache(
    config: ModelConfig, kv: KVSection, slots: int, calibration: KVCalibration | None = None, round_up: bool = False
) -> CachePlan:
    """The plan for texts of up to `slots` tokens; the model must have its heads in the `head_order` of the same settings.

    Args:
      calibration: what was measured on the model, where a signal or the decay reads it.
      round_up: use the least budget that is possible in the place of a `kv.budget` that is too small, with a warning.

    Raises:
      UserError: the budget is less than every head must have, what it is divided by was not measured, or the dtype does not
        fit the sizes of the heads.
    """
    if kv.compresses and config.latent is not None:
        raise UserError("kv.budget has no latent caches: heads share one latent, which no head can drop alone", key="kv.budget")
    if kv.compresses and (uneven := uneven_keys(config)) is not None:
        what = f"kv.budget must be null with {uneven}: it is divided among layers with keys of one shape"
        raise UserError(what, key="kv.budget")
    dtype = jnp.dtype(compute_dtype(config)).name if kv.dtype == "auto" else kv.dtype
    latent = config.latent
    sizes = (latent.rotated_size, latent.rank) if latent is not None else (
        config.head_size, config.global_head_size or config.head_size
    )  # fmt: skip
    if dtype == "int4" and any(size % 2 for size in sizes):
        raise UserError(f"kv.dtype int4 packs two numbers to a byte, and this model's keys have {max(sizes)}", key="kv.dtype")
    return CachePlan(slots, dtype, _compression(config, kv, slots, calibration, round_up) if kv.compresses else None)


def head_order(config: ModelConfig, kv: KVSection, calibration: KVCalibration | None = None) -> HeadOrder | None:
    """For each layer its key heads, those with the largest share first: as a compressed cache wants them in the model."""
    if not kv.compresses:
        return None
    return tuple(tuple(np.argsort(-weights_K, kind="stable").tolist()) for weights_K in _weights(config, kv, calibration))


def fall_back_to_uniform(kv: KVSection, calibration: KVCalibration | None, remedy: str) -> KVSection:
    """The settings with shares that are all alike, and a warning, where the signal they go by was not measured.

    Args:
      remedy: what to do where there is no calibration at all.
    """
    if not kv.compresses or kv.signal == "uniform":
        return kv
    lacking = remedy if calibration is None else calibration.missing_signal(kv.signal)
    if not lacking:
        return kv
    warnings.warn(f"every head gets the same share: {lacking}", stacklevel=4)
    return kv.model_copy(update={"signal": "uniform"})


@lru_cache(maxsize=4)
def _weights(config: ModelConfig, kv: KVSection, calibration: KVCalibration | None) -> np.ndarray:
    """Each key head's share `[L, K]` relative to the others; all alike without a calibration."""
    if calibration is None or kv.signal == "uniform":
        return np.ones((config.num_blocks, config.kv_heads))
    measured = calibration.signal(kv.signal)
    if kv.signal == "loss":
        slots = calibration.loss_slots
        share = kv.budget or min(1.0, (kv.budget_tokens or 0) / slots[-1])
        return allocate_by_loss(measured, slots, share, _floor(kv))
    return head_weights(reduce_query_heads(measured, config.kv_heads, kv.grouping), kv.scale_min, kv.scale_max)


def _floor(kv: KVSection) -> int:
    """The fewest slots of a head."""
    return -(-(kv.sinks + kv.recent) // UNIT) * UNIT


def _compression(
    config: ModelConfig, kv: KVSection, slots: int, calibration: KVCalibration | None, round_up: bool
) -> Compression:
    K, caps_L, floor, tokens = config.kv_heads, uncompressed_slots(config, slots), _floor(kv), kv.budget_tokens
    whole, least = K * sum(caps_L), min_total(caps_L, K, floor)
    wanted = int((kv.budget or 1) * whole) if tokens is None else K * sum(min(tokens, cap) for cap in caps_L)
    if least == whole:  # no text of this length has anything to give up
        wanted = whole
    if wanted < least and round_up and tokens is None:
        warnings.warn(
            f"kv.budget {kv.budget:g} is too small for {slots} tokens, of which each head needs {floor} (kv.sinks + kv.recent, "
            f"rounded up to {UNIT}): {least / whole:.3g} is used",
            stacklevel=4,
        )
        wanted = least
    if wanted < least:
        key = f"kv.budget {kv.budget:g}" if tokens is None else f"kv.budget_tokens {tokens}"
        raise UserError(
            f"{key} leaves {wanted // (K * len(caps_L))} slots for a head of a text of {slots} tokens, and each needs "
            f"{floor} (kv.sinks + kv.recent, rounded up to {UNIT}): give at least "
            + (f"{np.ceil(1000 * least / whole) / 1000:g}" if tokens is None else f"{floor}"),
            key="kv.budget" if tokens is None else "kv.budget_tokens",
        )
    # While something is compressed no buffer is as long as the text, if the budget can be spent without it.
    below_L = [cap - UNIT if cap == slots and cap - UNIT >= floor else cap for cap in caps_L]
    caps = below_L if K * sum(below_L) >= wanted else caps_L
    weights_LK = _weights(config, kv, calibration)
    window, pool, decay, fixed = {
        "snapkv+ema": (kv.window, kv.pool, kv.decay, None),
        "expected_attention": (None, 1, kv.decay, None),
        "kvzip": (None, 1, kv.decay, None),
        "tova": (1, 1, 0.0, None),
        "h2o": (None, 1, 1.0, None),
        "streaming": (None, 1, 0.0, "position"),
        "random": (None, 1, 0.0, "hash"),
    }[kv.policy]
    expects = kv.policy == "expected_attention"
    return Compression(
        groups=allocate_by_weight(-np.sort(-weights_LK, axis=1), caps, wanted, floor).groups,
        decays=_decays(config, kv, calibration) if decay == "entropy" else ((decay,) * K,) * len(caps_L),
        window=window,
        pool=pool,
        fixed=fixed,
        prompt={"expected_attention": "expected", "kvzip": "reconstruction"}.get(kv.policy, "attention"),
        rotations=tuple(config.rotation(layer) for layer in range(config.num_blocks)) if expects else (),
        rotated=config.rotated_size if expects else 0,
        recency=kv.policy in AVERAGES,
        sinks=kv.sinks,
        recent=kv.recent,
        ratio=(kv.budget or wanted / whole),
    )


def _decays(config: ModelConfig, kv: KVSection, calibration: KVCalibration | None) -> tuple[tuple[float, ...], ...]:
    """The factor g of every head by its entropy, in the order of `head_order`."""
    if calibration is None:
        raise UserError(
            "kv.decay entropy needs the heads' entropies: run `dantinox calibrate --run_dir … --what kv`", key="kv.decay"
        )
    decays_LK = 1 - 1 / (TAU * 2 ** reduce_query_heads(calibration.signal("entropy"), config.kv_heads, kv.grouping))
    order = head_order(config, kv, calibration) or ()
    return tuple(tuple(decays_K[list(heads)].tolist()) for decays_K, heads in zip(decays_LK, order, strict=True))
