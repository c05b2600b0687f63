"""Groups of related settings inside the large sections, for help pages and searches. `field` names
the group of a setting.
"""

from typing import NamedTuple

GROUP = "x-group"  # the schema key of a setting's group


class SettingGroup(NamedTuple):
    """The section of a group, and its title."""

    section: str
    title: str


GROUPS = {
    "size": SettingGroup("model", "Width, depth, heads and context"),
    "embeddings": SettingGroup("model", "Embeddings, output layer and residual stream"),
    "feed_forward": SettingGroup("model", "Dense feed-forward layers"),
    "norms": SettingGroup("model", "Normalization layers"),
    "compute": SettingGroup("model", "Dropout, rematerialization, scanned layers and dtype"),
    "experts": SettingGroup("moe", "Experts and their sizes"),
    "routing": SettingGroup("moe", "Choice of experts and load balancing"),
    "positions": SettingGroup("attention", "Position embeddings, RoPE and its scaling"),
    "window": SettingGroup("attention", "Sliding-window layers"),
    "scores": SettingGroup("attention", "Attention scores, biases, gate and kernel"),
    "latent": SettingGroup("attention", "Multi-head latent attention (MLA)"),
    "layer_heads": SettingGroup(
        "attention", "Heads of full-attention layers, and shared keys and values"
    ),
    "objective": SettingGroup("training", "Objective and starting weights"),
    "batches": SettingGroup("training", "Steps, batch size and seed"),
    "optimizer": SettingGroup("training", "Optimizer, learning rate and its schedule"),
    "evaluation": SettingGroup("training", "Evaluations, checkpoints and samples"),
    "request": SettingGroup("generation", "Length, samples, seed and end of a sequence"),
    "loops": SettingGroup("generation", "Detection of text that repeats itself"),
    "decoding": SettingGroup("generation", "KV cache, precision and devices of decoding"),
    "speculation": SettingGroup(
        "generation", "Speculative decoding: draft tokens that are verified several at a time"
    ),
    "guidance": SettingGroup("generation", "Classifier-free guidance"),
    "beams": SettingGroup("generation", "Beam search"),
    "steps": SettingGroup("generation", "Greedy decoding, and the order of sampling steps"),
    "edits": SettingGroup("generation", "Allowed, banned and biased tokens"),
    "penalties": SettingGroup("generation", "Repetition, presence, frequency and DRY penalties"),
    "temperatures": SettingGroup("generation", "Temperature, dynamic temperature and smoothing"),
    "truncation": SettingGroup("generation", "Filters that keep likely tokens, and XTC"),
    "surprise": SettingGroup("generation", "Mirostat, adaptive-p and skew"),
    "watermark": SettingGroup("generation", "SynthID watermark"),
    "thresholds": SettingGroup("router", "Presets, thresholds and base values"),
    "strategies": SettingGroup("router", "Numbers of the strategies clarify, explore and resample"),
    "adaptive": SettingGroup(
        "router", "Numbers of the strategy adaptive, and the scores of its candidates"
    ),
}
