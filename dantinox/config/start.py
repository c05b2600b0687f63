"""Where settings begin: the configs that travel with the package, and a commented one to start from."""

from pathlib import Path

from dantinox.config.files import FIELDS, build_config
from dantinox.files import UserError, on_one_line, shown

CONFIGS = Path(__file__).parents[1] / "configs"
DEFAULT = "quickstart"
ESSENTIAL = {
    "model": ("dim", "n_heads", "kv_heads", "num_blocks", "max_context"),
    "tokenizer": ("tokenizer_type", "vocab_size"),
    "data": ("path", "val_fraction"),
    "training": ("epochs", "batch_size", "lr", "warmup_steps", "eval_every", "sample_every"),
    "generation": ("max_new_tokens", "temperature", "top_p"),
}
NOT_DEFAULT = {"data.path": "builtin:python", "training.sample_every": 250}


def find_config(name: str | Path) -> Path:
    """The file at a path or, where there is none, the package's own config of that name.

    Raises:
      UserError: there is neither.
    """
    path, own = Path(name), {file.stem: file for file in sorted(CONFIGS.glob("*.yaml"))}
    if not path.is_file() and str(path) in own:
        return own[str(path)]
    if not path.exists():
        raise UserError(f"no config file at {on_one_line(str(path))}: give a file, or one of the package's ({', '.join(own)})")
    return path


def starting_config(path: str | Path) -> str:
    """The text of a config to be put at `path` that trains as it is: what most runs set, with its default and what it means."""
    config = build_config({}, NOT_DEFAULT).model_dump(mode="json")
    lines = [
        "# What most runs set. Every other setting has a default: dantinox train --help",
        "#",
        f"#   dantinox train --config {path} --run_dir runs/first",
        '#   dantinox generate --run_dir runs/first --prompt "def "',
    ]
    for section, names in ESSENTIAL.items():
        lines += ["", f"{section}:"]
        for name in names:
            value = config[section][name]
            setting = f"{name}: {value if isinstance(value, str) else shown(value)}"
            lines.append(f"  {setting:<28}# {FIELDS[f'{section}.{name}'].description}")
    return "\n".join(lines) + "\n"
