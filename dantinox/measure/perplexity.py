"""`dantinox eval ppl`: perplexity and bits per byte of a text, in sliding windows.

The windows are those of Hugging Face's guide "Perplexity of fixed-length models": each begins `stride` tokens behind the one
before it, and of each only the tokens are scored that none before it has scored. So a token is scored once, with at least
`context − stride` tokens before it, but for those in the first window of a document, which have all there are.
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

from dantinox.config import UserError
from dantinox.generation import load
from dantinox.generation.decode import PREFILL
from dantinox.generation.quantized_weights import widen
from dantinox.generation.static_batch import bucket
from dantinox.measure.texts import batches, begin_ids, padded, positions_of, read_documents, spelled_bytes
from dantinox.model import Transformer
from dantinox.model.scoring import map_positions
from dantinox.report import human_count, table
from dantinox.report.console import Progress


@dataclass(frozen=True)
class Perplexity:
    """What `eval ppl` finds.

    Attributes:
      nats: mean −ln p of a scored token; `perplexity` is e to that.
      bits_per_byte: −log2 p of all scored tokens over the bytes of UTF-8 that they spell.
      documents, tokens, bytes: what was scored. The begin token stands before each document where `begin_ids` says
        so, and no end token behind it; no token sees another document.
      unscored: first tokens of documents, which without a begin token have nothing before them.
      context, stride: tokens of a window, and from one to the next.
    """

    nats: float
    perplexity: float
    bits_per_byte: float
    documents: int
    tokens: int
    bytes: int
    unscored: int
    context: int
    stride: int
    seconds: float


class Text(NamedTuple):
    """Tokens of which the last `new` are to be scored, each given those before it; at most a context and one of them."""

    ids: np.ndarray
    new: int


class Scores(NamedTuple):
    """ln p of a text's scored tokens, float64 `[new]`, and which of them the model finds likeliest, bool `[new]`."""

    logp: np.ndarray
    likeliest: np.ndarray


def measure_perplexity(
    run_dir: str | Path,
    data_path: str,
    *,
    stride: int | None = None,
    tokens: int | None = None,
    context: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> Perplexity:
    """Scores a text, named as `data.path` names one, with a run's model as it decodes: the same weights on the same devices.

    Args:
      stride: tokens from a window to the next (default: half of a window).
      tokens: of the text, to read at most.
      context: tokens of a window (default: the model's context).
      settings: `weights`, `products` and `tensor_parallel` of the section `generation`.

    Raises:
      UserError: a number is out of its range, the text cannot be read or spelt, or it has nothing to score.
    """
    run = load(run_dir, settings.get("tensor_parallel"))
    generation = run.settings(settings).generation
    most = run.model.config.max_context
    context = most if context is None else context
    if not 2 <= context <= most:
        raise UserError(f"--context must be in [2, {most}], the model's context, got {context}")
    stride = max(1, context // 2) if stride is None else stride
    if not 1 <= stride < context:
        raise UserError(f"--stride must be in [1, {context - 1}], less than a window of {context} tokens, got {stride}")
    if tokens is not None and tokens < 2:
        raise UserError(f"--tokens must be at least 2, got {tokens}")
    begun = time.perf_counter()
    begin = np.array(begin_ids(run.tokenizer), np.int32)
    documents = read_documents(run, data_path, tokens)
    texts = [text for document in documents for text in windows(np.concatenate([begin, document.ids]), context, stride)]
    total = sum(text.new for text in texts)
    if not total:
        raise UserError(f"{data_path} has no token that has another before it: there is nothing to score")
    parts, done = [0.0], Progress(progress, "scoring", total, "tokens")
    for number, scores in score(run.prepared(generation), texts):
        parts.append(-math.fsum(scores.logp))
        new = texts[number].new
        done.advance(new, f", {math.fsum(parts) / (done.done + new):.4f} nats a token so far")
    nats = math.fsum(parts)
    if not math.isfinite(nats):
        raise UserError("the model gives a token of the text no probability that is a number: its weights are damaged")
    unscored = [] if len(begin) else [document.ids[:1] for document in documents]
    size = sum(document.bytes for document in documents) - sum(spelled_bytes(run.tokenizer, ids) for ids in unscored)
    return Perplexity(
        nats=nats / total,
        perplexity=math.exp(min(nats / total, 700.0)),
        bits_per_byte=nats / math.log(2) / max(1, size),
        documents=len(documents),
        tokens=total,
        bytes=size,
        unscored=len(unscored),
        context=context,
        stride=stride,
        seconds=time.perf_counter() - begun,
    )


def windows(ids: np.ndarray, context: int, stride: int) -> Iterator[Text]:
    """The windows over a document: every token but the first is among the scored ones of exactly one of them."""
    scored = 1
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        if end > scored:
            yield Text(ids[begin:end], end - scored)
        scored = max(scored, end)
        if end == len(ids):
            return


def score(model: Transformer, texts: Sequence[Text]) -> Iterator[tuple[int, Scores]]:
    """(number of a text, its scores) for all texts in order, by one program."""
    length = min(bucket(max(len(text.ids) for text in texts) - 1), model.config.max_context)
    for rows in batches(len(texts), int(np.clip(PREFILL // length, 1, 64))):
        tokens_BT, lengths_B = padded([texts[row].ids for row in rows], length + 1)
        logp_BT, likeliest_BT = map(np.asarray, _scores(model, jnp.asarray(tokens_BT), jnp.asarray(lengths_B)))
        for place, number in enumerate(rows):
            if place and number < rows[place - 1]:
                break  # behind the last text the first ones come again
            last = slice(lengths_B[place] - 1 - texts[number].new, lengths_B[place] - 1)
            yield int(number), Scores(logp_BT[place, last].astype(np.float64), likeliest_BT[place, last])


@nnx.jit(graph_updates=False)
def _scores(model: Transformer, tokens_BT: jax.Array, lengths_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """ln p `[B, T − 1]` of the tokens from the second on, and whether each is the likeliest there."""
    model = widen(model)
    seen_BT, next_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
    x_BTD, _, _ = model.hidden(seen_BT, positions_of(seen_BT, lengths_B - 1))

    def one(x_D: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_V = model.logits(x_D)
        return jax.nn.log_softmax(logits_V)[token], jnp.argmax(logits_V) == token

    return map_positions(one, model.config.vocab_size, x_BTD, next_BT)


def perplexity_lines(found: Perplexity) -> list[str]:
    """The finding as a table."""
    unscored = f"; {found.unscored} first tokens have nothing before them and are left out" if found.unscored else ""
    of = f"{found.documents} documents, " if found.documents > 1 else ""
    return table([
        ("nats per token", f"{found.nats:.4f}"),
        ("perplexity", f"{found.perplexity:.4f}"),
        ("bits per byte", f"{found.bits_per_byte:.4f}"),
        ("text", f"{of}{found.tokens} tokens, {found.bytes} bytes{unscored}"),
        ("windows", f"of {found.context} tokens, {found.stride} from one to the next"),
        ("took", f"{found.seconds:.1f} s, {human_count(found.tokens / found.seconds)} tokens a second"),
    ]).splitlines()  # fmt: skip
