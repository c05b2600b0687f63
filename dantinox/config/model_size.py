"""The number of weights in a model's layers, from its architecture alone."""

from dantinox.config.model_config import ModelConfig
from dantinox.config.model_settings import GATED_ACTIVATIONS


def block_parameters(model: ModelConfig) -> int:
    """Returns the matrix weights of all layers that one token uses: attention `D·Q·(2H + 2K)`, and
    the feed-forward layer.

    For a mixture of experts, the router and the experts that a token uses count. Per-layer inputs
    add `3·L·D·P`. Norms, biases, embeddings and the output layer do not count (Kaplan et al. 2020,
    "Scaling Laws", section 2.1).
    """
    D, L, P = model.dim, model.num_blocks, model.per_layer_dim
    layers = sum(
        _layer_parameters(model.of_layer(layer), model.kv_projections(layer)) for layer in range(L)
    )
    return layers + 3 * L * D * P


def _layer_parameters(model: ModelConfig, kv_projections: int) -> int:
    """Returns the weights of one layer; `model` is the result of `ModelConfig.of_layer`, whose
    layers are all equal.
    """
    D = model.dim
    Q = model.head_size
    F = model.hidden_dim
    # Queries, output and the output gate `no_sink` of each query head, then keys and values.
    attention = (
        D * Q * (2 + model.no_sink) * model.n_heads + D * Q * kv_projections * model.kv_heads
    )
    if model.latent is not None:  # down-projection to latents, up-projection, queries, output
        N = model.n_heads
        R = model.latent.rank
        P = model.latent.rotated_size
        V = model.latent.value_size
        query_rank = model.latent.query_rank
        queries = D * N * (Q + P)
        if query_rank is not None:  # a matrix to the latent vector, and one from it
            queries = D * query_rank + query_rank * N * (Q + P)
        attention = D * (R + P) + R * N * (Q + V) + queries + (1 + model.no_sink) * N * V * D
    matrices = 3 if model.activation in GATED_ACTIVATIONS else 2
    feed_forward = matrices * D * F
    if (experts := model.experts) is not None:
        feed_forward = matrices * D * (experts.top_k * F + experts.shared_dim) + D * (
            experts.count + experts.shared_gate
        )
    return attention + feed_forward
