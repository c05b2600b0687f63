"""Engines with a small model, whose programs have few sampling steps and are compiled once for all
engines of a process.
"""

import time
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

from dantinox.config.engine_options import EngineOptions
from dantinox.generation import LoadedModel
from dantinox.generation.request import GenerationRequest
from dantinox.serve.async_engine import AsyncEngine
from tests.generation import builder

CONTEXT, SLOTS = 192, 3
DRAWN = {"temperature": 1.2, "top_p": 0.95, "seed": 3}
_programs: dict[Any, Any] = {}


def small_model() -> LoadedModel:
    return builder.byte_model(CONTEXT, windows=(None,))


def start(engine: AsyncEngine) -> AsyncEngine:
    """Starts an engine and waits until it is ready."""
    with builder.few_steps():
        engine.start()
        while engine.status().state == "loading":
            time.sleep(0.002)
    return engine


def start_engine(queue: int = 4, **options: Any) -> AsyncEngine:
    """Returns an engine with the small model, which is ready."""
    engine = AsyncEngine(small_model(), EngineOptions(slots=SLOTS, queue=queue, **options))
    engine._batch._programs |= _programs
    _programs.update(start(engine)._batch._programs)
    return engine


def make_request(
    engine: AsyncEngine,
    prompt: str,
    logprobs: int | None = None,
    echo: bool = False,
    **settings: Any,
) -> GenerationRequest:
    config = engine.settings({"max_new_tokens": 16} | settings)
    return GenerationRequest(tuple(engine.run.prompt_ids(prompt)), config, logprobs, echo)


async def text_of(stream: AsyncIterator[Any]) -> list[str]:
    """Returns the text of each sample."""
    texts: dict[int, str] = {}
    async for delta in stream:
        texts[delta.sample] = texts.get(delta.sample, "") + delta.text
    return [texts[sample] for sample in sorted(texts)]


async def generate(engine: AsyncEngine, prompt: str, **settings: Any) -> list[str]:
    return await text_of(engine.submit(make_request(engine, prompt, **settings)))


@cache
def story(text: str) -> str:
    """Returns the text that the reference draws after a prompt with the settings of `DRAWN`."""
    return reference(text, **DRAWN)


def reference_tokens(
    prompt: str, max_new_tokens: int = 16, ignore_eos: bool = False, **settings: Any
) -> list[int]:
    """Returns the tokens that the reference draws with the small model."""
    run = small_model()
    ends = () if ignore_eos else run.tokenizer.stop_ids
    return builder.slowly(
        run.model, run.prompt_ids(prompt), max_new_tokens, eos_ids=ends, **settings
    )


def reference(prompt: str, **settings: Any) -> str:
    """Returns the text that the reference draws with the small model."""
    tokenizer = small_model().tokenizer
    return tokenizer.decode(
        [token for token in reference_tokens(prompt, **settings) if token not in tokenizer.stop_ids]
    )
