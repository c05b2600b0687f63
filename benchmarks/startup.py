"""How long a person waits: from the start of `generate.py` to its first text, by process.

Runs `generate.py` on a run directory several times, streaming to a pipe, and prints the seconds to the first byte behind the
prompt and to the end. The first run fills the compilation cache; the others are what a user feels.

    python benchmarks/startup.py runs/quickstart
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

PROMPT = "def "


def measure(run_dir: str) -> dict[str, float]:
    script = Path(__file__).resolve().parent.parent / "generate.py"
    command = [sys.executable, str(script), "--run_dir", run_dir, "--prompt", PROMPT, "--stream", "--max_new_tokens", "64"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(len(PROMPT))
        process.stdout.read(1)
        first = time.perf_counter() - start
        process.stdout.read()
    if process.returncode:
        sys.exit(f"generate.py failed with code {process.returncode}")
    return {"first_token_s": round(first, 2), "total_s": round(time.perf_counter() - start, 2)}


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("run_dir")
    a.add_argument("--repeats", type=int, default=4)
    o = a.parse_args()
    for number in range(o.repeats):
        print(json.dumps({"peer": "dantinox", "start": number + 1} | measure(o.run_dir)), flush=True)


if __name__ == "__main__":
    main()
