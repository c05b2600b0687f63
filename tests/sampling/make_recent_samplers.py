"""Writes `recent_samplers.json`: rows of logits, and what the samplers of `recent_references.py`
make of them.

    python tests/sampling/make_recent_samplers.py

A case of a random row is written only if its mask does not change in 12 trials with all distinct
logits moved by up to 4e-6·max(1, |x|); equal logits move together. Hand-made rows, with exact ties
and bounds, are always written. In the file, null is -inf. A filter has the ids that it keeps,
another step the probabilities after it.
"""

import json
from pathlib import Path

import numpy as np
import recent_references as references

CASES = 44  # random rows per sampler
TRIALS, HAIR = 12, 4e-6
FILTERS = ("min_k", "p_less", "p_less_norm", "top_h")
STEPS = {
    "min_k": lambda rng: {
        "tau": float(np.round(rng.choice([0, rng.uniform(0, 10), rng.uniform(10, 60)]), 3))
    },
    "p_less": lambda rng: {},
    "p_less_norm": lambda rng: {},
    "top_h": lambda rng: {
        "alpha": float(np.round(rng.uniform(0, 1), 3)),
        "rule": str(rng.choice(["renormalized", "cumulative"])),
    },
    "skew": lambda rng: {"skew": float(np.round(rng.uniform(-3, 3), 3))},
    "adaptive_p": lambda rng: {
        "target": float(np.round(rng.uniform(0, 1), 3)),
        "average": float(np.round(rng.uniform(0, 1), 3)),
    },
    "encoder_repetition_penalty": lambda rng: {
        "penalty": float(np.round(10 ** rng.uniform(-0.5, 0.5), 3))
    },
}
FLAT = [[0.0] * 8, [-3.25] * 5, [1.5] * 4 + [None] * 4]
TIES = [[2.0, 2.0, 1.0, 1.0, 1.0, 0.0], [0.0, 3.0, 3.0, 3.0], [1.0, 0.0, 1.0, 0.0, 1.0, None, 0.0]]
SINGLE = [[4.0], [None, -7.0, None]]
EXTREME = [
    [3e38, -3e38, 0.0],
    [-3e38, -3e38, -3e38],
    [80.0, 0.0, -80.0, -300.0],
    [1e-30, 0.0, -1e-30],
    [None, 3e38, 3e38, -1e30],
]
HAND_MADE = FLAT + TIES + SINGLE + EXTREME


def random_row(rng):
    """A peaked, flat, heavy-tailed, tied or power-law row; in every third row many tokens are
    removed.
    """
    V = int(rng.integers(2, 26))
    x_V = [
        lambda: rng.normal(0, rng.uniform(2, 8), V),
        lambda: rng.normal(0, rng.uniform(0.02, 0.5), V),
        lambda: rng.standard_t(1.5, V) * 2,
        lambda: np.round(rng.normal(0, rng.uniform(0.5, 3), V)),
        lambda: (
            rng.permutation(-rng.uniform(0.8, 3) * np.log(1 + np.arange(V))) + rng.uniform(-20, 20)
        ),
    ][rng.integers(5)]()
    if rng.random() < 1 / 3:
        x_V[rng.random(V) < rng.uniform(0.1, 0.9)] = -np.inf
        x_V[rng.integers(V)] = rng.normal()
    return np.round(x_V, 3)


def moved(x_V, rng):
    """The row with every distinct logit moved a little."""
    values, places = np.unique(x_V, return_inverse=True)
    step = HAIR * np.maximum(1, np.abs(values)) * rng.uniform(-1, 1, len(values))
    return np.where(values > -np.inf, values + np.where(values > -np.inf, step, 0), -np.inf)[places]


def case(name, x_V, numbers, prompt, rng, check):
    function = getattr(references, name)
    x_V = np.float32([-np.inf if x is None else x for x in x_V]).astype(np.float64)
    text = {"prompt": prompt} if name == "encoder_repetition_penalty" else {}
    found = function(x_V, **numbers, **text)
    if name in FILTERS:
        result = {"kept": sorted(map(int, found))}
        if check and any(
            set(function(moved(x_V, rng), **numbers)) != set(found) for _ in range(TRIALS)
        ):
            return None
    else:
        result = {"probabilities": [float(f"{p:.9g}") for p in found]}
    logits = [None if x == -np.inf else float(f"{x:.9g}") for x in x_V]
    return {"step": {"name": name} | numbers, "logits": logits} | text | result


def main():
    rng, cases = np.random.default_rng(26), []
    for name, numbers in STEPS.items():
        rows = [(row, False) for row in HAND_MADE] + [(random_row(rng), True) for _ in range(CASES)]
        for row, check in rows:
            row = [None if x is None or x == -np.inf else float(x) for x in row]
            prompt = sorted(set(rng.integers(0, len(row), 4).tolist()))
            cases.append(case(name, row, numbers(rng), prompt, rng, check))
    found = [one for one in cases if one is not None]
    text = ",\n".join(json.dumps(one) for one in found)
    Path(__file__).with_name("recent_samplers.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")
    print(f"{len(found)} cases, {len(cases) - len(found)} left out")


if __name__ == "__main__":
    main()
