"""Imports every damaged variant of a published GGUF file, and of the Hugging Face folder exported
from it.

    python -m tests.interop.damaged_live FILE.gguf [WORK_FOLDER]

A command must exit with status 2 and an error in one sentence, write nothing, and use at most 5
seconds and 700 MB.
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


def attempt(source: Path, folder: Path) -> tuple[str, float, int, list[str]]:
    """Runs an import; returns its message, its CPU seconds, its peak memory in kB, and the list of
    violations.
    """
    before = sorted(folder.rglob("*"))
    command = [*DANTINOX, "import", str(source), "--run_dir", str(folder / "run")]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = min(usage.ru_utime + usage.ru_stime, time.perf_counter() - start)
    wrong = [] if process.returncode == 2 else [f"status {process.returncode}"]
    message = output.removeprefix("error: ").removesuffix("\n")
    wrong += (
        [] if output.startswith("error: ") and is_one_sentence(message) else ["not one sentence"]
    )
    wrong += [] if sorted(folder.rglob("*")) == before else ["files written"]
    wrong += [f"{seconds:.1f} s"] if seconds > SECONDS else []
    wrong += [f"{usage.ru_maxrss >> 10} MB"] if usage.ru_maxrss > KILOBYTES else []
    return message, seconds, usage.ru_maxrss, wrong


def main(source: Path, work: Path) -> int:
    subprocess.run([*DANTINOX, "import", str(source), "--run_dir", str(work / "whole")], check=True)
    subprocess.run(
        [*DANTINOX, "export", str(work / "whole"), str(work / "hf"), "--type", "bf16"], check=True
    )
    bad = slowest = largest = count = 0
    for suffix, variants in ((".gguf", damaged_gguf(source)), ("", folders(work / "hf"))):
        for name, write in variants:
            with tempfile.TemporaryDirectory(dir=work) as folder:
                path = Path(folder) / f"x{suffix}"
                # The measured peak memory of a command includes that of its parent process, so the
                # parent must stay small.
                writer = multiprocessing.get_context("fork").Process(target=write, args=(path,))
                writer.start()
                writer.join()
                assert writer.exitcode == 0, name
                message, seconds, memory, wrong = attempt(path, Path(folder))
            count, bad = count + 1, bad + bool(wrong)
            slowest, largest = max(slowest, seconds), max(largest, memory)
            print(
                f"{'BAD ' + ', '.join(wrong) if wrong else 'ok'}: {suffix or 'folder'} {name},"
                f" {seconds:.1f} s: {message}",
                flush=True,
            )
    print(
        f"{count - bad} of {count} rejected in one sentence; at most {slowest:.1f} s and"
        f" {largest >> 10} MB"
    )
    return bool(bad)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else folder)))
