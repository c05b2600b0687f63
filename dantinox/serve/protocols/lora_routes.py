"""Routes that load and unload adapters while the server runs, with the paths and fields of vLLM."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dantinox.serve.errors import RequestError, http_error
from dantinox.serve.protocols.bodies import StrictBody, parse_body
from dantinox.serve.service import Service


class LoadAdapterBody(StrictBody):
    """The body of `/v1/load_lora_adapter`.

    Attributes:
      lora_name: the name that requests select the adapter by.
      lora_path: a run with adapters or a PEFT folder, below the directory of `--lora_dir`.
      model: the model that gets the adapter, of several models.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"load_inplace": (False,)}

    lora_name: str
    lora_path: str
    model: str | None = None


class UnloadAdapterBody(StrictBody):
    """The body of `/v1/unload_lora_adapter`.

    Attributes:
      lora_name: the name of the adapter.
      model: the model that has the adapter, of several models.
    """

    lora_name: str
    model: str | None = None


def routes(service: Service) -> list[Route]:
    """Returns the routes that load and unload adapters."""

    async def load(request: Request) -> Response:
        """Loads an adapter; requests may select it as soon as the response arrives."""
        folder = _allowed_folder(service)
        body = await parse_body(request, LoadAdapterBody)
        service.check_model(body.model)
        await service.engine.load_lora(body.lora_name, path_below(folder, body.lora_path))
        return JSONResponse(
            {"id": service.model_name(body.lora_name), "object": "model", "loaded": True}
        )

    async def unload(request: Request) -> Response:
        """Unloads an adapter; the requests that use it continue."""
        _allowed_folder(service)
        body = await parse_body(request, UnloadAdapterBody)
        service.check_model(body.model)
        service.check_model(None, body.lora_name, param="lora_name")
        service.engine.unload_lora(body.lora_name)
        return JSONResponse(
            {"id": service.model_name(body.lora_name), "object": "model", "deleted": True}
        )

    return [
        Route("/v1/load_lora_adapter", load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
    ]


def _allowed_folder(service: Service) -> Path:
    """Returns the directory of `--lora_dir`, or raises RequestError (403) without one."""
    folder = service.options.lora_dir
    if folder is None:
        raise http_error("lora_dir")
    return folder


def path_below(folder: Path, given: str) -> Path:
    """Returns a path of a request, which may be relative to a directory, with all symbolic links
    resolved.

    Raises:
      RequestError: 400, the path is not below the directory.
    """
    folder = folder.resolve()
    try:
        path = (folder / given).resolve()
    except (OSError, RuntimeError, ValueError):  # too long, a loop of links, or a null character
        path = folder
    if path == folder or not path.is_relative_to(folder):
        raise RequestError(
            400, "lora_path must be a folder below the directory of --lora_dir", param="lora_path"
        )
    return path
