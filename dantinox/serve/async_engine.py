"""The asyncio front of the engine: one thread that steps it, and a `ResponseStream` for each request.

    engine = AsyncEngine(dantinox.load("runs/x"))
    engine.start()
    async for delta in engine.submit(GenerationRequest(ids, engine.settings({"temperature": 0.7}))):
        print(delta.text, end="")

Threads, and what each owns:

* The event loop calls `settings`, `submit` and `status`, and reads the streams. `submit` checks sizes and takes a place in the
  queue; nothing on the loop grows with a vocabulary, a grammar or a model.
* `prepare` (one thread) makes the sampling parameters and the constraint of each request.
* `engine` (one thread) runs `Engine.step`: it alone touches the batch and the device's cache.
* `compile` (one thread) compiles what the warm-up left out and a request asks for: the router's programs, and the reports of
  a prompt. There are a dozen of them at most; any order of sampling steps runs in the program of the warm-up.

`Engine.lock` guards the scheduler and the table of jobs, `_lock` the state of this class. `_lock` may be held while
`Engine.lock` is taken, never the other way round; neither is held while something is computed.
"""

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache

from dantinox.config import Config, overlay, with_generation
from dantinox.generation.engine import Engine, Job, Output, RequestFailed
from dantinox.generation.loaded_model import LoadedModel
from dantinox.generation.request import Delta, GenerationRequest, TokenRecord
from dantinox.generation.scheduler import QueueFull
from dantinox.generation.slot_batch import CACHED_SETTINGS, CacheKey, ProgramKey, SlotBatch
from dantinox.generation.token_settings import with_default_seed
from dantinox.generation.trace import token_records
from dantinox.sampling import StepInfo
from dantinox.serve.errors import Busy, Unavailable
from dantinox.serve.response_stream import ResponseStream, Status

LONGEST_REMEMBERED = 4096  # characters of settings

log = logging.getLogger("dantinox.serve")


class _Responder:
    """Turns the outputs of one job into the deltas of its stream."""

    def __init__(self, model: LoadedModel, stream: ResponseStream):
        self.stream, self._tokenizer = stream, model.tokenizer
        self._detokenizers = [model.tokenizer.detokenizer() for _ in range(stream.request.config.generation.n)]
        for detokenizer in self._detokenizers:
            detokenizer.push(stream.request.ids)

    def give(self, output: Output) -> None:
        """Hands over what one sample has gained."""
        detokenizer, request, ids = self._detokenizers[output.sample], self.stream.request, output.ids
        texts = [detokenizer.push([token]) for token in ids]
        records: list[TokenRecord] = [{"id": token, "text": text} for token, text in zip(ids, texts, strict=True)]
        if output.steps is not None and ids:
            records = token_records(ids, texts, output.steps, self._tokenizer, request.logprobs)
        if request.echo and not self.stream.prompt:
            self.stream.prompt = self._prompt(output.job.prompt_steps)
        self.stream.push(Delta(output.sample, output.text, records, output.finish_reason))

    def _prompt(self, steps: StepInfo | None) -> list[TokenRecord]:
        """A record for each token of the prompt, the first one without probabilities."""
        request, spelt = self.stream.request, self._tokenizer.token_text
        ids = list(request.ids)
        records: list[TokenRecord] = [{"id": ids[0], "text": spelt(ids[0])}]
        if steps is not None:
            records += token_records(ids[1:], [spelt(token) for token in ids[1:]], steps, self._tokenizer, request.logprobs)
        return records


class AsyncEngine:
    """Implements `EngineProtocol` with a loaded model. Made on any thread; `submit` belongs to an event loop.

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
        given: Mapping[str, object] | None = None,
    ):
        """Takes the memory of all slots; nothing is compiled before `start`.

        Args:
          slots: requests decoded together; None: 8, or fewer where their caches would take over a quarter of the free memory.
          context: tokens of a request with its continuation; None: all the model can.
          queue: requests that may wait for a slot.
          given: settings over the run's.

        Raises:
          UserError: a setting is wrong or cannot be served, or not even one request fits the memory.
        """
        self.run, self.name = run, name
        self._config = overlay(run.config, {**(given or {}), "n": 1})
        context = run.model.config.max_context if context is None else context
        self._batch = SlotBatch(run, slots, context, self._config)
        self._engine = Engine(run, self._batch, queue=queue, isolate=True)
        self._engine.compile = self._request_programs
        self._responders: dict[Job, _Responder] = {}
        # Applying overrides takes a millisecond, and clients repeat their settings.
        self._overlaid = lru_cache(CACHED_SETTINGS)(self._laid_over)
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._state, self._doing, self._closing = "loading", "warming up", False
        self._counters: Counter[str] = Counter()
        self._compiling: set[tuple[ProgramKey, bool]] = set()  # queued or running
        self._failed: set[tuple[ProgramKey, bool]] = set()
        self._preparer = ThreadPoolExecutor(1, "prepare")
        self._compiler = ThreadPoolExecutor(1, "compile")
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self.on_failure: Callable[[], None] = lambda: None

    # --- the event loop

    def start(self) -> None:
        """Begins to warm up and then to decode; returns at once."""
        self._thread.start()

    def settings(self, given: Mapping[str, object]) -> Config:
        """The server's settings with these over them, one sample if they name none.

        Raises:
          UserError: a name or value is wrong, or needs what the server was not started with.
        """
        seed = given.get("seed")
        apart = type(seed) is int and 0 <= seed < 2**32  # the one setting that differs in every request
        rest: Mapping[str, object] = {name: value for name, value in given.items() if name != "seed" or not apart}
        key = CacheKey(rest, rest)
        config: Config = self._overlaid(key) if len(key.text) <= LONGEST_REMEMBERED else self._laid_over(key)
        if not apart:
            return config
        return with_generation(config, seed=seed)

    def _laid_over(self, given: CacheKey[Mapping[str, object]]) -> Config:
        config = overlay(self._config, given.value)
        self._batch.program_key(config)
        return config

    def submit(self, request: GenerationRequest) -> ResponseStream:
        """Queues a request and returns at once; its random draws get a seed where it has none.

        What only preparation can find wrong, a constraint that cannot be met for instance, is raised by the stream.

        Raises:
          UserError: it does not fit the context, or asks for too much.
          Busy: the queue is full.
          Unavailable: no request is taken now.
        """
        request = replace(request, config=with_default_seed(request.config, secrets.randbits(32)))
        with self._lock:
            if self._state != "ready":
                raise Unavailable(f"the server is {self._state}: {self._doing}")
            try:
                job = self._engine.reserve(request)
            except QueueFull:
                self._counters["refused"] += 1
                seconds = self._engine.job_seconds * (self._engine.load.queued + 1) / self._batch.count
                raise Busy(min(60.0, max(1.0, seconds))) from None
            stream = ResponseStream(request, job.stats, lambda: self._cancel(job))
            self._responders[job] = _Responder(self.run, stream)
            self._counters["requests"] += 1
            self._counters["prompt_tokens"] += len(request.ids)
        self._preparer.submit(self._prepare, job)
        return stream

    def _cancel(self, job: Job) -> None:
        self._engine.cancel(job)
        self._wake.set()

    def status(self) -> Status:
        """How the engine is now."""
        load = self._engine.load
        counters = {**self._counters, **self._engine.counters}
        return Status(self._state, self._doing, *load, self._batch.context, counters)

    async def drain(self, seconds: float) -> None:
        """Takes no more requests; returns when all have been answered, or after so many seconds, when the rest is ended."""
        with self._lock:
            if self._state in ("ready", "loading"):
                self._state, self._doing = "draining", "it takes no more requests"
        until = time.monotonic() + seconds
        while self._responders and self._state == "draining" and time.monotonic() < until:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Ends it now; streams that are not complete end with `Unavailable`. Does nothing when it has ended."""
        with self._lock:
            self._closing = True
            if self._state in ("ready", "loading"):
                self._state, self._doing = "draining", "it is being closed"
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        for executor in (self._preparer, self._compiler):  # a process that ends while one compiles is aborted
            executor.shutdown(cancel_futures=True)

    # --- the threads `prepare` and `compile`

    def _prepare(self, job: Job) -> None:
        if job.cancelled:
            return
        try:
            self._engine.prepare(job)
        except Exception as error:
            self._engine.fail(job, error)
        self._wake.set()

    def _request_programs(self, config: Config, echo: bool) -> None:
        """Queues the programs of settings unless they are queued; the engine calls it for each request that waits for them."""
        program = self._batch.program_key(config), echo
        if program in self._failed:
            raise RequestFailed("the programs of these settings could not be compiled")
        with self._lock:
            if program in self._compiling or self._closing:
                return
            self._compiling.add(program)
            self._counters["compilations"] += 1
            self._compiler.submit(self._compile, program, config)

    def _compile(self, program: tuple[ProgramKey, bool], config: Config) -> None:
        try:
            self._batch.compile(config, program[1])
        except Exception:
            log.exception("the programs of a request could not be compiled")
            self._failed.add(program)
        finally:
            with self._lock:
                self._compiling.discard(program)
            self._wake.set()

    # --- the engine's thread

    def _work(self) -> None:
        try:
            self._batch.compile(self._config)
            with self._lock:
                if self._state == "loading":
                    self._state, self._doing = "ready", "serving"
            while not self._closing:
                self._wake.clear()
                outputs = self._engine.step()
                for output in outputs:
                    self._hand_out(output)
                if not outputs and self._engine.idle:
                    self._wake.wait()
        except BaseException as error:
            with self._lock:
                self._state, self._doing = "failed", f"{type(error).__name__}: {error}"
            self.on_failure()
            raise
        finally:
            for responder in [*self._responders.values()]:
                responder.stream.end(Unavailable(f"the server is {self._state}: {self._doing}"))
            self._responders.clear()

    def _hand_out(self, output: Output) -> None:
        """Gives a reader what is theirs. What goes wrong here is the request's own, too."""
        responder = self._responders.get(output.job)
        if responder is None:
            return
        try:
            if output.ended:
                del self._responders[output.job]
                responder.stream.end(output.error)
            else:
                responder.give(output)
        except Exception as error:
            log.exception("a request failed")
            self._responders.pop(output.job, None)
            self._engine.cancel(output.job)
            with contextlib.suppress(Exception):
                responder.stream.end(RequestFailed(f"{type(error).__name__}: {error}"))
