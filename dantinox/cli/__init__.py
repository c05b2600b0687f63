"""The command line: the table of all commands, and `main`, which parses `dantinox COMMAND …` and calls one."""

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from dantinox import __version__
from dantinox.cli.common import backend_problem, choose_run, plain_warnings
from dantinox.config import UserError
from dantinox.config.flags import Parser

USER_ERROR, INTERRUPTED = 2, 130


def entry(command: str | None = None) -> None:
    """The process: runs a command with the arguments of `sys.argv` and exits with its code."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started the process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        else:
            # Text and JSON are UTF-8 whatever the locale; a file name that is not text is shown escaped.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    sys.exit(main(([command] if command else []) + sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Runs a command; a mistake of the user is one sentence on stderr and the exit code 2."""
    argv = list(argv)
    debug = "--debug" in argv
    if not debug:
        plain_warnings()
    try:
        try:
            options = _parser(next((word for word in argv if not word.startswith("-")), "")).parse(argv)
            choose_run(options)
            code: int = options.run(options)
        finally:
            sys.stdout.flush()  # here, where a failure can be reported
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
        _discard_output()  # the reader of a pipe has gone
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
        print(f"error: {error.filename or 'the output'}: {error.strerror or error}", file=sys.stderr)
        return USER_ERROR


def _discard_output() -> None:
    """Sends what is left of the output nowhere, the interpreter's last flush included: it cannot be written."""
    with contextlib.suppress(OSError):  # a stream in memory has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser(chosen: str = "") -> Parser:
    """The parser of all commands, with the flags of `chosen` alone: those of the others are not looked at."""
    parser = Parser(prog="dantinox", description="Train transformers, or import them, fine-tune them and generate text.")
    parser.add_argument("--version", action="version", version=f"dantinox {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, (module, function, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name != chosen:
            continue
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        home = import_module(f"dantinox.cli.{module}")
        command.set_defaults(run=getattr(home, function))
        if name != "doctor":
            getattr(home, f"{function.rstrip('_')}_flags")(command)
    return parser


# Name → the module of `dantinox.cli` and its function, whose flags `…_flags` adds, and what the command does.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "train": ("train", "train", "Train a model, or fine-tune one, from a YAML file into a run directory."),
    "find-lr": ("train", "find_lr", "Run a learning-rate range test and suggest a value."),
    "sweep": ("train", "sweep", "Train with several settings, one after the other, into one table and one plot."),
    "init": ("train", "init", "Write a commented YAML file to start from."),
    "merge-lora": ("runs", "merge", "Merge LoRA adapters into their base weights, as an ordinary run."),
    "generate": ("generate", "generate", "Continue a prompt with the model of a run."),
    "chat": ("chat", "chat", "Hold a conversation with a model at the terminal."),
    "serve": ("serve", "serve", "Serve a model over HTTP: the OpenAI and KoboldAI protocols, and a web page."),
    "import": ("runs", "import_", "Make a run of a pretrained checkpoint: Hugging Face, GGUF."),
    "export": ("runs", "export", "Write a run as a folder of transformers or a GGUF file."),
    "explain": ("measure", "explain", "Show how each sampling step changes the next-token distribution."),
    "calibrate": ("measure", "calibrate", "Measure what a model's presets need, and save it in its run."),
    "eval": ("measure", "evaluate", "Measure perplexity or tasks; compare samplers, or compressed caches."),
    "info": ("measure", "info", "Describe a run: settings, size, training, and the error of quantized weights."),
    "verify": ("runs", "verify", "Compare every file of a run with what was written."),
    "plan": ("measure", "plan", "Compile for a target device you need not own; report memory and FLOPs."),
    "plot": ("plot", "plot", "Draw the losses of runs over each other, by step, tokens or time."),
    "profile": ("plot", "profile", "Trace steps of a training, or a generation, and list the most expensive operations."),
    "doctor": ("measure", "doctor", "Show versions, devices and speed of this machine."),
}
