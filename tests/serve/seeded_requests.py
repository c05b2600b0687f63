"""Random seeded requests to all endpoints, and a server process with adapters and reasoning that
answers them.

Two requests with the same number are equal. Endpoints without a seed get greedy requests.
"""

import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SLOTS, CONTEXT = 4, 1536
# Reasons if the request sets `thinking`: the prompt then ends inside the reasoning.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for message in messages %}{{"
    " message.role }}: {{ message.content or '' }}{{ message.tool_calls or '' }}\n{% endfor"
    " %}assistant:{% if thinking %}<think>{% endif %}{# </think> #}"
)
STORY = (
    "Once upon a time a fox lived in a wood, and every evening it told the"
    " owl what it had seen on the hill. "
)
PROMPTS = ("a", "é😀 b\n", STORY, STORY * 2, STORY * 2 + "The owl ", STORY + "Then", "x" * 130)
SAMPLERS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0}, {"temperature": 1.7}, {"top_k": 9}, {"top_p": 0.7},
    {"top_p": 0.6, "top_p_rule": "exclusive"}, {"min_p": 0.05, "temperature": 1.3},
    {"typical": 0.6}, {"tail_free": 0.9}, {"top_a": 0.3}, {"epsilon_cutoff": 0.002},
    {"eta_cutoff": 0.002}, {"top_n_sigma": 1.5}, {"min_k": 3.0}, {"p_less": "norm"}, {"top_h": 0.6},
    {"top_h": 0.5, "top_h_rule": "cumulative"}, {"mirostat": 2},
    {"mirostat": 1, "mirostat_tau": 3.0}, {"skew": 0.5}, {"adaptive_target": 0.2},
    {"adaptive_target": 0.02, "adaptive_decay": 0.5, "min_p": 0.01},
    {"xtc_probability": 0.5, "xtc_threshold": 0.01},
    {"temperature": 1, "dynatemp_low": 0.7, "dynatemp_high": 1.6},
    {"smoothing_factor": 0.3},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 1.3, "repetition_range": 20, "repetition_slope": 0.5},
    {"repetition_penalty": 1.2, "repetition_scope": "output"}, {"encoder_repetition_penalty": 1.2},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"frequency_penalty": 0.4, "presence_scope": "all"},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1}, {"no_repeat_ngram": 2},
    {"strategy": "entropy"}, {"preset": "llamacpp", "top_k": 20, "min_p": 0.02},
    {"preset": "hf", "top_k": 30, "top_p": 0.9},
    {"preset": "koboldcpp", "sampler_order": [6, 0, 1, 3, 4, 2, 5], "top_p": 0.8},
    {"sampler_order": ["temperature", "min_p", "top_k"], "temperature": 1.4, "min_p": 0.1,
     "top_k": 12},
    {"watermark_keys": [3, 5, 7]}, {"top_k": 5, "ties": "all"},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "temperature": 0.9},
)  # fmt: skip
EDITS: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"logit_bias": {"97": 5, "98": -100}}, {"banned_strings": ["a", "the ", "e"]},
    {"banned_strings": [" ", "é"]}, {"banned_regexes": ["[0-9]+", "q."]},
    {"bad_words": ["ab", "ba"]}, {"banned_tokens": [101, 116]}, {"sequence_bias": [["ab", 3.0]]},
    {"allowed_tokens": [*range(97, 123), 32]}, {"stop": ["e", "zz"]}, {"ignore_eos": True},
    {"min_tokens": 5, "stop": ["a"]}, {"stop": ["b"], "keep_stop": True},
    {"stop_token_ids": [110, 111]},
)  # fmt: skip
ADDRESS = {
    "type": "object",
    "properties": {
        "zip": {"type": "integer"},
        "city": {"type": "string", "maxLength": 8},
        "new": {"type": "boolean"},
    },
    "required": ["zip", "new"],
    "additionalProperties": False,
}
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"guided_regex": "[a-z ]{5,30}x"}, {"guided_json": ADDRESS},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ADDRESS}}},
    {"guided_grammar": 'start: ("yes" | "no")+ "."'}, {"grammar": 'root ::= [a-f]+ " " [0-9]+'},
)  # fmt: skip
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = (("weather", WEATHER), ("address", ADDRESS), ("stop", {"type": "object", "properties": {}}))
KOBOLD_SAMPLERS: tuple[dict[str, Any], ...] = (
    {"rep_pen": 1.2, "rep_pen_range": 64, "rep_pen_slope": 0.7}, {"top_k": 5, "min_p": 0.1},
    {"mirostat": 2, "mirostat_tau": 4},
    {"sampler_order": [6, 0, 1, 3, 4, 2, 5], "tfs": 0.9},
    {"dry_multiplier": 0.8, "xtc_probability": 0.4, "xtc_threshold": 0.05},
    {"dynatemp_range": 0.4, "smoothing_factor": 0.2}, {"adaptive_target": 0.3}, {"nsigma": 1.2},
    {"top_a": 0.2, "typical": 0.9},
)  # fmt: skip
KOBOLD_EDITS: tuple[dict[str, Any], ...] = (
    {}, {"banned_tokens": ["a", "e"]}, {"grammar": "root ::= [a-z ]+"}, {"stop_sequence": ["b"]},
    {"n": 2},
)  # fmt: skip
ADAPTERS = ("red", "blue")


class SeededRequest(NamedTuple):
    """The path and the body of a request that has the same answer each time."""

    path: str
    body: dict[str, Any]


def seeded_request(number: int) -> SeededRequest:
    """Returns request `number`; the endpoints take turns."""
    draw = random.Random(number)
    path = [*ENDPOINTS][number % len(ENDPOINTS)]
    return SeededRequest(path, ENDPOINTS[path](draw))


def _settings(draw: random.Random) -> dict[str, Any]:
    """Returns settings of the section `generation`; with the router, only those that it allows."""
    found = {"temperature": 1.2} | draw.choice(SAMPLERS)
    if found.get("strategy") == "entropy":
        del found["temperature"]
    return found | draw.choice(EDITS)


def _constrained(draw: random.Random) -> dict[str, Any]:
    return _settings(draw) | draw.choice(CONSTRAINTS)


def _adapter(draw: random.Random, name: str = "lora") -> dict[str, Any]:
    return {name: draw.choice(ADAPTERS)} if draw.random() < 0.3 else {}


def _length(draw: random.Random) -> int:
    return draw.choice((1, 6, 12, 24, 40))


def _messages(draw: random.Random) -> list[dict[str, Any]]:
    earlier = [
        {"role": "user", "content": draw.choice(PROMPTS)},
        {"role": "assistant", "content": "Yes."},
    ]
    return [*earlier * draw.randint(0, 1), {"role": "user", "content": draw.choice(PROMPTS)}]


def _completion(draw: random.Random) -> dict[str, Any]:
    body = _constrained(draw) | _adapter(draw)
    body |= {
        "prompt": draw.choice(PROMPTS),
        "max_tokens": _length(draw),
        "seed": draw.randrange(2**32),
    }
    if draw.random() < 0.4:
        body |= {"logprobs": draw.randint(0, 9), "echo": draw.random() < 0.5}
    if draw.random() < 0.2:
        body["n"] = draw.randint(2, SLOTS - 1)
    elif draw.random() < 0.2:
        body["prompt"] = [*draw.sample(PROMPTS, 3)]
    return body


def _chat(draw: random.Random) -> dict[str, Any]:
    body = _settings(draw) | _adapter(draw)
    body |= {
        "messages": _messages(draw),
        "max_tokens": _length(draw),
        "seed": draw.randrange(2**32),
    }
    if draw.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": draw.randint(0, 9)}
    if draw.random() < 0.2:
        body["n"] = draw.randint(2, SLOTS - 1)
    if draw.random() < 0.4:
        body |= {
            "chat_template_kwargs": {"thinking": draw.random() < 0.7},
            "reasoning_budget": draw.choice((0, 3, 9)),
        }
    if draw.random() < 0.5:
        return body | draw.choice(CONSTRAINTS)
    choice = draw.choice(
        ("auto", "required", "none", {"type": "function", "function": {"name": "address"}})
    )
    tools = [
        {
            "type": "function",
            "function": {"name": name, "parameters": schema, "strict": draw.random() < 0.5},
        }
        for name, schema in draw.sample(TOOLS, 3)
    ]
    return body | {
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": draw.random() < 0.5,
        "max_tokens": 60,
    }


def _response(draw: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "input": draw.choice(PROMPTS),
        "max_output_tokens": _length(draw),
        "temperature": 0,
    }
    if draw.random() < 0.5:
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    if draw.random() < 0.5:
        return body | {"text": {"format": {"type": "json_schema", "name": "a", "schema": ADDRESS}}}
    tools = [{"type": "function", "name": name, "parameters": schema} for name, schema in TOOLS]
    return body | {
        "tools": tools,
        "tool_choice": draw.choice(("auto", "required")),
        "reasoning": {"max_tokens": 4},
    }


def _message(draw: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": _messages(draw),
        "max_tokens": _length(draw),
        "temperature": 0,
        "system": STORY,
    }
    body |= {
        "stop_sequences": ["q"],
        "thinking": {"type": "enabled", "budget_tokens": draw.choice((0, 5))},
    }
    if draw.random() < 0.5:
        tools = [{"name": name, "input_schema": schema} for name, schema in TOOLS]
        body |= {
            "tools": tools,
            "tool_choice": draw.choice(({"type": "any"}, {"type": "tool", "name": "weather"})),
        }
    return body


def _ollama(draw: random.Random) -> dict[str, Any]:
    options = {"seed": draw.randrange(2**31), "num_predict": _length(draw), "temperature": 1.1}
    options |= draw.choice(
        (
            {"top_k": 8},
            {"repeat_penalty": 1.3},
            {"min_p": 0.05},
            {"typical_p": 0.7},
            {"stop": ["e"]},
        )
    )
    body: dict[str, Any] = {"options": options, "stream": False}
    if draw.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": 3}
    return body | ({"format": draw.choice(("json", ADDRESS))} if draw.random() < 0.3 else {})


def _ollama_chat(draw: random.Random) -> dict[str, Any]:
    body = _ollama(draw) | {"messages": _messages(draw), "think": draw.choice((None, True, False))}
    if "format" not in body and draw.random() < 0.5:
        body["tools"] = [
            {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
        ]
    return body


def _kobold(draw: random.Random) -> dict[str, Any]:
    body = {
        "prompt": draw.choice(PROMPTS),
        "max_length": _length(draw),
        "sampler_seed": 1 + draw.randrange(2**31),
    }
    body |= {
        "temperature": 1.2,
        "logprobs": draw.random() < 0.3,
        "memory": draw.choice(("", "Remember the fox. ")),
    }
    return body | draw.choice(KOBOLD_SAMPLERS) | draw.choice(KOBOLD_EDITS) | _adapter(draw)


def _llama_cpp(draw: random.Random) -> dict[str, Any]:
    body = _settings(draw) | {
        "prompt": draw.choice(PROMPTS),
        "n_predict": _length(draw),
        "seed": draw.randrange(2**32),
    }
    for name in ("sampler_order", "banned_tokens"):  # have KoboldCpp's meaning in this protocol
        body.pop(name, None)
    return body | draw.choice(
        ({}, {"json_schema": ADDRESS}, {"grammar": "root ::= [a-f]+ [0-9]+"}, {"n_probs": 4})
    )


def _native(draw: random.Random) -> dict[str, Any]:
    settings = _settings(draw) | {"max_new_tokens": _length(draw), "seed": draw.randrange(2**32)}
    settings.pop("watermark_keys", None)  # cannot be set by this protocol
    return {
        "prompt": draw.choice(PROMPTS),
        "settings": settings,
        "alternatives": draw.choice((0, 4, 10)),
    } | _adapter(draw)


ENDPOINTS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    TEXT: _completion,
    CHAT: _chat,
    "/v1/responses": _response,
    "/v1/messages": _message,
    "/api/generate": (
        lambda draw: _ollama(draw) | {"prompt": draw.choice(PROMPTS), "raw": draw.random() < 0.5}
    ),
    "/api/chat": _ollama_chat,
    "/api/v1/generate": _kobold,
    "/completion": _llama_cpp,
    "/api/dantinox/generate": _native,
    "/v1/embeddings": lambda draw: {
        "input": draw.sample(PROMPTS, draw.randint(1, 3)),
        "encoding_format": "base64",
    },
    "/v1/rerank": lambda draw: {
        "query": draw.choice(PROMPTS),
        "documents": draw.sample(PROMPTS, 3),
    },
}
# Fields that differ between equal answers: names, times, and what the prefix cache contained.
VARYING = re.compile(
    r"id|call_id|created|created_at|completed_at|system_fingerprint|timings|\w*duration|\w*seconds|cached_tokens|\w*reused\w*|"
    r"tokens_cached|cache_\w*_input_tokens|id_slot|\w*tokens_per_second|"
    r"\w*tok_per_s|input_tokens"
)


def comparable(path: str, content: bytes) -> Any:
    """Returns what two equal answers have in common: the JSON without names, times and statistics
    of the cache.
    """
    if path != "/api/dantinox/generate":
        return _without_varying(json.loads(content))
    events = [json.loads(line[6:]) for line in content.split(b"\n") if line.startswith(b"data: {")]
    return _without_varying(_joined(events))


def _joined(events: list[dict[str, Any]]) -> list[Any]:
    """Joins the events of a stream: which tokens share an event depends on the load."""
    tokens = [token for event in events for token in event.get("tokens", ())]
    text = "".join(event.get("text", "") for event in events)
    rest = [
        {name: value for name, value in event.items() if name not in ("text", "tokens")}
        for event in events
    ]
    return [text, tokens, [event for event in rest if set(event) - {"sample"}]]


def _without_varying(value: Any) -> Any:
    if isinstance(value, dict):
        is_token = "logprob" in value  # the id of a token is no name
        return {
            name: _without_varying(part)
            for name, part in value.items()
            if is_token or not VARYING.fullmatch(name)
        }
    return [_without_varying(part) for part in value] if isinstance(value, list) else value


def make_run(folder: Path, **sizes: object) -> Path:
    """Writes a run with a small random model and a byte tokenizer, and the adapters in the folder
    `loras` beside it.
    """
    from dantinox.config import TokenizerSection, build_config
    from dantinox.model.parameters import abstract_model
    from dantinox.run import create_run, save_config, save_tokenizer, save_weights
    from dantinox.text import train_tokenizer

    from .lora_runs import make_lora_run

    size = {
        "dim": 64,
        "n_heads": 4,
        "kv_heads": 2,
        "num_blocks": 2,
        "hidden_dim": 128,
        "max_context": 2048,
        "dtype": "float32",
    }
    config = build_config({"model": size | sizes, "tokenizer": {"tokenizer_type": "byte"}})
    tokenizer = train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(()))
    run, rng = create_run(folder), np.random.default_rng(0)
    save_config(run, config)
    save_tokenizer(run, tokenizer.to_json())
    shapes = abstract_model(config.architecture(tokenizer.vocab_size))[1]
    save_weights(
        run.weights,
        {name: 0.1 * rng.standard_normal(x.shape) + (x.ndim == 1) for name, x in shapes.items()},
    )
    run.chat_template.write_text(TEMPLATE, encoding="utf-8")
    for seed, name in enumerate(ADAPTERS):
        make_lora_run(folder.parent / "loras" / name, run.path, seed)
    return run.path


@contextmanager
def running_server(run_dir: Path, **flags: object) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Starts `dantinox serve` for a run of `make_run`; yields its port and process, and requires
    that it ends with status 0.
    """
    loras = [f"{name}={run_dir.parent / 'loras' / name}" for name in ADAPTERS]
    defaults: dict[str, object] = {
        "slots": SLOTS,
        "context": CONTEXT,
        "warm_up": ("echo", "embeddings", "strategies"),
    }
    command = [sys.executable, "-m", "dantinox", "serve", run_dir, "--port", 0, "--lora", *loras]
    for name, value in (defaults | flags).items():
        command += [f"--{name}", *(value if isinstance(value, tuple) else (value,))]
    with subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=sys.stderr, text=True
    ) as server:
        assert server.stdout is not None
        found = re.search(r"http://127.0.0.1:(\d+)", server.stdout.readline())
        assert found is not None
        try:
            yield int(found[1]), server
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(40)
    assert code == 0, f"the server ended with {code}"
