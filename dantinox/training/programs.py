"""The compiled programs of a run, and the memory they will need."""

from collections.abc import Callable
from threading import Thread
from typing import Any

from dantinox.config import Config, ModelConfig
from dantinox.model.parameters import Parameters
from dantinox.report import human_bytes, human_count
from dantinox.text import Batch
from dantinox.training.memory import MemoryPlan, plan_memory
from dantinox.training.objective import Sums
from dantinox.training.step import Metrics, State, abstract_batch, abstract_state, compiled, make_eval_step, make_train_step

EVAL_TOKENS_PER_CALL = 8192


class Programs:
    """The compiled programs of a run. Compiling allocates nothing of the model's size, so the memory plan comes first."""

    def __init__(self, config: Config, model: ModelConfig, steps: int):
        length = config.model.max_context
        self.eval_rows = max(1, EVAL_TOKENS_PER_CALL // length)
        self.abstract = abstract_state(config, model, steps)
        train = make_train_step(config, model, steps).lower(self.abstract, abstract_batch(config.training.batch_size, length))
        evaluate = make_eval_step(model).lower(self.abstract.parameters, abstract_batch(self.eval_rows, length))
        # XLA leaves a core idle for long stretches of a compilation: the evaluation is compiled beside the step.
        self._evaluate: Any = None
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._compile, args=(evaluate,), name="compile", daemon=True)
        self._thread.start()
        self.train: Callable[[State, Batch], tuple[State, Metrics]] = compiled(train)
        self.memory: MemoryPlan = plan_memory(self.train, self.abstract)

    def evaluate(self, parameters: Parameters, batch: Any) -> Sums:
        """The summed losses of a validation batch of `eval_rows` rows."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._evaluate(parameters, batch)

    def _compile(self, lowered: Any) -> None:
        try:
            self._evaluate = compiled(lowered)
        except BaseException as error:
            self._failure = error

    def memory_line(self) -> str:
        """Parameters, optimizer state, estimated peak and what is free, in one line."""
        plan = self.memory
        free = "" if plan.available is None else f" of {human_bytes(plan.available)} free"
        return (
            f"{human_count(plan.parameters / 4)} parameters: weights {human_bytes(plan.parameters)}, "
            f"optimizer {human_bytes(plan.optimizer)}, estimated peak {human_bytes(plan.peak)}{free}"
        )
