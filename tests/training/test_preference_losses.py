"""IPO, KTO, ORPO, SimPO and smoothed DPO: losses, gradients and metrics against NumPy in float64,
and gradient accumulation.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dantinox.model.parameters import abstract_model
from dantinox.text import LabeledCompletions, Preferences
from dantinox.training.objective import OBJECTIVES
from dantinox.training.preference_objectives import MAX_MEAN_LOGPROB, kl_sums, orpo
from dantinox.training.step import TrainStep

from .small import VOCABULARY, random_weights, small_config

P, T = 6, 8
EXAMPLES = P - 1  # the last example has no counted target
START = {"training.init_from": "runs/x", "model.dropout_rate": 0.0, "model.num_blocks": 1}
CASES = {
    "dpo": {"training.label_smoothing": 0.2, "training.preference_beta": 0.3},
    "ipo": {},
    "kto": {
        "training.preference_beta": 0.4,
        "training.kto_desirable_weight": 1.3,
        "training.kto_undesirable_weight": 0.6,
    },
    "orpo": {"training.preference_beta": 0.7},
    "simpo": {"training.simpo_margin": 0.8},
}


def config_of(objective, **changes):
    return small_config(**{"training.objective": objective} | START | CASES[objective] | changes)


CONFIGS = {objective: config_of(objective) for objective in CASES}


@pytest.fixture(scope="module")
def batches():
    """Preference pairs and labeled completions with the same tokens. The KL divergence of the
    latter is filled in.
    """
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, VOCABULARY, (2, P, 2, T)).astype(np.int32)
    mask = (rng.random((P, 2, T)) < 0.6).astype(np.float32)
    mask[-1] = 0
    reference = rng.normal(-9, 1, (P, 2)).astype(np.float32)
    pairs = Preferences(tokens, targets, np.zeros_like(tokens), mask, reference)
    desirable = np.array([True, False, False, True, False, True])
    return pairs, LabeledCompletions(*pairs, desirable, np.full(P, 1.7, np.float32))


def batch_of(objective, batches):
    return batches[objective == "kto"]


@pytest.fixture(scope="module")
def computed(batches):
    """Returns the logits with their vector-Jacobian product, and the sums and gradients of all
    objectives.
    """
    architecture = CONFIGS["ipo"].architecture(VOCABULARY)
    graph, state = nnx.split(abstract_model(architecture)[0](random_weights(architecture)))
    rows = batches[0].rows()

    def losses(state, objective):
        model = nnx.merge(graph, state)
        sums = OBJECTIVES[objective].losses(
            model, batch_of(objective, batches), CONFIGS[objective], None
        )
        return sums.nats, sums

    gradients = jax.jit(
        lambda state: {name: jax.grad(losses, has_aux=True)(state, name) for name in CASES}
    )(state)
    logits, back = jax.vjp(
        jax.jit(lambda s: nnx.merge(graph, s)(rows.tokens_BT, jnp.arange(T)[None])[0]), state
    )
    kl = jax.jit(lambda state: kl_sums(nnx.merge(graph, state), batches[1]))(state)
    return np.asarray(logits, np.float64), back, gradients, np.asarray(kl)


def probabilities(logits, pairs):
    """Returns p `[P, 2, T, V]` and ln p of the answers `[P, 2]`."""
    p = np.exp(logits.reshape(P, 2, T, VOCABULARY))
    p /= p.sum(-1, keepdims=True)
    of_target = np.take_along_axis(np.log(p), pairs.targets_P2T[..., None], -1)[..., 0]
    return p, (pairs.mask_P2T * of_target).sum(-1)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def expected_losses(objective, logp, batch):
    """Returns the losses and the reward margins (kto: the rewards) of the examples, from the
    formulas of the papers.
    """
    logp, lengths, gain = (
        logp[:EXAMPLES],
        batch.mask_P2T[:EXAMPLES].sum(-1),
        (logp - batch.reference_P2)[:EXAMPLES],
    )
    if objective == "dpo":
        margin = 0.3 * (gain[:, 0] - gain[:, 1])
        return -0.8 * np.log(sigmoid(margin)) - 0.2 * np.log(sigmoid(-margin)), margin
    if objective == "ipo":
        h = gain[:, 0] - gain[:, 1]
        return (h - 1 / (2 * 0.1)) ** 2, 0.1 * h
    if objective == "kto":
        value = np.where(
            batch.desirable_P[:EXAMPLES],
            1.3 * sigmoid(0.4 * (gain[:, 0] - 1.7)),
            0.6 * sigmoid(0.4 * (1.7 - gain[:, 0])),
        )
        return np.where(batch.desirable_P[:EXAMPLES], 1.3, 0.6) - value, 0.4 * gain[:, 0]
    mean = logp / lengths
    if objective == "orpo":
        odds = np.exp(mean) / (1 - np.exp(mean))
        ratio = np.log(odds[:, 0] / odds[:, 1])
        return -mean[:, 0] - 0.7 * np.log(sigmoid(ratio)), ratio
    margin = 2.0 * (mean[:, 0] - mean[:, 1])
    return -np.log(sigmoid(margin - 0.8)), margin


@pytest.mark.parametrize("objective", CASES)
def test_loss_and_metrics_equal_float64(objective, batches, computed):
    batch, sums = batch_of(objective, batches), computed[2][objective][1]
    losses, rewards = expected_losses(objective, probabilities(computed[0], batch)[1], batch)
    expected = [rewards.sum(), (rewards > 0).sum()]
    if objective == "kto":
        good = batch.desirable_P[:EXAMPLES]
        expected = [
            rewards[good].sum(),
            rewards[~good].sum(),
            good.sum(),
            (~good).sum(),
            1.7 * EXAMPLES,
        ]
    np.testing.assert_allclose([sums.nats, *sums.metrics], [losses.sum(), *expected], rtol=1e-5)
    assert float(sums.num_targets) == float(OBJECTIVES[objective].divisor(batch)) == EXAMPLES


@pytest.mark.parametrize("objective", CASES)
def test_gradient_equals_float64(objective, batches, computed):
    """The derivative by the log-probabilities is a central difference in float64; the chain rule
    does the rest.
    """
    batch, (logits, back, gradients, _) = batch_of(objective, batches), computed
    p, logp = probabilities(logits, batch)
    of_logp, step = np.zeros((P, 2)), 1e-5
    for place in np.ndindex(EXAMPLES, 2):
        move = np.zeros((P, 2))
        move[place] = step
        above, below = (
            expected_losses(objective, logp + sign * move, batch)[0].sum() for sign in (1, -1)
        )
        of_logp[place] = (above - below) / (2 * step)
    assert np.abs(of_logp[:EXAMPLES, 0]).min() > 1e-3 and (objective == "kto") == (
        not of_logp[:, 1].any()
    )
    of_logits = (np.eye(VOCABULARY)[batch.targets_P2T] - p) * (batch.mask_P2T * of_logp[..., None])[
        ..., None
    ]
    (expected,) = back(of_logits.reshape(logits.shape).astype(np.float32))
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for one, other in zip(
        jax.tree.leaves(gradients[objective][0]), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-5 * largest)


def test_kl_is_the_mean_gain_of_mismatched_completions(batches, computed):
    logp = probabilities(computed[0], batches[1])[1]
    np.testing.assert_allclose(
        computed[3], [(logp - batches[1].reference_P2)[:EXAMPLES, 1].sum(), EXAMPLES], rtol=1e-5
    )


def test_orpo_is_finite_for_certain_and_impossible_answers(batches):
    @jax.jit
    @jax.vmap
    def losses_and_gradients(logp_P2):
        losses, back = jax.vjp(
            lambda logp_P2: orpo(logp_P2, batches[0], CONFIGS["orpo"])[0], logp_P2
        )
        return losses, back(jnp.ones(P))[0]

    logp_3P2 = np.float32([[[logp, -3.0]] * P for logp in (0.0, -1e-9, -1e4)])
    lengths = batches[0].mask_P2T[:EXAMPLES].sum(-1)
    for logp_P2, losses, of_logp in zip(logp_3P2, *losses_and_gradients(logp_3P2), strict=True):
        assert np.isfinite(losses).all() and np.isfinite(of_logp).all(), logp_P2
        mean = np.minimum(np.asarray(logp_P2, np.float64)[:EXAMPLES] / lengths, MAX_MEAN_LOGPROB)
        odds = mean - np.log(-np.expm1(mean))
        expected = -mean[:, 0] + 0.7 * np.logaddexp(0, odds[:, 1] - odds[:, 0])
        np.testing.assert_allclose(
            losses[:EXAMPLES], expected, rtol=1e-5, atol=1e-7, err_msg=str(logp_P2[0])
        )


def stepped(config, *batches):
    """Returns the metrics of the first step on each batch, and the parameters after it."""
    step = TrainStep(config, config.architecture(VOCABULARY), 3)
    weights = random_weights(step.model)
    results = [step.program(step.initial_state(weights), batch) for batch in batches]
    return [(metrics, state.parameters) for state, metrics in results]


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    ["kto", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "kto")],
)
def test_accumulation_changes_nothing(objective, batches):
    """The KL divergence is that of the whole batch, also if the parts of the batch are read one
    after the other.
    """
    given = {
        "training.batch_size": P,
        "training.optimizer": "sgd",
        "training.warmup_steps": 0,
        "training.lr": 0.1,
    }
    given |= {"training.grad_clip": 0.0, "training.weight_decay": 0.0}
    batch = batch_of(objective, batches)
    variants = [batch]
    if objective == "kto":  # the program replaces the given divergence
        for lowest in (-30, -35):
            reference = np.stack(
                [batch.reference_P2[:, 0], np.linspace(lowest, lowest + 8, P, dtype=np.float32)],
                axis=1,
            )
            variants.append(
                batch._replace(reference_P2=reference, kl_P=np.full(P, 99.0, np.float32))
            )
    whole, accumulated = (
        stepped(config_of(objective, **given | {"training.grad_accum": parts}), *variants)
        for parts in (1, 3)
    )
    for (one, weights), (other, others) in zip(whole, accumulated, strict=True):
        np.testing.assert_allclose(
            [one.loss, one.grad_norm], [other.loss, other.grad_norm], rtol=1e-5
        )
        np.testing.assert_allclose(one.metrics, other.metrics, rtol=1e-5)
        for name in weights:
            np.testing.assert_allclose(
                weights[name], others[name], rtol=0, atol=1e-6 * np.abs(weights[name]).max()
            )
    if objective == "kto":
        negative, positive, higher = (float(metrics.metrics[-1]) for metrics, _ in whole)
        assert negative == 0 and positive > 1
        np.testing.assert_allclose(higher - positive, 5, rtol=1e-5)


def test_metrics_of_absent_labels_are_left_out():
    named = OBJECTIVES["kto"].named_metrics([0.5, 0.0, 1.0, 0.0, 0.25], "val_")
    assert named == {
        "val_reward_desirable": 0.5,
        "val_share_desirable": 1.0,
        "val_share_undesirable": 0.0,
        "val_kl": 0.25,
    }
    named = OBJECTIVES["kto"].named_metrics([0.5, -0.25, 0.75, 0.25, 0.0])
    assert named["reward_desirable"] == 0.5 / 0.75 and named["reward_undesirable"] == -1.0
