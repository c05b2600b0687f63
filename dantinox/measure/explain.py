"""What each sampling step makes of the next token: the numbers behind `dantinox explain`."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import GenerationSection
from dantinox.config.generation import ROUTED
from dantinox.config.router import EVERY, STRATEGIES
from dantinox.generation import Run
from dantinox.generation.decode import attention_of, probe_of
from dantinox.generation.generate import clamp_to_context
from dantinox.generation.prepare import widen
from dantinox.generation.session import bucket
from dantinox.generation.words import seeded
from dantinox.model import Transformer
from dantinox.sampling import SamplerState, SamplingParams, init_state, sample, trace
from dantinox.sampling.params import ARGUMENTS
from dantinox.sampling.router import ADAPTIVE, Route
from dantinox.text import Tokenizer


@dataclass(frozen=True)
class Explanation:
    """The distribution of the token behind a prompt, step by step.

    S is the number of steps, the model counted as the first; K tokens are shown.

    Attributes:
      steps: `model`, then the steps of the chain in their order, last the router's `candidates` where it took them.
      numbers: what each step was given, setting → value; nothing for the model.
      ids: the most likely tokens under the model, best first, then those that were drawn and are not among them.
      probabilities: [S, K] float64, behind each step; 0 for a removed token.
      others: [S] what all tokens that are not shown have together.
      removed_by: for each of the K tokens the step that removed it, or None.
      survivors: [S] tokens left.
      mass: [S] what these tokens have together under the model.
      entropy: [S] of the distribution behind each step, in bits.
      changed: [S] whether a step changed any logit of the vocabulary; True for the model.
      drawn: the token of each of the `n` samples.
      greedy: they are the most likely tokens, and nothing was drawn.
      strategy: what the entropy router chose, None without it.
      forced: it emitted its clarify token, and nothing was drawn.
    """

    prompt: str
    prompt_tokens: int
    vocab_size: int
    steps: list[str]
    numbers: list[dict[str, Any]]
    ids: list[int]
    texts: list[str]
    shown: list[str]
    probabilities: np.ndarray
    others: list[float]
    removed_by: list[str | None]
    survivors: list[int]
    mass: list[float]
    entropy: list[float]
    changed: list[bool]
    drawn: list[int]
    greedy: bool
    seed: int
    strategy: str | None = None
    forced: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Everything ready for JSON: a record per step, a record per token, the drawn tokens."""
        names = ("name", "settings", "survivors", "mass", "entropy", "changed", "others")
        steps = zip(self.steps, self.numbers, self.survivors, self.mass, self.entropy, self.changed, self.others, strict=True)
        tokens = zip(self.ids, self.texts, self.shown, self.removed_by, self.probabilities.T.tolist(), strict=True)
        return {
            "prompt": self.prompt,
            "prompt_tokens": self.prompt_tokens,
            "vocab_size": self.vocab_size,
            "greedy": self.greedy,
            "strategy": self.strategy,
            "forced": self.forced,
            "seed": self.seed,
            "steps": [dict(zip(names, step, strict=True)) for step in steps],
            "tokens": [
                {"id": token, "text": text, "shown": shown, "removed_by": by, "probabilities": chances}
                for token, text, shown, by, chances in tokens
            ],
            "drawn": self.drawn,
        }


def explain(run: Run, prompt: str, settings: Mapping[str, Any], count: int = 20) -> Explanation:
    """Follows the token behind a prompt through the chain that `run.generate(prompt, **settings)` would use.

    Args:
      settings: keys of the `generation` section; they win over the run's own.
      count: how many of the most likely tokens to tell of.

    Raises:
      UserError: a wrong setting, or a prompt that is empty or fills the context.
    """
    config = seeded(run.settings(settings), secrets.randbits(32))
    section, ids = config.generation, run.prompt_ids(prompt)
    model = run.prepared(section.weights)
    clamp_to_context(np.array([len(ids)]), np.array([1]), model.config.max_context)
    params = run.params([config] * section.n, range(section.n))
    T, V = bucket(len(ids)), model.config.vocab_size
    tokens_1T = np.zeros((1, T), np.int32)
    tokens_1T[0, : len(ids)] = ids
    valid_BT = np.broadcast_to(np.arange(T) < len(ids), (section.n, T))
    state = init_state(params, jnp.asarray(np.repeat(tokens_1T, section.n, axis=0)), jnp.asarray(valid_BT), V, T + 1)
    traced, route, drawn, forced = _follow(model, jnp.asarray(tokens_1T), jnp.int32(len(ids)), params, state)
    numbers = [(name, _numbers(section, name)) for name in params.plan]
    if route is not None:
        numbers = _routed(numbers, route, config.router.candidates)
    told = _told(run.tokenizer, prompt, len(ids), numbers, np.asarray(traced, np.float64)[: 1 + len(numbers)], drawn, count)
    strategy = None if route is None else STRATEGIES[int(route.strategy)]
    greedy = not params.draws or strategy == "greedy"
    return replace(told, greedy=greedy, seed=section.seed or 0, strategy=strategy, forced=bool(forced.any()))


@nnx.jit(graph_updates=False)
def _follow(
    model: Transformer, tokens_1T: jax.Array, length: jax.Array, params: SamplingParams, state: SamplerState
) -> tuple[jax.Array, Route | None, jax.Array, jax.Array]:
    """The logits [S, V] behind each step and the route of the first sample, every sample's token, and whether it was forced."""
    places_T = jnp.arange(tokens_1T.shape[1])
    positions_1T = jnp.where(places_T < length, places_T, -1)[None]
    x_1TD, _, aux = widen(model).hidden(tokens_1T, positions_1T, probe=probe_of(params))
    seen = widen(model).logits(x_1TD[:, length - 1]), attention_of(params, aux)
    logits_BV, attention = jax.tree.map(lambda x: jnp.repeat(x, params.batch, axis=0), seen)
    token_B, _, drawn = sample(logits_BV, params, state, attention=attention, report=0)
    routed = None if drawn.token is None else drawn.token.routed
    forced_B = jnp.zeros(params.batch, bool) if routed is None else routed.forced
    followed, routes = trace(logits_BV, params, state, attention)
    return jnp.stack([x_BV[0] for _, x_BV in followed]), jax.tree.map(lambda x: x[0], routes), token_B, forced_B


def _told(
    tokenizer: Tokenizer,
    prompt: str,
    prompt_tokens: int,
    numbers: list[tuple[str, dict[str, Any]]],
    x_SV: np.ndarray,
    drawn_B: Any,
    count: int,
) -> Explanation:
    steps = ["model", *(name for name, _ in numbers)]
    left_SV = x_SV > -np.inf
    largest_S1 = np.max(x_SV, axis=1, keepdims=True)
    weights_SV = np.where(left_SV, np.exp(x_SV - np.where(np.isfinite(largest_S1), largest_S1, 0)), 0)
    P_SV = weights_SV / np.maximum(weights_SV.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    bits_SV = np.where(P_SV > 0, -P_SV * np.log2(np.where(P_SV > 0, P_SV, 1)), 0)
    drawn = np.asarray(drawn_B).tolist()
    ids = np.argsort(-x_SV[0], kind="stable")[:count].tolist()
    ids += [token for token in dict.fromkeys(drawn) if token not in ids]
    lost_SV = left_SV[:-1] & ~left_SV[1:]
    return Explanation(
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        vocab_size=x_SV.shape[1],
        steps=steps,
        numbers=[{}, *(settings for _, settings in numbers)],
        ids=ids,
        texts=[tokenizer.decode([token]) for token in ids],
        shown=[visible(tokenizer, token) for token in ids],
        probabilities=P_SV[:, ids],
        others=np.delete(P_SV, ids, axis=1).sum(axis=1).tolist(),
        removed_by=[steps[1 + int(np.argmax(lost_SV[:, t]))] if lost_SV[:, t].any() else None for t in ids],
        survivors=left_SV.sum(axis=1).tolist(),
        mass=(P_SV[0] * left_SV).sum(axis=1).tolist(),
        entropy=bits_SV.sum(axis=1).tolist(),
        changed=[True, *(x_SV[1:] != x_SV[:-1]).any(axis=1).tolist()],
        drawn=drawn,
        greedy=False,
        seed=0,
    )


def _routed(numbers: list[tuple[str, dict[str, Any]]], route: Route, candidates: int) -> list[tuple[str, dict[str, Any]]]:
    """The numbers that the router set in the place of the section's, and its own last step where it took one."""
    found = [(name, {name: np.asarray(getattr(route, name)).item()} if name in ROUTED else own) for name, own in numbers]
    found = [(name, {name: 0} if own.get("top_k") == EVERY else own) for name, own in found]
    return found + ([("candidates", {"candidates": candidates})] if int(route.strategy) == ADAPTIVE else [])


def _numbers(section: GenerationSection, step: str) -> dict[str, Any]:
    """The settings of a step, as JSON has them: null for -inf."""
    found = {key: getattr(section, key) for key in ARGUMENTS.get(step, (step,))}
    if step == "logit_bias":
        found = {step: {token: None if bias == -float("inf") else bias for token, bias in section.logit_bias.items()}}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}


def visible(tokenizer: Tokenizer, token: int) -> str:
    """A token as a person can tell it from any other: in quotes, with escapes for what has no shape of its own.

    Special tokens stand without quotes; bytes that are only a part of a character are written as `\\xe2`.
    """
    if token in tokenizer.special_ids:
        return "".join(map(_escaped, str(tokenizer.core.id_to_token(token))))
    pieces = tokenizer.pieces
    text = tokenizer.decode([token]) if pieces is None else pieces.inner[token].decode("utf-8", "surrogateescape")
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no text
        return f"\\x{code - 0xDC00:02x}"
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
