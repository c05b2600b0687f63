"""Adapters and compressed caches with rare model settings, against merged weights, full attention
and NumPy.
"""

from dataclasses import replace
from itertools import pairwise

import jax
import numpy as np
import pytest

from dantinox.config import LoraConfig, RopeScaling
from dantinox.model import Compression
from dantinox.model.cache import make_cache
from dantinox.model.lora import projections
from dantinox.model.parameters import abstract_model
from dantinox.run.adapters import AdapterDelta, merge_adapters

from . import reference
from .builder import config, quick, shaken, texts
from .builder import places as positions_of
from .kv_reference import HeadReference

PROMPT, STEPS, SLOTS = 12, 7, 24
DECAYS, WINDOW, POOL, SINKS, RECENT = (0.98, 0.6), 4, 3, 1, 2
NEAR = 1e-4  # a decision closer than this may differ in float32
VARIANTS = {
    "parallel blocks, multipliers": {
        "parallel_blocks": True,
        "norm": "layernorm",
        "norm_bias": False,
        "activation": "gelu",
        "mlp_bias": True,
        "query_pre_attn_scalar": 9.0,
        "partial_rotary_factor": 0.5,
        "residual_multiplier": 0.3,
        "embedding_multiplier": 2.5,
        "logits_scaling": 1.7,
    },
    "norms without scales": {
        "norm_scale": False,
        "norm_embeddings": True,
        "qk_norm": True,
        "qk_norm_after_rope": True,
        "activation": "relu2",
    },
    "norms of rotated heads, queries that grow": {
        "qk_norm": True,
        "qk_norm_after_rope": True,
        "query_scaling_beta": 0.7,
        "rope_scaling": RopeScaling("yarn", 4.0, 3, beta_fast=8.0),
        "qkv_bias": True,
    },
    "a window, parallel blocks without scales": {
        "norm": "layernorm",
        "norm_scale": False,
        "parallel_blocks": True,
        "residual_multiplier": 0.5,
        "windows": (6, None),
        "unrotated": (1,),
    },
}


def each(quick: str):
    """Tests one variant in the default run and all others in the slow one."""
    return pytest.mark.parametrize(
        "name",
        [
            name if name == quick else pytest.param(name, marks=pytest.mark.slow)
            for name in VARIANTS
        ],
    )


def run_of(model):
    """Returns the compiled logits of a model, (tokens, positions, cache) -> (logits, cache)."""
    build, shapes = abstract_model(model)
    run = quick(
        lambda weights, tokens, positions, cache=None: build(weights)(
            tokens, positions, cache=cache
        )[:2]
    )
    return run, {path: np.asarray(leaf) for path, leaf in drawn(shapes).items()}


def drawn(shapes):
    """Returns random weights of these shapes, as `builder.shaken` draws them."""
    nested: dict = {}
    for path, leaf in shapes.items():
        *parents, name = path.split("/")
        part = nested
        for parent in parents:
            part = part.setdefault(parent, {})
        part[name] = np.zeros(leaf.shape, leaf.dtype)
    made = shaken(nested, seed=3)

    def at(path):
        part = made
        for name in path.split("/"):
            part = part[name]
        return part

    return {path: at(path) for path in shapes}


def nested(weights):
    """Returns the weights as nested dicts in float64, layers by index, as the reference reads
    them.
    """
    result: dict = {}
    for path, array in weights.items():
        *parents, name = path.split("/")
        part = result
        for parent in parents:
            part = part.setdefault(int(parent) if parent.isdigit() else parent, {})
        part[name] = np.float64(array)
    return result


@each("parallel blocks, multipliers")
def test_adapters_equal_merged_weights(name):
    """For every projection of a layer: logits to 1e-5 of the largest."""
    plain = config(**VARIANTS[name])
    targets = projections(plain.activation)
    tuned = replace(plain, lora=LoraConfig(2, 3.0, tuple(targets)))
    run, weights = run_of(tuned)
    changes: dict = {}
    for path in weights:
        if path.endswith("lora_a"):
            module, _, target = path.removesuffix("/lora_a").rpartition("/")
            a, b = weights[path], weights[f"{module}/{target}/lora_b"]
            change = AdapterDelta(targets[target], a.reshape(-1, 2), 0.3 * b.reshape(2, -1), 1.5)
            weights[f"{module}/{target}/lora_b"] = 0.3 * b
            changes.setdefault(f"{module}/kernel", []).append(change)
    assert len(changes) == 2 * len({place.module for place in targets.values()})
    base = {path: array for path, array in weights.items() if "lora_" not in path}
    tokens_BT, positions_BT = texts((2, 9)), positions_of(2, 9)
    logits_BTV = np.asarray(run(weights, tokens_BT, positions_BT)[0])
    run, _ = run_of(plain)
    both = (
        base,
        {path: merge_adapters(array, changes.get(path, [])) for path, array in base.items()},
    )
    before_BTV, after_BTV = (
        np.asarray(run(weights, tokens_BT, positions_BT)[0]) for weights in both
    )
    largest = np.abs(after_BTV).max()
    assert np.abs(logits_BTV - after_BTV).max() <= 1e-5 * largest
    assert np.abs(logits_BTV - before_BTV).max() > 0.1 * largest


# One program creates all arrays of a cache.
make_empty = jax.jit(make_cache, static_argnums=(0, 1, 2, 3, 4))


def decoded(model, run, weights, tokens_T, slots):
    """Returns logits of a prompt and of the tokens after it, one by one, through a compressed cache
    with this many slots per head.
    """
    rule = Compression(
        groups=(tuple((1, held) for held in slots),) * model.num_blocks,
        decays=(DECAYS,) * model.num_blocks,
        window=WINDOW,
        pool=POOL,
        recency=True,
        sinks=SINKS,
        recent=RECENT,
    )
    cache, parts = make_empty(model, 1, 32, "float32", rule), []
    assert cache.compressed
    for start, stop in [(0, PROMPT), *((t, t + 1) for t in range(PROMPT, len(tokens_T)))]:
        logits_BTV, cache = run(
            weights, tokens_T[None, start:stop], positions_of(1, stop - start, start), cache
        )
        parts.append(np.asarray(logits_BTV[0]))
    return np.concatenate(parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_compressed_cache_with_slots_for_all_tokens_equals_one_pass(name):
    model = config(**VARIANTS[name])
    run, weights = run_of(model)
    tokens_T = texts((1, PROMPT + STEPS), seed=1)[0]
    whole_TV = np.asarray(run(weights, tokens_T[None], positions_of(1, len(tokens_T)))[0][0])
    found_TV = decoded(model, run, weights, tokens_T, (SLOTS, SLOTS))
    np.testing.assert_allclose(found_TV, whole_TV, atol=1e-5 * np.abs(whole_TV).max())


@pytest.mark.slow
@each("a window, parallel blocks without scales")
def test_compressed_caches_equal_the_reference(name):
    model = config(**VARIANTS[name])
    run, weights = run_of(model)
    tokens_T = texts((1, PROMPT + STEPS), seed=1)[0]
    whole_TV = reference.forward(model, nested(weights), tokens_T)[0]
    largest = np.abs(whole_TV).max()
    slots = 8, 6
    heads = [
        [
            HeadReference(
                held,
                "snapkv+ema",
                head,
                SINKS,
                RECENT,
                WINDOW,
                POOL,
                DECAYS[head],
                window,
                recency=True,
            )
            for head, held in enumerate(slots)
        ]
        for window in model.windows
    ]

    def attend(model, layer, x_TD, weights, positions, segments, keys):
        q_TKGH, k_TKH, v_TKH = reference.projected(model, layer, x_TD, weights, positions, keys)
        q_TKGH = q_TKGH * np.sqrt(
            model.head_size
        )  # the caches divide by the square root of the head size
        out_TKGH = np.zeros_like(q_TKGH)
        for head, held in enumerate(heads[layer]):
            q, k, v = q_TKGH[:, head], k_TKH[:, head], v_TKH[:, head]
            step = (
                held.prefill(q, k, v, positions)
                if len(positions) > 1
                else held.decode(q[0], k[0], v[0], positions[0])
            )
            out_TKGH[:, head] = step[0]
        out_TD = np.einsum("TKGH,KGHD->TD", out_TKGH, weights["out"]["kernel"])
        return out_TD + weights["out"].get("bias", 0), None, None

    ends = [0, *range(PROMPT, len(tokens_T) + 1)]
    expected_TV = np.concatenate(
        [
            reference.forward(
                model, nested(weights), tokens_T[start:stop], np.arange(start, stop), attend=attend
            )[0]
            for start, stop in pairwise(ends)
        ]
    )
    assert min(head.closest for layer in heads for head in layer) > NEAR, (
        "choose another text: a decision is too close"
    )
    found_TV = decoded(model, run, weights, tokens_T, slots)
    np.testing.assert_allclose(found_TV, expected_TV, atol=2e-5 * largest)
    assert np.abs(found_TV[PROMPT:] - whole_TV[PROMPT:]).max() > 1e-2 * largest, (
        "nothing was evicted"
    )
