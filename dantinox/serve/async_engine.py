"""The asyncio front end of the engine: a thread that runs its steps, and a `ResponseStream` for
each request.

    engine = AsyncEngine(dantinox.load("runs/x"))
    engine.start()
    async for delta in engine.submit(GenerationRequest(ids, engine.settings({"temperature": 0.7}))):
        print(delta.text, end="")

The threads and their responsibilities:

* The event loop calls `settings`, `submit` and `status`, and reads the streams. `submit` checks
  sizes and reserves a place in the queue. The duration of these calls does not depend on the size
  of the vocabulary, the grammar or the model.
* `prepare` (one thread) builds the sampling parameters and the constraint of each request.
* `engine` (one thread) runs `Engine.step`. Only this thread uses the batch and the cache on the
  device.
* `compile` (one thread) compiles the programs that a request needs and that the warm-up did not
  compile: programs for the entropy router, for prompt log-probabilities and for embeddings. There
  are at most a dozen such programs. The decode program that the warm-up compiles supports every
  order of sampling steps. Some of these programs can be compiled in the background as soon as the
  engine is ready (`background`), before a request needs them. With `steps`, the warm-up compiles
  only the decode program for the usual sampling steps, and the one for all steps follows in the
  background.

`Engine.lock` guards the scheduler and the table of jobs; `_lock` guards the state of this class. A
thread that holds `_lock` may acquire `Engine.lock`, but not the reverse. No lock is held during a
computation.
"""

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dantinox.config import Config, UserError, overlay, with_generation
from dantinox.config.engine_options import EngineOptions
from dantinox.generation.api.embedder import Embedder, check_length, check_pooling
from dantinox.generation.api.loaded_model import LoadedModel
from dantinox.generation.api.trace import token_records
from dantinox.generation.engine import Engine
from dantinox.generation.engine_jobs import Job, Output, RequestFailed
from dantinox.generation.guides.token_healing import response_detokenizer
from dantinox.generation.request import Delta, GenerationRequest, TokenRecord
from dantinox.generation.scheduler import QueueFull
from dantinox.generation.slot_batch import SlotBatch
from dantinox.generation.slot_params import CACHED_SETTINGS, CacheKey, ProgramKey
from dantinox.generation.token_settings import with_default_seed
from dantinox.sampling import LogitProcessor, StepInfo
from dantinox.serve.embedding_queue import EmbeddingQueue
from dantinox.serve.errors import Busy, Unavailable
from dantinox.serve.response_stream import ResponseStream, Status, wake_readers

DEFAULTS = EngineOptions()
# The configuration of a request is cached if its settings have at most this many characters.
MAX_CACHED_LENGTH = 4096

log = logging.getLogger("dantinox.serve")


class _Programs(NamedTuple):
    """The programs of a request, as the arguments of `SlotBatch.compile`, with the key of its
    configuration.
    """

    key: ProgramKey
    echo: bool
    subset: int | None


class _Responder:
    """Turns the outputs of one job into the deltas of its stream."""

    def __init__(self, model: LoadedModel, stream: ResponseStream):
        self.stream = stream
        self._tokenizer = model.tokenizer
        request = stream.request
        # Decode each token by itself, for the reports on tokens: one for each sample. The engine
        # decodes the text.
        reported = request.config.generation.n if request.logprobs is not None else 0
        self._detokenizers = [
            response_detokenizer(model.tokenizer, request.ids, request.healed or ())
            for _ in range(reported)
        ]

    def push_output(self, output: Output) -> None:
        """Adds the new tokens of one sample to the stream."""
        request = self.stream.request
        ids = output.ids
        records: list[TokenRecord] = [{"id": token} for token in ids]
        if output.steps is not None and ids:
            detokenizer = self._detokenizers[output.sample]
            texts = [detokenizer.push([token]) for token in ids]
            records = token_records(ids, texts, output.steps, self._tokenizer, request.logprobs)
        if request.echo and not self.stream.prompt:
            self.stream.prompt = self._prompt_records(output.job.prompt_steps)
        self.stream.push(
            Delta(output.sample, output.text, records, output.finish_reason, output.stop_string),
            wake=False,
        )

    def _prompt_records(self, steps: StepInfo | None) -> list[TokenRecord]:
        """Returns a record for each token of the prompt; the first one has no probabilities."""
        request = self.stream.request
        text_of = self._tokenizer.token_text
        ids = list(request.ids)
        records: list[TokenRecord] = [{"id": ids[0], "text": text_of(ids[0])}]
        if steps is not None:
            records += token_records(
                ids[1:],
                [text_of(token) for token in ids[1:]],
                steps,
                self._tokenizer,
                request.logprobs,
            )
        return records


class AsyncEngine:
    """Implements `EngineProtocol` with a loaded model. Create it on any thread, and call `submit`
    on an event loop.

    Attributes:
      on_failure: called from the engine's thread after a failure that the engine cannot recover
        from.
      lora_paths: the paths of the loaded adapters by name.
    """

    def __init__(
        self,
        run: LoadedModel,
        options: EngineOptions = DEFAULTS,
        *,
        name: str = "dantinox",
        overrides: Mapping[str, object] | None = None,
        logit_processor: LogitProcessor | None = None,
        lora_paths: Mapping[str, Path] | None = None,
    ):
        """Allocates the caches of all slots. Compilation starts with `start`.

        Args:
          run: the loaded model.
          name: the model's name for clients.
          overrides: settings that replace those of the run.
          logit_processor: edits the logits of all requests, as in `LoadedModel.generate`; no
            request can choose it.
          lora_paths: the paths of the adapters of `run`.

        Raises:
          UserError: a setting is wrong or cannot be served, or the memory is too small for one
            slot.
        """
        self.run = run
        self.name = name
        self._config = overlay(run.config, {**(overrides or {}), "n": 1})
        self._batch = SlotBatch(run, options, self._config, logit_processor=logit_processor)
        self._cache_dir = options.cache_dir
        self.lora_paths = dict(lora_paths or {})
        self._snapshots: list[Future[Callable[[], int]]] = []  # requested by `save_prefixes`
        self._engine = Engine(run, self._batch, queue=options.queue, isolate=True)
        self._engine.compile = self._request_compilation
        self._embeddings = EmbeddingQueue(lambda: Embedder(run, self._config, self._batch.context))
        self._background = options.background
        self._responders: dict[Job, _Responder] = {}
        # Applying settings takes a millisecond, and clients often send the same settings again.
        self._cached_config = lru_cache(CACHED_SETTINGS)(self._apply_overrides)
        self._lock = threading.Lock()
        self._wake = threading.Event()  # the engine's thread has work
        # One adapter is loaded at a time, which limits the memory for its files.
        self._one_adapter = asyncio.Lock()
        self._one_save = asyncio.Lock()  # one copy of the prefix cache exists at a time
        self._state = "loading"
        self._doing = "warming up"
        self._closing = False
        self._counters: Counter[str] = Counter()
        self._compiling: set[_Programs] = set()  # queued or running
        self._failed: set[_Programs] = set()
        self._embedder_requested = False
        self._preparer = ThreadPoolExecutor(1, "prepare")
        self._compiler = ThreadPoolExecutor(1, "compile")
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self.on_failure: Callable[[], None] = lambda: None

    # --- the event loop

    def start(self) -> None:
        """Starts the warm-up and then decoding; returns immediately."""
        self._thread.start()

    def settings(self, overrides: Mapping[str, object]) -> Config:
        """Returns the server's configuration with a request's settings applied; `n` is 1 unless the
        request sets it.

        Raises:
          UserError: a name or value is wrong, or a setting can only be set when the server starts.
        """
        seed = overrides.get("seed")
        # The cache key omits such a seed, because otherwise every new seed would add an entry to
        # the cache.
        has_plain_seed = type(seed) is int and 0 <= seed < 2**32
        rest: Mapping[str, object] = {
            name: value for name, value in overrides.items() if name != "seed" or not has_plain_seed
        }
        key = CacheKey(rest, rest)
        config: Config = (
            self._cached_config(key)
            if len(key.text) <= MAX_CACHED_LENGTH
            else self._apply_overrides(key)
        )
        if not has_plain_seed:
            return config
        return with_generation(config, seed=seed)

    def _apply_overrides(self, key: CacheKey[Mapping[str, object]]) -> Config:
        config = overlay(self._config, key.value)
        self._batch.program_key(config)
        return config

    def submit(self, request: GenerationRequest) -> ResponseStream:
        """Queues a request and returns its stream immediately. A request without a seed gets a
        random one.

        The stream raises the errors that are found only during preparation, such as a constraint
        that cannot be satisfied.

        Raises:
          UserError: the request does not fit the context or exceeds a limit.
          Busy: the queue is full.
          Unavailable: the engine is loading, draining or has failed.
        """
        request = replace(request, config=with_default_seed(request.config, secrets.randbits(32)))
        with self._lock:
            self._check_ready()
            try:
                job = self._engine.reserve(request)
            except QueueFull:
                self._counters["refused"] += 1
                seconds = (
                    self._engine.job_seconds * (self._engine.load.queued + 1) / self._batch.count
                )
                raise Busy(min(60.0, max(1.0, seconds))) from None
            stream = ResponseStream(request, job.stats, lambda: self._cancel(job))
            self._responders[job] = _Responder(self.run, stream)
            self._counters["requests"] += 1
            self._counters["prompt_tokens"] += len(request.ids)
            # With the lock, because `close` stops this executor.
            self._preparer.submit(self._prepare, job)
        return stream

    async def replace_weights(self, model: LoadedModel) -> None:
        """Uses the weights of `model` for all requests that are admitted from now on.

        Running requests end with the old weights, and waiting ones wait for them. Nothing is
        compiled.

        Raises:
          UserError: the model has another architecture or another tokenizer.
          Unavailable: the engine is loading, draining or has failed.
        """
        self._check_ready()
        if model.model.config != self.run.model.config:
            raise UserError(
                "the new weights have another architecture than the old ones: restart the server"
            )
        if model.tokenizer.fingerprint != self.run.tokenizer.fingerprint:
            raise UserError("the run has another tokenizer than before: restart the server")
        weights = await asyncio.to_thread(self._batch.prepare_weights, model)
        replaced = self._engine.changes.replace_weights(weights)
        await self._applied(replaced)
        self.run.replace_model(model)

    async def embed(self, ids: Sequence[Sequence[int]], pooling: str) -> np.ndarray:
        """Returns the embeddings of token sequences, float32 `[N, D]`; see `Embedder`. A cancelled
        call computes no more.

        Raises:
          UserError: a sequence is empty, too long or has an invalid token, or the pooling is
            unknown.
          Busy: too many requests for embeddings wait.
          Unavailable: the engine is loading, draining or has failed.
          RequestFailed: an internal error ended this request.
        """
        check_pooling(pooling)
        for row in ids:
            check_length(row, self._batch.context)
            self.run.check_ids(row)
        with self._lock:
            self._check_ready()
            if len(self._embeddings) > self._engine.load.queue:
                self._counters["refused"] += 1
                raise Busy(min(60.0, max(1.0, self._engine.job_seconds)))
            future = self._embeddings.add(ids, pooling)
            self._request_embedder()
        self._wake.set()
        return await asyncio.wrap_future(future)

    def _check_ready(self) -> None:
        if self._state != "ready":
            raise self._unavailable()

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"the server is {self._state}: {self._doing}")

    @property
    def loras(self) -> tuple[str, ...]:
        """The names of the adapters that requests may select."""
        adapters = self._batch.scopes.adapters
        return () if adapters is None else tuple(adapters.names)

    async def load_lora(self, name: str, path: Path) -> None:
        """Loads an adapter. Decoding continues while its files are read, and waits only for the
        copy of its matrices.

        Raises:
          UserError: the server has no place for adapters, the name is invalid or in use, no place
            is free, or the adapter is damaged or does not fit the model.
          Unavailable: the engine is loading, draining or has failed.
        """
        async with self._one_adapter:
            self._check_ready()
            copied = await asyncio.to_thread(self._read_adapter, name, path)
            await self._applied(copied)
            self.lora_paths[name] = path

    def _read_adapter(self, name: str, path: Path) -> Future[None]:
        adapters = self._batch.scopes.adapters
        rank = None if adapters is None else adapters.rank
        return self._engine.changes.load_adapter(name, self.run.read_lora(path, max_rank=rank))

    async def _applied(self, change: Future[None]) -> None:
        """Waits until a step of the engine has applied a change, or raises Unavailable if there may
        be no further step.
        """
        self._wake.set()
        if self._state != "ready" or not self._thread.is_alive():
            self._engine.changes.fail_waiting(self._unavailable())
        await asyncio.wrap_future(change)

    def unload_lora(self, name: str) -> None:
        """Unloads an adapter. The requests that use it continue; its place is free when the last of
        them has ended.

        Raises:
          UserError: no adapter has this name.
        """
        self._engine.changes.unload_adapter(name)
        self.lora_paths.pop(name, None)

    @property
    def memory_bytes(self) -> int:
        """The bytes of the weights and caches, as `SlotBatch.memory_bytes`."""
        return self._batch.memory_bytes

    def _cancel(self, job: Job) -> None:
        self._engine.cancel(job)
        self._wake.set()

    @property
    def context(self) -> int:
        return self._batch.context

    def status(self) -> Status:
        """Returns the current state and counters of the engine."""
        load = self._engine.load
        counters = {**self._counters, **self._engine.counters}
        counters |= {
            name: getattr(self._embeddings, name) for name in ("embedded_texts", "embedded_tokens")
        }
        return Status(
            self._state,
            self._doing,
            *load,
            self._batch.context,
            counters,
            self._batch.prefix_status,
        )

    async def save_prefixes(self) -> int:
        """Writes the prefix cache to `cache_dir` and returns the number of its blocks.

        The engine only copies the blocks; another thread writes the files.

        Raises:
          UserError: the prefix cache is off or has no folder, or the files cannot be written.
          Unavailable: the engine is loading, draining or has failed.
        """
        async with self._one_save:
            snapshot: Future[Callable[[], int]] = Future()
            with self._lock:
                self._check_ready()
                self._snapshots.append(snapshot)
            self._wake.set()
            return await asyncio.to_thread(await asyncio.wrap_future(snapshot))

    async def drain(self, seconds: float) -> None:
        """Stops accepting requests, and returns when all accepted ones are complete. After
        `seconds`, cancels the rest.
        """
        with self._lock:
            if self._state in ("ready", "loading"):
                self._state = "draining"
                self._doing = "it accepts no more requests"
        until = time.monotonic() + seconds
        while (
            (self._responders or len(self._embeddings))
            and self._state == "draining"
            and time.monotonic() < until
        ):
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Stops the engine immediately. Incomplete streams end with `Unavailable`. Further calls
        have no effect.
        """
        with self._lock:
            self._closing = True
            if self._state in ("ready", "loading"):
                self._state = "draining"
                self._doing = "it is being closed"
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        # Wait for a running compilation: a process that exits during one is aborted.
        for executor in (self._preparer, self._compiler):
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

    def _request_compilation(self, config: Config, echo: bool, subset: int | None) -> None:
        """Queues the compilation of a request's programs unless it is queued or running already.

        The engine calls this method for every request that waits for its programs.
        """
        program = _Programs(self._batch.program_key(config), echo, subset)
        if program in self._failed:
            raise RequestFailed("the programs for these settings could not be compiled")
        with self._lock:
            if program in self._compiling or self._closing:
                return
            self._compiling.add(program)
            self._counters["compilations"] += 1
            self._compiler.submit(self._compile, program, config)

    def _request_embedder(self) -> None:
        """Queues the compilation of the programs for embeddings once. The caller holds `_lock`."""
        if not self._embedder_requested and not self._closing:
            self._embedder_requested = True
            self._counters["compilations"] += 1
            self._compiler.submit(self._compile_embedder)

    def _compile_embedder(self) -> None:
        self._embeddings.compile()
        self._wake.set()

    def _compile_in_background(self) -> None:
        """Queues the compilation of the programs that requests may need later."""
        wanted: list[
            tuple[Config, bool]
        ] = []  # configuration, and whether log-probabilities of prompts are reported
        if "steps" in self._background:
            wanted.append((self._config, False))
        if "echo" in self._background:
            wanted.append((self._config, True))
        if "strategies" in self._background:
            other = "chain" if self._config.generation.strategy == "entropy" else "entropy"
            # The run may have settings that contradict the router.
            with contextlib.suppress(UserError):
                wanted.append((overlay(self._config, {"strategy": other}), False))
        for config, echo in wanted:
            if not self._batch.ready(self._batch.program_key(config), echo, None):
                self._request_compilation(config, echo, None)
        if "embeddings" in self._background:
            with self._lock:
                self._request_embedder()

    def _compile(self, program: _Programs, config: Config) -> None:
        try:
            self._batch.compile(config, program.echo, program.subset)
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
            usual_steps = None  # compiles the program for all sampling steps
            if "steps" in self._background:
                usual_steps = self._batch.row_params(with_default_seed(self._config, 0)).subset
            self._batch.compile(self._config, subset=usual_steps)
            with self._lock:
                if self._state == "loading":
                    self._state = "ready"
                    self._doing = "serving"
            self._compile_in_background()
            while not self._closing:
                self._wake.clear()
                self._copy_prefixes()
                outputs = self._engine.step()
                responders = {self._deliver(output) for output in outputs}
                wake_readers(responder.stream for responder in responders if responder is not None)
                embedded = self._embeddings.step()
                if not outputs and not embedded and self._engine.idle:
                    self._wake.wait()
            self._save_at_end()
        except BaseException as error:
            with self._lock:
                self._state = "failed"
                self._doing = f"{type(error).__name__}: {error}"
            self.on_failure()
            raise
        finally:
            for responder in [*self._responders.values()]:
                responder.stream.end(self._unavailable())
            self._embeddings.close(self._unavailable())
            self._responders.clear()
            self._engine.changes.fail_waiting(self._unavailable())
            with self._lock:
                for snapshot in self._snapshots:
                    if snapshot.set_running_or_notify_cancel():
                        snapshot.set_exception(self._unavailable())

    def _copy_prefixes(self) -> None:
        """Copies the prefix cache for each call of `save_prefixes` that still waits for it."""
        while self._snapshots:
            snapshot = self._snapshots.pop()
            if not snapshot.set_running_or_notify_cancel():
                continue
            try:
                snapshot.set_result(self._batch.prefix_writer())
            except Exception as error:
                snapshot.set_exception(error)

    def _save_at_end(self) -> None:
        if self._cache_dir is not None and self._batch.prefix_status.capacity:
            try:
                self._batch.prefix_writer()()
            except Exception as error:
                log.warning("the prefix cache is not saved: %s", error)

    def _deliver(self, output: Output) -> _Responder | None:
        """Passes an output to its stream, whose reader is yet to be woken, and returns the
        responder.

        An error in this method ends only the request of this output.
        """
        responder = self._responders.get(output.job)
        if responder is None:
            return None
        try:
            if output.ended:
                del self._responders[output.job]
                responder.stream.end(output.error, wake=False)
            else:
                responder.push_output(output)
        except Exception as error:
            log.exception("a request failed")
            self._responders.pop(output.job, None)
            self._engine.cancel(output.job)
            with contextlib.suppress(Exception):
                responder.stream.end(RequestFailed(f"{type(error).__name__}: {error}"), wake=False)
        return responder
