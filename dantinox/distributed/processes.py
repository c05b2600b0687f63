"""Several processes that train together: how they find each other, and what they must agree on.

All of them run the same loop on the same steps. The first one alone talks and writes; checkpoints are written by all. Whatever
one of them decides that another must do too, a signal or a checkpoint to go back to, passes through here.
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

HEARTBEAT = 8  # seconds without a sign of life after which a process counts as dead, and the others end
PATIENCE = 24 * 3600 * 1000  # milliseconds; that a process is dead is noticed long before
MEETINGS = itertools.count()
LAG = 2  # steps that a signal travels, in which the devices need not wait for the processes


def join(config: Config) -> None:
    """Meets the other processes where the settings speak of any; before anything asks for devices.

    Raises:
      UserError: they are not found.
    """
    d = config.distributed
    if d.coordinator is None or jax.distributed.is_initialized():
        return
    address = None if d.coordinator == "auto" else d.coordinator  # None: jax asks around
    jax.config.update(
        "jax_enable_preemption_service", False
    )  # it would take SIGTERM for itself, which is heard by `StopTogether`
    dead = {"heartbeat_timeout_seconds": HEARTBEAT, "shutdown_timeout_seconds": HEARTBEAT}
    try:
        jax.distributed.initialize(address, d.processes, d.process, **dead)  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        raise UserError(f"distributed.coordinator {d.coordinator}: {first_line(error)}") from None


def is_first() -> bool:
    """Whether this process talks and writes."""
    return jax.process_index() == 0


def meet() -> None:
    """Waits until all processes are here, however long one of them works alone: what passes between devices gives up sooner."""
    if jax.process_count() == 1:
        return
    from orbax.checkpoint.multihost import get_barrier_sync_fn

    get_barrier_sync_fn()(key=f"dantinox_{next(MEETINGS)}", timeout_ms=PATIENCE)


def from_first(make: Callable[[], Any]) -> Any:
    """What `make` gives in the first process, to all: something that JSON holds. What goes wrong there goes wrong for all."""
    if jax.process_count() == 1:
        return make()
    from jax.experimental.multihost_utils import broadcast_one_to_all

    raised: UserError | None = None
    content = b""
    if is_first():
        try:
            content = json.dumps({"value": make()}).encode()
        except UserError as error:
            content, raised = json.dumps({"error": str(error)}).encode(), error
    meet()
    size = int(broadcast_one_to_all(np.int32(len(content))))
    told = broadcast_one_to_all(np.frombuffer(content.ljust(size), np.uint8))
    if raised is not None:
        raise raised
    said = json.loads(bytes(told.astype(np.uint8)))
    if "error" in said:
        raise UserError(said["error"])
    return said["value"]


def agreed(number: int) -> int:
    """The largest of the processes' numbers; waits for all."""
    if jax.process_count() == 1:
        return number
    from jax.experimental.multihost_utils import process_allgather

    return int(np.max(process_allgather(np.int32(number))))


def on_host(tree: Any) -> Any:
    """Arrays as NumPy arrays in every process, one after the other, wherever they stand."""
    from jax.experimental.multihost_utils import process_allgather

    def whole(array: jax.Array) -> np.ndarray:
        return np.asarray(array if array.is_fully_addressable else process_allgather(array, tiled=True))

    return jax.tree.map(whole, tree)


class StopTogether:
    """Signals that one process has heard, heard by all at the same step."""

    def __init__(self) -> None:
        self._pending: deque[jax.Array] = deque()

    def heard(self, signal: int | None) -> int | None:
        """The signal that some process had heard `LAG` calls ago; every process calls this once a step."""
        if jax.process_count() == 1:
            return signal
        mesh, largest = _one_each()
        sharding = NamedSharding(mesh, PartitionSpec("process"))
        own = np.array([signal or 0], np.int32)
        self._pending.append(largest(jax.make_array_from_process_local_data(sharding, own)))
        if len(self._pending) <= LAG:
            return None
        return int(np.asarray(self._pending.popleft())) or None


@lru_cache(maxsize=1)
def _one_each() -> tuple[Mesh, Callable[[jax.Array], jax.Array]]:
    """A device of every process, and the largest of their numbers."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([first[number] for number in sorted(first)]), ("process",))
    return mesh, jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))


class Silent:
    """Takes every call and does nothing: the console and the logs of processes that are not the first."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_: object) -> None:
        return None
