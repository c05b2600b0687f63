"""Writes `recent_peers.npz`: results of top-H, the encoder repetition penalty and SynthID in
Hugging Face Transformers.

Run it in an environment with torch and transformers: `python tests/sampling/make_recent_peers.py`.
Tests only read the file.

Arrays:
  logits, alpha, kept      float16 [N, 90], float32 [N], bool [N, 90]: rows, top_h, and the mask of `TopHLogitsWarper`
  prompt, penalty, scored  int16 [N, 8], float32 [N], float32 [N, 90]: tokens of the prompt and the logits after
                           `EncoderRepetitionPenaltyLogitsProcessor`
  output, steps, marked    int16 [S, T], float16 [T, V], float32 [S, T, V]: texts, the logits at every position, and the
                           probabilities after `SynthIDTextWatermarkLogitsProcessor` with the `keys` and n-grams of `ngram` [S]
  g_values, counted        int8 [S, T, K], bool [S, T]: g-values of the texts, and the mask of contexts that are not repeated,
                           padded at the end; `numbers` [S] of them are valid
`versions` holds the package versions.
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from make_peers import row
from transformers.generation import logits_process as peer

ROWS, V = 200, 90
TEXTS, LENGTH, VOCABULARY = 4, 40, 24
KEYS = [654, 400, 836, 123, 340, 443, 597, 160, 57, 2**31 - 1]


def watermark(ngram):
    return peer.SynthIDTextWatermarkLogitsProcessor(
        ngram, KEYS, 2**16, 0, 1024, torch.device("cpu")
    )


def main():
    rng, found = np.random.default_rng(27), {}
    for _ in range(ROWS):
        x_V, alpha, penalty = (
            row(rng, V),
            np.float32(rng.uniform(0.05, 1)),
            np.float32(10 ** rng.uniform(-0.5, 0.5)),
        )
        prompt, scores = rng.integers(0, V, 8), torch.tensor(x_V.astype(np.float32))[None]
        scored = peer.EncoderRepetitionPenaltyLogitsProcessor(
            float(penalty), torch.tensor(prompt)[None]
        )(None, scores.clone())
        one = {
            "logits": x_V, "alpha": alpha,
            "kept": peer.TopHLogitsWarper(float(alpha))(None, scores)[0].numpy() > -np.inf,
            "prompt": prompt.astype(np.int16), "penalty": penalty, "scored": scored[0].numpy(),
        }  # fmt: skip
        for name, value in one.items():
            found.setdefault(name, []).append(value)
    steps_TV = np.stack([rng.normal(0, 2, VOCABULARY) for _ in range(LENGTH)]).astype(np.float16)
    found["steps"] = steps_TV
    for text, ngram in enumerate((5, 3, 2, 8)):
        # A small alphabet without token 0, so that contexts repeat.
        output_T = rng.integers(1, 3 + 3 * text, LENGTH)
        processor, marked = watermark(ngram), []
        for t in range(LENGTH):
            ids = torch.tensor([[7, 7, *output_T[:t]]])
            scores = processor(ids, torch.tensor(steps_TV[t].astype(np.float32))[None])
            marked.append(torch.softmax(scores, 1)[0].numpy())
        g_values = watermark(ngram).compute_g_values(torch.tensor(output_T)[None])[0].numpy()
        counted = (
            watermark(ngram)
            .compute_context_repetition_mask(torch.tensor(output_T)[None])[0]
            .numpy()
        )
        pad = LENGTH - len(g_values)
        one = {
            "output": output_T.astype(np.int16), "ngram": ngram, "marked": np.stack(marked),
            "numbers": len(g_values),
            "g_values": np.pad(g_values.astype(np.int8), ((0, pad), (0, 0))),
            "counted": np.pad(counted, (0, pad)),
        }  # fmt: skip
        for name, value in one.items():
            found.setdefault(name, []).append(value)
    arrays = {name: np.array(value) for name, value in found.items()}
    arrays["keys"] = np.array(KEYS)
    arrays["versions"] = np.array(
        f"torch {torch.__version__}, transformers {transformers.__version__}, numpy"
        f" {np.__version__}"
    )
    np.savez_compressed(Path(__file__).with_name("recent_peers.npz"), **arrays)


if __name__ == "__main__":
    main()
