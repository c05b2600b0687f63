"""The flags of every command; what a command does stands in `dantinox.cli`."""

import argparse
from pathlib import Path

from dantinox.cli.common import DEFAULT_PROMPT, whole_number
from dantinox.config.flags import add_config_flags
from dantinox.config.start import DEFAULT


def train(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, help=f"a YAML file, or a config of the package (default: {DEFAULT})")
    command.add_argument("--run_dir", type=Path, help="where to write (default: runs/run_YYYYMMDD_HHMMSS)")
    command.add_argument("--resume", action="store_true", help="go on from the run's latest checkpoint")
    command.add_argument("--dry_run", action="store_true", help="print plan, parameters, memory and the first batch, then stop")
    command.add_argument("--print_config", action="store_true", help="print the complete settings as YAML, then stop")
    add_config_flags(command)


def init(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", type=Path, help="the YAML file to write")


def generate(command: argparse.ArgumentParser) -> None:
    command.add_argument("--run_dir", type=Path, required=True, help="the run directory of the model")
    command.add_argument("--prompt", help=f"text to continue; - reads stdin (default: {DEFAULT_PROMPT!r})")
    command.add_argument("--prompt_file", type=Path, help="a prompt per line, as text or as a JSON object with its settings")
    command.add_argument("--no_cache", action="store_true", help="the same as --use_cache false")
    command.add_argument("--stream", action="store_true", default=None, help="print text as it comes (default: at a terminal)")
    command.add_argument("--no_stream", dest="stream", action="store_false", help="print text when it is complete")
    command.add_argument("--json", action="store_true", help="print one JSON object per sample")
    command.add_argument("--logprobs", type=whole_number, metavar="K", help="with --json: log-probabilities, K alternatives")
    command.add_argument(
        "--show_candidates", action="store_true", help="with --trace, --report or --logprobs: the router's candidates too"
    )
    command.add_argument("--echo", action="store_true", help="with --logprobs: the prompt's tokens too")
    command.add_argument("--trace", type=Path, metavar="FILE.jsonl", help="write a line about every token")
    command.add_argument("--show_entropy", action="store_true", help="shade the text by the entropy of the model")
    command.add_argument("--report", type=Path, metavar="FILE.html", help="write a page that shows every token's choice")
    add_config_flags(command, ("generation", "router", "kv"))
