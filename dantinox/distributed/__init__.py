"""Training and generation on many devices. Only this package names mesh axes."""

from dantinox.distributed.generation import (
    place_shared,
    shapes_over,
    shared_over,
    tensor_mesh,
    weight_places,
    widest,
)
from dantinox.distributed.layout import ONE_DEVICE, Layout, bytes_on_one, make_layout, mesh_sizes
from dantinox.distributed.processes import (
    Silent,
    StopSync,
    all_reduce_max,
    barrier,
    broadcast_from_rank0,
    is_rank0,
    join,
    on_host,
)
from dantinox.distributed.rules import AXES, BATCH

__all__ = [
    "AXES",
    "BATCH",
    "ONE_DEVICE",
    "Layout",
    "Silent",
    "StopSync",
    "all_reduce_max",
    "bytes_on_one",
    "broadcast_from_rank0",
    "is_rank0",
    "join",
    "make_layout",
    "barrier",
    "mesh_sizes",
    "on_host",
    "place_shared",
    "shapes_over",
    "shared_over",
    "tensor_mesh",
    "weight_places",
    "widest",
]
