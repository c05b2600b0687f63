"""The ASGI application of a server with several models: it passes each request to the application
of its model.

A request names its model in the field `model` of its body, or in its URL (`?model=NAME`); without a
name it means the first model. `/v1/models`, `/api/tags` and `/api/ps` list all models and load
none.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

import jax
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dantinox.serve.app import PROTOCOLS, guarded, make_router, protocol_of, server_routes
from dantinox.serve.errors import JSON, http_error
from dantinox.serve.operations.background import run_in_thread, run_sized
from dantinox.serve.operations.metrics import Metrics
from dantinox.serve.options import Options
from dantinox.serve.pool.model_loading import OpenModel
from dantinox.serve.pool.model_pool import Member, ModelPool
from dantinox.serve.protocols import ollama
from dantinox.serve.protocols.bodies import PARSED_BODY, check_media_type, parse_json
from dantinox.serve.protocols.keep_alive import keep_seconds
from dantinox.serve.protocols.openai import about_model, model_entry
from dantinox.serve.service import Service, check_aliases, forbidden_model, key_allows, shown_names

# Routes that this module answers itself, instead of the application of a model.
LIST_PATHS = ("/v1/models", "/v1/models/{id:path}", "/api/tags", "/api/ps")


def make_pool_app(pool: ModelPool, options: Options) -> ASGIApp:
    """Returns the ASGI application that serves the models of a pool over all protocols. It loads
    the first model.

    Raises:
      UserError: the first model cannot be loaded, or an alias does not stand for a model, or is
        the name of one.
    """
    directory = Directory(pool, options)
    metrics = Metrics(pool, options, models=pool.statuses)
    metrics.registry.register(_PoolCollector(pool))

    def attach(member: Member, opened: OpenModel) -> tuple[Service, ASGIApp]:
        names = [member.name, *(f"{member.name}:{lora}" for lora in opened.engine.loras)]
        aliases = {alias: name for alias, name in options.aliases.items() if name in names}
        service = Service(
            opened.engine, replace(options, template=opened.template, aliases=aliases), metrics
        )
        routes = [
            route
            for protocol in PROTOCOLS
            if protocol.needs_model
            for route in protocol.routes(service)
        ]
        return service, make_router(routes)

    pool.attach = attach  # called for each model that is loaded
    # Only for the list of routes, and for the protocols that need no model.
    service = Service(pool.preload().engine, replace(options, aliases={}), metrics)
    dispatch = _Dispatcher(directory)
    routes = [*server_routes(pool, metrics, options, directory.counts), *directory.routes()]
    for protocol in PROTOCOLS:
        for route in protocol.routes(service):
            if not protocol.needs_model:
                routes.append(route)
            elif route.path not in LIST_PATHS:
                methods = list(route.methods) if route.methods else None  # None: all methods
                routes.append(Route(route.path, dispatch, methods=methods))
    paths = {route.path for route in routes}
    return guarded(make_router(routes), paths, options, metrics)


class Directory:
    """The names of the models of a pool, and the routes that list them.

    Attributes:
      pool: the pool.
    """

    def __init__(self, pool: ModelPool, options: Options):
        """Initializes the directory.

        Raises:
          UserError: an alias does not stand for a model, or is the name of one.
        """
        self.pool = pool
        self._aliases = options.aliases
        check_aliases(self._aliases, self._own_names())
        self._created = int(time.time())
        self._started = ollama.now()
        # By the name of a model: its fields of `/v1/models` and of `/api/tags`, which remain after
        # it is unloaded.
        self._openai_fields: dict[str, dict[str, JSON]] = {}
        self._ollama_fields: dict[str, dict[str, JSON]] = {}

    def _own_names(self) -> list[str]:
        return [name for member in self.pool.members.values() for name in member.names]

    def known_names(self) -> list[str]:
        """Returns the names of the models, alone and with each adapter, and the aliases."""
        return [*self._own_names(), *self._aliases]

    def find(self, name: str | None) -> Member:
        """Returns the model that a name means, alone or with an adapter; None: the first model that
        the API key of the current request may use.

        Raises:
          RequestError: 404: this server has no model of that name, or the key may not use it.
        """
        members = self.pool.members.values()
        if name is None:
            allowed = next((member for member in members if self._allows(member)), None)
            if allowed is None:
                raise forbidden_model(self.pool.default.name)
            return allowed
        resolved = self._aliases.get(name, name)
        found = next((member for member in members if resolved in member.names), None)
        if found is None:
            raise http_error(
                "model", resolved[:60], shown_names(self._allowed_names()), param="model"
            )
        if not self._is_allowed(resolved):
            raise forbidden_model(resolved)
        return found

    def _allows(self, member: Member) -> bool:
        """Returns whether the key may use a model, alone or with an adapter."""
        return any(map(self._is_allowed, member.names))

    def _allowed_names(self) -> list[str]:
        """Returns the names and aliases that the key may use."""
        return [name for name in self.known_names() if self._is_allowed(name)]

    def _is_allowed(self, name: str) -> bool:
        # The list of a key may also contain aliases.
        return key_allows(self._aliases.get(name, name), self._aliases)

    def counts(self) -> dict[str, object]:
        """Returns fields of `/health`: the first model, and the number of models by state."""
        states = [_shown_state(member) for member in self.pool.members.values()]
        counted = {state: states.count(state) for state in ("loaded", "loading", "unloaded")}
        return {"model": self.pool.default.name, "models": counted}

    # --- routes

    def routes(self) -> list[Route]:
        """Returns the routes that list the models."""

        async def models(request: Request) -> Response:
            """Lists the models with their adapters and aliases, and whether they are loaded."""
            return JSONResponse(
                {"object": "list", "data": [self._entry(name) for name in self._allowed_names()]}
            )

        async def one_model(request: Request) -> Response:
            """Describes a model, or a model with an adapter; 404 for another name."""
            name = request.path_params["id"]
            self.find(name)
            return JSONResponse(self._entry(name))

        async def tags(request: Request) -> Response:
            """Lists the models."""
            found: list[dict[str, JSON]] = []
            for member in self._allowed_members():
                described = await self._describe(member)
                found.append({**described, "modified_at": self._started})
            return JSONResponse({"models": found})

        async def running(request: Request) -> Response:
            """Lists the loaded models."""
            found = []
            for member in [one for one in self._allowed_members() if one.state == "loaded"]:
                known = await self._describe(member)
                known |= {
                    "size": member.size,
                    "size_vram": 0 if jax.default_backend() == "cpu" else member.size,
                }
                known |= {"context_length": member.status().context, "expires_at": _expiry(member)}
                found.append(known)
            return JSONResponse({"models": found})

        endpoints = {
            "/v1/models": models,
            "/v1/models/{id:path}": one_model,
            "/api/tags": tags,
            "/api/ps": running,
        }
        return [Route(path, endpoints[path]) for path in LIST_PATHS]

    def _allowed_members(self) -> list[Member]:
        return [member for member in self.pool.members.values() if self._allows(member)]

    def _entry(self, name: str) -> dict[str, JSON]:
        root = self._aliases.get(name, name)
        member = self.find(name)
        if member.service is not None:
            self._openai_fields[member.name] = about_model(member.service)
        entry = model_entry(name, root, member.name, self._created)
        known = self._openai_fields.get(member.name, {})
        return {**entry, **known, "status": {"value": _shown_state(member)}}

    async def _describe(self, member: Member) -> dict[str, JSON]:
        if (service := member.service) is not None:
            self._ollama_fields[member.name] = await run_in_thread(ollama.describe, service)
        return dict(
            self._ollama_fields.get(member.name)
            or ollama.unknown_model(member.name, member.file_size)
        )


def _shown_state(member: Member) -> str:
    """Returns `loaded`, `loading` or `unloaded`; models that fail or unload count as unloaded."""
    return {"loaded": "loaded", "loading": "loading", "waiting": "loading"}.get(
        member.state, "unloaded"
    )


def _expiry(member: Member) -> str:
    if member.keep_until is None:
        return ollama.NEVER
    seconds_left = member.keep_until - time.monotonic()
    return ollama.now(seconds_left)


class _Dispatcher:
    """Passes a request to the application of its model, which it loads first if necessary."""

    def __init__(self, directory: Directory):
        self._directory = directory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        protocol = protocol_of(scope["path"])
        data = await request.body()
        body: dict[str, JSON] = {}
        if data and scope["method"] == "POST":  # only POST requests have a JSON body
            check_media_type(request)
            parsed = await run_sized(len(data), parse_json, data)
            body = parsed if isinstance(parsed, dict) else {}
            scope = {**scope, PARSED_BODY: parsed}
        is_ollama = protocol.routes is ollama.routes
        requested = protocol.model_of(body)  # any JSON value
        # The application of the model reports a name that is not a string.
        name = requested if isinstance(requested, str) else request.query_params.get("model")
        if is_ollama and name is not None:
            name = ollama.known_name(name, self._directory.known_names())
        member = self._directory.find(name)
        pool = self._directory.pool
        # None: the request does not say how long to keep the model. `seconds` None: for ever.
        keep_alive = keep_seconds(body.get("keep_alive")) if is_ollama else None
        async with pool.use(member.name):
            if (app := member.app) is None:  # not of a model in use, unless the pool has a fault
                raise http_error("internal")
            try:
                await app(scope, _with_body(data, receive), send)
            finally:  # also if the client has disconnected
                if keep_alive is not None:
                    pool.keep(member, keep_alive.seconds)


def _with_body(data: bytes, receive: Receive) -> Receive:
    """Returns a function that first returns a whole body, and then what `receive` returns."""
    messages: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message


class _PoolCollector:
    """The metrics of the loads of a pool."""

    def __init__(self, pool: ModelPool):
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        members = self._pool.members.values()
        loaded = GaugeMetricFamily(
            "dantinox_model_loaded", "1 if a model is loaded, else 0", labels=("model",)
        )
        size = GaugeMetricFamily(
            "dantinox_model_bytes",
            "bytes of the weights and caches of a model that is not unloaded",
            labels=("model",),
        )
        waiting = GaugeMetricFamily(
            "dantinox_model_waiting",
            "requests that wait for the load of a model",
            labels=("model",),
        )
        for member in members:
            loaded.add_metric((member.name,), float(member.state == "loaded"))
            size.add_metric((member.name,), 0 if member.state == "unloaded" else member.size)
            waiting.add_metric((member.name,), member.waiting)
        yield from (loaded, size, waiting)
        loads = CounterMetricFamily(
            "dantinox_model_loads",
            "loads of models, by result: success or failure",
            labels=("model", "result"),
        )
        unloads = CounterMetricFamily(
            "dantinox_model_unloads", "models that were unloaded", labels=("model",)
        )
        for member in members:
            for result, count in (("success", member.loads), ("failure", member.failures)):
                loads.add_metric((member.name, result), count)
            unloads.add_metric((member.name,), member.unloads)
        yield from (loads, unloads)
