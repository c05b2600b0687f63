"""Prompts with their real continuations, continuations by a model, and their likelihood under a
reference model.
"""

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
from dantinox.config.router_settings import STRATEGIES, THRESHOLDS, forcing_thresholds
from dantinox.generation import LoadedModel
from dantinox.generation.api.loaded_model import load_model
from dantinox.generation.api.offline_run import BatchRun
from dantinox.generation.static_batch import StaticBatch
from dantinox.lab.measure.perplexity import ScoringInput, score_sequences
from dantinox.lab.measure.texts import equal_batches
from dantinox.run import load_run_config, open_run
from dantinox.sampling import SamplingParams
from dantinox.text import Tokenizer, TokenStore

PROMPT_TOKENS = 64
MIN_PROMPT_TOKENS = 8
# Windows come from the first tokens of the validation text, at most this many.
STREAM_TOKENS = 1 << 22
ROWS = 32  # prompts per batch
# Default settings, so that the settings of the run do not influence a comparison.
NEUTRAL_SETTINGS = {**settings_of(Config()), "ignore_eos": True}


class PromptWindows(NamedTuple):
    """P prompts and their real continuations, as texts and as tokens `[P, T]`."""

    prompts: list[str]
    texts: list[str]
    ids: np.ndarray


def prompt_tokens(max_context: int, tokens: int, before: int = 0) -> int:
    """Returns the number of tokens of a prompt: 64, or fewer if `tokens` new tokens leave fewer in
    the context.

    Args:
      before: the number of tokens that generation adds before a prompt.

    Raises:
      UserError: fewer than 8 tokens remain.
    """
    available = min(PROMPT_TOKENS, max_context - before - tokens)
    if available < MIN_PROMPT_TOKENS:
        raise UserError(
            f"--tokens must leave room for a prompt of {MIN_PROMPT_TOKENS} in the model's context"
            f" of {max_context}: at most {max_context - before - MIN_PROMPT_TOKENS}, got {tokens}"
        )
    return available


def draw_windows(
    tokenizer: Tokenizer, store: TokenStore, count: int, prompt: int, tokens: int
) -> tuple[PromptWindows, PromptWindows]:
    """Samples two disjoint sets of `count` windows of the validation text, each window within one
    document.
    """
    length = prompt + tokens
    stream_S = store.validation_ids[:-1][:STREAM_TOKENS].astype(np.int32)
    ids_WT = stream_S[: len(stream_S) // length * length].reshape(-1, length)
    ids_WT = ids_WT[~np.isin(ids_WT, list(tokenizer.special_ids)).any(axis=1)]
    found = list(
        itertools.islice(
            _decode_windows(tokenizer, np.random.default_rng(0).permutation(ids_WT), prompt),
            2 * count,
        )
    )
    if len(found) < 2 * count:
        raise UserError(
            f"the validation text has {len(found)} windows of {length} tokens within a document,"
            f" but {2 * count} are needed, {count} each for tuning and testing: lower --prompts or"
            " --tokens, or select a longer text with --data_path"
        )
    halves = [zip(*half, strict=True) for half in (found[:count], found[count:])]
    first, second = (
        PromptWindows(list(prompts), list(texts), np.stack(ids)) for prompts, texts, ids in halves
    )
    return first, second


def _decode_windows(
    tokenizer: Tokenizer, ids_WT: np.ndarray, prompt: int
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields (prompt, continuation, tokens of the continuation).

    A character whose bytes are split between two texts belongs to the text in which it ends.
    """
    for ids_T in ids_WT:
        detokenizer = tokenizer.detokenizer()
        before = detokenizer.push(ids_T[:prompt]).lstrip("\ufffd")
        if before and len(tokenizer.encode(before)) <= prompt:
            yield before, detokenizer.push(ids_T[prompt:]), ids_T[prompt:]


class Continuations(NamedTuple):
    """Continuations of P prompts: tokens `[P, T]` and texts.

    Attributes:
      rates: tokens per second of every batch.
      shares: share of each router strategy among all tokens; None without a report.
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
    """Continues every prompt by exactly `tokens` tokens, none of which is special.

    Args:
      settings: keys of the sections `generation` and `router`; all other settings have their
        defaults, not those of the run.
      seed: the random numbers of a prompt depend only on this seed and the index of the prompt.
      shares: sample the router's strategy of every token with these probabilities, independently of
        the model.
      report: count the strategies.
    """
    special = sorted(run.tokenizer.special_ids)
    fixed = {**NEUTRAL_SETTINGS, "max_new_tokens": tokens, "banned_tokens": special, **settings}
    ids = list[list[int]]()
    rates = []
    strategies = []
    for indices in equal_batches(len(prompts), ROWS):
        requests = [
            run.request(
                prompts[n], {**fixed, "seed": (seed << 20) + int(n)}, logprobs=0 if report else None
            )
            for n in indices
        ]
        (batch_run,) = run.start(requests, steps=None if shares is None else 1)
        if shares is not None and isinstance(batch_run, BatchRun):
            random = np.random.default_rng((seed, indices[0]))
            batch_run.batch.before_dispatch = partial(
                _randomize_strategies, batch_run.batch, shares, random
            )
        for _ in batch_run.parts():
            pass
        ids += [result.tokens for result in batch_run.results]
        rates.append(len(indices) * (tokens - 1) / max(batch_run.times.decoding, 1e-9))
        reports = [result.steps for result in batch_run.results if result.steps is not None]
        strategies += [
            np.asarray(steps.routed.route.strategy) for steps in reports if steps.routed is not None
        ]
    ids_PT = np.asarray(ids, np.int32)[: len(prompts)]
    counted = None
    if strategies:
        strategy_PT = np.stack(strategies)[: len(prompts)]
        shares_S = np.bincount(strategy_PT.ravel(), minlength=len(STRATEGIES)) / strategy_PT.size
        counted = dict(zip(STRATEGIES, shares_S.tolist(), strict=True))
    texts = []
    for prompt, ids_T in zip(prompts, ids_PT, strict=True):
        detokenizer = run.tokenizer.detokenizer()
        detokenizer.push(run.tokenizer.encode(prompt))
        texts.append(detokenizer.push(ids_T) + detokenizer.flush())
    return Continuations(ids_PT, texts, rates, counted)


def _randomize_strategies(
    batch: StaticBatch, shares: Mapping[str, float], random: np.random.Generator
) -> None:
    batch.params = draw_strategies(batch.params, shares, random)


FORCING_THRESHOLDS = np.array(
    [[*forcing_thresholds(name).values()] for name in STRATEGIES], np.float32
)


def draw_strategies(
    params: SamplingParams, shares: Mapping[str, float], random: np.random.Generator
) -> SamplingParams:
    """Samples a router strategy for every row, independently of the metrics, for the control of
    `eval sampling`.

    Only the choice is random: every strategy keeps its formulas.
    """
    assert params.router is not None
    strategy_B = random.choice(
        len(STRATEGIES), params.batch, p=[shares[name] for name in STRATEGIES]
    )
    thresholds = dict(zip(THRESHOLDS, jnp.asarray(FORCING_THRESHOLDS[strategy_B].T), strict=True))
    return replace(params, router=replace(params.router, **thresholds))


class ReferenceModel:
    """The model of a run in float32, which computes the likelihood of texts."""

    def __init__(self, run_dir: str | Path):
        run = open_run(run_dir)
        config = load_run_config(run)
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"dtype": "float32"})}
        )
        self.tokenizer = Tokenizer.load(run.tokenizer)
        self.model = load_model(config, self.tokenizer.vocab_size, run)

    def bits_per_byte(self, prompts: Sequence[str], texts: Sequence[str]) -> np.ndarray:
        """Returns −log2 p(text | prompt) per UTF-8 byte of each text, with the reference's own
        tokenizer: float64 `[N]`.

        A prompt that is too long is truncated at its beginning.

        Raises:
          UserError: the reference cannot encode a text, or a text does not fit in its context.
        """
        sequences = [
            self._encode(prompt, text) for prompt, text in zip(prompts, texts, strict=True)
        ]
        with jax.default_matmul_precision("highest"):
            nats_N = np.array(
                [-scores.logp.sum() for _, scores in score_sequences(self.model, sequences)]
            )
        sizes = [max(1, len(text.encode())) for text in texts]
        bits_N = nats_N / np.log(2) / sizes
        if not np.isfinite(bits_N).all():
            raise UserError(
                "the reference returns a NaN or infinite likelihood: its weights are damaged"
            )
        return bits_N

    def _encode(self, prompt: str, text: str) -> ScoringInput:
        """Returns the tokens of prompt and text as generation encodes them, truncated to the
        context; the text is scored.
        """
        try:
            before = [*self.tokenizer.ids_before_text, *self.tokenizer.encode(prompt)]
            ids = self.tokenizer.encode(text)
        except UserError as error:
            raise UserError(f"the reference cannot encode a text to score: {error}") from None
        context = self.model.config.max_context
        if len(ids) >= context:
            raise UserError(
                f"a continuation has {len(ids)} tokens for the reference, whose context is"
                f" {context}: lower --tokens"
            )
        return ScoringInput(np.array((before + ids)[-context:], np.int32), len(ids))
