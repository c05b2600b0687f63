"""The ASGI application: routes of all protocols, middleware, `/health` and `/metrics`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from dantinox.config import UserError
from dantinox.serve import pages
from dantinox.serve.errors import JSON, RequestError, error_object, http_error, to_request_error
from dantinox.serve.operations.metrics import Metrics
from dantinox.serve.operations.middleware import Guard
from dantinox.serve.operations.request_record import current_record
from dantinox.serve.options import Options
from dantinox.serve.protocols import (
    embeddings,
    kobold,
    llama_cpp,
    lora_routes,
    messages,
    native,
    ollama,
    openai,
    responses,
    tokenize_routes,
)
from dantinox.serve.response_stream import EngineProtocol, HasStatus
from dantinox.serve.service import Service


def named_model(body: Mapping[str, JSON]) -> JSON:
    """Returns the field `model` of a body."""
    return body.get("model")


class Protocol(NamedTuple):
    """A protocol through which clients use the engine.

    Attributes:
      title: its name in the documentation.
      prefixes: prefixes of the paths whose errors it formats; of all protocols, the longest
        matching prefix applies.
      routes: returns its routes.
      format_error: returns the body of an error response.
      status_of: maps an HTTP status to the status that this protocol sends instead.
      public: paths that need no API key.
      unlimited: paths with frequent small POST requests, which do not count as requests of a key.
      model_of: returns the name of the model in a body, for a server with several models.
      needs_model: whether its routes use a model; the others are the same for all models.
    """

    title: str
    prefixes: tuple[str, ...]
    routes: Callable[[Service], list[Route]]
    format_error: Callable[[RequestError], JSON] = error_object
    status_of: Mapping[int, int] = MappingProxyType({})
    public: tuple[str, ...] = ()
    unlimited: tuple[str, ...] = ()
    model_of: Callable[[Mapping[str, JSON]], JSON] = named_model
    needs_model: bool = True


PROTOCOLS = (
    Protocol("OpenAI", ("",), openai.routes),
    Protocol("OpenAI responses", (), responses.routes),
    Protocol("Anthropic", ("/v1/messages",), messages.routes, messages.format_error),
    Protocol("Adapters", (), lora_routes.routes),
    Protocol("Embeddings", (), embeddings.routes),
    Protocol("Tokenization", (), tokenize_routes.routes),
    Protocol(
        "KoboldAI",
        ("/api/",),
        kobold.routes,
        kobold.format_error,
        {429: 503},
        unlimited=kobold.UNLIMITED,
        model_of=kobold.model_of,
    ),
    Protocol(
        "Ollama",
        ollama.PATHS,
        ollama.routes,
        ollama.format_error,
        {429: 503},
        model_of=ollama.model_of,
    ),
    Protocol("llama.cpp", (), llama_cpp.routes),
    Protocol("Native API", ("/api/dantinox",), native.routes),
    Protocol("Web page", ("/page",), pages.page_routes, public=pages.PUBLIC, needs_model=False),
    Protocol("Kobold Lite", ("/lite",), pages.lite_routes, public=("/lite",), needs_model=False),
)
# Headers that web pages of other origins may read.
EXPOSED_HEADERS = (
    "x-request-id",
    "retry-after",
    *(
        f"x-ratelimit-{what}-{kind}"
        for what in ("limit", "remaining", "reset")
        for kind in ("requests", "tokens")
    ),
)


def make_app(engine: EngineProtocol, options: Options | None = None) -> ASGIApp:
    """Returns the ASGI application that serves an engine over all protocols.

    It also serves `/health` (200 if the server accepts requests, else 503 with its state) and
    `/metrics` (Prometheus).
    """
    options = options or Options()
    metrics = Metrics(engine, options)
    service = Service(engine, options, metrics)
    routes = [
        *server_routes(engine, metrics, options, lambda: {"model": engine.name}),
        *(route for protocol in PROTOCOLS for route in protocol.routes(service)),
    ]
    return guarded(make_router(routes), {route.path for route in routes}, options, metrics)


def make_router(routes: Sequence[BaseRoute]) -> Starlette:
    """Returns an application of these routes, with errors in the format of the protocol that a path
    belongs to.
    """
    app = Starlette(
        routes=routes,
        exception_handlers={
            RequestError: _handle_request_error,
            UserError: _handle_request_error,
            HTTPException: _handle_http_exception,
            Exception: _handle_internal_error,
        },
    )
    app.router.redirect_slashes = False
    return app


def guarded(app: ASGIApp, paths: Collection[str], options: Options, metrics: Metrics) -> ASGIApp:
    """Returns an application behind the middleware: hosts, keys, limits and cross-origin requests.

    Args:
      paths: the paths of the routes, as for `Guard`.
    """
    public = {"/health", *(path for protocol in PROTOCOLS for path in protocol.public)}
    unlimited = {"/admin/reload", *(path for protocol in PROTOCOLS for path in protocol.unlimited)}
    app = Guard(app, options, metrics, paths, public, unlimited, _error_response)
    if options.origins:
        app = CORSMiddleware(
            app,
            allow_origins=options.origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=[
                "*"
                # SDKs send headers of their own, such as x-stainless-os; the server ignores unknown
                # ones.
            ],
            expose_headers=EXPOSED_HEADERS,
        )
    return app


def server_routes(
    engine: HasStatus,
    metrics: Metrics,
    options: Options,
    about: Callable[[], Mapping[str, object]] = dict,
) -> list[Route]:
    """The routes `/health`, `/metrics` and `/admin/reload`, which belong to no protocol.

    Args:
      about: returns further fields of `/health`.
    """

    async def health(request: Request) -> Response:
        """Returns the state of the server; the status is 200 if it accepts requests, else 503."""
        status = engine.status()
        # No details, because this path needs no key.
        doing = status.doing if status.state != "failed" else "see the server's log"
        content = {"status": status.state, "doing": doing, **about(), "slots": status.slots}
        content |= {"busy": status.busy, "queued": status.queued}
        return JSONResponse(content, 200 if status.state == "ready" else 503)

    async def metrics_text(request: Request) -> Response:
        """Returns the metrics in the Prometheus text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def reload(request: Request) -> Response:
        """Rereads the file of the keys and the weights; needs a key with `admin: true`."""
        key = current_record().key
        if key is None or not key.admin:
            raise http_error("admin")
        try:
            return JSONResponse(await options.reloader.run())
        except UserError as error:
            raise http_error("reload", error) from None

    return [
        Route("/health", health),
        Route("/metrics", metrics_text),
        Route("/admin/reload", reload, methods=["POST"]),
    ]


def protocol_of(path: str) -> Protocol:
    """Returns the protocol that a path belongs to."""
    matches = (
        (len(prefix), p) for p in PROTOCOLS for prefix in p.prefixes if path.startswith(prefix)
    )
    return max(matches, key=lambda match: match[0])[1]


def _error_response(path: str, error: RequestError) -> Response:
    """Returns an error in the format of the protocol that a path belongs to."""
    protocol = protocol_of(path)
    status = protocol.status_of.get(error.status, error.status)
    return JSONResponse(protocol.format_error(error), status, headers=error.headers)


async def _handle_request_error(request: Request, error: Exception) -> Response:
    return _error_response(request.scope["path"], to_request_error(error))


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        request_error = http_error("method", allowed, request.method, headers={"allow": allowed})
    else:
        request_error = http_error("path", error.detail.lower())
    return _error_response(request.scope["path"], request_error)


async def _handle_internal_error(request: Request, error: Exception) -> Response:
    request_error = http_error("internal")
    # uvicorn closes the connection, and the client must not reuse it.
    request_error.headers["connection"] = "close"
    return _error_response(request.scope["path"], request_error)
