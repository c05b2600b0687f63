"""Routes of the llama.cpp server: `/completion`, `/infill`, `/props` and `/slots`, for editors, SillyTavern and other clients.

Source: the documentation of the llama.cpp server.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dantinox import __version__
from dantinox.config import Config, UserError, with_generation
from dantinox.config.request_overlay import REQUEST_KEYS
from dantinox.generation.constraints import Constraint
from dantinox.generation.request import Delta, GenerationRequest
from dantinox.serve.background import run_sized
from dantinox.serve.errors import JSON, RequestError, error_object, http_error
from dantinox.serve.protocols.bodies import Alternatives, StrictBody, parse_body, warn_unknown
from dantinox.serve.protocols.fim_prompts import with_fim_ends
from dantinox.serve.protocols.llama_options import LlamaOptions
from dantinox.serve.protocols.logprobs import ChatLogprobs
from dantinox.serve.protocols.token_text import check_ids
from dantinox.serve.service import Reply, Service
from dantinox.text.fill_in_middle import fim_ids

STOP_TYPES = {"eos": "eos", "stop": "word", "length": "limit", "cancelled": "limit"}
SUFFIX_SHARE = 4  # a long suffix gets at most 1 / SUFFIX_SHARE of the space for the texts around the gap
# Fields that choose a slot or what is reported, and change no text.
REPORT_FIELDS = (
    "id_slot", "cache_prompt", "return_tokens", "timings_per_token", "return_progress", "response_fields", "n_keep",
    "n_indent", "t_max_prompt_ms", "api_key",
)  # fmt: skip


def _check_prompt(value: Any) -> Any:
    parts = value if isinstance(value, list) else [value]
    if any(type(part) not in (str, int) for part in parts) or type(value) is int:
        raise ValueError("must be a string, or a list of strings and token ids")
    return value


def _to_bias(value: Any) -> Any:
    """Converts the pairs `[[token, bias], …]` to an object; the bias `false` bans the token."""
    if not isinstance(value, list):
        return value
    if any(not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (int, str) for pair in value):
        raise ValueError("must be an object, or a list of pairs of a token and a number")
    return {str(token): -100.0 if bias is False else bias for token, bias in value}


class LlamaBody(LlamaOptions):
    """Fields of `/completion` and `/infill`. Every key of `generation` and `router` is an additional field.

    Attributes:
      stream: send the answer as server-sent events while it is generated.
      logit_bias: numbers added to the logits of tokens, as an object or as pairs; `false` bans a token.
      n_probs: number of alternatives reported with each token; 0 reports none.
      grammar: GBNF grammar of the answer.
      json_schema: JSON schema of the answer.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "image_data": ([],),
        "lora": ([],),
        "post_sampling_probs": (False,),
        "t_max_predict_ms": (0, -1),
    }

    stream: bool | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_to_bias)] | None = None
    n_probs: Alternatives | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None

    def constraint(self) -> Constraint | None:
        """Returns the constraint on the answer, or None.

        Raises:
          RequestError: 400, the body has both a grammar and a schema.
        """
        if self.grammar and self.json_schema:
            raise RequestError(400, "grammar and json_schema both constrain the answer: use one of them", param="json_schema")
        if self.grammar:
            return Constraint("gbnf", self.grammar)
        return Constraint("json_schema", json.dumps(self.json_schema)) if self.json_schema else None


class LlamaCompletionBody(LlamaBody):
    """The body of `/completion`.

    Attributes:
      prompt: a string, or a list of strings and token ids in any order. Names of special tokens become these tokens.
    """

    prompt: Annotated[str | list[str | int], BeforeValidator(_check_prompt)] = ""


class ExtraFile(StrictBody):
    text: str
    filename: str | None = None


class InfillBody(LlamaBody):
    """The body of `/infill`.

    Attributes:
      input_prefix: text before the gap; of a text that is too long, the end is used.
      input_suffix: text after the gap; of a text that is too long, the beginning is used.
      input_extra: other files, which precede the prefix.
      prompt: the beginning of the answer.
    """

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] = Field(default_factory=list)
    prompt: str = ""


def routes(service: Service) -> list[Route]:
    """Returns the routes of this protocol."""

    async def completion(request: Request) -> Reply:
        """Continues a prompt."""
        return await parse_completion(service, await parse_body(request, LlamaCompletionBody))

    async def infill(request: Request) -> Reply:
        """Fills the gap between a prefix and a suffix."""
        return await parse_infill(service, await parse_body(request, InfillBody))

    async def props(request: Request) -> Response:
        """Describes the model and the server."""
        template, variables = service.options.template, service.tokenizer.template_variables
        known: dict[str, JSON] = {"default_generation_settings": {"n_ctx": service.context}}
        known |= {"total_slots": service.engine.status().slots, "model_path": service.engine.name}
        known |= {"model_alias": service.engine.name, "chat_template": "" if template is None else template.source}
        known |= {name: variables.get(name) or "" for name in ("bos_token", "eos_token")}
        known |= {"modalities": {"vision": False, "audio": False}, "build_info": f"DantinoX {__version__}"}
        return JSONResponse(known)

    async def slots(request: Request) -> Response:
        """Lists the slots of the engine."""
        status = service.engine.status()
        found = [{"id": slot, "n_ctx": status.context, "is_processing": slot < status.busy} for slot in range(status.slots)]
        return JSONResponse(found)

    return [
        Route("/completion", service.endpoint(completion), methods=["POST"]),
        Route("/infill", service.endpoint(infill), methods=["POST"]),
        Route("/props", props),
        Route("/slots", slots),
    ]


async def parse_completion(service: Service, body: LlamaCompletionBody) -> Reply:
    """Converts a body of `/completion` to a generation request.

    Raises:
      RequestError, UserError: the body cannot be served.
    """
    parts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    model, tokenizer = service.model, service.tokenizer
    check_ids(tokenizer, [part for part in parts if isinstance(part, int)], "prompt")

    def encode() -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += (tokenizer.encode if number else model.prompt_ids)(part, parse_special=True)
        return ids or model.prompt_ids("")

    ids = await _run("prompt", sum(len(part) if isinstance(part, str) else 1 for part in parts), encode)
    return _reply(service, body, _settings(service, body), ids)


async def parse_infill(service: Service, body: InfillBody) -> Reply:
    """Converts a body of `/infill` to a generation request.

    The texts are shortened to the tokens next to the gap that fit into the context with the new tokens, but at least half of
    the context.

    Raises:
      RequestError, UserError: the body cannot be served.
    """
    config = with_fim_ends(service, _settings(service, body), "input_suffix")
    tokenizer = service.tokenizer
    context, new = service.context, min(config.generation.max_new_tokens, service.context // 2)

    def encode() -> list[int]:
        start = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        answer = tokenizer.encode(body.prompt) if body.prompt else []
        extra = "".join(f"{file.text}\n" for file in body.input_extra)
        room = max(context - new - len(start) - len(answer) - 4, 0)  # at most four tokens mark the parts
        prefix, suffix = tokenizer.encode(extra + body.input_prefix), body.input_suffix
        whole = len(tokenizer.encode(suffix)) if suffix else 0
        if len(prefix) + whole > room:
            kept = min(whole, max(room // SUFFIX_SHARE, room - len(prefix)))
            suffix = tokenizer.decode(tokenizer.encode(suffix)[:kept]) if kept else ""
            prefix = prefix[max(0, len(prefix) - (room - kept)) :]
        return [*start, *fim_ids(tokenizer, prefix, suffix), *answer]

    size = len(body.input_prefix) + len(body.input_suffix) + sum(len(file.text) for file in body.input_extra)
    return _reply(service, body, config, await _run("input_prefix", size, encode))


async def _run(param: str, size: int, encode: Any) -> list[int]:
    try:
        ids: list[int] = await run_sized(size, encode)
    except UserError as error:
        raise RequestError(400, str(error), param=param) from None
    return ids


def _settings(service: Service, body: LlamaBody) -> Config:
    warn_unknown(body, *REPORT_FIELDS, *REQUEST_KEYS)
    found = body.settings(service.engine.settings({}).generation, service.context)
    if body.logit_bias is not None:
        found["logit_bias"] = body.logit_bias
    return with_generation(service.settings(found), n=1)


def _reply(service: Service, body: LlamaBody, config: Config, ids: Sequence[int]) -> Reply:
    if len(ids) >= service.context:
        raise http_error("context", service.context, len(ids), param="prompt")
    logprobs = min(body.n_probs, service.tokenizer.vocab_size) if body.n_probs else None
    return LlamaReply(service, GenerationRequest(tuple(ids), config, logprobs, False, body.constraint()), bool(body.stream))


class LlamaReply(Reply):
    """The answer to `/completion` or `/infill`."""

    def __init__(self, service: Service, request: GenerationRequest, stream: bool):
        super().__init__([request], stream)
        self._tokenizer, self._model = service.tokenizer, service.engine.name
        self._text, self._reason, self._records = "", "length", list[Any]()

    def add(self, number: int, delta: Delta) -> None:
        self._text += delta.text
        self._reason = delta.finish_reason or self._reason
        self._records += delta.tokens

    def body(self) -> JSON:
        return self._last(self._text) | self._content(self._text)

    def format_delta(self, number: int, delta: Delta) -> bytes:
        self.add(number, delta)
        content, self._records = self._content(delta.text), []
        return _event({"index": 0, **content, "stop": False}) if delta.text or delta.tokens else b""

    def format_end(self) -> bytes:
        return _event(self._last(""))

    def format_stream_error(self, error: RequestError) -> bytes:
        return _event(error_object(error))

    def _content(self, text: str) -> dict[str, JSON]:
        """Returns the text and the token ids since the last call, with their log-probabilities if they are requested."""
        known: dict[str, JSON] = {"content": text, "tokens": [record["id"] for record in self._records]}
        if self.requests[0].logprobs is None:
            return known
        entries = ChatLogprobs(self._tokenizer, self.requests[0], "")(self._records)["content"]
        numbered: list[JSON] = [{"id": record["id"], **entry} for record, entry in zip(self._records, entries, strict=True)]
        return known | {"completion_probabilities": numbered}

    def _last(self, text: str) -> dict[str, JSON]:
        """Returns the complete answer, or the last event of a stream, with its statistics."""
        stats, prompt = self.streams[0].stats, len(self.requests[0].ids)
        first = stats.first_token_seconds if stats.new_tokens else stats.seconds
        known: dict[str, JSON] = {"index": 0, "content": text, "tokens": [], "stop": True, "model": self._model}
        known |= {"stop_type": STOP_TYPES[self._reason], "truncated": False, "tokens_cached": stats.reused_tokens}
        known |= {"tokens_predicted": stats.new_tokens, "tokens_evaluated": prompt}
        timings = _timings("prompt", prompt - stats.reused_tokens, first - stats.queued_seconds)
        timings |= _timings("predicted", stats.new_tokens, stats.seconds - first)
        known["timings"] = timings
        return known


def _timings(name: str, count: int, seconds: float) -> dict[str, JSON]:
    milliseconds = max(seconds, 0.0) * 1e3
    return {
        f"{name}_n": count,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / count if count else 0.0,
        f"{name}_per_second": 1e3 * count / milliseconds if milliseconds else 0.0,
    }


def _event(content: JSON) -> bytes:
    return b"data: " + json.dumps(content, allow_nan=False).encode() + b"\n\n"
