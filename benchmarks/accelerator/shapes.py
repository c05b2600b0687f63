"""The shapes of the check, by the memory of the device, and the models with random weights."""

from dataclasses import dataclass
from typing import Any, NamedTuple

TINY = {
    "model.dim": 32, "model.n_heads": 4, "model.kv_heads": 2, "model.hidden_dim": 64,
    "model.num_blocks": 2, "model.max_context": 64, "tokenizer.vocab_size": 512,
}  # fmt: skip
# Llama with 350 million parameters, where the training state of a billion does not fit.
MEDIUM = {
    "model.dim": 1024,
    "model.n_heads": 16,
    "model.kv_heads": 4,
    "model.hidden_dim": 4096,
    "model.num_blocks": 16,
}


@dataclass(frozen=True)
class Shapes:
    """The sizes of all rows for devices with at least `memory` bytes.

    Attributes:
      small_rows, large_rows: the rows of a micro-batch of the two training rows.
      changes: settings that replace those of the packaged configs.
      large: settings of the large trained model.
      batches: the batches of `decode_batches`.
      context: the context of decoded sequences.
      new: generated tokens.
      product: the side of the square matrices.
      copied: the bytes of the copied array.
    """

    memory: float
    small_rows: int
    large_rows: int
    changes: dict[str, Any]
    large: dict[str, Any]
    batches: tuple[int, ...] = (8, 64)
    context: int = 512
    prompt: int = 64
    new: int = 128
    product: int = 8192
    copied: int = 1 << 31
    steps: int = 20
    seeds: int = 100


SHAPES = {
    "80 GB": Shapes(70e9, 32, 8, {}, {}),
    "40 GB": Shapes(36e9, 16, 2, {}, {}),
    "24 GB": Shapes(20e9, 12, 8, {}, MEDIUM, batches=(8, 32)),
    "16 GB": Shapes(0, 8, 4, {}, MEDIUM, batches=(8, 32), copied=1 << 30),
    "smoke": Shapes(
        0,
        4,
        4,
        TINY,
        {},
        batches=(2, 4),
        context=64,
        prompt=16,
        new=8,
        product=128,
        copied=1 << 20,
        steps=2,
        seeds=4,
    ),
}


def shapes_of(smoke: bool) -> Shapes:
    """Returns the shapes for the first device."""
    import jax

    if smoke:
        return SHAPES["smoke"]
    stats = jax.devices()[0].memory_stats() or {}
    memory = (
        stats.get("bytes_limit", 0) / 0.9
    )  # the check gives a process nine tenths of the memory
    return next(
        shapes for name, shapes in SHAPES.items() if name != "smoke" and memory >= shapes.memory
    )


class Measured(NamedTuple):
    """The figures of a row.

    Attributes:
      work: repeats a part of the measured work, for a trace; None: there is none.
      count: the steps or tokens of one call of `work`.
      programs: the compiled programs, by name.
      machine: facts about the device.
    """

    figures: dict[str, Any]
    work: Any = None
    count: int = 1
    programs: dict[str, Any] = {}  # noqa: RUF012
    machine: dict[str, Any] | None = None


def training_config(name: str, rows: int, changes: dict[str, Any]) -> Any:
    """Returns a packaged config for steps of one micro-batch."""
    from dantinox.config import load_config

    return load_config(name, {
        "training.steps": 1000, "training.batch_size": rows, "training.grad_accum": 1,
        "training.warmup_steps": 10, **changes,
    })  # fmt: skip


def llama_config(shapes: Shapes, **changes: Any) -> Any:
    """Returns the config of the decoded model: the Llama of the config `llama_1b`."""
    from dantinox.config import load_config

    settings = (
        {"model.max_context": shapes.context, "generation.seed": 0} | shapes.changes | changes
    )
    return load_config(
        "llama_1b", {name.replace("__", "."): value for name, value in settings.items()}
    )


def random_model(config: Any, dtype: str = "bfloat16") -> Any:
    """Returns a model with random weights, stored in `dtype`."""
    import jax
    import jax.numpy as jnp

    from dantinox.model.parameters import abstract_model

    build, shapes = abstract_model(config.architecture(config.tokenizer.vocab_size))

    @jax.jit
    def draw() -> dict[str, jax.Array]:
        keys = jax.random.split(jax.random.key(0), len(shapes))
        stored = jnp.dtype(dtype)
        return {
            name: (
                (0.02 * jax.random.normal(key, leaf.shape, stored))
                if len(leaf.shape) > 1
                else jnp.ones(leaf.shape, leaf.dtype)
            )
            for key, (name, leaf) in zip(keys, shapes.items(), strict=True)
        }

    return build(draw())
