"""Properties of the programs of accelerators, compiled without the devices: `make aot`."""

import re
from collections import Counter
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
from flax import nnx

from dantinox.config import build_config
from dantinox.distributed import make_layout
from dantinox.lab.measure.plan import find_kernels, generation_programs, training_programs
from dantinox.lab.measure.program_cost import Work, count_work
from dantinox.lab.measure.topology import COMPILERS, find_topology
from dantinox.model import Transformer
from dantinox.model.parameters import abstract_model
from dantinox.programs import MemoryUsage, memory_usage, tree_bytes
from dantinox.training.step import TrainStep

pytestmark = pytest.mark.aot

V, D, T = (
    8192,
    256,
    512,
)  # a vocabulary too large for direct sampling, and sequences of several blocks
SIZE = {
    "model.dim": D, "model.n_heads": 4, "model.kv_heads": 2, "model.hidden_dim": 512,
    "model.max_context": T, "tokenizer.vocab_size": V, "training.batch_size": 4,
    "training.grad_accum": 2, "generation.seed": 1,
}  # fmt: skip
ALL, TEXT = ("train", "evaluation", "prefill", "decode"), ("prefill", "decode")
# Case → its settings, and the programs that they change.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "greedy": ({"generation.greedy": True}, ALL),
    "muon": ({"training.optimizer": "muon", "model.num_blocks": 1, "generation.greedy": True},
             ("train",)),
    "chain": ({f"generation.{name}": value for name, value in {
        "temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1,
    }.items()}, ("decode",)),
    "router": ({"generation.strategy": "entropy"}, TEXT),
    "int8": ({"generation.greedy": True, "generation.weights": "int8"}, TEXT),
    "compressed": ({"generation.greedy": True, "kv.budget": 0.5}, TEXT),
    "rows": ({"generation.greedy": True, "model.max_context": 2048}, ("decode",)),
    "int8 rows": ({
        "generation.greedy": True, "generation.weights": "int8",
        "model.dim": 1024, "model.n_heads": 16, "model.hidden_dim": 4096,
    }, ("decode",)),
}  # fmt: skip
STARTED = {
    "fusion",
    "custom-call",
    "copy",
    "convolution",
    "dot",
    "reduce",
    "scatter",
    "sort",
    "conditional",
}
ONE_ROW = ("greedy", "chain", "router", "int8")
# The layers and the vocabulary size of Llama 3.2 with 1.24 billion parameters.
DEEP = {"model.num_blocks": 16, "tokenizer.vocab_size": 128256}
CASES |= {f"deep {case}": (CASES[case][0] | DEEP, ("decode",)) for case in ("greedy", "chain")}
MUON = 17  # its float32 matrix multiplications, each in TF32 or as three bfloat16 passes


def each(
    *names: str,
    cases: tuple[str, ...] = tuple(CASES),
    chips: tuple[str, ...] = ("gpu:h100", "tpu:v5e"),
) -> pytest.MarkDecorator:
    """Parametrizes a test over topologies and the programs of cases."""
    found = [(case, name) for case in cases for name in CASES[case][1] if name in names]
    topologies = []
    for name in chips:
        lacks = pytest.mark.skipif(
            not any(map(find_spec, COMPILERS[name[:3]])), reason=f"no compiler for {name}"
        )
        topologies.append(pytest.param(name, marks=[lacks, pytest.mark.xdist_group(name)]))
    both = (
        pytest.mark.parametrize("topology", topologies),
        pytest.mark.parametrize(("case", "name"), found),
    )
    return lambda test: both[0](both[1](test))


class Compiled(NamedTuple):
    """The lowered program, its text and bytes, and the bytes of its donated arguments: the training
    state or the cache.
    """

    lowered: str
    text: str
    bytes: MemoryUsage
    kept: int


@cache
def traced(topology: str, case: str) -> dict[str, Any]:
    settings, names = CASES[case]
    config = build_config({}, {"model.num_blocks": 2} | SIZE | settings)
    target = find_topology(topology)
    model = config.architecture(config.tokenizer.vocab_size, target.platform)
    rows, new = 8 if "rows" in case else 1, 128
    programs = (
        [*generation_programs(target, config, model, rows, model.max_context - new, new)]
        if "decode" in names
        else []
    )
    if "train" in names:
        programs += training_programs(
            config, model, TrainStep, make_layout(config, model, target.devices)
        )
    return {planned.name: (program, options) for planned, program, options in programs}


@cache
def compiled(topology: str, case: str, name: str) -> Compiled:
    target = find_topology(topology)
    with target.emulated():
        program, options = traced(topology, case)[name]
        lowered = program.lower()
        found = target.compile(program, options)
    out = program.out_info[0]
    kept = tree_bytes(out if name == "train" else out[0]) if name != "evaluation" else 0
    return Compiled(lowered.as_text(), found.as_text(), memory_usage(found), kept)


@each(*ALL)
def test_program_compiles_with_little_memory(topology, case, name):
    """With all settings, a small model needs only a small part of the memory of a chip."""
    assert compiled(topology, case, name).bytes.peak < 1 << 28


@each("train", "decode", cases=tuple(case for case in CASES if "deep" not in case))
def test_state_and_cache_are_updated_in_place(topology, case, name):
    """The training state and the cache are updated without copies, and the rest is small."""
    found = compiled(topology, case, name)
    assert found.kept > 100_000
    assert found.bytes.alias >= found.kept
    assert found.bytes.output - found.bytes.alias < 1 << 17


@each("decode", cases=("rows", "int8 rows"))
def test_decoding_many_rows_needs_little_temporary_memory(topology, case, name):
    found = compiled(topology, case, name).bytes
    weights, cache = found.arguments - found.alias, found.alias
    if case == "int8 rows":
        assert found.temp < 0.1 * weights
    elif topology == "gpu:h100":  # a TPU transposes the cache while it decodes
        assert found.temp < 0.1 * cache


@each("train", "evaluation")
def test_attention_uses_the_kernel_of_the_chip(topology, case, name):
    """A layer has one forward and one backward kernel. A TPU has two backward kernels: for queries,
    and for keys and values.
    """
    kernel, backwards = {"gpu:h100": ("__cudnn$fmha", 1), "tpu:v5e": ("tpu_custom_call", 2)}[
        topology
    ]
    found = [
        count
        for target, count in find_kernels(compiled(topology, case, name).text).items()
        if target.startswith(kernel)
    ]
    layers = {"greedy": 2, "muon": 1}[case]
    assert sum(found) == layers * (1 + backwards * (name == "train"))


@each(*ALL)
def test_matmuls_are_bfloat16(topology, case, name):
    """Exceptions are those of Muon, and one on a TPU: the backward pass of `splash` sums out · d
    out in float32.
    """
    lowered = compiled(topology, case, name).lowered
    products = re.findall(
        r"stablehlo\.dot_general .*? : \(tensor<([^>]+)>, tensor<([^>]+)>\)", lowered
    )
    kinds = Counter(tuple(side.rpartition("x")[2] for side in product) for product in products)
    assert kinds["bf16", "bf16"] >= 5  # four per layer, and the output layer
    wide = MUON * (case == "muon") + ((topology, name) == ("tpu:v5e", "train"))
    assert kinds.total() - kinds["bf16", "bf16"] == kinds["f32", "f32"] == wide


@each(*ALL, cases=tuple(case for case in CASES if case != "compressed"))
def test_nothing_is_sorted(topology, case, name):
    assert not any(
        kernel.startswith("sort") for kernel in find_kernels(compiled(topology, case, name).text)
    )


def kernels_of_a_token(text: str) -> int:
    """Counts the kernels that an iteration of the token loop starts, with the shorter branch of
    each conditional.

    The loop has no inner loop.
    """
    bodies = dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S))

    def count(name: str) -> int:
        total = 0
        for kind, rest in re.findall(r" = (?:\(.*?\)|\S+) ([\w\-]+)\((.*)", bodies[name]):
            called = [
                count(inner)
                for inner in re.findall(r"%([\w.\-]+)", rest)
                if inner in bodies and kind != "fusion"
            ]
            total += (
                min(called)
                if kind == "conditional"
                else sum(called)
                if kind == "call"
                else kind in STARTED
            )
        return total

    return count(re.search(r" while\(.* body=%?([\w.\-]+)", text)[1])


@each("decode", cases=("deep chain",))
def test_sampling_chain_adds_few_kernels(topology, case, name):
    chain, greedy = (
        kernels_of_a_token(compiled(topology, f"deep {short}", name).text)
        for short in ("chain", "greedy")
    )
    assert 100 < greedy < chain <= 1.5 * greedy


@each("decode", cases=(*ONE_ROW, "rows", "int8 rows", "deep greedy", "deep chain"))
def test_only_loop_is_over_tokens(topology, case, name):
    """An inner loop would start its kernels in each of its iterations, for every token."""
    assert len(re.findall(r" while\(", compiled(topology, case, name).text)) == 1


@each("prefill")
def test_prefill_computes_only_the_last_logits(topology, case, name):
    text = compiled(topology, case, name).text
    shapes = [set(shape.split(",")) for shape in re.findall(r"\w+\[([\d,]+)\]", text)]
    assert any(str(V) in shape for shape in shapes) and any(str(T) in shape for shape in shapes)
    assert not any({str(V), str(T)} <= shape for shape in shapes)


@each("decode", cases=("int8", "compressed"))
def test_quantized_weights_and_caches_need_less_memory(topology, case, name):
    small, plain = compiled(topology, case, name), compiled(topology, "greedy", name)
    assert small.bytes.arguments < plain.bytes.arguments
    if case == "compressed":
        assert small.kept < 0.6 * plain.kept


# Name of a machine with several chips → prefix of its attention kernels.
MESH_KERNELS = {"gpu:h100:8": "__cudnn$fmha", "tpu:v5e:2x2": "tpu_custom_call"}


class Meshed(NamedTuple):
    """A program on a mesh: its kernels, work and bytes on one device, the bytes of all parameters,
    and their number.
    """

    kernels: dict[str, int]
    work: Work
    bytes: MemoryUsage
    whole: int
    weights: int


@cache
def meshed(topology: str, tensor: int, name: str) -> Meshed:
    """Compiles a model of one layer with an untied output layer on a mesh of `fsdp` × `tensor`."""
    target = find_topology(topology)
    rows = len(target.devices) // tensor
    given = {
        "model.num_blocks": 1,
        "training.batch_size": 2 * rows,
        "training.grad_accum": 2,
        "distributed.tensor": tensor,
    }
    config = build_config({}, SIZE | {"model.dim": 512, "model.weight_tying": False} | given)
    model = config.architecture(V, target.platform)
    layout = make_layout(config, model, target.devices)
    with target.emulated():
        programs = {
            planned.name: others
            for planned, *others in training_programs(config, model, TrainStep, layout)
        }
        found = target.compile(*programs[name])
    shapes, text = abstract_model(model)[1], found.as_text()
    return Meshed(
        find_kernels(text),
        count_work(text),
        memory_usage(found),
        tree_bytes(shapes),
        sum(len(shape.shape) > 1 for shape in shapes.values()),
    )


def on_meshes(*cases: tuple[str, int, str]) -> pytest.MarkDecorator:
    """Parametrizes a test over (topology, tensor, program)."""
    found = []
    for case in cases:
        lacks = pytest.mark.skipif(
            not any(map(find_spec, COMPILERS[case[0][:3]])), reason=f"no compiler for {case[0]}"
        )
        found.append(pytest.param(*case, marks=[lacks, pytest.mark.xdist_group(case[0][:7])]))
    return pytest.mark.parametrize(("topology", "tensor", "name"), found)


MESHES = [(topology, tensor, "train") for topology in MESH_KERNELS for tensor in (1, 2)]


@on_meshes(*MESHES)
def test_mesh_uses_the_kernels_of_the_chip(topology, tensor, name):
    """The only layer has one forward kernel and one backward kernel (two on a TPU): nothing is
    recomputed.
    """
    found = sum(
        count
        for kind, count in meshed(topology, tensor, name).kernels.items()
        if kind.startswith(MESH_KERNELS[topology])
    )
    assert found == (2 if topology.startswith("gpu") else 3)


@on_meshes(*MESHES)
def test_mesh_gathers_each_weight_twice_per_microbatch(topology, tensor, name):
    """Tables are gathered once. There are no unsharded gradients after the loop over microbatches,
    and no all-to-all.
    """
    found = meshed(topology, tensor, name)
    count, parts, devices = found.work.count, 2, len(find_topology(topology).devices)
    assert set(count) <= {"all-gather", "reduce-scatter", "all-reduce", "collective-permute"}
    assert 0 < count["all-gather"] <= 2 * parts * found.weights
    assert found.work.unknown_loops == 0
    assert found.bytes.arguments < 1.05 * 3 * found.whole / devices + 2**17
    if topology.startswith("gpu"):
        # The embedding is gathered in float32. Other weights are gathered in bfloat16, twice per
        # layer. Gradients are communicated once.
        assert count["reduce-scatter"] >= parts
        assert found.work.sent["all-gather"] < parts * found.whole
        assert found.work.sent["reduce-scatter"] <= parts * found.whole


@cache
def long_rows(topology: str, sequence: int) -> tuple[Work, MemoryUsage, dict[str, int]]:
    """Compiles a step of rows of 8192 tokens that `sequence` devices share: work, bytes and kernels
    of one device.
    """
    target = find_topology(topology)
    given = {
        "training.batch_size": len(target.devices),
        "training.grad_accum": sequence,
        "distributed.sequence": sequence,
    }
    config = build_config({}, SIZE | {"model.num_blocks": 1, "model.max_context": 8192} | given)
    model = config.architecture(V, target.platform)
    with target.emulated():
        planned = training_programs(
            config, model, TrainStep, make_layout(config, model, target.devices)
        )
        found = target.compile(
            *next(others for program, *others in planned if program.name == "train")
        )
    return count_work(found.as_text()), memory_usage(found), find_kernels(found.as_text())


@on_meshes(*((topology, 0, "train") for topology in MESH_KERNELS))
def test_devices_that_share_a_row_divide_its_activations(topology, tensor, name):
    """The keys and values of a row travel once per pass, their gradients (float32) once."""
    n = len(find_topology(topology).devices)
    (work, divided, kernels), (_, whole, _) = long_rows(topology, n), long_rows(topology, 1)
    numbers = (
        8192 * 2 * 64
    )  # the keys of all micro-batches on a device: n parts of 8192 / n tokens, 2 heads of size 64
    passes = [
        4 * numbers * (n - 1) * count for count in (1, 2)
    ]  # the first permutations of both passes may be shared
    d_kv, documents = 8 * numbers * n, 1.02
    assert passes[0] + d_kv < work.sent["collective-permute"] < documents * passes[1] + d_kv
    assert not any(kernel.startswith(MESH_KERNELS[topology]) for kernel in kernels)
    assert divided.temp < 2 * whole.temp / n


@on_meshes(*((topology, 4, "decode") for topology in MESH_KERNELS))
def test_decoding_communicates_only_activations(topology, tensor, name):
    """Four devices communicate the logits and the residual stream of a token, but no weights, which
    would be larger.
    """
    given = {
        "model.num_blocks": 1,
        "model.kv_heads": 4,
        "generation.greedy": True,
        "generation.tensor_parallel": tensor,
    }
    config, target = build_config({}, SIZE | given), find_topology(topology)
    model = config.architecture(V, target.platform)
    with target.emulated():
        planned = generation_programs(target, config, model, 1, T - 128, 128)
        programs = {found.name: program for found, program, _ in planned}
        found = target.compile(programs[name], {})
    whole = tree_bytes(nnx.state(nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0)))))
    assert (
        memory_usage(found).arguments < 1.1 * whole / tensor
    )  # the weights are float32; the rest is the cache
    assert 3 * V < count_work(found.as_text()).bytes < D * D
