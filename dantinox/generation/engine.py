"""The engine of a server: `add`, `step`, `cancel`.

    engine = Engine(model, SlotBatch(model, EngineOptions(slots=8, context=2048)))
    job = engine.add(GenerationRequest(ids, config))
    while engine.busy:
        for output in engine.step():
            print(output.text, end="")

`serve.AsyncEngine` runs it on a thread. `LoadedModel` decodes prompts that start together with an
`OfflineEngine`. After the prefill, both run the code of `EngineBase`.

Threads: `step` belongs to one thread. `add`, `reserve`, `prepare`, `cancel` and `load` may be
called from any thread. `lock` guards the scheduler and the table of jobs, which they all use.
`changes` has its own rules.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Unpack

from dantinox.config import Config, UserError
from dantinox.generation.decode.prompt_scope import PromptScope
from dantinox.generation.engine_base import EngineBase, StepOptions
from dantinox.generation.engine_jobs import Job, Output, RequestFailed
from dantinox.generation.model_bundle import ModelBundle
from dantinox.generation.model_changes import ModelChanges
from dantinox.generation.request import GenerationRequest
from dantinox.generation.running_batch import PendingChunk
from dantinox.generation.sample_text import SampleText
from dantinox.generation.scheduler import Scheduler
from dantinox.generation.slot_batch import SlotBatch
from dantinox.generation.slot_params import MAX_ALTERNATIVES
from dantinox.sampling.step_subsets import ALL_STEPS

MAX_SAMPLES = 16
STEPS_WHILE_PREFILLING = 4  # tokens of a decode chunk while prompts are prefilled
MAX_PREFILL_CHUNKS = 8  # the most prefill chunks between two decode chunks
MAX_FAILURES = 3  # failing steps in a row before `step` raises the exception

log = logging.getLogger("dantinox.generation")


class Load(NamedTuple):
    """The load of an engine: slots, busy slots, waiting requests, and the most requests that may
    wait.
    """

    slots: int
    busy: int
    queued: int
    queue: int


class Engine(EngineBase[SlotBatch]):
    """Runs requests on a batch whose slots are refilled.

    Attributes:
      idle: whether `step` has nothing to do until a request is added, prepared or cancelled, or a
        program is ready. An engine that adds responses to the prefix cache is not idle.
      compile: called with the settings, `echo` and the subset of the sampling steps of a request
        whose programs are not compiled. The request waits until the batch is `ready` for it. The
        default compiles the programs immediately.
      changes: changes the model while it is served.
    """

    def __init__(
        self,
        model: ModelBundle,
        batch: SlotBatch,
        **options: Unpack[StepOptions],
    ):
        """Creates an engine; the arguments are described in `EngineBase`."""
        super().__init__(model, batch, **options)
        self.compile: Callable[[Config, bool, int], None] = batch.compile
        self.changes = ModelChanges(batch, self.lock, lambda: [job.scope for job in self._jobs])
        # Sequences with the scopes of their requests that have yet to be added to the prefix cache,
        # the newest last, and the slot of the newest one while it is prefilled.
        self._sequences: deque[tuple[Sequence[int], PromptScope]] = deque(maxlen=batch.count)
        self._sequence_slot: int | None = None
        self._prefill_oldest = False
        self.idle = True

    # --- any thread

    @property
    def load(self) -> Load:
        with self.lock:
            scheduler = self._scheduler
            busy = self.batch.count - scheduler.free
            return Load(self.batch.count, busy, len(scheduler.waiting), scheduler.queue)

    def add(self, request: GenerationRequest) -> Job:
        """Adds a request; `step` returns its outputs.

        Raises:
          UserError: the request does not fit the context or exceeds a limit, its settings or its
            constraint are invalid, or as in `SlotBatch.scope`.
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
        """Checks the sizes and adds the request to the queue, where it waits for `prepare`: the
        fast part of `add`.
        """
        self._check(request)
        request = self.model.heal(request)
        job = Job(
            request,
            min(request.config.generation.max_new_tokens, self.batch.context - len(request.ids)),
        )
        with self.lock:
            job.scope = self.batch.scope(request)
            self._scheduler.add(job)
            self._jobs[job] = None
        return job

    def prepare(self, job: Job) -> None:
        """Creates the sampling parameters and the constraint and text of each sample: the slow part
        of `add` (up to a second).

        Raises:
          UserError: the settings or the constraint are invalid.
        """
        job.prompts = self.model.prompts(job.request, self.batch.context)
        job.limit = min(job.limit, self.batch.context - max(map(len, job.prompts)))
        job.params = self.batch.row_params(job.request.config)
        job.texts = self._sample_texts(job.request, job.limit)
        needs_all = job.request.logprobs is not None or any(text.guides for text in job.texts)
        job.subset = ALL_STEPS if needs_all else job.params.subset
        job.prepared = True

    def fail(self, job: Job, error: Exception) -> None:
        """Ends a request in the next step because its preparation failed."""
        job.error = error

    def _check(self, request: GenerationRequest) -> None:
        generation = request.config.generation
        length = len(request.ids)
        context = self.batch.context
        limit = min(MAX_SAMPLES, self.batch.count)
        if not 1 <= generation.n <= limit:
            raise UserError(
                f"generation.n must be in [1, {limit}] in this server, got {generation.n}",
                key="generation.n",
            )
        needed = generation.n * request.rows_per_sample
        if needed > self.batch.count:
            message = (
                f"generation.n is {generation.n}, which needs {needed} slots with these settings,"
                " but this server has"
            )
            raise UserError(f"{message} {self.batch.count}", key="generation.n")
        if length < 1 or (length >= context and generation.max_new_tokens > 0) or length > context:
            raise UserError(
                f"the prompt has {length} tokens and must leave room in the context of {context}:"
                " shorten it"
            )
        self.model.check_ids(request.ids)
        if request.logprobs is not None and not 0 <= request.logprobs <= MAX_ALTERNATIVES:
            raise UserError(
                f"logprobs must be in [0, {MAX_ALTERNATIVES}] in this server, got"
                f" {request.logprobs}"
            )
        if request.logit_processor not in (None, self.batch.logit_processor):
            raise UserError(
                "logit_processor is an argument of the SlotBatch, and all of its requests use it"
            )
        if request.echo and request.logprobs is None:
            raise UserError("echo reports log-probabilities of the prompt: set logprobs too")

    # --- only the thread of `step`

    def step(self) -> list[Output]:
        """Admits requests, prefills prompts, dispatches the next chunk and returns the outputs of
        the previous one.

        Raises:
          Exception: any error, unless the engine isolates its requests; then only after
            `MAX_FAILURES` failing steps in a row.
        """
        try:
            self._step()
            working = self._is_computing or (self._sequences and not self._jobs)
            self.idle = not working and not self.changes.has_weights
        except Exception as error:
            if not self._isolate or self._failures == MAX_FAILURES:
                raise
            self._failures += 1
            self.idle = False
            log.exception("a step of the engine failed; ending the running requests")
            self._fail_running(error)
        outputs = self._outputs
        self._outputs = []
        return outputs

    def _step(self) -> None:
        super()._step()
        self._add_responses()

    def _before_dispatch(self) -> None:
        self.changes.add_waiting()
        if self.changes.install_weights(self.load.busy > 0 or self._pending is not None):
            self._admit()
        self._prefill_prompts()

    def _fail_running(self, error: Exception) -> None:
        """Ends all requests that hold slots, and empties the batch."""
        failed = RequestFailed(f"{type(error).__name__}: {error}")
        self._pending = None
        self._pending_jobs = {}
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
        self.batch.reset()

    def _admit(self) -> None:
        """Gives free slots to waiting requests whose programs are compiled, and starts to compile
        those of the others.
        """
        while True:
            with self.lock:
                waiting = [
                    job for job in self._scheduler.waiting if job.prepared and not self._ready(job)
                ]
            for job in waiting:
                with self._isolate_errors(job):
                    self.compile(job.request.config, job.request.echo, job.subset)
            with self.lock:
                admitted = self._scheduler.admit(self._ready)
            if admitted is None:
                return
            with self._isolate_errors(admitted):
                self._assign_prompts(admitted)

    def _assign_prompts(self, job: Job) -> None:
        """Assigns the prompts of a job to the slots that it has got.

        With n samples, the first n slots are those of their main rows, and every n-th slot after
        them is that of a row that follows. The prompts are prefilled in the slots of the first
        sample.
        """
        slots = self._scheduler.slots_of(job)
        n = job.samples
        job.followers = {slot: slots[number::n][1:] for number, slot in enumerate(slots[:n])}
        self._sequence_slot = None  # the job may have got this slot
        for ids, slot in zip(job.prompts, slots[::n], strict=True):
            self.batch.assign_prompt(slot, ids, job.request.echo and slot == slots[0], job.scope)
        job.stats.queued_seconds = job.seconds()

    def _ready(self, job: Job) -> bool:
        if not job.prepared or job.params is None:
            return False
        return self.batch.ready(job.params.program, job.request.echo, job.subset)

    def _prefill_prompts(self) -> None:
        """Prefills at most one chunk of a prompt, or up to `MAX_PREFILL_CHUNKS` if more requests
        are in prefill than decoding.

        Chunks of several prompts share a pass. A pass that takes the time of one chunk counts as
        one chunk.

        If no request is decoding, it prefills one chunk per prompt. `step` then returns, so that
        new requests are admitted.

        Every second chunk belongs to the oldest prompt, and the others to the prompt with the
        fewest tokens left. So a short prompt does not wait for a long one that came before it, and
        the long one makes progress.
        """
        batch = self.batch
        prefilling = self._scheduler.prefilling
        decoding = len(batch.remaining())
        chunks = len(prefilling)
        if decoding:
            chunks = max(1, min(MAX_PREFILL_CHUNKS, len(prefilling) // decoding))
        while prefilling and chunks > 0:
            if not decoding and self._pending is None:
                # Otherwise a request that arrives now would wait for all chunks in the queue of the
                # device.
                batch.wait()
            jobs = self._next_prompts(batch.pass_size(min(chunks, len(prefilling))))
            chunks -= 1 if batch.wide_passes else len(jobs)
            for job, left in zip(jobs, self._prefill_together(jobs), strict=True):
                with self._isolate_errors(job):
                    if left == 0:
                        self._start(job)

    def _next_prompts(self, count: int) -> list[Job]:
        """Returns the jobs whose prompts are prefilled next, at most `count`."""
        prefilling = [*self._scheduler.prefilling]
        jobs = list[Job]()
        while prefilling and len(jobs) < count:
            self._prefill_oldest = not self._prefill_oldest
            job = prefilling[0] if self._prefill_oldest else min(prefilling, key=self._prefill_left)
            prefilling.remove(job)
            jobs.append(job)
        return jobs

    def _prefill_together(self, jobs: Sequence[Job]) -> list[int | None]:
        """Prefills a chunk of each prompt; returns the tokens left of each job, or None for each
        job if the pass has failed.
        """
        slots = [self._prompt_slots(job)[0] for job in jobs]
        try:
            if len(slots) == 1:
                self.batch.prefill(slots[0])
            else:
                self.batch.prefill_together(slots)
        except Exception as error:
            for job in jobs:
                with self._isolate_errors(job):
                    raise error
            return [None] * len(jobs)
        return [self._prefill_left(job) for job in jobs]

    def _prompt_slots(self, job: Job) -> list[int]:
        """Returns the slots of the prompts of a job that are not prefilled, and at least one of
        them.
        """
        slots = self._scheduler.slots_of(job)[:: job.samples]
        return [slot for slot in slots if self.batch.prefill_left(slot) > 0] or slots[:1]

    def _prefill_left(self, job: Job) -> int:
        return sum(map(self.batch.prefill_left, self._prompt_slots(job)))

    def _add_responses(self) -> None:
        """Prefills one chunk of an earlier prompt and its response if the engine has no requests.

        The keys that decoding writes differ in their last bits from those of a prefill, so the
        prefix cache cannot use them. A request that arrives interrupts the prefill; the chunks
        before it are already in the prefix cache.
        """
        batch = self.batch
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
        job.stats.reused_tokens = self.batch.reused_tokens(first)
        self.counters["reused_tokens"] += job.stats.reused_tokens
        if job.request.echo:
            job.prompt_steps = self.batch.prompt_steps(first)
        with self.lock:
            self._scheduler.finish_prefill(job)
        for slot in copies:
            for source, to in zip(
                [first, *job.followers[first]], [slot, *job.followers[slot]], strict=True
            ):
                self.batch.copy_prompt(source, to)
        self._start_rows(job)

    def _start_row(self, job: Job, slot: int) -> None:
        """Starts to decode a row, from the tokens that its sample has already."""
        text = job.text_of(slot)
        output = text.all_tokens
        assert job.params is not None
        self.batch.start_decoding(
            slot,
            job.params,
            limit=job.limit - len(output),
            output=output,
            sample_index=job.rows[slot],
            report=job.request.logprobs is not None,
            constrained=text.restricted,
            followers=job.followers[slot],
        )

    def _restart(self, job: Job, slot: int) -> None:
        self._start_row(job, slot)

    def _dispatch(self) -> tuple[PendingChunk | None, dict[int, Job]]:
        """Starts a chunk; releases the slots of requests that certainly end within this chunk."""
        pending, jobs = super()._dispatch()
        with self.lock:
            for slot in jobs.keys() - self.batch.remaining().keys():
                if not jobs[slot].text_of(slot).guides:  # a row with guides may be restarted
                    self._release(jobs[slot], slot)
        return pending, jobs

    def _steps(self, jobs: dict[int, Job], remaining: dict[int, int]) -> int:
        steps = min(super()._steps(jobs, remaining), *remaining.values())
        if self._scheduler.prefilling:
            return min(steps, STEPS_WHILE_PREFILLING)
        # A chunk of only one token returns the first token sooner. But if requests wait for slots,
        # throughput matters more.
        has_first_token = any(not job.text_of(slot).tokens for slot, job in jobs.items())
        return 1 if has_first_token and not self._scheduler.waiting else steps

    def _remember(self, job: Job, text: SampleText) -> None:
        """Marks a prompt and its response, which may be incomplete, for the prefix cache."""
        if text.tokens:
            self._sequences.append(((*job.request.ids, *text.tokens), job.scope))
