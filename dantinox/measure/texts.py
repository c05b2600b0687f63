"""Texts to measure a model on, from a file or a run, in batches of equal size."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import UserError
from dantinox.generation import LoadedModel
from dantinox.run import RunDirectory, load_run_config
from dantinox.text import Corpus, Tokenizer, TokenStore, open_store
from dantinox.text.corpus import split_text
from dantinox.text.tokenizer import UnknownCharacter

TEXT_TOKENS = 1 << 22  # read of a given text at most
WINDOW = 1024  # tokens of a window of a given text, where a store cuts it into windows
CHARACTERS, AT_MOST = 1 << 16, 4 << 20  # encoded at a time; of other vocabularies, which may tell the beginning of a text


def batches(count: int, most: int) -> Iterator[np.ndarray]:
    """The numbers below `count` in batches of at most `most`, with the fewest empty places.

    All are of one size, so that one program does for all; behind the last number the first ones come again.
    """
    rows = -(-count // -(-count // most))
    for first in range(0, count, rows):
        yield np.arange(first, first + rows) % count


def in_batches(
    count: int,
    most: int,
    reduce: Callable[[np.ndarray], Any],
    advance: Callable[[int], None] = lambda rows: None,
    axis: int = 0,
) -> Any:
    """What `reduce` makes of all `count` texts, read in batches of at most `most`: a tree of NumPy arrays.

    Args:
      reduce: from the numbers of a batch's texts to a tree of arrays with one place for each of them along `axis`.
      advance: called after each batch with the number of new texts in it.
    """
    parts, done = [], 0
    for rows in batches(count, most):
        parts.append(jax.tree.map(np.asarray, reduce(rows)))
        new = min(len(rows), count - done)
        advance(new)
        done += new
    return jax.tree.map(lambda *x: np.concatenate(x, axis).take(range(count), axis), *parts)


def padded(texts: Sequence[Sequence[int] | np.ndarray], length: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Texts as rows `[N, T]` of tokens, zeros behind their ends, and their lengths `[N]`; T is the longest, or `length`."""
    lengths_N = np.array([len(text) for text in texts], np.int32)
    tokens_NT = np.zeros((len(texts), length or lengths_N.max()), np.int32)
    for tokens_T, text in zip(tokens_NT, texts, strict=True):
        tokens_T[: len(text)] = text
    return tokens_NT, lengths_N


def positions_of(tokens_BT: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """The position of each token of right-padded texts, −1 behind their ends."""
    places_T = jnp.arange(tokens_BT.shape[1])
    return jnp.where(places_T < lengths_B[:, None], places_T, -1)


def text_store(directory: RunDirectory, data_path: str | Path | None = None, tokens: int = TEXT_TOKENS) -> TokenStore:
    """The text to measure a run on, found before its weights are loaded.

    Args:
      data_path: the text, as `data.path` names one: its first tokens are both the training and the validation tokens of the
        store. None: the tokens that training left in the run.
      tokens: of the text at `data_path`, to read at most.

    Raises:
      UserError: there is no text, or it has fewer than 2 tokens.
    """
    config, tokenizer = load_run_config(directory), Tokenizer.load(directory.tokenizer)
    if data_path is None:
        store = open_store(config, directory.data, tokenizer)
        if store is None:
            raise UserError(f"{directory.path} keeps no text of its training: give a text with --data_path")
        return store
    ids = read_text(tokenizer, str(data_path), config.data.text_field, tokens)
    if len(ids) < 2:
        raise UserError(f"{data_path} has {len(ids)} tokens, fewer than 2: give a longer text with --data_path")
    length = min(config.model.max_context, WINDOW, len(ids) - 1)
    return TokenStore(ids, ids, batch_size=1, sequence_length=length, seed=0, eos_id=tokenizer.eos_id)


def read_text(tokenizer: Tokenizer, path: str, text_field: str, tokens: int) -> np.ndarray:
    """The first tokens of a text, which is named as `data.path` names one."""
    parts, count = [np.zeros(0, np.int32)], 0
    for part in _encoded(tokenizer, path, text_field):
        parts.append(part)
        count += len(part)
        if count >= tokens:
            break
    return np.concatenate(parts)[:tokens]


def _encoded(tokenizer: Tokenizer, path: str, text_field: str) -> Iterator[np.ndarray]:
    """The tokens of a text in parts, its documents between begin and end tokens as a token store has them."""
    begin, end = (np.array([] if token is None else [token], np.int32) for token in (tokenizer.bos_id, tokenizer.eos_id))
    document = -1
    for number, _, ids in _parts(tokenizer, path, text_field):
        if number != document:
            yield begin if document < 0 else np.concatenate([end, begin])
            document = number
        yield ids


class Document(NamedTuple):
    """One document of a text: its tokens, without begin and end tokens, and the bytes they spell."""

    ids: np.ndarray
    bytes: int


def read_documents(run: LoadedModel, path: str, tokens: int | None = None) -> list[Document]:
    """The documents of a text, which is named as `data.path` names one; of all of it the first `tokens`."""
    found: dict[int, list[Document]] = {}
    left = math.inf if tokens is None else tokens
    for number, text, ids in _parts(run.tokenizer, path, run.config.data.text_field):
        kept = ids if len(ids) <= left else ids[: int(left)]
        size = len(text.encode()) if kept is ids else spelled_bytes(run.tokenizer, kept)
        found.setdefault(number, []).append(Document(kept, size))
        left -= len(kept)
        if left <= 0:
            break
    return [Document(np.concatenate([p.ids for p in parts]), sum(p.bytes for p in parts)) for parts in found.values()]


def begin_ids(tokenizer: Tokenizer) -> list[int]:
    """What stands before a document: the begin token, where the model wants one or was trained here with one."""
    wanted = tokenizer.add_bos or not tokenizer.roles
    return [tokenizer.bos_id] if wanted and tokenizer.bos_id is not None else []


def spelled_bytes(tokenizer: Tokenizer, ids: np.ndarray) -> int:
    """The bytes that tokens at the beginning of a text spell."""
    if tokenizer.token_pieces is None:
        return len(tokenizer.decode(ids).encode())
    first, inner = tokenizer.token_pieces
    return sum(len((inner if place else first)[token]) for place, token in enumerate(ids.tolist()))


def _parts(tokenizer: Tokenizer, path: str, text_field: str) -> Iterator[tuple[int, str, np.ndarray]]:
    """(number of the document, a part of its text, the tokens of that)."""
    characters, size = 0, AT_MOST if tokenizer.kind == "other" else CHARACTERS
    for number, text in Corpus.open(path, text_field).read_text():
        for part in split_text(text, size):
            try:
                yield number, part, tokenizer.encode_array(part)
            except UnknownCharacter as error:
                raise UnknownCharacter(error.character, characters + error.position) from None
            characters += len(part)
