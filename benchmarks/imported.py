"""Compares the speed of an imported model with transformers on the same weights; `gguf_speed.py`
compares with llama.cpp.

Creates a random Llama with transformers, imports it, and decodes greedily from the same prompts in
both programs. Without `--torch`, a random run with a byte tokenizer takes the place of the Llama.
Each round starts one process per program, one after another. For each batch size, the script prints
a JSON line with both programs' best speeds of all rounds, DantinoX's speed divided by that of
transformers, and the number of tokens in the first row that are the same.

    python benchmarks/imported.py --torch /path/to/python-with-torch
    python benchmarks/imported.py … --weights int8 --torch_weights bfloat16
    python benchmarks/imported.py … --prompt 512 --new 8 --batch 1      # prefill

This file also runs in the environments of the peers, so it imports only the standard library at
module level.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import LLAMA, Parser, random_run, use_threads


def parse() -> argparse.Namespace:
    a = Parser(__doc__, smoke={**LLAMA, "prompt": 16, "new": 8, "rounds": 1, "batch": [2]})
    for name, default in {
        "dim": 768, "layers": 12, "heads": 12, "kv_heads": 4, "head_size": 64, "hidden": 2048,
        "vocab": 32000, "prompt": 64, "new": 128, "threads": 2, "rounds": 2,
    }.items():  # fmt: skip
        a.add_argument(f"--{name}", type=int, default=default)
    a.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    a.add_argument("--weights", choices=("float32", "bfloat16", "int8", "int4"), default="float32")
    a.add_argument("--torch_weights", choices=("float32", "bfloat16"), default="float32")
    a.add_argument("--torch", help="a Python interpreter with torch and transformers")
    a.add_argument(
        "--folder",
        type=Path,
        help=(
            "the folder of the model; an existing model with the same flags is reused (default: a"
            " temporary folder)"
        ),
    )
    a.add_argument("--part", help=argparse.SUPPRESS)
    return a.parse_args()


def prompts(o: argparse.Namespace, batch: int) -> list[list[int]]:
    """Returns prompts of pseudorandom ids that are the same in every environment, without a random
    number library.
    """
    return [
        [
            1 + (7919 * (row * o.prompt + place) ** 2 + 104729 * place) % (o.vocab - 1)
            for place in range(o.prompt)
        ]
        for row in range(batch)
    ]


def timed(o: argparse.Namespace, peer: str, run: Callable[[int, int], list[list[int]]]) -> None:
    """Times `run(batch, new)`, which decodes and returns the new tokens of all rows; prints a line
    per batch size.
    """
    for batch in o.batch:
        run(batch, o.new)
        run(batch, 1)
        seconds: dict[int, float] = {}
        tokens: list[list[int]] = []
        for new in (1, o.new):
            begun = time.perf_counter()
            tokens = run(batch, new)
            seconds[new] = time.perf_counter() - begun
        rate = batch * (o.new - 1) / (seconds[o.new] - seconds[1])
        line = {
            "peer": peer,
            "batch": batch,
            "decode_tok_per_s": rate,
            "prefill_s": seconds[1],
            "tokens": tokens[0],
        }
        print(json.dumps(line), flush=True)


def write_llama(o: argparse.Namespace) -> None:
    """Writes a random Llama to `hf` in the Hugging Face format, with a byte tokenizer that only
    import and export use.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=o.vocab, hidden_size=o.dim, intermediate_size=o.hidden,
        num_hidden_layers=o.layers, num_attention_heads=o.heads, num_key_value_heads=o.kv_heads,
        head_dim=o.head_size, tie_word_embeddings=True,
        max_position_embeddings=2048,
        bos_token_id=None, eos_token_id=None, initializer_range=0.05,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(o.folder / "hf")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, *(f"unmade{number}" for number in range(o.vocab - len(letters) - 1))]
    core = Tokenizer(models.BPE(vocab={name: place for place, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<eos>"])
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>").save_pretrained(
        o.folder / "hf"
    )


def ours(o: argparse.Namespace) -> None:
    import numpy as np

    import dantinox
    from dantinox.generation.static_batch import StaticBatch
    from dantinox.sampling import SamplingParams

    run = dantinox.load(o.folder / "run")
    model = run.prepared(run.settings({"weights": o.weights}).generation)

    def decode(batch: int, new: int) -> list[list[int]]:
        ids = np.array(prompts(o, batch))
        params = SamplingParams.build({"greedy": True}, batch=batch)
        session = StaticBatch(
            model,
            ids,
            np.full(batch, o.prompt),
            params,
            limits_B=np.full(batch, new),
            eos_ids=[[]] * batch,
        )
        chunks = list(session.run(dispatch_ahead=True))
        return np.concatenate([chunk.tokens for chunk in chunks], axis=1)[:, :new].tolist()

    timed(o, "dantinox", decode)


def transformers(o: argparse.Namespace) -> None:
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(o.threads)
    model = LlamaForCausalLM.from_pretrained(
        o.folder / "hf", dtype=getattr(torch, o.torch_weights)
    ).eval()

    def decode(batch: int, new: int) -> list[list[int]]:
        ids = torch.tensor(prompts(o, batch))
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
        return found[:, o.prompt :].tolist()

    timed(o, "transformers", decode)


PARTS = {"make": write_llama, "ours": ours, "transformers": transformers}


def main() -> None:
    o = parse()
    if o.part:
        use_threads(o.threads)
        PARTS[o.part](o)
        return
    with tempfile.TemporaryDirectory() as temporary:
        o.folder = o.folder or Path(temporary)
        compare(o)


def compare(o: argparse.Namespace) -> None:
    flags = [*sys.argv[1:], "--folder", str(o.folder)]

    def part(python: str, name: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            [python, __file__, *flags, "--part", name],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def dantinox(*arguments: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "dantinox", *arguments], check=True, stdout=sys.stderr
        )

    if not o.torch and not (o.folder / "run").exists():
        random_run(o.folder / "run", {
            "dim": o.dim, "n_heads": o.heads, "kv_heads": o.kv_heads, "head_size": o.head_size,
            "num_blocks": o.layers, "hidden_dim": o.hidden, "max_context": 2048,
        })  # fmt: skip
    if o.torch and not (o.folder / "hf").exists():
        part(o.torch, "make")
    if not (o.folder / "run").exists():
        dantinox("import", str(o.folder / "hf"), "--run_dir", str(o.folder / "run"))
    peers = {"ours": sys.executable} | ({"transformers": o.torch} if o.torch else {})
    lines = [
        line
        for _ in range(o.rounds)
        for name, python in peers.items()
        for line in part(python, name)
    ]
    for batch in o.batch:
        own = [line for line in lines if line["batch"] == batch]
        best: dict[str, float] = {}
        for line in own:
            best[line["peer"]] = max(line["decode_tok_per_s"], best.get(line["peer"], 0.0))
        tokens = {line["peer"]: line["tokens"] for line in own}
        agree = {
            peer: sum(x == y for x, y in zip(ids, tokens["dantinox"], strict=True))
            for peer, ids in tokens.items()
        }
        print(json.dumps({
            "batch": batch, "weights": o.weights, "torch_weights": o.torch_weights,
            "decode_tok_per_s": {peer: round(rate, 1) for peer, rate in best.items()},
            "ours_over": {peer: round(best["dantinox"] / rate, 2) for peer,
                          rate in best.items() if peer != "dantinox"},
            "prefill_s": {peer: round(min(x["prefill_s"] for x in own if x["peer"] == peer),
                                      3) for peer in best},
            "tokens_as_ours": {peer: f"{same} of {o.new}" for peer,
                               same in agree.items() if peer != "dantinox"},
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
