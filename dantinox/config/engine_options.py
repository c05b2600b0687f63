"""`EngineOptions`: the options of a server's engine, from the command line to the batch."""

from dataclasses import dataclass
from pathlib import Path

# The programs that can be compiled before a request needs them.
BACKGROUND = ("steps", "echo", "embeddings", "strategies")


@dataclass(frozen=True)
class EngineOptions:
    """The sizes of an engine and what it keeps.

    Attributes:
      slots: the requests that are decoded together; None: 8, or fewer if their caches would take
        over half of the free memory that the compiled programs leave.
      context: the most tokens of a prompt plus its continuation; None: the maximum of the model.
      queue: the requests that may wait for a slot.
      background: programs of `BACKGROUND` that are compiled after the engine has become ready:
        those for all sampling steps (`steps`), prompt log-probabilities (`echo`), embeddings, and
        the strategy that is not the server's (`strategies`).
      max_loras: the most adapters that can be loaded at the same time; None: those that the model
        has, without changes.
      max_lora_rank: the largest rank of an adapter; None: that of the adapters of the model, and at
        least 16 with `max_loras`.
      prefill_rows: the most chunks of prompts that one pass prefills, in [1, 16]; None: 4 on an
        accelerator and 1 on a CPU. Models with experts, adapters and compressed caches prefill one
        chunk per pass.
      prefix_cache: the bytes of the prefix cache; 0: no prefix cache; None: as many as four times
        the slots, but at most an eighth of the memory that the slots and the programs leave. A
        compressed cache has no prefix cache.
      cache_dir: the folder from which the warm-up restores the prefix cache, and to which it is
        saved; None: it is not saved.
      memory: bytes that stand for the free memory in the defaults of `slots` and `prefix_cache`;
        None: the free memory.
    """

    slots: int | None = None
    context: int | None = None
    queue: int = 64
    background: tuple[str, ...] = ()
    max_loras: int | None = None
    max_lora_rank: int | None = None
    prefill_rows: int | None = None
    prefix_cache: int | None = None
    cache_dir: Path | None = None
    memory: int | None = None
