"""The prefix cache: seeded requests are bitwise equal with and without it, for prompts that share
prefixes in any way.
"""

import copy
import itertools
import random
import shutil

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from dantinox.config import ExpertsConfig, LatentConfig, UserError
from dantinox.generation.engine import Engine
from dantinox.generation.prefix.prefix_cache import PrefixCache, block_bytes
from dantinox.generation.prefix.prefix_files import BLOCKS_FILE, fingerprint, read_blocks
from dantinox.generation.prefix.prefix_tree import PrefixTree
from dantinox.generation.request import GenerationRequest
from dantinox.run.manifest import MANIFEST

from . import builder
from .test_slot_batch import CONTEXT, DRAWN, decode, make, put

# --- the tree

SEQUENCES = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=9), st.sampled_from(["", "a"])), max_size=40
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SEQUENCES, st.integers(1, 6))
def test_the_tree_equals_a_table_of_prefixes(sequences, capacity):
    """The tree is compared with a table from prefix to pool index, from which the least recently
    used leaf is removed.
    """
    tree, table, last_use = PrefixTree(capacity, 2), {}, {}

    def is_before(key, other):
        return key != other and key[0] == other[0] and key[1] == other[1][: len(key[1])]

    def prefixes(ids):
        return [ids[:end] for end in range(2, len(ids) + 1, 2)]

    for now, (ids, salt) in enumerate(sequences):
        keys = [(salt, tuple(prefix)) for prefix in prefixes(ids)]
        known = next((n for n, key in enumerate(keys) if key not in table), len(keys))
        assert tree.match(ids, salt) == [table[key] for key in keys[:known]]
        last_use |= dict.fromkeys(keys[:known], now)
        count, new = tree.extend(ids, salt)
        assert count == known
        for key, index in zip(keys[known:], new, strict=False):
            if len(table) == capacity:
                leaves = [key for key in table if not any(is_before(key, other) for other in table)]
                oldest = min(last_use[leaf] for leaf in leaves)
                (removed,) = [key for key, place in table.items() if place == index]
                assert removed in leaves and last_use[removed] == oldest
                del table[removed], last_use[removed]
            assert index not in table.values()
            table[key] = index
            last_use |= dict.fromkeys(keys[: keys.index(key) + 1], now)
        assert len(new) == len(keys) - known or len(table) == capacity
        assert tree.used == len(table) <= capacity
        assert {(block.salt, block.tokens) for block in tree.blocks()} == {
            (s, p[-2:]) for s, p in table
        }


# --- the same bits

CASES = {
    "float32": ({"windows": (None,)}, {}),
    "ring": ({"windows": (48,)}, {}),
    "int8 cache": ({}, {"kv": {"dtype": "int8"}}),
    "sliding window": ({"windows": (48, None)}, {}),
    "short window": ({"windows": (24, None)}, {"kv": {"dtype": "int4"}}),
    "int2 cache": ({"windows": (24, None), "head_size": 32}, {"kv": {"dtype": "int2"}}),
    "latent": ({"latent": LatentConfig(12, 4, 6, query_rank=10), "kv_heads": 4}, {}),
    "experts": ({"experts": ExpertsConfig(4, 2, shared_dim=16), "softcap": 3.0}, {}),
    "bfloat16": ({"dtype": "bfloat16"}, {}),
    "int8 weights": ({}, {"generation": {"weights": "int8"}}),
    "drafts": (
        {"windows": (100, None)},
        {"generation": {"speculation": "ngram", "draft_tokens": 3}},
    ),
}
QUICK = ("sliding window",)  # full layers and ring buffers


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in CASES],
)
def served(request):
    changes, given = CASES[request.param]
    run, slots = make(settings=given, **changes)
    return run, builder.compile_few_steps(slots)


def conversations(seed, count=14, longest=CONTEXT - 40):
    """Returns random prompts, of which most continue or branch off from an earlier one."""
    chance, prompts = random.Random(seed), ["once upon a time " * 5]
    for _ in range(count):
        base = chance.choice(prompts)
        prefix = base[: chance.choice([len(base), chance.randint(0, len(base))])]
        new = "".join(chance.choices("abc de", k=chance.choice([1, 5, 16, 17, 40, 64, 90])))
        prompts.append((prefix + new)[:longest])
    return prompts


def outcome(run, slots, slot, prompt, **options):
    """Returns the tokens and log-probabilities of a request, and how many prompt tokens were in the
    prefix cache.
    """
    reused = put(run, slots, slot, prompt, limit=10, report=True, **options)
    tokens, infos = decode(slots)
    return tokens[slot], np.concatenate([info.logprob for info in infos[slot]]).tobytes(), reused


def cacheable(slots, ids):
    """Returns how many tokens of a prompt are computed by the program for whole chunks or by one
    with the same bits.
    """
    length = len(ids) - 1
    program = next(program for program in (16, 32, 64) if program >= length % 64)
    return length if length % 64 == 0 or program in slots._same_bits else length - length % 64


def expected_reuse(slots, ids, earlier):
    """Returns how many tokens are reused: whole blocks of a prefix that programs with the same bits
    compute in both prompts.
    """
    limit, size, best = cacheable(slots, ids), slots.prefix_status.size, 0
    for other in earlier:
        shared = next(
            (n for n, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b),
            min(len(ids), len(other)),
        )
        best = max(best, min(limit, cacheable(slots, other), shared) // size * size)
    return best


def test_prompts_with_shared_prefixes_are_bitwise_equal_without_the_prefix_cache(served):
    run, slots = served
    slots.reset()
    chance, earlier, total = random.Random(1), [], 0
    for prompt in conversations(0):
        settings, slot = chance.choice([DRAWN, {"greedy": True}]), chance.randrange(4)
        *found, reused = outcome(run, slots, slot, prompt, **settings)
        prefixes, slots._prefixes = slots._prefixes, None
        *expected, _ = outcome(run, slots, chance.randrange(4), prompt, **settings)
        slots._prefixes = prefixes
        assert found == expected
        ids = run.prompt_ids(prompt)
        assert reused == expected_reuse(slots, ids, earlier)
        earlier.append(ids)
        total += reused
    assert total > 500


def test_a_small_pool_replaces_blocks_and_salts_are_separate(served):
    run, slots = served
    size = slots.prefix_status.size
    capacity = 6 if size == 16 else 2
    small = builder.make_slots(
        run, 4, CONTEXT, prefix_cache=capacity * block_bytes(slots.plan.cache_shapes, size)
    )
    small._programs |= slots._programs
    small.compile(run.config)
    prompts, reused = conversations(2, count=18), 0
    for prompt in prompts:
        *found, count = outcome(run, small, 1, prompt, **DRAWN)
        assert found == [*outcome(run, slots, 2, prompt, **DRAWN)[:2]]
        reused += count
    status = small.prefix_status
    assert status.used == status.capacity == capacity and status.evictions > 4 and reused > 0
    slots.reset()
    salts = [
        outcome(run, slots, 0, prompts[-1] + "x" * 64, salt=salt, **DRAWN)[2]
        for salt in ("", "a", "b", "a", "")
    ]
    assert salts[:3] == [0, 0, 0] and salts[3] == salts[4] > 0


def test_sizes_that_are_refused(served):
    run, _ = served
    with pytest.raises(
        UserError, match=r"the prefix cache must be 0 or at least .* MB with this model, got 0.001"
    ):
        builder.make_slots(run, 4, CONTEXT, prefix_cache=1000)
    with pytest.raises(UserError, match=r"does not fit into the .* MB of free memory"):
        builder.make_slots(run, 4, CONTEXT, prefix_cache=1 << 50)
    assert (
        builder.make_slots(run, 4, CONTEXT, prefix_cache=0)._prefix_bytes
        == builder.make_slots(run, 4, 8)._prefix_bytes
        == 0
    )


def test_blocks_are_whole_chunks_if_the_place_of_a_token_changes_its_bits(served, monkeypatch):
    run, slots = served
    numbers = itertools.count()
    monkeypatch.setattr(PrefixCache, "checksum", lambda *args: str(next(numbers)))
    prefixes = slots._make_prefix_cache()
    assert prefixes.size == slots.prefill_chunk == 64 and prefixes.same_bits == ()
    monkeypatch.setattr(PrefixCache, "checksum", lambda *args: "equal")
    prefixes = slots._make_prefix_cache()
    keeps_places = slots.prefix_status.size == 16
    assert (prefixes.size, prefixes.same_bits) == ((16, (16, 32)) if keeps_places else (64, ()))


# --- responses


def finish(engine):
    """Runs an engine until it has nothing to do."""
    outputs = engine.step()
    while engine.busy or not engine.idle:
        outputs += engine.step()
    return outputs


def ids_of(outputs, job):
    return [token for output in outputs if output.job is job for token in output.ids]


def test_the_next_turn_reuses_prompt_and_response(served):
    run, slots = served
    slots.reset()
    engine = Engine(run, slots)
    config = run.settings({**DRAWN, "seed": 5, "max_new_tokens": 90, "ignore_eos": True})
    first = tuple(run.prompt_ids("once upon a time " * 5))
    job = engine.add(GenerationRequest(first, config))
    turn = (*first, *ids_of(finish(engine), job), *run.prompt_ids(" and then " * 3))
    size = slots.prefix_status.size
    again = engine.add(GenerationRequest(turn, config))
    found = ids_of(finish(engine), again)
    assert again.stats.reused_tokens == min(len(first) + 90, cacheable(slots, turn)) // size * size
    prefixes, slots._prefixes = slots._prefixes, None
    try:
        alone = engine.add(GenerationRequest(turn, config))
        assert ids_of(finish(engine), alone) == found and alone.stats.reused_tokens == 0
    finally:
        slots._prefixes = prefixes


def test_a_request_interrupts_the_prefill_of_a_response(served):
    run, slots = served
    slots.reset()
    engine = Engine(run, slots)
    config = run.settings({**DRAWN, "seed": 6, "max_new_tokens": 250, "ignore_eos": True})
    first = tuple(run.prompt_ids("a long story "))
    job, outputs = engine.add(GenerationRequest(first, config)), []
    while engine.busy:
        outputs += engine.step()
    engine.step()  # the second chunk of the response; others remain
    assert not engine.idle
    other = engine.add(
        GenerationRequest(
            tuple(run.prompt_ids("nobody asks")), run.settings({**DRAWN, "max_new_tokens": 8})
        )
    )
    while engine.busy:
        outputs += engine.step()
    assert len(ids_of(outputs, other)) == 8
    finish(engine)
    whole = (*first, *ids_of(outputs, job))
    assert len(slots._prefixes.match(whole, "")) == len(whole) // slots.prefix_status.size


# --- files


@pytest.fixture(scope="module")
def saved(served, tmp_path_factory):
    """Returns a folder with the blocks of three prompts, the prompts, and another batch that has
    restored the blocks.
    """
    run, slots = served
    folder, prompts = tmp_path_factory.mktemp("prefixes"), conversations(3, count=3)

    def start():
        batch = builder.make_slots(run, 4, CONTEXT, cache_dir=folder)
        batch._programs |= slots._programs
        batch.compile(run.config)
        return batch

    batch = start()
    assert batch.prefix_status.used == 0
    for prompt in prompts:
        outcome(run, batch, 0, prompt, salt="secret")
    reused = [outcome(run, batch, 1, prompt, salt="secret")[2] for prompt in prompts]
    assert batch.prefix_writer()() == batch.prefix_status.used > 0
    return folder, list(zip(prompts, reused, strict=True)), start()


def test_saved_blocks_are_restored(served, saved):
    (run, slots), (folder, prompts, batch) = served, saved
    assert b"secret" not in (folder / BLOCKS_FILE).read_bytes()
    assert outcome(run, batch, 2, prompts[0][0], **DRAWN)[2] == 0, "the salt differs"
    for prompt, reused in prompts:
        *found, count = outcome(run, batch, 2, prompt, salt="secret", **DRAWN)
        assert count == reused and found == [*outcome(run, slots, 3, prompt, **DRAWN)[:2]]


def test_damaged_and_foreign_files_are_named_and_ignored(served, saved, tmp_path, caplog):
    (_, slots), (folder, _, batch) = served, saved
    pool, size = slots._prefixes.pool, slots.prefix_status.size
    name = fingerprint(batch._prefill_programs, batch._weights(), batch._prefixes.probe)
    content = (folder / BLOCKS_FILE).read_bytes()
    chance = random.Random(0)
    for place in [
        0,
        9,
        200,
        len(content) - 1,
        *(chance.randrange(len(content)) for _ in range(30)),
    ]:
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        changed = bytearray(content)
        changed[place] ^= 1 << chance.randrange(8)
        (tmp_path / BLOCKS_FILE).write_bytes(changed)
        caplog.clear()
        assert read_blocks(tmp_path, pool, name, size) is None
        (message,) = caplog.messages
        assert str(tmp_path / BLOCKS_FILE) in message and "is damaged" in message
    for broken in (content[:100], b""):
        (tmp_path / BLOCKS_FILE).write_bytes(broken)
        assert read_blocks(tmp_path, pool, name, size) is None
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / MANIFEST).unlink()
    assert read_blocks(tmp_path, pool, name, size) is None
    caplog.clear()
    assert read_blocks(folder, pool, "another", size) is None
    assert "was written with another model" in caplog.text
    assert read_blocks(tmp_path / "missing", pool, name, size) is None


def test_blocks_of_new_weights_are_saved_and_restored(served, tmp_path, caplog):
    (run, slots), prompt = served, conversations(5, count=1)[-1]
    other = copy.copy(run)
    other.model, other._prepared = nnx.clone(run.model), {}
    other.model.embed = nnx.Param(run.model.embed[...] * 1.01)

    def start(model):
        batch = builder.make_slots(model, 4, CONTEXT, cache_dir=tmp_path)
        batch._programs |= slots._programs
        batch.compile(model.config)
        return batch

    batch = start(run)
    outcome(run, batch, 0, prompt)
    batch.replace_weights(batch.prepare_weights(other))
    *expected, reused = outcome(other, batch, 0, prompt, **DRAWN)
    assert reused == 0 and expected != [*outcome(run, slots, 0, prompt, **DRAWN)[:2]]
    assert batch.prefix_writer()() == batch.prefix_status.used > 0
    *found, reused = outcome(other, start(other), 1, prompt, **DRAWN)
    assert found == expected and reused > 0 and not caplog.messages
    assert start(run).prefix_status.used == 0 and "was written with another model" in caplog.text


def test_the_fingerprint_depends_on_every_weight():
    dtypes = np.float32, ml_dtypes.bfloat16, np.int8
    weights = [
        np.ones(size, dtype).reshape(-1, 2) for size, dtype in zip((2, 2, 4), dtypes, strict=True)
    ]
    names = {
        fingerprint(["p"], weights, "probe"),
        fingerprint(["q"], weights, "probe"),
        fingerprint(["p"], weights, "other"),
    }
    for number, leaf in enumerate(weights):
        for element in range(leaf.size):
            changed = leaf.copy()
            changed.reshape(-1)[element] += 1
            names.add(
                fingerprint(["p"], [*weights[:number], changed, *weights[number + 1 :]], "probe")
            )
    assert len(names) == 3 + 2 + 2 + 4
