"""Evaluates a GGUF file with llama.cpp. benchmarks/gguf_export.py starts this script with the
peer's Python.

    python benchmarks/gguf_peer.py FOLDER      (needs llama-cpp-python; reads FOLDER/job.json, writes FOLDER/answer.npz)

The job names a GGUF file. Its `sequences` are token ids for which logits are computed, its
`prompts` are token ids that are continued greedily by `new` tokens, and its `lines` are texts to
tokenize.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
from llama_cpp import GGML_TYPE_F32, Llama


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    longest = max(len(tokens) for tokens in (*job["sequences"], *job["prompts"]))
    model = Llama(
        job["file"],
        n_ctx=longest + job["new"] + 8,
        n_threads=job["threads"],
        logits_all=True,
        # The default float16 cache would add rounding differences.
        type_k=GGML_TYPE_F32,
        type_v=GGML_TYPE_F32,
        flash_attn=False,
        verbose=False,
    )
    logits = []
    for tokens in job["sequences"]:
        model.reset()
        model.eval(tokens)
        logits.append(np.array(model.scores[: len(tokens)]))
    continued = []
    seconds = 0.0
    for tokens in job["prompts"]:
        model.reset()
        model.eval(tokens)
        start = time.perf_counter()
        new = []
        for _ in range(job["new"]):
            new.append(int(np.argmax(model.scores[model.n_tokens - 1])))
            model.eval(new[-1:])
        seconds += time.perf_counter() - start
        continued.append(new)
    line_ids = [
        model.tokenize(line.encode(), add_bos=False, special=False) for line in job["lines"]
    ]
    joined = [model.detokenize(tokens).decode(errors="replace") for tokens in line_ids]
    np.savez(
        folder / "answer.npz",
        logits=np.concatenate(logits) if logits else np.zeros((0, 0)),
        continued=np.array(continued, np.int32),
        tokens=np.array([token for tokens in line_ids for token in tokens], np.int32),
        lengths=np.array([len(tokens) for tokens in line_ids], np.int32),
        same_text=np.mean([a == b for a, b in zip(joined, job["lines"], strict=True)] or [1.0]),
        tokens_per_second=len(job["prompts"]) * job["new"] / max(seconds, 1e-9),
    )


if __name__ == "__main__":
    main()
