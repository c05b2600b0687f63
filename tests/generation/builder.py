"""Small models with random weights, and generation done the slow way: the whole text again for every token."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import ModelConfig
from dantinox.model import Transformer
from dantinox.sampling import process_logits
from dantinox.sampling.draw import draw, row_key

V = 67
BASE = ModelConfig(
    vocab_size=V,
    dim=32,
    n_heads=4,
    kv_heads=2,
    head_size=8,
    num_blocks=2,
    hidden_dim=48,
    max_context=64,
    windows=(None, None),
    dtype="float32",
)


def config(**changes: Any) -> ModelConfig:
    """`BASE` with changes; `windows` sets the depth."""
    windows = changes.get("windows", BASE.windows)
    return replace(BASE, num_blocks=len(windows), **changes)


@cache
def model(config: ModelConfig = BASE, seed: int = 0) -> Transformer:
    """A model whose weights are large enough for its greedy text to wander."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    random = np.random.default_rng(seed)

    def filled(path: tuple, leaf: jax.Array) -> jax.Array:
        name = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)][-1]
        noise = random.standard_normal(leaf.shape)
        if name == "kernel":
            noise *= 2.0 / np.sqrt(np.prod(leaf.shape) / leaf.shape[-1]) * leaf.shape[-1] ** 0.25
        elif name == "scale":
            noise = 1 + 0.3 * noise
        return jnp.asarray(noise, leaf.dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(filled, state))


@cache
def _forward(config: ModelConfig) -> Any:
    graph, _ = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))

    @jax.jit
    def run(state, tokens_BT, positions_BT):
        return nnx.merge(graph, state)(tokens_BT, positions_BT)[0]

    return run


def all_logits(model: Transformer, text: list[int]) -> np.ndarray:
    """Logits `[T, V]` after every token of a text, in one pass without a cache."""
    S = model.config.max_context
    places = np.arange(S)
    tokens = np.zeros((1, S), np.int32)
    tokens[0, : len(text)] = text
    positions = np.where(places < len(text), places, -1)[None]
    return np.asarray(_forward(model.config)(nnx.state(model), tokens, positions))[0, : len(text)]


_draw = jax.jit(lambda logits_V, seed, sample, n: draw(logits_V, row_key(seed, sample, n)))


def slowly(model: Transformer, prompt: list[int], steps: int, *, seed: int = 0, sample: int = 0, **settings: Any) -> list[int]:
    """The continuation of one prompt. Settings as of `generate`; a temperature of 0 or `greedy` takes the largest logit."""
    text, eos = list(prompt), list(settings.get("eos_ids", ()))
    greedy = settings.get("greedy", False) or settings.get("temperature", 1.0) == 0
    for n in range(steps):
        said = [text[: len(prompt)]], [text[len(prompt) :]]
        edits: list[dict[str, Any]] = []
        if settings.get("min_tokens") and eos:
            edits.append({"name": "min_tokens", "n": settings["min_tokens"], "stop_ids": eos})
        if settings.get("repetition_penalty"):
            edits.append({"name": "repetition_penalty", "penalty": settings["repetition_penalty"]})
        filters = [
            {"name": name, parameter: settings[name]}
            for name, parameter in (("temperature", "t"), ("top_k", "k"), ("top_p", "p"), ("min_p", "p"))
            if settings.get(name) is not None and not greedy
        ]
        logits_BV = process_logits(all_logits(model, text)[-1:], [*edits, *filters], *said)
        text.append(int(np.argmax(logits_BV[0])) if greedy else int(_draw(logits_BV[0], seed, sample, n)))
        if text[-1] in eos:
            break
    return text[len(prompt) :]


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Random prompts of these lengths."""
    random = np.random.default_rng(seed)
    return [random.integers(0, V, length).tolist() for length in lengths]


def padded(rows: list[list[int]], fill: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """The rows as one array, right-padded with a token like any other, and their lengths."""
    lengths = np.array([len(row) for row in rows])
    out = np.full((len(rows), lengths.max()), fill, np.int32)
    for row, text in zip(out, rows, strict=True):
        row[: len(text)] = text
    return out, lengths
