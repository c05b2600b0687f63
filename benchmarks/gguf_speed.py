"""Compares the speed of DantinoX and llama.cpp on the same GGUF files.

Each round starts one process per file and program, one after another. DantinoX reads F32 and BF16
files as `--weights float32` and `bfloat16`, and keeps the blocks of the other types. For each file,
the script prints a JSON line with the best speeds in tokens per second: decoding of one and of
eight sequences after 64 prompt tokens, and prefill of one prompt of 512 tokens.

    python benchmarks/gguf_speed.py model-q8_0.gguf model-q4_k_m.gguf --llama /path/to/python-with-xllamacpp

This file also runs in the environment of llama.cpp, so it imports only the standard library at
module level.
"""

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from common import Parser, random_run, temporary_folder, use_threads

BATCH = 8
Speeds = dict[str, float]  # decode_1, decode_8 and prefill, in tokens per second


def parse() -> argparse.Namespace:
    a = Parser(__doc__, smoke={"new": 8, "prompt": 32, "rounds": 1, "repeats": 1})
    a.add_argument("files", nargs="*", type=Path, help="GGUF files")
    a.add_argument("--llama", help="a Python interpreter with xllamacpp")
    a.add_argument(
        "--matmul_dtype",
        choices=("auto", "bfloat16"),
        default="auto",
        help="as in `dantinox generate`",
    )
    for name, default in {
        "new": 128,
        "prompt": 512,
        "threads": 2,
        "rounds": 2,
        "repeats": 3,
    }.items():
        a.add_argument(f"--{name}", type=int, default=default)
    a.add_argument("--part", nargs=2, help=argparse.SUPPRESS)  # the program and its run or file
    return a.parse_args()


def ours(o: argparse.Namespace, run_dir: str) -> Speeds:
    import numpy as np

    import dantinox
    from dantinox.generation.static_batch import StaticBatch
    from dantinox.sampling import SamplingParams

    run = dantinox.load(run_dir)
    weights = {"F32": "float32", "BF16": "bfloat16"}.get(Path(run_dir).name.split("-")[0], "auto")
    model = run.prepared(
        run.settings({"weights": weights, "matmul_dtype": o.matmul_dtype}).generation
    )

    def seconds(batch: int, prompt: int, new: int) -> float:
        ids = np.random.default_rng(0).integers(1, model.config.vocab_size, (batch, prompt))
        params = SamplingParams.build({"greedy": True}, batch=batch)

        def once() -> float:
            start = time.perf_counter()
            lengths = np.full(batch, prompt)
            session = StaticBatch(
                model, ids, lengths, params, limits_B=np.full(batch, new), eos_ids=[[]] * batch
            )
            for _ in session.run(dispatch_ahead=True):
                pass
            return time.perf_counter() - start

        once()
        return min(once() for _ in range(o.repeats))

    decode = {
        f"decode_{batch}": batch * (o.new - 1) / (seconds(batch, 64, o.new) - seconds(batch, 64, 1))
        for batch in (1, BATCH)
    }
    return decode | {"prefill": o.prompt / seconds(1, o.prompt, 1)}


def llama(o: argparse.Namespace, file: str) -> Speeds:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_parallel = BATCH
    params.n_ctx = BATCH * 1024
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = o.threads
    server = xllamacpp.Server(params)
    draw = random.Random(0)

    def request(prompt: int, new: int, timings: list[dict[str, Any]]) -> None:
        body = {"n_predict": new, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        answer = server.handle_completions(
            body | {"prompt": [draw.randrange(10, 256) for _ in range(prompt)]}
        )
        timings.append(
            (json.loads(answer) if isinstance(answer, str | bytes) else answer)["timings"]
        )

    def timings(count: int, prompt: int, new: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        threads = [
            threading.Thread(target=request, args=(prompt, new, found)) for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def decode(count: int) -> float:
        found = timings(count, 64 if count == 1 else 16, o.new)
        return 1e3 * sum(x["predicted_n"] for x in found) / max(x["predicted_ms"] for x in found)

    rates = {
        f"decode_{count}": max(decode(count) for _ in range(o.repeats)) for count in (1, BATCH)
    }
    return rates | {
        "prefill": max(timings(1, o.prompt, 1)[0]["prompt_per_second"] for _ in range(o.repeats))
    }


def main() -> None:
    o = parse()
    if o.part:
        use_threads(o.threads)
        print(json.dumps({"ours": ours, "llama": llama}[o.part[0]](o, o.part[1])))
        return
    folder = temporary_folder()

    def dantinox(*arguments: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "dantinox", *arguments], check=True, stdout=sys.stderr
        )

    if o.smoke and not o.files:
        o.files = [folder / "model-q8_0.gguf"]
        dantinox("export", str(random_run()), str(o.files[0]), "--format", "gguf", "--type", "q8_0")

    def part(python: str, name: str, source: Path) -> Speeds:
        flags = [
            f"--{key}={getattr(o, key)}"
            for key in ("new", "prompt", "threads", "repeats", "matmul_dtype")
        ]
        done = subprocess.run(
            [python, __file__, *flags, "--part", name, str(source)],
            stdout=subprocess.PIPE,
            check=True,
        )
        speeds: Speeds = json.loads(done.stdout.splitlines()[-1])
        return speeds

    for number, file in enumerate(o.files):
        kind = next(
            (name for name in ("BF16", "F32") if name.lower() in file.name.lower()), "packed"
        )
        run = folder / f"{kind}-{number}"
        dantinox("import", str(file), "--run_dir", str(run))
        rounds: dict[str, list[Speeds]] = {"dantinox": [], "llama.cpp": []}
        for _ in range(o.rounds):
            rounds["dantinox"].append(part(sys.executable, "ours", run))
            if o.llama:
                rounds["llama.cpp"].append(part(o.llama, "llama", file))
        best = {
            peer: {name: round(max(x[name] for x in found), 1) for name in found[0]}
            for peer, found in rounds.items()
            if found
        }
        ratios = {
            name: round(best["dantinox"][name] / rate, 2)
            for name, rate in best.get("llama.cpp", {}).items()
        }
        print(json.dumps({"file": file.name, **best, "ratio": ratios}), flush=True)


if __name__ == "__main__":
    main()
