"""The garbage collector is off while a command starts, and works afterwards."""

import subprocess
import sys


def test_collection_pauses():
    """It resumes in this process after the pause, and at once in a child process."""
    code = """
import gc, os
from dantinox.cli.garbage_collection import pause_garbage_collection
timer = pause_garbage_collection(0.2)
print(gc.isenabled(), gc.get_freeze_count())
child = os.fork()
if child == 0:
    os._exit(0 if gc.isenabled() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
timer.join()
print(gc.isenabled(), gc.get_freeze_count() > 1000)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["False 0", "0", "True True", ""]
