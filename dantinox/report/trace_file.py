"""The file of `--trace`: one line of JSON per token.

Each sample is a document: a dict with `prompt`, `text`, `seed`, `finish_reason`, `strategy`,
`settings`, `router`, `stats`, `vocab_size` and `tokens`, a list of dicts. In the file, it becomes
one line for the sample, with the number of its tokens, and one line for each token:

    {"kind": "sample", "sample": 0, "prompt": …, "text": …, …, "tokens": 64}
    {"kind": "token", "sample": 0, "step": 0, "position": 12, "id": 31, "text": " di", …}

`sample` is the index of the sample in the file, and `step` the index of the token in its sample,
both from 0. `position` is the token's position in the context, including the prompt. A token's
`alternatives` are lists `[id, text, logprob, logprob_sampled]`, with the most likely first. Its
`candidates` are lists `[id, text, logprob, score]` in the order of their draws. `logprob` is the
log-probability of the model, `logprob_sampled` that after the sampling steps, and `score` that by
which the best candidate was chosen. Its `heads` map the names of statistics to lists
`[layer][head]`. All other values are numbers, strings or booleans.
`pandas.read_json(path, lines=True).query("kind == 'token'")` returns a table of the tokens.

The files are strict JSON: infinite numbers and NaN are null.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Document = Mapping[str, Any]

# The lists of a token, and the fields of their entries.
LISTS = {
    "alternatives": ("id", "text", "logprob", "logprob_sampled"),
    "candidates": ("id", "text", "logprob", "score"),
}
# JSON allows these characters unescaped, but some parsers treat them as line ends, and terminals
# interpret some of them. Lone surrogates cannot be written as UTF-8.
UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def trace_lines(documents: Iterable[Document]) -> Iterator[str]:
    """Yields the lines of a trace file, without line ends."""
    for sample, document in enumerate(documents):
        tokens = document["tokens"]
        yield _line({"kind": "sample", "sample": sample, **document, "tokens": len(tokens)})
        first = document["stats"].get("prompt_tokens", 0)
        for step, token in enumerate(tokens):
            lists = {
                kind: [[entry[name] for name in LISTS[kind]] for entry in token[kind]]
                for kind in LISTS
                if kind in token
            }
            place = {"kind": "token", "sample": sample, "step": step, "position": first + step}
            # The lists replace the lists of dicts of the token.
            yield _line({**place, **token, **lists})


def replace_nonfinite(value: Any) -> Any:
    """Returns a JSON value with None in place of infinite numbers and NaN, which JSON cannot
    represent.
    """
    if isinstance(value, Mapping):
        return {str(name): replace_nonfinite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(record: Mapping[str, Any]) -> str:
    text = json.dumps(replace_nonfinite(record), ensure_ascii=False, allow_nan=False)
    return UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
