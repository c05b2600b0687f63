"""`dantinox eval ruler`: the tasks of RULER with compressed caches.

There are two modes. With `agnostic`, the cache of the prompt is compressed before the question is read, token by token. With
`aware`, the question is part of the prompt, and only its last token is read after the compression. In both modes, the answer is
then decoded greedily from the compressed cache.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import GenerationSection, KVSection, UserError
from dantinox.generation import LoadedModel, load
from dantinox.generation.decode.cache_plan import CachePlan, head_order, plan_cache
from dantinox.generation.decode.generate_toks import COMPRESSED_PREFILL_CHUNK, DECODE_CHUNK, prefill_hidden
from dantinox.generation.decode.quantized_weights import MAX_MATVEC_ROWS, dequantize
from dantinox.lab.measure.texts import equal_batches, pad_rows
from dantinox.lab.studies.ruler_tasks import TASKS, Sample, build_haystack, make_sample, match_score, python_manual
from dantinox.lab.studies.statistics import Interval, mean_interval, select_names
from dantinox.model import CacheReport, KVCache, Transformer, make_cache
from dantinox.report.console import Progress
from dantinox.run import KVCalibration, open_run
from dantinox.text import Corpus

FULL = "full"
SIGNALS = ("entropy", "distance", "loss")
# Name → settings of the section `kv` except the budget and the dtype.
METHODS: dict[str, dict[str, Any]] = {
    FULL: {},
    "streaming": {"policy": "streaming", "signal": "uniform"},
    "uniform": {"signal": "uniform"},
    **{signal: {"signal": signal} for signal in SIGNALS},
    "expected_attention": {"policy": "expected_attention", "signal": "uniform"},
    "expected_attention+loss": {"policy": "expected_attention", "signal": "loss"},
    "kvzip": {"policy": "kvzip", "signal": "uniform"},
    "kvzip+loss": {"policy": "kvzip", "signal": "loss"},
}
LENGTHS = (2048, 4096)
RATIOS = (0.5, 0.2)
SAMPLES = 10
MIN_LENGTH = 256
ROW_TOKENS = 8192  # prompt tokens per batch
TEXT_CHARACTERS = 1 << 21  # read from a given text at most
QUESTION_MODES = ("agnostic", "aware")  # the question is read after the compression, or is part of the prompt


class RulerCache(NamedTuple):
    """A cache to compare at one length, and the model with its heads in the order that the cache needs."""

    method: str
    ratio: float
    model: Transformer
    plan: CachePlan
    report: CacheReport


@dataclass(frozen=True)
class RulerResult:
    """The scores of a cache at one length.

    Attributes:
      bytes: bytes of one row.
      share: `bytes` relative to the full cache in the compute dtype.
      scores: `agnostic` or `aware` → task → score in %, and the score of all tasks as `mean`.
      prefill_seconds: median prefill time of one prompt; None with a single batch.
      tokens_per_second: median decoding speed of a batch; None with a single batch.
    """

    method: str
    length: int
    ratio: float
    dtype: str
    bytes: int
    share: float
    scores: Mapping[str, Mapping[str, Interval]]
    prefill_seconds: float | None
    tokens_per_second: float | None


@dataclass(frozen=True)
class RulerStudy:
    """The conditions, and the results of every cache at every length.

    Attributes:
      text: the source of the essays.
      samples: samples of each task.
      left_out: methods that were left out, with reasons.
    """

    run: str
    calibration: str | None
    device: str
    text: str
    tasks: Sequence[str]
    samples: int
    seed: int
    left_out: Sequence[str]
    findings: Sequence[RulerResult]


def evaluate_ruler(
    run_dir: str | Path,
    *,
    lengths: Sequence[int] | None = None,
    methods: Sequence[str] | None = None,
    ratios: Sequence[float] | None = None,
    samples: int = SAMPLES,
    tasks: str | None = None,
    data_path: str | Path | None = None,
    kv_calibration: str | Path | None = None,
    kv_dtype: str = "auto",
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> RulerStudy:
    """Generates RULER's tasks and evaluates the model on them with each cache.

    Args:
      lengths: tokens of a prompt together with its answer; None: those of `LENGTHS` that the context allows.
      methods: names of `METHODS`; None: all whose signal was measured.
      ratios: shares of the slots; None: `RATIOS`.
      samples: samples of each task.
      tasks: names of `TASKS`, separated by commas; None: all.
      data_path: the text that essays and words are taken from, in the form of `data.path`; None: Python's manual.
      kv_calibration: the file of measured signals; None: that of the run.
      kv_dtype: dtype of the compressed caches, a value of `kv.dtype`; the full cache has the compute dtype.
      seed: seed of the samples.
      progress: called with a line at the start of each part of the work and then every few seconds.

    Raises:
      UserError: a name or number is invalid, a task does not fit in a length, or the run was not calibrated.
    """
    directory, run = open_run(run_dir), load(run_dir)
    context = run.model.config.max_context
    for length in lengths or ():
        if not MIN_LENGTH <= length <= context:
            raise UserError(f"--lengths must be in [{MIN_LENGTH}, {context}], the model's context, got {length}")
    sizes = sorted(set(lengths or [length for length in LENGTHS if length <= context] or [context]))
    if samples < 1:
        raise UserError(f"--samples must be at least 1, got {samples}")
    for ratio in ratios or ():
        if not 0 < ratio < 1:
            raise UserError(f"--ratios must be between 0 and 1, got {ratio:g}")
    names = select_names(None if tasks is None else tasks.split(","), TASKS, "task of RULER")
    measured = run.kv_calibration(None if kv_calibration is None else str(kv_calibration))
    found, left_out = _select_methods(methods, measured)
    haystack = python_manual() if data_path is None else build_haystack(_read_haystack(run, str(data_path)), str(data_path))
    findings: list[RulerResult] = []
    for length in sizes:
        caches = _build_caches(run, measured, found, sorted(set(ratios or RATIOS), reverse=True), length, kv_dtype)
        drawn = {
            name: [make_sample(name, length, run.tokenizer.encode, haystack, seed, i) for i in range(samples)] for name in names
        }
        findings += _evaluate_caches(run, caches, drawn, length, progress)
    return RulerStudy(
        run=str(directory.path),
        calibration=None if measured is None else str(measured.path),
        device=jax.devices()[0].device_kind,
        text="Python's manual" if data_path is None else str(data_path),
        tasks=names,
        samples=samples,
        seed=seed,
        left_out=left_out,
        findings=findings,
    )


def _read_haystack(run: LoadedModel, path: str) -> str:
    parts = list[str]()
    count = 0
    for _, part in Corpus.open(path, run.config.data.text_field).read_text():
        parts.append(part)
        count += len(part)
        if count >= TEXT_CHARACTERS:
            break
    return "".join(parts)[:TEXT_CHARACTERS]


def _select_methods(names: Sequence[str] | None, measured: KVCalibration | None) -> tuple[list[str], list[str]]:
    """Returns the methods of these names (None: all whose signal was measured), and a line for each that is left out."""
    found, left_out = [], []
    for name in select_names(names, METHODS, "method of eval ruler"):
        signal = METHODS[name].get("signal", "uniform")
        hint = "run `dantinox calibrate --what kv`, or select a file with --kv_calibration"
        reason = "" if signal == "uniform" else hint if measured is None else measured.missing_signal(signal)
        if reason and names is not None:
            raise UserError(f"the method {name} needs a signal that was not measured: {reason}")
        if reason:
            left_out.append(f"{name}: {reason}")
        else:
            found.append(name)
    return found, left_out


def _build_caches(
    run: LoadedModel, measured: KVCalibration | None, names: Sequence[str], ratios: Sequence[float], length: int, dtype: str
) -> list[RulerCache]:
    """Builds every method at every ratio; the full cache has one ratio."""

    def cache(name: str, ratio: float) -> RulerCache:
        budget = {} if name == FULL else {"budget": ratio, "dtype": dtype}
        kv = KVSection.model_validate(budget | METHODS[name])
        plan = plan_cache(run.model.config, kv, length, measured)
        model = run.prepared(GenerationSection(), head_order(run.model.config, kv, measured))
        return RulerCache(name, ratio, model, plan, make_cache(run.model.config, 1, *plan).report())

    return [cache(name, ratio) for name in names for ratio in ((1.0,) if name == FULL else ratios)]


class EvalBatch(NamedTuple):
    """A batch of samples: prompts to prefill, and question tokens to read one by one before the answer."""

    task: str
    prompts: list[list[int]]
    questions: list[list[int]]
    new_tokens: int

    def num_calls(self, length: int) -> int:
        """Returns the number of compiled calls for the batch."""
        return -(-length // COMPRESSED_PREFILL_CHUNK) + -(-self.steps // DECODE_CHUNK)

    @property
    def steps(self) -> int:
        return max(map(len, self.questions)) + self.new_tokens


SamplesByTask = Mapping[str, Sequence[Sample]]


def _make_batches(run: LoadedModel, drawn: SamplesByTask, length: int, aware: bool) -> Iterator[tuple[EvalBatch, list[Sample]]]:
    rows = max(1, ROW_TOKENS // length)
    for task, samples in drawn.items():
        for indices in equal_batches(len(samples), min(rows, len(samples))):
            batch = [samples[index] for index in indices]
            pairs = [(run.prompt_ids(sample.context), run.tokenizer.encode(sample.question)) for sample in batch]
            if aware:
                pairs = [([*prompt, *question[:-1]], question[-1:]) for prompt, question in pairs]
            prompts, questions = (list(side) for side in zip(*pairs, strict=True))
            yield EvalBatch(task, prompts, questions, batch[0].new_tokens), batch


def _evaluate_caches(
    run: LoadedModel, caches: Sequence[RulerCache], drawn: SamplesByTask, length: int, progress: Callable[[str], None]
) -> Iterator[RulerResult]:
    stops = {run.tokenizer.eos_id, *run.tokenizer.stop_ids}
    jobs = {mode: list(_make_batches(run, drawn, length, mode == "aware")) for mode in QUESTION_MODES}
    total = sum(job.num_calls(length) for own in jobs.values() for job, _ in own)
    done = Progress(progress, f"RULER at {length} tokens", total * len(caches), "calls")
    full = make_cache(run.model.config, 1, *plan_cache(run.model.config, KVSection(), length)).report()["bytes"]
    for cache in caches:
        jax.clear_caches()
        scores: dict[str, dict[str, Interval]] = {}
        times: list[tuple[float, float]] = []
        for mode in QUESTION_MODES:
            right: defaultdict[str, list[float]] = defaultdict(list)
            for job, samples in jobs[mode]:
                ids_BT, *seconds = _generate_answers(cache, job, length, done)
                times.append((seconds[0] / len(ids_BT), len(ids_BT) * job.steps / seconds[1]))
                for row, sample in enumerate(samples):
                    if len(right[job.task]) < len(drawn[job.task]):  # the last batch is padded with the first samples
                        answer = ids_BT[row, len(job.questions[row]) - 1 :][: sample.new_tokens].tolist()
                        end = next((i for i, token in enumerate(answer) if token in stops), len(answer))
                        right[job.task].append(100 * match_score(run.tokenizer.decode(answer[:end]), sample))
            scores[mode] = {task: mean_interval(np.array(values)) for task, values in right.items()}
            scores[mode]["mean"] = mean_interval(np.concatenate(list(right.values())))
        lines = {mode: ", ".join(f"{task} {one.value:.0f}" for task, one in own.items()) for mode, own in scores.items()}
        summary = "; ".join(f"{mode}: {line}" for mode, line in lines.items())
        progress(f"{cache.method} at {cache.ratio:g} of {length} tokens, in %: {summary}")
        prefill, rate = (float(np.median(side)) for side in zip(*times[1:], strict=True)) if len(times) > 1 else (None, None)
        yield RulerResult(
            cache.method, length, cache.ratio, cache.report["dtype"], cache.report["bytes"], cache.report["bytes"] / full,
            scores, prefill, rate,
        )  # fmt: skip


def _generate_answers(cache: RulerCache, job: EvalBatch, length: int, done: Progress) -> tuple[np.ndarray, float, float]:
    """Returns the most likely token after each question or answer token, `[B, steps]`, and seconds of prefill and decoding."""
    started = time.perf_counter()
    note = f", {cache.method} at {cache.ratio:g}"
    parts = -(-length // COMPRESSED_PREFILL_CHUNK)
    size = -(-length // parts)
    tokens_BT, lengths_B = pad_rows(job.prompts, parts * size)
    positions_BT = np.where(np.arange(parts * size) < lengths_B[:, None], np.arange(parts * size), -1).astype(np.int32)
    memory: KVCache = make_cache(cache.model.config, len(tokens_BT), *cache.plan)
    for part in range(parts):
        columns = slice(part * size, (part + 1) * size)
        memory = _prefill_part(cache.model, memory, jnp.asarray(tokens_BT[:, columns]), jnp.asarray(positions_BT[:, columns]))
        jax.block_until_ready(memory)
        done.advance(1, note)
    prefilled = time.perf_counter()
    questions_BQ, counts_B = pad_rows(job.questions, length)
    last_B = jnp.zeros(len(tokens_BT), jnp.int32)
    found = []
    for start in range(0, job.steps, DECODE_CHUNK):
        rest = (jnp.asarray(questions_BQ), jnp.asarray(counts_B), jnp.asarray(lengths_B), jnp.int32(start))
        memory, last_B, ids_BC = _decode(cache.model, memory, last_B, *rest)
        found.append(np.asarray(ids_BC))
        done.advance(1, note)
    return np.concatenate(found, axis=1), prefilled - started, time.perf_counter() - prefilled


@nnx.jit(donate_argnames=("cache",), graph_updates=False)
def _prefill_part(model: Transformer, cache: KVCache, tokens_BT: jax.Array, positions_BT: jax.Array) -> KVCache:
    """Prefills a part of the prompts and returns the cache."""
    _, after = prefill_hidden(dequantize(model), tokens_BT, positions_BT, cache)
    assert after is not None
    return after


@nnx.jit(donate_argnames=("cache",), graph_updates=False)
def _decode(
    model: Transformer,
    cache: KVCache,
    last_B: jax.Array,
    questions_BQ: jax.Array,
    counts_B: jax.Array,
    lengths_B: jax.Array,
    start: jax.Array,
) -> tuple[KVCache, jax.Array, jax.Array]:
    """Reads `DECODE_CHUNK` more tokens of each row, from index `start` on: first question tokens, then the most likely tokens.

    Returns:
      The cache, the most likely token after the last token, `[B]`, and after each of the tokens, `[B, DECODE_CHUNK]`.
    """
    model = model if len(last_B) <= MAX_MATVEC_ROWS else dequantize(model)

    def step(i: jax.Array, carry: Any) -> Any:
        cache, last_B, ids_BC = carry
        number = start + i
        token_B = jnp.where(number < counts_B, questions_BQ[:, jnp.minimum(number, questions_BQ.shape[1] - 1)], last_B)
        x_B1D, cache, _ = model.hidden(token_B[:, None], (lengths_B + number)[:, None], cache=cache)
        last_B = jnp.argmax(model.logits(x_B1D[:, 0]), axis=-1).astype(jnp.int32)
        return cache, last_B, ids_BC.at[:, i].set(last_B)

    found: Any = jax.lax.fori_loop(0, DECODE_CHUNK, step, (cache, last_B, jnp.zeros((len(last_B), DECODE_CHUNK), jnp.int32)))
    return found
