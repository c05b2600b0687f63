"""What may change when a run goes on, and how long a run is."""

import hashlib
import math
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np

from dantinox.config import Config, ModelConfig, differences, dump_config
from dantinox.distributed import ONE_DEVICE, Layout
from dantinox.files import UserError, shown
from dantinox.model.parameters import blueprint, rolled
from dantinox.platform import platform_of
from dantinox.run import load_weights, open_run

# None of these has a part in what a step of finite numbers computes, but `steps` and `epochs`, which stretch the schedule.
FREE = [
    "steps",
    "epochs",
    "eval_every",
    "checkpoint_every",
    "sample_every",
    "sample_prompt",
    "keep_last",
    "patience",
    "nan_policy",
]


def resumed_config(saved: Config, given: Config) -> Config:
    """The settings to go on with: those of the run, but for steps, intervals, sample prompt, nan_policy, devices and logging.

    Raises:
      UserError: another setting differs; the sentence names it with both values.
    """
    for key, (old, new) in differences(saved, given).items():
        if not key.startswith(("logging.", "distributed.")) and key.removeprefix("training.") not in FREE:
            raise UserError(
                f"{key} cannot change when a run is resumed: the run has {shown(old)}, got {shown(new)} "
                "(only steps, intervals, the sample prompt, nan_policy, distributed and logging may differ)"
            )
    return given


def total_steps(config: Config, windows_per_epoch: int) -> int:
    """`training.steps`, or as many as `training.epochs` passes over the training windows need."""
    t = config.training
    return t.steps if t.steps is not None else max(1, math.ceil(t.epochs * windows_per_epoch / t.batch_size))


def run_facts(config: Config, fingerprint: str, layout: Layout) -> dict[str, Any]:
    """What a checkpoint records about its origin."""
    return {
        "devices": layout.words(),
        "config_sha256": hashlib.sha256(dump_config(config).encode()).hexdigest(),
        "tokenizer_sha256": fingerprint,
        "versions": {name: version(name) for name in ("dantinox", "jax", "flax", "optax", "orbax-checkpoint")},
    }


def check_facts(saved: dict[str, Any], now: dict[str, Any], deterministic: bool) -> list[str]:
    """Compares a checkpoint's facts with those of this process; returns what deserves a note.

    Raises:
      UserError: the tokenizer is another one.
    """
    old, new = saved.get("tokenizer_sha256"), now["tokenizer_sha256"]
    if old != new:
        raise UserError(f"the checkpoint was trained with tokenizer {str(old)[:12]}, the run directory now has {new[:12]}")
    versions = saved.get("versions", {})
    before, here = saved.get("devices", ONE_DEVICE), now["devices"]
    others = f"was trained on {before} and goes on with {here}, which add up in another order: not bit for bit as it would have"
    chance = "this GPU does not add up in a fixed order: the run may not go on bit for bit (training.deterministic: true does)"
    notes = [f"the run {others}"] * (before != here) + [chance] * (platform_of().name == "gpu" and not deterministic)
    return notes + [
        f"{name} was {versions.get(name)} when the checkpoint was written and is {version}: the run may not go on bit for bit"
        for name, version in now["versions"].items()
        if versions.get(name) != version
    ]


def starting_weights(config: Config, model: ModelConfig, fingerprint: str) -> dict[str, np.ndarray] | None:
    """The weights of the run `training.init_from`, in the host's memory, or None where it is not set.

    Raises:
      UserError: that run has another tokenizer or another architecture.
    """
    if config.training.init_from is None:
        return None
    source = open_run(config.training.init_from)
    other = hashlib.sha256(source.tokenizer.read_bytes()).hexdigest() if source.tokenizer.is_file() else None
    if other is not None and other != fingerprint:
        raise UserError(
            f"training.init_from: the run {source.path} has tokenizer {other[:12]}, this run has {fingerprint[:12]}: "
            f"set tokenizer.tokenizer_type: file and tokenizer.tokenizer_path: {source.tokenizer}"
        )
    _, shapes = blueprint(replace(model, scan_layers=False))
    given = load_weights(source.weights, shapes, lambda _, array: np.array(array, np.float32))
    return rolled(given, model) if model.scan_layers else given
