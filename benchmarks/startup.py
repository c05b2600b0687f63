"""Measures the seconds from the start of `generate.py` to its first text and to its end, in several
processes.

The benchmark runs `generate.py` on a run directory several times and reads its text from a pipe.
The first start fills the compilation cache if it is empty; later starts show how long a user waits.
With `--chat` the prompt is a message in the model's chat template.

    python benchmarks/startup.py RUN [--chat] [--prompt TEXT] [--new 64] [--repeats 4]
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from common import Parser, random_run


def measure(run_dir: str, prompt: str, chat: bool, new: int) -> dict[str, float]:
    script = Path(__file__).resolve().parent.parent / "generate.py"
    command = [
        sys.executable,
        str(script),
        "--run_dir",
        run_dir,
        "--prompt",
        prompt,
        "--stream",
        "--max_new_tokens",
        str(new),
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    with subprocess.Popen(
        [*command, *["--chat"] * chat], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        process.stdout.read((0 if chat else len(prompt.encode())) + 1)
        first = time.perf_counter() - start
        process.stdout.read()
    if process.returncode:
        sys.exit(f"generate.py failed with code {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = {"first_text_s": first, "total_s": time.perf_counter() - start}
    seconds["cpu_s"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {name: round(value, 2) for name, value in seconds.items()}


def main() -> None:
    a = Parser(__doc__, smoke={"new": 8, "repeats": 1})
    a.add_argument("run_dir", nargs="?")
    a.add_argument("--chat", action="store_true")
    a.add_argument("--prompt", default="def ")
    a.add_argument("--new", type=int, default=64)
    a.add_argument("--repeats", type=int, default=4)
    o = a.parse_args()
    o.run_dir = o.run_dir or (str(random_run()) if o.smoke else None)
    a.require(run_dir=o.run_dir)
    for number in range(o.repeats):
        print(
            json.dumps({"start": number + 1} | measure(o.run_dir, o.prompt, o.chat, o.new)),
            flush=True,
        )


if __name__ == "__main__":
    main()
