"""A run exported as GGUF, and whether llama.cpp makes of it what we do: logits, greedy tokens, and how text is cut up.

For every type one JSON line: `logits`, the largest difference over `prompts` lines of the text with what we continue them by;
`same_choice`, the share of those tokens that the peer chooses too where it is given ours before them; `same_tokens`, the share
that it writes by itself, counted place by place; `same_lines`, the share of lines that become the same tokens.

    python benchmarks/gguf.py runs/quickstart --text file.py --peer /path/to/python-with-llama-cpp
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np


def parse() -> argparse.Namespace:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("run")
    a.add_argument("--text", required=True, help="a file whose lines are prompts, and are cut up")
    a.add_argument("--peer", required=True, help="a Python that has llama-cpp-python")
    a.add_argument("--types", nargs="+", default=["f32", "q8_0"], choices=("f32", "f16", "bf16", "q8_0"))
    a.add_argument("--prompts", type=int, default=20)
    a.add_argument("--new", type=int, default=64, help="tokens that each prompt is continued by")
    a.add_argument("--lines", type=int, default=10_000)
    a.add_argument("--threads", type=int, default=2)
    return a.parse_args()


def main() -> None:
    o = parse()
    if hasattr(os, "sched_setaffinity"):  # before jax makes its threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: o.threads])
    import jax
    import jax.numpy as jnp

    from dantinox.generation import load

    run = load(o.run)
    lines = Path(o.text).read_text(encoding="utf-8").splitlines()
    long = [line for line in lines if len(line) > 20]
    prompts = [long[i * len(long) // o.prompts] for i in range(o.prompts)]
    results = run.generate(prompts, greedy=True, max_new_tokens=o.new, ignore_eos=True)
    ids = [run.tokenizer.encode(prompt) for prompt in prompts]
    sequences = [[*before, *result.tokens] for before, result in zip(ids, results, strict=True)]
    T = max(map(len, sequences))
    tokens_BT = np.array([[*tokens, *[0] * (T - len(tokens))] for tokens in sequences])
    positions_BT = np.array([[*range(len(tokens)), *[-1] * (T - len(tokens))] for tokens in sequences])
    read = jax.jit(lambda tokens_BT, positions_BT: run.model(tokens_BT, positions_BT)[0])
    logits_BTV = np.asarray(read(jnp.asarray(tokens_BT), jnp.asarray(positions_BT)))
    ours = np.concatenate([logits_BTV[row, : len(tokens)] for row, tokens in enumerate(sequences)])
    # What follows a prompt's last token, and so on: the choices that were ours.
    chosen = np.concatenate([np.arange(-o.new - 1, -1) + end for end in np.cumsum([len(tokens) for tokens in sequences])])
    lines = [lines[i * len(lines) // o.lines] for i in range(o.lines)] if len(lines) > o.lines else lines
    cut = [run.tokenizer.encode(line) for line in lines]
    for kind in o.types:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.gguf"
            export = [sys.executable, "-m", "dantinox", "export", o.run, file, "--format", "gguf", "--type", kind]
            subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
            job = {"file": str(file), "sequences": sequences, "prompts": ids, "new": o.new, "lines": lines}
            job["threads"] = o.threads
            Path(folder, "job.json").write_text(json.dumps(job), encoding="utf-8")
            peer = Path(__file__).with_name("gguf_peer.py")
            subprocess.run([o.peer, peer, folder], check=True, stderr=subprocess.DEVNULL)
            answer, size = dict(np.load(Path(folder) / "answer.npz")), file.stat().st_size
        theirs = answer["logits"]
        ends = np.cumsum(answer["lengths"])[:-1]
        same = [a == b.tolist() for a, b in zip(cut, np.split(answer["tokens"], ends), strict=True)]
        row = {
            "type": kind,
            "megabytes": round(size / 1e6, 2),
            "logits": float(np.abs(theirs - ours).max()),
            "largest_logit": float(np.abs(ours).max()),
            "same_choice": float(np.mean(theirs[chosen].argmax(-1) == ours[chosen].argmax(-1))),
            "same_tokens": float(np.mean(answer["continued"] == np.array([result.tokens for result in results]))),
            "same_lines": float(np.mean(same)),
            "lines": len(lines),
            "same_text": float(answer["same_text"]),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
