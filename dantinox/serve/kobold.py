"""The dialect of KoboldAI and KoboldCpp, as Kobold Lite and SillyTavern speak it.

Sources: KoboldCpp's API documentation, and what its clients were seen to send and to read.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dantinox import __version__
from dantinox.config import Config, GenerationSection, UserError
from dantinox.config.steps import is_digits
from dantinox.files import shown
from dantinox.generation.request import Delta, GenerationRequest, TokenRecord
from dantinox.generation.token_settings import containing
from dantinox.serve.errors import Unavailable
from dantinox.serve.guard import Refused, client_settings, events, json_body, refused
from dantinox.serve.kobold_bodies import ALTERNATIVES, CountBody, GenerateBody, IdsBody, KeyBody, read
from dantinox.serve.kobold_prompt import LEAST, Tags, encode, fitted, split_stops
from dantinox.serve.openai import ChatChances
from dantinox.serve.options import Options
from dantinox.serve.response_stream import EngineProtocol, ResponseStream
from dantinox.serve.spelling import LONG
from dantinox.text import Tokenizer

UNITED = "1.2.5"  # the level of KoboldAI's interface
LEVEL = "1.74"  # that of KoboldCpp's: the lowest of which all is honoured that Lite then uses
ABILITIES = "txt2img", "vision", "audio", "transcribe", "multiplayer", "websearch", "tts", "embeddings", "savedata", "guidance"
REMEMBERED, SECONDS = 64, 600.0  # generations that have ended, and for how long
REASONS = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "length"}
CODES = {None: -1, "length": 0, "cancelled": 0, "eos": 1, "stop": 2}  # of `stop_reason`
TYPES = {400: "bad_input", 401: "unauthorized", 429: "service_unavailable", 503: "service_unavailable"}


def error(problem: Refused) -> Response:
    """A refusal as KoboldCpp words it; a full queue is 503 there."""
    return JSONResponse(_error(problem), 503 if problem.status == 429 else problem.status)


def _error(problem: Refused) -> dict[str, Any]:
    kind = TYPES.get(problem.status, "bad_input" if problem.status < 500 else "server_error")
    return {"detail": {"msg": problem.message, "type": kind}}


class Generation:
    """What one request has been given so far.

    Attributes:
      key: that the client calls it by, "" for none.
      texts, tokens, reasons: of each sample the text, the number of tokens, and why it has ended, None before.
      records: of the first sample's tokens, where log-probabilities were asked for.
      ended: when, None before.
      aborted: whether somebody asked for its end.
    """

    def __init__(self, key: str, answer: ResponseStream):
        samples = answer.request.config.generation.n
        self.key, self.answer = key, answer
        self.texts, self.tokens = [""] * samples, [0] * samples
        self.reasons: list[str | None] = [None] * samples
        self.records: list[TokenRecord] = []
        self.ended: float | None = None
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True
        self.answer.cancel()

    async def pieces(self) -> AsyncGenerator[Delta, None]:
        """The pieces as they come; what has not ended is cancelled when this is closed.

        Raises:
          Unavailable: the server ended it.
        """
        try:
            async for piece in self.answer:
                if piece.finish_reason == "cancelled" and not self.aborted:
                    raise Unavailable("the answer was cut short: the server is stopping")
                self.texts[piece.sample] += piece.text
                self.tokens[piece.sample] += len(piece.tokens)
                self.reasons[piece.sample] = piece.finish_reason
                if piece.sample == 0 and self.answer.request.logprobs is not None:
                    self.records += piece.tokens
                yield piece
        finally:
            self.ended = time.monotonic()
            if None in self.reasons:
                self.answer.cancel()


class Generations:
    """All that are under way and the latest that have ended, so that others than their readers may ask for them.

    Without a key nothing is told that could be another person's: a generation has to be the only one, and without a key itself.
    """

    def __init__(self) -> None:
        self._kept: list[Generation] = []
        self.last: Generation | None = None
        self.count, self.began, self.asked = 0, time.monotonic(), time.monotonic()

    def add(self, generation: Generation) -> None:
        self.count, self.asked = self.count + 1, time.monotonic()
        self._kept = [*self._recent(), generation]

    def find(self, key: str, *, live: bool = False) -> list[Generation]:
        """Those of a key, the newest last."""
        self._kept = self._recent()
        going = [one for one in self._kept if one.ended is None]
        if not key:
            return [one for one in going if not one.key] if len(going) == 1 else []
        return [one for one in (going if live else self._kept) if one.key == key]

    def finish(self, generation: Generation) -> None:
        self.last = generation
        if not generation.key:  # nobody could ask for it
            self._kept = [one for one in self._kept if one is not generation]

    def _recent(self) -> list[Generation]:
        now = time.monotonic()
        over = sum(one.ended is not None for one in self._kept) - REMEMBERED
        found = []
        for one in self._kept:
            if one.ended is None:
                found.append(one)
            elif over > 0:
                over -= 1
            elif now - one.ended < SECONDS:
                found.append(one)
        return found


def routes(engine: EngineProtocol, options: Options) -> list[Route]:
    """The routes of this dialect."""
    generations, tags = Generations(), Tags(options.template)
    return [
        *_told(engine, options),
        *_of_texts(engine),
        *_of_generations(engine, generations),
        Route("/api/extra/perf", lambda request: JSONResponse(_perf(engine, generations))),
        *_generating(engine, tags, generations),
    ]


def _always(path: str, tell: Callable[[], Any]) -> list[Route]:
    """A path of KoboldAI's interface, under both names of its version."""

    async def respond(request: Request) -> Response:
        return JSONResponse(tell())

    return [Route(path.replace("/v1/", f"/{version}/"), respond) for version in dict.fromkeys(("v1", "latest"))]


def _told(engine: EngineProtocol, options: Options) -> list[Route]:
    """What a server tells of itself."""
    about = {"result": "KoboldCpp", "version": LEVEL, "protected": options.key is not None}
    about |= dict.fromkeys(ABILITIES, False) | {"server": f"DantinoX {__version__}"}

    def context() -> dict[str, int]:
        return {"value": engine.status().context}

    async def version(request: Request) -> Response:
        return JSONResponse(about)

    async def true_context(request: Request) -> Response:
        return JSONResponse(context())

    async def story(request: Request) -> Response:
        return JSONResponse({})

    async def images(request: Request) -> Response:
        return JSONResponse([])

    return [
        *_always("/api/v1/model", lambda: {"result": engine.name}),
        *_always("/api/v1/info/version", lambda: {"result": UNITED}),
        *_always("/api/v1/config/max_context_length", context),
        *_always("/api/v1/config/max_length", lambda: {"value": engine.settings({}).generation.max_new_tokens}),
        *_always("/api/v1/config/soft_prompt", lambda: {"value": ""}),
        *_always("/api/v1/config/soft_prompts_list", lambda: {"values": []}),
        Route("/api/extra/version", version),
        Route("/api/extra/true_max_context_length", true_context),
        Route("/api/extra/preloadstory", story),
        Route("/sdapi/v1/sd-models", images),
    ]


def _of_texts(engine: EngineProtocol) -> list[Route]:
    """Text to token ids and back."""
    tokenizer = engine.run.tokenizer

    async def count(request: Request) -> Response:
        body = read(CountBody, await json_body(request))
        text = body.prompt or ""
        ids = await asyncio.to_thread(encode, tokenizer, text) if len(text) > LONG else encode(tokenizer, text)
        if body.special is not False and tokenizer.add_bos and tokenizer.bos_id is not None:
            ids = [tokenizer.bos_id, *ids]
        return JSONResponse({"value": len(ids), "ids": ids})

    async def decode(request: Request) -> Response:
        ids = read(IdsBody, await json_body(request)).ids
        _check_ids(tokenizer, ids, "ids")
        return JSONResponse({"result": tokenizer.decode(ids), "success": True})

    paths = ("/api/extra/tokencount", "/api/extra/tokenize")
    return [
        *(Route(path, count, methods=["POST"]) for path in paths),
        Route("/api/extra/detokenize", decode, methods=["POST"]),
    ]


def _check_ids(tokenizer: Tokenizer, ids: Sequence[int], name: str) -> None:
    wrong = next((token for token in ids if not 0 <= token < tokenizer.vocab_size), None)
    if wrong is not None:
        raise Refused(400, f"{name} must hold token ids in [0, {tokenizer.vocab_size}), got {shown(wrong)}", param=name)


def _of_generations(engine: EngineProtocol, generations: Generations) -> list[Route]:
    """What is asked about generations of other requests."""

    async def found(request: Request, live: bool = False) -> list[Generation]:
        body = read(KeyBody, await json_body(request, empty=True)) if request.method == "POST" else KeyBody()
        return generations.find(body.genkey or "", live=live)

    async def check(request: Request) -> Response:
        texts = [text for one in (await found(request))[-1:] for text in one.texts] or [""]
        return JSONResponse({"results": [{"text": text} for text in texts]})

    async def abort(request: Request) -> Response:
        going = await found(request, live=True)
        for one in going:
            one.abort()
        said = "true" if going else "false"
        return JSONResponse({"success": said, "done": said})

    async def logprobs(request: Request) -> Response:
        last = [_logprobs(engine, one) for one in (await found(request))[-1:]]
        return JSONResponse({"logprobs": last[0] if last else None})

    return [
        Route("/api/extra/generate/check", check, methods=["GET", "POST"]),
        Route("/api/extra/abort", abort, methods=["POST"]),
        Route("/api/extra/last_logprobs", logprobs, methods=["GET", "POST"]),
    ]


def _logprobs(engine: EngineProtocol, generation: Generation) -> dict[str, Any] | None:
    """Those of the first sample, None where they were not asked for."""
    if generation.answer.request.logprobs is None:
        return None
    return ChatChances(engine.run.tokenizer, generation.answer.request, "")(generation.records)


def _perf(engine: EngineProtocol, generations: Generations) -> dict[str, Any]:
    """How the last generation went, and how the server is."""
    status, now, last = engine.status(), time.monotonic(), generations.last
    found: dict[str, Any] = {"last_process": 0.0, "last_eval": 0.0, "last_token_count": 0, "last_seed": -1, "stop_reason": -1}
    if last is not None:
        stats, seed = last.answer.stats, last.answer.request.config.generation.seed
        found["last_process"] = max(stats.first_token_seconds - stats.queued_seconds, 0.0)
        found["last_eval"] = max(stats.seconds - stats.first_token_seconds, 0.0)
        found |= {"last_token_count": sum(last.tokens), "last_seed": -1 if seed is None else seed}
        found["stop_reason"] = CODES[last.reasons[0]]
    found |= {"total_gens": generations.count, "total_img_gens": 0, "queue": status.queued, "idle": int(status.busy == 0)}
    found |= {"hordeexitcounter": -1, "uptime": now - generations.began, "idletime": now - generations.asked, "quiet": True}
    return found


def _generating(engine: EngineProtocol, tags: Tags, generations: Generations) -> list[Route]:
    """Texts, whole and streamed."""

    async def begin(request: Request, streamed: bool) -> Generation:
        body = read(GenerateBody, await json_body(request))
        if streamed and (body.n or 1) > 1:
            raise Refused(400, f"n must be 1 in a stream, got {body.n}: /api/v1/generate gives several", param="n")
        ask = await _ask(engine, tags, body)
        if streamed and ask.config.generation.n > 1:  # the run's own number
            one = ask.config.generation.model_copy(update={"n": 1})
            ask = GenerationRequest(
                ask.ids, ask.config.model_copy(update={"generation": one}), ask.logprobs, False, ask.constraint
            )
        generation = Generation(body.genkey or "", engine.submit(ask))
        generations.add(generation)
        return generation

    async def whole(request: Request) -> Response:
        generation = await begin(request, False)
        try:
            async with contextlib.aclosing(generation.pieces()) as pieces:
                async for _ in pieces:
                    pass
        finally:
            generations.finish(generation)
        logprobs = _logprobs(engine, generation)
        results = []
        for text, tokens, reason in zip(generation.texts, generation.tokens, generation.reasons, strict=True):
            known: dict[str, Any] = {"text": text, "finish_reason": REASONS[reason or "length"]}
            known |= {"prompt_tokens": len(generation.answer.request.ids), "completion_tokens": tokens}
            results.append(known)
        results[0]["logprobs"] = logprobs
        return JSONResponse({"results": results})

    async def stream(request: Request) -> ASGIApp:
        return _streamed(await begin(request, True), generations)

    return [
        Route("/api/v1/generate", whole, methods=["POST"]),
        Route("/api/latest/generate", whole, methods=["POST"]),
        Route("/api/extra/generate/stream", stream, methods=["POST"]),
    ]


async def _ask(engine: EngineProtocol, tags: Tags, body: GenerateBody) -> GenerationRequest:
    """What a request asks for.

    Raises:
      Refused, UserError: it cannot be.
    """
    run, base = engine.run, engine.settings({}).generation
    memory, prompt, stops = body.memory or "", body.prompt or "", body.stop_sequence or ()
    ends: frozenset[int] = frozenset()
    if body.replace_instruct_placeholders is not False and any("{{[" in text for text in (memory, prompt, *stops)):
        ends = await asyncio.to_thread(tags.ends, (memory, prompt, *stops))
        prompt = await asyncio.to_thread(tags.fill, prompt, not memory.strip())
        memory = await asyncio.to_thread(tags.fill, memory, True)
        stops = tuple(filter(None, [(await asyncio.to_thread(tags.fill, stop, False)).strip() for stop in stops]))
    given = body.given(base) | _bans(run.tokenizer, base, body)
    texts, ids = split_stops(run.tokenizer, stops)
    ids += sorted(ends.difference(run.tokenizer.stop_ids))
    if body.stop_sequence is not None:
        given["stop"] = texts
    if ids:
        given["stop_token_ids"] = [*base.stop_token_ids, *dict.fromkeys(ids)]
    if body.trim_stop is not None and (given.get("stop", base.stop) or ids or base.stop_token_ids):
        given["keep_stop"] = not body.trim_stop
    config: Config = client_settings(engine, given)
    context = engine.status().context
    context = min(context, max(body.max_context_length or context, LEAST))
    wanted = run, memory, prompt, config.generation.max_new_tokens, context
    try:
        long = len(memory) + len(prompt) > LONG
        found, new = await asyncio.to_thread(fitted, *wanted) if long else fitted(*wanted)
    except UserError as problem:
        raise Refused(400, str(problem), param="prompt") from None
    generation = config.generation.model_copy(update={"max_new_tokens": new})
    logprobs = min(ALTERNATIVES, run.tokenizer.vocab_size) if body.logprobs else None
    return GenerationRequest(
        tuple(found), config.model_copy(update={"generation": generation}), logprobs, False, body.constraint()
    )


def _bans(tokenizer: Tokenizer, base: GenerationSection, body: GenerateBody) -> dict[str, Any]:
    """Settings of ours for what is not to be generated, beside what the run itself bans.

    A single character bans every token that has it; a longer text is banned as it is spelt.
    """
    texts, ids = body.banned_tokens or (), list(body.custom_token_bans or ())
    _check_ids(tokenizer, ids, "custom_token_bans")
    found: dict[str, Any] = {}
    if single := [text for text in texts if len(text) == 1]:
        ids += containing(tokenizer, single)
    if body.ban_eos_token:
        ids += sorted(tokenizer.stop_ids)
    if ids:
        found["banned_tokens"] = [*base.banned_tokens, *dict.fromkeys(ids)]
    if words := [text for text in texts if len(text) > 1 and _is_spelt(tokenizer, text)]:
        found["bad_words"] = [*base.bad_words, *words]
    if body.logit_bias is not None:
        _check_ids(tokenizer, [int(key[:10]) for key in body.logit_bias if is_digits(key)], "logit_bias")
        found["logit_bias"] = body.logit_bias
    return found


def _is_spelt(tokenizer: Tokenizer, text: str) -> bool:
    """Whether the vocabulary has a spelling of a text; what it has none of it cannot say."""
    try:
        return bool(tokenizer.encode(text))
    except UserError:
        return False


# --- streams


def _streamed(generation: Generation, generations: Generations) -> ASGIApp:
    """The events of a stream. One that fails in its midst is left without an end, by which Lite knows."""
    failed = False

    async def told() -> AsyncGenerator[bytes, None]:
        nonlocal failed
        begun = False
        try:
            async with contextlib.aclosing(generation.pieces()) as pieces:
                async for piece in pieces:
                    if piece.text or piece.finish_reason:
                        begun = True
                        reason = piece.finish_reason and REASONS[piece.finish_reason]
                        yield _event("message", {"token": piece.text, "finish_reason": reason})
        except Exception as failure:
            if not begun:
                raise
            failed = True
            yield _event("error", _error(refused(failure)))
        finally:
            generations.finish(generation)

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        async def pass_on(message: Message) -> None:
            if not (failed and message["type"] == "http.response.body" and not message.get("more_body")):
                await send(message)

        await events(told())(scope, receive, pass_on)

    return respond


def _event(name: str, content: dict[str, Any]) -> bytes:
    """Lines as Lite reads them: both of them, plain line feeds, and nothing in the text that some take for a line's end."""
    return f"event: {name}\ndata: {json.dumps(content, ensure_ascii=True, allow_nan=False)}\n\n".encode()
