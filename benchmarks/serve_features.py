"""Measures what features of the server cost, as ratios of medians over alternating runs.

`python benchmarks/serve_features.py PART …`; the parts, each below five minutes on two cores, are

* `schema`: one client; a strict JSON schema and a forced tool call against free text with the same
  number of tokens
* `bans`: one client; 1,000 banned phrases of which none begins, against none
* `adapters`: nine clients; eight adapters of rank 16 and the base model in one batch, against the
  base model alone
* `turns`: the time to the first token of the second turn of a long chat, against that of a short
  prompt
* `prefill`: the largest gap of 16 streams while a prompt of 8,000 tokens is prefilled, in chunks:
  medians of their usual gaps

Every part starts one server with a random model of 30 M parameters, or with `--run_dir`.
"""

import argparse
import asyncio
import itertools
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import SMALL, Parser, random_run
from serve import Target, running_server

SIZE = {
    "dim": 512, "n_heads": 8, "kv_heads": 4, "num_blocks": 8, "hidden_dim": 1536,
    "max_context": 9216, "dtype": "float32",
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z ]{12}$"},
            "minItems": 64,
        }
    },
    "required": ["items"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "save", "parameters": SCHEMA, "strict": True}}
ADAPTERS = 8
RANK = 16


def parse() -> argparse.Namespace:
    small = {"new": 24, "repeats": 2, "story": 150, "long": 400, "streams": 3}
    a = Parser(__doc__, smoke=small)
    a.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    a.add_argument(
        "--run_dir",
        type=Path,
        help="a run directory with a chat template (default: a random model)",
    )
    a.add_argument("--new", type=int, default=128)
    a.add_argument("--repeats", type=int, default=9)
    a.add_argument(
        "--story", type=int, default=1500, help="tokens of the chat before its second turn"
    )
    a.add_argument("--long", type=int, default=8000, help="tokens of the long prompt")
    a.add_argument("--streams", type=int, default=16)
    o = a.parse_args()
    o.parts = o.parts or (["bans"] if o.smoke else [*PARTS])  # each part starts a server
    if unknown := {*o.parts} - {*PARTS}:
        a.error(f"unknown parts: {', '.join(unknown)}")
    return o


async def stream(target: Target, path: str, body: Mapping[str, Any]) -> list[float]:
    """Sends a streamed request; returns the seconds from the request to each event with new
    text.
    """
    times = list[float]()
    begun = time.perf_counter()
    content = {"stream": True, "temperature": 1.0, **body, **target.extra}
    async with (
        httpx.AsyncClient(timeout=600) as client,
        client.stream("POST", target.url + path, json=content) as answer,
    ):
        assert answer.status_code == 200, (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and '"choices"' in line:
                (choice,) = json.loads(line[6:])["choices"] or [{}]
                if choice.get("text") or choice.get("delta"):
                    times.append(time.perf_counter() - begun)
    return times


async def seconds(target: Target, path: str, body: Mapping[str, Any]) -> tuple[float, int]:
    """Sends a request; returns its seconds and the number of new tokens."""
    begun = time.perf_counter()
    async with httpx.AsyncClient(timeout=600) as client:
        answer = await client.post(
            target.url + path, json={"temperature": 1.0, **body, **target.extra}
        )
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - begun, answer.json()["usage"]["completion_tokens"]


async def compare(
    o: argparse.Namespace, runs: Mapping[str, Callable[[int], Awaitable[tuple[float, int]]]]
) -> None:
    """Runs each alternately, the first time to warm up; prints the median seconds per token, and
    ratios to the first.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(o.repeats + 1):
        for name, run in runs.items():
            spent, tokens = await run(number)
            found[name] += [spent / tokens] * (number > 0)
    base, *_ = (float(np.median(times)) for times in found.values())
    for name, times in found.items():
        print(
            f"| {name} | {1000 * np.median(times):.2f} ms per token |"
            f" {np.median(times) / base:.3f} |"
        )


def words(number: int, length: int) -> str:
    return "".join(random.Random(number).choices("abcdefghijklmnopqrstuvwxyz ", k=length))


async def schema(o: argparse.Namespace, target: Target, run_dir: Path) -> None:
    """The constrained texts cannot end before `--new` tokens, so all have the same number."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": o.new}
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    kinds = {
        "free text": {},
        "JSON schema": {"response_format": form},
        "tool call": {"tools": [TOOL], "tool_choice": "required"},
    }
    path = "/chat/completions"
    await compare(
        o,
        {
            name: lambda n, more=more: seconds(target, path, chat | {"seed": n} | more)
            for name, more in kinds.items()
        },
    )


async def bans(o: argparse.Namespace, target: Target, run_dir: Path) -> None:
    """The random model generates bytes; the phrases begin with a character that a bias excludes."""
    phrases = ["~" + words(number, 30) for number in range(1000)]
    base = {"prompt": words(0, 64), "max_tokens": o.new, "logit_bias": {"126": -100}}
    kinds = {"no bans": {}, "1,000 banned phrases": {"banned_strings": phrases}}
    await compare(
        o,
        {
            name: lambda n, more=more: seconds(target, "/completions", base | {"seed": n} | more)
            for name, more in kinds.items()
        },
    )


async def adapters(o: argparse.Namespace, target: Target, run_dir: Path) -> None:
    async def batch(number: int, loras: list[str | None]) -> tuple[float, int]:
        begun = time.perf_counter()
        bodies = [
            {"prompt": words(100 * number + place, 64), "max_tokens": o.new, "seed": place}
            | ({"lora": lora} if lora else {})
            for place, lora in enumerate(loras)
        ]
        found = await asyncio.gather(*(seconds(target, "/completions", body) for body in bodies))
        return time.perf_counter() - begun, sum(tokens for _, tokens in found)

    named: list[str | None] = [None, *(f"a{number}" for number in range(ADAPTERS))]
    await compare(
        o,
        {
            "base model": lambda n: batch(n, [None] * 9),
            "8 adapters and base": lambda n: batch(n, named),
        },
    )


async def text_of(target: Target, number: int, tokens: int) -> str:
    """Returns a random text of this many tokens."""
    root = target.url.removesuffix("/v1")
    async with httpx.AsyncClient(timeout=60) as client:
        found = (
            await client.post(f"{root}/tokenize", json={"prompt": words(number, 8 * tokens)})
        ).json()["tokens"]
        return str(
            (await client.post(f"{root}/detokenize", json={"tokens": found[:tokens]})).json()[
                "prompt"
            ]
        )


async def turns(o: argparse.Namespace, target: Target, run_dir: Path) -> None:
    short = []
    second = []
    for number in range(o.repeats + 1):
        story = [{"role": "user", "content": await text_of(target, number, o.story)}]
        first = {"max_tokens": 16, "seed": number}
        async with httpx.AsyncClient(timeout=600) as client:
            answer = await client.post(
                f"{target.url}/chat/completions", json=first | {"messages": story, **target.extra}
            )
        reply = answer.json()["choices"][0]["message"]["content"]
        await asyncio.sleep(
            2
        )  # a reader needs longer; the server adds the reply to the prefix cache
        messages = [
            *story,
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "And then?"},
        ]
        second += (await stream(target, "/chat/completions", first | {"messages": messages}))[
            1:2
        ]  # the first has the role
        short += (
            await stream(
                target, "/completions", first | {"prompt": await text_of(target, -number - 1, 64)}
            )
        )[:1]
    later, once = (float(np.median(times[1:])) for times in (second, short))
    print(f"| 64-token prompt | first token in {1000 * once:.1f} ms | 1 |")
    print(f"| second turn | first token in {1000 * later:.1f} ms | {later / once:.3f} |")


async def prefill(o: argparse.Namespace, target: Target, run_dir: Path) -> None:
    async def long_prompt() -> tuple[float, float]:
        await asyncio.sleep(3)
        begun = time.perf_counter()
        await seconds(target, "/completions", {"prompt": words(1, o.long), "max_tokens": 1})
        return begun, time.perf_counter()

    async def one(number: int) -> list[float]:
        begun = time.perf_counter()
        # Only ASCII bytes, because an incomplete UTF-8 sequence has no event.
        bias = {str(byte): -100 for byte in range(128, 256)}
        body = {
            "prompt": words(number, 64),
            "max_tokens": 40 * o.new // 8,
            "seed": number,
            "logit_bias": bias,
        }
        return [begun + at for at in await stream(target, "/completions", body)]

    (begin, end), *times = await asyncio.gather(
        long_prompt(), *(one(number) for number in range(o.streams))
    )
    gaps = [
        (after - before, begin < after < end)
        for each in times
        for before, after in itertools.pairwise(each)
    ]
    usual = [gap for gap, during in gaps if not during]
    during = [gap for gap, is_during in gaps if is_during]
    chunk = float(np.median([gap for gap in usual if gap > 0.005] or usual))
    if not during:
        print("the streams ended before the long prompt")
        return
    print(f"| usual gap | {1000 * chunk:.1f} ms | 1 |")
    for name, gap in (
        ("median", np.median(during)),
        ("99th percentile", np.percentile(during, 99)),
        ("largest", max(during)),
    ):
        print(
            f"| {name} gap during the prefill of {end - begin:.1f} s | {1000 * gap:.1f} ms |"
            f" {gap / chunk:.2f} |"
        )


PARTS = {"schema": schema, "bans": bans, "adapters": adapters, "turns": turns, "prefill": prefill}


def make_adapters(run_dir: Path) -> list[str]:
    """Writes adapters with random matrices beside a run; returns the values of `--lora`."""
    from dantinox.config import build_config
    from dantinox.model.parameters import abstract_model
    from dantinox.run import (
        create_run,
        load_run_config,
        open_run,
        save_config,
        save_tokenizer,
        weights_digest,
    )
    from dantinox.run.adapters import save_adapter
    from dantinox.text import Tokenizer

    base = open_run(run_dir)
    tokenizer = Tokenizer.load(base.tokenizer)
    sections = load_run_config(base).model_dump(exclude_unset=True)
    sections = {name: sections[name] for name in ("model", "tokenizer") if name in sections}
    config = build_config(
        {**sections, "training": {"init_from": str(base.path)}, "lora": {"rank": RANK}}
    )
    model = config.trained_architecture(tokenizer.vocab_size)
    rng = np.random.default_rng(0)
    found = []
    shapes = {
        name: leaf.shape
        for name, leaf in abstract_model(model)[1].items()
        if name.endswith(("lora_a", "lora_b"))
    }
    for number in range(ADAPTERS):
        run = create_run(run_dir.parent / f"a{number}")
        save_config(run, config)
        save_tokenizer(run, tokenizer.to_json())
        arrays = {name: 0.02 * rng.standard_normal(shape) for name, shape in shapes.items()}
        save_adapter(run, arrays, model, {"base_sha256": weights_digest(base)})
        found.append(f"a{number}={run.path}")
    return found


def main() -> None:
    o = parse()
    with tempfile.TemporaryDirectory() as folder:
        for part in o.parts:
            size = SMALL | {"max_context": 1024} if o.smoke else SIZE
            run_dir = o.run_dir or random_run(Path(folder) / part / "run", size, "plain")
            slots = {"adapters": 9, "prefill": o.streams + 1}.get(part, 2)
            more = ["--lora", *make_adapters(run_dir)] if part == "adapters" else []
            settings = argparse.Namespace(slots=slots, clients=[slots + 4])
            with running_server(settings, run_dir, *more) as target:
                print(f"{part}:", flush=True)
                asyncio.run(PARTS[part](o, target, run_dir))


if __name__ == "__main__":
    main()
