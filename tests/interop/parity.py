"""Compares new random models of every family with transformers, with every option that affects the
logits.

    make parity        (or, where torch and transformers are installed: python -m tests.interop.parity [--seeds N] [FAMILY …])

Each row is a model. The columns are the largest difference of logits in float32, after import and
after export to transformers; the number of positions whose most likely token differs; and the mean
difference between bfloat16 and float32 logits in each library. For vision–language models, the
logits of text are compared.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from dantinox.config import build_config
from dantinox.interop.hf.hf_config import hf_config_to_settings
from dantinox.interop.hf.hf_folder import open_tensors, write_tensors
from dantinox.interop.hf.hf_multimodal import extract_text_model
from dantinox.interop.hf.hf_weights import from_hf, to_hf
from dantinox.model.parameters import abstract_model

sys.path.insert(0, str(Path(__file__).parent))
from families import FAMILIES, LLAMA3, LOCAL, LONGROPE, PROPORTIONAL, SWITCHED, YARN
from make_checkpoints import random_model
from make_multimodal import MODELS as MULTIMODAL
from make_multimodal import random_multimodal

LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
NTK_ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
YARN_ALL = YARN | {"attention_factor": 1.2, "beta_fast": 8.0, "beta_slow": 2.0}
ALL_YARN = {"max_position_embeddings": 64, "rope_parameters": YARN_ALL}
SOME = {"layer_types": ["full_attention", "sliding_attention"]}
BIASES = {"attention_bias": True}
GEMMA4_MOE = {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
TANH = {"hidden_act": "gelu_pytorch_tanh"}
# Changes to the example of each family.
OPTIONS: dict[str, list[dict]] = {
    "llama": [{}, UNTIED, BIASES, {"mlp_bias": True}, {"head_dim": 12}, TANH,
              {"num_key_value_heads": 1},
              {"num_key_value_heads": 4}, {"rms_norm_eps": 1e-2}, {"rope_parameters": LINEAR},
              {"rope_parameters": YARN_ALL}, {"rope_parameters": DEFAULT},
              {"rope_parameters": LLAMA3 | {"low_freq_factor": 0.5, "high_freq_factor": 3.0}},
              {"num_hidden_layers": 5, "vocab_size": 71}],
    "mistral": [{}, {"sliding_window": None}, TIED, {"rope_parameters": YARN}, TANH],
    "qwen2": [{}, {"use_sliding_window": False}, TIED, {"layer_types": ["sliding_attention",
        "full_attention"]},
              {"rope_parameters": YARN_ALL}],
    "qwen3": [{}, SWITCHED | {"max_window_layers": 1}, BIASES, UNTIED,
              {"rope_parameters": YARN_ALL}],
    "smollm3": [{}, SWITCHED, BIASES, {"mlp_bias": True}, UNTIED, {"no_rope_layers": [0, 1]},
                {"no_rope_layers": [1, 1]},
                {"rope_parameters": LINEAR}],
    "phi3": [{}, {"rope_parameters": DEFAULT}, {"rope_parameters": DEFAULT
                                                | {"partial_rotary_factor": 0.5}},
             {"sliding_window": 6}, TIED, {"rope_parameters": LONGROPE
                                           | {"attention_factor": 1.3}}],
    "olmo2": [{}, BIASES, {"num_key_value_heads": 1}, {"num_key_value_heads": 4},
              {"rope_parameters": LINEAR}, TIED],
    "gemma2": [{}, {"attn_logit_softcapping": None}, {"final_logit_softcapping": None},
               {"final_logit_softcapping": 2.0}, SOME,
               BIASES, {"query_pre_attn_scalar": 3}, UNTIED],
    "gemma3_text": [{}, SOME, {"num_hidden_layers": 7, "layer_types": None},
                    {"final_logit_softcapping": 2.0},
                    BIASES,
                    {"rope_parameters": LOCAL | {"full_attention": YARN_ALL}}],
    "gemma4_text": [{}, {"attention_k_eq_v": False}, {"num_kv_shared_layers": 0},
                    {"num_kv_shared_layers": 1},
                    {"use_double_wide_mlp": False}, {"final_logit_softcapping": None},
                    # Without these embeddings, transformers 5.24 fails if layers share keys.
                    {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
                    {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
                     "attention_k_eq_v": False},
                    {"global_head_dim": 12}, {"global_head_dim": 12, "attention_k_eq_v": False},
                    {"head_dim": 16}, {"num_global_key_value_heads": 2},
                    {"num_global_key_value_heads": 4}, UNTIED, {"rms_norm_eps": 1e-2}, BIASES,
                    {"attention_k_eq_v": False} | BIASES, {"sliding_window": 3},
                    {"hidden_activation": "silu"},
                    {"layer_types": ["full_attention"] * 5},
                    {"layer_types": None, "num_hidden_layers": 6, "num_kv_shared_layers": 0},
                    {"layer_types": [*["sliding_attention"] * 3, "full_attention",
                                     "sliding_attention"],
                     "num_kv_shared_layers": 1},
                    {"rope_parameters": None}, {"rope_parameters": LOCAL},
                    {"use_bidirectional_attention": "vision"},
                    {"rope_parameters": PROPORTIONAL
                     | {"full_attention": PROPORTIONAL["full_attention"] | {"factor": 8.0}}},
                    GEMMA4_MOE, GEMMA4_MOE | {"top_k_experts": 1},
                    GEMMA4_MOE | {"use_double_wide_mlp": False},
                    GEMMA4_MOE | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
                                  "attention_k_eq_v": False}],
    "olmo3": [{}, BIASES, {"layer_types": None, "num_hidden_layers": 5}, {"num_key_value_heads": 1},
              TIED,
              {"rope_parameters": LOCAL}],
    "olmo": [{}, BIASES, {"num_key_value_heads": 1}, TIED, {"rope_parameters": LINEAR}],
    "gemma": [{}, BIASES, {"hidden_act": "silu"}, {"num_key_value_heads": 1},
              {"rope_parameters": LINEAR}, UNTIED],
    "ministral": [{}, {"layer_types": None}, TIED, {"rope_parameters": YARN_ALL}],
    "ministral3": [{}, {"sliding_window": 6}, TIED, {"rope_parameters": YARN
                                                     | {"llama_4_scaling_beta": 1.1}}],
    "glm": [{}, {"attention_bias": False}, {"partial_rotary_factor": 1.0}, TIED,
            {"num_key_value_heads": 1}],
    "glm4": [{}, {"attention_bias": False}, {"partial_rotary_factor": 1.0}, TIED,
             {"num_key_value_heads": 1}],
    "stablelm": [{}, {"use_parallel_residual": True}, {"use_qkv_bias": False},
                 {"partial_rotary_factor": 0.5}, TIED],
    "phi": [{}, {"partial_rotary_factor": 0.25}, {"num_key_value_heads": 4},
            {"hidden_act": "relu2"}],
    "starcoder2": [{}, {"use_bias": False}, {"sliding_window": None}, UNTIED,
                   {"rope_parameters": YARN}],
    "cohere": [{}, BIASES, {"num_key_value_heads": 4}, UNTIED, {"rope_parameters": LINEAR},
               {"layer_norm_eps": 1e-2}],
    "cohere2": [{}, BIASES, {"layer_types": None, "num_hidden_layers": 5}, UNTIED,
                {"layer_types": ["full_attention", "full_attention"]}],
    "exaone4": [{}, {"layer_types": None, "num_hidden_layers": 5}, TIED,
                {"rope_parameters": YARN_ALL},
                {"sliding_window": None, "layer_types": ["full_attention", "full_attention"]}],
    "nanochat": [{}, BIASES, {"final_logit_softcapping": None}, {"num_key_value_heads": 1},
                 {"rope_parameters": LINEAR}, TIED],
    "helium": [{}, BIASES, {"mlp_bias": True}, TIED, {"num_key_value_heads": 1}],
    "hunyuan_v1_dense": [{}, BIASES, TIED, {"rope_parameters": NTK_ALPHA}],
    "seed_oss": [{}, {"attention_bias": False}, {"attention_out_bias": True}, {"mlp_bias": True},
                 TIED],
    "ernie4_5": [{}, {"use_bias": True}, UNTIED, {"num_key_value_heads": 4}],
    "arcee": [{}, BIASES, {"mlp_bias": True}, TIED, {"rope_parameters": YARN_ALL}],
    "bitnet": [{}, BIASES, {"hidden_act": "silu"}, {"num_key_value_heads": 4}, TIED,
               {"rope_parameters": YARN_ALL}],
    "gpt2": [{}, {"n_inner": 48}, {"activation_function": "gelu_pytorch_tanh"},
             {"layer_norm_epsilon": 1e-2}, UNTIED],
    "mixtral": [{}, {"sliding_window": 6}, {"num_local_experts": 3, "num_experts_per_tok": 3}, TIED,
                {"head_dim": 12}],
    "qwen3_moe": [{}, {"norm_topk_prob": False}, SWITCHED, BIASES, {"num_experts_per_tok": 1,
        "norm_topk_prob": False},
                  {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}],
    "qwen2_moe": [{}, {"norm_topk_prob": True}, {"qkv_bias": False}, {"mlp_only_layers": []},
                  {"decoder_sparse_step": 2, "mlp_only_layers": []},
                  SWITCHED, {"shared_expert_intermediate_size": 24}, TIED,
                  {"rope_parameters": YARN_ALL}],
    "olmoe": [{}, {"norm_topk_prob": True}, BIASES, {"num_key_value_heads": 1}, TIED],
    "gpt_oss": [{}, {"swiglu_limit": 0.3}, {"swiglu_alpha": 1.1}, {"attention_bias": False}, SOME,
                {"sliding_window": 3},
                {"rope_parameters": YARN_ALL}, {"rope_parameters": DEFAULT},
                {"num_experts_per_tok": 4}, TIED],
    "deepseek_v2": [{}, {"topk_method": "greedy"}, {"q_lora_rank": 20},
                    {"routed_scaling_factor": 1.0},
                    {"first_k_dense_replace": 0}, {"n_shared_experts": 1}, TIED,
                    {"num_experts_per_tok": 1},
                    {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
                    {"rope_parameters": YARN_ALL}],
    "deepseek_v3": [{}, {"rope_interleave": False}, {"q_lora_rank": None},
                    {"norm_topk_prob": False}, {"n_group": 1},
                    {"rope_parameters": YARN | {"mscale_all_dim": 1.2}},
                    {"rope_parameters": DEFAULT}, TIED, {"rms_norm_eps": 1e-2},
                    {"n_routed_experts": 8, "n_group": 4, "topk_group": 2,
                     "num_experts_per_tok": 3},
                    {"first_k_dense_replace": 0}],
    "granite": [{}, {"embedding_multiplier": 1.0}, {"residual_multiplier": 1.0},
                {"logits_scaling": 1.0},
                {"attention_multiplier": 1.0}, BIASES, {"mlp_bias": True}, TIED,
                {"rope_parameters": YARN_ALL}],
    "granitemoe": [{}, {"num_local_experts": 3, "num_experts_per_tok": 3}, BIASES, TIED],
    "granitemoeshared": [{}, {"shared_intermediate_size": 40}, TIED],
    "granitemoehybrid": [{}, {"position_embedding_type": "rope"}, {"num_local_experts": 4}, BIASES,
                         TIED],
    "dots1": [{}, {"norm_topk_prob": False}, BIASES, {"sliding_window": 6, "max_window_layers": 1},
              {"n_group": 2},
              {"first_k_dense_replace": 0}, TIED],
    "glm4_moe_lite": [{}, {"rope_interleave": False}, {"q_lora_rank": None},
                      {"mlp_layer_types": None}, {"n_group": 2}, TIED],
    "glm4_moe": [{}, {"use_qk_norm": False}, {"norm_topk_prob": False}, BIASES, {"n_group": 2},
                 {"first_k_dense_replace": 0},
                 {"rope_parameters": DEFAULT | {"partial_rotary_factor": 1.0}}, TIED],
    "ernie4_5_moe": [{}, {"moe_num_shared_experts": 0}, {"moe_layer_interval": 2,
                                                         "moe_layer_start_index": 0},
                     {"moe_layer_start_index": 0, "moe_layer_end_index": 0}, UNTIED,
                     {"rope_parameters": DEFAULT}],
}  # fmt: skip
ROWS, LENGTH = 2, 40


def dantinox_logits(folder: Path, tokens_BT: np.ndarray, dtype: str) -> np.ndarray:
    config, files, _ = extract_text_model(
        json.loads((folder / "config.json").read_text()), open_tensors(folder)
    )
    settings = hf_config_to_settings(config, max_context=64)
    settings["model"]["dtype"] = dtype
    imported = build_config(settings)
    model = imported.architecture(config["vocab_size"], "cpu")
    arrays = from_hf(config, model, files)
    if dtype == "float32":
        _, back = to_hf(imported, config["vocab_size"], arrays, config)
        assert all(back[name].tobytes() == files[name].tobytes() for name in files.tensors), (
            "the exported tensors differ"
        )
        written, tensors = to_hf(
            imported, config["vocab_size"], arrays
        )  # without the original config.json
        (folder / "back").mkdir()
        (folder / "back" / "config.json").write_text(json.dumps(written | {"pad_token_id": None}))
        write_tensors(folder / "back", tensors, tensors.tensors)
    built = abstract_model(model)[0]({name: jnp.asarray(arrays[name]) for name in arrays})
    positions_BT = jnp.broadcast_to(
        jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape
    )
    return np.asarray(built(jnp.asarray(tokens_BT), positions_BT)[0], np.float32)


def transformers_logits(model, tokens_BT: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return (
            model(torch.tensor(tokens_BT, dtype=torch.long), use_cache=False).logits.float().numpy()
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY", help="families to compare (default: all)"
    )
    parser.add_argument("--seeds", type=int, default=1, help="models of each kind (default: 1)")
    options = parser.parse_args()
    fresh = int.from_bytes(np.random.default_rng().bytes(3), "little")
    print(
        f"seeds from {fresh}\n{'family':16} {'float32':>8} {'back':>8} {'tokens':>8}"
        f" {'bfloat16':>9} {'peer':>8}  changed"
    )
    worst = mismatches = rows = 0
    for family in options.families or [*FAMILIES, *MULTIMODAL]:
        for changes in OPTIONS.get(family, [{}]):
            for seed in range(fresh, fresh + options.seeds):
                tokens_BT = (
                    np.random.default_rng(seed).integers(0, 64, (ROWS, LENGTH)).astype(np.int32)
                )
                model = (
                    random_multimodal(family, seed)
                    if family in MULTIMODAL
                    else random_model(family, seed, **changes)
                )
                with tempfile.TemporaryDirectory() as folder:
                    model.save_pretrained(folder)
                    expected = transformers_logits(model, tokens_BT)
                    found = dantinox_logits(Path(folder), tokens_BT, "float32")
                    back = AutoModelForCausalLM.from_pretrained(
                        f"{folder}/back", attn_implementation="eager", dtype="float32"
                    )
                    returned = np.abs(transformers_logits(back.eval(), tokens_BT) - expected).max()
                    model = model.to(torch.bfloat16)
                    model.save_pretrained(folder)
                    bfloat16, peer_bfloat16 = (
                        dantinox_logits(Path(folder), tokens_BT, "bfloat16"),
                        transformers_logits(model, tokens_BT),
                    )
                    exact = transformers_logits(model.float(), tokens_BT)
                apart = np.abs(found - expected).max()
                wrong = int((found.argmax(-1) != expected.argmax(-1)).sum())
                errors = np.abs(bfloat16 - exact).mean(), np.abs(peer_bfloat16 - exact).mean()
                what = ", ".join(f"{key}={value}" for key, value in changes.items())[:90]
                numbers = (
                    f"{apart:8.1e} {returned:8.1e} {wrong:5}/{tokens_BT.size} {errors[0]:9.1e}"
                    f" {errors[1]:8.1e}"
                )
                print(f"{family:16} {numbers}  {what}", flush=True)
                worst, rows = max(worst, apart, returned), rows + 1
                mismatches += wrong > 0 or max(apart, returned) > 2e-4
    print(f"{rows} models: largest difference {worst:.1e} in float32, {mismatches} mismatches")
    return int(mismatches > 0)


if __name__ == "__main__":
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    sys.exit(main())
