"""`dantinox generate`: flags, checks of their combinations, and output as text, JSON, trace or report."""

import argparse
import contextlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from dantinox.cli.common import (
    PROMPT_HELP,
    add_chat_template,
    add_run,
    chosen_template,
    given_prompt,
    given_settings,
    use_compilation_cache,
    whole_number,
)
from dantinox.config import Config, UserError, overlay
from dantinox.config.flags import Parser, add_config_flags
from dantinox.files import atomic_write, check_writable

ALTERNATIVES = 10  # the likeliest tokens, listed with each token of a trace


def generate_flags(command: Parser) -> None:
    add_run(command)
    command.add_argument("--prompt", help=f"text to continue; {PROMPT_HELP}")
    command.add_argument("--prompt_file", type=Path, help="a prompt per line, as text or as a JSON object with its settings")
    command.add_argument(
        "--chat", action="store_true", help="answer the prompt as a message, through the model's chat template"
    )
    command.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    add_chat_template(command, "with --chat: ")
    command.add_argument(
        "--parse_special",
        action="store_true",
        help="names of special tokens in a prompt, as <|im_start|>, stand for the tokens",
    )
    command.add_argument("--no_cache", action="store_true", help="the same as --use_cache false")
    command.add_argument("--stream", action="store_true", default=None, help="print text as it comes (default: at a terminal)")
    command.add_argument("--no_stream", dest="stream", action="store_false", help="print text when it is complete")
    command.add_argument("--json", action="store_true", help="a JSON object per sample: index (of its prompt), seed, text, …")
    command.add_argument("--logprobs", type=whole_number, metavar="K", help="with --json: log-probabilities, K alternatives")
    command.add_argument(
        "--show_candidates", action="store_true", help="with --trace, --report or --logprobs: the candidates too"
    )
    command.add_argument("--echo", action="store_true", help="with --logprobs: the prompt's tokens too")
    command.add_argument("--trace", type=Path, metavar="FILE.jsonl", help="write a line about every token")
    command.add_argument("--show_entropy", action="store_true", help="shade the text by the entropy of the model")
    command.add_argument("--report", type=Path, metavar="FILE.html", help="write a page that shows every token's choice")
    command.add_argument("--json_schema", type=Path, metavar="FILE", help="the text has to be JSON of this schema")
    command.add_argument("--regex", metavar="R", help="the text has to match this regex, from its beginning to its end")
    command.add_argument("--grammar", type=Path, metavar="FILE", help="the text has to follow this .lark or .gbnf grammar")
    add_config_flags(command, ("generation", "router", "kv"))


def generate(options: argparse.Namespace) -> int:
    """Runs the command; the exit code."""
    settings = given_settings(options)
    if options.no_cache:
        if settings.get("use_cache"):
            raise UserError("--no_cache and --use_cache true contradict each other")
        settings["use_cache"] = False
    if options.prompt is not None and options.prompt_file is not None:
        raise UserError("--prompt and --prompt_file both give prompts: use one of them")
    as_json = options.json or options.prompt_file is not None
    _check_outputs(options, as_json)
    _check_chat(options)
    constraint = _constraint(options)
    traced = options.show_entropy or options.trace is not None or options.report is not None
    from dantinox.run import find_chat_template, load_run_config, open_run

    # Errors in the settings are reported before the weights are loaded.
    directory = open_run(options.run_dir, check=False)  # `load` checks it
    base = load_run_config(directory)
    prompts = _prompts(options, settings, base)
    alone = len(prompts) == 1 and prompts[0][1].generation.n == 1
    if options.stream and not alone:
        raise UserError("--stream shows one sample: use it with one prompt and --n 1")
    own = find_chat_template(directory)
    if options.chat and own is None and options.chat_template is None:
        raise UserError(f"{options.run_dir} has no chat template: give --chat_template, or leave --chat out")
    use_compilation_cache()
    from dantinox.generation import load
    from dantinox.generation.loaded_model import results_in_order

    run = load(options.run_dir, max((config.generation.tensor_parallel for _, config in prompts), default=1))
    alternatives = min(ALTERNATIVES, run.tokenizer.vocab_size) if traced else None
    reported = options.logprobs if options.logprobs is not None else alternatives
    report = {"logprobs": reported, "echo": options.echo, "show_candidates": options.show_candidates}
    stream = alone and not as_json and (sys.stdout.isatty() if options.stream is None else options.stream)
    stream = stream and not options.show_entropy
    template = chosen_template(options, own, run.tokenizer) if options.chat else None
    requests = []
    for prompt, config in prompts:
        if template is None:
            ids = run.prompt_ids(prompt, parse_special=options.parse_special)
        else:
            messages = [{"role": "system", "content": options.system}] if options.system else []
            ids = template.encode([*messages, {"role": "user", "content": prompt}], generation_prompt=True)
            config = run.with_stop_ids(config, template.end_ids)
        requests.append(replace(run.request(ids, config, **report, constraint=constraint), prompt=prompt))
    batches = run.start(requests, stream=stream)
    if stream and not options.chat:
        print(prompts[0][0], end="", flush=True)
    for batch in batches:
        for _, part in batch.parts():
            if stream:
                print(part.text, end="", flush=True)
    if stream:
        print()
    results, documents = results_in_order(batches), list[dict[str, Any]]()
    if traced:
        from dantinox.generation.trace import trace_document

        documents = [trace_document(result, run.tokenizer) for result in results]
    try:
        if documents:
            _write(documents, options)  # before the text: who reads that may leave early
    finally:
        if options.show_entropy:
            _show(documents)
        indices = [index for _, config in prompts for index in range(config.generation.n)]
        for index, result in [] if stream or options.show_entropy else zip(indices, results, strict=True):
            text = result.text if options.chat else result.prompt + result.text
            print(_json_line({"index": index} | result.to_dict(), options) if as_json else text)
        for batch in batches:
            print(batch.summary(), file=sys.stderr)
    return 0


def _constraint(options: argparse.Namespace) -> Any:
    """What the flags say that a text has to be, checked; None where they say nothing."""
    flags = {"--json_schema": options.json_schema, "--regex": options.regex, "--grammar": options.grammar}
    given = [flag for flag, value in flags.items() if value is not None]
    if not given:
        return None
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} each say what the text has to be: use one of them")
    from dantinox.generation.constraints import MAX_SOURCE_BYTES, Constraint, check_constraint

    if options.regex is not None:
        constraint = Constraint("regex", options.regex)
    else:
        path = options.json_schema or options.grammar
        kind = "json_schema" if options.json_schema else path.suffix[1:]
        if kind not in ("json_schema", "lark", "gbnf"):
            raise UserError(f"--grammar must name a .lark or .gbnf file, got {path}")
        try:
            with path.open(encoding="utf-8") as file:
                constraint = Constraint(kind, file.read(MAX_SOURCE_BYTES + 1))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {given[0]} {path}: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    check_constraint(constraint)
    return constraint


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
    if options.show_candidates and (options.logprobs, options.trace, options.report) == (None, None, None):
        raise UserError("--show_candidates adds the router's candidates to --trace, --report or --logprobs: give one of them")
    if options.stream and as_json:
        raise UserError("--stream prints text as it comes and cannot be combined with --json or --prompt_file")
    if options.show_entropy and (as_json or options.stream):
        raise UserError("--show_entropy prints the finished text in its own way: leave --json, --prompt_file and --stream out")
    if options.report is not None and options.report.suffix != ".html":
        raise UserError(f"--report must name a .html file, got {options.report}")
    for flag, path in (("--trace", options.trace), ("--report", options.report)):
        if path is not None:
            check_writable(path, flag)
    if options.trace and options.report and options.trace.resolve() == options.report.resolve():
        raise UserError(f"--trace and --report both write {options.report}: give each a file of its own")


def _check_chat(options: argparse.Namespace) -> None:
    """Raises a UserError for flags of --chat without it, and for --chat with what it excludes."""
    if options.chat and options.parse_special:
        raise UserError(
            "--parse_special reads special tokens in a prompt, and --chat has the template write them: use one of them"
        )
    if options.chat and options.prompt is None and options.prompt_file is None:
        raise UserError("--chat answers a message: give it as --prompt, or several in --prompt_file")
    for flag, value in (("--system", options.system), ("--chat_template", options.chat_template)):
        if value is not None and not options.chat:
            raise UserError(f"{flag} belongs to a chat: give --chat too")


def _show(documents: list[dict[str, Any]]) -> None:
    from dantinox.report.entropy_view import show_entropy, terminal_colours

    for line in show_entropy(documents, shutil.get_terminal_size((100, 24)).columns, terminal_colours(sys.stdout)):
        print(line)


def _write(documents: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """The reported samples as lines and as a page, whatever was asked for; both, even if one fails."""
    from dantinox.report.page import page
    from dantinox.report.trace_file import trace_lines

    with contextlib.ExitStack() as outputs:
        if options.trace is not None:
            outputs.callback(atomic_write, options.trace, "".join(line + "\n" for line in trace_lines(documents)))
        if options.report is not None:
            outputs.callback(atomic_write, options.report, page(documents))


def _prompts(options: argparse.Namespace, settings: dict[str, Any], base: Config) -> list[tuple[str, Config]]:
    """Every prompt with its settings, which are laid over those of the run, `base`, and validated."""
    config = overlay(base, settings, "command line")
    if options.prompt_file is None:
        return [(given_prompt(options, base), config)]
    from dantinox.generation.prompt_file import read_prompts

    return read_prompts(options.prompt_file, settings, base)
