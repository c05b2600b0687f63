"""Small runs with rewards: a base run that answers `y`, `n` or `z` at random, and a reward for
`y`.
"""

import json
from pathlib import Path

import jax
import numpy as np

from dantinox.config import build_config
from dantinox.report import read_csv, read_jsonl
from dantinox.text import train_tokenizer
from dantinox.training.checkpoint_store import Checkpoints
from dantinox.training.step import TrainStep

from .small import random_weights, write_run

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ eos_token if m.role == 'assistant'"
    " }}{% endfor %}"
)
TEMPLATE += "{{ 'a' if add_generation_prompt }}"
RECORDS = [
    {"prompt": f"{number:02}", "completion": "yn"[number * 7 % 5 > 1], "answer": "y"}
    for number in range(40)
]
SETTINGS = {
    "model.dim": 16, "model.n_heads": 2, "model.num_blocks": 1, "model.max_context": 24,
    "tokenizer.tokenizer_type": "byte", "model.dtype": "float32", "model.weight_tying": False,
    "data.val_fraction": 0.2, "training.warmup_steps": 1, "training.schedule": "constant",
    "logging.plot": False,
    "generation.max_new_tokens": 2,
}  # fmt: skip
TIMES = {
    "ms_per_step",
    "tokens_per_s",
    "memory_gb",
    "seconds_sampling",
    "seconds_scoring",
    "seconds_updating",
}


ANSWERS = {"y": 0.3, "n": 0.5, "z": 0.2}  # their probabilities


def make_base(folder: Path, **changes) -> Path:
    """Writes the base run in `folder / "base"`: the last token decides the next one."""
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    config = build_config({}, SETTINGS | _data(folder) | {"training.objective": "sft"} | changes)
    tokenizer = train_tokenizer(config.tokenizer, lambda: iter(()))
    weights = random_weights(config.architecture(tokenizer.vocab_size), size=0.1)
    begin, *answers = tokenizer.encode("a" + "".join(ANSWERS))
    directions = np.linalg.qr(np.random.default_rng(0).normal(size=(16, 16)))[
        0
    ]  # of single tokens, at right angles
    weights["embed"][[begin, *answers]] = directions[:4]
    # The last norm makes them 4 long: a logit is 4 times the dot product, 12 + ln p here without
    # the rest of the layer. Another direction of each answer lets adapters of the layer change its
    # probability, too.
    for place, (answer, p) in enumerate(zip(answers, ANSWERS.values(), strict=True)):
        weights["head/kernel"][:, answer] += (12 + np.log(p)) / 4 * directions[0] + directions[
            4 + place
        ]
        weights["head/kernel"][:, tokenizer.eos_id] += 12 / 4 * directions[1 + place]
    write_run(folder / "base", config, weights)
    return folder


def grpo_config(folder, **changes):
    settings = {
        "training.objective": "grpo", "training.init_from": str(Path(folder) / "base"),
        "training.batch_size": 4, "training.steps": 8, "training.lr": 0.02,
        "training.eval_every": 4, "training.checkpoint_every": 3, "training.sample_every": 4,
        "logging.log_every": 1, "grpo.rewards": ["exact_match"], "grpo.samples": 8,
    }  # fmt: skip
    return build_config({}, SETTINGS | _data(folder) | settings | changes)


def _data(folder):
    return {
        "data.path": str(Path(folder) / "records.jsonl"),
        "data.chat_template": str(Path(folder) / "template.jinja"),
    }


def outcome(run, config):
    """Returns what must not depend on an interruption: weights, the last state, logs without times,
    and samples.
    """
    rows = [*read_csv(run.log(config)), *read_jsonl(run.metrics)]
    vocabulary, steps = 259, config.training.steps
    shapes = TrainStep(config, config.trained_architecture(vocabulary), steps).shapes
    state = Checkpoints(run.checkpoints, 2).read(steps, shapes)
    return (
        run.weights_or_adapter.read_bytes(),
        [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)],
        [{name: value for name, value in row.items() if name not in TIMES} for row in rows],
        {path.name: path.read_bytes() for path in run.samples.iterdir()},
    )
