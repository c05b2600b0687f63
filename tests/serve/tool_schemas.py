"""Sends random JSON schemas as tools that must be called, and validates every call:
`python -m tests.serve.tool_schemas [N]`.

The model has random weights, so only the grammar makes the calls valid. Biases of quotes, brackets
and EOS keep the calls short. It needs the package jsonschema.
"""

import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

from dantinox.text.reply_formats import TOOL_FORMATS

from .fakes import BYTES
from .seeded_requests import CHAT, CONTEXT, SLOTS, make_run, running_server
from .soak import exchange, request

NAMES = ("city", "a", "b1", "key_c", "d-e", "größe", "with space")
ENDS = {
    **dict.fromkeys(b'"', 14),
    **dict.fromkeys(b"}]<", 12),
    **dict.fromkeys(b",", 10),
    BYTES.eos_id: 14,
}


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Returns a schema whose features the grammars support."""
    simple = (_string, _integer, _number, _boolean, _enum, _null)
    nested = (_object, _array, _union) if depth < 3 else ()
    return draw.choice((*simple, *nested))(draw, depth)


def _string(draw: random.Random, depth: int) -> dict[str, Any]:
    lengths = {"minLength": draw.randint(0, 3), "maxLength": draw.randint(3, 9)}
    return {"type": "string"} | draw.choice(
        ({}, lengths, {"pattern": "^[a-c]{2,5}[0-9]?$"}, {"format": "date"})
    )


def _integer(draw: random.Random, depth: int) -> dict[str, Any]:
    low = draw.randint(-50, 50)
    return {"type": "integer"} | draw.choice(
        ({"minimum": low, "maximum": low + draw.randint(0, 99)}, {"minimum": 0, "maximum": 9})
    )


def _number(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "minimum": draw.randint(-9, 0), "maximum": draw.randint(1, 99)}


def _boolean(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "null"}


def _enum(draw: random.Random, depth: int) -> dict[str, Any]:
    values = ["red", "dark blue", 'a "b"', "é", 3, -1.5, True, None]
    return (
        {"const": draw.choice(values)}
        if draw.random() < 0.3
        else {"enum": draw.sample(values, draw.randint(1, 5))}
    )


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    low = draw.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(draw, depth + 1),
        "minItems": low,
        "maxItems": low + draw.randint(0, 2),
    }


def _union(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(NAMES, draw.randint(0, 4))
    found: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(draw, depth + 1) for name in names},
    }
    found["required"] = [name for name in names if draw.random() < 0.6]
    return found | {"additionalProperties": False}


def body_of(number: int) -> dict[str, Any]:
    """Returns request `number`, with one to three tools."""
    draw = random.Random(number)
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": _object(draw, 0),
                "strict": draw.random() < 0.5,
            },
        }
        for name in draw.sample(("search", "get_weather", "stop", "edit-file"), draw.randint(1, 3))
    ]
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": tools,
        "tool_choice": "required",
        "seed": number,
    }
    return body | {
        "parallel_tool_calls": draw.random() < 0.5,
        "max_tokens": 700,
        "reasoning_effort": "none",  # a random model would never end its reasoning
        "logit_bias": {str(i): b for i, b in ENDS.items()},
    }


async def check(port: int, number: int, counts: Counter[str], wrong: list[str]) -> None:
    body = body_of(number)
    reply = await exchange(port, request(CHAT, body))
    if reply.status != 200:
        counts[f"status {reply.status}"] += 1
        wrong.append(
            f"request {number}: {reply.status} {reply.content.decode()}\n  {json.dumps(body)}"
        )
        return
    (choice,) = json.loads(reply.content)["choices"]
    if choice["finish_reason"] == "length":  # the last call is incomplete
        counts["ended at max_tokens"] += 1
        return
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
    calls = choice["message"].get("tool_calls") or []
    try:
        assert (
            calls and not choice["message"]["content"] and choice["finish_reason"] == "tool_calls"
        )
        assert body["parallel_tool_calls"] or len(calls) == 1
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            jsonschema.Draft202012Validator(schemas[call["function"]["name"]]).validate(arguments)
        counts["valid"] += 1
    except (AssertionError, KeyError, ValueError, jsonschema.ValidationError) as error:
        counts["invalid"] += 1
        wrong.append(f"request {number}: {error!r}\n  {json.dumps(body)}\n  {json.dumps(choice)}")


async def check_all(port: int, numbers: range) -> tuple[Counter[str], list[str]]:
    counts, wrong, waiting = Counter[str](), list[str](), iter(numbers)

    async def client() -> None:
        for number in waiting:
            await check(port, number, counts, wrong)

    await asyncio.gather(*(client() for _ in range(SLOTS)))
    return counts, wrong


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    formats = sys.argv[2:] or ["auto"]
    assert all(name in (*TOOL_FORMATS, "auto") for name in formats), [*TOOL_FORMATS]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        run_dir = make_run(Path(folder) / "run", max_context=8 * CONTEXT)
        for name in formats:
            with running_server(run_dir, context=6 * CONTEXT, tool_format=name, warm_up="echo") as (
                port,
                _,
            ):
                counts, wrong = asyncio.run(check_all(port, range(count)))
            for line in wrong[:5]:
                print("WRONG", line)
            print(f"{name}: {dict(counts)} of {count}", flush=True)
            failed += len(wrong) + (counts["valid"] < 0.9 * count)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
