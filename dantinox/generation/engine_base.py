"""`EngineBase`: decodes the rows of jobs on a batch, and turns their tokens into outputs.

`Engine` admits requests and prefills their prompts on a batch whose slots are refilled. Offline,
all rows start together.
"""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypedDict, TypeVar

from dantinox.config import UserError
from dantinox.generation.decode.generate_toks import DECODE_CHUNK
from dantinox.generation.engine_jobs import Job, Output, RequestFailed
from dantinox.generation.model_bundle import ModelBundle
from dantinox.generation.request import GenerationRequest
from dantinox.generation.running_batch import PendingChunk, RunningBatch
from dantinox.generation.sample_text import SampleText
from dantinox.generation.scheduler import Scheduler
from dantinox.sampling import StepInfo

STREAM_CHUNK_SECONDS = 0.08  # approximate duration of a chunk when the output is streamed

log = logging.getLogger("dantinox.generation")

B = TypeVar("B", bound=RunningBatch)


class StepOptions(TypedDict, total=False):
    """The keyword arguments of `EngineBase`."""

    queue: int
    chunk_seconds: float | None
    max_steps: int
    dispatch_ahead: bool
    isolate: bool


class EngineBase(Generic[B]):
    """Decodes jobs that hold the slots of a batch.

    Attributes:
      counters: totals by name: `finished`, `cancelled`, `failed`, `new_tokens`, and
        `Feature.counts`.
    """

    def __init__(
        self,
        model: ModelBundle,
        batch: B,
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
          chunk_seconds: the approximate duration of a chunk; None: every chunk has `max_steps` ≤ 32
            tokens.
          dispatch_ahead: dispatch a chunk before the previous one is returned, so that the device
            does not wait for the host.
          isolate: after an unexpected exception, end only the request that raised it and continue.
            If the exception belongs to no single request, all running requests end. Without
            `isolate`, `step` raises the exception.
        """
        self.model = model
        self.batch = batch
        self.counters = Counter[str]()
        self.lock = threading.RLock()
        self.job_seconds = 1.0  # running mean of the seconds per request
        self._scheduler: Scheduler[Job] = Scheduler(batch.count, queue)
        self._jobs: dict[Job, None] = {}  # jobs that have not ended, the oldest first
        self._chunk_seconds = chunk_seconds
        self._max_steps = max_steps
        self._dispatch_ahead = dispatch_ahead
        self._isolate = isolate
        self._step_seconds = 0.01  # running mean of the seconds per token
        # The time when the last chunk was collected, or when the last step without one began.
        self._collected = time.monotonic()
        self._pending: PendingChunk | None = None
        self._pending_jobs: dict[int, Job] = {}
        self._outputs: list[Output] = []
        self._failures = 0

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._jobs)

    def cancel(self, job: Job) -> None:
        """Ends a request in the next step; unfinished samples get the finish reason `cancelled`."""
        job.cancelled = True

    # --- only the thread of `step`

    def step(self) -> list[Output]:
        """Dispatches the next chunk and returns the outputs of the previous one."""
        self._step()
        outputs = self._outputs
        self._outputs = []
        return outputs

    def _step(self) -> None:
        self._end_early()
        self._before_dispatch()
        pending = self._pending
        jobs = self._pending_jobs
        # Dispatch the next chunk before collecting the previous one, unless that decides which
        # tokens are allowed next.
        if pending is not None and (not self._dispatch_ahead or self._constrained()):
            self._pending = None
            self._pending_jobs = {}
        else:
            self._pending, self._pending_jobs = self._dispatch()
        if pending is not None:
            self._collect(pending, jobs)
            elapsed = time.monotonic() - self._collected
            self._collected = time.monotonic()
            self._measure(elapsed / max(1, pending.steps))
            self._failures = 0
        else:
            self._collected = time.monotonic()

    def _before_dispatch(self) -> None:
        """Called in each step before the next chunk is dispatched."""

    def _measure(self, step_seconds: float) -> None:
        """Updates the mean with the seconds per token of a chunk."""
        self._step_seconds += 0.3 * (step_seconds - self._step_seconds)

    @property
    def _is_computing(self) -> bool:
        return self._pending is not None or self.batch.has_work or bool(self._scheduler.prefilling)

    def _sample_texts(self, request: GenerationRequest, limit: int) -> list[SampleText]:
        return [
            SampleText(
                self.model.tokenizer,
                request.config.generation,
                request.ids,
                guides,
                visible_ids=request.visible_ids,
                reasoning=request.reasoning,
                limit=limit,
                healed=request.healed or (),
            )
            for guides in self.model.guides(request)
        ]

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
            if not self.batch.cache_is_valid:
                raise  # so all requests fail

    def _end_early(self) -> None:
        """Ends the jobs whose preparation failed, and those that were cancelled."""
        for job in [*self._jobs]:
            if job.error is not None:
                with self._isolate_errors(job):
                    raise job.error
        for job in [*self._jobs]:
            if job.cancelled:
                self._end_cancelled(job)

    def _end_cancelled(self, job: Job) -> None:
        for number in job.running:
            self._outputs.append(Output(job, number, finish_reason="cancelled"))
            if job.texts:
                self._remember(job, job.texts[number])
        self._end(job, "cancelled")

    def _remember(self, job: Job, text: SampleText) -> None:
        """Called when a sample has ended, perhaps before its end."""

    def _start_rows(self, job: Job) -> None:
        """Starts the samples of a job that has its slots."""
        for number, slot in enumerate(self._scheduler.slots_of(job)[: job.samples]):
            job.rows[slot] = number
            text = job.texts[number]
            if job.limit == 0 or text.complete:
                self.batch.stop(slot)
                self._add_tokens(job, slot, [])
                continue
            self._start_row(job, slot)
            if text.restricted:
                self.batch.set_token_mask(slot, text.mask)

    def _start_row(self, job: Job, slot: int) -> None:
        """Starts to decode a sample."""

    def _restart(self, job: Job, slot: int) -> None:
        """Decodes a row again from the last token that its guides have kept. Tokens that are being
        computed are dropped.
        """
        raise NotImplementedError

    def _constrained(self) -> bool:
        """Whether the last token of a decoding row decides which tokens are allowed next.

        This holds for a row with a mask, and for every row with guides if rows cannot be restarted.
        """
        for slot in self.batch.remaining():
            job = self._scheduler.holders[slot]
            text = None if job is None else job.text_of(slot)
            if text is not None and (
                text.restricted or (text.guides and not self.batch.can_restart)
            ):
                return True
        return False

    def _dispatch(self) -> tuple[PendingChunk | None, dict[int, Job]]:
        """Starts a chunk; returns it with the jobs of its rows by slot."""
        if not self.batch.has_work:
            return None, {}
        remaining = self.batch.remaining()
        holders = {slot: self._scheduler.holders[slot] for slot in remaining}
        jobs = {slot: job for slot, job in holders.items() if job is not None}
        return self.batch.dispatch(self._steps(jobs, remaining)), jobs

    def _steps(self, jobs: dict[int, Job], remaining: dict[int, int]) -> int:
        """Returns the number of tokens of the next chunk."""
        if self._constrained():
            return 1
        if self._chunk_seconds is None:
            return self._max_steps
        return min(self._max_steps, max(1, int(self._chunk_seconds / self._step_seconds)))

    def _collect(self, pending: PendingChunk, jobs: dict[int, Job]) -> None:
        """Waits for a chunk and converts its tokens to outputs."""
        for output in self.batch.collect(pending):
            job = jobs[output.slot]
            if job not in self._jobs or job.cancelled:
                continue
            with self._isolate_errors(job):
                job.stats.counts.update(output.counts)
                self.counters.update(output.counts)
                self._add_tokens(
                    job, output.slot, output.tokens.tolist(), output.done, output.steps
                )

    def _add_tokens(
        self, job: Job, slot: int, ids: list[int], done: bool = True, steps: StepInfo | None = None
    ) -> None:
        """Adds tokens to a sample. Releases the slot when the sample ends, and ends the job when
        its last sample ends.
        """
        text = job.text_of(slot)
        old_length = len(text.tokens)
        was_restricted = text.restricted
        parts = text.add_tokens(ids, done, steps)
        if text.must_restart and text.finish_reason is None:
            self._restart(job, slot)
        if text.finish_reason is None and (was_restricted or text.restricted):
            self.batch.set_token_mask(slot, text.mask)
        new = text.tokens[old_length:]
        if new and job.stats.new_tokens == 0:
            job.stats.first_token_seconds = job.seconds()
        job.stats.new_tokens += len(new)
        job.stats.reasoning_tokens = sum(one.reasoning_tokens for one in job.texts)
        self.counters["new_tokens"] += len(new)
        self._outputs.append(
            Output(
                job,
                job.rows[slot],
                parts=parts,
                ids=new,
                steps=text.released_steps,
                finish_reason=text.finish_reason,
                stop_string=text.stop_string,
            )
        )
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
        self._scheduler.release(slot)
        for follower in job.followers.get(slot, ()):
            self._scheduler.release(follower)

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
        """Removes a job in any state from the engine and the batch."""
        for slot in self._scheduler.slots_of(job):
            self.batch.stop(slot)
        self._scheduler.remove(job)
        del self._jobs[job]
