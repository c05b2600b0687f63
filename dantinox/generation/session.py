"""A batch being decoded: `Session` pads the prompts, runs the compiled core chunk by chunk and hands tokens to the host."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.generation.decode import CHUNK, CachePlan, DecodeState, Emitted, _generate_toks
from dantinox.model import KVCache, Transformer
from dantinox.sampling import SamplingParams, StepInfo, init_state

NO_ID = -1


def bucket(length: int) -> int:
    """The padded length: the next power of two from 16, above 256 the next multiple of 256."""
    return max(16, 1 << (length - 1).bit_length()) if length <= 256 else -(-length // 256) * 256


class Chunk(NamedTuple):
    """What the host gets: `tokens[b, :counts[b]]` are row b's new tokens, `done` the rows that ended."""

    tokens: np.ndarray
    counts: np.ndarray
    done: np.ndarray
    info: StepInfo | None


class Session:
    """A batch being decoded. `start` reads the prompts and gives the first tokens, `advance` the next ones.

    Attributes:
      params: the sampling parameters, read anew by each call: other numbers in them hold from the next token on.
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
        samples: int = 1,
        use_cache: bool = True,
        report: int | None = None,
        plan: Callable[[int], CachePlan] | None = None,
    ):
        P, T = prompt_PT.shape
        padded_PT = np.zeros((P, bucket(T)), np.int32)
        padded_PT[:, :T] = np.where(np.arange(T) < lengths_P[:, None], prompt_PT, 0)
        lengths_B = np.repeat(lengths_P, samples)
        slots = bucket(int(np.max(lengths_B + limits_B)))
        tokens_BT = np.repeat(padded_PT, samples, axis=0)
        valid_BT = np.arange(padded_PT.shape[1]) < lengths_B[:, None]
        eos_BE = np.full((P * samples, max(1, *(len(ids) for ids in eos_ids))), NO_ID, np.int32)
        for row, ids in zip(eos_BE, eos_ids, strict=True):
            row[: len(ids)] = ids
        text_BS = np.zeros((P * samples, max(slots, padded_PT.shape[1])), np.int32)
        text_BS[:, : padded_PT.shape[1]] = tokens_BT
        self._model, self.params = model, params
        self._prompt = (jnp.asarray(padded_PT), jnp.asarray(lengths_P, jnp.int32))
        self._options: dict[str, Any] = {"use_cache": use_cache, "report": report}
        cache_plan = CachePlan(slots, jnp.dtype(model.dtype).name) if plan is None else plan(slots)
        self._first: dict[str, Any] = {"plan": cache_plan, "samples": samples}
        self.cache: KVCache | None = None
        self.echo: np.ndarray | None = None
        self.state = DecodeState(
            token_B=jnp.zeros(P * samples, jnp.int32),
            position_B=jnp.asarray(lengths_B - 1, jnp.int32),
            remaining_B=jnp.asarray(limits_B, jnp.int32),
            done_B=jnp.asarray(limits_B <= 0),
            eos_BE=jnp.asarray(eos_BE),
            sampler=init_state(params, jnp.asarray(tokens_BT), jnp.asarray(valid_BT), model.config.vocab_size, slots),
            text_BS=None if use_cache else jnp.asarray(text_BS),
        )
        self._left = int(np.max(limits_B, initial=0))

    def start(self) -> Chunk:
        """Prefill and the first token of every row."""
        self.cache, self.state, emitted, echo = _generate_toks(
            self._model, None, self.state, self.params, jnp.int32(0), self._prompt, **self._options, **self._first
        )
        self.echo = None if echo is None else np.asarray(echo)
        return self._hand_over(emitted, 1)

    def advance(self, steps: int = CHUNK) -> Chunk:
        """Up to `steps` ≤ 32 more tokens; nothing past the longest row's limit."""
        steps = min(steps, CHUNK, self._left)
        self.cache, self.state, emitted, _ = _generate_toks(
            self._model, self.cache, self.state, self.params, jnp.int32(steps), **self._options
        )
        return self._hand_over(emitted, steps)

    def finish(self, rows: np.ndarray) -> None:
        """Ends the rows marked in `rows [B]` before their next token."""
        self.state = replace(self.state, done_B=self.state.done_B | jnp.asarray(rows))

    def _hand_over(self, emitted: Emitted, steps: int) -> Chunk:
        self._left -= steps
        tokens, active, info, done = jax.device_get((emitted.tokens, emitted.active, emitted.info, self.state.done_B))
        info = None if info is None else jax.tree.map(lambda x: x[:, :steps], info)
        return Chunk(tokens[:, :steps], active[:, :steps].sum(1), done, info)
