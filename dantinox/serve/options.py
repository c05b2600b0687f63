"""What a server is told besides its engine's settings."""

from dataclasses import dataclass, field
from pathlib import Path

from dantinox.text import ChatTemplate

LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True)
class Limits:
    """What a request may take.

    Attributes:
      body, head: bytes of it.
      seconds: to send each of them.
      stalled: seconds for which a reader of an answer may take nothing of it.
    """

    body: int = 1 << 20
    head: int = 1 << 14
    seconds: float = 10.0
    stalled: float = 60.0


@dataclass(frozen=True)
class Options:
    """How a server behaves towards its clients.

    Attributes:
      template: that makes a prompt of messages, None for a model that has none.
      key: that every request has to bring, None where anybody may ask.
      hosts: names under which it may be asked, small letters, without the port; `*`: any, `ip`: any address in numbers.
      origins: of web pages of other servers that may ask it, as `https://a.example`; `*`: any.
      lite: a folder or a file of Kobold Lite to be served.
    """

    template: ChatTemplate | None = None
    key: str | None = None
    hosts: frozenset[str] = LOCAL
    origins: tuple[str, ...] = ()
    lite: Path | None = None
    limits: Limits = field(default_factory=Limits)
