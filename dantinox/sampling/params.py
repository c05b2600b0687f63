"""What every row of a batch asks for, and what decoding remembers about it: numbers as arrays, the plan static."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dantinox.config import GenerationSection, UserError, build_config
from dantinox.sampling.steps import GREEDY_BELOW

KEYS = ("greedy", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_tokens", "seed")
ORDER = ("min_tokens", "repetition_penalty", "temperature", "top_k", "top_p", "min_p")
BEFORE_GREEDY = ("min_tokens", "repetition_penalty")
UNUSED_ID = 2**31 - 1
FLOATS = np.finfo(np.float32)

Row = Mapping[str, Any]
NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_tokens", "stop_ids", "seed", "sample_index")


@partial(jax.tree_util.register_dataclass, data_fields=NUMBERS, meta_fields=("plan", "draws"))
@dataclass(frozen=True)
class SamplingParams:
    """The sampling numbers of a batch: arrays of shape [B], and the static plan that decides what is compiled.

    A temperature below 1e-5 makes a row greedy: the most likely token after the edits and penalties, the lowest id on ties.

    Attributes:
      stop_ids: [B, S] int32, the ids `min_tokens` bans; unused places hold an id outside every vocabulary.
      plan: the steps that some row has on, in the order they run.
      draws: whether some row draws at random; False compiles no draw at all.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    min_tokens: Array
    stop_ids: Array
    seed: Array
    sample_index: Array
    plan: tuple[str, ...]
    draws: bool

    @classmethod
    def build(
        cls,
        rows: Row | GenerationSection | Sequence[Row | GenerationSection],
        *,
        batch: int | None = None,
        stop_ids: Sequence[int] = (),
        sample_index: Sequence[int] | int = 0,
    ) -> "SamplingParams":
        """Parameters of a batch from plain numbers named as the keys of the `generation` section.

        Args:
          rows: one mapping (or section) for every row of `batch`, or one for each. Absent keys have their defaults.
          stop_ids: what `min_tokens` keeps from being generated: the end token and every one-token stop.
          sample_index: which sample of its prompt a row is; part of the random key, as the seed is.

        Raises:
          UserError: an unknown name, a value out of range, or a row that draws without a seed.
        """
        if isinstance(rows, (Mapping, GenerationSection)):
            rows = [rows] * (1 if batch is None else batch)
        if batch is not None and len(rows) != batch:
            raise UserError(f"sampling parameters must be one set or one per row: got {len(rows)} sets for {batch} rows")
        checked = [_validated(row) for row in rows]
        columns = {name: [row[name] for row in checked] for name in checked[0]} if checked else {}
        if not columns:
            raise UserError("sampling parameters need at least one row")
        stops = np.unique(np.asarray([*stop_ids], np.int32)) if len(stop_ids) else np.full(1, UNUSED_ID, np.int32)
        on = {name for row in checked for name in _steps_on(row)} - (set() if len(stop_ids) else {"min_tokens"})
        return cls(
            temperature=_floats(columns["temperature"]),
            top_k=jnp.asarray(np.minimum(columns["top_k"], 2**31 - 1), jnp.int32),
            top_p=_floats(columns["top_p"]),
            min_p=_floats(columns["min_p"]),
            repetition_penalty=_floats(columns["repetition_penalty"], float(FLOATS.tiny)),
            min_tokens=jnp.asarray(columns["min_tokens"], jnp.int32),
            stop_ids=jnp.tile(jnp.asarray(stops), (len(checked), 1)),
            seed=jnp.asarray(np.asarray(columns["seed"], np.uint32)),
            sample_index=jnp.broadcast_to(jnp.asarray(sample_index, jnp.int32), (len(checked),)),
            plan=tuple(name for name in ORDER if name in on),
            draws=any(not _is_greedy(row) for row in checked),
        )

    @property
    def batch(self) -> int:
        """The number of rows."""
        return self.temperature.shape[0]


@partial(jax.tree_util.register_dataclass, data_fields=("n_generated", "last_seen", "length"), meta_fields=())
@dataclass(frozen=True)
class SamplerState:
    """What sampling remembers while decoding; every array keeps its shape.

    Attributes:
      n_generated: [B] int32, tokens generated so far.
      last_seen: [B, V] int32, the newest position of a token in prompt and output, -1 for never; None when no step asks.
      length: [B] int32, tokens in prompt and output; None when no step asks.
    """

    n_generated: Array
    last_seen: Array | None
    length: Array | None


def init_state(params: SamplingParams, prompt_tokens_BT: Array, prompt_valid_BT: Array, vocab_size: int) -> SamplerState:
    """The state after a prompt, of which the places with `prompt_valid_BT` count."""
    B = params.batch
    n_generated = jnp.zeros(B, jnp.int32)
    if "repetition_penalty" not in params.plan:
        return SamplerState(n_generated, None, None)
    valid_BT = jnp.asarray(prompt_valid_BT, bool)
    position_BT = jnp.cumsum(valid_BT, axis=1, dtype=jnp.int32) - 1
    ids_BT = jnp.where(valid_BT, prompt_tokens_BT, vocab_size)
    rows_B1 = jnp.arange(B)[:, None]
    last_seen = jnp.full((B, vocab_size), -1, jnp.int32).at[rows_B1, ids_BT].max(position_BT, mode="drop")
    return SamplerState(n_generated, last_seen, valid_BT.sum(axis=1, dtype=jnp.int32))


def update(state: SamplerState, token_B: Array, active_B: Array | None = None) -> SamplerState:
    """The state after each active row has taken its token; the other rows stay as they are."""
    active_B = jnp.ones(token_B.shape, bool) if active_B is None else active_B
    n_generated = state.n_generated + active_B
    if state.last_seen is None or state.length is None:
        return SamplerState(n_generated, None, None)
    B, V = state.last_seen.shape
    ids_B = jnp.where(active_B, token_B, V)
    last_seen = state.last_seen.at[jnp.arange(B), ids_B].set(state.length, mode="drop")
    return SamplerState(n_generated, last_seen, state.length + active_B)


def _validated(row: Row | GenerationSection) -> dict[str, Any]:
    """All sampling numbers of one row, checked by the declarations of the `generation` section."""
    if isinstance(row, GenerationSection):
        section = row
    else:
        given = {name: value.item() if isinstance(value, np.generic) else value for name, value in row.items()}
        section = build_config({"generation": given}).generation
        unused = [name for name in given if name not in KEYS]
        if unused:
            raise UserError(f"generation.{unused[0]} is no sampling parameter: they are {', '.join(KEYS)}")
    numbers = {name: getattr(section, name) for name in KEYS}
    numbers["top_k"] = numbers["top_k"] or 0
    numbers["top_p"] = 1.0 if numbers["top_p"] is None else numbers["top_p"]
    numbers["temperature"] = 0.0 if numbers["greedy"] else numbers["temperature"]
    if numbers["seed"] is None:
        if not _is_greedy(numbers):
            raise UserError("generation.seed must be an integer when tokens are drawn at random, got null")
        numbers["seed"] = 0
    return numbers


def _is_greedy(row: Row) -> bool:
    return bool(np.float32(min(row["temperature"], 1.0)) < np.float32(GREEDY_BELOW))  # as the compiled comparison


def _steps_on(row: Row) -> set[str]:
    """The steps that change something in this row; a greedy row ignores all that come after the penalties."""
    on = {
        "min_tokens": row["min_tokens"] > 0,
        "repetition_penalty": row["repetition_penalty"] != 1,
        "temperature": row["temperature"] != 1,
        "top_k": row["top_k"] > 0,
        "top_p": row["top_p"] < 1,
        "min_p": row["min_p"] > 0,
    }
    return {name for name, used in on.items() if used and (name in BEFORE_GREEDY or not _is_greedy(row))}


def _floats(values: Sequence[float], least: float = 0.0) -> Array:
    """float32 values; what float32 cannot hold becomes its nearest finite (and, with `least`, non-zero) number."""
    return jnp.asarray(np.clip(np.asarray(values, np.float64), least, FLOATS.max), jnp.float32)
