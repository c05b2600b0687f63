"""Tests fill-in-the-middle prompts: the documented format of each family, written out."""

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Core

from dantinox.config import UserError
from dantinox.text import Tokenizer
from dantinox.text.fill_in_middle import fim_end_ids, fim_format, fim_ids
from tests.error_texts import ERRORS

LETTERS = "abcdefgh():\n "


def make_tokenizer(*names):
    """A tokenizer of single characters with these special tokens."""
    core = Core(models.BPE({letter: number for number, letter in enumerate(LETTERS)}, []))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(name, special=True) for name in ("<|endoftext|>", *names)])
    return Tokenizer(core.to_str())


def spell(tokenizer, ids):
    return "".join(tokenizer.core.id_to_token(token) for token in ids)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        # The names and the order of the model cards.
        (
            "<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|fim_pad|>",
            "<|fim_prefix|>ab <|fim_suffix|>\ncd<|fim_middle|>",
        ),
        (
            "<fim_prefix> <fim_middle> <fim_suffix> <fim_pad>",
            "<fim_prefix>ab <fim_suffix>\ncd<fim_middle>",
        ),
        ("<fim-prefix> <fim-middle> <fim-suffix>", "<fim-prefix>ab <fim-suffix>\ncd<fim-middle>"),
        ("▁<PRE> ▁<MID> ▁<SUF> ▁<EOT>", "▁<PRE>ab ▁<SUF>\ncd▁<MID>"),
        ("<PRE> <MID> <SUF> <EOT>", "<PRE>ab <SUF>\ncd<MID>"),
        (
            "<｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜>",
            "<｜fim▁begin｜>ab <｜fim▁hole｜>\ncd<｜fim▁end｜>",
        ),
        ("<|fim_begin|> <|fim_hole|> <|fim_end|>", "<|fim_begin|>ab <|fim_hole|>\ncd<|fim_end|>"),
        (
            "<|code_prefix|> <|code_middle|> <|code_suffix|>",
            "<|code_prefix|>ab <|code_suffix|>\ncd<|code_middle|>",
        ),
        ("[PREFIX] [MIDDLE] [SUFFIX]", "[SUFFIX]\ncd[PREFIX]ab "),
        (
            "<[fim-prefix]> <[fim-suffix]> <[fim-middle]>",
            "<[fim-suffix]>\ncd<[fim-prefix]>ab <[fim-middle]>",
        ),
    ],
)
def test_the_format_of_each_family(names, expected):
    tokenizer = make_tokenizer(*names.split())
    assert spell(tokenizer, fim_ids(tokenizer, "ab ", "\ncd")) == expected
    assert fim_ids(tokenizer, tokenizer.encode("ab "), "\ncd") == fim_ids(tokenizer, "ab ", "\ncd")
    used = {tokenizer.special_tokens[name] for name in names.split() if name != "[MIDDLE]"}
    assert fim_end_ids(tokenizer) == used


def test_special_names_in_the_texts_stay_text():
    tokenizer = make_tokenizer("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    core = tokenizer.core
    core.add_tokens(["<", "|", "f", "i", "m", "_", "l", ">"])
    tokenizer = Tokenizer(core.to_str())
    ids = fim_ids(tokenizer, "<|fim_middle|>", "a")
    assert ids.count(tokenizer.special_tokens["<|fim_middle|>"]) == 1


def test_the_suffix_of_codellama_has_no_space_in_front():
    """A SentencePiece vocabulary adds ▁ before the prefix, but the suffix continues a text."""
    letters = {
        letter: number
        for number, letter in enumerate(["▁", "<0xE2>", "<0x98>", "<0xBA>", "<unk>", *"abcd"])
    }
    core = Core(models.BPE(letters, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    core.add_special_tokens(["<s>", "</s>", "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"])
    tokenizer = Tokenizer(core.to_str())
    assert spell(tokenizer, fim_ids(tokenizer, "ab", "cd a")) == "▁<PRE>▁ab▁<SUF>cd▁a▁<MID>"


def test_other_vocabularies_have_no_format():
    for tokenizer in (make_tokenizer(), make_tokenizer("<fim_prefix>", "<fim_suffix>")):
        assert fim_format(tokenizer) is None and fim_end_ids(tokenizer) == frozenset()
        with pytest.raises(UserError, match=ERRORS["fill_in_the_middle"]):
            fim_ids(tokenizer, "a", "b")
