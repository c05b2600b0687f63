"""Compares a run with its export to transformers: greedy tokens, logits and tokenization.

Prints one JSON line. Both libraries continue `prompts` lines of the text greedily: `same_tokens` is
the share of positions at which their tokens are equal. `logits` is the largest difference of their
logits over these lines and DantinoX's continuations. Both also tokenize `lines` lines: `same_lines`
is the share of lines that are encoded to the same tokens, `same_text` the share of lines that are
decoded to the same text.

    python benchmarks/exported.py runs/quickstart --text file.py --peer /path/to/python-with-transformers
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from common import Parser, random_run


def answer(folder: Path) -> None:
    """Evaluates job.json with transformers and writes answer.npz. Runs in the Python interpreter of
    `--peer`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    continued = []
    logits = []
    with torch.no_grad():
        for prompt, sequence in zip(job["prompts"], job["sequences"], strict=True):
            rules = {
                "do_sample": False,
                "max_new_tokens": job["new"],
                "min_new_tokens": job["new"],
                "eos_token_id": None,
            }
            ids = torch.tensor([prompt])
            continued.append(
                model.generate(ids, attention_mask=torch.ones_like(ids), **rules)[
                    0, len(prompt) :
                ].numpy()
            )
            logits.append(model(torch.tensor([sequence])).logits[0].numpy())
    line_ids = [tokenizer.encode(line, add_special_tokens=False) for line in job["lines"]]
    again = [
        tokenizer.decode(ids, skip_special_tokens=True) == line
        for ids, line in zip(line_ids, job["lines"], strict=True)
    ]
    lengths = np.array([len(ids) for ids in line_ids])
    tokens = np.array([token for ids in line_ids for token in ids])
    np.savez(
        folder / "answer.npz", continued=np.stack(continued), logits=np.concatenate(logits),
        lengths=lengths, tokens=tokens,
        again=np.array(again),
    )  # fmt: skip


def main() -> None:
    a = Parser(__doc__, smoke={"text": __file__, "prompts": 2, "new": 8, "lines": 20})
    a.add_argument("run", nargs="?")
    a.add_argument(
        "--text", help="a file; some of its lines are prompts, and its lines are tokenized"
    )
    a.add_argument("--peer", help="a Python interpreter with torch and transformers")
    a.add_argument("--prompts", type=int, default=20)
    a.add_argument("--new", type=int, default=64, help="new tokens per prompt")
    a.add_argument("--lines", type=int, default=10_000)
    o = a.parse_args()
    if o.smoke and o.run is None:
        o.run = random_run()
    a.require(run=o.run, text=o.text, peer=o.peer or ("none" if o.smoke else None))
    import jax.numpy as jnp

    from dantinox.generation import load
    from dantinox.interop.checkpoints import export_hf

    run = load(o.run)
    lines = Path(o.text).read_text(encoding="utf-8").splitlines()
    long = [line for line in lines if len(line) > 20]
    prompts = [long[i * len(long) // o.prompts] for i in range(o.prompts)]
    results = run.generate(prompts, greedy=True, max_new_tokens=o.new, ignore_eos=True)
    ids = [run.prompt_ids(prompt) for prompt in prompts]
    sequences = [[*before, *result.tokens] for before, result in zip(ids, results, strict=True)]
    T = max(map(len, sequences))
    tokens_BT = np.array([[*tokens, *[0] * (T - len(tokens))] for tokens in sequences], np.int32)
    positions_BT = np.array(
        [[*range(len(tokens)), *[-1] * (T - len(tokens))] for tokens in sequences], np.int32
    )
    logits_BTV = np.asarray(run.model(jnp.asarray(tokens_BT), jnp.asarray(positions_BT))[0])
    ours = np.concatenate([logits_BTV[row, : len(tokens)] for row, tokens in enumerate(sequences)])
    lines = (
        [lines[i * len(lines) // o.lines] for i in range(o.lines)]
        if len(lines) > o.lines
        else lines
    )
    line_ids = [run.tokenizer.encode(line) for line in lines]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        family = export_hf(o.run, folder / "hf")["model_type"]
        job = {"prompts": ids, "sequences": sequences, "new": o.new, "lines": lines}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        if not o.peer:
            print(json.dumps({"family": family, "lines": len(lines), "peer": None}))
            return
        subprocess.run([o.peer, __file__, "--answer", folder], check=True, timeout=500)
        theirs = dict(np.load(folder / "answer.npz"))
    same = [
        a == b.tolist()
        for a, b in zip(
            line_ids, np.split(theirs["tokens"], np.cumsum(theirs["lengths"])[:-1]), strict=True
        )
    ]
    row = {
        "family": family,
        "same_tokens": float(
            np.mean(theirs["continued"] == np.array([result.tokens for result in results]))
        ),
        "tokens": int(theirs["continued"].size),
        "logits": float(np.abs(theirs["logits"] - ours).max()),
        "largest_logit": float(np.abs(ours).max()),
        "lines": len(lines),
        "same_lines": float(np.mean(same)),
        "same_text": float(np.mean(theirs["again"])),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        answer(Path(sys.argv[2]))
    else:
        main()
