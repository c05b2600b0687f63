"""The table of sharding rules covers every architecture; indivisible sizes raise one sentence."""

import math
from functools import cache

import pytest

from dantinox.config import UserError, build_config
from dantinox.distributed import make_layout, mesh_sizes
from dantinox.distributed.rules import AXES, RULES, find_rule, name_in_layer, split_parameter
from dantinox.model.parameters import abstract_model
from tests.error_texts import ERRORS

from .mesh import KINDS, V, settings

LORA = {"training__init_from": "x", "lora__rank": 2, "lora__base_weights": "int8"}
NF4 = LORA | {"lora__base_weights": "nf4", "lora__dora": True}
ARCHITECTURES = [
    (
        "dense",
        {
            "attention__no_sink": True,
            "attention__sink_logits": True,
            "model__qk_norm": True,
            "model__norm_embeddings": True,
        },
    ),
    (
        "dense",
        {
            "model__weight_tying": False,
            "model__norm": "layernorm",
            "model__activation": "gelu",
            "model__scan_layers": True,
        },
    ),
    ("learned", {"model__sub_norms": True}),
    ("biases", {}),
    (
        "biases",
        {"model__activation": "gelu", "model__norm": "layernorm", "model__norm_placement": "after"},
    ),
    ("moe", {"moe__score_function": "sigmoid", "moe__bias_update_rate": 0.001}),
    ("moe", {"model__activation": "gelu", "model__scan_layers": True}),
    (
        "moe",
        {"moe__shared_gate": False, "moe__branch_norms": True, "model__norm_placement": "both"},
    ),
    ("uneven", {}),
    ("uneven", {**LORA, "lora__targets": ["q_proj", "v_proj", "down_proj"]}),
    ("mla", {"attention__no_sink": True, "attention__sink_logits": True}),
    ("mla", {"attention__q_lora_rank": None}),
    ("dense", {**LORA, "attention__no_sink": True, "model__weight_tying": False}),
    ("dense", {**LORA, "model__activation": "gelu", "model__scan_layers": True}),
    ("dense", {**NF4, "attention__no_sink": True, "model__per_layer_dim": 4}),
    (
        "dense",
        {
            **NF4,
            "model__activation": "gelu",
            "model__scan_layers": True,
            "model__weight_tying": False,
        },
    ),
]


@cache
def parameters():
    """Returns the name in its layer, the shape in it, and the model of every parameter."""
    found = []
    for kind, changes in ARCHITECTURES:
        model = settings(kind, **changes).trained_architecture(V)
        for name, leaf in abstract_model(model)[1].items():
            inner, layers = name_in_layer(name)
            found.append((inner, leaf.shape[layers:], model))
    return found


def test_rules_and_parameters_match():
    used = [find_rule(name, len(shape)) for name, shape, _ in parameters()]
    assert [rule for rule in RULES if rule not in used] == []
    with pytest.raises(ValueError, match=ERRORS["no_rule_for_the_sharding"]):
        find_rule("ffn/new/kernel", 2)


def test_letters_of_rules_match_array_sizes():
    """A wrong letter would shard another axis."""
    for name, shape, m in parameters():
        sizes = {"V": V, "D": m.dim, "T": m.max_context, "K": m.kv_heads, "N": m.n_heads, "2": 2}
        sizes |= {"E": m.experts.count} if m.experts else {}
        width = m.experts.shared_dim if "shared" in name else m.hidden_dim
        sizes |= {"P": m.per_layer_dim} if "layer" in name else {}
        sizes |= {"F": width} | (
            {"G": m.n_heads // m.kv_heads} if "attention/qkv" not in name else {}
        )
        sizes |= (
            {"D": shape[0]} if name == "attention/q/kernel" else {}
        )  # the input of the queries, of rank D or less
        sizes |= {"F": shape[0 if "down" in name else -1]} if m.double_wide_mlp else {}
        for letter, size in zip(find_rule(name, len(shape)).axes, shape, strict=True):
            assert sizes.get(letter, size) == size, (name, letter)


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 8, 1, 1, 1),
        (1, 4, 1, 1, 2),
        (2, 2, 1, 1, 2),
        (2, 1, 4, 1, 1),
        (1, 1, 2, 2, 2),
        (1, 2, 1, 4, 1),
    ],
    ids=str,
)
def test_matrices_are_sharded_equally_over_all_devices(sizes):
    mesh = dict(zip(AXES, sizes, strict=True))
    for name, shape, _ in parameters():
        split = split_parameter(name, shape, mesh)
        for size, apart, stored in zip(shape, split.compute, split.storage, strict=True):
            assert size % math.prod(mesh[axis] for axis in apart + stored) == 0, name
        assert len(split.axes_of(slice(None))) == len(split.axes), name  # no axis twice
        if name.endswith(("kernel", "embed")):
            assert split.axes == {axis for axis in AXES[1:] if mesh[axis] > 1}, name


@pytest.mark.parametrize(
    ("kind", "mesh", "changes", "sentence"),
    [
        ("dense", "tensor=4", {},
         "distributed.tensor must divide the 2 key heads of a layer, got 4"),
        ("mla", "tensor=3", {"training__batch_size": 15},
         "distributed.tensor must divide the 4 heads of a layer, got 3"),
        (
            "dense", "tensor=2", {"model__hidden_dim": 33},
            "distributed.tensor must divide the 33 features of the feed-forward of a layer, got 2",
        ),
        ("moe", "expert=8", {}, "distributed.expert must divide the 4 experts of a layer, got 8"),
    ],
)  # fmt: skip
def test_indivisible_sizes_are_refused(kind, mesh, changes, sentence):
    config = settings(kind, mesh, **changes)
    model, devices = (
        config.architecture(V),
        math.prod(int(part.split("=")[1]) for part in mesh.split()),
    )
    sizes = mesh_sizes(config, model, devices)
    with pytest.raises(UserError) as raised:
        [
            split_parameter(name, shape, sizes)
            for name, shape in (
                (name_in_layer(n)[0], leaf.shape) for n, leaf in abstract_model(model)[1].items()
            )
        ]
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("kind", "mesh", "changes", "sentence"),
    [
        (
            "dense", "fsdp=4 tensor=1", {},
            "distributed: data 1 × fsdp 4 × expert 1 × sequence 1 × tensor 1 is a mesh of 4 devices, but there are 8",
        ),
        (
            "dense", "fsdp=-1 tensor=3", {},
            "distributed: data 1 × fsdp 2 × expert 1 × sequence 1 × tensor 3 is a mesh of 6 devices, but there are 8",
        ),
        (
            "dense", "fsdp=8", {"training__batch_size": 12},
            "training.batch_size 12 is 12 rows, which 8 devices "
            "(data 1 × fsdp 8 × expert 1 × sequence 1 × tensor 1) cannot share equally: make it a multiple of 8, "
            "or set the axes of distributed",
        ),
        (
            "dense", "fsdp=4 tensor=2", {"training__grad_accum": 8},
            "training.batch_size 16 / training.grad_accum 8 is 2 rows, which 4 devices "
            "(data 1 × fsdp 4 × expert 1 × sequence 1 × tensor 2) cannot share equally: "
            "make it a multiple of 32, or set the axes of distributed",
        ),
        ("dense", "data=2 expert=4", {},
         "distributed.expert must be 1 for a model without experts, got 4"),
    ],
)  # fmt: skip
def test_an_invalid_mesh_is_refused(kind, mesh, changes, sentence):
    config = settings(kind, mesh, **changes)
    with pytest.raises(UserError) as raised:
        mesh_sizes(config, config.architecture(V), 8)
    assert str(raised.value) == sentence


def test_a_single_device_has_axes_of_size_1():
    config = build_config({}, {"training.batch_size": 8})
    model = config.architecture(V)
    assert mesh_sizes(config, model, 8) == {
        "data": 1,
        "fsdp": 8,
        "expert": 1,
        "sequence": 1,
        "tensor": 1,
    }
    assert make_layout(config, model).mesh is None
    assert set(KINDS) == {kind for kind, _ in ARCHITECTURES}
