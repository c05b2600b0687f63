"""`dantinox plan`: memory, FLOPs and minimum time of the compiled programs of a config, without
allocating memory.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from dantinox.config import Config, ModelConfig, UserError
from dantinox.distributed import (
    ONE_DEVICE,
    Layout,
    bytes_per_device,
    make_layout,
    shard_model_shapes,
    shard_program_arguments,
    tensor_mesh,
)
from dantinox.files import first_line
from dantinox.generation.decode.cache_plan import CachePlan, plan_cache
from dantinox.generation.decode.generate_toks import Stepper
from dantinox.generation.decode.prepared_model import prepare
from dantinox.generation.decode.uncached import UncachedStepper
from dantinox.generation.static_batch import StaticBatch, StaticOptions, slots_needed
from dantinox.lab.measure.program_cost import BYTES_SENT, count_work
from dantinox.lab.measure.topology import Topology
from dantinox.model import Transformer, compute_dtype
from dantinox.model.cache import uncompressed_slots
from dantinox.model.flops import (
    adapter_parameters,
    attention_flops,
    forward_flops,
    matrix_parameters,
    training_flops,
)
from dantinox.model.parameters import abstract_model
from dantinox.platform import get_platform
from dantinox.programs import Chip, MemoryUsage, memory_usage, tree_bytes
from dantinox.report.document import Block, Items, Table, to_lines
from dantinox.report.tables import Column, human_bytes, human_count, human_time, percent
from dantinox.sampling import SamplingParams

RUN_MFUS = (1.0, 0.4)  # the bound, and a usual value of large training runs
LOOKUP_TABLES = ("embed", "position_embed")  # each token reads one row of these tables
# If the corpus determines the length of the schedule; this constant does not affect the plan.
SCHEDULE_STEPS = 1000
# The formula of each program's FLOPs and its source; N, L, H, Q as in `dantinox.model.flops`.
FORMULAS = {
    "train": (
        "6N + 12·L·H·Q·T FLOPs per token (Chowdhery et al. 2022, appendix B), without"
        " recomputation; with n adapter weights 4N + 6n"
    ),
    "evaluation": "2N + 4·L·H·Q·T FLOPs per token (Kaplan et al. 2020, section 2.1)",
    "prefill": "as evaluation, but the output layer reads only the last token of a row",
    "decode": "2N + 4·L·H·Q·S FLOPs per token, where S is the number of cache slots",
}
# The most tokens of a batch with its new tokens; arrays of this size are allocated to trace the
# programs.
MAX_TOKENS = 1 << 28
# Custom calls of libtpu that are not kernels.
NON_KERNELS = {
    "AllocateBuffer", "AssumeGatherIndicesInBound", "AsyncCollectiveDone", "AsyncCollectiveStart",
    "ConcatBitcast",
    "GatherScatterIndicesBitpacked",
}  # fmt: skip
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Collectives:
    """The collectives of one kind in a call of a program: their number, and the bytes that each
    device sends.
    """

    count: int
    sent: int


@dataclass(frozen=True)
class Program:
    """The cost of one program on each device, and the minimum time of a call. A call of `decode` is
    one token per row.

    Attributes:
      mesh: description of the mesh that shares the program.
      reads: description of the input of a call.
      flops: a device's share of the model FLOPs, by `FORMULAS`, without work that the program
        discards.
      again: FLOPs of the second forward pass of the layers, if `model.gradient_checkpointing`
        recomputes everything.
      traffic: bytes that must move between memory and chip. Every weight, optimizer moment, key and
        value is read once. The bytes that are written, or received from other devices, are added.
        Temporary buffers of the compiled program are written and read once.
      collectives: kind → number per call, with loop iterations counted, and the bytes that the
        device sends.
      bytes: memory of the compiled program; None if it did not compile.
      needs: peak memory in bytes; None if the compiler does not report it.
      fits: whether the chip has this much memory; None if unknown.
      kernels: custom calls and sorts in the program's text, with their number of occurrences.
      compute_seconds, memory_seconds, link_seconds: time of `flops + again`, of `traffic`, and of
        the bytes sent to other devices, at the published rates of the chip; None without published
        rates.
      mfu: upper bound of the model FLOPs utilization, reached if a call takes no longer than the
        longest of the three times.
      failure: the error if the program did not compile.
    """

    name: str
    mesh: str
    reads: str
    flops: int
    again: int
    traffic: int
    bytes: MemoryUsage | None = None
    needs: int | None = None
    fits: bool | None = None
    kernels: Mapping[str, int] = field(default_factory=dict)
    collectives: Mapping[str, Collectives] = field(default_factory=dict)
    compute_seconds: float | None = None
    memory_seconds: float | None = None
    link_seconds: float | None = None
    mfu: float | None = None
    compile_seconds: float = 0.0
    failure: str | None = None


@dataclass(frozen=True)
class Plan:
    """The programs of a config on a machine.

    Attributes:
      chips: number of chips of the machine.
      memory: bytes of a chip; for this machine, the free bytes.
      chip: published figures of the chip.
      trained: number of trained parameters: all parameters, or those of adapters.
      matrix_parameters: N of the formulas: the weights in matrix multiplications, including the
        output layer, but without norms and lookup tables.
      steps: optimizer steps of a training run; None if the corpus determines them.
      batch: number of prompts in a batch.
      prompt: tokens of each prompt.
      new: generated tokens.
    """

    topology: str
    device: str
    chips: int
    memory: int | None
    chip: Chip | None
    dtype: str
    parameters: int
    trained: int
    matrix_parameters: int
    vocab_size: int
    steps: int | None
    batch: int
    prompt: int
    new: int
    formulas: dict[str, str]
    programs: list[Program]


# A program's figures before compilation, the traced program, and compiler options.
PlannedProgram = tuple[Program, Any, Mapping[str, Any]]
# `training.step.TrainStep`, whose `traced()` returns name → (rows, length, program, compiler
# options).
MakeTrainStep = Callable[[Config, ModelConfig, int, Layout], Any]


def make_plan(
    topology: Topology,
    config: Config,
    vocab_size: int,
    training: MakeTrainStep,
    *,
    meshes: Sequence[Mapping[str, int]] = (),
    batch: int = 1,
    prompt: int | None = None,
    new: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Compiles training, evaluation, prefill and decoding for a machine.

    Args:
      training: builds the train step, whose `traced()` returns the programs of training.
      meshes: axis sizes for each mesh to plan, overriding those of `distributed`; empty:
        `distributed` unchanged.
      batch: number of prompts in a batch, with `generation.n` samples each.
      prompt: tokens of each prompt; None: the context minus `new`.
      new: tokens to generate; None: `generation.max_new_tokens`, but at most half of the context.
      progress: called with a line before each compilation.

    Raises:
      UserError: prompt and new tokens do not fit in the context, the batch has more than
        `MAX_TOKENS` tokens, the settings name tokens by their text, or a mesh does not match the
        devices, the batch or the model.
    """
    model = config.architecture(vocab_size, topology.platform)
    if new is None:
        new = min(config.generation.max_new_tokens, model.max_context // 2)
    if prompt is None:
        prompt = model.max_context - new
    _check_sizes(batch, prompt, new, model.max_context, config.generation.n)
    distributed = [config.distributed.model_copy(update=dict(mesh)) for mesh in meshes or [{}]]
    mesh_configs = [config.model_copy(update={"distributed": section}) for section in distributed]
    trained = config.trained_architecture(vocab_size, topology.platform)
    layouts = [make_layout(mesh_config, trained, topology.devices) for mesh_config in mesh_configs]
    with topology.emulated():
        traced: list[PlannedProgram] = []
        for mesh_config, layout in zip(mesh_configs, layouts, strict=True):
            traced += training_programs(mesh_config, trained, training, layout)
        # The order groups the meshes of each program.
        traced.sort(key=lambda planned: planned[0].name, reverse=True)
        traced += generation_programs(topology, config, model, batch, prompt, new)
        programs = []
        for planned, program, options in traced:
            on = f" on {planned.mesh}" if len(topology.devices) > 1 else ""
            progress(f"compiling {planned.name} for {topology.name}{on}")
            programs.append(_compile_program(topology, planned, program, options))
    return Plan(
        topology=topology.name,
        device=topology.device.device_kind,
        chips=len(topology.devices),
        memory=topology.memory,
        chip=topology.chip,
        dtype=np.dtype(compute_dtype(model)).name,
        parameters=tree_bytes(abstract_model(model)[1]) // 4,
        trained=adapter_parameters(trained) or tree_bytes(abstract_model(model)[1]) // 4,
        matrix_parameters=matrix_parameters(model),
        vocab_size=vocab_size,
        steps=config.training.steps,
        batch=batch,
        prompt=prompt,
        new=new,
        formulas=FORMULAS,
        programs=programs,
    )


def _check_sizes(batch: int, prompt: int, new: int, context: int, samples: int) -> None:
    """Raises UserError if prompts and new tokens do not fit in the context, or the batch has too
    many tokens.
    """
    if min(batch, prompt, new) < 1 or prompt + new > context:
        raise UserError(
            "batch, prompt and new must be at least 1, and prompt + new at most the context of"
            f" {context}, got {batch}, {prompt} and {new}"
        )
    if batch * samples * (prompt + new) > MAX_TOKENS:
        raise UserError(
            f"batch × generation.n × (prompt + new) must be at most {MAX_TOKENS:,} tokens, "
            f"got {batch:,} × {samples} × {prompt + new}"
        )


def idle_expert_bytes(weights: Any, model: ModelConfig, tokens: int) -> int:
    """Returns the bytes of the experts that `tokens` tokens do not use, if every token uses
    different experts.
    """
    if model.experts is None:
        return 0
    held = tree_bytes(
        [
            leaf
            for path, leaf in nnx.to_flat_state(nnx.state(weights))
            if "experts" in path and path[-1] != "one"
        ]
    )
    taken = min(model.experts.count, tokens * model.experts.top_k)
    return held - held * taken // model.experts.count


def training_programs(
    config: Config, model: ModelConfig, training: MakeTrainStep, layout: Layout
) -> Iterator[PlannedProgram]:
    """Yields the optimizer step and the evaluation of a batch; `training` is that of
    `make_plan`.
    """
    steps = config.training.steps or SCHEDULE_STEPS
    train_step = training(config, model, steps, layout)
    teacher: Layout | None = None if train_step.teacher is None else train_step.teacher.layout
    for name, (rows, length, program, options) in train_step.traced().items():
        forward = forward_flops(model, length)
        per_token = training_flops(model, length) if name == "train" else forward
        if teacher is not None:
            per_token += forward_flops(teacher.model, length)
        flops = rows * length * per_token // layout.devices
        layers = rows * length * (forward - 2 * model.dim * model.vocab_size) // layout.devices
        again = layers if name == "train" and model.remat == "full" else 0
        # On one device, evaluation reads only some rows of the embedding table. A sharded table is
        # communicated and counts completely.
        (state, batch, base, teacher_weights), _ = program.in_avals
        weights = getattr(state, "parameters", state) | base
        table = tree_bytes(
            [leaf for path, leaf in weights.items() if path.partition("/")[0] == "embed"]
        )
        untouched = 0 if name == "train" or model.weight_tying or layout.mesh else table
        traffic = (
            layout.bytes_per_device((state, base))
            + tree_bytes(batch) // (layout.batch_shards * layout.row_shards)
            + layout.bytes_per_device(program.out_info)
            - untouched
        )
        if teacher is not None:
            traffic += teacher.bytes_per_device(teacher_weights)
        yield (
            Program(name, layout.label(), f"{rows} × {length} tokens", flops, again, traffic),
            program,
            options,
        )


def generation_programs(
    topology: Topology, config: Config, model: ModelConfig, batch: int, prompt: int, new: int
) -> Iterator[PlannedProgram]:
    """Yields prefill and decoding of `batch` prompts with the settings of `generation`, `router`
    and `kv`.
    """
    settings = config.generation
    rows = batch * settings.n
    model = replace(model, scan_layers=False)
    # XLA's cost analysis does not see the work of native kernels.
    weights = nnx.eval_shape(
        lambda: prepare(
            Transformer(model, rngs=nnx.Rngs(0)), settings.weights, settings.matmul_dtype, "xla"
        )
    )
    mesh = (
        tensor_mesh(model, settings.tensor_parallel, topology.devices)
        if settings.tensor_parallel > 1
        else None
    )
    place: Callable[[Any], Any] = topology.place
    if mesh is not None:
        weights = shard_model_shapes(weights, mesh)
        place = partial(shard_program_arguments, mesh)
    lengths = np.full(batch, prompt, np.int32)
    limits = np.full(batch, new)
    # The shares of the heads are measured on a trained model: here all heads get equal shares.
    kv = config.kv.model_copy(update={"signal": "uniform"} if config.kv.compresses else {})
    cache_plan = plan_cache(model, kv, slots_needed(lengths, limits))
    rows_batch = StaticBatch(
        weights,
        np.zeros((batch, prompt), np.int32),
        lengths,
        _sampling_params(config, batch, model.vocab_size),
        limits_B=np.repeat(limits, settings.n),
        eos_ids=[[0]] * rows,
        options=StaticOptions(
            stepper=Stepper() if settings.use_cache else UncachedStepper(),
            plan=cache_plan,
            samples=settings.n,
        ),
    )
    first, following = rows_batch.trace(place)
    options = dict(get_platform(topology.platform).decoding_options)
    read = bytes_per_device(
        place(
            [
                leaf
                for path, leaf in nnx.to_flat_state(nnx.state(weights))
                if path[-1] not in LOOKUP_TABLES
            ]
        )
    )
    cache = bytes_per_device(place(first.out_info[0].caches))
    head = 2 * model.dim * model.vocab_size  # FLOPs of the output layer per token
    token = 2 * matrix_parameters(model) - head  # FLOPs of all other matrix multiplications

    def forward(rows: int, length: int) -> int:
        """Returns the FLOPs of a forward pass over `rows` sequences that computes only their last
        logits.
        """
        return rows * (length * (token + attention_flops(model, length)) + head)

    shares = settings.tensor_parallel
    on = ONE_DEVICE if mesh is None else f"tensor {mesh.size}"
    flops = forward(batch, prompt) // shares
    yield (
        Program("prefill", on, f"{batch} × {prompt} tokens", flops, 0, read + cache),
        first,
        options,
    )
    if settings.use_cache:
        tokens = rows
        flops = rows * (
            token + head + _attention_flops_per_slot(model) * slots_read(model, cache_plan)
        )
        reads = f"{rows} × 1 token, {cache_plan.slots} slots"
    else:
        tokens = rows * cache_plan.slots
        flops = forward(rows, cache_plan.slots)
        reads = f"{rows} × {cache_plan.slots} tokens"
    idle = idle_expert_bytes(weights, model, tokens) // shares
    yield Program("decode", on, reads, flops // shares, 0, read - idle + cache), following, options


def _attention_flops_per_slot(model: ModelConfig) -> int:
    """Returns the FLOPs with which the query heads of one key/value head read a slot, as key and as
    value.
    """
    if model.latent is not None:  # all heads read the latent
        return 2 * (2 * model.latent.rank + model.latent.rotated_size) * model.n_heads
    return 2 * (2 * model.head_size) * (model.n_heads // model.kv_heads)


def _sampling_params(config: Config, batch: int, vocab_size: int) -> SamplingParams:
    """Returns the parameters of a batch of prompts, with placeholders for the tokens that a
    tokenizer would give.
    """
    settings = config.generation
    rows = batch * settings.n
    seeded = settings.model_copy(update={"seed": settings.seed or 0})
    return SamplingParams.build(
        config.model_copy(update={"generation": seeded}),
        batch=rows,
        stop_ids=[0],
        clarify_ids=[[0]] * rows if config.router.clarify_text else None,
        sample_index=[*range(settings.n)] * batch,
        vocab_size=vocab_size,
    )


def slots_read(model: ModelConfig, plan: CachePlan) -> int:
    """Returns the number of slots that a step reads, over all key/value heads of all layers."""
    if plan.compression is None:
        heads = [
            model.of_layer(i).kv_heads if model.latent is None else 1
            for i in range(model.num_blocks)
        ]
        return sum(
            count * span
            for count, span in zip(heads, uncompressed_slots(model, plan.slots), strict=True)
        )
    return sum(heads * slots for groups in plan.compression.groups for heads, slots in groups)


def _compile_program(
    topology: Topology, planned: Program, program: Any, options: Mapping[str, Any]
) -> Program:
    started = time.perf_counter()
    usage = None
    needs = None
    kernels = {}
    failure = None
    collectives: dict[str, Collectives] = {}
    try:
        compiled = topology.compile(program, options)
        text = compiled.as_text()
        usage = memory_usage(compiled)
        kernels = find_kernels(text)
        work = count_work(text)
        collectives = {
            kind: Collectives(work.count[kind], round(work.sent[kind]))
            for kind in BYTES_SENT
            if work.count[kind]
        }
        needs = usage.peak
    except jax.errors.JaxRuntimeError as error:
        failure = first_line(error)
        needs = parse_needed_bytes(failure)
    seconds = time.perf_counter() - started
    memory = topology.memory
    chip = topology.chip
    fits = None if needs is None or memory is None else needs <= memory and failure is None
    sent = sum(collective.sent for collective in collectives.values())
    temporary = 2 * (0 if usage is None else usage.temp)
    finished = replace(
        planned, traffic=planned.traffic + sent + temporary, bytes=usage, needs=needs, fits=fits,
        kernels=kernels, collectives=collectives, compile_seconds=seconds, failure=failure,
    )  # fmt: skip
    if chip is None:
        return finished
    times = (
        (finished.flops + finished.again) / chip.flops,
        finished.traffic / chip.bandwidth,
        sent / chip.link,
    )
    mfu = finished.flops / chip.flops / max(filter(None, times))
    return replace(
        finished, compute_seconds=times[0], memory_seconds=times[1], link_seconds=times[2], mfu=mfu
    )


def find_kernels(text: str) -> dict[str, int]:
    """Counts the kernels in a program's text: custom calls by target, Triton and cuDNN fusions by
    kind, sorts by length.
    """
    names = re.findall(r'custom_call_target="([^"]+)"', text) + re.findall(
        r'"kind":"(__(?:triton|cudnn)[^"]*)"', text
    )
    for shape, axis in re.findall(r"= \(?\w+\[([\d,]+)\].* sort\(.*dimensions=\{(\d+)\}", text):
        names.append(f"sort of {shape.split(',')[int(axis)]}")
    return dict(sorted(Counter(name for name in names if name not in NON_KERNELS).items()))


def parse_needed_bytes(failure: str) -> int | None:
    """Returns the memory that an out-of-memory error of the compiler reports as needed, in bytes;
    None for other errors.
    """
    number = (
        re.search(r"(\d+(?:\.\d+)?)([KMGT])\b", failure)
        if "RESOURCE_EXHAUSTED" in failure
        else None
    )
    return number and int(float(number[1]) * UNITS[number[2]])


def _milliseconds(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return f"{1e3 * seconds:.3g}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def _bytes(kind: str) -> Column:
    return Column(kind, kind, lambda p: p.bytes and human_bytes(getattr(p.bytes, kind)))


def _collective_column(kind: str) -> Column:
    """Returns a column with the number of collectives of a kind and the bytes that a device sends
    in them.
    """

    def cell(p: Program) -> str | None:
        collective = p.collectives.get(kind)
        return (
            None if collective is None else f"{collective.count} · {human_bytes(collective.sent)}"
        )

    return Column(kind, kind, cell)


NAME_COLUMNS = (
    Column("program", "program", lambda p: p.name),
    Column("reads", "reads", lambda p: p.reads),
)
MESH_COLUMNS = (NAME_COLUMNS[0], Column("mesh", "mesh", lambda p: p.mesh), NAME_COLUMNS[1])
MEMORY_COLUMNS = (
    *map(_bytes, ("arguments", "temp", "output", "alias")),
    Column("needs", "needs", lambda p: p.needs and human_bytes(p.needs)),
    Column("compile", "compiled\nin s", lambda p: p.compile_seconds, ".1f"),
)
TIME_COLUMNS = (
    Column("flops", "FLOPs", lambda p: human_count(p.flops)),
    Column("again", "recompute", lambda p: human_count(p.again) if p.again else None),
    Column("traffic", "traffic", lambda p: human_bytes(p.traffic)),
    Column("compute", "compute\nms ≥", lambda p: _milliseconds(p.compute_seconds)),
    Column("memory", "memory\nms ≥", lambda p: _milliseconds(p.memory_seconds)),
    Column(
        "links", "links\nms ≥", lambda p: _milliseconds(p.link_seconds) if p.collectives else None
    ),
    Column("mfu", "MFU ≤", lambda p: p.mfu and percent(p.mfu)),
)
COLLECTIVE_COLUMNS = tuple(map(_collective_column, BYTES_SENT))


def plan_lines(plan: Plan, width: int = 100) -> Iterator[str]:
    """Yields the machine, the tables of programs, and remarks on each program, in lines of at most
    `width`.
    """
    return to_lines(_plan_blocks(plan), width)


def _plan_blocks(plan: Plan) -> Iterator[Block]:
    yield Items(list(_machine(plan)))
    names = MESH_COLUMNS if plan.chips > 1 else NAME_COLUMNS
    for table in (MEMORY_COLUMNS, TIME_COLUMNS, COLLECTIVE_COLUMNS):
        programs = [
            program
            for program in plan.programs
            if table is not COLLECTIVE_COLUMNS or program.collectives
        ]
        columns = [
            column
            for column in table
            if any(column.value(program) is not None for program in programs)
        ]
        if programs:
            yield Table([*names, *columns], programs, front=len(names))
    yield Items([*(_program_remark(plan, program) for program in plan.programs), *_run_time(plan)])
    formulas = [f"{name}: {formula}" for name, formula in plan.formulas.items()]
    yield Items(
        [
            f"N = {human_count(plan.matrix_parameters)} weights in matrix multiplications; FLOPs:",
            *formulas,
        ]
    )


def _program_remark(plan: Plan, program: Program) -> str:
    place = f" on {program.mesh}" if plan.chips > 1 else ""
    kernels = "".join(f", {count} × {name}" for name, count in program.kernels.items())
    return f"{program.name}{place}: {_fits(program, plan.memory)}{kernels}"


def _machine(plan: Plan) -> Iterator[str]:
    memory = "memory unknown" if plan.memory is None else human_bytes(plan.memory)
    yield f"{plan.topology} ({plan.device}), {memory}"
    if plan.chip is None:
        yield "no time bounds: no figures are published for this machine"
    else:
        yield (
            f"{human_count(plan.chip.flops)} bfloat16 FLOP/s, {human_bytes(plan.chip.bandwidth)}/s:"
            f" {plan.chip.source}"
        )
    if plan.chips > 1:
        link = f", links of {human_bytes(plan.chip.link)}/s" if plan.chip else ""
        yield (
            f"{plan.chips} chips{link}: all figures are per chip; the bytes of a collective are the"
            " bytes that a chip sends"
        )
    adapters = ""
    if plan.trained != plan.parameters:
        adapters = f" and {human_count(plan.trained)} trained adapter parameters"
    yield (
        f"{human_count(plan.parameters)} parameters{adapters}, computed in {plan.dtype}, vocabulary"
        f" of {plan.vocab_size}"
    )


def _run_time(plan: Plan) -> Iterator[str]:
    """Yields the time of all training steps at two model FLOPs utilizations, if the figures of the
    chip are published.
    """
    train = next((program for program in plan.programs if program.name == "train"), None)
    if train is None or plan.chip is None:
        return
    steps = plan.steps or SCHEDULE_STEPS
    seconds = steps * train.flops / plan.chip.flops
    more = "" if plan.steps else "; the corpus determines the number of steps"
    times = " and ".join(f"{human_time(seconds / mfu)} at {mfu:.0%} MFU" for mfu in RUN_MFUS)
    yield f"train: {steps:,} steps take {times}, without evaluations{more}"


def _fits(program: Program, memory: int | None) -> str:
    if program.fits:
        return "fits"
    if program.needs is None or memory is None:
        return "not compiled: " + program.failure if program.failure else "unknown whether it fits"
    over = program.needs - memory
    return (
        f"does not fit, {human_bytes(over)} too much"
        if over > 0
        else f"does not fit: {program.failure}"
    )
