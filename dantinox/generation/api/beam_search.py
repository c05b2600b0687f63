"""Beam search: `BeamRun` continues a batch of prompts with the most likely sequences that a search with K beams finds.

At every step, each of the K beams of a prompt is extended by all tokens, and the most likely extensions are kept. An extension
that ends is complete: it is ranked by its score, the sum of its log-probabilities divided by length^length_penalty, where the
length counts the generated tokens with the one that ends the text. These are the rules of `generate(num_beams=K)` in Hugging
Face Transformers 5.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import Config, UserError, with_generation
from dantinox.generation.api.result import GenerationStats, Result
from dantinox.generation.api.trace import changed_settings
from dantinox.generation.decode.cache_plan import CachePlan, head_order, plan_cache
from dantinox.generation.decode.features import Constants, Features, attach
from dantinox.generation.decode.generate_toks import prefill_prompts, read_token
from dantinox.generation.decode.low_precision_layers import MAX_MATVEC_ROWS
from dantinox.generation.decode.prepared_model import dequantize
from dantinox.generation.decode.split_model import SplitModel, split_model
from dantinox.generation.model_bundle import ModelBundle
from dantinox.generation.request import GenerationRequest
from dantinox.generation.running_batch import NO_ID
from dantinox.generation.sample_text import SampleText, TextPart
from dantinox.generation.static_batch import RunTimer, clamp_to_context, padded_length, slots_needed
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
      assumes_longest_P: compare complete sequences with the score that a beam would have at the limit, instead of its present
        score.
    """

    limit_P: jax.Array
    eos_PE: jax.Array
    length_penalty_P: jax.Array
    stops_when_full_P: jax.Array
    assumes_longest_P: jax.Array

    @classmethod
    def build(cls, configs: Sequence[Config], limits: Sequence[int], eos_ids: Sequence[Sequence[int]]) -> "BeamRules":
        sections = [config.generation for config in configs]
        width = max(1, *map(len, eos_ids))
        penalties = [section.length_penalty for section in sections]
        early = [section.early_stopping for section in sections]
        arrays = (
            np.asarray(limits, np.int32),
            np.asarray([[*ids, *[NO_ID] * (width - len(ids))] for ids in eos_ids], np.int32),
            np.asarray(penalties, np.float32),
            np.asarray([one is True for one in early]),
            np.asarray([one == "never" and p > 0 for one, p in zip(early, penalties, strict=True)]),
        )
        return cls(*jax.device_put(arrays))

    def score(self, logprob_PK: jax.Array, length_P: jax.Array) -> jax.Array:
        """Returns the scores of sequences with these log-probabilities and lengths."""
        return logprob_PK / (length_P.astype(jnp.float32) ** self.length_penalty_P)[:, None]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("length", "tokens_PKN", "logprob_PK", "ended_PKN", "score_PK", "ended_length_PK", "open_P"),
    meta_fields=(),
)
@dataclass(frozen=True)
class Beams:
    """The sequences of P prompts: K beams that are extended, and the K best complete sequences. Both are sorted, best first.

    Attributes:
      length: the number of tokens of every beam.
      tokens_PKN, logprob_PK: the new tokens of the beams, and the sums of their log-probabilities; −inf marks an unused beam.
      ended_PKN, score_PK, ended_length_PK: the complete sequences, their scores and their lengths; −inf marks an unused place.
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
        return cls(jnp.int32(0), tokens_PKN, first_PK, tokens_PKN, unused_PK, lengths_PK, jnp.ones(prompts, bool))


def extend(beams: Beams, logits_RV: jax.Array, rules: BeamRules) -> tuple[Beams, jax.Array]:
    """Extends the beams by one token.

    Of all K · V extensions of a prompt, only the K best may complete a sequence, and the K best that do not end are the next
    beams. So that K of these are among the candidates, there are K (1 + E) candidates for E ids that end a sequence.

    Args:
      logits_RV: the logits after each beam, `[P · K, V]`.

    Returns:
      The new beams, and for each the row of the beam that it extends, `[P · K]`.
    """
    P, K = beams.logprob_PK.shape
    V = logits_RV.shape[1]
    logprob_RV = jnp.where(logits_RV == -jnp.inf, -jnp.inf, jax.nn.log_softmax(logits_RV))
    extended_PX = (beams.logprob_PK[:, :, None] + logprob_RV.reshape(P, K, V)).reshape(P, K * V)
    count = K * min(1 + rules.eos_PE.shape[1], V)
    # Without the barrier, XLA sorts all extensions, because parts of the result are used separately.
    logprob_PC, index_PC = jax.lax.optimization_barrier(jax.lax.top_k(extended_PX, count))
    parent_PC = index_PC // V
    token_PC = index_PC % V
    tokens_PCN = jnp.take_along_axis(beams.tokens_PKN, parent_PC[:, :, None], axis=1).at[:, :, beams.length].set(token_PC)
    length_P = jnp.full(P, beams.length + 1)
    ends_PC = (token_PC[:, :, None] == rules.eos_PE[:, None]).any(2) | (length_P >= rules.limit_P)[:, None]
    beams = _add_ended(beams, tokens_PCN[:, :K], logprob_PC[:, :K], ends_PC[:, :K], length_P, rules)
    logprob_PK, choice_PK = jax.lax.top_k(jnp.where(ends_PC, -jnp.inf, logprob_PC), K)
    beams = replace(
        beams,
        length=beams.length + 1,
        tokens_PKN=jnp.take_along_axis(tokens_PCN, choice_PK[:, :, None], axis=1),
        logprob_PK=logprob_PK,
        open_P=beams.open_P & _can_improve(logprob_PK[:, 0], beams.score_PK[:, -1], length_P, rules),
    )
    parent_PK = jnp.take_along_axis(parent_PC, choice_PK, axis=1)
    return beams, (parent_PK + K * jnp.arange(P)[:, None]).reshape(-1)


def _add_ended(
    beams: Beams, tokens_PKN: jax.Array, logprob_PK: jax.Array, ends_PK: jax.Array, length_P: jax.Array, rules: BeamRules
) -> Beams:
    """Merges the extensions that end into the complete sequences of the open searches."""
    K = beams.score_PK.shape[1]
    new_PK = jnp.where(ends_PK & beams.open_P[:, None], rules.score(logprob_PK, length_P), -jnp.inf)
    score_PK, choice_PK = jax.lax.top_k(jnp.concatenate([beams.score_PK, new_PK], axis=1), K)
    tokens = jnp.concatenate([beams.ended_PKN, tokens_PKN], axis=1)
    lengths = jnp.concatenate([beams.ended_length_PK, jnp.broadcast_to(length_P[:, None], new_PK.shape)], axis=1)
    return replace(
        beams,
        ended_PKN=jnp.take_along_axis(tokens, choice_PK[:, :, None], axis=1),
        score_PK=score_PK,
        ended_length_PK=jnp.take_along_axis(lengths, choice_PK, axis=1),
    )


def _can_improve(best_P: jax.Array, worst_P: jax.Array, length_P: jax.Array, rules: BeamRules) -> jax.Array:
    """Returns whether the search of a prompt must continue.

    Args:
      best_P: the log-probability of the best beam.
      worst_P: the score of the worst of K complete sequences; −inf if there are fewer than K.
    """
    reached_P = jnp.where(rules.assumes_longest_P, rules.limit_P, length_P)
    is_better_P = rules.score(best_P[:, None], reached_P)[:, 0] > worst_P
    return is_better_P & ~(rules.stops_when_full_P & (worst_P > -jnp.inf)) & (length_P < rules.limit_P)


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
    P, K = len(lengths_P), beams
    transformer = model.merge(model.leaves)
    transformer = transformer if P * K <= MAX_MATVEC_ROWS else dequantize(transformer)
    transformer = attach(jax.tree.map(lambda x_P: jnp.repeat(x_P, K), features), transformer, constants)
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
        section = requests[0].config.generation
        self._model = model
        self._requests = requests
        self._n = section.n
        self._beams = section.num_beams
        self.numbers = [number for number in numbers for _ in range(section.n)]
        self.results: list[Result] = []
        kv, calibration = model.kv(requests[0].config)
        order = head_order(model.model.config, kv, calibration)
        lengths_P = np.array([len(request.ids) for request in requests], np.int32)
        requested_P = np.array([request.config.generation.max_new_tokens for request in requests])
        self._limits = clamp_to_context(lengths_P, requested_P, model.model.config.max_context).tolist()
        prompt_PT = np.zeros((len(requests), pad(int(lengths_P.max()))), np.int32)
        for row, request in zip(prompt_PT, requests, strict=True):
            row[: len(request.ids)] = request.ids
        self._prompt = prompt_PT, lengths_P
        slots = max(slots_needed(lengths_P, np.array(self._limits), pad), prompt_PT.shape[1])
        self._plan = plan_cache(model.model.config, kv, slots, calibration, True)
        self._weights = split_model(model.prepared(section, order))
        self._features = model.adapter_features([request.lora for request in requests], order)
        # Greedy rows run edits and penalties only.
        configs = [with_generation(request.config, greedy=True) for request in requests for _ in range(self._beams)]
        self._params = model.params(configs)

    def parts(self) -> Iterator[tuple[int, TextPart]]:
        """Runs the search, and then yields `(row, text)` for every result; sets `results` and `times` at the end."""
        K = self._beams
        tokens_RT, lengths_R = (np.repeat(x, K, axis=0) for x in self._prompt)
        valid_RT = np.arange(tokens_RT.shape[1]) < lengths_R[:, None]
        size = self._model.model.config.vocab_size
        configs = [request.config for request in self._requests]
        rules = BeamRules.build(
            configs, self._limits, [end_ids(self._model.tokenizer, config.generation) for config in configs]
        )
        with RunTimer() as timer:
            sampler = init_state(self._params, tokens_RT, valid_RT, size, self._plan.slots)
            cache = _prefill(self._weights, self._prompt, *self._features, plan=self._plan, beams=K)
            jax.block_until_ready(cache)
            timer.mark_first()
            inputs = self._params, rules, self._prompt, *self._features
            cache, beams = _search(self._weights, cache, sampler, *inputs, beams=K, capacity=self._plan.slots)
            ended_PKN, score_PK, length_PK = jax.device_get((beams.ended_PKN, beams.score_PK, beams.ended_length_PK))
        self.times = timer.times
        has_room_P = np.array(self._limits) > 0  # the search finds at least one token; ln 1 is the score of none
        length_PK = length_PK * has_room_P[:, None]
        score_PK = np.where(has_room_P[:, None], score_PK, 0.0)
        sequences = [[ended_PKN[p, k, : length_PK[p, k]].tolist() for k in range(self._n)] for p in range(len(self._requests))]
        self.results = self._build_results(sequences, score_PK, cache.report())
        for row, result in enumerate(self.results):
            yield row, TextPart(result.text)

    def summary(self) -> str:
        """Returns one line about a finished run: tokens, beams, times."""
        prompt, new = (sum(result.stats[key] for result in self.results) for key in ("prompt_tokens", "new_tokens"))
        return (
            f"{prompt // self._n} prompt + {new} new tokens, {self._beams} beams, in "
            f"{self.times.describe(self.results[0].stats['decode_tok_per_s'])}"
        )

    def _build_results(
        self, sequences: Sequence[Sequence[list[int]]], score_PK: np.ndarray, cache: CacheReport
    ) -> list[Result]:
        times = self.times
        new = sum(len(tokens) for best in sequences for tokens in best)
        stats: GenerationStats = {
            "prompt_tokens": 0,
            "new_tokens": 0,
            "draft_tokens": 0,
            "accepted_draft_tokens": 0,
            "seconds": times.total,
            "first_token_seconds": times.first,
            "compile_seconds": times.compiling,
            "decode_tok_per_s": new / times.decoding if times.decoding > 0 else 0.0,
            "cache": cache,
        }
        results = []
        for request, best, scores in zip(self._requests, sequences, score_PK.tolist(), strict=True):
            section = request.config.generation
            if scores[self._n - 1] == -np.inf:
                found = sum(score > -np.inf for score in scores)
                raise UserError(
                    f"generation.n is {self._n}, but beam search found only {found} continuations that the settings allow",
                    key="generation.n",
                )
            for tokens, score in zip(best, scores, strict=False):
                sample = SampleText(self._model.tokenizer, section, request.ids, visible_ids=request.visible_ids)
                text = "".join(part.text for part in sample.add_tokens(tokens, done=True))
                results.append(
                    Result(
                        prompt=request.prompt,
                        text=text,
                        tokens=sample.tokens,
                        finish_reason=sample.finish_reason or "length",
                        seed=section.seed or 0,
                        stats={**stats, "prompt_tokens": len(request.ids), "new_tokens": len(sample.tokens)},
                        settings=changed_settings(request.config),
                        score=score,
                    )
                )
        return results


def check_request(request: GenerationRequest) -> None:
    """Checks that beam search supports a request.

    Raises:
      UserError: the request has a constraint, a limit of its reasoning or a logit processor, or asks for reports of its tokens.
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
        raise UserError(f"generation.num_beams must be 1 with {name}, got {request.config.generation.num_beams}")
