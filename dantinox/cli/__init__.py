"""The command line, `dantinox train | find-lr | sweep | init | merge-lora | generate | chat | serve | import | export |
explain | calibrate | eval | info | verify | plan | plot | profile | doctor`: parses, calls, prints."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence

from dantinox import __version__
from dantinox.cli import chat, generate, interop, lora, measure, serve, sweep, train, verify, watch
from dantinox.cli.common import plain_warnings
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
            options = _parser().parse(argv)
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


def _parser() -> Parser:
    parser = Parser(prog="dantinox", description="Train transformers, or import them, fine-tune them and generate text.")
    parser.add_argument("--version", action="version", version=f"dantinox {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, (run, add_flags, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(run=run)
        add_flags(command)
    return parser


# Name → what it runs, what adds its flags, and what it is for.
COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], Callable[[argparse.ArgumentParser], None], str]] = {
    "train": (train.train, train.train_flags, "Train a model, or fine-tune one, from a YAML file into a run directory."),
    "find-lr": (train.find_lr, train.find_lr_flags, "Let the learning rate climb in a short training, and say which to try."),
    "sweep": (
        sweep.sweep,
        sweep.sweep_flags,
        "Train with several settings, one after the other, into one table and one plot.",
    ),
    "init": (train.init, train.init_flags, "Write a commented YAML file to start from."),
    "merge-lora": (lora.merge, lora.merge_flags, "Make an ordinary run of low-rank adapters and the weights they are for."),
    "generate": (generate.generate, generate.generate_flags, "Continue a prompt with the model of a run."),
    "chat": (chat.chat, chat.chat_flags, "Hold a conversation with a model at the terminal."),
    "serve": (serve.serve, serve.serve_flags, "Serve a model over HTTP: OpenAI's and KoboldAI's dialects, and a page."),
    "import": (interop.import_, interop.import_flags, "Make a run of a checkpoint of another program: Hugging Face, GGUF."),
    "export": (interop.export, interop.export_flags, "Write a run as a folder of transformers or a GGUF file."),
    "explain": (measure.explain, measure.explain_flags, "Show what each sampling step makes of the token behind a prompt."),
    "calibrate": (
        measure.calibrate,
        measure.calibrate_flags,
        "Measure what a model's presets need, and save it in its run.",
    ),
    "eval": (measure.evaluate, measure.evaluate_flags, "Measure perplexity or tasks; compare samplers, or compressed caches."),
    "info": (measure.info, measure.info_flags, "Describe a run: settings, size, training, and what narrow weights cost."),
    "verify": (verify.verify, verify.verify_flags, "Compare every file of a run with what was written."),
    "plan": (
        measure.plan,
        measure.plan_flags,
        "Compile a run's programs for a machine one need not have, and say what they take.",
    ),
    "plot": (watch.plot, watch.plot_flags, "Draw the losses of runs over each other, by step, tokens or time."),
    "profile": (
        watch.profile,
        watch.profile_flags,
        "Trace some steps of a training, or a generation, and name the dearest operations.",
    ),
    "doctor": (measure.doctor, lambda _: None, "Show versions, devices and speed of this machine."),
}
