"""The application: the routes of all dialects behind the guards, and what every server tells of itself."""

from collections.abc import Callable
from typing import NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dantinox.config import UserError
from dantinox.serve import kobold, lite, openai, own, tokens
from dantinox.serve.errors import Busy, Unavailable
from dantinox.serve.guard import Refused, guarded, refused
from dantinox.serve.metrics import Measured, Metrics, counted
from dantinox.serve.options import Options
from dantinox.serve.response_stream import EngineProtocol


class Dialect(NamedTuple):
    """A way to talk to the engine.

    Attributes:
      routes: makes its routes.
      prefix: of the paths whose errors it words; the longest that fits counts.
      error: words one.
      public: paths that need no key.
    """

    routes: Callable[[EngineProtocol, Options], list[Route]]
    prefix: str
    error: Callable[[Refused], Response]
    public: tuple[str, ...] = ()


DIALECTS = (
    Dialect(openai.routes, "/", openai.error),
    Dialect(tokens.routes, "/tokenize", openai.error),
    Dialect(kobold.routes, "/api/", kobold.error),
    Dialect(own.routes, "/api/dantinox", openai.error, own.PUBLIC),
    Dialect(lite.routes, "/lite", openai.error, ("/lite",)),
)


def make_app(engine: EngineProtocol, options: Options | None = None) -> ASGIApp:
    """An ASGI application that serves an engine in all dialects.

    Besides their routes it has `/health` (200 when prompts are taken, else 503 and why) and `/metrics` (Prometheus).
    """
    options = options or Options()
    metrics = Metrics(engine)
    measured = Measured(engine, metrics)

    async def health(request: Request) -> Response:
        return _health(engine)

    async def numbers(request: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    routes = [
        Route("/health", health),
        Route("/metrics", numbers),
        *(route for dialect in DIALECTS for route in dialect.routes(measured, options)),
    ]
    expected = (Refused, UserError, Busy, Unavailable)
    app = Starlette(
        routes=routes,
        exception_handlers={
            **dict.fromkeys(expected, _refusal),
            HTTPException: _no_route,
            Exception: _failed,
        },
    )
    app.router.redirect_slashes = False
    public = {"/health", *(path for dialect in DIALECTS for path in dialect.public)}
    paths = {route.path for route in routes}
    return counted(guarded(app, options, public.__contains__, _worded), metrics, paths)


def _health(engine: EngineProtocol) -> Response:
    status = engine.status()
    doing = status.doing if status.state != "failed" else "the log says how"  # anybody may ask, without a key
    known = {"status": status.state, "doing": doing, "model": engine.name, "slots": status.slots}
    known |= {"busy": status.busy, "queued": status.queued}
    return JSONResponse(known, 200 if status.state == "ready" else 503)


def _worded(path: str, problem: Refused) -> Response:
    """A refusal in the words of the dialect that a path belongs to."""
    fitting = [dialect for dialect in DIALECTS if path.startswith(dialect.prefix)]
    response = max(fitting, key=lambda dialect: len(dialect.prefix)).error(problem)
    response.headers.update(problem.headers)
    return response


async def _refusal(request: Request, error: Exception) -> Response:
    return _worded(request.url.path, refused(error))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        problem = Refused(405, f"this path takes {allowed}, not {request.method}", headers={"allow": allowed})
    else:
        problem = Refused(error.status_code, f"there is nothing at this path: {error.detail.lower()}")
    return _worded(path, problem)


async def _failed(request: Request, error: Exception) -> Response:
    # The connection is closed behind it, which a client that would use it again has to know.
    problem = Refused(500, "the server failed; its log says how", code="internal_error", headers={"connection": "close"})
    return _worded(request.url.path, problem)
