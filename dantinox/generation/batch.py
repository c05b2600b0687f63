"""Requests decoded together: prompts become rows, tokens become text, and each row ends where it should."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dantinox.config import Config, GenerationSection, KVSection
from dantinox.generation.decode import CHUNK, CachePlan
from dantinox.generation.generate import clamp_to_context
from dantinox.generation.result import Result
from dantinox.generation.session import Chunk, Session
from dantinox.generation.stopping import StopFinder
from dantinox.generation.trace import changed_settings, columns, router_numbers
from dantinox.generation.words import stop_token_ids
from dantinox.model import Transformer
from dantinox.sampling import SamplingParams, StepInfo
from dantinox.text import Tokenizer

STREAM_SECONDS = 0.08  # a chunk is sized to take about this long when text is streamed


class Piece(NamedTuple):
    """Text that row `row` of a batch has just gained."""

    row: int
    text: str


class Request(NamedTuple):
    """A prompt to be continued: its number among those asked for, its text and its tokens."""

    number: int
    prompt: str
    ids: list[int]


class _Row:
    """The host's side of a row: its text so far and why it ended."""

    def __init__(self, tokenizer: Tokenizer, section: GenerationSection, prompt: Sequence[int]):
        self.tokens: list[int] = []
        self.text: list[str] = []
        self.reason: str | None = None
        self.seed = section.seed or 0
        self._eos = None if section.ignore_eos else tokenizer.eos_id
        self._stop_ids, self._keep_stop = stop_token_ids(tokenizer, section), section.keep_stop
        self._min_tokens = section.min_tokens
        self._detokenizer = tokenizer.detokenizer()
        self._detokenizer.push(prompt)  # the first new token is no beginning, where some vocabularies drop a space
        self._stops = StopFinder(section.stop, section.keep_stop)

    def take(self, ids: list[int], done: bool) -> str:
        """Takes new tokens up to the end of the text, gives the text that became certain."""
        piece = ""
        for token in ids:
            self.tokens.append(token)
            hidden = token in self._stop_ids and not self._keep_stop
            text = "" if hidden else self._detokenizer.push([token])
            piece += self._stops.push(text, armed=len(self.tokens) >= self._min_tokens)
            if self._stops.found is not None:
                self.reason = "stop"
                break
        if self.reason is None and done:
            piece += self._stops.push(self._detokenizer.flush())
            piece += self._stops.flush()
            last = self.tokens[-1] if self.tokens else None
            stopped = self._stops.found is not None or last in self._stop_ids
            self.reason = "stop" if stopped else "eos" if last is not None and last == self._eos else "length"
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
        logprobs: int | None,
        echo: bool,
        plan: Callable[[int], CachePlan],
    ):
        sections = [config.generation for config in configs]
        self.results: list[Result] = []
        self._tokenizer, self._requests, self._logprobs, self._echo = tokenizer, requests, logprobs, echo
        self._samples = samples = sections[0].n
        self._configs = [config for config in configs for _ in range(samples)]
        rows = [config.generation for config in self._configs]
        sampling = params(self._configs, [*range(samples)] * len(requests))
        lengths_P = np.array([len(request.ids) for request in requests], np.int32)
        wanted_P = np.array([section.max_new_tokens for section in sections])
        limits_P = clamp_to_context(lengths_P, wanted_P, model.config.max_context)
        prompt_PT = np.zeros((len(requests), lengths_P.max()), np.int32)
        for row, request in zip(prompt_PT, requests, strict=True):
            row[: len(request.ids)] = request.ids
        eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        self._needed = bool((limits_P > 0).any()) or echo
        self.session = Session(
            model,
            prompt_PT,
            lengths_P,
            sampling,
            limits_B=np.repeat(limits_P, samples),
            eos_ids=[[*stop_token_ids(tokenizer, section), *([] if section.ignore_eos else eos)] for section in rows],
            samples=samples,
            use_cache=sections[0].use_cache,
            report=logprobs,
            plan=plan,
        )
        self._rows = [_Row(tokenizer, section, requests[i // samples].ids) for i, section in enumerate(rows)]

    @property
    def numbers(self) -> list[int]:
        """For each result, the number of its request."""
        return [request.number for request in self._requests for _ in range(self._samples)]

    @property
    def rows(self) -> int:
        """Samples in all."""
        return len(self._rows)

    def summary(self) -> str:
        """One line about a finished batch: tokens, time to the first one, speed, compile time apart, seeds."""
        stats = self.results[0].stats
        prompt = sum(len(request.ids) for request in self._requests)
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
          stream: keep chunks short enough for a reader; else as long as they are fast.
        """
        infos: list[Any] = []
        with CompileTimer() as compiling:
            start = time.perf_counter()
            first, steps = 0.0, 1
            chunk = self.session.start() if self._needed else None
            while chunk is not None:
                first = first or time.perf_counter() - start
                infos.append((chunk.counts, chunk.info))
                yield from self._take(chunk)
                open_rows = np.array([row.reason is None for row in self._rows])
                if not open_rows.any():
                    break
                if (~open_rows & ~chunk.done).any():
                    self.session.finish(~open_rows)
                before, compiled = time.perf_counter(), compiling.seconds
                chunk = self.session.advance(steps if stream else CHUNK)
                took = time.perf_counter() - before - (compiling.seconds - compiled)
                steps = int(np.clip(steps * STREAM_SECONDS / max(took, 1e-6), 1, 2 * steps))
            seconds = time.perf_counter() - start
        self._finish(infos, seconds, first, compiling.seconds, compiling.after(first))

    def _take(self, chunk: Chunk) -> Iterator[Piece]:
        for index, row in enumerate(self._rows):
            if row.reason is None:
                ids = chunk.tokens[index, : chunk.counts[index]].tolist()
                piece = row.take(ids, bool(chunk.done[index]))
                if piece:
                    yield Piece(index, piece)

    def _finish(self, infos: list[Any], seconds: float, first: float, compiled: float, compiled_later: float) -> None:
        new = sum(len(row.tokens) for row in self._rows)
        decoding = seconds - first - compiled_later
        rate = (new - len(self._rows)) / decoding if decoding > 0 and new > len(self._rows) else 0.0
        cache = self.session.cache
        report = None if cache is None else cache.report()
        for index, row in enumerate(self._rows):
            request, steps = self._requests[index // self._samples], self._steps(index, row, infos)
            self.results.append(
                Result(
                    prompt=request.prompt,
                    text="".join(row.text),
                    tokens=row.tokens,
                    finish_reason=row.reason or "length",
                    seed=row.seed,
                    info={} if steps is None else self._info(index, row, steps),
                    stats={
                        "prompt_tokens": len(request.ids),
                        "new_tokens": len(row.tokens),
                        "seconds": seconds,
                        "first_token_seconds": first,
                        "compile_seconds": compiled,
                        "decode_tok_per_s": rate,
                        "cache": report,
                    },
                    steps=steps,
                    settings=changed_settings(self._configs[index]),
                    router=router_numbers(self.session.params, index),
                )
            )

    def _steps(self, index: int, row: _Row, infos: list[Any]) -> StepInfo | None:
        """What was reported about one row's tokens, `[steps, …]` per field."""
        parts = [jax.tree.map(lambda x, n=counts[index]: x[index, :n], info) for counts, info in infos if info is not None]
        if not parts:
            return None
        steps: StepInfo = jax.tree.map(lambda *columns: np.concatenate(columns)[: len(row.tokens)], *parts)
        return steps

    def _info(self, index: int, row: _Row, steps: StepInfo) -> dict[str, Any]:
        found = columns(self._tokenizer, row.tokens, steps)
        if self._echo and self.session.echo is not None:
            prompt = index // self._samples
            ids = self._requests[prompt].ids
            said = self.session.echo[prompt, : len(ids)].tolist()
            found["prompt_tokens"] = [self._tokenizer.decode([token]) for token in ids]
            found["prompt_logprobs"] = [None, *said[1:]]
        return found


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


class CompileTimer:
    """Adds up what jax spends on tracing and compiling while the context is open."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._events: list[tuple[float, float]] = []

    def __enter__(self) -> "CompileTimer":
        self._start = time.perf_counter()
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def after(self, moment: float) -> float:
        """The part of the seconds that fell after `moment` (seconds since the context was opened)."""
        return sum(duration for at, duration in self._events if at > moment)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            self.seconds += duration_secs
            self._events.append((time.perf_counter() - self._start, duration_secs))
