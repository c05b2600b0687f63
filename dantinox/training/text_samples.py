"""Text samples during training."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from dantinox.config import Config, ModelConfig, overlay
from dantinox.distributed import max_tensor_parallel, tensor_mesh, weight_shardings
from dantinox.files import UserError
from dantinox.generation import LoadedModel
from dantinox.generation.token_settings import sampling_params
from dantinox.model import Transformer
from dantinox.model.frozen_weights import Int8Table
from dantinox.model.parameters import abstract_model, unstack_layers
from dantinox.text import Tokenizer

Sampler = Callable[[Transformer], str]


def make_sampler(config: Config, tokenizer: Tokenizer) -> Sampler | None:
    """Returns a function that generates a text sample with a model; None without
    `training.sample_every`.

    Without `training.sample_prompt` a sample starts from a line break, or from the BOS token if the
    vocabulary has no line break. The prompt and the settings are checked here, before the first
    step.

    Raises:
      UserError: the prompt cannot be encoded or fills the context, or a token named in `generation`
        is not in the vocabulary.
    """
    # Training with rewards shows one of its answers instead, see `Rollouts.example`.
    if config.training.sample_every is None or config.training.objective == "grpo":
        return None
    prompt, tokens = _prompt(config, tokenizer)
    context = config.model.max_context
    if tokens >= context:
        raise UserError(
            f"training.sample_prompt must have fewer tokens than model.max_context = {context}, got"
            f" {tokens}"
        )
    settings: dict[str, Any] = {"seed": config.training.seed, "n": 1}
    settings["max_new_tokens"] = min(config.generation.max_new_tokens, context - tokens)
    settings["kv_budget"] = None  # samples should not depend on cache compression
    # Drafts do not change a text, and a draft model needs the run directory of the model.
    if config.generation.speculation != "off":
        settings |= {"speculation": "off", "draft_run": None}
    if config.generation.strategy == "entropy" and config.router.router_preset == "calibrated":
        settings["router_preset"] = "guide"  # a model in training has no calibration
    # Invalid settings fail here, not at the first sample.
    sampling_params(tokenizer, [overlay(config, settings)])
    settings["tensor_parallel"] = max_tensor_parallel(
        config.architecture(tokenizer.vocab_size), jax.local_device_count()
    )
    return lambda model: (
        prompt + LoadedModel(config, model, tokenizer).generate(prompt, **settings).text
    )


def build_sampling_model(model: ModelConfig, weights: Mapping[str, Any]) -> Transformer:
    """Builds a model for sampling, with unstacked layers.

    Args:
      model: the architecture in training.
      weights: path → array of all weights as in training, where layers may be stacked and
        adapters are separate weights. Weights in host memory (NumPy) are sharded over as many local
        devices as possible.
    """
    unstacked = replace(model, scan_layers=False)
    build, shapes = abstract_model(unstacked)
    parameters = unstack_layers(weights)
    if any(isinstance(array, np.ndarray) for array in parameters.values()):
        mesh = tensor_mesh(unstacked, max_tensor_parallel(unstacked, jax.local_device_count()))
        parameters = jax.device_put(parameters, weight_shardings(mesh, shapes))
    built = build(parameters)
    if isinstance(built.embed, Int8Table):  # generation expects a table of floats
        built.embed = nnx.Param(built.embed.dequantize())
    return built


def _prompt(config: Config, tokenizer: Tokenizer) -> tuple[str, int]:
    """Returns the prompt and its number of tokens, including the tokens before every text."""
    prompt = config.training.sample_prompt
    try:
        return prompt or "\n", len(tokenizer.ids_before_text) + len(
            tokenizer.encode(prompt or "\n")
        )
    except UserError as error:
        if prompt:
            raise UserError(f"training.sample_prompt: {error}") from None
        if tokenizer.bos_id is None:
            reason = "the vocabulary has neither a line break nor a BOS token"
            raise UserError(f"training.sample_prompt must be set: {reason}") from None
        return "", 1  # the BOS token
