"""Tests bans with backtracking: what is discarded, held back and excluded, and that no chunk length
can be seen in the text.
"""

import random
import re
from dataclasses import replace

import numpy as np
import pytest

from dantinox.config import UserError
from dantinox.generation.engine import Engine
from dantinox.generation.guides.bans import (
    MAX_HELD_TOKENS,
    RESTARTS_PER_TOKEN,
    BannedStrings,
    TextBan,
    compile_regexes,
    lower,
)
from dantinox.generation.guides.constraints import Constraint
from dantinox.generation.request import GenerationRequest

from . import builder
from .builder import BYTES

V = BYTES.vocab_size


def ban(strings=(), regexes=(), limit=1000):
    return TextBan(BannedStrings(strings), compile_regexes(regexes), V, limit)


def excluded(guide):
    mask = guide.mask()
    return (
        set()
        if mask is None
        else {token for token in range(V) if not mask[token // 32] >> np.uint32(token % 32) & 1}
    )


def push(guide, pieces):
    """Pushes tokens with these texts; returns the results and how many tokens were held after
    each.
    """
    return [(guide.push(number, piece), guide.held) for number, piece in enumerate(pieces)]


def test_a_banned_string_is_discarded_from_its_first_token():
    guide = ban(["Red Fox"])
    assert push(guide, ["a ", "re", "d", " fo"]) == [(None, 0), (None, 1), (None, 2), (None, 3)]
    assert guide.push(9, "x!") == 4 and guide.held == 0 and excluded(guide) == {1}
    assert guide.push(7, " RED f") is None and guide.held == 1 and excluded(guide) == set()
    assert guide.push(8, "og") is None and guide.held == 0


def test_overlapping_beginnings():
    guide = ban(["aab", "abcd"])
    # After the last two are discarded, the first "a" may be the beginning of a banned string again,
    # so it stays held.
    assert push(guide, ["a", "a", "a"]) == [(None, 1), (None, 2), (None, 3)]
    assert guide.push(3, "b") == 3 and excluded(guide) == {1} and guide.held == 1
    assert guide.push(4, "a") is None and guide.push(5, "b") == 3


def test_an_exclusion_lasts_while_its_position_may_return():
    guide = ban(["ab", "cd"])
    push(guide, ["x", "a"])
    assert guide.push(2, "b") == 2 and excluded(guide) == {1}
    guide.push(3, "c")
    assert guide.push(4, "d") == 2 and excluded(guide) == {1, 3}
    assert guide.push(5, "e") is None and excluded(guide) == set()


def test_part_of_a_character_stays_with_the_character():
    guide = ban(["é!"])
    assert push(guide, ["a", "", "é"]) == [(None, 0), (None, 1), (None, 2)]
    assert guide.push(3, "!") == 3 and excluded(guide) == {1}


def test_a_regular_expression_is_discarded_and_held_while_it_may_match():
    guide = ban(regexes=[r"\bcat\d+x"])
    assert push(guide, ["a", " ", "ca", "t12", "3"]) == [
        (None, 0),
        (None, 0),
        (None, 1),
        (None, 2),
        (None, 3),
    ]
    assert guide.push(5, "x") == 4 and excluded(guide) == {2}
    inside = ban(regexes=[r"\bcat"])
    assert push(inside, ["con", "cat"]) == [(None, 0), (None, 0)]
    endless = ban(regexes=["a.*b"])
    assert max(held for _, held in push(endless, ["a"] * (MAX_HELD_TOKENS + 40))) <= MAX_HELD_TOKENS


@pytest.mark.parametrize("source", ["(", "a*", "a{,99999999999999999999}"])
def test_invalid_regular_expressions(source):
    with pytest.raises(UserError, match=r"generation\.banned_regexes has the"):
        compile_regexes([source])


def test_a_slow_regular_expression_ends_its_request():
    guide = ban(regexes=["(a|aa)+$b"])
    with pytest.raises(UserError, match="takes too long to evaluate"):
        push(guide, ["a" * 60])
        push(guide, ["a"] * 60)


def test_restarts_are_bounded():
    guide = ban(["a"], limit=2)
    for _ in range(RESTARTS_PER_TOKEN * (2 + 16)):
        guide.push(97, "a")
    assert not guide.done
    guide.push(97, "a")
    assert guide.done


def test_lower_keeps_the_length():
    for text in ("ABC", "İx", "ẞ", "Ως"):
        assert len(lower(text)) == len(text)


def test_random_texts_never_contain_a_banned_string():
    draw = random.Random(0)
    for _ in range(40):
        strings = ["".join(draw.choices("abc", k=draw.randint(2, 5))) for _ in range(4)]
        guide, tokens = ban(strings), []
        while len(tokens) < 60 and not guide.done:
            without = excluded(guide)
            token = draw.choice([token for token in range(40) if token not in without])
            piece = "".join(random.Random(token).choices("abcABC ", k=1 + token % 3))
            tokens.append(piece)
            discarded = guide.push(token, piece)
            tokens = tokens[: len(tokens) - (discarded or 0)]
            held = "".join(tokens).lower()
            assert not any(string in held for string in strings)
            released = "".join(tokens[: len(tokens) - guide.held]).lower()
            rest = held[len(released) :]
            for (
                string
            ) in strings:  # no string begins before the held tokens and may still become complete
                assert not any(
                    string.startswith(held[at:]) and at < len(released) for at in range(len(held))
                ), (rest, string)


def test_a_thousand_strings_equal_a_search_over_all_of_them():
    draw = random.Random(1)
    strings = {"".join(draw.choices("abcdΣ ", k=draw.randint(3, 9))) for _ in range(1000)}
    automaton = BannedStrings([*strings])
    lowered = {lower(string) for string in strings}
    text = lower("".join(draw.choices("abcdσς", k=700)))
    partial = ""
    for end, character in enumerate(text, 1):
        partial, matched = automaton.advance(partial, character)
        ends = [text[end - size : end] for size in range(min(9, end), 0, -1)]
        assert matched == next((len(part) for part in ends if part in lowered), 0)
        assert partial == next(
            (p for p in ends if any(s.startswith(p) and s != p for s in lowered)), ""
        )


def test_a_thousand_strings_that_begin_everywhere_never_occur():
    draw = random.Random(2)
    strings = {"".join(draw.choices("ab", k=12)) for _ in range(1000)}
    guide, tokens = ban([*strings], limit=10_000), []
    while len(tokens) < 40:
        without = excluded(guide)
        token = draw.choice([token for token in range(6) if token not in without] or [6])
        tokens.append("abAB"[token % 4] if token < 6 else "c")
        tokens = tokens[: len(tokens) - (guide.push(token, tokens[-1]) or 0)]
    assert not any(string in "".join(tokens).lower() for string in strings)


# --- in the engine


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(((16, None), "few"), id="ring and full"),
        pytest.param(((None, None), "all"), id="full, all steps", marks=pytest.mark.slow),
    ],
)
def served(request):
    return builder.slot_batch(*request.param)


def texts_of(run, slots, requests, **options):
    slots.reset()
    engine = Engine(run, slots, queue=100, chunk_seconds=None, **options)
    jobs = [engine.add(request) for request in requests]
    texts, ids, steps = ({job: empty() for job in jobs} for empty in (str, list, list))
    while engine.busy:
        for output in engine.step():
            assert output.error is None, output.error
            texts[output.job] += output.text
            ids[output.job] += output.ids
            if output.steps is not None:
                steps[output.job] += output.steps.logprob.tolist()
    assert all(job.texts[0].tokens == ids[job] for job in jobs)
    return [(ids[job], texts[job], steps[job]) for job in jobs]


@pytest.mark.slow
def test_bans_in_the_engine(served):
    run, slots = served
    prompts = ("once upon", "x", "there was a fox")
    common = {"max_new_tokens": 60, "temperature": 1.0, "mirostat": 2, "ignore_eos": True}
    plain = [
        GenerationRequest(
            tuple(prompts[seed % 3].encode()), run.settings({**common, "seed": seed}), 0
        )
        for seed in range(6)
    ]
    free = texts_of(run, slots, plain, max_steps=32)
    requests = []
    for request, (_, text, _) in zip(plain, free, strict=True):
        pairs = [text[at : at + 2] for at in range(4, 40, 9) if text[at : at + 2].isascii()] + [
            "zq"
        ]
        settings = {
            "banned_strings": pairs,
            "banned_regexes": ["[#-+]."],
            "seed": request.config.generation.seed,
        }
        constraint = (
            Constraint("regex", "[a-z]{4}", after=("!", ":"), repeats=True)
            if len(requests) % 2
            else None
        )
        requests.append(
            GenerationRequest(
                request.ids, run.settings({**common, **settings}), 0, False, constraint
            )
        )
    alone = [
        texts_of(run, slots, [request], max_steps=1, dispatch_ahead=False)[0]
        for request in requests
    ]
    for options in ({"max_steps": 32}, {"max_steps": 5}):
        assert texts_of(run, slots, requests, **options) == alone
    changed = 0
    for request, (ids, text, steps), (before, _, _) in zip(requests, alone, free, strict=True):
        assert not any(
            string.lower() in text.lower() for string in request.config.generation.banned_strings
        )
        assert not re.search("[#-+].", text.rstrip("\ufffd")) and len(ids) == len(steps) == 60
        changed += ids != before
    assert changed >= 5
    unmatched = [
        GenerationRequest(
            request.ids, run.settings({**common, "seed": seed, "banned_strings": ["qzqzqzqz"]}), 0
        )
        for seed, request in enumerate(plain)
    ]
    assert texts_of(run, slots, unmatched, max_steps=32) == free


def test_bans_offline(served):
    """One of two rows has bans. Both rows have the tokens of the engine, and a log-probability of
    each.
    """
    run, slots = served
    settings = {"max_new_tokens": 60, "seed": 1, "ignore_eos": True}
    plain = GenerationRequest(tuple(b"once upon"), run.settings(settings), 0)
    ((_, text, _),) = texts_of(run, slots, [plain])
    pair = next(text[at : at + 2] for at in range(60) if text[at : at + 2].isascii())
    unmatched, banned = (
        replace(plain, config=run.settings({**settings, "banned_strings": strings}))
        for strings in (["qzqzqzqz"], [pair])
    )
    results = run.complete([unmatched, banned])
    assert results[0].text == text
    assert pair.lower() not in results[1].text.lower()
    for result, (ids, found, logprobs) in zip(
        results, texts_of(run, slots, [plain, banned]), strict=True
    ):
        assert (result.tokens, result.text) == (ids, found) and len(ids) == 60
        np.testing.assert_allclose(
            result.info["logprobs"], logprobs, rtol=0, atol=builder.LOGPROB_TOLERANCE
        )
