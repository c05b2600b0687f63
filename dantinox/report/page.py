"""The HTML report of a generation: shaded text, the candidates of each token, and plots over position.

The page is a single file that loads nothing. What the model wrote is data in it, never markup: JSON with every `<` escaped, put
on the screen as text, under a Content-Security-Policy that runs only the script and the style of this package, by their hashes.
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
from dantinox.report.trace_file import LISTS, finite

Words = dict[tuple[int, str], int]  # (token id, text) → its place in the table that all samples share

SHARED = ("page_core.js", "page_plots.js", "page_token.js")  # by the page of a server too
SCRIPTS = (*SHARED, "page.js")
GLYPHS = {"greedy": "▬", "clarify": "?", "explore": "▲", "resample": "↻", "adaptive": "•"}
DIGITS = 5
EXACT = {"entropy": 9, "varentropy": 9}  # float32 to the last bit: these are compared with thresholds
SURROGATE = re.compile("[\ud800-\udfff]")


def page(traces: Sequence[Mapping[str, Any]]) -> str:
    """The page as text, to be written as UTF-8.

    Args:
      traces: trace documents, one per sample. Without attention metrics, strategies or router numbers the parts that show them
        are left out. Numbers that are not finite are shown as what they stand for: no bound, no chance.

    Raises:
      ValueError: there is no sample.
    """
    if not traces:
        raise ValueError("a page needs at least one sample")
    words: Words = {}
    samples = [_sample(trace, words) for trace in traces]
    return _page(vocabulary() | {"words": list(words), "samples": samples})


def empty_page() -> str:
    """The page with `"words":[],"samples":[]` in the place of its data, for who puts them there without this package."""
    return _page(vocabulary() | {"words": [], "samples": []})


def _page(data: Mapping[str, Any]) -> str:
    style, script = asset("page.css"), "".join(map(asset, SCRIPTS))
    return Template(asset("page.html")).substitute(
        style=style, style_hash=_hash(style), script=script, script_hash=_hash(script), data=escaped(data), **parts()
    )


def parts() -> dict[str, str]:
    """The parts of HTML that the pages share, by the names that stand for them."""
    return {"plots": asset("page_plots.html"), "words": asset("page_words.html")}


def asset(name: str) -> str:
    """A file of the page, as text."""
    return resources.files("dantinox.report").joinpath(name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    """A source expression of a Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def escaped(value: Any) -> str:
    """JSON that may stand inside a script element and can be written as UTF-8: without `<` and without half characters."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def vocabulary() -> dict[str, Any]:
    """What the pages know of strategies: their names in order, their signs, and the rules that choose them."""
    return {
        "strategies": STRATEGIES,
        "glyphs": [GLYPHS[name] for name in STRATEGIES],
        "rules": [[name, conditions] for name, conditions in RULES.items()],
    }


def _sample(trace: Mapping[str, Any], words: Words) -> dict[str, Any]:
    """One document with its tokens as columns: a name is written once, not once per token."""
    tokens = trace["tokens"]
    plain = dict.fromkeys(name for token in tokens for name in token if name not in ("id", "text", *LISTS))
    return {
        **{key: finite(value) for key, value in trace.items() if key != "tokens"},
        "columns": {
            "word": [_word(token, words) for token in tokens],
            **{name: [_short(token.get(name), EXACT.get(name, DIGITS)) for token in tokens] for name in plain},
        },
        "lists": {kind: _listed([token.get(kind, []) for token in tokens], names[2:], words) for kind, names in LISTS.items()},
    }


def _listed(lists: Sequence[Sequence[Mapping[str, Any]]], numbers: Sequence[str], words: Words) -> dict[str, list[Any]]:
    """A list of words with numbers for every token: how long each is, then all of them as columns."""
    every = [one for some in lists for one in some]
    columns = {name: [_short(one.get(name)) for one in every] for name in numbers}
    return {"count": [len(some) for some in lists], "word": [_word(one, words) for one in every], **columns}


def _word(token: Mapping[str, Any], words: Words) -> int:
    return words.setdefault((token["id"], token["text"]), len(words))


def _short(value: Any, digits: int = DIGITS) -> Any:
    """A number with so many significant digits, or null where it is not finite; anything else as it is."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short
