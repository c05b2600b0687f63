"""Merges the adapters of a run, or of a folder in Hugging Face's PEFT format, into the weights of
their base model.
"""

from dataclasses import replace
from pathlib import Path

from dantinox.config.sections import FIELDS, reset_settings
from dantinox.files import UserError
from dantinox.model.parameters import abstract_model
from dantinox.run import (
    RunDirectory,
    copy_inherited_files,
    create_run,
    load_run_config,
    save_config,
    save_tokenizer,
    save_weights,
)
from dantinox.run.adapters import load_run_weights, merge_on_load
from dantinox.run.peft_folder import load_adapter
from dantinox.text import Tokenizer


def merge_adapter(
    out: str | Path, source: RunDirectory, adapter: str | Path | None = None
) -> RunDirectory:
    """Merges adapters into the weights of their base model, and writes the result as an ordinary
    run.

    Args:
      out: the run directory to create.
      source: the run with the adapters, or if `adapter` is given, the run of the base model.
      adapter: a PEFT folder.

    Raises:
      UserError: a file is missing or damaged, the adapters do not fit the base model, or `out` is
        not empty.
    """
    config = load_run_config(source)
    tokenizer = Tokenizer.load(source.tokenizer)
    vocab_size = tokenizer.vocab_size
    if adapter is None and config.lora.rank is None:
        raise UserError(
            f"{source.path} is not a run with adapters: give it as --base, together with --adapter"
        )
    model = replace(config.architecture(vocab_size), scan_layers=False)
    deltas = {} if adapter is None else load_adapter(adapter, model)
    weights = load_run_weights(
        source,
        config,
        abstract_model(model)[1],
        vocab_size,
        merge_on_load(deltas, lambda path, array: array),
    )
    run = create_run(out)
    with run.lock():
        save_weights(run.weights, weights)
        save_tokenizer(run, tokenizer.to_json(), tokenizer.roles)
        copy_inherited_files(source, run)
        save_config(run, reset_settings(config, [key for key in FIELDS if key.startswith("lora.")]))
    return run
