"""Trains a small run and kills itself: `train_until_killed.py DIRECTORY [resume] [after N | at SECONDS | slow N]`.

`after N`: when any thread opens, renames, creates or removes a file or directory in the run for the Nth time. Saving is a
sequence of such events, so about every second N is inside a save.

`slow N`: is not killed, but from the Nth step on a step takes half a second.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
WATCHED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


def main(path, *arguments):
    from training.small import Workshop, small_config, small_store

    events = 0
    config = small_config(training__checkpoint_every=4, training__eval_every=8, logging__log_every=1)
    store = small_store(config)
    batch = store.batch

    def slow_batch(step):
        time.sleep(0.5 * ("slow" in arguments and step >= int(arguments[-1])))
        return batch(step)

    store.batch = slow_batch

    def watch(event, args):
        nonlocal events
        if event in WATCHED and str(args[0]).startswith(path):
            events += 1
            if "after" in arguments and events == int(arguments[-1]):
                os.kill(os.getpid(), signal.SIGKILL)

    if "at" in arguments:
        threading.Timer(float(arguments[-1]), os.kill, (os.getpid(), signal.SIGKILL)).start()
    sys.addaudithook(watch)
    resume = "resume" in arguments and (Path(path) / "run").exists()
    Workshop(Path(path), sys.stderr).train("run", config, resume=resume, store=store)
    print(events)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:  # the exit code of the command line
        sys.exit(128 + signal.SIGINT)
