"""What holds of the programs of accelerators, compiled for machines that need not be there: `make aot`."""

import re
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest

from dantinox.config import build_config
from dantinox.measure.plan import generation_programs, kernels_in, training_programs
from dantinox.measure.topology import COMPILERS, find_topology
from dantinox.programs import Bytes, bytes_of, size
from dantinox.training.step import traced_programs

pytestmark = pytest.mark.aot

V, D, T = 8192, 256, 512  # more symbols than are sampled from whole, and texts of more than one block
SIZE = {
    "model.dim": D, "model.n_heads": 4, "model.kv_heads": 2, "model.hidden_dim": 512, "model.max_context": T,
    "tokenizer.vocab_size": V, "training.batch_size": 4, "training.grad_accum": 2, "generation.seed": 1,
}  # fmt: skip
ALL, TEXT = ("train", "evaluation", "prefill", "decode"), ("prefill", "decode")
# Case → its settings, and the programs that they change.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "greedy": ({"generation.greedy": True}, ALL),
    "muon": ({"training.optimizer": "muon", "model.num_blocks": 1, "generation.greedy": True}, ("train",)),
    "chain": ({f"generation.{name}": value for name, value in {
        "temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1,
    }.items()}, ("decode",)),
    "router": ({"generation.strategy": "entropy"}, TEXT),
    "int8": ({"generation.greedy": True, "generation.weights": "int8"}, TEXT),
    "compressed": ({"generation.greedy": True, "kv.budget": 0.5}, TEXT),
}  # fmt: skip


def each(*names: str, cases: tuple[str, ...] = tuple(CASES)) -> pytest.MarkDecorator:
    """A test for each topology and each of these programs of these cases."""
    found = [(case, name) for case in cases for name in CASES[case][1] if name in names]
    topologies = []
    for name in ("gpu:h100", "tpu:v5e"):
        lacks = pytest.mark.skipif(not any(map(find_spec, COMPILERS[name[:3]])), reason=f"no compiler for {name}")
        topologies.append(pytest.param(name, marks=[lacks, pytest.mark.xdist_group(name)]))
    both = pytest.mark.parametrize("topology", topologies), pytest.mark.parametrize(("case", "name"), found)
    return lambda test: both[0](both[1](test))


class Compiled(NamedTuple):
    """A program as it was lowered, its text and bytes, and the bytes of what it hands on: the training state, the cache."""

    lowered: str
    text: str
    bytes: Bytes
    kept: int


@cache
def traced(topology: str, case: str) -> dict[str, Any]:
    settings, names = CASES[case]
    config = build_config({}, {"model.num_blocks": 2} | SIZE | settings)
    target = find_topology(topology)
    model = config.architecture(V, target.platform)
    programs = [*generation_programs(target, config, model, 1, 384, 128)] if "decode" in names else []
    if "train" in names:
        programs += training_programs(target, config, model, traced_programs)
    return {program.name: program for program in programs}


@cache
def compiled(topology: str, case: str, name: str) -> Compiled:
    target = find_topology(topology)
    with target.assumed():
        program = traced(topology, case)[name]
        lowered = program.program.lower()
        found = target.compile(program.program, program.options)
    out = program.program.out_info[0]
    kept = size(out if name == "train" else out[0]) if name != "evaluation" else 0
    return Compiled(lowered.as_text(), found.as_text(), bytes_of(found), kept)


@each(*ALL)
def test_it_compiles_and_takes_little(topology, case, name):
    """A chip has room for a small model many times, whatever the settings."""
    assert compiled(topology, case, name).bytes.peak < 1 << 28


@each("train", "decode")
def test_what_is_handed_on_stays_where_it_is(topology, case, name):
    """The optimizer writes into the state, a token into the cache: of these nothing is copied, and the rest is small."""
    found = compiled(topology, case, name)
    assert found.kept > 100_000
    assert found.bytes.alias >= found.kept
    assert found.bytes.output - found.bytes.alias < 1 << 17


@each("train", "evaluation")
def test_attention_is_the_chips_own_kernel(topology, case, name):
    kernel = {"gpu:h100": "__cudnn$fmha", "tpu:v5e": "tpu_custom_call"}[topology]
    found = [count for target, count in kernels_in(compiled(topology, case, name).text).items() if target.startswith(kernel)]
    layers = {"greedy": 2, "muon": 1}[case]
    assert sum(found) >= layers * (2 if name == "train" else 1)  # forwards and backwards


@each("evaluation", "prefill", "decode", cases=("greedy", "chain", "router", "int8"))
def test_products_are_of_bfloat16(topology, case, name):
    lowered = compiled(topology, case, name).lowered
    products = re.findall(r"stablehlo\.dot_general .*? : \(tensor<([^>]+)>, tensor<([^>]+)>\)", lowered)
    assert len(products) >= 9  # four in each of two layers, and the output layer
    assert {side.rpartition("x")[2] for product in products for side in product} == {"bf16"}


@each(*ALL, cases=("greedy", "muon", "int8", "chain", "router"))
def test_nothing_is_sorted(topology, case, name):
    assert not any(kernel.startswith("sort") for kernel in kernels_in(compiled(topology, case, name).text))


@each("decode", cases=("greedy", "chain", "router", "int8"))
def test_the_one_loop_is_over_tokens(topology, case, name):
    """Every pass of another loop would start its kernels anew, token for token."""
    assert len(re.findall(r" while\(", compiled(topology, case, name).text)) == 1


@each("prefill")
def test_a_prompt_has_the_logits_of_its_last_token_alone(topology, case, name):
    text = compiled(topology, case, name).text
    shapes = [set(shape.split(",")) for shape in re.findall(r"\w+\[([\d,]+)\]", text)]
    assert any(str(V) in shape for shape in shapes) and any(str(T) in shape for shape in shapes)
    assert not any({str(V), str(T)} <= shape for shape in shapes)


@each("decode", cases=("int8", "compressed"))
def test_what_is_narrow_takes_less(topology, case, name):
    small, plain = compiled(topology, case, name), compiled(topology, "greedy", name)
    assert small.bytes.arguments < plain.bytes.arguments
    if case == "compressed":
        assert small.kept < 0.6 * plain.kept
