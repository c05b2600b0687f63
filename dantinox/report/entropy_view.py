"""Generated text in a terminal, with each token shaded by the entropy of its distribution.

Shades go from dark to light (viridis, which color-blind readers can distinguish) with black or
white letters, so that text is readable on dark and light terminals. Without colors, a line of
digits below each line of text shows the entropies in whole bits, and a line of letters below the
digits shows the strategies.

Generated text cannot control the terminal: control characters are shown as symbols (␛), and other
characters that can hide or reorder text as `<U+202E>`. A line break is shown as ↵.
"""

import math
import statistics
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple, TextIO

import numpy as np
from rich.cells import cell_len

from dantinox.report.trace_file import Document

Colors = Literal["truecolor", "256", "none"]
# The text of one or more tokens, its entropy, and a key of `MARKS` (None: no mark).
Piece = tuple[str, float | None, str | None]

RAMP = np.array([
    (68, 1, 84), (71, 45, 123), (59, 82, 139), (44, 114, 142), (33, 145, 140), (40, 174, 128),
    (94, 201, 98), (173, 220, 48), (253, 231, 37),
])  # fmt: skip
# A similar ramp for terminals with 256 colors. Its lightness increases, too.
RAMP_256 = (53, 55, 24, 31, 36, 77, 149, 220, 226)
# Entropy at the end of the ramps. The position on a ramp is the square root of the entropy's share
# of this value. So low entropies, where tokens differ most, cover a large part of a ramp.
RAMP_BITS = 8.0
# The bits below which white letters have more contrast than black ones (WCAG 2).
WHITE_BELOW = {"truecolor": 1.503, "256": 0.782}
LEGEND_BITS = (0, 0.5, 1, 2, 3, 4, 6, 8)
MARKS = {
    "greedy": "ᵍ",
    "clarify": "ᶜ",
    "explore": "ᵉ",
    "resample": "ʳ",
    "adaptive": "ᵃ",
    "forced": "ᶠ",
}
PICTURES = {**{chr(code): chr(0x2400 + code) for code in range(32)}, "\x7f": "␡", "\t": "⇥   "}
BREAK = "↵"  # shown for a line break
BASE = "◌"  # shown under a combining mark that has no base character
ZERO_WIDTH_NON_JOINER, ZERO_WIDTH_JOINER = "\u200c", "\u200d"


class Glyph(NamedTuple):
    """A character with its combining marks, which a terminal draws as one.

    Attributes:
      mark: the strategy, or `forced`, that starts at this glyph, else "".
      starts: whether a token starts at this glyph.
      breaks: whether the line ends after this glyph.
    """

    text: str
    entropy: float | None
    mark: str = ""
    starts: bool = False
    breaks: bool = False

    @property
    def cells(self) -> int:
        """The glyph's largest width in terminal cells: joined emoji are one picture in some
        terminals, several in others.
        """
        return max(cell_len(self.text), sum(map(cell_len, self.text)))


def terminal_colors(stream: TextIO) -> Colors:
    """Returns the colors that `show_entropy` may use on a stream, as rich detects them (NO_COLOR,
    TERM, COLORTERM …).
    """
    from rich.console import Console  # 40 ms to import

    screen = Console(file=stream)
    if screen.no_color:
        return "none"
    if screen.color_system == "truecolor":
        return "truecolor"
    return "256" if screen.color_system == "256" else "none"


def show_entropy(documents: Sequence[Document], width: int, colors: Colors) -> Iterator[str]:
    """Yields the texts of documents in lines of at most `width` cells, with a legend and totals.

    Args:
      documents: as `trace_file` describes them.
      width: the maximum width of a line in terminal cells, at least 20.
      colors: `truecolor` and `256` shade with escape sequences, which each line resets; `none`
        prints digits below each line.
    """
    width = max(width, 20)
    used = {_mark(token) for document in documents for token in document["tokens"]}
    yield from _legend([name for name in MARKS if name in used], width, colors)
    for number, document in enumerate(documents, 1):
        yield ""
        if len(documents) > 1:
            yield f"sample {number} of {len(documents)}, seed {document['seed']}"
        glyphs = _to_glyphs([(document["prompt"], None, None), *_pieces(document["tokens"])])
        yield from _draw_lines(glyphs, width, colors)
        yield ""
        yield from textwrap.wrap(_totals(document["tokens"]), width)


def shade_text(text: str, bits: float | None, colors: Colors) -> str:
    """Returns a piece of streamed text, escaped for the terminal and shaded by its entropy `bits`;
    None means no shade.

    A shaded line break is shown as ↵ before the break, so that the shade does not extend to the end
    of the line.
    """
    lines = [_escape_except_tabs(line) for line in text.split("\n")]
    if bits is None or colors == "none":
        return "\n".join(lines)
    shown = [line + BREAK for line in lines[:-1]] + lines[-1:]
    return "\n".join(f"\x1b[{_style(bits, colors)}m{line}\x1b[0m" if line else "" for line in shown)


def _escape_except_tabs(line: str) -> str:
    """Escapes a line of streamed text. Tabs stay: only lines that are laid out in cells, as in
    `show_entropy`, replace them.
    """
    return "".join(
        character if character == "\t" else escape_character(character) for character in line
    )


def digit_lines(pieces: Iterable[tuple[str, float | None]], width: int) -> Iterator[str]:
    """Yields the lines of a text, each followed by the entropies of its pieces in whole bits (9
    means 9 or more).
    """
    glyphs = _to_glyphs((text, entropy, None) for text, entropy in pieces)
    yield from _draw_lines(glyphs, max(width, 20), "none")


def shade_rgb(bits: float) -> tuple[int, ...]:
    """Returns the color of an entropy as red, green and blue in [0, 255]; it does not depend on the
    vocabulary.
    """
    positions = np.linspace(0, 1, len(RAMP))
    return tuple(
        round(float(np.interp(_ramp_position(bits), positions, channel))) for channel in RAMP.T
    )


def shade_256(bits: float) -> int:
    """Returns the index of an entropy's color in the 256-color palette."""
    return RAMP_256[round(_ramp_position(bits) * (len(RAMP_256) - 1))]


def _ramp_position(bits: float) -> float:
    """Returns the position of an entropy on the ramp, in [0, 1]."""
    return math.sqrt(min(max(bits, 0.0), RAMP_BITS) / RAMP_BITS)


def escape_character(character: str) -> str:
    """Returns a character, or its visible replacement if it could control a terminal, be invisible
    or reorder text.
    """
    if character in PICTURES:
        return PICTURES[character]
    is_joiner = character in (ZERO_WIDTH_NON_JOINER, ZERO_WIDTH_JOINER)
    is_unsafe = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and not is_joiner
    return f"<U+{ord(character):04X}>" if is_unsafe else character


def _mark(token: Mapping[str, Any]) -> str | None:
    """Returns the strategy of a token, `forced` for a token that the router did not draw, or None
    without the router.
    """
    return "forced" if token.get("forced") else token.get("strategy")


def _pieces(tokens: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
    """Yields the pieces of a text. Tokens that together form one character get the highest of their
    entropies.
    """
    parts: list[Mapping[str, Any]] = []
    for token in tokens:
        parts.append(token)
        if token["text"]:
            most_uncertain = max(parts, key=lambda part: _finite(part["entropy"]) or 0.0)
            yield token["text"], _finite(most_uncertain["entropy"]), _mark(most_uncertain)
            parts = []


def _to_glyphs(pieces: Iterable[Piece]) -> list[Glyph]:
    """Splits pieces into glyphs; a glyph that spans several pieces belongs to the first one."""
    glyphs: list[Glyph] = []
    previous_strategy = None
    for text, entropy, strategy in pieces:
        starts = True
        for character in text:
            shown = BREAK if character == "\n" else escape_character(character)
            if shown == character and glyphs and _joins(glyphs[-1], character):
                glyphs[-1] = glyphs[-1]._replace(text=glyphs[-1].text + character)
                continue
            if not cell_len(shown):
                shown = BASE + shown  # a combining mark without a base character
            mark = strategy if strategy and strategy != previous_strategy else ""
            glyphs.append(Glyph(shown, entropy, mark, starts, character == "\n"))
            starts = False
            previous_strategy = strategy
    return glyphs


def _joins(before: Glyph, character: str) -> bool:
    """Returns whether a character is part of the glyph before it: a combining mark, or an emoji
    after a joiner.
    """
    is_joined = before.text[-1] == ZERO_WIDTH_JOINER and unicodedata.category(character) == "So"
    return not before.breaks and (is_joined or not cell_len(character))


def _draw_lines(glyphs: Sequence[Glyph], width: int, colors: Colors) -> Iterator[str]:
    if colors == "none":
        for line in _wrap(glyphs, width, mark_cells=0):
            yield from _draw_marks_below(line)
    else:
        for line in _wrap(glyphs, width, mark_cells=1):  # a mark precedes its glyph in the line
            yield _shade_line(line, colors)


def _wrap(glyphs: Iterable[Glyph], width: int, mark_cells: int) -> Iterator[list[Glyph]]:
    """Yields lines of glyphs. A line that is too long is broken after its last space, if it has
    one.
    """
    line: list[Glyph] = []
    for glyph in glyphs:
        while (
            line
            and sum(part.cells + mark_cells * bool(part.mark) for part in [*line, glyph]) > width
        ):
            spaces = [i for i, earlier in enumerate(line, 1) if earlier.text == " "]
            # If the glyph is a space, the last word of the line is complete and stays.
            cut = spaces[-1] if spaces and glyph.text != " " else len(line)
            yield line[:cut]
            line = line[cut:]
        line.append(glyph)
        if glyph.breaks:
            yield line
            line = []
    if line:
        yield line


def _shade_line(line: Iterable[Glyph], colors: Colors) -> str:
    """Returns a line with escape sequences, reset at its end."""
    styled: list[tuple[str, str]] = []  # the parameters of an escape sequence, and text
    for glyph in line:
        if glyph.mark:
            styled.append(("1", MARKS.get(glyph.mark, "?")))  # bold
        styled.append(("" if glyph.entropy is None else _style(glyph.entropy, colors), glyph.text))
    shaded = ""
    # One escape sequence serves neighbors of the same style.
    for style, run in groupby(styled, key=lambda pair: pair[0]):
        text = "".join(text for _, text in run)
        shaded += f"\x1b[{style}m{text}\x1b[0m" if style else text
    return shaded


def _style(bits: float, colors: Colors) -> str:
    """Returns the parameters of the escape sequence: black or white letters on the shade."""
    white = bits < WHITE_BELOW[colors]
    if colors == "256":
        return f"38;5;{231 if white else 16};48;5;{shade_256(bits)}"
    return "38;2;{0};{0};{0};48;2;{1};{2};{3}".format(255 if white else 0, *shade_rgb(bits))


def _draw_marks_below(line: Sequence[Glyph]) -> Iterator[str]:
    """Yields the text, a line with a digit at the start of each token, and a line with a letter
    where a strategy starts.
    """
    yield "".join(glyph.text for glyph in line)
    digits = [
        f"{min(int(glyph.entropy + 0.5), 9)}" if glyph.starts and glyph.entropy is not None else ""
        for glyph in line
    ]
    letters = [glyph.mark[:1] if glyph.mark in ("", *MARKS) else "?" for glyph in line]
    for marks in (digits, letters):
        if below := "".join(
            mark.ljust(glyph.cells) for mark, glyph in zip(marks, line, strict=True)
        ).rstrip():
            yield below


def _legend(strategies: Sequence[str], width: int, colors: Colors) -> Iterator[str]:
    if colors == "none":
        letters = "; a letter below that marks the start of a strategy: " + ", ".join(
            f"{name[0]} {name}" for name in strategies
        )
        text = "the digit below a token is its entropy in bits, rounded (9: 9 or more)" + (
            letters if strategies else ""
        )
        yield from textwrap.wrap(text, width)
        return
    chips = [Glyph(f" {bits:g}{'+' if bits == RAMP_BITS else ''} ", bits) for bits in LEGEND_BITS]
    title = _to_glyphs([("entropy in bits ", None, None)])
    names = _to_glyphs([("".join(f"  {MARKS[name]} {name}" for name in strategies), None, None)])
    yield from _draw_lines([*title, *chips, *names], width, colors)


def _totals(tokens: Sequence[Mapping[str, Any]]) -> str:
    """Returns `64 tokens, mean entropy 1.84 ± 1.20 bits, perplexity 3.91, adaptive 62 %, greedy 38
    %, mean temperature 0.91`.

    The number after ± is the standard deviation over the tokens.
    """
    parts = [f"{len(tokens)} tokens"]
    if entropies := _values(tokens, "entropy"):
        parts.append(
            f"mean entropy {statistics.fmean(entropies):.2f} ± {statistics.pstdev(entropies):.2f}"
            " bits"
        )
    if tokens:
        is_finite = all(_finite(token["logprob"]) is not None for token in tokens)
        surprisal = -statistics.fmean(_values(tokens, "logprob")) if is_finite else math.inf
        # The largest float is about e^709.8.
        perplexity = math.exp(surprisal) if surprisal < 700 else math.inf
        parts.append(f"perplexity {perplexity:.2f}")
    shares = Counter(
        "".join(map(escape_character, token["strategy"])) for token in tokens if "strategy" in token
    )
    parts += [
        f"{name} {100 * count / len(tokens):.0f}\u00a0%" for name, count in shares.most_common()
    ]
    if forced := sum(token.get("forced", False) for token in tokens):
        parts.append(f"{forced} forced")
    if (mean := _mean(tokens, "temperature")) is not None:
        parts.append(f"mean temperature {mean:.2f}")
    return ", ".join(parts)


def _values(tokens: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """Returns the finite values of a column."""
    return [value for token in tokens if (value := _finite(token.get(name))) is not None]


def _mean(tokens: Iterable[Mapping[str, Any]], name: str) -> float | None:
    values = _values(tokens, name)
    return statistics.fmean(values) if values else None


def _finite(value: Any) -> float | None:
    """Returns a finite number, and None for any other value."""
    return value if value is not None and math.isfinite(value) else None
