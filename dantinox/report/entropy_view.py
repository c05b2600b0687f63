"""A generated text at the terminal: each token shaded by the entropy of the distribution that the model gave for it.

Shades run from dark to light (viridis, which colour-blind eyes can tell apart) with black or white letters on them, so that
they read on dark and light terminals. Where there are no colours each line of text has a line of digits below it, the
entropies in whole bits, and a line of letters for the strategies.

What the model wrote never reaches the terminal as a command: control characters are shown as pictures (␛), other characters
that can hide or reorder text as `<U+202E>`. A line break is shown as ↵.
"""

import math
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple, TextIO

from rich.cells import cell_len

from dantinox.report.trace import Document

Colours = Literal["truecolor", "256", "none"]
RGB = tuple[int, int, int]

RAMP: tuple[RGB, ...] = (
    (68, 1, 84), (71, 45, 123), (59, 82, 139), (44, 114, 142), (33, 145, 140), (40, 174, 128), (94, 201, 98),
    (173, 220, 48), (253, 231, 37),
)  # fmt: skip
# The same in the colours that every terminal of 256 has alike: rising in lightness, too.
RAMP_256 = (53, 55, 24, 31, 36, 77, 149, 220, 226)
WHITE_ON_256 = (53, 55, 24)
RAMP_BITS = 8.0  # the end of the ramps; most of them is for the first bits, where tokens differ most
LEGEND_BITS = (0, 0.5, 1, 2, 3, 4, 6, 8)
MARKS = {"greedy": "ᵍ", "clarify": "ᶜ", "explore": "ᵉ", "resample": "ʳ", "adaptive": "ᵃ"}
TAB, BREAK, BASE, ZERO_WIDTH_JOINER, ZERO_WIDTH_NON_JOINER = "⇥   ", "↵", "◌", "\u200d", "\u200c"
RESET = "\x1b[0m"


class Piece(NamedTuple):
    """Text of one token, or of several that spell one character; `entropy` is None in the prompt."""

    text: str
    entropy: float | None = None
    strategy: str | None = None


class Glyph(NamedTuple):
    """What a terminal moves past as one: a character with its combining marks, `cells` wide.

    Attributes:
      mark: the strategy that begins here, else "".
      starts: whether a token begins here.
      breaks: whether the line ends here.
    """

    text: str
    cells: int
    entropy: float | None
    mark: str = ""
    starts: bool = False
    breaks: bool = False


def terminal_colours(stream: TextIO) -> Colours:
    """The colours that `show_entropy` may use on a stream, by rich's reading of it and of NO_COLOR, TERM, COLORTERM …"""
    from rich.console import Console  # 40 ms to import

    screen = Console(file=stream)
    if screen.no_color:
        return "none"
    return "truecolor" if screen.color_system == "truecolor" else "256" if screen.color_system == "256" else "none"


def show_entropy(documents: Sequence[Document], width: int, colours: Colours) -> Iterator[str]:
    """The texts of documents (as `report.trace` describes them) in lines of at most `width` cells, with a legend and totals.

    Args:
      colours: `truecolor` and `256` shade with escape sequences, each line ends without any; `none` writes digits below.
    """
    width = max(width, 20)
    used = {token["strategy"] for document in documents for token in document["tokens"] if "strategy" in token}
    yield from _legend([name for name in MARKS if name in used], width, colours)
    for number, document in enumerate(documents, 1):
        yield ""
        if len(documents) > 1:
            yield f"sample {number} of {len(documents)}, seed {document['seed']}"
        yield from _drawn(_glyphs([Piece(document["prompt"]), *_pieces(document["tokens"])]), width, colours)
        yield ""
        yield from textwrap.wrap(_totals(document["tokens"]), width)


def shade(bits: float) -> RGB:
    """The colour of an entropy, the same whatever the vocabulary."""
    place = _place(bits) * (len(RAMP) - 1)
    low = min(int(place), len(RAMP) - 2)
    red, green, blue = (round(a + (place - low) * (b - a)) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True))
    return red, green, blue


def shade_256(bits: float) -> int:
    """The colour of an entropy, by its number."""
    return RAMP_256[round(_place(bits) * (len(RAMP_256) - 1))]


def harmless(character: str) -> str:
    """What is shown for a character: itself, unless a terminal would act on it, hide it or reorder others by it."""
    code, kind = ord(character), unicodedata.category(character)
    if character == "\t":
        return TAB
    if code < 32 or code == 127:
        return chr(0x2400 + code) if code < 32 else "␡"
    if kind in ("Cc", "Cs", "Zl", "Zp") or (kind == "Cf" and character not in (ZERO_WIDTH_JOINER, ZERO_WIDTH_NON_JOINER)):
        return f"<U+{code:04X}>"
    return character


def _pieces(tokens: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
    """The tokens that show something. Those that spell one character together count as the most uncertain one of them."""
    parts: list[Mapping[str, Any]] = []
    for token in tokens:
        parts.append(token)
        if token["text"]:
            chief = max(parts, key=lambda part: _number(part["entropy"]) or 0.0)
            yield Piece(token["text"], _number(chief["entropy"]), chief.get("strategy"))
            parts = []


def _glyphs(pieces: Iterable[Piece]) -> list[Glyph]:
    """Pieces cut into glyphs; one that runs over several pieces belongs to the first of them."""
    glyphs: list[Glyph] = []
    strategy = None
    for piece in pieces:
        starts = True
        for character in piece.text:
            shown = BREAK if character == "\n" else harmless(character)
            if shown == character and glyphs and _joins(glyphs[-1], character):
                text = glyphs[-1].text + character
                glyphs[-1] = glyphs[-1]._replace(text=text, cells=_cells(text))
                continue
            if not cell_len(shown):
                shown = BASE + shown  # a mark with nothing to stand on
            mark = piece.strategy if piece.strategy and piece.strategy != strategy else ""
            strategy = piece.strategy
            glyphs.append(Glyph(shown, _cells(shown), piece.entropy, mark, starts, character == "\n"))
            starts = False
    return glyphs


def _joins(before: Glyph, character: str) -> bool:
    """Whether a character is drawn into the glyph before it: combining marks, and what a joiner ties to an emoji."""
    is_tied = before.text[-1] == ZERO_WIDTH_JOINER and unicodedata.category(character) == "So"
    return not before.breaks and (is_tied or not cell_len(character))


def _cells(text: str) -> int:
    """The most cells that a terminal may take: some draw joined emoji as one, others side by side."""
    return max(cell_len(text), sum(map(cell_len, text)))


def _drawn(glyphs: Sequence[Glyph], width: int, colours: Colours) -> Iterator[str]:
    for line in _wrapped(glyphs, width, mark_cells=0 if colours == "none" else 1):
        yield from _staves(line) if colours == "none" else [_painted(line, colours)]


def _wrapped(glyphs: Iterable[Glyph], width: int, mark_cells: int) -> Iterator[list[Glyph]]:
    """Lines of glyphs, cut behind a space where there is one."""
    line: list[Glyph] = []

    def cells(glyphs: Iterable[Glyph]) -> int:
        return sum(glyph.cells + (mark_cells if glyph.mark else 0) for glyph in glyphs)

    for glyph in glyphs:
        while line and cells([*line, glyph]) > width:
            spaces = [i for i, earlier in enumerate(line, 1) if earlier.text == " "]
            cut = spaces[-1] if spaces and glyph.text != " " else len(line)
            yield line[:cut]
            line = line[cut:]
        line.append(glyph)
        if glyph.breaks:
            yield line
            line = []
    if line:
        yield line


def _painted(line: Iterable[Glyph], colours: Colours) -> str:
    """The line with escape sequences; it ends in the terminal's own colours."""
    parts = []
    for glyph in line:
        if glyph.mark:
            parts.append(("1", MARKS.get(glyph.mark, "?")))
        parts.append(("" if glyph.entropy is None else _style(glyph.entropy, colours), glyph.text))
    runs = ((style, "".join(text for _, text in run)) for style, run in groupby(parts, key=lambda part: part[0]))
    return "".join(f"\x1b[{style}m{text}{RESET}" if style else text for style, text in runs)


def _place(bits: float) -> float:
    """Where on the ramp an entropy lies, in [0, 1]."""
    return math.sqrt(min(max(bits, 0.0), RAMP_BITS) / RAMP_BITS)


def _style(bits: float, colours: Colours) -> str:
    """The parameters of the escape sequence: the shade behind, black or white in front, whichever is easier to read on it."""
    if colours == "256":
        index = shade_256(bits)
        return f"38;5;{231 if index in WHITE_ON_256 else 16};48;5;{index}"
    red, green, blue = shade(bits)
    front = "0;0;0" if _is_light((red, green, blue)) else "255;255;255"
    return f"38;2;{front};48;2;{red};{green};{blue}"


def _is_light(colour: RGB) -> bool:
    """Whether black stands out more than white: relative luminance above √(1.05 · 0.05) − 0.05 (WCAG 2)."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179


def _staves(line: Sequence[Glyph]) -> Iterator[str]:
    """The text; below it a digit at the first cell of each token; below that a letter where a strategy begins."""
    yield "".join(glyph.text for glyph in line)
    has_digit = [glyph.starts and glyph.entropy is not None for glyph in line]
    digits = (str(min(int((g.entropy or 0) + 0.5), 9)) if has else "" for g, has in zip(line, has_digit, strict=True))
    letters = (glyph.mark[:1] if glyph.mark in MARKS else "?" if glyph.mark else "" for glyph in line)
    for marks in (digits, letters):
        if below := "".join(mark.ljust(glyph.cells) for mark, glyph in zip(marks, line, strict=True)).rstrip():
            yield below


def _legend(strategies: Sequence[str], width: int, colours: Colours) -> Iterator[str]:
    if colours == "none":
        parts = "below each token its entropy in bits, rounded (9: 9 or more)"
        letters = ", ".join(f"{name[0]} {name}" for name in strategies)
        yield from textwrap.wrap(parts + (f"; below that the strategy from there on: {letters}" if strategies else ""), width)
        return
    chips = [f" {bits:g}{'+' if bits == RAMP_BITS else ''} " for bits in LEGEND_BITS]
    names = "".join(f"  {MARKS[name]} {name}" for name in strategies)
    yield from _drawn(
        [
            *_glyphs([Piece("entropy in bits ")]),
            *(Glyph(chip, len(chip), bits) for chip, bits in zip(chips, LEGEND_BITS, strict=True)),
            *_glyphs([Piece(names)]),
        ],
        width,
        colours,
    )


def _totals(tokens: Sequence[Mapping[str, Any]]) -> str:
    """`64 tokens, mean entropy 1.84 bits, perplexity 3.91, adaptive 62 %, greedy 38 %, mean temperature 0.91`."""
    parts = [f"{len(tokens)} tokens"]
    if (mean := _mean(tokens, "entropy")) is not None:
        parts.append(f"mean entropy {mean:.2f} bits")
    if tokens:
        surprise = -(_mean(tokens, "logprob") or 0) if all(_number(t["logprob"]) is not None for t in tokens) else math.inf
        parts.append(f"perplexity {math.exp(surprise) if surprise < 700 else math.inf:.2f}")
    shares = Counter("".join(map(harmless, token["strategy"])) for token in tokens if "strategy" in token)
    parts += [f"{name} {100 * count / len(tokens):.0f}\u00a0%" for name, count in shares.most_common()]
    if forced := sum(token.get("forced", False) for token in tokens):
        parts.append(f"{forced} forced")
    if (mean := _mean(tokens, "temperature")) is not None:
        parts.append(f"mean temperature {mean:.2f}")
    return ", ".join(parts)


def _mean(tokens: Iterable[Mapping[str, Any]], name: str) -> float | None:
    values = [value for token in tokens if (value := _number(token.get(name))) is not None]
    return math.fsum(values) / len(values) if values else None


def _number(value: Any) -> float | None:
    """The number, or None where a trace has none or the model gave no finite one."""
    return value if value is not None and math.isfinite(value) else None
