"""Constraints: masks are compared with every text of small languages, and random models obey the
constraints.
"""

import itertools
import json
import random
import re
import sys
import time
from functools import cache

import numpy as np
import pytest

from dantinox.config import TokenizerSection, UserError, build_config
from dantinox.generation.api.loaded_model import LoadedModel
from dantinox.generation.guides.constraints import (
    CONSTRAINT_KINDS,
    MAX_SOURCE_BYTES,
    Constraint,
    ConstraintCompiler,
    check_constraint,
)
from dantinox.text import Tokenizer, train_tokenizer
from tests.error_texts import ERRORS

from . import builder

pytest.importorskip("llguidance")

TEXT = (
    'The quick brown fox {"name": [1, 22, true, false, null], "é€😀": -0.5e+9} jumps\\over/a lazy'
    ' dog, 34678 "\n\t\r+E:' * 3
)
VOCABULARIES = {
    "byte": {"tokenizer_type": "byte"},
    "char": {"tokenizer_type": "char"},
    "char with bytes": {"tokenizer_type": "char", "byte_fallback": True},
    "bpe": {"tokenizer_type": "bpe", "vocab_size": 330},
}
TOKENIZERS = {
    name: train_tokenizer(TokenizerSection(**settings), lambda: iter([TEXT]))
    for name, settings in VOCABULARIES.items()
}
every_vocabulary = pytest.mark.parametrize("vocabulary", TOKENIZERS)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["é", "b", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def matches_schema(text):
    """Checks `SCHEMA` by hand."""
    found = json.loads(text)
    return (
        list(found) == ["name", "age", "tags"]
        and isinstance(found["name"], str)
        and len(found["name"]) <= 5
        and type(found["age"]) is int
        and 0 <= found["age"] <= 120
        and len(found["tags"]) <= 3
        and all(tag in ("é", "b", None) for tag in found["tags"])
    )


DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])( é|€?😀){1,3}"
LIST = (
    'root ::= "[" (item ("," item){0,4})? "]"\nitem ::= [a-c\\u00e9]+ | "\\"" [^"a-z]{0,3} "\\"" #'
    " either\n"
)
CALC = 'start: sum\nsum: term ("+" term)~0..3\nterm: /[0-9]/ | "(" /[1-3]/ "*" /[0-9]{1,2}/ ")"'
MEETS = {
    ("json_schema", json.dumps(SCHEMA)): matches_schema,
    ("regex", DATE): lambda text: re.fullmatch(DATE, text),
    ("gbnf", LIST): lambda text: re.fullmatch(
        r'\[((,|^|(?<=\[))([a-cé]+|"[^"a-z]{0,3}"))*\]', text, re.DOTALL
    ),
    ("lark", CALC): (
        lambda text: (
            re.fullmatch(r"(\+?([0-9]|\([1-3]\*[0-9]{1,2}\))){1,4}", text) and text[0] != "+"
        )
    ),
}
SOURCES = {kind: source for kind, source in MEETS}


def allowed(matcher, size):
    """Returns the tokens of a mask, read by NumPy."""
    return np.flatnonzero(
        np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[:size]
    ).tolist()


def random_text(tokenizer, matcher, seed, most=400):
    """Returns a text of random allowed tokens, and whether it ended."""
    chance, ids = random.Random(seed), []
    while not matcher.done and len(ids) < most:
        token = chance.choice(allowed(matcher, tokenizer.vocab_size))
        matcher.consume(token)
        if matcher.ended:
            break
        ids.append(token)
    return tokenizer.decode(ids), matcher.done


# Masks


@cache
def language(pattern, alphabet, longest):
    """Returns the UTF-8 of all texts over an alphabet that match a regex of Python."""
    texts = (
        "".join(letters)
        for size in range(longest + 1)
        for letters in itertools.product(alphabet, repeat=size)
    )
    return {text.encode() for text in texts if re.fullmatch(pattern, text)}


@pytest.mark.parametrize(
    ("pattern", "alphabet", "longest"),
    [
        ("(tr|fal|true|nul)?e{0,2}", "truefalsn", 6),
        ("[ab]{1,3}c?", "abc", 4),
        ("(é|€|😀|e){0,3}", "é€😀e", 3),
        ("(the|The|he )(qu)?[ox]", "Theqouxt ", 6),
        ("([d-f]é?){0,2}|a|aé?é", "adefé", 4),
    ],
)
@every_vocabulary
def test_masks_equal_those_of_a_small_language(vocabulary, pattern, alphabet, longest):
    tokenizer = TOKENIZERS[vocabulary]
    texts = language(pattern, alphabet, longest)
    beginnings = {text[:size] for text in texts for size in range(len(text) + 1)}
    spelling, compared = tokenizer.token_pieces.inner, 0
    grammars = ConstraintCompiler(tokenizer)
    for seed in range(12):
        matcher, said, chance = grammars.matcher("regex", pattern), b"", random.Random(seed)
        while True:
            expected = {
                i for i, piece in enumerate(spelling) if piece and said + piece in beginnings
            }
            ways = {
                text[len(said)]
                for text in beginnings
                if len(text) > len(said) and text.startswith(said)
            }
            ends = {tokenizer.eos_id} if said in texts else set()
            found = set(allowed(matcher, tokenizer.vocab_size))
            if ways and len(ways) == 1 and not ends:  # the encoding of forced text by the tokenizer
                assert found and found <= expected
            else:
                assert found == expected | ends, said
                compared += 1
            assert matcher.done == (not expected)
            if not expected:
                break
            token = chance.choice(sorted(found))
            matcher.consume(token)
            if matcher.ended:
                break
            said += spelling[token]
        assert said in texts
    assert compared >= 12


@every_vocabulary
@pytest.mark.parametrize("kind", SOURCES)
def test_random_texts_satisfy_the_constraint(vocabulary, kind):
    tokenizer, source = TOKENIZERS[vocabulary], SOURCES[kind]
    grammars, texts = ConstraintCompiler(tokenizer), set()
    for seed in range(40):
        text, done = random_text(tokenizer, grammars.matcher(kind, source), seed)
        assert done and MEETS[kind, source](text), text
        texts.add(text)
    assert len(texts) > 15


@every_vocabulary
def test_any_json_object(vocabulary):
    tokenizer = TOKENIZERS[vocabulary]
    grammars, ended = ConstraintCompiler(tokenizer), 0
    for seed in range(30):
        text, done = random_text(tokenizer, grammars.matcher("json_object", ""), seed)
        ended += done
        assert not done or isinstance(json.loads(text), dict)
    assert ended > 10


@pytest.mark.parametrize(("text", "whitespace"), [
    ('{"a":1,"b":[1,2],"c":{}}', ("compact", "flexible")),
    ('{"a": 1, "b": [1, 2], "c": {}}', ("compact", "flexible")),
    ('{"a":1, "b": [1,2],"c": {}}', ("compact", "flexible")),
    ('{ "a":1,"b":[],"c":{}}', ("flexible",)),
    ('{"a" :1,"b":[],"c":{}}', ("flexible",)),
    ('{\n  "a": 1,\n  "b": [\n    1\n  ],\n  "c": {}\n}', ("flexible",)),
    ('{"a":  1,"b":[],"c":{}}', ()),
    ('{"a":\n\n1,"b":[],"c":{}}', ()),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_whitespace_of_json(kind, text, whitespace):
    assert json.loads(text)["c"] == {}
    grammars, schema = (
        ConstraintCompiler(TOKENIZERS["byte"]),
        {
            "type": "object",
            "required": ["a", "b", "c"],
        },
    )
    source = json.dumps(schema) if kind == "json_schema" else ""
    for allowed_in in ("compact", "flexible"):
        matcher = grammars.matcher(kind, source, json_whitespace=allowed_in)
        try:
            for token in TOKENIZERS["byte"].encode(text):
                matcher.consume(token)
        except ValueError:
            assert allowed_in not in whitespace
        else:
            assert allowed_in in whitespace and matcher.done


def test_special_tokens_and_extra_logits_are_never_allowed():
    tokenizer = TOKENIZERS["bpe"]
    matcher = ConstraintCompiler(tokenizer, 400).matcher("regex", r"(.|\n)*")
    assert matcher.mask().shape == (13,) and matcher.mask().dtype == np.uint32
    found = set(allowed(matcher, 416))
    assert found & {*tokenizer.special_ids} == {tokenizer.eos_id}
    assert max(found) < tokenizer.vocab_size
    first_bytes = {piece[0] for piece in (tokenizer.token_pieces.inner[i] for i in found) if piece}
    assert not first_bytes & {
        *range(0x80, 0xC2),
        *range(0xF5, 0x100),
    }, "no UTF-8 character starts with these bytes"


def test_a_lark_grammar_may_name_special_tokens_except_the_end_token():
    tokenizer = TOKENIZERS["bpe"]
    named = ConstraintCompiler(tokenizer).matcher("lark", "start: <bos> /[a-c]/")
    assert allowed(named, 400) == [tokenizer.bos_id]
    named.consume(tokenizer.bos_id)
    assert {tokenizer.token_text(token) for token in allowed(named, 400)} == {"a", "b", "c"}
    with pytest.raises(UserError, match=ERRORS["no_token_of_this_vocabulary"]):
        ConstraintCompiler(tokenizer).matcher("lark", 'start: <eos> "a"')


def test_context_dependent_tokens_are_rejected():
    tree = json.loads(TOKENIZERS["bpe"].to_json()) | {
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}
    }
    with pytest.raises(UserError, match=ERRORS["constraints_need_a_tokenizer_whose"]):
        ConstraintCompiler(Tokenizer(json.dumps(tree)))


def test_extra_end_tokens():
    tokenizer = TOKENIZERS["byte"]
    matcher = ConstraintCompiler(tokenizer).matcher("regex", "ab?", ends=[tokenizer.pad_id])
    assert allowed(matcher, 259) == [ord("a")]
    matcher.consume(ord("a"))
    assert allowed(matcher, 259) == [ord("b"), tokenizer.pad_id, tokenizer.eos_id]
    assert not matcher.done
    matcher.consume(tokenizer.pad_id)
    assert matcher.ended and matcher.done
    with pytest.raises(ValueError, match=ERRORS["token_98_is_not_allowed"]):
        matcher.consume(ord("b"))


def test_a_disallowed_token_raises_and_changes_nothing():
    matcher = ConstraintCompiler(TOKENIZERS["byte"]).matcher("regex", "ab")
    with pytest.raises(ValueError, match=ERRORS["token_98_is_not_allowed"]):
        matcher.consume(ord("b"))
    matcher.consume(ord("a"))
    assert allowed(matcher, 259) == [ord("b")]


# Errors


@pytest.mark.parametrize(
    ("kind", "source", "says"),
    [
        (
            "xml",
            "a",
            (
                "a constraint must be one of json_schema, json_object, regex, lark, gbnf, tools,"
                " got 'xml'"
            ),
        ),
        ("regex", "ab(c", "the regex cannot be used at character 3: unclosed group"),
        ("regex", "a(?=b)", "the regex cannot be used at character 2: look-around"),
        ("regex", "a" * MAX_SOURCE_BYTES + "b", "the regex must have at most 256 KB, got 257"),
        ("regex", "\ud800", "a lone surrogate"),
        ("regex", "a\0", "U+0000 at character 2"),
        ("regex", "(" * 400 + "a" + ")" * 400, "nest"),
        ("lark", "", "Empty grammar"),
        ("lark", 'root: "a"', "no start rule found"),
        ("lark", 'start: /a/\nfoo: "c', "the Lark grammar cannot be used in line 2: lexer error"),
        ("lark", 'start: "a"\n  | b', 'in line 1: unknown name: "b"'),
        ("lark", "start: " + "(" * 20_000, "nested"),
        (
            "gbnf",
            'root ::= "a" | b',
            "the GBNF grammar is invalid in line 1: rule 'b' is not defined",
        ),
        ("gbnf", 'root ::= "a"\nx ::= "b" [', "the GBNF grammar is invalid in line 2"),
        ("gbnf", 'x ::= "a"', "the GBNF grammar is invalid: there is no rule root"),
        ("gbnf", "root ::= " + "(" * 20_000, "nested too deeply"),
        ("gbnf", 'root ::= "\\ud800"', "is not a character"),
        ("json_schema", '{"a"\n 1}', "the JSON schema is not valid JSON in line 2, column 2"),
        ("json_schema", '{"minimum": NaN}', "it contains NaN"),
        ("json_schema", "[]", "must be an object"),
        ("json_schema", "false", "must be an object"),
        ("json_schema", '{"type": "objec"}', "Invalid type: objec"),
        ("json_schema", '{"uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}', "Unsatisfiable"),
        ("json_schema", '{"$ref": "http://127.0.0.1:9/x"}', "does not fetch"),
        ("json_schema", '{"type": "string", "pattern": "(a"}', "unclosed group"),
        ("json_schema", "[" * 60_000, "nested too deeply"),
        ("json_schema", '{"items":' * 200 + "{}" + "}" * 200, "nested too deeply"),
    ],
)
def test_invalid_sources(kind, source, says):
    grammars = ConstraintCompiler(TOKENIZERS["byte"])
    for tried in (
        lambda: check_constraint(Constraint(kind, source)),
        lambda: grammars.matcher(kind, source),
    ):
        with pytest.raises(UserError) as caught:
            tried()
        sentence = str(caught.value)
        assert says in sentence and "\n" not in sentence and len(sentence) < 300, sentence


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("lark", "start: A\nA: " + " & ".join(f"/.*{c}.*/" for c in "abcdefghijklmnop")),
        ("regex", r"(\p{L}{1,40}\s?){1,100}"),
    ],
)
def test_expensive_constraints_are_rejected(kind, source):
    tokenizer, begun = TOKENIZERS["bpe"], time.process_time()
    with pytest.raises(UserError, match=ERRORS["takes_too_long_to_evaluate"]):
        random_text(tokenizer, ConstraintCompiler(tokenizer).matcher(kind, source), 0)
    assert time.process_time() - begun < 5


def test_an_unsatisfiable_grammar():
    with pytest.raises(UserError, match=ERRORS["the_lark_grammar_cannot_be"]):
        ConstraintCompiler(TOKENIZERS["byte"]).matcher("lark", 'start: a\na: a "b"')


def test_text_outside_the_vocabulary():
    grammars = ConstraintCompiler(TOKENIZERS["char"])
    with pytest.raises(UserError, match=ERRORS["the_regex"]):
        grammars.matcher("regex", "Ж+")
    matcher = grammars.matcher("regex", "a(Ж|b)")
    matcher.consume(TOKENIZERS["char"].encode("a")[0])
    assert allowed(matcher, 400) == TOKENIZERS["char"].encode("b")


def test_valid_sources_pass_the_check():
    for kind, source in SOURCES.items():
        check_constraint(Constraint(kind, source))
    check_constraint(Constraint("json_object", ""))
    assert {*SOURCES, "json_object", "tools"} == {*CONSTRAINT_KINDS}


def test_a_missing_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for tried in (
        lambda: ConstraintCompiler(TOKENIZERS["byte"]),
        lambda: check_constraint(Constraint("regex", "a")),
    ):
        with pytest.raises(UserError, match=ERRORS["pip_install_dantinox_serve"]):
            tried()


# With a model


def make_run(vocabulary):
    """Returns a run whose model has random weights, and logits for tokens outside the
    vocabulary.
    """
    tokenizer = TOKENIZERS[vocabulary]
    size = -(-tokenizer.vocab_size // 64) * 64
    architecture = builder.config(
        vocab_size=size,
        dim=16,
        n_heads=2,
        kv_heads=1,
        windows=(None,),
        hidden_dim=16,
        max_context=256,
    )
    return LoadedModel(
        build_config({"model": {"max_context": 256}}), flat(builder.model(architecture)), tokenizer
    )


def flat(model):
    """Divides the logits, so that all tokens are likely."""
    model.embed[...] /= 30
    return model


@pytest.fixture(scope="module")
def runs():
    made = {}
    return lambda vocabulary: made.setdefault(vocabulary, make_run(vocabulary))


HOT = {"temperature": 5.0, "max_new_tokens": 200}


PROMPTS = ["a", "bbb", "The fox"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "vocabulary",
    [pytest.param(name, marks=[] if name == "byte" else pytest.mark.slow) for name in TOKENIZERS],
)
def test_a_random_model_satisfies_the_constraint(runs, vocabulary):
    run = runs(vocabulary)
    for kind, source in SOURCES.items():
        results = run.generate(PROMPTS, constraint=Constraint(kind, source), n=4, seed=1, **HOT)
        assert len({result.text for result in results}) >= 4
        for result in results:
            assert result.finish_reason == "eos", result.text
            assert MEETS[kind, source](result.text), result.text


def test_every_row_and_stream_has_its_own_matcher(runs):
    run, constraint = runs("byte"), Constraint("regex", "[ab]{3}|c{9}")
    results = run.generate(PROMPTS, constraint=constraint, n=4, seed=3, **HOT)
    assert len(results) == 12 and all(
        re.fullmatch("[ab]{3}|c{9}", result.text) for result in results
    )
    assert {len(result.text) for result in results} == {3, 9}, "rows end independently"
    assert "".join(run.stream("bbb", constraint=constraint, seed=3, **HOT)) == results[4].text


def test_finish_reasons(runs):
    run = runs("byte")

    def of(source, **more):
        settings = {"seed": 1} | HOT | more
        return run.generate("a", constraint=Constraint("regex", source), **settings)

    complete = of("a{5}")
    assert (complete.text, complete.finish_reason, len(complete.tokens)) == (
        "aaaaa",
        "eos",
        5,
    ), "no EOS token is needed"
    assert of("a{5}", max_new_tokens=5).finish_reason == "eos"
    cut = of("a{5}", max_new_tokens=4)
    assert (cut.text, cut.finish_reason) == ("aaaa", "length")
    assert (of("a{5}b", stop=["aaa"]).text, of("a{5}b", stop=["aaa"]).finish_reason) == ("", "stop")
    assert (of("").text, of("").finish_reason, of("").tokens) == ("", "eos", [])
    assert of("a{3}", ignore_eos=True).text == "aaa"
    assert of("a{3}", min_tokens=50, banned_tokens=["a"], greedy=True).text == "aaa", (
        "the constraint has precedence"
    )
    either = {of("ab?", seed=seed).text for seed in range(10)}
    assert either == {"a", "ab"}


SAMPLERS = [
    {"greedy": True, "temperature": 1.0},
    {"strategy": "entropy"},
    {"use_cache": False, "temperature": 2.0},
    {"mirostat": 2, "temperature": 2.0},
    {
        "xtc_probability": 1.0,
        "dry_multiplier": 2.0,
        "dry_breakers": ["z"],
        "top_n_sigma": 1.0,
        "min_p": 0.2,
        "top_k": 3,
    },
]


# tests/sampling/test_allowed.py tests masks with all steps.
@pytest.mark.parametrize(
    "settings", [SAMPLERS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in SAMPLERS[1:])]
)
def test_constraints_with_every_sampler(runs, settings):
    run = runs("byte" if settings is SAMPLERS[0] else "bpe")
    for seed in range(3):
        result = run.generate(
            "fox", constraint=Constraint("regex", DATE), **HOT | {"seed": seed} | settings
        )
        assert MEETS["regex", DATE](result.text), result.text


def test_reports_use_the_unmasked_distribution(runs):
    run = runs("byte")
    request = run.request("a", {"seed": 1, **HOT}, logprobs=3, constraint=Constraint("regex", "zx"))
    (batch,) = run.start([request])
    assert [part.text for _, part in batch.parts()] == ["z", "x"]
    (result,) = batch.results
    assert (result.steps.logprob < -1).all() and (result.steps.entropy > 4).all(), (
        "the report has the probability of the model"
    )
    np.testing.assert_allclose(result.steps.logprob_sampled, 0, atol=1e-6)
    np.testing.assert_array_equal(result.steps.survivors, 1)


def test_a_constraint_includes_the_beginning_of_the_output(runs):
    from dataclasses import replace

    run = runs("byte")
    request = run.request("a", run.config, constraint=Constraint("regex", "ab{2}[xy]"))

    def allowed_after(text):
        ids = (*request.ids, *run.tokenizer.encode(text))
        ((guide,),) = run.guides(replace(request, ids=ids, begun=len(text)))
        bits = np.unpackbits(guide.mask().view(np.uint8), bitorder="little")
        return "".join(map(chr, np.flatnonzero(bits[:256])))

    assert [allowed_after(text) for text in ("", "a", "ab", "abb")] == ["a", "b", "b", "xy"]
    for text in ("b", "aby", "abbxy"):
        with pytest.raises(
            UserError, match="the beginning of the answer does not satisfy its constraint"
        ):
            allowed_after(text)
