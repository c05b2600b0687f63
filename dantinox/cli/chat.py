"""`dantinox chat`: flags, slash commands, and the conversation at a terminal or through a pipe."""

import argparse
import contextlib
import difflib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dantinox.cli.common import add_chat_template, add_run, chosen_template, given_settings, print_lines, use_compilation_cache
from dantinox.config.flags import Parser, add_config_flags
from dantinox.files import UserError, escape_name, quote

if TYPE_CHECKING:
    from dantinox.generation.chat_session import Chat
    from dantinox.generation.sample_text import TextPart

PROMPT, MISTAKE = "> ", 2
KEYS_HELP = "Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer and keeps what was said, Ctrl-D leaves."
SHADED = "each token is shaded by the entropy of its distribution, dark (0 bits) to light (8 and more)"
BELOW = "below each token stands its entropy in bits, rounded, once the answer is complete: this output has no colours"


def chat_flags(command: Parser) -> None:
    add_run(command)
    add_chat_template(command)
    command.add_argument("--system", default="", metavar="TEXT", help="the message that stands before the conversation")
    command.add_argument("--show_entropy", action="store_true", help="begin with /entropy on")
    used = ("system", "chat_template", "show_entropy", "max_new_tokens", "seed", "temperature", "top_k", "top_p", "min_p",
            "repetition_penalty", "weights", "kv_dtype")  # fmt: skip
    add_config_flags(command, ("generation", "router", "kv"), used)


def chat(options: argparse.Namespace) -> int:
    """Runs the command; the exit code: 2 where a line of a pipe was a mistake."""
    settings = given_settings(options)
    from dantinox.config import overlay
    from dantinox.run import find_chat_template, load_run_config, open_run

    directory = open_run(options.run_dir, check=False)  # `load` checks it
    config, own = overlay(load_run_config(directory), settings, "command line"), find_chat_template(directory)
    use_compilation_cache()
    from dantinox.generation import load
    from dantinox.generation.chat_session import Chat

    run = load(options.run_dir, config.generation.tensor_parallel)
    template = chosen_template(options, own, run.tokenizer)
    talk = Chat(run, template, settings)
    talk.set_system(options.system)
    talk.entropy = options.show_entropy
    if talk.is_completion:
        _note("this model has no chat template: what you write is continued as it is, one text for the whole conversation")
    held = _at_terminal if sys.stdin.isatty() and sys.stdout.isatty() else _through_pipe
    return held(talk)


# --- commands


def _help(talk: "Chat", rest: str) -> str:
    width = max(len(usage) for usage, _, _ in COMMANDS.values())
    return "\n".join([*(f"{usage:<{width}}  {text}" for usage, text, _ in COMMANDS.values()), "//…".ljust(width + 2) + SLASHES])


def _set(talk: "Chat", rest: str) -> str:
    from dantinox.config import settings_of
    from dantinox.config.flag_values import value_of
    from dantinox.config.request_overlay import REQUEST_KEYS

    name, *words = _words(rest) or [""]
    if not name:
        raise UserError("/set needs the name of a setting: /set temperature 0.7")
    if not words:
        talk.reset(name)
    else:
        talk.set(name, value_of(REQUEST_KEYS[name], words) if name in REQUEST_KEYS else " ".join(words))
    return f"{name} {_spelt(settings_of(talk.config)[name])}"


def _settings(talk: "Chat", rest: str) -> str:
    from dantinox.config import settings_of
    from dantinox.config.request_overlay import REQUEST_KEYS
    from dantinox.config.sections import FIELDS

    values = settings_of(talk.config)
    defaults = {name: FIELDS[key].default for name, key in REQUEST_KEYS.items()}
    changed = {name: value for name, value in values.items() if value != defaults[name] or name in talk.overrides}
    if talk.system:
        changed = {"system": talk.system} | changed
    lines = [f"{name} {_spelt(value)}" + (" (/set)" if name in talk.overrides else "") for name, value in changed.items()]
    return "\n".join([*lines, "all others have their defaults: dantinox chat --help"])


def _undo(talk: "Chat", rest: str) -> str:
    return f"taken back: {escape_name(talk.undo())}"


def _clear(talk: "Chat", rest: str) -> str:
    talk.clear()
    return "the conversation begins anew"


def _save(talk: "Chat", rest: str) -> str:
    path = _path(rest, "/save")
    talk.save(path)
    return f"saved {path}"


def _load(talk: "Chat", rest: str) -> str:
    path = _path(rest, "/load")
    talk.load(path)
    return f"{len(talk.messages) // 2} turns from {path}"


def _system(talk: "Chat", rest: str) -> str:
    talk.set_system(rest)
    return "the system message is set" if rest else "there is no system message"


def _entropy(talk: "Chat", rest: str) -> str:
    from dantinox.report.entropy_view import terminal_colours

    if rest not in ("", "on", "off"):
        raise UserError(f"/entropy is on or off, got {quote(rest)}")
    talk.entropy = rest == "on" if rest else not talk.entropy
    return "entropy is off" if not talk.entropy else SHADED if terminal_colours(sys.stdout) != "none" else BELOW


# Name → how it is written, what it does, and the function; those of None are carried out where the conversation is held.
COMMANDS: dict[str, tuple[str, str, Callable[["Chat", str], str] | None]] = {
    "help": ("/help", "these lines", _help),
    "set": (
        "/set KEY VALUE",
        "a setting of generation, router or kv, as /set temperature 0.7; without a value the run's own",
        _set,
    ),
    "settings": ("/settings", "the settings that are not the default", _settings),
    "retry": ("/retry", "answer the last turn anew", None),
    "undo": ("/undo", "take back the last turn and its answer", _undo),
    "clear": ("/clear", "begin anew with the same settings", _clear),
    "save": ("/save FILE", "write the conversation as a line of JSON", _save),
    "load": ("/load FILE", "go on with a saved conversation", _load),
    "system": ("/system TEXT", "the message that stands before the conversation; without a text none", _system),
    "entropy": ("/entropy on|off", "show the entropy of each token's distribution", _entropy),
    "quit": ("/quit", "leave, as Ctrl-D does", None),
}
SLASHES = "a text that begins with a slash"


def command(line: str) -> tuple[str, str] | None:
    """The command that a line is, (name, what stands behind it); None for what is said to the model."""
    if not line.startswith("/") or line.startswith("//"):
        return None
    name, _, rest = line[1:].strip().partition(" ")
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists them; // begins a text with a slash"
        raise UserError(f"there is no command /{escape_name(name)}: {hint}")
    return name, rest.strip()


def respond(talk: "Chat", line: str) -> "str | Generator[TextPart] | None":
    """What a line leads to: a sentence about a command, the pieces of an answer, or None where it ends the conversation.

    After a line that is a mistake the conversation stays as it was.
    """
    found = command(line)
    if found is None:
        return talk.answer(line[1:] if line.startswith("//") else line)
    name, rest = found
    run = COMMANDS[name][2]
    if run is not None:
        return run(talk, rest)
    return talk.retry() if name == "retry" else None


def _words(rest: str) -> list[str]:
    try:
        return shlex.split(rest)
    except ValueError as error:
        raise UserError(f"/set {escape_name(rest)}: {str(error).lower()}") from None


def _path(rest: str, name: str) -> Path:
    if not rest:
        raise UserError(f"{name} needs the name of a file")
    return Path(rest).expanduser()


def _spelt(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() and value else quote(value)


# --- where it is held


def _at_terminal(talk: "Chat") -> int:
    from dantinox.report.entropy_view import terminal_colours

    session = _session()
    colours = terminal_colours(sys.stdout)
    _note(f"{KEYS_HELP} /help lists the commands.")
    while True:
        try:
            line = session.prompt(PROMPT)
        except KeyboardInterrupt:  # the line is given up, not the conversation
            continue
        except EOFError:
            return 0
        if not line.strip():
            continue
        try:
            found = respond(talk, line.rstrip())
            if found is None:
                return 0
            if isinstance(found, str):
                print(found)
                continue
            with _interruptible() as asked:
                _show(found, talk.entropy, colours, lambda: bool(asked))
            if talk.finish_reason in ENDINGS:
                _note(ENDINGS[talk.finish_reason].format(talk.config.generation.max_new_tokens))
        except KeyboardInterrupt:
            _note("(stopped at once)")
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)


ENDINGS = {"interrupted": "(stopped)", "length": "(cut: max_new_tokens is {})", "context": "(cut: the context is full)"}


def _through_pipe(talk: "Chat") -> int:
    code = 0
    for number, data in enumerate(sys.stdin.buffer, 1):
        try:
            line = data.decode().rstrip("\r\n")
            if not line.strip():
                continue
            found = respond(talk, line)
            if found is None:
                return code
            if isinstance(found, str):
                _note(found)
            elif talk.entropy:
                _show(found, True, "none", lambda: False)
            else:
                for piece in found:
                    print(piece.text, end="", flush=True)
                print(flush=True)
        except UnicodeDecodeError as error:
            raise UserError(f"standard input is not UTF-8 text: byte {error.start} of line {number} is wrong") from None
        except UserError as error:
            code = MISTAKE
            print(f"error: {error} (line {number})", file=sys.stderr, flush=True)
    return code


def _show(pieces: "Generator[TextPart]", entropy: bool, colours: Any, stopped: Callable[[], bool]) -> None:
    """Prints an answer as it comes; without colours one that shows its entropies once it is complete."""
    from dantinox.report.entropy_view import digit_lines, shade_text

    waits = entropy and colours == "none"
    found = []
    with contextlib.closing(pieces):  # which keeps the answer of one that is stopped
        for piece in pieces:
            if waits:
                found.append((piece.text, piece.entropy))
            else:
                print(shade_text(piece.text, piece.entropy if entropy else None, colours), end="", flush=True)
            if stopped():
                break
    print_lines(lambda width: digit_lines(found, width))
    if not waits:
        print(flush=True)


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """A list that Ctrl-C fills, to be looked at between two pieces; a second one is a KeyboardInterrupt.

    An exception at any place could leave what is being compiled or decoded half done.
    """
    asked: list[int] = []

    def stop(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _session() -> Any:
    """The line editor, with the history of all conversations of this user."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import NestedCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    from dantinox.config.request_overlay import REQUEST_KEYS
    from dantinox.platform import cache_folder

    keys = KeyBindings()
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    names = {f"/{name}": None for name in COMMANDS}
    words: Any = {"/set": dict.fromkeys(REQUEST_KEYS), "/entropy": {"on": None, "off": None}}
    completer = NestedCompleter.from_nested_dict(names | words)
    history: Any = InMemoryHistory()
    path = cache_folder() / "chat_history"
    with contextlib.suppress(OSError):  # a home that cannot be written to has no history
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # what one says is nobody else's
        history = FileHistory(str(path))
    return PromptSession(
        history=history,
        multiline=True,
        key_bindings=keys,
        prompt_continuation="… ",
        completer=completer,
        complete_while_typing=False,
    )


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
