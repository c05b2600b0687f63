"""`dantinox generate`: its flags, checks of their combinations, and output as text, JSON, trace or
report.
"""

import argparse
import contextlib
import json
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dantinox.cli.answer_file import check_answer_file, read_answers, recorded_seed
from dantinox.cli.common import (
    PROMPT_HELP,
    add_chat_template,
    add_lora,
    add_run,
    check_report,
    chosen_template,
    given_loras,
    given_prompt,
    given_settings,
    use_compilation_cache,
    whole_number,
)
from dantinox.config.flags import Parser, add_config_flags
from dantinox.files import UserError, atomic_write, check_writable

if TYPE_CHECKING:
    from dantinox.config import Config
    from dantinox.generation.api.beam_search import BeamRun
    from dantinox.generation.api.loaded_model import LoadedModel
    from dantinox.generation.api.memory_groups import DividedRun
    from dantinox.generation.api.offline_run import BatchRun
    from dantinox.generation.api.result import Result
    from dantinox.generation.request import GenerationRequest
    from dantinox.text import ChatTemplate, Tokenizer

# Prompts of a file that are decoded together; their answers are written when all of them have
# ended.
PROMPTS_TOGETHER = 64
TRACE_ALTERNATIVES = 10  # number of most likely tokens that a trace lists with each token
# The flags that name files.
INPUT_FILES = ("prompt_file", "json_schema", "grammar")
OUTPUT_FILES = ("out", "trace", "report")
MOST_USED = (
    "prompt", "prompt_file", "chat", "max_new_tokens", "n", "seed", "stop", "greedy", "temperature",
    "top_k", "top_p", "min_p", "repetition_penalty", "json", "report",
)  # fmt: skip


def add_generate_flags(command: Parser) -> None:
    add_run(command)
    prompt = command.section("prompt", "Prompts and chat templates")
    prompt.add_argument("--prompt", help=f"text to continue; {PROMPT_HELP}")
    prompt.add_argument(
        "--prompt_file",
        type=Path,
        metavar="FILE",
        help="one prompt per line, as text or as a JSON object with its settings",
    )
    prompt.add_argument(
        "--chat",
        action="store_true",
        help="answer the prompt as a chat message, with the chat template",
    )
    prompt.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    add_chat_template(prompt, "with --chat: ")
    prompt.add_argument(
        "--parse_special",
        action="store_true",
        help="parse names of special tokens in a prompt, such as <|im_start|>, as these tokens",
    )
    output = command.section("output", "Printed text, JSON, traces and reports")
    output.add_argument(
        "--stream",
        action="store_true",
        default=None,
        help="print text as it is generated (default: at a terminal)",
    )
    output.add_argument(
        "--no_stream", dest="stream", action="store_false", help="print text when it is complete"
    )
    output.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object per sample: index of its prompt, seed, text, …",
    )
    output.add_argument(
        "--out",
        type=Path,
        metavar="FILE.jsonl",
        help="with --prompt_file: write the JSON objects to this file",
    )
    output.add_argument(
        "--resume",
        action="store_true",
        help="with --out: keep the answers in the file and add the others",
    )
    output.add_argument(
        "--logprobs",
        type=whole_number,
        metavar="K",
        help="with --json: log-probabilities, K alternatives",
    )
    output.add_argument(
        "--show_candidates",
        action="store_true",
        help="with --trace, --report or --logprobs: include the router's candidates",
    )
    output.add_argument(
        "--attention_stats",
        action="store_true",
        help="with --trace or --report: include the attention of each head",
    )
    output.add_argument(
        "--echo", action="store_true", help="with --logprobs: include the prompt's tokens"
    )
    output.add_argument(
        "--trace", type=Path, metavar="FILE.jsonl", help="write one JSON line per token"
    )
    output.add_argument(
        "--show_entropy",
        action="store_true",
        help="shade each token by the entropy of its distribution",
    )
    output.add_argument(
        "--report",
        type=Path,
        metavar="FILE.html",
        help="write a page that shows how each token was chosen",
    )
    constraints = command.section("constraints", "Constrained generation; give at most one")
    constraints.add_argument(
        "--json_schema", type=Path, metavar="FILE", help="generate JSON that matches this schema"
    )
    constraints.add_argument(
        "--regex", metavar="R", help="generate text that matches this regex as a whole"
    )
    constraints.add_argument(
        "--grammar",
        type=Path,
        metavar="FILE",
        help="generate text that matches this .lark or .gbnf grammar",
    )
    add_lora(command)
    command.add_argument("--no_cache", action="store_true", help="same as --use_cache false")
    add_config_flags(command, ("generation", "router", "kv"), MOST_USED)


def generate(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
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
    directory = open_run(options.run_dir, check=False)
    base = load_run_config(directory)
    prompts = _prompts(options, settings, base)
    template_path = find_chat_template(directory)
    _check_prompts(options, prompts, base, template_path)
    records = read_answers(options.out, prompts) if options.resume else []
    is_single = len(prompts) == 1 and prompts[0][1].generation.n == 1
    use_compilation_cache()
    from dantinox.generation.api.loaded_model import load_opened

    loras = given_loras(options)
    tensor_parallel = max((config.generation.tensor_parallel for _, config in prompts), default=1)
    run = load_opened(directory, base, tensor_parallel, loras)
    alternatives = min(TRACE_ALTERNATIVES, run.tokenizer.vocab_size) if traced else None
    report = {
        "logprobs": alternatives if options.logprobs is None else options.logprobs,
        "echo": options.echo,
        "show_candidates": options.show_candidates,
        "constraint": constraint,
        "lora": next(iter(loras), None),
    }
    stream = is_single and not as_json and not options.show_entropy
    if options.stream is None:  # not given
        stream = stream and sys.stdout.isatty() and prompts[0][1].generation.num_beams == 1
    else:
        stream = stream and options.stream
    template = chosen_template(options, template_path, run.tokenizer) if options.chat else None
    seed = recorded_seed(records, prompts)
    if seed is None:
        seed = secrets.randbits(32)
    requests = _requests(run, prompts, template, options, seed, report)
    _decode(run, requests, options, done=len(records), stream=stream)
    return 0


def _check_prompts(
    options: argparse.Namespace,
    prompts: "Sequence[tuple[str, Config]]",
    base: "Config",
    template_path: Path | None,
) -> None:
    """Raises a UserError for prompts and settings that do not allow what the flags ask for.

    Args:
      base: the settings of the run.
      template_path: the chat template of the run; None: it has none.
    """
    if options.attention_stats:
        from dantinox.generation.api.attention_stats import check_settings

        for _, config in prompts:
            check_settings(config)
    if not prompts:
        raise UserError(f"at least one prompt is required: {options.prompt_file} has none")
    if options.stream and (len(prompts) > 1 or prompts[0][1].generation.n > 1):
        raise UserError("--stream shows one sample: use it with one prompt and --n 1")
    if options.chat and template_path is None and options.chat_template is None:
        raise UserError(
            f"{options.run_dir} has no chat template: give --chat_template, or leave --chat out"
        )
    healed = any(config.generation.token_healing for _, config in prompts)
    if options.chat and healed and not base.generation.token_healing:
        raise UserError(
            "token_healing must be false with --chat, because the chat template ends the prompt"
        )


def _requests(
    run: "LoadedModel",
    prompts: "Sequence[tuple[str, Config]]",
    template: "ChatTemplate | None",
    options: argparse.Namespace,
    seed: int,
    report: dict[str, Any],
) -> "list[GenerationRequest]":
    """Returns the requests for all prompts.

    Args:
      template: the chat template; None: the prompts are continued as they are.
      seed: the seed of prompts whose settings give none.
      report: further arguments of `LoadedModel.request`.
    """
    from dantinox.config import with_generation
    from dantinox.generation.token_settings import with_default_seed

    requests = []
    for prompt, config in prompts:
        config = with_default_seed(config, seed)
        if template is None:
            ids = run.prompt_ids(prompt, parse_special=options.parse_special)
        else:
            messages = [{"role": "system", "content": options.system}] if options.system else []
            ids = template.encode(
                [*messages, {"role": "user", "content": prompt}], generation_prompt=True
            )
            config = run.with_stop_ids(
                with_generation(config, token_healing=False), template.end_ids
            )
        requests.append(replace(run.request(ids, config, **report), prompt=prompt))
    return requests


def _decode(
    run: "LoadedModel",
    requests: "Sequence[GenerationRequest]",
    options: argparse.Namespace,
    *,
    done: int,
    stream: bool,
) -> None:
    """Decodes requests and writes text, JSON objects, trace and report.

    Args:
      done: the answers that the file of --out already has.
      stream: print the text of the only sample while it is generated.
    """
    traced = options.show_entropy or options.trace is not None or options.report is not None
    held: list[
        tuple[int, int, Result]
    ] = []  # printed after the trace, because the reader of the text may close the pipe early
    summaries = list[str]()
    count = 0
    with contextlib.ExitStack() as files:
        file = (
            sys.stdout
            if options.out is None
            else files.enter_context(options.out.open("a", encoding="utf-8"))
        )
        try:
            for part in _parts(requests, options):
                # (index of a sample, number of samples of its prompt), and the request of each
                # sample.
                places = []
                owners = []
                for request in part:
                    samples = request.config.generation.n
                    places += [(index, samples) for index in range(samples)]
                    owners += [request] * samples
                first = count
                count = count + len(places)
                if count <= done:
                    continue
                batches = run.start(part, stream=stream)
                if stream and not options.chat:
                    print(part[0].prompt, end="", flush=True)
                for number, result in enumerate(_results(batches, stream)):
                    if traced:
                        if options.attention_stats:
                            result = run.with_attention(result, owners[number])
                        held.append((*places[number], result))
                    elif first + number >= done and not stream:
                        print(_answer(*places[number], result, options), file=file, flush=True)
                if stream:
                    print()
                summaries += [batch.summary() for batch in batches]
            if traced:
                _write_traces([result for *_, result in held], options, run.tokenizer)
        finally:
            if not stream and not options.show_entropy:  # otherwise the text was shown already
                for index, samples, result in held:
                    print(_answer(index, samples, result, options), file=file)
            for summary in summaries:
                print(summary, file=sys.stderr)


def _parts(
    requests: "Sequence[GenerationRequest]", options: argparse.Namespace
) -> "Iterator[Sequence[GenerationRequest]]":
    """Yields the requests that are decoded together. The parts of a file do not depend on the
    answers that exist.
    """
    size = len(requests) if options.prompt_file is None else PROMPTS_TOGETHER
    for first in range(0, len(requests), size):
        yield requests[first : first + size]


def _results(
    batches: "Sequence[BatchRun | BeamRun | DividedRun]", stream: bool
) -> "Iterator[Result]":
    """Decodes batches and yields their results in the order of the requests, as soon as they are
    known; prints a stream.
    """
    from dantinox.generation.api.loaded_model import results_in_order

    yielded = 0
    for batch in batches:
        for _, part in batch.parts():
            if stream:
                print(part.text, end="", flush=True)
            if len(batches) == 1:
                yield from batch.results[yielded:]
                yielded = len(batch.results)
    yield from results_in_order(batches)[yielded:]


def _answer(index: int, samples: int, result: "Result", options: argparse.Namespace) -> str:
    """Returns the output of one of the `samples` of a prompt."""
    if options.json or options.prompt_file is not None:
        return _json_line({"index": index} | result.to_dict(), options)
    text = result.text if options.chat else result.prompt + result.text
    return text if samples == 1 else f"--- sample {index + 1} of {samples} ---\n{text}"


def _constraint(options: argparse.Namespace) -> Any:
    """Returns the validated constraint of the flags, or None if there is none."""
    flags = {
        "--json_schema": options.json_schema,
        "--regex": options.regex,
        "--grammar": options.grammar,
    }
    given = [flag for flag, value in flags.items() if value is not None]
    if not given:
        return None
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} each constrain the text: use one of them")
    from dantinox.generation.guides.constraints import (
        MAX_SOURCE_BYTES,
        Constraint,
        check_constraint,
    )

    if options.regex is not None:
        constraint = Constraint("regex", options.regex)
    else:
        path = options.json_schema or options.grammar
        kind = "json_schema" if options.json_schema else path.suffix[1:]
        if kind not in ("json_schema", "lark", "gbnf"):
            raise UserError(f"--grammar must name a .lark or .gbnf file, got {path}")
        try:
            with path.open(encoding="utf-8-sig") as file:
                constraint = Constraint(kind, file.read(MAX_SOURCE_BYTES + 1))
        except (OSError, ValueError) as error:
            raise UserError(
                f"cannot read {given[0]} {path}:"
                f" {getattr(error, 'strerror', None) or 'it is not text'}"
            ) from None
    check_constraint(constraint)
    return constraint


def _json_line(record: dict[str, Any], options: argparse.Namespace) -> str:
    if options.logprobs is None:
        record.pop("logprobs", None)  # only the trace uses them
    return json.dumps(record, ensure_ascii=False)


def _check_outputs(options: argparse.Namespace, as_json: bool) -> None:
    """Raises a UserError for outputs that cannot be combined or cannot be written, before anything
    is generated.
    """
    if options.logprobs is not None and not as_json:
        raise UserError("--logprobs needs --json to print them")
    if options.echo and options.logprobs is None:
        raise UserError("--echo reports log-probabilities of the prompt: give --logprobs too")
    if options.show_candidates and (options.logprobs, options.trace, options.report) == (
        None,
        None,
        None,
    ):
        raise UserError(
            "--show_candidates adds the router's candidates to --trace,"
            " --report or --logprobs: give one of them"
        )
    if options.attention_stats and (options.trace, options.report) == (None, None):
        raise UserError(
            "--attention_stats adds the attention of each head to"
            " --trace or --report: give one of them"
        )
    if options.stream and as_json:
        raise UserError(
            "--stream prints text as it is generated: it cannot be"
            " combined with --json or --prompt_file"
        )
    if options.show_entropy and (as_json or options.stream):
        raise UserError("--show_entropy cannot be combined with --json, --prompt_file or --stream")
    check_report(options)
    if options.trace is not None:
        check_writable(options.trace, "--trace")
    if options.out is not None and options.prompt_file is None:
        raise UserError("--out writes the answers to the prompts of a file: give --prompt_file too")
    if options.resume and options.out is None:
        raise UserError("--resume continues the file of --out: give --out too")
    if options.resume and (options.trace is not None or options.report is not None):
        raise UserError(
            "--resume cannot be combined with --trace or --report,"
            " which need the tokens of all answers"
        )
    _check_different_files(options)
    if options.out is not None:
        check_answer_file(options.out, options.resume)


def _check_different_files(options: argparse.Namespace) -> None:
    """Raises a UserError if an output would replace an input or another output."""
    name_of: dict[Path, str] = {}
    for name in (*INPUT_FILES, *OUTPUT_FILES):
        path = getattr(options, name)
        if path is None:
            continue
        other = name_of.setdefault(path.resolve(), name)
        if name != other and name in OUTPUT_FILES:
            raise UserError(f"--{other} and --{name} both name {path}: give two different files")


def _check_chat(options: argparse.Namespace) -> None:
    """Raises a UserError for flags that need --chat, and for flags that cannot be combined with
    it.
    """
    if options.chat and options.parse_special:
        raise UserError(
            "--parse_special parses special tokens in a prompt, but with --chat the template adds"
            " them: use one of the flags"
        )
    if options.chat and options.prompt is None and options.prompt_file is None:
        raise UserError(
            "--chat answers a message: give it as --prompt, or several in --prompt_file"
        )
    for flag, value in (("--system", options.system), ("--chat_template", options.chat_template)):
        if value is not None and not options.chat:
            raise UserError(f"{flag} needs --chat")


def _show(documents: list[dict[str, Any]]) -> None:
    from dantinox.report.entropy_view import show_entropy, terminal_colors

    for line in show_entropy(
        documents, shutil.get_terminal_size((100, 24)).columns, terminal_colors(sys.stdout)
    ):
        print(line)


def _write_traces(
    results: "Sequence[Result]", options: argparse.Namespace, tokenizer: "Tokenizer"
) -> None:
    """Writes the files of --trace and --report and shows the text of --show_entropy, even if one of
    the others fails.
    """
    from dantinox.generation.api.trace import trace_document
    from dantinox.report.page import report_page
    from dantinox.report.trace_file import trace_lines

    documents = [trace_document(result, tokenizer) for result in results]
    with contextlib.ExitStack() as outputs:
        if options.show_entropy:
            outputs.callback(_show, documents)
        if options.trace is not None:
            outputs.callback(
                atomic_write, options.trace, "".join(line + "\n" for line in trace_lines(documents))
            )
        if options.report is not None:
            outputs.callback(atomic_write, options.report, report_page(documents))


def _prompts(
    options: argparse.Namespace, settings: dict[str, Any], base: "Config"
) -> "list[tuple[str, Config]]":
    """Returns every prompt with its validated settings.

    Flags override the settings of the run (`base`). Settings in a prompt's line of --prompt_file
    override both.
    """
    from dantinox.config import overlay

    config = overlay(base, settings, "command line")
    if options.prompt_file is None:
        return [(given_prompt(options, base), config)]
    from dantinox.generation.api.prompt_file import read_prompts

    return read_prompts(options.prompt_file, settings, base)
