"""Matrix multiplications in full float32 on every device: results are compared to 1e-5 and less."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield
