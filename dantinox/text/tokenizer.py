"""`Tokenizer`: text to token ids and back, from a `tokenizer.json`."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer as Core

from dantinox.files import UserError, first_line, read_json, read_text
from dantinox.text.detokenizer import Detokenizer, TableDetokenizer, WindowDetokenizer
from dantinox.text.token_pieces import TokenPieces, build_token_pieces, byte_letters, core_vocab_size

MAX_FILE_BYTES = 128 << 20
TOKENIZER_CONFIG = "tokenizer_config.json"
ROLES = ("bos_token", "eos_token", "pad_token")
# Names of the special tokens in the wild, ours first; looked up among the special tokens of a file only.
EOS_NAMES = ("<eos>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "[EOS]", "[SEP]")
BOS_NAMES = ("<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "[CLS]")
PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")
SEARCH_LIMIT = 1 << 16  # characters that are searched for special tokens before they are encoded
# What a special token is called inside the encoder, so that no text spells it: corpora hold no NUL.
SPECIAL_PREFIX = "\0special\0"

Kind = Literal["char", "byte", "bpe", "other"]


class UnknownCharacter(UserError):
    """A character that a vocabulary of characters does not hold, at `position` (in characters) of the text."""

    def __init__(self, character: str, position: int) -> None:
        self.character, self.position = character, position
        super().__init__(
            f"the character {character!r} (U+{ord(character):04X}) at position {position} of the text is not in the "
            "vocabulary; tokenizer.byte_fallback: true, or another tokenizer.tokenizer_type, can spell it"
        )


class Tokenizer:
    """A vocabulary and its rules.

    Attributes:
      kind: char, byte, byte-level bpe as we train it, or other: any tokenizer.json.
      vocab_size: one more than the largest id; special tokens count.
      pad_id, bos_id, eos_id: ids of the special tokens, None where the vocabulary has none.
      stop_ids: ids that end a text, the end token and others like it.
      add_bos: whether the model wants the begin token before every prompt.
      special_tokens, special_ids: every special token by its name; text never encodes to one, and decoding skips them.

    Example:
      >>> tokenizer = dantinox.Tokenizer.load("runs/quickstart/tokenizer.json")
      >>> ids = tokenizer.encode("def ")
      >>> tokenizer.decode(ids)
      'def '
    """

    def __init__(self, content: str, name: str = "the tokenizer", roles: Mapping[str, Any] | None = None) -> None:
        """Builds a tokenizer from the text of a tokenizer.json.

        Args:
          roles: what a `tokenizer_config.json` says of its tokens; what it leaves out goes by the tokens' names.

        Raises:
          UserError: the text is not a tokenizer; `name` says which.
        """
        self._content, self._name = content, name
        self.core = _load_core(content, name)
        tree = json.loads(self.core.to_str())  # complete with the keys that older files leave out
        specials = {token["content"]: token["id"] for token in tree["added_tokens"] if token["special"]}
        self.special_tokens: dict[str, int] = specials
        self.special_ids = frozenset(specials.values())
        self.eos_id, self.bos_id, self.pad_id = (
            next((specials[n] for n in names if n in specials), None) for names in (EOS_NAMES, BOS_NAMES, PAD_NAMES)
        )
        self.vocab_size = core_vocab_size(self.core)
        self.roles = dict(roles or {})
        for role in ROLES:
            if role in self.roles:
                setattr(self, role.replace("token", "id"), self.token_to_id(self.roles[role]))
        stops = [self.token_to_id(token) for token in self.roles.get("stop_tokens", [])]
        self.stop_ids = tuple(dict.fromkeys(i for i in (stops or [self.eos_id]) if i is not None))
        self.add_bos = self.roles.get("add_bos_token") is True and self.bos_id is not None
        self._decoder: dict[str, Any] | None = tree["decoder"]
        self._has_normalizer = tree["normalizer"] is not None
        self.kind: Kind = _classify(tree, len(self.special_ids))
        if self.kind == "char":
            self._table, self._byte_base = _character_table(tree["model"]["vocab"])

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads a tokenizer.json, and the tokenizer_config.json beside it where there is one.

        Raises:
          UserError: it cannot be read, or is no tokenizer.
        """
        content, config = read_text(path, MAX_FILE_BYTES, "the tokenizer file"), Path(path).with_name(TOKENIZER_CONFIG)
        return cls(content, str(path), read_json(config, MAX_FILE_BYTES) if config.is_file() else None)

    def token_to_id(self, token: Any) -> int | None:
        """The id of a token by its name, or by the object in which transformers keeps it; None where there is no such token."""
        token = token.get("content") if isinstance(token, dict) else token
        return self.core.token_to_id(token) if isinstance(token, str) else None

    def to_json(self) -> str:
        """The text of its tokenizer.json, unchanged since it was read."""
        return self._content

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of its file."""
        return hashlib.sha256(self._content.encode()).hexdigest()

    @cached_property
    def token_pieces(self) -> TokenPieces | None:
        """The bytes each id spells, or None for a decoder that looks at neighbouring tokens."""
        return build_token_pieces(self.core, self._decoder, self.special_ids)

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of a text; nothing is added, and the names of special tokens are ordinary text unless `parse_special`.

        Raises:
          UserError: a character that the vocabulary cannot spell.
        """
        parsed = parse_special and any(name in text for name in self.special_tokens)
        if parsed:
            return self.encode_special_ids(text)
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def encode_array(self, text: str) -> np.ndarray:
        """Token ids of a text, int32 of shape [number of tokens]; see `encode`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode_array` of several texts; vocabularies that merge run on all cores."""
        if self.kind == "char":
            return [self._encode_characters(text) for text in texts]
        spelled = [_bytes(text) for text in texts]
        if self.kind == "byte":
            return [np.frombuffer(data, np.uint8).astype(np.int32) for data in spelled]
        try:
            encodings = self._encoder_for(texts).encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # a bare one, for instance for a word without an <unk> to stand for it
            raise UserError(f"the tokenizer cannot encode the text: {error}") from None
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_specials(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a text in which the names of special tokens, unless escaped by `escape_special_tokens`, become those tokens.

        Returns:
          Token ids, int32 [N], and the places in the text at which what they spell ends, int64 [N]. What is between special
          tokens is encoded as the tokenizer's own library does it, all NULs taken out.
        """
        parts: list[str] = []
        origins, ends, at = [np.zeros(0, np.int64)], [], 0  # of each character that is encoded, of each special token
        for number, part in enumerate(self._special_pattern.split(text)):
            codes = np.frombuffer(_bytes(part, "utf-32-le"), "<u4")
            if number % 2:
                parts.append(SPECIAL_PREFIX + part)
                origins.append(np.concatenate([np.full(len(SPECIAL_PREFIX), at), at + np.arange(len(part))]))
                ends.append(at + len(part))
            else:
                parts.append(part.replace("\0", ""))
                origins.append(at + np.flatnonzero(codes))
                if self.kind == "char":
                    self._encode_characters(parts[-1])  # which knows what it cannot spell
            at += len(part)
        encoding = self._encoder.encode("".join(parts), add_special_tokens=False)
        ids_N, origin = np.array(encoding.ids, np.int32), np.concatenate(origins)
        ends_N = np.array([origin[end - 1] + 1 if end else 0 for _, end in encoding.offsets], np.int64)
        special_N = np.isin(ids_N, list(self.special_ids))
        if np.count_nonzero(special_N) == len(ends):  # the library counts the space that some take along
            ends_N[special_N] = ends
        return ids_N, ends_N

    def encode_special_ids(self, text: str) -> list[int]:
        """The ids of `encode_specials`; the first call is faster where no ordinary text spells a special token."""
        parts = self._special_pattern.split(text)
        parts[::2] = [part.replace("\0", "") for part in parts[::2]]
        joined = "".join(parts)
        if self._encoder_for(parts[::2]) is not self.core or self._special_pattern.split(joined) != parts:
            return self.encode_specials(text)[0].tolist()
        for part in parts[::2] if self.kind == "char" else ():
            self._encode_characters(part)  # raises for what it cannot spell
        return list(self.core.encode(joined, add_special_tokens=False).ids)

    def escape_special_tokens(self, text: str) -> str:
        """The text with a NUL inside all that spells a special token, so that it is ordinary text for `encode_specials`.

        Raises:
          UserError: the text holds a NUL, or a special token of a single character.
        """
        if "\0" in text:
            raise UserError(f"a text holds U+0000 at character {text.index(chr(0))}, which is not text")
        names = [re.escape(name) for name in self.special_tokens if len(name) > 1]
        if short := next((name for name in self.special_tokens if len(name) == 1 and name in text), None):
            raise UserError(f"a text holds {short!r}, which is a special token of this vocabulary")
        return re.sub(f"(?={'|'.join(names)})(.)", "\\1\0", text, flags=re.DOTALL) if names else text

    @cached_property
    def template_variables(self) -> dict[str, str]:
        """The names of begin, end and padding token, as chat templates call them."""
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        return {key: self.core.id_to_token(index) or "" for key, index in ids.items() if index is not None}

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        """One of the special tokens; of those that begin at a character the longest."""
        longest = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest)) or '(?!)'})")

    def _encoder_for(self, texts: Sequence[str]) -> Core:
        """`core` for short texts in which it finds no special token; `_encoder`, which takes longer to build, for others."""
        built = "_encoder" in self.__dict__
        if (
            built
            or self._has_normalizer
            or sum(map(len, texts)) > SEARCH_LIMIT
            or any(map(self._special_pattern.search, texts))
        ):
            return self._encoder
        return self.core

    @cached_property
    def _encoder(self) -> Core:
        return _encoder(json.loads(self.core.to_str()), self._name)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids: special tokens are skipped, bytes that are not UTF-8 become U+FFFD.

        Vocabularies that spell single bytes replace what is not UTF-8 byte by byte as Python does, so that a text streamed in
        parts is the same text.
        """
        stream = self.detokenizer()
        return stream.push(ids) + stream.flush()

    def token_text(self, token: int, errors: str = "replace") -> str:
        """The text of one token inside of a text, where some vocabularies keep a space that they drop at its beginning.

        `errors` is that of `bytes.decode`. Ids outside the vocabulary spell nothing.
        """
        if not 0 <= token < self.vocab_size:
            return ""
        return self.decode([token]) if self.token_pieces is None else self.token_pieces.inner[token].decode("utf-8", errors)

    def detokenizer(self) -> Detokenizer:
        """Decodes the ids of a text as they come."""
        pieces = self.token_pieces
        return WindowDetokenizer(self.core, self.special_ids) if pieces is None else TableDetokenizer(pieces)

    def _encode_characters(self, text: str) -> np.ndarray:
        codes = np.frombuffer(_bytes(text, "utf-32-le"), "<u4")
        ids = self._table[np.minimum(codes, len(self._table) - 1)]
        unknown = ids < 0
        if not unknown.any():
            return ids
        if self._byte_base is None:
            position = int(unknown.argmax())
            raise UnknownCharacter(text[position], position)
        data = codes[unknown].tobytes().decode("utf-32-le").encode()
        widths = np.where(unknown, 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF), 1)
        fallen = np.repeat(unknown, widths)
        out = np.empty(len(fallen), np.int32)
        out[fallen] = self._byte_base + np.frombuffer(data, np.uint8).astype(np.int32)
        out[~fallen] = ids[~unknown]
        return out


def _load_core(content: str, name: str) -> Core:
    try:
        core = Core.from_str(content)
        # A file may truncate or pad what it encodes: text would be lost without a message.
        core.no_truncation()
        core.no_padding()
        return core
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library's own panics do not derive from Exception
        raise UserError(f"{name} is not a tokenizer.json: {first_line(error)}") from None


def _classify(tree: dict[str, Any], specials: int) -> Kind:
    """Which kind a tokenizer.json describes, by what its rules do and not by a label."""
    model, splitter, decoder = tree["model"], tree["pre_tokenizer"], tree["decoder"]
    if model["type"] != "BPE" or tree["normalizer"] is not None or len(tree["added_tokens"]) != specials:
        return "other"
    if any(model[key] for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")):
        return "other"
    vocab: dict[str, int] = model["vocab"]
    if splitter is None and not model["merges"] and decoder is not None:
        several = [token for token in vocab if len(token) != 1]
        spelled = [f"<0x{byte:02X}>" for byte in range(256)] if model["byte_fallback"] else []
        in_order = [vocab.get(token, -1) - vocab.get("<0x00>", 0) for token in spelled] == list(range(len(spelled)))
        return "char" if sorted(several) == sorted(spelled) and in_order else "other"
    if splitter is None or splitter["type"] != "ByteLevel" or splitter["add_prefix_space"]:
        return "other"
    if decoder is None or decoder["type"] != "ByteLevel":
        return "other"
    letters = byte_letters()
    if not model["merges"] and vocab == {letter: byte for byte, letter in enumerate(letters)}:
        return "byte"
    return "bpe" if splitter["use_regex"] and vocab.keys() >= set(letters) else "other"


def _character_table(vocab: dict[str, int]) -> tuple[np.ndarray, int | None]:
    """Ids by code point (-1: unknown, and always so in the last place), and the id of byte 0 if there is byte fallback."""
    letters = {ord(token): index for token, index in vocab.items() if len(token) == 1}
    table = np.full(max(letters, default=0) + 2, -1, np.int32)
    table[list(letters)] = list(letters.values())
    return table, vocab.get("<0x00>")


def _encoder(tree: dict[str, Any], name: str) -> Core:
    """A copy of the tokenizer in which the special tokens have names that no text spells, under the same ids."""
    names = {token["content"]: SPECIAL_PREFIX + token["content"] for token in tree["added_tokens"] if token["special"]}
    model, vocab = dict(tree["model"]), tree["model"]["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): index for token, index in vocab.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    added = [token | {"content": names.get(token["content"], token["content"])} for token in tree["added_tokens"]]
    hidden = tree | {"model": model, "added_tokens": added, "post_processor": None, "truncation": None, "padding": None}
    return _load_core(json.dumps(hidden), name)


def _bytes(text: str, encoding: str = "utf-8") -> bytes:
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as error:
        what = f"U+{ord(text[error.start]):04X} at position {error.start}"
        raise UserError(f"{what} is half of a character (a lone surrogate), which is not text") from None
