"""What several commands do: read flags and standard input, keep compiled programs."""

import argparse
import re
import sys
import warnings
from typing import Any

from dantinox.config import Config, UserError
from dantinox.config.files import flat_name
from dantinox.config.flags import overrides
from dantinox.files import check_writable

PROMPT_HELP = "- reads stdin but for its last line break (default: the run's training.sample_prompt)"


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The flags of `generation`, `router` and `kv` by their names alone, as `overlay` takes them."""
    return {flat_name(key): value for key, value in overrides(options).items()}


def given_prompt(options: argparse.Namespace, base: Config) -> str:
    """The text of --prompt, or of standard input without its last line break where that is -.

    Args:
      base: the run's settings: without --prompt its samples' prompt, `training.sample_prompt`, or the line break that stands
        for an empty one.
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
        raise UserError(f"standard input is not UTF-8 text: byte {error.start} is wrong") from None


def plain_warnings() -> None:
    """Shows warnings as one line."""
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache directory, so that the second start is fast."""
    import jax

    from dantinox.platform import cache_folder

    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "jax"))
    # By default jax keeps only programs that took over a second to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def whole_number(text: str) -> int:
    """A flag's value that counts something."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer ≥ 0, got {text!r}")
    return int(text)


def check_plot(options: argparse.Namespace) -> None:
    """Raises a UserError where --plot names what a picture cannot be written to."""
    if options.plot is not None and options.plot.suffix != ".png":
        raise UserError(f"--plot must name a .png file, got {options.plot}")
    if options.plot is not None:
        check_writable(options.plot, "--plot")
