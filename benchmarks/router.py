"""Measures what the entropy router costs per decoding step of a 100M-parameter model, and checks
that it is free when off.

There are four cases: greedy decoding, a plain sampling chain with the base values of the router,
the router without attention metrics, and the router with attention metrics. In each round, every
session decodes a chunk of 32 tokens, in an order that changes from round to round. So each ratio
compares measurements that are adjacent in time and have the same context length. Prints a JSON line
per batch size and case: milliseconds per step (the median over the rounds), and the medians of the
ratios to `greedy` and to `chain` within a round. `first_s` is the time of compilation and the first
tokens. Random weights give a flat distribution, so the output layer is scaled until the logits have
the spread of a language model. `strategies` is the share of each strategy that the router chose for
the first tokens.

Another line describes the program of the plain chain. It says whether the compiled HLO contains
instructions of the router, as the HLO of the case `router` does. With `--before`, it also says
whether the lowered text of the program equals that of an older checkout without the router.

    python benchmarks/router.py --batch 1 8 --before /path/to/older/checkout
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
from common import LLAMA, Parser, use_threads

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"greedy": True},
    "chain": {"temperature": 0.666, "top_k": 27, "top_p": 0.9, "min_p": 0.03, "seed": 0},
    "router": {"strategy": "entropy", "use_attention": False, "seed": 0},
    "router, attention": {"strategy": "entropy", "use_attention": True, "seed": 0},
}


def parse() -> argparse.Namespace:
    a = Parser(__doc__, smoke={**LLAMA, "prompt": 16, "rounds": 2, "batch": [2]})
    a.add_argument("--dim", type=int, default=768)
    a.add_argument("--layers", type=int, default=12)
    a.add_argument("--heads", type=int, default=12)
    a.add_argument("--kv_heads", type=int, default=4)
    a.add_argument("--head_size", type=int, default=64)
    a.add_argument("--hidden", type=int, default=2048)
    a.add_argument("--vocab", type=int, default=32000)
    a.add_argument("--prompt", type=int, default=64)
    a.add_argument("--rounds", type=int, default=12, help="chunks of 32 tokens per case")
    a.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    a.add_argument("--threads", type=int, default=2)
    a.add_argument(
        "--weights", choices=("auto", "float32", "bfloat16", "int8", "int4"), default="auto"
    )
    a.add_argument("--spread", type=float, default=6.0, help="standard deviation of the logits")
    a.add_argument("--before", help="the root of an older checkout")
    a.add_argument("--lowered", action="store_true", help=argparse.SUPPRESS)
    return a.parse_args()


def main() -> None:
    o = parse()
    use_threads(o.threads)  # before jax starts its threads
    model = build(o)
    if o.lowered:
        import dantinox

        found = {
            str(batch): digest(program(o, model, batch, "chain").as_text()) for batch in o.batch
        }
        print(json.dumps(found | {"package": dantinox.__file__}))
        return
    for batch in o.batch:
        for result in measure(o, model, batch):
            print(json.dumps({"batch": batch} | result), flush=True)
        print(json.dumps({"batch": batch} | compare(o, model, batch)), flush=True)


def build(o: argparse.Namespace) -> Any:
    """Returns a Llama-shaped model, prepared for decoding, with logits of standard deviation
    `o.spread`.
    """
    import jax
    from flax import nnx

    from dantinox.config import ModelConfig
    from dantinox.generation import prepare
    from dantinox.model import Transformer

    config = ModelConfig(
        vocab_size=o.vocab, dim=o.dim, n_heads=o.heads, kv_heads=o.kv_heads, head_size=o.head_size,
        num_blocks=o.layers, hidden_dim=o.hidden, max_context=max(2048, length(o)),
        windows=(None,) * o.layers, weight_tying=False,
    )  # fmt: skip
    graph, _ = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    plain = nnx.merge(graph, jax.jit(lambda: nnx.state(Transformer(config, rngs=nnx.Rngs(0))))())
    kernel_DV = plain.head.kernel[...]
    # Rows have a mean square of 1 after the final norm, so the logits get this standard deviation.
    plain.head.kernel = nnx.Param(kernel_DV * (o.spread / (kernel_DV.std() * o.dim**0.5)))
    return prepare(plain, o.weights)


def length(o: argparse.Namespace) -> int:
    """Returns the length of a sequence: the prompt, the first token, a chunk during compilation,
    and one chunk per round.
    """
    return o.prompt + 1 + 32 * (o.rounds + 1)


def session(
    o: argparse.Namespace, model: Any, batch: int, case: str, report: int | None = None
) -> Any:
    from dantinox.generation.static_batch import StaticBatch, StaticOptions
    from dantinox.sampling import SamplingParams

    ids = np.random.default_rng(0).integers(1, o.vocab, (batch, o.prompt))
    limits = np.full(batch, length(o) - o.prompt)
    return StaticBatch(
        model, ids, np.full(batch, o.prompt), SamplingParams.build(CASES[case], batch=batch),
        limits_B=limits, eos_ids=[[]] * batch, options=StaticOptions(report=report),
    )  # fmt: skip


def measure(o: argparse.Namespace, model: Any, batch: int) -> list[dict[str, Any]]:
    sessions = {case: session(o, model, batch, case) for case in CASES}
    compiled = {case: timed(lambda s=s: (s.start(), s.advance())) for case, s in sessions.items()}
    rounds: list[dict[str, float]] = []
    for number in range(o.rounds):
        order = [*CASES][number % len(CASES) :] + [*CASES][: number % len(CASES)]
        rounds.append({case: timed(sessions[case].advance) / 32 for case in order})

    def over(case: str, other: str) -> float:
        return round(statistics.median(times[case] / times[other] for times in rounds), 4)

    return [
        {
            "case": case,
            "ms_per_step": round(1e3 * statistics.median(times[case] for times in rounds), 3),
            "tok_per_s": round(batch / statistics.median(times[case] for times in rounds), 1),
            "over_greedy": over(case, "greedy"), "over_chain": over(case, "chain"),
            "first_s": round(compiled[case], 2),
            **({"strategies": strategies(o, model, batch, case)} if "router" in case else {}),
        }
        for case in CASES
    ]  # fmt: skip


def timed(call: Any) -> float:
    start = time.perf_counter()
    call()  # waits for its tokens
    return time.perf_counter() - start


def strategies(o: argparse.Namespace, model: Any, batch: int, case: str) -> dict[str, float]:
    """Returns the share of each strategy in the first tokens."""
    from dantinox.sampling.entropy_router import STRATEGIES

    batch_run = session(o, model, batch, case, report=0)
    batch_run.start()
    found = Counter(batch_run.advance().info.routed.route.strategy.ravel().tolist())
    return {
        STRATEGIES[strategy]: round(count / found.total(), 3)
        for strategy, count in found.most_common()
    }


def program(o: argparse.Namespace, model: Any, batch: int, case: str) -> Any:
    """Returns the lowered decoding program of a case."""
    import jax.numpy as jnp

    from dantinox.generation.decode.generate_toks import _generate_toks
    from dantinox.generation.static_batch import padded_length
    from dantinox.model import make_cache
    from dantinox.sampling import SamplingParams

    running, params = session(o, model, batch, case), SamplingParams.build(CASES[case], batch=batch)
    cache = make_cache(model.config, batch, padded_length(length(o)), model.dtype)
    return _generate_toks.lower(
        model, (cache,), running.state, params, jnp.int32(32), **running._options
    )


def compare(o: argparse.Namespace, model: Any, batch: int) -> dict[str, Any]:
    """Reports whether the chain's program contains the router, and whether it equals that of the
    older checkout.
    """
    from dantinox.programs import separate_traces

    file = "sampling/entropy_router.py"
    with separate_traces():  # instructions contain their source line
        found: dict[str, Any] = {
            f"router_in_{case}": file in program(o, model, batch, case).compile().as_text()
            for case in ("chain", "router")
        }
    found["chain"] = digest(program(o, model, batch, "chain").as_text())
    if o.before:
        found["chain_before"] = before(o)[str(batch)]
        found["identical"] = found["chain"] == found["chain_before"]
    return found


def before(o: argparse.Namespace) -> dict[str, str]:
    """Returns the output of `--lowered` with the package of the older checkout."""
    command = [sys.executable, __file__, "--lowered", *sys.argv[1:]]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": o.before}
    )
    if done.returncode:
        sys.exit(f"the older checkout failed:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    if not os.path.realpath(found["package"]).startswith(os.path.realpath(o.before) + os.sep):
        sys.exit(f"{o.before} contains no package: {found['package']} was imported instead")
    return found


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
