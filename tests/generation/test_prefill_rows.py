"""Several prompts are prefilled in one pass. Their keys and log-probabilities have the same bits as
those of prompts alone.
"""

import random
from dataclasses import replace

import numpy as np
import pytest

from dantinox.config import UserError
from dantinox.generation.decode.prompt_scope import PromptScope
from dantinox.generation.engine import Engine
from dantinox.generation.request import GenerationRequest
from dantinox.model.cache import FullLayer

from . import builder
from .test_slot_batch import CONTEXT, DRAWN, decode, make

WINDOW = 48
CASES = {
    "float32": {"windows": (None,)},
    "sliding window": {"windows": (WINDOW, None)},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[] if n == "float32" else pytest.mark.slow) for n in CASES],
)
def served(request):
    run, _ = make(**CASES[request.param])
    return run, builder.compile_few_steps(builder.make_slots(run, 4, CONTEXT, prefill_rows=4))


@pytest.fixture(params=["narrow", "wide", "wide, one program"])
def mode(request, served, monkeypatch):
    """Runs a test on a batch as on a CPU, and on one as on an accelerator, with the programs of a
    CPU.
    """
    slots = served[1]
    if slots._row_counts != (1, 4):
        assert slots._row_counts == (1,)
        pytest.skip("on this machine, programs with several rows compute other bits")
    if request.param == "narrow":
        plan = replace(slots.plan, prefers_passes=False)
    else:
        plan = replace(slots.plan, prefers_passes=True, lengths=(64,))
        monkeypatch.setattr(slots._prefixes, "same_bits", ())
    monkeypatch.setattr(slots, "plan", plan)
    monkeypatch.setattr(
        slots, "_row_counts", (4,) if request.param == "wide, one program" else (1, 4)
    )
    slots.reset()
    return request.param


def keys(slots, slot):
    """Returns the bytes of the keys and values of the prefilled tokens of a slot."""
    length, found = slots._rows[slot].prefilled, []
    for layer in slots.caches[0].layers:
        if isinstance(layer, FullLayer):
            store, places = layer.contents(np.zeros(slots.count, np.int32))[0], np.arange(length)
        else:
            store, places = (
                layer.store,
                np.arange(max(0, length - WINDOW), length) % layer.store.slots,
            )
        k_KHS, v_KSH = (np.asarray(leaf)[slot] for leaf in (store.k_BKHS, store.v_BKSH))
        found += [k_KHS[..., places].tobytes(), v_KSH[:, places].tobytes()]
    return found


def alone(run, slots, ids, settings):
    """Returns the keys, tokens and log-probabilities of a prompt that is prefilled by the programs
    for one row.
    """
    prefixes, counts, slots._prefixes, slots._row_counts = (
        slots._prefixes,
        slots._row_counts,
        None,
        (1,),
    )
    slots.assign_prompt(1, ids)
    while slots.prefill(1):
        pass
    slots._prefixes, slots._row_counts = prefixes, counts
    found = keys(slots, 1)
    slots.start_decoding(1, slots.row_params(settings), limit=3, report=True)
    tokens, infos = decode(slots)
    return found, tokens[1], np.concatenate([info.logprob for info in infos[1]]).tobytes()


def test_random_groups_of_prompts_have_the_bits_of_single_prompts(served, mode):
    run, slots = served
    chance, settings = random.Random(mode), run.settings({"seed": 3, "max_new_tokens": 3} | DRAWN)
    shared = [chance.randrange(256) for _ in range(CONTEXT)]
    for number in range(4):
        prompts = []
        for _ in range(4):
            length = chance.choice(
                [
                    1,
                    2,
                    64,
                    65,
                    129,
                    chance.randrange(1, CONTEXT - 3),
                    chance.randrange(100, CONTEXT - 3),
                ]
            )
            prefix = shared[: chance.choice([0, 0, chance.randrange(length)])]
            prompts.append([*prefix, *(chance.randrange(256) for _ in range(length - len(prefix)))])
        if number == 0:
            prompts = [prompt + shared[: 300 - len(prompt)] for prompt in prompts]
        assigned, left = set(), dict.fromkeys(range(4), 1)
        while left:  # the prompts arrive in random groups
            for slot in left.keys() - assigned:
                if chance.random() < 0.6:
                    slots.assign_prompt(slot, prompts[slot], scope=PromptScope(f"{mode}{number}"))
                    assigned.add(slot)
            group = sorted(left.keys() & assigned)
            chance.shuffle(group)
            for slot, rest in zip(group, slots.prefill_together(group), strict=True):
                left[slot] = rest
            left = {slot: rest for slot, rest in left.items() if rest or slot not in assigned}
        found = [keys(slots, slot) for slot in range(4)]
        for slot in range(4):
            slots.start_decoding(slot, slots.row_params(settings), limit=3, report=True)
        tokens, infos = decode(slots)
        for slot, ids in enumerate(prompts):
            logprobs = np.concatenate([info.logprob for info in infos[slot]]).tobytes()
            assert (found[slot], tokens[slot], logprobs) == alone(run, slots, ids, settings)


def requests(run, lengths, new):
    config = run.settings({**DRAWN, "seed": 1, "max_new_tokens": new, "ignore_eos": True})
    chance = random.Random(sum(lengths))
    return [
        GenerationRequest(tuple(chance.randrange(256) for _ in range(length)), config)
        for length in lengths
    ]


def finish(engine, jobs):
    outputs = []
    while engine.busy:
        outputs += engine.step()
    return [
        [token for output in outputs if output.job is job for token in output.ids] for job in jobs
    ]


def test_the_engine_prefills_waiting_prompts_together(served, mode, monkeypatch):
    run, slots = served
    passes, run_chunks = [], slots._run_chunks
    monkeypatch.setattr(
        slots, "_run_chunks", lambda chunks: passes.append(len(chunks)) or run_chunks(chunks)
    )
    together = requests(run, (200, 201, 202, 203), 4)
    engine = Engine(run, slots)
    found = finish(engine, [engine.add(request) for request in together])
    assert passes == ([4] * 3 + [1] * 4 if mode == "narrow" else [4] * 4), (
        "three whole chunks of each prompt and a short one"
    )
    slots.reset()
    for request, tokens in zip(together, found, strict=True):
        engine = Engine(run, slots)
        assert finish(engine, [engine.add(request)]) == [tokens]


def test_identical_prompts_are_computed_once(served, mode, monkeypatch):
    run, slots = served
    chunks, run_chunks = [], slots._run_chunks
    monkeypatch.setattr(slots, "_run_chunks", lambda part: chunks.extend(part) or run_chunks(part))
    (request,) = requests(run, (257,), 4)
    engine = Engine(run, slots)
    jobs = [engine.add(request) for _ in range(4)]
    first, *others = finish(engine, jobs)
    assert others == [first] * 3
    assert len(chunks) == 4
    assert [job.stats.reused_tokens for job in jobs] == [0, 256, 256, 256]


def test_a_long_prompt_stalls_streams_for_one_pass_at_most(served, mode, monkeypatch):
    run, slots = served
    passes, run_chunks = [], slots._run_chunks
    monkeypatch.setattr(
        slots, "_run_chunks", lambda chunks: passes.append(len(chunks)) or run_chunks(chunks)
    )
    engine = Engine(run, slots)
    streams = [engine.add(request) for request in requests(run, (5, 6), 200)]
    while any(stream.stats.new_tokens < 2 for stream in streams):
        engine.step()
    long, short = (engine.add(request) for request in requests(run, (300, 41), 4))
    while long.stats.new_tokens == 0:
        passes.clear()
        outputs = engine.step()
        assert passes in ([], [1]) if mode == "narrow" else len(passes) <= 1
        assert {output.job for output in outputs} >= set(streams), "no stream pauses"
        if short.stats.new_tokens == 0:
            assert long.stats.new_tokens == 0
    finish(engine, [])


def test_unequal_bits_limit_the_rows(served, mode, monkeypatch):
    run, slots = served
    numbers = iter(range(100))
    monkeypatch.setattr(
        "dantinox.generation.slot_prefill.slot_checksums", lambda cache: np.array([next(numbers)])
    )
    assert slots.measure_rows() == (1,)
    results = iter([1, 2, 1, 1])  # together; one row; the same places alone and in another order
    monkeypatch.setattr(
        "dantinox.generation.slot_prefill.slot_checksums", lambda cache: np.array([next(results)])
    )
    assert slots.measure_rows() == ((1,) if mode == "narrow" else (4,))


def test_prefill_rows_in_range(served):
    run, slots = served
    for rows in (0, 17):
        with pytest.raises(UserError, match=rf"^prefill_rows must be in \[1, 16\], got {rows}$"):
            builder.make_slots(run, 4, CONTEXT, prefill_rows=rows)
    assert builder.make_slots(run, 2, CONTEXT, prefill_rows=4)._row_counts == (1, 2)
    assert builder.make_slots(run, 4, CONTEXT)._row_counts == (1,), "the default on a CPU"
