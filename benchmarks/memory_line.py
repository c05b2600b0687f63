"""Compares the memory estimate for a run with the measured memory of its first steps, on a CPU
under Linux.

The benchmark measures five models, each in its own process.

First the training step is compiled, and memory that the compiler has freed is returned to the
system. The measurement is the peak resident memory from the creation of the state to the end of
five steps, minus the resident memory before the state was created. Prints a JSON line for each
model.

    python benchmarks/memory_line.py [NAME …]
"""

import json
import subprocess
import sys
import time

from common import Parser

STEPS = 5
SHAPES = {
    "5M": (1_000, {
        "model": {"dim": 256, "n_heads": 4, "num_blocks": 6, "max_context": 256},
        "training": {"batch_size": 16, "optimizer": "adamw"},
    }),
    "13M": (8_000, {
        "model": {"dim": 384, "n_heads": 6, "kv_heads": 2, "num_blocks": 6, "max_context": 512,
                  "scan_layers": True},
        "attention": {"sliding_window": True, "context_window": 128},
        "training": {"batch_size": 8, "optimizer": "muon", "ema": 0.99},
    }),
    "29M": (4_000, {
        "model": {"dim": 256, "n_heads": 4, "num_blocks": 6, "max_context": 128},
        "moe": {"use_moe": True, "n_experts": 8, "top_k_mlp": 2},
        "training": {"batch_size": 16, "grad_accum": 4, "optimizer": "lion"},
    }),
    "58M": (32_000, {
        "model": {"dim": 512, "n_heads": 8, "num_blocks": 8, "max_context": 1024,
                  "weight_tying": False}
        | {"gradient_checkpointing": True},
        "training": {"batch_size": 4, "optimizer": "adafactor"},
    }),
    "124M": (50_304, {
        "model": {"dim": 768, "n_heads": 12, "num_blocks": 12, "max_context": 512},
        "training": {"batch_size": 4, "optimizer": "adamw"},
    }),
}  # fmt: skip


def resident(field: str) -> int:
    """Returns the value of `VmRSS` (resident memory) or `VmHWM` (its peak) in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields[field].split()[0]) * 1024


def measure(name: str) -> dict[str, object]:
    import jax
    import numpy as np

    from dantinox.config import build_config
    from dantinox.platform import release_free_memory
    from dantinox.programs import compile_program, memory_usage
    from dantinox.text import Batch
    from dantinox.training.memory import keep_freed_memory
    from dantinox.training.step import TrainStep

    vocabulary, sections = SHAPES[name]
    sections["training"] |= {"steps": STEPS, "warmup_steps": 0}
    config = build_config(sections)
    keep_freed_memory()
    model = config.architecture(vocabulary)
    rows = config.training.batch_size
    length = config.model.max_context
    training = TrainStep(config, model, STEPS)
    train = training.traced()["train"]
    step = compile_program(train.program.lower(), train.options)
    del train
    planned = memory_usage(step)
    random = np.random.default_rng(0)
    time.sleep(1)  # wait for the compiler's threads to end
    release_free_memory()
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # resets the peak
    state = training.initial_state()
    jax.block_until_ready(state)
    start = resident("VmHWM") - before
    release_free_memory()  # as in the training loop
    for _ in range(STEPS):
        ids = random.integers(0, vocabulary, (rows, length + 1)).astype(np.int32)
        batch = Batch(
            ids[:, :-1], ids[:, 1:], np.zeros_like(ids[:, 1:]), np.ones((rows, length), np.float32)
        )
        state, metrics = step(state, batch, {}, {})
        jax.block_until_ready((state, metrics))
    peak = resident("VmHWM") - before
    parameters = sum(array.size for array in state.parameters.values())
    return {
        "model": name, "parameters_m": round(parameters / 1e6, 1),
        "line_mb": round(planned.peak / 1e6, 1), "measured_mb": round(peak / 1e6, 1),
        "measured_of_line": round(peak / planned.peak, 3),
        "arguments_mb": round(planned.arguments / 1e6, 1), "temp_mb": round(planned.temp / 1e6, 1),
        "start_mb": round(start / 1e6, 1),
    }  # fmt: skip


def main() -> None:
    parser = Parser(__doc__, smoke={"names": ["5M"]})
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of {', '.join(SHAPES)} (default: all)"
    )
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"no model {unknown[0]}: choose from {', '.join(SHAPES)}")
    if len(names) == 1:
        print(json.dumps(measure(names[0])), flush=True)
        return
    for name in names or SHAPES:
        subprocess.run([sys.executable, __file__, name], check=True)


if __name__ == "__main__":
    main()
