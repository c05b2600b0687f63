"""`RolloutSampler`: answers to prompts, sampled by the generation engine with the weights of a
model in training.

The programs are compiled once; each call of `RolloutSampler.sample` gets the weights as they are on
the device. All calls have the same number of rows and the same lengths, so the tokens of an answer
depend only on the weights, its prompt and its seed, and not on the other prompts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dantinox.config import Config, KVSection, ModelConfig, with_generation
from dantinox.config.generation_settings import active_steps
from dantinox.generation import LoadedModel
from dantinox.generation.api.result import Result
from dantinox.sampling import StepInfo
from dantinox.text import Tokenizer
from dantinox.training.batch_source import SamplingInterrupted
from dantinox.training.text_samples import build_sampling_model

MAX_ROWS = 256  # answers that are decoded together, unless one prompt has more


class Answer(NamedTuple):
    """A sampled answer.

    Attributes:
      ids: its tokens, including the token that ended it.
      text: its text without that token.
      logprobs: float32, ln p of each token under the softmax of the logits divided by the
        temperature. NaN if other sampling steps are active and the temperature is not 1, because
        the engine does not record it then.
      finish_reason: `eos`, `stop`, `loop`, or `length` if `generation.max_new_tokens` truncated the
        answer.
    """

    ids: tuple[int, ...]
    text: str
    logprobs: np.ndarray
    finish_reason: str


class RolloutSampler:
    """Samples answers from a model in training."""

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        tokenizer: Tokenizer,
        longest: int,
        *,
        samples: int,
        prompts: int,
    ):
        """Prepares the settings.

        Args:
          config: its sections `generation` and `router` define the sampler. Caches are not
            compressed.
          model: the architecture of the weights, which may have adapters.
          longest: the most tokens of a prompt.
          samples: the answers per prompt.
          prompts: the usual number of prompts of a call of `sample`. They are decoded in parts of
            equal size.
        """
        self._model = model
        self._tokenizer = tokenizer
        self.samples = samples
        generation = config.generation
        router = config.router
        if generation.strategy == "entropy" and router.router_preset == "calibrated":
            # A model in training has no calibration.
            router = router.model_copy(update={"router_preset": "guide"})
        # The choice of the native kernels depends on a measurement, but answers must not.
        kernel = "xla" if generation.matmul_kernel == "auto" else generation.matmul_kernel
        self._config = with_generation(
            config.model_copy(update={"kv": KVSection(), "router": router}),
            n=samples,
            matmul_kernel=kernel,
        )
        self._longest = longest
        self._slots = min(longest + generation.max_new_tokens, model.max_context)
        parts = -(-prompts // max(1, MAX_ROWS // samples))
        self.prompts_per_call = -(-prompts // parts)

    def sample(
        self,
        weights: Mapping[str, Any],
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        stop: Callable[[], bool] = lambda: False,
        greedy: bool = False,
    ) -> list[list[Answer]]:
        """Samples `samples` answers to each prompt.

        Args:
          weights: all weights by path, including those of adapters, on the device.
          prompts: token ids, at most `longest` per prompt.
          seeds: a seed for each prompt, in [0, 2³²).
          stop: asked between two chunks of tokens; true raises `SamplingInterrupted`.
          greedy: choose the most likely tokens, unless the entropy router samples.

        Raises:
          SamplingInterrupted: `stop` returned true.
        """
        loaded = LoadedModel(
            self._config, build_sampling_model(self._model, weights), self._tokenizer
        )
        greedy = greedy and self._config.generation.strategy != "entropy"
        answers: list[list[Answer]] = []
        for start in range(0, len(prompts), self.prompts_per_call):
            numbers = range(len(prompts))[start : start + self.prompts_per_call]
            # The padding keeps the shapes of the programs.
            padding = [numbers[0]] * (self.prompts_per_call - len(numbers))
            requests = [
                loaded.request(
                    prompts[number],
                    with_generation(
                        self._config,
                        seed=seeds[number],
                        greedy=greedy or self._config.generation.greedy,
                    ),
                    logprobs=0,
                )
                for number in (*numbers, *padding)
            ]
            (run,) = loaded.start(requests, pad=lambda length: self._longest, slots=self._slots)
            for _ in run.parts():
                if stop():
                    raise SamplingInterrupted
            answers += list(self._answers(run.results))[: len(numbers)]
        return answers

    def _answers(self, results: Sequence[Result]) -> Iterator[list[Answer]]:
        """Yields the answers to each prompt of a finished batch."""
        for start in range(0, len(results), self.samples):
            yield [
                Answer(
                    tuple(result.tokens),
                    result.text,
                    self._logprobs(result.steps),
                    result.finish_reason,
                )
                for result in results[start : start + self.samples]
                if result.steps is not None
            ]

    def _logprobs(self, steps: StepInfo) -> np.ndarray:
        generation = self._config.generation
        if generation.temperature == 1:
            return np.asarray(steps.logprob, np.float32)
        if generation.strategy == "chain" and not active_steps(generation) - {"temperature"}:
            return np.asarray(steps.logprob_sampled, np.float32)
        return np.full(len(steps.logprob), np.nan, np.float32)


def rollout_seed(*numbers: int) -> int:
    """Returns a seed in [0, 2³²) that is a function of the numbers, each in [0, 2⁶⁴)."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
