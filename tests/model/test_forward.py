"""Our float32 logits against the float64 transformer of reference.py."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dantinox.config import (
    Config,
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    RopeScaling,
    UserError,
)
from dantinox.model import make_cache
from dantinox.model.parameters import abstract_model
from dantinox.model.positions import rotary_angles, rotate
from dantinox.model.transformer import Block

from . import reference
from .builder import build, config, places, texts

# Largest difference over the largest logit. Every layer adds the errors of six matrix
# multiplications and norms to the residual stream, each of a few epsilons (6e-8): about 2e-6 after
# two layers. Weights of this size multiply an error by up to 3 in every further layer.
TOLERANCE = 1e-5
TOLERANCES = {name: 3e-5 for name in ("shared keys, per-layer inputs", "shared keys, experts")}
SEEDS = {"ternary experts": 2}  # see `reference.eight_bits`
ONE_LAYER = {"windows": (None,)}

SHARED = {
    "windows": (4, None, None, 4),
    "kv_shared_layers": 2,
    "global_head_size": 6,
    "global_kv_heads": 4,
    "v_norm": True,
    "norm_placement": "both",
    "rope_scaling": RopeScaling("proportional", 1.0, share=0.5),
    "rope_local_theta": 50.0,
}
GRID = {
    "plain": {},
    "mha": {"kv_heads": 4},
    "mqa": {"kv_heads": 1},
    "one head": {"n_heads": 1, "kv_heads": 1, "head_size": 12},
    "wide heads": {"head_size": 10, "rope_theta": 500.0},
    "learned": {"position": "learned", "activation": "relu2", "norm": "layernorm"},
    "sinusoidal": {"position": "sinusoidal", "activation": "gelu", "weight_tying": False},
    "no positions": {"position": "none", "activation": "geglu", "norm": "layernorm"},
    "window 1": {"windows": (1, 1)},
    "window 4, every other layer": {"windows": (4, None, 4), "kv_heads": 4},
    "window longer than the text": {"windows": (100, 2), "position": "none"},
    "output gate": {"no_sink": True, "kv_heads": 1},
    "qk-norm": {"qk_norm": True},
    "qk-norm, no rotation": {"qk_norm": True, "position": "learned", "kv_heads": 4},
    "sinks and caps": {
        "sink_logits": True,
        "softcap": 1.5,
        "final_softcap": 2.0,
        "windows": (4, None),
    },
    "linear": {"rope_scaling": RopeScaling("linear", 3.0)},
    "llama3": {"rope_scaling": RopeScaling("llama3", 8.0, 100, 2.0, 5.0), "head_size": 24},
    "yarn": {"rope_scaling": RopeScaling("yarn", 4.0, 300, beta_fast=8.0), "head_size": 24},
    "yarn, blended anywhere": {
        "rope_scaling": RopeScaling("yarn", 4.0, 300, beta_fast=8.0, truncate=False),
        "head_size": 24,
    },
    "latents": {"latent": LatentConfig(5, 2, 4), "kv_heads": 4},
    "latents, yarn": {
        "latent": LatentConfig(5, 4, 4, norm_epsilon=0.3),
        "kv_heads": 4,
        "rope_scaling": RopeScaling("yarn", 4.0, 30, beta_fast=8.0, mscale=0.7, mscale_all_dim=1.3),
    },
    "latents of every kind": {
        "latent": LatentConfig(6, 4, 3, query_rank=7),
        "kv_heads": 4,
        "no_sink": True,
        "sink_logits": True,
        "softcap": 1.5,
        "windows": (4, None),
    },
    "experts": {"experts": ExpertsConfig(5, 2)},
    "experts of every kind": {
        "experts": ExpertsConfig(4, 3, shared_dim=32, score="sigmoid", normalize=False, bias=True),
        "activation": "relu2",
    },
    "experts with biases, in groups, a gated shared layer": {
        "experts": ExpertsConfig(
            6,
            2,
            shared_dim=10,
            shared_gate=True,
            scaling=1.7,
            logit_bias=True,
            groups=3,
            top_groups=2,
            group_score="max",
        ),
        "activation": "clamped_swiglu",
        "swiglu_limit": 0.8,
        "swiglu_alpha": 1.2,
        "mlp_bias": True,
    },
    "experts after a dense layer, in groups by their best two": {
        "experts": ExpertsConfig(
            8,
            3,
            16,
            "sigmoid",
            bias=True,
            groups=4,
            top_groups=2,
            group_score="top2",
            dense_layers=(0,),
            dense_dim=24,
        ),
        "windows": (None, None),
    },
    "shared keys, experts": (
        SHARED
        | {
            "experts": ExpertsConfig(
                5, 2, shared_dim=10, branch_norms=True, dense_layers=(0,), dense_dim=24
            ),
            "per_layer_dim": 3,
            "layer_scalar": True,
            "double_wide_mlp": True,
        }
    ),
    "biases": {
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "no_sink": True,
        "gate_bias": True,
        "head_bias": True,
        "final_softcap": 5.0,
    },
    "biases, plain": {
        "mlp_bias": True,
        "activation": "gelu",
        "norm": "layernorm",
        "position": "learned",
        "qkv_bias": True,
    },
    "norms behind, of all heads": {
        "norm_placement": "after",
        "qk_norm": True,
        "qk_norm_scope": "layer",
    },
    "norms on both sides, centered at zero": {
        "norm_placement": "both",
        "norm_zero_centered": True,
        "qk_norm": True,
    },
    "layernorms on both sides": {
        "norm_placement": "both",
        "norm": "layernorm",
        "experts": ExpertsConfig(3, 2),
    },
    "scaled embeddings and scores": {
        "scale_embeddings": True,
        "query_pre_attn_scalar": 7.0,
        "embedding_multiplier": 1.3,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
    },
    "part of a head, some layers": {
        "head_size": 10,
        "partial_rotary_factor": 0.45,
        "windows": (None, 4, None),
        "unrotated": (0,),
        "rope_local_theta": 50.0,
        "rope_scaling": RopeScaling("linear", 3.0),
    },
    "longrope": {
        "rope_scaling": RopeScaling("longrope", 4.0, 300, factors=(1.5, 7.0)),
        "head_size": 4,
    },
    "large epsilon": {"norm_epsilon": 0.3, "qk_norm": True},
    "large epsilon, layernorm": {"norm_epsilon": 0.3, "norm": "layernorm", "activation": "gelu"},
    "parallel blocks, multipliers": {
        "parallel_blocks": True,
        "norm": "layernorm",
        "norm_bias": False,
        "residual_multiplier": 0.3,
        "embedding_multiplier": 2.5,
        "logits_scaling": 1.7,
    },
    "norms without scales": {
        "norm_scale": False,
        "norm_embeddings": True,
        "qk_norm": True,
        "qk_norm_after_rope": True,
    },
    "norms of rotated heads, queries that grow": {
        "norm_embeddings": True,
        "norm": "layernorm",
        "qk_norm": True,
        "qk_norm_after_rope": True,
        "query_scaling_beta": 0.7,
        "rope_scaling": RopeScaling("yarn", 4.0, 3, beta_fast=8.0),
    },
    "proportional": {"rope_scaling": RopeScaling("proportional", 2.0, share=0.4), "head_size": 12},
    "layers with other heads, keys as values": {
        "windows": (4, None, 4, None),
        "global_head_size": 6,
        "global_kv_heads": 1,
        "k_eq_v": True,
        "v_norm": True,
        "qk_norm": True,
        "rope_local_theta": 50.0,
        "partial_rotary_factor": 0.67,
        "query_pre_attn_scalar": 1.0,
    },
    "shared keys, per-layer inputs": (
        SHARED | {"per_layer_dim": 3, "layer_scalar": True, "double_wide_mlp": True}
    ),
    "sub-norms, squared reglu": {"sub_norms": True, "activation": "squared_reglu"},
    "sub-norms of a plain layer": {
        "sub_norms": True,
        "activation": "gelu",
        "mlp_bias": True,
        "out_bias": True,
    },
    "ternary": {"projections": "ternary", "qkv_bias": True},
    "ternary with sub-norms": {
        "projections": "ternary",
        "sub_norms": True,
        "activation": "squared_reglu",
        "no_sink": True,
    },
    "ternary experts": {
        "projections": "ternary",
        "experts": ExpertsConfig(5, 2, shared_dim=10),
        "activation": "relu2",
    },
    "everything": {
        "position": "sinusoidal",
        "qk_norm": True,
        "no_sink": True,
        "norm": "layernorm",
        "activation": "geglu",
        "weight_tying": False,
        "windows": (2, None, 5),
        "kv_heads": 1,
    },
}


def difference(
    model_config: ModelConfig, seed: int = 0, segments_BT=None, positions_BT=None
) -> float:
    """Returns the largest difference between our logits and those of the reference, over the
    largest logit.
    """
    built = build(model_config, seed)
    tokens_BT = texts((2, 9), seed)
    positions_BT = places(2, 9) if positions_BT is None else positions_BT
    ours, _ = built.run(built.state, tokens_BT, positions_BT, segments_BT=segments_BT)
    rows = segments_BT if segments_BT is not None else [None, None]
    theirs = np.array(
        [
            reference.forward(model_config, built.weights, *row)[0]
            for row in zip(tokens_BT, positions_BT, rows, strict=True)
        ]
    )
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


# Settings that another entry has too, alone here or with others, and rotations, which
# `test_rotations` compares.
REPEATED = {
    "mqa",
    "output gate",
    "window 4, every other layer",
    "llama3",
    "yarn",
    "longrope",
    "proportional",
    "plain",
    "mha",
    "one head",
    "learned",
    "sinusoidal",
    "window 1",
    "window longer than the text",
    "qk-norm",
    "qk-norm, no rotation",
    "linear",
    "yarn, blended anywhere",
    "latents",
    "experts",
    "biases, plain",
    "norms on both sides, centered at zero",
    "large epsilon",
    "norms without scales",
    "shared keys, per-layer inputs",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in REPEATED else name for name in GRID],
)
def test_logits(name):
    assert difference(config(**ONE_LAYER | GRID[name]), SEEDS.get(name, 0)) < TOLERANCES.get(
        name, TOLERANCE
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, changes in GRID.items() if "windows" not in changes]
)
def test_logits_of_two_layers(name):
    assert difference(config(**GRID[name])) < TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"position": "learned", "windows": (3, None)},
        pytest.param(SHARED, marks=pytest.mark.slow),
    ],
)
def test_segments(changes):
    segments_BT = np.array([[0, 0, 0, 1, 1, 2, 2, 2, 2], [5, 6, 6, 6, 6, 6, 6, 7, 7]], np.int32)
    assert difference(config(**changes), segments_BT=segments_BT) < TOLERANCE


def test_positions_may_restart_in_every_document():
    segments_BT = np.array([[0, 0, 0, 1, 1, 2, 2, 2, 2], [5, 6, 6, 6, 6, 6, 6, 7, 7]], np.int32)
    positions_BT = np.array([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5, 0, 1]], np.int32)
    learned = config(position="learned", windows=(3, None))
    assert difference(learned, segments_BT=segments_BT, positions_BT=positions_BT) < TOLERANCE


def test_rotations():
    """Queries of all kinds of rotations at near and far positions; angles are float32."""
    rotations = {name: changes for name, changes in GRID.items() if "rope_scaling" in changes}
    kinds = {
        name: changes["rope_scaling"] for name, changes in rotations.items() if len(changes) <= 2
    }
    assert len(kinds) == 6
    kinds["plain"] = None
    sizes = {name: 4 if name == "longrope" else 24 for name in kinds}
    random, positions_1T = np.random.default_rng(0), np.int32([[0, 1, 7, 90, 250, 1000]])
    x = {name: np.float32(random.standard_normal((1, 6, 1, size))) for name, size in sizes.items()}

    @jax.jit
    def run(x):
        return {
            name: rotate(x[name], rotary_angles(positions_1T, sizes[name], 1e4, kinds[name]))
            for name in kinds
        }

    for name, y_1T1H in run(x).items():
        for t, position in enumerate(positions_1T[0]):
            wanted_H = reference.rotary(
                np.float64(x[name][0, t, 0]), int(position), 1e4, kinds[name]
            )
            tolerance = 1e-5 + 5e-7 * position  # of numbers up to 4
            np.testing.assert_allclose(
                np.asarray(y_1T1H)[0, t, 0], wanted_H, atol=tolerance, err_msg=name
            )


def test_far_positions():
    """Angles are float32, so their error grows as 6e-8 of the position: 2.4e-4, and 2e-4 or less in
    the logits.
    """
    assert difference(config(**ONE_LAYER), positions_BT=places(2, 9, first=4000)) < 2e-4


def test_rotary_positions_are_relative():
    built, tokens_BT = build(config(**ONE_LAYER)), texts((2, 9))
    near, _ = built.run(built.state, tokens_BT, places(2, 9))
    far, _ = built.run(built.state, tokens_BT, places(2, 9, first=50))
    np.testing.assert_allclose(near, far, atol=1e-4)


def test_logits_from_a_settings_tree():
    """`context_window: c` means that a sliding layer attends to c earlier keys; layer_types repeats
    over the depth.
    """
    settings_tree = Config.model_validate(
        {
            "model": {
                "dim": 12,
                "n_heads": 2,
                "num_blocks": 3,
                "hidden_dim": 8,
                "max_context": 16,
                "dtype": "float32",
            },
            "attention": {
                "sliding_window": True,
                "context_window": 2,
                "layer_types": ("sliding", "full"),
            },
        }
    )
    architecture = settings_tree.architecture(19)
    assert architecture.windows == (3, None, 3)
    assert difference(architecture) < TOLERANCE


@st.composite
def configs(draw) -> ModelConfig:
    kv_heads = draw(st.integers(1, 3))
    depth = draw(st.integers(1, 2))
    return config(
        vocab_size=19,
        dim=2 * draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        n_heads=kv_heads * draw(st.integers(1, 3)),
        head_size=2 * draw(st.integers(1, 4)),
        hidden_dim=draw(st.integers(1, 20)),
        windows=tuple(
            draw(st.lists(st.none() | st.integers(1, 12), min_size=depth, max_size=depth))
        ),
        position=draw(st.sampled_from(["rope", "learned", "sinusoidal", "none"])),
        rope_theta=draw(st.sampled_from([10.0, 1e4, 1e6])),
        activation=draw(st.sampled_from(["swiglu", "geglu", "gelu", "relu2"])),
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        norm_epsilon=draw(st.sampled_from([1e-5, 1e-2])),
        qk_norm=draw(st.booleans()),
        no_sink=draw(st.booleans()),
        weight_tying=draw(st.booleans()),
    )


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True)
@given(configs(), st.integers(0, 1000))
def test_logits_of_any_configuration(model_config, seed):
    assert difference(model_config, seed) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "traces"),
    [
        ({"windows": (None,) * 5, "hidden_dim": 21}, 1),
        ({"windows": (4, None, 4, None), "hidden_dim": 22}, 2),
        ({"windows": (3, 4, 3), "hidden_dim": 23}, 2),
    ],
)
def test_equal_layers_of_a_cached_model_are_traced_once(changes, traces, monkeypatch):
    calls, call = [], Block.__call__
    monkeypatch.setattr(
        Block, "__call__", lambda self, *args: calls.append(self) or call(self, *args)
    )
    # No other test has a program of layers of this size, so nothing is traced yet.
    model_config, x_BT = config(**changes), np.zeros((1, 7), np.int32)
    build_model, shapes = abstract_model(model_config)
    cache = jax.eval_shape(lambda: make_cache(model_config, 1, 8, "float32"))
    jax.eval_shape(
        lambda parameters, cache: build_model(parameters).hidden(x_BT, x_BT, cache=cache)[0],
        shapes,
        cache,
    )
    assert len(calls) == traces


def test_a_model_of_more_weights_than_fit_into_any_memory_is_one_sentence():
    """XLA would end the process, because the size of an array in bytes has more than 64 bits."""
    with pytest.raises(UserError, match=r"the model must have at most 100,000,000,000,000 weights"):
        abstract_model(config(dim=2**31 - 2, hidden_dim=2**31 - 1))
