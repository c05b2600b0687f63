"""Tests token healing: what is removed, what may come next, against a reference with masks in
NumPy, and in the engine.
"""

import random
from dataclasses import replace

import numpy as np
import pytest

from dantinox.config import TokenizerSection, UserError
from dantinox.generation.engine import Engine
from dantinox.generation.guides.constraints import Constraint
from dantinox.generation.guides.token_healing import MAX_HEALED_TOKENS, HealedPrefix, PieceIndex
from dantinox.text import Tokenizer, train_tokenizer
from dantinox.text.chat_template import ChatPrompt

from . import builder

TEXT = (
    "see http://www.example.org/ and https://example.com or ftp://files; the hellos helloes héllo"
    " 日本語日本 " * 30
)
TOKENIZER = train_tokenizer(
    TokenizerSection(tokenizer_type="bpe", vocab_size=340), lambda: iter([TEXT])
)
TOKENIZER = Tokenizer(TOKENIZER.to_json(), roles={"add_bos_token": False})
PIECES = TOKENIZER.token_pieces.inner
INDEX = PieceIndex(TOKENIZER)
V = TOKENIZER.vocab_size
CONTEXT = 64
RUN = builder.loaded_model(TOKENIZER, CONTEXT, windows=(None,))
PROMPTS = ["see http:", "see htt", "the hel", "a 日", "or ftp://file", "the helloes", "x!"]


def data_of(ids):
    return b"".join(PIECES[token] for token in ids)


def allowed(guide):
    mask = guide.mask()
    return (
        None
        if mask is None
        else [token for token in range(V) if mask[token // 32] >> np.uint32(token % 32) & 1]
    )


def removed(ids):
    """How many tokens to remove, from the definition."""
    count = 0
    while count < min(MAX_HEALED_TOKENS, len(ids) - 1):
        longer = data_of(ids[len(ids) - count - 1 :])
        if not PIECES[ids[len(ids) - count - 1]] or not any(
            p.startswith(longer) and p != longer for p in PIECES
        ):
            break
        count += 1
    return count


def slowly(prompt, steps, allow=lambda data: True):
    """Greedy continuation of a healed prompt: at each step only tokens whose bytes agree with the
    removed ones.
    """
    ids = TOKENIZER.encode(prompt)
    kept = len(ids) - removed(ids)
    rest, text = data_of(ids[kept:]), ids[:kept]
    for _ in range(steps):
        logits_V = np.array(builder.all_logits(RUN.model, text)[-1])
        if rest:
            fits = [bool(p) and (p.startswith(rest) or rest.startswith(p)) for p in PIECES]
            logits_V[: len(fits)][~np.array(fits)] = -np.inf
        text.append(int(logits_V.argmax()))
        rest = rest[len(PIECES[text[-1]]) :]
    return text[:kept], text[kept:]


def test_the_removed_tokens_and_the_allowed_tokens_follow_their_definitions():
    draw = random.Random(0)
    for _ in range(200):
        start = draw.randrange(len(TEXT) - 20)
        ids = TOKENIZER.encode(TEXT[start : start + draw.randint(1, 18)])
        count = INDEX.healed_count(ids)
        assert count == removed(ids) < len(ids)
        if count:
            rest = data_of(ids[len(ids) - count :])
            guide = HealedPrefix(INDEX, ids[len(ids) - count :], V)
            assert allowed(guide) == [
                i for i, p in enumerate(PIECES) if p and (p.startswith(rest) or rest.startswith(p))
            ]
    assert any(removed(TOKENIZER.encode(prompt)) > 1 for prompt in PROMPTS)


def test_special_tokens_are_not_removed():
    ids = TOKENIZER.encode("see htt")
    end = TOKENIZER.stop_ids[0]
    assert INDEX.healed_count(ids) > 0 == INDEX.healed_count([*ids, end])
    assert INDEX.healed_count([end, *ids[-1:]]) == 1
    assert INDEX.healed_count(ids[-1:]) == 0


def test_greedy_text_equals_the_reference_and_continues_the_prompt():
    settings = {"token_healing": True, "greedy": True, "max_new_tokens": 10, "n": 2}
    results = RUN.complete(
        [RUN.request(prompt, settings, logprobs=0, echo=True) for prompt in PROMPTS]
    )
    for prompt, result in zip(
        [prompt for prompt in PROMPTS for _ in range(2)], results, strict=True
    ):
        kept, new = slowly(prompt, 10)
        assert (
            result.tokens == new
            and result.prompt == prompt
            and result.stats["prompt_tokens"] == len(kept)
        )
        assert (prompt + result.text).encode() == data_of([*kept, *new]) or not data_of(
            new
        ).isascii()
        assert TOKENIZER.decode([*kept, *new]).startswith(
            prompt
        ) and prompt + result.text == TOKENIZER.decode([*kept, *new])
        columns = [*result.info["prompt_tokens"], *result.info["tokens"]]
        assert columns == [TOKENIZER.decode([token]) for token in (*kept, *new)]
        assert len(result.tokens) == len(result.info["logprobs"]) == 10
    assert any(len(TOKENIZER.encode(prompt)) > len(slowly(prompt, 0)[0]) for prompt in PROMPTS)
    assert RUN.generate("see http:", token_healing=True, max_new_tokens=0).text == ""


def test_streams_and_bans():
    settings = {"token_healing": True, "max_new_tokens": 8, "seed": 4, "temperature": 1.5}
    plain = "".join(RUN.stream("see htt", **settings))
    result = RUN.generate("see htt", **settings)
    assert result.text == plain
    assert (
        TOKENIZER.decode([*RUN.heal(RUN.request("see htt", settings)).ids, *result.tokens])
        == "see htt" + plain
    )
    banned = RUN.generate("see htt", banned_strings=[plain[:2]], **settings).text
    assert plain[:2].lower() not in banned.lower() and banned != plain


def test_a_constraint_begins_behind_the_prompt():
    settings = {"token_healing": True, "max_new_tokens": 12, "seed": 4}
    for source in ("p://www|ps://ex", "[a-z]{4}", "p"):
        result = RUN.generate("see htt", constraint=Constraint("regex", source), **settings)
        assert result.finish_reason == "eos" and RUN.grammars.matcher("regex", source).skip(
            result.text
        )
    after = Constraint("regex", "[0-9]{3}", after=("t",))
    assert RUN.generate("see htt", constraint=after, **settings).text


def test_chats_and_token_ids_refuse_it():
    from dantinox.generation.api.generate_ids import generate

    with pytest.raises(UserError, match="token_healing has no effect on token ids"):
        generate(RUN.model, [[1, 2]], 2, token_healing=True)
    template = type(
        "Template", (), {"prompt": lambda *_, **__: ChatPrompt([1, 2], ""), "end_ids": ()}
    )()
    with pytest.raises(UserError, match="token_healing must be false in a chat"):
        RUN.chat("hello", template=template, token_healing=True)


@pytest.mark.slow
def test_healed_requests_in_a_slot_batch():
    run, slots = RUN, builder.make_slots(RUN, 3, CONTEXT)
    slots.compile(run.config)
    requests = [
        run.request(
            prompt, {"token_healing": heals, "max_new_tokens": 9, "seed": seed, **more}, logprobs=0
        )
        for seed, more in enumerate(({}, {"greedy": True}, {"banned_strings": ["e", "p"]}))
        for heals in (True, False)
        for prompt in PROMPTS
    ]

    def served(requests, **options):
        slots.reset()
        engine = Engine(run, slots, queue=99, **options)
        jobs = [engine.add(request) for request in requests]
        texts = {job: "" for job in jobs}
        while engine.busy:
            for output in engine.step():
                assert output.error is None
                texts[output.job] += output.text
        return [(texts[job], job.texts[0].tokens) for job in jobs]

    mixed = served(requests)
    assert [served([request])[0] for request in requests] == mixed
    assert served(requests[::-1], chunk_seconds=None, max_steps=2)[::-1] == mixed
    for request, (text, tokens) in zip(requests, mixed, strict=True):
        healed = run.heal(replace(request))
        assert TOKENIZER.decode([*healed.ids, *tokens]) == request.prompt + text
