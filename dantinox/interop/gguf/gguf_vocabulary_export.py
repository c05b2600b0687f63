"""Exports tokenizers to GGUF metadata, of the kinds that `gguf_vocabulary` imports."""

import json
from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer as Core

from dantinox.files import UserError, quote
from dantinox.interop.gguf.gguf_vocabulary import (
    BYTE,
    CONTROL,
    KEY_PREFIX,
    NORMAL,
    REPLACE_SPACES,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    split_pairs,
)
from dantinox.interop.gguf.pre_tokenizers import RULES, Rule
from dantinox.text import Tokenizer
from dantinox.text.token_pieces import BYTE_TOKEN, byte_letters


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
    possible = {pair for piece in pieces for pair in split_pairs(piece, symbols)}
    return order if set(merges) == possible else None


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
