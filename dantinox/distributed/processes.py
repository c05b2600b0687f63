"""Processes of one training: start-up, barrier, broadcast and reduction between them.

All run the same loop on the same steps. Rank 0 alone prints and writes files; checkpoints are written by all. A decision
that all must share, such as a signal or the checkpoint to restore, is exchanged here.
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

HEARTBEAT = 8  # seconds without a heartbeat after which a process counts as dead, and the others end
TIMEOUT = 24 * 3600 * 1000  # milliseconds; the heartbeat notices a dead process long before
BARRIERS = itertools.count()
LAG = 2  # steps until a signal is delivered, so that no device waits for a process


def initialize_processes(config: Config) -> None:
    """Connects to the other processes where the settings name any; call it before anything asks for devices.

    Raises:
      UserError: they cannot be reached.
    """
    d = config.distributed
    if d.coordinator is None or jax.distributed.is_initialized():
        return
    address = None if d.coordinator == "auto" else d.coordinator  # None: jax asks around
    jax.config.update("jax_enable_preemption_service", False)  # else it would handle SIGTERM instead of `StopSync`
    dead = {"heartbeat_timeout_seconds": HEARTBEAT, "shutdown_timeout_seconds": HEARTBEAT}
    try:
        jax.distributed.initialize(address, d.processes, d.process, **dead)  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        raise UserError(f"distributed.coordinator {d.coordinator}: {first_line(error)}") from None


def is_rank0() -> bool:
    """Whether this process prints and writes files."""
    return jax.process_index() == 0


def barrier() -> None:
    """Waits for all processes, for as long as a day: collectives between devices time out sooner."""
    if jax.process_count() == 1:
        return
    from orbax.checkpoint.multihost import get_barrier_sync_fn

    get_barrier_sync_fn()(key=f"dantinox_{next(BARRIERS)}", timeout_ms=TIMEOUT)


def broadcast_from_rank0(make: Callable[[], Any]) -> Any:
    """The result of `make` in rank 0, a JSON value, in all processes. A `UserError` there is raised in all of them."""
    if jax.process_count() == 1:
        return make()
    from jax.experimental.multihost_utils import broadcast_one_to_all

    raised: UserError | None = None
    content = b""
    if is_rank0():
        try:
            content = json.dumps({"value": make()}).encode()
        except UserError as error:
            content, raised = json.dumps({"error": str(error)}).encode(), error
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
    """The largest of the processes' numbers; waits for all."""
    if jax.process_count() == 1:
        return number
    from jax.experimental.multihost_utils import process_allgather

    return int(np.max(process_allgather(np.int32(number))))


def fetch_to_host(tree: Any) -> Any:
    """Arrays as NumPy arrays in every process, one after the other, wherever they stand."""
    from jax.experimental.multihost_utils import process_allgather

    def whole(array: jax.Array) -> np.ndarray:
        return np.asarray(array if array.is_fully_addressable else process_allgather(array, tiled=True))

    return jax.tree.map(whole, tree)


class StopSync:
    """A signal that one process received, delivered to all processes at the same step."""

    def __init__(self) -> None:
        self._pending: deque[jax.Array] = deque()

    def poll(self, signal: int | None) -> int | None:
        """The signal that some process had received `LAG` calls ago; every process calls this once a step."""
        if jax.process_count() == 1:
            return signal
        mesh, largest = _process_mesh()
        sharding = NamedSharding(mesh, PartitionSpec("process"))
        own = np.array([signal or 0], np.int32)
        self._pending.append(largest(jax.make_array_from_process_local_data(sharding, own)))
        if len(self._pending) <= LAG:
            return None
        return int(np.asarray(self._pending.popleft())) or None


@lru_cache(maxsize=1)
def _process_mesh() -> tuple[Mesh, Callable[[jax.Array], jax.Array]]:
    """A device of every process, and the largest of their numbers."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([first[number] for number in sorted(first)]), ("process",))
    return mesh, jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))


class NullOutput:
    """Takes every call and does nothing: the console and the logs of processes that are not the first."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None

    def __enter__(self) -> "NullOutput":
        return self

    def __exit__(self, *_: object) -> None:
        return None
