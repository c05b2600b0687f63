"""Tests the trace file: strict JSON Lines that read back unchanged."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dantinox.report.trace_file import LISTS, trace_lines

TEXTS = st.text(max_size=8) | st.sampled_from(
    ["\n", "\r\n", "\x1b[2J", "\u2028", "\x85", "\ud800", '"', "\\", "e\u0301", "\x00"]
)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
OPTIONAL_NUMBERS = st.none() | NUMBERS
INTEGERS = st.integers(0, 2**32)
CANDIDATES = st.fixed_dictionaries(
    {"id": INTEGERS, "text": TEXTS, "logprob": NUMBERS, "score": OPTIONAL_NUMBERS}
)
ALTERNATIVES = st.fixed_dictionaries(
    {"id": INTEGERS, "text": TEXTS, "logprob": NUMBERS, "logprob_sampled": OPTIONAL_NUMBERS}
)
TOKENS = st.fixed_dictionaries(
    {
        "id": INTEGERS, "text": TEXTS, "entropy": NUMBERS, "varentropy": NUMBERS,
        "survivors": INTEGERS, "rank": INTEGERS, "logprob": NUMBERS,
        "logprob_sampled": OPTIONAL_NUMBERS, "alternatives": st.lists(ALTERNATIVES, max_size=2),
    },
    optional={
        "strategy": st.sampled_from(["greedy", "adaptive"]), "temperature": NUMBERS,
        "top_k": INTEGERS, "forced": st.booleans(), "attn_entropy": NUMBERS,
        "interaction_strength": NUMBERS, "candidates": st.lists(CANDIDATES, max_size=2),
    },
)  # fmt: skip
DOCUMENTS = st.fixed_dictionaries(
    {
        "prompt": TEXTS, "text": TEXTS, "seed": INTEGERS,
        "finish_reason": st.sampled_from(["eos", "stop", "length"]),
        "strategy": st.sampled_from(["chain", "entropy"]),
        "settings": st.dictionaries(TEXTS, NUMBERS | TEXTS, max_size=2),
        "router": st.none() | st.dictionaries(TEXTS, NUMBERS, max_size=2), "vocab_size": INTEGERS,
        "stats": st.fixed_dictionaries({"prompt_tokens": INTEGERS, "seconds": NUMBERS}),
        "tokens": st.lists(TOKENS, max_size=3),
    }
)  # fmt: skip


def token(**changes):
    plain = {
        "id": 7, "text": " di", "entropy": 0.5, "varentropy": 1.25, "strategy": "adaptive",
        "temperature": 0.7, "top_p": 0.9, "top_k": 27, "min_p": 0.03, "forced": False,
        "survivors": 4, "rank": 0, "logprob": -0.25, "logprob_sampled": None,
        "alternatives": [{"id": 7, "text": " di", "logprob": -0.25, "logprob_sampled": -0.125}],
    }  # fmt: skip
    return plain | changes


def document(tokens=(), **changes):
    plain = {
        "prompt": "Nel mezzo", "text": " di", "seed": 3, "finish_reason": "length",
        "strategy": "entropy", "settings": {"strategy": "entropy"}, "router": {"low_entropy": 0.1},
        "stats": {"prompt_tokens": 12, "new_tokens": 2}, "vocab_size": 64, "tokens": list(tokens),
    }  # fmt: skip
    return plain | changes


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("trace") / "out.jsonl"


def read_trace(file):
    """Reads the documents of a file and checks the position fields of its lines."""
    documents = []
    for line in file.read_bytes().decode().split("\n")[:-1]:
        record = json.loads(line, parse_constant=pytest.fail)
        if record.pop("kind") == "sample":
            assert record.pop("sample") == len(documents)
            documents.append(record | {"tokens": [], "counted": record["tokens"]})
            continue
        tokens = documents[-1]["tokens"]
        assert (record.pop("sample"), record.pop("step")) == (len(documents) - 1, len(tokens))
        assert record.pop("position") == documents[-1]["stats"]["prompt_tokens"] + len(tokens)
        lists = {
            kind: [dict(zip(names, one, strict=True)) for one in record[kind]]
            for kind, names in LISTS.items()
            if kind in record
        }
        tokens.append(record | lists)
    assert all(document.pop("counted") == len(document["tokens"]) for document in documents)
    return documents


def write(file, documents):
    file.write_bytes("".join(line + "\n" for line in trace_lines(documents)).encode("utf-8"))
    return file


@given(st.lists(DOCUMENTS, max_size=3))
def test_documents_read_back_unchanged(file, documents):
    assert read_trace(write(file, documents)) == documents


@given(st.lists(DOCUMENTS, max_size=2))
def test_lines_have_no_line_separator_and_no_control_character(documents):
    """A reader may split lines at Unicode separators, and a terminal may interpret control
    characters.
    """
    for line in trace_lines(documents):
        assert line.splitlines() == [line]
        assert not any(
            ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in line
        )


def test_each_line_has_its_position():
    lines = [
        json.loads(line)
        for line in trace_lines([document([token(), token()]), document([token(text="x")])])
    ]
    assert [line["kind"] for line in lines] == ["sample", "token", "token", "sample", "token"]
    assert [line["sample"] for line in lines] == [0, 0, 0, 1, 1]
    assert [line.get("step") for line in lines] == [None, 0, 1, None, 0]
    assert [line.get("position") for line in lines] == [None, 12, 13, None, 12]
    assert [line.get("tokens") for line in lines] == [2, None, None, 1, None]
    assert lines[1]["alternatives"] == [[7, " di", -0.25, -0.125]]
    flat = {name: value for name, value in lines[4].items() if name != "alternatives"}
    assert not any(isinstance(value, dict | list) for value in flat.values())


def test_infinite_numbers_are_null():
    written = document(
        [
            token(
                logprob=-math.inf,
                entropy=math.nan,
                alternatives=[token()["alternatives"][0] | {"logprob": -math.inf}],
            )
        ],
        router={"temperature_max": math.inf},
        settings={"logit_bias": {"3": -math.inf}, "stop": ["a", "b"]},
    )
    sample, row = (json.loads(line, parse_constant=pytest.fail) for line in trace_lines([written]))
    assert row["logprob"] is None and row["entropy"] is None and row["alternatives"][0][2] is None
    assert sample["router"] == {"temperature_max": None}
    assert sample["settings"] == {"logit_bias": {"3": None}, "stop": ["a", "b"]}


def test_unknown_fields_are_kept(file):
    documents = [document([token(speculated=True)], label="a")]
    assert read_trace(write(file, documents)) == documents


def test_text_stays_readable_in_the_file():
    assert "perché 漢字 👩‍👧" in next(trace_lines([document(text="perché 漢字 👩‍👧")]))


def test_a_trace_without_samples_is_an_empty_file(file):
    assert list(trace_lines([])) == []
    assert read_trace(write(file, [])) == []
