"""Where a training starts: new weights or those of another run, or a resumed run with the settings
that may change.
"""

import hashlib
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from importlib.metadata import version
from typing import Any

import numpy as np

from dantinox import __version__
from dantinox.config import Config, ModelConfig, differences, dump_config
from dantinox.distributed import ONE_DEVICE, Layout
from dantinox.files import UserError, quote
from dantinox.model.frozen_weights import to_frozen_dtype
from dantinox.model.parameters import Parameters, abstract_model, stack_layers
from dantinox.platform import get_platform
from dantinox.run import RunDirectory, load_run_config, open_base, weights_digest
from dantinox.run.adapters import load_run_weights
from dantinox.text import Tokenizer, vocabulary_size

# The settings of `training` that may change. They do not affect the result of a step with a finite
# loss, except that `steps` and `epochs` stretch the schedule.
MUTABLE_SETTINGS = {
    "steps", "epochs", "max_minutes", "eval_every", "checkpoint_every", "sample_every",
    "sample_prompt", "keep_last", "patience", "nan_policy",
}  # fmt: skip


def resume_config(saved: Config, requested: Config) -> Config:
    """Checks the settings for a resumed run and returns them.

    Steps, intervals, the sample prompt, nan_policy, devices and logging may differ from the saved
    settings. A `training.max_minutes` is replaced by the steps of the run, unless the run was
    stopped before its steps were limited.

    Raises:
      UserError: another setting differs. The message names it with both values.
    """
    if requested.training.max_minutes is not None and saved.training.max_minutes is None:
        length = {
            name: getattr(saved.training, name) for name in ("steps", "epochs", "max_minutes")
        }
        requested = requested.model_copy(
            update={"training": requested.training.model_copy(update=length)}
        )
    for key, (old, new) in differences(saved, requested).items():
        if (
            not key.startswith(("logging.", "distributed."))
            and key.removeprefix("training.") not in MUTABLE_SETTINGS
        ):
            raise UserError(
                f"{key} cannot change when a run is resumed: the run has {quote(old)}, got"
                f" {quote(new)} (only steps, intervals, the sample prompt, nan_policy, distributed"
                " and logging may differ)"
            )
    return requested


def total_steps(config: Config, windows_per_epoch: int) -> int:
    """Returns `training.steps`, or the steps of `training.epochs` passes over the training
    windows.
    """
    t = config.training
    if t.steps is not None:
        return t.steps
    # Exact: with floats, 1.1 epochs of 100 windows in batches of 10 would be 12 steps.
    steps = max(1, math.ceil(Fraction(str(t.epochs)) * windows_per_epoch / t.batch_size))
    if (t.warmup_steps or 0) > steps:
        longer = (
            f"training.warmup_steps {t.warmup_steps} is more than the {steps} steps of"
            f" training.epochs {t.epochs:g}"
        )
        # stacklevel=1 makes the location the same for all callers, so that Python prints the
        # warning once.
        warnings.warn(
            f"{longer} with this corpus: the learning rate warms up for a tenth of the steps",
            stacklevel=1,
        )
    return steps


def run_facts(
    config: Config, fingerprint: str, layout: Layout, run: RunDirectory | None = None
) -> dict[str, Any]:
    """Returns the facts that a checkpoint records about its origin.

    These include the digests of frozen weights that a resumed run reads again: of the base weights
    of adapters and of a KL penalty, and of a teacher.
    """
    frozen = {}
    if config.lora.rank is not None or (
        config.training.objective == "grpo" and config.grpo.kl_weight > 0
    ):
        frozen["base_sha256"] = weights_digest(open_base(config.training.init_from, run))
    if config.training.objective == "distill":
        frozen["teacher_sha256"] = weights_digest(open_base(config.distill.teacher, run, "teacher"))
    return frozen | {
        "devices": layout.describe(),
        "config_sha256": hashlib.sha256(dump_config(config).encode()).hexdigest(),
        "tokenizer_sha256": fingerprint,
        "versions": (
            {"dantinox": __version__}
            | {name: version(name) for name in ("jax", "flax", "optax", "orbax-checkpoint")}
        ),
    }


def check_facts(saved: dict[str, Any], now: dict[str, Any], deterministic: bool) -> list[str]:
    """Compares a checkpoint's facts with those of this process and returns notes about differences.

    Raises:
      UserError: the tokenizer, the base weights that the run reads again, or the weights of the
        teacher differ.
    """
    for fact, relation, key in (
        ("base_sha256", "on weights", "training.init_from"),
        ("teacher_sha256", "with a teacher of weights", "distill.teacher"),
    ):
        if (old := saved.get(fact)) != (new := now.get(fact)):
            raise UserError(
                f"the checkpoint was trained {relation} {str(old)[:12]} ({key}), but that run now"
                f" has {str(new)[:12]}: restore its original weights"
            )
    old = saved.get("tokenizer_sha256")
    new = now["tokenizer_sha256"]
    if old != new:
        raise UserError(
            f"the checkpoint was trained with tokenizer {str(old)[:12]}, the run directory now has"
            f" {new[:12]}"
        )
    versions = saved.get("versions", {})
    before = saved.get("devices", ONE_DEVICE)
    here = now["devices"]
    notes = []
    if before != here:
        change = f"the run was trained on {before} and continues on {here}"
        notes.append(f"{change}, where sums have another order: results will not be bit-exact")
    if get_platform().name == "gpu" and not deterministic:
        remedy = "set training.deterministic: true"
        notes.append(
            f"this GPU does not sum in a fixed order: results may not be bit-exact ({remedy})"
        )
    for name, current in now["versions"].items():
        if (saved_version := versions.get(name)) != current:
            change = (
                f"{name} was {saved_version} when the checkpoint was written and is {current} now"
            )
            notes.append(f"{change}: results may not be bit-exact")
    return notes


def starting_tokenizer(config: Config) -> Tokenizer | None:
    """Returns the tokenizer of the run `training.init_from`, or else of the teacher.

    Returns None if there is no such run, or if the settings name a tokenizer file.

    Raises:
      UserError: the run does not exist.
    """
    if config.tokenizer_run is None:
        return None
    source = open_base(config.tokenizer_run)
    has_own_file = (
        config.tokenizer.tokenizer_type == "file"
        and config.tokenizer != load_run_config(source).tokenizer
    )
    return None if has_own_file else Tokenizer.load(source.tokenizer)


def trained_vocab_size(config: Config) -> int:
    """Returns the vocabulary size of a training run with these settings; reads the corpus only if
    the size depends on it.
    """
    tokenizer = starting_tokenizer(config)
    return vocabulary_size(config) if tokenizer is None else tokenizer.vocab_size


def starting_weights(
    config: Config, model: ModelConfig, fingerprint: str
) -> dict[str, np.ndarray] | None:
    """Returns the weights of the run `training.init_from`, or with `distill.init_from_teacher` of
    the teacher's layers.

    Returns:
      The weights in host memory; None if the trained parameters have random initial values: without
      these settings, and for adapters.

    Raises:
      UserError: that run has another tokenizer or architecture.
    """
    if config.training.objective == "distill" and config.distill.init_from_teacher:
        source = open_base(config.distill.teacher)
        check_tokenizer("distill.teacher", source, fingerprint)
        weights = _select_layers(source, model)
    elif config.training.init_from is None or model.lora is not None:
        return None
    else:
        source = open_base(config.training.init_from)
        check_tokenizer("training.init_from", source, fingerprint)
        weights = _load_weights(source, model, lambda _, array: np.array(array, np.float32))
    return stack_layers(weights, model) if model.scan_layers else weights


def frozen_weights(
    config: Config,
    model: ModelConfig,
    fingerprint: str,
    layout: Layout,
    run: RunDirectory | None = None,
) -> Parameters:
    """Returns the frozen weights of the run `training.init_from` on their devices; an empty
    dictionary without adapters.

    Args:
      run: the run that is trained. The base run is also searched relative to its directory.

    Raises:
      UserError: the base run is missing, or has another tokenizer or architecture.
    """
    if model.lora is None:
        return {}
    source = open_base(config.training.init_from, run)
    check_tokenizer("training.init_from", source, fingerprint)
    return load_frozen_weights(source, layout)


def load_frozen_weights(source: RunDirectory, layout: Layout) -> Parameters:
    """Returns the weights of a run on the devices of a layout, in the dtypes that the model of the
    layout prescribes.
    """
    model = layout.model
    shapes = abstract_model(replace(model, scan_layers=False))[1]
    # Otherwise, arrays go to the device one by one, to save host memory.
    on_host = model.scan_layers or layout.mesh is not None

    def place(name: str, array: np.ndarray) -> dict[str, Any]:
        parts = to_frozen_dtype(name, array, shapes)
        return parts if on_host else layout.put_parameters(parts)

    read = _load_weights(source, replace(model, lora=None), place)
    weights = {name: array for parts in read.values() for name, array in parts.items()}
    if not on_host:
        return weights
    return layout.put_parameters(stack_layers(weights, model) if model.scan_layers else weights)


def check_tokenizer(key: str, source: RunDirectory, fingerprint: str) -> None:
    """Raises a UserError if the run that the setting `key` names has another tokenizer than the run
    that is trained.
    """
    other = (
        hashlib.sha256(source.tokenizer.read_bytes()).hexdigest()
        if source.tokenizer.is_file()
        else None
    )
    if other is not None and other != fingerprint:
        raise UserError(
            f"{key}: the run {source.path} has tokenizer {other[:12]}, this run has"
            f" {fingerprint[:12]}: remove other settings that choose the tokenizer, to use the"
            " tokenizer of that run"
        )


def _load_weights(
    source: RunDirectory, model: ModelConfig, place: Callable[[str, np.ndarray], Any]
) -> dict[str, Any]:
    _, shapes = abstract_model(replace(model, scan_layers=False))
    return load_run_weights(source, load_run_config(source), shapes, model.vocab_size, place)


def _select_layers(source: RunDirectory, model: ModelConfig) -> dict[str, np.ndarray]:
    """Returns weights of a run for a model of L layers, with layer ⌊i · depth of the run / L⌋ as
    layer i.

    Sanh et al. 2019 ("DistilBERT", section 3) start from every second layer of a teacher.

    Raises:
      UserError: the model has more layers than the run, or a weight of another shape.
    """
    deeper = replace(
        load_run_config(source).architecture(model.vocab_size, model.platform), scan_layers=False
    )
    arrays = _load_weights(source, deeper, lambda _, array: array)
    selected = {}
    for name, leaf in abstract_model(replace(model, scan_layers=False))[1].items():
        head, _, rest = name.partition("/")
        layer, _, inner = rest.partition("/")
        from_name = (
            f"blocks/{int(layer) * deeper.num_blocks // model.num_blocks}/{inner}"
            if head == "blocks"
            else name
        )
        array = arrays.get(from_name)
        if model.num_blocks > deeper.num_blocks or array is None or array.shape != leaf.shape:
            found = f"{deeper.num_blocks} layers"
            if array is not None:
                found += f" and {from_name} of {array.shape}"
            raise UserError(
                f"distill.init_from_teacher: the teacher {source.path} has {found}, and this model"
                f" {model.num_blocks} layers and {name} of {leaf.shape}: only"
                " the number of layers may be smaller"
            )
        selected[name] = np.array(array, np.float32)
    return selected
