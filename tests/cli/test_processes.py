"""Commands as processes: encodings, pipes, full disks and interrupts."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.expected import AROUND, ROOT, SUMMARY


def process(environment, *argv, script="generate.py", **options):
    return subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, argv)],
        capture_output="stdout" not in options, env=environment, timeout=120, **options,
    )  # fmt: skip


@pytest.mark.slow
def test_a_process_writes_utf8_in_every_locale(environment, run_dir, tmp_path):
    """In another folder, with the prompt from stdin and without a terminal. Compiled programs go to
    the user's cache.
    """
    done = process(
        environment | {"PYTHONIOENCODING": "ascii"}, "--run_dir", run_dir, "--prompt", "-",
        "--greedy", "--max_new_tokens", 12, input=b"xa", cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout.decode()) == (0, "xa" + AROUND[:6] + "\n")
    assert re.fullmatch(SUMMARY, done.stderr.decode())
    assert any((Path(environment["XDG_CACHE_HOME"]) / "dantinox").rglob("*"))
    assert list(tmp_path.iterdir()) == [], "generation writes no files"


HELP = [sys.executable, "-m", "dantinox", "--help"]


def test_help_needs_no_jax(environment):
    script = (
        "import sys; sys.argv = ['dantinox', '--help']\ntry:\n import dantinox.cli as c;"
        " c.entry()\nexcept SystemExit: pass\n"
    )
    script += (
        "assert not {'jax', 'flax', 'numpy', 'tokenizers'} & set(sys.modules), 'heavy imports'"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env=environment, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"generate" in done.stdout and done.stderr == b""


@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_help_into_a_closed_pipe(environment):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        HELP, stdout=writer, stderr=subprocess.PIPE, env=environment, cwd=ROOT, timeout=60
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_help_on_a_full_disk(environment):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            HELP, stdout=full, stderr=subprocess.PIPE, env=environment, cwd=ROOT, timeout=60
        )
    assert (done.returncode, done.stderr.decode()) == (
        2,
        "error: the output: No space left on device\n",
    )


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="pipes of a shell")
@pytest.mark.parametrize("reader", ["head -c 3", "true"])
def test_a_closed_pipe_is_not_an_error(environment, run_dir, reader):
    argv = [
        sys.executable,
        f"{ROOT}/generate.py",
        "--run_dir",
        f"{run_dir}",
        "--prompt",
        "a",
        "--greedy",
        "--max_new_tokens",
        "100",
    ]
    command = f"{shlex.join(argv)} | {reader}"
    done = subprocess.run(command, shell=True, capture_output=True, env=environment, timeout=120)
    assert "aè".encode().startswith(done.stdout)
    assert done.stderr == b"" or re.fullmatch(SUMMARY, done.stderr.decode()), done.stderr.decode()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_a_full_disk_is_one_sentence(environment, run_dir):
    with open("/dev/full", "wb") as full:
        done = process(
            environment,
            "--run_dir",
            run_dir,
            "--prompt",
            "a",
            "--max_new_tokens",
            2,
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert done.returncode == 2
    assert done.stderr.decode().splitlines()[-1] == "error: the output: No space left on device"
    assert b"Traceback" not in done.stderr and b"ignored" not in done.stderr


BUSY = """
import hashlib, signal, sys, threading
from dantinox import cli
own = sys.argv.pop(1) == "own handler"
def work(options):  # a call that does not return to Python for minutes, like a large program
    if own:
        signal.signal(signal.SIGINT, lambda *_: None)
    threading.Timer(0.3, lambda: print("busy", flush=True)).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 5_000_000 if own else 2_000_000_000)
    return 7
cli.main = lambda argv: work(argv)
cli.entry()
"""


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("handler", "code", "says"), [("none", 130, "interrupted\n"), ("own handler", 7, "")]
)
def test_ctrl_c_during_a_call_that_does_not_return(environment, handler, code, says):
    argv = [sys.executable, "-c", BUSY, handler]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as running:
        assert running.stdout.readline() == "busy\n"
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (code, says)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_during_generation(environment, run_dir, tmp_path):
    """Prints the text so far and one word on stderr, and exits with 130."""
    argv = [
        sys.executable,
        ROOT / "generate.py",
        "--run_dir",
        run_dir,
        "--prompt",
        "a",
        "--max_new_tokens",
        "100",
        "--stream",
    ]
    for attempt in range(3):  # Python loses an interrupt that arrives in a finalizer
        own = environment | {
            "XDG_CACHE_HOME": str(tmp_path / str(attempt))
        }  # a second of compilation follows the prompt
        with subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=own
        ) as running:
            assert running.stdout.read(1) == b"a"
            running.send_signal(signal.SIGINT)
            _, err = running.communicate(timeout=60)
        if running.returncode != 0:
            break
    assert (running.returncode, err.decode()) == (130, "interrupted\n")
