"""The batches of training with rewards: sampled answers, their rewards, advantages and
log-probabilities.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import Config, UserError
from dantinox.model.parameters import Parameters
from dantinox.text import Prompt, PromptStore, Tokenizer
from dantinox.training.batch_source import SamplingInterrupted
from dantinox.training.eval_step import make_reference_step
from dantinox.training.policy_loss import group_advantages
from dantinox.training.policy_objective import answer_logprobs
from dantinox.training.rewards import build_rewards
from dantinox.training.rollout import Rollout, answer_rows, token_weights
from dantinox.training.rollout_sampler import Answer, RolloutSampler, rollout_seed
from dantinox.training.step import TrainState, TrainStep

LENGTH_MULTIPLE = 8  # the length of the rows is a multiple of this number
SAVED_GROUPS = 8  # groups in a file of samples


class Group(NamedTuple):
    """A prompt and its N answers.

    Attributes:
      scores: the rewards of each answer by name.
      rewards_N: float64, the weighted sums of the scores.
    """

    prompt: Prompt
    answers: list[Answer]
    scores: list[dict[str, float]]
    rewards_N: np.ndarray

    @property
    def is_uniform(self) -> bool:
        """Whether all rewards are equal, so that all advantages are 0."""
        return bool(self.rewards_N.min() == self.rewards_N.max())


def rollout_length(config: Config, longest: int) -> int:
    """Returns the number of inputs of a row that holds the longest prompt and the longest
    answer.
    """
    most = longest + config.generation.max_new_tokens - 1  # the last token is only a target
    return min(-(-most // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, config.model.max_context)


def rollout_rows(
    groups: Sequence[Group], length: int, config: Config, pad_id: int = 0
) -> tuple[Rollout, np.ndarray]:
    """Returns the rows of all answers, and float32 `[R, T]` log-probabilities that the engine
    recorded for the targets.

    All tokens of an answer are targets, including the token that ended it. `reference_RT` is zero.
    """
    pairs = [(group.prompt.ids, answer) for group in groups for answer in group.answers]
    tokens_RT, targets_RT, segments_RT, mask_RT = answer_rows(
        [(ids, answer.ids) for ids, answer in pairs], length, pad_id
    )
    sampled_RT = np.zeros_like(mask_RT)
    sampled_RT[mask_RT > 0] = np.concatenate([answer.logprobs for _, answer in pairs])
    options = config.grpo.options
    advantages_GN = group_advantages(
        np.stack([group.rewards_N for group in groups]), options.advantage
    )
    weights_RT = token_weights(mask_RT, options.normalization, config.generation.max_new_tokens)
    reference_RT = np.zeros_like(mask_RT)
    rollout = Rollout(
        tokens_RT,
        targets_RT,
        segments_RT,
        mask_RT,
        weights_RT,
        advantages_GN.reshape(-1),
        reference_RT,
    )
    return rollout, sampled_RT


class RolloutBatches:
    """Samples and scores the batches of `training.objective: grpo` with the weights of each step.

    The answers of a step are a function of the weights, `training.seed` and the step.

    Attributes:
      metrics: numbers about the newest batch, columns of the logs.
      groups: the groups of the newest batch.
    """

    def __init__(
        self,
        step: TrainStep,
        store: PromptStore,
        tokenizer: Tokenizer,
        frozen: Parameters,
        starting_weights: Callable[[], Mapping[str, np.ndarray] | None],
        stop: Callable[[], bool],
    ):
        """Prepares sampling and rewards.

        Args:
          step: the optimizer step, which reads the batches.
          frozen: the frozen weights under adapters.
          starting_weights: returns the weights before training, or None for new adapters; called if
            the loss needs them as the reference of its KL penalty.
          stop: whether a stop signal arrived.

        Raises:
          UserError: a reward is invalid, or there are several devices.
        """
        config = self._config = step.config
        if step.layout.mesh is not None:
            raise UserError(
                f"training.objective: grpo runs on one device, got {step.layout.devices}:"
                " make only one visible"
            )
        self._store = store
        self._layout = step.layout
        self._frozen = frozen
        self._stop = stop
        self._logprobs = make_reference_step(
            step.model, step.layout, partial(answer_logprobs, config=config)
        )
        self._reference = (
            step.initial_parameters(starting_weights(), frozen)
            if config.grpo.kl_weight > 0
            else None
        )
        self._rewards = build_rewards(config.grpo)
        self._is_logged = step.is_logged
        self._pad = tokenizer.pad_id or 0
        self._length = step.length
        sampler = partial(RolloutSampler, config, step.model, tokenizer, store.longest)
        self._rollouts = sampler(samples=config.grpo.samples, prompts=store.batch_size)
        self._greedy = sampler(samples=1, prompts=store.validation_rows)
        self.skipped_batches = 0  # by rewinds; the training loop sets it
        self.metrics: dict[str, float] = {}
        self.groups: list[Group] = []
        self._ready = 0.0  # when the newest batch was on the device

    def batch(self, step: int, state: TrainState) -> Rollout:
        """Samples answers to the prompts of a step, scores them and returns them on the devices.

        Raises:
          SamplingInterrupted: a stop signal arrived.
          UserError: a reward function failed.
        """
        started = time.perf_counter()
        weights = state.parameters | self._frozen  # not their moving average, as in `evaluate`
        groups, rounds = self._sample_groups(step + self.skipped_batches, weights)
        sampled = time.perf_counter()
        rows, sampled_RT = rollout_rows(groups, self._length, self._config, self._pad)
        # All rows are placed on one device, which reads them.
        placed, sampled_RT = self._layout.put_batch(
            lambda: (rows, sampled_RT), len(sampled_RT), self._config.training.grad_accum
        )
        metrics = _group_metrics(groups)
        updates = self._config.grpo.updates
        if updates > 1 or self._is_logged(step + 1):  # else nothing reads these log-probabilities
            old_RT = self._logprobs(state.parameters, placed, self._frozen)
            metrics["sampler_gap"] = float(jnp.max(placed.mask_RT * jnp.abs(old_RT - sampled_RT)))
            placed = placed._replace(old_RT=old_RT) if updates > 1 else placed
        if self._reference is not None:
            placed = placed._replace(
                reference_RT=self._logprobs(self._reference, placed, self._frozen)
            )
        self.metrics = metrics | {
            "sampling_rounds": float(rounds),
            "seconds_sampling": sampled - started,
            "seconds_scoring": time.perf_counter() - sampled,
        }
        self.groups = groups
        self._ready = time.perf_counter()
        return placed

    def finish_step(self, loss: jax.Array) -> float:
        """Waits for the updates of the newest batch, whose last loss is given, and returns the mean
        reward of the batch.
        """
        loss.block_until_ready()
        self.metrics["seconds_updating"] = time.perf_counter() - self._ready
        return self.metrics["reward"]

    def close(self) -> None:
        """There are no threads to end."""

    def evaluate(self, state: TrainState) -> tuple[float | None, dict[str, float]]:
        """Answers the validation prompts, without randomness unless the entropy router samples.

        Returns:
          The mean reward times −1, and the metrics with the prefix `val_`. The first is None if a
          stop signal arrived.
        """
        weights = state.weights | self._frozen
        seed = self._config.training.seed
        groups = list[Group]()
        for prompts in self._store.validation(
            self._greedy.prompts_per_call, self._config.training.eval_tokens
        ):
            seeds = [rollout_seed(seed, 1, prompt.number) for prompt in prompts]
            try:
                groups += self._answer(self._greedy, weights, prompts, seeds, greedy=True)
            except SamplingInterrupted:
                return None, {}
        metrics = {f"val_{name}": value for name, value in _group_metrics(groups).items()}
        return -metrics["val_reward"], metrics

    def samples(self) -> str:
        """Returns answers of the newest batch with their rewards as JSON Lines, `SAVED_GROUPS`
        groups.
        """
        lines = []
        for group in self.groups[:SAVED_GROUPS]:
            for answer, scores, reward in zip(
                group.answers, group.scores, group.rewards_N, strict=True
            ):
                record = {
                    "prompt": group.prompt.text,
                    "answer": answer.text,
                    "reward": float(reward),
                    "rewards": scores,
                    "finish_reason": answer.finish_reason,
                    "tokens": len(answer.ids),
                }
                lines.append(json.dumps(record) + "\n")
        return "".join(lines)

    def example(self) -> str:
        """Returns the first prompt of the newest batch with an answer and its reward."""
        group = self.groups[0]
        return f"{group.prompt.text}\n{group.answers[0].text}\nreward {group.rewards_N[0]:g}"

    def _sample_groups(self, number: int, weights: Mapping[str, Any]) -> tuple[list[Group], int]:
        """Returns the groups of a batch, and the rounds of sampling.

        With dynamic sampling (Yu et al. 2025, DAPO, section 3.2), groups of equal rewards are
        replaced by groups of further prompts, in at most `grpo.max_sampling_rounds` further
        rounds.
        """
        seed = self._config.training.seed
        rounds = 0
        found: list[Group] = []
        while True:
            prompts = self._store.batch(number, stream=rounds)
            seeds = [rollout_seed(seed, 0, number, rounds, place) for place in range(len(prompts))]
            groups = self._answer(self._rollouts, weights, prompts, seeds)
            if rounds == 0:
                found = groups
                if not self._config.grpo.options.dynamic_sampling:
                    return found, 1
            else:
                # Each of these replaces one group.
                useful = iter([group for group in groups if not group.is_uniform])
                found = [next(useful, group) if group.is_uniform else group for group in found]
            rounds += 1
            if rounds > self._config.grpo.max_sampling_rounds or not any(
                group.is_uniform for group in found
            ):
                return found, rounds

    def _answer(
        self,
        rollouts: RolloutSampler,
        weights: Mapping[str, Any],
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        **options: Any,
    ) -> list[Group]:
        sampled = rollouts.sample(
            weights, [prompt.ids for prompt in prompts], seeds, stop=self._stop, **options
        )
        return [
            self._score(prompt, answers) for prompt, answers in zip(prompts, sampled, strict=True)
        ]

    def _score(self, prompt: Prompt, answers: list[Answer]) -> Group:
        scores = [
            self._rewards.score(prompt.text, answer.text, prompt.record) for answer in answers
        ]
        return Group(
            prompt,
            answers,
            scores,
            np.array([self._rewards.total(score) for score in scores], np.float64),
        )


def _group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns means over all answers: the reward and its standard deviation, each score, and the
    length of the answers.
    """
    answers = [answer for group in groups for answer in group.answers]
    scores = [score for group in groups for score in group.scores]
    rewards = np.concatenate([group.rewards_N for group in groups])
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        **{
            f"reward_{name}": float(np.mean([score[name] for score in scores]))
            for name in scores[0]
        },
        "answer_tokens": float(np.mean([len(answer.ids) for answer in answers])),
        "truncated": float(np.mean([answer.finish_reason == "length" for answer in answers])),
    }
