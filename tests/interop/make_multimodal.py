"""Writes tests/interop/multimodal: small random vision–language models, with logits of transformers
for text only.

python tests/interop/make_multimodal.py [MODEL …]     (needs torch and transformers; the tests do
not)
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from families import COMMON, keywords
from make_checkpoints import randomize

HERE = Path(__file__).parent / "multimodal"
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 16,
          "patch_size": 8}  # fmt: skip
SIGLIP, CLIP, PIXTRAL = (
    {"model_type": kind} | VISION | more
    for kind, more in (
        ("siglip_vision_model", {}),
        ("clip_vision_model", {"projection_dim": 8}),
        ("pixtral", {"head_dim": 4}),
    )
)
INTERN = VISION | {"image_size": [16, 16], "patch_size": [8, 8]}
QWEN = {
    "depth": 1,
    "num_heads": 1,
    "patch_size": 2,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
}
QWEN2 = QWEN | {"hidden_size": 32, "embed_dim": 8, "mlp_ratio": 1}
QWEN25 = QWEN | {"hidden_size": 8, "intermediate_size": 8, "out_hidden_size": 32}
QWEN3 = QWEN25 | {"num_position_embeddings": 4, "deepstack_visual_indexes": []}
GEMMA4 = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
          "num_attention_heads": 1, "num_key_value_heads": 1,
          "head_dim": 8, "patch_size": 2, "position_embedding_size": 16}  # fmt: skip
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
IMAGE, ID = {"image_token_index": 66}, {"image_token_id": 66}
VIDEO = ID | {"video_token_id": 65, "vision_start_token_id": 64, "vision_end_token_id": 63}
PERCEIVER = {"hidden_size": 32, "resampler_n_latents": 2, "resampler_depth": 1,
             "resampler_n_heads": 2,
             "resampler_head_dim": 4, "num_key_value_heads": 2}  # fmt: skip


def text(family: str) -> dict:
    """Returns the text configuration of a family's small checkpoint."""
    return {"model_type": family} | keywords(family)[1]


# For each model: the name of its configuration class, and the arguments of the text model, the
# vision model and the rest.
MODELS = {
    "gemma3": ("Gemma3Config", text("gemma3_text"), SIGLIP, IMAGE | {"mm_tokens_per_image": 4}),
    "gemma4": (
        "Gemma4Config",
        text("gemma4_text"),
        GEMMA4,
        ID | {"audio_token_id": 65, "video_token_id": 64},
    ),
    "mistral3": ("Mistral3Config", text("ministral3"), PIXTRAL, IMAGE),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        COMMON | {"model_type": "qwen2_5_vl_text"} | AXES,
        QWEN25,
        VIDEO,
    ),
    "llava": ("LlavaConfig", text("llama"), CLIP, IMAGE),
    "llava_next": ("LlavaNextConfig", text("mistral"), CLIP, IMAGE),
    "llava_onevision": (
        "LlavaOnevisionConfig",
        text("qwen2"),
        SIGLIP,
        IMAGE | {"video_token_index": 65},
    ),
    "internvl": ("InternVLConfig", text("qwen3"), INTERN, ID),
    "idefics2": ("Idefics2Config", text("mistral"), VISION, ID | {"perceiver_config": PERCEIVER}),
    "idefics3": ("Idefics3Config", text("llama"), VISION, ID | {"scale_factor": 1}),
    "smolvlm": ("SmolVLMConfig", text("llama"), VISION, ID | {"scale_factor": 1}),
    "qwen2_vl": ("Qwen2VLConfig", COMMON | {"model_type": "qwen2_vl_text"} | AXES, QWEN2, VIDEO),
    "qwen3_vl": (
        "Qwen3VLConfig",
        COMMON | {"model_type": "qwen3_vl_text", "head_dim": 8} | AXES,
        QWEN3,
        VIDEO,
    ),
}
SAVED = ("gemma3", "mistral3", "qwen2_5_vl")


def random_multimodal(name: str, seed: int):
    """Returns a model with random weights."""
    kind, text_config, vision_config, rest = MODELS[name]
    config = getattr(transformers, kind)(
        text_config=text_config, vision_config=vision_config, **rest
    )
    model = transformers.AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager"
    ).eval()
    randomize(model, seed, zero_centered=name == "gemma3", scaled_keys=name == "gemma4")
    return model


def main() -> None:
    for name in sys.argv[1:] or SAVED:
        folder = HERE / name
        model = random_multimodal(name, seed=1)
        tokens_BT = np.random.default_rng(0).integers(3, 60, (2, 40))
        with torch.no_grad():
            logits_BTV = model(input_ids=torch.tensor(tokens_BT), use_cache=False).logits
        model.save_pretrained(folder)
        np.savez_compressed(
            folder / "expected.npz", tokens=tokens_BT.astype(np.int32), logits=logits_BTV.numpy()
        )
        print(f"{name:16} {sum(path.stat().st_size for path in folder.iterdir()) / 1024:6.0f} KiB")


if __name__ == "__main__":
    main()
