"""The bytes that each token id stands for."""

import re
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Core

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_LOCAL = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class TokenPieces(NamedTuple):
    """Bytes by token id; decoders that drop a leading space spell the `first` token of a text differently."""

    first: list[bytes]
    inner: list[bytes]


def byte_letters() -> list[str]:
    """The visible character that stands for each of the 256 byte values in a byte-level vocabulary.

    Source: `bytes_to_unicode` of GPT-2 (Radford et al. 2019): printable Latin-1 stands for itself, the rest for U+0100 and on.
    """
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = {byte: 256 + i for i, byte in enumerate(b for b in range(256) if b not in set(kept))}
    return [chr(moved.get(byte, byte)) for byte in range(256)]


def build_token_pieces(core: Core, decoder: dict[str, Any] | None, specials: frozenset[int]) -> TokenPieces | None:
    """The table of a tokenizer, or None when its decoder joins tokens in a way that no table can tell.

    Args:
      decoder: the `decoder` entry of its tokenizer.json.
      specials: ids that spell nothing.
    """
    kinds = _kinds(decoder)
    if kinds is None:
        return None
    # Not get_vocab: the library decodes an added token in the form its normalizer gave it.
    tokens = [None if index in specials else core.id_to_token(index) for index in range(core_vocab_size(core))]
    if kinds == ["ByteLevel"]:
        values = {letter: byte for byte, letter in enumerate(byte_letters())}
        # Added tokens are plain text: ö is the character, and not the byte 0xF6.
        added = core.get_added_tokens_decoder()
        table = [
            b"" if not token else token.encode() if index in added else _from_letters(token, values)
            for index, token in enumerate(tokens)
        ]
        return TokenPieces(table, table)
    raw = "ByteFallback" in kinds
    first = [_decoded_bytes(core, [], token, raw) if token else b"" for token in tokens]
    inner = [_decoded_bytes(core, ["a"], token, raw) if token else b"" for token in tokens]
    return TokenPieces(first, inner)


def core_vocab_size(core: Core) -> int:
    """One more than the largest id, so that holes in a foreign vocabulary are counted."""
    return max(core.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _kinds(decoder: dict[str, Any] | None) -> list[str] | None:
    """The steps of a decoder that treats every token but the first alike whatever surrounds it, else None."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return kinds
    alike = all(
        step["type"] in _LOCAL
        and (step["type"] != "Replace" or (len(step["pattern"].get("String", "")) == 1 and step["content"] != ""))
        and (step["type"] != "Strip" or (step["start"] <= 1 and step["stop"] == 0))
        for step in steps
    )
    joined_early = "Fuse" in kinds and {"ByteFallback", "Metaspace"} & set(kinds[kinds.index("Fuse") :])
    return kinds if alike and not joined_early else None


def _decoded_bytes(core: Core, before: list[str], token: str, raw: bool) -> bytes:
    """What `token` adds to the text after the tokens `before`."""
    byte = BYTE_TOKEN.fullmatch(token) if raw else None
    if byte and int(byte[1], 16) >= 0x80:
        return bytes([int(byte[1], 16)])
    decode = core.decoder.decode
    return decode([*before, token])[len(decode(before)) :].encode()


def _from_letters(token: str, values: dict[str, int]) -> bytes:
    try:
        return bytes(values[letter] for letter in token)
    except KeyError:  # plain text, which some vocabularies hold
        return token.encode()
