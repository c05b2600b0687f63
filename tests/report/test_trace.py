"""The trace file: strict JSON Lines that come back as they were; a damaged line is named."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dantinox.config import UserError
from dantinox.report.trace import read_trace, trace_lines

TEXTS = st.text(max_size=8) | st.sampled_from(
    ["\n", "\r\n", "\x1b[2J", "\u2028", "\x85", "\ud800", '"', "\\", "e\u0301", "\x00"]
)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
CHANCES = st.none() | NUMBERS
WHOLE = st.integers(0, 2**32)
ALTERNATIVES = st.fixed_dictionaries({"id": WHOLE, "text": TEXTS, "logprob": NUMBERS, "logprob_sampled": CHANCES})
TOKENS = st.fixed_dictionaries(
    {
        "id": WHOLE, "text": TEXTS, "entropy": NUMBERS, "varentropy": NUMBERS, "survivors": WHOLE, "rank": WHOLE,
        "logprob": NUMBERS, "logprob_sampled": CHANCES, "alternatives": st.lists(ALTERNATIVES, max_size=2),
    },
    optional={
        "strategy": st.sampled_from(["greedy", "adaptive"]), "temperature": NUMBERS, "top_k": WHOLE, "forced": st.booleans(),
        "attn_entropy": NUMBERS, "interaction_strength": NUMBERS,
    },
)  # fmt: skip
DOCUMENTS = st.fixed_dictionaries(
    {
        "prompt": TEXTS, "text": TEXTS, "seed": WHOLE, "finish_reason": st.sampled_from(["eos", "stop", "length"]),
        "strategy": st.sampled_from(["chain", "entropy"]), "settings": st.dictionaries(TEXTS, NUMBERS | TEXTS, max_size=2),
        "router": st.none() | st.dictionaries(TEXTS, NUMBERS, max_size=2), "vocab_size": WHOLE,
        "stats": st.fixed_dictionaries({"prompt_tokens": WHOLE, "seconds": NUMBERS}), "tokens": st.lists(TOKENS, max_size=3),
    }
)  # fmt: skip


def token(**changes):
    plain = {
        "id": 7, "text": " di", "entropy": 0.5, "varentropy": 1.25, "strategy": "adaptive", "temperature": 0.7, "top_p": 0.9,
        "top_k": 27, "min_p": 0.03, "forced": False, "survivors": 4, "rank": 0, "logprob": -0.25, "logprob_sampled": None,
        "alternatives": [{"id": 7, "text": " di", "logprob": -0.25, "logprob_sampled": -0.125}],
    }  # fmt: skip
    return plain | changes


def document(tokens=(), **changes):
    plain = {
        "prompt": "Nel mezzo", "text": " di", "seed": 3, "finish_reason": "length", "strategy": "entropy",
        "settings": {"strategy": "entropy"}, "router": {"low_entropy": 0.1}, "stats": {"prompt_tokens": 12, "new_tokens": 2},
        "vocab_size": 64, "tokens": list(tokens),
    }  # fmt: skip
    return plain | changes


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("trace") / "out.jsonl"


def write(file, documents):
    file.write_bytes("".join(line + "\n" for line in trace_lines(documents)).encode("utf-8"))
    return file


@given(st.lists(DOCUMENTS, max_size=3))
def test_what_is_written_comes_back(file, documents):
    assert read_trace(write(file, documents)) == documents


@given(st.lists(DOCUMENTS, max_size=2))
def test_no_reader_and_no_terminal_trips_over_a_line(documents):
    """One line whatever a reader takes for a line end, and nothing in it that a terminal would obey."""
    for line in trace_lines(documents):
        assert line.splitlines() == [line]
        assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in line)


def test_each_line_says_where_it_belongs():
    lines = [json.loads(line) for line in trace_lines([document([token(), token()]), document([token(text="x")])])]
    assert [line["kind"] for line in lines] == ["sample", "token", "token", "sample", "token"]
    assert [line["sample"] for line in lines] == [0, 0, 0, 1, 1]
    assert [line.get("step") for line in lines] == [None, 0, 1, None, 0]
    assert [line.get("position") for line in lines] == [None, 12, 13, None, 12]
    assert [line.get("tokens") for line in lines] == [2, None, None, 1, None]
    assert lines[1]["alternatives"] == [[7, " di", -0.25, -0.125]]
    flat = {name: value for name, value in lines[4].items() if name != "alternatives"}
    assert not any(isinstance(value, dict | list) for value in flat.values())


def test_keys_have_one_order_whatever_order_they_came_in():
    backwards = dict(reversed(token().items()))
    first, second = (list(json.loads(list(trace_lines([document([t])]))[1])) for t in (token(), backwards))
    assert first == second
    assert first[:6] == ["kind", "sample", "step", "position", "id", "text"]


def test_infinite_numbers_are_null():
    told = document(
        [token(logprob=-math.inf, entropy=math.nan, alternatives=[token()["alternatives"][0] | {"logprob": -math.inf}])],
        router={"temperature_max": math.inf},
        settings={"logit_bias": {"3": -math.inf}, "stop": ["a", "b"]},
    )
    sample, row = (json.loads(line, parse_constant=pytest.fail) for line in trace_lines([told]))
    assert row["logprob"] is None and row["entropy"] is None and row["alternatives"][0][2] is None
    assert sample["router"] == {"temperature_max": None}
    assert sample["settings"] == {"logit_bias": {"3": None}, "stop": ["a", "b"]}


def test_a_field_that_is_new_is_kept(file):
    documents = [document([token(speculated=True)], label="a")]
    assert read_trace(write(file, documents)) == documents


def test_text_stays_readable_in_the_file():
    assert "perché 漢字 👩‍👧" in next(trace_lines([document(text="perché 漢字 👩‍👧")]))


def test_no_sample_is_an_empty_file(file):
    assert list(trace_lines([])) == []
    assert read_trace(write(file, [])) == []


@pytest.mark.parametrize(
    ("place", "change", "told"),
    [
        (0, lambda line: line[:-9], "the line is not JSON (FILE, line 1)"),
        (2, lambda line: line[: len(line) // 2], "the line is not JSON (FILE, line 3)"),
        (1, lambda line: "", "the line is not JSON (FILE, line 2)"),
        (1, lambda line: "[1]", "the line is no JSON object (FILE, line 2)"),
        (1, lambda line: "[" * 100_000, "the line is not JSON (FILE, line 2)"),
        (1, lambda line: line.replace("0.5", "NaN"), "the line is not JSON (FILE, line 2)"),
        (1, lambda line: line.replace("0.5", "1e999"), "the line is not JSON (FILE, line 2)"),
        (1, lambda line: line.replace('"token"', '"tokens"'), 'kind must be "token" here, got "tokens" (FILE, line 2)'),
        (0, lambda line: line.replace('"kind"', '"sort"'), 'kind must be "sample" here, got null (FILE, line 1)'),
        (0, lambda line: line.replace('"tokens": 2', '"tokens": 1'), 'kind must be "sample" here, got "token" (FILE, line 3)'),
        (0, lambda line: line.replace('"tokens": 2', '"tokens": 3'), "its last sample lacks tokens (FILE, line 3)"),
        (0, lambda line: line.replace('"tokens": 2', '"tokens": -2'), "tokens must be at least 0, got -2 (FILE, line 1)"),
        (0, lambda line: line.replace('"sample": 0', '"sample": 1'), "sample must be 0 here, got 1 (FILE, line 1)"),
        (2, lambda line: line.replace('"step": 1', '"step": 2'), "step must be 1 here, got 2 (FILE, line 3)"),
        (0, lambda line: line.replace('"seed"', '"sead"'), "seed is missing (FILE, line 1)"),
        (1, lambda line: line.replace('"rank"', '"range"'), "rank is missing (FILE, line 2)"),
        (1, lambda line: line.replace("0.5", '"half"'), 'entropy has a value of the wrong type, "half" (FILE, line 2)'),
        (1, lambda line: line.replace('"id": 7', '"id": true'), "id has a value of the wrong type, true (FILE, line 2)"),
        (1, lambda line: line.replace("-0.125]", "null]"), None),
        (1, lambda line: line.replace(", -0.125]", "]"), "alternatives must hold lists of id, text, logprob, logprob_sampled"),
        (1, lambda line: line.replace('[7, " di"', '[7, 8'), "text has a value of the wrong type, 8 (FILE, line 2)"),
    ],
)  # fmt: skip
def test_a_damaged_line_is_named(file, place, change, told):
    lines = list(trace_lines([document([token(), token()])]))
    damaged = change(lines[place])
    assert damaged != lines[place]
    file.write_text("\n".join([*lines[:place], damaged, *lines[place + 1 :]]), encoding="utf-8")
    if told is None:
        read_trace(file)
        return
    with pytest.raises(UserError) as error:
        read_trace(file)
    assert str(error.value).startswith("the trace is damaged: " + told.replace("FILE", str(file)))


def test_other_files_are_refused_with_a_sentence(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"the line is not JSON \(.*binary, line 1\)"):
        read_trace(tmp_path / "binary")
    for name in ("missing", ""):
        with pytest.raises(UserError, match=r"cannot read the trace .*: (No such file|Is a directory)"):
            read_trace(tmp_path / name)
