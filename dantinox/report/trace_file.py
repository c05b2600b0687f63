"""The file of `--trace`: one line of JSON per token.

A sample is a document: a plain dict with `prompt`, `text`, `seed`, `finish_reason`, `strategy`, `settings`, `router`, `stats`,
`vocab_size` and `tokens`, a list of dicts. Its lines are

    {"kind": "sample", "sample": 0, "prompt": …, "text": …, …, "tokens": 64}
    {"kind": "token", "sample": 0, "step": 0, "position": 12, "id": 31, "text": " di", "entropy": 0.83, …}

one for the sample as a whole, with the number of its tokens, then one for each of them. `sample` counts the samples of the
file, `step` the tokens of a sample, both from 0; `position` is the token's place in the context, the prompt included. A token's
`alternatives` are lists `[id, text, logprob, logprob_sampled]`, best first, its `candidates` lists `[id, text, logprob, score]`
in the order they were drawn; all other values of it are plain. A table of the tokens is
`pandas.read_json(path, lines=True).query("kind == 'token'")`.

The files are strict JSON: a number that is infinite or NaN is null.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Document = Mapping[str, Any]

# What a token has lists of, and the values of each.
LISTS = {"alternatives": ("id", "text", "logprob", "logprob_sampled"), "candidates": ("id", "text", "logprob", "score")}
# JSON may hold these as they are; but some readers end a line at them, and a terminal that shows the file obeys some.
UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def trace_lines(documents: Iterable[Document]) -> Iterator[str]:
    """The lines of a trace file, without their line ends."""
    for sample, document in enumerate(documents):
        tokens = document["tokens"]
        yield _line({"kind": "sample", "sample": sample, **document, "tokens": len(tokens)})
        first = document["stats"].get("prompt_tokens", 0)
        for step, token in enumerate(tokens):
            lists = {kind: [[one[name] for name in LISTS[kind]] for one in token[kind]] for kind in LISTS if kind in token}
            place = {"kind": "token", "sample": sample, "step": step, "position": first + step}
            yield _line(place | token | lists)


def finite(value: Any) -> Any:
    """A JSON value with null in place of numbers that JSON cannot write."""
    if isinstance(value, Mapping):
        return {str(name): finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(record: Mapping[str, Any]) -> str:
    text = json.dumps(finite(record), ensure_ascii=False, allow_nan=False)
    return UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
