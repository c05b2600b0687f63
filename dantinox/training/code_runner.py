"""The process that runs the code of one answer and its tests under resource limits; started by
`code_execution` for the rewards of `rewards`.

The working directory holds answer.py and test_0.py, test_1.py, …. Standard input is a JSON object
with the number of tests, the limits, and a random token. A line `token number` on standard output
reports a test that passed.
"""

import json
import os
import resource
import runpy
import sys

MAX_FILE_BYTES = 1 << 20
MAX_OPEN_FILES = 64
# Audit events of new processes, signals to other processes and sockets. They matter for root, who
# is exempt from RLIMIT_NPROC.
REFUSED_EVENTS = (
    "os.fork", "os.posix_spawn", "os.exec", "os.spawn", "os.system", "os.kill", "subprocess.",
    "pty.", "signal.pthread_kill",
    "socket.",
)  # fmt: skip


def refuse_processes(event: str, _: object) -> None:
    if event.startswith(REFUSED_EVENTS):
        raise PermissionError(f"{event} is not allowed")


def main() -> None:
    request = json.load(sys.stdin)
    report = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    for kind, limit in (
        (resource.RLIMIT_CPU, request["cpu_seconds"]),
        (resource.RLIMIT_AS, request["memory_bytes"]),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    sys.addaudithook(refuse_processes)
    names = runpy.run_path("answer.py", run_name="answer")
    for number in range(request["tests"]):
        try:
            runpy.run_path(f"test_{number}.py", names, "test")
        except BaseException:  # a test may also call sys.exit or raise KeyboardInterrupt
            continue
        os.write(report, f"{request['token']} {number}\n".encode())


if __name__ == "__main__":
    main()
