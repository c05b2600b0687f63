"""The engine: `add`, `step`, `cancel`. All generation runs through it, offline and in a server.

    engine = Engine(model, SlotBatch(model, 8, context=2048))
    job = engine.add(GenerationRequest(ids, config))
    while engine.busy:
        for output in engine.step():
            print(output.text, end="")

`LoadedModel` uses it with a `StaticBatch`, whose prompts start together. `serve.AsyncEngine` runs it on a thread with a
`SlotBatch`, whose slots are refilled. After the prefill, both kinds of batch run the same code.

Threads: `step` belongs to one thread. `add`, `reserve`, `prepare`, `cancel` and `load` may be called from any thread. `lock`
guards the scheduler and the table of jobs, which they all use. `changes` has its own rules.
"""

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

from dantinox.config import Config, UserError
from dantinox.generation.decode import DECODE_CHUNK
from dantinox.generation.engine_jobs import Job, Output, RequestFailed
from dantinox.generation.model_bundle import ModelBundle
from dantinox.generation.model_changes import ModelChanges
from dantinox.generation.prompt_scope import PromptScope
from dantinox.generation.request import GenerationRequest
from dantinox.generation.running_batch import PendingChunk, RunningBatch
from dantinox.generation.sample_text import SampleText
from dantinox.generation.scheduler import Scheduler
from dantinox.generation.slot_batch import SlotBatch
from dantinox.generation.slot_params import MAX_ALTERNATIVES
from dantinox.sampling import StepInfo
from dantinox.sampling.subsets import ALL_STEPS

STREAM_CHUNK_SECONDS = 0.08  # approximate duration of a chunk when the output is streamed
MAX_SAMPLES = 16
STEPS_WHILE_PREFILLING = 4  # tokens of a decode chunk while prompts are prefilled
MAX_PREFILL_CHUNKS = 8  # the most prefill chunks between two decode chunks
MAX_FAILURES = 3  # failing steps in a row before `step` raises the exception

log = logging.getLogger("dantinox.generation")


class Load(NamedTuple):
    """The load of an engine: slots, busy slots, waiting requests, and the most requests that may wait."""

    slots: int
    busy: int
    queued: int
    queue: int


class Engine:
    """Runs requests on a running batch.

    Attributes:
      idle: whether `step` has nothing to do until a request is added, prepared or cancelled, or a program is ready. An engine
        that adds responses to the prefix cache is not idle.
      counters: totals by name: `finished`, `cancelled`, `failed`, `reused_tokens`, `new_tokens`, and `Feature.counts`.
      compile: called with the settings, `echo` and the subset of the sampling steps of a request whose programs are not
        compiled. The request waits until the batch is `ready` for it. The default compiles the programs immediately.
      changes: replaces the weights, and loads and unloads adapters.
    """

    def __init__(
        self,
        model: ModelBundle,
        batch: RunningBatch,
        *,
        queue: int = 0,
        chunk_seconds: float | None = STREAM_CHUNK_SECONDS,
        max_steps: int = DECODE_CHUNK,
        dispatch_ahead: bool = True,
        isolate: bool = False,
    ):
        """Creates an engine, which becomes the only user of the batch.

        Args:
          queue: the most requests that may wait for a slot.
          chunk_seconds: the approximate duration of a chunk; None: every chunk has `max_steps` ≤ 32 tokens.
          dispatch_ahead: dispatch a chunk before the previous one is returned, so that the device does not wait for the host.
          isolate: after an unexpected exception, end only the request that raised it and continue. If the exception belongs to
            no single request, all running requests end. Without `isolate`, `step` raises the exception.
        """
        self.model, self.batch, self.counters = model, batch, Counter[str]()
        self.lock = threading.RLock()
        self.job_seconds = 1.0  # running mean
        self.compile: Callable[[Config, bool, int], None] = lambda *needed: self._slots.compile(*needed)
        self._scheduler: Scheduler[Job] = Scheduler(batch.count, queue)
        self._jobs: dict[Job, None] = {}  # jobs that have not ended, the oldest first
        self._chunk_seconds, self._max_steps = chunk_seconds, max_steps
        self._dispatch_ahead, self._isolate = dispatch_ahead, isolate
        self._step_seconds, self._collected = 0.01, time.monotonic()  # running mean of the seconds per token
        self._pending: PendingChunk | None = None
        self._pending_jobs: dict[int, Job] = {}
        self._outputs: list[Output] = []
        # A static batch has no changes.
        self.changes = ModelChanges(cast(SlotBatch, batch), self.lock, lambda: [job.scope for job in self._jobs])
        # Sequences with the scopes of their requests that have yet to be added to the prefix cache, the newest last, and
        # the slot of the newest one while it is prefilled.
        self._sequences: deque[tuple[Sequence[int], PromptScope]] = deque(maxlen=batch.count)
        self._sequence_slot: int | None = None
        self._prefill_oldest = False
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
        """Whether any request has not ended."""
        return bool(self._jobs)

    def add(self, request: GenerationRequest) -> Job:
        """Adds a request; `step` returns its outputs.

        Raises:
          UserError: the request does not fit the context or exceeds a limit, its settings or its constraint are invalid, or
            its adapter is not loaded.
          QueueFull: the queue is full.
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
        """Checks the sizes and adds the request to the queue, where it waits for `prepare`: the fast part of `add`."""
        self._check(request)
        request = self.model.heal(request)
        job = Job(request, min(request.config.generation.max_new_tokens, self._slots.context - len(request.ids)))
        with self.lock:
            job.scope = self._slots.scope(request.salt, request.lora)
            self._scheduler.add(job)
            self._jobs[job] = None
        return job

    def prepare(self, job: Job) -> None:
        """Creates the sampling parameters and the constraint and text of each sample: the slow part of `add` (up to a second).

        Raises:
          UserError: the settings or the constraint are invalid.
        """
        job.prompts = self.model.prompts(job.request, self._slots.context)
        job.limit = min(job.limit, self._slots.context - max(map(len, job.prompts)))
        job.params = self._slots.row_params(job.request.config)
        job.texts = self._sample_texts(job.request, job.limit)
        needs_all = job.request.logprobs is not None or any(text.guides for text in job.texts)
        job.subset = ALL_STEPS if needs_all else job.params.subset
        job.prepared = True

    def cancel(self, job: Job) -> None:
        """Ends a request in the next step; unfinished samples get the finish reason `cancelled`."""
        job.cancelled = True

    def fail(self, job: Job, error: Exception) -> None:
        """Ends a request in the next step because its preparation failed."""
        job.error = error

    def _sample_texts(self, request: GenerationRequest, limit: int) -> list[SampleText]:
        tokenizer, section = self.model.tokenizer, request.config.generation
        return [
            SampleText(
                tokenizer, section, request.ids, guides, request.visible_ids, request.reasoning, limit, request.healed or ()
            )
            for guides in self.model.guides(request)
        ]

    def _check(self, request: GenerationRequest) -> None:
        generation, length, context = request.config.generation, len(request.ids), self._slots.context
        limit = min(MAX_SAMPLES, self.batch.count)
        if not 1 <= generation.n <= limit:
            raise UserError(f"generation.n must be in [1, {limit}] in this server, got {generation.n}", key="generation.n")
        if (needed := generation.n * request.rows_per_sample) > self.batch.count:
            message = f"generation.n is {generation.n}, which needs {needed} slots with these settings, but this server has"
            raise UserError(f"{message} {self.batch.count}", key="generation.n")
        if length < 1 or (length >= context and generation.max_new_tokens > 0) or length > context:
            raise UserError(f"the prompt has {length} tokens and must leave room in the context of {context}: shorten it")
        self.model.check_ids(request.ids)
        if request.logprobs is not None and not 0 <= request.logprobs <= MAX_ALTERNATIVES:
            raise UserError(f"logprobs must be in [0, {MAX_ALTERNATIVES}] in this server, got {request.logprobs}")
        if request.logit_processor not in (None, self._slots.logit_processor):
            raise UserError("logit_processor is an argument of the SlotBatch, and all of its requests use it")
        if request.echo and request.logprobs is None:
            raise UserError("echo reports log-probabilities of the prompt: set logprobs too")

    # --- only the thread of `step`

    @property
    def _slots(self) -> SlotBatch:
        assert isinstance(self.batch, SlotBatch), "a static batch does not accept further requests"
        return self.batch

    def add_static(self, requests: Sequence[GenerationRequest], limits: Sequence[int]) -> list[Job]:
        """Assigns the requests, in order, to the rows of a static batch that already holds their prompts."""
        jobs = []
        for request, limit in zip(requests, limits, strict=True):
            job = Job(request, limit)
            job.slots = job.samples  # the rows that follow others come after the rows of all requests, and need no slots here
            self._scheduler.add(job)
            self._jobs[job] = None
            self._scheduler.admit(lambda _: True)
            job.texts = self._sample_texts(request, limit)
            self._start_rows(job)
            jobs.append(job)
        return jobs

    def step(self) -> list[Output]:
        """Admits requests, prefills prompts, dispatches the next chunk and returns the outputs of the previous one.

        Raises:
          Exception: any error, unless the engine isolates its requests; then only after `MAX_FAILURES` failing steps in a row.
        """
        try:
            self._step()
            working = self._is_computing or (self._sequences and not self._jobs)
            self.idle = not working and not self.changes.has_weights
        except Exception as error:
            if not self._isolate or self._failures == MAX_FAILURES:
                raise
            self._failures, self.idle = self._failures + 1, False
            log.exception("a step of the engine failed; ending the running requests")
            self._fail_running(error)
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def _is_computing(self) -> bool:
        return self._pending is not None or self.batch.has_work or bool(self._scheduler.prefilling)

    def _step(self) -> None:
        self._end_cancelled()
        if self.batch.refills:
            self.changes.copy_adapters()
            if self.changes.install_weights(self.load.busy > 0 or self._pending is not None):
                self._admit()
            self._prefill_prompts()
        pending, jobs = self._pending, self._pending_jobs
        # Dispatch the next chunk before collecting the previous one, with two exceptions: the tokens allowed next depend on the
        # previous chunk, or compiling the decode program might delay the first tokens.
        wait = pending is not None and (not self._dispatch_ahead or pending.is_prefill or self._constrained())
        self._pending, self._pending_jobs = (None, {}) if wait else self._dispatch()
        if pending is not None:
            self._collect(pending, jobs)
            elapsed, self._collected = time.monotonic() - self._collected, time.monotonic()
            self._chunks += 1
            if self.batch.refills or self._chunks > 2:  # the first two chunks of a static batch include compilation
                self._step_seconds += 0.3 * (elapsed / max(1, pending.steps) - self._step_seconds)
            self._failures = 0
        else:
            self._collected = time.monotonic()
        if self.batch.refills:
            self._add_responses()

    @contextlib.contextmanager
    def _isolate_errors(self, job: Job) -> Iterator[None]:
        """Ends a job with any exception that the work for this job raises."""
        try:
            yield
        except UserError as error:
            self._end(job, "finished", error)
        except Exception as error:
            if not self._isolate:
                raise
            log.exception("a request failed")
            self._end(job, "failed", RequestFailed(f"{type(error).__name__}: {error}"))
            if self.batch.refills and not self._slots.cache_is_valid:
                raise  # the cache is lost, so all requests fail

    def _fail_running(self, error: Exception) -> None:
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
        self._sequences.clear()
        self._sequence_slot = None
        self._slots.reset()

    def _end_cancelled(self) -> None:
        for job in [job for job in [*self._jobs] if job.error is not None]:
            with self._isolate_errors(job):
                raise job.error or AssertionError
        for job in [job for job in [*self._jobs] if job.cancelled]:
            for number in job.running:
                self._outputs.append(Output(job, number, finish_reason="cancelled"))
                if job.texts:
                    self._remember(job, job.texts[number])
            self._end(job, "cancelled")

    def _admit(self) -> None:
        batch = self._slots
        while True:
            with self.lock:
                waiting = [job for job in self._scheduler.waiting if job.prepared and not self._ready(job)]
            for job in waiting:
                with self._isolate_errors(job):
                    self.compile(job.request.config, job.request.echo, job.subset)
            with self.lock:
                admitted = self._scheduler.admit(self._ready)
            if admitted is None:
                return
            with self._isolate_errors(admitted):
                request, slots = admitted.request, self._scheduler.slots_of(admitted)
                n = admitted.samples
                admitted.followers = {slot: slots[number::n][1:] for number, slot in enumerate(slots[:n])}
                self._sequence_slot = None  # the request may have got this slot
                for ids, slot in zip(admitted.prompts, slots[::n], strict=True):
                    batch.assign_prompt(slot, ids, request.echo and slot == slots[0], admitted.scope)
                admitted.stats.queued_seconds = admitted.seconds()

    def _ready(self, job: Job) -> bool:
        if not job.prepared or job.params is None:
            return False
        return self._slots.ready(job.params.program, job.request.echo, job.subset)

    def _prefill_prompts(self) -> None:
        """Prefills at most one chunk of a prompt, or up to `MAX_PREFILL_CHUNKS` if more requests are in prefill than decoding.

        Chunks of several prompts share a pass. A pass that takes the time of one chunk counts as one chunk.

        If no request is decoding, it prefills one chunk per prompt. `step` then returns, so that new requests are admitted.

        Every second chunk belongs to the oldest prompt, and the others to the prompt with the fewest tokens left. So a short
        prompt does not wait for a long one that came before it, and the long one makes progress.
        """
        batch, prefilling = self._slots, self._scheduler.prefilling
        decoding = len(batch.remaining())
        chunks = max(1, min(MAX_PREFILL_CHUNKS, len(prefilling) // decoding)) if decoding else len(prefilling)
        while prefilling and chunks > 0:
            if not decoding and self._pending is None:
                batch.wait()  # otherwise a request that arrives now would wait for all chunks in the queue of the device
            jobs = self._next_prompts(batch.pass_size(min(chunks, len(prefilling))))
            chunks -= 1 if batch.wide_passes else len(jobs)
            for job, left in zip(jobs, self._prefill_together(jobs), strict=True):
                with self._isolate_errors(job):
                    if left == 0:
                        self._start(job)

    def _next_prompts(self, count: int) -> list[Job]:
        """Returns the jobs whose prompts are prefilled next, at most `count`."""
        prefilling, jobs = [*self._scheduler.prefilling], list[Job]()
        while prefilling and len(jobs) < count:
            self._prefill_oldest = not self._prefill_oldest
            jobs.append(prefilling[0] if self._prefill_oldest else min(prefilling, key=self._prefill_left))
            prefilling.remove(jobs[-1])
        return jobs

    def _prefill_together(self, jobs: Sequence[Job]) -> list[int | None]:
        """Prefills a chunk of each prompt; returns the tokens left of each job, or None for each job if the pass has failed."""
        slots = [self._prompt_slots(job)[0] for job in jobs]
        try:
            if len(slots) == 1:
                self._slots.prefill(slots[0])
            else:
                self._slots.prefill_together(slots)
        except Exception as error:
            for job in jobs:
                with self._isolate_errors(job):
                    raise error
            return [None] * len(jobs)
        return [self._prefill_left(job) for job in jobs]

    def _prompt_slots(self, job: Job) -> list[int]:
        """Returns the slots of the prompts of a job that are not prefilled, and at least one of them."""
        slots = self._scheduler.slots_of(job)[:: job.samples]
        return [slot for slot in slots if self._slots.prefill_left(slot) > 0] or slots[:1]

    def _prefill_left(self, job: Job) -> int:
        return sum(map(self._slots.prefill_left, self._prompt_slots(job)))

    def _add_responses(self) -> None:
        """Prefills one chunk of an earlier prompt and its response if the engine has no requests.

        The keys that decoding writes differ in their last bits from those of a prefill, so the prefix cache cannot use them. A
        request that arrives interrupts the prefill; the chunks before it are already in the prefix cache.
        """
        batch = self._slots
        if self._jobs or self._is_computing or not self._sequences:
            self._sequence_slot = None
            return
        ids, scope = self._sequences[-1]
        if not batch.is_current(scope):
            self._sequences.pop()
            self._sequence_slot = None
            return
        if self._sequence_slot is None:
            slot = self._scheduler.last_free
            if not batch.assign_sequence(slot, ids, scope):
                self._sequences.pop()
                return
            self._sequence_slot = slot
        left = batch.prefill(self._sequence_slot)
        batch.wait()
        if left == 0:
            self._sequences.pop()
            self._sequence_slot = None

    def _start(self, job: Job) -> None:
        """Starts to decode a request whose prompt is in the cache."""
        first, *copies = self._scheduler.slots_of(job)[: job.samples]
        job.stats.reused_tokens = self._slots.reused_tokens(first)
        self.counters["reused_tokens"] += job.stats.reused_tokens
        if job.request.echo:
            job.prompt_steps = self._slots.prompt_steps(first)
        with self.lock:
            self._scheduler.finish_prefill(job)
        for slot in copies:
            for source, to in zip([first, *job.followers[first]], [slot, *job.followers[slot]], strict=True):
                self._slots.copy_prompt(source, to)
        self._start_rows(job)

    def _start_rows(self, job: Job) -> None:
        for number, slot in enumerate(self._scheduler.slots_of(job)[: job.samples]):
            job.rows[slot] = number
            text = job.texts[number]
            if self.batch.refills and job.limit > 0 and not text.complete:
                self._decode_row(job, slot)
            if job.limit == 0 or text.complete:
                self.batch.stop(slot)
                self._add_tokens(job, slot, [])
            elif text.mask is not None:
                self.batch.set_token_mask(slot, text.mask)

    def _decode_row(self, job: Job, slot: int) -> None:
        """Starts to decode a row of a slot batch, from the tokens that its sample has already."""
        number = job.rows[slot]
        text = job.texts[number]
        assert job.params is not None
        self._slots.start_decoding(
            slot,
            job.params,
            limit=job.limit - len(text.all_tokens),
            output=text.all_tokens,
            sample_index=number,
            report=job.request.logprobs is not None,
            constrained=text.mask is not None,
            followers=job.followers[slot],
        )

    def _restart(self, job: Job, slot: int) -> None:
        """Decodes a row again from the last token that its guides have kept. Tokens that are being computed are dropped."""
        text = job.texts[job.rows[slot]]
        if self.batch.refills:
            self._decode_row(job, slot)
        else:
            self.batch.restart(
                slot, [*job.request.ids, *text.all_tokens], len(job.request.ids), job.limit - len(text.all_tokens)
            )

    def _constrained(self) -> bool:
        """Whether the last token of a decoding row decides which tokens are allowed next.

        This holds for a row with a mask, and for every row with guides if rows cannot be restarted.
        """
        texts = [
            job.texts[job.rows[slot]] for slot in self.batch.remaining() if (job := self._scheduler.holders[slot]) is not None
        ]
        return any(text.mask is not None or (text.guides and not self.batch.can_restart) for text in texts)

    def _dispatch(self) -> tuple[PendingChunk | None, dict[int, Job]]:
        """Starts a chunk; releases the slots of requests that certainly end within this chunk."""
        remaining = self.batch.remaining()
        jobs_by_slot = {slot: self._scheduler.holders[slot] for slot in remaining}
        jobs = {slot: job for slot, job in jobs_by_slot.items() if job is not None}
        if not self.batch.has_work:
            return None, {}
        pending = self.batch.dispatch(self._steps(jobs, remaining))
        if self.batch.refills:
            with self.lock:
                for slot in jobs.keys() - self.batch.remaining().keys():
                    if not jobs[slot].texts[jobs[slot].rows[slot]].guides:  # a row with guides may be restarted
                        self._release(jobs[slot], slot)
        return pending, jobs

    def _steps(self, jobs: dict[int, Job], remaining: dict[int, int]) -> int:
        """Returns the number of tokens of the next chunk."""
        if self._constrained():
            return 1
        steps = self._max_steps
        if self._chunk_seconds is not None:
            steps = min(steps, max(1, int(self._chunk_seconds / self._step_seconds)))
        if not self.batch.refills:
            return steps
        steps = min(steps, *remaining.values())
        if self._scheduler.prefilling:
            return min(steps, STEPS_WHILE_PREFILLING)
        # A chunk of only one token returns the first token sooner. But if requests wait for slots, throughput matters more.
        first = not self._scheduler.waiting and any(not job.texts[job.rows[slot]].tokens for slot, job in jobs.items())
        return 1 if first else steps

    def _collect(self, pending: PendingChunk, jobs: dict[int, Job]) -> None:
        """Waits for a chunk and converts its tokens to outputs."""
        for output in self.batch.collect(pending):
            job = jobs[output.slot]
            if job not in self._jobs or job.cancelled:
                continue
            with self._isolate_errors(job):
                job.stats.counts.update(output.counts)
                self.counters.update(output.counts)
                self._add_tokens(job, output.slot, output.tokens.tolist(), output.done, output.steps)

    def _add_tokens(self, job: Job, slot: int, ids: list[int], done: bool = True, steps: StepInfo | None = None) -> None:
        """Adds tokens to a sample. Releases the slot when the sample ends, and ends the job when its last sample ends."""
        number = job.rows[slot]
        text = job.texts[number]
        old_length, masked = len(text.tokens), text.mask is not None
        parts = text.add_tokens(ids, done, steps)
        if text.must_restart and text.finish_reason is None:
            self._restart(job, slot)
        if text.finish_reason is None and (masked or text.mask is not None):
            self.batch.set_token_mask(slot, text.mask)
        new = text.tokens[old_length:]
        if new and job.stats.new_tokens == 0:
            job.stats.first_token_seconds = job.seconds()
        job.stats.new_tokens += len(new)
        job.stats.reasoning_tokens = sum(one.reasoning_tokens for one in job.texts)
        self.counters["new_tokens"] += len(new)
        self._outputs.append(Output(job, number, parts, new, text.released_steps, text.finish_reason, text.stop_string))
        if text.finish_reason is None:
            return
        self._remember(job, text)
        if self._scheduler.holders[slot] is job:
            self.batch.stop(slot)
            with self.lock:
                self._release(job, slot)
        if not job.running:
            self._end(job, "finished")

    def _release(self, job: Job, slot: int) -> None:
        """Frees the slots of the rows of a sample."""
        for one in (slot, *job.followers.get(slot, ())):
            self._scheduler.release(one)

    def _remember(self, job: Job, text: SampleText) -> None:
        """Marks a prompt and its response, which may be incomplete, for the prefix cache."""
        if self.batch.refills and text.tokens:
            self._sequences.append(((*job.request.ids, *text.tokens), job.scope))

    def _end(self, job: Job, counter: str, error: Exception | None = None) -> None:
        """Removes a job and frees its slots."""
        with self.lock:
            if job not in self._jobs:
                return
            self._remove(job)
        job.stats.seconds = job.seconds()
        self.job_seconds += 0.2 * (job.seconds() - self.job_seconds)
        self.counters[counter] += 1
        self._outputs.append(Output(job, ended=True, error=error))

    def _remove(self, job: Job) -> None:
        for slot in self._scheduler.slots_of(job):
            self.batch.stop(slot)
        self._scheduler.remove(job)
        del self._jobs[job]
