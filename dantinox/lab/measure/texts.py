"""Texts to measure a model on, from a file or a run, in batches of equal size."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import Config, UserError
from dantinox.run import RunDirectory, load_run_config
from dantinox.text import (
    BatchOptions,
    Corpus,
    PromptStore,
    SpecialIds,
    Tokenizer,
    TokenStore,
    open_store,
)
from dantinox.text.corpus import split_text
from dantinox.text.tokenizer import UnknownCharacter

MAX_TEXT_TOKENS = 1 << 22  # read from a given text
WINDOW = 1024  # maximum tokens of a window in the store of a given text
CHARACTERS = 1 << 16  # encoded in one call
# The most characters that a tokenizer of kind `other` encodes in one call; it may treat a beginning
# differently.
MAX_CHARACTERS = 4 << 20


def equal_batches(count: int, max_size: int) -> Iterator[np.ndarray]:
    """Yields the indices 0 to `count` − 1 in batches of equal size, at most `max_size`, with the
    least padding.

    Equal sizes let one compiled program serve every batch. The last batch is padded with the first
    indices.
    """
    rows = -(-count // -(-count // max_size))
    for first in range(0, count, rows):
        yield np.arange(first, first + rows) % count


def map_batches(
    count: int,
    max_size: int,
    compute: Callable[[np.ndarray], Any],
    advance: Callable[[int], None] = lambda rows: None,
    axis: int = 0,
) -> Any:
    """Applies `compute` to `count` sequences in batches of at most `max_size` and concatenates the
    results along `axis`.

    Args:
      compute: maps the indices of a batch's sequences to a tree of arrays with one entry per
        sequence along `axis`.
      advance: called after each batch with the number of new sequences in it.

    Returns:
      A tree of NumPy arrays with `count` entries along `axis`.
    """
    parts = []
    done = 0
    for rows in equal_batches(count, max_size):
        parts.append(jax.tree.map(np.asarray, compute(rows)))
        new = min(len(rows), count - done)
        advance(new)
        done += new
    return jax.tree.map(lambda *x: np.concatenate(x, axis).take(range(count), axis), *parts)


def pad_rows(
    texts: Sequence[Sequence[int] | np.ndarray], length: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns texts as right-padded rows of tokens `[N, T]` and their lengths `[N]`; T is the
    longest length, or `length`.
    """
    lengths_N = np.array([len(text) for text in texts], np.int32)
    tokens_NT = np.zeros((len(texts), length or lengths_N.max()), np.int32)
    for tokens_T, text in zip(tokens_NT, texts, strict=True):
        tokens_T[: len(text)] = text
    return tokens_NT, lengths_N


def padded_positions(tokens_BT: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """Returns the position of each token of right-padded rows, −1 for padding."""
    places_T = jnp.arange(tokens_BT.shape[1])
    return jnp.where(places_T < lengths_B[:, None], places_T, -1)


def open_text_store(
    directory: RunDirectory, data_path: str | Path | None = None, tokens: int = MAX_TEXT_TOKENS
) -> TokenStore:
    """Opens the text on which a run is measured. This needs no weights, so call it before you load
    them.

    Args:
      data_path: the text, in the form of `data.path`. Its first tokens are both the training and
        the validation tokens of the store. None: the tokens that training saved in the run.
      tokens: maximum tokens to read from `data_path`.

    Raises:
      UserError: there is no text, or it has fewer than 2 tokens.
    """
    config = load_run_config(directory)
    tokenizer = Tokenizer.load(directory.tokenizer)
    if data_path is None:
        store = saved_text(directory, config, tokenizer)
        if store is None:
            raise UserError(
                f"{directory.path} has no saved training text: select a text with --data_path"
            )
        return store
    ids = read_tokens(tokenizer, str(data_path), config.data.text_field, tokens)
    if len(ids) < 2:
        raise UserError(
            f"{data_path} has {len(ids)} tokens, fewer than 2:"
            " select a longer text with --data_path"
        )
    length = min(config.model.max_context, WINDOW, len(ids) - 1)
    bos_id = next(iter(tokenizer.ids_before_text), None)
    return TokenStore(
        ids, ids, BatchOptions(1, length, seed=0), SpecialIds(tokenizer.eos_id, bos_id)
    )


def saved_text(directory: RunDirectory, config: Config, tokenizer: Tokenizer) -> TokenStore | None:
    """Opens the tokens that training saved in a run; None if it saved none, or only prompts without
    answers.
    """
    store = open_store(config, directory.data, tokenizer)
    return None if isinstance(store, PromptStore) else store


def read_tokens(tokenizer: Tokenizer, path: str, text_field: str, tokens: int) -> np.ndarray:
    """Returns the first `tokens` tokens of the text at `path`, which has the form of
    `data.path`.
    """
    parts = [np.zeros(0, np.int32)]
    count = 0
    for part in _token_stream(tokenizer, path, text_field):
        parts.append(part)
        count += len(part)
        if count >= tokens:
            break
    return np.concatenate(parts)[:tokens]


def _token_stream(tokenizer: Tokenizer, path: str, text_field: str) -> Iterator[np.ndarray]:
    """Yields the tokens of a text in parts, with BOS and EOS tokens around documents as in a token
    store.
    """
    begin, end = (
        np.array(ids, np.int32) for ids in (tokenizer.ids_before_text, tokenizer.ids_after_document)
    )
    document = -1
    for number, _, ids in _encoded_parts(tokenizer, path, text_field):
        if number != document:
            yield begin if document < 0 else np.concatenate([end, begin])
            document = number
        yield ids


class Document(NamedTuple):
    """One document of a text: its tokens without BOS and EOS tokens, and the number of UTF-8 bytes
    they decode to.
    """

    ids: np.ndarray
    bytes: int


def read_documents(
    tokenizer: Tokenizer, path: str, text_field: str, tokens: int | None = None
) -> list[Document]:
    """Returns the documents of the text at `path`, which has the form of `data.path`, up to
    `tokens` tokens in total.
    """
    found: dict[int, list[Document]] = {}
    remaining = math.inf if tokens is None else tokens
    for number, text, ids in _encoded_parts(tokenizer, path, text_field):
        kept = ids if len(ids) <= remaining else ids[: int(remaining)]
        size = len(text.encode()) if kept is ids else decoded_bytes(tokenizer, kept)
        found.setdefault(number, []).append(Document(kept, size))
        remaining -= len(kept)
        if remaining <= 0:
            break
    return [
        Document(np.concatenate([p.ids for p in parts]), sum(p.bytes for p in parts))
        for parts in found.values()
    ]


def decoded_bytes(tokenizer: Tokenizer, ids: np.ndarray) -> int:
    """Returns the number of UTF-8 bytes that tokens at the beginning of a text decode to."""
    if tokenizer.token_pieces is None or len(ids) == 0:
        return len(tokenizer.decode(ids).encode())
    first, _ = tokenizer.token_pieces
    return len(first[ids[0]]) + tokenizer.count_bytes(ids[1:])


def _encoded_parts(
    tokenizer: Tokenizer, path: str, text_field: str
) -> Iterator[tuple[int, str, np.ndarray]]:
    """Yields (document number, part of its text, tokens of that part)."""
    characters = 0
    size = MAX_CHARACTERS if tokenizer.kind == "other" else CHARACTERS
    for number, text in Corpus.open(path, text_field).read_text():
        for part in split_text(text, size):
            try:
                yield number, part, tokenizer.encode_array(part)
            except UnknownCharacter as error:
                raise UnknownCharacter(error.character, characters + error.position) from None
            characters += len(part)
