"""`UncachedStepper`: decoding without a cache, where each step computes the whole text
(`generation.use_cache: false`).
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from dantinox.generation.decode.cache_plan import CachePlan, Caches
from dantinox.generation.decode.features import Constants, Features, RowTokens, find
from dantinox.generation.decode.generate_toks import (
    DecodeState,
    StepLogits,
    Stepper,
    attention_metrics,
    make_probe,
    prefill_prompts,
)
from dantinox.generation.decode.prepared_model import dequantize
from dantinox.model import Transformer
from dantinox.sampling import SamplingParams


@dataclass(frozen=True)
class UncachedStepper(Stepper):
    """Decodes one token of each row per step from all tokens before it."""

    def features(
        self, tokens_BS: np.ndarray, length_B: np.ndarray, width_B: np.ndarray
    ) -> Features:
        return (RowTokens(tokens_BS),)

    def prefill(
        self,
        model: Transformer,
        prompt: tuple[Array, Array],
        plan: CachePlan,
        features: Features,
        constants: Constants,
        *,
        echo: bool,
    ) -> tuple[Array | None, Caches]:
        if not echo:
            return None, ()
        x_PTD, _ = prefill_prompts(model, prompt, None, features, constants, keep_states=True)
        return x_PTD, ()

    def weights(self, model: Transformer, rows: int) -> Transformer:
        return dequantize(model)  # each step multiplies all tokens of the rows, not one per row

    def forward(
        self, model: Transformer, caches: Caches, state: DecodeState, params: SamplingParams
    ) -> tuple[StepLogits, Caches]:
        tokens_BS = find(state.features, RowTokens).tokens_BS
        B, S = tokens_BS.shape
        index_S = jnp.arange(S)
        positions_BS = jnp.where(index_S <= state.position_B[:, None], index_S, -1)
        x_BSD, _, aux = model.hidden(
            tokens_BS, positions_BS, probe=make_probe(params.uses_attention)
        )
        return (
            StepLogits(
                model.logits(x_BSD[jnp.arange(B), state.position_B]),
                attention_metrics(params.uses_attention, aux),
            ),
            caches,
        )
