"""The config file that `dantinox init` writes."""

from pathlib import Path
from typing import Any

from dantinox.config.sections import FIELDS
from dantinox.config.yaml_files import build_config
from dantinox.files import quote

ESSENTIAL_SETTINGS = {
    "model": ("dim", "n_heads", "kv_heads", "num_blocks", "max_context", "qk_norm"),
    "tokenizer": ("tokenizer_type", "vocab_size"),
    "data": ("path", "val_fraction"),
    "training": (
        "epochs",
        "batch_size",
        "optimizer",
        "lr",
        "warmup_steps",
        "eval_every",
        "sample_every",
    ),
    "generation": ("max_new_tokens", "temperature", "top_p", "min_p"),
}
SMALL_MODEL = {
    "model.dim": 128, "model.n_heads": 4, "model.kv_heads": 2, "model.num_blocks": 4,
    "model.max_context": 128, "model.qk_norm": True, "tokenizer.vocab_size": 1024,
    "training.batch_size": 16, "training.optimizer": "muon", "training.lr": 4e-3,
    "training.eval_every": 100, "generation.max_new_tokens": 100,
}  # fmt: skip
STARTING_VALUES: dict[str, Any] = {
    "data.path": "builtin:python", "training.sample_every": 250, "generation.temperature": 0.7,
    "generation.min_p": 0.1,
}  # fmt: skip


def starting_config(path: str | Path, cpus: int | None = None) -> str:
    """Returns the text of a config that can be trained without changes. It lists the settings that
    most runs change.

    Args:
      path: the path of the new config, which the comments mention.
      cpus: number of CPU cores of a machine without an accelerator; the model then has the size of
        `quickstart`, which trains in minutes. None: the machine has an accelerator.
    """
    small = cpus is not None
    config = build_config({}, STARTING_VALUES | (SMALL_MODEL if small else {})).model_dump(
        mode="json"
    )
    lines = [
        (
            "# The settings that most runs change. Every other"
            " setting has a default: dantinox settings"
        ),
        "#",
        f"#   dantinox train --config {path} --run_dir runs/first",
        '#   dantinox generate --run_dir runs/first --prompt "def "',
    ]
    if small:
        why = (
            f"# The model is small because this machine has {cpus} CPU cores and no accelerator."
            " Leave out dim, n_heads,"
        )
        lines += [
            "#",
            why,
            (
                "# kv_heads, num_blocks, max_context, batch_size,"
                " optimizer and lr for larger defaults."
            ),
        ]
    for section, names in ESSENTIAL_SETTINGS.items():
        lines += ["", f"{section}:"]
        for name in names:
            value = config[section][name]
            setting = f"{name}: {value if isinstance(value, str) else quote(value)}"
            lines.append(f"  {setting:<28}# {FIELDS[f'{section}.{name}'].description}")
    return "\n".join(lines) + "\n"
