"""Settings that name tokens by their text: banned tokens never appear, only allowed tokens do;
invalid text is rejected.
"""

import json

import pytest
import tokenizers

from dantinox.config import Config, GenerationSection, TokenizerSection, UserError
from dantinox.generation import LoadedModel
from dantinox.generation.token_settings import resolve_token_ids, sampling_params
from dantinox.sampling import SamplingParams
from dantinox.text import Tokenizer, train_tokenizer
from tests.error_texts import ERRORS

from . import builder
from .builder import BYTES

CORPUS = "the dog and the cat and the bird\nthe dog: and the cat\n" * 9
PAIRS = train_tokenizer(
    TokenizerSection(tokenizer_type="bpe", vocab_size=290), lambda: iter([CORPUS])
)
LETTERS = train_tokenizer(TokenizerSection(tokenizer_type="char"), lambda: iter([CORPUS]))


@pytest.fixture(scope="module")
def run() -> LoadedModel:
    return builder.circle()


def test_lists_of_tokens_by_text_and_by_id():
    section = GenerationSection(
        banned_tokens=(0x80, "b", "128"),
        allowed_tokens=("x", 121),
        logit_bias={"z": 1e9, "122": None, "7": 0.5},
    )
    found = resolve_token_ids(section, BYTES)
    assert found.banned_tokens == (0x80, ord("b"), 128) and found.allowed_tokens == (ord("x"), 121)
    assert found.logit_bias == {
        "122": -float("inf"),
        "7": 0.5,
    }, "a token named twice has the sum of both biases"


def test_tokens_of_a_text(run):
    """Without these settings, the text goes through all bytes of the cycle in turn."""
    settings = {
        "banned_tokens": ["128", 0xA8],
        "bad_words": ["b\nc", "ca"],
        "logit_bias": {"226": None, "z": 0.5},
    }
    tokens = run.generate("a", greedy=True, max_new_tokens=60, **settings).tokens
    assert not {0x80, 0xA8, 226} & {*tokens} and len(tokens) == 60
    text = bytes(token for token in tokens if token < 256)
    assert b"b\nc" not in text and b"ca" not in text


def test_a_word_is_also_banned_after_a_space():
    """If the words of a vocabulary include their leading space, "dog" and " dog" have no token in
    common.
    """
    words = resolve_token_ids(GenerationSection(bad_words=("dog", (5, 6))), PAIRS).bad_words
    assert words == (tuple(PAIRS.encode("dog")), tuple(PAIRS.encode(" dog")), (5, 6))
    assert tuple(PAIRS.encode(" dog"))[-len(words[0]) :] != words[0]
    section = resolve_token_ids(GenerationSection(bad_words=("dog",)), BYTES)
    assert section.bad_words == (tuple(b"dog"),), "one spelling covers both"


def test_breakers_are_all_tokens_that_contain_the_text():
    ids = resolve_token_ids(
        GenerationSection(dry_multiplier=1.0, dry_breakers=(" d", "\n", 7)), PAIRS
    ).dry_breakers
    texts = {PAIRS.decode([i]) for i in ids} - {PAIRS.decode([7])}
    assert 7 in ids and all(" d" in text or "\n" in text for text in texts) and {"\n"} < texts
    missed = [
        t
        for t in range(PAIRS.vocab_size)
        if t not in ids and any(x in PAIRS.decode([t]) for x in (" d", "\n"))
    ]
    assert missed == []


def test_xtc_keeps_the_end_and_the_line_break():
    params = sampling_params(
        PAIRS, [Config(generation=GenerationSection(xtc_probability=1.0, seed=1))]
    )
    assert set(params.tables["protected_ids"][0].tolist()) - {-1} == {
        PAIRS.eos_id,
        *PAIRS.encode("\n"),
    }


def test_a_tokenizer_that_adds_a_leading_space():
    """The vocabulary has tokens for a symbol alone and for a line break alone, but no text is
    encoded as such a token.
    """
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    core.train_from_iterator(
        [CORPUS], tokenizers.trainers.BpeTrainer(vocab_size=40, show_progress=False)
    )
    spaced = Tokenizer(core.to_str())
    assert len(spaced.encode(":")) == 2
    assert resolve_token_ids(GenerationSection(banned_tokens=(":",)), spaced).banned_tokens == (
        core.token_to_id(":"),
    )
    params = sampling_params(
        spaced, [Config(generation=GenerationSection(xtc_probability=1.0, seed=1))]
    )
    assert core.token_to_id("\n") in params.tables["protected_ids"][0].tolist()


@pytest.mark.parametrize("key", ["bad_words", "banned_tokens", "logit_bias"])
def test_a_missing_character_is_reported_with_its_setting(key):
    value = {"é": 1.0} if key == "logit_bias" else ("é",)
    with pytest.raises(UserError, match=rf"generation\.{key}: the character 'é'"):
        resolve_token_ids(GenerationSection(**{key: value}), LETTERS)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"banned_tokens": ["è"]},
            "generation.banned_tokens must hold token ids or texts of one token: 'è' is 2 tokens",
        ),
        (
            {"banned_tokens": ["٣"]},
            "generation.banned_tokens must hold token ids or texts of one token: '٣' is 2 tokens",
        ),
        (
            {"logit_bias": {"ab": 1.0}},
            "generation.logit_bias must hold token ids or texts of one token: 'ab' is 2 tokens",
        ),
        (
            {"allowed_tokens": [5000]},
            "generation.allowed_tokens must hold token ids in [0, 259), got 5000",
        ),
        (
            {"bad_words": [[1, 777]]},
            "generation.bad_words must hold token ids in [0, 259), got 777",
        ),
        (
            {"dry_multiplier": 1.0, "dry_breakers": [999]},
            "generation.dry_breakers must hold token ids in [0, 259), got 999",
        ),
        ({"allowed_tokens": ["a"], "banned_tokens": [97]}, "together they allow no token"),
        ({"allowed_tokens": ["a"], "bad_words": ["a"]}, "together they allow no token"),
        ({"banned_tokens": list(range(259))}, "together they allow no token"),
    ],
)
def test_invalid_tokens(run, settings, words):
    with pytest.raises(UserError) as error:
        run.generate("a", greedy=True, **settings)
    assert words in str(error.value)


def test_text_needs_a_tokenizer():
    for key, value in (
        ("banned_tokens", ["a"]),
        ("bad_words", ["a"]),
        ("logit_bias", {"a": 1}),
        ("dry_breakers", ["a"]),
    ):
        more = {"dry_multiplier": 1.0} if key == "dry_breakers" else {}
        with pytest.raises(UserError, match=f"generation.{key} must hold .*token ids"):
            SamplingParams.build({key: value, "greedy": True} | more)


def test_settings_of_the_run_hold_until_disabled(run):
    """If a request disables a step, the run's settings of this step are dropped. Another preset
    drops the run's order.
    """
    section = GenerationSection(
        xtc_probability=0.5, xtc_threshold=0.2, preset="koboldcpp", sampler_order=(0, 1, 2, 3, 4, 5)
    )
    own = LoadedModel(
        run.config.model_copy(update={"generation": section}), run.model, run.tokenizer
    )
    off = own.settings({"xtc_probability": 0}).generation
    assert (off.xtc_probability, off.xtc_threshold, off.sampler_order) == (
        0,
        0.1,
        (0, 1, 2, 3, 4, 5),
    )
    assert own.settings({"preset": "default"}).generation.sampler_order is None
    assert own.settings({"xtc_threshold": 0.4}).generation.xtc_probability == 0.5
    with pytest.raises(UserError, match=ERRORS["generation_xtc_probability_cannot_be_used"]):
        own.settings({"preset": "hf"})
    with pytest.raises(UserError, match=ERRORS["generation_dry_base_has_no_effect_while"]):
        own.settings(json.loads('{"dry_base": 2}'))
