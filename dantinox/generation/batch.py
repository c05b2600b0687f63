"""Requests decoded together: token ids become the rows of a batch, new tokens text, and each row ends where it should."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from dantinox.config import Config, GenerationSection, KVSection
from dantinox.generation.cache_plan import CachePlan
from dantinox.generation.constraints import Matcher
from dantinox.generation.decode import CHUNK
from dantinox.generation.loop import Chunk, Session, bucket, clamp_to_context, slots_needed
from dantinox.generation.result import Result
from dantinox.generation.stop_strings import StopFinder
from dantinox.generation.token_settings import stop_token_ids
from dantinox.generation.trace import changed_settings, columns, router_numbers
from dantinox.model import Transformer
from dantinox.sampling import SamplingParams, StepInfo
from dantinox.sampling.chain import ALL
from dantinox.text import Tokenizer


class Piece(NamedTuple):
    """Text that row `row` of a batch has just gained.

    Attributes:
      entropy: the largest, in bits, among the tokens that spell it; None where nothing is reported.
    """

    row: int
    text: str
    entropy: float | None = None


class Request(NamedTuple):
    """A prompt to be continued: its number among those asked for, its text and its tokens."""

    number: int
    prompt: str
    ids: list[int]


class RowText:
    """The host's side of a row: its text so far and why it ended.

    Attributes:
      tokens: those that belong to it.
      text: in the pieces that it came in.
      reason: `eos`, `stop` or `length` once it has ended.
    """

    def __init__(self, tokenizer: Tokenizer, section: GenerationSection, prompt: Sequence[int]):
        self.tokens: list[int] = []
        self.text: list[str] = []
        self.reason: str | None = None
        self.seed = section.seed or 0
        self._eos = () if section.ignore_eos else tokenizer.stop_ids
        self._stop_ids, self._keep_stop = stop_token_ids(tokenizer, section), section.keep_stop
        self._min_tokens = section.min_tokens
        self._detokenizer = tokenizer.detokenizer()
        self._detokenizer.push(prompt)  # the first new token is no beginning, where some vocabularies drop a space
        self._stops = StopFinder(section.stop, section.keep_stop)
        self._entropy = 0.0  # the largest since text was given

    def pieces(
        self, ids: list[int], done: bool, entropies: list[float] | None, complete: bool = False
    ) -> Iterator[tuple[str, float | None]]:
        """Takes new tokens, gives the texts that became certain, token by token where each has an entropy; else as `take`."""
        if entropies is None:
            yield self.take(ids, done, complete), None
            return
        for token, entropy in zip(ids, entropies, strict=True):
            self._entropy = max(self._entropy, entropy)
            if text := self.take([token], False):
                yield text, self._entropy
                self._entropy = 0.0
            if self.reason is not None:
                return
        yield self.take([], done, complete), self._entropy

    def take(self, ids: list[int], done: bool, complete: bool = False) -> str:
        """Takes new tokens up to the end of the text, gives the text that became certain.

        Args:
          done: no more will come.
          complete: nor may any, as a constraint says.
        """
        piece = ""
        for token in ids:
            self.tokens.append(token)
            hidden = token in self._stop_ids and not self._keep_stop
            text = "" if hidden else self._detokenizer.push([token])
            piece += self._stops.push(text, armed=len(self.tokens) >= self._min_tokens)
            if self._stops.found is not None:
                self.reason = "stop"
                break
        if self.reason is None and (done or complete):
            piece += self._stops.push(self._detokenizer.flush())
            piece += self._stops.flush()
            last = self.tokens[-1] if self.tokens else None
            stopped = self._stops.found is not None or last in self._stop_ids
            self.reason = "stop" if stopped else "eos" if complete or last in self._eos else "length"
        self.text.append(piece)
        return piece


class Batch:
    """Requests being decoded together; `pieces` runs them, `results` holds the outcome.

    Attributes:
      session: the decoding itself, for whoever wants to drive it by hand.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        configs: Sequence[Config],
        params: Callable[[Sequence[Config], Sequence[int]], SamplingParams],
        plan: Callable[[int], CachePlan],
        logprobs: int | None,
        echo: bool,
        pad: Callable[[int], int] = bucket,
        matcher: Callable[[Sequence[int]], Matcher] | None = None,
    ):
        """Takes the requests' settings together.

        Args:
          matcher: what the text of a row has to be, given the ids that end it besides the end tokens.
        """
        sections = [config.generation for config in configs]
        samples = sections[0].n
        self.results: list[Result] = []
        self._tokenizer = tokenizer
        self._requests = [request for request in requests for _ in range(samples)]
        self._configs = [config for config in configs for _ in range(samples)]
        sampling = params(self._configs, [*range(samples)] * len(requests))
        lengths_P = np.array([len(request.ids) for request in requests], np.int32)
        wanted_P = np.array([section.max_new_tokens for section in sections])
        limits_P = clamp_to_context(lengths_P, wanted_P, model.config.max_context)
        prompt_PT = np.zeros((len(requests), lengths_P.max()), np.int32)
        for row, request in zip(prompt_PT, requests, strict=True):
            row[: len(request.ids)] = request.ids
        stops = [stop_token_ids(tokenizer, section) for section in (config.generation for config in self._configs)]
        self._matchers = [] if matcher is None else [matcher(ids) for ids in stops]
        self._allowed_BW = np.full((len(stops), -(-model.config.vocab_size // 32)), ALL, np.uint32)
        eos = tokenizer.stop_ids
        self.session = Session(
            model,
            prompt_PT,
            lengths_P,
            sampling,
            limits_B=np.repeat(limits_P, samples),
            eos_ids=[
                [*ids, *([] if config.generation.ignore_eos else eos)] for ids, config in zip(stops, self._configs, strict=True)
            ],
            samples=samples,
            use_cache=sections[0].use_cache,
            report=logprobs,
            echo=echo,
            plan=plan(slots_needed(lengths_P, limits_P, pad)),
            pad=pad,
        )
        self._rows = [
            RowText(tokenizer, config.generation, request.ids)
            for config, request in zip(self._configs, self._requests, strict=True)
        ]

    @property
    def numbers(self) -> list[int]:
        """For each result, the number of its request."""
        return [request.number for request in self._requests]

    def summary(self) -> str:
        """One line about a finished batch: tokens, time to the first one, speed, compile time apart, seeds."""
        stats = self.results[0].stats
        prompt = sum(len(request.ids) for request in self._requests[:: self._configs[0].generation.n])
        new = sum(result.stats["new_tokens"] for result in self.results)
        seeds = sorted({result.seed for result in self.results})
        return (
            f"{prompt} prompt + {new} new tokens, first token {stats['first_token_seconds']:.2f} s, "
            f"{stats['decode_tok_per_s']:.1f} tok/s, compile {stats['compile_seconds']:.2f} s, "
            f"seed {seeds[0] if len(seeds) == 1 else seeds}{_cache_summary(stats['cache'], self._configs[0].kv)}"
        )

    def pieces(self, stream: bool = False) -> Iterator[Piece]:
        """Decodes to the end, yielding text as it becomes certain; afterwards `results` is filled.

        Args:
          stream: keep chunks short enough for a reader; else as long as they are fast. With a constraint each is one token.
        """
        chunks, held = [], bool(self._matchers)
        complete = self._constrain()
        for chunk in self.session.run(1 if held else None if stream else CHUNK, ahead=not stream and not held):
            chunks.append(chunk)
            complete = self._constrain(chunk)
            for index, row in enumerate(self._rows):
                if row.reason is None:
                    count = chunk.counts[index]
                    entropies = None if chunk.info is None else chunk.info.entropy[index, :count].tolist()
                    ids, done = chunk.tokens[index, :count].tolist(), bool(chunk.done[index])
                    for text, entropy in row.pieces(ids, done, entropies, complete[index]):
                        if text:
                            yield Piece(index, text, entropy)
            self.session.finish(np.array([row.reason is not None for row in self._rows]))
        self.results = self._finished(chunks)

    def _constrain(self, chunk: Chunk | None = None) -> list[bool]:
        """Which rows a chunk completes, as their constraints say; the others may go on with what these allow."""
        complete = [False] * len(self._rows)
        if not self._matchers:
            return complete
        for index, (matcher, row) in enumerate(zip(self._matchers, self._rows, strict=True)):
            if row.reason is None:
                for token in [] if chunk is None else chunk.tokens[index, : chunk.counts[index]].tolist():
                    matcher.take(token)
                complete[index] = matcher.done
                self._allowed_BW[index] = matcher.mask()
        self.session.params = replace(self.session.params, allowed=jax.device_put(self._allowed_BW.copy()))
        self.session.finish(np.array(complete))
        return complete

    def _finished(self, chunks: list[Chunk]) -> list[Result]:
        times, cache = self.session.times, self.session.cache
        new = sum(len(row.tokens) for row in self._rows) - len(self._rows)  # behind the first ones
        stats = {
            "seconds": times.total,
            "first_token_seconds": times.first,
            "compile_seconds": times.compiling,
            "decode_tok_per_s": new / times.decoding if times.decoding > 0 and new > 0 else 0.0,
            "cache": None if cache is None else cache.report(),
        }
        results = []
        for index, (row, request) in enumerate(zip(self._rows, self._requests, strict=True)):
            steps = _steps(index, len(row.tokens), chunks)
            results.append(
                Result(
                    prompt=request.prompt,
                    text="".join(row.text),
                    tokens=row.tokens,
                    finish_reason=row.reason or "length",
                    seed=row.seed,
                    info={} if steps is None else self._info(index, row, steps),
                    stats={"prompt_tokens": len(request.ids), "new_tokens": len(row.tokens), **stats},
                    steps=steps,
                    settings=changed_settings(self._configs[index]),
                    router=router_numbers(self.session.params, index),
                )
            )
        return results

    def _info(self, index: int, row: RowText, steps: StepInfo) -> dict[str, Any]:
        found = columns(self._tokenizer, row.tokens, steps)
        if self.session.echo is not None:
            ids = self._requests[index].ids
            said = self.session.echo[index // self._configs[0].generation.n, : len(ids)].tolist()
            found["prompt_tokens"] = [self._tokenizer.decode([token]) for token in ids]
            found["prompt_logprobs"] = [None, *said[1:]]
        return found


def _steps(index: int, count: int, chunks: Sequence[Chunk]) -> StepInfo | None:
    """What was reported about one row's first `count` tokens, `[count, …]` per field."""
    parts = [jax.tree.map(lambda x, n=c.counts[index]: x[index, :n], c.info) for c in chunks if c.info is not None]
    if not parts:
        return None
    steps: StepInfo = jax.tree.map(lambda *columns: np.concatenate(columns)[:count], *parts)
    return steps


def _cache_summary(cache: dict[str, Any] | None, kv: KVSection) -> str:
    """`, cache 1.2 of 5.9 MB (80 % saved, 24 to 64 slots a head)` for a compressed cache, else its size."""
    if cache is None:
        return ""
    size = f", cache {cache['bytes'] / 1e6:.2f} MB"
    slots = sorted(slots for layer in cache["slots"] for _, slots in layer)
    if not kv.compresses:
        return size
    if cache["bytes"] == cache["full_bytes"]:
        return f"{size} (whole: a text of at most {slots[-1]} tokens has nothing to give up)"
    held = f"{slots[0]} slots a head" if slots[0] == slots[-1] else f"{slots[0]} to {slots[-1]} slots a head"
    return f"{size} of {cache['full_bytes'] / 1e6:.2f} ({1 - cache['ratio']:.0%} saved, {held})"
