"""Writes tests/interop/checkpoints: a small random model of every family, with logits and tokens of
transformers.

python tests/interop/make_checkpoints.py [FAMILY …]     (needs torch and transformers; the tests do
not)
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from families import FAMILIES, keywords

HERE = Path(__file__).parent / "checkpoints"
ROWS, PROMPT, NEW = 2, 8, 32


def random_model(family: str, seed: int, **changes):
    """Returns a model with random weights, also in norms and biases. Its next-token distribution is
    not flat.
    """
    name, kwargs = keywords(family, **changes)
    config = getattr(transformers, name)(**kwargs)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    randomize(
        model,
        seed,
        zero_centered="gemma" in family and family != "gemma4_text",
        scaled_keys=family == "gemma4_text",
    )
    return model


def randomize(model, seed: int, zero_centered: bool, scaled_keys: bool = False) -> None:
    """Sets every weight to random numbers.

    Args:
      zero_centered: whether norms multiply by 1 + scale.
      scaled_keys: whether the scale of key norms replaces the division of scores by √head_size.
    """
    draw = torch.Generator().manual_seed(seed)
    for path, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=draw)
        if (
            path.endswith(("bias", "router.scale", "per_expert_scale"))
            or "norm" in path
            or ".ln_" in path
        ):
            noise = 0.2 * noise + (
                0 if path.endswith("bias") or (zero_centered and "norm" in path) else 1
            )
            if scaled_keys and "k_norm" in path:
                noise = noise * weight.shape[-1] ** -0.5
        elif weight.ndim == 2:
            noise = noise * (
                0.35 if "embed" in path or "wte" in path else 1.3 / weight.shape[-1] ** 0.5
            )
        else:
            noise = noise * 1.3 / weight.shape[-1] ** 0.5
        weight.data = noise.to(weight.dtype)
    for path, buffer in model.named_buffers():
        if path.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=draw))


def greedy(model, prompt_BT: np.ndarray, new: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompts with their greedy continuations, and the logits of every position, computed
    without a cache.
    """
    tokens_BT = torch.tensor(prompt_BT)
    with torch.no_grad():
        for _ in range(new):
            logits_BTV = model(tokens_BT, use_cache=False).logits
            tokens_BT = torch.cat([tokens_BT, logits_BTV[:, -1].argmax(-1, keepdim=True)], dim=1)
        logits_BTV = model(tokens_BT, use_cache=False).logits
    return tokens_BT.numpy().astype(np.int32), logits_BTV.float().numpy()


def main() -> None:
    for family in sys.argv[1:] or FAMILIES:
        folder = HERE / family
        for seed in range(
            100
        ):  # until a seed gives prompts for which rounding cannot change a greedy token
            model = random_model(family, seed)
            prompt_BT = np.random.default_rng(seed).integers(3, 64, (ROWS, PROMPT))
            tokens_BT, logits_BTV = greedy(model, prompt_BT, NEW)
            second, first = np.sort(logits_BTV[:, PROMPT - 1 :], axis=-1)[..., -2:].transpose(
                2, 0, 1
            )
            if np.min(first - second) > 0.01 and tokens_BT[:, PROMPT:].max() < 64:
                break
        model.save_pretrained(folder)
        np.savez_compressed(folder / "expected.npz", tokens=tokens_BT, logits=logits_BTV)
        size = sum(path.stat().st_size for path in folder.iterdir())
        margin, different = np.min(first - second), len(set(tokens_BT.ravel()))
        print(
            f"{family:12} {size / 1024:6.0f} KiB, least margin {margin:.4f}, seed {seed},"
            f" {different} tokens"
        )


if __name__ == "__main__":
    main()
