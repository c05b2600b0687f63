"""Reward functions of `grpo.rewards`: they map a prompt, a sampled answer and the record of the prompt to numbers."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dantinox.config.grpo_settings import GRPOSection

Record = Mapping[str, Any]
Score = Callable[[str, str, Record], float]  # (prompt, answer, record) → reward


class RewardFunction(NamedTuple):
    """The rewards of a run.

    Attributes:
      scores: the function of each reward by its name. A name that appears twice gets a suffix, as in `regex_2`.
      weights: the weight of each reward in the sum.
    """

    scores: dict[str, Score]
    weights: dict[str, float]

    def score(self, prompt: str, answer: str, record: Record) -> dict[str, float]:
        """Returns the rewards of an answer by name, before they are multiplied by their weights.

        Raises:
          UserError: a field of the record is missing, or a user's function fails or does not return a finite number.
        """
        return {name: function(prompt, answer, record) for name, function in self.scores.items()}

    def total(self, scores: Mapping[str, float]) -> float:
        """Returns the sum of the rewards, each multiplied by its weight."""
        return sum(self.weights[name] * value for name, value in scores.items())


def build_rewards(section: GRPOSection) -> RewardFunction:
    """Returns the rewards of `grpo.rewards`, with their expressions compiled, schemas read and functions imported.

    Raises:
      UserError: an expression or a schema is invalid, a file or a function does not exist, or a library is missing.
    """
    raise NotImplementedError
