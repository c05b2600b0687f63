"""Dropout, weights and their number, rematerialization, dtypes, the residual stream."""

from functools import cache
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dantinox.config import ModelConfig
from dantinox.model import Transformer, compute_dtype
from dantinox.model.cache import NoCache
from dantinox.model.layers import dropout
from dantinox.model.parallelism import SINGLE_DEVICE
from dantinox.model.positions import rotary_angles
from dantinox.platform import PLATFORMS

from . import reference
from .builder import PLACES, TOKENS, Built, build, config, loss_of, places, quick, texts

# Dropout


def test_dropout_rate_and_scale():
    x = np.float32(np.random.default_rng(0).standard_normal((400, 500)) + 5)
    y = np.asarray(jax.jit(lambda x: dropout(x, 0.3, jax.random.key(1)))(x))
    kept = y != 0
    assert abs(kept.mean() - 0.7) < 4 * (0.3 * 0.7 / x.size) ** 0.5
    np.testing.assert_allclose(y[kept], x[kept] / 0.7, rtol=1e-6)
    # Dropout is independent of the value, so the mean stays: its deviation is that of 200,000
    # draws.
    assert abs(y.mean() - x.mean()) < 4 * 5.1 * (0.3 / 0.7 / x.size) ** 0.5


def test_dropout_is_off_without_a_key_or_a_rate():
    x = np.arange(10, dtype=np.float32)
    np.testing.assert_array_equal(dropout(x, 0.5, None), x)
    np.testing.assert_array_equal(dropout(x, 0.0, jax.random.key(0)), x)
    narrow = jax.ShapeDtypeStruct((10,), jnp.bfloat16)
    assert (
        jax.eval_shape(lambda x: dropout(x, 0.5, jax.random.key(0)), narrow).dtype == jnp.bfloat16
    )


@cache
def streams(built: Built, with_dropout: bool):
    """Returns a jitted function of (state, tokens, key): the residual stream after the embedding
    and after each block.
    """

    @quick
    def run(state, tokens_BT, key):
        seen: list[jax.Array] = []
        through = Transformer._run_block

        def record(model, block, probe, x_BTD, *args, **options):
            after_BTD, *rest = through(model, block, probe, x_BTD, *args, **options)
            seen.extend([after_BTD] if seen else [x_BTD, after_BTD])
            return after_BTD, *rest

        rngs = nnx.Rngs(dropout=key) if with_dropout else None
        with mock.patch.object(Transformer, "_run_block", record):
            x_BTD, _, _ = built.model(state).hidden(tokens_BT, places(*tokens_BT.shape), rngs=rngs)
        return seen, x_BTD

    return run


def residuals(built: Built, tokens, seed: int | None, state=None) -> list[np.ndarray]:
    """Returns the residual stream, with dropout from `seed` or without."""
    run = streams(built, seed is not None)
    seen, _ = run(built.state if state is None else state, tokens, jax.random.key(seed or 0))
    return [np.asarray(x) for x in seen]


def test_dropout_in_the_model_is_off_without_rngs_and_set_by_its_key():
    with_rate, without = (
        build(config(dropout_rate=0.4, windows=(None,))),
        build(config(windows=(None,))),
    )
    off = residuals(with_rate, TOKENS, None)
    np.testing.assert_array_equal(off, residuals(without, TOKENS, None))
    np.testing.assert_array_equal(off, residuals(without, TOKENS, 3))
    on = residuals(with_rate, TOKENS, 3)
    np.testing.assert_array_equal(on, residuals(with_rate, TOKENS, 3))
    assert not np.array_equal(on, residuals(with_rate, TOKENS, 4))
    assert all(not np.array_equal(a, b) for a, b in zip(on, off, strict=True))


def with_zeros(state, *names: str):
    """Returns the state with every weight under one of the names set to zero."""

    def zero(path, leaf):
        return (
            np.zeros_like(leaf)
            if set(names) & {getattr(key, "key", None) for key in path}
            else leaf
        )

    return jax.tree_util.tree_map_with_path(zero, state)


def test_dropout_masks_at_every_site():
    """The embedding and both branches of each block are dropped at the rate, each with its own
    mask.
    """
    rate, built, tokens = 0.25, build(config(dropout_rate=0.25, dim=64)), texts((8, 32))
    sites = []
    for silent in ("attention", "ffn"):
        state = with_zeros(built.state, silent)
        stream, block = residuals(built, tokens, 5, state), built.model(state).blocks[0]
        embedding, first, second = stream[0], *np.diff(stream, axis=0)
        table_VD = np.asarray(built.state["embed"][...])
        np.testing.assert_allclose(
            embedding, np.where(embedding != 0, table_VD[tokens] / (1 - rate), 0), rtol=1e-6
        )
        if silent == "attention":
            branch = np.asarray(
                jax.jit(lambda block, x: block.ffn(block.norm2(x), SINGLE_DEVICE))(block, embedding)
            )
        else:

            @jax.jit
            def attend(block, x, positions_BT):
                angles = rotary_angles(positions_BT, 4, 1e4)
                return block.attention(
                    block.norm1(x), positions_BT, angles, NoCache(), None, SINGLE_DEVICE
                )[0]

            branch = np.asarray(attend(block, embedding, places(8, 32)))
        np.testing.assert_allclose(
            first, np.where(first != 0, branch / (1 - rate), 0), rtol=1e-3, atol=1e-4
        )
        sites += [first != 0, second != 0]
    sites.append(embedding != 0)
    deviation = (rate * (1 - rate) / embedding.size) ** 0.5
    for i, site in enumerate(sites):
        assert abs(site.mean() - (1 - rate)) < 5 * deviation
        for other in sites[:i]:
            assert abs((site & other).mean() - (1 - rate) ** 2) < 5 * deviation


# Weights: tied, counted


def count(state) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(state))


def closed_form(c) -> int:
    """Returns the number of parameters by the definition of the architecture."""
    norm = c.dim * (2 if c.norm == "layernorm" else 1)
    attention_weights = (
        c.dim * c.head_size * (c.n_heads + 2 * c.kv_heads) + c.n_heads * c.head_size * c.dim
    )
    gate = c.dim * c.n_heads * c.head_size if c.no_sink else 0
    qk_norm = 2 * c.head_size if c.qk_norm else 0
    ffn = c.dim * c.hidden_dim * (3 if c.activation in ("swiglu", "geglu") else 2)
    block = 2 * norm + attention_weights + gate + qk_norm + ffn
    tables = c.vocab_size * c.dim * (1 if c.weight_tying else 2) + (
        c.max_context * c.dim if c.position == "learned" else 0
    )
    return tables + c.num_blocks * block + norm


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weight_tying": False, "activation": "gelu", "kv_heads": 1},
        {
            "position": "learned",
            "norm": "layernorm",
            "no_sink": True,
            "qk_norm": True,
            "windows": (3, None, 1),
        },
        {"position": "sinusoidal", "activation": "relu2", "head_size": 7, "kv_heads": 4},
    ],
)
def test_number_of_parameters(changes):
    built = build(config(**changes))
    assert count(built.state) == closed_form(built.config)


def test_initial_weights():
    """Kernels are normal with deviation 1/sqrt(fan in), over sqrt(2 L) where they write to the
    residual stream.
    """
    c = config(
        dim=64,
        head_size=16,
        hidden_dim=96,
        no_sink=True,
        weight_tying=False,
        position="learned",
        vocab_size=200,
    )
    make = quick(lambda seed: nnx.state(Transformer(c, rngs=nnx.Rngs(jax.random.key(seed)))))
    graph = nnx.graphdef(nnx.eval_shape(lambda: Transformer(c, rngs=nnx.Rngs(0))))
    model, other = (nnx.merge(graph, make(seed)) for seed in (0, 1))
    block = model.blocks[1]
    back = 1 / (2 * c.num_blocks) ** 0.5
    expected = [
        (block.attention.qkv.kernel, 64**-0.5),
        (block.attention.gate.kernel, 64**-0.5),
        (block.attention.out.kernel, 64**-0.5 * back),
        (block.ffn.gate_up.kernel, 64**-0.5),
        (block.ffn.down.kernel, 96**-0.5 * back),
        (model.head.kernel, 64**-0.5),
        (model.embed, 0.02),
        (model.position_embed, 0.02),
    ]
    for kernel, std in expected:
        values = np.asarray(kernel[...])
        assert abs(values.std() / std - 1) < 5 / (2 * values.size) ** 0.5
        assert abs(values.mean()) < 5 * std / values.size**0.5
    assert all(
        np.all(np.asarray(norm.scale[...]) == 1)
        for norm in (block.norm1, block.norm2, model.norm_f)
    )
    assert not np.array_equal(model.embed[...], other.embed[...])
    assert not np.array_equal(
        block.attention.qkv.kernel[...], model.blocks[0].attention.qkv.kernel[...]
    )


def test_a_tied_table_is_one_parameter_with_both_gradients():
    tied, untied = (
        build(config(windows=(None,))),
        build(config(weight_tying=False, windows=(None,))),
    )
    assert "head" not in nnx.to_pure_dict(tied.state)
    state = nnx.to_pure_dict(tied.state)
    both = jax.tree.map(lambda leaf: leaf, untied.state)
    nnx.replace_by_pure_dict(both, {**state, "head": {"kernel": np.asarray(state["embed"]).T}})
    one = nnx.to_pure_dict(quick(jax.grad(loss_of(tied)))(tied.state))
    two = nnx.to_pure_dict(quick(jax.grad(loss_of(untied)))(both))
    embed, head = np.asarray(two["embed"]), np.asarray(two["head"]["kernel"])
    assert np.abs(embed).max() > 1e-3 and np.abs(head).max() > 1e-3
    np.testing.assert_allclose(
        one["embed"], embed + head.T, rtol=1e-4, atol=1e-5 * np.abs(embed + head.T).max()
    )


# Rematerialization


SHARED = {"windows": (4, 4), "kv_shared_layers": 1, "per_layer_dim": 3}


@pytest.mark.parametrize(
    "changes, remats",
    [
        ({"windows": (4,), "no_sink": True}, ["full"]),
        pytest.param({"windows": (4,), "no_sink": True}, ["dots"], marks=pytest.mark.slow),
        pytest.param(SHARED, ["full", "dots"], marks=pytest.mark.slow),
    ],
    ids=["plain", "plain, dots", "shared keys"],
)
def test_remat_changes_neither_loss_nor_gradients(changes, remats):
    def results(remat):
        built = build(config(remat=remat, dropout_rate=0.2, **changes))
        return jax.tree.map(
            np.asarray, quick(jax.value_and_grad(loss_of(built, dropout_seed=7)))(built.state)
        )

    plain_loss, plain = results("none")
    for remat in remats:
        # Other programs may add in another order: a few epsilons (1.2e-7) of the largest gradient.
        loss, gradients = results(remat)
        np.testing.assert_allclose(loss, plain_loss, rtol=1e-6)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max()),
            gradients,
            plain,
        )


@pytest.mark.parametrize(
    "changes",
    [{"windows": (4,), "no_sink": True}, pytest.param(SHARED, marks=pytest.mark.slow)],
    ids=["plain", "shared keys"],
)
def test_remat_repeats_products_in_the_backward_pass(changes):
    """Full rematerialization repeats those of the blocks; `dots` repeats only those of
    attention.
    """

    def count(remat):
        built = build(config(remat=remat, dropout_rate=0.2, **changes))
        step = jax.grad(loss_of(built, dropout_seed=7))
        return str(jax.make_jaxpr(step)(built.state)).count("dot_general")

    assert count("none") < count("dots") < count("full")


# Dtypes


@cache
def bfloat16_results(weight_tying: bool):
    """Returns, in bfloat16, the model, its last hidden state, its logits and the gradient of their
    sum.
    """
    built = build(config(dtype="bfloat16", weight_tying=weight_tying, windows=(None,)))

    def total(state):
        x_BTD, _, _ = built.model(state).hidden(jnp.asarray(TOKENS), PLACES)
        logits = built.model(state).logits(x_BTD)
        return jnp.sum(logits), (x_BTD, logits)

    grads, (x_BTD, logits) = quick(jax.grad(total, has_aux=True))(built.state)
    return built, x_BTD, np.asarray(logits), grads


@pytest.mark.parametrize("weight_tying", [True, False])
def test_bfloat16_compute(weight_tying):
    """Master weights, their gradients and the logits are float32; only activations are bfloat16."""
    built, x_BTD, logits, grads = bfloat16_results(weight_tying)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((built.state, grads))} == {"float32"}
    assert x_BTD.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    expected = np.array([reference.forward(built.config, built.weights, row)[0] for row in TOKENS])
    assert np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("weight_tying", [True, False])
def test_bfloat16_logits_are_sums_in_float32(weight_tying):
    """Logits rounded to bfloat16 would tie or swap tokens that differ by less than 1 in 256."""
    _, _, logits, _ = bfloat16_results(weight_tying)
    assert not np.array_equal(logits, logits.astype(jnp.bfloat16).astype(np.float32))


def test_compute_dtype():
    computed = {
        (dtype, on): (
            compute_dtype(
                ModelConfig(9, 8, 1, 1, 8, 1, 8, 4, (None,), dtype=dtype, platform=on)
            ).name
        )
        for dtype in ("auto", "float32", "bfloat16")
        for on in ("auto", "cpu", "gpu", "tpu")
    }
    assert {computed["float32", on] for on in PLATFORMS} == {"float32"}
    assert {computed["bfloat16", on] for on in PLATFORMS} == {"bfloat16"}
    assert [computed["auto", on] for on in ("cpu", "gpu", "tpu")] == [
        "float32",
        "bfloat16",
        "bfloat16",
    ]
    assert computed["auto", "auto"] == computed["auto", jax.default_backend()]


# The residual stream and the logits


def test_the_final_norm_reads_the_residual_stream():
    """The stream has one entry after the embedding and one per block."""
    built = build(config(windows=(None, 2, 3)))
    seen, x_BTD = streams(built, False)(built.state, TOKENS, jax.random.key(0))
    assert [x.shape for x in seen] == [(2, 9, 12)] * 4
    np.testing.assert_array_equal(seen[0], np.asarray(built.state["embed"][...])[TOKENS])
    scale_D = np.asarray(built.state["norm_f"]["scale"][...])
    last = np.asarray(seen[-1], np.float64)
    rms = np.sqrt((last**2).mean(axis=-1, keepdims=True) + built.config.norm_epsilon)
    np.testing.assert_allclose(x_BTD, last / rms * scale_D, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weight_tying", [True, False])
def test_logits_of_any_leading_axes(weight_tying):
    built = build(config(weight_tying=weight_tying, windows=(None,)))
    x_BTD = np.float32(np.random.default_rng(0).standard_normal((2, 9, 12)))
    head_DV = built.weights["embed"].T if weight_tying else built.weights["head"]["kernel"]
    parts = x_BTD, x_BTD[:, -1], x_BTD[0, 0]
    found = quick(lambda state, parts: [built.model(state).logits(part) for part in parts])(
        built.state, parts
    )
    for part, logits in zip(parts, found, strict=True):
        np.testing.assert_allclose(logits, np.float64(part) @ head_DV, rtol=1e-4, atol=1e-5)
