"""A copy of Kobold Lite that the user has, served beside the dialect that it speaks."""

from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from dantinox.config import UserError
from dantinox.files import shown
from dantinox.serve.options import Options
from dantinox.serve.response_stream import EngineProtocol

# Its scripts and styles stand in the page and it makes more as it runs; but nothing of a story leaves for another server.
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; connect-src 'self' data: blob:; "
    "img-src 'self' data: blob:; media-src 'self' data: blob:; font-src 'self' data:; manifest-src 'self' data:; "
    "worker-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def routes(engine: EngineProtocol, options: Options) -> list[Route]:
    """`/lite`, where the server was given a copy: the file, or the `index.html` of the folder.

    Raises:
      UserError: there is none at that path.
    """
    if options.lite is None:
        return []
    page = options.lite / "index.html" if options.lite.is_dir() else options.lite
    if not page.is_file():
        raise UserError(
            f"--lite must be the file of Kobold Lite or a folder with its index.html, got {shown(str(options.lite))}"
        )

    async def lite(request: Request) -> Response:
        if "local" not in request.query_params:  # how the page learns that its server is the one it came from
            return RedirectResponse("/lite?local=1")
        headers = {"content-security-policy": POLICY, "cache-control": "no-cache"}
        return FileResponse(page, media_type="text/html", headers=headers)

    return [Route("/lite", lite)]
