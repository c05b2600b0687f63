"""The `distributed` section: the mesh of devices and the processes of a training run."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from dantinox.config.base import Conflict, Count, CountOrZero, Section, field
from dantinox.config.prerequisites import Condition, Needs

# A condition of settings that is also called as a function of the value of `coordinator`.
is_address = Condition("is an address", lambda coordinator: coordinator not in (None, "auto"))
Axis = Annotated[int, Field(ge=-1, le=2**20)]  # `distributed_conflicts` rejects 0
MESH_AXES = ("data", "fsdp", "expert", "sequence", "tensor")  # the settings of this type


class DistributedSection(Section):
    """Mesh of the devices of a training run, and its processes."""

    data: Axis = field(
        1, "copies of the model, each with separate rows of the batch (-1: all remaining devices)"
    )
    fsdp: Axis = field(
        -1,
        "devices that split the batch of one copy and shard its weights and optimizer state (-1:"
        " all remaining devices)",
    )
    expert: Axis = field(
        1,
        "devices that hold different experts and otherwise work like those of fsdp (-1: all"
        " remaining devices)",
    )
    sequence: Axis = field(
        1,
        "devices that split the positions of each row, for long contexts, and shard weights like"
        " fsdp (-1: all remaining)",
    )
    tensor: Axis = field(
        1,
        "devices that hold different heads and features of each layer, for the same rows (-1: all"
        " remaining devices)",
    )
    coordinator: str | None = field(
        None,
        "host:port of process 0, or auto to detect SLURM, Open MPI, Kubernetes or a TPU slice"
        " (null: one process)",
    )
    processes: Annotated[Count | None, Needs(("distributed.coordinator", is_address))] = field(
        None, "number of processes, if coordinator is an address"
    )
    process: Annotated[CountOrZero | None, Needs(("distributed.coordinator", is_address))] = field(
        None,
        "index of this process, from 0, if coordinator is an address; set it on each command line",
    )


def distributed_conflicts(d: DistributedSection) -> Iterator[Conflict]:
    """Yields an error for each contradiction among these settings."""
    axes = {name: getattr(d, name) for name in MESH_AXES}
    for name, size in axes.items():
        if size == 0:
            yield (
                f"distributed.{name}",
                "must be at least 1, or -1 for all remaining devices, got 0",
            )
    remaining_axes = [f"distributed.{name}" for name, size in axes.items() if size == -1]
    if len(remaining_axes) > 1:
        yield (
            remaining_axes[0],  # the message continues this key
            (
                f"and {' and '.join(remaining_axes[1:])} exclude each other as -1: only one axis"
                " can take the remaining devices"
            ),
        )
    if is_address(d.coordinator):
        if d.processes is None or d.process is None:
            missing = "processes" if d.processes is None else "process"
            yield f"distributed.{missing}", "must be set if distributed.coordinator is an address"
        elif d.process >= d.processes:
            yield (
                "distributed.process",
                f"must be less than distributed.processes, got {d.process} and {d.processes}",
            )
