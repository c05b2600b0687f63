"""The protocol of KoboldAI and KoboldCpp, for Kobold Lite and SillyTavern.

Sources: KoboldCpp's API documentation, and the requests of its clients.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dantinox import __version__
from dantinox.config import GenerationSection, UserError, with_generation
from dantinox.config.sampling_steps import is_digits
from dantinox.generation.guides.constraints import Constraint, check_constraint
from dantinox.generation.request import Delta, GenerationRequest, TokenRecord
from dantinox.generation.token_settings import tokens_containing
from dantinox.serve.errors import JSON, RequestError
from dantinox.serve.operations.background import run_in_thread, run_sized
from dantinox.serve.protocols.bodies import parse_body
from dantinox.serve.protocols.kobold_bodies import (
    MAX_ALTERNATIVES,
    CountBody,
    GenerateBody,
    IdsBody,
    KeyBody,
    SchemaBody,
    default_length,
)
from dantinox.serve.protocols.kobold_prompt import (
    MIN_TOKENS,
    Placeholders,
    fit_to_context,
    split_stops,
)
from dantinox.serve.protocols.logprobs import ChatLogprobs
from dantinox.serve.protocols.server_sent_events import named_event
from dantinox.serve.protocols.token_text import check_ids, healed
from dantinox.serve.service import Reply, Service
from dantinox.text import Tokenizer

KOBOLDAI_VERSION = "1.2.5"  # supported version of KoboldAI's API
# Supported version of KoboldCpp's API: the lowest for which Lite enables all features.
KOBOLDCPP_VERSION = "1.74"
MISSING_FEATURES = (
    "txt2img",
    "vision",
    "audio",
    "transcribe",
    "multiplayer",
    "websearch",
    "tts",
    "savedata",
)
# Clients poll these paths while they read a stream.
UNLIMITED = ("/api/extra/generate/check", "/api/extra/abort", "/api/extra/last_logprobs")
MAX_FINISHED = 64  # number of finished generations that are kept
KEEP_SECONDS = 600.0  # for which a finished generation is kept
FINISH_REASONS = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "loop": "length",
    "cancelled": "length",
}
# Finish reason → `stop_reason`.
STOP_REASON_NUMBERS = {None: -1, "length": 0, "loop": 0, "cancelled": 0, "eos": 1, "stop": 2}
ERROR_TYPES = {
    400: "bad_input",
    401: "unauthorized",
    429: "service_unavailable",
    503: "service_unavailable",
}


def format_error(error: RequestError) -> dict[str, JSON]:
    """Returns an error in KoboldCpp's format."""
    kind = ERROR_TYPES.get(error.status, "bad_input" if error.status < 500 else "server_error")
    return {"detail": {"msg": error.message, "type": kind}}


def model_of(body: Mapping[str, JSON]) -> JSON:
    """Returns None: clients of KoboldAI send names of other servers, so only the URL of a request
    selects a model.
    """
    return None


def routes(service: Service) -> list[Route]:
    """Returns the routes of this protocol."""
    generations = Generations()
    placeholders = Placeholders(service.options.template)

    async def whole(request: Request) -> Reply:
        """Continues a prompt and returns the results together."""
        return await parse(
            service, placeholders, generations, await parse_body(request, GenerateBody), False
        )

    async def streamed(request: Request) -> Reply:
        """Continues a prompt and streams the text as server-sent events."""
        return await parse(
            service, placeholders, generations, await parse_body(request, GenerateBody), True
        )

    return [
        *_info_routes(service),
        *_token_routes(service.tokenizer),
        *_generation_routes(service, generations),
        Route("/api/v1/generate", service.endpoint(whole), methods=["POST"]),
        Route("/api/latest/generate", service.endpoint(whole), methods=["POST"]),
        Route("/api/extra/generate/stream", service.endpoint(streamed), methods=["POST"]),
    ]


async def parse(
    service: Service,
    placeholders: Placeholders,
    generations: "Generations",
    body: GenerateBody,
    stream: bool,
) -> Reply:
    """Converts a body of `/generate` to a generation request.

    Raises:
      RequestError, UserError: the body cannot be served.
    """
    if stream and (body.n or 1) > 1:
        raise RequestError(
            400,
            f"n must be 1 in a stream, got {body.n}: /api/v1/generate returns several results",
            param="n",
        )
    model = service.model
    base = service.engine.settings({}).generation
    has_lora = isinstance(body.model, str) and body.model.startswith(f"{service.engine.name}:")
    lora = service.check_model(body.model if has_lora else None, body.lora)
    memory = body.memory or ""
    prompt = body.prompt or ""
    stops = body.stop_sequence or ()
    ends: frozenset[int] = frozenset()
    if body.replace_instruct_placeholders is not False and any(
        "{{[" in text for text in (memory, prompt, *stops)
    ):
        ends, memory, prompt, stops = await run_in_thread(
            placeholders.fill_all, memory, prompt, stops
        )
    settings = body.settings(base) | await run_in_thread(_bans, model.tokenizer, base, body)
    config = service.settings(settings | _stop_settings(model.tokenizer, base, body, stops, ends))
    context = min(service.context, max(body.max_context_length or service.context, MIN_TOKENS))
    requested = config.generation.max_new_tokens
    try:
        found, new = await run_sized(
            len(memory) + len(prompt), fit_to_context, model, memory, prompt, requested, context
        )
    except UserError as error:
        raise RequestError(400, str(error), param="prompt") from None
    config = with_generation(config, max_new_tokens=new, n=1 if stream else config.generation.n)
    logprobs = min(MAX_ALTERNATIVES, model.tokenizer.vocab_size) if body.logprobs else None
    request = GenerationRequest(
        tuple(found), config, logprobs=logprobs, constraint=body.constraint(), lora=lora
    )
    (request,) = await healed(model, [request])
    return Generation(model.tokenizer, generations, body.genkey or "", request, stream)


def _stop_settings(
    tokenizer: Tokenizer,
    base: GenerationSection,
    body: GenerateBody,
    stops: Sequence[str],
    ends: frozenset[int],
) -> dict[str, Any]:
    """Returns the settings of what ends an answer.

    Args:
      base: the generation settings of the server.
      stops: the stop strings of the body, without placeholders.
      ends: the tokens that end a turn of the placeholders.
    """
    texts, ids = split_stops(tokenizer, stops)
    ids += sorted(ends.difference(tokenizer.stop_ids))
    found: dict[str, Any] = {}
    if body.stop_sequence is not None:
        found["stop"] = texts
    if ids:
        found["stop_token_ids"] = [*base.stop_token_ids, *dict.fromkeys(ids)]
    if body.trim_stop is not None and (found.get("stop", base.stop) or ids or base.stop_token_ids):
        found["keep_stop"] = not body.trim_stop
    if body.singleline:
        found |= {"stop": [*found.get("stop", base.stop), "\n"], "keep_stop": False}
    return found


def _bans(tokenizer: Tokenizer, base: GenerationSection, body: GenerateBody) -> dict[str, Any]:
    """Returns the settings of banned tokens and biases, including the bans of the server's
    settings.

    A string of one character bans every token that contains it. A longer string is banned with
    backtracking.
    """
    texts = body.banned_tokens or ()
    ids = list(body.custom_token_bans or ())
    check_ids(tokenizer, ids, "custom_token_bans")
    found: dict[str, Any] = {}
    if single := [text for text in texts if len(text) == 1]:
        ids += tokens_containing(tokenizer, tuple(single))
    if body.ban_eos_token:
        ids += sorted(tokenizer.stop_ids)
    if ids:
        found["banned_tokens"] = [*base.banned_tokens, *dict.fromkeys(ids)]
    if strings := [text for text in texts if len(text) > 1]:
        found["banned_strings"] = [*base.banned_strings, *strings]
    if body.logit_bias is not None:
        check_ids(
            tokenizer, [int(key[:10]) for key in body.logit_bias if is_digits(key)], "logit_bias"
        )
        found["logit_bias"] = body.logit_bias
    return found


# --- generations


class Generation(Reply):
    """The state of one generation.

    Attributes:
      key: the client's `genkey`, "" without one.
      request: the generation request.
      texts, tokens, reasons: text, number of tokens and finish reason (None while it runs) of each
        sample.
      records: records of the first sample's tokens, if log-probabilities are requested.
      ended: time of its end, as returned by `time.monotonic`; None while it runs.
    """

    # Lite recognizes a failed stream by the missing final chunk.
    truncate_on_error: ClassVar[bool] = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        generations: "Generations",
        key: str,
        request: GenerationRequest,
        stream: bool,
    ):
        super().__init__([request], stream)
        samples = request.config.generation.n
        self.key = key
        self.request = request
        self._tokenizer = tokenizer
        self._generations = generations
        self.texts = [""] * samples
        self.tokens = [0] * samples
        self.reasons: list[str | None] = [None] * samples
        self.records: list[TokenRecord] = []
        self.ended: float | None = None

    def on_accepted(self) -> None:
        self._generations.add(self)

    def abort(self) -> None:
        self.aborted = True
        self.streams[0].cancel()

    def add(self, number: int, delta: Delta) -> None:
        self.texts[delta.sample] += delta.text
        self.tokens[delta.sample] += len(delta.tokens)
        self.reasons[delta.sample] = delta.finish_reason
        if delta.sample == 0 and self.request.logprobs is not None:
            self.records += delta.tokens

    def body(self) -> JSON:
        prompt_tokens = len(self.request.ids)
        results: list[JSON] = []
        for text, tokens, reason in zip(self.texts, self.tokens, self.reasons, strict=True):
            known: dict[str, JSON] = {
                "text": text,
                "finish_reason": FINISH_REASONS[reason or "length"],
            }
            known |= {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
            if not results:  # of the first sample only
                known["logprobs"] = self.logprobs()
            results.append(known)
        return {"results": results}

    def logprobs(self) -> dict[str, JSON] | None:
        """Returns the log-probabilities of the first sample, None if they are not requested."""
        if self.request.logprobs is None:
            return None
        return ChatLogprobs(self._tokenizer, self.request, "")(self.records)

    def format_delta(self, number: int, delta: Delta) -> bytes:
        self.add(number, delta)
        if not (delta.text or delta.finish_reason):
            return b""
        reason = None if delta.finish_reason is None else FINISH_REASONS[delta.finish_reason]
        return named_event("message", {"token": delta.text, "finish_reason": reason})

    def format_stream_error(self, error: RequestError) -> bytes:
        return named_event("error", format_error(error))

    def close(self) -> None:
        self.ended = time.monotonic()
        if self.streams:
            self._generations.finish(self)


class Generations:
    """The running and the recently finished generations, which other requests can query or abort.

    A request without a key must not see another client's generation. Therefore it finds a
    generation only if exactly one is running and this one has no key.
    """

    def __init__(self) -> None:
        self._kept: list[Generation] = []  # the oldest first
        self.last: Generation | None = None  # the one that has ended last
        self.count = 0
        self.started = time.monotonic()
        self.last_request = time.monotonic()

    def add(self, generation: Generation) -> None:
        self.count += 1
        self.last_request = time.monotonic()
        self._kept = [*self._recent(), generation]

    def find(self, key: str, *, live: bool = False) -> list[Generation]:
        """Returns the generations of a key, the newest last. With `live`, returns only generations
        that are running.
        """
        self._kept = self._recent()
        running = [one for one in self._kept if one.ended is None]
        if not key:
            return running if len(running) == 1 and not running[0].key else []
        candidates = running if live else self._kept
        return [one for one in candidates if one.key == key]

    def finish(self, generation: Generation) -> None:
        self.last = generation
        if not generation.key:  # without a key, no request can refer to an ended generation
            self._kept = [one for one in self._kept if one is not generation]

    def _recent(self) -> list[Generation]:
        now = time.monotonic()
        excess = sum(one.ended is not None for one in self._kept) - MAX_FINISHED
        found = []
        for one in self._kept:
            if one.ended is None:
                found.append(one)
            elif excess > 0:
                excess -= 1
            elif now - one.ended < KEEP_SECONDS:
                found.append(one)
        return found


# --- routes


def _info_routes(service: Service) -> list[Route]:
    """Returns the routes that describe the server. Paths of KoboldAI's API exist under `v1` and
    `latest`.
    """
    engine = service.engine
    about: dict[str, JSON] = {
        "result": "KoboldCpp",
        "version": KOBOLDCPP_VERSION,
        "protected": bool(service.options.keys),
    }
    about |= dict.fromkeys(MISSING_FEATURES, False) | {
        "embeddings": True,
        "guidance": engine.status().slots > 1,
    }
    about["server"] = f"DantinoX {__version__}"

    def route(path: str, content: Callable[[], JSON], purpose: str) -> Route:
        async def respond(request: Request) -> Response:
            return JSONResponse(content())

        respond.__doc__ = purpose
        return Route(path, respond)

    def context() -> JSON:
        return {"value": service.context}

    length = "Returns the maximum context length in tokens."
    versioned: dict[str, tuple[Callable[[], JSON], str]] = {
        "model": (lambda: {"result": engine.name}, "Returns the name of the model."),
        "info/version": (
            lambda: {"result": KOBOLDAI_VERSION},
            "Returns the version of KoboldAI's API.",
        ),
        "config/max_context_length": (context, length),
        "config/max_length": (
            lambda: {"value": default_length(engine.settings({}).generation)},
            "Returns the default number of new tokens.",
        ),
        "config/soft_prompt": (
            lambda: {"value": ""},
            "Returns an empty name: soft prompts are not supported.",
        ),
        "config/soft_prompts_list": (
            lambda: {"values": []},
            "Returns an empty list: soft prompts are not supported.",
        ),
    }
    return [
        *(
            route(f"/api/{version}/{path}", *answer)
            for path, answer in versioned.items()
            for version in ("v1", "latest")
        ),
        route(
            "/api/extra/version",
            lambda: about,
            "Returns the supported version of KoboldCpp's API and its features.",
        ),
        route("/api/extra/true_max_context_length", context, length),
        route(
            "/api/extra/preloadstory", dict, "Returns an empty object: stories are not preloaded."
        ),
        route(
            "/sdapi/v1/sd-models", list, "Returns an empty list: image models are not supported."
        ),
    ]


def _token_routes(tokenizer: Tokenizer) -> list[Route]:
    """Returns the routes that convert text to token ids and back."""

    async def count(request: Request) -> Response:
        """Returns the token ids of a text and their number."""
        body = await parse_body(request, CountBody)
        text = body.prompt or ""
        ids = await run_sized(len(text), tokenizer.encode, text, parse_special=True)
        if body.special is not False:
            ids = [*tokenizer.ids_before_text, *ids]
        return JSONResponse({"value": len(ids), "ids": ids})

    async def decode(request: Request) -> Response:
        """Returns the text of token ids."""
        ids = (await parse_body(request, IdsBody)).ids
        check_ids(tokenizer, ids, "ids")
        return JSONResponse(
            {"result": await run_sized(len(ids), tokenizer.decode, ids), "success": True}
        )

    async def convert(request: Request) -> Response:
        """Returns a JSON schema as text, which the field `grammar` accepts."""
        source = json.dumps((await parse_body(request, SchemaBody)).source)
        try:
            await run_in_thread(check_constraint, Constraint("json_schema", source))
        except UserError as error:
            raise RequestError(400, str(error), param="schema") from None
        return JSONResponse({"result": source, "success": True})

    return [
        Route("/api/extra/json_to_grammar", convert, methods=["POST"]),
        *(
            Route(f"/api/extra/{name}", count, methods=["POST"])
            for name in ("tokencount", "tokenize")
        ),
        Route("/api/extra/detokenize", decode, methods=["POST"]),
    ]


def _generation_routes(service: Service, generations: Generations) -> list[Route]:
    """Returns the routes that query or abort the generations of other requests."""

    async def find(request: Request, live: bool = False) -> list[Generation]:
        body = (
            await parse_body(request, KeyBody, may_be_empty=True)
            if request.method == "POST"
            else KeyBody()
        )
        return generations.find(body.genkey or "", live=live)

    async def check(request: Request) -> Response:
        """Returns the text that a running generation has produced so far."""
        found = await find(request)
        texts = found[-1].texts if found else [""]
        return JSONResponse({"results": [{"text": text} for text in texts]})

    async def abort(request: Request) -> Response:
        """Ends a running generation."""
        live = await find(request, live=True)
        for one in live:
            one.abort()
        success = "true" if live else "false"
        return JSONResponse({"success": success, "done": success})

    async def logprobs(request: Request) -> Response:
        """Returns the log-probabilities of a generation."""
        found = await find(request)
        return JSONResponse({"logprobs": found[-1].logprobs() if found else None})

    async def perf(request: Request) -> Response:
        """Returns times and counts of the last generation and of the server."""
        return JSONResponse(_perf(service, generations))

    return [
        Route("/api/extra/generate/check", check, methods=["GET", "POST"]),
        Route("/api/extra/abort", abort, methods=["POST"]),
        Route("/api/extra/last_logprobs", logprobs, methods=["GET", "POST"]),
        Route("/api/extra/perf", perf),
    ]


# The fields of `/perf` about the last generation, before there is one.
NO_GENERATION: dict[str, JSON] = {
    "last_process": 0.0,
    "last_eval": 0.0,
    "last_token_count": 0,
    "last_seed": -1,
    "stop_reason": STOP_REASON_NUMBERS[None],
    "last_input_count": 0,
    "last_process_time": 0.0,
    "last_eval_time": 0.0,
    "last_process_speed": 0.0,
    "last_eval_speed": 0.0,
    "last_draft_success": 0,
    "last_draft_failed": 0,
}


def _perf(service: Service, generations: Generations) -> dict[str, JSON]:
    """Returns statistics of the last generation and of the server."""
    status = service.engine.status()
    now = time.monotonic()
    last = NO_GENERATION if generations.last is None else _generation_statistics(generations.last)
    return {
        **last,
        "total_gens": generations.count,
        "total_img_gens": 0,
        "total_tts_gens": 0,
        "queue": status.queued,
        "idle": int(status.busy == 0),
        "total_transcribe_gens": 0,
        "hordeexitcounter": -1,
        "uptime": now - generations.started,
        "idletime": now - generations.last_request,
        "quiet": True,
    }


def _generation_statistics(one: Generation) -> dict[str, JSON]:
    """Returns the fields of `NO_GENERATION` for a generation; times are in seconds, and speeds in
    tokens per second.
    """
    stats = one.streams[0].stats
    seed = one.request.config.generation.seed
    prefill = max(stats.first_token_seconds - stats.queued_seconds, 0.0)
    decoding = max(stats.seconds - stats.first_token_seconds, 0.0)
    new = sum(one.tokens)
    prompt = len(one.request.ids)
    accepted = stats.counts["accepted_draft_tokens"]
    return {
        "last_process": prefill,
        "last_eval": decoding,
        "last_token_count": new,
        "last_seed": -1 if seed is None else seed,
        "stop_reason": STOP_REASON_NUMBERS[one.reasons[0]],
        "last_input_count": prompt,
        "last_process_time": prefill,
        "last_eval_time": decoding,
        "last_process_speed": prompt / prefill if prefill else 0.0,
        "last_eval_speed": new / decoding if decoding else 0.0,
        "last_draft_success": accepted,
        "last_draft_failed": stats.counts["draft_tokens"] - accepted,
    }
