"""Random adapters for the models of `builder`, and the same models with the adapters merged into
their weights.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.model.lora import layer_projections, projection_sizes
from dantinox.run.adapters import AdapterDelta, merge_adapters
from dantinox.run.peft_folder import LoraAdapter


def adapter(config, seed, rank=4, targets=None, gain=0.4):
    """Returns an adapter with random matrices on the `targets` of all layers; None: on all
    projections.
    """
    random, deltas = np.random.default_rng(seed), {}
    for layer in range(config.num_blocks):
        for name, projection in layer_projections(config, layer).items():
            if targets is None or name in targets:
                ins, outs = projection_sizes(config, layer)[name]
                a_IR = random.standard_normal((ins, rank)).astype(np.float32) / ins**0.5
                b_RO = gain * random.standard_normal((rank, outs)).astype(np.float32)
                changes = deltas.setdefault(f"blocks/{layer}/{projection.module}/kernel", [])
                changes.append(AdapterDelta(projection, a_IR, b_RO, 1.5 / rank))
    return LoraAdapter(deltas, rank, bytes([seed]) * 32)


def merged(model, adapter):
    """Returns a copy of a model with the adapter merged into its weights."""
    model = nnx.clone(model)
    for path, changes in adapter.deltas.items():
        _, layer, owner, name, _ = path.split("/")
        linear = getattr(getattr(model.blocks[int(layer)], owner), name)
        linear.kernel = nnx.Param(
            jnp.asarray(merge_adapters(np.asarray(linear.kernel[...]), changes))
        )
    return model
