"""The cache variants that `eval kv` compares on the same texts, prompts and tasks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import GenerationSection, KVSection, UserError
from dantinox.generation import LoadedModel
from dantinox.generation.decode.cache_plan import CachePlan, head_order, plan_cache
from dantinox.generation.decode.generate_toks import DECODE_CHUNK, prefill_hidden
from dantinox.generation.decode.quantized_weights import dequantize
from dantinox.generation.static_batch import StaticBatch, StaticOptions
from dantinox.lab.measure.head_loss import limited_logprobs, mean_kl, rows_per_batch
from dantinox.lab.measure.texts import equal_batches, map_batches, padded_positions
from dantinox.lab.studies.continuations import NEUTRAL_SETTINGS
from dantinox.lab.studies.kv_tasks import RecallTasks, Sequences, split_by_seed
from dantinox.lab.studies.statistics import LARGE_MODEL, select_names
from dantinox.model import CacheReport, KVCache, Transformer, make_cache
from dantinox.model.compressed_cache import CompressedLayer
from dantinox.report.console import Progress
from dantinox.run import KVCalibration
from dantinox.sampling import SamplingParams

REFERENCE, STREAMING, UNIFORM, ORACLE = "full", "streaming", "uniform", "oracle"
SIGNALS = ("entropy", "coverage", "distance", "loss")
# Name → settings of the section `kv` except the budget. The oracle is not a real cache: it keeps all keys, but each query
# attends only to the keys with its largest attention weights.
METHODS: dict[str, dict[str, Any]] = {
    STREAMING: {"policy": "streaming", "signal": "uniform"},
    UNIFORM: {"signal": "uniform"},
    **{signal: {"signal": signal} for signal in SIGNALS},
    "random": {"policy": "random", "signal": "uniform"},
    ORACLE: {"signal": "uniform"},
}
RATIOS = (0.5, 0.3, 0.2, 0.1)
# Defaults for models with more than `LARGE_MODEL` parameters, where compilation takes most of the time.
LARGE_METHODS = (STREAMING, UNIFORM, "distance", "loss", ORACLE)
LARGE_RATIOS = (0.5, 0.2)
NEAR_KEYS = 64  # keys that remain visible when the study measures the value of distant keys
FREE_TOKENS, FREE_ROWS = 64, 8
MIN_TIMED_BATCHES = 3  # the speed of the fastest batch is reported


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

    def logprobs(self, tokens_BT: np.ndarray, lengths_B: np.ndarray, start: int) -> jax.Array:
        """Returns next-token log-probabilities `[B, T − start + 1, V]` at the positions from `start − 1` on.

        The first `start` tokens are prefilled. The rest are read one by one, as in decoding.
        """
        inputs = self.model, jnp.asarray(tokens_BT, jnp.int32), jnp.asarray(lengths_B, jnp.int32)
        if self.name == ORACLE:
            return limited_logprobs(*inputs, self._kept_LK, jnp.full(len(tokens_BT), start), start=start, best=True)
        return _teacher_forced_logprobs(*inputs, plan=self.plan, start=start)

    def answer(self, tokens_BT: np.ndarray, lengths_B: np.ndarray) -> jax.Array:
        """Returns the most likely token `[B]` after a prompt, computed from the keys and values that the cache kept."""
        inputs = self.model, jnp.asarray(tokens_BT, jnp.int32), jnp.asarray(lengths_B, jnp.int32)
        if self.name != ORACLE:
            return _answer_from_cache(*inputs, plan=self.plan)
        start = int(lengths_B.min())
        logprobs = limited_logprobs(*inputs, self._kept_LK, inputs[2] - 1, start=start, best=True)
        return _argmax_at(logprobs, inputs[2] - start)

    @property
    def _kept_LK(self) -> jax.Array:
        """The number of slots of every key/value head."""
        assert self.plan.compression is not None
        return jnp.array([[slots for heads, slots in groups for _ in range(heads)] for groups in self.plan.compression.groups])


@nnx.jit(static_argnames=("plan", "start"), graph_updates=False)
def _teacher_forced_logprobs(
    model: Transformer, tokens_BT: jax.Array, lengths_B: jax.Array, *, plan: CachePlan, start: int
) -> jax.Array:
    """See `CacheVariant.logprobs`. Tokens are right-padded, and the padding is not read."""
    model, B = dequantize(model), len(tokens_BT)
    positions_BT = padded_positions(tokens_BT, lengths_B)
    empty = make_cache(model.config, B, *plan)
    x_BtD, cache = prefill_hidden(model, tokens_BT[:, :start], positions_BT[:, :start], empty)
    first_BV = model.logits(x_BtD[jnp.arange(B), jnp.minimum(lengths_B, start) - 1])

    def step(cache: KVCache | None, column: tuple[jax.Array, jax.Array]) -> tuple[KVCache | None, jax.Array]:
        token_B, position_B = column
        x_B1D, cache, _ = model.hidden(token_B[:, None], position_B[:, None], cache=cache)
        return cache, model.logits(x_B1D[:, 0])

    _, rest_SBV = jax.lax.scan(step, cache, (tokens_BT[:, start:].T, positions_BT[:, start:].T))
    logits_BSV = jnp.concatenate([first_BV[:, None], rest_SBV.transpose(1, 0, 2)], axis=1)
    return jax.nn.log_softmax(logits_BSV.astype(jnp.float32))


@nnx.jit(static_argnames=("plan",), graph_updates=False)
def _answer_from_cache(model: Transformer, tokens_BT: jax.Array, lengths_B: jax.Array, *, plan: CachePlan) -> jax.Array:
    """Returns the most likely token after a prompt whose last token is read twice, the second time with the compressed cache.

    During prefill every query sees the whole prompt, so the next token after prefill would not depend on the compression.
    """
    model = dequantize(model)
    B = len(tokens_BT)
    last_B = lengths_B - 1
    cache = make_cache(model.config, B, *plan)
    _, read = prefill_hidden(model, tokens_BT, padded_positions(tokens_BT, lengths_B), cache)
    assert read is not None
    layers = tuple(_clear_slot(layer, last_B) if isinstance(layer, CompressedLayer) else layer for layer in read.layers)
    last_B1 = tokens_BT[jnp.arange(B), last_B][:, None]
    x_B1D, _, _ = model.hidden(last_B1, last_B[:, None], cache=replace(read, layers=layers))
    return jnp.argmax(model.logits(x_B1D[:, 0]), axis=-1)


def _clear_slot(layer: CompressedLayer, position_B: jax.Array) -> CompressedLayer:
    """Empties the slot of one position of each row in a compressed layer. (A full cache overwrites the position in place.)"""
    gone_B11 = position_B[:, None, None]
    groups = [replace(g, position_BKS=jnp.where(g.position_BKS == gone_B11, -1, g.position_BKS)) for g in layer.groups]
    return CompressedLayer(tuple(groups))


@jax.jit
def _argmax_at(logprobs_BSV: jax.Array, at_B: jax.Array) -> jax.Array:
    """Returns the most likely token at one step of each row."""
    return jnp.argmax(logprobs_BSV[jnp.arange(len(at_B)), at_B], axis=-1)


def select_methods(
    names: Sequence[str] | None, measured: KVCalibration | None, path: Path, parameters: int = 0
) -> tuple[list[str], list[str]]:
    """Selects the methods to compare.

    Args:
      names: names of `METHODS`. None: all whose signal was measured, and for a model of more than `LARGE_MODEL` parameters
        only those of `LARGE_METHODS`.
      measured: the measured signals of the heads; None without a calibration.
      path: the run directory, for error messages.
      parameters: the number of parameters of the model.

    Returns:
      The methods in their usual order, and a line for each method that is left out.

    Raises:
      UserError: a name is unknown, or its method needs a signal that was not measured.
    """
    usual = LARGE_METHODS if names is None and parameters > LARGE_MODEL else METHODS
    found = [name for name in select_names(names, (*METHODS, REFERENCE), "method of eval kv") if name in usual]
    skipped = [f"{', '.join(sorted(METHODS.keys() - usual))}: name them in --methods"] if usual is LARGE_METHODS else []
    if not found:
        raise UserError(f"{REFERENCE} is the baseline of the comparison: name at least one of {', '.join(METHODS)}")
    signals = [name for name in found if name in SIGNALS]
    if not signals:
        return found, skipped
    if measured is None:
        raise UserError(
            f"{', '.join(signals)} cannot run without {path / 'kv_entropy.json'}: run `dantinox calibrate --run_dir {path} "
            "--what kv`, select another file with --kv_calibration, or name other methods in --methods"
        )
    missing = {name: measured.missing_signal(name) for name in signals if measured.missing_signal(name)}
    if missing and names is not None:
        raise UserError(next(iter(missing.values())))
    reasons = [f"{name}: {reason}" for name, reason in missing.items()]
    return [name for name in found if name not in missing], [*skipped, *reasons]


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
      ratios: shares of the slots; None: `RATIOS`, or `LARGE_RATIOS` for a model with more than `LARGE_MODEL` parameters.

    Returns:
      The caches, and a line for each ratio that is left out.

    Raises:
      UserError: a requested ratio, or the largest default ratio, leaves a head fewer slots than the minimum.
    """
    usual = LARGE_RATIOS if run.parameters > LARGE_MODEL else RATIOS

    def build(name: str, ratio: float, kv: KVSection) -> CacheVariant:
        plan = plan_cache(run.model.config, kv, length, measured)
        report = None if name == ORACLE else make_cache(run.model.config, 1, *plan).report()
        return CacheVariant(
            name, ratio, run.prepared(GenerationSection(), head_order(run.model.config, kv, measured)), plan, report
        )

    caches = [build(REFERENCE, 1.0, KVSection())]
    left_out = list[str]()
    for ratio in sorted(set(ratios or usual), reverse=True):
        settings = {name: {"budget": ratio, "dtype": dtype, **METHODS[name]} for name in names}
        try:
            caches += [build(name, ratio, KVSection.model_validate(kv)) for name, kv in settings.items()]
        except UserError as error:
            if ratios is not None or ratio == max(usual):
                raise
            left_out.append(f"ratio {ratio:g}: {error}")
    return caches, left_out


class GreedyContinuations(NamedTuple):
    """Continuations `[P, T]` of P prompts, and the tokens per second of the fastest batch."""

    ids: np.ndarray
    rate: float


class ReadMetrics(NamedTuple):
    """Per sequence: mean loss and mean KL(full ‖ compressed) in nats per token, share of steps with the same top token."""

    loss_B: np.ndarray
    kl_B: np.ndarray
    top1_B: np.ndarray


def read_metrics(logprobs_BSV: jax.Array, full_BSV: jax.Array, tokens_BT: np.ndarray, start: int) -> ReadMetrics:
    """Compares the log-probabilities of a cache with those of the full cache, over the tokens after the prompt."""
    found = _read_metrics(logprobs_BSV[:, :-1], full_BSV[:, :-1], jnp.asarray(tokens_BT[:, start:]))
    return ReadMetrics(*(np.asarray(x_B, np.float64) for x_B in found))


@jax.jit
def _read_metrics(ours_BSV: jax.Array, full_BSV: jax.Array, next_BS: jax.Array) -> tuple[jax.Array, ...]:
    logp_BS = jnp.take_along_axis(ours_BSV, next_BS[:, :, None], axis=2)[..., 0]
    same_BS = jnp.argmax(ours_BSV, axis=2) == jnp.argmax(full_BSV, axis=2)
    return -logp_BS.mean(1), mean_kl(ours_BSV, full_BSV, jnp.ones_like(same_BS)), same_BS.mean(1)


@dataclass(frozen=True)
class CacheBenchmark:
    """Caches for sequences of one length, the full cache first. `progress` is called with progress lines."""

    caches: Sequence[CacheVariant]
    progress: Callable[[str], None] = lambda _: None

    def measure_text(self, text: Sequences) -> tuple[list[ReadMetrics], ReadMetrics]:
        """Scores the second half of every sequence through each cache, and with only the nearest `NEAR_KEYS` keys visible."""
        caches = [*self.caches, near_keys_variant(self.caches[0])]
        S, T = text.ids.shape

        def read(rows: np.ndarray, done: Progress) -> list[ReadMetrics]:
            ids_BT = text.ids[rows]
            lengths_B = np.full(len(rows), T)
            full = caches[0].logprobs(ids_BT, lengths_B, T // 2)
            found = []
            for cache in caches:  # one at a time: the log-probabilities are large
                logprobs = full if cache is caches[0] else cache.logprobs(ids_BT, lengths_B, T // 2)
                found.append(read_metrics(logprobs, full, ids_BT, T // 2))
                done.advance()
            return found

        found = self._map_batches("reading sequences", S, len(caches), read)
        return found[:-1], found[-1]

    def measure_tasks(self, tasks: RecallTasks) -> list[dict[str, np.ndarray]]:
        """Returns which tasks each cache answers correctly: `{"needle_aware": [P], …}`.

        With `aware`, the question is part of the prompt when the cache chooses what to keep. With `agnostic`, the question is
        read afterwards, token by token. Both answer from the compressed cache.
        """

        def agnostic(cache: CacheVariant, tokens_BT: np.ndarray, lengths_B: np.ndarray) -> jax.Array:
            return _argmax_at(cache.logprobs(tokens_BT, lengths_B, tasks.context), jnp.asarray(lengths_B - tasks.context))

        found: list[dict[str, np.ndarray]] = [{} for _ in self.caches]
        for name, answer in (("aware", CacheVariant.answer), ("agnostic", agnostic)):

            def read(rows: np.ndarray, done: Progress, answer: Callable[..., jax.Array] = answer) -> list[np.ndarray]:
                right = []
                for cache in self.caches:
                    right.append(np.asarray(answer(cache, tasks.tokens[rows], tasks.lengths[rows])) == tasks.answers[rows])
                    done.advance()
                return right

            each = self._map_batches(f"recall tasks, question-{name}", len(tasks.tokens), len(self.caches), read)
            for one, right_P in zip(found, each, strict=True):
                one |= {f"needle_{name}": right_P[tasks.needles], f"copy_{name}": right_P[~tasks.needles]}
        return found

    def continue_prompts(self, run: LoadedModel, text: Sequences, count: int) -> list[GreedyContinuations | None]:
        """Continues the first halves of `count` sequences greedily with each cache; None for the oracle."""
        T = text.ids.shape[1]
        tokens = min(FREE_TOKENS, T - T // 2)
        picked = [np.flatnonzero(text.seeds == seed)[:share] for seed, share in enumerate(split_by_seed(count))]
        prompts_PT = text.ids[np.concatenate(picked), : T // 2]
        P = len(prompts_PT)
        special = sorted(run.tokenizer.special_ids)
        settings = {**NEUTRAL_SETTINGS, "greedy": True, "banned_tokens": special, "max_new_tokens": tokens, "seed": 0}
        params = run.params([run.settings(settings)] * FREE_ROWS)
        parts: list[list[GreedyContinuations]] = [[] for _ in self.caches]
        count = max(MIN_TIMED_BATCHES, -(-P // FREE_ROWS))
        done = self._start_progress("continuing prompts", count * len(self.caches))
        for rows in equal_batches(FREE_ROWS * count, FREE_ROWS):
            for cache, own in zip(self.caches, parts, strict=True):
                if cache.name != ORACLE:
                    own.append(_generate_batch(cache, prompts_PT[rows % P], params, tokens))
                done.advance()
        return [
            GreedyContinuations(np.concatenate([part.ids for part in own])[:P], max(part.rate for part in own)) if own else None
            for own in parts
        ]

    def _map_batches(self, task: str, count: int, caches: int, read: Callable[[np.ndarray, Progress], Any]) -> Any:
        """Applies `read` to all sequences in batches as large as memory allows. Progress counts each batch once per cache."""
        scored = -(-self.caches[0].plan.slots // 2)  # the other half is the prompt
        max_size = rows_per_batch(self.caches[0].model.config, scored)
        done = self._start_progress(task, -(-count // max_size) * caches)
        return map_batches(count, max_size, lambda rows: read(rows, done))

    def _start_progress(self, task: str, total: int) -> Progress:
        # Drop programs compiled earlier: each takes hundreds of memory maps, and Linux allows 65,530 per process.
        jax.clear_caches()
        return Progress(self.progress, task, total, "batches, one for each cache")


def near_keys_variant(full: CacheVariant) -> CacheVariant:
    """Returns the full cache with a model in which every layer sees only the nearest `NEAR_KEYS` keys."""
    model = nnx.clone(full.model)
    windows = tuple(NEAR_KEYS if window is None else min(NEAR_KEYS, window) for window in model.config.windows)
    model.config = replace(model.config, windows=windows)
    for block, window in zip(model.blocks, windows, strict=True):
        block.attention.window = window
    return full._replace(name="near_keys", model=model)


def _generate_batch(cache: CacheVariant, prompts_BT: np.ndarray, params: SamplingParams, tokens: int) -> GreedyContinuations:
    B, T = prompts_BT.shape
    limits_B = np.full(B, tokens)
    eos_ids = [list[int]()] * B
    options = StaticOptions(plan=cache.plan)
    batch = StaticBatch(cache.model, prompts_BT, np.full(B, T), params, limits_B=limits_B, eos_ids=eos_ids, options=options)
    ids_BT = np.concatenate([chunk.tokens for chunk in batch.run(DECODE_CHUNK)], axis=1)
    return GreedyContinuations(ids_BT, B * (tokens - 1) / max(batch.times.decoding, 1e-9))
