"""The dialect of OpenAI: `/v1/models`, `/v1/completions` and `/v1/chat/completions`, whole and streamed.

Source: OpenAI's API reference, and the extras that clients of vLLM send.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dantinox.config import Config
from dantinox.generation.request import Delta, GenerationRequest, TokenRecord
from dantinox.serve.errors import Busy, Unavailable
from dantinox.serve.guard import Refused, client_settings, events, json_body, refused
from dantinox.serve.openai_bodies import Body, ChatBody, CompletionBody, Message, read
from dantinox.serve.options import Options
from dantinox.serve.response_stream import EngineProtocol, ResponseStream
from dantinox.serve.spelling import bytes_of, name_of, prompt_ids
from dantinox.text import ChatTemplate, Tokenizer

NO_CHANCE = -9999.0  # what stands for a log-probability of −∞, which JSON cannot write
PRIMED = 16  # tokens of a prompt that are enough to know how the next one is spelt
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
DONE = b"data: [DONE]\n\n"

log = logging.getLogger("dantinox.serve")


def routes(engine: EngineProtocol, options: Options) -> list[Route]:
    """The routes of this dialect."""
    renderer = Renderer(options.template)
    created = int(time.time())

    def model() -> dict[str, Any]:
        known = {"id": engine.name, "object": "model", "created": created, "owned_by": "dantinox"}
        return known | {"max_model_len": engine.status().context}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model()]})

    async def one_model(request: Request) -> Response:
        check_model(engine, request.path_params["id"])
        return JSONResponse(model())

    async def completions(request: Request) -> ASGIApp:
        body = read(CompletionBody, await json_body(request))
        check_model(engine, body.model)
        config = client_settings(engine, body.given(body.max_tokens))
        prompts = await prompt_ids(engine.run, body.prompt)
        size = engine.run.tokenizer.vocab_size
        logprobs = None if body.logprobs is None else min(body.logprobs, size)
        echo, constraint = bool(body.echo), body.constraint()
        asks = [GenerationRequest(tuple(ids), config, logprobs, echo and logprobs is not None, constraint) for ids in prompts]
        texts = (
            [engine.run.tokenizer.decode(p) if isinstance(p, list) else p for p in body.prompt] if echo else [""] * len(asks)
        )
        return await _answered(engine, asks, COMPLETION, body, texts)

    async def chat(request: Request) -> ASGIApp:
        body = read(ChatBody, await json_body(request))
        check_model(engine, body.model)
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        config = client_settings(engine, body.given(limit))
        ids, ends = await renderer.encode(body.messages)
        config = with_ends(config, ends.difference(engine.run.tokenizer.stop_ids))
        size = engine.run.tokenizer.vocab_size
        logprobs = min(body.top_logprobs or 0, size) if body.logprobs else None
        return await _answered(
            engine, [GenerationRequest(tuple(ids), config, logprobs, False, body.constraint())], CHAT, body, [""]
        )

    return [
        Route("/v1/models", models),
        Route("/v1/models/{id:path}", one_model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
    ]


def error(problem: Refused) -> Response:
    """A refusal as OpenAI words it."""
    return JSONResponse(_error(problem), problem.status)


def _error(problem: Refused) -> dict[str, Any]:
    kind = KINDS.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}


def check_model(engine: EngineProtocol, name: str | None) -> None:
    """Raises Refused, 404, for the name of another model."""
    if name is not None and name != engine.name:
        message = f"there is no model {name[:60]!r} here: this server has {engine.name!r}"
        raise Refused(404, message, param="model", code="model_not_found")


def with_ends(config: Config, ends: frozenset[int]) -> Config:
    """The same settings, with tokens that end an answer besides those that do already."""
    stops = (*config.generation.stop_token_ids, *sorted(ends))
    return config.model_copy(update={"generation": config.generation.model_copy(update={"stop_token_ids": stops})})


class Renderer:
    """A chat template beside the loop: one conversation at a time, in the process that the template has."""

    def __init__(self, template: ChatTemplate | None):
        self._template = template
        self._thread = ThreadPoolExecutor(1, "chat template")

    async def encode(self, messages: Sequence[Message]) -> tuple[list[int], frozenset[int]]:
        """Token ids of a conversation up to where the assistant is to begin, and those that end what it says.

        Raises:
          Refused: 400, there is no template.
          UserError: the template refuses the messages.
        """
        template = self._template
        if template is None:
            raise Refused(
                400,
                "this model has no chat template: use /v1/completions, or start the server with --chat_template plain, chatml "
                "or a file of Jinja",
                param="messages",
                code="no_chat_template",
            )
        plain = [message.model_dump() for message in messages]

        def rendered() -> tuple[list[int], frozenset[int]]:
            return template.encode(plain, generation_prompt=True), template.end_ids

        return await asyncio.get_running_loop().run_in_executor(self._thread, rendered)


# --- log-probabilities


class TextChances:
    """The log-probabilities of one choice of a completion, as lists that go on where they ended."""

    def __init__(self, tokenizer: Tokenizer, ask: GenerationRequest, head: str):
        self._tokenizer, self._at = tokenizer, 0
        self._detokenizer = tokenizer.detokenizer()
        if not ask.echo:
            self._detokenizer.push(ask.ids[-PRIMED:])
            self._at = len(head)

    def __call__(self, records: Sequence[TokenRecord]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for record in records:
            name, own = name_of(self._tokenizer, record["id"]), _chance(record)
            found["tokens"].append(name)
            found["token_logprobs"].append(own)
            found["text_offset"].append(self._at)
            self._at += len(self._detokenizer.push([record["id"]]))
            top: dict[str, float] = {}
            for other in record.get("alternatives", ()):  # the likeliest first: of two that look alike it stays
                top.setdefault(name_of(self._tokenizer, other["id"]), _chance(other))  # type: ignore[arg-type]
            if own is not None:
                top[name] = max(own, top.get(name, own))
            found["top_logprobs"].append(top if own is not None else None)
        return found


class ChatChances:
    """The log-probabilities of one choice of a chat."""

    def __init__(self, tokenizer: Tokenizer, ask: GenerationRequest, head: str):
        self._tokenizer = tokenizer

    def __call__(self, records: Sequence[TokenRecord]) -> dict[str, list[Any]]:
        content = [
            self._entry(record) | {"top_logprobs": [self._entry(other) for other in record.get("alternatives", ())]}
            for record in records
        ]
        return {"content": content, "refusal": []}

    def _entry(self, record: TokenRecord) -> dict[str, Any]:
        data = bytes_of(self._tokenizer, record["id"])
        name = name_of(self._tokenizer, record["id"])
        return {"token": name, "logprob": _chance(record), "bytes": None if data is None else list(data)}


def _chance(record: TokenRecord) -> float | None:
    """ln p of the model; None where nothing was reported."""
    value = record.get("logprob")
    return value if value is None else max(value, NO_CHANCE)


# --- answers


class Form(NamedTuple):
    """How one kind of answer is written."""

    id: str
    whole: str  # the object's name, and that of its parts
    part: str
    chances: Callable[[Tokenizer, GenerationRequest, str], Callable[[Sequence[TokenRecord]], dict[str, list[Any]]]]
    message: Callable[[str], dict[str, Any]]
    delta: Callable[[str], dict[str, Any]]
    opening: dict[str, Any] | None  # the first delta, where there is one by itself


COMPLETION = Form(
    "cmpl", "text_completion", "text_completion", TextChances, lambda text: {"text": text}, lambda text: {"text": text}, None
)
CHAT = Form(
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    ChatChances,
    lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    lambda text: {"delta": {"content": text} if text else {}},
    {"delta": {"role": "assistant", "content": ""}},
)


class Gain(NamedTuple):
    """What a choice has gained: its number, text, log-probabilities where they were asked for, and why it has ended."""

    choice: int
    text: str
    logprobs: dict[str, list[Any]] | None
    finish_reason: str | None
    answer: ResponseStream


async def _answered(
    engine: EngineProtocol, asks: Sequence[GenerationRequest], form: Form, body: Body, heads: Sequence[str]
) -> ASGIApp:
    """The response to a request, once its first piece is there: until then an error has a status of its own.

    Args:
      heads: what the text of each prompt's choices begins with.
    """
    context = engine.status().context
    longest = max(len(ask.ids) for ask in asks)
    if longest >= context:
        # Clients know this mistake by its first words.
        message = f"this model's maximum context length is {context} tokens, and the prompt has {longest}: shorten it"
        raise Refused(400, message, param="messages" if form is CHAT else "prompt", code="context_length_exceeded")
    frame = {"id": f"{form.id}-{secrets.token_hex(12)}", "created": int(time.time()), "model": engine.name}
    gains = _gains(engine, asks, form, heads)
    if not body.stream:
        return JSONResponse(await _whole(gains, asks, form, frame))
    first = await anext(gains)
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    return events(_chunks(first, gains, asks, form, frame, with_usage))


async def _whole(
    gains: AsyncGenerator[Gain, None], asks: Sequence[GenerationRequest], form: Form, frame: Mapping[str, Any]
) -> dict[str, Any]:
    texts: dict[int, list[str]] = {}
    chances: dict[int, dict[str, list[Any]] | None] = {}
    reasons: dict[int, str | None] = {}
    answers: dict[int, ResponseStream] = {}
    async for gain in gains:
        texts.setdefault(gain.choice, []).append(gain.text)
        reasons[gain.choice] = gain.finish_reason
        answers[id(gain.answer)] = gain.answer
        before = chances.setdefault(gain.choice, gain.logprobs)
        if before is not gain.logprobs and before is not None and gain.logprobs is not None:
            for name, values in gain.logprobs.items():
                before[name] += values
    choices = [
        {"index": index, **form.message("".join(texts[index])), "logprobs": chances[index], "finish_reason": reasons[index]}
        for index in sorted(texts)
    ]
    return {**frame, "object": form.whole, "choices": choices, "usage": _usage(asks, answers.values())}


async def _chunks(
    first: Gain,
    gains: AsyncGenerator[Gain, None],
    asks: Sequence[GenerationRequest],
    form: Form,
    frame: Mapping[str, Any],
    with_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """The events of a stream; an error in the midst of it is one too."""
    frame = {**frame, "object": form.part}
    usage: dict[str, Any] = {"usage": None} if with_usage else {}
    answers: dict[int, ResponseStream] = {}

    def chunk(index: int, words: Mapping[str, Any], logprobs: Any = None, reason: str | None = None) -> bytes:
        return _event({**frame, "choices": [{"index": index, **words, "logprobs": logprobs, "finish_reason": reason}], **usage})

    try:
        if form.opening is not None:
            for index in range(sum(ask.config.generation.n for ask in asks)):
                yield chunk(index, form.opening)
        gain: Gain | None = first
        while gain is not None:
            answers[id(gain.answer)] = gain.answer
            if gain.text or gain.finish_reason or (gain.logprobs and any(gain.logprobs.values())):
                yield chunk(gain.choice, form.delta(gain.text), gain.logprobs, gain.finish_reason)
            gain = await anext(gains, None)
        if with_usage:
            yield _event({**frame, "choices": [], "usage": _usage(asks, answers.values())})
    except Exception as failure:
        yield _event(_error(_told(failure)))
    finally:
        await gains.aclose()
    yield DONE


def _told(failure: Exception) -> Refused:
    """What a reader hears of an exception in the midst of an answer."""
    try:
        return refused(failure)
    except Exception:
        log.exception("an answer failed")
        return Refused(500, "the server failed; its log says how", code="internal_error")


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, allow_nan=False).encode() + b"\n\n"


def _usage(asks: Sequence[GenerationRequest], answers: Any) -> dict[str, Any]:
    stats = [answer.stats for answer in answers]
    prompt, new = sum(len(ask.ids) for ask in asks), sum(one.new_tokens for one in stats)
    cached = {"cached_tokens": sum(one.reused_tokens for one in stats)}
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new, "prompt_tokens_details": cached}


async def _gains(
    engine: EngineProtocol, asks: Sequence[GenerationRequest], form: Form, heads: Sequence[str]
) -> AsyncGenerator[Gain, None]:
    """What the choices of all asks gain, as it comes; all that is not finished is cancelled when the generator is closed.

    Raises:
      UserError, Busy, Unavailable: as of `EngineProtocol.submit` and `ResponseStream`; Busy only if no request was taken.
    """
    tokenizer = engine.run.tokenizer
    chances: dict[int, Callable[[Sequence[TokenRecord]], dict[str, list[Any]]]] = {}
    firsts = [sum(ask.config.generation.n for ask in asks[:number]) for number in range(len(asks))]
    async with contextlib.aclosing(_pieces(engine, asks)) as pieces:
        async for number, answer, piece in pieces:
            ask, index = asks[number], firsts[number] + piece.sample
            text, records = piece.text, piece.tokens
            if index not in chances:
                chances[index] = form.chances(tokenizer, ask, heads[number])
                text, records = heads[number] + text, [*answer.prompt, *records]
            if piece.finish_reason == "cancelled":
                raise Unavailable("the answer was cut short: the server is stopping")
            reason = "stop" if piece.finish_reason == "eos" else piece.finish_reason
            logprobs = None if ask.logprobs is None else chances[index](records)
            yield Gain(index, text, logprobs, reason, answer)


async def _pieces(
    engine: EngineProtocol, asks: Sequence[GenerationRequest]
) -> AsyncGenerator[tuple[int, ResponseStream, Delta], None]:
    """The pieces of several asks as they come, with the number of the ask.

    Asks for which the queue has no place wait here until one of these has been answered.
    """
    arrived: asyncio.Queue[tuple[int, ResponseStream, Delta | Exception | None]] = asyncio.Queue()
    waiting, live, tasks = deque(enumerate(asks)), dict[int, ResponseStream](), list[asyncio.Task[None]]()

    async def pump(number: int, answer: ResponseStream) -> None:
        try:
            async for piece in answer:
                arrived.put_nowait((number, answer, piece))
            arrived.put_nowait((number, answer, None))
        except Exception as failure:
            arrived.put_nowait((number, answer, failure))

    room = True  # as far as is known
    try:
        while waiting or live:
            while waiting and room:
                number, ask = waiting[0]
                try:
                    answer = live[number] = engine.submit(ask)
                except Busy:
                    if not live:
                        raise
                    room = False
                    break
                waiting.popleft()
                tasks.append(asyncio.create_task(pump(number, answer)))
            number, answer, found = await arrived.get()
            if isinstance(found, Delta):
                yield number, answer, found
            else:
                del live[number]
                room = True
                if found is not None:
                    raise found
    finally:
        for answer in live.values():
            answer.cancel()
        for task in tasks:
            task.cancel()
