"""Every setting has an observable effect, or is refused in flags and reported in files while it has
none.
"""

import re
import warnings
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from dantinox.config import Config, UserError, build_config, dump_config
from dantinox.config.generation_settings import section_order
from dantinox.config.sections import FIELDS, find_inactive
from dantinox.distributed import mesh_sizes
from dantinox.sampling import SamplingParams
from dantinox.text import prepare_data
from dantinox.training.starting_point import total_steps
from dantinox.training.step import TrainStep

ROOT = Path(__file__).parents[1] / "dantinox"
SMALL = {
    "model.dim": 16, "model.n_heads": 2, "model.num_blocks": 1, "model.max_context": 8,
    "training.batch_size": 4,
    "training.warmup_steps": 2,
}  # fmt: skip
ROUTER = {"generation.strategy": "entropy"}
ADDRESS = {"distributed.coordinator": "a:1"}
BUDGET = {"kv.budget": 0.5}
BY_HEAD = {**BUDGET, "kv.signal": "entropy"}
LATENT = {"attention.kv_lora_rank": 8}
MOE = {"moe.use_moe": True}
SHARED_EXPERT = {**MOE, "moe.shared_experts": 1}
DENSE_FIRST = {**MOE, "model.num_blocks": 2, "moe.dense_layers": [0]}
CLAMPED = {"model.activation": "clamped_swiglu"}
CONVERSATIONS = {
    "training.objective": "sft", "data.path": "d.jsonl", "model.max_context": 64,
    "tokenizer.tokenizer_type": "byte",
}  # fmt: skip
START_FROM = {"training.init_from": "runs/x"}
LORA = {**START_FROM, "lora.rank": 4}
LOOP_STOP = {"generation.loop_stop": True}
PREFERENCES = {"training.objective": "dpo", "training.init_from": "runs/x"}
KTO = {**PREFERENCES, "training.objective": "kto"}
DISTILL = {"training.objective": "distill", "distill.teacher": "runs/x"}
REWARDS = {
    "training.objective": "grpo", "training.init_from": "runs/x", "grpo.rewards": ["numeric"],
    "data.path": "d.jsonl",
}  # fmt: skip
FACTOR_4 = {"attention.rope_factor": 4.0}
LINEAR = {**FACTOR_4, "attention.rope_scaling": "linear"}
LLAMA3 = {**LINEAR, "attention.rope_scaling": "llama3", "attention.rope_original_context": 8}
LONGROPE = {
    **LLAMA3, "model.head_size": 8, "attention.rope_scaling": "longrope",
    "attention.rope_short_factors": [1.0, 1.0, 1.0, 2.0],
    "attention.rope_long_factors": [1.0, 1.0, 1.0, 4.0],
}  # fmt: skip
YARN = {**LLAMA3, "attention.rope_scaling": "yarn"}
PROPORTIONAL = {"attention.rope_scaling": "proportional"}
DEPTH = {"model.depth": 1}  # in a config that does not set model.num_blocks
SHARED_KEYS = {"model.num_blocks": 2, "attention.kv_shared_layers": 1}
# Setting → a value other than its default, and its prerequisites.
OTHER: dict[str, tuple] = {
    "model.depth": (1,), "training.tokens_per_parameter": (5.0, DEPTH),
    "model.dim": (32,), "model.n_heads": (4,), "model.kv_heads": (1,), "model.head_size": (4,),
    "model.num_blocks": (2,), "model.hidden_dim": (24,), "model.max_context": (16,),
    "model.weight_tying": (False,), "model.padded_vocab_size": (20,),
    "model.activation": ("relu2",), "model.norm": ("layernorm",), "model.norm_epsilon": (1e-3,),
    "model.qk_norm": (True,), "model.dropout_rate": (0.1,), "model.norm_placement": ("both",),
    "model.norm_zero_centered": (True,), "model.mlp_bias": (True,),
    "model.qk_norm_scope": ("layer", {"model.qk_norm": True}), "model.scale_embeddings": (True,),
    "model.gradient_checkpointing": (True,),
    "model.remat_policy": ("dots", {"model.gradient_checkpointing": True}),
    "model.norm_scale": (False,), "model.norm_bias": (False, {"model.norm": "layernorm"}),
    "model.qk_norm_after_rope": (True, {"model.qk_norm": True}), "model.parallel_blocks": (True,),
    "model.norm_embeddings": (True,), "model.embedding_multiplier": (2.0,),
    "model.residual_multiplier": (0.5,), "model.logits_scaling": (2.0,),
    "model.swiglu_limit": (5.0, CLAMPED), "model.swiglu_alpha": (1.0, CLAMPED),
    "model.dtype": ("bfloat16",), "model.scan_layers": (True,),
    "model.final_logit_softcapping": (30.0,), "model.projections": ("ternary",),
    "model.sub_norms": (True,), "model.v_norm": (True,), "model.layer_scalar": (True,),
    "model.per_layer_dim": (4,), "model.double_wide_mlp": (True, SHARED_KEYS),
    "attention.kv_shared_layers": (1, {"model.num_blocks": 2}), "attention.global_head_size": (4,),
    "attention.global_kv_heads": (1,), "attention.k_eq_v": (True,),
    "attention.rope_share": (0.5, PROPORTIONAL),
    "moe.use_moe": (True,), "moe.n_experts": (8, MOE), "moe.top_k_mlp": (3, MOE),
    "moe.shared_experts": (1, MOE), "moe.expansion": (3.0,), "moe.score_function": ("sigmoid", MOE),
    "moe.norm_topk_prob": (False, MOE), "moe.alpha_balance": (0.5, MOE),
    "moe.router_z_loss": (0.5, MOE), "moe.bias_update_rate": (0.1, MOE),
    "moe.shared_hidden_dim": (24, SHARED_EXPERT), "moe.shared_gate": (True, SHARED_EXPERT),
    "moe.branch_norms": (True, {**SHARED_EXPERT, "model.norm_placement": "both"}),
    "moe.dense_layers": ([1], {**MOE, "model.num_blocks": 2}),
    "moe.dense_hidden_dim": (24, DENSE_FIRST), "moe.routed_scaling": (2.5, MOE),
    "moe.router_bias": (True, MOE), "moe.choice_bias": (True, MOE), "moe.n_groups": (2, MOE),
    "moe.top_k_groups": (2, {**MOE, "moe.n_experts": 8, "moe.n_groups": 4}),
    "moe.group_score": ("top2", {**MOE, "moe.n_groups": 2}),
    "attention.use_rotary_pos": (False,),
    "attention.trainable_pos": (True, {"attention.use_rotary_pos": False}),
    "attention.absolute_pos": (True, {"attention.use_rotary_pos": False}),
    "attention.rope_theta": (500.0,),
    "attention.rope_local_theta": (500.0, {"attention.sliding_window": True,
                                           "attention.context_window": 2}),
    "attention.rope_layers": ([False],), "attention.partial_rotary_factor": (0.5,),
    "attention.rope_short_factors": ([1.0, 3.0, 3.0, 3.0], LONGROPE),
    "attention.rope_long_factors": ([1.0, 3.0, 3.0, 3.0], {**LONGROPE, "model.max_context": 16}),
    "attention.gate_bias": (True, {"attention.no_sink": True}), "model.head_bias": (True,),
    "attention.qkv_bias": (True,), "attention.out_bias": (True,),
    "attention.query_pre_attn_scalar": (2.0,),
    "attention.sliding_window": (True, {"attention.context_window": 2}),
    "attention.context_window": (2, {"attention.sliding_window": True}),
    "attention.layer_types": (["full"], {"attention.sliding_window": True,
                                         "attention.context_window": 2}),
    "attention.attention_multiplier": (0.5,), "attention.latent_norm_epsilon": (1e-3, LATENT),
    "attention.query_scaling_beta": (0.1, LLAMA3), "attention.rope_truncate": (False, YARN),
    "attention.rope_mscale": (0.7, {**YARN, "attention.rope_mscale_all_dim": 1.0}),
    "attention.rope_mscale_all_dim": (1.0, {**YARN, "attention.rope_mscale": 0.7}),
    "attention.no_sink": (True,), "attention.kernel": ("chunked",),
    "attention.attn_logit_softcapping": (50.0,), "attention.kv_lora_rank": (8,),
    "attention.q_lora_rank": (8, LATENT), "attention.v_head_dim": (6, LATENT),
    "attention.qk_rope_head_dim": (6, LATENT), "attention.sink_logits": (True,),
    "attention.rope_scaling": ("linear", FACTOR_4), "attention.rope_factor": (2.0, LINEAR),
    "attention.rope_original_context": (16, {**LLAMA3, "attention.rope_original_context": 8}),
    "attention.low_freq_factor": (2.0, LLAMA3), "attention.high_freq_factor": (8.0, LLAMA3),
    "attention.beta_fast": (16.0, YARN), "attention.beta_slow": (2.0, YARN),
    "attention.rope_attention_factor": (1.5, YARN), "tokenizer.tokenizer_type": ("byte",),
    "tokenizer.vocab_size": (270,),
    "tokenizer.tokenizer_path": ("t.json", {"tokenizer.tokenizer_type": "file"}),
    "tokenizer.byte_fallback": (True, {"tokenizer.tokenizer_type": "char"}),
    "data.chat_template": ("t.jinja", CONVERSATIONS),
    "training.objective": ("dpo", {"training.init_from": "runs/x"}),
    "training.preference_beta": (0.5, PREFERENCES), "training.label_smoothing": (0.1, PREFERENCES),
    "training.simpo_margin": (1.0, {**PREFERENCES, "training.objective": "simpo"}),
    **{f"training.kto_{kind}_weight": (1.5, KTO) for kind in ("desirable", "undesirable")},
    "data.path": ("b.txt",), "data.packing": ("best_fit",),
    "data.mixture": ([3, 1], {"data.path": ["a.txt", "b.txt"]}),
    "data.val_path": ("b.txt",), "data.val_fraction": (0.4,),
    "data.on_bad_file": ("skip", {"data.path": "mixed"}),
    "data.text_field": ("body", {"data.path": "c.jsonl"}),
    **{
        f"data.{key}": (value, {"data.dataset_source": "huggingface", "data.path": "set"})
        for key, value in {"streaming": True, "dataset_split": "test",
                           "dataset_config": "small"}.items()
    },
    "data.dataset_source": ("huggingface", {"data.path": "set"}),
    "training.steps": (7, {"training.warmup_steps": 2}),
    "training.epochs": (2.5,), "training.max_minutes": (2.0,), "training.batch_size": (8,),
    "training.grad_accum": (2,), "training.seed": (1,), "training.optimizer": ("muon",),
    "training.lr": (0.1,), "training.muon_lr": (0.1, {"training.optimizer": "muon"}),
    "training.min_lr_ratio": (0.5,), "training.warmup_steps": (3,),
    "training.schedule": ("linear",),
    "training.decay_fraction": (0.7, {"training.schedule": "wsd"}),
    "training.muon_steps": (5, {"training.optimizer": "muon"}),
    "training.muon_normalize": (True, {"training.optimizer": "muon"}),
    "training.weight_decay": (0.3,), "training.cautious_decay": (True,), "training.ema": (0.9,),
    "training.beta1": (0.5,), "training.beta2": (0.5,),
    "training.grad_clip": (0.5,),
    "training.z_loss": (0.1,), "training.eval_every": (3,), "training.eval_tokens": (64,),
    "training.checkpoint_every": (3,), "training.sample_every": (3,),
    "training.sample_prompt": ("a", {"training.sample_every": 3}), "training.keep_last": (1,),
    "training.patience": (1,), "training.init_from": ("runs/x",), "training.nan_policy": ("skip",),
    "training.deterministic": (True,),
    "grpo.samples": (4, REWARDS), "grpo.loss": ("grpo", REWARDS),
    "grpo.advantage": ("std", REWARDS), "grpo.normalization": ("constant", REWARDS),
    "grpo.clip_low": (0.1, REWARDS), "grpo.clip_high": (0.1, REWARDS),
    "grpo.ratio": ("sequence", REWARDS), "grpo.dynamic_sampling": (True, REWARDS),
    "grpo.kl_weight": (0.1, REWARDS),
    "grpo.max_sampling_rounds": (9, {**REWARDS, "grpo.dynamic_sampling": True}),
    "grpo.updates": (2, REWARDS),
    "grpo.rewards": (["exact_match"], REWARDS),
    "grpo.allow_code_execution": (True, {**REWARDS, "grpo.rewards": ["python_tests"]}),
    "lora.rank": (4, START_FROM), "lora.alpha": (4.0, LORA), "lora.dropout": (0.1, LORA),
    "lora.targets": (["q_proj"], LORA), "lora.base_weights": ("int8", LORA),
    "lora.rank_stabilized": (True, LORA), "lora.dora": (True, LORA),
    "distill.teacher": ("runs/y", DISTILL), "distill.data": ("conversations", DISTILL),
    "distill.divergence": ("reverse_kl", DISTILL), "distill.temperature": (2.0, DISTILL),
    "distill.top_k": (3, DISTILL), "distill.data_weight": (0.5, DISTILL),
    "distill.teacher_weights": ("bfloat16", DISTILL),
    "distill.init_from_teacher": (True, DISTILL),
    "distributed.data": (2,), "distributed.fsdp": (4,), "distributed.expert": (2,),
    "distributed.tensor": (2,),
    "distributed.sequence": (2,),
    "distributed.coordinator": ("auto",),
    "distributed.processes": (2, {**ADDRESS, "distributed.process": 0}),
    "distributed.process": (1, {**ADDRESS, "distributed.processes": 2}),
    "generation.max_new_tokens": (3,), "generation.n": (2,), "generation.seed": (9,),
    "generation.stop": (["a"],),
    "generation.keep_stop": (True, {"generation.stop": ["a"]}),
    "generation.matmul_dtype": ("float32", {"generation.weights": "int8"}),
    "generation.tensor_parallel": (2,),
    "generation.matmul_kernel": ("xla",),
    "generation.stop_token_ids": ([3], {"generation.min_tokens": 2}),
    "generation.json_whitespace": ("flexible",),
    "generation.token_healing": (True,), "generation.loop_stop": (True,),
    "generation.loop_temperature_factor": (2.0,), "generation.loop_max_period": (8, LOOP_STOP),
    "generation.loop_min_repeats": (3, LOOP_STOP),
    "generation.loop_min_tokens": (9, LOOP_STOP),
    "generation.banned_strings": (["ab"],), "generation.banned_regexes": (["a+b"],),
    "generation.ignore_eos": (True,), "generation.use_cache": (False,),
    "generation.weights": ("int8",), "generation.guidance_scale": (1.5,),
    "generation.negative_prompt": ("a", {"generation.guidance_scale": 1.5}),
    "generation.num_beams": (2,), "generation.length_penalty": (0.5, {"generation.num_beams": 2}),
    "generation.early_stopping": ("never", {"generation.num_beams": 2}),
    "generation.greedy": (True,), "generation.strategy": ("entropy",),
    "generation.preset": ("llamacpp",),
    "generation.sampler_order": (["top_p", "top_k"],),
    "generation.no_repeat_ngram": (3,), "generation.logit_bias": ({"3": 1.0},),
    "generation.sequence_bias": ([[[3, 4], 1.0]],), "generation.allowed_tokens": ([3],),
    "generation.banned_tokens": ([3],), "generation.bad_words": ([[3, 4]],),
    "generation.speculation": ("ngram",),
    "generation.draft_tokens": (3, {"generation.speculation": "ngram"}),
    "generation.ngram_size": (2, {"generation.speculation": "ngram"}),
    "generation.draft_run": ("runs/x", {"generation.speculation": "draft"}),
    "generation.min_tokens": (2,), "generation.repetition_penalty": (1.5,),
    "generation.repetition_range": (4, {"generation.repetition_penalty": 1.5}),
    "generation.repetition_slope": (2.0, {"generation.repetition_penalty": 1.5,
                                          "generation.repetition_range": 4}),
    "generation.repetition_scope": ("output", {"generation.repetition_penalty": 1.5}),
    "generation.presence_penalty": (0.5,), "generation.frequency_penalty": (0.5,),
    "generation.presence_scope": ("all", {"generation.presence_penalty": 0.5}),
    "generation.dry_multiplier": (1.0, {"generation.dry_breakers": [1]}),
    **{
        f"generation.dry_{key}": (value, {"generation.dry_multiplier": 1.0,
                                          "generation.dry_breakers": [1]})
        for key, value in {"base": 2.0, "allowed_length": 3, "range": 9}.items()
    },
    "generation.dry_breakers": ([2], {"generation.dry_multiplier": 1.0,
                                      "generation.dry_breakers": [1]}),
    "generation.dynatemp_low": (0.5,), "generation.dynatemp_high": (2.0,),
    "generation.dynatemp_exponent": (2.0, {"generation.dynatemp_high": 2.0}),
    "generation.temperature": (0.5,), "generation.smoothing_factor": (0.3,),
    "generation.smoothing_curve": (2.0, {"generation.smoothing_factor": 0.3}),
    "generation.top_k": (5,), "generation.ties": ("all", {"generation.top_k": 5}),
    "generation.top_p": (0.5,), "generation.top_p_rule": ("exclusive", {"generation.top_p": 0.5}),
    "generation.min_p": (0.1,), "generation.top_a": (0.1,), "generation.tail_free": (0.9,),
    "generation.typical": (0.9,), "generation.epsilon_cutoff": (0.1,),
    "generation.eta_cutoff": (0.1,), "generation.top_n_sigma": (1.0,),
    "generation.xtc_probability": (0.5,),
    "generation.xtc_threshold": (0.2, {"generation.xtc_probability": 0.5}),
    "generation.mirostat": (2,), "generation.encoder_repetition_penalty": (1.5,),
    "generation.min_k": (3.0,), "generation.p_less": ("norm",), "generation.top_h": (0.4,),
    "generation.top_h_rule": ("cumulative", {"generation.top_h": 0.4}), "generation.skew": (0.5,),
    "generation.adaptive_target": (0.3,),
    "generation.adaptive_decay": (0.5, {"generation.adaptive_target": 0.3}),
    "generation.watermark_keys": ([1, 2],),
    "generation.watermark_ngram": (4, {"generation.watermark_keys": [1]}),
    "generation.mirostat_tau": (3.0, {"generation.mirostat": 2}),
    "generation.mirostat_eta": (0.3, {"generation.mirostat": 2}),
    "router.router_preset": ("calibrated", ROUTER), "router.use_attention": (False, ROUTER),
    "router.clarify_token": (3, ROUTER), "router.clarify_text": ("Which?", ROUTER),
    "router.clarify_cooldown": (5, {**ROUTER, "router.clarify_token": 3}),
    "kv.budget": (0.5,), "kv.budget_tokens": (64,), "kv.policy": ("tova", BUDGET),
    "kv.signal": ("uniform", BUDGET), "kv.dtype": ("int8",), "kv.sinks": (0, BUDGET),
    "kv.recent": (8, BUDGET), "kv.window": (8, BUDGET), "kv.pool": (5, BUDGET),
    "kv.decay": ("entropy", BUDGET), "kv.scale_min": (0.5, BY_HEAD), "kv.scale_max": (4.0, BY_HEAD),
    "kv.layer_ratios": ([1.0, 2.0], BUDGET), "kv.grouping": ("mean", BY_HEAD),
    "kv.calibration": ("k.json", BUDGET), "logging.log_every": (3,), "logging.log_file": ("l.csv",),
    "logging.summary_file": ("s.json",), "logging.plot": (False,), "logging.tensorboard": (True,),
    "logging.wandb": (True,), "logging.wandb_project": ("p", {"logging.wandb": True}),
}  # fmt: skip
OTHER |= {  # numbers of the router
    key: (
        5 if key.endswith(("top_k_min", "top_k_max", "base_top_k", "candidates")) else 0.25,
        ROUTER,
    )
    for key in FIELDS
    if key.startswith("router.") and key not in OTHER
}
OTHER["router.explore_top_k_min"] = (3, ROUTER)


def settings_of(key):
    """Returns the prerequisites of a setting and a value."""
    value, *more = OTHER[key]
    return (more or [{}])[0], value


def test_the_table_is_complete():
    assert OTHER.keys() == FIELDS.keys()


def test_a_setting_without_its_prerequisite_is_refused_or_reported():
    inactive = []
    for key in FIELDS:
        needed, value = settings_of(key)
        section, _, name = key.partition(".")
        if key in find_inactive(
            Config.model_validate({section: {name: value}}, context="unchecked")
        ):
            inactive.append(key)
            with pytest.raises(
                UserError, match=rf"^{key} has no effect while .* \(command line\)$"
            ):
                build_config({}, {key: value})
            with pytest.warns(UserWarning, match=rf"{key} has no effect while"):
                build_config({section: {name: value}})
        assert key not in find_inactive(build_config({}, {**needed, key: value}))
    assert len(inactive) > 100


@cache
def lowered_step(text):
    """Returns the number of steps and the lowered_step program of one step."""
    config = build_config(yaml.safe_load(text))
    model, steps = config.architecture(17), total_steps(config, 40)
    step = TrainStep(config, model, steps)
    batch = step.objective.abstract_batch(config.training.batch_size, config.model.max_context)
    return steps, step.program.lower(step.shapes, batch).as_text()


def sampling_parameters(config):
    """Returns the sampling parameters of a row: static structure, values and order."""
    measured = dict.fromkeys(
        ("low_entropy", "low_varentropy", "clarify_entropy", "high_entropy", "high_varentropy"), 0.5
    )
    measured |= {"entropy_scale": 2.0, "varentropy_scale": 2.0}
    filled = config.model_copy(
        update={
            "generation": config.generation.model_copy(update={"seed": config.generation.seed or 1})
        }
    )
    clarify_ids = [[*(filled.router.clarify_text or "").encode()]]
    params = SamplingParams.build(
        filled, stop_ids=[0], protected_ids=[0], clarify_ids=clarify_ids, measured=measured
    )
    leaves, kind = jax.tree.flatten(params)
    return (
        str(kind),
        [np.asarray(leaf).tolist() for leaf in leaves],
        section_order(config.generation),
    )


def is_read_by(key, *packages):
    """Returns whether code of these packages reads a setting."""
    section, _, name = key.partition(".")
    holder = {
        "training": r"(training|t|self\._training)",
        "logging": r"(logging|log)",
        "generation": r"(generation|section|sections\[0\]|one)",
    }
    holder |= {
        "kv": r"kv",
        "data": "data",
        "distributed": "d",
        "grpo": r"(grpo|grpo\.options|section|options)",
    }
    holder["distill"] = "(distill|settings)"
    return re.search(rf"\b{holder[section]}\.{name}\b", source_of(packages)) is not None


@cache
def source_of(packages):
    return "\n".join(
        path.read_text() for package in packages for path in (ROOT / package).rglob("*.py")
    )


LOOP = (
    "max_minutes", "eval_every", "eval_tokens", "checkpoint_every", "sample_every", "sample_prompt",
    "keep_last", "patience", "init_from",
    "deterministic",
)  # fmt: skip
REQUEST = (
    "max_new_tokens",
    "n",
    "stop",
    "keep_stop",
    "ignore_eos",
    "json_whitespace",
    "banned_strings",
    "banned_regexes",
    "token_healing",
    "use_cache",
    "weights",
    "matmul_dtype",
    "matmul_kernel",
    "tensor_parallel",
    "guidance_scale",
    "negative_prompt",
    "num_beams",
    "length_penalty",
    "early_stopping",
)
SAMPLED = (  # settings of `grpo` that affect the batches of a step, but not its program
    "samples", "advantage", "normalization", "dynamic_sampling", "max_sampling_rounds", "updates",
    "rewards",
    "allow_code_execution",
)  # fmt: skip
DRAFTS = ("speculation", "draft_run", "draft_tokens", "ngram_size")
START_UP = ("coordinator", "processes", "process")
DEPENDS_ON_DEPTH = ("depth", "tokens_per_parameter")
HUB = ("dataset_source", "dataset_split", "dataset_config", "streaming")


def prepared_data(config, directory):
    """Returns the tokenizer, the tokens of the corpus and the first batch, or the error."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tokenizer, store = prepare_data(config, directory)
    except UserError as error:
        return str(error)
    return (
        tokenizer.fingerprint,
        store.training_ids.tolist(),
        store.validation_ids.tolist(),
        store.batch(0).tokens_BT.tolist(),
    )


def initial_weights(config):
    """Returns the weights before the first step."""
    return [
        leaf.tolist()
        for leaf in jax.tree.leaves(TrainStep(config, config.architecture(17), 3).initial_state())
    ]


def mesh_of_eight(config):
    """Returns the mesh of eight devices, or the error."""
    try:
        return mesh_sizes(config, config.architecture(17), 8)
    except UserError as error:
        return str(error)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A folder with corpora and a tokenizer."""
    folder = tmp_path_factory.mktemp("corpora")
    lines = [
        f"nel mezzo del cammin {i} di nostra vita mi ritrovai {i * i} per una selva oscura\n"
        for i in range(400)
    ]
    (folder / "a.txt").write_text("".join(lines))
    (folder / "b.txt").write_text("".join(lines)[::-1])
    (folder / "c.jsonl").write_text('{"text": "nel mezzo", "body": "di nostra vita"}\n' * 300)
    (folder / "d.jsonl").write_text('{"prompt": "nel mezzo", "completion": "di nostra vita"}\n' * 9)
    (folder / "mixed").mkdir()
    (folder / "mixed" / "a.txt").write_text("".join(lines))
    (folder / "mixed" / "b.txt").write_bytes(b"\0")
    (folder / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer, _ = prepare_data(
        build_config({}, {**SMALL, "data.path": str(folder / "b.txt")}), folder / "t"
    )
    (folder / "t.json").write_text(tokenizer.to_json())
    return folder


def changes_the_program(key):
    """Returns whether the effect of a setting is a change of the program of a training step, or of
    the weights before it.
    """
    section, _, name = key.partition(".")
    other = (*LOOP, *REQUEST, *SAMPLED, *DRAFTS, *HUB, *START_UP)
    return key in ("moe.alpha_balance", "moe.router_z_loss") or (
        section in ("training", "grpo") and name not in other
    )


def with_and_without(key):
    """Returns the config with the default and with another value of a setting, both with its
    prerequisites.
    """
    needed, value = settings_of(key)
    section, _, name = key.partition(".")
    small = (
        {name: size for name, size in SMALL.items() if name != "model.num_blocks"}
        if name in DEPENDS_ON_DEPTH
        else SMALL
    )
    base = small | ({"data.path": "a.txt"} if section in ("tokenizer", "data") else {})
    after = build_config({}, {**base, **needed, key: value})
    try:
        before = build_config({}, base | needed)
    except UserError:  # the prerequisites require this setting
        before = build_config({}, base)
    return before, after


def has_an_effect(key, folder):
    section, _, name = key.partition(".")
    if (
        section in ("kv", "logging")
        or (section == "distill" and name != "data")
        or name in (*LOOP, *REQUEST, *SAMPLED, *DRAFTS, *HUB, *START_UP)
    ):
        return is_read_by(
            key, "text", "training", "run", "report", "generation", "cli", "lab", "distributed"
        )
    before, after = with_and_without(key)
    if section in ("model", "moe", "attention"):
        return before.architecture(17) != after.architecture(17)
    if section == "distill":
        return before.data_objective != after.data_objective
    if section == "lora":
        return before.trained_architecture(17) != after.trained_architecture(17)
    if section in ("tokenizer", "data"):
        return prepared_data(before, folder / f"{key} before") != prepared_data(
            after, folder / f"{key} after"
        )
    if section == "distributed":
        return mesh_of_eight(before) != mesh_of_eight(after)
    return sampling_parameters(before) != sampling_parameters(after)


def test_every_setting_has_an_effect(corpora, tmp_path, monkeypatch):
    monkeypatch.chdir(corpora)
    assert [
        key for key in FIELDS if not changes_the_program(key) and not has_an_effect(key, tmp_path)
    ] == []


PROGRAM = tuple(filter(changes_the_program, FIELDS))


def test_every_setting_of_a_training_step_is_read():
    """The functions that read them are compared with closed forms in tests/training."""
    names = [key.partition(".")[2] for key in PROGRAM]
    source = source_of(("config", "training"))
    assert (
        len(PROGRAM) > 30
        and [name for name in names if not re.search(rf"(?<!\d)\.{name}\b", source)] == []
    )


@pytest.mark.slow
@pytest.mark.parametrize("key", PROGRAM)
def test_every_setting_of_a_training_step_changes_its_program(key):
    before, after = with_and_without(key)
    if key == "training.seed":
        assert initial_weights(before) != initial_weights(after)
    else:
        assert lowered_step(dump_config(before)) != lowered_step(dump_config(after))
