"""Decodes a batch of rows whose samplers differ, in one compiled program.

Every row has a `Control`: fixed numbers, an entropy router, a router whose strategies are drawn at
random, or a learned policy. All of them are inputs of the program. The filters and the draw are
those of `dantinox.sampling`.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from dantinox.config.router_settings import KEEP_ALL, STRATEGIES, THRESHOLDS
from dantinox.generation.decode.cache_plan import CachePlan
from dantinox.generation.decode.generate_toks import prefill_prompts, read_token
from dantinox.lab.studies.continuations import FORCING_THRESHOLDS
from dantinox.sampling import SamplingParams
from dantinox.sampling.chain import sample
from dantinox.sampling.draw import row_key
from dantinox.sampling.entropy_router import Metrics, RouterConfig, logit_metrics, route
from dantinox.sampling.state import SamplerState

FIXED, ROUTER, RANDOM, POLICY = range(4)
METRICS = (
    "entropy", "varentropy", "attn_entropy", "attn_varentropy", "attn_agreement",
    "interaction_strength",
)  # fmt: skip
NEW = 34  # tokens in the result of `decode`, and the most that it generates
STRATEGY_KEY = 3  # folded into the key of the draw
STEPS = {
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.1,
}  # a chain with the steps that controls set


class Numbers(NamedTuple):
    """The numbers of the four steps for one token."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array


class Control(NamedTuple):
    """The sampler of one row; a batch has a leading axis.

    Attributes:
      kind: FIXED, ROUTER, RANDOM or POLICY.
      numbers: those of FIXED.
      router: the settings of ROUTER and RANDOM.
      shares_S: the probability of each strategy in RANDOM.
      policy_27: the weights of POLICY: from the six metrics and 1 to ln temperature and to the
        logit of min_p.
    """

    kind: Array
    numbers: Numbers
    router: RouterConfig
    shares_S: Array
    policy_27: Array


class Decoded(NamedTuple):
    """R rows: tokens, the number of tokens, and for each token the metrics and what was decided."""

    tokens_RN: Array
    count_R: Array
    metrics_RN6: Array
    temperature_RN: Array
    min_p_RN: Array
    strategy_RN: Array


def decide(
    control: Control, metrics: Metrics, scaled_6: Array, key: Array
) -> tuple[Numbers, Array]:
    """Returns the numbers of the next token of a row, and the id of the router's strategy.

    Args:
      scaled_6: the six metrics, each with mean 0 and standard deviation 1 on a sample of tokens.
      key: the key of the row's draw.
    """
    drawn = jax.random.categorical(jax.random.fold_in(key, STRATEGY_KEY), jnp.log(control.shares_S))
    forced = dict(zip(THRESHOLDS, jnp.asarray(FORCING_THRESHOLDS)[drawn], strict=True))
    thresholds = {
        name: jnp.where(control.kind == RANDOM, forced[name], getattr(control.router, name))
        for name in THRESHOLDS
    }
    routed = route(metrics, replace(control.router, **thresholds))
    ln_temperature, logit = control.policy_27 @ jnp.append(jnp.clip(scaled_6, -3, 3), 1)
    by_router = Numbers(routed.temperature, routed.top_k, routed.top_p, routed.min_p)
    by_policy = Numbers(
        jnp.exp(ln_temperature), jnp.int32(KEEP_ALL), jnp.float32(1), jax.nn.sigmoid(logit)
    )
    choices = zip(control.numbers, by_router, by_router, by_policy, strict=True)
    return (
        Numbers(*(jax.lax.select_n(control.kind, *numbers) for numbers in choices)),
        routed.strategy,
    )


class Decoder:
    """A model, prepared for decoding, with the programs that read prompts and answer them."""

    def __init__(self, model: Any, ends_V: np.ndarray, slots: int):
        self.graph, self.state = nnx.split(model)
        self.ends_V = jnp.asarray(ends_V)
        self.plan = CachePlan(slots, jnp.dtype(model.dtype).name)
        self.scaling = (
            np.zeros(6, np.float32),
            np.ones(6, np.float32),
        )  # mean and standard deviation of the metrics

    def prefill(self, prompts: list[list[int]], length: int) -> tuple[Any, np.ndarray, np.ndarray]:
        """Reads all prompts but their last tokens. Returns the cache, and the last tokens and their
        positions.
        """
        tokens_PT = np.zeros((len(prompts), length), np.int32)
        for row_T, ids in zip(tokens_PT, prompts, strict=True):
            row_T[: len(ids)] = ids
        last_P = np.array([len(ids) - 1 for ids in prompts], np.int32)
        cache = _prefill(self.graph, self.state, tokens_PT, last_P, self.plan)
        return cache, tokens_PT[np.arange(len(prompts)), last_P], last_P

    def decode(
        self, prefilled: tuple[Any, Any, Any], controls: Control, seeds_R: Any, limit: int
    ) -> Decoded:
        """Answers every prompt with R / P rows, which are consecutive, by at most `limit`
        tokens.
        """
        rows = len(seeds_R)
        cache, token_R, position_R = _repeat(prefilled, rows // len(prefilled[1]))
        params = SamplingParams.build([{**STEPS, "seed": int(seed)} for seed in seeds_R])
        found = _decode(
            self.graph,
            self.state,
            cache,
            (token_R, position_R),
            params,
            controls,
            self.scaling,
            self.ends_V,
            limit,
        )
        return jax.tree.map(np.asarray, found)


@partial(jax.jit, static_argnums=(0, 4))
def _prefill(graph: Any, state: Any, tokens_PT: Array, lengths_P: Array, plan: CachePlan) -> Any:
    return prefill_prompts(nnx.merge(graph, state), (tokens_PT, lengths_P), plan)[1]


@partial(jax.jit, static_argnums=1)
def _repeat(rows: Any, count: int) -> Any:
    return jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), rows)


@partial(jax.jit, static_argnums=0)
def _decode(
    graph: Any, state: Any, cache: Any, start: tuple[Array, Array], params: SamplingParams,
    controls: Control, scaling: tuple[Array, Array], ends_V: Array, limit: Array,
) -> Decoded:  # fmt: skip
    model, rows = nnx.merge(graph, state), params.batch

    def step(carry: Any) -> Any:
        number, cache, token_R, position_R, done_R, sampler, out = carry
        read, cache = read_token(model, cache, token_R, jnp.where(done_R, -1, position_R), True)
        metrics = Metrics(*jax.vmap(logit_metrics)(read.logits), read.attention)
        by_name = {
            "entropy": metrics.entropy,
            "varentropy": metrics.varentropy,
            **read.attention._asdict(),
        }
        metrics_R6 = jnp.stack([by_name[name] for name in METRICS], axis=1)
        keys_R = jax.vmap(row_key)(params.seed, params.sample_index, sampler.n_generated)
        numbers, strategy_R = jax.vmap(decide)(
            controls, metrics, (metrics_R6 - scaling[0]) / scaling[1], keys_R
        )
        enabled = {
            "temperature": numbers.temperature != 1,
            "top_k": (numbers.top_k > 0) & (numbers.top_k < read.logits.shape[1]),
            "top_p": numbers.top_p < 1,
            "min_p": numbers.min_p > 0,
        }
        active_R = ~done_R
        of_token = replace(
            params, numbers=params.numbers | numbers._asdict(), enabled=params.enabled | enabled
        )
        token_R, sampler, _ = sample(read.logits, of_token, sampler, active_B=active_R)
        new = Decoded(token_R, None, metrics_R6, numbers.temperature, numbers.min_p, strategy_R)
        count_R = out.count_R + active_R
        out = jax.tree.map(
            lambda buffer, x_R: buffer.at[:, number].set(x_R), out._replace(count_R=None), new
        )
        out = out._replace(count_R=count_R)
        done_R |= ends_V[token_R]
        return number + 1, cache, token_R, position_R + active_R, done_R, sampler, out

    empty = Decoded(
        jnp.zeros((rows, NEW), jnp.int32), jnp.zeros(rows, jnp.int32), jnp.zeros((rows, NEW, 6)),
        jnp.zeros((rows, NEW)), jnp.zeros((rows, NEW)), jnp.zeros((rows, NEW), jnp.int32),
    )  # fmt: skip
    sampler = SamplerState(n_generated=jnp.zeros(rows, jnp.int32), length=start[1] + 1)
    carry = (jnp.int32(0), cache, *start, jnp.zeros(rows, bool), sampler, empty)
    return jax.lax.while_loop(
        lambda c: (c[0] < jnp.minimum(limit, NEW)) & ~c[4].all(), step, carry
    )[-1]


def stack_controls(controls: list[Control]) -> Control:
    """Returns the controls of a batch."""
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *controls)


def no_router() -> tuple[RouterConfig, np.ndarray]:
    """Returns the router and the shares of a control that uses neither."""
    return RouterConfig.build(), np.full(len(STRATEGIES), 1 / len(STRATEGIES), np.float32)
