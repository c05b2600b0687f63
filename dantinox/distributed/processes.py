"""The processes of one training run: start-up, barrier, broadcast and all-reduce.

All processes run the same loop over the same steps. Only rank 0 prints and writes files; all
processes write checkpoints. This module synchronizes the values on which all processes must agree,
such as a received signal or the checkpoint to restore.
"""

import itertools
import json
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dantinox.config import Config, UserError
from dantinox.files import first_line

HEARTBEAT_SECONDS = 8  # if a process sends no heartbeat for this long, the other processes exit
BARRIER_TIMEOUT_MS = 24 * 3600 * 1000  # the heartbeat detects a lost process much earlier
BARRIERS = itertools.count()  # numbers for the keys of barriers, the same in all processes
# Steps between the all-reduce of a signal and the read of its result. An earlier read would stall
# the devices.
RESULT_LAG_STEPS = 2


def initialize_processes(config: Config) -> None:
    """Connects to the other processes if the settings name a coordinator. Must run before JAX
    initializes its devices.

    Raises:
      UserError: the coordinator cannot be reached.
    """
    d = config.distributed
    if d.coordinator is None or jax.distributed.is_initialized():
        return
    address = None if d.coordinator == "auto" else d.coordinator  # None: jax detects the cluster
    # The service would intercept SIGTERM, which `StopSync` needs.
    jax.config.update("jax_enable_preemption_service", False)
    timeouts = {
        "heartbeat_timeout_seconds": HEARTBEAT_SECONDS,
        "shutdown_timeout_seconds": HEARTBEAT_SECONDS,
    }
    try:
        jax.distributed.initialize(address, d.processes, d.process, **timeouts)  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        raise UserError(f"distributed.coordinator {d.coordinator}: {first_line(error)}") from None


def is_rank0() -> bool:
    """Returns whether this process prints and writes files."""
    return jax.process_index() == 0


def barrier() -> None:
    """Waits up to a day for all processes. A collective operation between devices would time out
    sooner.
    """
    if jax.process_count() == 1:
        return
    from orbax.checkpoint.multihost import get_barrier_sync_fn

    get_barrier_sync_fn()(key=f"dantinox_{next(BARRIERS)}", timeout_ms=BARRIER_TIMEOUT_MS)


def broadcast_from_rank0(make: Callable[[], Any]) -> Any:
    """Calls `make()` on rank 0 and returns its result in all processes.

    Args:
      make: returns a JSON value; called only on rank 0.

    Raises:
      UserError: `make` raised this error on rank 0. All processes then raise it.
    """
    if jax.process_count() == 1:
        return make()
    from jax.experimental.multihost_utils import broadcast_one_to_all

    raised: UserError | None = None
    content = b""
    if is_rank0():
        try:
            content = json.dumps({"value": make()}).encode()
        except UserError as error:
            content = json.dumps({"error": str(error)}).encode()
            raised = error
    barrier()
    size = int(broadcast_one_to_all(np.int32(len(content))))
    received = broadcast_one_to_all(np.frombuffer(content.ljust(size), np.uint8))
    if raised is not None:
        raise raised
    message = json.loads(bytes(received.astype(np.uint8)))
    if "error" in message:
        raise UserError(message["error"])
    return message["value"]


def all_reduce_max(number: int) -> int:
    """Returns the maximum of a number over all processes; waits for all of them."""
    if jax.process_count() == 1:
        return number
    from jax.experimental.multihost_utils import process_allgather

    return int(np.max(process_allgather(np.int32(number))))


def fetch_to_host(tree: Any) -> Any:
    """Returns a tree of arrays as full NumPy arrays in every process. The arrays are gathered one
    at a time.
    """
    from jax.experimental.multihost_utils import process_allgather

    def to_numpy(array: jax.Array) -> np.ndarray:
        return np.asarray(
            array if array.is_fully_addressable else process_allgather(array, tiled=True)
        )

    return jax.tree.map(to_numpy, tree)


class StopSync:
    """Delivers a signal that one process received to all processes at the same step."""

    def __init__(self) -> None:
        self._pending: deque[jax.Array] = deque()

    def poll(self, signal: int | None) -> int | None:
        """Returns the signal that any process reported in the call `RESULT_LAG_STEPS` calls ago, or
        None.

        Every process calls it once per step.

        Args:
          signal: the signal that this process received, or None.
        """
        if jax.process_count() == 1:
            return signal
        mesh, largest = _process_mesh()
        sharding = NamedSharding(mesh, PartitionSpec("process"))
        own = np.array([signal or 0], np.int32)
        self._pending.append(largest(jax.make_array_from_process_local_data(sharding, own)))
        if len(self._pending) <= RESULT_LAG_STEPS:
            return None
        return int(np.asarray(self._pending.popleft())) or None


@lru_cache(maxsize=1)
def _process_mesh() -> tuple[Mesh, Callable[[jax.Array], jax.Array]]:
    """Returns a mesh with one device per process, and a function that computes the maximum over
    it.
    """
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([first[number] for number in sorted(first)]), ("process",))
    return mesh, jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))


class NullOutput:
    """Accepts any method call and does nothing: replaces the console and the logs on all ranks but
    0.
    """

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None

    def __enter__(self) -> "NullOutput":
        return self

    def __exit__(self, *_: object) -> None:
        return None
