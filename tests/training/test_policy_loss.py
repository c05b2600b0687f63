"""The policy losses and their gradients against loops over answers and tokens in NumPy and
float64.
"""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dantinox.config.grpo_settings import LOSSES, GRPOSection, PolicyLoss
from dantinox.model.parameters import abstract_model
from dantinox.training.policy_loss import group_advantages, policy_sums
from dantinox.training.policy_objective import POLICY_METRICS, answer_logprobs, grpo_losses
from dantinox.training.rollout import Rollout, abstract_rollout, count_answers, token_weights
from dantinox.training.step import TrainStep

from .small import VOCABULARY, random_weights, small_config

R, N, T, MAX_NEW = 6, 3, 8, 10
LENGTHS = (5, 1, 3, 0, 4, 2)  # of the answers; row 3 is padding
TEMPERATURE = 0.7
FAR = {
    "clip_low": 0.2,
    "clip_high": 0.28,
}  # a clip range in which some ratios of the batch are and others are not


def rollout_of(normalization, spread=0.0):
    """Returns a batch of random tokens. `spread` is the size of the random differences of the old
    log-probabilities.
    """
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, VOCABULARY, (2, R, T)).astype(np.int32)
    mask = np.zeros((R, T), np.float32)
    for row, length in enumerate(LENGTHS):
        mask[row, 2 : 2 + length] = 1
    advantages = group_advantages(rng.normal(size=(R // N, N)), "std").reshape(-1)
    reference = rng.normal(-2.4, 0.3, (R, T)).astype(np.float32)
    old = rng.normal(-2.4, spread, (R, T)).astype(np.float32) if spread else None
    weights = token_weights(mask, normalization, MAX_NEW)
    return Rollout(
        tokens, targets, np.zeros_like(tokens), mask, weights, advantages, reference, old
    )


def expected_loss(logp_RT, rollout, options, kl_weight):
    """Returns the loss, its gradient with respect to the log-probabilities, and the metrics, one
    answer at a time.
    """
    logp_RT, reference_RT = (
        np.asarray(logp_RT, np.float64),
        np.asarray(rollout.reference_RT, np.float64),
    )
    old_RT = logp_RT if rollout.old_RT is None else np.asarray(rollout.old_RT, np.float64)
    rows = [row for row in range(R) if LENGTHS[row]]
    total, losses, gradient, metrics = sum(LENGTHS), 0.0, np.zeros((R, T)), np.zeros(3)
    for row in rows:
        span, A = slice(2, 2 + LENGTHS[row]), float(rollout.advantages_R[row])
        logp, old, reference = logp_RT[row, span], old_RT[row, span], reference_RT[row, span]
        n = len(logp)
        log_ratio = logp - old if options.ratio == "token" else np.full(n, (logp - old).mean())
        ratio = np.exp(log_ratio)
        weight = {
            "sequence": 1 / n / len(rows),
            "token": 1 / total,
            "constant": 1 / MAX_NEW / len(rows),
        }[options.normalization]
        is_clipped = np.array(
            [
                bool(A > 0 and options.clip_high and rho > 1 + options.clip_high)
                or bool(A < 0 and options.clip_low and rho < 1 - options.clip_low)
                for rho in ratio
            ]
        )
        limit = 1 + options.clip_high if A > 0 else 1 - options.clip_low
        surrogate = np.where(is_clipped, limit * A, ratio * A)
        slope = np.where(is_clipped, 0.0, ratio * A)
        if options.ratio == "sequence":
            slope = np.full(n, slope.mean())
        r = reference - logp
        k3 = np.exp(r) - r - 1
        losses += weight * (kl_weight * k3 - surrogate).sum()
        gradient[row, span] = weight * (kl_weight * (1 - np.exp(r)) - slope)
        metrics += np.array([k3.mean() * bool(kl_weight), is_clipped.mean(), ratio.mean()]) / len(
            rows
        )
    return losses, gradient, metrics


class Case(NamedTuple):
    options: PolicyLoss
    kl_weight: float
    spread: float

    @property
    def rollout(self):
        return rollout_of(self.options.normalization, self.spread)


def cases():
    """Every loss in the first update, and in a later update in which some ratios are clipped."""
    for name, options in LOSSES.items():
        yield f"{name}, first update", Case(options, 0.0, 0.0)
        later = options if name == "reinforce" else options._replace(**FAR)
        yield f"{name}, later update", Case(later, 0.3, 0.4)
    yield "dapo, first update with a divergence", Case(LOSSES["dapo"], 0.3, 0.0)


CASES = dict(cases())


@jax.jit
def losses_and_gradients(logp_RT):
    """Returns the mean loss, the sums and the gradient of all cases in one program."""

    def mean_loss(logp_RT, case):
        sums = policy_sums(logp_RT, case.rollout, case.options, case.kl_weight)
        return sums.loss / count_answers(case.rollout), sums

    gradient = jax.value_and_grad(mean_loss, has_aux=True)
    return {name: gradient(logp_RT, case) for name, case in CASES.items()}


def test_loss_and_gradient_equal_float64():
    logp = np.random.default_rng(1).normal(-2.4, 0.2, (R, T)).astype(np.float32)
    for name, ((value, sums), gradient) in jax.device_get(losses_and_gradients(logp)).items():
        options, kl_weight, spread = case = CASES[name]
        losses, slopes, metrics = expected_loss(logp, case.rollout, options, kl_weight)
        np.testing.assert_allclose(value, losses, rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(gradient, slopes, atol=1e-5 * np.abs(slopes).max(), err_msg=name)
        means = np.array([sums.kl, sums.clip_fraction, sums.ratio]) / 5
        np.testing.assert_allclose(means, metrics, rtol=1e-5, atol=1e-7, err_msg=name)
        if spread and "reinforce" not in name:
            assert 0 < metrics[1] < 1, name  # the batch has clipped and unclipped ratios


def test_gspo_clips_whole_answers_in_its_published_range():
    """Equation 7: with ratios of exp(±0.01), all answers are outside of [1 − 3e-4, 1 + 4e-4]."""
    options, rollout = LOSSES["gspo"], rollout_of("sequence")
    logp = np.full((R, T), -2.0, np.float32)
    shift = 0.01 * np.sign(rollout.advantages_R)[:, None]
    clipped = jax.jit(
        lambda old: (
            policy_sums(jnp.asarray(logp), rollout._replace(old_RT=old), options, 0.0).clip_fraction
        )
    )
    assert float(clipped(logp - shift)) == 5
    assert float(clipped(logp + shift)) == 0  # moving back is never clipped


SETTINGS = {
    "model.num_blocks": 1, "model.dropout_rate": 0.0, "model.dtype": "float32",
    "training.objective": "grpo", "training.init_from": "runs/x", "training.optimizer": "sgd",
    "training.beta1": 0.0, "training.grad_clip": 0.0, "training.weight_decay": 0.0,
    "training.schedule": "constant", "training.warmup_steps": 0, "training.lr": 0.1,
    "grpo.rewards": ["my_rewards.f"], "generation.temperature": TEMPERATURE,
    "generation.max_new_tokens": MAX_NEW,
    "training.batch_size": 2,
}  # fmt: skip


def config_of(loss="reinforce", **changes):
    return small_config(
        **SETTINGS | {"grpo.loss": loss} | {f"grpo.{key}": value for key, value in changes.items()}
    )


@cache
def model_of():
    architecture = config_of().architecture(VOCABULARY)
    return abstract_model(architecture)[0](random_weights(architecture))


@jax.jit
def logits_of(state, tokens):
    return nnx.merge(nnx.graphdef(model_of()), state)(tokens, jnp.arange(T)[None])[0]


@cache
def vjp_of_logits():
    """Returns float64 p `[R, T, V]` at the temperature, and the jitted function from a gradient of
    logits to parameters.
    """
    state, tokens = nnx.state(model_of()), rollout_of("token").tokens_RT
    back = jax.jit(lambda gradient: jax.vjp(lambda s: logits_of(s, tokens), state)[1](gradient)[0])
    logits = np.asarray(logits_of(state, tokens), np.float64) / TEMPERATURE
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True), back


@pytest.mark.parametrize(
    "kl_weight, loss",
    [
        (0.3, "gspo"),
        (0.0, "reinforce"),
        *(pytest.param(0.3, loss, marks=pytest.mark.slow) for loss in ("grpo", "dr_grpo", "dapo")),
    ],
)
def test_gradient_of_the_parameters_equals_float64(loss, kl_weight):
    """Applies the chain rule: the vector-Jacobian product of the logits with the float64 gradient
    of the loss.
    """
    config = config_of(loss, kl_weight=kl_weight, **({} if loss == "reinforce" else FAR))
    options = config.grpo.options
    rollout = rollout_of(options.normalization, spread=0.4)
    p, back = vjp_of_logits()
    logp = np.log(np.take_along_axis(p, rollout.targets_RT[..., None], -1)[..., 0])
    losses, slopes, metrics = expected_loss(logp, rollout, options, kl_weight)
    graph, state = nnx.split(model_of())

    def mean_loss(state):
        sums = grpo_losses(nnx.merge(graph, state), rollout, config)
        return sums.nats / sums.num_targets, sums

    (value, sums), gradient = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))(state)
    np.testing.assert_allclose(float(value), losses, rtol=1e-5)
    lengths = np.array([length for length in LENGTHS if length])
    entropies = (-(p * np.log(p)).sum(-1) * rollout.mask_RT).sum(1)[np.array(LENGTHS) > 0] / lengths
    np.testing.assert_allclose(
        np.asarray(sums.metrics) / 5, [*metrics, entropies.mean()], rtol=1e-5, atol=1e-7
    )
    assert len(POLICY_METRICS) == len(sums.metrics)
    of_logits = (np.eye(VOCABULARY)[rollout.targets_RT] - p) * slopes[..., None] / TEMPERATURE
    expected = back(of_logits.astype(np.float32))
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * largest)


def test_log_probabilities_are_those_of_the_temperature_and_zero_elsewhere():
    rollout, (p, _) = rollout_of("token"), vjp_of_logits()
    got = jax.jit(lambda model: answer_logprobs(model, rollout, config_of()))(model_of())
    logp = (
        np.log(np.take_along_axis(p, rollout.targets_RT[..., None], -1)[..., 0]) * rollout.mask_RT
    )
    np.testing.assert_allclose(got, logp, rtol=1e-5)


def train_step(**changes):
    config = config_of("dapo", kl_weight=0.1, **changes)
    return TrainStep(config, config.architecture(VOCABULARY), 4)


@pytest.fixture(scope="module")
def one_part():
    step = train_step()
    return step, jax.jit(step._step)


@pytest.mark.slow
def test_two_accumulation_steps_equal_one(one_part):
    """The parts have 9 and 6 tokens, and 3 and 2 answers, so a mean of the means of the parts would
    differ.
    """
    whole, program = one_part
    rollout = rollout_of("token", spread=0.4)
    config = whole.config.model_copy(
        update={"training": whole.config.training.model_copy(update={"grad_accum": 2})}
    )
    parts = TrainStep(config, whole.model, 4)
    state = whole.initial_state(random_weights(whole.model))
    (after, metrics), (other, other_metrics) = (
        program(state, rollout),
        jax.jit(parts._step)(state, rollout),
    )
    np.testing.assert_allclose(
        [other_metrics.loss, other_metrics.grad_norm, *other_metrics.metrics],
        [metrics.loss, metrics.grad_norm, *metrics.metrics],
        rtol=1e-6,
    )
    for name, array in after.parameters.items():
        np.testing.assert_allclose(other.parameters[name], array, atol=1e-6, err_msg=name)


def test_two_updates_keep_the_old_log_probabilities(one_part):
    """Repeats two steps of gradient descent with gradients of `grpo_losses`, whose ratios refer to
    the first weights.
    """
    step, program = one_part
    state, rollout = step.initial_state(random_weights(step.model)), rollout_of("token")
    build, _ = abstract_model(step.model)

    def model(parameters):
        return step.layout.build_model(build, parameters)

    old = jax.jit(lambda parameters: answer_logprobs(model(parameters), rollout, step.config))(
        state.parameters
    )
    rollout = rollout._replace(old_RT=np.asarray(old))
    gradient = jax.jit(
        jax.grad(
            lambda parameters: (
                (sums := grpo_losses(model(parameters), rollout, step.config)).nats
                / sums.num_targets
            )
        )
    )
    expected = state.parameters
    for _ in range(2):
        expected = jax.tree.map(
            lambda p, g: np.asarray(p) - np.float32(0.1) * np.asarray(g),
            expected,
            gradient(expected),
        )
    middle, first = program(state, rollout)
    after, second = program(middle, rollout)
    for name, array in expected.items():
        np.testing.assert_allclose(after.parameters[name], array, atol=1e-6)
    ratio = POLICY_METRICS.index("ratio")
    np.testing.assert_allclose(first.metrics[ratio], 1, rtol=1e-6)
    assert abs(float(second.metrics[ratio]) - 1) > 1e-4


def test_all_updates_of_a_step_have_its_learning_rate():
    changes = SETTINGS | {
        "training.schedule": "linear",
        "training.warmup_steps": 2,
        "training.steps": 5,
    }
    configs = [small_config(**changes, **{"grpo.updates": updates}) for updates in (1, 3)]
    one, three = (TrainStep(config, config.architecture(VOCABULARY), 5) for config in configs)
    rates = [float(one.optimizer.rates(step)["lr"]) for step in range(5)]
    assert len(set(rates)) == 5
    np.testing.assert_allclose(
        [three.optimizer.rates(update)["lr"] for update in range(15)],
        np.repeat(rates, 3),
        rtol=1e-7,
    )


def test_equal_rewards_have_no_gradient():
    equal = np.full((2, 3), 0.1)
    for kind in ("mean", "std"):
        assert not group_advantages(equal, kind).any()
    rollout = rollout_of("token")._replace(advantages_R=np.zeros(R, np.float32))
    gradient = jax.jit(jax.grad(lambda logp: policy_sums(logp, rollout, LOSSES["grpo"], 0.0).loss))
    assert not gradient(np.zeros((R, T), np.float32)).any()


def test_advantages_equal_their_definition():
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.2, 0.2, 0.2, 1.4]]
    np.testing.assert_allclose(
        group_advantages(rewards, "mean"),
        [[0.5, -0.5, -0.5, 0.5], [-0.3, -0.3, -0.3, 0.9]],
        rtol=1e-6,
    )
    of_std = group_advantages(rewards, "std")
    np.testing.assert_allclose(
        of_std[0], np.array([1, -1, -1, 1]) * 0.5 / (np.sqrt(1 / 3) + 1e-4), rtol=1e-6
    )
    np.testing.assert_allclose(of_std[1], np.array([-1, -1, -1, 3]) * 0.3 / (0.6 + 1e-4), rtol=1e-6)
    shifted = group_advantages(np.array(rewards) + 1e6, "mean")
    np.testing.assert_allclose(shifted, group_advantages(rewards, "mean"), atol=1e-6)


def test_weights_of_tokens_equal_their_definition():
    mask = np.array([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], np.float32)
    np.testing.assert_allclose(token_weights(mask, "sequence", 9)[:2, 1], [1 / 3, 1], rtol=1e-7)
    np.testing.assert_allclose(token_weights(mask, "token", 9)[:2, 1], [2 / 4, 2 / 4], rtol=1e-7)
    np.testing.assert_allclose(token_weights(mask, "constant", 9)[:2, 1], [1 / 9, 1 / 9], rtol=1e-7)
    for kind in ("sequence", "token", "constant"):
        weights = token_weights(mask, kind, 9)
        assert not weights[mask == 0].any() and weights.dtype == np.float32
        assert not token_weights(np.zeros((2, 4), np.float32), kind, 9).any()


def test_settings_replace_options_of_the_loss():
    section = GRPOSection(loss="dapo", clip_high=0.0, normalization="constant", rewards=["numeric"])
    assert section.options == LOSSES["dapo"]._replace(clip_high=0.0, normalization="constant")
    assert GRPOSection().options == LOSSES["reinforce"]


def test_shapes_of_an_abstract_batch_are_those_of_a_batch():
    shapes, batch = abstract_rollout(R, T), rollout_of("token")
    for name, shape in zip(shapes._fields, shapes, strict=True):
        array = getattr(batch, name)
        assert (array is None) == (shape is None)
        assert array is None or (array.shape, array.dtype) == (shape.shape, shape.dtype)
