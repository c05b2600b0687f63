"""The clarify text: where it is inserted, in any batch, chunk and program, and what it cannot be
combined with.
"""

import json
from itertools import groupby

import jax
import numpy as np
import pytest

from dantinox.config import UserError, overlay
from dantinox.generation import generate
from dantinox.generation.api.trace import trace_document
from dantinox.generation.decode import drafts
from dantinox.generation.decode.generate_toks import _generate_toks
from dantinox.generation.engine import Engine
from dantinox.generation.guides.constraints import Constraint
from dantinox.generation.request import GenerationRequest
from dantinox.generation.static_batch import StaticBatch, StaticOptions
from dantinox.sampling import SamplingParams
from tests.conftest import CIRCLE
from tests.error_texts import ERRORS

from . import builder
from .test_router import ENTROPY, slowly

STEPS = 24
# (clarify ids, other settings); the texts of a row may be forbidden, or end with a token after
# which the text goes on
ROWS = [
    ((5, 6, 8), {"clarify_cooldown": 2}),
    ((9,), {"clarify_cooldown": 0}),
    ((1, 2, 3, 4, 5, 6, 8, 9, 11, 12), {"clarify_cooldown": 1, "repetition_penalty": 1.3}),
    ((5, 6, 8), {"clarify_cooldown": 3, "banned_tokens": [6]}),
    ((), {"clarify_token": 7, "clarify_cooldown": 3}),
    ((13, 14), {"clarify_cooldown": 3, "banned_tokens": [13]}),
]


def run_rows(rows, prompts, chunks, seeds):
    """Returns tokens and reports of rows `(clarify ids, settings)`, decoded in chunks of these
    sizes.
    """
    texts = [{"clarify_text": "x"} if ids else {} for ids, _ in rows]
    columns = zip(rows, texts, seeds, strict=True)
    given = [ENTROPY | own | text | {"seed": seed} for (_, own), text, seed in columns]
    tokens, lengths = builder.padded(prompts)
    params = SamplingParams.build(given, vocab_size=builder.V, clarify_ids=[ids for ids, _ in rows])
    limits = np.full(len(rows), STEPS)
    options = StaticOptions(report=2)
    batch = StaticBatch(
        builder.model(),
        tokens,
        lengths,
        params,
        limits_B=limits,
        eos_ids=[[]] * len(rows),
        options=options,
    )
    parts = [batch.start(), *(batch.advance(size) for size in chunks)]
    info = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *[part.info for part in parts])
    return np.concatenate([part.tokens for part in parts], axis=1), info


def test_texts_are_inserted_where_the_host_inserts_them():
    """Tokens and marks equal those of the host on the whole sequence, with penalties and forbidden
    tokens, in every row.
    """
    seeds = [50 + b for b in range(len(ROWS))]
    prompts = builder.prompts(*(2 + 2 * b for b in range(len(ROWS))), seed=8)
    tokens, info = run_rows(ROWS, prompts, [STEPS - 1], seeds)
    inserted = 0
    for b, ((ids, own), seed, prompt) in enumerate(zip(ROWS, seeds, prompts, strict=True)):
        text, details = slowly(builder.model(), prompt, STEPS, ENTROPY | own, seed, True, ids)
        assert tokens[b].tolist() == text, b
        assert info.routed.forced[b].tolist() == [bool(forced) for _, forced, *_ in details], b
        inserted += sum(forced for _, forced, *_ in details) if ids else 0
    assert inserted > 15


def test_rows_depend_neither_on_chunks_nor_on_other_rows():
    prompts = builder.prompts(3, 6, 5, 4, 7, 6, seed=3)
    seeds = [7, 8, 9, 10, 11, 12]
    whole, info = run_rows(ROWS, prompts, [STEPS - 1], seeds)
    for chunks in ([1] * 5 + [STEPS - 6], [7, 16]):
        found, reports = run_rows(ROWS, prompts, chunks, seeds)
        assert found.tolist() == whole.tolist()
        assert jax.tree.map(lambda x, y: np.array_equal(x, y), reports, info) == jax.tree.map(
            lambda _: True, info
        )
    for b in (0, 2):  # the same program, with another row in all other places
        others = [ROWS[b] if place == 3 else ROWS[1] for place in range(len(ROWS))]
        moved = [prompts[b] if place == 3 else prompts[-1] for place in range(len(ROWS))]
        assert (
            run_rows(others, moved, [STEPS - 1], [seeds[b]] * len(ROWS))[0][3].tolist()
            == whole[b].tolist()
        )


def test_a_new_text_compiles_nothing():
    prompts = builder.prompts(3, 6, 5, 4, 7, 6, seed=3)
    run_rows(ROWS, prompts, [STEPS - 1], [1] * 6)
    programs = _generate_toks.jitted_fn._cache_size()
    run_rows(
        [(tuple(range(1, 2 + 9 * b)), {"clarify_cooldown": b}) for b in range(6)],
        prompts,
        [STEPS - 1],
        [1] * 6,
    )
    assert _generate_toks.jitted_fn._cache_size() == programs


# With these thresholds and the model `circle`, the text begins after every byte that is not in
# `CIRCLE`: each byte of `CIRCLE` has one successor, and any byte follows the other ones.
ASKS = {
    "strategy": "entropy", "use_attention": False, "low_entropy": 1.0, "low_varentropy": 10.0,
    "clarify_entropy": 3.0, "high_entropy": 3.0, "high_varentropy": 10.0, "clarify_text": "[?] a",
    "clarify_cooldown": 6,
}  # fmt: skip


def test_thirty_prompts_get_the_text_once_where_it_fires():
    """Streams equal the whole texts; the text occurs once, at the known place, and the model
    continues after its last byte.
    """
    run = builder.circle()
    options = ASKS | {"max_new_tokens": 20, "ignore_eos": True}
    circle = CIRCLE * 3
    for number in range(30):
        start = CIRCLE[number % len(CIRCLE) :][:1]
        clear = number % 3 == 0
        prompt = f"{number} {start}" if clear else f"{number} {start}#"
        expected = (
            circle[circle.index(start) + 1 :] if clear else ASKS["clarify_text"] + circle[1:]
        ).encode()[:20]
        result = run.generate(prompt, seed=number, logprobs=0, **options)
        assert bytes(result.tokens) == expected
        assert result.info["forced"] == [not clear and place < 5 for place in range(20)]
        assert "".join(run.stream(prompt, seed=number, **options)) == result.text


def test_traces_and_reports_mark_inserted_tokens():
    run = builder.circle()
    result = run.generate("#", seed=1, logprobs=2, max_new_tokens=9, **ASKS)
    document = json.loads(json.dumps(trace_document(result, run.tokenizer)))
    assert [token["forced"] for token in document["tokens"]] == [True] * 5 + [False] * 4
    assert document["settings"]["clarify_text"] == "[?] a"
    np.testing.assert_allclose(
        [token["logprob"] for token in document["tokens"]],
        [builder.log_softmax(builder.all_logits(run.model, [35, *result.tokens])[i])[t] for i,
         t in enumerate(result.tokens)],
        rtol=0, atol=builder.LOGPROB_TOLERANCE,
    )  # fmt: skip


def test_ends_and_stop_strings_inside_the_text():
    run = builder.circle()
    stopped = run.generate("#", seed=1, max_new_tokens=9, stop=["?]"], **ASKS)
    assert (stopped.text, stopped.finish_reason) == ("[", "stop")
    ended = run.generate(
        "#", seed=1, max_new_tokens=9, stop_token_ids=["]"], keep_stop=True, **ASKS
    )
    assert (ended.text, ended.finish_reason) == ("[?]", "stop")
    cut = run.generate("#", seed=1, max_new_tokens=3, **ASKS)
    assert (cut.text, cut.finish_reason) == ("[?]", "length")


def test_a_banned_string_inside_the_text_ends_it():
    """Generation goes back to the first token of the banned string, which ends the text there."""
    run = builder.circle()
    result = run.generate("#", seed=4, max_new_tokens=12, logprobs=0, banned_strings=["?]"], **ASKS)
    assert "?]" not in result.text and result.text.startswith("[")
    assert result.info["forced"][:2] == [True, False]
    later = run.generate("#", seed=4, max_new_tokens=12, logprobs=0, banned_strings=["è€"], **ASKS)
    assert later.text.startswith("[?] a") and "è€" not in later.text
    assert later.info["forced"] == [True] * 5 + [False] * 7, (
        "a row that starts again after its text does not repeat it"
    )


@pytest.mark.parametrize(
    "changes",
    [{"use_cache": False}, {"speculation": "ngram", "ngram_size": 1}, {"kv_dtype": "int8"}],
)
def test_other_ways_to_decode(changes, monkeypatch):
    """Drafts change no token of a text and around it; the text is also inserted without a cache and
    with a quantized one.
    """
    monkeypatch.setattr(drafts, "SINGLE_ROW_COST", 1e6)  # verification always pays off
    run = builder.circle()
    options = ASKS | {"max_new_tokens": 30, "seed": 2}
    result = run.generate("a#", **options, **changes)
    assert result.tokens == run.generate("a#", **options).tokens
    assert (result.stats["accepted_draft_tokens"] > 5) == ("speculation" in changes)


def served(run, slots, requests, **options):
    """Returns the tokens of each request and their marks."""
    slots.reset()
    engine = Engine(run, slots, queue=99, **options)
    jobs = [engine.add(request) for request in requests]
    marks = {job: [] for job in jobs}
    while engine.busy:
        for output in engine.step():
            assert output.error is None
            if output.steps is not None and output.steps.routed is not None:
                marks[output.job] += output.steps.routed.forced.tolist()
    return [(job.texts[0].tokens, marks[job]) for job in jobs]


def test_a_server_gives_the_texts_of_a_solo_run():
    """In slots, requests with different texts, without one, and with restarts have their tokens
    alone, in any chunks.
    """
    run = builder.circle()
    slots = builder.make_slots(run, 3, run.model.config.max_context)
    chosen = [
        {"clarify_text": "[?] a"},
        {"clarify_text": "no\n??", "clarify_cooldown": 0, "repetition_penalty": 1.2},
        {"clarify_text": "[?] a", "banned_strings": ["?]"]}, {"clarify_text": "long " * 20 + "#"},
    ]  # fmt: skip
    plain = {
        name: value
        for name, value in ASKS.items()
        if name not in ("clarify_text", "clarify_cooldown")
    }
    requests = [
        GenerationRequest(
            (*b"ab" * 35, 35),
            overlay(run.config, own | {"seed": n, "max_new_tokens": 40}),
            logprobs=0,
        )
        for n, own in enumerate([*(ASKS | own for own in chosen), plain])
    ]
    programs = {slots.program_key(request.config) for request in requests}
    assert len(programs) == 2, "requests without a text have the program that they had before"
    with builder.few_steps():
        for request in (requests[0], requests[-1]):
            slots.compile(request.config)
    mixed = served(run, slots, requests)
    assert [served(run, slots, [request])[0] for request in requests] == mixed
    assert served(run, slots, requests[::-1], chunk_seconds=None, max_steps=3)[::-1] == mixed
    assert sum(slots.reused_tokens(slot) for slot in range(3)) > 0, (
        "the prefix cache has the prompt"
    )
    offline = run.complete(requests)
    assert [(result.tokens, result.info["forced"]) for result in offline] == mixed
    lengths = [[len([*group]) for forced, group in groupby(marks) if forced] for _, marks in mixed]
    assert (lengths[0], lengths[2], lengths[3], lengths[4]) == ([5], [1], [40], [])


def test_refusals():
    run = builder.circle()
    with pytest.raises(UserError, match=ERRORS["router_clarify_text_cannot_be"]):
        run.generate("a", constraint=Constraint("regex", "[ab]+"), seed=1, **ASKS)
    with pytest.raises(UserError, match=ERRORS["router_clarify_text_must_be_at_most"]):
        run.generate("a", seed=1, **ASKS | {"clarify_text": "x" * 257})
    with pytest.raises(UserError, match="clarify_text has no effect on token ids"):
        generate(builder.model(), [[1, 2]], 3, clarify_text="x", strategy="entropy")
    with_token = overlay(run.config, {"strategy": "entropy", "clarify_token": 3})
    assert overlay(with_token, {"clarify_text": "x"}).router.clarify_token is None, (
        "a request replaces the token of the run"
    )
    with pytest.raises(
        UserError, match=r"router\.clarify_text must be null if router\.clarify_token is set"
    ):
        overlay(run.config, {"strategy": "entropy", "clarify_token": 3, "clarify_text": "x"})
