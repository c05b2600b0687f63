"""Trains tokenizers on a corpus: characters, bytes, byte-level BPE."""

import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, trainers

from dantinox.config import TokenizerSection, UserError
from dantinox.text.corpus import split_text
from dantinox.text.token_pieces import byte_letters
from dantinox.text.tokenizer import Tokenizer

SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>"]
SAMPLE_CHARACTERS = 16 << 20
CHUNK_CHARACTERS = 1 << 16
MAX_WORD_CHARACTERS = 1000
_LONG_WORD = re.compile(rf"\S{{{MAX_WORD_CHARACTERS + 1}}}")


def train_tokenizer(
    settings: TokenizerSection, documents: Callable[[], Iterator[str]]
) -> Tokenizer:
    """Trains or loads the tokenizer that the settings describe.

    Ordinary tokens come first, then `<pad>`, `<bos>` and `<eos>`. A character vocabulary holds the
    characters of the corpus, sorted by code point. A byte vocabulary needs no corpus. BPE merges
    are counted on at most 16 Mi characters: a longer corpus is sampled evenly in chunks of 64 Ki
    characters. A small corpus can result in fewer than `vocab_size` tokens.

    Args:
      settings: the `tokenizer` section.
      documents: a function; each call returns an iterator over the text, in parts of any length.

    Raises:
      UserError: `tokenizer_path` is missing or not a tokenizer.
    """
    if settings.tokenizer_type == "file":
        if settings.tokenizer_path is None:
            raise UserError(
                "tokenizer.tokenizer_path must be set with tokenizer.tokenizer_type: file"
            )
        return Tokenizer.load(settings.tokenizer_path)
    if settings.tokenizer_type == "char":
        return _train_characters(documents(), settings.byte_fallback)
    if settings.tokenizer_type == "byte":
        return _make_byte_tokenizer()
    return _train_bpe(documents(), settings.vocab_size)


def _train_characters(documents: Iterable[str], byte_fallback: bool) -> Tokenizer:
    seen = np.zeros(0x110000, bool)
    for text in documents:
        seen[np.frombuffer(text.encode("utf-32-le"), "<u4")] = True
    symbols = [chr(code) for code in np.flatnonzero(seen)]
    if byte_fallback:
        symbols += [f"<0x{byte:02X}>" for byte in range(256)]
    core = Core(
        models.BPE(
            vocab={s: i for i, s in enumerate(symbols)}, merges=[], byte_fallback=byte_fallback
        )
    )
    core.decoder = (
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        if byte_fallback
        else decoders.Fuse()
    )
    return _add_special_tokens(core)


def _make_byte_tokenizer() -> Tokenizer:
    core = Core(
        models.BPE(vocab={letter: byte for byte, letter in enumerate(byte_letters())}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return _add_special_tokens(core)


def _train_bpe(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_split_long_words(_sample_text(documents)), trainer)
    return _add_special_tokens(core)


def _add_special_tokens(core: Core) -> Tokenizer:
    core.add_special_tokens(SPECIAL_TOKENS)
    return Tokenizer(core.to_str(pretty=True))


def _sample_text(documents: Iterable[str], limit: int = SAMPLE_CHARACTERS) -> list[str]:
    """Returns at most `limit` characters, sampled evenly: every second chunk is dropped until few
    enough characters remain.
    """
    chunks: list[str] = []
    stride = 1
    size = 0
    for number, chunk in enumerate(
        c for text in documents for c in split_text(text, CHUNK_CHARACTERS)
    ):
        if number % stride:
            continue
        chunks.append(chunk)
        size += len(chunk)
        while size > limit and len(chunks) > 1:
            chunks = chunks[::2]
            stride = 2 * stride
            size = sum(map(len, chunks))
    return chunks


def _split_long_words(chunks: Iterable[str]) -> Iterator[str]:
    """Splits long runs without white space, because the time of the trainer is quadratic in their
    length.
    """
    for chunk in chunks:
        if _LONG_WORD.search(chunk):
            yield from (
                chunk[i : i + MAX_WORD_CHARACTERS]
                for i in range(0, len(chunk), MAX_WORD_CHARACTERS)
            )
        else:
            yield chunk
