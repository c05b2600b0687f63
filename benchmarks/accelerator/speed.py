"""The rows about speed: rates of the device, training steps, decoding, the engine, and low
precision.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from shapes import Measured, Shapes, llama_config, random_model, shapes_of, training_config

from dantinox.chips import find_chip
from dantinox.programs import memory_usage

# Published dense bfloat16 FLOP/s and bytes per second of cards that `dantinox.chips.CHIPS` does
# not have.
PUBLISHED = {
    "NVIDIA H200": (989.4e12, 4.8e12),  # NVIDIA H200 Tensor Core GPU data sheet
    "NVIDIA A100-SXM4-80GB": (312e12, 2.039e12),  # NVIDIA A100 Tensor Core GPU data sheet
    "NVIDIA A100-SXM4-40GB": (312e12, 1.555e12),
}
GREEDY, CHAIN = (
    {"greedy": True},
    {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.02,
        "seed": 0,
    },
)


def published_rates() -> tuple[float, float] | None:
    """Returns the published FLOP/s and bytes per second of the first device, or None."""
    device = jax.devices()[0]
    if chip := find_chip(device):
        return chip.flops, chip.bandwidth
    return PUBLISHED.get(device.device_kind)


def best_seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """Returns the shortest time of a call, which has run before."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return min(times)


def measured_rates(shapes: Shapes, loops: int = 10) -> tuple[float, float]:
    """Returns the FLOP/s of a bfloat16 product of square matrices, and the bytes per second that a
    copy reads and writes.
    """
    side = shapes.product
    a, b = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in range(2))

    @jax.jit
    def products(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(
            0,
            loops,
            lambda _, x: jnp.dot(x, b, preferred_element_type=jnp.bfloat16) * (side**-0.5),
            a,
        )

    @jax.jit
    def copies(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, loops, lambda _, x: x + 1, x)

    flops = loops * 2 * side**3 / best_seconds(lambda: products(a, b))
    array = jnp.zeros(shapes.copied // 4, jnp.float32)
    return flops, loops * 2 * array.nbytes / best_seconds(lambda: copies(array))


def peak_rates(shapes: Shapes) -> tuple[float, float]:
    """Returns the published rates of the device, or the measured ones if it is unknown."""
    return published_rates() or measured_rates(shapes)


def device_rates(options: Any) -> Measured:
    """Measures the rates of the device."""
    import importlib.metadata
    import platform

    device, published = jax.devices()[0], published_rates()
    flops, bandwidth = measured_rates(shapes_of(options.smoke))
    figures: dict[str, Any] = {"tflops": flops / 1e12, "copied_gb_per_s": bandwidth / 1e9}
    if published is not None:
        figures |= {"product_share": flops / published[0], "copy_share": bandwidth / published[1]}
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    stats = device.memory_stats() or {}
    machine = {
        "device": device.device_kind,
        "driver": driver_version(),
        "python": platform.python_version(),
    } | versions
    if "bytes_limit" in stats:
        figures["memory_gb"] = stats["bytes_limit"] / 1e9
    return Measured(figures, machine=machine)


def driver_version() -> str:
    """Returns the version of NVIDIA's driver, or the version that the platform reports."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            return file.readline().strip()
    except OSError:
        return str(jax.devices()[0].client.platform_version).split("\n")[0]


# --- training


def train_small(options: Any) -> Measured:
    """Measures a step of GPT-2 small, with and without recomputation."""
    shapes = shapes_of(options.smoke)
    plain, work, programs = train_step(
        shapes, "gpt2_124m", shapes.small_rows, shapes.changes, recompute=False
    )
    again, _, _ = train_step(shapes, "gpt2_124m", shapes.small_rows, shapes.changes, recompute=True)
    others = {f"recomputed_{name}": again[name] for name in ("tokens_per_s", "mfu", "compile_s")}
    return Measured(plain | others, work, 3, programs)


def train_large(options: Any) -> Measured:
    """Measures a step of the largest model whose training state fits, with recomputation."""
    shapes = shapes_of(options.smoke)
    changes = shapes.changes | shapes.large
    figures, work, programs = train_step(
        shapes, "llama_1b", shapes.large_rows, changes, recompute=True
    )
    return Measured(figures, work, 3, programs)


def train_step(
    shapes: Shapes, name: str, rows: int, changes: dict[str, Any], recompute: bool
) -> tuple[dict[str, Any], Callable[[], Any], dict[str, Any]]:
    """Compiles a training step and measures it: figures, work to trace, and the program."""
    from dantinox.model.flops import training_flops
    from dantinox.programs import compile_program
    from dantinox.text import Batch
    from dantinox.training.step import TrainStep

    config = training_config(name, rows, changes | {"model.gradient_checkpointing": recompute})
    vocabulary = config.tokenizer.vocab_size
    model = config.architecture(vocabulary)
    begin = time.perf_counter()
    training = TrainStep(config, model, config.training.steps)
    traced = training.traced()["train"]
    program = compile_program(traced.program.lower(), traced.options)
    compile_s = time.perf_counter() - begin
    ids = (
        np.random.default_rng(0)
        .integers(0, vocabulary, (rows, training.length + 1))
        .astype(np.int32)
    )
    batch = Batch(
        ids[:, :-1], ids[:, 1:], np.zeros_like(ids[:, 1:]), np.ones(ids[:, 1:].shape, np.float32)
    )
    placed = jax.device_put(batch)
    held = [training.initial_state()]

    def run(steps: int) -> Any:
        for _ in range(steps):
            held[0], metrics = program(held[0], placed, {}, {})
        return jax.block_until_ready(metrics)

    run(2)
    begin = time.perf_counter()
    metrics = run(shapes.steps)
    seconds = (time.perf_counter() - begin) / shapes.steps
    tokens, needs = rows * training.length / seconds, memory_usage(program)
    peak_flops, _ = peak_rates(shapes)
    figures = {
        "tokens_per_s": tokens, "mfu": tokens * training_flops(model, training.length) / peak_flops,
        "ms": 1e3 * seconds, "compile_s": compile_s, "rows": rows, "loss": float(metrics.loss),
        "predicted_gb": needs.peak / 1e9,
    }  # fmt: skip
    if used := (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"):
        figures |= {"peak_gb": used / 1e9, "memory_error": abs(needs.peak - used) / used}
    return figures, lambda: run(3), {"train": program}


# --- decoding


def decode(
    model: Any,
    shapes: Shapes,
    batch: int,
    settings: dict[str, Any],
    repeats: int = 3,
    plan: Any = None,
) -> dict[str, Any]:
    """Measures the decoding of a batch: tokens per second after the first token, of prefill, and of
    compilation.
    """
    first = run_static(model, shapes, batch, settings, 1, plan) + run_static(
        model, shapes, batch, settings, shapes.new, plan
    )
    prefill = min(run_static(model, shapes, batch, settings, 1, plan) for _ in range(repeats))
    total = min(
        run_static(model, shapes, batch, settings, shapes.new, plan) for _ in range(repeats)
    )
    return {
        "tokens_per_s": batch * (shapes.new - 1) / max(total - prefill, 0.1 * total),
        "prefill_ms": 1e3 * prefill,
        "compile_s": first - prefill - total,
    }  # fmt: skip


def run_static(
    model: Any, shapes: Shapes, batch: int, settings: dict[str, Any], new: int, plan: Any = None
) -> float:
    """Generates `new` tokens after random prompts of the same length, and returns the seconds."""
    from dantinox.generation.static_batch import StaticBatch, StaticOptions
    from dantinox.sampling import SamplingParams

    ids = np.random.default_rng(0).integers(1, model.config.vocab_size, (batch, shapes.prompt))
    params = SamplingParams.build(settings, batch=batch)
    begin = time.perf_counter()
    lengths, limits, options = (
        np.full(batch, shapes.prompt),
        np.full(batch, new),
        StaticOptions(plan=plan),
    )
    session = StaticBatch(
        model, ids, lengths, params, limits_B=limits, eos_ids=[[]] * batch, options=options
    )
    for _ in session.run(dispatch_ahead=True):
        pass
    return time.perf_counter() - begin


def prepared(shapes: Shapes, weights: str = "bfloat16", stored: Any = None) -> tuple[Any, int]:
    """Returns the decoded model and the bytes of weights that a step reads."""
    from dantinox.generation.decode.prepared_model import prepare, weight_bytes

    model = prepare(random_model(llama_config(shapes)) if stored is None else stored, weights)
    return (
        model,
        weight_bytes(model) - model.embed[...].nbytes,
    )  # a step reads a few rows of the table


def decode_one(options: Any) -> Measured:
    """Measures decoding at batch 1: greedy, and with a chain of samplers."""
    shapes = shapes_of(options.smoke)
    model, read = prepared(shapes)
    greedy, chain = (decode(model, shapes, 1, settings) for settings in (GREEDY, CHAIN))
    _, bandwidth = peak_rates(shapes)
    figures = greedy | {
        "bandwidth_share": greedy["tokens_per_s"] * read / bandwidth,
        "chain_share": chain["tokens_per_s"] / greedy["tokens_per_s"],
    }  # fmt: skip
    return Measured(figures, lambda: run_static(model, shapes, 1, GREEDY, shapes.new), shapes.new)


def decode_batches(options: Any) -> Measured:
    """Measures greedy decoding of larger batches."""
    shapes = shapes_of(options.smoke)
    model, _ = prepared(shapes)
    rates = {
        batch: decode(model, shapes, batch, GREEDY, repeats=2)["tokens_per_s"]
        for batch in (1, *shapes.batches)
    }
    figures = {f"tokens_per_s_{batch}": rate for batch, rate in rates.items()}
    figures |= {f"times_{batch}": rates[batch] / rates[1] for batch in shapes.batches}
    largest = shapes.batches[-1]
    return Measured(
        figures, lambda: run_static(model, shapes, largest, GREEDY, shapes.new), shapes.new
    )


def low_precision(options: Any) -> Measured:
    """Measures int8 and int4 weights and an int4 cache at batch 1 and 8; the smaller of the two
    ratios counts.
    """
    from dantinox.generation.decode.cache_plan import plan_cache

    shapes = shapes_of(options.smoke)
    stored = random_model(llama_config(shapes))
    quantized = plan_cache(stored.config, llama_config(shapes, kv__dtype="int4").kv, shapes.context)
    models = {
        weights: prepared(shapes, weights, stored)[0] for weights in ("bfloat16", "int8", "int4")
    }
    kinds = {
        "bfloat16": ("bfloat16", None),
        "int8": ("int8", None),
        "int4": ("int4", None),
        "int4_cache": ("bfloat16", quantized),
    }
    figures: dict[str, Any] = {}
    for kind, (weights, plan) in kinds.items():
        for batch in (1, shapes.batches[0]):
            rate = decode(models[weights], shapes, batch, GREEDY, repeats=2, plan=plan)[
                "tokens_per_s"
            ]
            figures[f"{kind}_{batch}"] = rate
    for kind in ("int8", "int4", "int4_cache"):
        figures[kind] = min(
            figures[f"{kind}_{batch}"] / figures[f"bfloat16_{batch}"]
            for batch in (1, shapes.batches[0])
        )
    return Measured(
        figures, lambda: run_static(models["int4"], shapes, 1, GREEDY, shapes.new), shapes.new
    )


def engine(options: Any) -> Measured:
    """Compares eight requests in an engine with the same prompts in a static batch, both with a
    chain of samplers.
    """
    from exactness import finish, request_of, slot_engine

    shapes = shapes_of(options.smoke)
    slots = 8
    server = slot_engine(llama_config(shapes), slots, shapes)
    prompts = np.random.default_rng(0).integers(1, 255, (slots, shapes.prompt))

    def serve() -> int:
        jobs = [
            server.add(request_of(server, prompt.tolist(), shapes.new, **CHAIN | {"seed": i}))
            for i, prompt in enumerate(prompts)
        ]
        return sum(len(tokens) for tokens, _ in finish(server, jobs))

    serve()
    begin = time.perf_counter()
    tokens = serve()
    served = tokens / (time.perf_counter() - begin)
    model = server.model.prepared(server.model.config.generation)
    first = run_static(model, shapes, slots, CHAIN, shapes.new)
    offline = (
        slots
        * shapes.new
        / min(run_static(model, shapes, slots, CHAIN, shapes.new) for _ in range(2))
    )
    figures = {
        "engine_tokens_per_s": served,
        "offline_tokens_per_s": offline,
        "engine_share": served / offline,
        "first_s": first,
    }
    return Measured(figures, serve, shapes.new)


def decode_profile(options: Any) -> Measured:
    """Counts the kernels of a token and the share of time between kernels, at batch 1."""
    from traces import device_times, trace

    shapes = shapes_of(options.smoke)
    model, _ = prepared(shapes)

    def work() -> Any:
        return run_static(model, shapes, 1, GREEDY, shapes.new)

    work()
    found = device_times(trace(work))
    return Measured(
        {
            "kernels_per_token": found.calls / shapes.new,
            "gaps": found.gaps,
            "busy_ms": found.busy_ms,
        },
        work,
        shapes.new,
    )
