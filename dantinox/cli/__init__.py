"""The command line: `dantinox train | generate | explain | calibrate | eval | info | doctor`. Parses, calls, prints."""

import argparse
import contextlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dantinox.cli import flags
from dantinox.cli.common import given_prompt, given_settings, use_compilation_cache
from dantinox.config import UserError, overlay
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
            sys.stdout.flush()  # here, where a failure can be told
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
    from dantinox.run import newest_run

    if options.resume and options.run_dir is None:
        newest = newest_run()
        hint = f": the newest is {newest}" if newest else ", and there is none in runs/"
        raise UserError(f"--resume needs --run_dir to say which run to go on with{hint}")
    path = options.config
    if path is None:
        saved = None if options.run_dir is None else options.run_dir / "config.yaml"
        path = saved if options.resume and saved is not None and saved.is_file() else flags.DEFAULT_CONFIG
    config = load_config(path, overrides(options))
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


def _generate(options: argparse.Namespace) -> int:
    from dantinox.cli.generate import generate

    return generate(options)


def _check_png(path: Path | None) -> None:
    if path is not None and path.suffix != ".png":
        raise UserError(f"--plot must name a .png file, got {path}")
    if path is not None:
        from dantinox.files import check_writable

        check_writable(path, "--plot")


def _explain(options: argparse.Namespace) -> int:
    _check_png(options.plot)
    settings = given_settings(options)
    from dantinox.files import atomic_write
    from dantinox.run import load_run_config, open_run

    overlay(load_run_config(open_run(options.run_dir)), settings, "command line")
    prompt = given_prompt(options)
    use_compilation_cache()
    from dantinox.generation import load
    from dantinox.measure.explain import explain
    from dantinox.measure.explain_view import explanation_lines, plot_explanation

    record = explain(load(options.run_dir), prompt, settings, options.show).to_dict()
    if options.json:
        print(json.dumps(record, ensure_ascii=False))
    else:
        for line in explanation_lines(record, shutil.get_terminal_size((100, 24)).columns):
            print(line)
    if options.plot is not None:
        plot_explanation(record, options.plot, atomic_write)
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    _check_png(options.plot)
    flags.check_calibrate(options)
    use_compilation_cache()
    from dantinox.files import atomic_write

    record, lines, plot = {"router": _calibrate_router, "kv": _calibrate_kv}[options.what](options)
    if options.json:
        print(json.dumps(record, ensure_ascii=False))
    else:
        for line in lines(shutil.get_terminal_size((100, 24)).columns):
            print(line)
    if options.plot is not None:
        plot(record, options.plot, atomic_write)
    return 0


def _calibrate_router(options: argparse.Namespace) -> tuple[dict[str, Any], Callable, Callable]:
    """The record, what makes lines of a width of it, and what draws it."""
    from dantinox.measure.calibrate_router import TOKENS, calibrate_router
    from dantinox.measure.calibrate_router_view import calibration_lines, plot_calibration

    tokens = TOKENS if options.tokens is None else options.tokens
    record = calibrate_router(options.run_dir, tokens=tokens, data_path=options.data_path)
    return record, lambda width: calibration_lines(record, width), plot_calibration


def _calibrate_kv(options: argparse.Namespace) -> tuple[dict[str, Any], Callable, Callable]:
    from dantinox.measure.calibrate_kv import SEQUENCES, calibrate_kv
    from dantinox.measure.calibrate_kv_view import kv_calibration_lines, plot_kv_calibration

    record = calibrate_kv(
        options.run_dir,
        sequences=SEQUENCES if options.sequences is None else options.sequences,
        data_path=options.data_path,
        output=options.output,
        from_results=options.from_results,
        loss=not options.no_loss,
        progress=_tell,
    )
    return record, lambda width: kv_calibration_lines(record, width, options.output), plot_kv_calibration


def _eval(options: argparse.Namespace) -> int:
    flags.check_evaluate(options)
    from dantinox.files import atomic_write, check_folder
    from dantinox.run import open_run

    out = options.out or open_run(options.run_dir).path / "evaluation"
    check_folder(out, "--out")
    use_compilation_cache()
    record, lines, write = {"sampling": _eval_sampling, "kv": _eval_kv}[options.what](options)
    for line in lines(record, shutil.get_terminal_size((100, 24)).columns):
        print(line)
    write(record, out, atomic_write)
    return 0


def _eval_sampling(options: argparse.Namespace) -> tuple[dict[str, Any], Callable, Callable]:
    """The record, what makes lines of it, and what writes its files."""
    from dantinox.studies.sampling import evaluate_sampling
    from dantinox.studies.sampling_view import sampling_lines, write_sampling

    record = evaluate_sampling(
        options.run_dir,
        options.reference,
        quick=options.quick,
        methods=options.methods,
        progress=_tell,
        prompts=options.prompts,
        seeds=options.seeds,
        tokens=options.tokens,
        trials=options.trials,
    )
    return record, sampling_lines, write_sampling


def _eval_kv(options: argparse.Namespace) -> tuple[dict[str, Any], Callable, Callable]:
    from dantinox.studies.kv import evaluate_kv
    from dantinox.studies.kv_view import kv_lines, write_kv

    record = evaluate_kv(
        options.run_dir,
        quick=options.quick,
        ratios=options.ratios,
        methods=options.methods,
        calibration=options.kv_calibration,
        kv_dtype=options.kv_dtype or "auto",
        progress=_tell,
        tokens=options.tokens,
        sequences=options.sequences,
    )
    return record, kv_lines, write_kv


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _info(options: argparse.Namespace) -> int:
    use_compilation_cache()
    from dantinox.measure.info import describe

    for line in describe(options.run_dir):
        print(line, flush=True)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from dantinox.measure.doctor import examine

    for line in examine():
        print(line, flush=True)
    return 0


# Name → what it runs, what adds its flags, and what it is for.
COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], Callable[[argparse.ArgumentParser], None], str]] = {
    "train": (_train, flags.train, "Train a model from a YAML file into a run directory."),
    "generate": (_generate, flags.generate, "Continue a prompt with a trained model."),
    "explain": (_explain, flags.explain, "Show what each sampling step makes of the token behind a prompt."),
    "calibrate": (_calibrate, flags.calibrate, "Measure on a text what a preset of this model needs, and save it in the run."),
    "eval": (_eval, flags.evaluate, "Compare samplers, or compressed caches, on a run's own validation text."),
    "info": (_info, flags.info, "Describe a run: settings, size, training, and what narrow weights cost."),
    "doctor": (_doctor, lambda _: None, "Show versions, devices and speed of this machine."),
}
