"""Text models inside vision–language checkpoints of Hugging Face.

Such a checkpoint holds a text model, an encoder of images, and a projector between them. Only the text model is read: its part
of `config.json`, and its tensors under the names that a checkpoint of the text model alone has.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from dantinox.files import UserError, escape_name, quote
from dantinox.interop.hf_families import FAMILIES
from dantinox.interop.source import LazyArrays


class Multimodal(NamedTuple):
    """A model of several parts.

    Attributes:
      architecture: the class of transformers.
      text: the `model_type` of its text model where `text_config` does not say one.
      others: the parts that are left out, by the first component of their tensors' names, after `model.` where that is first.
      flat: whether older files have the keys of the text model at the top of `config.json`, with these keys of the other parts.
    """

    architecture: str
    text: str
    others: tuple[str, ...] = ("vision_tower", "multi_modal_projector")
    flat: tuple[str, ...] = ()


IDEFICS = ("vision_model", "connector")
QWEN_KEYS = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
             "vision_token_id")  # fmt: skip
MULTIMODAL = {
    "gemma3": Multimodal("Gemma3ForConditionalGeneration", "gemma3_text"),
    "gemma4": Multimodal(
        "Gemma4ForConditionalGeneration", "gemma4_text", ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
    ),
    "mistral3": Multimodal("Mistral3ForConditionalGeneration", "mistral"),
    "llava": Multimodal("LlavaForConditionalGeneration", "llama"),
    "llava_next": Multimodal(
        "LlavaNextForConditionalGeneration", "llama", ("vision_tower", "multi_modal_projector", "image_newline")
    ),
    "llava_onevision": Multimodal(
        "LlavaOnevisionForConditionalGeneration", "qwen2", ("vision_tower", "multi_modal_projector", "image_newline")
    ),
    "internvl": Multimodal("InternVLForConditionalGeneration", "qwen2"),
    "idefics2": Multimodal("Idefics2ForConditionalGeneration", "mistral", IDEFICS),
    "idefics3": Multimodal("Idefics3ForConditionalGeneration", "llama", IDEFICS),
    "smolvlm": Multimodal("SmolVLMForConditionalGeneration", "llama", IDEFICS),
    "qwen2_vl": Multimodal("Qwen2VLForConditionalGeneration", "qwen2_vl_text", ("visual",), QWEN_KEYS),
    "qwen2_5_vl": Multimodal("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", ("visual",), QWEN_KEYS),
    "qwen3_vl": Multimodal("Qwen3VLForConditionalGeneration", "qwen3_vl_text", ("visual",)),
}
# Text models whose positions have three axes, and the family that each is otherwise. For text the three positions are equal, so
# that plain rotary positions give the same rotations.
MROPE_MODELS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
SECTIONS = ("mrope_section", "mrope_interleaved")
# The defaults of transformers for a `text_config`, which older versions write without the values that equal them.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
QWEN_VL: dict[str, Any] = dict(zip(SIZES, (152064, 8192, 29568, 80, 64), strict=True)) | {
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80, "rope_theta": 1e6,
}  # fmt: skip
SEVEN_B = dict(zip(SIZES, (151936, 4096, 22016, 32, 32), strict=True)) | {"num_key_value_heads": 32}
MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": dict(zip(SIZES, (32000, 4096, 11008, 32, 32), strict=True)),
    "mistral": dict(zip(SIZES, (32000, 4096, 14336, 32, 32), strict=True)),
    "ministral3": dict(zip(SIZES, (131072, 4096, 14336, 34, 32), strict=True)) | {"rope_parameters": MINISTRAL3_ROPE},
    "qwen2": SEVEN_B,
    "qwen3": SEVEN_B,
    "gemma3_text": dict(zip(SIZES, (262208, 2304, 9216, 26, 8), strict=True)),
    "gemma4_text": dict(zip(SIZES, (262144, 2304, 9216, 30, 8), strict=True)),
    "qwen2_vl_text": QWEN_VL,
    "qwen2_5_vl_text": QWEN_VL,
    "qwen3_vl_text": SEVEN_B | {"max_position_embeddings": 128000, "rope_theta": 5e5},
}
# Keys in the `text_config` of Idefics and SmolVLM that say nothing about the text model.
UNUSED = ("_flash_attn_2_enabled", "neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor")
ONLY = {"use_resampler": False, "qk_layer_norms": False}
# Keys of the whole model that the text model takes where it has none of its own.
SHARED = ("bos_token_id", "eos_token_id", "pad_token_id")
DTYPES = ("dtype", "torch_dtype")  # of the tensors in the file
# How the names of a text model's tensors begin, by the class and the version that wrote them, and how they begin without.
PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "lm_head.": "lm_head.",
}
HEAD = "lm_head.weight"


def extract_text_model(config: Mapping[str, Any], tensors: LazyArrays) -> tuple[dict[str, Any], LazyArrays, str | None]:
    """The text model of a checkpoint of several parts; a checkpoint of a text model alone is given back as it is.

    Returns:
      `config.json` of the text model, its tensors by the names that it has alone, and a line that says what is left out, or
      None where nothing is.

    Raises:
      UserError: the text model is of no known family, or a tensor is neither of it nor of a known other part.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in MULTIMODAL:
        return dict(config), tensors, None
    whole = MULTIMODAL[name]
    classes = config.get("architectures") or [whole.architecture]
    if classes != [whole.architecture]:
        raise UserError(f"config.json has architectures: {quote(classes)}, of {name} only {whole.architecture} writes text")
    names, left_out = _text_names(tensors, whole)
    text = _text_config(config, whole, HEAD in names)
    kinds = {plain: tensors.tensors[stored] for plain, stored in names.items()}
    parts = ", ".join(f"{part} ({count})" for part, count in left_out.items()) or "no other part"
    line = f"{name}: its text model, {text['model_type']}, is imported; tensors left out: {parts}"
    return text, LazyArrays(kinds, lambda plain: tensors[names[plain]]), line


def _text_names(tensors: LazyArrays, whole: Multimodal) -> tuple[dict[str, str], Counter[str]]:
    """The text model's names of its tensors → those in the checkpoint, and how many tensors of each other part there are."""
    names: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    for stored in tensors:
        part = stored.removeprefix("model.").partition(".")[0]
        if part in whole.others:
            left_out[part] += 1
            continue
        prefix = next((prefix for prefix in PREFIXES if stored.startswith(prefix)), None)
        if prefix is None and not (whole.flat and stored.startswith("model.")):
            known = ", ".join(whole.others)
            raise UserError(f"the checkpoint has {escape_name(stored)}, which is neither of its text model nor of {known}")
        plain = stored if prefix is None else PREFIXES[prefix] + stored.removeprefix(prefix)
        if plain in names:
            raise UserError(
                f"the checkpoint has {escape_name(stored)} and {escape_name(names[plain])}, which are the same tensor"
            )
        names[plain] = stored
    return names, left_out


def _text_config(config: Mapping[str, Any], whole: Multimodal, has_head: bool) -> dict[str, Any]:
    """The keys of the text model, with transformers' values for sizes that are not given."""
    given = config.get("text_config")
    if given is None and whole.flat:
        given = {key: value for key, value in config.items() if key not in (*whole.flat, "model_type", "architectures")}
    if not isinstance(given, dict):
        raise UserError(f"config.json has text_config: {quote(given)}, expected an object")
    kind = given.get("model_type", whole.text)
    family = MROPE_MODELS.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(sorted({whole.text} | FAMILIES.keys()))
        raise UserError(f"config.json has a text_config of model_type: {quote(kind)}, which is none of {known}")
    for key, value in ONLY.items():
        if given.get(key, value) != value:
            raise UserError(f"config.json has {key}: {quote(given[key])} in text_config, where only {quote(value)} is known")
    text = DEFAULTS.get(kind, {}) | {key: value for key, value in given.items() if key not in (*UNUSED, *ONLY)}
    for key in SHARED:
        if config.get(key) is not None and text.get(key) is None:
            text[key] = config[key]
    if stored := {key: config[key] for key in DTYPES if config.get(key) is not None}:
        text = {key: value for key, value in text.items() if key not in DTYPES} | stored
    if kind in MROPE_MODELS:
        text |= {key: _drop_mrope(text[key]) for key in ("rope_scaling", "rope_parameters") if key in text}
    # Versions of transformers read one or the other. Where the two differ, the tensors decide.
    said = [ties for ties in (given.get("tie_word_embeddings"), config.get("tie_word_embeddings")) if ties is not None]
    text["tie_word_embeddings"] = said[0] if said and said.count(said[0]) == len(said) else not has_head
    return text | {"model_type": family, "architectures": [FAMILIES[family].architecture]}


def _drop_mrope(rope: Any) -> Any:
    """Rotary settings without the sections of a head that each of three axes rotates."""
    if not isinstance(rope, dict):
        return rope
    plain = {key: value for key, value in rope.items() if key not in SECTIONS}
    for key in ("type", "rope_type"):
        if plain.get(key) == "mrope":
            plain[key] = "default"
    return plain
