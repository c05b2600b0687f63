"""`AllowedTokens`: which tokens the rows of a batch may get next, chosen on the host before each
chunk.

The programs read the masks as `SamplingParams.allowed_bits`, where `sample` applies them.
"""

from typing import Any

import jax
import numpy as np

from dantinox.sampling.chain import ALL_ALLOWED, all_allowed


class AllowedTokens:
    """The masks of all rows: on the host, where rows change, and a copy on the device."""

    def __init__(self, rows: int, vocab_size: int):
        """Allows every row all tokens."""
        self._bits_BW = all_allowed(rows, vocab_size)
        self._on_device: jax.Array | None = None
        self._restricted = set[int]()

    def set(self, row: int, bits_W: np.ndarray | None) -> None:
        """Sets the mask of a row, uint32 `[⌈V/32⌉]`; None allows all tokens."""
        if bits_W is None and row not in self._restricted:
            return
        if self._on_device is not None:
            self._bits_BW = self._bits_BW.copy()  # the device may read the memory of the old array
            self._on_device = None
        self._bits_BW[row] = ALL_ALLOWED if bits_W is None else bits_W
        if bits_W is None:
            self._restricted.discard(row)
        else:
            self._restricted.add(row)

    def params(self) -> dict[str, Any]:
        """Returns the masks as sampling parameters, by name; copies them if a row has changed."""
        if self._on_device is None:
            self._on_device = jax.device_put(self._bits_BW)
        return {"allowed_bits": self._on_device}
