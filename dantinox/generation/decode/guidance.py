"""Classifier-free guidance (Sanchez et al. 2023, arXiv 2306.17806): pairs of rows that read
different prompts.

The main row reads the prompt, and its guide row reads the negative prompt. The logits of the main
row are replaced by

    l = l_guide + g · (l_main − l_guide)

where l_main and l_guide are the log-probabilities of the two rows, and g is
`generation.guidance_scale`. The sampling steps and the draw follow. Both rows then read the token
of the main row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import Config
from dantinox.generation.decode.features import Feature


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowPairs(Feature):
    """The pairs of a batch, arrays `[B]`.

    The suffix of a name lists its axes: B rows, V vocabulary.

    Attributes:
      guide_B: the row whose log-probabilities guide each row; for a row without a guide, the row
        itself.
      main_B: the row whose token each row reads; for every row except a guide row, the row itself.
      scale_B: g, float32.
    """

    guide_B: Any
    main_B: Any
    scale_B: Any

    def logits(self, logits_BV: jax.Array) -> jax.Array:
        """Returns the logits after guidance. Rows without a guide keep their logits to the bit."""
        logprob_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32))
        guide_BV = logprob_BV[self.guide_B]
        guided_BV = guide_BV + self.scale_B[:, None] * (logprob_BV - guide_BV)
        has_guide_B = self.guide_B != jnp.arange(logits_BV.shape[0])
        return jnp.where(has_guide_B[:, None], guided_BV, logits_BV)

    def from_main_rows(self, x_B: jax.Array) -> jax.Array:
        """Returns the values of the rows, in which each guide row has that of its main row."""
        return x_B[self.main_B]

    @classmethod
    def row(cls, guide: int, main: int, scale: float = 1.0) -> "RowPairs":
        """Returns one row of a batch."""
        return cls(
            np.full(1, guide, np.int32), np.full(1, main, np.int32), np.full(1, scale, np.float32)
        )


def has_guidance(config: Config) -> bool:
    """Returns whether requests with these settings have guidance."""
    return config.generation.guidance_scale != 1


def row_pairs(config: Config, rows: Sequence[int]) -> list[RowPairs]:
    """Returns the pairs of a main row and its guide row.

    Args:
      rows: the place of the main row in the batch, and that of its guide row if it has one. Without
        a guide row, the main row is its own guide.
    """
    main = rows[0]
    scale = config.generation.guidance_scale
    if len(rows) == 1:
        return [RowPairs.row(main, main, scale)]  # no guide: the scale has no effect
    guide = rows[1]
    # The guide row is its own guide, and reads the tokens of the main row.
    return [RowPairs.row(guide, main, scale), RowPairs.row(guide, main)]
