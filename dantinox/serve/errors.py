"""Every error that a client can get besides mistakes in a body: its status, sentence, code and headers.

A full queue is `Busy`: 429 with `Retry-After` (KoboldAI's clients get 503), when `limits.QUEUE` requests (`--queue`) wait.
"""

import logging
import math
from collections.abc import Mapping
from typing import TypeAlias

from dantinox.config import UserError
from dantinox.config.files import flat_name
from dantinox.files import on_one_line

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


class Unavailable(RequestError):
    """The engine is loading, draining or has failed; the message says which."""

    def __init__(self, message: str):
        super().__init__(503, message, code="unavailable", headers={"retry-after": "5"})


def overloaded() -> RequestError:
    return Unavailable("the server has too many connections: try again later")


def cancelled() -> RequestError:
    return Unavailable("the answer was cut short: the server is stopping")


def internal() -> RequestError:
    return RequestError(500, "the server failed; its log says how", code="internal_error")


def malformed(status: int) -> RequestError:
    if status == 431:
        return head_too_large()
    return RequestError(status, "the request is not valid HTTP/1.1", code="malformed")


def head_too_large() -> RequestError:
    return RequestError(431, "the head of the request is larger than this server takes", code="head_too_large")


def two_lengths() -> RequestError:
    return RequestError(400, "a request has either Content-Length or Transfer-Encoding, not both", code="malformed")


def encoded_body(encoding: str) -> RequestError:
    message = f"the header Content-Encoding is {on_one_line(encoding)}: send the body without compression"
    return RequestError(415, message, code="unsupported_media_type")


def body_too_large(limit: int) -> RequestError:
    return RequestError(413, f"the body is larger than {limit:,} bytes", code="body_too_large")


def body_too_slow(seconds: float) -> RequestError:
    return RequestError(408, f"the body did not come within {seconds:g} seconds", code="timeout")


def wrong_host(host: str) -> RequestError:
    message = f"the host {on_one_line(host)} is none of this server's names: start it with --allow_host"
    return RequestError(400, message, code="host")


def foreign_origin() -> RequestError:
    return RequestError(403, "pages of other servers may not ask this one: start it with --cors", code="origin")


def wrong_key() -> RequestError:
    message = "this server wants its API key, as the header Authorization: Bearer KEY"
    return RequestError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def no_route(detail: str, status: int = 404) -> RequestError:
    return RequestError(status, f"there is nothing at this path: {detail.lower()}")


def wrong_method(method: str, allowed: str) -> RequestError:
    return RequestError(405, f"this path takes {allowed}, not {method}", headers={"allow": allowed})


def wrong_model(name: str, own: str) -> RequestError:
    message = f"there is no model {name[:60]!r} here: this server has {own!r}"
    return RequestError(404, message, param="model", code="model_not_found")


def no_chat_template() -> RequestError:
    message = (
        "this model has no chat template: use /v1/completions, or start the server with --chat_template plain, chatml "
        "or a file of Jinja"
    )
    return RequestError(400, message, param="messages", code="no_chat_template")


def context_exceeded(context: int, length: int, param: str) -> RequestError:
    # Clients recognize this error by its first words.
    message = f"this model's maximum context length is {context} tokens, and the prompt has {length}: shorten it"
    return RequestError(400, message, param=param, code="context_length_exceeded")


def to_request_error(error: Exception) -> RequestError:
    """What an exception means to a client; one that nobody expected is logged and a 500."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, UserError):
        return RequestError(400, str(error), param=flat_name(error.key) if error.key else None)
    log.error("a request failed", exc_info=error)
    return internal()


TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_object(error: RequestError) -> JSON:
    """An error in OpenAI's form, which every path has whose protocol has no form of its own."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
