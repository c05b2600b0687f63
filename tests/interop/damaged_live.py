"""Every damaged variant of a published GGUF file, and of the folder of transformers made of it, through the command line.

    python -m tests.interop.damaged_live FILE.gguf [WORK_FOLDER]

A command must end with status 2 and one sentence, write nothing, and take at most 5 seconds and 700 MB.
"""

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .damaged import FOLDERS, damaged_gguf, is_one_sentence

DANTINOX = (sys.executable, "-m", "dantinox")
SECONDS, KILOBYTES = 5.0, 700_000


def folders(source: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    for name, change in FOLDERS.items():

        def write(path: Path, change: Callable[[Path], object] = change) -> None:
            shutil.copytree(source, path)
            change(path)

        yield name, write


def attempt(source: Path, place: Path) -> tuple[str, float, int, list[str]]:
    """The message of an import, its seconds of CPU, its peak memory in kB, and what is wrong with them."""
    before = sorted(place.rglob("*"))
    command = [*DANTINOX, "import", str(source), "--run_dir", str(place / "run")]
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = min(usage.ru_utime + usage.ru_stime, time.perf_counter() - begun)
    wrong = [] if process.returncode == 2 else [f"status {process.returncode}"]
    message = output.removeprefix("error: ").removesuffix("\n")
    wrong += [] if output.startswith("error: ") and is_one_sentence(message) else ["not one sentence"]
    wrong += [] if sorted(place.rglob("*")) == before else ["something written"]
    wrong += [f"{seconds:.1f} s"] if seconds > SECONDS else []
    wrong += [f"{usage.ru_maxrss >> 10} MB"] if usage.ru_maxrss > KILOBYTES else []
    return message, seconds, usage.ru_maxrss, wrong


def main(source: Path, work: Path) -> int:
    subprocess.run([*DANTINOX, "import", str(source), "--run_dir", str(work / "whole")], check=True)
    subprocess.run([*DANTINOX, "export", str(work / "whole"), str(work / "hf"), "--type", "bf16"], check=True)
    bad = slowest = largest = count = 0
    for suffix, variants in ((".gguf", damaged_gguf(source)), ("", folders(work / "hf"))):
        for name, write in variants:
            with tempfile.TemporaryDirectory(dir=work) as place:
                path = Path(place) / f"x{suffix}"
                # A command is charged with the memory of the process that starts it: this one stays small.
                writer = multiprocessing.get_context("fork").Process(target=write, args=(path,))
                writer.start()
                writer.join()
                assert writer.exitcode == 0, name
                message, seconds, memory, wrong = attempt(path, Path(place))
            count, bad = count + 1, bad + bool(wrong)
            slowest, largest = max(slowest, seconds), max(largest, memory)
            print(
                f"{'BAD ' + ', '.join(wrong) if wrong else 'ok'}: {suffix or 'folder'} {name}, {seconds:.1f} s: {message}",
                flush=True,
            )
    print(f"{count - bad} of {count} refused in a sentence; at most {slowest:.1f} s and {largest >> 10} MB")
    return bool(bad)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else folder)))
