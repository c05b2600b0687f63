"""Static files: DantinoX's web page with its scripts and styles, and a copy of Kobold Lite."""

from importlib import resources
from string import Template

from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from dantinox.config import UserError
from dantinox.files import quote
from dantinox.report.page import (
    SHARED_SCRIPTS,
    empty_page,
    escape_json,
    html_fragments,
    read_asset,
    strategy_data,
)
from dantinox.serve.service import Service

SCRIPTS = (
    "write_requests.js", "write.js", "write_draw.js", "write_chat.js", "write_settings.js",
    "write_presets.js", "write_compare.js", "write_files.js", "write_exchange.js", "write_start.js",
)  # fmt: skip  # in the order they are loaded
STATIC = {
    **dict.fromkeys((*SHARED_SCRIPTS, "page.css"), "report"),
    **dict.fromkeys((*SCRIPTS, "write.css"), "serve"),
}
# These paths need no API key, because they contain no data of the model.
PUBLIC = ("/", "/page/report.html", *(f"/page/{name}" for name in STATIC))
TYPES = {"js": "text/javascript", "css": "text/css"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for"
    " 'script'"
)
# Lite has inline scripts and styles and creates more at run time. This policy still prevents
# requests to other servers.
LITE_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline';"
    " connect-src 'self' data: blob:; img-src 'self' data: blob:; media-src 'self' data: blob:;"
    " font-src 'self' data:; manifest-src 'self' data:; worker-src 'self' blob:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)


def page_routes(service: Service) -> list[Route]:
    """Returns the routes of the web page `/` and its files."""
    scripts = "\n".join(
        f'<script src="/page/{script}" defer></script>' for script in (*SHARED_SCRIPTS, *SCRIPTS)
    )
    page = Template(_read_file("write.html", "serve")).substitute(
        data=escape_json(strategy_data()), scripts=scripts, **html_fragments()
    )
    html = {"/": page, "/page/report.html": empty_page()}
    return [
        *(_static_route(path, text, "text/html") for path, text in html.items()),
        *(
            _static_route(f"/page/{name}", _read_file(name, package), TYPES[name.partition(".")[2]])
            for name, package in STATIC.items()
        ),
    ]


def _read_file(name: str, package: str) -> str:
    if package == "report":
        return read_asset(name)
    return resources.files("dantinox.serve").joinpath("page", name).read_text(encoding="utf-8")


def _static_route(path: str, text: str, media_type: str) -> Route:
    content = text.encode()
    headers = {"content-security-policy": POLICY, "cache-control": "no-cache"}

    async def send(request: Request) -> Response:
        """Returns a file of the web page."""
        return Response(content, media_type=media_type, headers=headers)

    return Route(path, send)


def lite_routes(service: Service) -> list[Route]:
    """Returns the route `/lite` if `--lite` is set. It serves the file that `--lite` names, or
    `index.html` in the folder.

    Raises:
      UserError: `--lite` is neither a file nor a folder with an `index.html`.
    """
    lite = service.options.lite
    if lite is None:
        return []
    page = lite / "index.html" if lite.is_dir() else lite
    if not page.is_file():
        got = quote(str(lite))
        raise UserError(
            "--lite must be the HTML file of Kobold Lite, or a folder that contains it as"
            f" index.html, got {got}"
        )

    async def send(request: Request) -> Response:
        """Returns the copy of Kobold Lite."""
        # With this parameter, Lite connects to the server that it was loaded from.
        if "local" not in request.query_params:
            return RedirectResponse("/lite?local=1")
        headers = {"content-security-policy": LITE_POLICY, "cache-control": "no-cache"}
        return FileResponse(page, media_type="text/html", headers=headers)

    return [Route("/lite", send)]
