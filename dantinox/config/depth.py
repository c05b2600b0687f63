"""`model.depth`: one number that sets the size of a model and the length of its training, after
nanochat.

`Config` replaces the setting by the values of the functions here. Settings that are given keep
their values.
"""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from dantinox.config.architecture import feed_forward_width, resolve_architecture
from dantinox.config.attention_settings import AttentionSection
from dantinox.config.base import Section
from dantinox.config.model_config import ModelConfig
from dantinox.config.model_conflicts import model_conflicts
from dantinox.config.model_settings import ModelSection
from dantinox.config.model_size import block_parameters
from dantinox.config.moe_settings import MoESection

WIDTH_PER_LAYER = 64
WIDE = 256  # the width from which heads have size 64 instead of 32
# About the optimum of Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models".
TOKENS_PER_PARAMETER = 20.0
MICROBATCH_TOKENS = 32768  # tokens of an accumulation step, at most
OPTIMIZER = "muon"
# Optimizer → peak `lr` at width 768. It is proportional to width^-0.5, as in nanochat. With Muon,
# which applies it to embeddings and norms only, it is 0.004 at width 128. Without Muon it is that
# of GPT-3.
RATES_AT_768 = {"muon": 0.00163, "adamw": 0.0006}


def model_of_depth(
    model: ModelSection, moe: MoESection, attention: AttentionSection
) -> dict[str, Any]:
    """Returns settings of the section `model` for `model.depth` layers d: name → value.

    The width is `64 d`. Heads have size 32 below width 256, else 64. The feed-forward width has its
    usual default, and queries and keys are normalized. Together with `training_of_depth`, with 20
    tokens per parameter and windows of 256 tokens:

    | depth | dim | heads | hidden_dim | weights of layers | tokens | batch_size | steps | lr |
    |---|---|---|---|---|---|---|---|---|
    | 2 | 128 | 4 | 352 | 0.4 M | 8 M | 32 | 980 | 0.00399 |
    | 4 | 256 | 4 | 704 | 3.2 M | 64 M | 64 | 3920 | 0.00282 |
    | 8 | 512 | 8 | 1376 | 25 M | 506 M | 256 | 7720 | 0.002 |
    | 12 | 768 | 12 | 2048 | 85 M | 1699 M | 512 | 12960 | 0.00163 |
    | 20 | 1280 | 20 | 3424 | 394 M | 7881 M | 1024 | 30063 | 0.00126 |

    Args:
      model: `depth` is set. A width that is given replaces `64 d`, and the other values follow from
        it.
      moe, attention: the sections of these names. No feed-forward width is returned with
        `moe.expansion`, and no normalization of queries and keys with latent attention.
    """
    depth = model.depth or 1
    dim = model.dim if "dim" in model.model_fields_set else WIDTH_PER_LAYER * depth
    size = model.head_size or (32 if dim < WIDE else 64)
    heads = max(1, dim // size)
    if model.head_size is None:  # the heads divide the width, into even sizes
        while heads > 1 and dim % (2 * heads):
            heads -= 1
    found: dict[str, Any] = {"num_blocks": depth, "dim": dim, "n_heads": heads}
    if moe.expansion is None:
        found["hidden_dim"] = feed_forward_width(dim, model.activation)
    if attention.kv_lora_rank is None:
        found["qk_norm"] = True
    return found


def training_of_depth(
    model: ModelConfig, optimizer: str, tokens_per_parameter: float | None, batch_size: int | None
) -> dict[str, Any]:
    """Returns settings of the section `training` for a model: name → value.

    N weights in the layers are trained on `T = tokens_per_parameter · N` tokens. A batch has the
    power of two of tokens that is closest to `√(8 T)`, so that the number of steps grows as fast as
    the batch. (Published exponents of T are 0.38 in Bergsma et al. 2025, "Power Lines", and 0.65 in
    Bi et al. 2024, "DeepSeek LLM".)

    Args:
      model: the architecture.
      optimizer: the optimizer of the run. Only for Muon and AdamW is a learning rate returned.
      tokens_per_parameter: None: `TOKENS_PER_PARAMETER`.
      batch_size: sequences per step; None: the number that the formula gives.
    """
    tokens = (tokens_per_parameter or TOKENS_PER_PARAMETER) * block_parameters(model)
    batch_size = batch_size or max(1, 2 ** round(math.log2(8 * tokens) / 2) // model.max_context)
    steps = math.ceil(tokens / (batch_size * model.max_context))
    max_rows = max(1, MICROBATCH_TOKENS // model.max_context)  # of an accumulation step
    grad_accum = next(
        n for n in range(1, batch_size + 1) if batch_size % n == 0 and batch_size // n <= max_rows
    )
    found: dict[str, Any] = {
        "optimizer": OPTIMIZER,
        "batch_size": batch_size,
        "grad_accum": grad_accum,
        "steps": steps,
    }
    if optimizer in RATES_AT_768:
        found["lr"] = float(f"{RATES_AT_768[optimizer] * math.sqrt(768 / model.dim):.3g}")
    return found


def resolve_depth(given: Mapping[str, Any], kinds: Mapping[str, type[Any]]) -> Mapping[str, Any]:
    """Replaces `model.depth` and `training.tokens_per_parameter` by the settings that follow from
    them, unless these are given.

    A config with wrong sections, or with both `model.depth` and `model.num_blocks`, is returned
    unchanged: its validation reports the error. `training.epochs` without `tokens_per_parameter`
    replaces the number of steps.

    Args:
      given: section → an object of the section, or name → value.
      kinds: section → its class.
    """
    written = {name: _values(given.get(name)) for name in ("model", "moe", "attention", "training")}
    if written["model"].get("depth") is None or "num_blocks" in written["model"]:
        return given
    if written["training"].get("steps", 0) is None:  # null stands for a number that is not given
        del written["training"]["steps"]
    try:
        model, moe, attention, training = (
            kinds[name](**values) for name, values in written.items()
        )
        # The settings of the section `model`.
        sized = {**model_of_depth(model, moe, attention), **written["model"], "depth": None}
        model = ModelSection(**sized)
    except (ValidationError, TypeError):
        return given
    if any(model_conflicts(model, moe, attention)):  # the validation of `Config` reports them
        return {**given, "model": sized}
    optimizer = written["training"].get("optimizer", OPTIMIZER)
    batch_size = written["training"].get("batch_size")
    resolved = resolve_architecture(model, moe, attention, 1, "cpu")
    derived = training_of_depth(resolved, optimizer, training.tokens_per_parameter, batch_size)
    if "epochs" in training.model_fields_set and training.tokens_per_parameter is None:
        del derived["steps"]
    # If steps are given, the setting stays, and the validation reports that it has no effect.
    if training.steps is None:
        written["training"].pop("tokens_per_parameter", None)
    return {**given, "model": sized, "training": {**derived, **written["training"]}}


def _values(section: Any) -> dict[str, Any]:
    """Returns the settings that a section gives: name → value. Anything but a section or a mapping
    gives none.
    """
    if isinstance(section, Section):
        return {name: getattr(section, name) for name in section.model_fields_set}
    return dict(section) if isinstance(section, Mapping) else {}
