"""The mesh axes, and the table that maps parameter paths to mesh axes.

Every device runs the same program. Devices that differ in `data`, `fsdp` or `expert` have different
rows of the batch; devices that differ in `sequence` have different positions of the same rows;
devices that differ in `tensor` have the same tokens, but different heads and features. Weights,
gradients and moments are sharded over all axes except `data`. Before a matmul, the weights of a
layer are all-gathered over `fsdp`, `expert` and `sequence`.
"""

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import NamedTuple

from jax.sharding import PartitionSpec

from dantinox.config import UserError

# Adjacent devices differ in the last axis, because it has the most traffic.
AXES = ("data", "fsdp", "expert", "sequence", "tensor")
BATCH = ("data", "fsdp", "expert")  # devices that differ in one of these axes have different rows
TOKENS = (*BATCH, "sequence")  # devices that differ in one of these axes have different tokens
# Parameters are sharded over these axes, if their sizes allow.
STORAGE_AXES = ("fsdp", "expert", "sequence", "tensor")
# Parameters whose gradients are summed over `tensor` too.
SUMMED_OVER_TENSOR = (
    "embed", "embed/kernel", "embed/scale", "position_embed", "per_layer/embed",
    "per_layer/projection/kernel", "per_layer/norm/scale", "head/kernel", "head/scale", "head_bias",
)  # fmt: skip


class Rule(NamedTuple):
    """Which axes of a parameter are sharded.

    Attributes:
      path: the path of the parameter in its layer, or in the model. `*` matches any part of a name.
      axes: one letter per array axis, as in the shape suffixes of names; N also stands for the
        heads of latent attention.
      compute: maps a letter to the mesh axis over which the matmul itself is sharded.
      storage: letters of axes that can also be sharded in memory; the first axis of divisible size
        is used. Axes that are not the shorter side of a matrix come first, because the optimizer
        Muon then all-reduces small Gram matrices instead of full matrices.
    """

    path: str
    axes: str
    compute: Mapping[str, str]
    storage: str


HEADS = {"K": "tensor"}
LATENT_HEADS = {"N": "tensor"}
WIDTH = {"F": "tensor"}
EXPERTS = {"E": "expert", "F": "tensor"}
RULES = (
    Rule("embed", "VD", {}, "DV"),
    Rule("position_embed", "TD", {}, "DT"),
    Rule("per_layer/embed", "VLP", {}, "PVL"),
    Rule("per_layer/projection/kernel", "DLP", {}, "DPL"),
    Rule("per_layer/norm/scale", "P", {}, ""),
    Rule("head/kernel", "DV", {}, "DV"),
    Rule("head_bias", "V", {}, ""),
    Rule("*norm?/*", "D", {}, ""),
    Rule("layer_input/gate/kernel", "DP", {}, "DP"),
    Rule("layer_input/out/kernel", "PD", {}, "DP"),
    Rule("layer_input/norm/*", "D", {}, ""),
    Rule("layer_scalar", "1", {}, ""),
    Rule("norm_f/*", "D", {}, ""),
    Rule("norm_embed/*", "D", {}, ""),
    Rule("attention/qkv/kernel", "DKGH", HEADS, "HD"),
    Rule("attention/gate/kernel", "DKGH", HEADS, "HD"),
    Rule("attention/gate/bias", "KGH", HEADS, ""),
    Rule("attention/out/kernel", "KGHD", HEADS, "DH"),
    Rule("attention/qkv/bias", "KGH", HEADS, ""),
    Rule("attention/out/bias", "D", {}, ""),
    Rule("attention/?_norm/scale", "H", {}, ""),
    Rule("attention/out_norm/scale", "KGH", {}, ""),
    Rule("attention/q_norm/scale", "KGH", HEADS, ""),
    Rule("attention/k_norm/scale", "KH", HEADS, ""),
    Rule("attention/sinks", "KG", HEADS, ""),
    Rule("attention/kv_a/kernel", "DR", {}, "DR"),
    Rule("attention/kv_norm/scale", "R", {}, ""),
    Rule("attention/kv_b/kernel", "RNH", LATENT_HEADS, "HR"),
    Rule("attention/q_a/kernel", "DR", {}, "DR"),
    Rule("attention/q/kernel", "DNH", LATENT_HEADS, "HD"),
    Rule("attention/gate/kernel", "DNH", LATENT_HEADS, "HD"),
    Rule("attention/out/kernel", "NHD", LATENT_HEADS, "DH"),
    Rule("attention/sinks", "N", LATENT_HEADS, ""),
    Rule("ffn/gate_up/kernel", "D2F", WIDTH, "FD"),
    Rule("ffn/up/kernel", "DF", WIDTH, "FD"),
    Rule("ffn/down/kernel", "FD", WIDTH, "FD"),
    Rule("ffn/gate_up/bias", "2F", WIDTH, ""),
    Rule("ffn/up/bias", "F", WIDTH, ""),
    Rule("ffn/down/bias", "D", {}, ""),
    Rule("ffn/shared/gate_up/kernel", "D2F", WIDTH, "FD"),
    Rule("ffn/shared/up/kernel", "DF", WIDTH, "FD"),
    Rule("ffn/shared/down/kernel", "FD", WIDTH, "FD"),
    Rule("ffn/router/kernel", "DE", {}, "D"),
    Rule("ffn/router/bias", "E", {}, ""),
    Rule("ffn/router/logit_bias", "E", {}, ""),
    Rule("ffn/router/scale", "D", {}, ""),
    Rule("ffn/router/expert_scale", "E", {}, ""),
    Rule("ffn/down_norm/scale", "F", {}, ""),
    Rule("ffn/*norm/*", "D", {}, ""),
    Rule("ffn/shared/gate_up/bias", "2F", WIDTH, ""),
    Rule("ffn/shared/up/bias", "F", WIDTH, ""),
    Rule("ffn/shared/down/bias", "D", {}, ""),
    Rule("ffn/shared_gate/kernel", "D1", {}, "D"),
    # For models with adapters: weights in nf4 (B blocks of inputs, C pairs of codes), and tables in
    # int8. Matmuls with them are not sharded.
    Rule("embed/kernel", "VD", {}, "DV"),
    Rule("embed/scale", "V", {}, ""),
    Rule("head/scale", "V", {}, ""),
    Rule("attention/qkv/codes", "BCKGH", {}, "BHC"),
    Rule("attention/gate/codes", "BCKGH", {}, "BHC"),
    Rule("*/gate_up/codes", "BC2F", {}, "BFC"),
    Rule("*/codes", "BCO", {}, "BOC"),
    Rule("attention/qkv/scale", "BKGH", {}, "BH"),
    Rule("attention/gate/scale", "BKGH", {}, "BH"),
    Rule("*/gate_up/scale", "B2F", {}, "BF"),
    Rule("*/up/scale", "BO", {}, "BO"),
    Rule("*/down/scale", "BO", {}, "BO"),
    Rule("*/out/scale", "BO", {}, "BO"),
    Rule("layer_input/gate/scale", "BO", {}, "BO"),
    Rule("*/scale_step", "S", {}, ""),
    Rule("*/scale_mean", "", {}, ""),
    # The scales of other quantized weights, and the matrices A and B and the magnitudes of
    # adapters. These are small, so they are replicated, except along axes over which the matmul is
    # sharded.
    Rule("attention/qkv/scale", "KGH", HEADS, ""),
    Rule("attention/gate/scale", "KGH", HEADS, ""),
    Rule("layer_input/gate/scale", "P", {}, ""),
    Rule("*/out/scale", "D", {}, ""),
    Rule("*/gate_up/scale", "2F", WIDTH, ""),
    Rule("*/up/scale", "F", WIDTH, ""),
    Rule("*/down/scale", "D", {}, ""),
    Rule("attention/qkv/*/lora_a", "DR", {}, ""),
    Rule("attention/qkv/*/lora_b", "RKPH", HEADS, ""),
    Rule("attention/out/*/lora_a", "KGHR", HEADS, ""),
    Rule("ffn/down/*/lora_a", "FR", WIDTH, ""),
    Rule("ffn/*/lora_a", "DR", {}, ""),
    Rule("ffn/gate_up/*/lora_b", "RPF", WIDTH, ""),
    Rule("ffn/up/*/lora_b", "RF", WIDTH, ""),
    Rule("*/lora_b", "RD", {}, ""),
    Rule("attention/qkv/*/lora_magnitude_vector", "KPH", HEADS, ""),
    Rule("ffn/gate_up/*/lora_magnitude_vector", "PF", WIDTH, ""),
    Rule("ffn/up/*/lora_magnitude_vector", "F", WIDTH, ""),
    Rule("*/lora_magnitude_vector", "D", {}, ""),
    Rule("ffn/experts/gate_up/kernel", "ED2F", EXPERTS, "FD"),
    Rule("ffn/experts/up/kernel", "EDF", EXPERTS, "FD"),
    Rule("ffn/experts/down/kernel", "EFD", EXPERTS, "FD"),
    Rule("ffn/experts/gate_up/bias", "E2F", EXPERTS, ""),
    Rule("ffn/experts/up/bias", "EF", EXPERTS, ""),
    Rule("ffn/experts/down/bias", "ED", {"E": "expert"}, ""),
)
NAMES = {"K": "key heads", "N": "heads", "F": "features of the feed-forward", "E": "experts"}


class Split(NamedTuple):
    """How one parameter is sharded.

    Attributes:
      compute: for each array axis, the mesh axes over which its matmul is sharded.
      storage: for each array axis, the further mesh axes over which it is sharded in memory and
        all-gathered before use.
    """

    compute: tuple[tuple[str, ...], ...]
    storage: tuple[tuple[str, ...], ...]

    @property
    def spec(self) -> PartitionSpec:
        """The partition spec of the parameter in memory."""
        return PartitionSpec(
            *(a + s or None for a, s in zip(self.compute, self.storage, strict=True))
        )

    @property
    def gathered(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Pairs (array axis, mesh axes) over which the parameter is all-gathered."""
        return tuple((number, names) for number, names in enumerate(self.storage) if names)

    def axes_of(self, axes: slice) -> tuple[str, ...]:
        """Returns the mesh axes over which the array axes in the slice `axes` are sharded."""
        return tuple(
            name
            for a, s in zip(self.compute[axes], self.storage[axes], strict=True)
            for name in a + s
        )

    @property
    def axes(self) -> set[str]:
        """All mesh axes over which the parameter is sharded."""
        return {name for names in (*self.compute, *self.storage) for name in names}


def find_rule(name: str, ndim: int) -> Rule:
    """Returns the rule for a parameter of a layer, or of the model.

    Args:
      name: the name of the parameter in its layer, or its path in the model.
      ndim: its number of axes.

    Raises:
      ValueError: no rule matches.
    """
    for rule in RULES:
        if fnmatch(name, rule.path) and len(rule.axes) == ndim:
            return rule
    raise ValueError(
        f"no rule for the sharding of {name} with {ndim} axes: add one to"
        " dantinox.distributed.rules.RULES"
    )


def split_parameter(name: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Split:
    """Returns how a parameter of a layer, or of the model, is sharded over a mesh.

    If no array axis is divisible by the size of a storage axis, the parameter is replicated over
    that mesh axis.

    Args:
      name: the name of the parameter in its layer, or its path in the model.
      shape: its shape, without an axis for layers.
      sizes: the size of each mesh axis.

    Raises:
      UserError: the size of a mesh axis does not divide an array axis of the sharded matmul.
    """
    rule = find_rule(name, len(shape))
    compute: list[tuple[str, ...]] = [()] * len(shape)
    storage: list[tuple[str, ...]] = [()] * len(shape)
    remaining = dict(zip(rule.axes, shape, strict=True))
    used = set()
    for letter, axis in rule.compute.items():
        if remaining[letter] % sizes[axis]:
            raise UserError(
                f"distributed.{axis} must divide the {remaining[letter]} {NAMES[letter]} of a"
                f" layer, got {sizes[axis]}"
            )
        remaining[letter] //= sizes[axis]
        used.add(axis)
        if sizes[axis] > 1:
            compute[rule.axes.index(letter)] += (axis,)
    for axis in STORAGE_AXES:
        fitting = [letter for letter in rule.storage if remaining[letter] % sizes[axis] == 0]
        if axis not in used and sizes[axis] > 1 and fitting:
            remaining[fitting[0]] //= sizes[axis]
            storage[rule.axes.index(fitting[0])] += (axis,)
    return Split(tuple(compute), tuple(storage))


def name_in_layer(name: str) -> tuple[str, int]:
    """Returns the name of a parameter in its layer (or in the model), and its number of leading
    layer axes, 0 or 1.
    """
    head, _, rest = name.partition("/")
    return (
        (rest.partition("/")[2], int(head == "rolled"))
        if head in ("blocks", "rolled")
        else (name, 0)
    )
