"""Times one optimizer step of a Llama-shaped model: forward, backward, clipping, AdamW. Each step
is synchronized.

Prints a JSON line with `"peer": "dantinox"`. Compile time is reported separately. With
`--fusion_types`, the programs of all values alternate, and each has its own line. With `--torch`,
another process then runs the steps of a transformers Llama of the same size, under autocast with
`--dtype bfloat16`.

    python benchmarks/train_step.py --dim 128 --layers 4 --torch /path/to/python-with-torch
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

from common import Parser, use_threads


def parse() -> argparse.Namespace:
    a = Parser(__doc__, smoke={"dim": 32, "layers": 1, "hidden": 64, "block": 16, "steps": 12})
    a.add_argument("--dim", type=int, default=128)
    a.add_argument("--layers", type=int, default=4)
    a.add_argument("--heads", type=int, default=4)
    a.add_argument("--hidden", type=int, default=352)
    a.add_argument("--vocab", type=int, default=65)
    a.add_argument("--batch", type=int, default=12)
    a.add_argument("--block", type=int, default=64)
    a.add_argument(
        "--steps", type=int, default=60, help="more than 10: the first ten are not counted"
    )
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    a.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    a.add_argument(
        "--fusion_types",
        nargs="+",
        default=["auto"],
        help="values of xla_cpu_experimental_ynn_fusion_type",
    )
    a.add_argument("--torch", help="a Python interpreter with torch and transformers")
    a.add_argument("--part", choices=("torch",), help=argparse.SUPPRESS)
    options = a.parse_args()
    if options.steps <= 10:
        a.error("--steps must be more than 10: the first ten are not counted")
    return options


def torch_steps(o: argparse.Namespace) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(o.threads)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=o.vocab, hidden_size=o.dim, intermediate_size=o.hidden,
        num_hidden_layers=o.layers, num_attention_heads=o.heads, num_key_value_heads=o.heads,
        max_position_embeddings=o.block, tie_word_embeddings=False,
    ))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    times = []
    for _ in range(o.steps):
        ids = torch.randint(0, o.vocab, (o.batch, o.block + 1))
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=o.dtype == "bfloat16"):
            logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().reshape(-1, o.vocab), ids[:, 1:].reshape(-1)
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.append(time.perf_counter() - start)
    print(json.dumps({
        "peer": "torch", "params_m": round(sum(p.numel() for p in model.parameters()) / 1e6, 2),
        "dtype": o.dtype, "ms_per_step": round(statistics.median(times[10:]) * 1e3, 2),
        "min_ms_per_step": round(min(times[10:]) * 1e3, 2),
    }))  # fmt: skip


def main() -> None:
    o = parse()
    if o.part:
        torch_steps(o)
        return
    use_threads(o.threads)  # before jax starts its threads
    import jax
    import numpy as np

    from dantinox.config import build_config
    from dantinox.programs import compile_program
    from dantinox.text import Batch
    from dantinox.training.memory import keep_freed_memory
    from dantinox.training.step import TrainStep

    keep_freed_memory()
    config = build_config({
        "model": {
            "dim": o.dim, "n_heads": o.heads, "num_blocks": o.layers, "hidden_dim": o.hidden,
            "max_context": o.block, "weight_tying": False, "dtype": o.dtype,
        },
        "training": {
            "steps": o.steps, "batch_size": o.batch, "lr": 1e-3, "beta2": 0.99,
            "schedule": "constant", "warmup_steps": 0,
            "optimizer": o.optimizer,
        },
    })  # fmt: skip
    model = config.architecture(o.vocab)
    training = TrainStep(config, model, o.steps)
    train = training.traced()["train"]
    # By fusion type: the compiled step, its state, the seconds of its compilation, and those of
    # each step.
    steps = {}
    states = {}
    compile_s = {}
    times = {value: [] for value in o.fusion_types}
    for value in o.fusion_types:
        start = time.perf_counter()
        option = {} if value == "auto" else {"xla_cpu_experimental_ynn_fusion_type": value}
        steps[value] = compile_program(train.program.lower(), train.options | option)
        compile_s[value] = time.perf_counter() - start
        states[value] = training.initial_state()
    random = np.random.default_rng(0)
    for _ in range(o.steps):
        ids = random.integers(0, o.vocab, (o.batch, o.block + 1)).astype(np.int32)
        batch = Batch(
            ids[:, :-1],
            ids[:, 1:],
            np.zeros_like(ids[:, 1:]),
            np.ones(ids[:, 1:].shape, np.float32),
        )
        for value, step in steps.items():
            start = time.perf_counter()
            states[value], metrics = step(states[value], batch, {}, {})
            jax.block_until_ready((states[value], metrics))
            times[value].append(time.perf_counter() - start)
    for value, step in steps.items():
        ms = statistics.median(times[value][10:]) * 1e3
        print(json.dumps({
            "peer": "dantinox",
            "params_m": round(sum(x.size for x in states[value].parameters.values()) / 1e6, 2),
            "ms_per_step": round(ms, 2), "min_ms_per_step": round(min(times[value][10:]) * 1e3, 2),
            "tok_per_s": round(o.batch * o.block / ms * 1e3),
            "compile_s": round(compile_s[value], 2), "optimizer": o.optimizer, "dtype": o.dtype,
            "fusion_type": value,
            "temp_mb": round(step.memory_analysis().temp_size_in_bytes / 1e6),
        }), flush=True)  # fmt: skip
    if o.torch:
        subprocess.run([o.torch, __file__, *sys.argv[1:], "--part", "torch"], check=True)


if __name__ == "__main__":
    main()
