"""Classifier-free guidance (Sanchez et al. 2023, arXiv 2306.17806): pairs of rows that read different prompts.

The main row reads the prompt, and its guide row reads the negative prompt. The logits of the main row are replaced by

    l = l_guide + g · (l_main − l_guide)

where l_main and l_guide are the log-probabilities of the two rows, and g is `generation.guidance_scale`. The sampling steps and
the draw follow. Both rows then read the token of the main row.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowPairs:
    """The pairs of a batch, arrays `[B]`.

    Attributes:
      guide_B: the row whose log-probabilities guide each row; for a row without a guide, the row itself.
      main_B: the row whose token each row reads; for every row except a guide row, the row itself.
      scale_B: g, float32.
    """

    guide_B: Any
    main_B: Any
    scale_B: Any

    @classmethod
    def alone(cls, count: int) -> "RowPairs":
        """Returns rows without guides."""
        rows_B = np.arange(count, dtype=np.int32)
        return cls(rows_B, rows_B, np.ones(count, np.float32))

    @classmethod
    def halves(cls, scale_R: np.ndarray) -> "RowPairs":
        """Returns R main rows, followed by their R guide rows in the same order."""
        R = len(scale_R)
        rows_B = np.arange(2 * R, dtype=np.int32)
        scale_B = np.concatenate([scale_R, np.ones(R)]).astype(np.float32)
        return cls(np.where(rows_B < R, rows_B + R, rows_B), rows_B % R, scale_B)

    @classmethod
    def row(cls, guide: int, main: int, scale: float = 1.0) -> "RowPairs":
        """Returns one row of a batch."""
        return cls(np.full(1, guide, np.int32), np.full(1, main, np.int32), np.full(1, scale, np.float32))


def guide_logits(logits_BV: jax.Array, pairs: RowPairs) -> jax.Array:
    """Returns the logits after guidance. Rows without a guide keep their logits to the bit."""
    logprob_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32))
    guide_BV = logprob_BV[pairs.guide_B]
    guided_BV = guide_BV + pairs.scale_B[:, None] * (logprob_BV - guide_BV)
    has_guide_B = pairs.guide_B != jnp.arange(logits_BV.shape[0])
    return jnp.where(has_guide_B[:, None], guided_BV, logits_BV)
