"""The engine: `add`, `step`, `cancel`. Every way to generate text runs through it, offline and in a server.

    engine = Engine(model, SlotBatch(model, 8, context=2048))
    job = engine.add(GenerationRequest(ids, config))
    while engine.busy:
        for output in engine.step():
            print(output.text, end="")

`LoadedModel` drives it with a `StaticBatch`, whose prompts start together; `serve.AsyncEngine` runs it on a thread with a
`SlotBatch`, whose slots are refilled. Everything that happens to a request after its prompt is in the batch is the same code.

Threads: `step` belongs to one thread. `add`, `reserve`, `prepare`, `cancel` and `load` may be called from any thread; `lock`
guards the scheduler and the table of jobs, which both sides touch.
"""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax

from dantinox.config import Config, UserError
from dantinox.generation.decode import CHUNK
from dantinox.generation.model_bundle import ModelBundle
from dantinox.generation.prefix_cache import NO_PREFIX, PrefixMatch
from dantinox.generation.request import GenerationRequest, RequestStats
from dantinox.generation.running_batch import PendingChunk, RunningBatch
from dantinox.generation.sample_text import SampleText, TextPart
from dantinox.generation.scheduler import Scheduler
from dantinox.generation.slot_batch import ALTERNATIVES, RowParams, SlotBatch
from dantinox.sampling import StepInfo

STREAM_CHUNK_SECONDS = 0.08  # of a chunk, about, where somebody reads along
MAX_SAMPLES = 16
FEW_STEPS = 4  # tokens of a chunk between two parts of a prompt
PARTS = 2  # of a prompt that are read between two chunks
MAX_FAILURES = 3  # steps in a row that may fail before the engine gives up

log = logging.getLogger("dantinox.generation")


class RequestFailed(Exception):
    """A request ended by an internal error, which the log has."""


class Output(NamedTuple):
    """What one sample has just gained, or with `ended` the end of a request.

    Attributes:
      parts: text that became certain, per token where the request reports.
      ids: the tokens, and `steps` what was reported of them.
      finish_reason: `eos`, `stop`, `length` or `cancelled` with the last output of the sample.
      ended: nothing more will come for the request, because of `error` where there is one.
    """

    job: "Job"
    sample: int = 0
    parts: Sequence[TextPart] = ()
    ids: Sequence[int] = ()
    steps: StepInfo | None = None
    finish_reason: str | None = None
    ended: bool = False
    error: Exception | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


class Job:
    """A request that the engine has taken.

    Attributes:
      samples: how many continuations it has; `rows` their texts by slot, `unplaced` those that have no slot yet.
      prompt_steps: with `echo` what was reported of the prompt's tokens after the first one.
      prepared: whether its parameters and constraints are made.
    """

    def __init__(self, request: GenerationRequest, limit: int):
        self.request, self.limit = request, limit
        self.samples = request.config.generation.n
        self.stats = RequestStats(len(request.ids))
        self.params: RowParams | None = None
        self.texts: list[SampleText] = []
        self.rows: dict[int, int] = {}  # slot → sample
        self.prompt_steps: StepInfo | None = None
        self.prepared = self.cancelled = False
        self.error: Exception | None = None  # of its preparation or of its prefix
        self._begun = time.monotonic()

    def seconds(self) -> float:
        """Since the request came."""
        return time.monotonic() - self._begun

    @property
    def running(self) -> list[int]:
        """The numbers of the samples that have not ended."""
        ended = {number for number, text in enumerate(self.texts) if text.finish_reason is not None}
        return [number for number in range(self.samples) if number not in ended]


class Load(NamedTuple):
    """How busy an engine is: slots, those that are taken, requests that wait, and how many may wait."""

    slots: int
    busy: int
    queued: int
    queue: int


class Engine:
    """Continues requests with a running batch.

    Attributes:
      idle: whether `step` has nothing to do before a request is added, prepared or cancelled, or a program is ready.
      counters: sums by name: `finished`, `cancelled`, `failed`, `reused_tokens`, `new_tokens`.
      compile: called with the settings of a request whose program is missing, and whether it echoes; the request waits until
        the batch is `ready`. By default it compiles at once.
    """

    def __init__(
        self,
        model: ModelBundle,
        batch: RunningBatch,
        *,
        queue: int = 0,
        chunk_seconds: float | None = STREAM_CHUNK_SECONDS,
        most_steps: int = CHUNK,
        ahead: bool = True,
        isolate: bool = False,
    ):
        """Takes a batch that nobody else drives.

        Args:
          queue: requests that may wait for a slot.
          chunk_seconds: about how long a chunk takes; None: as many tokens as a chunk may have, `most_steps` ≤ 32.
          ahead: dispatch a chunk before the previous one is handed out, so that the device does not wait for the host.
          isolate: an unexpected exception ends the request that raised it, or those that were running, and the engine goes on.
            Otherwise `step` raises it.
        """
        self.model, self.batch, self.counters = model, batch, Counter[str]()
        self.lock = threading.RLock()
        self.job_seconds = 1.0  # running mean
        self.compile: Callable[[Config, bool], None] = lambda config, echo: self._slots.compile(config, echo)
        self._scheduler: Scheduler[Job] = Scheduler(batch.count, queue)
        self._jobs: dict[Job, None] = {}  # that have not ended, the oldest first
        self._chunk_seconds, self._most_steps, self._ahead, self._isolate = chunk_seconds, most_steps, ahead, isolate
        self._step_seconds, self._collected = 0.01, time.monotonic()  # running mean of a token of all rows
        self._pending: PendingChunk | None = None
        self._pending_jobs: dict[int, Job] = {}
        self._outputs: list[Output] = []
        self._chunks = self._failures = 0
        self.idle = True

    # --- any thread

    @property
    def load(self) -> Load:
        with self.lock:
            s = self._scheduler
            return Load(self.batch.count, self.batch.count - s.free, len(s.waiting), s.queue)

    @property
    def busy(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._jobs)

    def add(self, request: GenerationRequest) -> Job:
        """Takes a request; its outputs come from `step`.

        Raises:
          UserError: it does not fit the context, asks for too much, or its settings or its constraint cannot be met.
          Full: the queue is full.
        """
        job = self.reserve(request)
        try:
            self.prepare(job)
        except BaseException:
            with self.lock:
                self._remove(job)
            raise
        return job

    def reserve(self, request: GenerationRequest) -> Job:
        """The cheap half of `add`: checks sizes and takes a place in the queue. The job waits until it is prepared."""
        self._check(request)
        job = Job(request, min(request.config.generation.max_new_tokens, self._slots.context - len(request.ids)))
        with self.lock:
            self._scheduler.add(job)
            self._jobs[job] = None
        return job

    def prepare(self, job: Job) -> None:
        """The other half, which may take a second: sampling parameters, constraint and text of each sample.

        Raises:
          UserError: its settings or its constraint cannot be met.
        """
        job.params = self._slots.row_params(job.request.config)
        job.texts = self._texts(job.request)
        job.prepared = True

    def cancel(self, job: Job) -> None:
        """Ends a request with the next step; samples that have not ended get `cancelled`. Does nothing when all have."""
        job.cancelled = True

    def fail(self, job: Job, error: Exception) -> None:
        """Ends a request with the next step because of an error in its preparation."""
        job.error = error

    def _texts(self, request: GenerationRequest) -> list[SampleText]:
        model, section = self.model, request.config.generation
        matchers = [
            None if request.constraint is None else model.matcher(request.constraint, section) for _ in range(section.n)
        ]
        return [SampleText(model.tokenizer, section, request.ids, matcher) for matcher in matchers]

    def _check(self, request: GenerationRequest) -> None:
        generation, length, context = request.config.generation, len(request.ids), self._slots.context
        most = min(MAX_SAMPLES, self.batch.count)
        if not 1 <= generation.n <= most:
            raise UserError(f"generation.n must be in [1, {most}] in this server, got {generation.n}", key="generation.n")
        if length < 1 or (length >= context and generation.max_new_tokens > 0) or length > context:
            raise UserError(f"the prompt has {length} tokens and must leave room in the context of {context}: shorten it")
        self.model.check_ids(request.ids)
        if request.logprobs is not None and not 0 <= request.logprobs <= ALTERNATIVES:
            raise UserError(f"logprobs must be in [0, {ALTERNATIVES}] in this server, got {request.logprobs}")
        if request.echo and request.logprobs is None:
            raise UserError("echo reports log-probabilities of the prompt: ask for logprobs too")

    # --- the thread of `step`

    @property
    def _slots(self) -> SlotBatch:
        assert isinstance(self.batch, SlotBatch), "a static batch takes no further requests"
        return self.batch

    def place(self, requests: Sequence[GenerationRequest], limits: Sequence[int]) -> list[Job]:
        """Gives requests the rows of a static batch, which holds their prompts already, in order."""
        jobs = []
        for request, limit in zip(requests, limits, strict=True):
            job = Job(request, limit)
            self._scheduler.add(job)
            self._jobs[job] = None
            self._scheduler.admit(lambda _: True)
            job.texts = self._texts(request)
            self._start_rows(job)
            jobs.append(job)
        return jobs

    def step(self) -> list[Output]:
        """Admits requests, reads prompts, dispatches the next chunk and returns what the previous one gave.

        Raises:
          Exception: whatever went wrong, unless the engine isolates its requests; then only what keeps going wrong.
        """
        try:
            self._step()
            self.idle = self._pending is None and not self.batch.has_work and not self._scheduler.reading
        except Exception as error:
            if not self._isolate or self._failures == MAX_FAILURES:
                raise
            self._failures, self.idle = self._failures + 1, False
            log.exception("a step of the engine failed; the requests that were running are ended")
            self._abandon(error)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _step(self) -> None:
        self._end_cancelled()
        if self.batch.refills:
            self._admit()
            self._read_prompts()
        pending, jobs = self._pending, self._pending_jobs
        # A chunk is dispatched before the last one is handed out, unless that decides on the tokens allowed next, or the
        # program that decodes may have to be compiled while the first tokens wait.
        wait = pending is not None and (not self._ahead or pending.is_prefill or self._constrained())
        self._pending, self._pending_jobs = (None, {}) if wait else self._dispatch()
        if pending is not None:
            self._collect(pending, jobs)
            took, self._collected = time.monotonic() - self._collected, time.monotonic()
            self._chunks += 1
            if self.batch.refills or self._chunks > 2:  # the first two of a static batch compile
                self._step_seconds += 0.3 * (took / max(1, pending.steps) - self._step_seconds)
            self._failures = 0
        else:
            self._collected = time.monotonic()

    @contextlib.contextmanager
    def _on_behalf_of(self, job: Job) -> Iterator[None]:
        """Ends a job with the exception that its own work raises."""
        try:
            yield
        except UserError as error:
            self._end(job, "finished", error)
        except Exception as error:
            if not self._isolate:
                raise
            log.exception("a request failed")
            self._end(job, "failed", RequestFailed(f"{type(error).__name__}: {error}"))
            if self.batch.refills and not self._slots.intact:
                raise  # for all others too

    def _abandon(self, error: Exception) -> None:
        """Ends all requests that hold slots, and empties the batch."""
        failed = RequestFailed(f"{type(error).__name__}: {error}")
        self._pending, self._pending_jobs = None, {}
        with self.lock:
            waiting = self._scheduler.waiting
            running = [job for job in self._jobs if job not in waiting]
            self._scheduler = Scheduler(self.batch.count, self._scheduler.queue)
            self._scheduler.waiting = waiting
            self._jobs = dict.fromkeys(waiting)
        self._outputs += [Output(job, ended=True, error=failed) for job in running]
        self.counters["failed"] += len(running)
        self._slots.reset()

    def _end_cancelled(self) -> None:
        for job in [job for job in [*self._jobs] if job.error is not None]:
            with self._on_behalf_of(job):
                raise job.error or AssertionError
        for job in [job for job in [*self._jobs] if job.cancelled]:
            self._outputs += [Output(job, number, finish_reason="cancelled") for number in job.running]
            self._end(job, "cancelled")

    def _admit(self) -> None:
        batch = self._slots
        while True:
            with self.lock:
                waiting = [job for job in self._scheduler.waiting if job.prepared and not self._ready(job)]
            for job in waiting:
                with self._on_behalf_of(job):
                    self.compile(job.request.config, job.request.echo)
            with self.lock:
                admitted = self._scheduler.admit(self._ready, lambda job: self._prefix(job).slot)
            if admitted is None:
                return
            with self._on_behalf_of(admitted):
                match = self._prefix(admitted)
                if admitted.error is not None:
                    raise admitted.error
                batch.begin(self._scheduler.slots_of(admitted)[0], admitted.request.ids, match, admitted.request.echo)
                admitted.stats.queued_seconds, admitted.stats.reused_tokens = admitted.seconds(), match.length
                self.counters["reused_tokens"] += match.length

    def _ready(self, job: Job) -> bool:
        return job.prepared and job.params is not None and self._slots.ready(job.params.program, job.request.echo)

    def _prefix(self, job: Job) -> PrefixMatch:
        try:
            return NO_PREFIX if job.request.echo else self._slots.match_prefix(job.request.ids)
        except Exception as error:  # the scheduler asks for the prefixes of all jobs
            job.error = error
            return NO_PREFIX

    def _read_prompts(self) -> None:
        """Reads prompts: all of the first one where no request is decoded, else two parts between two chunks.

        There are more parts where those that wait for their first token are more than those that would wait for their next.
        """
        batch, reading = self._slots, self._scheduler.reading
        budget = PARTS * batch.part * max(1, len(reading) // max(1, len(batch.left())))
        while reading and (budget > 0 or not batch.left()):
            job = reading[0]
            with self._on_behalf_of(job):
                budget -= min(batch.part, len(job.request.ids))
                if batch.read(self._scheduler.slots_of(job)[0]) == 0:
                    self._start(job)

    def _start(self, job: Job) -> None:
        """Starts to decode a request whose prompt has been read."""
        first, *others = self._scheduler.slots_of(job)
        if job.request.echo:
            job.prompt_steps = self._slots.prompt_steps(first)
        with self.lock:
            self._scheduler.finish_reading(job)
        for slot in others:
            self._slots.copy(first, slot)
        self._start_rows(job)

    def _start_rows(self, job: Job) -> None:
        for number, slot in enumerate(self._scheduler.slots_of(job)):
            job.rows[slot] = number
            text = job.texts[number]
            if self.batch.refills and job.limit > 0 and not text.complete:
                assert job.params is not None
                report = job.request.logprobs is not None
                self._slots.start(slot, job.params, limit=job.limit, sample_index=number, report=report)
            if job.limit == 0 or text.complete:
                self.batch.stop(slot)
                self._give(job, slot, [])
            elif text.matcher is not None:
                self.batch.allow(slot, text.matcher.mask())

    def _constrained(self) -> bool:
        """Whether the tokens that a row may have next depend on its last one."""
        return any(
            job.texts[job.rows[slot]].matcher is not None
            for slot in self.batch.left()
            if (job := self._scheduler.holders[slot]) is not None
        )

    def _dispatch(self) -> tuple[PendingChunk | None, dict[int, Job]]:
        """Starts a chunk; a slot whose request ends with it at the latest is free for the next one."""
        left = self.batch.left()
        holders = {slot: self._scheduler.holders[slot] for slot in left}
        jobs = {slot: job for slot, job in holders.items() if job is not None}
        if not self.batch.has_work:
            return None, {}
        pending = self.batch.dispatch(self._steps(jobs, left))
        if self.batch.refills:
            with self.lock:
                for slot in jobs.keys() - self.batch.left().keys():
                    self._scheduler.release(slot)
        return pending, jobs

    def _steps(self, jobs: dict[int, Job], left: dict[int, int]) -> int:
        """Tokens of the next chunk."""
        if self._constrained():
            return 1
        steps = self._most_steps
        if self._chunk_seconds is not None:
            steps = min(steps, max(1, int(self._chunk_seconds / self._step_seconds)))
        if not self.batch.refills:
            return steps
        steps = min(steps, *left.values())
        if self._scheduler.reading:
            return min(steps, FEW_STEPS)
        # The first token at once; where a slot was waited for, it is a small part of the time.
        first = not self._scheduler.waiting and any(not job.texts[job.rows[slot]].tokens for slot, job in jobs.items())
        return 1 if first else steps

    def _collect(self, pending: PendingChunk, jobs: dict[int, Job]) -> None:
        """Waits for a chunk and turns its tokens into outputs."""
        for output in self.batch.collect(pending):
            job = jobs[output.slot]
            if job not in self._jobs or job.cancelled:
                continue
            with self._on_behalf_of(job):
                self._give(job, output.slot, output.tokens.tolist(), output.done, output.steps)
                text = job.texts[job.rows[output.slot]]
                if text.matcher is not None and text.finish_reason is None:
                    self.batch.allow(output.slot, text.matcher.mask())

    def _give(self, job: Job, slot: int, ids: list[int], done: bool = True, steps: StepInfo | None = None) -> None:
        """Adds tokens to a sample; releases its slot when it ends, and the job with its last sample."""
        number = job.rows[slot]
        text = job.texts[number]
        before = len(text.tokens)
        parts = text.take(ids, done, steps)
        new = text.tokens[before:]
        steps = jax.tree.map(lambda x: x[: len(new)], steps)
        if new and job.stats.new_tokens == 0:
            job.stats.first_token_seconds = job.seconds()
        job.stats.new_tokens += len(new)
        self.counters["new_tokens"] += len(new)
        self._outputs.append(Output(job, number, parts, new, steps, text.finish_reason))
        if text.finish_reason is None:
            return
        if self._scheduler.holders[slot] is job:
            self.batch.stop(slot)
            with self.lock:
                self._scheduler.release(slot)
        if not job.running:
            self._end(job, "finished")

    def _end(self, job: Job, how: str, error: Exception | None = None) -> None:
        """Takes a job out; the slots that it still holds are free."""
        with self.lock:
            if job not in self._jobs:
                return
            self._remove(job)
        job.stats.seconds = job.seconds()
        self.job_seconds += 0.2 * (job.seconds() - self.job_seconds)
        self.counters[how] += 1
        self._outputs.append(Output(job, ended=True, error=error))

    def _remove(self, job: Job) -> None:
        for slot in self._scheduler.slots_of(job):
            self.batch.stop(slot)
        self._scheduler.remove(job)
        del self._jobs[job]
