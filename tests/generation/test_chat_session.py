"""Chat sessions without a terminal: prompts, stored messages, settings, a full context, and the
file of a chat.
"""

import json

import pytest

from dantinox.config import UserError
from dantinox.generation.api.chat_session import Chat
from dantinox.text import ChatTemplate
from tests.error_texts import ERRORS

from . import builder

AROUND = "è€😀b\nca" * 9  # the greedy text of the model of `run_dir` after "a"
GREEDY = {"greedy": True, "max_new_tokens": 13}
PLAIN = "<bos>User:\n{}\n\nAssistant:\n"


@pytest.fixture(scope="module")
def run():
    return builder.circle()


@pytest.fixture(scope="module")
def ending():
    return builder.circle(end=True)


@pytest.fixture
def chat(run):
    """Returns a chat; the prompts of its answers are recorded in `read`."""
    template = ChatTemplate.from_name("plain", run.tokenizer)
    made = Chat(run, template, GREEDY)
    made.read = []
    encode = template.encode

    def reading(messages, *, generation_prompt=False):
        made.read.append(encode(messages, generation_prompt=generation_prompt))
        return made.read[-1]

    template.encode = reading
    return made


def joined(pieces):
    return "".join(piece.text for piece in pieces)


def decode_with_specials(run, ids):
    """Returns text with the BOS and EOS tokens shown."""
    names = {run.tokenizer.bos_id: "<bos>", run.tokenizer.eos_id: "<eos>"}
    return b"".join(names[i].encode() if i in names else bytes([i]) for i in ids).decode()


def test_turns_are_formatted_by_the_template(run, chat):
    first = joined(chat.answer("a"))
    assert len(first.encode()) == 13
    joined(chat.answer("c"))
    assert decode_with_specials(run, chat.read[0]) == PLAIN.format("a")
    assert (
        decode_with_specials(run, chat.read[-1])
        == f"<bos>User:\na\n\nAssistant:\n{first}<eos>\n\nUser:\nc\n\nAssistant:\n"
    )
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert (chat.messages[1]["content"], chat.finish_reason) == (first, "length")


def test_without_a_template_the_text_is_continued(run):
    chat = Chat(run, None, GREEDY)
    assert chat.is_completion
    assert joined(chat.answer("a")) == AROUND[:7]
    assert joined(chat.answer("b")) == "\nca" + AROUND[:4], (
        "a message begins a new line, whose byte is part of the cycle"
    )
    assert chat.template.encode(chat.messages) == list(f"a{AROUND[:7]}\nb\nca{AROUND[:4]}".encode())
    with pytest.raises(UserError, match=ERRORS["no_chat_template_so_it"]):
        chat.set_system("be brief")


def test_the_end_token_ends_an_answer(ending):
    chat = Chat(ending, None, {"greedy": True, "max_new_tokens": 40})
    assert joined(chat.answer("a")) == "è€😀b\nc"
    assert chat.finish_reason == "eos"


def test_the_special_token_that_ends_a_turn_ends_an_answer(run):
    """In this test, the template declares the first byte of "😀" as the token that ends turns."""
    chat = Chat(run, None, {"greedy": True, "max_new_tokens": 40})
    chat.template.end_ids = frozenset("😀".encode()[:1])
    assert joined(chat.answer("a")) == "è€"
    assert chat.finish_reason == "stop"


def test_an_interrupted_answer_is_kept(run):
    chat = Chat(run, None, {"greedy": True, "max_new_tokens": 60})
    pieces = chat.answer("a")
    received = next(pieces).text + next(pieces).text
    pieces.close()
    assert received == AROUND[: len(received)] and chat.finish_reason == "interrupted"
    assert chat.messages == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": received},
    ]
    assert joined(chat.answer("b")).startswith("\nca"), "the conversation continues"


def test_entropies_come_token_by_token(run):
    chat = Chat(run, None, {"greedy": True, "max_new_tokens": 15})
    chat.entropy = True
    pieces = list(chat.answer("a"))
    assert [piece.text for piece in pieces] == list(AROUND[:8]), (
        "a character of several bytes is one piece"
    )
    request = run.request("a", {"greedy": True, "max_new_tokens": 15}, logprobs=0)
    (batch,) = run.start([request], pad=chat._pad)
    list(batch.parts())
    bits = iter(batch.results[0].info["entropy"])
    for piece in pieces:
        assert piece.entropy == pytest.approx(
            max(next(bits) for _ in piece.text.encode()), rel=1e-4
        )


def test_retry_and_undo(run):
    chat = Chat(run, None, {"temperature": 30.0, "seed": 5, "max_new_tokens": 12})
    first = joined(chat.answer("a"))
    again = joined(chat.retry())
    assert again != first, "a second answer to the same message has other draws"
    assert [message["content"] for message in chat.messages] == ["a", again]
    assert chat.undo() == "a" and chat.messages == []
    with pytest.raises(UserError, match=ERRORS["the_conversation_has_no_messages"]):
        chat.retry()
    other = Chat(run, None, {"temperature": 30.0, "seed": 5, "max_new_tokens": 12})
    assert [joined(other.answer("a")), joined(other.retry())] == [
        first,
        again,
    ], "the whole conversation is repeatable"


def test_a_full_context_drops_the_oldest_turns(run, chat):
    chat.set_system("S")
    for text in ("a" * 30, "b" * 10):
        joined(chat.answer(text))
    with pytest.warns(UserWarning, match=ERRORS["the_context_of_128_tokens"]):
        joined(chat.answer("c" * 10))
    read = decode_with_specials(run, chat.read[-1])
    assert read.startswith("<bos>System:\nS\n\nUser:\nbbbb") and len(chat.read[-1]) + 13 <= 128
    assert len(chat.messages) == 6, "dropped turns stay in the messages"
    with pytest.raises(UserError, match=ERRORS["the_message_has_tokens_but"]):
        chat.answer("d" * 120)
    assert len(chat.messages) == 6


def test_a_long_answer_is_limited_by_the_context(run, recwarn):
    chat = Chat(run, None, {"greedy": True, "max_new_tokens": 400})
    assert len(joined(chat.answer("a" * 100)).encode()) == 28
    assert chat.finish_reason == "context"
    assert [str(warning.message) for warning in recwarn if "context" in str(warning.message)] == []


def test_a_growing_conversation_needs_few_programs(run, programs):
    chat = Chat(run, None, {"temperature": 0.8, "max_new_tokens": 6})
    joined(chat.answer("a"))
    programs()
    for number in range(3):
        joined(chat.answer("b" * (4 + number)))
    chat.set("temperature", 0.3)
    joined(chat.answer("c"))
    assert programs() == 0


@pytest.mark.slow  # test_kv.py tests budgets of requests
def test_a_budget_of_the_cache(run):
    chat = Chat(
        run, None, {"greedy": True, "max_new_tokens": 52, "kv_budget": 0.5, "kv_signal": "uniform"}
    )
    assert joined(chat.answer("a")) == AROUND[:28], (
        "the next byte depends only on the last one, whatever is evicted"
    )


def test_settings(run):
    chat = Chat(run, None, {"temperature": 0.5})
    chat.set("top_k", 40)
    assert (chat.config.generation.top_k, chat.overrides) == (40, {"temperature": 0.5, "top_k": 40})
    chat.reset("temperature")
    assert (
        chat.overrides == {"top_k": 40}
        and chat.config.generation.temperature == run.config.generation.temperature
    )
    for name, value, sentence in (
        ("top_p", 1.7, "generation.top_p must be a number in .*, got 1.7"),
        (
            "temprature",
            1.0,
            "unknown key generation.temprature, did you mean generation.temperature",
        ),
        ("n", 2, "generation.n must be 1 in a conversation, got 2"),
    ):
        with pytest.raises(UserError, match=sentence):
            chat.set(name, value)
        assert chat.overrides == {"top_k": 40}
    with pytest.raises(UserError, match=ERRORS["unknown_key_generation_temprature"]):
        chat.reset("temprature")


def test_a_setting_without_effect_is_dropped(run):
    chat = Chat(run, None, {"strategy": "entropy", "low_entropy": 0.4})
    with pytest.warns(UserWarning, match=ERRORS["router_low_entropy_has_no_effect"]):
        chat.set("strategy", "chain")
    assert chat.overrides == {}


def test_a_saved_conversation_continues(run, chat, tmp_path):
    file = tmp_path / "talk.jsonl"
    chat.set_system("S")
    answer = joined(chat.answer("è"))
    chat.save(file)
    messages = [("system", "S"), ("user", "è"), ("assistant", answer)]
    assert json.loads(file.read_text()) == {
        "messages": [{"role": role, "content": text} for role, text in messages]
    }
    chat.save(file)  # overwriting its own file is allowed
    other = Chat(run, chat.template, GREEDY)
    with pytest.raises(UserError, match=ERRORS["exists_already_choose_another_name"]):
        other.save(file)
    other.load(file)
    assert (other.system, other.messages) == ("S", chat.messages)
    assert joined(other.answer("b")) == joined(chat.answer("b"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[1", "is not valid JSON"),
        ("[]", "must hold a JSON object with a list under the key messages"),
        (
            '{"messages": [{"role": "user"}]}',
            "message 0 of .* must have the strings role and content, got",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            "must alternate user and assistant messages, .* got .*user",
        ),
        ("\udcff", "is not valid JSON"),
    ],
)
def test_files_that_hold_no_conversation(run, tmp_path, content, sentence):
    file = tmp_path / "talk.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    chat = Chat(run)
    with pytest.raises(UserError, match=sentence):
        chat.load(file)
    with pytest.raises(UserError, match=ERRORS["cannot_read"]):
        chat.load(tmp_path / "none")
    assert chat.messages == []
