"""Generated texts as JSON Lines, a line per token, and back.

A sample is a document: a plain dict with `prompt`, `text`, `seed`, `finish_reason`, `strategy`, `settings`, `router`, `stats`,
`vocab_size` and `tokens`, a list of dicts. Its lines are

    {"kind": "sample", "sample": 0, "prompt": …, "text": …, …, "tokens": 64}
    {"kind": "token", "sample": 0, "step": 0, "position": 12, "id": 31, "text": " di", "entropy": 0.83, …}

one for the sample as a whole, with the number of its tokens, then one for each of them. `sample` counts the samples of the
file, `step` the tokens of a sample, both from 0; `position` is the token's place in the context, the prompt included. A token's
`alternatives` are lists `[id, text, logprob, logprob_sampled]`, best first; all other values of it are plain. A table of the
tokens is `pandas.read_json(path, lines=True).query("kind == 'token'")`.

The files are strict JSON: a number that is infinite or NaN is null.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from dantinox.config import UserError

Document = Mapping[str, Any]
Types = tuple[type, ...]

NUMBER: Types = (int, float, NoneType)
SAMPLE: dict[str, Types] = {
    "prompt": (str,), "text": (str,), "seed": (int,), "finish_reason": (str,), "strategy": (str,), "settings": (dict,),
    "router": (dict, NoneType), "stats": (dict,), "vocab_size": (int,),
}  # fmt: skip
TOKEN: dict[str, Types] = {
    "id": (int,), "text": (str,), "entropy": NUMBER, "varentropy": NUMBER, "attn_entropy": NUMBER, "attn_entropy_norm": NUMBER,
    "attn_varentropy": NUMBER, "attn_disagreement": NUMBER, "attn_agreement": NUMBER, "interaction_strength": NUMBER,
    "strategy": (str,), "temperature": NUMBER, "top_p": NUMBER, "top_k": NUMBER, "min_p": NUMBER, "forced": (bool,),
    "survivors": (int,), "rank": (int,), "logprob": NUMBER, "logprob_sampled": NUMBER, "alternatives": (list,),
}  # fmt: skip
ALWAYS = {"id", "text", "entropy", "varentropy", "survivors", "rank", "logprob", "logprob_sampled", "alternatives"}
ALTERNATIVE: dict[str, Types] = {"id": (int,), "text": (str,), "logprob": NUMBER, "logprob_sampled": NUMBER}
# JSON may hold these as they are; but some readers end a line at them, and a terminal that shows the file obeys some.
UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def trace_lines(documents: Iterable[Document]) -> Iterator[str]:
    """The lines of a trace file, without their line ends."""
    for sample, document in enumerate(documents):
        tokens = document["tokens"]
        header = _ordered(document, SAMPLE)
        yield _line({"kind": "sample", "sample": sample} | header | {"tokens": len(tokens)})
        first = document["stats"].get("prompt_tokens", 0)
        for step, token in enumerate(tokens):
            place = {"kind": "token", "sample": sample, "step": step, "position": first + step}
            alternatives = [[other[name] for name in ALTERNATIVE] for other in token["alternatives"]]
            yield _line(place | _ordered(token | {"alternatives": alternatives}, TOKEN))


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """The documents of a trace file.

    Raises:
      UserError: the file cannot be read, or a line is damaged or missing.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read the trace {path}: {error.strerror}") from None
    if lines[-1] == b"":
        lines.pop()
    documents: list[dict[str, Any]] = []
    missing = 0
    for number, line in enumerate(lines, 1):
        try:
            missing = _take(documents, _record(line), missing)
        except _Damage as damage:
            raise UserError(f"the trace is damaged: {damage} ({path}, line {number})") from None
    if missing:
        raise UserError(f"the trace is damaged: its last sample lacks tokens ({path}, line {len(lines)})")
    return documents


class _Damage(Exception):
    """What is wrong with a line."""


def _take(documents: list[dict[str, Any]], record: dict[str, Any], missing: int) -> int:
    """Puts a line's record in its place; gives the number of tokens that the sample still lacks."""
    kind = record.pop("kind", None)
    if kind == "sample" and not missing:
        _expect(record, {"sample": len(documents)})
        _check(record, SAMPLE | {"tokens": (int,)}, {*SAMPLE, "tokens"})
        count: int = record.pop("tokens")
        if count < 0:
            raise _Damage(f"tokens must be at least 0, got {count}")
        documents.append(record | {"tokens": []})
        return count
    if kind == "token" and missing:
        tokens = documents[-1]["tokens"]
        _expect(record, {"sample": len(documents) - 1, "step": len(tokens)})
        record.pop("position", None)
        _check(record, TOKEN, ALWAYS)
        record["alternatives"] = [_alternative(other) for other in record["alternatives"]]
        tokens.append(record)
        return missing - 1
    raise _Damage(f'kind must be "{"token" if missing else "sample"}" here, got {_shown(kind)}')


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"), parse_constant=_number, parse_float=_number)
    except (ValueError, RecursionError):  # wrong bytes are a ValueError too
        raise _Damage("the line is not JSON") from None
    if not isinstance(record, dict):
        raise _Damage("the line is no JSON object")
    return record


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number")
    return number


def _expect(record: dict[str, Any], places: Mapping[str, int]) -> None:
    for name, value in places.items():
        if (given := record.pop(name, None)) != value:
            raise _Damage(f"{name} must be {value} here, got {_shown(given)}")


def _check(record: Mapping[str, Any], types: Mapping[str, Types], needed: set[str]) -> None:
    absent = [name for name in types if name in needed and name not in record]
    if absent:
        raise _Damage(f"{absent[0]} is missing")
    for name in (name for name in types if name in record):
        value, allowed = record[name], types[name]
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise _Damage(f"{name} has a value of the wrong type, {_shown(value)}")


def _alternative(values: Any) -> dict[str, Any]:
    if not isinstance(values, list) or len(values) != len(ALTERNATIVE):
        raise _Damage(f"alternatives must hold lists of {', '.join(ALTERNATIVE)}, got {_shown(values)}")
    other = dict(zip(ALTERNATIVE, values, strict=True))
    _check(other, ALTERNATIVE, set(ALTERNATIVE))
    return other


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _ordered(record: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The record with the known names first; `tokens` has lines of its own."""
    known = {name: record[name] for name in names if name in record}
    return known | {name: value for name, value in record.items() if name not in known and name != "tokens"}


def _line(record: Mapping[str, Any]) -> str:
    text = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)
    return UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
