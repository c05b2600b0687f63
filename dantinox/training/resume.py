"""Resuming: which settings may change, and how many steps a run has."""

import hashlib
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np

from dantinox.config import Config, ModelConfig, differences, dump_config
from dantinox.distributed import ONE_DEVICE, Layout
from dantinox.files import UserError, quote
from dantinox.model.lora import to_frozen_dtype
from dantinox.model.parameters import Parameters, abstract_model, stack_layers
from dantinox.platform import get_platform
from dantinox.run import RunDirectory, load_run_config, open_base, weights_digest
from dantinox.run.adapters import load_run_weights
from dantinox.text import Tokenizer, vocabulary_size

# None of these has a part in what a step of finite numbers computes, but `steps` and `epochs`, which stretch the schedule.
MUTABLE_SETTINGS = {
    "steps", "epochs", "eval_every", "checkpoint_every", "sample_every", "sample_prompt", "keep_last", "patience", "nan_policy",
}  # fmt: skip


def resume_config(saved: Config, given: Config) -> Config:
    """The settings to go on with: those of the run, but for steps, intervals, sample prompt, nan_policy, devices and logging.

    Raises:
      UserError: another setting differs; the sentence names it with both values.
    """
    for key, (old, new) in differences(saved, given).items():
        if not key.startswith(("logging.", "distributed.")) and key.removeprefix("training.") not in MUTABLE_SETTINGS:
            raise UserError(
                f"{key} cannot change when a run is resumed: the run has {quote(old)}, got {quote(new)} "
                "(only steps, intervals, the sample prompt, nan_policy, distributed and logging may differ)"
            )
    return given


def total_steps(config: Config, windows_per_epoch: int) -> int:
    """`training.steps`, or as many as `training.epochs` passes over the training windows need."""
    t = config.training
    if t.steps is not None:
        return t.steps
    steps = max(1, math.ceil(t.epochs * windows_per_epoch / t.batch_size))
    if (t.warmup_steps or 0) > steps:
        longer = f"training.warmup_steps {t.warmup_steps} is more than the {steps} steps of training.epochs {t.epochs:g}"
        # From here, and not from the callers, so that a training with several of them prints it once.
        warnings.warn(f"{longer} with this corpus: the learning rate warms up for a tenth of the steps", stacklevel=1)
    return steps


def run_facts(config: Config, fingerprint: str, layout: Layout, run: RunDirectory | None = None) -> dict[str, Any]:
    """What a checkpoint records about its origin; of adapters also which weights they are for."""
    base = {} if config.lora.rank is None else {"base_sha256": weights_digest(open_base(config.training.init_from, run))}
    return base | {
        "devices": layout.describe(),
        "config_sha256": hashlib.sha256(dump_config(config).encode()).hexdigest(),
        "tokenizer_sha256": fingerprint,
        "versions": {name: version(name) for name in ("dantinox", "jax", "flax", "optax", "orbax-checkpoint")},
    }


def check_facts(saved: dict[str, Any], now: dict[str, Any], deterministic: bool) -> list[str]:
    """Compares a checkpoint's facts with those of this process; returns what deserves a note.

    Raises:
      UserError: the tokenizer is another one, or the weights that adapters are for.
    """
    if (old := saved.get("base_sha256")) != (new := now.get("base_sha256")):
        raise UserError(
            f"the checkpoint was trained on weights {str(old)[:12]} (training.init_from), and those are {str(new)[:12]} now: "
            "put the run that it was begun with back"
        )
    old, new = saved.get("tokenizer_sha256"), now["tokenizer_sha256"]
    if old != new:
        raise UserError(f"the checkpoint was trained with tokenizer {str(old)[:12]}, the run directory now has {new[:12]}")
    versions = saved.get("versions", {})
    before, here = saved.get("devices", ONE_DEVICE), now["devices"]
    others = f"was trained on {before} and goes on with {here}, which add up in another order: not bit for bit as it would have"
    chance = "this GPU does not add up in a fixed order: the run may not go on bit for bit (training.deterministic: true does)"
    notes = [f"the run {others}"] * (before != here) + [chance] * (get_platform().name == "gpu" and not deterministic)
    return notes + [
        f"{name} was {versions.get(name)} when the checkpoint was written and is {version}: the run may not go on bit for bit"
        for name, version in now["versions"].items()
        if versions.get(name) != version
    ]


def starting_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer of the run `training.init_from`, or None where it is not set or a file is given.

    Raises:
      UserError: there is no such run.
    """
    if config.training.init_from is None:
        return None
    source = open_base(config.training.init_from)
    given = config.tokenizer.tokenizer_type == "file" and config.tokenizer != load_run_config(source).tokenizer
    return None if given else Tokenizer.load(source.tokenizer)


def trained_vocab_size(config: Config) -> int:
    """The size of the vocabulary that a training with these settings has; the corpus is read only if it decides."""
    known = starting_tokenizer(config)
    return vocabulary_size(config) if known is None else known.vocab_size


def starting_weights(config: Config, model: ModelConfig, fingerprint: str) -> dict[str, np.ndarray] | None:
    """The weights of the run `training.init_from`, in the host's memory, or None where fresh ones are trained, as adapters are.

    Raises:
      UserError: that run has another tokenizer or another architecture.
    """
    if config.training.init_from is None or model.lora is not None:
        return None
    given = _load_source_weights(config, model, fingerprint, None, lambda _, array: np.array(array, np.float32))
    return stack_layers(given, model) if model.scan_layers else given


def frozen_weights(
    config: Config, model: ModelConfig, fingerprint: str, layout: Layout, run: RunDirectory | None = None
) -> Parameters:
    """The weights of the run `training.init_from` on their devices, as they are held beside adapters; none without adapters.

    Args:
      run: of the training, beside which its base may lie.

    Raises:
      UserError: that run is gone, or has another tokenizer or another architecture.
    """
    if model.lora is None:
        return {}
    shapes = abstract_model(replace(model, scan_layers=False))[1]
    there = model.scan_layers or layout.mesh is not None  # else one by one, and the host never has them all

    def place(name: str, array: np.ndarray) -> dict[str, Any]:
        parts = to_frozen_dtype(name, array, shapes)
        return parts if there else layout.put_parameters(parts)

    read = _load_source_weights(config, replace(model, lora=None), fingerprint, run, place)
    weights = {name: array for parts in read.values() for name, array in parts.items()}
    if not there:
        return weights
    return layout.put_parameters(stack_layers(weights, model) if model.scan_layers else weights)


def _load_source_weights(
    config: Config, model: ModelConfig, fingerprint: str, run: RunDirectory | None, place: Callable[[str, np.ndarray], Any]
) -> dict[str, Any]:
    source = open_base(config.training.init_from, run)
    other = hashlib.sha256(source.tokenizer.read_bytes()).hexdigest() if source.tokenizer.is_file() else None
    if other is not None and other != fingerprint:
        raise UserError(
            f"training.init_from: the run {source.path} has tokenizer {other[:12]}, this run has {fingerprint[:12]}: "
            f"leave the settings of tokenizer out, and it is taken from there"
        )
    _, shapes = abstract_model(replace(model, scan_layers=False))
    return load_run_weights(source, load_run_config(source), shapes, model.vocab_size, place)
