"""`ModelPool`: the models of one server, loaded when a request needs them, within a bound on their
number and memory.

    specs = [ModelSpec("small", Path("runs/small")), ModelSpec("large", Path("runs/large"))]
    pool = ModelPool(specs, memory=12 * 10**9)
    async with pool.use("large") as member:
        ...  # the model is loaded, and stays loaded inside the block

All state belongs to the event loop. One task loads the models that requests wait for, one after the
other, in the order of the first request for each; the work of a load runs in a thread. Before a
load, the task unloads the models that have not been used for the longest time, but never one that a
request uses. A load continues if its requests are cancelled.

The memory of a model is that of its weights and caches (`SlotBatch.memory_bytes`). It is measured
when the weights are loaded and before the caches are allocated; until then, the size of the file of
the weights, or the measurement of an earlier load, stands for it.
"""

import asyncio
import contextlib
import gc
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from starlette.types import ASGIApp

from dantinox.config import UserError
from dantinox.platform import release_free_memory
from dantinox.serve.errors import Unavailable
from dantinox.serve.operations.limits import (
    LOAD_RETRY_SECONDS,
    MAX_QUEUED_REQUESTS,
    MODEL_WAIT_SECONDS,
)
from dantinox.serve.pool.model_loading import OpenModel
from dantinox.serve.pool.model_specs import ModelSpec
from dantinox.serve.response_stream import Status
from dantinox.serve.service import Service

log = logging.getLogger("dantinox.serve")

STARTUP_SECONDS = 0.02  # between two looks at an engine that warms up


class _Abandoned(Exception):
    """No request waits for a load any more."""


class OpenFunction(Protocol):
    """Loads a model, as `open_model` does; called in a thread."""

    def __call__(
        self, spec: ModelSpec, loras: Mapping[str, Path] | None, memory: int | None
    ) -> OpenModel: ...


@dataclass(eq=False)
class Member:
    """A model of the pool.

    Attributes:
      spec: what it is.
      state: `unloaded`, `loading`, `waiting` (its weights are loaded, and it needs room for its
        caches), `loaded`, `unloading`, or `failed` after a failure of its engine.
      opened, service, app: the loaded model, its service, and the application that answers its
        requests.
      file_size: bytes of the file of its weights; 0: unknown.
      size: bytes that count towards the bound while it is not unloaded.
      users: requests that use it.
      waiting: requests that wait for it.
      wanted: the smaller, the earlier the first of these requests came; it orders the loads.
      since: when it began to wait for room, in seconds of the monotonic clock.
      used: time of the end of the last request.
      keep_until: when it is unloaded if no request has used it; None: never.
      error, failures: the error of the last load if it failed, and the number of failed loads.
      retry: time of the next attempt after a failed load.
      loads, unloads: numbers of loads and unloads.
      loras: paths of the adapters of the next load.
      past: sums of the counters of earlier loads.
    """

    spec: ModelSpec
    state: str = "unloaded"
    opened: OpenModel | None = None
    service: Service | None = None
    app: ASGIApp | None = None
    file_size: int = 0
    size: int = 0
    users: int = 0
    waiting: int = 0
    wanted: int = 0
    since: float = 0.0
    used: float = 0.0
    keep_until: float | None = None
    error: str = ""
    retry: float = 0.0
    loads: int = 0
    unloads: int = 0
    failures: int = 0
    loras: dict[str, Path] = field(default_factory=dict)
    past: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def names(self) -> list[str]:
        """The names of the model, alone and with each adapter."""
        loras = self.loras if self.opened is None else self.opened.engine.loras
        return [self.name, *(f"{self.name}:{lora}" for lora in loras)]

    @property
    def is_idle(self) -> bool:
        """Whether it can be unloaded: no request uses it, and none that waited for its load is
        about to use it.
        """
        return not self.users and (
            self.state == "failed" or (self.state == "loaded" and not self.waiting)
        )

    def status(self) -> Status:
        """Returns the state of its engine. The counters include those of earlier loads."""
        if self.opened is None or self.state == "unloading":
            return Status(
                self.state, "", slots=0, busy=0, queued=0, queue=0, context=0, counters=self.past
            )
        status = self.opened.engine.status()
        counters = {
            name: status.counters.get(name, 0) + self.past[name]
            for name in {*status.counters, *self.past}
        }
        return Status(**{**vars(status), "counters": counters})


class ModelPool:
    """Implements `RunnableEngine` for several models.

    Attributes:
      members: the models by name; the first one is loaded at the start and answers requests without
        a name.
      default: the first model.
      max_models, memory: the most models loaded together, and the most bytes; None: no bound.
      attach: returns the service and the application of a loaded model.
      on_failure: called when the first model cannot be loaded at the start.
      peak: the largest number of bytes that were loaded together.
    """

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        open_model: OpenFunction,
        *,
        sizes: Mapping[str, int] | None = None,
        max_models: int | None = None,
        memory: int | None = None,
        queue: int = MAX_QUEUED_REQUESTS,
        wait: float = MODEL_WAIT_SECONDS,
    ):
        """Creates a pool without loaded models.

        Args:
          sizes: bytes of the files of the weights by name.
          queue: requests that may wait for one model.
          wait: seconds that a request waits until the load of its model begins.

        Raises:
          UserError: the weights of a model are larger than the memory.
        """
        sizes = sizes or {}
        self.members = {spec.name: Member(spec, loras=dict(spec.loras)) for spec in specs}
        self.default = self.members[specs[0].name]
        self.max_models = max_models
        self.memory = memory
        self._queue = queue
        self._wait = wait
        self._open = open_model
        self.attach: Callable[[Member, OpenModel], tuple[Service, ASGIApp]] = _not_attached
        self.on_failure: Callable[[], None] = lambda: None
        self._preloaded: OpenModel | None = None
        self._state = "loading"
        self._doing = "loading the first model"
        # How often a request began to wait for a model that no other request waited for.
        self._waits = 0
        self.peak = 0
        self._loader: asyncio.Task[None] | None = None
        self._timers = set[asyncio.TimerHandle]()
        self._changes = set[asyncio.Future[None]]()
        for member in self.members.values():
            member.file_size = sizes.get(member.name, 0)
            member.size = member.file_size
            if memory is not None and member.size > memory:
                raise UserError(f"the model {member.name} {self._too_large(member.size)}")

    # --- requests

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Member]:
        """Loads a model if necessary, and keeps it loaded inside the block.

        Raises:
          Unavailable: the model cannot be loaded, too many requests wait for it, all loaded models
            stayed in use, or the server is stopping.
        """
        member = self.members[name]
        await self._wait_until_loaded(member)
        member.users += 1
        member.keep_until = None
        try:
            yield member
        finally:
            member.users -= 1
            member.used = time.monotonic()
            if member.keep_until is not None and member.keep_until <= member.used:
                self._start_loader()
            self._notify()

    async def _wait_until_loaded(self, member: Member) -> None:
        self._check_open()
        if member.state == "loaded":
            return
        if time.monotonic() < member.retry:
            raise Unavailable(member.error)
        if member.waiting >= self._queue:
            raise Unavailable(
                f"too many requests wait for the model {member.name}: try again later"
            )
        failures = member.failures
        began = time.monotonic()
        if not member.waiting:
            self._waits += 1
            member.wanted = self._waits
        member.waiting += 1
        try:
            self._start_loader()
            while member.state != "loaded":
                self._check_open()
                if member.failures > failures:
                    raise Unavailable(member.error)
                until = max(began, member.since) + self._wait
                seconds = None if member.state == "loading" else until - time.monotonic()
                if seconds is not None and seconds <= 0:
                    raise Unavailable(
                        f"the model {member.name} cannot be loaded"
                        " now: all loaded models are in use"
                    )
                await self._change(seconds)
        finally:
            member.waiting -= 1
            self._notify()

    def _check_open(self) -> None:
        if self._state in ("draining", "failed"):
            raise Unavailable(f"the server is {self._state}: {self._doing}")

    def _notify(self) -> None:
        """Wakes everything that waits for a change of the pool."""
        for change in self._changes:
            if not change.done():
                change.set_result(None)
        self._changes.clear()

    async def _change(self, seconds: float | None = None) -> None:
        """Returns after the next change of the pool, or after `seconds`."""
        change = asyncio.get_running_loop().create_future()
        self._changes.add(change)
        await asyncio.wait([change], timeout=seconds)
        self._changes.discard(change)

    def keep(self, member: Member, seconds: float | None) -> None:
        """Unloads a model if no request has used it for `seconds` from now on; None: keeps it until
        its room is needed.
        """
        member.keep_until = None if seconds is None else time.monotonic() + seconds
        if seconds is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(seconds, self._on_timer)
            self._timers = {
                one for one in self._timers if one.when() > loop.time() and not one.cancelled()
            } | {timer}

    def _on_timer(self) -> None:
        self._start_loader()
        self._notify()

    # --- loads and unloads

    @property
    def used_bytes(self) -> int:
        """The bytes of the models that are not unloaded."""
        return sum(member.size for member in self.members.values() if member.state != "unloaded")

    def _start_loader(self) -> None:
        if self._loader is None or self._loader.done():
            self._loader = asyncio.get_running_loop().create_task(self._load_wanted())

    async def _load_wanted(self) -> None:
        """Unloads the expired models, and loads the models that requests wait for."""
        while self._state != "draining":
            now = time.monotonic()
            for member in self.members.values():
                expired = member.keep_until is not None and member.keep_until <= now
                if expired and member.state == "loaded" and member.is_idle:
                    await self._unload(member)
            wanted = [
                m
                for m in self.members.values()
                if m.waiting and m.state in ("unloaded", "failed") and m.retry <= now
            ]
            if not wanted:
                return
            await self._load(min(wanted, key=lambda member: member.wanted))

    async def _load(self, member: Member) -> None:
        """Loads a model. An error is stored for the requests that wait for it."""
        try:
            if member.state == "failed":
                while member.users:
                    await self._change()
                await self._unload(member)
            if not await self._make_room(member, member.size):
                return
            member.state = "loading"
            self._measure()
            opened = self._preloaded if member is self.default else None
            self._preloaded = None
            if opened is None:
                opened = await asyncio.to_thread(self._open, member.spec, member.loras, self.memory)
            await self._start(member, opened)
        except _Abandoned:
            member.state = "unloaded"
        except Exception as error:
            member.state = "unloaded"
            member.failures += 1
            member.retry = time.monotonic() + LOAD_RETRY_SECONDS
            known = isinstance(error, UserError | Unavailable)
            log.error("the model %s cannot be loaded: %s", member.name, error, exc_info=not known)
            # The client does not get the error, which may contain paths.
            member.error = f"the model {member.name} cannot be loaded: see the server's log"
            if isinstance(error, Unavailable):
                member.error = error.message
        finally:
            self._notify()

    async def _start(self, member: Member, opened: OpenModel) -> None:
        """Makes room for the caches of a model, compiles its programs, and lets requests use it."""
        engine = opened.engine
        loop = asyncio.get_running_loop()
        try:
            size = engine.memory_bytes
            member.state = "waiting"
            member.since = time.monotonic()
            if not await self._make_room(member, size):
                raise _Abandoned
            member.size = size
            member.state = "loading"
            self._measure()

            def on_failure() -> None:
                loop.call_soon_threadsafe(self._on_engine_failure, member)

            engine.on_failure = on_failure
            engine.start()
            while engine.status().state == "loading" and self._state != "draining":
                await asyncio.sleep(STARTUP_SECONDS)
            if self._state == "draining":
                raise _Abandoned
            if engine.status().state != "ready":
                raise Unavailable(f"the model {member.name} has failed: see the server's log")
            member.service, member.app = self.attach(member, opened)
        except BaseException:
            await asyncio.to_thread(engine.close)
            raise
        member.opened = opened
        member.state = "loaded"
        member.loads += 1
        member.used = time.monotonic()

    def _on_engine_failure(self, member: Member) -> None:
        if member.state == "loaded":
            member.state = "failed"
            self._notify()

    async def _make_room(self, member: Member, size: int) -> bool:
        """Unloads models until `size` bytes fit for `member`. Returns whether a request still waits
        for it.

        Raises:
          Unavailable: the model is larger than the memory.
        """
        if self.memory is not None and size > self.memory:
            raise Unavailable(f"the model {member.name} {self._too_large(size)}")
        while not self._fits(member, size):
            idle = [one for one in self.members.values() if one is not member and one.is_idle]
            if idle:
                await self._unload(min(idle, key=lambda one: one.used))
            elif not member.waiting or self._state == "draining":
                return False
            else:
                await self._change()
        return True

    def _fits(self, member: Member, size: int) -> bool:
        others = [
            one for one in self.members.values() if one is not member and one.state != "unloaded"
        ]
        if self.max_models is not None and len(others) >= self.max_models:
            return False
        return self.memory is None or sum(one.size for one in others) + size <= self.memory

    def _too_large(self, size: int) -> str:
        allowed = 0 if self.memory is None else self.memory
        return f"needs {size / 1e9:.3g} GB, but --model_memory allows {allowed / 1e9:.3g} GB"

    def _measure(self) -> None:
        self.peak = max(self.peak, self.used_bytes)

    async def _unload(self, member: Member) -> None:
        """Unloads a model that no request uses."""
        opened = member.opened
        member.state = "unloading"
        member.keep_until = None
        if opened is not None:
            member.loras = dict(opened.engine.lora_paths)
            await asyncio.to_thread(opened.engine.close)
            member.past.update(opened.engine.status().counters)
        opened = None  # nothing may refer to the model any more, so that its memory is free
        member.opened = None
        member.service = None
        member.app = None
        await asyncio.to_thread(_free_memory)
        member.state = "unloaded"
        member.unloads += 1
        self._notify()

    async def reload_weights(self) -> bool:
        """Loads the weights of every loaded model again if their file has changed; returns whether
        one has.

        A model that is not loaded reads its new files when it is loaded.

        Raises:
          UserError: the new weights of a model cannot be used. That model keeps its old weights;
            the others are reloaded.
        """
        changed = False
        errors = []
        for member in self.members.values():
            opened = member.opened
            if opened is None or member.state != "loaded":
                continue
            member.users += 1
            try:
                changed |= await opened.reload_weights()
            except UserError as error:
                errors.append(f"{member.name}: {error}")
            finally:
                member.users -= 1
                opened = None
                self._notify()
        if errors:
            raise UserError("; ".join(errors))
        return changed

    # --- the server process

    def preload(self) -> OpenModel:
        """Loads the first model, before the event loop runs; `start` then starts it.

        Raises:
          UserError: as `open_model`, or the model is larger than the memory.
        """
        self._preloaded = self._open(self.default.spec, self.default.loras, self.memory)
        size = self._preloaded.engine.memory_bytes
        if self.memory is not None and size > self.memory:
            raise UserError(
                f"the model {self.default.name} {self._too_large(size)}: set fewer --slots, a"
                " shorter --context or a smaller --prefix_cache"
            )
        return self._preloaded

    def start(self) -> None:
        """Starts the first model; returns immediately."""
        self._first = asyncio.get_running_loop().create_task(self._load_first())

    async def _load_first(self) -> None:
        try:
            await self._wait_until_loaded(self.default)
        except Unavailable:
            if self._state == "loading":
                self._state = "failed"
                self._doing = "the first model cannot be loaded"
                self.on_failure()
        if self._state == "loading":
            self._state = "ready"
            self._doing = "serving"
        self._notify()

    def status(self) -> Status:
        """Returns the state of the server, and sums over the loaded models; the context is that of
        the first one.
        """
        found = [member.status() for member in self.members.values()]
        counters: Counter[str] = Counter()
        for one in found:
            counters.update(one.counters)
        return Status(
            state=self._state,
            doing=self._doing,
            slots=sum(one.slots for one in found),
            busy=sum(one.busy for one in found),
            queued=sum(one.queued for one in found),
            queue=sum(one.queue for one in found),
            context=self.default.status().context,
            counters=counters,
        )

    def statuses(self) -> dict[str, Status]:
        """Returns the state of each model by name."""
        return {name: member.status() for name, member in self.members.items()}

    async def drain(self, seconds: float) -> None:
        """Stops accepting requests, and returns when all accepted ones are complete. After
        `seconds`, cancels the rest.
        """
        self._state = "draining"
        self._doing = "it accepts no more requests"
        self._notify()
        opened = [member.opened for member in self.members.values() if member.opened is not None]
        await asyncio.gather(*(one.engine.drain(seconds) for one in opened))

    def close(self) -> None:
        """Stops all engines immediately."""
        self._state = "draining"
        self._doing = "it is being closed"
        opened = [member.opened for member in self.members.values()]
        for one in (*opened, self._preloaded):
            if one is not None:
                one.engine.close()


def _free_memory() -> None:
    gc.collect()  # the engine is part of reference cycles
    release_free_memory()


def _not_attached(member: Member, opened: OpenModel) -> tuple[Service, ASGIApp]:
    raise RuntimeError("the pool has no application")
