"""`dantinox explain`: how each sampling step changes the next-token distribution."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import GenerationSection
from dantinox.config.generation_settings import ROUTED_STEPS
from dantinox.config.router_settings import KEEP_ALL, STRATEGIES
from dantinox.config.sampling_steps import NUMBER_BOUNDS, STEPS
from dantinox.generation import LoadedModel
from dantinox.generation.api.attention_stats import AttentionStats, attention_stats, check_settings
from dantinox.generation.decode.generate_toks import attention_metrics, make_probe
from dantinox.generation.decode.prepared_model import dequantize
from dantinox.generation.static_batch import clamp_to_context, padded_length
from dantinox.generation.token_settings import with_default_seed
from dantinox.lab.measure.explain_attention import HeadWeights, check_head, head_weights
from dantinox.lab.measure.texts import padded_positions
from dantinox.model import Transformer
from dantinox.report.trace_file import replace_nonfinite
from dantinox.sampling import SamplerState, SamplingParams, init_state, sample, trace
from dantinox.sampling.entropy_router import ADAPTIVE, Route
from dantinox.text import Tokenizer

StepSettings = tuple[str, dict[str, Any]]  # a step's name and settings


@dataclass(frozen=True)
class Step:
    """The distribution after a sampling step.

    Attributes:
      settings: the settings of the step, name → value; empty for `model`, the first step, which
        stands for the logits before sampling.
      survivors: number of tokens that the step kept.
      mass: total probability of these tokens under the model.
      entropy: entropy of the distribution after the step, in bits.
      changed: whether the step changed any logit; True for `model`.
      others: total probability, after the step, of all tokens that are not shown.
    """

    name: str
    settings: dict[str, Any]
    survivors: int
    mass: float
    entropy: float
    changed: bool
    others: float


@dataclass(frozen=True)
class Token:
    """A token, its text, its displayed form, the step that removed it, and its probability after
    each step (float64).
    """

    id: int
    text: str
    shown: str
    removed_by: str | None
    probabilities: list[float]


@dataclass(frozen=True)
class Explanation:
    """The next-token distribution after a prompt, step by step.

    Attributes:
      greedy: whether the most likely token was chosen without sampling.
      strategy: the strategy of the entropy router; None without the router.
      forced: whether the router emitted its clarify token, or the first token of its clarify text,
        without sampling.
      steps: `model`, then the steps of the chain in order, then `candidates` if the router drew
        candidates.
      tokens: the most likely tokens under the model, best first, followed by any other sampled
        tokens.
      drawn: the token of each of the `n` samples.
      attention: statistics of the attention of the last token of the prompt, `[layers][heads]`
        each, by the names of `AttentionStats`; None if they were not requested.
      head: the attention weights of one head between all tokens of the prompt; None if they were
        not requested.
    """

    prompt: str
    prompt_tokens: int
    vocab_size: int
    greedy: bool
    strategy: str | None
    forced: bool
    seed: int
    steps: list[Step]
    tokens: list[Token]
    drawn: list[int]
    attention: dict[str, list[list[float]]] | None = None
    head: HeadWeights | None = None


def explain(
    run: LoadedModel,
    prompt: str | Sequence[int],
    settings: Mapping[str, Any],
    count: int = 20,
    *,
    attention: bool = False,
    head: tuple[int, int] | None = None,
) -> Explanation:
    """Traces the next-token distribution through the sampling chain that
    `run.generate(prompt, **settings)` would use.

    Args:
      prompt: text or token ids.
      settings: settings of the sections `generation`, `router` and `kv`, which override those of
        the run.
      count: how many of the most likely tokens to show.
      attention: also measure the attention of every head.
      head: also return the attention weights of this layer and query head, both from 0.

    Raises:
      UserError: a setting is invalid, or the prompt is empty or fills the context; with `attention`
        or `head`, the settings compress the cache or divide the model among devices; the `head`
        does not exist, or the prompt is too long for its map.
    """
    config = with_default_seed(run.settings(settings), secrets.randbits(32))
    if attention:
        check_settings(config)
    section = config.generation
    ids = run.prompt_ids(prompt) if isinstance(prompt, str) else list(prompt)
    model = run.prepared(section)
    # Raises an error if the prompt fills the context and leaves no room for one new token.
    clamp_to_context(np.array([len(ids)]), np.array([1]), model.config.max_context)
    if head is not None:
        check_head(model.config, head, len(ids), config)
    params = run.params([config] * section.n, range(section.n))
    # Only the steps that a sample uses, since every step of the plan becomes a row of the output.
    params = replace(params, plan=tuple(name for name in params.plan if params.enabled[name].any()))
    T = padded_length(len(ids))
    V = model.config.vocab_size
    tokens_1T = np.zeros((1, T), np.int32)
    tokens_1T[0, : len(ids)] = ids
    valid_BT = np.broadcast_to(np.arange(T) < len(ids), (section.n, T))
    state = init_state(
        params,
        jnp.asarray(np.repeat(tokens_1T, section.n, axis=0)),
        jnp.asarray(valid_BT),
        V,
        T + 1,  # the prompt and the next token
    )
    traced, route, drawn_B, forced_B = _trace_steps(
        model, jnp.asarray(tokens_1T), jnp.int32(len(ids)), params, state
    )
    step_settings = [("model", {}), *((name, _numbers(section, name)) for name in params.plan)]
    if route is not None:
        step_settings = _apply_router_settings(step_settings, route, config.router.candidates)
    strategy = None if route is None else STRATEGIES[int(route.strategy)]
    drawn = np.asarray(drawn_B).tolist()
    # `trace` appends `candidates` whenever there is a router. The slice drops it if the strategy
    # draws no candidates.
    steps, tokens = _steps_and_tokens(
        run.tokenizer,
        step_settings,
        np.asarray(traced, np.float64)[: len(step_settings)],
        drawn,
        count,
    )
    return Explanation(
        prompt=prompt if isinstance(prompt, str) else run.tokenizer.decode(ids),
        prompt_tokens=len(ids),
        vocab_size=V,
        greedy=not params.stochastic or strategy == "greedy",
        strategy=strategy,
        forced=bool(forced_B.any()),
        seed=section.seed or 0,  # never None here, but the type checker does not know
        steps=steps,
        tokens=tokens,
        drawn=drawn,
        # The statistics of a generated token are those of the query that produced it, here the last
        # token of the prompt. One drawn token is appended as the generated token.
        attention=(
            _by_layer(attention_stats(run, [*ids, drawn[0]], 1, config)) if attention else None
        ),
        head=(
            None
            if head is None
            else head_weights(run, ids, _displayed(run.tokenizer, ids), head, config)
        ),
    )


def _displayed(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [display_token(tokenizer, token) for token in ids]


def _by_layer(stats: AttentionStats) -> dict[str, list[list[float]]]:
    """Returns the statistics of a single step as lists `[layers][heads]`."""
    return {name: values_1LH[0].tolist() for name, values_1LH in stats._asdict().items()}


@nnx.jit(graph_updates=False)
def _trace_steps(
    model: Transformer,
    tokens_1T: jax.Array,
    length: jax.Array,
    params: SamplingParams,
    state: SamplerState,
) -> tuple[jax.Array, Route | None, jax.Array, jax.Array]:
    """Runs the sampling chain on the logits after the prompt.

    Returns:
      The first sample's logits after each step, `[S, V]`, and its route; the token of each sample;
      whether each was forced.
    """
    x_1TD, _, aux = dequantize(model).hidden(
        tokens_1T,
        padded_positions(tokens_1T, length[None]),
        probe=make_probe(params.uses_attention),
    )
    outputs = (
        dequantize(model).logits(x_1TD[:, length - 1]),
        attention_metrics(params.uses_attention, aux),
    )
    logits_BV, attention = jax.tree.map(lambda x: jnp.repeat(x, params.batch, axis=0), outputs)
    # A report without alternatives (0) is enough to get the decision of the router.
    token_B, _, drawn = sample(logits_BV, replace(params, report=0), state, attention=attention)
    routed = None if drawn.token is None else drawn.token.routed
    forced_B = jnp.zeros(params.batch, bool) if routed is None else routed.forced
    # Pairs (name of the step, logits after it), and the decision of the router for each row.
    followed, routes = trace(logits_BV, params, state, attention)
    return (
        jnp.stack([x_BV[0] for _, x_BV in followed]),
        jax.tree.map(lambda x: x[0], routes),
        token_B,
        forced_B,
    )


def _steps_and_tokens(
    tokenizer: Tokenizer,
    step_settings: Sequence[StepSettings],
    x_SV: np.ndarray,
    drawn: Sequence[int],
    count: int,
) -> tuple[list[Step], list[Token]]:
    """Summarizes the logits after each step, and collects the tokens to show."""
    names = [name for name, _ in step_settings]
    left_SV = x_SV > -np.inf
    largest_S1 = np.max(x_SV, axis=1, keepdims=True)
    # A softmax in float64, in which a row of only -inf gives zeros instead of NaN.
    weights_SV = np.where(
        left_SV, np.exp(x_SV - np.where(np.isfinite(largest_S1), largest_S1, 0)), 0
    )
    P_SV = weights_SV / np.maximum(weights_SV.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    bits_SV = np.where(P_SV > 0, -P_SV * np.log2(np.where(P_SV > 0, P_SV, 1)), 0)
    best = np.argsort(-x_SV[0], kind="stable")[:count].tolist()
    ids = [*best, *(token for token in dict.fromkeys(drawn) if token not in best)]
    lost_SV = left_SV[:-1] & ~left_SV[1:]
    columns = (  # the attributes of `Step` after its settings, in their order
        left_SV.sum(axis=1).tolist(),
        (P_SV[0] * left_SV).sum(axis=1).tolist(),
        bits_SV.sum(axis=1).tolist(),
        [True, *(x_SV[1:] != x_SV[:-1]).any(axis=1).tolist()],
        np.delete(P_SV, ids, axis=1).sum(axis=1).tolist(),
    )
    tokens = [
        Token(
            id=token,
            text=tokenizer.decode([token]),
            shown=display_token(tokenizer, token),
            # The first step that removed the token; row i of `lost_SV` belongs to step i + 1.
            removed_by=(
                names[1 + int(np.argmax(lost_SV[:, token]))] if lost_SV[:, token].any() else None
            ),
            probabilities=P_SV[:, token].tolist(),
        )
        for token in ids
    ]
    return [
        Step(*step, *numbers) for step, *numbers in zip(step_settings, *columns, strict=True)
    ], tokens


def _apply_router_settings(
    step_settings: Sequence[StepSettings], route: Route, candidates: int
) -> list[StepSettings]:
    """Replaces the settings that the router overrode, and appends its `candidates` step if the
    strategy drew candidates.
    """
    # A routed step has one setting, with the name of the step and of the attribute of `route`.
    found = [
        (
            name,
            {name: np.asarray(getattr(route, name)).item()} if name in ROUTED_STEPS else settings,
        )
        for name, settings in step_settings
    ]
    # Only the step `top_k` has this setting; 0 means "off", as in the settings.
    found = [
        (name, {name: 0} if settings.get("top_k") == KEEP_ALL else settings)
        for name, settings in found
    ]
    return found + (
        [("candidates", {"candidates": candidates})] if int(route.strategy) == ADAPTIVE else []
    )


def _numbers(section: GenerationSection, step: str) -> dict[str, Any]:
    """Returns the numeric settings of a step, or its first setting if none is a number, as JSON
    values with null for -inf.
    """
    settings = [key for key in STEPS[step].settings if key != "watermark_keys"]  # these are secret
    keys = [key for key in settings if key in NUMBER_BOUNDS] or settings[:1]
    return {key: replace_nonfinite(getattr(section, key)) for key in keys}


def display_token(tokenizer: Tokenizer, token: int) -> str:
    """Returns an unambiguous printable form of a token: in quotes, with escapes for unprintable
    characters.

    Special tokens have no quotes. A byte of an incomplete UTF-8 sequence is written in hexadecimal,
    such as `\\xe2`.
    """
    if token in tokenizer.special_ids:
        return "".join(map(_escape, str(tokenizer.core.id_to_token(token))))
    return '"' + "".join(map(_escape, tokenizer.token_text(token, "surrogateescape"))) + '"'


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not valid UTF-8
        return f"\\x{code - 0xDC00:02x}"
    if character in '"\\':
        return "\\" + character
    return (
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
    )
