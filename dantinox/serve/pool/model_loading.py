"""`open_model`: loads a model of a server and creates its engine."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dantinox.config import overlay
from dantinox.generation.api.loaded_model import load_opened
from dantinox.run import find_chat_template, load_run_config, open_run
from dantinox.serve.async_engine import AsyncEngine
from dantinox.serve.operations.reload import ReloadWeights
from dantinox.serve.pool.model_specs import ModelSpec
from dantinox.serve.pool.weight_reload import weight_reloader
from dantinox.text import ChatTemplate
from dantinox.text.reply_formats import find_tool_format, reply_format

log = logging.getLogger("dantinox.serve")


class OpenModel(NamedTuple):
    """A loaded model: its engine, its chat template, and the function that loads its weights again
    if they have changed.
    """

    engine: AsyncEngine
    template: ChatTemplate | None
    reload_weights: ReloadWeights


def open_model(
    spec: ModelSpec, loras: Mapping[str, Path] | None = None, memory: int | None = None
) -> OpenModel:
    """Loads a model and creates its engine, which is not started and has allocated no caches.

    Args:
      loras: adapters that replace those of the spec.
      memory: as in `EngineOptions`.

    Raises:
      UserError: a file is missing or damaged, a setting is invalid, or the memory is too small for
        one slot.
    """
    directory = open_run(spec.run_dir, check=False)
    loras = spec.loras if loras is None else loras
    base = load_run_config(directory)
    config = overlay(base, spec.settings, "command line")
    run = load_opened(directory, base, config.generation.tensor_parallel, loras)
    template = (
        ChatTemplate.from_name(spec.chat_template, run.tokenizer)
        if spec.chat_template is not None
        else None
    )
    if template is None and (path := find_chat_template(directory)) is not None:
        template = ChatTemplate.load(path, run.tokenizer)
    form = reply_format(template, run.tokenizer, spec.tool_format)  # raises for an unknown name
    if (
        spec.tool_format == "auto"
        and template is not None
        and find_tool_format(template.source) is None
    ):
        log.info(
            "%s: the chat template shows no known notation of tool calls, so that of %s is used"
            " (set --tool_format)",
            spec.name,
            form.name,
        )
    options = spec.options if memory is None else replace(spec.options, memory=memory)
    engine = AsyncEngine(run, options, name=spec.name, overrides=spec.settings, lora_paths=loras)
    return OpenModel(engine, template, weight_reloader(engine, spec.run_dir))
