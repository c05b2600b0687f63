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

from dantinox.config import Config, UserError, overlay
from dantinox.config.flags import Parser, add_config_flags, overrides

DEFAULT_CONFIG = Path("configs/quickstart.yaml")
DEFAULT_PROMPT = "Nel mezzo del cammin"
ALTERNATIVES = 10  # the likeliest tokens told of in a trace
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

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(run=run)
        return command

    train = add("train", _train, "Train a model from a YAML file into a run directory.")
    train.add_argument("--config", type=Path, help=f"the YAML file (default: {DEFAULT_CONFIG})")
    train.add_argument("--run_dir", type=Path, help="where to write (default: runs/run_YYYYMMDD_HHMMSS)")
    train.add_argument("--resume", action="store_true", help="go on from the run's latest checkpoint")
    train.add_argument("--dry_run", action="store_true", help="print plan, parameters, memory and the first batch, then stop")
    train.add_argument("--print_config", action="store_true", help="print the complete settings as YAML, then stop")
    add_config_flags(train)

    generate = add("generate", _generate, "Continue a prompt with a trained model.")
    generate.add_argument("--run_dir", type=Path, required=True, help="the run directory of the model")
    generate.add_argument("--prompt", help=f"text to continue; - reads stdin (default: {DEFAULT_PROMPT!r})")
    generate.add_argument("--prompt_file", type=Path, help="a prompt per line, as text or as a JSON object with its settings")
    generate.add_argument("--no_cache", action="store_true", help="the same as --use_cache false")
    generate.add_argument("--stream", action="store_true", default=None, help="print text as it comes (default: at a terminal)")
    generate.add_argument("--no_stream", dest="stream", action="store_false", help="print text when it is complete")
    generate.add_argument("--json", action="store_true", help="print one JSON object per sample")
    generate.add_argument("--logprobs", type=_whole_number, metavar="K", help="with --json: log-probabilities, K alternatives")
    generate.add_argument("--echo", action="store_true", help="with --logprobs: the prompt's tokens too")
    generate.add_argument("--trace", type=Path, metavar="FILE.jsonl", help="write a line about every token")
    generate.add_argument("--show_entropy", action="store_true", help="shade the text by the entropy of the model")
    generate.add_argument("--report", type=Path, metavar="FILE.html", help="write a page that shows every token's choice")
    add_config_flags(generate, ("generation", "router"))

    explain = add("explain", _explain, "Show what each sampling step makes of the token behind a prompt.")
    explain.add_argument("--run_dir", type=Path, required=True, help="the run directory of the model")
    explain.add_argument("--prompt", help=f"the text before the token; - reads stdin (default: {DEFAULT_PROMPT!r})")
    explain.add_argument("--show", type=_whole_number, default=20, metavar="K", help="tokens to show (default: 20)")
    explain.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the steps as well")
    explain.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_flags(explain, ("generation", "router"))

    calibrate = add("calibrate", _calibrate, "Measure on a text what a preset of this model needs, and save it in the run.")
    calibrate.add_argument("--run_dir", type=Path, required=True, help="the run directory of the model")
    calibrate.add_argument(
        "--what", choices=["router"], required=True, help="router: the thresholds of --router_preset calibrated"
    )
    calibrate.add_argument("--data_path", type=Path, metavar="FILE", help="the text (default: the run's validation tokens)")
    calibrate.add_argument("--tokens", type=_whole_number, metavar="N", help="tokens to read at most (default: 32768)")
    calibrate.add_argument("--json", action="store_true", help="print one JSON object")
    calibrate.add_argument("--plot", type=Path, metavar="FILE.png", help="draw where the text and the strategies lie")

    evaluate = add("eval", _eval, "Compare ways of choosing tokens on a run's own validation text.")
    evaluate.add_argument("what", choices=["sampling"], help="sampling: samplers and the entropy router, equally tuned")
    evaluate.add_argument("--run_dir", type=Path, required=True, help="the run directory of the model")
    evaluate.add_argument("--reference", type=Path, metavar="RUN", help="the run that judges (default: the same)")
    evaluate.add_argument("--quick", action="store_true", help="fewer prompts, seeds, tokens and trials")
    evaluate.add_argument("--methods", nargs="+", metavar="NAME", help="some of them (default: all)")
    evaluate.add_argument("--prompts", type=_whole_number, metavar="N", help="to test on, and as many to tune on")
    evaluate.add_argument("--seeds", type=_whole_number, metavar="N", help="continuations of each prompt")
    evaluate.add_argument("--tokens", type=_whole_number, metavar="N", help="of each continuation")
    evaluate.add_argument("--trials", type=_whole_number, metavar="N", help="settings tried for each method")
    evaluate.add_argument("--out", type=Path, metavar="DIR", help="where CSV, Markdown and plot go (default: RUN/evaluation)")

    info = add("info", _info, "Describe a run: settings, size, training, and what narrow weights cost.")
    info.add_argument("run_dir", type=Path, help="the run directory")
    add("doctor", _doctor, "Show versions, devices and speed of this machine.")
    return parser


def _whole_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer ≥ 0, got {text!r}")
    return int(text)


def _use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache directory, so that the second start is fast."""
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(root / "dantinox" / "jax"))
    # By default jax keeps only programs that took over a second to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


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
        path = saved if options.resume and saved is not None and saved.is_file() else DEFAULT_CONFIG
    config = load_config(path, overrides(options))
    if options.print_config:
        print(dump_config(config), end="")
        return 0
    _use_compilation_cache()
    from dantinox.training import launch, rehearse

    if options.dry_run:
        for line in rehearse(config):
            print(line, flush=True)
        return 0
    launch(config, run_dir=options.run_dir, resume=options.resume, sampler=_sample)
    return 0


def _sample(config: Any, tokenizer: Any, model: Any) -> str:
    """A text sample for the eyes of whoever watches the training."""
    from dantinox.generation import Run

    prompt = config.training.sample_prompt or "\n"
    run = Run(config, model, tokenizer)
    room = config.model.max_context - len(run.prompt_ids(prompt))
    new = min(config.generation.max_new_tokens, room)
    # Nothing can have been measured on a model that is being made.
    own: dict[str, Any] = {"router_preset": "guide"} if config.router.router_preset == "calibrated" else {}
    return prompt + run.generate(prompt, max_new_tokens=new, seed=config.training.seed, n=1, **own).text


def _generate(options: argparse.Namespace) -> int:
    settings = _settings(options)
    if options.no_cache:
        if settings.get("use_cache"):
            raise UserError("--no_cache and --use_cache true contradict each other")
        settings["use_cache"] = False
    if options.prompt is not None and options.prompt_file is not None:
        raise UserError("--prompt and --prompt_file both give prompts: use one of them")
    as_json = options.json or options.prompt_file is not None
    _check_outputs(options, as_json)
    traced = options.show_entropy or options.trace is not None or options.report is not None
    from dantinox.run import load_run_config, open_run

    # What is wrong with the settings is told before anything large is loaded.
    base = load_run_config(open_run(options.run_dir))
    requests = _requests(options, settings, base)
    alone = len(requests) == 1 and overlay(base, requests[0][1]).generation.n == 1
    if options.stream and not alone:
        raise UserError("--stream shows one sample: use it with one prompt and --n 1")
    _use_compilation_cache()
    from dantinox.generation import in_order, load

    run = load(options.run_dir)
    alternatives = min(ALTERNATIVES, run.tokenizer.vocab_size) if traced else None
    reported = options.logprobs if options.logprobs is not None else alternatives
    batches = run.start(requests, logprobs=reported, echo=options.echo)
    stream = alone and not as_json and (sys.stdout.isatty() if options.stream is None else options.stream)
    stream = stream and not options.show_entropy
    if stream:
        print(requests[0][0], end="", flush=True)
    for batch in batches:
        for piece in batch.pieces(stream=stream):
            if stream:
                print(piece.text, end="", flush=True)
    if stream:
        print()
    results, documents = in_order(batches), list[dict[str, Any]]()
    if traced:
        from dantinox.generation.trace import trace_document

        documents = [trace_document(result, run.tokenizer) for result in results]
    try:
        if documents:
            _write(documents, options)  # before the text: who reads that may leave early
    finally:
        if options.show_entropy:
            _show(documents)
        for result in [] if stream or options.show_entropy else results:
            print(_json_line(result.to_dict(), options) if as_json else result.prompt + result.text)
        for batch in batches:
            print(batch.summary(), file=sys.stderr)
    return 0


def _json_line(record: dict[str, Any], options: argparse.Namespace) -> str:
    if options.logprobs is None:
        record.pop("logprobs", None)  # reported for the trace alone
    return json.dumps(record, ensure_ascii=False)


def _check_outputs(options: argparse.Namespace, as_json: bool) -> None:
    """Refuses outputs that exclude each other or cannot be written, before anything is generated."""
    if options.logprobs is not None and not as_json:
        raise UserError("--logprobs needs --json to print them")
    if options.echo and options.logprobs is None:
        raise UserError("--echo reports log-probabilities of the prompt: give --logprobs too")
    if options.stream and as_json:
        raise UserError("--stream prints text as it comes and cannot be combined with --json or --prompt_file")
    if options.show_entropy and (as_json or options.stream):
        raise UserError("--show_entropy prints the finished text in its own way: leave --json, --prompt_file and --stream out")
    if options.report is not None and options.report.suffix != ".html":
        raise UserError(f"--report must name a .html file, got {options.report}")
    outputs = [(flag, path) for flag, path in (("--trace", options.trace), ("--report", options.report)) if path is not None]
    for flag, path in outputs:
        if not path.absolute().parent.is_dir():
            raise UserError(f"{flag} cannot write {path}: there is no directory {path.parent}")
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise UserError(f"{flag} cannot write {path}: what is there is no file")
        if not os.access(path.absolute().parent, os.W_OK):
            raise UserError(f"{flag} cannot write {path}: the directory {path.parent} is read-only")
    if len({path.resolve() for _, path in outputs}) < len(outputs):
        raise UserError(f"--trace and --report both write {options.report}: give each a file of its own")


def _show(documents: list[dict[str, Any]]) -> None:
    from dantinox.report.entropy_view import show_entropy, terminal_colours

    width = shutil.get_terminal_size((100, 24)).columns
    for line in show_entropy(documents, width, terminal_colours(sys.stdout)):
        print(line)


def _write(documents: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """The reported samples as lines and as a page, whatever was asked for; both, even if one fails."""
    from dantinox.report.page import page
    from dantinox.report.trace import trace_lines
    from dantinox.run import atomic_write

    with contextlib.ExitStack() as outputs:
        if options.trace is not None:
            outputs.callback(atomic_write, options.trace, "".join(line + "\n" for line in trace_lines(documents)))
        if options.report is not None:
            outputs.callback(atomic_write, options.report, page(documents))


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The flags of `generation` and `router` by their names alone."""
    return {key.partition(".")[2]: value for key, value in overrides(options).items()}


def _requests(options: argparse.Namespace, settings: dict[str, Any], base: Config) -> list[tuple[str, dict[str, Any]]]:
    """(prompt, settings) for everything to be continued, checked over the run's own settings `base`."""
    overlay(base, settings, "command line")
    if options.prompt_file is None:
        prompt = DEFAULT_PROMPT if options.prompt is None else options.prompt
        return [(_stdin() if prompt == "-" else prompt, settings)]
    from dantinox.generation.requests import read_requests

    return read_requests(options.prompt_file, settings, base)


def _check_png(path: Path | None) -> None:
    if path is not None and path.suffix != ".png":
        raise UserError(f"--plot must name a .png file, got {path}")


def _stdin() -> str:
    if sys.stdin is None:
        raise UserError("--prompt - reads standard input, which is closed")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 text: byte {error.start} is wrong") from None


def _explain(options: argparse.Namespace) -> int:
    _check_png(options.plot)
    settings = _settings(options)
    prompt = DEFAULT_PROMPT if options.prompt is None else options.prompt
    from dantinox.run import atomic_write, load_run_config, open_run

    overlay(load_run_config(open_run(options.run_dir)), settings, "command line")
    prompt = _stdin() if prompt == "-" else prompt
    _use_compilation_cache()
    from dantinox.evaluation.explain import explain
    from dantinox.generation import load
    from dantinox.report.explain import explanation_lines, plot_explanation

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
    _use_compilation_cache()
    from dantinox.evaluation.calibrate import TOKENS, calibrate_router
    from dantinox.report.calibration import calibration_lines, plot_calibration
    from dantinox.run import atomic_write

    tokens = TOKENS if options.tokens is None else options.tokens
    record = calibrate_router(options.run_dir, tokens=tokens, data_path=options.data_path)
    if options.json:
        print(json.dumps(record, ensure_ascii=False))
    else:
        for line in calibration_lines(record, shutil.get_terminal_size((100, 24)).columns):
            print(line)
    if options.plot is not None:
        plot_calibration(record, options.plot, atomic_write)
    return 0


def _eval(options: argparse.Namespace) -> int:
    _use_compilation_cache()
    from dantinox.evaluation.sampling import evaluate_sampling
    from dantinox.report.sampling import sampling_lines, write_sampling
    from dantinox.run import atomic_write

    record = evaluate_sampling(
        options.run_dir,
        options.reference,
        quick=options.quick,
        methods=options.methods,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
        prompts=options.prompts,
        seeds=options.seeds,
        tokens=options.tokens,
        trials=options.trials,
    )
    for line in sampling_lines(record, shutil.get_terminal_size((100, 24)).columns):
        print(line)
    write_sampling(record, options.out or options.run_dir / "evaluation", atomic_write)
    return 0


def _info(options: argparse.Namespace) -> int:
    _use_compilation_cache()
    from dantinox.evaluation.info import describe

    for line in describe(options.run_dir):
        print(line, flush=True)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from dantinox.evaluation.doctor import examine

    for line in examine():
        print(line, flush=True)
    return 0
