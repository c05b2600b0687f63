"""Names of settings: their flags, their former names, and names that other programs use."""

# The sections that a request may change; no weight depends on them.
REQUEST_SECTIONS = ("generation", "router", "kv")

# Names of DantinoX 0, accepted without a warning.
V0_NAMES = {
    "generation.max_generations": "generation.max_new_tokens",
    "logging.eval_iters": "training.eval_every",
    "data.dataset_name": "data.path",
}
# Former names, accepted with a warning.
FORMER_NAMES = {
    "generation.products": "generation.matmul_dtype",
    "training.dpo_beta": "training.preference_beta",
}
# Defaults of former names that differ from the current default. The config.yaml of a run contains
# them, so they are ignored.
# The value of a null `training.preference_beta` with dpo.
FORMER_DEFAULTS = {"training.dpo_beta": 0.1}
ALIASES = V0_NAMES | FORMER_NAMES  # old dotted path → new dotted path

# Additional flags of settings: name → dotted path.
SHORT_NAMES = {"data_path": "data.path"}

# Name in other programs → the setting that has the same meaning, but a different name here.
OTHER_NAMES = {
    # Transformers, PEFT and TRL: training
    "learning_rate": "training.lr",
    "lr_scheduler_type": "training.schedule",
    "max_steps": "training.steps",
    "num_train_epochs": "training.epochs",
    "per_device_train_batch_size": "training.batch_size",
    "gradient_accumulation_steps": "training.grad_accum",
    "warmup_ratio": "training.warmup_steps",
    "max_grad_norm": "training.grad_clip",
    "optim": "training.optimizer",
    "adam_beta1": "training.beta1",
    "adam_beta2": "training.beta2",
    "eval_steps": "training.eval_every",
    "save_steps": "training.checkpoint_every",
    "save_total_limit": "training.keep_last",
    "logging_steps": "logging.log_every",
    "model_name_or_path": "training.init_from",
    "train_file": "data.path",
    "dataset_path": "data.path",
    "validation_file": "data.val_path",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "torch_dtype": "model.dtype",
    "mixed_precision": "model.dtype",
    "lora_rank": "lora.rank",
    "use_rslora": "lora.rank_stabilized",
    "use_dora": "lora.dora",
    "target_modules": "lora.targets",
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
    # Transformers: models
    "num_layers": "model.num_blocks",
    "num_hidden_layers": "model.num_blocks",
    "num_attention_heads": "model.n_heads",
    "num_key_value_heads": "model.kv_heads",
    "head_dim": "model.head_size",
    "hidden_size": "model.dim",
    "d_model": "model.dim",
    "intermediate_size": "model.hidden_dim",
    "hidden_act": "model.activation",
    "rms_norm_eps": "model.norm_epsilon",
    "tie_word_embeddings": "model.weight_tying",
    "hidden_dropout": "model.dropout_rate",
    "attention_dropout": "model.dropout_rate",
    "max_position_embeddings": "model.max_context",
    "max_length": "generation.max_new_tokens",
    "max_seq_len": "model.max_context",
    "sequence_length": "model.max_context",
    "seq_len": "model.max_context",
    # Transformers and OpenAI: generation
    "max_tokens": "generation.max_new_tokens",
    "do_sample": "generation.greedy",
    "num_return_sequences": "generation.n",
    "no_repeat_ngram_size": "generation.no_repeat_ngram",
    "typical_p": "generation.typical",
    "bad_words_ids": "generation.bad_words",
    "stop_strings": "generation.stop",
    "eos_token_id": "generation.stop_token_ids",
    "assistant_model": "generation.draft_run",
    "num_assistant_tokens": "generation.draft_tokens",
    # nanoGPT
    "max_iters": "training.steps",
    "lr_decay_iters": "training.steps",
    "warmup_iters": "training.warmup_steps",
    "min_lr": "training.min_lr_ratio",
    "decay_lr": "training.schedule",
    "eval_interval": "training.eval_every",
    "log_interval": "logging.log_every",
    "dataset": "data.path",
    "n_layer": "model.num_blocks",
    "n_layers": "model.num_blocks",
    "n_head": "model.n_heads",
    "n_embd": "model.dim",
    "block_size": "model.max_context",
    "wandb_log": "logging.wandb",
    # LitGPT
    "precision": "model.dtype",
    "max_seq_length": "model.max_context",
    "context_length": "model.max_context",
    "global_batch_size": "training.batch_size",
    "micro_batch_size": "training.batch_size",
    "lr_warmup_steps": "training.warmup_steps",
    "max_norm": "training.grad_clip",
    "save_interval": "training.checkpoint_every",
    "checkpoint_dir": "training.init_from",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    # llama.cpp
    "n_ctx": "model.max_context",
    "ctx_size": "model.max_context",
    "n_predict": "generation.max_new_tokens",
    "predict": "generation.max_new_tokens",
    "temp": "generation.temperature",
    "repeat_penalty": "generation.repetition_penalty",
    "repeat_last_n": "generation.repetition_range",
    "mirostat_ent": "generation.mirostat_tau",
    "mirostat_lr": "generation.mirostat_eta",
    "reverse_prompt": "generation.stop",
    "draft_max": "generation.draft_tokens",
    "model_draft": "generation.draft_run",
    "cache_type_k": "kv.dtype",
    "cache_type_v": "kv.dtype",
}
_DEVICE = ": the environment variable JAX_PLATFORMS selects cpu, cuda or tpu"
_DEVICES = ": data, fsdp, expert, sequence and tensor of the section distributed share the devices"
# Flag of other programs that is no setting here → what to do instead, after the error.
OTHER_FLAGS = {
    "out_dir": ", did you mean --run_dir?",
    "output_dir": ", did you mean --run_dir?",
    "model": ": give the run directory as RUN or with --run_dir",
    "resume_from_checkpoint": ", did you mean --resume?",
    "device": _DEVICE,
    "n_gpu_layers": _DEVICE,
    "devices": _DEVICES,
    "num_nodes": _DEVICES,
    "threads": ": XLA uses all cores; taskset restricts them",
    "grammar_file": ", did you mean --grammar?",
    "compile": ": all programs are compiled",
}
# Setting without effect → the setting that the same name means in other programs.
SAME_NAMES = {"lora.dropout": "model.dropout_rate"}


def flat_name(key: str) -> str:
    """Returns the name of a setting as a flag or a keyword argument.

    This is the name without its section, such as `lr`. Only settings of `kv` keep the section as a
    prefix, as in `kv_budget`.
    """
    section, _, name = key.partition(".")
    return f"kv_{name}" if section == "kv" else name
