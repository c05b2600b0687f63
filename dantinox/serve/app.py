"""The ASGI application: routes of all protocols, middleware, `/health` and `/metrics`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dantinox.config import UserError
from dantinox.serve import pages
from dantinox.serve.errors import JSON, RequestError, error_object, refuse, to_request_error
from dantinox.serve.metrics import Metrics
from dantinox.serve.middleware import Guard
from dantinox.serve.options import Options
from dantinox.serve.protocols import kobold, native, openai, tokenize_routes
from dantinox.serve.response_stream import EngineProtocol
from dantinox.serve.service import Service


class Protocol(NamedTuple):
    """A way to talk to the engine.

    Attributes:
      title: its name in the documentation.
      prefix: of the paths whose errors it formats; the longest that fits counts.
      routes: makes its routes.
      format_error: the body of an error.
      status_of: statuses that it replaces.
      public: paths that need no key.
    """

    title: str
    prefix: str
    routes: Callable[[Service], list[Route]]
    format_error: Callable[[RequestError], JSON] = error_object
    status_of: Mapping[int, int] = MappingProxyType({})
    public: tuple[str, ...] = ()


PROTOCOLS = (
    Protocol("OpenAI", "", openai.routes),
    Protocol("Tokenization", "/tokenize", tokenize_routes.routes),
    Protocol("KoboldAI", "/api/", kobold.routes, kobold.format_error, {429: 503}),
    Protocol("Native API", "/api/dantinox", native.routes),
    Protocol("Web page", "/page", pages.page_routes, public=pages.PUBLIC),
    Protocol("Kobold Lite", "/lite", pages.lite_routes, public=("/lite",)),
)


def make_app(engine: EngineProtocol, options: Options | None = None) -> ASGIApp:
    """An ASGI application that serves an engine in all protocols.

    Besides their routes it has `/health` (200 when requests are taken, else 503 and why) and `/metrics` (Prometheus).
    """
    options = options or Options()
    metrics = Metrics(engine)
    service = Service(engine, options, metrics)
    routes = [*server_routes(engine, metrics), *(route for protocol in PROTOCOLS for route in protocol.routes(service))]
    public = {"/health", *(path for protocol in PROTOCOLS for path in protocol.public)}
    paths = {route.path for route in routes}
    app: ASGIApp = Starlette(
        routes=routes,
        exception_handlers={RequestError: _refuse, UserError: _refuse, HTTPException: _no_route, Exception: _fail},
    )
    app.router.redirect_slashes = False  # type: ignore[attr-defined]
    app = Guard(app, options, metrics, paths, public, _error_response)
    if options.origins:
        headers = ["authorization", "content-type"]
        app = CORSMiddleware(app, allow_origins=options.origins, allow_methods=["GET", "POST"], allow_headers=headers)
    return app


def server_routes(engine: EngineProtocol, metrics: Metrics) -> list[Route]:
    """The routes `/health` and `/metrics`, which belong to no protocol."""

    async def health(request: Request) -> Response:
        """Returns the state of the server; the status is 200 if it accepts requests, else 503."""
        status = engine.status()
        doing = status.doing if status.state != "failed" else "the log says how"  # anybody may ask, without a key
        known = {"status": status.state, "doing": doing, "model": engine.name, "slots": status.slots}
        known |= {"busy": status.busy, "queued": status.queued}
        return JSONResponse(known, 200 if status.state == "ready" else 503)

    async def numbers(request: Request) -> Response:
        """Returns the metrics in the format of Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return [Route("/health", health), Route("/metrics", numbers)]


def _error_response(path: str, error: RequestError) -> Response:
    """An error in the form of the protocol that a path belongs to."""
    protocol = max((one for one in PROTOCOLS if path.startswith(one.prefix)), key=lambda one: len(one.prefix))
    status = protocol.status_of.get(error.status, error.status)
    return JSONResponse(protocol.format_error(error), status, headers=error.headers)


async def _refuse(request: Request, error: Exception) -> Response:
    return _error_response(request.scope["path"], to_request_error(error))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        problem = refuse("method", allowed, request.method, headers={"allow": allowed})
    else:
        problem = refuse("path", error.detail.lower())
    return _error_response(request.scope["path"], problem)


async def _fail(request: Request, error: Exception) -> Response:
    problem = refuse("internal")
    problem.headers["connection"] = "close"  # which it is; a client that would use it again has to know
    return _error_response(request.scope["path"], problem)
