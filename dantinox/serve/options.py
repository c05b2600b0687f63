"""`Options`: what `dantinox serve` is started with besides the settings of the engine."""

from dataclasses import dataclass, field
from pathlib import Path

from dantinox.serve.limits import Limits
from dantinox.text import ChatTemplate

LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True)
class Options:
    """How a server treats its clients.

    Attributes:
      template: renders messages to a prompt, None for a model without one.
      key: required of every request, None where none is.
      hosts: names under which the server may be addressed, in lower case, without port; `*`: any, `ip`: any numeric address.
      origins: of web pages of other servers that may use this one, as `https://a.example`; `*`: any.
      lite: a directory or a file of Kobold Lite to be served.
    """

    template: ChatTemplate | None = None
    key: str | None = None
    hosts: frozenset[str] = LOCAL
    origins: tuple[str, ...] = ()
    lite: Path | None = None
    limits: Limits = field(default_factory=Limits)
