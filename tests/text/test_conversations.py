"""Encodes records of conversations to tokens, marks and batches."""

import json

import numpy as np
import pytest

from dantinox.config import TokenizerSection, UserError, build_config
from dantinox.text import ChatTemplate, open_store, prepare_data, train_tokenizer
from tests.error_texts import ERRORS

BYTES = train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(()))
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
TEMPLATE += "{{ 'a' if add_generation_prompt }}"
EOS = BYTES.eos_id


def said(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.fixture
def prepared(tmp_path):
    """Returns a function that writes records and returns their store with its inputs."""
    (tmp_path / "t.jinja").write_text(TEMPLATE)

    def prepare(records, *, objective="sft", name="a.jsonl", directory="store", **changes):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        base = {
            "data.path": str(tmp_path / name), "data.chat_template": str(tmp_path / "t.jinja"), "model.max_context": 12,
            "tokenizer.tokenizer_type": "byte", "training.batch_size": 2, "training.objective": objective,
        }  # fmt: skip
        if objective not in ("sft", "orpo"):
            base["training.init_from"] = "x"
        config = build_config({}, base | changes)
        return prepare_data(config, tmp_path / directory)[1], config, tmp_path / directory

    return prepare


def ids(text):
    return [EOS if letter == "$" else ord(letter) for letter in text]


def text_of(tokens):
    return "".join("$" if i == EOS else "_" if i == BYTES.pad_id else chr(i) for i in tokens)


def test_rows_hold_whole_conversations_and_mask_answers(prepared):
    """Maps each rendered conversation to the marks of its tokens."""
    records = [
        {"messages": said("hi", "yo")},
        {"messages": said("q", "r", "s", "t")},
        {"prompt": "p", "completion": "ok"},
        {"prompt": said("a", "b", "c"), "completion": [{"role": "assistant", "content": "d"}]},
        {"messages": said("far too long for a row", "no")},
        {"messages": said("val", "x")},
    ]
    store, config, directory = prepared(records, **{"data.val_fraction": 0.15})
    assert text_of(store.training_ids) == "uhiayo$uqar$usat$upaok$uaab$ucad$ufar too long for a rowano$"
    assert text_of(store.validation_ids) == "uvalax$"
    assert (store.left_out, store.conversations, store.windows_per_epoch) == (1, 6, 3)
    batch = store.batch(0)
    rows = {}
    for step in range(3):
        for tokens, targets, segments, mask in zip(*store.batch(step), strict=True):
            rows[text_of([*tokens, targets[-1]])] = (text_of(targets[mask == 1]), segments.tolist())
    assert rows == {
        "uqar$usat$___": ("r$t$", [0] * 10 + [-1] * 2),
        "uaab$ucad$___": ("d$", [0] * 10 + [-1] * 2),  # if the prompt contains answers, only the completion is in the mask
        "uhiayo$upaok$": ("yo$ok$", [0] * 7 + [1] * 5),
    }
    assert batch.mask_BT.dtype == np.float32 and batch.tokens_BT.dtype == batch.segments_BT.dtype == np.int32
    again = open_store(config, directory, BYTES)
    for one, other in zip(store.batch(7), again.batch(7), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(store.batch(1, np.array([1])), store.batch(1), strict=True):
        np.testing.assert_array_equal(one[0], other[1])


def test_validation_yields_every_conversation_once(prepared):
    store, _, _ = prepared([{"messages": said(letter * 3, letter)} for letter in "abcdefg"], **{"data.val_fraction": 0.7})
    batches = list(store.validation(2))
    assert [batch.tokens_BT.shape for batch in batches] == [(2, 12)] * 3
    counted = "".join(text_of(batch.targets_BT[batch.mask_BT == 1]) for batch in batches)
    assert sorted(counted.split("$")) == ["", *"cdefg"]
    assert len(list(store.validation(2, tokens=2))) == 1
    assert store.validation_rows == len(list(store.validation(1)))


def test_a_separate_validation_file_and_a_mixture(prepared, tmp_path):
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": said("v", "w")}) + "\n")
    store, _, _ = prepared([{"messages": said("a", "b")}], **{"data.val_path": str(tmp_path / "b.jsonl")})
    assert (text_of(store.training_ids), text_of(store.validation_ids)) == ("uaab$", "uvaw$")
    paths = [str(tmp_path / "a.jsonl"), str(tmp_path / "c.jsonl")]
    mixed = {"data.path": paths, "data.mixture": [3, 1], "training.batch_size": 1000}
    mixed["data.val_path"] = str(tmp_path / "b.jsonl")
    store, _, _ = prepared([{"messages": said("c", "d")}], name="c.jsonl", directory="mixed", **mixed)
    assert np.count_nonzero(store.batch(0).tokens_BT[:, 1] == ord("a")) == 750


def test_pairs_and_their_references(prepared):
    records = [{"prompt": p, "chosen": "yes", "rejected": [{"role": "assistant", "content": "no"}]} for p in "abcde"]
    records.insert(1, {"prompt": "z", "chosen": "far too long to fit", "rejected": "n"})
    store, config, directory = prepared(records, objective="dpo", **{"data.val_fraction": 0.3})
    assert (store.left_out, store.conversations, store.windows_per_epoch) == (1, 6, 3)
    seen = {}
    for numbers, batch in store.all_pairs(2):
        for number, tokens, mask in zip(numbers, batch.targets_P2T, batch.mask_P2T, strict=False):
            seen[int(number)] = [text_of(t[m == 1]) for t, m in zip(tokens, mask, strict=True)]
    assert seen == {number: ["yes$", "no$"] for number in (0, 2, 3, 4, 5)}
    assert store.validation_rows == len(list(store.all_pairs(1))) == 5
    store.reference = np.arange(12, dtype=np.float32).reshape(6, 2)
    batch = store.batch(0)
    assert batch.tokens_P2T.shape == (2, 2, 12)
    assert (batch.segments_P2T == np.where(batch.tokens_P2T == 256, -1, 0)).all()
    for tokens, reference in zip(batch.tokens_P2T, batch.reference_P2, strict=True):
        number = [0, 2, 3, 4, 5]["abcde".index(chr(tokens[0, 1]))]
        assert reference.tolist() == [2 * number, 2 * number + 1]
    assert [text_of(tokens)[2:] for tokens in batch.tokens_P2T[0]] == ["ayes$_____", "ano$______"]


def test_labeled_completions_have_a_mismatched_completion(prepared):
    """The second conversation of an example has the completion of the next record with another prompt, cut to the row."""
    records = [
        ("p", "one", True),
        ("p", "two", False),
        ("q", "a very long answer", False),
        ("r", "four", True),
        ("s", "5", False),
    ]
    records = [{"prompt": prompt, "completion": completion, "label": label} for prompt, completion, label in records]
    store, config, directory = prepared(records, objective="kto", **{"data.val_fraction": 0.4})
    assert (store.left_out, store.conversations, store.windows_per_epoch) == (1, 5, 2)
    seen = {}
    for numbers, batch in store.all_pairs(2):
        for number, tokens, mask, desirable in zip(numbers, batch.targets_P2T, batch.mask_P2T, batch.desirable_P, strict=False):
            seen[int(number)] = [text_of(t[m == 1]) for t, m in zip(tokens, mask, strict=True)] + [bool(desirable)]
    assert seen == {
        0: ["one$", "a very lon", True],
        1: ["two$", "a very lon", False],
        3: ["four$", "5$", True],
        4: ["5$", "four$", False],
    }
    batch = store.batch(0)
    assert (
        batch.tokens_P2T.shape == (2, 2, 12)
        and (batch.segments_P2T == np.where(batch.tokens_P2T == 256, -1, 0)).all()
        and not batch.kl_P.any()
    )
    assert {text_of(tokens[:3]) for tokens in batch.tokens_P2T.reshape(4, 12)} == {"upa"}
    validation = next(store.validation(3))
    assert validation.desirable_P.tolist() == [True, False, False] and not validation.mask_P2T[2].any()
    again = open_store(config, directory, BYTES)
    for one, other in zip(store.batch(3), again.batch(3), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("label", "sentence"),
    [
        (1, "the field 'label' must be true or false, got 1 (FILE, line 2)"),
        ("true", "the field 'label' must be true or false, got 'true' (FILE, line 2)"),
        (None, "the field 'label' must be true or false, got null (FILE, line 2)"),
        (True, "the field 'label' is true in all training records: kto needs both true and false"),
    ],
)
def test_an_invalid_label_is_refused(prepared, tmp_path, label, sentence):
    records = [{"prompt": str(i), "completion": "b", "label": label if i == 1 else True} for i in range(4)]
    with pytest.raises(UserError) as caught:
        prepared(records, objective="kto")
    assert str(caught.value) == sentence.replace("FILE", str(tmp_path / "a.jsonl"))


def test_records_that_cannot_be_paired_are_refused(prepared, tmp_path):
    records = [{"prompt": "p", "completion": "b", "label": bool(i)} for i in range(3)]
    with pytest.raises(UserError, match=ERRORS["have_the_same_prompt"]):
        prepared(records, objective="kto")
    with pytest.raises(UserError, match=ERRORS["lacks_the_field_label"]):
        prepared([{"prompt": "p", "completion": "b"}] * 2, objective="kto")
    with pytest.raises(UserError, match=ERRORS["lacks_the_field_prompt"]):
        prepared([{"messages": said("a", "b")}] * 2, objective="kto")
    records[1] = {"prompt": "q", "completion": [{"role": "bot", "content": "x"}], "label": True}
    with pytest.raises(UserError, match=r"^the role of message 1 must be .*a\.jsonl, line 2\)$"):  # not that of line 1
        prepared(records, objective="kto")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"text": "a"}', "a record must have the field messages, or the fields prompt and completion; it has 'text' "),
        ('{"messages": "a"}', "the field 'messages' must be a list of messages, got 'a' "),
        ('{"messages": []}', "the field 'messages' must be a list of messages, got [] "),
        ('{"messages": [{"role": "bot", "content": ""}]}', "the role of message 0 must be one of system, developer, user, "),
        ('{"messages": [{"role": "user", "content": "a"}]}', "a conversation has no assistant message to train on "),
        ('{"prompt": 1, "completion": "b"}', "the field 'prompt' must be a string or a list of messages, got 1 "),
        ('{"prompt": "a"}', "a record lacks the field 'completion'; it has 'prompt' "),
        ('["a"]', "a record must be a JSON object, got ['a'] "),
        ("{", "not JSON: "),
    ],
)
def test_an_invalid_record_is_reported_with_its_line(prepared, tmp_path, line, sentence):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' + line + "\n")
    with pytest.raises(UserError) as caught:
        prepared([], **{"data.path": str(tmp_path / "bad.jsonl")})
    assert str(caught.value).startswith(sentence) and str(caught.value).endswith(f"({tmp_path / 'bad.jsonl'}, line 2)")
    assert not list((tmp_path / "store").glob("*tokens*"))


def test_other_invalid_settings_are_refused(prepared, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    good = [{"prompt": "a", "completion": "b"}] * 2
    with pytest.raises(UserError, match=ERRORS["a_txt_is_plain_text"]):
        prepared(good, **{"data.path": str(tmp_path / "a.txt")})
    with pytest.raises(UserError, match=ERRORS["has_too_few_conversations_1"]):
        prepared(good[:1])
    with pytest.raises(UserError, match=ERRORS["all_conversations_are_longer_than"]):
        prepared(good, **{"model.max_context": 2})
    with pytest.raises(UserError, match=ERRORS["training_objective_sft_does_not"]):
        prepared(good, **{"tokenizer.tokenizer_type": "bpe"})
    with pytest.raises(UserError, match=ERRORS["a_record_lacks_the_field"]):
        prepared(good, objective="dpo")
    with pytest.raises(UserError, match=ERRORS["dpo_needs_training_init_from_the"]):
        prepared(good, objective="dpo", **{"training.init_from": None})


def test_another_template_or_objective_rebuilds_the_store(prepared):
    records = [{"messages": said("a", "b")}] * 2
    name = (prepared(records)[2] / "tokens.json").read_text()
    _, config, directory = prepared(records, **{"data.chat_template": "plain", "model.max_context": 40})
    header = json.loads((directory / "tokens.json").read_text())
    assert header != json.loads(name)
    assert sorted(p.name for p in directory.glob("tokens-*")) == [header["file"], header["marks"]]
    (directory / header["marks"]).write_bytes(b"")
    assert open_store(config, directory, BYTES) is None


def test_instructions_have_the_expected_form():
    from dantinox.text.builtin_instructions import functions, matches_answer_form

    source = 'def f(a, b=1):\n    """Do it.\n\n    More."""\ndef _g(a):\n    """No."""\n'
    source += 'def h():\n    """None."""\ndef i(x): pass\n'
    (function,) = functions("m.n", source)
    question, answer = function.messages()
    assert question == {"role": "user", "content": "Summarise: m.n.f(a, b)"}
    assert answer == {"role": "assistant", "content": "Takes: two arguments\nDoes: Do it."}
    assert matches_answer_form(answer["content"] + "\n")
    assert not matches_answer_form("Takes: two arguments\nDoes: it") and not matches_answer_form("def f(a):")
    assert (
        ChatTemplate.from_name("plain", BYTES).encode_with_loss_mask(function.messages())[1].sum() == len(answer["content"]) + 1
    )
