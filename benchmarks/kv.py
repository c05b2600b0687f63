"""Measures the bytes and the decoding speed of compressed caches, relative to full caches for the
same sequence.

The model is Llama-shaped with random weights. For every context and batch size, full caches of each
dtype are timed against each other in three sizes: exactly the slots that the sequence needs, the
slots that the engine allocates, and `--spare` more slots than needed (because sizes that are powers
of two can be slow). The fastest full cache is the baseline for the speed of every compressed cache.
To compare two caches, two sessions of the engine decode chunks of 32 tokens in the order A B B A …,
so that each ratio compares measurements that are adjacent in time.

There is no prefill. Instead, caches are filled with random numbers, at the positions of the first
and last tokens of a long sequence. The sequence grows up to `context` tokens during the
measurement. The time of a step does not depend on the contents of the slots.

Prints a JSON line per cache; full caches have ratio 1. `bytes_share` is the size relative to a full
cache of the same dtype with exactly the slots needed, and `bytes_share_bfloat16` the size relative
to such a cache in bfloat16. `speed_ratio` is the median time with the best full cache divided by
the median time with this cache. `spread` holds the first and the third quartile of this ratio,
computed in each round. If a cache and the best full cache together do not fit in `--memory_gb`, the
cache is skipped, and its line says so.

    python benchmarks/kv.py --context 1024 8192 --batch 1 8 --kv_heads 12
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import LLAMA, Parser, use_threads
from flax import nnx

from dantinox.config import ModelConfig, UserError
from dantinox.config.kv_settings import KVSection
from dantinox.generation import prepare
from dantinox.generation.decode.cache_plan import CachePlan, plan_cache
from dantinox.generation.decode.generate_toks import DECODE_CHUNK
from dantinox.generation.static_batch import StaticBatch, padded_length
from dantinox.model import KVCache, Transformer, make_cache
from dantinox.model.compressed_cache import CompressedLayer, HeadGroup
from dantinox.run import KVCalibration
from dantinox.sampling import SamplingParams

DTYPES = ("float32", "bfloat16", "int8")


def parse() -> argparse.Namespace:
    a = Parser(
        __doc__,
        smoke={
            **LLAMA,
            "context": [320],
            "batch": [2],
            "ratios": [0.3],
            "dtypes": ["int8"],
            "full_dtypes": ["float32"],
            "rounds": 4,
        },
    )
    a.add_argument("--dim", type=int, default=768)
    a.add_argument("--layers", type=int, default=12)
    a.add_argument("--heads", type=int, default=12)
    a.add_argument("--kv_heads", type=int, default=4)
    a.add_argument("--head_size", type=int, default=64)
    a.add_argument("--hidden", type=int, default=2048)
    a.add_argument("--vocab", type=int, default=32000)
    a.add_argument("--context", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    a.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    a.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.3, 0.2, 0.1])
    a.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        default=DTYPES,
        help="dtypes of the compressed caches",
    )
    a.add_argument("--full_dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    a.add_argument(
        "--spare",
        type=int,
        nargs="*",
        default=[16],
        help="numbers of additional slots to try in full caches",
    )
    a.add_argument("--policy", default="snapkv+ema")
    a.add_argument(
        "--signal",
        choices=("uniform", "entropy"),
        default="uniform",
        help="entropy: random entropies per head, which give two groups",
    )
    a.add_argument("--rounds", type=int, default=12, help="chunks of 32 tokens per cache")
    a.add_argument(
        "--seconds",
        type=float,
        default=60,
        help="end a comparison after this time, but not before 4 rounds",
    )
    a.add_argument("--memory_gb", type=float, default=16, help="the limit for two caches together")
    a.add_argument("--threads", type=int, default=2)
    a.add_argument(
        "--weights", choices=("auto", "float32", "bfloat16", "int8", "int4"), default="auto"
    )
    o = a.parse_args()
    if min(o.context) <= decoded_tokens(o) + 1:
        a.error(
            f"--context must be more than {decoded_tokens(o) + 1}: {o.rounds} rounds and a first"
            " chunk are decoded"
        )
    return o


def main() -> None:
    o = parse()
    use_threads(o.threads)  # before jax starts its threads, which happens after the import
    model = build(o)
    for context in o.context:
        for batch in o.batch:
            for result in measure(o, model, context, batch):
                print(json.dumps({"context": context, "batch": batch} | result), flush=True)
            jax.clear_caches()


def build(o: argparse.Namespace) -> Any:
    """Returns a Llama-shaped model, prepared for decoding."""
    config = ModelConfig(
        vocab_size=o.vocab, dim=o.dim, n_heads=o.heads, kv_heads=o.kv_heads, head_size=o.head_size,
        num_blocks=o.layers, hidden_dim=o.hidden, max_context=max(o.context),
        windows=(None,) * o.layers,
    )  # fmt: skip
    graph, _ = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    return prepare(
        nnx.merge(graph, jax.jit(lambda: nnx.state(Transformer(config, rngs=nnx.Rngs(0))))()),
        o.weights,
    )


def decoded_tokens(o: argparse.Namespace) -> int:
    """Returns the number of tokens that a session decodes: a chunk for compilation, and one chunk
    per round.
    """
    return DECODE_CHUNK * (o.rounds + 1)


def measure(
    o: argparse.Namespace, model: Any, context: int, batch: int
) -> Iterator[dict[str, Any]]:
    """Yields a record per cache: first all full caches, once the last of them is measured, then
    each compressed cache.
    """
    best: StaticBatch | None = None
    best_result: dict[str, Any] = {}
    full_results: list[dict[str, Any]] = []
    for plan in full_plans(o, context):
        found, session, best = measure_cache(o, model, context, batch, plan, best)
        result = {"ratio": 1.0, "dtype": plan.dtype, "slots": plan.slots} | found
        full_results.append(result)
        if session is None:
            continue
        # The measured ratio is relative to the best cache so far. Multiplying by the ratio of that
        # cache makes it relative to the first cache.
        result["speed_ratio"] = result.get("speed_ratio", 1.0) * best_result.get("speed_ratio", 1.0)
        if best is None or result["speed_ratio"] > best_result["speed_ratio"]:
            best = session
            best_result = result
        del session  # frees its cache before the next two are allocated
    for result in full_results:
        result.pop("spread", None)
        yield result | (
            {}
            if "skipped" in result
            else {"speed_ratio": round(result["speed_ratio"] / best_result["speed_ratio"], 3)}
        )
    if best is None:
        return
    for ratio in o.ratios:
        for dtype in o.dtypes:
            case = {"ratio": ratio, "dtype": dtype, "policy": o.policy, "signal": o.signal}
            try:
                plan = compressed_plan(o, model, context, ratio, dtype)
            except UserError as error:
                yield case | {"skipped": str(error)}
                continue
            found, _, best = measure_cache(o, model, context, batch, plan, best)
            yield case | found | {"best": {key: best_result[key] for key in ("dtype", "slots")}}


def full_plans(o: argparse.Namespace, context: int) -> list[CachePlan]:
    slots = sorted({context, padded_length(context), *(context + more for more in o.spare)})
    return [CachePlan(count, dtype) for dtype in o.full_dtypes for count in slots]


def compressed_plan(
    o: argparse.Namespace, model: Any, context: int, ratio: float, dtype: Any
) -> CachePlan:
    """Returns the cache plan for a ratio and dtype, from the settings of the `kv` section."""
    c = model.config
    measured = KVCalibration(np.random.default_rng(0).uniform(0, 6, (c.num_blocks, c.n_heads)))
    kv = KVSection(budget=ratio, dtype=dtype, policy=o.policy, signal=o.signal)
    return plan_cache(c, kv, padded_length(context), measured)


def measure_cache(
    o: argparse.Namespace,
    model: Any,
    context: int,
    batch: int,
    plan: CachePlan,
    best: StaticBatch | None,
) -> tuple[dict[str, Any], StaticBatch | None, StaticBatch | None]:
    """Times a cache against the best full cache so far, if there is one.

    Returns:
      The record of the cache, the session of the cache (None if the cache is too large), and the
      session of the best cache.
    """
    needed = size(model, batch, plan) + (0 if best is None else cache_bytes(best))
    if needed > o.memory_gb * 1e9:
        return {"skipped": f"needs {needed / 1e9:.1f} GB with the best full cache"}, None, best
    start = context - decoded_tokens(o)
    session = start_session(
        model, batch, start, decoded_tokens(o), random_cache(model, batch, plan, start - 2)
    )
    if (
        best is not None
    ):  # its cache is reused, since a full cache can be overwritten from any position on
        best = start_session(model, batch, start, decoded_tokens(o), best.caches[0])
    times, *others = time_alternating(o, [session] if best is None else [session, best])
    total = cache_bytes(session)
    result = {
        "bytes": total,
        "bytes_share": round(total / size(model, batch, CachePlan(context, plan.dtype)), 4),
        "bytes_share_bfloat16": round(
            total / size(model, batch, CachePlan(context, "bfloat16")), 4
        ),
        "tok_per_s": rate(batch, times),
    }
    for theirs in others:
        result["best_tok_per_s"] = rate(batch, theirs)
        result["speed_ratio"] = round(statistics.median(theirs) / statistics.median(times), 3)
        within = [other / own for other, own in zip(theirs, times, strict=True)]
        result["spread"] = [round(float(x), 3) for x in np.quantile(within, (0.25, 0.75))]
    return result | {"rounds": len(times)}, session, best


def time_alternating(o: argparse.Namespace, sessions: list[StaticBatch]) -> list[list[float]]:
    """Returns the seconds of each session's chunks, one list per session."""
    for session in sessions:
        session.advance()  # compiles
    times: list[list[float]] = [[] for _ in sessions]
    end = time.perf_counter() + o.seconds
    for number in range(o.rounds):
        if number >= 4 and time.perf_counter() > end:
            break
        pairs = list(zip(sessions, times, strict=True))
        for session, own in pairs if number % 2 else reversed(pairs):
            start = time.perf_counter()
            session.advance()  # waits for its tokens
            own.append(time.perf_counter() - start)
    return times


def rate(batch: int, times: list[float]) -> float:
    return round(batch * DECODE_CHUNK / statistics.median(times), 1)


def start_session(
    model: Any, batch: int, length: int, new: int, cache: KVCache | None
) -> StaticBatch:
    """Returns a session that has read `length` tokens except the last, and decodes `new` more. The
    session owns `cache`.
    """
    session = StaticBatch(
        model, np.ones((batch, length), np.int32), np.full(batch, length),
        SamplingParams.build({"greedy": True}, batch=batch), limits_B=np.full(batch, new),
        eos_ids=[[]] * batch,
    )  # fmt: skip
    session.resume(cache)
    return session


def cache_bytes(session: StaticBatch) -> int:
    """Returns the bytes of a session's cache."""
    return session.caches[0].report()["bytes"]


def shapes(model: Any, batch: int, plan: CachePlan) -> KVCache:
    return jax.eval_shape(lambda: make_cache(model.config, batch, *plan))


def size(model: Any, batch: int, plan: CachePlan) -> int:
    """Returns the bytes that a cache will have, without allocating it."""
    return sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes(model, batch, plan))
    )


def random_cache(model: Any, batch: int, plan: CachePlan, last: int) -> KVCache:
    """Returns a cache with random keys, values and importances, as after reading a sequence up to
    position `last`.
    """
    leaves, tree = jax.tree.flatten(shapes(model, batch, plan))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    cache = jax.tree.unflatten(
        tree, [noise(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    )

    def placed(group: HeadGroup) -> HeadGroup:
        C = group.position_BKS.shape[2]
        sinks = group.compression.sinks
        slots = np.arange(C)
        newest = np.where(slots < sinks, slots, last + 1 - C + slots)
        kept = newest if last + 1 >= C else np.where(slots <= last, slots, -1)
        return replace(
            group,
            position_BKS=jnp.array(np.broadcast_to(kept, group.position_BKS.shape), jnp.int32),
        )

    layers = [
        (
            replace(layer, groups=tuple(map(placed, layer.groups)))
            if isinstance(layer, CompressedLayer)
            else layer
        )
        for layer in cache.layers
    ]
    return replace(cache, layers=tuple(layers))


def noise(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns normal random numbers, the same in all rows. Scales and importances (three axes) are
    small and positive.
    """
    row = jax.random.normal(key, shape[1:])
    if dtype == jnp.int8:
        row = jnp.clip(jnp.round(row * 40), -127, 127)
    elif len(shape) == 3:
        row = jnp.abs(row) / 40
    return jnp.array(jnp.broadcast_to(row.astype(dtype), shape))


if __name__ == "__main__":
    main()
