"""Beam search: `BeamRun` continues a batch of prompts with the most likely sequences that a search
with K beams finds.

At every step, each of the K beams of a prompt is extended by all tokens, and the most likely
extensions are kept. An extension that ends is complete: it is ranked by its score, the sum of its
log-probabilities divided by length^length_penalty, where the length counts the generated tokens
with the one that ends the text. These are the rules of `generate(num_beams=K)` in Hugging Face
Transformers 5.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import Config, UserError, with_generation
from dantinox.generation.api.result import Result, sample_stats
from dantinox.generation.api.trace import changed_settings
from dantinox.generation.decode.cache_plan import CachePlan, head_order, plan_cache
from dantinox.generation.decode.features import Constants, Features, attach
from dantinox.generation.decode.generate_toks import Stepper, prefill_prompts, read_token
from dantinox.generation.decode.prepared_model import dequantize
from dantinox.generation.decode.split_model import SplitModel, split_model
from dantinox.generation.model_bundle import ModelBundle
from dantinox.generation.request import GenerationRequest
from dantinox.generation.run_timer import RunTimer
from dantinox.generation.running_batch import pad_end_ids
from dantinox.generation.sample_text import SampleText, TextPart
from dantinox.generation.static_batch import (
    clamp_to_context,
    pad_prompts,
    padded_length,
    slots_needed,
    stack_prompts,
)
from dantinox.generation.token_settings import end_ids
from dantinox.model import CacheReport, KVCache
from dantinox.sampling import SamplerState, SamplingParams, edit_logits, init_state, update


class BeamRules(NamedTuple):
    """The settings of each prompt, arrays with P rows.

    Attributes:
      limit_P: the most new tokens, at least 1.
      eos_PE: the ids that end a sequence, padded with −1.
      length_penalty_P: the power of the length in the score.
      stops_when_full_P: end the search when K sequences are complete.
      assumes_longest_P: compare complete sequences with the score that a beam would have at the
        limit, instead of its present score.
    """

    limit_P: Any
    eos_PE: Any
    length_penalty_P: Any
    stops_when_full_P: Any
    assumes_longest_P: Any

    @classmethod
    def build(
        cls, configs: Sequence[Config], limits: Sequence[int], eos_ids: Sequence[Sequence[int]]
    ) -> "BeamRules":
        """Returns the rules of prompts with these settings, limits and ids that end a sequence."""
        sections = [config.generation for config in configs]
        assumes_longest = [
            one.early_stopping == "never" and one.length_penalty > 0 for one in sections
        ]
        rules = cls(
            limit_P=np.asarray(limits, np.int32),
            eos_PE=pad_end_ids(eos_ids),
            length_penalty_P=np.asarray([one.length_penalty for one in sections], np.float32),
            stops_when_full_P=np.asarray([one.early_stopping is True for one in sections]),
            assumes_longest_P=np.asarray(assumes_longest),
        )
        on_device: BeamRules = jax.device_put(rules)
        return on_device

    def score(self, logprob_PK: jax.Array, length_P: jax.Array) -> jax.Array:
        """Returns the scores of sequences with these log-probabilities and lengths."""
        scores_PK: jax.Array = (
            logprob_PK / (length_P.astype(jnp.float32) ** self.length_penalty_P)[:, None]
        )
        return scores_PK


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "length",
        "tokens_PKN",
        "logprob_PK",
        "ended_PKN",
        "score_PK",
        "ended_length_PK",
        "open_P",
    ),
    meta_fields=(),
)
@dataclass(frozen=True)
class Beams:
    """The sequences of P prompts: K beams that are extended, and the K best complete sequences.
    Both are sorted, best first.

    N is the most new tokens of a sequence.

    Attributes:
      length: the number of tokens of every beam.
      tokens_PKN, logprob_PK: the new tokens of the beams, and the sums of their log-probabilities;
        −inf marks an unused beam.
      ended_PKN, score_PK, ended_length_PK: the complete sequences, their scores and their lengths;
        −inf marks an unused place.
      open_P: whether the search of the prompt continues.
    """

    length: jax.Array
    tokens_PKN: jax.Array
    logprob_PK: jax.Array
    ended_PKN: jax.Array
    score_PK: jax.Array
    ended_length_PK: jax.Array
    open_P: jax.Array

    @classmethod
    def empty(cls, prompts: int, count: int, capacity: int) -> "Beams":
        """Returns one beam without tokens per prompt, and `count − 1` unused ones."""
        tokens_PKN = jnp.zeros((prompts, count, capacity), jnp.int32)
        unused_PK = jnp.full((prompts, count), -jnp.inf)
        lengths_PK = jnp.zeros((prompts, count), jnp.int32)
        first_PK = unused_PK.at[:, 0].set(0)
        return cls(
            jnp.int32(0),
            tokens_PKN,
            first_PK,
            tokens_PKN,
            unused_PK,
            lengths_PK,
            jnp.ones(prompts, bool),
        )


def extend(beams: Beams, logits_RV: jax.Array, rules: BeamRules) -> tuple[Beams, jax.Array]:
    """Extends the beams by one token.

    Of all K · V extensions of a prompt, only the K best may complete a sequence, and the K best
    that do not end are the next beams. So that K of these are among the candidates, there are C = K
    (1 + E) candidates for E ids that end a sequence.

    Args:
      logits_RV: the logits after each beam, `[P · K, V]`.

    Returns:
      The new beams, and for each the row of the beam that it extends, `[P · K]`.
    """
    P, K = beams.logprob_PK.shape
    V = logits_RV.shape[1]
    logprob_RV = jnp.where(logits_RV == -jnp.inf, -jnp.inf, jax.nn.log_softmax(logits_RV))
    extended_PX = (beams.logprob_PK[:, :, None] + logprob_RV.reshape(P, K, V)).reshape(P, K * V)
    C = K * min(1 + rules.eos_PE.shape[1], V)
    # Without the barrier, XLA sorts all extensions, because parts of the result are used
    # separately.
    logprob_PC, index_PC = jax.lax.optimization_barrier(jax.lax.top_k(extended_PX, C))
    parent_PC = index_PC // V  # the beam that is extended
    token_PC = index_PC % V
    tokens_PCN = (
        jnp.take_along_axis(beams.tokens_PKN, parent_PC[:, :, None], axis=1)
        .at[:, :, beams.length]
        .set(token_PC)
    )
    length_P = jnp.full(P, beams.length + 1)
    ends_PC = (token_PC[:, :, None] == rules.eos_PE[:, None]).any(2) | (length_P >= rules.limit_P)[
        :, None
    ]
    beams = _add_ended(beams, tokens_PCN[:, :K], logprob_PC[:, :K], ends_PC[:, :K], length_P, rules)
    logprob_PK, choice_PK = jax.lax.top_k(jnp.where(ends_PC, -jnp.inf, logprob_PC), K)
    beams = replace(
        beams,
        length=beams.length + 1,
        tokens_PKN=jnp.take_along_axis(tokens_PCN, choice_PK[:, :, None], axis=1),
        logprob_PK=logprob_PK,
        open_P=beams.open_P
        & _can_improve(logprob_PK[:, 0], beams.score_PK[:, -1], length_P, rules),
    )
    parent_PK = jnp.take_along_axis(parent_PC, choice_PK, axis=1)
    return beams, (parent_PK + K * jnp.arange(P)[:, None]).reshape(-1)


def _add_ended(
    beams: Beams,
    tokens_PKN: jax.Array,
    logprob_PK: jax.Array,
    ends_PK: jax.Array,
    length_P: jax.Array,
    rules: BeamRules,
) -> Beams:
    """Merges the extensions that end into the complete sequences of the open searches."""
    K = beams.score_PK.shape[1]
    new_PK = jnp.where(ends_PK & beams.open_P[:, None], rules.score(logprob_PK, length_P), -jnp.inf)
    score_PK, choice_PK = jax.lax.top_k(jnp.concatenate([beams.score_PK, new_PK], axis=1), K)
    tokens = jnp.concatenate([beams.ended_PKN, tokens_PKN], axis=1)
    lengths = jnp.concatenate(
        [beams.ended_length_PK, jnp.broadcast_to(length_P[:, None], new_PK.shape)], axis=1
    )
    return replace(
        beams,
        ended_PKN=jnp.take_along_axis(tokens, choice_PK[:, :, None], axis=1),
        score_PK=score_PK,
        ended_length_PK=jnp.take_along_axis(lengths, choice_PK, axis=1),
    )


def _can_improve(
    best_P: jax.Array, worst_P: jax.Array, length_P: jax.Array, rules: BeamRules
) -> jax.Array:
    """Returns whether the search of a prompt must continue.

    Args:
      best_P: the log-probability of the best beam.
      worst_P: the score of the worst of K complete sequences; −inf if there are fewer than K.
    """
    reached_P = jnp.where(rules.assumes_longest_P, rules.limit_P, length_P)
    is_better_P = rules.score(best_P[:, None], reached_P)[:, 0] > worst_P
    stops_P = rules.stops_when_full_P & (worst_P > -jnp.inf)
    continues_P: jax.Array = is_better_P & ~stops_P & (length_P < rules.limit_P)
    return continues_P


@partial(jax.jit, static_argnames=("plan", "beams"))
def _prefill(
    model: SplitModel,
    prompt: tuple[jax.Array, jax.Array],
    features: Features,
    constants: Constants,
    *,
    plan: CachePlan,
    beams: int,
) -> KVCache:
    """Returns the cache of all beams after the prompts, without their last tokens.

    Args:
      prompt: (tokens `[P, T]` right-padded, lengths `[P]`).
      features: those of the prompts.
    """
    tokens_PT, lengths_P = prompt
    transformer = dequantize(model.merge(model.leaves))
    _, cache = prefill_prompts(transformer, (tokens_PT, lengths_P - 1), plan, features, constants)
    repeated: KVCache = jax.tree.map(lambda x: jnp.repeat(x, beams, axis=0), cache)
    return repeated


@partial(jax.jit, static_argnames=("beams", "capacity"), donate_argnames=("cache",))
def _search(
    model: SplitModel,
    cache: KVCache,
    sampler: SamplerState,
    params: SamplingParams,
    rules: BeamRules,
    prompt: tuple[jax.Array, jax.Array],
    features: Features,
    constants: Constants,
    *,
    beams: int,
    capacity: int,
) -> tuple[KVCache, Beams]:
    """Extends the beams, which are empty at first, until the search of every prompt has ended.

    Args:
      prompt: as in `_prefill`.
      features: those of the prompts.
      capacity: the most new tokens of a beam.
    """
    tokens_PT, lengths_P = prompt
    P = len(lengths_P)
    K = beams
    transformer = Stepper().weights(model.merge(model.leaves), P * K)
    transformer = attach(
        jax.tree.map(lambda x_P: jnp.repeat(x_P, K), features), transformer, constants
    )
    last_R = jnp.repeat(tokens_PT[jnp.arange(P), lengths_P - 1], K)

    def step(carry: tuple[KVCache, SamplerState, Beams]) -> tuple[KVCache, SamplerState, Beams]:
        cache, sampler, beams = carry
        token_R = jnp.where(beams.length > 0, _newest(beams), last_R)
        position_P = jnp.where(beams.open_P, lengths_P + beams.length - 1, -1)
        step_logits, updated = read_token(transformer, cache, token_R, jnp.repeat(position_P, K))
        beams, rows_R = extend(beams, edit_logits(step_logits.logits, params, sampler), rules)
        # Each beam takes the cache and the sampling history of the beam that it extends.
        cache, sampler = jax.tree.map(lambda x: x[rows_R], (updated, sampler))
        return cache, update(params, sampler, _newest(beams)), beams

    first = cache, sampler, Beams.empty(P, K, capacity)
    cache, _, found = jax.lax.while_loop(lambda carry: carry[2].open_P.any(), step, first)
    return cache, found


def _newest(beams: Beams) -> jax.Array:
    """Returns the newest token of every beam, `[P · K]`."""
    return beams.tokens_PKN[:, :, beams.length - 1].reshape(-1)


class BeamRun:
    """A batch of requests with the same number of beams, with the interface of `BatchRun`.

    Attributes:
      numbers: for each result, the index of its request.
      results: the best `n` sequences of each request, after `parts`.
      times: the times of the run, after its end.
    """

    def __init__(
        self,
        model: ModelBundle,
        requests: Sequence[GenerationRequest],
        numbers: Sequence[int],
        *,
        pad: Callable[[int], int] = padded_length,
    ):
        """Creates the batch; the arguments are described in `LoadedModel.start`.

        Raises:
          UserError: a prompt fills the context, or a request has a constraint or asks for reports.
        """
        for request in requests:
            check_request(request)
            model.check_ids(request.ids)
        architecture = model.model.config
        section = requests[0].config.generation
        self._model = model
        self._requests = requests
        self._n = section.n
        self._beams = section.num_beams
        self.numbers = [number for number in numbers for _ in range(section.n)]
        self.results: list[Result] = []
        kv, calibration = model.kv(requests[0].config)
        order = head_order(architecture, kv, calibration)
        prompt_PT, lengths_P = stack_prompts([request.ids for request in requests])
        requested_P = np.array([request.config.generation.max_new_tokens for request in requests])
        limits_P = clamp_to_context(lengths_P, requested_P, architecture.max_context)
        self._limits = limits_P.tolist()
        padded_PT = pad_prompts(prompt_PT, lengths_P, pad)
        self._prompt = padded_PT, lengths_P
        slots = max(slots_needed(lengths_P, limits_P, pad), padded_PT.shape[1])
        self._plan = plan_cache(architecture, kv, slots, calibration, True)
        self._weights = split_model(model.prepared(section, order))
        self._features = model.adapter_features([request.lora for request in requests], order)
        # Greedy rows run edits and penalties only.
        configs = [
            with_generation(request.config, greedy=True)
            for request in requests
            for _ in range(self._beams)
        ]
        self._params = model.params(configs)

    def parts(self) -> Iterator[tuple[int, TextPart]]:
        """Runs the search, and then yields `(row, text)` for every result; sets `results` and
        `times` at the end.
        """
        K = self._beams
        tokens_RT, lengths_R = (np.repeat(x, K, axis=0) for x in self._prompt)
        valid_RT = np.arange(tokens_RT.shape[1]) < lengths_R[:, None]
        size = self._model.model.config.vocab_size
        configs = [request.config for request in self._requests]
        eos_ids = [end_ids(self._model.tokenizer, config.generation) for config in configs]
        rules = BeamRules.build(configs, self._limits, eos_ids)
        with RunTimer() as timer:
            sampler = init_state(self._params, tokens_RT, valid_RT, size, self._plan.slots)
            cache = _prefill(self._weights, self._prompt, *self._features, plan=self._plan, beams=K)
            jax.block_until_ready(cache)
            timer.mark_first()
            inputs = self._params, rules, self._prompt, *self._features
            cache, beams = _search(
                self._weights, cache, sampler, *inputs, beams=K, capacity=self._plan.slots
            )
            ended_PKN, score_PK, length_PK = jax.device_get(
                (beams.ended_PKN, beams.score_PK, beams.ended_length_PK)
            )
        self.times = timer.times
        # The search finds at least one token, also for a prompt with a limit of 0. The score of no
        # tokens is ln 1.
        has_room_P1 = np.array(self._limits)[:, None] > 0
        length_PK = np.where(has_room_P1, length_PK, 0)
        score_PK = np.where(has_room_P1, score_PK, 0.0)
        sequences = [
            [
                tokens_N[:length].tolist()
                for tokens_N, length in zip(tokens_KN, length_K, strict=True)
            ][: self._n]
            for tokens_KN, length_K in zip(ended_PKN, length_PK, strict=True)
        ]
        self.results = self._build_results(sequences, score_PK, cache.report())
        for row, result in enumerate(self.results):
            yield row, TextPart(result.text)

    def summary(self) -> str:
        """Returns one line about a finished run: tokens, beams, times."""
        prompt = sum(len(request.ids) for request in self._requests)
        new = sum(result.stats["new_tokens"] for result in self.results)
        times = self.times.describe(self.results[0].stats["decode_tok_per_s"])
        return f"{prompt} prompt + {new} new tokens, {self._beams} beams, in {times}"

    def _build_results(
        self, sequences: Sequence[Sequence[list[int]]], score_PK: np.ndarray, cache: CacheReport
    ) -> list[Result]:
        """Returns the results.

        Args:
          sequences: the `n` best sequences of each request.
          score_PK: the scores of all complete sequences; −inf marks an unused place.
        """
        rate = self.times.rate(sum(len(tokens) for best in sequences for tokens in best))
        results = []
        for request, best, scores in zip(self._requests, sequences, score_PK.tolist(), strict=True):
            section = request.config.generation
            if scores[self._n - 1] == -np.inf:
                found = sum(score > -np.inf for score in scores)
                raise UserError(
                    f"generation.n is {self._n}, but beam search found only {found} continuations"
                    " that the settings allow",
                    key="generation.n",
                )
            for tokens, score in zip(best, scores[: self._n], strict=True):
                sample = SampleText(
                    self._model.tokenizer, section, request.ids, visible_ids=request.visible_ids
                )
                text = "".join(part.text for part in sample.add_tokens(tokens, done=True))
                results.append(
                    Result(
                        prompt=request.prompt,
                        text=text,
                        tokens=sample.tokens,
                        finish_reason=sample.finish_reason or "length",
                        seed=section.seed or 0,
                        stats=sample_stats(
                            self.times,
                            decode_tok_per_s=rate,
                            prompt_tokens=len(request.ids),
                            new_tokens=len(sample.tokens),
                            cache=cache,
                        ),
                        settings=changed_settings(request.config),
                        score=score,
                    )
                )
        return results


def check_request(request: GenerationRequest) -> None:
    """Checks that beam search supports a request.

    Raises:
      UserError: the request has a constraint, a limit of its reasoning or a logit processor, or
        asks for reports of its tokens.
    """
    given = {
        "a constraint": request.constraint is not None,
        "a limit of the reasoning": request.guided,
        "a report of each token (logprobs, trace)": request.logprobs is not None,
        "score_fn": request.score_fn is not None,
        "a logit processor": request.logit_processor is not None,
    }
    name = next((name for name, is_given in given.items() if is_given), None)
    if name is not None:
        raise UserError(
            f"generation.num_beams must be 1 with {name}, got {request.config.generation.num_beams}"
        )
