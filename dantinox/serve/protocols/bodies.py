"""Request bodies: strict JSON parsing and the base model of their validation."""

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.requests import Request

from dantinox.files import escape_name, quote
from dantinox.serve.background import run_sized
from dantinox.serve.errors import JSON, RequestError, refuse
from dantinox.serve.limits import DEPTH, DIGITS

ALTERNATIVES = 20  # reported with a token
# Fields of OpenAI's that would change the response, and values with which they do not.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "suffix": ("",),
    "audio": (),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "use_beam_search": (False,),
}


class StrictBody(BaseModel):
    """An object of a body: null is the same as absent, no value is converted, unknown fields are kept aside.

    Attributes:
      unsupported: fields that would change the response, and values with which they do not.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, protected_namespaces=())
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


def _content(value: Any) -> str:
    """The text of a message: itself, or parts that are texts."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        texts = [part.get("text") for part in value if isinstance(part, dict) and part.get("type") in ("text", "input_text")]
        if len(texts) == len(value) and all(isinstance(text, str) for text in texts):
            return "".join(texts)  # type: ignore[arg-type]
    raise ValueError("must be a text, or a list of parts of the type text")


class Message(StrictBody):
    """A message of a conversation."""

    role: str
    content: Annotated[str, BeforeValidator(_content)] = ""


Alternatives = Annotated[int, Field(ge=0, le=ALTERNATIVES)]
Kind = TypeVar("Kind", bound=StrictBody)


async def parse_body(request: Request, kind: type[Kind], *, may_be_empty: bool = False) -> Kind:
    """The JSON object of a request as a body of this kind.

    Args:
      may_be_empty: a request without a body is an empty object.

    Raises:
      RequestError: 415, it is not declared as JSON in UTF-8; 400, it is not JSON, or not such an object.
    """
    data = await request.body()
    if not data and may_be_empty:
        return kind()
    media_type, _, parameters = request.headers.get("content-type", "").lower().partition(";")
    charset = re.search(r"charset\s*=\s*\"?([^\s;\"]+)", parameters)
    is_json = re.fullmatch(r"application/([\w.-]+\+)?json", media_type.strip())
    if not is_json or (charset and charset[1] not in ("utf-8", "utf8")):
        raise refuse("media_type")
    return await run_sized(len(data), lambda: validated(kind, parse_json(data)))


def validated(kind: type[Kind], data: JSON) -> Kind:
    """A body of this kind.

    Raises:
      RequestError: 400, which field is wrong and what is allowed.
    """
    if not isinstance(data, dict):
        raise RequestError(400, f"the body must be a JSON object, got {quote(data)}")
    for name, harmless in kind.unsupported.items():
        if data.get(name) is not None and data[name] not in harmless:
            raise RequestError(400, f"{name} is not supported by this server: leave it out", param=name, code="unsupported")
    try:
        return kind.model_validate({name: value for name, value in data.items() if value is not None})
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
    param = ".".join(escape_name(str(part)) for part in first["loc"][:4])
    if first["type"] == "missing":
        raise RequestError(400, f"{param} is missing", param=param)
    words = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    words = words if words.startswith("must") else f"is wrong: {words.lower()}"
    raise RequestError(400, f"{param} {words}, got {quote(first['input'])}", param=param)


# --- JSON


def parse_json(data: bytes) -> JSON:
    """The value of a JSON text, read strictly: finite numbers, no key twice in an object, nothing deeper than `DEPTH`.

    Raises:
      RequestError: 400, what is wrong.
    """
    try:
        found: JSON = json.loads(
            data.decode(), parse_constant=_constant, parse_float=_float, parse_int=_int, object_pairs_hook=_object
        )
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the body is not UTF-8 text: byte {error.start} is wrong") from None
    except json.JSONDecodeError as error:
        where = f"(line {error.lineno}, column {error.colno})"
        raise RequestError(400, f"the body is not JSON: {error.msg.lower()} {where}") from None
    except RecursionError:
        raise _too_deep() from None
    _check_tree(found, 0)
    return found


def _too_deep() -> RequestError:
    return RequestError(400, f"the body has more than {DEPTH} lists and objects inside each other")


def _constant(word: str) -> float:
    raise RequestError(400, f"the body holds {word}, which is no number of JSON")


def _float(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise RequestError(400, f"the body holds the number {escape_name(digits)}, which is too large")
    return number


def _int(digits: str) -> int:
    if len(digits) > DIGITS:
        raise RequestError(400, f"the body holds the number {escape_name(digits)}, which is too large")
    return int(digits)


def _object(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found: dict[str, JSON] = {}
    for name, value in pairs:
        if name in found:
            raise RequestError(400, f"the body has {quote(name)} twice in one object")
        found[name] = value
    return found


def _check_tree(value: JSON, depth: int) -> None:
    """Raises RequestError for values nested too deep and for lone surrogates."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            code = f"\\u{ord(value[error.start]):04x}"
            raise RequestError(400, f"the body holds a lone surrogate, {code}") from None
    elif isinstance(value, dict | list):
        if depth == DEPTH:
            raise _too_deep()
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            if isinstance(part, str | dict | list):
                _check_tree(part, depth + 1)
