"""The plan of a tiny model on this machine: bytes and FLOPs counted by hand, JSON, and error
messages.
"""

import importlib
import inspect
import json
import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import jax
import pytest

from dantinox import cli
from dantinox.chips import CHIPS
from dantinox.config import ExpertsConfig, LatentConfig, UserError, build_config, dump_config
from dantinox.distributed import make_layout
from dantinox.lab.measure import topology as topologies
from dantinox.lab.measure.plan import (
    Collectives,
    find_kernels,
    generation_programs,
    make_plan,
    matrix_parameters,
    parse_needed_bytes,
    training_programs,
)
from dantinox.lab.measure.plan_view import plan_lines
from dantinox.lab.measure.topology import CUDNN_MODULE, _emulate_h100, find_topology
from dantinox.model.flops import attention_flops
from dantinox.model.parameters import abstract_model
from dantinox.report.tables import human_time
from dantinox.training.step import TrainStep
from tests.error_texts import ERRORS

# D = 16, two heads of 8 and one key head, two layers of which one sees 5 keys, F = 24, V = 259
# (bytes), T = 32.
SETTINGS = {
    "model.dim": 16, "model.n_heads": 2, "model.kv_heads": 1, "model.num_blocks": 2,
    "model.hidden_dim": 24, "model.max_context": 32, "tokenizer.tokenizer_type": "byte",
    "training.batch_size": 4, "training.warmup_steps": 0, "attention.sliding_window": True,
    "attention.context_window": 4, "attention.layer_types": ["sliding", "full"],
    "generation.greedy": True, "generation.max_new_tokens": 10,
}  # fmt: skip
BLOCK = (
    16 * 8 * (2 + 2) + 2 * 8 * 16 + 3 * 16 * 24
)  # queries, key and value; output; gate, up and down
N = 2 * BLOCK + 16 * 259
PASSES = """HloModule passes, num_partitions=4
ENTRY %main (p: f32[8,4]) -> f32[32,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %all = f32[32,4]{1,0} all-gather(%p), replica_groups=[1,4]<=[4], dimensions={0}
}
"""


@pytest.fixture(scope="module")
def config():
    return build_config({}, SETTINGS)


@pytest.fixture(scope="module")
def plan(config):
    return make_plan(find_topology("cpu"), config, 259, TrainStep, batch=3, prompt=20)


@pytest.fixture
def command(config, tmp_path):
    """Returns a function that runs `dantinox plan` with these settings from a file."""
    path = tmp_path / "tiny.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    return lambda *flags: cli.main(["plan", "--config", str(path), *flags])


@pytest.fixture
def programs(plan):
    return {program.name: program for program in plan.programs}


def test_parameters_and_matrix_parameters_are_counted(plan, config):
    assert plan.matrix_parameters == N
    assert (
        plan.parameters == N + 5 * 16
    )  # two norms per block and a final one; the embedding table is the output layer
    assert (plan.topology, plan.dtype, plan.chips, plan.chip) == ("cpu", "float32", 1, None)


LATENT = LatentConfig(6, 4, 10)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "gelu", "no_sink": True},
        {"weight_tying": False},
        {"latent": LATENT, "no_sink": True},
        {"latent": replace(LATENT, query_rank=7)},
    ],
)
def test_matrix_parameters_are_the_shapes_of_the_kernels(config, changes):
    model = replace(config.architecture(259), **changes)
    kernels = {
        name: leaf.size
        for name, leaf in abstract_model(model)[1].items()
        if name.endswith("kernel")
    }
    assert matrix_parameters(model) == sum(kernels.values()) + (
        16 * 259 if model.weight_tying else 0
    )


def test_only_the_experts_of_a_token_count(config):
    model, D = replace(config.architecture(259), experts=ExpertsConfig(5, 2, shared_dim=24)), 16
    assert matrix_parameters(model) - N == 2 * (
        2 * 3 * D * 24 + 5 * D
    )  # per layer: two more experts, and the router


def test_flops_of_latents(config):
    """In training, queries and keys have 8 + 4 numbers and values have 10.

    In decoding, which reads the latents, queries and keys have 6 + 4 numbers and values have 6.
    """
    settings = {
        f"attention.{key}": value
        for key, value in (("kv_lora_rank", 6), ("qk_rope_head_dim", 4), ("v_head_dim", 10))
    }
    changed = build_config({}, SETTINGS | settings | {"model.kv_heads": None})
    model = changed.architecture(259, "cpu")
    assert attention_flops(model, 32) == 2 * 2 * (12 + 10) * (5 + 32)
    decode = list(generation_programs(find_topology("cpu"), changed, model, 3, 20, 10))[1][0]
    assert decode.flops == 3 * (2 * matrix_parameters(model) + 2 * 2 * (10 + 6) * (5 + 32))


LONG = ("plain", "latents, sinks, caps")


@pytest.mark.parametrize(
    ("name", "compiled"),
    [("plain", False), *(pytest.param(name, True, marks=pytest.mark.slow) for name in LONG)],
)
def test_long_sequences_allocate_no_quadratic_memory(name, compiled):
    """Covers a step with 8,192 tokens and the prefill of 32,768 tokens: their traces or the
    programs.
    """
    settings = {
        "model.dim": 16,
        "model.n_heads": 2,
        "model.num_blocks": 1,
        "model.hidden_dim": 16,
        "training.batch_size": 1,
    }
    settings |= {
        "generation.greedy": True,
        "generation.max_new_tokens": 8,
        "training.warmup_steps": 0,
    }
    if name != LONG[0]:
        settings |= {
            "attention.kv_lora_rank": 8,
            "attention.sink_logits": True,
            "attention.attn_logit_softcapping": 30.0,
        }
    for length, named in ((8192, "train"), (32768, "prefill")):
        config = build_config(
            {}, settings | {"model.max_context": length + 8 * (named == "prefill")}
        )
        model, topology = config.architecture(259, "cpu"), find_topology("cpu")
        if named == "train":
            program = TrainStep(config, model, 9).traced()["train"].program
        else:
            program = next(generation_programs(topology, config, model, 1, length, 8))[1]
        text = program.lower().compile().as_text() if compiled else str(program.jaxpr)
        shapes = {
            tuple(map(int, shape.split(","))) for shape in re.findall(r"\w\[([\d,]+)\]", text)
        }
        assert (1, length) in shapes and not [
            s for s in shapes if sum(size >= length for size in s) > 1
        ]


def test_flops_by_hand(programs):
    """Queries see 5 and 32 keys in training, 5 and 20 in prefill, 5 and 32 slots (20 + 10, padded)
    in decoding.
    """
    head = 2 * 16 * 259
    assert programs["train"].flops == 4 * 32 * (6 * N + 12 * 16 * (5 + 32))
    assert programs["evaluation"].flops == 256 * 32 * (2 * N + 4 * 16 * (5 + 32))
    assert programs["prefill"].flops == 3 * (20 * (2 * N - head + 4 * 16 * (5 + 20)) + head)
    assert programs["decode"].flops == 3 * (2 * N + 4 * 16 * (5 + 32))


def test_bytes_by_hand(programs):
    weights, head, cache = 4 * (N + 5 * 16), 4 * 16 * 259, 3 * 2 * 8 * (5 + 32) * 4
    train, batch = programs["train"], 4 * 4 * 32 * 4
    # Weights and two moments, three step counters, two pairs of sums; the metrics are three
    # numbers.
    assert 3 * weights + batch < train.bytes.arguments < 3 * weights + batch + 100
    assert train.traffic - 2 * train.bytes.temp == pytest.approx(2 * 3 * weights + batch, abs=200)
    assert train.bytes.alias >= 3 * weights and train.needs == train.bytes.peak
    assert 0 <= programs["evaluation"].bytes.arguments - weights - 4 * 256 * 32 * 4 < 100
    # Decoding has a separate output layer in addition to the embedding table, and reads only that
    # layer.
    decode = programs["decode"]
    assert 0 <= decode.bytes.arguments - weights - head - cache < 300
    assert cache <= decode.bytes.alias < cache + 300
    for program in (decode, programs["prefill"]):
        assert program.traffic == weights + cache + 2 * program.bytes.temp
    assert all(
        program.fits and program.compute_seconds is None and program.failure is None
        for program in programs.values()
    )


def test_cache_and_generation_settings_change_the_plan(config):
    topology = find_topology("cpu")

    def decode(**changes):
        changed = build_config(
            {}, SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
        )
        model = changed.architecture(259, "cpu")
        return list(generation_programs(topology, changed, model, 1, 20, 10))[1][0]

    plain, narrow, twice = decode(), decode(generation__weights="int8"), decode(generation__n=2)
    cache = 2 * 8 * (5 + 32) * 4
    assert twice.flops == 2 * plain.flops and twice.traffic == plain.traffic + cache
    numbers, rows = 2 * BLOCK + 16 * 259, 2 * (8 * 4 + 16 + 2 * 24 + 16) + 259
    narrow_layers = 2 * 4 + 1  # each with an extra number that is 1
    assert narrow.traffic == numbers + 4 * (rows + narrow_layers + 5 * 16) + cache
    whole = decode(generation__use_cache=False)
    head = 2 * 16 * 259
    assert (
        whole.flops == 32 * (2 * N - head + 4 * 16 * (5 + 32)) + head
        and whole.traffic == plain.traffic - cache
    )


def test_time_bounds_follow_from_published_figures(plan, config, monkeypatch):
    here = find_topology("cpu")
    slow = replace(CHIPS["v5e"], flops=1e9, bandwidth=1e6, link=1e5, memory=1000)
    target = replace(here, chip=slow, memory=slow.memory)
    monkeypatch.setattr(topologies.Topology, "compile", lambda *_: next(compiled))
    text = SimpleNamespace(
        argument_size_in_bytes=900,
        temp_size_in_bytes=300,
        output_size_in_bytes=50,
        alias_size_in_bytes=40,
    )
    program = SimpleNamespace(memory_analysis=lambda: text, as_text=lambda: PASSES)

    def broken():
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: memory required (3.00K) exceeds available HBM (1.00K)"
        )

    compiled = iter([program] * 4)
    found = make_plan(target, config, 259, TrainStep, batch=3, prompt=20)
    train = found.programs[0]
    assert (train.needs, train.fits) == (900 + 300 + 50 - 40, False)
    assert (
        train.compute_seconds == train.flops / 1e9 and train.memory_seconds == train.traffic / 1e6
    )
    assert (
        train.collectives == {"all-gather": Collectives(1, 3 * 128)}
        and train.link_seconds == 3 * 128 / 1e5
    )
    assert train.mfu == train.compute_seconds / max(train.compute_seconds, train.memory_seconds)
    # Temporary buffers are written and read once; an all-gather receives the parts of three other
    # devices.
    model = config.trained_architecture(259)
    by_hand, *_ = next(
        training_programs(config, model, TrainStep, make_layout(config, model, here.devices))
    )
    assert train.traffic == by_hand.traffic + 2 * 300 + 3 * 128
    assert found.steps is None and "train: 1,000 steps take" in "\n".join(plan_lines(found))
    seconds = 4 * 32 * (6 * N + 12 * 16 * (5 + 32)) * 50_000 / 1e9
    timed = "\n".join(plan_lines(replace(found, steps=50_000), 200))
    assert (
        f"50,000 steps take {human_time(seconds)} at 100% MFU and {human_time(seconds / 0.4)} at"
        " 40% MFU" in timed
    )
    again = config.model_copy(
        update={"model": config.model.model_copy(update={"gradient_checkpointing": True})}
    )
    compiled = iter([program] * 4)
    twice = make_plan(target, again, 259, TrainStep).programs[0]
    assert twice.flops == train.flops and twice.again == 4 * 32 * (4 * BLOCK + 4 * 16 * (5 + 32))
    assert twice.compute_seconds == (twice.flops + twice.again) / 1e9
    assert twice.mfu == pytest.approx(
        twice.flops / 1e9 / max(twice.compute_seconds, twice.memory_seconds)
    )
    lines = "\n".join(plan_lines(found))
    assert (
        re.search(r"program +reads +all-gather\n", lines)
        and "1 · 384 B" in lines
        and "train: does not fit, 210 B too much" in lines
    )
    monkeypatch.setattr(topologies.Topology, "compile", lambda *_: broken())
    found = make_plan(target, config, 259, TrainStep)
    assert [program.needs for program in found.programs] == [3072] * 4
    assert "decode: does not fit, 2.07 kB too much" in "\n".join(plan_lines(found))


def test_kernels_and_memory_errors_of_a_program():
    text = """
  %sort.1 = (f32[1,8192]{1,0}, s32[1,8192]{1,0}) sort(%a, %b), dimensions={1}, is_stable=true, to_apply=%less
  %sort.2 = f32[256]{0} sort(%c), dimensions={0}, to_apply=%less
  %k = bf16[8] custom-call(%d), custom_call_target="tpu_custom_call", backend_config={}
  %l = bf16[8] custom-call(%d), custom_call_target="tpu_custom_call", backend_config={}
  %g = bf16[8] fusion(%d), kind=kCustom, calls=%f, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
"""
    assert find_kernels(text) == {
        "__triton_gemm": 1,
        "sort of 256": 1,
        "sort of 8192": 1,
        "tpu_custom_call": 2,
    }
    message = (
        "RESOURCE_EXHAUSTED: E1000: memory required for HLO temporaries"
        " (26.25G) exceeds available HBM (15.75G)"
    )
    assert parse_needed_bytes(message) == 26.25 * 2**30
    assert parse_needed_bytes("INTERNAL: 3.5G of something") is None


def test_json_and_table_agree(plan, command, capfd):
    assert command("--topology", "cpu", "--batch", "3", "--prompt", "20", "--json") == 0
    out, err = capfd.readouterr()
    found, same = json.loads(out), json.loads(json.dumps(asdict(plan)))
    assert err.count("\n") == 4 and "compiling decode for cpu" in err
    for record in (found, same):
        record["memory"] = None
        for program in record["programs"]:
            program["compile_seconds"] = 0
    assert found == same
    lines = list(plan_lines(plan, 90))
    assert max(map(len, lines)) <= 90 and any(
        line.startswith("decode") and "3 × 1 token, 32 slots" in line for line in lines
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu:h200", "unknown topology gpu:h200: use one of cpu, gpu:h100, tpu:v5e, "),
        ("tpu:h100", "unknown topology tpu:h100: "),
        ("gpu:h100:2x2", "unknown topology gpu:h100:2x2: "),
        ("gpu:h100:9", "unknown topology gpu:h100:9: "),
        ("tpu:v5e:", "unknown topology tpu:v5e:: "),
        ("tpu:v5e:4by4", "unknown topology tpu:v5e:4by4: "),
        (
            "gpu:h100",
            (
                "the compiler for gpu:h100 is not installed: in a"
                " separate environment and in a checkout"
            ),
        ),
        (
            "tpu:v5e:1x1",
            (
                "the compiler for tpu:v5e:1x1 is not installed: in a separate"
                " environment of Python 3.12 or newer"
            ),
        ),
    ],
)
def test_unknown_machine_is_one_sentence(name, message, command, monkeypatch, capfd):
    monkeypatch.setattr(topologies, "find_spec", lambda name: None)
    assert command("--topology", name) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1


def test_texts_that_exceed_the_context(config):
    with pytest.raises(UserError, match=ERRORS["prompt_new_at_most_the"]):
        make_plan(find_topology("cpu"), config, 259, TrainStep, prompt=30)


def test_an_error_names_only_the_given_size(config):
    message = "--new must be in [1, 31], less than the context of 32, got 99"
    with pytest.raises(UserError, match=re.escape(message)):
        make_plan(find_topology("cpu"), config, 259, TrainStep, new=99)


def test_a_batch_that_is_too_large(config):
    """The limit is checked before an array of the size of the batch is allocated."""
    message = (
        "batch × generation.n × (prompt + new) must be at most"
        " 268,435,456 tokens, got 10,000,000 × 1 × 32"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        make_plan(find_topology("cpu"), config, 259, TrainStep, batch=10**7)


def test_private_functions_of_cudnn_attention_are_patched_and_restored(monkeypatch):
    """Fails when JAX renames the functions with which its cuDNN attention queries the device, or
    changes their arguments.
    """
    module = importlib.import_module(CUDNN_MODULE)
    queries = (
        "check_cudnn_version",
        "check_compute_capability",
        "is_cuda_compute_capability_equal",
    )
    originals = {name: getattr(module, name) for name in queries}
    assert [len(inspect.signature(function).parameters) for function in originals.values()] == [
        0,
        1,
        1,
    ]
    with _emulate_h100():
        assert module.check_cudnn_version() == 91000
        assert module.check_compute_capability("8.0") and not module.check_compute_capability(
            "10.0"
        )
        assert module.is_cuda_compute_capability_equal(
            "9.0"
        ) and not module.is_cuda_compute_capability_equal("8.0")
    assert {name: getattr(module, name) for name in queries} == originals
    monkeypatch.delattr(module, queries[0])
    with pytest.raises(UserError, match=ERRORS["cannot_compile_for_a_gpu"]), _emulate_h100():
        pass
