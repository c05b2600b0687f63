"""Prompts with reference continuations, continuations by a model, and their likelihood under a reference model."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import Config, UserError, settings_of
from dantinox.config.router_settings import STRATEGIES, THRESHOLDS, forcing
from dantinox.generation import LoadedModel
from dantinox.generation.loaded_model import load_model
from dantinox.generation.static_batch import StaticBatch
from dantinox.measure.perplexity import ScoringInput, score_sequences
from dantinox.measure.texts import equal_batches
from dantinox.run import load_run_config, open_run
from dantinox.sampling import SamplingParams
from dantinox.text import Tokenizer, TokenStore

PROMPT_TOKENS, MIN_PROMPT_TOKENS = 64, 8
STREAM_TOKENS = 1 << 22  # windows are taken from so many first tokens of the validation text
ROWS = 32  # continued together
# The run's own defaults must not colour a method: everything that is not the method's is switched off.
NEUTRAL_SETTINGS = {**settings_of(Config()), "ignore_eos": True}


class PromptWindows(NamedTuple):
    """Prompts, and how the text they were taken from goes on: as text, and as tokens `[P, T]`."""

    prompts: list[str]
    texts: list[str]
    ids: np.ndarray


def prompt_tokens(max_context: int, tokens: int) -> int:
    """Tokens of a prompt: 64, or what `tokens` new ones leave of the context, which must be 8."""
    room = min(PROMPT_TOKENS, max_context - tokens)
    if room < MIN_PROMPT_TOKENS:
        raise UserError(
            f"--tokens must leave room for a prompt of {MIN_PROMPT_TOKENS} in the model's context of {max_context}: "
            f"at most {max_context - MIN_PROMPT_TOKENS}, got {tokens}"
        )
    return room


def draw_windows(
    tokenizer: Tokenizer, store: TokenStore, count: int, prompt: int, tokens: int
) -> tuple[PromptWindows, PromptWindows]:
    """Two disjoint sets of `count` windows of the validation text, drawn without replacement and each within one document."""
    length = prompt + tokens
    stream_S = store.validation_ids[:-1][:STREAM_TOKENS].astype(np.int32)
    ids_WT = stream_S[: len(stream_S) // length * length].reshape(-1, length)
    ids_WT = ids_WT[~np.isin(ids_WT, list(tokenizer.special_ids)).any(axis=1)]
    found = list(itertools.islice(_decode_windows(tokenizer, np.random.default_rng(0).permutation(ids_WT), prompt), 2 * count))
    if len(found) < 2 * count:
        raise UserError(
            f"the validation text has {len(found)} windows of {length} tokens within a document, and {2 * count} are needed, "
            f"{count} to tune on and as many to test on: lower --prompts or --tokens, or give more text with --data_path"
        )
    halves = [zip(*half, strict=True) for half in (found[:count], found[count:])]
    first, second = (PromptWindows(list(prompts), list(texts), np.stack(ids)) for prompts, texts, ids in halves)
    return first, second


def _decode_windows(tokenizer: Tokenizer, ids_WT: np.ndarray, prompt: int) -> Iterator[tuple[str, str, np.ndarray]]:
    """(prompt, continuation, tokens of the continuation); a character cut by an edge goes to the text it ends in."""
    for ids_T in ids_WT:
        spell = tokenizer.detokenizer()
        before = spell.push(ids_T[:prompt]).lstrip("\ufffd")
        if before and len(tokenizer.encode(before)) <= prompt:
            yield before, spell.push(ids_T[prompt:]), ids_T[prompt:]


class Continuations(NamedTuple):
    """Continuations of P prompts: tokens `[P, T]` and texts.

    Attributes:
      rates: tokens per second of every batch.
      shares: of the router's strategies among all tokens; None without a report.
    """

    ids: np.ndarray
    texts: list[str]
    rates: list[float]
    shares: dict[str, float] | None


def generate_continuations(
    run: LoadedModel,
    prompts: Sequence[str],
    settings: Mapping[str, Any],
    tokens: int,
    seed: int,
    *,
    shares: Mapping[str, float] | None = None,
    report: bool = False,
) -> Continuations:
    """Continues every prompt by exactly `tokens` tokens, none of them special.

    Args:
      settings: keys of the sections `generation` and `router`; all others have their defaults, whatever the run says.
      seed: every prompt has draws of its own, which depend on the seed and the prompt's number alone.
      shares: draw the router's strategy of every token at random with these probabilities, whatever the model thinks.
      report: count the strategies.
    """
    special = sorted(run.tokenizer.special_ids)
    fixed = {**NEUTRAL_SETTINGS, "max_new_tokens": tokens, "banned_tokens": special, **settings}
    ids, rates, strategies = list[list[int]](), [], []
    for numbers in equal_batches(len(prompts), ROWS):
        requests = [
            run.request(prompts[n], {**fixed, "seed": (seed << 20) + int(n)}, logprobs=0 if report else None) for n in numbers
        ]
        (batch_run,) = run.start(requests, steps=None if shares is None else 1)
        if shares is not None:
            random = np.random.default_rng((seed, numbers[0]))
            batch_run.batch.before_dispatch = partial(_randomize_strategies, batch_run.batch, shares, random)
        for _ in batch_run.parts():
            pass
        ids += [result.tokens for result in batch_run.results]
        rates.append(len(numbers) * (tokens - 1) / max(batch_run.times.decoding, 1e-9))
        steps = [result.steps for result in batch_run.results if result.steps is not None]
        strategies += [np.asarray(one.routed.route.strategy) for one in steps if one.routed is not None]
    ids_PT = np.asarray(ids, np.int32)[: len(prompts)]
    counted = None
    if strategies:
        strategy_PT = np.stack(strategies)[: len(prompts)]
        shares_S = np.bincount(strategy_PT.ravel(), minlength=len(STRATEGIES)) / strategy_PT.size
        counted = dict(zip(STRATEGIES, shares_S.tolist(), strict=True))
    texts = []
    for prompt, ids_T in zip(prompts, ids_PT, strict=True):
        spell = run.tokenizer.detokenizer()
        spell.push(run.tokenizer.encode(prompt))
        texts.append(spell.push(ids_T) + spell.flush())
    return Continuations(ids_PT, texts, rates, counted)


def _randomize_strategies(batch: StaticBatch, shares: Mapping[str, float], random: np.random.Generator) -> None:
    batch.params = draw_strategies(batch.params, shares, random)


FORCING_THRESHOLDS = np.array([[*forcing(name).values()] for name in STRATEGIES], np.float32)


def draw_strategies(params: SamplingParams, shares: Mapping[str, float], random: np.random.Generator) -> SamplingParams:
    """The control: for every row a strategy drawn at random, independent of the metrics, its formulas as they are."""
    assert params.router is not None
    strategy_B = random.choice(len(STRATEGIES), params.batch, p=[shares[name] for name in STRATEGIES])
    thresholds = dict(zip(THRESHOLDS, jnp.asarray(FORCING_THRESHOLDS[strategy_B].T), strict=True))
    return replace(params, router=replace(params.router, **thresholds))


class ReferenceModel:
    """The model of a run in float32 as a reference, and the likelihood it gives a text."""

    def __init__(self, run_dir: str | Path):
        run = open_run(run_dir)
        config = load_run_config(run)
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})})
        self.tokenizer = Tokenizer.load(run.tokenizer)
        self.model = load_model(config, self.tokenizer.vocab_size, run)

    def bits_per_byte(self, prompts: Sequence[str], texts: Sequence[str]) -> np.ndarray:
        """−log2 p(text | prompt) per UTF-8 byte of each text, spelt by the judge's own tokenizer: `[N]` float64.

        Of a prompt that is too long the beginning is left out.

        Raises:
          UserError: the judge cannot spell a text, or a text does not fit its context.
        """
        sequences = [self._encode(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        with jax.default_matmul_precision("highest"):
            nats_N = np.array([-scores.logp.sum() for _, scores in score_sequences(self.model, sequences)])
        sizes = [max(1, len(text.encode())) for text in texts]
        bits_N = nats_N / np.log(2) / sizes
        if not np.isfinite(bits_N).all():
            raise UserError("the reference gives a text no likelihood that is a number: its weights are damaged")
        return bits_N

    def _encode(self, prompt: str, text: str) -> ScoringInput:
        """The tokens of prompt and text, at most a context of them, of which the text's are to be scored."""
        try:
            before, ids = self.tokenizer.encode(prompt), self.tokenizer.encode(text)
        except UserError as error:
            raise UserError(f"the reference cannot read a text that it is to judge: {error}") from None
        context = self.model.config.max_context
        if len(ids) >= context:
            raise UserError(
                f"a continuation is {len(ids)} tokens for the reference, whose context holds {context}: lower --tokens"
            )
        return ScoringInput(np.array((before + ids)[-context:], np.int32), len(ids))
