"""Helpers that several commands share: the run argument, settings from flags, standard input, the
compilation cache.
"""

import argparse
import json
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dantinox.config.flags import Parser
from dantinox.config.help_pages import FlagSection
from dantinox.config.names import flat_name
from dantinox.config.packaged import DEFAULT_CONFIG
from dantinox.files import UserError, check_writable, quote

if TYPE_CHECKING:
    from dantinox.config import Config
    from dantinox.text import ChatTemplate, Tokenizer

CONFIG_HELP = f"YAML file, or name of a packaged config (default: {DEFAULT_CONFIG})"
PROMPT_HELP = (
    "- reads stdin without its last line break (default: the run's training.sample_prompt)"
)


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that were given as flags, as `overlay` expects them: name without
    section → value.
    """
    from dantinox.config.flag_values import overrides

    return {flat_name(key): value for key, value in overrides(options).items()}


def given_prompt(options: argparse.Namespace, base: "Config") -> str:
    """Returns the text of --prompt, or standard input without its last line break if --prompt is
    `-`.

    Args:
      base: the run's settings. Without --prompt the result is `training.sample_prompt`, or a line
        break if that is empty.
    """
    if options.prompt is None:
        return base.training.sample_prompt or "\n"
    if options.prompt != "-":
        return str(options.prompt)
    if sys.stdin is None:
        raise UserError("--prompt - reads standard input, which is closed")
    try:
        return re.sub(r"\r?\n\Z", "", sys.stdin.buffer.read().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"standard input is not UTF-8 text: byte {error.start} is invalid"
        ) from None


def add_run(command: Parser, text: str = "run directory of the model") -> None:
    """Adds the argument RUN and the flag --run_dir; `choose_run` reads both."""
    command.add_argument("run_path", nargs="?", type=Path, metavar="RUN", help=text)
    command.add_argument("--run_dir", type=Path, metavar="RUN", help="another way to give RUN")


def choose_run(options: argparse.Namespace) -> None:
    """Stores the path that RUN or --run_dir gives in `options.run_dir`. Does nothing for a command
    without these arguments.

    Raises:
      UserError: neither or both are given.
    """
    if not hasattr(options, "run_path"):
        return
    if options.run_path is not None and options.run_dir is not None:
        raise UserError(
            f"RUN and --run_dir both name a run: {options.run_path} and {options.run_dir}"
        )
    options.run_dir = options.run_path or options.run_dir
    if options.run_dir is None:
        from dantinox.run import newest_run

        newest = newest_run()
        example = f"for example {newest}" if newest else "or --run_dir RUN"
        raise UserError(f"a run directory is missing: give RUN, {example}")


def add_chat_template(command: Parser | FlagSection, condition: str = "") -> None:
    """Adds --chat_template, which `chosen_template` reads; its help begins with `condition`."""
    template = (
        condition
        + "plain, bare, chatml or a Jinja file (default: the run's chat_template.jinja, if it has"
        " one)"
    )
    command.add_argument("--chat_template", metavar="NAME", help=template)


MAX_DIGITS = 30  # of a flag that is a count; each command has a smaller limit with its own error
ADAPTER = "adapter"  # the name of the adapter of --lora


def add_lora(command: Parser | FlagSection) -> None:
    """Adds --lora, the adapter of all prompts of a command; `given_loras` reads it."""
    text = (
        "adapter of the model: a run with adapters of this run, or a PEFT folder; it is not merged"
    )
    command.add_argument("--lora", type=Path, metavar="PATH", help=text)


def given_loras(options: argparse.Namespace) -> dict[str, Path]:
    """Returns the adapter of --lora by its name, `ADAPTER`; without the flag, nothing."""
    return {} if options.lora is None else {ADAPTER: options.lora}


def chosen_template(
    options: argparse.Namespace, run_template: Path | None, tokenizer: "Tokenizer"
) -> "ChatTemplate | None":
    """Returns the template of --chat_template if it is given, otherwise the run's template at the
    path `run_template`.
    """
    from dantinox.text import ChatTemplate

    if options.chat_template is not None:
        return ChatTemplate.from_name(options.chat_template, tokenizer)
    return None if run_template is None else ChatTemplate.load(run_template, tokenizer)


class _OneLine(logging.Filter):
    """Shortens a log record with a traceback to one line. jax logs such a record for each plugin
    that cannot start.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            record.msg = (
                f"{record.getMessage().splitlines()[0]}: {record.exc_info[1]}".splitlines()[0]
            )
            record.args = ()
            record.exc_info = None
        return True


def plain_warnings() -> None:
    """Shows each warning, and each log record of jax about a plugin, as one line."""
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
    log = logging.getLogger("jax._src.xla_bridge")
    if not log.filters:
        log.addFilter(_OneLine())


def backend_problem() -> str | None:
    """Returns an error message if jax finds no device of the platforms in JAX_PLATFORMS, else
    None.
    """
    wanted = os.environ.get("JAX_PLATFORMS")
    if not wanted or "jax" not in sys.modules:
        return None
    import jax

    try:
        jax.devices()
    except (AssertionError, RuntimeError):
        return (
            f"JAX_PLATFORMS={wanted}: jax finds no such device here; unset the variable, or install"
            " the plugin and its driver"
        )
    return None


def use_compilation_cache() -> None:
    """Calls `dantinox.platform.use_compilation_cache`, imported here because it imports jax."""
    from dantinox.platform import use_compilation_cache

    use_compilation_cache()


def print_lines(lines: Callable[[int], Iterable[str]], width: int = 100) -> int:
    """Prints the lines that `lines` returns for the width of the terminal; returns the exit code 0.

    Args:
      width: the width if there is no terminal.
    """
    for line in lines(shutil.get_terminal_size((width, 24)).columns):
        print(line, flush=True)
    return 0


def print_result(
    options: argparse.Namespace, found: Any, lines: Callable[[int], Iterable[str]], width: int = 100
) -> int:
    """Prints a result (a dataclass or a mapping) as one JSON object if --json is given, else as
    `lines`.
    """
    record = asdict(found) if is_dataclass(found) and not isinstance(found, type) else found
    return print_lines(
        lambda columns: (
            [json.dumps(record, ensure_ascii=False)] if options.json else lines(columns)
        ),
        width,
    )


def whole_number(text: str) -> int:
    """Parses the value of a flag that is a count."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer ≥ 0, got {quote(text)}")
    if len(text) > MAX_DIGITS:
        raise argparse.ArgumentTypeError(f"must have at most {MAX_DIGITS} digits, got {len(text)}")
    return int(text)


def check_report(options: argparse.Namespace) -> None:
    """Raises a UserError if --report is given and is not a .html file that can be written."""
    if options.report is not None and options.report.suffix != ".html":
        raise UserError(f"--report must name a .html file, got {options.report}")
    if options.report is not None:
        check_writable(options.report, "--report")


def check_plot(options: argparse.Namespace) -> None:
    """Raises a UserError if --plot is given and is not a .png file that can be written."""
    if options.plot is not None and options.plot.suffix != ".png":
        raise UserError(f"--plot must name a .png file, got {options.plot}")
    if options.plot is not None:
        check_writable(options.plot, "--plot")
