"""Tests shaded text at the terminal: parses its colors, recovers the text, and checks that no text
controls the terminal.
"""

import io
import math
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from dantinox.report.entropy_view import (
    escape_character,
    shade_256,
    shade_rgb,
    show_entropy,
    terminal_colors,
)

SGR = re.compile(r"\x1b\[([0-9;]*)m")
SUPERSCRIPTS = "ᵍᶜᵉʳᵃ"
# All characters that a model may generate, except the signs that the view adds.
LETTERS = st.characters(exclude_characters=SUPERSCRIPTS + "↵⇥◌")
TYPICAL = st.sampled_from(
    [*"abc d\n", " ", "漢", "è", "e\u0301", "👩\u200d👩\u200d👧", "☺\ufe0f", "🇮🇹", "กำ", "\t"]
)
WORDS = st.text(LETTERS, max_size=6) | TYPICAL
STRATEGIES = ["greedy", "clarify", "explore", "resample", "adaptive"]


def token(text, entropy=1.0, strategy=None, **others):
    plain = {
        "id": 0,
        "text": text,
        "entropy": entropy,
        "varentropy": 0.5,
        "survivors": 3,
        "rank": 0,
        "logprob": -1.0,
    }
    routed = {} if strategy is None else {"strategy": strategy, "temperature": 0.5, "forced": False}
    return plain | routed | {"logprob_sampled": -0.5, "alternatives": []} | others


def document(tokens, prompt="", seed=3):
    return {
        "prompt": prompt, "text": "".join(t["text"] for t in tokens), "seed": seed,
        "finish_reason": "length", "strategy": "chain", "settings": {}, "router": None,
        "stats": {"prompt_tokens": 1}, "vocab_size": 64, "tokens": tokens,
    }  # fmt: skip


def body(tokens, prompt="", width=80, colors="truecolor"):
    """Returns the lines of the text, without the legend before the first empty line and the totals
    after the last one.
    """
    lines = list(show_entropy([document(tokens, prompt)], width, colors))
    first = lines.index("")
    last = len(lines) - 1 - lines[::-1].index("")
    return lines[first + 1 : last]


def parse_styles(line):
    """Returns (character, parameters of the active escape sequence) of every visible character."""
    found, style, end = [], "", 0
    for sequence in SGR.finditer(line):
        found += [(c, style) for c in line[end : sequence.start()]]
        style, end = sequence[1].removeprefix("0"), sequence.end()
    assert style == "", "a line must reset the colors"
    return found + [(c, style) for c in line[end:]]


def strip_styles(lines):
    return [SGR.sub("", line) for line in lines]


def luminance(rgb):
    """Returns the relative luminance of WCAG 2."""
    linear = [
        c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
        for c in (value / 255 for value in rgb)
    ]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def xterm(index):
    """Returns the color of a number from 16 to 231, a cube of 6 × 6 × 6."""
    steps = (0, 95, 135, 175, 215, 255)
    return tuple(steps[(index - 16) // size % 6] for size in (36, 6, 1))


def front_and_back(style, colors):
    numbers = [int(n) for n in style.split(";")]
    if colors == "256":
        assert numbers[:2] == [38, 5] and numbers[3:5] == [48, 5]
        return xterm(numbers[2]), xterm(numbers[5])
    assert numbers[:2] == [38, 2] and numbers[5:7] == [48, 2]
    return tuple(numbers[2:5]), tuple(numbers[7:10])


ENTROPIES = [0.0, 0.01, 0.1, 0.4, 0.7, 1.1, 1.7, 2.4, 3.3, 4.1, 5.5, 7.0, 8.0, 15.0]


@pytest.mark.parametrize("colors", ["truecolor", "256"])
def test_higher_entropy_is_lighter_and_letters_have_enough_contrast(colors):
    (line,) = body([token("x", entropy) for entropy in ENTROPIES], colors=colors)
    pairs = [front_and_back(style, colors) for _, style in parse_styles(line)]
    lights = [luminance(back) for _, back in pairs]
    assert lights == sorted(lights) and lights[0] < 0.05 and lights[-1] > 0.75
    assert len({back for _, back in pairs}) >= (9 if colors == "256" else 13)
    for front, back in pairs:
        dark, light = sorted((luminance(front), luminance(back)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_shades_follow_viridis_by_the_square_root_of_the_entropy():
    assert shade_rgb(0) == (68, 1, 84) and shade_rgb(8) == shade_rgb(math.inf) == (253, 231, 37)
    assert shade_rgb(2) == (33, 145, 140)  # the middle
    assert shade_rgb(-1e-7) == shade_rgb(0)  # a rounding error may be negative
    assert (shade_256(0), shade_256(100)) == (53, 226)


def test_every_character_has_the_shade_of_its_token_and_the_prompt_has_none():
    (line,) = body([token("ab", 0.5), token(" c", 6.0)], prompt="Nel ")
    styles = [style for _, style in parse_styles(line)]
    assert styles[:4] == [""] * 4
    backs = [front_and_back(style, "truecolor")[1] for style in styles[4:]]
    assert backs == [shade_rgb(0.5)] * 2 + [shade_rgb(6.0)] * 2


def test_tokens_that_form_one_character_show_the_highest_entropy():
    for before in ([1.0, 4.0], [4.0, 1.0], [1.0, 4.0, 2.0]):
        parts = [
            token("", entropy, "explore" if entropy == 4 else "adaptive") for entropy in before
        ]
        (line,) = body([*parts, token("漢", 0.1, "greedy"), token("", 8.0)])
        mark, character = parse_styles(line)
        assert mark == ("ᵉ", "1")
        assert front_and_back(character[1], "truecolor")[1] == shade_rgb(4.0)


def test_a_combining_mark_stays_with_its_letter():
    (line,) = body([token("e", 0.0), token("\u0301x", 8.0)])
    assert [c for c, _ in parse_styles(line)] == ["e", "\u0301", "x"]
    assert front_and_back(parse_styles(line)[1][1], "truecolor")[1] == shade_rgb(0.0)
    assert strip_styles(body([token("\u0301")])) == ["◌\u0301"]
    assert strip_styles(body([token("a\n\u0301")])) == ["a↵", "◌\u0301"]


def test_a_strategy_is_marked_where_it_starts():
    tokens = [token(f" {name}", 1.0, name) for name in STRATEGIES for _ in range(2)]
    shown = "".join(strip_styles(body(tokens, width=200)))
    assert shown == "".join(
        f"{mark} {name} {name}" for mark, name in zip(SUPERSCRIPTS, STRATEGIES, strict=True)
    )
    legend = next(show_entropy([document(tokens[:4])], 200, "truecolor"))
    assert "ᵍ greedy  ᶜ clarify" in SGR.sub("", legend) and "explore" not in legend


def test_tokens_that_were_not_drawn_have_a_mark_of_their_own():
    tokens = [
        token("a", 1.0, "greedy"),
        *(token(part, 4.0, "clarify", forced=True) for part in "bc"),
        token("d", 1.0, "greedy"),
    ]
    assert strip_styles(body(tokens)) == ["ᵍaᶠbcᵍd"]
    legend = next(show_entropy([document(tokens)], 200, "truecolor"))
    assert "ᵍ greedy  ᶠ forced" in SGR.sub("", legend) and "clarify" not in legend
    shown = [*show_entropy([document(tokens)], 80, "none")]
    assert "g greedy, f forced" in " ".join(shown) and "gf g" in shown


def test_a_text_without_the_router_has_no_strategies():
    lines = list(show_entropy([document([token("a"), token("b")])], 80, "truecolor"))
    assert not set(SUPERSCRIPTS) & set("".join(lines))
    assert lines[-1] == "2 tokens, mean entropy 1.00 ± 0.00 bits, perplexity 2.72"


@given(
    st.lists(st.tuples(WORDS, st.floats(0, 12), st.sampled_from(STRATEGIES)), max_size=8),
    WORDS,
    st.integers(20, 60),
)
def test_the_text_is_recovered(pieces, prompt, width):
    tokens = [token(*piece) for piece in pieces]
    text = prompt + "".join(t["text"] for t in tokens)
    safe = "".join("\n" if c == "\n" else escape_character(c) for c in text)
    for colors in ("truecolor", "256"):
        lines = strip_styles(body(tokens, prompt, width, colors))
        shown = re.sub(f"[{SUPERSCRIPTS}◌]", "", "".join(lines)).replace("↵", "\n")
        assert shown == safe
        assert all(line.endswith("↵") for line in lines if "↵" in line)
        assert all(cell_len(line) <= width and sum(map(cell_len, line)) <= width for line in lines)


@given(
    st.lists(st.tuples(WORDS, st.floats(0, 12)), max_size=8),
    WORDS,
    st.sampled_from(["truecolor", "256", "none"]),
)
def test_no_text_controls_the_terminal(pieces, prompt, colors):
    for line in body([token(*piece) for piece in pieces], prompt, 40, colors):
        kinds = {unicodedata.category(c) for c in SGR.sub("", line) if c not in "\u200c\u200d"}
        assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_control_characters_are_replaced_by_visible_ones():
    hostile_text = "\x1b[2J\x07\r\x7f\x9b\u202e\u2028\ud800\x00"
    assert strip_styles(body([token(hostile_text)])) == ["␛[2J␇␍␡<U+009B><U+202E><U+2028><U+D800>␀"]
    assert strip_styles(body([], prompt=hostile_text)) == strip_styles(body([token(hostile_text)]))
    hostile = document([token("a", 1.0, "\x1b]0;x\x07")])
    assert "\x1b]" not in "".join(show_entropy([hostile], 80, "truecolor"))
    assert "\x1b" not in "".join(show_entropy([hostile], 80, "none"))


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three four five six", ["one two three four ", "five six"]),
        ("x" * 45, ["x" * 20, "x" * 20, "x" * 5]),
        ("x" * 20 + " y", ["x" * 20, " y"]),
        ("aa " + "x" * 17 + " y", ["aa " + "x" * 17, " y"]),
        ("漢" * 11, ["漢" * 10, "漢"]),
        ("e\u0301" * 21, ["e\u0301" * 20, "e\u0301"]),
        ("x" * 20 + "\n\ny", ["x" * 20, "↵", "↵", "y"]),
        ("a\n", ["a↵"]),
        ("a\tb", ["a⇥   b"]),
    ],
)
def test_lines_are_broken_after_spaces_and_within_the_width(text, lines):
    assert strip_styles(body([token(text)], width=20)) == lines


def test_a_mark_has_its_own_cell():
    first, second = strip_styles(
        body([token("x" * 19, 1.0, "greedy"), token("y", 1.0, "explore")], width=20)
    )
    assert (first, second) == ("ᵍ" + "x" * 19, "ᵉy")


def test_without_colors_digits_and_letters_are_below_the_text():
    tokens = [
        token(" di", 0.2, "greedy"), token(" nos", 1.6, "greedy"), token("tra", 2.5, "adaptive"),
        token("漢", 14.0, "adaptive"), token("\n", 0.0, "greedy"), token("vita", None, "greedy"),
    ]  # fmt: skip
    assert body(tokens, prompt="cammin", colors="none") == [
        "cammin di nostra漢↵",
        "      0  2   3  9 0",
        "      g      a    g",
        "vita",
    ]
    legend = " ".join(list(show_entropy([document(tokens)], 60, "none"))[:3])
    assert "entropy in bits" in legend and "g greedy, a adaptive" in legend


@given(st.lists(st.tuples(WORDS, st.floats(0, 12)), max_size=8), st.integers(20, 60))
def test_without_colors_there_is_no_escape_sequence(pieces, width):
    lines = list(show_entropy([document([token(*piece) for piece in pieces])], width, "none"))
    assert "\x1b" not in "".join(lines)
    assert all(cell_len(line) <= width for line in lines)


def test_totals_summarize_the_tokens():
    tokens = [
        token("a", 1.0, "greedy", logprob=math.log(0.5), temperature=0.0),
        token("b", 3.0, "adaptive", logprob=math.log(0.125), temperature=1.5),
        token("c", 2.0, "adaptive", logprob=math.log(0.25), temperature=1.5),
        token("d", 2.0, "clarify", logprob=math.log(0.25), temperature=1.0, forced=True),
    ]
    expected = (
        "4 tokens, mean entropy 2.00 ± 0.71 bits, perplexity 4.00, adaptive 50\u00a0%, greedy"
        " 25\u00a0%, clarify 25\u00a0%, 1 forced, "
    )
    assert (
        list(show_entropy([document(tokens)], 200, "none"))[-1]
        == expected + "mean temperature 1.00"
    )


def test_missing_and_infinite_numbers_are_handled():
    tokens = [token("a", None, logprob=None), token("b", math.nan, logprob=-math.inf)]
    for colors in ("truecolor", "256", "none"):
        lines = list(show_entropy([document(tokens)], 80, colors))
        assert lines[-1] == "2 tokens, perplexity inf" and "ab" in lines
    assert list(show_entropy([document([])], 80, "truecolor"))[-1] == "0 tokens"


def test_several_samples_have_headings():
    lines = list(
        show_entropy([document([token("a")], seed=5), document([token("b")], seed=6)], 80, "none")
    )
    assert "sample 1 of 2, seed 5" in lines and "sample 2 of 2, seed 6" in lines
    assert sum("entropy in bits" in line for line in lines) == 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "colors"),
    [
        (Terminal, {"TERM": "xterm-256color", "COLORTERM": "truecolor"}, "truecolor"),
        (Terminal, {"TERM": "xterm-256color"}, "256"),
        (Terminal, {"TERM": "xterm"}, "none"),
        (Terminal, {"TERM": "dumb", "COLORTERM": "truecolor"}, "none"),
        (Terminal, {"TERM": "xterm-256color", "COLORTERM": "truecolor", "NO_COLOR": "1"}, "none"),
        (io.StringIO, {"TERM": "xterm-256color", "COLORTERM": "truecolor"}, "none"),
        (io.StringIO, {"TERM": "xterm-256color", "FORCE_COLOR": "1"}, "256"),
    ],
)
def test_colors_are_used_if_the_terminal_supports_them(stream, environment, colors, monkeypatch):
    for name in ("TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert terminal_colors(stream()) == colors
