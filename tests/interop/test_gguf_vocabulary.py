"""Tokenizers are converted to GGUF metadata and back, and compared with a reader written from the
format's description.
"""

import json
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, trainers

from dantinox.config import TokenizerSection, UserError
from dantinox.interop.gguf.gguf_vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    read_vocabulary,
)
from dantinox.interop.gguf.gguf_vocabulary_export import vocabulary_metadata
from dantinox.interop.gguf.pre_tokenizers import ADDS_BOS, ALIASES, RULES
from dantinox.text import Tokenizer
from dantinox.text.token_pieces import byte_letters
from dantinox.text.tokenizer_training import train_tokenizer
from tests.error_texts import ERRORS

KEY = "tokenizer.ggml."
TEXT = (
    "Nel mezzo del cammin di nostra vita\nmi ritrovai per una selva oscura,\r\nché la diritta via…"
    " era  smarrita — 12.345 €!\n" * 3
)
OURS = [
    TokenizerSection(tokenizer_type="char"),
    TokenizerSection(tokenizer_type="char", byte_fallback=True),
    TokenizerSection(tokenizer_type="byte"),
    TokenizerSection(tokenizer_type="bpe", vocab_size=300),
]
LETTERS = byte_letters()


def byte_level(metadata, text):
    """Reference encoder of `gpt2` for one word: byte letters are merged in the order of the merges,
    the leftmost pair first.
    """
    ranks = {merge: rank for rank, merge in reversed(list(enumerate(metadata[KEY + "merges"])))}
    parts = [LETTERS[byte] for byte in text.encode()]
    while True:
        found = [(ranks.get(f"{a} {b}", len(ranks)), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, i = min(found, default=(len(ranks), 0))
        if rank == len(ranks):
            ids = {token: index for index, token in enumerate(metadata[KEY + "tokens"])}
            return [ids[part] for part in parts if part in ids]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def sentencepiece(metadata, text):
    """Reference encoder of `llama`: adjacent pieces are merged by the score of their token, and
    other pieces become bytes.
    """
    tokens, scores, kinds = (metadata[KEY + name] for name in ("tokens", "scores", "token_type"))
    ids = {token: index for index, token in enumerate(tokens)}
    parts = list((" " * metadata[KEY + "add_space_prefix"] + text).replace(" ", "▁"))
    while True:
        found = [
            (-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids
        ]
        if not found:
            break
        i = min(found)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    assert all(kinds[ids[f"<0x{byte:02X}>"]] == BYTE for byte in range(256))
    spelled = [
        [ids[p]] if p in ids else [ids[f"<0x{byte:02X}>"] for byte in p.encode()] for p in parts
    ]
    return [index for ids_of_part in spelled for index in ids_of_part]


@pytest.mark.parametrize("settings", OURS, ids=lambda s: f"{s.tokenizer_type}{s.byte_fallback}")
def test_trained_tokenizer_roundtrips_exactly(settings):
    tokenizer = train_tokenizer(settings, lambda: iter([TEXT]))
    metadata = vocabulary_metadata(tokenizer, tokenizer.vocab_size + 2, "{{ x }}")
    assert metadata[KEY + "token_type"][-5:] == [CONTROL] * 3 + [UNUSED] * 2
    back = read_vocabulary(metadata, "it")
    assert back.tokenizer == tokenizer.to_json()
    assert back.tokenizer_config == {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "add_bos_token": True,
    }
    assert (back.generation_config, back.chat_template) == (
        {"eos_token_id": [tokenizer.eos_id]},
        "{{ x }}",
    )


@pytest.mark.parametrize("settings", OURS[:3], ids=lambda s: f"{s.tokenizer_type}{s.byte_fallback}")
def test_reference_reader_gives_equal_tokens_for_characters_and_bytes(settings):
    tokenizer = train_tokenizer(settings, lambda: iter([TEXT]))
    metadata = vocabulary_metadata(tokenizer, tokenizer.vocab_size)
    text = (
        TEXT
        if settings.tokenizer_type == "char" and not settings.byte_fallback
        else TEXT + "日本 \0\x7f🙂"
    )
    reader = {"gpt2": byte_level, "llama": sentencepiece}[metadata[KEY + "model"]]
    assert reader(metadata, text) == tokenizer.encode(text)


def test_reference_reader_gives_equal_tokens_for_bpe():
    tokenizer = train_tokenizer(OURS[3], lambda: iter([TEXT]))
    metadata = vocabulary_metadata(tokenizer, 300)
    for word in ("mezzo", " cammin", " ché", "12", " —"):
        assert byte_level(metadata, word) == tokenizer.encode(word)
    assert metadata[KEY + "pre"] == "gpt-2"


def trained(rule, size=330):
    """Trains a byte-level BPE that splits text by a rule of the table."""
    core = Core(models.BPE(ignore_merges=rule.whole_words))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=size, show_progress=False, initial_alphabet=LETTERS)
    )
    tree = json.loads(core.to_str())
    tree |= {
        "normalizer": rule.normalizer,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
    }
    tree["decoder"]["use_regex"] = True
    tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": list(rule.steps)}
    core = Core.from_str(json.dumps(tree))
    core.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(
        core.to_str(),
        roles={"add_bos_token": rule in [RULES[name] for name in ADDS_BOS & RULES.keys()]},
    )


def test_vocabulary_without_merges_roundtrips():
    """llama.cpp requires a merge, so the file has one that never applies."""
    vocab = {letter: index for index, letter in enumerate([*byte_letters(), "a_long_token"])}
    core = Core(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer, core.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    core.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(core.to_str())
    metadata = vocabulary_metadata(tokenizer, tokenizer.vocab_size)
    assert metadata[KEY + "merges"] == ["a_long_token a_long_token"]
    again = Tokenizer(read_vocabulary(metadata, "it").tokenizer)
    assert again.encode(TEXT) == tokenizer.encode(TEXT)


@pytest.mark.parametrize("name", RULES)
def test_every_pre_tokenizer_rule_roundtrips_by_name(name):
    tokenizer = trained(RULES[name])
    metadata = vocabulary_metadata(tokenizer, tokenizer.vocab_size)
    assert metadata[KEY + "pre"] == name
    assert metadata[KEY + "add_bos_token"] == (name in ADDS_BOS)
    back = Tokenizer(read_vocabulary(metadata, "it").tokenizer)
    assert back.encode(TEXT) == tokenizer.encode(TEXT)
    del metadata[KEY + "add_bos_token"]
    assert read_vocabulary(metadata, "it").tokenizer_config["add_bos_token"] == (name in ADDS_BOS)


def test_equivalent_spellings_of_a_rule_are_recognized():
    tree = json.loads(trained(RULES["dbrx"]).to_json())
    split = tree["pre_tokenizer"]["pretokenizers"][0]
    split |= {"behavior": "Removed", "invert": True}
    tree["pre_tokenizer"]["pretokenizers"][1]["trim_offsets"] = False
    tree["model"]["unk_token"] = "</s>"
    again = Tokenizer(json.dumps(tree))
    assert again.encode(TEXT) == trained(RULES["dbrx"]).encode(TEXT)
    assert vocabulary_metadata(again, again.vocab_size)[KEY + "pre"] == "dbrx"


def spm(prefix=True):
    """Returns the metadata of a SentencePiece vocabulary: pieces of words, with scores like those
    of its trainer.
    """
    rng = np.random.default_rng(2)
    words = [f"▁{word}" for word in TEXT.replace("\n", " ").replace("\r", " ").split()]
    pieces = {
        word[a:b]
        for word in words
        for a in range(len(word))
        for b in range(a + 2, min(a + 5, len(word)) + 1)
    }
    pieces = sorted(pieces)[::2]
    single = sorted({char for piece in pieces for char in piece} | {"▁"})
    runs = ["▁" * size for size in (2, 4, 3, 5)]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *pieces,
        *runs,
        *single,
    ]
    kinds = [
        UNKNOWN,
        CONTROL,
        CONTROL,
        *[BYTE] * 256,
        *[NORMAL] * (len(pieces) + len(runs) + len(single)),
    ]
    scores = (
        [0.0] * 259
        + [-float(n) for n in rng.permutation(len(pieces))]
        + [-1e4] * (len(runs) + len(single))
    )
    named = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": kinds,
        "add_space_prefix": prefix,
    }
    return {KEY + key: value for key, value in named.items()}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_equals_the_reference_reader_in_both_directions(prefix):
    metadata = spm(prefix)
    back = read_vocabulary(metadata, "it")
    tokenizer = Tokenizer(back.tokenizer)
    again = vocabulary_metadata(tokenizer, tokenizer.vocab_size)
    assert again[KEY + "add_space_prefix"] == prefix
    assert again[KEY + "token_type"] == metadata[KEY + "token_type"]
    # Hugging Face sorts the merges of tokens with equal scores by their halves.
    tree = json.loads(back.tokenizer)
    tree["model"]["merges"].sort(
        key=lambda pair: [-len(part) for part in pair] if set("".join(pair)) == {"▁"} else [-99, 0]
    )
    sorted_merges = Tokenizer(json.dumps(tree), roles={"add_bos_token": True})
    assert sorted_merges.to_json() != tokenizer.to_json()
    assert (
        vocabulary_metadata(sorted_merges, sorted_merges.vocab_size)[KEY + "scores"]
        == again[KEY + "scores"]
    )
    for text in (
        TEXT,
        "via  nostra",
        "日本",
        "x",
        "▁mezzo",
        *(" " * n + "via" + " " * n for n in range(3, 13)),
    ):
        expected = sentencepiece(metadata, text)
        assert sorted_merges.encode(text) == expected
        assert tokenizer.encode(text) == expected
        assert sentencepiece(again, text) == expected
        assert text == "▁mezzo" or tokenizer.decode(expected) == text
    assert back.tokenizer_config == {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}


def test_user_defined_tokens_are_matched_before_merges():
    metadata = spm()
    index = metadata[KEY + "tokens"].index("▁▁▁▁")
    metadata[KEY + "token_type"][index] = USER_DEFINED
    metadata[KEY + "tokens"][index] = "<think>"
    tokenizer = Tokenizer(read_vocabulary(metadata, "it").tokenizer)
    assert index in tokenizer.encode("via <think> nostra")
    assert index not in tokenizer.special_ids
    again = vocabulary_metadata(tokenizer, tokenizer.vocab_size)
    assert again[KEY + "token_type"] == metadata[KEY + "token_type"]
    assert again[KEY + "tokens"] == metadata[KEY + "tokens"]


@pytest.mark.parametrize("name", ALIASES)
def test_alias_of_a_rule_gives_the_same_tokenizer(name):
    back = read_vocabulary(broken(pre=name), "it")
    assert back.tokenizer == read_vocabulary(broken(pre=ALIASES[name]), "it").tokenizer


def test_all_stop_tokens_roundtrip():
    names = ["<bos>", "<pad>"]
    tokenizer = train_tokenizer(OURS[2], lambda: iter([]))
    tokenizer = Tokenizer(
        tokenizer.to_json(), roles={"stop_tokens": ["<eos>", *names], "add_bos_token": True}
    )
    back = read_vocabulary(vocabulary_metadata(tokenizer, 259), "it")
    assert back.generation_config == {"eos_token_id": [258, 257, 256]}
    assert back.tokenizer_config["add_bos_token"] is True


def test_without_a_begin_token_the_end_token_is_written():
    tree = json.loads(train_tokenizer(OURS[1], lambda: iter([TEXT])).to_json())
    tree["added_tokens"] = [token for token in tree["added_tokens"] if token["content"] != "<bos>"]
    for token in tree["added_tokens"]:
        token["id"] -= token["content"] == "<eos>"
    tokenizer = Tokenizer(json.dumps(tree))
    metadata = vocabulary_metadata(tokenizer, tokenizer.vocab_size)
    assert metadata[KEY + "bos_token_id"] == metadata[KEY + "eos_token_id"] == tokenizer.eos_id
    back = Tokenizer(read_vocabulary(metadata, "it").tokenizer)
    assert back.special_ids == tokenizer.special_ids
    assert back.encode(TEXT) == tokenizer.encode(TEXT)


def broken(**changes):
    metadata = vocabulary_metadata(train_tokenizer(OURS[3], lambda: iter([TEXT])), 300)
    changed = metadata | {KEY + key: value for key, value in changes.items()}
    return {key: value for key, value in changed.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pre": "jina-v7"},
            (
                "tokenizer.ggml.pre: 'jina-v7', expected one of 82 supported names; the most"
                " similar is jina-es$"
            ),
        ),
        ({"pre": None}, "tokenizer.ggml.pre: null"),
        ({"model": "rwkv"}, "of the kind 'rwkv', expected gpt2, llama or gemma4"),
        ({"tokens": None}, "has no vocabulary"),
        ({"tokens": ["a", "a"]}, "300 tokens|2 tokens"),
        ({"token_type": [1]}, "that do not match its token types"),
        ({"add_eos_token": True}, "tokenizer.ggml.add_eos_token: true, which is not supported"),
        ({"precompiled_charsmap": [1]}, "precompiled_charsmap"),
        ({"merges": ["no such"]}, "inconsistent tokenizer"),
    ],
)
def test_unsupported_vocabulary_is_an_error(changes, message):
    with pytest.raises(UserError, match=message):
        read_vocabulary(broken(**changes), "it")


def test_tokenizer_that_gguf_cannot_represent_is_rejected():
    byte = train_tokenizer(OURS[2], lambda: iter([]))
    with pytest.raises(UserError, match=ERRORS["259_tokens_do_not_correspond"]):
        vocabulary_metadata(byte, 100)
    with pytest.raises(UserError, match=ERRORS["with_which_means_a_space"]):
        vocabulary_metadata(train_tokenizer(OURS[1], lambda: iter(["a▁ b"])), 400)
    tree = json.loads(byte.to_json())
    tree["added_tokens"] = []
    with pytest.raises(UserError, match=ERRORS["has_no_eos_token"]):
        vocabulary_metadata(Tokenizer(json.dumps(tree)), 259)
    core = Core(models.WordLevel({"a": 0}, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(["</s>"])
    with pytest.raises(UserError, match=ERRORS["a_tokenizer_of_the_kind"]):
        vocabulary_metadata(Tokenizer(core.to_str()), 2)
    odd = trained(RULES["gpt-2"])
    tree = json.loads(odd.to_json())
    tree["pre_tokenizer"] = {"type": "Punctuation", "behavior": "Isolated"}
    with pytest.raises(UserError, match=ERRORS["no_name_for_the_pre"]):
        vocabulary_metadata(Tokenizer(json.dumps(tree)), odd.vocab_size)
    tree = json.loads(read_vocabulary(spm(), "it").tokenizer)
    tree["model"]["merges"] = tree["model"]["merges"][:-1]
    with pytest.raises(UserError, match=ERRORS["no_scores_of_tokens_give"]):
        vocabulary_metadata(Tokenizer(json.dumps(tree)), 2000)
    core = Core(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["</s>"])
    with pytest.raises(UserError, match=ERRORS["llama_cpp_supports_only_bpe"]):
        vocabulary_metadata(Tokenizer(core.to_str()), 4)


@pytest.mark.parametrize("metadata", [broken(), spm()], ids=["gpt2", "llama"])
def test_whatever_an_entry_holds_is_read_or_one_sentence(metadata):
    for key in [
        *metadata,
        "tokenizer.chat_template",
        KEY + "merges",
        KEY + "eos_token_id",
        KEY + "unknown_token_id",
    ]:
        for value in (
            "x",
            "",
            0,
            3,
            -1,
            1 << 40,
            1.5,
            True,
            [],
            ["x"],
            [7],
            [[1]],
            [1.5] * 300,
            [9] * 300,
            ["▁"] * 300,
        ):
            try:
                read_vocabulary(metadata | {key: value}, "it")
            except UserError as error:
                assert "\n" not in str(error)
