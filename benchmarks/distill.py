"""Trains a teacher and students of half its depth, with and without the teacher, for equal numbers
of steps.

    python benchmarks/distill.py [--text FILE] [--layers 4] [--teacher_steps 2000] [--steps 500] [--seeds 3]

All students see the same tokens. Prints the next-token loss of the validation text in nats per
token after the last step, its mean over the seeds of the students, and the difference to the
student without a teacher.
"""

import numpy as np
from common import Parser, temporary_folder

import dantinox
from dantinox.config import build_config
from dantinox.report import read_jsonl
from dantinox.run import RunDirectory

STUDENTS = {
    "next token": {},
    "forward KL": {"distill.divergence": "forward_kl"},
    "forward KL, temperature 2": {"distill.divergence": "forward_kl", "distill.temperature": 2.0},
    "forward KL, top 16": {"distill.divergence": "forward_kl", "distill.top_k": 16},
    "reverse KL": {"distill.divergence": "reverse_kl"},
    "forward KL and next token, equal weights": {"distill.data_weight": 0.5},
    "forward KL, from layers of the teacher": {"distill.init_from_teacher": True},
}


def final_loss(run: RunDirectory) -> float:
    """Returns the next-token loss of the last evaluation."""
    rows = [row for row in read_jsonl(run.metrics) if row["kind"] in ("evaluation", "distillation")]
    return float(rows[-1].get("val_data_loss", rows[-1].get("val_loss")))


def main() -> None:
    parser = Parser(
        __doc__,
        smoke={
            "text": __file__,
            "layers": 2,
            "dim": 16,
            "context": 16,
            "vocab": 300,
            "teacher_steps": 4,
            "steps": 4,
            "seeds": 1,
            "students": 2,
        },
    )
    parser.add_argument("--text", default="builtin:python", help="text file")
    for name, default in {
        "layers": 4,
        "dim": 128,
        "context": 128,
        "vocab": 512,
        "teacher_steps": 2000,
        "steps": 500,
        "seeds": 3,
        "students": len(STUDENTS),
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    folder = temporary_folder()
    shared = {
        "data.path": options.text, "model.dim": options.dim, "model.n_heads": 4,
        "model.max_context": options.context, "training.batch_size": 16, "training.lr": 3e-3,
        "training.eval_every": 10**6, "training.checkpoint_every": 10**6, "logging.log_every": 100,
        "logging.plot": False,
    }  # fmt: skip
    tokenizer = {
        "tokenizer.vocab_size": options.vocab,
        "training.steps": options.teacher_steps,
        "model.num_blocks": options.layers,
    }
    teacher = dantinox.launch(build_config({}, shared | tokenizer), run_dir=folder / "teacher")
    half = shared | {"training.steps": options.steps, "model.num_blocks": options.layers // 2}
    half |= {"training.objective": "distill", "distill.teacher": str(teacher.path)}
    losses = {}
    for name, settings in list(STUDENTS.items())[: options.students]:
        losses[name] = []
        for seed in range(options.seeds):
            loss = settings or {
                "distill.data_weight": 1.0
            }  # the same tokenizer and tokens, but no divergence in the loss
            config = build_config({}, half | loss | {"training.seed": seed})
            losses[name].append(
                final_loss(dantinox.launch(config, run_dir=folder / f"{name} {seed}"))
            )
    alone = np.array(losses["next token"])
    print(f"{'':<42} steps  loss    difference")
    print(
        f"{f'teacher, {options.layers} layers':<42} {options.teacher_steps:5} "
        f" {final_loss(teacher):.4f}"
    )
    for name, found in losses.items():
        print(
            f"{name:<42} {options.steps:5}  {np.mean(found):.4f} "
            f" {np.mean(np.array(found) - alone):+.4f}"
        )


if __name__ == "__main__":
    main()
