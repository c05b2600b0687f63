"""A copy of Kobold Lite that the user has, served beside the dialect that it speaks."""

from collections.abc import Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from dantinox.config import UserError
from dantinox.files import shown
from dantinox.serve.ask import Serving
from dantinox.serve.guard import Refused
from dantinox.serve.options import Options

KINDS = {".html": "text/html", ".json": "application/json", ".js": "text/javascript", ".css": "text/css", ".png": "image/png"}
# Its scripts and styles stand in the page and it makes more as it runs; but nothing of a story leaves for another server.
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; connect-src 'self' data: blob:; "
    "img-src 'self' data: blob:; media-src 'self' data: blob:; font-src 'self' data:; manifest-src 'self' data:; "
    "worker-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def routes(engine: Serving, options: Options) -> list[Route]:
    """`/lite` and the files beside it, where the server was given a copy.

    Raises:
      UserError: there is none at that path.
    """
    if options.lite is None:
        return []
    page, beside = _files(options.lite)

    async def first(request: Request) -> Response:
        if "local" not in request.query_params:  # how the page learns that its server is the one it came from
            return RedirectResponse("/lite?local=1", headers={"cache-control": "no-cache"})
        return _sent(page, "text/html")

    async def other(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in beside:
            raise Refused(404, "there is no such file beside Kobold Lite")
        return _sent(beside[name], KINDS[beside[name].suffix])

    return [Route("/lite", first), Route("/lite/{name}", other)]


def _files(path: Path) -> tuple[Path, Mapping[str, Path]]:
    """The page, and what may be asked for beside it: files are looked up among these, never by a path that is sent."""
    if path.is_file():
        return path, {}
    page = path / "index.html"
    if not page.is_file():
        raise UserError(f"--lite must be the file of Kobold Lite or a folder with its index.html, got {shown(str(path))}")
    return page, {file.name: file for file in sorted(path.iterdir()) if file.is_file() and file.suffix in KINDS}


def _sent(path: Path, kind: str) -> Response:
    return FileResponse(path, media_type=kind, headers={"content-security-policy": POLICY, "cache-control": "no-cache"})
