"""Shared helpers of the tests of this package."""

import numpy as np
import pytest

from dantinox.config import UserError


def sentence(call, *args, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def some_weights(seed: int = 0) -> dict:
    draw = np.random.default_rng(seed).standard_normal
    blocks = {f"blocks/{i}/qkv": draw((4, 2, 3, 5)).astype(np.float32) for i in range(2)}
    return {"embed": draw((7, 4)).astype(np.float32), **blocks, "norm_f": np.ones(4, np.float32)}
