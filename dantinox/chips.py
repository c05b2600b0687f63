"""The published specifications of accelerators."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Chip:
    """The published specifications of an accelerator.

    Attributes:
      platform: jax's platform name, `gpu` or `tpu`.
      kind: jax's `device_kind`, the name that the driver reports.
      flops: floating-point operations per second in dense bfloat16 matmuls.
      memory: bytes of memory.
      bandwidth: memory bandwidth in bytes per second.
      link: bytes per second that all links of the chip together can send. Manufacturers publish the
        sum of both directions; this is half of the published number.
      source: the publication that contains the numbers.
    """

    platform: str
    kind: str
    flops: float
    memory: int
    bandwidth: float
    link: float
    source: str


# A TPU's memory is published in units of 2³⁰ bytes. Programs can use a little less: 15.75 of the 16
# units of a v5e.
CHIPS = {
    "h100": Chip(
        platform="gpu",
        kind="NVIDIA H100 80GB HBM3",
        flops=989.4e12,
        memory=80 * 10**9,
        bandwidth=3.35e12,
        link=450e9,
        source="NVIDIA H100 Tensor Core GPU data sheet, H100 SXM",
    ),
    "v5e": Chip(
        platform="tpu",
        kind="TPU v5 lite",
        flops=197e12,
        memory=16 << 30,
        bandwidth=819e9,
        link=200e9,
        source="Google Cloud TPU documentation, TPU v5e",
    ),
    "v5p": Chip(
        platform="tpu",
        kind="TPU v5",
        flops=459e12,
        memory=95 << 30,
        bandwidth=2765e9,
        link=600e9,
        source="Google Cloud TPU documentation, TPU v5p",
    ),
    "v6e": Chip(
        platform="tpu",
        kind="TPU v6 lite",
        flops=918e12,
        memory=32 << 30,
        bandwidth=1640e9,
        link=400e9,
        source="Google Cloud TPU documentation, TPU v6e",
    ),
}


def find_chip(device: jax.Device) -> Chip | None:
    """Returns the specifications of a device, or None if `CHIPS` does not contain it."""
    return next((chip for chip in CHIPS.values() if chip.kind == device.device_kind), None)
