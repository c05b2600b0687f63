"""Helpers of the benchmarks: a parser with the flag `--smoke`, a run with random weights, and a
limit for the threads.

Some benchmarks also run in environments without DantinoX, so this module imports only the standard
library at module level.
"""

import argparse
import atexit
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SMALL = {
    "dim": 32, "n_heads": 4, "kv_heads": 2, "num_blocks": 2, "hidden_dim": 64, "max_context": 512,
    "dtype": "float32",
}  # fmt: skip
LLAMA = {
    "dim": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_size": 16,
    "hidden": 128,
    "vocab": 300,
}


class Parser(argparse.ArgumentParser):
    """A parser whose flag `--smoke` replaces the defaults with sizes that finish in seconds.

    Args:
      doc: the description that `--help` prints.
      smoke: maps the name of each parsed value (`dest` in argparse) to its default under `--smoke`.
    """

    def __init__(self, doc: str | None, smoke: dict[str, Any]):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._smoke = smoke
        self.add_argument(
            "--smoke",
            action="store_true",
            help="use sizes that finish in seconds, to check the benchmark",
        )

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parses `args`, or `sys.argv` if `args` is None."""
        if "--smoke" in (sys.argv[1:] if args is None else args):
            self.set_defaults(**self._smoke)
        return super().parse_args(args, namespace)

    def require(self, **given: Any) -> None:
        """Exits with an error if an argument is None. Such arguments have a default only under
        `--smoke`.
        """
        missing = [name for name, value in given.items() if value is None]
        if missing:
            self.error(f"the following arguments are required: {', '.join(missing)}")


def use_threads(count: int) -> None:
    """Restricts the process to `count` CPUs. Call it before jax or torch starts its threads."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def temporary_folder() -> Path:
    """Creates a folder that is deleted when the process exits."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


def random_run(
    folder: Path | None = None, size: dict[str, Any] = SMALL, chat_template: str | None = None
) -> Path:
    """Writes a run directory with a byte tokenizer and random weights.

    Args:
      folder: the new run directory; a temporary one if None.
      size: settings of the `model` section.
      chat_template: the name of a built-in chat template, such as `plain`.
    """
    import numpy as np

    from dantinox.config import TokenizerSection, build_config
    from dantinox.model.parameters import abstract_model
    from dantinox.run import create_run, save_config, save_tokenizer, save_weights
    from dantinox.text import train_tokenizer

    config = build_config({"model": size, "tokenizer": {"tokenizer_type": "byte"}})
    tokenizer = train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(()))
    shapes = abstract_model(config.architecture(tokenizer.vocab_size))[1]
    rng = np.random.default_rng(0)
    run = create_run(folder or temporary_folder() / "run")
    save_config(run, config)
    save_tokenizer(run, tokenizer.to_json())
    arrays = {
        name: np.ones(shape.shape) for name, shape in shapes.items()
    }  # the scales of norms stay 1
    for name, array in arrays.items():
        if array.ndim > 1:
            arrays[name] = 0.03 * rng.standard_normal(array.shape)
    save_weights(run.weights, arrays)
    if chat_template:
        from dantinox.text.chat_template import BUILTIN

        run.chat_template.write_text(BUILTIN[chat_template][0], encoding="utf-8")
    return run.path
