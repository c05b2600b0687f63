"""The communication of a model over several devices, as the methods of an object that the model is given.

A model is written for one device. On a mesh every device runs the same program on its own rows of the batch and its own part of
the weights. What passes between devices are calls of a `Parallelism`, which knows the axes of the mesh; the model does not.

* Tensor parallelism: heads, features of the feed-forward and experts are split over devices, the residual stream is replicated.
  `copy_to_tp` marks where a split part begins and `reduce_from_tp` where it ends (f and g of Shoeybi et al. 2019,
  "Megatron-LM", section 3); `scale_replicated` corrects the gradient of what is computed on all of them.
* Sharded weights: a layer's weights are gathered by `gather_weights` right before they are used, in the forward pass and again
  in the backward pass (Rajbhandari et al. 2020, "ZeRO", stage 3).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

GATHERED = "gathered"  # the checkpoint name of gathered weights, which the backward pass gathers again


@dataclass(frozen=True)
class Parallelism:
    """A single device: every method returns its argument.

    Attributes:
      gathers: whether `gather_weights` communicates, so that its result is not kept for the backward pass.
      groups: the number of devices that the experts of a layer are split over.
    """

    gathers: bool = False
    groups: int = 1

    def gather_weights(self, block: Any) -> Any:
        """A layer with its full weights."""
        return block

    def copy_to_tp(self, x: Any) -> Any:
        """The input of a split part: the identity forward, the sum of the gradients over the devices backward."""
        return x

    def reduce_from_tp(self, x: jax.Array) -> jax.Array:
        """The output of a split part: the sum over the devices forward, the identity backward."""
        return x

    def scale_replicated(self, x: jax.Array) -> jax.Array:
        """The identity, with the gradient divided by the number of devices that compute `x` alike and sum their gradients."""
        return x

    def local_shard(self, x_N: jax.Array) -> jax.Array:
        """This device's part of the first axis of a replicated array, padded with zeros to equal parts."""
        return x_N

    def pmean_batch(self, x: jax.Array) -> jax.Array:
        """The mean over the parts of the batch, which have equal sizes."""
        return x

    def psum_batch(self, x: jax.Array) -> jax.Array:
        """The sum over the parts of the batch."""
        return x

    def pmean_heads(self, x: jax.Array) -> jax.Array:
        """The mean over the devices that hold different heads."""
        return x

    def all_gather_tokens(self, x_N: jax.Array) -> jax.Array:
        """The tokens of all devices that the experts are split over."""
        return x_N

    def reduce_scatter_tokens(self, y_N: jax.Array) -> jax.Array:
        """The sum over those devices, each with its own tokens."""
        return y_N

    def first_expert(self, experts: int) -> Any:
        """The index of this device's first expert; `experts`: the number it holds."""
        return 0

    def shard_features(self, x: jax.Array) -> jax.Array:
        """Features of the feed-forward, split over the devices."""
        return x

    def all_gather(self, x: jax.Array) -> jax.Array:
        """An array that may be split over devices, whole on all of them."""
        return x

    def shard_map_heads(self, kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """An attention kernel for arrays whose heads are split over devices."""
        return kernel


SINGLE_DEVICE = Parallelism()
