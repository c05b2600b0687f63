"""HTTP errors (bodies that fail validation excepted): status, message, code and headers, the full queue included.

A full queue is `Busy`: 429 with `Retry-After` (KoboldAI's clients get 503), when `limits.QUEUE` requests (`--queue`) wait.
"""

import logging
import math
from collections.abc import Mapping
from typing import TypeAlias

from dantinox.config import UserError
from dantinox.config.names import flat_name

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"

log = logging.getLogger("dantinox.serve")


class RequestError(Exception):
    """A request that is refused.

    Attributes:
      status: of HTTP.
      message: one sentence.
      param: the field of the body that is wrong.
      code: a word for programs.
      headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})


class Busy(RequestError):
    """The queue is full; after `retry_after` seconds another attempt is likely to succeed."""

    def __init__(self, retry_after: float):
        super().__init__(
            429,
            f"all slots and all places of the queue are taken: try again in {retry_after:.0f} s",
            code="rate_limit_exceeded",
            headers={"retry-after": str(max(1, math.ceil(retry_after)))},
        )
        self.retry_after = retry_after


class Unavailable(RequestError):
    """The engine is loading, draining or has failed; the message says which."""

    def __init__(self, message: str):
        super().__init__(503, message, code="unavailable", headers={"retry-after": "5"})


# Name → status, code, sentence with what varies.
SENTENCES: dict[str, tuple[int, str | None, str]] = {
    "internal": (500, "internal_error", "the server failed; its log says how"),
    "overloaded": (503, "unavailable", "the server has too many connections: try again later"),
    "cancelled": (503, "unavailable", "the answer was cut short: the server is stopping"),
    "malformed": (400, "malformed", "the request is not valid HTTP/1.1"),
    "head_too_large": (431, "head_too_large", "the head of the request is larger than this server takes"),
    "two_lengths": (400, "malformed", "a request has either Content-Length or Transfer-Encoding, not both"),
    "encoding": (415, "unsupported_media_type", "the header Content-Encoding is {}: send the body without compression"),
    "media_type": (415, "unsupported_media_type", "the header Content-Type must be application/json, in UTF-8"),
    "body_too_large": (413, "body_too_large", "the body is larger than {:,} bytes"),
    "body_too_slow": (408, "timeout", "the body did not come within {:g} seconds"),
    "host": (400, "host", "the host {} is none of this server's names: start it with --allow_host"),
    "origin": (403, "origin", "pages of other servers may not ask this one: start it with --cors"),
    "key": (401, "invalid_api_key", "this server wants its API key, as the header Authorization: Bearer KEY"),
    "path": (404, None, "there is nothing at this path: {}"),
    "method": (405, None, "this path takes {}, not {}"),
    "model": (404, "model_not_found", "there is no model {!r} here: this server has {!r}"),
    "template": (
        400,
        "no_chat_template",
        "this model has no chat template: use /v1/completions, or start the server with --chat_template plain, chatml or a "
        "file of Jinja",
    ),
    # Clients recognize this one by its first words.
    "context": (
        400,
        "context_length_exceeded",
        "this model's maximum context length is {} tokens, and the prompt has {}: shorten it",
    ),
}


def refuse(name: str, *values: object, param: str | None = None, headers: Mapping[str, str] | None = None) -> RequestError:
    """The error of this name."""
    status, code, sentence = SENTENCES[name]
    own = {"unavailable": {"retry-after": "5"}, "invalid_api_key": {"www-authenticate": "Bearer"}}.get(code or "", {})
    return RequestError(status, sentence.format(*values), param=param, code=code, headers=headers or own)


def to_request_error(error: Exception) -> RequestError:
    """What an exception means to a client; one that nobody expected is logged and a 500."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, UserError):
        return RequestError(400, str(error), param=flat_name(error.key) if error.key else None)
    log.error("a request failed", exc_info=error)
    return refuse("internal")


TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_object(error: RequestError) -> JSON:
    """An error in OpenAI's form, which every path has whose protocol has no form of its own."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
