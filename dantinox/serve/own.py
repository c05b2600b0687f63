"""Our own events, in which a model is watched as it decides, and the page that shows them.

`/api/dantinox/about` says what can be asked for, `/api/dantinox/generate` tells a text token by token, `/` is the page.
"""

import asyncio
import json
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Mapping
from importlib import resources
from string import Template
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dantinox.config import UserError
from dantinox.config.generation import KOBOLD_ORDERS, PRESETS, GenerationSection, step_order
from dantinox.config.overlay import settings_of
from dantinox.config.router import RouterSection
from dantinox.config.sections import Config
from dantinox.config.steps import STEPS
from dantinox.generation import LoadedModel
from dantinox.generation.request import GenerationRequest
from dantinox.generation.trace import changed_settings, router_numbers
from dantinox.report.page import SHARED, asset, empty_page, escaped, parts, vocabulary
from dantinox.report.trace import finite
from dantinox.serve.errors import Unavailable
from dantinox.serve.guard import Refused, client_settings, events, json_body, refused
from dantinox.serve.openai import Renderer, with_ends
from dantinox.serve.openai_bodies import ALTERNATIVES, Message, Part, read
from dantinox.serve.options import Options
from dantinox.serve.response_stream import EngineProtocol, ResponseStream
from dantinox.serve.spelling import LONG

WRITE = ("write.js", "write_settings.js", "write_export.js", "write_start.js")  # of the page, in the order they are loaded
STATIC = {**dict.fromkeys((*SHARED, "page.css"), "report"), **dict.fromkeys((*WRITE, "write.css"), "serve")}
PUBLIC = ("/", "/page/report.html", *(f"/page/{name}" for name in STATIC))  # they hold nothing of the model
KINDS = {"js": "text/javascript", "css": "text/css"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
FIXED = ("n", "use_cache", "weights", "products", "tensor_parallel")  # nothing that one text is given

log = logging.getLogger("dantinox.serve")


class GenerateBody(Part):
    """Of `/api/dantinox/generate`.

    Attributes:
      prompt: a text, or texts and token ids in any order; behind messages it is what the answer begins with.
      messages: a conversation that the chat template makes a prompt of.
      settings: of this request, by their names.
      alternatives: how many are reported with each token.
      fit: leave out the front of a prompt that is too long for the context.
    """

    model_config = ConfigDict(extra="forbid")

    prompt: str | list[str | int] | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    settings: dict[str, Any] = Field({})
    alternatives: Annotated[int, Field(ge=0, le=ALTERNATIVES)] = 10
    fit: bool = False


def routes(engine: EngineProtocol, options: Options) -> list[Route]:
    """The routes of the events and of the page."""
    renderer, known = Renderer(options.template), _settings(engine.settings({}))

    async def about(request: Request) -> Response:
        return JSONResponse(_about(engine, options) | {"settings": known})

    async def generate(request: Request) -> ASGIApp:
        body = read(GenerateBody, await json_body(request))
        if body.prompt is None and body.messages is None:
            raise Refused(400, "prompt or messages is missing", param="prompt")
        config = client_settings(engine, body.settings)
        if config.generation.seed is None:
            config = client_settings(engine, body.settings | {"seed": secrets.randbelow(2**32)})
        ids, texts = await _prompt(engine.run, body)
        if body.messages is not None:
            head, ends = await renderer.encode(body.messages)
            config = with_ends(config, ends.difference(engine.run.tokenizer.stop_ids))
            ids = [*head, *ids]
        cut = _surplus(len(ids), engine.status().context, config) if body.fit else 0
        size = engine.run.tokenizer.vocab_size
        ask = GenerationRequest(tuple(ids[cut:]), config, min(body.alternatives, size))
        begin = {
            "prompt_tokens": len(ask.ids),
            "left_out": cut,
            "texts": texts,
            "seed": config.generation.seed,
            "settings": finite(changed_settings(config)),
            "router": await _router(engine.run, config),
            "vocab_size": size,
            "context": engine.status().context,
        }
        return events(_told(engine, ask, begin))

    pages = {"/": _page("write.html"), "/page/report.html": empty_page()}
    files = {f"/page/{name}": _file(room, name) for name, room in STATIC.items()}
    return [
        Route("/api/dantinox/about", about),
        Route("/api/dantinox/generate", generate, methods=["POST"]),
        *(_sent(path, text, "text/html") for path, text in pages.items()),
        *(_sent(path, text, KINDS[path.rpartition(".")[2]]) for path, text in files.items()),
    ]


# --- what can be asked for


def _about(engine: EngineProtocol, options: Options) -> dict[str, Any]:
    orders = {name: step_order(name, None) for name in (*PRESETS, *KOBOLD_ORDERS)}
    return {
        "model": engine.name,
        "context": engine.status().context,
        "vocab_size": engine.run.tokenizer.vocab_size,
        "chat": options.template is not None,
        "alternatives": ALTERNATIVES,
        "changed": finite(changed_settings(engine.settings({}))),
        "steps": [{"name": name, "group": step.group, "on": [*step.on]} for name, step in STEPS.items()],
        "orders": orders,
    }


def _settings(config: Config) -> list[dict[str, Any]]:
    """Every setting that a request may give: its section, steps, type with its range, default, value here, and help."""
    values = settings_of(config)
    return [
        {
            "name": name,
            "section": section,
            "steps": [step for step, row in STEPS.items() if name in (*row.on, *row.settings)],
            **_typed(schema),
            "default": finite(schema.get("default")),
            "value": finite(values[name]),
            "help": schema["description"],
        }
        for section, kind in (("generation", GenerationSection), ("router", RouterSection))
        for name, schema in kind.model_json_schema()["properties"].items()
        if name not in FIXED
    ]


def _typed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Of a JSON Schema the type, `number`, `integer`, `boolean`, `choice`, `text`, `list` or `map`, and the range."""
    options = [option for option in schema.get("anyOf", (schema,)) if option.get("type") != "null"]
    one = options[0]
    kind = {"string": "text", "array": "list", "object": "map"}.get(one["type"], one["type"])
    if "enum" in one:
        return {"type": "choice", "choices": one["enum"]}
    if len(options) > 1:  # a token: its id or its text
        return {"type": "text"}
    names = {"minimum": "low", "exclusiveMinimum": "above", "maximum": "high", "exclusiveMaximum": "below"}
    return {"type": kind, **{short: one[long] for long, short in names.items() if long in one}}


# --- a prompt


async def _prompt(run: LoadedModel, body: GenerateBody) -> tuple[list[int], list[list[int]]]:
    """The ids of the prompt, and of each text in it.

    Raises:
      Refused: 400, an id that is none of the vocabulary, or a text that it cannot spell.
    """
    prompt = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
    size = run.tokenizer.vocab_size
    wrong = next((token for token in prompt if isinstance(token, int) and not 0 <= token < size), None)
    if wrong is not None:
        raise Refused(400, f"prompt must hold texts and token ids in [0, {size}), got {wrong}", param="prompt")

    def encoded() -> tuple[list[int], list[list[int]]]:
        ids: list[int] = []
        texts: list[list[int]] = []
        for number, part in enumerate(prompt):
            if isinstance(part, str):
                # What begins the text stands behind the begin token, where the model wants one.
                begins = number == 0 and body.messages is None
                texts.append(run.prompt_ids(part) if begins else run.tokenizer.encode(part))
            ids += texts[-1] if isinstance(part, str) else [part]
        return ids or ([] if body.messages is not None else run.prompt_ids("")), texts

    try:
        long = sum(len(part) for part in prompt if isinstance(part, str)) > LONG
        return await asyncio.to_thread(encoded) if long else encoded()
    except UserError as error:
        raise Refused(400, str(error), param="prompt") from None


def _surplus(length: int, context: int, config: Config) -> int:
    """How many tokens the front of a prompt has to lose, so that behind it there is room: half of the context at most."""
    return max(0, length - (context - min(config.generation.max_new_tokens, context // 2)))


async def _router(run: LoadedModel, config: Config) -> dict[str, float | None] | None:
    if config.generation.strategy != "entropy":
        return None
    return await asyncio.to_thread(lambda: router_numbers(run.params([config]), 0))


# --- events


async def _told(engine: EngineProtocol, ask: GenerationRequest, begin: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
    """The events of an answer, which is cancelled when nobody listens any more.

    Raises:
      UserError, Busy, Unavailable: as of `EngineProtocol.submit`.
    """
    answer = engine.submit(ask)
    reasons: dict[int, str] = {}
    try:
        yield _event("begin", begin)
        async for piece in answer:
            if piece.finish_reason == "cancelled":
                raise Unavailable("the answer was cut short: the server is stopping")
            told = {"sample": piece.sample, "text": piece.text, "tokens": piece.tokens}
            if piece.finish_reason is not None:
                reasons[piece.sample] = piece.finish_reason
                told["finish_reason"] = piece.finish_reason
            yield _event("token", told)
        yield _event("end", {"finish_reasons": [reasons[sample] for sample in sorted(reasons)], "stats": _stats(answer)})
    except Exception as failure:
        yield _event("error", _problem(failure))
    finally:
        answer.cancel()


def _stats(answer: ResponseStream) -> dict[str, Any]:
    stats = answer.stats
    later, seconds = stats.new_tokens - 1, stats.seconds - stats.first_token_seconds
    speed = later / seconds if later > 0 and seconds > 0 else None
    return {name: value for name, value in vars(stats).items() if math.isfinite(value)} | {"decode_tok_per_s": speed}


def _problem(failure: Exception) -> dict[str, Any]:
    """What a reader hears of an exception in the midst of an answer."""
    try:
        problem = refused(failure)
    except Exception:
        log.exception("an answer failed")
        problem = Refused(500, "the server failed; its log says how")
    return {"message": problem.message, "param": problem.param}


def _event(name: str, content: Mapping[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(finite(content), allow_nan=False)}\n\n".encode()


# --- the page


def _file(room: str, name: str) -> str:
    return asset(name) if room == "report" else resources.files("dantinox.serve").joinpath(name).read_text(encoding="utf-8")


def _page(name: str) -> str:
    scripts = "\n".join(f'<script src="/page/{script}" defer></script>' for script in (*SHARED, *WRITE))
    return Template(_file("serve", name)).substitute(data=escaped(vocabulary()), scripts=scripts, **parts())


def _sent(path: str, text: str, kind: str) -> Route:
    """A route to a file that is part of the package."""
    content = text.encode()
    headers = {"content-security-policy": POLICY, "cache-control": "no-cache"}

    async def send(request: Request) -> Response:
        return Response(content, media_type=kind, headers=headers)

    return Route(path, send)
