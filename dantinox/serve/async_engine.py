"""The engine: one thread that decodes the texts of many, and hands them out as they come.

engine = AsyncEngine(dantinox.load("runs/x"))
engine.start()
async for piece in engine.submit(GenerationRequest(ids, engine.settings({"temperature": 0.7}))):
    print(piece.text, end="")
"""

import asyncio
import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax

from dantinox.config import Config, UserError, overlay
from dantinox.generation.batch import RowText
from dantinox.generation.constraints import Constraint, Matcher
from dantinox.generation.decode import CHUNK
from dantinox.generation.loaded_model import LoadedModel
from dantinox.generation.loop import READER_SECONDS
from dantinox.generation.request import Delta, GenerationRequest, TokenRecord
from dantinox.generation.slots import ALTERNATIVES, NOTHING, REMEMBERED, Flight, Lane, Slots, Spelt, Way, row_bytes
from dantinox.generation.token_settings import seeded, stop_token_ids
from dantinox.generation.trace import token_records
from dantinox.programs import available_bytes
from dantinox.sampling import StepInfo
from dantinox.serve.errors import Busy, Unavailable
from dantinox.serve.response_stream import ResponseStream, Status
from dantinox.serve.scheduler import Full, Scheduler

MOST_SAMPLES = 16
USUAL_SLOTS = 8
MEMORY_SHARE = 4  # the caches of all slots take at most one part in so many of what is free
FEW_STEPS = 4  # tokens of a chunk between two parts of a prompt
LONGEST_REMEMBERED = 4096  # characters of settings
PARTS = 2  # of a prompt that are read between two chunks

MakeMatcher = Callable[[Sequence[int]], Matcher]  # given the ids that end a text besides the end tokens


class _Sample:
    """One row of an answer: its text, and the texts of its tokens where they are reported."""

    def __init__(self, job: "_Job", number: int):
        tokenizer, section = job.tokenizer, job.ask.config.generation
        self.number, self.done = number, False
        self.row = RowText(tokenizer, section, job.ask.ids)
        self._job = job
        self._detokenizer = tokenizer.detokenizer()
        self._detokenizer.push(job.ask.ids)
        self.matcher = None if job.grammar is None else job.grammar(stop_token_ids(tokenizer, section))

    def take(self, ids: list[int], done: bool, info: StepInfo | None) -> Delta:
        """What it gains by new tokens.

        Raises:
          UserError: its constraint takes too long to follow, or cannot be met.
        """
        before, ask = len(self.row.tokens), self._job.ask
        if self.matcher is not None:
            for token in ids:
                self.matcher.take(token)
        text = self.row.take(ids, done, complete=self.matcher is not None and self.matcher.done)
        ids = ids[: len(self.row.tokens) - before]
        texts = [self._detokenizer.push([token]) for token in ids]
        records: list[TokenRecord] = [{"id": token, "text": added} for token, added in zip(ids, texts, strict=True)]
        if info is not None and ids:
            steps: StepInfo = jax.tree.map(lambda x: x[: len(ids)], info)
            records = token_records(ids, texts, steps, self._job.tokenizer, ask.logprobs)
        self.done = self.row.reason is not None
        return Delta(self.number, text, records, self.row.reason)


class _Job:
    """An ask that is being met.

    Attributes:
      rows: its samples by the slots they were begun in.
    """

    def __init__(
        self,
        ask: GenerationRequest,
        answer: ResponseStream,
        way: Way,
        limit: int,
        run: LoadedModel,
        grammar: MakeMatcher | None,
    ):
        self.ask, self.answer, self.way, self.limit, self.grammar = ask, answer, way, limit, grammar
        self.tokenizer = run.tokenizer
        self.samples = ask.config.generation.n
        self.rows: dict[int, _Sample] = {}
        self.cancelled = False
        self.begun = time.monotonic()

    def seconds(self) -> float:
        """Since the ask."""
        return time.monotonic() - self.begun

    @property
    def running(self) -> list[int]:
        """The numbers of the samples that have not ended."""
        ended = {row.number for row in self.rows.values() if row.done}
        return [number for number in range(self.samples) if number not in ended]


class _Chunk(NamedTuple):
    """Tokens that the device is at, and whose they are by the slots."""

    flight: Flight
    rows: dict[int, tuple[_Job, _Sample]]


class AsyncEngine:
    """Meets the `EngineProtocol` protocol with a run's model. Made on any thread; `submit` belongs to an event loop.

    Attributes:
      on_failure: called from the engine's thread when it has failed for good.
    """

    def __init__(
        self,
        run: LoadedModel,
        *,
        slots: int | None = None,
        context: int | None = None,
        queue: int = 64,
        name: str = "dantinox",
        given: Mapping[str, Any] | None = None,
        later: Sequence[Mapping[str, Any]] = (),
    ):
        """Takes the memory of all slots; nothing is compiled before `start`.

        Args:
          slots: texts decoded together; None: 8, or fewer where their caches would take over a quarter of the free memory.
          context: tokens of a text with its continuation; None: all the model can.
          queue: asks that may wait for a slot.
          given: settings over the run's.
          later: settings whose programs are compiled once the server is ready, for those who will ask with them.

        Raises:
          UserError: a setting is wrong or cannot be served, or not even one text fits the memory.
        """
        self.run, self.name, self._config = run, name, overlay(run.config, given or {})
        self._config = _with_n(self._config, 1)
        context = run.model.config.max_context if context is None else context
        slots = _fitting_slots(run, self._config, context) if slots is None else slots
        self._slots = Slots(run, slots, context, self._config)
        self._scheduler: Scheduler[_Job] = Scheduler(slots, queue)
        self._jobs: dict[_Job, None] = {}  # asks that have not ended, the oldest first
        self._overlaid = lru_cache(REMEMBERED)(self._laid_over)  # they take a millisecond, and clients ask with the same again
        self._lock, self._wake = threading.RLock(), threading.Event()
        self._state, self._doing, self._closing = "loading", "warming up", False
        self._counters: Counter[str] = Counter()
        self._later = [overlay(self._config, settings) for settings in later]
        self._compiling: set[tuple[Lane, bool]] = set()
        self._compilers: list[threading.Thread] = []
        self._job_seconds, self._step_seconds = 1.0, 0.01  # running means: of a job, of a token of all rows
        self._steps = 1  # of the newest chunk
        self._fault: Exception | None = None  # of a thread besides the engine's
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self.on_failure: Callable[[], None] = lambda: None

    # --- from other threads

    def start(self) -> None:
        """Begins to warm up and then to decode; returns at once."""
        self._thread.start()

    def settings(self, given: Mapping[str, Any]) -> Config:
        """The server's settings with these over them, one sample if they name none.

        Raises:
          UserError: a name or value is wrong, or needs what the server was not started with.
        """
        seed = given.get("seed")
        apart = type(seed) is int and 0 <= seed < 2**32  # alone in being another one in every request
        rest: Mapping[str, Any] = {name: value for name, value in given.items() if name != "seed" or not apart}
        asked = Spelt(rest, rest)
        config: Config = self._overlaid(asked) if len(asked.text) <= LONGEST_REMEMBERED else self._laid_over(asked)
        if not apart:
            return config
        return config.model_copy(update={"generation": config.generation.model_copy(update={"seed": seed})})

    def _laid_over(self, given: Spelt[Mapping[str, Any]]) -> Config:
        config = overlay(self._config, given.value)
        self._slots.lane(config)
        return config

    def submit(self, ask: GenerationRequest) -> ResponseStream:
        """Queues an ask and returns at once; its random draws get a seed where it has none.

        Raises:
          UserError: it does not fit the context, or asks for too much.
          Busy: the queue is full.
          Unavailable: no ask is taken now.
        """
        ask = replace(ask, config=seeded(ask.config, secrets.randbits(32)))
        self._check(ask)
        with self._queueing():  # before the work of making a job, so that a full queue is told at once
            self._scheduler.check(ask.config.generation.n)
        job = self._job(ask)
        with self._queueing():
            self._scheduler.add(job)
            self._jobs[job] = None
            self._counters["requests"] += 1
            self._counters["prompt_tokens"] += len(ask.ids)
        self._wake.set()
        return job.answer

    @contextlib.contextmanager
    def _queueing(self) -> Iterator[None]:
        """The queue, for this thread alone.

        Raises:
          Busy: it was found full.
          Unavailable: no ask is taken now.
        """
        with self._lock:
            if self._state != "ready":
                raise Unavailable(f"the server is {self._state}: {self._doing}")
            try:
                yield
            except Full:
                self._counters["refused"] += 1
                seconds = self._job_seconds * (len(self._scheduler.waiting) + 1) / self._slots.count
                raise Busy(min(60.0, max(1.0, seconds))) from None

    def status(self) -> Status:
        """How the engine is now."""
        with self._lock:
            s = self._scheduler
            busy = self._slots.count - s.free
            sizes = self._slots.count, busy, len(s.waiting), s.queue, self._slots.context
            return Status(self._state, self._doing, *sizes, dict(self._counters))

    async def drain(self, seconds: float) -> None:
        """Takes no more asks; returns when all have been answered, or after so many seconds, the rest being told."""
        with self._lock:
            if self._state in ("ready", "loading"):
                self._state, self._doing = "draining", "it takes no more requests"
        until = time.monotonic() + seconds
        while self._jobs and self._state == "draining" and time.monotonic() < until:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Ends it now; answers that are not complete end with `Unavailable`. Harmless when it has ended."""
        with self._lock:
            self._closing = True
            if self._state in ("ready", "loading"):
                self._state, self._doing = "draining", "it is being closed"
        self._wake.set()
        for thread in (self._thread, *self._compilers):  # a process that ends while one compiles is aborted
            if thread.is_alive():
                thread.join()

    def _check(self, ask: GenerationRequest) -> None:
        """Raises a UserError for an ask of more than there is."""
        generation, length, context = ask.config.generation, len(ask.ids), self._slots.context
        most = min(MOST_SAMPLES, self._slots.count)
        if not 1 <= generation.n <= most:
            raise UserError(f"generation.n must be in [1, {most}] in this server, got {generation.n}")
        if length < 1 or (length >= context and generation.max_new_tokens > 0) or length > context:
            raise UserError(f"the prompt has {length} tokens and must leave room in the context of {context}: shorten it")
        V = self.run.model.config.vocab_size
        if min(ask.ids) < 0 or max(ask.ids) >= V:
            raise UserError(f"tokens of the prompt must be in [0, {V}), got {next(i for i in ask.ids if not 0 <= i < V)}")
        if ask.logprobs is not None and not 0 <= ask.logprobs <= ALTERNATIVES:
            raise UserError(f"logprobs must be in [0, {ALTERNATIVES}] in this server, got {ask.logprobs}")
        if ask.echo and ask.logprobs is None:
            raise UserError("echo reports log-probabilities of the prompt: ask for logprobs too")

    def _job(self, ask: GenerationRequest) -> _Job:
        """How an ask is met.

        Raises:
          UserError: its settings or its constraint cannot be.
        """
        way = self._slots.way(ask.config)
        grammar = None if ask.constraint is None else self._grammar(ask.constraint)
        limit = min(ask.config.generation.max_new_tokens, self._slots.context - len(ask.ids))
        return _Job(ask, ResponseStream(ask, self._cancel), way, limit, self.run, grammar)

    def _grammar(self, constraint: Constraint) -> MakeMatcher:
        """Makes matchers of a constraint, of which one has been made to see whether it can be."""
        make = partial(self.run.grammars.matcher, constraint.kind, constraint.source)
        make(())
        return make

    def _cancel(self, answer: ResponseStream) -> None:
        with self._lock:
            for job in self._jobs:
                if job.answer is answer:
                    job.cancelled = True
        self._wake.set()

    # --- the engine's thread

    def _work(self) -> None:
        try:
            self._slots.compile(self._slots.lane(self._config))
            with self._lock:
                if self._state == "loading":
                    self._state, self._doing = "ready", "serving"
            for config in self._later:
                self._compile_beside(self._slots.lane(config), False)
            self._loop()
        except BaseException as error:
            with self._lock:
                self._state, self._doing = "failed", f"{type(error).__name__}: {error}"
            self.on_failure()
            raise
        finally:
            with self._lock:
                for job in self._jobs:
                    self._scheduler.remove(job)
                    job.answer.end(Unavailable(f"the server is {self._state}: {self._doing}"))

    def _loop(self) -> None:
        chunk: _Chunk | None = None
        handed = time.monotonic()
        while not self._closing:
            self._wake.clear()
            if self._fault is not None:
                raise self._fault
            self._end_cancelled()
            self._admit()
            read = self._read()
            # A chunk is begun before the last one is handed out, but where the tokens allowed next depend on it.
            rows = self._decoding()
            constrained = any(row.matcher is not None for _, row in rows.values())
            ahead, chunk = chunk, None if chunk is not None and constrained else self._dispatch(rows, constrained)
            if ahead is not None:
                self._hand_out(ahead)
                took, handed = time.monotonic() - handed, time.monotonic()
                self._step_seconds += 0.3 * (took / self._steps - self._step_seconds)
            elif chunk is None and not read:
                self._wake.wait()
            if ahead is None:
                handed = time.monotonic()

    def _decoding(self) -> dict[int, tuple[_Job, _Sample]]:
        """By their slots the samples that may have more tokens than those the device is at, and whose they are."""
        holders = {slot: self._scheduler.holders[slot] for slot in self._slots.left()}
        return {slot: (job, job.rows[slot]) for slot, job in holders.items() if job is not None}

    def _end_cancelled(self) -> None:
        with self._lock:
            for job in [job for job in self._jobs if job.cancelled]:
                job.answer.give([Delta(number, "", [], "cancelled") for number in job.running])
                self._end(job, "cancelled")

    def _admit(self) -> None:
        while True:
            with self._lock:
                for job in self._scheduler.waiting:
                    if not self._ready(job):
                        self._compile_beside(job.way.lane, job.ask.echo)
                job_ = self._scheduler.admit(self._ready, lambda job: self._kept(job).slot)
                if job_ is None:
                    return
                slot = self._scheduler.slots_of(job_)[0]
            kept = self._kept(job_)
            self._slots.begin(slot, job_.ask.ids, kept, job_.ask.echo)
            job_.answer.stats.queued_seconds = job_.seconds()
            job_.answer.stats.reused_tokens = kept.length
            self._counters["reused_tokens"] += kept.length

    def _ready(self, job: _Job) -> bool:
        return self._slots.ready(job.way.lane, job.ask.echo)

    def _kept(self, job: _Job) -> Any:
        return NOTHING if job.ask.echo else self._slots.kept(job.ask.ids)

    def _compile_beside(self, lane: Lane, echo: bool) -> None:
        """Makes the programs of a lane on a thread of their own, while others are served."""
        if (lane, echo) in self._compiling:
            return
        self._compiling.add((lane, echo))
        self._counters["compilations"] += 1

        def compile() -> None:
            try:
                self._slots.compile(lane, echo)
            except Exception as error:
                self._fault = error
            self._wake.set()

        thread = threading.Thread(target=compile, name="compiler", daemon=True)
        thread.start()
        self._compilers.append(thread)

    def _read(self) -> bool:
        """Reads prompts; whether any.

        While others are being decoded these are two parts, and more where those who wait for their first token are more than
        those who would wait for their next one; else all of the first prompt.
        """
        decoding, begun = len(self._slots.left()), False
        budget = PARTS * self._slots.part * max(1, len(self._scheduler.reading) // max(1, decoding))
        while self._scheduler.reading and (budget > 0 or not self._slots.left()):
            job = self._scheduler.reading[0]
            slots, begun = self._scheduler.slots_of(job), True
            left = self._slots.read(slots[0])
            budget -= min(self._slots.part, len(job.ask.ids))
            if left == 0:
                self._start(job, slots)
        return begun

    def _start(self, job: _Job, slots: list[int]) -> None:
        """Begins to decode a job whose prompt has been read."""
        ask, first = job.ask, slots[0]
        if ask.echo:
            job.answer.prompt = self._echoed(job, self._slots.echoed(first))
        with self._lock:
            self._scheduler.through(job)
        for slot in slots[1:]:
            self._slots.copy(first, slot)
        for number, slot in enumerate(slots):
            sample = job.rows[slot] = _Sample(job, number)
            if job.limit == 0 or (sample.matcher is not None and sample.matcher.done):
                self._give(job, slot, sample.take([], True, None))
                continue
            report = ask.logprobs is not None
            self._slots.start(slot, job.way, limit=job.limit, sample_index=number, report=report)
            if sample.matcher is not None and not self._allow(job, slot, sample):
                return

    def _echoed(self, job: _Job, told: StepInfo | None) -> list[TokenRecord]:
        """A record for each token of a prompt, the first one without chances."""
        ids, spelt = list(job.ask.ids), job.tokenizer.spelt
        records: list[TokenRecord] = [{"id": ids[0], "text": spelt(ids[0])}]
        if told is not None:
            records += token_records(ids[1:], [spelt(token) for token in ids[1:]], told, job.tokenizer, job.ask.logprobs)
        return records

    def _dispatch(self, rows: dict[int, tuple[_Job, _Sample]], constrained: bool) -> _Chunk | None:
        """Begins a chunk; the slot of a text that ends with it at the latest is free for the next one."""
        if not rows:
            return None
        steps = min(CHUNK, max(1, int(READER_SECONDS / self._step_seconds)), *self._slots.left().values())
        if self._scheduler.reading:
            steps = min(steps, FEW_STEPS)
        elif not self._scheduler.waiting and any(not row.row.tokens for _, row in rows.values()):
            steps = 1  # the first one at once; where a slot was waited for, it is a small part of the time
        self._steps = 1 if constrained else steps
        chunk = _Chunk(self._slots.dispatch(self._steps), rows)
        with self._lock:
            for slot in rows.keys() - self._slots.left().keys():
                self._scheduler.release(slot)
        return chunk

    def _hand_out(self, chunk: _Chunk) -> None:
        """Waits for a chunk and gives everyone what is theirs."""
        for one in self._slots.collect(chunk.flight):
            job, row = chunk.rows[one.slot]
            if job not in self._jobs or job.cancelled:
                continue
            if job.answer.stats.new_tokens == 0:
                job.answer.stats.first_token_seconds = job.seconds()
            try:
                piece = row.take(one.tokens.tolist(), one.done, one.info)
            except UserError as error:
                self._give_up(job, error)
                continue
            self._give(job, one.slot, piece)
            if row.matcher is not None and not row.done:
                self._allow(job, one.slot, row)

    def _allow(self, job: _Job, slot: int, row: _Sample) -> bool:
        """Tells the batch which tokens a constrained row may have next; False where that failed, and its job with it."""
        assert row.matcher is not None
        try:
            self._slots.allow(slot, row.matcher.mask())
            return True
        except UserError as error:
            self._give_up(job, error)
            return False

    def _give_up(self, job: _Job, error: UserError) -> None:
        """Ends a job whose constraint takes longer than it may, or that no token of the vocabulary can meet."""
        self._end(job, "finished", error)

    def _give(self, job: _Job, slot: int, piece: Delta) -> None:
        job.answer.stats.new_tokens += len(piece.tokens)
        self._counters["new_tokens"] += len(piece.tokens)
        job.answer.give([piece])
        if piece.finish_reason is None:
            return
        if self._scheduler.holders[slot] is job:
            self._slots.stop(slot)
            with self._lock:
                self._scheduler.release(slot)
        if not job.running:
            self._end(job, "finished")

    def _end(self, job: _Job, how: str, error: UserError | None = None) -> None:
        """Takes a job out; the slots it still holds are free."""
        with self._lock:
            for slot in self._scheduler.slots_of(job):
                self._slots.stop(slot)
            self._scheduler.remove(job)
            del self._jobs[job]
        job.answer.stats.seconds = job.seconds()
        self._job_seconds += 0.2 * (job.seconds() - self._job_seconds)
        self._counters[how] += 1
        job.answer.end(error)


def _with_n(config: Config, n: int) -> Config:
    return config.model_copy(update={"generation": config.generation.model_copy(update={"n": n})})


def _fitting_slots(run: LoadedModel, config: Config, context: int) -> int:
    """The slots whose caches fit.

    Raises:
      UserError: not even one does.
    """
    free, needed = available_bytes(jax.devices()[0]), row_bytes(run, config, context)
    if free is None:
        return USUAL_SLOTS
    if (fitting := free // MEMORY_SHARE // needed) < 1:
        raise UserError(
            f"the cache of one text of {context} tokens takes {needed / 1e9:.1f} GB, over a quarter of the "
            f"{free / 1e9:.1f} GB that are free: give a shorter context"
        )
    return int(min(USUAL_SLOTS, fitting))
