"""The command line: the table of all commands, and `main`, which parses `dantinox COMMAND …` and
runs it.
"""

import argparse
import contextlib
import difflib
import os
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any

from dantinox.cli.common import backend_problem, choose_run, plain_warnings
from dantinox.cli.garbage_collection import pause_garbage_collection
from dantinox.cli.interrupts import INTERRUPTED, exit_interrupted, watch_interrupts
from dantinox.config.flags import Parser
from dantinox.config.help_pages import first_page
from dantinox.files import UserError, escape_name

USER_ERROR = 2


def entry(command: str | None = None) -> None:
    """Runs a command with the arguments of `sys.argv` and exits the process with its code."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        else:
            # Text and JSON are UTF-8 in every locale; a file name that is not valid UTF-8 is shown
            # escaped.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    watch_interrupts()
    pause_garbage_collection()
    code = main(([command] if command else []) + sys.argv[1:])
    if code == INTERRUPTED:
        exit_interrupted()
    sys.exit(code)


def main(argv: Sequence[str]) -> int:
    """Runs a command and returns its exit code; a user error prints one sentence on stderr and
    gives exit code 2.
    """
    argv = list(argv)
    debug = "--debug" in argv
    if not debug:
        plain_warnings()
    try:
        try:
            if not argv:
                print(first_page(parser_of([])), end="")
                return USER_ERROR
            command = next((word for word in argv if not word.startswith("-")), "")
            if command and command not in COMMANDS:
                near = difflib.get_close_matches(command, COMMANDS, 1)
                hint = (
                    f", did you mean {near[0]}?" if near else ": dantinox --help lists the commands"
                )
                raise UserError(f"unknown command {escape_name(command)}{hint}")
            options = parser_of([command]).parse(argv)
            choose_run(options)
            code: int = options.run(options)
        finally:
            sys.stdout.flush()  # here and not at exit, so that a failure to write can be reported
        return code
    except UserError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()  # the reader has closed the pipe
        return 0
    except (AssertionError, RuntimeError):
        problem = None if debug else backend_problem()
        if problem is None:
            raise
        print(f"error: {problem}", file=sys.stderr)
        return USER_ERROR
    except OSError as error:
        if debug:
            raise
        _discard_output()
        print(
            f"error: {error.filename or 'the output'}: {error.strerror or error}", file=sys.stderr
        )
        return USER_ERROR


def _discard_output() -> None:
    """Redirects stdout to the null device, so that further writes and the interpreter's last flush
    do not fail.
    """
    with contextlib.suppress(OSError):  # a stream in memory has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser_of(chosen: Collection[str]) -> Parser:
    """Returns the parser of all commands. To save time, only the commands in `chosen` get their
    flags.
    """
    parser = Parser(
        prog="dantinox",
        description="Train transformers, or import them, fine-tune them and generate text.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, (module, function, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name not in chosen:
            continue
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        implementation = import_module(f"dantinox.cli.{module}")
        command.set_defaults(run=getattr(implementation, function))
        add_flags = getattr(implementation, f"add_{function.rstrip('_')}_flags", None)
        if add_flags is not None:  # `doctor` has no flags
            add_flags(command)
    return parser


def command_parser(name: str) -> Parser:
    """Returns the parser of a command with all its flags.

    Args:
      name: a command such as `train`, or a subcommand such as `eval ppl`.

    Raises:
      UserError: there is no such command.
    """
    first, *rest = name.split() or [""]
    parser = parser_of([first])
    for word in (first, *rest):
        choices = next(
            (action.choices for action in parser.own if isinstance(action.choices, dict)), {}
        )
        if word not in choices:
            raise UserError(
                f"there is no command {escape_name(name)}: the commands are {', '.join(choices)}"
            )
        parser = choices[word]
    return parser


class _Version(argparse.Action):
    """`--version`: looks up the version only if it is printed, because the lookup takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        from dantinox import __version__

        print(f"dantinox {__version__}")
        parser.exit()


# Name → module of `dantinox.cli`, function, and description; `add_FUNCTION_flags` of the module
# adds the flags.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "train": (
        "train",
        "train",
        "Train or fine-tune a model from a YAML file into a run directory.",
    ),
    "find-lr": ("train", "find_lr", "Run a learning-rate range test and suggest a value."),
    "sweep": (
        "train",
        "sweep",
        "Train with several settings in turn and compare the results in a table and a plot.",
    ),
    "speedrun": (
        "train",
        "speedrun",
        "Pretrain, fine-tune and evaluate a small chat model, from text to a report.",
    ),
    "init": ("train", "init", "Write a commented YAML file to start from."),
    "merge-lora": (
        "runs",
        "merge",
        "Merge LoRA adapters into their base weights and write an ordinary run.",
    ),
    "generate": ("generate", "generate", "Continue a prompt with the model of a run."),
    "chat": ("chat", "chat", "Chat with a model in the terminal."),
    "serve": (
        "serve",
        "serve",
        (
            "Serve a model over HTTP: the APIs of OpenAI, Ollama,"
            " KoboldAI and llama.cpp, and a web page."
        ),
    ),
    "import": (
        "runs",
        "import_",
        "Import a pretrained checkpoint (Hugging Face, GGUF) into a run directory.",
    ),
    "export": (
        "runs",
        "export",
        "Export a run as a Hugging Face Transformers folder or a GGUF file.",
    ),
    "explain": (
        "measure",
        "explain",
        "Show how each sampling step changes the next-token distribution.",
    ),
    "calibrate": (
        "measure",
        "calibrate",
        "Measure the values that a model's presets need, and save them in its run.",
    ),
    "eval": (
        "evaluate",
        "evaluate",
        "Measure perplexity or tasks; compare samplers or compressed caches.",
    ),
    "runs": (
        "runs",
        "list_",
        "List the runs below a folder: state, losses, time, and the settings that differ.",
    ),
    "info": (
        "measure",
        "info",
        "Describe a run: settings, size and training; compare quantized weights.",
    ),
    "verify": ("runs", "verify", "Check every file of a run against its checksum."),
    "plan": (
        "measure",
        "plan",
        "Compile for a target device you do not have, and report memory and FLOPs.",
    ),
    "plot": ("plot", "plot", "Plot the losses of runs in one figure, by step, tokens or time."),
    "profile": (
        "plot",
        "profile",
        "Trace training steps or a generation, and list the most expensive operations.",
    ),
    "doctor": ("measure", "doctor", "Show versions, devices and speed of this machine."),
    "settings": ("settings", "settings", "Search all settings by name, help, range or default."),
    "completion": ("settings", "completion", "Print a completion script for bash, zsh or fish."),
}
