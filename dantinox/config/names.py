"""Names of settings: their flags, their former names, and names that other programs use."""

# Names of DantinoX 0, accepted without a warning.
V0_NAMES = {
    "generation.max_generations": "generation.max_new_tokens",
    "logging.eval_iters": "training.eval_every",
    "data.dataset_name": "data.path",
}
# Former names, accepted with a warning.
FORMER_NAMES = {"generation.products": "generation.matmul_dtype"}
ALIASES = V0_NAMES | FORMER_NAMES  # old dotted path → new dotted path

# Additional flags of settings: name → dotted path.
SHORT_NAMES = {"data_path": "data.path"}

# Names in other programs that are not spelled like the setting they mean.
OTHER_NAMES = {
    "learning_rate": "training.lr",
    "max_steps": "training.steps",
    "max_iters": "training.steps",
    "gradient_accumulation_steps": "training.grad_accum",
    "n_layers": "model.num_blocks",
    "n_embd": "model.dim",
    "hidden_size": "model.dim",
    "block_size": "model.max_context",
    "max_tokens": "generation.max_new_tokens",
}


def flat_name(key: str) -> str:
    """Returns the name of a setting without its section, as a flag or a keyword argument has it: `lr`, but `kv_budget`."""
    section, _, name = key.partition(".")
    return f"kv_{name}" if section == "kv" else name
