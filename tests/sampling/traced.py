"""The steps of a chain as one program: done one by one, each would be compiled as several."""

import jax

from dantinox.sampling import trace

traced = jax.jit(lambda logits_BV, params, state: dict(trace(logits_BV, params, state)[0]))  # step → logits [B, V] behind it
