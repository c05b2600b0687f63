"""`Options`: the options of `dantinox serve` other than the settings of the engine."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dantinox.serve.operations.api_keys import ApiKeys, single_key
from dantinox.serve.operations.limits import Limits
from dantinox.serve.operations.reload import Reloader
from dantinox.serve.operations.request_record import RequestRecord
from dantinox.text import ChatTemplate

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True)
class Options:
    """Options of a server.

    Attributes:
      template: renders messages as a prompt; None for a model without a chat template.
      tool_format: notation of tool calls, a name of `TOOL_FORMATS`; `auto`: that of the template.
      key: the only API key, as an alternative to `keys`.
      keys: the API keys, one of which every request needs; without keys and `key` the server
        accepts every client.
      hosts: host names that requests may address, in lower case without a port; `*`: any, `ip`: any
        IP address.
      origins: origins whose web pages may use this server, such as `https://a.example`; `*`: any.
      pooling: how embeddings combine the hidden states of a text: `mean` or `last`.
      lite: the file or folder of Kobold Lite that the server provides.
      stored_responses: how many responses of `/v1/responses` are kept in memory for
        `previous_response_id`.
      lora_dir: the directory from which clients may load adapters; None: they may not.
      limits: limits of requests.
      aliases: further names of models → the names that they stand for.
      reloader: rereads the keys and the weights.
      responses: the responses of `/v1/responses` that are kept, by id, the oldest first.
      export_trace: called with each complete request; returns the id of its trace.
    """

    template: ChatTemplate | None = None
    tool_format: str = "auto"
    key: str | None = None
    hosts: frozenset[str] = LOCAL_HOSTS
    origins: tuple[str, ...] = ()
    lite: Path | None = None
    stored_responses: int = 0
    pooling: str = "mean"
    lora_dir: Path | None = None
    limits: Limits = field(default_factory=Limits)
    keys: ApiKeys = field(default_factory=ApiKeys)
    aliases: Mapping[str, str] = field(default_factory=dict)
    reloader: Reloader = field(default_factory=Reloader)
    responses: OrderedDict[str, Any] = field(default_factory=OrderedDict)
    export_trace: Callable[[RequestRecord], str | None] = lambda record: None

    def __post_init__(self) -> None:
        if self.key is not None:
            self.keys.replace([single_key(self.key)])
