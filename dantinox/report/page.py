"""The HTML report of a generation: shaded text, the alternatives of each token, and plots by
position.

The page is a single file that loads nothing else. Generated text is embedded as JSON with every `<`
escaped and is displayed as text, never as markup. A Content-Security-Policy allows only the script
and the style of this package, by their hashes.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any

from dantinox.config.router_settings import RULES, STRATEGIES
from dantinox.report.trace_file import LISTS, replace_nonfinite

# (token id, text) → its index in the table that all samples share.
Words = dict[tuple[int, str], int]

# The server's web page uses these scripts too.
SHARED_SCRIPTS = ("page_core.js", "page_plots.js", "page_token.js")
SCRIPTS = (*SHARED_SCRIPTS, "page.js")
GLYPHS = {"greedy": "▬", "clarify": "?", "explore": "▲", "resample": "↻", "adaptive": "•"}
DIGITS = 5  # significant digits of the numbers in the page
# These values are compared with thresholds, so they need enough digits to represent a float32
# exactly.
EXACT_DIGITS = {"entropy": 9, "varentropy": 9}
SURROGATE = re.compile("[\ud800-\udfff]")


def report_page(traces: Sequence[Mapping[str, Any]]) -> str:
    """Returns the HTML of the report, to be written as UTF-8.

    Args:
      traces: trace documents, one per sample, as `trace_file` describes them. The page omits the
        sections for attention metrics, strategies and router settings if no trace has them.
        Infinite numbers are shown as `no bound` or `impossible`.

    Raises:
      ValueError: `traces` is empty.
    """
    if not traces:
        raise ValueError("a report needs at least one sample")
    words: Words = {}
    samples = [_sample(trace, words) for trace in traces]
    return _page(strategy_data() | {"words": list(words), "samples": samples})


def empty_page() -> str:
    """Returns the report with `"words":[],"samples":[]` in place of its data, for scripts that
    insert the data themselves.
    """
    return _page(strategy_data() | {"words": [], "samples": []})


def _page(data: Mapping[str, Any]) -> str:
    style = read_asset("page.css")
    script = "".join(map(read_asset, SCRIPTS))
    hashes = {"style_hash": source_hash(style), "script_hash": source_hash(script)}
    content = {"style": style, "script": script, "data": escape_json(data), **html_fragments()}
    return Template(read_asset("page.html")).substitute(**hashes, **content)


def html_fragments() -> dict[str, str]:
    """Returns the HTML that the report and the server's web page share: name of the placeholder in
    their templates → HTML.
    """
    return {"plots": read_asset("page_plots.html"), "words": read_asset("page_words.html")}


def read_asset(name: str) -> str:
    """Returns the text of one of the report's files."""
    return resources.files("dantinox.report").joinpath(name).read_text(encoding="utf-8")


def source_hash(source: str) -> str:
    """Returns the source expression of a Content-Security-Policy that allows a script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def escape_json(value: Any) -> str:
    """Returns a value as JSON for a script element in a UTF-8 file: `<` and lone surrogates are
    escaped.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    return SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def strategy_data() -> dict[str, Any]:
    """Returns the names of the router's strategies in order, their glyphs, and the rules that
    select them.
    """
    return {
        "strategies": STRATEGIES,
        "glyphs": [GLYPHS[name] for name in STRATEGIES],
        "rules": [[name, conditions] for name, conditions in RULES.items()],
    }


def _sample(trace: Mapping[str, Any], words: Words) -> dict[str, Any]:
    """Returns a document with its tokens as columns, so that each name is written once instead of
    once per token.
    """
    tokens = trace["tokens"]
    plain = dict.fromkeys(
        name for token in tokens for name in token if name not in ("id", "text", *LISTS)
    )
    return {
        **{key: replace_nonfinite(value) for key, value in trace.items() if key != "tokens"},
        "columns": {
            "word": [_word_index(token, words) for token in tokens],
            **{
                name: [
                    _shorten(token.get(name), EXACT_DIGITS.get(name, DIGITS)) for token in tokens
                ]
                for name in plain
            },
        },
        "lists": {
            kind: _list_columns([token.get(kind, []) for token in tokens], names[2:], words)
            for kind, names in LISTS.items()
        },
    }


def _list_columns(
    lists: Sequence[Sequence[Mapping[str, Any]]], numbers: Sequence[str], words: Words
) -> dict[str, list[Any]]:
    """Returns the alternatives or candidates of all tokens as columns, with the number of entries
    of each token.
    """
    entries = [entry for entries_of_token in lists for entry in entries_of_token]
    columns = {name: [_shorten(entry.get(name)) for entry in entries] for name in numbers}
    return {
        "count": [len(entry) for entry in lists],
        "word": [_word_index(entry, words) for entry in entries],
        **columns,
    }


def _word_index(token: Mapping[str, Any], words: Words) -> int:
    return words.setdefault((token["id"], token["text"]), len(words))


def _shorten(value: Any, digits: int = DIGITS) -> Any:
    """Rounds a finite float to `digits` significant digits. Other floats become None, and other
    values stay unchanged.
    """
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short
