"""Writes `peers.npz`: random rows, and the results of the logits processors of Hugging Face
Transformers for them.

Run it in an environment with torch and transformers: `python tests/sampling/make_peers.py`. The
tests only read the file.

Arrays per vocabulary size V, N rows each:
  logits_V        float16 [N, V], read as float32; -inf for tokens that are already removed
  text_V          int16 [N, 32], token history, padded with -1
  {name}_V        float32 [N], the number of the step
  kept_{name}_V   bit mask of the tokens that the step keeps
  ids_V           int16 [N, 16], token ids whose values are checked, in the history and not in it
  temperature_values_V, repetition_penalty_values_V   float32 [N, 16], the logits of these tokens
`versions` holds the package versions.
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.generation import logits_process as peer

ROWS = {12: 120, 100: 130, 128: 120, 500: 130}
TEXT, CHECKED = 32, 16

MASKS = {
    "top_k": lambda k: peer.TopKLogitsWarper(int(k)),
    "top_p": lambda p: peer.TopPLogitsWarper(float(p)),
    "min_p": lambda p: peer.MinPLogitsWarper(float(p)),
    "typical": lambda p: peer.TypicalLogitsWarper(float(p)),
    "epsilon_cutoff": lambda eps: peer.EpsilonLogitsWarper(float(eps)),
    "eta_cutoff": lambda eps: peer.EtaLogitsWarper(float(eps)),
    "no_repeat_ngram": lambda n: peer.NoRepeatNGramLogitsProcessor(int(n)),
}
VALUES = {
    "temperature": lambda t: peer.TemperatureLogitsWarper(float(t)),
    "repetition_penalty": lambda penalty: peer.RepetitionPenaltyLogitsProcessor(float(penalty)),
}


def row(rng, V):
    """A peaked, flat, heavy-tailed, tied or power-law row; in every third row many tokens are
    removed.
    """
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
    return np.clip(x_V, -6e4, 6e4, where=np.isfinite(x_V), out=x_V).astype(np.float16)


def numbers(rng, V):
    drawn = {
        "top_k": rng.integers(1, V + 10),
        "top_p": rng.choice(
            [0.0, rng.uniform(0.01, 0.99), rng.beta(8, 1) * 0.998], p=[0.03, 0.57, 0.4]
        ),
        "min_p": 10 ** rng.uniform(-4, 0),
        "typical": rng.uniform(0.02, 0.99),
        "epsilon_cutoff": 10 ** rng.uniform(-4.5, -0.2),
        "eta_cutoff": 10 ** rng.uniform(-4.5, -0.2),
        "no_repeat_ngram": rng.integers(1, 6),
        "temperature": 10 ** rng.uniform(-1.5, 1),
        "repetition_penalty": rng.uniform(0.5, 2.5),
    }
    return {name: np.float32(value) for name, value in drawn.items()}


def text(rng, V):
    """Up to 32 tokens of a small alphabet, so that they repeat."""
    alphabet = rng.integers(0, V, rng.integers(2, 7))
    return rng.choice(alphabet, rng.integers(1, TEXT + 1))


def group(rng, V, N):
    made = {f"logits_{V}": [], f"text_{V}": [], f"ids_{V}": []}
    for _ in range(N):
        x_V, said, number = row(rng, V), text(rng, V), numbers(rng, V)
        ids = np.concatenate([said[: CHECKED // 2], rng.integers(0, V, CHECKED)])[:CHECKED]
        out = {
            "logits": x_V,
            "text": np.pad(said, (0, TEXT - len(said)), constant_values=-1),
            "ids": ids,
        } | number
        scores, history = torch.tensor(x_V.astype(np.float32))[None], torch.tensor(said)[None]
        for name, step in MASKS.items():
            out[f"kept_{name}"] = np.packbits(
                step(number[name])(history, scores.clone())[0].numpy() > -np.inf
            )
        for name, step in VALUES.items():
            out[f"{name}_values"] = step(number[name])(history, scores.clone())[0].numpy()[ids]
        for key, value in out.items():
            made.setdefault(f"{key}_{V}", []).append(value)
    kinds = {f"logits_{V}": np.float16, f"text_{V}": np.int16, f"ids_{V}": np.int16}
    return {key: np.array(value, kinds.get(key)) for key, value in made.items()}


def main():
    rng = np.random.default_rng(20)
    arrays = {
        "versions": np.array(
            f"torch {torch.__version__}, transformers {transformers.__version__}, numpy"
            f" {np.__version__}"
        )
    }
    for V, N in ROWS.items():
        arrays |= group(rng, V, N)
    np.savez_compressed(Path(__file__).with_name("peers.npz"), **arrays)


if __name__ == "__main__":
    main()
