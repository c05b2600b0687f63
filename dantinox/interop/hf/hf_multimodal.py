"""Text models inside vision–language checkpoints of Hugging Face.

A vision–language checkpoint contains a text model, an image encoder, and a projector between them.
This module reads only the text model: its part of `config.json`, and its tensors, renamed as in a
checkpoint that contains only the text model.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from dantinox.files import UserError, escape_name, quote
from dantinox.interop.hf.hf_families import FAMILIES
from dantinox.interop.source import LazyArrays


class Multimodal(NamedTuple):
    """A multimodal model.

    Attributes:
      architecture: the model class in transformers.
      text: the `model_type` of the text model, used if `text_config` has no `model_type`.
      others: the parts that are not imported, as the first component of their tensor names after
        the prefix `model.`.
      flat: for models whose older files have the keys of the text model at the top level of
        `config.json`, the top-level keys that belong to the other parts.
    """

    architecture: str
    text: str
    others: tuple[str, ...] = ("vision_tower", "multi_modal_projector")
    flat: tuple[str, ...] = ()


IDEFICS = ("vision_model", "connector")
QWEN_KEYS = (
    "vision_config", "image_token_id", "video_token_id", "vision_start_token_id",
    "vision_end_token_id", "vision_token_id",
)  # fmt: skip
MULTIMODAL = {
    "gemma3": Multimodal("Gemma3ForConditionalGeneration", "gemma3_text"),
    "gemma4": Multimodal(
        "Gemma4ForConditionalGeneration",
        "gemma4_text",
        ("vision_tower", "audio_tower", "embed_vision", "embed_audio"),
    ),
    "mistral3": Multimodal("Mistral3ForConditionalGeneration", "mistral"),
    "llava": Multimodal("LlavaForConditionalGeneration", "llama"),
    "llava_next": Multimodal(
        "LlavaNextForConditionalGeneration",
        "llama",
        ("vision_tower", "multi_modal_projector", "image_newline"),
    ),
    "llava_onevision": Multimodal(
        "LlavaOnevisionForConditionalGeneration",
        "qwen2",
        ("vision_tower", "multi_modal_projector", "image_newline"),
    ),
    "internvl": Multimodal("InternVLForConditionalGeneration", "qwen2"),
    "idefics2": Multimodal("Idefics2ForConditionalGeneration", "mistral", IDEFICS),
    "idefics3": Multimodal("Idefics3ForConditionalGeneration", "llama", IDEFICS),
    "smolvlm": Multimodal("SmolVLMForConditionalGeneration", "llama", IDEFICS),
    "qwen2_vl": Multimodal(
        "Qwen2VLForConditionalGeneration", "qwen2_vl_text", ("visual",), QWEN_KEYS
    ),
    "qwen2_5_vl": Multimodal(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", ("visual",), QWEN_KEYS
    ),
    "qwen3_vl": Multimodal("Qwen3VLForConditionalGeneration", "qwen3_vl_text", ("visual",)),
}
# Text models with multimodal rotary positions (M-RoPE), and the equivalent families without M-RoPE.
# The three positions of a text token are equal, so plain RoPE gives the same rotations.
MROPE_MODELS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
MROPE_KEYS = ("mrope_section", "mrope_interleaved")


def _sizes(vocabulary: int, width: int, mlp_width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": mlp_width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


# Transformers' defaults for a `text_config`. Older versions do not write keys that have the default
# value.
QWEN_VL = _sizes(152064, 8192, 29568, 80, 64) | {
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80, "rope_theta": 1e6,
}  # fmt: skip
QWEN_7B = _sizes(151936, 4096, 22016, 32, 32) | {"num_key_value_heads": 32}
MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0,
    "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _sizes(32000, 4096, 11008, 32, 32),
    "mistral": _sizes(32000, 4096, 14336, 32, 32),
    "ministral3": _sizes(131072, 4096, 14336, 34, 32) | {"rope_parameters": MINISTRAL3_ROPE},
    "qwen2": QWEN_7B,
    "qwen3": QWEN_7B,
    "gemma3_text": _sizes(262208, 2304, 9216, 26, 8),
    "gemma4_text": _sizes(262144, 2304, 9216, 30, 8),
    "qwen2_vl_text": QWEN_VL,
    "qwen2_5_vl_text": QWEN_VL,
    "qwen3_vl_text": QWEN_7B | {"max_position_embeddings": 128000, "rope_theta": 5e5},
}
# Keys in the `text_config` of Idefics and SmolVLM: first those that do not change the text model,
# then those that must have the given value.
IGNORED_KEYS = (
    "_flash_attn_2_enabled",
    "neftune_noise_alpha",
    "perceiver_config",
    "pixel_shuffle_factor",
)
SUPPORTED_VALUES = {"use_resampler": False, "qk_layer_norms": False}
# Top-level keys that also apply to the text model.
INHERITED_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
DTYPES = ("dtype", "torch_dtype")  # keys that name the dtype of the tensors
# Prefixes of the text model's tensor names, which depend on class and version of transformers. Each
# is mapped to the prefix in a text-only model.
PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "lm_head.": "lm_head.",
}
HEAD = "lm_head.weight"


def extract_text_model(
    config: Mapping[str, Any], tensors: LazyArrays
) -> tuple[dict[str, Any], LazyArrays, str | None]:
    """Extracts the text model of a multimodal checkpoint; returns a text-only checkpoint unchanged.

    Returns:
      The `config.json` of the text model, its renamed tensors, and a one-line message about the
      parts that are not imported (None if all parts are imported).

    Raises:
      UserError: the family of the text model is not supported, or a tensor belongs to no known
        part.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in MULTIMODAL:
        return dict(config), tensors, None
    multimodal = MULTIMODAL[name]
    classes = config.get("architectures") or [multimodal.architecture]
    if classes != [multimodal.architecture]:
        raise UserError(
            f"config.json has architectures: {quote(classes)}; only {multimodal.architecture} of"
            f" {name} generates text"
        )
    names, skipped = _text_names(tensors, multimodal)
    text = _text_config(config, multimodal, HEAD in names)
    text_tensors = {plain: tensors.tensors[stored] for plain, stored in names.items()}
    parts = ", ".join(f"{part} ({count})" for part, count in skipped.items()) or "no other part"
    message = (
        f"{name}: its text model, {text['model_type']}, is imported; tensors left out: {parts}"
    )
    return text, LazyArrays(text_tensors, lambda plain: tensors[names[plain]]), message


def _text_names(tensors: LazyArrays, multimodal: Multimodal) -> tuple[dict[str, str], Counter[str]]:
    """Maps the text model's tensor names to the names in the checkpoint, and counts the tensors of
    every other part.
    """
    names: dict[str, str] = {}
    skipped: Counter[str] = Counter()
    for stored in tensors:
        part = stored.removeprefix("model.").partition(".")[0]
        if part in multimodal.others:
            skipped[part] += 1
            continue
        prefix = next((prefix for prefix in PREFIXES if stored.startswith(prefix)), None)
        if prefix is None and not (multimodal.flat and stored.startswith("model.")):
            known = ", ".join(multimodal.others)
            raise UserError(
                f"the checkpoint has {escape_name(stored)}, which belongs neither to its text model"
                f" nor to {known}"
            )
        plain = stored if prefix is None else PREFIXES[prefix] + stored.removeprefix(prefix)
        if plain in names:
            raise UserError(
                f"the checkpoint has {escape_name(stored)} and {escape_name(names[plain])}, which"
                " are the same tensor"
            )
        names[plain] = stored
    return names, skipped


def _text_config(
    config: Mapping[str, Any], multimodal: Multimodal, has_head: bool
) -> dict[str, Any]:
    """Returns the `config.json` of the text model, with transformers' defaults for absent sizes."""
    text_config = config.get("text_config")
    if text_config is None and multimodal.flat:
        others = (*multimodal.flat, "model_type", "architectures")
        text_config = {key: value for key, value in config.items() if key not in others}
    if not isinstance(text_config, dict):
        raise UserError(f"config.json has text_config: {quote(text_config)}, expected an object")
    kind = text_config.get("model_type", multimodal.text)
    family = MROPE_MODELS.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(sorted({multimodal.text} | FAMILIES.keys()))
        raise UserError(
            f"config.json has a text_config of model_type: {quote(kind)}, expected one of {known}"
        )
    for key, value in SUPPORTED_VALUES.items():
        if text_config.get(key, value) != value:
            raise UserError(
                f"config.json has {key}: {quote(text_config[key])} in text_config; only"
                f" {quote(value)} is supported"
            )
    dropped = (*IGNORED_KEYS, *SUPPORTED_VALUES)
    text = DEFAULTS.get(kind, {}) | {
        key: value for key, value in text_config.items() if key not in dropped
    }
    for key in INHERITED_KEYS:
        if config.get(key) is not None and text.get(key) is None:
            text[key] = config[key]
    # The top-level dtype overrides that of the text model.
    if dtypes := {key: config[key] for key in DTYPES if config.get(key) is not None}:
        text = {key: value for key, value in text.items() if key not in DTYPES} | dtypes
    if kind in MROPE_MODELS:
        text |= {
            key: _drop_mrope(text[key])
            for key in ("rope_scaling", "rope_parameters")
            if key in text
        }
    # Some versions of transformers read the text model's `tie_word_embeddings`, other versions the
    # top-level key. If the two differ, the embeddings are regarded as tied if and only if the
    # checkpoint has no output layer.
    ties = [settings.get("tie_word_embeddings") for settings in (text_config, config)]
    ties = [value for value in ties if value is not None]
    agree = bool(ties) and all(value == ties[0] for value in ties)
    text["tie_word_embeddings"] = ties[0] if agree else not has_head
    return text | {"model_type": family, "architectures": [FAMILIES[family].architecture]}


def _drop_mrope(rope: Any) -> Any:
    """Returns RoPE settings without the head sections of M-RoPE."""
    if not isinstance(rope, dict):
        return rope
    plain = {key: value for key, value in rope.items() if key not in MROPE_KEYS}
    for key in ("type", "rope_type"):
        if plain.get(key) == "mrope":
            plain[key] = "default"
    return plain
