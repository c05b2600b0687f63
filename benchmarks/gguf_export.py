"""Compares a run with its export to GGUF in llama.cpp: logits, greedy tokens and tokenization.

Prints one JSON line per GGUF type. `logits` is the largest difference of logits over `prompts`
lines of the text and their continuations by DantinoX. `same_choice` is the share of DantinoX's
tokens for which llama.cpp, given the same preceding tokens, chooses the same token. For
`same_tokens`, llama.cpp continues the prompts by itself; it is the share of positions at which the
two continuations have equal tokens. `same_lines` is the share of lines that are encoded to the same
tokens.

    python benchmarks/gguf_export.py runs/quickstart --text file.py --peer /path/to/python-with-llama-cpp
    python benchmarks/gguf_export.py --families --peer /path/to/python-with-llama-cpp

With `--families`, the logits of a small random model of every family are compared. Options that
llama.cpp does not support are replaced by the same values as in the tests.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from common import Parser, random_run, use_threads

from dantinox.cli.runs import EXPORT_TYPES


def parse() -> argparse.Namespace:
    a = Parser(__doc__, smoke={"text": __file__, "prompts": 2, "new": 8, "lines": 20})
    a.add_argument("run", nargs="?")
    a.add_argument(
        "--families",
        action="store_true",
        help="compare small random models of all families instead of a run",
    )
    a.add_argument("--only", nargs="+", help="only these families (with --families)")
    a.add_argument(
        "--text", help="a file; some of its lines are prompts, and its lines are tokenized"
    )
    a.add_argument("--peer", help="a Python interpreter with llama-cpp-python")
    a.add_argument("--types", nargs="+", default=["f32", "q8_0"], choices=EXPORT_TYPES)
    a.add_argument("--prompts", type=int, default=20)
    a.add_argument("--new", type=int, default=64, help="new tokens per prompt")
    a.add_argument("--lines", type=int, default=10_000)
    a.add_argument("--threads", type=int, default=2)
    o = a.parse_args()
    if o.smoke and not o.families and o.run is None:
        o.run = random_run()
    a.require(peer=o.peer or ("none" if o.smoke else None))
    if not o.families and (o.run is None or o.text is None):
        a.error("give a run and --text, or --families")
    return o


def run_llamacpp(peer: str, folder: Path, job: dict) -> dict[str, np.ndarray]:
    """Runs a job in llama.cpp and returns its answer."""
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    subprocess.run(
        [peer, Path(__file__).with_name("gguf_peer.py"), folder],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    return dict(np.load(folder / "answer.npz"))


def families(o: argparse.Namespace) -> None:
    """Prints a line for each family: the largest difference of logits over 80 random tokens."""
    import jax.numpy as jnp

    sys.path.insert(0, str(Path(__file__).parent.parent))
    from dantinox.interop.gguf.gguf_checkpoint import export_gguf
    from dantinox.interop.hf.hf_weights import to_hf
    from dantinox.model.parameters import abstract_model
    from tests.interop.test_gguf import NAMED, SYMBOLS, TOKENIZER, config_of, model_of

    rng = np.random.default_rng(4)
    for name, family in NAMED.items():
        if o.only and name not in o.only:
            continue
        config = config_of(name)
        settings, weights = model_of(config)
        for parameter, array in weights.items():
            if array.ndim == 1:
                array *= 0.2
            elif parameter == "embed":
                array *= 0.35
            else:
                inputs = array.shape[1 if "experts" in parameter else 0]
                array *= 1.3 / inputs**0.5
            array += float(parameter.endswith("scale") and not family.norms_plus_one)
        model = abstract_model(settings.architecture(SYMBOLS))[0](
            {key: jnp.asarray(array) for key, array in weights.items()}
        )
        tokens_BT = rng.integers(0, 64, (2, 40))
        logits_BTV = np.asarray(
            model(jnp.asarray(tokens_BT), jnp.broadcast_to(jnp.arange(40), (2, 40)))[0]
        )
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.gguf"
            export_gguf(file, settings, *to_hf(settings, SYMBOLS, weights, config), TOKENIZER)
            job = {
                "file": str(file),
                "sequences": tokens_BT.tolist(),
                "prompts": [],
                "new": 16,
                "lines": [],
                "threads": o.threads,
            }
            theirs = run_llamacpp(o.peer, Path(folder), job)["logits"].reshape(logits_BTV.shape)
        worst, largest = (
            float(np.abs(values).max()) for values in (theirs - logits_BTV, logits_BTV)
        )
        differ = int((theirs.argmax(-1) != logits_BTV.argmax(-1)).sum())
        row = {
            "family": name,
            "arch": family.arch,
            "logits": worst,
            "largest_logit": largest,
            "likeliest_differ": differ,
        }
        print(json.dumps(row), flush=True)


def main() -> None:
    o = parse()
    if o.families:
        families(o)
        return
    use_threads(o.threads)  # before jax starts its threads
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
    positions_BT = np.array(
        [[*range(len(tokens)), *[-1] * (T - len(tokens))] for tokens in sequences]
    )
    read = jax.jit(lambda tokens_BT, positions_BT: run.model(tokens_BT, positions_BT)[0])
    logits_BTV = np.asarray(read(jnp.asarray(tokens_BT), jnp.asarray(positions_BT)))
    ours = np.concatenate([logits_BTV[row, : len(tokens)] for row, tokens in enumerate(sequences)])
    # The positions from the last prompt token on. The logits at these positions determine the
    # continuation by DantinoX.
    chosen = np.concatenate(
        [
            np.arange(-o.new - 1, -1) + end
            for end in np.cumsum([len(tokens) for tokens in sequences])
        ]
    )
    lines = (
        [lines[i * len(lines) // o.lines] for i in range(o.lines)]
        if len(lines) > o.lines
        else lines
    )
    line_ids = [run.tokenizer.encode(line) for line in lines]
    for kind in o.types:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.gguf"
            export = [
                sys.executable,
                "-m",
                "dantinox",
                "export",
                o.run,
                file,
                "--format",
                "gguf",
                "--type",
                kind,
            ]
            subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
            job = {
                "file": str(file),
                "sequences": sequences,
                "prompts": ids,
                "new": o.new,
                "lines": lines,
            }
            job["threads"] = o.threads
            size = file.stat().st_size
            answer = run_llamacpp(o.peer, Path(folder), job) if o.peer else None
        if answer is None:
            print(
                json.dumps({"type": kind, "megabytes": round(size / 1e6, 2), "peer": None}),
                flush=True,
            )
            continue
        theirs = answer["logits"]
        ends = np.cumsum(answer["lengths"])[:-1]
        same = [
            a == b.tolist() for a, b in zip(line_ids, np.split(answer["tokens"], ends), strict=True)
        ]
        row = {
            "type": kind,
            "megabytes": round(size / 1e6, 2),
            "logits": float(np.abs(theirs - ours).max()),
            "largest_logit": float(np.abs(ours).max()),
            "same_choice": float(np.mean(theirs[chosen].argmax(-1) == ours[chosen].argmax(-1))),
            "same_tokens": float(
                np.mean(answer["continued"] == np.array([result.tokens for result in results]))
            ),
            "same_lines": float(np.mean(same)),
            "lines": len(lines),
            "same_text": float(answer["same_text"]),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
