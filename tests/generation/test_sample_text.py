"""`SampleText` gives the same text for tokens that are added one by one and in chunks."""

import pytest

from dantinox.config import TokenizerSection, build_config
from dantinox.generation.sample_text import SampleText
from dantinox.text import train_tokenizer

NEVER = "\0 never in the text"  # with a stop string, every token is checked


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(()))


def run(tokenizer, ids, sizes, stop=(), prompt=(), **settings):
    """Adds the ids in chunks of the given sizes; returns the tokens, the text and the finish
    reason.
    """
    sample = SampleText(
        tokenizer, build_config({"generation": {"stop": stop, **settings}}).generation, prompt
    )
    texts = []
    for size in sizes:
        chunk, ids = ids[:size], ids[size:]
        texts.append("".join(part.text for part in sample.add_tokens(chunk, done=not ids)))
        assert sample.released_steps is None and not sample.must_restart
    return sample.tokens, "".join(texts), sample.finish_reason


SETTINGS = [
    {},
    {"ignore_eos": True},
    {"stop_token_ids": [66]},
    {"stop_token_ids": [66], "keep_stop": True},
    {"loop_stop": True},
]


@pytest.mark.parametrize("changed", SETTINGS, ids=str)
@pytest.mark.parametrize("end", ["A", "B", "é", "\ufffd", "eos", ""])
def test_chunks_equal_single_tokens_with_a_stop_string(tokenizer, changed, end):
    last = list(tokenizer.stop_ids)[:1] if end == "eos" else tokenizer.encode(end)
    ids = [*tokenizer.encode("Año 1 " * 3), *last]
    ids = ids[:-1] if end == "é" else ids  # ends in the middle of a character
    expected = run(tokenizer, ids, [1] * len(ids), stop=[NEVER], **changed)
    for sizes in ([1] * len(ids), [len(ids)], [5, 1, len(ids)]):
        assert run(tokenizer, ids, sizes, **changed) == expected
    assert expected[0] == ids


def test_tokens_after_the_end_are_ignored(tokenizer):
    sample = SampleText(tokenizer, build_config({}).generation, ())
    assert [part.text for part in sample.add_tokens(tokenizer.encode("ab"), done=True)] == ["ab"]
    assert [part.text for part in sample.add_tokens(tokenizer.encode("cd"), done=True)] == [""]
    assert (sample.tokens, sample.finish_reason) == (tokenizer.encode("ab"), "length")
