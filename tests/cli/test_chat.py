"""`dantinox chat`: lines through a pipe, commands, and a real terminal."""

import io
import json
import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path

import pexpect
import pytest

from dantinox import cli
from dantinox.cli import chat as chatting
from dantinox.config import UserError
from dantinox.report.entropy_view import digit_lines, shade_text
from dantinox.run import RunDirectory, accept_run, directory
from dantinox.serve.pool.model_loading import open_model
from dantinox.serve.pool.model_specs import ModelSpec
from tests.error_texts import ERRORS
from tests.serve.lora_runs import make_lora_run

PROMPT = r">.*\x1b\[\?25h"  # the prompt, and the code that shows the cursor
AROUND = "è€😀b\nca"  # the model of `run_dir` repeats this text after "a"


@pytest.fixture
def talk(run_dir, capfd, monkeypatch):
    """Returns a function that sends lines through a pipe and returns (exit code, stdout,
    stderr).
    """

    def run(lines, *flags, at=run_dir):
        data = (
            lines if isinstance(lines, bytes) else "".join(line + "\n" for line in lines).encode()
        )
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        settings = ["--greedy", "--max_new_tokens", "13", *flags]
        code = cli.main(["chat", "--run_dir", str(at), *settings])
        return code, *capfd.readouterr()

    return run


def test_the_settings_of_a_run_are_read_once(talk, run_dir, monkeypatch):
    """Between two reads, they could change."""
    read = []
    load_config = directory.load_config

    def count(path):
        read.append(path)
        return load_config(path)

    monkeypatch.setattr(directory, "load_config", count)
    assert talk([])[0] == 0 and len(read) == 1
    open_model(ModelSpec("name", run_dir))
    assert len(read) == 2


def test_lines_through_a_pipe(talk, tmp_path):
    file = tmp_path / "talk.json"
    code, out, err = talk(
        ["a", "", "/set max_new_tokens 5", "b", "/undo", f"/save {file}", "/quit", "never read"]
    )
    assert (code, out) == (0, AROUND + "\n" + "\nca" + AROUND[:1] + "\n")
    assert err.splitlines() == [
        (
            "this model has no chat template: it continues your text, and"
            " the conversation is a single text"
        ),
        "max_new_tokens 5",
        "removed: b",
        f"saved {file}",
    ]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": AROUND}]
    assert json.loads(file.read_text()) == {"messages": messages}


@pytest.mark.slow
def test_an_adapter_answers_as_the_merged_model(talk, run_dir, tmp_path):
    tuned = make_lora_run(tmp_path / "tuned", run_dir, 1)
    adapted, merged = talk(["a"], "--lora", str(tuned))[:2], talk(["a"], at=tuned)[:2]
    assert adapted == merged != talk(["a"])[:2] and adapted[0] == 0
    code, _, err = talk(["a"], "--lora", str(run_dir))
    assert code == 2 and "is a run without adapters" in err


def test_each_error_is_one_sentence_and_the_conversation_continues(talk):
    lines = {
        "/sett top_k 4": "no command /sett: did you mean /set",
        "/set top_p 7": "generation.top_p must be",
        "/set": "/set needs the name of a setting",
        "/set stop 'a": "no closing quotation",
        "/set top_p 0.3 0.4": "top_p takes one value, got 2",
        "/entropy maybe": "/entropy must be on or off, got 'maybe'",
        "/save": "/save needs a file name",
        "/foo": "no command /foo: /help lists the commands",
        "/retry": "the conversation has no messages yet",
    }
    code, out, err = talk([*lines, "a"])
    assert (code, out) == (2, AROUND + "\n")
    for number, words in enumerate(lines.values(), 1):
        assert re.search(rf"^error: .*{re.escape(words)}.* \(line {number}\)$", err, re.M), (
            words,
            err,
        )


def test_a_template_and_a_message_that_begins_with_a_slash(talk, run_dir, tmp_path):
    """The template ends with the letter after which the model repeats its text."""
    copy = shutil.copytree(run_dir, tmp_path / "run")
    (copy / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}|{% endfor %}a"
    )
    code, out, err = talk(["/system S", "//help", "/settings"], at=copy)
    assert (code, out) == (0, AROUND + "\n")
    assert "no chat template" not in err and "system S\n" in err and "greedy true (/set)\n" in err


def test_entropies_without_colors_are_printed_below(talk):
    code, out, err = talk(["/entropy on", "a"])
    lines = out.splitlines()
    assert (code, lines[0]) == (0, "è€😀b↵") and re.fullmatch(r"\d\d\d \d\d", lines[1]), (
        "the digits of one line of text"
    )
    assert "\x1b" not in out and "entropy in bits is printed below each token" in err


def test_invalid_utf8_is_an_error(talk):
    code, _, err = talk(b"\xff\n")
    assert code == 2 and err.endswith(
        "error: standard input is not UTF-8 text: byte 0 of line 1 is invalid\n"
    )


def test_help_names_every_command(talk):
    _, _, err = talk(["/help"])
    assert all(f"\n/{name}" in err for name in chatting.COMMANDS)
    assert chatting.command("//x") is chatting.command("x /help") is None
    assert chatting.command("/set  a b ") == ("set", "a b")
    with pytest.raises(UserError, match=ERRORS["no_command_help_lists_the_commands"]):
        chatting.command("/")


def test_parts_are_shaded():
    assert shade_text("a\x1b\nb", None, "truecolor") == "a␛\nb", (
        "no control character reaches the terminal"
    )
    assert (
        shade_text("ab\nc", 0.0, "256")
        == "\x1b[38;5;231;48;5;53mab↵\x1b[0m\n\x1b[38;5;231;48;5;53mc\x1b[0m"
    )
    assert shade_text("ab\n", 8.0, "none") == "ab\n"
    assert list(digit_lines([("ab", 1.2), ("c\n", 9.7), ("d", None)], 20)) == ["abc↵", "1 9", "d"]


def screen(text, width):
    """Returns the rows that a terminal shows for printed text with the two codes that `_wrapper`
    uses.
    """
    rows = [""]
    for code, count, character in re.findall(r"(\x1b\[(\d+)D\x1b\[K)|([^\x1b])", text, re.S):
        if code:
            rows[-1] = rows[-1][: -int(count)]
        elif character == "\n":
            rows.append("")
        else:
            assert len(rows[-1]) < width - 1, "the last column would wrap"
            rows[-1] += character
    return rows


@pytest.mark.parametrize("size", [1, 3, 100])
def test_lines_of_a_terminal_break_between_words(size):
    text = "the quick brown fox jumps\n\nover a lazydogandmoredogs of 12345678901234567890 words"
    wrap = chatting._wrapper(16)
    rows = screen("".join(wrap(text[at : at + size]) for at in range(0, len(text), size)), 16)
    assert [row.rstrip() for row in rows] == [
        "the quick brown", "fox jumps", "", "over a", "lazydogandmored", "ogs of",
        "123456789012345", "67890 words",
    ]  # fmt: skip


def test_closing_an_answer_does_not_wait_for_the_work():
    begun, release, ended = threading.Event(), threading.Event(), []

    def work():
        yield "a"
        begun.set()
        assert release.wait(20)
        yield "b"
        ended.append(True)

    background = chatting._Background()
    answer = background.iterate(work)
    assert next(answer) == "a" and begun.wait(20)
    answer.close()
    assert background.is_busy()
    release.set()
    assert list(background.iterate(lambda: iter_of("c", "d"))) == ["c", "d"]
    assert ended == [], "closed work stops after its item"

    def fail():
        raise UserError("no")
        yield

    with pytest.raises(UserError, match="no"):
        list(background.iterate(fail))


def iter_of(*items):
    yield from items


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_real_terminal(run_dir, tmp_path, interruptible):
    """Streaming, an interrupt, the commands, several lines, the history and quitting."""
    path = Path(shutil.copytree(run_dir, tmp_path / "run"))
    config = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(
        config.replace("max_context: 128", "max_context: 32768")
    )  # long enough to interrupt an answer
    accept_run(RunDirectory(path))
    surroundings = os.environ | {
        "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm-256color",
        "PYTHONPATH": os.pathsep.join(sys.path), "XDG_CACHE_HOME": str(tmp_path),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
    }  # fmt: skip
    surroundings.pop("NO_COLOR", None)
    flags = ["chat", "--run_dir", str(path), "--greedy", "--max_new_tokens", "13"]
    child = pexpect.spawn(
        sys.executable,
        ["-m", "dantinox", *flags],
        env=surroundings,
        encoding="utf-8",
        timeout=40,
        dimensions=(30, 120),
    )

    def send(line, *expected):
        child.expect(PROMPT)
        child.sendline(line)
        for pattern in expected:
            child.expect(pattern)

    child.expect("no chat template")
    send("a", "è€😀b\r\nca\r\n", r"\(truncated: max_new_tokens is 13")
    send("x\x1b\ry", r"\(truncated: ")  # Alt-Enter between the two lines
    send("/undo", r"removed: x\\ny")
    send("/set top_p 1.7", r"error: generation\.top_p must be")
    send("/set max_new_tokens 20000", "max_new_tokens 20000")
    send("/entropy on", "each token is shaded")
    send("/clear", "started a new conversation")
    send("a", "\x1b\\[38;5;\\d+;48;5;\\d+mè")
    child.sendline("/undo")  # typed ahead: it is kept
    time.sleep(0.2)
    child.sendintr()
    child.expect(r"\(stopped\)")
    child.expect("removed: a")
    send("/set max_new_tokens 117", "max_new_tokens 117")
    send("a", r"\(truncated: ")
    send("/retry", r"mè.*mè.*\(truncated: ")
    send(f"/save {tmp_path / 'talk.json'}", "saved ")
    child.expect(PROMPT)
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    (messages,) = json.loads((tmp_path / "talk.json").read_text()).values()
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert len(messages[1]["content"].encode()) == 117
    history = tmp_path / "dantinox" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600 and "+x\n+y\n" in history.read_text()
