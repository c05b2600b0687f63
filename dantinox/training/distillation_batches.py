"""The batches of on-policy distillation: answers that the model in training samples, as rows of
tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from dantinox.config import UserError
from dantinox.model.parameters import Parameters
from dantinox.text import Batch, Prompt, PromptStore, Tokenizer
from dantinox.training.rollout import answer_rows
from dantinox.training.rollout_sampler import RolloutSampler, rollout_seed
from dantinox.training.step import TrainState, TrainStep, select_rows


class DistillationBatches:
    """Samples one answer to each prompt of a step with the weights of that step.

    Agarwal et al. 2024, "On-Policy Distillation of Language Models" (algorithm 1 with λ = 1): the
    teacher scores tokens that the student chose. The sampled tokens are data, so no gradient flows
    through their choice. The answers of a step are a function of the weights, `training.seed` and
    the step.
    """

    def __init__(
        self,
        step: TrainStep,
        store: PromptStore,
        tokenizer: Tokenizer,
        frozen: Parameters,
        stop: Callable[[], bool],
    ):
        """Prepares sampling.

        Args:
          step: the optimizer step, which reads the batches.
          frozen: the frozen weights under adapters.
          stop: whether a stop signal arrived.

        Raises:
          UserError: there are several devices.
        """
        if step.layout.mesh is not None:
            raise UserError(
                f"distill.data: samples runs on one device, got {step.layout.devices}:"
                " make only one visible"
            )
        self._config = step.config
        self._layout = step.layout
        self._length = step.length
        self._store = store
        self._frozen = frozen
        self._stop = stop
        self._pad = tokenizer.pad_id or 0
        self._rollouts = RolloutSampler(
            step.config, step.model, tokenizer, store.longest, samples=1, prompts=store.batch_size
        )
        self.skipped_batches = 0

    def batch(self, step: int, state: TrainState) -> Batch:
        """Returns the answers of a step with their prompts on the devices.

        Raises:
          SamplingInterrupted: a stop signal arrived.
        """
        t = self._config.training
        number = step + self.skipped_batches
        seeds = [rollout_seed(t.seed, 0, number, place) for place in range(t.batch_size)]
        rows = self._sample(self._store.batch(number), seeds, state.parameters)
        placed: Batch = self._layout.put_batch(
            partial(select_rows, rows), t.batch_size, t.grad_accum
        )
        return placed

    def close(self) -> None:
        """There are no threads to end."""

    def validation(self, state: TrainState, rows: int) -> Iterator[Batch]:
        """Yields answers to the validation prompts in batches of `rows` rows; the last batch is
        padded.

        A prompt has the same seed in every evaluation.

        Raises:
          SamplingInterrupted: a stop signal arrived.
        """
        t = self._config.training
        for prompts in self._store.validation(rows, t.eval_tokens):
            batch = self._sample(
                prompts,
                [rollout_seed(t.seed, 1, prompt.number) for prompt in prompts],
                state.weights,
            )
            yield Batch(*(np.pad(array, [(0, rows - len(prompts)), (0, 0)]) for array in batch))

    def _sample(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], weights: Mapping[str, Any]
    ) -> Batch:
        ids = [prompt.ids for prompt in prompts]
        answers = self._rollouts.sample({**weights, **self._frozen}, ids, seeds, stop=self._stop)
        return answer_rows(
            [(prompt, answer.ids) for prompt, (answer,) in zip(ids, answers, strict=True)],
            self._length,
            self._pad,
        )
