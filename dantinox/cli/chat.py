"""`dantinox chat`: its flags, its slash commands, and conversations in a terminal or through a
pipe.
"""

import argparse
import contextlib
import difflib
import itertools
import os
import queue
import shlex
import shutil
import sys
import termios
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dantinox.cli.common import (
    add_chat_template,
    add_lora,
    add_run,
    chosen_template,
    given_loras,
    given_settings,
    print_lines,
    use_compilation_cache,
)
from dantinox.config.flags import Parser, add_config_flags
from dantinox.files import UserError, escape_name, quote

if TYPE_CHECKING:
    from dantinox.generation.api.chat_session import Chat, Parts
    from dantinox.generation.sample_text import TextPart

PROMPT = "> "
FAILED = 2  # exit code if a line from a pipe caused an error
LOCAL_FLAGS = 3  # the index in the result of `tcgetattr`
WAITING = "compiling, and reading the prompt …"
KEYS_HELP = (
    "Enter sends, Alt-Enter starts a new line, Ctrl-C stops an answer"
    " and keeps its text, Ctrl-D quits."
)
SHADED = (
    "each token is shaded by the entropy of its distribution, from dark"
    " (0 bits) to light (8 bits and more)"
)
BELOW = (
    "the rounded entropy in bits is printed below each token when the answer is complete, because"
    " this output has no colors"
)


def add_chat_flags(command: Parser) -> None:
    add_run(command)
    add_chat_template(command)
    add_lora(command)
    command.add_argument(
        "--system", default="", metavar="TEXT", help="system message of the conversation"
    )
    command.add_argument("--show_entropy", action="store_true", help="start with /entropy on")
    used = ("system", "chat_template", "show_entropy", "max_new_tokens", "seed", "temperature",
            "top_k", "top_p", "min_p",
            "repetition_penalty", "weights", "kv_dtype")  # fmt: skip
    add_config_flags(command, ("generation", "router", "kv"), used)


def chat(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code: 2 if a line from a pipe caused an error."""
    settings = given_settings(options)
    from dantinox.config import overlay
    from dantinox.run import find_chat_template, load_run_config, open_run

    directory = open_run(options.run_dir, check=False)  # `load_opened` checks it
    base = load_run_config(directory)
    config = overlay(base, settings, "command line")
    template_path = find_chat_template(directory)
    use_compilation_cache()
    from dantinox.generation.api.chat_session import Chat
    from dantinox.generation.api.loaded_model import load_opened

    loras = given_loras(options)
    run = load_opened(directory, base, config.generation.tensor_parallel, loras)
    template = chosen_template(options, template_path, run.tokenizer)
    conversation = Chat(run, template, settings, next(iter(loras), None))
    conversation.set_system(options.system)
    conversation.entropy = options.show_entropy
    if conversation.is_completion:
        _note(
            "this model has no chat template: it continues your text, and"
            " the conversation is a single text"
        )
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return _run_terminal(conversation) if is_terminal else _run_pipe(conversation)


# --- commands


def _help(conversation: "Chat", rest: str) -> str:
    width = max(len(usage) for usage, _, _ in COMMANDS.values())
    lines = [f"{usage:<{width}}  {text}" for usage, text, _ in COMMANDS.values()]
    return "\n".join([*lines, "//…".ljust(width + 2) + SLASHES])


def _set(conversation: "Chat", rest: str) -> str:
    from dantinox.config import settings_of
    from dantinox.config.flag_values import value_of
    from dantinox.config.request_overlay import REQUEST_KEYS

    name, *words = _words(rest) or [""]  # the value may be a list of words
    if not name:
        raise UserError("/set needs the name of a setting: /set temperature 0.7")
    if not words:
        conversation.reset(name)
    else:
        conversation.set(
            name, value_of(REQUEST_KEYS[name], words) if name in REQUEST_KEYS else " ".join(words)
        )
    return f"{name} {_format(settings_of(conversation.config)[name])}"


def _settings(conversation: "Chat", rest: str) -> str:
    from dantinox.config import settings_of
    from dantinox.config.request_overlay import REQUEST_KEYS
    from dantinox.config.sections import FIELDS

    values = settings_of(conversation.config)
    defaults = {name: FIELDS[key].default for name, key in REQUEST_KEYS.items()}
    changed = {
        name: value
        for name, value in values.items()
        if value != defaults[name] or name in conversation.overrides
    }
    if conversation.system:
        changed = {"system": conversation.system} | changed
    lines = [
        f"{name} {_format(value)}" + (" (/set)" if name in conversation.overrides else "")
        for name, value in changed.items()
    ]
    return "\n".join([*lines, "all other settings have their defaults: dantinox settings"])


def _undo(conversation: "Chat", rest: str) -> str:
    return f"removed: {escape_name(conversation.undo())}"


def _clear(conversation: "Chat", rest: str) -> str:
    conversation.clear()
    return "started a new conversation"


def _save(conversation: "Chat", rest: str) -> str:
    path = _path(rest, "/save")
    conversation.save(path)
    return f"saved {path}"


def _load(conversation: "Chat", rest: str) -> str:
    path = _path(rest, "/load")
    conversation.load(path)
    return f"loaded {len(conversation.messages) // 2} turns from {path}"


def _system(conversation: "Chat", rest: str) -> str:
    conversation.set_system(rest)
    return "the system message is set" if rest else "there is no system message"


def _entropy(conversation: "Chat", rest: str) -> str:
    from dantinox.report.entropy_view import terminal_colors

    if rest not in ("", "on", "off"):
        raise UserError(f"/entropy must be on or off, got {quote(rest)}")
    conversation.entropy = rest == "on" if rest else not conversation.entropy
    if not conversation.entropy:
        return "entropy is off"
    return BELOW if terminal_colors(sys.stdout) == "none" else SHADED


# Name → usage, description and function. `respond` handles the commands without a function.
COMMANDS: dict[str, tuple[str, str, Callable[["Chat", str], str] | None]] = {
    "help": ("/help", "show the commands", _help),
    "set": (
        "/set KEY VALUE",
        (
            "set a setting of generation, router or kv, such as /set"
            " temperature 0.7; without a value: reset it"
        ),
        _set,
    ),
    "settings": ("/settings", "show the settings that differ from their default", _settings),
    "retry": ("/retry", "generate another answer to the last message", None),
    "undo": ("/undo", "remove the last message and its answer", _undo),
    "clear": ("/clear", "start a new conversation with the same settings", _clear),
    "save": ("/save FILE", "write the conversation to a JSON file", _save),
    "load": ("/load FILE", "continue a saved conversation", _load),
    "system": ("/system TEXT", "set the system message; without a text: remove it", _system),
    "entropy": ("/entropy on|off", "show the entropy of each token's distribution", _entropy),
    "quit": ("/quit", "quit, like Ctrl-D", None),
}
SLASHES = "send a message that begins with a slash"


def command(line: str) -> tuple[str, str] | None:
    """Parses a line. Returns the name of a command and the rest of the line, or None for a message
    to the model.
    """
    if not line.startswith("/") or line.startswith("//"):
        return None
    name, _, rest = line[1:].strip().partition(" ")
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        fallback = (
            "/help lists the commands; to send a message that begins with a slash, begin it with //"
        )
        hint = f"did you mean /{near[0]}?" if near else fallback
        raise UserError(f"there is no command /{escape_name(name)}: {hint}")
    return name, rest.strip()


def respond(conversation: "Chat", line: str) -> "str | Generator[TextPart] | None":
    """Runs a command or starts an answer.

    Returns:
      The message of a command, the parts of an answer, or None for the command that quits.

    Raises:
      UserError: the line is invalid; the conversation stays unchanged.
    """
    found = command(line)
    if found is None:
        return conversation.answer(line[1:] if line.startswith("//") else line)
    name, rest = found
    run = COMMANDS[name][2]
    if run is not None:
        return run(conversation, rest)
    return conversation.retry() if name == "retry" else None


def _words(rest: str) -> list[str]:
    try:
        return shlex.split(rest)
    except ValueError as error:
        raise UserError(f"/set {escape_name(rest)}: {str(error).lower()}") from None


def _path(rest: str, name: str) -> Path:
    if not rest:
        raise UserError(f"{name} needs a file name")
    return Path(rest).expanduser()


def _format(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() and value else quote(value)


# --- terminal and pipe


def _run_terminal(conversation: "Chat") -> int:
    from dantinox.report.entropy_view import terminal_colors

    session = _session()
    colors = terminal_colors(sys.stdout)
    background = _Background()
    background.start(conversation.warm_up)
    conversation.iterate = background.iterate
    _note(f"{KEYS_HELP} /help lists the commands.")
    with _keep_typed_text():
        _converse(conversation, session, colors)
    if background.is_busy():  # the end of the interpreter would wait for the compiler
        from dantinox.programs import exit_now

        sys.stdout.flush()
        exit_now(0)
    return 0


def _converse(conversation: "Chat", session: Any, colors: Any) -> None:
    """Reads lines and answers them until the user quits."""
    while True:
        try:
            line = session.prompt(PROMPT)
        except KeyboardInterrupt:  # discards the line, not the conversation
            continue
        except EOFError:
            return
        if not line.strip():
            continue
        try:
            found = respond(conversation, line.rstrip())
            if found is None:
                return
            if isinstance(found, str):
                print(found)
                continue
            _show(found, conversation.entropy, colors, shutil.get_terminal_size().columns)
            if conversation.finish_reason in FINISH_NOTES:
                _note(
                    FINISH_NOTES[conversation.finish_reason].format(
                        conversation.config.generation.max_new_tokens
                    )
                )
        except KeyboardInterrupt:
            _note("\n(stopped)")
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)


@contextlib.contextmanager
def _keep_typed_text() -> Iterator[None]:
    """Keeps the text that is typed during an answer, which a terminal discards on Ctrl-C, for the
    next prompt.
    """
    before = termios.tcgetattr(sys.stdin)
    changed = list(before)
    changed[LOCAL_FLAGS] |= termios.NOFLSH
    termios.tcsetattr(sys.stdin, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


class _Background:
    """Runs functions one after the other in daemon threads, so that Ctrl-C does not wait for the
    compiler.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()

    def is_busy(self) -> bool:
        return self._turn.locked()

    def start(self, work: Callable[[], None]) -> None:
        """Runs `work` after the earlier functions. A UserError is ignored: the first answer raises
        it again.
        """

        def run() -> None:
            with self._turn, contextlib.suppress(UserError):
                work()

        threading.Thread(target=run, daemon=True).start()

    def iterate(self, start: "Callable[[], Parts]") -> "Parts":
        """Yields the items of `start()`, which another thread computes.

        If this generator is closed, that thread ends before its next item.
        """
        items = queue.SimpleQueue[Any]()
        stopped = threading.Event()
        end = object()

        def work() -> None:
            try:
                with contextlib.closing(start()) as parts:
                    while not stopped.is_set() and (item := next(parts, end)) is not end:
                        items.put(item)
            except BaseException as error:
                items.put(error)
            items.put(end)

        self.start(work)
        try:
            while (item := items.get()) is not end:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stopped.set()


FINISH_NOTES = {
    "length": "(truncated: max_new_tokens is {})",
    "loop": "(stopped: the text repeats itself)",
    "context": "(truncated: the context is full)",
}


def _run_pipe(conversation: "Chat") -> int:
    code = 0
    for number, data in enumerate(sys.stdin.buffer, 1):
        try:
            line = data.decode().rstrip("\r\n")
            if not line.strip():
                continue
            found = respond(conversation, line)
            if found is None:
                return code
            if isinstance(found, str):
                _note(found)
            elif conversation.entropy:
                _show(found, True, "none")
            else:
                for part in found:
                    print(part.text, end="", flush=True)
                print(flush=True)
        except UnicodeDecodeError as error:
            raise UserError(
                f"standard input is not UTF-8 text: byte {error.start} of line {number} is invalid"
            ) from None
        except UserError as error:
            code = FAILED
            print(f"error: {error} (line {number})", file=sys.stderr, flush=True)
    return code


def _show(
    parts: "Generator[TextPart]", entropy: bool, colors: Any, width: int | None = None
) -> None:
    """Prints an answer while it is generated, or only when it is complete if entropies are shown
    without colors.

    Args:
      width: the columns of a terminal, for lines that break between words; None: lines are not
        broken.
    """
    from dantinox.report.entropy_view import digit_lines, shade_text

    is_deferred = entropy and colors == "none"
    wrap = _wrapper(width) if width and not entropy else str
    found = []
    with contextlib.closing(parts):  # closing keeps the text of a stopped answer
        with _waiting_note() if width else contextlib.nullcontext():
            first = list(itertools.islice(parts, 1))
        for part in itertools.chain(first, parts):
            if is_deferred:
                found.append((part.text, part.entropy))
            else:
                print(
                    wrap(shade_text(part.text, part.entropy if entropy else None, colors)),
                    end="",
                    flush=True,
                )
    print_lines(lambda width: digit_lines(found, width))
    if not is_deferred:
        print(flush=True)


@contextlib.contextmanager
def _waiting_note(seconds: float = 0.5) -> Iterator[None]:
    """Shows a note in a terminal while the first part of an answer takes longer than `seconds`."""
    shown = threading.Event()

    def show() -> None:
        shown.set()
        print(WAITING, end="", flush=True)

    timer = threading.Timer(seconds, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if shown.is_set():
            print("\r\x1b[K", end="", flush=True)


def _wrapper(width: int) -> Callable[[str], str]:
    """Returns a function that prepares successive parts of a text for a terminal, so that lines
    break between words.

    A word is shown as it is generated. If it reaches the end of the line, it is erased and begins
    the next line.
    """
    from rich.cells import cell_len

    column = 0  # the cells of the line that are in use
    word = ""  # the word at its end

    def wrap(text: str) -> str:
        nonlocal column, word
        shown = ""
        for character in text:
            cells = cell_len(character)
            used = cell_len(word)
            if character != "\n" and column + cells >= width:  # the last column stays empty
                if character == " ":
                    character = "\n"
                elif 0 < used < column:
                    shown += f"\x1b[{used}D\x1b[K\n{word}"
                    column = used
                else:  # the word fills the line
                    shown = shown + "\n"
                    column = 0
                    word = ""
            column = 0 if character == "\n" else column + cells
            word = "" if character in " \n" else word + character
            shown += character
        return shown

    return wrap


def _session() -> Any:
    """Returns the line editor, with the input history of this user's conversations."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import NestedCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    from dantinox.config.request_overlay import REQUEST_KEYS
    from dantinox.machine import cache_folder

    keys = KeyBindings()
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    names = {f"/{name}": None for name in COMMANDS}
    words: Any = {"/set": dict.fromkeys(REQUEST_KEYS), "/entropy": {"on": None, "off": None}}
    completer = NestedCompleter.from_nested_dict(names | words)
    history: Any = InMemoryHistory()
    path = cache_folder() / "chat_history"
    with contextlib.suppress(OSError):  # no history if the cache folder cannot be written
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # private to this user
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
