"""Writes the adapters in `tests/interop/peft` and the logits that PEFT computes with them.

Needs torch, transformers and peft: python tests/interop/make_adapters.py
"""

from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent / "peft"
SHAPE = {
    "vocab_size": 17, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 4, "num_hidden_layers": 2, "intermediate_size": 24, "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "attn_implementation": "eager",
}  # fmt: skip
ADAPTERS = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "patterns": {
        "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"],
        "use_rslora": True, "rank_pattern": {"o_proj": 5},
        "alpha_pattern": {"model.layers.1.mlp.down_proj": 9},
    },
    "dora": {
        "r": 2, "lora_alpha": 4,
        "target_modules": ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"],
        "use_dora": True,
        "use_rslora": True,
    },
}  # fmt: skip


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return model


def main() -> None:
    tokens = torch.randint(
        0, SHAPE["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(1)
    )
    expected = {"tokens": tokens.numpy().astype(np.int32)}
    weights = {
        name: array.numpy()
        for name, array in base().state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, FOLDER / "base.safetensors")
    for name, settings in ADAPTERS.items():
        model = get_peft_model(
            base(), LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.1, **settings)
        ).eval()
        for path, parameter in model.named_parameters():
            if "lora_B" in path:
                torch.nn.init.normal_(parameter, 0.0, 0.2)
            elif "lora_magnitude_vector" in path:
                parameter.data *= torch.empty_like(parameter).uniform_(0.5, 1.5)
        with torch.no_grad():
            expected[name] = model(tokens).logits.numpy()
        model.save_pretrained(FOLDER / name)
        (FOLDER / name / "README.md").unlink(missing_ok=True)
    with torch.no_grad():
        expected["base"] = base()(tokens).logits.numpy()
    np.savez(FOLDER / "expected.npz", **expected)


if __name__ == "__main__":
    main()
