"""The configs in the package, the config that `dantinox init` writes, and the config of a training with `init_from`."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dantinox.config.files import build_config, find_config, load_config, merge, read_yaml, report
from dantinox.config.model import OF_WEIGHTS
from dantinox.config.sections import FIELDS, Config, flat, without
from dantinox.files import UserError, shown

DEFAULT = "quickstart"
ESSENTIAL = {
    "model": ("dim", "n_heads", "kv_heads", "num_blocks", "max_context"),
    "tokenizer": ("tokenizer_type", "vocab_size"),
    "data": ("path", "val_fraction"),
    "training": ("epochs", "batch_size", "lr", "warmup_steps", "eval_every", "sample_every"),
    "generation": ("max_new_tokens", "temperature", "top_p"),
}
INHERITED = ("model", "moe", "attention", "tokenizer")  # from the run that a training starts from
SMALL = {
    "model.dim": 128, "model.n_heads": 4, "model.kv_heads": 2, "model.num_blocks": 4, "model.max_context": 128,
    "tokenizer.vocab_size": 1024, "training.batch_size": 16,
}  # fmt: skip
NOT_DEFAULT: dict[str, Any] = {"data.path": "builtin:python", "training.sample_every": 250}


def starting_config(path: str | Path, cpus: int | None = None) -> str:
    """The text of a config to be put at `path` that trains as it is: what most runs set, with its default and what it means.

    Args:
      cpus: cores of a machine without an accelerator: the model has the size of `quickstart`, which they train in minutes.
    """
    small = cpus is not None
    config = build_config({}, NOT_DEFAULT | (SMALL if small else {})).model_dump(mode="json")
    lines = [
        "# What most runs set. Every other setting has a default: dantinox train --help",
        "#",
        f"#   dantinox train --config {path} --run_dir runs/first",
        '#   dantinox generate --run_dir runs/first --prompt "def "',
    ]
    if small:
        why = f"# The model is small because this machine has {cpus} CPU cores and no accelerator. Leave out dim, n_heads,"
        lines += ["#", why, "# kv_heads, num_blocks, max_context and batch_size for larger defaults."]
    for section, names in ESSENTIAL.items():
        lines += ["", f"{section}:"]
        for name in names:
            value = config[section][name]
            setting = f"{name}: {value if isinstance(value, str) else shown(value)}"
            lines.append(f"  {setting:<28}# {FIELDS[f'{section}.{name}'].description}")
    return "\n".join(lines) + "\n"


def load_training(path: str | Path, overrides: Mapping[str, object] | None = None) -> Config:
    """`load_config` of a training that is to begin, see `build_training`."""
    path = find_config(path)
    tree, lines = read_yaml(path)
    return build_training(tree, overrides, {key: f"{path}, line {line}" for key, line in lines.items()}, str(path))


def build_training(
    tree: Mapping[str, object],
    overrides: Mapping[str, object] | None = None,
    where: dict[str, str] | None = None,
    source: str = "",
    origin: str = "command line",
) -> Config:
    """`build_config`, but what is not said of model and tokenizer is as in the run `training.init_from`, where there is one.

    Raises:
      UserError: as `build_config`; or what is said contradicts the weights of that run.
    """
    overrides, where = overrides or {}, where or {}
    training = tree.get("training")
    init_from = overrides.get("training.init_from", training.get("init_from") if isinstance(training, dict) else None)
    file = Path(init_from) / "config.yaml" if isinstance(init_from, str) and "\0" not in init_from else None
    if not init_from or file is None or not file.is_file():  # who reads its weights says what is wrong
        return build_config(tree, overrides, where, source, origin)
    base = load_config(file)
    given = {f"{section}.{key}" for section, keys in tree.items() if isinstance(keys, dict) for key in keys} | set(overrides)
    below = {section: getattr(base, section).model_dump(mode="json") for section in INHERITED}
    filled = {name: {**below.get(name, {}), **(keys or {})} for name, keys in tree.items() if isinstance(keys, dict | None)}
    config, unused = merge({**tree, **below, **filled}, overrides, where, source, origin)
    _check_start(base, config, sorted(given), where | dict.fromkeys(overrides, origin), str(init_from))
    report({key: reason for key, reason in unused.items() if key in given}, where, source)
    return without(config, [key for key in unused if key not in given])


def _check_start(base: Config, config: Config, given: Iterable[str], where: Mapping[str, str], init_from: str) -> None:
    """Raises where a setting that was given contradicts the weights of the base, or its tokenizer."""
    before, after = flat(base), flat(config)
    for key in given:
        section, _, name = key.partition(".")
        if section not in INHERITED or before.get(key) == after.get(key):
            continue
        changed = base.model_copy(update={section: getattr(base, section).model_copy(update={name: after[key]})})
        other = config.tokenizer.tokenizer_type != "file" if section == "tokenizer" else _fixed(changed) != _fixed(base)
        if other:
            what = f"{key} is {shown(before[key])} in {init_from}, whose weights the training starts from"
            place = f" ({where[key]})" if key in where else ""
            raise UserError(f"{what}, got {shown(after[key])}: leave it out{place}", key=key, value=after[key])


def _fixed(config: Config) -> list[Any]:
    """What weights decide on of an architecture."""
    model = config.architecture(1)
    return [getattr(model, name) for name in OF_WEIGHTS]
