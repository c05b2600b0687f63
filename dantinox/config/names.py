"""Names of settings: their flags, their former names, and names that other programs use."""

REQUEST_SECTIONS = ("generation", "router", "kv")  # sections that a request may change; no weight depends on them

# Names of DantinoX 0, accepted without a warning.
V0_NAMES = {
    "generation.max_generations": "generation.max_new_tokens",
    "logging.eval_iters": "training.eval_every",
    "data.dataset_name": "data.path",
}
# Former names, accepted with a warning.
FORMER_NAMES = {"generation.products": "generation.matmul_dtype", "training.dpo_beta": "training.preference_beta"}
# Defaults of former names that differ from the current default. The config.yaml of a run contains them, so they are ignored.
FORMER_DEFAULTS = {"training.dpo_beta": 0.1}  # the value of a null `training.preference_beta` with dpo
ALIASES = V0_NAMES | FORMER_NAMES  # old dotted path → new dotted path

# Additional flags of settings: name → dotted path.
SHORT_NAMES = {"data_path": "data.path"}

# Name in other programs → the setting that has the same meaning, but a different name here.
OTHER_NAMES = {
    "learning_rate": "training.lr",
    "max_steps": "training.steps",
    "max_iters": "training.steps",
    "gradient_accumulation_steps": "training.grad_accum",
    "num_train_epochs": "training.epochs",
    "per_device_train_batch_size": "training.batch_size",
    "n_layers": "model.num_blocks",
    "n_layer": "model.num_blocks",
    "num_layers": "model.num_blocks",
    "num_hidden_layers": "model.num_blocks",
    "n_head": "model.n_heads",
    "num_attention_heads": "model.n_heads",
    "num_key_value_heads": "model.kv_heads",
    "n_embd": "model.dim",
    "hidden_size": "model.dim",
    "d_model": "model.dim",
    "precision": "model.dtype",
    "mixed_precision": "model.dtype",
    "torch_dtype": "model.dtype",
    "intermediate_size": "model.hidden_dim",
    "block_size": "model.max_context",
    "n_ctx": "model.max_context",
    "seq_len": "model.max_context",
    "sequence_length": "model.max_context",
    "max_seq_len": "model.max_context",
    "max_seq_length": "model.max_context",
    "context_length": "model.max_context",
    "max_position_embeddings": "model.max_context",
    "max_tokens": "generation.max_new_tokens",
    "max_length": "generation.max_new_tokens",
    "do_sample": "generation.greedy",
    "num_return_sequences": "generation.n",
    "simpo_gamma": "training.simpo_margin",
    "desirable_weight": "training.kto_desirable_weight",
    "undesirable_weight": "training.kto_undesirable_weight",
    "num_generations": "grpo.samples",
    "loss_type": "training.objective",
    "scale_rewards": "grpo.advantage",
    "importance_sampling_level": "grpo.ratio",
    "epsilon": "grpo.clip_low",
    "epsilon_high": "grpo.clip_high",
    "num_iterations": "grpo.updates",
    "reward_funcs": "grpo.rewards",
}
# Flag of other programs that is no setting here → what to do instead, after the error.
OTHER_FLAGS = {
    "out_dir": ", did you mean --run_dir?",
    "output_dir": ", did you mean --run_dir?",
    "device": ": the environment variable JAX_PLATFORMS selects cpu, cuda or tpu",
    "compile": ": all programs are compiled",
}


def flat_name(key: str) -> str:
    """Returns the name of a setting as a flag or a keyword argument.

    This is the name without its section, such as `lr`. Only settings of `kv` keep the section as a prefix, as in `kv_budget`.
    """
    section, _, name = key.partition(".")
    return f"kv_{name}" if section == "kv" else name
