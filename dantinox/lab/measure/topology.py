"""Target devices of a plan: this machine, or a TPU or GPU topology without the hardware."""

import contextlib
import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from dantinox.files import UserError, escape_name, first_line, install_command
from dantinox.programs import CHIPS, Chip, available_bytes, compile_program, find_chip

TOPOLOGY_NAMES = ("cpu", *(f"{chip.platform}:{name}" for name, chip in CHIPS.items()))
COMPILERS = {"gpu": ("jax_cuda12_plugin", "jax_cuda13_plugin"), "tpu": ("libtpu",)}
GPU_COUNTS = tuple(map(str, range(1, 9)))  # of GPUs connected by NVLink
CUDNN = 91000
CAPABILITY = (9, 0)  # cuDNN 9.10.0 and an H100, as in `H100`
H100 = Path(__file__).with_name("h100.txtpb")
# Autotuning runs kernels on the device. Without a device, XLA's heuristics choose the kernels.
OPTIONS = {"gpu": {"xla_gpu_autotune_level": 0}}
# Without these variables, libtpu searches the network for its machine, prints long errors and
# allows one process at a time, and JAX searches for NVIDIA's libraries.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


@dataclass(frozen=True)
class Topology:
    """The devices that programs are compiled for.

    Attributes:
      platform: a name of `dantinox.platform`.
      devices: the devices that share a training run.
      memory: bytes of a chip, or the free bytes of this machine; None if unknown.
      chip: published figures of the chip; None if there are none.
      options: compiler options.
    """

    name: str
    platform: Literal["cpu", "gpu", "tpu"]
    devices: list[jax.Device]
    memory: int | None
    chip: Chip | None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> jax.Device:
        """The chip that generation runs on."""
        return self.devices[0]

    @contextlib.contextmanager
    def emulated(self) -> Iterator[None]:
        """Makes JAX's cuDNN attention assume an H100 inside the block.

        The attention function queries the device when it is traced and when it is lowered.
        """
        if self.platform != "gpu" or self.device in jax.devices():
            yield
            return
        with _emulate_h100():
            yield

    def place(self, tree: Any) -> Any:
        """Returns the shapes of a tree of arrays or shapes, placed on `device`."""
        sharding = SingleDeviceSharding(self.device)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    def compile(self, traced: Any, options: Mapping[str, Any]) -> Any:
        """Compiles a program that was traced with arguments on these devices, with additional
        compiler options.
        """
        return compile_program(traced.lower(), {**self.options, **options})


def find_topology(name: str | None = None) -> Topology:
    """Returns the topology of a name: `cpu`, `gpu:h100`, `gpu:h100:8`, `tpu:v5e`, `tpu:v5e:4x4`;
    None: this machine.

    Raises:
      UserError: the name is unknown, or its compiler is not installed.
    """
    if name is None or name == "cpu":
        devices = jax.devices(name)
        platform: Any = "gpu" if devices[0].platform == "cuda" else devices[0].platform
        memory = available_bytes(devices[0])
        if platform == "cpu" and memory is not None:
            memory //= len(devices)  # simulated devices share the memory
        return Topology(name or platform, platform, devices, memory, find_chip(devices[0]))
    found = re.fullmatch(r"(gpu|tpu):(\w+)(?::(\d+(?:x\d+)*))?", name)
    family, model, shape = found.groups() if found else ("", "", None)
    if f"{family}:{model}" not in TOPOLOGY_NAMES or (
        shape and family == "gpu" and shape not in GPU_COUNTS
    ):
        raise UserError(
            f"unknown topology {escape_name(name)}: use one of {', '.join(TOPOLOGY_NAMES)}; for a"
            f" GPU, add a count of up to {GPU_COUNTS[-1]}, as in gpu:h100:8; for a TPU, add a"
            " shape, as in tpu:v5e:4x4"
        )
    if not any(map(find_spec, COMPILERS[family])):
        where = "in a separate environment" + (
            " of Python 3.12 or newer" if family == "tpu" else ""
        )
        raise UserError(
            f"the compiler for {name} is not installed: {where} and {install_command('aot')}"
        )
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    if family == "gpu":
        lines = H100.read_text(encoding="ascii").splitlines()
        target = "\n".join(line for line in lines if not line.startswith("#"))
        devices = topologies.get_topology_desc(
            "h100", "cuda", target_config=target, topology=f"1x1x{shape or 1}"
        ).devices
    else:
        devices = _tpu_devices(model, shape or ("1x1x1" if model == "v5p" else "1x1"))
    chip = CHIPS[model]
    return Topology(name, family, list(devices), chip.memory, chip, OPTIONS.get(family, {}))  # type: ignore[arg-type]


# A private module of JAX: only `_emulate_h100` uses and patches it.
CUDNN_MODULE = "jax._src.cudnn.fused_attention_stablehlo"


@contextlib.contextmanager
def _emulate_h100() -> Iterator[None]:
    """Patches the functions with which JAX's cuDNN attention queries the device, to answer like an
    H100 with `CUDNN`.
    """
    answers: dict[str, Callable[..., Any]] = {
        "check_cudnn_version": lambda: CUDNN,
        "check_compute_capability": lambda least: tuple(map(int, least.split("."))) <= CAPABILITY,
        "is_cuda_compute_capability_equal": (
            lambda capability: tuple(map(int, capability.split("."))) == CAPABILITY
        ),
    }
    try:
        module = importlib.import_module(CUDNN_MODULE)
        originals = {name: getattr(module, name) for name in answers}
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"jax {jax.__version__} cannot compile for a GPU without the device:"
            f" {first_line(error)}"
        ) from None
    vars(module).update(answers)
    try:
        yield
    finally:
        vars(module).update(originals)


def _tpu_devices(model: str, shape: str) -> list[jax.Device]:
    """Returns the devices of a TPU topology such as `v5e` of the shape `4x4`."""
    # A host has four chips or more unless this option limits it to one.
    one_chip = (
        {"chips_per_host_bounds": (1, 1, 1)} if set(shape) == {"1", "x"} or shape == "1" else {}
    )
    try:
        return topologies.get_topology_desc(f"{model}:{shape}", "tpu", **one_chip).devices
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"unknown topology tpu:{model}:{shape}: {first_line(error)}") from None
