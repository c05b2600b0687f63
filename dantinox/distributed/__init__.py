"""Training and generation on many devices. Only this package names mesh axes."""

from dantinox.distributed.layout import (
    ONE_DEVICE,
    Layout,
    bytes_per_device,
    make_layout,
    mesh_sizes,
)
from dantinox.distributed.processes import (
    NullOutput,
    StopSync,
    all_reduce_max,
    barrier,
    broadcast_from_rank0,
    fetch_to_host,
    initialize_processes,
    is_rank0,
)
from dantinox.distributed.rules import AXES, BATCH
from dantinox.distributed.tensor_parallel import (
    max_tensor_parallel,
    shard_model,
    shard_model_shapes,
    shard_program_arguments,
    tensor_mesh,
    weight_shardings,
)

__all__ = [
    "AXES",
    "BATCH",
    "ONE_DEVICE",
    "Layout",
    "NullOutput",
    "StopSync",
    "all_reduce_max",
    "barrier",
    "broadcast_from_rank0",
    "bytes_per_device",
    "fetch_to_host",
    "initialize_processes",
    "is_rank0",
    "make_layout",
    "max_tensor_parallel",
    "mesh_sizes",
    "shard_model",
    "shard_model_shapes",
    "shard_program_arguments",
    "tensor_mesh",
    "weight_shardings",
]
