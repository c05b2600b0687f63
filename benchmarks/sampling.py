"""Measures the milliseconds from logits to tokens, for each single sampling step and for the full
KoboldAI chain.

Logits fall with the logarithm of the rank, as those of a language model do. The first filter of
`chain` keeps at most 100 tokens. `wide chain` keeps more tokens than fit into the window, so that
whole rows are searched.

The times are compared with those of two peers. The first peer is the same chain with `jnp.sort`, as
in most JAX code, in the same process. The second peer uses the logits processors of transformers
with softmax and a multinomial draw; for each size, it runs in another interpreter right before
DantinoX. Transformers has no top_a and no tail_free, so its chain is shorter.

    python benchmarks/sampling.py --peer /path/to/python-with-torch
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import Parser, use_threads

CHAIN = {
    "preset": "kobold", "repetition_penalty": 1.1, "repetition_range": 1024,
    "repetition_slope": 0.7, "top_k": 100, "top_a": 0.1, "top_p": 0.9, "typical": 0.9,
    "temperature": 0.8,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"greedy": True},
    "draw": {},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence_frequency_penalty": {"presence_penalty": 0.5, "frequency_penalty": 0.1},
    "dry": {"dry_multiplier": 0.8, "dry_breakers": [0]},
    "no_repeat_ngram": {"no_repeat_ngram": 3},
    "temperature": {"temperature": 0.8},
    "dynamic_temperature": {"dynatemp_low": 0.5, "dynatemp_high": 1.5},
    "smoothing": {"smoothing_factor": 0.3},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "top_a": {"top_a": 0.1},
    "typical": {"typical": 0.9},
    "epsilon_cutoff": {"epsilon_cutoff": 3e-4},
    "eta_cutoff": {"eta_cutoff": 3e-4},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "min_k": {"min_k": 3.0},
    "p_less": {"p_less": "plain"},
    "p_less_norm": {"p_less": "norm"},
    "top_h": {"top_h": 0.4},
    "skew": {"skew": 0.5},
    "top_k, skew": {"top_k": 100, "skew": 0.5},
    "adaptive_p": {"adaptive_target": 0.3, "min_p": 0.05},
    "synthid, 8 keys": {"watermark_keys": [*range(8)], "top_p": 0.9},
    "synthid, 30 keys": {"watermark_keys": [*range(30)], "top_p": 0.9},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.1},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.1, "min_p": 0.02},
    "mirostat_v1": {"mirostat": 1},
    "mirostat_v2": {"mirostat": 2},
    "tail_free": {"tail_free": 0.95},
    "top_k, tail_free": {"top_k": 100, "tail_free": 0.95},
    "chain": CHAIN,
    "wide chain": CHAIN | {"top_k": 2000, "top_a": 0.0, "top_p": 0.99},
}
TEXT = 512


def logits(batch: int, vocab: int) -> np.ndarray:
    random = np.random.default_rng(0)
    fall = -1.6 * np.log(np.arange(vocab) + 2.0)
    return np.float32(
        [random.permutation(fall) + random.normal(0, 0.3, vocab) for _ in range(batch)]
    )


def text(batch: int, vocab: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, vocab, (batch, TEXT)).astype(np.int32)


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """Returns the best time of `repeats` calls, or of the calls that fit in two seconds."""
    call()
    times: list[float] = []
    while len(times) < repeats and (len(times) < 3 or sum(times) < 2):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def ours(row: dict[str, Any], batch: int, vocab: int, repeats: int) -> float:
    import jax
    import jax.numpy as jnp

    from dantinox.sampling import SamplingParams, init_state, sample

    params = SamplingParams.build(row | {"seed": 0}, batch=batch)
    text_BT = jnp.asarray(text(batch, vocab))
    state = init_state(params, text_BT, jnp.ones(text_BT.shape, bool), vocab, TEXT + 512)
    x_BV = jnp.asarray(logits(batch, vocab))
    step = jax.jit(
        lambda x_BV, params, state: sample(x_BV, params, state)[:2], donate_argnames="state"
    )
    held = [state]

    def once() -> None:
        token_B, held[0] = step(x_BV, params, held[0])
        token_B.block_until_ready()

    return milliseconds(once, repeats)


def sorted_chain(row: dict[str, Any], batch: int, vocab: int, repeats: int) -> float:
    """Times the chain with a sort per filter, as in most implementations."""
    import jax
    import jax.numpy as jnp

    from dantinox.sampling import history, steps

    def head_of(x_V: Any, order_V: Any, keep_V: Any) -> Any:
        return jnp.where(jnp.zeros(vocab, bool).at[order_V].set(keep_V), x_V, -jnp.inf)

    def nucleus(x_V: Any, score_V: Any, p: float) -> Any:
        order_V = jnp.argsort(score_V)
        P_V = jax.nn.softmax(x_V)[order_V]
        return head_of(x_V, order_V, jnp.cumsum(P_V) - P_V < p)

    def one(x_V: Any, distance_V: Any, key: Any) -> Any:
        x_V = history.repetition_penalty(
            x_V,
            distance_V,
            row["repetition_penalty"],
            row["repetition_range"],
            row["repetition_slope"],
        )
        x_V = jnp.where(x_V >= jnp.sort(x_V)[-row["top_k"]], x_V, -jnp.inf)
        x_V = steps.top_a(x_V, row["top_a"])
        x_V = nucleus(x_V, -x_V, row["top_p"])
        logP_V = jax.nn.log_softmax(x_V)
        surprise_V = jnp.where(x_V == -jnp.inf, jnp.inf, jnp.abs(logP_V + steps.entropy(x_V)))
        x_V = nucleus(x_V, surprise_V, row["typical"]) / row["temperature"]
        return jax.random.categorical(key, x_V)

    distance_BV = np.full((batch, vocab), -1, np.int32)
    np.put_along_axis(
        distance_BV, text(batch, vocab), np.arange(TEXT)[::-1][None].repeat(batch, 0), 1
    )
    run = jax.jit(jax.vmap(one))
    data = (
        jnp.asarray(logits(batch, vocab)),
        jnp.asarray(distance_BV),
        jax.random.split(jax.random.key(0), batch),
    )
    return milliseconds(lambda: run(*data).block_until_ready(), repeats)


def transformers(row: dict[str, Any], batch: int, vocab: int, repeats: int) -> float | None:
    """Times the logits processors of transformers with torch's multinomial; returns None for steps
    that transformers lacks.
    """
    import torch
    import transformers as t

    known: list[tuple[str, Callable[[Any], Any]]] = [
        ("repetition_penalty", t.RepetitionPenaltyLogitsProcessor),
        ("no_repeat_ngram", t.NoRepeatNGramLogitsProcessor),
        ("top_k", t.TopKLogitsWarper),
        ("min_p", t.MinPLogitsWarper),
        ("top_p", t.TopPLogitsWarper),
        ("typical", t.TypicalLogitsWarper),
        ("epsilon_cutoff", t.EpsilonLogitsWarper),
        ("eta_cutoff", lambda eps: t.EtaLogitsWarper(eps, device="cpu")),
        ("temperature", t.TemperatureLogitsWarper),
    ]
    shorter = (
        {"preset", "repetition_range", "repetition_slope", "top_a"} if "preset" in row else set()
    )
    lacking = set(row) - {name for name, _ in known} - {"greedy"} - shorter
    if lacking:
        return None
    steps = t.LogitsProcessorList([make(row[name]) for name, make in known if name in row])
    x_BV = torch.from_numpy(logits(batch, vocab))
    text_BT = torch.from_numpy(text(batch, vocab)).long()

    def once() -> Any:
        y_BV = steps(text_BT, x_BV.clone())
        return y_BV.argmax(-1) if "greedy" in row else torch.multinomial(torch.softmax(y_BV, -1), 1)

    with torch.no_grad():
        return milliseconds(once, repeats)


def main() -> None:
    a = Parser(__doc__, smoke={"vocab": [300], "batch": [2], "repeats": 1})
    a.add_argument("--vocab", type=int, nargs="+", default=[2048, 32000, 128256])
    a.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    a.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    a.add_argument("--repeats", type=int, default=20)
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--peer", help="a Python interpreter with torch and transformers")
    a.add_argument("--as_peer", action="store_true", help=argparse.SUPPRESS)
    o = a.parse_args()
    use_threads(o.threads)  # before jax and torch start their threads
    for vocab, batch in itertools.product(o.vocab, o.batch):
        if o.as_peer:
            print(
                json.dumps(
                    [transformers(CASES[case], batch, vocab, o.repeats) for case in o.cases]
                ),
                flush=True,
            )
            continue
        theirs = peer(o, vocab, batch) if o.peer else [None] * len(o.cases)
        for case, other in zip(o.cases, theirs, strict=True):
            result = {
                "vocab": vocab,
                "batch": batch,
                "case": case,
                "ms": ours(CASES[case], batch, vocab, o.repeats),
            }
            if "chain" in case:
                result["sort_ms"] = sorted_chain(CASES[case], batch, vocab, o.repeats)
            if other is not None:
                result["transformers_ms"] = other
            print(
                json.dumps(
                    {k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}
                ),
                flush=True,
            )


def peer(o: argparse.Namespace, vocab: int, batch: int) -> list[float | None]:
    sizes = [
        "--vocab",
        vocab,
        "--batch",
        batch,
        "--repeats",
        o.repeats,
        "--threads",
        o.threads,
        "--cases",
        *o.cases,
    ]
    command = [o.peer, __file__, "--as_peer", *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the peer failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
