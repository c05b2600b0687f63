"""Stop strings are found however the text is split into parts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dantinox.generation.guides.stop_strings import StopFinder

LETTERS = "ab\né"
texts = st.text(LETTERS, max_size=20)
stops = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3)


@st.composite
def parts(draw):
    """Draws a text split into parts, some of them empty."""
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def expected(text: str, stops: list[str], keep: bool) -> tuple[str, str | None]:
    """Returns the text up to the stop string that is complete first, and that string (the longest
    if several are).
    """
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if keep else end - len(longest)], longest
    return text, None


@settings(max_examples=150, deadline=None)
@given(parts(), stops, st.booleans())
def test_any_split_of_a_text_gives_the_same_result(pieces, stops, keep):
    finder, out = StopFinder(stops, keep), ""
    for n, piece in enumerate(pieces, 1):
        out += finder.push(piece)
        if finder.matched_stop is None:
            held = "".join(pieces[:n])[len(out) :]
            assert "".join(pieces[:n]) == out + held, "nothing is lost or changed"
            assert not held or any(stop.startswith(held) for stop in stops), (
                "text is held back only if necessary"
            )
    out += finder.flush()
    assert (out, finder.matched_stop) == expected("".join(pieces), stops, keep)
    assert finder.push("more") == "" or finder.matched_stop is None
    assert finder.flush() == "" or finder.matched_stop is None


@settings(max_examples=100, deadline=None)
@given(parts(), parts(), stops)
def test_an_inactive_finder_passes_everything(early, late, stops):
    """A stop string that is complete before `min_tokens` is ordinary text; one that is complete
    later ends it.
    """
    finder = StopFinder(stops)
    out = "".join(finder.push(piece, active=False) for piece in early)
    assert finder.matched_stop is None
    out += "".join(finder.push(piece) for piece in late)
    out += finder.flush()
    whole = "".join(early) + "".join(late)
    assert whole.startswith(out)
    if finder.matched_stop is None:
        assert out == whole
    else:
        assert whole[len(out) :].startswith(finder.matched_stop)
        assert len(out) + len(finder.matched_stop) > len("".join(early)), (
            "it was complete before the finder was active"
        )


def test_the_edges_by_hand():
    finder = StopFinder(["\n\n", "END"])
    assert [finder.push(piece) for piece in ("x\n", "y", "\n", "E", "N", "d", "E", "ND z")] == [
        "x", "\ny", "", "\n", "", "ENd", "", "",
    ]  # fmt: skip
    assert finder.matched_stop == "END"
    assert StopFinder(["aab"]).push("aaab") == "a"
    assert StopFinder(["ab", "b"]).push("xab") == "x", "the longest of those that end together"
    assert StopFinder(["abcd", "bc"]).push("xabcd") == "xa", "the one that is complete first"
    assert StopFinder([]).push("anything") == "anything"
