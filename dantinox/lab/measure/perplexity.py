"""`dantinox eval ppl`: perplexity and bits per byte of a text, in sliding windows.

The windows follow Hugging Face's guide "Perplexity of fixed-length models". Each window begins
`stride` tokens after the previous one and scores only the tokens that no earlier window has scored.
So each token is scored once. In the first window of a document, a scored token sees all earlier
tokens of the document. In the other windows, it sees at least `context − stride` earlier tokens.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import ModelConfig, UserError
from dantinox.generation import load
from dantinox.generation.decode.generate_toks import PREFILL_BATCH_TOKENS
from dantinox.generation.decode.prepared_model import dequantize
from dantinox.generation.static_batch import padded_length
from dantinox.lab.measure.doctor import matmul_speed
from dantinox.lab.measure.texts import (
    decoded_bytes,
    equal_batches,
    pad_rows,
    padded_positions,
    read_documents,
)
from dantinox.model import Transformer
from dantinox.model.flops import forward_flops
from dantinox.model.scoring import map_logits
from dantinox.report import human_count, table
from dantinox.report.console import Progress
from dantinox.report.tables import human_time

DEFAULT_TOKENS = 8192


@dataclass(frozen=True)
class Perplexity:
    """The result of `eval ppl`.

    Each document begins with the BOS token if the tokenizer adds one. It does not end with an EOS
    token. No token sees another document.

    Attributes:
      nats: mean −ln p of a scored token.
      perplexity: e to the power of `nats`.
      bits_per_byte: −log2 p of all scored tokens divided by the UTF-8 bytes that they decode to.
      documents, tokens, bytes: the amount of text that was scored.
      truncated: whether the text may be longer than the tokens that were read.
      unscored: number of documents whose first token is not scored, because there is no BOS token
        before it.
      context: tokens of a window.
      stride: tokens from one window to the next.
    """

    nats: float
    perplexity: float
    bits_per_byte: float
    documents: int
    tokens: int
    bytes: int
    truncated: bool
    unscored: int
    context: int
    stride: int
    seconds: float


class ScoringInput(NamedTuple):
    """A sequence of at most the context length plus one. Its last `new` tokens are scored, each
    given the tokens before it.
    """

    ids: np.ndarray
    new: int


class TokenScores(NamedTuple):
    """ln p of the scored tokens of a sequence, float64 `[new]`, and whether each is the most likely
    token, bool `[new]`.
    """

    logp: np.ndarray
    is_top1: np.ndarray


def measure_perplexity(
    run_dir: str | Path,
    data_path: str,
    *,
    stride: int | None = None,
    tokens: int = DEFAULT_TOKENS,
    context: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> Perplexity:
    """Scores a text with the model of a run, with the weights and devices that generation uses.

    Args:
      data_path: the text, in the form of `data.path`.
      stride: tokens from one window to the next (default: half of a window).
      tokens: maximum tokens of the text to read, from its beginning.
      context: tokens of a window (default: the model's context).
      settings: `weights`, `matmul_dtype` and `tensor_parallel` of the section `generation`.

    Raises:
      UserError: a number is out of range, the text cannot be read or encoded, or it has no token to
        score.
    """
    run = load(run_dir, settings.get("tensor_parallel"))
    generation = run.settings(settings).generation
    context, stride = _window(run.model.config.max_context, context, stride)
    if tokens < 2:
        raise UserError(f"--tokens must be at least 2, got {tokens}")
    started = time.perf_counter()
    begin = np.array(run.tokenizer.ids_before_text, np.int32)
    documents = read_documents(run.tokenizer, data_path, run.config.data.text_field, tokens)
    texts: list[ScoringInput] = []
    for document in documents:
        texts += sliding_windows(np.concatenate([begin, document.ids]), context, stride)
    total = sum(text.new for text in texts)
    if not total:
        raise UserError(
            f"{data_path} has no token to score: a scored token needs a token before it"
        )
    progress(_estimate(run.model.config, texts))
    parts = [0.0]
    done = Progress(progress, "scoring", total, "tokens")
    for number, scores in score_sequences(run.prepared(generation), texts):
        parts.append(-math.fsum(scores.logp))
        new = texts[number].new
        done.advance(new, f", {math.fsum(parts) / (done.done + new):.4f} nats per token so far")
    nats = math.fsum(parts)
    if not math.isfinite(nats):
        raise UserError(
            "the model returns a NaN or infinite log-probability for"
            " the text: its weights are damaged"
        )
    unscored = [] if len(begin) else [document.ids[:1] for document in documents]
    size = sum(document.bytes for document in documents)
    size -= sum(decoded_bytes(run.tokenizer, ids) for ids in unscored)
    return Perplexity(
        nats=nats / total,
        perplexity=math.exp(min(nats / total, 700.0)),
        bits_per_byte=nats / math.log(2) / max(1, size),
        documents=len(documents),
        tokens=total,
        bytes=size,
        truncated=sum(len(document.ids) for document in documents) >= tokens,
        unscored=len(unscored),
        context=context,
        stride=stride,
        seconds=time.perf_counter() - started,
    )


def _window(most: int, context: int | None, stride: int | None) -> tuple[int, int]:
    """Returns the tokens of a window, at most the model's context `most`, and the tokens to the
    next window.
    """
    if context is None:
        context = most
    if not 2 <= context <= most:
        raise UserError(f"--context must be in [2, {most}], the model's context, got {context}")
    if stride is None:
        stride = max(1, context // 2)
    if not 1 <= stride < context:
        raise UserError(
            f"--stride must be in [1, {context - 1}], less than a window of {context} tokens, got"
            f" {stride}"
        )
    return context, stride


def _estimate(model: ModelConfig, texts: Sequence[ScoringInput]) -> str:
    """Returns the minimum time of the forward passes at the measured speed of large matrix
    multiplications, in words.
    """
    length = _program_length(model, texts)
    flops = matmul_speed()[0]
    seconds = len(texts) * length * forward_flops(model, length) / flops
    return (
        f"{len(texts)} windows of {length} tokens take at least {human_time(seconds)} at"
        f" {flops / 1e9:.0f} GFLOP/s"
    )


def sliding_windows(ids: np.ndarray, context: int, stride: int) -> Iterator[ScoringInput]:
    """Yields the windows over a document. Exactly one window scores each token except the first."""
    scored = 1
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        if end > scored:
            yield ScoringInput(ids[begin:end], end - scored)
        scored = max(scored, end)
        if end == len(ids):
            return


def score_sequences(
    model: Transformer, texts: Sequence[ScoringInput]
) -> Iterator[tuple[int, TokenScores]]:
    """Yields (index of a sequence, its scores) for all sequences in order, computed by one compiled
    program.
    """
    length = _program_length(model.config, texts)
    for rows in equal_batches(len(texts), int(np.clip(PREFILL_BATCH_TOKENS // length, 1, 64))):
        tokens_BT, lengths_B = pad_rows([texts[row].ids for row in rows], length + 1)
        logp_BT, is_top1_BT = map(
            np.asarray, _score_batch(model, jnp.asarray(tokens_BT), jnp.asarray(lengths_B))
        )
        for place, number in enumerate(rows):
            if place and number < rows[place - 1]:
                break  # the rest of the batch repeats the first sequences
            last = slice(lengths_B[place] - 1 - texts[number].new, lengths_B[place] - 1)
            yield (
                int(number),
                TokenScores(logp_BT[place, last].astype(np.float64), is_top1_BT[place, last]),
            )


def _program_length(model: ModelConfig, texts: Sequence[ScoringInput]) -> int:
    """Returns the number of tokens in each row of the compiled program."""
    return min(padded_length(max(len(text.ids) for text in texts) - 1), model.max_context)


@nnx.jit(graph_updates=False)
def _score_batch(
    model: Transformer, tokens_BT: jax.Array, lengths_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns ln p `[B, T − 1]` of all tokens but the first, and whether each is the most likely
    token at its position.
    """
    model = dequantize(model)
    seen_BT = tokens_BT[:, :-1]
    next_BT = tokens_BT[:, 1:]
    x_BTD, _, _ = model.hidden(seen_BT, padded_positions(seen_BT, lengths_B - 1))

    def score_position(logits_V: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.nn.log_softmax(logits_V)[token], jnp.argmax(logits_V) == token

    return map_logits(score_position, model, x_BTD, next_BT)


def perplexity_lines(result: Perplexity) -> list[str]:
    """Returns the result as the lines of a table."""
    unscored = (
        f"; {result.unscored} first tokens have no token before them and are not scored"
        if result.unscored
        else ""
    )
    first = "the beginning (--tokens reads more): " if result.truncated else ""
    count = f"{result.documents} documents, " if result.documents > 1 else ""
    return table(
        [
            ("nats per token", f"{result.nats:.4f}"),
            ("perplexity", f"{result.perplexity:.4f}"),
            ("bits per byte", f"{result.bits_per_byte:.4f}"),
            ("text", f"{first}{count}{result.tokens} tokens, {result.bytes} bytes{unscored}"),
            ("windows", f"of {result.context} tokens, {result.stride} from one to the next"),
            (
                "took",
                (
                    f"{result.seconds:.1f} s, {human_count(result.tokens / result.seconds)}"
                    " tokens per second"
                ),
            ),
        ]
    ).splitlines()
