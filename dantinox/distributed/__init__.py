"""Many devices, by JAX's own means. Only here are the axes of a mesh spelled."""

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
    StopTogether,
    agreed,
    from_first,
    is_first,
    join,
    meet,
    on_host,
)
from dantinox.distributed.rules import AXES, BATCH

__all__ = [
    "AXES",
    "BATCH",
    "ONE_DEVICE",
    "Layout",
    "Silent",
    "StopTogether",
    "agreed",
    "bytes_on_one",
    "from_first",
    "is_first",
    "join",
    "make_layout",
    "meet",
    "mesh_sizes",
    "on_host",
    "place_shared",
    "shapes_over",
    "shared_over",
    "tensor_mesh",
    "weight_places",
    "widest",
]
