"""`RequestRecord`: the identity, key, generations and times of one HTTP request, for logs, metrics
and traces.

The middleware creates the record. Code that runs in the task of the request reads it with
`current_record()`.
"""

import contextlib
import re
import secrets
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from dantinox.generation.request import GenerationRequest, RequestStats
from dantinox.serve.operations.rate_limits import ApiKey, KeyUsage

REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# The status in logs of a request whose client disconnected before the response; nginx uses the
# same.
CLIENT_CLOSED = 499


@dataclass
class Generation:
    """One generation request of an HTTP request.

    Attributes:
      request: the request to the engine.
      stats: its statistics, which the engine updates.
      submitted: time of its arrival at the engine, in nanoseconds since the epoch.
      finish_reasons: finish reason of each complete sample, by sample number.
    """

    request: GenerationRequest
    stats: RequestStats
    submitted: int
    finish_reasons: dict[int, str] = field(default_factory=dict)


@dataclass
class RequestRecord:
    """One HTTP request.

    Attributes:
      id: the client's `x-request-id` if it is valid, otherwise a new one.
      method, path: of the request; the path has no query string.
      route: the path if the server has it, otherwise None.
      trace_headers: `traceparent` and `tracestate` of the client.
      key, usage: the client's API key and its usage; None without keys.
      model: the name of the model that generates.
      operation: `chat` or `text_completion`.
      generations: the generation requests that the engine has accepted.
      processed_tokens: prompt tokens that are processed without a generation request.
      status: HTTP status; `CLIENT_CLOSED` until the response begins.
      started, seconds: time of arrival in nanoseconds since the epoch, and seconds until the end of
        the response.
    """

    id: str
    method: str = ""
    path: str = ""
    route: str | None = None
    trace_headers: dict[str, str] = field(default_factory=dict)
    key: ApiKey | None = None
    usage: KeyUsage | None = None
    model: str | None = None
    operation: str = "text_completion"
    generations: list[Generation] = field(default_factory=list)
    processed_tokens: int = 0
    status: int = CLIENT_CLOSED
    started: int = field(default_factory=time.time_ns)
    seconds: float = 0.0

    @contextlib.contextmanager
    def tokens(self, most: int) -> Iterator[None]:
        """Reserves `most` tokens of the key's limit in the block. After it, the tokens that the
        block has used count: those of new `generations`, and those added to `processed_tokens`.

        Raises:
          RateLimited, RequestError: as `KeyUsage.reserve_tokens`.
        """
        if self.usage is None:
            yield
            return
        reserved = self.usage.reserve_tokens(most)
        prompt_before = self.prompt_tokens
        new_before = self.new_tokens
        try:
            yield
        finally:
            self.usage.settle_tokens(
                reserved, self.prompt_tokens - prompt_before, self.new_tokens - new_before
            )

    @property
    def prompt_tokens(self) -> int:
        return self.processed_tokens + sum(
            generation.stats.prompt_tokens for generation in self.generations
        )

    @property
    def new_tokens(self) -> int:
        return sum(generation.stats.new_tokens for generation in self.generations)


_current: ContextVar[RequestRecord | None] = ContextVar("request", default=None)


def current_record() -> RequestRecord:
    """Returns the record of the request that this task answers; outside of a request, a new
    record.
    """
    return _current.get() or RequestRecord("-")


def new_record(method: str, path: str, headers: dict[str, str]) -> RequestRecord:
    """Returns the record of a new request, which `current_record` returns in this task from now on.

    Args:
      headers: the headers of the request, with names in lower case.
    """
    given = headers.get("x-request-id", "")
    trace_headers: dict[str, str] = {
        name: headers[name] for name in ("traceparent", "tracestate") if name in headers
    }
    request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
    record = RequestRecord(request_id, method, path, trace_headers=trace_headers)
    _current.set(record)
    return record
