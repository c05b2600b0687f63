"""Tables of the bytes that each token id stands for."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

from tokenizers import Tokenizer as Core

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_INDEPENDENT_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class TokenPieces(NamedTuple):
    """Bytes by token id.

    Attributes:
      first: the bytes of a token at the start of a text; they differ from `inner` if the decoder
        drops a leading space there.
      inner: the bytes of a token anywhere else.
    """

    first: Sequence[bytes]
    inner: Sequence[bytes]


class TokenTable(Sequence[bytes]):
    """Bytes by token id, which are computed when they are first read: a short text uses few tokens
    of a large vocabulary.
    """

    def __init__(self, size: int, bytes_of: Callable[[int], bytes]):
        self._bytes_of = bytes_of
        self._known: list[bytes | None] = [None] * size

    def __len__(self) -> int:
        return len(self._known)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        found = self._known[index]
        if found is None:
            index %= len(self._known)
            found = self._known[index] = self._bytes_of(index)
        return found

    def __iter__(self) -> Iterator[bytes]:
        return (self[i] for i in range(len(self)))


def byte_letters() -> list[str]:
    """Returns the visible character that represents each of the 256 bytes in a byte-level
    vocabulary.

    Source: `bytes_to_unicode` of GPT-2 (Radford et al. 2019): printable Latin-1 maps to itself,
    other bytes to U+0100 and above.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = {
        byte: 256 + i for i, byte in enumerate(b for b in range(256) if b not in set(printable))
    }
    return [chr(moved.get(byte, byte)) for byte in range(256)]


def build_token_pieces(
    core: Core, decoder: dict[str, Any] | None, specials: frozenset[int]
) -> TokenPieces | None:
    """Returns the table of a tokenizer, or None if its decoder depends on adjacent tokens.

    Args:
      core: the tokenizer.
      decoder: the `decoder` entry of its tokenizer.json.
      specials: ids of special tokens, which have no text.
    """
    kinds = _independent_step_types(decoder)
    if kinds is None:
        return None

    # The library decodes an added token to its normalized form. `id_to_token` returns this form,
    # but `get_vocab` does not.
    def token_of(index: int) -> str:
        return "" if index in specials else core.id_to_token(index) or ""

    size = core_vocab_size(core)
    if kinds == ["ByteLevel"]:
        values = {letter: byte for byte, letter in enumerate(byte_letters())}
        # Added tokens are plain text: ö means the character, not the byte 0xF6.
        added = core.get_added_tokens_decoder()

        def bytes_of(index: int) -> bytes:
            token = token_of(index)
            return token.encode() if index in added else _letters_to_bytes(token, values)

        table = TokenTable(size, bytes_of)
        return TokenPieces(table, table)
    byte_fallback = "ByteFallback" in kinds

    def bytes_after(before: list[str], index: int) -> bytes:
        token = token_of(index)
        return _decoded_bytes(core, before, token, byte_fallback) if token else b""

    first, inner = (TokenTable(size, partial(bytes_after, before)) for before in ([], ["a"]))
    return TokenPieces(first, inner)


def core_vocab_size(core: Core) -> int:
    """Returns the largest id plus one, which counts unused ids of an imported vocabulary."""
    return max(core.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _independent_step_types(decoder: dict[str, Any] | None) -> list[str] | None:
    """Returns the types of a decoder's steps.

    The result is None if the text of a token, other than the first token, depends on other tokens.
    """
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return kinds
    independent = all(
        step["type"] in _INDEPENDENT_STEPS
        and (
            step["type"] != "Replace"
            or (len(step["pattern"].get("String", "")) == 1 and step["content"] != "")
        )
        and (step["type"] != "Strip" or (step["start"] <= 1 and step["stop"] == 0))
        for step in steps
    )
    joined_early = "Fuse" in kinds and {"ByteFallback", "Metaspace"} & set(
        kinds[kinds.index("Fuse") :]
    )
    return kinds if independent and not joined_early else None


def _decoded_bytes(core: Core, before: list[str], token: str, byte_fallback: bool) -> bytes:
    """Returns the bytes that `token` adds to the text of the tokens `before`."""
    byte = BYTE_TOKEN.fullmatch(token) if byte_fallback else None
    if byte and int(byte[1], 16) >= 0x80:
        return bytes([int(byte[1], 16)])
    decode = core.decoder.decode
    return decode([*before, token])[len(decode(before)) :].encode()


def _letters_to_bytes(token: str, values: dict[str, int]) -> bytes:
    try:
        return bytes(values[letter] for letter in token)
    except KeyError:  # plain text, which some vocabularies contain
        return token.encode()
