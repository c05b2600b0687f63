"""`Parallelism`: the collectives that a model calls when it runs on several devices.

The code of the model is written for one device. On a mesh every device runs the same program on its
own batch rows and its own shard of the weights. All communication goes through a `Parallelism`,
which holds the mesh axes, so the model does not mention them.

* Tensor parallelism: heads, feed-forward features and experts are split over devices, and the
  residual stream is replicated. `copy_to_tp` marks the input of a split computation and
  `reduce_from_tp` its output (f and g of Shoeybi et al. 2019, "Megatron-LM", section 3).
  `scale_replicated` corrects the gradient of values that all devices compute.
* Sharded weights: `gather_weights` gathers the weights of a layer right before they are used, in
  the forward pass and again in the backward pass (Rajbhandari et al. 2020, "ZeRO", stage 3).
* Sequence parallelism: the positions of a row are split over a ring of devices. Only attention
  communicates between them, with `ring_shift` (`dantinox.model.ring_attention`).
"""

from dataclasses import dataclass
from typing import Any

import jax

from dantinox.model.positions import zigzag_positions

# Checkpoint name of gathered weights; they are not saved, and the backward pass gathers them again.
GATHERED = "gathered"


@dataclass(frozen=True)
class Parallelism:
    """The collectives on a single device, where each method returns its argument unchanged. On a
    mesh the methods do this:

    * `gather_weights`: return a layer with its full weights.
    * `copy_to_tp`: the input of a split computation. Forward: the identity. Backward: the sum over
      the devices.
    * `reduce_from_tp`: the output of a split computation. Forward: the sum over the devices.
      Backward: the identity.
    * `scale_replicated`: the identity, with the gradient divided by the number of devices that
      compute the same `x`.
    * `local_shard`: return this device's shard of the first axis of a replicated array, padded with
      zeros to equal shards.
    * `pmean_batch`, `psum_batch`: the mean or the sum over the shards of the batch. All shards have
      the same number of tokens.
    * `pmean_heads`: the mean over the devices that hold different heads.
    * `all_gather_tokens`: gather the tokens `[N, …]` of all devices that the experts are split
      over.
    * `reduce_scatter_tokens`: the sum over the same devices, each of which gets the result for its
      own tokens.
    * `shard_features`: split feed-forward features over the devices.
    * `all_gather`: replicate an array that may be sharded.
    * `shard_map_heads`: run an attention kernel on arrays whose heads are sharded.
    * `ring_shift`: send a tree of arrays to the next device of the ring, and return that of the
      previous device.

    Attributes:
      gathers: whether `gather_weights` communicates; its result is then not saved for the backward
        pass.
      groups: the number of devices that the experts of a layer are split over.
      ring: the number of devices that the positions of a row are split over.
    """

    gathers: bool = False
    groups: int = 1
    ring: int = 1

    def _identity(self, x: Any) -> Any:
        return x

    gather_weights = copy_to_tp = reduce_from_tp = scale_replicated = local_shard = pmean_batch = (
        psum_batch
    ) = _identity
    pmean_heads = all_gather_tokens = reduce_scatter_tokens = shard_features = all_gather = (
        shard_map_heads
    ) = _identity
    ring_shift = _identity

    def first_expert(self, experts: int) -> Any:
        """Returns the index of the first expert on this device; `experts` is the number of experts
        per device.
        """
        return 0

    def ring_index(self) -> Any:
        """Returns the index of this device in its ring."""
        return 0

    def local_positions(self, length: int) -> jax.Array:
        """Returns the positions, int32, of the `length` tokens of a row that are on this device."""
        return zigzag_positions(self.ring_index(), self.ring, length)


SINGLE_DEVICE = Parallelism()
