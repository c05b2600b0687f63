"""Tokenizers in GGUF metadata: import and export of byte-level BPE and SentencePiece vocabularies.

Three kinds of tokenizer are read. `gpt2` is byte-level BPE: a list of merges, and a name (`pre`) for the rule that splits text
into words (`pre_tokenizers.py`). `llama` is SentencePiece's BPE: the space is ▁, neighbours that together are a token are
merged, best score first, and what remains is spelled by byte tokens. `gemma4` has SentencePiece's pieces and a list of merges.
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

from dantinox.files import UserError, escape_name, first_line, quote
from dantinox.interop.pre_tokenizers import ALIASES, BEGIN_BY_NAME, BYTES, RULES, UNSPLIT, WORDS, Rule
from dantinox.text import Tokenizer
from dantinox.text.token_pieces import BYTE_TOKEN, byte_letters

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"
KEY = "tokenizer.ggml."
# What a file may say of a tokenizer; what else it says could matter.
KNOWN = {
    *("model", "pre", "tokens", "token_type", "scores", "merges", "token_type_count", "add_space_prefix", "add_bos_token"),
    *("add_eos_token", "add_sep_token", "remove_extra_whitespaces"),
    *(f"{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "cls", "mask")),
    *(f"{name}_token_id" for name in ("prefix", "suffix", "middle", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep")),
    "fim_sep_token_id",
}
# Tokens that end a text by their name, whatever the file says of them (`special_eog_ids` in llama.cpp's llama-vocab.cpp).
END_NAMES = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>",
    "<turn|>", "<｜end▁of▁sentence｜>",
))  # fmt: skip
IDS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id"}
NO_TOKEN = (-1, 0xFFFFFFFF)  # ids that stand for none
SPM_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}  # where the file gives none


class Vocabulary(NamedTuple):
    """A tokenizer as a `Source` has it."""

    tokenizer: str
    tokenizer_config: dict[str, Any]
    chat_template: str | None
    generation_config: dict[str, Any]


def to_metadata(tokenizer: Tokenizer, size: int, chat_template: str | None = None) -> dict[str, Any]:
    """The metadata of a vocabulary for a model with `size` rows of embeddings.

    Raises:
      UserError: GGUF cannot say what this tokenizer does.
    """
    tree = json.loads(Core.from_str(tokenizer.to_json()).to_str())
    if tree["model"]["type"] != "BPE":
        raise UserError(
            f"GGUF cannot say a tokenizer of the kind {tree['model']['type']}: it has byte-level and SentencePiece BPE"
        )
    if tokenizer.eos_id is None:
        raise UserError("the tokenizer has no end token, and readers of GGUF would take another one for it")
    kinds = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in tree["added_tokens"]}
    names = {index: name for name, index in tree["model"]["vocab"].items()}
    names |= {token["id"]: token["content"] for token in tree["added_tokens"]}
    decoders = _steps(tree["decoder"], "decoders")
    if tokenizer.kind == "char" and not tree["model"]["byte_fallback"]:
        found = _spelled_characters(names, kinds)
    elif tokenizer.kind == "char":
        found = _characters(names, kinds)
    elif [step["type"] for step in decoders] == ["ByteLevel"]:
        found = _byte_level(tree, names)
    else:
        found = _sentencepiece(tree, names, kinds)
    # Where a file names no begin token, readers have one of their own.
    bos_id = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    ids = {"bos_token_id": bos_id, "eos_token_id": tokenizer.eos_id, "padding_token_id": tokenizer.pad_id}
    # Readers stop at three tokens, and at others by their names.
    others = [index for index in tokenizer.stop_ids if index != tokenizer.eos_id]
    ids |= dict(zip(("eot_token_id", "eom_token_id"), others, strict=False))
    listed = [names.get(i, f"[PAD{i}]") for i in range(size)]
    if len(set(listed)) != size or max(names) >= size:
        raise UserError(
            f"the tokenizer's {max(names) + 1} tokens do not fit the {size} rows of the model's embeddings one by one"
        )
    if any("\0" in name for name in listed):
        raise UserError("GGUF cannot say a token that holds the character U+0000")
    types = [kinds.get(i, NORMAL if i in names else UNUSED) for i in range(size)]
    metadata = {"tokens": listed, "token_type": types} | found | {k: i for k, i in ids.items() if i is not None}
    metadata["add_bos_token"] = tokenizer.add_bos
    if "scores" in metadata:
        metadata["scores"] += [0.0] * (size - len(metadata["scores"]))
    named = {KEY + key: value for key, value in metadata.items()}
    return named if chat_template is None else named | {"tokenizer.chat_template": chat_template}


def _byte_level(tree: dict[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """Byte-level BPE; the merges of one without any name special tokens, which no text holds."""
    model, steps = tree["model"], _steps(tree["pre_tokenizer"], "pretokenizers")
    idle = not model["unk_token"] or model["vocab"].keys() >= set(byte_letters())  # nothing is unknown then
    if not idle or any(model[key] for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")):
        raise UserError("GGUF cannot say this tokenizer: it is BPE of bytes with an option that llama.cpp has not")
    rules = [name for name, rule in RULES.items() if _same(rule, steps, tree["normalizer"], model["ignore_merges"])]
    if not model["merges"] and [step["type"] for step in steps] == ["ByteLevel"] and tree["normalizer"] is None:
        rules = ["gpt-2"]  # without merges no rule changes anything
    if not rules:
        shape = json.dumps(tree["pre_tokenizer"], ensure_ascii=False)
        raise UserError(f"GGUF has no name for the way this tokenizer splits text: {quote(shape)}")
    merges = [" ".join(pair) for pair in model["merges"]]
    return {"model": "gpt2", "pre": rules[0], "merges": merges or [_idle_merge(names)]}


def _same(rule: Rule, steps: list[dict[str, Any]], normalizer: Any, whole_words: bool) -> bool:
    """Whether a tokenizer splits text by this rule.

    `trim_offsets` changes no token, and all text matches the rules: to remove what does not is to keep what does.
    """
    isolated: dict[str, Any] = {"behavior": "Isolated", "invert": False}

    def plain(all_steps: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        whole = [dict(step) | isolated if step.get("behavior") == "Removed" and step["invert"] else step for step in all_steps]
        return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in whole]

    return plain(rule.steps) == plain(steps) and rule.normalizer == normalizer and rule.whole_words == whole_words


def _spelled_characters(names: dict[int, str], kinds: Mapping[int, int]) -> dict[str, Any]:
    """A vocabulary of characters as byte-level BPE: the bytes of a character are merged into it, and no others ever meet.

    Readers drop characters that the vocabulary does not hold.
    """
    letters = byte_letters()
    merges: dict[str, None] = {}
    for index, name in names.items():
        if index not in kinds:
            spelled = [letters[byte] for byte in name.encode()]
            names[index] = "".join(spelled)
            merges |= {f"{''.join(spelled[:n])} {spelled[n]}": None for n in range(1, len(spelled))}
    return {"model": "gpt2", "pre": "gpt-2", "merges": list(merges) or [_idle_merge(names)]}


def _idle_merge(names: Mapping[int, str]) -> str:
    """A merge that never happens, for readers that want one: of two long names, and text begins as single letters."""
    longest = max(names.values(), key=len)
    return f"{longest} {longest}"


def _characters(names: dict[int, str], kinds: dict[int, int]) -> dict[str, Any]:
    """A vocabulary of characters and bytes as SentencePiece's with nothing to merge."""
    for index, name in names.items():
        if name == SPACE:
            raise UserError(f"GGUF cannot say a vocabulary of characters and bytes that holds {SPACE}: it is a space there")
        if BYTE_TOKEN.fullmatch(name):
            kinds[index] = BYTE
        elif name == " ":
            names[index] = SPACE
    return {"model": "llama", "pre": "default", "scores": [0.0] * (max(names) + 1), "add_space_prefix": False}


def _sentencepiece(tree: dict[str, Any], names: dict[int, str], kinds: dict[int, int]) -> dict[str, Any]:
    model = tree["model"]
    if not model["byte_fallback"] or model["ignore_merges"] or model["dropout"] or model["continuing_subword_prefix"]:
        raise UserError("GGUF cannot say this tokenizer: llama.cpp's BPE is of bytes, or falls back to bytes")
    special = {names[index] for index, kind in kinds.items() if kind == CONTROL}
    pieces = {name for name in model["vocab"] if name not in special and not BYTE_TOKEN.fullmatch(name)}
    order = order_of_merges([tuple(pair) for pair in model["merges"]], pieces)
    if order is None:
        raise UserError("GGUF cannot say this tokenizer: its merges do not follow from one score for each token")
    rank = {token: number for number, token in enumerate(order)}
    kinds |= {index: BYTE for index, name in names.items() if BYTE_TOKEN.fullmatch(name)}
    kinds |= {index: UNKNOWN for index, name in names.items() if name == model["unk_token"]}
    scores = [-float(rank.get(names.get(index, ""), 0)) for index in range(max(names) + 1)]
    found: dict[str, Any] = {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": _prefixed(tree)}
    unknown = [index for index, kind in kinds.items() if kind == UNKNOWN]
    return found | ({"unknown_token_id": unknown[0]} if unknown else {})


def order_of_merges(merges: list[tuple[str, ...]], pieces: set[str]) -> list[str] | None:
    """The tokens that merges make, best first, if a reader that merges whatever has a token does as these merges say.

    Runs of one character, which Hugging Face sorts by their halves, grow from the left in any order that has longer ones first.
    """
    made = [token for token, _ in groupby(left + right for left, right in merges)]
    runs = {token for token, count in Counter(made).items() if count > 1}
    order: list[str] = []
    for tied, block in groupby(made, key=runs.__contains__):
        tokens = list(block)
        order += sorted(set(tokens), key=len, reverse=True) if tied else tokens
    if len(order) != len(set(order)) or any(len(set(token)) > 1 for token in runs):
        return None
    # A reader begins with characters, whether or not they are tokens.
    symbols = pieces.union(*pieces)
    return order if set(merges) == {pair for piece in pieces for pair in _halves(piece, symbols)} else None


def _halves(piece: str, pieces: Any) -> list[tuple[str, str]]:
    cuts = ((piece[:n], piece[n:]) for n in range(1, len(piece)))
    return [(left, right) for left, right in cuts if left in pieces and right in pieces]


def _prefixed(tree: dict[str, Any]) -> bool:
    """Whether a text begins with a space of the tokenizer's own; raises where it changes text in another way."""
    normal, split = _steps(tree["normalizer"], "normalizers"), _steps(tree["pre_tokenizer"], "pretokenizers")
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    # No space is left for it to split at.
    idle = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    if normal in ([replace], [prepend, replace]) and split in ([], [idle]):
        return prepend in normal
    spaces = not normal and [step["type"] for step in split] == ["Metaspace"] and split[0]["replacement"] == SPACE
    if spaces and not split[0].get("split", True):
        return bool(split[0]["prepend_scheme"] != "never")
    raise UserError("GGUF cannot say how this tokenizer changes text before it cuts it up")


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    return [] if part is None else part[inner] if part["type"] == "Sequence" else [part]


def from_metadata(metadata: Mapping[str, Any], name: str) -> Vocabulary:
    """The tokenizer that the metadata of a file describes; `name` is the file's, for messages.

    Raises:
      UserError: it is of a kind that is not known, or the metadata contradicts itself.
    """
    given = {key.removeprefix(KEY): value for key, value in metadata.items() if key.startswith(KEY)}
    for key, value in given.items():
        if key not in KNOWN or (key in ("add_eos_token", "add_sep_token", "remove_extra_whitespaces") and value):
            raise UserError(f"{name} says {KEY}{escape_name(key)} of its tokenizer, which is not known here: {quote(value)}")
    tokens, kind = given.get("tokens"), given.get("model")
    if not tokens or not _list_of(str, tokens):
        raise UserError(f"{name} holds no vocabulary: {KEY}tokens is missing")
    types = given.get("token_type", [NORMAL] * len(tokens))
    if not _list_of(int, types) or len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise UserError(f"{name} has {len(tokens)} tokens which its token types do not fit, or the same one twice")
    if kind == "gemma4" or (kind == "gpt2" and given.get("pre") in UNSPLIT):
        tree = _unsplit_tree(given, tokens, types, name)
        add_bos = kind == "gemma4"
    elif kind == "gpt2":
        tree = _byte_level_tree(given, tokens, types, name)
        add_bos = given["pre"] in BEGIN_BY_NAME
    elif kind == "llama":
        given = SPM_IDS | given
        tree = _sentencepiece_tree(given, tokens, types, name)
        add_bos = True
    else:
        raise UserError(f"{name} has a tokenizer of the kind {quote(kind)}; gpt2, llama and gemma4 are supported")
    ids = {
        key: index
        for key, index in given.items()
        if key.endswith("_token_id") and type(index) is int and 0 <= index < len(tokens) and types[index] != UNUSED
    }
    for key in IDS.values():
        index = given.get(key)
        if index is not None and (type(index) is not int or not (0 <= index < len(tokens) or index in NO_TOKEN)):
            raise UserError(f"{name} says {KEY}{key}: {quote(index)}, which is no token of its {len(tokens)}")
    # Begin and end are special even in files that do not say so.
    special = {ids[key] for key in ("bos_token_id", "eos_token_id", "eot_token_id", "padding_token_id") if key in ids}
    special |= {index for index, code in enumerate(types) if code in (CONTROL, UNKNOWN)}
    special |= {index for index, code in enumerate(types) if code == USER_DEFINED and tokens[index] in (*END_NAMES, "</s>")}
    added = sorted(special | {index for index, code in enumerate(types) if code == USER_DEFINED})
    flags = {"single_word": False, "lstrip": False, "normalized": False}
    swallowing = _swallowing(metadata, tokens, added) if kind == "llama" else set()
    tree["added_tokens"] = [
        {"id": i, "content": tokens[i], **flags, "rstrip": i in swallowing, "special": i in special} for i in added
    ]
    core = _built(tree, tokens, types, name)
    config = {key: tokens[ids[stored]] for key, stored in IDS.items() if stored in ids}
    stops = [ids[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if key in ids]
    ends = END_NAMES - ({"<|end|>"} if "<|return|>" in tokens else set())  # in harmony it ends a message, and not the answer
    stops += [index for index in added if tokens[index] in ends]
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise UserError(f"{name} says tokenizer.chat_template: {quote(template)}, expected a text")
    return Vocabulary(
        core.to_str(pretty=True),
        config | {"add_bos_token": bool(given.get("add_bos_token", add_bos))},
        template,
        {"eos_token_id": list(dict.fromkeys(stops))} if stops else {},
    )


def _swallowing(metadata: Mapping[str, Any], tokens: list[str], added: Iterable[int]) -> set[int]:
    """Tokens that take the white space behind them: those of Phi-3, whose files do not say it (llama.cpp goes by the name)."""
    if metadata.get("general.architecture") != "phi3" and not re.search("phi-?3", str(metadata.get("general.name")).lower()):
        return set()
    return {index for index in added if tokens[index] not in ("<unk>", "<s>", "<|endoftext|>")}


def _built(tree: dict[str, Any], tokens: list[str], types: list[int], name: str) -> Core:
    """The tokenizer, in which every token has the id that the file gives it."""
    vocab, added = tree["model"]["vocab"], [token["id"] for token in tree["added_tokens"]]
    outside = [index for index in added if tokens[index] not in vocab]
    if outside != list(range(len(vocab), len(vocab) + len(outside))):  # the library numbers them so, whatever the file says
        vocab |= {tokens[index]: index for index in outside}
    try:
        core = Core.from_str(json.dumps(tree))
    except Exception as error:  # the library raises bare ones
        raise UserError(f"{name} has a tokenizer that contradicts itself: {first_line(error)}") from None
    wrong = [
        token for index, token in enumerate(tokens) if types[index] != UNUSED and core.token_to_id(token) not in (index, None)
    ]
    if wrong:
        raise UserError(f"{name} has a tokenizer that contradicts itself: {escape_name(wrong[0])} stands for several tokens")
    return core


def _list_of(kind: type | tuple[type, ...], values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _tree(vocab: dict[str, int], merges: list[tuple[str, str]], decoder: Any, **more: Any) -> dict[str, Any]:
    """A tokenizer.json but for its added tokens; `more` are its parts, or options of its model."""
    options: dict[str, Any] = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    options |= dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    parts: dict[str, Any] = {"version": "1.0"}
    parts |= dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    parts |= {key: value for key, value in more.items() if key not in options}
    model = options | {key: value for key, value in more.items() if key in options}
    return parts | {"decoder": decoder, "model": {"type": "BPE", **model, "vocab": vocab, "merges": [list(m) for m in merges]}}


def _byte_level_tree(given: dict[str, Any], tokens: list[str], types: list[int], name: str) -> dict[str, Any]:
    rule = RULES.get(ALIASES.get(str(given.get("pre")), str(given.get("pre"))))
    if rule is None:
        known = {*RULES, *ALIASES, *UNSPLIT}
        near = difflib.get_close_matches(str(given.get("pre")), known, 1)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise UserError(
            f"{name} has tokenizer.ggml.pre: {quote(given.get('pre'))}, expected one of the {len(known)} ways to split text "
            f"into words that are known here{hint}"
        )
    vocab = {token: index for index, token in enumerate(tokens) if types[index] == NORMAL}
    merges = _merges(given, {token for index, token in enumerate(tokens) if types[index] != NORMAL}, name)
    characters = _as_characters(vocab)
    if characters is not None:
        return _tree(characters, [], {"type": "Fuse"})
    if not merges and set(vocab) == set(byte_letters()):
        return _tree(vocab, [], dict(WORDS, add_prefix_space=True), pre_tokenizer=BYTES)
    splitter = rule.steps[0] if len(rule.steps) == 1 else {"type": "Sequence", "pretokenizers": list(rule.steps)}
    decoder = dict(WORDS, add_prefix_space=True)
    more = {"normalizer": rule.normalizer, "pre_tokenizer": splitter, "ignore_merges": rule.whole_words}
    return _tree(vocab, merges, decoder, **more)


def _merges(given: Mapping[str, Any], special: set[str], name: str) -> list[tuple[str, str]]:
    """The merges of a file, without those of special tokens, which no text holds."""
    if not _list_of(str, given.get("merges", [])):
        raise UserError(f"{name} has merges that are no texts")
    # The first character may be the space: llama.cpp looks for the one after it.
    pairs = [(merge[:1] + left, right) for merge in given.get("merges", []) for left, _, right in [merge[1:].partition(" ")]]
    return [pair for pair in pairs if not special & set(pair)]


def _as_characters(vocab: Mapping[str, int]) -> dict[str, int] | None:
    """A byte-level vocabulary of whole characters, each as itself; None where a token is anything else."""
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


def _unsplit_tree(given: dict[str, Any], tokens: list[str], types: list[int], name: str) -> dict[str, Any]:
    """SentencePiece's pieces with a list of merges: the whole text is one word, and its spaces are ▁."""
    vocab = {token: index for index, token in enumerate(tokens) if types[index] not in (UNUSED, CONTROL)}
    merges = _merges(given, {token for index, token in enumerate(tokens) if types[index] != NORMAL}, name)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoder = {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    unk = _unknown_token(given, tokens, vocab)
    return _tree(vocab, merges, decoder, normalizer=replace, unk_token=unk, fuse_unk=True, byte_fallback=True)


def _unknown_token(given: Mapping[str, Any], tokens: list[str], vocab: Mapping[str, int]) -> str | None:
    index = given.get("unknown_token_id")
    return tokens[index] if type(index) is int and 0 <= index < len(tokens) and tokens[index] in vocab else None


def _sentencepiece_tree(given: dict[str, Any], tokens: list[str], types: list[int], name: str) -> dict[str, Any]:
    scores, prefix = given.get("scores"), given.get("add_space_prefix", True)
    if not isinstance(scores, list) or not _list_of((int, float), scores) or len(scores) != len(tokens):
        raise UserError(f"{name} must have a score for each of its {len(tokens)} tokens")
    vocab = {token: index for index, token in enumerate(tokens) if types[index] not in (UNUSED, CONTROL)}
    normal = {token: index for token, index in vocab.items() if types[index] in (NORMAL, USER_DEFINED)}
    fall_back = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if not prefix and all(len(token) == 1 for token in normal):
        plain = {" " if token == SPACE else token: index for token, index in vocab.items()}
        return _tree(plain, [], {"type": "Sequence", "decoders": fall_back}, byte_fallback=True)
    # Of tokens with one score, which runs of spaces have, a longer one grows first, as it does for who begins at the left.
    order = sorted(normal, key=lambda token: (-scores[vocab[token]], -len(token), vocab[token]))
    merges = [pair for token in order for pair in _halves(token, normal)]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    normal_form = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, replace]} if prefix else replace
    unk = _unknown_token(given, tokens, vocab)
    decoder = {"type": "Sequence", "decoders": [spaces, *fall_back, *strip]}
    more = {"normalizer": normal_form, "unk_token": unk, "fuse_unk": True, "byte_fallback": True}
    return _tree(vocab, merges, decoder, **more)
