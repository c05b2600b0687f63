"""Request bodies: strict JSON parsing and the base model for validation."""

import json
import logging
import math
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.requests import Request

from dantinox.files import escape_name, quote
from dantinox.serve.errors import JSON, RequestError, http_error
from dantinox.serve.operations.background import run_sized
from dantinox.serve.operations.limits import MAX_DEPTH, MAX_DIGITS

log = logging.getLogger("dantinox.serve")

MAX_ALTERNATIVES = 20  # maximum number of alternatives reported with a token
PARSED_BODY = "dantinox.body"  # key in the scope of a request whose body has been parsed already
# Parts of Pydantic's messages → the words of JSON.
REASONS = (
    (r"Input should be", "must be"),
    (r"a valid dictionary( or instance of \w+)?", "an object"),
    (r"a valid tuple", "a string or a list"),
    (r"a valid list", "a list"),
    (r"^\w+ should have (.*?)( after validation, not .*)?$", r"must have \1"),
)
TEXT_PARTS = ("text", "input_text", "output_text")  # types of the parts of a message that are text
# Unsupported fields of OpenAI's API that would change the response → their values that are
# accepted, as they have no effect.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "suffix": ("",),
    "audio": (),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "use_beam_search": (False,),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "web_search_options": (),
}


class StrictBody(BaseModel):
    """An object in a body. A null field counts as absent, values are not converted, and
    `model_extra` has the unknown fields.

    `unsupported` maps each unsupported field that would change the response to its values that are
    accepted, because they have no effect. `ignored` has the fields of the protocol that have no
    effect here; docs/serving_fields.md lists them.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, protected_namespaces=())
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    ignored: ClassVar[tuple[str, ...]] = ()


def to_integer(value: Any) -> Any:
    """Converts an integral float such as 2.0, which JavaScript may send, to an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def to_tuple(value: Any) -> Any:
    """Converts a string, or a list, to a tuple."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def part_texts(value: Any, kinds: Collection[str] = TEXT_PARTS) -> list[str] | None:
    """Returns the texts of content that is a string or a list of text parts, or None for other
    content.

    Args:
      kinds: the types of the parts.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        return None
    texts: list[str] = []
    for part in value:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") in kinds else None
        if not isinstance(text, str):
            return None
        texts.append(text)
    return texts


def _message_text(value: Any) -> str:
    """Returns the text of a message, which is a string or a list of text parts."""
    texts = [] if value is None else part_texts(value)
    if texts is None:
        raise ValueError("must be a string, or a list of parts of type text")
    return "".join(texts)


def content_text(
    value: Any,
    where: str,
    kinds: Collection[str] = TEXT_PARTS,
    *,
    separator: str = "",
    parts: str = "parts",
) -> str:
    """Returns the text of content that is a string or a list of text parts.

    Args:
      where: the field, for the error message.
      kinds: the types of the parts.
      separator: text between the parts.
      parts: what the protocol calls them.

    Raises:
      RequestError: 400, it is something else.
    """
    texts = part_texts(value, kinds)
    if texts is None:
        message = f"{where} must be a string or a list of {parts} of type {' or '.join(kinds)}"
        raise RequestError(400, message, param=where)
    return separator.join(texts)


class FunctionCall(StrictBody):
    """The function of a tool call: its name, and its arguments as JSON."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(StrictBody):
    """A tool call in a message of the assistant."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall


class Message(StrictBody):
    """A message of a conversation.

    Attributes:
      role: `system`, `developer`, `user`, `assistant` or `tool`.
      content: the text, or a list of text parts.
      tool_calls: the tool calls of the assistant.
      tool_call_id: the call to which a message of the role `tool` has the result.
      reasoning_content: the reasoning of the assistant.
    """

    role: str
    content: Annotated[str, BeforeValidator(_message_text)] = ""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def fields(self) -> dict[str, Any]:
        """Returns the message as a dict, without absent fields."""
        return self.model_dump(exclude_none=True)


Alternatives = Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)]
BodyType = TypeVar("BodyType", bound=StrictBody)


async def parse_body(
    request: Request,
    kind: type[BodyType],
    *,
    may_be_empty: bool = False,
    any_media_type: bool = False,
) -> BodyType:
    """Parses and validates the body of a request.

    Args:
      kind: model of the body.
      may_be_empty: treat a request without a body as an empty object.
      any_media_type: accept JSON whatever media type the request declares.

    Raises:
      RequestError: 415, the media type is not JSON in UTF-8; 400, the body is not JSON or not
        valid.
    """
    data = await request.body()
    if not data and may_be_empty:
        return kind()
    if not any_media_type:
        check_media_type(request)
    if PARSED_BODY in request.scope:
        return await run_sized(len(data), validate_body, kind, request.scope[PARSED_BODY])
    return await run_sized(len(data), lambda: validate_body(kind, parse_json(data)))


def check_media_type(request: Request) -> None:
    """Raises RequestError (415) if the media type of a body is not JSON in UTF-8."""
    media_type, _, parameters = request.headers.get("content-type", "").lower().partition(";")
    charset = re.search(r"charset\s*=\s*\"?([^\s;\"]+)", parameters)
    is_json = re.fullmatch(r"application/([\w.-]+\+)?json", media_type.strip())
    if not is_json or (charset and charset[1] not in ("utf-8", "utf8")):
        raise http_error("media_type")


def validate_body(kind: type[BodyType], data: JSON) -> BodyType:
    """Validates a JSON value as a body.

    Raises:
      RequestError: 400 with the wrong field and the allowed values.
    """
    if not isinstance(data, dict):
        raise RequestError(400, f"the body must be a JSON object, got {quote(data)}")
    for name, harmless in kind.unsupported.items():
        if data.get(name) is not None and data[name] not in harmless:
            raise RequestError(
                400,
                f"{name} is not supported by this server: remove it",
                param=name,
                code="unsupported",
            )
    try:
        return kind.model_validate(
            {name: value for name, value in data.items() if value is not None}
        )
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
    param = ".".join(escape_name(str(part)) for part in first["loc"][:4])
    if first["type"] == "missing":
        raise RequestError(400, f"{param} is missing", param=param)
    reason = first["msg"].removeprefix("Value error, ")
    for pattern, words in REASONS:
        reason = re.sub(pattern, words, reason)
    reason = reason if reason.startswith("must") else f"is wrong: {reason.lower()}"
    raise RequestError(400, f"{param} {reason}, got {quote(first['input'])}", param=param)


def warn_unknown(body: StrictBody, *known: str) -> None:
    """Logs a warning for every unknown field of a body, except the `known` ones."""
    for name in (body.model_extra or {}).keys() - {*known, *body.unsupported, *body.ignored}:
        log.warning("a request has the unknown field %s, which has no effect", escape_name(name))


# --- JSON


def parse_json(data: bytes) -> JSON:
    """Parses JSON strictly: UTF-8, finite numbers, no duplicate keys, at most `MAX_DEPTH` nested
    lists and objects.

    Raises:
      RequestError: 400, the body is not valid; the message has the reason.
    """
    try:
        found: JSON = json.loads(
            data.decode(),
            parse_constant=_reject_constant,
            parse_float=_parse_float,
            parse_int=_parse_int,
            object_pairs_hook=_parse_object,
        )
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the body is not UTF-8: byte {error.start} is invalid") from None
    except json.JSONDecodeError as error:
        where = f"(line {error.lineno}, column {error.colno})"
        raise RequestError(400, f"the body is not JSON: {error.msg.lower()} {where}") from None
    except RecursionError:
        raise _depth_error() from None
    _check_tree(found, 0)
    return found


def _depth_error() -> RequestError:
    return RequestError(400, f"the body has more than {MAX_DEPTH} nested lists and objects")


def _reject_constant(word: str) -> float:
    raise RequestError(400, f"the body has {word}, which is not a JSON number")


def _parse_float(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise RequestError(
            400, f"the body has the number {escape_name(digits)}, which is too large"
        )
    return number


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise RequestError(
            400, f"the body has the number {escape_name(digits)}, which is too large"
        )
    return int(digits)


def _parse_object(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found: dict[str, JSON] = {}
    for name, value in pairs:
        if name in found:
            raise RequestError(400, f"the body has the key {quote(name)} twice in one object")
        found[name] = value
    return found


def _check_tree(value: JSON, depth: int) -> None:
    """Raises RequestError for values that are nested too deeply and for lone surrogates."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            code = f"\\u{ord(value[error.start]):04x}"
            raise RequestError(400, f"the body has a lone surrogate, {code}") from None
    elif isinstance(value, dict | list):
        if depth == MAX_DEPTH:
            raise _depth_error()
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            if isinstance(part, str | dict | list):
                _check_tree(part, depth + 1)
