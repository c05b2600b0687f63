"""Edge cases of parameters and state: a second history, numbers beyond float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traced import traced

from dantinox.config import UserError
from dantinox.sampling import SamplingParams, init_state, process_logits


def test_the_state_of_another_history_does_not_recompile():
    compiled = []

    def listen(event, duration, **_):
        compiled.append(event) if event == "/jax/core/compile/backend_compile_duration" else None

    params = SamplingParams.build(
        {"dry_multiplier": 1.0, "dry_breakers": [3], "no_repeat_ngram": 2, "seed": 0}
    )

    def start(text):
        tokens_1T = jnp.asarray([text])
        return init_state(params, tokens_1T, jnp.ones_like(tokens_1T, bool), 9, 16)

    start([1, 2, 1, 2])
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        state = start([5, 5, 5, 5])
        assert compiled == []
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert state.repeats[0].tolist()[:4] == [0, 1, 2, 3]


def test_a_bias_beyond_float32_is_clipped_and_bans_nothing():
    """Only null and -inf ban; otherwise the only allowed token could be removed."""
    logits_1V = np.float32([[3, 1, 2]])
    params = SamplingParams.build(
        {"logit_bias": {"1": -1e39, "2": 1e300}, "allowed_tokens": [1], "seed": 0}
    )
    start = jax.jit(
        lambda params: init_state(params, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool), 3)
    )
    steps = jax.tree.map(np.asarray, traced(logits_1V, params, start(params)))
    named = process_logits(
        logits_1V, [{"name": "logit_bias", "ids": [1, 2], "values": [-1e38, 1e38]}]
    )
    largest = np.finfo(np.float32).max
    np.testing.assert_array_equal(steps["logit_bias"], [[3.0, -largest, largest]])
    np.testing.assert_array_equal(np.isfinite(steps["logit_bias"]), np.isfinite(named))
    np.testing.assert_array_equal(steps["allowed_tokens"] > -np.inf, [[False, True, False]])


def test_digits_of_other_scripts_are_text_and_not_ids():
    for key, value in (("banned_tokens", ["٣"]), ("logit_bias", {"３": 1.0})):
        with pytest.raises(UserError, match=f"{key} must hold token ids if there is no tokenizer"):
            SamplingParams.build({key: value, "greedy": True})
