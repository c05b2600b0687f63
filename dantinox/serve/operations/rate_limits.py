"""Rate limits of one API key: exact token buckets, the number of running requests, and the
`x-ratelimit-*` headers.

A token bucket of `per_minute` tokens starts full and gains `per_minute` tokens a minute,
continuously, up to `per_minute`. See Tanenbaum, *Computer Networks*, section "Traffic shaping".
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dantinox.serve.errors import RequestError

NANOSECONDS = 1_000_000_000
MINUTE = 60 * NANOSECONDS


@dataclass(frozen=True)
class ApiKey:
    """A key of one client.

    Attributes:
      name: its name in logs, metrics and error messages.
      digest: SHA-256 of the key.
      requests_per_minute, tokens_per_minute, concurrent_requests: limits; None: no limit.
      admin: whether the key may use `/admin` paths.
      models: names of the models that the key may use; None: all.
    """

    name: str
    digest: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    admin: bool = False
    models: tuple[str, ...] | None = None


class TokenBucket:
    """A token bucket in integer arithmetic. All times are nanoseconds of one monotonic clock.

    The level is counted in units of 1 / `MINUTE` token, so that each nanosecond adds exactly
    `per_minute` units.
    """

    def __init__(self, per_minute: int, now: int):
        self.per_minute = per_minute
        self._level = per_minute * MINUTE
        self._updated = now

    def _refill(self, now: int) -> None:
        gained = max(0, now - self._updated) * self.per_minute
        self._level = min(self.per_minute * MINUTE, self._level + gained)
        self._updated = max(now, self._updated)

    def take(self, tokens: int, now: int) -> int:
        """Takes `tokens` if the bucket holds as many. Returns 0, or the nanoseconds after which it
        will hold them.
        """
        self._refill(now)
        missing = tokens * MINUTE - self._level
        if missing > 0:
            return -(-missing // self.per_minute)
        self._level -= tokens * MINUTE
        return 0

    def put_back(self, tokens: int, now: int) -> None:
        """Returns tokens that were taken and not used; a negative number takes tokens, below zero
        if necessary.
        """
        self._refill(now)
        self._level = min(self.per_minute * MINUTE, self._level + tokens * MINUTE)

    def resize(self, per_minute: int, now: int) -> None:
        """Changes the limit; the tokens that are in use stay in use."""
        self._refill(now)
        self._level += (per_minute - self.per_minute) * MINUTE
        self.per_minute = per_minute

    def remaining(self, now: int) -> int:
        """Returns the number of whole tokens in the bucket."""
        self._refill(now)
        return max(0, self._level // MINUTE)

    def nanoseconds_until_full(self, now: int) -> int:
        """Returns the time until the bucket is full if nothing is taken."""
        self._refill(now)
        missing = self.per_minute * MINUTE - self._level
        return -(-missing // self.per_minute)


class RateLimited(RequestError):
    """A limit of the key is exceeded. Another attempt after `nanoseconds` is allowed if no other
    request intervenes.
    """

    def __init__(self, message: str, nanoseconds: int):
        seconds = max(1, math.ceil(nanoseconds / NANOSECONDS))
        headers = {
            "retry-after": str(seconds),
            "retry-after-ms": str(max(1, math.ceil(nanoseconds / 1_000_000))),
        }
        super().__init__(
            429, f"{message}: try again in {seconds} s", code="rate_limit_exceeded", headers=headers
        )


class KeyUsage:
    """The state of one key's limits, and its counters since the start of the server.

    Attributes:
      running: number of requests that are being answered.
      counts: `requests`, `prompt_tokens`, `new_tokens`, and the requests refused by each limit:
        `refused_requests`, `refused_tokens`, `refused_concurrent`.
    """

    def __init__(self, key: ApiKey, clock: Callable[[], int]):
        """Starts with full buckets; `clock` returns nanoseconds and never goes back."""
        self._clock = clock
        self._key = key
        self.running = 0
        self.counts = Counter[str]()
        self._buckets: dict[str, TokenBucket] = {}
        self.change_limits(key)

    def change_limits(self, key: ApiKey) -> None:
        """Applies new limits. Requests and tokens of the last minute still count."""
        self._key = key
        now = self._clock()
        for kind, rate in (
            ("requests", key.requests_per_minute),
            ("tokens", key.tokens_per_minute),
        ):
            if rate is None:
                self._buckets.pop(kind, None)
            elif kind in self._buckets:
                self._buckets[kind].resize(rate, now)
            else:
                self._buckets[kind] = TokenBucket(rate, now)

    def begin(self) -> None:
        """Counts the beginning of a request; call `end` once after it.

        Raises:
          RateLimited: too many requests are running, or too many have begun in the last minute.
            Such a request is not counted.
        """
        name = self._key.name
        most = self._key.concurrent_requests
        if most is not None and self.running >= most:
            self.counts["refused_concurrent"] += 1
            raise RateLimited(
                f"the key {name} already has {self.running} running requests, and its limit is"
                f" {most}",
                0,
            )
        bucket = self._buckets.get("requests")
        if bucket is not None and (wait := bucket.take(1, self._clock())):
            self.counts["refused_requests"] += 1
            raise RateLimited(
                f"the key {name} has used its {bucket.per_minute} requests per minute", wait
            )
        self.running += 1
        self.counts["requests"] += 1

    def end(self) -> None:
        """Counts the end of a request."""
        self.running -= 1

    def reserve_tokens(self, tokens: int) -> int:
        """Takes the largest number of tokens that a request can use, before its work begins.

        Returns:
          The number of reserved tokens, for `settle_tokens`; 0 without a limit.

        Raises:
          RateLimited: the key has fewer tokens now.
          RequestError: 400, the request can use more tokens than the limit of a whole minute.
        """
        bucket = self._buckets.get("tokens")
        if bucket is None:
            return 0
        name = self._key.name
        rate = bucket.per_minute
        if tokens > rate:
            self.counts["refused_tokens"] += 1
            message = (
                f"prompts and answers can have {tokens:,} tokens, but the key {name} has {rate:,}"
                " tokens per minute"
            )
            raise RequestError(
                400,
                f"{message}: shorten the prompt or lower max_tokens",
                param="max_tokens",
                code="too_many_tokens",
            )
        if wait := bucket.take(tokens, self._clock()):
            self.counts["refused_tokens"] += 1
            raise RateLimited(f"the key {name} has used its {rate:,} tokens per minute", wait)
        return tokens

    def settle_tokens(self, reserved: int, prompt: int, new: int) -> None:
        """Replaces a reservation by the tokens that the request has used."""
        self.counts["prompt_tokens"] += prompt
        self.counts["new_tokens"] += new
        if "tokens" in self._buckets:
            self._buckets["tokens"].put_back(reserved - prompt - new, self._clock())

    def headers(self) -> dict[str, str]:
        """Returns OpenAI's headers of a response: each limit, what remains of it, and the time
        until all of it remains.
        """
        found = dict[str, str]()
        now = self._clock()
        for kind, bucket in self._buckets.items():
            found[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
            found[f"x-ratelimit-remaining-{kind}"] = str(bucket.remaining(now))
            found[f"x-ratelimit-reset-{kind}"] = format_duration(bucket.nanoseconds_until_full(now))
        return found


def format_duration(nanoseconds: int) -> str:
    """Formats a duration as OpenAI does: `20ms`, `8.64s`, `1m0s`. It is rounded up to
    milliseconds.
    """
    milliseconds = -(-nanoseconds // 1_000_000)
    minutes, rest = divmod(milliseconds, 60_000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    seconds = f"{rest / 1000:g}s"
    return f"{minutes}m{seconds}" if minutes else seconds
