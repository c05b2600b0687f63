"""Streaming: the concatenated pieces equal the text of all ids decoded at once, for any ids and any
split of the ids.
"""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, normalizers, pre_tokenizers

from dantinox.config import TokenizerSection
from dantinox.text import Tokenizer, train_tokenizer

CORPUS = "Nel mezzo del cammin di nostra vita 🙂👩‍🚀 é — ☃\n  mi ritrovai\r\n" * 3
SYMBOLS = ["<unk>", "<s>", "</s>", "▁", "▁▁", "▁ab", "a", "b", "é", "�"]


def own(kind: str, **options: object) -> Tokenizer:
    return train_tokenizer(TokenizerSection(tokenizer_type=kind, **options), lambda: iter([CORPUS]))


def foreign(decoder: decoders.Decoder | None, symbols: list[str] = SYMBOLS) -> Tokenizer:
    core = Core(
        models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[], byte_fallback=True)
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    if decoder is not None:
        core.decoder = decoder
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    core.add_tokens(["\n\n\n"])
    return Tokenizer(core.to_str())


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
KINDS = {
    "char": own("char"),
    "fallback": own("char", byte_fallback=True),
    "byte": own("byte"),
    "bpe": own("bpe", vocab_size=300),
    "llama": foreign(LLAMA, SYMBOLS + BYTES),
    "metaspace": foreign(decoders.Metaspace()),
    "metaspace never": foreign(decoders.Metaspace(prepend_scheme="never")),
    "wordpiece": foreign(
        decoders.WordPiece(), ["<unk>", "<s>", "</s>", "via", "##a", "don", "'", "t", ".", "##"]
    ),
    "suffix": foreign(decoders.BPEDecoder("</w>"), ["<unk>", "<s>", "</s>", "a</w>", "b", "c</w>"]),
    "none": foreign(None),
}
LOCAL = ["char", "fallback", "byte", "bpe", "llama", "metaspace", "metaspace never"]


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=40)
@given(data=st.data())
def test_streamed_text_equals_decoded_text(name: str, data: st.DataObject) -> None:
    tokenizer = KINDS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    whole = tokenizer.decode(ids)
    one_by_one, stream = tokenizer.detokenizer(), ""
    for token in ids:
        stream += one_by_one.push([token])
    assert stream + one_by_one.flush() == whole
    cut = data.draw(st.integers(0, len(ids)))
    again = one_by_one.push(ids[:cut]) + one_by_one.push(ids[cut:]) + one_by_one.flush()
    assert again == whole, "a flushed stream starts again"


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=40)
@given(data=st.data())
def test_decoding_matches_the_library(name: str, data: st.DataObject) -> None:
    tokenizer = KINDS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    expected = tokenizer.core.decode(ids)
    if (
        "�" not in expected
    ):  # for a sequence of byte tokens with invalid UTF-8 the library also drops valid characters
        assert tokenizer.decode(ids) == expected


def test_which_decoders_have_a_table() -> None:
    assert [
        name for name, tokenizer in KINDS.items() if tokenizer.token_pieces is not None
    ] == LOCAL


@pytest.mark.parametrize("name", ["fallback", "byte", "bpe", "llama"])
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20))
def test_no_incomplete_characters_are_returned(name: str, text: str) -> None:
    tokenizer = KINDS[name]
    stream = tokenizer.detokenizer()
    shown = ""
    for token in tokenizer.encode(text):
        shown += stream.push([token])
        assert text.startswith(shown)
    assert shown == text and stream.flush() == ""


def test_an_incomplete_character_is_replaced_at_the_end() -> None:
    stream = KINDS["byte"].detokenizer()
    assert [stream.push([byte]) for byte in "☃".encode()] == ["", "", "☃"]
    assert stream.push([0xE2, 0x98]) == "" and stream.flush() == "�"
    assert stream.push([0xE2, KINDS["byte"].eos_id, 0x98, 0x83]) == "☃", (
        "a special token has no text"
    )


def test_a_leading_space_is_dropped_once() -> None:
    ids = KINDS["llama"].encode("  a")
    assert [KINDS["llama"].core.id_to_token(i) for i in ids][:1] == ["▁"]
    assert KINDS["llama"].decode([1, *ids]) == "  a" == KINDS["llama"].decode(ids)


@pytest.mark.parametrize("name", ["bpe", "wordpiece"])
def test_the_cost_per_token_is_constant(name: str) -> None:
    tokenizer = KINDS[name]
    stream = tokenizer.detokenizer()

    def seconds(count: int) -> float:
        start = time.process_time()
        for i in range(count):
            stream.push([3 + i % 4])
        return time.process_time() - start

    seconds(100)
    early = min(seconds(500) for _ in range(3))
    for _ in range(10):
        seconds(1000)
    assert min(seconds(500) for _ in range(3)) < 5 * early


def test_pre_tokenizer_metaspace_round_trip() -> None:
    core = Core(models.BPE(vocab={s: i for i, s in enumerate(["▁", "a", "b", "</s>"])}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = Tokenizer(core.to_str())
    assert tokenizer.decode(tokenizer.encode("ab b a")) == "ab b a" and tokenizer.eos_id is None


@pytest.mark.parametrize("kind", KINDS)
def test_token_text_matches_text_inside_a_sequence(kind):
    tokenizer = KINDS[kind]
    size = tokenizer.vocab_size
    assert [tokenizer.token_text(token) for token in (size, size + 9, -1)] == [""] * 3
    ascii_only = [token for token in range(size) if tokenizer.token_text(token).isascii()]
    if tokenizer.token_pieces is not None:
        a = next(token for token in ascii_only if tokenizer.token_text(token) == "a")
        assert all(
            tokenizer.decode([a, token]) == "a" + tokenizer.token_text(token)
            for token in ascii_only
        )
