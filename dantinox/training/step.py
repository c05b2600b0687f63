"""The state of a training run and its programs: the optimizer step, beside the evaluation."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from threading import Thread
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from dantinox.config import Config, ModelConfig
from dantinox.distributed import Layout
from dantinox.model.lora import (
    MAGNITUDE,
    enable_dropout,
    frozen_parameters,
    initial_magnitudes,
    trainable_parameters,
)
from dantinox.model.parameters import Parameters, abstract_model, init_parameters, random_key
from dantinox.platform import get_platform
from dantinox.programs import compile_program, tree_bytes
from dantinox.text import Batch
from dantinox.training.eval_step import add_kl, make_eval_step, teacher_specs
from dantinox.training.memory import MemoryPlan, plan_memory
from dantinox.training.objective import OBJECTIVES
from dantinox.training.optimizer import EMAState, Schedule, optimizer, schedule, update_if
from dantinox.training.teacher import Teacher
from dantinox.training.token_losses import LossSums

EVAL_TOKENS_PER_CALL = 8192


class TrainState(NamedTuple):
    """Everything that the next step depends on, which is what exact resume needs. Data and dropout
    are functions of `step`.

    With adapters, `parameters` holds only the adapters; the frozen weights are a separate argument
    of the programs. `loss_since_eval` is `[sum of step losses, number of steps]` since the last
    evaluation row of the CSV log. `loss_since_log` is the same since the last interval row of
    metrics.jsonl.
    """

    step: jax.Array
    parameters: Parameters
    optimizer: Any
    loss_since_eval: jax.Array
    loss_since_log: jax.Array

    @property
    def weights(self) -> Parameters:
        """The weights for evaluation, sampling and export: the moving average if there is one, else
        the parameters.
        """
        return self.optimizer.average if isinstance(self.optimizer, EMAState) else self.parameters


class Metrics(NamedTuple):
    """Metrics of one step, on the device until they are read.

    Attributes:
      loss: loss before the update: the sum of the losses divided by `Objective.divisor`.
      grad_norm: norm of the gradient before clipping.
      rates: the learning rates that the update applied; see `Optimizer`.
      expert_counts: number of tokens of each expert of each layer, `[L, E]`; None without experts.
      metrics: the means of `Objective.metrics`, in their order; None if the objective has none.
    """

    loss: jax.Array
    grad_norm: jax.Array
    rates: dict[str, jax.Array]
    expert_counts: jax.Array | None = None
    metrics: jax.Array | None = None


def rows_per_step(config: Config) -> int:
    """Returns the rows of a training batch: one per window, pair or sampled answer."""
    return config.training.batch_size * (
        config.grpo.samples if config.training.objective == "grpo" else 1
    )


def updates_per_step(config: Config) -> int:
    """Returns the optimizer updates of a step, which are all on the same batch."""
    return config.grpo.updates if config.training.objective == "grpo" else 1


def select_rows(batch: Any, rows: np.ndarray | None = None) -> Any:
    """Returns the selected rows of a batch, or the whole batch if `rows` is None."""
    return (
        batch
        if rows is None
        else type(batch)(*(None if array is None else array[rows] for array in batch))
    )


class TracedProgram(NamedTuple):
    """A traced program, the tokens `rows × length` that a call reads, and compiler options."""

    rows: int
    length: int
    program: Any
    options: dict[str, str]


class TrainStep:
    """The optimizer step of a training run, its state and its programs.

    Args:
      steps: the steps of the run. The optimizer updates of a step have the same learning rate.
      layout: layout of the devices that share the step; None: one device.
      factor: maps the step to a factor on the peak learning rates; None: `training.schedule`.
      length: tokens per row; None: `model.max_context`.
      teacher: the teacher, if the objective is distill.

    Attributes:
      rows: the rows of a batch, over all devices.
      optimizer: the optimizer with its learning rates.
      shapes: shapes of the state, with shardings on a mesh. They allocate no memory.
    """

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        steps: int,
        layout: Layout | None = None,
        factor: Schedule | None = None,
        length: int | None = None,
        teacher: Teacher | None = None,
    ):
        self.config = config
        self.model = model
        self.layout = layout or Layout(model)
        self.teacher = teacher
        self.steps = steps
        self.objective = OBJECTIVES[config.training.objective]
        self.rows = rows_per_step(config)
        self.length = length or config.model.max_context
        if (updates := updates_per_step(config)) > 1:
            of_step = factor or schedule(config.training, steps)
            factor = lambda update: of_step(update // updates)  # noqa: E731
        self.optimizer = optimizer(config.training, steps, factor, self.layout)
        parameters = trainable_parameters(abstract_model(model)[1], model)
        sums: Any = jax.ShapeDtypeStruct((2,), jnp.float32)
        count: Any = jax.ShapeDtypeStruct((), jnp.int32)
        moments = jax.eval_shape(self.optimizer.init, parameters)
        self.shapes: TrainState = self.layout.place_shapes(
            TrainState(count, parameters, moments, sums, sums)
        )

    def is_logged(self, step: int) -> bool:
        """Whether the logs have a row of metrics of a step, counted from 1: every
        `logging.log_every` steps and the last.
        """
        return step % self.config.logging.log_every == 0 or step == self.steps

    def initial_parameters(
        self,
        weights: Mapping[str, np.ndarray] | None = None,
        frozen: Parameters = {},  # noqa: B006
    ) -> Parameters:
        """Returns the trained parameters before the first step.

        Args:
          weights: the trained parameters; None: random ones from `training.seed`.
          frozen: the frozen weights, from which the magnitudes of weight-decomposed adapters are
            computed.
        """
        model = self.model
        layout = self.layout

        def fresh() -> Parameters:
            return trainable_parameters(init_parameters(model, self.config.training.seed), model)

        if weights is not None:
            return layout.put_parameters(weights)
        shardings = None if layout.mesh is None else layout.shardings(self.shapes)
        if shardings is None:
            # jit computes only what is returned, so it does not initialize the frozen weights.
            parameters = fresh() if model.lora is None else jax.jit(fresh)()
        else:  # sharded from the start: no device ever holds all of them
            parameters = jax.jit(fresh, out_shardings=shardings.parameters)()
        if model.lora is not None and model.lora.dora:
            build, _ = abstract_model(model)
            places = shardings and {
                name: place
                for name, place in shardings.parameters.items()
                if name.endswith(MAGNITUDE)
            }
            magnitudes = jax.jit(
                lambda adapters, base: initial_magnitudes(build(adapters | base)),
                out_shardings=places,
            )
            parameters |= magnitudes(parameters, frozen)
        return parameters

    def initial_state(
        self,
        weights: Mapping[str, np.ndarray] | None = None,
        frozen: Parameters = {},  # noqa: B006
    ) -> TrainState:
        """Returns the state before the first step, with the parameters that `initial_parameters`
        returns.
        """
        layout = self.layout
        parameters = self.initial_parameters(weights, frozen)
        shardings = None if layout.mesh is None else layout.shardings(self.shapes)
        moments = jax.jit(
            self.optimizer.init, out_shardings=None if shardings is None else shardings.optimizer
        )(parameters)
        loss_since_eval, loss_since_log = (
            layout.replicate(np.zeros(2, np.float32)) for _ in range(2)
        )
        return TrainState(
            layout.replicate(np.zeros((), np.int32)),
            parameters,
            moments,
            loss_since_eval,
            loss_since_log,
        )

    @property
    def tokens(self) -> int:
        """The tokens of a batch, with padding."""
        return self.rows * self.objective.conversations * self.length

    @cached_property
    def program(self) -> Any:
        """The step as a jitted function: (donated state, batch, frozen weights, teacher's weights)
        → (next state, metrics).
        """
        shardings = (
            None
            if self.layout.mesh is None
            else (self.layout.shardings(self.shapes), self.layout.replicated)
        )
        return jax.jit(self._step, donate_argnums=0, out_shardings=shardings)

    def _step(
        self,
        state: TrainState,
        batch: Batch,
        base: Parameters = {},  # noqa: B006
        teacher_weights: Parameters = {},  # noqa: B006
    ) -> tuple[TrainState, Metrics]:
        training = self.config.training
        model = self.model
        layout = self.layout
        key = jax.random.fold_in(random_key(training.seed), state.step)
        replicated = PartitionSpec()
        trained = trainable_parameters(layout.specs, model)
        inputs = (
            trained,
            layout.batch_spec,
            replicated,
            frozen_parameters(layout.specs, model),
            teacher_specs(self.teacher),
        )
        outputs = trained, replicated, replicated, replicated
        gradient = layout.shard_map(self._gradient, inputs, outputs)
        gradients, loss, counts_LE, metrics = gradient(
            state.parameters, batch, key, base, teacher_weights
        )
        updates, moments = self.optimizer.update(gradients, state.optimizer, state.parameters)
        parameters = optax.apply_updates(state.parameters, updates)
        norm = optax.tree.norm(gradients)
        if counts_LE is not None and model.experts is not None and model.experts.bias:
            kinds = model.period if model.scan_layers else model.num_blocks
            parameters = update_router_biases(
                parameters, counts_LE, self.config.moe.bias_update_rate, kinds
            )
        loss_and_count = jnp.stack([loss, jnp.ones(())])
        if training.nan_policy == "skip":
            finite = jnp.isfinite(loss) & jnp.isfinite(norm)
            loss_and_count = jnp.where(finite, loss_and_count, 0.0)
            parameters = jax.tree.map(partial(jnp.where, finite), parameters, state.parameters)
            moments = update_if(finite, moments, state.optimizer)
        since_eval, since_log = (
            total + loss_and_count for total in (state.loss_since_eval, state.loss_since_log)
        )
        next_state = TrainState(state.step + 1, parameters, moments, since_eval, since_log)
        return next_state, Metrics(loss, norm, self.optimizer.rates(state.step), counts_LE, metrics)

    def _gradient(
        self,
        parameters: Parameters,
        batch: Batch,
        key: jax.Array,
        base: Parameters,
        teacher_weights: Parameters,
    ) -> tuple[Parameters, jax.Array, jax.Array | None, jax.Array | None]:
        """Computes the gradients of the mean loss of a batch on the shards of one device.

        Returns:
          The gradients, the loss, the expert counts and the metrics.
        """
        model = self.model
        layout = self.layout
        t = self.config.training
        moe = self.config.moe
        build, _ = abstract_model(model)
        count = jnp.maximum(layout.parallelism.psum_batch(self.objective.divisor(batch)), 1.0)
        batch = add_kl(
            self.objective,
            lambda: layout.build_model(build, parameters | base),
            batch,
            layout,
            t.grad_accum,
        )

        def mean_loss(parameters: Parameters, part: Batch, key: jax.Array) -> tuple[jax.Array, Any]:
            built = layout.build_model(build, parameters | base)
            enable_dropout(built, key)
            inputs = part if self.teacher is None else self.teacher.attach(part, teacher_weights)
            total = self.objective.losses(built, inputs, self.config, nnx.Rngs(dropout=key))
            loss = total.nats + t.z_loss * total.penalty
            if total.routing is None:
                return loss / count, (total.nats, None, total.metrics)
            loss += moe.alpha_balance * total.routing.balance + moe.router_z_loss * total.routing.z
            return loss / count, (total.nats, total.routing.counts_E, total.metrics)

        no_counts = (
            None
            if model.experts is None
            else jnp.zeros((model.num_blocks, model.experts.count), jnp.int32)
        )
        zero_aux = (
            jnp.zeros(()),
            no_counts,
            jnp.zeros(len(self.objective.metrics)) if self.objective.metrics else None,
        )
        gradients, (nats, counts_LE, metrics) = _accumulate_gradients(
            mean_loss, parameters, batch, layout.device_key(key), t.grad_accum, zero_aux
        )
        metrics = None if metrics is None else layout.psum(metrics) / count
        return layout.reduce_gradients(gradients), layout.psum(nats) / count, counts_LE, metrics

    def traced(self, validation_rows: int | None = None) -> dict[str, TracedProgram]:
        """Traces the programs of a run, `train` and `evaluation`, from shapes only.

        There is no evaluation if rewards are evaluated instead of a loss.

        Args:
          validation_rows: the number of rows to evaluate; None: unknown. A call of the evaluation
            has at most as many rows.
        """
        config = self.config
        model = self.model
        layout = self.layout
        t = self.config.training
        rows = self.rows
        length = self.length
        # That many for each of the devices that share a row.
        tokens = EVAL_TOKENS_PER_CALL * layout.row_shards
        eval_rows = max(1, tokens // (self.objective.conversations * length)) * layout.batch_shards
        if validation_rows is not None:
            eval_rows = min(
                eval_rows, -(-validation_rows // layout.batch_shards) * layout.batch_shards
            )
        base = layout.place_shapes(frozen_parameters(layout.shapes, model))
        teacher_weights = {} if self.teacher is None else self.teacher.shapes
        train = self.program.trace(
            self.shapes, layout.place_batch(self.abstract_batch(rows)), base, teacher_weights
        )
        platform = get_platform(model.platform)
        options = platform.compiler_options(
            tree_bytes(abstract_model(replace(model, lora=None))[1])
        )
        if t.deterministic and platform.name == "gpu":
            options |= {"xla_gpu_deterministic_ops": "True"}  # XLA does not accept "true" here
        programs = {"train": TracedProgram(rows, length, train, options)}
        if self.objective.has_validation_loss:
            eval_batch = layout.place_batch(self.abstract_batch(eval_rows))
            evaluation = make_eval_step(model, layout, config, self.teacher).trace(
                self.shapes.parameters, eval_batch, base, teacher_weights
            )
            programs["evaluation"] = TracedProgram(eval_rows, length, evaluation, options)
        return programs

    def abstract_batch(self, rows: int) -> Any:
        """Returns the shapes of a batch of `rows` rows."""
        shapes = self.objective.abstract_batch(rows, self.length)
        if self.config.training.objective == "grpo" and self.config.grpo.updates > 1:
            return shapes._replace(old_RT=shapes.mask_RT)
        return shapes


def update_router_biases(
    parameters: Parameters, counts_LE: jax.Array, rate: float, kinds: int
) -> Parameters:
    """Moves each expert's router bias by `rate`: up if it had fewer tokens than the mean, down if
    it had more.

    Args:
      kinds: with scanned layers, the number of layers in the group that repeats; without scanning,
        the number of all layers.
    """
    moves_LE = rate * jnp.sign(jnp.mean(counts_LE, axis=1, keepdims=True) - counts_LE)
    updated = {}
    for name, bias in parameters.items():
        if not name.endswith("ffn/router/bias"):
            continue
        kind = int(name.split("/")[1])  # the index of the layer, or of its stack
        updated[name] = bias + moves_LE[kind::kinds].reshape(bias.shape)
    return parameters | updated


def _accumulate_gradients(
    objective: Callable,
    parameters: Parameters,
    batch: Batch,
    key: jax.Array,
    parts: int,
    zero_aux: Any,
) -> tuple[Parameters, Any]:
    """Sums gradients and auxiliary outputs of an objective over equal parts of a batch, one part in
    memory at a time.

    Args:
      zero_aux: zeros with the structure of the auxiliary outputs.
    """
    gradient = jax.grad(objective, has_aux=True)
    if parts == 1:
        return gradient(parameters, batch, key)
    split = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), batch)

    def add(total, part):
        index, micro = part
        return (
            jax.tree.map(
                jnp.add, total, gradient(parameters, micro, jax.random.fold_in(key, index))
            ),
            None,
        )

    zero = (jax.tree.map(jnp.zeros_like, parameters), zero_aux)
    total, _ = jax.lax.scan(add, zero, (jnp.arange(parts), split))
    return total


class Programs:
    """The compiled programs of a run, and the memory plan, which is known before the weights are
    allocated.

    Attributes:
      eval_rows: the rows of a validation batch; 0 if there is no validation loss.
    """

    def __init__(self, step: TrainStep, validation_rows: int | None = None):
        """Compiles the programs. `validation_rows` is an argument of `TrainStep.traced`."""
        traced = step.traced(validation_rows)
        train = traced["train"]
        evaluation = traced.get("evaluation")
        train_lowered = train.program.lower()
        self.eval_rows = 0
        self._evaluate: Future[Any] = Future()
        if evaluation is not None:
            self.eval_rows = evaluation.rows
            eval_lowered = evaluation.program.lower()
            # XLA often leaves a core idle while it compiles, so evaluation and step are compiled in
            # parallel.
            Thread(
                target=self._compile,
                args=(eval_lowered, evaluation.options),
                name="compile",
                daemon=True,
            ).start()
        # The arguments are those of `TrainStep.program`.
        self.train: Callable[..., tuple[TrainState, Metrics]] = compile_program(
            train_lowered, train.options
        )
        base = frozen_parameters(step.layout.shapes, step.model)
        all_weights = abstract_model(replace(step.model, lora=None))[1]
        teacher_weights = {} if step.teacher is None else step.teacher.shapes
        self.memory: MemoryPlan = plan_memory(
            self.train, step.shapes, base, tree_bytes(all_weights) // 4, teacher_weights
        )

    def evaluate(
        self,
        parameters: Parameters,
        batch: Batch,
        base: Parameters,
        teacher_weights: Parameters,
    ) -> LossSums:
        """Returns the summed losses of a validation batch of `eval_rows` rows."""
        return self._evaluate.result()(parameters, batch, base, teacher_weights)

    def _compile(self, lowered: Any, options: dict[str, str]) -> None:
        try:
            self._evaluate.set_result(compile_program(lowered, options))
        except BaseException as error:
            self._evaluate.set_exception(error)
