"""Encodes records of conversations to tokens, marks and batches."""

import json

import numpy as np
import pytest

from dantinox.config import TokenizerSection, UserError, build_config
from dantinox.text import ChatTemplate, open_store, prepare_data, train_tokenizer
from dantinox.text.chat_template import MaskedConversation
from dantinox.text.tool_prompts import chat_prompt, encode_prompts
from tests.error_texts import ERRORS

BYTES = train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(()))
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ eos_token if m.role == 'assistant'"
    " }}{% endfor %}"
)
TEMPLATE += "{{ 'a' if add_generation_prompt }}"
EOS = BYTES.eos_id


def said(*contents):
    return [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]


@pytest.fixture
def prepared(tmp_path):
    """Returns a function that writes records and returns their store with its inputs."""
    (tmp_path / "t.jinja").write_text(TEMPLATE)

    def prepare(records, *, objective="sft", name="a.jsonl", directory="store", **changes):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        base = {
            "data.path": str(tmp_path / name), "data.chat_template": str(tmp_path / "t.jinja"),
            "model.max_context": 12, "tokenizer.tokenizer_type": "byte", "training.batch_size": 2,
            "training.objective": objective,
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
    assert (
        text_of(store.training_ids)
        == "uhiayo$uqar$usat$upaok$uaab$ucad$ufar too long for a rowano$"
    )
    assert text_of(store.validation_ids) == "uvalax$"
    assert (store.left_out, store.conversations, store.windows_per_epoch) == (1, 6, 3)
    batch = store.batch(0)
    rows = {}
    for step in range(3):
        for tokens, targets, segments, mask in zip(*store.batch(step), strict=True):
            rows[text_of([*tokens, targets[-1]])] = (text_of(targets[mask == 1]), segments.tolist())
    assert rows == {
        "uqar$usat$___": ("r$t$", [0] * 10 + [-1] * 2),
        "uaab$ucad$___": (
            "d$",
            [0] * 10 + [-1] * 2,
        ),  # if the prompt contains answers, only the completion is in the mask
        "uhiayo$upaok$": ("yo$ok$", [0] * 7 + [1] * 5),
    }
    assert (
        batch.mask_BT.dtype == np.float32
        and batch.tokens_BT.dtype == batch.segments_BT.dtype == np.int32
    )
    again = open_store(config, directory, BYTES)
    for one, other in zip(store.batch(7), again.batch(7), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(store.batch(1, np.array([1])), store.batch(1), strict=True):
        np.testing.assert_array_equal(one[0], other[1])


def test_validation_yields_every_conversation_once(prepared):
    store, _, _ = prepared(
        [{"messages": said(letter * 3, letter)} for letter in "abcdefg"],
        **{"data.val_fraction": 0.7},
    )
    batches = list(store.validation(2))
    assert [batch.tokens_BT.shape for batch in batches] == [(2, 12)] * 3
    counted = "".join(text_of(batch.targets_BT[batch.mask_BT == 1]) for batch in batches)
    assert sorted(counted.split("$")) == ["", *"cdefg"]
    assert len(list(store.validation(2, tokens=2))) == 1
    assert store.validation_rows == len(list(store.validation(1)))


def test_a_separate_validation_file_and_a_mixture(prepared, tmp_path):
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": said("v", "w")}) + "\n")
    store, _, _ = prepared(
        [{"messages": said("a", "b")}], **{"data.val_path": str(tmp_path / "b.jsonl")}
    )
    assert (text_of(store.training_ids), text_of(store.validation_ids)) == ("uaab$", "uvaw$")
    paths = [str(tmp_path / "a.jsonl"), str(tmp_path / "c.jsonl")]
    mixed = {"data.path": paths, "data.mixture": [3, 1], "training.batch_size": 1000}
    mixed["data.val_path"] = str(tmp_path / "b.jsonl")
    store, _, _ = prepared(
        [{"messages": said("c", "d")}], name="c.jsonl", directory="mixed", **mixed
    )
    assert np.count_nonzero(store.batch(0).tokens_BT[:, 1] == ord("a")) == 750


def test_pairs_and_their_references(prepared):
    records = [
        {"prompt": p, "chosen": "yes", "rejected": [{"role": "assistant", "content": "no"}]}
        for p in "abcde"
    ]
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


def message(role, content, **fields):
    return {"role": role, "content": content, **fields}


Q, A, B = message("user", "q"), message("assistant", "a"), message("assistant", "b")
SYSTEM = message("system", "s")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "q", "chosen": [Q, A], "rejected": [Q, B]}, ["uqa", "uqab$", "a$", "b$"]),
        ({"chosen": [Q, A], "rejected": [Q, B]}, ["uqa", "uqab$", "a$", "b$"]),
        ({"prompt": [Q], "chosen": [Q, A], "rejected": [Q, B]}, ["uqa", "uqab$", "a$", "b$"]),
        (
            {"prompt": " q\n", "chosen": [SYSTEM, Q, A], "rejected": [SYSTEM, Q, B]},
            ["ssuqa", "ssuqab$", "a$", "b$"],
        ),
        (
            {"prompt": "q", "chosen": [Q, A, Q, A], "rejected": [Q, A, Q, B]},
            ["uqaa$uqa", "uqaa$uqab$", "a$", "b$"],
        ),
        ({"prompt": "q", "chosen": [A], "rejected": "b"}, ["uqa", "uqab$", "a$", "b$"]),
        (
            {"prompt": [SYSTEM], "chosen": [Q, A], "rejected": [Q, B]},
            ["ssuqa", "ssuqab$", "a$", "b$"],
        ),
    ],
)
def test_a_preference_with_whole_conversations_has_its_prompt_once(prepared, record, expected):
    """As in `maybe_extract_prompt` of TRL, and for lists that contain the prompt also if it is a
    list.
    """
    store, _, _ = prepared([record] * 2, objective="dpo", **{"model.max_context": 20})
    batch = store.batch(0)
    first, second = (
        text_of([*tokens, targets[-1]]).rstrip("_")
        for tokens, targets in zip(batch[0][0], batch[1][0], strict=True)
    )
    answers = [
        text_of(targets[mask == 1]) for targets, mask in zip(batch[1][0], batch[3][0], strict=True)
    ]
    assert first.startswith(expected[0]) and second == expected[1]
    if record.get("prompt") != [SYSTEM]:  # there, the completion begins with a user message
        assert answers == expected[2:]


def test_other_records_with_whole_conversations(prepared):
    labeled = [
        {"prompt": p, "completion": [message("user", p), A], "label": p == "x"} for p in "xy"
    ] * 2
    store, _, _ = prepared(labeled, objective="kto", **{"data.val_fraction": 0.5})
    assert text_of(store.training_ids[:10]) == "uxaa$uxaa$"
    store, _, _ = prepared(
        [{"prompt": "q", "completion": [Q, A, Q, B]}] * 2, **{"model.max_context": 20}
    )
    assert text_of(store.training_ids) == "uqaa$uqab$" and int(store.batch(0).mask_BT[0].sum()) == 4
    for record, problem in (
        (
            {"prompt": "other", "chosen": [Q, A], "rejected": [Q, B]},
            "'chosen' does not contain the prompt",
        ),
        (
            {"prompt": "q", "chosen": [Q, A], "rejected": [SYSTEM, Q, B]},
            "begin with different prompts",
        ),
        ({"chosen": "a", "rejected": "b"}, "lacks the field 'prompt'"),
    ):
        with pytest.raises(UserError, match=problem):
            prepared([record] * 2, objective="dpo")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
WITH_TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + TEMPLATE.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}{{"
    " c.function.arguments.x }}>{% endfor %}",
)


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_tools_and_calls_are_rendered(prepared, tmp_path, tools):
    (tmp_path / "tools.jinja").write_text(WITH_TOOLS)
    settings = {"data.chat_template": str(tmp_path / "tools.jinja"), "model.max_context": 40}
    called = [Q, message("assistant", None, tool_calls=[CALL]), message("tool", "r"), B]
    store, _, _ = prepared([{"messages": called, "tools": tools}] * 2, **settings)
    assert text_of(store.training_ids) == "[f]uqa<f1>$trab$"
    batch = store.batch(0)
    assert text_of(batch.targets_BT[0][batch.mask_BT[0] == 1]) == "<f1>$b$"
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "tools": tools}
    store, _, _ = prepared([pair] * 2, objective="dpo", **settings)
    assert text_of(store.training_ids) == "[f]uqaa$[f]uqab$"
    grpo = {"grpo.rewards": ["exact_match"], "generation.max_new_tokens": 4}
    store, _, _ = prepared(
        [{"prompt": "q", "tools": tools, "answer": "a"}] * 2, objective="grpo", **settings | grpo
    )
    assert text_of(store.batch(0)[0].ids) == "[f]uqa"


def test_tools_without_support_of_the_template_equal_those_of_generation(prepared):
    called = [
        Q,
        message("assistant", None, tool_calls=[CALL]),
        message("tool", "r"),
        message("tool", "r"),
        message("assistant", "b", weight=0),
    ]
    store, _, _ = prepared(
        [{"messages": called, "tools": [TOOL]}] * 2, **{"model.max_context": 2000}
    )
    template = ChatTemplate(TEMPLATE, BYTES)
    assert text_of(store.training_ids).startswith(
        text_of(chat_prompt(template, called[:1], [TOOL]).ids)
    )
    assert text_of(store.training_ids).startswith(
        text_of(chat_prompt(template, called[:4], [TOOL]).ids)
    )
    batch = store.batch(0)
    answer = text_of(batch.targets_BT[0][batch.mask_BT[0] == 1])
    assert answer == '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>$'
    for content, calls in ((5, [CALL]), ([{"type": "text", "text": "a"}], [])):
        with pytest.raises(UserError, match="the content of message 0 must be text, got"):
            chat_prompt(template, [message("assistant", content, tool_calls=calls)], [TOOL])
    refusing = ChatTemplate(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE,
        BYTES,
    )
    wrong = [{"role": "bot", "content": ""}]
    for one in (template, refusing):  # the second one has the tools in the first message
        prompts = [
            (called[:1], [TOOL]),
            (called[:4], None),
            (wrong, None),
            (called[:4], [TOOL]),
            ([Q, A, Q], None),
        ]
        found = encode_prompts(
            one, [MaskedConversation(messages, None, tools) for messages, tools in prompts]
        )
        assert "the role of message 0 must be" in str(found.pop(2)) and prompts.pop(2)
        assert [ids.tolist() for ids in found] == [
            chat_prompt(one, *prompt).ids for prompt in prompts
        ]


def test_template_variables_and_weights(prepared, tmp_path):
    (tmp_path / "v.jinja").write_text("{{ mode }}" + TEMPLATE)
    messages = [
        Q,
        message("assistant", "a", weight=0),
        Q,
        message("assistant", "b", weight=1),
        Q,
        message("assistant", "c", weight=None),
    ]
    record = {
        "messages": messages,
        "chat_template_kwargs": {"mode": "m"},
        "label": None,
        "source": "x",
    }
    settings = {"data.chat_template": str(tmp_path / "v.jinja"), "model.max_context": 40}
    store, _, _ = prepared([record] * 2, **settings)
    assert text_of(store.training_ids) == "muqaa$uqab$uqac$"
    batch = store.batch(0)
    assert text_of(batch.targets_BT[0][batch.mask_BT[0] == 1]) == "b$c$" and store.train.bytes == 2


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (
            {"messages": [Q, message("assistant", "a", weight=0)]},
            "no assistant message to train on",
        ),
        (
            {"messages": [Q, message("assistant", "a", weight=0.5)]},
            "the weight of message 1 must be 0 or 1, got 0.5",
        ),
        (
            {"messages": [message("user", "q", weight=1), A]},
            "the weight of message 0 must be 0, because",
        ),
        (
            {"messages": [Q, message("assistant", None)]},
            "the content of message 1 must be text, got null",
        ),
        (
            {"messages": [Q, message("assistant", None, tool_calls=[{"name": "f"}])]},
            "must be an object with a function that",
        ),
        (
            {"messages": [Q, A], "tools": {"name": "f"}},
            "the field 'tools' must be a list of objects",
        ),
        ({"messages": [Q, A], "tools": "[1]"}, "the field 'tools' must be a list of objects"),
        (
            {"messages": [Q, A], "chat_template_kwargs": {"messages": []}},
            "must not have the name 'messages'",
        ),
        (
            {"messages": [Q, A], "functions": [TOOL]},
            "the field 'functions' of a record is not supported: use tools",
        ),
        (
            {"prompt": "q", "completion": "a", "system": "s"},
            "the field 'system' of a record is not supported",
        ),
        (
            {"prompt": "q", "completion": "a", "weight": 0.5},
            "the field 'weight' of a record is not supported",
        ),
        ({"prompt": "q", "completion": "a", "label": False}, "the field 'label' is false, but sft"),
        ({"messages": [Q, A], "completion": "a"}, "not both"),
    ],
)
def test_fields_that_change_the_meaning_are_not_ignored(prepared, record, problem):
    with pytest.raises(UserError, match=problem) as caught:
        prepared([record] * 2, **{"model.max_context": 40})
    assert str(caught.value).endswith("line 1)")


def test_white_space_of_an_answer_is_kept(prepared):
    record = {"prompt": "def f():\n", "completion": "    return 1\n"}
    store, _, _ = prepared([record] * 2, **{"data.chat_template": "plain", "model.max_context": 80})
    batch = store.batch(0)
    assert text_of(batch.targets_BT[0][batch.mask_BT[0] == 1]) == "    return 1\n$"


def test_labeled_completions_have_a_mismatched_completion(prepared):
    """The second conversation of an example has the completion of the next record with another
    prompt, cut to the row.
    """
    records = [
        ("p", "one", True),
        ("p", "two", False),
        ("q", "a very long answer", False),
        ("r", "four", True),
        ("s", "5", False),
    ]
    records = [
        {"prompt": prompt, "completion": completion, "label": label}
        for prompt, completion, label in records
    ]
    store, config, directory = prepared(records, objective="kto", **{"data.val_fraction": 0.4})
    assert (store.left_out, store.conversations, store.windows_per_epoch) == (1, 5, 2)
    seen = {}
    for numbers, batch in store.all_pairs(2):
        for number, tokens, mask, desirable in zip(
            numbers, batch.targets_P2T, batch.mask_P2T, batch.desirable_P, strict=False
        ):
            seen[int(number)] = [text_of(t[m == 1]) for t, m in zip(tokens, mask, strict=True)] + [
                bool(desirable)
            ]
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
    assert (
        validation.desirable_P.tolist() == [True, False, False] and not validation.mask_P2T[2].any()
    )
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
    records = [
        {"prompt": str(i), "completion": "b", "label": label if i == 1 else True} for i in range(4)
    ]
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
    with pytest.raises(
        UserError, match=r"^the role of message 1 must be .*a\.jsonl, line 2\)$"
    ):  # not that of line 1
        prepared(records, objective="kto")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            '{"text": "a"}',
            (
                "a record must have the field messages, or the fields prompt and completion; it has"
                " 'text' "
            ),
        ),
        ('{"messages": "a"}', "the field 'messages' must be a list of messages, got 'a' "),
        ('{"messages": []}', "the field 'messages' must be a list of messages, got [] "),
        (
            '{"messages": [{"role": "bot", "content": ""}]}',
            "the role of message 0 must be one of system, developer, user, ",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            "a conversation has no assistant message to train on ",
        ),
        (
            '{"prompt": 1, "completion": "b"}',
            "the field 'prompt' must be a string or a list of messages, got 1 ",
        ),
        ('{"prompt": "a", "completion": "\\ud83d"}', "U+D83D at position "),
        (
            '{"messages": [{"content": "a"}], "tools": [{"name": "f"}]}',
            "the role of message 0 must be one of system, ",
        ),
        ('{"prompt": "a"}', "a record lacks the field 'completion'; it has 'prompt' "),
        ('["a"]', "a record must be a JSON object, got ['a'] "),
        ("{", "not JSON: "),
    ],
)
def test_an_invalid_record_is_reported_with_its_line(prepared, tmp_path, line, sentence):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' + line + "\n")
    with pytest.raises(UserError) as caught:
        prepared([], **{"data.path": str(tmp_path / "bad.jsonl")})
    assert str(caught.value).startswith(sentence) and str(caught.value).endswith(
        f"({tmp_path / 'bad.jsonl'}, line 2)"
    )
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
    _, config, directory = prepared(
        records, **{"data.chat_template": "plain", "model.max_context": 40}
    )
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
    assert not matches_answer_form("Takes: two arguments\nDoes: it") and not matches_answer_form(
        "def f(a):"
    )
    assert (
        ChatTemplate.from_name("plain", BYTES).encode_with_loss_mask(function.messages())[1].sum()
        == len(answer["content"]) + 1
    )
