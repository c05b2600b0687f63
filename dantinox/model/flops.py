"""Formulas for the FLOPs and the active parameters of a model.

Symbols, as in the PaLM paper: L layers, H query heads, Q head size, T keys; D model, V vocabulary,
r rank of adapters.
"""

from dantinox.config import ModelConfig
from dantinox.config.model_size import block_parameters
from dantinox.model.cache import uncompressed_slots
from dantinox.model.lora import layer_projections, projection_sizes


def matrix_parameters(model: ModelConfig) -> int:
    """Returns N, the number of matrix weights used per token: those of `block_parameters`, and
    `D·V` of the output layer.
    """
    return block_parameters(model) + model.dim * model.vocab_size


def attention_flops(model: ModelConfig, keys: int) -> int:
    """Returns the FLOPs of attention for one query, `4·L·H·Q·T`: the scores and weighted values of
    `keys` keys.

    In a layer with a sliding window, T is at most the window. Keys that the causal mask hides count
    too, as in the cited formulas.
    """
    if model.latent is not None:
        size = model.head_size + model.latent.rotated_size + model.latent.value_size
        return 2 * model.n_heads * size * sum(uncompressed_slots(model, keys))
    return sum(
        4 * model.n_heads * model.of_layer(i).head_size * span
        for i, span in enumerate(uncompressed_slots(model, keys))
    )


def forward_flops(model: ModelConfig, length: int) -> int:
    """Returns the FLOPs of a forward pass per token, for sequences of `length` tokens:
    `2·(N + n) + 4·L·H·Q·T`.
    """
    return 2 * (matrix_parameters(model) + adapter_parameters(model)) + attention_flops(
        model, length
    )


def training_flops(model: ModelConfig, length: int) -> int:
    """Returns the FLOPs of a training step per token, for sequences of `length` tokens:
    `3·(2·N + 4·L·H·Q·T)`.

    The backward pass costs twice the forward pass (Chowdhery et al. 2022, "PaLM", appendix B).
    Rematerialization, the optimizer and norms do not count. With adapters, the frozen weights have
    no gradients and cost `2·2·N`, and the adapters cost `3·2·n`.
    """
    times = 3 if model.lora is None else 2
    return (
        2 * times * matrix_parameters(model)
        + 6 * adapter_parameters(model)
        + 3 * attention_flops(model, length)
    )


def adapter_parameters(model: ModelConfig) -> int:
    """Returns n, the number of adapter weights in all layers: `r·(in + out)` per projection, with
    DoRA `r·(in + out) + out`.
    """
    if (lora := model.lora) is None:
        return 0
    sizes = [
        projection_sizes(model, layer)[target]
        for layer in range(model.num_blocks)
        for target in layer_projections(model, layer)
        if target in lora.targets
    ]
    return sum(lora.rank * (ins + outs) + lora.dora * outs for ins, outs in sizes)
