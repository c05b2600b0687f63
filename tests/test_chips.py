"""The specifications of accelerators."""

import jax

from dantinox.chips import CHIPS, find_chip


def test_a_cpu_is_no_known_chip():
    assert find_chip(jax.devices()[0]) is None
    assert all(chip.flops > 1e14 and chip.bandwidth > 5e11 for chip in CHIPS.values())
