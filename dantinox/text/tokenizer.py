"""`Tokenizer`: converts text to token ids and back, from a `tokenizer.json`."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer as Core

from dantinox.files import UserError, first_line, quote, read_json, read_text
from dantinox.text.detokenizer import Detokenizer, TableDetokenizer, WindowDetokenizer
from dantinox.text.token_pieces import (
    TokenPieces,
    build_token_pieces,
    byte_letters,
    core_vocab_size,
)

MAX_FILE_BYTES = 128 << 20
TOKENIZER_CONFIG = "tokenizer_config.json"
ROLES = ("bos_token", "eos_token", "pad_token")
# Common names of special tokens, our own first. Only the special tokens of a file are compared with
# them.
EOS_NAMES = (
    "<eos>",
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "[EOS]",
    "[SEP]",
)
BOS_NAMES = ("<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "[CLS]")
PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")
# Only texts of up to this many characters are searched for special token names before encoding.
SEARCH_LIMIT = 1 << 16
# The encoder gives special token names this prefix. Corpora contain no NUL, so no text contains a
# prefixed name.
SPECIAL_PREFIX = "\0special\0"

Kind = Literal["char", "byte", "bpe", "other"]


class UnknownCharacter(UserError):
    """A character is not in a character vocabulary; `position` is its index in the text, in
    characters.
    """

    def __init__(self, character: str, position: int) -> None:
        self.character = character
        self.position = position
        super().__init__(
            f"the character {character!r} (U+{ord(character):04X}) at position {position} of the"
            " text is not in the vocabulary: set tokenizer.byte_fallback to true, or use another"
            " tokenizer.tokenizer_type"
        )


class Tokenizer:
    """A tokenizer.

    Attributes:
      kind: `char`, `byte`, `bpe` (byte-level, as trained by this package), or `other` for any other
        tokenizer.json.
      vocab_size: the largest id plus one, including special tokens.
      pad_id, bos_id, eos_id: ids of the special tokens; None if the vocabulary has no such token.
      stop_ids: ids that end a text: the EOS token and similar tokens.
      add_bos: whether a text begins with the BOS token, in training, in evaluation and as a prompt:
        as `add_bos_token` of the tokenizer_config.json says, else as the post-processor of the
        tokenizer.json does. Without both, it is True.
      dropout: the probability with which encoding for training skips a merge of BPE at random;
        None: never.
      special_tokens, special_ids: the ids of all special tokens, as a dict by name and as a set. By
        default, encoding a text never gives a special token. Decoding skips special tokens.

    Example:
      >>> tokenizer = dantinox.Tokenizer.load("runs/quickstart/tokenizer.json")
      >>> ids = tokenizer.encode("def ")
      >>> tokenizer.decode(ids)
      'def '
    """

    def __init__(
        self, content: str, name: str = "the tokenizer", roles: Mapping[str, Any] | None = None
    ) -> None:
        """Builds a tokenizer from the text of a tokenizer.json.

        Args:
          content: the JSON text.
          name: the name of the tokenizer in error messages.
          roles: the content of a `tokenizer_config.json`. BOS, EOS and padding tokens that it lacks
            are recognized by name.

        Raises:
          UserError: the text is not a tokenizer.
        """
        self._content = content
        self._name = name
        self.core = _load_core(content, name)
        self.dropout = getattr(self.core.model, "dropout", None)
        if self.dropout is not None:  # the library would apply it in every encoding
            self.core.model.dropout = None
        tree = json.loads(self.core.to_str())  # includes keys that older files omit
        specials = {
            token["content"]: token["id"] for token in tree["added_tokens"] if token["special"]
        }
        self.special_tokens: dict[str, int] = specials
        self.special_ids = frozenset(specials.values())
        self.eos_id = _first_of(EOS_NAMES, specials)
        self.bos_id = _first_of(BOS_NAMES, specials)
        self.pad_id = _first_of(PAD_NAMES, specials)
        self.vocab_size = core_vocab_size(self.core)
        self.roles = dict(roles or {})
        for role in ROLES:
            if role in self.roles:
                setattr(self, role.replace("token", "id"), self.token_to_id(self.roles[role]))
        stop_tokens = self.roles.get("stop_tokens") or []
        if not isinstance(stop_tokens, list):
            raise UserError(
                f"{TOKENIZER_CONFIG} of {name}: stop_tokens must be a list, got"
                f" {quote(stop_tokens)}"
            )
        stops = [self.token_to_id(token) for token in stop_tokens]
        self.stop_ids = tuple(dict.fromkeys(i for i in stops or [self.eos_id] if i is not None))
        add_bos = self.roles.get("add_bos_token")
        if not isinstance(add_bos, bool):
            has_post_processor = self.core.num_special_tokens_to_add(False) > 0
            add_bos = not has_post_processor or self.core.encode("a").ids[:1] == [self.bos_id]
        self.add_bos = add_bos and self.bos_id is not None
        self._decoder: dict[str, Any] | None = tree["decoder"]
        self._has_normalizer = tree["normalizer"] is not None
        self.kind: Kind = _classify(tree, len(self.special_ids))
        if self.kind == "char":
            self._table, self._byte_base = _character_table(tree["model"]["vocab"])

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads a tokenizer.json, and a tokenizer_config.json in the same folder if it exists.

        Raises:
          UserError: a file cannot be read, or is not a tokenizer.
        """
        content = read_text(path, MAX_FILE_BYTES, "the tokenizer file")
        config = Path(path).with_name(TOKENIZER_CONFIG)
        return cls(
            content, str(path), read_json(config, MAX_FILE_BYTES) if config.is_file() else None
        )

    def token_to_id(self, token: Any) -> int | None:
        """Returns the id of a token, given its name or its Transformers object (a dict with
        `content`), or None.
        """
        token = token.get("content") if isinstance(token, dict) else token
        return self.core.token_to_id(token) if isinstance(token, str) else None

    def to_json(self) -> str:
        """Returns the text of the tokenizer.json, exactly as it was read."""
        return self._content

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 (hex) of the tokenizer.json."""
        return hashlib.sha256(self._content.encode()).hexdigest()

    @cached_property
    def token_pieces(self) -> TokenPieces | None:
        """The bytes that each id stands for, or None if the decoder depends on adjacent tokens."""
        return build_token_pieces(self.core, self._decoder, self.special_ids)

    @property
    def ids_before_text(self) -> tuple[int, ...]:
        """The tokens before a text, in training, in evaluation and as a prompt: the BOS token if
        `add_bos` is true.
        """
        return (self.bos_id,) if self.add_bos and self.bos_id is not None else ()

    @property
    def ids_after_document(self) -> tuple[int, ...]:
        """The tokens after a document in training: the EOS token, if the vocabulary has one."""
        return () if self.eos_id is None else (self.eos_id,)

    @cached_property
    def _byte_counts_V(self) -> np.ndarray | None:
        pieces = self.token_pieces
        return None if pieces is None else np.array([len(piece) for piece in pieces.inner])

    def count_bytes(self, ids_N: np.ndarray) -> int:
        """Returns the number of UTF-8 bytes that tokens in the middle of a text decode to. Special
        tokens have none.
        """
        if self._byte_counts_V is None:
            return len(self.decode(ids_N.tolist()).encode())
        return int(self._byte_counts_V[ids_N].sum())

    @cached_property
    def ids_after_text(self) -> tuple[int, ...]:
        """The tokens that the post-processor of the tokenizer.json adds after a text, such as the
        EOS token.
        """
        if self.core.num_special_tokens_to_add(False) == 0:
            return ()
        encoding = self.core.encode("a", add_special_tokens=True)
        after = encoding.special_tokens_mask[::-1].index(0)
        return tuple(encoding.ids[len(encoding.ids) - after :])

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Returns the token ids of a text. No special tokens are added.

        Args:
          text: the text.
          parse_special: whether to encode special token names in the text as special tokens. False:
            as ordinary text.

        Raises:
          UserError: the vocabulary cannot represent a character.
        """
        if parse_special and any(name in text for name in self.special_tokens):
            return self.encode_special_ids(text)
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def encode_array(self, text: str) -> np.ndarray:
        """Returns the token ids of a text, int32 [number of tokens]; see `encode`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], *, dropout: bool = False) -> list[np.ndarray]:
        """Returns `encode_array` of several texts. BPE and similar vocabularies use all cores.

        Args:
          dropout: encode at random, if the tokenizer has a `dropout`.
        """
        if self.kind == "char":
            return [self._encode_characters(text) for text in texts]
        encoded = [_to_bytes(text) for text in texts]
        if self.kind == "byte":
            ids = np.frombuffer(b"".join(encoded), np.uint8).astype(np.int32)
            ends = itertools.accumulate(map(len, encoded), initial=0)
            return [ids[start:end] for start, end in itertools.pairwise(ends)]
        try:
            encoder = (
                self._dropout_encoder if dropout and self.dropout else self._encoder_for(texts)
            )
            encodings = encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        # The library raises a plain Exception, for example for an unknown word without <unk>.
        except Exception as error:
            raise UserError(f"the tokenizer cannot encode the text: {error}") from None
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_specials(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a text. The names of special tokens become these tokens, unless
        `escape_special_tokens` has escaped them.

        NULs in the text are removed. Ordinary text gives the same ids as in the tokenizers library.

        Returns:
          Token ids, int32 [N], and the end of each token's text as a position in `text`, int64 [N].
        """
        return self.encode_specials_batch([text])[0]

    def encode_specials_batch(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns `encode_specials` of several texts."""
        split = [self._special_pattern.split(text) for text in texts]
        joined = []
        for parts in split:
            plain = [part.replace("\0", "") for part in parts[::2]]
            for part in plain if self.kind == "char" else ():
                self._encode_characters(part)  # raises for unknown characters
            named = [SPECIAL_PREFIX + name for name in parts[1::2]]
            joined.append(
                "".join(itertools.chain.from_iterable(zip(plain, [*named, ""], strict=True)))
            )
        sizes = [len(_to_bytes(text)) for text in joined]
        lengths_V = self._source_bytes_V
        encode = (
            self._encoder.encode_batch if lengths_V is None else self._encoder.encode_batch_fast
        )
        encodings = encode(joined, add_special_tokens=False)
        found = [np.array(encoding.ids, np.int32) for encoding in encodings]
        ends: list[np.ndarray | None]
        if lengths_V is None:
            ends = [
                self._ends_by_offset(*item) for item in zip(split, found, encodings, strict=True)
            ]
        else:
            lengths = [lengths_V[ids_N] for ids_N in found]
            ends = [
                self._ends_by_length(*item)
                for item in zip(texts, found, lengths, sizes, strict=True)
            ]
        encode_one = partial(self._encoder.encode, add_special_tokens=False)
        return [
            (
                ids_N,
                self._ends_by_offset(parts, ids_N, encode_one(text)) if ends_N is None else ends_N,
            )
            for parts, text, ids_N, ends_N in zip(split, joined, found, ends, strict=True)
        ]

    def _ends_by_length(
        self, text: str, ids_N: np.ndarray, lengths_N: np.ndarray, size: int
    ) -> np.ndarray | None:
        """Returns the end of each token's text, or None if the tokens do not stand for the bytes of
        the text.

        Args:
          text: the text, in which NULs are no part of a token.
          ids_N, lengths_N: the tokens, and the number of bytes that each stands for.
          size: the number of bytes that were encoded, with the prefix of special token names.
        """
        ends_N = np.cumsum(lengths_N)
        special = len(SPECIAL_PREFIX) * int(np.count_nonzero(self.is_special_V[ids_N]))
        if (ends_N[-1] if len(ends_N) else 0) + special != size:
            return None
        if text.isascii() and "\0" not in text:
            return ends_N
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        widths = np.where(codes > 0, 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF), 0)
        return np.searchsorted(np.cumsum(widths), ends_N) + 1

    def _ends_by_offset(self, parts: Sequence[str], ids_N: np.ndarray, encoding: Any) -> np.ndarray:
        """Returns the end of each token's text from the offsets of the library.

        Args:
          parts: the text; every second part is the name of a special token.
          ids_N, encoding: the tokens, and the result of the library that contains them.
        """
        origins = [np.zeros(0, np.int64)]
        ends = []
        offset = 0  # positions of encoded characters, ends of special tokens
        for number, part in enumerate(parts):
            if number % 2:
                origins.append(
                    np.concatenate(
                        [np.full(len(SPECIAL_PREFIX), offset), offset + np.arange(len(part))]
                    )
                )
                ends.append(offset + len(part))
            else:
                origins.append(
                    offset + np.flatnonzero(np.frombuffer(part.encode("utf-32-le"), "<u4"))
                )
            offset += len(part)
        origin = np.concatenate(origins)
        ends_N = np.array(
            [origin[end - 1] + 1 if end else 0 for _, end in encoding.offsets], np.int64
        )
        special_N = self.is_special_V[ids_N]
        # The library includes the space that some special tokens absorb.
        if np.count_nonzero(special_N) == len(ends):
            ends_N[special_N] = ends
        return ends_N

    @cached_property
    def is_special_V(self) -> np.ndarray:
        """bool [vocab_size], whether each token is a special token."""
        is_special = np.zeros(self.vocab_size, bool)
        is_special[list(self.special_ids)] = True
        return is_special

    @cached_property
    def _source_bytes_V(self) -> np.ndarray | None:
        """The number of bytes of a text that each token stands for; None if that depends on other
        tokens or on a normalizer.
        """
        pieces = self.token_pieces
        if pieces is None or pieces.first is not pieces.inner or self._has_normalizer:
            return None
        lengths_V = np.array([len(piece) for piece in pieces.inner])
        for name, index in self.special_tokens.items():
            lengths_V[index] = len(name.encode())
        return lengths_V

    def encode_special_ids(self, text: str) -> list[int]:
        """Returns the ids of `encode_specials`.

        The first call is faster than that of `encode_specials` if no ordinary text contains a
        special token name.
        """
        parts = self._special_pattern.split(text)
        parts[::2] = [part.replace("\0", "") for part in parts[::2]]
        joined = "".join(parts)
        _to_bytes(joined)  # raises for lone surrogates
        if (
            self._encoder_for(parts[::2]) is not self.core
            or self._special_pattern.split(joined) != parts
        ):
            return self.encode_specials(text)[0].tolist()
        for part in parts[::2] if self.kind == "char" else ():
            self._encode_characters(part)  # raises for unknown characters
        return list(self.core.encode(joined, add_special_tokens=False).ids)

    def escape_special_tokens(self, text: str) -> str:
        """Inserts a NUL into every special token name in a text, so that `encode_specials` treats
        it as ordinary text.

        Raises:
          UserError: the text contains a NUL, or a special token name of a single character.
        """
        if "\0" in text:
            raise UserError(
                f"the text contains U+0000 at character {text.index(chr(0))}, which is not allowed"
            )
        if not self._special_pattern.search(text):  # faster than `_escape_pattern`
            return text
        if short := next(
            (name for name in self.special_tokens if len(name) == 1 and name in text), None
        ):
            raise UserError(
                f"the text contains {short!r}, which is a special token of this vocabulary"
            )
        return self._escape_pattern.sub("\\1\0", text)

    @cached_property
    def _escape_pattern(self) -> re.Pattern[str]:
        """A pattern that matches the first character of every special token name that has
        several.
        """
        names = [re.escape(name) for name in self.special_tokens if len(name) > 1]
        return re.compile(f"(?={'|'.join(names) or '(?!)'})(.)", re.DOTALL)

    @cached_property
    def template_variables(self) -> dict[str, str]:
        """The names of the BOS, EOS and padding tokens, keyed by the variable names of chat
        templates.
        """
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        return {
            key: self.core.id_to_token(index) or ""
            for key, index in ids.items()
            if index is not None
        }

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        """A pattern that matches the longest special token name at a position."""
        longest = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest)) or '(?!)'})")

    def _encoder_for(self, texts: Sequence[str]) -> Core:
        """Returns `core` for short texts without special token names, else `_encoder`, which takes
        longer to build.
        """
        is_built = "_encoder" in self.__dict__  # the value of the cached property
        if (
            is_built
            or self._has_normalizer
            or sum(map(len, texts)) > SEARCH_LIMIT
            or any(map(self._special_pattern.search, texts))
        ):
            return self._encoder
        return self.core

    @cached_property
    def _encoder(self) -> Core:
        return _encoder(json.loads(self.core.to_str()), self._name)

    @cached_property
    def _dropout_encoder(self) -> Core:
        core = _encoder(json.loads(self.core.to_str()), self._name)
        core.model.dropout = self.dropout
        return core

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids. Special tokens are skipped, and invalid UTF-8 becomes
        U+FFFD.

        With single-byte tokens, invalid UTF-8 is replaced as by Python's decoder, so streaming
        gives equal text.
        """
        stream = self.detokenizer()
        return stream.push(ids) + stream.flush()

    def token_text(self, token: int, errors: str = "replace") -> str:
        """Returns the text that one token has in the middle of a text. At the start, some
        vocabularies drop its leading space.

        Args:
          token: the id; an id outside the vocabulary returns "".
          errors: as in `bytes.decode`.
        """
        if not 0 <= token < self.vocab_size:
            return ""
        return (
            self.decode([token])
            if self.token_pieces is None
            else self.token_pieces.inner[token].decode("utf-8", errors)
        )

    def detokenizer(self, visible_ids: frozenset[int] = frozenset()) -> Detokenizer:
        """Returns an incremental decoder for the ids of one text.

        Args:
          visible_ids: special tokens whose names appear in the text.
        """
        pieces = _pieces_with_names(self, visible_ids)
        if pieces is not None:
            return TableDetokenizer(pieces)
        names = {index: name for name, index in self.special_tokens.items() if index in visible_ids}
        return WindowDetokenizer(self.core, self.special_ids, names)

    def _encode_characters(self, text: str) -> np.ndarray:
        codes = np.frombuffer(_to_bytes(text, "utf-32-le"), "<u4")
        ids = self._table[np.minimum(codes, len(self._table) - 1)]
        unknown = ids < 0
        if not unknown.any():
            return ids
        if self._byte_base is None:
            position = int(unknown.argmax())
            raise UnknownCharacter(text[position], position)
        data = codes[unknown].tobytes().decode("utf-32-le").encode()
        widths = np.where(unknown, 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF), 1)
        is_byte = np.repeat(unknown, widths)
        out = np.empty(len(is_byte), np.int32)
        out[is_byte] = self._byte_base + np.frombuffer(data, np.uint8).astype(np.int32)
        out[~is_byte] = ids[~unknown]
        return out


@lru_cache(maxsize=4)
def _pieces_with_names(tokenizer: Tokenizer, visible_ids: frozenset[int]) -> TokenPieces | None:
    """Returns the bytes of every token, in which the visible special tokens have their names."""
    pieces = tokenizer.token_pieces
    if pieces is None or not visible_ids:
        return pieces
    names = {
        index: name.encode()
        for name, index in tokenizer.special_tokens.items()
        if index in visible_ids
    }
    first, inner = (
        [names.get(index, piece) for index, piece in enumerate(table)] for table in pieces
    )
    return TokenPieces(inner if pieces.first is pieces.inner else first, inner)


def _first_of(names: Iterable[str], ids: Mapping[str, int]) -> int | None:
    """Returns the id of the first name that has one."""
    return next((ids[name] for name in names if name in ids), None)


def parse_core(content: str) -> Core:
    """Reads a `tokenizer.json`, without its truncation and padding, which would silently drop text.

    Raises:
      ValueError: it is invalid; the message is the first line of the library's error.
    """
    try:
        core = Core.from_str(content)
        core.no_truncation()
        core.no_padding()
        return core
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # panics of the library do not derive from Exception
        raise ValueError(first_line(error)) from None


def _load_core(content: str, name: str) -> Core:
    try:
        return parse_core(content)
    except ValueError as error:
        raise UserError(f"{name} is not a valid tokenizer.json: {error}") from None


def _classify(tree: dict[str, Any], specials: int) -> Kind:
    """Returns the kind of a tokenizer.json, determined by its rules instead of a label."""
    model = tree["model"]
    splitter = tree["pre_tokenizer"]
    decoder = tree["decoder"]
    if (
        model["type"] != "BPE"
        or tree["normalizer"] is not None
        or len(tree["added_tokens"]) != specials
    ):
        return "other"
    if any(
        model[key]
        for key in (
            "dropout",
            "unk_token",
            "continuing_subword_prefix",
            "end_of_word_suffix",
            "ignore_merges",
        )
    ):
        return "other"
    vocab: dict[str, int] = model["vocab"]
    if splitter is None and not model["merges"] and decoder is not None:
        several = [token for token in vocab if len(token) != 1]
        byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)] if model["byte_fallback"] else []
        in_order = [vocab.get(token, -1) - vocab.get("<0x00>", 0) for token in byte_tokens] == list(
            range(len(byte_tokens))
        )
        return "char" if sorted(several) == sorted(byte_tokens) and in_order else "other"
    if splitter is None or splitter["type"] != "ByteLevel" or splitter["add_prefix_space"]:
        return "other"
    if decoder is None or decoder["type"] != "ByteLevel":
        return "other"
    letters = byte_letters()
    if not model["merges"] and vocab == {letter: byte for byte, letter in enumerate(letters)}:
        return "byte"
    return "bpe" if splitter["use_regex"] and vocab.keys() >= set(letters) else "other"


def _character_table(vocab: dict[str, int]) -> tuple[np.ndarray, int | None]:
    """Returns ids by code point (-1: unknown; the last entry is always -1), and the id of byte 0 if
    there is byte fallback.
    """
    letters = {ord(token): index for token, index in vocab.items() if len(token) == 1}
    table = np.full(max(letters, default=0) + 2, -1, np.int32)
    table[list(letters)] = list(letters.values())
    return table, vocab.get("<0x00>")


def _encoder(tree: dict[str, Any], name: str) -> Core:
    """Returns a copy of the tokenizer in which special tokens have the same ids but names that no
    text contains.
    """
    names = {
        token["content"]: SPECIAL_PREFIX + token["content"]
        for token in tree["added_tokens"]
        if token["special"]
    }
    model = dict(tree["model"])
    vocab = tree["model"]["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): index for token, index in vocab.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    added = [
        token | {"content": names.get(token["content"], token["content"])}
        for token in tree["added_tokens"]
    ]
    hidden = tree | {
        "model": model,
        "added_tokens": added,
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    return _load_core(json.dumps(hidden), name)


def _to_bytes(text: str, encoding: str = "utf-8") -> bytes:
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as error:
        what = f"U+{ord(text[error.start]):04X} at position {error.start}"
        raise UserError(f"{what} is a lone surrogate, which is not valid text") from None
