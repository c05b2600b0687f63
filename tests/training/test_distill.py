"""Distillation: the divergence and its gradient against NumPy in float64, chunks, the teacher of a run, exact resume."""

import jax
import numpy as np
import pytest

from dantinox.config.distill_settings import DistillSection
from dantinox.training.distillation import token_divergence


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def reference(student, teacher, settings):
    """Returns the divergence of each token and its gradient with respect to the student's logits, in float64.

    Over the bins b of the tokens, forward: ∂/∂s_v = τ (q_v − p_b q_v / q_b). Reverse, with r_b = ln(q_b / p_b) and the
    divergence K: ∂/∂s_v = τ q_v (r_b − K).
    """
    tau = settings.temperature
    student, teacher = np.asarray(student, np.float64), np.asarray(teacher, np.float64)
    q, p = softmax(student / tau), softmax(teacher / tau)
    N, V = q.shape
    bins = np.tile(np.arange(V), (N, 1))
    if settings.top_k is not None:
        order = np.argsort(-teacher, axis=-1)
        bins = np.full((N, V), settings.top_k)
        np.put_along_axis(bins, order[:, : settings.top_k], np.arange(settings.top_k), -1)
    sums = np.eye(bins.max() + 1)[bins]  # [N, V, bins]
    in_bin = lambda x: np.einsum("nv,nvb,nwb->nw", x, sums, sums)  # for each token, the mass of its bin
    q_bins, p_bins = np.einsum("nv,nvb->nb", q, sums), np.einsum("nv,nvb->nb", p, sums)
    if settings.divergence == "forward_kl":
        kl = (p_bins * np.log(p_bins / q_bins)).sum(-1)
        gradient = q - q * in_bin(p) / in_bin(q)
    else:
        kl = (q_bins * np.log(q_bins / p_bins)).sum(-1)
        gradient = q * (np.log(in_bin(q) / in_bin(p)) - kl[:, None])
    return tau**2 * kl, tau * gradient


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 3, 7, 12, 50])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_divergence_and_gradient_equal_float64(divergence, top_k, temperature):
    settings = DistillSection(teacher="x", divergence=divergence, top_k=top_k, temperature=temperature)
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(0, 3, (2, 9, 12)).astype(np.float32)
    compute = jax.jit(
        lambda s, t: (token_divergence(s, t, settings), jax.grad(lambda s: token_divergence(s, t, settings).sum())(s))
    )
    kl, gradient = compute(student, teacher)
    top_k = None if top_k is None or top_k >= 12 else top_k
    expected = reference(student, teacher, settings.model_copy(update={"top_k": top_k}))
    np.testing.assert_allclose(kl, expected[0], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], atol=1e-5)
    assert (expected[0] > 0).all()
