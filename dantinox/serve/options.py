"""`Options`: the options of `dantinox serve` other than the settings of the engine."""

from dataclasses import dataclass, field
from pathlib import Path

from dantinox.serve.limits import Limits
from dantinox.text import ChatTemplate

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True)
class Options:
    """Options of a server.

    Attributes:
      template: renders messages as a prompt; None for a model without a chat template.
      key: API key that every request needs; None accepts every client.
      hosts: host names that requests may address, in lower case without a port; `*`: any, `ip`: any IP address.
      origins: origins whose web pages may use this server, such as `https://a.example`; `*`: any.
      lite: the file or folder of Kobold Lite that the server provides.
      lora_dir: the directory from which clients may load adapters; None: they may not.
      limits: limits of requests.
    """

    template: ChatTemplate | None = None
    key: str | None = None
    hosts: frozenset[str] = LOCAL_HOSTS
    origins: tuple[str, ...] = ()
    lite: Path | None = None
    lora_dir: Path | None = None
    limits: Limits = field(default_factory=Limits)
