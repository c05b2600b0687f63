"""Memory of a training run: required, available and used."""

import contextlib
import ctypes
import os
from dataclasses import dataclass
from typing import Any

import jax

from dantinox.config import Config, UserError
from dantinox.files import first_line
from dantinox.platform import release_free_memory
from dantinox.programs import available_bytes, memory_usage, tree_bytes
from dantinox.report import human_bytes, human_count

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h of glibc

# The memory that may be in use: `KEPT_GROWTH` times the plan, because plans are up to 22 % too low,
# and `KEPT_GB` more.
KEPT_GROWTH = 1.3
KEPT_GB = 0.25


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a training step, from the compiled program.

    Attributes:
      parameters: trained parameters.
      optimizer: optimizer state.
      peak: estimated peak of the step.
      available: free memory; None if the system does not report it.
      frozen: frozen weights, in addition to `parameters`.
      frozen_count: number of frozen weights.
      resident: memory that the process already uses for libraries and compiled programs (CPU only).
      teacher: frozen weights of a teacher.
    """

    parameters: int
    optimizer: int
    peak: int
    available: int | None
    frozen: int = 0
    frozen_count: int = 0
    resident: int = 0
    teacher: int = 0

    def line(self) -> str:
        """Returns parameters, optimizer state, estimated peak and free memory in one line."""
        # The peak below includes the memory that is already in use, so the free memory does too.
        free = (
            ""
            if self.available is None
            else f" of {human_bytes(self.available + self.resident)} free"
        )
        count = self.parameters // 4  # of four bytes each
        weights = f"weights {human_bytes(self.parameters)}"
        parameters = f"{human_count(count)} parameters"
        if self.frozen:
            parameters = (
                f"{human_count(count + self.frozen_count)} parameters, {human_count(count)}"
                " of them trained"
            )
            weights = f"weights {human_bytes(self.frozen)}, adapters {human_bytes(self.parameters)}"
        if self.teacher:
            weights += f", teacher {human_bytes(self.teacher)}"
        peak = human_bytes(self.peak + self.resident)
        return (
            f"{parameters}: {weights}, optimizer {human_bytes(self.optimizer)}, estimated peak"
            f" {peak}{free}"
        )


def plan_memory(
    compiled: Any, state: Any, frozen: Any = (), frozen_count: int = 0, teacher: Any = ()
) -> MemoryPlan:
    """Returns the memory plan of a compiled step; `state`, `frozen` and `teacher` are its
    arguments, as arrays or shapes.
    """
    device = jax.local_devices()[0]
    available = available_bytes(device)
    if available is not None and device.platform == "cpu":
        available //= jax.local_device_count()  # simulated devices share the memory
    resident = 0
    if device.platform == "cpu":
        release_free_memory()
        resident = int((used_gb() or 0) * 1e9)
    return MemoryPlan(
        parameters=tree_bytes(state.parameters),
        optimizer=tree_bytes(state.optimizer),
        peak=memory_usage(compiled).peak,
        available=available,
        frozen=tree_bytes(frozen),
        frozen_count=frozen_count,
        resident=resident,
        teacher=tree_bytes(teacher),
    )


def check_memory(plan: MemoryPlan, config: Config) -> None:
    """Raises a UserError that names the settings to lower if the plan does not fit."""
    if plan.available is not None and plan.peak > plan.available:
        needs = (
            f"this run needs about {plan.peak / 1e9:.2f} GB of memory, but only"
            f" {plan.available / 1e9:.2f} GB are free"
        )
        raise UserError(f"{needs}: {remedies(config)}")


def out_of_memory(error: BaseException, config: Config) -> UserError | None:
    """Returns a UserError for an out-of-memory error during the run; None for any other error."""
    if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
        return None
    return UserError(f"memory ran out ({first_line(error)}): {remedies(config)}")


def remedies(config: Config) -> str:
    """Returns the settings that reduce the memory of a run, with their current values."""
    t = config.training
    m = config.model
    suggestions = [
        f"raise training.grad_accum ({t.grad_accum})" if t.grad_accum < t.batch_size else "",
        f"lower training.batch_size ({t.batch_size})",
        f"lower model.max_context ({m.max_context})",
        "" if m.gradient_checkpointing else "set model.gradient_checkpointing",
        f"lower model.dim ({m.dim}) or model.num_blocks ({m.num_blocks})",
    ]
    return ", ".join(remedy for remedy in suggestions if remedy)


def keep_freed_memory() -> None:
    """Makes the C library keep the memory that XLA frees after a step on a CPU, so that the next
    step can reuse it.

    By default, glibc returns large blocks to the system immediately. The next step must allocate
    them again, and every page of 4 KiB causes a page fault: 140,000 of them take 120 ms in a step
    of 700 ms with 560 MB of temporaries. Blocks of more than 32 MB are only kept in the main arena,
    so all threads use it. JAX runs programs in the calling thread, because with its asynchronous
    dispatch a step often starts before the memory of the previous step is free.

    The options of the C library and of JAX apply to the whole process. They have no effect on
    threads and clients of JAX that already exist.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    with contextlib.suppress(OSError, AttributeError):  # not every C library has mallopt
        malloc_option = ctypes.CDLL(None).mallopt
        malloc_option(M_MMAP_MAX, 0)
        malloc_option(M_TRIM_THRESHOLD, -1)  # never trim
        malloc_option(M_ARENA_MAX, 1)


def limit_kept_memory(plan: MemoryPlan) -> None:
    """Releases the freed memory that the C library keeps (see `keep_freed_memory`) if the process
    uses much more than planned.

    Small allocations can fragment the block that held the temporaries of a step. Then the next step
    needs a second block. Without enough free memory for a second block, the kept memory is released
    after every step.
    """
    planned_gb = (plan.peak + plan.resident) / 1e9
    scarce = plan.available is not None and plan.available < 2 * plan.peak
    if scarce or (used_gb() or 0.0) > KEPT_GROWTH * planned_gb + KEPT_GB:
        release_free_memory()


def used_gb() -> float | None:
    """Returns the peak memory in use on a device of this process, in 10⁹ bytes.

    On a CPU it is the resident memory of this process.
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        return stats.get("peak_bytes_in_use", stats.get("bytes_in_use", 0)) / 1e9
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9
    except OSError:
        return None
