"""Measures how fast the engine decodes. The model is Llama-shaped and has random weights.

Prints a JSON line per batch and mode with `"peer": "dantinox"`. Compile time is reported separately
as `compile_s`. `bandwidth_share` is the number of weight bytes that decoding reads per second,
divided by the memory bandwidth measured in the same process. It is 1 if a step takes only as long
as reading every weight once.

    python benchmarks/decode.py --batch 1 8 --weights int8
"""

import argparse
import json
import time

from common import LLAMA, Parser, use_threads

CHAIN = {
    "preset": "kobold", "repetition_penalty": 1.1, "repetition_range": 1024,
    "repetition_slope": 0.7, "top_k": 100, "top_a": 0.1, "top_p": 0.9, "typical": 0.9,
    "temperature": 0.8, "seed": 0,
}  # fmt: skip
MODES = {"greedy": {"greedy": True}, "top_p": {"top_p": 0.9, "seed": 0}, "chain": CHAIN}


def parse() -> argparse.Namespace:
    a = Parser(__doc__, smoke={**LLAMA, "prompt": 16, "new": 8, "batch": [2], "repeats": 1})
    a.add_argument("--dim", type=int, default=768)
    a.add_argument("--layers", type=int, default=12)
    a.add_argument("--heads", type=int, default=12)
    a.add_argument("--kv_heads", type=int, default=4)
    a.add_argument("--head_size", type=int, default=64)
    a.add_argument("--hidden", type=int, default=2048)
    a.add_argument("--vocab", type=int, default=32000)
    a.add_argument("--prompt", type=int, default=64)
    a.add_argument("--new", type=int, default=128)
    a.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--repeats", type=int, default=3)
    a.add_argument(
        "--weights", choices=("auto", "float32", "bfloat16", "int8", "int4"), default="auto"
    )
    a.add_argument("--matmul_kernel", choices=("auto", "xla", "native"), default="auto")
    a.add_argument("--modes", nargs="+", choices=[*MODES], default=["greedy", "top_p"])
    a.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    return a.parse_args()


def memory_bandwidth() -> float:
    """Returns the bytes per second at which a large array is summed, the best of 7 repeats."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones(
        (1 << 7, 1 << 20), jnp.float32
    )  # XLA sums the rows in parallel, a single row in one thread
    total = jax.jit(lambda x: jnp.sum(x, axis=1))
    total(x).block_until_ready()

    def seconds() -> float:
        start = time.perf_counter()
        total(x).block_until_ready()
        return time.perf_counter() - start

    return x.nbytes / min(seconds() for _ in range(7))


def main() -> None:
    o = parse()
    use_threads(o.threads)  # before jax starts its threads
    import jax
    import numpy as np
    from flax import nnx

    from dantinox.config import ModelConfig
    from dantinox.generation import prepare
    from dantinox.generation.decode.prepared_model import weight_bytes
    from dantinox.generation.static_batch import StaticBatch
    from dantinox.model import Transformer
    from dantinox.sampling import SamplingParams

    config = ModelConfig(
        vocab_size=o.vocab, dim=o.dim, n_heads=o.heads, kv_heads=o.kv_heads, head_size=o.head_size,
        num_blocks=o.layers, hidden_dim=o.hidden, max_context=max(2048, o.prompt + o.new),
        windows=(None,) * o.layers, dtype=o.dtype,
    )  # fmt: skip
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    make = jax.jit(lambda: nnx.state(Transformer(config, rngs=nnx.Rngs(0))))
    plain = nnx.merge(graph, make())
    params_m = sum(leaf.size for leaf in jax.tree.leaves(state)) / 1e6
    model = prepare(plain, o.weights, matmul_kernel=o.matmul_kernel)
    # A step reads only a few rows of the embedding table, so the table is not counted. The prepared
    # output layer is a separate copy of the table, and is counted.
    read_bytes = weight_bytes(model) - model.embed[...].nbytes
    peak = memory_bandwidth()
    for batch in o.batch:
        ids = np.random.default_rng(0).integers(1, o.vocab, (batch, o.prompt))
        for mode in o.modes:
            params = SamplingParams.build(MODES[mode], batch=batch)

            def run(new: int, ids=ids, params=params, batch=batch) -> float:
                start = time.perf_counter()
                session = StaticBatch(
                    model,
                    ids,
                    np.full(batch, o.prompt),
                    params,
                    limits_B=np.full(batch, new),
                    eos_ids=[[]] * batch,
                )
                for _ in session.run(dispatch_ahead=True):
                    pass
                return time.perf_counter() - start

            def best(new: int, run=run) -> float:
                return min(run(new) for _ in range(o.repeats))

            cold = run(o.new) + run(1)
            prefill = best(1)
            total = best(o.new)
            rate = batch * (o.new - 1) / (total - prefill)
            print(json.dumps({
                "peer": "dantinox", "batch": batch, "mode": mode, "new": o.new,
                "params_m": round(params_m, 1), "tok_per_s": round(batch * o.new / total, 1),
                "decode_tok_per_s": round(rate, 1), "prefill_s": round(prefill, 3),
                "compile_s": round(cold - total - prefill, 2), "weights": o.weights,
                "weights_mb": round(read_bytes / 1e6, 1),
                "bandwidth_gb_per_s": round(peak / 1e9, 1),
                "bandwidth_share": round(rate / batch * read_bytes / peak, 3),
            }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
