"""Mesh axes, and the table that maps parameter paths to mesh axes.

Every device runs the same program, on rows of the batch of its own (`data`, `fsdp`, `expert`), or on the same rows with heads
and features of its own (`tensor`). Weights, gradients and moments lie in parts over `fsdp`, `expert` and `tensor`; a layer's
weights are made whole over `fsdp` and `expert` when they are multiplied by.
"""

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import NamedTuple

from jax.sharding import PartitionSpec

from dantinox.config import UserError

AXES = ("data", "fsdp", "expert", "tensor")  # devices next to each other differ in the last one, which passes most
BATCH = ("data", "fsdp", "expert")  # devices that differ in these have different rows
STORAGE_AXES = ("fsdp", "expert", "tensor")  # over these a parameter lies in parts, if its sizes allow
# Parameters whose derivatives are summed over all devices.
SUMMED_OVER_TENSOR = (
    "embed", "position_embed", "per_layer/embed", "per_layer/projection/kernel", "per_layer/norm/scale", "head/kernel",
    "head_bias",
)  # fmt: skip


class Rule(NamedTuple):
    """Which axes of a parameter are split.

    Attributes:
      path: of the parameter in its layer, or in the model; `*` is any part of a name.
      axes: a letter for each of its axes: those of the shapes' names, N also for the heads of latent attention.
      apart: axes of which devices use different parts, by letter, and the axis of the mesh that they differ in.
      stored: axes that are split further where the parameter lies, the first one that can be. First come those that are not the
        shorter side of a matrix: Muon then sums small squares and passes no matrix.
    """

    path: str
    axes: str
    compute: Mapping[str, str]
    storage: str


HEADS, LATENT_HEADS, WIDTH, EXPERTS = {"K": "tensor"}, {"N": "tensor"}, {"F": "tensor"}, {"E": "expert", "F": "tensor"}
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
    Rule("ffn/*norm/*", "D", {}, ""),
    Rule("ffn/shared/gate_up/bias", "2F", WIDTH, ""),
    Rule("ffn/shared/up/bias", "F", WIDTH, ""),
    Rule("ffn/shared/down/bias", "D", {}, ""),
    Rule("ffn/shared_gate/kernel", "D1", {}, "D"),
    # Beside adapters: scales of narrow weights, and A and B, which are so small that all devices have them, but for what of
    # them is multiplied on different ones.
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
    Rule("ffn/experts/gate_up/kernel", "ED2F", EXPERTS, "FD"),
    Rule("ffn/experts/up/kernel", "EDF", EXPERTS, "FD"),
    Rule("ffn/experts/down/kernel", "EFD", EXPERTS, "FD"),
    Rule("ffn/experts/gate_up/bias", "E2F", EXPERTS, ""),
    Rule("ffn/experts/up/bias", "EF", EXPERTS, ""),
    Rule("ffn/experts/down/bias", "ED", {"E": "expert"}, ""),
)
NAMES = {"K": "key heads", "N": "heads", "F": "features of the feed-forward", "E": "experts"}


class Split(NamedTuple):
    """How one parameter is split.

    Attributes:
      apart: for each of its axes, the axes of the mesh in which devices use different parts.
      stored: for each, those that come behind, over which it is made whole.
    """

    compute: tuple[tuple[str, ...], ...]
    storage: tuple[tuple[str, ...], ...]

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*(a + s or None for a, s in zip(self.compute, self.storage, strict=True)))

    @property
    def gathered(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """(axis, axes of the mesh) that make it whole."""
        return tuple((number, names) for number, names in enumerate(self.storage) if names)

    def axes_of(self, axes: slice) -> tuple[str, ...]:
        """The axes of the mesh that some of its axes are split over."""
        return tuple(name for a, s in zip(self.compute[axes], self.storage[axes], strict=True) for name in a + s)

    @property
    def axes(self) -> set[str]:
        """All axes of the mesh that it is split over."""
        return {name for names in (*self.compute, *self.storage) for name in names}


def find_rule(name: str, ndim: int) -> Rule:
    """The rule for a parameter of a layer, or of the model, of so many axes. Raises a ValueError if there is none."""
    for rule in RULES:
        if fnmatch(name, rule.path) and len(rule.axes) == ndim:
            return rule
    raise ValueError(f"no rule says how {name} with {ndim} axes is split: dantinox.distributed.RULES needs one")


def split_parameter(name: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Split:
    """How a parameter of a layer, or of the model, is split over a mesh of these sizes.

    An axis of the mesh over which no axis of the parameter can be stored in equal parts holds copies of it.

    Raises:
      UserError: what devices are to use different parts of cannot be divided.
    """
    rule = find_rule(name, len(shape))
    compute: list[tuple[str, ...]] = [()] * len(shape)
    storage: list[tuple[str, ...]] = [()] * len(shape)
    left = dict(zip(rule.axes, shape, strict=True))
    used = set()
    for letter, axis in rule.compute.items():
        if left[letter] % sizes[axis]:
            raise UserError(f"distributed.{axis} must divide the {left[letter]} {NAMES[letter]} of a layer, got {sizes[axis]}")
        left[letter] //= sizes[axis]
        used.add(axis)
        if sizes[axis] > 1:
            compute[rule.axes.index(letter)] += (axis,)
    for axis in STORAGE_AXES:
        fitting = [letter for letter in rule.storage if left[letter] % sizes[axis] == 0]
        if axis not in used and sizes[axis] > 1 and fitting:
            left[fitting[0]] //= sizes[axis]
            storage[rule.axes.index(fitting[0])] += (axis,)
    return Split(tuple(compute), tuple(storage))


def name_in_layer(name: str) -> tuple[str, int]:
    """A parameter's name in its layer, or in the model, and how many leading axes stand for layers."""
    head, _, rest = name.partition("/")
    return (rest.partition("/")[2], int(head == "rolled")) if head in ("blocks", "rolled") else (name, 0)
