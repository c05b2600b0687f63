"""`_prefill_toks` and `_generate_toks`, the compiled programs for prefill and decoding.

A batch prefills its prompts once, without their last tokens, and then calls `_generate_toks` once
per chunk of tokens. The first decode step processes the last token of every prompt. So the prefill
does not contain the sampler, all samplers share its program, and the sampler is compiled once.

Decoding is a `fori_loop` with a KV cache. The whole state of a row (token, position, limit, EOS
tokens, random key, sampling parameters) is in arrays with a batch axis, so rows of different
lengths and settings share one compiled program. What a step computes is chosen by a `Stepper`; what
only some batches need are features (`generation.decode.features`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import ModelConfig
from dantinox.generation.decode.cache_plan import CachePlan, Caches
from dantinox.generation.decode.features import Constants, Feature, Features, attach
from dantinox.generation.decode.low_precision_layers import MAX_MATVEC_ROWS
from dantinox.generation.decode.prepared_model import dequantize
from dantinox.generation.decode.split_model import SplitModel
from dantinox.model import KVCache, Transformer, make_cache
from dantinox.model.attention import Probe
from dantinox.model.scoring import token_logprobs
from dantinox.platform import Platform
from dantinox.programs import shared_trace
from dantinox.sampling import SamplerState, SamplingParams, StepInfo, init_state, sample
from dantinox.sampling.entropy_router import (
    AttentionMetrics,
    LayerAttention,
    combine_layers,
    layer_attention,
)
from dantinox.sampling.loops import in_loop

DECODE_CHUNK = 32  # tokens
# The longest part of a prompt that a compressed cache processes at a time.
COMPRESSED_PREFILL_CHUNK = 2048
# The most prompt tokens in one forward pass over several prompts. It bounds the memory for
# activations.
PREFILL_BATCH_TOKENS = 1 << 14


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["token_B", "position_B", "remaining_B", "done_B", "eos_BE", "sampler", "features"],
    meta_fields=[],
)
@dataclass(frozen=True)
class DecodeState:
    """The state of a batch between two tokens.

    Attributes:
      token_B: the newest token of each row, which the model has not processed yet; `position_B` is
        its position.
      remaining_B: the most tokens that each row may still generate.
      done_B: whether the row is finished; a finished row emits padding and does not write to the
        cache.
      eos_BE: the ids that end a row, padded with −1.
      features: what this batch uses besides.
    """

    token_B: jax.Array
    position_B: jax.Array
    remaining_B: jax.Array
    done_B: jax.Array
    eos_BE: jax.Array
    sampler: SamplerState
    features: Features = ()


class Emitted(NamedTuple):
    """The tokens of one step `[B]`, or of a chunk `[B, N]`.

    `active` is false for padding, which follows the tokens of a row. `recurrent` is
    `SamplerState.recurrent` after each token.
    """

    tokens: jax.Array
    active: jax.Array
    info: StepInfo | None
    recurrent: dict[str, jax.Array]


class StepLogits(NamedTuple):
    """The output of the model for the newest token of each row: logits `[B, V]`, and attention
    metrics `[B]` if used.
    """

    logits: jax.Array
    attention: AttentionMetrics | None


@dataclass(frozen=True)
class Stepper:
    """How a program decodes: one token of each row per step, with the keys and values of the
    earlier tokens in a cache.

    Other ways are subclasses. A stepper is a static argument of the programs.
    """

    @property
    def width(self) -> int:
        """The most tokens of a row in one step."""
        return 1

    def features(
        self, tokens_BS: np.ndarray, length_B: np.ndarray, width_B: np.ndarray
    ) -> Features:
        """Returns the features that the steps read, for rows with these tokens, of which `length_B`
        are valid.

        Args:
          width_B: the most tokens of each row in one step, at most `width`.
        """
        return ()

    def models(self, constants: Constants) -> tuple[SplitModel, ...]:
        """Returns the other models that read the text, in the order of their caches, which follow
        that of the model.
        """
        return ()

    def cache_plans(self, constants: Constants) -> list[tuple[ModelConfig, CachePlan]]:
        """Returns the architectures of these models, and the plans of their caches."""
        return []

    def prefill(
        self,
        model: Transformer,
        prompt: tuple[jax.Array, jax.Array],
        plan: CachePlan,
        features: Features,
        constants: Constants,
        *,
        echo: bool,
    ) -> tuple[jax.Array | None, Caches]:
        """Returns the hidden states of `prefill_prompts`, if `echo` needs them, and the caches."""
        x_PTD, cache = prefill_prompts(model, prompt, plan, features, constants, keep_states=echo)
        assert cache is not None
        return x_PTD, (cache,)

    def weights(self, model: Transformer, rows: int) -> Transformer:
        """Returns the model in the form that multiplies this number of rows."""
        return model if rows <= MAX_MATVEC_ROWS else dequantize(model)

    def forward(
        self, model: Transformer, caches: Caches, state: DecodeState, params: SamplingParams
    ) -> tuple[StepLogits, Caches]:
        """Returns the logits after the newest token of every row, and the caches updated with this
        token.
        """
        step_logits, cache = forward_step(model, caches[0], state, params)
        return step_logits, (cache,)

    def decode(
        self,
        model: Transformer,
        caches: Caches,
        state: DecodeState,
        params: SamplingParams,
        steps: jax.Array,
        constants: Constants,
        chunk: int,
    ) -> tuple[Caches, DecodeState, Emitted]:
        """Decodes `steps` ≤ `chunk` tokens per row, see `_generate_toks`."""
        model = attach(state.features, self.weights(model, state.token_B.shape[0]), constants)

        def body(i: jax.Array, carry: Any) -> Any:
            caches, state, buffers = carry
            step_logits, caches = self.forward(model, caches, state, params)
            state, emitted = sample_step(step_logits, state, params)
            return (
                caches,
                state,
                jax.tree.map(lambda buffer, x_B: buffer.at[:, i].set(x_B), buffers, emitted),
            )

        buffers = emitted_buffers(model, state, params, chunk)
        max_remaining = jnp.max(jnp.where(state.done_B, 0, state.remaining_B))
        result: tuple[Caches, DecodeState, Emitted] = jax.lax.fori_loop(
            0, jnp.minimum(steps, max_remaining), body, (caches, state, buffers)
        )
        return result


class Prefilled(NamedTuple):
    """The result of `_prefill_toks`: the caches of the B rows, and with `echo` ln p `[P, T]` of the
    prompt tokens.
    """

    caches: Caches
    echo: jax.Array | None


# With `graph_updates=True` the model would be an output of the program, and every call would copy
# all weights. With `graph=False` nnx treats the arguments as plain trees and traverses them once
# instead of several times.
_jit: Any = partial(nnx.jit, graph_updates=False, graph=False)
DECODE_NAMES = ("stepper", "chunk")


@partial(_jit, static_argnames=("stepper", "plan", "samples", "echo"))
def _prefill_toks(
    model: Transformer | SplitModel,
    prompt: tuple[jax.Array, jax.Array],
    features: Features,
    constants: Constants,
    *,
    stepper: Stepper,
    plan: CachePlan,
    samples: int = 1,
    echo: bool = False,
) -> Prefilled:
    """Reads the prompts of a batch of `P · samples` rows into new caches, except the last token of
    each prompt.

    Args:
      model: a `SplitModel` reduces the host overhead of a call considerably.
      prompt: (tokens `[P, T]` right-padded, lengths `[P]`).
      features: those of the rows.
      constants: the arrays of features and of the stepper that all rows share.
      plan: the plan of the cache.
      samples: the rows of each prompt, which are consecutive.
      echo: return the log-probabilities of the prompt tokens, 0 for the first one.
    """
    model = dequantize(model.merge(model.leaves) if isinstance(model, SplitModel) else model)
    features = jax.tree.map(lambda x_B: x_B[::samples], features)
    tokens_PT, lengths_P = prompt
    x_PTD, caches = stepper.prefill(
        model, (tokens_PT, lengths_P - 1), plan, features, constants, echo=echo
    )
    echo_PT = None if x_PTD is None else prompt_logprobs(model, x_PTD, tokens_PT)
    if samples > 1:
        caches = jax.tree.map(lambda x: jnp.repeat(x, samples, axis=0), caches)
    return Prefilled(caches, echo_PT)


@partial(_jit, static_argnames=DECODE_NAMES, donate_argnames=("caches",))
def _generate_toks(
    model: Transformer | SplitModel,
    caches: Caches,
    state: DecodeState,
    params: SamplingParams,
    steps: jax.Array,
    constants: Constants = {},  # noqa: B006 (never changed)
    *,
    stepper: Stepper,
    chunk: int = DECODE_CHUNK,
) -> tuple[Caches, DecodeState, Emitted]:
    """Runs the next `steps` steps, each of which generates from one to `stepper.width` tokens per
    row.

    Args:
      model: as in `_prefill_toks`.
      caches: keys and values of the tokens before `state`; donated.
      steps: at most `chunk`. It is a traced value, so short chunks use the same program.
      constants: the arrays of features and of the stepper that all rows share.

    Returns:
      Caches, state, and the tokens `[B, chunk · width]`.
    """
    model = model.merge(model.leaves) if isinstance(model, SplitModel) else model
    return stepper.decode(model, caches, state, params, jnp.minimum(steps, chunk), constants, chunk)


@cache
def generation_program(platform: Platform) -> Any:
    """Returns `_generate_toks` as a function that is compiled with the options of a platform."""
    if not platform.decoding_options:
        return _generate_toks
    options = dict(platform.decoding_options)  # which `nnx.jit` does not accept

    def generate(*args: Any, **kwargs: Any) -> Any:
        return _generate_toks(*args, **kwargs)

    return jax.jit(
        generate, static_argnames=DECODE_NAMES, donate_argnums=1, compiler_options=options
    )


def emitted_shapes(vocab_size: int, state: DecodeState, params: SamplingParams) -> Emitted:
    """Returns the shapes of what a step emits."""
    # The call has the same form as in a decode step, so that both share a trace.
    logits = abstract_logits(vocab_size, params)
    shapes: Emitted = jax.eval_shape(lambda *inputs: sample_step(*inputs, params), logits, state)[1]
    return shapes


def emitted_buffers(
    model: Transformer, state: DecodeState, params: SamplingParams, size: int
) -> Emitted:
    """Returns empty buffers for `size` tokens per row."""
    shapes = emitted_shapes(model.config.vocab_size, state, params)
    buffers: Emitted = jax.tree.map(
        lambda x: jnp.zeros((x.shape[0], size, *x.shape[1:]), x.dtype), shapes
    )
    return buffers


def init_row(
    params: SamplingParams,
    tokens_1S: jax.Array,
    length: jax.Array,
    generated: jax.Array,
    limit: jax.Array,
    end_ids_1E: jax.Array,
    features: Features,
    recurrent: Mapping[str, jax.Array],
    *,
    vocab_size: int,
) -> DecodeState:
    """Returns the decode state of one row from its tokens, whose keys are in the cache except that
    of the newest token.

    Args:
      tokens_1S: the prompt and the generated tokens, padded; `length` of them are valid, the last
        `generated` are generated.
      limit: the most further tokens.
      end_ids_1E: the ids that end the row, padded with −1.
      features: the features of the row, in any state.
      recurrent: as in `init_state`.
    """
    S = tokens_1S.shape[1]
    valid_1S = (jnp.arange(S) < length)[None]
    sampler = init_state(
        params,
        tokens_1S,
        valid_1S,
        vocab_size,
        S,
        generated_B=jnp.asarray(generated)[None],
        recurrent=recurrent,
    )
    started = tuple(feature.started(tokens_1S, length, generated) for feature in features)
    return DecodeState(
        token_B=jax.lax.dynamic_slice_in_dim(tokens_1S[0], length - 1, 1),
        position_B=jnp.asarray(length - 1)[None],
        remaining_B=jnp.asarray(limit)[None],
        done_B=jnp.zeros(1, bool),
        eos_BE=end_ids_1E,
        sampler=sampler,
        features=jax.tree.map(jnp.asarray, started),
    )


def write_row(rows: Any, row: Any, slot: jax.Array) -> Any:
    """Replaces one row in every array of a batch."""
    return jax.tree.map(
        lambda x, x_row: jax.lax.dynamic_update_slice_in_dim(x, x_row, slot, 0), rows, row
    )


def abstract_logits(vocab_size: int, params: SamplingParams) -> StepLogits:
    """Returns the shapes of the result of `forward_step` without tracing the model."""
    row_B: Any = jax.ShapeDtypeStruct((params.batch,), jnp.float32)
    logits_BV: Any = jax.ShapeDtypeStruct((params.batch, vocab_size), jnp.float32)
    attention = (
        AttentionMetrics(*[row_B] * len(AttentionMetrics._fields))
        if params.uses_attention
        else None
    )
    return StepLogits(logits_BV, attention)


def make_probe(attention: bool) -> Probe | None:
    """Returns the probe that measures the attention of each layer; None if the router does not use
    attention.
    """
    return jax.vmap(layer_attention) if attention else None


def attention_metrics(
    attention: bool, aux: Mapping[str, Sequence[LayerAttention]]
) -> AttentionMetrics | None:
    """Combines the results of the probe in all layers into metrics `[B]`; None without a probe."""
    return jax.vmap(combine_layers)(aux["probe"]) if attention else None


def prefill_prompts(
    model: Transformer,
    prompt: tuple[jax.Array, jax.Array],
    plan: CachePlan | None,
    features: Features = (),
    constants: Constants = {},  # noqa: B006 (never changed)
    *,
    keep_states: bool = False,
) -> tuple[jax.Array | None, KVCache | None]:
    """Returns with `keep_states` the final hidden states `[P, T, D]` of the prompts, and the new
    cache.

    Without a plan, there is no cache. A batch with more than `PREFILL_BATCH_TOKENS` tokens is
    processed in several passes, each over some of the prompts.

    Args:
      prompt: (tokens `[P, T]` right-padded, the number `[P]` of tokens to read).
      features: those of the prompts.
    """
    tokens_PT, lengths_P = prompt
    P, T = tokens_PT.shape
    index_T = jnp.arange(T)
    positions_PT = jnp.where(index_T < lengths_P[:, None], index_T, -1)

    def read_prompts(prompts: tuple[Any, ...]) -> Any:
        tokens_RT, positions_RT, features = prompts
        cache = None if plan is None else make_cache(model.config, tokens_RT.shape[0], *plan)
        x_RTD, cache = _prefill_rows(
            attach(features, model, constants), tokens_RT, positions_RT, cache
        )
        return x_RTD if keep_states else None, cache

    # The most prompts of a pass, such that all passes have the same number.
    divisors = [rows for rows in range(1, P + 1) if P % rows == 0]
    rows = max(rows for rows in divisors if rows == 1 or rows * T <= PREFILL_BATCH_TOKENS)
    prompts = tokens_PT, positions_PT, features
    if rows == P:
        x_PTD, cache = read_prompts(prompts)
    else:
        results = jax.lax.map(
            read_prompts, jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), prompts)
        )
        x_PTD, cache = jax.tree.map(lambda x: x.reshape(P, *x.shape[2:]), results)
    return x_PTD, cache


def prefill_hidden(
    model: Transformer, tokens_BT: jax.Array, positions_BT: jax.Array, cache: KVCache | None
) -> tuple[jax.Array, KVCache | None]:
    """Returns the hidden states of a prompt or of a part of a prompt, and the updated cache of any
    kind.

    If the cache needs two passes, the tokens are repeated at the positions that follow them, so
    that attention reads them as a repetition (Kim et al. 2025). The outputs of the repetition are
    dropped.
    """
    if cache is None or not cache.needs_two_passes or tokens_BT.shape[1] == 1:
        x_BTD, cache, _ = model.hidden(tokens_BT, positions_BT, cache=cache)
        return x_BTD, cache
    count_B1 = jnp.sum(positions_BT >= 0, axis=1, keepdims=True)
    positions_BU = jnp.concatenate(
        [positions_BT, jnp.where(positions_BT >= 0, positions_BT + count_B1, -1)], axis=1
    )
    x_BTD, cache, _ = model.hidden(
        jnp.tile(tokens_BT, (1, 2)), positions_BU, cache=cache.for_two_passes()
    )
    return x_BTD[:, : tokens_BT.shape[1]], cache


def prompt_logprobs(model: Transformer, x_PTD: jax.Array, tokens_PT: jax.Array) -> jax.Array:
    """Returns ln p `[P, T]` of the tokens of each prompt given the tokens before them; 0 for the
    first.
    """
    return jnp.pad(token_logprobs(model, x_PTD[:, :-1], tokens_PT[:, 1:]), ((0, 0), (1, 0)))


def _prefill_rows(
    model: Transformer, tokens_PT: jax.Array, positions_PT: jax.Array, cache: KVCache | None
) -> tuple[jax.Array, KVCache | None]:
    """Returns the final hidden states `[P, T, D]`, and the cache after the prompts.

    With a compressed cache, long prompts are processed in parts of at most
    `COMPRESSED_PREFILL_CHUNK` tokens, and the cache evicts tokens after each part.
    """
    P, T = tokens_PT.shape
    parts = -(-T // COMPRESSED_PREFILL_CHUNK) if cache is not None and cache.compressed else 1
    if parts == 1:
        if cache is not None and not cache.needs_two_passes:
            cache = cache.for_prefill(model.config, model.parallelism)
        return prefill_hidden(model, tokens_PT, positions_PT, cache)
    size = -(-T // parts)
    padding = ((0, 0), (0, parts * size - T))
    padded = jnp.pad(tokens_PT, padding), jnp.pad(positions_PT, padding, constant_values=-1)

    def prefill_part(cache: KVCache | None, part: tuple[jax.Array, ...]) -> Any:
        x_PtD, cache = prefill_hidden(model, part[0], part[1], cache)
        return cache, x_PtD

    split = [x.reshape(P, parts, size).transpose(1, 0, 2) for x in padded]
    cache, x_NPtD = jax.lax.scan(prefill_part, cache, tuple(split))
    return x_NPtD.transpose(1, 0, 2, 3).reshape(P, parts * size, -1)[:, :T], cache


def read_token(
    model: Transformer,
    cache: KVCache,
    token_B: jax.Array,
    position_B: jax.Array,
    attention: bool = False,
) -> tuple[StepLogits, KVCache]:
    """Returns the logits after one more token of every row, and the cache updated with this token.

    Args:
      position_B: the position of the token; −1 for a row that reads nothing.
      attention: whether to measure the attention of the token.
    """
    x_B1D, updated, aux = model.hidden(
        token_B[:, None], position_B[:, None], cache=cache, probe=make_probe(attention)
    )
    assert updated is not None
    return StepLogits(model.logits(x_B1D[:, 0]), attention_metrics(attention, aux)), updated


def forward_step(
    model: Transformer, cache: KVCache, state: DecodeState, params: SamplingParams
) -> tuple[StepLogits, KVCache]:
    """Returns the logits after the newest token of every row, and the cache updated with this
    token.
    """
    position_B = jnp.where(state.done_B, -1, state.position_B)
    return read_token(model, cache, state.token_B, position_B, params.uses_attention)


@shared_trace()  # one trace serves prefill and decoding
def sample_step(
    step_logits: StepLogits, state: DecodeState, params: SamplingParams
) -> tuple[DecodeState, Emitted]:
    """Draws the next token of every active row and updates the state of the rows."""
    active_B = ~state.done_B
    logits_BV = step_logits.logits
    for feature in state.features:
        logits_BV = feature.logits(logits_BV)
    token_B, sampler, drawn = sample(
        logits_BV,
        params,
        state.sampler,
        attention=step_logits.attention,
        active_B=active_B,
    )
    token_B = _from_main_rows(state.features, token_B)
    position_B = state.position_B + active_B
    remaining_B = state.remaining_B - active_B
    ended_B = (token_B[:, None] == state.eos_BE).any(1) | (remaining_B <= 0)
    if params.loops is not None:
        assert sampler.loop_runs is not None
        ended_B |= params.loops.stops & in_loop(sampler.loop_runs, params.loops)
    state = DecodeState(
        token_B=jnp.where(active_B, token_B, state.token_B),
        position_B=position_B,
        remaining_B=remaining_B,
        done_B=state.done_B | _from_main_rows(state.features, ended_B),
        eos_BE=state.eos_BE,
        sampler=sampler,
        features=tuple(feature.after(token_B, position_B, active_B) for feature in state.features),
    )
    return state, Emitted(token_B, active_B, drawn.token, sampler.recurrent)


def _from_main_rows(features: Sequence[Feature], x_B: jax.Array) -> jax.Array:
    """Returns for each row the value of the row that it follows, or its own if it follows none."""
    for feature in features:
        x_B = feature.from_main_rows(x_B)
    return x_B
