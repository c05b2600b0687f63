"""`BatchRun`: runs a batch of offline requests on an engine and returns one `Result` per sample."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import jax
import numpy as np

from dantinox.config import KVSection, with_generation
from dantinox.generation.api.result import Result, TokenColumns, sample_stats
from dantinox.generation.api.trace import changed_settings, router_values, token_columns
from dantinox.generation.decode.cache_plan import head_order, plan_cache
from dantinox.generation.decode.generate_toks import DECODE_CHUNK
from dantinox.generation.engine_base import STREAM_CHUNK_SECONDS, EngineBase
from dantinox.generation.engine_jobs import Job
from dantinox.generation.model_bundle import ModelBundle
from dantinox.generation.plan_stepper import plan_stepper
from dantinox.generation.request import GenerationRequest
from dantinox.generation.run_timer import RunTimer
from dantinox.generation.sample_text import TextPart
from dantinox.generation.static_batch import (
    StaticBatch,
    StaticOptions,
    clamp_to_context,
    padded_length,
    slots_needed,
    stack_prompts,
)
from dantinox.generation.token_settings import end_ids
from dantinox.model import CacheReport
from dantinox.platform import release_free_memory
from dantinox.sampling import StepInfo


class OfflineEngine(EngineBase[StaticBatch]):
    """Decodes requests whose prompts a static batch already holds, in order."""

    _chunks = 0

    def start(self, requests: Sequence[GenerationRequest], limits: Sequence[int]) -> list[Job]:
        """Assigns the requests to the rows; each sample has at most its limit of new tokens."""
        jobs = []
        for request, limit in zip(requests, limits, strict=True):
            job = Job(request, limit)
            # The rows that follow others come after the rows of all requests, and need no slots
            # here.
            job.slots = job.samples
            self._scheduler.add(job)
            self._jobs[job] = None
            self._scheduler.admit(lambda _: True)
            job.texts = self._sample_texts(request, limit)
            self._start_rows(job)
            jobs.append(job)
        return jobs

    def _restart(self, job: Job, slot: int) -> None:
        ids = job.request.ids
        output = job.text_of(slot).all_tokens
        self.batch.restart(slot, [*ids, *output], len(ids), job.limit - len(output))

    def _measure(self, step_seconds: float) -> None:
        self._chunks += 1
        if self._chunks > 1:  # the first chunk includes compilation and prefill
            super()._measure(step_seconds)


def make_batch(
    model: ModelBundle,
    requests: Sequence[GenerationRequest],
    samples: range,
    pad: Callable[[int], int],
    slots: int | None,
) -> tuple[StaticBatch, list[int]]:
    """Returns the rows of requests that share a program, and the most new tokens of each request.

    Args:
      samples: the numbers of the samples of each request.
      pad: as in `StaticOptions`.
      slots: the slots of the cache; None: as many as the longest row needs.

    Raises:
      UserError: a prompt fills the context, or a setting is invalid.
    """
    architecture = model.model.config
    first = requests[0]
    P = len(requests)
    n = len(samples)
    prompts = _prompts_in_order(model, requests)
    prompt_PT, lengths_P = stack_prompts(prompts)
    main_rows = P * n
    # The request of each row.
    rows = [request for request in requests for _ in samples] * first.rows_per_sample
    # Errors in the settings come before the warning about the context.
    kv, calibration = model.kv(first.config)
    params = model.params(
        [row.config for row in rows],
        [*samples] * len(prompts),
        score_fn=first.score_fn,
        show_candidates=first.show_candidates,
        logit_processor=first.logit_processor,
    )
    requested_P = np.array([row.config.generation.max_new_tokens for row in rows[::n]])
    limits_P = clamp_to_context(lengths_P, requested_P, architecture.max_context)
    # All prompts of a request have the limit of its longest prompt.
    limits_P = np.tile(limits_P.reshape(-1, P).min(axis=0), first.rows_per_sample)
    order = head_order(architecture, kv, calibration)
    prepared = model.prepared(first.config.generation, order)
    slots = slots or slots_needed(lengths_P, limits_P, pad)
    stepper, constants = plan_stepper(
        first.config, model, prepared, len(rows), slots, constrained=first.guided
    )
    features, shared = model.batch_features(rows, main_rows, order)
    options = StaticOptions(
        stepper=stepper,
        plan=plan_cache(architecture, kv, slots, calibration, True),
        pad=pad,
        samples=n,
        main_rows=main_rows,
        features=features,
        constants={**constants, **shared},
        constrained=first.guided,
        report=first.logprobs,
        echo=first.echo,
    )
    eos_ids = [end_ids(model.tokenizer, row.config.generation) for row in rows]
    limits_B = np.repeat(limits_P, n)
    batch = StaticBatch(
        prepared, prompt_PT, lengths_P, params, limits_B=limits_B, eos_ids=eos_ids, options=options
    )
    return batch, limits_P[:P].tolist()


def _prompts_in_order(
    model: ModelBundle, requests: Sequence[GenerationRequest]
) -> list[tuple[int, ...]]:
    """Returns the prompts of all requests, then the second prompts of their samples, if they have
    some, and so on.
    """
    by_request = [model.prompts(request, model.model.config.max_context) for request in requests]
    return [ids for prompts in zip(*by_request, strict=True) for ids in prompts]


class BatchRun:
    """A batch of requests that share a compiled program, on an engine of its own.

    `parts` runs the batch; afterwards `results` holds the results.

    Attributes:
      numbers: for each result, the index of its request.
      batch: the rows that are decoded. New `params` assigned to it apply from the next chunk on.
      times: the times of the run, after its end.
    """

    def __init__(
        self,
        model: ModelBundle,
        requests: Sequence[GenerationRequest],
        numbers: Sequence[int],
        *,
        stream: bool = False,
        pad: Callable[[int], int] = padded_length,
        steps: int | None = None,
        slots: int | None = None,
        samples: range | None = None,
    ):
        """Creates the batch; the arguments are described in `LoadedModel.start`.

        Args:
          samples: the numbers of the samples to generate of each request; None: all of them.

        Raises:
          UserError: a prompt fills the context, or the settings or the constraint of a request are
            invalid.
        """
        n = requests[0].config.generation.n
        samples = range(n) if samples is None else samples
        self._model = model
        self._requests = requests
        self.numbers = [number for number in numbers for _ in samples]
        self.results: list[Result] = []
        self.batch, limits = make_batch(model, requests, samples, pad, slots)
        self._engine = OfflineEngine(
            model,
            self.batch,
            chunk_seconds=STREAM_CHUNK_SECONDS if stream else None,
            max_steps=steps or DECODE_CHUNK,
            dispatch_ahead=steps is None,
        )
        self._jobs = self._engine.start(
            [_with_samples(request, len(samples)) for request in requests], limits
        )
        self._samples = [(job, number) for job in self._jobs for number in range(len(samples))]

    def parts(self) -> Iterator[tuple[int, TextPart]]:
        """Decodes the batch and yields `(row, text)` when text becomes final; sets `results` and
        `times` at the end.
        """
        row_of = {sample: row for row, sample in enumerate(self._samples)}
        texts: list[list[str]] = [[] for _ in row_of]
        reports: list[list[StepInfo]] = [[] for _ in row_of]
        with RunTimer() as timer:
            while self._engine.busy or self.batch.has_work:
                for output in self._engine.step():
                    if output.error is not None:
                        raise output.error
                    if output.ended:  # the end of a request, after the outputs of its samples
                        continue
                    row = row_of[output.job, output.sample]
                    if output.ids:
                        timer.mark_first()
                    if output.steps is not None:
                        reports[row].append(output.steps)
                    for part in output.parts:
                        texts[row].append(part.text)
                        if part.text:
                            yield row, part
        self.times = timer.times
        self.results = self._build_results(["".join(parts) for parts in texts], reports)
        # The next batch may need the memory before this one is collected as garbage.
        self.batch.caches = ()
        if self.times.compiling > 0:
            release_free_memory()  # that of the compiler

    def summary(self) -> str:
        """Returns one line about a finished run: tokens, times, speed, seeds, size of the cache."""
        stats = self.results[0].stats
        prompt = sum(len(request.ids) for request in self._requests)
        new = sum(result.stats["new_tokens"] for result in self.results)
        seeds = sorted({result.seed for result in self.results})
        drafted = sum(result.stats["draft_tokens"] for result in self.results)
        accepted = sum(result.stats["accepted_draft_tokens"] for result in self.results)
        drafts = f", {accepted} of {drafted} draft tokens accepted" if drafted else ""
        seed = seeds[0] if len(seeds) == 1 else seeds
        cache = _cache_summary(stats["cache"], self._requests[0].config.kv)
        times = self.times.describe(stats["decode_tok_per_s"])
        return f"{prompt} prompt + {new} new tokens in {times}{drafts}, seed {seed}{cache}"

    def _build_results(
        self, texts: Sequence[str], reports: Sequence[Sequence[StepInfo]]
    ) -> list[Result]:
        # The number of tokens without the first token of each sample.
        new = sum(len(job.texts[number].tokens) for job, number in self._samples) - len(texts)
        report_of = self._cache_report()
        requests = dict(zip(self._jobs, self._requests, strict=True))
        no_steps = self.batch.no_steps
        results = []
        for row, (job, number) in enumerate(self._samples):
            request = job.request
            sample = job.texts[number]
            steps = (
                jax.tree.map(lambda *parts: np.concatenate(parts), *reports[row])
                if reports[row]
                else no_steps
            )
            results.append(
                Result(
                    prompt=request.prompt,
                    text=texts[row],
                    tokens=sample.tokens,
                    finish_reason=sample.finish_reason or "length",
                    seed=request.config.generation.seed or 0,
                    stats=sample_stats(
                        self.times,
                        decode_tok_per_s=self.times.rate(new),
                        prompt_tokens=len(request.ids),
                        new_tokens=len(sample.tokens),
                        cache=report_of(len(request.ids) + len(sample.tokens) - 1),
                        counts=self.batch.counts(row),
                    ),
                    steps=steps,
                    # The settings of the job may have another number of samples.
                    settings=changed_settings(requests[job].config),
                    router=router_values(self.batch.params, row),
                    make_info=self._info_maker(job, sample.tokens, steps),
                )
            )
        return results

    def _cache_report(self) -> Callable[[int], CacheReport | None]:
        """Returns a function from the tokens of a row in the cache to the report on the cache."""
        cache = self.batch.caches[0].report() if self.batch.caches else None
        if cache is None or not self._requests[0].config.kv.compresses:
            return lambda _: cache
        windows = self._model.model.config.windows
        return lambda tokens: {**cache, "evicted": evicted_keys(cache["slots"], windows, tokens)}

    def _info_maker(
        self, job: Job, tokens: Sequence[int], steps: StepInfo | None
    ) -> Callable[[], TokenColumns]:
        """Returns a function that makes `Result.info`; it holds no reference to the batch."""
        if steps is None:
            return TokenColumns
        tokenizer = self._model.tokenizer
        ids = job.request.ids
        echo_PT = self.batch.echo
        logprobs = None if echo_PT is None else echo_PT[self._jobs.index(job), : len(ids)].tolist()

        def make_info() -> TokenColumns:
            columns = token_columns(tokenizer, tokens, steps)
            if logprobs is not None:
                columns["prompt_tokens"] = [tokenizer.decode([token]) for token in ids]
                columns["prompt_logprobs"] = [None, *logprobs[1:]]
            return columns

        return make_info


def evicted_keys(
    slots: Sequence[Sequence[Sequence[int]]], windows: Sequence[int | None], tokens: int
) -> int:
    """Returns how many keys all heads of a compressed cache have evicted after some tokens.

    Args:
      slots: the pairs `[key heads, slots]` of each layer.
      windows: the window of each layer. A key that has left the window is not counted.
    """
    evicted = 0
    for window, groups in zip(windows, slots, strict=True):
        visible = tokens if window is None else min(tokens, window)
        evicted += sum(heads * max(0, visible - count) for heads, count in groups)
    return evicted


def _with_samples(request: GenerationRequest, count: int) -> GenerationRequest:
    """Returns a request for `count` samples."""
    same = request.config.generation.n == count
    return request if same else replace(request, config=with_generation(request.config, n=count))


def _cache_summary(cache: CacheReport | None, kv: KVSection) -> str:
    """Returns `, cache 1.20 MB of 5.90 (80% saved, 24 to 64 slots per head, 9,200 keys evicted)` if
    the cache is compressed.

    Otherwise it returns the size. The evicted keys are those of the first sample.
    """
    if cache is None:
        return ""
    size = f", cache {cache['bytes'] / 1e6:.2f} MB"
    slots = sorted(slots for layer in cache["slots"] for _, slots in layer)
    if not kv.compresses:
        return size
    if cache["bytes"] == cache["full_bytes"]:
        return f"{size} (uncompressed: nothing can be evicted from at most {slots[-1]} tokens)"
    per_head = (
        f"{slots[0]} slots per head"
        if slots[0] == slots[-1]
        else f"{slots[0]} to {slots[-1]} slots per head"
    )
    evicted = f"{cache.get('evicted', 0):,} keys evicted"
    return (
        f"{size} of {cache['full_bytes'] / 1e6:.2f} ({1 - cache['ratio']:.0%} saved, {per_head},"
        f" {evicted})"
    )
