"""The command line: `dantinox train | init | generate | explain | calibrate | eval | info | doctor`. Parses, calls, prints."""

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence

from dantinox.cli import flags, measure
from dantinox.cli.common import use_compilation_cache
from dantinox.config import UserError
from dantinox.config.flags import Parser, overrides

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
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
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
    parser = Parser(prog="dantinox", description="Train transformers from one YAML file and generate text with them.")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, (run, add_flags, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(run=run)
        add_flags(command)
    return parser


def _train(options: argparse.Namespace) -> int:
    from dantinox.config import dump_config, load_config
    from dantinox.config.start import DEFAULT, find_config
    from dantinox.run import newest_run

    if options.resume and options.run_dir is None:
        newest = newest_run()
        hint = f": the newest is {newest}" if newest else ", and there is none in runs/"
        raise UserError(f"--resume needs --run_dir to say which run to go on with{hint}")
    path = options.config
    if path is None:
        saved = None if options.run_dir is None else options.run_dir / "config.yaml"
        path = saved if options.resume and saved is not None and saved.is_file() else DEFAULT
    config = load_config(find_config(path), overrides(options))
    if options.print_config:
        print(dump_config(config), end="")
        return 0
    use_compilation_cache()
    from dantinox.training import dry_run, launch

    if options.dry_run:
        for line in dry_run(config):
            print(line, flush=True)
        return 0
    launch(config, run_dir=options.run_dir, resume=options.resume)
    return 0


def _init(options: argparse.Namespace) -> int:
    from dantinox.config.start import starting_config
    from dantinox.files import atomic_write

    if options.file.exists():
        raise UserError(f"{options.file} is there already: choose another name")
    atomic_write(options.file, starting_config(options.file))
    return 0


def _generate(options: argparse.Namespace) -> int:
    from dantinox.cli.generate import generate

    return generate(options)


# Name → what it runs, what adds its flags, and what it is for.
COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], Callable[[argparse.ArgumentParser], None], str]] = {
    "train": (_train, flags.train, "Train a model from a YAML file into a run directory."),
    "init": (_init, flags.init, "Write a commented YAML file to start from."),
    "generate": (_generate, flags.generate, "Continue a prompt with a trained model."),
    "explain": (measure.explain, measure.explain_flags, "Show what each sampling step makes of the token behind a prompt."),
    "calibrate": (
        measure.calibrate,
        measure.calibrate_flags,
        "Measure on a text what a preset of this model needs, and save it in the run.",
    ),
    "eval": (
        measure.evaluate,
        measure.evaluate_flags,
        "Compare samplers, or compressed caches, on a run's own validation text.",
    ),
    "info": (measure.info, measure.info_flags, "Describe a run: settings, size, training, and what narrow weights cost."),
    "doctor": (measure.doctor, lambda _: None, "Show versions, devices and speed of this machine."),
}
