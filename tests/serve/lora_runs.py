"""Runs with adapters, and PEFT folders, for a run of `tests.conftest`."""

import shutil

import numpy as np

from dantinox.config import build_config
from dantinox.model.parameters import abstract_model
from dantinox.run import (
    create_run,
    load_run_config,
    open_run,
    save_config,
    save_tokenizer,
    weights_digest,
)
from dantinox.run.adapters import save_adapter
from dantinox.text import Tokenizer


def make_lora_run(path, base_path, seed, rank=2, targets=None, digest=None):
    """Writes a run whose adapters have random matrices, as if it had been trained on the base."""
    base = open_run(base_path)
    tokenizer = Tokenizer.load(base.tokenizer)
    settings = {
        section: values
        for section, values in load_run_config(base).model_dump(exclude_unset=True).items()
        if section in ("model", "tokenizer")
    }
    lora = {"rank": rank} | ({} if targets is None else {"targets": targets})
    config = build_config({**settings, "training": {"init_from": str(base.path)}, "lora": lora})
    model = config.trained_architecture(tokenizer.vocab_size)
    random = np.random.default_rng(seed)
    parameters = {
        name: 1.5 * random.standard_normal(leaf.shape)
        for name, leaf in abstract_model(model)[1].items()
        if name.endswith(("lora_a", "lora_b"))
    }
    run = create_run(path)
    save_config(run, config)
    save_tokenizer(run, tokenizer.to_json())
    save_adapter(run, parameters, model, {"base_sha256": digest or weights_digest(base)})
    return run.path


def make_peft_folder(path, lora_run):
    """Copies the adapter of a run, as PEFT writes it: without the digest of the base."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(lora_run / "adapter", path)
    save_file(load_file(path / "adapter_model.safetensors"), path / "adapter_model.safetensors")
    return path
