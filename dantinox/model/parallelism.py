"""`Parallelism`: the collectives that a model calls when it runs on several devices.

A model is written for one device. On a mesh every device runs the same program on its own rows of the batch and its own part of
the weights. What passes between devices are calls of a `Parallelism`, which knows the axes of the mesh; the model does not.

* Tensor parallelism: heads, features of the feed-forward and experts are split over devices, the residual stream is replicated.
  `copy_to_tp` marks where a split part begins and `reduce_from_tp` where it ends (f and g of Shoeybi et al. 2019,
  "Megatron-LM", section 3); `scale_replicated` corrects the gradient of what is computed on all of them.
* Sharded weights: a layer's weights are gathered by `gather_weights` right before they are used, in the forward pass and again
  in the backward pass (Rajbhandari et al. 2020, "ZeRO", stage 3).
"""

from dataclasses import dataclass
from typing import Any

GATHERED = "gathered"  # the checkpoint name of gathered weights, which the backward pass gathers again


@dataclass(frozen=True)
class Parallelism:
    """A single device: its methods return the layer, the array or the kernel that they are given. What they do on a mesh:

    * `gather_weights`: a layer with its full weights.
    * `copy_to_tp`: the input of a split part: the identity forward, the sum of the gradients over the devices backward.
    * `reduce_from_tp`: the output of a split part: the sum over the devices forward, the identity backward.
    * `scale_replicated`: the identity, with the gradient divided by the number of devices that compute `x` alike.
    * `local_shard`: this device's part of the first axis of a replicated array, padded with zeros to equal parts.
    * `pmean_batch`, `psum_batch`: the mean or the sum over the parts of the batch, which have equal sizes.
    * `pmean_heads`: the mean over the devices that hold different heads.
    * `all_gather_tokens`: the tokens `[N, …]` of all devices that the experts are split over.
    * `reduce_scatter_tokens`: the sum over those devices, each with its own tokens.
    * `shard_features`: features of the feed-forward, split over the devices.
    * `all_gather`: an array that may be split over devices, whole on all of them.
    * `shard_map_heads`: an attention kernel for arrays whose heads are split over devices.

    Attributes:
      gathers: whether `gather_weights` communicates, so that its result is not kept for the backward pass.
      groups: the number of devices that the experts of a layer are split over.
    """

    gathers: bool = False
    groups: int = 1

    def _identity(self, x: Any) -> Any:
        return x

    gather_weights = copy_to_tp = reduce_from_tp = scale_replicated = local_shard = pmean_batch = psum_batch = _identity
    pmean_heads = all_gather_tokens = reduce_scatter_tokens = shard_features = all_gather = shard_map_heads = _identity

    def first_expert(self, experts: int) -> Any:
        """The index of this device's first expert; `experts`: the number it holds."""
        return 0


SINGLE_DEVICE = Parallelism()
