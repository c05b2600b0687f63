"""Traces a chain of steps as one program; single calls would compile several programs each."""

import jax

from dantinox.sampling import trace

traced = jax.jit(
    lambda logits_BV, params, state: dict(trace(logits_BV, params, state)[0])
)  # maps each step to the logits [B, V] after it
