"""The attention mask, the probe of the scores, and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dantinox.model import make_cache
from dantinox.model.attention import attend, attention, causal_mask
from dantinox.model.cache_store import Store

from . import reference
from .builder import PLACES, TOKENS, Built, build, config, loss_of, quick

# The mask


def changed(built: Built, row: int, place: int, **kwargs) -> np.ndarray:
    """Returns which logits `[B, T]` change in any bit if one token changes."""
    other = TOKENS.copy()
    other[row, place] = (other[row, place] + 1) % built.config.vocab_size
    before, after = (
        built.run(built.state, tokens, PLACES, **kwargs)[0] for tokens in (TOKENS, other)
    )
    return (np.asarray(before) != np.asarray(after)).any(axis=-1)


@pytest.mark.parametrize("windows", [(None, None), (1, 1), (3, 2)])
def test_a_token_affects_its_own_row_within_the_windows(windows):
    built = build(config(windows=windows))
    reach = 9 if windows == (None, None) else sum(window - 1 for window in windows)
    for place in range(9):
        expected = np.zeros((2, 9), bool)
        expected[1, place : place + reach + 1] = True
        np.testing.assert_array_equal(changed(built, 1, place), expected)


def test_attention_never_crosses_documents():
    built = build(config(no_sink=True))
    segments_BT = np.array([[0] * 9, [0, 0, 0, 1, 1, 1, 1, 2, 2]], np.int32)
    ends = [3, 3, 3, 7, 7, 7, 7, 9, 9]
    for place in range(9):
        expected = np.zeros((2, 9), bool)
        expected[1, place : ends[place]] = True
        np.testing.assert_array_equal(changed(built, 1, place, segments_BT=segments_BT), expected)


# The probe

PROBED = config(windows=(None, 1, 4), qk_norm=True, kv_heads=2, n_heads=6)
LENGTHS = (9, 5)  # lengths of the two rows; the second one is padded


def probe(scores_BNS, valid_BS):
    return scores_BNS, valid_BS


def compare_probe(built: Built, probed, slots, lengths=LENGTHS) -> None:
    """Compares the scores of every layer with NumPy; `slots[layer][row]` holds the position in each
    key slot, or None.
    """
    for row, length in enumerate(lengths):
        _, expected = reference.forward(built.config, built.weights, TOKENS[row, :length])
        for layer, (scores_NS, sees_S) in enumerate(expected):
            ours_NS, valid_S = np.asarray(probed[layer][0][row]), np.asarray(probed[layer][1][row])
            held = slots[layer][row]
            assert ours_NS.shape == (built.config.n_heads, len(held))
            wanted = [
                position is not None and position < length and bool(sees_S[position])
                for position in held
            ]
            np.testing.assert_array_equal(valid_S, wanted)
            assert valid_S.sum() == sees_S.sum()
            for slot in np.flatnonzero(valid_S):
                np.testing.assert_allclose(
                    ours_NS[:, slot], scores_NS[:, held[slot]], rtol=1e-4, atol=2e-5
                )


@pytest.fixture(scope="module")
def read():
    """Returns a jitted call with the probe: (state, tokens, positions, cache) -> (probed,
    cache).
    """
    built = build(PROBED)

    @quick
    def run(state, tokens_BT, positions_BT, cache=None):
        _, cache, aux = built.model(state).hidden(tokens_BT, positions_BT, cache=cache, probe=probe)
        return aux["probe"], cache

    return run


# One program creates all arrays of the cache.
make_empty = jax.jit(make_cache, static_argnums=(0, 1, 2, 3))


def padded(first: int, lengths=LENGTHS) -> tuple[np.ndarray, np.ndarray]:
    """Returns nine tokens and positions from `first` on, with position −1 after the length of each
    row.
    """
    positions = np.arange(first, first + 9, dtype=np.int32)
    tokens = np.roll(TOKENS, -first, axis=1)  # the tokens after the end are padding
    return tokens, np.where(positions < np.array(lengths)[:, None], positions, -1).astype(np.int32)


def ring(size: int, length: int) -> list[int | None]:
    """Returns the position in each slot after writing 0 … length − 1 in turn."""
    held: list[int | None] = [None] * size
    for position in range(length):
        held[position % size] = position
    return held


def test_probe_without_a_cache(read):
    built = build(PROBED)
    probed, _ = read(built.state, *padded(0))
    compare_probe(built, probed, [[range(9)] * 2] * 3)


def test_probe_of_prefill_with_full_and_ring_layers(read):
    built = build(PROBED)
    probed, cache = read(built.state, *padded(0), make_empty(PROBED, 2, 12, "float32"))
    rings = [[[None] * size + list(range(9))] * 2 for size in (1, 4)]
    compare_probe(built, probed, [[range(12)] * 2, *rings])


def test_probe_of_a_decode_step(read):
    built = build(PROBED)
    _, cache = read(built.state, *padded(0, (8, 4)), make_empty(PROBED, 2, 12, "float32"))
    tokens, positions = np.array([[TOKENS[0, 8]], [TOKENS[1, 4]]]), np.array([[8], [4]], np.int32)
    probed, _ = read(built.state, tokens, positions, cache)
    rings = [[ring(size, length) for length in LENGTHS] for size in (1, 4)]
    compare_probe(built, probed, [[range(12)] * 2, *rings])


def test_probe_of_a_second_chunk(read):
    built = build(PROBED)
    _, cache = read(built.state, *padded(0, (3, 3)), make_empty(PROBED, 2, 12, "float32"))
    probed, _ = read(built.state, *padded(3), cache)
    rings = [[ring(size, 3) + list(range(3, 12))] * 2 for size in (1, 4)]
    compare_probe(built, probed, [[range(12)] * 2, *rings])


def test_without_a_probe_aux_is_empty():
    _, cache, aux = jax.eval_shape(
        lambda: build(PROBED).model().hidden(jnp.asarray(TOKENS), jnp.asarray(PLACES))
    )
    assert cache is None and aux == {}


# Gradients


@pytest.mark.parametrize("window", [None, 1, 3])
def test_attention_and_gradients_equal_those_of_jax(window):
    random = np.random.default_rng(0)
    shapes = (2, 7, 3, 2, 4), (2, 7, 3, 4), (2, 7, 3, 4), (2, 7, 3, 2, 4)
    q, k, v, weight = (np.float32(random.standard_normal(shape)) for shape in shapes)
    away = np.arange(7)[:, None] - np.arange(7)[None, :]
    seen = (away >= 0) & (away < (window or 7))
    valid_BTS = np.broadcast_to(seen, (2, 7, 7))

    def ours(q, k, v):
        out = attention(q, Store.from_kv(k, v, jnp.float32), valid_BTS[:, None]).out_BTKGH
        return jnp.sum(out * weight)

    def theirs(q, k, v):
        limit = None if window is None else (window - 1, 0)
        out = jax.nn.dot_product_attention(
            q.reshape(2, 7, 6, 4), k, v, is_causal=True, local_window_size=limit
        )
        return jnp.sum(out.reshape(weight.shape) * weight)

    got, wanted = (quick(jax.value_and_grad(f, argnums=(0, 1, 2)))(q, k, v) for f in (ours, theirs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, wanted)


@pytest.mark.parametrize("window", [None, 70])
def test_blocks_of_queries_equal_one_call(window):
    """The output, the attention weight of each key, and the scores of the newest query equal those
    without blocks.
    """
    random = np.random.default_rng(0)
    B, T, S, K, G, H = 2, 150, 260, 2, 3, 8
    q, k, v = (
        np.float32(random.standard_normal((B, n, *heads, H)))
        for n, heads in ((T, (K, G)), (S, (K,)), (S, (K,)))
    )
    lengths = np.array([[140], [0]])  # the second row has no new tokens
    places = np.where(np.arange(T) < lengths, 100 + np.arange(T), -1)

    @jax.jit
    def run(q, k, v, positions, held, counted):
        store, valid = Store.from_kv(k, v, jnp.float32), causal_mask(positions, held, window)
        found = attend(q, store, positions, held, window, lambda *arguments: arguments, counted)
        return found, attention(q, store, valid), valid

    counted = places >= 120
    found, seen, valid = run(q, k, v, places, np.arange(S)[None, None], counted)
    np.testing.assert_allclose(found.out_BTKGH, seen.out_BTKGH, atol=1e-5)
    np.testing.assert_allclose(
        found.received_BKS, np.einsum("bkgts,bt->bks", seen.weights_BKGTS, counted) / G, atol=1e-5
    )
    scores_BNS, valid_BS = map(np.asarray, found.probed)
    np.testing.assert_array_equal(valid_BS, np.asarray(valid)[[0, 1], 0, [139, 0]])
    np.testing.assert_allclose(
        scores_BNS[0].reshape(K, G, S), np.asarray(seen.scores_BKGTS)[0, :, :, 139], atol=1e-5
    )


def test_a_fully_masked_query_stays_finite():
    """A row of padding has finite values and gradients, so it cannot spread NaN."""
    built = build(config(windows=(None,)))
    positions = np.stack([np.arange(9), np.full(9, -1)]).astype(np.int32)

    def loss(state):
        logits, _, _ = built.model(state)(jnp.asarray(TOKENS), positions)
        return jnp.sum(logits)

    value, grads = quick(jax.value_and_grad(loss))(built.state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((value, grads)))


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": True, "no_sink": True, "windows": (4, None)},
        {
            "position": "learned",
            "norm": "layernorm",
            "activation": "geglu",
            "weight_tying": False,
            "windows": (None,),
        },
        {"position": "sinusoidal", "activation": "gelu", "kv_heads": 1, "windows": (2,)},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_gradients_of_every_weight_equal_finite_differences(changes):
    """Compares the gradient along a random direction in each weight array with a central difference
    in float64.
    """
    built = build(config(**changes))
    grads = nnx.to_pure_dict(quick(jax.grad(loss_of(built)))(built.state))
    weights, random = built.weights, np.random.default_rng(1)
    targets = np.roll(TOKENS, -1, axis=1)

    def loss() -> float:
        total = 0.0
        for row in range(2):
            logits_TV, _ = reference.forward(built.config, weights, TOKENS[row])
            top = logits_TV.max(axis=1)
            lse = np.log(np.exp(logits_TV - top[:, None]).sum(axis=1)) + top
            total += np.mean(lse - logits_TV[np.arange(9), targets[row]]) / 2
        return total

    flat, _ = jax.tree_util.tree_flatten_with_path(weights)
    slopes = dict(jax.tree_util.tree_flatten_with_path(grads)[0])
    for path, array in flat:
        direction = random.standard_normal(array.shape)
        direction /= np.linalg.norm(direction)
        original, values = array.copy(), []
        for side in (1e-5, -1e-5):
            array[...] = original + side * direction
            values.append(loss())
        array[...] = original
        slope = (values[0] - values[1]) / 2e-5
        ours = float(np.sum(direction * np.asarray(slopes[path], np.float64)))
        assert abs(ours - slope) < 1e-5 + 1e-4 * abs(slope), (
            jax.tree_util.keystr(path),
            ours,
            slope,
        )
