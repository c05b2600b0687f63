"""The flags of every command; what a command does stands in `dantinox.cli`."""

import argparse
from pathlib import Path

from dantinox.cli.common import DEFAULT_PROMPT
from dantinox.config import UserError
from dantinox.config.flags import add_config_flags

DEFAULT_CONFIG = Path("configs/quickstart.yaml")


def train(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, help=f"the YAML file (default: {DEFAULT_CONFIG})")
    command.add_argument("--run_dir", type=Path, help="where to write (default: runs/run_YYYYMMDD_HHMMSS)")
    command.add_argument("--resume", action="store_true", help="go on from the run's latest checkpoint")
    command.add_argument("--dry_run", action="store_true", help="print plan, parameters, memory and the first batch, then stop")
    command.add_argument("--print_config", action="store_true", help="print the complete settings as YAML, then stop")
    add_config_flags(command)


def generate(command: argparse.ArgumentParser) -> None:
    command.add_argument("--run_dir", type=Path, required=True, help="the run directory of the model")
    command.add_argument("--prompt", help=f"text to continue; - reads stdin (default: {DEFAULT_PROMPT!r})")
    command.add_argument("--prompt_file", type=Path, help="a prompt per line, as text or as a JSON object with its settings")
    command.add_argument("--no_cache", action="store_true", help="the same as --use_cache false")
    command.add_argument("--stream", action="store_true", default=None, help="print text as it comes (default: at a terminal)")
    command.add_argument("--no_stream", dest="stream", action="store_false", help="print text when it is complete")
    command.add_argument("--json", action="store_true", help="print one JSON object per sample")
    command.add_argument("--logprobs", type=_whole_number, metavar="K", help="with --json: log-probabilities, K alternatives")
    command.add_argument("--echo", action="store_true", help="with --logprobs: the prompt's tokens too")
    command.add_argument("--trace", type=Path, metavar="FILE.jsonl", help="write a line about every token")
    command.add_argument("--show_entropy", action="store_true", help="shade the text by the entropy of the model")
    command.add_argument("--report", type=Path, metavar="FILE.html", help="write a page that shows every token's choice")
    add_config_flags(command, ("generation", "router", "kv"))


def explain(command: argparse.ArgumentParser) -> None:
    command.add_argument("--run_dir", type=Path, required=True, help="the run directory of the model")
    command.add_argument("--prompt", help=f"the text before the token; - reads stdin (default: {DEFAULT_PROMPT!r})")
    command.add_argument("--show", type=_whole_number, default=20, metavar="K", help="tokens to show (default: 20)")
    command.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the steps as well")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_flags(command, ("generation", "router"))


def calibrate(command: argparse.ArgumentParser) -> None:
    command.add_argument("--run_dir", type=Path, required=True, help="the run directory of the model")
    command.add_argument(
        "--what",
        choices=["router", "kv"],
        required=True,
        help="router: the thresholds of --router_preset calibrated; kv: what a head's share of --kv_budget goes by",
    )
    command.add_argument(
        "--data_path",
        type=Path,
        metavar="FILE",
        help="the text (default: the run's own; router: its validation tokens, kv: its training tokens)",
    )
    command.add_argument("--tokens", type=_whole_number, metavar="N", help="router: tokens to read at most (default: 32768)")
    command.add_argument("--sequences", type=_whole_number, metavar="N", help="kv: sequences to read (default: 20)")
    command.add_argument(
        "--no_loss", action="store_true", default=None, help="kv: leave out what eviction costs each head, the longest part"
    )
    command.add_argument(
        "--from_results", type=Path, metavar="FILE", help="kv: take over what this file holds instead of measuring"
    )
    command.add_argument("--output", type=Path, metavar="FILE", help="kv: where to write (default: RUN/kv_entropy.json)")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="router: draw where the text and the strategies lie; kv: draw each head's entropy and what eviction costs it",
    )


def check_calibrate(options: argparse.Namespace) -> None:
    """Refuses flags of `calibrate` that --what, or --from_results, has no use for.

    Raises:
      UserError: names the flag.
    """
    of_one = {"router": ("tokens",), "kv": ("sequences", "no_loss", "from_results", "output")}
    for what, names in of_one.items():
        for name in names:
            if what != options.what and getattr(options, name) is not None:
                raise UserError(f"--{name} belongs to --what {what}: leave it out with --what {options.what}")
    if options.from_results is not None:
        for name in ("data_path", "sequences", "no_loss"):
            if getattr(options, name) is not None:
                raise UserError(f"--from_results measures nothing: leave --{name} out")


def evaluate(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "what",
        choices=["sampling", "kv"],
        help="sampling: samplers and the entropy router, equally tuned; kv: compressed caches at equal size",
    )
    command.add_argument("--run_dir", type=Path, required=True, help="the run directory of the model")
    command.add_argument("--quick", action="store_true", help="less of everything: prompts, sequences, seeds, trials")
    command.add_argument("--methods", nargs="+", metavar="NAME", help="some of them (default: all)")
    command.add_argument(
        "--tokens",
        type=_whole_number,
        metavar="N",
        help="sampling: of each continuation; kv: of each sequence (default: context)",
    )
    command.add_argument("--out", type=Path, metavar="DIR", help="where CSV, Markdown and plot go (default: RUN/evaluation)")
    command.add_argument("--reference", type=Path, metavar="RUN", help="sampling: the run that judges (default: the same)")
    command.add_argument("--prompts", type=_whole_number, metavar="N", help="sampling: to test on, and as many to tune on")
    command.add_argument("--seeds", type=_whole_number, metavar="N", help="sampling: continuations of each prompt")
    command.add_argument("--trials", type=_whole_number, metavar="N", help="sampling: settings tried for each method")
    command.add_argument(
        "--ratios", type=float, nargs="+", metavar="R", help="kv: shares of the slots that are kept (default: .5 .3 .2 .1)"
    )
    command.add_argument("--sequences", type=_whole_number, metavar="N", help="kv: sequences of text to read (default: 200)")
    command.add_argument(
        "--kv_calibration", type=Path, metavar="FILE", help="kv: the heads' measured signals (default: RUN/kv_entropy.json)"
    )
    command.add_argument(
        "--kv_dtype", choices=["auto", "float32", "bfloat16", "int8"], help="kv: of the compressed caches (default: auto)"
    )


def check_evaluate(options: argparse.Namespace) -> None:
    """Refuses flags of `eval` that belong to the other comparison.

    Raises:
      UserError: names the flag.
    """
    of_one = {
        "sampling": ("reference", "prompts", "seeds", "trials"),
        "kv": ("ratios", "sequences", "kv_calibration", "kv_dtype"),
    }
    for what, names in of_one.items():
        for name in names:
            if what != options.what and getattr(options, name) is not None:
                raise UserError(f"--{name} belongs to eval {what}: leave it out with eval {options.what}")


def info(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir", type=Path, help="the run directory")


def _whole_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer ≥ 0, got {text!r}")
    return int(text)
