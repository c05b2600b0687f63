"""Trains a ternary and a float model on the same text, and compares their validation losses.

    python benchmarks/ternary_training.py CORPUS [--steps N] [--ternary_steps N] [--batch_size N] [--seeds N]

`CORPUS` is a file, a folder or a builtin corpus such as `builtin:python`. The models are those of
`benchmarks/ternary/*.yaml`. They have the same size and batches, and for each seed the same order
of the text. With `--ternary_steps` the ternary model trains on more tokens. Prints a line for each
run, and a table with the mean and the standard deviation over the seeds, in nats per token.
"""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from common import Parser, temporary_folder

from dantinox.config.inherited_settings import load_training
from dantinox.report import read_jsonl
from dantinox.training import launch

CONFIGS = Path(__file__).parent / "ternary"
KINDS = ("float", "ternary")
SMALL = {
    "model.dim": 32, "model.n_heads": 2, "model.kv_heads": 1, "model.num_blocks": 1,
    "model.hidden_dim": 64, "model.max_context": 32, "tokenizer.vocab_size": 300,
    "training.batch_size": 4, "training.eval_tokens": 512,
}  # fmt: skip


def train(kind: str, seed: int, folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Trains a model, and returns its validation losses."""
    config = load_training(CONFIGS / f"{kind}.yaml", changes | {"training.seed": seed})
    run = launch(config, run_dir=folder / f"{kind}-{seed}")
    rows = read_jsonl(run.metrics)
    losses = [round(row["val_loss"], 4) for row in rows if row.get("kind") == "evaluation"]
    summary = json.loads((run.path / "model_summary.json").read_text())
    milliseconds = [row["ms_per_step"] for row in rows if "ms_per_step" in row]
    found = {"kind": kind, "seed": seed, "parameters": summary["parameters"], "val_losses": losses}
    return found | {"ms_per_step": round(mean(milliseconds), 1)}


def schedule(steps: int) -> dict[str, int]:
    """Returns the settings of a run with this number of steps and four evaluations."""
    return {
        "training.steps": steps,
        "training.warmup_steps": steps // 50,
        "training.eval_every": max(1, steps // 4),
    }


def main() -> None:
    parser = Parser(
        __doc__, smoke={"corpus": "builtin:python", "steps": 4, "seeds": 2, "small": True}
    )
    parser.add_argument("corpus", nargs="?", metavar="CORPUS", help="the text (default: none)")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: those of the configs)")
    parser.add_argument(
        "--ternary_steps",
        type=int,
        help="optimizer steps of the ternary model (default: as --steps)",
    )
    parser.add_argument(
        "--batch_size", type=int, help="sequences per step (default: that of the configs)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each model (default: 3)")
    parser.add_argument(
        "--lr",
        type=float,
        help="peak learning rate of the ternary model's matrices (default: as in float)",
    )
    parser.add_argument(
        "--small", action="store_true", help="use a tiny model, to check the benchmark"
    )
    o = parser.parse_args()
    parser.require(CORPUS=o.corpus)
    changes: dict[str, Any] = {"data.path": o.corpus} | (SMALL if o.small else {})
    if o.batch_size:
        changes["training.batch_size"] = o.batch_size
    steps = {"float": o.steps, "ternary": o.ternary_steps or o.steps}
    rows = []
    for seed in range(o.seeds):
        for kind in KINDS:
            own = {"training.muon_lr": o.lr} if o.lr and kind == "ternary" else {}
            own |= schedule(steps[kind]) if steps[kind] else {}
            rows.append(train(kind, seed, temporary_folder(), changes | own))
            print(json.dumps(rows[-1]), flush=True)
    finals = {
        kind: [row["val_losses"][-1] for row in rows if row["kind"] == kind] for kind in KINDS
    }
    print(f"{'model':10} {'nats':>8} {'sd':>8} {'ms/step':>8}")
    for kind, losses in finals.items():
        speed = mean(row["ms_per_step"] for row in rows if row["kind"] == kind)
        print(
            f"{kind:10} {mean(losses):8.4f} {stdev(losses) if len(losses) > 1 else 0:8.4f}"
            f" {speed:8.1f}"
        )
    gaps = [ternary - other for other, ternary in zip(*finals.values(), strict=True)]
    print(f"{'difference':10} {mean(gaps):8.4f} {stdev(gaps) if len(gaps) > 1 else 0:8.4f}")


if __name__ == "__main__":
    main()
