"""Tokenizers: exact round trips, known ids, special tokens that text cannot produce, and invalid
files.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, normalizers, pre_tokenizers

from dantinox.config import TokenizerSection, UserError
from dantinox.text import Tokenizer, train_tokenizer
from dantinox.text.tokenizer_training import _sample_text, _split_long_words
from tests.error_texts import ERRORS

CORPUS = (
    "Nel mezzo del cammin di nostra vita\r\nmi ritrovai per una selva oscura,\n\n  ché la diritta"
    " via era smarrita. <eos> <pad> <bos> </s>\t<|endoftext|> 🙂👩‍🚀 e\u0301"
    " \x01\x7f\u2028\ufeff\ufffd 1265–1321 don't\n" * 4
)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60)
OWN_TEXT = st.text(st.sampled_from(sorted(set(CORPUS))), max_size=60)


def make(kind: str, **options: object) -> Tokenizer:
    return train_tokenizer(
        TokenizerSection(tokenizer_type=kind, **options), lambda: iter([CORPUS[:40], CORPUS[40:]])
    )


CHAR, FALLBACK, BYTE, BPE = (
    make("char"),
    make("char", byte_fallback=True),
    make("byte"),
    make("bpe", vocab_size=300),
)


@given(OWN_TEXT)
def test_characters_are_numbered_by_code_point(text: str) -> None:
    symbols = sorted(set(CORPUS))
    assert CHAR.encode(text) == [symbols.index(c) for c in text]
    assert CHAR.decode(CHAR.encode(text)) == text


@given(TEXT)
def test_byte_ids_equal_their_values(text: str) -> None:
    assert BYTE.encode(text) == list(text.encode())
    assert BYTE.decode(BYTE.encode(text)) == text


@given(TEXT | OWN_TEXT)
def test_round_trip_of_every_text(text: str) -> None:
    for tokenizer in (BPE, FALLBACK):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert not tokenizer.special_ids & set(tokenizer.encode(text))


@given(TEXT)
def test_byte_fallback_encodes_unknown_characters_as_bytes(text: str) -> None:
    symbols = sorted(set(CORPUS))
    expected = [
        i
        for c in text
        for i in (
            [symbols.index(c)] if c in symbols else [len(symbols) + byte for byte in c.encode()]
        )
    ]
    assert FALLBACK.encode(text) == expected


@pytest.mark.parametrize(
    "tokenizer", [CHAR, FALLBACK, BYTE, BPE], ids=["char", "fallback", "byte", "bpe"]
)
def test_the_tokenizers_library_reads_our_files_equally(tokenizer: Tokenizer) -> None:
    core = Core.from_str(tokenizer.to_json())
    core.encode_special_tokens = True
    assert core.encode(CORPUS, add_special_tokens=False).ids == tokenizer.encode(CORPUS)
    assert core.decode(tokenizer.encode(CORPUS)) == CORPUS


def test_special_tokens_follow_ordinary_tokens() -> None:
    symbols = len(set(CORPUS))
    assert (CHAR.pad_id, CHAR.bos_id, CHAR.eos_id, CHAR.vocab_size) == (
        symbols,
        symbols + 1,
        symbols + 2,
        symbols + 3,
    )
    assert (BYTE.pad_id, BYTE.bos_id, BYTE.eos_id, BYTE.vocab_size) == (256, 257, 258, 259)
    assert (BPE.pad_id, BPE.eos_id, BPE.vocab_size) == (297, 299, 300)
    assert FALLBACK.vocab_size == symbols + 259


def test_names_of_special_tokens_are_ordinary_text() -> None:
    for tokenizer in (CHAR, FALLBACK, BYTE, BPE):
        ids = tokenizer.encode("<eos>")
        assert len(ids) > 1 and tokenizer.decode(ids) == "<eos>"
        assert (
            tokenizer.decode([*ids, tokenizer.eos_id, *ids, tokenizer.pad_id, tokenizer.bos_id])
            == "<eos><eos>"
        )


SPELLED = st.lists(
    st.sampled_from(
        ["<bos>", "<eos>", "<pad>", "<", "eos>", "\0", " ", "vita", "è", "<\0eos>", "<\0<eos>"]
    )
)


@settings(max_examples=40)
@given(st.lists(st.one_of(SPELLED.map("".join), OWN_TEXT), max_size=4))
def test_ends_of_tokens_equal_the_offsets_of_the_library(texts: list[str]) -> None:
    """A token that is a part of a character ends with the character."""
    for tokenizer in (BPE, FALLBACK, BYTE):
        by_offset = Tokenizer(tokenizer.to_json())
        by_offset.__dict__["_source_bytes_V"] = None
        found, expected = (
            tokenizer.encode_specials_batch(texts),
            map(by_offset.encode_specials, texts),
        )
        for (ids, ends), (expected_ids, expected_ends) in zip(found, expected, strict=True):
            assert ids.tolist() == expected_ids.tolist() and ends.tolist() == expected_ends.tolist()
    assert BPE._source_bytes_V is not None


def test_a_special_token_that_absorbs_spaces_ends_with_its_name() -> None:
    tree = json.loads(BPE.to_json())
    tree["added_tokens"][2] |= {"lstrip": True, "rstrip": True}
    ids, ends = Tokenizer(json.dumps(tree)).encode_specials("a <eos> \n\0b")
    assert ends[ids == BPE.eos_id].tolist() == [7] and ends[-1] == 11


@settings(max_examples=40)
@given(SPELLED.map("".join))
def test_a_fresh_tokenizer_encodes_special_tokens_as_later(text: str) -> None:
    for tokenizer in (BPE, FALLBACK, BYTE):
        tokenizer.__dict__.pop("_encoder", None)
        first, plain = tokenizer.encode_special_ids(text), tokenizer.encode(text.replace("\0", ""))
        assert first == tokenizer.encode_specials(text)[0].tolist()
        assert "_encoder" in tokenizer.__dict__ and plain == tokenizer.encode(
            text.replace("\0", "")
        )


def test_a_merge_is_the_most_frequent_pair() -> None:
    tokenizer = train_tokenizer(TokenizerSection(vocab_size=260), lambda: iter(["xyxyxy xyxy ab"]))
    assert tokenizer.vocab_size == 260
    letters = tokenizer.encode("x") + tokenizer.encode("y")
    assert tokenizer.encode("xy") == [256] and len(letters) == 2 and max(letters) < 256


def test_training_is_deterministic_and_independent_of_chunking() -> None:
    assert make("bpe", vocab_size=300).fingerprint == BPE.fingerprint
    assert make("char").to_json() == CHAR.to_json()


def test_an_unknown_character_is_reported_with_its_position() -> None:
    with pytest.raises(UserError, match=ERRORS["u_00df_at_position_4"]):
        CHAR.encode("via ßß")
    with pytest.raises(UserError, match=ERRORS["u_1f600_at_position_0"]):
        CHAR.encode("😀")


@pytest.mark.parametrize(
    "tokenizer", [CHAR, FALLBACK, BYTE, BPE], ids=["char", "fallback", "byte", "bpe"]
)
def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=ERRORS["u_d83d_at_position_2"]):
        tokenizer.encode("di\ud83d")
    fresh = Tokenizer(tokenizer.to_json())  # builds no encoder for special tokens
    with pytest.raises(UserError, match=ERRORS["u_d83d_at_position_2"]):
        fresh.encode_special_ids("di\ud83d")


def test_saved_and_loaded(tmp_path) -> None:
    for tokenizer in (CHAR, FALLBACK, BYTE, BPE):
        path = tmp_path / "tokenizer.json"
        path.write_text(tokenizer.to_json(), encoding="utf-8")
        again = Tokenizer.load(path)
        assert (again.kind, again.fingerprint, again.vocab_size) == (
            tokenizer.kind,
            tokenizer.fingerprint,
            tokenizer.vocab_size,
        )
        assert again.encode(CORPUS) == tokenizer.encode(CORPUS)
        assert path.read_text(encoding="utf-8") == again.to_json()


@given(st.lists(st.integers(0, 299), max_size=40))
@settings(max_examples=100)
def test_decoding_replaces_invalid_bytes_like_python(ids: list[int]) -> None:
    assert BYTE.decode(ids) == bytes(i for i in ids if i < 256).decode("utf-8", "replace")
    assert BPE.decode(ids) == Core.from_str(BPE.to_json()).decode(ids)


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    assert (
        BPE.decode([*BPE.encode("via"), -1, 10**6]) == "via" == BPE.decode(BPE.encode_array("via"))
    )


def unigram() -> Core:
    """A tokenizer like SentencePiece that has the names of special tokens in its vocabulary."""
    letters = [(letter, -5.0) for letter in "▁abcde</s>n"]
    core = Core(
        models.Unigram(
            [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁ab", -2.0), *letters], unk_id=0
        )
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    return core


def test_imported_file_with_other_special_tokens(tmp_path) -> None:
    core = unigram()
    core.enable_truncation(3)
    core.enable_padding(length=64)
    core.save(str(tmp_path / "t.json"))
    tokenizer = Tokenizer.load(tmp_path / "t.json")
    assert (tokenizer.kind, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (
        "other",
        1,
        2,
        None,
    )
    ids = tokenizer.encode("ab</s> abcd")
    assert not tokenizer.special_ids & set(ids), "text spelled a special token"
    assert tokenizer.decode([1, *ids, 2]) == "ab</s> abcd"


def test_imported_word_vocabulary_keeps_its_unknown_token() -> None:
    core = Core(models.WordLevel({"[UNK]": 0, "[SEP]": 1, "via": 2}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["[UNK]", "[SEP]"])
    tokenizer = Tokenizer(core.to_str())
    assert tokenizer.encode("via [SEP] via oscura") == [2, 0, 2, 0] and tokenizer.eos_id == 1
    assert tokenizer.decode([2, 1, 2]) == "via via"


def test_encoding_a_megabyte_is_fast() -> None:
    text = CORPUS * (10**6 // len(CORPUS))
    assert np.array_equal(CHAR.encode_array(text)[-len(CORPUS) :], CHAR.encode_array(CORPUS))
    assert CHAR.encode_array(text).dtype == BYTE.encode_array(text).dtype == np.int32


@pytest.mark.parametrize(
    "content",
    [
        *(
            b"",
            b"{}",
            b"[1]",
            b"7",
            b"not json",
            b"\xff\xfe\x00",
            b'{"model": {"type": "BPE"}}',
            b"\0\0\0",
            b"[" * 100_000,
        ),
        json.dumps({"model": {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}}).encode(),
    ],
)
def test_invalid_tokenizer_files_are_refused(tmp_path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=ERRORS["tokenizer_json_is_not_a"]):
        Tokenizer.load(path)


def test_missing_huge_and_special_tokenizer_files(tmp_path) -> None:
    huge = tmp_path / "huge.json"
    with open(huge, "wb") as file:
        file.truncate(1 << 30)
    for path, message in [
        (tmp_path / "no.json", "no tokenizer file"),
        (tmp_path, "no tokenizer file"),
        (huge, "larger than"),
    ]:
        with pytest.raises(UserError, match=message):
            train_tokenizer(
                TokenizerSection(tokenizer_type="file", tokenizer_path=str(path)), lambda: iter([])
            )


@pytest.mark.parametrize(
    ("content", "stops"), [("null", (258,)), ("[]", (258,)), ('["<pad>", 5]', (256,))]
)
def test_stop_tokens_of_a_config(tmp_path, content: str, stops: tuple[int, ...]) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(BYTE.to_json())
    (tmp_path / "tokenizer_config.json").write_text(f'{{"stop_tokens": {content}}}')
    assert Tokenizer.load(path).stop_ids == stops


@pytest.mark.parametrize("content", ["5", '"<eos>"', '{"content": "<eos>"}'])
def test_stop_tokens_that_are_no_list_are_refused(tmp_path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(BYTE.to_json())
    (tmp_path / "tokenizer_config.json").write_text(f'{{"stop_tokens": {content}}}')
    with pytest.raises(UserError, match="stop_tokens must be a list, got"):
        Tokenizer.load(path)


def test_every_flipped_byte_loads_or_raises_one_sentence() -> None:
    content = make("bpe", vocab_size=265).to_json().encode()
    for place in range(0, len(content), 97):
        torn = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        try:
            Tokenizer(torn.decode("utf-8", "replace"))
        except UserError as error:
            assert "\n" not in str(error)


def test_a_bounded_sample_covers_the_whole_corpus() -> None:
    texts = [f"{i:03d}" * 10 for i in range(100)]
    sample = _sample_text(iter(texts), limit=1000)
    assert 500 <= sum(map(len, sample)) <= 1000
    numbers = [int(chunk[:3]) for chunk in sample]
    assert (
        numbers == list(range(0, 100, numbers[1]))
        and _sample_text(iter(texts), limit=10**6) == texts
    )


def test_very_long_words_are_split_for_training() -> None:
    parts = list(_split_long_words(["a" * 2500, "b c"]))
    assert parts == ["a" * 1000, "a" * 1000, "a" * 500, "b c"]


def test_import_is_light() -> None:
    code = (
        "import sys, dantinox.text; sys.exit(any(m in sys.modules for m in ('jax', 'flax',"
        " 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_bytes_of_tokens_are_those_of_their_text(kind):
    tokenizer = make(kind)
    ids = np.array([*tokenizer.encode(CORPUS), tokenizer.eos_id])
    assert tokenizer.count_bytes(ids) == len(CORPUS.encode())
