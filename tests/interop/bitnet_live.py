"""Compares random ternary models with those of transformers: logits, and greedy continuations from
a KV cache.

    TORCH_COMPILE_DISABLE=1 python -m tests.interop.bitnet_live [MODELS] [--any]     (needs torch, transformers and accelerate)

Each row is a model, in the forms of the published checkpoints: weights in floats or packed, with
transformers' two linear classes, and the format of 1bitLLM. Its class is not in transformers: here
it is the Llama of transformers, with the BitLinear of the authors' FAQ and the norms in front of
the output projections.

A rounding error of a float32 sum can move an input of a projection across the middle between two
8-bit integers, and then the logits differ by much more than an epsilon. So the prompts are drawn
until no input is nearer to such a middle than `distance` (in units of the integers), which is
larger than these errors, and until no two logits compete for a greedy token. With `--any` the first
prompt is taken.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from torch import nn
from transformers.integrations.bitnet import AutoBitLinear, BitLinear, pack_weights

import dantinox
from dantinox.config import build_config
from dantinox.interop.hf.hf_config import hf_config_to_settings
from dantinox.interop.hf.hf_folder import open_tensors
from dantinox.interop.hf.hf_quantized import dequantize_checkpoint
from dantinox.interop.hf.hf_weights import from_hf, to_hf
from dantinox.model.parameters import abstract_model

FORMS = (
    "bitnet, floats",
    "bitnet, autobitlinear",
    "bitnet, bitlinear",
    "llama, bitlinear",
    "1bitLLM",
)
NORMS = (
    ("self_attn", "o_proj", "self_attn.inner_attn_ln"),
    ("mlp", "down_proj", "mlp.ffn_layernorm"),
)
PROMPT, NEW = 6, 8
TOLERANCE = 1e-4
LEAST_DISTANCE, LEAST_GAP = 1.5e-4, 0.01


class FaqLinear(nn.Linear):
    """The BitLinear of "The Era of 1-bit LLMs: Training Tips, Code and FAQ", without its norm."""

    def forward(self, x):
        weight_factor = 1 / self.weight.abs().mean().clamp(min=1e-5)
        weight = (self.weight * weight_factor).round().clamp(-1, 1) / weight_factor
        factor = 127 / x.abs().max(dim=-1, keepdim=True).values.clamp(min=1e-5)
        return nn.functional.linear((x * factor).round().clamp(-128, 127) / factor, weight)


def random_sizes(random: np.random.Generator) -> dict[str, Any]:
    heads = int(random.choice([2, 4]))
    return {
        "vocab_size": 67, "hidden_size": heads * int(random.choice([8, 12])),
        "intermediate_size": int(random.choice([40, 64])),
        "num_hidden_layers": int(random.choice([1, 2])), "num_attention_heads": heads,
        "num_key_value_heads": int(random.choice([1, heads])), "max_position_embeddings": 64,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "tie_word_embeddings": bool(random.integers(2)),
    }  # fmt: skip


def write_model(folder: Path, form: str, seed: int) -> nn.Module:
    """Writes a random checkpoint of this form, and returns its model in torch."""
    draw = np.random.default_rng(seed)
    family, _, storage = form.partition(", ")
    sizes = random_sizes(draw)
    if family == "bitnet":
        config = transformers.BitNetConfig(**sizes, hidden_act=str(draw.choice(["relu2", "silu"])))
    else:
        config = transformers.LlamaConfig(**sizes)
    plain = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tensors = {}
    for name, weight in plain.state_dict().items():
        noise = torch.tensor(draw.standard_normal(weight.shape), dtype=torch.float32)
        if "norm" in name:
            tensors[name] = 1 + 0.2 * noise
        else:
            tensors[name] = noise * (
                0.5 if "embed" in name or "lm_head" in name else 1.5 * weight.shape[-1] ** -0.5
            )
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    written = json.loads(config.to_json_string())
    written["architectures"] = [type(plain).__name__]
    if form == "1bitLLM":
        written.pop("head_dim")
        written |= {"architectures": ["BitnetForCausalLM"], "weight_bits": 1, "input_bits": 8}
        for layer in range(config.num_hidden_layers):
            for (_, _, name), size in zip(
                NORMS, (config.hidden_size, config.intermediate_size), strict=True
            ):
                noise = torch.tensor(draw.standard_normal(size), dtype=torch.float32)
                tensors[f"model.layers.{layer}.{name}.weight"] = 1 + 0.2 * noise
    else:
        written["quantization_config"] = {"quant_method": "bitnet"}
        if storage == "floats":
            written["quantization_config"] |= {
                "linear_class": "autobitlinear",
                "quantization_mode": "online",
            }
        elif storage == "autobitlinear":
            written["quantization_config"] |= {
                "linear_class": "autobitlinear",
                "quantization_mode": "offline",
            }
        if storage != "floats":
            for name in [name for name in tensors if name.endswith("_proj.weight")]:
                codes = torch.tensor(
                    draw.choice([-1, 0, 1], tensors[name].shape, p=[0.3, 0.4, 0.3]),
                    dtype=torch.float32,
                )
                scale = float(tensors[name].abs().mean())
                tensors[name] = pack_weights(codes)
                tensors[f"{name}_scale"] = torch.tensor(
                    [scale if storage == "autobitlinear" else 1 / scale]
                )
    (folder / "config.json").write_text(json.dumps(written))
    transformers.modeling_utils.safe_save_file(
        tensors, folder / "model.safetensors", {"format": "pt"}
    )
    if form == "1bitLLM":
        return one_bit_llm(plain, tensors)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()


def one_bit_llm(model: Any, tensors: dict[str, torch.Tensor]) -> nn.Module:
    """Changes the Llama of transformers into the model of 1bitLLM with these tensors."""
    missing = model.load_state_dict(tensors, strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"])
    for index, layer in enumerate(model.model.layers):
        for owner in (layer.self_attn, layer.mlp):
            for name, old in list(owner.named_children()):
                if isinstance(old, nn.Linear):
                    setattr(owner, name, FaqLinear(old.in_features, old.out_features, bias=False))
                    getattr(owner, name).weight = old.weight
        for module, last, norm in NORMS:
            owner = getattr(layer, module)
            scale = tensors[f"model.layers.{index}.{norm}.weight"]
            normalize = transformers.models.llama.modeling_llama.LlamaRMSNorm(
                len(scale), model.config.rms_norm_eps
            )
            normalize.weight = nn.Parameter(scale)
            setattr(owner, last, nn.Sequential(normalize, getattr(owner, last)))
    return model.eval()


def torch_results(model: nn.Module, prompt_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns greedy continuations, the logits of every position, and the least distance of an
    input from a middle.
    """
    least = [0.5]

    def watch(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        x = inputs[0].double()
        scaled = x * (127 / x.abs().max(dim=-1, keepdim=True).values.clamp(min=1e-5))
        least[0] = min(least[0], float((scaled - scaled.floor() - 0.5).abs().min()))

    quantized = [m for m in model.modules() if isinstance(m, (AutoBitLinear, BitLinear, FaqLinear))]
    assert quantized, "the model has no ternary projections"
    tokens_BT = torch.tensor(prompt_BT)
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(tokens_BT, use_cache=False).logits
            tokens_BT = torch.cat([tokens_BT, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        hooks = [module.register_forward_pre_hook(watch) for module in quantized]
        logits = model(tokens_BT, use_cache=False).logits
        for hook in hooks:
            hook.remove()
    return tokens_BT.numpy().astype(np.int32), logits.numpy(), least[0]


def dantinox_results(folder: Path, tokens_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the logits of the imported model, and its greedy continuations of the prompts."""
    config, files = dequantize_checkpoint(
        json.loads((folder / "config.json").read_text()), open_tensors(folder)
    )
    settings = hf_config_to_settings(config, max_context=64)
    settings["model"]["dtype"] = "float32"
    imported = build_config(settings)
    model = imported.architecture(config["vocab_size"], "cpu")
    assert model.projections == "ternary"
    arrays = from_hf(config, model, files)
    written, back = to_hf(imported, config["vocab_size"], arrays, config)
    assert written == config
    assert all(back[name].tobytes() == files[name].tobytes() for name in files.tensors), (
        "the exported tensors differ"
    )
    built = abstract_model(model)[0]({name: jnp.asarray(arrays[name]) for name in arrays})
    positions_BT = jnp.broadcast_to(
        jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape
    )
    logits = np.asarray(built(jnp.asarray(tokens_BT), positions_BT)[0])
    prompts = [row[:PROMPT].tolist() for row in tokens_BT]
    return logits, np.asarray(
        dantinox.generate(built, prompts, max_new_tokens=NEW, temperature=0.0)
    )


def main() -> int:
    numbers = [int(argument) for argument in sys.argv[1:] if argument != "--any"]
    count = numbers[0] if numbers else 20
    failures = 0
    print(f"{'form':24} {'seed':>4} {'prompt':>6} {'logits':>9} {'distance':>9}  tokens")
    for seed in range(count):
        form = FORMS[-1] if seed % 2 else FORMS[seed // 2 % 4]
        with tempfile.TemporaryDirectory() as path:
            model = write_model(Path(path), form, seed)
            for prompt in range(2000):
                prompt_BT = np.random.default_rng((seed, prompt)).integers(3, 64, (1, PROMPT))
                tokens_BT, expected, distance = torch_results(model, prompt_BT)
                second, first = np.sort(expected[:, PROMPT - 1 :], axis=-1)[..., -2:].transpose(
                    2, 0, 1
                )
                if "--any" in sys.argv or (
                    distance > LEAST_DISTANCE and np.min(first - second) > LEAST_GAP
                ):
                    break
            logits, generated = dantinox_results(Path(path), tokens_BT)
        difference, same = np.abs(logits - expected).max(), np.array_equal(generated, tokens_BT)
        failures += difference > TOLERANCE or not same
        tokens = "equal" if same else "different"
        print(
            f"{form:24} {seed:4} {prompt:6} {difference:9.1e} {distance:9.1e}  {tokens}", flush=True
        )
    print(
        f"{count - failures} of {count} models have equal tokens, and logits within {TOLERANCE:g}"
    )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
