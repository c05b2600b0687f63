import json

import numpy as np
import pytest

from dantinox.config import TokenizerSection, UserError
from dantinox.text import ChatTemplate, Tokenizer, chat_template, train_tokenizer
from dantinox.text.chat_template import MaskedConversation
from tests.error_texts import ERRORS

from .chat_cases import CASES, CHATML, CONVERSATIONS, EXPECTED, USER

BYTES = train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(()))
SPOKEN = {"role": "assistant", "content": "hello <you>"}


@pytest.fixture(scope="module")
def templates():
    return {name: ChatTemplate(case[0], tokenizer_of(name)) for name, case in CASES.items()}


def tokenizer_of(name):
    _, content, begin, end = CASES[name]
    tokenizer = Tokenizer(content)
    tokenizer.template_variables = {
        key: n for key, n in (("bos_token", begin), ("eos_token", end)) if n
    }
    return tokenizer


def spelled(template, ids):
    return " ".join(template._tokenizer.core.id_to_token(i) for i in ids)


@pytest.mark.parametrize("case", json.loads(EXPECTED.read_text()).items(), ids=lambda case: case[0])
def test_tokens_equal_those_of_transformers(templates, case):
    name, number, prompt = case[0].split()
    if case[1] is None:
        with pytest.raises(UserError, match=ERRORS["the_chat_template_refuses_these"]):
            templates[name].encode(CONVERSATIONS[int(number)])
    else:
        assert (
            templates[name].encode(CONVERSATIONS[int(number)], generation_prompt=prompt == "True")
            == case[1]
        )


def test_the_loss_mask_covers_a_turn_up_to_its_end_token(templates):
    """Words outside the vocabulary are encoded letter by letter. The line break after a turn is not
    in the mask.
    """
    conversation = [
        USER,
        SPOKEN,
        {"role": "user", "content": "you"},
        {"role": "assistant", "content": "are"},
    ]
    chatml = templates["chatml"]
    ids, loss_mask = chatml.encode_with_loss_mask(conversation)
    assert (
        spelled(chatml, ids)
        == "<|im_start|> user Ċ hello Ġt he r e , Ġhow Ġare Ġyou ? <|im_end|> Ċ "
        "<|im_start|> assistant Ċ hello Ġ < y o u > <|im_end|> Ċ "
        "<|im_start|> user Ċ y o u <|im_end|> Ċ <|im_start|> assistant Ċ a r e <|im_end|> Ċ"
    )
    assert np.flatnonzero(loss_mask).tolist() == [*range(18, 26), *range(38, 42)]
    # This vocabulary encodes the last line breaks of a prompt as one token.
    ids, loss_mask = templates["llama3"].encode_with_loss_mask([USER, SPOKEN])
    assert spelled(templates["llama3"], ids[loss_mask]) == "hello Ġ < y o u > <|eot_id|>"
    ids, loss_mask = templates["gemma"].encode_with_loss_mask([USER, SPOKEN])
    assert spelled(templates["gemma"], ids[loss_mask]) == "hello ▁ < y o u > <end_of_turn>"
    assert chatml.end_ids == {chatml._tokenizer.special_tokens["<|im_end|>"]}


def test_a_token_across_the_start_of_a_turn_is_in_the_mask(templates):
    ids, loss_mask = templates["chatml"].encode_with_loss_mask(
        [{"role": "assistant", "content": "\n "}]
    )
    assert spelled(templates["chatml"], ids) == "<|im_start|> assistant ĊĊ Ġ <|im_end|> Ċ"
    assert loss_mask.astype(int).tolist() == [0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize("name", CASES)
def test_message_text_never_becomes_a_special_token(templates, name):
    template = templates[name]
    special = next(reversed(template._tokenizer.special_tokens))
    half = special[: len(special) // 2]
    text = f"a{special}b{half}{special} {special}{half}"
    plain, spelled = (
        template.encode([{"role": "user", "content": content}]) for content in ("x", text)
    )
    index = template._tokenizer.special_tokens[special]
    assert spelled.count(index) == plain.count(index)
    assert text in template.text([{"role": "user", "content": text}])


def test_nested_special_token_names_are_escaped():
    tokenizer = Tokenizer(
        CASES["chatml"][1].replace("<|im_start|>", "<<").replace("<|im_end|>", "<s>")
    )
    assert not tokenizer.special_ids & set(
        tokenizer.encode_specials(tokenizer.escape_special_tokens("<<s><<<s>>"))[0].tolist()
    )
    assert (
        tokenizer.decode(
            tokenizer.encode_specials(tokenizer.escape_special_tokens("<<s><<<s>>"))[0]
        )
        == "<<s><<<s>>"
    )


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_the_plain_template_is_text_and_end_tokens(kind):
    tokenizer = train_tokenizer(
        TokenizerSection(tokenizer_type=kind), lambda: iter(["User: Assistant: <eos> \n abc"])
    )
    template = ChatTemplate.from_name("plain", tokenizer)
    messages = [{"role": "user", "content": "a <eos>"}, {"role": "assistant", "content": "b"}]
    ids, loss_mask = template.encode_with_loss_mask(messages)
    expected = [
        tokenizer.bos_id,
        *tokenizer.encode("User:\na <eos>\n\nAssistant:\n"),
        *tokenizer.encode("b"),
        tokenizer.eos_id,
    ]
    assert ids.tolist() == template.encode(messages) == expected
    assert loss_mask.tolist() == [False] * (len(ids) - 2) + [True] * 2
    assert template.encode(messages[:1], generation_prompt=True) == expected[:-2]
    assert template.end_ids == {tokenizer.eos_id}
    with pytest.raises(UserError, match=ERRORS["the_chat_template_chatml_needs"]):
        ChatTemplate.from_name("chatml", tokenizer)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{{ ''.__class__.__mro__ }}",
         "cannot be rendered: access to attribute '__class__' of 'str' object is unsafe."),
        ("{{ cycler.__init__.__globals__ }}",
         "cannot be rendered: access to attribute '__init__' of 'type' object is unsafe."),
        ("{{ messages.append(1) }}",
         "cannot be rendered: access to attribute 'append' of 'list' object is unsafe."),
        ("{% set n = namespace(__init__=1) %}",
         "cannot be rendered: a namespace must not have the name '__init__'"),
        ("{% include '/etc/passwd' %}",
         "cannot be rendered: no loader for this environment specified"),
        ("{% if %}",
         "cannot be rendered: Expected an expression, got 'end of statement block' (line 1)"),
        ("{{ raise_exception('no\nmore') }}", "refuses these messages: no more"),
        ("{% for i in range(10**9) %}{% endfor %}",
         "cannot be rendered: Range too big. The sandbox blocks ranges larger than "
         "MAX_RANGE (100000)."),
        ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
         "cannot be rendered: it writes more than 16,777,216 "
         "characters"),
        ("{{ 'a' * 10**10 }}", "cannot be rendered: it needs more than 1024 MiB"),
        ("{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
         "cannot be rendered: it needs "
         "more than 0 seconds or 1024 MiB"),
    ],
)  # fmt: skip
def test_an_unsafe_or_endless_template_raises_one_sentence(source, sentence, monkeypatch):
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 0)
    with pytest.raises(UserError) as caught:
        ChatTemplate(source, BYTES).encode([USER])
    assert str(caught.value) == f"the chat template {sentence}"


def test_a_killed_template_process_is_restarted():
    """If the system ends the process between two requests, the next one has no error."""
    template = ChatTemplate("b", BYTES)
    assert template.text([USER]) == "b"
    killed = template._process
    killed.kill()
    killed.wait()
    assert template.text([USER]) == "b"
    assert template._process is not killed


def test_an_error_in_a_batch_belongs_to_its_conversation(monkeypatch):
    """One conversation refuses, one is invalid, and one exceeds the time limit, which ends the
    process.
    """
    source = "{% if messages[0].content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
    source += (
        "{% set r = range(99999 if messages[0].content == 'endless' else 1) %}{% for i in r %}{%"
        " for j in r %}{% endfor %}"
    )
    source += "{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 0)
    template = ChatTemplate(source, BYTES)
    first = ["a", "refuse", "b", "endless", "c", 7]
    conversations = [
        MaskedConversation([{"role": "user", "content": text}, SPOKEN]) for text in first
    ]
    results = template.encode_with_loss_masks(conversations)
    errors = {
        text: str(result)
        for text, result in zip(first, results, strict=True)
        if isinstance(result, UserError)
    }
    assert errors == {
        "refuse": "the chat template refuses these messages: no",
        "endless": "the chat template cannot be rendered: it needs more than 0 seconds or 1024 MiB",
        7: "the content of message 0 must be text, got 7",
    }
    monkeypatch.setattr(
        chat_template, "REQUEST_BYTES", 1
    )  # each conversation in a request of its own
    again = template.encode_with_loss_masks([conversations[index] for index in (0, 2, 4)])
    for text, result, other in zip("abc", results[::2], again, strict=True):
        assert BYTES.decode(result[0]) == text + SPOKEN["content"]
        assert all((one == two).all() for one, two in zip(result, other, strict=True))


def test_the_jinja_environment_equals_that_of_transformers():
    source = (
        "{% generation %}a{% endgeneration %}\n  {% for i in [1, 2] %}{% if i == 2 %}{% break %}{%"
        " endif %}{{ i }}{% endfor %}{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}{{ {'é':"
        " '<'}|tojson }}{{ strftime_now('%Y')|length }}{{ nil }}"
    )
    assert ChatTemplate(source, BYTES).text([]) == 'a12{"é": "<"}4'


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        (["hi"], "message 0 must be an object with role and content, got 'hi'"),
        ([USER, {"role": "end", "content": ""}],
         "the role of message 1 must be one of system, developer, user, assistant, "
         "tool, got 'end'"),
        ([{"role": "user"}], "the content of message 0 must be text, got null"),
        ([{"role": "user", "content": "a\0"}],
         "the text contains U+0000 at character 1, which is not allowed"),
    ],
)  # fmt: skip
def test_invalid_messages_raise_one_sentence(messages, sentence):
    with pytest.raises(UserError) as caught:
        ChatTemplate(CHATML, BYTES).encode(messages)
    assert str(caught.value) == sentence


def test_tools_that_are_nested_too_deeply_raise_one_sentence():
    tool = json.loads('{"a":' * 900 + "1" + "}" * 900)
    with pytest.raises(UserError, match="messages must be plain JSON: "):
        ChatTemplate(CHATML, BYTES).prompt([USER], [tool])


def test_a_template_that_changes_earlier_turns_is_refused():
    source = "{% for m in messages %}{{ m.role if loop.last else '' }}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match=ERRORS["does_not_support_training_on"]):
        ChatTemplate(source, BYTES).encode_with_loss_mask([USER, SPOKEN, USER])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "no chat template at"), (b"\xff", "is not UTF-8 text: the byte 0xff in line 1")],
)
def test_invalid_template_files_raise_one_sentence(content, sentence, tmp_path):
    path = tmp_path / "chat_template.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        ChatTemplate.load(path, BYTES)


def test_names_of_templates(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("a")
    assert ChatTemplate.from_name(str(path), BYTES).text([]) == "a"
    with pytest.raises(UserError, match=ERRORS["no_chat_template_other_name"]):
        ChatTemplate.from_name("other", BYTES)


@pytest.mark.parametrize(
    "content", ["A primary color is", "A primary color is ", "a", "<you>", "line\n"]
)
@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("llama3", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("chatml", "<|im_start|>assistant\n"),
        ("gemma", "<start_of_turn>model\n"),
    ],
)
def test_a_prompt_may_end_with_the_last_message(templates, name, head, content):
    """As `continue_final_message` of Transformers, but a space at the end stays."""
    template = templates[name]
    asked = template.text([USER], generation_prompt=True)
    assert asked.endswith(head)
    prompt = template.prompt([USER, {"role": "assistant", "content": content}], continues=True)
    assert prompt.text == asked + content
    assert prompt.ids == template._tokenizer.encode_special_ids(prompt.text)


def test_a_message_that_is_not_written_cannot_be_continued():
    template = ChatTemplate("{% for message in messages %}{{ message.role }}{% endfor %}", BYTES)
    with pytest.raises(UserError, match=ERRORS["does_not_write_the_last_message"]):
        template.prompt([SPOKEN], continues=True)


def test_which_last_messages_are_continued():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for messages, expected in (
        ([USER, SPOKEN], True),
        ([SPOKEN, USER], False),
        ([SPOKEN | {"tool_calls": [call]}], False),
        ([SPOKEN | {"content": ""}], False),
        ([SPOKEN | {"content": None}], False),
        ([], False),
        ([3], False),
    ):
        assert chat_template.continues_last(messages) is expected
