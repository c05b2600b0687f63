"""Static pages: the web page of DantinoX with its files, and a copy of Kobold Lite."""

from importlib import resources
from string import Template

from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from dantinox.config import UserError
from dantinox.files import quote
from dantinox.report.page import SHARED, asset, empty_page, escaped, parts, vocabulary
from dantinox.serve.service import Service

SCRIPTS = ("write.js", "write_settings.js", "write_files.js", "write_start.js")  # in the order they are loaded
STATIC = {**dict.fromkeys((*SHARED, "page.css"), "report"), **dict.fromkeys((*SCRIPTS, "write.css"), "serve")}
PUBLIC = ("/", "/page/report.html", *(f"/page/{name}" for name in STATIC))  # they hold nothing of the model
TYPES = {"js": "text/javascript", "css": "text/css"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
# Lite's scripts and styles are in its page and it makes more as it runs; but nothing of a story leaves for another server.
LITE_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; connect-src 'self' data: blob:; "
    "img-src 'self' data: blob:; media-src 'self' data: blob:; font-src 'self' data:; manifest-src 'self' data:; "
    "worker-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page_routes(service: Service) -> list[Route]:
    """`/`, the page to write with, and its files."""
    scripts = "\n".join(f'<script src="/page/{script}" defer></script>' for script in (*SHARED, *SCRIPTS))
    page = Template(_file("write.html", "serve")).substitute(data=escaped(vocabulary()), scripts=scripts, **parts())
    html = {"/": page, "/page/report.html": empty_page()}
    return [
        *(_static(path, text, "text/html") for path, text in html.items()),
        *(_static(f"/page/{name}", _file(name, package), TYPES[name.partition(".")[2]]) for name, package in STATIC.items()),
    ]


def _file(name: str, package: str) -> str:
    if package == "report":
        return asset(name)
    return resources.files("dantinox.serve").joinpath("page", name).read_text(encoding="utf-8")


def _static(path: str, text: str, media_type: str) -> Route:
    content = text.encode()
    headers = {"content-security-policy": POLICY, "cache-control": "no-cache"}

    async def send(request: Request) -> Response:
        """Returns a file of the web page."""
        return Response(content, media_type=media_type, headers=headers)

    return Route(path, send)


def lite_routes(service: Service) -> list[Route]:
    """`/lite`, where the server was given a copy: the file, or the `index.html` of the directory.

    Raises:
      UserError: there is none at that path.
    """
    lite = service.options.lite
    if lite is None:
        return []
    page = lite / "index.html" if lite.is_dir() else lite
    if not page.is_file():
        raise UserError(f"--lite must be the file of Kobold Lite or a folder with its index.html, got {quote(str(lite))}")

    async def send(request: Request) -> Response:
        """Returns the copy of Kobold Lite."""
        if "local" not in request.query_params:  # how the page learns that its server is the one it came from
            return RedirectResponse("/lite?local=1")
        headers = {"content-security-policy": LITE_POLICY, "cache-control": "no-cache"}
        return FileResponse(page, media_type="text/html", headers=headers)

    return [Route("/lite", send)]
