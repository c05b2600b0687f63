"""What a model does differently where several devices share its work.

A model is written for one device. Where a mesh shares it, every device runs the same program on its own rows of the batch and
its own part of the weights, and what passes between devices are calls of a `Sharing`, which the model is given and whose axes
it does not know. Two kinds of division need a word here:

* Heads, features of the feed-forward and experts stand on different devices, while the residual stream is the same on all of
  them. `enter` marks where such a part begins and `leave` where it ends (f and g of Shoeybi et al. 2019, "Megatron-LM",
  section 3). What is computed alike on all of them counts `once`.
* A layer's weights lie in parts on all devices, and are made `whole` right before they are multiplied by, forward and again
  backward (Rajbhandari et al. 2020, "ZeRO", stage 3).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

GATHERED = "gathered"  # the name of weights that were made whole, which the backward pass does again


@dataclass(frozen=True)
class Sharing:
    """One device that does all: every method gives back what it gets.

    Attributes:
      gathers: whether `whole` takes communication, whose outcome is not to be kept until the backward pass.
      groups: over how many devices the experts of a layer stand.
    """

    gathers: bool = False
    groups: int = 1

    def whole(self, block: Any) -> Any:
        """A layer with its weights as they are multiplied by."""
        return block

    def enter(self, x: Any) -> Any:
        """What goes in where devices take different parts: forward as it is, derivatives are summed over them."""
        return x

    def leave(self, x: jax.Array) -> jax.Array:
        """What comes out: the sum over the devices, derivatives as they are."""
        return x

    def once(self, x: jax.Array) -> jax.Array:
        """What several devices compute alike, of weights whose derivatives are summed over them: they are divided by these."""
        return x

    def own(self, x_N: jax.Array) -> jax.Array:
        """This device's part of the first axis of what is the same on several; the end may be filled up with zeros."""
        return x_N

    def mean(self, x: jax.Array) -> jax.Array:
        """The mean over the parts of the batch, which are of one size."""
        return x

    def total(self, x: jax.Array) -> jax.Array:
        """The sum over the parts of the batch."""
        return x

    def over_heads(self, x: jax.Array) -> jax.Array:
        """The mean over the devices that hold different heads."""
        return x

    def tokens_of_group(self, x_N: jax.Array) -> jax.Array:
        """The tokens of all devices that the experts stand on."""
        return x_N

    def tokens_back(self, y_N: jax.Array) -> jax.Array:
        """The sum over those devices, each with its own tokens."""
        return y_N

    def first_expert(self, experts: int) -> Any:
        """The number of this device's first expert, of those it holds."""
        return 0

    def apart(self, x: jax.Array) -> jax.Array:
        """Features of the feed-forward, of which each device has its part."""
        return x

    def together(self, x: jax.Array) -> jax.Array:
        """Something of which devices may hold parts, on all of them."""
        return x

    def by_heads(self, kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """An attention kernel for arrays whose heads stand on different devices."""
        return kernel


ALONE = Sharing()
