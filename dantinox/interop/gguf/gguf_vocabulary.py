"""Import and export of tokenizers in GGUF metadata: byte-level BPE and SentencePiece vocabularies.

Three kinds of tokenizer are supported:

* `gpt2` is byte-level BPE. Its metadata are a list of merges, and the name (`pre`) of the rule that
  splits text into words (`pre_tokenizers.py`).
* `llama` is SentencePiece BPE. ▁ stands for a space. Two adjacent pieces are merged if their
  concatenation is a token; the pair whose token has the highest score is merged first. Unknown
  characters become byte tokens.
* `gemma4` has SentencePiece tokens and a list of merges.

Source: llama.cpp, `src/llama-vocab.cpp`.
"""

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Core

from dantinox.files import UserError, escape_name, quote
from dantinox.interop.gguf.pre_tokenizers import (
    ADDS_BOS,
    ALIASES,
    BYTE_LEVEL,
    BYTE_LEVEL_WORDS,
    RULES,
    UNSPLIT_NAMES,
    Rule,
)
from dantinox.text import Tokenizer
from dantinox.text.token_pieces import BYTE_TOKEN, byte_letters
from dantinox.text.tokenizer import parse_core

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # the types of tokens
SPACE = "▁"
REPLACE_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
RESTORE_SPACES = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
KEY_PREFIX = "tokenizer.ggml."
# The supported tokenizer keys. An unknown key is an error, because it could change the tokens.
KNOWN_KEYS = frozenset((
    "model", "pre", "tokens", "token_type", "scores", "merges", "token_type_count",
    "add_space_prefix", "add_bos_token", "add_eos_token", "add_sep_token",
    "remove_extra_whitespaces", "bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id",
    "unknown_token_id", "padding_token_id", "seperator_token_id", "cls_token_id", "mask_token_id",
    "prefix_token_id", "suffix_token_id", "middle_token_id", "fim_pre_token_id",
    "fim_suf_token_id", "fim_mid_token_id", "fim_pad_token_id", "fim_rep_token_id",
    "fim_sep_token_id",
))  # fmt: skip
# These flags must be absent or false.
UNSUPPORTED_FLAGS = ("add_eos_token", "add_sep_token", "remove_extra_whitespaces")
# Names of tokens that always end generation (`special_eog_ids` in llama.cpp's llama-vocab.cpp).
END_TOKENS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<｜end▁of▁sentence｜>",
))  # fmt: skip
ID_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
}
ABSENT_IDS = (-1, 0xFFFFFFFF)  # ids that mean "no token"
SENTENCEPIECE_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}  # defaults


class Vocabulary(NamedTuple):
    """A tokenizer in the form in which `Source` holds it, which documents the fields."""

    tokenizer: str
    tokenizer_config: dict[str, Any]
    chat_template: str | None
    generation_config: dict[str, Any]


def vocabulary_metadata(
    tokenizer: Tokenizer, size: int, chat_template: str | None = None
) -> dict[str, Any]:
    """Returns the metadata of a tokenizer for a model whose embedding has `size` rows.

    Raises:
      UserError: GGUF cannot represent the tokenizer.
    """
    tree = json.loads(Core.from_str(tokenizer.to_json()).to_str())
    if tree["model"]["type"] != "BPE":
        raise UserError(
            f"GGUF cannot represent a tokenizer of the kind {tree['model']['type']}, only"
            " byte-level and SentencePiece BPE"
        )
    if tokenizer.eos_id is None:
        raise UserError(
            "the tokenizer has no EOS token, for which llama.cpp would use another token"
        )
    # The name of each token, and its type if it is not NORMAL. The functions below change both.
    names = {index: name for name, index in tree["model"]["vocab"].items()}
    names |= {token["id"]: token["content"] for token in tree["added_tokens"]}
    kinds = {
        token["id"]: CONTROL if token["special"] else USER_DEFINED for token in tree["added_tokens"]
    }
    decoders = _list_steps(tree["decoder"], "decoders")
    if tokenizer.kind == "char" and not tree["model"]["byte_fallback"]:
        found = _character_metadata_as_bytes(names, kinds)
    elif tokenizer.kind == "char":
        found = _character_metadata(names, kinds)
    elif [step["type"] for step in decoders] == ["ByteLevel"]:
        found = _byte_level_metadata(tree, names)
    else:
        found = _sentencepiece_metadata(tree, names, kinds)
    # If the file had no BOS token, llama.cpp would use a default.
    bos_id = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    ids = {
        "bos_token_id": bos_id,
        "eos_token_id": tokenizer.eos_id,
        "padding_token_id": tokenizer.pad_id,
    }
    # A file can list three stop tokens. llama.cpp recognizes more stop tokens by their names.
    others = [index for index in tokenizer.stop_ids if index != tokenizer.eos_id]
    ids |= dict(zip(("eot_token_id", "eom_token_id"), others, strict=False))
    listed = [names.get(i, f"[PAD{i}]") for i in range(size)]
    if len(set(listed)) != size or max(names) >= size:
        raise UserError(
            f"the tokenizer's {max(names) + 1} tokens do not correspond to the {size} rows of the"
            " model's embeddings"
        )
    if any("\0" in name for name in listed):
        raise UserError("GGUF cannot represent a token with the character U+0000")
    types = [kinds.get(i, NORMAL if i in names else UNUSED) for i in range(size)]
    metadata = {"tokens": listed, "token_type": types} | found
    metadata |= {key: index for key, index in ids.items() if index is not None}
    metadata["add_bos_token"] = tokenizer.add_bos
    if "scores" in metadata:
        metadata["scores"] += [0.0] * (size - len(metadata["scores"]))
    prefixed = {KEY_PREFIX + key: value for key, value in metadata.items()}
    if chat_template is not None:
        prefixed["tokenizer.chat_template"] = chat_template
    return prefixed


def _byte_level_metadata(tree: dict[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """Returns the metadata of byte-level BPE. A vocabulary without merges gets a merge that never
    applies.

    llama.cpp requires at least one merge.
    """
    model = tree["model"]
    steps = _list_steps(tree["pre_tokenizer"], "pretokenizers")
    # If `complete` is true, no text is encoded as <unk>.
    complete = not model["unk_token"] or model["vocab"].keys() >= set(byte_letters())
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if not complete or any(model[key] for key in options):
        raise UserError(
            "GGUF cannot represent this tokenizer: its byte-level BPE has an"
            " option that llama.cpp does not support"
        )
    rules = [
        name
        for name, rule in RULES.items()
        if _matches_rule(rule, steps, tree["normalizer"], model["ignore_merges"])
    ]
    if (
        not model["merges"]
        and [step["type"] for step in steps] == ["ByteLevel"]
        and tree["normalizer"] is None
    ):
        rules = ["gpt-2"]  # the rule has no effect without merges
    if not rules:
        shape = json.dumps(tree["pre_tokenizer"], ensure_ascii=False)
        raise UserError(f"GGUF has no name for the pre-tokenizer {quote(shape)}")
    merges = [" ".join(pair) for pair in model["merges"]]
    return {"model": "gpt2", "pre": rules[0], "merges": merges or [_unused_merge(names)]}


def _matches_rule(
    rule: Rule, steps: list[dict[str, Any]], normalizer: Any, whole_words: bool
) -> bool:
    """Returns whether a tokenizer splits text by this rule.

    Two differences are ignored. `trim_offsets` does not change the tokens. The behavior `Removed`
    with `invert` is equivalent to `Isolated`, because the expressions of the rules match all text.
    """

    def plain(step: Mapping[str, Any]) -> dict[str, Any]:
        changed = {key: value for key, value in step.items() if key != "trim_offsets"}
        if step.get("behavior") == "Removed" and step["invert"]:
            changed |= {"behavior": "Isolated", "invert": False}
        return changed

    same_steps = list(map(plain, rule.steps)) == list(map(plain, steps))
    return same_steps and rule.normalizer == normalizer and rule.whole_words == whole_words


def _character_metadata_as_bytes(names: dict[int, str], kinds: Mapping[int, int]) -> dict[str, Any]:
    """Returns a character vocabulary as the metadata of a byte-level BPE, whose merges build each
    character from its bytes.

    llama.cpp drops characters that are not in the vocabulary.
    """
    letters = byte_letters()
    merges: dict[str, None] = {}
    for index, name in names.items():
        if index not in kinds:
            encoded = "".join(letters[byte] for byte in name.encode())
            names[index] = encoded
            merges |= {f"{encoded[:n]} {encoded[n]}": None for n in range(1, len(encoded))}
    return {"model": "gpt2", "pre": "gpt-2", "merges": list(merges) or [_unused_merge(names)]}


def _unused_merge(names: Mapping[int, str]) -> str:
    """Returns a merge that never applies: the longest token with itself. llama.cpp requires at
    least one merge.
    """
    longest = max(names.values(), key=len)
    return f"{longest} {longest}"


def _character_metadata(names: dict[int, str], kinds: dict[int, int]) -> dict[str, Any]:
    """Returns the metadata of a vocabulary of characters and bytes, represented as SentencePiece
    without merges.
    """
    for index, name in names.items():
        if name == SPACE:
            raise UserError(
                f"GGUF cannot represent a vocabulary of characters and bytes with {SPACE}, which"
                " means a space there"
            )
        if BYTE_TOKEN.fullmatch(name):
            kinds[index] = BYTE
        elif name == " ":
            names[index] = SPACE
    return {
        "model": "llama",
        "pre": "default",
        "scores": [0.0] * (max(names) + 1),
        "add_space_prefix": False,
    }


def _sentencepiece_metadata(
    tree: dict[str, Any], names: dict[int, str], kinds: dict[int, int]
) -> dict[str, Any]:
    """Returns the metadata of SentencePiece BPE, with token scores that determine the order of the
    merges.
    """
    model = tree["model"]
    if (
        not model["byte_fallback"]
        or model["ignore_merges"]
        or model["dropout"]
        or model["continuing_subword_prefix"]
    ):
        raise UserError(
            "GGUF cannot represent this tokenizer: llama.cpp supports only"
            " BPE of bytes or with byte fallback"
        )
    special = {names[index] for index, kind in kinds.items() if kind == CONTROL}
    pieces = {
        name for name in model["vocab"] if name not in special and not BYTE_TOKEN.fullmatch(name)
    }
    order = tokens_by_score([tuple(pair) for pair in model["merges"]], pieces)
    if order is None:
        raise UserError(
            "GGUF cannot represent this tokenizer: no scores of tokens give the order of its merges"
        )
    rank = {token: number for number, token in enumerate(order)}
    kinds |= {index: BYTE for index, name in names.items() if BYTE_TOKEN.fullmatch(name)}
    kinds |= {index: UNKNOWN for index, name in names.items() if name == model["unk_token"]}
    scores = [-float(rank.get(names.get(index, ""), 0)) for index in range(max(names) + 1)]
    found: dict[str, Any] = {
        "model": "llama",
        "pre": "default",
        "scores": scores,
        "add_space_prefix": _adds_space_prefix(tree),
    }
    if unknown := [index for index, kind in kinds.items() if kind == UNKNOWN]:
        found["unknown_token_id"] = unknown[0]
    return found


def tokens_by_score(merges: list[tuple[str, ...]], pieces: set[str]) -> list[str] | None:
    """Returns the merged tokens in merge order, or None if merging by token score is not equivalent
    to these merges.

    Hugging Face sorts the merges that build repetitions of one character by their two halves. Any
    order in which longer repetitions come first gives the same tokens, because repetitions grow
    from the left.
    """
    merged = [token for token, _ in groupby(left + right for left, right in merges)]
    # The tokens that repeat one character.
    runs = {token for token, count in Counter(merged).items() if count > 1}
    order: list[str] = []
    for is_run, block in groupby(merged, key=runs.__contains__):
        tokens = list(block)
        order += sorted(set(tokens), key=len, reverse=True) if is_run else tokens
    if len(order) != len(set(order)) or any(len(set(token)) > 1 for token in runs):
        return None
    # llama.cpp starts from single characters, including characters that are not tokens.
    symbols = pieces.union(*pieces)
    possible = {pair for piece in pieces for pair in _split_pairs(piece, symbols)}
    return order if set(merges) == possible else None


def _split_pairs(piece: str, pieces: Any) -> list[tuple[str, str]]:
    """Returns all ways to split a piece into two pieces of the vocabulary."""
    splits = ((piece[:n], piece[n:]) for n in range(1, len(piece)))
    return [(left, right) for left, right in splits if left in pieces and right in pieces]


def _adds_space_prefix(tree: dict[str, Any]) -> bool:
    """Returns whether a tokenizer adds a space before the text; raises a `UserError` for
    unsupported normalization.
    """
    normalizers = _list_steps(tree["normalizer"], "normalizers")
    splits = _list_steps(tree["pre_tokenizer"], "pretokenizers")
    prepend = {"type": "Prepend", "prepend": SPACE}
    # A split at spaces has no effect, because an earlier step has replaced all spaces.
    no_split = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    if normalizers in ([REPLACE_SPACES], [prepend, REPLACE_SPACES]) and splits in ([], [no_split]):
        return prepend in normalizers
    metaspace = (
        not normalizers
        and [step["type"] for step in splits] == ["Metaspace"]
        and splits[0]["replacement"] == SPACE
    )
    if metaspace and not splits[0].get("split", True):
        return bool(splits[0]["prepend_scheme"] != "never")
    raise UserError("GGUF cannot represent the normalizer or pre-tokenizer of this tokenizer")


def _list_steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """Returns the steps of a `Sequence`, or a single step as a list."""
    if part is None:
        return []
    return part[inner] if part["type"] == "Sequence" else [part]


def read_vocabulary(metadata: Mapping[str, Any], file_name: str) -> Vocabulary:
    """Returns the tokenizer in the metadata of a file.

    Args:
      metadata: the metadata.
      file_name: the name of the file, for messages.

    Raises:
      UserError: the tokenizer is not supported, or the metadata is inconsistent.
    """
    entries = {
        key.removeprefix(KEY_PREFIX): value
        for key, value in metadata.items()
        if key.startswith(KEY_PREFIX)
    }
    for key, value in entries.items():
        if key not in KNOWN_KEYS or (key in UNSUPPORTED_FLAGS and value):
            raise UserError(
                f"{file_name} has {KEY_PREFIX}{escape_name(key)}: {quote(value)},"
                " which is not supported"
            )
    tokens = entries.get("tokens")
    kind = entries.get("model")
    if not tokens or not _is_list_of(str, tokens):
        raise UserError(f"{file_name} has no vocabulary: {KEY_PREFIX}tokens is missing")
    types = entries.get("token_type", [NORMAL] * len(tokens))
    if not _is_list_of(int, types) or len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise UserError(
            f"{file_name} has {len(tokens)} tokens that do not match its"
            " token types, or has a token twice"
        )
    if kind == "gemma4" or (kind == "gpt2" and entries.get("pre") in UNSPLIT_NAMES):
        tree = _unsplit_tree(entries, tokens, types, file_name)
        add_bos = kind == "gemma4"
    elif kind == "gpt2":
        tree = _byte_level_tree(entries, tokens, types, file_name)
        add_bos = entries["pre"] in ADDS_BOS
    elif kind == "llama":
        entries = SENTENCEPIECE_IDS | entries
        tree = _sentencepiece_tree(entries, tokens, types, file_name)
        add_bos = True
    else:
        raise UserError(
            f"{file_name} has a tokenizer of the kind {quote(kind)}, expected gpt2, llama or gemma4"
        )
    ids = _token_ids(entries, tokens, types, file_name)
    # BOS and EOS tokens are special, even if the file gives them another type.
    special = {
        ids[key]
        for key in ("bos_token_id", "eos_token_id", "eot_token_id", "padding_token_id")
        if key in ids
    }
    special |= {index for index, code in enumerate(types) if code in (CONTROL, UNKNOWN)}
    special |= {
        index
        for index, code in enumerate(types)
        if code == USER_DEFINED and tokens[index] in (*END_TOKENS, "</s>")
    }
    added = sorted(special | {index for index, code in enumerate(types) if code == USER_DEFINED})
    flags = {"single_word": False, "lstrip": False, "normalized": False}
    stripping = _tokens_stripping_right(metadata, tokens, added) if kind == "llama" else set()
    tree["added_tokens"] = [
        {"id": i, "content": tokens[i], **flags, "rstrip": i in stripping, "special": i in special}
        for i in added
    ]
    core = _build(tree, tokens, types, file_name)
    config: dict[str, Any] = {
        key: tokens[ids[stored]] for key, stored in ID_KEYS.items() if stored in ids
    }
    config["add_bos_token"] = bool(entries.get("add_bos_token", add_bos))
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise UserError(
            f"{file_name} has tokenizer.chat_template: {quote(template)}, expected a string"
        )
    stops = _stop_ids(ids, tokens, added)
    return Vocabulary(
        tokenizer=core.to_str(pretty=True),
        tokenizer_config=config,
        chat_template=template,
        generation_config={"eos_token_id": stops} if stops else {},
    )


def _token_ids(
    entries: Mapping[str, Any], tokens: list[str], types: list[int], file_name: str
) -> dict[str, int]:
    """Returns the ids of tokens with a role, such as `eos_token_id`."""
    for key in ID_KEYS.values():
        index = entries.get(key)
        if index is not None and (
            type(index) is not int or not (0 <= index < len(tokens) or index in ABSENT_IDS)
        ):
            raise UserError(
                f"{file_name} has {KEY_PREFIX}{key}: {quote(index)}, which is not one of its"
                f" {len(tokens)} tokens"
            )
    ids: dict[str, int] = {}
    for key, index in entries.items():
        if (
            key.endswith("_token_id")
            and type(index) is int
            and 0 <= index < len(tokens)
            and types[index] != UNUSED
        ):
            ids[key] = index
    return ids


def _stop_ids(ids: Mapping[str, int], tokens: list[str], added: list[int]) -> list[int]:
    """Returns the ids of the tokens that end generation."""
    stops = [ids[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if key in ids]
    ends = END_TOKENS
    if "<|return|>" in tokens:  # in the harmony format, <|end|> ends a message, not the response
        ends = ends - {"<|end|>"}
    stops += [index for index in added if tokens[index] in ends]
    return list(dict.fromkeys(stops))


def _tokens_stripping_right(
    metadata: Mapping[str, Any], tokens: list[str], added: Iterable[int]
) -> set[int]:
    """Returns the tokens that remove the white space after them. Only Phi-3 has such tokens;
    llama.cpp detects it by name.
    """
    if metadata.get("general.architecture") != "phi3" and not re.search(
        "phi-?3", str(metadata.get("general.name")).lower()
    ):
        return set()
    return {index for index in added if tokens[index] not in ("<unk>", "<s>", "<|endoftext|>")}


def _build(tree: dict[str, Any], tokens: list[str], types: list[int], file_name: str) -> Core:
    """Builds the tokenizer, and checks that every token keeps its id from the file."""
    vocab = tree["model"]["vocab"]
    added = [token["id"] for token in tree["added_tokens"]]
    outside = [index for index in added if tokens[index] not in vocab]
    # The library can only assign consecutive ids.
    if outside != list(range(len(vocab), len(vocab) + len(outside))):
        vocab |= {tokens[index]: index for index in outside}
    try:
        core = parse_core(json.dumps(tree))
    except ValueError as error:
        raise UserError(f"{file_name} has an inconsistent tokenizer: {error}") from None
    for index, token in enumerate(tokens):
        if types[index] != UNUSED and core.token_to_id(token) not in (index, None):
            raise UserError(
                f"{file_name} has an inconsistent tokenizer: several tokens have the name"
                f" {escape_name(token)}"
            )
    return core


def _is_list_of(kind: type | tuple[type, ...], values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _tokenizer_tree(
    vocab: dict[str, int], merges: list[tuple[str, str]], decoder: Any, **more: Any
) -> dict[str, Any]:
    """Returns a `tokenizer.json` without added tokens; `more` contains further top-level parts, or
    options of the model.
    """
    options: dict[str, Any] = dict.fromkeys(
        ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    )
    options |= dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    parts: dict[str, Any] = {"version": "1.0"}
    parts |= dict.fromkeys(
        ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor")
    )
    parts |= {key: value for key, value in more.items() if key not in options}
    model = options | {key: value for key, value in more.items() if key in options}
    return parts | {
        "decoder": decoder,
        "model": {"type": "BPE", **model, "vocab": vocab, "merges": [list(m) for m in merges]},
    }


def _byte_level_tree(
    entries: dict[str, Any], tokens: list[str], types: list[int], file_name: str
) -> dict[str, Any]:
    """Returns the `tokenizer.json` of byte-level BPE, of a vocabulary of bytes, or of a vocabulary
    of characters.
    """
    rule = RULES.get(ALIASES.get(str(entries.get("pre")), str(entries.get("pre"))))
    if rule is None:
        known = {*RULES, *ALIASES, *UNSPLIT_NAMES}
        similar = difflib.get_close_matches(str(entries.get("pre")), known, 1)
        hint = f"; the most similar is {similar[0]}" if similar else ""
        raise UserError(
            f"{file_name} has tokenizer.ggml.pre: {quote(entries.get('pre'))}, "
            f"expected one of {len(known)} supported names{hint}"
        )
    vocab = {token: index for index, token in enumerate(tokens) if types[index] == NORMAL}
    merges = _read_merges(
        entries, {token for index, token in enumerate(tokens) if types[index] != NORMAL}, file_name
    )
    characters = _decode_characters(vocab)
    if characters is not None:
        return _tokenizer_tree(characters, [], {"type": "Fuse"})
    if not merges and set(vocab) == set(byte_letters()):
        return _tokenizer_tree(
            vocab, [], dict(BYTE_LEVEL_WORDS, add_prefix_space=True), pre_tokenizer=BYTE_LEVEL
        )
    splitter = (
        rule.steps[0]
        if len(rule.steps) == 1
        else {"type": "Sequence", "pretokenizers": list(rule.steps)}
    )
    decoder = dict(BYTE_LEVEL_WORDS, add_prefix_space=True)
    more = {
        "normalizer": rule.normalizer,
        "pre_tokenizer": splitter,
        "ignore_merges": rule.whole_words,
    }
    return _tokenizer_tree(vocab, merges, decoder, **more)


def _read_merges(
    entries: Mapping[str, Any], special: set[str], file_name: str
) -> list[tuple[str, str]]:
    """Returns the merges of a file, without `_unused_merge` and those of special tokens, which
    cannot occur in text.
    """
    if not _is_list_of(str, entries.get("merges", [])):
        raise UserError(f"{file_name} has merges that are not strings")
    tokens = set(entries["tokens"])
    merges = []
    for merge in entries.get("merges", []):
        # The first token may begin with a space. Like llama.cpp, search for the separator from the
        # second character on.
        left, _, right = merge[1:].partition(" ")
        left = merge[:1] + left
        unused = left == right and left + right not in tokens
        if not unused and left not in special and right not in special:
            merges.append((left, right))
    return merges


def _decode_characters(vocab: Mapping[str, int]) -> dict[str, int] | None:
    """Decodes a byte-level vocabulary whose tokens are single characters; returns None if it has
    any other token.
    """
    values = {letter: byte for byte, letter in enumerate(byte_letters())}
    found = {}
    for token, index in vocab.items():
        try:
            character = bytes(values[letter] for letter in token).decode()
        except (KeyError, UnicodeDecodeError):
            return None
        if len(character) != 1:
            return None
        found[character] = index
    return found


def _unsplit_tree(
    entries: dict[str, Any], tokens: list[str], types: list[int], file_name: str
) -> dict[str, Any]:
    """Returns a `tokenizer.json` of SentencePiece tokens with a list of merges. ▁ replaces spaces;
    text is not split.
    """
    vocab = {
        token: index for index, token in enumerate(tokens) if types[index] not in (UNUSED, CONTROL)
    }
    merges = _read_merges(
        entries, {token for index, token in enumerate(tokens) if types[index] != NORMAL}, file_name
    )
    decoder = {
        "type": "Sequence",
        "decoders": [RESTORE_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}],
    }
    unk = _unknown_token(entries, tokens, vocab)
    options = {
        "normalizer": REPLACE_SPACES,
        "unk_token": unk,
        "fuse_unk": True,
        "byte_fallback": True,
    }
    return _tokenizer_tree(vocab, merges, decoder, **options)


def _unknown_token(
    entries: Mapping[str, Any], tokens: list[str], vocab: Mapping[str, int]
) -> str | None:
    """Returns the unknown token, if the vocabulary has one."""
    index = entries.get("unknown_token_id")
    return (
        tokens[index]
        if type(index) is int and 0 <= index < len(tokens) and tokens[index] in vocab
        else None
    )


def _sentencepiece_tree(
    entries: dict[str, Any], tokens: list[str], types: list[int], file_name: str
) -> dict[str, Any]:
    """Returns the `tokenizer.json` of SentencePiece BPE, or of a vocabulary of characters and
    bytes.
    """
    scores = entries.get("scores")
    prefix = entries.get("add_space_prefix", True)
    if (
        not isinstance(scores, list)
        or not _is_list_of((int, float), scores)
        or len(scores) != len(tokens)
    ):
        raise UserError(f"{file_name} must have a score for each of its {len(tokens)} tokens")
    vocab = {
        token: index for index, token in enumerate(tokens) if types[index] not in (UNUSED, CONTROL)
    }
    normal = {
        token: index for token, index in vocab.items() if types[index] in (NORMAL, USER_DEFINED)
    }
    fall_back = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if not prefix and all(len(token) == 1 for token in normal):
        plain = {" " if token == SPACE else token: index for token, index in vocab.items()}
        return _tokenizer_tree(
            plain, [], {"type": "Sequence", "decoders": fall_back}, byte_fallback=True
        )
    # Tokens of several spaces have equal scores, so llama.cpp merges spaces from the left. Here,
    # merges of longer tokens come first, which gives the same tokens.
    order = sorted(normal, key=lambda token: (-scores[vocab[token]], -len(token), vocab[token]))
    merges = [pair for token in order for pair in _split_pairs(token, normal)]
    normalizer: dict[str, Any] = REPLACE_SPACES
    decoders = [RESTORE_SPACES, *fall_back]
    if prefix:  # a space before the text, which decoding removes
        normalizer = {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": SPACE}, REPLACE_SPACES],
        }
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unk = _unknown_token(entries, tokens, vocab)
    decoder = {"type": "Sequence", "decoders": decoders}
    more = {"normalizer": normalizer, "unk_token": unk, "fuse_unk": True, "byte_fallback": True}
    return _tokenizer_tree(vocab, merges, decoder, **more)
