"""`StaticBatch`: the batch of offline generation. All prompts are padded, prefilled in one call,
and decoded to the end.
"""

import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import UserError
from dantinox.generation.decode.cache_plan import CachePlan
from dantinox.generation.decode.features import Constants, Features
from dantinox.generation.decode.generate_toks import (
    DECODE_CHUNK,
    DecodeState,
    Emitted,
    Prefilled,
    Stepper,
    _generate_toks,
    _prefill_toks,
    emitted_shapes,
    generation_program,
    init_row,
    write_row,
)
from dantinox.generation.decode.split_model import split_model
from dantinox.generation.run_timer import RunTimer, Times
from dantinox.generation.running_batch import (
    PendingChunk,
    Recurrent,
    Row,
    RowStatus,
    RunningBatch,
    pad_end_ids,
    restart_slots,
)
from dantinox.model import KVCache, Transformer
from dantinox.platform import get_platform
from dantinox.sampling import SamplingParams, StepInfo, init_state
from dantinox.sampling.params import next_power_of_two

PROGRAM_NAME = "static"  # the key of the only program


_compiled_init_row = jax.jit(init_row, static_argnames=("vocab_size",))
_compiled_write_row = jax.jit(write_row)


@jax.jit
def _read_row(rows: Any, slot: jax.Array) -> Any:
    """Returns one row of every array of a batch."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), rows)


T = TypeVar("T")


class ToShapes(Protocol):
    """Maps every array or shape of a pytree to a shape with the sharding of the target device."""

    def __call__(self, tree: T, /) -> T: ...


def padded_length(length: int) -> int:
    """Returns the padded length: the next power of two, at least 16; above 512 also 1.5 times a
    power of two.

    Every padded length needs a compiled program, so there are few of them: ten between 257 and
    8,192.
    """
    power = next_power_of_two(length, 16)
    return 3 * power // 4 if power > 512 and length <= 3 * power // 4 else power


def stack_prompts(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the prompts as an array `[P, T]`, padded with zeros to the longest one, and their
    lengths `[P]`.
    """
    lengths_P = np.array([len(ids) for ids in prompts], np.int32)
    prompt_PT = np.zeros((len(prompts), lengths_P.max()), np.int32)
    for prompt_T, ids in zip(prompt_PT, prompts, strict=True):
        prompt_T[: len(ids)] = ids
    return prompt_PT, lengths_P


def pad_prompts(
    prompt_PT: np.ndarray, lengths_P: np.ndarray, pad: Callable[[int], int]
) -> np.ndarray:
    """Returns the prompts with zeros after their end, in the padded length."""
    P, T = prompt_PT.shape
    padded_PT = np.zeros((P, pad(T)), np.int32)
    padded_PT[:, :T] = np.where(np.arange(T) < lengths_P[:, None], prompt_PT, 0)
    return padded_PT


def slots_needed(
    lengths: np.ndarray, limits: np.ndarray, pad: Callable[[int], int] = padded_length
) -> int:
    """Returns the cache slots per row: the padded length of the longest row.

    Row i has `lengths[i]` prompt tokens and up to `limits[i]` new tokens.
    """
    return pad(int(np.max(lengths + limits)))


def clamp_to_context(
    lengths_B: np.ndarray, requested_B: np.ndarray, max_context: int
) -> np.ndarray:
    """Returns the new tokens per row, reduced to what fits into the context; prints one warning if
    any row is reduced.

    Raises:
      UserError: a prompt fills the context.
    """
    room_B = max_context - lengths_B
    full_B = (room_B <= 0) & (requested_B > 0)
    if full_B.any():
        raise UserError(
            f"the prompt has {int(lengths_B[full_B].max())} tokens and fills the model's context of"
            f" {max_context}: shorten it"
        )
    room_B = np.maximum(room_B, 0)
    excess = int(np.max(requested_B - room_B, initial=0))
    if excess > 0:
        row = int(np.argmax(requested_B - room_B))
        warnings.warn(
            f"the context of {max_context} tokens leaves room for {room_B[row]} new tokens after a"
            f" prompt of {lengths_B[row]}: {excess} fewer than requested",
            stacklevel=3,
        )
    limits_B: np.ndarray = np.minimum(requested_B, room_B)
    return limits_B


class DecodedChunk(NamedTuple):
    """The new tokens of all rows: `tokens[b, :counts[b]]` for row b. `done` marks the rows that
    have ended.
    """

    tokens: np.ndarray
    counts: np.ndarray
    done: np.ndarray
    info: StepInfo | None


@dataclass(frozen=True)
class StaticOptions:
    """How a `StaticBatch` decodes, and what it reports.

    Attributes:
      stepper: what a step computes.
      plan: the plan of the cache; None: an uncompressed cache in the dtype of the model.
      pad: function from the length of the longest prompt to the padded length.
      samples: the rows of each prompt.
      main_rows: the number of rows M that return tokens. Row r + k · M, for k ≥ 1, follows row r.
        None: all rows.
      features: the features of the rows, except those of the stepper.
      constants: the arrays of the features and the stepper that all rows share.
      constrained: whether guides may restrict the tokens of a row, or restart it.
      report: the number of alternatives to report per token; None: report nothing.
      echo: whether to report the log-probabilities of the prompt tokens.
    """

    stepper: Stepper = field(default_factory=Stepper)
    plan: CachePlan | None = None
    pad: Callable[[int], int] = padded_length
    samples: int = 1
    main_rows: int | None = None
    features: Features = ()
    constants: Constants = field(default_factory=dict)
    constrained: bool = False
    report: int | None = None
    echo: bool = False


class StaticBatch(RunningBatch):
    """A batch of prompts that start together, in a program that contains only the sampling steps
    that their settings use.

    `OfflineEngine` runs the batch. Code that works on token ids needs no engine: it calls `run`, or
    `start` for the first step and `advance` for the next tokens.

    Attributes:
      echo: log-probabilities `[P, T]` of the prompt tokens, if requested; available after the first
        chunk.
      before_dispatch: called before each chunk; it may assign new `params`.
      times: the times of `run`, after its end.
    """

    def __init__(
        self,
        model: Transformer,
        prompt_PT: np.ndarray,
        lengths_P: np.ndarray,
        params: SamplingParams,
        *,
        limits_B: np.ndarray,
        eos_ids: Sequence[Sequence[int]],
        options: StaticOptions = StaticOptions(),
    ):
        """Creates the rows. The samples of a prompt are consecutive rows.

        Args:
          prompt_PT: the prompts, right-padded to any length; `lengths_P` holds their true lengths.
          limits_B: the most new tokens of each row.
          eos_ids: for each row, the ids that end it.
        """
        super().__init__(
            len(prompt_PT) * options.samples,
            model.config.vocab_size,
            constrained=options.constrained,
        )
        self.times = Times()
        self.echo: np.ndarray | None = None
        self.before_dispatch: Callable[[], None] = lambda: None
        self._rows = self._make_rows(limits_B, options)
        lengths_B = np.repeat(lengths_P, options.samples)
        plan = options.plan
        if plan is None:
            plan = CachePlan(
                slots_needed(lengths_B, limits_B, options.pad), jnp.dtype(model.dtype).name
            )
        width = options.stepper.width
        plan = plan._replace(extra=restart_slots(width) if options.constrained else width - 1)
        self.can_restart = options.constrained and plan.compression is None
        self._capacity = plan.slots
        self._vocab_size = model.config.vocab_size
        padded_PT = pad_prompts(prompt_PT, lengths_P, options.pad)
        tokens_BT = np.repeat(padded_PT, options.samples, axis=0)
        state = self._initial_state(tokens_BT, lengths_B, params, limits_B, eos_ids, options)
        self._report = options.report
        self._states[PROGRAM_NAME] = replace(params, report=options.report), state
        self._model = split_model(model)
        self._prompt = jax.device_put((padded_PT, lengths_P.astype(np.int32)))
        self._program = generation_program(get_platform(model.config.platform))
        self._options: dict[str, Any] = {
            "constants": options.constants,
            "stepper": options.stepper,
        }
        self._prefill_options = {
            **self._options,
            "plan": plan,
            "samples": options.samples,
            "echo": options.echo,
        }
        self._prefilled = False

    def _initial_state(
        self,
        tokens_BT: np.ndarray,
        lengths_B: np.ndarray,
        params: SamplingParams,
        limits_B: np.ndarray,
        eos_ids: Sequence[Sequence[int]],
        options: StaticOptions,
    ) -> DecodeState:
        """Returns the state after the prompts `tokens_BT` of all rows, whose lengths are
        `lengths_B`.
        """
        T = tokens_BT.shape[1]
        widths_B = np.full(self.count, options.stepper.width)
        sequence_BS = np.pad(tokens_BT, ((0, 0), (0, max(0, self._capacity - T))))
        arrays = {
            "token_B": sequence_BS[np.arange(self.count), lengths_B - 1],
            "position_B": np.asarray(lengths_B - 1, np.int32),
            "remaining_B": np.asarray(limits_B, np.int32),
            "done_B": np.asarray(limits_B <= 0),
            "eos_BE": pad_end_ids(eos_ids),
            "features": (
                options.features + options.stepper.features(sequence_BS, lengths_B, widths_B)
            ),
        }
        valid_BT = np.arange(T) < lengths_B[:, None]
        return DecodeState(
            **jax.device_put(arrays),  # compiles nothing, unlike `jnp.asarray`
            sampler=init_state(params, tokens_BT, valid_BT, self._vocab_size, self._capacity),
        )

    def _make_rows(self, limits_B: np.ndarray, options: StaticOptions) -> list[Row]:
        """Returns the rows on the host; a row that follows another one has no program of its
        own.
        """
        main_rows = options.main_rows or self.count
        rows = [Row() for _ in limits_B]
        for slot, limit in enumerate(limits_B[:main_rows].tolist()):
            followers = tuple(range(slot + main_rows, self.count, main_rows))
            program = PROGRAM_NAME if limit > 0 else None
            rows[slot] = Row(program, limit, options.report is not None, followers=followers)
        return rows

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters. New parameters assigned here apply from the next chunk on."""
        params: SamplingParams = self._states[PROGRAM_NAME][0]
        return params

    @params.setter
    def params(self, params: SamplingParams) -> None:
        self._states[PROGRAM_NAME] = replace(params, report=self._report), self.state

    @property
    def _read_params(self) -> SamplingParams:
        """The sampling parameters that the program reads."""
        host_params = self._host_params(PROGRAM_NAME)
        return replace(self.params, **host_params) if host_params else self.params

    @property
    def state(self) -> DecodeState:
        return self._states[PROGRAM_NAME][1]

    @property
    def done(self) -> np.ndarray:
        """The rows `[B]` that have ended."""
        return np.array([row.program is None for row in self._rows])

    @property
    def has_work(self) -> bool:
        """Whether new tokens or the log-probabilities of the prompts remain to be computed."""
        return bool(self.remaining()) or (self._prefill_options["echo"] and not self._prefilled)

    @property
    def no_steps(self) -> StepInfo | None:
        """A `StepInfo` of zero steps; None without reports."""
        if self._report is None:
            return None
        shapes = emitted_shapes(self._vocab_size, self.state, self._read_params)
        empty: StepInfo | None = jax.tree.map(
            lambda x: np.zeros((0, *x.shape[1:]), x.dtype), shapes.info
        )
        return empty

    def dispatch(self, steps: int) -> PendingChunk:
        """Starts a chunk, as in `RunningBatch`. The first chunk prefills the prompts and has one
        step.
        """
        prefills = not self._prefilled
        self.before_dispatch()
        if prefills:
            self._prefill()
        return super().dispatch(1 if prefills else steps)

    def _prefill(self) -> None:
        prefilled: Prefilled = _prefill_toks(
            self._model, self._prompt, self.state.features, **self._prefill_options
        )
        self.caches = prefilled.caches
        self.echo = None if prefilled.echo is None else np.asarray(prefilled.echo)
        self._prefilled = True

    def restart(self, slot: int, tokens: Sequence[int], prompt_length: int, limit: int) -> None:
        previous = self._rows[slot]
        generated = len(tokens) - prompt_length
        history = previous.history[:generated]
        row = replace(previous, program=PROGRAM_NAME, remaining=limit, history=history)
        self._rows[slot] = row
        self._replace_state(slot, tokens, generated, limit, history[-1] if history else {})
        prompt_PT, lengths_P = self._prompt
        for follower in row.followers:
            prompt = follower // self._prefill_options["samples"]
            ids = np.asarray(prompt_PT)[prompt, : int(lengths_P[prompt])].tolist()
            self._replace_state(follower, [*ids, *tokens[prompt_length:]], generated, limit, {})
        previous.program = None  # so that its pending chunks are dropped

    def _replace_state(
        self, slot: int, tokens: Sequence[int], generated: int, limit: int, recurrent: Recurrent
    ) -> None:
        """Replaces the state of a row by that after these tokens, the last `generated` of which are
        generated.
        """
        params, state = self._states[PROGRAM_NAME]
        tokens_1S = np.zeros((1, self._capacity), np.int32)
        tokens_1S[0, : len(tokens)] = tokens
        names = sorted(state.sampler.recurrent)
        values = {name: np.asarray([recurrent.get(name, np.nan)], np.float32) for name in names}
        # Batches with and without reports share the programs.
        read = replace(params, report=None), state.eos_BE, state.features
        row_params, end_ids_1E, features = _read_row(read, np.int32(slot))
        initial = _compiled_init_row(
            row_params,
            tokens_1S,
            np.int32(len(tokens)),
            np.int32(generated),
            np.int32(limit),
            end_ids_1E,
            features,
            values,
            vocab_size=self._vocab_size,
        )
        self._states[PROGRAM_NAME] = params, _compiled_write_row(state, initial, np.int32(slot))
        self._drop_changes(PROGRAM_NAME, slot)

    def _decode(self, program: Hashable, steps: int) -> tuple[Emitted, RowStatus]:
        params, state = self._states[program]
        self.caches, state, emitted = self._program(
            self._model, self.caches, state, self._read_params, np.int32(steps), **self._options
        )
        self._states[program] = params, state
        return emitted, RowStatus.of(state)

    # --- without an engine

    def run(
        self, steps: int = DECODE_CHUNK, *, dispatch_ahead: bool = False
    ) -> Iterator[DecodedChunk]:
        """Decodes to the end and yields chunks. The first chunk has one step. Yields nothing if no
        row may decode.

        Args:
          steps: tokens per chunk, at most 32.
          dispatch_ahead: dispatch a chunk before the previous one is returned, so that the device
            does not wait for the host.
        """
        if not self.has_work:
            return
        with RunTimer() as timer:
            chunk = self.start()
            timer.mark_first()
            yield chunk
            pending: deque[PendingChunk] = deque()
            while not self.done.all():
                while self.remaining() and len(pending) <= dispatch_ahead:
                    pending.append(self.dispatch(steps))
                yield self._to_chunk(pending.popleft())
        self.times = timer.times

    def start(self) -> DecodedChunk:
        """Prefills the prompts and returns the tokens of the first step."""
        return self._to_chunk(self.dispatch(1))

    def advance(self, steps: int = DECODE_CHUNK) -> DecodedChunk:
        """Returns up to `steps` ≤ 32 more tokens of every row."""
        return self._to_chunk(self.dispatch(steps))

    def resume(self, cache: KVCache) -> None:
        """Sets a cache that already holds the prompts, so that the prefill is skipped."""
        self.caches = (cache,)
        self._prefilled = True

    def finish(self, rows_B: np.ndarray) -> None:
        """Ends the rows marked in `rows_B` before their next token."""
        for slot in np.flatnonzero(rows_B):
            self.stop(int(slot))

    def _to_chunk(self, pending: PendingChunk) -> DecodedChunk:
        if not pending.parts:
            return DecodedChunk(
                np.zeros((self.count, 0), np.int32), np.zeros(self.count, int), self.done, None
            )
        running = ~self.done
        (part,) = pending.parts  # of the only program
        fetched = self._fetch(part)
        counts_B = np.where(running, fetched.active_BN.sum(1), 0)
        for slot in np.flatnonzero(running):
            self._add_counts(
                self._rows[slot], int(slot), fetched.status, int(counts_B[slot]) - pending.steps
            )
        for slot in np.flatnonzero(fetched.status.done_B):
            self._rows[slot].program = None
        N = max(pending.steps, int(counts_B.max()))
        info = jax.tree.map(lambda x: x[:, :N], fetched.info)
        return DecodedChunk(fetched.tokens_BN[:, :N], counts_B, self.done, info)

    def trace(self, to_shapes: ToShapes) -> tuple[jax.stages.Traced, jax.stages.Traced]:
        """Traces the programs of prefill and decoding without lowering them; the model may hold
        shapes instead of arrays.

        Args:
          to_shapes: maps arrays and shapes to shapes for the target device.
        """
        model, prompt, state, params = to_shapes(
            (self._model, self._prompt, self.state, self._read_params)
        )
        prefill = _prefill_toks.jitted_fn.trace(
            model, prompt, state.features, **self._prefill_options
        )
        prefilled, _ = prefill.out_info
        caches, steps = to_shapes((prefilled.caches, jnp.int32(0)))
        return prefill, _generate_toks.jitted_fn.trace(
            model, caches, state, params, steps, **self._options
        )
