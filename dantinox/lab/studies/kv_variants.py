"""The cache variants that `eval kv` and `eval ruler` compare: one table of methods, and the models
and plans built from it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import GenerationSection, KVSection, UserError
from dantinox.generation import LoadedModel
from dantinox.generation.decode.cache_plan import CachePlan, head_order, plan_cache
from dantinox.generation.decode.generate_toks import prefill_hidden, read_token
from dantinox.generation.decode.prepared_model import dequantize
from dantinox.lab.measure.head_loss import limited_logprobs
from dantinox.lab.measure.texts import padded_positions
from dantinox.lab.studies.statistics import LARGE_MODEL, select_names
from dantinox.model import CacheReport, KVCache, Transformer, make_cache
from dantinox.model.compressed_cache import CompressedLayer
from dantinox.run import KVCalibration

# Methods that the code names.
REFERENCE = "full"
STREAMING = "streaming"
UNIFORM = "uniform"
ORACLE = "oracle"
SIGNALS = ("entropy", "coverage", "distance", "loss")
# Name → settings of the section `kv` except the budget and the dtype. The oracle is not a real
# cache: it keeps all keys, but each query attends only to the keys with its largest attention
# weights.
METHODS: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    STREAMING: {"policy": "streaming", "signal": "uniform"},
    UNIFORM: {"signal": "uniform"},
    **{signal: {"signal": signal} for signal in SIGNALS},
    "random": {"policy": "random", "signal": "uniform"},
    ORACLE: {"signal": "uniform"},
    "expected_attention": {"policy": "expected_attention", "signal": "uniform"},
    "expected_attention+loss": {"policy": "expected_attention", "signal": "loss"},
    "kvzip": {"policy": "kvzip", "signal": "uniform"},
    "kvzip+loss": {"policy": "kvzip", "signal": "loss"},
}
RATIOS = (0.5, 0.3, 0.2, 0.1)
# For models with more than `LARGE_MODEL` parameters, where compilation takes most of the time.
LARGE_RATIOS = (0.5, 0.2)
NEAR_KEYS = 64  # keys that remain visible when `eval kv` measures the value of distant keys


class CacheVariant(NamedTuple):
    """A cache to compare, and the model with its heads in the order that the cache needs.

    Attributes:
      ratio: requested share of the slots.
      report: the report of a cache with one row; None for the oracle.
    """

    name: str
    ratio: float
    model: Transformer
    plan: CachePlan
    report: CacheReport | None = None

    @property
    def known_report(self) -> CacheReport:
        """The report of the cache.

        Raises:
          ValueError: the cache is the oracle.
        """
        if self.report is None:
            raise ValueError(f"{self.name} has no report")
        return self.report

    def logprobs(self, tokens_BT: np.ndarray, lengths_B: np.ndarray, start: int) -> jax.Array:
        """Returns next-token log-probabilities `[B, T − start + 1, V]` at the positions from
        `start − 1` on.

        The first `start` tokens are prefilled. The rest are read one by one, as in decoding.
        """
        inputs = self.model, jnp.asarray(tokens_BT, jnp.int32), jnp.asarray(lengths_B, jnp.int32)
        if self.name == ORACLE:
            return limited_logprobs(
                *inputs, self._kept_LK, jnp.full(len(tokens_BT), start), start=start, best=True
            )
        return _teacher_forced_logprobs(*inputs, plan=self.plan, start=start)

    def answer(self, tokens_BT: np.ndarray, lengths_B: np.ndarray) -> jax.Array:
        """Returns the most likely token `[B]` after a prompt, computed from the keys and values
        that the cache kept.
        """
        inputs = self.model, jnp.asarray(tokens_BT, jnp.int32), jnp.asarray(lengths_B, jnp.int32)
        if self.name != ORACLE:
            return _answer_from_cache(*inputs, plan=self.plan)
        start = int(lengths_B.min())
        logprobs = limited_logprobs(*inputs, self._kept_LK, inputs[2] - 1, start=start, best=True)
        return argmax_at(logprobs, inputs[2] - start)

    @property
    def _kept_LK(self) -> jax.Array:
        """The number of slots of every key/value head."""
        assert self.plan.compression is not None
        return jnp.array(
            [
                [slots for heads, slots in groups for _ in range(heads)]
                for groups in self.plan.compression.groups
            ]
        )


@nnx.jit(static_argnames=("plan", "start"), graph_updates=False)
def _teacher_forced_logprobs(
    model: Transformer, tokens_BT: jax.Array, lengths_B: jax.Array, *, plan: CachePlan, start: int
) -> jax.Array:
    """See `CacheVariant.logprobs`. Tokens are right-padded, and the padding is not read."""
    model = dequantize(model)
    B = len(tokens_BT)
    positions_BT = padded_positions(tokens_BT, lengths_B)
    empty = make_cache(model.config, B, *plan)
    x_BtD, cache = prefill_hidden(model, tokens_BT[:, :start], positions_BT[:, :start], empty)
    assert cache is not None
    first_BV = model.logits(x_BtD[jnp.arange(B), jnp.minimum(lengths_B, start) - 1])

    def step(cache: KVCache, column: tuple[jax.Array, jax.Array]) -> tuple[KVCache, jax.Array]:
        step_logits, cache = read_token(model, cache, *column)
        return cache, step_logits.logits

    _, rest_SBV = jax.lax.scan(step, cache, (tokens_BT[:, start:].T, positions_BT[:, start:].T))
    logits_BSV = jnp.concatenate([first_BV[:, None], rest_SBV.transpose(1, 0, 2)], axis=1)
    return jax.nn.log_softmax(logits_BSV.astype(jnp.float32))


@nnx.jit(static_argnames=("plan",), graph_updates=False)
def _answer_from_cache(
    model: Transformer, tokens_BT: jax.Array, lengths_B: jax.Array, *, plan: CachePlan
) -> jax.Array:
    """Returns the most likely token after a prompt whose last token is read twice, the second time
    with the compressed cache.

    During prefill every query sees the whole prompt, so the next token after prefill would not
    depend on the compression.
    """
    model = dequantize(model)
    B = len(tokens_BT)
    last_B = lengths_B - 1
    empty = make_cache(model.config, B, *plan)
    _, cache = prefill_hidden(model, tokens_BT, padded_positions(tokens_BT, lengths_B), empty)
    assert cache is not None
    layers = tuple(
        _clear_slot(layer, last_B) if isinstance(layer, CompressedLayer) else layer
        for layer in cache.layers
    )
    step_logits, _ = read_token(
        model, replace(cache, layers=layers), tokens_BT[jnp.arange(B), last_B], last_B
    )
    return jnp.argmax(step_logits.logits, axis=-1)


def _clear_slot(layer: CompressedLayer, position_B: jax.Array) -> CompressedLayer:
    """Empties the slot of one position of each row in a compressed layer. (A full cache overwrites
    the position in place.)
    """
    cleared_B11 = position_B[:, None, None]
    groups = [
        replace(
            group, position_BKS=jnp.where(group.position_BKS == cleared_B11, -1, group.position_BKS)
        )
        for group in layer.groups
    ]
    return CompressedLayer(tuple(groups))


@jax.jit
def argmax_at(logprobs_BSV: jax.Array, at_B: jax.Array) -> jax.Array:
    """Returns the most likely token at one step of each row."""
    return jnp.argmax(logprobs_BSV[jnp.arange(len(at_B)), at_B], axis=-1)


def select_methods(
    names: Sequence[str] | None,
    known: Sequence[str],
    measured: KVCalibration | None,
    path: Path,
    study: str,
    *,
    usual: Sequence[str] | None = None,
    needs_calibration: bool = False,
) -> tuple[list[str], list[str]]:
    """Selects the methods to compare.

    Args:
      names: names in `known`; None: those of `usual` whose signal was measured.
      known: the names in `METHODS` that the study accepts.
      measured: the measured signals of the heads; None without a calibration.
      path: the run directory, for error messages.
      study: the command, for error messages.
      usual: the methods to compare by default; None: all.
      needs_calibration: whether methods without a calibration are an error even if no method was
        named.

    Returns:
      The methods in the order of `known`, and a line for each method that is left out.

    Raises:
      UserError: a name is unknown, or its method needs a signal that was not measured.
    """
    found = select_names(names, known, f"method of {study}")
    left_out = list[str]()
    if names is None and usual is not None:
        unusual = sorted(set(found) - {*usual, REFERENCE})
        if unusual:
            left_out.append(f"{', '.join(unusual)}: name them in --methods")
        found = [name for name in found if name in usual]
    reasons = {name: reason for name in found if (reason := _missing_signal(name, measured))}
    if reasons and measured is None and (needs_calibration or names is not None):
        raise UserError(
            f"{', '.join(reasons)} cannot run without {path / 'kv_entropy.json'}: run `dantinox"
            f" calibrate --run_dir {path} --what kv`, select another file with --kv_calibration, or"
            " name other methods in --methods"
        )
    if reasons and names is not None:
        raise UserError(next(iter(reasons.values())))
    left_out += [f"{name}: {reason}" for name, reason in reasons.items()]
    return [name for name in found if name not in reasons], left_out


def _missing_signal(name: str, measured: KVCalibration | None) -> str:
    """Returns why a method cannot run: its signal was not measured. Returns "" if it can run."""
    signal = METHODS[name].get("signal", UNIFORM)
    if signal == UNIFORM:
        return ""
    if measured is None:
        return "run `dantinox calibrate --what kv`, or select a file with --kv_calibration"
    return measured.missing_signal(signal)


def check_ratios(ratios: Sequence[float] | None) -> None:
    """Raises UserError unless all ratios are between 0 and 1."""
    for ratio in ratios or ():
        if not 0 < ratio < 1:
            raise UserError(f"--ratios must be between 0 and 1, got {ratio:g}")


def build_variants(
    run: LoadedModel,
    measured: KVCalibration | None,
    names: Sequence[str],
    ratios: Sequence[float] | None,
    length: int,
    dtype: str = "auto",
) -> tuple[list[CacheVariant], list[str]]:
    """Builds the full cache and every method at every ratio.

    Args:
      names: names in `METHODS`; the full cache is always built, and is first.
      ratios: shares of the slots; None: `RATIOS`, or `LARGE_RATIOS` for a model with more than
        `LARGE_MODEL` parameters.

    Returns:
      The caches, and a line for each ratio that is left out.

    Raises:
      UserError: a requested ratio, or the largest default ratio, leaves a head fewer slots than the
        minimum.
    """
    usual = LARGE_RATIOS if run.parameters > LARGE_MODEL else RATIOS

    def build(name: str, ratio: float, **settings: Any) -> CacheVariant:
        kv = KVSection.model_validate({**settings, **METHODS[name]})
        plan = plan_cache(run.model.config, kv, length, measured)
        report = None if name == ORACLE else make_cache(run.model.config, 1, *plan).report()
        model = run.prepared(GenerationSection(), head_order(run.model.config, kv, measured))
        return CacheVariant(name, ratio, model, plan, report)

    caches = [build(REFERENCE, 1.0)]
    left_out = list[str]()
    for ratio in sorted(set(ratios or usual), reverse=True):
        try:
            caches += [
                build(name, ratio, budget=ratio, dtype=dtype) for name in names if name != REFERENCE
            ]
        except UserError as error:
            if ratios is not None or ratio == max(usual):
                raise
            left_out.append(f"ratio {ratio:g}: {error}")
    return caches, left_out


def near_keys_variant(full: CacheVariant) -> CacheVariant:
    """Returns the full cache with a model in which every layer sees only the nearest `NEAR_KEYS`
    keys.
    """
    model = nnx.clone(full.model)
    windows = tuple(
        NEAR_KEYS if window is None else min(NEAR_KEYS, window) for window in model.config.windows
    )
    model.config = replace(model.config, windows=windows)
    for block, window in zip(model.blocks, windows, strict=True):
        block.attention.window = window
    return full._replace(name="near_keys", model=model)
