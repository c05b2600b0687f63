"""Compares LoRA on frozen weights in float32, bfloat16, int8 and nf4: bytes of the weights, and
validation loss.

    python benchmarks/qlora.py                     # trains a small base model first
    dantinox import smollm2 --run_dir runs/smol
    python benchmarks/qlora.py runs/smol --steps 50 --context 256

Every training starts from the same run, with the same adapters, batches and steps, and reads
`builtin:instructions`. Prints a JSON line for each dtype. `val_losses` has the validation losses of
the assistant's turns after each quarter of the steps, in nats per token.
"""

import json
from pathlib import Path
from typing import Any, get_args

from common import Parser, random_run, temporary_folder

from dantinox.config import build_config
from dantinox.config.inherited_settings import build_training
from dantinox.config.lora_settings import BaseWeights
from dantinox.model.lora import frozen_parameters
from dantinox.model.parameters import abstract_model
from dantinox.programs import tree_bytes
from dantinox.report import read_jsonl
from dantinox.run import open_run
from dantinox.text import Tokenizer
from dantinox.training import launch

DATA = {"data.path": "builtin:instructions", "data.val_fraction": 0.2, "logging.plot": False}
BASE = {
    "model.dim": 128, "model.n_heads": 4, "model.num_blocks": 4, "model.max_context": 64,
    "model.dropout_rate": 0.0, "tokenizer.vocab_size": 512, "data.path": "builtin:python",
    "training.steps": 150, "training.batch_size": 16, "training.eval_every": 50,
    "training.eval_tokens": 4096, "logging.plot": False,
}  # fmt: skip


def trained_base(folder: Path) -> Path:
    """Trains a base model, and returns its run directory."""
    return launch(build_config({}, BASE), run_dir=folder).path


def measure(
    base: Path, folder: Path, held: str, steps: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Trains adapters on weights in the dtype `held`."""
    settings = DATA | options | {
        "training.init_from": str(base), "training.objective": "sft", "training.steps": steps,
        "training.warmup_steps": 0, "training.optimizer": "adamw",
        "training.eval_every": max(1, steps // 4), "lora.base_weights": held,
    }  # fmt: skip
    config = build_training({}, settings)
    run = launch(config, run_dir=folder / held)
    model = config.trained_architecture(Tokenizer.load(run.tokenizer).vocab_size)
    losses = [row["val_loss"] for row in read_jsonl(run.metrics) if row.get("kind") == "evaluation"]
    weights = tree_bytes(frozen_parameters(abstract_model(model)[1], model))
    return {
        "base_weights": held,
        "weights_mb": round(weights / 1e6, 3),
        "val_losses": [round(loss, 4) for loss in losses],
    }


def main() -> None:
    parser = Parser(__doc__, smoke={"steps": 2, "rank": 2, "batch": 2})
    parser.add_argument(
        "run",
        nargs="?",
        type=Path,
        metavar="RUN",
        help="the base (default: a model that this benchmark trains)",
    )
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: 100)")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters (default: 8)")
    parser.add_argument("--batch", type=int, default=8, help="rows per step (default: 8)")
    parser.add_argument(
        "--context", type=int, help="tokens per row (default: model.max_context of the base)"
    )
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 0.001)")
    o = parser.parse_args()
    folder = temporary_folder()
    base = o.run or (random_run(folder / "base") if o.smoke else trained_base(folder / "base"))
    open_run(base)
    options = {"lora.rank": o.rank, "training.batch_size": o.batch, "training.lr": o.lr}
    options |= {"model.max_context": o.context} if o.context else {}
    lines = [measure(base, folder, held, o.steps, options) for held in get_args(BaseWeights)]
    for line in lines:
        bytes_ratio = round(line["weights_mb"] / lines[0]["weights_mb"], 4)
        loss_ratio = round(line["val_losses"][-1] / lines[0]["val_losses"][-1], 4)
        print(
            json.dumps(line | {"weights_of_float32": bytes_ratio, "loss_of_float32": loss_ratio}),
            flush=True,
        )


if __name__ == "__main__":
    main()
