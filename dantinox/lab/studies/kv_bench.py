"""What `eval kv` and `eval ruler` measure of each cache: the loss of a text, recall of facts, and
greedy continuations.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.generation import LoadedModel
from dantinox.generation.decode.features import Feature
from dantinox.generation.decode.generate_toks import DECODE_CHUNK
from dantinox.generation.static_batch import StaticBatch, StaticOptions
from dantinox.lab.measure.head_loss import mean_kl, rows_per_batch
from dantinox.lab.measure.texts import equal_batches, map_batches, pad_rows
from dantinox.lab.studies.continuations import NEUTRAL_SETTINGS
from dantinox.lab.studies.kv_tasks import RecallTasks, Sequences, split_by_seed
from dantinox.lab.studies.kv_variants import ORACLE, CacheVariant, argmax_at, near_keys_variant
from dantinox.report.console import Progress
from dantinox.sampling import SamplingParams

FREE_TOKENS = 64  # tokens of a greedy continuation
FREE_ROWS = 8  # continuations per batch
MIN_TIMED_BATCHES = 3  # the speed of the fastest batch is reported


class ReadMetrics(NamedTuple):
    """Per sequence: mean loss and mean KL(full ‖ compressed) in nats per token, share of steps with
    the same top token.
    """

    loss_B: np.ndarray
    kl_B: np.ndarray
    top1_B: np.ndarray


def read_metrics(
    logprobs_BSV: jax.Array, full_BSV: jax.Array, tokens_BT: np.ndarray, start: int
) -> ReadMetrics:
    """Compares the log-probabilities of a cache with those of the full cache, over the tokens after
    the prompt.
    """
    found = _read_metrics(logprobs_BSV[:, :-1], full_BSV[:, :-1], jnp.asarray(tokens_BT[:, start:]))
    return ReadMetrics(*(np.asarray(x_B, np.float64) for x_B in found))


@jax.jit
def _read_metrics(
    ours_BSV: jax.Array, full_BSV: jax.Array, next_BS: jax.Array
) -> tuple[jax.Array, ...]:
    logp_BS = jnp.take_along_axis(ours_BSV, next_BS[:, :, None], axis=2)[..., 0]
    same_BS = jnp.argmax(ours_BSV, axis=2) == jnp.argmax(full_BSV, axis=2)
    return -logp_BS.mean(1), mean_kl(ours_BSV, full_BSV, jnp.ones_like(same_BS)), same_BS.mean(1)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens_BQ", "counts_B", "read_B"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Questions(Feature):
    """Given tokens that each row reads one by one before it generates.

    Attributes:
      tokens_BQ: the given tokens, right-padded; `counts_B` of them are valid.
      read_B: how many of them the row has got.
    """

    tokens_BQ: Any
    counts_B: Any
    read_B: Any

    def logits(self, logits_BV: jax.Array) -> jax.Array:
        """Returns logits that allow only the next given token, while there is one."""
        index_B = jnp.minimum(self.read_B, self.tokens_BQ.shape[1] - 1)
        token_B = jnp.take_along_axis(self.tokens_BQ, index_B[:, None], axis=1)
        forced_BV = jnp.where(jnp.arange(logits_BV.shape[1]) == token_B, 0.0, -jnp.inf).astype(
            logits_BV.dtype
        )
        return jnp.where((self.read_B < self.counts_B)[:, None], forced_BV, logits_BV)

    def after(self, token_B: jax.Array, position_B: jax.Array, active_B: jax.Array) -> "Questions":
        return Questions(self.tokens_BQ, self.counts_B, self.read_B + active_B)


class QuestionBatch(NamedTuple):
    """Prompts to prefill, a question to read after each prompt, and how many tokens to generate
    after each question.
    """

    prompts: Sequence[Sequence[int] | np.ndarray]
    questions: Sequence[Sequence[int]]
    new_tokens: int


class Generated(NamedTuple):
    """The tokens `[B, new_tokens]` after the questions of a batch, and its speed without
    compilation.

    Attributes:
      prefill_seconds: the time per prompt.
      rate: decoded tokens of all rows per second, with those of the questions.
    """

    ids: np.ndarray
    prefill_seconds: float
    rate: float


def generate_batch(
    cache: CacheVariant, batch: QuestionBatch, params: SamplingParams, length: int = 0
) -> Generated:
    """Prefills the prompts, reads the questions token by token from the compressed cache, and
    continues them.

    Args:
      length: the tokens to which prompts and questions are padded, so that batches share programs;
        0: those of the longest.
    """
    prompts_BT, lengths_B = pad_rows(batch.prompts, length)
    features: tuple[Feature, ...] = ()
    limits_B = np.full(len(prompts_BT), batch.new_tokens)
    if any(batch.questions):
        tokens_BQ, counts_B = pad_rows(batch.questions, length)
        features = (Questions(tokens_BQ, counts_B, np.zeros_like(counts_B)),)
        limits_B += counts_B
    options = StaticOptions(plan=cache.plan, pad=lambda longest: longest, features=features)
    eos_ids = [list[int]()] * len(prompts_BT)
    static = StaticBatch(
        cache.model,
        prompts_BT,
        lengths_B,
        params,
        limits_B=limits_B,
        eos_ids=eos_ids,
        options=options,
    )
    tokens_BN = np.concatenate([chunk.tokens for chunk in static.run(DECODE_CHUNK)], axis=1)
    kept_BT = (limits_B - batch.new_tokens)[:, None] + np.arange(batch.new_tokens)
    times = static.times
    return Generated(
        ids=np.take_along_axis(tokens_BN, kept_BT, axis=1),
        prefill_seconds=(times.first - times.compiling_first) / len(prompts_BT),
        rate=float((limits_B - 1).sum()) / max(times.decoding, 1e-9),
    )


@dataclass(frozen=True)
class CacheBenchmark:
    """Caches for sequences of one length, the full cache first. `progress` is called with progress
    lines.
    """

    caches: Sequence[CacheVariant]
    progress: Callable[[str], None] = lambda _: None

    def measure_text(self, text: Sequences) -> tuple[list[ReadMetrics], ReadMetrics]:
        """Scores the second half of every sequence through each cache, and with only the nearest
        `NEAR_KEYS` keys visible.
        """
        caches = [*self.caches, near_keys_variant(self.caches[0])]
        S, T = text.ids.shape

        def read(rows: np.ndarray, done: Progress) -> list[ReadMetrics]:
            ids_BT = text.ids[rows]
            lengths_B = np.full(len(rows), T)
            full = caches[0].logprobs(ids_BT, lengths_B, T // 2)
            found = []
            for cache in caches:  # one at a time: the log-probabilities are large
                logprobs = full if cache is caches[0] else cache.logprobs(ids_BT, lengths_B, T // 2)
                found.append(read_metrics(logprobs, full, ids_BT, T // 2))
                done.advance()
            return found

        found = self._map_batches("reading sequences", S, len(caches), read)
        return found[:-1], found[-1]

    def measure_tasks(self, tasks: RecallTasks) -> list[dict[str, np.ndarray]]:
        """Returns which tasks each cache answers correctly: `{"needle_aware": [P], …}`.

        With `aware`, the question is part of the prompt when the cache chooses what to keep. With
        `agnostic`, the question is read afterwards, token by token. Both answer from the compressed
        cache.
        """

        def agnostic(
            cache: CacheVariant, tokens_BT: np.ndarray, lengths_B: np.ndarray
        ) -> jax.Array:
            logprobs = cache.logprobs(tokens_BT, lengths_B, tasks.context)
            return argmax_at(logprobs, jnp.asarray(lengths_B - tasks.context))

        found: list[dict[str, np.ndarray]] = [{} for _ in self.caches]
        for name, answer in (("aware", CacheVariant.answer), ("agnostic", agnostic)):

            def read(
                rows: np.ndarray, done: Progress, answer: Callable[..., jax.Array] = answer
            ) -> list[np.ndarray]:
                correct = []
                for cache in self.caches:
                    answers_B = np.asarray(answer(cache, tasks.tokens[rows], tasks.lengths[rows]))
                    correct.append(answers_B == tasks.answers[rows])
                    done.advance()
                return correct

            by_cache = self._map_batches(
                f"recall tasks, question-{name}", len(tasks.tokens), len(self.caches), read
            )
            for scores, correct_P in zip(found, by_cache, strict=True):
                scores[f"needle_{name}"] = correct_P[tasks.needles]
                scores[f"copy_{name}"] = correct_P[~tasks.needles]
        return found

    def continue_prompts(
        self, run: LoadedModel, text: Sequences, count: int
    ) -> list[Generated | None]:
        """Continues the first halves of `count` sequences greedily with each cache; None for the
        oracle.

        The rate is that of the fastest batch.
        """
        T = text.ids.shape[1]
        tokens = min(FREE_TOKENS, T - T // 2)
        picked = [
            np.flatnonzero(text.seeds == seed)[:share]
            for seed, share in enumerate(split_by_seed(count))
        ]
        prompts_PT = text.ids[np.concatenate(picked), : T // 2]
        P = len(prompts_PT)
        params = greedy_params(run, FREE_ROWS, banned_tokens=sorted(run.tokenizer.special_ids))
        parts: list[list[Generated]] = [[] for _ in self.caches]
        batches = max(MIN_TIMED_BATCHES, -(-P // FREE_ROWS))
        done = self._start_progress("continuing prompts", batches * len(self.caches))
        for rows in equal_batches(FREE_ROWS * batches, FREE_ROWS):
            batch = QuestionBatch(prompts_PT[rows % P], [], tokens)
            for cache, generated in zip(self.caches, parts, strict=True):
                if cache.name != ORACLE:
                    generated.append(generate_batch(cache, batch, params))
                done.advance()
        return [_fastest(generated, P) if generated else None for generated in parts]

    def answer_questions(
        self, run: LoadedModel, batches: Sequence[QuestionBatch], length: int, task: str
    ) -> Iterator[list[Generated]]:
        """Yields the answers of one cache after another to all batches, whose prompts have up to
        `length` tokens.
        """
        done = self._start_progress(task, len(batches) * len(self.caches))
        for cache in self.caches:
            jax.clear_caches()
            found = []
            for batch in batches:
                found.append(
                    generate_batch(cache, batch, greedy_params(run, len(batch.prompts)), length)
                )
                done.advance(1, f", {cache.name} at {cache.ratio:g}")
            yield found

    def _map_batches(
        self, task: str, count: int, caches: int, read: Callable[[np.ndarray, Progress], Any]
    ) -> Any:
        """Applies `read` to all sequences in batches as large as memory allows. Progress counts
        each batch once per cache.
        """
        scored = -(-self.caches[0].plan.slots // 2)  # the other half is the prompt
        max_size = rows_per_batch(self.caches[0].model.config, scored)
        done = self._start_progress(task, -(-count // max_size) * caches)
        return map_batches(count, max_size, lambda rows: read(rows, done))

    def _start_progress(self, task: str, total: int) -> Progress:
        # Drop programs compiled earlier: each takes hundreds of memory maps, and Linux allows
        # 65,530 per process.
        jax.clear_caches()
        return Progress(self.progress, task, total, "batches, one for each cache")


def greedy_params(run: LoadedModel, rows: int, **settings: Any) -> SamplingParams:
    """Returns the parameters of greedy decoding, whatever the settings of the run are."""
    return run.params(
        [run.settings({**NEUTRAL_SETTINGS, "greedy": True, "seed": 0, **settings})] * rows
    )


def _fastest(batches: Sequence[Generated], count: int) -> Generated:
    """Returns the first `count` rows of all batches, and the speed of the fastest batch."""
    return max(batches, key=lambda batch: batch.rate)._replace(
        ids=np.concatenate([batch.ids for batch in batches])[:count]
    )
