"""The GGUF model families: for each family, the tensor names in GGUF and in transformers, and the
fixed settings.

The properties of each architecture are taken from llama.cpp (`conversion/` and `src/models/`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from dantinox.interop.gguf.gguf_matrices import PLAIN, TERNARY, MatrixFormat
from dantinox.interop.gguf.gguf_tensors import (
    ARCEE,
    ATTENTION,
    BITNET_DENSE,
    CHATGLM,
    COHERE,
    DENSE,
    DENSE_GATE_UP,
    EMBEDDINGS_AND_HEAD,
    EXPERT_DOWN_BIAS,
    GEMMA4,
    GEMMA4_MERGED,
    GLM4,
    GLM4_MOE,
    GPT2,
    GPT_OSS,
    GRANITE,
    GRANITE_HYBRID,
    GRANITE_MERGED,
    GRANITE_SHARED,
    HEAD_NORMS,
    HEAD_NORMS_AFTER_ROPE,
    INTERLEAVED_GATE_UP,
    INTERLEAVED_GATE_UP_BIAS,
    LATENT_ATTENTION,
    LATENT_KV,
    LAYER,
    MLP,
    MOE,
    NORMS_AFTER,
    NORMS_BEFORE,
    NORMS_BOTH,
    OLMO,
    PHI2,
    PHI3,
    SCORE_CORRECTION_BIAS,
    SCORE_CORRECTION_BIAS_ROW,
    SEED_OSS,
    SHARED_EXPERTS,
    SHARED_GATE,
    SHARED_GATE_UP,
    SINK_LOGITS,
    STARCODER2,
    TIED_EMBEDDINGS,
    TRANSPOSED_DOWN,
    MergedTensor,
    expert_names,
    shared_expert_names,
    sub_norms,
)
from dantinox.interop.hf.hf_family import BITNET, without

# A key of `config.json`, a type, a default (None: the metadata key is required).
MetadataKey = tuple[str, type[Any], Any]


class Family(NamedTuple):
    """A transformers model family and its GGUF representation.

    Attributes:
      model_type: the name of the family in transformers.
      arch: the name of the architecture in llama.cpp.
      names: maps module names of GGUF to those of transformers, with `{}` for the layer index and
        `{e}` for the expert index.
      fixed: keys of `config.json` whose values the architecture implies.
      interleaved_rope: whether the query and key rows in GGUF are ordered for the rotary pairs (x₀,
        x₁), (x₂, x₃), ….
      norms_plus_one: whether GGUF stores norm weights as 1 + w.
      latent: whether attention is latent (MLA).
      full_every: n if every n-th layer has no sliding window; 0 if llama.cpp supports no windows
        for this architecture.
      epsilon_key: the key of `config.json` for the epsilon of norms; a key other than
        `rms_norm_eps` means layer norms.
      keys: the metadata keys of this family, see `MetadataKey`.
      merged: transformers tensors that GGUF splits or stores with other axes, by name, with `{}`
        for the layer index.
      matrices: how the weight matrices are stored.
    """

    model_type: str
    arch: str
    names: Mapping[str, str]
    fixed: Mapping[str, Any]
    interleaved_rope: bool = False
    norms_plus_one: bool = False
    latent: bool = False
    full_every: int = 0
    epsilon_key: str = "rms_norm_eps"
    keys: Mapping[str, MetadataKey] = {}
    merged: Mapping[str, MergedTensor] = {}
    matrices: MatrixFormat = PLAIN


EXPERT_KEYS: dict[str, MetadataKey] = {
    "expert_count": ("num_experts", int, None),
    "expert_used_count": ("num_experts_per_tok", int, None),
    "expert_feed_forward_length": ("moe_intermediate_size", int, None),
}
LOCAL_EXPERT_KEYS: dict[str, MetadataKey] = {
    "expert_count": ("num_local_experts", int, None),
    "expert_used_count": ("num_experts_per_tok", int, None),
}
DEEPSEEK_KEYS = EXPERT_KEYS | {
    "expert_count": ("n_routed_experts", int, None),
    "expert_shared_count": ("n_shared_experts", int, None),
    "expert_weights_scale": ("routed_scaling_factor", float, 1.0),
    "expert_weights_norm": ("norm_topk_prob", bool, False),
    "leading_dense_block_count": ("first_k_dense_replace", int, 0),
    "expert_group_count": ("n_group", int, 1),
    "expert_group_used_count": ("topk_group", int, 1),
}
SCALE_KEYS: dict[str, MetadataKey] = {
    "logit_scale": ("logits_scaling", float, None),
    "residual_scale": ("residual_multiplier", float, 1.0),
    "embedding_scale": ("embedding_multiplier", float, 1.0),
    "attention.scale": ("attention_multiplier", float, None),
}
GRANITE_KEYS = SCALE_KEYS | LOCAL_EXPERT_KEYS
GRANITE_SHARED_KEYS = GRANITE_KEYS | {
    "expert_shared_feed_forward_length": ("shared_intermediate_size", int, None)
}
SILU = {"hidden_act": "silu"}
GELU = {"hidden_activation": "gelu_pytorch_tanh"}
NO_BIAS = {"attention_bias": False}
GRANITE_MOE_SHARED = Family(
    "granitemoeshared",
    "granitemoe",
    GRANITE_SHARED,
    SILU | NO_BIAS,
    interleaved_rope=True,
    keys=GRANITE_SHARED_KEYS,
    merged=GRANITE_MERGED | {LAYER + "shared_mlp.input_linear.weight": SHARED_GATE_UP},
)
# If several families have the architecture of a file, it is read as the first of them, unless
# `gguf_config` selects another.
FAMILIES = (
    Family("llama", "llama", DENSE, SILU, interleaved_rope=True),
    Family("mistral", "llama", DENSE, SILU, interleaved_rope=True),
    Family("ministral", "llama", DENSE, SILU, interleaved_rope=True),
    Family("helium", "llama", DENSE, SILU),
    Family("ministral3", "mistral3", DENSE, SILU, interleaved_rope=True),
    Family(
        "mixtral",
        "llama",
        expert_names("block_sparse_moe", "w1", "w3", "w2"),
        SILU,
        interleaved_rope=True,
        keys=LOCAL_EXPERT_KEYS,
    ),
    Family(
        "smollm3", "smollm3", DENSE, SILU | {"no_rope_layer_interval": 4}, interleaved_rope=True
    ),
    Family("qwen2", "qwen2", DENSE, SILU),
    Family("qwen3", "qwen3", DENSE | HEAD_NORMS, SILU | NO_BIAS),
    Family(
        "qwen3_moe",
        "qwen3moe",
        MOE | HEAD_NORMS,
        SILU | NO_BIAS | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        keys=EXPERT_KEYS,
    ),
    Family(
        "qwen2_moe",
        "qwen2moe",
        MOE | shared_expert_names("shared_expert"),
        SILU
        | {
            "qkv_bias": True,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        keys=EXPERT_KEYS
        | {"expert_shared_feed_forward_length": ("shared_expert_intermediate_size", int, None)},
        merged={f"{LAYER}mlp.shared_expert_gate.weight": SHARED_GATE},
    ),
    Family(
        "olmoe",
        "olmoe",
        MOE | HEAD_NORMS,
        SILU | NO_BIAS | {"norm_topk_prob": False},
        keys=without(EXPERT_KEYS, "expert_feed_forward_length"),
    ),
    Family(
        "gpt_oss",
        "gpt-oss",
        GPT_OSS,
        SILU | {"attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        full_every=2,
        keys=LOCAL_EXPERT_KEYS | {"expert_feed_forward_length": ("intermediate_size", int, None)},
        merged={
            f"{LAYER}self_attn.sinks": SINK_LOGITS,
            f"{LAYER}mlp.experts.gate_up_proj": INTERLEAVED_GATE_UP,
            f"{LAYER}mlp.experts.gate_up_proj_bias": INTERLEAVED_GATE_UP_BIAS,
            f"{LAYER}mlp.experts.down_proj": TRANSPOSED_DOWN,
            f"{LAYER}mlp.experts.down_proj_bias": EXPERT_DOWN_BIAS,
        },
    ),
    Family(
        "deepseek_v2",
        "deepseek2",
        LATENT_ATTENTION,
        SILU | NO_BIAS,
        latent=True,
        keys=without(DEEPSEEK_KEYS, "expert_weights_norm"),
        merged={f"{LAYER}self_attn.kv_b_proj.weight": LATENT_KV},
    ),
    Family(
        "deepseek_v3",
        "deepseek2",
        LATENT_ATTENTION,
        SILU | NO_BIAS,
        latent=True,
        keys=DEEPSEEK_KEYS,
        merged={
            f"{LAYER}self_attn.kv_b_proj.weight": LATENT_KV,
            f"{LAYER}mlp.gate.e_score_correction_bias": SCORE_CORRECTION_BIAS,
        },
    ),
    Family(
        "dots1",
        "dots1",
        MOE | MLP | HEAD_NORMS | SHARED_EXPERTS,
        SILU | NO_BIAS | {"sliding_window": None},
        keys=DEEPSEEK_KEYS,
        merged={f"{LAYER}mlp.gate.e_score_correction_bias": SCORE_CORRECTION_BIAS},
    ),
    Family(
        "glm4_moe",
        "glm4moe",
        GLM4_MOE,
        SILU,
        keys=DEEPSEEK_KEYS,
        merged={f"{LAYER}mlp.gate.e_score_correction_bias": SCORE_CORRECTION_BIAS},
    ),
    Family(
        "ernie4_5_moe",
        "ernie4_5-moe",
        MOE | MLP | SHARED_EXPERTS,
        SILU | {"use_bias": False, "moe_layer_end_index": -1},
        keys={
            "expert_count": ("moe_num_experts", int, None),
            "expert_used_count": ("moe_k", int, None),
            "expert_feed_forward_length": ("moe_intermediate_size", int, None),
            "expert_shared_count": ("moe_num_shared_experts", int, 0),
            "leading_dense_block_count": ("moe_layer_start_index", int, 0),
            "interleave_moe_layer_step": ("moe_layer_interval", int, None),
        },
        merged={f"{LAYER}mlp.moe_statics.e_score_correction_bias": SCORE_CORRECTION_BIAS_ROW},
    ),
    Family(
        "gemma",
        "gemma",
        TIED_EMBEDDINGS | ATTENTION | NORMS_BEFORE | MLP,
        {"hidden_act": "gelu_pytorch_tanh"} | NO_BIAS,
        norms_plus_one=True,
    ),
    Family(
        "seed_oss", "seed_oss", SEED_OSS, SILU | {"attention_out_bias": False, "mlp_bias": False}
    ),
    Family("ernie4_5", "ernie4_5", DENSE, SILU | {"use_bias": False}),
    Family("hunyuan_v1_dense", "hunyuan-dense", DENSE | HEAD_NORMS_AFTER_ROPE, SILU | NO_BIAS),
    Family("glm", "chatglm", CHATGLM, SILU),
    Family("glm4", "glm4", GLM4, SILU),
    Family("stablelm", "stablelm", DENSE, SILU, epsilon_key="layer_norm_eps"),
    Family("phi", "phi2", PHI2, {"hidden_act": "gelu_new"}, epsilon_key="layer_norm_eps"),
    Family(
        "starcoder2",
        "starcoder2",
        STARCODER2,
        {"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": None},
        epsilon_key="norm_epsilon",
    ),
    Family(
        "cohere",
        "command-r",
        COHERE,
        SILU | NO_BIAS,
        epsilon_key="layer_norm_eps",
        keys={"logit_scale": ("logit_scale", float, None)},
    ),
    Family(
        "cohere2",
        "cohere2",
        COHERE,
        SILU | NO_BIAS,
        full_every=4,
        epsilon_key="layer_norm_eps",
        keys={"logit_scale": ("logit_scale", float, None)},
    ),
    Family(
        "arcee",
        "arcee",
        ARCEE,
        {"hidden_act": "relu2", "mlp_bias": False} | NO_BIAS,
        interleaved_rope=True,
    ),
    Family(
        "exaone4", "exaone4", EMBEDDINGS_AND_HEAD | ATTENTION | NORMS_AFTER | MLP | HEAD_NORMS, SILU
    ),
    Family(
        "gemma2",
        "gemma2",
        TIED_EMBEDDINGS | ATTENTION | NORMS_BOTH | MLP,
        GELU | NO_BIAS,
        norms_plus_one=True,
        full_every=2,
    ),
    Family(
        "gemma3_text",
        "gemma3",
        EMBEDDINGS_AND_HEAD | ATTENTION | NORMS_BOTH | MLP | HEAD_NORMS,
        GELU | NO_BIAS,
        norms_plus_one=True,
        full_every=6,
    ),
    Family("gemma4_text", "gemma4", GEMMA4, GELU | NO_BIAS, full_every=6, merged=GEMMA4_MERGED),
    Family("phi3", "phi3", PHI3, SILU),
    Family(
        "olmo", "olmo", OLMO, SILU | NO_BIAS, interleaved_rope=True, epsilon_key="layer_norm_eps"
    ),
    Family(
        "olmo2",
        "olmo2",
        EMBEDDINGS_AND_HEAD | ATTENTION | NORMS_AFTER | MLP | HEAD_NORMS,
        SILU | NO_BIAS,
    ),
    Family(
        "olmo3",
        "olmo2",
        EMBEDDINGS_AND_HEAD | ATTENTION | NORMS_AFTER | MLP | HEAD_NORMS,
        SILU | NO_BIAS,
        full_every=4,
    ),
    Family("granite", "granite", DENSE, SILU, interleaved_rope=True, keys=SCALE_KEYS),
    Family(
        "granitemoehybrid",
        "granite",
        GRANITE_HYBRID,
        SILU | {"num_local_experts": 0, "position_embedding_type": None, "mamba_n_heads": 1},
        interleaved_rope=True,
        keys=SCALE_KEYS | {"feed_forward_length": ("shared_intermediate_size", int, None)},
        merged={LAYER + "shared_mlp.input_linear.weight": DENSE_GATE_UP},
    ),
    Family(
        "granitemoe",
        "granitemoe",
        GRANITE,
        SILU | NO_BIAS,
        interleaved_rope=True,
        keys=GRANITE_KEYS,
        merged=GRANITE_MERGED,
    ),
    GRANITE_MOE_SHARED,
    GRANITE_MOE_SHARED._replace(model_type="granitemoehybrid"),
    Family(
        "bitnet",
        "bitnet",
        BITNET_DENSE | sub_norms("attn_sub_norm", "ffn_sub_norm"),
        SILU | NO_BIAS | {"quantization_config": BITNET},
        matrices=TERNARY,
    ),
    Family(
        "bitnet_b1_58",
        "bitnet",
        BITNET_DENSE | sub_norms("inner_attn_ln", "ffn_layernorm"),
        SILU | NO_BIAS | {"quantization_config": BITNET},
        matrices=TERNARY,
    ),
    Family("gpt2", "gpt2", GPT2, {"activation_function": "gelu_new"}),
)
