"""Routes of the llama.cpp server: `/completion`, `/infill`, `/props` and `/slots`, for editors,
SillyTavern and other clients.

Source: the documentation of the llama.cpp server.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dantinox import __version__
from dantinox.config import Config, UserError, with_generation
from dantinox.config.sampling_steps import is_digits
from dantinox.generation.guides.constraints import Constraint
from dantinox.generation.request import Delta, GenerationRequest
from dantinox.serve.errors import JSON, RequestError, error_object
from dantinox.serve.operations.background import run_sized
from dantinox.serve.operations.limits import MAX_PROMPTS, MAX_SAMPLES
from dantinox.serve.protocols.bodies import Alternatives, StrictBody, parse_body, warn_unknown
from dantinox.serve.protocols.fim_prompts import with_fim_ends
from dantinox.serve.protocols.llama_options import (
    KNOWN_OPTIONS,
    LlamaOptions,
    reported_options,
    sampler_settings,
)
from dantinox.serve.protocols.logprobs import ChatLogprobs
from dantinox.serve.protocols.sampling_options import Integer, Number
from dantinox.serve.protocols.server_sent_events import data_event
from dantinox.serve.protocols.token_text import check_ids, healed
from dantinox.serve.service import Reply, Service
from dantinox.text import Tokenizer
from dantinox.text.fill_in_middle import fim_ids

STOP_TYPES = {
    "eos": "eos",
    "stop": "word",
    "length": "limit",
    "loop": "limit",
    "cancelled": "limit",
}
# A long suffix gets at most 1 / SUFFIX_SHARE of the space for the texts around the gap.
SUFFIX_SHARE = 4
# Fields that choose a slot, or describe how llama.cpp stores or computes, and change no text.
IGNORED = (
    "id_slot", "cache_prompt", "timings_per_token", "return_progress", "n_keep", "n_cache_reuse",
    "n_indent", "min_keep", "t_max_prompt_ms", "sse_ping_interval", "model", "api_key",
)  # fmt: skip


def _to_part(value: Any) -> str | int:
    """Returns a part of a prompt: a text, also as `{"prompt_string": text}`, or a token id."""
    if isinstance(value, dict) and not value.get("multimodal_data"):
        value = value.get("prompt_string")
    if type(value) not in (str, int):
        raise ValueError("must be a string, a list of strings and token ids, or a list of these")
    return value  # type: ignore[no-any-return]


def _to_prompts(value: Any) -> list[list[str | int]]:
    """Converts a prompt to a list of prompts, each a list of texts and token ids.

    As in llama.cpp, a list of texts, or a list that contains lists or objects, has several prompts.
    Any other list is one prompt.
    """
    if type(value) is int:  # a token id may be a part of a prompt, but is not a prompt
        raise ValueError("must be a string, a list of strings and token ids, or a list of these")
    parts = value if isinstance(value, list) else []
    are_texts = parts != [] and all(isinstance(part, str) for part in parts)
    are_prompts = any(isinstance(part, list | dict) for part in parts)
    prompts = parts if are_texts or are_prompts else [value]
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"must have at most {MAX_PROMPTS} prompts")
    lists = [prompt if isinstance(prompt, list) else [prompt] for prompt in prompts]
    return [[_to_part(part) for part in one] for one in lists]


def _to_bias(value: Any) -> Any:
    """Converts the pairs `[[token, bias], …]` to an object; the bias `false` becomes null, which
    bans the token.
    """
    pairs = [*value.items()] if isinstance(value, dict) else value
    if not isinstance(pairs, list):
        return value
    if any(
        not isinstance(pair, list | tuple) or len(pair) != 2 or type(pair[0]) not in (int, str)
        for pair in pairs
    ):
        raise ValueError("must be an object, or a list of pairs of a token and a number")
    return {str(token): None if bias is False else bias for token, bias in pairs}


def _token_biases(
    tokenizer: Tokenizer, biases: Mapping[str, float | None]
) -> dict[str, float | None]:
    """Returns biases by token id. A text that is not an id biases each of its tokens; biases of one
    token are added.
    """
    found: dict[str, float | None] = {}
    for text, bias in biases.items():
        tokens = [text] if is_digits(text) else tokenizer.encode(text, parse_special=True)
        for token in tokens:
            earlier = found.get(str(token), 0.0)
            found[str(token)] = None if bias is None or earlier is None else earlier + bias
    return found


class LlamaBody(LlamaOptions):
    """Fields of `/completion` and `/infill`. Every key of `generation` and `router` is an
    additional field.

    Attributes:
      stream: send the answer as server-sent events while it is generated.
      logit_bias: numbers added to the logits of tokens, as an object or as pairs; `false` bans a
        token.
      n_cmpl: number of answers to each prompt; `n` is another name.
      n_probs: number of alternatives reported with each token; 0 reports none.
      samplers: names of llama.cpp's samplers in their order, or their characters; the samplers that
        it does not name are off.
      t_max_predict_ms: the answer ends after this time since its first token, once it has a line
        break; 0 or -1 sets no limit.
      return_tokens: report the token ids of an answer that is not streamed; a stream always has
        them.
      response_fields: the only fields of the response; `timings/predicted_n` is the field of an
        object.
      grammar: GBNF grammar of the answer.
      json_schema: JSON schema of the answer.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "image_data": ([],),
        "lora": ([],),
        "post_sampling_probs": (False,),
    }
    ignored: ClassVar[tuple[str, ...]] = IGNORED

    stream: bool | None = None
    logit_bias: Annotated[dict[str, float | None], BeforeValidator(_to_bias)] | None = None
    n_cmpl: Annotated[int, Integer, Field(ge=1, le=MAX_SAMPLES)] | None = Field(
        None, validation_alias=AliasChoices("n_cmpl", "n")
    )
    n_probs: Alternatives | None = None
    t_max_predict_ms: Annotated[Number, Field(ge=-1)] | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[str], Field(max_length=64)] | None = None
    samplers: str | Annotated[list[str], Field(max_length=64)] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None

    def constraint(self) -> Constraint | None:
        """Returns the constraint on the answer, or None.

        Raises:
          RequestError: 400, the body has both a grammar and a schema.
        """
        if self.grammar and self.json_schema is not None:
            raise RequestError(
                400,
                "grammar and json_schema both constrain the answer: use one of them",
                param="json_schema",
            )
        if self.grammar:
            return Constraint("gbnf", self.grammar)
        if self.json_schema is not None:
            return Constraint("json_schema", json.dumps(self.json_schema))
        return None


class LlamaCompletionBody(LlamaBody):
    """The body of `/completion`.

    Attributes:
      prompt: a string, or a list of strings and token ids in any order; a list of these, or of
        strings alone, has several prompts. Names of special tokens become these tokens.
    """

    prompt: Annotated[list[Any], BeforeValidator(_to_prompts)] = Field([[""]])


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
        template = service.options.template
        variables = service.tokenizer.template_variables
        response: dict[str, JSON] = {
            "default_generation_settings": {
                "n_ctx": service.context,
                "params": reported_options(service.engine.settings({}).generation),
            },
            "total_slots": service.engine.status().slots,
            "model_path": service.engine.name,
            "model_alias": service.engine.name,
            "chat_template": "" if template is None else template.source,
            "bos_token": variables.get("bos_token") or "",
            "eos_token": variables.get("eos_token") or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"DantinoX {__version__}",
        }
        return JSONResponse(response)

    async def slots(request: Request) -> Response:
        """Lists the slots of the engine."""
        status = service.engine.status()
        found = [
            {"id": slot, "n_ctx": status.context, "is_processing": slot < status.busy}
            for slot in range(status.slots)
        ]
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
    model = service.model
    tokenizer = service.tokenizer
    every_part = [part for parts in body.prompt for part in parts]
    check_ids(tokenizer, [part for part in every_part if isinstance(part, int)], "prompt")

    def encode(parts: Sequence[str | int]) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
            else:
                # Only the first part gets a BOS token.
                encode_part = model.prompt_ids if number == 0 else tokenizer.encode
                ids += encode_part(part, parse_special=True)
        return ids or model.prompt_ids("")

    characters = sum(len(part) for part in every_part if isinstance(part, str))
    prompts = await _encode(
        "prompt", characters + len(every_part), lambda: [encode(parts) for parts in body.prompt]
    )
    return await _reply(service, body, await _settings(service, body), prompts)


async def parse_infill(service: Service, body: InfillBody) -> Reply:
    """Converts a body of `/infill` to a generation request.

    The texts keep the tokens nearest to the gap. They have the space in the context that the new
    tokens leave, at least half.

    Raises:
      RequestError, UserError: the body cannot be served.
    """
    config = with_fim_ends(service, await _settings(service, body), "input_suffix")
    tokenizer = service.tokenizer
    new_tokens = min(config.generation.max_new_tokens, service.context // 2)

    def encode() -> list[int]:
        start = tokenizer.ids_before_text
        answer = tokenizer.encode(body.prompt) if body.prompt else []
        extra = "".join(f"{file.text}\n" for file in body.input_extra)
        # At most four tokens mark the parts.
        room = max(service.context - new_tokens - len(start) - len(answer) - 4, 0)
        prefix_ids = tokenizer.encode(extra + body.input_prefix)
        suffix = body.input_suffix
        suffix_ids = tokenizer.encode(suffix) if suffix else []
        if len(prefix_ids) + len(suffix_ids) > room:
            # The suffix gets at least what the prefix leaves.
            kept = min(len(suffix_ids), max(room // SUFFIX_SHARE, room - len(prefix_ids)))
            suffix = tokenizer.decode(suffix_ids[:kept]) if kept else ""
            prefix_ids = prefix_ids[max(0, len(prefix_ids) - (room - kept)) :]
        return [*start, *fim_ids(tokenizer, prefix_ids, suffix), *answer]

    texts = (
        body.input_prefix,
        body.input_suffix,
        body.prompt,
        *(file.text for file in body.input_extra),
    )
    size = sum(map(len, texts))
    return await _reply(
        service, body, config, await _encode("input_prefix", size, lambda: [encode()])
    )


async def _encode(param: str, size: int, encode: Callable[[], list[list[int]]]) -> list[list[int]]:
    """Encodes prompts of this size; a text that cannot be encoded is an error of the field
    `param`.
    """
    try:
        return await run_sized(size, encode)
    except UserError as error:
        raise RequestError(400, str(error), param=param) from None


async def _settings(service: Service, body: LlamaBody) -> Config:
    warn_unknown(body, *KNOWN_OPTIONS)
    base = service.engine.settings({}).generation
    found = body.settings(base, service.context)
    # The entropy router chooses the samplers itself, and mirostat disables all others.
    has_samplers = found.get("strategy", base.strategy) != "entropy" and not found.get(
        "mirostat", base.mirostat
    )
    if body.samplers is not None and has_samplers:
        found |= sampler_settings(body.samplers)
    if body.logit_bias is not None:
        size = sum(map(len, body.logit_bias))
        found["logit_bias"] = await run_sized(
            size, _token_biases, service.tokenizer, body.logit_bias
        )
    return with_generation(service.settings(found), n=body.n_cmpl or 1)


async def _reply(
    service: Service, body: LlamaBody, config: Config, prompts: Sequence[Sequence[int]]
) -> Reply:
    service.check_lengths(prompts, "prompt")
    constraint = body.constraint()
    logprobs = min(body.n_probs, service.tokenizer.vocab_size) if body.n_probs else None
    requests = [
        GenerationRequest(tuple(ids), config, logprobs=logprobs, constraint=constraint)
        for ids in prompts
    ]
    return LlamaReply(service, await healed(service.model, requests), body)


@dataclass
class _Answer:
    """One answer to a prompt.

    Attributes:
      records: the records of the tokens since the last event.
      token_count: the number of all tokens.
      first_at: the time of the first token, of `time.monotonic`; 0 before.
    """

    text: str = ""
    reason: str = "length"
    stop_string: str = ""
    records: list[Any] = field(default_factory=list)
    token_count: int = 0
    first_at: float = 0.0


class LlamaReply(Reply):
    """The answers to `/completion` or `/infill`; a complete response with several answers is a
    list.
    """

    def __init__(self, service: Service, requests: Sequence[GenerationRequest], body: LlamaBody):
        super().__init__(requests, bool(body.stream))
        self._tokenizer = service.tokenizer
        self._model_name = service.engine.name
        self._context = service.context
        self._body = body
        self._samples = requests[0].config.generation.n
        self._answers = [_Answer() for _ in range(len(requests) * self._samples)]
        self._prompt_texts: dict[int, str] = {}  # by request number
        self._max_seconds = max(body.t_max_predict_ms or 0, 0) / 1e3  # 0: no limit

    def add(self, number: int, delta: Delta) -> None:
        self._add(number, delta)

    def _add(self, number: int, delta: Delta) -> int:
        """Adds a delta and returns the index of its answer."""
        index = number * self._samples + delta.sample
        answer = self._answers[index]
        answer.text += delta.text
        answer.reason = delta.finish_reason or answer.reason
        answer.stop_string = delta.stop_string or answer.stop_string
        answer.records += delta.tokens
        answer.token_count += len(delta.tokens)
        answer.first_at = answer.first_at or time.monotonic()
        is_late = self._max_seconds and time.monotonic() - answer.first_at > self._max_seconds
        if is_late and "\n" in answer.text:
            self.aborted = True  # the finish reason `cancelled` is then no error
            self.streams[number].cancel()
        return index

    def body(self) -> JSON:
        found: list[JSON] = []
        for index, one in enumerate(self._answers):
            content = self._content(index, one.text)
            if not self._body.return_tokens:
                content["tokens"] = []
            found.append(self._selected(self._last(index) | content))
        return found if len(found) > 1 else found[0]

    def format_delta(self, number: int, delta: Delta) -> bytes:
        index = self._add(number, delta)
        content = self._content(index, delta.text)
        self._answers[index].records = []
        return (
            data_event({"index": index, **content, "stop": False})
            if delta.text or delta.tokens
            else b""
        )

    def format_end(self) -> bytes:
        return b"".join(
            data_event(self._selected(self._last(index))) for index in range(len(self._answers))
        )

    def format_stream_error(self, error: RequestError) -> bytes:
        return data_event(error_object(error))

    def _content(self, index: int, text: str) -> dict[str, JSON]:
        """Returns a text and the token ids since the last event, with their log-probabilities if
        they are requested.
        """
        records = self._answers[index].records
        request = self.requests[index // self._samples]
        known: dict[str, JSON] = {"content": text, "tokens": [record["id"] for record in records]}
        if request.logprobs is None:
            return known
        entries = ChatLogprobs(self._tokenizer, request, "")(records)["content"]
        for record, entry in zip(records, entries, strict=True):
            entry["id"] = record["id"]
            for other, alternative in zip(
                record.get("alternatives", ()), entry["top_logprobs"], strict=True
            ):
                alternative["id"] = other["id"]
        return known | {"completion_probabilities": entries}

    def _last(self, index: int) -> dict[str, JSON]:
        """Returns the last event of an answer in a stream, with its statistics."""
        answer = self._answers[index]
        number = index // self._samples
        request = self.requests[number]
        stats = self.streams[number].stats
        prompt_tokens = len(request.ids)
        # `stats` counts all samples together.
        new_tokens = stats.new_tokens if self._samples == 1 else answer.token_count
        first = stats.first_token_seconds if stats.new_tokens else stats.seconds
        stop_type = STOP_TYPES[answer.reason]
        return {
            "index": index,
            "content": "",
            "tokens": [],
            "stop": True,
            "model": self._model_name,
            "generation_settings": {
                **reported_options(request.config.generation),
                "n_ctx": self._context,
                "model": self._model_name,
                "stream": self.stream,
                "n_probs": self._body.n_probs or 0,
                "n_cmpl": self._samples,
                "grammar": self._body.grammar or "",
            },
            "prompt": self._prompt_text(number),
            "stop_type": stop_type,
            "stopping_word": answer.stop_string,
            "truncated": stop_type == "limit" and prompt_tokens + new_tokens >= self._context,
            "tokens_cached": stats.reused_tokens,
            "tokens_predicted": new_tokens,
            "tokens_evaluated": prompt_tokens,
            "timings": {
                **_timings(
                    "prompt", prompt_tokens - stats.reused_tokens, first - stats.queued_seconds
                ),
                **_timings("predicted", new_tokens, stats.seconds - first),
            },
        }

    def _prompt_text(self, number: int) -> str:
        """Returns the text of a prompt with the names of its special tokens; its answers share
        it.
        """
        if number not in self._prompt_texts:
            detokenizer = self._tokenizer.detokenizer(self._tokenizer.special_ids)
            self._prompt_texts[number] = (
                detokenizer.push(self.requests[number].ids) + detokenizer.flush()
            )
        return self._prompt_texts[number]

    def _selected(self, response: dict[str, JSON]) -> dict[str, JSON]:
        """Returns the `response_fields` of a response; fields that it does not have are left
        out.
        """
        if self._body.response_fields is None:
            return response
        found: dict[str, JSON] = {}
        for path in self._body.response_fields:
            value: JSON = response
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                found[path] = value
        return found


def _timings(name: str, count: int, seconds: float) -> dict[str, JSON]:
    milliseconds = max(seconds, 0.0) * 1e3
    return {
        f"{name}_n": count,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / count if count else 0.0,
        f"{name}_per_second": 1e3 * count / milliseconds if milliseconds else 0.0,
    }
