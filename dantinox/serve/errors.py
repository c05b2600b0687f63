"""HTTP errors except those of body validation: status, message, code and headers.

`Busy` means that `limits.MAX_QUEUED_REQUESTS` requests (`--queue`) wait already;
`AsyncEngine.submit` raises it. Its status is 429 (503 for clients of KoboldAI and Ollama), with the
header `Retry-After`. The other error with status 429 is `operations.rate_limits.RateLimited`, for
the limits of an API key.
"""

import logging
import math
from collections.abc import Mapping
from typing import TypeAlias

from dantinox.config import UserError
from dantinox.config.names import flat_name

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"

HEADERS_OF_CODES = {
    "unavailable": {"retry-after": "5"},
    "invalid_api_key": {"www-authenticate": "Bearer"},
}

log = logging.getLogger("dantinox.serve")


class RequestError(Exception):
    """An error response to a request.

    Attributes:
      status: HTTP status.
      message: one sentence.
      param: the wrong field of the body, if there is one.
      code: an error code for programs, if there is one.
      headers: headers of the response.
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
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


class Busy(RequestError):
    """The queue is full. Another attempt after `retry_after` seconds is likely to succeed."""

    def __init__(self, retry_after: float):
        super().__init__(
            429,
            f"all slots are busy and the queue is full: try again in {retry_after:.0f} s",
            code="rate_limit_exceeded",
            headers={"retry-after": str(max(1, math.ceil(retry_after)))},
        )
        self.retry_after = retry_after


class Unavailable(RequestError):
    """The engine is loading, draining or has failed, as the message states."""

    def __init__(self, message: str):
        super().__init__(503, message, code="unavailable", headers=HEADERS_OF_CODES["unavailable"])


# Name → status, code, message with placeholders.
ERRORS: dict[str, tuple[int, str | None, str]] = {
    "internal": (500, "internal_error", "the server failed: see its log"),
    "overloaded": (503, "unavailable", "the server has too many connections: try again later"),
    "cancelled": (503, "unavailable", "the response is incomplete: the server is stopping"),
    "malformed": (400, "malformed", "the request is not valid HTTP/1.1"),
    "head_too_large": (431, "head_too_large", "the head of the request is too large"),
    "two_lengths": (
        400,
        "malformed",
        "a request must not have both Content-Length and Transfer-Encoding",
    ),
    "encoding": (
        415,
        "unsupported_media_type",
        "the header Content-Encoding is {}, but the body must not be compressed",
    ),
    "media_type": (
        415,
        "unsupported_media_type",
        "the header Content-Type must be application/json, in UTF-8",
    ),
    "body_too_large": (413, "body_too_large", "the body is larger than {:,} bytes"),
    "body_too_slow": (408, "timeout", "the body did not arrive within {:g} seconds"),
    "host": (
        400,
        "host",
        "the host {} is not a name of this server: start it with --allow_host to add a name",
    ),
    "origin": (
        403,
        "origin",
        (
            "web pages of other origins may not use this server: start"
            " it with --cors to allow an origin"
        ),
    ),
    "key": (
        401,
        "invalid_api_key",
        "this server needs an API key in the header Authorization: Bearer KEY, or x-api-key: KEY",
    ),
    "admin": (403, "admin", "this path needs a key with admin: true in the file of --api_keys"),
    "reload": (409, "reload_failed", "the server continues as before: {}"),
    "path": (404, None, "this path does not exist: {}"),
    "method": (405, None, "this path accepts {}, not {}"),
    "model": (404, "model_not_found", "this server has no model {!r}, only {}"),
    "model_of_key": (404, "model_not_found", "the key {} may not use the model {!r}"),
    "lora": (404, "model_not_found", "this server has no adapter {!r}, only {}"),
    "lora_dir": (
        403,
        "lora_dir",
        "clients may not change the adapters of this server: start it with --lora_dir to allow it",
    ),
    "template": (
        400,
        "no_chat_template",
        (
            "this model has no chat template: use /v1/completions, or start the server with"
            " --chat_template plain, bare, chatml or a Jinja file"
        ),
    ),
    "fill_in_middle": (
        400,
        "unsupported",
        (
            "{} needs a model that fills in the middle of a text: the vocabulary of this model has"
            " no fill-in-the-middle tokens"
        ),
    ),
    # Clients recognize this error by its first words.
    "context": (
        400,
        "context_length_exceeded",
        "this model's maximum context length is {} tokens, and the prompt has {}: shorten it",
    ),
}


def http_error(
    name: str, *values: object, param: str | None = None, headers: Mapping[str, str] | None = None
) -> RequestError:
    """Returns the error `name` of `ERRORS`, with `values` in its message."""
    status, code, sentence = ERRORS[name]
    if headers is None and code is not None:
        headers = HEADERS_OF_CODES.get(code)
    return RequestError(status, sentence.format(*values), param=param, code=code, headers=headers)


def to_request_error(error: Exception) -> RequestError:
    """Converts an exception to an error response. An unexpected exception is logged, and the status
    is 500.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, UserError):
        return RequestError(400, str(error), param=flat_name(error.key) if error.key else None)
    log.error("a request failed", exc_info=error)
    return http_error("internal")


ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_object(error: RequestError) -> JSON:
    """Returns an error in OpenAI's format, which is the default of the protocols."""
    kind = ERROR_TYPES.get(
        error.status, "invalid_request_error" if error.status < 500 else "server_error"
    )
    return {
        "error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    }
