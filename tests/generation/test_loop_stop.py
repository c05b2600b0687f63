"""Tests that loop detection ends samples at the same token in every batch, chunk length and after
restarts.
"""

import numpy as np
import pytest

from dantinox.config import GenerationSection
from dantinox.generation.api.generate_ids import generate
from dantinox.generation.engine import Engine
from dantinox.generation.request import GenerationRequest
from dantinox.sampling.loops import ends_in_loop

from . import builder

RULE = {"loop_max_period": 6, "loop_min_repeats": 2, "loop_min_tokens": 4}
PROMPTS = builder.prompts(3, 7, 5, 4)


def truncated(tokens, section):
    """Returns the tokens up to the first loop."""
    ends = (end for end in range(1, len(tokens) + 1) if ends_in_loop(tokens[:end], section))
    return tokens[: next(ends, len(tokens))]


def test_loop_stop_ends_rows_where_the_text_begins_to_repeat():
    ids, lengths = builder.padded(PROMPTS)
    options = {"greedy": True, "allowed_tokens": [*range(4)]}
    looped, info = generate(
        builder.model(),
        ids,
        40,
        prompt_lengths=lengths,
        loop_stop=True,
        **RULE,
        **options,
        return_info=True,
    )
    section = GenerationSection(loop_stop=True, **RULE)
    ended = 0
    for row, (length, prompt) in enumerate(zip(lengths, PROMPTS, strict=True)):
        expected = truncated(builder.slowly(builder.model(), prompt, 40, **options), section)
        assert looped[row, length : info["lengths"][row]].tolist() == expected
        assert info["reasons"][row] == ("loop" if len(expected) < 40 else "length")
        ended += len(expected) < 40
    assert ended > 0


def served(run, slots, requests, **options):
    slots.reset()
    engine = Engine(run, slots, queue=99, **options)
    jobs = [engine.add(request) for request in requests]
    logprobs = {job: [] for job in jobs}
    while engine.busy:
        for output in engine.step():
            if output.steps is not None:
                logprobs[output.job] += output.steps.logprob_sampled.tolist()
    return [(job.texts[0].tokens, job.texts[0].finish_reason, logprobs[job]) for job in jobs]


@pytest.mark.slow
def test_loops_are_the_same_alone_in_a_mixed_batch_and_in_any_chunks():
    run, slots = builder.slot_batch((None, None), "all")
    few = {"allowed_tokens": [97, 98, 99, 100], "max_new_tokens": 60, "ignore_eos": True}
    chosen = [
        {"loop_stop": True, **RULE, "temperature": 0.6},
        {"loop_temperature_factor": 5.0, **RULE, "temperature": 0.3},
        {
            "loop_temperature_factor": 5.0,
            **RULE,
            "temperature": 0.3,
            "banned_strings": ["ab", "cc"],
        },
        {"loop_stop": True, **RULE, "temperature": 0.6, "banned_strings": ["ba"]},
        {"temperature": 0.3},
    ]
    requests = [
        GenerationRequest((*b"abcab",), run.settings({**few, **settings, "seed": seed}), logprobs=0)
        for seed in range(3)
        for settings in chosen
    ]
    mixed = served(run, slots, requests)
    assert {reason for _, reason, _ in mixed} == {"loop", "length"}
    assert [served(run, slots, [request])[0] for request in requests] == mixed
    assert served(run, slots, requests[::-1], chunk_seconds=None, max_steps=3)[::-1] == mixed
    for (tokens, reason, _), request in zip(mixed, requests, strict=True):
        section = request.config.generation
        if section.loop_stop:
            assert truncated(tokens, section) == tokens and (reason == "loop") == ends_in_loop(
                tokens, section
            )
    plain = [
        request for request in requests if request.config.generation.loop_temperature_factor == 1
    ]
    heated = [
        tokens
        for (tokens, _, _), request in zip(mixed, requests, strict=True)
        if request not in plain
    ]
    assert any(not np.array_equal(tokens, mixed[4][0]) for tokens in heated)
